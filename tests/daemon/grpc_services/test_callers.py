"""Who a request is from: what the client says, or its host; on a call and on a stream."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from daemon.core import quotas
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.grpc_services import admission
from tarry.v1 import delayed_delivery_pb2
from tests.daemon.grpc_services.conftest import Edge


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:1234", "127.0.0.1"),
        ("ipv6:[::1]:1234", "::1"),
        ("ipv6:%5B2001:db8::7%5D:50051", "2001:db8::7"),
        ("unix:/run/tarry.sock", "127.0.0.1"),
        ("unix:", "127.0.0.1"),
        ("inproc:7", "inproc:7"),
    ],
)
def test_a_host_is_a_peer_without_its_port(peer: str, host: str) -> None:
    assert admission.host_of(peer) == host


REQUEST = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1], delay_ms=[5])
STREAM_REQUEST = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=REQUEST)


@pytest.fixture
def callers(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> list[quotas.Caller]:
    """Who adds to a topic that is not there yet."""
    found: list[quotas.Caller] = []
    add = edge.engine.requests.add

    async def watched(topic: str, batch: AddBatch, subscription: str | None, caller: quotas.Caller) -> AddOutcome:
        found.append(caller)
        return await add(topic, batch, subscription, caller)

    monkeypatch.setattr(edge.engine.requests, "add", watched)
    return found


async def add(edge: Edge, stream: bool, metadata: tuple[tuple[str, str], ...]) -> None:
    """Adds by a call or on a stream. Raises what gRPC does."""
    channel = edge.caller.channel
    if not stream:
        call: Any = channel.unary_unary("/tarry.v1.DelayedDelivery/AddMessages")
        await call(REQUEST.SerializeToString(), metadata=metadata, timeout=300)
        return
    opening: Any = channel.stream_stream("/tarry.v1.DelayedDelivery/StreamAddMessages")
    opened = opening(metadata=metadata, timeout=300)
    await opened.write(STREAM_REQUEST.SerializeToString())
    await opened.done_writing()
    async for _ in opened:
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("metadata", "client"),
    [((), "127.0.0.1"), ((("tarry-client-id", "gate 7"),), "gate 7"), ((("tarry-client-id", "x" * 128),), "x" * 128)],
)
async def test_a_client_is_what_it_says_or_its_host(
    edge: Edge, callers: list[quotas.Caller], stream: bool, metadata: tuple[tuple[str, str], ...], client: str
) -> None:
    await add(edge, stream, metadata)
    (caller,) = callers
    assert caller.client == client
    assert caller.size_bytes == (STREAM_REQUEST if stream else REQUEST).ByteSize()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "length"), [("", "0"), ("x" * 129, "129")])
async def test_a_client_id_of_a_wrong_length_is_refused_by_name(
    edge: Edge, callers: list[quotas.Caller], stream: bool, client: str, length: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"tarry-client-id.*{length} characters.*128") as caught:
        await add(edge, stream, (("tarry-client-id", client),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not callers
