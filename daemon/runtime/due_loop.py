"""The timer of the daemon: wakes each topic when its next row comes due or its next segment is to be loaded.

Owns: one heap of the times of passes, one task, and fairness: a topic passes a bounded number of rows, then the next
has its turn.
Does not own: what is due (`daemon.core.index.index`), what a topic does when it wakes (`served_topic`), and how long a
tick is (`tick`, `topic_settings`).

A pass wakes everybody whose time has come. After each 2 ms of it streams and requests have their turn, so what one
topic has is on its way before the pass is over. What one topic cannot do is its own failure, and the pass goes on.

The tick of topics for which nobody set one: short at rest, longer while the event loop is busy.

Owns: when the tick is stretched, how far, and when it shrinks again.
Does not own: wake-ups (`due_loop`), and ticks that somebody set, which never change (`topic_settings`).

What comes due within a tick is passed, sent and acknowledged together. A loop that has too much to do has less with a
longer tick, at the price of a lateness that is stated:

| the loop | the tick, ms |
|---|---|
| has little to do | 5 |
| has work for most of the time | 10 |
| hardly rests | 15 |
| is behind: it has much to do, and comes to wake-ups later, on average, than the tick is long | 10 to 50, never more |

How much of one topic is done at a time, so that what the others want to have done does not wait.

Owns: the number of rows that are passed, read or handed out before everybody else has a turn of the event loop.
Does not own: what is done (`served_topic`, `open_stream`), and whose turn it is among the sleepers (`due_loop`).

Nothing can be done about a loop that has too much to do, but who has much to do is asked to do it in smaller portions
the longer the others' turn takes: they are late by as much. A loop with nothing else to do comes round at once, and the
portions grow.

Work that takes long in small steps, beside everything else that the event loop has to do.

Owns: how long others have their turn between two steps.
Does not own: the steps, and the size of portions that a topic passes and hands out (`pace`).

What others do takes many rounds of the loop: a request is read, staged, written, applied and answered. If each round
had a step in it, all of them would be slow together. So others have as much time as the step took.
"""

from __future__ import annotations

import asyncio
import heapq
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from daemon.runtime.environment import Clock

STEPS_MS = (5, 10, 15, 25, 50)
# Beyond this step the tick is stretched for a loop that is behind, and for no other.
BUSY_STEP = STEPS_MS.index(15)
# What is looked at before a step is made, the least.
WINDOW_S = 0.25
# The part of that time that the loop's thread runs, by step: from it on the tick is longer, ...
LONGER_FROM = (0.7, 0.85)
# ... and up to it the tick is shorter. A longer tick leaves less to do.
SHORTER_UP_TO = (0.0, 0.5, 0.65)
# A loop that runs for less is late because of others: a longer tick would not help it.
LATE_BY_ITSELF = 0.3
# One wake-up counts for no more: the machine may have been suspended.
LATE_MAX_MS = 200


class Tick:
    """`ms`: the tick now. `busy_s`: seconds for which the thread of the loop has run so far; 0.0 always: none is busy.
    `changed` hears of each new tick.
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
        """The tick in seconds where it is longer than at rest; else 0.0."""
        return STEPS_MS[self._step] / 1000 if self._step else 0.0

    def _begin(self) -> None:
        self._began_s, self._busy_before_s = self._loop.time(), self._busy_s()
        self._wakes = self._late_ms = 0

    def woke(self, late_ms: int) -> None:
        """The loop has come to a wake-up so much after its time."""
        self._wakes += 1
        self._late_ms += min(late_ms, LATE_MAX_MS)

    def look(self) -> None:
        """To be called often. Changes the tick by one step, when it is time to."""
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
# To look into a source of rows costs as much as to take so many rows from it.
ROWS_A_SOURCE = 200
# How long the others' turn should take at most.
PACE_TURN_S = 0.004
# A turn that takes longer makes portions so much smaller, and another one larger.
SHRINK = 0.5
GROW = 1.3
# What was found out is forgotten after this time: whoever begins then begins with little.
FORGET_S = 1.0


class Pace:
    """One for each event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rows = ROWS_LEAST
        self._noted_s = self._loop.time()

    @property
    def rows(self) -> int:
        """How many to do at once; then `give_way`."""
        if self._loop.time() - self._noted_s > FORGET_S:
            self._rows = ROWS_LEAST
        return self._rows

    def rows_of(self, sources: int) -> int:
        """How many rows to take at once from so many sources that are merged, then `give_way`: `rows`, but of many
        sources enough rows that taking them costs no less than looking into the sources. Smaller portions would make
        the turn no shorter, and it would never come to larger ones again.
        """
        return max(self.rows, min(ROWS_A_SOURCE * sources, ROWS_MOST))

    async def give_way(self) -> None:
        """The others have their turn. Call after a portion that was used up."""
        began_s = self._loop.time()
        await asyncio.sleep(0)
        self.noted(self._loop.time() - began_s)

    def noted(self, turn_s: float) -> None:
        """The others' turn took so long."""
        factor = GROW if turn_s <= PACE_TURN_S else SHRINK
        self._rows = max(ROWS_LEAST, min(ROWS_MOST, int(self.rows * factor)))
        self._noted_s = self._loop.time()


