"""Opens, reads and closes a bidirectional stream, one after the other.

Before it opens one, it asks each new daemon for its features. `tarry.streams` decides when and where to open again. The
handler (`tarry.aio.add_stream`, `tarry.aio.subscription`) knows what is sent and what the answers mean.
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
    """The callbacks of a session, called one at a time."""

    async def wait_until_wanted(self) -> bool:
        """Return True when a stream is needed, or False when the session is closed."""

    def opened(self, sending: streams.Sending) -> None:
        """Start using a new stream."""

    def received(self, response: ResponseIn) -> bool:
        """Process an answer; return True if it shows progress. A TarryError ends the stream."""

    def interrupted(self, error: errors.TarryError) -> None:
        """Note that the stream broke; another will be opened."""

    def failed(self, error: errors.TarryError) -> None:
        """Note that the session is over; called once, last."""


class Session(Generic[Response]):
    """A session, which runs from its creation until `close` or a failure that no retry fixes."""

    def __init__(
        self,
        shared: connections.Connections,
        lifetime: streams.Lifetime,
        opens: Callable[[str], connections.Opened[Response]],
        handler: Handler[Response],
    ) -> None:
        """Use `opens` to begin a stream, or a lane, at an address; `lifetime` holds the daemon's features."""
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
        """End the stream and wait until the session is over. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._cancel is not None:
                self._cancel()
        await self._running.join()

    async def _run(self) -> None:
        try:
            while await self._handler.wait_until_wanted():
                address = self._lifetime.address
                error = await self._read_one_stream(address)
                if self._closed:
                    break
                delay_s = self._lifetime.reopens_after_s(address, error)
                self._handler.interrupted(error)
                with self._changed:
                    await self._changed.wait_for(lambda: self._closed, delay_s)
        except errors.TarryError as error:
            self._ending = error
        except Exception as bug:
            self._ending = self._lifetime.ended_by_bug(bug)
            raise

    async def _read_one_stream(self, address: str) -> errors.TarryError:
        """Open a stream at an address, read it to its end, and return why it ended."""
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
        """Open one stream of this kind, read it to its end, and return why it ended."""
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
        with self._shared.watched(begun.connected.address, self._lifetime.timeout_s):
            try:
                async for response in begun.answers:
                    self._shared.heard(begun.connected)
                    received(response)
            except grpc.RpcError as failure:
                return self._shared.why_ended(failure, begun.connected)
            return self._shared.why_ended(None, begun.connected)


def _ask(sending: streams.Requests) -> None:
    """Send the empty request of a call that takes one request."""
    sending.put(b"")
    sending.close()
