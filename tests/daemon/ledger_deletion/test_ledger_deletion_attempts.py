"""Attempts to delete ledgers: when they are made, what follows from their failure, and when none may be."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from daemon.ledger_deletion.deletion_values import DeletionFilter
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed
from storage_backends.formats import names
from storage_backends.formats.deletion_format import DeletionOutcome
from storage_backends.formats.log_slot_format import LogSlotKind
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon.ledger_deletion._support.deleting import (
    ALL,
    DEAD,
    ENDED,
    TOPIC,
    UUID,
    ScriptedLedgers,
    calls_of,
    failed,
    in_flight,
    ledgers,
    listed,
    outcomes,
    over,
    pending,
    record,
    use,
)

DELETED = DeletionOutcome.DELETED
YEAR_MS = 365 * 86_400_000


def gaps(times_s: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times_s)]


# ---- what stores say


@pytest.mark.parametrize(
    "said", [Answer(DELETED, "gone \ud800 for good"), failed("away \ud800 for long")], ids=["answer", "failure"]
)
async def test_a_text_that_is_no_unicode_ends_an_attempt_as_any_other(
    machines: EngineFixture, said: Answer | DeletionFailed
) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, said)
    one = await machines.served_by("one", "deletion.max_retry_delete_count=0")
    epoch = one.shards[0].epoch
    await record(one, 1)
    await over(one)
    (ended,) = [*await listed(one, ENDED), *await listed(one, DEAD)]
    assert ended.text.split(" ? ")[1].startswith("for ")
    assert one.shards[0].epoch == epoch


# ---- retries


async def test_failed_attempts_follow_the_schedule_and_then_there_is_a_dead_letter(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan_always(1, failed("throttled"))
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=60")
    began_s = machines.elapsed_s()
    await record(one, 1)
    await asyncio.sleep(700)
    assert in_flight(one) == 0
    times_s = stores.times_of(1)
    assert len(times_s) == 11
    assert times_s[0] - began_s < 1
    assert all(60 * 0.9 <= gap < 60 * 1.1 + 1 for gap in gaps(times_s))
    assert len({round(gap) for gap in gaps(times_s)}) > 3
    (dead,) = await listed(one, DEAD)
    assert (dead.outcome, dead.failures, dead.text) == (DeletionOutcome.GIVEN_UP, 11, "throttled")
    await asyncio.sleep(200)
    assert len(stores.times_of(1)) == 11


async def test_a_retry_from_the_dead_letters_is_made_at_once_and_has_all_its_attempts(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan_always(1, failed())
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=10", "deletion.max_retry_delete_count=2")
    await record(one, 1)
    await over(one)
    stores.plan_always(1, None)
    stores.plan(1, failed(), failed())
    began_s = machines.elapsed_s()
    assert await one.call(calls_of(one).retry_dead(ALL, all=True)) == 1
    await one.until(lambda: len(stores.times_of(1)) == 4)
    assert stores.times_of(1)[3] - began_s < 1
    await over(one)
    assert stores.deleted == [1]
    assert await outcomes(one) == {1: DELETED}


async def test_the_schedule_has_no_jitter_where_none_is_set(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed(), failed(), failed())
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=60", "deletion.jitter=0")
    await record(one, 1)
    await over(one)
    assert all(59.9 <= gap < 61 for gap in gaps(stores.times_of(1)))


async def test_a_wall_clock_that_is_set_forward_brings_attempts_forward(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    one = await machines.served_by()
    await record(one, 1)
    await one.until(lambda: [each.failures for each in pending(one)] == [1])
    one.step_clock(700_000)
    await one.until(lambda: stores.deleted == [1], timeout_s=5)


async def test_what_was_decided_by_a_clock_that_was_a_year_ahead_does_not_wait_a_year(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    stores.plan(2, *[failed()] * 11)
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=60")
    await record(one, 2)
    await over(one, timeout_s=1_000)
    one.step_clock(YEAR_MS)
    await record(one, 1)
    await one.until(lambda: [each.failures for each in pending(one)] == [1])
    held = one.pause("put_if_absent", JOURNAL)
    recording = record(one, 3)
    await held.reached()
    one.step_clock(-YEAR_MS)
    held.release()
    await recording
    await over(one, timeout_s=5)
    assert sorted(stores.deleted) == [1, 3]
    # A retry that is as far away as one may be is waited for.
    stores.plan(4, failed())
    await record(one, 4)
    await over(one, timeout_s=100)
    (gap,) = gaps(stores.times_of(4))
    assert gap >= 60 * 0.9


# ---- workers


async def test_so_many_attempts_are_made_at_once_and_no_more(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.parallelism=3")
    held = [stores.hold_before_guard(one, number) for number in range(3)]
    await record(one, *range(20))
    for each in held:
        await each.reached()
    await asyncio.sleep(5)
    assert len(stores.asked) == 3
    for each in held:
        each.release()
    await over(one)
    assert sorted(stores.deleted) == list(range(20))


async def test_a_store_that_hangs_holds_its_own_worker_and_nobody_else(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.parallelism=2")
    held = stores.hold_before_guard(one, 0)
    await record(one, *range(50))
    await held.reached()
    await one.until(lambda: len(stores.deleted) == 49, timeout_s=30)
    receiver = await one.receiver("t")
    await one.add("t", 1, [1], delay_ms=500)
    await receiver.received(1, timeout_s=2)
    held.release()
    await over(one)


async def test_few_deletions_have_begun_while_their_workers_hang(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.parallelism=2")
    held = [stores.hold_before_guard(one, number) for number in (0, 1)]
    await record(one, 0, 1)
    for each in held:
        await each.reached()
    await asyncio.sleep(5)
    await record(one, *range(2, 200))
    await asyncio.sleep(5)
    assert sum(each.begun for each in pending(one)) <= 4
    for each in held:
        each.release()
    await over(one)


async def test_every_shard_has_its_turn(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "daemon.shards=4", "deletion.parallelism=1")
    long, short = (next(f"t{n}" for n in range(99) if names.shard_of(f"t{n}", 4) == shard) for shard in (1, 2))
    held = stores.hold_before_guard(one, 0)
    await record(one, *range(900), topic=long)
    await held.reached()
    await record(one, 9_999, topic=short)
    held.release()
    await over(one)
    assert [asked for _, asked in stores.asked].index(9_999) < 150


async def test_begins_and_answers_are_written_in_batches(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.parallelism=16")
    await record(one, *range(1_000))
    slots = one.shards[0].applied_slot
    await over(one)
    assert len(stores.deleted) == 1_000
    assert one.shards[0].applied_slot - slots < 200


# ---- when none may be made


async def test_after_a_crash_none_is_made_before_every_former_owner_has_stopped(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=1")
    await record(one, 1)
    await one.until(lambda: len(stores.asked) == 1 and not pending(one)[0].begun)
    one.kill()
    two = await machines.served_by("two")
    served_s = machines.elapsed_s()
    await record(two, 2)
    await over(two)
    assert all(at_s - served_s >= 14.9 for at_s, _ in stores.asked[1:])
    assert sorted(stores.deleted) == [1, 2]


async def test_after_an_orderly_end_the_next_owner_makes_them_at_once(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=1")
    await record(one, 1)
    await one.until(lambda: len(stores.asked) == 1 and not pending(one)[0].begun)
    await one.stop()
    two = await machines.served_by("two")
    await over(two, timeout_s=5)
    assert stores.deleted == [1]


async def test_an_attempt_that_had_begun_when_its_daemon_died_is_made_again_and_is_no_failure(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_after_guard(one, 1)
    await record(one, 1)
    await held.reached()
    one.kill()
    two = await machines.served_by("two")
    (begun,) = pending(two)
    assert begun.begun
    assert (await use(two, ledgers(1))).being_deleted == (0,)
    await over(two)
    assert stores.deleted == [1]
    (ended,) = await listed(two, ENDED)
    assert (ended.outcome, ended.failures) == (DELETED, 0)


async def test_what_a_dead_daemon_s_attempt_may_do_yet_is_not_in_use_any_more(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_after_guard(one, 1)
    await record(one, 1)
    await held.reached()
    one.kill()
    stores.plan(1, failed("refused"))
    two = await machines.served_by("two")
    await two.until(lambda: [each.failures for each in pending(two)] == [1])
    assert (await use(two, ledgers(1))).being_deleted == (0,)


async def test_nothing_is_deleted_while_the_epoch_is_not_confirmed_and_that_is_no_failure(
    machines: EngineFixture,
) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_before_guard(one, 1)
    await record(one, 1)
    await held.reached()
    one.store.go_down()
    await asyncio.sleep(16)
    held.release()
    await asyncio.sleep(5)
    assert stores.deleted == []
    one.store.come_back()
    await over(one)
    assert stores.deleted == [1]
    (ended,) = await listed(one, ENDED)
    assert ended.failures == 0


async def test_a_shard_that_is_lost_deletes_nothing_more(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_before_guard(one, 1)
    await record(one, 1)
    await held.reached()
    one.freeze()
    two = await machines.served_by("two")
    await two.until(lambda: stores.deleted == [1])
    one.thaw()
    held.release()
    await one.until(lambda: not one.shards)
    await asyncio.sleep(30)
    assert stores.deleted == [1]
    assert await outcomes(two) == {1: DELETED}


async def test_a_shard_whose_slots_are_stalled_begins_nothing(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan(1, failed())
    one = await machines.served_by("one", "deletion.reconsume_later_seconds=5", "deletion.jitter=0")
    await record(one, 1)
    await one.until(lambda: len(stores.asked) == 1 and not pending(one)[0].begun)
    held = one.pause("put_if_absent", JOURNAL)
    adding = one.add("t", 1, [1], delay_ms=900_000)
    await held.reached()
    await asyncio.sleep(9)
    assert len(one.shards[0].slots._slots) == 0
    assert len(stores.asked) == 1
    held.release()
    await adding
    await over(one)


# ---- the orderly end


async def test_an_orderly_end_waits_for_attempts_and_keeps_what_they_came_to(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", "deletion.parallelism=2")
    held = [stores.hold_after_guard(one, number) for number in (1, 2)]
    await record(one, *range(1, 30))
    for each in held:
        await each.reached()
    stopping = asyncio.ensure_future(one.stop())
    await asyncio.sleep(2)
    assert not stopping.done()
    for each in held:
        each.release()
    await stopping
    # None was made after the end began.
    assert sorted(stores.deleted) == [1, 2]
    two = await machines.served_by("two")
    assert {1: DELETED, 2: DELETED}.items() <= (await outcomes(two)).items()
    await over(two)
    assert sorted(stores.deleted) == list(range(1, 30))


async def test_an_orderly_end_does_not_wait_long_for_a_store_that_hangs(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one")
    before, after = stores.hold_before_guard(one, 1), stores.hold_after_guard(one, 2)
    await record(one, 1, 2)
    await before.reached()
    await after.reached()
    began_s = machines.elapsed_s()
    left = await one.call(one.engine.stop())
    assert machines.elapsed_s() - began_s < 7
    assert left == ["2 attempts to delete a ledger wait for their stores"]
    two = await machines.served_by("two", "deletion.reconsume_later_seconds=60")
    # The one that had been let may delete yet: it cannot be in use any more. The other one is refused, late as it is.
    assert (await use(two, ledgers(2))).being_deleted == (0,)
    before.release()
    await over(two, timeout_s=1_000)
    assert stores.deleted == [1, 2]
    after.release()
    ended = {each.pending_delete.ledger_id: each for each in await listed(two, ENDED)}
    assert {ledger_id: each.failures for ledger_id, each in ended.items()} == {1: 0, 2: 1}


async def test_what_was_answered_during_an_orderly_end_is_in_the_last_checkpoint(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by()
    held = stores.hold_after_guard(one, 1)
    await record(one, 1)
    await held.reached()
    stopping = asyncio.ensure_future(one.stop())
    await asyncio.sleep(1)
    held.release()
    await stopping
    # Without the sections: a checkpoint covers them.
    for key in machines.keys(JOURNAL):
        if machines.store.head(key).metadata["kind"] == "data":
            machines.store.delete(key)
    two = await machines.served_by("two")
    assert await outcomes(two) == {1: DELETED}


# ---- what is kept


SETTINGS = ("journal.checkpoint_slots=5", "deletion.max_retry_delete_count=0", "deletion.parallelism=2")


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_checkpoint_keeps_all_of_it_and_so_does_the_one_before(machines: EngineFixture, damaged: bool) -> None:
    stores = ScriptedLedgers(machines)
    one = await machines.served_by("one", *SETTINGS)
    stores.plan(2, failed("gave up"))
    await use(one, ledgers(3, 4))
    await use(one, ledgers(uuid=UUID), topic="known", replace=True)
    await record(one, 1, 2, 3)
    await over(one)
    held = [stores.hold_before_guard(one, number) for number in (10, 11)]
    await record(one, *range(10, 20))
    for each in held:
        await each.reached()
    for number in range(12):
        await one.add("t", 1, [number], delay_ms=900_000)
        await asyncio.sleep(0.5)
    cut = one.shards[0].deletions.cut()
    one.kill()
    assert cut is not None
    tip = machines.shard_tip()
    assert tip.checkpoint is not None
    assert tip.previous_checkpoint is not None
    if damaged:
        machines.store.put(tip.checkpoint.object.name, b"damaged")
    two = await machines.served_by("two", *SETTINGS)
    again = two.shards[0].deletions.cut()
    assert again is not None
    was, now = cut.state(), again.state()
    assert (now.last_id, list(now.deletions)) == (was.last_id, list(was.deletions))
    assert [topic.topic for topic in now.in_use] == [topic.topic for topic in was.in_use]
    assert two.shards[0].deletions.state.in_use.knows("known")
    assert in_flight(two) == 10
    await over(two)
    assert sorted(stores.deleted) == [1, *range(10, 20)]
    assert [each.text for each in await listed(two, DEAD, DeletionFilter(topic=TOPIC))] == ["gave up"]


async def test_an_idle_shard_s_deletions_outlive_its_sections(machines: EngineFixture) -> None:
    stores = ScriptedLedgers(machines)
    stores.plan_always(1, failed())
    one = await machines.served_by("one", "deletion.max_retry_delete_count=0")
    await record(one, 1, 2)
    await use(one, ledgers(5))
    await over(one)
    await asyncio.sleep(300)
    for _ in range(3):
        async for _ in one.engine.requests.collect(dry_run=False, force=False, retry_dead=False):
            pass
    assert machines.sections_to_read() == 0
    assert len(machines.slots(LogSlotKind.DATA)) == 1, "the highest slot of a log stays"
    one.kill()
    two = await machines.served_by("two")
    assert len(await listed(two, DEAD)) == 1
    assert await outcomes(two) == {2: DELETED}
    assert two.shards[0].deletions.state.in_use.ledgers == 1
