"""A nack tracker and a dictionary side by side: nacks, nacks again, acknowledgements, what comes due.

Owns: the rules, and limits so small that a few rows are packed, merged and packed anew.
Does not own: what a nack means for its subscription (`redelivery_machine`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyroaring import BitMap64

from daemon.core.backlog import nack_tracker, packed_rows
from daemon.core.backlog.nack_tracker import NackTracker
from daemon.core.index.position_keys import KeyedRows, PagePlaces, PageTable
from storage_backends.formats.row_columns import U64, Rows
from tests.daemon.core._support.journaled_topic import ids_of

Position = tuple[int, int]
FAR_MS = 1 << 45
# Of several pages, among them neighbours, and ledgers in another order than they come.
POSITIONS: list[Position] = [
    (ledger, entry) for ledger in (9, 3, 1 << 50) for entry in (*range(6), 70_000, 1 << 32, (1 << 32) + 1, 1 << 47)
]
# More entries that do not count there are not; below that many are let be.
DEPARTED_ROWS = 6

positions = st.lists(st.sampled_from(POSITIONS), min_size=1, max_size=12, unique=True)
picks = st.integers(0, 1 << 16)


class Nacked(NamedTuple):
    redeliver_at_ms: int
    ledger_id: int
    entry_id: int
    deliver_at_ms: int
    key_hash: int
    schedule_id: bytes


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Inside, a few rows are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nack_tracker, "PART_ROWS", 12)
        patch.setattr(nack_tracker, "SETS_MAX", 2)
        patch.setattr(nack_tracker, "LINE_ROWS", 5)
        patch.setattr(nack_tracker, "LINE_PART_ROWS", 14)
        patch.setattr(nack_tracker, "LINES_MAX", 2)
        patch.setattr(nack_tracker, "FAN_OUT", 3)
        patch.setattr(nack_tracker, "SMALL_RUNS_MAX", 3)
        patch.setattr(nack_tracker, "SIZE_BITS", 1)
        patch.setattr(nack_tracker, "STEP_ROWS", 4)
        patch.setattr(nack_tracker, "DEPARTED_ROWS_MIN", DEPARTED_ROWS)
        yield


class NackTrackerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.places = PagePlaces()
        # Two indexes of a topic may have the same position.
        self.tables = [PageTable(self.places, owner=owner) for owner in (0, 1)]
        self.tracker = NackTracker(self.places)
        self.nacked: dict[int, Nacked] = {}
        self.now_ms = 1_000

    def nack(self, named: list[Position], times: list[int], *, index: int, deliver_at_ms: int, key_hash: int) -> None:
        ledger_id, entry_id = (np.array(column, np.uint64) for column in zip(*named, strict=True))
        keys = self.tables[index].intern(ledger_id, entry_id)
        own_time = np.array([deliver_at_ms if place % 3 else 0 for place in range(len(named))], np.uint64)
        hashes = np.array([key_hash * place for place in range(len(named))], np.uint32) if key_hash else None
        # Rows with and without ids come together, in one batch and in several.
        ids = ids_of([b"order-%d" % place if place % 2 else b"" for place in range(len(named))]) if key_hash else None
        rows = KeyedRows(Rows(own_time, ledger_id, entry_id, hashes, ids), keys)
        self.tracker.add(rows, np.array(times, np.uint64))
        self.nacked |= by_key(rows, np.array(times, np.uint64))

    @rule(
        named=positions,
        delay_ms=st.sampled_from((0, 100, 100, 5_000)),
        ordered=st.booleans(),
        index=st.sampled_from((0, 0, 1)),
        deliver_at_ms=st.sampled_from((0, 900)),
        key_hash=st.sampled_from((0, 7)),
    )
    def nack_with_one_delay(
        self, named: list[Position], delay_ms: int, ordered: bool, index: int, deliver_at_ms: int, key_hash: int
    ) -> None:
        named = sorted(named) if ordered else named
        times = [self.now_ms + delay_ms] * len(named)
        self.nack(named, times, index=index, deliver_at_ms=deliver_at_ms, key_hash=key_hash)

    @rule(named=positions, seed=st.randoms(use_true_random=False), far=st.booleans())
    def nack_with_any_delays(self, named: list[Position], seed: object, far: bool) -> None:
        times = [
            self.now_ms + seed.choice((1, 50, 300, 5_000, FAR_MS if far else 700))  # type: ignore[attr-defined]
            for _ in named
        ]
        self.nack(named, times, index=0, deliver_at_ms=0, key_hash=0)

    @precondition(lambda self: self.nacked)
    @rule(pick=picks, times=st.integers(1, 8))
    def nack_one_again_and_again(self, pick: int, times: int) -> None:
        chosen = sorted(self.nacked)[pick % len(self.nacked)]
        position = (self.nacked[chosen].ledger_id, self.nacked[chosen].entry_id)
        index = int(self.places.owners(np.array([chosen], np.uint64))[0])
        for number in range(times):
            self.nack([position], [self.now_ms + 3_600 + number], index=index, deliver_at_ms=0, key_hash=0)

    @precondition(lambda self: self.nacked)
    @rule(chosen=st.lists(picks, min_size=1, max_size=20))
    def acknowledge(self, chosen: list[int]) -> None:
        known = sorted(self.nacked)
        keys = {known[pick % len(known)] for pick in chosen}
        # Of what is not nacked nothing happens.
        self.tracker.drop(BitMap64([*keys, 5 << 40]))
        for key in keys:
            del self.nacked[key]

    @rule(passed_ms=st.sampled_from((0, 1, 49, 99, 400, 6_000)), limit=st.sampled_from((0, 1, 3, 1_000)))
    def take_what_is_due(self, passed_ms: int, limit: int) -> None:
        self.now_ms += passed_ms
        due = sorted(nacked for nacked in self.nacked.values() if nacked.redeliver_at_ms <= self.now_ms)
        rows, times = self.tracker.take_due(self.now_ms, limit)
        taken = by_key(rows, times)
        assert len(rows) <= limit
        order = [nacked[:3] for nacked in taken.values()]
        assert order == [nacked[:3] for nacked in due[: len(rows)]]
        for key, nacked in taken.items():
            assert self.nacked.pop(key) == nacked
        if due and limit and not taken:
            # What was read had left.
            next_due_ms = self.tracker.next_due_ms()
            assert next_due_ms is not None
            assert next_due_ms <= self.now_ms

    @precondition(lambda self: self.nacked)
    @rule()
    def take_a_millisecond_before_the_next(self) -> None:
        first_ms = min(nacked.redeliver_at_ms for nacked in self.nacked.values())
        if self.now_ms < first_ms:
            self.now_ms = first_ms - 1
            rows, _ = self.tracker.take_due(self.now_ms, 1_000)
            assert not len(rows)

    @rule(asked=st.lists(st.sampled_from(POSITIONS), max_size=20, unique=True), later=positions)
    def look_at_it_as_it_was(self, asked: list[Position], later: list[Position]) -> None:
        frozen, nacked = self.tracker.freeze(), dict(self.nacked)
        keys = [1 << 45, *(key for key in nacked if nacked[key][1:3] in asked)]
        self.nack(later, [self.now_ms + 10] * len(later), index=0, deliver_at_ms=0, key_hash=0)
        rows, times = frozen.rows()
        assert len(rows) == len(nacked)
        assert by_key(rows, times) == nacked
        wanted = [nacked[key].redeliver_at_ms if key in nacked else 0 for key in keys]
        assert frozen.times_of(np.array(keys, np.uint64)).tolist() == wanted

    @invariant()
    def who_waits_is_known(self) -> None:
        assert len(self.tracker) == len(self.nacked)
        assert set(self.tracker.keys) == set(self.nacked)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """What has left may cause a look too early."""
        next_due_ms = self.tracker.next_due_ms()
        first_ms = min((nacked.redeliver_at_ms for nacked in self.nacked.values()), default=None)
        assert (next_due_ms is None) == (first_ms is None)
        assert next_due_ms is None or first_ms is None or next_due_ms <= first_ms


def by_key(rows: KeyedRows, times: U64) -> dict[int, Nacked]:
    columns = (times, rows.rows.ledger_id, rows.rows.entry_id, rows.rows.deliver_at_ms, rows.key_hash())
    values = zip(*(column.tolist() for column in columns), rows.rows.listed_ids(), strict=True)
    return {key: Nacked(*value) for key, value in zip(rows.keys.tolist(), values, strict=True)}


def bitmaps_always(patch: pytest.MonkeyPatch) -> None:
    """Also of few rows."""
    patch.setattr(packed_rows, "_BITMAP_BYTES", -(1 << 20))
