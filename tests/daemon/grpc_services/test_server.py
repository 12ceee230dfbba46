"""Health, reflection, and that the server has every call of the contract."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from daemon import config
from daemon.engine import calls
from daemon.grpc_services import delayed_delivery, dispatch, inspect_service, server
from tests.daemon.grpc_services.conftest import Edge
from tests.support.fake_engine import FakeEngine

SERVICES = ["", "tarry.v1.DelayedDelivery", "tarry.v1.Dispatch", "tarry.v1.Inspect"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("module", "service"),
    [
        (delayed_delivery, delayed_delivery.DelayedDelivery),
        (dispatch, dispatch.Dispatch),
        (inspect_service, inspect_service.Inspect),
    ],
)
def test_each_call_of_the_contract_has_a_handler(module: Any, service: Any, settings: config.Config) -> None:
    handlers = service(FakeEngine(settings), settings).handlers()
    assert set(handlers) == {method.name for method in module.DESCRIPTOR.methods}
    for method in module.DESCRIPTOR.methods:
        assert handlers[method.name].request_streaming == method.client_streaming
        assert handlers[method.name].response_streaming == method.server_streaming


@pytest.mark.parametrize("service", SERVICES)
async def test_health_follows_the_engine(edge: Edge, unhealthy: calls.Health, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(edge.caller.channel)
    watch = cast(Any, stub).Watch(health_pb2.HealthCheckRequest(service=service), timeout=20)
    assert (await watch.read()).status == SERVING
    edge.engine.set_health(unhealthy)
    assert (await watch.read()).status == NOT_SERVING
    edge.engine.set_health(calls.Health(serving=True, reason=""))
    assert (await watch.read()).status == SERVING
    watch.cancel()


async def test_a_draining_server_says_so_before_it_ends(edge: Edge) -> None:
    stub = health_pb2_grpc.HealthStub(edge.caller.channel)
    watch = cast(Any, stub).Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert (await watch.read()).status == SERVING
    draining = asyncio.create_task(edge.server.drain())
    assert (await watch.read()).status == NOT_SERVING
    await draining


async def test_reflection_names_the_services(edge: Edge) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cast(Any, edge.caller.channel))
    call = cast(Any, stub).ServerReflectionInfo(timeout=20)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {*SERVICES[1:], "grpc.health.v1.Health"}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="tarry.v1.Dispatch"))
    assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_two_servers_cannot_have_one_port(edge: Edge) -> None:
    taken = config.load(environment={}, overrides=[f"grpc.listen=127.0.0.1:{edge.port}"])
    with pytest.raises(OSError, match=str(edge.port)):
        server.Server(taken).bind()
