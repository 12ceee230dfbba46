"""What the client of an event loop waits with, and what gRPC is like there.

Owns: conditions, promises, the task and the requests of a stream, how gRPC's calls end. `tarry.in_threads` has the same
names for threads: code of `tarry.aio` that uses these, and no others of asyncio, runs in threads as well.
Does not own: any rule of the client.
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
"""What a call raises when its channel is closed, unless `is_being_cancelled`."""

# What gRPC calls a write that failed.
_WRITE_FAILED = "Internal error from Core"

# An event loop holds its tasks weakly.
_RUNNING: set[asyncio.Task[None]] = set()


class Condition:
    """Waiting until something is true. Where one thread does everything, nothing is guarded."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __enter__(self) -> None:
        """Begins what no other thread may come between."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends it."""

    def notify_all(self) -> None:
        """Wakes who waits, to look again. To be called after every change that someone may wait for."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Returns True as soon as the predicate holds, False when it still does not after `timeout` seconds."""
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
    """A future of the running loop. Cancelling it takes nothing back: the request is on its way."""
    return asyncio.get_running_loop().create_future()


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str | None = None
) -> grpc.aio.Channel:
    """A channel, which connects with its first call. `credentials`: None: nothing is encrypted. `server_name`: what the
    daemon's certificate is for; None: the address's host.
    """
    options = options_of(address, server_name=server_name)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def is_being_cancelled() -> bool:
    """Whether someone has asked for the end of the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Running:
    """A task that runs from its making until it returns; then `ended` is called, also when the task was cancelled."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None], *, name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(run(), name=name)
        # A task that is cancelled before its first step runs nothing of itself, and calls back all the same.
        self._task.add_done_callback(lambda _: ended())
        _RUNNING.add(self._task)
        self._task.add_done_callback(_RUNNING.discard)

    async def join(self) -> None:
        """Waits for its end."""
        await asyncio.wait((self._task,))


class Arrivals(Generic[T]):
    """What has arrived for one reader, in its order."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[T] = asyncio.Queue()

    def put(self, item: T) -> None:
        self._arrived.put_nowait(item)

    async def get(self) -> T:
        """Waits for the next one."""
        return await self._arrived.get()


class Outbox:
    """What is to be sent on one stream: the requests that gRPC pulls. A stream that breaks takes it with it."""

    def __init__(self, joined_bytes: int = 0) -> None:
        """`joined_bytes`: what is ready is sent as one message, until it has so many; 0: message by message."""
        self._joined_bytes = joined_bytes
        self._ready: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held_back: set[asyncio.TimerHandle] = set()

    def put(self, message: bytes) -> None:
        """Sends after what was put before."""
        self._ready.put_nowait(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Sends when the delay has passed, unless the stream ends before; what, is asked then. None: nothing."""

        def put() -> None:
            self._held_back.discard(timer)
            if (ready := message()) is not None:
                self.put(ready)

        timer = asyncio.get_running_loop().call_later(delay_s, put)
        self._held_back.add(timer)

    def close(self) -> None:
        """Ends the iteration when what was put before is sent; what is held back is dropped."""
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
                # To be met again, behind this message.
                self._ready.put_nowait(None)
                break
            joined.append(message)
            size_bytes += len(message)
        return b"".join(joined)


StreamCall: TypeAlias = grpc.aio.StreamStreamCall[bytes, Response]
"""A stream, as gRPC opens it."""


def answers(call: StreamCall[Response]) -> AsyncIterator[Response]:
    """The answers of a stream's call, as they come. Raises the status that the stream ended with."""
    return _Answers(call)


class _Answers(Generic[Response]):
    """Reads the status when it comes.

    In grpcio, 1.85 included, a write that fails because the stream has ended overwrites the status; the first one is
    the daemon's. When the write is told of first, all that is known is that the stream is broken.
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
        # gRPC's word for a stream that it could not write to, and for a channel or a call that was closed here.
        raise StopAsyncIteration

    def _note(self, call: grpc.aio.Call) -> None:
        """Called by gRPC as soon as there is a status, so that nothing below waits."""
        if self._failure is not None:
            return
        code, details = _at_once(call.code()), _at_once(call.details())
        if is_failed_write(code, details):
            code = grpc.StatusCode.UNAVAILABLE
        self._failure = grpc.aio.AioRpcError(code, None, _at_once(call.trailing_metadata()), details)


def is_failed_write(code: grpc.StatusCode, details: str | None) -> bool:
    """Whether a status is gRPC's word for a stream that it could not write to, and not the daemon's."""
    return code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not wait."""
    try:
        answer.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    answer.close()
    raise errors.Internal("a status that has come was waited for")


class Opening(Generic[Opened]):
    """What is being opened: await it, or enter it with `async with`."""

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
    """Lets what a method opens be awaited or entered. In threads it is opened on return, and this is left out."""

    @functools.wraps(opens)
    def opened(*given: Arguments.args, **named: Arguments.kwargs) -> Opening[Opened]:
        return Opening(lambda: opens(*given, **named))

    return opened
