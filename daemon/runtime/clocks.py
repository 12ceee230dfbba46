"""Watching the clocks: a wall clock that is set, a machine that was suspended, a store whose clock differs.

Owns: telling a step from time that passes, and from a suspend, and saying so (log, metrics).
Does not own: the clocks (`environment`), the store's reading (`storage_backends.s3`) and what is done about a
change (`changed`, `resumed`, given by the engine).

What is due follows from the wall clock as it is. Between two looks it should go on as far as the clock that never
steps; a difference beyond what slewing makes is a step. Time that the loop's own clock has not counted was a suspend:
it has passed like any other, but every timer of the loop is late by it.

The machine's clocks.

How long the event loop does not come round: whatever runs on it, and whatever else holds the interpreter.

Owns: a heartbeat on the loop that tells how much later it beats than it should.
Does not own: what is done with the figure (`daemon.metrics`).
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
# Clocks that are read this close after each other were read at one time; this often it is tried.
READ_TOGETHER_S = 0.01
READS_MAX = 5
# Further from the store's clock than this is worth a warning.
SKEW_MAX_S = 1.0


class Skewed(Protocol):
    """Something that knows how far its clock is from ours."""

    def clock_skew_s(self) -> float | None: ...


class ClockWatch:
    """`running_s`: seconds that this machine was not suspended, as the loop's timers count them. `changed` is called
    when timers may be wrong; `resumed` then, too, when it is by a suspend.
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
        """Compares the clocks with what they were at the last look."""
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
        """The clocks at one time, as far as the machine lets them be read together."""
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
    """Time, as the machine tells it."""

    def now_ms(self) -> int:
        """The wall clock, Unix time in ms; it may step."""
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        """Seconds of a clock that never steps and counts while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


# A pause that begins between two beats is seen from the next beat on: shorter by as much at most.
BEAT_INTERVAL_S = 0.01


async def watch_pauses(paused: Callable[[float], None]) -> None:
    """Runs until it is cancelled. `paused` hears of each beat, in seconds behind its time; 1 ms is the timer's own."""
    loop = asyncio.get_running_loop()
    while True:
        beat_s = loop.time() + BEAT_INTERVAL_S
        await asyncio.sleep(BEAT_INTERVAL_S)
        paused(max(0.0, loop.time() - beat_s))
