"""What a daemon of before does not know is asked for, never tried out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tarry.v1 import cluster_pb2, delayed_delivery_pb2, dispatch_pb2
from tests._support.outcomes import nack_result
from tests.client._support.fake_daemon import (
    OF_TODAY,
    OF_YESTERDAY,
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    accept,
    accept_all,
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

RETURN = tarry.OnInvalid.RETURN
FORWARDED = (7, 1, 1_000, None, 0)


of_before = refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method GetVersion")
of_today = answer(OF_TODAY)
nacked = answer(dispatch_pb2.NegativeAcknowledgeResponse())
of_yesterday = answer(OF_YESTERDAY)
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


async def test_an_add_that_wants_invalid_rows_back_is_not_sent_to_a_daemon_that_does_not_know_it(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_yesterday)
    daemon.script("AddMessages", accept)
    with pytest.raises(tarry.Unsupported, match=r"on_invalid.*feature on_invalid.*update the daemon"):
        await client.add("topic", 7, 1, delay_ms=1, on_invalid=RETURN)
    assert daemon.count("AddMessages") == 0
    assert (await client.add("topic", 7, 1, delay_ms=1)).accepted == 1
    (request,) = daemon.requests("AddMessages")
    assert not request.on_invalid, "it asks for nothing that a daemon of before does not know"


async def test_a_stream_sends_no_such_add_to_a_daemon_that_does_not_know_it_and_goes_on(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_before)
    daemon.script("StreamAddMessages", accept_all)
    async with client.add_stream("topic") as stream:
        with pytest.raises(tarry.Unsupported, match="on_invalid"):
            await (await stream.add(7, 1, delay_ms=1, on_invalid=RETURN))
        assert (await (await stream.add(7, [2, 3], delay_ms=1))).accepted == 2
        with pytest.raises(tarry.Unsupported):
            await stream.flush()
        with pytest.raises(tarry.Unsupported, match="on_invalid"):
            _ = await stream.add(7, 1, delay_ms=1, on_invalid=RETURN)
    (requests,) = daemon.requests("StreamAddMessages")
    assert [list(each.add.entry_id) for each in requests.taken] == [[2, 3]]


async def test_a_stream_asks_once_for_many_batches(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", of_today)
    daemon.script("StreamAddMessages", accept_all)
    async with client.add_stream("topic") as stream:
        answers = [await stream.add(7, 1, delay_ms=1, on_invalid=RETURN) for _ in range(3)]
    assert [(await each).accepted for each in answers] == [1] * 3
    assert daemon.count("GetVersion") == 1
    (requests,) = daemon.requests("StreamAddMessages")
    assert [each.add.on_invalid for each in requests.taken] == [RETURN] * 3


async def test_a_stream_that_opens_again_at_a_daemon_of_before_fails_what_that_does_not_know_and_sends_the_rest(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def leave_two_unanswered(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        requests.take()
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        yield

    daemon.script("GetVersion", of_today, of_before)
    daemon.script("StreamAddMessages", leave_two_unanswered, accept_all)
    stream = client.add_stream("topic")
    returned = await stream.add(7, 1, delay_ms=1, on_invalid=RETURN)
    plain = await stream.add(7, [2, 3], delay_ms=1)
    with pytest.raises(tarry.Unsupported, match="on_invalid"):
        await returned
    assert (await plain).accepted == 2
    _, again = daemon.requests("StreamAddMessages")
    assert [list(each.add.entry_id) for each in again.taken] == [[2, 3]]
    with pytest.raises(tarry.Unsupported):
        await stream.flush()
    await stream.close()


async def test_each_row_that_comes_back_has_its_row_in_the_batch_and_its_reason(
    daemon: FakeDaemon, connect: Connect
) -> None:
    long, seconds = tarry.RefusedReason.DELAY_TOO_LONG, tarry.RefusedReason.TIME_IN_SECONDS
    response = delayed_delivery_pb2.AddMessagesResponse
    # Of a newer daemon.
    unknown: Any = 99
    answers = [
        response(accepted=1, refused_index=[1], refused_reason=[seconds.value]),
        response(accepted=2),
        response(refused_index=[0, 1], refused_reason=[long.value]),
        response(refused_index=[0, 1], refused_reason=[unknown, long.value]),
    ]
    daemon.script("GetVersion", of_today)
    daemon.script("AddMessages", *map(answer, answers))
    client = connect(daemon.address, rows_per_request=2)
    result = await client.add("topic", 7, range(8), delay_ms=[5], on_invalid=RETURN)
    assert [*result.refused.items()] == [(1, seconds), (4, long), (5, long), (6, 99), (7, long)]
    assert (result.refused, result.accepted) == (5, 3)
    assert [request.on_invalid for request in daemon.requests("AddMessages")] == [RETURN] * 4
    assert daemon.count("GetVersion") == 1

    def refuse_the_last(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            added = response(accepted=1, refused_index=[1], refused_reason=[long.value])
            yield delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request.request_id, added=added)

    daemon.script("StreamAddMessages", refuse_the_last)
    async with client.add_stream("topic") as stream:
        streamed = await (await stream.add(7, range(4), delay_ms=5, on_invalid=RETURN))
    assert [*streamed.refused.items()] == [(1, long), (3, long)]


async def test_what_a_log_is_needed_for_is_not_asked_of_a_daemon_that_does_not_tell(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", of_before)
    with pytest.raises(tarry.Unsupported, match=r"dead_letter.*retention.*update the daemon"):
        await client.trim("topic", 7, 9, dead_letter=True, subscription="sub")
    with pytest.raises(tarry.Unsupported, match=r"retention.*update the daemon"):
        await client.retention("topic")
    assert daemon.count("TrimMessages") == daemon.count("GetRetention") == 0
    daemon.script("TrimMessages", answer(delayed_delivery_pb2.TrimMessagesResponse(trimmed=3)))
    assert await client.trim("topic", 7, 9) == 3, "what it knows is sent without asking"


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
