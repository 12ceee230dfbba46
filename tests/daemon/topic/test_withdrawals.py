"""Cancelling and rescheduling in a daemon: what comes and what does not, also after a crash between any two steps.

Races are in `test_withdrawal_races.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from daemon.errors import DelayTooLong, InvalidArgument, NotFound, QuotaExceeded, TarryError
from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import acknowledge, cancel, create, get, reschedule, results, rows_of

BUCKETS = "/buckets/"
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")
UNREAD = ("delivery.lookahead_ms=0",)
HOUR_MS = 3_600_000

Withdraw = Callable[[Daemon, int, list[int]], Awaitable[object]]


def cancelled(daemon: Daemon, ledger_id: int, entries: list[int]) -> Awaitable[object]:
    return cancel(daemon, ledger_id, entries)


def rescheduled(daemon: Daemon, ledger_id: int, entries: list[int]) -> Awaitable[object]:
    return reschedule(daemon, ledger_id, entries, 20_000)


withdrawals = pytest.mark.parametrize("withdraw", [cancelled, rescheduled])


async def sealed_rows(one: Daemon, entries: range, delay_ms: int) -> None:
    """Rows of ledger 1 in a sealed bucket none of which is in memory."""
    await one.add("t", 1, entries, delay_ms=delay_ms)
    await one.call(one.engine.requests.seal("t"))
    index = one.topic("t").core.index
    for name in index.sealed:
        index.cache.discard_bucket(name)


# ---- what comes and what does not


async def test_what_is_cancelled_never_comes_and_a_crash_does_not_bring_it_back(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    for ledger_id in range(4):
        await one.add("t", ledger_id, range(15), delay_ms=5_000)
    for ledger_id in range(4):
        assert results(await cancel(one, ledger_id, [*range(10, 20)])) == (5, [5, 6, 7, 8, 9], [], [])
    one.kill()
    two = await machines.served_by("one", *SMALL)
    assert results(await cancel(two, 2, [9, 10])) == (1, [1], [], [])
    receiver = await two.receiver("t")
    await receiver.received(39)
    await asyncio.sleep(30)
    assert receiver.positions == {(ledger, entry) for ledger in range(4) for entry in range(10)} - {(2, 9)}


@pytest.mark.parametrize("settings", [(), SMALL])
@pytest.mark.parametrize("killed", [False, True])
async def test_a_rescheduled_row_comes_at_its_new_time_and_only_then(
    machines: EngineFixture, settings: tuple[str, ...], killed: bool
) -> None:
    one = await machines.served_by("one", *settings)
    for ledger_id in range(3):
        await one.add("t", ledger_id, range(15), delay_ms=20_000)
    receiver = await one.receiver("t")
    assert results(await reschedule(one, 0, [*range(10)], 5_000))[0] == 10
    assert results(await reschedule(one, 1, [*range(10)], 40_000))[0] == 10
    assert results(await reschedule(one, 2, [*range(10)], 20_000))[0] == 10
    if killed:
        one.kill()
        one = await machines.served_by("one", *settings)
        receiver = await one.receiver("t")
    begun_ms = machines.now_ms()
    for count, due_ms in ((10, 5_000), (35, 20_000), (45, 40_000)):
        await receiver.received(count)
        assert due_ms - 5_000 <= machines.now_ms() - begun_ms <= due_ms + 200
    await asyncio.sleep(60)
    assert len(receiver.rows) == len(receiver.positions) == 45
    assert not receiver.early


async def test_a_reschedule_to_the_past_is_due_at_once(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(5), delay_ms=HOUR_MS)
    assert results(await reschedule(one, 1, [1, 2], -5_000))[0] == 2
    await receiver.received(2, timeout_s=0.2)
    assert results(await reschedule(one, 1, [1, 3], 100)) == (1, [], [], [0])
    await receiver.received(3, timeout_s=1)
    assert [row[1] for row in receiver.rows] == [1, 2, 3]


async def test_the_daemon_wakes_for_a_time_that_is_earlier(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await sealed_rows(one, range(30), 300_000)
    await reschedule(one, 1, [7], 3_000)
    begun_s = machines.elapsed_s()
    await receiver.received(1)
    assert 2.9 <= machines.elapsed_s() - begun_s <= 3.1
    await receiver.received(30)
    await asyncio.sleep(10)
    assert len(receiver.rows) == 30


async def test_each_position_has_its_furthest_state(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, "a")
    await create(one, "b")
    await one.add("t", 1, range(6), delay_ms=1)
    await one.add("t", 1, range(6, 8), delay_ms=60_000)
    await asyncio.sleep(1)
    leased = rows_of(await get(one, 4, subscription="a", lease_ms=60_000))
    await acknowledge(one, leased[:1], subscription="a")
    # 0 is acknowledged by one of two, 1 to 3 are leased, 4 and 5 are due.
    assert results(await cancel(one, 1, [*range(9)])) == (2, [8], [0, 4, 5], [1, 2, 3])
    await acknowledge(one, rows_of(await get(one, 10, subscription="b")), subscription="b")
    assert results(await reschedule(one, 1, [0, 1, 4], 60_000)) == (0, [0], [2], [1])


# ---- subscriptions' own rows


async def test_rows_for_one_subscription_are_withdrawn_from_its_own_index_alone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    mine, other = await one.receiver("t", "mine"), await one.receiver("t", "other")
    await one.add("t", 1, range(3), delay_ms=5_000)
    await one.add("t", 1, range(2, 6), delay_ms=5_000, subscription="mine")
    assert results(await cancel(one, 1, [0, 2, 3], subscription="mine")) == (2, [0], [], [])
    assert results(await reschedule(one, 1, [1, 4], 9_000, subscription="mine")) == (1, [0], [], [])
    assert results(await cancel(one, 1, [0, 5])) == (2, [], [], [])
    with pytest.raises(NotFound, match="nobody"):
        await cancel(one, 1, [1], subscription="nobody")
    with pytest.raises(NotFound, match="nobody"):
        await reschedule(one, 1, [1], 5, subscription="nobody")
    await asyncio.sleep(30)
    assert [row[1] for row in mine.rows] == [1, 2, 4]
    assert [row[1] for row in other.rows] == [1, 2]


async def test_without_a_shared_index_a_position_is_withdrawn_from_every_copy(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, "a")
    await create(one, "b")
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(shared_index=False)))
    assert (await one.add("t", 1, range(4), delay_ms=5_000)).accepted == 4
    assert one.topic("t").core.index.pending_rows == 0
    assert one.topic("t").core.indexes.pending_rows == 8
    assert results(await cancel(one, 1, [0, 9])) == (1, [1], [], [])
    assert results(await reschedule(one, 1, [1], 2_000)) == (1, [], [], [])
    assert results(await cancel(one, 1, [2], subscription="a")) == (1, [], [], [])
    one.kill()
    two = await machines.served_by("one")
    first, second = await two.receiver("t", "a"), await two.receiver("t", "b")
    await second.received(3)
    await asyncio.sleep(30)
    assert [row[1] for row in first.rows] == [1, 3]
    assert [row[1] for row in second.rows] == [1, 2, 3]


# ---- refusals, and answers of an owner that is none


async def test_a_refused_request_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.delay_max_ms=100000", "limits.rows_per_request_max=5")
    await one.add("t", 1, range(3), delay_ms=60_000)
    for refused, error in (
        (cancel(one, 1, [1, 2, 1]), InvalidArgument),
        (cancel(one, 1, []), InvalidArgument),
        (cancel(one, 1, [*range(6)]), InvalidArgument),
        (reschedule(one, 1, [1, 1], 5), InvalidArgument),
        (reschedule(one, 1, [1, 2], 200_000), DelayTooLong),
        (cancel(one, 1, [1], topic="nowhere"), NotFound),
        (cancel(one, 1, [1], topic=""), InvalidArgument),
    ):
        with pytest.raises(error):
            await refused
    receiver = await one.receiver("t")
    await receiver.received(3)
    assert [row[2] for row in receiver.rows] == [receiver.rows[0][2]] * 3


async def test_a_reschedule_plans_no_burst_and_is_no_new_row(machines: EngineFixture) -> None:
    one = await machines.served_by()
    policy = TopicPolicy(due_rows_per_second_max=5, pending_rows_max=10)
    await one.call(one.engine.requests.set_topic_policy("t", policy))
    for number in range(2):
        await one.add("t", 1, range(5 * number, 5 * number + 5), delay_ms=60_000 + 2_000 * number)
    with pytest.raises(QuotaExceeded, match="due_rows_per_second_max is 5"):
        await reschedule(one, 1, [0], 62_000)
    assert not one.topic("t").core.indexes.leaving
    assert results(await reschedule(one, 1, [0, 1, 2, 3, 4], 70_000))[0] == 5
    with pytest.raises(QuotaExceeded, match="due_rows_per_second_max is 5"):
        await reschedule(one, 1, [5], 70_000)
    assert results(await reschedule(one, 1, [77], 70_000)) == (0, [0], [], [])
    receiver = await one.receiver("t")
    await receiver.received(10)
    assert [row[1] for row in receiver.rows] == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


@withdrawals
async def test_an_owner_that_lost_the_shard_answers_nothing(machines: EngineFixture, withdraw: Withdraw) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10), delay_ms=5_000)
    await asyncio.sleep(0.1)
    one.freeze()
    asked = [asyncio.ensure_future(withdraw(one, 1, entries)) for entries in ([1, 2], [77], [2, 78])]
    two = await machines.served_by("two")
    receiver = await two.receiver("t")
    one.thaw()
    for task in asked:
        with pytest.raises(TarryError):
            await task
    await receiver.received(10)
    await asyncio.sleep(30)
    assert len(receiver.rows) == 10


@withdrawals
async def test_that_rows_have_left_is_answered_when_no_former_owner_can_hand_them_out(
    machines: EngineFixture, withdraw: Withdraw
) -> None:
    quick = "ownership.heartbeat_interval_s=0.5"
    one = await machines.served_by("one", quick)
    receiver = await one.receiver("t")
    await one.add("t", 1, [1, 2, 3], delay_ms=12_000)
    two = await machines.daemon("two", quick).start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)
    one.suspend()
    await two.serving()
    answer = asyncio.ensure_future(withdraw(two, 1, [1]))
    await asyncio.sleep(2)
    assert not answer.done()
    one.resume()
    await answer
    assert not one.shards or not one.shards[0].may_hand_out
    rows = len(receiver.rows)
    await asyncio.sleep(30)
    assert len(receiver.rows) == rows


@withdrawals
@pytest.mark.parametrize("point", ["log.before_put", "log.after_put"])
async def test_a_crash_around_the_slot_leaves_the_old_row_or_the_new_one(
    machines: EngineFixture, withdraw: Withdraw, point: str
) -> None:
    one = await machines.served_by("one")
    await create(one)
    await one.add("t", 1, range(10), delay_ms=5_000)
    await one.add("t", 1, range(10), delay_ms=5_000, subscription="s")

    def crash(name: str) -> None:
        if name == point:
            one.kill()

    one.at_crash_point = crash
    asked = asyncio.ensure_future(withdraw(one, 1, [*range(4)]))
    await asyncio.wait([asked])
    assert asked.cancelled()
    two = await machines.served_by("one")
    receiver = await two.receiver("t")
    landed = point == "log.after_put"
    gone = landed and withdraw is cancelled
    await receiver.received(12 if landed else 20)
    await asyncio.sleep(60)
    assert len(receiver.rows) == (12 if gone else 20)
    first_ms = receiver.rows[0][2]
    late = {row[1] for row in receiver.rows if row[2] > first_ms}
    assert late == (set(range(4)) if landed and not gone else set())


async def test_a_withdrawal_whose_slot_lost_its_answer_is_found_and_answered(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=60_000)
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert results(await cancel(one, 1, [1, 2]))[0] == 2
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert results(await reschedule(one, 1, [3], 70_000))[0] == 1


async def test_what_is_withdrawn_is_counted(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one)
    await one.add("t", 1, range(4), delay_ms=60_000)
    await one.add("t", 1, range(4, 6), delay_ms=0)
    await asyncio.sleep(1)
    await get(one, 1, lease_ms=60_000)
    await reschedule(one, 1, [0, 1, 9], 60_000)
    await cancel(one, 1, [0, 4, 5, 9, 10])

    def sample(name: str, result: str) -> float | None:
        return one.metrics.registry.get_sample_value(name, {"topic": "t", "result": result})

    assert [sample("tarry_reschedule_rows_total", each) for each in ("rescheduled", "not_found")] == [2, 1]
    reasons = ("cancelled", "not_found", "already_due", "in_flight")
    assert [sample("tarry_cancel_rows_total", each) for each in reasons] == [1, 2, 1, 1]


# ---- all together


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(4))
async def test_rows_that_are_cancelled_and_rescheduled_over_many_buckets_and_crashes_come_as_they_should(
    machines: EngineFixture, seed: int
) -> None:
    chance = random.Random(seed)
    one = await machines.served_by("one", *SMALL)
    await create(one)
    due: dict[tuple[int, int], int] = {}
    for _ in range(60):
        ledger_id = chance.randrange(4)
        entries = sorted(chance.sample(range(60), chance.randrange(1, 20)))
        now_ms, delay_ms = machines.now_ms(), chance.randrange(100_000, 200_000)
        known = [entry for entry in entries if (ledger_id, entry) in due]
        kind = chance.choice(("add", "add", "cancel", "reschedule", "reschedule"))
        if kind == "add":
            assert (await one.add("t", ledger_id, entries, delay_ms=delay_ms)).duplicates == len(known)
            due = {(ledger_id, entry): now_ms + delay_ms for entry in entries} | due
        elif kind == "cancel":
            assert results(await cancel(one, ledger_id, entries))[0] == len(known)
            for entry in known:
                del due[ledger_id, entry]
        else:
            assert results(await reschedule(one, ledger_id, entries, delay_ms))[0] == len(known)
            due |= {(ledger_id, entry): now_ms + delay_ms for entry in known}
        if chance.random() < 0.07:
            one.kill()
            one = await machines.served_by("one", *SMALL)
    receiver: Receiver = await one.receiver("t")
    await receiver.received(len(due))
    await asyncio.sleep(300)
    assert {(ledger, entry): due_ms for ledger, entry, due_ms in receiver.rows} == due
    assert len(receiver.rows) == len(due)
    assert not receiver.early
    assert np.all(np.diff([row[2] for row in receiver.rows]) >= 0)
