"""What left a root is found by what still names it; nothing is served as new in its place."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from daemon.errors import Corruption
from daemon.owner import engine, give_up, heartbeat
from storage_backends import object_store
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import LogSlotHeader, LogSlotKind
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.topic_names import topic_of, topic_of_each

SHARDS, SHARD = 4, 2
SEVERAL = (f"daemon.shards={SHARDS}", "collection.interval_s=86400")
FAR_MS = 50_000_000_000
TOPICS = topic_of_each(SHARDS)
TOPIC = TOPICS[SHARD]
BESIDE = topic_of(SHARD, SHARDS, "u")
LOOKED_S = 2 * engine.DAMAGED_LOOK_S


async def with_rows(machines: EngineFixture, *, orderly: bool) -> None:
    """A daemon has a sealed row and another one in each topic, and has ended."""
    one = await machines.served_by("one", *SEVERAL)
    for topic in (*TOPICS, BESIDE):
        await one.add(topic, 1, range(1), delay_ms=FAR_MS)
        await one.call(one.engine.requests.seal(topic))
        await one.add(topic, 2, range(1), delay_ms=FAR_MS)
    await asyncio.sleep(2 * heartbeat.INTERVAL_S)
    if orderly:
        await one.stop()
    else:
        one.kill()


def lose(machines: EngineFixture, *parts: str) -> dict[str, bytes]:
    """Delete all objects whose keys have one of the parts; what they were."""
    keys = [key for part in parts for key in machines.keys(part)]
    lost = {key: machines.store.get(key) for key in keys}
    for key in keys:
        machines.store.delete(key)
    assert lost
    return lost


def pending(daemon: Daemon, *topics: str) -> list[int]:
    return [daemon.topic(topic).core.index.pending_rows for topic in topics]


async def refused(daemon: Daemon, topic: str, why: str) -> None:
    with pytest.raises(Corruption, match=why):
        await daemon.add(topic, 9, range(1), delay_ms=FAR_MS)


@pytest.mark.parametrize("left", ["topics", "checkpoints", "heartbeat", "heads"])
@pytest.mark.parametrize("orderly", [True, False], ids=["ended", "killed"])
async def test_a_shard_without_a_manifest_that_anything_names_is_damage(
    machines: EngineFixture, left: str, orderly: bool
) -> None:
    await with_rows(machines, orderly=orderly)
    shard = names.shard_prefix(SHARD)
    checkpoints = machines.keys(names.checkpoint_prefix(SHARD))
    if left == "checkpoints" and not checkpoints:
        return
    lost = {"topics": [f"{shard}manifest/", *checkpoints], "checkpoints": [f"{shard}manifest/", f"{shard}topics/"]}
    gone = lose(machines, *lost.get(left, [shard]))
    if left == "heartbeat":
        lose(machines, names.LOGS_PREFIX)
        for number in range(SHARDS):
            if number != SHARD:
                lose(machines, names.shard_prefix(number))
    two = await machines.daemon("one" if left != "heartbeat" else "two", *SEVERAL).start()
    if left == "heartbeat":
        beat = heartbeat.read_heartbeat(machines.store, "one")
        assert (beat is not None and bool(beat.shards)) == (not orderly)
        if orderly:
            return
        await asyncio.sleep(LOOKED_S)
        assert not two.engine.failed.done()
        assert "the heartbeat of daemon one names it" in two.engine.health.reason
        return
    await two.serving()
    await asyncio.sleep(LOOKED_S)
    assert SHARD not in two.shards
    assert pending(two, *(topic for topic in TOPICS if topic != TOPIC)) == [2, 2, 2]
    await refused(two, TOPIC, f"shard {SHARD} has no manifest, but .*: the store has lost it")
    assert f"tarryd give-up --shard {SHARD}" in two.engine.health.reason
    for key, body in gone.items():
        machines.store.put(key, body)
    await asyncio.sleep(LOOKED_S)
    assert pending(two, *TOPICS, BESIDE) == [2] * (SHARDS + 1)


async def test_a_shard_that_has_lost_its_manifests_begins_anew_when_that_is_accepted(machines: EngineFixture) -> None:
    await with_rows(machines, orderly=False)
    lose(machines, f"{names.shard_prefix(SHARD)}manifest/")
    said: list[str] = []
    written = machines.keys("")
    assert not give_up.begin_anew(machines.store, SHARD, accepted=False, say=said.append)
    assert machines.keys("") == written
    assert "2 topics are left as they were sealed" in said[0]
    assert give_up.begin_anew(machines.store, SHARD, accepted=True, say=said.append)
    two = await machines.served_by("one", *SEVERAL)
    assert pending(two, *TOPICS, BESIDE) == [
        1 if names.shard_of(each, SHARDS) == SHARD else 2 for each in (*TOPICS, BESIDE)
    ]
    await two.add(TOPIC, 3, range(3), delay_ms=FAR_MS)
    two.kill()
    three = await machines.served_by("one", *SEVERAL)
    assert pending(three, TOPIC, BESIDE) == [4, 1]
    assert give_up.begin_anew(machines.store, SHARD, accepted=True, say=said.append)
    with pytest.raises(Corruption, match="no FORMAT of a root that has shard 9"):
        give_up.begin_anew(machines.store, 9, accepted=True, say=said.append)


async def test_the_epoch_of_an_owner_that_has_written_nothing_is_not_used_again(machines: EngineFixture) -> None:
    await with_rows(machines, orderly=False)
    beat = heartbeat.read_heartbeat(machines.store, "one")
    assert beat is not None
    epochs = tuple(7 if shard == SHARD else epoch for shard, epoch in zip(beat.shards, beat.epochs, strict=True))
    body = msgspec.json.encode(msgspec.structs.replace(beat, epochs=epochs))
    machines.store.put(names.daemon_key("one"), body)
    lose(machines, f"{names.shard_prefix(SHARD)}manifest/")
    assert give_up.begin_anew(machines.store, SHARD, accepted=True, say=lambda text: None)
    two = await machines.served_by("two", *SEVERAL)
    assert two.shards[SHARD].epoch > 7


async def test_of_two_that_begin_a_shard_anew_one_is_told_that_it_is_done(machines: EngineFixture) -> None:
    await with_rows(machines, orderly=False)
    lose(machines, f"{names.shard_prefix(SHARD)}manifest/")

    def meanwhile(_: str) -> None:
        give_up.begin_anew(machines.store, SHARD, accepted=True, say=lambda text: None)

    with pytest.raises(give_up.StillWritten, match=f"shard {SHARD}: the shard has manifest 1 by now"):
        give_up.begin_anew(machines.store, SHARD, accepted=True, say=meanwhile)


async def test_a_shard_that_nothing_names_is_new(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SEVERAL)
    assert sorted(one.shards) == list(range(SHARDS))


async def test_a_shard_that_another_daemon_claims_meanwhile_is_not_lost(machines: EngineFixture) -> None:
    two = machines.daemon("two", *SEVERAL)
    held = two.pause("list", names.topics_prefix(0))
    await two.start()
    await held.reached()
    one = await machines.served_by("one", *SEVERAL)
    await one.add(TOPICS[0], 1, range(1), delay_ms=FAR_MS)
    await asyncio.sleep(2 * heartbeat.INTERVAL_S)
    held.release()
    await asyncio.sleep(LOOKED_S)
    assert two.damage_found("shard") == 0
    assert two.engine.health.stands_by
    assert sorted(one.shards) == list(range(SHARDS))


@pytest.mark.parametrize("lost", ["all", "manifests", "newest"])
async def test_a_topic_that_has_lost_its_manifests_is_damage_and_no_new_topic(
    machines: EngineFixture, lost: str
) -> None:
    await with_rows(machines, orderly=True)
    topic = names.topic_prefix(SHARD, names.topic_id(TOPIC))
    parts = {"all": topic, "manifests": f"{topic}manifest/", "newest": machines.keys(f"{topic}manifest/")[-1]}
    gone = lose(machines, parts[lost])
    two = await machines.served_by("one", *SEVERAL)
    await asyncio.sleep(1)
    await refused(two, TOPIC, f"missing.*{topic}manifest/|{topic}manifest/.*missing")
    assert pending(two, *(each for each in (*TOPICS, BESIDE) if each != TOPIC)) == [2] * SHARDS
    assert two.engine.health.reason == "serving; 1 topics are damaged"
    assert two.damage_found("topic") == 1
    # Its checkpoints remember it, too.
    await two.add(BESIDE, 5, range(1), delay_ms=FAR_MS)
    await two.stop()
    three = await machines.served_by("one", *SEVERAL)
    await asyncio.sleep(1)
    await refused(three, TOPIC, "missing")
    for key, body in gone.items():
        machines.store.put(key, body)
    await asyncio.sleep(LOOKED_S)
    assert pending(three, TOPIC, BESIDE) == [2, 3]


COLLECTED = (
    "collection.interval_s=60",
    "collection.orphan_interval_s=60",
    "collection.orphan_age_s=60",
    "collection.grace_s=0",
)


@pytest.mark.parametrize("lost", ["newest manifest of a topic", "manifests of a shard"])
async def test_what_has_lost_its_manifests_loses_nothing_to_collection_until_they_are_restored(
    machines: EngineFixture, lost: str
) -> None:
    await with_rows(machines, orderly=True)
    topic = machines.keys(names.topic_manifest_prefix(SHARD, names.topic_id(TOPIC)))[-1]
    gone = lose(machines, topic if lost.startswith("newest") else names.shard_manifest_prefix(SHARD))
    two = await machines.served_by("one", *SEVERAL, *COLLECTED)
    for _ in range(3):
        for each in TOPICS:
            if each != TOPIC:
                await two.add(each, 7, range(1), delay_ms=FAR_MS)
        await asyncio.sleep(400)
    for key, body in gone.items():
        machines.store.put(key, body)
    await asyncio.sleep(LOOKED_S)
    assert two.topic(TOPIC).core.index.pending_rows == 2
    assert two.topic(BESIDE).core.index.pending_rows == 2
    three = await machines.served_by("one", *SEVERAL)
    assert pending(three, TOPIC, BESIDE) == [2, 2]


async def test_a_topic_that_was_deleted_is_not_missed(machines: EngineFixture) -> None:
    await with_rows(machines, orderly=True)
    two = await machines.served_by("one", *SEVERAL)
    await two.call(two.engine.requests.delete_topic(TOPIC))
    await two.add(BESIDE, 5, range(1), delay_ms=FAR_MS)
    await two.stop()
    lose(machines, names.topic_prefix(SHARD, names.topic_id(TOPIC)))
    three = await machines.served_by("one", *SEVERAL)
    assert pending(three, BESIDE) == [3]
    assert three.engine.health.reason == "serving"


async def test_a_fence_below_what_the_daemon_reported_is_no_end(machines: EngineFixture) -> None:
    await with_rows(machines, orderly=True)
    assert machines.slots()
    log_id = machines.slots()[-1].split("/")[1]
    told = names.number_of(machines.slots()[-1])
    _, metadata = machines.store.get_with_metadata(machines.slots()[-1])
    early = names.log_slot_key(log_id, 4)
    before = log_slot_format.decode_log_slot(machines.store.get(names.log_slot_key(log_id, 3)))
    false = log_slot_format.encode_log_slot(
        LogSlotHeader(log_id=log_id, number=4, kind=LogSlotKind.CLOSE, heads=before.header.heads)
    )
    lose(machines, *(names.log_slot_key(log_id, number) for number in range(4, told + 1)))
    machines.store.put(early, false, metadata=metadata)
    two = await machines.daemon("one", *SEVERAL).start()
    await asyncio.sleep(LOOKED_S)
    assert not two.shards
    assert "the store has lost slots after 4" in two.engine.health.reason
    assert f"tarryd give-up {log_id}" in two.engine.health.reason
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None)
    await two.serving()


@pytest.mark.parametrize("checkpoints", [1, 2], ids=["below the checkpoint", "below the whole range"])
async def test_the_end_of_a_log_that_only_a_manifest_knows_can_be_given_up(
    machines: EngineFixture, checkpoints: int
) -> None:
    one = await machines.served_by("one", *SEVERAL)
    for topic in TOPICS:
        await one.add(topic, 1, range(1), delay_ms=FAR_MS)
    kept = machines.slots()
    for _ in range(checkpoints):
        await one.add(TOPIC, 2, range(1), delay_ms=FAR_MS)
        await one.shards[SHARD].checkpoints.write_last()
    one.kill()
    log_id = kept[-1].split("/")[1]
    lose(machines, names.DAEMONS_PREFIX, *(key for key in machines.slots() if key not in kept))
    two = await machines.served_by("one", *SEVERAL)
    await asyncio.sleep(LOOKED_S)
    assert SHARD not in two.shards
    assert f"tarryd give-up {log_id}" in two.engine.health.reason
    await two.stop()
    said: list[str] = []
    assert not give_up.resolve_loss(machines.store, log_id, accepted=False, say=said.append)
    assert f"shard {SHARD} sections" in said[0]
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=said.append)
    assert give_up.resolve_loss(machines.store, log_id, accepted=True, say=said.append)
    three = await machines.served_by("one", *SEVERAL)
    await three.until(lambda: three.engine.loaded)
    rows = pending(three, *TOPICS)
    await three.add(TOPIC, 5, range(1), delay_ms=FAR_MS)
    three.kill()
    four = await machines.served_by("one", *SEVERAL)
    assert pending(four, TOPIC) == [rows[SHARD] + 1]
    assert rows == [2 if topic == TOPIC else 1 for topic in TOPICS]


@pytest.mark.parametrize("slot", [1 << 40, names.NUMBER_MAX])
async def test_a_heartbeat_that_names_an_impossible_slot_gives_up_nothing(machines: EngineFixture, slot: int) -> None:
    await with_rows(machines, orderly=False)
    beat = heartbeat.read_heartbeat(machines.store, "one")
    assert beat is not None
    body = msgspec.json.encode(msgspec.structs.replace(beat, last_slot=slot))
    machines.store.put(names.daemon_key("one"), body)
    with pytest.raises(object_store.Damaged, match="delete the heartbeat if it is wrong"):
        give_up.resolve_loss(machines.store, beat.log_id, accepted=False, say=lambda text: None)
