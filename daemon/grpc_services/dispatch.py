"""`tarry.v1.Dispatch`: due positions come out and are acknowledged.

Owns: the order of messages on a `Subscribe` stream, and that the engine's stream is closed however the call ends.
Does not own: permits, backlog and what is handed out (engine), the form of columns and errors (`columns`, `status`).

A stream is one reader (Open, then Flow and Acknowledge) and one writer, which sends what is done before what is due:
a `Done` waits for at most one `Messages`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import grpc

from daemon import config, errors
from daemon.engine import calls
from daemon.grpc_services import columns, parsing, pipeline, status, unary
from tarry.v1 import dispatch_pb2 as pb

if TYPE_CHECKING:
    from daemon.engine.dispatch import DispatchStream
    from daemon.engine.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Dispatch"]


class Dispatch:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings

    def handlers(self) -> dict[str, unary.Handler]:
        size_bytes_max = self._settings.limits.message_bytes_max
        return {
            "Subscribe": grpc.stream_stream_rpc_method_handler(self._subscribe),
            "CreateSubscription": unary.handler(
                pb.CreateSubscriptionRequest, self._create_subscription, size_bytes_max=size_bytes_max
            ),
            "DeleteSubscription": unary.handler(
                pb.DeleteSubscriptionRequest, self._delete_subscription, size_bytes_max=size_bytes_max
            ),
        }

    async def _subscribe(self, _: object, context: pipeline.Context) -> None:
        try:
            await _SubscribeStream(self._engine, self._settings, context).run()
        except Exception as error:  # noqa: BLE001 - every error has a status
            if isinstance(error, errors.NotOwner):
                moved = pb.Moved(owner_address=error.owner_address)
                await context.write(pb.SubscribeResponse(moved=moved).SerializeToString())
            await status.abort(context, error)

    async def _create_subscription(self, request: pb.CreateSubscriptionRequest) -> pb.CreateSubscriptionResponse:
        created = await self._engine.requests.create_subscription(request.topic, request.subscription)
        return pb.CreateSubscriptionResponse(
            subscription_id=created.subscription_id, since_ms=created.since_ms, created=created.created
        )

    async def _delete_subscription(self, request: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
        await self._engine.requests.delete_subscription(request.topic, request.subscription)
        return pb.DeleteSubscriptionResponse()


class _SubscribeStream:
    """One `Subscribe`. When the caller is done, its acknowledgements are still answered and nothing more is sent."""

    def __init__(self, engine: Engine, settings: config.Config, context: pipeline.Context) -> None:
        self._engine = engine
        self._size_bytes_max = settings.limits.message_bytes_max
        self._context = context
        self._pipeline = pipeline.Pipeline(context, settings.grpc)

    async def run(self) -> None:
        stream = await self._open(await self._read_open())
        try:
            opened = pb.Opened(epoch=stream.epoch, held=stream.held)
            await self._context.write(pb.SubscribeResponse(opened=opened).SerializeToString())
            await self._serve(stream)
        finally:
            stream.close()

    async def _read_open(self) -> pb.Open:
        data = await self._pipeline.read()
        if data is None:
            raise errors.InvalidArgument("open: the stream ended before it; the first message is open")
        request = parsing.parse(pb.SubscribeRequest, data, size_bytes_max=self._size_bytes_max)
        kind = request.WhichOneof("request")
        if kind != "open":
            raise errors.InvalidArgument(f"open: the first message is {kind or 'empty'}; it must be open")
        parsing.require_known("type", request.open.type, pb.SubscriptionType.DESCRIPTOR)
        if request.open.type != pb.SubscriptionType.SUBSCRIPTION_TYPE_SHARED:
            name = pb.SubscriptionType.Name(request.open.type)
            raise errors.InvalidArgument(f"type: {name}; it must be SUBSCRIPTION_TYPE_SHARED")
        return request.open

    async def _open(self, request: pb.Open) -> DispatchStream:
        """The engine's stream; closed as soon as it is there when the caller went away meanwhile."""
        opening = asyncio.ensure_future(
            self._engine.requests.open_dispatch(request.topic, request.subscription, columns.held(request))
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    async def _serve(self, stream: DispatchStream) -> None:
        wake = self._pipeline.wake
        reader: asyncio.Future[None] = asyncio.create_task(self._read(stream))
        reader.add_done_callback(lambda _: wake.set())
        due = self._next(stream)
        try:
            while self._pipeline.busy or not reader.done():
                await wake.wait()
                wake.clear()
                await self._pipeline.flush()
                if due.done() and not reader.done():
                    for messages in columns.subscribe_responses(due.result()):
                        await self._context.write(messages)
                        await self._pipeline.flush()
                    due = self._next(stream)
            reader.result()
        finally:
            await pipeline.end(reader, due)

    def _next(self, stream: DispatchStream) -> asyncio.Future[calls.HandedOut]:
        due = asyncio.ensure_future(stream.next_messages())
        due.add_done_callback(lambda _: self._pipeline.wake.set())
        return due

    async def _read(self, stream: DispatchStream) -> None:
        while (data := await self._pipeline.read()) is not None:
            request = parsing.parse(pb.SubscribeRequest, data, size_bytes_max=self._size_bytes_max)
            match request.WhichOneof("request"):
                case "flow" if request.flow.permits > 0:
                    stream.grant(request.flow.permits)
                case "acknowledge":
                    request_id = request.acknowledge.request_id
                    work = functools.partial(_acknowledge, stream, request.acknowledge)
                    answer = functools.partial(_done, stream.epoch, request_id, answered=request_id != 0)
                    self._pipeline.submit(len(data), work, answer)
                case "flow":
                    self._refuse(stream, len(data), "flow.permits: 0; it must be at least 1")
                case "open":
                    raise errors.InvalidArgument(
                        "open: the stream is open already; a stream has one open, its first message"
                    )
                case _:
                    self._refuse(stream, len(data), "request: it is empty; give flow or acknowledge")
            await self._pipeline.room()

    def _refuse(self, stream: DispatchStream, size_bytes: int, text: str) -> None:
        def work() -> Awaitable[int]:
            raise errors.InvalidArgument(text)

        self._pipeline.submit(size_bytes, work, functools.partial(_done, stream.epoch, 0, answered=True))


def _close_unused(opening: asyncio.Future[DispatchStream]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _acknowledge(stream: DispatchStream, request: pb.Acknowledge) -> Awaitable[int]:
    return stream.acknowledge(*columns.acknowledged(request), awaited=request.request_id != 0)


def _done(epoch: int, request_id: int, outcome: int | Exception, *, answered: bool) -> bytes | None:
    if not answered:
        return None
    done = pb.Done(request_id=request_id, epoch=epoch)
    if isinstance(outcome, Exception):
        done.error.CopyFrom(status.refusal(outcome))
    else:
        done.ignored = outcome
    return pb.SubscribeResponse(done=done).SerializeToString()
