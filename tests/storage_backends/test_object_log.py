"""A log of objects: what its owner deletes, what anybody else looks at first, and what cannot be a slot."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest

from storage_backends import object_store
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, SlotNote
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLog, ObjectLogs
from tests._support.fault_store import Fault, FaultStore, Script
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import LOG_ID


class Root:
    """A log of six slots on a store that fails as `script` says, in its owner's hand and in another's."""

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self.script = Script()
        self.store = FaultStore(MemoryStore(), self.script)
        self.logs = ObjectLogs(self.store, executor)
        self.owner = self.logs.log(LOG_ID)
        self.other = self.logs.log(LOG_ID)
        for number in range(1, 7):
            self.owner.create(number, log_slots.slot(number))

    def stored(self) -> list[int]:
        return [slot.number for slot in self.other.read(0, 20)]

    def calls(self, operation: str) -> int:
        return sum(call.operation == operation for call in self.store.calls)


@pytest.fixture
def root() -> Iterator[Root]:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        yield Root(executor)


def test_an_owner_deletes_each_of_its_numbers_once_and_looks_at_none(root: Root) -> None:
    root.owner.delete_through(2)
    root.owner.delete_through(2)
    root.owner.delete_through(4)
    assert root.stored() == [5, 6]
    assert (root.calls("delete"), root.calls("head"), root.calls("list")) == (4, 0, 0)


def test_a_fence_in_an_emptied_number_stays_when_a_deletion_is_repeated(root: Root) -> None:
    """The answer of a deletion was lost, and a fencer whose list is old put its fence there."""
    root.script.plan("delete", Fault.FAIL_AFTER, key_part=f"{3:020d}")
    with pytest.raises(object_store.StoreUnavailable):
        root.owner.delete_through(4)
    root.other.create(3, log_slots.fence(3))
    root.owner.delete_through(4)
    assert root.stored() == [3, 5, 6]
    found = root.owner.head(3)
    assert found is not None
    assert found.kind is LogSlotKind.FENCE


def test_whoever_is_not_the_owner_looks_at_what_it_deletes(root: Root) -> None:
    root.other.delete_through(3)
    assert root.stored() == [4, 5, 6]
    assert root.calls("head") == 3


@pytest.mark.parametrize("log", ["owner", "other"])
def test_the_highest_slot_stays(root: Root, log: str) -> None:
    deleting: ObjectLog = getattr(root, log)
    with pytest.raises(ValueError, match="slot 6 of log"):
        deleting.delete_through(6)
    assert root.stored() == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_a_slot_is_damage(root: Root) -> None:
    root.store.put(f"logs/{LOG_ID}/{7:020d}", b"no metadata")
    with pytest.raises(object_store.Damaged, match="is not that of a log slot"):
        root.owner.head(7)


def test_the_sections_of_a_slot_are_noted_beside_it(root: Root) -> None:
    assert root.other.noted(6) == SlotNote(
        log_slot_format.identity_of(log_slots.data(6)), {log_slots.SHARD: Head(log_slots.EPOCH, 5)}
    )
    root.other.create(7, log_slots.fence(7))
    assert root.other.noted(7) == SlotNote(log_slot_format.identity_of(log_slots.fence(7)), None)
    assert root.other.noted(8) is None


def test_more_sections_than_metadata_have_room_for_are_not_noted(root: Root) -> None:
    heads = {shard: Head(names.NUMBER_MAX, names.NUMBER_MAX) for shard in range(4096)}
    for number, shards in ((7, 40), (8, 4096)):
        of = {shard: heads[shard] for shard in range(shards)}
        header = LogSlotHeader(log_id=LOG_ID, number=number, kind=LogSlotKind.DATA, heads=of)
        root.owner.create(number, log_slot_format.encode_log_slot(header, dict.fromkeys(of, b"section")))
        note = root.other.noted(number)
        assert note is not None
        assert note.sections == (of if shards == 40 else None)


def test_what_has_no_name_of_a_slot_is_none_and_is_named(root: Root) -> None:
    foreign = [f"logs/{LOG_ID}/notes", "logs/notes", f"logs/{LOG_ID}/{'9' * 20}", "logs/x/00000000000000000001"]
    for key in foreign:
        root.store.put(key, b"")
    assert root.owner.highest() == 6
    assert root.owner.numbers() == [1, 2, 3, 4, 5, 6]
    assert root.logs.log_ids() == {LOG_ID}
    assert sorted(root.logs.foreign()) == sorted(foreign)
