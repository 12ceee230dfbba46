"""A daemon's memory against the truth, at a moment when nothing is under way.

Owns: the comparison: the same rows, each once, owed to the same subscriptions, and counts that are right.
Does not own: the truth (`oracle`), and when it is quiet (`run`).
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Mapping, Set

from daemon.call_values import View
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.bucket import Bucket
from daemon.core.index.position_keys import keys_of
from daemon.errors import Corruption
from daemon.topic.served_topic import ServedTopic
from storage_backends.formats.index_ids import subscription_of
from storage_backends.formats.row_columns import U32, Rows
from tests._support.engine_fixture import Daemon
from tests.simulation import given_properties, quiet_redelivery
from tests.simulation.columns import positions_of
from tests.simulation.history import History
from tests.simulation.oracle import Oracle, Row, TopicTruth
from tests.simulation.positions import Position, in_index, is_part, named

# What is due for so long must have been passed: the timer looks at the clock twice a second.
PASSED_AFTER_MS = 1_000
# Segments must have been read within this time, virtual seconds.
SETTLED_AFTER_S = 60.0
# What others merged is known within this time, virtual seconds.
LOOKED_AFTER_S = 70.0
# More than there ever are.
VIEW_ROWS = 1_000

# Of a row that people are shown: when it is due, ledger and entry, batch index.
Shown = tuple[int, ...]


async def compare(daemon: Daemon, oracle: Oracle, history: History) -> None:
    """Breaches whatever differs, once everything that is due has been passed."""
    for truth in oracle.topics.values():
        if truth.incarnation and not truth.deleted:
            await _compare(daemon, truth, oracle, history)
            if not oracle.objects.unreadable:
                try:
                    await _compare_views(daemon, truth, oracle, history)
                except Corruption:
                    # A bucket was merged by others and deleted at once, and its owner has not looked since.
                    await asyncio.sleep(LOOKED_AFTER_S)
                    await _compare_views(daemon, truth, oracle, history)


async def _compare(daemon: Daemon, truth: TopicTruth, oracle: Oracle, history: History) -> None:
    served = _served(daemon, truth)
    if served is None and not truth.rows and not truth.subscriptions:
        # A birth that nobody was told of: whoever asks for it next finds it.
        return
    if served is None:
        history.breach(f"topic {truth.name} is not served by {daemon.name}")
        return
    deadline_s = daemon.elapsed_s() + SETTLED_AFTER_S
    while served is None or (late := _due_and_not_passed(daemon, truth, served.core)):
        if daemon.elapsed_s() > deadline_s:
            what = "is served no longer" if served is None else f"{late} is due and was not passed"
            history.breach(f"topic {truth.name}: {what} in {SETTLED_AFTER_S:.0f} s")
            return
        await asyncio.sleep(0.5)
        # The shard may be lost meanwhile, and taken again: then the topic is another one.
        served = _served(daemon, truth)
    # A time-out may be deciding.
    shard = daemon.shards[served.shard.number]
    await daemon.until(lambda: oracle.last_slot(shard.number) <= shard.applied_slot)
    _compare_rows(truth, served.core, history)
    for state in served.core.subscriptions.values() if oracle.objects.properties.given else ():
        if state.properties != given_properties.of_policy(state.stored.policy):
            history.breach(f"topic {truth.name}: {state.stored.name} has {state.stored.policy} and {state.properties}")
    breach = functools.partial(_breach, history, truth.name)
    quiet_redelivery.compare(truth, served.core, oracle, _passed(served.core), breach)
    # Where a bucket does not say what it held, any add of its ledgers counts as one of what is missing.
    quarantined = [bucket for index in served.core.indexes.values() for bucket in index.quarantined.values()]
    known = all(bucket.positions_known for bucket in quarantined)
    if truth.missing and known and not truth.trimmed and not served.core.rebuild_needed():
        history.breach(f"topic {truth.name}: {sorted(truth.missing)} are missing and nobody is told")
    stats = await daemon.call(daemon.engine.requests.topic_stats(truth.name))
    if stats.pending != served.core.indexes.pending_rows:
        history.breach(f"topic {truth.name}: stats say {stats.pending} pending rows")


def _served(daemon: Daemon, truth: TopicTruth) -> ServedTopic | None:
    """The topic as the daemon serves it now."""
    return next((shard.topics[truth.name] for shard in daemon.shards.values() if truth.name in shard.topics), None)


def _breach(history: History, topic: str, text: str) -> None:
    history.breach(f"topic {topic}: {text}")


async def _compare_views(daemon: Daemon, truth: TopicTruth, oracle: Oracle, history: History) -> None:
    """What people are shown. Not where a bucket is damaged: they are told that it cannot be read.

    What counts as due is what was passed, a moment later than it is due. Whoever looks does not stop the timer: what is
    passed meanwhile may be shown as either.
    """
    served = _served(daemon, truth)
    if served is None:
        return
    requests = daemon.engine.requests
    breach = functools.partial(_breach, history, truth.name)
    entries = {position: row for position, row in truth.rows.items() if not is_part(position)}
    most = _as_shown(entries, entries.keys() - _passed(served.core))
    scheduled = await daemon.call(requests.list_scheduled(truth.name, View(), VIEW_ROWS, None))
    least = _as_shown(entries, entries.keys() - _passed(served.core))
    shown = _shown(scheduled.rows, None)
    if shown != sorted(shown):
        history.breach(f"topic {truth.name}: {shown} are shown as scheduled, and they are not in order")
    _compare_shown(f"topic {truth.name}, scheduled", shown, least, most, history)
    for number, stored in truth.subscriptions.items():
        owed = {position: row for position, row in truth.rows.items() if number in truth.owes(row)}
        least = _as_shown(owed, owed.keys() & _passed(served.core))
        passed_ms = quiet_redelivery.settled_ms(daemon, served.core.subscriptions[number])
        backlog = await daemon.call(requests.list_backlog(truth.name, stored.name, None, VIEW_ROWS, None))
        most = _as_shown(owed, owed.keys() & _passed(served.core))
        shown = _shown(backlog.rows, backlog.batch_index)
        _compare_shown(f"topic {truth.name}, backlog of {stored.name}", shown, least, most, history)
        quiet_redelivery.compare_backlog(truth, number, backlog, oracle.latest_ms(), passed_ms, breach)
    await quiet_redelivery.compare_views(daemon, served.core, truth, oracle, breach)


def _shown(rows: Rows, batch_index: U32 | None) -> list[Shown]:
    positions = (named(each) for each in positions_of(rows, batch_index, 0))
    return [(time, *entry, part) for time, (entry, part) in zip(rows.deliver_at_ms.tolist(), positions, strict=True)]


def _as_shown(rows: Mapping[Position, Row], positions: Set[Position]) -> collections.Counter[Shown]:
    """A position may have a row in several indexes: all of them look alike."""
    as_named = [(rows[each].deliver_at_ms, *named(each)) for each in positions]
    return collections.Counter((deliver_at_ms, *entry, part) for deliver_at_ms, entry, part in as_named)


def _compare_shown(
    place: str,
    shown: list[Shown],
    least: collections.Counter[Shown],
    most: collections.Counter[Shown],
    history: History,
) -> None:
    counted = collections.Counter(shown)
    if lacking := sorted((least - counted).elements()):
        history.breach(f"{place}: {lacking} are not shown")
    if extra := sorted((counted - most).elements()):
        history.breach(f"{place}: {extra} are shown")


def _passed(core: TopicState) -> set[Position]:
    return {position for bucket in _buckets(core) for position in _positions(core, bucket, passed=True)}


def _due_and_not_passed(daemon: Daemon, truth: TopicTruth, core: TopicState) -> Position | None:
    passed = _passed(core)
    due_ms = daemon.now_ms() - PASSED_AFTER_MS
    return next(
        (position for position, row in truth.rows.items() if row.deliver_at_ms <= due_ms and position not in passed),
        None,
    )


def _positions(core: TopicState, bucket: Bucket, *, passed: bool = False) -> list[Position]:
    ledger_id, entry_id = core.index.pages.positions(keys_of(bucket.passed if passed else bucket.present))
    positions = zip(ledger_id.tolist(), entry_id.tolist(), strict=True)
    return [in_index(position, bucket.index_id) for position in positions]


def _buckets(core: TopicState) -> list[Bucket]:
    """Of every index."""
    return [bucket for index in core.indexes.values() for bucket in index.buckets]


def _compare_rows(truth: TopicTruth, core: TopicState, history: History) -> None:
    held: dict[Position, Bucket] = {}
    for bucket in _buckets(core):
        for position in _positions(core, bucket):
            if position in held:
                history.breach(f"topic {truth.name}: {position} has two rows in memory")
            held[position] = bucket
    if lost := sorted(truth.rows.keys() - held.keys()):
        history.breach(f"topic {truth.name}: lost {lost}")
    if extra := sorted(held.keys() - truth.rows.keys()):
        history.breach(f"topic {truth.name}: came back {extra}")
    if core.subscriptions.keys() != truth.subscriptions.keys():
        history.breach(f"topic {truth.name}: subscriptions {sorted(core.subscriptions)} in memory")
    waiting = len(held) - sum(len(bucket.passed) for bucket in _buckets(core))
    if core.indexes.pending_rows != waiting:
        history.breach(f"topic {truth.name}: {core.indexes.pending_rows} pending rows are counted, there are {waiting}")
    for number in sorted(truth.subscriptions.keys() & core.subscriptions.keys()):
        _compare_backlog(truth, core, number, history)


def _compare_backlog(truth: TopicTruth, core: TopicState, number: int, history: History) -> None:
    """What a subscription is owed is the same, and its backlog counts what is due of that."""
    since_ms = truth.subscriptions[number].since_ms
    due = 0
    for bucket in _buckets(core):
        acknowledged = bucket.acknowledged.get(number, ())
        for key, position in zip(keys_of(bucket.present).tolist(), _positions(core, bucket), strict=True):
            row = truth.rows.get(position)
            if (
                row is None
                or subscription_of(row.index) not in (0, number)
                or (not row.index and row.deliver_at_ms <= since_ms)
            ):
                continue
            owed = key not in acknowledged
            if owed is (number in row.acknowledged):
                history.breach(f"topic {truth.name}: {position} owed to {number} is {owed} in memory")
            due += owed and key in bucket.passed
    counted = core.subscriptions[number].backlog
    if counted != due:
        history.breach(f"topic {truth.name}: subscription {number} counts a backlog of {counted}, there are {due}")
