"""Work that takes long in small steps, beside everything else that the event loop has to do.

Owns: how long others have their turn between two steps.
Does not own: the steps, and the size of portions that a topic passes and hands out (`pace`).

What others do takes many rounds of the loop: a request is read, staged, written, applied and answered. If each round
had a step in it, all of them would be slow together. So others have as much time as the step took.
"""

from __future__ import annotations

import asyncio

from daemon.runtime.environment import Clock


class TakingTurns:
    """The turns of one piece of work, which begins now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.elapsed_s()

    async def give_way(self) -> None:
        """The others have their turn. Call after each step."""
        await asyncio.sleep(self._clock.elapsed_s() - self._began_s)
        self._began_s = self._clock.elapsed_s()
