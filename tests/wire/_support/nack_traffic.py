"""Clients that negatively acknowledge positions, through a daemon that dies meanwhile; what they were told.

Owns: what is sent, again and again until it is answered, and the rules: nothing comes before its time, counts are
between what was answered and what was asked for, what was answered to be acknowledged never comes again.
Does not own: the daemon, and when it dies.

A position may be counted once more than was answered where a request had no answer and was sent again: it may have come
back in between. Which count it comes with says which time holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio

from storage_backends.formats.index_ids import NO_BATCH_INDEX
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2
from tests._support.stubs import Stub
from tests.wire._support.traffic import CHANNEL_OPTIONS, MAY_BE_TOLD, PATIENCE_S, now_ms

# Ledger, entry, batch index.
Key = tuple[int, int, int]

ROWS = 1_000
CALLS_AT_ONCE = 4
# Of one try: who is asked may be dead.
TIMEOUT_S = 10.0
PAUSE_S = 0.05
# A delay that is so long grows with the time that has passed, by its part of this: however busy the machine is, most of
# what was asked for waits when all of it was asked for.
LONG_MS, GROWTH_MS = 5_000, 5_000
# What gRPC says, as an internal error, to whoever writes to a stream that ends just then.
NOT_WRITTEN = "SendMessageOperation"


@dataclasses.dataclass(slots=True)
class Expected:
    """What must be true of a position when it comes. `delays_ms`: of each negative acknowledgement that it gets.

    `not_before_ms`: by count, as far as counts go that it may have; `count`: the least one.
    `is_asked`: a request is under way; `came_meanwhile`: the count with which it came since that was begun.
    `counted_at`, `acknowledged_at`: which stream was open when that was answered: what comes on it may have been on
    its way.
    """

    deliver_at_ms: int
    delays_ms: tuple[int, ...]
    not_before_ms: dict[int, int] = dataclasses.field(default_factory=dict)
    count: int = 0
    is_asked: bool = False
    came_meanwhile: int = 0
    counted_at: int | None = None
    acknowledged_at: int | None = None


class NackTraffic:
    """One topic with one subscription whose redelivery times have `precision_bits`."""

    def __init__(self, address: str, topic: str, precision_bits: int, expected: dict[Key, Expected]) -> None:
        self.breaches: list[str] = []
        self.expected = expected
        self.under_way = 0
        """Requests that are not answered yet."""
        self.came_back = 0
        self.answered = 0
        """Positions that were answered to be negatively acknowledged as often as they are to be."""
        self._topic = topic
        self._bits = precision_bits
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._dispatch = Stub(dispatch_pb2, self._channel)
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._left = len(expected)
        self._began_ms = now_ms()
        self._streams = 0

    @property
    def waiting(self) -> int:
        """Positions that were answered to be negatively acknowledged as often as they are to be, and did not come."""
        return sum(
            each.count >= len(each.delays_ms) and not each.is_asked and each.acknowledged_at is None
            for each in self.expected.values()
        )

    async def run(self) -> None:
        """Everything, until each position was acknowledged."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._channel.close)
            await self._create()
            self._begin(self._receive())
            for keys in portions(self.expected):
                # What is due is added; what Tarry never had is negatively acknowledged at once.
                self._begin(self._add(keys) if self.expected[keys[0]].deliver_at_ms else self._nack(keys))
            await self._done.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.breaches.append(f"{self._topic}: {error!r}")
            self._done.set()

    def _counted(self, each: Expected, count: int) -> None:
        """It was negatively acknowledged so often at least."""
        was_answered = each.count >= len(each.delays_ms)
        each.count = max(each.count, count)
        self.answered += not was_answered and each.count >= len(each.delays_ms)

    # ---- requests

    async def _create(self) -> None:
        request = dispatch_pb2.CreateSubscriptionRequest(topic=self._topic, subscription="s")
        request.policy.nack_precision_bits = self._bits
        await self._dispatch.CreateSubscription(request, timeout=PATIENCE_S, wait_for_ready=True)

    async def _add(self, keys: Sequence[Key]) -> None:
        stub = Stub(delayed_delivery_pb2, self._channel)
        request = delayed_delivery_pb2.AddMessagesRequest(
            topic=self._topic,
            ledger_id=[ledger_id for ledger_id, _, _ in keys],
            entry_id=[entry_id for _, entry_id, _ in keys],
            deliver_at_ms=[self.expected[key].deliver_at_ms for key in keys],
        )
        await self._answered(stub.AddMessages, request)

    async def _nack(self, keys: Sequence[Key]) -> None:
        """Each for the next time."""
        delays_ms = []
        for key in keys:
            each = self.expected[key]
            each.is_asked = True
            delays_ms.append(self._grown(each.delays_ms[min(each.count, len(each.delays_ms) - 1)]))
        request = dispatch_pb2.NegativeAcknowledgeRequest(topic=self._topic, subscription="s", delay_ms=delays_ms)
        self._name(request, keys)
        before = {key: self.expected[key].count for key in keys}

        def sending() -> None:
            sent_ms = now_ms()
            for key, delay_ms in zip(keys, delays_ms, strict=True):
                each = self.expected[key]
                most = max((each.count, *each.not_before_ms))
                for count in range(before[key] + 1, most + 2):
                    each.not_before_ms.setdefault(count, self._rounded_up(sent_ms + delay_ms))

        answer, tries = await self._answered(self._dispatch.NegativeAcknowledge, request, sending)
        if answer.ignored and tries == 1:
            self.breaches.append(f"{self._topic}: {answer.ignored} negative acknowledgements were ignored")
        came: list[Key] = []
        for key in keys:
            each = self.expected[key]
            self._counted(each, before[key] + 1)
            each.is_asked = False
            each.counted_at = self._streams
            if each.came_meanwhile > before[key]:
                # It came back before the answer did.
                self._counted(each, each.came_meanwhile)
                came.append(key)
            each.came_meanwhile = 0
        self._go_on(came)

    async def _acknowledge(self, keys: Sequence[Key]) -> None:
        request = dispatch_pb2.AcknowledgeRequest(topic=self._topic, subscription="s")
        self._name(request, keys)
        answer, tries = await self._answered(self._dispatch.Acknowledge, request)
        if answer.ignored and tries == 1:
            self.breaches.append(f"{self._topic}: {answer.ignored} acknowledgements were ignored")
        for key in keys:
            self.expected[key].acknowledged_at = self._streams
        self._left -= len(keys)
        if not self._left:
            self._done.set()

    def _name(
        self, request: dispatch_pb2.NegativeAcknowledgeRequest | dispatch_pb2.AcknowledgeRequest, keys: Sequence[Key]
    ) -> None:
        for ledger_id, entry_id, batch_index in keys:
            request.ledger_id.append(ledger_id)
            request.entry_id.append(entry_id)
            request.batch_index.append(batch_index)
            request.deliver_at_ms.append(self.expected[ledger_id, entry_id, batch_index].deliver_at_ms)

    async def _answered(self, call: Any, request: Any, sending: Callable[[], None] = lambda: None) -> tuple[Any, int]:
        """The answer, and at which try it came."""
        async with self._calls:
            for tries in itertools.count(1):
                sending()
                self.under_way += 1
                try:
                    return await call(request, timeout=TIMEOUT_S, wait_for_ready=True), tries
                except grpc.aio.AioRpcError as error:
                    if error.code() not in MAY_BE_TOLD:
                        raise
                    await asyncio.sleep(PAUSE_S)
                finally:
                    self.under_way -= 1
        raise AssertionError

    def _grown(self, delay_ms: int) -> int:
        passed_ms = now_ms() - self._began_ms
        return delay_ms * max(1, passed_ms // GROWTH_MS) if delay_ms >= LONG_MS else delay_ms

    def _rounded_up(self, time_ms: int) -> int:
        return -(-time_ms >> self._bits) << self._bits

    # ---- receiving

    async def _receive(self) -> None:
        while True:
            self._streams += 1
            stream = self._dispatch.Subscribe(wait_for_ready=True)
            try:
                opening = dispatch_pb2.Open(
                    topic=self._topic, subscription="s", type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED
                )
                await stream.write(dispatch_pb2.SubscribeRequest(open=opening))
                await stream.write(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=10 * ROWS)))
                async for response in stream:
                    if response.WhichOneof("response") == "messages":
                        self._take(response.messages)
                        flow = dispatch_pb2.Flow(permits=len(response.messages.ledger_id))
                        await stream.write(dispatch_pb2.SubscribeRequest(flow=flow))
            except asyncio.InvalidStateError:
                # It ended before it was written to.
                pass
            except grpc.aio.AioRpcError as error:
                if error.code() not in MAY_BE_TOLD and NOT_WRITTEN not in (error.debug_error_string() or ""):
                    raise
            await asyncio.sleep(PAUSE_S)

    def _take(self, messages: dispatch_pb2.Messages) -> None:
        at_ms = now_ms()
        rows = len(messages.ledger_id)
        batch_index = messages.batch_index or [NO_BATCH_INDEX] * rows
        counts = messages.redelivery_count or [0] * rows
        came: list[Key] = []
        columns = (messages.ledger_id, messages.entry_id, batch_index, messages.deliver_at_ms, counts)
        for ledger_id, entry_id, part, deliver_at_ms, count in zip(*columns, strict=True):
            key = ledger_id, entry_id, part
            each = self._check(key, deliver_at_ms, count, at_ms)
            if each is not None and each.is_asked:
                each.came_meanwhile = max(each.came_meanwhile, count)
            elif each is not None:
                self._counted(each, count)
                came.append(key)
        self._go_on(came)

    def _go_on(self, came: Sequence[Key]) -> None:
        """What came is negatively acknowledged the next time, or acknowledged."""
        for key in came:
            self.expected[key].is_asked = True
        ends = [key for key in came if self.expected[key].count >= len(self.expected[key].delays_ms)]
        for keys in portions(sorted(set(came) - set(ends))):
            self._begin(self._nack(keys))
        for keys in portions(ends):
            self._begin(self._acknowledge(keys))

    def _check(self, key: Key, deliver_at_ms: int, count: int, at_ms: int) -> Expected | None:
        each = self.expected.get(key)
        what = f"{self._topic}: {key} of {deliver_at_ms} came with count {count} at {at_ms}"
        if each is None or each.deliver_at_ms != deliver_at_ms:
            self.breaches.append(f"{what}, and is {each}")
            return None
        self.came_back += count > 0
        if each.acknowledged_at is not None and each.acknowledged_at < self._streams:
            self.breaches.append(f"{what}, after it was acknowledged")
        # What the daemon sent on an open stream before it decided may be read after the answer.
        if each.counted_at == self._streams and count == each.count - 1:
            return None
        if count < each.count or (count and count not in each.not_before_ms):
            self.breaches.append(f"{what}, and is {each}")
        elif at_ms < max(deliver_at_ms, each.not_before_ms.get(count, 0)):
            self.breaches.append(f"{what}, early: {each}")
        if self.breaches:
            self._done.set()
        return each


def portions(keys: Iterable[Key]) -> Iterator[list[Key]]:
    """As many as a request names, in their order."""
    named = list(keys)
    for first in range(0, len(named), ROWS):
        yield named[first : first + ROWS]
