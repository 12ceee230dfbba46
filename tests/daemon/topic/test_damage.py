"""What is stored and cannot be read: the part that is damaged is named and refused, or quarantined, and all else is
served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import pytest

from daemon.errors import Corruption, InvariantViolated, NotOwner, OutcomeUnknown
from daemon.owner import engine, heartbeat
from storage_backends.formats import bucket_format, names
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.formats.manifest import LiveBucket
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.fault_store import Fault
from tests._support.topic_names import topic_of

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")
SHARDS = 4
SEVERAL = (f"daemon.shards={SHARDS}", "collection.interval_s=86400")
OFTEN = ("journal.checkpoint_slots=5",)
FAR_MS = 500_000


def alter(machines: EngineFixture, key: str, place: float = 0.5) -> None:
    """Flips a bit; done twice it mends. `place`: 0.0 is the beginning of the object, 1.0 its end."""
    body, metadata = machines.store.get_with_metadata(key)
    altered = bytearray(body)
    altered[min(int(len(body) * place), len(body) - 1)] ^= 0x10
    machines.store.put(key, bytes(altered), metadata=metadata)


def alter_part(machines: EngineFixture, live: LiveBucket, part: str) -> None:
    """Flips a bit of a bucket's `footer`, `metadata` or first `segment`."""
    size = live.object.size_bytes
    offset, length = bucket_format.tail_range(size, live.segments)
    table = bucket_format.decode_tail(machines.store.get_range(live.object.name, offset, length), size)
    middle = {
        "footer": size - 2,
        "metadata": table.metadata.offset + table.metadata.length // 2,
        "segment": table.segments[0].offset + table.segments[0].length // 2,
    }[part]
    alter(machines, live.object.name, middle / size)


# ---- buckets


async def with_two_buckets(machines: EngineFixture) -> tuple[LiveBucket, LiveBucket]:
    """A daemon sealed 20 rows of ledger 1 and 20 of ledger 2 into a bucket each, and was killed.

    They are not due for so long that the next one does not load them at once.
    """
    one = await machines.served_by("one", *SMALL)
    await one.call(one.engine.requests.create_subscription("t", "s"))
    for ledger_id in (1, 2):
        await one.add("t", ledger_id, range(20), delay_ms=60_000)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 2)
    one.kill()
    first, second = machines.topic_tip().live
    return first, second


async def heals(machines: EngineFixture, daemon: Daemon, damaged: LiveBucket) -> None:
    """The rows of ledger 1 are lost with their bucket; adding the range again heals it, also over a restart."""
    (needed,) = daemon.topic("t").core.rebuild_needed()
    assert (needed.first_ledger_id, needed.last_ledger_id, needed.rows) == (1, 1, 20)
    assert needed.bucket == damaged.object.name
    outcome = await daemon.add("t", 1, range(10), delay_ms=5_000)
    assert (outcome.accepted, outcome.duplicates) == (10, 0)
    daemon.kill()
    after = await machines.served_by("one", *SMALL)
    (needed,) = after.topic("t").core.rebuild_needed()
    assert needed.rows == 10
    outcome = await after.add("t", 1, range(20), delay_ms=5_000)
    assert (outcome.accepted, outcome.duplicates) == (10, 10)
    assert not after.topic("t").core.rebuild_needed()
    receiver = await after.receiver("t")
    await receiver.received(40)
    await asyncio.sleep(30)
    assert len(receiver.rows) == len(receiver.positions) == 40
    assert await receiver.acknowledge(receiver.rows) == 0
    assert damaged.object.name in machines.keys("/buckets/"), "what is damaged is never deleted"


def quarantined(machines: EngineFixture) -> list[LiveBucket]:
    return [live for live in machines.topic_tip().live if live.quarantined]


