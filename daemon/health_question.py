"""The question whether a daemon serves, as `tarryd health` asks it."""

from __future__ import annotations

from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def serves(address: str, *, timeout_s: float) -> bool:
    """Asks the daemon at an address without TLS: whether it answers that it serves."""
    with grpc.insecure_channel(address) as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
