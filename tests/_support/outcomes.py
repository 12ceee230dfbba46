"""What requests on hand-outs came to, as numbers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from daemon.call_values import Ignored, NackOutcome


class Counts(NamedTuple):
    """How many positions a negative acknowledgement ignored, and made dead letters."""

    ignored: int
    dead_lettered: int


async def ignored_by(request: Callable[..., Awaitable[Ignored]], *arguments: Any) -> int:
    """How many positions an acknowledgement, or an extension, ignored."""
    return len(await request(*arguments))


async def counts_of(request: Callable[..., Awaitable[NackOutcome]], *arguments: Any) -> Counts:
    outcome = await request(*arguments)
    return Counts(len(outcome.ignored), outcome.dead_lettered)
