"""Callers that never give up: one adds, one receives and acknowledges, and both write down what they were told.

They speak plain gRPC, so that what is tested is the daemon and not the client library.

Owns: the threads, and the rows that are sent. Does not own: the rules (`tests._support.delivery_history`).
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import grpc

from tarry.v1 import (
    delayed_delivery_pb2,
    dispatch_pb2,
    inspect_pb2,
)
from tests._support.delivery_history import DeliveryHistory, Position
from tests._support.stubs import Stub

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
    # Where there are several addresses, each is asked in turn.
    ("grpc.lb_policy_name", "round_robin"),
)
# What a caller may be told while daemons die, wait or are superseded. All else is a bug.
MAY_BE_TOLD = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)
# The machine may be busy.
PATIENCE_S = 600.0
_LEDGERS_OPEN = 3
_ENTRIES_PER_LEDGER = 2_000

_streams = itertools.count()
DueTimes = Callable[[random.Random, int], int]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The status of a failed call."""
    return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.INTERNAL


@dataclasses.dataclass(frozen=True)
class AddBatch:
    """One request. `delay_ms` is given instead of the times when the daemon is to count."""

    positions: tuple[Position, ...]
    deliver_at_ms: tuple[int, ...]
    delay_ms: int | None = None

    def request(self, topic: str) -> delayed_delivery_pb2.AddMessagesRequest:
        return delayed_delivery_pb2.AddMessagesRequest(
            topic=topic,
            ledger_id=[ledger for ledger, _ in self.positions],
            entry_id=[entry for _, entry in self.positions],
            deliver_at_ms=self.deliver_at_ms if self.delay_ms is None else (),
            delay_ms=() if self.delay_ms is None else (self.delay_ms,),
        )


