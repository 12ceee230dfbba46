"""The worked examples of PIP-393, the promises of the tracker, and the state machine, which finds planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from pyroaring import BitMap64

from daemon.core.backlog import nack_tracker, packed_rows
from daemon.core.backlog.nack_tracker import NackRun, NackTracker, StaleNacks, rounded_up
from daemon.core.backlog.packed_rows import NackColumns, PackedRows, pack
from daemon.core.index.position_keys import KeyedRows, PagePlaces, PageTable, bitmap_of
from storage_backends.formats.index_ids import part_entry_id
from storage_backends.formats.row_columns import U64, Rows
from tests._support import state_machines
from tests.daemon.core._support import nack_tracker_machine
from tests.daemon.core._support.nack_tracker_machine import NackTrackerMachine, bitmaps_always

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
Plant = Callable[[pytest.MonkeyPatch], None]


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


class Tracked:
    """A tracker, and rows of one index to put in."""

    def __init__(self) -> None:
        self.pages = PageTable()
        self.tracker = NackTracker(self.pages.places)

    def rows(self, entry_id: U64, ledger_id: int = 1) -> KeyedRows:
        ledgers = np.full(len(entry_id), ledger_id, np.uint64)
        return KeyedRows(Rows(np.zeros_like(entry_id), ledgers, entry_id), self.pages.intern(ledgers, entry_id))

    def nack(self, entry_id: npt.ArrayLike, redeliver_at_ms: int | U64, ledger_id: int = 1) -> BitMap64:
        rows = self.rows(np.asarray(entry_id, np.uint64), ledger_id)
        self.tracker.add(rows, np.broadcast_to(np.asarray(redeliver_at_ms, np.uint64), len(rows)).copy())
        return bitmap_of(rows.keys)

    def due(self, now_ms: int, limit: int = 1 << 20) -> list[tuple[int, int, int]]:
        """(redelivery time, ledger, entry) of what is taken."""
        rows, times = self.tracker.take_due(now_ms, limit)
        columns = (times, rows.rows.ledger_id, rows.rows.entry_id)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def all_due(self, now_ms: int) -> list[tuple[int, int, int]]:
        taken: list[tuple[int, int, int]] = []
        while part := self.due(now_ms):
            taken += part
        return taken

    @property
    def entries(self) -> int:
        """What is stored, those that do not count included."""
        return sum(len(run) for run in self.tracker._runs.values())


@pytest.fixture
def tracked() -> Tracked:
    return Tracked()


# ---- worked examples of PIP-393


def test_a_redelivery_time_is_rounded_up_where_pip_393_trims_down_so_that_it_is_never_early() -> None:
    asked_ms = 0b1001
    by_pip_393 = asked_ms & (-1 << 1)
    assert by_pip_393 == 0b1000 < asked_ms
    assert rounded_up(u64(asked_ms), 1).tolist() == [0b1010]
    assert asked_ms <= 0b1010


@pytest.mark.parametrize(
    ("time_ms", "bits", "slot_ms"),
    [
        (0b1000, 1, 0b1000),
        (0b1001, 1, 0b1010),
        (0b1010, 1, 0b1010),
        (0b1001, 0, 0b1001),
        # By 8 bits slots are 256 ms wide, by 10 bits 1,024 ms.
        (1, 8, 256),
        (256, 8, 256),
        (257, 8, 512),
        (1_023, 10, 1_024),
        (1_025, 10, 2_048),
        # There is no later multiple: the last time there is.
        ((1 << 64) - 2, 8, (1 << 64) - 1),
        ((1 << 64) - 256, 8, (1 << 64) - 256),
    ],
)
def test_a_time_belongs_to_the_first_slot_that_is_not_before_it(time_ms: int, bits: int, slot_ms: int) -> None:
    assert rounded_up(u64(time_ms), bits).tolist() == [slot_ms]


@hypothesis.given(st.integers(0, (1 << 64) - 1), st.integers(0, 20))
def test_no_time_becomes_earlier_nor_later_than_by_one_slot(time_ms: int, bits: int) -> None:
    (rounded_ms,) = rounded_up(u64(time_ms), bits).tolist()
    assert time_ms <= rounded_ms < time_ms + (1 << bits)


def test_the_times_of_one_slot_are_redelivered_together(tracked: Tracked) -> None:
    for entry, asked_ms in enumerate((1, 100, 256)):
        tracked.nack([entry], rounded_up(u64(asked_ms), 8))
    assert tracked.due(255) == []
    assert tracked.due(256) == [(256, 1, 0), (256, 1, 1), (256, 1, 2)]


def test_two_nacks_of_one_batch_do_not_interfere(tracked: Tracked) -> None:
    """PIP-393: one after 10 s, then another of the same entry after 20 s; before, both came after 20 s."""
    first, second = part_entry_id(u64(7, 7), np.array([0, 1], np.uint32)).tolist()
    tracked.nack([first], NOW_MS + 10_000)
    tracked.nack([second], NOW_MS + 20_000)
    assert tracked.due(NOW_MS + 10_000) == [(NOW_MS + 10_000, 1, first)]
    assert tracked.due(NOW_MS + 19_999) == []
    assert tracked.due(NOW_MS + 20_000) == [(NOW_MS + 20_000, 1, second)]


def test_only_what_is_due_is_visited(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIP-393: a timer that looks at every entry is what it replaces."""
    random = np.random.default_rng(393)
    for first in range(0, 200_000, 1_000):
        entries = np.arange(first, first + 1_000, dtype=np.uint64)
        tracked.nack(entries, random.integers(NOW_MS, NOW_MS + HOUR_MS, 1_000).astype(np.uint64))
    read = []
    columns = PackedRows.columns

    def counted(self: PackedRows, start: int = 0, end: int | None = None, integers: U64 | None = None) -> NackColumns:
        found = columns(self, start, end, integers)
        read.append(len(found))
        return found

    monkeypatch.setattr(PackedRows, "columns", counted)
    taken = tracked.due(NOW_MS + 1_000)
    assert len(taken) == pytest.approx(200_000 / 3_600, abs=40)
    assert sum(read) == len(taken)


