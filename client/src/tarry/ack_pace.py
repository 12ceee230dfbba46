"""How long acknowledgements wait for others, by how many a client makes.

Owns: counting them over all subscriptions of the client, and the moments at which they leave together.
Does not own: what waits, and what is sent together (`tarry.receiving`).

What costs a daemon is each request, not each position. A subscription with few acknowledgements a second has nothing to
join within a few ms; a client with many such subscriptions sends as many requests as it acknowledges. So the time grows
with the acknowledgements of the client: 5 ms up to 100 a second, 50 ms from 1,000 on, unless the caller says otherwise.
It ends at the same moments for all subscriptions, so that those of one stream leave as one message.

Who waits for each answer before the next acknowledgement gains nothing by joining, and waits no longer than at rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tarry import columns

# So many acknowledgements a second make the time a second.
_PER_SECOND = 20_000
# Over how long they are counted, in seconds.
_COUNTED_S = 1.0
# After so many acknowledgements, each behind the answer to the one before, the caller is one that waits for each.
_ALONE_MAX = 8
# A longer time than this, in seconds, is somebody's choice, and is kept to the full.
_TOGETHER_MAX_S = 0.1


class AckPace:
    """Acknowledgements a second of all subscriptions of a client.

    Threads may share it: two that count at once may count one.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s`: a clock that never goes back, in seconds."""
        self.now_s = now_s
        self._per_second = 0.0
        self._counted_at_s = now_s()

    def acknowledged(self) -> None:
        """Counts one."""
        self._per_second = self.per_second + 1 / _COUNTED_S
        self._counted_at_s = self.now_s()

    @property
    def per_second(self) -> float:
        """How many there were in a second, of late."""
        return self._per_second * math.exp((self._counted_at_s - self.now_s()) / _COUNTED_S)


class AckLinger:
    """How long the acknowledgements of one subscription wait for others."""

    def __init__(self, least_ms: int, most_ms: int | None = None, pace: AckPace | None = None) -> None:
        """`least_ms`: at rest; 0: none waits. `most_ms`: however many there are; None: as at rest. Raises
        InvalidArgument.
        """
        columns.check_unsigned("ack_linger_ms", least_ms, bits=32)
        if most_ms is not None:
            columns.check_unsigned("ack_linger_max_ms", most_ms, bits=32)
        self._least_s = least_ms / 1000
        self._most_s = max(least_ms, most_ms or 0) / 1000
        self._pace = pace or AckPace()
        self._alone = _ALONE_MAX

    @property
    def is_off(self) -> bool:
        """Whether none waits."""
        return not self._least_s

    def acknowledged(self, *, alone: bool) -> None:
        """Counts one. `alone`: every request before it was answered."""
        self._pace.acknowledged()
        self._alone = self._alone + 1 if alone else 0

    def wait_s(self) -> float:
        """How long what is acknowledged now waits, in seconds."""
        linger_s = self._least_s
        wanted_s = 0.0 if self._alone >= _ALONE_MAX else min(self._pace.per_second / _PER_SECOND, self._most_s)
        # In steps, so that the moments of most subscriptions are the same.
        while 2 * linger_s <= wanted_s:
            linger_s *= 2
        if wanted_s >= self._most_s:
            linger_s = self._most_s
        if linger_s > _TOGETHER_MAX_S:
            return linger_s
        return linger_s - self._pace.now_s() % linger_s
