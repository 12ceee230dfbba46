"""How long the event loop does not come round: whatever runs on it, and whatever else holds the interpreter.

Owns: a heartbeat on the loop that tells how much later it beats than it should.
Does not own: what is done with the figure (`daemon.metrics`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A pause that begins between two beats is seen from the next beat on: shorter by as much at most.
INTERVAL_S = 0.01


async def watch(paused: Callable[[float], None]) -> None:
    """Runs until it is cancelled. `paused` hears of each beat, in seconds behind its time; 1 ms is the timer's own."""
    loop = asyncio.get_running_loop()
    while True:
        beat_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        paused(max(0.0, loop.time() - beat_s))
