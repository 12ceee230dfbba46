"""The columns that progress has of redeliveries come back as they were, and what is none is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import column_format, format_errors, manifest, redelivery_columns, segment
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.record_columns import DeadLetterReason
from storage_backends.formats.redelivery_columns import DeadLetterColumns
from storage_backends.formats.row_columns import U64, Rows
from tests.storage_backends.formats._support import examples


@st.composite
def nacked(draw: st.DrawFn) -> tuple[Rows, U64]:
    rows = draw(examples.rows(max_size=20))
    return rows, draw(examples.u64_column(len(rows)))


@st.composite
def dead_letters(draw: st.DrawFn) -> DeadLetterColumns:
    ids = examples.column(sorted(draw(st.sets(examples.u64, max_size=20))))
    count = len(ids)
    texts = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=9), min_size=1, max_size=3))
    reasons = draw(st.lists(st.sampled_from(DeadLetterReason), min_size=count, max_size=count))
    text_index = draw(st.lists(st.integers(0, len(texts) - 1), min_size=count, max_size=count))
    return DeadLetterColumns(
        ids,
        draw(examples.u64_column(count)),
        draw(examples.u64_column(count)),
        draw(examples.u32_column(count)),
        draw(examples.u64_column(count)),
        draw(examples.u32_column(count)),
        draw(examples.u32_column(count)),
        draw(examples.u64_column(count)),
        np.array(reasons, np.uint8),
        np.array(text_index, np.uint32),
        tuple(texts),
        draw(examples.id_columns(count)) if draw(st.booleans()) else None,
    )


def plain(letters: DeadLetterColumns) -> list[object]:
    columns: list[Any] = list(letters[:-1])
    ids = letters.schedule_ids
    return [
        *(each if isinstance(each, tuple) else (each.dtype, each.tolist()) for each in columns),
        ids.tolist() if ids else None,
    ]


@given(nacked(), examples.u64)
def test_nacked_rows_come_back_as_they_were(some: tuple[Rows, U64], index_id: int) -> None:
    stored = redelivery_columns.encode_nacked(index_id, *some, segment.compressor())
    assert (stored.index_id, stored.rows) == (index_id, len(some[0]))
    rows, times = redelivery_columns.decode_nacked(stored)
    assert examples.tuples(rows) == examples.tuples(some[0])
    assert times.tolist() == some[1].tolist()


@given(dead_letters())
def test_dead_letters_come_back_as_they_were(letters: DeadLetterColumns) -> None:
    stored = redelivery_columns.encode_dead_letters(letters, segment.compressor())
    assert plain(redelivery_columns.decode_dead_letters(stored)) == plain(letters)


def a_nacked_part() -> manifest.NackedRows:
    rows = examples.random_delays(40, keyed=True)
    return redelivery_columns.encode_nacked(0, rows, rows.deliver_at_ms, segment.compressor())


def some_dead_letters() -> manifest.DeadLetters:
    rows = examples.random_delays(40, keyed=True)
    assert rows.key_hash is not None
    small = np.arange(40, dtype=np.uint32)
    letters = DeadLetterColumns(
        rows.entry_id + np.uint64(1),
        rows.ledger_id,
        rows.entry_id,
        np.full(40, NO_BATCH_INDEX, np.uint32),
        rows.deliver_at_ms,
        rows.key_hash,
        small,
        rows.deliver_at_ms,
        np.array([DeadLetterReason.TOO_OFTEN, DeadLetterReason.REJECTED] * 20, np.uint8),
        small % np.uint32(2),
        ("", "no such order"),
    )
    return redelivery_columns.encode_dead_letters(letters, segment.compressor())


NACKED_COLUMNS = ("deliver_at_ms", "ledger_id", "entry_id", "key_hash", "redeliver_at_ms")
DEAD_LETTER_COLUMNS = tuple(name for name in DeadLetterColumns._fields if name not in ("texts", "schedule_ids"))


@pytest.mark.parametrize("name", NACKED_COLUMNS)
def test_a_damaged_column_of_nacked_rows_is_named(name: str) -> None:
    part = a_nacked_part()
    damaged = dataclasses.replace(part, **{name: getattr(part, name)[:-1]})
    with pytest.raises(format_errors.FormatError, match=f"^nacked rows {name} is damaged"):
        redelivery_columns.decode_nacked(damaged)


@pytest.mark.parametrize("name", DEAD_LETTER_COLUMNS)
def test_a_damaged_column_of_dead_letters_is_named(name: str) -> None:
    letters = some_dead_letters()
    changes: dict[str, Any] = {name: getattr(letters, name)[:5]}
    damaged = dataclasses.replace(letters, **changes)
    with pytest.raises(format_errors.FormatError, match=f"^dead letters {name} is damaged"):
        redelivery_columns.decode_dead_letters(damaged)


def test_damaged_schedule_ids_are_named() -> None:
    rows = examples.random_delays(40)
    rows = dataclasses.replace(rows, schedule_ids=examples.ids_of([b"order-%d" % number for number in range(40)]))
    part = redelivery_columns.encode_nacked(0, rows, rows.deliver_at_ms, segment.compressor())
    letters = dataclasses.replace(some_dead_letters(), schedule_ids=part.schedule_ids)
    redelivery_columns.decode_dead_letters(letters)
    assert part.schedule_ids is not None
    for damage in ({"lengths": part.schedule_ids.lengths[:-1]}, {"ids": part.schedule_ids.ids[:-1]}):
        ids = dataclasses.replace(part.schedule_ids, **damage)
        with pytest.raises(format_errors.FormatError, match=r"^nacked rows schedule_ids"):
            redelivery_columns.decode_nacked(dataclasses.replace(part, schedule_ids=ids))
        with pytest.raises(format_errors.FormatError, match=r"^dead letters schedule_ids"):
            redelivery_columns.decode_dead_letters(dataclasses.replace(letters, schedule_ids=ids))


@pytest.mark.parametrize(
    ("name", "values", "detail"),
    [
        ("dead_letter_id", [*range(39), 38], "their ids do not ascend"),
        ("dead_letter_id", [*range(38), 40, 39], "their ids do not ascend"),
        ("reason", [1] * 39 + [4], "reason 4 is not known"),
        ("reason", [1] * 39 + [257], "reason 257 is not known"),
        ("text_index", [0] * 39 + [2], "a row names text 2; there are 2"),
        ("batch_index", [0] * 39 + [1 << 32], "does not fit in 32 bits"),
        ("redelivery_count", [1 << 32] * 40, "does not fit in 32 bits"),
    ],
)
def test_dead_letters_that_cannot_be_are_refused(name: str, values: list[int], detail: str) -> None:
    changes: dict[str, Any] = {name: column_format.encode_u64(examples.column(values), segment.compressor())}
    with pytest.raises(format_errors.FormatError, match=detail):
        redelivery_columns.decode_dead_letters(dataclasses.replace(some_dead_letters(), **changes))


def test_a_million_nacked_rows_of_one_delay_take_few_bytes_each() -> None:
    count = 1_000_000
    rows = examples.random_delays(count)
    redeliver_at_ms = np.sort(rows.deliver_at_ms) // np.uint64(256) * np.uint64(256)
    stored = redelivery_columns.encode_nacked(0, rows, redeliver_at_ms, segment.compressor())
    size_bytes = sum(len(getattr(stored, name) or b"") for name in NACKED_COLUMNS)
    assert size_bytes < 5 * count
