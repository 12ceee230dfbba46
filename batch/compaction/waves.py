"""Orders the runs of a job and cuts them into waves; runs one wave on the engine in a thread.

`Waves` is a state machine without clock, store and processes. It also limits the bytes to read, and how often a topic
is planned again.

    waiting --next_wave--> in flight --settled--> done
       ^                      |
       |                      +--refused--> its topic is planned again when none of its runs is in flight,
       +-----offer------------------------  its waiting runs are withdrawn; the last attempt is refused for good

A topic is planned again as a whole, because a refused run shows that the topic has changed. The driver commits one wave
while the engine does the next (`Wave`). `plan` plans, `job` commits.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final

from batch.compaction.merge_task import FailedRun, MergeTask, WrittenRun, merge_run
from batch.compaction.plan import Run
from batch.engine.engine_port import TaskEngine, WorkFailed
from batch.engine.root import TopicPlace


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A run of a topic. `attempt` counts how often the topic was planned, from 1 on."""

    topic: TopicPlace
    run: Run
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """A number of runs, and what they read: sources and their bytes."""

    runs: int = 0
    sources: int = 0
    size_bytes: int = 0

    @staticmethod
    def of(runs: Collection[Run]) -> Amount:
        return Amount(len(runs), sum(len(run.sources) for run in runs), sum(run.size_bytes for run in runs))

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.runs + other.runs, self.sources + other.sources, self.size_bytes + other.size_bytes)


NOTHING: Final = Amount()


@dataclasses.dataclass(eq=False, slots=True)
class _Topic:
    attempt: int = 0
    under_way: int = 0
    again: bool = False


class Waves:
    """The runs of all topics.

    `attempts_max` limits how often a topic is planned. `bytes_max` limits the sources that are read, None means no
    limit; a run that no longer fits is skipped for one that does.
    """

    def __init__(self, *, attempts_max: int, bytes_max: int | None = None) -> None:
        self._attempts_max = attempts_max
        self._bytes_left = bytes_max
        self._topics: dict[TopicPlace, _Topic] = {}
        # The most useful last, once they are sorted
        self._waiting: list[Work] = []
        self._sorted = True
        self._over_limit: list[Work] = []
        self.waiting = NOTHING
        """The runs that waves may still have"""

    def offer(self, topic: TopicPlace, runs: Collection[Run]) -> None:
        """Add the runs of a topic that was planned, for the first time or again."""
        state = self._topics.setdefault(topic, _Topic())
        state.attempt += 1
        state.again = False
        self._wait([Work(topic, run, state.attempt) for run in runs])
        self.waiting += Amount.of(runs)

    def _wait(self, works: Collection[Work]) -> None:
        self._waiting += works
        self._sorted = False

    def next_wave(self, size: int) -> list[Work]:
        """Return the next runs to do, at most `size`, the most useful first; they are then in flight."""
        if not self._sorted:
            self._waiting.sort(
                key=lambda work: (-work.run.benefit, work.topic, work.run.sources[0].object.name), reverse=True
            )
            self._sorted = True
        wave: list[Work] = []
        while self._waiting and len(wave) < size:
            work = self._waiting.pop()
            if self._bytes_left is not None and work.run.size_bytes > self._bytes_left:
                self._over_limit.append(work)
                continue
            if self._bytes_left is not None:
                self._bytes_left -= work.run.size_bytes
            self._topics[work.topic].under_way += 1
            wave.append(work)
        self.waiting = Amount.of([work.run for work in self._waiting])
        return wave

    def settled(self, work: Work) -> None:
        """End a run whose outcome is final."""
        self._topics[work.topic].under_way -= 1

    def refused(self, work: Work, *, read: bool = True) -> bool:
        """End a run that cannot be done as it was planned; return whether its topic is planned again.

        `read` says whether its sources may have been read; if not, other runs may read as much.
        """
        if not read and self._bytes_left is not None:
            self._bytes_left += work.run.size_bytes
            self._wait(self._over_limit)
            self._over_limit = []
        state = self._topics[work.topic]
        state.under_way -= 1
        again = state.attempt < self._attempts_max
        if again:
            state.again = True
            self._waiting = [other for other in self._waiting if other.topic != work.topic]
            self._over_limit = [other for other in self._over_limit if other.topic != work.topic]
        self.waiting = Amount.of([work.run for work in self._waiting])
        return again

    def to_plan_again(self) -> list[TopicPlace]:
        """Return the topics of which a run was refused and none is in flight; each must be offered next."""
        return [topic for topic, state in self._topics.items() if state.again and not state.under_way]

    def rest(self) -> tuple[list[Work], list[Work]]:
        """Return the runs that were not begun: those over the limit on bytes, and the others."""
        return self._over_limit, self._waiting


Report = WrittenRun | FailedRun


class Wave:
    """A wave, which begins at once.

    `done` is called in another thread with the number of tasks that have ended; an exception that it raises ends the
    wave.
    """

    def __init__(
        self, engine: TaskEngine, works: Sequence[Work], tasks: Sequence[MergeTask], done: Callable[[int], None]
    ) -> None:
        self.works = works
        self.failure: WorkFailed | None = None
        """The reason that some tasks have no report"""
        self._engine = engine
        self._tasks = tasks
        self._done = done
        self._reports: list[tuple[Work, Report]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="wave", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for place, report in self._engine.run(merge_run, self._tasks, self._done):
                self._reports.append((self.works[place], report))
        except WorkFailed as failure:
            self.failure = failure
        except BaseException as error:  # noqa: BLE001 - it is raised where the reports are asked for
            self._error = error

    def end(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def reports(self) -> list[tuple[Work, Report]]:
        """Wait for its end and return the reports; `failure` ended the tasks without one. Raises what `done` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._reports
