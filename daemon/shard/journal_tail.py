"""Reads the end of a journal for whoever takes the shard over: what is wrong with it refuses the shard.

Owns: that damage is Corruption. Does not own: reading and checking slots (`storage_backends.journal_slots`), where
reading begins (`takeover`), what the records do (recovery).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator

from daemon.errors import Corruption
from storage_backends import journal_slots, object_store
from storage_backends.formats import slot_format
from storage_backends.journal_slots import READ_AHEAD
from storage_backends.journal_slots import Slot as Slot


class SlotDamaged(Corruption):
    """A slot cannot be read: its shard is refused. `key`; `offset`: in its bytes, None when the store does not say."""

    def __init__(self, key: str, offset: int | None, detail: str) -> None:
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(f"journal slot {key} is damaged{place}: {detail}")
        self.key = key
        self.offset = offset


def read_slot(store: object_store.ObjectStore, shard: int, slot: int) -> Slot | None:
    """None when it is absent. Raises SlotDamaged."""
    with _refused():
        return journal_slots.read_slot(store, shard, slot)


def read_tail(
    store: object_store.ObjectStore,
    shard: int,
    from_slot: int,
    *,
    executor: concurrent.futures.Executor,
    read_ahead: int = READ_AHEAD,
) -> list[Slot]:
    """The slots `from_slot`, `from_slot` + 1, ... up to the first that is absent.

    An owner that still lives may write meanwhile: only a fence makes the end final. Raises SlotDamaged, and Corruption
    for a gap or an epoch that falls; both refuse the shard. `executor` must not be the one that runs this call.
    """
    with _refused():
        return journal_slots.read_tail(store, shard, from_slot, executor=executor, read_ahead=read_ahead)


def check_epochs(earlier: slot_format.SlotHeader, later: slot_format.SlotHeader) -> None:
    """Raises Corruption when the epoch falls from a slot to the next: a fence should have made that impossible."""
    with _refused():
        journal_slots.check_epochs(earlier, later)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except journal_slots.SlotDamaged as error:
        raise SlotDamaged(error.key, error.offset, error.detail) from error
    except object_store.Damaged as error:
        raise Corruption(f"journal slot {error}") from error