@pytest.mark.parametrize("part", ["footer", "metadata"])
async def test_a_bucket_with_a_damaged_head_is_quarantined_at_the_start_and_healed_by_adding_again(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    first, _ = await with_two_buckets(machines)
    alter_part(machines, first, part)
    two = await machines.served_by("one", *SMALL)
    (live,) = quarantined(machines)
    assert live.object.name == first.object.name
    assert first.object.name in live.damage
    assert two.damage_found("bucket") == 1
    assert any(first.object.name in each.getMessage() for each in caplog.records if each.levelno == logging.ERROR)
    await heals(machines, two, first)


async def test_a_bucket_whose_object_is_missing_is_quarantined_at_the_start(machines: EngineFixture) -> None:
    first, _ = await with_two_buckets(machines)
    body = machines.store.get(first.object.name)
    machines.store.delete(first.object.name)
    two = await machines.served_by("one", *SMALL)
    (live,) = quarantined(machines)
    assert "missing" in live.damage
    machines.store.put(first.object.name, body)
    await heals(machines, two, first)


async def segment_damaged(machines: EngineFixture, first: LiveBucket) -> tuple[Daemon, Receiver]:
    """A daemon serves, and finds the damage when the rows are due."""
    two = await machines.served_by("one", *SMALL)
    assert not quarantined(machines)
    alter_part(machines, first, "segment")
    receiver = await two.receiver("t")
    await two.until(lambda: bool(quarantined(machines)))
    await receiver.received(20)
    assert {ledger_id for ledger_id, _ in receiver.positions} == {2}
    return two, receiver


async def test_a_damaged_segment_is_quarantined_when_it_is_read_and_the_others_are_handed_out(
    machines: EngineFixture,
) -> None:
    first, _ = await with_two_buckets(machines)
    two, _ = await segment_damaged(machines, first)
    (live,) = quarantined(machines)
    assert "segment 1 is damaged at byte" in live.damage
    await heals(machines, two, first)


async def test_a_bucket_that_vanishes_while_it_is_served_is_quarantined(machines: EngineFixture) -> None:
    first, _ = await with_two_buckets(machines)
    two = await machines.served_by("one", *SMALL)
    body = machines.store.get(first.object.name)
    machines.store.delete(first.object.name)
    receiver = await two.receiver("t")
    await receiver.received(20)
    await two.until(lambda: bool(quarantined(machines)))
    machines.store.put(first.object.name, body)
    await heals(machines, two, first)


async def test_what_was_acknowledged_of_a_damaged_bucket_is_not_missing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(20))
    await receiver.received(20)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    assert await receiver.acknowledge(receiver.rows[:15]) == 0
    (live,) = machines.topic_tip().live
    one.kill()
    alter_part(machines, live, "footer")
    two = await machines.served_by("one", *SMALL)
    (needed,) = two.topic("t").core.rebuild_needed()
    assert needed.rows == 5
    again = await two.receiver("t")
    outcome = await two.add("t", 1, [row[1] for row in receiver.rows[15:]])
    assert outcome.accepted == 5
    await again.received(5)
    assert again.positions == {row[:2] for row in receiver.rows[15:]}
    assert not two.topic("t").core.rebuild_needed()


@pytest.mark.parametrize("fault", [Fault.FLIP_BIT, Fault.SHORT])
async def test_damage_that_a_second_read_does_not_find_quarantines_nothing(
    machines: EngineFixture, fault: Fault
) -> None:
    await with_two_buckets(machines)
    two = machines.daemon("one", *SMALL)
    two.script.plan("get_range", fault, key_part="/buckets/")
    await two.start()
    await two.serving()
    two.script.plan("get_range", fault, key_part="/buckets/")
    await (await two.receiver("t")).received(40)
    assert not two.script.unmet()
    assert not quarantined(machines)


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.REFUSE])
async def test_an_error_of_the_store_quarantines_nothing_however_often_it_comes(
    machines: EngineFixture, fault: Fault
) -> None:
    await with_two_buckets(machines)
    two = machines.daemon("one", *SMALL)
    two.script.plan("get_range", fault, key_part="/buckets/", times=10)
    await two.start()
    await two.serving()
    two.script.plan("get_range", fault, key_part="/buckets/", times=20)
    await (await two.receiver("t")).received(40)
    assert not two.script.unmet()
    assert not quarantined(machines)


