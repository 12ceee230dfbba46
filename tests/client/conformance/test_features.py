"""What a daemon of before does not know is asked for, never tried out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tarry.v1 import cluster_pb2, dispatch_pb2
from tests._support.outcomes import nack_result
from tests.client._support.fake_daemon import (
    OF_TODAY,
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
    moved,
    one_batch,
    opened,
    receive,
    refuse,
    take,
    taken_back,
)
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

FORWARDED = (7, 1, 1_000, None, 0)


of_before = refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method GetVersion")
of_today = answer(OF_TODAY)
nacked = answer(dispatch_pb2.NegativeAcknowledgeResponse())
gone = refuse(grpc.StatusCode.UNAVAILABLE, "it stops")


async def test_a_forwarded_nack_is_not_sent_to_a_daemon_that_does_not_know_it(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_before)
    daemon.script("NegativeAcknowledge", nacked)
    with pytest.raises(tarry.Unsupported, match=r"forwarded.*handout_names.*update the daemon"):
        await client.nack("topic", "sub", FORWARDED, forwarded=True)
    assert daemon.count("NegativeAcknowledge") == 0
    await client.nack("topic", "sub", FORWARDED)
    assert daemon.count("NegativeAcknowledge") == 1, "what it knows is sent without asking"


async def test_a_daemon_is_asked_once_and_again_after_it_failed(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", of_today, of_today, of_before)
    daemon.script("NegativeAcknowledge", nacked, nacked, gone, nacked, gone, nacked)
    for _ in range(2):
        await client.nack("topic", "sub", FORWARDED, forwarded=True)
    assert daemon.count("GetVersion") == 1
    await client.nack("topic", "sub", FORWARDED, forwarded=True)
    assert daemon.count("GetVersion") == 2
    with pytest.raises(tarry.Unsupported):
        await client.nack("topic", "sub", FORWARDED, forwarded=True)
    (request, *_) = daemon.requests("NegativeAcknowledge")
    assert (request.forwarded, list(request.redelivery_count)) == (True, [0])


async def test_a_stream_asks_before_it_is_opened_and_repeats_what_is_forwarded_where_it_is_known(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """0 and 1 acknowledged, then 0 fails; the topic moves without an answer to that."""
    again = Gate()

    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(3), key_hash=[5, 6, 7])
        yield done(take(requests, "acknowledge"))
        take(requests, "negative_acknowledge")
        yield moved(other_daemon.address)

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2)
        repeated = take(requests, "negative_acknowledge")
        again.open(repeated.negative_acknowledge)
        yield done(repeated, epoch=2)
        hold(requests)

    daemon.script("Subscribe", moving)
    other_daemon.script("Subscribe", continuing)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        await subscription.ack(received.take([0, 1]))
        assert await subscription.nack(received.take([0]), delay_ms=9, forwarded=True) == nack_result(0, 0)
        assert subscription.held == 1
        assert held_of(await again.passed()) == [(7, 2, 1002)], "what was acknowledged long ago is not held"
        repeated = await again.passed()
        assert (repeated.forwarded, list(repeated.redelivery_count), list(repeated.delay_ms)) == (True, [0], [9])
        assert list(repeated.key_hash) == [5], "a row that it gets has the key"
    assert (daemon.count("GetVersion"), other_daemon.count("GetVersion")) == (1, 1)


async def test_on_a_stream_of_a_daemon_that_does_not_know_it_nothing_forwarded_is_sent_or_given_back(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_before)
    daemon.script("Subscribe", one_batch(range(2)))
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        with pytest.raises(tarry.Unsupported, match=r"forwarded.*topic.*handout_names.*update the daemon"):
            _ = subscription.nack(received.take([0]), forwarded=True)
        with pytest.raises(tarry.Unsupported):
            _ = subscription.reject(received.take([0]), "failed", forwarded=True)
        assert subscription.held == 2
        assert await subscription.ack(received) == 0
    sent = [request.WhichOneof("request") for request in daemon.requests("Subscribe")[0].taken]
    assert "negative_acknowledge" not in sent


async def test_a_stream_that_moves_to_a_daemon_of_before_fails_what_is_forwarded_and_does_not_hold_it(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(2))
        take(requests, "negative_acknowledge")
        yield moved(other_daemon.address)

    daemon.script("Subscribe", moving)
    other_daemon.script("GetVersion", of_before)
    other_daemon.script("Subscribe", one_batch(range(0)))
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        failing = subscription.nack(received.take([0]), forwarded=True)
        with pytest.raises(tarry.Unsupported, match="forwarded"):
            await failing
        assert await subscription.ack(received.take([1])) == 0
    (stream,) = other_daemon.requests("Subscribe")
    assert held_of(stream.taken[0]) == [(7, 1, 1001)]
    assert "negative_acknowledge" not in [request.WhichOneof("request") for request in stream.taken]


async def test_a_batch_of_another_stream_is_forwarded_without_giving_back_what_is_held_here(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(len(daemon.requests("Subscribe"))))
        yield from confirm_all(requests)

    daemon.script("Subscribe", step)
    async with client.subscribe("topic", "sub") as subscription:
        old = await receive(subscription)
        await subscription.ack(old)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        await subscription.nack(old.positions._replace(redelivery_count=old.redelivery_count + 4), forwarded=True)
        assert subscription.held == 2
        await subscription.nack(old, forwarded=True)
        assert subscription.held == 1, "it is held here by that very name"
        await subscription.ack(received)


async def test_in_the_order_of_keys_what_was_taken_back_is_forwarded_all_the_same(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    again = Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(3), consumer_id=[1, 1, 1], key_hash=[5, 5, 5])
        take(requests, "negative_acknowledge")
        yield taken_back([1, 2], [1, 1])
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened()
        repeated = take(requests, "negative_acknowledge")
        again.open(repeated.negative_acknowledge)
        yield done(repeated)
        hold(requests)

    daemon.script("Subscribe", breaking, continuing)
    async with client.subscribe_key_shared("topic", "sub", consumers=[tarry.Consumer("a")]) as subscription:
        received = await subscription.receive(WAIT_S)
        assert isinstance(received, tarry.ConsumerBatch)
        await subscription.nack(received.take([0, 1]), forwarded=True)
        assert held_of(await again.passed()) == [(7, 0, 1000)]
        repeated = await again.passed()
        assert (repeated.forwarded, list(repeated.entry_id), list(repeated.key_hash)) == (True, [0, 1], [5, 5])


async def test_a_daemon_that_may_not_be_asked_can_do_nothing_of_it_and_serves_streams(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", refuse(grpc.StatusCode.PERMISSION_DENIED, "not for you"))
    daemon.script("Subscribe", one_batch(range(1)))
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        with pytest.raises(tarry.Unsupported):
            _ = subscription.nack(received, forwarded=True)
        assert await subscription.ack(received) == 0


async def test_closing_does_not_wait_for_a_daemon_that_does_not_say_what_it_can_do(
    daemon: FakeDaemon, connect: Connect
) -> None:
    asked, go_on = Gate(), Gate()

    def silent(request: Any, context: grpc.ServicerContext) -> cluster_pb2.GetVersionResponse:
        asked.open()
        go_on.wait()
        return cluster_pb2.GetVersionResponse()

    daemon.script("GetVersion", silent)
    client = connect(daemon.address, timeout_s=0.2)
    with pytest.raises(tarry.DeadlineExceeded):
        await client.subscribe("topic", "sub")
    await asked.passed()
    assert daemon.count("Subscribe") == 0
    go_on.open()
