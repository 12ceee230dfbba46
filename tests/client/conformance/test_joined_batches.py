"""Batches that are joined when they are received: how many rows, how long it waits, what is held of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tests.client._support.fake_daemon import (
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    Streaming,
    confirm_all,
    done,
    held_of,
    messages,
    opened,
    receive,
    take,
    taken_back,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "Subscribe"
LONG_MS = 3_600_000


def sending(*answers: Any, then: Callable[[Requests], Iterator[Any]] = confirm_all) -> Streaming:
    """Sends these as soon as the client asks for an extension, and answers that behind them."""

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        request = take(requests, "extend")
        yield from answers
        yield done(request)
        yield from then(requests)

    return step


async def all_has_come(subscription: Any) -> None:
    """What `sending` sends is here."""
    await subscription.extend((1, 1, 1))


async def test_what_has_arrived_is_one_batch(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    arriving = [messages([0, 1]), messages([2], redelivery_count=[3]), messages([3], batch_index=[9])]
    daemon.script(METHOD, sending(*arriving))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        received = await receive(subscription)
        assert received.entry_id.tolist() == [0, 1, 2, 3]
        assert received.redelivery_count.tolist() == [0, 0, 3, 0]
        assert received.batch_index is not None
        assert received.batch_index.tolist() == [tarry.NO_BATCH_INDEX] * 3 + [9]
        assert subscription.held == 4
        assert await subscription.ack(received) == 0
        assert subscription.held == 0
    (requests,) = daemon.requests(METHOD)
    (acknowledged,) = [each.acknowledge for each in requests.taken if each.HasField("acknowledge")]
    assert list(acknowledged.entry_id) == [0, 1, 2, 3]


async def test_iterating_joins_what_has_arrived(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, sending(*(messages([entry]) for entry in range(50))))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        async for received in subscription:
            assert received.entry_id.tolist() == list(range(50))
            _ = subscription.ack(received)
            break


async def test_at_most_so_many_rows_are_joined(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, sending(messages(range(3)), messages(range(3, 8))))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        parts = [await receive(subscription, max_rows=4, linger_ms=LONG_MS) for _ in range(2)]
        assert [part.entry_id.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert await subscription.ack(parts[1].take([0, 3])) == 0
        assert subscription.held == 6
        assert await subscription.ack(tarry.Batch.concat(parts)) == 0
        assert subscription.held == 0


async def test_it_waits_for_more_until_there_are_enough(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    go_on = Gate()

    def more(requests: Requests) -> Iterator[Any]:
        go_on.wait()
        yield messages([2])
        yield messages([3])
        yield from confirm_all(requests)

    daemon.script(METHOD, sending(messages([0, 1]), then=more))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        receiving = asyncio.ensure_future(receive(subscription, max_rows=4, linger_ms=LONG_MS))
        await asyncio.sleep(0)
        go_on.open()
        received = await receiving
        assert received.entry_id.tolist() == [0, 1, 2, 3]
        _ = subscription.ack(received)


async def test_it_waits_no_longer_than_it_is_told(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, sending(messages([0, 1])))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        received = await receive(subscription, linger_ms=1)
        assert received.entry_id.tolist() == [0, 1]
        _ = subscription.ack(received)


async def test_lingering_ends_with_the_time_for_receiving(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, sending(messages([0, 1])))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        received = await subscription.receive(0.0, linger_ms=LONG_MS)
        assert received is not None
        _ = subscription.ack(received)
        assert await subscription.receive(0.0, linger_ms=LONG_MS) is None


async def test_closing_ends_lingering(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, sending(messages([0, 1])))
    subscription = await client.subscribe("topic", "sub")
    await all_has_come(subscription)
    receiving = asyncio.ensure_future(subscription.receive(None, linger_ms=LONG_MS))
    await asyncio.sleep(0)
    await subscription.close()
    assert await receiving is None


async def test_of_two_callers_that_wait_for_more_one_has_it_and_the_other_waits_on(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    go_on = Gate()

    def more(requests: Requests) -> Iterator[Any]:
        go_on.wait()
        yield messages([2, 3])
        yield from confirm_all(requests)

    daemon.script(METHOD, sending(messages([0]), messages([1]), then=more))
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        first = asyncio.ensure_future(receive(subscription, linger_ms=20))
        second = asyncio.ensure_future(receive(subscription, linger_ms=20))
        done_first, _ = await asyncio.wait((first, second), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert done_first
        go_on.open()
        received = [await first, await second]
        assert sorted(each.entry_id.tolist() for each in received) == [[0, 1], [2, 3]]
        for each in received:
            _ = subscription.ack(each)


async def test_what_is_left_of_a_joined_batch_is_declared_once(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    again = Gate()

    def breaking(requests: Requests) -> Iterator[Any]:
        yield done(take(requests, "acknowledge"))
        take(requests, "acknowledge")

    def continuing(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        again.open(requests.take())
        yield opened(epoch=2, held=3)
        yield from confirm_all(requests, epoch=2)

    first = sending(messages([0, 1]), messages([2, 3]), messages([4]), then=breaking)
    daemon.script(METHOD, first, continuing)
    async with client.subscribe("topic", "sub") as subscription:
        await all_has_come(subscription)
        joined = await receive(subscription)
        assert await subscription.ack(joined.take([1, 4])) == 0
        unanswered = subscription.ack(joined.take([1, 2]))
        assert sorted(held_of(await again.passed())) == [(7, 0, 1000), (7, 1, 1001), (7, 2, 1002), (7, 3, 1003)]
        await unanswered
        assert subscription.held == 2
        assert await subscription.ack(joined) == 0
        assert subscription.held == 0


async def test_batches_of_a_consumer_are_joined_up_to_what_it_is_told(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """Of entries 0 to 4, all of them for two consumers, 0 is taken back when its batch was taken already."""
    go_on = Gate()

    def more(requests: Requests) -> Iterator[Any]:
        go_on.wait()
        for entry in range(1, 5):
            yield messages([entry], consumer_id=[1 + entry % 2])
        yield taken_back([0, 2], [1, 1])
        yield messages([5], consumer_id=[1])
        yield done(take(requests, "extend"))
        yield from confirm_all(requests)

    daemon.script(METHOD, sending(messages([0], consumer_id=[1]), then=more))
    a, b = tarry.Consumer("a"), tarry.Consumer("b")
    async with client.subscribe_key_shared("topic", "sub", consumers=[a, b]) as subscription:
        await all_has_come(subscription)
        events: list[Any] = [await subscription.receive(WAIT_S)]
        go_on.open()
        await all_has_come(subscription)
        for _ in range(4):
            events.append(await subscription.receive(WAIT_S, linger_ms=LONG_MS if len(events) < 4 else 0))
        told = [(type(each).__name__, each.consumer.name, each.positions.entry_id.tolist()) for each in events]
        assert told == [
            ("ConsumerBatch", "a", [0]),
            ("ConsumerBatch", "b", [1, 3]),
            ("ConsumerBatch", "a", [4]),
            ("TakenBack", "a", [0]),
            ("ConsumerBatch", "a", [5]),
        ]
        assert subscription.held == 4
        _ = subscription.ack(tarry.Batch.concat([events[0], events[2], events[4]]))
        assert subscription.held == 2, "what was taken back gives no permit back again"
        _ = subscription.ack(events[1])


@pytest.mark.parametrize("wrong", [{"max_rows": 0}, {"linger_ms": -1}])
async def test_what_cannot_be_meant_is_refused(
    daemon: FakeDaemon, client: tarry.aio.Client, wrong: dict[str, int]
) -> None:
    daemon.script(METHOD, sending())
    async with client.subscribe("topic", "sub") as subscription:
        with pytest.raises(tarry.InvalidArgument, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
            await subscription.receive(0.0, **wrong)
