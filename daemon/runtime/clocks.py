"""Reads and watches the clocks, and measures event-loop stalls.

It detects a wall clock that is set, a machine that was suspended, and a store whose clock differs, and reports them in
the log and metrics. The engine reacts (`changed`, `resumed`).

What is due follows from the wall clock as it is. Between two looks it should advance as far as the clock that never
steps; a difference beyond slewing is a step. Time that the loop's own clock has not counted was a suspend: it has
passed like any other, but every timer of the loop is late by it.

A heartbeat on the loop shows how long the loop, or another holder of the interpreter, kept others waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

from daemon.metrics import Metrics
from daemon.runtime.environment import Clock

log = logging.getLogger(__name__)

CLOCK_WATCH_INTERVAL_S = 1.0
# chrony slews by 83 ms a second at most.
STEP_LEAST_MS = 100
SUSPEND_LEAST_S = 0.5
# Clocks that are read within this time (seconds) count as read together; and the attempts at that
READ_TOGETHER_S = 0.01
READS_MAX = 5
# A larger difference from the store's clock causes a warning (seconds).
SKEW_MAX_S = 1.0


class Skewed(Protocol):
    """The port of a store that knows how far its clock is from ours."""

    def clock_skew_s(self) -> float | None: ...


class ClockWatch:
    """A watch over the clocks. `running_s` counts time without suspends, like the loop's timers (seconds).

    `changed` is called when timers may be wrong, and then `resumed`, too, after a suspend.
    """

    def __init__(
        self,
        clock: Clock,
        store: Skewed,
        metrics: Metrics,
        *,
        running_s: Callable[[], float],
        changed: Callable[[], None],
        resumed: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._store = store
        self._metrics = metrics
        self._running_s = running_s
        self._changed = changed
        self._resumed = resumed
        self._last_ms, self._last_elapsed_s, self._last_running_s = self._read()
        self._skewed = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_WATCH_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Compare the clocks with the last look."""
        now_ms, elapsed_s, running_s = self._read()
        passed_s = elapsed_s - self._last_elapsed_s
        step_ms = now_ms - self._last_ms - round(1000 * passed_s)
        suspended_s = passed_s - (running_s - self._last_running_s)
        self._last_ms, self._last_elapsed_s, self._last_running_s = now_ms, elapsed_s, running_s
        stepped, was_suspended = abs(step_ms) >= STEP_LEAST_MS, suspended_s >= SUSPEND_LEAST_S
        if stepped:
            direction: Literal["forward", "back"] = "forward" if step_ms > 0 else "back"
            log.warning("the wall clock was set %s by %d ms", direction, abs(step_ms))
            self._metrics.clock_stepped(direction)
        if was_suspended:
            log.warning("this machine was suspended for %.1f s", suspended_s)
        if stepped or was_suspended:
            self._changed()
        if was_suspended:
            self._resumed()
        self._look_at_store()

    def _read(self) -> tuple[int, float, float]:
        """Read the clocks together, as closely as the machine allows."""
        reads = 0
        while True:
            began_s = self._running_s()
            now_ms, elapsed_s, ended_s = self._clock.now_ms(), self._clock.elapsed_s(), self._running_s()
            reads += 1
            if ended_s - began_s < READ_TOGETHER_S or reads == READS_MAX:
                return now_ms, elapsed_s, ended_s

    def _look_at_store(self) -> None:
        skew_s = self._store.clock_skew_s()
        if skew_s is None:
            return
        self._metrics.set_store_clock_skew(skew_s)
        skewed = abs(skew_s) > SKEW_MAX_S
        if skewed and not self._skewed:
            log.warning(
                "the store's clock is %.1f s %s of this machine's: one of them is wrong, and daemons on other machines "
                "may hand out by another time",
                abs(skew_s),
                "ahead" if skew_s > 0 else "behind",
            )
        elif self._skewed and not skewed:
            log.info("the store's clock agrees with this machine's again")
        self._skewed = skewed


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Return the wall clock (Unix ms); it may step."""
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        """Return a clock that never steps and counts while the machine is suspended (seconds)."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


# A pause that begins between two beats is measured from the next beat on, so it seems shorter by at most this
# (seconds).
BEAT_INTERVAL_S = 0.01


async def watch_pauses(paused: Callable[[float], None]) -> None:
    """Call `paused` with the lateness of each beat (seconds) until cancelled; 1 ms is the timer's own."""
    loop = asyncio.get_running_loop()
    while True:
        beat_s = loop.time() + BEAT_INTERVAL_S
        await asyncio.sleep(BEAT_INTERVAL_S)
        paused(max(0.0, loop.time() - beat_s))
