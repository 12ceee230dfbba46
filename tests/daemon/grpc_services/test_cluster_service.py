"""Which daemon serves what."""

from __future__ import annotations

import grpc
import pytest

from daemon import errors
from tarry.v1 import cluster_pb2 as pb
from tests._support.fake_engine import ADDRESS, OWNER
from tests._support.fake_topic import EPOCH
from tests.daemon.grpc_services.conftest import Edge

LOOKUP = "Cluster/LookupTopic"


async def test_a_topic_s_owner_is_named_whether_the_topic_exists_or_not(edge: Edge) -> None:
    answer = await edge.caller.unary(LOOKUP, pb.LookupTopicRequest(topic="nowhere"))
    assert (answer.owner_address, answer.owner, answer.epoch, answer.served_here) == (ADDRESS, OWNER, EPOCH, True)


async def test_an_owner_that_is_not_known_yet_is_unavailable_and_says_when_to_ask_again(edge: Edge) -> None:
    edge.engine.fail_with = errors.Unavailable("the owner is not known yet", retry_after_ms=750)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary(LOOKUP, pb.LookupTopicRequest(topic="t"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(refused.value.trailing_metadata() or ())["retry-after-ms"] == "750"
