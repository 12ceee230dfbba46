"""Fencing: lists that are old, numbers that are occupied or gone, answers that are lost, slots that are damaged."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator

import pytest

from storage_backends import log_fence, object_store
from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import NO_HEADS, LogSlotKind
from storage_backends.log_fence import CreateFence, Fence, ListHighest, ReadOne
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLog
from tests._support.fault_store import Fault, FaultStore, Script
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import FENCER, LOG_ID


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
