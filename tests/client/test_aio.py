"""What only a client of an event loop has to do: cancelled callers, futures that nobody awaits, calls side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

import tarry
import tarry.aio
from tests.client import conftest
from tests.client._support import fake_daemon
from tests.client._support.fake_daemon import (
    FakeDaemon,
    Gate,
    Requests,
    accept_all,
    added,
    hold,
    messages,
    opened,
    refuse,
    take,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(daemon: FakeDaemon) -> AsyncIterator[tarry.aio.Client]:
    async with tarry.aio.Client(
        daemon.address, timeout_s=fake_daemon.WAIT_S, retry_policy=conftest.AT_ONCE
    ) as connected:
        yield connected


async def test_a_caller_that_is_cancelled_ends_its_call_and_the_client_goes_on(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    arrived, ended = Gate(), Gate()

    def silent(request: Any, context: grpc.ServicerContext) -> Any:
        context.add_callback(ended.open)
        arrived.open()
        ended.wait()
        context.abort(grpc.StatusCode.CANCELLED, "nobody waits")

    daemon.script("AddMessages", silent, fake_daemon.accept)
    adding = asyncio.create_task(client.add("topic", 1, 1, delay_ms=1))
    await arrived.passed()
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1


async def test_calls_wait_side_by_side(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    everyone = asyncio.Event()
    loop = asyncio.get_running_loop()
    arrived = 0

    def meet(request: Any, context: grpc.ServicerContext) -> Any:
        def count() -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 8:
                everyone.set()

        loop.call_soon_threadsafe(count)
        asyncio.run_coroutine_threadsafe(everyone.wait(), loop).result(fake_daemon.WAIT_S)
        return fake_daemon.accept(request, context)

    daemon.script("AddMessages", meet)
    answers = await asyncio.gather(*(client.add("topic", 1, entry, delay_ms=1) for entry in range(8)))
    assert [answer.accepted for answer in answers] == [1] * 8


async def test_a_future_that_is_cancelled_takes_nothing_back(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    go_on = Gate()

    def late(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        first, second = requests.take(), requests.take()
        go_on.wait()
        yield added(first)
        yield added(second)
        hold(requests)

    daemon.script("StreamAddMessages", late)
    async with client.add_stream("topic", in_flight=2) as stream:
        first, second = await stream.add(7, 1, delay_ms=5), await stream.add(7, 2, delay_ms=5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.02)
        go_on.open()
        assert (await second).accepted == 1
        await stream.flush()
    assert first.cancelled()


async def test_a_caller_that_waits_for_its_turn_may_be_cancelled(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    arrived, go_on = Gate(), Gate()

    def one_by_one(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        first = requests.take()
        arrived.open()
        go_on.wait()
        yield added(first)
        yield from accept_all(requests, context)

    daemon.script("StreamAddMessages", one_by_one)
    async with client.add_stream("topic", in_flight=1) as stream:
        first = await stream.add(7, 1, delay_ms=5)
        await arrived.passed()
        waiting = asyncio.create_task(stream.add(7, 2, delay_ms=5))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            _ = await waiting
        go_on.open()
        assert (await first).accepted == 1
        assert (await (await stream.add(7, 3, delay_ms=5))).accepted == 1
    (requests,) = daemon.requests("StreamAddMessages")
    assert [list(request.add.entry_id) for request in requests.taken] == [[1], [3]]


async def test_a_failure_that_nobody_awaits_is_not_complained_about(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    daemon.script("StreamAddMessages", refuse(grpc.StatusCode.UNAUTHENTICATED))
    stream = client.add_stream("topic", in_flight=3)
    _ = await stream.add(7, range(3), delay_ms=5)
    with pytest.raises(tarry.Unauthenticated):
        await stream.flush()
    await stream.close()
    assert complaints == []


async def test_a_subscription_may_be_awaited_or_entered(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        yield from fake_daemon.confirm_all(requests)

    daemon.script("Subscribe", step)
    awaited = await client.subscribe("topic", "sub")
    assert await awaited.ack(await fake_daemon.receive(awaited)) == 0
    await awaited.close()
    async with client.subscribe("topic", "sub") as entered:
        async for batch in entered:
            assert await entered.ack(batch) == 0
            break


async def test_opening_that_is_cancelled_leaves_no_stream(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    arrived, ended = Gate(), Gate()

    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        context.add_callback(ended.open)
        arrived.open()
        hold(requests)
        yield from ()

    daemon.script("Subscribe", silent)

    async def opening() -> None:
        await client.subscribe("topic", "sub")

    task = asyncio.create_task(opening())
    await arrived.passed()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended.passed()


async def test_the_status_of_a_stream_is_the_daemon_s_whatever_was_being_written(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """A write that fails as the stream ends must not hide why it ended."""
    daemon.script("Subscribe", refuse(grpc.StatusCode.NOT_FOUND, "no subscription"))
    for _ in range(50):
        with pytest.raises(tarry.NotFound, match="no subscription"):
            await client.subscribe("topic", "sub")
    assert daemon.count("Subscribe") == 50
