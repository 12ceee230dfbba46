"""The checkpoints of one shard, and what they let go of its journal.

Owns: when a checkpoint is written, that one is written at a time, and deleting the slots that two checkpoints cover.
Does not own: what a checkpoint holds (`daemon.topic.checkpoint_parts`), its object (`checkpoint_store`), which slots
may go (`journal_truncation`).

A shard that writes is checkpointed after so many slots or bytes, and when the slots of all shards that no checkpoint
covers are many and its are the most (`tail_bound`). One that has fallen silent is checkpointed twice, when garbage is
collected: then two checkpoints cover its whole journal, and only fences are left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Protocol

from daemon.core.deletions.ledger_deletions import DeletionCut
from daemon.core.object_count import ObjectCount
from daemon.shard import checkpoint_store, journal_tail, recovery, shard_manifest, shard_tip
from daemon.shard.journal_truncation import BATCH_SLOTS, JournalTruncation
from daemon.shard.journal_writer import WrittenSlot
from daemon.shard.shard_claim import ShardClaim
from daemon.shard.shard_tip import KnownTip
from daemon.surroundings.environment import Environment
from daemon.surroundings.failure_scope import TopicFailed
from daemon.topic import checkpoint_parts
from daemon.topic_terms.topic_staging import Commits
from storage_backends import commit
from storage_backends.formats import checkpoint_format, manifest
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.formats.slot_format import SlotKind
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

# One attempt to find out whether a checkpoint is committed.
DEADLINE_S = 30.0
# A shard that has written no slot for so long is idle.
IDLE_S = 60.0
# At an orderly end, so long is spent on deleting covered slots; the next owner deletes the rest.
LAST_TRUNCATION_S = 3.0
# So many at a time: then the time is looked at. With fewer for each shard all shards have their turn.
LAST_BATCH_SLOTS = 50


class ShardOfCheckpoints(Protocol):
    """What checkpoints ask of their shard."""

    @property
    def number(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def applied_slot(self) -> ShardSlot: ...

    @property
    def commits(self) -> Commits: ...

    @property
    def reloading(self) -> Collection[str]:
        """Ids of topics that failed, and are not read again yet: no checkpoint can hold them."""
        ...

    def state(self) -> ShardState:
        """The shard as of `applied_slot`. Raises TopicFailed when a topic cannot be told: it is let go."""
        ...

    def let_go(self, topic: str, error: BaseException) -> None:
        """A topic cannot be relied on any more."""
        ...

    def lose(self, error: BaseException) -> None:
        """The shard cannot be served any more."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ShardState:
    """What a checkpoint holds of a shard. `cuts`: topics that are not all in their manifests; `carried`: those that are
    not loaded; `deletions`: None when there is nothing to say.
    """

    cuts: Sequence[checkpoint_parts.TopicCut]
    carried: Sequence[checkpoint_format.TopicPart]
    deletions: DeletionCut | None


