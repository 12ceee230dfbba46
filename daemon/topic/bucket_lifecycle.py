"""Cuts, seals, quarantines and drops the buckets of a topic, and learns what other processes merged.

A seal cuts the mutable buckets of all indexes at one slot boundary, on the loop, in O(1) of the rows. The O(n) work
runs in an executor while the rows are served from memory: a bucket object for each index that has rows, and the
progress as of the slot. The manifest then names the objects. Seals are committed in the order of their cuts: the
manifest's `applied` moves from one cut's slot to the next. A crash before the manifest leaves objects that no manifest
names; the rows are in the commit log or a checkpoint.

Other processes merge sealed buckets at any time, so every manifest that is read may name buckets that are not served
yet. They are learned between two steps, so that no source of one is being sealed, quarantined or dropped meanwhile.

A cut of the topic for a shard checkpoint (`TopicCut`) is made here, too, since it includes the seals in flight.
`merged_buckets` merges, and replaces the sources by the merged bucket; `bucket_reads` and `daemon.shard.topic_loading`
find damage.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import operator
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from pyroaring import BitMap64

from daemon.call_values import Sealed
from daemon.core.decisions.topic_state import RedeliveryCut, TopicState
from daemon.core.index.bucket import SealedBucket
from daemon.core.index.index import BucketBits, IndexCut
from daemon.core.index.mutable_bucket import MutableBucket, MutableRows
from daemon.core.index.position_keys import KeyedRows, bitmap_of
from daemon.errors import OutcomeUnknown, Unavailable
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from daemon.topic import stored_topic, topic_manifests
from daemon.topic.merged_buckets import BucketMerging
from daemon.topic.topic_manifests import TopicManifests
from daemon.topic.topic_settings import TopicSettings
from storage_backends import commit, object_store, topic_manifest
from storage_backends.crash_points import crash_point
from storage_backends.formats import bucket_format, checkpoint_format, index_ids, manifest, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SealCut:
    """The mutable bucket of the index `index_id` (`index_ids`) as of `slot`.

    `key` is that of the object to be written, `base` the manifest number that it was started from.
    """

    topic: str
    key: str
    base: int
    slot: ShardSlot
    rows: MutableRows
    index_id: int = index_ids.SHARED


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WrittenBucket:
    """The object written for a cut. `rows` are its rows in due order, `with_ids` the positions with ids, or None."""

    live: manifest.LiveBucket
    table: bucket_format.BucketTable
    rows: KeyedRows
    with_ids: BitMap64 | None


def write_bucket(
    store: object_store.ObjectStore, cut: SealCut, *, limits: SegmentLimits, compatible: bool
) -> WrittenBucket | None:
    """Put the bucket object; return None if no row is left. May be repeated: the object is the same."""
    kept = cut.rows.kept()
    if not len(kept):
        return None
    rows = kept.take(kept.rows.due_order())
    encoded = bucket_format.encode_bucket(
        rows.rows, topic=cut.topic, subscription_id=cut.index_id, limits=limits, compatible=compatible
    )
    crash_point("seal.before_bucket_put")
    store.put(cut.key, encoded.body)
    crash_point("seal.after_bucket_put")
    live = encoded.live_bucket(cut.key, base=cut.base, subscription_id=cut.index_id)
    ids = rows.rows.schedule_ids
    with_ids = bitmap_of(rows.keys[ids.lengths != 0]) if ids is not None else None
    return WrittenBucket(live, encoded.table, rows, with_ids or None)


def progress_of(cuts: Sequence[SealCut], bits: Iterable[BucketBits], redelivery: RedeliveryCut) -> manifest.Progress:
    """Return everything of a topic except its rows, as of the cuts of one seal.

    `bits` are those of the buckets of all indexes that were sealed or being sealed before. Acknowledgements of the rows
    that are being sealed are in the cuts.
    """
    own = (BucketBits(cut.key, (), cut.rows.acknowledged) for cut in cuts)
    return stored_topic.progress_of_topic(cuts[0].rows.pages, (*bits, *own), redelivery)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicCut:
    """A topic as of the checkpoint's slot.

    `indexes` are pairs of an id and a cut, first 0, the shared index. `sealing` are cuts whose seal is not known to be
    committed.
    """

    topic_id: str
    topic: str
    incarnation: int
    indexes: tuple[tuple[int, IndexCut], ...]
    sealing: tuple[SealCut, ...]
    redelivery: RedeliveryCut


def checkpoint_part(cut: TopicCut) -> checkpoint_format.TopicPart:
    """Return the topic's part of the checkpoint. O(n): runs in an executor."""
    (_, shared), *own = cut.indexes
    bits = [each for _, index in cut.indexes for each in index.bits]
    bits.append(BucketBits("", (), shared.mutable.acknowledged))
    own_rows = ((number, index.mutable.kept().rows) for number, index in sorted(own, key=operator.itemgetter(0)))
    return checkpoint_format.TopicPart(
        topic_id=cut.topic_id,
        topic=cut.topic,
        incarnation=cut.incarnation,
        mutable_rows=shared.mutable.kept().rows,
        sealing=tuple(
            checkpoint_format.SealingPart(
                bucket=each.key, slot=each.slot, rows=each.rows.kept().rows, subscription_id=each.index_id
            )
            for each in cut.sealing
        ),
        progress=stored_topic.progress_of_topic(shared.mutable.pages, bits, cut.redelivery),
        own_rows=tuple(checkpoint_format.OwnRows(number, rows) for number, rows in own_rows if len(rows)),
    )


