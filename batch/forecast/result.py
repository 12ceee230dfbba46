"""A forecast: what comes due when, for each topic and whoever is owed it, and what is asked of that most.

Owns: the values of a forecast, its totals, its busiest topics and steps.
Does not own: how it was counted (`forecast_job`), and the forms it is written in (`text`, `parquet`, `picture`).
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
    """What is owed to the subscription of that name alone, or, None, to all subscriptions of the topic: `rows` that
    come due, and `redeliveries` of what was negatively acknowledged. `receivers`: how many subscriptions are handed a
    row that comes due.
    """

    subscription: str | None
    receivers: int
    rows: Counts
    redeliveries: Counts


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TopicForecast:
    """A topic: `owed`, first what is owed to all; `overdue_rows`: due, not gone, and waiting for no redelivery;
    `unread_rows`: of buckets that are quarantined or damaged, in no other number.
    """

    topic: str
    shard: int
    owed: tuple[Owed, ...] = ()
    overdue_rows: int = 0
    unread_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows that come due within the horizon."""
        return sum(owed.rows.rows_within for owed in self.owed)

    @property
    def redeliveries(self) -> int:
        return sum(owed.redeliveries.rows_within for owed in self.owed)

    @property
    def load(self) -> Counts:
        """Rows that come due and redeliveries together."""
        return Counts.merged([part for owed in self.owed for part in (owed.rows, owed.redeliveries)])

    @property
    def deliveries(self) -> int:
        """How often something is handed out within the horizon, when everything is acknowledged at once."""
        return sum(owed.rows.rows_within * owed.receivers + owed.redeliveries.rows_within for owed in self.owed)


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A bucket whose rows are in no count, and why."""

    topic: str
    bucket: str
    rows: int
    reason: str
    damaged: bool


@dataclasses.dataclass(frozen=True, slots=True)
class BusyStep:
    """`topics`: those with the most rows in it, and how many, the most first."""

    step: int
    rows: int
    topics: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """What was read for it. `segments_read` of `segments`; buckets that lie within one step are not opened."""

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
    """`topics`: by name. The load is rows that come due and redeliveries together."""

    steps: Steps
    topics: tuple[TopicForecast, ...]
    unread: tuple[Unread, ...] = ()
    effort: Effort = Effort()

    @functools.cached_property
    def load(self) -> Counts:
        return Counts.merged([topic.load for topic in self.topics])

    @property
    def rows(self) -> int:
        """Rows that come due within the horizon."""
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
        """How many rows come due at the end of the last step or later."""
        return self.load.beyond_rows

    @property
    def unread_rows(self) -> int:
        return sum(topic.unread_rows for topic in self.topics)

    @property
    def peak(self) -> tuple[int, int] | None:
        """(step, its load) of the first step that has the most; None when nothing comes due."""
        load = self.load
        if not len(load.step):
            return None
        place = int(np.argmax(load.rows))
        return int(load.step[place]), int(load.rows[place])

    def busiest_topics(self, count: int) -> list[TopicForecast]:
        """The topics with the most load within the horizon, and of equal ones those with the most overdue."""

        def order(topic: TopicForecast) -> tuple[int, int, str]:
            return -topic.load.rows_within, -topic.overdue_rows, topic.topic

        return [
            topic
            for topic in heapq.nsmallest(count, self.topics, key=order)
            if topic.load.rows_within or topic.overdue_rows
        ]

    def busiest_steps(self, count: int, *, topics: int = 3) -> list[BusyStep]:
        """The steps with the most load, the most first, the earlier of equal ones first."""
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
    """The steps, and the rows of each."""
    if not len(counts.step):
        return steps.tolist(), [0] * len(steps)
    places = np.minimum(np.searchsorted(counts.step, steps), len(counts.step) - 1)
    return steps.tolist(), np.where(counts.step[places] == steps, counts.rows[places], 0).tolist()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Bars:
    """Steps drawn together: bar i begins at `begin_ms + i * width_ms`; the first and the last may have fewer steps."""

    begin_ms: int
    width_ms: int
    count: int

    @staticmethod
    def of(steps: Steps, bars_max: int) -> Bars:
        """At most so many, and one, of the least width that people like; they begin at whole days, hours or minutes."""
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
        """i64[count]: the rows of each bar."""
        places = (steps.begins_ms(counts.step) - self.begin_ms) // self.width_ms
        return np.bincount(places, counts.rows, self.count).astype(np.int64)


def _widths_ms(least_ms: int) -> Iterator[int]:
    """Yield round widths, ascending, without end (ms)."""
    liked = [MINUTE_MS * number for number in (1, 2, 5, 10, 15, 30)]
    liked += [HOUR_MS * number for number in (1, 2, 3, 6, 12)]
    days = (DAY_MS * number * 10**power for power in itertools.count() for number in (1, 2, 5))
    return (width for width in itertools.chain(liked, days) if width >= least_ms)


def utc(time_ms: int) -> str:
    """A time to the minute, as people and tables show it: `2026-11-21 14:05`. UTC."""
    return f"{datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC):%Y-%m-%d %H:%M}"


def width_name(width_ms: int) -> str:
    """`minute`, `15 minutes`, `2 hours`, `day`."""
    for unit_ms, unit in ((DAY_MS, "day"), (HOUR_MS, "hour"), (MINUTE_MS, "minute")):
        if width_ms % unit_ms == 0:
            number = width_ms // unit_ms
            return unit if number == 1 else f"{number} {unit}s"
    raise ValueError(f"a width of {width_ms} ms is not of whole minutes")


def timestamp(time_ms: int) -> str:
    """A time as programs read it: RFC 3339, to the millisecond, UTC."""
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(name: str) -> str:
    """A name of a topic as a line of text: what is not printable is escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
