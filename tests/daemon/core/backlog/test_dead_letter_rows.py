"""Dead letters in memory: packed, found page by page, taken out."""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from daemon.core.backlog import dead_letter_rows
from daemon.core.backlog.dead_letter_rows import ALL, DeadLetterFilter, DeadLetterRows, DeadLetters
from daemon.errors import InvariantViolated
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import U64
from storage_backends.formats.schedule_ids import ScheduleIds

Letter = tuple[int, int, int, int, int, int, int, int, int, str, bytes]
TEXTS = ("", "no such order", "broken")


def letter(number: int) -> Letter:
    """All columns differ from letter to letter."""
    part = NO_BATCH_INDEX if number % 2 else number
    times = (number * 1_000, number * 7_919 % (1 << 32), number % 5, 10_000 + number)
    schedule_id = b"order-%d" % number if number % 4 else b""
    return (number, number // 10, number * 3, part, *times, 1 + number % 2, TEXTS[number % 3], schedule_id)


def rows(letters: list[Letter]) -> DeadLetterRows:
    if not letters:
        return DeadLetterRows.empty()
    *columns, texts, ids = zip(*letters, strict=True)
    kinds = (np.uint64, np.uint64, np.uint64, np.uint32, np.uint64, np.uint32, np.uint32, np.uint64, np.uint8)
    table = tuple(dict.fromkeys(("", *texts)))
    text_index = np.array([table.index(text) for text in texts], np.uint32)
    values = [np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    lengths = np.array(list(map(len, ids)), np.uint64)
    schedule_ids = ScheduleIds.of_piece(lengths, b"".join(ids)) if any(ids) else None
    return DeadLetterRows(*values, text_index, table, schedule_ids)  # type: ignore[arg-type, call-arg]


def letters(found: DeadLetterRows) -> list[Letter]:
    assert found.texts[0] == ""
    columns = [getattr(found, field.name).tolist() for field in dataclasses.fields(found)[:-3]]
    texts = [found.texts[number] for number in found.text_index.tolist()]
    ids = [b""] * len(found) if found.schedule_ids is None else found.schedule_ids.tolist()
    return list(zip(*columns, texts, ids, strict=True))


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


def all_pages(there: DeadLetters, wanted: DeadLetterFilter = ALL, limit: int = 3) -> list[Letter]:
    found: list[Letter] = []
    after_id: int | None = 0
    while after_id is not None:
        page = there.page(wanted, after_id, limit)
        assert len(page.rows) <= limit
        found += letters(page.rows)
        assert page.next_after is None or page.next_after > after_id
        after_id = page.next_after
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_rows, "CHUNK_ROWS", 4)
    monkeypatch.setattr(dead_letter_rows, "LOOKED_AT_MAX", 8)


@pytest.fixture
def twenty(small_chunks: None) -> DeadLetters:
    """With ids 1 to 20."""
    there = DeadLetters()
    for first in (1, 2, 9, 10):
        last = {1: 1, 2: 8, 9: 9, 10: 20}[first]
        there.add(rows([letter(number) for number in range(first, last + 1)]))
    return there


def test_all_columns_come_back_as_they_went_in(twenty: DeadLetters) -> None:
    assert all_pages(twenty) == [letter(number) for number in range(1, 21)]
    assert letters(twenty.freeze().rows()) == [letter(number) for number in range(1, 21)]
    assert (len(twenty), twenty.last_id) == (20, 20)


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (ALL, range(1, 21)),
        (DeadLetterFilter(ids=u64(0, 3, 17, 99)), (3, 17)),
        (DeadLetterFilter(ids=u64()), ()),
        # Ledgers are a tenth of the id.
        (DeadLetterFilter(ledgers=(1, 1)), range(10, 20)),
        (DeadLetterFilter(ledgers=(1, 2)), range(10, 21)),
        # 1 is of even ids.
        (DeadLetterFilter(reason=1), range(2, 21, 2)),
        # The time is 10,000 and the id.
        (DeadLetterFilter(from_ms=10_005), range(5, 21)),
        (DeadLetterFilter(until_ms=10_005), range(1, 5)),
        (DeadLetterFilter(from_ms=10_005, until_ms=10_007), (5, 6)),
        (DeadLetterFilter(ids=u64(4, 5, 12), ledgers=(0, 0), reason=1, from_ms=0, until_ms=1 << 62), (4,)),
    ],
)
def test_a_filter_leaves_what_everything_in_it_holds_for(
    twenty: DeadLetters, wanted: DeadLetterFilter, ids: range | tuple[int, ...]
) -> None:
    assert [each[0] for each in all_pages(twenty, wanted)] == list(ids)


