"""Counts of what comes due in each step: exact, and without reading what need not be read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.forecast import steps as forecast
from batch.forecast.steps import DAY_MS, HOUR_MS, MINUTE_MS, BucketCount, Counts, Steps
from storage_backends.formats import bucket_format, format_errors
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionSet, position_bitmaps
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits

NOW_MS = 1_700_000_000_000 - 1_700_000_000_000 % HOUR_MS + 17 * MINUTE_MS + 12_345
MINUTES = Steps.of_days(NOW_MS, MINUTE_MS, 1)
U64_MAX = (1 << 64) - 1


def rows_at(times_ms: list[int] | np.ndarray) -> Rows:
    times = np.asarray(times_ms, np.uint64)
    entries = np.arange(len(times), dtype=np.uint64)
    return Rows(times, entries % np.uint64(3), entries).sorted_by_due()


def positions(rows: Rows) -> PositionSet:
    return PositionSet.of(position_bitmaps(rows.ledger_id, rows.entry_id))


def encoded(rows: Rows, *, segment_rows: int = 10) -> bucket_format.EncodedBucket:
    limits = SegmentLimits(time_step_ms=HOUR_MS, rows_max=segment_rows, rows_min=1)
    return bucket_format.encode_bucket(rows, topic="t", subscription_id=0, limits=limits, compatible=False)


def count(
    steps: Steps, body: bucket_format.EncodedBucket, gone: PositionSet = NO_POSITIONS
) -> tuple[Counts, BucketCount]:
    counting = BucketCount(steps, body.segments, gone)
    while run := counting.needed():
        parts = [bucket_format.decode_segment(body.body[each.offset : each.offset + each.length], each) for each in run]
        counting.read(run, parts)
    return counting.counts(), counting


def one_by_one(steps: Steps, times_ms: list[int]) -> tuple[dict[int, int], int, int]:
    """The same by the definition: (rows of each step, overdue, beyond)."""
    within: dict[int, int] = {}
    overdue = beyond = 0
    for time_ms in times_ms:
        if time_ms <= steps.now_ms:
            overdue += 1
        elif time_ms >= steps.until_ms:
            beyond += 1
        else:
            step = next(step for step in range(steps.count) if time_ms < steps.begin_ms(step + 1))
            within[step] = within.get(step, 0) + 1
    return within, overdue, beyond


def plain(counts: Counts) -> tuple[dict[int, int], int, int]:
    return dict(zip(counts.step.tolist(), counts.rows.tolist(), strict=True)), counts.overdue_rows, counts.beyond_rows


def test_steps_begin_at_whole_minutes_with_the_one_that_is_now() -> None:
    assert MINUTES.begin_ms(0) == NOW_MS - 12_345
    assert MINUTES.count == 24 * 60
    assert MINUTES.until_ms == MINUTES.begin_ms(0) + DAY_MS
    assert Steps.of_days(NOW_MS, HOUR_MS, 3).begin_ms(0) == NOW_MS - 12_345 - 17 * MINUTE_MS
    assert Steps.of_days(NOW_MS, HOUR_MS, 3).count == 72


def test_a_row_that_is_due_on_a_boundary_belongs_to_the_later_step() -> None:
    boundary = MINUTES.begin_ms(5)
    assert MINUTES.of(np.array([boundary - 1, boundary, boundary + MINUTE_MS - 1], np.uint64)).tolist() == [4, 5, 5]


def test_what_is_due_by_now_is_overdue_and_what_is_due_at_the_end_lies_beyond() -> None:
    times = [0, MINUTES.begin_ms(0), NOW_MS, NOW_MS + 1, MINUTES.until_ms - 1, MINUTES.until_ms, U64_MAX]
    last = MINUTES.count - 1
    beyond = MINUTES.count
    assert MINUTES.of(np.array(times, np.uint64)).tolist() == [-1, -1, -1, 0, last, beyond, beyond]


@pytest.mark.parametrize("count", [0, -1, forecast.STEPS_MAX + 1])
def test_a_forecast_has_a_bounded_number_of_steps(count: int) -> None:
    with pytest.raises(ValueError, match=f"a forecast of {count} steps"):
        Steps(NOW_MS, MINUTE_MS, count)


def test_what_lies_within_one_step_is_counted_at_once() -> None:
    begin = MINUTES.begin_ms(7)
    assert forecast.counted_at_once(MINUTES, begin - 1, begin, 9) is None
    assert plain(forecast.counted_at_once(MINUTES, begin, begin + MINUTE_MS - 1, 9) or Counts()) == ({7: 9}, 0, 0)
    assert plain(forecast.counted_at_once(MINUTES, 0, NOW_MS, 9) or Counts()) == ({}, 9, 0)
    assert forecast.counted_at_once(MINUTES, NOW_MS, NOW_MS + 1, 9) is None
    assert plain(forecast.counted_at_once(MINUTES, MINUTES.until_ms, U64_MAX, 9) or Counts()) == ({}, 0, 9)
    assert plain(forecast.counted_at_once(MINUTES, begin, begin, 0) or Counts()) == ({}, 0, 0)


def test_merged_counts_have_every_step_once() -> None:
    parts = [
        Counts(np.array([1, 4]), np.array([10, 20]), overdue_rows=1),
        Counts(beyond_rows=7),
        Counts(np.array([0, 4]), np.array([3, 5]), overdue_rows=2, beyond_rows=1),
    ]
    merged = Counts.merged(parts)
    assert plain(merged) == ({0: 3, 1: 10, 4: 25}, 3, 8)
    assert merged.rows_within == 38
    assert merged.dense(6).tolist() == [3, 10, 0, 0, 25, 0]
    assert plain(Counts.merged([])) == ({}, 0, 0)


def test_segments_of_one_step_are_not_read() -> None:
    # Ten rows a minute, and a segment has ten rows: none lies in two minutes.
    body = encoded(rows_at([MINUTES.begin_ms(1) + 6_000 * number for number in range(100)]))
    counts, counting = count(MINUTES, body)
    assert plain(counts) == (dict.fromkeys(range(1, 11), 10), 0, 0)
    assert counting.segments_read == 0


def test_only_segments_that_lie_in_two_steps_are_read() -> None:
    body = encoded(rows_at([MINUTES.begin_ms(1) + 30_000 + 2_000 * number for number in range(100)]))
    counts, counting = count(MINUTES, body)
    assert plain(counts) == ({1: 15, 2: 30, 3: 30, 4: 25}, 0, 0)
    assert len(body.segments) == 10
    assert counting.segments_read == 3


def test_a_bucket_is_read_until_what_is_gone_was_found() -> None:
    rows = rows_at([MINUTES.begin_ms(1) + 6_000 * number for number in range(100)])
    gone = positions(rows.take(np.array([3, 5, 12])))
    counts, counting = count(MINUTES, encoded(rows), gone)
    assert plain(counts)[0] == {1: 8, 2: 9, **dict.fromkeys(range(3, 11), 10)}
    # They are read together; what is behind them within the same read is read as well.
    assert 2 <= counting.segments_read <= 10


def test_no_more_is_read_than_up_to_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "READ_BYTES", 1)
    rows = rows_at([MINUTES.begin_ms(1) + 6_000 * number for number in range(100)])
    counts, counting = count(MINUTES, encoded(rows), positions(rows.take(np.array([3, 5, 12]))))
    assert plain(counts)[0] == {1: 8, 2: 9, **dict.fromkeys(range(3, 11), 10)}
    assert counting.segments_read == 2


def test_where_the_rest_lies_in_one_step_what_is_gone_of_it_need_not_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "READ_BYTES", 1)
    near = [MINUTES.begin_ms(1) + 6_000 * number for number in range(20)]
    far = [MINUTES.until_ms + DAY_MS + 6_000 * number for number in range(80)]
    rows = rows_at([*near, *far])
    counts, counting = count(MINUTES, encoded(rows), positions(rows.take(np.array([0, 70, 99]))))
    assert plain(counts) == ({1: 9, 2: 10}, 0, 78)
    assert counting.segments_read == 2


def test_a_bucket_that_lacks_a_row_that_is_gone_is_damaged() -> None:
    rows = rows_at([MINUTES.begin_ms(1) + 6_000 * number for number in range(100)])
    with pytest.raises(format_errors.FormatError, match="1 of its rows that are gone are not in it"):
        count(MINUTES, encoded(rows), PositionSet.of(position_bitmaps(*np.array([[77], [5]], np.uint64))))


@given(
    offsets_s=st.lists(st.integers(-7_200, 100_000), min_size=1, max_size=120),
    gone_of=st.integers(1, 9),
    gone_rest=st.integers(0, 9),
    gone_first=st.integers(0, 120),
    segment_rows=st.integers(1, 30),
    read_bytes=st.sampled_from([1, 200, 4 << 20]),
    step_ms=st.sampled_from([MINUTE_MS, HOUR_MS]),
)
def test_the_counts_are_those_of_every_row_that_is_not_gone(
    offsets_s: list[int],
    gone_of: int,
    gone_rest: int,
    gone_first: int,
    segment_rows: int,
    read_bytes: int,
    step_ms: int,
) -> None:
    steps = Steps.of_days(NOW_MS, step_ms, 1)
    rows = rows_at([NOW_MS + 1_000 * offset for offset in offsets_s])
    number = np.arange(len(rows))
    gone = (number % gone_of == gone_rest) | (number < gone_first)
    before, forecast.READ_BYTES = forecast.READ_BYTES, read_bytes
    try:
        counts, _ = count(steps, encoded(rows, segment_rows=segment_rows), positions(rows.take(gone)))
    finally:
        forecast.READ_BYTES = before
    assert plain(counts) == one_by_one(steps, rows.take(~gone).deliver_at_ms.tolist())
    assert list(counts.step) == sorted(set(counts.step))
    assert (counts.rows > 0).all()
