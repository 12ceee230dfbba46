"""Negative acknowledgements: when positions come back, how often it was, and what it does to nobody else."""

from __future__ import annotations

import asyncio
import random

import pytest

from daemon.core.decisions import feeding
from daemon.errors import NotFound
from storage_backends.formats.manifest import SubscriptionPolicy
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.outcomes import Counts
from tests.daemon._support.calling import clear, create, delete_topic, get, stats, trim, up_to
from tests.daemon._support.nacking import (
    EXACT,
    MINUTE_MS,
    NACKED,
    SMALL,
    TICK_MS,
    Claim,
    assert_back_after,
    constant,
    counts,
    dispatcher,
    entries,
    hand_outs,
    nack,
    update,
    with_rows,
)

# ---- when they come back


@pytest.mark.parametrize("delay_ms", [0, 1, 999, 30_000, 3_600_000])
async def test_a_nacked_position_comes_back_at_its_time_and_not_before(machines: EngineFixture, delay_ms: int) -> None:
    _, listener, rows = await with_rows(machines, 10)
    before_ms = machines.now_ms()
    assert await listener.nack(rows[:4], delay_ms) == NACKED
    decided_by_ms = machines.now_ms()
    back = await listener.next(4, timeout_s=4_000)
    assert entries(back) == [0, 1, 2, 3]
    assert counts(back) == [1] * 4
    assert [row.deliver_at_ms for row in back] == [row.deliver_at_ms for row in rows[:4]]
    assert_back_after(back, before_ms, delay_ms, late_ms=TICK_MS + decided_by_ms - before_ms)


async def test_a_redelivery_time_is_rounded_up_to_the_precision_of_the_subscription(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 30, policy=SubscriptionPolicy())
    asked_ms: list[int] = []
    for row in rows:
        await asyncio.sleep(0.007)
        asked_ms.append(machines.now_ms())
        await listener.nack([row], 1_000)
    nacked_ms = machines.now_ms()
    back = await listener.next(30)
    assert all(row.at_ms >= asked_ms[row.entry] + 1_000 for row in back)
    assert len({row.at_ms for row in back}) <= 2, "they come back together, by 256 ms"
    assert all(row.at_ms % 256 <= TICK_MS for row in back)
    assert max(row.at_ms for row in back) <= nacked_ms + 1_000 + 256 + TICK_MS
    await update(listener._daemon, SubscriptionPolicy(nack_precision_bits=12))
    await listener.nack(back[:1], 1)
    (again,) = await listener.next(1)
    assert again.at_ms % 4096 <= TICK_MS


async def test_the_delays_of_a_request_may_differ(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 3)
    nacked_ms = machines.now_ms()
    await listener.nack(rows, [5_000, 1_000, 3_000])
    back = await listener.next(3)
    assert entries(back) == [1, 2, 0]
    for row, delay_ms in zip(back, (1_000, 3_000, 5_000), strict=True):
        assert_back_after([row], nacked_ms, delay_ms, late_ms=50)


async def test_a_shorter_nack_wakes_the_daemon_sooner_and_a_longer_one_waits_on(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 3)
    await listener.nack(rows[:2], 10 * MINUTE_MS)
    await asyncio.sleep(1)
    nacked_ms = machines.now_ms()
    await listener.nack(rows[2:], 2_000)
    await listener.nack(rows[:1], 1_000)
    assert_back_after(await listener.next(1), nacked_ms, 1_000, late_ms=100)
    assert_back_after(await listener.next(1), nacked_ms, 2_000, late_ms=100)
    nacked_ms = machines.now_ms()
    await listener.nack(rows[1:2], 20 * MINUTE_MS)
    assert_back_after(await listener.next(1, timeout_s=2_000), nacked_ms, 20 * MINUTE_MS, late_ms=100)
    assert counts(listener.got[3:]) == [1, 1, 1]


