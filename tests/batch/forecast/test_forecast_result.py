"""Totals of a forecast, its busiest topics and steps, and how time is cut for people."""

from __future__ import annotations

import numpy as np
import pytest

from batch.forecast.result import Bars, shown, timestamp, utc, width_name
from batch.forecast.steps import DAY_MS, HOUR_MS, MINUTE_MS, Steps
from tests.batch.forecast._support.forecasts import EXAMPLE, HOURS, MINUTES, NOW_MS, counts, forecast, owed, topic


def test_totals_are_those_of_all_topics() -> None:
    assert (EXAMPLE.rows, EXAMPLE.redeliveries) == (49, 4)
    assert EXAMPLE.load.dense(48)[:4].tolist() == [10, 0, 37, 1]
    assert EXAMPLE.load.rows_within == 53
    assert (EXAMPLE.overdue_rows, EXAMPLE.beyond_rows) == (3, 9)


def test_a_row_that_is_owed_to_all_is_delivered_to_each() -> None:
    # 45 rows to two subscriptions each, 4 rows and 4 redeliveries to one.
    assert EXAMPLE.deliveries == 45 * 2 + 4 + 4


def test_the_peak_is_the_first_step_with_the_most() -> None:
    assert EXAMPLE.peak == (2, 37)
    assert forecast([topic("t", owed({5: 3, 9: 3}))]).peak == (5, 3)
    assert forecast([topic("t", owed({}))]).peak is None


def test_the_busiest_topics_have_something_to_come() -> None:
    assert [each.topic for each in EXAMPLE.busiest_topics(9)] == ["orders", "mail"]
    assert [each.topic for each in EXAMPLE.busiest_topics(1)] == ["orders"]
    late = forecast([topic("a", owed({})), topic("b", owed({}), overdue=2), topic("c", owed({}), overdue=3)])
    assert [each.topic for each in late.busiest_topics(9)] == ["c", "b"]


def test_the_busiest_steps_name_the_topics_with_the_most() -> None:
    busiest = EXAMPLE.busiest_steps(3)
    assert [(busy.step, busy.rows, busy.topics) for busy in busiest] == [
        (2, 37, (("orders", 30), ("mail", 7))),
        (0, 10, (("orders", 10),)),
        (47, 5, (("orders", 5),)),
    ]
    assert EXAMPLE.busiest_steps(1, topics=1)[0].topics == (("orders", 30),)
    assert [busy.step for busy in forecast([topic("t", owed({9: 3, 5: 3, 7: 4}))]).busiest_steps(9)] == [7, 5, 9]
    assert forecast([]).busiest_steps(3) == []


@pytest.mark.parametrize(
    ("steps", "bars_max", "width_ms", "begins", "count"),
    [
        # 48 hours from 23:00: with 32 bars 2 hours each, the first one from 22:00.
        (HOURS, 32, 2 * HOUR_MS, "2025-11-21 22:00", 25),
        (HOURS, 48, HOUR_MS, "2025-11-21 23:00", 48),
        # A day by the minute, from 23:20.
        (MINUTES, 32, HOUR_MS, "2025-11-21 23:00", 25),
        (MINUTES, 200, 10 * MINUTE_MS, "2025-11-21 23:20", 144),
        (MINUTES, 1440, MINUTE_MS, "2025-11-21 23:20", 1440),
        # 100 days: of 5 days each; they begin at midnight.
        (Steps.of_days(NOW_MS, HOUR_MS, 100), 32, 5 * DAY_MS, "2025-11-21 00:00", 21),
        (Steps.of_days(NOW_MS, HOUR_MS, 20_000), 32, 1_000 * DAY_MS, "2025-11-21 00:00", 21),
    ],
)
def test_bars_have_a_width_that_people_like_and_begin_at_whole_ones(
    steps: Steps, bars_max: int, width_ms: int, begins: str, count: int
) -> None:
    bars = Bars.of(steps, bars_max)
    assert (bars.width_ms, utc(bars.begin_ms), bars.count) == (width_ms, begins, count)
    assert bars.begins_ms()[-1] < steps.until_ms <= bars.begins_ms()[-1] + width_ms


def test_bars_have_the_rows_of_their_steps() -> None:
    bars = Bars.of(HOURS, 32)
    # From 22:00: the hour 23 is in the first bar, 0 and 1 in the second.
    rows = bars.rows(counts({0: 1, 1: 2, 2: 4, 3: 8, 47: 16}), HOURS)
    assert rows[:3].tolist() == [1, 6, 8]
    assert (rows[-1], rows.sum()) == (16, 31)
    assert bars.bar_of(HOURS.begin_ms(2)) == 1


def test_times_are_utc_and_names_are_one_line() -> None:
    assert utc(NOW_MS) == "2025-11-21 23:20"
    assert timestamp(NOW_MS) == "2025-11-21T23:20:34.567Z"
    assert [width_name(width) for width in (MINUTE_MS, 15 * MINUTE_MS, HOUR_MS, 12 * HOUR_MS, DAY_MS, 5 * DAY_MS)] == [
        "minute",
        "15 minutes",
        "hour",
        "12 hours",
        "day",
        "5 days",
    ]
    assert shown("日本 a\n\x1b[31m\u202e") == "日本 a\\n\\x1b[31m\\u202e"


def test_merging_loads_loses_nothing() -> None:
    rng = np.random.default_rng(1)
    parts = [owed(dict.fromkeys(rng.choice(48, 9, replace=False).tolist(), 1)) for _ in range(20)]
    assert forecast([topic(str(number), part) for number, part in enumerate(parts)]).load.rows_within == 180
