"""Reading a journal: one slot, and every slot from a given one up to the first that is absent.

Owns: reading slots ahead, and the checks between neighbours: no gap, no epoch below an earlier one.
Does not own: where reading begins, what the records do, and which slots were deleted since.
"""

from __future__ import annotations

import collections
import concurrent.futures
from typing import NamedTuple

from storage_backends import object_store
from storage_backends.formats import errors, journal, names

# On a remote store a slot takes a round trip; this many are under way at once.
READ_AHEAD_SLOTS = 16


class SlotDamaged(object_store.Damaged):
    """A slot cannot be read. `key`; `offset`: in its bytes, None when the store does not say."""

    def __init__(self, key: str, offset: int | None, detail: str) -> None:
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(key, f"the journal slot is damaged{place}: {detail}")
        self.offset = offset
        self.detail = detail


class Slot(NamedTuple):
    """A slot as it was read; its records in the order in which they are applied, those on topics not decoded yet."""

    header: journal.SlotHeader
    records: tuple[journal.StoredRecord, ...]
    deletions: tuple[journal.DeletionRecord, ...]
    size_bytes: int


def read_slot(store: object_store.ObjectStore, shard: int, slot: int) -> Slot | None:
    """None when it is absent. Raises SlotDamaged, and the store's errors."""
    key = names.journal_slot_key(shard, slot)
    try:
        body = store.get(key)
        header, records, deletions = journal.read_slot(body)
    except object_store.NotFound:
        return None
    except object_store.Damaged as error:
        raise SlotDamaged(key, None, error.reason) from error
    except errors.FormatError as error:
        raise SlotDamaged(key, error.offset, error.detail) from error
    if (header.shard, header.slot) != (shard, slot):
        raise SlotDamaged(key, 0, f"it is slot {header.slot} of shard {header.shard}")
    return Slot(header, records, deletions, len(body))


def read_tail(
    store: object_store.ObjectStore,
    shard: int,
    from_slot: int,
    *,
    executor: concurrent.futures.Executor,
    read_ahead_slots: int = READ_AHEAD_SLOTS,
) -> list[Slot]:
    """The slots `from_slot`, `from_slot` + 1, ... up to the first that is absent.

    An owner that still lives may write meanwhile: only a fence makes the end final. Raises SlotDamaged, Damaged for a
    gap or an epoch that falls, and the store's errors. `executor` must not be the one that runs this call.
    """
    slots: list[Slot] = []
    ahead: collections.deque[concurrent.futures.Future[Slot | None]] = collections.deque()
    next_slot = from_slot
    try:
        while True:
            while len(ahead) < read_ahead_slots:
                ahead.append(executor.submit(read_slot, store, shard, next_slot + len(ahead)))
            slot = ahead.popleft().result()
            if slot is None and any(later.result() is not None for later in ahead):
                # A living owner may have written this slot and a later one after the first look.
                slot = read_slot(store, shard, next_slot)
                if slot is None:
                    key = names.journal_slot_key(shard, next_slot)
                    raise object_store.Damaged(key, "it is missing though a later slot exists: the store has lost it")
                ahead.clear()
            if slot is None:
                return slots
            if slots:
                check_epochs(slots[-1].header, slot.header)
            slots.append(slot)
            next_slot += 1
    finally:
        for later in ahead:
            later.cancel()


def check_epochs(earlier: journal.SlotHeader, later: journal.SlotHeader) -> None:
    """Raises Damaged when the epoch falls from a slot to the next: a fence should have made that impossible."""
    if later.epoch < earlier.epoch:
        raise object_store.Damaged(
            names.journal_slot_key(later.shard, later.slot),
            f"slot {later.slot} of epoch {later.epoch} follows slot {earlier.slot} of epoch {earlier.epoch}: the store "
            "does not honour conditional writes",
        )
