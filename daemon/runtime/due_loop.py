"""The timer of the daemon: wakes each topic when its next row comes due or its next segment is to be loaded.

Owns: one heap of the times of passes, one task, and fairness: a topic passes a bounded number of rows, then the next
has its turn.
Does not own: what is due (`daemon.core.index.index`), what a topic does when it wakes (`served_topic`), and how long a
tick is (`tick`, `topic_settings`).

A pass wakes everybody whose time has come. After each 2 ms of it streams and requests have their turn, so what one
topic has is on its way before the pass is over. What one topic cannot do is its own failure, and the pass goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from daemon.runtime.environment import Clock
from daemon.runtime.pace import Pace
from daemon.runtime.tick import Tick

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
                else:
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
