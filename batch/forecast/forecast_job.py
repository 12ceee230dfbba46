"""A forecast of a root: the driver's side.

Owns: which buckets become tasks and how many go into one, and what is counted again.
Does not own: what a topic holds (`batch.engine.topic_state`) and what its counts make (`topic_count`), counting
(`steps`, `counting_tasks`), the engines.

Topics are read one after the other, and their tasks run in waves: what is in memory is the sets of one wave, and the
counts. A bucket that is gone when a task comes to read it was merged meanwhile, or all of its rows are gone: its topic
is read and counted again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from batch.engine.engine_port import Engine
from batch.engine.job_settings import Settings
from batch.engine.root import Root, TopicPlace
from batch.engine.topic_reading import read_states
from batch.engine.topic_state import TopicState
from batch.forecast import counting_tasks
from batch.forecast.counting_tasks import Failure, Part, Result, Task
from batch.forecast.result import Effort, Forecast, Unread
from batch.forecast.steps import Steps, counted_at_once
from batch.forecast.topic_count import TopicCount

_log = logging.getLogger(__name__)

TASK_BYTES: Final = 4 << 20
"""What the buckets of a task have together, unless it is one."""

BUCKET_BYTES: Final = 64 << 10
"""What a bucket counts for beside its size: each takes requests of its own."""

WAVE_TASKS: Final = 512
"""Tasks that run together: their sets are in memory."""

ATTEMPTS: Final = 3
"""How often a topic is read whose buckets were merged while they were counted."""


def run(
    root: Root,
    settings: Settings,
    steps: Steps,
    places: Sequence[TopicPlace] | None,
    engine: Engine,
    progress: Callable[[int, int], None],
) -> Forecast:
    """The forecast of the topics in those places, None = of all.

    What of a topic cannot be read is left out, and named in `Forecast.unread`. `progress`: told how many tasks have
    ended, of how many that are known.

    Raises WorkFailed, and the store's errors when the root cannot be listed or a task meets one other than damage.
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
        engine: Engine,
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
        """Reads and counts topics. `last`: what is missing then is damage."""
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

    def _parts(self, state: TopicState, topic: TopicCount, number: int) -> Iterator[Part]:
        """The buckets that must be opened; the others are counted."""
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

        for _, result in self._engine.run(counting_tasks.count, tasks, done):
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
    """Parts into tasks of about one size."""

    def __init__(self, settings: Settings, steps: Steps) -> None:
        self._settings, self._steps = settings, steps
        self._parts: list[Part] = []
        self._size_bytes = 0

    def add(self, parts: Iterable[Part]) -> Iterator[Task]:
        """The tasks that became full."""
        for part in parts:
            size_bytes = part.live.object.size_bytes + BUCKET_BYTES
            if self._size_bytes + size_bytes > TASK_BYTES:
                yield from self.rest()
            self._parts.append(part)
            self._size_bytes += size_bytes

    def rest(self) -> Iterator[Task]:
        """The task of what is left, if anything is."""
        if self._parts:
            yield Task(self._settings, self._steps, tuple(self._parts))
        self._parts, self._size_bytes = [], 0