def test_a_page_looks_at_a_bounded_number_of_rows_and_says_where_it_goes_on(twenty: DeadLetters) -> None:
    """Eight rows, whatever the filter leaves of them."""
    page = twenty.page(DeadLetterFilter(from_ms=10_020), 0, 5)
    assert len(page.rows) == 0
    assert page.next_after == 8


def test_a_page_that_ends_with_the_last_one_has_no_next(twenty: DeadLetters) -> None:
    assert twenty.page(ALL, 16, 4).next_after is None
    assert twenty.page(DeadLetterFilter(ids=u64(19)), 0, 1).next_after is None


def test_what_was_removed_is_gone_and_only_that_is_counted(twenty: DeadLetters) -> None:
    assert twenty.remove(u64(3, 5, 5, 40)) == 2
    assert twenty.remove(u64(3)) == 0
    assert len(twenty) == 18
    assert [each[0] for each in all_pages(twenty)] == [number for number in range(1, 21) if number not in (3, 5)]


def test_ids_ascend_also_after_the_last_ones_were_removed(twenty: DeadLetters) -> None:
    twenty.remove(u64(*range(1, 21)))
    assert (len(twenty), twenty.last_id) == (0, 20)
    with pytest.raises(InvariantViolated, match="dead letters 20 to 20 do not ascend from 20"):
        twenty.add(rows([letter(20)]))
    twenty.add(rows([letter(21)]))
    assert all_pages(twenty) == [letter(21)]


def test_removed_rows_give_their_memory_back(twenty: DeadLetters) -> None:
    twenty.remove(u64(*range(1, 20)))
    assert [chunk.rows for chunk in twenty._chunks] == [1]
    assert not twenty._left


def test_what_was_frozen_does_not_change(twenty: DeadLetters) -> None:
    frozen = twenty.freeze()
    twenty.remove(u64(1, 2, 3, 4, 20))
    twenty.add(rows([letter(21)]))
    assert letters(frozen.rows()) == [letter(number) for number in range(1, 21)]
    assert len(frozen) == 20


def test_one_that_comes_alone_costs_little_however_many_came_alone_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is packed as often as the number of a chunk's rows has bits, at most."""
    packed_rows: list[int] = []
    pack = dead_letter_rows._Chunk.of

    def counted(rows: DeadLetterRows) -> dead_letter_rows._Chunk:
        packed_rows.append(len(rows))
        return pack(rows)

    monkeypatch.setattr(dead_letter_rows._Chunk, "of", counted)
    there = DeadLetters()
    for number in range(1, 1_001):
        there.add(rows([letter(number)]))
    assert sum(packed_rows) <= 1_000 * dead_letter_rows.CHUNK_ROWS.bit_length()
    assert len(there._chunks) <= dead_letter_rows.CHUNK_ROWS.bit_length()
    assert all_pages(there) == [letter(number) for number in range(1, 1_001)]


def test_a_dead_letter_takes_few_bytes() -> None:
    """In the order of dying, with a text in common: 64 bytes as plain columns."""
    there = DeadLetters()
    there.add(rows([letter(number) for number in range(1, 8_193)]))
    packed = sum(column.size_bytes for chunk in there._chunks for column in (*chunk.columns, chunk.text_index))
    assert packed <= 28 * len(there)


@hypothesis.given(
    st.lists(
        st.one_of(st.integers(1, 9), st.sets(st.integers(1, 60), min_size=1, max_size=12)), min_size=1, max_size=14
    ),
    st.integers(1, 7),
)
def test_whatever_comes_and_goes_the_pages_are_those_of_a_dictionary(changes: list[int | set[int]], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dead_letter_rows, "CHUNK_ROWS", 4)
        patch.setattr(dead_letter_rows, "LOOKED_AT_MAX", 6)
        there, known = DeadLetters(), dict[int, Letter]()
        for change in changes:
            if isinstance(change, int):
                # Ids may be left out.
                new = [letter(there.last_id + 2 * number) for number in range(1, change + 1)]
                there.add(rows(new))
                known |= {each[0]: each for each in new}
            else:
                gone = change & known.keys()
                assert there.remove(u64(*sorted(change))) == len(gone)
                known = {number: each for number, each in known.items() if number not in gone}
            assert len(there) == len(known)
        assert all_pages(there, limit=limit) == list(known.values())
        odd = [each for each in known.values() if each[8] == 2]
        assert all_pages(there, DeadLetterFilter(reason=2), limit) == odd
        assert letters(there.freeze().rows()) == list(known.values())
