"""What people and dashboards ask."""

from __future__ import annotations

import pytest

from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.daemon.grpc_services.conftest import Edge

FAR_MS = 2_000_000_000_000


@pytest.fixture
async def topics(edge: Edge) -> list[str]:
    names = [f"topic-{number:02}-é" for number in range(5)]
    for name in reversed(names):
        request = delayed_delivery_pb2.AddMessagesRequest(
            topic=name, ledger_id=[1], entry_id=[1, 2], deliver_at_ms=[FAR_MS, FAR_MS + 5]
        )
        await edge.caller.unary("DelayedDelivery/AddMessages", request)
    return names


@pytest.mark.parametrize(("page_size", "pages"), [(0, [5]), (1000, [5]), (5, [5]), (2, [2, 2, 1]), (1, [1] * 5)])
async def test_pages_follow_each_other_in_the_order_of_names(
    edge: Edge, topics: list[str], page_size: int, pages: list[int]
) -> None:
    seen: list[str] = []
    sizes: list[int] = []
    token = ""
    while True:
        page = await edge.caller.unary(
            "Inspect/ListTopics", inspect_pb2.ListTopicsRequest(page_size=page_size, page_token=token)
        )
        seen += [topic.topic for topic in page.topics]
        sizes.append(len(page.topics))
        token = page.next_page_token
        if not token:
            break
    assert (seen, sizes) == (topics, pages)
    assert page.as_of_ms > 0
    assert (page.topics[-1].pending, page.topics[-1].next_due_ms) == (2, FAR_MS)


async def test_stats_show_the_topic_and_its_subscriptions(edge: Edge, topics: list[str]) -> None:
    await edge.caller.unary(
        "Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest(topic=topics[0], subscription="s")
    )
    stats = await edge.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic=topics[0]))
    assert (stats.topic, stats.pending, stats.next_due_ms) == (topics[0], 2, FAR_MS)
    assert [each.subscription for each in stats.subscriptions] == ["s"]
