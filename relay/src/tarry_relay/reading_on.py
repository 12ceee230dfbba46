"""Finding messages in a log that can only be read on.

Owns: which offset was found or is gone, and when to jump.
Does not own: reading (`tarry_relay.kafka_broker`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

GAP_MAX = 500
"""So many offsets are read on through; to jump costs a round trip or more."""


class Search:
    """The offsets of one partition that are looked for, while it is read on from the first of them."""

    def __init__(self, offsets: Iterable[int]) -> None:
        """`offsets`: ascend."""
        self._left = deque(offsets)

    @property
    def next(self) -> int | None:
        """The lowest offset that is neither found nor gone; None: the search is over."""
        return self._left[0] if self._left else None

    def meets(self, offset: int) -> bool:
        """Whether the message that was read is looked for. What was looked for below it is gone."""
        self.begins_at(offset)
        if self.next != offset:
            return False
        self._left.popleft()
        return True

    def begins_at(self, first: int) -> None:
        """Says that the log has nothing below an offset: what was looked for there is gone."""
        while self._left and self._left[0] < first:
            self._left.popleft()

    def ends_at(self, end: int) -> None:
        """Says that the log has nothing from an offset on."""
        while self._left and self._left[-1] >= end:
            self._left.pop()

    def jumps(self, offset: int) -> bool:
        """Whether the next offset is so far beyond the message that was read that the way there is not worth it."""
        return self.next is not None and self.next - offset > GAP_MAX
