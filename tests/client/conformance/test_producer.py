"""A producer of single rows: they go out together, each has its own future, and no more than allowed are unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
import tarry.aio
from tarry.v1 import delayed_delivery_pb2
from tests.client._support.fake_daemon import (
    OF_YESTERDAY,
    FakeDaemon,
    Gate,
    Requests,
    accept_all,
    added,
    answer,
    hold,
    refuse,
    refused,
    status,
)
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

METHOD = "StreamAddMessages"
# Nothing goes out for having lingered.
LONG_MS = 3_600_000
STORED = tarry.Added()
BAD = 1_000
response = delayed_delivery_pb2.AddMessagesResponse


def entries_of(daemon: FakeDaemon) -> list[list[int]]:
    """Of each request, over all streams."""
    return [list(request.add.entry_id) for stream in daemon.requests(METHOD) for request in stream.taken]


def refuse_bad(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """As a daemon of before: a batch with a row that is too far ahead is refused."""
    for request in requests:
        too_long = BAD in request.add.delay_ms
        yield refused(request, status(code_pb2.OUT_OF_RANGE, f"delay_ms is {BAD}")) if too_long else added(request)


def refuse_the_second(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    yield added(requests.take())
    yield refused(requests.take(), status(code_pb2.NOT_FOUND, "no such subscription"))
    yield from accept_all(requests, context)


async def test_rows_that_come_together_go_out_together_and_each_is_answered(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetVersion", answer(OF_YESTERDAY))
    daemon.script(METHOD, accept_all)
    async with client.producer("topic", linger_ms=LONG_MS, subscription="sub") as producer:
        answers = [await producer.add(7, entry, delay_ms=entry, key_hash=entry) for entry in range(3)]
        await producer.flush()
        assert [await each for each in answers] == [STORED] * 3
        assert producer.outstanding == 0
    (requests,) = daemon.requests(METHOD)
    (request,) = requests.taken
    assert request.add == delayed_delivery_pb2.AddMessagesRequest(
        topic="topic",
        subscription="sub",
        ledger_id=[7],
        entry_id=[0, 1, 2],
        delay_ms=[0, 1, 2],
        key_hash=[0, 1, 2],
        already_due=delayed_delivery_pb2.ALREADY_DUE_DELIVER,
    )


async def test_a_row_goes_out_when_it_has_lingered(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    producer = client.producer("topic", linger_ms=1)
    assert await (await producer.add(7, 1, delay_ms=5)) == STORED
    assert await (await producer.add(7, 2, deliver_at_ms=5)) == STORED
    await producer.close()
    assert entries_of(daemon) == [[1], [2]]


async def test_a_full_batch_goes_out_at_once(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    producer = client.producer("topic", linger_ms=LONG_MS, batch_rows=2)
    first = await producer.add(7, 1, delay_ms=5)
    other_kind = await producer.add(7, 2, delay_level=1)
    second = await producer.add(7, 3, delay_ms=5)
    assert [await first, await second] == [STORED] * 2
    assert entries_of(daemon) == [[1, 3]]
    assert not other_kind.done()
    await producer.flush()
    assert await other_kind == STORED
    await producer.close()


async def test_a_batch_is_no_larger_than_a_request_may_be(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.script(METHOD, refuse_the_second)
    producer = connect(daemon.address, rows_per_request=2).producer("topic", linger_ms=LONG_MS)
    answers = [await producer.add(7, entry, delay_ms=5) for entry in range(5)]
    with pytest.raises(tarry.NotFound):
        await producer.flush()
    assert [await answers[entry] for entry in (0, 1, 4)] == [STORED] * 3, "the failure is of one request"
    await producer.close()
    assert entries_of(daemon) == [[0, 1], [2, 3], [4]]


async def test_no_more_rows_than_allowed_are_unanswered(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    go_on = Gate()

    def slow(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        request = requests.take()
        go_on.wait()
        yield added(request)
        yield from accept_all(requests, context)

    daemon.script(METHOD, slow)
    producer = client.producer("topic", linger_ms=LONG_MS, max_outstanding=2, timeout_s=0.05)
    answers = [await producer.add(7, entry, delay_ms=5) for entry in range(2)]
    with pytest.raises(tarry.DeadlineExceeded, match="2 rows are outstanding"):
        _ = await producer.add(7, 2, delay_ms=5)
    go_on.open()
    assert [await each for each in answers] == [STORED] * 2, "they went out since no other could come"
    await producer.flush()
    third = await producer.add(7, 2, delay_ms=5)
    await producer.flush()
    assert await third == STORED
    await producer.close()


async def test_who_waits_for_room_goes_on_when_rows_are_answered(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    arrived, go_on = Gate(), Gate()

    def slow(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        arrived.open(request := requests.take())
        go_on.wait()
        yield added(request)
        yield from accept_all(requests, context)

    daemon.script(METHOD, slow)
    async with client.producer("topic", linger_ms=LONG_MS, max_outstanding=1) as producer:
        _ = await producer.add(7, 1, delay_ms=5)
        await arrived.passed()
        waiting = asyncio.create_task(producer.add(7, 2, delay_ms=5))
        go_on.open()
        assert await (await waiting) == STORED


async def test_what_a_broken_stream_left_unanswered_is_sent_again(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def answer_one_and_break(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield added(requests.take())
        requests.take()
        context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

    daemon.script(METHOD, answer_one_and_break, accept_all)
    async with client.producer("topic", linger_ms=LONG_MS, batch_rows=2) as producer:
        answers = [await producer.add(7, entry, delay_ms=5) for entry in range(6)]
        assert [await each for each in answers] == [STORED] * 6
    assert sorted(set(map(tuple, entries_of(daemon)))) == [(0, 1), (2, 3), (4, 5)]


async def test_a_failed_request_fails_its_rows_and_no_others(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, refuse_the_second)
    producer = client.producer("topic", linger_ms=LONG_MS, batch_rows=2)
    answers = [await producer.add(7, entry, delay_ms=5) for entry in range(6)]
    with pytest.raises(tarry.NotFound, match="no such subscription"):
        await producer.flush()
    await producer.flush()
    for entry, each in enumerate(answers):
        if entry in (2, 3):
            with pytest.raises(tarry.NotFound):
                await each
        else:
            assert await each == STORED
    await producer.close()


async def test_a_daemon_that_returns_invalid_rows_is_asked_to(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def return_the_second(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        reason = delayed_delivery_pb2.REFUSED_REASON_DELAY_TOO_LONG
        for request in requests:
            result = response(
                accepted=2,
                refused_index=[1],
                refused_reason=[reason],
                returned_index=[2],
                raised_index=[3],
                raised_deliver_at_ms=[99],
            )
            yield delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request.request_id, added=result)

    daemon.script(METHOD, return_the_second)
    producer = client.producer("topic", linger_ms=LONG_MS, already_due=tarry.AlreadyDue.RETURN)
    answers = [await producer.add(7, entry, delay_ms=5) for entry in range(4)]
    with pytest.raises(tarry.OutOfRange):
        await producer.flush()
    with pytest.raises(tarry.OutOfRange, match="further ahead than the largest delay"):
        await answers[1]
    others = [await answers[entry] for entry in (0, 2, 3)]
    assert others == [STORED, tarry.Added(returned=True), tarry.Added(raised_deliver_at_ms=99)]
    await producer.close()
    (requests,) = daemon.requests(METHOD)
    (request,) = requests.taken
    assert request.add.on_invalid == delayed_delivery_pb2.ON_INVALID_RETURN
    assert request.add.already_due == delayed_delivery_pb2.ALREADY_DUE_RETURN


async def test_at_a_daemon_of_before_a_bad_row_fails_no_other(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", answer(OF_YESTERDAY))
    daemon.script(METHOD, refuse_bad)
    producer = client.producer("topic", linger_ms=LONG_MS, batch_rows=8)
    answers = [await producer.add(7, entry, delay_ms=BAD if entry == 3 else 5) for entry in range(16)]
    with pytest.raises(tarry.OutOfRange):
        await producer.flush()
    for entry, each in enumerate(answers):
        if entry == 3:
            with pytest.raises(tarry.OutOfRange, match=f"delay_ms is {BAD}"):
                await each
        else:
            assert await each == STORED
    await producer.close()
    (requests,) = daemon.requests(METHOD)
    assert not any(request.add.on_invalid for request in requests.taken), "it asks for nothing that is not known"
    assert sorted(map(len, entries_of(daemon))) == [1, 1, 2, 2, 4, 4, 8, 8]


async def test_a_row_that_is_no_row_is_refused_before_it_is_sent(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    async with client.producer("topic", linger_ms=LONG_MS) as producer:
        good = await producer.add(7, 1, delay_ms=5)
        with pytest.raises(tarry.InvalidArgument, match="entry_id is -1"):
            _ = await producer.add(7, -1, delay_ms=5)
        with pytest.raises(tarry.InvalidArgument, match="exactly one of"):
            _ = await producer.add(7, 2)
    assert await good == STORED
    assert entries_of(daemon) == [[1]]
    wrong: list[dict[str, Any]] = [{"linger_ms": -1}, {"batch_rows": 0}, {"max_outstanding": 0}]
    for named in wrong:
        with pytest.raises(tarry.InvalidArgument, match="".join(named)):
            client.producer("topic", **named)


async def test_who_cancels_an_answer_takes_no_row_back_and_disturbs_no_other(
    daemon: FakeDaemon, client: tarry.aio.Client, kind: str
) -> None:
    daemon.script(METHOD, accept_all)
    async with client.producer("topic", linger_ms=LONG_MS) as producer:
        answers = [await producer.add(7, entry, delay_ms=5) for entry in range(3)]
        assert answers[1].cancel() == (kind == "event loop")
        await producer.flush()
        assert answers[1].cancelled() or await answers[1] == STORED
        assert [await answers[0], await answers[2]] == [STORED] * 2
    assert entries_of(daemon) == [[0, 1, 2]]


async def test_a_flush_that_is_not_answered_in_time_says_so(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        hold(requests)
        yield from ()

    daemon.script(METHOD, silent)
    producer = client.producer("topic", linger_ms=LONG_MS)
    unanswered = await producer.add(7, 1, delay_ms=5)
    with pytest.raises(tarry.DeadlineExceeded, match="1 rows are unanswered"):
        await producer.flush(timeout_s=0.05)
    await producer.close()
    with pytest.raises(tarry.Closed):
        await unanswered


async def test_closing_fails_what_is_unanswered_and_what_lingers_and_wakes_who_waits(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    arrived = Gate()

    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        arrived.open(requests.take())
        hold(requests)
        yield from ()

    daemon.script(METHOD, silent)
    producer = client.producer("topic", linger_ms=LONG_MS, batch_rows=2, max_outstanding=3)
    answers = [await producer.add(7, entry, delay_ms=5) for entry in range(3)]
    await arrived.passed()
    waiting = asyncio.create_task(producer.add(7, 4, delay_ms=5))
    await asyncio.sleep(0)
    await producer.close()
    await producer.close()
    with pytest.raises(tarry.Closed):
        _ = await waiting
    for each in answers:
        with pytest.raises(tarry.Closed):
            await each
    assert producer.outstanding == 0
    with pytest.raises(tarry.Closed):
        _ = await producer.add(7, 5, delay_ms=5)


async def test_closing_the_client_closes_its_producers(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, accept_all)
    producer = client.producer("topic", linger_ms=LONG_MS)
    lingering = await producer.add(7, 1, delay_ms=5)
    await client.close()
    with pytest.raises(tarry.Closed):
        await lingering


async def test_a_stream_that_is_refused_for_good_fails_every_row(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAUTHENTICATED, "no token"))
    producer = client.producer("topic", linger_ms=1)
    for entry in range(2):
        with pytest.raises(tarry.Unauthenticated, match="no token"):
            await (await producer.add(7, entry, delay_ms=5))
    with pytest.raises(tarry.Unauthenticated):
        await producer.flush()
    await producer.close()


async def test_leaving_it_raises_the_first_failure(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", answer(OF_YESTERDAY))
    daemon.script(METHOD, refuse_bad)
    with pytest.raises(tarry.OutOfRange):
        async with client.producer("topic") as producer:
            _ = await producer.add(7, 1, delay_ms=BAD)


async def test_many_who_add_side_by_side_each_get_their_answers(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", answer(OF_YESTERDAY))
    daemon.script(METHOD, refuse_bad)

    async def add(ledger: int) -> int:
        stored = 0
        for entry in range(40):
            answered = await producer.add(ledger, entry, delay_ms=BAD if entry == ledger else 5)
            try:
                stored += await answered == STORED
            except tarry.OutOfRange:
                assert entry == ledger
        return stored

    producer = client.producer("topic", linger_ms=1, batch_rows=7, max_outstanding=10)
    assert await asyncio.gather(*map(add, range(20))) == [39] * 20
    await producer.close()
    (requests,) = daemon.requests(METHOD)
    stored = [
        position
        for request in requests.taken
        if BAD not in request.add.delay_ms
        for position in zip(
            list(request.add.ledger_id) * (1 if len(request.add.ledger_id) > 1 else len(request.add.entry_id)),
            request.add.entry_id,
            strict=True,
        )
    ]
    assert sorted(stored) == [(ledger, entry) for ledger in range(20) for entry in range(40) if entry != ledger]
