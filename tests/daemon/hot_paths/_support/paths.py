"""The hot paths: what a daemon does for each request and each tick, from the bytes of a request to those of its answer.

Owns: the requests of each path, and from when to when it is counted. Each is gone once before it is counted, so that
what is done once only counts for nothing. Does not own: the counting (`counted_calls`), the daemon (`served_in_bytes`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from daemon.core.key_shared.hash_slots import HASH_SLOTS
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2
from tests._support.engine_fixture import EngineFixture
from tests.daemon.hot_paths._support.counted_calls import Counter, Counts
from tests.daemon.hot_paths._support.served_in_bytes import Call, Served

TOPIC, SUBSCRIPTION = "t", "s"
BATCH, IN_FLIGHT, CALLERS, TOPICS = 1_000, 16, 64, 20
KEYS, CONSUMERS = 100, 20
DELAY_MS, FAR_MS = 1_000, 3_600_000
# From then on it is counted: nothing is due yet, and what was added has come to rest.
BEFORE_MS = 2

_ledgers = itertools.count(1)


async def batches_added(served: Served) -> Counts:
    """One stream, one topic: 16 requests of 1,000 rows each in flight; a request."""
    stream = served.open("StreamAddMessages")

    async def add() -> None:
        stream.send(*(_stream_add(number, _add(TOPIC, BATCH, FAR_MS, served)) for number in range(1, IN_FLIGHT + 1)))
        for answer in await stream.answered(IN_FLIGHT):
            added = delayed_delivery_pb2.StreamAddMessagesResponse.FromString(answer).added
            assert added.accepted == BATCH

    return (await _counted(served, add)).over(IN_FLIGHT)


async def rows_added_one_by_one(served: Served) -> Counts:
    """64 callers at once, one topic, a row each; a call."""

    async def add() -> None:
        requests = [_add(TOPIC, 1, FAR_MS, served).SerializeToString() for _ in range(CALLERS)]
        await asyncio.gather(*(served.call("AddMessages", request) for request in requests))

    return (await _counted(served, add)).over(CALLERS)


async def batch_handed_out(served: Served) -> Counts:
    """1,000 rows of one topic that come due together; all of them."""
    stream = await _subscribed(served, TOPIC)

    async def add() -> None:
        await served.call("AddMessages", _add(TOPIC, BATCH, DELAY_MS, served).SerializeToString())

    async def hand_out() -> None:
        await _messages(stream, BATCH)

    return await _counted(served, hand_out, first=lambda: _due(served, add))


async def batch_handed_out_by_key(served: Served) -> Counts:
    """1,000 rows of one topic with 100 keys that come due together, for 20 consumers of one stream; all of them."""
    stream = await _subscribed_by_key(served, TOPIC)

    async def add() -> None:
        request = _add(TOPIC, BATCH, DELAY_MS, served)
        request.key_hash.extend(1 + row % KEYS * (HASH_SLOTS // KEYS) for row in range(BATCH))
        await served.call("AddMessages", request.SerializeToString())

    async def hand_out() -> None:
        messages = _joined(await _messages(stream, BATCH))
        assert set(messages.consumer_id) == {*range(1, CONSUMERS + 1)}

    return await _counted(served, hand_out, first=lambda: _due(served, add))


async def batch_acknowledged(served: Served) -> Counts:
    """One request that acknowledges 1,000 rows of one topic."""
    stream = await _subscribed(served, TOPIC)
    held: list[dispatch_pb2.Messages] = []

    async def receive() -> None:
        await served.call("AddMessages", _add(TOPIC, BATCH, DELAY_MS, served).SerializeToString())
        held[:] = [_joined(await _messages(stream, BATCH))]

    async def acknowledge() -> None:
        stream.send(_acknowledge(held[0]))
        await stream.answered(1)

    return await _counted(served, acknowledge, first=receive)


async def topics_in_one_tick(served: Served) -> Counts:
    """20 topics with a stream and a row each, due together; a topic."""
    streams = [await _subscribed(served, topic) for topic in _topics()]

    async def hand_out() -> None:
        for stream in streams:
            await _messages(stream, 1)

    return (await _counted(served, hand_out, first=lambda: _due(served, lambda: _add_to_all(served)))).over(TOPICS)


async def lanes_in_one_tick(served: Served) -> Counts:
    """20 topics with a row each, due together, and a lane each of one stream; a topic."""
    stream = await _subscribed_together(served, _topics())

    async def hand_out() -> None:
        await _lane_messages(stream, TOPICS)

    return (await _counted(served, hand_out, first=lambda: _due(served, lambda: _add_to_all(served)))).over(TOPICS)


async def one_topic_in_a_tick(served: Served) -> Counts:
    """One of 20 topics with a stream each has a row that comes due: the others are not looked at."""
    stream, *_ = [await _subscribed(served, topic) for topic in _topics()]

    async def add() -> None:
        await served.call("AddMessages", _add(_topics()[0], 1, DELAY_MS, served).SerializeToString())

    async def hand_out() -> None:
        await _messages(stream, 1)

    return await _counted(served, hand_out, first=lambda: _due(served, add))


async def topics_acknowledged(served: Served) -> Counts:
    """20 topics with a stream each, each acknowledges the row that it has received; a topic."""
    streams = [await _subscribed(served, topic) for topic in _topics()]
    held: list[dispatch_pb2.Messages] = []

    async def receive() -> None:
        await _add_to_all(served)
        held[:] = [_joined(await _messages(stream, 1)) for stream in streams]

    async def acknowledge() -> None:
        for stream, messages in zip(streams, held, strict=True):
            stream.send(_acknowledge(messages))
        for stream in streams:
            await stream.answered(1)

    return (await _counted(served, acknowledge, first=receive)).over(TOPICS)


# What each may cost: 5 % more than when it was counted, and no task and no request more.
LIMITS: Mapping[str, Counts] = {
    "batches_added": Counts(calls=140, compiled=112.5, loop=34, tasks=0, store=0.07),
    "rows_added_one_by_one": Counts(calls=32, compiled=38, loop=29, tasks=1, store=0.02),
    "batch_handed_out": Counts(calls=168, compiled=186, loop=93.5, tasks=0, store=0),
    "batch_handed_out_by_key": Counts(calls=493, compiled=489, loop=105, tasks=0, store=0),
    "batch_acknowledged": Counts(calls=170, compiled=157, loop=153.5, tasks=0, store=1),
    "topics_in_one_tick": Counts(calls=89, compiled=83, loop=16.5, tasks=0, store=0),
    "lanes_in_one_tick": Counts(calls=95, compiled=95, loop=5, tasks=0, store=0),
    "one_topic_in_a_tick": Counts(calls=101, compiled=89, loop=64.5, tasks=0, store=0),
    "topics_acknowledged": Counts(calls=112, compiled=119.5, loop=64, tasks=0, store=0.05),
}
PATHS: Mapping[str, Callable[[Served], Awaitable[Counts]]] = {
    path.__name__: path
    for path in (
        batches_added,
        rows_added_one_by_one,
        batch_handed_out,
        batch_handed_out_by_key,
        batch_acknowledged,
        topics_in_one_tick,
        lanes_in_one_tick,
        one_topic_in_a_tick,
        topics_acknowledged,
    )
}


async def counts_of(machines: EngineFixture, path: str) -> Counts:
    """Of a daemon of its own."""
    return await PATHS[path](Served(machines, await machines.served_by("one")))


async def _counted(
    served: Served, work: Callable[[], Awaitable[None]], *, first: Callable[[], Awaitable[None]] | None = None
) -> Counts:
    """The counts of the second time. `first`: what comes before the work each time, and is not counted."""
    counts = []
    for _ in range(2):
        if first is not None:
            await first()
        with Counter(lambda: len(served.daemon.store.calls)) as counter:
            await work()
        counts.append(counter.counts)
    return counts[-1]


async def _due(served: Served, add: Callable[[], Awaitable[None]]) -> None:
    """Returns just before what is added now is due."""
    due_ms = served.machines.now_ms() + DELAY_MS
    await add()
    await asyncio.sleep((due_ms - BEFORE_MS - served.machines.now_ms()) / 1000)


async def _add_to_all(served: Served) -> None:
    requests = [_add(topic, 1, DELAY_MS, served).SerializeToString() for topic in _topics()]
    await asyncio.gather(*(served.call("AddMessages", request) for request in requests))


async def _subscribed(served: Served, topic: str) -> Call:
    """A stream that is open and has permits."""
    request = dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=SUBSCRIPTION)
    await served.call("CreateSubscription", request.SerializeToString())
    kind = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
    opening = dispatch_pb2.Open(topic=topic, subscription=SUBSCRIPTION, type=kind)
    stream = served.open("Subscribe", dispatch_pb2.SubscribeRequest(open=opening).SerializeToString())
    await stream.answered(1)
    flow = dispatch_pb2.Flow(permits=1_000_000)
    stream.send(dispatch_pb2.SubscribeRequest(flow=flow).SerializeToString())
    return stream


async def _subscribed_by_key(served: Served, topic: str) -> Call:
    """A stream that is open, with consumers that have permits."""
    request = dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=SUBSCRIPTION)
    await served.call("CreateSubscription", request.SerializeToString())
    kind = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_KEY_SHARED
    opening = dispatch_pb2.Open(topic=topic, subscription=SUBSCRIPTION, type=kind)
    for number in range(1, CONSUMERS + 1):
        opening.consumers.add(consumer_id=number, name=f"consumer {number}", permits=1_000_000)
    stream = served.open("Subscribe", dispatch_pb2.SubscribeRequest(open=opening).SerializeToString())
    await stream.answered(1)
    return stream


async def _subscribed_together(served: Served, topics: Sequence[str]) -> Call:
    """A stream with a lane for each topic, which is open and has permits."""
    requests = dispatch_pb2.SubscribeManyRequest()
    kind = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
    for lane, topic in enumerate(topics, start=1):
        request = dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=SUBSCRIPTION)
        await served.call("CreateSubscription", request.SerializeToString())
        opening = dispatch_pb2.Open(topic=topic, subscription=SUBSCRIPTION, type=kind)
        requests.requests.add(lane=lane, request=dispatch_pb2.SubscribeRequest(open=opening))
        flow = dispatch_pb2.Flow(permits=1_000_000)
        requests.requests.add(lane=lane, request=dispatch_pb2.SubscribeRequest(flow=flow))
    stream = served.open("SubscribeMany", requests.SerializeToString())
    await stream.until(lambda answers: sum(map(len, map(_of_lanes, answers))) >= len(topics))
    await stream.answered(0)
    return stream


def _of_lanes(answer: bytes) -> Sequence[dispatch_pb2.LaneResponse]:
    return dispatch_pb2.SubscribeManyResponse.FromString(answer).responses


async def _lane_messages(stream: Call, rows: int) -> None:
    """Returns when so many rows have come to all lanes together."""

    def came(answers: Iterable[bytes]) -> int:
        return sum(len(each.response.messages.entry_id) for answer in answers for each in _of_lanes(answer))

    await stream.until(lambda answers: came(answers) >= rows)
    await stream.answered(0)


async def _messages(stream: Call, rows: int) -> list[dispatch_pb2.Messages]:
    """The messages of a stream, when so many rows have come."""

    def found(answers: Iterable[bytes]) -> list[dispatch_pb2.Messages]:
        return [dispatch_pb2.SubscribeResponse.FromString(answer).messages for answer in answers]

    await stream.until(lambda answers: sum(len(each.entry_id) for each in found(answers)) >= rows)
    return found(await stream.answered(0))


def _topics() -> Sequence[str]:
    return [f"{TOPIC}-{number}" for number in range(TOPICS)]


def _add(topic: str, rows: int, delay_ms: int, served: Served) -> delayed_delivery_pb2.AddMessagesRequest:
    """Rows of a ledger of their own."""
    return delayed_delivery_pb2.AddMessagesRequest(
        topic=topic,
        ledger_id=[next(_ledgers)],
        entry_id=range(rows),
        deliver_at_ms=[served.machines.now_ms() + delay_ms],
    )


def _stream_add(request_id: int, add: delayed_delivery_pb2.AddMessagesRequest) -> bytes:
    return delayed_delivery_pb2.StreamAddMessagesRequest(request_id=request_id, add=add).SerializeToString()


def _joined(parts: Sequence[dispatch_pb2.Messages]) -> dispatch_pb2.Messages:
    joined = dispatch_pb2.Messages()
    for part in parts:
        joined.MergeFrom(part)
    return joined


def _acknowledge(messages: dispatch_pb2.Messages) -> bytes:
    acknowledge = dispatch_pb2.Acknowledge(
        request_id=1,
        ledger_id=messages.ledger_id,
        entry_id=messages.entry_id,
        deliver_at_ms=messages.deliver_at_ms,
        redelivery_count=[0],
    )
    return dispatch_pb2.SubscribeRequest(acknowledge=acknowledge).SerializeToString()
