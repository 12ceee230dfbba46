"""Defines the operations on the manifest of a shard whose sections lie in the logs of daemons.

Each operation has its precondition and effect (L5, L7, L8), as a `commit.Operation`. It is frozen before its first
attempt, and describes its daemon's log at that time.

`KnownTip` is the newest manifest that an owner knows, `Superseded` the error once the shard has another owner.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from daemon.errors import Corruption, NotOwner
from daemon.group_commit.daemon_log import OwnLogEnd
from storage_backends import commit
from storage_backends.formats import requirements
from storage_backends.formats.log_slot_format import Head, LogSlotKind
from storage_backends.formats.manifest import CheckpointCut, LogRange, ShardManifest, Tombstone
from storage_backends.log_fence import Fence

NOBODY = "nobody ever owned the shard"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimShard:
    """The claim of a new owner, with the next epoch.

    `log_id` is its log, whose OPEN is certain; `after` is the last certain slot of that. `former` allows it to follow
    an owner: a fence of that owner's log or, for a claim from itself, the end of its own log. It is None if the shard
    has no owner. With `former_is_dead` no process of that owner is left to deliver rows.

    A tip whose open range names the claimant's log in this epoch is this claim, landed, whatever the store answered.
    """

    shard: int
    epoch: int
    owner: str
    address: str
    log_id: str
    after: int
    former: Fence | OwnLogEnd | None = None
    former_is_dead: bool = False

    def precondition(self, tip: ShardManifest | None) -> str | None:
        epoch = 0 if tip is None else tip.epoch
        if epoch != self.epoch - 1:
            return f"the epoch is {epoch}, not {self.epoch - 1}"
        owned = None if tip is None else tip.open_range
        if tip is None or owned is None:
            return None
        if self.former is None or self.former.log_id != owned.log_id:
            return f"the owner {tip.owner} writes log {owned.log_id}, which this claimant has not fenced"
        if isinstance(self.former, OwnLogEnd):
            return None if owned.log_id == self.log_id else f"log {owned.log_id} is not the claimant's"
        if not _is_proof(tip, self.former):
            return (
                f"the fence of log {owned.log_id} at slot {self.former.number} is not above slot "
                f"{tip.lowest_after(owned.log_id)}, up to which slots may have been deleted: it may stop nobody"
            )
        return None

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        before = tip or ShardManifest(head=commit.NO_HEAD, shard=self.shard, epoch=0)
        ranges, last_slot = before.ranges, before.last_closed_slot
        if before.open_range is not None:
            ranges, last_slot = _closed(before, self.former)
        # An idle shard, which is not checkpointed again, would name a former owner's log for ever.
        ranges = _above_previous(ranges, before)
        own = LogRange(
            log_id=self.log_id,
            epoch=self.epoch,
            after=self.after,
            through=None,
            # The checkpoint is higher if the log has lost slots unnoticed; its numbers are used.
            first_slot=max(last_slot, before.checkpoint_slot) + 1,
            last_slot=None,
        )
        orderly = self.former is None or isinstance(self.former, OwnLogEnd) or self.former.kind is LogSlotKind.CLOSE
        # An epoch is settled when no earlier owner delivers rows any longer.
        is_settled = before.settled_epoch == before.epoch and (orderly or self.former_is_dead)
        return dataclasses.replace(
            before,
            epoch=self.epoch,
            owner=self.owner,
            address=self.address,
            settled_epoch=self.epoch if is_settled else before.settled_epoch,
            ranges=(*ranges, own),
        )

    def landed(self, tip: ShardManifest) -> bool:
        return any((each.log_id, each.epoch) == (self.log_id, self.epoch) for each in tip.ranges)


def _is_proof(tip: ShardManifest, fence: Fence) -> bool:
    """Return whether the fence is above every slot that may have been deleted when `tip` was committed."""
    lowest = tip.lowest_after(fence.log_id)
    return lowest is not None and lowest < fence.number


def _closed(tip: ShardManifest, former: Fence | OwnLogEnd | None) -> tuple[tuple[LogRange, ...], int]:
    """Close the open range where the log ends, or drop it if it has no section.

    Returns the ranges and the last shard slot.
    """
    owned = tip.open_range
    if owned is None or former is None:
        raise ValueError("there is no open range, or nothing says where its log ends")
    head = former.heads.get(tip.shard)
    if head is None or head.epoch != owned.epoch:
        return tip.ranges[:-1], owned.first_slot - 1
    closed = dataclasses.replace(owned, through=former.end, last_slot=head.last_slot)
    return (*tip.ranges[:-1], closed), head.last_slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheckpoint:
    """The commit of a checkpoint, which keeps the one before it and drops ranges that neither needs.

    The one before that may be deleted after `delete_after_ms` (Unix time). With `settles` earlier owners deliver
    nothing any longer.
    """

    cut: CheckpointCut
    epoch: int
    delete_after_ms: int
    settles: bool = False

    def precondition(self, tip: ShardManifest | None) -> str | None:
        return _not_of_epoch(tip, self.epoch) or _goes_back(tip, self.cut) or _was_begun_below_the_floor(tip, self.cut)

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        after = dataclasses.replace(
            tip,
            checkpoint=self.cut,
            previous_checkpoint=tip.checkpoint,
            tombstones=(*tip.tombstones, *_left(tip, {self.cut, tip.checkpoint}, self.delete_after_ms)),
            settled_epoch=self.epoch if self.settles else tip.settled_epoch,
        )
        return dataclasses.replace(after, ranges=_still_needed(after))

    def landed(self, tip: ShardManifest) -> bool:
        return _names(tip, self.cut)


def _above_previous(ranges: tuple[LogRange, ...], manifest: ShardManifest) -> tuple[LogRange, ...]:
    """Return the ranges with a section above the manifest's previous checkpoint, and the open one."""
    return tuple(each for each in ranges if each.last_slot is None or each.last_slot > manifest.previous_slot)