async def test_a_wall_clock_that_is_set_forward_brings_them_back_and_one_that_is_set_back_makes_them_wait(
    machines: EngineFixture,
) -> None:
    _, listener, rows = await with_rows(machines, 2)
    await listener.nack(rows, [MINUTE_MS, 10 * MINUTE_MS])
    machines.step_ms += MINUTE_MS
    assert entries(await listener.next(1, timeout_s=2)) == [0]
    machines.step_ms -= MINUTE_MS
    started_s = machines.loop.time()
    assert entries(await listener.next(1, timeout_s=2_000)) == [1]
    assert machines.loop.time() - started_s == pytest.approx(600, abs=5)


# ---- how often


async def test_every_negative_acknowledgement_of_what_was_handed_out_counts(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 2)
    for number in range(1, 6):
        await listener.nack(rows[:1], 100)
        rows = await listener.next(1)
        assert counts(rows) == [number]


async def test_to_nack_what_is_nacked_gives_it_the_new_time_and_does_not_count_again(machines: EngineFixture) -> None:
    """So a request whose answer was lost may be repeated."""
    _, listener, rows = await with_rows(machines, 5)
    await listener.nack(rows, MINUTE_MS)
    assert await listener.nack(rows, 2 * MINUTE_MS) == NACKED
    nacked_ms = machines.now_ms()
    assert await listener.nack(rows, 1_000) == NACKED
    back = await listener.next(5)
    assert counts(back) == [1] * 5
    assert_back_after(back, nacked_ms, 1_000, late_ms=50)
    await asyncio.sleep(200)
    assert listener.nothing_more()


async def test_counts_and_times_survive_crashes_and_takeovers(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 100, *SMALL)
    await listener.nack(rows, 100)
    rows = await listener.next(100)
    nacked_ms = machines.now_ms()
    await listener.nack(rows[:50], 20_000)
    await listener.nack(rows[50:90], 40_000)
    await asyncio.sleep(5)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    second = await dispatcher(two, policy=None)
    ready = await second.next(10)
    assert entries(ready) == [*range(90, 100)], "what was in flight is due again"
    assert counts(ready) == [1] * 10
    back = await second.next(50)
    assert counts(back) == [2] * 50
    assert_back_after(back, nacked_ms, 20_000, late_ms=100)
    await asyncio.sleep(1)
    two.freeze()
    three = await machines.served_by("three", *SMALL)
    third = await dispatcher(three, policy=None)
    again = await third.next(60)
    assert sorted(zip(entries(again), counts(again), strict=True)) == [
        *((entry, 2) for entry in range(50)),
        *((entry, 1) for entry in range(90, 100)),
    ]
    assert_back_after(await third.next(40), nacked_ms, 40_000, late_ms=100)
    assert counts(third.got[60:]) == [2] * 40


async def test_mixed_delays_survive_crashes_with_the_journal_collected_in_between(machines: EngineFixture) -> None:
    """Each comes at or after its time, with its count, whatever is in buckets, checkpoints and slots by then."""
    settings = ("bucket.min_index_count_per_bucket=500", "bucket.rows_max=500", "journal.checkpoint_slots=5")
    chance = random.Random(7)
    one, listener, rows = await with_rows(machines, 3_000, *settings)
    times_ms: dict[int, int] = {}
    for _ in range(3):
        for first in range(0, len(rows), 100):
            part = rows[first : first + 100]
            delays_ms = [chance.randrange(1, 120_000) for _ in part]
            now_ms = machines.now_ms()
            await listener.nack(part, delays_ms)
            times_ms |= {row.entry: now_ms + delay_ms for row, delay_ms in zip(part, delays_ms, strict=True)}
            await asyncio.sleep(0.01)
        await asyncio.sleep(20)
        written_slots = max(shard.applied_slot for shard in one.shards.values())
        assert len(machines.keys(JOURNAL)) < written_slots / 2, "the journal was collected"
        one.kill()
        one = await machines.served_by("one", *settings)
        down_ms = machines.now_ms()
        before, listener = listener, await dispatcher(one, policy=None)
        # What was handed out and not acknowledged comes again.
        again = {row.entry for row in before.got[3_000:]}
        rows = await listener.next(3_000)
        for row in rows:
            assert times_ms[row.entry] <= row.at_ms, row
            if row.entry not in again:
                assert row.at_ms <= max(times_ms[row.entry], down_ms) + 1_000, row
    assert set(counts(rows)) == {3}


