"""The tick of topics for which nobody set one: short at rest, longer while the event loop is busy.

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

The second line begins at 70 % of a busy loop. From 30 % on it saved little: 1,000 rows/s took 57 to 60 % of a core
instead of 63 to 66 %, with a p50 of 10 to 12 ms instead of 5 (two cores, 20 topics).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
