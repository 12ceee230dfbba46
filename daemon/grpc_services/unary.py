"""The frame of every call with one request, and one answer or a stream of them.

It parses, checks, calls and encodes, or ends the call with the error's status. It also decides what a departing caller
interrupts. `pipeline` serves calls with a stream of requests.

Handlers take and return bytes, so that a request that does not parse is refused by name (`parsing`), and so that an
answer may be encoded by hand (`row_answers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf import message

from daemon import config, errors
from daemon.grpc_services import admission, parsing, status
from daemon.grpc_services.admission import Context

log = logging.getLogger(__name__)

M = TypeVar("M", bound=message.Message)
T = TypeVar("T")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Answer: TypeAlias = message.Message | bytes


class Frame:
    """A maker of handlers."""

    def __init__(self, settings: config.Config) -> None:
        self._bounds = parsing.Bounds.of(settings)

    def handler(self, request_type: type[M], call: Callable[[M], Coroutine[Any, Any, Answer]]) -> Handler:
        """Make a handler of a call that continues when its caller leaves, so that no change is left half done."""

        async def to_its_end(request: M, context: Context) -> Answer:
            return await _continued(call(request), context)

        return self.cancelled_handler(request_type, to_its_end)

    def settled_handler(
        self,
        request_type: type[M],
        call: Callable[[M], Coroutine[Any, Any, Answer]],
        alone_in_s: Callable[[str], float],
    ) -> Handler:
        """Make a handler of a call on a topic that answers once no former owner acts any longer (`alone_in_s`).

        The call continues when its caller leaves. A caller whose deadline would pass first, or that asks for it, gets
        UNAVAILABLE with the time to wait at once, and nothing is changed.
        """

        async def told(request: M, context: Context) -> Answer:
            topic: str = getattr(request, "topic")  # noqa: B009 - each such request has one
            wait_s = alone_in_s(topic)
            if wait_s and admission.waits_by_itself(context, wait_s):
                wait_ms = math.ceil(wait_s * 1000)
                raise errors.Unavailable(
                    f"topic {topic} was taken over from a daemon that may still hand out rows, for {wait_s:.0f} s at "
                    f"most; nothing was changed, try again then",
                    retry_after_ms=wait_ms,
                    former_owner_ms=wait_ms,
                )
            return await _continued(call(request), context)

        return self.cancelled_handler(request_type, told)

    def bytes_handler(self, call: Callable[[bytes, Context], Awaitable[bytes]]) -> Handler:
        """Make a handler of a call that reads its request from the bytes, and checks names itself."""

        async def handle(data: bytes, context: Context) -> bytes:
            try:
                return await call(data, context)
            except Exception as error:  # noqa: BLE001 - every error has a status
                await status.abort(context, error)

        return grpc.unary_unary_rpc_method_handler(handle)

    def cancelled_handler(self, request_type: type[M], call: Callable[[M, Context], Awaitable[Answer]]) -> Handler:
        """Make a handler of a call that is cancelled when its caller leaves or its deadline passes."""

        async def handle(data: bytes, context: Context) -> bytes:
            return await self._handle(request_type, data, context, call)

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _handle(
        self, request_type: type[M], data: bytes, context: Context, call: Callable[[M, Context], Awaitable[Answer]]
    ) -> bytes:
        try:
            request = parsing.parse(request_type, data, self._bounds)
            context.check(request)
            answer = await call(request, context)
            return answer if isinstance(answer, bytes) else answer.SerializeToString()
        except Exception as error:  # noqa: BLE001 - every error has a status
            await status.abort(context, error)

    def streaming_handler(self, request_type: type[M], call: Callable[[M], AsyncGenerator[Answer]]) -> Handler:
        """Make a handler of a call with many answers, cancelled when its caller leaves or its deadline passes."""

        async def handle(data: bytes, context: Context) -> None:
            try:
                request = parsing.parse(request_type, data, self._bounds)
                context.check(request)
                async with contextlib.aclosing(call(request)) as answers:
                    async for answer in answers:
                        if context.is_audited and isinstance(answer, message.Message):
                            # Each answer counts from the beginning.
                            context.counts = admission.counts_of(answer)
                        await context.write(answer if isinstance(answer, bytes) else answer.SerializeToString())
            except Exception as error:  # noqa: BLE001 - every error has a status
                await status.abort(context, error)

        return grpc.unary_stream_rpc_method_handler(handle)


async def _continued(call: Coroutine[Any, Any, Answer], context: Context) -> Answer:
    """Return the call's answer, like `unbroken`; the audit log learns what was done."""
    context.work = asyncio.ensure_future(call)
    return await unbroken(context.work, context)


async def unbroken(call: Coroutine[Any, Any, T] | asyncio.Future[T], context: Context) -> T:
    """Return the call's answer. The call continues if its waiter is cancelled, and its request then counts as long."""
    work = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        context.count_until(work)
        work.add_done_callback(_tell)
        raise


def _tell(work: asyncio.Future[Any]) -> None:
    """Log the error of a call whose caller has left."""
    if not work.cancelled() and (error := work.exception()) is not None:
        level = logging.INFO if isinstance(error, errors.TarryError) else logging.ERROR
        log.log(level, "a call failed after its caller had left: %r", error)
