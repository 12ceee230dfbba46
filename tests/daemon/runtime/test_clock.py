"""A wall clock that is set, a machine that was suspended, a store whose clock differs."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.decisions.topic_state import TopicState
from daemon.metrics import Metrics
from daemon.runtime.clocks import ClockWatch
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import create, entries_of, get, stats

NEVER_SEALED = ()
SEALED = ("bucket.min_index_count_per_bucket=10", "bucket.rows_max=10")
# Nothing is loaded ahead: rows of sealed buckets are read when they are due.
SEALED_NOT_LOADED = (*SEALED, "delivery.lookahead_ms=0")
PLACES = pytest.mark.parametrize(
    "settings", [NEVER_SEALED, SEALED, SEALED_NOT_LOADED], ids=["mutable", "sealed", "sealed and not loaded"]
)


def steps(metrics: Metrics, direction: str) -> float:
    return metrics.registry.get_sample_value("tarry_clock_step_total", {"direction": direction}) or 0.0


async def pending_rows(one: Daemon, settings: tuple[str, ...], delay_ms: int) -> None:
    """20 rows of topic t, due from `delay_ms` on, a second apart from each other."""
    for entry in range(20):
        await one.add("t", 1, [entry], delay_ms=delay_ms + 1_000 * entry)
    if settings:
        await one.until(lambda: len(one.topic("t").core.index.sealed) == 2)


async def fires_within(one: Daemon, count: int, seconds: float) -> list[int]:
    """The entries that a new stream on topic t has received after so long."""
    receiver = await one.receiver("t")
    await asyncio.sleep(seconds)
    assert len(receiver.rows) == count
    return [row[1] for row in receiver.rows]


# ---- steps


@PLACES
async def test_a_step_forward_hands_out_at_once_what_is_due_by_the_new_time(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    await pending_rows(one, settings, delay_ms=100_000)
    receiver = await one.receiver("t")
    one.step_clock(109_500)
    started_s = machines.loop.time()
    await receiver.received(10)
    assert machines.loop.time() - started_s <= 1.1
    assert [row[1] for row in receiver.rows] == list(range(10)), "in order, and nothing early by the new time"
    await asyncio.sleep(10)
    assert steps(one.metrics, "forward") == 1
    assert len(receiver.rows) == 20


@PLACES
async def test_a_step_back_fires_nothing_twice_and_delays_by_no_more_than_the_step(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    await pending_rows(one, settings, delay_ms=20_000)
    receiver = await one.receiver("t")
    await receiver.received(10)
    due_at_s = machines.loop.time() + 10
    one.step_clock(-60_000)
    await asyncio.sleep(59)
    assert len(receiver.rows) == 10, "nothing is due by the clock as it is"
    await receiver.received(20)
    assert machines.loop.time() <= due_at_s + 60 + 1
    await asyncio.sleep(100)
    assert [row[1] for row in receiver.rows] == list(range(20)), "each once"
    assert steps(one.metrics, "back") == 1


async def test_what_was_handed_out_before_a_step_back_is_acknowledged_and_not_due_again(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10), delay_ms=1_000)
    rows = list(await receiver.received(10))
    one.step_clock(-3_600_000)
    assert await receiver.acknowledge(rows) == 0
    found = await stats(one)
    assert (found.pending, found.subscriptions[0].backlog) == (0, 0)


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
async def test_a_lease_runs_out_by_the_time_that_passes_and_not_by_the_wall_clock(
    machines: EngineFixture, step_ms: int
) -> None:
    one = await machines.served_by("one")
    await create(one)
    await one.add("t", 1, range(5), delay_ms=0)
    assert len(entries_of(await get(one, lease_ms=60_000))) == 5
    one.step_clock(step_ms)
    await asyncio.sleep(50)
    assert entries_of(await get(one)) == []
    await asyncio.sleep(11)
    assert len(entries_of(await get(one))) == 5


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
async def test_a_delay_counts_from_the_clock_as_it_is_when_it_is_added(machines: EngineFixture, step_ms: int) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    one.step_clock(step_ms)
    column = np.ones(1, np.uint64)
    batch = AddBatch(
        ledger_id=column,
        entry_id=column,
        deliver_at_ms=None,
        delay_ms=column * np.uint64(5_000),
        key_hash=None,
        return_already_due=False,
    )
    started_s, stepped_ms = machines.loop.time(), one.now_ms()
    await one.call(one.engine.requests.add("t", batch))
    ((_, _, deliver_at_ms),) = await receiver.received(1)
    assert deliver_at_ms == stepped_ms + 5_000
    assert 5.0 <= machines.loop.time() - started_s <= 5.1


async def test_a_subscription_that_is_created_after_a_step_back_starts_with_what_is_pending(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    first = await one.receiver("t", "first")
    await one.add("t", 1, range(5), delay_ms=1_000)
    await one.add("t", 1, range(5, 10), delay_ms=30_000)
    await first.received(5)
    one.step_clock(-10_000)
    second = await one.receiver("t", "second")
    await one.add("t", 1, range(10, 12), delay_ms=-5_000)
    await second.received(7)
    await first.received(12)
    await asyncio.sleep(60)
    assert {row[1] for row in second.rows} == {*range(5, 12)}
    assert len(second.rows) == 7
    assert len(first.rows) == 12


HOUR_MS = 3_600_000


async def delivered_while_the_clock_was_ahead(one: Daemon) -> Receiver:
    """Rows 0 to 9 of ledger 1, to subscription first; then the clock is right again."""
    first = await one.receiver("t", "first")
    one.step_clock(HOUR_MS)
    await one.add("t", 1, range(10), delay_ms=HOUR_MS)
    await first.received(10)
    one.step_clock(-HOUR_MS)
    return first


@PLACES
async def test_after_a_clock_that_was_ahead_a_new_subscription_holds_no_row_up(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    first = await delivered_while_the_clock_was_ahead(one)
    created = await create(one, "second")
    assert created.since_ms <= one.now_ms()
    second = await one.receiver("t", "second")
    started_s = machines.loop.time()
    outcome = await one.add("t", 2, range(5), delay_ms=2_000)
    assert outcome.raised_index.tolist() == []
    await first.received(15)
    await second.received(5)
    assert machines.loop.time() - started_s <= 2.1
    await asyncio.sleep(2 * HOUR_MS / 1_000)
    assert (len(first.rows), second.positions) == (15, {(2, entry) for entry in range(5)})


@PLACES
async def test_what_a_clock_that_was_ahead_has_passed_is_kept_from_a_new_subscription_also_after_a_crash(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    first = await delivered_while_the_clock_was_ahead(one)
    assert await first.acknowledge(first.rows[:4]) == 0
    await create(one, "second")
    one.kill()
    two = await machines.served_by("one", *settings)
    await two.add("t", 2, range(5), delay_ms=2_000)
    first, second = await two.receiver("t", "first"), await two.receiver("t", "second")
    await first.received(5)
    assert {row[0] for row in first.rows} == {2}, "the others are due in an hour again"
    await first.received(11, timeout_s=2 * HOUR_MS / 1_000)
    assert [row[1] for row in first.rows[5:]] == list(range(4, 10))
    await asyncio.sleep(HOUR_MS / 1_000)
    assert second.positions == {(2, entry) for entry in range(5)}
    assert await first.acknowledge(first.rows) == 0
    assert await second.acknowledge(second.rows) == 0
    assert two.topic("t").core.indexes.present_rows == 0


@pytest.mark.parametrize("at", [JOURNAL, "/topics/"], ids=["log", "manifest"])
async def test_a_subscription_whose_creation_ends_with_a_crash_is_there_with_all_it_is_kept_from_or_is_not_there(
    machines: EngineFixture, at: str
) -> None:
    one = await machines.served_by("one")
    await delivered_while_the_clock_was_ahead(one)
    held = one.pause("put_if_absent", at)
    _ = create(one, "second")
    await held.reached()
    one.kill()
    two = await machines.served_by("one")
    assert [each.subscription for each in (await stats(two)).subscriptions] == ["first"]
    # Here the rows were not passed: a later subscription of the same number is owed them, now and after a crash.
    await create(two, "another")
    two.kill()
    three = await machines.served_by("one")
    another = await three.receiver("t", "another")
    await another.received(10, timeout_s=2 * HOUR_MS / 1_000)


async def test_a_subscription_whose_creation_is_repeated_is_kept_from_the_same_rows(machines: EngineFixture) -> None:
    """The first caller leaves before what it is kept from is durable."""
    one = await machines.served_by("one")
    await delivered_while_the_clock_was_ahead(one)
    held = one.pause("put_if_absent", JOURNAL)
    creating = one.call(one.engine.requests.create_subscription("t", "second"))
    await held.reached()
    creating.cancel()
    again = one.call(one.engine.requests.create_subscription("t", "second"))
    await asyncio.sleep(1)
    assert not again.done()
    held.release()
    assert not (await again).created
    one.kill()
    two = await machines.served_by("one")
    second = await two.receiver("t", "second")
    await asyncio.sleep(2 * HOUR_MS / 1_000)
    assert second.rows == []


async def test_a_stored_subscription_that_was_created_by_a_clock_that_was_ahead_is_served(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was written once: adds are raised to its time, for every subscription."""
    one = await machines.served_by("one")
    await delivered_while_the_clock_was_ahead(one)
    far_ms = one.now_ms() + HOUR_MS
    monkeypatch.setattr(TopicState, "since_for_new_subscription", lambda self, now_ms: far_ms)
    assert (await create(one, "second")).since_ms == far_ms
    monkeypatch.undo()
    one.kill()
    two = await machines.served_by("one")
    assert (await create(two, "third")).since_ms == two.now_ms()
    first, second = await two.receiver("t", "first"), await two.receiver("t", "second")
    third = await two.receiver("t", "third")
    outcome = await two.add("t", 2, [1], delay_ms=1_000)
    assert outcome.raised_deliver_at_ms.tolist() == [far_ms + 1]
    await second.received(1, timeout_s=2 * HOUR_MS / 1_000)
    await first.received(11)
    await third.received(11)
    await asyncio.sleep(HOUR_MS / 1_000)
    assert (len(first.rows), second.positions, len(third.rows)) == (11, {(2, 1)}, 11)


