"""Calls of a service for a client without a library, made from the service's descriptor.

Owns: the calls of one service, each made when it is first used. Does not own: the channel.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory


class Stub:
    """The calls of the only service of a generated module, an attribute each. They block where the channel does."""

    def __init__(self, module: ModuleType, channel: grpc.Channel | grpc.aio.Channel) -> None:
        (self._service,) = module.DESCRIPTOR.services_by_name.values()
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for what is no call of the service."""
        method = self._service.methods_by_name.get(name)
        if method is None:
            raise AttributeError(f"{self._service.full_name} has no call {name}")
        ends = ("stream" if streaming else "unary" for streaming in (method.client_streaming, method.server_streaming))
        call = getattr(self._channel, "_".join(ends))(
            f"/{self._service.full_name}/{name}",
            request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        setattr(self, name, call)
        return call
