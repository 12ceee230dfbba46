"""What requests on hand-outs came to, as numbers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

from daemon.call_values import NackOutcome
from daemon.core.decisions.claims import Ignored
from tarry.results import Ignored as IgnoredPositions
from tarry.results import Nacked


class Counts(NamedTuple):
    """How many positions a negative acknowledgement ignored, and made dead letters."""

    ignored: int
    dead_lettered: int


async def ignored_by(request: Callable[..., Awaitable[Ignored]], *arguments: Any) -> int:
    """How many positions an acknowledgement, or an extension, ignored."""
    return len(await request(*arguments))


async def ended(request: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """When a request that has no outcome has been decided and answered."""
    await request(*arguments)


async def counts_of(request: Callable[..., Awaitable[NackOutcome]], *arguments: Any) -> Counts:
    outcome = await request(*arguments)
    return Counts(len(outcome.ignored), outcome.dead_lettered)


def nack_result(ignored: int, dead_lettered: int) -> Nacked:
    """What a client is told, without which and why: it equals an answer with these numbers."""
    nothing = np.empty(0, np.int64)
    return Nacked(IgnoredPositions(ignored, nothing, nothing, ignored), dead_lettered)
