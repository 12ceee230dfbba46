"""Reading a journal: one slot, and every slot from a given one up to the first that is absent.

Owns: reading slots ahead, and the checks between neighbours: no gap, no epoch below an earlier one.
Does not own: where reading begins, what the records do, and which slots were deleted since.
"""

from __future__ import annotations

import collections
import concurrent.futures
from typing import NamedTuple

from storage_backends import object_store
from storage_backends.formats import format_errors, names, slot_format

# Portions of a tail that are under way at once. Where a read is a request a portion is one slot, which takes a round
# trip; elsewhere it is read by one call: to hand each slot from thread to thread would take longer than to read it.
READ_AHEAD = 16
PORTION_SLOTS = 64


class SlotDamaged(object_store.Damaged):
    """A slot cannot be read. `key`; `offset`: in its bytes, None when the store does not say."""

    def __init__(self, key: str, offset: int | None, detail: str) -> None:
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(key, f"the journal slot is damaged{place}: {detail}")
        self.offset = offset
        self.detail = detail


class Slot(NamedTuple):
    """A slot as it was read; its records in the order in which they are applied, those on topics not decoded yet."""

    header: slot_format.SlotHeader
    records: tuple[slot_format.StoredRecord, ...]
    deletions: tuple[slot_format.DeletionRecord, ...]
    size_bytes: int


def read_slot(store: object_store.ObjectStore, shard: int, slot: int) -> Slot | None:
    """None when it is absent. Raises SlotDamaged, and the store's errors."""
    found = read_run(store, shard, range(slot, slot + 1))
    return found[0] if found else None


def read_run(store: object_store.ObjectStore, shard: int, slots: range) -> list[Slot]:
    """The slots of a run, up to the first that is absent. Raises SlotDamaged, and the store's errors."""
    keys = [names.journal_slot_key(shard, slot) for slot in slots]
    try:
        bodies = store.get_run(keys)
    except object_store.Damaged as error:
        raise SlotDamaged(error.key, None, error.reason) from error
    return [_decoded(shard, slot, key, body) for slot, key, body in zip(slots, keys, bodies, strict=False)]


def _decoded(shard: int, slot: int, key: str, body: bytes) -> Slot:
    try:
        header, records, deletions = slot_format.read_slot(body)
    except format_errors.FormatError as error:
        raise SlotDamaged(key, error.offset, error.detail) from error
    if (header.shard, header.slot) != (shard, slot):
        raise SlotDamaged(key, 0, f"it is slot {header.slot} of shard {header.shard}")
    for topic_id in {record.topic_id for record in records}:
        if not names.is_topic_id(topic_id):
            raise SlotDamaged(key, slot_format.HEADER_BYTES, f"a record names topic id {topic_id!r}, which is none")
    return Slot(header, records, deletions, len(body))


def read_tail(
    store: object_store.ObjectStore,
    shard: int,
    from_slot: int,
    *,
    executor: concurrent.futures.Executor,
    read_ahead: int = READ_AHEAD,
    portion_slots: int | None = None,
) -> list[Slot]:
    """The slots `from_slot`, `from_slot` + 1, ... up to the first that is absent, in portions of `portion_slots`.

    An owner that still lives may write meanwhile: only a fence makes the end final. Raises SlotDamaged, Damaged for a
    gap or an epoch that falls, and the store's errors. `executor` must not be the one that runs this call.
    """
    portion = portion_slots or (1 if store.reads_are_requests else PORTION_SLOTS)
    slots: list[Slot] = []
    ahead: collections.deque[concurrent.futures.Future[list[Slot]]] = collections.deque()
    begun = next_slot = from_slot
    try:
        while True:
            while len(ahead) < read_ahead:
                ahead.append(executor.submit(read_run, store, shard, range(begun, begun + portion)))
                begun += portion
            read = ahead.popleft().result()
            if len(read) < portion and any(later.result() for later in ahead):
                # A living owner may have written the slot that was absent, and a later one, after the first look.
                missing = next_slot + len(read)
                written = read_slot(store, shard, missing)
                if written is None:
                    key = names.journal_slot_key(shard, missing)
                    raise object_store.Damaged(key, "it is missing though a later slot exists: the store has lost it")
                read.append(written)
                ahead.clear()
                begun = next_slot + len(read)
            elif len(read) < portion:
                return _continued(slots, read)
            _continued(slots, read)
            next_slot += len(read)
    finally:
        for later in ahead:
            later.cancel()


def _continued(slots: list[Slot], more: list[Slot]) -> list[Slot]:
    for slot in more:
        if slots:
            check_epochs(slots[-1].header, slot.header)
        slots.append(slot)
    return slots


def check_epochs(earlier: slot_format.SlotHeader, later: slot_format.SlotHeader) -> None:
    """Raises Damaged when the epoch falls from a slot to the next: a fence should have made that impossible."""
    if later.epoch < earlier.epoch:
        raise object_store.Damaged(
            names.journal_slot_key(later.shard, later.slot),
            f"slot {later.slot} of epoch {later.epoch} follows slot {earlier.slot} of epoch {earlier.epoch}: the store "
            "does not honour conditional writes",
        )
