"""Forecasts a root: reads topics in the driver, and counts their buckets in tasks on an engine.

Topics are read one after the other, and their tasks run in waves: memory holds the sets of one wave, and the counts. A
bucket that is gone when a task reads it was merged meanwhile, or all of its rows are gone: its topic is read and
counted again. `TopicCount` says which subscriptions are owed which rows when; `steps` counts. `batch.cli.forecast`
alone uses this module, which needs no command line.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from batch.engine.engine_port import TaskEngine
from batch.engine.job_settings import Settings, store_of
from batch.engine.root import Root, TopicPlace
from batch.engine.topic_contents import SubscriptionContents, TopicContents
from batch.engine.topic_reading import read_states
from batch.forecast.result import Effort, Forecast, Owed, TopicForecast, Unread
from batch.forecast.steps import BucketCount, Counts, Steps, counted_at_once
from storage_backends import bucket_reading
from storage_backends.formats import index_ids
from storage_backends.formats.format_errors import FormatError
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionSet, position_bitmaps
from storage_backends.formats.row_columns import Rows
from storage_backends.object_store import Damaged, NotFound, ObjectStore, unreadable


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A bucket to count.

    `topic` is its topic's index in a list that the job keeps; `gone` are its rows that are gone.
    """

    topic: int
    live: LiveBucket
    gone: PositionSet


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Task:
    settings: Settings
    steps: Steps
    parts: tuple[Part, ...]


class Failure(enum.Enum):
    """The reason for an uncounted bucket: it is missing (it may have been merged meanwhile), or cannot be read."""

    MISSING = 1
    DAMAGED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Uncounted:
    topic: int
    live: LiveBucket
    failure: Failure
    reason: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Result:
    """The result of a task. `counts` are (topic, index id, its rows in the buckets of this task)."""

    counts: tuple[tuple[int, int, Counts], ...]
    uncounted: tuple[Uncounted, ...]
    effort: Effort


def count(task: Task) -> Result:
    """Count the buckets of a task. Raises the store's errors other than `NotFound` and `Damaged`."""
    store = store_of(task.settings)
    counts: dict[tuple[int, int], list[Counts]] = {}
    uncounted: list[Uncounted] = []
    effort = Effort()
    for part in task.parts:
        try:
            found, spent = count_bucket(store, task.steps, part.live, part.gone)
        except (NotFound, Damaged) as error:
            failure = Failure.MISSING if isinstance(error, NotFound) else Failure.DAMAGED
            uncounted.append(Uncounted(part.topic, part.live, failure, str(error)))
            continue
        counts.setdefault((part.topic, part.live.subscription_id), []).append(found)
        effort += spent
    merged = tuple((topic, index_id, Counts.merged(parts)) for (topic, index_id), parts in counts.items())
    return Result(merged, tuple(uncounted), effort)


def count_bucket(store: ObjectStore, steps: Steps, live: LiveBucket, gone: PositionSet) -> tuple[Counts, Effort]:
    """Count the rows of one bucket that are not gone. Raises Damaged, NotFound and the store's other errors."""
    table = bucket_reading.read_table(store, live)
    counting = BucketCount(steps, table.segments, gone)
    try:
        while run := counting.needed():
            counting.read(run, bucket_reading.read_segments(store, live.object.name, run))
    except FormatError as error:
        raise unreadable(live.object.name, error) from error
    effort = Effort(buckets_opened=1, segments=len(table.segments), segments_read=counting.segments_read)
    return counting.counts(), effort


# Counts of one index that are kept apart before they are added up
_PARTS_MAX = 32


