"""Callers of every call that changes something, at both daemons of a root, who note each answer by identity.

Owns: who asks what, by which way: directly, one request at one daemon, which waits itself for a former owner; through
the library at each address, every attempt noted; on streams, and in lanes. Does not own: the verdict (`answers`).

What has no answer, or is refused, is asked again by half; the rest is left for the look at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import grpc

import tarry
from tarry import columns, errors
from tarry.v1 import dispatch_pb2
from tests._support.delivery_history import DeliveryHistory
from tests.wire._support import traffic
from tests.wire._support.answers import (
    ALREADY_DUE,
    DUPLICATE,
    IGNORED,
    NO_STREAM,
    NOT_FOUND,
    OK,
    UNKNOWN,
    Answers,
    Asked,
    Identity,
    What,
    may_be_told,
)
from tests.wire._support.traffic import now_ms

T = TypeVar("T")
Told = Collection[str]

STREAMED = "answers"
LANES = ("lane-0", "lane-1")
TOPICS = (STREAMED, *LANES)
SUBSCRIPTION = "all"
# Registers of names: subscriptions of one topic, and topics of their own
SUBSCRIPTIONS, NAMES = "subscriptions", "topics"
FAR_MS = 3_600_000
SOON_MS = 1_500
ROWS_MAX = 5
# Longer than a former owner may act: a request that waits for its end is not refused at once.
WAITS_S = 60.0
IMPATIENT_S = 4.0
# Longer than it takes until the answer with leased rows is read
LEASE_MS = 5_000
PAUSE_S = 0.2

_ledgers = itertools.count(1)
_streams = itertools.count(NO_STREAM + 1)


class Delivery(NamedTuple):
    topic: str
    ledger: int
    entry: int
    due_ms: int
    redeliveries: int

    @property
    def position(self) -> Identity:
        return self.topic, self.ledger, self.entry


def _deliveries(topic: str, rows: dispatch_pb2.Messages | tarry.Batch) -> list[Delivery]:
    named = rows.ledger_id, rows.entry_id, rows.deliver_at_ms
    counts = rows.redelivery_count if len(rows.redelivery_count) else [0] * len(rows.entry_id)
    return [Delivery(topic, *map(int, row)) for row in zip(*named, counts, strict=True)]


# ---- requests


@dataclasses.dataclass(frozen=True)
class Request(Generic[T]):
    """What is asked of each position, how with a time-out (seconds), and what the answer says of each."""

    positions: Sequence[Identity]
    asked: Sequence[Asked]
    call: Callable[[tarry.Client, float], T]
    read: Callable[[T], Sequence[Told]]


def add(topic: str, ledger: int, rows: int, due_ms: int) -> Request[Any]:
    return Request(
        _entries(topic, ledger, rows),
        [Asked(What.ADD, due_ms)] * rows,
        lambda client, s: client.add(topic, ledger, range(rows), deliver_at_ms=due_ms, timeout_s=s),
        _added,
    )


def cancel(topic: str, ledger: int, rows: int) -> Request[Any]:
    return Request(
        _entries(topic, ledger, rows),
        [Asked(What.CANCEL)] * rows,
        lambda client, s: client.cancel(topic, ledger, range(rows), timeout_s=s),
        lambda answer: _withdrawn(answer, answer.cancelled),
    )


def reschedule(topic: str, ledger: int, rows: int, due_ms: int) -> Request[Any]:
    return Request(
        _entries(topic, ledger, rows),
        [Asked(What.RESCHEDULE, due_ms)] * rows,
        lambda client, s: client.reschedule(topic, ledger, range(rows), deliver_at_ms=due_ms, timeout_s=s),
        lambda answer: _withdrawn(answer, answer.rescheduled),
    )


def trim(topic: str, ledger: int) -> Request[Any]:
    """Trim a ledger, of which no entry is at a consumer."""
    return Request(
        _entries(topic, ledger, ROWS_MAX),
        [Asked(What.TRIM)] * ROWS_MAX,
        lambda client, s: client.trim(topic, ledger, ROWS_MAX, timeout_s=s),
        lambda _: [[OK]] * ROWS_MAX,
    )


def settle(what: What, rows: Sequence[Delivery], delay_ms: int = 0) -> Request[Any]:
    """Acknowledge, negatively acknowledge or reject rows of one topic."""
    given = columns.positions(
        [row.ledger for row in rows],
        [row.entry for row in rows],
        [row.due_ms for row in rows],
        redelivery_count=[row.redeliveries for row in rows],
    )

    def call(client: tarry.Client, timeout_s: float) -> tarry.Ignored:
        of_subscription = rows[0].topic, SUBSCRIPTION, given
        if what is What.ACK:
            return client.ack(*of_subscription, timeout_s=timeout_s)
        if what is What.NACK:
            return client.nack(*of_subscription, delay_ms=delay_ms, timeout_s=timeout_s).ignored
        return client.reject(*of_subscription, "no gate", timeout_s=timeout_s).ignored

    return Request([row.position for row in rows], _settling(what, rows, delay_ms), call, _ignored)


def purge(topic: str, ledger: int) -> Request[Any]:
    """Forget the dead letters of a ledger."""
    which = tarry.DeadLetterFilter(ledgers=(ledger, ledger))
    return Request(
        _entries(topic, ledger, ROWS_MAX),
        [Asked(What.PURGE)] * ROWS_MAX,
        lambda client, s: client.purge_dead_letters(topic, SUBSCRIPTION, which, timeout_s=s),
        lambda _: [[OK]] * ROWS_MAX,
    )


def create(register: str, number: int) -> Request[Any]:
    """Create a subscription or a topic."""
    position, asked, name = _entries(register, number, 1), [Asked(What.ADD)], f"{register}-{number}"
    if register == SUBSCRIPTIONS:
        return Request(
            position,
            asked,
            lambda client, s: client.create_subscription(SUBSCRIPTIONS, name, timeout_s=s),
            lambda made: [[OK if made.created else DUPLICATE]],
        )
    return Request(position, asked, lambda client, s: client.add(name, 1, [0], delay_ms=FAR_MS, timeout_s=s), _added)


def delete(register: str, number: int) -> Request[Any]:
    """Delete a subscription or a topic."""
    name = f"{register}-{number}"

    def counted(client: tarry.Client, timeout_s: float) -> int | None:
        if register == SUBSCRIPTIONS:
            return client.delete_subscription(SUBSCRIPTIONS, name, timeout_s=timeout_s).dead_letters
        return client.delete_topic(name, timeout_s=timeout_s).rows

    # The library has no count where an earlier attempt may have deleted it.
    return Request(
        _entries(register, number, 1),
        [Asked(What.DELETE)],
        counted,
        lambda count: [[OK] if count is not None else [OK, NOT_FOUND]],
    )


def _entries(topic: str, ledger: int, rows: int) -> list[Identity]:
    return [(topic, ledger, entry) for entry in range(rows)]


def _settling(what: What, rows: Sequence[Delivery], delay_ms: int, *, is_repeated: bool = False) -> list[Asked]:
    return [Asked(what, row.due_ms, row.redeliveries, delay_ms, is_repeated) for row in rows]


def _added(added: tarry.AddResult) -> list[Told]:
    told = [each for each, number in ((OK, added.accepted), (DUPLICATE, added.duplicates)) if number]
    return [told] * (added.accepted + added.duplicates)


def _withdrawn(answer: tarry.Cancelled | tarry.Rescheduled, moved: int) -> list[Told]:
    left = {int(row): NOT_FOUND for row in answer.not_found_index}
    left |= {int(row): ALREADY_DUE for index in (answer.already_due_index, answer.in_flight_index) for row in index}
    return [[left.get(row, OK)] for row in range(moved + len(left))]


def _ignored(ignored: tarry.Ignored) -> list[Told]:
    left = {int(row) for row in ignored.index}
    return [[IGNORED if row in left else OK] for row in range(ignored.rows)]


# ---- callers


@dataclasses.dataclass(frozen=True)
class _NotedAttempts(tarry.RetryPolicy):
    """Calls `failed` with the failure of each attempt."""

    failed: Callable[[tarry.TarryError], None] = lambda error: None

    def delay_s(self, error: tarry.TarryError, attempt: int) -> float:
        self.failed(error)
        return super().delay_s(error, attempt)


class Asker:
    """One caller's client. With `is_direct` it asks its daemon once, else the library repeats and finds the owner."""

    def __init__(self, address: str, answers: Answers, *, is_direct: bool) -> None:
        self.answers = answers
        self.via = f"{'a direct call' if is_direct else 'the library'} at {address}"
        self._is_direct = is_direct
        # What is asked, and its number for each position
        self._asking: tuple[Request[Any], Sequence[int]] | None = None
        self.client = tarry.Client(address, retry_policy=_NotedAttempts(failed=self._failed), timeout_s=WAITS_S)
        if is_direct:
            # The library says that it waits for a former owner itself, and then no daemon does.
            self.client._connections._metadata = ()

    def ask(self, request: Request[Any], timeout_s: float = WAITS_S) -> bool:
        """Ask once, and note what each position was told; return whether it was answered."""
        self._begin(request)
        told: Sequence[Told]
        try:
            told = request.read(request.call(self.client, timeout_s))
        except errors.NotFound:
            if request.asked[0].what is not What.DELETE:
                raise
            told = [[NOT_FOUND]]
        except tarry.TarryError as error:
            self._end(self._meant(error))
            return False
        self._end(told)
        return True

    def without_rows(self, call: Callable[[tarry.Client], T]) -> T | None:
        """Ask for what changes no position; return None if it is not answered."""
        try:
            return call(self.client)
        except tarry.TarryError as error:
            if not may_be_told(self._meant(error)):
                self.answers.breach(f"{self.via} was told {error!r}")
            return None

    def _meant(self, error: tarry.TarryError) -> tarry.TarryError:
        """A daemon that stops cancels calls: the library must not show that to its user."""
        is_cancelled = self._is_direct and error.code is grpc.StatusCode.CANCELLED
        return errors.OutcomeUnknown(error.message) if is_cancelled else error

    def _begin(self, request: Request[Any]) -> None:
        self._asking = request, self.answers.asked(request.positions, request.asked, self.via)

    def _end(self, answer: Sequence[Told] | tarry.TarryError) -> None:
        assert self._asking is not None
        (request, numbers), self._asking = self._asking, None
        self.answers.told(request.positions, numbers, answer)

    def _failed(self, error: tarry.TarryError) -> None:
        if self._is_direct:
            raise error
        if self._asking is not None:
            request, _ = self._asking
            self._end(error)
            self._begin(request)


