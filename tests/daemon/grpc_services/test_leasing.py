"""Due positions without a stream: leases, their callers who go away, and acknowledging."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from daemon import call_values
from storage_backends.memory_store import MemoryStore
from tarry.v1 import delayed_delivery_pb2, inspect_pb2, policy_pb2
from tarry.v1 import dispatch_pb2 as pb
from tests.daemon.grpc_services._support.shown_rows import lose_bucket
from tests.daemon.grpc_services._support.watched_calls import until
from tests.daemon.grpc_services.conftest import Edge

GET = "Dispatch/GetScheduledMessages"
FAR_MS = 2_000_000_000_000
HOUR_MS = 3_600_000
# As long as a call may wait.
PATIENCE_MS = 60_000
# One after the other, where the machine is so busy that an answer takes that long.
DEADLINES_S = (0.6, 6.0, 59.0)

Row = tuple[int, int, int]


@pytest.fixture
async def subscribed(edge: Edge) -> Edge:
    """Topic t with subscription s."""
    await edge.caller.unary("Dispatch/CreateSubscription", pb.CreateSubscriptionRequest(topic="t", subscription="s"))
    return edge


async def add(edge: Edge, *rows: Row, key_hash: tuple[int, ...] = ()) -> None:
    """(deliver_at_ms, ledger_id, entry_id)"""
    due, ledgers, entries = zip(*rows, strict=True)
    request = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=ledgers, entry_id=entries, deliver_at_ms=due, key_hash=key_hash
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", request)


async def get(edge: Edge, *, timeout_s: float = 300, **fields: int) -> pb.GetScheduledMessagesResponse:
    request = pb.GetScheduledMessagesRequest(topic="t", subscription="s", **{"max_rows": 10, **fields})
    answer: pb.GetScheduledMessagesResponse = await edge.caller.unary(GET, request, timeout_s=timeout_s)
    return answer


async def ignored(edge: Edge, call: str, rows: list[Row], **fields: int) -> int:
    due, ledgers, entries = zip(*rows, strict=True)
    positions = {"ledger_id": ledgers, "entry_id": entries, "deliver_at_ms": due}
    request_type: Any = pb.AcknowledgeRequest if call == "Acknowledge" else pb.ExtendLeaseRequest
    request = request_type(topic="t", subscription="s", **positions, **fields)
    return int((await edge.caller.unary(f"Dispatch/{call}", request)).ignored)


async def stats(edge: Edge) -> inspect_pb2.SubscriptionStats:
    answer = await edge.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic="t"))
    found: inspect_pb2.SubscriptionStats = answer.subscriptions[0]
    return found


def rows_of(messages: pb.Messages) -> list[Row]:
    return list(zip(messages.deliver_at_ms, messages.ledger_id, messages.entry_id, strict=True))


async def test_due_rows_are_leased_in_order_with_their_hashes(subscribed: Edge) -> None:
    await add(subscribed, (3, 1, 1), (1, 2, 9), (2, 1, 7), (FAR_MS, 1, 8), key_hash=(30, 10, 20, 40))
    answer = await get(subscribed, max_rows=2, wait_ms=PATIENCE_MS, lease_ms=HOUR_MS)
    assert rows_of(answer.messages) == [(1, 2, 9), (2, 1, 7)]
    assert (list(answer.messages.key_hash), answer.lease_ms) == ([10, 20], HOUR_MS)
    assert answer.messages.epoch > 0
    assert rows_of((await get(subscribed, wait_ms=PATIENCE_MS)).messages) == [(3, 1, 1)]
    counted = await stats(subscribed)
    assert (counted.backlog, counted.in_flight, counted.leased) == (3, 3, 3)


async def test_nothing_due_is_answered_with_empty_columns(subscribed: Edge) -> None:
    answer = await get(subscribed)
    assert (rows_of(answer.messages), answer.lease_ms) == ([], 30_000)


async def test_a_lease_without_a_time_has_that_of_the_subscription(subscribed: Edge) -> None:
    policy = policy_pb2.SubscriptionPolicy(lease_ms=HOUR_MS)
    request = pb.UpdateSubscriptionRequest(topic="t", subscription="s", policy=policy)
    await subscribed.caller.unary("Dispatch/UpdateSubscription", request)
    assert (await get(subscribed)).lease_ms == HOUR_MS


async def test_a_caller_that_waits_gets_a_row_when_it_comes(subscribed: Edge) -> None:
    waiting = asyncio.create_task(get(subscribed, wait_ms=PATIENCE_MS))
    await subscribed.caller.unary("Inspect/ListTopics", b"")
    await add(subscribed, (1, 1, 1))
    assert rows_of((await waiting).messages) == [(1, 1, 1)]


async def test_rows_are_due_again_when_their_lease_is_over(subscribed: Edge) -> None:
    await add(subscribed, (1, 1, 1))
    assert rows_of((await get(subscribed, lease_ms=50, wait_ms=PATIENCE_MS)).messages) == [(1, 1, 1)]
    assert rows_of((await get(subscribed, wait_ms=PATIENCE_MS)).messages) == [(1, 1, 1)]


async def test_a_lease_of_zero_ends_at_once_and_others_are_ignored(subscribed: Edge) -> None:
    await add(subscribed, (1, 1, 1), (2, 1, 2))
    assert len(rows_of((await get(subscribed, wait_ms=PATIENCE_MS, lease_ms=HOUR_MS)).messages)) == 2
    # A position with another time, and one that is in no lease.
    assert await ignored(subscribed, "ExtendLease", [(1, 1, 1), (7, 1, 2), (1, 9, 9)], lease_ms=0) == 2
    assert rows_of((await get(subscribed, wait_ms=PATIENCE_MS)).messages) == [(1, 1, 1)]


async def test_an_extended_lease_ends_later(subscribed: Edge) -> None:
    await add(subscribed, (1, 1, 1), (2, 1, 2))
    for lease_ms in (500, 5_000, 50_000):
        assert len(rows_of((await get(subscribed, wait_ms=PATIENCE_MS, lease_ms=lease_ms)).messages)) == 2
        # On a busy machine a short lease may be over by then.
        if not await ignored(subscribed, "ExtendLease", [(1, 1, 1)], lease_ms=HOUR_MS):
            break
    # Of the two only the one that was not extended.
    assert rows_of((await get(subscribed, wait_ms=PATIENCE_MS)).messages) == [(2, 1, 2)]


async def test_what_is_acknowledged_does_not_come_again(subscribed: Edge) -> None:
    await add(subscribed, (1, 1, 1), (2, 1, 2))
    leased = rows_of((await get(subscribed, wait_ms=PATIENCE_MS, lease_ms=HOUR_MS)).messages)
    assert await ignored(subscribed, "Acknowledge", [*leased, (9, 9, 9)]) == 1
    assert await ignored(subscribed, "Acknowledge", leased) == 2
    counted = await stats(subscribed)
    assert (counted.backlog, counted.in_flight) == (0, 0)


async def test_a_stream_s_positions_may_be_acknowledged_without_it(subscribed: Edge) -> None:
    await add(subscribed, (1, 1, 1))
    stream = subscribed.caller.stream("Dispatch/Subscribe")
    opening = pb.Open(topic="t", subscription="s", type=pb.SubscriptionType.SUBSCRIPTION_TYPE_SHARED)
    await stream.send(pb.SubscribeRequest(open=opening))
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=1)))
    assert (await stream.receive()).HasField("opened")
    assert await ignored(subscribed, "Acknowledge", rows_of((await stream.receive()).messages)) == 0


@pytest.mark.parametrize("how", ["cancel", "deadline", "connection"])
async def test_a_caller_that_goes_away_while_it_waits_leases_nothing(
    subscribed: Edge, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever asks next gets the rows at once, not when the lease of nobody is over."""
    begun, ended = asyncio.Event(), asyncio.Event()
    get_scheduled = subscribed.engine.requests.get_scheduled

    async def watched(*arguments: Any, **fields: Any) -> call_values.Leased:
        begun.set()
        try:
            return await get_scheduled(*arguments, **fields)
        finally:
            ended.set()

    monkeypatch.setattr(subscribed.engine.requests, "get_scheduled", watched)
    request = pb.GetScheduledMessagesRequest(
        topic="t", subscription="s", max_rows=10, lease_ms=12 * HOUR_MS, wait_ms=PATIENCE_MS
    ).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{subscribed.port}") as channel:
        call: Any = channel.unary_unary(f"/tarry.v1.{GET}")
        if how == "deadline":
            for deadline_s in DEADLINES_S:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call(request, timeout=deadline_s)
                # On a busy machine it may be over before the call has arrived.
                if begun.is_set():
                    break
        else:
            waiting = call(request, timeout=300)
            await asyncio.wait_for(begun.wait(), 300)
            if how == "cancel":
                waiting.cancel()
            else:
                await channel.close()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await waiting
        await asyncio.wait_for(ended.wait(), 300)
    await add(subscribed, (1, 1, 1))
    assert rows_of((await get(subscribed, wait_ms=PATIENCE_MS)).messages) == [(1, 1, 1)]


