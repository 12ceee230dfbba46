"""Tasks that wait in the client of a broker, and their end.

Owns: that a task which is cancelled ends. Does not own: which tasks there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

_AGAIN_S = 1.0


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancels until all have ended: in Python 3.11 a cancellation may be lost by what waits in the client of a broker,
    when the answer is there at the same moment.
    """
    while left := [each for each in tasks if not each.done()]:
        for each in left:
            each.cancel()
        await asyncio.wait(left, timeout=_AGAIN_S)
