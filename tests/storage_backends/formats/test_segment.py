from __future__ import annotations

import contextlib
from typing import Literal

import numpy as np
import pytest
import zstandard
from google.protobuf import message as protobuf
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import column_format, format_errors, segment
from storage_backends.formats.generated import bucket_pb2
from storage_backends.formats.segment import SegmentLimits
from tests.storage_backends.formats._support import examples

limits = st.builds(
    SegmentLimits,
    time_step_ms=st.integers(1, 1_000),
    rows_max=st.one_of(st.just(-1), st.integers(1, 20)),
    rows_min=st.integers(0, 10),
)
due_times = st.lists(st.integers(0, 5_000), min_size=1, max_size=80).map(sorted)


def cut_one_row_after_the_other(due: list[int], limits: SegmentLimits) -> list[tuple[int, int]]:
    segments, start = [], 0
    for row in range(1, len(due)):
        rows = row - start
        too_late = due[row] > due[start] + limits.time_step_ms and rows >= limits.rows_min
        if too_late or rows == limits.rows_max:
            segments.append((start, row))
            start = row
    return [*segments, (start, len(due))]


@given(due_times, limits)
def test_the_cut_is_the_one_of_the_rule_applied_row_by_row(due: list[int], limits: SegmentLimits) -> None:
    assert segment.cut(examples.column(due), limits) == cut_one_row_after_the_other(due, limits)


def test_the_time_step_does_not_cut_a_segment_that_has_few_rows() -> None:
    due = examples.column([0, 1_000, 2_000, 3_000, 4_000])
    assert segment.cut(due, SegmentLimits(time_step_ms=100, rows_max=-1, rows_min=3)) == [(0, 3), (3, 5)]


def test_without_a_minimum_the_time_step_cuts_as_in_the_pip() -> None:
    due = examples.column([0, 100, 101, 202])
    assert segment.cut(due, SegmentLimits(time_step_ms=100, rows_max=-1, rows_min=0)) == [(0, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("rows_max", [-1, 50])
def test_no_segment_has_more_rows_than_a_reader_takes(rows_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_format, "ROWS_MAX", 3)
    due = examples.column([1] * 7)
    assert segment.cut(due, SegmentLimits(rows_max=rows_max)) == [(0, 3), (3, 6), (6, 7)]


def test_minus_one_means_that_the_number_of_rows_cuts_nothing() -> None:
    due = np.full(50_000, 7, np.uint64)
    assert segment.cut(due, SegmentLimits(rows_max=-1)) == [(0, 50_000)]


def test_the_time_step_stops_at_the_end_of_the_range() -> None:
    due = examples.column([examples.U64_MAX - 1, examples.U64_MAX])
    assert segment.cut(due, SegmentLimits(time_step_ms=1_000, rows_min=0)) == [(0, 2)]


@pytest.mark.parametrize(("name", "value"), [("time_step_ms", 0), ("rows_max", 0), ("rows_max", -2), ("rows_min", -1)])
def test_limits_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SegmentLimits(**{name: value})


ROWS = examples.random_delays(5, keyed=True).sorted_by_due()
COLUMNAR = segment.encode_columnar(ROWS, segment.compressor())
COMPATIBLE = segment.encode_compatible(ROWS)


def without(payload: bytes, field: Literal["rows", "entry_id"]) -> bytes:
    message = bucket_pb2.SnapshotSegment.FromString(payload)
    message.ClearField(field)
    return message.SerializeToString()


def of_another_codec(payload: bytes) -> bytes:
    message = bucket_pb2.SnapshotSegment.FromString(payload)
    message.ledger_id = b"\x80" + message.ledger_id[1:]
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (without(COMPATIBLE, "rows"), "5 indexes and no field rows: PIP-195's own segment"),
        (COMPATIBLE + COMPATIBLE, "it has 10 indexes, and its field rows says 5"),
        (without(COLUMNAR, "rows"), "neither indexes nor the field rows"),
        (b"", "neither indexes nor the field rows"),
        (without(COLUMNAR, "entry_id"), "as a columnar one it lacks entry_id"),
        (of_another_codec(COLUMNAR), "column form 0x80 is not known"),
        (bucket_pb2.SnapshotSegment(rows=6).SerializeToString(), "it holds 6 rows, the offset table says 5"),
        (b"TyBK\x01\0\0\0 and more", "byte 0, field 10 has wire type 4"),
        (b"TyBK\x01\0\0\0 and more", r"it begins with b'TyBK\x01\x00\x00\x00'"),
        (zstandard.compress(COLUMNAR), "it begins with b'(\\xb5/\\xfd"),
        (COLUMNAR[:-1], "field key_hash goes past the end"),
        (b"\x0a\x02\x08\xff", "byte 0, field indexes: byte 0, field timestamp goes past the end"),
        (b"\x0a\x02\x08\x05", "lacks a required field: indexes[0].ledger_id, indexes[0].entry_id"),
    ],
)
def test_a_payload_that_is_no_segment_of_ours_is_refused_by_what_is_wrong_with_it(payload: bytes, cause: str) -> None:
    with pytest.raises(format_errors.FormatError) as refused:
        segment.decode(payload, 5, what="bucket segment 3", offset=40)
    assert str(refused.value).startswith("bucket segment 3")
    assert cause in str(refused.value)


@given(st.one_of(st.binary(max_size=60), st.sampled_from([COLUMNAR, COMPATIBLE]).map(lambda whole: whole[:-3])))
def test_of_bytes_that_are_no_message_the_error_says_at_which_field(payload: bytes) -> None:
    with contextlib.suppress(protobuf.DecodeError):
        bucket_pb2.SnapshotSegment.FromString(payload)
        return
    with pytest.raises(format_errors.FormatError, match=r"not a SnapshotSegment: byte \d+, field \w+"):
        segment.decode(payload, 5, what="bucket segment 3", offset=40)
