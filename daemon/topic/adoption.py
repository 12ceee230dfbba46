"""Taking merged buckets over: what a manifest has in place of buckets that this owner serves is served from then on.

Owns: which buckets of a manifest are new to the owner, reading of them what must be in memory first, and the one turn
of the loop in which a merged bucket takes the place of its sources.
Does not own: what it inherits (`daemon.core.index.merging`), when a manifest is looked at (`bucket_life`), and merging
(`topic_merging`).

Until that turn rows are served from the sources, whose objects are kept for a while after they left the manifest. In
it the segment in which the head will stand is at hand, and every row before that waits: nothing is late, lost or passed
twice, and whoever reads a backlog again goes on in the merged bucket.

Seals wait meanwhile. So it waits for nothing that may never come: the segment of a source that is missing already, or
the end of what is due where that is too much.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from daemon.core.index import merging
from daemon.core.index.index import Index
from daemon.core.index.merging import MergedBucket
from daemon.core.index.positions import KeyedRows
from daemon.core.index.sealed_bucket import SealedBucket
from daemon.errors import Corruption, InvariantViolated
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from daemon.topic import bucket_reads, topic_manifests
from daemon.topic.topic_manifests import TopicCommits
from storage_backends import topic_manifest
from storage_backends.formats import index_ids
from storage_backends.formats.bucket_format import BucketMetadata, BucketTable
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.formats.shard_slot import ShardSlot

if TYPE_CHECKING:
    from daemon.topic.served_topic import ServedTopic

log = logging.getLogger(__name__)

T = TypeVar("T")

# Segments of a merged bucket that are read ahead of its head before it is taken over.
AHEAD_SEGMENTS = 8
# So long it tries to pass everything that is due, and looks again so often.
SETTLE_MAX_S = 5.0
SETTLE_S = 0.005


class Adoption:
    """Merged buckets of one topic. `slot`: the last one that is applied."""

    def __init__(
        self, topic: ServedTopic, commits: TopicCommits, environment: Environment, *, slot: Callable[[], ShardSlot]
    ) -> None:
        self._topic = topic
        self._commits = commits
        self._environment = environment
        self._slot = slot

    async def adopt(self, manifest: TopicManifest) -> None:
        """Serves what the manifest has in place of buckets that were merged, or what a newer one has.

        No seal, drop or quarantine of the topic may be under way. Raises commit.Refused when the epoch is over, and
        Corruption when the manifest is damaged.
        """
        damaged: dict[str, str] = {}
        while True:
            unknown = self._unknown(manifest)
            fresh = [live for live in unknown if not live.quarantined and live.object.name not in damaged]
            if fresh:
                try:
                    await self._take_over(fresh[0])
                except Corruption as error:
                    damaged[fresh[0].object.name] = str(error)
                manifest = self._commits.manifest
            elif not unknown:
                self._forget_merged_away(manifest)
                return
            elif unknown[0].quarantined:
                self._lose(unknown[0], manifest)
            else:
                await self._quarantine(unknown[0].object.name, damaged[unknown[0].object.name])
                manifest = self._commits.manifest

    def _unknown(self, manifest: TopicManifest) -> list[LiveBucket]:
        """The buckets of the manifest that are not served here."""
        found = []
        for live in manifest.live:
            index = self._topic.core.indexes.get(live.subscription_id)
            # An index that is not here is that of a subscription which is being deleted.
            if index is not None and not index.knows(live.object.name):
                if not live.level:
                    raise InvariantViolated(f"bucket {live.object.name} is live and not served, and it was not merged")
                found.append(live)
        return found

    def _forget_merged_away(self, manifest: TopicManifest) -> None:
        """Buckets that left the manifest, and of which no merged bucket holds a row: every row of theirs is gone."""
        for bucket in self._merged_away(manifest):
            if bucket.present_rows:
                raise InvariantViolated(
                    f"bucket {bucket.name} left the manifest with {bucket.present_rows} rows that are not gone"
                )
            self._topic.core.drop(bucket.name)

    def _merged_away(self, manifest: TopicManifest) -> list[SealedBucket]:
        live = {bucket.object.name for bucket in manifest.live}
        # A subscription whose deletion is committed takes its index along when that is known to have landed.
        owed = {index_ids.SHARED, *(each.subscription_id for each in manifest.subscriptions)}
        return [
            bucket
            for bucket in self._topic.core.indexes.sealed.values()
            if bucket.name not in live and index_ids.subscription_of(bucket.index_id) in owed
        ]

    # ---- one bucket

    async def _take_over(self, live: LiveBucket) -> None:
        """Raises Corruption when the bucket is damaged or missing."""
        store = self._environment.store
        table, metadata = await self._read(lambda: bucket_reads.open_bucket(store, live))
        index = self._topic.core.indexes.get(live.subscription_id)
        if index is None:
            return
        # Of some pages every row is gone, so that no bucket holds them.
        held = index.pages.intern_stored(metadata.positions)
        index.pages.hold(held)
        try:
            await self._adopt(index, live, table, metadata)
        finally:
            index.pages.release(held)

    async def _adopt(self, index: Index, live: LiveBucket, table: BucketTable, metadata: BucketMetadata) -> None:
        merged = await self._environment.run(lambda: MergedBucket.of(index.pages, live, table, metadata))
        loaded: dict[int, KeyedRows] = {}
        while True:
            await self._settle()
            # From here to the end of the loop is one turn, unless something must be read.
            boundary_ms = max(self._environment.clock.now_ms(), self._topic.core.indexes.passed_until_ms)
            needed = self._needed(index, merged, boundary_ms)
            missing = [number for number in needed if number not in loaded]
            if not missing:
                break
            first, last = missing[0], missing[-1]
            parts = await self._read(lambda: self._segments(index, merged, first, last))  # noqa: B023
            loaded.update(zip(range(first, last + 1), parts, strict=True))
        rows = {number: loaded[number] for number in needed}
        sources = self._topic.core.adopt(merged, rows, boundary_ms=boundary_ms)
        self._topic.changed()
        name, buckets = self._topic.core.name, len(sources)
        log.info("serves a merged bucket topic=%s rows=%d sources=%d level=%d", name, live.rows, buckets, live.level)

    async def _settle(self) -> None:
        """Passes what is due, so that little of it has to be carried over; not for ever."""
        clock = self._environment.clock
        until_s = clock.elapsed_s() + SETTLE_MAX_S
        while clock.elapsed_s() < until_s:
            now_ms = clock.now_ms()
            self._topic.wake(now_ms)
            next_due_ms = self._topic.core.indexes.next_due_ms()
            # What has come due since is little, however many come.
            if next_due_ms is None or next_due_ms > now_ms:
                return
            # The rest is more than one turn may pass, or its segments are being loaded.
            await self._environment.sleep(SETTLE_S)

    def _needed(self, index: Index, merged: MergedBucket, boundary_ms: int) -> range:
        return merging.segments_needed(
            merged.segments,
            index.sources_of(merged),
            boundary_ms=boundary_ms,
            ahead_ms=self._environment.config.delivery.lookahead_ms,
            ahead_max=AHEAD_SEGMENTS,
        )

    def _segments(self, index: Index, merged: MergedBucket, first: int, last: int) -> list[KeyedRows]:
        """For a thread."""
        infos = merged.segments[first : last + 1]
        rows = bucket_reads.read_segments(self._environment.store, merged.name, infos)
        return [index.pages.keyed(each) for each in rows]

    async def _read(self, work: Callable[[], T]) -> T:
        return await backoff.until_answered(
            lambda: self._environment.run(work),
            failed=lambda error: log.warning(
                "topic %s: a merged bucket cannot be read, trying again: %s", self._topic.core.name, error
            ),
            waiting=self._environment,
        )

    # ---- damage

    async def _quarantine(self, bucket: str, damage: str) -> None:
        """A merged bucket cannot be read, unless it was missing since it is merged itself by now."""
        manifest = await self._commits.newest()
        if all(live.object.name != bucket for live in manifest.live):
            return
        try:
            await self._commits.commit(
                lambda tip: topic_manifest.Quarantine(
                    bucket=bucket,
                    damage=damage[: topic_manifests.DAMAGE_CHARACTERS_MAX],
                    slot=self._slot(),
                    epoch=self._commits.epoch,
                )
            )
        except topic_manifests.Overtaken:
            return
        log.error("topic %s: a merged bucket is quarantined, the others are served: %s", self._topic.core.name, damage)
        self._environment.metrics.damage_found("bucket")

    def _lose(self, live: LiveBucket, manifest: TopicManifest) -> None:
        """A merged bucket is quarantined: what is left of its sources, the only ones still here that left the manifest,
        is lost with it.
        """
        sources = [each for each in self._merged_away(manifest) if each.index_id == live.subscription_id]
        self._topic.core.lose_merged(live, sources)
        self._topic.changed()
