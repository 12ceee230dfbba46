"""A server on a free loopback port over an engine, and a client that sends bytes as they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf import message, message_factory

from daemon import call_values, config
from daemon.audit_log import AuditLog
from daemon.auth import Door
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.grpc_services import admission, server
from daemon.grpc_services.receiving import Receiving
from daemon.owner.engine import Engine
from daemon.topic.open_streams import OpenStream
from daemon.topic.served_topic import ServedTopic
from storage_backends.memory_store import MemoryStore
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2, ledger_deletion_pb2
from tests._support import real_engine
from tests.daemon.grpc_services._support.watched_calls import WatchedCalls


def _answers(*modules: ModuleType) -> dict[str, type[message.Message]]:
    """What each call of the contract answers with, by `Service/Call`."""
    return {
        f"{service.name}/{method.name}": message_factory.GetMessageClass(method.output_type)
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


ANSWERS = _answers(delayed_delivery_pb2, dispatch_pb2, inspect_pb2, admin_pb2, ledger_deletion_pb2, cluster_pb2)


class Caller:
    """A client that takes messages or any bytes, so that it can send what no client library would."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def unary(self, method: str, request: message.Message | bytes, *, timeout_s: float = 300) -> Any:
        call: Any = self.channel.unary_unary(
            f"/tarry.v1.{method}", response_deserializer=cast(Any, ANSWERS[method].FromString)
        )
        return await call(_encoded(request), timeout=timeout_s)

    async def answers(self, method: str, request: message.Message | bytes) -> list[Any]:
        """All answers to one request."""
        call: Any = self.channel.unary_stream(
            f"/tarry.v1.{method}", response_deserializer=cast(Any, ANSWERS[method].FromString)
        )
        return [answer async for answer in call(_encoded(request), timeout=300)]

    def stream(self, method: str) -> Stream:
        call: Any = self.channel.stream_stream(
            f"/tarry.v1.{method}", response_deserializer=cast(Any, ANSWERS[method].FromString)
        )
        return Stream(call(timeout=300))


class Stream:
    """One bidirectional call."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, request: message.Message | bytes) -> None:
        await self.call.write(_encoded(request))

    async def done_sending(self) -> None:
        await self.call.done_writing()

    async def receive(self) -> Any:
        """The next answer. Raises `EOFError` at the end, `grpc.aio.AioRpcError` when the call failed."""
        answer = await self.call.read()
        if answer is grpc.aio.EOF:
            if await self.call.code() is not grpc.StatusCode.OK:
                await self.call.wait_for_connection()
            raise EOFError
        return answer

    async def end(self) -> None:
        """Says that nothing more will come, and is answered that all is done."""
        await self.done_sending()
        try:
            answer = await self.receive()
        except EOFError:
            return
        raise AssertionError(f"something more came: {answer}")


def by_stream(caller: Caller) -> Any:
    """A subscription's stream, a call of its own."""
    return caller.stream("Dispatch/Subscribe")


def _encoded(request: message.Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


@dataclasses.dataclass
class Edge:
    """What a test of the edge has at hand."""

    engine: Engine
    calls: WatchedCalls
    caller: Caller
    server: server.Server
    port: int
    subscribe: Callable[[Caller], Any] = by_stream
    """Begins what carries a subscription."""

    @property
    def topics(self) -> dict[str, ServedTopic]:
        return {name: topic for shard in self.engine.shards.values() for name, topic in shard.topics.items()}

    def state(self, topic: str = "t", subscription: str = "s") -> SubscriptionState:
        return self.topics[topic].subscription(subscription)

    def streams(self, topic: str = "t", subscription: str = "s") -> list[OpenStream]:
        """The SHARED and KEY_SHARED streams that are open on a subscription."""
        return self.topics[topic].streams_of(self.state(topic, subscription))


@pytest.fixture(scope="session")
def settings() -> config.Config:
    """Small limits, so that a test can reach them, with the defaults of everything else."""
    return config.load(
        environment={},
        overrides=[
            "grpc.listen=127.0.0.1:0",
            "grpc.drain_s=0",
            "limits.rows_per_request_max=1000",
            "limits.message_bytes_max=1048576",
            "limits.subscriptions_per_topic_max=3",
        ],
    )


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def engine(settings: config.Config, store: MemoryStore) -> AsyncIterator[Engine]:
    async with real_engine.serving(settings, store=store) as engine:
        yield engine


def admission_of(settings: config.Config) -> admission.Admission:
    """Who is let in by the settings."""
    door = Door(settings.tls, settings.access)
    return admission.Admission(door, AuditLog(settings.access), lambda refusal: None, Receiving(settings))


@contextlib.asynccontextmanager
async def serving(
    engine: Engine, settings: config.Config, let_in: admission.Admission | None = None
) -> AsyncIterator[Edge]:
    """The edge of an engine."""
    calls = WatchedCalls(engine.requests)
    endpoint = server.Server(settings, let_in or admission_of(settings))
    port = endpoint.bind()
    await endpoint.start(engine)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Edge(engine, calls, Caller(channel), endpoint, port)
    await endpoint.drain()


@pytest.fixture
async def edge(engine: Engine, settings: config.Config) -> AsyncIterator[Edge]:
    async with serving(engine, settings) as served:
        yield served


@pytest.fixture
def unhealthy() -> call_values.Health:
    return call_values.Health(serving=False, reason="the store does not answer")