async def test_a_wait_is_answered_before_the_deadline(subscribed: Edge) -> None:
    """Not by the deadline itself: rows that came at that moment would be leased by nobody."""
    answers: list[list[Row]] = []
    for deadline_s in DEADLINES_S:
        with contextlib.suppress(grpc.aio.AioRpcError):
            answers.append(rows_of((await get(subscribed, wait_ms=PATIENCE_MS, timeout_s=deadline_s)).messages))
            break
    assert answers == [[]]


async def test_rows_that_were_leased_for_nobody_are_due_again_at_once(
    subscribed: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has leased rows, and is not done, when the caller goes away."""
    requests = subscribed.engine.requests
    leased = asyncio.Event()
    get_scheduled = requests.get_scheduled

    async def slowly(*arguments: Any, **fields: Any) -> call_values.Leased:
        answer = await get_scheduled(*arguments, **fields)
        leased.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(requests, "get_scheduled", slowly)
    await add(subscribed, (1, 1, 1))
    call = asyncio.create_task(get(subscribed, lease_ms=12 * HOUR_MS, wait_ms=PATIENCE_MS))
    await asyncio.wait_for(leased.wait(), 300)
    assert subscribed.state().in_flight
    call.cancel()
    await until(lambda: not subscribed.state().in_flight)


async def test_the_epoch_and_what_needs_a_rebuild_come_along(subscribed: Edge, store: MemoryStore) -> None:
    expected = await lose_bucket(subscribed, store)
    await add(subscribed, (1, 1, 1))
    answer = await get(subscribed, wait_ms=PATIENCE_MS)
    assert answer.messages.epoch == subscribed.topics["t"].epoch
    assert list(answer.rebuild_needed) == [expected]
