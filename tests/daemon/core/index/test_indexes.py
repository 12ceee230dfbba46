"""The indexes of a topic together: counts, seals of all of them, and what is due over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core.index.bucket import GoneSet, SealedBucket
from daemon.core.index.indexes import Indexes
from daemon.core.index.mutable_bucket import SealLimits
from daemon.core.index.position_keys import KeyedRows, bitmap_of
from daemon.core.index.segments import LOADED_ROW_BYTES, SegmentCache, SegmentRange
from storage_backends.formats import manifest
from storage_backends.formats.bucket_format import SegmentInfo, SegmentInfos
from storage_backends.formats.index_ids import SHARED
from storage_backends.formats.row_columns import Rows
from tests.daemon.core._support.journaled_topic import listed

NOW_MS = 1_000_000


def add(indexes: Indexes, index_id: int, rows: list[tuple[int, int, int]], *, elapsed_ms: int = 5) -> None:
    """Rows of (deliver_at_ms, ledger_id, entry_id)."""
    columns = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
    indexes.of(index_id).add(Rows(*columns), 1, elapsed_ms=elapsed_ms)


def new_indexes() -> Indexes:
    return Indexes(SegmentCache(1 << 20), now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("limits", "elapsed_ms", "wanted"),
    [
        (SealLimits(rows_min=1, rows_max=3, size_max_bytes=10**6, age_max_ms=10**6), 5, True),
        (SealLimits(rows_min=1, rows_max=4, size_max_bytes=10**6, age_max_ms=10**6), 5, False),
        (SealLimits(rows_min=1, rows_max=4, size_max_bytes=72, age_max_ms=10**6), 5, True),
        (SealLimits(rows_min=1, rows_max=4, size_max_bytes=73, age_max_ms=10**6), 5, False),
        (SealLimits(rows_min=1, rows_max=4, size_max_bytes=10**6, age_max_ms=10), 15, True),
        (SealLimits(rows_min=1, rows_max=4, size_max_bytes=10**6, age_max_ms=10), 14, False),
    ],
)
def test_the_indexes_are_sealed_by_rows_bytes_or_age_together_whatever_the_ledger(
    limits: SealLimits, elapsed_ms: int, wanted: bool
) -> None:
    indexes = new_indexes()
    assert not indexes.wants_seal(limits, elapsed_ms=10**9)
    add(indexes, 4, [(NOW_MS, 7, 1)])
    add(indexes, SHARED, [(NOW_MS, 7, entry) for entry in range(2)], elapsed_ms=9)
    assert indexes.wants_seal(limits, elapsed_ms=elapsed_ms) is wanted


def test_indexes_with_enough_rows_together_are_sealed_when_a_higher_ledger_than_any_comes_and_not_before() -> None:
    limits = SealLimits(rows_min=3, rows_max=10**6, size_max_bytes=10**9, age_max_ms=10**9)
    indexes = new_indexes()
    add(indexes, SHARED, [(NOW_MS, 7, 1), (NOW_MS, 5, 1)])
    assert not indexes.wants_seal_before(8, limits)
    add(indexes, 4, [(NOW_MS, 6, 1)])
    assert indexes.wants_seal_before(8, limits)
    assert not indexes.wants_seal_before(7, limits)


def test_a_seal_cuts_every_index_that_has_rows_and_each_gets_a_name() -> None:
    indexes = new_indexes()
    assert not indexes.has_mutable_rows
    assert indexes.begin_seal(str, now_ms=NOW_MS) == []
    add(indexes, 4, [(NOW_MS, 7, 1)])
    indexes.of(5)
    assert indexes.has_mutable_rows
    assert [(number, bucket.name) for number, bucket in indexes.begin_seal(str, now_ms=NOW_MS)] == [(4, "4")]
    assert [(number, len(index.sealing)) for number, index in indexes.items()] == [(0, 0), (4, 1), (5, 0)]
    assert not indexes.has_mutable_rows


def test_a_position_in_two_indexes_has_two_keys_and_each_says_where_it_is() -> None:
    indexes = new_indexes()
    position = np.array([7], np.uint64), np.array([1 << 33 | 1], np.uint64)
    keys = np.concatenate([indexes.of(number).pages.intern(*position) for number in (SHARED, 4)])
    assert len(set(keys.tolist())) == 2
    assert indexes.places.owners(keys).tolist() == [SHARED, 4]
    for index in indexes.values():
        ledger_id, entry_id = index.pages.positions(keys)
        assert (ledger_id.tolist(), entry_id.tolist()) == ([7, 7], [1 << 33 | 1] * 2)


def test_what_is_due_is_passed_in_one_order_over_all_indexes_and_each_row_once() -> None:
    indexes = new_indexes()
    add(indexes, SHARED, [(NOW_MS + 1, 7, 1), (NOW_MS + 4, 7, 2)])
    add(indexes, 4, [(NOW_MS + 2, 7, 1), (NOW_MS + 3, 7, 3)])
    assert indexes.pending_rows == 4
    assert indexes.next_due_ms() == NOW_MS + 1
    passed = []
    while came := indexes.pass_due(NOW_MS + 3, 1):
        passed += [(each.bucket.index_id, row) for each in came for row in listed(each.rows)]
    assert sorted(passed) == [
        (SHARED, (NOW_MS + 1, 7, 1)),
        (4, (NOW_MS + 2, 7, 1)),
        (4, (NOW_MS + 3, 7, 3)),
    ]
    assert (indexes.pending_rows, indexes.present_rows, indexes.passed_until_ms) == (1, 4, NOW_MS + 3)


def test_an_index_that_is_removed_takes_its_buckets_from_every_count() -> None:
    indexes = new_indexes()
    add(indexes, SHARED, [(NOW_MS + 1, 7, 1)])
    add(indexes, 4, [(NOW_MS + 2, 7, 1)])
    indexes.remove(4)
    indexes.remove(4)
    assert list(indexes) == [SHARED]
    assert (indexes.pending_rows, indexes.serving(4)) == (1, [indexes.shared])


def add_sealed(indexes: Indexes, ledger_id: int, *segments: tuple[int, ...]) -> list[KeyedRows]:
    """A sealed bucket, named for its ledger, with segments of rows that are due at these times; their rows."""
    times = np.array([time for segment in segments for time in segment], np.uint64)
    ledger = np.full(len(times), ledger_id, np.uint64)
    entries = np.arange(len(times), dtype=np.uint64)
    index = indexes.shared
    keyed = KeyedRows(Rows(times, ledger, entries), index.pages.intern(ledger, entries))
    infos = [
        SegmentInfo(number, 0, 0, 0, len(segment), min(segment), max(segment))
        for number, segment in enumerate(segments, 1)
    ]
    live = manifest.LiveBucket(
        object=manifest.ObjectReference(name=str(ledger_id), base=0, size_bytes=0, sha256=b""),
        rows=len(times),
        first_ledger_id=ledger_id,
        last_ledger_id=ledger_id,
        min_deliver_at_ms=int(times.min()),
        max_deliver_at_ms=int(times.max()),
        hash_low=0,
        hash_high=0,
        segments=len(infos),
    )
    index.add_sealed(
        SealedBucket(live, SegmentInfos.of(infos), present=bitmap_of(keyed.keys), gone=GoneSet(), pages=index.pages)
    )
    ends = np.cumsum([len(segment) for segment in segments]).tolist()
    return [keyed.take(slice(first, end)) for first, end in zip([0, *ends], ends, strict=False)]


def test_the_next_load_is_the_earliest_segment_that_is_not_in_memory_and_not_being_read() -> None:
    indexes = Indexes(SegmentCache(4 * LOADED_ROW_BYTES), now_ms=0)
    first, *_ = add_sealed(indexes, 1, (100, 110), (900,))
    add_sealed(indexes, 2, (300,), (310,))
    add_sealed(indexes, 3, (200, 201, 202, 203), (400,))
    assert indexes.next_load_ms(50, lambda bucket, number: False) == 50
    indexes.load("1", 0, first)
    # There is room for two rows more: the four are loaded when they are due, the other bucket's row is ahead of them.
    assert indexes.next_load_ms(50, lambda bucket, number: False) == 200
    assert indexes.next_load_ms(150, lambda bucket, number: False) == 150
    assert indexes.next_load_ms(50, lambda bucket, number: bucket == "3") == 250
    assert indexes.next_load_ms(50, lambda bucket, number: bucket != "1") == 850
    assert indexes.next_load_ms(50, lambda bucket, number: True) is None
    assert indexes.wanted_segments(199) == []
    assert indexes.wanted_segments(200) == [SegmentRange("3", 0, 0)]
    # What is due has taken all room.
    assert indexes.wanted_segments(250, 50) == [SegmentRange("3", 0, 0)]
    assert indexes.wanted_segments(300) == [SegmentRange("3", 0, 0), SegmentRange("2", 0, 0)]


def test_all_that_is_due_and_in_memory_is_passed_at_once_over_the_ends_of_segments() -> None:
    indexes = Indexes(SegmentCache(1 << 20), now_ms=0)
    for ledger_id in (1, 2, 3):
        segments = add_sealed(indexes, ledger_id, (100, 110 + ledger_id), (120, 130), (140, 150))
        for number, rows in enumerate(segments):
            indexes.load(str(ledger_id), number, rows)
    assert indexes.pass_due(99, 100) == []
    for now_ms, times in ((100, [100]), (139, [110, 120, 130]), (140, [140]), (140, []), (1_000, [150])):
        passed = indexes.pass_due(now_ms, 100)
        found = {int(each.bucket.name): [deliver_at_ms for deliver_at_ms, _, _ in listed(each.rows)] for each in passed}
        wanted = {ledger_id: [time + ledger_id * (time == 110) for time in times] for ledger_id in (1, 2, 3) if times}
        assert found == wanted
