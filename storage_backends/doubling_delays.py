"""How long to wait before something is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def delays_s(jitter: Callable[[], float], *, first_s: float, last_s: float) -> Iterator[float]:
    """Doubling delays in seconds, each drawn from the upper half of its step; without end. `jitter`: a number in
    [0, 1), drawn anew at each call.
    """
    step_s = first_s
    while True:
        yield step_s * (0.5 + jitter() / 2)
        step_s = min(2 * step_s, last_s)
