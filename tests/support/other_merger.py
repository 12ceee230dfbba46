"""A process that merges the buckets of a topic that it does not own, as an offline job does: from the store alone.

Owns: planning from the newest manifest, writing, and committing when the test says so.
Does not own: which buckets are merged (the test says so).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from daemon.durability import merging
from storage_backends import commit, topic_manifest, topic_merge
from storage_backends.formats import names
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import ObjectStore

Operation = commit.Operation[TopicManifest]

LIMITS = SegmentLimits(time_step_ms=300_000, rows_max=5_000, rows_min=1_000)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """A merge whose object is written."""

    sources: tuple[str, ...]
    written: merging.WrittenMerge


class OtherMerger:
    """Merges of one topic of shard `shard`. `monotonic`, `sleep`: its clock."""

    def __init__(
        self,
        store: ObjectStore,
        topic: str = "t",
        *,
        shard: int = 0,
        limits: SegmentLimits = LIMITS,
        monotonic: Callable[[], float] = lambda: 0.0,
        sleep: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._shard = shard
        self._topic_id = names.topic_id(topic)
        self._limits = limits
        self._numbers = itertools.count(1)
        self._log = topic_manifest.topic_log(
            store,
            shard,
            self._topic_id,
            monotonic=monotonic,
            sleep=sleep,
            jitter=lambda: 0.5,
            new_id=lambda: f"other-{next(self._numbers):04}",
        )

    def tip(self) -> TopicManifest:
        tip = self._log.read_tip()
        assert tip is not None
        return tip.manifest

    def runs(self, length: int) -> list[list[LiveBucket]]:
        """The neighbours that may be merged by the newest manifest."""
        order = topic_merge.adjacent_order(self.tip().live)
        runs = [order[start : start + length] for start in range(len(order) - length + 1)]
        return [run for run in runs if len({live.subscription_id for live in run}) == 1]

    def plan(self, run: Sequence[LiveBucket]) -> Planned:
        """Everything but the commit."""
        tip = self.tip()
        unique = f"other-{next(self._numbers):04}"
        plan = merging.MergePlan(
            tip, tuple(run), names.bucket_key(self._shard, self._topic_id, tip.head.number, unique)
        )
        sources = [merging.read_source(self._store, live) for live in run]
        made = merging.merged(self._store, plan, sources, limits=self._limits, compatible=False)
        written = merging.write(self._store, plan, sources, made, delete_after_ms=0)
        return Planned(tuple(live.object.name for live in run), written)

    def change(self, operation: Operation) -> TopicManifest:
        """Commits any operation that needs no owner. Raises commit.Refused."""
        return _committed(self._log, operation)

    def commit(self, planned: Planned) -> TopicManifest:
        """Raises commit.Refused."""
        return self.change(planned.written.operation)

    def merge(self, length: int, place: int = 0) -> TopicManifest:
        """Merges one run, from plan to commit."""
        return self.commit(self.plan(self.runs(length)[place]))


def _committed(log: commit.ManifestLog[TopicManifest], operation: Operation) -> TopicManifest:
    return commit.commit(log, operation, writer="other", created_ms=0, warm=None, deadline_s=10.0).manifest
