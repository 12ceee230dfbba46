"""Defines a forecast as values: which rows come due when, by topic and subscription, with totals and maxima.

`forecast_job` counts; `text`, `parquet` and `picture` present.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from batch.forecast.steps import DAY_MS, HOUR_MS, I64, MINUTE_MS, Counts, Steps

STEP_NAMES = {MINUTE_MS: "minute", HOUR_MS: "hour"}


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Owed:
    """The rows owed to one subscription, or to all subscriptions of the topic if `subscription` is None.

    `rows` come due, and `redeliveries` are those of negatively acknowledged rows. `receivers` is how many subscriptions
    a due row is delivered to.
    """

    subscription: str | None
    receivers: int
    rows: Counts
    redeliveries: Counts


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TopicForecast:
    """The forecast of a topic.

    `owed` begins with the rows owed to all. `overdue_rows` are due, not gone, and wait for no redelivery. `unread_rows`
    are those of quarantined or damaged buckets, which no other number counts.
    """

    topic: str
    shard: int
    owed: tuple[Owed, ...] = ()
    overdue_rows: int = 0
    unread_rows: int = 0

    @property
    def rows(self) -> int:
        """The rows that come due within the horizon."""
        return sum(owed.rows.rows_within for owed in self.owed)

    @property
    def redeliveries(self) -> int:
        return sum(owed.redeliveries.rows_within for owed in self.owed)

    @property
    def load(self) -> Counts:
        """The rows that come due and redeliveries together."""
        return Counts.merged([part for owed in self.owed for part in (owed.rows, owed.redeliveries)])

    @property
    def deliveries(self) -> int:
        """The number of deliveries within the horizon, if everything is acknowledged at once."""
        return sum(owed.rows.rows_within * owed.receivers + owed.redeliveries.rows_within for owed in self.owed)


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A bucket whose rows are in no count, and the reason."""

    topic: str
    bucket: str
    rows: int
    reason: str
    damaged: bool


@dataclasses.dataclass(frozen=True, slots=True)
class BusyStep:
    """A busy step. `topics` are those with the most rows in it, and how many, the most first."""

    step: int
    rows: int
    topics: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """The reads of a forecast.

    `segments_read` of `segments` were read; buckets that lie within one step are not opened.
    """

    buckets: int = 0
    buckets_opened: int = 0
    segments: int = 0
    segments_read: int = 0

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            self.buckets + other.buckets,
            self.buckets_opened + other.buckets_opened,
            self.segments + other.segments,
            self.segments_read + other.segments_read,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """A forecast. `topics` are by name. Its load is the rows that come due and redeliveries together."""

    steps: Steps
    topics: tuple[TopicForecast, ...]
    unread: tuple[Unread, ...] = ()
    effort: Effort = Effort()

    @functools.cached_property
    def load(self) -> Counts:
        return Counts.merged([topic.load for topic in self.topics])

    @property
    def rows(self) -> int:
        """The rows that come due within the horizon."""
        return sum(topic.rows for topic in self.topics)

    @property
    def redeliveries(self) -> int:
        return sum(topic.redeliveries for topic in self.topics)

    @property
    def deliveries(self) -> int:
        return sum(topic.deliveries for topic in self.topics)

    @property
    def overdue_rows(self) -> int:
        return sum(topic.overdue_rows for topic in self.topics)

    @property
    def beyond_rows(self) -> int:
        """The rows that come due at the end of the last step or later."""
        return self.load.beyond_rows

    @property
    def unread_rows(self) -> int:
        return sum(topic.unread_rows for topic in self.topics)

    @property
    def peak(self) -> tuple[int, int] | None:
        """The first step with the highest load, and that load, or None if nothing comes due."""
        load = self.load
        if not len(load.step):
            return None
        place = int(np.argmax(load.rows))
        return int(load.step[place]), int(load.rows[place])

    def busiest_topics(self, count: int) -> list[TopicForecast]:
        """Return the topics with the most load within the horizon.

        Among equal ones, those with the most overdue rows come first.
        """

        def order(topic: TopicForecast) -> tuple[int, int, str]:
            return -topic.load.rows_within, -topic.overdue_rows, topic.topic

        return [
            topic
            for topic in heapq.nsmallest(count, self.topics, key=order)
            if topic.load.rows_within or topic.overdue_rows
        ]

    def busiest_steps(self, count: int, *, topics: int = 3) -> list[BusyStep]:
        """Return the steps with the most load, the most first, the earlier of equal ones first."""
        load = self.load
        places = np.lexsort((load.step, -load.rows))[:count]
        steps = load.step[places]
        leading: dict[int, list[tuple[str, int]]] = {step: [] for step in steps.tolist()}
        for topic in self.topics:
            for step, rows in zip(*_rows_at(topic.load, steps), strict=True):
                if rows:
                    leading[step].append((topic.topic, rows))
        return [
            BusyStep(step, rows, tuple(sorted(leading[step], key=lambda each: (-each[1], each[0]))[:topics]))
            for step, rows in zip(steps.tolist(), load.rows[places].tolist(), strict=True)
        ]


