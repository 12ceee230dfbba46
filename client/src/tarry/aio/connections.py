"""Channels, and performing the steps of plans on the event loop.

Owns: the channels of one client, and waiting.
Does not own: whom a call asks and how often (`tarry.attempts`), streams (`tarry.aio.session`), requests and results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from tarry import attempts, connections, errors

T = TypeVar("T")


class Connections:
    """Used by one event loop."""

    def __init__(self, *, client_id: str | None = None, waiting: Callable[[str], None] = connections.unsaid) -> None:
        """`waiting` is told what is waited for where that is worth saying. Raises InvalidArgument."""
        self.metadata = connections.metadata_of(client_id)
        self._waiting = waiting
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, task: asyncio.Task[None]) -> None:
        """Holds a task until it is done: an event loop holds it weakly."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check_open(self) -> None:
        """Raises Closed."""
        if self._closed.is_set():
            raise errors.Closed("the client is closed")

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to a gRPC target. Raises Closed."""
        self.check_open()
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=connections.CHANNEL_OPTIONS)
            self._channels[address] = channel
        return channel

    async def run(self, plan: attempts.Plan[T]) -> T:
        """Performs a plan's steps; its result. Raises what the plan raises."""
        try:
            step = next(plan)
            while True:
                if isinstance(step, attempts.Wait):
                    if step.why:
                        self._waiting(step.why)
                    await self._wait(step.delay_s)
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
        """Sends a request that has many answers, once; each of them as a result. Raises TarryError."""
        method: grpc.aio.UnaryStreamMultiCallable[bytes, Any] = self.channel(step.address).unary_stream(
            step.method.path, request_serializer=None, response_deserializer=step.method.read
        )
        try:
            async for response in method(step.request, timeout=step.timeout_s, metadata=self.metadata):
                yield result_of(response)
        except grpc.RpcError as failure:
            self.check_open()
            raise errors.from_rpc(failure) from None
        except asyncio.CancelledError:
            # As of a unary call.
            if not is_being_cancelled():
                self.check_open()
            raise

    async def close(self) -> None:
        """Ends every call; idempotent."""
        self._closed.set()
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    async def _wait(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._closed.wait()
        except TimeoutError:
            pass

    async def _send(self, step: attempts.Send) -> Any:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, Any] = self.channel(step.address).unary_unary(
            step.method.path, request_serializer=None, response_deserializer=step.method.read
        )
        try:
            return await method(step.request, timeout=step.timeout_s, metadata=self.metadata)
        except grpc.RpcError as failure:
            self.check_open()
            raise errors.from_rpc(failure) from None
        except asyncio.CancelledError:
            # A channel that closes cancels its calls; whoever cancels the caller means the caller.
            if not is_being_cancelled():
                self.check_open()
            raise


def is_being_cancelled() -> bool:
    """Whether someone has asked for the end of the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
