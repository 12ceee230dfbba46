"""A daemon with a few topics of small buckets under traffic, and a job beside it that is killed, stopped or refused.

Owns: the daemon, the topics, and what must be true after whatever happened to a job.
Does not own: what happens to it (the tests).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ulid

import tarry
from batch.compaction import job
from batch.compaction.tally import Outcome, Status, Summary
from batch.engine import job_settings
from batch.engine.job_settings import store_of
from batch.engine.root import Root
from examples import processes
from storage_backends.formats import names
from storage_backends.local_directory import LocalDirectory
from tests._support import jobs as jobs_support
from tests._support.jobs import Jobs
from tests._support.processes import Daemons
from tests.batch.compaction._support import live_topic, stored
from tests.batch.compaction._support.jobs_in_process import InProcess
from tests.batch.compaction._support.live_topic import LiveTopic, Shape

# Each topic is one run.
SHAPES = {
    "flights": Shape(buckets=12, rows=40, seal_every=5),
    "trains": Shape(buckets=8, rows=40, own=True, seal_every=5),
    "ferries": Shape(buckets=8, rows=40, seal_every=5),
}
# What no manifest needs is deleted when somebody asks for it, and soon. Not at once: a seal of the daemon's own that is
# under way when the floor passes it is refused, and the shard loaded anew.
SETTINGS: dict[str, object] = {
    "daemon.shards": 2,
    "collection.interval_s": 86_400,
    "collection.orphan_interval_s": 86_400,
    "collection.orphan_age_s": 3,
    "collection.grace_s": 0,
}

COLLECTED_WITHIN_S = 600.0
SERVED_WITHIN_S = 600.0


@dataclasses.dataclass(frozen=True)
class Left:
    """Objects that a job wrote, by whether a manifest names them."""

    orphans: frozenset[str]
    committed: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Scene:
    """`before`: the bucket objects that were there before any job; `collected`: of all, those that collection took.
    `open`: what ends with the scene.
    """

    daemon: processes.DaemonProcess
    client: tarry.Client
    topics: list[LiveTopic]
    jobs: Jobs
    root: Path
    before: stored.Stored
    open: contextlib.ExitStack
    collected: set[str] = dataclasses.field(default_factory=set)

    def begin(self) -> None:
        for topic in self.topics:
            topic.begin()

    def go_on(self, turns: int = 4) -> None:
        """The traffic goes on; each topic has committed something since, and so knows every merge before."""
        for topic in self.topics:
            topic.wait_for_turns(turns)
            topic.seal()

    def left_by_a_job(self) -> Left:
        """What a job that ended, or does nothing just now, has written: nothing but bucket objects. Raises
        AssertionError.
        """
        for topic in self.topics:
            topic.wait_for_turns(2)
            topic.account.check_so_far()
        first = stored.look(self.root)
        # Seals that are under way are done then: their objects are no orphans.
        for topic in self.topics:
            topic.seal()
        now = stored.look(self.root)
        assert not now.lost, "a manifest names what is not there"
        assert self.before.files - self.collected <= now.files, "an object was deleted, and nobody collected"
        foreign = [path for path in stored.everything(self.root) if not is_known(path)]
        assert not foreign, f"a job left something else than objects: {foreign}"
        return Left(orphans=first.orphans & now.orphans, committed=now.merged - self.before.merged)

    def collect(self, orphans: frozenset[str]) -> None:
        """Collection removes these orphans, and nothing that is served."""
        # They are below the tip by now; the floor follows.
        self.go_on(turns=1)
        self._collect_until(lambda left: not orphans & left.files, "the orphans are collected")

    def plant_orphans(self) -> frozenset[str]:
        """An object of each topic that was begun just now and nobody will name, as of a process that died; what they
        are called. When they are collected, the floor is above whatever was begun before.
        """
        store = LocalDirectory(self.root)
        keys = []
        for tip in stored.tips(self.root):
            shard = self.client.stats(tip.topic).shard
            keys.append(names.bucket_key(shard, tip.topic_id, tip.head.number, str(ulid.ULID())))
            store.put(keys[-1], b"of a process that died")
        return frozenset(stored.last_part(key) for key in keys)

    def _collect_until(self, reached: Callable[[stored.Stored], bool], what: str) -> None:
        """Collects until it is so. What is served stays."""
        deadline_s = time.monotonic() + COLLECTED_WITHIN_S
        before = stored.look(self.root).files
        while True:
            steps = list(self.client.collect_garbage())
            assert steps[-1].done
            assert not steps[-1].failed.objects
            left = stored.look(self.root)
            assert not left.lost
            if reached(left):
                break
            assert time.monotonic() < deadline_s, f"not within {COLLECTED_WITHIN_S:g} s: {what}; {left.orphans}"
            jobs_support.pause(0.2)
        self.collected.update(before - left.files)

    def check_settled(self) -> None:
        """Every row is accounted for, and on the store is what manifests name, and nothing else."""
        for topic in self.topics:
            topic.check_settled()
        self._collect_until(lambda left: not left.orphans, "nothing is there that no manifest names")

    def finish(self) -> None:
        """A later job does what is left to do. It runs in this process, and needs no engine for so little."""
        summary = compact_here(self.root)
        assert summary.status is Status.DONE, summary
        outcomes = {run.outcome for run in summary.run_results}
        assert outcomes <= {Outcome.COMMITTED, Outcome.REPLANNED}, summary.run_results
        self.go_on(turns=2)
        for topic in self.topics:
            self._wait_until_served(topic)
        self.check_settled()

    def _wait_until_served(self, topic: LiveTopic) -> None:
        """A merge that the daemon knows is served when the daemon has read it."""
        deadline_s = time.monotonic() + SERVED_WITHIN_S
        while merged := sorted(self.before.live & topic.bucket_names()):
            assert time.monotonic() < deadline_s, f"{topic.name}: small buckets are left: {merged}"
            jobs_support.pause(0.2)


@contextlib.contextmanager
def scene(daemons: Daemons, jobs: Jobs, root: Path, seed: int) -> Iterator[Scene]:
    """A daemon that serves filled topics; the traffic has begun."""
    daemon = daemons.make("tarryd", SETTINGS | processes.local_store(root))
    daemon.start_serving()
    with contextlib.ExitStack() as open_until_the_end:
        topics = open_until_the_end.enter_context(live_topic.filled(daemon.address, SHAPES, seed))
        client = open_until_the_end.enter_context(tarry.Client(daemon.address))
        made = Scene(daemon, client, topics, jobs, root, stored.look(root), open_until_the_end)
        made.begin()
        yield made


def compact_here(root: Path) -> Summary:
    """A job as `tarry-spark compact` runs it, in this process."""
    found = job_settings.load(store=str(root), environment={})
    environment = job.JobEnvironment(
        now_ms=live_topic.now_ms, elapsed_s=time.monotonic, new_id=lambda: str(ulid.ULID())
    )
    return job.compact(
        Root.open(store_of(found)),
        InProcess(),
        found,
        job.Options(),
        environment=environment,
        stop=job.Stop(),
        watch=lambda advance: None,
    )


def is_known(path: str) -> bool:
    """Whether a file is of the layout, and no temporary."""
    parts = path.split("/")
    return path.startswith(("FORMAT", "hints/merged")) or (
        parts[0] == "shards" and (parts[2:3] == ["manifest"] or parts[4:5] in (["manifest"], ["buckets"], ["progress"]))
    )
