"""A subscription through broken streams and changes of owner: what is declared, repeated, dropped and followed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tests.client._support.fake_daemon import (
    OF_LATELY,
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
    take,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "Subscribe"


@pytest.fixture(params=["lane", "stream"], autouse=True)
def carried(request: pytest.FixtureRequest, daemon: FakeDaemon, other_daemon: FakeDaemon) -> None:
    """What carries a subscription: a lane, or a stream of its own where a daemon has no lanes."""
    if request.param == "stream":
        for each in (daemon, other_daemon):
            each.script("GetVersion", answer(OF_LATELY))


async def test_after_a_break_it_declares_what_it_holds_and_acknowledges_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """6 received: 2 acknowledged durably, 1 released, 1 acknowledged without an answer; 2 and that 1 are declared."""

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(6))
        yield done(take(requests, "acknowledge"))
        take(requests, "acknowledge")
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    again = Gate()

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2, held=3)
        repeated = requests.take()
        again.open(repeated)
        again.open(requests.take())
        yield done(repeated, epoch=2, ignored=1)
        yield from confirm_all(requests, epoch=2)

    daemon.script(METHOD, breaking, continuing)
    async with client.subscribe("topic", "sub", permits=10) as subscription:
        received = await receive(subscription)
        assert await subscription.ack(received.take([0, 1])) == 0
        subscription.release(received.take([2]))
        unanswered = subscription.ack(received.take([3]))
        opening, repeated, flow = await again.passed(), await again.passed(), await again.passed()
        assert held_of(opening) == [(7, 4, 1004), (7, 5, 1005), (7, 3, 1003)]
        assert list(repeated.acknowledge.entry_id) == [3]
        assert flow.flow.permits == 8
        assert (await unanswered) == 1
        assert subscription.streams_opened == 2
        assert await subscription.ack(received.take([4, 5])) == 0


async def test_batches_that_wait_to_be_taken_are_held_too(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    sent, again = Gate(), Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        sent.wait()

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened()
        yield from confirm_all(requests)

    daemon.script(METHOD, breaking, continuing)
    async with client.subscribe("topic", "sub") as subscription:
        sent.open()
        assert held_of(await again.passed()) == [(7, 0, 1000), (7, 1, 1001)]
        assert await subscription.ack(await receive(subscription)) == 0


async def test_acknowledging_while_no_stream_is_open_is_sent_on_the_next(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    broken, go_on = Gate(), Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))

    def late(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        broken.open()
        go_on.wait()
        yield opened()
        yield from confirm_all(requests)

    daemon.script(METHOD, breaking, late)
    async with client.subscribe("topic", "sub") as subscription:
        received = await receive(subscription)
        await broken.passed()
        confirmed = subscription.ack(received)
        go_on.open()
        assert (await confirmed) == 0


async def test_a_former_owner_s_messages_and_answers_are_dropped(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch=5)
        take(requests, "flow")
        yield messages([1], epoch=4)
        assert take(requests, "flow").flow.permits == 1, "dropped rows give their permits back"
        yield messages([2], epoch=5)
        request = take(requests, "acknowledge")
        yield done(request, epoch=4, ignored=9)
        yield done(request, epoch=5, ignored=0)
        hold(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", permits=1) as subscription:
        received = await receive(subscription)
        assert received.entry_id.tolist() == [2]
        assert await subscription.ack(received) == 0


async def test_a_former_owner_that_opens_is_left(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def former(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch=2)
        hold(requests)

    last = one_batch(range(1, 2), epoch=4)
    daemon.script(METHOD, one_batch(range(1), epoch=3, break_with=grpc.StatusCode.UNAVAILABLE), former, former, last)
    async with client.subscribe("topic", "sub") as subscription:
        first = subscription.ack(await receive(subscription))
        second = await receive(subscription)
        assert (second.epoch, second.entry_id.tolist()) == (4, [1])
        assert (await first) == 0
        assert subscription.streams_opened == 2
        _ = subscription.ack(second)


@pytest.mark.parametrize("by_status", [False, True])
async def test_it_follows_the_topic_to_its_owner(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client, by_status: bool
) -> None:
    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch=1)
        take(requests, "flow")
        yield messages(range(2))
        take(requests, "acknowledge")
        if by_status:
            context.set_trailing_metadata((("owner-address", other_daemon.address),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the shard is lost")
        yield moved(other_daemon.address)

    daemon.script(METHOD, moving)
    other_daemon.script(METHOD, one_batch(range(2, 3), epoch=2))
    async with client.subscribe("topic", "sub") as subscription:
        confirmed = subscription.ack(await receive(subscription))
        received = await receive(subscription)
        assert (received.epoch, received.entry_id.tolist()) == (2, [2])
        assert (await confirmed) == 0
        _ = subscription.ack(received)
    assert (daemon.count(METHOD), other_daemon.count(METHOD)) == (1, 1)
    opening = other_daemon.requests(METHOD)[0].taken[0]
    assert held_of(opening) == [(7, 0, 1000), (7, 1, 1001)]


async def test_a_move_to_an_unknown_owner_is_asked_of_the_target_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield moved("")

    daemon.script(METHOD, moving, one_batch(range(1)))
    async with client.subscribe("topic", "sub") as subscription:
        _ = subscription.ack(await receive(subscription))
    assert daemon.count(METHOD) == 2


async def test_leaving_waits_until_acknowledgements_are_durable(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, one_batch(range(3), break_with=grpc.StatusCode.UNAVAILABLE), one_batch(range(3, 4)))
    async with client.subscribe("topic", "sub") as subscription:
        confirmed = subscription.ack(await receive(subscription))
    assert (await confirmed) == 0


async def test_many_breaks_lose_nothing(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    """Each stream sends the next 3 entries and breaks at the first acknowledgement: all 30 are received once."""
    firsts = itertools.count(0, 3)

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        opening = take(requests, "open")
        yield opened(held=len(opening.open.held_entry_id))
        first = next(firsts)
        if first >= 30:
            yield from confirm_all(requests)
            return
        take(requests, "flow")
        yield messages(range(first, first + 3))
        take(requests, "acknowledge")

    daemon.script(METHOD, step)
    seen: list[int] = []
    confirmed = []
    async with client.subscribe("topic", "sub") as subscription:
        while len(seen) < 30:
            received = await receive(subscription)
            seen += received.entry_id.tolist()
            confirmed.append(subscription.ack(received))
    assert seen == list(range(30))
    assert [(await future) for future in confirmed] == [0] * 10
