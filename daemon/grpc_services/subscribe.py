"""Serves one subscription's stream: a dispatcher's requests, and the rows that are due for it.

A call of its own (`dispatch_service`) or a lane (`subscribe_many`) carries the stream. A stream is one reader (Open,
then Flow, Acknowledge and the like) and two writers, of answers and of due rows. The writers take turns, in the order
in which they ask: a `Done` waits for at most one delivery, and no delivery comes after a `Done` that was decided later.
The engine's stream is closed however the call ends.

The requests and answers that only KEY_SHARED streams have are here, too.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeAlias

from daemon import call_values, config, errors
from daemon.core.decisions.claims import Ignored
from daemon.core.key_shared.hash_slots import HashRange
from daemon.grpc_services import parsing, pipeline, row_answers, row_requests, status, value_messages
from daemon.owner.engine import Engine
from daemon.topic.key_shared_streams import KeySharedStream, Outgoing
from daemon.topic.open_streams import UNBOUNDED, DispatchStream, Outlet
from tarry.v1 import dispatch_pb2 as pb


def require_none(request: pb.Open) -> None:
    """Refuse consumers, which a SHARED stream has not. Raises `InvalidArgument`."""
    for name in ("consumers", "held_consumer_id", "held_key_hash"):
        if given := len(getattr(request, name)):
            raise errors.InvalidArgument(f"{name}: {given} values; a SHARED stream has none")


def consumer(given: pb.Consumer) -> call_values.Consumer:
    return call_values.Consumer(
        consumer_id=given.consumer_id,
        name=given.name,
        address=given.address,
        permits=given.permits,
        hash_ranges=tuple(HashRange(each.first, each.last) for each in given.hash_ranges),
    )


def plan_request(stream: KeySharedStream, request: pb.PlanDispatch) -> Awaitable[None]:
    """Start a plan, answered by `Planned` in the order of the stream's messages. Raises `InvalidArgument`."""
    if not request.request_id:
        raise errors.InvalidArgument("request_id: 0; it must be at least 1, since Planned answers by it")
    return stream.plan(request.request_id, *row_requests.planned(request))


def consumer_change(stream: KeySharedStream, request: pb.SubscribeRequest) -> Awaitable[Ignored]:
    """Start any other KEY_SHARED request, answered by `Done`. Raises `InvalidArgument`.

    A consumer has joined or left when this returns, so the caller's next request sees the change.
    """
    match request.WhichOneof("request"):
        case "add_consumer":
            if not request.add_consumer.HasField("consumer"):
                raise errors.InvalidArgument("consumer: it is missing; say who joins")
            stream.add_consumer(consumer(request.add_consumer.consumer))
        case "remove_consumer":
            return _none_ignored(stream.remove_consumer(request.remove_consumer.consumer_id))
        case "mark_delete":
            mark = request.mark_delete
            return _none_ignored(stream.mark_delete(mark.ledger_id, mark.entry_id))
    return _none_ignored()


async def _none_ignored(done: Awaitable[None] | None = None) -> Ignored:
    if done is not None:
        await done
    return Ignored.nothing()


def key_shared_responses(outgoing: Outgoing) -> Iterator[bytes]:
    """Encode what the stream sends next."""
    match outgoing:
        case call_values.HandedOut():
            yield from row_answers.subscribe_responses(outgoing)
        case call_values.Planned():
            yield row_answers.planned_response(outgoing)
        case call_values.TakenBack():
            yield from row_answers.taken_back_responses(outgoing)


# The outcome of a request: ignored positions, and more for a negative acknowledgement
_Outcome: TypeAlias = Ignored | call_values.NackOutcome
_Work: TypeAlias = Callable[[], Awaitable[_Outcome]]
_Opened: TypeAlias = DispatchStream | KeySharedStream


# All messages of one `Open` together: 1.6 million held positions and more
OPEN_BYTES_MAX = 64 << 20
_HELD_COLUMNS = tuple(field.name for field in pb.Open.DESCRIPTOR.fields if field.name.startswith("held_"))


