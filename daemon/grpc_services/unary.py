"""The frame of every call with one request, and one answer or a stream of them.

Owns: parse, call, encode, or end with the error's status; what a caller that goes away breaks off.
Does not own: what a call does (`admin`, `inspect_service` ...) and calls with a stream of requests (`pipeline`).

Handlers take and give bytes, so that a request that does not parse is refused by name (`parsing`), and so that an
answer may be encoded by hand (`columns`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf import message

from daemon import config
from daemon.engine import calls
from daemon.grpc_services import callers, parsing, status
from daemon.grpc_services.pipeline import Context

M = TypeVar("M", bound=message.Message)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Answer: TypeAlias = message.Message | bytes


class Frame:
    """Makes handlers of calls."""

    def __init__(self, settings: config.Config) -> None:
        self._size_bytes_max = settings.limits.message_bytes_max

    def handler(self, request_type: type[M], call: Callable[[M], Awaitable[Answer]]) -> Handler:
        """A call that goes on when its caller goes away: that does not stop the engine halfway."""

        async def unbroken(request: M, _: Context) -> Answer:
            return await asyncio.shield(asyncio.ensure_future(call(request)))

        return self.cancelled_handler(request_type, unbroken)

    def caller_handler(self, request_type: type[M], call: Callable[[M, calls.Caller], Awaitable[Answer]]) -> Handler:
        """The same, of a call that is told who makes it and how large the request is."""

        async def handle(data: bytes, context: Context) -> bytes:
            async def unbroken(request: M, _: Context) -> Answer:
                caller = callers.caller_of(context, len(data))
                return await asyncio.shield(asyncio.ensure_future(call(request, caller)))

            return await self._handle(request_type, data, context, unbroken)

        return grpc.unary_unary_rpc_method_handler(handle)

    def cancelled_handler(self, request_type: type[M], call: Callable[[M, Context], Awaitable[Answer]]) -> Handler:
        """A call that is cancelled when its caller goes away or its deadline is over."""

        async def handle(data: bytes, context: Context) -> bytes:
            return await self._handle(request_type, data, context, call)

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _handle(
        self, request_type: type[M], data: bytes, context: Context, call: Callable[[M, Context], Awaitable[Answer]]
    ) -> bytes:
        try:
            request = parsing.parse(request_type, data, size_bytes_max=self._size_bytes_max)
            answer = await call(request, context)
            return answer if isinstance(answer, bytes) else answer.SerializeToString()
        except Exception as error:  # noqa: BLE001 - every error has a status
            await status.abort(context, error)

    def streaming_handler(self, request_type: type[M], call: Callable[[M], AsyncGenerator[Answer]]) -> Handler:
        """A call with many answers, cancelled when its caller goes away or its deadline is over."""

        async def handle(data: bytes, context: Context) -> None:
            try:
                request = parsing.parse(request_type, data, size_bytes_max=self._size_bytes_max)
                async with contextlib.aclosing(call(request)) as answers:
                    async for answer in answers:
                        await context.write(answer if isinstance(answer, bytes) else answer.SerializeToString())
            except Exception as error:  # noqa: BLE001 - every error has a status
                await status.abort(context, error)

        return grpc.unary_stream_rpc_method_handler(handle)