def _rows_at(counts: Counts, steps: I64) -> tuple[list[int], list[int]]:
    """Return the steps, and the rows of each."""
    if not len(counts.step):
        return steps.tolist(), [0] * len(steps)
    places = np.minimum(np.searchsorted(counts.step, steps), len(counts.step) - 1)
    return steps.tolist(), np.where(counts.step[places] == steps, counts.rows[places], 0).tolist()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Bars:
    """Steps drawn together.

    Bar i begins at `begin_ms + i * width_ms`; the first and the last may have fewer steps.
    """

    begin_ms: int
    width_ms: int
    count: int

    @staticmethod
    def of(steps: Steps, bars_max: int) -> Bars:
        """Make at most `bars_max` + 1 bars of the smallest round width.

        They begin at whole days, hours or minutes.
        """
        span_ms = steps.until_ms - steps.begin_ms(0)
        width_ms = next(width for width in _widths_ms(steps.step_ms) if width * bars_max >= span_ms)
        unit_ms = min(width_ms, DAY_MS)
        begin_ms = steps.begin_ms(0) // unit_ms * unit_ms
        return Bars(begin_ms, width_ms, -(-(steps.until_ms - begin_ms) // width_ms))

    def begins_ms(self) -> list[int]:
        return [self.begin_ms + number * self.width_ms for number in range(self.count)]

    def bar_of(self, time_ms: int) -> int:
        return (time_ms - self.begin_ms) // self.width_ms

    def rows(self, counts: Counts, steps: Steps) -> I64:
        """Return the rows of each bar, i64[count]."""
        places = (steps.begins_ms(counts.step) - self.begin_ms) // self.width_ms
        return np.bincount(places, counts.rows, self.count).astype(np.int64)


def _widths_ms(least_ms: int) -> Iterator[int]:
    """Yield round widths, ascending, without end (ms)."""
    liked = [MINUTE_MS * number for number in (1, 2, 5, 10, 15, 30)]
    liked += [HOUR_MS * number for number in (1, 2, 3, 6, 12)]
    days = (DAY_MS * number * 10**power for power in itertools.count() for number in (1, 2, 5))
    return (width for width in itertools.chain(liked, days) if width >= least_ms)


def utc(time_ms: int) -> str:
    """Format a time to the minute for people and tables, in UTC: `2026-11-21 14:05`."""
    return f"{datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC):%Y-%m-%d %H:%M}"


def width_name(width_ms: int) -> str:
    """Format a width: `minute`, `15 minutes`, `2 hours`, `day`."""
    for unit_ms, unit in ((DAY_MS, "day"), (HOUR_MS, "hour"), (MINUTE_MS, "minute")):
        if width_ms % unit_ms == 0:
            number = width_ms // unit_ms
            return unit if number == 1 else f"{number} {unit}s"
    raise ValueError(f"a width of {width_ms} ms is not of whole minutes")


def timestamp(time_ms: int) -> str:
    """Format a time for programs: RFC 3339, to the millisecond, UTC."""
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(name: str) -> str:
    """Format the name of a topic as a line of text, with unprintable characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