T = TypeVar("T")

# Time between two reads of the tip if others may merge something, to find merges without a hint (seconds). It is less
# than the time that merged buckets stay.
LOOK_S = 1_200.0
# Time until the tip is read again after a failure (seconds)
LOOK_AGAIN_S = 30.0
# Mutable buckets are sealed before their age limit by up to this part of it. It is random for each topic, so that
# topics that began together are not sealed together.
AGE_SPREAD = 0.25
MERGEABLE_BUCKETS = 2
# Bucket objects of one seal that are written at the same time
WRITES_MAX = 4
# Progress up to this size is part of the manifest (bytes).
INLINE_PROGRESS_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Seal:
    """A seal from its cut until its commit.

    `buckets` are, for each index that had rows, the cut and the bucket that serves its rows. `bits` are those of all
    other buckets, `redelivery` the rest of the topic.
    """

    slot: ShardSlot
    buckets: tuple[tuple[SealCut, MutableBucket], ...]
    bits: tuple[BucketBits, ...]
    redelivery: RedeliveryCut
    committed: asyncio.Future[Sealed]

    @property
    def cuts(self) -> tuple[SealCut, ...]:
        return tuple(cut for cut, _ in self.buckets)


class BucketLifecycle:
    """The buckets of one topic.

    `failed` is called with an error that ends the topic or the shard, `changed` after buckets changed. `settings`
    returns the current settings. No slot after `slot` has named the topic so far. `adopt` replaces the sources by the
    merged buckets that a manifest names.
    """

    def __init__(
        self,
        topic: TopicState,
        manifests: TopicManifests,
        environment: Environment,
        *,
        slot: ShardSlot,
        settings: Callable[[], TopicSettings],
        adopt: Callable[[manifest.TopicManifest], Awaitable[None]],
        failed: Callable[[BaseException], None],
        changed: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._settings = settings
        self._adopt = adopt
        self._manifests = manifests
        self._environment = environment
        self._failed = failed
        self._changed = changed
        self._seals: collections.deque[_Seal] = collections.deque()
        # Name of a bucket that will be quarantined -> its damage
        self._damaged: dict[str, str] = {}
        self._slot = slot
        # Every merged bucket of this manifest, and of those before it, is served.
        self._learned = manifests.number
        self._learners: list[asyncio.Future[None]] = []
        self._older = AGE_SPREAD * environment.jitter()
        # Random at first, so that the topics are not all checked together
        self._look_in_s = LOOK_S * environment.jitter()
        self._looked_at_s = environment.clock.elapsed_s()
        self._look_wanted = False
        self._work: asyncio.Task[None] | None = None
        self._halted = False
        self._closed = False
        self.merging = BucketMerging(
            topic,
            manifests,
            environment,
            settings=settings,
            learn=self.learn,
            is_live=self.is_live,
            damaged=self.quarantine,
            failed=failed,
        )

    # ---- deciding

    def before_rows(self, highest_ledger_id: int, slot: ShardSlot) -> None:
        """Seal, if necessary, before rows up to that ledger are applied behind `slot` (PIP-195's rule)."""
        if self._topic.indexes.wants_seal_before(highest_ledger_id, self._settings().seal_limits):
            self.seal(slot)

    def after_slot(self, slot: ShardSlot) -> None:
        """Seal, or drop buckets, if that is due. Everything up to `slot` is applied."""
        self._slot = slot
        limits = self._settings().seal_limits
        elapsed_ms = self._environment.elapsed_ms() + int(self._older * limits.age_max_ms)
        if self._topic.indexes.wants_seal(limits, elapsed_ms=elapsed_ms):
            self.seal(slot)
        else:
            self.rows_left(slot)

    def rows_left(self, slot: ShardSlot) -> None:
        """Drop buckets, if that is due. Everything up to `slot` is applied, which added no rows."""
        self._slot = slot
        if self._topic.indexes.has_droppable or self._manifests.number != self._learned:
            self._start()

    def every_second(self, slot: ShardSlot) -> None:
        """Do what depends on time alone. Called once a second; everything up to `slot` is applied."""
        self.after_slot(slot)
        self.merging.consider()
        elapsed_s = self._environment.clock.elapsed_s()
        if elapsed_s - max(self._looked_at_s, self._manifests.read_at_s) < self._look_in_s:
            return
        self._looked_at_s, self._look_in_s = elapsed_s, LOOK_S
        if sum(len(index.sealed) for index in self._topic.indexes.values()) >= MERGEABLE_BUCKETS:
            self.look_for_merges()

    def look_for_merges(self) -> None:
        """Begin to read the newest manifest and to learn what others merged."""
        self._look_wanted = True
        self._start()

    def seal(self, slot: ShardSlot) -> asyncio.Future[Sealed] | None:
        """Cut the mutable buckets of all indexes now. Returns None if there is nothing to seal.

        Call it between two slots; `slot` is the last one that is applied. The future ends when the buckets are
        committed. Never cancel it.
        """
        indexes = self._topic.indexes
        if not indexes.has_mutable_rows:
            return None
        base = self._manifests.number
        taken, redelivery = dict(indexes.cut()), self._topic.redelivery_cut()
        shard, topic_id, new_id = self._manifests.shard, self._topic.topic_id, self._environment.new_id
        begun = indexes.begin_seal(
            lambda _: names.bucket_key(shard, topic_id, base, new_id()), now_ms=self._environment.clock.now_ms()
        )
        committed: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
        # No caller may be waiting when it fails.
        committed.add_done_callback(lambda done: done.cancelled() or done.exception())
        buckets = tuple(
            (
                SealCut(
                    topic=self._topic.name,
                    key=memory.name,
                    base=base,
                    slot=slot,
                    rows=taken[number].mutable,
                    index_id=number,
                ),
                memory,
            )
            for number, memory in begun
        )
        bits = tuple(each for index in taken.values() for each in index.bits)
        self._seals.append(_Seal(slot, buckets, bits, redelivery, committed))
        self._start()
        return committed

    def quarantine(self, bucket: str, damage: str) -> None:
        """Stop reading a sealed bucket whose object is damaged.

        Once that is in the manifest, its rows may be added again. Does nothing if the topic has ended.
        """
        if self._closed:
            return
        index = self._topic.indexes.holding(bucket)
        if index is not None and bucket not in self._damaged:
            log.error("topic %s: quarantined a damaged bucket; the others are served: %s", self._topic.name, damage)
            self._environment.metrics.damage_found("bucket")
            index.leave_out(bucket)
            self._damaged[bucket] = damage
            self._start()

    async def is_live(self, bucket: str) -> bool:
        """Return whether the newest manifest names a bucket whose object is missing.

        If it does not, the bucket was merged away, and the bucket that replaced it serves its rows when this returns.
        Returns False if the topic has ended. Raises Corruption if the manifest is damaged, and commit.Refused if the
        epoch is over.
        """
        if self._closed:
            return False
        tip = await self._manifests.newest()
        if any(live.object.name == bucket for live in tip.live):
            return True
        index = self._topic.indexes.holding(bucket)
        if index is not None:
            # The head does not wait for the merged bucket; rows that are delivered by key do.
            index.leave_to_merged(bucket)
        await self.learn(tip)
        return False

    async def learn(self, newest: manifest.TopicManifest) -> None:
        """Wait until every merged bucket of a manifest that was read or committed here is served.

        Returns at once if the topic is being deleted or given up.
        """
        while self._learned < newest.head.number and not self._halted:
            learned = asyncio.get_running_loop().create_future()
            self._learners.append(learned)
            self._start()
            await learned

    def cut(self) -> TopicCut:
        """Return the topic as it is now, for a checkpoint."""
        return TopicCut(
            topic_id=self._topic.topic_id,
            topic=self._topic.name,
            incarnation=self._topic.incarnation,
            indexes=self._topic.indexes.cut(),
            sealing=tuple(cut for seal in self._seals for cut in seal.cuts),
            redelivery=self._topic.redelivery_cut(),
        )

    # ---- doing

    async def settled(self) -> None:
        """Wait until nothing is in flight."""
        while self._work is not None and not self._work.done():
            await asyncio.wait([self._work])

    async def halt(self) -> None:
        """Begin nothing more until `go_on`; return when what is in flight is over."""
        self._halted = True
        self._wake_learners()
        await self.merging.halt()
        await self.settled()

    def go_on(self) -> None:
        self._halted = self._closed
        self.merging.go_on()
        self._start()

    def begin_close(self) -> None:
        """Begin nothing more, for good; `halt` returns when what is in flight is over."""
        self._halted = self._closed = True
        self._wake_learners()
        self.merging.close()

    def close(self) -> None:
        self.begin_close()
        if self._work is not None:
            self._work.cancel()
        for seal in self._seals:
            if not seal.committed.done():
                # Its commit may be in flight.
                over = Unavailable(f"topic {self._topic.name} is no longer served by this daemon")
                seal.committed.set_exception(OutcomeUnknown.after(over))

    def _start(self) -> None:
        if not self._halted and (self._work is None or self._work.done()):
            self._work = asyncio.ensure_future(self._run())
            self._work.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._failed(error)

    async def _run(self) -> None:
        while not self._halted:
            if self._look_wanted:
                await self._look()
            elif self._manifests.number != self._learned:
                await self._learn()
            elif self._damaged:
                await self._quarantine(next(iter(self._damaged)))
            elif self._seals:
                async with self._environment.sealing_turns:
                    if not self._halted:
                        await self._seal(self._seals[0])
            elif self._topic.indexes.has_droppable:
                await self._drop()
            else:
                self.merging.consider()
                return

    # ---- learning

    async def _look(self) -> None:
        self._look_wanted = False
        try:
            await self._manifests.read()
        except StoreError as error:
            log.info("topic %s: cannot read merged buckets, retrying: %s", self._topic.name, error)
            self._looked_at_s, self._look_in_s = self._environment.clock.elapsed_s(), LOOK_AGAIN_S

    async def _learn(self) -> None:
        """Replace sources by the merged buckets of the newest known manifest."""
        newest = self._manifests.manifest
        if newest.owner_epoch != self._manifests.epoch:
            # Another process commits a merge without being the owner.
            raise commit.Refused(
                f"owner epoch is {newest.owner_epoch}, not {self._manifests.epoch}", self._manifests.tip
            )
        if self._names_unknown(newest):
            await self._adopt(newest)
            self._changed()
        self._learned = newest.head.number
        self._wake_learners()

    def _names_unknown(self, newest: manifest.TopicManifest) -> bool:
        """Return whether the manifest names a merged bucket that is not served.

        Buckets that were sealed here are served, or about to be.
        """
        merged = [live for live in newest.live if live.level]
        if not merged:
            return False
        known = {name for index in self._topic.indexes.values() for name in (*index.sealed, *index.quarantined)}
        return any(live.object.name not in known for live in merged)

    def _wake_learners(self) -> None:
        learners, self._learners = self._learners, []
        for learner in learners:
            if not learner.done():
                learner.set_result(None)

    # ---- seals

    async def _seal(self, seal: _Seal) -> None:
        environment = self._environment
        started_s = environment.clock.elapsed_s()
        written = await self._write(seal)
        progress, progress_object = await self._progress(seal)
        await self._manifests.commit(
            lambda tip: topic_manifest.Seal(
                buckets=tuple(each.live for each in written if each is not None),
                progress=progress,
                progress_object=progress_object,
                slot_from=tip.applied,
                slot_to=seal.slot,
                epoch=self._manifests.epoch,
                replaced_delete_after_ms=environment.clock.now_ms() + environment.grace_ms,
            ),
            run=environment.pools.seals.run,
        )
        self._finish(seal, written)
        kept = [each for each in written if each is not None]
        rows = sum(len(each.rows) for each in kept)
        if not seal.committed.done():
            seal.committed.set_result(Sealed(rows=rows, bucket=kept[0].live.object.name if kept else ""))
        seconds = environment.clock.elapsed_s() - started_s
        environment.metrics.bucket_operation("create", "succeed", seconds=seconds)
        log.info(
            "sealed topic=%s buckets=%d rows=%d slot=%d seconds=%.3f",
            self._topic.name,
            len(kept),
            rows,
            seal.slot,
            seconds,
        )

    async def _write(self, seal: _Seal) -> list[WrittenBucket | None]:
        """Return the objects of a seal, in the order of its cuts; None where no row is left."""
        settings, store = self._settings(), self._environment.store
        turn = asyncio.Semaphore(WRITES_MAX)

        async def write(cut: SealCut) -> WrittenBucket | None:
            async with turn:
                return await self._until_written(
                    lambda: write_bucket(
                        store, cut, limits=settings.segment_limits, compatible=settings.compatible_form
                    )
                )

        return await asyncio.gather(*map(write, seal.cuts))

    def _finish(self, seal: _Seal, written: list[WrittenBucket | None]) -> None:
        self._seals.popleft()
        near_ms = self._environment.clock.now_ms() + self._environment.config.delivery.lookahead_ms
        for (cut, memory), bucket in zip(seal.buckets, written, strict=True):
            index = self._topic.indexes.get(cut.index_id)
            if index is None:
                # The subscription was deleted since the cut: the manifest does not name the bucket either.
                continue
            sealed, rows = None, KeyedRows.empty()
            if bucket is not None:
                rows = bucket.rows
                sealed = SealedBucket(
                    bucket.live,
                    bucket.table.segments,
                    present=memory.present,
                    gone=memory.gone_since_cut(),
                    pages=index.pages,
                    with_ids=bucket.with_ids,
                )
            self._topic.finish_seal(cut.index_id, memory, sealed, rows, near_ms=near_ms)
        self._changed()

    async def _progress(self, seal: _Seal) -> tuple[manifest.Progress | None, manifest.ObjectReference | None]:
        """Return the progress of a seal itself if it is small, or else the object that it was written to."""
        progress, encoded = await self._environment.pools.seals.run(lambda: _encoded(seal))
        if len(encoded) <= INLINE_PROGRESS_BYTES:
            return progress, None
        base = seal.cuts[0].base
        key = names.progress_key(self._manifests.shard, self._topic.topic_id, base, self._environment.new_id())
        await self._until_written(lambda: self._environment.store.put(key, encoded))
        return None, topic_manifest.reference_to(key, base, encoded)

    # ---- quarantine and drops

    async def _quarantine(self, bucket: str) -> None:
        if self._topic.indexes.holding(bucket) is not None:
            slot, damage = self._slot, self._damaged[bucket][: topic_manifests.DAMAGE_CHARACTERS_MAX]
            try:
                committed = await self._manifests.commit(
                    lambda tip: topic_manifest.Quarantine(
                        bucket=bucket, damage=damage, slot=slot, epoch=self._manifests.epoch
                    )
                )
            except topic_manifests.Overtaken as overtaken:
                # The bucket that replaced it is learned next and holds its rows undamaged.
                log.info("topic %s: the damaged bucket is no longer needed: %s", self._topic.name, overtaken)
            else:
                self._topic.quarantine(next(live for live in committed.live if live.object.name == bucket))
        del self._damaged[bucket]
        self._changed()

    async def _drop(self) -> None:
        empty = [bucket.name for bucket in self._topic.indexes.droppable()]
        now_ms = self._environment.clock.now_ms()
        await self._manifests.commit(
            lambda tip: topic_manifest.DropBuckets(
                buckets=tuple(empty), epoch=self._manifests.epoch, delete_after_ms=now_ms + self._environment.grace_ms
            )
        )
        # If one was merged before, only memory knows that its rows are gone: the merged bucket takes that over.
        await self._learn()
        for name in empty:
            self._topic.drop(name)
        self._changed()

    async def _until_written(self, work: Callable[[], T]) -> T:
        """Repeat a repeatable write until the store accepts it; memory serves the rows meanwhile."""

        def failed(error: Exception) -> None:
            self._environment.metrics.bucket_operation("create", "failed", seconds=0.0)
            self._environment.waits_for_store("seals cannot be written", f"topic {self._topic.name}", error)

        return await backoff.until_answered(
            lambda: self._environment.pools.seals.run(work), failed=failed, waiting=self._environment
        )


def _encoded(seal: _Seal) -> tuple[manifest.Progress, bytes]:
    progress = progress_of(seal.cuts, seal.bits, seal.redelivery)
    return progress, manifest.encode_progress(progress)
