"""Passes of the due loop: which tick they keep, how far it is stretched, and that no topic holds up another."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from daemon.runtime import due_loop as due_loop_module
from daemon.runtime import due_loop as tick_module
from daemon.runtime.due_loop import STEPS_MS, TURN_S, WINDOW_S, DueLoop, Pace, Tick
from tests.daemon.runtime.test_pace import WallClock, passes, run_for
from tests.planted import registry


class Trickle:
    """Has a row every so many ms and takes no time; notes when it is woken after it."""

    def __init__(self, every_ms: int, tick_ms: int | None = None) -> None:
        self.wake_at_ms: int | None = None
        self.tick_ms = tick_ms
        self.late_ms: list[int] = []
        self.next_ms = 0
        self._every_ms = every_ms

    def failed(self, error: Exception) -> None:
        raise error

    def wake(self, now_ms: int) -> int | None:
        if self.next_ms <= now_ms:
            self.late_ms.append(now_ms - self.next_ms)
        while self.next_ms <= now_ms:
            self.next_ms += self._every_ms
        return self.next_ms


class Load:
    """A loop's thread of which one can say how busy it is."""

    def __init__(self) -> None:
        self.part = 0.0
        self._loop = asyncio.get_running_loop()
        self._busy_s, self._until_s = 0.0, self._loop.time()

    def busy_s(self) -> float:
        now_s = self._loop.time()
        self._busy_s += self.part * (now_s - self._until_s)
        self._until_s = now_s
        return self._busy_s

    def becomes(self, part: float) -> None:
        self.busy_s()
        self.part = part


async def woken_for(seconds: float, load: Load, *sleepers: Trickle) -> None:
    """The loop wakes sleepers, with rows all the time, while it is as busy."""
    clock = WallClock()
    due_loop = DueLoop(clock, load.busy_s)
    for each in sleepers:
        each.next_ms = clock.now_ms() + 3
        due_loop.schedule(each, each.next_ms)
    await run_for(due_loop, seconds)


# ---- how long the tick is


async def test_at_rest_a_row_waits_five_ms_at_most() -> None:
    trickle = Trickle(7)
    await woken_for(3.0, Load(), trickle)
    assert max(trickle.late_ms) <= STEPS_MS[0] == 5


