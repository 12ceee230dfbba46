"""The life of a topic's buckets: cut, sealed, committed, quarantined when damaged, dropped when every row is gone.

Owns: when a bucket is cut, the seals of one topic one after the other, marking damaged buckets in the manifest, and
dropping empty ones from it.
Does not own: what is stored (`daemon.durability.sealing`), serving the rows meanwhile (`daemon.core.index`), finding
damage (`segment_loading`, `topic_loading`).

A cut is made between two slots, on the loop, in O(1) of the rows; the O(n) work is done in a thread. Cuts are committed
in their order: the manifest's `applied` moves from one cut's slot to the next.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import TypeVar

from daemon.core.index import BucketBits
from daemon.core.mutable_bucket import MutableBucket
from daemon.core.positions import KeyedRows
from daemon.core.sealed_bucket import SealedBucket
from daemon.core.topic import Topic
from daemon.durability import backoff, checkpoint, sealing
from daemon.engine import manifests
from daemon.engine.calls import Sealed
from daemon.engine.environment import Environment
from daemon.engine.manifests import TopicCommits
from daemon.engine.topic_settings import TopicSettings
from daemon.errors import InvariantViolated, Unavailable
from storage_backends import topic_manifest
from storage_backends.formats import manifest, names
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Progress up to this size is part of the manifest.
INLINE_PROGRESS_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Seal:
    cut: sealing.SealCut
    bits: tuple[BucketBits, ...]
    memory: MutableBucket
    committed: asyncio.Future[Sealed]


class BucketLife:
    """The buckets of one topic. `lost` hears of an error that ends the shard; `changed` of buckets that changed.

    `settings`: what is in force for the topic now. `slot`: no later one has named the topic so far.
    """

    def __init__(
        self,
        topic: Topic,
        commits: TopicCommits,
        environment: Environment,
        *,
        slot: int,
        settings: Callable[[], TopicSettings],
        lost: Callable[[BaseException], None],
        changed: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._settings = settings
        self._commits = commits
        self._environment = environment
        self._lost = lost
        self._changed = changed
        self._seals: collections.deque[_Seal] = collections.deque()
        # What was found in buckets that are to be quarantined, by name.
        self._damaged: dict[str, str] = {}
        self._slot = slot
        self._work: asyncio.Task[None] | None = None
        self._halted = False

    # ---- deciding

    def before_rows(self, highest_ledger_id: int, slot: int) -> None:
        """Rows up to that ledger are about to be applied; everything up to `slot` is applied (PIP-195's rule)."""
        if self._topic.indexes.wants_seal_before(highest_ledger_id, self._settings().seal_limits):
            self.seal(slot)

    def after_slot(self, slot: int) -> None:
        """Everything up to `slot` is applied."""
        self._slot = slot
        elapsed_ms = int(self._environment.clock.elapsed_s() * 1000)
        if self._topic.indexes.wants_seal(self._settings().seal_limits, elapsed_ms=elapsed_ms):
            self.seal(slot)
        elif self._topic.index.droppable():
            self._start()

    def seal(self, slot: int) -> asyncio.Future[Sealed] | None:
        """Cuts the mutable bucket now. Call between two slots; `slot` is the last one that is applied.

        The future ends when the bucket is committed; None when there was nothing to seal. Never cancel it.
        """
        index = self._topic.index
        if index.mutable.first_row_at_ms is None:
            return None
        now_ms = self._environment.clock.now_ms()
        base = self._commits.number
        key = names.bucket_key(self._commits.shard, self._topic.topic_id, base, self._environment.new_id())
        taken = index.cut()
        cut = sealing.SealCut(topic=self._topic.name, key=key, base=base, slot=slot, rows=taken.mutable)
        committed: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting when it fails.
        committed.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._seals.append(_Seal(cut, taken.bits, index.begin_seal(key, now_ms=now_ms), committed))
        self._start()
        return committed

    def quarantine(self, bucket: str, damage: str) -> None:
        """The object of a sealed bucket is damaged. It is read no more, and when that is in the manifest, what it held
        may be added again.
        """
        if bucket in self._topic.index.sealed and bucket not in self._damaged:
            log.error("topic %s: a bucket is quarantined, the others are served: %s", self._topic.name, damage)
            self._environment.metrics.damage_found("bucket")
            self._topic.index.leave_out(bucket)
            self._damaged[bucket] = damage
            self._start()

    def cut(self) -> checkpoint.TopicCut:
        """The topic as it is now, for a checkpoint."""
        return checkpoint.TopicCut(
            topic_id=self._topic.topic_id,
            topic=self._topic.name,
            incarnation=self._topic.incarnation,
            indexes=((0, self._topic.index.cut()),),
            sealing=tuple(seal.cut for seal in self._seals),
        )

    # ---- doing

    async def settled(self) -> None:
        """Returns when no seal and no drop is under way."""
        while self._work is not None and not self._work.done():
            await asyncio.wait([self._work])

    async def halt(self) -> None:
        """No seal and no drop begins any more until `go_on`; returns when the one that is under way is over."""
        self._halted = True
        await self.settled()

    def go_on(self) -> None:
        self._halted = False
        self._start()

    def close(self) -> None:
        self._halted = True
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
            self._lost(error)

    async def _run(self) -> None:
        while not self._halted and (self._damaged or self._seals or self._topic.index.droppable()):
            if self._damaged:
                await self._quarantine(next(iter(self._damaged)))
            elif self._seals:
                await self._seal(self._seals[0])
            else:
                await self._drop()

    async def _seal(self, seal: _Seal) -> None:
        environment, settings = self._environment, self._settings()
        started_s = environment.clock.elapsed_s()
        written = await self._until_written(
            lambda: sealing.write_bucket(
                environment.store,
                seal.cut,
                limits=settings.segment_limits,
                compatible=settings.compatible_form,
            )
        )
        progress, progress_object = await self._progress(seal)
        await self._commits.commit(
            lambda tip: topic_manifest.Seal(
                buckets=() if written is None else (written.live,),
                progress=progress,
                progress_object=progress_object,
                slot_from=tip.applied,
                slot_to=seal.cut.slot,
                epoch=self._commits.epoch,
                replaced_delete_after_ms=environment.clock.now_ms() + environment.grace_ms,
            )
        )
        self._finish(seal, written)
        if not seal.committed.done():
            name = "" if written is None else written.live.object.name
            seal.committed.set_result(Sealed(rows=0 if written is None else len(written.rows), bucket=name))
        seconds = environment.clock.elapsed_s() - started_s
        environment.metrics.bucket_operation("create", "succeed", seconds=seconds)
        rows = 0 if written is None else len(written.rows)
        log.info("sealed a bucket topic=%s rows=%d slot=%d seconds=%.3f", seal.cut.topic, rows, seal.cut.slot, seconds)

    def _finish(self, seal: _Seal, written: sealing.WrittenBucket | None) -> None:
        self._seals.popleft()
        sealed = None
        if written is not None:
            memory = seal.memory
            sealed = SealedBucket(
                written.live,
                written.table.segments,
                present=memory.present,
                gone=memory.gone_since_cut(),
                pages=self._topic.index.pages,
            )
        near_ms = self._environment.clock.now_ms() + self._environment.config.delivery.lookahead_ms
        rows = KeyedRows.empty() if written is None else written.rows
        self._topic.finish_seal(0, seal.memory, sealed, rows, near_ms=near_ms)
        self._changed()

    async def _progress(self, seal: _Seal) -> tuple[manifest.Progress | None, manifest.ObjectReference | None]:
        """The progress of a seal: itself where it is small, or the object that it was written to."""
        cut = seal.cut
        progress, encoded = await self._environment.run(lambda: _encoded(seal))
        if len(encoded) <= INLINE_PROGRESS_BYTES:
            return progress, None
        key = names.progress_key(self._commits.shard, self._topic.topic_id, cut.base, self._environment.new_id())
        await self._until_written(lambda: self._environment.store.put(key, encoded))
        return None, topic_manifest.reference_to(key, cut.base, encoded)

    async def _quarantine(self, bucket: str) -> None:
        if bucket in self._topic.index.sealed:
            slot, damage = self._slot, self._damaged[bucket][: manifests.DAMAGE_CHARACTERS_MAX]
            committed = await self._commits.commit(
                lambda tip: topic_manifest.Quarantine(
                    bucket=bucket, damage=damage, slot=slot, epoch=self._commits.epoch
                )
            )
            self._topic.quarantine(next(live for live in committed.live if live.object.name == bucket))
        del self._damaged[bucket]
        self._changed()

    async def _drop(self) -> None:
        empty = [bucket.name for bucket in self._topic.index.droppable()]
        now_ms = self._environment.clock.now_ms()
        await self._commits.commit(
            lambda tip: topic_manifest.DropBuckets(
                buckets=tuple(empty), epoch=self._commits.epoch, delete_after_ms=now_ms + self._environment.grace_ms
            )
        )
        for name in empty:
            self._topic.drop(name)
        self._changed()

    async def _until_written(self, work: Callable[[], T]) -> T:
        """Runs a repeatable write until the store takes it; the rows are served from memory meanwhile."""
        for delay_s in backoff.delays_s(self._environment.jitter):
            try:
                return await self._environment.run(work)
            except StoreError as error:
                self._environment.metrics.bucket_operation("create", "failed", seconds=0.0)
                log.warning("topic %s: a seal cannot be written, trying again: %s", self._topic.name, error)
                await self._environment.sleep(delay_s)
        raise InvariantViolated("the delays ended")


def _encoded(seal: _Seal) -> tuple[manifest.Progress, bytes]:
    progress = sealing.progress_of((seal.cut,), seal.bits)
    return progress, manifest.encode_progress(progress)
