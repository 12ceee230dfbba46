"""Serves `tarry.v1.DelayedDelivery`: adds positions, and cancels or reschedules them before they are due.

Adds call the engine one request at a time or pipelined on a stream. The service also looks up, trims and clears
positions.

The gRPC server alone imports it: a module for each service of the contract.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

import grpc

from daemon import config, errors
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome, AddRow
from daemon.core.quotas import Caller
from daemon.grpc_services import admission, parsing, pipeline, row_answers, row_requests, status, unary
from daemon.grpc_services.admission import Context
from daemon.owner.engine import Engine
from tarry.v1 import delayed_delivery_pb2 as pb

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["DelayedDelivery"]


class DelayedDelivery:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings
        self._frame = unary.Frame(settings)
        self._bounds = parsing.Bounds.of(settings)
        self._draining = asyncio.Event()

    def handlers(self) -> dict[str, unary.Handler]:
        handler = self._frame.handler
        settled = functools.partial(self._frame.settled_handler, alone_in_s=self._engine.requests.alone_in_s)
        return {
            "AddMessages": self._frame.bytes_handler(self._add),
            "StreamAddMessages": grpc.stream_stream_rpc_method_handler(self._stream_add),
            "CancelMessages": settled(pb.CancelMessagesRequest, self._cancel),
            "RescheduleMessages": settled(pb.RescheduleMessagesRequest, self._reschedule),
            "ContainsMessages": handler(pb.ContainsMessagesRequest, self._contains),
            "TrimMessages": settled(pb.TrimMessagesRequest, self._trim),
            "ClearMessages": settled(pb.ClearMessagesRequest, self._clear),
        }

    async def _add(self, data: bytes, context: Context) -> bytes:
        topic, subscription, rows = row_requests.add(data, self._bounds, check=context.check_named)
        caller = Caller(admission.client_of(context), len(data))
        requests = self._engine.requests
        answer: Awaitable[AddOutcome] | None
        if isinstance(rows, AddRow):
            answer = requests.add_row(topic, rows, caller)
            if answer is not None:
                return row_answers.add_response(await answer)
            rows = rows.batch()
        answer = requests.add_at_once(topic, rows, caller) if subscription is None else None
        if answer is None:
            answer = unary.unbroken(requests.add(topic, rows, subscription, caller), context)
        return row_answers.add_response(await answer)

    async def _cancel(self, request: pb.CancelMessagesRequest) -> pb.CancelMessagesResponse:
        ledger_id, entry_id = row_requests.positions(request)
        return row_answers.cancel_response(
            await self._engine.requests.cancel(request.topic, request.subscription or None, ledger_id, entry_id)
        )

    async def _reschedule(self, request: pb.RescheduleMessagesRequest) -> pb.RescheduleMessagesResponse:
        batch = row_requests.reschedule_batch(request)
        return row_answers.reschedule_response(
            await self._engine.requests.reschedule(request.topic, request.subscription or None, batch)
        )

    async def _contains(self, request: pb.ContainsMessagesRequest) -> bytes:
        ranges = row_requests.entry_ranges(request)
        contained = await self._engine.requests.contains(request.topic, ranges, request.subscription or None)
        return row_answers.contains_response(contained)

    async def _trim(self, request: pb.TrimMessagesRequest) -> pb.TrimMessagesResponse:
        ranges = row_requests.ledger_ranges(request)
        trimmed = await self._engine.requests.trim(
            request.topic, request.subscription or None, ranges, dead_letter=request.dead_letter
        )
        return pb.TrimMessagesResponse(trimmed=trimmed.rows, more=trimmed.more, dead_lettered=trimmed.dead_lettered)

    async def _clear(self, request: pb.ClearMessagesRequest) -> pb.ClearMessagesResponse:
        cleared = await self._engine.requests.clear(request.topic, request.subscription or None)
        return pb.ClearMessagesResponse(cleared=cleared)

    def end_streams(self) -> None:
        """Make streams answer the requests that they have read, and end with UNAVAILABLE; the daemon stops."""
        self._draining.set()

    async def _stream_add(self, _: object, context: Context) -> None:
        try:
            await _AddStream(self._engine, self._settings, context, self._draining).run()
        except Exception as error:  # noqa: BLE001 - every error has a status
            await status.abort(context, error)


class _AddStream:
    """One `StreamAddMessages`: a reader that submits, and a writer until the last request is answered."""

    def __init__(self, engine: Engine, settings: config.Config, context: Context, draining: asyncio.Event) -> None:
        self._engine = engine
        self._bounds = parsing.Bounds.of(settings)
        self._context = context
        self._client = admission.client_of(context)
        self._pipeline = pipeline.Pipeline(context, settings.grpc)
        self._draining = draining

    async def run(self) -> None:
        try:
            await self._serve()
        except errors.TarryError:
            await self._pipeline.settle()
            raise

    async def _serve(self) -> None:
        wake = self._pipeline.wake
        reader = asyncio.create_task(self._read())
        draining = asyncio.create_task(self._draining.wait())
        for task in (reader, draining):
            task.add_done_callback(lambda _: wake.set())
        try:
            while self._pipeline.busy or not reader.done():
                await wake.wait()
                wake.clear()
                await self._pipeline.flush(self._pipeline.known)
                if draining.done() and not reader.done():
                    raise errors.Unavailable("the daemon is stopping; try again")
            reader.result()
        finally:
            await pipeline.end(reader, draining)

    async def _read(self) -> None:
        while isinstance(data := await self._context.read(), bytes):
            self._take(data)
            # An idle stream keeps no request.
            del data
            if not self._pipeline.has_room:
                await self._pipeline.room()

    def _take(self, data: bytes) -> None:
        request_id, work = self._parse(data)
        self._pipeline.submit(len(data), work, functools.partial(_answer, request_id))

    def _parse(self, data: bytes) -> tuple[int, Callable[[], Awaitable[AddOutcome]]]:
        """Read the request's id and its work. Raises `InvalidArgument` if there is no id by which to refuse it."""
        try:
            request_id, topic, subscription, rows = row_requests.stream_add(data, self._bounds)
        except errors.InvalidArgument as error:
            refused_id = parsing.leading_number(data)
            if refused_id is None:
                raise
            return refused_id, functools.partial(_refuse, str(error))
        caller = Caller(self._client, len(data))
        return request_id, functools.partial(self._add, topic, rows, subscription, caller)

    def _add(
        self,
        topic: str,
        batch: Callable[[], AddBatch],
        subscription: str | None,
        caller: Caller,
    ) -> Awaitable[AddOutcome]:
        self._context.check_topic(topic)
        requests, rows = self._engine.requests, batch()
        answer = requests.add_at_once(topic, rows, caller) if subscription is None else None
        return requests.add(topic, rows, subscription, caller) if answer is None else answer


def _refuse(text: str) -> Awaitable[AddOutcome]:
    # Another error, since that of the parser has the request in its traceback.
    raise errors.InvalidArgument(text)


def _answer(request_id: int, outcome: AddOutcome | Exception) -> bytes:
    if isinstance(outcome, Exception):
        return pb.StreamAddMessagesResponse(request_id=request_id, error=status.refusal(outcome)).SerializeToString()
    return row_answers.stream_add_response(request_id, outcome)
