"""Daemons that do nothing but write: a log each, claims and checkpoints of shards, with the parts of the product.

Owns: one step after the other, each certain when its call returns. Does not own: what is in a section (the callers).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from daemon.group_commit.daemon_log import LogCursor, OwnLogEnd, SlotDraft
from daemon.shard import range_operations
from storage_backends import commit, log_fence, shard_manifests, topic_manifest
from storage_backends.formats import checkpoint_format, names, slot_format
from storage_backends.formats.log_slot_format import Head, ShardSlot, Writer
from storage_backends.formats.manifest import CheckpointCut, ShardManifest
from storage_backends.log_fence import Fence
from storage_backends.object_store import ObjectStore
from storage_backends.slot_log import SlotLogs
from tests.batch.engine._support.roots import NOW_MS


class LogDaemon:
    """One incarnation of a daemon. Its log is opened here; `close` gives its files up, and writes nothing."""

    _numbers = itertools.count(1)

    def __init__(self, store: ObjectStore, logs: SlotLogs, name: str) -> None:
        self.store = store
        self.name = name
        self.log_id = f"01KB2Q{next(self._numbers):020d}"
        self._logs = logs
        self._writer = Writer(name, f"{name}:1", "0.1.0")
        self.own = LogCursor(self.log_id, self._writer)
        self._slots = logs.log(self.log_id)
        self._put(self.own.open())

    def close(self) -> None:
        self._slots.close()

    # ---- the log

    def _put(self, filling: SlotDraft) -> int:
        frozen = filling.freeze()
        assert frozen.slot is not None, frozen.unencodable
        self.own.frozen(frozen.slot)
        self._slots.create(frozen.slot.number, frozen.slot.body)
        self.own.certain()
        return frozen.slot.number

    def write(self, records: Mapping[int, Sequence[slot_format.Record]]) -> int:
        """A log slot with a section for each of these shards; its number."""

        def encoding(shard: int, own: Sequence[slot_format.Record]) -> object:
            def encode(head: Head) -> bytes:
                header = slot_format.SlotHeader(shard, head.epoch, ShardSlot(head.last_slot), len(own))
                return slot_format.encode_slot(header, own)

            return encode

        sections = {shard: encoding(shard, own) for shard, own in records.items()}
        return self._put(self.own.fill(sections))  # type: ignore[arg-type]

    def end_log(self) -> int:
        """CLOSE, and its number."""
        number = self._put(self.own.close())
        self.close()
        return number

    def truncate(self, through: int) -> None:
        self._slots.delete_through(through)

    def fence(self, other: LogDaemon) -> Fence:
        """Ends the log of another one, which is dead."""
        other.close()
        slots = self._logs.log(other.log_id)
        try:
            return log_fence.fence_log(slots, self._writer, delays_s=iter(()), sleep=lambda _: None)
        finally:
            slots.close()

    # ---- shards

    def last_slot(self, shard: int) -> int:
        """The last shard slot of this log, or the one before its first."""
        head = self.own.head(shard)
        tip = self.tip(shard)
        if head is not None and head.epoch == tip.epoch:
            return head.last_slot
        return tip.ranges[-1].first_slot - 1

    def claim(self, shard: int, former: Fence | OwnLogEnd | None = None) -> None:
        tip = shard_log(self.store, shard).read_tip()
        claim = range_operations.ClaimShard(
            shard=shard,
            epoch=1 if tip is None else tip.manifest.epoch + 1,
            owner=self.name,
            address=f"{self.name}:1",
            log_id=self.log_id,
            after=self.own.last_certain,
            former=former,
        )
        self._commit(shard, claim)
        claimed = self.tip(shard)
        self.own.begin(shard, Head(claimed.epoch, claimed.ranges[-1].first_slot - 1))

    def reclaim(self, shard: int) -> None:
        """The shard once more, from itself."""
        self.own.stop(shard)
        self.claim(shard, self.own.end())

    def checkpoint(self, shard: int, *parts: checkpoint_format.TopicPart) -> CheckpointCut:
        """Everything up to now."""
        cut = self._cut(shard, parts)
        epoch = self.tip(shard).epoch
        self._commit(shard, range_operations.WriteCheckpoint(cut=cut, epoch=epoch, delete_after_ms=NOW_MS))
        return cut

    def need_less(self, shard: int) -> None:
        less = range_operations.NeedLess(
            epoch=self.tip(shard).epoch,
            log_id=self.log_id,
            after=self.own.last_certain,
            last_slot=self.last_slot(shard),
        )
        self._commit(shard, less)

    def release(self, shard: int, *parts: checkpoint_format.TopicPart) -> None:
        last_slot, epoch = self.last_slot(shard), self.tip(shard).epoch
        cut, second = (self._cut(shard, parts) for _ in range(2))
        self.own.stop(shard)
        release = range_operations.Release(
            epoch=epoch, log_id=self.log_id, last_slot=last_slot, cut=cut, second=second, delete_after_ms=NOW_MS
        )
        self._commit(shard, release)

    def give_back(self, shard: int) -> None:
        self.own.stop(shard)
        head = self.own.head(shard)
        self._commit(shard, range_operations.GiveBack(epoch=self.tip(shard).epoch, log_id=self.log_id, own_head=head))

    def tip(self, shard: int) -> ShardManifest:
        tip = shard_log(self.store, shard).read_tip()
        assert tip is not None
        return tip.manifest

    def _cut(self, shard: int, parts: Sequence[checkpoint_format.TopicPart]) -> CheckpointCut:
        tip, slot = self.tip(shard), self.last_slot(shard)
        written = checkpoint_format.Checkpoint(shard, tip.epoch, ShardSlot(slot), tuple(parts))
        body = checkpoint_format.encode_checkpoint(written)
        key = names.checkpoint_key(shard, tip.head.number, f"c{slot}-{next(self._numbers):08}")
        self.store.put(key, body)
        reference = topic_manifest.reference_to(key, tip.head.number, body)
        return CheckpointCut(object=reference, slot=slot, log_id=self.log_id, at=self.own.last_certain)

    def _commit(self, shard: int, operation: commit.Operation[ShardManifest]) -> None:
        log = shard_log(self.store, shard)
        commit.commit(log, operation, writer=self.name, created_ms=NOW_MS, deadline_s=1.0)


_ids = itertools.count(1)


def shard_log(store: ObjectStore, shard: int) -> commit.ManifestLog[ShardManifest]:
    return shard_manifests.shard_log(
        store,
        shard,
        monotonic=lambda: 0.0,
        sleep=lambda _: None,
        jitter=lambda: 0.5,
        new_id=lambda: f"shard-{next(_ids):08}",
    )
