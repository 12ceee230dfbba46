"""Negative acknowledgements: when positions come back, how often it was, and what it does to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from daemon.engine.calls import NackOutcome, SubscriptionPolicy, TopicPolicy
from daemon.errors import DelayTooLong, InvalidArgument, NotFound
from storage_backends.formats.index_ids import BATCHED_ENTRY_ID_MAX
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy
from tests.daemon.engine.calling import clear, create, delete_topic, get, stats, trim, up_to
from tests.daemon.engine.nacking import (
    EXACT,
    MINUTE_MS,
    Claim,
    Dispatcher,
    HandOut,
    constant,
    dispatcher,
    hand_outs,
    nack,
)
from tests.support.engine_fixture import Daemon, EngineFixture

JOURNAL = "/journal/"
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")
TICK_MS = 6
NACKED, DEAD = NackOutcome(0, 0), NackOutcome(0, 1)


async def with_rows(
    machines: EngineFixture,
    count: int,
    *settings: str,
    policy: SubscriptionPolicy = EXACT,
    permits: int = 1_000_000,
) -> tuple[Daemon, Dispatcher, list[HandOut]]:
    """A daemon, a dispatcher, and as many rows that it was handed out."""
    one = await machines.served_by("one", *settings)
    listener = await dispatcher(one, policy=policy, permits=permits)
    await one.add("t", 1, range(count), delay_ms=0)
    return one, listener, await listener.next(min(count, permits))


def counts(rows: Sequence[HandOut]) -> list[int]:
    return [row.redeliveries for row in rows]


def entries(rows: Sequence[HandOut]) -> list[int]:
    return [row.entry for row in rows]


def assert_back_after(rows: Sequence[HandOut], since_ms: int, delay_ms: int, *, late_ms: int = TICK_MS) -> None:
    """Never early, and hardly late."""
    for row in rows:
        assert since_ms + delay_ms <= row.at_ms <= since_ms + delay_ms + late_ms, (row, row.at_ms - since_ms)


async def update(daemon: Daemon, policy: SubscriptionPolicy, subscription: str = "s") -> SubscriptionPolicy:
    return await daemon.call(daemon.engine.requests.update_subscription("t", subscription, policy))


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
    for row in rows:
        await asyncio.sleep(0.007)
        await listener.nack([row], 1_000)
    nacked_ms = machines.now_ms()
    back = await listener.next(30)
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


async def test_a_nack_that_is_repeated_on_the_next_owner_counts_once(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5)
    held = one.pause("put_if_absent", JOURNAL)
    lost = listener.nack(rows, 5_000)
    await held.reached()
    held.release()
    await asyncio.sleep(0.05)
    one.kill()
    await asyncio.wait([lost])
    two = await machines.served_by("one")
    assert await nack(two, rows, 5_000) == NACKED
    back = await (await dispatcher(two, policy=None)).next(5)
    assert counts(back) == [1] * 5


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


# ---- what leaves


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
    assert await listener.nack([*strange, rows[1]], 1_000) == NackOutcome(4, 0)
    assert entries(await listener.next(1)) == [1]
    registry = one.metrics.registry
    for result, count in (("nacked", 1), ("ignored", 4)):
        assert registry.get_sample_value("tarry_nack_rows_total", {"topic": "t", "result": result}) == count


async def test_what_a_staged_nack_names_is_handed_to_nobody_and_whoever_names_it_waits(
    machines: EngineFixture,
) -> None:
    one, listener, rows = await with_rows(machines, 10)
    held = one.pause("put_if_absent", JOURNAL)
    nacking = listener.nack(rows[:6], 10_000)
    await held.reached()
    acknowledging, again = listener.acknowledge(rows[:2]), listener.nack(rows[2:4], 15_000)
    extending = listener.extend(rows[4:])
    await asyncio.sleep(0.1)
    listener.stream.close()
    second = await dispatcher(one, policy=None)
    assert entries(await second.next(4)) == [6, 7, 8, 9]
    await asyncio.sleep(3)
    assert second.nothing_more()
    assert not any(task.done() for task in (nacking, acknowledging, again, extending))
    held.release()
    assert await nacking == NACKED
    assert await acknowledging == 0
    assert await again == NACKED
    assert await extending == 6
    back = await second.next(4)
    assert (entries(back), counts(back)) == ([4, 5, 2, 3], [1] * 4)
    await asyncio.sleep(10)
    assert second.nothing_more()


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


# ---- positions that Tarry has not handed out


@pytest.mark.parametrize("settings", [(), SMALL])
async def test_any_position_of_the_log_may_be_nacked_and_is_kept_as_any_other(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    listener = await dispatcher(one, policy=constant(1_000, max_redeliver_count=2))
    log = [(7, entry, 0) for entry in range(50)]
    nacked_ms = machines.now_ms()
    assert await nack(one, log, 3_000, key_hash=range(100, 150)) == NACKED
    back = await listener.next(50)
    assert_back_after(back, nacked_ms, 3_000, late_ms=100)
    assert [row[:3] for row in back] == log
    assert (counts(back), [row.key_hash for row in back]) == ([1] * 50, [*range(100, 150)])
    assert await listener.acknowledge(back[:10]) == 0
    assert await listener.nack(back[10:]) == NACKED
    await asyncio.sleep(0.1)
    one.kill()
    two = await machines.served_by("one", *settings)
    again = await dispatcher(two, policy=None)
    rows = await again.next(40)
    assert (sorted(entries(rows)), counts(rows)) == ([*range(10, 50)], [2] * 40)
    assert await again.nack(rows[:1]) == DEAD
    assert await again.acknowledge(rows[1:]) == 0
    assert (await stats(two)).subscriptions[0].backlog == 0


async def test_a_position_that_the_subscription_is_owed_with_a_time_is_no_position_of_the_log(
    machines: EngineFixture,
) -> None:
    one, listener, rows = await with_rows(machines, 2)
    await one.add("t", 1, [77], delay_ms=MINUTE_MS)
    assert await nack(one, [(1, 0, 0), (1, 77, 0), (1, 78, 0)], 1_000) == NackOutcome(2, 0)
    back = await listener.next(1)
    assert [row[:3] for row in back] == [(1, 78, 0)]
    assert await listener.acknowledge([*rows, *back]) == 0
    assert entries(await listener.next(1)) == [77]


# ---- messages of batches


async def test_messages_of_one_batch_come_back_each_by_itself_beside_the_entry(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 3)
    (ledger, entry, due_ms), others = rows[1][:3], rows[2:]
    parts: list[Claim] = [(ledger, entry, due_ms, number) for number in (0, 5, 65_535)]
    nacked_ms = machines.now_ms()
    assert await listener.nack(parts, [3_000, 1_000, 2_000]) == NACKED
    assert (await stats(one)).subscriptions[0].in_flight == 3, "the entry is where it was"
    back = await listener.next(3)
    assert [(row[:3], row.part, row.redeliveries) for row in back] == [
        ((ledger, entry, due_ms), part, 1) for part in (5, 65_535, 0)
    ]
    for row, delay_ms in zip(back, (1_000, 2_000, 3_000), strict=True):
        assert_back_after([row], nacked_ms, delay_ms, late_ms=50)
    assert await listener.nack(back[:2], 1_000) == NACKED
    assert counts(await listener.next(2)) == [2, 2]
    assert await listener.acknowledge(back[:1]) == 0, "that message alone"
    assert await listener.acknowledge([*back[:1], (ledger, entry, due_ms, 9)]) == 2, "of another nothing is known"
    assert await listener.nack(back[1:], 5_000) == NACKED
    assert await listener.acknowledge(rows[1:2]) == 0, "the entry as a whole ends them all"
    await asyncio.sleep(10)
    assert listener.nothing_more()
    assert await listener.acknowledge([rows[0], *others]) == 0
    assert (await stats(one)).subscriptions[0].backlog == 0


async def test_messages_of_batches_survive_a_crash_with_their_counts(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5, *SMALL)
    await listener.nack(rows[:1], 100)
    (first,) = await listener.next(1)
    parts: list[Claim] = [(*row[:3], number) for row in (first, rows[1]) for number in range(3)]
    await listener.nack(parts, 5_000)
    await listener.acknowledge([(*rows[1][:3], 2)])
    await asyncio.sleep(1)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    second = await dispatcher(two, policy=None)
    assert sorted(row[:4] for row in await second.next(5)) == [(*row[:3], None) for row in rows]
    back = await second.next(5)
    assert [(row.entry, row.part, row.redeliveries) for row in back] == [
        (0, 0, 2),
        (0, 1, 2),
        (0, 2, 2),
        (1, 0, 1),
        (1, 1, 1),
    ]


async def test_messages_of_a_batch_of_the_log_may_be_nacked(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one)
    assert await nack(one, [(3, BATCHED_ENTRY_ID_MAX, 0, 1), (3, 4, 0, 0)], [2_000, 1_000]) == NACKED
    back = await listener.next(2)
    assert [row[:5] for row in back] == [(3, 4, 0, 0, 1), (3, BATCHED_ENTRY_ID_MAX, 0, 1, 1)]
    assert await listener.acknowledge([(3, 4, 0)]) in (0, 1)
    assert await listener.acknowledge(back[1:]) == 0
    assert (await stats(one)).subscriptions[0].backlog == 0


async def test_a_stream_may_hold_messages_of_batches_when_it_opens(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 2)
    parts: list[Claim] = [(*rows[0][:3], number) for number in range(3)]
    await listener.nack(parts, 100)
    back = await listener.next(3)
    listener.stream.close()
    await listener.task
    second = await dispatcher(one, policy=None, held=[*back[:2], rows[1], (*rows[0][:3], 7)])
    assert second.stream.held == 3
    assert [row[:4] for row in await second.next(2)] == [(*rows[0][:3], None), (*rows[0][:3], 2)]
    await asyncio.sleep(5)
    assert second.nothing_more()
    assert await second.acknowledge(back[:2]) == 0


# ---- delays


async def test_the_delay_follows_from_the_policy_by_how_often_it_was(machines: EngineFixture) -> None:
    redelivery = RedeliveryPolicy(kind=RedeliveryKind.LIST, delays_ms=(1_000, 5_000, 2_000))
    policy = SubscriptionPolicy(redelivery=redelivery, nack_precision_bits=0)
    _, listener, rows = await with_rows(machines, 1, policy=policy)
    for delay_ms in (1_000, 5_000, 2_000, 2_000):
        nacked_ms = machines.now_ms()
        await listener.nack(rows)
        rows = await listener.next(1)
        assert_back_after(rows, nacked_ms, delay_ms, late_ms=50)


async def test_without_a_policy_the_daemon_s_delay_counts(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 1, "redelivery.delay_ms=7000")
    nacked_ms = machines.now_ms()
    await listener.nack(rows)
    assert_back_after(await listener.next(1), nacked_ms, 7_000, late_ms=50)


async def test_a_delay_or_a_level_of_the_request_wins_over_the_policy(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 3, policy=constant(MINUTE_MS))
    for given_ms, level, delay_ms in ((2_000, None, 2_000), (None, 2, 5_000), (None, 0, 0)):
        nacked_ms = machines.now_ms()
        await listener.nack(rows[:1], given_ms, level=level)
        assert_back_after(await listener.next(1), nacked_ms, delay_ms, late_ms=50)
    with pytest.raises(InvalidArgument, match=r"delay_level\[0\] is -1"):
        await listener.nack(rows, level=-1)


async def test_the_ladder_climbs_the_delay_levels_from_the_third(machines: EngineFixture) -> None:
    ladder = RedeliveryPolicy(kind=RedeliveryKind.LADDER)
    policy = SubscriptionPolicy(redelivery=ladder, nack_precision_bits=0)
    _, listener, rows = await with_rows(machines, 1, "redelivery.delay_levels=1s 2s 3s 7s 4s", policy=policy)
    for delay_ms in (3_000, 7_000, 4_000, 4_000):
        nacked_ms = machines.now_ms()
        await listener.nack(rows)
        rows = await listener.next(1)
        assert_back_after(rows, nacked_ms, delay_ms, late_ms=50)


async def test_an_exponential_policy_grows_to_its_most_and_jitter_only_shortens(machines: EngineFixture) -> None:
    redelivery = RedeliveryPolicy(
        kind=RedeliveryKind.EXPONENTIAL, initial_ms=1_000, multiplier=3.0, max_ms=10_000, jitter=0.5
    )
    policy = SubscriptionPolicy(redelivery=redelivery, nack_precision_bits=0)
    _, listener, rows = await with_rows(machines, 20, policy=policy)
    for most_ms in (1_000, 3_000, 9_000, 10_000, 10_000):
        nacked_ms = machines.now_ms()
        await listener.nack(rows)
        rows = await listener.next(20)
        waited_ms = [row.at_ms - nacked_ms for row in rows]
        assert len(set(waited_ms)) > 10, "each is drawn by itself"
        assert most_ms / 2 <= min(waited_ms)
        assert max(waited_ms) <= most_ms + 50


async def test_another_policy_of_the_subscription_is_in_force_at_once(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 3, policy=constant(MINUTE_MS))
    await listener.nack(rows[:1])
    await update(one, constant(1_000, max_redeliver_count=1))
    nacked_ms = machines.now_ms()
    await listener.nack(rows[1:])
    back = await listener.next(2)
    assert_back_after(back, nacked_ms, 1_000, late_ms=50)
    assert await listener.nack(back) == NackOutcome(0, 2)
    assert entries(await listener.next(1)) == [0], "what was nacked before keeps its time"


# ---- dead letters


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_a_position_that_was_nacked_too_often_is_a_dead_letter(machines: EngineFixture, most: int) -> None:
    one, listener, rows = await with_rows(machines, 2, policy=constant(100, max_redeliver_count=most))
    for number in range(most):
        assert await listener.nack(rows[:1]) == NACKED
        back = await listener.next(1)
        assert counts(back) == [number + 1]
    assert await listener.nack(rows[:1]) == DEAD
    assert await listener.nack(rows[:1]) == NackOutcome(1, 0), "it has left the backlog"
    await asyncio.sleep(5)
    one.kill()
    two = await machines.served_by("one")
    again = await dispatcher(two, policy=None)
    assert entries(await again.next(1)) == [1]
    await asyncio.sleep(5)
    assert again.nothing_more()
    assert (await stats(two)).subscriptions[0].backlog == 1


async def test_a_rejected_position_is_a_dead_letter_at_once(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 4)
    await listener.nack(rows[2:], 5_000)
    assert await listener.nack(rows[:3], reject=True, text="not ours") == NackOutcome(0, 3)
    assert entries(await listener.next(1)) == [3]
    await asyncio.sleep(10)
    assert listener.nothing_more()
    registry = one.metrics.registry
    assert registry.get_sample_value("tarry_nack_rows_total", {"topic": "t", "result": "dead_lettered"}) == 3
    assert registry.get_sample_value("tarry_dead_lettered_rows_total", {"topic": "t", "reason": "rejected"}) == 3


# ---- limits


@pytest.mark.parametrize(
    ("rows", "fields", "error", "named"),
    [
        ([(1, 1, 5)], {"delay_ms": 400_000_000_000}, DelayTooLong, r"delay_ms\[0\] is 400000000000"),
        ([(1, 1, 5), (1, 1, 6)], {}, InvalidArgument, r"position \(1, 1\)"),
        ([(1, 1, 5, 3), (1, 1, 6, 3)], {}, InvalidArgument, r"position \(1, 1, 3\)"),
        ([(1, 1, 5, 70_000)], {}, InvalidArgument, r"batch_index\[0\] is 70000"),
        ([(1, BATCHED_ENTRY_ID_MAX + 1, 5, 0)], {}, InvalidArgument, r"entry_id\[0\] is 281474976710656"),
        ([(1, 1, 5)], {"reject": True, "text": "é" * 513}, InvalidArgument, "reason has 1026 bytes"),
        ([(1, 1, 5)], {"level": -3}, InvalidArgument, r"delay_level\[0\] is -3"),
        ([], {}, InvalidArgument, "entry_id has 0 rows"),
        ([(1, entry, 5) for entry in range(1_001)], {}, InvalidArgument, "entry_id has 1001 rows"),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_changes_nothing(
    machines: EngineFixture, rows: list[Claim], fields: dict[str, object], error: type[Exception], named: str
) -> None:
    one, listener, _ = await with_rows(machines, 2, "limits.rows_per_request_max=1000")
    with pytest.raises(error, match=named):
        await nack(one, rows, **fields)  # type: ignore[arg-type]
    with pytest.raises(error, match=named):
        await listener.nack(rows, **fields)  # type: ignore[arg-type]
    assert (await stats(one)).subscriptions[0].in_flight == 2


async def test_the_limit_on_delays_is_that_of_the_topic(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 1)
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=5_000)))
    with pytest.raises(DelayTooLong, match="5000"):
        await listener.nack(rows, 5_001)
    with pytest.raises(DelayTooLong, match=r"delay_level\[0\] is 10000"):
        await listener.nack(rows, level=3)
    with pytest.raises(InvalidArgument, match=r"redelivery\.constant\.delay_ms is 5001"):
        await update(one, constant(5_001))
    nacked_ms = machines.now_ms()
    await listener.nack(rows)
    assert_back_after(await listener.next(1), nacked_ms, 5_000, late_ms=50)