async def test_slewing_is_no_step(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    for _ in range(30):
        one.step_clock(80)
        await asyncio.sleep(1)
    for _ in range(30):
        one.step_clock(-80)
        await asyncio.sleep(1)
    assert (steps(one.metrics, "forward"), steps(one.metrics, "back")) == (0, 0)


# ---- suspended and resumed


@PLACES
async def test_what_came_due_while_the_machine_was_suspended_is_handed_out_at_once(
    machines: EngineFixture, settings: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    one = await machines.served_by("one", *settings)
    await pending_rows(one, settings, delay_ms=3_600_000)
    receiver = await one.receiver("t")
    with caplog.at_level(logging.WARNING):
        one.sleep_machine(3_610_000)
        started_s = machines.loop.time()
        await receiver.received(20)
    assert machines.loop.time() - started_s <= 1.5
    assert [row[1] for row in receiver.rows] == list(range(20))
    assert (steps(one.metrics, "forward"), steps(one.metrics, "back")) == (0, 0), "time passed, no clock was set"
    assert "suspended for 3610000.0 s" in caplog.text


async def test_a_lease_that_ran_out_while_the_machine_was_suspended_is_over(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one)
    await one.add("t", 1, range(5), delay_ms=0)
    assert len(entries_of(await get(one, lease_ms=600_000))) == 5
    one.sleep_machine(700)
    started_s = machines.loop.time()
    assert len(entries_of(await get(one, wait_ms=5_000))) == 5
    assert machines.loop.time() - started_s <= 1.5


async def test_after_a_long_suspend_nothing_is_handed_out_before_the_epoch_is_confirmed(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(5), delay_ms=3_600_000)
    receiver = await one.receiver("t")
    one.freeze()
    one.sleep_machine(3_700_000)
    await asyncio.sleep(5)
    assert receiver.rows == [], "the store does not answer: a successor may be serving"
    one.thaw()
    started_s = machines.loop.time()
    await receiver.received(5)
    assert machines.loop.time() - started_s <= 1.1


async def test_a_daemon_that_was_superseded_while_it_was_suspended_hands_out_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(5), delay_ms=100_000)
    receiver = await one.receiver("t")
    one.suspend()
    two = await machines.served_by("two")
    await asyncio.sleep(100)
    one.sleep_machine(100)
    one.resume()
    other = await two.receiver("t")
    await other.received(5)
    await asyncio.sleep(30)
    assert receiver.rows == []
    assert receiver.ended is not None


# ---- the store's clock


class Clocks:
    """The clocks of a machine and of a store, as a test sets them."""

    def __init__(self) -> None:
        self.wall_ms = 1_000_000
        self.elapsed = 50.0
        self.running = 20.0
        self.skew: float | None = None
        self.told: list[str] = []

    def now_ms(self) -> int:
        return self.wall_ms

    def elapsed_s(self) -> float:
        return self.elapsed

    def clock_skew_s(self) -> float | None:
        return self.skew

    def watch(self, metrics: Metrics) -> ClockWatch:
        return ClockWatch(
            self,
            self,
            metrics,
            running_s=lambda: self.running,
            changed=lambda: self.told.append("changed"),
            resumed=lambda: self.told.append("resumed"),
        )

    def pass_time(self, seconds: float, *, suspended_s: float = 0.0, step_ms: int = 0) -> None:
        self.wall_ms += round(1000 * (seconds + suspended_s)) + step_ms
        self.elapsed += seconds + suspended_s
        self.running += seconds


@pytest.mark.parametrize(
    ("suspended_s", "step_ms", "told"),
    [
        (0.0, 0, []),
        (0.0, 99, []),
        (0.0, -99, []),
        (0.0, 100, ["changed"]),
        (0.0, -100, ["changed"]),
        (0.4, 0, []),
        (0.5, 0, ["changed", "resumed"]),
        (3600.0, 0, ["changed", "resumed"]),
        (3600.0, -3_600_000, ["changed", "resumed"]),
    ],
)
def test_a_step_and_a_suspend_are_told_apart(suspended_s: float, step_ms: int, told: list[str]) -> None:
    clocks, metrics = Clocks(), Metrics()
    watch = clocks.watch(metrics)
    clocks.pass_time(1.0, suspended_s=suspended_s, step_ms=step_ms)
    watch.look()
    assert clocks.told == told
    assert steps(metrics, "forward") == (step_ms >= 100)
    assert steps(metrics, "back") == (step_ms <= -100)
    clocks.pass_time(60.0)
    watch.look()
    assert clocks.told == told, "it is told once, and a look that is late is none"


def test_a_thread_that_was_kept_waiting_between_two_clocks_saw_no_step() -> None:
    clocks, metrics = Clocks(), Metrics()
    watch = clocks.watch(metrics)
    clocks.pass_time(1.0)
    waited = iter([0.3])

    def elapsed_s() -> float:
        clocks.pass_time(next(waited, 0.0))
        return clocks.elapsed

    clocks.elapsed_s = elapsed_s  # type: ignore[method-assign]
    watch.look()
    assert clocks.told == []


def test_the_store_s_clock_is_shown_and_warned_about_once_it_is_a_second_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clocks, metrics = Clocks(), Metrics()
    watch = clocks.watch(metrics)

    def look(skew: float | None) -> str:
        caplog.clear()
        clocks.skew = skew
        watch.look()
        return caplog.text

    with caplog.at_level(logging.INFO):
        assert look(None) == ""
        assert look(0.9) == ""
        assert metrics.registry.get_sample_value("tarry_store_clock_skew_seconds") == 0.9
        assert "the store's clock is 1.1 s ahead of this machine's" in look(1.1)
        assert look(1.2) == ""
        assert "agrees" in look(-0.5)
        assert "3600.0 s behind" in look(-3600.0)
        assert metrics.registry.get_sample_value("tarry_store_clock_skew_seconds") == -3600.0
