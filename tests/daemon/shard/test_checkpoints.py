"""Checkpoints, what they let go of the log, and what happens when stored things are damaged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daemon.shard import checkpointing
from daemon.shard.checkpointing import IDLE_S
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import LogSlotKind
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests._support.topic_names import topic_of

CHECKPOINTS = "/checkpoint/"
OFTEN = ("journal.checkpoint_slots=5",)


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
    assert reference.slot >= 5


async def test_a_checkpoint_is_written_after_so_many_bytes(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "journal.checkpoint_bytes=65536")
    for ledger_id in range(40):
        await one.add("t", ledger_id, [entry**3 for entry in range(2000)], delay_ms=100_000)
    await asyncio.sleep(1)
    assert machines.keys(CHECKPOINTS)


async def test_slots_that_the_checkpoint_before_covers_are_deleted_and_fences_stay(machines: EngineFixture) -> None:
    for _ in range(3):
        one = await machines.served_by("one", *OFTEN)
        await add_slots(one, len(machines.slots()) * 10, 12)
        one.kill()
    await machines.served_by("one", *OFTEN)
    tip = machines.shard_tip()
    assert tip.previous_checkpoint is not None
    assert len(machines.slots(LogSlotKind.FENCE)) == 3, "one for each owner that is dead"
    owned = [machines.store.get(key) for key in machines.slots_of(0) if tip.ranges[0].log_id in key]
    kept = [log_slot_format.decode_log_slot(body).header.heads[0].last_slot for body in owned]
    assert min(kept) == tip.previous_checkpoint.slot + 1


@pytest.mark.parametrize("setting", ["journal.checkpoint_slots=5", "journal.checkpoint_bytes=65536"])
async def test_owners_that_live_for_a_few_slots_only_do_not_make_the_log_long(
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
    assert machines.sections_to_read() < 12
    assert len(tip.ranges) <= 8, "three sections each"
    two = await machines.served_by("one")
    assert two.topic("t").core.index.pending_rows == 36 * 1000


async def test_after_truncation_everything_is_still_there(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *OFTEN)
    await add_slots(one, 0, 30)
    one.kill()
    two = await machines.served_by("one", *OFTEN)
    receiver = await two.receiver("t")
    await receiver.received(90)
    assert len(receiver.positions) == 90


async def test_a_checkpoint_that_fails_leaves_a_longer_log_and_the_next_one_takes_it(
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


async def test_a_damaged_section_refuses_its_shard_by_name_and_offset_and_is_looked_at_again(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    one = await machines.served_by("one")
    await add_slots(one, 0, 5)
    one.kill()
    key = machines.slots_of(0)[2]
    size = len(machines.store.get(key))
    flip(machines, key, size // 2)
    two = await machines.daemon("one").start()
    log_id, number = key.split("/")[1], names.number_of(key)
    where = f"slot {number} of log {log_id}"
    await two.until(lambda: named(two, where, "at byte"))
    assert not two.engine.health.serving
    assert any(where in each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR)
    flip(machines, key, size // 2)
    await two.serving()
    assert two.topic("t").core.index.pending_rows == 15


async def test_a_missing_slot_is_never_skipped(machines: EngineFixture) -> None:
    """The sections behind a hole were answered: to serve without them would lose rows silently."""
    one = await machines.served_by("one")
    await add_slots(one, 0, 5)
    one.kill()
    machines.store.delete(machines.slots_of(0)[2])
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
    assert machines.shard_tip().checkpoint_slot == 5
    assert machines.sections_to_read() == 0


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
    # No log of the copy has the id of one that was copied.
    copy.numbers = machines.numbers
    for key in machines.keys(""):
        body, metadata = machines.store.get_with_metadata(key)
        copy.store.put(key, body, metadata=metadata)
    return copy


# ---- shards that have fallen silent


async def collect(daemon: Daemon) -> None:
    async def whole() -> None:
        async for _ in daemon.engine.requests.collect(dry_run=False, force=False, retry_dead=False):
            pass

    await daemon.call(whole())


async def with_an_idle_shard(machines: EngineFixture) -> Daemon:
    """Shard 0 has fallen silent, and two checkpoints cover it; shard 1 is written on."""
    one = await machines.served_by("one", "daemon.shards=2", "collection.interval_s=86400")
    await one.add(topic_of(0, 2), 1, range(3), delay_ms=100_000_000)
    await asyncio.sleep(IDLE_S + 1)
    for _ in range(2):
        await collect(one)
    assert machines.shard_tip(0).previous_slot == 1
    for number in range(4):
        await one.add(topic_of(1, 2), number, range(3), delay_ms=100_000_000)
    return one


async def test_an_idle_shard_says_that_it_needs_less_when_much_of_the_log_is_kept_for_it(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await with_an_idle_shard(machines)
    before, checkpoints = machines.shard_tip(0), machines.keys(names.checkpoint_prefix(0))
    await collect(one)
    assert machines.shard_tip(0) == before, "little is kept"
    monkeypatch.setattr(checkpointing, "KEPT_BYTES_MAX", 500)
    await collect(one)
    after = machines.shard_tip(0)
    assert after.head.number == before.head.number + 1
    assert after.ranges[-1].after == names.number_of(machines.slots()[-1])
    assert machines.keys(names.checkpoint_prefix(0)) == checkpoints, "a commit without an object"
    await collect(one)
    assert machines.shard_tip(0) == after, "nothing was written since"
    one.kill()
    two = await machines.served_by("one", "daemon.shards=2")
    assert two.topic(topic_of(0, 2)).core.index.pending_rows == 3
    assert two.topic(topic_of(1, 2)).core.index.pending_rows == 12


async def test_an_idle_shard_says_that_it_needs_less_now_and_then_while_the_log_grows(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "KEPT_S_MAX", 300.0)
    one = await with_an_idle_shard(machines)
    before = machines.shard_tip(0)
    await asyncio.sleep(checkpointing.KEPT_S_MAX)
    await one.add(topic_of(1, 2), 9, range(3), delay_ms=100_000_000)
    await collect(one)
    after = machines.shard_tip(0)
    assert after.ranges[-1].after > before.ranges[-1].after
    await asyncio.sleep(checkpointing.KEPT_S_MAX)
    await collect(one)
    assert machines.shard_tip(0) == after, "an idle daemon writes nothing"


async def test_the_orderly_end_writes_a_checkpoint_of_each_shard_that_has_changed(machines: EngineFixture) -> None:
    one = await with_an_idle_shard(machines)
    idle = machines.shard_tip(0)
    await one.stop()
    assert machines.shard_tip(0) == idle
    assert machines.shard_tip(1).checkpoint_slot == 4
    assert machines.sections_to_read(1) == 0
