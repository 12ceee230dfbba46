"""The parts of buckets: gone sets, columns, horizon, segments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core.index.bucket import GoneSet
from daemon.core.index.mutable_bucket import HORIZON_STEP_MS, MutableBucket
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of
from daemon.core.index.runs import take_due
from daemon.core.index.segments import LOADED_ROW_BYTES, SegmentCache, SegmentCursor, SegmentRange, SegmentTable
from storage_backends.formats.bucket_format import SegmentInfo, SegmentInfos
from storage_backends.formats.row_columns import Rows
from tests.daemon.core._support.journaled_topic import key_hashes_of, listed

NOW_MS = 1_000_000
small_sets = st.sets(st.integers(0, 60), max_size=10)


class Filled:
    """A mutable bucket and the pages it needs."""

    def __init__(self) -> None:
        self.pages = PageTable()
        self.bucket = MutableBucket(self.pages, horizon_ms=NOW_MS)

    def add(self, rows: list[tuple[int, int, int]], key_hash: list[int] | None = None) -> None:
        """Rows of (deliver_at_ms, ledger_id, entry_id)."""
        columns = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
        hashes = None if key_hash is None else np.array(key_hash, np.uint32)
        keyed = KeyedRows(Rows(columns[0], columns[1], columns[2], hashes), self.pages.intern(columns[1], columns[2]))
        self.bucket.add(keyed, bitmap_of(keyed.keys), elapsed_ms=5)

    def remove(self, *positions: tuple[int, int]) -> None:
        columns = np.array(positions, np.uint64).T.copy()
        self.bucket.remove(bitmap_of(self.pages.find(*columns)))

    def pass_due(self, now_ms: int) -> list[tuple[int, int, int]]:
        passed = []
        while taken := take_due(self.bucket.runs_at(now_ms), now_ms, 100):
            passed += [row for _, rows in taken for row in listed(self.bucket.pass_rows(rows))]
        return passed


@given(added=st.lists(small_sets, max_size=12), frozen_after=st.sets(st.integers(0, 11)))
def test_a_gone_set_is_the_union_of_its_parts_and_a_part_never_changes(
    added: list[set[int]], frozen_after: set[int]
) -> None:
    gone, expected = GoneSet(BitMap64([99])), {99}
    frozen: list[tuple[tuple[BitMap64, ...], set[int]]] = []
    for number, keys in enumerate(added):
        gone.add(BitMap64(keys - expected))
        expected |= keys
        assert len(gone) == len(expected)
        if number in frozen_after:
            frozen.append((gone.freeze(), set(expected)))
    for parts, then in frozen:
        assert set(BitMap64.union(*parts)) == then
        assert sum(map(len, parts)) == len(then)


def test_rows_come_due_in_order_wherever_the_horizon_is() -> None:
    filled = Filled()
    times = [NOW_MS + step for step in (-5, 0, 1, 499, 500, 501, HORIZON_STEP_MS, HORIZON_STEP_MS + 1, 90_000, 1)]
    filled.add([(time, 7, entry) for entry, time in enumerate(times)])
    expected = sorted((time, 7, entry) for entry, time in enumerate(times))
    passed: list[tuple[int, int, int]] = []
    for now_ms in (NOW_MS - 6, NOW_MS, NOW_MS + 1, NOW_MS - 1, NOW_MS + 500, NOW_MS + 2_001, NOW_MS + 90_000):
        passed += filled.pass_due(now_ms)
        reached = [row for row in expected if row[0] <= now_ms]
        assert passed[: len(reached)] == reached
        waiting = [row[0] for row in expected[len(passed) :]]
        next_due_ms = filled.bucket.next_due_ms()
        assert next_due_ms is None if not waiting else next_due_ms == waiting[0]
    assert passed == expected


@given(
    times=st.lists(st.integers(0, 12_000), min_size=1, max_size=40),
    moments=st.lists(st.integers(0, 13_000), max_size=8),
    cuts=st.sets(st.integers(0, 40)),
)
def test_each_row_is_passed_once_when_it_is_due_however_time_and_adds_mix(
    times: list[int], moments: list[int], cuts: set[int]
) -> None:
    filled = Filled()
    rows = [(NOW_MS + time, 7, entry) for entry, time in enumerate(times)]
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(rows)), len(rows)]
    passed: list[tuple[int, int, int]] = []
    added: list[tuple[int, int, int]] = []
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        filled.add(rows[start:end])
        added += rows[start:end]
        if number < len(moments):
            now_ms = NOW_MS + moments[number]
            passed += filled.pass_due(now_ms)
            assert sorted(passed) == sorted(row for row in added if row in passed or row[0] <= now_ms)
            assert all(row[0] <= NOW_MS + max(moments[: number + 1]) for row in passed)
    passed += filled.pass_due(NOW_MS + 13_000)
    assert sorted(passed) == sorted(rows)


def test_what_is_kept_of_a_position_that_left_and_came_back_is_its_last_row() -> None:
    filled = Filled()
    filled.add([(NOW_MS + 9, 7, 1), (NOW_MS + 8, 7, 2), (NOW_MS + 7, 7, 3)])
    filled.remove((7, 1), (7, 2))
    filled.add([(NOW_MS + 6, 7, 2)], key_hash=[4])
    filled.remove((7, 2), (7, 3))
    filled.add([(NOW_MS + 1, 7, 2), (NOW_MS + 2, 7, 1)], key_hash=[5, 6])
    kept = filled.bucket.snapshot().kept()
    assert sorted(zip(listed(kept), key_hashes_of(kept), strict=True)) == [
        ((NOW_MS + 1, 7, 2), 5),
        ((NOW_MS + 2, 7, 1), 6),
    ]
    assert sorted(filled.pass_due(NOW_MS + 100)) == [(NOW_MS + 1, 7, 2), (NOW_MS + 2, 7, 1)]


def test_a_row_that_left_and_came_back_unchanged_is_passed_once() -> None:
    filled = Filled()
    for _ in range(3):
        filled.add([(NOW_MS + 9, 7, 1)])
        filled.remove((7, 1))
    filled.add([(NOW_MS + 9, 7, 1), (NOW_MS + 9, 7, 2)])
    assert filled.pass_due(NOW_MS + 9) == [(NOW_MS + 9, 7, 1), (NOW_MS + 9, 7, 2)]


def test_a_snapshot_does_not_change_with_the_bucket() -> None:
    filled = Filled()
    filled.add([(NOW_MS, 7, entry) for entry in range(3)])
    snapshot = filled.bucket.snapshot()
    filled.add([(NOW_MS, 9, entry) for entry in range(5_000)], key_hash=[1] * 5_000)
    filled.remove((7, 0))
    assert listed(snapshot.kept()) == [(NOW_MS, 7, entry) for entry in range(3)]


# ---- segments


def table_of(*segments: tuple[int, int, int]) -> SegmentTable:
    """Of segments of (rows, min, max)."""
    infos = (
        SegmentInfo(
            number=number, offset=0, length=0, crc32c=0, rows=rows, min_deliver_at_ms=low, max_deliver_at_ms=high
        )
        for number, (rows, low, high) in enumerate(segments, 1)
    )
    return SegmentTable(SegmentInfos.of(infos))


def rows_at(*times: int) -> KeyedRows:
    column = np.array(times, np.uint64)
    return KeyedRows(Rows(column, column, column), column)


TABLE = table_of((2, 10, 20), (1, 20, 20), (3, 20, 30))
SEGMENTS = (rows_at(10, 20), rows_at(20), rows_at(20, 25, 30))


def loaded(*numbers: int, budget_rows: int = 100) -> SegmentCache:
    cache = SegmentCache(budget_rows * LOADED_ROW_BYTES)
    for number in numbers:
        cache.put("b", number, SEGMENTS[number])
    return cache


@pytest.mark.parametrize(
    ("time", "holding"), [(9, []), (10, [0]), (20, [0, 1, 2]), (21, [2]), (30, [2]), (31, []), (15, [0])]
)
def test_the_segments_that_may_hold_a_time_are_all_of_them_and_no_others(time: int, holding: list[int]) -> None:
    assert list(TABLE.holding(time)) == holding


def test_a_cursor_reads_segment_after_segment_and_waits_for_one_that_is_missing() -> None:
    cursor, cache = SegmentCursor("b", TABLE), loaded(0)
    run = cursor.settle(cache)
    assert run is not None
    assert run.continues
    assert cursor.next_due_ms() == 10
    run.take(run.stop)
    assert cursor.settle(cache) is None
    assert (cursor.number, cursor.next_due_ms()) == (1, 20)
    cache.put("b", 1, SEGMENTS[1])
    cache.put("b", 2, SEGMENTS[2])
    for expected in ([20], [20, 25, 30]):
        run = cursor.settle(cache)
        assert run is not None
        assert run.take(run.stop).keys.tolist() == expected
    assert cursor.settle(cache) is None
    assert cursor.at_end
    assert cursor.next_due_ms() is None


def test_what_follows_a_cursor_is_the_segment_behind_the_one_that_it_reads() -> None:
    cursor, cache = SegmentCursor("b", TABLE), loaded(0, 1)
    assert cursor.following == (0, 10, 2)
    run = cursor.settle(cache)
    assert run is not None
    assert cursor.following == (1, 20, 1)
    run.take(run.stop)
    cursor.settle(cache)
    assert cursor.following == (2, 20, 3)
    cursor.move_to_row(0)
    assert cursor.following == (0, 10, 2)
    cursor.move_to_row(6)
    assert cursor.following is None


def test_what_a_cursor_reads_stays_with_it_when_it_leaves_memory() -> None:
    cursor, cache = SegmentCursor("b", TABLE), loaded(0)
    cursor.settle(cache)
    cache.discard_bucket("b")
    run = cursor.settle(cache)
    assert run is not None
    assert run.take(run.stop).keys.tolist() == [10, 20]
    assert cache.rows == 0


@pytest.mark.parametrize(
    ("row", "place"), [(0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (3, (2, 0)), (5, (2, 2)), (6, (3, 0))]
)
def test_a_cursor_is_moved_to_a_row_of_the_bucket(row: int, place: tuple[int, int]) -> None:
    cursor = SegmentCursor("b", TABLE)
    cursor.move_to_row(row)
    assert (cursor.number, cursor.offset) == place


def test_segments_are_wanted_ahead_as_far_as_asked_and_as_there_is_room() -> None:
    cursor = SegmentCursor("b", TABLE)
    assert cursor.wanted(9, 8, loaded()) is None
    assert cursor.wanted(10, 8, loaded()) == SegmentRange("b", 0, 0)
    assert cursor.wanted(20, 8, loaded()) == SegmentRange("b", 0, 2)
    assert cursor.wanted(20, 2, loaded()) == SegmentRange("b", 0, 1)
    assert cursor.wanted(20, 8, loaded(1)) == SegmentRange("b", 0, 0)
    assert cursor.wanted(20, 8, loaded(0)) == SegmentRange("b", 1, 2)
    assert cursor.wanted(20, 8, loaded(0, 1, 2)) is None
    assert cursor.wanted(20, 8, loaded(budget_rows=5)) == SegmentRange("b", 0, 1)
    assert cursor.wanted(20, 8, loaded(budget_rows=1)) == SegmentRange("b", 0, 0)


def test_beyond_the_budget_the_least_recently_used_segment_is_dropped() -> None:
    cache = loaded(0, 1, budget_rows=4)
    cache.get("b", 0)
    cache.put("c", 0, rows_at(1, 2))
    assert [("b", 0) in cache, ("b", 1) in cache, ("c", 0) in cache] == [True, False, True]
    assert (cache.rows, cache.rows_of("b"), cache.room_rows) == (4, 2, 0)


def test_one_segment_is_kept_though_it_is_larger_than_the_budget() -> None:
    cache = loaded(2, budget_rows=1)
    assert ("b", 2) in cache
    assert cache.room_rows == -2
