"""Waiting on an event loop until something is true.

Owns: who waits, and waking them. The counterpart of `threading.Condition` where nothing needs a lock.
Does not own: what is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """`notify` after every change that someone may wait for."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wakes who waits, to look again."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def wait_for(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Returns True as soon as the predicate holds, False when it still does not after `timeout_s`."""
        if predicate():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    changed = asyncio.get_running_loop().create_future()
                    self._waiting.append(changed)
                    await changed
        except TimeoutError:
            return bool(predicate())
        return True
