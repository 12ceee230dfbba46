"""Ack time-outs: what stays IN_FLIGHT for too long is nacked by the policy of its subscription."""

from __future__ import annotations

import asyncio

import pytest

from storage_backends.formats.manifest import SubscriptionPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests._support.outcomes import Counts
from tests.daemon._support.calling import create, delete_topic, extend, get, stats
from tests.daemon._support.nacking import EXACT, HandOut, constant, dispatcher, hand_outs, nack

TIMEOUT_MS = 10_000
DELAY_MS = 1_000
# It is looked for four times in a time-out, and at least every second.
LOOK_MS = 1_000
TIMED = constant(DELAY_MS, ack_timeout_ms=TIMEOUT_MS)


def counts(rows: list[HandOut]) -> list[int]:
    return [row.redeliveries for row in rows]


def timed_out(daemon: Daemon) -> float:
    return daemon.metrics.registry.get_sample_value("tarry_ack_timeout_rows_total", {"topic": "t"}) or 0


async def update(daemon: Daemon, policy: SubscriptionPolicy) -> None:
    await daemon.call(daemon.engine.requests.update_subscription("t", "s", policy))


async def test_what_is_in_flight_for_too_long_comes_back_by_the_policy_and_counts(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=TIMED)
    await one.add("t", 1, range(10), delay_ms=0)
    rows = await listener.next(10)
    await listener.acknowledge(rows[:3])
    for number in range(1, 4):
        back = await listener.next(7)
        assert counts(back) == [number] * 7
        waited_ms = back[0].at_ms - rows[-1].at_ms
        assert TIMEOUT_MS + DELAY_MS <= waited_ms <= TIMEOUT_MS + LOOK_MS + DELAY_MS + 50
        rows = back
    assert timed_out(one) == 21
    assert await listener.acknowledge(rows) == 0
    await asyncio.sleep(60)
    assert listener.nothing_more()


@pytest.mark.parametrize("timeout_ms", [100, 1_000, 60_000])
async def test_it_is_looked_for_in_proportion_to_the_time_out(machines: EngineFixture, timeout_ms: int) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=constant(0, ack_timeout_ms=timeout_ms))
    await one.add("t", 1, range(3), delay_ms=0)
    rows = await listener.next(3)
    back = await listener.next(3)
    waited_ms = back[0].at_ms - rows[0].at_ms
    assert timeout_ms <= waited_ms <= timeout_ms + max(50, min(LOOK_MS, timeout_ms / 4)) + 20


async def test_where_no_subscription_has_a_time_out_nothing_is_looked_for(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one)
    await one.add("t", 1, range(3), delay_ms=0)
    await listener.next(3)
    nacks = one.topic("t").nacks
    assert nacks._timer is None
    assert nacks._looking is None
    timed = await dispatcher(one, subscription="timed", policy=TIMED)
    assert nacks._timer is None, "nothing is in flight there"
    await one.add("t", 2, range(3), delay_ms=100)
    rows = await timed.next(3)
    assert nacks._timer is not None
    await timed.acknowledge(rows)
    await asyncio.sleep(3)
    assert nacks._timer is None, "nothing is in flight there any more"


async def test_a_time_out_begins_anew_with_an_extension(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=TIMED)
    other = await dispatcher(one, policy=None, permits=0)
    await one.add("t", 1, range(4), delay_ms=0)
    rows = await listener.next(4)
    for _ in range(3):
        await asyncio.sleep(8)
        assert await listener.extend(rows[:2]) == 0
    extended_ms = machines.now_ms()
    assert {row.entry for row in listener.got[4:]} == {2, 3}, "those were not extended"
    assert await listener.extend([(9, 9, 9), (*rows[0][:2], 5)]) == 2
    assert await other.extend(rows[:2]) == 2, "it does not hold them"
    await one.until(lambda: {row.entry for row in listener.got[4:]} == {0, 1, 2, 3})
    back = [row for row in listener.got[4:] if row.entry < 2]
    assert counts(back) == [1, 1]
    assert back[0].at_ms >= extended_ms + TIMEOUT_MS + DELAY_MS - 100


