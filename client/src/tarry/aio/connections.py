"""Holds the channels of one client and performs the steps of plans.

Decides nothing about whom a call asks and how often (`tarry.attempts`) or what it shows (`tarry.credentials`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from tarry import attempts, credentials, errors, on_event_loop, streams

T = TypeVar("T")
Response = TypeVar("Response")


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """A channel to an address, with the credentials that calls show there."""

    address: str
    channel: grpc.aio.Channel
    shown: credentials.Shown


@dataclasses.dataclass(frozen=True, slots=True)
class Opened(Generic[Response]):
    """A stream that has begun, or one lane of a stream. `cancel` stops reading its answers."""

    connected: Connected
    sending: streams.Requests
    answers: AsyncIterator[Response]
    cancel: Callable[[], object]


class Connections:
    """The channels of one client. Used by one event loop."""

    def __init__(
        self,
        shows: credentials.Credentials,
        *,
        client_id: str | None = None,
        waiting: Callable[[str], None] = credentials.unsaid,
    ) -> None:
        """Show these credentials on each call, and call `waiting` with the reason of a long wait.

        Raises InvalidArgument.
        """
        self._shows = shows
        self._metadata = credentials.metadata_of(client_id)
        self._waiting = waiting
        self._changed = on_event_loop.Condition()
        self._last: dict[str, Connected] = {}
        # A channel replaced because of a new certificate lives as long as a call holds it.
        self._channels: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self._closed = False

    async def run(self, plan: attempts.Plan[T]) -> T:
        """Perform a plan's steps and return its result. Raises what the plan raises."""
        try:
            step = next(plan)
            while True:
                if isinstance(step, attempts.Wait):
                    if step.why:
                        self._waiting(step.why)
                    with self._changed:
                        await self._changed.wait_for(lambda: self._closed, step.delay_s)
                    step = plan.send(None)
                    continue
                try:
                    response = await self._send(step)
                except errors.TarryError as error:
                    step = plan.throw(error)
                else:
                    step = plan.send(response)
        except StopIteration as finished:
            result: T = finished.value
            return result

    async def receive(self, step: attempts.Send, result_of: Callable[[Any], T]) -> AsyncIterator[T]:
        """Send a request that has many answers once, and yield each as a result.

        If the daemon is a standby that names the owner, the owner is asked instead. Raises TarryError; NotOwner also if
        the owner is unreachable.
        """
        address, answered = step.address, False
        moved: errors.NotOwner | None = None
        while True:
            try:
                connected = self.connect(address)
                with self._failures(connected):
                    method: grpc.aio.UnaryStreamMultiCallable[bytes, Any] = connected.channel.unary_stream(
                        step.method.path, request_serializer=None, response_deserializer=step.method.read
                    )
                    metadata = self._metadata_to(connected)
                    async for response in method(step.request, timeout=step.timeout_s, metadata=metadata):
                        answered = True
                        yield result_of(response)
                return
            except errors.NotOwner as error:
                if answered or moved is not None or not error.owner_address:
                    raise
                moved, address = error, error.owner_address
            except errors.Unavailable as error:
                if answered or moved is None:
                    raise
                raise moved from error

    def open(self, address: str, to: streams.StreamMethod[Response]) -> Opened[Response]:
        """Begin a stream. Raises Closed, or InvalidArgument if the token may not be sent."""
        return self.begin(self.connect(address), to)

    def begin(
        self, connected: Connected, to: streams.StreamMethod[Response], *, joined_bytes: int = 0
    ) -> Opened[Response]:
        """Begin a stream, with `joined_bytes` for its `Outbox`. Raises Closed."""
        sending = on_event_loop.Outbox(joined_bytes)
        with self._failures(connected):
            method: grpc.aio.StreamStreamMultiCallable[bytes, Response] = connected.channel.stream_stream(
                to.path, request_serializer=None, response_deserializer=to.read
            )
            call = method(sending, metadata=self._metadata_to(connected))
            return Opened(connected, sending, on_event_loop.answers(call), call.cancel)

    def why_ended(self, failure: grpc.RpcError, connected: Connected) -> errors.TarryError:
        """Return what ended a stream that this client has not cancelled."""
        return self.judged(streams.why_ended(failure), connected)

    async def close(self) -> None:
        """End every call. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            opened = list(self._channels)
            self._last.clear()
        for channel in opened:
            await channel.close()

    def connect(self, address: str) -> Connected:
        """Return the channel to an address. Raises Closed, or InvalidArgument if the token may not be sent."""
        with self._changed:
            self._check_open()
            shown = self._shows.shown_to(address)
            last = self._last.get(address)
            if last is not None and last.shown.channel is shown.channel:
                channel = last.channel
            else:
                channel = on_event_loop.open_channel(address, shown.channel, server_name=self._shows.server_name)
                self._channels.add(channel)
            self._last[address] = connected = Connected(address, channel, shown)
            return connected

    def _metadata_to(self, connected: Connected) -> tuple[tuple[str, str], ...]:
        return self._metadata + connected.shown.metadata

    async def _send(self, step: attempts.Send) -> Any:
        connected = self.connect(step.address)
        with self._failures(connected):
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, Any] = connected.channel.unary_unary(
                step.method.path, request_serializer=None, response_deserializer=step.method.read
            )
            return await method(step.request, timeout=step.timeout_s, metadata=self._metadata_to(connected))

    def judged(self, error: errors.TarryError, connected: Connected) -> errors.TarryError:
        """Return the failure of a call; mark an Unauthenticated one if the credentials have changed since."""
        if isinstance(error, errors.Unauthenticated):
            error.is_outdated = self._shows.shown_to(connected.address) != connected.shown
        return error

    @contextlib.contextmanager
    def _failures(self, connected: Connected) -> Iterator[None]:
        """Raise gRPC errors as TarryError, or as Closed if this client ended the call."""
        try:
            yield
        except grpc.RpcError as failure:
            self._check_open()
            raise self.judged(errors.from_rpc(failure), connected) from None
        except on_event_loop.CHANNEL_CLOSED:
            # A cancellation of the caller is meant for the caller, not for the call.
            if not on_event_loop.is_being_cancelled():
                self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed("the client is closed")
