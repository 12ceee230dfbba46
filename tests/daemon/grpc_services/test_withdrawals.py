"""Cancelling and rescheduling on the wire: each position's result by its row of the request."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tarry.v1 import delayed_delivery_pb2 as pb
from tarry.v1 import dispatch_pb2
from tests.daemon.grpc_services._support.shown_rows import scheduled
from tests.daemon.grpc_services.conftest import Edge

ADD = "DelayedDelivery/AddMessages"
STREAM_ADD = "DelayedDelivery/StreamAddMessages"
CANCEL = "DelayedDelivery/CancelMessages"
RESCHEDULE = "DelayedDelivery/RescheduleMessages"
FAR_MS = 2_000_000_000_000
U64_MAX = (1 << 64) - 1


async def add(edge: Edge, *entry_ids: int, due: int = FAR_MS, **fields: Any) -> pb.AddMessagesResponse:
    request = pb.AddMessagesRequest(topic="t", ledger_id=[5], entry_id=entry_ids, deliver_at_ms=[due], **fields)
    answer: pb.AddMessagesResponse = await edge.caller.unary(ADD, request)
    return answer


async def subscribe(edge: Edge, name: str) -> None:
    request = dispatch_pb2.CreateSubscriptionRequest(topic="t", subscription=name)
    await edge.caller.unary("Dispatch/CreateSubscription", request)


async def leased(edge: Edge, name: str) -> dispatch_pb2.Messages:
    request = dispatch_pb2.GetScheduledMessagesRequest(topic="t", subscription=name, max_rows=10, lease_ms=60_000)
    answer: dispatch_pb2.GetScheduledMessagesResponse = await edge.caller.unary(
        "Dispatch/GetScheduledMessages", request
    )
    return answer.messages


async def withdraw(edge: Edge, method: str, ledger_id: list[int], entry_id: list[int], **fields: Any) -> Any:
    positions: dict[str, Any] = {"topic": "t", "ledger_id": ledger_id, "entry_id": entry_id}
    if method == CANCEL:
        return await edge.caller.unary(CANCEL, pb.CancelMessagesRequest(**positions, **fields))
    times = fields if "delay_ms" in fields else {"deliver_at_ms": [FAR_MS + 9], **fields}
    return await edge.caller.unary(RESCHEDULE, pb.RescheduleMessagesRequest(**positions, **times))


def refused(answer: Any) -> tuple[list[int], list[int], list[int]]:
    return list(answer.not_found_index), list(answer.already_due_index), list(answer.in_flight_index)


@pytest.mark.parametrize("method", [CANCEL, RESCHEDULE])
async def test_each_position_is_answered_by_its_row_of_the_request(edge: Edge, method: str) -> None:
    await subscribe(edge, "s")
    await add(edge, 1, 2)
    await add(edge, 3, due=1)
    assert list((await leased(edge, "s")).entry_id) == [3]
    await add(edge, 4, due=1)
    answer = await withdraw(edge, method, [5, 5, 5, 5, 9, 5], [4, 1, 3, 77, 2, 2])
    assert refused(answer) == ([3, 4], [0], [2])
    assert (answer.cancelled if method == CANCEL else answer.rescheduled) == 2


async def test_what_was_cancelled_is_not_found_and_may_be_added_again(edge: Edge) -> None:
    await add(edge, 1, U64_MAX)
    assert (await withdraw(edge, CANCEL, [5], [1, U64_MAX])).cancelled == 2
    again = await withdraw(edge, CANCEL, [5], [U64_MAX, 1])
    assert (again.cancelled, refused(again)) == (0, ([0, 1], [], []))
    assert (await add(edge, 1)).accepted == 1


async def test_a_reschedule_sets_times_and_hashes_row_by_row_or_for_all(edge: Edge) -> None:
    await add(edge, 1, 2, key_hash=[7])
    answer = await withdraw(edge, RESCHEDULE, [5], [2, 1], deliver_at_ms=[FAR_MS + 2, FAR_MS + 1], key_hash=[8])
    assert answer.rescheduled == 2
    assert await scheduled(edge) == {(5, 1): (FAR_MS + 1, 8), (5, 2): (FAR_MS + 2, 8)}
    before_ms = time.time_ns() // 1_000_000
    assert (await withdraw(edge, RESCHEDULE, [5], [2], delay_ms=[1000])).rescheduled == 1
    due, key_hash = (await scheduled(edge))[5, 2]
    assert before_ms + 1000 <= due <= time.time_ns() // 1_000_000 + 1000
    assert key_hash == 0


async def test_a_time_that_has_come_makes_a_row_due_at_once(edge: Edge) -> None:
    await subscribe(edge, "s")
    await add(edge, 1, key_hash=[7])
    assert (await withdraw(edge, RESCHEDULE, [5], [1], deliver_at_ms=[3], key_hash=[9])).rescheduled == 1
    messages = await leased(edge, "s")
    assert (list(messages.entry_id), list(messages.deliver_at_ms), list(messages.key_hash)) == ([1], [3], [9])


@pytest.mark.parametrize("method", [CANCEL, RESCHEDULE])
async def test_a_subscription_names_its_own_index_alone(edge: Edge, method: str) -> None:
    await subscribe(edge, "s")
    assert (await add(edge, 1)).accepted == 1
    assert (await add(edge, 1, 2, subscription="s")).accepted == 2
    answer = await withdraw(edge, method, [5], [1, 2, 3], subscription="s")
    assert refused(answer) == ([2], [], [])
    assert await scheduled(edge) == {(5, 1): (FAR_MS, 0)}
    assert await scheduled(edge, "s") == ({} if method == CANCEL else dict.fromkeys([(5, 1), (5, 2)], (FAR_MS + 9, 0)))


async def test_without_a_subscription_a_position_leaves_every_index_or_none(edge: Edge) -> None:
    await subscribe(edge, "s")
    await add(edge, 1, 2)
    await add(edge, 1, subscription="s")
    await add(edge, 2, due=1, subscription="s")
    answer = await withdraw(edge, CANCEL, [5], [1, 2])
    assert (answer.cancelled, refused(answer)) == (1, ([], [1], []))
    assert (await scheduled(edge)).keys() == {(5, 2)}
    assert not await scheduled(edge, "s")
    assert list((await leased(edge, "s")).entry_id) == [2]


async def test_an_add_stream_takes_rows_for_one_subscription(edge: Edge) -> None:
    await subscribe(edge, "s")
    stream = edge.caller.stream(STREAM_ADD)
    request = pb.AddMessagesRequest(topic="t", ledger_id=[5], entry_id=[1, 2], deliver_at_ms=[FAR_MS], subscription="s")
    await stream.send(pb.StreamAddMessagesRequest(request_id=1, add=request))
    assert (await stream.receive()).added.accepted == 2
    # Not the plain form: it is read by the runtime.
    request.already_due = pb.AlreadyDue.ALREADY_DUE_RETURN
    await stream.send(pb.StreamAddMessagesRequest(request_id=2, add=request))
    assert (await stream.receive()).added.duplicates == 2
    assert not await scheduled(edge)
    assert (await scheduled(edge, "s")).keys() == {(5, 1), (5, 2)}
