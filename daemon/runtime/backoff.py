"""Retries requests to the store, with growing delays.

The composition root supplies sleep and jitter. Callers decide which requests may be repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from storage_backends import object_store
from storage_backends.object_store import StoreError

# Soon after a lost answer, and at a bearable rate during an outage (seconds)
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0

T = TypeVar("T")

# A monotonic clock that counts while the machine is suspended (seconds)
Clock = Callable[[], float]
# Draws a new number in [0, 1) at each call.
Jitter = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
BlockingSleep = Callable[[float], None]


class Waiting(Protocol):
    """The port that sleeps and draws jitter."""

    @property
    def sleep(self) -> Sleep: ...

    @property
    def jitter(self) -> Jitter: ...


class Run(Protocol):
    """The port that runs `work` in an executor, since storage is synchronous and the loop must not wait for it."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def until_answered(
    ask: Callable[[], Awaitable[T]],
    *,
    failed: Callable[[Exception], object],
    waiting: Waiting,
    again_after: tuple[type[Exception], ...] = (StoreError,),
) -> T:
    """Call `ask` until it raises none of `again_after`, with growing delays and without end; return its result.

    `failed` is called with each such error before the wait.
    """
    delays = delays_s(waiting.jitter)
    while True:
        delay_s = next(delays)
        try:
            return await ask()
        except again_after as error:
            failed(error)
        await waiting.sleep(delay_s)


def delays_s(jitter: Jitter) -> Iterator[float]:
    """Yield doubling delays for requests to the store, without end (seconds)."""
    return object_store.delays_s(jitter, first_s=FIRST_DELAY_S, last_s=LAST_DELAY_S)
