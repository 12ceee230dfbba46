"""Puts one journal slot and finds out what became of it (R1, R2).

The bytes are frozen before the first try. After any try whose outcome is not certain, HEAD and the commit id decide;
that the slot is absent proves nothing (the first try may still land), so only the same bytes may be tried again.

Owns: one try and the judgement of it; what a slot carries as metadata.
Does not own: trying again and giving up (`journal_writer`, `takeover`).
"""

from __future__ import annotations

import dataclasses
import enum

from daemon.errors import Corruption
from daemon.shard import ownership_lost
from storage_backends import object_store
from storage_backends.commit import COMMIT_ID
from storage_backends.formats import names, slot_format
from storage_backends.formats.shard_slot import ShardSlot

EPOCH = "epoch"
KIND = "kind"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlot:
    """A slot as it is put, the same at each try. `commit_id` is unique for this slot of this writer."""

    header: slot_format.SlotHeader
    body: bytes
    commit_id: str

    @property
    def key(self) -> str:
        return names.journal_slot_key(self.header.shard, self.header.slot)

    @property
    def metadata(self) -> dict[str, str]:
        return {COMMIT_ID: self.commit_id, EPOCH: str(self.header.epoch), KIND: self.header.kind.name.lower()}


class Outcome(enum.Enum):
    """What is known after a try. `CREATED`: by this try. `FOUND`: it is there, by this try or an earlier one.
    `ABSENT`: not there yet, and it may still land.
    """

    CREATED = enum.auto()
    FOUND = enum.auto()
    ABSENT = enum.auto()


class Occupied(Exception):
    """Another writer's slot is in the way. `slot`: its number; `holder_epoch`: who wrote it."""

    def __init__(self, slot: ShardSlot, holder_epoch: int) -> None:
        super().__init__(f"slot {slot} is held by epoch {holder_epoch}")
        self.slot = slot
        self.holder_epoch = holder_epoch


def try_once(store: object_store.ObjectStore, slot: FrozenSlot) -> Outcome:
    """One PUT, and a HEAD unless the store said plainly that it created the slot.

    Raises Occupied; and, when the outcome stays open because HEAD fails too, the store's error.
    """
    try:
        store.put_if_absent(slot.key, slot.body, metadata=slot.metadata)
    except object_store.StoreError:
        return judge(store, slot)
    return Outcome.CREATED


def judge(store: object_store.ObjectStore, slot: FrozenSlot) -> Outcome:
    """HEAD and the commit id decide. Raises Occupied, or the store's error when HEAD fails."""
    holder = holder_of(store, slot.header.shard, slot.header.slot)
    if holder is None:
        return Outcome.ABSENT
    if holder.commit_id == slot.commit_id:
        return Outcome.FOUND
    raise Occupied(slot.header.slot, holder.epoch)


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who wrote a slot, and of which kind it is, from its metadata alone."""

    commit_id: str
    epoch: int
    kind: slot_format.SlotKind


def holder_of(store: object_store.ObjectStore, shard: int, slot: int) -> Holder | None:
    """By HEAD; None when the slot is absent. Raises Corruption when its metadata is not that of a slot."""
    key = names.journal_slot_key(shard, slot)
    try:
        metadata = store.head(key).metadata
    except object_store.NotFound:
        return None
    except object_store.Damaged as error:
        raise Corruption(f"slot {error}") from error
    try:
        return Holder(metadata[COMMIT_ID], int(metadata[EPOCH]), slot_format.SlotKind[metadata[KIND].upper()])
    except (KeyError, ValueError):
        raise Corruption(f"slot {key} has the metadata {dict(metadata)}, which is not that of a slot") from None


def lost(header: slot_format.SlotHeader, occupied: Occupied) -> ownership_lost.Fenced | Corruption:
    """What it means for the owner that wrote `header` that a slot is occupied: the shard is lost.

    Only a later epoch can get there; anything else is a store that does not honour conditions.
    """
    if occupied.holder_epoch <= header.epoch:
        return Corruption(
            f"shard {header.shard}: slot {occupied.slot} is held by epoch {occupied.holder_epoch}, which is not later "
            f"than epoch {header.epoch} that writes here: the store does not honour conditional writes"
        )
    return ownership_lost.Fenced(
        shard=header.shard, slot=occupied.slot, epoch=header.epoch, holder_epoch=occupied.holder_epoch
    )
