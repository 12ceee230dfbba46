"""Daemons that own shards in the log, one step at a time: they take over, write sections and checkpoints, and serve
nothing.

Owns: the steps, and what each daemon knows of its shards. Does not own: the machines and their store
(`engine_fixture`); the steps are those of the product.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from daemon.group_commit.daemon_log import DaemonLog
from daemon.group_commit.slot_sender import LandedSlot, Section
from daemon.owner.takeover import ClaimedShard, Fences, Takeover
from daemon.owner.traces import Traces
from daemon.shard import checkpointing
from daemon.shard.range_operations import NeedLess, WriteCheckpoint
from daemon.shard.recovery import ShardClaim
from daemon.topic import topic_manifests
from storage_backends import commit, log_fence
from storage_backends.formats import checkpoint_format, log_slot_format, names
from storage_backends.formats.log_slot_format import LogSlotHeader, LogSlotKind, ShardSlot, Writer
from storage_backends.formats.manifest import CheckpointCut, LogForm, ShardManifest
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AddRecord, Record
from storage_backends.log_fence import Fence
from storage_backends.object_log import ObjectLog
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.virtual_loop import InlineExecutor

T = TypeVar("T")
TOPIC_ID = "a" * 32
SHARDS = 3
NOBODY = frozenset({""})
"""Of the recorded owners nobody is known to be dead."""

_entries = itertools.count(1)


def rows_of(entries: Iterable[int]) -> Rows:
    column = np.array(sorted(entries), np.uint64)
    return Rows(column, column, column)


def entries_of(records: Iterable[Record]) -> set[int]:
    return {entry for record in records if isinstance(record, AddRecord) for entry in record.rows.entry_id.tolist()}


def known_by(claim: ShardClaim) -> set[int]:
    """The entries that the checkpoint and the sections of a claim give together."""
    known = entries_of(record.decoded() for section in claim.sections for record in section.records)
    for part in claim.checkpoint.topics if claim.checkpoint else ():
        known |= set(part.mutable_rows.entry_id.tolist())
    return known


class LogOwner:
    """A daemon with a log of its own. `ended`: what its log has ended with. `known`: by shard, what it answers for."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.environment = daemon.environment
        self.name = daemon.daemon_id
        self.logs = self.environment.open_logs(LogForm.OBJECTS)
        self.manifests = tuple(topic_manifests.shard_log(self.environment, shard) for shard in range(SHARDS))
        self.fences = Fences(self.logs, self.environment)
        self.ended: list[BaseException] = []
        self.known: dict[int, set[int]] = {}
        self.claims: dict[int, ShardClaim] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work of its process, which ends with it."""
        return self.daemon.call(work)

    async def open(self) -> LogOwner:
        self.living = await self.run(DaemonLog.opened(self.logs, self.environment, lost=self.ended.append))
        self.traces = Traces(self.environment.store, self.logs, lambda: ())
        self.takeover = Takeover(self.manifests, self.living, self.environment, self.traces)
        return self

    @property
    def log_id(self) -> str:
        return self.living.log_id

    # ---- shards

    async def claim(self, shard: int, *, gone_owners: frozenset[str] = NOBODY) -> ClaimedShard:
        """Looks at it, and claims it by a fence of this attempt."""
        self.fences = Fences(self.logs, self.environment)
        return await self.claim_as_seen(shard, self.look(shard), gone_owners)

    async def claim_as_seen(
        self, shard: int, looked_at: commit.Tip[ShardManifest] | None, gone_owners: frozenset[str] = NOBODY
    ) -> ClaimedShard:
        """Claims it by what a look has shown."""
        return await self.run(self.takeover.claim(shard, looked_at, self.fences, gone_owners))

    async def claim_all(self, shards: Sequence[int], *, gone_owners: frozenset[str] = NOBODY) -> list[ClaimedShard]:
        """Claims several by the fences of one attempt, side by side."""
        self.fences = Fences(self.logs, self.environment)
        return await asyncio.gather(*(self.claim_as_seen(shard, self.look(shard), gone_owners) for shard in shards))

    async def take(self, *shards: int, gone_owners: frozenset[str] = NOBODY) -> dict[int, ShardClaim]:
        """Claims them and reads them."""
        return self._served(await self.read(await self.claim_all(shards, gone_owners=gone_owners)))

    async def read(self, won: Iterable[ClaimedShard]) -> dict[int, ShardClaim | Exception]:
        return await self.run(self.takeover.read([*won]))

    def _served(self, found: dict[int, ShardClaim | Exception]) -> dict[int, ShardClaim]:
        claims = {}
        for shard, claim in found.items():
            if isinstance(claim, Exception):
                raise claim
            claims[shard] = self.claims[shard] = claim
            self.known[shard] = known_by(claim)
        return claims

    async def write(self, *shards: int) -> LandedSlot:
        """A slot with a section of each of them, which adds an entry."""
        added = {shard: next(_entries) for shard in shards}
        landed = await self.run(self.living.write([self.section(shard, entry) for shard, entry in added.items()]))
        for shard, entry in added.items():
            self.known[shard].add(entry)
        return landed

    @staticmethod
    def section(shard: int, entry: int = 0) -> Section:
        return Section(shard, [AddRecord(TOPIC_ID, 1, 0, rows_of({entry}))], [])

    async def checkpoint(self, shard: int) -> ShardManifest:
        """Everything that it knows of the shard, as of its last section."""
        claim, head = self.claims[shard], self.living.head(shard)
        epoch = claim.epoch
        slot = head.last_slot if head is not None and head.epoch == epoch else claim.last_slot
        part = checkpoint_format.TopicPart(
            topic_id=TOPIC_ID, topic="flights", incarnation=1, mutable_rows=rows_of(self.known[shard])
        )
        stored = checkpointing.write_checkpoint(
            self.environment.store,
            checkpoint_format.Checkpoint(shard=shard, epoch=epoch, slot=ShardSlot(slot), topics=(part,)),
            base=claim.tip.number,
            unique=self.environment.new_id(),
        )
        cut = CheckpointCut(object=stored, slot=slot, log_id=self.log_id, at=self.living.last_certain)
        return await self.committed(shard, WriteCheckpoint(cut=cut, epoch=epoch, delete_after_ms=0))

    async def need_less(self, shard: int) -> ShardManifest:
        """Nothing of the log so far is needed for the shard any more; two checkpoints are at its last section."""
        manifest = self.tip(shard)
        return await self.committed(
            shard,
            NeedLess(
                epoch=self.claims[shard].epoch,
                log_id=self.log_id,
                after=self.living.last_certain,
                last_slot=manifest.previous_slot,
            ),
        )

    async def committed(self, shard: int, operation: commit.Operation[ShardManifest]) -> ShardManifest:
        """The manifest of an operation on it, of which its log hears."""

        async def in_thread() -> ShardManifest:
            return (await self.environment.run(lambda: self._commit(shard, operation))).manifest

        manifest = await self.run(in_thread())
        self.living.manifest_committed(manifest)
        return manifest

    def _commit(self, shard: int, operation: commit.Operation[ShardManifest]) -> commit.Tip[ShardManifest]:
        return commit.commit(self.manifests[shard], operation, writer=self.name, created_ms=0, deadline_s=30.0)

    def look(self, shard: int) -> commit.Tip[ShardManifest] | None:
        return self.manifests[shard].read_tip()

    def tip(self, shard: int) -> ShardManifest:
        tip = self.look(shard)
        assert tip is not None
        return tip.manifest


async def owner_of(machines: EngineFixture, name: str, *shards: int) -> LogOwner:
    """A daemon with a log, that has taken these shards over."""
    owner = await LogOwner(machines.daemon(name)).open()
    if shards:
        await owner.take(*shards)
    return owner


# ---- what is stored, and what somebody else does


def log_of(machines: EngineFixture, log_id: str) -> ObjectLog:
    return ObjectLog(machines.store, log_id, InlineExecutor())


def headers_of(machines: EngineFixture, log_id: str) -> list[LogSlotHeader]:
    """Of every slot that is there, ascending."""
    slots = log_of(machines, log_id)
    highest = slots.highest() or 0
    found = [log_fence.read_one(slots, number) for number in range(1, highest + 1)]
    return [slot.header for slot in found if slot is not None]


def numbers_of(machines: EngineFixture, log_id: str) -> list[int]:
    return [header.number for header in headers_of(machines, log_id)]


def fence(machines: EngineFixture, log_id: str) -> Fence:
    """Somebody else fences the log."""
    return log_fence.fence_log(
        log_of(machines, log_id), Writer("fencer", "", ""), delays_s=iter(()), sleep=lambda _: None
    )


def fence_slot(log_id: str, number: int) -> bytes:
    """A FENCE without heads."""
    writer = Writer("fencer", "", "")
    header = LogSlotHeader(log_id=log_id, number=number, kind=LogSlotKind.FENCE, writer=writer)
    return log_slot_format.encode_log_slot(header)


def slot_key(log_id: str, number: int) -> str:
    return names.log_slot_key(log_id, number)
