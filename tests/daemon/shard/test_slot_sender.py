"""One sender writes what several shards have staged; what goes wrong in one of them is that one's alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from daemon.errors import NotOwner, OutcomeUnknown, Unavailable
from daemon.shard.confirmation import Confirmation
from daemon.shard.shard_staging import ShardStaging
from daemon.shard.slot_sender import ANSWER_UNCONFIRMED_S, Section, SlotSender, SlotWriter
from daemon.topic_terms.topic_staging import STALL_ANSWER_S
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.shard_slot import ShardSlot, next_after
from storage_backends.formats.slot_format import AddRecord, DeletionRecord, Record
from tests._support.virtual_clock import VirtualClock, settle

LINGER_S = 0.05
# The first slot of each shard.
FIRST = {0: ShardSlot(10), 1: ShardSlot(70)}


def add_of(*entries: int) -> AddRecord:
    entry_id = np.array(entries, np.uint64)
    return AddRecord("id", 1, 0, Rows(np.full_like(entry_id, 1_000), np.full_like(entry_id, 1), entry_id))


class Log(SlotWriter):
    """Holds each slot until it is let go. `written`: which shards each slot had, and how many rows of each."""

    def __init__(self) -> None:
        self.written: list[dict[int, int]] = []
        self.may_land = asyncio.Semaphore(0)
        self.broken: Exception | None = None
        self._next = dict(FIRST)

    async def write(self, sections: Sequence[Section]) -> Sequence[ShardSlot]:
        self.written.append(
            {section.shard: sum(record.row_count for record in section.records) for section in sections}
        )
        await self.may_land.acquire()
        if self.broken is not None:
            raise self.broken
        slots = [self._next[section.shard] for section in sections]
        self._next.update((section.shard, next_after(slot)) for section, slot in zip(sections, slots, strict=True))
        return slots

    async def let_land(self) -> None:
        self.may_land.release()
        await settle()


class Confirmed(Confirmation):
    """Fresh until a test says otherwise; then each wait for a confirmation is held."""

    def __init__(self) -> None:
        self.fresh = True
        self.held = asyncio.Event()

    def fresh_within(self, seconds: float) -> bool:
        assert seconds == ANSWER_UNCONFIRMED_S
        return self.fresh

    async def confirm_after(self, after_s: float) -> None:
        if not self.fresh:
            await self.held.wait()


class Shard:
    """`applied`: the slots, and how many rows of each."""

    def __init__(self, number: int, sender: SlotSender, confirmation: Confirmation, clock: VirtualClock) -> None:
        self.applied: list[tuple[int, int]] = []
        self.failed: list[Exception] = []
        self.breaks = False
        self.staging = ShardStaging(
            number,
            sender,
            confirmation,
            clock=clock.now,
            slot_bytes_max=4_000,
            applied=self._apply,
            failed=self.failed.append,
        )

    def _apply(self, slot: ShardSlot, records: Sequence[Record], deletions: Sequence[DeletionRecord]) -> None:
        if self.breaks:
            raise ValueError("a row is waiting twice")
        self.applied.append((slot, sum(record.row_count for record in records)))


class Machine:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = Log()
        self.confirmation = Confirmed()
        self.sender = SlotSender(
            self.log, self.confirmation, clock=self.clock.now, sleep=self.clock.sleep, linger_s=LINGER_S
        )
        self.one, self.two = (Shard(number, self.sender, self.confirmation, self.clock) for number in FIRST)
        self.running = asyncio.create_task(self.sender.run())


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    made = Machine()
    yield made
    made.running.cancel()
    with contextlib.suppress(asyncio.CancelledError, NotOwner):
        await made.running


async def test_what_shards_stage_while_a_slot_is_written_is_one_slot_and_each_hears_its_own_number(
    machine: Machine,
) -> None:
    first = machine.one.staging.stage(add_of(1))
    await settle()
    waiting = [machine.two.staging.stage(add_of(1, 2)), machine.one.staging.stage(add_of(2))]
    waiting.append(machine.two.staging.stage(add_of(3)))
    await machine.log.let_land()
    assert first.result() == 10
    assert not any(each.done() for each in waiting)
    await machine.clock.advance(LINGER_S)
    await machine.log.let_land()
    assert [each.result() for each in waiting] == [70, 11, 70]
    assert machine.log.written == [{0: 1}, {1: 3, 0: 1}]
    assert (machine.one.applied, machine.two.applied) == ([(10, 1), (11, 1)], [(70, 3)])


async def test_what_nobody_awaits_of_one_shard_rides_with_the_slot_of_another(machine: Machine) -> None:
    unawaited = machine.one.staging.stage(add_of(1), awaited=False)
    await settle()
    assert machine.log.written == []
    _ = machine.two.staging.stage(add_of(1))
    await machine.log.let_land()
    assert machine.log.written == [{0: 1, 1: 1}]
    assert unawaited.done()


async def test_a_shard_with_more_than_a_slot_takes_part_in_the_next_one_which_waits_for_nobody(
    machine: Machine,
) -> None:
    many = [machine.one.staging.stage(add_of(*range(first, first + 150))) for first in range(0, 450, 150)]
    _ = machine.two.staging.stage(add_of(1))
    for _ in range(2):
        await machine.log.let_land()
    await machine.clock.advance(LINGER_S)
    await machine.log.let_land()
    assert machine.log.written == [{0: 150, 1: 1}, {0: 150}, {0: 150}]
    assert machine.clock.slept_s == [LINGER_S], "before the last one alone, which had room"
    assert [each.result() for each in many] == [10, 11, 12]


async def test_a_slot_that_cannot_be_applied_costs_its_shard_and_the_others_go_on(machine: Machine) -> None:
    machine.one.breaks = True
    lost, kept = machine.one.staging.stage(add_of(1)), machine.two.staging.stage(add_of(1))
    await machine.log.let_land()
    assert kept.result() == 70
    assert isinstance(lost.exception(), Unavailable)
    assert [str(error) for error in machine.one.failed] == ["a row is waiting twice"]
    with pytest.raises(Unavailable, match="a row is waiting twice"):
        _ = machine.one.staging.stage(add_of(2))
    again = machine.two.staging.stage(add_of(2))
    await machine.log.let_land()
    assert again.result() == 71


async def test_a_shard_that_ended_while_its_slot_was_on_its_way_applies_nothing(machine: Machine) -> None:
    lost, kept = machine.one.staging.stage(add_of(1)), machine.two.staging.stage(add_of(1))
    await settle()
    waiting = machine.one.staging.stage(add_of(2))
    machine.one.staging.end(Unavailable("it is another's"))
    await machine.log.let_land()
    assert kept.result() == 70
    assert {str(lost.exception()), str(waiting.exception())} == {"it is another's"}
    assert machine.one.applied == []
    _ = machine.two.staging.stage(add_of(2))
    await machine.log.let_land()
    assert machine.log.written == [{0: 1, 1: 1}, {1: 1}], "what waited of it is dropped"


async def test_a_slot_that_does_not_land_stalls_every_shard_and_whoever_waits_is_told(machine: Machine) -> None:
    first = machine.one.staging.stage(add_of(1))
    await settle()
    other = machine.two.staging.stage(add_of(1))
    patient = machine.two.staging.stage_together([add_of(2)])
    await machine.clock.advance(STALL_ANSWER_S + 1)
    for shard in (machine.one, machine.two):
        with pytest.raises(Unavailable, match="has not answered for 11 s"):
            shard.staging.check_accepting()
        shard.staging.answer_stalled()
    assert [type(each.exception()) for each in (first, other)] == [OutcomeUnknown] * 2
    assert not patient.done()
    await machine.log.let_land()
    machine.one.staging.check_accepting()
    await machine.clock.advance(LINGER_S)
    await machine.log.let_land()
    assert patient.result() == 70
    assert machine.two.applied == [(70, 2)]


async def test_a_slot_is_applied_when_the_ownership_was_confirmed_lately_enough(machine: Machine) -> None:
    machine.confirmation.fresh = False
    both = [shard.staging.stage(add_of(1)) for shard in (machine.one, machine.two)]
    await machine.log.let_land()
    assert not any(each.done() for each in both)
    assert machine.one.applied == machine.two.applied == []
    machine.confirmation.held.set()
    await settle()
    assert [each.result() for each in both] == [10, 70]


async def test_what_ends_the_log_ends_the_sender(machine: Machine) -> None:
    machine.log.broken = NotOwner("another daemon has fenced it")
    waiting = machine.one.staging.stage(add_of(1))
    await machine.log.let_land()
    with pytest.raises(NotOwner):
        await machine.running
    assert not waiting.done(), "its shard tells whoever waits"
