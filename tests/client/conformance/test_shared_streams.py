"""The stream that subscriptions of a client share, and what happens to others when one of them ends, moves or waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from examples import processes
from tarry.aio import shared_streams
from tarry.threads import shared_streams as shared_streams_of_threads
from tarry.v1 import dispatch_pb2
from tests.client._support.fake_daemon import (
    OF_LATELY,
    OF_TODAY,
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    answer,
    confirm_all,
    hold,
    messages,
    moved,
    opened,
    receive,
    refuse,
    take,
)
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")


def one_row(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """Opens, sends a row when permits come; confirms."""
    take(requests, "open")
    yield opened()
    take(requests, "flow")
    yield messages(range(1))
    yield from confirm_all(requests)


def topics_of(daemon: FakeDaemon) -> list[str]:
    return [requests.taken[0].open.topic for requests in daemon.requests("Subscribe")]


async def test_all_subscriptions_of_a_client_are_lanes_of_one_stream(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("Subscribe", one_row)
    subscriptions = [await client.subscribe(f"t{number}", "sub") for number in range(5)]
    for subscription in subscriptions:
        assert await subscription.ack(await receive(subscription)) == 0
    assert (daemon.shared_streams, sorted(topics_of(daemon))) == (1, [f"t{number}" for number in range(5)])
    assert daemon.count("GetVersion") == 1
    for subscription in subscriptions:
        await subscription.close()
    # Its last lane has ended it; what is opened then has a stream again.
    async with client.subscribe("again", "sub") as subscription:
        await receive(subscription)
    assert daemon.shared_streams == 2


async def test_a_daemon_without_lanes_gets_a_stream_for_each(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", answer(OF_LATELY))
    daemon.script("Subscribe", one_row)
    for topic in ("one", "two"):
        subscription = await client.subscribe(topic, "sub")
        assert await subscription.ack(await receive(subscription)) == 0
    assert (daemon.shared_streams, topics_of(daemon)) == (0, ["one", "two"])


async def test_a_daemon_of_before_at_the_address_of_one_of_today_is_asked_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """As behind a name, or after a step back: nothing is lost by what was known."""
    daemon.script("GetVersion", answer(OF_TODAY), answer(OF_LATELY))
    daemon.script("SubscribeMany", refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method SubscribeMany"))
    daemon.script("Subscribe", one_row)
    async with client.subscribe("topic", "sub") as subscription:
        assert await subscription.ack(await receive(subscription)) == 0
    assert (daemon.shared_streams, daemon.count("GetVersion")) == (1, 2)


async def test_a_lane_that_ends_is_refused_or_moves_leaves_the_others_alone(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    go_on, ends, moves = Gate(), Gate(), Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        topic = take(requests, "open").open.topic
        if topic == "refused":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such subscription")
        yield opened()
        if topic == "ends":
            ends.wait()
            context.abort(grpc.StatusCode.NOT_FOUND, "the subscription was deleted")
        if topic == "moves":
            moves.wait()
            yield moved(other_daemon.address)
            return
        go_on.wait()
        yield messages(range(1))
        yield from confirm_all(requests)

    daemon.script("Subscribe", step)
    other_daemon.script("Subscribe", one_row)
    stays, ending, moving = [await client.subscribe(topic, "sub") for topic in ("stays", "ends", "moves")]
    with pytest.raises(tarry.NotFound, match="no such subscription"):
        await client.subscribe("refused", "sub")
    ends.open()
    with pytest.raises(tarry.NotFound, match="was deleted"):
        await receive(ending)
    moves.open()
    assert await moving.ack(await receive(moving)) == 0
    go_on.open()
    assert await stays.ack(await receive(stays)) == 0
    assert [each.streams_opened for each in (stays, ending, moving)] == [1, 1, 2]
    assert (daemon.shared_streams, other_daemon.shared_streams, topics_of(other_daemon)) == (1, 1, ["moves"])


async def test_the_end_of_the_stream_is_that_of_every_lane_and_each_is_opened_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    go_on = Gate()

    def broken(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        lanes: set[int] = set()
        while len(lanes) < 2:
            for each in requests.take().requests:
                if each.request.HasField("open"):
                    lanes.add(each.lane)
                    answer = dispatch_pb2.LaneResponse(lane=each.lane, response=opened())
                    yield dispatch_pb2.SubscribeManyResponse(responses=[answer])
        go_on.wait()
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    daemon.script("SubscribeMany", broken)
    daemon.script("Subscribe", one_row)
    one, two = await client.subscribe("one", "sub"), await client.subscribe("two", "sub")
    go_on.open()
    for subscription in (one, two):
        assert await subscription.ack(await receive(subscription)) == 0
        assert subscription.streams_opened == 2
    assert sorted(topics_of(daemon)) == ["one", "two"]


async def test_who_does_not_take_what_came_does_not_stop_the_others(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        for request in requests:
            if request.HasField("flow"):
                yield messages(range(request.flow.permits))

    daemon.script("Subscribe", step)
    slow = await client.subscribe("slow", "sub", permits=1_000)
    quick = await client.subscribe("quick", "sub", permits=1)
    for _ in range(20):
        quick.release(await receive(quick))
    assert len(await receive(slow)) == 1_000


async def test_leaving_one_closes_its_lane_alone(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    closed = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        topic = take(requests, "open").open.topic
        yield opened()
        if topic == "left":
            hold(requests)
            closed.open()
            return
        closed.wait()
        yield messages(range(1))
        yield from confirm_all(requests)

    daemon.script("Subscribe", step)
    stays, left = await client.subscribe("stays", "sub"), await client.subscribe("left", "sub")
    await left.close()
    assert await stays.ack(await receive(stays)) == 0
    assert daemon.shared_streams == 1


async def test_another_stream_takes_what_one_has_no_place_for(
    daemon: FakeDaemon, client: tarry.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (shared_streams, shared_streams_of_threads):
        monkeypatch.setattr(module, "LANES_MAX", 2)
    daemon.script("Subscribe", one_row)
    subscriptions = [await client.subscribe(f"t{number}", "sub") for number in range(5)]
    assert daemon.shared_streams == 3
    for subscription in subscriptions:
        assert await subscription.ack(await receive(subscription)) == 0


# Against real daemons.


async def test_lanes_go_on_behind_the_kill_of_a_real_daemon_with_what_they_held(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=WAIT_S)
    topics = [f"{topic}-{number}" for number in range(6)]
    subscriptions = [await client.subscribe(each, "sub", create=True, ack_linger_ms=0) for each in topics]
    held = []
    for each, subscription in zip(topics, subscriptions, strict=True):
        await client.add(each, 7, range(20), delay_ms=0)
        received = await receive(subscription)
        while len(received) < 20:
            received = tarry.Batch.concat([received, await receive(subscription)])
        held.append(received)
        await subscription.ack(received.take(slice(0, 10)))
    await in_thread(mortal_daemon.kill)
    await in_thread(mortal_daemon.start_serving)
    for each, subscription, batch in zip(topics, subscriptions, held, strict=True):
        assert await subscription.ack(batch.take(slice(10, 15))) == 0
        forwarded = subscription.nack(batch.take([15]), delay_ms=0, forwarded=True)
        assert (await forwarded).dead_lettered == 0
        assert (await receive(subscription)).redelivery_count.tolist() == [1]
        await client.add(each, 8, 1, delay_ms=0)
        assert (await receive(subscription)).ledger_id.tolist() == [8], "what is held does not come again"
        assert subscription.streams_opened == 2
    assert len({subscription.epoch for subscription in subscriptions}) <= 2
