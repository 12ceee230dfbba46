"""What a caller may give as a column, and how a batch is cut into requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import columns
from tarry.v1 import delayed_delivery_pb2


def test_numbers_lists_and_arrays_become_columns() -> None:
    rows = columns.add_columns(7, [1, 2, 3], deliver_at_ms=np.array([4, 5, 6], dtype=np.int32), key_hash=np.uint32(9))
    assert rows.ledger_id.tolist() == [7]
    assert rows.entry_id.tolist() == [1, 2, 3]
    assert rows.deliver_at_ms is not None
    assert rows.deliver_at_ms.tolist() == [4, 5, 6]
    assert rows.deliver_at_ms.dtype == np.uint64
    assert rows.key_hash is not None
    assert rows.key_hash.dtype == np.uint32


def test_one_entry_is_repeated_when_another_column_is_longer() -> None:
    assert columns.add_columns([1, 2], 5, delay_ms=0).entry_id.tolist() == [5, 5]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_a_list_of_any_unsigned_64_bit_numbers_is_a_column(values: list[int]) -> None:
    assert columns.u64("entry_id", values).tolist() == values


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([-1], "entry_id holds -1; it must be from 0 to 18446744073709551615"),
        ([2**64], "entry_id holds 18446744073709551616; it must be from 0 to"),
        ([-1, 2**63], "entry_id holds -1; it must be from 0 to"),
        (np.array([3, -2]), "entry_id holds -2; it must be from 0 to"),
        ([1.5], "entry_id holds 1.5; it must hold integers"),
        (np.array([1.0]), "entry_id holds float64; it must hold integers"),
        ([True], "entry_id holds bool; it must hold integers"),
        ("12", "entry_id is text"),
        (1.5, "entry_id is a float; it must hold integers"),
        (np.zeros((2, 2), dtype=np.uint64), "entry_id has 2 dimensions; a column has 1"),
        ([], "entry_id has no rows; a batch has at least 1"),
    ],
)
def test_what_is_no_column_is_refused_with_field_value_and_limit(values: Any, says: str) -> None:
    with pytest.raises(tarry.InvalidArgument) as refused:
        columns.add_columns(1, values, delay_ms=1)
    assert says in str(refused.value)


def test_a_key_hash_has_32_bits() -> None:
    with pytest.raises(tarry.InvalidArgument, match="key_hash holds 4294967296; it must be from 0 to 4294967295"):
        columns.add_columns(1, 1, delay_ms=1, key_hash=[2**32])


def test_columns_of_two_lengths_are_refused() -> None:
    with pytest.raises(tarry.InvalidArgument, match="ledger_id has 2 rows; it must have 1 or 3"):
        columns.add_columns([1, 2], [1, 2, 3], delay_ms=1)


@pytest.mark.parametrize("times", [{}, {"deliver_at_ms": 1, "delay_ms": 1}, {"delay_ms": 1, "delay_level": 0}])
def test_exactly_one_time_column_is_needed(times: dict[str, int]) -> None:
    with pytest.raises(tarry.InvalidArgument, match="exactly one of deliver_at_ms, delay_ms and delay_level"):
        columns.add_columns(1, 1, **times)


@given(rows=st.integers(1, 50), rows_max=st.integers(1, 20), bytes_max=st.integers(4096 + 28, 4096 + 600))
def test_requests_hold_every_row_once_within_both_limits(rows: int, rows_max: int, bytes_max: int) -> None:
    batch = columns.add_columns(
        np.arange(rows), np.arange(rows), deliver_at_ms=np.arange(rows) + 100, key_hash=np.arange(rows)
    )
    entries: list[int] = []
    for first, part in batch.requests(rows_max, bytes_max):
        assert first == len(entries)
        assert part.deliver_at_ms is not None
        assert part.key_hash is not None
        assert len(part) <= rows_max
        assert len(part) * 28 <= bytes_max
        assert part.deliver_at_ms.tolist() == [entry + 100 for entry in part.entry_id.tolist()]
        assert part.ledger_id.tolist() == part.key_hash.tolist() == part.entry_id.tolist()
        entries += part.entry_id.tolist()
    assert entries == list(range(rows))


def test_a_column_of_length_1_is_in_every_request() -> None:
    parts = [part for _, part in columns.add_columns(7, range(5), delay_ms=3).requests(2, 1 << 20)]
    assert [part.ledger_id.tolist() for part in parts] == [[7]] * 3
    assert [len(part) for part in parts] == [2, 2, 1]


def test_a_delay_level_has_a_sign_and_32_bits() -> None:
    assert columns.add_columns(1, [1, 2], delay_level=[-1, 2**31 - 1]).delay_level is not None
    with pytest.raises(tarry.InvalidArgument, match="delay_level holds 2147483648; it must be from -2147483648 to"):
        columns.add_columns(1, 1, delay_level=2**31)


def test_requests_of_the_longest_levels_are_within_the_limit_of_bytes() -> None:
    batch = columns.add_columns(range(50), range(50), delay_level=[-(2**31)] * 50)
    parts = [part for _, part in batch.requests(1_000, 4096 + 210)]
    assert [len(part) for part in parts] == [10] * 5


POSITIONS = columns.positions(7, range(5), 0)


def test_what_goes_with_negatively_acknowledged_positions_is_cut_with_them() -> None:
    given = columns.nack_columns(POSITIONS, delay_ms=[1, 2, 3, 4, 5], key_hash=9)
    parts = list(given.requests(2))
    assert [part.positions.entry_id.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.delay_ms.tolist() for part in parts if part.delay_ms is not None] == [[1, 2], [3, 4], [5]]
    assert [part.key_hash.tolist() for part in parts if part.key_hash is not None] == [[9]] * 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"delay_ms": 1, "delay_level": 1}, "at most one of delay_ms and delay_level"),
        ({"delay_ms": [1, 2]}, "delay_ms has 2 rows; it must have 1 or 5, as the positions"),
        ({"key_hash": [1, 2]}, "key_hash has 2 rows"),
        ({"delay_level": 0.5}, "delay_level is a float"),
    ],
)
def test_a_wrong_negative_acknowledgement_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match=says):
        columns.nack_columns(POSITIONS, **wrong)


def test_positions_have_batch_indexes_where_one_has() -> None:
    assert POSITIONS.batch_index is None
    assert POSITIONS.batch_indexes().tolist() == [tarry.NO_BATCH_INDEX] * 5
    parts = columns.positions(7, 3, 0, [1, 2])
    assert (parts.rows, parts.entry_id.tolist(), parts.batch_indexes().tolist()) == (2, [3, 3], [1, 2])


def test_the_result_of_one_row_is_printed_short() -> None:
    one = tarry.AddResult.from_message(delayed_delivery_pb2.AddMessagesResponse(accepted=1))
    assert str(one) == "AddResult(accepted=1, duplicates=0, late_on_arrival=0, refused=0)"


def test_of_a_long_column_its_first_rows_are_printed() -> None:
    message = delayed_delivery_pb2.CancelMessagesResponse(already_due_index=range(2_000))
    left = tarry.Cancelled.from_message(message, may_have_landed=False)
    assert repr(left) == "Cancelled(already_due_index=[0, 1, 2, ... 1,997 more], may_have_landed=False, cancelled=0)"


def test_everything_with_columns_is_printed_so() -> None:
    with_columns = [
        each
        for each in (getattr(tarry, name) for name in tarry.__all__)
        if dataclasses.is_dataclass(each) and any("NDArray" in str(field.type) for field in dataclasses.fields(each))
    ]
    assert len(with_columns) > 10
    assert [each for each in with_columns if each.__repr__ is not columns.short_repr] == []
