"""What the client of threads waits with, and what gRPC is like there.

Owns: conditions, promises, the thread and the requests of a stream, how gRPC's calls end; by the names of
`tarry.on_event_loop`. What is written for an event loop (`tarry.aio`) becomes the client of threads (`tarry.threads`)
by these.
Does not own: any rule of the client.
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
"""What has arrived for one reader, in its order."""

CHANNEL_CLOSED = ValueError
"""What a call raises when another thread has closed its channel."""

_MESSAGES_END = object()


class Promise(concurrent.futures.Future[T]):
    """A future whose `cancel` has no effect: the request is on its way."""

    # To say of each that it runs (`set_running_or_notify_cancel`) would take as long as making it: 0.6 us.
    def cancel(self) -> bool:
        return False


def promise() -> concurrent.futures.Future[Any]:
    """A future whose `cancel` has no effect."""
    return Promise()


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str | None = None
) -> grpc.Channel:
    """A channel, which connects with its first call. `credentials`: None: nothing is encrypted. `server_name`: what the
    daemon's certificate is for; None: the address's host.
    """
    options = options_of(address, server_name=server_name)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def is_being_cancelled() -> bool:
    """Nobody can ask for the end of a thread."""
    return False


class Running:
    """A thread that runs from its making until it returns; then `ended` is called."""

    def __init__(self, run: Callable[[], None], ended: Callable[[], None], *, name: str) -> None:
        def run_to_the_end() -> None:
            try:
                run()
            finally:
                ended()

        self._thread = threading.Thread(target=run_to_the_end, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for its end, unless it is the thread itself that asks."""
        if self._thread is not threading.current_thread():
            self._thread.join()


class StreamCall(Protocol[ResponseOut]):
    """A stream, as gRPC opens it."""

    def __iter__(self) -> Iterator[ResponseOut]: ...

    def cancel(self) -> bool: ...


def answers(call: StreamCall[Response]) -> Iterator[Response]:
    """The answers of a stream's call, as they come. Raises the status that the stream ended with."""
    return iter(call)


@dataclasses.dataclass(frozen=True, order=True)
class _Later:
    send_at_s: float
    number: int
    message: Callable[[], bytes | None]


class Outbox:
    """What is to be sent on one stream: the requests that gRPC pulls. A stream that breaks takes it with it.

    Any thread puts encoded messages; one thread, gRPC's, iterates until `close`.
    """

    def __init__(self, joined_bytes: int = 0) -> None:
        """`joined_bytes`: what is ready is sent as one message, until it has so many; 0: message by message."""
        self._joined_bytes = joined_bytes
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Only the iterating thread touches the heap: a held-back message travels through the queue first.
        self._held_back: list[_Later] = []
        self._numbers = itertools.count()

    def put(self, message: bytes) -> None:
        """Sends after what was put before."""
        self._ready.put(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Sends when the delay has passed, unless the stream ends before; what, is asked then, in gRPC's thread. None:
        nothing.
        """
        self._ready.put(_Later(time.monotonic() + delay_s, next(self._numbers), message))

    def close(self) -> None:
        """Ends the iteration when what was put before is sent; what is held back is dropped."""
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
        """What is to be sent next; None: nothing more, or nothing yet where it does not wait."""
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
            # To be met again by whoever asks next.
            self._ready.put(_MESSAGES_END)
            return None
