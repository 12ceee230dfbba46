"""Forecasts that are made up, for tests of what is shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from batch.forecast.result import Forecast, Owed, TopicForecast
from batch.forecast.steps import DAY_MS, HOUR_MS, MINUTE_MS, Counts, Steps

# 2025-11-21 23:20:34.567 UTC
NOW_MS = 1_763_767_234_567
HOURS = Steps.of_days(NOW_MS, HOUR_MS, 2)
MINUTES = Steps.of_days(NOW_MS, MINUTE_MS, 1)
assert HOURS.until_ms - HOURS.begin_ms(0) == 2 * DAY_MS


def counts(by_step: Mapping[int, int], *, overdue: int = 0, beyond: int = 0) -> Counts:
    steps = sorted(by_step)
    return Counts(np.array(steps, np.int64), np.array([by_step[step] for step in steps], np.int64), overdue, beyond)


def owed(
    rows: Mapping[int, int],
    *,
    subscription: str | None = None,
    redeliveries: Mapping[int, int] | None = None,
    receivers: int = 1,
    beyond: int = 0,
) -> Owed:
    return Owed(
        subscription=subscription,
        receivers=receivers,
        rows=counts(rows, beyond=beyond),
        redeliveries=counts(redeliveries or {}),
    )


def topic(name: str, *parts: Owed, overdue: int = 0, unread: int = 0) -> TopicForecast:
    return TopicForecast(topic=name, shard=1, owed=parts, overdue_rows=overdue, unread_rows=unread)


def forecast(topics: Sequence[TopicForecast], steps: Steps = HOURS) -> Forecast:
    return Forecast(steps, tuple(topics))


# Loads: orders 10 + 30 + 5 in the hours 0, 2, 47; mail 7 + 1 in the hours 2, 3; idle nothing.
EXAMPLE = forecast(
    [
        topic("idle", owed({}, receivers=0)),
        topic(
            "mail",
            owed({}, receivers=2),
            owed({2: 4}, subscription="eu", redeliveries={2: 3, 3: 1}),
            owed({}, subscription="us"),
        ),
        topic("orders", owed({0: 10, 2: 30, 47: 5}, receivers=2, beyond=9), overdue=3),
    ]
)
