"""Fairness of the event loop: how much is done at a time, and whose turn it is."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.position_keys import KeyedRows
from daemon.runtime.due_loop import FORGET_S, PACE_TURN_S, ROWS_A_SOURCE, ROWS_LEAST, ROWS_MOST, TURN_S, DueLoop, Pace
from daemon.shard import shard as shard_module
from tests._support.engine_fixture import EngineFixture, Receiver
from tests._support.virtual_loop import VirtualLoop
from tests.daemon._support.calling import create, delete_topic


class WallClock:
    """The loop's time as a wall clock, which may be set."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.set_ms = 0

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000 + 1e-3) + self.set_ms

    def elapsed_s(self) -> float:
        return self.loop.time()


def passes(seconds: float) -> None:
    """Work that keeps the loop for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.pass_time(seconds)


# ---- portions


async def test_portions_grow_while_nobody_else_wants_a_turn_and_shrink_while_others_need_long() -> None:
    found = Pace()
    assert found.rows == ROWS_LEAST
    for _ in range(20):
        await found.give_way()
    assert found.rows == ROWS_MOST
    found.noted(2 * PACE_TURN_S)
    assert found.rows == ROWS_MOST // 2
    for _ in range(20):
        found.noted(2 * PACE_TURN_S)
    assert found.rows == ROWS_LEAST


async def test_a_portion_of_many_sources_is_worth_looking_into_them_however_busy_the_loop_is() -> None:
    found = Pace()
    assert [found.rows_of(sources) for sources in (0, 2, 20, 1_000)] == [500, 500, 4_000, 10_000]
    for _ in range(20):
        await found.give_way()
    assert found.rows_of(20) == ROWS_MOST


async def test_a_backlog_of_many_buckets_that_come_due_together_is_read_in_portions_worth_it(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else each portion costs more than the rows in it, the loop stays busy, and the portions stay small.
    buckets, rows = 10, 2_000
    one = await machines.served_by("one")
    await create(one, "away")
    for ledger in range(buckets):
        await one.add("t", ledger, range(rows), delay_ms=60_000)
        await one.call(one.engine.requests.seal("t"))
    await asyncio.sleep(61.0)
    derived: list[int] = []
    append_ready = SubscriptionState.derived

    def counted(state: SubscriptionState, found: KeyedRows) -> None:
        derived.append(len(found))
        append_ready(state, found)

    monkeypatch.setattr(SubscriptionState, "derived", counted)
    monkeypatch.setattr(Pace, "rows", ROWS_LEAST)
    receiver = await one.receiver("t", "away")
    await receiver.received(buckets * rows)
    assert sum(derived) == buckets * rows
    # About half a portion is certain to be taken.
    assert len(derived) <= 2 * rows * buckets // (ROWS_A_SOURCE * buckets) + buckets


async def test_the_others_turn_is_what_runs_between_two_portions() -> None:
    found = Pace()
    asyncio.get_running_loop().call_soon(passes, 10 * PACE_TURN_S)
    for _ in range(2):
        found.noted(0.0)
    before = found.rows
    await found.give_way()
    assert found.rows < before


async def test_after_a_pause_it_begins_with_little_again() -> None:
    found = Pace()
    for _ in range(20):
        found.noted(0.0)
    await asyncio.sleep(FORGET_S + 0.1)
    assert found.rows == ROWS_LEAST


# ---- the due loop


class Busy:
    """Has always more to do, and takes `takes_s` each time."""

    tick_ms = 1

    def __init__(self, takes_s: float) -> None:
        self.wake_at_ms: int | None = None
        self.takes_s = takes_s
        self.woken = 0

    def failed(self, error: Exception) -> None:
        raise error

    def wake(self, now_ms: int) -> int | None:
        self.woken += 1
        passes(self.takes_s)
        return now_ms


class Modest:
    """Has something to do every 10 ms, and notes how late it is woken."""

    tick_ms = 1

    def __init__(self) -> None:
        self.wake_at_ms: int | None = None
        self.late_ms: list[int] = []

    def failed(self, error: Exception) -> None:
        raise error

    def wake(self, now_ms: int) -> int | None:
        assert self.next_ms <= now_ms
        self.late_ms.append(now_ms - self.next_ms)
        self.next_ms += 10
        return self.next_ms

    next_ms = 0


async def run_for(due_loop: DueLoop, seconds: float) -> None:
    running = asyncio.ensure_future(due_loop.run())
    await asyncio.sleep(seconds)
    running.cancel()


async def test_who_always_has_more_to_do_leaves_the_others_two_thirds_of_the_time() -> None:
    clock = WallClock()
    due_loop = DueLoop(clock)
    busy, modest = Busy(takes_s=0.005), [Modest() for _ in range(20)]
    now_ms = clock.now_ms()
    due_loop.schedule(busy, now_ms)
    for number, each in enumerate(modest):
        each.next_ms = now_ms + number % 10
        due_loop.schedule(each, each.next_ms)
    await run_for(due_loop, 3.0)
    assert 150 <= busy.woken <= 201
    late_ms = [late for each in modest for late in each.late_ms]
    assert len(late_ms) >= 20 * 290
    assert max(late_ms) <= 6


async def test_who_has_more_to_do_goes_on_though_the_clock_is_set_back() -> None:
    clock = WallClock()
    clock.set_ms = 10_000_000
    due_loop = DueLoop(clock)
    busy = Busy(takes_s=0.005)
    due_loop.schedule(busy, clock.now_ms())
    running = asyncio.ensure_future(due_loop.run())
    await asyncio.sleep(1.0)
    clock.set_ms -= 3_600_000
    due_loop.look_again()
    before = busy.woken
    await asyncio.sleep(1.0)
    running.cancel()
    assert busy.woken - before > 50


async def test_who_is_woken_after_others_had_their_turn_is_told_the_time_as_it_is_then() -> None:
    clock = WallClock()
    clock.set_ms = 10_000_000
    told_ms: list[int] = []

    class Told(Busy):
        def wake(self, now_ms: int) -> int | None:
            told_ms.append(now_ms - clock.now_ms())
            # The next one is woken when the clock was set.
            asyncio.get_running_loop().call_soon(setattr, clock, "set_ms", clock.set_ms - 3_600_000)
            super().wake(now_ms)
            return None

    due_loop = DueLoop(clock)
    for sleeper in (sleepers := [Told(takes_s=2 * TURN_S) for _ in range(2)]):
        due_loop.schedule(sleeper, clock.now_ms())
    await run_for(due_loop, 0.5)
    assert [sleeper.woken for sleeper in sleepers] == [1, 1]
    assert told_ms == [0, 0]


async def test_the_loop_of_the_daemon_has_a_turn_between_many_sleepers() -> None:
    clock = WallClock()
    due_loop = DueLoop(clock)
    sleepers = [Busy(takes_s=1.1 * TURN_S) for _ in range(50)]
    for sleeper in sleepers:
        due_loop.schedule(sleeper, clock.now_ms())
    late_s: list[float] = []

    async def others() -> None:
        while True:
            wanted_s = clock.elapsed_s() + 0.001
            await asyncio.sleep(0.001)
            late_s.append(clock.elapsed_s() - wanted_s)

    watching = asyncio.ensure_future(others())
    await run_for(due_loop, 0.5)
    watching.cancel()
    assert len(late_s) > 50
    # A timer and who waits for it take a turn each; all sleepers together take 50.
    assert max(late_s) <= 4 * TURN_S


# ---- streams


async def test_a_stream_with_much_to_take_does_not_keep_the_loop(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "delivery.ready_rows_max=20000")
    await create(one, "large")
    for first in range(0, 60_000, 20_000):
        await one.add("t", 1, range(first, first + 20_000), delay_ms=0)
    nothing = np.empty(0, np.uint64)
    stream = await one.call(one.engine.requests.open_dispatch("t", "large", HeldPositions(nothing, nothing, nothing)))
    stream.grant(1_000_000)
    taken: list[int] = []
    while sum(taken) < 60_000:
        others_had_a_turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(others_had_a_turn.set)
        full = stream._took_many
        taken.append(len((await stream.next_messages()).rows))
        assert others_had_a_turn.is_set() or not full
    assert taken[0] == ROWS_LEAST
    assert len(taken) > 3
    assert ROWS_LEAST < max(taken) <= ROWS_MOST
    stream.close()


async def test_subscriptions_and_topics_beside_a_large_backlog_get_their_rows_in_time(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "large")
    for first in range(0, 200_000, 50_000):
        await one.add("t", 1, range(first, first + 50_000), delay_ms=0)
    small: list[Receiver] = [await one.receiver("t", "small"), await one.receiver("u", "other")]
    large = await one.receiver("t", "large")
    for topic in ("t", "u"):
        await one.add(topic, 2, range(100), delay_ms=0)
    for receiver in small:
        await receiver.received(100)
    await large.received(200_100)
    assert [len(receiver.rows) for receiver in small] == [100, 100]
    assert [row[:2] for row in large.rows[:3]] == [(1, 0), (1, 1), (1, 2)]


async def test_topics_are_looked_after_some_at_a_time_and_none_that_was_deleted_meanwhile(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    for topic in ("a", "b", "c", "d"):
        await create(one, topic=topic)
    shard = one.shards[0]
    looked_after: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "TOPICS_A_STEP", 1)
        for name, owned in shard.topics.items():
            patch.setattr(owned, "every_second", functools.partial(looked_after.append, name))
        steps = shard.every_second()
        next(steps)
        assert looked_after == ["a"]
        await delete_topic(one, "c")
        looked_after[1:] = []
        assert len(list(steps)) == 3
    assert looked_after == ["a", "b", "d"]
