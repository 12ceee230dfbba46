"""Which daemon serves what."""

from __future__ import annotations

import grpc
import pytest

from daemon import config, errors
from tarry.v1 import cluster_pb2 as pb
from tests.daemon.grpc_services.conftest import Edge

LOOKUP = "Cluster/LookupTopic"


@pytest.fixture
def settings() -> config.Config:
    overrides = ["grpc.listen=127.0.0.1:0", "grpc.drain_s=0", "daemon.address=127.0.0.1:7461", "daemon.id=one"]
    return config.load(environment={}, overrides=overrides)


async def test_a_topic_s_owner_is_named_whether_the_topic_exists_or_not(edge: Edge) -> None:
    answer = await edge.caller.unary(LOOKUP, pb.LookupTopicRequest(topic="nowhere"))
    assert (answer.owner_address, answer.owner) == ("127.0.0.1:7461", "one")
    assert (answer.epoch, answer.served_here) == (edge.engine.shards[answer.shard].epoch, True)


async def test_an_owner_that_is_not_known_yet_is_unavailable_and_says_when_to_ask_again(edge: Edge) -> None:
    edge.calls.fail_with = errors.Unavailable("the owner is not known yet", retry_after_ms=750)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary(LOOKUP, pb.LookupTopicRequest(topic="t"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(refused.value.trailing_metadata() or ())["retry-after-ms"] == "750"


async def test_the_most_bytes_of_a_request_are_told(edge: Edge, settings: config.Config) -> None:
    answer = await edge.caller.unary("Cluster/GetVersion", pb.GetVersionRequest())
    assert answer.message_bytes_max == settings.limits.message_bytes_max == 4 << 20
