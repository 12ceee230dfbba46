"""What a daemon of before does not know is asked for, never tried out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tarry.v1 import cluster_pb2, delayed_delivery_pb2, dispatch_pb2
from tests.client._support.fake_daemon import FakeDaemon, Requests, accept, accept_all, answer, refuse
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

RETURN = tarry.OnInvalid.RETURN
FORWARDED = (7, 1, 1_000, None, 0)


of_before = refuse(grpc.StatusCode.UNIMPLEMENTED, "unknown method GetVersion")
of_today = answer(cluster_pb2.GetVersionResponse(version="1", api=1, feature=["handout_names"]))
nacked = answer(dispatch_pb2.NegativeAcknowledgeResponse())
of_tomorrow = answer(cluster_pb2.GetVersionResponse(version="2", api=1, feature=["handout_names", "on_invalid"]))
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
    daemon.script("GetVersion", of_today)
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
    (requests,) = daemon.requests("StreamAddMessages")
    assert [list(each.add.entry_id) for each in requests.taken] == [[2, 3]]


async def test_a_stream_asks_once_for_many_batches(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetVersion", of_tomorrow)
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

    daemon.script("GetVersion", of_tomorrow, of_before)
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
    daemon.script("GetVersion", of_tomorrow)
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
