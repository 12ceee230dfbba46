"""The operations on the manifest of a shard whose sections lie in the logs of daemons.

Owns: precondition and effect of each (L5, L7, L8), as `commit.Operation`s.
Does not own: the manifest as a value (`formats.manifest`), committing (`storage_backends.commit`), when any of them
is due, and what must have been stored before.

An operation is frozen before its first try: what it carries says how its daemon's log was at that time.

What an owner is told when its shard has become another's.

Owns: what the tip of its manifest says then; that its log was fenced says `daemon_log`.
Does not own: what follows; the engine drops the shard's state and answers with the new owner's address.

The newest manifest of a shard, by which its owner learns that the shard has become another's.

Owns: reading it, and what it says of who owns the shard.
Does not own: when it is looked at (`takeover`, the shard), and what follows.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from daemon.errors import Corruption, NotOwner
from daemon.group_commit.daemon_log import OwnLogEnd
from storage_backends import commit
from storage_backends.formats.log_slot_format import Head, LogSlotKind
from storage_backends.formats.manifest import CheckpointCut, LogRange, ShardManifest, Tombstone
from storage_backends.log_fence import Fence

NOBODY = "nobody ever owned the shard"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimShard:
    """A new owner, with the next epoch. `log_id`: its log, whose OPEN is certain; `after`: its last certain slot.

    `former`: what allows it to follow an owner: a fence of that owner's log or, for a claim from itself, the end of its
    own; None where nobody owns the shard. `former_is_dead`: no process of that owner is left to hand anything out.

    A tip whose open range names the claimant's log in this epoch is this claim, landed, whatever was answered.
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
        # An idle shard, which is not checkpointed again, would name the log of a former owner for ever.
        ranges = _above_previous(ranges, before)
        own = LogRange(
            log_id=self.log_id,
            epoch=self.epoch,
            after=self.after,
            through=None,
            # The checkpoint is above where the log has lost slots that nobody knew of: its numbers are used.
            first_slot=max(last_slot, before.checkpoint_slot) + 1,
            last_slot=None,
        )
        return dataclasses.replace(
            before,
            epoch=self.epoch,
            owner=self.owner,
            address=self.address,
            settled_epoch=self.epoch if self._settles(before) else before.settled_epoch,
            ranges=(*ranges, own),
        )

    def _settles(self, before: ShardManifest) -> bool:
        """Whether no owner before this one hands out anything any more."""
        orderly = self.former is None or isinstance(self.former, OwnLogEnd) or self.former.kind is LogSlotKind.CLOSE
        return before.settled_epoch == before.epoch and (orderly or self.former_is_dead)

    def landed(self, tip: ShardManifest) -> bool:
        return any((each.log_id, each.epoch) == (self.log_id, self.epoch) for each in tip.ranges)


def _is_proof(tip: ShardManifest, fence: Fence) -> bool:
    """Whether the fence stands behind every number that can have been emptied when `tip` was committed."""
    lowest = tip.lowest_after(fence.log_id)
    return lowest is not None and lowest < fence.number


def _closed(tip: ShardManifest, former: Fence | OwnLogEnd | None) -> tuple[tuple[LogRange, ...], int]:
    """(the ranges with the open one closed where the log ends, or dropped without a section; the last shard slot)."""
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
    """A checkpoint counts from now on, the one before it is kept, and ranges that neither needs go.

    The one before that may be deleted after `delete_after_ms` (Unix time). `settles`: the owners before this one hand
    out nothing any more.
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
    """Those with a section above the manifest's previous checkpoint, and the open one."""
    return tuple(each for each in ranges if each.last_slot is None or each.last_slot > manifest.previous_slot)


