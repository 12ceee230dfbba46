"""Wakes each topic when its next row comes due or its next segment is to be loaded.

All topics share one heap of times and one task. A pass wakes all topics that are due. After each 2 ms of it streams and
requests have their turn, so the rows of one topic are sent before the pass is over. A failure of one topic is its own,
and the pass goes on.

What comes due within a tick is passed, sent and acknowledged together. The tick of topics that do not set one is short
at rest. A busy loop has less to do with a longer tick, at the price of a stated lateness:

| the loop | the tick, ms |
|---|---|
| has little to do | 5 |
| has work for most of the time | 10 |
| hardly rests | 15 |
| is behind: it has much to do, and comes to wake-ups later, on average, than the tick is long | 10 to 50, never more |

The second line begins at 70 % of a busy loop. From 30 % on it saved little: 1,000 rows/s took 57 to 60 % of a core
instead of 63 to 66 %, with a p50 of 10 to 12 ms instead of 5 (two cores, 20 topics).

The pace limits how many rows of a topic are passed, read or delivered before others have a turn. A loop with too much
to do cannot be helped. But the longer the turn of the others takes, the smaller the portions become, since the others
are late by as much. With nothing else to do the loop comes round at once, and the portions grow.

`FairShare` is for long work in small steps. The work of others takes many rounds of the loop: a request is read,
staged, written, applied and answered. A step in each round would slow all of them down, so others have as much time as
the step took.
"""

from __future__ import annotations

import asyncio
import heapq
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from daemon.runtime.environment import Clock

STEPS_MS = (5, 10, 15, 25, 50)
# Beyond this step the tick is stretched only for a loop that is behind.
BUSY_STEP = STEPS_MS.index(15)
# The least time that is measured before a change of step (seconds)
WINDOW_S = 0.25
# The fraction of that time for which the loop's thread runs, by step: from here on the tick gets longer, ...
LONGER_FROM = (0.7, 0.85)
# ... and up to here it gets shorter. A longer tick leaves less to do.
SHORTER_UP_TO = (0.0, 0.5, 0.65)
# A loop that runs for a smaller fraction is late because of others: a longer tick would not help it.
LATE_BY_ITSELF = 0.3
# A wake-up counts with at most this lateness (ms), since the machine may have been suspended.
LATE_MAX_MS = 200


