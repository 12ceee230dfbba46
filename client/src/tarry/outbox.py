"""What is to be sent on one stream: the request iterator that gRPC pulls from.

Owns: the order of sending, and holding back a request that is to be repeated later.
Does not own: what is sent; a stream that breaks takes its outbox with it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import queue
import time
from collections.abc import Callable

_MESSAGES_END = object()


@dataclasses.dataclass(frozen=True, order=True)
class _Later:
    send_at_s: float
    number: int
    message: Callable[[], bytes]


class Outbox:
    """Any thread puts encoded messages; one thread, gRPC's, iterates until `close`."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Only the iterating thread touches the heap: a held-back message travels through the queue first.
        self._held_back: list[_Later] = []
        self._numbers = itertools.count()

    def put(self, message: bytes) -> None:
        """Sends after what was put before."""
        self._ready.put(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes]) -> None:
        """Sends when the delay has passed, unless the stream ends before; what, is asked then, in gRPC's thread."""
        self._ready.put(_Later(time.monotonic() + delay_s, next(self._numbers), message))

    def close(self) -> None:
        """Ends the iteration when what was put before is sent; what is held back is dropped."""
        self._ready.put(_MESSAGES_END)

    def __iter__(self) -> Outbox:
        return self

    def __next__(self) -> bytes:
        while True:
            timeout_s = None
            if self._held_back:
                timeout_s = self._held_back[0].send_at_s - time.monotonic()
                if timeout_s <= 0:
                    return heapq.heappop(self._held_back).message()
            try:
                item = self._ready.get(timeout=timeout_s)
            except queue.Empty:
                continue
            if isinstance(item, bytes):
                return item
            if isinstance(item, _Later):
                heapq.heappush(self._held_back, item)
            else:
                raise StopIteration