@dataclasses.dataclass(eq=False)
class TopicCount:
    """The counts of a topic so far: from its state without reading a bucket, then from its buckets.

    `subscriptions` maps id to name; `counts` are by index, `redeliveries` by subscription.
    """

    place: TopicPlace
    name: str
    subscriptions: dict[int, str]
    counts: dict[int, list[Counts]]
    redeliveries: dict[int, Counts]
    waiting_rows: int
    unread: list[Unread] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(state: TopicContents, steps: Steps) -> TopicCount:
        counts: dict[int, list[Counts]] = {}
        for part in state.unsealed:
            counts.setdefault(part.index_id, []).append(Counts.of(steps, steps.of(part.rows.deliver_at_ms)))
        return TopicCount(
            place=state.place,
            name=state.name,
            subscriptions={each.stored.subscription_id: each.stored.name for each in state.subscriptions},
            counts=counts,
            redeliveries={each.stored.subscription_id: redeliveries_of(steps, each) for each in state.subscriptions},
            waiting_rows=waiting_rows(state, steps),
        )

    def add(self, index_id: int, counts: Counts) -> None:
        parts = self.counts.setdefault(index_id, [])
        parts.append(counts)
        if len(parts) == _PARTS_MAX:
            parts[:] = [Counts.merged(parts)]

    def leave_out(self, live: LiveBucket, reason: str, *, damaged: bool) -> None:
        """Record a bucket that cannot be counted."""
        self.unread.append(Unread(self.name, live.object.name, live.rows, reason, damaged))

    def forecast(self) -> TopicForecast:
        shared = Counts.merged(self.counts.get(index_ids.SHARED, []))
        owed = [Owed(subscription=None, receivers=len(self.subscriptions), rows=shared, redeliveries=Counts())]
        overdue_rows = shared.overdue_rows
        for number, name in sorted(self.subscriptions.items(), key=lambda each: each[1]):
            own = (number, index_ids.batch_parts_of(number))
            rows = Counts.merged([part for index_id in own for part in self.counts.get(index_id, [])])
            overdue_rows += rows.overdue_rows
            owed.append(Owed(subscription=name, receivers=1, rows=rows, redeliveries=self.redeliveries[number]))
        return TopicForecast(
            topic=self.name,
            shard=self.place.shard,
            owed=tuple(owed),
            # If this clock is behind the daemon's, a redelivered row seems not due yet.
            overdue_rows=max(0, overdue_rows - self.waiting_rows),
            unread_rows=sum(each.rows for each in self.unread),
        )


def redeliveries_of(steps: Steps, state: SubscriptionContents) -> Counts:
    """Count when a subscription's negatively acknowledged rows are redelivered.

    Rows whose redelivery is overdue are counted among the rows.
    """
    found = Counts.merged([Counts.of(steps, steps.of(nacked.redeliver_at_ms)) for nacked in state.nacked])
    return dataclasses.replace(found, overdue_rows=0)


def waiting_rows(state: TopicContents, steps: Steps) -> int:
    """Count the due rows that wait for a redelivery at every subscription that is still owed them."""
    waiting: dict[int, list[Rows]] = {}
    at: dict[tuple[int, int], PositionSet] = {}
    for subscription in state.subscriptions:
        for nacked in subscription.nacked:
            rows = nacked.rows.take(nacked.redeliver_at_ms > np.uint64(steps.now_ms))
            waiting.setdefault(nacked.index_id, []).append(rows)
            place = (nacked.index_id, subscription.stored.subscription_id)
            at[place] = at.get(place, NO_POSITIONS) | _positions(rows)
    total = 0
    for index_id, parts in waiting.items():
        rows = Rows.concat(parts)
        everywhere = _positions(rows)
        if index_id == index_ids.SHARED:
            for subscription in state.subscriptions:
                stored = subscription.stored
                waits = at.get((index_id, stored.subscription_id), NO_POSITIONS)
                too_early = _positions(rows.take(rows.deliver_at_ms <= np.uint64(stored.since_ms)))
                acknowledged = _acknowledged(state, stored.subscription_id)
                everywhere = everywhere & (waits | acknowledged | too_early)
        total += len(everywhere)
    return total


def _positions(rows: Rows) -> PositionSet:
    return PositionSet.of(position_bitmaps(rows.ledger_id, rows.entry_id))


def _acknowledged(state: TopicContents, subscription_id: int) -> PositionSet:
    """Return the positions in the shared index, not gone, that a subscription acknowledged."""
    found = NO_POSITIONS
    for bucket in state.buckets:
        if bucket.live.subscription_id == index_ids.SHARED and not bucket.live.quarantined:
            # A position that is gone may have a newer row.
            found |= bucket.acknowledged.get(subscription_id, NO_POSITIONS) - bucket.gone
    for part in state.unsealed:
        if part.index_id == index_ids.SHARED:
            found |= part.acknowledged.get(subscription_id, NO_POSITIONS)
    return found


_log = logging.getLogger(__name__)

TASK_BYTES: Final = 4 << 20
"""The size of the buckets of a task together, unless it has only one (bytes)"""

BUCKET_BYTES: Final = 64 << 10
"""The cost of a bucket in addition to its size (bytes): each takes requests of its own."""

WAVE_TASKS: Final = 512
"""Tasks that run together: their sets are in memory."""

ATTEMPTS: Final = 3
"""Most readings of a topic whose buckets were merged while they were counted"""


def run(
    root: Root,
    settings: Settings,
    steps: Steps,
    places: Sequence[TopicPlace] | None,
    engine: TaskEngine,
    progress: Callable[[int, int], None],
) -> Forecast:
    """Forecast the topics in those places, or all topics.

    Buckets and topics that cannot be read are left out, and named in `Forecast.unread`. `progress` is called with the
    number of tasks that have ended, and of those known. Raises WorkFailed, and the store's errors if the root cannot be
    listed or a task meets one other than damage.
    """
    job = _Job(root, settings, steps, engine, progress)
    for attempt in range(1, ATTEMPTS + 1):
        job.count(places, last=attempt == ATTEMPTS)
        if not job.again:
            break
        places, job.again = sorted(job.again), set()
        _log.info("counting %d topics again, because buckets were merged meanwhile", len(places))
    return job.forecast()


