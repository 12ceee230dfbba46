"""The pipelined stream of adds: in flight, answered in any order, sent again after a break, refused in band."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
import tarry.aio
from tarry.v1 import delayed_delivery_pb2
from tests._support.patience import awaited_within_some_time
from tests.client._support.fake_daemon import (
    FakeDaemon,
    Gate,
    Requests,
    accept_all,
    added,
    hold,
    refuse,
    refused,
    status,
)
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "StreamAddMessages"


def entries_of(requests: Requests) -> list[list[int]]:
    return [list(request.add.entry_id) for request in requests.taken]


async def test_every_batch_is_answered(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    async with client.add_stream("topic", in_flight=4) as stream:
        answers = [await stream.add(7, range(size), delay_ms=5) for size in range(1, 51)]
    assert [(await answer).accepted for answer in answers] == list(range(1, 51))
    (requests,) = daemon.requests(METHOD)
    assert len({request.request_id for request in requests.taken}) == 50
    assert requests.taken[0].add == delayed_delivery_pb2.AddMessagesRequest(
        topic="topic", ledger_id=[7], entry_id=[0], delay_ms=[5], already_due=delayed_delivery_pb2.ALREADY_DUE_DELIVER
    )


async def test_answers_may_come_in_any_order(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def backwards(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in reversed([requests.take() for _ in range(3)]):
            yield added(request)
        hold(requests)

    daemon.script(METHOD, backwards)
    async with client.add_stream("topic") as stream:
        answers = [await stream.add(7, range(size), delay_ms=5) for size in (1, 2, 3)]
    assert [(await answer).accepted for answer in answers] == [1, 2, 3]


async def test_no_more_than_in_flight_requests_are_unanswered(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    taken, go_on = Gate(), Gate()

    def two_by_two(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        pair = [requests.take(), requests.take()]
        taken.open()
        go_on.wait()
        for request in pair:
            yield added(request)
        for request in requests:
            yield added(request)

    daemon.script(METHOD, two_by_two)
    async with client.add_stream("topic", in_flight=2) as stream:
        _ = await stream.add(7, 0, delay_ms=5)
        _ = await stream.add(7, 1, delay_ms=5)
        await taken.passed()
        with pytest.raises(tarry.DeadlineExceeded, match="2 requests are in flight"):
            _ = await stream.add(7, 2, delay_ms=5, timeout_s=0.05)
        go_on.open()
        assert (await (await stream.add(7, 2, delay_ms=5))).accepted == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
async def test_what_a_broken_stream_left_unanswered_is_sent_again_in_order(
    daemon: FakeDaemon, client: tarry.aio.Client, code: grpc.StatusCode
) -> None:
    def answer_the_second_and_break(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        yield added(requests.take())
        requests.take()
        context.abort(code, "going down")

    daemon.script(METHOD, answer_the_second_and_break, accept_all)
    async with client.add_stream("topic") as stream:
        answers = [await stream.add(7, range(size), delay_ms=5) for size in (1, 2, 3)]
    assert [(await answer).accepted for answer in answers] == [1, 2, 3]
    first, second = daemon.requests(METHOD)
    assert entries_of(first) == [[0], [0, 1], [0, 1, 2]]
    assert entries_of(second) == [[0], [0, 1, 2]]
    assert [request.request_id for request in second.taken] == [1, 3]


async def test_a_stream_that_ends_without_a_status_is_opened_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def take_one_and_end(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        yield from ()

    daemon.script(METHOD, take_one_and_end, accept_all)
    async with client.add_stream("topic") as stream:
        assert (await (await stream.add(7, 1, delay_ms=5))).accepted == 1


async def test_an_idle_stream_is_opened_again_only_for_the_next_batch(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def answer_one_and_end(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield added(requests.take())

    daemon.script(METHOD, answer_one_and_end)
    async with client.add_stream("topic") as stream:
        assert daemon.count(METHOD) == 0
        for number in (1, 2, 3):
            assert (await (await stream.add(7, 1, delay_ms=5))).accepted == 1
            assert daemon.count(METHOD) <= number + 1


async def test_a_lasting_refusal_is_of_one_batch_and_the_stream_goes_on(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def refuse_the_first(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield refused(requests.take(), status(code_pb2.OUT_OF_RANGE, "delay_ms is 9"))
        yield from accept_all(requests, context)

    daemon.script(METHOD, refuse_the_first)
    async with client.add_stream("topic") as stream:
        first, second = await stream.add(7, 1, delay_ms=9), await stream.add(7, 2, delay_ms=5)
        assert (await second).accepted == 1
        with pytest.raises(tarry.OutOfRange, match="delay_ms is 9"):
            (await first)
        with pytest.raises(tarry.OutOfRange):
            await stream.flush()
        await stream.flush()
    assert daemon.count(METHOD) == 1


async def test_leaving_the_stream_raises_what_was_refused(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, lambda requests, context: iter([refused(requests.take(), status(code_pb2.INVALID_ARGUMENT))]))
    with pytest.raises(tarry.InvalidArgument):
        async with client.add_stream("topic") as stream:
            _ = await stream.add(7, 1, delay_ms=9)


@pytest.mark.parametrize(
    "refusal",
    [
        status(code_pb2.UNAVAILABLE),
        status(code_pb2.UNKNOWN),
        status(code_pb2.RESOURCE_EXHAUSTED, retry_after_ms="1"),
    ],
)
async def test_a_passing_refusal_is_sent_again_on_the_same_stream(
    daemon: FakeDaemon, client: tarry.aio.Client, refusal: Any
) -> None:
    def refuse_the_first(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield refused(requests.take(), refusal)
        yield from accept_all(requests, context)

    daemon.script(METHOD, refuse_the_first)
    async with client.add_stream("topic") as stream:
        answers = [await stream.add(7, range(size), delay_ms=5) for size in (1, 2)]
        assert [(await answer).accepted for answer in answers] == [1, 2]
    (requests,) = daemon.requests(METHOD)
    assert sorted(entries_of(requests)) == [[0], [0], [0, 1]]


async def test_a_refused_batch_comes_back_no_sooner_than_the_daemon_says(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    came_s: list[float] = []

    def quota(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        first = requests.take()
        came_s.append(time.monotonic())
        yield refused(first, status(code_pb2.RESOURCE_EXHAUSTED, "too many rows", retry_after_ms="250"))
        second = requests.take()
        came_s.append(time.monotonic())
        yield added(second)

    daemon.script(METHOD, quota)
    stream = client.add_stream("topic")
    assert (await (await stream.add(7, 1, delay_ms=5))).accepted == 1
    assert came_s[1] - came_s[0] >= 0.25
    await stream.close()


async def test_a_refusal_that_outlasts_the_deadline_is_told(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def quota(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield refused(request, status(code_pb2.RESOURCE_EXHAUSTED, "too many rows", retry_after_ms="3600000"))

    daemon.script(METHOD, quota)
    stream = client.add_stream("topic")
    with pytest.raises(tarry.DeadlineExceeded, match="too many rows"):
        (await (await stream.add(7, 1, delay_ms=5)))
    await stream.close()


async def test_a_daemon_that_stays_away_is_told_at_the_deadline(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAVAILABLE, "the store is gone"))

    async def story(seconds: float) -> None:
        stream = client.add_stream("topic", timeout_s=seconds)
        with pytest.raises(tarry.DeadlineExceeded, match=rf"within {seconds:g} s.*the store is gone"):
            (await (await stream.add(7, 1, delay_ms=5)))
        await stream.close()

    await awaited_within_some_time(story)


@pytest.mark.parametrize("in_band", [False, True])
async def test_the_batches_follow_their_topic_to_its_owner(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client, in_band: bool
) -> None:
    def lost_in_band(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        hints = {"owner_address": other_daemon.address}
        yield refused(requests.take(), status(code_pb2.FAILED_PRECONDITION, **hints))
        hold(requests)

    lost = refuse(grpc.StatusCode.FAILED_PRECONDITION, owner_address=other_daemon.address)
    daemon.script(METHOD, lost_in_band if in_band else lost)
    other_daemon.script(METHOD, accept_all)
    async with client.add_stream("topic") as stream:
        answers = [await stream.add(7, range(size), delay_ms=5) for size in (1, 2)]
    assert [(await answer).accepted for answer in answers] == [1, 2]
    assert (daemon.count(METHOD), other_daemon.count(METHOD)) == (1, 1)


async def test_a_stream_that_is_refused_for_good_fails_every_batch(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAUTHENTICATED, "no token"))
    stream = client.add_stream("topic")
    with pytest.raises(tarry.Unauthenticated, match="no token"):
        (await (await stream.add(7, 1, delay_ms=5)))
    with pytest.raises(tarry.Unauthenticated, match="no token"):
        _ = await stream.add(7, 2, delay_ms=5)
    await stream.close()


async def test_closing_fails_what_is_unanswered_and_wakes_who_waits(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    arrived = Gate()

    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        arrived.open(requests.take())
        hold(requests)
        yield from ()

    daemon.script(METHOD, silent)
    stream = client.add_stream("topic", in_flight=1)
    answer = await stream.add(7, 1, delay_ms=5)
    await arrived.passed()
    blocked = asyncio.create_task(stream.add(7, 2, delay_ms=5))
    await asyncio.sleep(0)
    await stream.close()
    with pytest.raises(tarry.Closed):
        _ = await blocked
    with pytest.raises(tarry.Closed):
        await answer


async def test_closing_the_client_closes_its_streams(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    stream = client.add_stream("topic")
    await client.close()
    with pytest.raises(tarry.Closed):
        _ = await stream.add(7, 1, delay_ms=5)


async def test_a_long_batch_is_several_requests_and_one_answer(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.script(METHOD, accept_all)
    async with connect(daemon.address, rows_per_request=2).add_stream("topic") as stream:
        assert (await (await stream.add(7, range(5), delay_ms=5))).accepted == 5
    (requests,) = daemon.requests(METHOD)
    assert entries_of(requests) == [[0, 1], [2, 3], [4]]


async def test_the_first_refused_part_of_a_long_batch_fails_it(daemon: FakeDaemon, connect: Connect) -> None:
    def refuse_the_second(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield added(requests.take())
        yield refused(requests.take(), status(code_pb2.INVALID_ARGUMENT, "no"))
        yield from accept_all(requests, context)

    daemon.script(METHOD, refuse_the_second)
    stream = connect(daemon.address, rows_per_request=2).add_stream("topic")
    with pytest.raises(tarry.InvalidArgument):
        await (await stream.add(7, range(5), delay_ms=5))
    await stream.close()


async def test_a_bad_column_is_refused_before_it_is_sent(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    async with client.add_stream("topic") as stream:
        with pytest.raises(tarry.InvalidArgument):
            _ = await stream.add(7, [-1], delay_ms=5)
        assert (await (await stream.add(7, [1], delay_ms=5))).accepted == 1
    with pytest.raises(tarry.InvalidArgument, match="in_flight is 0"):
        client.add_stream("topic", in_flight=0)
