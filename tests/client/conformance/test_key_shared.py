"""A KEY_SHARED subscription: consumers, batches of each, what is taken back, plans, and all of it after a break."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
import tarry.aio
from tarry.v1 import dispatch_pb2
from tests._support.outcomes import nack_result
from tests.client._support.fake_daemon import (
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    answer,
    confirm_all,
    done,
    held_of,
    hold,
    messages,
    opened,
    planned,
    status,
    take,
    taken_back,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "Subscribe"


def two() -> tuple[tarry.Consumer, tarry.Consumer]:
    return tarry.Consumer("a", permits=4, address="10.0.0.7:1"), tarry.Consumer("b", permits=8)


async def event(subscription: tarry.aio.KeySharedSubscription, kind: type[Any]) -> Any:
    received = await subscription.receive(WAIT_S)
    assert isinstance(received, kind)
    return received


def hashes(batch: tarry.Batch) -> list[int]:
    assert batch.key_hash is not None
    return list(batch.key_hash)


def refused(request: Any, code: int) -> dispatch_pb2.SubscribeResponse:
    request_id = getattr(request, request.WhichOneof("request")).request_id
    return dispatch_pb2.SubscribeResponse(done=dispatch_pb2.Done(request_id=request_id, epoch=1, error=status(code)))


async def test_each_batch_is_of_one_consumer_and_its_permits_come_back(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(6), consumer_id=[1, 2, 1, 2, 1, 1], key_hash=[5, 6, 5, 6, 5, 5])
        yield done(take(requests, "acknowledge"))
        flow = take(requests, "flow").flow
        assert (flow.consumer_id, flow.permits) == (1, 4)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    a, b = two()
    async with client.subscribe_key_shared("topic", "sub", consumers=[a, b], ack_linger_ms=0) as subscription:
        first, second = await event(subscription, tarry.ConsumerBatch), await event(subscription, tarry.ConsumerBatch)
        assert (first.consumer, first.consumer_id, first.entry_id.tolist()) == (a, 1, [0, 2, 4, 5])
        assert (second.consumer, second.consumer_id, second.entry_id.tolist()) == (b, 2, [1, 3])
        assert hashes(first) == [5] * 4
        assert subscription.consumers == (a, b)
        assert subscription.held == 6
        assert await subscription.ack(first) == 0
        _ = subscription.ack(second)
    (requests,) = daemon.requests(METHOD)
    opening = requests.taken[0].open
    assert opening.type == dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED
    assert [(each.consumer_id, each.name, each.permits, each.address) for each in opening.consumers] == [
        (1, "a", 4, "10.0.0.7:1"),
        (2, "b", 8, ""),
    ]


async def test_it_is_created_when_asked(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=1)))

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        hold(requests)

    daemon.script(METHOD, step)
    async with client.subscribe_key_shared("topic", "sub", consumers=[], create=True):
        pass
    assert [name for name, _ in daemon.calls] == ["CreateSubscription", "GetVersion", METHOD]


async def test_consumers_join_and_leave(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    """What comes for one that has left is dropped; one that is refused is not there."""

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        joining = take(requests, "add_consumer")
        assert (joining.add_consumer.consumer.consumer_id, joining.add_consumer.consumer.permits) == (3, 1_000)
        assert [(each.first, each.last) for each in joining.add_consumer.consumer.hash_ranges] == [(0, 99)]
        yield done(joining)
        yield messages(range(2), consumer_id=[3, 1])
        yield refused(take(requests, "add_consumer"), code_pb2.INVALID_ARGUMENT)
        leaving = take(requests, "remove_consumer")
        assert leaving.remove_consumer.consumer_id == 1
        yield messages(range(2, 4), consumer_id=[1, 3])
        yield done(leaving)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    a, b = two()
    c = tarry.Consumer("c", hash_ranges=(tarry.HashRange(0, 99),))
    async with client.subscribe_key_shared("topic", "sub", consumers=[a, b]) as subscription:
        await subscription.add_consumer(c)
        of_a, of_c = await event(subscription, tarry.ConsumerBatch), await event(subscription, tarry.ConsumerBatch)
        assert (of_a.consumer, of_c.consumer) == (a, c)
        with pytest.raises(tarry.InvalidArgument):
            await subscription.add_consumer(tarry.Consumer("c"))
        assert list(subscription.consumers) == [a, b, c]
        await subscription.remove_consumer(a)
        assert list(subscription.consumers) == [b, c]
        assert subscription.held == 1 + 1
        assert (await event(subscription, tarry.ConsumerBatch)).entry_id.tolist() == [3]
        for given in (a, tarry.Consumer("b")):
            with pytest.raises(tarry.InvalidArgument, match="no consumer of this subscription"):
                await subscription.remove_consumer(given)
        with pytest.raises(tarry.InvalidArgument, match="there already"):
            await subscription.add_consumer(b)


async def test_what_is_taken_back_is_told_and_left_out_of_what_was_not_taken_yet(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    go_on = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(3), consumer_id=[1, 1, 1])
        go_on.wait()
        yield messages(range(3, 5), consumer_id=[1, 2])
        yield taken_back([1, 2, 3], [1, 1, 1])
        yield messages([1], consumer_id=[2])
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    a, b = two()
    async with client.subscribe_key_shared("topic", "sub", consumers=[a, b]) as subscription:
        first = await event(subscription, tarry.ConsumerBatch)
        _ = subscription.nack(first.take([0]), delay_ms=1)
        go_on.open()
        # Of the batch of entry 3 nothing is left by the time the rest came, or it was taken before.
        events: list[Any] = []
        while not (events and isinstance(events[-1], tarry.ConsumerBatch) and 1 in events[-1].entry_id):
            events.append(await subscription.receive(WAIT_S))
        told = [each for each in events if isinstance(each, tarry.TakenBack)]
        seen = [each.entry_id.tolist() for each in events if isinstance(each, tarry.ConsumerBatch)]
        assert [(each.consumer, len(each)) for each in told] == [(a, 3 if [3] in seen else 2)]
        assert told[0].positions.entry_id.tolist()[:2] == [1, 2]
        assert [entries for entries in seen if entries != [3]] == [[4], [1]]
        assert subscription.held == 2


async def test_messages_are_planned(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    """What a consumer receives comes as a batch of it, a HELD one when it is free."""

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        plan = take(requests, "plan_dispatch")
        asked = plan.plan_dispatch
        assert (list(asked.ledger_id), list(asked.entry_id), list(asked.key_hash)) == ([9], [0, 1, 2, 3], [5, 6, 5, 7])
        yield planned(plan, [2, 1, 2, 0])
        acknowledged = take(requests, "acknowledge")
        assert list(acknowledged.acknowledge.deliver_at_ms) == [0, 0]
        yield done(acknowledged)
        nacked = take(requests, "negative_acknowledge")
        assert list(nacked.negative_acknowledge.key_hash) == [6]
        yield done(nacked)
        late = messages([3], ledger=9, consumer_id=[1])
        late.messages.deliver_at_ms[:] = [0]
        yield late
        yield done(take(requests, "mark_delete"))
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    a, b = two()
    async with client.subscribe_key_shared("topic", "sub", consumers=[a, b]) as subscription:
        consumer_id = await subscription.plan(9, range(4), [5, 6, 5, 7])
        assert consumer_id.tolist() == [2, 1, 2, tarry.HELD]
        of_a, of_b = await event(subscription, tarry.ConsumerBatch), await event(subscription, tarry.ConsumerBatch)
        assert (of_a.consumer, of_a.entry_id.tolist(), hashes(of_a)) == (a, [1], [6])
        assert (of_b.consumer, of_b.entry_id.tolist(), hashes(of_b)) == (b, [0, 2], [5, 5])
        assert subscription.held == 3
        assert await subscription.ack(of_b) == 0
        assert await subscription.nack(of_a) == nack_result(0, 0)
        assert (await event(subscription, tarry.ConsumerBatch)).consumer is a
        await subscription.mark_delete(9, 3)
        _ = subscription.ack((9, 3, 0))
    (requests,) = daemon.requests(METHOD)
    (marked,) = (request.mark_delete for request in requests.taken if request.HasField("mark_delete"))
    assert (marked.ledger_id, marked.entry_id) == (9, 3)


async def test_plans_go_out_in_their_order_also_when_one_is_refused_for_now(daemon: FakeDaemon, connect: Any) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        plan = take(requests, "plan_dispatch")
        yield refused(plan, code_pb2.UNAVAILABLE)
        for entries in ([0, 1], [2, 3], [4]):
            plan = take(requests, "plan_dispatch")
            assert list(plan.plan_dispatch.entry_id) == entries
            yield planned(plan, [1] * len(entries))
        yield refused(take(requests, "plan_dispatch"), code_pb2.INVALID_ARGUMENT)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    client = connect(
        daemon.address, timeout_s=WAIT_S, rows_per_request=2, retry_policy=tarry.RetryPolicy(0.001, max_s=0.001)
    )
    async with client.subscribe_key_shared("topic", "sub", consumers=[tarry.Consumer("a")]) as subscription:
        first, second = subscription.plan(9, range(4)), subscription.plan(9, 4)
        assert (await first).tolist() == [1] * 4
        assert (await second).tolist() == [1]
        batch = await event(subscription, tarry.ConsumerBatch)
        assert batch.entry_id.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(tarry.InvalidArgument):
            await subscription.plan(9, 5)


async def test_after_a_break_consumers_and_what_they_hold_are_declared_and_plans_begin_anew(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    again = Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(3), consumer_id=[1, 1, 2], key_hash=[5, 5, 6])
        yield planned(take(requests, "plan_dispatch"), [2, 0])
        yield done(take(requests, "remove_consumer"))
        take(requests, "acknowledge")
        take(requests, "plan_dispatch")
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2, held=3, not_held=[1])
        repeated = take(requests, "acknowledge")
        yield done(repeated, epoch=2)
        plan = take(requests, "plan_dispatch")
        # Entry 0 of ledger 9 is where it was, 1 comes now.
        yield planned(plan, [2, 2, 0], epoch=2)
        yield from confirm_all(requests, epoch=2)

    daemon.script(METHOD, breaking, continuing)
    a, b = two()
    c = tarry.Consumer("c")
    async with client.subscribe_key_shared("topic", "sub", consumers=[a, b, c]) as subscription:
        of_a, of_b = await event(subscription, tarry.ConsumerBatch), await event(subscription, tarry.ConsumerBatch)
        assert (of_a.consumer, of_b.consumer) == (a, b)
        assert (await subscription.plan(9, [0, 1], [6, 6])).tolist() == [2, 0]
        assert (await event(subscription, tarry.ConsumerBatch)).entry_id.tolist() == [0]
        await subscription.remove_consumer(c)
        unanswered = subscription.ack(of_a.take([1]))
        with pytest.raises(tarry.PlanLost):
            await subscription.plan(9, [2])
        opening = (await again.passed()).open
        assert [(each.consumer_id, each.permits) for each in opening.consumers] == [(1, 3), (2, 6)]
        assert held_of(dispatch_pb2.SubscribeRequest(open=opening)) == [
            (7, 0, 1000),
            (7, 2, 1002),
            (9, 0, 0),
            (7, 1, 1001),
        ]
        assert list(opening.held_consumer_id) == [1, 2, 2, 1]
        assert list(opening.held_key_hash) == [0, 0, 6, 0]
        taken = await event(subscription, tarry.TakenBack)
        assert (taken.consumer, taken.positions.entry_id.tolist(), taken.epoch) == (b, [2], 2)
        with pytest.raises(tarry.PlanLost):
            # It has not been told yet.
            await subscription.plan(9, 0, anew=True)
        assert await event(subscription, tarry.PlanAgain) == tarry.PlanAgain(epoch=2)
        with pytest.raises(tarry.PlanLost):
            await subscription.plan(9, 2)
        assert await unanswered == 0
        assert (await subscription.plan(9, [0, 1, 2], [6, 6, 6], anew=True)).tolist() == [2, 2, 0]
        assert (await event(subscription, tarry.ConsumerBatch)).entry_id.tolist() == [1]
        assert subscription.held == 3


async def test_joining_and_leaving_are_settled_whatever_breaks(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    again = Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "add_consumer")
        take(requests, "remove_consumer")
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2)
        joining = take(requests, "add_consumer")
        yield done(joining, epoch=2)
        yield messages([1], epoch=2, consumer_id=[joining.add_consumer.consumer.consumer_id])
        yield from confirm_all(requests, epoch=2)

    daemon.script(METHOD, breaking, continuing)
    a, b = two()
    async with client.subscribe_key_shared("topic", "sub", consumers=[a]) as subscription:
        joined, left = subscription.add_consumer(b), subscription.remove_consumer(a)
        await joined
        await left
        assert list((await again.passed()).open.consumers) == []
        assert (await event(subscription, tarry.ConsumerBatch)).consumer is b


async def test_acknowledgements_of_what_was_taken_back_are_not_repeated(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """0 and 1 acknowledged at once, 2 by itself; 1 and 2 are taken back, and the daemon is gone without an answer."""
    again = Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(3), consumer_id=[1, 1, 1])
        take(requests, "acknowledge")
        take(requests, "acknowledge")
        yield taken_back([1, 2], [1, 1])
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(held=1)
        repeated = take(requests, "acknowledge")
        assert list(repeated.acknowledge.entry_id) == [0]
        yield done(repeated)
        hold(requests)

    daemon.script(METHOD, breaking, continuing)
    consumers = [tarry.Consumer("a")]
    async with client.subscribe_key_shared("topic", "sub", consumers=consumers, ack_linger_ms=0) as subscription:
        received = await event(subscription, tarry.ConsumerBatch)
        both, alone = subscription.ack(received.take([0, 1])), subscription.ack(received.take([2]))
        assert (await event(subscription, tarry.TakenBack)).positions.entry_id.tolist() == [1, 2]
        assert held_of(await again.passed()) == [(7, 0, 1000)]
        assert (await both, await alone) == (1, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (tarry.Consumer("a", permits=0), "permits is 0"),
        (tarry.Consumer("\udc80"), "name is .* it must be UTF-8"),
        (tarry.Consumer("a", hash_ranges=(tarry.HashRange(-1, 5),)), "a field cannot hold it"),
        (tarry.Consumer("a", hash_ranges=((0, 5),)), "a field cannot hold it"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_consumer_is_refused_before_anything_is_sent(
    daemon: FakeDaemon, client: tarry.aio.Client, given: tarry.Consumer, says: str
) -> None:
    with pytest.raises(tarry.InvalidArgument, match=says):
        await client.subscribe_key_shared("topic", "sub", consumers=[given])
    assert daemon.calls == []


async def test_rows_without_consumers_end_it(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(2))
        hold(requests)

    daemon.script(METHOD, step)
    subscription = await client.subscribe_key_shared("topic", "sub", consumers=list(two()))
    with pytest.raises(tarry.Internal, match="without their consumers"):
        await subscription.receive(WAIT_S)
    await subscription.close()
