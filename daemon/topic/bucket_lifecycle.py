"""The life of a topic's buckets: cut, sealed, merged, quarantined when damaged, dropped when every row is gone.

Owns: when the buckets that take new rows are cut, the seals of one topic one after the other, learning what other
processes merged, marking damaged buckets in the manifest, and dropping empty ones from it.
Does not own: serving the rows meanwhile (`daemon.core.index.index`), merging and putting merged buckets in the place of
their sources (`merged_buckets`), finding damage (`bucket_reads`, `topic_loading`).

A seal cuts the buckets of all indexes between two slots, on the loop, in O(1) of the rows; the O(n) work is done in a
thread. Seals are committed in the order of their cuts: the manifest's `applied` moves from one cut's slot to the next.

Other processes merge sealed buckets at any time. Every manifest that is read may name buckets that are not served yet:
they are learned here, between two steps, so that no source of one is being sealed, quarantined or dropped meanwhile.

Sealing: the rows of mutable buckets become immutable objects, and the topic's manifest names them.

Owns: what is stored for a seal: a bucket object for each index that has rows, and the progress as of its slot.
Does not own: when to seal and what serves the rows meanwhile (the engine, `daemon.core.index.index`), the manifest's
operations (`storage_backends.topic_manifest`).

A seal cuts all indexes of a topic at one slot boundary; everything here is O(n) and runs in an executor, while the rows
are served from memory. A crash before the manifest leaves objects that no manifest names; the rows are in journal or
checkpoint.

What a shard checkpoint says of a topic.

Owns: turning a topic's state as of a slot into its part of the checkpoint.
Does not own: the object (`checkpoint_store`), when one is taken (the engine) and reading it back (`recovery`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import operator
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from daemon.call_values import Sealed
from daemon.core.decisions.topic_state import RedeliveryCut, TopicState
from daemon.core.index.bucket import SealedBucket
from daemon.core.index.index import BucketBits, IndexCut
from daemon.core.index.mutable_bucket import MutableBucket, MutableRows
from daemon.core.index.position_keys import KeyedRows
from daemon.errors import Unavailable
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SealCut:
    """The mutable bucket of the index `index_id` (`index_ids`) as of `slot`.

    `key`: the object that the bucket will be; `base`: the manifest number that it was started from.
    """

    topic: str
    key: str
    base: int
    slot: ShardSlot
    rows: MutableRows
    index_id: int = index_ids.SHARED


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WrittenBucket:
    """The object of a cut. `rows`: what it holds, in due order."""

    live: manifest.LiveBucket
    table: bucket_format.BucketTable
    rows: KeyedRows


def write_bucket(
    store: object_store.ObjectStore, cut: SealCut, *, limits: SegmentLimits, compatible: bool
) -> WrittenBucket | None:
    """Puts the bucket object; None when no row is left. May be repeated: the object is the same."""
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
    return WrittenBucket(live, encoded.table, rows)


def progress_of(cuts: Sequence[SealCut], bits: Iterable[BucketBits], redelivery: RedeliveryCut) -> manifest.Progress:
    """Everything of a topic that is not rows, as of the cuts of one seal. `bits`: of the buckets of all indexes that
    were sealed or being sealed before; what was acknowledged of the rows that are being sealed is in the cuts.
    """
    own = (BucketBits(cut.key, (), cut.rows.acknowledged) for cut in cuts)
    return stored_topic.progress_of_topic(cuts[0].rows.pages, (*bits, *own), redelivery)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicCut:
    """A topic as of the checkpoint's slot. `indexes`: by id, the first one is 0, the shared index. `sealing`: cuts
    whose seal is not known to be committed.
    """

    topic_id: str
    topic: str
    incarnation: int
    indexes: tuple[tuple[int, IndexCut], ...]
    sealing: tuple[SealCut, ...]
    redelivery: RedeliveryCut


def checkpoint_part(cut: TopicCut) -> checkpoint_format.TopicPart:
    """The topic's part of the checkpoint. O(n): runs in an executor."""
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


log = logging.getLogger(__name__)

T = TypeVar("T")

