"""What people and dashboards ask."""

from __future__ import annotations

import grpc
import pytest

from storage_backends.memory_store import MemoryStore
from tarry.v1 import admin_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2, policy_pb2
from tests.daemon.grpc_services._support.shown_rows import lose_bucket
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
    assert (stats.topic, stats.pending, stats.due, stats.next_due_ms) == (topics[0], 2, 0, FAR_MS)
    assert [each.subscription for each in stats.subscriptions] == ["s"]


async def test_subscriptions_are_listed_by_name_with_their_policies(edge: Edge, topics: list[str]) -> None:
    policy = policy_pb2.SubscriptionPolicy(lease_ms=5, in_flight_rows_max=7, properties={"b": "2", "a": "é"})
    for name in ("c", "a", "b"):
        await edge.caller.unary(
            "Dispatch/CreateSubscription",
            dispatch_pb2.CreateSubscriptionRequest(topic=topics[0], subscription=name, policy=policy),
        )
    first = await edge.caller.unary(
        "Inspect/ListSubscriptions", inspect_pb2.ListSubscriptionsRequest(topic=topics[0], page_size=2)
    )
    rest = await edge.caller.unary(
        "Inspect/ListSubscriptions",
        inspect_pb2.ListSubscriptionsRequest(topic=topics[0], page_token=first.next_page_token),
    )
    assert [each.subscription for each in (*first.subscriptions, *rest.subscriptions)] == ["a", "b", "c"]
    assert [each.policy for each in rest.subscriptions] == [policy]
    assert (rest.next_page_token, rest.as_of_ms > 0) == ("", True)


async def test_buckets_are_listed_page_by_page(edge: Edge, topics: list[str]) -> None:
    for ledger_id in (2, 3):
        await edge.caller.unary("Admin/SealBucket", admin_pb2.SealBucketRequest(topic=topics[0]))
        request = delayed_delivery_pb2.AddMessagesRequest(
            topic=topics[0], ledger_id=[ledger_id], entry_id=[1], deliver_at_ms=[FAR_MS]
        )
        await edge.caller.unary("DelayedDelivery/AddMessages", request)
    first = await edge.caller.unary("Inspect/ListBuckets", inspect_pb2.ListBucketsRequest(topic=topics[0], page_size=1))
    rest = await edge.caller.unary(
        "Inspect/ListBuckets", inspect_pb2.ListBucketsRequest(topic=topics[0], page_token=first.next_page_token)
    )
    ranges = [(each.first_ledger_id, each.last_ledger_id, each.rows) for each in (*first.buckets, *rest.buckets)]
    assert ranges == [(1, 1, 2), (2, 2, 1)]
    assert (first.buckets[0].pending, first.buckets[0].max_deliver_at_ms) == (2, FAR_MS + 5)
    assert (rest.next_page_token, rest.mutable_rows, rest.as_of_ms > 0) == ("", 1, True)


async def test_the_token_of_one_list_turns_no_pages_of_another(edge: Edge, topics: list[str]) -> None:
    page = await edge.caller.unary("Inspect/ListTopics", inspect_pb2.ListTopicsRequest(page_size=1))
    for call, request_type in (
        ("ListBuckets", inspect_pb2.ListBucketsRequest),
        ("ListSubscriptions", inspect_pb2.ListSubscriptionsRequest),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="page_token"):
            await edge.caller.unary(f"Inspect/{call}", request_type(topic=topics[0], page_token=page.next_page_token))


async def test_stats_name_the_ranges_that_need_a_rebuild(edge: Edge, store: MemoryStore) -> None:
    expected = await lose_bucket(edge, store)
    stats = await edge.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic="t"))
    assert list(stats.rebuild_needed) == [expected]
