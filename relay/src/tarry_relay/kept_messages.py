"""Messages that were read once and may be asked for soon.

Owns: how much is kept, and what goes first.
Does not own: reading and fetching (`tarry_relay.kafka_broker`).
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Kept(Generic[Message]):
    """Messages by position; the oldest go first. Several threads may use it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._messages: dict[tuple[int, int], tuple[Message, int]] = {}
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        """Whether there is room for anything."""
        return self._bytes_max > 0

    def keep(self, position: tuple[int, int], message: Message, size: int) -> None:
        """Keeps a message of so many bytes, if there is room for it at all."""
        with self._lock:
            self._drop(position)
            if size > self._bytes_max:
                return
            self._messages[position] = message, size
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._drop(next(iter(self._messages)))

    def take(self, position: tuple[int, int]) -> Message | None:
        """The message of a position, which is kept no more; None: it was not."""
        with self._lock:
            return self._drop(position)

    def _drop(self, position: tuple[int, int]) -> Message | None:
        found = self._messages.pop(position, None)
        if found is None:
            return None
        message, size = found
        self._bytes -= size
        return message
