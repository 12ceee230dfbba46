"""What sharing by key costs on the daemon's one thread, inside a process: planning, joining and leaving, handing out.

Owns: the states in which that is timed, and the bytes of a hash that drains. Does not own: streams and durability.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection

import numpy as np

from benchmarks import report
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic import Topic
from daemon.core.index.positions import KeyedRows
from daemon.core.index.segments import SegmentCache
from daemon.core.key_shared import stats
from daemon.core.key_shared.draining_hashes import DrainingHashes
from daemon.core.key_shared.hash_slots import HASH_SLOTS
from daemon.core.key_shared.key_consumers import Joining
from daemon.core.key_shared.key_share import KeyShared
from daemon.errors import InvariantViolated
from storage_backends.formats.index_ids import SHARED
from storage_backends.formats.manifest import Subscription
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.formats.slot_format import AddRecord

CONSUMERS, KEYS, PLANNED_AT_ONCE = 100, 30_000, 1_000
PLANS_OF_ONE_STATE = 20
# So many hashes drain, and so many rows wait, where some do.
DRAINING, WAITING = 10_000, 100_000
STREAM, FIRST_NUMBER = 1, 10
PORTION = 1_000
MANY_PERMITS = 1 << 30
NOW_MS = 1_000_000

PLAN = "plan 1,000 with 100 consumers"
FREE, DRAINS, WAITS = "nothing waits", "10,000 hashes drain", "100,000 wait"
WORST = "worst"
JOIN, LEAVE = "join with 100,000 in flight", "leave with 100,000 in flight"
GIVEN_ON = "what it held handed out again, a step"
DRAINING_BYTES = "a draining hash, of 10,000"
HAND_OUT, WITH_ACKNOWLEDGEMENT = "handed out", "handed out and acknowledged"
RATIO = "KEY_SHARED / SHARED"
# Rows that were not handed out, or held by nobody; must be 0.
LOST = "lost"
_PLANS = [f"{PLAN}, {state}" for state in (FREE, DRAINS, WAITS)]
_STEPS = [JOIN, LEAVE, f"{LEAVE}, {GIVEN_ON}"]
UNITS = {
    **{f"{name}{worst}": "ms" for name in (*_PLANS, *_STEPS) for worst in ("", f", {WORST}")},
    DRAINING_BYTES: "B",
    **{f"{name}, {kind}": "rows/s" for name in (HAND_OUT, WITH_ACKNOWLEDGEMENT) for kind in ("SHARED", "KEY_SHARED")},
    **{f"{name}, {RATIO}": "x" for name in (HAND_OUT, WITH_ACKNOWLEDGEMENT)},
}
GOALS = {
    **{name: report.Goal(most=2) for name in _PLANS},
    **{f"{name}, {WORST}": report.Goal(most=5) for name in _STEPS},
    DRAINING_BYTES: report.Goal(most=80),
}


def measure(quick: bool, seed: int, parent: Connection) -> None:
    """Runs in a process of its own: sends that it is ready, and then the figures by name."""
    parent.send("ready")
    random = np.random.default_rng(seed)
    times = 20 if quick else 500
    changes = _changes(random, 5 if quick else 50)
    hand_outs = _hand_outs(random, 50_000 if quick else 1_000_000)
    figures = {
        **_timed(f"{PLAN}, {FREE}", _plans_where_nothing_waits(random, times)),
        **_timed(f"{PLAN}, {DRAINS}", _plans_where_hashes_drain(random, times)),
        **_timed(f"{PLAN}, {WAITS}", _plans_where_rows_wait(random, times)),
        **changes,
        DRAINING_BYTES: _draining_bytes(),
        **hand_outs,
        LOST: abs(changes[LOST]) + abs(hand_outs[LOST]),
    }
    parent.send(figures)


def _timed(name: str, taken_s: Iterable[float]) -> dict[str, float]:
    taken = [1_000 * each for each in taken_s]
    return {name: statistics.median(taken), f"{name}, {WORST}": max(taken)}


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class _Shared:
    """A topic whose subscription is open as KEY_SHARED, with consumers on one stream; positions are planned on it."""

    def __init__(self, random: np.random.Generator) -> None:
        self.topic, self.state = _topic()
        self.topic.key_sharing.begin(self.state)
        self.topic.open(self.state, STREAM)
        self._random = random
        self._hashes = random.choice(HASH_SLOTS, KEYS, replace=False).astype(np.uint32)
        self._next_entry = 0
        self._next_number = FIRST_NUMBER

    @property
    def keys(self) -> KeyShared:
        if self.state.key_shared is None:
            raise InvariantViolated("the subscription is not open as KEY_SHARED")
        return self.state.key_shared

    def join(self, count: int, permits: int = MANY_PERMITS) -> None:
        numbers = range(self._next_number, self._next_number + count)
        self._next_number += count
        self.keys.join([Joining(number, STREAM, f"consumer {number}", permits=permits) for number in numbers])

    def positions(self, count: int) -> Rows:
        """The next ones of the log, of any keys."""
        first = self._next_entry
        self._next_entry += count
        entry_id = np.arange(first, first + count, dtype=np.uint64)
        hashes = self._random.choice(self._hashes, count)
        return Rows(np.zeros(count, np.uint64), np.ones(count, np.uint64), entry_id, hashes)

    def plan(self, positions: Rows) -> int:
        """How many of them are at a consumer now."""
        consumers = self.topic.key_sharing.plan(self.state, STREAM, positions, elapsed_ms=0)
        return int(np.count_nonzero(consumers))

    def plan_many(self, count: int) -> int:
        return sum(self.plan(self.positions(PORTION)) for _ in range(count // PORTION))

    def acknowledge_all(self) -> None:
        """What was planned so far."""
        self.keys.plans.mark_delete(1, self._next_entry)


def _topic() -> tuple[Topic, SubscriptionState]:
    subscription = Subscription(subscription_id=1, name="consumers", since_ms=0, created_slot=ShardSlot(0))
    topic = Topic("keys", "keys", 1, [subscription], now_ms=NOW_MS, cache=SegmentCache(1 << 30), ready_rows_max=1 << 30)
    return topic, topic.subscriptions[1]


# ---- planning


def _plans_where_nothing_waits(random: np.random.Generator, times: int) -> Iterator[float]:
    shared = _Shared(random)
    shared.join(CONSUMERS)
    for _ in range(times):
        positions = shared.positions(PLANNED_AT_ONCE)
        yield _seconds(functools.partial(shared.plan, positions))
        shared.acknowledge_all()


def _plans_where_hashes_drain(random: np.random.Generator, times: int) -> Iterator[float]:
    """Half of the consumers hold rows of all keys, the other half joined since and has half of these."""
    for _ in range(times // PLANS_OF_ONE_STATE):
        shared = _Shared(random)
        shared.join(CONSUMERS // 2)
        shared.plan_many(2 * KEYS)
        shared.join(CONSUMERS // 2)
        draining = len(stats.draining_hashes(shared.keys))
        if draining < DRAINING:
            raise InvariantViolated(f"{draining:,} hashes drain, not {DRAINING:,}")
        for _ in range(PLANS_OF_ONE_STATE):
            positions = shared.positions(PLANNED_AT_ONCE)
            yield _seconds(functools.partial(shared.plan, positions))


def _plans_where_rows_wait(random: np.random.Generator, times: int) -> Iterator[float]:
    """Half of the consumers have no permits."""
    for _ in range(times // PLANS_OF_ONE_STATE):
        shared = _Shared(random)
        shared.join(CONSUMERS // 2)
        shared.join(CONSUMERS // 2, permits=0)
        while len(shared.keys.waiting) < WAITING:
            shared.plan_many(PORTION)
        for _ in range(PLANS_OF_ONE_STATE):
            positions = shared.positions(PLANNED_AT_ONCE)
            yield _seconds(functools.partial(shared.plan, positions))


# ---- consumers


def _changes(random: np.random.Generator, times: int) -> dict[str, float]:
    """One joins, and the one that has been there longest leaves; what it held goes to others."""
    shared = _Shared(random)
    shared.join(CONSUMERS)
    held = shared.plan_many(WAITING)
    joins, leaves, steps = [], [], []
    for number in range(FIRST_NUMBER, FIRST_NUMBER + times):
        joins.append(_seconds(lambda: shared.join(1)))
        leaves.append(_seconds(functools.partial(shared.keys.leave, [number])))
        while shared.keys.may_hand_out:
            steps.append(_seconds(lambda: shared.keys.hand_out(PORTION, elapsed_ms=0)))
    lost = held - len(shared.state.in_flight) - len(shared.keys.waiting)
    return {
        **_timed(JOIN, joins),
        **_timed(LEAVE, leaves),
        **_timed(f"{LEAVE}, {GIVEN_ON}", steps),
        LOST: lost,
    }


def _draining_bytes() -> float:
    slots = np.arange(DRAINING).astype(np.uint16)
    holders = np.ones(DRAINING, np.uint16)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        hashes = DrainingHashes()
        hashes.received(slots, holders)
        hashes.blocked(slots)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / DRAINING


# ---- handing out


def _hand_outs(random: np.random.Generator, count: int) -> dict[str, float]:
    """Everything is due and READY. By itself, and with each portion acknowledged before the next one."""
    figures: dict[str, float] = {LOST: 0}
    for name, acknowledges in ((HAND_OUT, False), (WITH_ACKNOWLEDGEMENT, True)):
        rates = []
        for portion_of in (_shared_portion, _keys_portion):
            topic, state = _due(random, count, by_key=portion_of is _keys_portion)
            seconds, rows = _handed_out(topic, state, portion_of(state), acknowledges=acknowledges)
            figures[LOST] += count - rows
            rates.append(rows / seconds)
        figures |= {
            f"{name}, SHARED": rates[0],
            f"{name}, KEY_SHARED": rates[1],
            f"{name}, {RATIO}": rates[1] / rates[0],
        }
    return figures


def _shared_portion(state: SubscriptionState) -> Callable[[], list[KeyedRows]]:
    return lambda: [state.hand_out(STREAM, PORTION)]


def _keys_portion(state: SubscriptionState) -> Callable[[], list[KeyedRows]]:
    keys = state.key_shared
    if keys is None:
        raise InvariantViolated("the subscription is not open as KEY_SHARED")
    numbers = range(FIRST_NUMBER, FIRST_NUMBER + CONSUMERS)
    keys.join([Joining(number, STREAM, f"consumer {number}", permits=MANY_PERMITS) for number in numbers])
    return lambda: [each.rows for each in keys.hand_out(PORTION, elapsed_ms=0)]


def _due(random: np.random.Generator, count: int, *, by_key: bool) -> tuple[Topic, SubscriptionState]:
    topic, state = _topic()
    if by_key:
        topic.key_sharing.begin(state)
    topic.open(state, STREAM)
    topic.catch_up(state, PORTION)
    hashes = random.choice(1 << 32, KEYS, replace=False).astype(np.uint32)
    entry_id = np.arange(count, dtype=np.uint64)
    due = random.integers(NOW_MS, 2 * NOW_MS, count).astype(np.uint64)
    rows = Rows(due, np.ones(count, np.uint64), entry_id, random.choice(hashes, count))
    topic.apply(AddRecord(topic.topic_id, topic.incarnation, SHARED, rows), 1, elapsed_ms=0)
    while topic.pass_due(2 * NOW_MS, count):
        pass
    return topic, state


def _handed_out(
    topic: Topic, state: SubscriptionState, portion: Callable[[], list[KeyedRows]], *, acknowledges: bool
) -> tuple[float, int]:
    """(seconds, rows), until there are no more."""
    gc.collect()
    total, slot = 0, 1
    began_s = time.perf_counter()
    while len(handed_out := KeyedRows.concat(portion())):
        total += len(handed_out)
        if acknowledges:
            slot += 1
            rows = handed_out.rows
            claims = HeldPositions(rows.ledger_id, rows.entry_id, rows.deliver_at_ms)
            for record in topic.acknowledging.stage(state, claims)[0]:
                topic.apply(record, slot, elapsed_ms=0)
    return time.perf_counter() - began_s, total