async def test_what_came_due_while_nobody_listened_comes_with_its_count(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 10)
    await listener.nack(rows, 1_000)
    listener.stream.close()
    await asyncio.sleep(10)
    again = await dispatcher(one, policy=None)
    assert counts(await again.next(10)) == [1] * 10
    await asyncio.sleep(10)
    assert again.nothing_more()


async def test_a_closed_stream_makes_its_rows_ready_at_once_and_counts_nothing(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 10)
    await listener.nack(rows[:5], 500)
    await listener.next(5)
    second = await dispatcher(one, policy=None)
    listener.stream.close()
    back = await second.next(10, timeout_s=1)
    assert {row.entry: row.redeliveries for row in back} == {entry: int(entry < 5) for entry in range(10)}


async def test_a_lease_that_is_over_makes_its_rows_ready_and_counts_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await create(one, policy=EXACT)
    await one.add("t", 1, range(10), delay_ms=0)
    leased = hand_outs((await get(one, 10, lease_ms=2_000)).handed_out, 0)
    assert await nack(one, leased[:5], 500) == NACKED
    back = hand_outs((await get(one, 10, lease_ms=5_000, wait_ms=1_000)).handed_out, 0)
    assert (entries(back), counts(back)) == ([0, 1, 2, 3, 4], [1] * 5)
    await asyncio.sleep(2)
    back = hand_outs((await get(one, 10)).handed_out, 0)
    assert (entries(back), counts(back)) == ([5, 6, 7, 8, 9], [0] * 5)


# ---- quarantine and drops


