"""The own log: it is open before anything, one slot or look at a time, told lost once, and deleted up to its bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from daemon.errors import NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit import daemon_log
from daemon.group_commit.daemon_log import CertainSlot, DaemonLog, FrozenSlot, LogCursor, LogLost, LogWriter
from daemon.group_commit.shard_slots import ShardSlots
from daemon.group_commit.slot_sender import LandedSection, Section
from storage_backends import object_store
from storage_backends.formats.log_slot_format import Head, LogSlotKind
from storage_backends.formats.slot_format import AddRecord, DeletionRecord, Record
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_store import Fault
from tests.daemon.group_commit._support import log_owner
from tests.daemon.group_commit._support.log_owner import LogOwner, owner_of
from tests.planted import registry

OPEN, DATA, FENCE, CLOSE = LogSlotKind.OPEN, LogSlotKind.DATA, LogSlotKind.FENCE, LogSlotKind.CLOSE
LOGS = "logs/"


async def turns(count: int = 50) -> None:
    """Lets everything run that can run without time passing."""
    for _ in range(count):
        await asyncio.sleep(0)


def kinds(machines: EngineFixture, owner: LogOwner) -> list[LogSlotKind]:
    return [header.kind for header in log_owner.headers_of(machines, owner.log_id)]


class Shard:
    """What is staged of one shard. `applied`: its shard slots."""

    def __init__(self, owner: LogOwner, number: int) -> None:
        self.applied: list[int] = []
        self.failed: list[Exception] = []
        self.staging = ShardSlots(
            number,
            owner.living.sender,
            owner.living.confirmation,
            clock=owner.environment.clock.elapsed_s,
            slot_bytes_max=4_000,
            applied=self._apply,
            failed=self.failed.append,
        )

    def _apply(self, landed: LandedSection, records: Sequence[Record], deletions: Sequence[DeletionRecord]) -> None:
        self.applied.append(landed.slot)

    def stage(self, entry: int) -> asyncio.Future[int]:
        return self.staging.stage(AddRecord(log_owner.TOPIC_ID, 1, 0, log_owner.rows_of({entry})))


# ---- its beginning


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.FAIL_BEFORE, Fault.DELIVER_LATE, Fault.ANSWER_EXISTS])
async def test_open_is_certain_before_the_log_is_used(machines: EngineFixture, fault: Fault) -> None:
    owner = LogOwner(machines.daemon("one"))
    held = owner.daemon.pause("put_if_absent", LOGS, then=fault)
    opening = asyncio.ensure_future(owner.open())
    await held.reached()
    await turns()
    assert not opening.done()
    held.release()
    await opening
    assert kinds(machines, owner) == [OPEN]
    assert (owner.living.last_certain, owner.living.sender.applied) == (1, 1)
    assert owner.living.confirmation.fresh_within(1.0)


async def test_each_log_is_another_one(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one")
    first = owner.living
    await owner.run(first.close())
    await owner.open()
    assert owner.log_id != first.log_id


async def test_a_log_that_cannot_be_opened_in_time_leaves_nothing_running(machines: EngineFixture) -> None:
    owner = LogOwner(machines.daemon("one"))
    owner.daemon.store.go_down()
    begin_s = machines.loop.time()
    before = asyncio.all_tasks()
    with pytest.raises(object_store.StoreUnavailable, match=r"OPEN is not certain after 30 s"):
        await owner.open()
    assert machines.loop.time() - begin_s == pytest.approx(daemon_log.DEADLINE_S, abs=1.0)
    await turns()
    assert asyncio.all_tasks() <= before
    calls = len(owner.daemon.store.calls)
    await asyncio.sleep(60.0)
    assert len(owner.daemon.store.calls) == calls


# ---- slots


async def test_sections_of_a_slot_have_the_next_shard_slot_of_each(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0, 1)
    first, second = await owner.write(0), await owner.write(0, 1)
    assert (first.number, {shard: each.slot for shard, each in first.sections.items()}) == (2, {0: 1})
    assert (second.number, {shard: each.slot for shard, each in second.sections.items()}) == (3, {0: 2, 1: 1})
    assert owner.living.head(0) == Head(1, 2)
    assert owner.living.head(2) is None
    assert owner.living.work_written == 1 + 2 + 3


async def test_a_section_that_cannot_be_encoded_is_thrown_out_and_the_others_land(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0, 1)
    broken = Section(0, [AddRecord("no topic id", 1 << 80, 0, log_owner.rows_of({1}))], [])
    landed = await owner.run(owner.living.write([broken, owner.section(1)]))
    assert list(landed.unencodable) == [0]
    assert list(landed.sections) == [1]
    assert await owner.write(0) is not None
    assert owner.living.head(0) == Head(1, 1), "its shard slot was not used up"
    nothing = await owner.run(owner.living.write([broken]))
    assert (nothing.number, nothing.sections, list(nothing.unencodable)) == (None, {}, [0])
    assert owner.living.last_certain == 3


async def test_while_a_slot_is_uncertain_nothing_confirms_and_nobody_asks(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    living = owner.living
    await asyncio.sleep(3.0)
    held = owner.daemon.pause("put_if_absent", LOGS)
    sent_at_s = owner.environment.clock.elapsed_s()
    writing = asyncio.ensure_future(owner.write(0))
    await held.reached()
    waiting = owner.run(living.confirmation.confirm_after(owner.environment.clock.elapsed_s()))
    calls = len(owner.daemon.store.calls)
    await asyncio.sleep(40.0)
    assert len(owner.daemon.store.calls) == calls, "no probe is sent"
    assert not living.confirmation.fresh_within(15.0)
    assert not waiting.done()
    held.release()
    await writing
    await waiting
    assert living.confirmation.confirmed_at_s == pytest.approx(sent_at_s, abs=0.1) or waiting.done()


async def test_an_idle_log_is_looked_at_every_five_seconds_by_one_head(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    before = len(owner.daemon.store.calls)
    await asyncio.sleep(26.0)
    calls = owner.daemon.store.calls[before:]
    key = log_owner.slot_key(owner.log_id, 2)
    assert [(call.operation, call.key) for call in calls] == [("head", key)] * 5
    assert owner.living.confirmation.fresh_within(5.1)


async def test_a_slot_does_not_wait_for_a_look_that_hangs_and_the_look_tells_nothing(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    held = owner.daemon.pause("head", LOGS)
    await asyncio.sleep(5.5)
    assert held.pause.reached.is_set()
    landed = await owner.write(0)
    assert landed.number == 2
    confirmed_at_s = owner.living.confirmation.confirmed_at_s
    held.release()
    await turns()
    assert owner.ended == [], "what it found there is the slot that was written meanwhile"
    assert owner.living.confirmation.confirmed_at_s == confirmed_at_s


# ---- its loss


async def test_a_fence_is_found_by_a_slot_and_told_once(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    shard = Shard(owner, 0)
    waiting = shard.stage(1)
    assert await waiting == 1
    log_owner.fence(machines, owner.log_id)
    lost = shard.stage(2)
    await asyncio.sleep(20.0)
    assert [str(error) for error in owner.ended] == [
        f"log {owner.log_id} was ended at slot 3 by another daemon, which takes over the shards"
    ]
    assert isinstance(owner.ended[0], LogLost)
    assert owner.living.is_ended
    assert not lost.done(), "its shard tells whoever waits"
    assert kinds(machines, owner) == [OPEN, DATA, FENCE]


async def test_a_fence_is_found_by_a_probe_of_an_idle_log_and_told_once(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    log_owner.fence(machines, owner.log_id)
    await asyncio.sleep(5.5)
    assert [type(error) for error in owner.ended] == [LogLost]
    with pytest.raises(NotOwner):
        await owner.living.confirmation.confirm_after(owner.environment.clock.elapsed_s())
    with pytest.raises(LogLost):
        await owner.write(0)
    assert len(owner.ended) == 1


# ---- its end


async def test_close_stands_behind_the_last_slot_with_its_heads_and_is_no_loss(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0, 1)
    await owner.write(0, 1)
    await owner.run(owner.living.close())
    last = log_owner.headers_of(machines, owner.log_id)[-1]
    assert (last.kind, last.number, last.heads) == (CLOSE, 3, {0: Head(1, 1), 1: Head(1, 1)})
    assert owner.living.is_ended
    await asyncio.sleep(20.0)
    assert owner.ended == []
    with pytest.raises(Unavailable):
        await owner.living.confirmation.confirm_after(owner.environment.clock.elapsed_s())
    await owner.run(owner.living.close())
    assert kinds(machines, owner) == [OPEN, DATA, CLOSE], "it may be repeated"


async def test_close_waits_for_the_slot_that_is_on_its_way(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    shard = Shard(owner, 0)
    held = owner.daemon.pause("put_if_absent", LOGS)
    _ = shard.stage(1)
    await held.reached()
    closing = owner.run(owner.living.close())
    await asyncio.sleep(3.0)
    assert not closing.done()
    held.release()
    await closing
    assert kinds(machines, owner) == [OPEN, DATA, CLOSE]


async def test_a_log_that_cannot_be_closed_is_left_to_its_next_owner(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    owner = await owner_of(machines, "one", 0)
    owner.daemon.store.go_down()
    await owner.run(owner.living.close())
    assert "the next owner will fence it: " in caplog.text
    assert "CLOSE is not certain after 30 s" in caplog.text
    assert log_owner.fence(machines, owner.log_id).kind is FENCE


async def test_an_end_that_is_cut_short_leaves_nothing_running(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    shard = Shard(owner, 0)
    owner.daemon.store.go_down()
    before = asyncio.all_tasks()
    _ = shard.stage(1)
    await asyncio.sleep(1.0)
    closing = owner.run(owner.living.close())
    await asyncio.sleep(1.0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await turns()
    assert not [task for task in asyncio.all_tasks() - before if not task.done()]
    calls = len(owner.daemon.store.calls)
    await asyncio.sleep(60.0)
    assert len(owner.daemon.store.calls) == calls


async def test_a_log_that_is_abandoned_writes_no_close(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    held = owner.daemon.pause("put_if_absent", LOGS, then=Fault.FAIL_BEFORE)
    writing = asyncio.ensure_future(owner.write(0))
    await held.reached()
    abandoning = owner.run(owner.living.abandon())
    with pytest.raises(OutcomeUnknown, match="may or may not be durable"):
        await writing
    held.release()
    await abandoning
    await asyncio.sleep(60.0)
    assert kinds(machines, owner) == [OPEN]
    assert owner.ended == []


# ---- shards that leave


async def test_a_shard_stops_when_its_section_under_way_is_certain(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0, 1)
    held = owner.daemon.pause("put_if_absent", LOGS)
    writing = asyncio.ensure_future(owner.write(0))
    await held.reached()
    stopping = owner.run(owner.living.stop(0))
    assert await owner.run(owner.living.stop(1)) == Head(1, 0), "it has nothing under way"
    await turns()
    assert not stopping.done()
    ending = owner.run(owner.living.end_for_claim())
    await turns()
    assert not ending.done()
    held.release()
    assert await stopping == Head(1, 1)
    end = await ending
    assert (end.end, end.heads) == (2, {0: Head(1, 1)})
    await writing
    assert await owner.run(owner.living.stop(0)) is None, "it stages no more"


async def test_a_shard_whose_section_is_lost_with_the_log_stops_no_more(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    held = owner.daemon.pause("put_if_absent", LOGS)
    writing = asyncio.ensure_future(owner.write(0))
    await held.reached()
    stopping, ending = owner.run(owner.living.stop(0)), owner.run(owner.living.end_for_claim())
    log_owner.fence(machines, owner.log_id)
    await turns()
    assert not stopping.done()
    held.release()
    with pytest.raises(LogLost):
        await writing
    for each in (stopping, ending):
        with pytest.raises(Unavailable, match="has ended"):
            await each
    with pytest.raises(Unavailable, match="has ended"):
        await owner.run(owner.living.stop(0))
    with pytest.raises(Unavailable, match="has ended"):
        await owner.run(owner.living.end_for_claim())


# ---- what is deleted


async def test_what_no_shard_needs_is_deleted_up_to_the_slot_before_the_last(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0, 1)
    await owner.write(0, 1)
    await owner.write(0)
    for _ in range(2):
        await owner.checkpoint(0)
    await owner.living.truncated()
    assert log_owner.numbers_of(machines, owner.log_id) == [2, 3], "shard 1 needs what is behind its claim"
    for _ in range(2):
        await owner.checkpoint(1)
    await owner.write(0)
    owner.living.truncate()
    await owner.living.truncated()
    assert log_owner.numbers_of(machines, owner.log_id) == [4], "the highest stays"
    assert owner.living.deleted.objects == 3
    assert owner.living.unneeded().objects == 0


async def test_one_deletion_is_under_way_and_the_next_goes_on_from_it(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    await owner.write(0)
    for _ in range(2):
        await owner.checkpoint(0)
    held = owner.daemon.pause("delete", LOGS)
    await owner.write(0)
    owner.living.truncate()
    await held.reached()
    for _ in range(2):
        await owner.checkpoint(0)
    await owner.write(0)
    owner.living.truncate()
    await turns()
    deletions = [call.key for call in owner.daemon.store.calls if call.operation == "delete"]
    assert deletions == [log_owner.slot_key(owner.log_id, 1), log_owner.slot_key(owner.log_id, 2)][: len(deletions)]
    held.release()
    await owner.living.truncated()
    owner.living.truncate()
    await owner.living.truncated()
    assert log_owner.numbers_of(machines, owner.log_id) == [4]


async def test_what_cannot_be_deleted_is_deleted_later_and_counted_once(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    owner = await owner_of(machines, "one", 0)
    await owner.write(0)
    await owner.write(0)
    owner.daemon.script.plan("delete", Fault.FAIL_BEFORE, key_part=LOGS, times=2)
    for _ in range(2):
        await owner.checkpoint(0)
        await owner.living.truncated()
    assert "cannot delete slots up to" in caplog.text
    waiting = owner.living.unneeded()
    assert (waiting.objects, owner.living.deleted.objects) == (2, 0)
    owner.living.truncate()
    await owner.living.truncated()
    assert owner.living.deleted == waiting
    assert log_owner.numbers_of(machines, owner.log_id) == [3]


async def test_a_log_that_has_ended_deletes_nothing(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    await owner.write(0)
    await owner.run(owner.living.close())
    for _ in range(2):
        await owner.checkpoint(0)
    owner.living.truncate()
    await owner.living.truncated()
    assert log_owner.numbers_of(machines, owner.log_id) == [1, 2, 3]


async def test_a_log_is_lost_to_a_store_that_gives_it_what_nobody_wrote(machines: EngineFixture) -> None:
    owner = await owner_of(machines, "one", 0)
    other = await owner_of(machines, "two")
    body = machines.store.get(log_owner.slot_key(other.log_id, 1))
    metadata = machines.store.head(log_owner.slot_key(other.log_id, 1)).metadata
    machines.store.put(log_owner.slot_key(owner.log_id, 2), body, metadata=metadata)
    await asyncio.sleep(6.0)
    (ended,) = owner.ended
    assert "its owner did not write" in str(ended) or "OPEN" in str(ended)


# ---- planted bugs


def a_log_is_used_before_its_open_is_certain(patch: pytest.MonkeyPatch) -> None:
    until_certain = LogWriter._until_certain
    beside: list[asyncio.Task[CertainSlot]] = []

    async def at_once(self: LogWriter, slot: FrozenSlot, first: Any) -> CertainSlot:
        beside.append(asyncio.ensure_future(until_certain(self, slot, first)))
        return CertainSlot(slot, first[0], 1, 0.0)

    patch.setattr(LogWriter, "_until_certain", at_once)


def a_log_that_is_lost_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DaemonLog, "_task_ended", lambda self, task: task.cancelled() or task.exception())


def a_look_holds_slots_up(patch: pytest.MonkeyPatch) -> None:
    async def look(self: DaemonLog) -> float | None:
        async with self._turn:
            return await self._writer.probe()

    patch.setattr(DaemonLog, "look", look)


def a_shard_stops_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogCursor, "has_under_way", lambda self, shard: False)


async def open_and_lose_the_answer(machines: EngineFixture) -> None:
    await test_open_is_certain_before_the_log_is_used(machines, Fault.DELIVER_LATE)


async def a_look_that_hangs(machines: EngineFixture) -> None:
    async with asyncio.timeout(60):
        await test_a_slot_does_not_wait_for_a_look_that_hangs_and_the_look_tells_nothing(machines)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[EngineFixture], Awaitable[None]]] = {
    a_log_is_used_before_its_open_is_certain: open_and_lose_the_answer,
    a_log_that_is_lost_is_not_told: test_a_fence_is_found_by_a_slot_and_told_once,
    a_look_holds_slots_up: a_look_that_hangs,
    a_shard_stops_at_once: test_a_shard_stops_when_its_section_under_way_is_certain,
}


@pytest.mark.parametrize(("plant", "story"), PLANTED.items(), ids=lambda each: each.__name__)
async def test_a_planted_bug_of_the_own_log_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    story: Callable[[EngineFixture], Awaitable[None]],
    machines: EngineFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        await story(machines)


registry.register("life of the own log", PLANTED)