class Worker(threading.Thread):
    """Asks until it is stopped."""

    def __init__(self, asker: Asker, rng: random.Random, inbox: queue.Queue[Delivery]) -> None:
        super().__init__(name=f"{type(self).__name__} by {asker.via}", daemon=True)
        self.asker = asker
        self.rng = rng
        self.inbox = inbox
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self.stopping.wait(self.rng.uniform(0, PAUSE_S)):
                self.step()
        except Exception as failure:
            self.asker.answers.breach(f"{self.name} failed: {failure!r}")
            raise

    def step(self) -> None:
        """Ask for one thing."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it has open."""
        self.asker.client.close()

    def ask(self, request: Request[Any]) -> None:
        """Ask, mostly with patience; by half again until it is answered."""
        timeout_s = IMPATIENT_S if self.rng.random() < 0.2 else WAITS_S
        while not self.asker.ask(request, timeout_s):
            if self.rng.random() < 0.5 or self.stopping.wait(PAUSE_S):
                return

    def soon_ms(self) -> int:
        return self.rng.randint(0, SOON_MS)


class Producer(Worker):
    """Adds rows that are due soon and others; cancels, reschedules, trims and adds again some of them."""

    def step(self) -> None:
        topic, ledger, rows = self.rng.choice(TOPICS), next(_ledgers), self.rng.randint(1, ROWS_MAX)
        kind, after = self.rng.random(), self.rng.random()
        if kind < 0.1:
            # The log has positions that Tarry never had.
            of_log = [Delivery(topic, ledger, entry, 0, 0) for entry in range(rows)]
            self.ask(settle(What.NACK, of_log, self.soon_ms()))
            return
        is_far = kind < 0.5
        due_ms = now_ms() + (FAR_MS if is_far else self.soon_ms())
        self.ask(add(topic, ledger, rows, due_ms))
        if after < (0.3 if is_far else 0.1):
            self.ask(cancel(topic, ledger, rows))
        elif after < (0.6 if is_far else 0.2):
            self.ask(reschedule(topic, ledger, rows, now_ms() + self.soon_ms()))
        elif is_far and after < 0.8:
            self.ask(trim(topic, ledger))
        elif is_far and after < 0.9:
            self.ask(add(topic, ledger, rows, due_ms + 1))


