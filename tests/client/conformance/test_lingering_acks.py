"""Acknowledgements that wait for others: what they are sent with, when, and what happens to them if a stream breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from examples import processes
from tarry.v1 import dispatch_pb2
from tests.client._support.fake_daemon import (
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    confirm_all,
    done,
    held_of,
    hold,
    messages,
    opened,
    receive,
    take,
)
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "Subscribe"
LONG_MS = 3_600_000


def four_rows(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """Entries 0 to 3; every request is done."""
    take(requests, "open")
    yield opened()
    yield messages(range(4))
    yield from confirm_all(requests)


def acknowledged(requests: Requests) -> list[list[int]]:
    return [list(each.acknowledge.entry_id) for each in requests.taken if each.HasField("acknowledge")]


async def test_flushing_sends_as_one_request_what_lingers(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(4))
        answer = done(take(requests, "acknowledge"), ignored=2)
        answer.done.ignored_index.extend([1, 3])
        answer.done.ignored_reason.append(dispatch_pb2.IGNORED_REASON_NOT_THERE)
        yield answer
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    async with client.subscribe("topic", "sub", ack_linger_ms=LONG_MS) as subscription:
        batch = await receive(subscription)
        answers = [subscription.ack(batch.take(rows)) for rows in ([0], [1, 2], [3])]
        assert subscription.held == 0
        await subscription.flush(WAIT_S)
        told = [await answer for answer in answers]
        assert told == [0, 1, 1]
        assert [each.index.tolist() for each in told] == [[], [0], [0]]
    assert acknowledged(daemon.requests(METHOD)[0]) == [[0, 1, 2, 3]]


async def test_it_is_sent_when_its_time_is_over(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, four_rows)
    async with client.subscribe("topic", "sub", ack_linger_ms=1) as subscription:
        batch = await receive(subscription)
        for row in range(4):
            assert await subscription.ack(batch.take([row])) == 0
    assert acknowledged(daemon.requests(METHOD)[0]) == [[0], [1], [2], [3]]


async def test_without_lingering_each_is_a_request(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, four_rows)
    async with client.subscribe("topic", "sub", ack_linger_ms=0) as subscription:
        batch = await receive(subscription)
        for row in range(4):
            _ = subscription.ack(batch.take([row]))
    assert acknowledged(daemon.requests(METHOD)[0]) == [[0], [1], [2], [3]]


async def test_leaving_the_subscription_sends_what_lingers(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, four_rows)
    async with client.subscribe("topic", "sub", ack_linger_ms=LONG_MS) as subscription:
        batch = await receive(subscription)
        answers = [subscription.ack(batch.take([0])), subscription.ack(batch.take([1, 2, 3]))]
    assert [await answer for answer in answers] == [0, 0]


async def test_a_negative_acknowledgement_is_sent_behind_what_lingers(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script(METHOD, four_rows)
    async with client.subscribe("topic", "sub", ack_linger_ms=LONG_MS) as subscription:
        batch = await receive(subscription)
        answers = [subscription.ack(batch.take([0])), subscription.ack(batch.take([1]))]
        await subscription.nack(batch.take([2]))
        assert [await answer for answer in answers] == [0, 0]
        _ = subscription.ack(batch.take([3]))
        await subscription.extend((7, 9, 1))
    (requests,) = daemon.requests(METHOD)
    kinds = [each.WhichOneof("request") for each in requests.taken]
    assert [kind for kind in kinds if kind not in ("open", "flow")] == [
        *("acknowledge", "negative_acknowledge", "acknowledge", "extend")
    ]


async def test_what_lingers_when_the_stream_breaks_is_declared_and_acknowledged_on_the_next(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    go_on, again = Gate(), Gate()

    def breaking(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(4))
        go_on.wait()
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2, held=4)
        yield from confirm_all(requests, epoch=2)

    daemon.script(METHOD, breaking, continuing)
    async with client.subscribe("topic", "sub", ack_linger_ms=LONG_MS) as subscription:
        batch = await receive(subscription)
        answers = [subscription.ack(batch.take([0])), subscription.ack(batch.take([2]))]
        go_on.open()
        assert sorted(held_of(await again.passed())) == [(7, entry, 1000 + entry) for entry in range(4)]
        assert [await answer for answer in answers] == [0, 0]
        assert subscription.held == 2
        _ = subscription.ack(batch)
    first, second = daemon.requests(METHOD)
    assert (acknowledged(first), acknowledged(second)[0]) == ([], [0, 2])


async def test_closing_fails_what_lingers(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        yield messages(range(4))
        hold(requests)

    daemon.script(METHOD, silent)
    subscription = await client.subscribe("topic", "sub", ack_linger_ms=LONG_MS)
    answer = subscription.ack(await receive(subscription))
    await subscription.close()
    with pytest.raises(tarry.Closed):
        await answer


async def test_a_time_that_cannot_be_meant_is_refused(client: tarry.aio.Client) -> None:
    with pytest.raises(tarry.InvalidArgument, match="ack_linger_ms is -1"):
        await client.subscribe("topic", "sub", ack_linger_ms=-1)
    with pytest.raises(tarry.InvalidArgument, match="ack_linger_ms is -1"):
        await client.subscribe_key_shared("topic", "sub", consumers=[], ack_linger_ms=-1)


# Against a real daemon.


async def rows_of(subscription: tarry.aio.Subscription, rows: int) -> tarry.Batch:
    received: list[tarry.Batch] = []
    while sum(map(len, received)) < rows:
        received.append(await receive(subscription))
    return tarry.Batch.concat(received)


async def test_each_acknowledgement_is_told_its_own_by_a_real_daemon(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(shared_daemon.address, timeout_s=WAIT_S)
    async with client.subscribe(topic, "sub", create=True, ack_linger_ms=LONG_MS) as subscription:
        await client.add(topic, 7, range(300), delay_ms=0)
        batch = await rows_of(subscription, 300)
        answers = [subscription.ack(batch.take([row])) for row in range(0, 300, 2)]
        await subscription.flush(WAIT_S)
        assert {await answer for answer in answers} == {0}
        pairs = [subscription.ack(batch.take([row, row + 1])) for row in range(0, 300, 2)]
        await subscription.flush(WAIT_S)
        told = [await answer for answer in pairs]
        assert [list(each.items()) for each in told] == [[(0, tarry.IgnoredReason.NOT_THERE)]] * 150
    (stats,) = (await client.stats(topic)).subscriptions
    assert stats.backlog == 0


async def test_what_is_acknowledged_twice_within_the_linger_is_ignored_once_by_a_real_daemon(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(shared_daemon.address, timeout_s=WAIT_S)
    async with client.subscribe(topic, "sub", create=True, ack_linger_ms=LONG_MS) as subscription:
        await client.add(topic, 7, range(4), delay_ms=0)
        batch = await rows_of(subscription, 4)
        answers = [subscription.ack(batch.take(rows)) for rows in ([0, 1], [1, 2], [3])]
        await subscription.flush(WAIT_S)
        told = [await answer for answer in answers]
        assert [list(each.items()) for each in told] == [[], [(0, tarry.IgnoredReason.NOT_THERE)], []]
    (stats,) = (await client.stats(topic)).subscriptions
    assert stats.backlog == 0


async def test_what_lingers_when_a_real_daemon_is_killed_does_not_come_again(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=WAIT_S)
    async with client.subscribe(topic, "sub", create=True, ack_linger_ms=LONG_MS) as subscription:
        await client.add(topic, 7, range(100), delay_ms=0)
        batch = await rows_of(subscription, 100)
        answers = [subscription.ack(batch.take([row])) for row in range(100)]
        await in_thread(mortal_daemon.kill)
        await in_thread(mortal_daemon.start_serving)
        assert {await answer for answer in answers} == {0}
        assert subscription.streams_opened == 2
        await client.add(topic, 8, 1, delay_ms=0)
        assert (await receive(subscription)).ledger_id.tolist() == [8]
    (stats,) = (await client.stats(topic)).subscriptions
    assert stats.backlog == 1
