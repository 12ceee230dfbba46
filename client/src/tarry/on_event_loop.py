"""Waiting and gRPC for the client of an event loop.

Conditions, promises, the task and the requests of a stream, and how gRPC's calls end. `tarry.in_threads` has the same
names for threads: code of `tarry.aio` that uses only these of asyncio runs in threads as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import grpc
import grpc.aio

from tarry import errors
from tarry.credentials import options_of

T = TypeVar("T")
Response = TypeVar("Response")
Opened = TypeVar("Opened", bound=contextlib.AbstractAsyncContextManager[Any])
Arguments = ParamSpec("Arguments")

CHANNEL_CLOSED = asyncio.CancelledError
"""Raised by a call whose channel is closed, unless `is_being_cancelled`"""

# gRPC's text for a write that failed
_WRITE_FAILED = "Internal error from Core"

# Keeps tasks alive, because an event loop holds them weakly
_RUNNING: set[asyncio.Task[None]] = set()


class Condition:
    """Waits until something is true. A single thread does everything, so nothing is guarded."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __enter__(self) -> None:
        """Begin a block that no other thread interrupts."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the block."""

    def notify_all(self) -> None:
        """Wake all waiters, so that they check again. Call it after every change that they may wait for."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Return True as soon as the predicate holds, or False if it still does not after `timeout` (seconds)."""
        if predicate():
            return True
        try:
            async with asyncio.timeout(timeout):
                while not predicate():
                    changed = asyncio.get_running_loop().create_future()
                    self._waiting.append(changed)
                    await changed
        except TimeoutError:
            return bool(predicate())
        return True


def promise() -> asyncio.Future[Any]:
    """Return a future of the running loop. Cancelling it does not take back the request, which is in flight."""
    return asyncio.get_running_loop().create_future()


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str | None = None
) -> grpc.aio.Channel:
    """Open a channel, which connects with its first call.

    Without credentials nothing is encrypted. `server_name` is the name in the daemon's certificate; None means the
    address's host.
    """
    options = options_of(address, server_name=server_name)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def is_being_cancelled() -> bool:
    """Return True if the running task has been asked to cancel."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Running:
    """A task that runs from its creation until it returns or is cancelled; then `ended` is called."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None], *, name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(run(), name=name)
        # A task that is cancelled before its first step runs none of its code, but still calls back.
        self._task.add_done_callback(lambda _: ended())
        _RUNNING.add(self._task)
        self._task.add_done_callback(_RUNNING.discard)

    async def join(self) -> None:
        """Wait for its end."""
        await asyncio.wait((self._task,))


class Arrivals(Generic[T]):
    """Items that have arrived for one reader, in order."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[T] = asyncio.Queue()

    def put(self, item: T) -> None:
        self._arrived.put_nowait(item)

    async def get(self) -> T:
        """Wait for the next item and return it."""
        return await self._arrived.get()


class Outbox:
    """The requests of one stream, which gRPC pulls; a stream that breaks takes them with it."""

    def __init__(self, joined_bytes: int = 0) -> None:
        """Join ready messages into one until it has `joined_bytes`; 0 sends them one by one."""
        self._joined_bytes = joined_bytes
        self._ready: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held_back: set[asyncio.TimerHandle] = set()

    def put(self, message: bytes) -> None:
        """Send a message after all earlier ones."""
        self._ready.put_nowait(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Call `message` after `delay_s` and send its result, unless it is None or the stream has ended."""

        def put() -> None:
            self._held_back.discard(timer)
            if (ready := message()) is not None:
                self.put(ready)

        timer = asyncio.get_running_loop().call_later(delay_s, put)
        self._held_back.add(timer)

    def close(self) -> None:
        """End the iteration after the messages put before; drop delayed ones."""
        for timer in self._held_back:
            timer.cancel()
        self._held_back.clear()
        self._ready.put_nowait(None)

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> bytes:
        message = await self._ready.get()
        if message is None:
            raise StopAsyncIteration
        if not self._joined_bytes or self._ready.empty():
            return message
        joined, size_bytes = [message], len(message)
        while size_bytes < self._joined_bytes and not self._ready.empty():
            if (message := self._ready.get_nowait()) is None:
                # Keep the mark for the next call.
                self._ready.put_nowait(None)
                break
            joined.append(message)
            size_bytes += len(message)
        return b"".join(joined)


StreamCall: TypeAlias = grpc.aio.StreamStreamCall[bytes, Response]
"""A stream as gRPC opens it"""


def answers(call: StreamCall[Response]) -> AsyncIterator[Response]:
    """Return the answers of a stream's call as they arrive. Raises the status with which the stream ended."""
    return _Answers(call)


class _Answers(Generic[Response]):
    """The answers of a stream, which keep the first status.

    In grpcio, 1.85 included, a write that fails because the stream has ended overwrites the status; the first one is
    the daemon's. If the failed write is reported first, it is only known that the stream is broken.
    """

    def __init__(self, call: StreamCall[Response]) -> None:
        self._answers = aiter(call)
        self._failure: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        try:
            return await anext(self._answers)
        except grpc.RpcError as failure:
            raise self._failure or failure from None
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
        # gRPC's signal for a stream that it could not write to, and for a channel or a call that was closed here
        raise StopAsyncIteration

    def _note(self, call: grpc.aio.Call) -> None:
        """Record the status. gRPC calls it as soon as there is one, so nothing below waits."""
        if self._failure is not None:
            return
        code, details = _at_once(call.code()), _at_once(call.details())
        if is_failed_write(code, details):
            code = grpc.StatusCode.UNAVAILABLE
        self._failure = grpc.aio.AioRpcError(code, None, _at_once(call.trailing_metadata()), details)


def is_failed_write(code: grpc.StatusCode, details: str | None) -> bool:
    """Return True if a status is gRPC's for a stream that it could not write to, not the daemon's."""
    return code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not wait."""
    try:
        answer.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    answer.close()
    raise errors.Internal("a status that has come was waited for")


class Opening(Generic[Opened]):
    """An object being opened: await it, or enter it with `async with`."""

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, Opened]]) -> None:
        self._opening = opening
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, None, Opened]:
        return self._opening().__await__()

    async def __aenter__(self) -> Opened:
        self._opened = await self
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, traceback)


def opening(opens: Callable[Arguments, Coroutine[Any, Any, Opened]]) -> Callable[Arguments, Opening[Opened]]:
    """Let callers await or enter what a method opens. In threads it is open on return, and this is left out."""

    @functools.wraps(opens)
    def opened(*given: Arguments.args, **named: Arguments.kwargs) -> Opening[Opened]:
        return Opening(lambda: opens(*given, **named))

    return opened