def _still_needed(manifest: ShardManifest) -> tuple[LogRange, ...]:
    """The ranges with a section above the previous checkpoint; the open one from where that was cut, if in its log."""
    previous = manifest.previous_checkpoint
    kept = _above_previous(manifest.ranges, manifest)
    owned = manifest.open_range
    if owned is None or previous is None or previous.log_id != owned.log_id:
        return kept
    return (*kept[:-1], dataclasses.replace(owned, after=max(owned.after, previous.at)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """The owners before this one have gone without a confirmation for so long that they hand out nothing any more."""

    epoch: int

    def precondition(self, tip: ShardManifest | None) -> str | None:
        return _not_of_epoch(tip, self.epoch)

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        return dataclasses.replace(_existing(tip), settled_epoch=self.epoch)

    def landed(self, tip: ShardManifest) -> bool:
        return tip.settled_epoch == self.epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeedLess:
    """An idle shard, both of whose checkpoints are at its last shard slot, needs no slot of its owner's log up to
    `after`, which is certain. `last_slot`: its last shard slot, in the owner's memory.
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
    """The owner hands the shard over: two checkpoints at its last shard slot, no ranges, owned by nobody.

    Its last section is certain and applied. What neither of the two is may be deleted after `delete_after_ms`.
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
class GiveBack:
    """A claimant that has written no section in its epoch gives the shard to nobody; all else is as it was.

    `own_head`: how far its own log goes for the shard, by its heads; None when it never had a section of it.
    """

    epoch: int
    log_id: str
    own_head: Head | None

    def precondition(self, tip: ShardManifest | None) -> str | None:
        if self.own_head is not None and self.own_head.epoch == self.epoch:
            return f"shard slot {self.own_head.last_slot} was written in epoch {self.epoch}: release the shard instead"
        reason = _not_of_epoch(tip, self.epoch) or _not_owned_by(tip, self.log_id)
        if reason is None and has_earlier_sections_in(self.log_id, _existing(tip)):
            # Nobody would hold the bound of a log that lives on.
            return f"sections of an earlier epoch lie in log {self.log_id}, too: close the log instead"
        return reason

    def apply(self, tip: ShardManifest | None) -> ShardManifest:
        tip = _existing(tip)
        return dataclasses.replace(tip, owner="", address="", ranges=tip.ranges[:-1])

    def landed(self, tip: ShardManifest) -> bool:
        return tip.epoch == self.epoch and not tip.owner


# ---- what several of them look at


def has_earlier_sections_in(log_id: str, manifest: ShardManifest) -> bool:
    """Whether the shard, which is owned, has sections of an earlier epoch in the log: it was claimed anew in it."""
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
    """Tombstones of the tip's checkpoints that are not kept."""
    return [
        Tombstone(object=each.object, removed_in=tip.head.number + 1, delete_after_ms=delete_after_ms)
        for each in (tip.checkpoint, tip.previous_checkpoint)
        if each is not None and each not in kept
    ]


def _names(tip: ShardManifest, cut: CheckpointCut) -> bool:
    """Whether the checkpoint is, or was, one of the shard's: it is brought in by one operation alone."""
    cuts = [each.object.name for each in (tip.checkpoint, tip.previous_checkpoint) if each is not None]
    return cut.object.name in cuts or any(each.object.name == cut.object.name for each in tip.tombstones)


def _existing(tip: ShardManifest | None) -> ShardManifest:
    if tip is None:
        raise ValueError("the operation was applied to a shard that nobody ever owned")
    return tip


class Superseded(NotOwner):
    """The shard manifest carries another epoch than the one this daemon claimed.

    `shard`; `epoch`: ours; `owner_epoch`, `owner` (a daemon id) and `owner_address` (host:port): the tip's. The
    owner is empty when the shard was given up.
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
    """What is read of the shard manifest's log."""

    def read_tip(self, warm: commit.Tip[ShardManifest] | None = None) -> commit.Tip[ShardManifest] | None: ...


def existing_tip(shard_log: ShardLog, shard: int, warm: commit.Tip[ShardManifest] | None) -> commit.Tip[ShardManifest]:
    """The tip of a shard that was claimed before. Raises Corruption when there is none, and the store's errors."""
    tip = shard_log.read_tip(warm)
    if tip is None:
        raise Corruption(f"shard {shard}: its manifests have vanished")
    return tip


def check_owner(tip: commit.Tip[ShardManifest], *, epoch: int) -> None:
    """Raises Superseded unless the tip of the shard manifest carries `epoch`."""
    if tip.manifest.epoch != epoch:
        raise superseded_by(tip, epoch=epoch)


def superseded_by(tip: commit.Tip[ShardManifest], *, epoch: int) -> Superseded:
    """What the owner, or would-be owner, of `epoch` is told when the shard belongs to whom `tip` names."""
    manifest = tip.manifest
    return Superseded(
        shard=manifest.shard,
        epoch=epoch,
        owner_epoch=manifest.epoch,
        owner=manifest.owner,
        owner_address=manifest.address,
    )


class KnownTip:
    """The newest manifest of its own epoch that an owner knows: a warm start for the next commit, or the next look.
    Used on one event loop.

    Whoever has committed or read a manifest in this process says so by `saw`: nothing else may tell of it. `newest`
    begins with what the claim ended with.
    """

    def __init__(self, newest: commit.Tip[ShardManifest]) -> None:
        self.newest = newest

    def saw(self, tip: commit.Tip[ShardManifest]) -> None:
        """Takes it where it is newer, or was read later. One of another epoch is not the owner's to go on from."""
        known = self.newest
        if tip.manifest.epoch == known.manifest.epoch and (tip.number, tip.read_at) > (known.number, known.read_at):
            self.newest = tip
