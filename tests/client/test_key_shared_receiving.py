"""One KEY_SHARED subscription's state through any sequence of events, against a model of the daemon.

Nothing is lost, nothing is at two consumers, and permits are kept, whatever breaks, joins, leaves, is taken back or
planned when.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from google.rpc import code_pb2

import tarry
from tarry import attempts, key_shared_receiving, receiving, stream_requests, streams
from tarry.v1 import dispatch_pb2
from tests.client._support import fake_daemon

DELAYED = 120
PLANNED = 80
ROWS = DELAYED + PLANNED
KEYS = 7
FEATURES = frozenset({attempts.HANDOUT_NAMES})
PERMITS = 6
HASH = 1 << 16


@dataclasses.dataclass(eq=False)
class Answer:
    """What a request was settled with."""

    results: list[streams.Settled[Answer, object]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Connection:
    """One stream, and what the daemon knows of it. Row n is entry n of ledger 7, its key n % KEYS."""

    sent: deque[bytes | Callable[[], bytes | None]] = dataclasses.field(default_factory=deque)
    coming: deque[dispatch_pb2.SubscribeResponse] = dataclasses.field(default_factory=deque)
    permits: dict[int, int] = dataclasses.field(default_factory=dict)
    """Of each consumer that is there."""
    holders: dict[int, int] = dataclasses.field(default_factory=dict)
    """Rows in flight."""
    waiting: set[int] = dataclasses.field(default_factory=set)
    """Planned rows that came to nobody yet."""
    has_planned_again: bool = False
    """Whether something that a consumer held was planned. What is acknowledged meanwhile may come twice, and the client
    counts more permits as used than were."""
    plans: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Rows of each request."""
    lingering: Callable[[], set[int]] = set
    """Rows whose acknowledgements the client has not sent yet."""
    later: list[Callable[[], bytes | None]] = dataclasses.field(default_factory=list)
    """What ends lingering."""

    def put(self, message: bytes) -> None:
        self.sent.append(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        if delay_s:
            self.later.append(message)
        else:
            # It is sent again.
            self.sent.append(message)

    def pass_time(self) -> None:
        for message in (later := self.later[:]):
            assert message() is None
        del self.later[: len(later)]

    def is_under_way(self, row: int) -> bool:
        """Whether something about it was sent and has not arrived: it is about what was, should it go out anew."""
        for message in self.sent:
            request = dispatch_pb2.SubscribeRequest.FromString(encoded(message))
            kind = request.WhichOneof("request")
            if kind in fake_daemon.TO_BE_CONFIRMED and row in getattr(request, str(kind)).entry_id:
                return True
        return row in self.lingering() or any(row in response.taken_back.entry_id for response in self.coming)

    def sent_to(self, number: int, response: dispatch_pb2.SubscribeResponse) -> list[int]:
        """Rows of an answer that are for a consumer."""
        messages, planned = response.messages, response.planned
        rows = self.plans.get(planned.request_id, list(messages.entry_id))
        numbers = planned.consumer_id or messages.consumer_id
        return [row for row, each in zip(rows, numbers, strict=True) if each == number]


def encoded(sent: bytes | Callable[[], bytes | None]) -> bytes:
    message = sent if isinstance(sent, bytes) else sent()
    assert message is not None
    return message


class Watched(key_shared_receiving.KeySharedReceiving[Answer]):
    """It shows which rows each consumer holds."""

    @property
    def held_by(self) -> dict[int, set[int]]:
        return {number: set(window.held.positions().entry_id.tolist()) for number, window in self._windows.items()}

    @property
    def lingering(self) -> set[int]:
        return {row for request in self._lingering for row in request.positions.entry_id.tolist()}


class Daemon:
    """Draining hashes and BLOCK_KEY, with dice. A row that is not planned is due at 1000 + n."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.connection: Connection | None = None
        self.epoch = 1
        self.done: set[int] = set()
        self.nacked: set[int] = set()
        self.ever_nacked: set[int] = set()
        self.owed = set(range(DELAYED))
        """What has a row: what was planned has one since it was nacked."""

    def columns(self, rows: list[int]) -> dict[str, list[int]]:
        return {
            "ledger_id": [7] * len(rows),
            "entry_id": rows,
            "deliver_at_ms": [1000 + row if row < DELAYED else 0 for row in rows],
        }

    def serve(self) -> None:
        connection = self.connection
        if connection is None or not connection.sent:
            return
        sent = connection.sent.popleft()
        request = dispatch_pb2.SubscribeRequest.FromString(encoded(sent))
        match request.WhichOneof("request"):
            case "open":
                self.open(connection, request.open)
            case "flow":
                if request.flow.consumer_id in connection.permits:
                    connection.permits[request.flow.consumer_id] += request.flow.permits
            case "add_consumer":
                if self.dice.random() < 0.2:
                    self.refuse(connection, request.add_consumer.request_id, code_pb2.INVALID_ARGUMENT)
                    return
                consumer = request.add_consumer.consumer
                assert consumer.consumer_id not in connection.permits
                connection.permits[consumer.consumer_id] = consumer.permits
                self.answer(connection, request.add_consumer.request_id)
            case "remove_consumer":
                number = request.remove_consumer.consumer_id
                connection.permits.pop(number, None)
                connection.waiting |= {row for row, each in connection.holders.items() if each == number} - set(
                    range(DELAYED)
                )
                connection.holders = {row: each for row, each in connection.holders.items() if each != number}
                self.answer(connection, request.remove_consumer.request_id)
            case "plan_dispatch":
                self.plan(connection, request.plan_dispatch)
            case "mark_delete":
                self.answer(connection, request.mark_delete.request_id)
            case kind:
                self.confirm(connection, getattr(request, str(kind)), str(kind))

    def answer(self, connection: Connection, request_id: int, ignored: int = 0) -> None:
        done = dispatch_pb2.Done(request_id=request_id, epoch=self.epoch, ignored=ignored)
        connection.coming.append(dispatch_pb2.SubscribeResponse(done=done))

    def refuse(self, connection: Connection, request_id: int, code: int) -> None:
        done = dispatch_pb2.Done(request_id=request_id, epoch=self.epoch, error=fake_daemon.status(code))
        connection.coming.append(dispatch_pb2.SubscribeResponse(done=done))

    def open(self, connection: Connection, opening: dispatch_pb2.Open) -> None:
        assert opening.type == dispatch_pb2.SUBSCRIPTION_TYPE_KEY_SHARED
        connection.permits = {each.consumer_id: each.permits for each in opening.consumers}
        declared = list(opening.held_entry_id)
        assert len(declared) == len(opening.held_consumer_id)
        # Without counts a negative acknowledgement that is repeated may be about a newer hand-out: that comes twice.
        once = [row for row in declared if row not in self.ever_nacked]
        assert len(once) == len(set(once)), "nothing is declared twice"
        hashes = list(opening.held_key_hash) or [0] * len(declared)
        not_held = []
        for index, (row, number, key_hash) in enumerate(zip(declared, opening.held_consumer_id, hashes, strict=True)):
            assert number in connection.permits
            assert key_hash == (row % KEYS + HASH if row >= DELAYED else 0)
            if row in self.done | self.nacked or self.dice.random() < 0.1 or self.is_elsewhere(connection, row, number):
                not_held.append(index)
            else:
                connection.holders[row] = number
        answer = fake_daemon.opened(self.epoch, len(declared) - len(not_held))
        answer.opened.not_held.extend(not_held)
        connection.coming.append(answer)

    def is_elsewhere(self, connection: Connection, row: int, number: int) -> bool:
        return any(other % KEYS == row % KEYS and each != number for other, each in connection.holders.items())

    def is_blocked(self, row: int) -> bool:
        return any(other % KEYS == row % KEYS and other != row for other in self.nacked)

    def is_blocked_behind(self, row: int) -> bool:
        return any(other % KEYS == row % KEYS and other < row for other in self.nacked)

    def owner(self, connection: Connection, row: int) -> int | None:
        """Who may have it now."""
        if not connection.permits:
            return None
        numbers = sorted(connection.permits)
        number = numbers[row % KEYS % len(numbers)]
        may = connection.permits[number] and not self.is_blocked(row) and not self.is_elsewhere(connection, row, number)
        return number if may and not connection.is_under_way(row) else None

    def plan(self, connection: Connection, plan: dispatch_pb2.PlanDispatch) -> None:
        if self.dice.random() < 0.1:
            code = self.dice.choice([code_pb2.UNAVAILABLE, code_pb2.INVALID_ARGUMENT])
            self.refuse(connection, plan.request_id, code)
            return
        numbers = []
        for row in plan.entry_id:
            if row in connection.holders or row in self.done | self.owed | connection.waiting:
                connection.has_planned_again |= row in connection.holders
                numbers.append(connection.holders.get(row, 0))
                continue
            number = self.owner(connection, row)
            if number is None or any(each % KEYS == row % KEYS for each in connection.waiting):
                connection.waiting.add(row)
                numbers.append(0)
                continue
            connection.permits[number] -= 1
            connection.holders[row] = number
            numbers.append(number)
        connection.plans[plan.request_id] = list(plan.entry_id)
        planned = dispatch_pb2.Planned(request_id=plan.request_id, epoch=self.epoch, consumer_id=numbers)
        connection.coming.append(dispatch_pb2.SubscribeResponse(planned=planned))

    def confirm(
        self,
        connection: Connection,
        request: dispatch_pb2.Acknowledge | dispatch_pb2.NegativeAcknowledge | dispatch_pb2.Extend,
        kind: str,
    ) -> None:
        if self.dice.random() < 0.1 or not request.entry_id:
            code = code_pb2.UNAVAILABLE if request.entry_id else code_pb2.INVALID_ARGUMENT
            self.refuse(connection, request.request_id, code)
            return
        # What it knows nothing of is acknowledged in the log alone.
        known = (self.owed | connection.waiting) - connection.holders.keys()
        blocked = {row for row in request.entry_id if row in known and self.is_blocked_behind(row)}
        rows = set(request.entry_id) - self.done - blocked
        self.answer(connection, request.request_id, len(request.entry_id) - len(rows))
        if kind == "extend":
            return
        connection.waiting -= rows
        for row in rows:
            connection.holders.pop(row, None)
        self.nacked -= rows
        if kind == "acknowledge":
            self.done |= rows
            return
        self.nacked |= rows
        self.ever_nacked |= rows
        self.owed |= rows
        behind = [
            row for row in connection.holders if any(row % KEYS == other % KEYS and row > other for other in rows)
        ]
        if behind:
            numbers = [connection.holders.pop(row) for row in behind]
            connection.waiting |= {row for row in behind if row >= DELAYED}
            taken = dispatch_pb2.TakenBack(epoch=self.epoch, consumer_id=numbers, **self.columns(behind))
            connection.coming.append(dispatch_pb2.SubscribeResponse(taken_back=taken))

    def redeliver(self) -> None:
        """Some of what is nacked is due again."""
        self.nacked -= set(self.dice.sample(sorted(self.nacked), len(self.nacked) // 2 + len(self.nacked) % 2))

    def hand_out(self) -> None:
        connection = self.connection
        if connection is None:
            return
        rows, numbers = [], []
        for row in sorted(self.owed | connection.waiting):
            if row in self.done | self.nacked or row in connection.holders or self.dice.random() < 0.3:
                continue
            number = self.owner(connection, row)
            if number is not None:
                connection.permits[number] -= 1
                connection.holders[row] = number
                connection.waiting.discard(row)
                rows.append(row)
                numbers.append(number)
        if rows:
            hashes = [row % KEYS + HASH for row in rows]
            sent = dispatch_pb2.Messages(epoch=self.epoch, key_hash=hashes, consumer_id=numbers, **self.columns(rows))
            connection.coming.append(dispatch_pb2.SubscribeResponse(messages=sent))


class Story:
    """A client's state, its user, and the daemon."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.daemon = Daemon(self.dice)
        first = [tarry.Consumer(f"first-{number}", permits=PERMITS) for number in range(2)]
        self.state = Watched(
            "topic",
            "sub",
            first,
            rows_max=5,
            bytes_max=lambda: 1 << 20,
            policy=attempts.RetryPolicy(uniform=lambda low, high: 0.0),
            ack_linger=stream_requests.AckLinger(seed % 2 * 5),
        )
        self.numbers = itertools.count()
        self.batches: list[tarry.ConsumerBatch] = []
        self.given_back: set[int] = set()
        self.nacked: set[int] = set()
        """Rows that ever were: a negative acknowledgement that is repeated may be about what came since."""
        self.answers: list[Answer] = []
        self.plans: list[Answer] = []
        self.next_planned = DELAYED
        self.plans_anew = False
        self.breaks = self.taken_back = self.told_to_plan = 0

    # The client's user.

    def held(self) -> list[int]:
        return [row for batch in self.batches for row in batch.entry_id.tolist()]

    def receive(self, batch: tarry.ConsumerBatch) -> None:
        again = set(self.held()) & set(batch.entry_id.tolist())
        assert again <= self.nacked, "what is held does not come again"
        assert batch.consumer in self.state.consumers
        self.batches.append(batch)

    def take(self) -> None:
        match self.state.take(self.dice.choice([1, 2, 3, 100])):
            case tarry.ConsumerBatch() as batch:
                self.receive(batch)
            case tarry.TakenBack() as taken:
                self.taken_back += 1
                gone = set(taken.positions.entry_id.tolist())
                self.given_back -= gone
                self.keep(lambda batch, row: row not in gone or batch.consumer is not taken.consumer)
            case tarry.PlanAgain():
                self.told_to_plan += 1
                self.plans_anew, self.next_planned = True, DELAYED

    def put_together(self) -> None:
        """Two batches of a consumer, those that it got last."""
        of_one = [batch for batch in self.batches if batch.consumer is self.batches[-1].consumer][-2:]
        if len(of_one) == 2 and self.dice.random() < 0.3:
            self.batches = [batch for batch in self.batches if all(batch is not each for each in of_one)]
            self.batches.append(tarry.Batch.concat(of_one))

    def keep(self, wanted: object) -> None:
        assert callable(wanted)
        kept = [batch.take([wanted(batch, row) for row in batch.entry_id.tolist()]) for batch in self.batches]
        self.batches = [batch for batch in kept if len(batch)]

    def acknowledge(self) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(self.dice.randrange(len(self.batches)))
        if len(batch) > 1 and self.dice.random() < 0.5:
            self.batches.append(batch.take(slice(1, None)))
            batch = batch.take([0])
        given = batch.positions if self.dice.random() < 0.3 else batch
        self.given_back |= set(batch.entry_id.tolist())
        if self.dice.random() < 0.1:
            self.answers += self.state.extend(given, Answer)
            self.batches.append(batch)
            self.given_back -= set(batch.entry_id.tolist())
        elif self.dice.random() < 0.2:
            self.nacked |= set(batch.entry_id.tolist())
            hashes = None if given is batch else batch.key_hash
            self.answers += self.state.nack(given, Answer, batch_index=None, key_hash=hashes, delay_ms=1)
        else:
            self.answers += self.state.acknowledge(given, Answer)

    def plan(self) -> None:
        """What is not acknowledged, in the order of the log; after a break from the beginning."""
        if self.next_planned >= ROWS or self.daemon.dice.random() < 0.5:
            return
        rows = list(range(self.next_planned, min(ROWS, self.next_planned + self.dice.randint(1, 12))))
        given = [row for row in rows if row not in self.given_back]
        try:
            hashes = np.array(given, np.uint32) % KEYS + HASH
            if given:
                made = self.state.plan(7, given, hashes, Answer, anew=self.plans_anew)
                self.plans += made
                self.plans_anew = False
            self.next_planned = rows[-1] + 1
        except tarry.PlanLost:
            assert self.breaks

    def join(self) -> None:
        if len(self.state.consumers) < 5 and self.dice.random() < 0.2:
            consumer = tarry.Consumer(f"consumer-{next(self.numbers)}", permits=PERMITS)
            self.answers.append(self.state.add_consumer(consumer, Answer))

    def leave(self) -> None:
        if len(self.state.consumers) > 2 and self.dice.random() < 0.2:
            consumer = self.dice.choice(self.state.consumers)
            self.answers.append(self.state.remove_consumer(consumer, Answer))
            self.keep(lambda batch, row: batch.consumer is not consumer)

    # The network.

    def open(self) -> None:
        if self.daemon.connection is None:
            self.daemon.connection = Connection(lingering=lambda: self.state.lingering)
            self.state.opened(self.daemon.connection, FEATURES)

    def cut(self) -> None:
        if self.daemon.connection is not None:
            self.breaks += 1
            self.daemon.connection = None
            self.daemon.epoch += self.dice.random() < 0.5
            self.settle(self.state.interrupted(tarry.Unavailable("cut")))

    def pass_time(self) -> None:
        if self.daemon.connection is not None:
            self.daemon.connection.pass_time()

    def arrive(self) -> None:
        connection = self.daemon.connection
        if connection is not None and connection.coming:
            read = receiving.read(connection.coming.popleft().SerializeToString())
            self.settle(self.state.received(read)[1])

    def settle(self, settled: list[streams.Settled[Answer, object]]) -> None:
        for each in settled:
            assert not each.answer.results, "settled once"
            each.answer.results.append(each)
            self.state.remove(each.request_id)
            if isinstance(each.error, tarry.InvalidArgument) and each.answer in self.plans:
                # A plan that is wrong is not planned: the dispatcher mends it and goes on.
                self.next_planned = DELAYED

    @property
    def is_settled(self) -> bool:
        return all(answer.results for answer in self.answers + self.plans)

    def check(self) -> None:
        connection = self.daemon.connection
        if connection is None:
            return
        flows: dict[int, int] = {}
        for message in connection.sent:
            if not isinstance(message, bytes):
                continue
            flow = dispatch_pb2.SubscribeRequest.FromString(message).flow
            flows[flow.consumer_id] = flows.get(flow.consumer_id, 0) + flow.permits
        if connection.has_planned_again:
            return
        held_by = self.state.held_by
        for number, permits in connection.permits.items():
            if number in held_by:
                coming = {row for response in connection.coming for row in connection.sent_to(number, response)}
                assert permits + flows.get(number, 0) + len(held_by[number]) + len(coming) <= PERMITS

    def step(self, *, calm: bool) -> None:
        daemon = self.daemon
        events = [
            *(
                self.take,
                self.take,
                self.put_together,
                self.acknowledge,
                self.open,
                self.arrive,
                self.arrive,
                self.plan,
            ),
            *(daemon.serve, daemon.serve, daemon.hand_out, daemon.redeliver, self.pass_time),
        ]
        if not calm:
            events += [self.join, self.leave]
        self.dice.choice(events)()
        if not calm and self.dice.random() < 0.01:
            self.cut()
        self.check()


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_at_one_consumer_and_done_in_the_end_whatever_breaks(seed: int) -> None:
    story = Story(seed)
    for _ in range(2_000):
        story.step(calm=False)
    story.cut()
    for number in itertools.count():
        assert number < 60_000, f"it stands still: {len(story.daemon.done)} of {ROWS} rows are done"
        story.step(calm=True)
        if len(story.daemon.done) == ROWS and not story.batches and not story.state.has_news and story.is_settled:
            break
        if number % 5_000 == 4_999:
            # A dispatcher that looks through its log again, and finds what is not acknowledged: also what it had
            # acknowledged for a consumer that left before it was told that this was taken back.
            story.next_planned = DELAYED
            if story.is_settled:
                story.given_back &= story.daemon.done
    assert story.breaks > 3
    assert story.taken_back > 3
    assert story.told_to_plan > 1
    assert story.state.is_confirmed
    assert story.state.held == 0
    failed = {type(answer.results[0].error) for answer in story.answers + story.plans}
    assert failed <= {type(None), tarry.InvalidArgument, tarry.PlanLost}
