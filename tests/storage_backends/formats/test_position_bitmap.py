from __future__ import annotations

import contextlib

import numpy as np
import pyroaring
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import format_errors, position_bitmap
from storage_backends.formats.position_bitmap import PositionBitmap, PositionSet
from storage_backends.formats.row_columns import Rows
from tests.storage_backends.formats._support import examples


@given(examples.rows())
def test_bitmaps_hold_exactly_the_positions_ascending(rows: Rows) -> None:
    bitmaps = position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)
    ledger_id, entry_id = position_bitmap.positions_of(bitmaps)
    expected = sorted({row[1:3] for row in examples.tuples(rows)})
    assert list(zip(ledger_id.tolist(), entry_id.tolist(), strict=True)) == expected


@given(examples.rows())
def test_there_is_one_bitmap_for_each_ledger_and_page(rows: Rows) -> None:
    bitmaps = position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)
    expected = sorted({(ledger, entry >> 32) for _, ledger, entry, *_ in examples.tuples(rows)})
    assert [(bitmap.ledger_id, bitmap.page) for bitmap in bitmaps] == expected


def test_entries_in_order_take_a_few_bytes() -> None:
    entry_id = np.arange(200_000, dtype=np.uint64)
    (bitmap,) = position_bitmap.position_bitmaps(np.full(200_000, 5, np.uint64), entry_id)
    assert len(bitmap.entries) < 100


@pytest.mark.parametrize("ledgers", [3, 100_000])
def test_positions_of_many_ledgers_in_any_order_are_grouped_by_ledger(ledgers: int) -> None:
    generator = np.random.default_rng(2)
    ledger_id = generator.choice(np.array([0, ledgers, 5], np.uint64), 5_000)
    entry_id = generator.permutation(5_000).astype(np.uint64)
    bitmaps = position_bitmap.position_bitmaps(ledger_id, entry_id)
    assert {bitmap.ledger_id: len(bitmap.bitmap()) for bitmap in bitmaps} == {
        int(ledger): int((ledger_id == ledger).sum()) for ledger in np.unique(ledger_id)
    }


def test_the_bytes_are_the_portable_serialization_after_run_optimize() -> None:
    expected = pyroaring.BitMap(range(1_000))
    expected.run_optimize()
    (bitmap,) = position_bitmap.position_bitmaps(np.zeros(1_000, np.uint64), np.arange(1_000, dtype=np.uint64))
    assert bitmap == PositionBitmap(0, 0, expected.serialize())


@pytest.mark.parametrize("entries", [b"", b"\xff" * 20, pyroaring.BitMap([1, 2]).serialize() + b"x"])
def test_bytes_that_are_no_bitmap_are_refused_with_their_ledger(entries: bytes) -> None:
    with pytest.raises(format_errors.FormatError, match="bitmap of ledger 9 page 1"):
        PositionBitmap(9, 1, entries).bitmap()


@given(
    st.sets(st.one_of(st.integers(0, 5_000), st.integers(0, (1 << 32) - 1)), min_size=1, max_size=50),
    st.sampled_from([0, 0, 3_000, 70_000]),
    st.tuples(st.integers(0, 60), st.binary(max_size=3)),
)
def test_what_is_read_as_a_bitmap_has_as_many_entries_as_are_counted(
    entries: set[int], dense: int, damage: tuple[int, bytes]
) -> None:
    bitmap = pyroaring.BitMap(entries | set(range(0, 2 * dense, 2)))
    sound = PositionBitmap.of(9, 1, bitmap)
    assert sound.count() == len(sound.bitmap()) == len(bitmap)
    place, inserted = min(damage[0], len(sound.entries)), damage[1]
    for data in (
        sound.entries[:place] + inserted + sound.entries[place:],
        sound.entries[:place] + inserted + sound.entries[place + len(inserted) :],
        sound.entries[:place],
    ):
        damaged = PositionBitmap(9, 1, data)
        with contextlib.suppress(format_errors.FormatError):
            rows = len(damaged.bitmap())
            assert damaged.count() == rows


def test_a_truncated_bitmap_is_refused() -> None:
    entries = pyroaring.BitMap([1, 70_000, 5_000_000]).serialize()
    for kept in range(len(entries)):
        with pytest.raises(format_errors.FormatError):
            PositionBitmap(9, 0, entries[:kept]).bitmap()


positions = st.sets(st.tuples(examples.ledgers, examples.entries), max_size=40)


def set_of(some: set[tuple[int, int]]) -> PositionSet:
    ledger_id = examples.column([ledger for ledger, _ in some])
    entry_id = examples.column([entry for _, entry in some])
    return PositionSet.of(position_bitmap.position_bitmaps(ledger_id, entry_id))


def plain(some: PositionSet) -> set[tuple[int, int]]:
    ledger_id, entry_id = position_bitmap.positions_of(some.bitmaps())
    return set(zip(ledger_id.tolist(), entry_id.tolist(), strict=True))


@given(positions, positions)
def test_the_arithmetic_of_position_sets_is_that_of_sets(
    one: set[tuple[int, int]], other: set[tuple[int, int]]
) -> None:
    left, right = set_of(one), set_of(other)
    before = left.bitmaps(), right.bitmaps()
    assert plain(left | right) == one | other
    assert plain(left & right) == one & other
    assert plain(left - right) == one - other
    assert (left <= right) == (one <= other)
    assert (left == right) == (one == other)
    assert (len(left), bool(left)) == (len(one), bool(one))
    assert (left & right) <= left
    assert (left.bitmaps(), right.bitmaps()) == before


@given(positions, positions)
def test_arithmetic_leaves_no_empty_page(one: set[tuple[int, int]], other: set[tuple[int, int]]) -> None:
    for some in (set_of(one) - set_of(other), set_of(one) & set_of(other)):
        assert all(bitmap for _, bitmap in some.items())
        assert position_bitmap.in_order(some.bitmaps())


@given(positions, examples.rows())
def test_a_mask_says_which_positions_of_two_columns_are_in_the_set(some: set[tuple[int, int]], rows: Rows) -> None:
    kept = set_of(some) | PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id[::2], rows.entry_id[::2]))
    expected = [row[1:3] in plain(kept) for row in examples.tuples(rows)]
    assert kept.mask_of(rows.ledger_id, rows.entry_id).tolist() == expected


def test_a_set_is_the_same_after_it_was_asked() -> None:
    entry_ids = np.arange(1_000, dtype=np.uint64)
    ledger_ids = np.ones_like(entry_ids)
    some = PositionSet.of(position_bitmap.position_bitmaps(ledger_ids, entry_ids))
    for first in (0, 500):
        asked = slice(first, first + 10)
        assert some.mask_of(ledger_ids[asked], entry_ids[asked]).all()
    assert len(some) == 1_000


def test_bitmaps_of_a_page_that_come_apart_are_one_set() -> None:
    page = [PositionBitmap.of(9, 1, pyroaring.BitMap(entries)) for entries in ([4, 5], [], [1, 5])]
    assert plain(PositionSet.of(page)) == {(9, (1 << 32) + entry) for entry in (1, 4, 5)}
    assert not PositionSet.of(page[1:2])
