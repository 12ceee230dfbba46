"""A compaction in this process: its workers too, its clock and its pauses are virtual.

Owns: the engine without processes, and a root whose commits do not wait. Does not own: what is in the root (`roots`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

from batch.compaction import job, merge_task
from batch.compaction.job import JobEnvironment, Options, Stop
from batch.compaction.tally import Advance, Summary
from batch.engine.engine_port import WorkFailed
from batch.engine.job_settings import Settings
from batch.engine.root import Root, TopicPlace
from storage_backends import commit, root_format, topic_manifest
from storage_backends.formats.manifest import TopicManifest
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from storage_backends.storage_settings import Collection, Store
from tests._support.fault_store import FaultStore, Script
from tests.batch.engine._support import roots
from tests.batch.engine._support.roots import StoredTopic

T = TypeVar("T")
R = TypeVar("R")


class InProcess:
    """An engine that does one task after the other, where it is asked. `lose`: places in a run that its workers die
    of.
    """

    name = "local"
    parallelism = 1

    def __init__(self) -> None:
        self.tasks: list[Any] = []
        self.lose: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing runs."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        for place, task in enumerate(tasks):
            done(place)
            self.tasks.append(task)
            if place in self.lose:
                raise WorkFailed(f"worker of task {place} was lost")
            yield place, work(task)
        done(len(tasks))


class VirtualTime:
    """Passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def elapsed_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualRoot(Root):
    """A root whose commits sleep in virtual time."""

    def __init__(self, store: ObjectStore, time: VirtualTime) -> None:
        found = root_format.read(store)
        assert found is not None
        super().__init__(store, found)
        self._time = time
        self._ids = itertools.count()

    def log(self, place: TopicPlace) -> commit.ManifestLog[TopicManifest]:
        return topic_manifest.topic_log(
            self.store,
            place.shard,
            place.topic_id,
            monotonic=self._time.elapsed_s,
            sleep=self._time.sleep,
            jitter=lambda: 0.5,
            new_id=lambda: f"job-{id(self)}-{next(self._ids)}",
        )


class World:
    """A root in memory, behind a store that can fail, and jobs on it."""

    _numbers = itertools.count()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = MemoryStore()
        self.script = Script()
        self.store = FaultStore(self.memory, self.script)
        self.time = VirtualTime()
        self.engine = InProcess()
        self.stop = Stop()
        self.advances: list[Advance] = []
        place = Store(path=f"/in/memory/{next(self._numbers)}")
        self.settings = Settings(store=place, collection=Collection(grace_s=60.0))
        monkeypatch.setattr(merge_task, "store_of", lambda settings: self.store)
        roots.make_root(self.memory)

    def topic(self, name: str = "flights") -> StoredTopic:
        return StoredTopic(self.memory, name)

    def compact(self, options: Options | None = None, *, dry_run: bool = False) -> Summary:
        environment = JobEnvironment(
            now_ms=lambda: roots.NOW_MS,
            elapsed_s=self.time.elapsed_s,
            new_id=lambda: f"job{next(self._numbers)}",
        )
        return job.compact(
            VirtualRoot(self.store, self.time),
            None if dry_run else self.engine,
            self.settings,
            options or Options(),
            environment=environment,
            stop=self.stop,
            watch=self.advances.append,
        )
