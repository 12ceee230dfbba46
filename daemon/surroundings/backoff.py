"""How long to wait before the store is asked again.

Owns: the delays and the shape of what waits and draws them, given by the composition root.
Does not own: the waiting, and what may be asked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

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


class Run(Protocol):
    """Runs `work` in an executor and gives its result: storage is synchronous, the loop must not wait for it."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


def delays_s(jitter: Jitter) -> Iterator[float]:
    """Doubling delays in seconds, each drawn from the upper half of its step; without end."""
    step_s = FIRST_DELAY_S
    while True:
        yield step_s * (0.5 + jitter() / 2)
        step_s = min(2 * step_s, LAST_DELAY_S)
