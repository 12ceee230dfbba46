"""No answer overtakes the slot that it depends on, and group commit makes slots of what waits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from daemon.core.decisions.add_decisions import AddBatch
from daemon.errors import NotOwner, QuotaExceeded, TarryError, Unavailable
from daemon.group_commit.shard_slots import STAGED_SLOTS_MAX
from daemon.group_commit.slot_sender import ANSWER_UNCONFIRMED_S
from tests._support.engine_fixture import Daemon, EngineFixture, Held
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault


async def holding_a_slot(daemon: Daemon) -> Held:
    """The topic exists, and the next slot waits."""
    await daemon.add("t", 0, [0])
    return daemon.pause("put_if_absent", JOURNAL)


async def test_an_answer_waits_until_its_slot_is_durable(machines: EngineFixture) -> None:
    one = await machines.served_by()
    held = await holding_a_slot(one)
    add = one.add("t", 1, range(10))
    await held.reached()
    await asyncio.sleep(1)
    assert not add.done()
    held.release()
    assert (await add).accepted == 10


async def test_a_duplicate_waits_for_the_slot_that_it_is_a_duplicate_of(machines: EngineFixture) -> None:
    one = await machines.served_by()
    held = await holding_a_slot(one)
    add = one.add("t", 1, range(10))
    await held.reached()
    duplicate = one.add("t", 1, range(10))
    # An epoch confirmation that succeeds meanwhile must not answer it.
    await asyncio.sleep(8)
    assert not duplicate.done()
    held.release()
    assert (await duplicate).duplicates == 10
    assert add.done()


async def test_a_duplicate_of_what_still_waits_for_its_slot_waits_for_that_slot(machines: EngineFixture) -> None:
    one = await machines.served_by()
    held = await holding_a_slot(one)
    first = one.add("t", 1, range(10))
    await held.reached()
    staged = one.add("t", 2, range(10))
    await asyncio.sleep(0.1)
    second = one.pause("put_if_absent", JOURNAL)
    duplicate = one.add("t", 2, range(10))
    held.release()
    await second.reached()
    await asyncio.sleep(1)
    assert first.done()
    assert not staged.done()
    assert not duplicate.done()
    second.release()
    assert (await duplicate).duplicates == 10


async def test_a_duplicate_of_a_slot_that_never_lands_is_never_answered_ok(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    held = await holding_a_slot(one)
    add = one.add("t", 1, range(10))
    await held.reached()
    duplicate = one.add("t", 1, range(10))
    one.freeze()
    two = await machines.served_by("two")
    assert (await two.add("t", 1, range(10))).accepted == 10
    one.thaw()
    held.release()
    answers = await asyncio.gather(add, duplicate, return_exceptions=True)
    assert all(isinstance(answer, TarryError) for answer in answers)


async def test_an_applied_duplicate_is_answered_only_after_the_epoch_was_confirmed_again(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10))
    await asyncio.sleep(0.01)
    one.freeze()
    duplicate = one.add("t", 1, range(10))
    two = await machines.served_by("two")
    assert two.engine.health.serving
    one.thaw()
    with pytest.raises(TarryError):
        await duplicate


async def test_a_slot_that_landed_before_the_fence_is_not_answered_by_an_owner_that_was_away_too_long(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    gate = one.gate()
    reached = asyncio.Event()

    def after_put(name: str) -> None:
        if name == "log.after_put":
            machines.loop.call_soon_threadsafe(reached.set)
            one.stop_here(gate)

    one.at_crash_point = after_put
    add = one.add("t", 1, range(10))
    await reached.wait()
    one.freeze()
    two = await machines.served_by("two")
    await asyncio.sleep(2 * ANSWER_UNCONFIRMED_S)
    gate.set()
    one.thaw()
    with pytest.raises(TarryError):
        await add
    assert (await two.add("t", 1, range(10))).duplicates == 10


async def test_a_superseded_owner_names_its_successor(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    one.freeze()
    await machines.served_by("two")
    one.thaw()
    await one.until(lambda: not one.engine.health.serving and "waiting for daemon two" in one.engine.health.reason)
    with pytest.raises(NotOwner) as caught:
        await one.add("t", 1, [1])
    assert caught.value.owner_address == "two:1"


# ---- group commit


async def test_what_arrives_while_a_slot_is_written_is_the_next_slot(machines: EngineFixture) -> None:
    one = await machines.served_by()
    held = await holding_a_slot(one)
    adds = [one.add("t", 1, [0])]
    await held.reached()
    slots = len(machines.keys(JOURNAL))
    adds += [one.add("t", 2, [entry]) for entry in range(20)]
    await asyncio.sleep(0.5)
    held.release()
    await asyncio.gather(*adds)
    assert len(machines.keys(JOURNAL)) == slots + 2


async def test_decisions_of_several_topics_share_a_slot(machines: EngineFixture) -> None:
    one = await machines.served_by()
    for topic in ("t", "u", "v"):
        await one.add(topic, 0, [0])
    held = one.pause("put_if_absent", JOURNAL)
    adds = [one.add("t", 1, [0])]
    await held.reached()
    slots = len(machines.keys(JOURNAL))
    adds += [one.add(topic, 2, range(5)) for topic in ("t", "u", "v")]
    await asyncio.sleep(0.5)
    held.release()
    await asyncio.gather(*adds)
    assert len(machines.keys(JOURNAL)) == slots + 2
    assert [one.topic(topic).core.index.pending_rows for topic in ("t", "u", "v")] == [7, 6, 6]


async def test_a_slot_holds_no_more_than_its_limit_and_full_slots_push_back(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "journal.slot_bytes_max=65536")
    held = await holding_a_slot(one)
    adds = [one.add("t", 1, range(2000))]
    await held.reached()
    adds += [one.add("t", 2 + number, range(2000)) for number in range(STAGED_SLOTS_MAX)]
    await asyncio.sleep(0.1)
    refused = one.add("t", 99, range(10))
    with pytest.raises(QuotaExceeded) as caught:
        await refused
    assert caught.value.retry_after_ms is not None
    assert caught.value.retry_after_ms > 0
    held.release()
    assert [outcome.accepted for outcome in await asyncio.gather(*adds)] == [2000] * (1 + STAGED_SLOTS_MAX)
    sizes = [each.size_bytes for each in machines.store.list("") if JOURNAL in each.key]
    assert max(sizes) <= 65536
    assert len(sizes) == 1 + 1 + 1 + STAGED_SLOTS_MAX
    assert (await one.add("t", 99, range(10))).accepted == 10, "what was refused changed nothing"


def staged_row(machines: EngineFixture, one: Daemon, entry: int) -> asyncio.Future[int]:
    topic = one.topic("t")
    batch = AddBatch(
        np.array([7], np.uint64),
        np.array([entry], np.uint64),
        np.array([machines.now_ms() + 50_000], np.uint64),
        None,
        None,
        False,
    )
    limits = one.engine._environment.request_limits
    (record,), _ = topic.core.stage_add(batch, now_ms=machines.now_ms(), request_limits=limits)
    assert record is not None
    return topic.slots.stage(record, awaited=False)


async def test_a_record_that_nobody_awaits_rides_with_the_next_slot(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    slots = len(machines.keys(JOURNAL))
    unawaited = staged_row(machines, one, 1)
    await asyncio.sleep(0.5)
    assert not unawaited.done()
    await one.add("t", 0, [1])
    assert unawaited.done()
    assert len(machines.keys(JOURNAL)) == slots + 1


async def test_a_record_that_nobody_awaits_is_written_within_a_second(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    asked_s = machines.loop.time()
    async with asyncio.timeout(5):
        await asyncio.shield(staged_row(machines, one, 1))
    assert 0.9 <= machines.loop.time() - asked_s <= 1.1


async def test_a_lost_answer_is_found_by_its_commit_id_and_the_adds_are_answered(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert (await one.add("t", 1, range(10))).accepted == 10


async def test_a_put_that_arrives_after_it_was_sent_again_makes_no_second_row(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    one.script.plan("put_if_absent", Fault.DELIVER_LATE, key_part=JOURNAL)
    assert (await one.add("t", 1, range(10))).accepted == 10
    assert one.store.deliver_late() == 0
    await receiver.received(10)
    await asyncio.sleep(20)
    assert len(receiver.rows) == 10


async def test_a_daemon_that_stopped_refuses(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.stop()
    with pytest.raises(Unavailable):
        await one.add("t", 0, [0])