async def test_a_quarantine_and_a_seal_are_committed_one_after_the_other(machines: EngineFixture) -> None:
    first, _ = await with_two_buckets(machines)
    two = await machines.served_by("one", *SMALL)
    held = two.pause("put", "/buckets/")
    await two.add("t", 3, range(20), delay_ms=FAR_MS)
    await held.reached()
    alter_part(machines, first, "segment")
    await (await two.receiver("t")).received(20)
    assert not quarantined(machines)
    held.release()
    await two.until(lambda: bool(quarantined(machines)))
    assert len(machines.topic_tip().live) == 3
    await two.add("t", 4, range(20), delay_ms=FAR_MS)
    await two.until(lambda: len(machines.topic_tip().live) == 4)
    two.kill()
    three = await machines.served_by("one", *SMALL)
    assert three.topic("t").core.index.pending_rows == 40
    assert [needed.rows for needed in three.topic("t").core.rebuild_needed()] == [20]


async def test_a_quarantined_bucket_is_not_dropped_when_all_of_it_has_gone(machines: EngineFixture) -> None:
    first, _ = await with_two_buckets(machines)
    two, receiver = await segment_damaged(machines, first)
    await two.add("t", 1, range(20))
    await receiver.received(40)
    assert await receiver.acknowledge(receiver.rows) == 0
    await two.stop()
    assert first.object.name in {live.object.name for live in machines.topic_tip().live}
    three = await machines.served_by("one", *SMALL)
    assert not three.topic("t").core.rebuild_needed()


async def test_a_crash_before_the_quarantine_is_committed_changes_nothing(machines: EngineFixture) -> None:
    first, _ = await with_two_buckets(machines)
    two = await machines.served_by("one", *SMALL)
    alter_part(machines, first, "segment")
    held = two.pause("put_if_absent", f"{names.topic_id('t')}/manifest", then=Fault.FAIL_BEFORE)
    await (await two.receiver("t")).received(20)
    await held.reached()
    # Until the manifest says that it is damaged, its rows are there: nothing is added twice.
    assert (await two.add("t", 1, range(20))).duplicates == 20
    two.kill()
    assert not quarantined(machines)
    three = await machines.served_by("one", *SMALL)
    await (await three.receiver("t")).received(20)
    await three.until(lambda: bool(quarantined(machines)))


# ---- shards


async def with_a_topic_a_shard(machines: EngineFixture, *settings: str, slots: int = 4) -> None:
    one = await machines.served_by("one", *SEVERAL, *settings)
    for shard in range(SHARDS):
        for ledger_id in range(slots):
            await one.add(topic_of(shard, SHARDS), ledger_id, range(3), delay_ms=FAR_MS)
            await asyncio.sleep(0.1)
    one.kill()


async def check_serves(daemon: Daemon, shards: Iterable[int]) -> None:
    for shard in shards:
        assert (await daemon.add(topic_of(shard, SHARDS), 0, range(4), delay_ms=FAR_MS)).duplicates >= 3


def place_of(key: str) -> tuple[str, str]:
    """How a damaged slot of a log is named: each has one section here."""
    log_id = key.split("/")[1]
    return f"logs/{log_id}/", f"slot {names.number_of(key)} of log {log_id}"


async def check_that_only_the_shard_is_refused(machines: EngineFixture, damaged: int, *parts: str) -> Daemon:
    """It is refused by name, the others are served; looking again writes nothing at all until it can be read."""
    two = await machines.daemon("one", *SEVERAL).start()
    await two.serving()
    others = [shard for shard in range(SHARDS) if shard != damaged]
    await check_serves(two, others)
    with pytest.raises(Corruption) as refused:
        await two.add(topic_of(damaged, SHARDS), 0, range(3))
    for part in (f"shard {damaged}", *parts):
        assert part in str(refused.value)
    assert f"shard {damaged} is damaged" in two.engine.health.reason
    assert two.damage_found("shard") == 1
    written = machines.keys(f"shards/{damaged:02d}/")
    manifests = {shard: machines.keys(names.shard_manifest_prefix(shard)) for shard in others}
    await asyncio.sleep(10 * engine.DAMAGED_LOOK_S)
    assert machines.keys(f"shards/{damaged:02d}/") == written
    assert {shard: machines.keys(names.shard_manifest_prefix(shard)) for shard in others} == manifests
    assert two.metrics.registry.get_sample_value("tarry_shards_damaged") == 1
    return two


