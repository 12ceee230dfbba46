"""How much of one topic is done at a time, so that what the others want to have done does not wait.

Owns: the number of rows that are passed, read or handed out before everybody else has a turn of the event loop.
Does not own: what is done (`served_topic`, `dispatch`), and whose turn it is among the sleepers (`due_loop`).

Nothing can be done about a loop that has too much to do, but who has much to do is asked to do it in smaller portions
the longer the others' turn takes: they are late by as much. A loop with nothing else to do comes round at once, and the
portions are large again.
"""

from __future__ import annotations

import asyncio

ROWS_LEAST = 500
ROWS_MOST = 10_000
# How long the others' turn should take at most.
TURN_S = 0.004
# A turn that takes longer makes portions so much smaller, and another one larger.
SHRINK = 0.5
GROW = 1.3


class Pace:
    """One for each event loop. `rows`: how many to do at once, and to let the others have their turn after."""

    def __init__(self) -> None:
        self.rows = ROWS_MOST

    async def give_way(self) -> None:
        """The others have their turn. Call after a portion that was used up."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.sleep(0)
        self.noted(loop.time() - began_s)

    def noted(self, turn_s: float) -> None:
        """The others' turn took so long."""
        factor = GROW if turn_s <= TURN_S else SHRINK
        self.rows = max(ROWS_LEAST, min(ROWS_MOST, int(self.rows * factor)))
