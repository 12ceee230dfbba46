"""What owners say is in use, ordered with records and attempts by the slots."""

from __future__ import annotations

import asyncio

import pytest

from daemon.ledger_deletion import shard_deletions
from storage_backends.formats.deletion_format import DeletionOutcome
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon.ledger_deletion._support.deleting import (
    ENDED,
    TOPIC,
    UUID,
    ScriptedLedgers,
    failed,
    forget,
    ledgers,
    listed,
    offloaded,
    outcomes,
    over,
    pending,
    record,
    stats,
    use,
)

IN_USE, DELETED = DeletionOutcome.IN_USE, DeletionOutcome.DELETED


async def test_what_is_in_use_before_an_attempt_begins_is_not_deleted(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    assert (await use(one, ledgers(1))).recorded == 1
    await record(one, 1, 2)
    await over(one)
    assert stores.deleted == [2]
    assert await outcomes(one) == {1: IN_USE, 2: DELETED}
    assert [asked for _, asked in stores.asked] == [2]


async def test_the_order_of_slots_decides_between_in_use_and_an_attempt(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = one.pause("put_if_absent", JOURNAL)
    recording = record(one, 1)
    await held.reached()
    # It rides with the next slot, and the begin cannot be in an earlier one.
    using = use(one, ledgers(1))
    held.release()
    await asyncio.gather(recording, using)
    await over(one)
    assert stores.asked == []
    assert await outcomes(one) == {1: IN_USE}


async def test_in_use_comes_too_late_once_the_begin_has_its_slot(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    await record(one, 1)
    begin = one.pause("put_if_absent", JOURNAL)
    await begin.reached()
    using = use(one, ledgers(1, 2))
    await asyncio.sleep(0.5)
    assert not stores.asked
    begin.release()
    used = await using
    assert (used.recorded, used.being_deleted) == (1, (0,))
    await over(one)
    assert stores.deleted == [1]


async def test_replace_says_what_alone_is_in_use_but_for_what_is_being_deleted(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_after_guard(one, 3)
    await use(one, ledgers(1, 2))
    await record(one, 3)
    await held.reached()
    used = await use(one, ledgers(2, 3), replace=True)
    assert (used.recorded, used.being_deleted) == (1, (1,))
    assert (await stats(one)).in_use == 1
    held.release()
    await record(one, 1, 2)
    await over(one)
    assert await outcomes(one) == {1: DELETED, 2: IN_USE, 3: DELETED}
    assert (await use(one, ledgers(), replace=True)).recorded == 0
    assert (await stats(one)).in_use == 0


async def test_a_long_replace_is_written_in_portions_and_says_what_alone_is_in_use(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_deletions, "LEDGERS_A_DECISION", 10)
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_after_guard(one, 65)
    await use(one, ledgers(*range(50)))
    await record(one, 65)
    await held.reached()
    slots = one.shards[0].applied_slot
    used = await use(one, ledgers(*range(30, 70)), replace=True)
    assert one.shards[0].applied_slot - slots >= 7
    assert (used.recorded, used.being_deleted) == (39, (35,))
    held.release()
    await record(one, *range(65), *range(66, 80))
    await over(one)
    assert sorted(stores.deleted) == [*range(30), 65, *range(70, 80)]


async def test_what_is_said_during_a_long_replace_counts_after_it(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_deletions, "LEDGERS_A_DECISION", 10)
    one = await machines.served_by()
    await use(one, ledgers(*range(50)))
    held = one.pause("put_if_absent", JOURNAL)
    replacing = use(one, ledgers(*range(100, 150)), replace=True)
    await held.reached()
    said = use(one, ledgers(7))
    forgotten = forget(one, ledgers(120))
    elsewhere = use(one, ledgers(1), topic="other")
    await asyncio.sleep(0.1)
    held.release()
    await elsewhere
    assert not replacing.done()
    assert ((await said).recorded, await forgotten) == (1, 1)
    assert replacing.done()
    assert (await stats(one, TOPIC)).in_use == 50


async def test_a_long_replace_that_a_daemon_could_not_finish_has_forgotten_nothing_that_it_named(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_deletions, "LEDGERS_A_DECISION", 10)
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    await use(one, ledgers(*range(50)))
    slots = 0

    def die_at_the_seventh(name: str) -> None:
        nonlocal slots
        slots += name == "log.after_put"
        if slots == 7:
            one.kill()

    one.at_crash_point = die_at_the_seventh
    replacing = use(one, ledgers(*range(20, 70)), replace=True)
    await asyncio.wait([replacing])
    assert replacing.cancelled()
    two = await machines.served_by("two")
    await record(two, *range(70))
    await over(two)
    assert set(stores.deleted) <= set(range(20))


async def test_a_failed_attempt_that_sent_nothing_may_be_overtaken_and_one_that_may_have_deleted_may_not(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    stores.plan(2, failed(maybe_deleted=True))
    one = await machines.served_by()
    await record(one, 1, 2)
    await one.until(lambda: [each.failures for each in pending(one)] == [1, 1])
    used = await use(one, ledgers(1, 2))
    assert used.being_deleted == (1,)
    await over(one, timeout_s=1_000)
    assert await outcomes(one) == {1: IN_USE, 2: DELETED}


async def test_what_ended_in_use_is_attempted_when_it_is_in_use_no_longer(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    await use(one, ledgers(1))
    await record(one, 1)
    await over(one)
    assert (await record(one, 1)).already_recorded == (0,)
    began_s = machines.elapsed_s()
    assert await forget(one, ledgers(1)) == 1
    await one.until(lambda: stores.deleted == [1])
    assert machines.elapsed_s() - began_s < 1
    assert await outcomes(one) == {1: DELETED}


async def test_a_record_under_a_wrong_topic_deletes_nothing_that_another_one_uses_by_its_uuid(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "daemon.shards=4")
    for number in range(8):
        await use(one, ledgers(number, uuid=UUID), topic=f"owner-{number}")
    for number in range(8):
        await record(one, offloaded(number), offloaded(100 + number), topic="forger")
    await over(one)
    assert sorted(stores.deleted) == [100 + number for number in range(8)]
    ended = {each.pending_delete.ledger_id: each for each in await listed(one, ENDED)}
    assert ended[3].outcome is IN_USE
    assert "another topic" in ended[3].text


async def test_what_another_topic_begins_to_use_while_an_attempt_waits_for_a_worker_is_not_deleted(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "daemon.shards=4", "deletion.parallelism=1")
    held = stores.hold_before_guard(one, 100)
    await record(one, offloaded(100), topic="forger")
    await held.reached()
    await record(one, offloaded(1), topic="forger")
    await one.until(lambda: sum(shard.deletions.state.counts.begun for shard in one.shards.values()) == 2)
    await use(one, ledgers(1, uuid=UUID), topic="owner")
    held.release()
    await over(one)
    assert stores.deleted == [100]
    assert (await outcomes(one))[1] is IN_USE