async def test_a_busy_loop_stretches_the_tick_to_fifteen_ms_and_shrinks_it_again() -> None:
    load, told_ms = Load(), list[int]()
    tick = Tick(load.busy_s, told_ms.append)

    async def look(seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            await asyncio.sleep(0.01)
            tick.woke(0)
            tick.look()

    # In between it stays as it is.
    for part, expected_ms in ((0.6, 5), (0.75, 10), (0.6, 10), (0.9, 15), (0.7, 15), (0.6, 10), (0.4, 5)):
        load.becomes(part)
        await look(10 * WINDOW_S)
        assert tick.ms == expected_ms
    assert told_ms == [5, 10, 15, 10, 5]


async def test_a_loop_that_is_behind_stretches_the_tick_to_fifty_ms_and_no_further() -> None:
    load = Load()
    tick = Tick(load.busy_s, lambda _: None)
    seen = []
    for part, late_ms in [(0.4, 60)] * 6 + [(0.1, 0)] * 6:
        load.becomes(part)
        await asyncio.sleep(WINDOW_S)
        tick.woke(late_ms)
        tick.look()
        seen.append(tick.ms)
    assert seen == [10, 15, 25, 50, 50, 50, 25, 15, 10, 5, 5, 5]


async def test_a_loop_that_others_make_late_keeps_its_tick() -> None:
    load = Load()
    tick = Tick(load.busy_s, lambda _: None)
    load.becomes(0.1)
    for _ in range(5):
        await asyncio.sleep(WINDOW_S)
        tick.woke(60)
        tick.look()
    assert tick.ms == STEPS_MS[0]


async def no_row_waits_longer_than_the_longest_tick() -> None:
    load, trickle = Load(), Trickle(7)
    load.becomes(1.0)
    await woken_for(3.0, load, trickle)
    assert 5 < max(trickle.late_ms) <= 50


async def a_tick_that_was_set_is_kept() -> None:
    load = Load()
    load.becomes(1.0)
    sleepers = [Trickle(7, tick_ms=4), Trickle(7)]
    await woken_for(3.0, load, *sleepers)
    assert max(sleepers[0].late_ms) <= 4
    assert max(sleepers[1].late_ms) > 5


async def the_tick_shrinks_when_the_load_is_over() -> None:
    load, trickle = Load(), Trickle(7)
    load.becomes(1.0)
    clock = WallClock()
    due_loop = DueLoop(clock, load.busy_s)
    due_loop.schedule(trickle, clock.now_ms())
    running = asyncio.ensure_future(due_loop.run())
    await asyncio.sleep(3.0)
    load.becomes(0.0)
    await asyncio.sleep(3.0)
    trickle.late_ms.clear()
    await asyncio.sleep(1.0)
    running.cancel()
    assert max(trickle.late_ms) <= 5


# ---- a pass


class Failing(Trickle):
    """Cannot be woken."""

    def __init__(self) -> None:
        super().__init__(1)
        self.errors: list[Exception] = []

    def failed(self, error: Exception) -> None:
        self.errors.append(error)

    def wake(self, now_ms: int) -> int | None:
        raise RuntimeError("planted")


async def a_topic_that_fails_does_not_stop_the_pass() -> None:
    failing, others = Failing(), [Trickle(10) for _ in range(3)]
    await woken_for(0.5, Load(), others[0], failing, *others[1:])
    assert [str(error) for error in failing.errors] == ["planted"]
    assert all(len(each.late_ms) >= 45 for each in others)


class Slow(Trickle):
    """Takes as long as a turn may."""

    def wake(self, now_ms: int) -> int | None:
        passes(TURN_S)
        return super().wake(now_ms)


async def what_one_topic_has_is_sent_before_the_pass_is_over() -> None:
    order: list[str] = []

    class Sends(Slow):
        def wake(self, now_ms: int) -> int | None:
            order.append("passed")
            asyncio.get_running_loop().call_soon(order.append, "sent")
            super().wake(now_ms)
            return None

    await woken_for(0.5, Load(), *[Sends(1_000) for _ in range(10)])
    most = max(len(list(alike)) for what, alike in itertools.groupby(order) if what == "passed")
    assert order.count("passed") == 10
    # Nobody is kept until the others were passed.
    assert most <= 2


RULES = (
    no_row_waits_longer_than_the_longest_tick,
    a_tick_that_was_set_is_kept,
    the_tick_shrinks_when_the_load_is_over,
    a_topic_that_fails_does_not_stop_the_pass,
    what_one_topic_has_is_sent_before_the_pass_is_over,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
async def test_a_rule_of_passes_holds(rule: Callable[[], Awaitable[None]]) -> None:
    await rule()


# ---- planted bugs


def the_tick_is_stretched_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick_module, "STEPS_MS", (5, 10, 80, 160, 320))


def a_tick_that_was_set_is_stretched(patch: pytest.MonkeyPatch) -> None:
    def schedule(self: DueLoop, sleeper: due_loop_module.Sleeper, wake_at_ms: int | None) -> None:
        if wake_at_ms is not None:
            self._push(sleeper, -(-wake_at_ms // self._tick.ms) * self._tick.ms)

    patch.setattr(DueLoop, "schedule", schedule)


def the_tick_never_shrinks(patch: pytest.MonkeyPatch) -> None:
    next_step = Tick._next_step

    def not_less(self: Tick, *, busy: float, late_ms: float) -> int:
        return max(self._step, next_step(self, busy=busy, late_ms=late_ms))

    patch.setattr(Tick, "_next_step", not_less)


def a_topic_that_fails_ends_the_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(due_loop_module, "_woken", lambda sleeper, now_ms: sleeper.wake(now_ms))


def nobody_has_a_turn_within_a_pass(patch: pytest.MonkeyPatch) -> None:
    async def give_way(self: Pace) -> None:
        pass

    patch.setattr(Pace, "give_way", give_way)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], Awaitable[None]]] = {
    the_tick_is_stretched_without_end: no_row_waits_longer_than_the_longest_tick,
    a_tick_that_was_set_is_stretched: a_tick_that_was_set_is_kept,
    the_tick_never_shrinks: the_tick_shrinks_when_the_load_is_over,
    a_topic_that_fails_ends_the_pass: a_topic_that_fails_does_not_stop_the_pass,
    nobody_has_a_turn_within_a_pass: what_one_topic_has_is_sent_before_the_pass_is_over,
}
registry.register("passes", PLANTED)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
async def test_a_planted_bug_of_passes_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await PLANTED[plant]()
