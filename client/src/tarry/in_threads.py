"""Waiting and gRPC for the client of threads, under the names of `tarry.on_event_loop`.

Conditions, promises, the thread and the requests of a stream, and how gRPC's calls end. With this module, code written
for an event loop (`tarry.aio`) becomes the client of threads (`tarry.threads`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import grpc

from tarry.credentials import options_of

T = TypeVar("T")
Response = TypeVar("Response")
ResponseOut = TypeVar("ResponseOut", covariant=True)

Condition = threading.Condition

Arrivals = queue.SimpleQueue
"""Items that have arrived for one reader, in order"""

CHANNEL_CLOSED = ValueError
"""Raised by a call whose channel another thread has closed"""

_MESSAGES_END = object()


class Promise(concurrent.futures.Future[T]):
    """A future whose `cancel` has no effect, because the request is in flight."""

    # Marking each as running (`set_running_or_notify_cancel`) would take as long as creating it: 0.6 us.
    def cancel(self) -> bool:
        return False


def promise() -> concurrent.futures.Future[Any]:
    """Return a future whose `cancel` has no effect."""
    return Promise()


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str | None = None
) -> grpc.Channel:
    """Open a channel, which connects with its first call.

    Without credentials nothing is encrypted. `server_name` is the name in the daemon's certificate; None means the
    address's host.
    """
    options = options_of(address, server_name=server_name)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def is_being_cancelled() -> bool:
    """Return False: a thread cannot be cancelled."""
    return False


class Running:
    """A thread that runs from its creation until it returns; then `ended` is called."""

    def __init__(self, run: Callable[[], None], ended: Callable[[], None], *, name: str) -> None:
        def run_to_the_end() -> None:
            try:
                run()
            finally:
                ended()

        self._thread = threading.Thread(target=run_to_the_end, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for its end, unless the caller is the thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join()


class StreamCall(Protocol[ResponseOut]):
    """A stream as gRPC opens it."""

    def __iter__(self) -> Iterator[ResponseOut]: ...

    def cancel(self) -> bool: ...


def answers(call: StreamCall[Response]) -> Iterator[Response]:
    """Return the answers of a stream's call as they arrive. Raises the status with which the stream ended."""
    return iter(call)


@dataclasses.dataclass(frozen=True, order=True)
class _Later:
    send_at_s: float
    number: int
    message: Callable[[], bytes | None]


class Outbox:
    """The requests of one stream, which gRPC pulls; a stream that breaks takes them with it.

    Any thread puts encoded messages; one thread, gRPC's, iterates until `close`.
    """

    def __init__(self, joined_bytes: int = 0) -> None:
        """Join ready messages into one until it has `joined_bytes`; 0 sends them one by one."""
        self._joined_bytes = joined_bytes
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Only the iterating thread touches the heap: a delayed message travels through the queue first.
        self._held_back: list[_Later] = []
        self._numbers = itertools.count()

    def put(self, message: bytes) -> None:
        """Send a message after all earlier ones."""
        self._ready.put(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Call `message` after `delay_s`, in gRPC's thread, and send its result.

        Sends nothing if it is None, or if the stream has ended.
        """
        self._ready.put(_Later(time.monotonic() + delay_s, next(self._numbers), message))

    def close(self) -> None:
        """End the iteration after the messages put before; drop delayed ones."""
        self._ready.put(_MESSAGES_END)

    def __iter__(self) -> Outbox:
        return self

    def __next__(self) -> bytes:
        message = self._next(waits=True)
        if message is None:
            raise StopIteration
        joined, size_bytes = [message], len(message)
        while size_bytes < self._joined_bytes and (message := self._next(waits=False)) is not None:
            joined.append(message)
            size_bytes += len(message)
        return joined[0] if len(joined) == 1 else b"".join(joined)

    def _next(self, *, waits: bool) -> bytes | None:
        """Return the next message to send, or None if there are no more, or none yet and it does not wait."""
        while True:
            timeout_s = None
            if self._held_back:
                timeout_s = self._held_back[0].send_at_s - time.monotonic()
                if timeout_s <= 0:
                    if (message := heapq.heappop(self._held_back).message()) is not None:
                        return message
                    continue
            try:
                item = self._ready.get(waits, timeout_s)
            except queue.Empty:
                if waits:
                    continue
                return None
            if isinstance(item, bytes):
                return item
            if isinstance(item, _Later):
                heapq.heappush(self._held_back, item)
                continue
            # Keep the mark for the next call.
            self._ready.put(_MESSAGES_END)
            return None
