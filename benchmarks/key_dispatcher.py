"""A dispatcher process with consumers of a KEY_SHARED subscription: they receive, acknowledge, nack, join and leave.

Where the rows behind a nacked one are to wait (`blocks`) a consumer is sequential: of a hash of which it nacked a row
it takes no other one until that one is due again.

Owns: one stream in plain gRPC, what its consumers do, and what they saw, in columns. Does not own: whether that is
right (`key_account`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from benchmarks import key_load
from tarry import on_event_loop
from tarry.v1 import dispatch_pb2 as pb
from tarry.v1 import dispatch_pb2_grpc

SETTLE_S = 0.01
# A consumer that is about to leave acknowledges nothing more for so long.
LEAVING_S = 0.1
PERMITS = 1_000
NOBODY = 0
NEVER_NS = np.iinfo(np.int64).max
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one of the processes does. `first_consumer`: its consumers are numbered from there on, at least 1."""

    address: str
    topic: str
    subscription: str
    first_consumer: int
    consumers: int
    blocks: bool
    changes_every_s: float
    plan: key_load.Plan


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """Columns; times in ns, distinct within one message.

    received_*: of each row that came; held_*: from when until when a consumer had a row; settled_*: what was asked for
    each, and when that was answered (never where some of the request was ignored). `left_ns`: when consumers left:
    (asked, answered).
    """

    received_number: I64
    received_at_ns: I64
    received_count: I64
    held_number: I64
    held_consumer: I64
    held_from_ns: I64
    held_until_ns: I64
    settled_number: I64
    settled_at_ns: I64
    settled_answered_ns: I64
    settled_is_nack: Mask
    left_ns: I64
    ignored: int
    taken_back: int
    other_rows: int
    joins: int

    @staticmethod
    def joined(parts: list[Seen]) -> Seen:
        """What several processes saw."""
        values: dict[str, Any] = {}
        for name in (field.name for field in dataclasses.fields(Seen)):
            each = [getattr(part, name) for part in parts]
            values[name] = sum(each) if isinstance(each[0], int) else np.concatenate(each)
        return Seen(**values)


def dispatch(part: Part, parent: Connection) -> None:
    """Runs in a process of its own. Sends that it is ready, and is sent when the load begins (`start_ms`); sends what
    it saw when it is sent anything more.
    """
    asyncio.run(_Dispatcher(part, parent).run())


class _Columns:
    """Chunks of columns that are of one length."""

    def __init__(self, width: int) -> None:
        self._chunks: list[list[I64]] = [[] for _ in range(width)]

    def add(self, *columns: I64) -> None:
        for chunks, column in zip(self._chunks, columns, strict=True):
            chunks.append(column)

    def whole(self) -> list[I64]:
        return [np.concatenate(chunks) if chunks else np.empty(0, np.int64) for chunks in self._chunks]


