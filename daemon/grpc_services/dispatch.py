"""`tarry.v1.Dispatch`: due positions come out and are acknowledged, or come back later.

Owns: the order of messages on a `Subscribe` stream, that the engine's stream is closed however the call ends, and the
requests and answers of the calls without a stream.
Does not own: permits, backlog and what is handed out (engine), the form of columns and errors (`columns`, `status`),
and callers that wait for a lease (`leasing`).

A stream is one reader (Open, then Flow, Acknowledge and the like) and two writers, of what is done and of what is due,
which take turns: a `Done` waits for at most one `Messages`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import grpc

from daemon import config, errors
from daemon.engine import calls
from daemon.grpc_services import columns, leasing, parsing, pipeline, policies, records, row_requests, status, unary
from tarry.v1 import dispatch_pb2 as pb

if TYPE_CHECKING:
    from daemon.engine.dispatch import DispatchStream
    from daemon.engine.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Dispatch"]
# Of a request on a stream: how many positions were ignored, and of a negative acknowledgement more.
_Outcome: TypeAlias = int | calls.NackOutcome


class Dispatch:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings
        self._frame = unary.Frame(settings)
        self._leasing = leasing.Leasing(engine.requests)

    def handlers(self) -> dict[str, unary.Handler]:
        handler = self._frame.handler
        return {
            "Subscribe": grpc.stream_stream_rpc_method_handler(self._subscribe),
            "CreateSubscription": handler(pb.CreateSubscriptionRequest, self._create_subscription),
            "UpdateSubscription": handler(pb.UpdateSubscriptionRequest, self._update_subscription),
            "DeleteSubscription": handler(pb.DeleteSubscriptionRequest, self._delete_subscription),
            "GetScheduledMessages": self._frame.cancelled_handler(
                pb.GetScheduledMessagesRequest, self._leasing.get_scheduled
            ),
            "Acknowledge": handler(pb.AcknowledgeRequest, self._acknowledge),
            "NegativeAcknowledge": handler(pb.NegativeAcknowledgeRequest, self._negative_acknowledge),
            "ExtendLease": handler(pb.ExtendLeaseRequest, self._extend_lease),
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
        policy = policies.subscription_policy(request.policy)
        created = await self._engine.requests.create_subscription(request.topic, request.subscription, policy)
        return records.as_message(pb.CreateSubscriptionResponse, created)

    async def _update_subscription(self, request: pb.UpdateSubscriptionRequest) -> pb.UpdateSubscriptionResponse:
        policies.require_given(request)
        policy = await self._engine.requests.update_subscription(
            request.topic, request.subscription, policies.subscription_policy(request.policy)
        )
        return pb.UpdateSubscriptionResponse(policy=policies.subscription_policy_message(policy))

    async def _delete_subscription(self, request: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
        dead_letters = await self._engine.requests.delete_subscription(request.topic, request.subscription)
        return pb.DeleteSubscriptionResponse(dead_letters=dead_letters)

    async def _acknowledge(self, request: pb.AcknowledgeRequest) -> pb.AcknowledgeResponse:
        positions = columns.handed_out(request)
        ignored = await self._engine.requests.acknowledge(request.topic, request.subscription, positions)
        return pb.AcknowledgeResponse(ignored=ignored)

    async def _negative_acknowledge(self, request: pb.NegativeAcknowledgeRequest) -> pb.NegativeAcknowledgeResponse:
        nack = columns.nack(request)
        outcome = await self._engine.requests.negative_acknowledge(request.topic, request.subscription, nack)
        return pb.NegativeAcknowledgeResponse(ignored=outcome.ignored, dead_lettered=outcome.dead_lettered)

    async def _extend_lease(self, request: pb.ExtendLeaseRequest) -> pb.ExtendLeaseResponse:
        positions = columns.handed_out(request)
        ignored = await self._engine.requests.extend_lease(
            request.topic, request.subscription, positions, request.lease_ms
        )
        return pb.ExtendLeaseResponse(ignored=ignored)


class _SubscribeStream:
    """One `Subscribe`. When the caller is done, its acknowledgements are still answered and nothing more is sent."""

    def __init__(self, engine: Engine, settings: config.Config, context: pipeline.Context) -> None:
        self._engine = engine
        self._size_bytes_max = settings.limits.message_bytes_max
        self._context = context
        self._pipeline = pipeline.Pipeline(context, settings.grpc)
        # One message is written at a time: what is done and what is due take turns.
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        stream = await self._open(await self._read_open())
        try:
            opened = pb.Opened(
                epoch=stream.epoch, held=stream.held, rebuild_needed=records.rebuild_needed(stream.rebuild_needed)
            )
            await self._context.write(pb.SubscribeResponse(opened=opened).SerializeToString())
            await self._serve(stream)
        except errors.TarryError:
            # What is known of the caller's acknowledgements comes before the end.
            await self._pipeline.settle()
            raise
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
        sender: asyncio.Future[None] = asyncio.create_task(self._send(stream, reader))
        for task in (reader, sender):
            task.add_done_callback(lambda _: wake.set())
        try:
            while self._pipeline.busy or not reader.done():
                await wake.wait()
                wake.clear()
                async with self._writing:
                    await self._pipeline.flush()
                if sender.done() and not reader.done():
                    sender.result()
            reader.result()
        finally:
            async with self._writing:
                await pipeline.end(reader, sender)

    async def _send(self, stream: DispatchStream, reader: asyncio.Future[None]) -> None:
        """Sends what is due until the caller is done."""
        while True:
            handed_out = await stream.next_messages()
            for messages in columns.subscribe_responses(handed_out):
                async with self._writing:
                    if reader.done():
                        return
                    await self._context.write(messages)

    async def _read(self, stream: DispatchStream) -> None:
        while (data := await self._pipeline.read()) is not None:
            self._take(stream, data)
            await self._pipeline.room()

    def _take(self, stream: DispatchStream, data: bytes) -> None:
        size_bytes = len(data)
        if size_bytes <= self._size_bytes_max:
            if (acknowledged := row_requests.acknowledge(data)) is not None:
                request_id, positions = acknowledged
                self._answer(stream, size_bytes, request_id, _acknowledge(stream, request_id, lambda: positions))
                return
            if (nacked := row_requests.negative_acknowledge(data)) is not None:
                request_id, nack = nacked
                self._answer(stream, size_bytes, request_id, _nack(stream, request_id, lambda: nack))
                return
        request = parsing.parse(pb.SubscribeRequest, data, size_bytes_max=self._size_bytes_max)
        work: Callable[[], Awaitable[_Outcome]]
        match request.WhichOneof("request"):
            case "flow" if request.flow.permits > 0:
                stream.grant(request.flow.permits)
            case "acknowledge":
                request_id = request.acknowledge.request_id
                work = _acknowledge(stream, request_id, functools.partial(columns.handed_out, request.acknowledge))
                self._answer(stream, size_bytes, request_id, work)
            case "negative_acknowledge":
                request_id = request.negative_acknowledge.request_id
                work = _nack(stream, request_id, functools.partial(columns.nack, request.negative_acknowledge))
                self._answer(stream, size_bytes, request_id, work)
            case "extend":
                extend = request.extend
                self._answer(stream, size_bytes, extend.request_id, lambda: stream.extend(columns.handed_out(extend)))
            case "flow":
                self._refuse(stream, size_bytes, "flow.permits: 0; it must be at least 1")
            case "open":
                raise errors.InvalidArgument(
                    "open: the stream is open already; a stream has one open, its first message"
                )
            case _:
                self._refuse(
                    stream,
                    size_bytes,
                    "request: it is empty; give flow, acknowledge, negative_acknowledge or extend",
                )

    def _answer(
        self, stream: DispatchStream, size_bytes: int, request_id: int, work: Callable[[], Awaitable[_Outcome]]
    ) -> None:
        answer = functools.partial(_done, stream.epoch, request_id, answered=request_id != 0)
        self._pipeline.submit(size_bytes, work, answer)

    def _refuse(self, stream: DispatchStream, size_bytes: int, text: str) -> None:
        def work() -> Awaitable[int]:
            raise errors.InvalidArgument(text)

        self._pipeline.submit(size_bytes, work, functools.partial(_done, stream.epoch, 0, answered=True))


def _close_unused(opening: asyncio.Future[DispatchStream]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _acknowledge(
    stream: DispatchStream, request_id: int, given: Callable[[], calls.HeldPositions]
) -> Callable[[], Awaitable[int]]:
    def work() -> Awaitable[int]:
        held = given()
        return stream.acknowledge(
            held.ledger_id, held.entry_id, held.deliver_at_ms, held.batch_index, awaited=request_id != 0
        )

    return work


def _nack(
    stream: DispatchStream, request_id: int, given: Callable[[], calls.Nack]
) -> Callable[[], Awaitable[calls.NackOutcome]]:
    return lambda: stream.negative_acknowledge(given(), awaited=request_id != 0)


def _done(epoch: int, request_id: int, outcome: _Outcome | Exception, *, answered: bool) -> bytes | None:
    if not answered:
        return None
    done = pb.Done(request_id=request_id, epoch=epoch)
    if isinstance(outcome, Exception):
        done.error.CopyFrom(status.refusal(outcome))
    elif isinstance(outcome, calls.NackOutcome):
        done.ignored, done.dead_lettered = outcome.ignored, outcome.dead_lettered
    else:
        done.ignored = outcome
    return pb.SubscribeResponse(done=done).SerializeToString()
