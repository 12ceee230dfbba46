"""Writes the checkpoints of one shard, one at a time, and releases the log that they cover.

A writing shard is checkpointed after a number of sections or bytes, and when it is its turn because a successor would
have to read much of the log (`tail_bound`). A silent one is checkpointed twice, when garbage is collected: then two
checkpoints cover all of its sections. While the log grows, it then commits now and then that it needs less of it.

A checkpoint object is written once under a unique name, and takes effect once a shard manifest names it.
`daemon.topic.bucket_lifecycle` makes its content, `storage_backends.checkpoints` reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from daemon.core.deletions.ledger_deletions import DeletionCut
from daemon.errors import Corruption
from daemon.group_commit.daemon_log import DaemonLog
from daemon.group_commit.shard_slots import ShardSlots
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import NewerData, TopicFailed
from daemon.shard import range_operations
from daemon.shard.range_operations import KnownTip, NeedLess, WriteCheckpoint
from daemon.shard.recovery import ShardClaim
from daemon.shard.tail_bound import TailBound
from daemon.topic import bucket_lifecycle, topic_manifests
from storage_backends import checkpoints, commit, object_store
from storage_backends.checkpoints import LoadedCheckpoint
from storage_backends.crash_points import crash_point
from storage_backends.formats import checkpoint_format, manifest, names
from storage_backends.formats.log_slot_format import Head, ShardSlot
from storage_backends.log_reading import LogEnd

log = logging.getLogger(__name__)


class CheckpointDamaged(Corruption):
    """A checkpoint object that cannot be read. `key` is its name."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"checkpoint {key} is damaged: {detail}")
        self.key = key


def write_checkpoint(
    store: object_store.ObjectStore, checkpoint: checkpoint_format.Checkpoint, *, base: int, unique: str
) -> manifest.ObjectReference:
    """Write the object, which takes effect once a shard manifest names it.

    `base` is the number of the shard manifest that it was started from. `unique` makes its name unique. May be repeated
    after an error with another `unique`.
    """
    body = checkpoint_format.encode_checkpoint(checkpoint)
    key = names.checkpoint_key(checkpoint.shard, base, unique)
    crash_point("checkpoint.before_put")
    store.put(key, body)
    crash_point("checkpoint.after_put")
    return manifest.ObjectReference(name=key, base=base, size_bytes=len(body), sha256=hashlib.sha256(body).digest())


def read_newest(
    store: object_store.ObjectStore, tip: manifest.ShardManifest, *, damaged: Callable[[str], None]
) -> LoadedCheckpoint:
    """Read the checkpoint that `tip` names, or the one before if it is damaged or missing.

    Then calls `damaged` with its key. Raises CheckpointDamaged if the one before is damaged too, NewerData if only a
    newer release reads it, and the store's errors.
    """
    try:
        return checkpoints.read_newest(store, tip, damaged=damaged)
    except object_store.NotFound as error:
        raise CheckpointDamaged(error.key, "the object is missing") from error
    except object_store.NewerObject as error:
        raise NewerData(f"{error}") from error
    except object_store.Damaged as error:
        raise CheckpointDamaged(error.key, error.reason) from error


def newest_of(
    environment: Environment,
    shard_log: commit.ManifestLog[manifest.ShardManifest],
    tip: commit.Tip[manifest.ShardManifest],
) -> LoadedCheckpoint:
    """Read the newest readable checkpoint by `read_newest`, and count damage in the metrics.

    Raises Superseded instead if another daemon has claimed the shard since `tip`.
    """

    def damaged(key: str) -> None:
        range_operations.check_not_superseded(shard_log, tip)
        environment.metrics.damage_found("checkpoint")

    try:
        return read_newest(environment.store, tip.manifest, damaged=damaged)
    except CheckpointDamaged:
        range_operations.check_not_superseded(shard_log, tip)
        raise


# Deadline of one attempt to learn whether a checkpoint is committed (seconds)
DEADLINE_S = 30.0
# A shard is idle if it has written no section for this long (seconds).
IDLE_S = 60.0
# An idle shard commits that it needs less of the log if this much (bytes), or so old a part (seconds), is kept for it.
KEPT_BYTES_MAX = 64 << 20
KEPT_S_MAX = 3600.0


