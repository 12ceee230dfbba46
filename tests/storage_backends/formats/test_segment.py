from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import segment
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
