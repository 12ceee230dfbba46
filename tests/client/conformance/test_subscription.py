"""Receiving and acknowledging on a stream that holds: columns, permits, refusals, closing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
import tarry.aio
from tarry.v1 import dispatch_pb2
from tests._support.patience import awaited_within_some_time
from tests.client._support.fake_daemon import (
    FakeDaemon,
    Gate,
    Requests,
    answer,
    confirm_all,
    done,
    hold,
    messages,
    one_batch,
    opened,
    receive,
    refuse,
    status,
    take,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "Subscribe"


async def test_what_is_due_comes_as_columns_and_is_acknowledged(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(4)
        assert take(requests, "flow").flow.permits == 100
        batch = dispatch_pb2.Messages(
            epoch=4, ledger_id=[7, 7], entry_id=[1, 2], deliver_at_ms=[10, 11], key_hash=[0, 5]
        )
        yield dispatch_pb2.SubscribeResponse(messages=batch)
        yield done(take(requests, "acknowledge"), epoch=4, ignored=1)
        hold(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=100) as subscription:
        received = await receive(subscription)
        assert received.ledger_id.tolist() == [7, 7]
        assert received.entry_id.tolist() == [1, 2]
        assert received.deliver_at_ms.tolist() == [10, 11]
        assert received.key_hash is not None
        assert received.key_hash.tolist() == [0, 5]
        assert received.epoch == subscription.epoch == 4
        assert received.lateness_ms.tolist() == [received.received_at_ms - 10, received.received_at_ms - 11]
        assert subscription.held == 2
        assert await subscription.ack(received) == 1
        assert subscription.held == 0
    (requests,) = daemon.requests(METHOD)
    opening = requests.taken[0].open
    assert (opening.topic, opening.subscription, opening.type) == (
        "topic",
        "sub",
        dispatch_pb2.SUBSCRIPTION_TYPE_SHARED,
    )
    acknowledged = next(request.acknowledge for request in requests.taken if request.HasField("acknowledge"))
    assert list(acknowledged.ledger_id) == [7, 7]
    assert list(acknowledged.entry_id) == [1, 2]
    assert list(acknowledged.deliver_at_ms) == [10, 11]


async def test_a_column_that_is_empty_on_the_wire_is_none(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, one_batch(range(3)))
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        assert received.key_hash is None
        _ = subscription.ack(received)


async def test_a_subscription_that_does_not_exist_is_told_when_it_is_opened(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.NOT_FOUND, "no subscription 'sub'"))
    with pytest.raises(tarry.NotFound, match="no subscription 'sub'"):
        await client.subscribe("topic", "sub")


async def test_it_is_created_when_asked(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=1)))
    daemon.script(METHOD, one_batch(range(1)))
    async with client.subscribe("topic", "sub", create=True) as subscription:
        _ = subscription.ack(await receive(subscription))
    assert [name for name, _ in daemon.calls] == ["CreateSubscription", "GetVersion", METHOD]


async def test_opening_is_tried_until_the_deadline(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAVAILABLE, "standing by"))

    async def story(seconds: float) -> None:
        before = daemon.count(METHOD)
        with pytest.raises(tarry.DeadlineExceeded, match="standing by"):
            await client.subscribe("topic", "sub", timeout_s=seconds)
        assert daemon.count(METHOD) > before + 1

    await awaited_within_some_time(story)


async def test_permits_come_back_when_a_batch_is_acknowledged_or_released(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """permits 8: 8 are granted, 8 received; 4 acknowledged and 4 released give 4 and 4 back."""
    granted = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        granted.open(take(requests, "flow").flow.permits)
        yield messages(range(4))
        yield messages(range(4, 8))
        for request in requests:
            if request.HasField("flow"):
                granted.open(request.flow.permits)
            else:
                yield done(request)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=8) as subscription:
        assert await granted.passed() == 8
        first, second = await receive(subscription, max_rows=4), await receive(subscription, max_rows=4)
        _ = subscription.ack(first)
        assert await granted.passed() == 4
        subscription.release(second)
        assert await granted.passed() == 4
        subscription.release(second)
        assert subscription.held == 0


async def test_permits_are_granted_again_in_portions(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    """permits 100, 50 received one by one: a grant of fewer than 25 waits, as long as the daemon has some left."""
    granted = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        granted.open(take(requests, "flow").flow.permits)
        for entry in range(50):
            yield messages([entry])
        for request in requests:
            if request.HasField("flow"):
                granted.open(request.flow.permits)
            else:
                yield done(request)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=100) as subscription:
        for _ in range(50):
            _ = subscription.ack(await receive(subscription, max_rows=1))
        assert [await granted.passed(), await granted.passed(), await granted.passed()] == [100, 25, 25]


async def test_no_permits_are_granted_while_too_much_waits_to_be_durable(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """permits 2: after 16 unconfirmed positions no grant, until some are durable."""
    confirm = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        waiting = []
        for first in range(0, 16, 2):
            take(requests, "flow")
            yield messages([first, first + 1])
            waiting.append(take(requests, "acknowledge"))
        confirm.wait()
        for request in waiting:
            yield done(request)
        take(requests, "flow")
        yield messages([100])
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=2, ack_linger_ms=0) as subscription:
        for _ in range(8):
            _ = subscription.ack(await receive(subscription))
        assert await subscription.receive(0.05) is None
        confirm.open()
        last = await receive(subscription)
        assert last.entry_id.tolist() == [100]
        _ = subscription.ack(last)


async def test_an_acknowledgement_without_answer_is_sent_once_and_forgotten(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    arrived = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        arrived.open(take(requests, "acknowledge"))
        hold(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub") as subscription:
        subscription.ack_unconfirmed(await receive(subscription))
        request = await arrived.passed()
        assert request.acknowledge.request_id == 0
        assert list(request.acknowledge.entry_id) == [0, 1]
        assert subscription.held == 0


async def test_columns_can_be_acknowledged_without_their_batch(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, one_batch(range(4)))
    async with client.subscribe("topic", "sub") as subscription:
        await receive(subscription)
        assert await subscription.ack((7, [1, 2], [1001, 1002])) == 0
        assert subscription.held == 2
        assert await subscription.ack(([7, 7], [0, 3], [1000, 1003])) == 0
        assert subscription.held == 0


async def test_a_passing_refusal_of_an_acknowledgement_is_sent_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(1))
        for code in (code_pb2.UNAVAILABLE, code_pb2.UNKNOWN):
            request = take(requests, "acknowledge")
            refusal = dispatch_pb2.Done(request_id=request.acknowledge.request_id, epoch=1, error=status(code))
            yield dispatch_pb2.SubscribeResponse(done=refusal)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub") as subscription:
        assert await subscription.ack(await receive(subscription)) == 0
    assert daemon.count(METHOD) == 1


async def test_a_lasting_refusal_of_an_acknowledgement_is_told_and_the_stream_goes_on(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(1))
        request = take(requests, "acknowledge")
        refusal = status(code_pb2.INVALID_ARGUMENT, "too many rows")
        yield dispatch_pb2.SubscribeResponse(
            done=dispatch_pb2.Done(request_id=request.acknowledge.request_id, epoch=1, error=refusal)
        )
        yield messages(range(1, 2))
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub") as subscription:
        with pytest.raises(tarry.InvalidArgument, match="too many rows"):
            await subscription.ack(await receive(subscription))
        assert await subscription.ack(await receive(subscription)) == 0


async def test_a_lasting_failure_ends_the_iteration_after_what_was_received(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def deleted(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        context.abort(grpc.StatusCode.NOT_FOUND, "the subscription was deleted")

    daemon.script(METHOD, deleted)
    subscription = await client.subscribe("topic", "sub")
    seen: list[list[int]] = []

    async def receive_all() -> None:
        async for batch in subscription:
            seen.append(batch.entry_id.tolist())

    with pytest.raises(tarry.NotFound, match="was deleted"):
        await receive_all()
    assert seen == [[0, 1]]
    with pytest.raises(tarry.NotFound):
        _ = subscription.ack((7, 0, 1000))
    await subscription.close()


async def test_closing_ends_the_iteration_and_fails_what_is_not_durable(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(1))
        hold(requests)

    daemon.script(METHOD, silent)
    subscription = await client.subscribe("topic", "sub")
    confirmed = subscription.ack(await receive(subscription))

    async def received_until_the_end() -> list[tarry.Batch]:
        return [batch async for batch in subscription]

    ended = asyncio.create_task(received_until_the_end())
    await asyncio.sleep(0)
    await subscription.close()
    await subscription.close()
    assert await ended == []
    with pytest.raises(tarry.Closed):
        await confirmed
    with pytest.raises(tarry.Closed):
        _ = subscription.ack((7, 0, 1000))


async def test_a_flush_that_takes_too_long_is_told(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        hold(requests)

    daemon.script(METHOD, silent)
    subscription = await client.subscribe("topic", "sub")
    _ = subscription.ack((7, [1], [1001]))
    with pytest.raises(tarry.DeadlineExceeded, match="1 requests are not durable"):
        await subscription.flush(0.05)
    await subscription.close()


@pytest.mark.parametrize("permits", [0, 2**32])
async def test_permits_that_cannot_be_granted_are_refused(client: tarry.aio.Client, permits: int) -> None:
    with pytest.raises(tarry.InvalidArgument, match=f"permits is {permits}; it must be from 1 to 4294967295"):
        await client.subscribe("topic", "sub", permits=permits)