class Caller(abc.ABC):
    """A thread with a channel. A context manager: leaving it ends the thread."""

    # After a call that failed.
    PAUSE_S = 0.02

    def __init__(self, address: str, topic: str, history: DeliveryHistory, name: str) -> None:
        self.address = address
        self.topic = topic
        self.history = history
        self.stopping = threading.Event()
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._thread = threading.Thread(target=self._run_noting_failure, name=f"{name} of {topic}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the thread and its calls; idempotent."""
        self.stopping.set()
        self.channel.close()
        self._thread.join()

    @abc.abstractmethod
    def run(self) -> None:
        """Calls until it is stopped; in a thread of its own."""

    def told(self, error: grpc.RpcError) -> grpc.StatusCode:
        """Notes the failure of a call; waits a moment, so that the next one does not follow at once."""
        code = code_of(error)
        if code not in MAY_BE_TOLD and not self.stopping.is_set():
            details = error.details() if isinstance(error, grpc.Call) else repr(error)
            self.history.breach(f"{self._thread.name} was told {code.name}: {details}")
        self.stopping.wait(self.PAUSE_S)
        return code

    def _run_noting_failure(self) -> None:
        try:
            self.run()
        except ValueError as closed:
            # gRPC's word for a channel that was closed.
            if not self.stopping.is_set():
                self.history.breach(f"{self._thread.name} failed: {closed!r}")
        except Exception as failure:
            self.history.breach(f"{self._thread.name} failed: {failure!r}")
            raise


class Sender(Caller):
    """Adds batches without end; most of those that had no answer are sent again."""

    def __init__(
        self,
        address: str,
        topic: str,
        history: DeliveryHistory,
        *,
        rng: random.Random,
        due: DueTimes,
        ledgers_from: int = 0,
        rows_max: int = 50,
        pause_s: float = 0.02,
        timeout_s: float = 10.0,
    ) -> None:
        super().__init__(address, topic, history, "the sender")
        self._rng = rng
        self._due = due
        self._ledgers = itertools.count(ledgers_from)
        self._entries: dict[int, int] = {}
        self._rows_max = rows_max
        self._pause_s = pause_s
        self._timeout_s = timeout_s
        self._again: list[AddBatch] = []
        self._last_chance = threading.Event()
        self.answered_begun_at_s: list[float] = []
        """When each call began that was answered OK, monotonic."""
        self.refusals: list[grpc.StatusCode] = []

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Sends nothing new, only what is still to be sent again; returns when that is answered."""
        self._last_chance.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise AssertionError(f"{len(self._again)} batches are unanswered after {timeout_s:g} s")

    def run(self) -> None:
        stub = Stub(delayed_delivery_pb2, self.channel)
        while not self.stopping.is_set():
            if self._last_chance.is_set() and not self._again:
                return
            self.stopping.wait(self._rng.uniform(0, self._pause_s))
            again = self._again and (self._last_chance.is_set() or self._rng.random() < 0.5)
            batch = self._again.pop() if again else self._new_batch()
            self.history.sending(batch.positions, batch.deliver_at_ms, exact=batch.delay_ms is None)
            began_s = time.monotonic()
            try:
                stub.AddMessages(batch.request(self.topic), timeout=self._timeout_s, wait_for_ready=True)
            except grpc.RpcError as error:
                self.refusals.append(self.told(error))
                # The rest stays of unknown fate: it may come or not.
                if self._rng.random() < 0.8:
                    self._again.append(batch)
                continue
            self.answered_begun_at_s.append(began_s)
            self.history.answered(batch.positions)

    def _new_batch(self) -> AddBatch:
        while len(self._entries) < _LEDGERS_OPEN:
            self._entries[next(self._ledgers)] = 0
        ledger = self._rng.choice(list(self._entries))
        first = self._entries[ledger]
        rows = self._rng.randint(1, self._rows_max)
        if first + rows < _ENTRIES_PER_LEDGER:
            self._entries[ledger] = first + rows
        else:
            del self._entries[ledger]
        positions = tuple((ledger, entry) for entry in range(first, first + rows))
        base_ms = now_ms()
        if self._rng.random() < 0.1:
            delay_ms = self._rng.randint(0, 2_000)
            return AddBatch(positions, (base_ms + delay_ms,) * rows, delay_ms)
        return AddBatch(positions, tuple(self._due(self._rng, base_ms) for _ in range(rows)))


class Receiver(Caller):
    """Receives and acknowledges; some of it late, some not before the stream ends. Opens a new stream for ever."""

    def __init__(
        self,
        address: str,
        topic: str,
        history: DeliveryHistory,
        *,
        rng: random.Random,
        subscription: str = "subscription",
        permits: int = 2_000,
        reopen: bool = True,
    ) -> None:
        super().__init__(address, topic, history, "the receiver")
        self._rng = rng
        self._subscription = subscription
        self._permits = permits
        self._reopen = reopen
        self._request_ids = itertools.count(1)
        self._sent: dict[int, list[tuple[int, int, int]]] = {}
        self._kept: list[tuple[int, int, int]] = []
        self._finishing = threading.Event()
        self._call: grpc.Call | None = None
        self.ended = threading.Event()
        self.moved_to: list[str] = []
        self.endings: list[grpc.StatusCode] = []
        self.received: list[tuple[int, int]] = []
        """(when, due time) of everything received, ms."""
        self.durable_due_ms: list[int] = []
        """Due times of everything whose acknowledgement was answered as durable."""

    def finish(self) -> None:
        """From now on everything is acknowledged at once, on a new stream."""
        self._finishing.set()
        if self._call is not None:
            self._call.cancel()

    def run(self) -> None:
        stub = Stub(dispatch_pb2, self.channel)
        while not self.stopping.is_set():
            requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None] = queue.SimpleQueue()
            try:
                self._call = call = stub.Subscribe(_until_none(requests), wait_for_ready=True)
                self._read(call, requests)
            except grpc.RpcError as error:
                self.endings.append(self.told(error))
            finally:
                requests.put(None)
            if not self._reopen:
                break
        self.ended.set()

    def _read(
        self,
        responses: Iterator[dispatch_pb2.SubscribeResponse],
        requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None],
    ) -> None:
        stream = next(_streams)
        self._sent.clear()
        self._kept.clear()
        opening = dispatch_pb2.Open(
            topic=self.topic, subscription=self._subscription, type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED
        )
        requests.put(dispatch_pb2.SubscribeRequest(open=opening))
        requests.put(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=self._permits)))
        for response in responses:
            match response.WhichOneof("response"):
                case "messages":
                    self._take(stream, response.messages, requests)
                case "done":
                    self._settle(response.done)
                case "moved":
                    self.moved_to.append(response.moved.owner_address)

    def _take(
        self,
        stream: int,
        messages: dispatch_pb2.Messages,
        requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None],
    ) -> None:
        at_ms = now_ms()
        rows = list(zip(messages.ledger_id, messages.entry_id, messages.deliver_at_ms, strict=True))
        if len(rows) > self._permits:
            self.history.breach(f"{len(rows)} rows came in one message, against {self._permits} permits")
        self.history.received(self.topic, stream, messages.epoch, rows, at_ms=at_ms)
        self.received.extend((at_ms, due) for _, _, due in rows)
        self._kept.extend(rows)
        requests.put(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=len(rows))))
        if self._finishing.is_set() or self._rng.random() < 0.8:
            self._acknowledge(requests)

    def _acknowledge(self, requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None]) -> None:
        # A few stay unacknowledged as long as this stream lives.
        cut = 0 if self._finishing.is_set() else self._rng.randint(0, min(3, len(self._kept)))
        rows, self._kept = self._kept[cut:], self._kept[:cut]
        if not rows:
            return
        request_id = next(self._request_ids)
        self._sent[request_id] = rows
        self.history.acknowledging((ledger, entry) for ledger, entry, _ in rows)
        acknowledge = dispatch_pb2.Acknowledge(
            request_id=request_id,
            ledger_id=[row[0] for row in rows],
            entry_id=[row[1] for row in rows],
            deliver_at_ms=[row[2] for row in rows],
        )
        requests.put(dispatch_pb2.SubscribeRequest(acknowledge=acknowledge))

    def _settle(self, done: dispatch_pb2.Done) -> None:
        rows = self._sent.pop(done.request_id, None)
        if rows is None:
            self.history.breach(f"a done came for request {done.request_id}, which nobody made on this stream")
        elif done.HasField("error"):
            if grpc_code(done.error.code) not in MAY_BE_TOLD:
                self.history.breach(f"an acknowledgement was refused: {done.error.code} {done.error.message}")
        elif done.ignored:
            self.history.breach(f"{done.ignored} of {len(rows)} acknowledged rows were not in the backlog")
        else:
            self.durable_due_ms.extend(due_ms for _, _, due_ms in rows)
            self.history.durable(self.topic, done.epoch, [(ledger, entry) for ledger, entry, _ in rows])


def grpc_code(number: int) -> grpc.StatusCode:
    """The code with this number."""
    return next(code for code in grpc.StatusCode if code.value[0] == number)


def create_subscription(address: str, topic: str, subscription: str = "subscription") -> None:
    """Waits for the daemon to be there."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        request = dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=subscription)
        Stub(dispatch_pb2, channel).CreateSubscription(request, timeout=PATIENCE_S, wait_for_ready=True)


def add(address: str, topic: str, batch: AddBatch, *, timeout_s: float = PATIENCE_S) -> None:
    """One add on a channel of its own. Raises `grpc.RpcError`."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = Stub(delayed_delivery_pb2, channel)
        stub.AddMessages(batch.request(topic), timeout=timeout_s, wait_for_ready=True)


def stats(address: str, topic: str) -> inspect_pb2.GetTopicStatsResponse:
    """Counts of one topic."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        request = inspect_pb2.GetTopicStatsRequest(topic=topic)
        counts: inspect_pb2.GetTopicStatsResponse = Stub(inspect_pb2, channel).GetTopicStats(
            request, timeout=PATIENCE_S, wait_for_ready=True
        )
        return counts


def wait_until_nothing_is_left(address: str, topic: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits until every row came due and is acknowledged, those of unknown fate too."""
    attempts = threading.Event()
    deadline_s = time.monotonic() + timeout_s
    left = stats(address, topic)
    while left.pending or any(each.backlog for each in left.subscriptions):
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"topic {topic} still holds rows: {left}")
        attempts.wait(0.1)
        left = stats(address, topic)


def _until_none(
    requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None],
) -> Iterator[dispatch_pb2.SubscribeRequest]:
    while (request := requests.get()) is not None:
        yield request