# The wall clock may step while the loop sleeps: it looks again at least this often; a tick is at most that.
SLEEP_MAX_MS = 500
# Sleepers are woken for so long before streams and requests have their turn.
TURN_S = 0.002
# Who is woken and has more to do goes on after so many times the time that it took.
MORE_AFTER = 2.0
# Stale entries that there may be beside as many as there are sleepers.
STALE_SLACK = 1_000


class Sleeper(Protocol):
    """Something to wake at a time."""

    # The time it is in the heap for; None when it is not.
    wake_at_ms: int | None

    @property
    def tick_ms(self) -> int | None:
        """The sleeper's wake-ups are batched by as much, only ever later; None: by as much as is good for the daemon
        now.
        """
        ...

    def wake(self, now_ms: int) -> int | None:
        """Does a bounded amount of what is due; the time of the next wake-up, not after `now_ms` when more is due."""
        ...

    def failed(self, error: Exception) -> None:
        """The topic could not be woken: it is woken no more until it is scheduled again."""
        ...


class DueLoop:
    """Wakes sleepers, each at a multiple of its tick. `pace`: how much a sleeper does when it is woken. `busy_s`,
    `tick_changed`: see `Tick`.
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
        # The times of passes, and whom each wakes. Who is no more is not kept until its time.
        self._times: list[int] = []
        self._passes: dict[int, list[weakref.ref[Sleeper]]] = {}
        self._entries = 0
        self._entries_max = STALE_SLACK
        self._sooner = asyncio.Event()
        self._sleeping_until_ms: int | None = None

    def stretched_s(self) -> float:
        """How long company is waited for while there is much to do; see `Tick`."""
        return self._tick.stretched_s

    def schedule(self, sleeper: Sleeper, wake_at_ms: int | None) -> None:
        """Wakes the sleeper at that time, or at the time it is scheduled for if that is sooner."""
        if wake_at_ms is not None:
            tick_ms = sleeper.tick_ms or self._tick.ms
            # What is due already waits for nothing, and is late from now on.
            self._push(sleeper, max(-(-wake_at_ms // tick_ms) * tick_ms, self._clock.now_ms()))

    def look_again(self) -> None:
        """The clock has stepped, or the machine was suspended: what the loop sleeps for may be due. Who had given way
        waits for a time that may be far now: everybody looks at the clock.
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
        """Entries of sleepers that were scheduled for a sooner time since would stay until they are due."""
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
        """Whom a pass wakes: not who was scheduled for another time since, or is no more."""
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
    """What is wrong with one of them is nobody else's loss."""
    try:
        return sleeper.wake(now_ms)
    except Exception as error:  # noqa: BLE001 - the sleeper's scope tells it
        sleeper.failed(error)
        return None


class FairShare:
    """The turns of one piece of work, which begins now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.elapsed_s()

    async def give_way(self) -> None:
        """The others have their turn. Call after each step."""
        await asyncio.sleep(self._clock.elapsed_s() - self._began_s)
        self._began_s = self._clock.elapsed_s()
