"""Callers that vanish with unread answers or break the protocol are no errors of the daemon, and fill no log."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2

from daemon import config, logs
from daemon.grpc_services import delayed_delivery_service, dispatch_service
from daemon.owner.engine import Engine
from tarry.v1 import delayed_delivery_pb2 as pb
from tarry.v1 import dispatch_pb2, inspect_pb2
from tests._support import raw_http2
from tests._support.door_files import door_files, identity, token_of
from tests._support.resetting_proxy import ResettingProxy
from tests.daemon.grpc_services.conftest import Caller, Edge, admission_of, serving

# A caller that takes 64 KiB of a stream ahead, and no more
LITTLE = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]
ROWS = 1_000
RESETS = 10


class LeavingCaller:
    """gRPC's context of a caller that has left: a response fails before the call is cancelled."""

    def __init__(self, *requests: bytes) -> None:
        self._requests = list(requests)
        self.aborted: list[grpc.StatusCode] = []

    async def read(self) -> object:
        return self._requests.pop(0) if self._requests else grpc.aio.EOF

    async def write(self, _: bytes) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.aborted.append(code)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float:
        return 300.0

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


def _adds() -> bytes:
    return pb.StreamAddMessagesRequest(request_id=1).SerializeToString()


def _opening(subscription: str) -> bytes:
    opening = dispatch_pb2.Open(topic="t", subscription=subscription, type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED)
    return dispatch_pb2.SubscribeRequest(open=opening).SerializeToString()


def _lane() -> bytes:
    request = dispatch_pb2.LaneRequest(lane=1, request=dispatch_pb2.SubscribeRequest.FromString(_opening("s")))
    return dispatch_pb2.SubscribeManyRequest(requests=[request]).SerializeToString()


@pytest.mark.parametrize(
    ("call", "request_"),
    [("StreamAddMessages", _adds()), ("Subscribe", _opening("s")), ("SubscribeMany", _lane())],
)
async def test_a_response_that_fails_because_the_caller_left_ends_the_call_as_its_cancellation_does(
    edge: Edge, settings: config.Config, caplog: pytest.LogCaptureFixture, call: str, request_: bytes
) -> None:
    await edge.caller.unary(
        "Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest(topic="t", subscription="s")
    )
    service: Any = delayed_delivery_service if call == "StreamAddMessages" else dispatch_service
    handlers = (
        delayed_delivery_service.DelayedDelivery(edge.engine, settings)
        if call == "StreamAddMessages"
        else dispatch_service.Dispatch(edge.engine, settings)
    ).handlers()
    guarded = admission_of(settings).guarded(service.DESCRIPTOR.methods_by_name[call], handlers[call])
    leaving = LeavingCaller(request_)
    with pytest.raises(asyncio.CancelledError):
        await guarded.stream_stream(None, leaving)
    assert leaving.aborted == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.fixture
def daemon_log() -> Iterator[io.StringIO]:
    """What the process would have logged."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    written = io.StringIO()
    logs.configure(stream=written, level="warning")
    yield written
    root.handlers[:] = before
    root.setLevel(level)


async def test_connections_that_are_reset_leave_no_line(edge: Edge, daemon_log: io.StringIO) -> None:
    due_ms = (int(time.time()) + 1_000_000) * 1000
    rows = pb.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=range(ROWS), deliver_at_ms=[due_ms])
    await edge.caller.unary("DelayedDelivery/AddMessages", rows)
    for _ in range(RESETS):
        proxy = ResettingProxy(edge.port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}", options=LITTLE) as channel:
            with proxy:
                await channel.channel_ready()
                proxy.hold_answers()
                ask = inspect_pb2.ListScheduledRequest(topic="t")
                asks = [asyncio.ensure_future(Caller(channel).unary("Inspect/ListScheduled", ask)) for _ in range(50)]
                await asyncio.sleep(0.1)
            await asyncio.gather(*asks, return_exceptions=True)
    assert daemon_log.getvalue() == ""


TOKEN = token_of("one")


@pytest.mark.parametrize(
    ("path", "headers", "sent"),
    [
        ("/tarry.v1.Cluster/GetVersion", [(b"authorization", b"Bearer " + TOKEN.encode() + b"\xa0")], b""),
        (
            "/tarry.v1.Cluster/GetVersion",
            [(b"authorization", f"Bearer {TOKEN}".encode()), (b"x", b"\xff" * 5_000)],
            b"",
        ),
        ("/tarry.v1.Cluster/GetVersion", [(b"authorization", b"Bearer " + TOKEN.encode() + b"\x9b")], b"\xff"),
        ("/grpc.health.v1.Health/Check", [], b"\xff"),
        ("/grpc.health.v1.Health/Watch", [], b"\xff"),
        ("/grpc.health.v1.Health/List", [], b""),
        ("/no.such/Call", [(b"x", b"\xff")], b""),
    ],
    ids=["token", "header", "both", "check", "watch", "list", "unknown"],
)
async def test_calls_that_break_the_protocol_leave_no_line(
    engine: Engine,
    settings: config.Config,
    tmp_path: Path,
    daemon_log: io.StringIO,
    path: str,
    headers: list[tuple[bytes, bytes]],
    sent: bytes,
) -> None:
    files = door_files(tmp_path, identity("one", ["add"], [""]))
    access = msgspec.structs.replace(settings.access, identities_file=str(files.identities))
    async with serving(engine, msgspec.structs.replace(settings, access=access)) as edge:
        for _ in range(2):
            assert await asyncio.to_thread(raw_http2.ended, edge.port, path, headers, sent)
    assert TOKEN not in daemon_log.getvalue()
    assert daemon_log.getvalue() == ""


async def test_a_token_with_more_than_spaces_around_it_is_none(
    engine: Engine, settings: config.Config, tmp_path: Path
) -> None:
    files = door_files(tmp_path, identity("one", ["add"], [""]))
    access = msgspec.structs.replace(settings.access, identities_file=str(files.identities))
    async with serving(engine, msgspec.structs.replace(settings, access=access)) as edge:
        for more, is_known in ((b" ", True), (b"\xa0", False), (b"\x85", False)):
            shown = [(b"authorization", b"Bearer " + TOKEN.encode() + more)]
            answer = await asyncio.to_thread(raw_http2.ended, edge.port, "/tarry.v1.Cluster/GetVersion", shown)
            assert (b"subscribe_many" in answer) == is_known


async def test_health_lists_every_service(edge: Edge) -> None:
    listed: Any = edge.caller.channel.unary_unary(
        "/grpc.health.v1.Health/List", response_deserializer=cast(Any, health_pb2).HealthListResponse.FromString
    )
    answer = await listed(b"", timeout=300)
    serving_now = health_pb2.HealthCheckResponse.SERVING
    assert {"", "tarry.v1.Dispatch"} < set(answer.statuses)
    assert {each.status for each in answer.statuses.values()} == {serving_now}
