"""What is held: received, and neither acknowledged nor released."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
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


def drawn(number: int, entries: list[int], columns_seed: int) -> tarry.Batch:
    """A batch that has, by the bits of the seed, a column of hashes and one of batch indexes."""
    rows = len(entries)
    return dataclasses.replace(
        received(number, entries),
        received_at_ms=150 + number,
        key_hash=np.arange(rows, dtype=np.uint32) + np.uint32(number) if columns_seed & 1 else None,
        batch_index=np.arange(rows, dtype=np.uint32) if columns_seed & 2 else None,
        redelivery_count=np.full(rows, columns_seed >> 2, np.uint32),
    )


def rows_of(one: tarry.Batch) -> list[tuple[int, ...]]:
    """Everything that a row has."""
    hashes = np.zeros(len(one), np.uint32) if one.key_hash is None else one.key_hash
    given_columns = (one.ledger_id, one.entry_id, one.deliver_at_ms, one.redelivery_count, one.lateness_ms, hashes)
    return list(zip(*(column.tolist() for column in (*given_columns, one.positions.batch_indexes())), strict=True))


PARTS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 11), st.lists(st.integers(0, 4), max_size=5, unique=True)),
    min_size=1,
    max_size=8,
)


@given(parts=PARTS, nested=st.booleans(), taken=st.lists(st.integers(0, 39), max_size=10), cut=st.integers(0, 8))
def test_joined_batches_are_their_parts_together(
    parts: list[tuple[int, int, list[int]]], nested: bool, taken: list[int], cut: int
) -> None:
    """Of the same batch several parts, in any order, also some that have rows in common."""
    held = batch.HeldPositions()
    whole = {number: drawn(number, list(range(5)), seed) for number, seed, _ in parts}
    for one in whole.values():
        held.add(one)
    given_parts = [whole[number].take(np.array(rows, np.intp)) for number, _, rows in parts]
    joined = tarry.Batch.concat(given_parts)
    if nested and 0 < cut < len(given_parts):
        joined = tarry.Batch.concat([tarry.Batch.concat(given_parts[:cut]), tarry.Batch.concat(given_parts[cut:])])
    rows = [row for part in given_parts for row in rows_of(part)]
    assert rows_of(joined) == rows
    assert (joined.key_hash is None) == all(part.key_hash is None for part in given_parts)
    assert (joined.batch_index is None) == all(part.batch_index is None for part in given_parts)
    assert joined.received_at_ms == max(part.received_at_ms for part in given_parts)
    assert [joined.delivery_id(row) for row in range(len(joined))] == [
        part.delivery_id(row) for part in given_parts for row in range(len(part))
    ]

    chosen = np.array([row for row in taken if row < len(rows)], np.intp)
    part = joined.take(chosen)
    assert rows_of(part) == [rows[row] for row in chosen.tolist()]
    before = len(held)
    assert held.give_back(part) == len({(row[0], row[1]) for row in rows_of(part)})
    held.give_back(joined)
    assert before - len(held) == len({(row[0], row[1]) for row in rows}), "each row gives its permit back once"
    assert held.give_back(joined) == held.give_back(part) == 0
    left = {(number, entry) for number in whole for entry in range(5)} - {(row[0], row[1]) for row in rows}
    assert set(held_entries(held)) == left


def test_one_batch_joined_is_itself() -> None:
    one = received(1, [1, 2])
    assert tarry.Batch.concat([one]) is one


def test_what_was_taken_back_of_a_joined_batch_gives_nothing_back_again() -> None:
    held = batch.HeldPositions()
    first, second = received(1, [1, 2]), received(2, [3])
    held.add(first)
    held.add(second)
    joined = tarry.Batch.concat([first, second])
    assert held.give_back(second.positions) == 1
    again = dataclasses.replace(received(3, [3]), ledger_id=second.ledger_id)
    held.add(again)
    assert held.give_back(joined) == 2
    assert held_entries(held) == [(2, 3)], "what came again since is held"


def leased(entries: list[int], *, received_at_ms: int, lease_ms: int, lost: tuple[int, ...]) -> tarry.Leased:
    given_fields = {field.name: getattr(received(0, entries), field.name) for field in dataclasses.fields(tarry.Batch)}
    given_fields["received_at_ms"] = received_at_ms
    ranges = tuple(tarry.RebuildNeeded(ledger, ledger, 1, "bucket", "crc", True) for ledger in lost)
    return tarry.Leased(**given_fields, lease_ms=lease_ms, rebuild_needed=ranges)


def test_joined_leases_are_as_long_as_the_one_that_ends_first() -> None:
    first = leased([1], received_at_ms=1_000, lease_ms=500, lost=(7,))
    second = leased([2], received_at_ms=1_200, lease_ms=900, lost=(7, 8))
    joined = tarry.Batch.concat([first, second])
    assert (joined.received_at_ms, joined.lease_ms) == (1_200, 300)
    assert [each.first_ledger_id for each in joined.rebuild_needed] == [7, 8]


def consumer_batch(number: int, consumer: tarry.Consumer) -> tarry.ConsumerBatch:
    given_fields = {field.name: getattr(received(number, [1]), field.name) for field in dataclasses.fields(tarry.Batch)}
    return tarry.ConsumerBatch(**given_fields, consumer=consumer, consumer_id=1)


def test_only_batches_of_one_kind_and_consumer_are_joined() -> None:
    one, other = tarry.Consumer("one"), tarry.Consumer("other")
    joined = tarry.Batch.concat([consumer_batch(1, one), consumer_batch(2, one)])
    assert isinstance(joined, tarry.ConsumerBatch)
    assert joined.consumer is one
    with pytest.raises(tarry.InvalidArgument, match="of 'one' and 'other'"):
        tarry.Batch.concat([consumer_batch(1, one), consumer_batch(2, other)])
    with pytest.raises(tarry.InvalidArgument, match="Batch and ConsumerBatch; all that are joined are of one kind"):
        tarry.Batch.concat([received(1, [1]), consumer_batch(2, one)])
    with pytest.raises(tarry.InvalidArgument, match="at least 1"):
        tarry.Batch.concat([])
