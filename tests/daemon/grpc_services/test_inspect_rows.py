"""Rows that are scheduled, backlogs and histograms, over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.daemon.grpc_services.conftest import Edge

FAR_MS = 1_900_000_000_000
TOPIC = "t"


@pytest.fixture
async def populated(edge: Edge) -> Edge:
    """Two subscriptions, three rows that are due, ten that are pending in the shared index and two in an own one."""
    for subscription in ("s", "other"):
        request = dispatch_pb2.CreateSubscriptionRequest(topic=TOPIC, subscription=subscription)
        await edge.caller.unary("Dispatch/CreateSubscription", request)
    await add(edge, [1] * 10, range(10), [FAR_MS + 10 * (entry % 5) for entry in range(10)], key_hash=range(10))
    await add(edge, [1, 2], [3, 3], [FAR_MS + 5, FAR_MS + 6], subscription="other")
    await add(edge, [7], range(3), [1])
    async with asyncio.timeout(300):
        while len((await backlog(edge)).entry_id) != 3:
            pass
    return edge


async def add(edge: Edge, ledger_id: Any, entry_id: Any, deliver_at_ms: Any, **others: Any) -> None:
    request = delayed_delivery_pb2.AddMessagesRequest(
        topic=TOPIC, ledger_id=ledger_id, entry_id=entry_id, deliver_at_ms=deliver_at_ms, **others
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", request)


async def scheduled(edge: Edge, **fields: Any) -> inspect_pb2.ListScheduledResponse:
    request = inspect_pb2.ListScheduledRequest(**{"topic": TOPIC} | fields)
    answer: inspect_pb2.ListScheduledResponse = await edge.caller.unary("Inspect/ListScheduled", request)
    return answer


async def backlog(edge: Edge, **fields: Any) -> inspect_pb2.ListBacklogResponse:
    request = inspect_pb2.ListBacklogRequest(**{"topic": TOPIC, "subscription": "s"} | fields)
    answer: inspect_pb2.ListBacklogResponse = await edge.caller.unary("Inspect/ListBacklog", request)
    return answer


async def histogram(edge: Edge, **fields: Any) -> inspect_pb2.GetHistogramResponse:
    request = inspect_pb2.GetHistogramRequest(**{"topic": TOPIC} | fields)
    answer: inspect_pb2.GetHistogramResponse = await edge.caller.unary("Inspect/GetHistogram", request)
    return answer


def rows(answer: inspect_pb2.ListScheduledResponse | inspect_pb2.ListBacklogResponse) -> list[tuple[int, ...]]:
    """(deliver_at_ms, ledger, entry, key_hash): the columns are of one length."""
    columns = (answer.deliver_at_ms, answer.ledger_id, answer.entry_id, answer.key_hash)
    return list(zip(*columns, strict=True))


SHARED = sorted((FAR_MS + 10 * (entry % 5), 1, entry, entry) for entry in range(10))
OWN = [(FAR_MS + 5, 1, 3), (FAR_MS + 6, 2, 3)]


async def test_all_columns_of_what_is_scheduled_are_of_one_length(populated: Edge) -> None:
    page = await scheduled(populated, ledgers=inspect_pb2.LedgerRange(first_ledger_id=0, last_ledger_id=5))
    assert sorted(row[:3] for row in rows(page)) == sorted([*(row[:3] for row in SHARED), *OWN])
    assert list(page.subscriptions) == ["", "other"]
    assert [row[:3] for row, index in zip(rows(page), page.subscription_index, strict=True) if index] == OWN
    assert (page.next_page_token, page.as_of_ms > 0) == ("", True)


async def test_rows_of_the_shared_index_alone_name_no_subscription(populated: Edge) -> None:
    page = await scheduled(populated, subscription="s")
    assert rows(page) == SHARED
    assert not page.subscription_index
    assert not page.subscriptions


async def test_pages_of_any_size_follow_each_other(populated: Edge) -> None:
    found: list[tuple[int, ...]] = []
    token = ""
    for size in (1, 4, 2, 1, 1_000):
        page = await scheduled(populated, subscription="s", page_size=size, page_token=token)
        found += rows(page)
        token = page.next_page_token
    assert found == SHARED
    assert token == ""


async def test_a_token_is_of_one_request(populated: Edge) -> None:
    asked: dict[str, Any] = {"subscription": "s", "from_ms": FAR_MS, "until_ms": FAR_MS + 100, "page_size": 2}
    token = (await scheduled(populated, **asked)).next_page_token
    assert rows(await scheduled(populated, **asked | {"page_token": token, "page_size": 3})) == SHARED[2:5]
    others: list[dict[str, Any]] = [
        {"subscription": "other"},
        {"subscription": ""},
        {"from_ms": FAR_MS + 1},
        {"until_ms": 0},
        {"ledgers": inspect_pb2.LedgerRange()},
    ]
    for other in others:
        with pytest.raises(grpc.aio.AioRpcError, match="another request"):
            await scheduled(populated, **asked | {"page_token": token} | other)
    with pytest.raises(grpc.aio.AioRpcError, match="page_token"):
        await backlog(populated, page_token=token)


async def test_a_backlog_tells_what_is_handed_out(populated: Edge) -> None:
    request = dispatch_pb2.GetScheduledMessagesRequest(topic=TOPIC, subscription="s", max_rows=2, lease_ms=60_000)
    await populated.caller.unary("Dispatch/GetScheduledMessages", request)
    page = await backlog(populated)
    assert [row[1:3] for row in rows(page)] == [(7, 0), (7, 1), (7, 2)]
    ready, in_flight = inspect_pb2.BACKLOG_STATE_READY, inspect_pb2.BACKLOG_STATE_IN_FLIGHT
    assert list(page.state) == [in_flight, in_flight, ready]
    first = await backlog(populated, page_size=2)
    rest = await backlog(populated, page_size=2, page_token=first.next_page_token)
    assert (len(first.entry_id), list(rest.entry_id), rest.next_page_token) == (2, [2], "")
    none = await backlog(populated, ledgers=inspect_pb2.LedgerRange(first_ledger_id=8, last_ledger_id=9))
    assert (len(none.state), none.as_of_ms > 0) == (0, True)


async def test_a_backlog_tells_what_waits_for_its_redelivery(populated: Edge) -> None:
    plain = await backlog(populated)
    assert not any([plain.redelivery_count, plain.batch_index, plain.redeliver_at_ms])
    time_ms = plain.deliver_at_ms[0]
    named: dict[str, Any] = {"topic": TOPIC, "subscription": "s", "ledger_id": [7], "deliver_at_ms": [time_ms]}
    nacks: list[dict[str, Any]] = [{"entry_id": [1]}, {"entry_id": [2], "batch_index": [5]}]
    for nacked in nacks:
        request = dispatch_pb2.NegativeAcknowledgeRequest(**named, **nacked, delay_ms=[3_600_000])
        answer = await populated.caller.unary("Dispatch/NegativeAcknowledge", request)
        assert (answer.ignored, answer.dead_lettered) == (0, 0)
    page = await backlog(populated)
    ready, nacked_state = inspect_pb2.BACKLOG_STATE_READY, inspect_pb2.BACKLOG_STATE_NACKED
    whole = (1 << 32) - 1
    assert [row[1:3] for row in rows(page)] == [(7, 0), (7, 1), (7, 2), (7, 2)]
    assert list(page.state) == [ready, nacked_state, ready, nacked_state]
    assert list(page.redelivery_count) == [0, 1, 0, 1]
    assert list(page.batch_index) == [whole, whole, whole, 5]
    waits = [time_ms > page.as_of_ms + 3_000_000 for time_ms in page.redeliver_at_ms]
    assert waits == [False, True, False, True]
    assert page.redeliver_at_ms[0] == page.redeliver_at_ms[2] == 0
    answer = await populated.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic=TOPIC))
    (mine,) = (each for each in answer.subscriptions if each.subscription == "s")
    assert (mine.backlog, mine.nacked, mine.dead_letters) == (4, 2, 0)
    assert mine.next_redelivery_ms == min(time_ms for time_ms in page.redeliver_at_ms if time_ms)


async def test_a_histogram_counts_within_its_range(populated: Edge) -> None:
    found = await histogram(populated, from_ms=FAR_MS + 10, until_ms=FAR_MS + 35, width_ms=10, subscription="s")
    assert list(found.rows) == [2, 2, 2]
    assert (found.from_ms, found.until_ms, found.width_ms) == (FAR_MS + 10, FAR_MS + 35, 10)
    assert (found.rows_before, found.rows_after) == (2, 2)
    everything = await histogram(populated)
    assert sum(everything.rows) == 12
    assert everything.until_ms > FAR_MS + 40
    assert 0 <= everything.as_of_ms - everything.from_ms < 10_000
