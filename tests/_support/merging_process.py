"""A process beside the owner that merges buckets: it knows the store and nothing else.

Owns: planning, writing and committing a merge, each as a step of its own.
Does not own: what happens between the steps (the tests).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from storage_backends import bucket_merging, bucket_reading, commit, manifest_collection, merge_hints, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import ObjectStore
from storage_backends.topic_manifest import adjacent_order

Operation = commit.Operation[TopicManifest]

LIMITS = SegmentLimits(time_step_ms=10_000, rows_max=10, rows_min=0)


class MergingProcess:
    """Merges buckets of one topic. `name`: no other process has it; `now_ms`: its wall clock; `hints`: whether it
    leaves any: some jobs do not.

    A merge ends in commit.Refused when the newest manifest does not allow it, in Damaged when a source is damaged.
    """

    _processes = itertools.count()

    def __init__(
        self,
        store: ObjectStore,
        topic: str = "t",
        *,
        shard: int = 0,
        name: str | None = None,
        now_ms: Callable[[], int] = lambda: 0,
        limits: SegmentLimits = LIMITS,
        hints: bool = True,
    ) -> None:
        self.name = f"other-{next(self._processes)}" if name is None else name
        self._store = store
        self._shard = shard
        self._limits = limits
        self._now_ms = now_ms
        self._hints = hints
        self._topic_id = names.topic_id(topic)
        self._ids = itertools.count()
        self._log = topic_manifest.topic_log(
            store,
            shard,
            self._topic_id,
            monotonic=lambda: 0.0,
            sleep=lambda _: None,
            jitter=lambda: 0.5,
            new_id=self._new_id,
        )

    def _new_id(self) -> str:
        return f"{self.name}-{next(self._ids):04}"

    @property
    def is_there(self) -> bool:
        """Whether the topic has a manifest."""
        return self._log.read_tip() is not None

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

    def write(self, sources: Sequence[LiveBucket]) -> bucket_merging.WrittenMerge:
        """Plans a merge from the tip and writes its object."""
        tip = self.tip()
        key = names.bucket_key(self._shard, self._topic_id, tip.head.number, self._new_id())
        plan = bucket_merging.MergePlan(tip, tuple(sources), key)
        read = [bucket_merging.read_source(self._store, live) for live in sources]
        progress_of = functools.partial(bucket_reading.progress_of, self._store)
        made = bucket_merging.merged(plan, read, progress_of(tip), limits=self._limits, compatible=False)
        return bucket_merging.write(
            self._store, plan, read, made, progress_of=progress_of, delete_after_ms=self._now_ms()
        )

    def commit(self, written: bucket_merging.WrittenMerge) -> LiveBucket | None:
        """The merged bucket, None when no row was left."""
        self._commit(written.operation)
        if self._hints:
            hint = merge_hints.MergeHint(self._shard, self._topic_id)
            merge_hints.leave(self._store, [hint], value=self._new_id())
        return written.operation.bucket

    def _commit(self, operation: Operation) -> None:
        commit.commit(self._log, operation, writer=self.name, created_ms=self._now_ms(), deadline_s=10.0)

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
            operation = manifest_collection.SetFloor[TopicManifest](floor=self.tip().head.number)
            self._commit(operation)

    def collect(self, sources: Sequence[LiveBucket]) -> None:
        """Deletes their objects, as garbage collection does when their time is over."""
        named = {live.object.name for live in self.tip().live}
        for source in sources:
            assert source.object.name not in named
            self._store.delete(source.object.name)