class Settler(Worker):
    """Acknowledges what others received, positively and negatively, by single calls; rejects and leaves some."""

    def step(self) -> None:
        taken: list[Delivery] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < ROWS_MAX:
                taken.append(self.inbox.get(timeout=PAUSE_S))
        for topic in TOPICS:
            rows = [each for each in taken if each.topic == topic]
            kind = self.rng.random()
            if not rows or kind < 0.05:
                continue
            what = What.ACK if kind < 0.7 else What.NACK if kind < 0.9 else What.REJECT
            self.ask(settle(what, rows, self.soon_ms()))
            if what is What.REJECT and self.rng.random() < 0.5:
                self.ask(purge(topic, rows[0].ledger))


class Leaser(Worker):
    """Leases rows for the settlers, extends some leases and ends others."""

    def step(self) -> None:
        topic = self.rng.choice(TOPICS)
        leased = self.asker.without_rows(
            lambda c: c.get(topic, SUBSCRIPTION, max_rows=20, lease_ms=LEASE_MS, wait_ms=300, timeout_s=IMPATIENT_S)
        )
        if not leased or not self.asker.answers.reached(topic, leased.epoch):
            return
        rows = _deliveries(topic, leased)
        self.asker.answers.came(next(_streams), ((each.position, *each[3:]) for each in rows), at_ms=now_ms())
        if self.rng.random() < 0.3:
            lease_ms = self.rng.choice((0, LEASE_MS))
            self.asker.without_rows(lambda c: c.extend_lease(topic, SUBSCRIPTION, leased, lease_ms, timeout_s=WAITS_S))
            if not lease_ms:
                return
        for each in rows:
            self.inbox.put(each)


