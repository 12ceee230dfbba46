"""What a request may ask for, at the edges of what it may."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core import limits
from daemon.errors import DelayTooLong, InvalidArgument

NOW_MS = 1_000


def times(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize("name", ["a", "é" * 5, "x" * 10])
def test_a_name_of_one_to_the_most_bytes_passes(name: str) -> None:
    limits.check_name("topic", name, 10)


@pytest.mark.parametrize(("name", "size_bytes"), [("", 0), ("é" * 6, 12), ("x" * 11, 11)])
def test_a_name_is_measured_in_utf8_and_the_answer_names_field_size_and_limit(name: str, size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match=f"topic has {size_bytes} bytes .* 1 to 10"):
        limits.check_name("topic", name, 10)


@pytest.mark.parametrize("rows", [0, 6])
def test_a_request_has_one_row_or_more_and_not_too_many(rows: int) -> None:
    limits.check_rows("entry_id", 1, 5)
    limits.check_rows("entry_id", 5, 5)
    with pytest.raises(InvalidArgument, match=f"entry_id has {rows} rows; .* 1 to 5"):
        limits.check_rows("entry_id", rows, 5)


def test_rows_that_are_stored_several_times_count_as_often() -> None:
    limits.check_copies("entry_id", 2, 50, 100)
    with pytest.raises(InvalidArgument, match=r"entry_id has 3 rows, each for 50 subscriptions .* may have 2"):
        limits.check_copies("entry_id", 3, 50, 100)
    limits.check_copies("entry_id", 1, 101, 100)
    with pytest.raises(InvalidArgument, match="may have 1,"):
        limits.check_copies("entry_id", 2, 101, 100)


def test_a_delay_counts_from_now() -> None:
    absolute = limits.absolute_times(None, times(0, 500), now_ms=NOW_MS, delay_max_ms=500)
    assert absolute.tolist() == [1_000, 1_500]


def test_a_time_is_taken_as_it_is_also_when_it_is_past() -> None:
    absolute = limits.absolute_times(times(0, 999, 1_500), None, now_ms=NOW_MS, delay_max_ms=500)
    assert absolute.tolist() == [0, 999, 1_500]


@pytest.mark.parametrize(
    ("deliver_at_ms", "delay_ms", "message"),
    [
        (times(1, 1_501), None, r"deliver_at_ms\[1\] is 1501; the largest delay is 500 ms, so it may be at most 1500"),
        (times(2**64 - 1), None, r"deliver_at_ms\[0\] is 18446744073709551615"),
        (None, times(501, 0), r"delay_ms\[0\] is 501; .* at most 500"),
        (None, times(2**64 - 1), r"delay_ms\[0\] is 18446744073709551615"),
    ],
)
def test_a_row_beyond_the_largest_delay_is_named(
    deliver_at_ms: np.ndarray | None,
    delay_ms: np.ndarray | None,
    message: str,
) -> None:
    with pytest.raises(DelayTooLong, match=message):
        limits.absolute_times(deliver_at_ms, delay_ms, now_ms=NOW_MS, delay_max_ms=500)


def test_a_request_without_times_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="both missing"):
        limits.absolute_times(None, None, now_ms=NOW_MS, delay_max_ms=500)


@pytest.mark.parametrize(
    ("ledgers", "entries"),
    [
        ([1], [1]),
        ([1, 1, 2, 2], [1, 2, 1, 2]),
        ([2**64 - 1, 0, 2**64 - 1], [0, 2**64 - 1, 2**64 - 1]),
        # Of these two the mixed numbers are the same.
        ([0, 1], [0x9E3779B97F4A7C15, 0]),
    ],
)
def test_positions_that_differ_in_ledger_or_entry_are_distinct(ledgers: list[int], entries: list[int]) -> None:
    limits.check_distinct(times(*ledgers), times(*entries))


@pytest.mark.parametrize(
    ("ledgers", "entries", "message"),
    [
        ([1, 1], [5, 5], r"entry_id\[1\]: position \(1, 5\) is that of entry_id\[0\], too"),
        ([3, 7, 3, 3, 7], [1, 9, 2, 9, 9], r"entry_id\[4\]: position \(7, 9\) is that of entry_id\[1\]"),
        ([2**64 - 1] * 2, [2**64 - 1] * 2, r"position \(18446744073709551615, 18446744073709551615\)"),
    ],
)
def test_a_position_that_is_named_twice_is_refused_by_both_rows(
    ledgers: list[int], entries: list[int], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        limits.check_distinct(times(*ledgers), times(*entries))


TODAY_MS = 1_795_000_000_000


@pytest.mark.parametrize("seconds", [10**9, TODAY_MS // 1000, 978_307_199_999])
def test_a_time_in_seconds_is_refused_by_name(seconds: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"deliver_at_ms\[1\] is {seconds}, a time in seconds"):
        limits.absolute_times(times(TODAY_MS, seconds), None, now_ms=TODAY_MS, delay_max_ms=500)


def test_other_times_that_are_past_mean_at_once() -> None:
    past = times(0, 1, 10**9 - 1, 978_307_200_000, TODAY_MS)
    assert limits.absolute_times(past, None, now_ms=TODAY_MS, delay_max_ms=500) is past


def test_a_clock_that_is_not_set_yet_tells_no_seconds() -> None:
    early = times(10**9, 5 * 10**9)
    assert limits.absolute_times(early, None, now_ms=10**10, delay_max_ms=500) is early
