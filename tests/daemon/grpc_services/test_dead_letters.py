"""Dead letters over the wire: listed, filtered, replayed, purged."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tarry.v1 import admin_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.daemon.grpc_services.conftest import Edge

PAIR: dict[str, Any] = {"topic": "t", "subscription": "s"}
REJECTED = inspect_pb2.DEAD_LETTER_REASON_REJECTED
TOO_OFTEN = inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN
WHOLE = (1 << 32) - 1


@pytest.fixture
async def buried(edge: Edge) -> Edge:
    """Of ten rows that are due, five were rejected, two at a time with a reason: entries 0 to 4 are dead letters."""
    await edge.caller.unary("Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest(**PAIR))
    request = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=[1] * 5 + [2] * 5, entry_id=range(10), deliver_at_ms=[1], key_hash=range(10)
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", request)
    async with asyncio.timeout(300):
        while len((await backlog(edge)).entry_id) != 10:
            pass
    await reject(edge, [0, 1], "broken")
    await reject(edge, [2, 3], "no such customer")
    await reject(edge, [4])
    return edge


async def reject(edge: Edge, entries: list[int], reason: str = "") -> None:
    request = dispatch_pb2.NegativeAcknowledgeRequest(
        **PAIR,
        ledger_id=[1 if entry < 5 else 2 for entry in entries],
        entry_id=entries,
        deliver_at_ms=[1],
        reject=True,
        reason=reason,
    )
    answer = await edge.caller.unary("Dispatch/NegativeAcknowledge", request)
    assert (answer.ignored, answer.dead_lettered) == (0, len(entries))


async def backlog(edge: Edge) -> inspect_pb2.ListBacklogResponse:
    answer: inspect_pb2.ListBacklogResponse = await edge.caller.unary(
        "Inspect/ListBacklog", inspect_pb2.ListBacklogRequest(**PAIR)
    )
    return answer


async def listed(
    edge: Edge, *, page_size: int = 0, page_token: str = "", **filtered: Any
) -> inspect_pb2.ListDeadLettersResponse:
    request = inspect_pb2.ListDeadLettersRequest(
        **PAIR, filter=inspect_pb2.DeadLetterFilter(**filtered), page_size=page_size, page_token=page_token
    )
    answer: inspect_pb2.ListDeadLettersResponse = await edge.caller.unary("Inspect/ListDeadLetters", request)
    return answer


async def replay(edge: Edge, delay_ms: int = 0, **filtered: Any) -> tuple[int, int]:
    request = admin_pb2.ReplayDeadLettersRequest(
        **PAIR, filter=inspect_pb2.DeadLetterFilter(**filtered), delay_ms=delay_ms
    )
    answer = await edge.caller.unary("Admin/ReplayDeadLetters", request)
    return answer.replayed, answer.skipped


async def purge(edge: Edge, **filtered: Any) -> int:
    request = admin_pb2.PurgeDeadLettersRequest(**PAIR, filter=inspect_pb2.DeadLetterFilter(**filtered))
    answer = await edge.caller.unary("Admin/PurgeDeadLetters", request)
    return int(answer.purged)


async def stats(edge: Edge) -> inspect_pb2.SubscriptionStats:
    answer = await edge.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic="t"))
    found: inspect_pb2.SubscriptionStats
    (found,) = answer.subscriptions
    return found


async def test_all_columns_of_dead_letters_are_of_one_length_and_say_what_was_said(buried: Edge) -> None:
    page = await listed(buried)
    ids = list(page.dead_letter_id)
    assert ids == sorted(set(ids))
    assert (list(page.ledger_id), list(page.entry_id)) == ([1] * 5, [0, 1, 2, 3, 4])
    assert list(page.key_hash) == [0, 1, 2, 3, 4]
    assert (list(page.deliver_at_ms), list(page.batch_index)) == ([1] * 5, [WHOLE] * 5)
    assert list(page.redelivery_count) == [1] * 5
    assert list(page.reason) == [REJECTED] * 5
    assert list(page.dead_at_ms) == sorted(page.dead_at_ms)
    assert 0 < page.dead_at_ms[0] <= page.dead_at_ms[-1] <= page.as_of_ms
    said = [page.texts[index] for index in page.text_index]
    assert said == ["broken", "broken", "no such customer", "no such customer", ""]
    assert (page.texts[0], page.next_page_token) == ("", "")
    assert list((await backlog(buried)).entry_id) == [5, 6, 7, 8, 9]
    found = await stats(buried)
    assert (found.dead_letters, found.backlog, found.nacked) == (5, 5, 0)


async def test_a_subscription_without_dead_letters_has_an_empty_list(edge: Edge) -> None:
    await edge.caller.unary("Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest(**PAIR))
    page = await listed(edge)
    assert (list(page.dead_letter_id), list(page.text_index), page.next_page_token) == ([], [], "")
    assert page.as_of_ms > 0
    assert await replay(edge) == (0, 0)
    assert await purge(edge) == 0


async def test_each_part_of_a_filter_holds(buried: Edge) -> None:
    await reject(buried, [7])
    whole = await listed(buried)
    ids, dead_at_ms = list(whole.dead_letter_id), list(whole.dead_at_ms)
    wanted: list[tuple[dict[str, Any], list[int]]] = [
        ({"dead_letter_id": ids[1:4:2]}, [1, 3]),
        ({"dead_letter_id": [ids[-1] + 1]}, []),
        ({"ledgers": inspect_pb2.LedgerRange(first_ledger_id=2, last_ledger_id=9)}, [7]),
        ({"reason": REJECTED}, [0, 1, 2, 3, 4, 7]),
        ({"reason": TOO_OFTEN}, []),
        ({"from_ms": dead_at_ms[-1] + 1}, []),
        ({"until_ms": dead_at_ms[-1] + 1}, [0, 1, 2, 3, 4, 7]),
        ({"until_ms": dead_at_ms[0]}, []),
        ({"dead_letter_id": ids[:2], "ledgers": inspect_pb2.LedgerRange(first_ledger_id=2, last_ledger_id=9)}, []),
    ]
    for filtered, entries in wanted:
        assert list((await listed(buried, **filtered)).entry_id) == entries, filtered


async def test_pages_of_any_size_follow_each_other(buried: Edge) -> None:
    found: list[int] = []
    token = ""
    for size in (1, 2, 1, 1_000):
        page = await listed(buried, page_size=size, page_token=token)
        found += page.entry_id
        token = page.next_page_token
    assert (found, token) == ([0, 1, 2, 3, 4], "")


async def test_a_token_is_of_one_request(buried: Edge) -> None:
    token = (await listed(buried, page_size=2, reason=REJECTED)).next_page_token
    assert list((await listed(buried, page_size=1, page_token=token, reason=REJECTED)).entry_id) == [2]
    for filtered in ({}, {"reason": TOO_OFTEN}, {"reason": REJECTED, "until_ms": 5}):
        with pytest.raises(grpc.aio.AioRpcError, match="another request"):
            await listed(buried, page_token=token, **filtered)


async def test_a_replayed_dead_letter_is_in_the_backlog_again_with_no_count(buried: Edge) -> None:
    (first, *_) = (await listed(buried)).dead_letter_id
    assert await replay(buried, dead_letter_id=[first]) == (1, 0)
    assert list((await listed(buried)).entry_id) == [1, 2, 3, 4]
    async with asyncio.timeout(300):
        while len((page := await backlog(buried)).entry_id) != 6:
            pass
    assert sorted(page.entry_id) == [0, 5, 6, 7, 8, 9]
    assert not any(page.redelivery_count)
    assert await replay(buried, dead_letter_id=[first]) == (0, 0)


async def test_what_is_replayed_with_a_delay_is_pending_until_then(buried: Edge) -> None:
    assert await replay(buried, 3_600_000, until_ms=(1 << 63)) == (5, 0)
    found = await stats(buried)
    assert (found.dead_letters, found.own_pending, found.backlog) == (0, 5, 5)


async def test_what_is_purged_is_gone(buried: Edge) -> None:
    ids = list((await listed(buried)).dead_letter_id)
    assert await purge(buried, dead_letter_id=ids[:2]) == 2
    assert await purge(buried, dead_letter_id=ids[:3]) == 1
    assert list((await listed(buried)).entry_id) == [3, 4]
    assert (await stats(buried)).backlog == 5
    assert await purge(buried) == 2
    assert (await stats(buried)).dead_letters == 0


async def test_the_deletion_of_a_subscription_says_how_many_dead_letters_left_with_it(buried: Edge) -> None:
    request = dispatch_pb2.DeleteSubscriptionRequest(**PAIR)
    assert (await buried.caller.unary("Dispatch/DeleteSubscription", request)).dead_letters == 5
