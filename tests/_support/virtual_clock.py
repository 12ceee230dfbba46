"""A monotonic clock that moves only when a test says so.

Owns: the time, and who sleeps until when.
Does not own: the wall clock of the core's tests; they pass times as arguments.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

# After a sleeper woke, what it set off gets this many turns of the loop before time goes on.
SETTLE_TURNS = 30


class VirtualClock:
    """`now`, `sleep` and `block` stand in for time.monotonic, asyncio.sleep and time.sleep.

    `now_s` is the time in seconds. A sleeper wakes when `advance` reaches its time; `block` advances by itself, as
    there is nobody else to do it.
    """

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self.slept_s: list[float] = []
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        waker = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._numbers), waker))
        await waker

    def block(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    async def advance(self, seconds: float) -> None:
        """Lets `seconds` pass; every sleeper wakes at its time, in order."""
        end_s = self.now_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            wake_s, _, waker = heapq.heappop(self._sleepers)
            if waker.done():
                continue
            self.now_s = max(self.now_s, wake_s)
            waker.set_result(None)
            await settle()
        self.now_s = end_s


async def settle() -> None:
    """Lets everything run that can run without time passing."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
