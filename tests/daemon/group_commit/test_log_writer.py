"""Writing the own log through a store that fails: what is certain, what it confirms, and what is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest

from daemon.errors import Corruption, InvariantViolated, OutcomeUnknown, Unavailable
from daemon.group_commit.daemon_log import CertainSlot, Encoded, LogCursor, LogLost, LogWriter, SlotDraft
from storage_backends import crash_points, log_fence
from storage_backends.formats.log_slot_format import Head
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLog
from tests._support.fault_store import Fault, FaultStore, Script
from tests.daemon.group_commit._support.log_walk import AtOnce
from tests.storage_backends._support import log_slots
from tests.storage_backends._support.log_slots import FENCER, LOG_ID, OWNER

T = TypeVar("T")
SHARD = 0


def key(number: int) -> str:
    return f"logs/{LOG_ID}/{number:020d}"


class Daemon:
    """An owner on a store that fails as `script` says; its clock counts the questions that it is asked."""

    def __init__(self) -> None:
        self.script = Script()
        self.memory = MemoryStore()
        self.store = FaultStore(self.memory, self.script)
        self.own = LogCursor(LOG_ID, OWNER)
        self.other = ObjectLog(self.memory, LOG_ID, AtOnce())
        self.ticks = itertools.count(1)
        self.slept = 0
        self.before_sleep: Callable[[], None] = lambda: None
        self.writer = LogWriter(
            ObjectLog(self.store, LOG_ID, AtOnce()),
            self.own,
            run=self.run,
            clock=lambda: float(next(self.ticks)),
            sleep=self.sleep,
            jitter=lambda: 0.5,
        )

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.before_sleep()
        await asyncio.sleep(0)

    async def open(self) -> Daemon:
        await self.writer.write(self.own.open())
        self.own.begin(SHARD, Head(1, 0))
        return self

    def filling(self) -> SlotDraft:
        return self.own.fill({SHARD: lambda head: f"section {head.last_slot}".encode()})

    async def write(self) -> Encoded[CertainSlot]:
        return await self.writer.write(self.filling())

    def fence(self) -> None:
        log_fence.fence_log(self.other, FENCER, delays_s=iter(()), sleep=lambda _: None)


class Crash(Exception):
    """The process has died."""


@pytest.mark.parametrize(("point", "lands"), [("log.before_put", False), ("log.after_put", True)])
async def test_a_crash_around_the_put_leaves_the_slot_or_none_and_the_fence_tells_which(
    point: str, lands: bool
) -> None:
    daemon = await Daemon().open()

    def crash(name: str) -> None:
        if name == point:
            raise Crash

    with crash_points.intercepted(crash), pytest.raises(Crash):
        await daemon.write()
    fence = log_fence.fence_log(daemon.other, FENCER, delays_s=iter(()), sleep=lambda _: None)
    assert (fence.number, fence.heads) == ((3, {SHARD: Head(1, 1)}) if lands else (2, {}))


async def test_slots_are_written_one_behind_the_other() -> None:
    daemon = await Daemon().open()
    first, second = await daemon.write(), await daemon.write()
    assert first.slot is not None
    assert second.slot is not None
    assert [first.slot.slot.number, second.slot.slot.number] == [2, 3]
    assert (second.slot.copies, daemon.slept) == (1, 0)
    assert daemon.own.last_certain == daemon.other.highest() == 3


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.ANSWER_EXISTS, Fault.DELIVER_LATE])
async def test_a_slot_whose_answer_is_lost_is_certain_once_and_confirms_no_later_than_it_may(fault: Fault) -> None:
    daemon = await Daemon().open()
    daemon.script.plan("put_if_absent", fault)
    begun_at_s = next(daemon.ticks)
    certain = (await daemon.write()).slot
    assert certain is not None
    assert certain.confirmed_at_s > begun_at_s
    assert certain.copies == (1 if fault is Fault.FAIL_AFTER else 2)
    daemon.store.deliver_late()
    assert [slot.body for slot in daemon.other.read(1, 9)] == [certain.slot.body]


async def test_a_slot_that_is_found_confirms_the_time_of_its_first_copy() -> None:
    daemon = await Daemon().open()
    daemon.script.plan("put_if_absent", Fault.FAIL_AFTER)
    daemon.script.plan("head", Fault.FAIL_BEFORE, times=3)
    certain = (await daemon.write()).slot
    assert certain is not None
    assert daemon.slept == 3
    assert certain.confirmed_at_s < next(daemon.ticks) - certain.seconds / 2


async def test_the_owner_meets_a_fence_in_the_place_of_its_slot() -> None:
    daemon = await Daemon().open()
    daemon.fence()
    with pytest.raises(LogLost, match="was ended at slot 2"):
        await daemon.write()
    with pytest.raises(Unavailable):
        await daemon.writer.write(LogCursor(LOG_ID, OWNER).open())


async def test_a_slot_that_landed_unseen_before_a_fence_and_was_collected_is_lost_when_it_is_created_again() -> None:
    daemon = await Daemon().open()
    daemon.script.plan("put_if_absent", Fault.DELIVER_LATE)

    def take_over() -> None:
        daemon.store.deliver_late()
        daemon.fence()
        daemon.memory.delete(key(2))

    daemon.before_sleep = take_over
    with pytest.raises(LogLost, match="was ended at slot 3") as lost:
        await daemon.write()
    assert lost.value.fence == 3


async def test_a_copy_that_lands_behind_the_list_of_a_fencer_is_before_its_fence_and_after_the_fence_never() -> None:
    daemon = await Daemon().open()
    daemon.script.plan("put_if_absent", Fault.DELIVER_LATE)
    daemon.before_sleep = daemon.fence
    with pytest.raises(LogLost, match="slot 2"):
        await daemon.write()
    assert daemon.store.deliver_late() == 0
    assert daemon.other.highest() == 2


async def test_a_slot_of_which_nothing_can_be_encoded_is_not_sent() -> None:
    daemon = await Daemon().open()

    def refuse(head: Head) -> bytes:
        raise OverflowError(f"shard slot {head.last_slot}")

    written = await daemon.writer.write(daemon.own.fill({SHARD: refuse}))
    assert written.slot is None
    assert list(written.unencodable) == [SHARD]
    assert (await daemon.write()).slot is not None


async def test_a_probe_confirms_and_a_fence_ends_it() -> None:
    daemon = await Daemon().open()
    before = next(daemon.ticks)
    confirmed_at_s = await daemon.writer.probe()
    assert confirmed_at_s is not None
    assert confirmed_at_s > before
    daemon.fence()
    with pytest.raises(LogLost, match="slot 2"):
        await daemon.writer.probe()


async def test_no_probe_counts_while_a_slot_is_uncertain() -> None:
    daemon = await Daemon().open()
    daemon.filling()
    with pytest.raises(InvariantViolated, match="proves nothing"):
        await daemon.writer.probe()


async def test_a_slot_that_nobody_can_have_written_is_a_store_that_breaks_its_promises() -> None:
    daemon = await Daemon().open()
    daemon.memory.put_if_absent(key(2), log_slots.data(2), metadata={"kind": "data", "fingerprint": "0000002a"})
    with pytest.raises(Corruption, match="does not honour conditional writes"):
        await daemon.write()


async def test_a_writer_that_is_closed_leaves_its_slot_unknown() -> None:
    daemon = await Daemon().open()
    daemon.store.go_down()
    waits = asyncio.Event()
    daemon.before_sleep = waits.set
    writing = asyncio.ensure_future(daemon.write())
    await waits.wait()
    daemon.writer.close()
    with pytest.raises(OutcomeUnknown, match="may or may not be durable"):
        await writing
    assert not daemon.own.rests
