"""Runs the clients of an ordinary service: some add, others receive and acknowledge each row at once.

Each is a process; one more may add to one topic as fast as it can. `service` alone runs them; this module stands apart
because it runs in their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

import tarry
import tarry.aio
from benchmarks import load as clock
from benchmarks import service_load, tarry_load
from benchmarks.service_load import Load, Mode
from tarry import on_event_loop, stream_requests
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2
from tests._support.stubs import Stub

PERMITS = 10_000
IN_FLIGHT = 10_000
CALLERS = 256
# A daemon that falls behind answers late.
CALL_S = 600.0
_OPENED = "opened"
# The delay of rows that open a stream (ms): they are not due during the measurement.
NOT_DUE_MS = 24 * 3_600_000
# Adding at full speed: rows of a request, requests in flight, rows between two checks for the end. It has a lower
# priority, so that clients that share a core do not count as the daemon's lateness.
BULK_BATCH_ROWS, BULK_IN_FLIGHT, BULK_ROWS = 1_000, 16, 200_000
NICENESS = 10
_SHARED = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_SHARED


@dataclasses.dataclass(frozen=True, eq=False)
class Added:
    """The results of an adding client.

    `answered` marks the answered rows. `sent_late_ms` says how late each request was sent: a client that is late limits
    the measurement. `took_ms` is the time of each answered request. `cpu_s` is the client's CPU time from the beginning
    on. `refusals` has each status of a failed add once.
    """

    answered: NDArray[np.bool_]
    sent_late_ms: NDArray[np.float64]
    took_ms: NDArray[np.float64]
    cpu_s: float
    refusals: frozenset[str]

    @staticmethod
    def joined(parts: Sequence[Added]) -> Added:
        return Added(
            np.any([part.answered for part in parts], axis=0),
            np.concatenate([part.sent_late_ms for part in parts]),
            np.concatenate([part.took_ms for part in parts]),
            sum(part.cpu_s for part in parts),
            frozenset().union(*(part.refusals for part in parts)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """The results of a receiving client.

    `came` counts deliveries by row and subscription, `acknowledged` marks answered acknowledgements. Lateness is in ms.
    A message has one or more rows.
    """

    came: NDArray[np.int64]
    acknowledged: NDArray[np.bool_]
    lateness_ms: NDArray[np.int64]
    due_ms: NDArray[np.int64]
    messages: int

    @staticmethod
    def joined(parts: Sequence[Received]) -> Received:
        return Received(
            np.sum([part.came for part in parts], axis=0),
            np.any([part.acknowledged for part in parts], axis=0),
            np.concatenate([part.lateness_ms for part in parts]),
            np.concatenate([part.due_ms for part in parts]),
            sum(part.messages for part in parts),
        )


# ---- adding


def add(address: str, load: Load, part: int, parent: Connection) -> None:
    """Add every `clients`-th request, beginning with `part`.

    Receives when to begin (Unix time, seconds); sends `Added` when all were sent and answered.
    """
    asyncio.run(_add(address, load, part, parent))


async def _add(address: str, load: Load, part: int, parent: Connection) -> None:
    delays = load.delays()
    answers = _Answers(np.zeros(load.rows, dtype=np.bool_), [])
    late_ms: list[float] = []
    refusals: set[str] = set()
    async with contextlib.AsyncExitStack() as stack:
        if load.one_by_one:
            send = await _one_by_one(stack, address, answers, refusals)
        else:
            send = await _in_batches(stack, address, load, part, answers)
        parent.send(_OPENED)
        began_s: float = await asyncio.to_thread(parent.recv)
        cpu_s = time.process_time()
        for number, request in enumerate(load.requests()):
            if number % load.clients != part:
                continue
            at_s = began_s + request.after_s
            if (remaining_s := at_s - time.time()) > 0:
                await asyncio.sleep(remaining_s)
            late_ms.append(1000 * (time.time() - at_s))
            await send(request, (clock.now_ms() + delays[request.rows]).astype(np.uint64))
        await asyncio.sleep(began_s + load.seconds - time.time())
    took_ms = np.array(answers.took_ms)
    parent.send(Added(answers.rows, np.array(late_ms), took_ms, time.process_time() - cpu_s, frozenset(refusals)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Answers:
    """The rows that were answered, and how long each request took (ms)."""

    rows: NDArray[np.bool_]
    took_ms: list[float]

    def note(self, rows: NDArray[np.int64], began_s: float) -> None:
        self.rows[rows] = True
        self.took_ms.append(1000 * (time.perf_counter() - began_s))


_Send = Callable[[service_load.Request, NDArray[np.uint64]], Awaitable[None]]


async def _in_batches(
    stack: contextlib.AsyncExitStack, address: str, load: Load, part: int, answers: _Answers
) -> _Send:
    """Open a stream of adds for each topic, by a row that is not due in time.

    Leaving `stack` raises the refusal of a batch.
    """
    client = await stack.enter_async_context(tarry.aio.Client(address, timeout_s=CALL_S))
    streams: dict[str, tarry.aio.AddStream] = {}
    opening = []
    for request in load.opening(part):
        stream = await stack.enter_async_context(client.add_stream(request.topic, in_flight=IN_FLIGHT))
        streams[request.topic] = stream
        opening.append(await stream.add(*service_load.positions(request.rows), delay_ms=[NOT_DUE_MS]))
    await asyncio.gather(*opening)

    def note(rows: NDArray[np.int64], began_s: float, answer: asyncio.Future[tarry.AddResult]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            answers.note(rows, began_s)

    async def send(request: service_load.Request, due_ms: NDArray[np.uint64]) -> None:
        began_s = time.perf_counter()
        answer = await streams[request.topic].add(*service_load.positions(request.rows), deliver_at_ms=due_ms)
        answer.add_done_callback(functools.partial(note, request.rows, began_s))

    return send


async def _one_by_one(stack: contextlib.AsyncExitStack, address: str, answers: _Answers, refusals: set[str]) -> _Send:
    """Make a unary call for each request; as many at once as a service has callers."""
    channel = await stack.enter_async_context(on_event_loop.open_channel(address))
    calls = await stack.enter_async_context(asyncio.TaskGroup())
    stub = Stub(delayed_delivery_pb2, channel)
    callers = asyncio.Semaphore(CALLERS)

    async def call(rows: NDArray[np.int64], request: delayed_delivery_pb2.AddMessagesRequest) -> None:
        began_s = time.perf_counter()
        try:
            await stub.AddMessages(request, timeout=CALL_S)
            answers.note(rows, began_s)
        except grpc.aio.AioRpcError as error:
            refusals.add(error.code().name)
        finally:
            callers.release()

    async def send(request: service_load.Request, due_ms: NDArray[np.uint64]) -> None:
        ledger_id, entry_id = service_load.positions(request.rows)
        message = delayed_delivery_pb2.AddMessagesRequest(
            topic=request.topic,
            ledger_id=ledger_id.tolist(),
            entry_id=entry_id.tolist(),
            deliver_at_ms=due_ms.tolist(),
        )
        await callers.acquire()
        calls.create_task(call(request.rows, message))

    return send


def add_bulk(address: str, parent: Connection) -> None:
    """Add rows to one topic as fast as it takes them, between two messages of the parent.

    The rows are not due for long. Sends how many a second were accepted.
    """
    os.nice(NICENESS)
    with tarry.Client(address, timeout_s=CALL_S) as client:
        parent.send(_OPENED)
        parent.recv()
        began_s, accepted, portions = time.perf_counter(), 0, 0
        while not parent.poll():
            rows = clock.in_order(
                clock.over_a_day(BULK_ROWS, seed=portions),
                first_ledger=portions * BULK_ROWS // clock.ROWS_PER_LEDGER,
            )
            added = tarry_load.add(
                client, service_load.BULK, rows, batch_rows=BULK_BATCH_ROWS, in_flight=BULK_IN_FLIGHT
            )
            accepted += added.accepted
            portions += 1
        parent.send(accepted / (time.perf_counter() - began_s))


# ---- receiving


class Receiver:
    """A client of some subscriptions, which receives and acknowledges each row at once."""

    def __init__(self, address: str, load: Load, part: int, parts: int) -> None:
        shape = (load.rows, load.subscriptions)
        self.came = np.zeros(shape, dtype=np.int64)
        self.first_s = 0.0
        """The time when the first row came, by `time.perf_counter` (seconds); 0 if none did"""
        self.opened = asyncio.Event()
        self._acknowledged = np.zeros(shape, dtype=np.bool_)
        self._lateness_ms: list[NDArray[np.int64]] = []
        self._due_ms: list[NDArray[np.int64]] = []
        self._messages = 0
        self._address = address
        self._subscribed = load.subscribed()[part::parts]
        self._unopened = len(self._subscribed)
        if not self._unopened:
            self.opened.set()

    @property
    def received(self) -> Received:
        """The rows received so far."""
        none = [np.empty(0, np.int64)]
        return Received(
            self.came,
            self._acknowledged,
            np.concatenate(self._lateness_ms or none),
            np.concatenate(self._due_ms or none),
            self._messages,
        )

    async def run(self, mode: Mode) -> None:
        """Receive until cancelled, or until no daemon serves any longer."""
        async with contextlib.AsyncExitStack() as stack:
            if mode is Mode.JOINED:
                channel = await stack.enter_async_context(on_event_loop.open_channel(self._address))
                await self._serve_joined(Stub(dispatch_pb2, channel))
                return
            if mode is Mode.PLAIN:
                channel = await stack.enter_async_context(on_event_loop.open_channel(self._address))
                serve = functools.partial(self._serve_plainly, Stub(dispatch_pb2, channel))
            else:
                client = await stack.enter_async_context(tarry.aio.Client(self._address, timeout_s=CALL_S))
                serve = functools.partial(self._serve, client)
            async with asyncio.TaskGroup() as tasks:
                for topic, number in self._subscribed:
                    tasks.create_task(serve(topic, number))

    async def _serve(self, client: tarry.aio.Client, topic: str, number: int) -> None:
        name = service_load.subscription_name(number)
        async with client.subscribe(topic, name, create=True, permits=PERMITS) as subscription:
            self._note_opened()
            async for batch in subscription:
                rows = service_load.rows_of(batch)
                self._take(rows, number, batch.deliver_at_ms.astype(np.int64), batch.lateness_ms)
                subscription.ack(batch).add_done_callback(functools.partial(self._note_acknowledged, rows, number))

    def _note_acknowledged(self, rows: NDArray[np.int64], number: int, done: asyncio.Future[tarry.Ignored]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._acknowledged[rows, number] = True

    async def _serve_plainly(self, stub: Stub, topic: str, number: int) -> None:
        name = service_load.subscription_name(number)
        await stub.CreateSubscription(
            dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=name), timeout=CALL_S, wait_for_ready=True
        )
        stream = stub.Subscribe()
        opening = dispatch_pb2.Open(topic=topic, subscription=name, type=_SHARED)
        await stream.write(dispatch_pb2.SubscribeRequest(open=opening))
        await stream.read()
        await stream.write(_flow(PERMITS))
        self._note_opened()
        waiting: dict[int, NDArray[np.int64]] = {}
        requests, spent = 0, 0
        try:
            while (response := await stream.read()) is not grpc.aio.EOF:
                match response.WhichOneof("response"):
                    case "messages":
                        rows = self._take_message(response.messages, number)
                        requests += 1
                        waiting[requests] = rows
                        await stream.write(_acknowledgement(requests, response.messages))
                        if (spent := spent + len(rows)) > PERMITS // 2:
                            await stream.write(_flow(spent))
                            spent = 0
                    case "done" if not response.done.HasField("error"):
                        self._acknowledged[waiting.pop(response.done.request_id), number] = True
                    case other:
                        raise RuntimeError(f"{topic}, {name}: {other}: {response}")
        except grpc.aio.AioRpcError as error:
            if not _is_of_a_kill(error):
                raise

    async def _serve_joined(self, stub: Stub) -> None:
        """Receive on one stream for all subscriptions; acknowledgements are joined as the client library joins them."""
        opening = dispatch_pb2.SubscribeManyRequest()
        for lane, (topic, number) in enumerate(self._subscribed):
            name = service_load.subscription_name(number)
            created = dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=name)
            await stub.CreateSubscription(created, timeout=CALL_S, wait_for_ready=True)
            opened = dispatch_pb2.Open(topic=topic, subscription=name, type=_SHARED)
            opening.requests.add(lane=lane + 1, request=dispatch_pb2.SubscribeRequest(open=opened))
            opening.requests.add(lane=lane + 1, request=_flow(PERMITS))
        stream = stub.SubscribeMany()
        await stream.write(opening)
        joined = _JoinedAcknowledgements(stream)
        sending = asyncio.create_task(joined.send())
        try:
            while (responses := await stream.read()) is not grpc.aio.EOF:
                for each in responses.responses:
                    self._take_of_lane(each, joined)
        except grpc.aio.AioRpcError as error:
            if not _is_of_a_kill(error):
                raise
        finally:
            sending.cancel()

    def _take_of_lane(self, came: dispatch_pb2.LaneResponse, joined: _JoinedAcknowledgements) -> None:
        topic, number = self._subscribed[came.lane - 1]
        match came.response.WhichOneof("response"):
            case "messages":
                messages = came.response.messages
                joined.add(came.lane, messages, self._take_message(messages, number))
            case "done" if not came.response.done.HasField("error"):
                self._acknowledged[joined.done(came.lane, came.response.done.request_id), number] = True
            case "opened":
                self._note_opened()
            case other:
                raise RuntimeError(f"{topic}, subscription {number}: {other}: {came}")

    def _take_message(self, messages: dispatch_pb2.Messages, number: int) -> NDArray[np.int64]:
        now_ms = clock.now_ms()
        ledger_id, entry_id, due_ms = (
            np.array(column, dtype=np.uint64)
            for column in (messages.ledger_id, messages.entry_id, messages.deliver_at_ms)
        )
        rows = service_load.rows_at(ledger_id, entry_id)
        self._take(rows, number, due_ms.astype(np.int64), now_ms - due_ms.astype(np.int64))
        return rows

    def _take(
        self, rows: NDArray[np.int64], number: int, due_ms: NDArray[np.int64], lateness_ms: NDArray[np.int64]
    ) -> None:
        self.first_s = self.first_s or time.perf_counter()
        self._messages += 1
        # No row is twice in one message.
        self.came[rows, number] += 1
        self._due_ms.append(due_ms)
        self._lateness_ms.append(lateness_ms)

    def _note_opened(self) -> None:
        self._unopened -= 1
        if not self._unopened:
            self.opened.set()


def _is_of_a_kill(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a stream ended as it does when the daemon is killed."""
    return error.code() is grpc.StatusCode.UNAVAILABLE or on_event_loop.is_failed_write(error.code(), error.details())