async def check_that_it_is_served_again(daemon: Daemon, damaged: int) -> None:
    epochs = {number: shard.epoch for number, shard in daemon.shards.items()}
    await asyncio.sleep(engine.DAMAGED_LOOK_S + 1)
    await daemon.serving()
    await check_serves(daemon, range(SHARDS))
    assert {number: daemon.shards[number].epoch for number in epochs} == epochs, "nothing else was claimed"
    assert "damaged" not in daemon.engine.health.reason
    assert daemon.topic(topic_of(damaged, SHARDS)).core.index.pending_rows == 13


async def test_a_damaged_slot_refuses_its_shard_alone_until_it_is_mended(machines: EngineFixture) -> None:
    await with_a_topic_a_shard(machines)
    key = machines.slots_of(2)[2]
    alter(machines, key, 0.8)
    two = await check_that_only_the_shard_is_refused(machines, 2, *place_of(key), "shard slot 3", "at byte")
    alter(machines, key, 0.8)
    await check_that_it_is_served_again(two, 2)


async def test_damage_in_the_log_that_is_written_costs_every_shard_one_short_takeover(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for shard in range(SHARDS):
        await one.add(topic_of(shard, SHARDS), 1, range(5), 3_600_000)
    key = machines.slots_of(2)[0]
    alter(machines, key, 0.8)
    one.context.run(one.shards[2].lose, InvariantViolated("a row is waiting twice"))
    await one.until(lambda: len(machines.slots(LogSlotKind.CLOSE)) == 1, timeout_s=5)
    await one.until(lambda: sorted(one.shards) == [0, 1, 3], timeout_s=5)
    await one.until(lambda: machines.shard_tip(2).open_range is None, timeout_s=5)
    written = machines.keys("shards/02/")
    epochs = {number: shard.epoch for number, shard in one.shards.items()}
    await asyncio.sleep(10 * engine.DAMAGED_LOOK_S)
    assert machines.keys("shards/02/") == written, "it is looked at, and not claimed again and again"
    assert {number: shard.epoch for number, shard in one.shards.items()} == epochs
    for shard in (0, 1, 3):
        assert (await one.add(topic_of(shard, SHARDS), 2, range(5), 3_600_000)).accepted == 5
    with pytest.raises(Corruption, match=r"shard 2, .*shard slot 1"):
        await one.add(topic_of(2, SHARDS), 2, range(5))
    alter(machines, key, 0.8)
    await one.until(lambda: 2 in one.shards and one.engine.loaded, timeout_s=engine.DAMAGED_LOOK_S + 1)
    assert one.topic(topic_of(2, SHARDS)).core.indexes.present_rows == 5
    assert len(machines.slots(LogSlotKind.CLOSE)) == 1


async def test_a_missing_slot_refuses_its_shard_alone(machines: EngineFixture) -> None:
    await with_a_topic_a_shard(machines)
    key = machines.slots_of(2)[2]
    machines.store.delete(key)
    await check_that_only_the_shard_is_refused(machines, 2, place_of(key)[0], "shard slot 3", "it is missing")


@pytest.mark.parametrize("damaged", [0, 3])
async def test_a_damaged_shard_manifest_refuses_its_shard_alone_until_it_is_mended(
    machines: EngineFixture, damaged: int
) -> None:
    await with_a_topic_a_shard(machines)
    key = machines.keys(names.shard_manifest_prefix(damaged))[-1]
    alter(machines, key)
    two = await check_that_only_the_shard_is_refused(machines, damaged, key)
    alter(machines, key)
    await check_that_it_is_served_again(two, damaged)


async def test_two_damaged_checkpoints_refuse_their_shard_alone(machines: EngineFixture) -> None:
    await with_a_topic_a_shard(machines, *OFTEN, slots=17)
    tip = machines.shard_tip(1)
    assert tip.checkpoint is not None
    assert tip.previous_checkpoint is not None
    for reference in (tip.checkpoint, tip.previous_checkpoint):
        alter(machines, reference.object.name)
    two = await check_that_only_the_shard_is_refused(machines, 1, tip.previous_checkpoint.object.name)
    assert two.damage_found("checkpoint") >= 1
    alter(machines, tip.previous_checkpoint.object.name)
    await asyncio.sleep(engine.DAMAGED_LOOK_S + 1)
    await check_serves(two, range(SHARDS))


async def test_when_every_shard_is_damaged_the_daemon_serves_none_and_claims_none(machines: EngineFixture) -> None:
    await with_a_topic_a_shard(machines)
    keys = [machines.slots_of(shard)[2] for shard in range(SHARDS)]
    for key in keys:
        alter(machines, key, 1.0)
    two = await machines.daemon("one", *SEVERAL).start()
    await two.until(lambda: "shard 0, shard slot 3" in two.engine.health.reason)
    written = machines.keys("shards/"), machines.slots()
    await asyncio.sleep(5 * engine.DAMAGED_LOOK_S)
    assert (machines.keys("shards/"), machines.slots()) == written
    assert not two.engine.health.serving
    for key in keys:
        alter(machines, key, 1.0)
    await two.serving()
    await check_serves(two, range(SHARDS))


async def test_a_daemon_that_is_started_again_finds_that_slots_of_its_log_are_lost(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for shard in range(SHARDS):
        await one.add(topic_of(shard, SHARDS), 0, range(3), delay_ms=FAR_MS)
    await asyncio.sleep(2 * heartbeat.INTERVAL_S)
    one.kill()
    lost = machines.slots()[-1]
    whole, metadata = machines.store.get_with_metadata(lost)
    machines.store.delete(lost)
    written = machines.keys("shards/"), machines.slots()
    for _ in range(2):
        # Its own heartbeats do not make it forget what it had told.
        two = await machines.daemon("one", *SEVERAL).start()
        await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
        assert not two.engine.health.serving
        assert "the store has lost slots" in two.engine.health.reason
        assert (machines.keys("shards/"), machines.slots()) == written
        assert two.damage_found("shard") == SHARDS
        two.kill()
    machines.store.put(lost, whole, metadata=metadata)
    await check_serves(await machines.served_by("one", *SEVERAL), range(SHARDS))


async def test_a_damaged_shard_belongs_to_nobody_and_keeps_no_successor_waiting(machines: EngineFixture) -> None:
    await with_a_topic_a_shard(machines)
    key = machines.slots_of(2)[2]
    alter(machines, key, 1.0)
    two = await machines.served_by("two", *SEVERAL)
    assert machines.shard_tip(2).owner == ""
    await two.stop()
    asked_s = machines.loop.time()
    three = await machines.served_by("three", *SEVERAL)
    assert machines.loop.time() - asked_s < 2
    await check_serves(three, (0, 1, 3))


async def test_a_damaged_format_refuses_the_root(machines: EngineFixture) -> None:
    await with_a_topic_a_shard(machines)
    alter(machines, names.FORMAT_KEY)
    written = machines.keys("shards/")
    two = machines.daemon("one", *SEVERAL)
    with pytest.raises(Corruption, match=names.FORMAT_KEY):
        await two.start()
    assert machines.keys("shards/") == written


# ---- a shard that was lost


async def superseded(machines: EngineFixture) -> Daemon:
    """A daemon that was frozen while another took its shard, and does not know it yet."""
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("t", "s"))
    one.freeze()
    await machines.served_by("two")
    return one


async def test_who_adds_to_a_shard_that_was_fenced_is_told_the_new_owner_at_once(machines: EngineFixture) -> None:
    one = await superseded(machines)
    waiting = one.add("t", 1, range(10))
    await asyncio.sleep(0.01)
    one.thaw()
    with pytest.raises(OutcomeUnknown) as staged:
        await waiting
    with pytest.raises(NotOwner) as told:
        await one.add("t", 2, range(10))
    assert staged.value.owner_address == told.value.owner_address == "two:1"


async def test_who_changes_a_topic_of_a_shard_that_was_lost_is_told_the_new_owner_at_once(
    machines: EngineFixture,
) -> None:
    one = await superseded(machines)
    waiting = one.call(one.engine.requests.create_subscription("t", "another"))
    await asyncio.sleep(0.01)
    one.thaw()
    with pytest.raises(NotOwner) as told:
        await waiting
    assert told.value.owner_address == "two:1"
