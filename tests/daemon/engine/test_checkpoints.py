"""Checkpoints, what they let go of the journal, and what happens when stored things are damaged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault

CHECKPOINTS = "/checkpoint/"
OFTEN = ("journal.checkpoint_slots=5",)


def slots(machines: EngineFixture, kind: str) -> list[int]:
    keys = machines.keys(JOURNAL)
    return [names.number_of(key) for key in keys if machines.store.head(key).metadata["kind"] == kind]


async def add_slots(daemon: Daemon, first: int, count: int) -> None:
    for number in range(first, first + count):
        await daemon.add("t", number, range(3), delay_ms=100_000)
        await asyncio.sleep(0.1)


def flip(machines: EngineFixture, key: str, place: int) -> None:
    body, metadata = machines.store.get_with_metadata(key)
    damaged = bytearray(body)
    damaged[place] ^= 0x10
    machines.store.put(key, bytes(damaged), metadata=metadata)


async def test_a_checkpoint_is_written_after_so_many_slots(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *OFTEN)
    await add_slots(one, 0, 4)
    assert not machines.keys(CHECKPOINTS)
    await add_slots(one, 4, 2)
    assert len(machines.keys(CHECKPOINTS)) == 1
    reference = machines.shard_tip().checkpoint
    assert reference is not None
    assert reference.replay_from >= 5


async def test_a_checkpoint_is_written_after_so_many_bytes(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "journal.checkpoint_bytes=65536")
    for ledger_id in range(40):
        await one.add("t", ledger_id, [entry**3 for entry in range(2000)], delay_ms=100_000)
    await asyncio.sleep(1)
    assert machines.keys(CHECKPOINTS)


async def test_slots_that_the_checkpoint_before_covers_are_deleted_and_fences_stay(machines: EngineFixture) -> None:
    for _ in range(3):
        one = await machines.served_by("one", *OFTEN)
        await add_slots(one, len(machines.keys(JOURNAL)) * 10, 12)
        one.kill()
    await machines.served_by("one", *OFTEN)
    tip = machines.shard_tip()
    assert tip.previous_checkpoint is not None
    assert len(slots(machines, "fence")) == 4
    assert min(slots(machines, "data")) == tip.previous_checkpoint.replay_from + 1


@pytest.mark.parametrize("setting", ["journal.checkpoint_slots=5", "journal.checkpoint_bytes=65536"])
async def test_owners_that_live_for_a_few_slots_only_do_not_make_the_journal_long(
    machines: EngineFixture, setting: str
) -> None:
    for life in range(12):
        one = await machines.served_by("one", setting)
        for number in range(3):
            entries = [entry**3 for entry in range(1000)]
            await one.add("t", 10 * life + number, entries, delay_ms=100_000)
        await asyncio.sleep(1)
        one.kill()
    tip = machines.shard_tip()
    assert tip.checkpoint is not None
    assert max(slots(machines, "data")) - tip.replay_from < 12
    assert len(slots(machines, "data")) < 24
    two = await machines.served_by("one")
    assert two.topic("t").core.index.pending_rows == 36 * 1000


async def test_slots_are_deleted_by_one_thread_also_when_who_waited_for_it_was_cancelled(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", "journal.checkpoint_slots=1000")
    for number in range(4):
        await one.add("t", 1, [number], delay_ms=900_000)
    one.kill()
    two = await machines.served_by("one", "journal.checkpoint_slots=1")
    held = two.pause("delete", JOURNAL)
    for number in range(4, 8):
        await two.add("t", 1, [number], delay_ms=900_000)
    await held.reached()
    checkpoints = two.shards[0].checkpoints
    checkpoints.close()
    collecting = two.call(checkpoints.collect())
    await asyncio.sleep(1)
    assert not collecting.done()
    held.release()
    await collecting


async def test_after_truncation_everything_is_still_there(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *OFTEN)
    await add_slots(one, 0, 30)
    one.kill()
    two = await machines.served_by("one", *OFTEN)
    receiver = await two.receiver("t")
    await receiver.received(90)
    assert len(receiver.positions) == 90


async def test_a_checkpoint_that_fails_leaves_a_longer_journal_and_the_next_one_takes_it(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *OFTEN)
    one.script.plan("put", Fault.FAIL_BEFORE, key_part=CHECKPOINTS)
    await add_slots(one, 0, 5)
    assert not machines.keys(CHECKPOINTS)
    assert not one.script.unmet()
    assert one.engine.health.serving
    await add_slots(one, 5, 1)
    assert len(machines.keys(CHECKPOINTS)) == 1


@pytest.mark.parametrize("checkpoints", [1, 3])
async def test_a_damaged_checkpoint_falls_back_to_the_one_before(machines: EngineFixture, checkpoints: int) -> None:
    one = await machines.served_by("one", *OFTEN)
    await add_slots(one, 0, 5 * checkpoints + 2)
    one.kill()
    reference = machines.shard_tip().checkpoint
    assert reference is not None
    assert len(machines.keys(CHECKPOINTS)) == checkpoints
    flip(machines, reference.object.name, reference.object.size_bytes // 2)
    two = await machines.served_by("one", *OFTEN)
    receiver = await two.receiver("t")
    rows = 3 * (5 * checkpoints + 2)
    await receiver.received(rows)
    assert len(receiver.positions) == rows


async def test_two_damaged_checkpoints_refuse_the_shard_by_name(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *OFTEN)
    await add_slots(one, 0, 17)
    one.kill()
    tip = machines.shard_tip()
    assert tip.checkpoint is not None
    assert tip.previous_checkpoint is not None
    for reference in (tip.checkpoint, tip.previous_checkpoint):
        flip(machines, reference.object.name, reference.object.size_bytes // 2)
    two = await machines.daemon("one", *OFTEN).start()
    await two.until(lambda: tip.previous_checkpoint is not None and named(two, tip.previous_checkpoint.object.name))
    await asyncio.sleep(60)
    assert not two.engine.health.serving


def named(daemon: Daemon, *parts: str) -> bool:
    return all(part in daemon.engine.health.reason for part in parts)


async def test_a_damaged_slot_refuses_its_shard_by_name_and_offset_and_is_looked_at_again(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    one = await machines.served_by("one")
    await add_slots(one, 0, 5)
    one.kill()
    key = machines.keys(JOURNAL)[3]
    size = len(machines.store.get(key))
    flip(machines, key, size // 2)
    two = await machines.daemon("one").start()
    await two.until(lambda: named(two, key, "at byte"))
    assert not two.engine.health.serving
    assert any(key in each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR)
    flip(machines, key, size // 2)
    await two.serving()
    assert two.topic("t").core.index.pending_rows == 15


async def test_a_missing_slot_is_never_skipped(machines: EngineFixture) -> None:
    """The slots behind a hole were answered: to serve without them would lose rows silently."""
    one = await machines.served_by("one")
    await add_slots(one, 0, 5)
    one.kill()
    machines.store.delete(machines.keys(JOURNAL)[3])
    two = await machines.daemon("one").start()
    await asyncio.sleep(60)
    assert not two.engine.health.serving


async def test_the_orderly_end_leaves_nothing_to_replay_and_nobody_to_wait_for(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await add_slots(one, 0, 5)
    await one.stop()
    asked_s = machines.loop.time()
    two = await machines.served_by("two")
    assert machines.loop.time() - asked_s < 1
    assert two.topic("t").core.index.pending_rows == 15
    tip = machines.shard_tip()
    assert tip.replay_from >= 6


async def test_a_checkpoint_between_a_cut_and_its_seal_holds_the_rows_once(machines: EngineFixture) -> None:
    small = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", *OFTEN)
    one = await machines.served_by("one", *small)
    receiver = await one.receiver("t")
    held = one.pause("put", "/buckets/")
    await one.add("t", 1, range(20))
    await held.reached()
    await receiver.received(20)
    await receiver.acknowledge(receiver.rows[:5])
    await add_slots(one, 2, 6)
    assert machines.keys(CHECKPOINTS)
    copies = [copied(machines)]
    held.release()
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    copies.append(copied(machines))
    one.kill()
    for copy in copies:
        two = await copy.served_by("one", *small)
        again = await two.receiver("t")
        await again.received(15 + 18)
        assert len(again.rows) == len(again.positions) == 15 + 18
        await copy.close()


def copied(machines: EngineFixture) -> EngineFixture:
    """The store as it is now, for other daemons."""
    copy = EngineFixture()
    for key in machines.keys(""):
        body, metadata = machines.store.get_with_metadata(key)
        copy.store.put(key, body, metadata=metadata)
    return copy
