"""A slot counts as written when that is certain, and nothing of an owner lands behind a successor's fence."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import pytest

from daemon.errors import Corruption, InvariantViolated, OutcomeUnknown, Unavailable
from daemon.shard import journal_tail, ownership_lost, slot_put
from daemon.shard.journal_writer import JournalWriter, WrittenSlot
from storage_backends import journal_slots, memory_store, object_store
from storage_backends.formats import names, slot_format
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.shard_slot import ShardSlot
from tests._support.fault_store import Fault, FaultStore, Script
from tests._support.virtual_clock import VirtualClock, settle
from tests._support.virtual_loop import InlineExecutor

T = TypeVar("T")
SHARD = 3


async def run(work: Callable[[], T]) -> T:
    return work()


@pytest.fixture(scope="module")
def reads() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        yield executor


def add_of(*entries: int) -> slot_format.AddRecord:
    columns = np.array(entries, np.uint64)
    return slot_format.AddRecord("a" * 32, 1, 0, Rows(columns + np.uint64(1000), columns, columns))


def put_slot(
    store: object_store.ObjectStore,
    slot: int,
    *,
    epoch: int,
    kind: slot_format.SlotKind = slot_format.SlotKind.DATA,
    shard: int = SHARD,
) -> None:
    records = (add_of(slot),) if kind is slot_format.SlotKind.DATA else ()
    header = slot_format.SlotHeader(shard, epoch, ShardSlot(slot), kind, len(records))
    frozen = slot_put.FrozenSlot(header, slot_format.encode_slot(header, records), f"by-epoch-{epoch}-{slot}")
    store.put_if_absent(names.journal_slot_key(SHARD, slot), frozen.body, metadata=frozen.metadata)


class ScriptedStore(FaultStore):
    """A store in memory with a script of faults. `bodies`: of all conditional PUTs that were tried."""

    def __init__(self) -> None:
        self.script = Script()
        super().__init__(memory_store.MemoryStore(), self.script)
        self.bodies: list[bytes] = []

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self.bodies.append(body)
        super().put_if_absent(key, body, metadata=metadata)


class Owner:
    """A writer of epoch 5 behind slot 9, with what it reported."""

    def __init__(self, store: object_store.ObjectStore, clock: VirtualClock, *, last_slot: int = 9) -> None:
        self.reported: list[WrittenSlot] = []
        ids = (f"commit-{number}" for number in itertools.count())
        self.writer = JournalWriter(
            store,
            shard=SHARD,
            epoch=5,
            last_slot=ShardSlot(last_slot),
            run=run,
            clock=clock.now,
            sleep=clock.sleep,
            jitter=lambda: 0.5,
            new_id=lambda: next(ids),
            written=self.reported.append,
        )


def stored(store: object_store.ObjectStore, slot: int) -> slot_format.SlotHeader:
    return slot_format.decode_header(store.get(names.journal_slot_key(SHARD, slot)))


async def test_slots_follow_each_other_and_hold_their_records() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    assert [await owner.writer.write([add_of(1, 2), add_of(3)]), await owner.writer.write([])] == [10, 11]
    slot = journal_tail.read_slot(store, SHARD, 10)
    assert slot is not None
    assert slot.header == slot_format.SlotHeader(SHARD, 5, ShardSlot(10), slot_format.SlotKind.DATA, 2)
    first = slot.records[0].decoded()
    assert isinstance(first, slot_format.AddRecord)
    assert first.rows.entry_id.tolist() == [1, 2]
    assert [(written.slot, written.tries, written.sent_at_s) for written in owner.reported] == [
        (10, 1, clock.now_s),
        (11, 1, clock.now_s),
    ]
    assert owner.reported[0].size_bytes == len(store.get(names.journal_slot_key(SHARD, 10)))


async def test_an_owner_whose_answer_was_lost_finds_its_own_slot_by_head() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    store.script.plan("put_if_absent", Fault.FAIL_AFTER)
    owner = Owner(store, clock)
    assert await owner.writer.write([add_of(1)]) == 10
    key = names.journal_slot_key(SHARD, 10)
    assert [(call.operation, call.key) for call in store.calls] == [("put_if_absent", key), ("head", key)]


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.REFUSE, Fault.DELIVER_LATE, Fault.ANSWER_EXISTS])
async def test_an_absent_slot_is_put_again_with_the_same_bytes_and_a_growing_delay(fault: Fault) -> None:
    store, clock = ScriptedStore(), VirtualClock()
    store.script.plan("put_if_absent", fault, times=8)
    owner = Owner(store, clock)
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await clock.advance(60.0)
    assert await writing == 10
    # Steps of 50 ms doubling up to 2 s, times 0.75 at a jitter of a half.
    assert clock.slept_s == pytest.approx([0.0375, 0.075, 0.15, 0.3, 0.6, 1.2, 1.5, 1.5])
    assert len(store.bodies) == 9
    assert len(set(store.bodies)) == 1
    assert owner.reported[0].tries == 9


async def test_a_put_that_lands_after_all_is_found_and_not_doubled() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    store.script.plan("put_if_absent", Fault.DELIVER_LATE)
    owner = Owner(store, clock)
    sent_at_s = clock.now_s
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    store.deliver_late()
    await clock.advance(1.0)
    assert await writing == 10
    assert await owner.writer.write([add_of(2)]) == 11
    assert owner.reported[0].sent_at_s == sent_at_s


async def test_a_slot_that_a_later_try_created_confirms_the_epoch_from_that_try_on() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    store.script.plan("put_if_absent", Fault.FAIL_BEFORE)
    owner = Owner(store, clock)
    sent_at_s = clock.now_s
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await clock.advance(1.0)
    await writing
    assert owner.reported[0].sent_at_s == pytest.approx(sent_at_s + 0.0375)
    assert owner.reported[0].seconds == pytest.approx(0.0375)


async def test_without_head_the_shard_stalls_and_logs_why_once(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    store.script.plan("put_if_absent", Fault.FAIL_AFTER)
    store.script.plan("head", Fault.FAIL_BEFORE)
    sent_at_s = clock.now_s
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    store.go_down()
    await clock.advance(10.0)
    assert not writing.done()
    (stalls,) = (each for each in caplog.messages if "stalls" in each)
    assert "the store is not reached" in stalls
    store.come_back()
    await clock.advance(2.0)
    assert await writing == 10
    assert owner.reported[0].sent_at_s == sent_at_s
    assert "is certain after" in caplog.messages[-1]


async def test_an_owner_that_meets_a_fence_is_fenced_and_writes_nothing_more() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    put_slot(store, 10, epoch=6, kind=slot_format.SlotKind.FENCE)
    with pytest.raises(ownership_lost.Fenced) as fenced:
        await owner.writer.write([add_of(1)])
    assert (fenced.value.slot, fenced.value.epoch, fenced.value.holder_epoch) == (10, 5, 6)
    with pytest.raises(Unavailable):
        await owner.writer.write([add_of(1)])
    assert [header.epoch for header in [stored(store, 10)]] == [6]
    assert owner.reported == []


@pytest.mark.parametrize("holder_epoch", [4, 5])
async def test_a_slot_held_by_an_epoch_that_is_not_later_is_a_store_that_ignores_conditions(holder_epoch: int) -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    put_slot(store, 10, epoch=holder_epoch)
    with pytest.raises(Corruption, match="does not honour conditional writes"):
        await owner.writer.write([add_of(1)])


async def test_a_slot_that_was_replayed_and_deleted_between_two_tries_does_not_count_as_written() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    store.script.plan("put_if_absent", Fault.FAIL_AFTER)
    store.script.plan("head", Fault.FAIL_BEFORE)
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    # A successor finds slot 10, fences slot 11, covers slot 10 by a checkpoint and deletes it.
    put_slot(store, 11, epoch=6, kind=slot_format.SlotKind.FENCE)
    store.delete(names.journal_slot_key(SHARD, 10))
    await clock.advance(1.0)
    with pytest.raises(ownership_lost.Fenced):
        await writing
    assert owner.reported == []


async def test_only_one_slot_is_written_at_a_time() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    store.script.plan("put_if_absent", Fault.FAIL_BEFORE)
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    with pytest.raises(InvariantViolated):
        await owner.writer.write([add_of(2)])
    await clock.advance(1.0)
    assert await writing == 10


async def test_closing_ends_a_pending_write_as_unknown_and_refuses_the_next() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    store.script.plan("put_if_absent", Fault.DELIVER_LATE, times=100)
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    owner.writer.close()
    with pytest.raises(OutcomeUnknown):
        await writing
    with pytest.raises(Unavailable):
        await owner.writer.write([add_of(2)])
    owner.writer.close()


async def test_a_cancelled_write_is_never_followed_by_other_bytes_for_its_slot() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    store.script.plan("put_if_absent", Fault.DELIVER_LATE)
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    writing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await writing
    with pytest.raises(Unavailable):
        await owner.writer.write([add_of(2)])
    assert len(set(store.bodies)) == 1


async def test_slots_are_encoded_and_put_away_from_the_loop() -> None:
    store, clock = ScriptedStore(), VirtualClock()
    owner = Owner(store, clock)
    held = asyncio.Event()

    async def hold(work: Callable[[], T]) -> T:
        await held.wait()
        return work()

    owner.writer._run = hold
    writing = asyncio.create_task(owner.writer.write([add_of(1)]))
    await settle()
    assert not store.calls
    held.set()
    assert await writing == 10


# Reading


def read(store: object_store.ObjectStore, executor: concurrent.futures.Executor, *, ahead: int = 4) -> list[int]:
    slots = journal_tail.read_tail(store, SHARD, 4, executor=executor, read_ahead=ahead)
    return [slot.header.slot for slot in slots]


@pytest.mark.parametrize("ahead", [1, 2, 4, 16])
def test_the_tail_is_read_up_to_the_first_absent_slot(reads: concurrent.futures.Executor, ahead: int) -> None:
    store = memory_store.MemoryStore()
    for slot in range(1, 24):
        put_slot(store, slot, epoch=1)
    assert read(store, reads, ahead=ahead) == list(range(4, 24))


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("portion", [1, 4, 5, 19, 20, 64])
def test_portions_change_nothing_of_a_tail(reads: concurrent.futures.Executor, portion: int, ahead: int) -> None:
    store = memory_store.MemoryStore()
    for slot in range(1, 24):
        put_slot(store, slot, epoch=1)
    tail = journal_slots.read_tail(store, SHARD, 4, executor=reads, read_ahead=ahead, portion_slots=portion)
    assert [slot.header.slot for slot in tail] == list(range(4, 24))


@pytest.mark.parametrize("portion", [1, 3, 4])
def test_a_slot_that_is_missing_between_portions_is_damage(reads: concurrent.futures.Executor, portion: int) -> None:
    store = memory_store.MemoryStore()
    for slot in (4, 5, 6, 8, 9, 10, 11, 12):
        put_slot(store, slot, epoch=1)
    with pytest.raises(object_store.Damaged, match="it is missing though a later slot exists") as damaged:
        journal_slots.read_tail(store, SHARD, 4, executor=reads, portion_slots=portion)
    assert damaged.value.key == names.journal_slot_key(SHARD, 7)


@pytest.mark.parametrize("portion", [1, 3, 4])
def test_slots_that_a_living_owner_writes_meanwhile_are_no_gap(portion: int) -> None:
    class Written(memory_store.MemoryStore):
        """The slots from 7 on are written right after the first look for slot 7."""

        def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
            try:
                return super().get_with_metadata(key)
            except object_store.NotFound:
                if key == names.journal_slot_key(SHARD, 7):
                    for slot in range(7, 15):
                        put_slot(self, slot, epoch=1)
                raise

    store = Written()
    for slot in (4, 5, 6):
        put_slot(store, slot, epoch=1)
    tail = journal_slots.read_tail(store, SHARD, 4, executor=InlineExecutor(), read_ahead=3, portion_slots=portion)
    assert [slot.header.slot for slot in tail] == list(range(4, 15))


def test_an_empty_journal_has_an_empty_tail(reads: concurrent.futures.Executor) -> None:
    assert read(memory_store.MemoryStore(), reads) == []


def test_fences_are_part_of_the_tail(reads: concurrent.futures.Executor) -> None:
    store = memory_store.MemoryStore()
    put_slot(store, 4, epoch=1)
    put_slot(store, 5, epoch=3, kind=slot_format.SlotKind.FENCE)
    put_slot(store, 6, epoch=3)
    assert read(store, reads) == [4, 5, 6]


def test_a_damaged_slot_refuses_its_shard_by_name_and_offset(reads: concurrent.futures.Executor) -> None:
    store = memory_store.MemoryStore()
    for slot in (4, 5, 6):
        put_slot(store, slot, epoch=1)
    key = names.journal_slot_key(SHARD, 5)
    body = bytearray(store.get(key))
    body[-1] ^= 1
    store.put(key, bytes(body))
    with pytest.raises(journal_tail.SlotDamaged) as damaged:
        read(store, reads)
    assert damaged.value.key == key
    assert damaged.value.offset is not None
    assert f"{key} is damaged at byte {damaged.value.offset}" in str(damaged.value)


def test_a_slot_that_ends_too_early_is_damaged(reads: concurrent.futures.Executor) -> None:
    store = memory_store.MemoryStore()
    put_slot(store, 4, epoch=1)
    key = names.journal_slot_key(SHARD, 4)
    body = store.get(key)
    for size_bytes in range(len(body)):
        store.put(key, body[:size_bytes])
        with pytest.raises(journal_tail.SlotDamaged):
            read(store, reads)


def test_a_slot_under_the_name_of_another_is_damaged(reads: concurrent.futures.Executor) -> None:
    store = memory_store.MemoryStore()
    put_slot(store, 4, epoch=1, shard=SHARD + 1)
    with pytest.raises(journal_tail.SlotDamaged, match=f"it is slot 4 of shard {SHARD + 1}"):
        read(store, reads)


@pytest.mark.parametrize("missing", [4, 5, 7])
def test_a_slot_that_the_store_lost_is_not_taken_for_the_end(reads: concurrent.futures.Executor, missing: int) -> None:
    store = memory_store.MemoryStore()
    for slot in range(4, 9):
        if slot != missing:
            put_slot(store, slot, epoch=1)
    with pytest.raises(Corruption, match=f"{missing:020d}: it is missing"):
        read(store, reads)


def test_an_epoch_that_falls_is_a_store_that_ignores_conditions(reads: concurrent.futures.Executor) -> None:
    store = memory_store.MemoryStore()
    put_slot(store, 4, epoch=3)
    put_slot(store, 5, epoch=2)
    with pytest.raises(Corruption, match="slot 5 of epoch 2 follows slot 4 of epoch 3"):
        read(store, reads)


def test_a_slot_written_while_the_tail_is_read_is_no_gap(reads: concurrent.futures.Executor) -> None:
    class Living(memory_store.MemoryStore):
        """Its owner writes slots 5 and 6 right after slot 5 was looked for."""

        def get_with_metadata(self, key: str) -> object:  # type: ignore[override]
            try:
                return super().get_with_metadata(key)
            except object_store.NotFound:
                if key == names.journal_slot_key(SHARD, 5):
                    put_slot(self, 5, epoch=1)
                    put_slot(self, 6, epoch=1)
                raise

    store = Living()
    put_slot(store, 4, epoch=1)
    with concurrent.futures.ThreadPoolExecutor(1) as in_order:
        assert read(store, in_order) == [4, 5, 6]
