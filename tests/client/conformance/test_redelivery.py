"""A subscription that gives positions back for later: what is sent, held, repeated and settled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
import tarry.aio
from tests._support.outcomes import nack_result
from tests.client._support.fake_daemon import (
    FakeDaemon,
    Gate,
    Requests,
    confirm_all,
    done,
    held_of,
    messages,
    opened,
    receive,
    status,
    take,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "Subscribe"
WHOLE = tarry.NO_BATCH_INDEX


async def test_positions_are_nacked_rejected_and_extended_on_the_stream(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(4), redelivery_count=[0, 1, 2, 3])
        yield done(requests.take())
        yield done(requests.take(), ignored=1, dead_lettered=2)
        yield done(requests.take(), dead_lettered=1)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=100) as subscription:
        received = await receive(subscription)
        assert received.redelivery_count.tolist() == [0, 1, 2, 3]
        extended = await subscription.extend(received)
        assert (extended, subscription.held) == (0, 4)
        nacked = await subscription.nack(received.take([0, 1]), delay_ms=[10, 20])
        assert (nacked, subscription.held) == (nack_result(ignored=1, dead_lettered=2), 2)
        rejected = await subscription.reject(received.take([2]), "no such gate")
        assert (rejected, subscription.held) == (nack_result(ignored=0, dead_lettered=1), 1)
        assert await subscription.nack(received.take([3]), delay_level=3, key_hash=9) == nack_result(0, 0)
    sent = [request for request in daemon.requests(METHOD)[0].taken if request.WhichOneof("request") != "flow"]
    assert [request.WhichOneof("request") for request in sent] == ["open", "extend", *(["negative_acknowledge"] * 3)]
    first, second, third = (request.negative_acknowledge for request in sent[2:])
    assert (list(first.entry_id), list(first.deliver_at_ms), list(first.delay_ms)) == ([0, 1], [1000, 1001], [10, 20])
    assert (list(second.entry_id), second.reject, second.reason) == ([2], True, "no such gate")
    assert (list(third.delay_level), list(third.key_hash), list(third.delay_ms), third.reject) == ([3], [9], [], False)


async def test_permits_come_back_with_a_negative_acknowledgement(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        assert take(requests, "flow").flow.permits == 2
        yield messages(range(2))
        nack = take(requests, "negative_acknowledge")
        assert take(requests, "flow").flow.permits == 2
        yield done(nack)
        yield messages(range(1), redelivery_count=[1])
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=2) as subscription:
        _ = subscription.nack(await receive(subscription))
        again = await receive(subscription)
        assert again.redelivery_count.tolist() == [1]
        _ = subscription.ack(again)


async def test_of_a_nacked_message_of_a_batch_the_entry_stays_held(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        yield done(take(requests, "negative_acknowledge"))
        yield done(take(requests, "acknowledge"))
        yield messages([0, 0], redelivery_count=[1, 1], batch_index=[3, 4])
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        await subscription.nack((7, [0, 0], 1000), batch_index=[3, 4])
        assert subscription.held == 2
        await subscription.ack(received)
        parts = await receive(subscription)
        assert subscription.held == 2
        assert parts.batch_index is not None
        assert parts.batch_index.tolist() == [3, 4]
        await subscription.ack(parts.take([0]))
        assert subscription.held == 1
        await subscription.nack(parts.take([1]), delay_ms=1)
        assert subscription.held == 0
    sent = daemon.requests(METHOD)[0].taken
    nacks = [request.negative_acknowledge for request in sent if request.HasField("negative_acknowledge")]
    acks = [request.acknowledge for request in sent if request.HasField("acknowledge")]
    assert [list(each.batch_index) for each in nacks] == [[3, 4], [4]]
    assert [list(each.batch_index) for each in acks] == [[], [3]]


async def test_after_a_break_nacks_are_sent_again_and_their_positions_declared(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(3), batch_index=[WHOLE, 5, WHOLE])
        take(requests, "extend")
        take(requests, "negative_acknowledge")
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    again = Gate()

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2, held=3)
        extended, nacked = requests.take(), requests.take()
        again.open(nacked)
        yield done(extended, epoch=2, ignored=1)
        yield done(nacked, epoch=2)
        yield from confirm_all(requests, epoch=2)

    daemon.script(METHOD, breaking, continuing)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        extended = subscription.extend(received.take([0]))
        nacked = subscription.nack(received.take([1]), delay_ms=60_000)
        # What is extended is still held, and declared once.
        assert held_of(await again.passed()) == [(7, 0, 1000, WHOLE), (7, 2, 1002, WHOLE), (7, 1, 1001, 5)]
        repeated = (await again.passed()).negative_acknowledge
        assert (list(repeated.entry_id), list(repeated.batch_index), list(repeated.delay_ms)) == ([1], [5], [60_000])
        assert (await extended, await nacked) == (1, nack_result(0, 0))
        _ = subscription.ack(received.take([0, 2]))


async def test_what_came_again_before_its_nack_was_answered_is_declared_by_both_names(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    taken, again = Gate(), Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        take(requests, "negative_acknowledge")
        yield messages([1], redelivery_count=[1])
        taken.wait()

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened()
        yield from confirm_all(requests)

    daemon.script(METHOD, breaking, continuing)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        nacked = subscription.nack(received.take([1]))
        came_again = await receive(subscription)
        taken.open()
        # Two hand-outs of one position: the one that is held, and the one that is being given back.
        declared = await again.passed()
        assert held_of(declared) == [(7, 0, 1000), (7, 1, 1001), (7, 1, 1001)]
        assert list(declared.open.held_redelivery_count) == [0, 1, 0]
        await nacked
        _ = subscription.ack(came_again)
        _ = subscription.ack(received.take([0]))


async def test_a_refused_nack_is_raised_and_a_passing_refusal_is_tried_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        for code in (code_pb2.UNAVAILABLE, code_pb2.OUT_OF_RANGE):
            refusal = done(take(requests, "negative_acknowledge"))
            refusal.done.error.CopyFrom(status(code, "delay_ms is too long"))
            yield refusal
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        with pytest.raises(tarry.OutOfRange, match="delay_ms is too long"):
            await subscription.nack(received, delay_ms=2**60)


async def test_leaving_waits_until_nacks_are_durable(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    sent, answered = Gate(), Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        nack = take(requests, "negative_acknowledge")
        sent.open()
        answered.wait()
        yield done(nack, dead_lettered=2)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)

    async def answer_it() -> None:
        await sent.passed()
        assert not nacked.done()
        answered.open()

    async with client.subscribe("topic", "sub") as subscription:
        nacked = subscription.reject(await receive(subscription), "no such gate")
        answering = asyncio.ensure_future(answer_it())
    await answering
    assert await nacked == nack_result(0, 2)


async def test_long_columns_are_several_requests_and_one_future(daemon: FakeDaemon, connect: Any) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        for request in requests:
            if request.HasField("negative_acknowledge"):
                yield done(request, ignored=1, dead_lettered=2)

    daemon.script(METHOD, step)
    client = connect(daemon.address, rows_per_request=2)
    async with client.subscribe("topic", "sub") as subscription:
        answer = await subscription.nack((7, range(5), 0), delay_ms=[1, 2, 3, 4, 5])
        assert answer == nack_result(3, 6)


async def test_what_cannot_be_sent_is_refused_and_nothing_is_given_back(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        with pytest.raises(tarry.InvalidArgument, match="at most one of delay_ms and delay_level"):
            await subscription.nack(received, delay_ms=1, delay_level=1)
        with pytest.raises(tarry.InvalidArgument, match="reason is"):
            await subscription.reject(received, "\udcff")
        assert subscription.held == 2
        _ = subscription.ack(received)
