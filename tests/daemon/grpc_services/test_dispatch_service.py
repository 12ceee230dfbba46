"""Subscriptions, and the stream on which due positions come out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from daemon import config, errors
from daemon.grpc_services import row_answers, subscribe
from daemon.grpc_services.receiving import Receiving
from daemon.owner.engine import Engine
from storage_backends.formats.manifest import SubscriptionPolicy
from storage_backends.memory_store import MemoryStore
from tarry.v1 import delayed_delivery_pb2, policy_pb2
from tarry.v1 import dispatch_pb2 as pb
from tests.daemon.grpc_services._support.lanes import by_lane
from tests.daemon.grpc_services._support.shown_rows import lose_bucket
from tests.daemon.grpc_services._support.watched_calls import until
from tests.daemon.grpc_services.conftest import Edge, Stream, by_stream, serving

SHARED = pb.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
FAR_MS = 2_000_000_000_000


@pytest.fixture(params=[by_stream, by_lane], ids=["stream", "lane"])
async def edge(engine: Engine, settings: config.Config, request: pytest.FixtureRequest) -> AsyncIterator[Edge]:
    async with serving(engine, settings) as served:
        yield dataclasses.replace(served, subscribe=request.param)


async def add(edge: Edge, *positions: tuple[int, int, int], key_hash: tuple[int, ...] = ()) -> None:
    """(deliver_at_ms, ledger_id, entry_id)"""
    due, ledgers, entries = zip(*positions, strict=True)
    request = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=ledgers, entry_id=entries, deliver_at_ms=due, key_hash=key_hash
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", request)


async def opened(edge: Edge, *, permits: int = 0, **held: Any) -> tuple[Stream, pb.Opened]:
    await edge.caller.unary("Dispatch/CreateSubscription", pb.CreateSubscriptionRequest(topic="t", subscription="s"))
    stream = edge.subscribe(edge.caller)
    opening = pb.Open(topic="t", subscription="s", type=SHARED, **held)
    await stream.send(pb.SubscribeRequest(open=opening))
    answer = (await stream.receive()).opened
    if permits:
        await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=permits)))
    return stream, answer


def acknowledge(request_id: int, *positions: tuple[int, int, int]) -> pb.SubscribeRequest:
    due, ledgers, entries = zip(*positions, strict=True)
    return pb.SubscribeRequest(
        acknowledge=pb.Acknowledge(request_id=request_id, ledger_id=ledgers, entry_id=entries, deliver_at_ms=due)
    )


def positions(messages: pb.Messages) -> list[tuple[int, int, int]]:
    return list(zip(messages.deliver_at_ms, messages.ledger_id, messages.entry_id, strict=True))


async def test_a_subscription_is_created_once_and_deleted(edge: Edge) -> None:
    create = pb.CreateSubscriptionRequest(topic="t", subscription="s")
    first = await edge.caller.unary("Dispatch/CreateSubscription", create)
    again = await edge.caller.unary("Dispatch/CreateSubscription", create)
    assert (first.created, first.since_ms, again.created) == (True, 0, False)
    assert first.subscription_id == again.subscription_id
    await edge.caller.unary("Dispatch/DeleteSubscription", pb.DeleteSubscriptionRequest(topic="t", subscription="s"))
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await edge.caller.unary(
            "Dispatch/DeleteSubscription", pb.DeleteSubscriptionRequest(topic="t", subscription="s")
        )
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_due_rows_come_in_order_with_epoch_and_hash_and_never_beyond_the_permits(edge: Edge) -> None:
    await add(edge, (3, 1, 1), (1, 2, 9), (2, 1, 7), (FAR_MS, 1, 8), key_hash=(30, 10, 20, 40))
    stream, answer = await opened(edge, permits=2)
    assert answer.epoch == edge.topics["t"].epoch > 0
    messages = (await stream.receive()).messages
    assert positions(messages) == [(1, 2, 9), (2, 1, 7)]
    assert (list(messages.key_hash), messages.epoch) == ([10, 20], answer.epoch)
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=5)))
    assert positions((await stream.receive()).messages) == [(3, 1, 1)]


async def test_rows_without_hash_have_no_hash_column(edge: Edge) -> None:
    await add(edge, (1, 1, 1))
    stream, _ = await opened(edge, permits=1)
    assert list((await stream.receive()).messages.key_hash) == []


async def test_one_messages_has_ten_thousand_rows_at_most(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine delivers at least 500 rows at once."""
    assert row_answers.MESSAGES_ROWS_MAX == 10_000
    monkeypatch.setattr(row_answers, "MESSAGES_ROWS_MAX", 300)
    await add(edge, *((1, 1, entry) for entry in range(1_000)))
    stream, _ = await opened(edge, permits=20_000)
    sizes: list[int] = []
    entries: list[int] = []
    while len(entries) < 1_000:
        messages = (await stream.receive()).messages
        sizes.append(len(messages.entry_id))
        entries += messages.entry_id
    assert max(sizes) == 300
    assert entries == list(range(1_000))