class Tick:
    """The delivery tick, which grows under load. Calls `changed` with each new value (ms).

    `busy_s` returns how long the thread of the loop has run so far (seconds); a constant 0.0 means that it is never
    busy.
    """

    def __init__(self, busy_s: Callable[[], float], changed: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._busy_s = busy_s
        self._changed = changed
        self._step = 0
        changed(self.ms)
        self._begin()

    @property
    def ms(self) -> int:
        return STEPS_MS[self._step]

    @property
    def stretched_s(self) -> float:
        """The tick if it is longer than at rest, else 0.0 (seconds)."""
        return STEPS_MS[self._step] / 1000 if self._step else 0.0

    def _begin(self) -> None:
        self._began_s, self._busy_before_s = self._loop.time(), self._busy_s()
        self._wakes = self._late_ms = 0

    def woke(self, late_ms: int) -> None:
        """Record how late the loop came to a wake-up (ms)."""
        self._wakes += 1
        self._late_ms += min(late_ms, LATE_MAX_MS)

    def look(self) -> None:
        """Change the tick by one step when it is time. Call this often."""
        passed_s = self._loop.time() - self._began_s
        if passed_s < WINDOW_S:
            return
        step = self._next_step(
            busy=(self._busy_s() - self._busy_before_s) / passed_s, late_ms=self._late_ms / max(1, self._wakes)
        )
        if step != self._step:
            self._step = step
            self._changed(self.ms)
        self._begin()

    def _next_step(self, *, busy: float, late_ms: float) -> int:
        if late_ms > self.ms and busy > LATE_BY_ITSELF:
            return min(self._step + 1, len(STEPS_MS) - 1)
        if self._step > BUSY_STEP or (self._step and busy <= SHORTER_UP_TO[self._step]):
            return self._step - 1
        return self._step + 1 if self._step < BUSY_STEP and busy >= LONGER_FROM[self._step] else self._step


ROWS_LEAST = 500
ROWS_MOST = 10_000
# Inspecting a source of rows costs as much as taking this many rows from it.
ROWS_A_SOURCE = 200
# The longest time that the turn of the others should take (seconds)
PACE_TURN_S = 0.004
# Factors of the portion after a turn that takes longer, and after another one
SHRINK = 0.5
GROW = 1.3
# Measurements are forgotten after this time (seconds): work that begins then begins with small portions.
FORGET_S = 1.0


class Pace:
    """The size of portions, one for each event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rows = ROWS_LEAST
        self._noted_s = self._loop.time()

    @property
    def rows(self) -> int:
        """The number of rows to process at once; call `give_way` afterwards."""
        if self._loop.time() - self._noted_s > FORGET_S:
            self._rows = ROWS_LEAST
        return self._rows

    def rows_of(self, sources: int) -> int:
        """Return how many rows to take at once from this many merged sources; call `give_way` afterwards.

        This is `rows`, but at least as many as make taking them cost as much as inspecting the sources. Smaller
        portions would not shorten the turn, and the portions would never grow again.
        """
        return max(self.rows, min(ROWS_A_SOURCE * sources, ROWS_MOST))

    async def give_way(self) -> None:
        """Let the others have their turn. Call this after a portion that was used up."""
        began_s = self._loop.time()
        await asyncio.sleep(0)
        self.noted(self._loop.time() - began_s)

    def noted(self, turn_s: float) -> None:
        """Record how long the turn of the others took (seconds)."""
        factor = GROW if turn_s <= PACE_TURN_S else SHRINK
        self._rows = max(ROWS_LEAST, min(ROWS_MOST, int(self.rows * factor)))
        self._noted_s = self._loop.time()


# The wall clock may step while the loop sleeps: it checks again at least this often (ms). A tick is at most this long.
SLEEP_MAX_MS = 500
# Sleepers are woken for this long before streams and requests have a turn (seconds).
TURN_S = 0.002
# A woken sleeper that has more to do goes on after this many times the time that it took.
MORE_AFTER = 2.0
# Stale entries allowed beyond the number of sleepers
STALE_SLACK = 1_000


class Sleeper(Protocol):
    """The port of something to wake at a time."""

    # The time that it is in the heap for (Unix ms), or None
    wake_at_ms: int | None

    @property
    def tick_ms(self) -> int | None:
        """The tick by which wake-ups are batched, only ever later (ms); None means the daemon's current one."""
        ...

    def wake(self, now_ms: int) -> int | None:
        """Process a bounded part of what is due; return the next wake-up, at most `now_ms` if more is due (Unix ms)."""
        ...

    def failed(self, error: Exception) -> None:
        """Note that waking failed: the topic is not woken until it is scheduled again."""
        ...


class DueLoop:
    """The loop that wakes sleepers, each at a multiple of its tick.

    `pace` limits the work of a wake-up. For `busy_s` and `tick_changed` see `Tick`.
    """

    def __init__(
        self,
        clock: Clock,
        busy_s: Callable[[], float] = lambda: 0.0,
        tick_changed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.pace = Pace()
        self._tick = Tick(busy_s, tick_changed)
        self._clock = clock
        # Times of passes, and the sleepers that each wakes. Deleted sleepers are not kept until their time.
        self._times: list[int] = []
        self._passes: dict[int, list[weakref.ref[Sleeper]]] = {}
        self._entries = 0
        self._entries_max = STALE_SLACK
        self._sooner = asyncio.Event()
        self._sleeping_until_ms: int | None = None

    def stretched_s(self) -> float:
        """Return how long to wait for more work while there is much to do (seconds); see `Tick`."""
        return self._tick.stretched_s

    def schedule(self, sleeper: Sleeper, wake_at_ms: int | None) -> None:
        """Wake the sleeper at that time, or when it is already scheduled if that is sooner."""
        if wake_at_ms is not None:
            tick_ms = sleeper.tick_ms or self._tick.ms
            # Rows that are due already wait for nothing, and are late from now on.
            self._push(sleeper, max(-(-wake_at_ms // tick_ms) * tick_ms, self._clock.now_ms()))

    def look_again(self) -> None:
        """Wake all sleepers, since the clock has stepped or the machine was suspended.

        Rows may be due before the loop wakes, and a sleeper that gave way may wait for a time that is now far away.
        """
        now_ms = self._clock.now_ms()
        waiting = [sleeper for at_ms in sorted(self._times) for sleeper in self._woken_at(at_ms)]
        self._times, self._passes, self._entries = [], {}, 0
        for sleeper in waiting:
            sleeper.wake_at_ms = None
            self._push(sleeper, now_ms)
        self._sooner.set()

    def _push(self, sleeper: Sleeper, wake_at_ms: int) -> None:
        if sleeper.wake_at_ms is not None and sleeper.wake_at_ms <= wake_at_ms:
            return
        sleeper.wake_at_ms = wake_at_ms
        if self._entries > self._entries_max:
            self._drop_stale()
        sleepers = self._passes.get(wake_at_ms)
        if sleepers is None:
            sleepers = self._passes[wake_at_ms] = []
            heapq.heappush(self._times, wake_at_ms)
        sleepers.append(weakref.ref(sleeper))
        self._entries += 1
        if self._sleeping_until_ms is None or wake_at_ms < self._sleeping_until_ms:
            self._sooner.set()

    def _drop_stale(self) -> None:
        """Drop entries of sleepers that were scheduled for a sooner time since; they would stay until they are due."""
        passes = {at_ms: [weakref.ref(each) for each in dict.fromkeys(self._woken_at(at_ms))] for at_ms in self._times}
        self._passes = {at_ms: sleepers for at_ms, sleepers in passes.items() if sleepers}
        self._times = list(self._passes)
        heapq.heapify(self._times)
        self._entries = sum(map(len, self._passes.values()))
        self._entries_max = 2 * self._entries + STALE_SLACK

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now_ms = self._clock.now_ms()
            due = self._pop_due(now_ms)
            began_s = turn_began_s = loop.time()
            for sleeper in due:
                again_ms = _woken(sleeper, now_ms)
                ended_s = loop.time()
                if again_ms is not None and again_ms <= now_ms:
                    # It has waited for its tick already.
                    wait_ms = max(1, round(MORE_AFTER * 1000 * (ended_s - began_s)))
                    self._push(sleeper, self._clock.now_ms() + wait_ms)
                elif again_ms is not None:
                    self.schedule(sleeper, again_ms)
                began_s = ended_s
                if ended_s - turn_began_s >= TURN_S:
                    await self.pace.give_way()
                    # The clock may have been set meanwhile.
                    now_ms = self._clock.now_ms()
                    began_s = turn_began_s = loop.time()
            self._tick.look()
            await self._sleep()

    def _pop_due(self, now_ms: int) -> list[Sleeper]:
        due: list[Sleeper] = []
        while self._times and self._times[0] <= now_ms:
            at_ms = heapq.heappop(self._times)
            self._tick.woke(now_ms - at_ms)
            for sleeper in self._woken_at(at_ms):
                sleeper.wake_at_ms = None
                due.append(sleeper)
            self._entries -= len(self._passes.pop(at_ms))
        return due

    def _woken_at(self, at_ms: int) -> Iterator[Sleeper]:
        """Yield the sleepers that a pass wakes, without those that were rescheduled or deleted."""
        for reference in self._passes[at_ms]:
            sleeper = reference()
            if sleeper is not None and sleeper.wake_at_ms == at_ms:
                yield sleeper

    async def _sleep(self) -> None:
        now_ms = self._clock.now_ms()
        until_ms = now_ms + SLEEP_MAX_MS
        if self._times:
            until_ms = min(until_ms, max(now_ms + 1, self._times[0]))
        self._sleeping_until_ms = until_ms
        self._sooner.clear()
        loop = asyncio.get_running_loop()
        timer = loop.call_later((until_ms - now_ms) / 1000, self._sooner.set)
        try:
            await self._sooner.wait()
        finally:
            timer.cancel()
            self._sleeping_until_ms = None


def _woken(sleeper: Sleeper, now_ms: int) -> int | None:
    """Wake a sleeper; its failure does not affect the others."""
    try:
        return sleeper.wake(now_ms)
    except Exception as error:  # noqa: BLE001 - the sleeper reports it
        sleeper.failed(error)
        return None


class FairShare:
    """The turns of one piece of work, which begins now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.elapsed_s()

    async def give_way(self) -> None:
        """Let the others have their turn. Call this after each step."""
        await asyncio.sleep(self._clock.elapsed_s() - self._began_s)
        self._began_s = self._clock.elapsed_s()
