"""Where the sections of a shard lie, as values: which log slots of which logs, and from which of them replay reads.

Owns: the manifest of a shard whose sections lie in the logs of daemons, and what its ranges mean.
Does not own: what may follow it (the operations of owners), the bytes of it, the sections.

Log slots are numbered in their log, shard slots over all epochs and logs of their shard.
"""

from __future__ import annotations

import dataclasses

from storage_backends.formats.log_slot_format import Head
from storage_backends.formats.manifest import ManifestHead, ObjectReference, Tombstone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogRange:
    """The sections of `epoch` with `first_slot` <= shard slot <= `last_slot` lie in the slots of the log with
    `after` < number <= `through`. `through` and `last_slot` are None while the range is open: the epoch lasts.
    """

    log_id: str
    epoch: int
    after: int
    through: int | None
    first_slot: int
    last_slot: int | None

    def covers(self, log_id: str, number: int, head: Head) -> bool:
        """Whether a section of epoch and shard slot `head`, in that slot of that log, is one of this range."""
        return (
            (self.log_id, self.epoch) == (log_id, head.epoch)
            and self.after < number
            and (self.through is None or number <= self.through)
            and self.first_slot <= head.last_slot
            and (self.last_slot is None or head.last_slot <= self.last_slot)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCut:
    """The checkpoint of shard slot `slot`. `at`: the last slot of the log `log_id` that was applied when it was cut."""

    object: ObjectReference
    slot: int
    log_id: str
    at: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RangedShardManifest:
    """Who owns a shard, and where its sections lie: `ranges`, oldest first; the last is open while it is owned.

    Replay begins at `checkpoint`, or at `previous_checkpoint` where that is damaged, and at shard slot 0 without one.
    `owner` is empty when the shard was released or given back. Owners of epochs below `settled_epoch` hand out nothing
    any more.
    """

    head: ManifestHead
    shard: int
    epoch: int
    owner: str = ""
    address: str = ""
    settled_epoch: int = 0
    ranges: tuple[LogRange, ...] = ()
    checkpoint: CheckpointCut | None = None
    previous_checkpoint: CheckpointCut | None = None
    tombstones: tuple[Tombstone, ...] = ()

    @property
    def open_range(self) -> LogRange | None:
        """The range of the owner; None when nobody owns the shard."""
        return self.ranges[-1] if self.ranges and self.ranges[-1].through is None else None

    @property
    def checkpoint_slot(self) -> int:
        return slot_of(self.checkpoint)

    @property
    def previous_slot(self) -> int:
        return slot_of(self.previous_checkpoint)

    @property
    def last_closed_slot(self) -> int:
        """The last shard slot before an open range: of the last range, else of the checkpoint, else 0."""
        before = [each.last_slot for each in self.ranges if each.last_slot is not None]
        return before[-1] if before else self.checkpoint_slot

    def lowest_after(self, log_id: str) -> int | None:
        """The number of the log behind which it is needed for this shard; None when no range names the log."""
        return min((each.after for each in self.ranges if each.log_id == log_id), default=None)


def slot_of(checkpoint: CheckpointCut | None) -> int:
    """The shard slot of a checkpoint; 0 without one."""
    return 0 if checkpoint is None else checkpoint.slot
