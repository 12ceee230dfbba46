"""Fencing: lists that are old, numbers that are occupied or gone, answers that are lost, slots that are damaged."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator

import pytest

from storage_backends import log_fence, object_store
from storage_backends.formats import format_errors, log_slot_format
from storage_backends.formats.log_slot_format import NO_HEADS, Head, LogSlotKind
from storage_backends.log_fence import CreateFence, Fence, ListHighest, ReadOne
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLog
from tests._support.fault_store import Fault, FaultStore, Script
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import FENCER, LOG_ID
from tests.storage_backends.formats._support import forging


class Log:
    """A log on a store that fails as `script` says. `fence`: with so many more tries."""

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self.script = Script()
        self.memory = MemoryStore()
        self.store = FaultStore(self.memory, self.script)
        self.slots = ObjectLog(self.store, LOG_ID, executor)
        self.owner = ObjectLog(self.memory, LOG_ID, executor)

    def write(self, through: int) -> None:
        for number in range(1, through + 1):
            self.owner.create(number, log_slots.slot(number))

    def fence(self, tries: int = 3, told: int = 0) -> Fence:
        return log_fence.fence_log(self.slots, FENCER, told=told, delays_s=iter([0.0] * tries), sleep=lambda _: None)

    def kinds(self) -> list[LogSlotKind]:
        read = (slot.body for slot in self.owner.read(0, 20))
        return [log_slot_format.identity_of(body).kind for body in read if body is not None]


@pytest.fixture
def log() -> Iterator[Log]:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield Log(executor)


def decoded(body: bytes) -> log_slot_format.LogSlot:
    return log_slot_format.decode_log_slot(body)


def test_a_fence_is_made_by_fencing_and_in_no_other_way() -> None:
    with pytest.raises(TypeError, match="in no other way"):
        Fence(LOG_ID, 3, LogSlotKind.FENCE, NO_HEADS, proof=object())


def test_a_fence_has_the_heads_of_the_slot_before_it(log: Log) -> None:
    log.write(3)
    fence = log.fence()
    assert (fence.number, fence.end, fence.kind) == (4, 3, LogSlotKind.FENCE)
    stored = log.owner.read(3, 4)[0].body
    assert stored is not None
    assert decoded(stored).header.heads == fence.heads == decoded(log_slots.data(3)).header.heads
    assert decoded(stored).header.writer == FENCER


def test_a_slot_that_lands_between_list_and_fence_is_before_the_fence() -> None:
    steps = log_fence.fencing(LOG_ID, FENCER)
    assert next(steps) == ListHighest()
    assert steps.send(2) == ReadOne(2)
    assert isinstance(steps.send(decoded(log_slots.data(2))), CreateFence)
    assert steps.send(False) == ReadOne(3)
    create = steps.send(decoded(log_slots.data(3)))
    assert isinstance(create, CreateFence)
    assert create.number == 4
    assert decoded(create.slot).header.heads == decoded(log_slots.data(3)).header.heads


def test_two_candidates_have_one_fence() -> None:
    steps = log_fence.fencing(LOG_ID, FENCER)
    next(steps)
    steps.send(2)
    steps.send(decoded(log_slots.data(2)))
    assert steps.send(False) == ReadOne(3)
    with pytest.raises(StopIteration) as ended:
        steps.send(decoded(log_slots.fence(3)))
    assert ended.value.value.number == 3


def test_a_slot_that_is_gone_was_deleted_by_an_owner_that_lives_and_the_log_is_listed_again() -> None:
    steps = log_fence.fencing(LOG_ID, FENCER)
    next(steps)
    assert steps.send(2) == ReadOne(2)
    assert steps.send(None) == ListHighest()
    assert steps.send(9) == ReadOne(9)


def test_a_slot_that_is_listed_as_the_highest_twice_and_absent_is_damage() -> None:
    steps = log_fence.fencing(LOG_ID, FENCER)
    next(steps)
    steps.send(2)
    steps.send(None)
    with pytest.raises(object_store.Damaged, match="slot 2 is listed as the highest, but absent"):
        steps.send(2)


def test_a_list_that_shows_nothing_once_is_read_again() -> None:
    steps = log_fence.fencing(LOG_ID, FENCER)
    next(steps)
    assert steps.send(None) == ListHighest()
    with pytest.raises(object_store.Damaged, match="the store has lost it"):
        steps.send(None)


def test_a_log_that_is_shorter_than_its_owner_has_told_is_damaged_and_not_fenced(log: Log) -> None:
    log.write(3)
    with pytest.raises(object_store.Damaged, match="lost slots after 3"):
        log.fence(told=4)
    assert LogSlotKind.FENCE not in log.kinds()
    assert log.fence(told=3).number == 4
    assert log.fence(told=4).number == 4
    with pytest.raises(object_store.Damaged, match="lost slots after 4"):
        log.fence(told=9)


def test_a_listing_that_lags_behind_what_the_owner_has_told_is_made_up_for() -> None:
    steps = log_fence.fencing(LOG_ID, FENCER, told=4)
    next(steps)
    assert steps.send(2) == ReadOne(2)
    assert steps.send(decoded(log_slots.data(2))) == ReadOne(4)
    assert steps.send(decoded(log_slots.data(4))) == ReadOne(4)
    create = steps.send(decoded(log_slots.data(4)))
    assert isinstance(create, CreateFence)
    assert create.number == 5


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.ANSWER_EXISTS])
def test_a_fence_whose_answer_is_lost_stands_once(log: Log, fault: Fault) -> None:
    log.write(2)
    log.script.plan("put_if_absent", fault)
    assert log.fence().number == 3
    assert log.kinds() == [LogSlotKind.OPEN, LogSlotKind.DATA, LogSlotKind.FENCE]


def test_a_fence_that_lands_late_stands_where_it_was_sent(log: Log) -> None:
    log.write(2)
    log.script.plan("put_if_absent", Fault.DELIVER_LATE)
    assert log.fence().number == 3
    assert log.store.deliver_late() == 0
    assert log.kinds() == [LogSlotKind.OPEN, LogSlotKind.DATA, LogSlotKind.FENCE]


def test_whoever_cannot_tell_whether_the_fence_stands_has_none(log: Log) -> None:
    log.write(2)
    log.script.plan("put_if_absent", Fault.FAIL_AFTER)
    log.script.plan("head", Fault.FAIL_BEFORE)
    with pytest.raises(object_store.StoreError):
        log.fence(tries=0)
    assert log.fence().number == 3


def test_where_the_newest_slot_is_damaged_nobody_can_fence(log: Log) -> None:
    log.write(2)
    body = bytearray(log_slots.data(3))
    body[30] ^= 1
    log.memory.put(f"logs/{LOG_ID}/{3:020d}", bytes(body))
    with pytest.raises(object_store.Damaged, match=f"logs/{LOG_ID}/{3:020d}"):
        log.fence()


def cut(log: Log, number: int, length: int = 0, sections: str | None = None) -> None:
    """Only so many bytes of the slot are left; `sections` is what is noted of them, by default the truth."""
    key = f"logs/{LOG_ID}/{number:020d}"
    body, metadata = log.memory.get_with_metadata(key)
    noted = dict(metadata) if sections is None else {**metadata, "sections": sections}
    log.memory.put(key, body[:length], metadata={name: value for name, value in noted.items() if value})


@pytest.mark.parametrize("length", [0, 20, 52, 83])
def test_a_newest_slot_that_is_cut_leaves_the_end_of_the_log_known_by_its_note(log: Log, length: int) -> None:
    log.write(3)
    cut(log, 3, length)
    fence = log.fence()
    assert (fence.number, dict(fence.heads)) == (4, {log_slots.SHARD: Head(log_slots.EPOCH, 2)})
    slot = log_fence.read_one(log.slots, 3)
    assert slot is not None
    assert slot.shards == slot.lost == (log_slots.SHARD,)
    with pytest.raises(format_errors.FormatError, match="do not show where it lies"):
        slot.section(log_slots.SHARD)


@pytest.mark.parametrize("sections", ["", "3:1", "3:1:1", "3:0:2", "3:1:2 x", "3:1:2,4:1:1", f"3:1:{1 << 63}", "4:1:0"])
def test_a_note_that_says_nothing_or_nonsense_leaves_the_end_unknown(log: Log, sections: str) -> None:
    log.write(3)
    cut(log, 3, sections=sections)
    with pytest.raises(object_store.Damaged, match=f"logs/{LOG_ID}/{3:020d}"):
        log.fence()


def test_a_slot_with_the_bytes_of_another_one_is_known_by_its_note(log: Log) -> None:
    log.write(3)
    key = f"logs/{LOG_ID}/{3:020d}"
    log.memory.put(key, log_slots.data(2), metadata=log.memory.head(key).metadata)
    assert dict(log.fence().heads) == {log_slots.SHARD: Head(log_slots.EPOCH, 2)}


def test_a_slot_of_another_version_is_not_taken_for_damage(log: Log) -> None:
    log.write(3)
    key = f"logs/{LOG_ID}/{3:020d}"
    body, metadata = log.memory.get_with_metadata(key)
    log.memory.put(key, forging.with_header_checksum(body[:4] + b"\x09\x00" + body[6:]), metadata=metadata)
    with pytest.raises(object_store.Damaged, match="format version 9 is not known"):
        log.fence()


@pytest.mark.parametrize("through", [1, 3])
@pytest.mark.parametrize("end", [LogSlotKind.FENCE, LogSlotKind.CLOSE])
def test_an_end_that_is_cut_is_the_end(log: Log, end: LogSlotKind, through: int) -> None:
    log.write(through)
    writer = FENCER if end is LogSlotKind.FENCE else None
    header = dataclasses.replace(decoded(log_slots.slot(through)).header, number=through + 1, kind=end, writer=writer)
    log.owner.create(through + 1, log_slot_format.encode_log_slot(header))
    whole = log.fence()
    cut(log, through + 1)
    assert log.fence() == whole


def test_an_open_that_is_cut_says_that_the_log_has_no_section(log: Log) -> None:
    log.write(1)
    cut(log, 1)
    fence = log.fence()
    assert (fence.number, dict(fence.heads)) == (2, {})


def test_a_section_that_is_damaged_does_not_keep_a_log_from_being_fenced(log: Log) -> None:
    log.write(2)
    body = bytearray(log_slots.data(3))
    body[-1] ^= 1
    log.memory.put(f"logs/{LOG_ID}/{3:020d}", bytes(body))
    assert log.fence().number == 4


def test_a_closed_log_has_its_end(log: Log) -> None:
    log.write(2)
    header = dataclasses.replace(decoded(log_slots.fence(3)).header, kind=LogSlotKind.CLOSE, writer=None)
    log.owner.create(3, log_slot_format.encode_log_slot(header))
    fence = log.fence()
    assert (fence.number, fence.kind) == (3, LogSlotKind.CLOSE)
