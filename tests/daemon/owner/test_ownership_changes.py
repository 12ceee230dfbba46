"""Between owning and not owning: stopped while recovering, lost and owned again, asked while the shard goes away."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from daemon.errors import TarryError, Unavailable
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import LogSlotKind
from tests._support.engine_fixture import Daemon, EngineFixture, no_positions
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault

SMALL_BUCKETS = ("bucket.rows_max=10", "bucket.min_index_count_per_bucket=10")


async def lose(daemon: Daemon) -> None:
    """The daemon loses its shard as it would by an error, and owns it again."""
    shard = daemon.shards[0]
    daemon.context.run(shard.lose, Unavailable("the test takes it away"))
    await daemon.until(lambda: daemon.engine.health.serving and daemon.shards[0] is not shard)


async def test_a_daemon_that_is_stopped_while_it_recovers_loses_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    topics = [f"topic-{number}" for number in range(12)]
    for topic in topics:
        await one.add(topic, 1, range(10), delay_ms=60_000)
    one.kill()
    two = machines.daemon("one")
    held = two.pause("put_if_absent", f"{names.topic_id(topics[-1])}/manifest")
    await two.start()
    await held.reached()
    stopping = asyncio.ensure_future(two.stop())
    held.release()
    await stopping
    three = await machines.served_by("one")
    for topic in topics:
        receiver = await three.receiver(topic)
        await receiver.received(10)


async def test_rows_that_an_earlier_ownership_had_loaded_are_handed_out_all_the_same(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL_BUCKETS)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10), delay_ms=500)
    await receiver.received(10)
    await receiver.acknowledge(receiver.rows)
    await one.until(lambda: not one.topic("t").core.index.sealed)
    await one.add("t", 2, range(10), delay_ms=20_000)
    await one.until(lambda: one.topic("t").core.index.loaded_rows == 10)
    await lose(one)
    again = await one.receiver("t")
    await again.received(10)
    assert again.positions == {(2, entry) for entry in range(10)}


async def test_a_stream_that_waits_to_be_opened_ends_with_the_shard(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("t", "s"))
    held = one.pause("put_if_absent", "/topics/")
    changing = one.call(one.engine.requests.create_subscription("t", "other"))
    await held.reached()
    opening = one.call(one.engine.requests.open_dispatch("t", "s", no_positions()))
    await asyncio.sleep(0.1)
    losing = asyncio.ensure_future(lose(one))
    await asyncio.sleep(0.1)
    held.release()
    with pytest.raises(TarryError):
        await opening
    await asyncio.gather(changing, return_exceptions=True)
    await losing


async def test_a_stop_ends_although_the_store_is_away(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10), delay_ms=60_000)
    one.store.go_down()
    waiting = one.add("t", 2, range(10), delay_ms=60_000)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        await one.stop()
    with pytest.raises(TarryError):
        await waiting
    one.store.come_back()
    two = await machines.served_by("one")
    receiver = await two.receiver("t")
    await receiver.received(10)


async def test_a_topic_whose_birth_lands_after_the_takeover_can_be_added_to(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    held = one.pause("put_if_absent", "/topics/")
    born = one.add("t", 1, range(10))
    await held.reached()
    one.freeze()
    two = await machines.served_by("two")
    held.release()
    await two.until(lambda: bool(machines.keys("/topics/")))
    assert (await two.add("t", 1, range(10))).accepted == 10
    one.thaw()
    with pytest.raises(TarryError):
        await born


async def test_a_damaged_topic_is_refused_by_name_and_keeps_its_slots(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "journal.checkpoint_slots=1")
    await one.add("good", 1, range(10), delay_ms=60_000)
    await one.add("bad", 1, range(10), delay_ms=60_000)
    one.kill()
    key = machines.keys(f"{names.topic_id('bad')}/manifest")[-1]
    whole, metadata = machines.store.get_with_metadata(key)
    machines.store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]), metadata=metadata)
    two = await machines.served_by("one", "journal.checkpoint_slots=1")
    with pytest.raises(TarryError, match=key):
        await two.add("bad", 2, range(10))
    receiver = await two.receiver("good")
    await receiver.received(10)
    await two.stop()
    machines.store.put(key, whole, metadata=metadata)
    three = await machines.served_by("one")
    assert len(await (await three.receiver("bad")).received(10)) == 10


async def test_an_owner_that_is_superseded_while_it_waits_for_its_checkpoints_answer_stands_by(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", "journal.checkpoint_slots=2")
    reasons: list[str] = []
    one.engine.on_health_change(lambda health: reasons.append(health.reason))
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part="shards/00/manifest/")
    held = one.pause("head", "shards/00/manifest/")
    for ledger_id in range(4):
        await one.add("t", ledger_id, [0], delay_ms=60_000)
    await held.reached()
    one.suspend()
    two = await machines.served_by("two")
    one.resume()
    held.release()
    await one.until(lambda: "waiting for daemon two" in one.engine.health.reason)
    assert any("epoch 2 belongs to two" in reason for reason in reasons), reasons
    await (await two.receiver("t")).received(4)


async def test_a_shard_that_is_lost_while_the_daemon_stops_leaves_the_others_to_end_in_order(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", "daemon.shards=4")
    topics = [f"topic-{number}" for number in range(100)]
    assert {names.shard_of(topic, 4) for topic in topics} == {0, 1, 2, 3}
    for topic in topics:
        await one.add(topic, 1, range(10), delay_ms=60_000)
    holds = [one.pause("put", names.checkpoint_prefix(shard)) for shard in range(4)]
    stopping = asyncio.ensure_future(one.stop())
    for held in holds:
        await held.reached()
    one.context.run(one.shards[2].lose, Unavailable("the test takes it away"))
    await asyncio.sleep(1)
    for held in holds:
        held.release()
    await stopping
    assert [machines.sections_to_read(shard) for shard in (0, 1, 3)] == [0, 0, 0]
    assert machines.slots()[-1] == machines.slots(LogSlotKind.CLOSE)[-1], "nobody has to wait for it"
    two = await machines.served_by("two", "daemon.shards=4")
    assert sum(two.topic(topic).core.index.pending_rows for topic in topics) == 1_000


async def test_a_new_request_is_refused_while_what_was_staged_is_made_durable(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10))
    rows = await receiver.received(10)
    held = one.pause("put_if_absent", JOURNAL)
    add, acknowledged = one.add("t", 2, range(10), delay_ms=60_000), receiver.acknowledge(rows[:5])
    await held.reached()
    stopping = asyncio.ensure_future(one.stop())
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable, match="stopping"):
        await one.add("t", 3, range(10))
    assert not add.done()
    held.release()
    assert (await add).accepted == 10
    assert await acknowledged == 0
    await stopping
    assert isinstance(receiver.ended, Unavailable)
    two = await machines.served_by("two")
    assert two.shards[0].loading.rows_replayed == 0
    again = await two.receiver("t")
    await again.received(15)
    assert again.positions == {row[:2] for row in rows[5:]} | {(2, entry) for entry in range(10)}


async def test_done_waits_for_every_former_owner_also_after_a_takeover_that_ended_early(
    machines: EngineFixture,
) -> None:
    quick = "ownership.heartbeat_interval_s=0.5"
    one = await machines.served_by("one", quick)
    two = await machines.daemon("two", quick).start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)
    receiver = await one.receiver("t", permits=1)
    await one.add("t", 1, [1, 2, 3], delay_ms=500)
    await receiver.received(1)
    one.suspend()
    await two.serving()
    two.kill()
    # The process of epoch 2 is gone for certain; that of epoch 1 is not, and may still hand out.
    again = await machines.served_by("two", quick)
    second = await again.receiver("t")
    done = second.acknowledge(await second.received(3))
    await asyncio.sleep(2)
    assert not done.done()
    receiver.stream.grant(10)
    one.resume()
    assert await done == 0
    rows = len(receiver.rows)
    await asyncio.sleep(30)
    assert len(receiver.rows) == rows, "what was answered Done is not handed out again"


async def test_done_waits_for_nobody_once_it_is_noted_that_no_former_owner_is_left(machines: EngineFixture) -> None:
    quick = "ownership.heartbeat_interval_s=0.5"
    one = await machines.served_by("one", quick)
    two = await machines.daemon("two", quick).start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)
    one.kill()
    await two.serving()
    await asyncio.sleep(20)
    two.kill()
    again = await machines.served_by("two", quick)
    receiver = await again.receiver("t")
    await again.add("t", 1, [1], delay_ms=500)
    begun_s = machines.elapsed_s()
    await receiver.acknowledge(await receiver.received(1))
    assert machines.elapsed_s() - begun_s < 2


async def test_a_call_waits_for_a_former_owner_as_long_as_its_caller_was_told(
    machines: EngineFixture,
) -> None:
    quick = "ownership.heartbeat_interval_s=0.5"
    one = await machines.served_by("one", quick)
    await one.add("t", 1, [1], delay_ms=3_600_000)
    two = await machines.daemon("two", quick).start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)
    assert one.engine.requests.alone_in_s("t") == two.engine.requests.alone_in_s("t") == 0.0
    one.suspend()
    await two.serving()
    former_owner_s = two.engine.requests.alone_in_s("t")
    assert 0 < former_owner_s <= 15
    begun_s = machines.elapsed_s()
    position = np.array([1], np.uint64)
    outcome = await two.call(two.engine.requests.cancel("t", None, position, position))
    assert outcome.cancelled == 1
    assert machines.elapsed_s() - begun_s == pytest.approx(former_owner_s, abs=1)
    assert two.engine.requests.alone_in_s("t") == 0.0