class Checkpointing:
    """The checkpoints of a shard that was taken over by `claim`. Used on one event loop."""

    def __init__(
        self,
        shard: ShardOfCheckpoints,
        claim: ShardClaim,
        tip: KnownTip,
        shard_log: commit.ManifestLog[manifest.ShardManifest],
        environment: Environment,
    ) -> None:
        self._shard = shard
        self._tip = tip
        self._shard_log = shard_log
        self._environment = environment
        self._bytes_since = 0
        self._slots_since = 0
        self._tail = environment.tail_bound.tail(self._begin)
        self._tail_bytes = sum(slot.size_bytes for slot in claim.slots)
        self._tail_slots = len(claim.slots)
        self._last_data_slot = _last_data_slot(claim)
        self._written_at_s = environment.clock.elapsed_s()
        self._work: asyncio.Task[None] | None = None
        self._truncating: asyncio.Future[int] | None = None
        self._draining = False
        # One checkpoint, and one deletion of slots, at a time.
        self._turn = asyncio.Lock()
        self._truncation = JournalTruncation(
            environment.store,
            shard=claim.shard,
            epoch=claim.epoch,
            fence_slot=claim.last_slot,
            known_kinds={slot.header.slot: slot.header.kind for slot in claim.slots},
            # As many slots are deleted as are written: with fewer threads than writing has, deletions, which the next
            # checkpoint of the shard waits for, would fall behind.
            executor=environment.pools.journal.parts,
        )

    # ---- what happens to the journal

    def written(self, slot: WrittenSlot) -> None:
        """A slot is certain."""
        self._bytes_since += slot.size_bytes
        self._slots_since += 1
        self._tail.grown(1)
        self._last_data_slot = slot.slot
        self._written_at_s = self._environment.clock.elapsed_s()
        self._truncation.written(slot.size_bytes)

    def topics_loaded(self) -> None:
        """Every topic is loaded or damaged: what former owners left in the journal counts for the next checkpoint."""
        self._bytes_since += self._tail_bytes
        self._slots_since += self._tail_slots
        self._tail.grown(self._tail_slots)
        self.consider()

    def consider(self) -> None:
        """Begins a checkpoint if the journal has grown enough and none is under way; of this shard, or of that whose
        journal has grown most.
        """
        limits = self._environment.config.journal
        if self._bytes_since >= limits.checkpoint_bytes or self._slots_since >= limits.checkpoint_slots:
            self._begin()
        self.look_after()

    def look_after(self) -> None:
        """Begins a checkpoint of some shard where all tails together are long: also when no slot comes any more."""
        self._environment.tail_bound.consider()

    # ---- what others ask for

    @property
    def covered_twice(self) -> bool:
        """Whether two checkpoints cover every data slot that is known."""
        previous = self._tip.newest.manifest.previous_checkpoint
        return (0 if previous is None else previous.replay_from) >= self._last_data_slot

    async def settled(self) -> None:
        """Returns when no checkpoint and no deletion of slots is under way."""
        while self._busy and self._work is not None:
            await asyncio.wait([self._work])

    def begin_drain(self) -> None:
        """The last checkpoint does not wait until every slot is deleted that may be."""
        self._draining = True

    async def write_last(self) -> None:
        """The state as of now, for the next owner. Raises the store's errors, CommitOutcomeUnknown and Refused, and
        TopicFailed where a topic is let go by it: then it may be repeated.
        """
        async with self._turn:
            await self._write()
            if not self.covered_twice:
                # Slots are kept for a checkpoint that may turn out to be damaged: a second one stands in for them.
                await self._write()

    async def truncate_last(self) -> None:
        """Deletes covered slots for a while. The shard may belong to another by now: what is covered stays covered."""
        end_s = self._environment.clock.elapsed_s() + LAST_TRUNCATION_S
        async with self._turn:
            try:
                while await self._truncate_some(LAST_BATCH_SLOTS) and self._environment.clock.elapsed_s() < end_s:
                    pass
            except StoreError as error:
                log.warning("shard %d: covered slots are left to the next owner: %s", self._shard.number, error)

    async def tail_of(self, topic_id: str) -> tuple[recovery.TopicTail, ShardSlot]:
        """What the newest checkpoint and the slots above it hold of a topic, of which nothing is staged any more; and
        the last slot that is applied.

        Raises Corruption when they are damaged, and the store's errors.
        """
        environment, shard = self._environment, self._shard
        # No slot of those is deleted meanwhile.
        async with self._turn:
            await shard.commits.settled()
            newest, until = self._tip.newest.manifest, shard.applied_slot

            def read() -> recovery.TopicTail:
                loaded = checkpoint_store.read_newest(
                    environment.store, newest, damaged=lambda key: environment.metrics.damage_found("checkpoint")
                )
                slots = journal_tail.read_tail(
                    environment.store,
                    shard.number,
                    loaded.replay_from + 1,
                    executor=environment.pools.loads.parts,
                )
                above = ((slot.header, slot.records) for slot in slots if slot.header.slot <= until)
                tails = recovery.tails_of(loaded.checkpoint, above, only={topic_id})
                return tails.get(topic_id, recovery.NOTHING)

            return await environment.pools.loads.run(read), until

    async def collect(self) -> ObjectCount:
        """Checkpoints an idle shard whose journal is not covered twice, and deletes what is; what was deleted.

        Raises the store's errors and CommitOutcomeUnknown. The shard is lost when its epoch is over.
        """
        await self.settled()
        before = self._truncation.deleted
        work = self._start(self._collect())
        # Nobody may be waiting any more when it fails.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Who waits may be cancelled; a thread that deletes slots cannot be.
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()
        return self._truncation.deleted - before

    async def covered(self) -> ObjectCount:
        """What `collect` would delete now without another checkpoint. Raises the store's errors."""
        async with self._turn:
            newest = self._tip.newest.manifest
            return await self._environment.pools.collection.run(lambda: self._truncation.covered(newest))

    def close(self) -> None:
        self._tail.forget()
        if self._work is not None:
            self._work.cancel()

    # ---- doing

    @property
    def _busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def _begin(self) -> bool:
        if self._busy:
            return False
        self._start(self._try()).add_done_callback(self._ended)
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._work = asyncio.ensure_future(work)
        return self._work

    def _ended(self, work: asyncio.Task[None]) -> None:
        if work.cancelled():
            return
        if (error := work.exception()) is not None:
            self._shard.lose(error)
        # Another shard may wait for its turn.
        self.look_after()

    async def _try(self) -> None:
        try:
            async with self._turn:
                if self._shard.reloading:
                    # What a checkpoint has to hold of a topic that failed is being read: the next slots ask again.
                    return
                await self._write()
                await self._truncate()
        except (*commit.UNCERTAIN, TopicFailed) as error:
            # The journal is longer for it; the next slots ask again.
            log.warning("shard %d: no checkpoint could be written: %s", self._shard.number, error)

    async def _collect(self) -> None:
        async with self._turn:
            idle_s = self._environment.clock.elapsed_s() - self._written_at_s
            if idle_s >= IDLE_S and not self.covered_twice and not self._shard.reloading:
                # Where a topic fails by it, the next pass asks again.
                with contextlib.suppress(TopicFailed):
                    await self._write()
            await self._truncate()

    async def _truncate(self) -> None:
        while await self._truncate_some() and not self._draining:
            pass

    async def _truncate_some(self, slots_max: int = BATCH_SLOTS) -> int:
        while self._truncating is not None and not self._truncating.done():
            # Who began it was cancelled; a thread that deletes slots cannot be.
            await asyncio.wait([self._truncating])
        newest = self._tip.newest.manifest
        before = self._truncation.deleted
        truncate = self._environment.pools.collection.run(
            lambda: self._truncation.truncate(newest, slots_max=slots_max)
        )
        self._truncating = asyncio.ensure_future(truncate)
        looked_at = await asyncio.shield(self._truncating)
        deleted = self._truncation.deleted - before
        self._environment.metrics.collected("journal_slot", objects=deleted.objects, size_bytes=deleted.size_bytes)
        return looked_at

    async def _write(self) -> None:
        """Writes the state as of now and commits it."""
        with self._tail.covering():
            await self._write_now()

    async def _write_now(self) -> None:
        environment, shard = self._environment, self._shard
        for topic_id in shard.reloading:
            # It is not in memory, and not read yet.
            raise TopicFailed(topic_id)
        size_bytes, slots = self._bytes_since, self._slots_since
        slot = shard.applied_slot
        state = shard.state()
        tip = self._tip.newest

        def write() -> commit.Tip[manifest.ShardManifest]:
            parts = (*map(_part_of, state.cuts), *state.carried)
            body = checkpoint_format.Checkpoint(
                shard=shard.number,
                epoch=shard.epoch,
                slot=slot,
                topics=parts,
                deletions=None if state.deletions is None else state.deletions.state(),
            )
            written = checkpoint_store.write_checkpoint(
                environment.store, body, base=tip.number, unique=environment.new_id()
            )
            return commit.commit(
                self._shard_log,
                shard_manifest.WriteCheckpoint(
                    reference=manifest.CheckpointReference(object=written, slot=slot, replay_from=slot),
                    replay_from=slot,
                    epoch=shard.epoch,
                    delete_after_ms=environment.clock.now_ms() + environment.grace_ms,
                ),
                writer=environment.config.daemon_id,
                created_ms=environment.clock.now_ms(),
                warm=tip,
                deadline_s=DEADLINE_S,
            )

        try:
            committed = await environment.run(write)
        except TopicFailed as failed:
            shard.let_go(failed.topic, failed.__cause__ or failed)
            raise
        # It may be committed, and have a successor's claim behind it.
        shard_tip.check_owner(committed, epoch=shard.epoch)
        self._tip.saw(committed)
        self._bytes_since -= size_bytes
        self._slots_since -= slots


def _part_of(cut: checkpoint_parts.TopicCut) -> checkpoint_format.TopicPart:
    try:
        return checkpoint_parts.part_of(cut)
    except MemoryError:
        raise
    except Exception as error:
        raise TopicFailed(cut.topic) from error


def _last_data_slot(claim: ShardClaim) -> int:
    """The highest data slot that may be left of former owners; 0 when none is."""
    read = max((slot.header.slot for slot in claim.slots if slot.header.kind is SlotKind.DATA), default=0)
    previous = claim.tip.manifest.previous_checkpoint
    kept_from = 0 if previous is None else previous.replay_from
    covered = claim.tip.manifest.replay_from
    return max(read, covered if covered > kept_from else 0)
