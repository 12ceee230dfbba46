"""The operations on a shard's manifest: who owns it, and where replay begins.

Owns: precondition and effect of each operation but those of collection (`storage_backends.manifest_collection`).
Does not own: the sequence of them (`storage_backends.shard_manifests`), committing (`storage_backends.commit`), the
order of a takeover (`takeover`), what a checkpoint holds.
"""

from __future__ import annotations

import dataclasses

from storage_backends import commit
from storage_backends.formats.manifest import CheckpointReference, ShardManifest, Tombstone
from storage_backends.formats.shard_slot import ShardSlot

# The store may take so long to note that a shard is given up; nobody's data depends on it.
GIVE_UP_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A new owner, with a higher epoch.

    Two claimants may try the same epoch: that the tip carries it does not show whose claim has landed, only the commit
    id does. After an unknown outcome the next claim takes a higher epoch.

    `gone_owners`: recorded owners ("" is nobody) of whom no process hands out anything any more. If the former owner is
    one of them, and none before it is left either, the new epoch is settled at once.
    """

    shard: int
    epoch: int
    owner: str
    address: str
    gone_owners: frozenset[str] = frozenset()

    def precondition(self, tip: ShardManifest | None) -> str | None:
        return None if tip is None or tip.epoch < self.epoch else f"the epoch is {tip.epoch}, not below {self.epoch}"

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        before = tip or ShardManifest(head=commit.NO_HEAD, shard=self.shard, epoch=0)
        settled = before.settled_epoch == before.epoch and before.owner in self.gone_owners
        return dataclasses.replace(
            before,
            epoch=self.epoch,
            owner=self.owner,
            address=self.address,
            settled_epoch=self.epoch if settled else before.settled_epoch,
        )

    def landed(self, tip: ShardManifest) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheckpoint:
    """A checkpoint counts from now on, and replay begins above `replay_from`.

    The checkpoint before it is kept as well; the one before that may be deleted after `delete_after_ms` (Unix time).
    """

    reference: CheckpointReference
    replay_from: ShardSlot
    epoch: int
    delete_after_ms: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        if tip is None:
            return "nobody ever owned the shard"
        if tip.epoch != self.epoch:
            return f"the epoch is {tip.epoch}, not {self.epoch}"
        if self.replay_from < tip.replay_from:
            return f"replay begins above slot {tip.replay_from}, it cannot begin above {self.replay_from}"
        if tip.checkpoint is not None and self.reference.slot < tip.checkpoint.slot:
            return f"there is a checkpoint of slot {tip.checkpoint.slot}, after slot {self.reference.slot}"
        if self.reference.object.base < tip.head.orphan_floor:
            return f"checkpoint {self.reference.object.name} was started below the orphan floor {tip.head.orphan_floor}"
        return None

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        tombstones = tip.tombstones
        if tip.previous_checkpoint is not None:
            left = Tombstone(
                object=tip.previous_checkpoint.object,
                removed_in=tip.head.number + 1,
                delete_after_ms=self.delete_after_ms,
            )
            tombstones = (*tombstones, left)
        return dataclasses.replace(
            tip,
            checkpoint=self.reference,
            previous_checkpoint=tip.checkpoint,
            replay_from=self.replay_from,
            tombstones=tombstones,
        )

    def landed(self, tip: ShardManifest) -> bool:
        named = {each.object.name for each in (tip.checkpoint, tip.previous_checkpoint) if each is not None}
        return self.reference.object.name in named | {each.object.name for each in tip.tombstones}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """The owners before this one have gone without a confirmation for so long that they hand out nothing any more."""

    epoch: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        if tip is None:
            return "nobody ever owned the shard"
        return None if tip.epoch == self.epoch else f"the epoch is {tip.epoch}, not {self.epoch}"

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        return dataclasses.replace(_existing(tip), settled_epoch=self.epoch)

    def landed(self, tip: ShardManifest) -> bool:
        return tip.settled_epoch == self.epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The owner gives the shard up; the next one need not wait."""

    epoch: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        if tip is None:
            return "nobody ever owned the shard"
        return None if tip.epoch == self.epoch else f"the epoch is {tip.epoch}, not {self.epoch}"

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        return dataclasses.replace(_existing(tip), owner="", address="")

    def landed(self, tip: ShardManifest) -> bool:
        return tip.epoch == self.epoch and not tip.owner


def _existing(tip: ShardManifest | None) -> ShardManifest:
    if tip is None:
        raise ValueError("the operation was applied to a shard that nobody ever owned")
    return tip


def give_up(
    shard_log: commit.ManifestLog[ShardManifest],
    epoch: int,
    *,
    writer: str,
    created_ms: int,
    warm: commit.Tip[ShardManifest] | None = None,
) -> None:
    """The shard belongs to nobody: the next owner need not wait for this one.

    Raises commit.Refused when it belongs to another already, CommitOutcomeUnknown and the store's errors.
    """
    commit.commit(
        shard_log,
        Release(epoch=epoch),
        writer=writer,
        created_ms=created_ms,
        warm=warm,
        deadline_s=GIVE_UP_S,
    )
