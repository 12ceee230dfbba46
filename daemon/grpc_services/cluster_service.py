"""Serves `tarry.v1.Cluster`: the daemon that owns a topic, and the features of this one.

The gRPC server alone imports it: a module for each service of the contract.
"""

from __future__ import annotations

import importlib.metadata

from daemon import config
from daemon.grpc_services import unary, value_messages
from daemon.owner.engine import Engine
from tarry.v1 import cluster_pb2 as pb

# The version of the wire protocol
API = 1
# Features beyond its first form; PROTOCOL.md says what a client does without one
FEATURES = ("handout_names", "on_invalid", "retention", "subscribe_many", "held_more")
DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Cluster"]


class Cluster:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._requests = engine.requests
        # Read once, since it comes from a file
        self._version = importlib.metadata.version("tarryd")
        self._message_bytes_max = settings.limits.message_bytes_max
        self._handler = unary.Frame(settings).handler

    def handlers(self) -> dict[str, unary.Handler]:
        return {
            "LookupTopic": self._handler(pb.LookupTopicRequest, self._lookup_topic),
            "GetVersion": self._handler(pb.GetVersionRequest, self._get_version),
        }

    async def _lookup_topic(self, request: pb.LookupTopicRequest) -> pb.LookupTopicResponse:
        return value_messages.as_message(pb.LookupTopicResponse, await self._requests.lookup(request.topic))

    async def _get_version(self, _: pb.GetVersionRequest) -> pb.GetVersionResponse:
        return pb.GetVersionResponse(
            version=self._version, api=API, feature=FEATURES, message_bytes_max=self._message_bytes_max
        )
