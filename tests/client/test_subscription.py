"""Receiving and acknowledging: permits, what is declared after a break, epochs, owners."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

import tarry
from tarry.v1 import dispatch_pb2
from tests.client import fake_daemon
from tests.client.fake_daemon import (
    WAIT_S,
    FakeDaemon,
    Gate,
    Requests,
    answer,
    done,
    hold,
    messages,
    moved,
    opened,
    refuse,
    status,
    take,
)

METHOD = "Subscribe"


def receive(subscription: tarry.Subscription) -> tarry.Batch:
    received = subscription.receive(WAIT_S)
    assert received is not None
    return received


def held_of(request: Any) -> list[tuple[int, int, int]]:
    columns = (request.open.held_ledger_id, request.open.held_entry_id, request.open.held_deliver_at_ms)
    return list(zip(*columns, strict=True))


def confirm_all(requests: Requests, *, epoch: int = 1) -> Iterator[Any]:
    for request in requests:
        if request.WhichOneof("request") == "acknowledge" and request.acknowledge.request_id:
            yield done(request, epoch=epoch)


def one_batch(entries: range, *, epoch: int = 1, break_with: grpc.StatusCode | None = None) -> fake_daemon.Streaming:
    """Opens, sends the entries when permits come; confirms every acknowledgement, or breaks at the first one."""

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch)
        sent = False
        for request in requests:
            if request.HasField("flow") and not sent:
                yield messages(entries, epoch=epoch)
                sent = True
            if request.HasField("acknowledge"):
                if break_with is not None:
                    context.abort(break_with, "going down")
                yield done(request, epoch=epoch)

    return step


def test_what_is_due_comes_as_columns_and_is_acknowledged(daemon: FakeDaemon, client: tarry.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(4)
        assert take(requests, "flow").flow.permits == 100
        batch = dispatch_pb2.Messages(
            epoch=4, ledger_id=[7, 7], entry_id=[1, 2], deliver_at_ms=[10, 11], key_hash=[0, 5], redelivery_count=[0, 2]
        )
        yield dispatch_pb2.SubscribeResponse(messages=batch)
        yield done(take(requests, "acknowledge"), epoch=4, ignored=1)
        hold(requests)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub", permits=100) as subscription:
        received = receive(subscription)
        assert received.ledger_id.tolist() == [7, 7]
        assert received.entry_id.tolist() == [1, 2]
        assert received.deliver_at_ms.tolist() == [10, 11]
        assert received.key_hash is not None
        assert received.key_hash.tolist() == [0, 5]
        assert received.redelivery_count.tolist() == [0, 2]
        assert received.epoch == subscription.epoch == 4
        assert received.lateness_ms.tolist() == [received.received_at_ms - 10, received.received_at_ms - 11]
        assert subscription.held == 2
        assert subscription.ack(received).result(WAIT_S) == 1
        assert subscription.held == 0
    (requests,) = daemon.requests(METHOD)
    opening = requests.taken[0].open
    assert (opening.topic, opening.subscription, opening.type) == (
        "topic",
        "sub",
        dispatch_pb2.SUBSCRIPTION_TYPE_SHARED,
    )
    acknowledged = next(request.acknowledge for request in requests.taken if request.HasField("acknowledge"))
    assert list(acknowledged.ledger_id) == [7, 7]
    assert list(acknowledged.entry_id) == [1, 2]
    assert list(acknowledged.deliver_at_ms) == [10, 11]


def test_columns_that_are_empty_on_the_wire_are_none_or_zero(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, one_batch(range(3)))
    with client.subscribe("topic", "sub") as subscription:
        received = receive(subscription)
        assert received.key_hash is None
        assert received.redelivery_count.tolist() == [0, 0, 0]
        subscription.ack(received)


def test_a_subscription_that_does_not_exist_is_told_when_it_is_opened(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.NOT_FOUND, "no subscription 'sub'"))
    with pytest.raises(tarry.NotFound, match="no subscription 'sub'"):
        client.subscribe("topic", "sub")


def test_it_is_created_when_asked(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script("CreateSubscription", answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=1)))
    daemon.script(METHOD, one_batch(range(1)))
    with client.subscribe("topic", "sub", create=True) as subscription:
        subscription.ack(receive(subscription))
    assert [name for name, _ in daemon.calls] == ["CreateSubscription", METHOD]


def test_opening_is_tried_until_the_deadline(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, refuse(grpc.StatusCode.UNAVAILABLE, "standing by"))
    with pytest.raises(tarry.DeadlineExceeded, match="standing by"):
        client.subscribe("topic", "sub", timeout_s=0.1)
    assert daemon.count(METHOD) > 1


def test_permits_come_back_when_a_batch_is_acknowledged_or_released(daemon: FakeDaemon, client: tarry.Client) -> None:
    """permits 8: 8 are granted, 8 received; 4 acknowledged and 4 released give 4 and 4 back."""
    granted = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        granted.open(take(requests, "flow").flow.permits)
        yield messages(range(4))
        yield messages(range(4, 8))
        for request in requests:
            if request.HasField("flow"):
                granted.open(request.flow.permits)
            else:
                yield done(request)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub", permits=8) as subscription:
        assert granted.wait() == 8
        first, second = receive(subscription), receive(subscription)
        subscription.ack(first)
        assert granted.wait() == 4
        subscription.release(second)
        assert granted.wait() == 4
        subscription.release(second)
        assert subscription.held == 0


def test_permits_are_granted_again_in_portions(daemon: FakeDaemon, client: tarry.Client) -> None:
    """permits 100, 50 received one by one: a grant of fewer than 25 waits, as long as the daemon has some left."""
    granted = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        granted.open(take(requests, "flow").flow.permits)
        for entry in range(50):
            yield messages([entry])
        for request in requests:
            if request.HasField("flow"):
                granted.open(request.flow.permits)
            else:
                yield done(request)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub", permits=100) as subscription:
        for _ in range(50):
            subscription.ack(receive(subscription))
        assert [granted.wait(), granted.wait(), granted.wait()] == [100, 25, 25]


def test_no_permits_are_granted_while_too_much_waits_to_be_durable(daemon: FakeDaemon, client: tarry.Client) -> None:
    """permits 2: after 16 unconfirmed positions no grant, until some are durable."""
    confirm = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        waiting = []
        for first in range(0, 16, 2):
            take(requests, "flow")
            yield messages([first, first + 1])
            waiting.append(take(requests, "acknowledge"))
        confirm.wait()
        for request in waiting:
            yield done(request)
        take(requests, "flow")
        yield messages([100])
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub", permits=2) as subscription:
        for _ in range(8):
            subscription.ack(receive(subscription))
        assert subscription.receive(0.05) is None
        confirm.open()
        last = receive(subscription)
        assert last.entry_id.tolist() == [100]
        subscription.ack(last)


def test_after_a_break_it_declares_what_it_holds_and_acknowledges_again(
    daemon: FakeDaemon, client: tarry.Client
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
    with client.subscribe("topic", "sub", permits=10) as subscription:
        received = receive(subscription)
        assert subscription.ack(received.take([0, 1])).result(WAIT_S) == 0
        subscription.release(received.take([2]))
        unanswered = subscription.ack(received.take([3]))
        opening, repeated, flow = again.wait(), again.wait(), again.wait()
        assert held_of(opening) == [(7, 4, 1004), (7, 5, 1005), (7, 3, 1003)]
        assert list(repeated.acknowledge.entry_id) == [3]
        assert flow.flow.permits == 8
        assert unanswered.result(WAIT_S) == 1
        assert subscription.streams_opened == 2
        assert subscription.ack(received.take([4, 5])).result(WAIT_S) == 0


def test_batches_that_wait_to_be_taken_are_held_too(daemon: FakeDaemon, client: tarry.Client) -> None:
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
    with client.subscribe("topic", "sub") as subscription:
        sent.open()
        assert held_of(again.wait()) == [(7, 0, 1000), (7, 1, 1001)]
        assert subscription.ack(receive(subscription)).result(WAIT_S) == 0


def test_acknowledging_while_no_stream_is_open_is_sent_on_the_next(daemon: FakeDaemon, client: tarry.Client) -> None:
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
    with client.subscribe("topic", "sub") as subscription:
        received = receive(subscription)
        broken.wait()
        confirmed = subscription.ack(received)
        go_on.open()
        assert confirmed.result(WAIT_S) == 0


def test_an_acknowledgement_without_answer_is_sent_once_and_forgotten(daemon: FakeDaemon, client: tarry.Client) -> None:
    arrived = Gate()

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        arrived.open(take(requests, "acknowledge"))
        hold(requests)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub") as subscription:
        subscription.ack_unconfirmed(receive(subscription))
        request = arrived.wait()
        assert request.acknowledge.request_id == 0
        assert list(request.acknowledge.entry_id) == [0, 1]
        assert subscription.held == 0


def test_columns_can_be_acknowledged_without_their_batch(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, one_batch(range(4)))
    with client.subscribe("topic", "sub") as subscription:
        receive(subscription)
        assert subscription.ack((7, [1, 2], [1001, 1002])).result(WAIT_S) == 0
        assert subscription.held == 2
        assert subscription.ack(([7, 7], [0, 3], [1000, 1003])).result(WAIT_S) == 0
        assert subscription.held == 0


def test_a_former_owner_s_messages_and_answers_are_dropped(daemon: FakeDaemon, client: tarry.Client) -> None:
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
    with client.subscribe("topic", "sub", permits=1) as subscription:
        received = receive(subscription)
        assert received.entry_id.tolist() == [2]
        assert subscription.ack(received).result(WAIT_S) == 0


def test_a_former_owner_that_opens_is_left(daemon: FakeDaemon, client: tarry.Client) -> None:
    def former(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch=2)
        hold(requests)

    last = one_batch(range(1, 2), epoch=4)
    daemon.script(METHOD, one_batch(range(1), epoch=3, break_with=grpc.StatusCode.UNAVAILABLE), former, former, last)
    with client.subscribe("topic", "sub") as subscription:
        first = subscription.ack(receive(subscription))
        second = receive(subscription)
        assert (second.epoch, second.entry_id.tolist()) == (4, [1])
        assert first.result(WAIT_S) == 0
        assert subscription.streams_opened == 2
        subscription.ack(second)


@pytest.mark.parametrize("by_status", [False, True])
def test_it_follows_the_topic_to_its_owner(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.Client, by_status: bool
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
    with client.subscribe("topic", "sub") as subscription:
        confirmed = subscription.ack(receive(subscription))
        received = receive(subscription)
        assert (received.epoch, received.entry_id.tolist()) == (2, [2])
        assert confirmed.result(WAIT_S) == 0
        subscription.ack(received)
    assert (daemon.count(METHOD), other_daemon.count(METHOD)) == (1, 1)
    opening = other_daemon.requests(METHOD)[0].taken[0]
    assert held_of(opening) == [(7, 0, 1000), (7, 1, 1001)]


def test_a_move_to_an_unknown_owner_is_asked_of_the_target_again(daemon: FakeDaemon, client: tarry.Client) -> None:
    def moving(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield moved("")

    daemon.script(METHOD, moving, one_batch(range(1)))
    with client.subscribe("topic", "sub") as subscription:
        subscription.ack(receive(subscription))
    assert daemon.count(METHOD) == 2


def test_a_passing_refusal_of_an_acknowledgement_is_sent_again(daemon: FakeDaemon, client: tarry.Client) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(1))
        for code in (code_pb2.UNAVAILABLE, code_pb2.UNKNOWN):
            request = take(requests, "acknowledge")
            refusal = dispatch_pb2.Done(request_id=request.acknowledge.request_id, epoch=1, error=status(code))
            yield dispatch_pb2.SubscribeResponse(done=refusal)
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub") as subscription:
        assert subscription.ack(receive(subscription)).result(WAIT_S) == 0
    assert daemon.count(METHOD) == 1


def test_a_lasting_refusal_of_an_acknowledgement_is_told_and_the_stream_goes_on(
    daemon: FakeDaemon, client: tarry.Client
) -> None:
    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(1))
        request = take(requests, "acknowledge")
        refusal = status(code_pb2.INVALID_ARGUMENT, "too many rows")
        yield dispatch_pb2.SubscribeResponse(
            done=dispatch_pb2.Done(request_id=request.acknowledge.request_id, epoch=1, error=refusal)
        )
        yield messages(range(1, 2))
        yield from confirm_all(requests)

    daemon.script(METHOD, step)
    with client.subscribe("topic", "sub") as subscription:
        with pytest.raises(tarry.InvalidArgument, match="too many rows"):
            subscription.ack(receive(subscription)).result(WAIT_S)
        assert subscription.ack(receive(subscription)).result(WAIT_S) == 0


def test_a_lasting_failure_ends_the_iteration_after_what_was_received(daemon: FakeDaemon, client: tarry.Client) -> None:
    def deleted(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(2))
        context.abort(grpc.StatusCode.NOT_FOUND, "the subscription was deleted")

    daemon.script(METHOD, deleted)
    subscription = client.subscribe("topic", "sub")
    seen: list[list[int]] = []
    with pytest.raises(tarry.NotFound, match="was deleted"):
        seen.extend(batch.entry_id.tolist() for batch in subscription)
    assert seen == [[0, 1]]
    with pytest.raises(tarry.NotFound):
        subscription.ack((7, 0, 1000))
    subscription.close()


def test_closing_ends_the_iteration_and_fails_what_is_not_durable(daemon: FakeDaemon, client: tarry.Client) -> None:
    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        take(requests, "flow")
        yield messages(range(1))
        hold(requests)

    daemon.script(METHOD, silent)
    subscription = client.subscribe("topic", "sub")
    confirmed = subscription.ack(receive(subscription))
    ended = Gate()
    threading.Thread(target=lambda: ended.open(list(subscription)), daemon=True).start()
    subscription.close()
    subscription.close()
    assert ended.wait() == []
    assert isinstance(confirmed.exception(WAIT_S), tarry.Closed)
    with pytest.raises(tarry.Closed):
        subscription.ack((7, 0, 1000))


def test_leaving_waits_until_acknowledgements_are_durable(daemon: FakeDaemon, client: tarry.Client) -> None:
    daemon.script(METHOD, one_batch(range(3), break_with=grpc.StatusCode.UNAVAILABLE), one_batch(range(3, 4)))
    with client.subscribe("topic", "sub") as subscription:
        confirmed = subscription.ack(receive(subscription))
    assert confirmed.result(0) == 0


def test_a_flush_that_takes_too_long_is_told(daemon: FakeDaemon, client: tarry.Client) -> None:
    def silent(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened()
        hold(requests)

    daemon.script(METHOD, silent)
    subscription = client.subscribe("topic", "sub")
    subscription.ack((7, [1], [1001]))
    with pytest.raises(tarry.DeadlineExceeded, match="1 acknowledgements are not durable"):
        subscription.flush(0.05)
    subscription.close()


@pytest.mark.parametrize("permits", [0, 2**32])
def test_permits_that_cannot_be_granted_are_refused(client: tarry.Client, permits: int) -> None:
    with pytest.raises(tarry.InvalidArgument, match=f"permits is {permits}; it must be from 1 to 4294967295"):
        client.subscribe("topic", "sub", permits=permits)


def test_many_breaks_lose_nothing(daemon: FakeDaemon, client: tarry.Client) -> None:
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
    with client.subscribe("topic", "sub") as subscription:
        while len(seen) < 30:
            received = receive(subscription)
            seen += received.entry_id.tolist()
            confirmed.append(subscription.ack(received))
    assert seen == list(range(30))
    assert [future.result(0) for future in confirmed] == [0] * 10
