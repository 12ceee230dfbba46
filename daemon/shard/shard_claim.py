"""What the taking over of a shard comes to: the state that its owner begins with."""

from __future__ import annotations

import dataclasses

from daemon.core.deletions.ledger_deletions import LedgerDeletions
from daemon.shard import journal_tail
from storage_backends import commit
from storage_backends.formats import checkpoint_format
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import ShardSlot


@dataclasses.dataclass(frozen=True, slots=True)
class ShardClaim:
    """A shard that was taken over.

    `tip`: the shard manifest, read again after the fence; that read was sent at `confirmed_at_s`, monotonic seconds.
    `last_slot`: the last number that was given before; the first slot of this owner is the one behind it.
    `checkpoint`, `replay_from`: the state to begin with and the slot above which `slots` continue it; fences of earlier
    claims are among them. `deletions`: what checkpoint and slots say of deletions of ledgers.
    """

    shard: int
    epoch: int
    tip: commit.Tip[ShardManifest]
    confirmed_at_s: float
    last_slot: ShardSlot
    checkpoint: checkpoint_format.Checkpoint | None
    replay_from: ShardSlot
    slots: tuple[journal_tail.Slot, ...]
    deletions: LedgerDeletions

    @property
    def settled(self) -> bool:
        """Whether no former owner hands out anything any more."""
        return self.tip.manifest.settled_epoch == self.epoch