async def test_an_acknowledgement_is_done_when_durable_and_tells_what_it_ignored(edge: Edge) -> None:
    await add(edge, (1, 1, 1), (2, 1, 2))
    stream, answer = await opened(edge, permits=2)
    assert len((await stream.receive()).messages.entry_id) == 2
    # A position that is not in the backlog, and one with another time.
    await stream.send(acknowledge(11, (1, 1, 1), (1, 1, 99), (7, 1, 2)))
    done = (await stream.receive()).done
    assert (done.request_id, done.epoch, done.ignored, done.HasField("error")) == (11, answer.epoch, 2, False)


async def test_an_acknowledgement_with_id_zero_is_not_answered(edge: Edge) -> None:
    await add(edge, (1, 1, 1), (2, 1, 2))
    stream, _ = await opened(edge)
    await stream.send(acknowledge(0, (1, 1, 1)))
    await stream.send(acknowledge(5, (1, 1, 1)))
    done = (await stream.receive()).done
    assert (done.request_id, done.ignored) == (5, 1)


async def test_an_acknowledgement_that_fails_is_answered_in_band(edge: Edge) -> None:
    await add(edge, (1, 1, 1))
    stream, _ = await opened(edge)
    edge.calls.fail_with = errors.Unavailable("the store does not answer", retry_after_ms=500)
    await stream.send(acknowledge(3, (1, 1, 1)))
    done = (await stream.receive()).done
    assert (done.request_id, done.error.code) == (3, grpc.StatusCode.UNAVAILABLE.value[0])


async def test_held_positions_may_come_in_several_messages(edge: Edge) -> None:
    await edge.caller.unary("Dispatch/CreateSubscription", pb.CreateSubscriptionRequest(topic="t", subscription="s"))
    await add(edge, (1, 1, 1), (1, 1, 2), (1, 1, 3))
    stream = edge.subscribe(edge.caller)
    columns = {"topic": "t", "subscription": "s", "type": SHARED}
    for entries, more in (([1], True), ([77, 2], True), ([], True), ([3], False)):
        held = {
            "held_ledger_id": [1] * len(entries),
            "held_entry_id": entries,
            "held_deliver_at_ms": [1] * len(entries),
        }
        await stream.send(pb.SubscribeRequest(open=pb.Open(more_held=more, **columns, **held)))  # type: ignore[arg-type]
    opened = (await stream.receive()).opened
    assert (opened.held, list(opened.not_held)) == (3, [1])


async def test_what_continues_an_open_has_to_be_one(edge: Edge) -> None:
    await edge.caller.unary("Dispatch/CreateSubscription", pb.CreateSubscriptionRequest(topic="t", subscription="s"))
    stream = edge.subscribe(edge.caller)
    await stream.send(pb.SubscribeRequest(open=pb.Open(topic="t", subscription="s", type=SHARED, more_held=True)))
    await stream.send(pb.SubscribeRequest(flow=pb.Flow(permits=1)))
    with pytest.raises(grpc.aio.AioRpcError, match="open: after one with more_held comes flow; it must be open"):
        await stream.receive()


async def test_held_positions_are_in_flight_and_not_sent_again(edge: Edge) -> None:
    await add(edge, (1, 1, 1), (2, 1, 2))
    stream, answer = await opened(
        edge, permits=5, held_ledger_id=[1, 1], held_entry_id=[1, 77], held_deliver_at_ms=[1, 1]
    )
    assert answer.held == 1
    assert positions((await stream.receive()).messages) == [(2, 1, 2)]


