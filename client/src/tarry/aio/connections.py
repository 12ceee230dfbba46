"""Holds the channels of one client, performs the steps of plans, and watches daemons that callers wait for.

Decides nothing about whom a call asks and how often (`tarry.attempts`), which daemons are silent (`tarry.daemons`) or
what a call shows (`tarry.credentials`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from tarry import attempts, credentials, daemons, errors, on_event_loop, streams

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
        known: daemons.Daemons,
        *,
        client_id: str | None = None,
        waiting: Callable[[str], None] = credentials.unsaid,
    ) -> None:
        """Show these credentials on each call, and call `waiting` with the reason of a long wait.

        `known` learns which daemons are silent. Raises InvalidArgument.
        """
        self._shows = shows
        self._known = known
        self._metadata = credentials.metadata_of(client_id)
        self._waiting = waiting
        self._changed = on_event_loop.Condition()
        self._last: dict[str, Connected] = {}
        # A channel replaced because of a new certificate lives as long as a call holds it.
        self._channels: weakref.WeakKeyDictionary[grpc.aio.Channel, str] = weakref.WeakKeyDictionary()
        # Channels that were closed because their daemon was silent
        self._left: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self._watches: dict[str, on_event_loop.Running] = {}
        # Address -> when its watch looks next, on the clock
        self._looks_at_s: dict[str, float] = {}
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

    async def receive(self, plan: attempts.Plan[attempts.Send], result_of: Callable[[Any], T]) -> AsyncIterator[T]:
        """Send a planned request that has many answers once, and yield each as a result.

        If the daemon is a standby that names the owner, the owner is asked instead. Raises TarryError; NotOwner also if
        the owner is unreachable.
        """
        step = await self.run(plan)
        address, answered = step.address, False
        moved: errors.NotOwner | None = None
        while True:
            try:
                connected = self.connect(address)
                with self._failures(connected), self.watched(address, step.timeout_s):
                    method: grpc.aio.UnaryStreamMultiCallable[bytes, Any] = connected.channel.unary_stream(
                        step.method.path, request_serializer=None, response_deserializer=step.method.read
                    )
                    metadata = self._metadata_to(connected)
                    async for response in method(step.request, timeout=step.timeout_s, metadata=metadata):
                        answered = True
                        self.heard(connected)
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

    def why_ended(self, failure: grpc.RpcError | None, connected: Connected) -> errors.TarryError:
        """Return what ended a stream that this client has not cancelled; None means that it ended without a failure."""
        return self._reason(streams.why_ended(failure), connected)

    async def close(self) -> None:
        """End every call. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            opened, watches = list(self._channels), list(self._watches.values())
            self._last.clear()
        for channel in opened:
            await channel.close()
        for watch in watches:
            await watch.join()

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
                self._channels[channel] = address
            self._last[address] = connected = Connected(address, channel, shown)
            return connected

    def _metadata_to(self, connected: Connected) -> tuple[tuple[str, str], ...]:
        return self._metadata + connected.shown.metadata

    async def _send(self, step: attempts.Send) -> Any:
        connected = self.connect(step.address)
        with self._failures(connected), self.watched(step.address, step.timeout_s):
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, Any] = connected.channel.unary_unary(
                step.method.path, request_serializer=None, response_deserializer=step.method.read
            )
            response = await method(step.request, timeout=step.timeout_s, metadata=self._metadata_to(connected))
        self.heard(connected)
        return response

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
            raise self._reason(errors.from_rpc(failure), connected) from None
        except on_event_loop.CHANNEL_CLOSED:
            # A cancellation of the caller is meant for the caller, not for the call.
            if not on_event_loop.is_being_cancelled():
                self._check_open()
                if connected.channel in self._left:
                    raise _silent(connected.address) from None
            raise

    def _reason(self, error: errors.TarryError, connected: Connected) -> errors.TarryError:
        """Return the reason why a call or stream ended with this failure."""
        if connected.channel in self._left:
            return _silent(connected.address)
        with self._changed:
            self._known.failed(connected.address, error)
        return self.judged(error, connected)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed("the client is closed")

    # Silence

    def heard(self, connected: Connected) -> None:
        """Note that something has come from a daemon."""
        self._known.heard(connected.address)

    def why_quiet(self, address: str, waited_s: float) -> errors.Unavailable | None:
        """Return the failure of a caller who has waited as long for a daemon (seconds), or None if that answers."""
        with self._changed:
            return _silent(address) if self._known.is_quiet(address, waited_s) else None

    @contextlib.contextmanager
    def watched(self, address: str, timeout_s: float | None) -> Iterator[None]:
        """Watch a daemon while a caller waits for it, at most `timeout_s` (seconds)."""
        with self._changed:
            waiting = self._known.begin(address, timeout_s)
            if address not in self._watches:
                self._looks_at_s[address] = math.inf
                self._watches[address] = on_event_loop.Running(
                    functools.partial(self._watch, address), lambda: None, name=f"the watch of {address}"
                )
            elif self._known.look_at_s(address) < self._looks_at_s[address]:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._known.end(waiting)

    async def _watch(self, address: str) -> None:
        """Look at a daemon as long as callers wait for it, or it is silent."""
        while True:
            with self._changed:
                at_s = self._looks_at_s[address] = self._known.look_at_s(address)
                if self._closed or at_s == math.inf:
                    del self._watches[address], self._looks_at_s[address]
                    return
                patience_s = self._known.patience_s(address)
                if (delay_s := at_s - self._known.now_s()) > 0:
                    sooner = functools.partial(self._must_look_sooner, address, at_s)
                    await self._changed.wait_for(sooner, delay_s)
                    continue
            await self._look(address, patience_s)

    def _must_look_sooner(self, address: str, at_s: float) -> bool:
        return self._closed or self._known.look_at_s(address) < at_s

    async def _look(self, address: str, patience_s: float) -> None:
        """Ask a daemon for its version, and leave it if nothing comes from it in this time (seconds)."""
        try:
            await self._send(attempts.Send(attempts.VERSION, b"", address, patience_s))
        except (errors.DeadlineExceeded, errors.Unavailable):
            # gRPC gives up a connection after some seconds, which says no more than silence.
            if self._known.quiet_s(address) < patience_s / 2:
                self._known.heard(address)
                return
            with self._changed:
                self._known.leave(address)
                self._last.pop(address, None)
                left = [channel for channel, to in self._channels.items() if to == address]
                self._left.update(left)
            for channel in left:
                await channel.close()
        except errors.TarryError:
            # It answers, or the client is closed.
            self._known.heard(address)


def _silent(address: str) -> errors.Unavailable:
    return errors.Unavailable(f"the daemon at {address} does not answer")