async def test_leased_rows_time_out_unless_the_lease_ends_first_or_is_extended(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, policy=TIMED)
    await one.add("t", 1, range(9), delay_ms=0)
    short = hand_outs((await get(one, 3, lease_ms=5_000)).handed_out, 0)
    long = hand_outs((await get(one, 3, lease_ms=60_000)).handed_out, 0)
    extended = hand_outs((await get(one, 3, lease_ms=60_000)).handed_out, 0)
    assert len(short) == 3
    await asyncio.sleep(6)
    back = hand_outs((await get(one, 9)).handed_out, 0)
    assert ([row.entry for row in back], counts(back)) == ([0, 1, 2], [0] * 3)
    assert await nack(one, back, 600_000) == Counts(0, 0)
    assert await extend(one, [row[:3] for row in extended], 60_000) == 0
    await asyncio.sleep(7)
    back = hand_outs((await get(one, 9)).handed_out, 0)
    assert ([row.entry for row in back], counts(back)) == ([row.entry for row in long], [1] * 3)
    await asyncio.sleep(6)
    back = hand_outs((await get(one, 9)).handed_out, 0)
    assert ([row.entry for row in back], counts(back)) == ([row.entry for row in extended], [1] * 3)


async def test_held_positions_of_a_stream_time_out_from_its_opening_on(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=TIMED)
    await one.add("t", 1, range(5), delay_ms=0)
    rows = await listener.next(5)
    await asyncio.sleep(8)
    listener.stream.close()
    second = await dispatcher(one, policy=None, held=rows)
    opened_ms = machines.now_ms()
    assert second.stream.held == 5
    back = await second.next(5)
    assert counts(back) == [1] * 5
    assert back[0].at_ms >= opened_ms + TIMEOUT_MS


async def test_what_times_out_too_often_is_a_dead_letter(machines: EngineFixture) -> None:
    one = await machines.served_by()
    policy = constant(0, ack_timeout_ms=1_000, max_redeliver_count=2)
    listener = await dispatcher(one, policy=policy)
    await one.add("t", 1, range(5), delay_ms=0)
    assert counts(await listener.next(15)) == [0] * 5 + [1] * 5 + [2] * 5
    await asyncio.sleep(10)
    assert listener.nothing_more()
    assert (await stats(one)).subscriptions[0].backlog == 0
    assert timed_out(one) == 15
    labels = {"topic": "t", "reason": "too_often"}
    assert one.metrics.registry.get_sample_value("tarry_dead_lettered_rows_total", labels) == 5


async def test_a_time_out_that_is_set_counts_at_once_and_one_that_is_taken_back_no_longer(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one)
    await one.add("t", 1, range(5), delay_ms=0)
    await listener.next(5)
    await asyncio.sleep(30)
    assert listener.nothing_more()
    set_ms = machines.now_ms()
    await update(one, constant(0, ack_timeout_ms=1_000))
    back = await listener.next(5)
    assert back[0].at_ms - set_ms <= LOOK_MS + 50, "they were in flight for longer already"
    await update(one, EXACT)
    await asyncio.sleep(30)
    assert listener.nothing_more()


async def test_many_time_out_in_portions_and_none_is_forgotten(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=TIMED)
    for ledger in range(30):
        await one.add("t", ledger, range(1_000), delay_ms=0)
    rows = await listener.next(30_000)
    back = await listener.next(30_000)
    assert counts(back) == [1] * 30_000
    assert {row[:2] for row in back} == {row[:2] for row in rows}
    assert back[-1].at_ms - rows[-1].at_ms <= TIMEOUT_MS + LOOK_MS + DELAY_MS + 500


async def test_a_store_that_fails_delays_time_outs_and_loses_none(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=TIMED)
    await one.add("t", 1, range(5), delay_ms=0)
    await listener.next(5)
    await asyncio.sleep(8)
    one.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=JOURNAL, times=15)
    back = await listener.next(5)
    assert counts(back) == [1] * 5
    back = await listener.next(5)
    assert counts(back) == [2] * 5


async def test_time_outs_count_on_the_monotonic_clock_and_survive_no_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    listener = await dispatcher(one, policy=TIMED)
    await one.add("t", 1, range(5), delay_ms=0)
    rows = await listener.next(5)
    machines.step_ms += 3_600_000
    await asyncio.sleep(5)
    assert listener.nothing_more()
    machines.step_ms -= 3_600_000
    await asyncio.sleep(3)
    one.kill()
    two = await machines.served_by("one")
    again = await dispatcher(two, policy=None)
    assert counts(await again.next(5)) == [0] * 5, "they are due again, and were not nacked"
    assert await again.acknowledge(rows) == 0


async def test_a_topic_that_is_deleted_looks_for_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=TIMED)
    await one.add("t", 1, range(5), delay_ms=0)
    await listener.next(5)
    nacks = one.topic("t").nacks
    await delete_topic(one)
    assert nacks._timer is None
    await asyncio.sleep(30)
    assert timed_out(one) == 0
