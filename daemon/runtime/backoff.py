"""Asking the store again, later each time.

Owns: the delays, the loop, and the shape of what waits and draws, given by the composition root.
Does not own: what may be asked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from storage_backends import object_store
from storage_backends.object_store import StoreError

# The store is asked again soon after a lost answer, and at a bearable rate during an outage.
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0

T = TypeVar("T")

# Monotonic seconds; counts while the machine is suspended.
Clock = Callable[[], float]
# A number in [0, 1), drawn anew at each call.
Jitter = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
BlockingSleep = Callable[[float], None]


class Waiting(Protocol):
    """What waits, and what draws for how long."""

    @property
    def sleep(self) -> Sleep: ...

    @property
    def jitter(self) -> Jitter: ...


class Run(Protocol):
    """Runs `work` in an executor and gives its result: storage is synchronous, the loop must not wait for it."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def until_answered(
    ask: Callable[[], Awaitable[T]],
    *,
    failed: Callable[[Exception], object],
    waiting: Waiting,
    again_after: tuple[type[Exception], ...] = (StoreError,),
) -> T:
    """What `ask` gives, which is asked again, later each time, as long as it raises one of `again_after`; without end.

    `failed`: told of each such error, before the wait.
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
    """Doubling delays in seconds, for asking the store; without end."""
    return object_store.delays_s(jitter, first_s=FIRST_DELAY_S, last_s=LAST_DELAY_S)
