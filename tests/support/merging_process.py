"""A process beside the owner that merges buckets: it knows the store and nothing else.

Owns: planning, writing and committing a merge, each as a step of its own.
Does not own: what happens between the steps (the tests).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from daemon.durability import merging
from storage_backends import collection, commit, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import ObjectStore
from storage_backends.topic_merge import adjacent_order

LIMITS = SegmentLimits(time_step_ms=10_000, rows_max=10, rows_min=0)


class MergingProcess:
    """Merges buckets of one topic of shard 0.

    A merge ends in commit.Refused when the newest manifest does not allow it.
    """

    _numbers = itertools.count()

    def __init__(self, store: ObjectStore, topic: str = "t", *, limits: SegmentLimits = LIMITS) -> None:
        self._store = store
        self._limits = limits
        self._topic_id = names.topic_id(topic)
        self._log = topic_manifest.topic_log(
            store,
            0,
            self._topic_id,
            monotonic=lambda: 0.0,
            sleep=lambda _: None,
            jitter=lambda: 0.5,
            new_id=lambda: f"other-{next(self._numbers):06d}",
        )

    def tip(self) -> TopicManifest:
        tip = self._log.read_tip()
        assert tip is not None
        return tip.manifest

    def live(self, subscription_id: int = 0) -> list[LiveBucket]:
        """The buckets of one index that may be merged, neighbours side by side."""
        return [live for live in adjacent_order(self.tip().live) if live.subscription_id == subscription_id]

    def runs(self, length: int) -> list[list[LiveBucket]]:
        """All runs of so many neighbours that may be merged."""
        order = adjacent_order(self.tip().live)
        runs = [order[start : start + length] for start in range(len(order) - length + 1)]
        return [run for run in runs if len({live.subscription_id for live in run}) == 1]

    def write(self, sources: Sequence[LiveBucket]) -> merging.WrittenMerge:
        """Plans a merge from the tip and writes its object."""
        tip = self.tip()
        key = names.bucket_key(0, self._topic_id, tip.head.number, f"other-{next(self._numbers):06d}")
        plan = merging.MergePlan(tip, tuple(sources), key)
        read = [merging.read_source(self._store, live) for live in sources]
        made = merging.merged(self._store, plan, read, limits=self._limits, compatible=False)
        return merging.write(self._store, plan, read, made, delete_after_ms=0)

    def commit(self, written: merging.WrittenMerge) -> LiveBucket | None:
        """The merged bucket, None when no row was left."""
        commit.commit(self._log, written.operation, writer="other", created_ms=0, deadline_s=1.0)
        return written.operation.bucket

    def merge(self, sources: Sequence[LiveBucket]) -> LiveBucket:
        merged = self.commit(self.write(sources))
        assert merged is not None
        return merged

    def merge_run(self, length: int, place: int = 0) -> LiveBucket:
        """The merged bucket of the first run of so many neighbours, or of a later one."""
        return self.merge(self.runs(length)[place])

    def merge_all(self, subscription_id: int = 0) -> LiveBucket:
        """All buckets of an index become one."""
        return self.merge(self.live(subscription_id))

    def set_floor(self) -> None:
        """No object that was started before now may be named from now on."""
        for _ in range(2):
            # The floor is at most the tip before it.
            operation = collection.SetFloor[TopicManifest](floor=self.tip().head.number)
            commit.commit(self._log, operation, writer="other", created_ms=0, deadline_s=1.0)

    def collect(self, sources: Sequence[LiveBucket]) -> None:
        """Deletes their objects, as garbage collection does when their time is over."""
        named = {live.object.name for live in self.tip().live}
        for source in sources:
            assert source.object.name not in named
            self._store.delete(source.object.name)
