"""Races of cancellations and reschedules: with the due moment, with each other, with adds, with changes of the topic.

In each, what is answered is what the dispatcher sees.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from daemon.errors import NotFound, Unavailable
from tests._support.engine_fixture import EPOCH_MS, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import cancel, create, delete_topic, get, reschedule, results, rows_of, trim, up_to
from tests.daemon.shard.test_partial_recovery import fenced, hold
from tests.daemon.topic.test_withdrawals import (
    BUCKETS,
    HOUR_MS,
    SMALL,
    UNREAD,
    Withdraw,
    cancelled,
    sealed_rows,
    withdrawals,
)

# ---- races with the due moment


@withdrawals
async def test_a_race_with_the_due_moment_is_decided_once(machines: EngineFixture, withdraw: Withdraw) -> None:
    """Whatever the answer is, the dispatcher sees it so."""
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    chance = random.Random(5)
    kinds = set()
    for ledger_id in range(60):
        before = machines.now_ms()
        adding = one.add("t", ledger_id, range(5), delay_ms=100)
        await adding
        await asyncio.sleep((100 - (machines.now_ms() - before) + chance.choice((-3, -1, 0, 0, 1, 3))) / 1000)
        asked = machines.now_ms()
        left, not_found, already_due, in_flight = results(await withdraw(one, ledger_id, [*range(5)]))  # type: ignore[arg-type]
        assert not not_found
        assert left + len(already_due) + len(in_flight) == 5
        if asked >= before + 100:
            assert left == 0, "what is due when it is asked for is already due"
        kinds.add((bool(left), bool(already_due), bool(in_flight)))
        await asyncio.sleep(2)
        here = [row for row in receiver.rows if row[0] == ledger_id]
        assert len(here) == 5 - left
    assert len(kinds) > 1
    await asyncio.sleep(60)
    assert len(receiver.rows) == len(receiver.positions)


@withdrawals
async def test_what_is_leaving_is_not_handed_out_though_its_time_comes_before_its_slot_is_durable(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10), delay_ms=1_000)
    held = one.pause("put_if_absent", JOURNAL)
    leaving = asyncio.ensure_future(withdraw(one, 1, [*range(4)]))
    await held.reached()
    await receiver.received(6)
    await asyncio.sleep(3)
    assert {row[1] for row in receiver.rows} == {4, 5, 6, 7, 8, 9}
    held.release()
    assert results(await leaving)[0] == 4  # type: ignore[arg-type]
    assert len(receiver.rows) == 6


async def test_the_answer_waits_for_segments_that_are_due(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *UNREAD)
    await create(one)
    await sealed_rows(one, range(30), 5_000)
    held = one.pause("get_range", BUCKETS)
    await asyncio.sleep(5.5)
    cancelling = cancel(one, 1, [1, 2])
    await held.reached()
    await asyncio.sleep(3)
    assert not cancelling.done()
    held.release()
    assert results(await cancelling) == (0, [], [0, 1], [])


@withdrawals
async def test_while_a_topic_is_being_loaded_the_answer_waits_until_what_is_due_has_been_passed(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    one = await machines.served_by("one", *UNREAD)
    await create(one)
    await one.add("t", 1, range(30), delay_ms=4_000)
    await sealed_rows(one, range(30, 60), 4_000)
    await one.add("t", 1, range(60, 70), delay_ms=HOUR_MS)
    one.kill()
    await asyncio.sleep(5)
    two = machines.daemon("one", *UNREAD)
    loading = hold(two, "t")
    await fenced(two)
    await loading.reached()
    asked = asyncio.ensure_future(withdraw(two, 1, [5, 35, 65, 75]))
    await asyncio.sleep(1)
    # The bucket is small: its table and metadata come with one read.
    two.script.plan("get_range", Fault.NONE, key_part=BUCKETS)
    reading = two.pause("get_range", BUCKETS)
    loading.release()
    await reading.reached()
    await asyncio.sleep(1)
    assert not asked.done()
    reading.release()
    assert results(await asked) == (1, [3], [0, 1], [])  # type: ignore[arg-type]


@withdrawals
async def test_nothing_is_changed_when_what_is_due_cannot_be_read_in_time(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    one = await machines.served_by("one", *UNREAD)
    await create(one)
    await sealed_rows(one, range(30), 5_000)
    await one.add("t", 2, [1], delay_ms=HOUR_MS)
    for _ in range(100):
        one.script.plan("get_range", Fault.FAIL_BEFORE, key_part=BUCKETS)
    await asyncio.sleep(5.5)
    begun_s = machines.elapsed_s()
    with pytest.raises(Unavailable, match="nothing changed"):
        await withdraw(one, 2, [1])
    assert machines.elapsed_s() - begun_s < 11
    one.script = type(one.script)()
    one.decide = one.script
    await one.until(lambda: one.topic("t").core.indexes.loaded_rows > 0)
    assert results(await withdraw(one, 2, [1]))[0] == 1  # type: ignore[arg-type]
    assert len(rows_of(await get(one))) == 30


# ---- races of requests


@withdrawals
async def test_a_request_that_names_a_staged_add_is_decided_after_it(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    one = await machines.served_by()
    await one.add("t", 1, [0], delay_ms=60_000)
    held = one.pause("put_if_absent", JOURNAL)
    adding = one.add("t", 1, [1, 2], delay_ms=60_000)
    await held.reached()
    leaving = asyncio.ensure_future(withdraw(one, 1, [0, 1, 3]))
    await asyncio.sleep(1)
    assert not leaving.done()
    held.release()
    assert (await adding).accepted == 2
    assert results(await leaving) == (2, [2], [], [])  # type: ignore[arg-type]


@pytest.mark.parametrize("subscription", [None, "s"])
async def test_an_add_of_what_is_being_cancelled_is_decided_after_it(
    machines: EngineFixture, subscription: str | None
) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, range(3), delay_ms=60_000, subscription=subscription)
    held = one.pause("put_if_absent", JOURNAL)
    cancelling = cancel(one, 1, [1])
    await held.reached()
    adding = one.add("t", 1, [1, 2], delay_ms=5_000, subscription=subscription)
    other = one.add("t", 1, [7], delay_ms=5_000, subscription=subscription)
    await asyncio.sleep(1)
    assert not adding.done()
    held.release()
    assert results(await cancelling)[0] == 1
    outcome = await adding
    assert (outcome.accepted, outcome.duplicates) == (1, 1)
    assert (await other).accepted == 1
    receiver = await one.receiver("t")
    await receiver.received(4)
    assert [row[1] for row in receiver.rows] == [1, 7, 0, 2]


async def test_of_two_cancellations_at_once_one_has_cancelled(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=60_000)
    outcomes = [results(each) for each in await asyncio.gather(*(cancel(one, 1, [1, 2, 3]) for _ in range(5)))]
    assert sorted(outcomes) == [(0, [0, 1, 2], [], [])] * 4 + [(3, [], [], [])]
    one_part, other = await asyncio.gather(cancel(one, 1, [4, 5]), cancel(one, 1, [5, 6]))
    assert (results(one_part), results(other)) == ((2, [], [], []), (1, [0], [], []))


async def test_of_reschedules_at_once_the_last_one_counts_and_each_is_counted(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, [1], delay_ms=60_000)
    times = (9_000, 3_000, 6_000)
    outcomes = await asyncio.gather(*(reschedule(one, 1, [1], delay_ms) for delay_ms in times))
    assert [results(each)[0] for each in outcomes] == [1, 1, 1]
    await receiver.received(1)
    assert receiver.rows[0][2] - EPOCH_MS < machines.now_ms() - EPOCH_MS
    await asyncio.sleep(60)
    assert len(receiver.rows) == 1


async def test_withdrawals_of_many_callers_at_once_are_all_answered(machines: EngineFixture) -> None:
    """Nobody waits for ever for a position that others name again and again."""
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 1, range(10), delay_ms=HOUR_MS)

    async def again_and_again(delay_ms: int) -> int:
        return sum([results(await reschedule(one, 1, [*range(10)], delay_ms + step))[0] for step in range(10)])

    async with asyncio.timeout(60):
        counts = await asyncio.gather(*(again_and_again(HOUR_MS + 1000 * number) for number in range(8)))
    assert counts == [100] * 8
    assert one.topic("t").core.indexes.pending_rows == 10


@withdrawals
async def test_who_waits_for_a_slot_that_is_not_durable_is_told_in_time_and_nothing_of_it_happens(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(3), delay_ms=HOUR_MS)
    held = one.pause("put_if_absent", JOURNAL)
    first = asyncio.ensure_future(cancel(one, 1, [1]))
    await held.reached()
    begun_s = machines.elapsed_s()
    waiting = [withdraw(one, 1, [1, 2]), one.add("t", 1, [1]), withdraw(one, 1, [1, 0])]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, Unavailable) for answer in answers), answers
    assert machines.elapsed_s() - begun_s < 11
    held.release()
    await asyncio.gather(first, return_exceptions=True)
    await one.until(lambda: one.topic("t").core.indexes.pending_rows == 2)
    assert results(await cancel(one, 1, [0, 1, 2])) == (2, [1], [], [])


# ---- changes of the topic


@withdrawals
async def test_a_trim_waits_for_what_is_leaving_and_later_requests_for_the_trim(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=60_000)
    held = one.pause("put_if_absent", JOURNAL)
    leaving = asyncio.ensure_future(withdraw(one, 1, [*range(4)]))
    await held.reached()
    trimming = trim(one, up_to(5, 1))
    await asyncio.sleep(0.1)
    later = asyncio.ensure_future(withdraw(one, 1, [3, 5, 6]))
    await asyncio.sleep(1)
    assert not trimming.done()
    held.release()
    assert results(await leaving)[0] == 4  # type: ignore[arg-type]
    assert await trimming == (2 if withdraw is cancelled else 6)
    assert results(await later) == (1, [0, 1], [], [])  # type: ignore[arg-type]


@withdrawals
async def test_a_topic_may_be_deleted_while_rows_are_leaving(machines: EngineFixture, withdraw: Withdraw) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=60_000)
    held = one.pause("put_if_absent", JOURNAL)
    leaving = asyncio.ensure_future(withdraw(one, 1, [*range(4)]))
    await held.reached()
    deleting = delete_topic(one)
    later = asyncio.ensure_future(withdraw(one, 1, [5]))
    await asyncio.sleep(1)
    held.release()
    assert results(await leaving)[0] == 4  # type: ignore[arg-type]
    await deleting
    with pytest.raises((NotFound, Unavailable)):
        await later
    with pytest.raises(NotFound):
        await withdraw(one, 1, [6])
    await one.add("t", 1, [6], delay_ms=60_000)
    assert results(await withdraw(one, 1, [5, 6])) == (1, [0], [], [])  # type: ignore[arg-type]


async def test_a_subscription_may_be_deleted_while_rows_of_its_own_are_leaving(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, "s")
    await one.add("t", 1, range(10), delay_ms=60_000, subscription="s")
    held = one.pause("put_if_absent", JOURNAL)
    leaving = cancel(one, 1, [1, 2], subscription="s")
    await held.reached()
    deleting = one.call(one.engine.requests.delete_subscription("t", "s"))
    later = cancel(one, 1, [3], subscription="s")
    await asyncio.sleep(1)
    held.release()
    assert results(await leaving)[0] == 2
    await deleting
    with pytest.raises(NotFound):
        await later
    assert results(await cancel(one, 1, [3])) == (0, [0], [], [])


@withdrawals
async def test_a_bucket_is_sealed_while_its_rows_are_leaving(machines: EngineFixture, withdraw: Withdraw) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 1, range(19), delay_ms=10_000)
    held = one.pause("put_if_absent", JOURNAL)
    leaving = asyncio.ensure_future(withdraw(one, 1, [*range(15)]))
    await held.reached()
    adding = one.add("t", 2, range(30), delay_ms=10_000)
    held.release()
    assert results(await leaving)[0] == 15  # type: ignore[arg-type]
    await adding
    await one.until(lambda: len(one.topic("t").core.index.sealed) > 0)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    receiver = await two.receiver("t")
    await receiver.received(34 if withdraw is cancelled else 49)
    await asyncio.sleep(60)
    assert len(receiver.rows) == len(receiver.positions) == (34 if withdraw is cancelled else 49)
