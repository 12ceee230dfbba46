"""Counts over all indexes of a topic are kept, and are what counting everything would find (`row_invariants`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from daemon.core.index.index import BucketCounts
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.segments import SegmentCache
from storage_backends.formats.row_columns import Rows

INDEXES = (0, 7, 9)


def add(indexes: Indexes, index_id: int, ledger_id: int, elapsed_ms: int, rows: int = 5) -> None:
    column = np.full(rows, ledger_id, np.uint64)
    times = np.full(rows, 1_000, np.uint64)
    indexes.of(index_id).add(Rows(times, column, np.arange(rows, dtype=np.uint64), None), 1, elapsed_ms=elapsed_ms)


def check(indexes: Indexes) -> None:
    filling = [index.mutable for index in indexes.values()]
    began_ms = [bucket.first_row_at_ms for bucket in filling if bucket.first_row_at_ms is not None]
    counts = indexes._counts
    assert counts.added_rows == sum(bucket.added_rows for bucket in filling)
    assert counts.highest_ledger_id == max(bucket.highest_ledger_id for bucket in filling)
    assert counts.first_row_at_ms == min(began_ms, default=None)
    assert indexes.has_mutable_rows == bool(began_ms)
    assert indexes.sealing == max(len(index.sealing) for index in indexes.values())
    assert {*indexes.filled} == {bucket for bucket in indexes.memory_buckets if bucket.added_rows}


def seals_and_a_deletion() -> None:
    """Each step changes the highest or the first of a count, also by taking away the one that it was."""
    indexes = Indexes(SegmentCache(1 << 20), now_ms=0)
    check(indexes)
    for number, index_id in enumerate(INDEXES):
        add(indexes, index_id, ledger_id=10 + number, elapsed_ms=50 - number)
        check(indexes)
    indexes[9].begin_seal("a", now_ms=0)
    check(indexes)
    add(indexes, 9, ledger_id=30, elapsed_ms=70)
    indexes[9].begin_seal("b", now_ms=0)
    check(indexes)
    index = indexes[7]
    memory = index.begin_seal("c", now_ms=0)
    index.remove(memory.present.copy())
    index.finish_seal(memory, None, KeyedRows.empty(), near_ms=0)
    check(indexes)
    add(indexes, 9, ledger_id=40, elapsed_ms=10)
    check(indexes)
    indexes.remove(9)
    check(indexes)


def test_counts_are_right_after_adds_seals_and_deletions_of_indexes() -> None:
    seals_and_a_deletion()


def nothing(*_: object, **__: object) -> None:
    return


@pytest.mark.parametrize("forgotten", ["rows_came", "seal_begins", "seal_ended", "index_left", "_filling_left"])
def test_a_planted_bug_that_tells_the_counts_nothing_of_a_change_is_found(
    monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    told: Callable[..., None] = nothing
    monkeypatch.setattr(BucketCounts, forgotten, told)
    with pytest.raises(AssertionError):
        seals_and_a_deletion()
