"""Random histories of KEY_SHARED subscriptions: a hash is at one consumer at a time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from daemon import call_values
from daemon.topic.open_streams import StreamClosed
from storage_backends.formats.manifest import HashSelector, KeyOrder, KeySharedPolicy, NackOrder, SubscriptionPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.outcomes import ended
from tests.daemon._support.calling import stats
from tests.daemon._support.key_dispatching import HASHES, KeyDispatcher, Sent, add, consumer, open_by_key
from tests.daemon._support.nacking import HandOut

STEPS = 250
STREAMS_MAX = 3
SOME_HASHES = (1, 2, 3, 40_000, 50_000, 60_000)


@dataclasses.dataclass(eq=False)
class Stream:
    """A stream, the consumers it has, and what they hold as far as it knows."""

    dispatcher: KeyDispatcher
    consumers: list[int]
    held: list[Sent] = dataclasses.field(default_factory=list)
    seen: int = 0


class History:
    """What is done to one subscription, step by step."""

    def __init__(self, daemon: Daemon, policy: KeySharedPolicy, draw: random.Random) -> None:
        self.daemon = daemon
        self.draw = draw
        self.streams: list[Stream] = []
        self.entries = self.planned = 0
        self.last_consumer = 0
        self.requests: list[asyncio.Task[None]] = []
        # Whether a hash goes to another consumer only when nothing of it is held.
        self.drains = policy.order is KeyOrder.DRAINING_HASHES
        self.takes_back = policy.nack_order is NackOrder.BLOCK_KEY
        self.steps = (
            (self.open, 8),
            (self.close, 4),
            (self.join, 8),
            (self.leave, 5),
            (self.add, 20),
            (self.plan, 10),
            (self.grant, 8),
            (self.acknowledge, 22),
            (self.nack, 8),
            (self.pause, 4),
            (self.mark_delete, 1),
            (self.look, 2),
        )

    async def step(self) -> None:
        steps, weights = zip(*self.steps, strict=True)
        (step,) = self.draw.choices(steps, weights)
        await step()
        await asyncio.sleep(self.draw.choice((0, 0, 0.001, 0.02, 0.3)))
        for stream in self.streams:
            assert stream.dispatcher.ended is None, repr(stream.dispatcher.ended)
            self.receive(stream)
        if self.drains:
            self.check()

    def receive(self, stream: Stream) -> None:
        log = stream.dispatcher.log
        for kind, sent in log[stream.seen :]:
            if kind == "taken back":
                stream.held = [each for each in stream.held if each[:1] + each.row[:3] != sent[:1] + sent.row[:3]]
            elif sent.consumer in stream.consumers:
                stream.held.append(sent)
        stream.seen = len(log)

    def check(self) -> None:
        """A hash is at one consumer."""
        holders: dict[int, set[int]] = {}
        for sent in (each for stream in self.streams for each in stream.held):
            holders.setdefault(sent.row.key_hash % HASHES, set()).add(sent.consumer)
        assert all(len(each) == 1 for each in holders.values()), holders

    def stream(self) -> Stream | None:
        return self.draw.choice(self.streams) if self.streams else None

    def consumer(self) -> call_values.Consumer:
        self.last_consumer += 1
        return consumer(self.last_consumer, permits=self.draw.choice((0, 5, 1_000)))

    # ---- steps

    async def open(self) -> None:
        if len(self.streams) < STREAMS_MAX:
            consumers = [self.consumer() for _ in range(self.draw.randint(0, 2))]
            dispatcher = await open_by_key(self.daemon, consumers)
            self.streams.append(Stream(dispatcher, [each.consumer_id for each in consumers]))

    async def close(self) -> None:
        if (stream := self.stream()) is not None:
            self.streams.remove(stream)
            stream.dispatcher.stream.close()

    async def join(self) -> None:
        if (stream := self.stream()) is not None:
            joining = self.consumer()
            stream.dispatcher.stream.add_consumer(joining)
            stream.consumers.append(joining.consumer_id)

    async def leave(self) -> None:
        stream = self.stream()
        if stream is not None and stream.consumers:
            leaving = stream.consumers.pop(self.draw.randrange(len(stream.consumers)))
            stream.held = [each for each in stream.held if each.consumer != leaving]
            self.request(self.left(stream, leaving))

    async def left(self, stream: Stream, consumer_id: int) -> None:
        await stream.dispatcher.stream.remove_consumer(consumer_id)

    async def add(self) -> None:
        hashes = self.hashes(60)
        delay_ms = self.draw.choice((0, 0, 50, 800))
        await add(self.daemon, 1, range(self.entries, self.entries + len(hashes)), hashes, delay_ms)
        self.entries += len(hashes)

    async def plan(self) -> None:
        stream = self.stream()
        if stream is None or not stream.dispatcher.going_on.is_set():
            return
        hashes = self.hashes(20)
        entries = range(self.planned, self.planned + len(hashes))
        self.planned += len(hashes)
        at_ms = self.daemon.now_ms()
        for entry, key_hash, consumer_id in zip(
            entries, hashes, await stream.dispatcher.plan(9, entries, hashes), strict=True
        ):
            if consumer_id in stream.consumers:
                stream.held.append(Sent(consumer_id, HandOut(9, entry, 0, None, 0, key_hash, at_ms)))

    def hashes(self, most: int) -> Sequence[int]:
        return [
            self.draw.choice((*SOME_HASHES, self.draw.randrange(HASHES))) for _ in range(self.draw.randint(1, most))
        ]

    async def grant(self) -> None:
        stream = self.stream()
        if stream is not None and stream.consumers:
            stream.dispatcher.stream.grant(self.draw.choice((1, 10, 500)), self.draw.choice(stream.consumers))

    async def acknowledge(self) -> None:
        if (stream := self.stream()) is not None and (rows := self.some_of(stream)):
            self.request(self.acknowledged(stream, rows))

    async def acknowledged(self, stream: Stream, rows: Sequence[Sent]) -> None:
        await stream.dispatcher.acknowledge(rows)

    async def nack(self) -> None:
        if (stream := self.stream()) is not None and (rows := self.some_of(stream)):
            self.request(self.nacked(stream, list({each.row[:2]: each for each in rows}.values())))

    async def nacked(self, stream: Stream, rows: Sequence[Sent]) -> None:
        await stream.dispatcher.nack(rows, self.draw.choice((0, 10, 700)))

    def some_of(self, stream: Stream) -> list[Sent]:
        """They are not held any more."""
        if self.draw.random() < 0.3:
            self.draw.shuffle(stream.held)
        count = self.draw.randint(1, 30)
        rows, stream.held = stream.held[:count], stream.held[count:]
        return rows

    async def pause(self) -> None:
        # What is taken back counts when it is read.
        if not self.takes_back and (stream := self.stream()) is not None:
            going_on = stream.dispatcher.going_on
            going_on.clear() if going_on.is_set() else going_on.set()

    async def mark_delete(self) -> None:
        # Consumers that hold some of it would not know.
        stream = self.stream()
        if stream is not None and not any(each.held for each in self.streams):
            await self.daemon.call(ended(stream.dispatcher.stream.mark_delete, 9, self.draw.randint(0, self.planned)))

    async def look(self) -> None:
        await self.daemon.call(self.daemon.engine.requests.list_consumers("t", "s", 0, 0))
        await stats(self.daemon)

    def request(self, request: Coroutine[Any, Any, None]) -> None:
        self.requests.append(self.daemon.call(request))

    async def end(self) -> None:
        """Whatever is left is acknowledged by one consumer."""
        for stream in self.streams:
            stream.dispatcher.stream.close()
        for outcome in await asyncio.gather(*self.requests, return_exceptions=True):
            assert outcome is None or isinstance(outcome, StreamClosed), repr(outcome)
        last = await open_by_key(self.daemon, [consumer(1)])
        async with asyncio.timeout(300):
            while (await stats(self.daemon)).subscriptions[0].backlog:
                await asyncio.sleep(0.25)
                rows, last.got = last.got, []
                if rows:
                    await last.acknowledge(rows)
        assert last.ended is None
        found = (await stats(self.daemon)).subscriptions[0]
        assert (found.backlog, found.in_flight, found.waiting, found.nacked) == (0, 0, 0, 0)


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(6))
async def test_a_hash_is_at_one_consumer_at_a_time_and_nothing_is_left_behind(
    machines: EngineFixture, seed: int
) -> None:
    draw = random.Random(seed)
    settings = ("bucket.min_index_count_per_bucket=100", "bucket.rows_max=100")
    one = await machines.served_by("one", f"delivery.ready_rows_max={draw.choice((100, 100_000))}", *settings)
    key_shared = KeySharedPolicy(
        selector=draw.choice((HashSelector.AUTO_SPLIT, HashSelector.CONSISTENT_HASHING)),
        order=KeyOrder.LAST_SENT_POSITION if seed % 4 == 3 else KeyOrder.DRAINING_HASHES,
        nack_order=draw.choice(list(NackOrder)),
        nack_block_max_ms=draw.choice((500, 600_000)),
    )
    policy = SubscriptionPolicy(
        nack_precision_bits=0,
        max_redeliver_count=draw.choice((None, 3)),
        in_flight_rows_max=draw.choice((None, 50)),
        key_shared=key_shared,
    )
    await one.call(one.engine.requests.create_subscription("t", "s", policy))
    history = History(one, key_shared, draw)
    for _ in range(STEPS):
        await history.step()
    await history.end()
