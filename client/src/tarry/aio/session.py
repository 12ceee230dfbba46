"""Reading and writing a bidirectional stream on the event loop, through its connections.

Owns: the task; opening, reading, writing and closing.
Does not own: when and where it is opened again (`tarry.streams`); what is sent and what the answers mean: that is the
handler's (`tarry.aio.add_stream`, `tarry.aio.subscription`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from tarry import errors, streams
from tarry.aio import connections

T = TypeVar("T")
Response = TypeVar("Response")
ResponseIn = TypeVar("ResponseIn", contravariant=True)

# What gRPC calls a write that failed.
_WRITE_FAILED = "Internal error from Core"


class Handler(Protocol[ResponseIn]):
    """As `tarry.session.Handler`."""

    async def wait_until_wanted(self) -> bool: ...

    def opened(self, sending: streams.Sending) -> None: ...

    def received(self, response: ResponseIn) -> bool: ...

    def interrupted(self, error: errors.TarryError) -> None: ...

    def failed(self, error: errors.TarryError) -> None: ...


class Session(Generic[Response]):
    """Runs from its making until `close` or a failure that no retry cures."""

    def __init__(
        self,
        shared: connections.Connections,
        lifetime: streams.Lifetime,
        method: streams.StreamMethod[Response],
        handler: Handler[Response],
    ) -> None:
        self._shared = shared
        self._lifetime = lifetime
        self._method = method
        self._handler = handler
        self._has_failed = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=lifetime.name)
        shared.keep(self._task)
        # A task that is cancelled before its first step runs nothing of itself.
        self._task.add_done_callback(lambda _: self._fail(lifetime.closed()))

    async def close(self) -> None:
        """Ends the stream and waits for the task; idempotent."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        ending: errors.TarryError = self._lifetime.closed()
        try:
            while await self._handler.wait_until_wanted():
                error = await self._read_one_stream()
                delay_s = self._lifetime.reopens_after_s(error)
                self._handler.interrupted(error)
                await asyncio.sleep(delay_s)
        except errors.TarryError as error:
            ending = error
        except asyncio.CancelledError:
            raise
        except BaseException as bug:
            ending = self._lifetime.ended_by_bug(bug)
            raise
        finally:
            self._fail(ending)

    def _fail(self, error: errors.TarryError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._handler.failed(error)

    async def _read_one_stream(self) -> errors.TarryError:
        """Opens a stream and reads it to its end; the reason of the end."""
        sending = _Outbox()
        call = None
        ending = _Ending()
        try:
            method: grpc.aio.StreamStreamMultiCallable[bytes, Response] = self._shared.channel(
                self._lifetime.address
            ).stream_stream(self._method.path, request_serializer=None, response_deserializer=self._method.read)
            call = method(sending, metadata=self._shared.metadata)
            call.add_done_callback(ending.note)
            self._handler.opened(sending)
            async for response in call:
                if self._handler.received(response):
                    self._lifetime.progressed()
            return streams.why_ended(None)
        except grpc.RpcError as failure:
            return streams.why_ended(ending.failure or failure)
        except errors.TarryError as error:
            return error
        except asyncio.CancelledError:
            if connections.is_being_cancelled():
                raise
            # gRPC's word for a stream that it could not write to, and for a channel that was closed.
            self._shared.check_open()
            return streams.why_ended(None)
        finally:
            sending.close()
            if call is not None:
                call.cancel()


class _Ending:
    """The status that a stream ended with, read when it comes.

    In grpcio, 1.85 included, a write that fails because the stream has ended overwrites the status; the first one is
    the daemon's. When the write is told of first, all that is known is that the stream is broken.
    """

    def __init__(self) -> None:
        self.failure: grpc.aio.AioRpcError | None = None

    def note(self, call: grpc.aio.Call) -> None:
        """Called by gRPC as soon as there is a status, so that nothing below waits."""
        if self.failure is not None:
            return
        code, details = _at_once(call.code()), _at_once(call.details())
        if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
            code = grpc.StatusCode.UNAVAILABLE
        self.failure = grpc.aio.AioRpcError(code, None, _at_once(call.trailing_metadata()), details)


def _at_once(answer: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that does not wait."""
    try:
        answer.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    answer.close()
    raise errors.Internal("a status that has come was waited for")


class _Outbox:
    """What is to be sent on one stream: the requests that gRPC pulls."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._held_back: set[asyncio.TimerHandle] = set()

    def put(self, message: bytes) -> None:
        self._ready.put_nowait(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes]) -> None:
        def put() -> None:
            self._held_back.discard(timer)
            self.put(message())

        timer = asyncio.get_running_loop().call_later(delay_s, put)
        self._held_back.add(timer)

    def close(self) -> None:
        """Ends the iteration when what was put before is sent; what is held back is dropped."""
        for timer in self._held_back:
            timer.cancel()
        self._held_back.clear()
        self._ready.put_nowait(None)

    def __aiter__(self) -> _Outbox:
        return self

    async def __anext__(self) -> bytes:
        message = await self._ready.get()
        if message is None:
            raise StopAsyncIteration
        return message
