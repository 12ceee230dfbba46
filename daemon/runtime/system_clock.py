"""The machine's clocks."""

from __future__ import annotations

import time


class SystemClock:
    """Time, as the machine tells it."""

    def now_ms(self) -> int:
        """The wall clock, Unix time in ms; it may step."""
        return time.time_ns() // 1_000_000

    def elapsed_s(self) -> float:
        """Seconds of a clock that never steps and counts while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
