"""The frame of every call with one request and one answer: parse, call, encode, or end with the error's status.

Handlers take and give bytes, so that a request that does not parse is refused by name (`parsing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf import message

from daemon.grpc_services import parsing, status
from daemon.grpc_services.pipeline import Context

M = TypeVar("M", bound=message.Message)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def handler(request_type: type[M], call: Callable[[M], Awaitable[message.Message]], *, size_bytes_max: int) -> Handler:
    async def handle(data: bytes, context: Context) -> bytes:
        try:
            request = parsing.parse(request_type, data, size_bytes_max=size_bytes_max)
            # A caller that goes away does not stop the engine halfway.
            answer = await asyncio.shield(asyncio.ensure_future(call(request)))
            return answer.SerializeToString()
        except Exception as error:  # noqa: BLE001 - every error has a status
            await status.abort(context, error)

    return grpc.unary_unary_rpc_method_handler(handle)
