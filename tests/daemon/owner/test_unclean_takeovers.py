"""The owner was paused, another took over, the former one wakes before it knows: what the new one says stays true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from daemon.core.decisions.withdrawal_decisions import CancelOutcome
from daemon.errors import Conflict, Unavailable
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support import key_dispatching
from tests.daemon._support.calling import (
    cancel,
    clear,
    create,
    delete_topic,
    get,
    reschedule,
    results,
    stats,
    trim,
    up_to,
)
from tests.daemon._support.key_dispatching import by_key, claim_of, consumer, open_by_key, planned

QUICK = "ownership.heartbeat_interval_s=0.5"
DUE_MS = 12_000
LONG_MS = 600_000
FORMER_S = 15.0


async def overtaken(machines: EngineFixture, one: Daemon) -> Daemon:
    """The next owner, which has just taken over from one that is paused."""
    two = await machines.daemon("two", QUICK).start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)
    one.suspend()
    await two.serving()
    return two


async def withdrawn(machines: EngineFixture) -> tuple[Daemon, Daemon, asyncio.Task[CancelOutcome]]:
    one = await machines.served_by("one", QUICK)
    await one.add("t", 1, range(10), delay_ms=DUE_MS)
    await one.add("t", 2, range(10), delay_ms=LONG_MS)
    two = await overtaken(machines, one)
    return one, two, cancel(two, 1, range(5))


async def test_what_a_paused_owner_hands_out_after_it_woke_is_not_said_to_be_cancelled_or_rescheduled(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", QUICK)
    receiver = await one.receiver("t")
    due_ms = one.now_ms() + DUE_MS + 100
    await one.add("t", 1, range(200), delay_ms=DUE_MS)
    two = await overtaken(machines, one)
    answers = cancel(two, 1, range(100)), reschedule(two, 1, range(100, 200), LONG_MS)
    await two.until(lambda: two.now_ms() > due_ms)
    one.resume()
    await receiver.received(200)
    for answer in answers:
        assert results(await answer) == (0, [], [*range(100)], [])


async def test_what_is_not_due_when_the_former_owner_is_over_is_withdrawn(machines: EngineFixture) -> None:
    _, two, due = await withdrawn(machines)
    began_s = two.elapsed_s()
    cancelled, rescheduled = cancel(two, 2, range(5)), reschedule(two, 2, range(5, 10), 30_000)
    await asyncio.sleep(2)
    assert not cancelled.done()
    assert not rescheduled.done()
    assert (await stats(two)).pending == 20, "nothing is decided so far"
    assert results(await cancelled)[0] == results(await rescheduled)[0] == 5
    assert results(await due)[2] == [*range(5)]
    assert two.elapsed_s() - began_s < FORMER_S + 1


async def test_a_withdrawal_that_waits_for_the_former_owner_ends_with_the_shard(machines: EngineFixture) -> None:
    _, two, asked = await withdrawn(machines)
    await asyncio.sleep(1)
    shard = two.shards[0]
    two.context.run(shard.lose, Unavailable("the test takes it away"))
    with pytest.raises(Unavailable, match="the test takes it away"):
        await asyncio.wait_for(asked, 5)


async def test_rows_go_to_no_consumer_by_key_while_a_former_owner_may_hand_a_key_to_another(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", QUICK)
    await open_by_key(one, [consumer(1)], policy=by_key())
    await key_dispatching.add(one, 1, range(4), [7] * 4, DUE_MS)
    two = await overtaken(machines, one)
    began_s = two.elapsed_s()
    second = await open_by_key(two, [consumer(2)])
    await key_dispatching.add(two, 2, [0], [7])
    assert await second.plan(9, [0], [8]) == [0]
    leased = get(two, wait_ms=5_000)
    with pytest.raises(Conflict, match="open as KEY_SHARED"):
        await leased
    await asyncio.sleep(FORMER_S - 2)
    assert not second.got
    assert len(await second.next(6)) == 6
    assert two.elapsed_s() - began_s >= FORMER_S - 1


async def test_what_is_acknowledged_after_it_was_planned_again_does_not_come_when_the_former_owner_is_over(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", QUICK)
    first = await open_by_key(one, [consumer(1)], policy=by_key())
    assert await first.plan(9, range(3), [7] * 3) == [1] * 3
    await first.nack(planned(9, [0]), 500)
    nacked = await first.next(1)
    assert nacked[0].row.redeliveries == 1
    two = await overtaken(machines, one)
    held = [claim_of(each) for each in nacked] + [(1, claim, 7) for claim in planned(9, [1, 2])]
    # What it holds still, that and more planned again, and an acknowledgement while nothing may go out by key.
    second = await open_by_key(two, [consumer(1)], held=held)
    assert second.stream.held == 3
    plan = asyncio.ensure_future(second.plan(9, range(4), [7] * 4))
    await asyncio.sleep(1)
    acknowledged = second.acknowledge([*nacked, *planned(9, [1])])
    assert await plan == [0, 1, 1, 0]
    assert await acknowledged == 0
    assert [(each.entry, each.row.redeliveries) for each in await second.next(1)] == [(3, 0)]
    assert await second.nothing_more(for_s=30)
    assert await second.acknowledge(planned(9, [2, 3])) == 0


async def test_a_lease_of_a_subscription_that_is_shared_by_key_waits_too(machines: EngineFixture) -> None:
    one = await machines.served_by("one", QUICK)
    await create(one, policy=by_key())
    await create(one, "shared")
    await key_dispatching.add(one, 1, range(4), [7] * 4)
    two = await overtaken(machines, one)
    assert len((await get(two, subscription="shared", wait_ms=5_000)).handed_out.rows) == 4
    assert not len((await get(two, wait_ms=5_000)).handed_out.rows)
    assert len((await get(two, wait_ms=20_000)).handed_out.rows) == 4


Drop = Callable[[Daemon], Awaitable[object]]


@pytest.mark.parametrize(
    "drop",
    [
        lambda two: trim(two, up_to(100, 1)),
        lambda two: clear(two, subscription="s"),
        delete_topic,
        lambda two: two.call(two.engine.requests.delete_subscription("t", "s")),
    ],
    ids=["trim", "clear", "delete topic", "delete subscription"],
)
async def test_that_rows_were_dropped_is_answered_when_no_former_owner_hands_them_out(
    machines: EngineFixture, drop: Drop
) -> None:
    one = await machines.served_by("one", QUICK)
    receiver = await one.receiver("t", subscription="s")
    await one.add("t", 1, range(5), delay_ms=DUE_MS)
    two = await overtaken(machines, one)
    answer = asyncio.ensure_future(drop(two))
    await asyncio.sleep(2)
    assert not answer.done()
    one.resume()
    await answer
    rows = len(receiver.rows)
    await asyncio.sleep(30)
    assert len(receiver.rows) == rows
