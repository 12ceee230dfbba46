"""Waiting for work that whoever does it may be told to give up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def unless_ended(work: Awaitable[T], ended: asyncio.Future[None], otherwise: Callable[[], Exception]) -> T:
    """The result of `work`; raises what `otherwise` makes when `ended` is done first. A thread that has begun ends by
    itself.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    raise otherwise()
