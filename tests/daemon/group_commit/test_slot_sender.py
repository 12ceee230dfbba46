"""One sender writes what several shards have staged; what goes wrong in one of them is that one's alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from daemon.errors import NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit.confirmation import Confirmation
from daemon.group_commit.shard_slots import STALL_ANSWER_S, ShardSlots
from daemon.group_commit.slot_sender import (
    ANSWER_UNCONFIRMED_S,
    COMPANIONS_LEAST,
    SHARED_SLOT_BYTES,
    LandedSection,
    LandedSlot,
    Section,
    SlotSender,
    SlotWriter,
)
from storage_backends.formats.log_slot_format import ShardSlot, next_after
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AddRecord, DeletionRecord, Record
from tests._support.virtual_clock import VirtualClock, settle

LINGER_S = 0.05
# Longer than a test takes.
HOUR_S = 3_600.0
# The first slot of each shard.
FIRST = {0: ShardSlot(10), 1: ShardSlot(70)}


def add_of(*entries: int) -> AddRecord:
    entry_id = np.array(entries, np.uint64)
    return AddRecord("id", 1, 0, Rows(np.full_like(entry_id, 1_000), np.full_like(entry_id, 1), entry_id))


class Log(SlotWriter):
    """Holds each slot until it is let go. `written`: which shards each slot had, and how many rows of each.
    `unencodable`: shards whose sections cannot be encoded.
    """

    def __init__(self) -> None:
        self.written: list[dict[int, int]] = []
        self.may_land = asyncio.Semaphore(0)
        self.broken: Exception | None = None
        self.unencodable: set[int] = set()
        self._next = dict(FIRST)
        self._number = 1
        self._began = asyncio.Event()

    async def begun(self, slots: int) -> None:
        """Returns when so many are on their way, or have been."""
        while len(self.written) < slots:
            self._began.clear()
            await self._began.wait()

    async def write(self, sections: Sequence[Section]) -> LandedSlot:
        self.written.append(
            {section.shard: sum(record.row_count for record in section.records) for section in sections}
        )
        self._began.set()
        await self.may_land.acquire()
        if self.broken is not None:
            raise self.broken
        shards = {section.shard for section in sections} - self.unencodable
        landed = {shard: LandedSection(self._next[shard], 100) for shard in shards}
        self._next.update((shard, next_after(each.slot)) for shard, each in landed.items())
        refused = {
            section.shard: OverflowError("a row is too long") for section in sections if section.shard not in shards
        }
        if not landed:
            return LandedSlot(None, {}, refused)
        self._number += 1
        return LandedSlot(self._number, landed, refused)

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

    def __init__(
        self, number: int, sender: SlotSender, confirmation: Confirmation, clock: VirtualClock, slot_bytes_max: int
    ) -> None:
        self.applied: list[tuple[int, int]] = []
        self.failed: list[Exception] = []
        self.breaks = False
        self.staging = ShardSlots(
            number,
            sender,
            confirmation,
            clock=clock.now,
            slot_bytes_max=slot_bytes_max,
            applied=self._apply,
            failed=self.failed.append,
        )

    def _apply(self, landed: LandedSection, records: Sequence[Record], deletions: Sequence[DeletionRecord]) -> None:
        if self.breaks:
            raise ValueError("a row is waiting twice")
        self.applied.append((landed.slot, sum(record.row_count for record in records)))


class Machine:
    def __init__(
        self,
        *,
        slot_bytes_max: int = 4_000,
        every_s: float = 0.0,
        linger_s: float = LINGER_S,
        company_s: float = 0.0,
    ) -> None:
        self.clock = VirtualClock()
        self.log = Log()
        self.confirmation = Confirmed()
        self.sender = SlotSender(
            self.log,
            self.confirmation,
            clock=self.clock.now,
            sleep=self.clock.sleep,
            linger_s=linger_s,
            every_s=every_s,
            company_s=lambda: company_s,
        )
        self.one, self.two = (
            Shard(number, self.sender, self.confirmation, self.clock, slot_bytes_max) for number in FIRST
        )
        self.running = asyncio.create_task(self.sender.run())

    async def slot_takes(self, seconds: float) -> None:
        """The slot that is on its way lands after so long."""
        await self.clock.advance(seconds)
        await self.log.let_land()


@contextlib.asynccontextmanager
async def running(made: Machine) -> AsyncIterator[Machine]:
    yield made
    made.running.cancel()
    with contextlib.suppress(asyncio.CancelledError, NotOwner):
        await made.running


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    async with running(Machine()) as made:
        yield made


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
    await settle()
    for _ in range(2):
        await machine.slot_takes(LINGER_S)
    assert machine.log.written == [{0: 150, 1: 1}, {0: 150}]
    await machine.clock.advance(LINGER_S)
    await machine.log.let_land()
    assert machine.log.written == [{0: 150, 1: 1}, {0: 150}, {0: 150}]
    assert machine.clock.slept_s == pytest.approx([LINGER_S]), "before the last one alone, which had room"
    assert [each.result() for each in many] == [10, 11, 12]


async def test_a_slot_that_cannot_be_applied_costs_its_shard_and_the_others_go_on(machine: Machine) -> None:
    machine.one.breaks = True
    lost, kept = machine.one.staging.stage(add_of(1)), machine.two.staging.stage(add_of(1))
    await machine.log.let_land()
    assert kept.result() == 70
    assert isinstance(lost.exception(), OutcomeUnknown)
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
    bystanders = [
        asyncio.ensure_future(wait()) for wait in (machine.one.staging.confirmed, machine.one.staging.settled)
    ]
    await settle()
    error = NotOwner("it is another's", owner_address="another:1")
    machine.one.staging.end(error)
    await machine.log.let_land()
    assert kept.result() == 70
    for staged in (lost, waiting):
        with pytest.raises(OutcomeUnknown, match="it is another's") as unknown:
            await staged
        assert unknown.value.owner_address == "another:1"
    assert [each.exception() for each in bystanders] == [error, error], "nothing of theirs was staged"
    assert machine.one.applied == []
    _ = machine.two.staging.stage(add_of(2))
    await machine.log.let_land()
    assert machine.log.written == [{0: 1, 1: 1}, {1: 1}], "what waited of it is dropped"


async def test_a_slot_that_does_not_land_stalls_every_shard_and_whoever_waits_is_told(machine: Machine) -> None:
    first = machine.one.staging.stage(add_of(1))
    await settle()
    other = machine.two.staging.stage(add_of(1))
    patient = machine.two.staging.stage_together([add_of(2)])
    bystander = asyncio.ensure_future(machine.one.staging.confirmed())
    await settle()
    await machine.clock.advance(STALL_ANSWER_S + 1)
    for shard in (machine.one, machine.two):
        with pytest.raises(Unavailable, match="has not answered for 11 s"):
            shard.staging.check_accepting()
        shard.staging.answer_stalled()
    assert [type(each.exception()) for each in (first, other)] == [OutcomeUnknown] * 2
    assert not patient.done()
    with pytest.raises(Unavailable, match="has not answered for 11 s"):
        await bystander
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


# ---- when a slot leaves


async def test_a_slot_leaves_at_once_when_nothing_came_while_the_one_before_was_written(machine: Machine) -> None:
    for _ in range(3):
        _ = machine.one.staging.stage(add_of(1))
        await settle()
        await machine.slot_takes(1.0)
    assert machine.log.written == [{0: 1}] * 3
    assert machine.clock.slept_s == []


@pytest.mark.parametrize(("took_s", "waits_s"), [(0.02, 0.02), (LINGER_S, LINGER_S), (0.4, LINGER_S)])
async def test_a_busy_log_waits_for_company_as_long_as_the_slot_before_took_and_no_longer_than_it_may(
    machine: Machine, took_s: float, waits_s: float
) -> None:
    _ = machine.one.staging.stage(add_of(1))
    await settle()
    _ = machine.one.staging.stage(add_of(2))
    await machine.slot_takes(took_s)
    assert machine.clock.slept_s == pytest.approx([waits_s])
    company = machine.two.staging.stage(add_of(1))
    await machine.clock.advance(waits_s * 0.9)
    assert len(machine.log.written) == 1
    await machine.clock.advance(waits_s * 0.2)
    await machine.log.let_land()
    assert machine.log.written == [{0: 1}, {0: 1, 1: 1}]
    assert company.done()


async def after_a_slot_with_company(machine: Machine) -> None:
    """Several that may wait were in one slot, which has landed."""
    for entry in range(COMPANIONS_LEAST):
        _ = machine.one.staging.stage(add_of(entry), may_wait=True)
    await machine.log.let_land()
    assert machine.log.written == [{0: COMPANIONS_LEAST}]


async def test_what_may_wait_waits_for_company_where_there_was_some_until_another_wants_a_slot() -> None:
    async with running(Machine(linger_s=HOUR_S, company_s=HOUR_S)) as machine:
        await after_a_slot_with_company(machine)
        # A slot without any changes nothing of that.
        _ = machine.two.staging.stage(add_of(0))
        await machine.log.let_land()
        patient = machine.one.staging.stage(add_of(10), may_wait=True)
        await settle()
        assert len(machine.log.written) == 2
        _ = machine.two.staging.stage(add_of(1))
        await machine.log.let_land()
        assert machine.log.written[1:] == [{1: 1}, {0: 1, 1: 1}]
        assert patient.done()


async def test_what_may_wait_leaves_at_once_where_the_slot_before_had_no_company() -> None:
    async with running(Machine(linger_s=HOUR_S, company_s=HOUR_S)) as machine:
        for _ in range(COMPANIONS_LEAST):
            _ = machine.one.staging.stage(add_of(1), may_wait=True)
            await machine.log.let_land()
        assert machine.log.written == [{0: 1}] * COMPANIONS_LEAST


@pytest.mark.parametrize(("linger_s", "company_s"), [(HOUR_S, 0.0), (HOUR_S, 0.001), (0.001, HOUR_S), (0.0, HOUR_S)])
async def test_what_may_wait_waits_no_longer_than_it_is_told_and_than_any_slot(
    linger_s: float, company_s: float
) -> None:
    async with running(Machine(linger_s=linger_s, company_s=company_s)) as machine:
        await after_a_slot_with_company(machine)
        patient = machine.one.staging.stage(add_of(10), may_wait=True)
        await machine.log.begun(2)
        await machine.log.let_land()
        assert patient.done()


async def test_what_may_wait_does_not_wait_in_a_slot_that_is_full() -> None:
    async with running(Machine(linger_s=HOUR_S, company_s=HOUR_S)) as machine:
        await after_a_slot_with_company(machine)
        many = [machine.one.staging.stage(add_of(*range(150)), may_wait=True) for _ in range(2)]
        for _ in many:
            await machine.log.let_land()
        assert machine.log.written[1:] == [{0: 150}] * 2
        assert all(each.done() for each in many)


async def test_slots_leave_at_most_as_often_as_is_set() -> None:
    async with running(Machine(every_s=0.5)) as machine:
        begin_s = machine.clock.now_s
        left_s = []
        for count in range(4):
            _ = machine.one.staging.stage(add_of(count))
            while len(machine.log.written) == count:
                await machine.clock.advance(0.1)
            left_s.append(machine.clock.now_s - begin_s)
            await machine.log.let_land()
        assert left_s == pytest.approx([0.1, 0.6, 1.1, 1.6], abs=0.11)


async def test_a_slot_that_took_longer_than_the_time_between_two_is_followed_at_once() -> None:
    async with running(Machine(every_s=0.5)) as machine:
        _ = machine.one.staging.stage(add_of(1))
        await settle()
        await machine.slot_takes(0.7)
        _ = machine.one.staging.stage(add_of(2))
        await settle()
        assert machine.log.written == [{0: 1}, {0: 1}]


# ---- what is in a slot


async def test_a_slot_that_shards_share_has_room_for_those_that_have_little_and_each_has_its_turn() -> None:
    async with running(Machine(slot_bytes_max=SHARED_SLOT_BYTES)) as machine:
        bulk = SHARED_SLOT_BYTES // 40
        much = [machine.one.staging.stage(add_of(*range(bulk))) for _ in range(2)]
        little = machine.two.staging.stage(add_of(1))
        await settle()
        assert machine.one.staging.waiting_slots == 1, "the first is on its way, the second fits in no slot with it"
        await machine.log.let_land()
        assert little.result() == 70, "what is large does not hold up what is small"
        await machine.log.let_land()
        assert machine.log.written == [{0: bulk, 1: 1}, {0: bulk}]
        assert [each.result() for each in much] == [10, 11]


async def test_of_two_shards_with_much_each_has_every_other_slot() -> None:
    async with running(Machine(slot_bytes_max=SHARED_SLOT_BYTES)) as machine:
        bulk = SHARED_SLOT_BYTES // 40
        for _ in range(2):
            for shard in (machine.one, machine.two):
                _ = shard.staging.stage(add_of(*range(bulk)))
        await settle()
        for _ in range(4):
            await machine.log.let_land()
        assert machine.log.written == [{0: bulk}, {1: bulk}, {0: bulk}, {1: bulk}]


async def test_a_section_that_is_larger_than_a_shared_slot_has_one_to_itself() -> None:
    async with running(Machine(slot_bytes_max=4 * SHARED_SLOT_BYTES)) as machine:
        huge = 2 * SHARED_SLOT_BYTES // 24
        kept = [machine.one.staging.stage(add_of(*range(huge))), machine.two.staging.stage(add_of(1))]
        await settle()
        for _ in range(2):
            await machine.log.let_land()
        assert machine.log.written == [{0: huge}, {1: 1}]
        assert [each.result() for each in kept] == [10, 70]


async def test_a_section_that_cannot_be_encoded_costs_its_shard_and_the_others_land(machine: Machine) -> None:
    machine.log.unencodable = {0}
    lost, kept = machine.one.staging.stage(add_of(1)), machine.two.staging.stage(add_of(1))
    await machine.log.let_land()
    assert kept.result() == 70
    assert isinstance(lost.exception(), OutcomeUnknown)
    assert [str(error) for error in machine.one.failed] == ["a row is too long"]
    assert (machine.one.applied, machine.sender.applied) == ([], 2)
    again = machine.two.staging.stage(add_of(2))
    await machine.log.let_land()
    assert again.result() == 71


async def test_a_slot_of_which_nothing_can_be_encoded_is_none(machine: Machine) -> None:
    machine.log.unencodable = {0}
    lost = machine.one.staging.stage(add_of(1))
    await machine.log.let_land()
    assert isinstance(lost.exception(), OutcomeUnknown)
    assert machine.sender.applied == 0
    kept = machine.two.staging.stage(add_of(1))
    await machine.log.let_land()
    assert (kept.result(), machine.sender.applied) == (70, 2)
