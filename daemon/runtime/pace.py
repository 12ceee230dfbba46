"""How much of one topic is done at a time, so that what the others want to have done does not wait.

Owns: the number of rows that are passed, read or handed out before everybody else has a turn of the event loop.
Does not own: what is done (`served_topic`, `open_stream`), and whose turn it is among the sleepers (`due_loop`).

Nothing can be done about a loop that has too much to do, but who has much to do is asked to do it in smaller portions
the longer the others' turn takes: they are late by as much. A loop with nothing else to do comes round at once, and the
portions grow.
"""

from __future__ import annotations

import asyncio

ROWS_LEAST = 500
ROWS_MOST = 10_000
# To look into a source of rows costs as much as to take so many rows from it.
ROWS_A_SOURCE = 200
# How long the others' turn should take at most.
TURN_S = 0.004
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
        factor = GROW if turn_s <= TURN_S else SHRINK
        self._rows = max(ROWS_LEAST, min(ROWS_MOST, int(self.rows * factor)))
        self._noted_s = self._loop.time()
