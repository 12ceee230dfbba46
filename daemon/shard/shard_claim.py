"""What the taking over of a shard comes to: the state that its owner begins with."""

from __future__ import annotations

import dataclasses

from daemon.core.deletions.ledger_deletions import LedgerDeletions
from storage_backends import commit
from storage_backends.formats import checkpoint_format
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.sections import DecodedSection


@dataclasses.dataclass(frozen=True, slots=True)
class ShardClaim:
    """A shard that was taken over.

    `tip`: the shard manifest that the claim has committed. `last_slot`: the last number that was given before; the
    first section of this owner is the one behind it. `checkpoint`: the state to begin with; `sections` continue it.
    `deletions`: what both say of deletions of ledgers.
    """

    shard: int
    epoch: int
    tip: commit.Tip[ShardManifest]
    last_slot: ShardSlot
    checkpoint: checkpoint_format.Checkpoint | None
    sections: tuple[DecodedSection, ...]
    deletions: LedgerDeletions

    @property
    def settled(self) -> bool:
        """Whether no former owner hands out anything any more."""
        return self.tip.manifest.settled_epoch == self.epoch