class Dispatcher(pipeline.Connection, Protocol):
    """The subscribing caller: a call of its own, or a lane."""

    def check_topic(self, topic: str) -> None:
        """Refuse a topic that the caller may not use. Raises `PermissionDenied`."""

    def tell_request(
        self, work: asyncio.Future[call_values.NackOutcome], counts: Callable[[Any], dict[str, int]], **named: str | int
    ) -> None:
        """Append a line for a request to the audit log at the end of its work."""


async def serve(
    engine: Engine,
    settings: config.Config,
    dispatcher: Dispatcher,
    *,
    outlet: Outlet = UNBOUNDED,
    put: Callable[[bytes], None] | None = None,
) -> Exception | None:
    """Serve one subscription to its end, and name the owner if it is another daemon.

    Returns the error that ended it, or None if its dispatcher was done. `outlet` is asked before rows are delivered.
    `put` sends an answer without waiting, once the outlet takes it; None if that is not possible.
    """
    try:
        await SubscribeStream(engine, settings, dispatcher, outlet, put).run()
    except Exception as error:  # noqa: BLE001 - every error has a status
        if isinstance(error, errors.NotOwner):
            moved = pb.Moved(owner_address=error.owner_address)
            await dispatcher.write(pb.SubscribeResponse(moved=moved).SerializeToString())
        return error
    return None