def _still_needed(manifest: ShardManifest) -> tuple[LogRange, ...]:
    """Return the ranges with a section above the previous checkpoint.

    The open range begins where that checkpoint was cut, if it is in the same log.
    """
    previous = manifest.previous_checkpoint
    kept = _above_previous(manifest.ranges, manifest)
    owned = manifest.open_range
    if owned is None or previous is None or previous.log_id != owned.log_id:
        return kept
    return (*kept[:-1], dataclasses.replace(owned, after=max(owned.after, previous.at)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """The record that earlier owners deliver nothing any longer, since they were unconfirmed for long enough."""

    epoch: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        return _not_of_epoch(tip, self.epoch)

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        return dataclasses.replace(_existing(tip), settled_epoch=self.epoch)

    def landed(self, tip: ShardManifest) -> bool:
        return tip.settled_epoch == self.epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequireOfShard:
    """The addition of a requirement (`requirements`), before the first section or topic that needs it.

    Every living daemon reports that it meets it. It stays for ever: there is no way back to a former release.
    """

    requirement: str
    epoch: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        return _not_of_epoch(tip, self.epoch)

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        return dataclasses.replace(tip, requires=requirements.joined(tip.requires, self.requirement))

    def landed(self, tip: ShardManifest) -> bool:
        return tip.epoch == self.epoch and self.requirement in tip.requires


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeedLess:
    """The record that an idle shard needs no slot of its owner's log up to `after`, which is certain.

    Both of its checkpoints are at its last shard slot, `last_slot` in the owner's memory.
    """

    epoch: int
    log_id: str
    after: int
    last_slot: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        reason = _not_of_epoch(tip, self.epoch) or _not_owned_by(tip, self.log_id)
        if reason is None and tip is not None and tip.previous_slot != self.last_slot:
            return f"the previous checkpoint is of shard slot {tip.previous_slot}, the last one is {self.last_slot}"
        return reason

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        owned = dataclasses.replace(tip.ranges[-1], after=max(tip.ranges[-1].after, self.after))
        return dataclasses.replace(tip, ranges=(*tip.ranges[:-1], owned))

    def landed(self, tip: ShardManifest) -> bool:
        owned = tip.open_range
        return tip.epoch == self.epoch and owned is not None and owned.after >= self.after


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The release of a shard by its owner: two checkpoints at its last shard slot, no ranges, no owner.

    Its last section is certain and applied. Other checkpoints may be deleted after `delete_after_ms`.
    """

    epoch: int
    log_id: str
    last_slot: int
    cut: CheckpointCut
    second: CheckpointCut
    delete_after_ms: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        reason = _not_of_epoch(tip, self.epoch) or _not_owned_by(tip, self.log_id)
        if reason is not None:
            return reason
        for cut in (self.cut, self.second):
            if cut.slot != self.last_slot:
                return f"checkpoint {cut.object.name} is of shard slot {cut.slot}, the last one is {self.last_slot}"
            if reason := _goes_back(tip, cut) or _was_begun_below_the_floor(tip, cut):
                return reason
        if self.cut.object.name == self.second.object.name:
            return f"checkpoint {self.cut.object.name} is named twice: if it is damaged, nothing is left"
        return None

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        return dataclasses.replace(
            tip,
            owner="",
            address="",
            ranges=(),
            checkpoint=self.cut,
            previous_checkpoint=self.second,
            tombstones=(*tip.tombstones, *_left(tip, {self.cut, self.second}, self.delete_after_ms)),
        )

    def landed(self, tip: ShardManifest) -> bool:
        return _names(tip, self.cut) and _names(tip, self.second)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeginAnew:
    """The first manifest of a shard that has lost all of its own: without an owner, and with an empty checkpoint.

    `epoch` and the section number of the checkpoint `cut` are not below any that was ever used.
    """

    shard: int
    epoch: int
    cut: CheckpointCut

    def precondition(self, tip: ShardManifest | None) -> str | None:
        return None if tip is None else f"the shard has manifest {tip.head.number}"

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        return ShardManifest(head=commit.NO_HEAD, shard=self.shard, epoch=self.epoch, checkpoint=self.cut)

    def landed(self, tip: ShardManifest) -> bool:
        return _names(tip, self.cut)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """The release of a shard by a claimant that has written no section in its epoch; all else stays as it was.

    `own_head` is how far its own log goes for the shard, by its heads; None if that never had a section of it.
    """

    epoch: int
    log_id: str
    own_head: Head | None

    def precondition(self, tip: ShardManifest | None) -> str | None:
        if self.own_head is not None and self.own_head.epoch == self.epoch:
            return f"shard slot {self.own_head.last_slot} was written in epoch {self.epoch}: release the shard instead"
        reason = _not_of_epoch(tip, self.epoch) or _not_owned_by(tip, self.log_id)
        if reason is None and has_earlier_sections_in(self.log_id, _existing(tip)):
            # No shard would keep the bound of a log that continues.
            return f"sections of an earlier epoch lie in log {self.log_id}, too: close the log instead"
        return reason

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        return dataclasses.replace(tip, owner="", address="", ranges=tip.ranges[:-1])

    def landed(self, tip: ShardManifest) -> bool:
        return tip.epoch == self.epoch and not tip.owner


# ---- shared by several operations


def has_earlier_sections_in(log_id: str, manifest: ShardManifest) -> bool:
    """Return whether the owned shard has sections of an earlier epoch in the log, in which it was claimed again."""
    return any(each.log_id == log_id for each in manifest.ranges[:-1])


def _not_of_epoch(tip: ShardManifest | None, epoch: int) -> str | None:
    if tip is None:
        return NOBODY
    return None if tip.epoch == epoch else f"the epoch is {tip.epoch}, not {epoch}"


def _not_owned_by(tip: ShardManifest | None, log_id: str) -> str | None:
    owned = _existing(tip).open_range
    if owned is None:
        return "the shard is owned by nobody"
    return None if owned.log_id == log_id else f"its owner writes log {owned.log_id}, not {log_id}"


def _goes_back(tip: ShardManifest | None, cut: CheckpointCut) -> str | None:
    known = _existing(tip).checkpoint_slot
    return None if cut.slot >= known else f"there is a checkpoint of shard slot {known}, after {cut.slot}"


def _was_begun_below_the_floor(tip: ShardManifest | None, cut: CheckpointCut) -> str | None:
    floor = _existing(tip).head.orphan_floor
    if cut.object.base >= floor:
        return None
    return f"checkpoint {cut.object.name} was started below the orphan floor {floor}"


def _left(tip: ShardManifest, kept: set[CheckpointCut | None], delete_after_ms: int) -> list[Tombstone]:
    """Return tombstones of the tip's checkpoints that are not kept."""
    return [
        Tombstone(object=each.object, removed_in=tip.head.number + 1, delete_after_ms=delete_after_ms)
        for each in (tip.checkpoint, tip.previous_checkpoint)
        if each is not None and each not in kept
    ]


def _names(tip: ShardManifest, cut: CheckpointCut) -> bool:
    """Return whether the checkpoint is, or was, one of the shard's; only one operation adds it."""
    cuts = [each.object.name for each in (tip.checkpoint, tip.previous_checkpoint) if each is not None]
    return cut.object.name in cuts or any(each.object.name == cut.object.name for each in tip.tombstones)


def _existing(tip: ShardManifest | None) -> ShardManifest:
    if tip is None:
        raise ValueError("the operation was applied to a shard that nobody ever owned")
    return tip


class Superseded(NotOwner):
    """The error if the shard manifest carries another epoch than the one that this daemon claimed.

    `epoch` is that of this daemon. `owner_epoch`, `owner` (a daemon id) and `owner_address` (host:port) are the tip's.
    The owner is empty if the shard was given up.
    """

    def __init__(self, *, shard: int, epoch: int, owner_epoch: int, owner: str, owner_address: str) -> None:
        super().__init__(
            f"shard {shard}: epoch {epoch} is over, epoch {owner_epoch} belongs to "
            f"{owner or 'nobody'} at {owner_address or 'no address'}",
            owner_address=owner_address,
        )
        self.shard = shard
        self.epoch = epoch
        self.owner_epoch = owner_epoch
        self.owner = owner


class ShardLog(Protocol):
    """The port for reading the shard's manifests."""

    def read_tip(self, warm: commit.Tip[ShardManifest] | None = None) -> commit.Tip[ShardManifest] | None: ...


def existing_tip(shard_log: ShardLog, shard: int, warm: commit.Tip[ShardManifest] | None) -> commit.Tip[ShardManifest]:
    """Return the tip of a shard that was claimed before. Raises Corruption if there is none, and the store's errors."""
    tip = shard_log.read_tip(warm)
    if tip is None:
        raise Corruption(f"shard {shard}: its manifests have vanished")
    return tip


def check_owner(tip: commit.Tip[ShardManifest], *, epoch: int) -> None:
    """Raise Superseded unless the tip of the shard manifest carries `epoch`."""
    if tip.manifest.epoch != epoch:
        raise superseded_by(tip, epoch=epoch)


def check_not_superseded(shard_log: ShardLog, tip: commit.Tip[ShardManifest]) -> None:
    """Raise Superseded if another daemon has claimed the shard since `tip`. Raises the store's errors.

    To be called before anything that `tip` names counts as damaged: a later owner may delete what only `tip` names,
    also while it is read.
    """
    check_owner(existing_tip(shard_log, tip.manifest.shard, tip), epoch=tip.manifest.epoch)


def superseded_by(tip: commit.Tip[ShardManifest], *, epoch: int) -> Superseded:
    """Return the error for the owner, or would-be owner, of `epoch` if the tip names another."""
    manifest = tip.manifest
    return Superseded(
        shard=manifest.shard,
        epoch=epoch,
        owner_epoch=manifest.epoch,
        owner=manifest.owner,
        owner_address=manifest.address,
    )


class KnownTip:
    """The newest manifest of its own epoch that an owner knows: a warm start for the next commit or read.

    Used on one event loop. Code that has committed or read a manifest in this process reports it by `saw`; nothing else
    does. `newest` begins with the result of the claim.
    """

    def __init__(self, newest: commit.Tip[ShardManifest]) -> None:
        self.newest = newest

    def saw(self, tip: commit.Tip[ShardManifest]) -> None:
        """Take a manifest that is newer, or was read later. One of another epoch does not count."""
        known = self.newest
        if tip.manifest.epoch == known.manifest.epoch and (tip.number, tip.read_at) > (known.number, known.read_at):
            self.newest = tip
