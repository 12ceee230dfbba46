"""KEY_SHARED streams over the wire: consumers, plans, what is taken back, and the list of consumers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from daemon import config
from daemon.grpc_services import subscribe
from daemon.grpc_services.receiving import Receiving
from daemon.owner.engine import Engine
from tarry.packed_fields import nested
from tarry.v1 import delayed_delivery_pb2, inspect_pb2, policy_pb2
from tarry.v1 import dispatch_pb2 as pb
from tests._support import real_engine
from tests.daemon.grpc_services._support.bad_key_shared import (
    BAD_KEY_SHARED_OPENS,
    KEY_SHARED,
    KEY_SHARED_REFUSED_IN_BAND,
    LIST_CONSUMERS,
    UNNUMBERED,
    consumer,
    open_by_key,
)
from tests.daemon.grpc_services._support.bad_requests import SUBSCRIPTION, TOPIC, Case, opening
from tests.daemon.grpc_services._support.refusals import assert_says
from tests.daemon.grpc_services.conftest import Edge, Stream

SUBSCRIBE = "Dispatch/Subscribe"
HALF, LAST = 1 << 15, (1 << 16) - 1
STICKY = policy_pb2.KeySharedPolicy(
    selector=policy_pb2.HASH_SELECTOR_STICKY, nack_order=policy_pb2.NACK_ORDER_BLOCK_KEY
)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    settings = config.load(environment={}, overrides=["limits.consumers_per_subscription_max=4", *SMALL])
    async with real_engine.serving(settings) as engine:
        yield engine


SMALL = ("limits.rows_per_request_max=1000", "limits.message_bytes_max=1048576")


async def created(edge: Edge, key_shared: policy_pb2.KeySharedPolicy | None = None) -> None:
    policy = policy_pb2.SubscriptionPolicy(nack_precision_bits=0, key_shared=key_shared)
    request = pb.CreateSubscriptionRequest(topic=TOPIC, subscription=SUBSCRIPTION, policy=policy)
    await edge.caller.unary("Dispatch/CreateSubscription", request)


async def opened(edge: Edge, *consumers: pb.Consumer, **others: Any) -> tuple[Stream, pb.Opened]:
    stream = edge.caller.stream(SUBSCRIBE)
    await stream.send(open_by_key(*consumers, **others))
    return stream, (await stream.receive()).opened


def half(consumer_id: int, *, upper: bool = False, permits: int = 100) -> pb.Consumer:
    hashes = policy_pb2.HashRange(first=HALF if upper else 0, last=LAST if upper else HALF - 1)
    return consumer(consumer_id=consumer_id, name=f"consumer-{consumer_id}", permits=permits, hash_ranges=[hashes])


async def add(edge: Edge, entries: list[int], hashes: list[int], *, ledger: int = 1) -> None:
    request = delayed_delivery_pb2.AddMessagesRequest(
        topic=TOPIC, ledger_id=[ledger], entry_id=entries, deliver_at_ms=[1], key_hash=hashes
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", request)


def plan(request_id: int, entries: list[int], hashes: list[int]) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(
        plan_dispatch=pb.PlanDispatch(request_id=request_id, ledger_id=[9], entry_id=entries, key_hash=hashes)
    )


def acknowledge(request_id: int, entries: list[int], *, ledger: int = 1, due_ms: int = 1) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(
        acknowledge=pb.Acknowledge(request_id=request_id, ledger_id=[ledger], entry_id=entries, deliver_at_ms=[due_ms])
    )


async def consumers(edge: Edge, **fields: Any) -> inspect_pb2.ListConsumersResponse:
    request = inspect_pb2.ListConsumersRequest(topic=TOPIC, subscription=SUBSCRIPTION, **fields)
    answer: inspect_pb2.ListConsumersResponse = await edge.caller.unary(LIST_CONSUMERS, request)
    return answer


async def received(stream: Stream, count: int) -> list[tuple[int, int]]:
    """(consumer, entry) of so many rows, however many messages they come in."""
    rows: list[tuple[int, int]] = []
    while len(rows) < count:
        messages = (await stream.receive()).messages
        rows += zip(messages.consumer_id, messages.entry_id, strict=True)
    return rows


async def test_messages_say_which_consumer_receives_each_row(edge: Edge) -> None:
    await created(edge, STICKY)
    stream, answer = await opened(edge, half(1), half(2, upper=True, permits=0))
    assert (answer.epoch > 0, answer.held, list(answer.not_held)) == (True, 0, [])
    await add(edge, [1, 2, 3, 4], [7, HALF, 7, HALF])
    assert await received(stream, 2) == [(1, 1), (1, 3)]
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=9, consumer_id=2)))
    assert await received(stream, 2) == [(2, 2), (2, 4)]
    await stream.send(acknowledge(5, [1, 2, 3, 4, 5]))
    done = (await stream.receive()).done
    assert (done.request_id, done.ignored) == (5, 1)


async def test_consumers_join_and_leave_in_the_order_of_the_requests(edge: Edge) -> None:
    await created(edge, STICKY)
    stream, _ = await opened(edge)
    join = pb.SubscribeRequest(add_consumer=pb.AddConsumer(request_id=1, consumer=half(1, permits=0)))
    leave = pb.SubscribeRequest(remove_consumer=pb.RemoveConsumer(request_id=2, consumer_id=1))
    await stream.send(join)
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=1, consumer_id=1)))
    await add(edge, [1, 2], [7, 7])
    assert (await stream.receive()).done.request_id == 1
    assert await received(stream, 1) == [(1, 1)], "the permit was for one who had joined before"
    await stream.send(leave)
    assert (await stream.receive()).done.request_id == 2
    await stream.send(pb.SubscribeRequest(add_consumer=pb.AddConsumer(request_id=3, consumer=half(1))))
    answers = [await stream.receive() for _ in range(2)]
    assert sorted(each.done.request_id for each in answers) == [0, 3]
    (messages,) = (each.messages for each in answers if each.HasField("messages"))
    assert (list(messages.consumer_id), list(messages.entry_id)) == ([1, 1], [1, 2])


async def test_plans_are_answered_in_one_order_with_messages(edge: Edge) -> None:
    await created(edge, STICKY)
    stream, _ = await opened(edge, half(1, permits=3))
    await stream.send(plan(1, [1, 2], [7, HALF]))
    await stream.send(plan(2, [3, 4, 5], [7, 7, 7]))
    answers = [(await stream.receive()).planned for _ in range(2)]
    assert [(each.request_id, list(each.consumer_id)) for each in answers] == [(1, [1, 0]), (2, [1, 1, 0])]
    assert all(each.epoch > 0 for each in answers)
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=1, consumer_id=1)))
    messages = (await stream.receive()).messages
    assert (list(messages.entry_id), list(messages.deliver_at_ms), list(messages.key_hash)) == ([5], [0], [7])
    await stream.send(pb.SubscribeRequest(mark_delete=pb.MarkDelete(request_id=3, ledger_id=9, entry_id=3)))
    assert (await stream.receive()).done.request_id == 3
    await stream.send(acknowledge(4, [1, 3, 4, 5], ledger=9, due_ms=0))
    done = (await stream.receive()).done
    assert (done.request_id, done.ignored) == (4, 2), "two were acknowledged by the mark"


async def test_what_is_taken_back_comes_before_the_answer(edge: Edge) -> None:
    await created(edge, STICKY)
    stream, _ = await opened(edge, half(1))
    await add(edge, [1, 2, 3], [7, 8, 7])
    await received(stream, 3)
    await stream.send(
        pb.SubscribeRequest(
            negative_acknowledge=pb.NegativeAcknowledge(
                request_id=1, ledger_id=[1], entry_id=[1], deliver_at_ms=[1], delay_ms=[100]
            )
        )
    )
    taken = (await stream.receive()).taken_back
    assert (list(taken.ledger_id), list(taken.entry_id), list(taken.deliver_at_ms)) == ([1], [3], [1])
    assert (list(taken.consumer_id), list(taken.batch_index), taken.epoch > 0) == ([1], [], True)
    assert (await stream.receive()).done.request_id == 1
    assert await received(stream, 2) == [(1, 1), (1, 3)]


async def test_what_is_held_no_longer_is_named_in_the_answer(edge: Edge) -> None:
    await created(edge, STICKY)
    stream, _ = await opened(edge, half(1))
    await add(edge, [1, 2, 3], [7, 7, 7])
    await received(stream, 3)
    await stream.send(acknowledge(1, [2]))
    await stream.receive()
    await stream.done_sending()
    with pytest.raises(EOFError):
        await stream.receive()
    again, answer = await opened(
        edge,
        half(5),
        held_ledger_id=[1, 1, 1, 9],
        held_entry_id=[1, 2, 3, 9],
        held_deliver_at_ms=[1, 1, 1, 0],
        held_consumer_id=[5] * 4,
        held_key_hash=[0, 0, 0, 7],
    )
    assert (answer.held, list(answer.not_held)) == (3, [1])
    await again.send(acknowledge(2, [1, 3]))
    assert (await again.receive()).done.ignored == 0


async def test_streams_of_the_other_type_are_aborted(edge: Edge) -> None:
    await created(edge)
    _, answer = await opened(edge, consumer())
    assert answer.epoch
    shared = edge.caller.stream(SUBSCRIBE)
    await shared.send(opening())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await shared.receive()
    assert refused.value.code() is grpc.StatusCode.ABORTED
    get = pb.GetScheduledMessagesRequest(topic=TOPIC, subscription=SUBSCRIPTION, max_rows=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary("Dispatch/GetScheduledMessages", get)
    assert refused.value.code() is grpc.StatusCode.ABORTED


async def test_a_half_closed_stream_answers_what_is_under_way(edge: Edge) -> None:
    await created(edge, STICKY)
    stream, _ = await opened(edge, half(1))
    await stream.send(plan(1, [1], [7]))
    await stream.send(plan(2, [2], [7]))
    await stream.done_sending()
    answers = [await stream.receive() for _ in range(2)]
    assert {each.planned.request_id or each.done.request_id for each in answers} == {1, 2}, "planned, or refused"
    with pytest.raises(EOFError):
        await stream.receive()


async def test_consumers_are_listed_page_by_page_with_what_their_keys_wait_for(edge: Edge) -> None:
    await created(edge, STICKY)
    assert not (await consumers(edge)).HasField("key_shared")
    stream, _ = await opened(edge, half(1), half(2, upper=True, permits=1))
    await add(edge, [1, 2, 3], [7, HALF, HALF])
    await received(stream, 2)
    first = await consumers(edge, page_size=1)
    second = await consumers(edge, page_size=1, page_token=first.next_page_token)
    assert second.next_page_token == ""
    (one,), (two,) = first.consumers, second.consumers
    assert (one.name, one.consumer_id, one.permits, one.unacked, one.slots) == ("consumer-1", 1, 99, 1, HALF)
    assert [(each.first, each.last) for each in two.hash_ranges] == [(HALF, LAST)]
    assert (two.consumer_id, two.permits, two.unacked) == (2, 0, 1)
    assert one.stream == two.stream
    assert one.instance_id < two.instance_id
    shown = second.key_shared
    assert (shown.consumers, shown.waiting, shown.slots_without_consumer) == (2, 1, 0)
    assert shown.policy.selector == policy_pb2.HASH_SELECTOR_STICKY
    stats = await edge.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic=TOPIC))
    (subscription,) = stats.subscriptions
    assert (subscription.consumers, subscription.waiting, subscription.permits) == (2, 1, 99)
    moved = pb.SubscribeRequest(remove_consumer=pb.RemoveConsumer(request_id=4, consumer_id=1))
    await stream.send(moved)
    assert (await stream.receive()).done.request_id == 4
    assert (await consumers(edge)).key_shared.slots_without_consumer == HALF


async def test_positions_of_last_sent_order_are_shown(edge: Edge) -> None:
    policy = policy_pb2.KeySharedPolicy(
        order=policy_pb2.KEY_ORDER_LAST_SENT_POSITION, selector=policy_pb2.HASH_SELECTOR_AUTO_SPLIT
    )
    await created(edge, policy)
    stream, _ = await opened(edge, consumer(permits=10))
    await stream.send(plan(1, [1, 2], [7, 8]))
    assert list((await stream.receive()).planned.consumer_id) == [1, 1]
    join = pb.AddConsumer(request_id=2, consumer=consumer(consumer_id=2, name="two", address="10.0.0.2:1"))
    await stream.send(pb.SubscribeRequest(add_consumer=join))
    assert (await stream.receive()).done.request_id == 2
    answer = await consumers(edge)
    position = answer.key_shared.last_sent_position
    assert (position.ledger_id, position.entry_id) == (9, 2)
    (waiting,) = answer.key_shared.consumers_after_mark_delete_position
    joined = answer.consumers[1]
    assert (waiting.name, waiting.address, waiting.instance_id) == ("two", "10.0.0.2:1", joined.instance_id)
    assert joined.last_sent_position_when_joining == waiting.last_sent_position_when_joining == position
    assert not answer.consumers[0].HasField("last_sent_position_when_joining")


@pytest.mark.parametrize("case", BAD_KEY_SHARED_OPENS, ids=str)
async def test_a_bad_open_ends_the_stream_and_leaves_nothing(edge: Edge, case: Case) -> None:
    await created(edge)
    stream = edge.caller.stream(SUBSCRIBE)
    await stream.send(case.request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert_says(case, refused.value.code(), refused.value.details())
    stats = await edge.caller.unary("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest(topic=TOPIC))
    assert stats.subscriptions[0].dispatchers == 0
    assert not (await consumers(edge)).HasField("key_shared")


@pytest.mark.parametrize("case", KEY_SHARED_REFUSED_IN_BAND, ids=str)
async def test_a_bad_request_is_answered_by_done_and_the_stream_goes_on(edge: Edge, case: Case) -> None:
    await created(edge)
    stream, _ = await opened(edge, consumer(consumer_id=5, permits=5))
    await stream.send(case.request)
    done = (await stream.receive()).done
    assert done.request_id == (0 if case.name in UNNUMBERED else 9)
    assert_says(case, done.error.code, done.error.message)
    answer = await consumers(edge)
    assert [(each.consumer_id, each.permits) for each in answer.consumers] == [(5, 5)]
    await stream.send(plan(3, [1], [7]))
    assert list((await stream.receive()).planned.consumer_id) == [5]


async def test_a_caller_that_goes_away_while_its_stream_opens_leaves_none_open(edge: Edge) -> None:
    await created(edge)
    streams = [edge.caller.stream(SUBSCRIBE) for _ in range(20)]
    for stream in streams:
        await stream.send(pb.SubscribeRequest(open=pb.Open(topic=TOPIC, subscription=SUBSCRIPTION, type=KEY_SHARED)))
        stream.call.cancel()
    async with asyncio.timeout(300):
        while (await consumers(edge)).HasField("key_shared"):
            pass
    other, _ = await opened(edge, consumer(permits=1))
    await add(edge, [1], [7])
    assert await received(other, 1) == [(1, 1)]


class _Silent:
    """A caller that reads its first answer, and no other."""

    def __init__(self, receiving: Receiving, requests: list[bytes]) -> None:
        self.receiving = receiving
        self._requests = requests
        self._answers = 0
        self.is_writing, self.leaves = asyncio.Event(), asyncio.Event()

    async def read(self) -> bytes:
        if not self._requests:
            await asyncio.Event().wait()
        return self._requests.pop(0)

    async def write(self, _: bytes) -> None:
        self._answers += 1
        if self._answers > 1:
            self.is_writing.set()
            await self.leaves.wait()

    def check_topic(self, topic: str) -> None:
        """It may use all."""


async def test_a_caller_that_reads_no_plans_keeps_no_other_call_from_being_received(edge: Edge) -> None:
    await created(edge, STICKY)
    settings = config.load(environment={}, overrides=["grpc.received_bytes_max=1048576", *SMALL])
    # A field that nobody knows
    padding = nested(b"\xfa\x7f", bytes(600_000))
    requests = [open_by_key(half(1)).SerializeToString()]
    requests += [plan(number, [number], [7]).SerializeToString() + padding for number in (1, 2)]
    receiving = Receiving(settings)
    silent: Any = _Silent(receiving, requests)
    serving = asyncio.create_task(subscribe.serve(edge.engine, settings, silent))
    await asyncio.wait_for(silent.is_writing.wait(), 5)
    await asyncio.wait_for(receiving.room(), 1)
    silent.leaves.set()
    serving.cancel()
    await asyncio.wait([serving])
