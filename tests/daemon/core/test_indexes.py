"""The indexes of a topic together: counts, seals of all of them, and what is due over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core.indexes import SHARED, Indexes
from daemon.core.mutable_bucket import SealLimits
from daemon.core.segments import SegmentCache
from storage_backends.formats.rows import Rows
from tests.daemon.core.journaled_topic import listed

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
        passed += [(each.bucket.subscription_id, row) for each in came for row in listed(each.rows)]
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
