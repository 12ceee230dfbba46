"""Due rows without a stream: waiting for them, who gets them, and what becomes of a lease."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import InvalidArgument, NotFound, QuotaExceeded, TarryError, Unavailable
from daemon.topic import topic_settings
from daemon.topic.leases import GET_ROWS_MAX, WAIT_MAX_MS
from storage_backends.formats.manifest import SubscriptionPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import acknowledge, create, entries_of, extend, get, rows_of, stats

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")


async def with_rows(machines: EngineFixture, count: int, *settings: str, delay_ms: int = 0) -> Daemon:
    """A daemon whose topic has a subscription and rows."""
    one = await machines.served_by("one", *settings)
    await create(one)
    for first in range(0, count, 1000):
        await one.add("t", 1, range(first, min(count, first + 1000)), delay_ms=delay_ms)
    return one


# ---- getting


async def test_due_rows_are_leased_in_order_and_no_more_than_asked_for(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    leased = await get(one, 4)
    assert entries_of(leased) == [0, 1, 2, 3]
    assert (leased.lease_ms, leased.handed_out.epoch) == (30_000, 1)
    assert entries_of(await get(one, 100)) == [4, 5, 6, 7, 8, 9]
    assert entries_of(await get(one, 100)) == []
    found = (await stats(one)).subscriptions[0]
    assert (found.backlog, found.in_flight, found.leased, found.dispatchers) == (10, 10, 10, 0)


async def test_nothing_is_leased_before_its_time_and_a_puller_may_wait_for_it(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10, delay_ms=5_000)
    assert entries_of(await get(one)) == []
    asked_s = machines.loop.time()
    leased = await get(one, wait_ms=20_000)
    assert len(entries_of(leased)) == 10
    assert 4.9 <= machines.loop.time() - asked_s <= 5.2
    assert all(row[2] <= machines.now_ms() for row in rows_of(leased))


async def test_a_puller_waits_no_longer_than_it_said(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10, delay_ms=50_000)
    asked_s = machines.loop.time()
    assert entries_of(await get(one, wait_ms=7_000)) == []
    assert 7 <= machines.loop.time() - asked_s <= 7.5


@pytest.mark.parametrize("settings", [(), SMALL])
async def test_acknowledged_rows_of_a_lease_are_not_due_again_also_after_a_crash(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await with_rows(machines, 50, *settings)
    rows = rows_of(await get(one, 30))
    assert await acknowledge(one, rows[:20]) == 0
    assert await acknowledge(one, rows[:20]) == 20
    one.kill()
    two = await machines.served_by("one", *settings)
    assert await acknowledge(two, rows[20:25]) == 0, "the lease has died, the rows are in the backlog"
    assert entries_of(await get(two)) == list(range(25, 50))


async def test_a_backlog_on_the_store_is_there_at_the_first_pull(machines: EngineFixture) -> None:
    one = await with_rows(machines, 400, *SMALL)
    await asyncio.sleep(5)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    found: list[int] = []
    while rows := rows_of(await get(two, 70)):
        found += [row[1] for row in rows]
        assert await acknowledge(two, rows) == 0
    assert found == list(range(400))


async def test_pulling_goes_on_where_it_was_and_reads_no_backlog_again(machines: EngineFixture) -> None:
    one = await with_rows(machines, 2000, "bucket.min_index_count_per_bucket=200", "bucket.rows_max=200")
    await asyncio.sleep(5)
    state = next(iter(one.topic("t").core.subscriptions.values()))
    for _ in range(10):
        rows = rows_of(await get(one, 100))
        assert len(rows) == 100
        await acknowledge(one, rows)
        await asyncio.sleep(15)
        assert state.ready_rows, "READY is kept between two pulls"
    await asyncio.sleep(100)
    assert not state.dispatchers, "and not for ever"
    assert entries_of(await get(one, 5)) == [1000, 1001, 1002, 1003, 1004]


# ---- the end of a lease


async def test_a_lease_that_is_over_makes_its_rows_due_again_first_and_in_order(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    rows = rows_of(await get(one, 5, lease_ms=2_000))
    await acknowledge(one, rows[1:2])
    await asyncio.sleep(1.9)
    assert entries_of(await get(one, 2)) == [5, 6]
    asked_s = machines.loop.time()
    again = await get(one, 100, wait_ms=1_000)
    assert entries_of(again) == [7, 8, 9]
    again = await get(one, 100, wait_ms=1_000)
    assert entries_of(again) == [0, 2, 3, 4]
    assert machines.loop.time() - asked_s == pytest.approx(0.1, abs=0.01)
    assert await acknowledge(one, rows[2:]) == 0, "whoever holds it may acknowledge it"
    metrics = one.metrics.registry.get_sample_value("tarry_lease_over_rows_total", {"topic": "t"})
    assert metrics == 4


async def test_leases_end_on_the_monotonic_clock_whatever_the_wall_clock_does(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    await get(one, 10, lease_ms=10_000)
    machines.step_ms += 3_600_000
    await asyncio.sleep(5)
    assert entries_of(await get(one)) == []
    machines.step_ms -= 7_200_000
    assert len(entries_of(await get(one, wait_ms=6_000))) == 10


async def test_leases_that_ended_while_the_machine_slept_are_over_when_it_wakes(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    await get(one, 10, lease_ms=10_000)
    one.sleep_machine(60)
    await asyncio.sleep(1.1)
    assert len(entries_of(await get(one))) == 10


async def test_who_pulls_in_vain_leaves_nothing_behind(machines: EngineFixture) -> None:
    one = await with_rows(machines, 0)
    assert entries_of(await get(one)) == []
    state = next(iter(one.topic("t").core.subscriptions.values()))
    assert state.dispatchers == 1
    await asyncio.sleep(35)
    assert state.dispatchers == 0


async def test_each_lease_has_its_own_end(machines: EngineFixture) -> None:
    one = await with_rows(machines, 30)
    for number in range(30):
        await get(one, 1, lease_ms=1_000 * (30 - number))
    started_s = machines.loop.time()
    for number in range(30):
        rows = rows_of(await get(one, 10, lease_ms=100_000, wait_ms=2_000))
        assert [row[1] for row in rows] == [29 - number]
        assert machines.loop.time() - started_s == pytest.approx(number + 1, abs=0.1)


async def test_a_lease_may_be_extended_in_part_and_given_back(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    rows = rows_of(await get(one, 10, lease_ms=5_000))
    await asyncio.sleep(4)
    assert await extend(one, rows[:4], 5_000) == 0
    assert await extend(one, rows[4:6], 0) == 0
    assert entries_of(await get(one)) == [4, 5]
    await asyncio.sleep(2)
    assert entries_of(await get(one)) == [6, 7, 8, 9]
    await asyncio.sleep(2.5)
    assert entries_of(await get(one)) == []
    await asyncio.sleep(1)
    assert entries_of(await get(one)) == [0, 1, 2, 3]


async def test_what_is_not_leased_with_that_time_is_ignored_and_counted(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    stream = await one.receiver("t", permits=2)
    streamed = await stream.received(2)
    rows = rows_of(await get(one, 3, lease_ms=5_000))
    wrong_time = (*rows[0][:2], rows[0][2] + 1)
    assert await extend(one, [wrong_time, (9, 9, 9), *streamed, rows[1], rows[1]], 10_000) == 5
    assert await extend(one, rows, 10_000, subscription="s") == 0
    await acknowledge(one, rows[:1])
    assert await extend(one, rows, 10_000) == 1
    stream.stream.close()
    await asyncio.sleep(20)
    assert await extend(one, rows, 10_000) == 3


async def test_an_extension_is_answered_only_by_the_owner(machines: EngineFixture) -> None:
    one = await with_rows(machines, 10)
    rows = rows_of(await get(one, 5))
    await asyncio.sleep(0.1)
    one.freeze()
    extending, nothing = extend(one, rows, 60_000), get(one, 5, subscription="s")
    assert len(entries_of(await nothing)) == 5, "rows are a hand-out, as those of a stream"
    empty = get(one)
    two = await machines.served_by("two")
    assert len(entries_of(await get(two))) == 10
    one.thaw()
    for task in (extending, empty):
        with pytest.raises(TarryError):
            await task


# ---- fairness


async def test_pullers_are_served_in_the_order_in_which_they_came(machines: EngineFixture) -> None:
    one = await with_rows(machines, 0)
    pullers = [get(one, 2, wait_ms=60_000) for _ in range(5)]
    await asyncio.sleep(1)
    await one.add("t", 1, range(7), delay_ms=1_000)
    await asyncio.sleep(2)
    assert [puller.done() for puller in pullers] == [True, True, True, True, False]
    assert [entries_of(puller.result()) for puller in pullers[:4]] == [[0, 1], [2, 3], [4, 5], [6]]
    await one.add("t", 2, [9], delay_ms=100)
    assert entries_of(await pullers[4]) == [9]


async def test_of_a_trickle_streams_and_pullers_get_their_shares(machines: EngineFixture) -> None:
    one = await with_rows(machines, 0)
    streams = [await one.receiver("t") for _ in range(2)]
    pulled = [0, 0]

    async def pull(number: int) -> None:
        while True:
            pulled[number] += len(entries_of(await get(one, 100, wait_ms=60_000)))

    pulling = [asyncio.ensure_future(pull(number)) for number in range(2)]
    await asyncio.sleep(1)
    for entry in range(40):
        await one.add("t", 1, [entry], delay_ms=10)
        await asyncio.sleep(0.1)
    assert [*pulled, *(len(stream.rows) for stream in streams)] == [10, 10, 10, 10]
    for task in pulling:
        task.cancel()


async def test_a_puller_without_patience_does_not_push_in(machines: EngineFixture) -> None:
    one = await with_rows(machines, 0)
    waiting = get(one, 10, wait_ms=60_000)
    await asyncio.sleep(1)
    await one.add("t", 1, range(20), delay_ms=1_000)
    impatient = []
    for _ in range(100):
        impatient.append(get(one, 3))
        await asyncio.sleep(0.02)
    assert entries_of(await waiting) == list(range(10))
    found = [entry for puller in impatient for entry in entries_of(await puller)]
    assert found == list(range(10, 20))


async def test_a_puller_that_goes_away_takes_nothing_and_lets_the_next_one_take(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await with_rows(machines, 0)
    first, second = get(one, 10, wait_ms=60_000), get(one, 10, wait_ms=60_000)
    await asyncio.sleep(1)
    first.cancel()
    await one.add("t", 1, range(5), delay_ms=1_000)
    assert entries_of(await second) == [0, 1, 2, 3, 4]
    third, fourth = get(one, 10, wait_ms=60_000), get(one, 10, wait_ms=60_000)
    await asyncio.sleep(1)
    topic = one.topic("t")
    subscription = topic.served_subscription(topic.core.subscriptions[1])
    notify = subscription.notify

    def notify_and_cancel() -> None:
        notify()
        third.cancel()

    monkeypatch.setattr(subscription, "notify", notify_and_cancel)
    await one.add("t", 2, range(5), delay_ms=1_000)
    assert entries_of(await fourth) == [0, 1, 2, 3, 4]
    assert third.cancelled()


async def test_one_that_has_no_room_in_flight_waits_without_taking_anybodys_turn_for_ever(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    await create(one, policy=SubscriptionPolicy(in_flight_rows_max=2))
    await one.add("t", 1, range(6), delay_ms=0)
    rows = rows_of(await get(one, 10, lease_ms=60_000))
    assert len(rows) == 2
    waiting = get(one, 10, wait_ms=30_000)
    await asyncio.sleep(5)
    assert not waiting.done()
    await acknowledge(one, rows)
    assert entries_of(await waiting) == [2, 3]


# ---- limits


async def test_there_are_only_so_many_leases_and_an_acknowledged_one_is_none(machines: EngineFixture) -> None:
    one = await with_rows(machines, 20, "limits.leases_per_subscription_max=3")
    leases = [rows_of(await get(one, 2, lease_ms=10_000)) for _ in range(3)]
    with pytest.raises(QuotaExceeded) as caught:
        await get(one, 2)
    assert caught.value.retry_after_ms is not None
    assert caught.value.retry_after_ms > 0
    with pytest.raises(QuotaExceeded):
        await extend(one, leases[0], 20_000)
    assert await extend(one, leases[1], 0) == 0, "giving back is always possible"
    assert entries_of(await get(one, 1)) == [2]
    with pytest.raises(QuotaExceeded):
        await get(one, 2)
    await acknowledge(one, leases[0])
    assert entries_of(await get(one, 1)) == [3]
    await create(one, "other")
    await get(one, 1, subscription="other")
    await asyncio.sleep(60)
    assert len(entries_of(await get(one, 100))) == 18


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_rows": 0}, "max_rows is 0"),
        ({"max_rows": GET_ROWS_MAX + 1}, "max_rows is 10001"),
        ({"lease_ms": topic_settings.LEASE_MAX_MS + 1}, "lease_ms is 43200001"),
        ({"wait_ms": WAIT_MAX_MS + 1}, "wait_ms is 60001"),
        ({"subscription": ""}, "subscription has 0 bytes"),
        ({"topic": ""}, "topic has 0 bytes"),
    ],
)
async def test_bad_pulls_are_refused_by_name(machines: EngineFixture, arguments: dict[str, int], named: str) -> None:
    one = await with_rows(machines, 10)
    with pytest.raises(InvalidArgument, match=named):
        await get(one, **{"max_rows": 5, **arguments})  # type: ignore[arg-type]
    assert len(entries_of(await get(one))) == 10


async def test_bad_acknowledgements_and_extensions_change_nothing(machines: EngineFixture) -> None:
    one = await with_rows(machines, 5, "limits.rows_per_request_max=5")
    await one.add("t", 2, range(5), delay_ms=0)
    rows = rows_of(await get(one, 10))
    for bad in ([], rows):
        with pytest.raises(InvalidArgument, match="entry_id"):
            await acknowledge(one, bad)
        with pytest.raises(InvalidArgument, match="entry_id"):
            await extend(one, bad, 1_000)
    with pytest.raises(InvalidArgument, match="lease_ms"):
        await extend(one, rows[:1], topic_settings.LEASE_MAX_MS + 1)
    for refused in (
        acknowledge(one, rows[:1], subscription="nobody"),
        extend(one, rows[:1], 1_000, subscription="nobody"),
        get(one, 1, subscription="nobody"),
        acknowledge(one, rows[:1], topic="nothing"),
        extend(one, rows[:1], 1_000, topic="nothing"),
    ):
        with pytest.raises(NotFound):
            await refused
    assert (await stats(one)).subscriptions[0].in_flight == 10


# ---- losses


async def test_who_waits_is_told_when_the_shard_is_lost(machines: EngineFixture) -> None:
    one = await with_rows(machines, 0)
    waiting = get(one, wait_ms=60_000)
    await asyncio.sleep(0.1)
    one.freeze()
    await machines.served_by("two")
    one.thaw()
    with pytest.raises(TarryError):
        await waiting


async def test_who_waits_is_told_when_the_subscription_is_deleted(machines: EngineFixture) -> None:
    one = await with_rows(machines, 5, delay_ms=20_000)
    waiting = get(one, wait_ms=60_000)
    await asyncio.sleep(1)
    await one.call(one.engine.requests.delete_subscription("t", "s"))
    with pytest.raises(NotFound, match="was deleted"):
        await waiting
    await create(one)
    assert len(entries_of(await get(one, wait_ms=30_000))) == 5


async def test_after_15_s_without_a_confirmation_nothing_is_leased(machines: EngineFixture) -> None:
    one = await with_rows(machines, 5, delay_ms=20_000)
    one.store.go_down()
    waiting = get(one, wait_ms=30_000)
    with pytest.raises(Unavailable):
        await waiting
    one.store.come_back()
    await one.serving()
    assert len(entries_of(await get(one, wait_ms=30_000))) == 5


async def test_a_daemon_that_stops_tells_those_who_wait(machines: EngineFixture) -> None:
    one = await with_rows(machines, 0)
    waiting = get(one, wait_ms=60_000)
    await asyncio.sleep(1)
    await one.stop()
    with pytest.raises(Unavailable):
        await waiting