class SubscribeStream:
    """The stream.

    Once the dispatcher is done, its acknowledgements are still answered, and nothing more is delivered.
    """

    def __init__(
        self,
        engine: Engine,
        settings: config.Config,
        dispatcher: Dispatcher,
        outlet: Outlet,
        put: Callable[[bytes], None] | None,
    ) -> None:
        self._engine = engine
        self._bounds = parsing.Bounds.of(settings)
        self._dispatcher = dispatcher
        self._outlet = outlet
        self._put = put
        self._pipeline = pipeline.Pipeline(dispatcher, settings.grpc)
        # One message is written at a time: answers and due rows take turns.
        self._writing = asyncio.Lock()
        self._named: dict[str, str] = {}

    async def run(self) -> None:
        opening = await self._read_open()
        stream = await self._open(opening)
        stream.outlet = self._outlet
        try:
            opened = pb.Opened(
                epoch=stream.epoch,
                held=stream.held,
                rebuild_needed=value_messages.rebuild_needed(stream.rebuild_needed),
                not_held=stream.not_held.tolist(),
            )
            await self._dispatcher.write(pb.SubscribeResponse(opened=opened).SerializeToString())
            await self._serve(stream)
        except errors.TarryError:
            # Known outcomes of the caller's acknowledgements are sent before the end.
            await self._pipeline.settle()
            raise
        finally:
            stream.close()

    async def _read_open(self) -> pb.Open:
        """Read the first message, and those that continue its held columns."""
        opening = await self._read_part_of_open("the first message is")
        parsing.require_known("type", opening.type, pb.SubscriptionType.DESCRIPTOR)
        self._named = {"topic": opening.topic, "subscription": opening.subscription}
        self._dispatcher.check_topic(opening.topic)
        if opening.more_held:
            async with self._dispatcher.receiving.long_request("open"):
                await self._read_more_held(opening)
        return opening

    async def _read_more_held(self, opening: pb.Open) -> None:
        size_bytes = opening.ByteSize()
        is_more = True
        while is_more:
            part = await self._read_part_of_open("after one with more_held comes")
            is_more = part.more_held
            size_bytes += part.ByteSize()
            if size_bytes > OPEN_BYTES_MAX:
                raise errors.InvalidArgument(f"more_held: {size_bytes} bytes, the limit is {OPEN_BYTES_MAX}")
            for name in _HELD_COLUMNS:
                getattr(opening, name).MergeFrom(getattr(part, name))

    async def _read_part_of_open(self, expected: str) -> pb.Open:
        data = await self._dispatcher.read()
        if not isinstance(data, bytes):
            raise errors.InvalidArgument("open: the stream ended before it; the first message is open")
        request = parsing.parse(pb.SubscribeRequest, data, self._bounds)
        kind = request.WhichOneof("request")
        if kind != "open":
            raise errors.InvalidArgument(f"open: {expected} {kind or 'empty'}; it must be open")
        return request.open

    async def _open(self, request: pb.Open) -> _Opened:
        """Open the engine's stream; close it as soon as it is open if the caller has left meanwhile."""
        opening = asyncio.ensure_future(self._opened(request))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    async def _opened(self, request: pb.Open) -> _Opened:
        requests, names = self._engine.requests, (request.topic, request.subscription)
        match request.type:
            case pb.SubscriptionType.SUBSCRIPTION_TYPE_SHARED:
                require_none(request)
                return await requests.open_dispatch(*names, row_requests.held(request))
            case pb.SubscriptionType.SUBSCRIPTION_TYPE_KEY_SHARED:
                consumers = [consumer(each) for each in request.consumers]
                return await requests.open_key_shared(*names, consumers, row_requests.held_by_consumers(request))
        name = pb.SubscriptionType.Name(request.type)
        raise errors.InvalidArgument(
            f"type: {name}; it must be SUBSCRIPTION_TYPE_SHARED or SUBSCRIPTION_TYPE_KEY_SHARED"
        )

    async def _serve(self, stream: _Opened) -> None:
        wake = self._pipeline.wake
        reader: asyncio.Future[None] = asyncio.create_task(self._read(stream))
        sender: asyncio.Future[None] = asyncio.create_task(self._send(stream, reader))
        for task in (reader, sender):
            task.add_done_callback(lambda _: wake.set())
        if isinstance(stream, KeySharedStream):
            reader.add_done_callback(lambda _: stream.sends_no_more())
        try:
            while self._pipeline.busy or not reader.done():
                await wake.wait()
                wake.clear()
                # A delivery that waits for its turn goes before an answer that is known later: that may be the answer
                # to an acknowledgement of it.
                answers = self._pipeline.known
                async with self._writing:
                    await self._pipeline.flush(answers)
                if sender.done() and not reader.done():
                    sender.result()
            reader.result()
        finally:
            async with self._writing:
                await pipeline.end(reader, sender)

    async def _send(self, stream: _Opened, reader: asyncio.Future[None]) -> None:
        """Deliver due rows until the caller is done."""
        while True:
            outgoing = await (stream.next() if isinstance(stream, KeySharedStream) else stream.next_messages())
            # A plan that was made must be answered.
            is_owed = isinstance(outgoing, call_values.Planned)
            async with self._writing:
                for response in key_shared_responses(outgoing):
                    if reader.done() and not is_owed:
                        return
                    await self._dispatcher.write(response)

    async def _read(self, stream: _Opened) -> None:
        of_permits = None if isinstance(stream, KeySharedStream) else stream
        if of_permits is not None and self._put is not None:
            of_permits.send = functools.partial(_put_all, self._put)
        try:
            while isinstance(data := await self._dispatcher.read(), bytes):
                self._take(stream, data)
                # An idle stream keeps no request.
                del data
                if not self._pipeline.has_room:
                    await self._pipeline.room()
        finally:
            if of_permits is not None:
                of_permits.send = None

    def _take(self, stream: _Opened, data: bytes) -> None:
        size_bytes = len(data)
        request = row_requests.subscribe(data, self._bounds)
        match request:
            case row_requests.Acknowledged(request_id, positions):
                self._answer(
                    stream,
                    size_bytes,
                    request_id,
                    lambda: stream.acknowledge(positions(), awaited=request_id != 0),
                )
                return
            case row_requests.NegativelyAcknowledged(request_id, nack):
                self._answer(
                    stream,
                    size_bytes,
                    request_id,
                    lambda: self._negatively_acknowledge(stream, request_id, nack()),
                    waits_for_caller=isinstance(stream, KeySharedStream),
                )
                return
        kind = request.WhichOneof("request")
        match kind:
            case "flow":
                self._flow(stream, size_bytes, request.flow)
            case "extend":
                extend = request.extend
                self._answer(
                    stream, size_bytes, extend.request_id, lambda: stream.extend(row_requests.handed_out(extend))
                )
            case "open":
                raise errors.InvalidArgument(
                    "open: the stream is open already; a stream has one open, its first message"
                )
            case None:
                self._refuse(
                    stream,
                    size_bytes,
                    "request: it is empty; give flow, acknowledge, negative_acknowledge or extend",
                )
            case _:
                self._of_key_shared(stream, size_bytes, kind, request)

    def _negatively_acknowledge(
        self, stream: _Opened, request_id: int, nack: call_values.Nack
    ) -> Awaitable[call_values.NackOutcome]:
        if not nack.reject:
            return stream.negative_acknowledge(nack, awaited=request_id != 0)
        asked = len(nack.positions)
        work = asyncio.ensure_future(stream.negative_acknowledge(nack, awaited=True))
        self._dispatcher.tell_request(
            work,
            lambda done: {"asked": asked, "dead_lettered": done.dead_lettered, "ignored": len(done.ignored)},
            request_id=request_id,
            **self._named,
        )
        return work

    def _of_key_shared(self, stream: _Opened, size_bytes: int, kind: str, request: pb.SubscribeRequest) -> None:
        request_id: int = getattr(request, kind).request_id
        if not isinstance(stream, KeySharedStream):
            self._refuse(stream, size_bytes, f"{kind}: the stream is SHARED, and has no consumers", request_id)
        elif kind == "plan_dispatch":
            answer = functools.partial(_not_planned, stream.epoch, request_id)
            plan = functools.partial(plan_request, stream, request.plan_dispatch)
            self._pipeline.submit(size_bytes, plan, answer, waits_for_caller=True)
        else:
            change = functools.partial(consumer_change, stream, request)
            self._answer(stream, size_bytes, request_id, change, waits_for_caller=True)

    def _flow(self, stream: _Opened, size_bytes: int, flow: pb.Flow) -> None:
        if not flow.permits:
            self._refuse(stream, size_bytes, "flow.permits: 0; it must be at least 1")
        elif isinstance(stream, KeySharedStream):
            if flow.consumer_id:
                stream.grant(flow.permits, flow.consumer_id)
            else:
                self._refuse(stream, size_bytes, "flow.consumer_id: 0; it must be at least 1 on a KEY_SHARED stream")
        elif flow.consumer_id:
            self._refuse(stream, size_bytes, f"flow.consumer_id: {flow.consumer_id}; the stream is SHARED: give none")
        else:
            stream.grant(flow.permits)

    def _answer(
        self, stream: _Opened, size_bytes: int, request_id: int, work: _Work, *, waits_for_caller: bool = False
    ) -> None:
        answer = functools.partial(_done, stream.epoch, request_id, answered=request_id != 0)
        self._pipeline.submit(size_bytes, work, answer, waits_for_caller=waits_for_caller)

    def _refuse(self, stream: _Opened, size_bytes: int, text: str, request_id: int = 0) -> None:
        def work() -> Awaitable[Ignored]:
            raise errors.InvalidArgument(text)

        self._pipeline.submit(size_bytes, work, functools.partial(_done, stream.epoch, request_id, answered=True))


def _put_all(put: Callable[[bytes], None], handed_out: call_values.HandedOut) -> None:
    for response in key_shared_responses(handed_out):
        put(response)


def _not_planned(epoch: int, request_id: int, outcome: Exception | None) -> bytes | None:
    """Return the answer to a refused plan, or None, since `Planned` has answered any other."""
    return None if outcome is None else _done(epoch, request_id, outcome, answered=True)


def _close_unused(opening: asyncio.Future[_Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _done(epoch: int, request_id: int, outcome: _Outcome | Exception, *, answered: bool) -> bytes | None:
    if not answered:
        return None
    done = pb.Done(request_id=request_id, epoch=epoch)
    if isinstance(outcome, Exception):
        done.error.CopyFrom(status.refusal(outcome))
    elif isinstance(outcome, call_values.NackOutcome):
        done.dead_lettered = outcome.dead_lettered
        row_answers.fill_ignored(done, outcome.ignored)
    else:
        row_answers.fill_ignored(done, outcome)
    return pb.SubscribeResponse(done=done).SerializeToString()
