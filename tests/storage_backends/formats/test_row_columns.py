from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats.row_columns import HASH_ROWS, Rows, row_hash
from tests.storage_backends.formats._support import examples


@given(examples.rows())
def test_sorted_by_due_orders_by_deliver_at_then_ledger_then_entry(rows: Rows) -> None:
    due = rows.sorted_by_due()
    assert [row[:3] for row in examples.tuples(due)] == sorted(row[:3] for row in examples.tuples(rows))


@given(examples.rows(keyed=True))
def test_sorting_keeps_each_key_hash_with_its_row(rows: Rows) -> None:
    assert sorted(map(str, examples.tuples(rows.sorted_by_due()))) == sorted(map(str, examples.tuples(rows)))


@pytest.mark.parametrize("shuffled", [False, True])
def test_sorting_many_rows_gives_what_lexsort_gives(shuffled: bool) -> None:
    rows = examples.random_delays(30_000, span_ms=5_000)
    if shuffled:
        rows = rows.take(np.random.default_rng(3).permutation(len(rows)))
    order = np.lexsort((rows.entry_id, rows.ledger_id, rows.deliver_at_ms))
    assert examples.tuples(rows.sorted_by_due()) == examples.tuples(rows.take(order))


@given(st.lists(examples.rows(max_size=8), max_size=5))
def test_merging_parts_in_due_order_gives_what_sorting_all_rows_gives(parts: list[Rows]) -> None:
    merged = Rows.merged_by_due([part.sorted_by_due() for part in parts])
    every = Rows.concat([part.sorted_by_due() for part in parts])
    assert examples.tuples(merged) == examples.tuples(every.sorted_by_due())


@pytest.mark.parametrize("spread", [1, 1 << 16, 1 << 27])
def test_merging_many_rows_gives_what_lexsort_gives(spread: int) -> None:
    random_rows = np.random.default_rng(1)
    entry_id = np.arange(4_000, dtype=np.uint64)
    due = random_rows.integers(examples.NOON_MS, examples.NOON_MS + spread, len(entry_id)).astype(np.uint64)
    rows = Rows(due, entry_id // np.uint64(900), entry_id)
    parts = [rows.take(slice(start, start + 500)).sorted_by_due() for start in range(0, 4_000, 500)]
    merged = Rows.merged_by_due(parts)
    order = np.lexsort((rows.entry_id, rows.ledger_id, rows.deliver_at_ms))
    assert examples.tuples(merged) == examples.tuples(rows.take(order))


@given(examples.rows())
def test_position_order_means_that_ledger_and_entry_never_fall(rows: Rows) -> None:
    positions = [row[1:3] for row in examples.tuples(rows)]
    assert rows.in_position_order() == (positions == sorted(positions))


@given(st.lists(examples.rows(max_size=8), max_size=5))
def test_concat_keeps_all_rows_in_order_and_fills_missing_key_hashes_and_ids_with_nothing(parts: list[Rows]) -> None:
    together = Rows.concat(parts)
    expected = [row for part in parts for row in examples.tuples(part)]
    if any(len(part) and part.key_hash is not None for part in parts):
        expected = [(*row[:3], row[3] or 0, *row[4:]) for row in expected]
    if any(part.has_ids for part in parts):
        expected = [row if len(row) == 5 else (*row, b"") for row in expected]
    assert examples.tuples(together) == expected


def test_take_accepts_an_index_a_mask_and_a_slice() -> None:
    rows = examples.random_delays(5, keyed=True)
    listed = examples.tuples(rows)
    assert examples.tuples(rows.take(np.array([3, 1]))) == [listed[3], listed[1]]
    assert examples.tuples(rows.take(np.array([True, False, False, True, False]))) == [listed[0], listed[3]]
    assert examples.tuples(rows.take(slice(1, 3))) == listed[1:3]


def test_columns_of_different_length_or_type_are_refused() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="differ in shape"):
        Rows(one, two, one)
    with pytest.raises(ValueError, match="must be uint64"):
        Rows(one, one, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="key_hash"):
        Rows(one, one, one, np.zeros(2, np.uint32))


@given(examples.rows(), st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order(rows: Rows, shuffler: random.Random) -> None:
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    assert row_hash(rows.take(np.array(order, np.int64))) == row_hash(rows)


@given(examples.rows(min_size=1), st.data())
def test_the_hash_changes_when_one_value_of_one_row_changes(rows: Rows, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(rows) - 1))
    deliver_at_ms, ledger_id, entry_id = rows.deliver_at_ms.copy(), rows.ledger_id.copy(), rows.entry_id.copy()
    column = data.draw(st.sampled_from([deliver_at_ms, ledger_id, entry_id]))
    column[row] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    low, high = row_hash(Rows(deliver_at_ms, ledger_id, entry_id, rows.key_hash))
    assert low != row_hash(rows)[0]
    assert high != row_hash(rows)[1]


@given(examples.rows(keyed=False))
def test_the_hash_takes_a_missing_key_hash_for_zero(rows: Rows) -> None:
    zeros = np.zeros(len(rows), np.uint32)
    assert row_hash(Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id, zeros)) == row_hash(rows)


def test_the_hash_of_parts_adds_up_to_the_hash_of_the_whole() -> None:
    rows = examples.random_delays(2 * HASH_ROWS + 5, keyed=True)
    cut = HASH_ROWS - 3
    sums = np.array([row_hash(rows.take(slice(0, cut))), row_hash(rows.take(slice(cut, None)))], np.uint64).sum(axis=0)
    assert tuple(sums.tolist()) == row_hash(rows)


def test_the_hash_is_the_documented_mix() -> None:
    """Worked out with Python's integers: what another implementation must find."""
    rows = Rows(
        examples.column([1_000, 1_001]),
        examples.column([7, 8]),
        examples.column([40, 41]),
        np.array([5, 6], np.uint32),
    )
    expected = []
    for seed, multiplier in ((0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9), (0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD)):
        total = 0
        for deliver_at_ms, ledger_id, entry_id, key_hash in ((1_000, 7, 40, 5), (1_001, 8, 41, 6)):
            state = seed
            for value in (key_hash, ledger_id, entry_id, deliver_at_ms):
                state = (state ^ value) * multiplier % (1 << 64)
                state ^= state >> 32
            total = (total + state) % (1 << 64)
        expected.append(total)
    assert row_hash(rows) == tuple(expected)


def test_no_rows_have_the_hash_zero() -> None:
    assert row_hash(Rows.empty()) == (0, 0)
