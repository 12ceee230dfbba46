"""A topic in a store, its owner, and collectors, with a wall clock that a test moves.

Owns: how an object is begun, brought in and dropped, and a collection as the engine makes it.
Does not own: what is asserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from daemon.core.garbage_rules import CollectionLimits, Summary
from daemon.owner import collection_pass
from storage_backends import commit, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from storage_backends.shard_listing import Listed, ShardListing
from storage_backends.topic_manifest import DeleteTopic, DropBuckets, Seal
from tests._support.virtual_clock import VirtualClock
from tests._support.virtual_loop import InlineExecutor
from tests.storage_backends._support.topic_manifests import CREATE, EPOCH, TOPIC_ID, Operation, bucket, progress

SHARD = 3
HOUR_MS = 3_600_000
GRACE_MS = HOUR_MS
BODY = b"1234567"
OBJECTS = names.buckets_prefix(SHARD, TOPIC_ID)
MANIFESTS = names.topic_manifest_prefix(SHARD, TOPIC_ID)

LIMITS = CollectionLimits(
    orphan_age_ms=24 * HOUR_MS,
    manifests_kept=1000,
    manifests_age_ms=24 * HOUR_MS,
    attempts_max=3,
    guard_share=0.2,
    guard_bytes=1 << 20,
)


class TopicWithGarbage:
    """The topic exists from the beginning. `store`: without faults."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.now_ms = 1000 * HOUR_MS
        self.clock = VirtualClock()
        self._ids = (f"id{number}" for number in itertools.count())
        self.commit(CREATE)

    def pass_time(self, hours: float) -> None:
        self.now_ms += int(hours * HOUR_MS)
        self.clock.now_s += hours * 3600

    # ---- the owner

    def log(self, store: ObjectStore | None = None) -> commit.ManifestLog[TopicManifest]:
        return topic_manifest.topic_log(
            self.store if store is None else store,
            SHARD,
            TOPIC_ID,
            monotonic=self.clock.now,
            sleep=self.clock.block,
            jitter=lambda: 0.5,
            new_id=lambda: next(self._ids),
        )

    @property
    def tip(self) -> commit.Tip[TopicManifest]:
        tip = self.log().read_tip()
        assert tip is not None
        return tip

    def commit(self, operation: Operation, *, warm: commit.Tip[TopicManifest] | None = None) -> TopicManifest:
        return commit.commit(
            self.log(), operation, writer="owner", created_ms=self.now_ms, warm=warm, deadline_s=10.0
        ).manifest

    def begin(self, unique: str, *, base: int | None = None) -> LiveBucket:
        """Writes an object that no manifest names yet."""
        base = self.tip.number if base is None else base
        key = names.bucket_key(SHARD, TOPIC_ID, base, unique)
        self.store.put(key, BODY)
        return bucket(key, base)

    def seal_of(self, *buckets: LiveBucket) -> Seal:
        applied = self.tip.manifest.applied
        return Seal(
            buckets=buckets,
            progress=progress(),
            progress_object=None,
            slot_from=applied,
            slot_to=ShardSlot(applied + 1),
            epoch=EPOCH,
            replaced_delete_after_ms=self.now_ms + GRACE_MS,
        )

    def seal(self, *uniques: str) -> list[str]:
        """Brings in new objects; their names."""
        buckets = [self.begin(unique) for unique in uniques]
        self.commit(self.seal_of(*buckets))
        return [each.object.name for each in buckets]

    def drop(self, *dropped: str) -> None:
        self.commit(DropBuckets(buckets=dropped, epoch=EPOCH, delete_after_ms=self.now_ms + GRACE_MS))

    def delete(self) -> None:
        applied = self.tip.manifest.applied
        self.commit(DeleteTopic(slot=ShardSlot(applied + 1), epoch=EPOCH, delete_after_ms=self.now_ms + GRACE_MS))

    # ---- collectors

    def tools(self, store: ObjectStore | None = None, limits: CollectionLimits = LIMITS) -> collection_pass.Tools:
        return collection_pass.Tools(
            store=self.store if store is None else store,
            executor=InlineExecutor(),
            now_ms=lambda: self.now_ms,
            writer="collector",
            limits=limits,
        )

    def collector(
        self, store: ObjectStore | None = None, limits: CollectionLimits = LIMITS
    ) -> collection_pass.Collector[TopicManifest]:
        return collection_pass.Collector(self.log(store), collection_pass.TOPIC, self.tools(store, limits))

    def listed(self, store: ObjectStore | None = None) -> Listed:
        listing = ShardListing(SHARD)
        listing.add((self.store if store is None else store).list(names.shard_prefix(SHARD)))
        return listing.topics[TOPIC_ID]

    def collect(
        self, store: ObjectStore | None = None, limits: CollectionLimits = LIMITS, *, dry_run: bool = False
    ) -> Summary:
        """Everything, as the engine does it."""
        store = self.store if store is None else store
        collector, listed = self.collector(store, limits), self.listed(store)
        step = collector.collect_tombstones(None, dry_run=dry_run)
        summary = step.summary
        while step.more:
            step = collector.collect_tombstones(step.tip)
            summary += step.summary
        listed.forget(step.deleted)
        given_up = collection_pass.given_up_in(store, names.shard_prefix(SHARD))
        orphans = collector.find_orphans(listed, step.tip, given_up=given_up, dry_run=dry_run)
        assert orphans.tip is not None
        if not dry_run:
            summary += collector.delete_orphans(orphans.found)
        return summary + collector.collect_manifests(listed, orphans.tip, dry_run=dry_run)

    # ---- contents

    def objects(self) -> list[str]:
        return sorted(each.key for each in self.store.list(OBJECTS))

    def manifest_numbers(self) -> list[int]:
        return sorted(names.number_of(each.key) for each in self.store.list(MANIFESTS))

    def dead(self) -> list[str]:
        return sorted(each.key for each in self.store.list(names.dead_objects_prefix()))

    def unnamed(self) -> Sequence[str]:
        """Objects that the newest manifest does not name."""
        named = topic_manifest.names_in(self.tip.manifest)
        return [key for key in self.objects() if key not in named]