async def test_a_half_closed_stream_gets_its_answers_and_nothing_new(edge: Edge) -> None:
    await add(edge, (1, 1, 1))
    stream, _ = await opened(edge)
    edge.calls.hold = asyncio.Event()
    await stream.send(acknowledge(8, (1, 1, 1)))
    await stream.done_sending()
    edge.calls.hold.set()
    assert (await stream.receive()).done.request_id == 8
    with pytest.raises(EOFError):
        await stream.receive()
    assert not edge.streams()


@pytest.mark.parametrize("how", ["cancel", "half-close", "connection"])
async def test_the_engine_s_stream_is_closed_however_the_call_ends(edge: Edge, how: str) -> None:
    await add(edge, (1, 1, 1))
    stream, _ = await opened(edge, permits=1)
    await stream.receive()
    assert edge.state().in_flight
    if how == "cancel":
        stream.call.cancel()
    elif how == "half-close":
        await stream.done_sending()
    else:
        await edge.caller.channel.close()
    await until(lambda: not edge.streams())
    assert not edge.state().in_flight


async def test_a_caller_that_goes_away_while_its_stream_opens_leaves_none_open(edge: Edge) -> None:
    await add(edge, (1, 1, 1))
    await edge.caller.unary("Dispatch/CreateSubscription", pb.CreateSubscriptionRequest(topic="t", subscription="s"))
    edge.calls.hold = asyncio.Event()
    begun = edge.calls.begun
    stream = edge.subscribe(edge.caller)
    await stream.send(pb.SubscribeRequest(open=pb.Open(topic="t", subscription="s", type=SHARED)))
    await until(lambda: edge.calls.begun > begun)
    stream.call.cancel()
    # The server has heard of the cancellation when a later call on the connection is answered.
    await edge.caller.unary("Inspect/ListTopics", b"")
    edge.calls.hold.set()
    await until(lambda: len(edge.calls.opened) == 1 and not edge.streams())


@pytest.mark.parametrize("where", ["open", "hand-out", "acknowledge"])
async def test_lost_ownership_is_told_by_moved_and_ends_the_stream(edge: Edge, where: str) -> None:
    await add(edge, (1, 1, 1))
    lost = errors.NotOwner("shard 3 moved", owner_address="10.0.0.2:7461")
    if where == "open":
        edge.calls.fail_with = lost
        stream = edge.subscribe(edge.caller)
        await stream.send(pb.SubscribeRequest(open=pb.Open(topic="t", subscription="s", type=SHARED)))
    else:
        stream, _ = await opened(edge)
        if where == "hand-out":
            edge.topics["t"].end_streams(lost)
        else:
            edge.calls.fail_with = lost
            await stream.send(acknowledge(1, (1, 1, 1)))
    assert (await stream.receive()).moved.owner_address == "10.0.0.2:7461"
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert dict(ended.value.trailing_metadata() or ())["owner-address"] == "10.0.0.2:7461"
    if where != "open":
        await until(lambda: not edge.streams())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotOwner("shard 3 moved", owner_address="10.0.0.2:7461"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Unavailable("the daemon stops"), grpc.StatusCode.UNAVAILABLE),
        (errors.NotFound("topic: 't' was deleted"), grpc.StatusCode.NOT_FOUND),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_what_is_known_of_acknowledgements_comes_before_the_end(
    edge: Edge, error: errors.TarryError, code: grpc.StatusCode
) -> None:
    """A drain ends streams when their acknowledgements are durable, in the same turn."""
    await add(edge, (1, 1, 1), (2, 1, 2))
    stream, _ = await opened(edge)
    edge.calls.hold = asyncio.Event()
    begun = edge.calls.begun
    await stream.send(acknowledge(1, (1, 1, 1)))
    await stream.send(acknowledge(2, (2, 1, 2)))
    await until(lambda: edge.calls.begun == begun + 2)
    edge.topics["t"].end_streams(error)
    edge.calls.hold.set()
    assert {(await stream.receive()).done.request_id for _ in range(2)} == {1, 2}
    if isinstance(error, errors.NotOwner):
        assert (await stream.receive()).moved.owner_address == "10.0.0.2:7461"
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is code


class _Caller:
    """A caller that takes its next answer when the test says so."""

    def __init__(self, receiving: Receiving) -> None:
        self.receiving = receiving
        self.requests: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.writing = False
        self.received: list[pb.SubscribeResponse] = []

    def send(self, **request: Any) -> None:
        self.requests.put_nowait(pb.SubscribeRequest(**request).SerializeToString())

    async def read(self) -> bytes:
        return await self.requests.get()

    async def write(self, message: bytes) -> None:
        self.writing = True
        await self.reads.wait()
        self.writing = False
        self.received.append(pb.SubscribeResponse.FromString(message))

    def check_topic(self, topic: str) -> None:
        """It may use all."""

    def tell_request(self, *_: object, **__: object) -> None:
        """Nothing is logged of it."""


