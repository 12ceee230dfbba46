"""What a refused request is measured by: a topic that has something, everything that is seen of it, what is said."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc

from tarry.v1 import dispatch_pb2, inspect_pb2
from tests.daemon.grpc_services._support.bad_calls import CREATE, TOPIC_STATS
from tests.daemon.grpc_services._support.bad_requests import ADD, SUBSCRIPTION, TOPIC, Case, add
from tests.daemon.grpc_services.conftest import Edge

PAGE_SIZE = 100


@dataclasses.dataclass(frozen=True)
class Populated:
    """A server with such a topic, and what was seen of it at first."""

    edge: Edge
    before: list[Any]

    async def assert_unchanged(self) -> None:
        assert await state(self.edge) == self.before


async def populate(edge: Edge) -> Populated:
    """A topic with three subscriptions, as many as it may have, rows that are pending and one that is due."""
    for subscription in (SUBSCRIPTION, "second", "third"):
        request = dispatch_pb2.CreateSubscriptionRequest(topic=TOPIC, subscription=subscription)
        await edge.caller.unary(CREATE, request)
    await edge.caller.unary(ADD, add(ledger_id=[77]))
    await edge.caller.unary(ADD, add(ledger_id=[78], entry_id=[1], deliver_at_ms=[1]))
    async with asyncio.timeout(300):
        while (await edge.caller.unary(TOPIC_STATS, inspect_pb2.GetTopicStatsRequest(topic=TOPIC))).pending != 3:
            pass
    return Populated(edge, await state(edge))


async def state(edge: Edge) -> list[Any]:
    """Everything that inspection shows, but the time of asking. The engine is asked without gRPC, which would take
    longer than what is tested.
    """
    requests = edge.engine.requests
    answers: list[Any] = [
        await requests.topic_stats(TOPIC),
        await requests.list_topics(PAGE_SIZE, "", ("",)),
        await requests.list_buckets(TOPIC, PAGE_SIZE, ""),
    ]
    return [dataclasses.replace(answer, as_of_ms=0) for answer in answers]


def assert_says(case: Case, code: int | grpc.StatusCode, said: str | None) -> None:
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    assert number == case.code.value[0], said
    missing = [part for part in case.says if part not in (said or "")]
    assert not missing, f"{missing} not in {said!r}"
