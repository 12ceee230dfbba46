"""Many subscriptions on one stream: what lanes do to each other, and what they do not."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from daemon import config, errors
from daemon.grpc_services import parsing, subscribe, subscribe_many
from daemon.grpc_services.receiving import Receiving
from daemon.grpc_services.subscribe_many import SubscribeManyStream
from daemon.owner.engine import Engine
from tarry.v1 import delayed_delivery_pb2
from tarry.v1 import dispatch_pb2 as pb
from tests.daemon.grpc_services._support.lanes import Lane, Lanes
from tests.daemon.grpc_services._support.watched_calls import until
from tests.daemon.grpc_services.conftest import Edge, serving
from tests.daemon.grpc_services.test_dispatch_service import SHARED, acknowledge


def opening(topic: str) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(open=pb.Open(topic=topic, subscription="s", type=SHARED))


def flow(permits: int) -> pb.SubscribeRequest:
    return pb.SubscribeRequest(flow=pb.Flow(permits=permits))


async def add(edge: Edge, topic: str, *entries: int) -> None:
    """Entry n is due at 1 + n."""
    due = [1 + entry for entry in entries]
    request = delayed_delivery_pb2.AddMessagesRequest(topic=topic, ledger_id=[1], entry_id=entries, deliver_at_ms=due)
    await edge.caller.unary("DelayedDelivery/AddMessages", request)


async def created(edge: Edge, *topics: str) -> Lanes:
    """A stream without a lane; topics with a subscription each."""
    for topic in topics:
        request = pb.CreateSubscriptionRequest(topic=topic, subscription="s")
        await edge.caller.unary("Dispatch/CreateSubscription", request)
    return Lanes(edge.caller)


async def opened(lanes: Lanes, topic: str, *, permits: int = 0) -> Lane:
    lane = lanes.lane()
    await lane.send(opening(topic))
    assert (await lane.receive()).opened.epoch > 0
    if permits:
        await lane.send(flow(permits))
    return lane


async def entries_of(lane: Lane) -> list[int]:
    return list((await lane.receive()).messages.entry_id)


async def ended(lane: Lane) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await lane.receive()
    return failure.value


async def test_each_lane_has_permits_and_answers_of_its_own(edge: Edge) -> None:
    lanes = await created(edge, "one", "two")
    one, two = await opened(lanes, "one", permits=1), await opened(lanes, "two")
    for topic in ("one", "two"):
        await add(edge, topic, 0, 1)
    assert await entries_of(one) == [0]
    await one.send(acknowledge(7, (1, 1, 0)))
    assert (await one.receive()).done.request_id == 7
    await two.send(flow(5))
    assert await entries_of(two) == [0, 1]
    await two.send(acknowledge(7, (1, 1, 0)))
    assert (await two.receive()).done.request_id == 7


async def test_one_message_may_hold_requests_of_many_lanes_and_all_that_a_lane_begins_with(edge: Edge) -> None:
    lanes = await created(edge, "one", "two")
    for topic in ("one", "two"):
        await add(edge, topic, 0)
    begins = {5: "one", 3: "two"}
    await lanes.send(
        *(
            pb.LaneRequest(lane=lane, request=request)
            for lane, topic in begins.items()
            for request in (opening(topic), flow(1))
        )
    )
    for lane in begins:
        assert (await lanes.next_of(lane)).response.HasField("opened")
        assert list((await lanes.next_of(lane)).response.messages.entry_id) == [0]


class Reads:
    """A call of which one message is read, and no other comes."""

    def __init__(self, data: bytes) -> None:
        self._data = [data]
        self.check_topic = lambda topic: None

    async def read(self) -> bytes:
        return self._data.pop() if self._data else await asyncio.get_running_loop().create_future()


async def test_others_have_their_turn_while_many_lanes_are_given_what_one_message_has_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = 5 * subscribe_many.LANES_A_TURN
    message = pb.SubscribeManyRequest(requests=[pb.LaneRequest(lane=1 + lane) for lane in range(lanes)])
    taken: list[int] = []
    monkeypatch.setattr(SubscribeManyStream, "_take", lambda self, given: taken.append(given.lane))
    context = Reads(message.SerializeToString())
    settings = config.load(environment={}, overrides=[])
    stream = SubscribeManyStream(cast(Any, None), settings, cast(Any, context), asyncio.Event())
    reading = asyncio.create_task(stream._read())
    turns = 0
    while len(taken) < lanes:
        await asyncio.sleep(0)
        turns += 1
    reading.cancel()
    assert taken == list(range(1, lanes + 1))
    assert turns >= 5


async def test_a_lane_that_is_refused_moves_or_leaves_disturbs_no_other(edge: Edge) -> None:
    lanes = await created(edge, "stays", "moves", "leaves")
    stays, moves, leaves = [await opened(lanes, each, permits=9) for each in ("stays", "moves", "leaves")]
    for request, code in (
        (opening("nobody's"), grpc.StatusCode.NOT_FOUND),
        (flow(1), grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        refused = lanes.lane()
        await refused.send(request)
        assert (await ended(refused)).code() is code
        await refused.send(flow(1))
    edge.topics["moves"].end_streams(errors.NotOwner("shard 3 moved", owner_address="10.0.0.2:7461"))
    assert (await moves.receive()).moved.owner_address == "10.0.0.2:7461"
    failure = await ended(moves)
    assert failure.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert dict(failure.trailing_metadata() or ())["owner-address"] == "10.0.0.2:7461"
    await leaves.done_sending()
    with pytest.raises(EOFError):
        await leaves.receive()
    assert not edge.streams("leaves")
    await add(edge, "stays", 0)
    assert await entries_of(stays) == [0]


async def test_a_lane_that_waits_for_its_answers_or_to_be_opened_holds_no_other_up(edge: Edge) -> None:
    lanes = await created(edge, "waits", "goes on")
    waits, goes_on = await opened(lanes, "waits"), await opened(lanes, "goes on", permits=1)
    edge.calls.hold = held = asyncio.Event()
    begun = edge.calls.begun
    late = lanes.lane()
    await late.send(opening("waits"))
    # More than a stream may have unanswered: what is behind them waits in its lane.
    for request_id in range(1, 301):
        await waits.send(acknowledge(request_id, (1, 1, 1)))
    await until(lambda: edge.calls.begun == begun + 257)
    edge.calls.hold = None
    await add(edge, "goes on", 0)
    assert await entries_of(goes_on) == [0]
    held.set()
    assert (await late.receive()).HasField("opened")
    assert {(await waits.receive()).done.request_id for _ in range(300)} == set(range(1, 301))


async def test_a_number_is_used_once_and_what_comes_for_a_lane_that_has_ended_is_ignored(edge: Edge) -> None:
    lanes = await created(edge, "t")
    lane = await opened(lanes, "t")
    await lane.done_sending()
    await lane.send(flow(1))
    with pytest.raises(EOFError):
        await lane.receive()
    await lane.send(opening("t"))
    other = await opened(lanes, "t", permits=1)
    await add(edge, "t", 0)
    assert await entries_of(other) == [0]
    assert len(edge.streams("t")) == 1


@pytest.mark.parametrize(
    "data",
    [
        pb.SubscribeManyRequest(requests=[pb.LaneRequest(request=opening("t"))]).SerializeToString(),
        b"\x0a\x05\x08",
        b"nothing of the kind",
    ],
    ids=["lane 0", "cut off", "no message"],
)
async def test_what_belongs_to_no_lane_ends_the_stream(edge: Edge, data: bytes) -> None:
    lanes = await created(edge, "t")
    await opened(lanes, "t")
    await lanes.stream.send(data)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await lanes.next_of(1)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: not edge.streams("t"))


@pytest.mark.parametrize("how", ["cancel", "half-close", "connection"])
async def test_the_end_of_the_stream_ends_every_lane(edge: Edge, how: str) -> None:
    topics = ("one", "two")
    lanes = await created(edge, *topics)
    for topic in topics:
        await add(edge, topic, 0)
        assert await entries_of(await opened(lanes, topic, permits=1)) == [0]
    assert all(edge.state(topic).in_flight for topic in topics)
    if how == "cancel":
        lanes.call.cancel()
    elif how == "half-close":
        await lanes.stream.done_sending()
        for lane in (1, 2):
            assert (await lanes.next_of(lane)).ended.code == 0
        with pytest.raises(EOFError):
            await lanes.stream.receive()
    else:
        await edge.caller.channel.close()
    await until(lambda: not any(edge.streams(topic) or edge.state(topic).in_flight for topic in topics))


async def test_one_lane_more_than_there_may_be_is_refused_and_a_place_that_is_free_is_taken(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert subscribe_many.LANES_MAX == 4_096
    monkeypatch.setattr(subscribe_many, "LANES_MAX", 3)
    lanes = await created(edge, "t")
    first, *_ = [await opened(lanes, "t") for _ in range(3)]
    fourth = lanes.lane()
    await fourth.send(opening("t"))
    failure = await ended(fourth)
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (failure.details(), dict(failure.trailing_metadata() or ())) == (
        "the stream has 3 lanes, the limit is 3; open another stream",
        {"retry-after-ms": "5000"},
    )
    await first.done_sending()
    with pytest.raises(EOFError):
        await first.receive()
    await opened(lanes, "t")


async def test_a_stream_of_lanes_ends_with_the_daemon_when_its_lanes_have(engine: Engine) -> None:
    patient = config.load(environment={}, overrides=["grpc.listen=127.0.0.1:0", "grpc.drain_s=300"])
    async with serving(engine, patient) as edge:
        await _drained(edge)


async def _drained(edge: Edge) -> None:
    lanes = await created(edge, "t")
    lane = await opened(lanes, "t")
    draining = asyncio.create_task(edge.server.drain())
    edge.topics["t"].end_streams(errors.Unavailable("the daemon stops"))
    assert (await ended(lane)).details() == "the daemon stops"
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await lanes.stream.receive()
    assert (failure.value.code(), failure.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the daemon is stopping; try again",
    )
    await draining


# What leaves together, and in whose turn.


class _Waiter:
    def __init__(self) -> None:
        self.notified = 0

    def notify(self) -> None:
        self.notified += 1


def answers(message: bytes) -> list[tuple[int, int]]:
    """Lane and bytes of each answer."""
    many = pb.SubscribeManyResponse.FromString(message).responses
    return [(each.lane, len(each.response.done.error.message)) for each in many]


def answer(lane: int, size_bytes: int) -> bytes:
    done = pb.Done()
    done.error.message = "x" * size_bytes
    return subscribe_many.lane_response(lane, pb.SubscribeResponse(done=done).SerializeToString())


def test_what_is_ready_is_one_message_and_that_of_a_lane_in_its_order() -> None:
    outbox = subscribe_many.LaneOutbox()
    for lane, size_bytes in ((1, 10), (2, 20), (1, 11)):
        outbox.put(lane, answer(lane, size_bytes))
    assert answers(outbox.take()) == [(1, 10), (1, 11), (2, 20)]
    assert not outbox


def test_a_lane_with_much_to_send_takes_its_turn() -> None:
    outbox = subscribe_many.LaneOutbox()
    for _ in range(3):
        outbox.put(1, answer(1, 200_000))
    for lane in (2, 3):
        outbox.put(lane, answer(lane, 10))
    assert answers(outbox.take()) == [(1, 200_000), (2, 10), (3, 10)]
    outbox.put(2, answer(2, 10))
    assert answers(outbox.take()) == [(1, 200_000), (2, 10)]
    assert answers(outbox.take()) == [(1, 200_000)]


def test_a_message_has_a_quarter_of_a_mebibyte_but_for_one_answer_that_is_larger() -> None:
    outbox = subscribe_many.LaneOutbox()
    outbox.put(1, answer(1, 300_000))
    for _ in range(40):
        outbox.put(2, answer(2, 10_000))
    sizes = []
    while outbox:
        message = outbox.take()
        sizes.append(len(message))
    assert sizes[0] > 300_000
    assert len(sizes) == 3
    assert max(sizes[1:]) <= subscribe_many.MESSAGE_BYTES


def test_nothing_more_is_taken_while_too_much_is_not_sent_and_who_waits_is_told() -> None:
    outbox, waiters = subscribe_many.LaneOutbox(), [_Waiter() for _ in range(20)]
    for lane in range(1, 6):
        assert outbox.takes(lane, waiters[0])
        outbox.put(lane, answer(lane, 250_000))
    assert not any(outbox.takes(lane, waiter) for lane, waiter in enumerate(waiters, 10))
    outbox.take()
    assert sum(each.notified for each in waiters) == 8, "what has become free is soon filled"
    assert outbox.takes(9, waiters[0])
    while outbox:
        outbox.take()
    assert [each.notified for each in waiters] == [1] * 20


def test_one_lane_is_bounded_while_others_have_room() -> None:
    outbox, waiter = subscribe_many.LaneOutbox(), _Waiter()
    outbox.put(1, answer(1, 300_000))
    assert (outbox.takes(1, waiter), outbox.takes(2, waiter)) == (False, True)
    outbox.take()
    assert (waiter.notified, outbox.takes(1, waiter)) == (1, True)


class _Caller:
    """A caller that reads nothing until the test says so."""

    def __init__(self, receiving: Receiving) -> None:
        self.receiving = receiving
        self.requests: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.received: list[pb.LaneResponse] = []

    def send(self, *requests: pb.LaneRequest) -> None:
        self.requests.put_nowait(pb.SubscribeManyRequest(requests=requests).SerializeToString())

    async def read(self) -> bytes:
        return await self.requests.get()

    async def write(self, message: bytes) -> None:
        await self.reads.wait()
        self.received += pb.SubscribeManyResponse.FromString(message).responses

    def check_topic(self, topic: str) -> None:
        """It may use all."""

    def tell_request(self, *_: object, **__: object) -> None:
        """Nothing is logged of it."""


def rows_by_lane(caller: _Caller) -> collections.Counter[int]:
    counts: collections.Counter[int] = collections.Counter()
    for each in caller.received:
        counts[each.lane] += len(each.response.messages.entry_id)
    return counts


async def test_who_does_not_read_is_handed_out_what_is_on_its_way_and_no_more(
    edge: Edge, settings: config.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty lanes with permits for everything that is due: the rows stay READY for others."""
    monkeypatch.setattr(subscribe_many, "UNSENT_BYTES_MAX", 10_000)
    topics = {lane: f"t{lane}" for lane in range(1, 21)}
    await created(edge, *topics.values())
    for topic in topics.values():
        await add(edge, topic, *range(1_000))
    caller = _Caller(Receiving(settings))
    stream = subscribe_many.SubscribeManyStream(edge.engine, settings, cast(Any, caller), asyncio.Event())
    running = asyncio.create_task(stream.run())
    caller.reads.set()
    caller.send(*(pb.LaneRequest(lane=lane, request=opening(topic)) for lane, topic in topics.items()))
    await until(lambda: len(caller.received) == 20)
    caller.reads.clear()
    caller.send(*(pb.LaneRequest(lane=lane, request=flow(1_000)) for lane in topics))

    def handed_out() -> int:
        return sum(len(edge.state(topic).in_flight) for topic in topics.values())

    await until(lambda: handed_out() >= 1_000)
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert handed_out() <= 2_000, "one message is being written, and one waits"
    caller.reads.set()
    await until(lambda: handed_out() == 20_000)
    await until(lambda: rows_by_lane(caller).total() == 20_000)
    assert rows_by_lane(caller) == dict.fromkeys(topics, 1_000)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert not any(edge.streams(topic) for topic in topics.values())


