"""Dispatchers with consumers of keys, in plain gRPC, through a daemon that dies meanwhile.

Owns: what is added and planned, and what consumers do: they acknowledge in order, nack some, join and leave; on a new
stream their dispatcher says what they hold, and plans again what is not acknowledged. Does not own: the rules
(`key_history`), the daemons and when they die.

A consumer is sequential: of a hash of which it nacked a position it drops what is behind it, which is taken back, until
the nack is answered and its delay is over.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import grpc
import grpc.aio

from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, policy_pb2
from tests._support.stubs import Stub
from tests.wire._support.key_history import NOT_ADDED_MS, Consumer, KeyHistory, Position, Row
from tests.wire._support.nack_traffic import NOT_WRITTEN
from tests.wire._support.traffic import CHANNEL_OPTIONS, MAY_BE_TOLD, PATIENCE_S, grpc_code, now_ms

TOPIC, SUBSCRIPTION = "topic", "consumers"
PAUSE_S = 0.02
# Of one try: who is asked may be paused, or dead.
TIMEOUT_S = 10.0
PERMITS = 100
NACK_DELAY_MS = 300
CHANGES_EVERY_S = 0.7
PLANNED_AT_ONCE_MAX = 8
KEYS = 300
NACKED_SHARE = 0.05
# Each key has its own delay, so that its rows are due in the order of their positions.
DELAYS_MS = (400, 2_000)
# Of the rows that are planned, behind those of the rows that are added
PLANNED_LEDGER = 1_000
GROWTH_MAX = 16
Stream: TypeAlias = grpc.aio.StreamStreamCall[dispatch_pb2.SubscribeRequest, dispatch_pb2.SubscribeResponse]


async def create_subscription(address: str) -> None:
    """Its later positions of a key wait for one that is nacked."""
    request = dispatch_pb2.CreateSubscriptionRequest(topic=TOPIC, subscription=SUBSCRIPTION)
    request.policy.key_shared.nack_order = policy_pb2.NACK_ORDER_BLOCK_KEY
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        await Stub(dispatch_pb2, channel).CreateSubscription(request, timeout=PATIENCE_S)


def rows_of(
    rng: random.Random, *, added: int, planned: int, first_ledger: int = 0
) -> tuple[dict[int, int], list[Row], list[Row]]:
    """(the delays of the keys, the rows that are added, those that are planned), of the same keys."""
    hashes = [slot | rng.randrange(1 << 16) << 16 for slot in rng.sample(range(1 << 16), KEYS)]
    delays = {key_hash: rng.randint(*DELAYS_MS) for key_hash in hashes}
    to_add, to_plan = [], []
    for number in range(added):
        position = first_ledger + number // 1_000, number % 1_000
        to_add.append(Row(position, NOT_ADDED_MS, rng.choice(hashes), number, rng.random() < NACKED_SHARE))
    for number in range(planned):
        position = first_ledger + PLANNED_LEDGER, number
        to_plan.append(Row(position, 0, rng.choice(hashes), number, rng.random() < NACKED_SHARE, in_time=True))
    return delays, to_add, to_plan


async def reached(done: Callable[[], bool], running: Sequence[asyncio.Future[None]], history: KeyHistory) -> None:
    """Waits until it is so, while everybody goes on and nothing is wrong."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not done() and not history.breaches:
                for task in running:
                    if task.done():
                        task.result()
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        history.breach(f"not within {PATIENCE_S:g} s; unacknowledged are {history.left()}")
    assert history.breaches[:5] == []