@dataclasses.dataclass(eq=False, slots=True)
class _Rows:
    """What consumers hold."""

    number: I64
    consumer: I64
    from_ns: I64
    count: I64

    def take(self, chosen: Mask) -> _Rows:
        return _Rows(self.number[chosen], self.consumer[chosen], self.from_ns[chosen], self.count[chosen])

    @staticmethod
    def joined(parts: list[_Rows]) -> _Rows:
        names = ("number", "consumer", "from_ns", "count")
        return _Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class _Dispatcher:
    def __init__(self, part: Part, parent: Connection) -> None:
        self._part = part
        self._parent = parent
        self._load = key_load.Load(part.plan)
        self._next_consumer = part.first_consumer
        self._live: set[int] = set()
        self._leaving = NOBODY
        self._held: list[_Rows] = []
        self._used: dict[int, int] = {}
        # By slot: until when its rows are left alone, being taken back.
        self._left_alone_until_ns = np.zeros(1 << 16, np.int64)
        # By slot: the last nack of one of its rows that did not come again.
        self._nacked_by = np.zeros(1 << 16, np.int64)
        self._received = _Columns(3)
        self._intervals = _Columns(4)
        self._settled: list[tuple[int, I64, int, bool]] = []
        self._answered: dict[int, tuple[int, bool]] = {}
        self._nacking: dict[int, tuple[I64, int]] = {}
        self._left: dict[int, int] = {}
        self._left_ns: list[int] = []
        self._next_request = 0
        # Those that are not answered, and those of them that are to be sent again.
        self._asked: dict[int, pb.SubscribeRequest] = {}
        self._again: list[pb.SubscribeRequest] = []
        self._ignored = self._taken_back = self._other_rows = self._joins = 0

    async def run(self) -> None:
        async with on_event_loop.open_channel(self._part.address) as channel:
            stream = dispatch_pb2_grpc.DispatchStub(channel).Subscribe()
            opening = pb.Open(
                topic=self._part.topic,
                subscription=self._part.subscription,
                type=pb.SUBSCRIPTION_TYPE_KEY_SHARED,
                consumers=[self._new_consumer() for _ in range(self._part.consumers)],
            )
            await stream.write(pb.SubscribeRequest(open=opening))
            opened = await stream.read()
            if not isinstance(opened, pb.SubscribeResponse) or opened.WhichOneof("response") != "opened":
                raise ConnectionError(f"the stream was not opened: {opened}")
            self._parent.send("ready")
            start_ms = await asyncio.to_thread(self._parent.recv)
            self._load = key_load.Load(dataclasses.replace(self._part.plan, start_ms=start_ms))
            reading = asyncio.create_task(self._read(stream))
            changes_at_s = time.monotonic() + self._part.changes_every_s
            while not self._parent.poll():
                await asyncio.sleep(SETTLE_S)
                if reading.done():
                    reading.result()
                    raise ConnectionError("the stream ended")
                requests = [*self._again, *self._settle()]
                self._again = []
                if time.monotonic() >= changes_at_s:
                    requests += self._change()
                    changes_at_s = time.monotonic() + (LEAVING_S if self._leaving else self._part.changes_every_s)
                for request in requests:
                    self._asked[_id_of(request)] = request
                    await stream.write(request)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        self._parent.send(self._seen())

    async def _read(self, stream: grpc.aio.StreamStreamCall[pb.SubscribeRequest, pb.SubscribeResponse]) -> None:
        while isinstance(response := await stream.read(), pb.SubscribeResponse):
            match response.WhichOneof("response"):
                case "messages":
                    self._take(response.messages)
                case "done":
                    self._note_done(response.done)
                case "taken_back":
                    self._taken_back += len(response.taken_back.entry_id)

    # ---- what comes

    def _take(self, messages: pb.Messages) -> None:
        at_ns = time.time_ns()
        ledger_id = np.array(messages.ledger_id, np.uint64)
        number = key_load.numbers_of(ledger_id, np.array(messages.entry_id, np.uint64))
        consumer = np.array(messages.consumer_id, np.int64)
        count = np.array(messages.redelivery_count, np.int64) if messages.redelivery_count else np.zeros_like(number)
        known = number < len(self._load)
        due = np.array(messages.deliver_at_ms, np.uint64)
        hashes = np.array(messages.key_hash, np.uint32)
        clipped = np.minimum(number, len(self._load) - 1)
        known &= (self._load.rows.deliver_at_ms[clipped] == due) & (self._load.key_hash[clipped] == hashes)
        self._other_rows += int(np.count_nonzero(~known))
        from_ns = at_ns + np.arange(len(number))
        rows = _Rows(number, consumer, from_ns, count).take(known)
        self._received.add(rows.number, rows.from_ns, rows.count)
        ids, used = np.unique(consumer, return_counts=True)
        for each, permits in zip(ids.tolist(), used.tolist(), strict=True):
            self._used[each] = self._used.get(each, 0) + permits
        live = np.isin(rows.consumer, np.fromiter(self._live, np.int64, len(self._live)))
        slot = self._load.slot[rows.number]
        self._held.append(rows.take(live & ~self._is_left_alone(slot, rows)))

    def _is_left_alone(self, slot: NDArray[np.uint16], rows: _Rows) -> Mask:
        """Which rows are behind one that was nacked, and came before that is known: until it comes again itself."""
        left_alone: Mask = rows.from_ns < self._left_alone_until_ns[slot]
        again = np.flatnonzero(left_alone & (rows.count > 0))
        if len(again):
            first = np.full(1 << 16, len(slot))
            np.minimum.at(first, slot[again], again)
            left_alone &= np.arange(len(slot)) < first[slot]
            self._left_alone_until_ns[slot[again]] = 0
            self._nacked_by[slot[again]] = 0
        return left_alone

    def _note_done(self, done: pb.Done) -> None:
        request = self._asked.pop(done.request_id)
        if done.error.code == grpc.StatusCode.UNAVAILABLE.value[0]:
            # The disk is slow just now.
            self._again.append(request)
            return
        if done.HasField("error"):
            raise ConnectionError(f"request {done.request_id} was refused: {done.error}")
        now_ns = time.time_ns()
        self._ignored += done.ignored
        self._answered[done.request_id] = now_ns, done.ignored == 0
        if done.request_id in self._left:
            self._left_ns += [self._left.pop(done.request_id), now_ns]
        if (nacked := self._nacking.pop(done.request_id, None)) is not None:
            slots, due_again_ns = nacked
            slots = slots[self._nacked_by[slots] == done.request_id]
            # Whatever comes until then is taken back.
            self._left_alone_until_ns[slots] = max(now_ns, due_again_ns)

    # ---- what is done with it

    def _settle(self) -> Iterator[pb.SubscribeRequest]:
        """Requests for everything that is held, and permits for what was used of them."""
        if self._held:
            rows = _Rows.joined(self._held)
            leaving = rows.consumer == self._leaving
            self._held = [rows.take(leaving)] if leaving.any() else []
            rows = rows.take(~leaving)
            nacked = (rows.count == 0) & self._load.is_nacked[rows.number]
            acknowledged = ~nacked
            if self._part.blocks and nacked.any():
                nacked, acknowledged = self._first_of_each(self._load.slot[rows.number], nacked)
            now_ns = time.time_ns()
            self._intervals.add(rows.number, rows.consumer, rows.from_ns, np.full(len(rows.number), now_ns))
            if acknowledged.any():
                yield self._acknowledge(rows.number[acknowledged], now_ns)
            if nacked.any():
                yield self._nack(rows.number[nacked], now_ns)
        for consumer, permits in self._used.items():
            if permits >= PERMITS // 2 and consumer in self._live:
                yield pb.SubscribeRequest(flow=pb.Flow(permits=permits, consumer_id=consumer))
                self._used[consumer] = 0

    @staticmethod
    def _first_of_each(slot: NDArray[np.uint16], nacked: Mask) -> tuple[Mask, Mask]:
        """(nacked, acknowledged): of each slot the first one that is to be nacked, and what is before it."""
        places = np.arange(len(slot))
        first = np.full(1 << 16, len(slot))
        np.minimum.at(first, slot[nacked], places[nacked])
        return places == first[slot], places < first[slot]

    def _nack(self, number: I64, now_ns: int) -> pb.SubscribeRequest:
        request_id = self._request(number, now_ns, is_nack=True)
        if self._part.blocks:
            slots = self._load.slot[number].astype(np.int64)
            due_again_ns = now_ns + self._part.plan.nack_delay_ms * 1_000_000
            self._nacking[request_id] = slots, due_again_ns
            self._left_alone_until_ns[slots] = NEVER_NS
            self._nacked_by[slots] = request_id
        nack = pb.NegativeAcknowledge(
            request_id=request_id, delay_ms=[self._part.plan.nack_delay_ms], **self._named(number)
        )
        return pb.SubscribeRequest(negative_acknowledge=nack)

    def _acknowledge(self, number: I64, now_ns: int) -> pb.SubscribeRequest:
        request_id = self._request(number, now_ns, is_nack=False)
        return pb.SubscribeRequest(acknowledge=pb.Acknowledge(request_id=request_id, **self._named(number)))

    def _named(self, number: I64) -> dict[str, Any]:
        rows = self._load.rows
        return {
            "ledger_id": rows.ledger_id[number].tolist(),
            "entry_id": rows.entry_id[number].tolist(),
            "deliver_at_ms": rows.deliver_at_ms[number].tolist(),
        }

    def _request(self, number: I64, now_ns: int, *, is_nack: bool) -> int:
        self._next_request += 1
        self._settled.append((self._next_request, number, now_ns, is_nack))
        return self._next_request

    # ---- consumers

    def _new_consumer(self) -> pb.Consumer:
        number = self._next_consumer
        self._next_consumer += 1
        self._live.add(number)
        return pb.Consumer(consumer_id=number, name=f"consumer {number}", permits=PERMITS)

    def _change(self) -> Iterator[pb.SubscribeRequest]:
        """By turns: the oldest consumer begins to leave, leaves with what it holds, and another one joins."""
        self._next_request += 1
        if self._leaving != NOBODY:
            consumer, self._leaving = self._leaving, NOBODY
            self._live.remove(consumer)
            now_ns = time.time_ns()
            for rows in self._held:
                gone = rows.take(rows.consumer == consumer)
                self._intervals.add(gone.number, gone.consumer, gone.from_ns, np.full(len(gone.number), now_ns))
            self._held = [rows.take(rows.consumer != consumer) for rows in self._held]
            self._left[self._next_request] = now_ns
            removal = pb.RemoveConsumer(request_id=self._next_request, consumer_id=consumer)
            yield pb.SubscribeRequest(remove_consumer=removal)
        elif len(self._live) == self._part.consumers:
            self._leaving = min(self._live)
        else:
            self._joins += 1
            joining = pb.AddConsumer(request_id=self._next_request, consumer=self._new_consumer())
            yield pb.SubscribeRequest(add_consumer=joining)

    # ---- the end

    def _seen(self) -> Seen:
        now_ns = np.int64(NEVER_NS)
        for rows in self._held:
            self._intervals.add(rows.number, rows.consumer, rows.from_ns, np.full(len(rows.number), now_ns))
        received_number, received_at_ns, received_count = self._received.whole()
        held_number, held_consumer, held_from_ns, held_until_ns = self._intervals.whole()
        settled = _Columns(4)
        for request_id, number, at_ns, is_nack in self._settled:
            answered_ns, all_counted = self._answered.get(request_id, (NEVER_NS, False))
            settled.add(
                number,
                np.full(len(number), at_ns) + np.arange(len(number)),
                np.full(len(number), answered_ns if all_counted else NEVER_NS),
                np.full(len(number), is_nack),
            )
        settled_number, settled_at_ns, settled_answered_ns, settled_is_nack = settled.whole()
        return Seen(
            received_number=received_number,
            received_at_ns=received_at_ns,
            received_count=received_count,
            held_number=held_number,
            held_consumer=held_consumer,
            held_from_ns=held_from_ns,
            held_until_ns=held_until_ns,
            settled_number=settled_number,
            settled_at_ns=settled_at_ns,
            settled_answered_ns=settled_answered_ns,
            settled_is_nack=settled_is_nack.astype(bool),
            left_ns=np.array(self._left_ns, np.int64).reshape(-1, 2),
            ignored=self._ignored,
            taken_back=self._taken_back,
            other_rows=self._other_rows,
            joins=self._joins,
        )


def _id_of(request: pb.SubscribeRequest) -> int:
    """0 where nothing is answered."""
    which = request.WhichOneof("request")
    return int(getattr(getattr(request, which), "request_id", 0)) if which else 0
