"""Divides the memory of a relay into shares, and computes how many messages to ask for at once.

Reading gets half, fetching the other half, so that neither waits for the other. Pure.
"""

from __future__ import annotations

ROWS_FIRST = 16
"""Messages in the first portion, when their size is unknown"""
_PORTIONS = 8
"""Divisor of a share: a portion has at most this part of it, unless it is one message"""


class Portions:
    """The portions of one reader or fetcher: they grow and halve by the bytes that arrive."""

    def __init__(self, share_bytes: int, rows_max: int) -> None:
        """Begin with a small portion; all messages together may take `share_bytes`."""
        self._share_bytes = share_bytes
        self._rows_max = rows_max
        self._rows = min(ROWS_FIRST, rows_max)

    def rows(self, held_bytes: int) -> int:
        """Return how many messages to ask for, while others of the share hold `held_bytes`; 0 if there is no room.

        A message larger than the share is taken alone: one is asked for if nothing is held.
        """
        if held_bytes >= self._share_bytes:
            return 0
        return self._rows if held_bytes + self.portion_bytes <= self._share_bytes else max(1, self._rows // 2)

    @property
    def portion_bytes(self) -> int:
        """The largest size of a portion of several messages (bytes)."""
        return max(1, self._share_bytes // _PORTIONS)

    def came(self, rows: int, size_bytes: int) -> None:
        """Record the arrival of a portion."""
        if size_bytes > self.portion_bytes:
            self._rows = max(1, self._rows // 2)
        elif rows >= self._rows and 2 * size_bytes <= self.portion_bytes:
            self._rows = min(2 * self._rows, self._rows_max)


def portion_bytes(memory_bytes: int) -> int:
    """Return the size that one call of a reader or fetcher should bring (bytes); one message may be larger."""
    return max(1, memory_bytes // 2 // _PORTIONS)


class Filling:
    """A portion that an adapter fills by several calls, because the broker counts messages instead of bytes.

    Each call asks for no more than will fit if they are as large as those before.
    """

    def __init__(self, bytes_max: int, rows_max: int) -> None:
        """Begin with a small call; the portion is full after `bytes_max`."""
        self._bytes_left = bytes_max
        self._rows_left = rows_max
        self._next = ROWS_FIRST
        self._rows = self._bytes = 0

    def rows(self) -> int:
        """Return how many messages to ask for next; 0 if the portion is full."""
        if self._bytes_left <= 0:
            return 0
        fit = self._next if not self._bytes else max(1, self._bytes_left * self._rows // self._bytes)
        return min(self._next, self._rows_left, fit)

    def came(self, rows: int, size_bytes: int) -> None:
        """Record the arrival of messages."""
        self._rows += rows
        self._rows_left -= rows
        self._bytes += size_bytes
        self._bytes_left -= size_bytes
        self._next = max(1, 2 * rows)
