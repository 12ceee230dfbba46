"""Reading and writing a bidirectional stream, through its connections.

Owns: opening, reading and closing, one stream after the other, and asking each daemon before what it can do.
Does not own: when and where it is opened again (`tarry.streams`); what is sent and what the answers mean: that is the
handler's (`tarry.aio.add_stream`, `tarry.aio.subscription`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc

from tarry import errors, on_event_loop, streams
from tarry.aio import connections

Response = TypeVar("Response")
Answer = TypeVar("Answer")
ResponseIn = TypeVar("ResponseIn", contravariant=True)


class Handler(Protocol[ResponseIn]):
    """Called by the session, one call at a time."""

    async def wait_until_wanted(self) -> bool:
        """Returns True when a stream is needed, False when the session is closed."""

    def opened(self, sending: streams.Sending) -> None:
        """A stream has begun."""

    def received(self, response: ResponseIn) -> bool:
        """True when the answer shows progress. A TarryError that it raises ends the stream."""

    def interrupted(self, error: errors.TarryError) -> None:
        """The stream is gone, another will be opened."""

    def failed(self, error: errors.TarryError) -> None:
        """The session is over; called once, last."""


class Session(Generic[Response]):
    """Runs from its making until `close` or a failure that no retry cures."""

    def __init__(
        self,
        shared: connections.Connections,
        lifetime: streams.Lifetime,
        opens: Callable[[str], connections.Opened[Response]],
        handler: Handler[Response],
    ) -> None:
        """`opens` begins a stream, or a lane of one, at an address; `lifetime` knows what the daemon there can do."""
        self._shared = shared
        self._lifetime = lifetime
        self._opens = opens
        self._handler = handler
        self._changed = on_event_loop.Condition()
        self._closed = False
        self._cancel: Callable[[], object] | None = None
        self._ending: errors.TarryError = lifetime.closed()
        self._running = on_event_loop.Running(self._run, lambda: handler.failed(self._ending), name=lifetime.name)

    async def close(self) -> None:
        """Ends the stream and waits until the session is over; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._cancel is not None:
                self._cancel()
        await self._running.join()

    async def _run(self) -> None:
        try:
            while await self._handler.wait_until_wanted():
                error = await self._read_one_stream()
                if self._closed:
                    break
                delay_s = self._lifetime.reopens_after_s(error)
                self._handler.interrupted(error)
                with self._changed:
                    await self._changed.wait_for(lambda: self._closed, delay_s)
        except errors.TarryError as error:
            self._ending = error
        except Exception as bug:
            self._ending = self._lifetime.ended_by_bug(bug)
            raise

    async def _read_one_stream(self) -> errors.TarryError:
        """Opens a stream and reads it to its end; the reason of the end."""
        address = self._lifetime.address
        if self._lifetime.must_ask(address):
            told = functools.partial(self._lifetime.told, address)
            asks = functools.partial(self._shared.open, address, streams.VERSION)
            error = await self._read(asks, _ask, told)
            if not self._lifetime.may_open(address, error):
                return error
        return await self._read(functools.partial(self._opens, address), self._handler.opened, self._received)

    def _received(self, response: Response) -> None:
        if self._handler.received(response):
            self._lifetime.progressed()

    async def _read(
        self,
        opens: Callable[[], connections.Opened[Answer]],
        opened: Callable[[streams.Requests], None],
        received: Callable[[Answer], None],
    ) -> errors.TarryError:
        """Opens one and reads it to its end; the reason of the end."""
        begun = None
        try:
            with self._changed:
                if self._closed:
                    return self._lifetime.closed()
                begun = opens()
                self._cancel = begun.cancel
            opened(begun.sending)
            return await self._read_answers(begun, received)
        except errors.TarryError as error:
            return error
        finally:
            if begun is not None:
                begun.sending.close()
                begun.cancel()

    async def _read_answers(
        self, begun: connections.Opened[Answer], received: Callable[[Answer], None]
    ) -> errors.TarryError:
        try:
            async for response in begun.answers:
                received(response)
        except grpc.RpcError as failure:
            return self._shared.why_ended(failure, begun.connected)
        return streams.why_ended(None)


def _ask(sending: streams.Requests) -> None:
    """Sends a call's one request, which says nothing."""
    sending.put(b"")
    sending.close()