class _JoinedAcknowledgements:
    """The unacknowledged rows of a stream's lanes: one acknowledgement for each lane, all at once."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._linger = stream_requests.AckLinger(least_ms=5, most_ms=50)
        self._came = asyncio.Event()
        self._received: dict[int, dispatch_pb2.Acknowledge] = {}
        self._rows: dict[int, list[NDArray[np.int64]]] = {}
        # (lane, number of the request) -> rows
        self._waiting: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._requests = 0

    def add(self, lane: int, messages: dispatch_pb2.Messages, rows: NDArray[np.int64]) -> None:
        acknowledge = self._received.get(lane)
        if acknowledge is None:
            acknowledge = self._received[lane] = dispatch_pb2.Acknowledge(redelivery_count=[0])
            self._rows[lane] = []
        acknowledge.ledger_id.extend(messages.ledger_id)
        acknowledge.entry_id.extend(messages.entry_id)
        acknowledge.deliver_at_ms.extend(messages.deliver_at_ms)
        self._rows[lane].append(rows)
        self._linger.acknowledged(alone=False)
        self._came.set()

    def done(self, lane: int, request_id: int) -> NDArray[np.int64]:
        """Return the rows of a request that was answered."""
        return self._waiting.pop((lane, request_id))

    async def send(self) -> None:
        while True:
            await self._came.wait()
            await asyncio.sleep(self._linger.wait_s())
            self._came.clear()
            request = dispatch_pb2.SubscribeManyRequest()
            for lane, acknowledge in self._received.items():
                self._requests += 1
                acknowledge.request_id = self._requests
                rows = self._waiting[lane, self._requests] = np.concatenate(self._rows[lane])
                request.requests.add(lane=lane, request=dispatch_pb2.SubscribeRequest(acknowledge=acknowledge))
                # The permits that it has used up
                request.requests.add(lane=lane, request=_flow(len(rows)))
            self._received.clear()
            self._rows.clear()
            await self._stream.write(request)


def _flow(permits: int) -> dispatch_pb2.SubscribeRequest:
    return dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=permits))


def _acknowledgement(request_id: int, messages: dispatch_pb2.Messages) -> dispatch_pb2.SubscribeRequest:
    acknowledge = dispatch_pb2.Acknowledge(
        request_id=request_id,
        ledger_id=messages.ledger_id,
        entry_id=messages.entry_id,
        deliver_at_ms=messages.deliver_at_ms,
        redelivery_count=messages.redelivery_count or [0],
    )
    return dispatch_pb2.SubscribeRequest(acknowledge=acknowledge)


def receive(address: str, load: Load, part: int, parent: Connection) -> None:
    """Receive in a process of its own.

    Sends that its subscriptions are open; receives when to end, and sends the results.
    """
    asyncio.run(_receive(address, load, part, parent))


async def _receive(address: str, load: Load, part: int, parent: Connection) -> None:
    receiver = Receiver(address, load, part, load.clients)
    running = asyncio.create_task(receiver.run(load.mode))
    opening = asyncio.create_task(receiver.opened.wait())
    await asyncio.wait((running, opening), return_when=asyncio.FIRST_COMPLETED)
    if not receiver.opened.is_set():
        running.result()
    parent.send(_OPENED)
    await asyncio.to_thread(parent.recv)
    await ended(running)
    parent.send(receiver.received)


async def ended(running: asyncio.Task[None]) -> None:
    """End a receiver that may have ended. Raises its failure."""
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
