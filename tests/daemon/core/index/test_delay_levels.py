"""The table of delays: its grammar, its levels and its ladder, by the vectors of RocketMQ's users."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.index import delay_levels
from daemon.core.index.delay_levels import DEFAULT_TABLE, LEVELS_MAX, DelayLevels
from daemon.errors import InvalidArgument

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
DELAY_MAX_MS = 3650 * DAY


def parsed(table: str, *, clamp: bool = True) -> DelayLevels:
    return delay_levels.parse(table, clamp=clamp, delay_max_ms=DELAY_MAX_MS)


def delay_of(levels: DelayLevels, level: int) -> int:
    return int(levels.delays_of(np.array([level], np.int32))[0])


# ---- tables


@pytest.mark.parametrize(
    ("table", "delays_ms", "warned"),
    [
        (DEFAULT_TABLE, [1, 5, 10, 30, *[60 * n for n in range(1, 11)], 1200, 1800, 3600, 7200], False),
        ("1s  5s", [1, 5], False),
        ("\t1s\n5s\r\n 2m\u00a03h ", [1, 5, 120, 10_800], False),
        ("1d", [86_400], False),
        ("007s", [7], False),
        ("5s 1s", [5, 1], True),
        ("5s 5s", [5, 5], True),
        ("60s 1m", [60, 60], True),
    ],
)
def test_a_table_is_numbers_with_units_separated_by_any_white_space(
    table: str, delays_ms: list[int], warned: bool
) -> None:
    levels = parsed(table)

    assert levels.delays_ms == tuple(SECOND * each for each in delays_ms)
    assert levels.table == table
    assert bool(delay_levels.warnings(levels)) is warned


@pytest.mark.parametrize(
    ("table", "place", "token", "why"),
    [
        ("1s 5x", 4, "5x", "units are s, m, h and d"),
        ("1S", 1, "1S", "units are s, m, h and d"),
        ("1w", 1, "1w", "units are s, m, h and d"),
        ("1ms", 1, "1ms", "units are s, m, h and d"),
        ("1s  1.5s", 5, "1.5s", "whole number"),
        ("1,5s", 1, "1,5s", "whole number"),
        ("0s", 1, "0s", "positive"),
        ("1s 000d", 4, "000d", "positive"),
        ("-1s", 1, "-1s", "positive"),
        ("1s\n\n s", 6, "s", "needs a number"),
        ("1s 5", 4, "5", "needs a unit"),
        ("+1s", 1, "+1s", "no number with its unit"),
        ("1s,5s", 1, "1s,5s", "separated by white space"),
        ("\u0661s", 1, "\u0661s", "no number with its unit"),
        ("1e3s", 1, "1e3s", "no number with its unit"),
        ("3651d", 1, "3651d", f"the largest delay is {DELAY_MAX_MS} ms"),
        ("1s " + "9" * 5000 + "s", 4, "9" * 32 + "...", "the largest delay"),
    ],
)
def test_a_wrong_table_is_refused_as_a_whole_with_the_place_and_the_token(
    table: str, place: int, token: str, why: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parsed(table)

    assert f"{token!r} at character {place}: " in str(refused.value)
    assert why in str(refused.value)


@pytest.mark.parametrize("table", ["", " \t\n"])
def test_a_table_has_at_least_one_level(table: str) -> None:
    with pytest.raises(InvalidArgument, match="has none; it has 1 to 256"):
        parsed(table)


def test_a_table_has_at_most_256_levels() -> None:
    assert parsed("1s " * LEVELS_MAX).top == LEVELS_MAX
    with pytest.raises(InvalidArgument, match="at character 769: it is level 257; a table has at most 256"):
        parsed("1s " * (LEVELS_MAX + 1))


def test_a_delay_may_be_as_long_as_the_limit_and_no_longer() -> None:
    assert delay_levels.parse("2m", clamp=True, delay_max_ms=2 * MINUTE).delays_ms == (2 * MINUTE,)
    with pytest.raises(InvalidArgument, match="the largest delay is 119999 ms"):
        delay_levels.parse("2m", clamp=True, delay_max_ms=2 * MINUTE - 1)


def test_a_warning_names_the_level_that_is_shorter_or_the_same() -> None:
    assert delay_levels.warnings(parsed("5s 1s 5s")) == (
        "level 2 is 1000 ms, shorter than level 1, which is 5000 ms",
        "level 3 is 5000 ms, as level 1 is",
    )


@given(st.lists(st.tuples(st.integers(1, 3650), st.sampled_from("smhd")), min_size=1, max_size=LEVELS_MAX), st.data())
def test_what_is_written_is_read(levels: list[tuple[int, str]], data: st.DataObject) -> None:
    gaps = st.text(" \t\r\n\u2003", min_size=1, max_size=3)
    table = "".join(f"{number}{unit}{data.draw(gaps)}" for number, unit in levels)
    units = {"s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY}

    assert parsed(table).delays_ms == tuple(number * units[unit] for number, unit in levels)


@given(st.text("0159smhdx.-+ \t\n", max_size=40))
def test_whatever_is_written_is_read_in_full_or_refused_with_a_place_in_it(table: str) -> None:
    try:
        levels = parsed(table)
    except InvalidArgument as refused:
        if "has none" not in str(refused):
            place = int(str(refused).split(" at character ")[1].split(":")[0])
            assert 1 <= place <= len(table)
            assert not table[place - 1].isspace()
    else:
        assert levels.top == len(table.split())


# ---- levels


@pytest.mark.parametrize(
    ("level", "delay_ms"),
    [(0, 0), (1, SECOND), (5, MINUTE), (18, 2 * HOUR), (19, 2 * HOUR), (999, 2 * HOUR), ((1 << 31) - 1, 2 * HOUR)],
)
def test_levels_of_the_default_table_where_those_above_the_highest_are_the_highest(level: int, delay_ms: int) -> None:
    assert delay_of(parsed(DEFAULT_TABLE), level) == delay_ms


def test_level_5_of_the_default_table_is_one_minute_as_the_text_on_delay_levels_sees_it() -> None:
    assert delay_of(parsed(DEFAULT_TABLE), 5) == MINUTE


def test_an_order_that_is_not_paid_within_30_minutes_is_level_16() -> None:
    assert delay_of(parsed(DEFAULT_TABLE), 16) == 30 * MINUTE


def test_a_red_envelope_that_is_returned_after_24_hours_needs_a_table_with_a_day() -> None:
    assert max(parsed(DEFAULT_TABLE).delays_ms) < DAY
    assert delay_of(parsed(f"{DEFAULT_TABLE} 1d"), 19) == DAY


@pytest.mark.parametrize("level", [19, 999])
def test_a_level_above_the_highest_is_refused_with_the_highest_where_the_table_does_not_clamp(level: int) -> None:
    levels = parsed(DEFAULT_TABLE, clamp=False)

    with pytest.raises(InvalidArgument, match=rf"delay_level\[1\] is {level}; the highest level of the table is 18"):
        levels.delays_of(np.array([18, level], np.int32))
    assert delay_of(levels, 18) == 2 * HOUR


@pytest.mark.parametrize("clamp", [True, False])
def test_a_negative_level_is_refused_with_field_and_row(clamp: bool) -> None:
    levels = parsed("1s 5s", clamp=clamp)

    with pytest.raises(InvalidArgument, match=r"delay_level\[2\] is -1; a level is 0, which is no delay, to 2"):
        levels.delays_of(np.array([0, 1, -1], np.int32))


def test_a_column_of_levels_is_looked_up_at_once() -> None:
    delays_ms = parsed("5s 1s").delays_of(np.array([1, 0, 2, 7, 1], np.int32))

    assert delays_ms.dtype == np.uint64
    assert delays_ms.tolist() == [5 * SECOND, 0, SECOND, SECOND, 5 * SECOND]
    assert len(parsed("1s").delays_of(np.empty(0, np.int32))) == 0


# ---- the ladder


def test_the_ladder_begins_with_the_third_level_and_ends_with_the_highest() -> None:
    ladder = parsed(DEFAULT_TABLE).ladder(np.array([1, 2, 3, 16, 17, 4_294_967_295], np.uint32))

    assert ladder.tolist() == [10 * SECOND, 30 * SECOND, MINUTE, 2 * HOUR, 2 * HOUR, 2 * HOUR]


@pytest.mark.parametrize("clamp", [True, False])
def test_the_ladder_of_a_short_table_is_its_highest_level(clamp: bool) -> None:
    assert parsed("1s 5s", clamp=clamp).ladder(np.array([1, 2], np.uint32)).tolist() == [5 * SECOND, 5 * SECOND]