@pytest.mark.parametrize("kind", [SHARED, pb.SubscriptionType.SUBSCRIPTION_TYPE_KEY_SHARED])
async def test_a_row_does_not_come_after_the_answer_to_its_acknowledgement(
    engine: Engine, settings: config.Config, kind: Any
) -> None:
    """It was delivered before, on a stream that broke, and is delivered again while an answer is being written."""
    async with serving(engine, settings) as edge:
        await add(edge, (1, 1, 1))
        broken, _ = await opened(edge, permits=1)
        await broken.receive()
        broken.call.cancel()
        await until(lambda: not edge.streams())
        caller, by_key = _Caller(Receiving(settings)), kind != SHARED
        running = asyncio.create_task(subscribe.serve(engine, settings, caller))
        consumers = [pb.Consumer(consumer_id=1, name="c")] if by_key else []
        caller.send(open=pb.Open(topic="t", subscription="s", type=kind, consumers=consumers))
        await until(lambda: len(caller.received) == 1)
        caller.reads.clear()
        caller.requests.put_nowait(acknowledge(1, (9, 9, 9)).SerializeToString())
        await until(lambda: caller.writing)
        caller.send(flow=pb.Flow(permits=1, consumer_id=1 if by_key else 0))
        await until(lambda: len(edge.state().in_flight) == 1)
        await settled()
        caller.requests.put_nowait(acknowledge(2, (1, 1, 1)).SerializeToString())
        await until(lambda: edge.state().backlog == 0)
        await settled()
        caller.reads.set()
        await until(lambda: len(caller.received) == 4)
        assert [each.WhichOneof("response") for each in caller.received] == ["opened", "done", "messages", "done"]
        assert [each.done.ignored for each in caller.received if each.HasField("done")] == [1, 0]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def settled() -> None:
    """What can go on without the caller has."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_stream_names_the_ranges_that_need_a_rebuild_when_it_opens(edge: Edge, store: MemoryStore) -> None:
    expected = await lose_bucket(edge, store)
    _, answer = await opened(edge)
    assert list(answer.rebuild_needed) == [expected]


async def test_a_subscription_has_the_policy_that_it_was_created_with_until_it_gets_another(edge: Edge) -> None:
    policy = policy_pb2.SubscriptionPolicy(in_flight_rows_max=3, properties={"owner": "billing"})
    create = pb.CreateSubscriptionRequest(topic="t", subscription="s", policy=policy)
    assert (await edge.caller.unary("Dispatch/CreateSubscription", create)).created
    assert not (await edge.caller.unary("Dispatch/CreateSubscription", create)).created
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary(
            "Dispatch/CreateSubscription", pb.CreateSubscriptionRequest(topic="t", subscription="s")
        )
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    other = policy_pb2.SubscriptionPolicy(lease_ms=5)
    update = pb.UpdateSubscriptionRequest(topic="t", subscription="s", policy=other)
    assert (await edge.caller.unary("Dispatch/UpdateSubscription", update)).policy == other
    assert edge.state().stored.policy == SubscriptionPolicy(lease_ms=5)


async def test_a_failure_of_the_hand_out_ends_the_stream_with_its_status(edge: Edge) -> None:
    await add(edge, (1, 1, 1))
    stream, _ = await opened(edge)
    edge.topics["t"].end_streams(errors.Unavailable("the daemon stops"))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ended.value.details() == "the daemon stops"


async def test_a_row_comes_when_it_is_due_and_not_before(edge: Edge) -> None:
    due_ms = time.time_ns() // 1_000_000 + 150
    stream, _ = await opened(edge, permits=1)
    await add(edge, (due_ms, 1, 1))
    await stream.receive()
    assert time.time_ns() // 1_000_000 >= due_ms


async def test_a_bug_of_the_daemon_is_internal_and_logged(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    await add(edge, (1, 1, 1))
    stream, _ = await opened(edge)
    edge.topics["t"].end_streams(errors.InvariantViolated("a row is waiting twice"))
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is grpc.StatusCode.INTERNAL
    assert "request failed by a bug of the daemon" in caplog.text
