"""The timer of the daemon: wakes each topic when its next row comes due or its next segment is to be loaded.

Owns: one heap of wake-up times, one task, and fairness: a topic passes a bounded number of rows, then the next has
its turn.
Does not own: what is due (`daemon.core.index`) and what a topic does when it wakes (`served_topic`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import weakref
from typing import Protocol

from daemon.surroundings.environment import Clock
from daemon.surroundings.pace import Pace

# The wall clock may step while the loop sleeps: it looks again at least this often; a tick is at most that.
SLEEP_MAX_MS = 500
# Sleepers are woken for so long before streams and requests have their turn.
TURN_S = 0.002
# Who is woken and has more to do goes on after so many times the time that it took.
MORE_AFTER = 2.0
# Stale entries that the heap may hold beside as many as there are sleepers.
HEAP_SLACK = 1_000


class Sleeper(Protocol):
    """Something to wake at a time."""

    # The time it is in the heap for; None when it is not.
    wake_at_ms: int | None

    @property
    def tick_ms(self) -> int:
        """The topic's wake-ups are batched by as much, only ever later."""
        ...

    def wake(self, now_ms: int) -> int | None:
        """Does a bounded amount of what is due; the time of the next wake-up, not after `now_ms` when more is due."""
        ...

    def failed(self, error: Exception) -> None:
        """The topic could not be woken: it is woken no more until it is scheduled again."""
        ...


class DueLoop:
    """Wakes sleepers, each at a multiple of its tick. `pace`: how much a sleeper does when it is woken."""

    def __init__(self, clock: Clock) -> None:
        self.pace = Pace()
        self._clock = clock
        # Who is no more is not kept until its time.
        self._heap: list[tuple[int, int, weakref.ref[Sleeper]]] = []
        self._numbers = itertools.count()
        self._heap_max = HEAP_SLACK
        self._sooner = asyncio.Event()
        self._sleeping_until_ms: int | None = None

    def schedule(self, sleeper: Sleeper, wake_at_ms: int | None) -> None:
        """Wakes the sleeper at that time, or at the time it is scheduled for if that is sooner."""
        if wake_at_ms is not None:
            self._push(sleeper, -(-wake_at_ms // sleeper.tick_ms) * sleeper.tick_ms)

    def look_again(self) -> None:
        """The clock has stepped, or the machine was suspended: what the loop sleeps for may be due. Who had given way
        waits for a time that may be far now: everybody looks at the clock.
        """
        now_ms = self._clock.now_ms()
        waiting = [sleeper for entry in self._heap if (sleeper := _sleeper_of(entry)) is not None]
        self._heap.clear()
        for sleeper in waiting:
            sleeper.wake_at_ms = None
            self._push(sleeper, now_ms)
        self._sooner.set()

    def _push(self, sleeper: Sleeper, wake_at_ms: int) -> None:
        if sleeper.wake_at_ms is not None and sleeper.wake_at_ms <= wake_at_ms:
            return
        sleeper.wake_at_ms = wake_at_ms
        if len(self._heap) > self._heap_max:
            self._drop_stale()
        heapq.heappush(self._heap, (wake_at_ms, next(self._numbers), weakref.ref(sleeper)))
        if self._sleeping_until_ms is None or wake_at_ms < self._sleeping_until_ms:
            self._sooner.set()

    def _drop_stale(self) -> None:
        """Entries of sleepers that were scheduled for a sooner time since would stay until they are due."""
        self._heap = [entry for entry in self._heap if _sleeper_of(entry) is not None]
        heapq.heapify(self._heap)
        self._heap_max = 2 * len(self._heap) + HEAP_SLACK

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
                else:
                    self.schedule(sleeper, again_ms)
                began_s = ended_s
                if ended_s - turn_began_s >= TURN_S:
                    await self.pace.give_way()
                    # The clock may have been set meanwhile.
                    now_ms = self._clock.now_ms()
                    began_s = turn_began_s = loop.time()
            await self._sleep()

    def _pop_due(self, now_ms: int) -> list[Sleeper]:
        due = []
        while self._heap and self._heap[0][0] <= now_ms:
            sleeper = _sleeper_of(heapq.heappop(self._heap))
            if sleeper is not None:
                sleeper.wake_at_ms = None
                due.append(sleeper)
        return due

    async def _sleep(self) -> None:
        now_ms = self._clock.now_ms()
        until_ms = now_ms + SLEEP_MAX_MS
        if self._heap:
            until_ms = min(until_ms, max(now_ms + 1, self._heap[0][0]))
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


def _sleeper_of(entry: tuple[int, int, weakref.ref[Sleeper]]) -> Sleeper | None:
    """Whom the entry wakes; None when it is scheduled for another time, or is no more."""
    wake_at_ms, _, reference = entry
    sleeper = reference()
    return sleeper if sleeper is not None and sleeper.wake_at_ms == wake_at_ms else None
