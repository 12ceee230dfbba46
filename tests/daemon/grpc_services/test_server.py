"""Health, reflection, and that the server has every call of the contract."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pkgutil
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from daemon import call_values, config
from daemon.grpc_services import (
    admin_service,
    cluster_service,
    delayed_delivery_service,
    dispatch_service,
    inspect_service,
    ledger_deletion_service,
    server,
)
from daemon.owner.engine import Engine
from tarry import v1
from tarry.v1 import delayed_delivery_pb2 as pb
from tests._support.patience import wait_until
from tests.daemon.grpc_services._support.watched_calls import until
from tests.daemon.grpc_services.conftest import Edge, admission_of

SERVICES = [
    "",
    "tarry.v1.DelayedDelivery",
    "tarry.v1.Dispatch",
    "tarry.v1.Inspect",
    "tarry.v1.Admin",
    "tarry.v1.LedgerDeletion",
    "tarry.v1.Cluster",
]
METHODS: list[MethodDescriptor] = [
    method
    for module in pkgutil.iter_modules(v1.__path__, f"{v1.__name__}.")
    for service in importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("module", "service"),
    [
        (delayed_delivery_service, delayed_delivery_service.DelayedDelivery),
        (dispatch_service, dispatch_service.Dispatch),
        (inspect_service, inspect_service.Inspect),
        (admin_service, admin_service.Admin),
        (ledger_deletion_service, ledger_deletion_service.LedgerDeletion),
        (cluster_service, cluster_service.Cluster),
    ],
)
async def test_each_call_of_the_contract_has_a_handler(
    module: Any, service: Any, settings: config.Config, engine: Engine
) -> None:
    handlers = service(engine, settings).handlers()
    assert set(handlers) == {method.name for method in module.DESCRIPTOR.methods}
    for method in module.DESCRIPTOR.methods:
        assert handlers[method.name].request_streaming == method.client_streaming
        assert handlers[method.name].response_streaming == method.server_streaming


async def code_of(channel: grpc.aio.Channel, path: str, *, streams: bool) -> grpc.StatusCode:
    """The status of a call whose request no message can be read from."""
    request = b"\xff"
    if streams:
        stream: Any = channel.stream_stream(path)
        call = stream(timeout=300)
        # The call may end before it is written.
        with contextlib.suppress(grpc.RpcError):
            await call.write(request)
            await call.done_writing()
    else:
        unary: Any = channel.unary_unary(path)
        call = unary(request, timeout=300)
    return cast(grpc.StatusCode, await call.code())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
async def test_every_call_of_the_descriptors_is_served(edge: Edge, method: MethodDescriptor) -> None:
    assert method.containing_service is not None
    path = f"/{method.containing_service.full_name}/{method.name}"
    unimplemented = grpc.StatusCode.UNIMPLEMENTED
    assert await code_of(edge.caller.channel, path, streams=method.client_streaming) is not unimplemented
    assert await code_of(edge.caller.channel, f"{path}Twice", streams=method.client_streaming) is unimplemented


@pytest.mark.parametrize("service", SERVICES)
async def test_health_follows_the_engine(edge: Edge, unhealthy: call_values.Health, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(edge.caller.channel)
    watch = cast(Any, stub).Watch(health_pb2.HealthCheckRequest(service=service), timeout=300)
    assert (await watch.read()).status == SERVING
    edge.engine._set_health(unhealthy)
    assert (await watch.read()).status == NOT_SERVING
    edge.engine._set_health(call_values.Health(serving=True, reason=""))
    assert (await watch.read()).status == SERVING
    watch.cancel()


async def test_health_tells_the_reason_and_a_standby_from_a_failure(edge: Edge, unhealthy: call_values.Health) -> None:
    assert await hints_of(edge.caller.channel) == {"reason-bin": b"serving"}
    edge.engine._set_health(unhealthy)
    assert await hints_of(edge.caller.channel) == {"reason-bin": b"the store does not answer"}
    edge.engine._set_health(call_values.Health(serving=False, reason="\N{SNOWMAN}" * 9_000, stands_by=True))
    found = await hints_of(edge.caller.channel)
    assert found["stands-by"] == "1"
    assert found["reason-bin"].startswith("\N{SNOWMAN}".encode()), "as much as metadata may have"


async def hints_of(channel: grpc.aio.Channel) -> dict[str, Any]:
    """The trailing metadata of the daemon's health."""
    call = cast(Any, health_pb2_grpc.HealthStub(channel)).Check(health_pb2.HealthCheckRequest(), timeout=300)
    await call
    return dict(await call.trailing_metadata())


class TestDraining:
    @pytest.fixture
    def settings(self) -> config.Config:
        return config.load(environment={}, overrides=["grpc.listen=127.0.0.1:0", "grpc.drain_s=20"])

    async def test_a_draining_server_says_so_before_it_ends(self, edge: Edge) -> None:
        stub = health_pb2_grpc.HealthStub(edge.caller.channel)
        watch = cast(Any, stub).Watch(health_pb2.HealthCheckRequest(), timeout=300)
        assert (await watch.read()).status == SERVING
        draining = asyncio.create_task(edge.server.drain())
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await draining

    async def test_a_stream_of_adds_is_answered_what_it_has_sent_and_ends(self, edge: Edge) -> None:
        edge.calls.hold = asyncio.Event()
        stream = edge.caller.stream("DelayedDelivery/StreamAddMessages")
        add = pb.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1], delay_ms=[1])
        await stream.send(pb.StreamAddMessagesRequest(request_id=1, add=add))
        await until(lambda: edge.calls.begun == 1)
        draining = asyncio.create_task(edge.server.drain())
        edge.calls.hold.set()
        assert (await stream.receive()).added.accepted == 1
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.receive()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await draining
        # The handler ends some turns after the status of its call is out.
        await asyncio.to_thread(wait_until, lambda: not edge.server.left(), "a call is open", timeout_s=60)


async def test_reflection_names_the_services(edge: Edge) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cast(Any, edge.caller.channel))
    call = cast(Any, stub).ServerReflectionInfo(timeout=300)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {*SERVICES[1:], "grpc.health.v1.Health"}
    assert {each.full_name for method in METHODS if (each := method.containing_service)} == {*SERVICES[1:]}
    for service in SERVICES[1:]:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_two_servers_cannot_have_one_port(edge: Edge) -> None:
    taken = config.load(environment={}, overrides=[f"grpc.listen=127.0.0.1:{edge.port}"])
    with pytest.raises(OSError, match=str(edge.port)):
        server.Server(taken, admission_of(taken)).bind()