class Adder:
    """Adds batches one after the other, each again and again until it is answered. `under_way`: how many are not.

    `delays_ms`: of each key, so that its rows are due in their order. Where answers come late they grow: however busy
    the machine is, most rows are there in time.
    """

    def __init__(self, addresses: Sequence[str], history: KeyHistory, delays_ms: Mapping[int, int]) -> None:
        self._delays_ms = delays_ms
        self._growth = 1
        self.under_way = 0
        self.unanswered = 0
        self._addresses = addresses
        self._history = history

    async def run(self, batches: Sequence[Sequence[Row]], pause_s: float) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stubs = [
                Stub(
                    delayed_delivery_pb2,
                    await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)),
                )
                for address in self._addresses
            ]
            async with asyncio.TaskGroup() as adding:
                for batch in batches:
                    for row in batch:
                        row.deliver_at_ms = now_ms() + self._growth * self._delays_ms[row.key_hash]
                    adding.create_task(self._add(stubs, batch))
                    await asyncio.sleep(pause_s)

    async def _add(self, stubs: Sequence[Stub], batch: Sequence[Row]) -> None:
        request = delayed_delivery_pb2.AddMessagesRequest(
            topic=TOPIC,
            ledger_id=[row.position[0] for row in batch],
            entry_id=[row.position[1] for row in batch],
            deliver_at_ms=[row.deliver_at_ms for row in batch],
            key_hash=[row.key_hash for row in batch],
        )
        self.under_way += 1
        sent_ms = now_ms()
        for stub in itertools.cycle(stubs):
            try:
                await stub.AddMessages(request, timeout=TIMEOUT_S)
                break
            except grpc.aio.AioRpcError as error:
                check_may_be_told(error)
                self.unanswered += 1
                await asyncio.sleep(PAUSE_S)
            for row in batch:
                row.added_again += 1
        self.under_way -= 1
        answered_ms = now_ms()
        if answered_ms > sent_ms + self._growth * min(self._delays_ms.values()):
            self._growth = min(2 * self._growth, GROWTH_MAX)
        for row in batch:
            row.in_time = answered_ms < row.deliver_at_ms and not row.came


@dataclasses.dataclass(eq=False, slots=True)
class _Queue:
    """A consumer. `rows`: those it holds, in the order in which they came; `again`: those whose acknowledgement had no
    answer on an earlier stream.
    """

    consumer: Consumer
    permits: int = PERMITS
    rows: collections.deque[Row] = dataclasses.field(default_factory=collections.deque)
    again: list[Row] = dataclasses.field(default_factory=list)

    def message(self) -> dispatch_pb2.Consumer:
        name, number = self.consumer
        return dispatch_pb2.Consumer(consumer_id=number, name=f"{name} {number}", permits=self.permits)


@dataclasses.dataclass(eq=False, slots=True)
class _Nacked:
    """What is behind the position is left alone."""

    position: Position
    until_ms: int
    answered: bool = False


class _Refused(Exception):
    """A request of a stream was refused: what became of it shows on the next one."""