class _Job:
    def __init__(
        self,
        root: Root,
        settings: Settings,
        steps: Steps,
        engine: TaskEngine,
        progress: Callable[[int, int], None],
    ) -> None:
        self._root, self._settings, self._steps = root, settings, steps
        self._engine, self._progress = engine, progress
        self._topics: dict[TopicPlace, TopicCount] = {}
        self._unread: dict[TopicPlace, Unread] = {}
        self._effort = Effort()
        self._tasks_known = self._tasks_ended = 0
        self.again: set[TopicPlace] = set()

    def count(self, places: Sequence[TopicPlace] | None, *, last: bool) -> None:
        """Read and count topics. In the `last` attempt a missing bucket is damage."""
        for place in places or ():
            # It may have been deleted since it was read before.
            self._topics.pop(place, None)
        wave: list[Task] = []
        topics: list[TopicCount] = []
        packer = _Packer(self._settings, self._steps)
        for state in read_states(self._root, places, failed=self._cannot_be_read):
            topic = self._topics[state.place] = TopicCount.of(state, self._steps)
            topics.append(topic)
            wave += packer.add(self._parts(state, topic, len(topics) - 1))
            if len(wave) >= WAVE_TASKS:
                self._run(wave, topics, last=last)
                wave = []
        self._run([*wave, *packer.rest()], topics, last=last)

    def forecast(self) -> Forecast:
        topics = [topic.forecast() for topic in self._topics.values()]
        unread = [*self._unread.values(), *(each for topic in self._topics.values() for each in topic.unread)]
        return Forecast(
            self._steps,
            tuple(sorted(topics, key=lambda each: each.topic)),
            tuple(sorted(unread, key=lambda each: (each.topic, each.bucket))),
            self._effort,
        )

    def _parts(self, state: TopicContents, topic: TopicCount, number: int) -> Iterator[Part]:
        """Yield the buckets that must be opened; count the others."""
        for bucket in state.buckets:
            live = bucket.live
            self._effort += Effort(buckets=1)
            if live.quarantined:
                topic.leave_out(live, live.damage or "quarantined", damaged=False)
                continue
            counts = counted_at_once(
                self._steps, live.min_deliver_at_ms, live.max_deliver_at_ms, live.rows - len(bucket.gone)
            )
            if counts is not None:
                topic.add(live.subscription_id, counts)
            else:
                yield Part(number, live, bucket.gone)

    def _run(self, tasks: Sequence[Task], topics: Sequence[TopicCount], *, last: bool) -> None:
        if not tasks:
            return
        before, self._tasks_known = self._tasks_ended, self._tasks_known + len(tasks)

        def done(ended: int) -> None:
            self._tasks_ended = before + ended
            self._progress(self._tasks_ended, self._tasks_known)

        for _, result in self._engine.run(count, tasks, done):
            self._take(result, topics, last=last)

    def _take(self, result: Result, topics: Sequence[TopicCount], *, last: bool) -> None:
        for number, index_id, counts in result.counts:
            topics[number].add(index_id, counts)
        for each in result.uncounted:
            topic = topics[each.topic]
            if each.failure is Failure.MISSING and not last:
                self.again.add(topic.place)
            else:
                _log.error("%s: %s; its %d rows are not counted", topic.name, each.reason, each.live.rows)
                topic.leave_out(each.live, each.reason, damaged=True)
        self._effort += result.effort

    def _cannot_be_read(self, place: TopicPlace, error: Exception) -> None:
        _log.error("cannot read topic %s of shard %d: %s", place.topic_id, place.shard, error)
        self._unread[place] = Unread(place.topic_id, "", 0, str(error), damaged=True)


class _Packer:
    """A packer of parts into tasks of about one size."""

    def __init__(self, settings: Settings, steps: Steps) -> None:
        self._settings, self._steps = settings, steps
        self._parts: list[Part] = []
        self._size_bytes = 0

    def add(self, parts: Iterable[Part]) -> Iterator[Task]:
        """Yield the tasks that become full."""
        for part in parts:
            size_bytes = part.live.object.size_bytes + BUCKET_BYTES
            if self._size_bytes + size_bytes > TASK_BYTES:
                yield from self.rest()
            self._parts.append(part)
            self._size_bytes += size_bytes

    def rest(self) -> Iterator[Task]:
        """Yield the task of the remaining parts, if there are any."""
        if self._parts:
            yield Task(self._settings, self._steps, tuple(self._parts))
        self._parts, self._size_bytes = [], 0
