"""The pipelined stream of adds: in flight, answered in any order, sent again after a break, refused in band."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
from tarry.v1 import delayed_delivery_pb2
from tests.client import fake_daemon
from tests.client.fake_daemon import FakeDaemon, Gate, Requests, accept_all, added, hold, refuse, refused, status

METHOD = "StreamAddMessages"


def entries_of(requests: Requests) -> list[list[int]]:
    return [list(request.add.entry_id) for request in requests.taken]


def test_every_batch_is_answered(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, accept_all)
    with client.add_stream("topic", in_flight=4) as stream:
        answers = [stream.add(7, range(size), delay_ms=5) for size in range(1, 51)]
    assert [answer.result().accepted for answer in answers] == list(range(1, 51))
    (requests,) = daemon.requests(METHOD)
    assert len({request.request_id for request in requests.taken}) == 50
    assert requests.taken[0].add == delayed_delivery_pb2.AddMessagesRequest(
        topic="topic", ledger_id=[7], entry_id=[0], delay_ms=[5], already_due=delayed_delivery_pb2.ALREADY_DUE_DELIVER
    )


def test_answers_may_come_in_any_order(daemon: FakeDaemon, client: tarry.Client) -> None:
    def backwards(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in reversed([requests.take() for _ in range(3)]):
            yield added(request)
        hold(requests)

    daemon.script(METHOD, backwards)
    with client.add_stream("topic") as stream:
        answers = [stream.add(7, range(size), delay_ms=5) for size in (1, 2, 3)]
    assert [answer.result().accepted for answer in answers] == [1, 2, 3]


def test_no_more_than_in_flight_requests_are_unanswered(daemon: FakeDaemon, client: tarry.Client) -> None:
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
    with client.add_stream("topic", in_flight=2) as stream:
        stream.add(7, 0, delay_ms=5)
        stream.add(7, 1, delay_ms=5)
        taken.wait()
        with pytest.raises(tarry.DeadlineExceeded, match="2 requests are in flight"):
            stream.add(7, 2, delay_ms=5, timeout_s=0.05)
        go_on.open()
        assert stream.add(7, 2, delay_ms=5).result(fake_daemon.WAIT_S).accepted == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
def test_what_a_broken_stream_left_unanswered_is_sent_again_in_order(
    daemon: FakeDaemon, client: tarry.Client, code: grpc.StatusCode
) -> None:
    def answer_the_second_and_break(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        yield added(requests.take())
        requests.take()
        context.abort(code, "going down")

    daemon.script(METHOD, answer_the_second_and_break, accept_all)
    with client.add_stream("topic") as stream:
        answers = [stream.add(7, range(size), delay_ms=5) for size in (1, 2, 3)]
    assert [answer.result().accepted for answer in answers] == [1, 2, 3]
    first, second = daemon.requests(METHOD)
    assert entries_of(first) == [[0], [0, 1], [0, 1, 2]]
    assert entries_of(second) == [[0], [0, 1, 2]]
    assert [request.request_id for request in second.taken] == [1, 3]


def test_a_stream_that_ends_without_a_status_is_opened_again(daemon: FakeDaemon, client: tarry.Client) -> None:
    def take_one_and_end(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        requests.take()
        yield from ()

    daemon.script(METHOD, take_one_and_end, accept_all)
    with client.add_stream("topic") as stream:
        assert stream.add(7, 1, delay_ms=5).result(fake_daemon.WAIT_S).accepted == 1


def test_an_idle_stream_is_opened_again_only_for_the_next_batch(daemon: FakeDaemon, client: tarry.Client) -> None:
    def answer_one_and_end(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield added(requests.take())

    daemon.script(METHOD, answer_one_and_end)
    with client.add_stream("topic") as stream:
        assert daemon.count(METHOD) == 0
        for number in (1, 2, 3):
            assert stream.add(7, 1, delay_ms=5).result(fake_daemon.WAIT_S).accepted == 1
            assert daemon.count(METHOD) <= number + 1


def test_a_lasting_refusal_is_of_one_batch_and_the_stream_goes_on(daemon: FakeDaemon, client: tarry.Client) -> None:
    def refuse_the_first(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield refused(requests.take(), status(code_pb2.OUT_OF_RANGE, "delay_ms is 9"))
        yield from accept_all(requests, context)

    daemon.script(METHOD, refuse_the_first)
    with client.add_stream("topic") as stream:
        first, second = stream.add(7, 1, delay_ms=9), stream.add(7, 2, delay_ms=5)
        assert second.result(fake_daemon.WAIT_S).accepted == 1
        with pytest.raises(tarry.OutOfRange, match="delay_ms is 9"):
            first.result(fake_daemon.WAIT_S)
        with pytest.raises(tarry.OutOfRange):
            stream.flush()
        stream.flush()
    assert daemon.count(METHOD) == 1


def test_leaving_the_stream_raises_what_was_refused(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, lambda requests, context: iter([refused(requests.take(), status(code_pb2.INVALID_ARGUMENT))]))
    with pytest.raises(tarry.InvalidArgument), client.add_stream("topic") as stream:
        stream.add(7, 1, delay_ms=9)


@pytest.mark.parametrize(
    "refusal",
    [
        status(code_pb2.UNAVAILABLE),
        status(code_pb2.UNKNOWN),
        status(code_pb2.RESOURCE_EXHAUSTED, retry_after_ms="1"),
    ],
)
def test_a_passing_refusal_is_sent_again_on_the_same_stream(
    daemon: FakeDaemon, client: tarry.Client, refusal: Any
) -> None:
    def refuse_the_first(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield refused(requests.take(), refusal)
        yield from accept_all(requests, context)

    daemon.script(METHOD, refuse_the_first)
    with client.add_stream("topic") as stream:
        answers = [stream.add(7, range(size), delay_ms=5) for size in (1, 2)]
        assert [answer.result(fake_daemon.WAIT_S).accepted for answer in answers] == [1, 2]
    (requests,) = daemon.requests(METHOD)
    assert sorted(entries_of(requests)) == [[0], [0], [0, 1]]


def test_a_refusal_that_outlasts_the_deadline_is_told(daemon: FakeDaemon, client: tarry.Client) -> None:
    def quota(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            yield refused(request, status(code_pb2.RESOURCE_EXHAUSTED, "too many rows", retry_after_ms="3600000"))

    daemon.script(METHOD, quota)
    stream = client.add_stream("topic")
    with pytest.raises(tarry.DeadlineExceeded, match="too many rows"):
        stream.add(7, 1, delay_ms=5).result(fake_daemon.WAIT_S)
    stream.close()


def test_a_daemon_that_stays_away_is_told_at_the_deadline(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAVAILABLE, "the store is gone"))
    stream = client.add_stream("topic", timeout_s=0.1)
    with pytest.raises(tarry.DeadlineExceeded, match=r"within 0\.1 s.*the store is gone"):
        stream.add(7, 1, delay_ms=5).result(fake_daemon.WAIT_S)
    stream.close()


@pytest.mark.parametrize("in_band", [False, True])
def test_the_batches_follow_their_topic_to_its_owner(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.Client, in_band: bool
) -> None:
    def lost_in_band(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        hints = {"owner_address": other_daemon.address}
        yield refused(requests.take(), status(code_pb2.FAILED_PRECONDITION, **hints))
        hold(requests)

    lost = refuse(grpc.StatusCode.FAILED_PRECONDITION, owner_address=other_daemon.address)
    daemon.script(METHOD, lost_in_band if in_band else lost)
    other_daemon.script(METHOD, accept_all)
    with client.add_stream("topic") as stream:
        answers = [stream.add(7, range(size), delay_ms=5) for size in (1, 2)]
    assert [answer.result().accepted for answer in answers] == [1, 2]
    assert (daemon.count(METHOD), other_daemon.count(METHOD)) == (1, 1)


def test_a_stream_that_is_refused_for_good_fails_every_batch(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAUTHENTICATED, "no token"))
    stream = client.add_stream("topic")
    with pytest.raises(tarry.Unauthenticated, match="no token"):
        stream.add(7, 1, delay_ms=5).result(fake_daemon.WAIT_S)
    with pytest.raises(tarry.Unauthenticated, match="no token"):
        stream.add(7, 2, delay_ms=5)
    stream.close()


def test_closing_fails_what_is_unanswered_and_wakes_who_waits(daemon: FakeDaemon, client: tarry.Client) -> None:
    arrived = Gate()

    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        arrived.open(requests.take())
        hold(requests)
        yield from ()

    daemon.script(METHOD, silent)
    stream = client.add_stream("topic", in_flight=1)
    answer = stream.add(7, 1, delay_ms=5)
    arrived.wait()
    blocked = Gate()

    def add_another() -> None:
        try:
            stream.add(7, 2, delay_ms=5)
        except tarry.TarryError as error:
            blocked.open(error)

    threading.Thread(target=add_another, daemon=True).start()
    stream.close()
    assert isinstance(blocked.wait(), tarry.Closed)
    assert isinstance(answer.exception(fake_daemon.WAIT_S), tarry.Closed)
    assert not answer.cancel()


def test_closing_the_client_closes_its_streams(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, accept_all)
    stream = client.add_stream("topic")
    client.close()
    with pytest.raises(tarry.Closed):
        stream.add(7, 1, delay_ms=5)


def test_a_long_batch_is_several_requests_and_one_answer(daemon: FakeDaemon) -> None:
    daemon.script(METHOD, accept_all)
    with tarry.Client(daemon.address, rows_per_request=2) as client, client.add_stream("topic") as stream:
        assert stream.add(7, range(5), delay_ms=5).result(fake_daemon.WAIT_S).accepted == 5
    (requests,) = daemon.requests(METHOD)
    assert entries_of(requests) == [[0, 1], [2, 3], [4]]


def test_the_first_refused_part_of_a_long_batch_fails_it(daemon: FakeDaemon) -> None:
    def refuse_the_second(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        yield added(requests.take())
        yield refused(requests.take(), status(code_pb2.INVALID_ARGUMENT, "no"))
        yield from accept_all(requests, context)

    daemon.script(METHOD, refuse_the_second)
    with tarry.Client(daemon.address, rows_per_request=2) as client:
        stream = client.add_stream("topic")
        with pytest.raises(tarry.InvalidArgument):
            stream.add(7, range(5), delay_ms=5).result(fake_daemon.WAIT_S)
        stream.close()


def test_a_bad_column_is_refused_before_it_is_sent(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, accept_all)
    with client.add_stream("topic") as stream:
        with pytest.raises(tarry.InvalidArgument):
            stream.add(7, [-1], delay_ms=5)
        assert stream.add(7, [1], delay_ms=5).result(fake_daemon.WAIT_S).accepted == 1
    with pytest.raises(tarry.InvalidArgument, match="in_flight is 0"):
        client.add_stream("topic", in_flight=0)
