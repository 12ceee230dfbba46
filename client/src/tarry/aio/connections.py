"""Channels, and performing the steps of plans.

Owns: the channels of one client, and waiting.
Does not own: whom a call asks and how often (`tarry.attempts`), streams (`tarry.aio.session`), requests
and results.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from tarry import attempts, channels, errors, on_event_loop, streams

T = TypeVar("T")
Response = TypeVar("Response")


class Connections:
    """Used by one event loop."""

    def __init__(self, *, client_id: str | None = None, waiting: Callable[[str], None] = channels.unsaid) -> None:
        """`waiting` is told what is waited for where that is worth saying. Raises InvalidArgument."""
        self._metadata = channels.metadata_of(client_id)
        self._waiting = waiting
        self._changed = on_event_loop.Condition()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    async def run(self, plan: attempts.Plan[T]) -> T:
        """Performs a plan's steps; its result. Raises what the plan raises."""
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
        """Sends a request that has many answers, once; each of them as a result. Where the daemon stands by and names
        the owner, that one is asked instead. Raises TarryError; NotOwner also where the owner cannot be reached.
        """
        address, answered = step.address, False
        moved: errors.NotOwner | None = None
        while True:
            try:
                with self._failures():
                    method: grpc.aio.UnaryStreamMultiCallable[bytes, Any] = self._channel(address).unary_stream(
                        step.method.path, request_serializer=None, response_deserializer=step.method.read
                    )
                    async for response in method(step.request, timeout=step.timeout_s, metadata=self._metadata):
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

    def open(
        self, address: str, to: streams.StreamMethod[Response], sending: on_event_loop.Outbox
    ) -> on_event_loop.StreamCall[Response]:
        """Begins a stream. Raises Closed."""
        with self._failures():
            method: grpc.aio.StreamStreamMultiCallable[bytes, Response] = self._channel(address).stream_stream(
                to.path, request_serializer=None, response_deserializer=to.read
            )
            return method(sending, metadata=self._metadata)

    async def close(self) -> None:
        """Ends every call; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            opened = list(self._channels.values())
            self._channels.clear()
        for channel in opened:
            await channel.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed("the client is closed")

    def _channel(self, address: str) -> grpc.aio.Channel:
        with self._changed:
            self._check_open()
            channel = self._channels.get(address)
            if channel is None:
                channel = on_event_loop.open_channel(address)
                self._channels[address] = channel
            return channel

    async def _send(self, step: attempts.Send) -> Any:
        with self._failures():
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, Any] = self._channel(step.address).unary_unary(
                step.method.path, request_serializer=None, response_deserializer=step.method.read
            )
            return await method(step.request, timeout=step.timeout_s, metadata=self._metadata)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raises what gRPC raises as TarryError; Closed where it was this client that ended the call."""
        try:
            yield
        except grpc.RpcError as failure:
            self._check_open()
            raise errors.from_rpc(failure) from None
        except on_event_loop.CHANNEL_CLOSED:
            # Whoever cancels the caller means the caller, not the call.
            if not on_event_loop.is_being_cancelled():
                self._check_open()
            raise