# The tip was read within this time, where there is something that others may merge: it finds merges of which no hint
# came. Below the time that merged buckets stay.
LOOK_S = 1_200.0
# After a look that failed.
LOOK_AGAIN_S = 30.0
# The mutable buckets of a topic are sealed by so much of their age earlier than the setting says at most, of each topic
# another part: topics that began together are not sealed together.
AGE_SPREAD = 0.25
MERGEABLE_BUCKETS = 2
# Bucket objects of one seal that are written at the same time.
WRITES_MAX = 4
# Progress up to this size is part of the manifest.
INLINE_PROGRESS_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Seal:
    """`buckets`: of each index that had rows, its cut and the bucket that serves them. `bits`: of all other buckets;
    `redelivery`: what else there was of the topic.
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
    """The buckets of one topic. `failed` hears of an error that ends the topic, or the shard; `changed` of buckets
    that changed.

    `settings`: what is in force for the topic now. `slot`: no later one has named the topic so far. `adopt` puts the
    merged buckets that a manifest names in the place of their sources.
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
        # What was found in buckets that are to be quarantined, by name.
        self._damaged: dict[str, str] = {}
        self._slot = slot
        # Every merged bucket of this manifest, and of those before it, is served.
        self._learned = manifests.number
        self._learners: list[asyncio.Future[None]] = []
        self._older = AGE_SPREAD * environment.jitter()
        # At first of each topic another time: they are not all looked at together.
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
        """Rows up to that ledger are about to be applied; everything up to `slot` is applied (PIP-195's rule)."""
        if self._topic.indexes.wants_seal_before(highest_ledger_id, self._settings().seal_limits):
            self.seal(slot)

    def after_slot(self, slot: ShardSlot) -> None:
        """Everything up to `slot` is applied."""
        self._slot = slot
        limits = self._settings().seal_limits
        elapsed_ms = self._environment.elapsed_ms() + int(self._older * limits.age_max_ms)
        if self._topic.indexes.wants_seal(limits, elapsed_ms=elapsed_ms):
            self.seal(slot)
        else:
            self.rows_left(slot)

    def rows_left(self, slot: ShardSlot) -> None:
        """Everything up to `slot` is applied, which brought no rows: buckets may be dropped."""
        self._slot = slot
        if self._topic.indexes.has_droppable or self._manifests.number != self._learned:
            self._start()

    def look_after(self, slot: ShardSlot) -> None:
        """Once a second: what depends on time alone. Everything up to `slot` is applied."""
        self.after_slot(slot)
        self.merging.consider()
        elapsed_s = self._environment.clock.elapsed_s()
        if elapsed_s - max(self._looked_at_s, self._manifests.read_at_s) < self._look_in_s:
            return
        self._looked_at_s, self._look_in_s = elapsed_s, LOOK_S
        if sum(len(index.sealed) for index in self._topic.indexes.values()) >= MERGEABLE_BUCKETS:
            self.look_for_merges()

    def look_for_merges(self) -> None:
        """The newest manifest is read from now on, and what others merged is learned."""
        self._look_wanted = True
        self._start()

    def seal(self, slot: ShardSlot) -> asyncio.Future[Sealed] | None:
        """Cuts the mutable buckets of all indexes now. Call between two slots; `slot` is the last one that is applied.

        The future ends when the buckets are committed; None when there was nothing to seal. Never cancel it.
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
        # Nobody may be waiting when it fails.
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
        """The object of a sealed bucket is damaged. It is read no more, and when that is in the manifest, what it held
        may be added again. Nothing happens when the topic has ended.
        """
        if self._closed:
            return
        index = self._topic.indexes.holding(bucket)
        if index is not None and bucket not in self._damaged:
            log.error("topic %s: a bucket is quarantined, the others are served: %s", self._topic.name, damage)
            self._environment.metrics.damage_found("bucket")
            index.leave_out(bucket)
            self._damaged[bucket] = damage
            self._start()

    async def is_live(self, bucket: str) -> bool:
        """Whether the newest manifest names a bucket, the object of which is missing. If not, it was merged away, and
        what it held is served from the bucket that took its place when this returns. False when the topic has ended.

        Raises Corruption when the manifest is damaged, commit.Refused when the epoch is over.
        """
        if self._closed:
            return False
        tip = await self._manifests.newest()
        if any(live.object.name == bucket for live in tip.live):
            return True
        index = self._topic.indexes.holding(bucket)
        if index is not None:
            # What is due does not wait for it, but for what has its key.
            index.leave_to_merged(bucket)
        await self.learn(tip)
        return False

    async def learn(self, newest: manifest.TopicManifest) -> None:
        """Returns when every merged bucket of a manifest that was read or committed here is served; or at once when the
        topic is being deleted or given up.
        """
        while self._learned < newest.head.number and not self._halted:
            learned = asyncio.get_running_loop().create_future()
            self._learners.append(learned)
            self._start()
            await learned

    def cut(self) -> TopicCut:
        """The topic as it is now, for a checkpoint."""
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
        """Returns when nothing is under way."""
        while self._work is not None and not self._work.done():
            await asyncio.wait([self._work])

    async def halt(self) -> None:
        """Nothing begins any more until `go_on`; returns when what is under way is over."""
        self._halted = True
        self._wake_learners()
        await self.merging.halt()
        await self.settled()

    def go_on(self) -> None:
        self._halted = self._closed
        self.merging.go_on()
        self._start()

    def begin_close(self) -> None:
        """Nothing begins any more, for good; `halt` returns when what is under way is over."""
        self._halted = self._closed = True
        self._wake_learners()
        self.merging.close()

    def close(self) -> None:
        self.begin_close()
        if self._work is not None:
            self._work.cancel()
        for seal in self._seals:
            if not seal.committed.done():
                seal.committed.set_exception(
                    Unavailable(f"topic {self._topic.name} is served by this daemon no longer; try again")
                )

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
            log.info("topic %s: what others merged is looked at later: %s", self._topic.name, error)
            self._looked_at_s, self._look_in_s = self._environment.clock.elapsed_s(), LOOK_AGAIN_S

    async def _learn(self) -> None:
        """The newest manifest that is known: its merged buckets take the place of their sources."""
        newest = self._manifests.manifest
        if newest.owner_epoch != self._manifests.epoch:
            # A merge is committed whoever owns the topic.
            raise commit.Refused(
                f"owner epoch is {newest.owner_epoch}, not {self._manifests.epoch}", self._manifests.tip
            )
        if self._names_unknown(newest):
            await self._adopt(newest)
            self._changed()
        self._learned = newest.head.number
        self._wake_learners()

    def _names_unknown(self, newest: manifest.TopicManifest) -> bool:
        """Whether it names a merged bucket that is not served. What was sealed here is served, or about to be."""
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
        """The objects of a seal, in the order of its cuts; None where no row is left."""
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
                )
            self._topic.finish_seal(cut.index_id, memory, sealed, rows, near_ms=near_ms)
        self._changed()

    async def _progress(self, seal: _Seal) -> tuple[manifest.Progress | None, manifest.ObjectReference | None]:
        """The progress of a seal: itself where it is small, or the object that it was written to."""
        progress, encoded = await self._environment.pools.seals.run(lambda: _encoded(seal))
        if len(encoded) <= INLINE_PROGRESS_BYTES:
            return progress, None
        base = seal.cuts[0].base
        key = names.progress_key(self._manifests.shard, self._topic.topic_id, base, self._environment.new_id())
        await self._until_written(lambda: self._environment.store.put(key, encoded))
        return None, topic_manifest.reference_to(key, base, encoded)

    # ---- what leaves

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
                # What took its place is learned next, and holds its rows whole.
                log.info("topic %s: the damaged bucket is needed no more: %s", self._topic.name, overtaken)
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
        # Of one that was merged before only memory says that its rows are gone: the merged bucket takes that over.
        await self._learn()
        for name in empty:
            self._topic.drop(name)
        self._changed()

    async def _until_written(self, work: Callable[[], T]) -> T:
        """Runs a repeatable write until the store takes it; the rows are served from memory meanwhile."""

        def failed(error: Exception) -> None:
            self._environment.metrics.bucket_operation("create", "failed", seconds=0.0)
            self._environment.waits_for_store("seals cannot be written", f"topic {self._topic.name}", error)

        return await backoff.until_answered(
            lambda: self._environment.pools.seals.run(work), failed=failed, waiting=self._environment
        )


def _encoded(seal: _Seal) -> tuple[manifest.Progress, bytes]:
    progress = progress_of(seal.cuts, seal.bits, seal.redelivery)
    return progress, manifest.encode_progress(progress)