@contextlib.asynccontextmanager
async def unread(settings: config.Config, receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A stream with 300 kB for a lane that reads nothing, as far as they are received."""

    async def reads_nothing(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(subscribe, "serve", reads_nothing)
    caller = _Caller(receiving)
    stream = subscribe_many.SubscribeManyStream(cast(Any, None), settings, cast(Any, caller), asyncio.Event())
    running = asyncio.create_task(stream.run())
    for _ in range(3):
        caller.send(pb.LaneRequest(lane=1, request=pb.SubscribeRequest(open=pb.Open(topic="x" * 100_000))))
    for _ in range(100):
        await asyncio.sleep(0)
    yield
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_lanes_that_read_nothing_keep_no_other_call_from_being_received(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config.load(environment={}, overrides=["grpc.received_bytes_max=1048576"])
    receiving = Receiving(small)
    async with unread(small, receiving, monkeypatch), unread(small, receiving, monkeypatch):
        await asyncio.wait_for(receiving.room(), 1)


async def test_a_stream_that_ends_gives_back_what_its_lanes_have_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config.load(environment={}, overrides=["grpc.received_bytes_max=1048576"])
    receiving = Receiving(small)
    for _ in range(10):
        async with unread(small, receiving, monkeypatch):
            pass
    await asyncio.wait_for(receiving.room(), 1)
    assert not receiving.queues_are_full


# The bytes.


@pytest.mark.parametrize(
    "given",
    [
        pb.LaneRequest(lane=1, request=flow(3)),
        pb.LaneRequest(lane=2**32 - 1, request=flow(3), close=True),
        pb.LaneRequest(lane=300, close=True),
        pb.LaneRequest(request=pb.SubscribeRequest()),
    ],
    ids=["request", "last", "close", "empty"],
)
def test_requests_are_read_from_their_bytes_as_the_contract_writes_them(given: pb.LaneRequest) -> None:
    expected = subscribe_many.LaneRequest(
        given.lane, given.request.SerializeToString() if given.HasField("request") else None, given.close
    )
    message = pb.SubscribeManyRequest(requests=[given, given])
    read = subscribe_many.lane_requests(message.SerializeToString(), parsing.Bounds(1_000, 1_000))
    assert read == [expected, expected]
    # A field that is there twice, which the runtime merges.
    twice = given.SerializeToString() * 2
    unusual = b"\x0a" + bytes([len(twice)]) + twice
    (merged,) = subscribe_many.lane_requests(unusual, parsing.Bounds(1_000, 1_000))
    assert (merged.lane, merged.close) == (given.lane, given.close)
