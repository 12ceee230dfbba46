"""Negative acknowledgements over the wire, on a stream and without one, and the policies that they follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from storage_backends.formats.index_ids import NO_BATCH_INDEX
from tarry.v1 import delayed_delivery_pb2, policy_pb2
from tarry.v1 import dispatch_pb2 as pb
from tests.daemon.grpc_services.conftest import Edge, Stream

SHARED = pb.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
HOUR_MS = 3_600_000
AT_ONCE = policy_pb2.SubscriptionPolicy(
    redelivery=policy_pb2.RedeliveryPolicy(constant=policy_pb2.ConstantDelay(delay_ms=0)), nack_precision_bits=0
)

Row = tuple[int, int, int]
"""deliver_at_ms, ledger, entry"""


async def create(edge: Edge, policy: policy_pb2.SubscriptionPolicy = AT_ONCE) -> None:
    request = pb.CreateSubscriptionRequest(topic="t", subscription="s", policy=policy)
    await edge.caller.unary("Dispatch/CreateSubscription", request)


async def opened(edge: Edge, *, permits: int = 1_000, **held: Any) -> tuple[Stream, pb.Opened]:
    stream = edge.caller.stream("Dispatch/Subscribe")
    await stream.send(pb.SubscribeRequest(open=pb.Open(topic="t", subscription="s", type=SHARED, **held)))
    answer = (await stream.receive()).opened
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=permits)))
    return stream, answer


async def add(edge: Edge, *entries: int) -> list[Row]:
    request = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=entries, deliver_at_ms=[1])
    await edge.caller.unary("DelayedDelivery/AddMessages", request)
    return [(1, 1, entry) for entry in entries]


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    due, ledgers, entries = zip(*rows, strict=True)
    return {"deliver_at_ms": due, "ledger_id": ledgers, "entry_id": entries}


def nack(rows: Sequence[Row], request_id: int = 7, **fields: Any) -> pb.SubscribeRequest:
    asked = pb.NegativeAcknowledge(request_id=request_id, **columns(rows), **fields)
    return pb.SubscribeRequest(negative_acknowledge=asked)


async def received(stream: Stream, count: int) -> tuple[list[tuple[Row, int, int]], list[pb.Done]]:
    """So many rows with their counts and batch indexes, and the answers that came with them."""
    rows: list[tuple[Row, int, int]] = []
    done: list[pb.Done] = []
    while len(rows) < count:
        answer = await stream.receive()
        if answer.HasField("done"):
            done.append(answer.done)
            continue
        got = answer.messages
        positions = zip(got.deliver_at_ms, got.ledger_id, got.entry_id, strict=True)
        number = len(got.entry_id)
        counts = list(got.redelivery_count) or [0] * number
        parts = list(got.batch_index) or [NO_BATCH_INDEX] * number
        rows += zip(positions, counts, parts, strict=True)
    return rows, done


async def done_of(stream: Stream) -> pb.Done:
    answer = await stream.receive()
    assert answer.HasField("done"), answer
    done: pb.Done = answer.done
    return done


async def test_a_nacked_row_comes_back_with_its_count(edge: Edge) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2, 3)
    await received(stream, 3)
    for number in range(1, 4):
        await stream.send(nack(rows[:2], number))
        back, done = await received(stream, 2)
        done = done or [await done_of(stream)]
        assert back == [(row, number, NO_BATCH_INDEX) for row in rows[:2]]
        assert [(each.request_id, each.ignored, each.dead_lettered) for each in done] == [(number, 0, 0)]


@pytest.mark.parametrize("fields", [{"delay_ms": [HOUR_MS]}, {"delay_ms": [HOUR_MS] * 2}, {"delay_level": [18]}])
async def test_the_delay_or_the_level_of_the_request_counts(edge: Edge, fields: dict[str, Any]) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2, 3)
    await received(stream, 3)
    await stream.send(nack(rows[:2], **fields))
    assert (await done_of(stream)).ignored == 0
    await stream.send(nack(rows[2:], delay_level=[0]))
    back, _ = await received(stream, 1)
    assert back == [(rows[2], 1, NO_BATCH_INDEX)]


async def test_what_was_ignored_and_what_died_is_told(edge: Edge) -> None:
    await create(edge, policy_pb2.SubscriptionPolicy(max_redeliver_count=0))
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2, 3)
    await received(stream, 3)
    await stream.send(nack([*rows[:2], (5, 9, 9)]))
    done = await done_of(stream)
    assert (done.ignored, done.dead_lettered, done.epoch > 0) == (1, 2, True)
    await stream.send(nack(rows, reject=True, reason="no such order"))
    done = await done_of(stream)
    assert (done.ignored, done.dead_lettered) == (2, 1)


async def test_a_nack_with_id_zero_is_not_answered(edge: Edge) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2)
    await received(stream, 2)
    await stream.send(nack(rows[:1], 0, delay_ms=[HOUR_MS]))
    await stream.send(nack(rows[1:], 3, delay_ms=[HOUR_MS]))
    assert (await done_of(stream)).request_id == 3


async def test_messages_of_a_batch_come_back_with_their_index_and_are_acknowledged_by_it(edge: Edge) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2)
    await received(stream, 2)
    await stream.send(nack([rows[0]] * 3 + [rows[1]], batch_index=[0, 5, 65_535, NO_BATCH_INDEX]))
    back, done = await received(stream, 4)
    assert sorted(back) == [(rows[0], 1, part) for part in (0, 5, 65_535)] + [(rows[1], 1, NO_BATCH_INDEX)]
    if not done:
        await done_of(stream)
    acknowledge = pb.Acknowledge(request_id=8, **columns([rows[0], rows[0]]), batch_index=[5, 6])
    await stream.send(pb.SubscribeRequest(acknowledge=acknowledge))
    assert (await done_of(stream)).ignored == 1
    await stream.done_sending()
    with pytest.raises(EOFError):
        await stream.receive()
    held = {f"held_{name}": values for name, values in columns([rows[0], rows[0], rows[0]]).items()}
    again, answer = await opened(edge, **held, held_batch_index=[0, NO_BATCH_INDEX, 5])
    assert answer.held == 2
    back, _ = await received(again, 2)
    assert sorted((row, part) for row, _, part in back) == [(rows[0], 65_535), (rows[1], NO_BATCH_INDEX)]


async def test_a_position_that_was_never_handed_out_may_be_nacked_with_its_hash(edge: Edge) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    asked = pb.NegativeAcknowledge(request_id=1, ledger_id=[4], entry_id=[1, 2], key_hash=[11, 12])
    await stream.send(pb.SubscribeRequest(negative_acknowledge=asked))
    hashes: list[int] = []
    entries: list[int] = []
    while len(entries) < 2:
        messages = (await stream.receive()).messages
        entries += messages.entry_id
        hashes += messages.key_hash
        assert set(messages.deliver_at_ms) <= {0}
    assert (entries, hashes) == ([1, 2], [11, 12])


async def test_what_was_acknowledged_comes_again_by_a_forwarded_nack_of_the_stream(edge: Edge) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2)
    await received(stream, 2)
    await stream.send(pb.SubscribeRequest(acknowledge=pb.Acknowledge(request_id=1, **columns(rows))))
    assert (await done_of(stream)).ignored == 0
    await stream.send(nack(rows[:1], 2, redelivery_count=[0]))
    assert (await done_of(stream)).ignored_reason == [pb.IGNORED_REASON_NOT_THERE]
    await stream.send(nack(rows[1:], 3, redelivery_count=[0], forwarded=True))
    back, done = await received(stream, 1)
    done = done or [await done_of(stream)]
    assert back == [(rows[1], 1, NO_BATCH_INDEX)]
    assert [(each.request_id, each.ignored) for each in done] == [(3, 0)]


async def test_a_leased_row_is_nacked_without_a_stream(edge: Edge) -> None:
    await create(edge)
    rows = await add(edge, 1, 2)
    request = pb.GetScheduledMessagesRequest(topic="t", subscription="s", max_rows=10, wait_ms=5_000)
    await edge.caller.unary("Dispatch/GetScheduledMessages", request)
    asked = pb.NegativeAcknowledgeRequest(topic="t", subscription="s", **columns([*rows, (3, 3, 3)]))
    answer = await edge.caller.unary("Dispatch/NegativeAcknowledge", asked)
    assert (answer.ignored, answer.dead_lettered) == (1, 0)
    leased = await edge.caller.unary("Dispatch/GetScheduledMessages", request)
    assert (list(leased.messages.entry_id), list(leased.messages.redelivery_count)) == ([1, 2], [1, 1])
    assert not leased.messages.batch_index
    asked = pb.NegativeAcknowledgeRequest(topic="t", subscription="s", **columns(rows), reject=True, reason="bad")
    assert (await edge.caller.unary("Dispatch/NegativeAcknowledge", asked)).dead_lettered == 2


async def test_an_extension_tells_what_the_stream_does_not_hold(edge: Edge) -> None:
    await create(edge)
    stream, _ = await opened(edge)
    rows = await add(edge, 1, 2)
    await received(stream, 2)
    for claimed, ignored in ((rows, 0), ([*rows, (3, 3, 3)], 1)):
        extend = pb.Extend(request_id=5, **columns(claimed))
        await stream.send(pb.SubscribeRequest(extend=extend))
        done = await done_of(stream)
        assert (done.request_id, done.ignored) == (5, ignored)


@pytest.mark.parametrize(
    "redelivery",
    [
        policy_pb2.RedeliveryPolicy(constant=policy_pb2.ConstantDelay(delay_ms=5)),
        policy_pb2.RedeliveryPolicy(constant=policy_pb2.ConstantDelay()),
        policy_pb2.RedeliveryPolicy(linear=policy_pb2.LinearDelay(initial_ms=1, step_ms=2, max_ms=30)),
        policy_pb2.RedeliveryPolicy(
            exponential=policy_pb2.ExponentialDelay(initial_ms=1, multiplier=1.5, max_ms=30, jitter=0.25)
        ),
        policy_pb2.RedeliveryPolicy(list=policy_pb2.DelayList(delay_ms=[3, 1, 2])),
        policy_pb2.RedeliveryPolicy(ladder=policy_pb2.DelayLadder()),
    ],
    ids=lambda each: each.WhichOneof("delay"),
)
async def test_a_policy_comes_back_as_it_was_set(edge: Edge, redelivery: policy_pb2.RedeliveryPolicy) -> None:
    policy = policy_pb2.SubscriptionPolicy(
        redelivery=redelivery, max_redeliver_count=0, ack_timeout_ms=100, nack_precision_bits=20
    )
    await create(edge, policy)
    await create(edge, policy)
    request = pb.UpdateSubscriptionRequest(topic="t", subscription="s", policy=policy)
    assert (await edge.caller.unary("Dispatch/UpdateSubscription", request)).policy == policy