class Dispatcher:
    """`planned`: the log that it plans, which may be empty."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        history: KeyHistory,
        *,
        consumers: int,
        planned: Sequence[Row],
        seed: int,
    ) -> None:
        self.name = name
        self.streams = 0
        self.declared = self.not_held = 0
        self.joined = 0
        self.planned_again = 0
        self._addresses = itertools.cycle(addresses)
        self._history = history
        self._random = random.Random(f"{name} {seed}")
        self._planned = planned
        self._planned_until = 0
        self._epoch = 0
        self._consumers = consumers
        self._next_consumer = itertools.count(1)
        self._queues: dict[int, _Queue] = {}
        for _ in range(consumers):
            self._new_consumer()
        self._requests = itertools.count(1)
        self._acknowledging: dict[int, tuple[_Queue, list[Row]]] = {}
        self._nacking: dict[int, tuple[Row, _Nacked]] = {}
        # What is asked for, and what is here already.
        self._planning: dict[int, tuple[list[Row], set[Position]]] = {}
        self._is_new = False
        self._nacked: dict[int, list[_Nacked]] = {}
        self._changes_at_ms = 0.0

    @property
    def under_way(self) -> int:
        """Requests that are not answered."""
        return len(self._acknowledging) + len(self._nacking) + len(self._planning)

    @property
    def held(self) -> int:
        return sum(len(queue.rows) for queue in self._queues.values())

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            async with grpc.aio.insecure_channel(next(self._addresses), options=CHANNEL_OPTIONS) as channel:
                stream = Stub(dispatch_pb2, channel).Subscribe()
                try:
                    await self._serve(stream)
                except (asyncio.InvalidStateError, _Refused):
                    # It ended before it was written to, or is given up.
                    pass
                except grpc.aio.AioRpcError as error:
                    if NOT_WRITTEN not in (error.debug_error_string() or ""):
                        check_may_be_told(error)
            self._ended()
            await asyncio.sleep(PAUSE_S)

    # ---- one stream

    async def _serve(self, stream: Stream) -> None:
        held = [(queue, row) for queue in self._queues.values() for row in (*queue.again, *queue.rows)]
        await stream.write(dispatch_pb2.SubscribeRequest(open=self._open(held)))
        response = await stream.read()
        if not isinstance(response, dispatch_pb2.SubscribeResponse) or not response.HasField("opened"):
            # Another daemon serves the topic; or it said why not.
            await stream.code()
            return
        self._opened(response.opened, held)
        reading = asyncio.ensure_future(self._read(stream))
        try:
            while not reading.done():
                for request in [*self._plan(), *self._settle(), *self._change()]:
                    await stream.write(request)
                await asyncio.sleep(PAUSE_S)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _open(self, held: Sequence[tuple[_Queue, Row]]) -> dispatch_pb2.Open:
        return dispatch_pb2.Open(
            topic=TOPIC,
            subscription=SUBSCRIPTION,
            type=dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED,
            consumers=[queue.message() for queue in self._queues.values()],
            held_ledger_id=[row.position[0] for _, row in held],
            held_entry_id=[row.position[1] for _, row in held],
            held_deliver_at_ms=[row.deliver_at_ms for _, row in held],
            held_consumer_id=[queue.consumer[1] for queue, _ in held],
            held_key_hash=[row.key_hash if row.is_planned else 0 for _, row in held],
        )

    def _opened(self, opened: dispatch_pb2.Opened, held: Sequence[tuple[_Queue, Row]]) -> None:
        self.streams += 1
        self._is_new = True
        self._epoch = opened.epoch
        self.declared += len(held)
        self.not_held += len(opened.not_held)
        if opened.held + len(opened.not_held) != len(held):
            self._history.breach(
                f"{len(held)} positions were declared, and the answer is {opened.held} {opened.not_held}"
            )
        lost = {held[index][1].position for index in opened.not_held}
        for queue in self._queues.values():
            queue.rows = collections.deque(row for row in queue.rows if row.position not in lost)
            queue.again = [row for row in queue.again if row.position not in lost]
            for row in (*queue.again, *queue.rows):
                self._history.holds(opened.epoch, queue.consumer, row)

    def _ended(self) -> None:
        """What was asked for on the stream has no answer any more."""
        for queue, rows in self._acknowledging.values():
            queue.again += rows
        for queue in self._queues.values():
            queue.permits = PERMITS
        self._acknowledging.clear()
        self._nacking.clear()
        self._planning.clear()
        self._nacked.clear()

    # ---- what comes

    async def _read(self, stream: Stream) -> None:
        while isinstance(response := await stream.read(), dispatch_pb2.SubscribeResponse):
            match response.WhichOneof("response"):
                case "messages":
                    self._take(response.messages)
                case "planned":
                    self._take_planned(response.planned)
                case "taken_back":
                    self._take_back(response.taken_back)
                case "done":
                    self._done(response.done)

    def _take(self, messages: dispatch_pb2.Messages) -> None:
        rows = len(messages.ledger_id)
        counts = messages.redelivery_count or [0] * rows
        columns = (messages.ledger_id, messages.entry_id, messages.deliver_at_ms, messages.consumer_id, counts)
        for ledger_id, entry_id, deliver_at_ms, number, count in zip(*columns, strict=True):
            self._came(messages.epoch, (ledger_id, entry_id), deliver_at_ms, number, count)

    def _take_planned(self, planned: dispatch_pb2.Planned) -> None:
        rows, held = self._planning.pop(planned.request_id)
        for row, number in zip(rows, planned.consumer_id, strict=True):
            # It is said once more of what is there already.
            if number and row.position not in held:
                self._came(planned.epoch, row.position, 0, number, 0)
            elif not row.is_acknowledged:
                # It was read before every acknowledgement that is still to be sent.
                row.is_asked_for = False

    def _queue(self, number: int) -> _Queue:
        return self._queues.get(number, _Queue((self.name, number), permits=1))

    def _came(self, epoch: int, position: Position, deliver_at_ms: int, number: int, count: int) -> None:
        queue = self._queue(number)
        row = self._history.came(epoch, queue.consumer, position, deliver_at_ms, count)
        if row is None or number not in self._queues:
            return
        queue.permits -= 1
        if queue.permits < 0:
            self._history.breach(f"{row} came for {queue.consumer}, which has no permits")
        if self._is_left_alone(row):
            return
        self._history.holds(epoch, queue.consumer, row)
        queue.rows.append(row)

    def _is_left_alone(self, row: Row) -> bool:
        now = now_ms()
        nacked = [each for each in self._nacked.get(row.slot, ()) if not each.answered or each.until_ms > now]
        # The one that was nacked may come again before the answer does.
        self._nacked[row.slot] = nacked = [each for each in nacked if each.position != row.position]
        return any(each.position < row.position for each in nacked)

    def _take_back(self, taken_back: dispatch_pb2.TakenBack) -> None:
        columns = (taken_back.ledger_id, taken_back.entry_id, taken_back.consumer_id)
        for ledger_id, entry_id, number in zip(*columns, strict=True):
            self._history.taken_back += 1
            row = self._history.rows[ledger_id, entry_id]
            queue = self._queue(number)
            if row in queue.rows:
                queue.rows.remove(row)
                self._history.lets_go(queue.consumer, row)

    def _done(self, done: dispatch_pb2.Done) -> None:
        if done.HasField("error"):
            if grpc_code(done.error.code) not in MAY_BE_TOLD:
                self._history.breach(f"{self.name}: request {done.request_id} was refused: {done.error}")
            raise _Refused
        acknowledged = self._acknowledging.pop(done.request_id, None)
        if acknowledged is not None and not done.ignored and done.epoch == self._history.epoch:
            for row in acknowledged[1]:
                row.acknowledgement_answered = True
        nacked = self._nacking.pop(done.request_id, None)
        if nacked is not None:
            nacked[0].nack_answered |= not done.ignored and done.epoch == self._history.epoch
            nacked[1].answered = True

    # ---- what is asked for

    def _plan(self) -> Iterator[dispatch_pb2.SubscribeRequest]:
        """On a new stream everything that is not acknowledged once more, then a few more each time."""
        if self._is_new:
            self._is_new = False
            rows = [row for row in self._planned[: self._planned_until] if not row.is_acknowledged]
            self.planned_again += len(rows)
        else:
            first = self._planned_until
            self._planned_until = min(first + self._random.randint(1, PLANNED_AT_ONCE_MAX), len(self._planned))
            rows = list(self._planned[first : self._planned_until])
        if not rows:
            return
        for row in rows:
            row.is_asked_for = True
        request_id = next(self._requests)
        held = {row.position for queue in self._queues.values() for row in queue.rows}
        self._planning[request_id] = rows, held
        plan = dispatch_pb2.PlanDispatch(
            request_id=request_id,
            ledger_id=[rows[0].position[0]],
            entry_id=[row.position[1] for row in rows],
            key_hash=[row.key_hash for row in rows],
        )
        yield dispatch_pb2.SubscribeRequest(plan_dispatch=plan)

    def _settle(self) -> Iterator[dispatch_pb2.SubscribeRequest]:
        """Each consumer goes on with some of what it holds, in order; one that used half of its permits gets more."""
        for number, queue in self._queues.items():
            yield from self._acknowledge(queue, queue.again)
            queue.again = []
            acknowledged: list[Row] = []
            for _ in range(min(len(queue.rows), self._random.randint(0, 12))):
                if not queue.rows:
                    break
                row = queue.rows.popleft()
                if row.is_to_be_nacked and row.again_not_before_ms is None:
                    yield from self._acknowledge(queue, acknowledged)
                    acknowledged = []
                    yield self._nack(queue, row)
                else:
                    acknowledged.append(row)
            yield from self._acknowledge(queue, acknowledged)
            if queue.permits <= PERMITS // 2:
                flow = dispatch_pb2.Flow(permits=PERMITS - queue.permits, consumer_id=number)
                queue.permits = PERMITS
                yield dispatch_pb2.SubscribeRequest(flow=flow)

    def _acknowledge(self, queue: _Queue, rows: list[Row]) -> Iterator[dispatch_pb2.SubscribeRequest]:
        if not rows:
            return
        for row in rows:
            self._history.acknowledging(queue.consumer, row)
            if self._planned:
                # The plan is on the same stream, before this.
                row.is_asked_for = False
        request_id = next(self._requests)
        self._acknowledging[request_id] = queue, list(rows)
        acknowledge = dispatch_pb2.Acknowledge(
            request_id=request_id,
            ledger_id=[row.position[0] for row in rows],
            entry_id=[row.position[1] for row in rows],
            deliver_at_ms=[row.deliver_at_ms for row in rows],
        )
        yield dispatch_pb2.SubscribeRequest(acknowledge=acknowledge)

    def _nack(self, queue: _Queue, row: Row) -> dispatch_pb2.SubscribeRequest:
        """What the consumer holds of the hash behind it is dropped."""
        behind = [each for each in queue.rows if each.slot == row.slot and each.position > row.position]
        for each in behind:
            queue.rows.remove(each)
            self._history.lets_go(queue.consumer, each)
        self._history.nacking(queue.consumer, row, NACK_DELAY_MS)
        request_id = next(self._requests)
        nacked = _Nacked(row.position, now_ms() + NACK_DELAY_MS)
        self._nacked.setdefault(row.slot, []).append(nacked)
        self._nacking[request_id] = row, nacked
        nack = dispatch_pb2.NegativeAcknowledge(
            request_id=request_id,
            ledger_id=[row.position[0]],
            entry_id=[row.position[1]],
            deliver_at_ms=[row.deliver_at_ms],
            delay_ms=[NACK_DELAY_MS],
        )
        return dispatch_pb2.SubscribeRequest(negative_acknowledge=nack)

    # ---- consumers

    def _new_consumer(self) -> _Queue:
        number = next(self._next_consumer)
        queue = self._queues[number] = _Queue((self.name, number))
        return queue

    def _change(self) -> Iterator[dispatch_pb2.SubscribeRequest]:
        """Now and then one leaves with what it holds, or another one joins."""
        if now_ms() < self._changes_at_ms:
            return
        self._changes_at_ms = now_ms() + 1000 * CHANGES_EVERY_S * self._random.uniform(0.5, 1.5)
        request_id = next(self._requests)
        if len(self._queues) == self._consumers:
            number = self._random.choice(list(self._queues))
            queue = self._queues.pop(number)
            for row in queue.rows:
                self._history.lets_go(queue.consumer, row)
            removal = dispatch_pb2.RemoveConsumer(request_id=request_id, consumer_id=number)
            yield dispatch_pb2.SubscribeRequest(remove_consumer=removal)
        else:
            self.joined += 1
            joining = dispatch_pb2.AddConsumer(request_id=request_id, consumer=self._new_consumer().message())
            yield dispatch_pb2.SubscribeRequest(add_consumer=joining)


def check_may_be_told(error: grpc.aio.AioRpcError) -> None:
    """Raises what nobody may be told while daemons die."""
    if error.code() not in MAY_BE_TOLD:
        raise error