def test_a_shorter_nack_makes_the_next_look_earlier(tracked: Tracked) -> None:
    tracked.nack([1], NOW_MS + HOUR_MS)
    assert tracked.tracker.next_due_ms() == NOW_MS + HOUR_MS
    tracked.nack([2], NOW_MS + 1_000)
    assert tracked.tracker.next_due_ms() == NOW_MS + 1_000


def test_a_longer_nack_of_the_same_position_takes_the_shorter_one_back(tracked: Tracked) -> None:
    tracked.nack([1], NOW_MS + 1_000)
    tracked.nack([1], NOW_MS + HOUR_MS)
    assert tracked.tracker.next_due_ms() == NOW_MS + HOUR_MS
    assert tracked.due(NOW_MS + HOUR_MS - 1) == []
    assert tracked.due(NOW_MS + HOUR_MS) == [(NOW_MS + HOUR_MS, 1, 1)]


def test_an_acknowledgement_removes_the_entry(tracked: Tracked) -> None:
    keys = tracked.nack([1], NOW_MS)
    tracked.nack([2], NOW_MS + 5)
    tracked.tracker.drop(keys)
    assert tracked.tracker.next_due_ms() == NOW_MS + 5
    assert tracked.due(NOW_MS + 5) == [(NOW_MS + 5, 1, 2)]


@pytest.mark.parametrize(
    ("rate_per_s", "delay_h", "bytes_a_nack", "stated_gib"),
    [(10_000, 1, 53, 1.77), (10_000, 5, 53, 8.88), (10_000, 1, 118, 3.96)],
)
def test_what_the_maps_that_pip_393_replaces_take_is_as_it_says(
    rate_per_s: int, delay_h: int, bytes_a_nack: int, stated_gib: float
) -> None:
    """`3600*10000*53/1024/1024/1024=1.77GB`; the last row is its HashMap at the same load."""
    assert 3_600 * rate_per_s * bytes_a_nack / 1024**3 * delay_h == pytest.approx(stated_gib, abs=0.01)


