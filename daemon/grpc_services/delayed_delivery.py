"""`tarry.v1.DelayedDelivery`: positions go in.

Owns: both ways to call the engine's `add`, one request at a time and pipelined.
Does not own: the decision about the rows (engine) and the form of columns and errors (`columns`, `status`).
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
from tarry.v1 import delayed_delivery_pb2 as pb

if TYPE_CHECKING:
    from daemon.engine.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["DelayedDelivery"]


class DelayedDelivery:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings

    def handlers(self) -> dict[str, unary.Handler]:
        size_bytes_max = self._settings.limits.message_bytes_max
        return {
            "AddMessages": unary.handler(pb.AddMessagesRequest, self._add, size_bytes_max=size_bytes_max),
            "StreamAddMessages": grpc.stream_stream_rpc_method_handler(self._stream_add),
        }

    async def _add(self, request: pb.AddMessagesRequest) -> pb.AddMessagesResponse:
        return columns.add_response(await self._engine.requests.add(request.topic, columns.add_batch(request)))

    async def _stream_add(self, _: object, context: pipeline.Context) -> None:
        try:
            await _AddStream(self._engine, self._settings, context).run()
        except Exception as error:  # noqa: BLE001 - every error has a status
            await status.abort(context, error)


class _AddStream:
    """One `StreamAddMessages`: a reader that submits, and a writer until the caller is done and answered."""

    def __init__(self, engine: Engine, settings: config.Config, context: pipeline.Context) -> None:
        self._engine = engine
        self._size_bytes_max = settings.limits.message_bytes_max
        self._pipeline = pipeline.Pipeline(context, settings.grpc)

    async def run(self) -> None:
        wake = self._pipeline.wake
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: wake.set())
        try:
            while self._pipeline.busy or not reader.done():
                await wake.wait()
                wake.clear()
                await self._pipeline.flush()
            reader.result()
        finally:
            await pipeline.end(reader)

    async def _read(self) -> None:
        while (data := await self._pipeline.read()) is not None:
            request_id, work = self._parse(data)
            self._pipeline.submit(len(data), work, functools.partial(_answer, request_id))
            await self._pipeline.room()

    def _parse(self, data: bytes) -> tuple[int, functools.partial[Awaitable[calls.AddOutcome]]]:
        """The request's id and its work. Raises `InvalidArgument` when there is no id by which to refuse it."""
        try:
            request = parsing.parse(pb.StreamAddMessagesRequest, data, size_bytes_max=self._size_bytes_max)
        except errors.InvalidArgument as error:
            request_id = parsing.leading_number(data)
            if request_id is None:
                raise
            return request_id, functools.partial(_refuse, error)
        return request.request_id, functools.partial(self._add, request.add)

    def _add(self, request: pb.AddMessagesRequest) -> Awaitable[calls.AddOutcome]:
        return self._engine.requests.add(request.topic, columns.add_batch(request))


def _refuse(error: errors.InvalidArgument) -> Awaitable[calls.AddOutcome]:
    raise error


def _answer(request_id: int, outcome: calls.AddOutcome | Exception) -> bytes:
    if isinstance(outcome, Exception):
        return pb.StreamAddMessagesResponse(request_id=request_id, error=status.refusal(outcome)).SerializeToString()
    return pb.StreamAddMessagesResponse(request_id=request_id, added=columns.add_response(outcome)).SerializeToString()
