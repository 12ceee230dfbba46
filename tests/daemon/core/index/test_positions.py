"""Keys of positions, pages, and sets in their stored form."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap, BitMap64

from daemon.core.index.position_keys import (
    UNKNOWN_KEY,
    PageTable,
    bitmap_of,
    contained,
    halves,
    has_more_pages,
    keys_of,
    pages_of,
    within,
)
from daemon.errors import Corruption, InvariantViolated
from storage_backends.formats.position_bitmap import PositionBitmap, position_bitmaps, positions_of

U64_MAX = (1 << 64) - 1
u64 = st.one_of(st.integers(0, 20), st.sampled_from((2**32 - 1, 2**32, 2**33 + 1, U64_MAX)), st.integers(0, U64_MAX))
position_sets = st.sets(st.tuples(u64, u64), max_size=30)


def columns(positions: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(positions, np.uint64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


@given(positions=position_sets)
def test_every_position_has_a_key_of_its_own_that_leads_back_to_it(positions: set[tuple[int, int]]) -> None:
    table = PageTable()
    ledger_id, entry_id = columns(sorted(positions))
    keys = table.intern(ledger_id, entry_id)
    assert len(set(keys.tolist())) == len(positions)
    back = table.positions(keys)
    assert back[0].tolist() == ledger_id.tolist()
    assert back[1].tolist() == entry_id.tolist()
    assert table.find(ledger_id, entry_id).tolist() == keys.tolist()


@given(known=position_sets, asked=position_sets)
def test_a_position_of_an_unknown_page_has_no_key_and_makes_none(
    known: set[tuple[int, int]], asked: set[tuple[int, int]]
) -> None:
    table = PageTable()
    table.intern(*columns(sorted(known)))
    pages = {(ledger, entry >> 32) for ledger, entry in known}
    assert len(table) == len(pages)
    found = table.find(*columns(sorted(asked)))
    for (ledger, entry), key in zip(sorted(asked), found.tolist(), strict=True):
        assert (key != int(UNKNOWN_KEY)) == ((ledger, entry >> 32) in pages)
    assert len(table) == len(pages)


@given(known=position_sets, gone=position_sets, ledger=u64, entries=st.tuples(u64, u64))
def test_a_range_of_entries_is_a_range_of_keys_in_each_page_that_is_known(
    known: set[tuple[int, int]], gone: set[tuple[int, int]], ledger: int, entries: tuple[int, int]
) -> None:
    table = PageTable()
    keys = bitmap_of(table.intern(*columns(sorted(known | gone))))
    kept_pages = {(each, entry >> 32) for each, entry in known}
    table.hold(BitMap([each for each in pages_of(keys) if table.places.page_of(each) in kept_pages]))
    table.forget_unheld(pages_of(keys))
    first, last = sorted(entries)
    for each in {ledger, *(each for each, _ in known)}:
        found = [within(keys, [keys_range]) for keys_range in table.key_ranges(each, first, last)]
        listed = [entry for part in found for entry in table.positions(keys_of(part))[1].tolist()]
        in_kept_pages = {at for at in known | gone if (at[0], at[1] >> 32) in kept_pages}
        assert listed == sorted(entry for at, entry in in_kept_pages if at == each and first <= entry <= last)
        below = {table.ledger_of(ordinal) for ordinal in table.held_below(each)}
        assert below == {at for at, _ in kept_pages if at < each}
    assert len(list(table.held_below(None))) == len(kept_pages)


@given(
    members=st.sets(st.integers(0, 300), max_size=60),
    ranges=st.lists(st.tuples(st.integers(0, 310), st.integers(0, 40)), max_size=5),
)
def test_what_lies_within_ranges_is_found_and_a_set_is_halved(members: set[int], ranges: list[tuple[int, int]]) -> None:
    bitmap = BitMap64(members)
    bounds = [(first, first + length) for first, length in ranges]
    assert set(within(bitmap, bounds)) == {key for key in members if any(low <= key <= high for low, high in bounds)}
    if len(members) > 1:
        lower, upper = halves(bitmap)
        assert [*lower, *upper] == sorted(members)
        assert abs(len(lower) - len(upper)) <= 1


@pytest.mark.parametrize("count", [100, 30_000])
def test_a_set_is_made_of_keys_in_any_order(count: int) -> None:
    keys = np.random.default_rng(3).permutation(2 * count)[:count].astype(np.uint64)
    for order in (keys, np.sort(keys)):
        assert keys_of(bitmap_of(order)).tolist() == sorted(keys.tolist())


def test_a_page_stays_while_anybody_holds_it_and_its_ordinal_is_never_given_out_again() -> None:
    table = PageTable()
    ledger_id, entry_id = columns([(7, 1), (8, 1)])
    before = table.intern(ledger_id, entry_id)
    ordinals = pages_of(bitmap_of(before))
    table.hold(ordinals)
    table.hold(ordinals)
    table.release(ordinals)
    table.forget_unheld(ordinals)
    assert table.find(ledger_id, entry_id).tolist() == before.tolist()
    table.release(ordinals)
    assert len(table) == 0
    assert set(table.find(ledger_id, entry_id).tolist()) == {int(UNKNOWN_KEY)}
    again = table.intern(ledger_id, entry_id)
    assert not set(again.tolist()) & set(before.tolist())
    assert table.positions(before)[0].tolist() == [7, 8]


def test_a_page_that_nobody_holds_is_forgotten_on_request() -> None:
    table = PageTable()
    keys = table.intern(*columns([(7, 1), (9, 2**40)]))
    table.hold(pages_of(bitmap_of(keys[:1])))
    table.forget_unheld(pages_of(bitmap_of(keys)))
    assert len(table) == 1


# A run, a bit set, an array and few values, in every number of containers about the limit of four: with and without
# run containers the stored form has its lengths in different places.
SHAPES = {
    "array": [0, 2, 4, 900],
    "run": list(range(100, 9_000)),
    "bitset": list(range(0, 20_000, 3)),
    "one": [65_535],
}


@pytest.mark.parametrize("containers", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("shapes", [("array",), ("run",), ("bitset",), ("run", "array"), ("bitset", "one", "run")])
def test_a_set_of_any_containers_is_stored_page_by_page_as_the_format_says(
    shapes: tuple[str, ...], containers: int
) -> None:
    low = [np.array(SHAPES[shapes[number % len(shapes)]], np.uint64) for number in range(containers)]
    entries = np.concatenate([np.uint64(number << 16) | part for number, part in enumerate(low)])
    ledger_id = np.repeat(np.array([3, U64_MAX], np.uint64), 2 * len(entries))
    entry_id = np.concatenate([np.uint64(page) | entries for _ in range(2) for page in (0, 5 << 32)])
    table = PageTable()
    keys = table.intern(ledger_id, entry_id)
    stored = table.to_stored(bitmap_of(keys))
    expected = {(each.ledger_id, each.page): each.entries for each in position_bitmaps(ledger_id, entry_id)}
    assert {(each.ledger_id, each.page): bytes(each.entries) for each in stored} == expected
    assert table.from_stored(stored) == bitmap_of(keys)
    elsewhere = PageTable()
    elsewhere.intern(*columns([(1, 1), (U64_MAX, 0)]))
    ledgers_there, entries_there = elsewhere.positions(keys_of(elsewhere.from_stored(reversed(stored))))
    in_order = np.lexsort((entries_there, ledgers_there))
    np.testing.assert_array_equal(ledgers_there[in_order], ledger_id)
    np.testing.assert_array_equal(entries_there[in_order], entry_id)


@given(positions=position_sets)
def test_a_stored_set_is_the_same_set_in_another_table(positions: set[tuple[int, int]]) -> None:
    table = PageTable()
    stored = table.to_stored(bitmap_of(table.intern(*columns(sorted(positions)))))
    assert set(zip(*map(np.ndarray.tolist, positions_of(stored)), strict=True)) == positions
    other = PageTable()
    back = other.positions(keys_of(other.from_stored(stored)))
    assert set(zip(back[0].tolist(), back[1].tolist(), strict=True)) == positions


@given(positions=position_sets, held=position_sets)
def test_of_a_stored_set_the_pages_that_are_held_are_found_and_the_others_not_interned(
    positions: set[tuple[int, int]], held: set[tuple[int, int]]
) -> None:
    elsewhere, table = PageTable(), PageTable()
    stored = elsewhere.to_stored(bitmap_of(elsewhere.intern(*columns(sorted(positions)))))
    table.intern(*columns(sorted(held)))
    pages = {(ledger, entry >> 32) for ledger, entry in held}
    found = table.positions(keys_of(table.find_stored(stored)))
    assert set(zip(*map(np.ndarray.tolist, found), strict=True)) == {
        at for at in positions if (at[0], at[1] >> 32) in pages
    }
    assert len(table) == len(pages)


def test_storing_a_set_does_not_change_it() -> None:
    table = PageTable()
    keys = bitmap_of(table.intern(*columns([(7, entry) for entry in range(5_000)])))
    before = keys.serialize()
    table.to_stored(keys)
    assert keys.serialize() == before


@given(keys=st.lists(st.integers(0, U64_MAX), max_size=40), members=st.sets(st.integers(0, U64_MAX), max_size=40))
def test_contained_says_of_each_key_whether_it_is_in_the_set(keys: list[int], members: set[int]) -> None:
    members |= set(keys[::2])
    assert contained(np.array(keys, np.uint64), BitMap64(members)).tolist() == [key in members for key in keys]


@given(
    ledgers=st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), min_size=1, max_size=60),
    further_page=st.booleans(),
)
def test_keys_are_the_same_whether_ledgers_lie_close_together_or_not(ledgers: list[int], further_page: bool) -> None:
    table = PageTable()
    ledger_id = np.array(ledgers, np.uint64)
    entry_id = np.arange(len(ledgers), dtype=np.uint64) + np.uint64((1 << 32) * further_page)
    keys = table.intern(ledger_id, entry_id)
    back = table.positions(keys)
    assert (back[0].tolist(), back[1].tolist()) == (ledgers, entry_id.tolist())
    assert table.find(ledger_id, entry_id).tolist() == keys.tolist()


@given(
    keys=st.lists(st.integers(0, 50) | st.integers(2**40, 2**40 + 9), max_size=30)
    | st.builds(list, st.builds(range, st.integers(0, 9), st.integers(9, 99)))
)
def test_the_set_of_keys_has_each_of_them_in_whatever_order_they_come(keys: list[int]) -> None:
    assert keys_of(bitmap_of(np.array(keys, np.uint64))).tolist() == sorted(set(keys))


def test_a_set_of_many_pages_is_cut_with_work_that_grows_as_the_pages_do() -> None:
    pages = 20_000
    keys = np.arange(pages, dtype=np.uint64) << np.uint64(32)
    bitmap = bitmap_of(keys)
    started_s = time.process_time()
    lower, upper = halves(bitmap)
    found = within(bitmap, [(key, key) for key in keys.tolist()])
    # What looks at all pages for each of them takes ten times as long, and whole pages as sets do not fit into memory.
    assert time.process_time() - started_s < 5
    assert (len(lower), len(upper), len(found)) == (pages // 2, pages // 2, pages)
    assert has_more_pages(bitmap, pages - 1)
    assert not has_more_pages(bitmap, pages)


@given(batches=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=60), max_size=12), seed=st.integers(0, 99))
def test_ledgers_with_a_row_each_are_known_while_something_holds_them(batches: list[list[int]], seed: int) -> None:
    table, kept = PageTable(), dict[int, BitMap]()
    random = np.random.default_rng(seed)
    for ledgers in batches:
        ledger_id = np.array(ledgers, np.uint64) << np.uint64(20)
        keys = table.intern(ledger_id, np.zeros(len(ledgers), np.uint64))
        assert table.positions(keys)[0].tolist() == ledger_id.tolist()
        for ledger, key in zip(ledgers, keys.tolist(), strict=True):
            page = BitMap([key >> 32])
            assert kept.setdefault(ledger, page) == page, "a page that is held has one ordinal"
            if not table.is_held(key >> 32):
                table.hold(page)
        for ledger in random.permutation(sorted(kept))[: len(kept) // 2].tolist():
            table.release(kept.pop(ledger))
        asked = np.arange(301, dtype=np.uint64) << np.uint64(20)
        found = table.find(asked, np.zeros(301, np.uint64))
        assert {ledger for ledger in range(301) if found[ledger] != UNKNOWN_KEY} == kept.keys()
        assert len(table) == len(kept)


def test_a_ledger_for_each_row_takes_some_twenty_bytes_of_its_table() -> None:
    rows = 50_000
    table = PageTable()
    tracemalloc.start()
    try:
        for first in range(0, rows, 1_000):
            ledger_id = np.arange(first, first + 1_000, dtype=np.uint64) + np.uint64(1_790_000_000_000)
            table.hold(pages_of(bitmap_of(table.intern(ledger_id, np.zeros(1_000, np.uint64)))))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 28 of columns, which have doubled last at 65,536, and 4 to 16 of places.
    assert taken / rows < 64


@pytest.mark.parametrize("rows_a_page", [1, 63, 64, 65, 3_000])
def test_the_pages_of_a_set_are_found_however_many_rows_they_have(rows_a_page: int) -> None:
    pages = [0, 3, 4, 70_000, 1 << 31]
    keys = [page << 32 | row for page in pages for row in range(rows_a_page)]
    assert [*pages_of(BitMap64(keys))] == pages
    assert not pages_of(BitMap64())


def test_a_page_that_is_not_held_cannot_be_let_go() -> None:
    table = PageTable()
    ordinals = pages_of(bitmap_of(table.intern(*columns([(7, 1)]))))
    with pytest.raises(InvariantViolated, match="not held"):
        table.release(ordinals)


def test_a_page_that_was_forgotten_cannot_be_forgotten_again() -> None:
    table = PageTable()
    ordinals = pages_of(bitmap_of(table.intern(*columns([(7, 1)]))))
    table.forget_unheld(ordinals)
    again = table.intern(*columns([(7, 1)]))
    with pytest.raises(InvariantViolated, match="not known"):
        table.forget_unheld(ordinals)
    assert table.find(*columns([(7, 1)])).tolist() == again.tolist()


def test_stored_positions_that_are_no_bitmap_are_damage() -> None:
    table = PageTable()
    for entries in (b"", b"\xff" * 40):
        with pytest.raises(Corruption, match="the bitmaps of 1 pages: "):
            table.from_stored([PositionBitmap(1, 0, entries)])