class ShardOfCheckpoints(Protocol):
    """The port through which checkpoints use their shard."""

    @property
    def number(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def applied_slot(self) -> ShardSlot: ...

    @property
    def slots(self) -> ShardSlots: ...

    @property
    def reloading(self) -> Collection[str]:
        """The ids of failed topics that are not read again yet: no checkpoint can hold them."""
        ...

    def state(self) -> ShardState:
        """Return the shard as of `applied_slot`.

        Raises TopicFailed if a topic cannot be cut; that topic is reloaded.
        """
        ...

    def begin_reload(self, topic: str, error: BaseException) -> None:
        """Fail a topic that is no longer reliable."""
        ...

    def lose(self, error: BaseException) -> None:
        """Give up a shard that cannot be served any longer."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ShardState:
    """The content of a checkpoint of a shard.

    `cuts` are topics that are not fully in their manifests. `carried` are those that are not loaded. `deletions` is
    None if there are none to store. `known` has the number of the newest known manifest of each topic, by id.
    """

    cuts: Sequence[bucket_lifecycle.TopicCut]
    carried: Sequence[checkpoint_format.TopicPart]
    deletions: DeletionCut | None
    known: Mapping[str, int]


class Checkpointing:
    """The checkpoints of a shard that was taken over by `claim`. Used on one event loop."""

    def __init__(
        self,
        shard: ShardOfCheckpoints,
        claim: ShardClaim,
        tip: KnownTip,
        shard_log: commit.ManifestLog[manifest.ShardManifest],
        daemon_log: DaemonLog,
        tail_bound: TailBound,
        environment: Environment,
    ) -> None:
        self._shard = shard
        self._tip = tip
        self._shard_log = shard_log
        self._log = daemon_log
        self._tail_bound = tail_bound
        self._environment = environment
        self._bytes_since = 0
        self._sections_since = 0
        self._tail = tail_bound.tail(self._begin)
        self._left_bytes = sum(section.size_bytes for section in claim.sections)
        self._left_sections = len(claim.sections)
        self._written_at_s = environment.clock.elapsed_s()
        # Time, and length of the log, when the newest manifest recorded from where on the shard needs it
        self._needs_since_s = environment.clock.elapsed_s()
        self._needs_since_bytes = daemon_log.bytes_written
        self._work: asyncio.Task[None] | None = None
        # One checkpoint at a time.
        self._turn = asyncio.Lock()

    # ---- changes of the log

    def written(self, size_bytes: int) -> None:
        """Count a section of the shard that is certain."""
        self._bytes_since += size_bytes
        self._sections_since += 1
        self._tail.grown(self._log.work_written)
        self._written_at_s = self._environment.clock.elapsed_s()

    def topics_loaded(self) -> None:
        """Count former owners' sections towards the next checkpoint, now that all topics are loaded or damaged."""
        self._bytes_since += self._left_bytes
        self._sections_since += self._left_sections
        if self._left_sections:
            self._tail.grown(-self._left_sections)
        self.consider()

    def consider(self) -> None:
        """Begin a checkpoint if the shard has written enough and none is in flight.

        Also lets the shard whose turn it is begin one.
        """
        limits = self._environment.config.journal
        if self._bytes_since >= limits.checkpoint_bytes or self._sections_since >= limits.checkpoint_slots:
            self._begin()
        self._tail_bound.consider(self._log.work_written)

    def every_second(self) -> None:
        """Begin a checkpoint of some shard if a successor would have to read much, even if no slot comes."""
        self._tail_bound.consider(self._log.work_written)

    # ---- requests

    @property
    def covered_twice(self) -> bool:
        """True if two checkpoints cover every section."""
        return self._tip.newest.manifest.previous_slot >= self._shard.applied_slot

    async def settled(self) -> None:
        """Wait until no checkpoint is in flight."""
        while self._busy and self._work is not None:
            await asyncio.wait([self._work])

    async def write_last(self) -> None:
        """Write the state as of now for the next owner, unless the newest checkpoint holds it.

        Raises the store's errors, CommitOutcomeUnknown and Refused. Raises TopicFailed if it makes a topic reload; then
        it may be repeated.
        """
        async with self._turn:
            if self._tip.newest.manifest.checkpoint_slot < self._shard.applied_slot:
                await self._write()

    async def tail_of(self, topic_id: str) -> tuple[checkpoints.TopicTail, ShardSlot]:
        """Return a topic's content of the newest checkpoint and the sections above it, and the last applied slot.

        Nothing may be staged for the topic. Raises Corruption if they are damaged, Superseded if another daemon has
        claimed the shard and they are not there, and the store's errors.
        """
        environment, shard = self._environment, self._shard
        # The turn keeps these slots from being deleted meanwhile.
        async with self._turn:
            await shard.slots.settled()
            newest, until, end = self._tip.newest, shard.applied_slot, self._log.sender.applied

            def read() -> checkpoints.TopicTail:
                loaded = newest_of(environment, self._shard_log, newest)
                ends = {self._log.log_id: LogEnd(end, {shard.number: Head(shard.epoch, until)})}
                try:
                    found = checkpoints.sections_of_shard(self._log.logs, newest.manifest, loaded.slot, ends)
                except object_store.Damaged as error:
                    range_operations.check_not_superseded(self._shard_log, newest)
                    raise Corruption(f"{error}") from error
                above = ((section.slot, section.records) for section in found)
                tails = checkpoints.tails_of(loaded.checkpoint, above, only={topic_id})
                return tails.get(topic_id, checkpoints.NOTHING)

            return await environment.pools.loads.run(read), until

    async def collect(self) -> None:
        """Checkpoint an idle shard unless its sections are covered twice; if they are, release much retained log.

        Raises the store's errors and CommitOutcomeUnknown. The shard is lost if its epoch is over.
        """
        await self.settled()
        work = self._start(self._collect())
        # No caller may be waiting when it fails.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        # The waiter may be cancelled; a commit in flight continues.
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

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
        self._tail_bound.consider(self._log.work_written)

    async def _try(self) -> None:
        try:
            async with self._turn:
                if self._shard.reloading:
                    # The content of a failed topic is being read; the next slots try again.
                    return
                await self._write()
        except object_store.Damaged as error:
            # No checkpoint can be written until the manifest is fixed; until then the shard is refused by name.
            raise Corruption(f"shard manifest {error}") from error
        except (*commit.UNCERTAIN, TopicFailed) as error:
            # The log grows meanwhile; the next slots try again.
            log.warning("shard %d: no checkpoint could be written: %s", self._shard.number, error)

    async def _collect(self) -> None:
        async with self._turn:
            now_s = self._environment.clock.elapsed_s()
            if now_s - self._written_at_s < IDLE_S or self._shard.reloading:
                return
            kept_bytes = self._log.bytes_written - self._needs_since_bytes
            if not self.covered_twice:
                # If a topic fails here, the next pass tries again.
                with contextlib.suppress(TopicFailed):
                    await self._write()
            elif kept_bytes >= KEPT_BYTES_MAX or (kept_bytes > 0 and now_s - self._needs_since_s >= KEPT_S_MAX):
                await self._need_less()

    async def _need_less(self) -> None:
        shard, written = self._shard, self._log.bytes_written
        operation = NeedLess(
            epoch=shard.epoch,
            log_id=self._log.log_id,
            after=self._log.sender.applied,
            last_slot=shard.applied_slot,
        )
        await self._commit(operation)
        self._needs_since_s, self._needs_since_bytes = self._environment.clock.elapsed_s(), written

    async def _write(self) -> None:
        """Write the state as of now and commit it."""
        with self._tail.covering():
            await self._write_now()

    async def _write_now(self) -> None:
        environment, shard = self._environment, self._shard
        for topic_id in shard.reloading:
            # The topic is not in memory, and not read yet.
            raise TopicFailed(topic_id)
        size_bytes, count, written = self._bytes_since, self._sections_since, self._log.bytes_written
        slot, at = shard.applied_slot, self._log.sender.applied
        state = shard.state()
        tip = self._tip.newest

        def write() -> manifest.ObjectReference:
            body = checkpoint_format.Checkpoint(
                shard=shard.number,
                epoch=shard.epoch,
                slot=slot,
                topics=(*map(_part_of, state.cuts), *state.carried),
                deletions=None if state.deletions is None else state.deletions.state(),
                known=state.known,
            )
            return write_checkpoint(environment.store, body, base=tip.number, unique=environment.new_id())

        try:
            stored = await environment.run(write)
        except TopicFailed as failed:
            shard.begin_reload(failed.topic, failed.__cause__ or failed)
            raise
        await self._commit(
            WriteCheckpoint(
                cut=manifest.CheckpointCut(object=stored, slot=slot, log_id=self._log.log_id, at=at),
                epoch=shard.epoch,
                delete_after_ms=environment.clock.now_ms() + environment.grace_ms,
            )
        )
        self._bytes_since -= size_bytes
        self._sections_since -= count
        self._needs_since_s, self._needs_since_bytes = environment.clock.elapsed_s(), written

    async def _commit(self, operation: commit.Operation[manifest.ShardManifest]) -> None:
        environment, tip = self._environment, self._tip.newest
        committed = await environment.run(
            lambda: topic_manifests.commit_once(
                environment, self._shard_log, operation, warm=tip, deadline_s=DEADLINE_S
            )
        )
        # It may be committed, and followed by a successor's claim.
        range_operations.check_owner(committed, epoch=self._shard.epoch)
        self._tip.saw(committed)
        self._log.manifest_committed(committed.manifest)


def _part_of(cut: bucket_lifecycle.TopicCut) -> checkpoint_format.TopicPart:
    try:
        return bucket_lifecycle.checkpoint_part(cut)
    except MemoryError:
        raise
    except Exception as error:
        raise TopicFailed(cut.topic) from error
