"""What is held: received, and neither acknowledged nor released."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import batch, columns


def received(number: int, entries: list[int]) -> tarry.Batch:
    entry_id = np.array(entries, dtype=np.uint64)
    return tarry.Batch(
        epoch=1,
        ledger_id=np.full(len(entries), number, dtype=np.uint64),
        entry_id=entry_id,
        deliver_at_ms=entry_id + np.uint64(100),
        key_hash=None,
        received_at_ms=150,
        number=number,
        redelivery_count=np.zeros(len(entries), dtype=np.uint32),
    )


def held_entries(held: batch.HeldPositions) -> list[tuple[int, int]]:
    positions = held.positions()
    return list(zip(positions.ledger_id.tolist(), positions.entry_id.tolist(), strict=True))


def test_a_batch_is_given_back_once() -> None:
    held = batch.HeldPositions()
    one = received(1, [1, 2, 3])
    held.add(one)
    assert (held.give_back(one), held.give_back(one), len(held)) == (3, 0, 0)


def test_a_part_of_a_part_is_the_rows_it_shows() -> None:
    held = batch.HeldPositions()
    one = received(1, [10, 11, 12, 13, 14])
    held.add(one)
    part = one.take(slice(1, None)).take(np.array([True, False, True, False]))
    assert part.entry_id.tolist() == [11, 13]
    assert part.lateness_ms.tolist() == [150 - 111, 150 - 113]
    assert held.give_back(part) == 2
    assert held_entries(held) == [(1, 10), (1, 12), (1, 14)]
    assert held.give_back(one) == 3


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 11), max_size=8), st.booleans()), max_size=12),
)
def test_whatever_is_given_back_in_parts_or_as_columns_what_is_left_is_held(
    sizes: list[int], steps: list[tuple[int, list[int], bool]]
) -> None:
    held = batch.HeldPositions()
    batches = [received(number, list(range(size))) for number, size in enumerate(sizes, start=1)]
    for one in batches:
        held.add(one)
    left = {(one.number, entry) for one in batches for entry in one.entry_id.tolist()}
    for which, rows, as_columns in steps:
        one = batches[which % len(batches)]
        part = one.take(np.array(sorted({row for row in rows if row < len(one)}), dtype=np.intp))
        gone = left & {(one.number, entry) for entry in part.entry_id.tolist()}
        assert held.give_back(part.positions if as_columns else part) == len(gone)
        left -= gone
        assert len(held) == len(left)
        assert set(held_entries(held)) == left


def test_columns_with_another_time_are_not_the_held_ones() -> None:
    held = batch.HeldPositions()
    held.add(received(1, [5]))
    positions = held.positions()
    assert held.give_back(positions._replace(deliver_at_ms=positions.deliver_at_ms + np.uint64(1))) == 0
    assert len(held) == 1


def test_a_message_of_a_batch_is_not_its_entry() -> None:
    held = batch.HeldPositions()
    held.add(received(1, [5]))
    part = dataclasses.replace(
        received(2, [5]), ledger_id=np.array([1], np.uint64), batch_index=np.array([3], np.uint32)
    )
    held.add(part)
    assert held.positions().batch_indexes().tolist() == [tarry.NO_BATCH_INDEX, 3]
    assert held.give_back(columns.positions(1, 5, 105, 4)) == 0
    assert held.give_back(columns.positions(1, 5, 105, 3)) == 1
    assert held.positions().batch_index is None
    assert held.give_back(columns.positions(1, 5, 105)) == 1


def test_a_part_has_the_counts_and_batch_indexes_of_its_rows() -> None:
    whole = dataclasses.replace(
        received(1, [5, 6, 7]),
        redelivery_count=np.array([0, 2, 1], np.uint32),
        batch_index=np.array([9, 8, 7], np.uint32),
    )
    part = whole.take([2, 0])
    assert part.redelivery_count.tolist() == [1, 0]
    assert part.positions.batch_indexes().tolist() == [7, 9]


def test_a_batch_index_that_is_given_takes_the_place_of_the_batch_s() -> None:
    whole = received(1, [5, 6])
    assert batch.positions_of(whole, 3).batch_indexes().tolist() == [3, 3]
    assert batch.positions_of((7, 5, 0), [1, 2]).entry_id.tolist() == [5, 5]
    assert batch.positions_of((7, 5, 0, [1, 2])).batch_indexes().tolist() == [1, 2]
