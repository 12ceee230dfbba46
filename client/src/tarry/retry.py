"""How long to wait before a request is sent again.

Owns: the delay, from the kind of the failure and the number of attempts; the time by which the caller wants an answer.
Does not own: which failures are worth it (`tarry.errors`) and the waiting itself.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

from tarry import errors


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter: the n-th is uniform from 0 to `initial_s * 2^(n-1)`, at most `max_s`.

    A daemon that says when to come back (`retry-after-ms`) is obeyed, and the owner it names is asked at once.
    """

    initial_s: float = 0.05
    max_s: float = 1.0
    uniform: Callable[[float, float], float] = random.uniform

    def delay_s(self, error: errors.TarryError, attempt: int) -> float:
        """Seconds to wait after the `attempt`-th failure in a row (1 = the first)."""
        if isinstance(error, (errors.ResourceExhausted, errors.Unavailable)) and error.retry_after_ms is not None:
            return error.retry_after_ms / 1000
        if isinstance(error, errors.NotOwner) and error.owner_address and attempt == 1:
            return 0.0
        ceiling_s = min(self.max_s, self.initial_s * 2.0 ** min(attempt - 1, 30))
        return self.uniform(0.0, ceiling_s)


@dataclasses.dataclass
class Deadline:
    """The time by which the caller wants an answer, on the monotonic clock. Requests may share one."""

    timeout_s: float
    at_s: float

    @staticmethod
    def after(timeout_s: float) -> Deadline:
        return Deadline(timeout_s, time.monotonic() + timeout_s)

    def extend(self, seconds: float) -> None:
        """The caller waits for so long for something that is not counted."""
        self.at_s += seconds

    def remaining_s(self) -> float:
        """Not below 0."""
        return max(0.0, self.at_s - time.monotonic())

    def exceeded(self, last: errors.TarryError | None, *, attempts: int) -> errors.DeadlineExceeded:
        """The failure to raise when the time is over, after `last`."""
        error = errors.DeadlineExceeded(f"no answer within {self.timeout_s:g} s", last=last)
        error.attempts = attempts
        return error
