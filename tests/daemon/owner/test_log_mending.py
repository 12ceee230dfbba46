"""What an operator gives up of a dead daemon's log: all else is served on, and what comes later is kept."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import Corruption
from daemon.owner import engine, give_up, heartbeat
from daemon.owner.give_up import Loss, OwnedShard
from daemon.shard import topic_loading
from storage_backends import log_fence, object_store
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, Writer
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.topic_names import topic_of, topic_of_each
from tests.daemon.group_commit._support import log_owner
from tests.daemon.group_commit._support.log_owner import owner_of

SHARDS = 4
SEVERAL = (f"daemon.shards={SHARDS}", "collection.interval_s=86400")
FAR_MS = 500_000
TOPICS = topic_of_each(SHARDS)


async def with_rows(machines: EngineFixture) -> str:
    """A daemon has added a row to each topic, then one more to the first, sealed that one, and is dead; its log."""
    one = await machines.served_by("one", *SEVERAL)
    for topic in (*TOPICS, TOPICS[0]):
        await one.add(topic, len(machines.slots()), range(1), delay_ms=FAR_MS)
    await one.call(one.engine.requests.seal(TOPICS[0]))
    await asyncio.sleep(2 * heartbeat.INTERVAL_S)
    one.kill()
    return machines.slots()[-1].split("/")[1]


def damage(machines: EngineFixture, key: str) -> None:
    """Nothing of the slot is left, nor a note of its sections, as in slots of older versions."""
    _, metadata = machines.store.get_with_metadata(key)
    left = {name: value for name, value in metadata.items() if name != "sections"}
    machines.store.put(key, b"damaged", metadata=left)


def cut(machines: EngineFixture, key: str, length: int) -> bytes:
    """Only so many bytes of the slot are left; what it was."""
    body, metadata = machines.store.get_with_metadata(key)
    machines.store.put(key, body[:length], metadata=metadata)
    return body


async def not_serving(machines: EngineFixture, why: str) -> None:
    """A daemon serves nothing, and says why; then it is dead."""
    two = await machines.daemon("one", *SEVERAL).start()
    await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
    assert not two.engine.health.serving
    assert why in two.engine.health.reason
    two.kill()


def pending(daemon: Daemon) -> list[int]:
    return [daemon.topic(topic).core.index.pending_rows for topic in TOPICS]


@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "lost"])
async def test_what_is_given_up_of_the_newest_slot_costs_that_slot_and_nothing_that_comes_later(
    machines: EngineFixture, lost: bool
) -> None:
    log_id = await with_rows(machines)
    newest = machines.slots()[-1]
    if lost:
        machines.store.delete(newest)
    else:
        damage(machines, newest)
    await not_serving(machines, newest)
    written = machines.slots()
    said: list[str] = []
    assert not give_up.resolve_loss(machines.store, log_id, accepted=False, say=said.append)
    assert machines.slots() == written
    assert f"slots {names.number_of(newest)} to {names.number_of(newest)}" in said[0]
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=said.append)
    three = await machines.served_by("one", *SEVERAL)
    await three.until(lambda: three.engine.loaded)
    # What was sealed is in a bucket, and not in that slot alone.
    assert pending(three) == [2, 1, 1, 1]
    for topic in TOPICS:
        await three.add(topic, 1_000, range(1), delay_ms=FAR_MS)
    three.kill()
    four = await machines.served_by("one", *SEVERAL)
    await four.until(lambda: four.engine.loaded)
    assert pending(four) == [3, 2, 2, 2], "the numbers that the sealed topic knows are not used again"


@pytest.mark.parametrize("place", [0, 6, 20, 34, 47, 60, 90])
async def test_a_wrong_byte_before_the_sections_of_the_newest_slot_costs_nothing(
    machines: EngineFixture, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    await with_rows(machines)
    newest = machines.slots()[-1]
    body, metadata = machines.store.get_with_metadata(newest)
    machines.store.put(newest, body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :], metadata=metadata)
    two = await machines.served_by("one", *SEVERAL)
    assert pending(two) == [2, 1, 1, 1]
    assert "restored a damaged log slot" in caplog.text
    assert newest in caplog.text


@pytest.mark.parametrize("length", [0, 1, 51, 52, 60, 160])
async def test_a_newest_slot_that_is_cut_before_its_sections_costs_the_shards_with_a_section_in_it(
    machines: EngineFixture, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    log_id = await with_rows(machines)
    newest = machines.slots()[-1]
    assert log_slot_format.decode_log_slot(machines.store.get(newest)).shards == (0,)
    cut(machines, newest, length)
    two = await machines.daemon("one", *SEVERAL).start()
    await two.serving()
    await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
    assert sorted(two.shards) == [1, 2, 3]
    assert [two.topic(topic).core.index.pending_rows for topic in TOPICS[1:]] == [1, 1, 1]
    with pytest.raises(Corruption, match=r"shard 0, shard slot 2, .*: it is missing \(section of shard 0 in slot"):
        await two.add(TOPICS[0], 1_000, range(1), delay_ms=FAR_MS)
    assert f"`tarryd give-up {log_id}`" in two.engine.health.reason
    assert f"{newest} is damaged: it had sections of shards [0], and of no others" in caplog.text
    said: list[str] = []
    written = machines.keys("")
    assert not give_up.resolve_loss(machines.store, log_id, accepted=False, say=said.append)
    assert machines.keys("") == written
    assert "shard 0 section 2" in said[0]
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=said.append)
    await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
    assert pending(two) == [2, 1, 1, 1], "what was sealed is in a bucket, and not in that slot alone"
    for topic in TOPICS:
        await two.add(topic, 1_000, range(1), delay_ms=FAR_MS)
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=said.append)
    two.kill()
    three = await machines.served_by("one", *SEVERAL)
    await three.until(lambda: three.engine.loaded)
    assert pending(three) == [3, 2, 2, 2], "the numbers that the sealed topic knows are not used again"


async def test_a_newest_slot_that_was_cut_is_given_up_before_anybody_takes_over(machines: EngineFixture) -> None:
    log_id = await with_rows(machines)
    cut(machines, machines.slots()[-1], 30)
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None)
    two = await machines.served_by("one", *SEVERAL)
    await two.until(lambda: two.engine.loaded)
    assert pending(two) == [2, 1, 1, 1]


async def test_a_newest_slot_that_was_cut_and_is_restored_has_lost_nothing(machines: EngineFixture) -> None:
    await with_rows(machines)
    newest = machines.slots()[-1]
    body = cut(machines, newest, 30)
    two = await machines.daemon("one", *SEVERAL).start()
    await two.serving()
    assert 0 not in two.shards
    _, metadata = machines.store.get_with_metadata(newest)
    machines.store.put(newest, body, metadata=metadata)
    await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
    assert pending(two) == [2, 1, 1, 1]


async def test_a_newest_slot_that_was_cut_costs_no_shard_whose_checkpoint_covers_it(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for topic in (*TOPICS, TOPICS[0]):
        await one.add(topic, len(machines.slots()), range(1), delay_ms=FAR_MS)
    await one.shards[0].checkpoints.write_last()
    one.kill()
    newest = machines.slots()[-1]
    cut(machines, newest, 0)
    two = await machines.served_by("one", *SEVERAL)
    await two.until(lambda: two.engine.loaded)
    assert pending(two) == [2, 1, 1, 1]
    said: list[str] = []
    assert give_up.resolve_loss(machines.store, newest.split("/")[1], accepted=True, say=said.append)
    assert "no shard needs anything damaged at its end" in said[0]


async def test_a_close_that_was_cut_loses_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for topic in TOPICS:
        await one.add(topic, 1, range(1), delay_ms=FAR_MS)
    await one.stop()
    cut(machines, machines.slots()[-1], 0)
    two = await machines.served_by("one", *SEVERAL)
    await two.until(lambda: two.engine.loaded)
    assert pending(two) == [1, 1, 1, 1]


async def test_a_section_of_the_newest_slot_that_is_damaged_alone_can_be_given_up(machines: EngineFixture) -> None:
    log_id = await with_rows(machines)
    newest = machines.slots()[-1]
    body, metadata = machines.store.get_with_metadata(newest)
    machines.store.put(newest, body[:-1] + bytes([body[-1] ^ 1]), metadata=metadata)
    two = await machines.daemon("one", *SEVERAL).start()
    await two.serving()
    assert 0 not in two.shards
    assert f"`tarryd give-up {log_id}`" in two.engine.health.reason
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None)
    await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
    assert pending(two) == [2, 1, 1, 1]


async def test_a_slot_with_a_wrong_byte_is_restored_though_the_replay_begins_with_it(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    await one.add(TOPICS[0], 1, range(1), delay_ms=FAR_MS)
    for _ in range(2):
        await one.shards[0].checkpoints.write_last()
    await one.add(TOPICS[0], 2, range(1), delay_ms=FAR_MS)
    one.kill()
    newest = machines.slots()[-1]
    body, metadata = machines.store.get_with_metadata(newest)
    machines.store.put(newest, body[:50] + bytes([body[50] ^ 0x10]) + body[51:], metadata=metadata)
    two = await machines.served_by("one", *SEVERAL)
    assert two.topic(TOPICS[0]).core.index.pending_rows == 2


async def test_each_shard_is_told_what_it_may_have_lost_and_the_command_that_gives_it_up(
    machines: EngineFixture,
) -> None:
    log_id = await with_rows(machines)
    damage(machines, machines.slots()[-1])
    two = await machines.daemon("one", *SEVERAL).start()
    await asyncio.sleep(2 * engine.DAMAGED_LOOK_S)
    assert f"`tarryd give-up {log_id}`" in two.engine.health.reason
    said: list[str] = []
    give_up.resolve_loss(machines.store, log_id, accepted=False, say=said.append)
    assert "shard 0 sections 2 to 2" in said[0]
    assert "shard 3 sections 2 to 2" in said[0]


async def test_a_fence_between_what_is_written_for_a_loss_loses_nothing_that_comes_later(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    sealed = TOPICS[0]
    beside = topic_of(0, SHARDS, "u")
    await one.add(beside, 0, range(1), delay_ms=FAR_MS)
    for ledger in range(3):
        await one.add(sealed, ledger, range(1), delay_ms=FAR_MS)
    await one.call(one.engine.requests.seal(sealed))
    await asyncio.sleep(2 * heartbeat.INTERVAL_S)
    one.kill()
    log_id = machines.slots()[-1].split("/")[1]
    for key in machines.slots()[-2:]:
        damage(machines, key)
    slots = Loss.slots
    monkeypatch.setattr(Loss, "slots", lambda loss: slots(loss)[:1])
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None)
    two = await machines.served_by("one", *SEVERAL)
    with pytest.raises(Corruption, match="it was sealed as of shard slot"):
        await two.add(sealed, 7, range(1), delay_ms=FAR_MS)
    await two.add(beside, 1, range(1), delay_ms=FAR_MS)
    await asyncio.sleep(2 * topic_loading.DAMAGED_LOOK_S)
    await two.add(sealed, 7, range(1), delay_ms=FAR_MS)
    two.kill()
    three = await machines.served_by("one", *SEVERAL)
    await three.until(lambda: three.engine.loaded)
    assert three.topic(sealed).core.index.pending_rows == 4
    assert three.topic(beside).core.index.pending_rows == 2


async def test_a_log_that_is_whole_is_left_as_it_is(machines: EngineFixture) -> None:
    log_id = await with_rows(machines)
    written = machines.slots()
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None)
    assert machines.slots() == written
    await machines.served_by("one", *SEVERAL)
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None) is True


async def test_a_log_that_no_shard_names_is_nothing_to_give_up(machines: EngineFixture) -> None:
    await with_rows(machines)
    with pytest.raises(object_store.Damaged, match="it has no slot"):
        give_up.resolve_loss(machines.store, "0" * 26, accepted=True, say=lambda text: None)


async def test_every_lost_slot_may_have_had_a_section_of_each_shard(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0, 1)
    await north.write(0)
    slots = log_owner.log_of(machines, north.log_id)
    loss = give_up.find_loss(slots, [OwnedShard(north.tip(0), 0), OwnedShard(north.tip(1), 7)], told=5)
    assert loss == Loss(
        north.log_id, after=3, through=5, highest=3, heads={0: Head(1, 2), 1: Head(1, 1)}, sections={0: 2, 1: 6}
    )
    made = [log_slot_format.decode_log_slot(body) for _, body in loss.slots()]
    assert [number for number, _ in loss.slots()] == [4, 5, 6, 7, 8, 9]
    assert [slot.shards for slot in made] == [(0, 1)] * 2 + [(1,)] * 4
    assert made[-1].header.heads == {0: Head(1, 4), 1: Head(1, 7)}
    assert {slot.header.kind for slot in made} == {LogSlotKind.DATA}


async def test_where_no_slot_can_be_read_the_checkpoints_say_how_far_the_log_went(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    await north.checkpoint(0)
    opened, newest = machines.slots()
    machines.store.delete(opened)
    damage(machines, newest)
    slots = log_owner.log_of(machines, north.log_id)
    loss = give_up.find_loss(slots, [OwnedShard.of(north.tip(0), [])], told=0)
    assert loss is not None
    assert (loss.after, loss.through, loss.heads, loss.sections) == (1, 2, {0: Head(1, 1)}, {0: 1})


async def test_a_false_fence_below_a_damaged_slot_is_not_the_end(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    for _ in range(3):
        await north.write(0)
    slots = log_owner.log_of(machines, north.log_id)
    opened = log_fence.read_one(slots, 1)
    assert opened is not None
    for number in (2, 3):
        machines.store.delete(names.log_slot_key(north.log_id, number))
    header = LogSlotHeader(
        log_id=north.log_id, number=2, kind=LogSlotKind.FENCE, heads=opened.header.heads, writer=Writer("s", "", "")
    )
    slots.create(2, log_slot_format.encode_log_slot(header))
    damage(machines, names.log_slot_key(north.log_id, 4))
    loss = give_up.find_loss(slots, [OwnedShard.of(north.tip(0), [])], told=4)
    assert loss is not None
    assert (loss.after, loss.through, loss.heads, loss.sections) == (1, 4, {0: Head(1, 0)}, {0: 3})


async def test_a_log_that_goes_on_is_not_given_up(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    slots = log_owner.log_of(machines, north.log_id)
    loss = give_up.find_loss(slots, [OwnedShard(north.tip(0), 0)], told=3)
    assert loss is not None
    await north.write(0)
    with pytest.raises(give_up.StillWritten, match="its daemon lives"):
        give_up.fill_lost_slots(slots, loss)