@pytest.mark.parametrize(
    ("rows_per_ms", "bits", "of_a_slot", "most"),
    [
        (100, 10, 102_400, 0.163),
        (100, 8, 25_600, 8192 / 25_600),
        (10, 10, 10_240, 0.8),
        (10, 8, 2_560, 4),
        (1, 0, 1, 4),
    ],
)
def test_a_constant_delay_takes_no_more_than_pip_393_says_and_half(
    rows_per_ms: int, bits: int, of_a_slot: int, most: float
) -> None:
    """M nacks in a slot: 0.163 B each above 50,000, 8192 / M above 4,096, else 4."""
    assert rows_per_ms << bits == of_a_slot
    tracked = Tracked()
    rows = 400_000
    for first in range(0, rows, 1_000):
        entries = np.arange(first, first + 1_000, dtype=np.uint64)
        tracked.nack(entries, rounded_up(NOW_MS + entries // np.uint64(rows_per_ms), bits))
    assert tracked.tracker.in_order_rows == rows
    # At most the last rows are not packed yet.
    assert tracked.tracker.size_bytes - 16 * nack_tracker.LINE_ROWS <= 1.5 * most * rows


def test_random_delays_take_at_most_16_bytes_a_nack(tracked: Tracked) -> None:
    random = np.random.default_rng(393)
    for first in range(0, 200_000, 1_000):
        entries = np.arange(first, first + 1_000, dtype=np.uint64)
        tracked.nack(entries, random.integers(NOW_MS, NOW_MS + 24 * HOUR_MS, 1_000).astype(np.uint64))
    assert tracked.tracker.size_bytes <= 16 * 200_000


# ---- promises


def test_the_order_of_taking_is_time_then_position_over_all_runs(tracked: Tracked) -> None:
    """Also where ledgers came in another order than their numbers."""
    tracked.nack([5, 1 << 40], 200, ledger_id=9)
    tracked.nack([3, 4], 200, ledger_id=2)
    tracked.nack([1], 100, ledger_id=9)
    tracked.nack([1 << 33], 200, ledger_id=2)
    wanted = [(100, 9, 1), (200, 2, 3), (200, 2, 4), (200, 2, 1 << 33), (200, 9, 5), (200, 9, 1 << 40)]
    assert [place for _ in wanted for place in tracked.due(300, limit=1)] == wanted


def test_at_most_as_many_are_taken_as_asked_for(tracked: Tracked) -> None:
    for first in range(0, 100, 10):
        tracked.nack(range(first, first + 10), u64(*range(1_010 - first, 1_000 - first, -1)))
    assert len(tracked.due(5_000, limit=7)) == 7
    assert len(tracked.tracker) == 93


def test_the_rows_come_back_as_they_went_in(tracked: Tracked) -> None:
    entries = np.arange(50_000, dtype=np.uint64)
    rows = tracked.rows(entries)
    own_time, key_hash = entries * np.uint64(3), (entries * np.uint64(7919)).astype(np.uint32)
    rows = KeyedRows(Rows(own_time, rows.rows.ledger_id, entries, key_hash), rows.keys)
    tracked.tracker.add(rows, np.uint64(NOW_MS) - entries)
    parts = [tracked.tracker.take_due(NOW_MS, 50_000) for _ in range(8)]
    taken = KeyedRows.concat([part for part, _ in parts])
    times = np.concatenate([each for _, each in parts])
    back = slice(None, None, -1)
    assert np.array_equal(times, np.uint64(NOW_MS) - entries[back])
    assert np.array_equal(taken.rows.entry_id, entries[back])
    assert np.array_equal(taken.rows.deliver_at_ms, own_time[back])
    assert np.array_equal(taken.key_hash(), key_hash[back])
    assert np.array_equal(taken.keys, rows.keys[back])


def test_a_position_that_came_back_may_be_nacked_again(tracked: Tracked) -> None:
    for nack in range(3):
        tracked.nack([1], 100 * nack)
        assert tracked.due(100 * nack) == [(100 * nack, 1, 1)]
    assert len(tracked.tracker) == 0
    assert tracked.tracker.next_due_ms() is None


def test_one_position_that_is_nacked_ten_thousand_times_takes_no_more_memory(tracked: Tracked) -> None:
    most = 0
    tracked.nack([7], NOW_MS + 2 * HOUR_MS)
    for nack in range(10_000):
        tracked.nack([1], NOW_MS + nack + HOUR_MS)
        most = max(most, tracked.entries)
    assert len(tracked.tracker) == 2
    assert most <= 2 * nack_tracker.SMALL_RUNS_MAX
    assert len(tracked.tracker._departed) <= nack_tracker.SETS_MAX + 1
    assert len(tracked.tracker._due) <= 4 * nack_tracker.SMALL_RUNS_MAX
    assert tracked.due(NOW_MS + HOUR_MS + 10_000) == [(NOW_MS + 9_999 + HOUR_MS, 1, 1)]


def test_entries_that_do_not_count_are_packed_away_when_they_are_more_than_half(tracked: Tracked) -> None:
    """A part at a time, while others come and go."""
    rows, step = 300_000, 1_000
    parts = [tracked.nack(np.arange(first, first + step), NOW_MS + HOUR_MS) for first in range(0, rows, step)]
    for place, keys in enumerate(parts):
        # Every third is left.
        if place % 3:
            tracked.tracker.drop(keys)
    for nack in range(rows // nack_tracker.STEP_ROWS):
        tracked.nack([rows + nack], NOW_MS + HOUR_MS + nack)
    there = len(tracked.tracker)
    assert there == rows // 3 + rows // nack_tracker.STEP_ROWS
    assert tracked.entries <= 2 * there + nack_tracker.DEPARTED_ROWS_MIN
    assert len(tracked.all_due(NOW_MS + HOUR_MS)) == rows // 3 + 1


def test_a_great_many_that_leave_at_once_are_packed_away_later(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, steps = 200_000, list[None]()
    keys = tracked.nack(np.arange(rows), NOW_MS + HOUR_MS + np.arange(rows, dtype=np.uint64) * 7919 % HOUR_MS)
    step = NackTracker._repack_step

    def counted(tracker: NackTracker) -> None:
        steps.append(None)
        step(tracker)

    monkeypatch.setattr(NackTracker, "_repack_step", counted)
    keys.remove_range(0, 1_000)
    tracked.tracker.drop(keys)
    assert len(steps) <= 3
    assert tracked.entries > rows // 2
    for _ in range(rows // nack_tracker.STEP_ROWS):
        tracked.due(NOW_MS)
    assert tracked.entries <= 2 * 1_000 + nack_tracker.DEPARTED_ROWS_MIN
    assert len(tracked.all_due(NOW_MS + 2 * HOUR_MS)) == 1_000


def test_rows_in_due_order_cost_no_sort_and_others_are_counted(tracked: Tracked) -> None:
    tracked.nack([1, 2], u64(100, 200))
    tracked.nack([3], 200)
    assert (tracked.tracker.in_order_rows, tracked.tracker.sorted_rows) == (3, 0)
    tracked.nack([4, 5], u64(300, 250))
    assert (tracked.tracker.in_order_rows, tracked.tracker.sorted_rows) == (3, 2)


def test_several_constant_delays_at_the_same_time_are_in_order_each(tracked: Tracked) -> None:
    for nack in range(100):
        for number, delay_ms in enumerate((60_000, 1_000, 3_600_000)):
            tracked.nack([3 * nack + number], NOW_MS + nack + delay_ms)
    assert (tracked.tracker.in_order_rows, tracked.tracker.sorted_rows) == (300, 0)


def test_constant_delays_are_packed_without_a_sort(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    def sorted_after_all(*_: object, **__: object) -> None:
        raise AssertionError("rows in due order were sorted")

    # What is packed in several parts is sorted, and split then.
    monkeypatch.setattr(np, "array_split", sorted_after_all)
    sort = packed_rows._Fields.packed

    def in_order_already(self: packed_rows._Fields) -> U64 | None:
        packed = sort(self)
        assert packed is not None
        assert bool((packed[1:] >= packed[:-1]).all())
        return packed

    monkeypatch.setattr(packed_rows._Fields, "packed", in_order_already)
    for first in range(0, 100_000, 1_000):
        tracked.nack(np.arange(first, first + 1_000), NOW_MS + first)
    assert len(tracked.all_due(NOW_MS + 50_000)) == 51_000


@pytest.mark.parametrize("bitmap", [False, True])
@hypothesis.given(data=st.data())
def test_packed_rows_are_found_and_read_from_any_row_on(bitmap: bool, data: st.DataObject) -> None:
    """Fields as wide as a time or an entry may be: then they are packed in several pieces."""
    wide = st.one_of(st.integers(0, 300), st.integers(0, (1 << 63)))
    times = data.draw(st.lists(wide, min_size=1, max_size=40))
    entries = data.draw(st.lists(wide, min_size=len(times), max_size=len(times)))
    places = PagePlaces()
    pages = PageTable(places)
    positions = [(7 - number % 3, entry) for number, entry in enumerate(entries)]
    positions, times = positions[: len(set(positions))], times
    unique = dict(zip(positions, times, strict=False))
    ledger_id, entry_id = (np.array(column, np.uint64) for column in zip(*unique, strict=True))
    columns = NackColumns(np.array(list(unique.values()), np.uint64), pages.intern(ledger_id, entry_id))
    with pytest.MonkeyPatch.context() as patch:
        if bitmap:
            bitmaps_always(patch)
        parts = pack(columns, places, 0)
    wanted = sorted((time_ms, *position) for position, time_ms in unique.items())
    found = [part.place_at(row, places) for part in parts for row in range(len(part))]
    assert found == wanted
    for part in parts:
        assert part.is_bitmap == bitmap
        there = part.columns().redeliver_at_ms.tolist()
        start = data.draw(st.integers(0, len(part) - 1))
        assert part.columns(start).redeliver_at_ms.tolist() == there[start:]
        for now_ms in (there[start], there[start] - 1 if there[start] else 0, there[-1] + 1):
            assert part.due_end(now_ms, 0) == sum(time_ms <= now_ms for time_ms in there)


def test_what_is_taken_while_runs_are_merged_is_complete_and_in_order(tracked: Tracked) -> None:
    """Also when all that was merged already has been taken."""
    times = np.random.default_rng(393).permutation(36).astype(np.uint64)
    taken, emptied = [], 0
    with nack_tracker_machine.small():
        for first in range(0, 36, 12):
            tracked.nack(np.arange(first, first + 12), times[first : first + 12])
        for more in range(60):
            merged_rows = sum(len(merge.run) for merge in tracked.tracker._merges)
            emptied += merged_rows > 0
            taken += [place for _ in range(merged_rows) for place in tracked.due(999, limit=1)]
            # Some more is merged.
            tracked.nack([100 + more], 1_000)
        taken += tracked.all_due(999)
    assert emptied > 2
    assert [time_ms for time_ms, _, _ in taken] == list(range(36))
    assert len(tracked.all_due(1_000)) == 60


# ---- the machine, and what it finds


SETTINGS: Mapping[str, Any] = {
    "report_multiple_bugs": False,
    "suppress_health_check": list(hypothesis.HealthCheck),
}


def machine(*, runs: int) -> None:
    with nack_tracker_machine.small():
        state_machines.run(NackTrackerMachine, runs=runs, steps=30, **SETTINGS)


def test_whatever_happens_what_is_due_comes_in_order_and_nothing_else() -> None:
    machine(runs=150)


def test_the_same_holds_where_all_rows_are_in_bitmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    bitmaps_always(monkeypatch)
    machine(runs=100)


def search() -> None:
    """Raises what the first run that breaks a rule raises."""
    phases = (hypothesis.Phase.generate,)
    settings = hypothesis.settings(max_examples=1_000, stateful_step_count=50, phases=phases, **SETTINGS)
    with nack_tracker_machine.small():
        run_state_machine_as_test(NackTrackerMachine, settings=settings)


def an_entry_that_was_replaced_fires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaleNacks, "still_there", lambda self, keys, born: None)


def what_left_leaves_rows_that_come_later_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaleNacks, "birth", lambda self: self._generation)


def sets_that_somebody_has_are_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaleNacks, "freeze", lambda self: tuple(self._sets))


def what_is_joined_touches_rows_that_come_later(patch: pytest.MonkeyPatch) -> None:
    forget = StaleNacks.forget

    def forgotten(self: StaleNacks, births: object) -> None:
        forget(self, births)  # type: ignore[arg-type]
        self._sets = [(generation + 1, keys) for generation, keys in self._sets]

    patch.setattr(StaleNacks, "forget", forgotten)


def rows_are_due_a_millisecond_early(patch: pytest.MonkeyPatch) -> None:
    take_due = NackTracker.take_due
    patch.setattr(NackTracker, "take_due", lambda self, now_ms, limit: take_due(self, now_ms + 1, limit))


def runs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nack_tracker, "_sure_rows", lambda runs, due, quotas, order, limit: min(len(order), limit))


def pages_are_in_the_order_they_came_in(patch: pytest.MonkeyPatch) -> None:
    pages_of = packed_rows._pages

    def pages(ordinals: U64, places: PagePlaces) -> object:
        identity = PagePlaces()
        for ordinal in range(len(places)):
            identity.add(ordinal, 0, 0)
        return pages_of(ordinals, identity)

    patch.setattr(packed_rows, "_pages", pages)


def a_line_takes_rows_that_are_due_before_its_last(patch: pytest.MonkeyPatch) -> None:
    """Harmless by itself: a run of several parts must not be cut by it."""
    split = np.array_split
    patch.setattr(np, "array_split", lambda order, parts: split(np.arange(len(order)), parts))


def a_merge_forgets_what_is_left_of_its_last_source(patch: pytest.MonkeyPatch) -> None:
    step = NackTracker._merge_step

    def forgetful(self: NackTracker) -> None:
        step(self)
        for merge in self._merges:
            if sum(len(run) > 0 for run in merge.sources) == 1:
                merge.sources.clear()
                for run in [run for run in self._runs.values() if run is not merge.run][:1]:
                    del self._runs[run.number]

    patch.setattr(NackTracker, "_merge_step", forgetful)


def a_run_that_was_emptied_is_not_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    """A merge may still put rows into it."""
    register = NackTracker._register

    def registered(self: NackTracker, run: NackRun) -> None:
        if run.number == 0:
            register(self, run)

    patch.setattr(NackTracker, "_register", registered)


def a_part_that_is_packed_anew_keeps_its_birth(patch: pytest.MonkeyPatch) -> None:
    rewrite = NackRun.rewrite

    def rewritten(self: NackRun, index: int, places: PagePlaces, departed: StaleNacks) -> tuple[int, int]:
        born = self.parts[index].born + 1 if self.parts else 0
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(StaleNacks, "still_there", lambda self, keys, _: _still_there(self, keys, born))
            return rewrite(self, index, places, departed)

    _still_there = StaleNacks.still_there
    patch.setattr(NackRun, "rewrite", rewritten)


def a_time_that_is_not_a_multiple_is_cut(patch: pytest.MonkeyPatch) -> None:
    times_of = packed_rows._Layout.times_of
    patch.setattr(packed_rows._Layout, "times_of", lambda self, packed: times_of(self, packed) & ~np.uint64(1))


BUGS: list[Plant] = [
    an_entry_that_was_replaced_fires,
    what_left_leaves_rows_that_come_later_too,
    sets_that_somebody_has_are_changed,
    what_is_joined_touches_rows_that_come_later,
    rows_are_due_a_millisecond_early,
    runs_are_not_compared,
    pages_are_in_the_order_they_came_in,
    a_line_takes_rows_that_are_due_before_its_last,
    a_merge_forgets_what_is_left_of_its_last_source,
    a_part_that_is_packed_anew_keeps_its_birth,
    a_time_that_is_not_a_multiple_is_cut,
]


@pytest.mark.rotating
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    # Which example is the smallest is not asked.
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        search()


def test_a_planted_bug_of_merging_is_found(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run_that_was_emptied_is_not_looked_at_again(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_is_taken_while_runs_are_merged_is_complete_and_in_order(tracked)