class Registrar(Worker):
    """Creates subscriptions and topics, and deletes most of them."""

    def step(self) -> None:
        register, number = self.rng.choice((SUBSCRIPTIONS, NAMES)), next(_ledgers)
        self.ask(create(register, number))
        if self.rng.random() < 0.8:
            self.ask(delete(register, number))


class StreamSettler(traffic.Receiver):
    """Receives on a stream at one daemon, settles a part there and leaves the rest to the settlers."""

    # A standby has more important work than to refuse streams.
    PAUSE_S = 0.25

    def __init__(self, address: str, answers: Answers, history: DeliveryHistory, rng: random.Random) -> None:
        super().__init__(address, STREAMED, history, rng=rng, subscription=SUBSCRIPTION)
        self._answers = answers
        # A SimpleQueue with several readers may wait for ever when one of them takes what another has waited for.
        self.inbox: queue.Queue[Delivery] = queue.Queue()
        self._via = f"a stream at {address}"
        self._asked: dict[int, tuple[list[Identity], list[int]]] = {}

    def _read(
        self,
        responses: Iterator[dispatch_pb2.SubscribeResponse],
        requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None],
    ) -> None:
        try:
            super()._read(responses, requests)
        finally:
            for positions, numbers in self._asked.values():
                self._answers.told(positions, numbers, [[UNKNOWN]] * len(positions))
            self._asked.clear()

    def _take(
        self,
        stream: int,
        messages: dispatch_pb2.Messages,
        requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None],
    ) -> None:
        rows = _deliveries(self.topic, messages)
        requests.put(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=len(rows))))
        if not self._answers.reached(self.topic, messages.epoch):
            return
        # Numbers of other streams are positive.
        self._answers.came(-1 - stream, ((each.position, *each[3:]) for each in rows), at_ms=now_ms())
        here = [each for each in rows if self._rng.random() < 0.5]
        for each in rows:
            if each not in here and self._rng.random() < 0.9:
                self.inbox.put(each)
        cut = len(here) // 4
        self._settle_here(What.NACK, here[:cut], requests)
        self._settle_here(What.ACK, here[cut:], requests)

    def _settle_here(
        self,
        what: What,
        rows: Sequence[Delivery],
        requests: queue.SimpleQueue[dispatch_pb2.SubscribeRequest | None],
    ) -> None:
        if not rows:
            return
        request_id, delay_ms = next(self._request_ids), self._rng.randint(100, SOON_MS)
        positions = [each.position for each in rows]
        self._asked[request_id] = positions, self._answers.asked(positions, _settling(what, rows, delay_ms), self._via)
        request = dispatch_pb2.SubscribeRequest()
        settling = request.acknowledge if what is What.ACK else request.negative_acknowledge
        settling.request_id = request_id
        settling.ledger_id.extend(each.ledger for each in rows)
        settling.entry_id.extend(each.entry for each in rows)
        settling.deliver_at_ms.extend(each.due_ms for each in rows)
        settling.redelivery_count.extend(each.redeliveries for each in rows)
        if what is What.NACK:
            request.negative_acknowledge.delay_ms.append(delay_ms)
        requests.put(request)

    def _settle(self, done: dispatch_pb2.Done) -> None:
        positions, numbers = self._asked.pop(done.request_id)
        if done.HasField("error"):
            self._answers.told(positions, numbers, errors.from_status(done.error))
        else:
            self._answers.reached(self.topic, done.epoch)
            told = [[IGNORED if row in done.ignored_index else OK] for row in range(len(positions))]
            self._answers.told(positions, numbers, told)


