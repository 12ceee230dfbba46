"""More time for what ends when its time is over, where a machine is too busy to have come to it.

Owns: the times, trying them one after the other, and looking until something is true. Does not own: what is to be true.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

SECONDS = (0.2, 2.0, 20.0, 200.0)


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Looks again and again whether the condition holds. Raises TimeoutError with `what` was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.05)


def within_some_time(story: Callable[[float], None]) -> None:
    """`story` with some seconds, and with more while it raises AssertionError. Raises what it raises in the end."""
    for seconds in SECONDS:
        try:
            story(seconds)
        except AssertionError:
            if seconds == SECONDS[-1]:
                raise
        else:
            return


async def awaited_within_some_time(story: Callable[[float], Awaitable[None]]) -> None:
    """The same of a coroutine."""
    for seconds in SECONDS:
        try:
            await story(seconds)
        except AssertionError:
            if seconds == SECONDS[-1]:
                raise
        else:
            return
