"""How far a store's clock is from this machine's, as the answers of the store tell.

Owns: the reading of many `Date` headers, which know whole seconds, as one narrow range.
Does not own: where the headers come from (`s3`) and what is done about a difference.
"""

from __future__ import annotations

import threading
from typing import Final

DATE_RESOLUTION_S: Final = 1.0
"""A `Date` header is cut to whole seconds."""

READING_S: Final = 60.0
"""A range is built from the answers of so long at most: clocks drift, and are set right."""


class StoreClock:
    """Thread-safe. Each answer bounds the difference: the store wrote its time after the request was sent and before
    the answer came. The bounds of answers that follow each other are cut together: the first one leaves a second and
    the time that it took, some more leave little beyond the time of the fastest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._least_s = self._most_s = 0.0
        self._began_s: float | None = None
        self._last: tuple[float, float] | None = None

    def answered(self, date_s: float, *, sent_s: float, received_s: float) -> None:
        """An answer with that `Date`. All in seconds of Unix time: of the store, and of this machine."""
        least_s, most_s = date_s - received_s, date_s + DATE_RESOLUTION_S - sent_s
        with self._lock:
            narrow = max(self._least_s, least_s), min(self._most_s, most_s)
            fresh = self._began_s is not None and 0.0 <= received_s - self._began_s < READING_S
            if not fresh or narrow[0] > narrow[1]:
                if fresh:
                    # One of the clocks was set.
                    self._last = None
                elif self._began_s is not None:
                    self._last = self._least_s, self._most_s
                self._began_s, narrow = received_s, (least_s, most_s)
            self._least_s, self._most_s = narrow

    def skew_s(self) -> float | None:
        """The store's time minus this machine's, None while there was no answer.

        The middle of the range that is narrower: the one that is being read, or the one before it.
        """
        with self._lock:
            if self._began_s is None:
                return None
            ranges = [(self._least_s, self._most_s), *([] if self._last is None else [self._last])]
            least_s, most_s = min(ranges, key=lambda each: each[1] - each[0])
            return (least_s + most_s) / 2
