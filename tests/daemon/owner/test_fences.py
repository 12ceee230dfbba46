"""Each log is fenced once in an attempt, for all shards that it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from daemon.owner import takeover
from daemon.owner.takeover import Fences
from storage_backends import object_store
from storage_backends.file_log import FileLogs
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.log_fence import Fence
from storage_backends.slot_log import LogHeld
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_store import Fault
from tests.daemon.group_commit._support import log_owner
from tests.daemon.group_commit._support.log_owner import LogOwner, owner_of
from tests.storage_backends._support import log_slots


async def fenced(owner: LogOwner, log_id: str, count: int = 1) -> list[Fence | BaseException]:
    """What so many shards are told who ask for the fence of a log together."""
    asking = (owner.run(owner.fences.of(log_id)) for _ in range(count))
    return await asyncio.gather(*asking, return_exceptions=True)


async def test_a_log_is_fenced_once_for_all_shards_that_ask(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0, 1)
    south = LogOwner(machines.daemon("south"))
    found = await fenced(south, north.log_id, 3)
    assert len(set(map(id, found))) == 1
    again = await south.run(south.fences.of(north.log_id))
    assert (again.number, again.kind) == (3, LogSlotKind.FENCE)
    assert [call.operation for call in south.daemon.store.calls] == ["list", "get_with_metadata", "put_if_absent"]
    assert log_owner.numbers_of(machines, north.log_id) == [1, 2, 3]


async def test_a_log_with_an_end_gets_no_other_one(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.run(north.living.close())
    south = LogOwner(machines.daemon("south"))
    assert (await south.run(south.fences.of(north.log_id))).kind is LogSlotKind.CLOSE
    assert log_owner.numbers_of(machines, north.log_id) == [1, 2]


async def test_logs_are_fenced_side_by_side(machines: EngineFixture) -> None:
    owners = [await owner_of(machines, name, shard) for shard, name in enumerate(("north", "west"))]
    south = LogOwner(machines.daemon("south"))
    held = south.daemon.pause("put_if_absent", owners[0].log_id)
    first = south.run(south.fences.of(owners[0].log_id))
    await held.reached()
    assert (await south.run(south.fences.of(owners[1].log_id))).log_id == owners[1].log_id
    assert not first.done()
    held.release()
    assert (await first).log_id == owners[0].log_id


async def test_a_fence_that_fails_for_a_moment_is_tried_again_and_stands_once(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    south = LogOwner(machines.daemon("south"))
    for operation, fault in (
        ("list", Fault.FAIL_BEFORE),
        ("get_with_metadata", Fault.FAIL_AFTER),
        ("put_if_absent", Fault.FAIL_AFTER),
        ("head", Fault.FAIL_BEFORE),
    ):
        south.daemon.script.plan(operation, fault, key_part="logs/")
    (found,) = await fenced(south, north.log_id)
    assert isinstance(found, Fence)
    assert found.number == 2
    assert log_owner.numbers_of(machines, north.log_id) == [1, 2]


async def test_a_fence_that_fails_for_long_fails_all_who_wait_and_who_comes_next_tries_again(
    machines: EngineFixture,
) -> None:
    north = await owner_of(machines, "north", 0)
    south = LogOwner(machines.daemon("south"))
    south.daemon.store.go_down()
    begin_s = machines.loop.time()
    found = await fenced(south, north.log_id, 2)
    assert [type(each) for each in found] == [object_store.StoreUnavailable] * 2
    assert takeover.DEADLINE_S / 2 < machines.loop.time() - begin_s <= takeover.DEADLINE_S
    south.daemon.store.come_back()
    (again,) = await fenced(south, north.log_id)
    assert isinstance(again, Fence)


async def test_who_gives_up_waiting_for_a_fence_disturbs_nobody(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    south = LogOwner(machines.daemon("south"))
    held = south.daemon.pause("put_if_absent", "logs/")
    waiting = [south.run(south.fences.of(north.log_id)) for _ in range(2)]
    await held.reached()
    waiting[0].cancel()
    held.release()
    assert (await waiting[1]).number == 2
    assert waiting[0].cancelled()


async def test_a_log_whose_newest_slot_is_damaged_has_no_fence(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    machines.store.put(log_owner.slot_key(north.log_id, 2), b"damaged")
    south = LogOwner(machines.daemon("south"))
    (found,) = await fenced(south, north.log_id)
    assert isinstance(found, object_store.Damaged)
    assert log_owner.slot_key(north.log_id, 2) in str(found)


async def test_a_log_that_a_living_process_holds_is_told_at_once_by_name(
    machines: EngineFixture, tmp_path: Path
) -> None:
    log_id = log_slots.LOG_ID
    holder = FileLogs(tmp_path).log(log_id)
    holder.create(1, log_slots.opening())
    daemon = machines.daemon("south")
    held_by = Fences(FileLogs(tmp_path), daemon.environment)
    begin_s = machines.loop.time()
    try:
        with pytest.raises(LogHeld, match=r"it is held by process \d+.*which is running: end that process first"):
            await daemon.call(held_by.of(log_id))
        assert machines.loop.time() == begin_s, "nobody waits for a process that lives"
    finally:
        holder.close()
    assert (await daemon.call(held_by.of(log_id))).number == 2, "it has ended, and is asked for again"