class LaneSettler(Worker):
    """Receives one topic through the library, in a lane of its client's stream, and settles it there."""

    def __init__(self, asker: Asker, rng: random.Random, topic: str, *, nacked_share: float) -> None:
        super().__init__(asker, rng, queue.Queue())
        self._topic = topic
        self._nacked_share = nacked_share
        self._subscription = asker.client.subscribe(topic, SUBSCRIPTION, timeout_s=traffic.PATIENCE_S)

    def step(self) -> None:
        try:
            batch = self._subscription.receive(PAUSE_S)
        except tarry.DeadlineExceeded:
            # No daemon can be reached.
            return
        if batch is None:
            return
        if not self.asker.answers.reached(self._topic, batch.epoch):
            self._subscription.release(batch)
            return
        rows = _deliveries(self._topic, batch)
        self.asker.answers.came(NO_STREAM, ((each.position, *each[3:]) for each in rows), at_ms=batch.received_at_ms)
        positions = [each.position for each in rows]
        delay_ms = self.rng.randint(100, SOON_MS)
        is_nack = self.rng.random() < self._nacked_share
        asked = _settling(What.NACK if is_nack else What.ACK, rows, delay_ms, is_repeated=True)
        numbers = self.asker.answers.asked(positions, asked, f"a lane of {self.asker.via}")
        if is_nack:
            nacking = self._subscription.nack(batch, delay_ms=delay_ms)
            nacking.add_done_callback(lambda done: self._told(positions, numbers, lambda: done.result().ignored))
        else:
            acking = self._subscription.ack(batch)
            acking.add_done_callback(lambda done: self._told(positions, numbers, done.result))

    def close(self) -> None:
        try:
            self._subscription.flush(traffic.PATIENCE_S)
        finally:
            self._subscription.close()

    def _told(self, positions: Sequence[Identity], numbers: Sequence[int], answer: Callable[[], tarry.Ignored]) -> None:
        told: Sequence[Told] | tarry.TarryError
        try:
            told = _ignored(answer())
        except tarry.TarryError as error:
            told = error
        self.asker.answers.told(positions, numbers, told)


# Callers at each daemon: a direct call may wait for a former owner, and its caller with it.
REPEATING: Sequence[type[Worker]] = (Producer, Settler, Settler, Leaser, Registrar)
DIRECT: Sequence[type[Worker]] = (*[Producer] * 3, *[Settler] * 6, Leaser, *[Registrar] * 2)


class AnswerTraffic:
    """All callers at these daemons, while the block runs; its end waits for their answers."""

    def __init__(
        self, addresses: Sequence[str], answers: Answers, history: DeliveryHistory, rng: random.Random
    ) -> None:
        self._streams = [StreamSettler(address, answers, history, random.Random(rng.random())) for address in addresses]
        self._workers: list[Worker] = []
        self._lanes = [Asker(address, answers, is_direct=False) for address in addresses]
        for stream, lanes, address in zip(self._streams, self._lanes, addresses, strict=True):
            for is_direct, kinds in ((False, REPEATING), (True, DIRECT)):
                for kind in kinds:
                    asker = Asker(address, answers, is_direct=is_direct)
                    self._workers.append(kind(asker, random.Random(rng.random()), stream.inbox))
            self._workers += [LaneSettler(lanes, random.Random(rng.random()), each, nacked_share=0.2) for each in LANES]

    def __enter__(self) -> Self:
        for stream in self._streams:
            stream.__enter__()
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stopping.set()
        for worker in self._workers:
            worker.join(traffic.PATIENCE_S)
            worker.close()
        for stream in self._streams:
            stream.stop()
        for lanes in self._lanes:
            lanes.client.close()