@pytest.mark.parametrize("settings", [(), SMALL])
async def test_an_acknowledgement_of_a_nacked_position_ends_it(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one, listener, rows = await with_rows(machines, 60, *settings)
    await listener.nack(rows, 2_000)
    assert await listener.acknowledge(rows[:40]) == 0
    assert await listener.acknowledge(rows[:40]) == 40
    assert entries(await listener.next(20)) == [*range(40, 60)]
    await asyncio.sleep(5)
    assert listener.nothing_more()
    one.kill()
    two = await machines.served_by("one", *settings)
    assert sorted(entries(await (await dispatcher(two, policy=None)).next(20))) == [*range(40, 60)]
    assert (await stats(two)).subscriptions[0].backlog == 20


async def test_what_is_trimmed_or_cleared_does_not_come_back(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 10)
    await listener.nack(rows, 2_000)
    assert await trim(one, up_to(4, 1)) == 5
    assert entries(await listener.next(5)) == [5, 6, 7, 8, 9]
    await listener.nack(rows[5:], 2_000)
    assert await clear(one, subscription="s") == 5
    await asyncio.sleep(10)
    assert listener.nothing_more()
    await one.add("t", 1, range(10), delay_ms=0)
    assert counts(await listener.next(10)) == [0] * 10, "a new row begins anew"


async def test_a_subscription_or_a_topic_is_deleted_with_what_is_nacked(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 10)
    other = await dispatcher(one, subscription="other")
    await listener.nack(rows, 2_000)
    await one.call(one.engine.requests.delete_subscription("t", "s"))
    assert isinstance(listener.ended, NotFound)
    with pytest.raises(NotFound):
        await nack(one, rows, 2_000)
    again = await dispatcher(one)
    await asyncio.sleep(10)
    assert again.nothing_more()
    await one.add("t", 2, range(5), delay_ms=0)
    rows = await again.next(5)
    await again.nack(rows, 2_000)
    assert len(await other.next(5)) == 5
    await delete_topic(one)
    again = await dispatcher(one)
    await asyncio.sleep(10)
    assert again.nothing_more()


# ---- nobody else


async def test_nacked_positions_use_no_permits_and_no_room_in_flight(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one, policy=constant(MINUTE_MS, in_flight_rows_max=4), permits=8)
    await one.add("t", 1, range(10), delay_ms=0)
    rows = await listener.next(4)
    await asyncio.sleep(1)
    assert listener.nothing_more()
    await listener.nack(rows)
    rows = await listener.next(4)
    assert listener.stream.permits == 0
    await listener.nack(rows)
    listener.stream.grant(2)
    assert entries(await listener.next(2)) == [8, 9]
    found = (await stats(one)).subscriptions[0]
    assert (found.backlog, found.in_flight) == (10, 2)


async def test_a_nack_is_of_one_subscription_alone(machines: EngineFixture) -> None:
    one = await machines.served_by()
    first, second = await dispatcher(one, subscription="a"), await dispatcher(one, subscription="b")
    await one.add("t", 1, range(5), delay_ms=100)
    rows = await first.next(5)
    await first.nack(rows, 1_000)
    same = await second.next(5)
    await first.next(5)
    await asyncio.sleep(5)
    assert second.nothing_more()
    assert await second.acknowledge(same) == 0
    assert await first.nack(rows, 1_000) == NACKED
    assert counts(await first.next(5)) == [2] * 5


async def test_what_is_not_in_the_backlog_with_that_time_is_ignored_and_counted(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5)
    await one.add("t", 2, [7], delay_ms=MINUTE_MS)
    pending = (2, 7, machines.now_ms() + MINUTE_MS)
    other_time = (1, 0, rows[0].deliver_at_ms + 1)
    await listener.acknowledge(rows[4:])
    strange = [pending, other_time, rows[4], (9, 9, 5)]
    assert await listener.nack([*strange, rows[1]], 1_000) == Counts(4, 0)
    assert entries(await listener.next(1)) == [1]
    registry = one.metrics.registry
    for result, count in (("nacked", 1), ("ignored", 4)):
        assert registry.get_sample_value("tarry_nack_rows_total", {"topic": "t", "result": result}) == count


async def test_nacks_of_ready_positions_take_them_back_also_those_on_the_store(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await create(one, policy=EXACT)
    await one.add("t", 1, range(100), delay_ms=0)
    due_ms = machines.now_ms()
    await asyncio.sleep(2)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    rows: list[Claim] = [(1, entry, due_ms) for entry in range(100)]
    leased = hand_outs((await get(two, 100)).handed_out, 0)
    assert {row.deliver_at_ms for row in leased} == {due_ms}
    two.kill()
    three = await machines.served_by("one", *SMALL)
    assert await nack(three, rows[:70], 5_000) == NACKED
    listener = await dispatcher(three, policy=None)
    assert entries(await listener.next(30)) == [*range(70, 100)]
    assert counts(await listener.next(70)) == [1] * 70


async def test_when_ready_is_full_they_wait_until_there_is_room(machines: EngineFixture) -> None:
    settings = "delivery.ready_rows_max=1000"
    _, listener, rows = await with_rows(machines, 3_000, settings, permits=3_000)
    await listener.nack(rows[:1_000], 1_000)
    await listener.nack(rows[1_000:2_000], 1_000)
    await listener.nack(rows[2_000:], 1_000)
    await asyncio.sleep(5)
    assert listener.nothing_more()
    for _ in range(30):
        listener.stream.grant(100)
        assert counts(await listener.next(100)) == [1] * 100
    assert len({row.entry for row in listener.got[3_000:]}) == 3_000


async def test_what_found_no_room_comes_to_who_opens_next(machines: EngineFixture) -> None:
    settings = "delivery.ready_rows_max=1000"
    one, listener, rows = await with_rows(machines, 3_000, settings, permits=3_000)
    for first in range(0, 3_000, 1_000):
        await listener.nack(rows[first : first + 1_000], 1_000)
    await asyncio.sleep(5)
    state = next(iter(one.topic("t").core.subscriptions.values()))
    assert len(state.nacks), "there was no room for them"
    listener.stream.close()
    second = await dispatcher(one, policy=None)
    back = await second.next(3_000, timeout_s=5)
    assert counts(back) == [1] * 3_000
    assert len({row.entry for row in back}) == 3_000


async def test_who_comes_gets_what_lies_behind_many_that_wait(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "LOOKED_AT_MAX", 500)
    one, listener, rows = await with_rows(machines, 4_000)
    for first in range(0, 3_500, 500):
        assert await listener.nack(rows[first : first + 500], MINUTE_MS) == NACKED
    listener.stream.close()
    again = await dispatcher(one, policy=None)
    assert entries(await again.next(500)) == list(range(3_500, 4_000))
