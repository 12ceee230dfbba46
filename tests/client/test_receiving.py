"""One subscription's state through any sequence of events, against a model of the daemon.

No rows, permits or answers are lost or doubled, whatever breaks when.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable

import pytest
from google.rpc import code_pb2

import tarry
from tarry import attempts, receiving, retry, streams
from tarry.v1 import dispatch_pb2
from tests.client._support import fake_daemon

FEATURES = frozenset({attempts.HANDOUT_NAMES})
ROWS = 300
PERMITS = 8


@dataclasses.dataclass(eq=False)
class Answer:
    """What a request was settled with."""

    results: list[streams.Settled[Answer, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Connection:
    """One stream: what the client has sent and the daemon has not read, what comes back, the permits of the daemon."""

    sent: deque[bytes] = dataclasses.field(default_factory=deque)
    coming: deque[dispatch_pb2.SubscribeResponse] = dataclasses.field(default_factory=deque)
    permits: int = 0
    in_flight: set[int] = dataclasses.field(default_factory=set)

    def put(self, message: bytes) -> None:
        self.sent.append(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes]) -> None:
        self.sent.append(message())


class Story:
    """A client's state, the daemon's rows, and dice. Row n is entry n of ledger 7, due at 1000 + n."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.state: receiving.SharedReceiving[Answer] = receiving.SharedReceiving(
            "topic", "sub", permits=PERMITS, rows_max=3, policy=retry.RetryPolicy(uniform=lambda low, high: 0.0)
        )
        self.connection: Connection | None = None
        self.epoch = 1
        self.done: set[int] = set()
        self.nacked: set[int] = set()
        self.batches: list[tarry.Batch] = []
        self.answers: list[Answer] = []
        self.may_come_again: set[int] = set()
        self.received: dict[int, int] = dict.fromkeys(range(ROWS), 0)
        self.breaks = 0

    # The client's user.

    def take(self) -> None:
        batch = self.state.take(self.dice.choice([1, 2, 3, 100]))
        if batch is not None:
            self.batches.append(batch)

    def join(self) -> None:
        if len(self.batches) > 1 and self.dice.random() < 0.3:
            chosen = [self.batches.pop(self.dice.randrange(len(self.batches))) for _ in range(2)]
            self.batches.append(tarry.Batch.concat(chosen))

    def acknowledge(self) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(self.dice.randrange(len(self.batches)))
        if len(batch) > 1 and self.dice.random() < 0.5:
            self.batches.append(batch.take(slice(1, None)))
            batch = batch.take([0])
        if self.dice.random() < 0.1:
            self.state.release(batch)
            self.may_come_again |= set(batch.entry_id.tolist())
            return
        if self.dice.random() < 0.1:
            self.answers += self.state.extend(batch, Answer)
            self.batches.append(batch)
            return
        given = batch.positions if self.dice.random() < 0.3 else batch
        if self.dice.random() < 0.2:
            self.answers += self.state.nack(given, Answer, batch_index=None, key_hash=None, delay_ms=1)
            self.may_come_again |= set(batch.entry_id.tolist())
        else:
            self.answers += self.state.acknowledge(given, Answer)
            if self.dice.random() < 0.1:
                # It was passed on, and has failed there.
                self.answers += self.state.nack(given, Answer, batch_index=None, key_hash=None, forwarded=True)
                self.may_come_again |= set(batch.entry_id.tolist())

    # The network.

    def open(self) -> None:
        if self.connection is None:
            self.connection = Connection()
            self.state.opened(self.connection, FEATURES)

    def cut(self) -> None:
        if self.connection is not None:
            self.breaks += 1
            self.connection = None
            self.epoch += self.dice.random() < 0.5
            self.state.interrupted(tarry.Unavailable("cut"))

    def arrive(self) -> None:
        if self.connection is None or not self.connection.coming:
            return
        response = self.connection.coming.popleft()
        for row in response.messages.entry_id:
            self.received[row] += 1
        read = receiving.read(response.SerializeToString())
        for settled in self.state.received(read)[1]:
            settled.answer.results.append(settled)
            self.state.remove(settled.request_id)

    # The daemon.

    def serve(self) -> None:
        connection = self.connection
        if connection is None or not connection.sent:
            return
        request = dispatch_pb2.SubscribeRequest.FromString(connection.sent.popleft())
        match request.WhichOneof("request"):
            case "open":
                declared = list(request.open.held_entry_id)
                assert len(declared) == len(set(declared)), "nothing is declared twice"
                held = [row for row in declared if row not in self.done | self.nacked]
                connection.in_flight |= set(held)
                connection.coming.append(fake_daemon.opened(self.epoch, len(held)))
            case "flow":
                assert request.flow.permits > 0
                connection.permits += request.flow.permits
            case kind:
                self.confirm(connection, request, str(kind))

    def confirm(self, connection: Connection, request: dispatch_pb2.SubscribeRequest, kind: str) -> None:
        rows = set(getattr(request, kind).entry_id)
        ignored = len(rows & self.done)
        answer = fake_daemon.done(request, epoch=self.epoch, ignored=ignored)
        connection.coming.append(answer)
        if self.dice.random() < 0.1:
            answer.done.error.CopyFrom(fake_daemon.status(code_pb2.UNAVAILABLE))
        elif kind != "extend":
            connection.in_flight -= rows
            self.nacked -= rows
            if kind == "acknowledge":
                self.done |= rows
            elif request.negative_acknowledge.forwarded:
                self.nacked |= rows
                self.done -= rows
            else:
                self.nacked |= rows - self.done

    def redeliver(self) -> None:
        """Some of what is nacked is due again."""
        self.nacked = set(self.dice.sample(sorted(self.nacked), len(self.nacked) // 2))

    def hand_out(self) -> None:
        connection = self.connection
        if connection is None or not connection.permits:
            return
        ready = [row for row in range(ROWS) if row not in self.done | self.nacked | connection.in_flight]
        rows = ready[: self.dice.randint(1, connection.permits)]
        if rows:
            connection.permits -= len(rows)
            connection.in_flight |= set(rows)
            connection.coming.append(fake_daemon.messages(rows, epoch=self.epoch))

    def check(self) -> None:
        if self.connection is not None:
            flows = [dispatch_pb2.SubscribeRequest.FromString(message).flow.permits for message in self.connection.sent]
            on_the_way = sum(len(response.messages.entry_id) for response in self.connection.coming)
            assert self.connection.permits + sum(flows) + on_the_way + self.state.held <= PERMITS
        assert all(len(answer.results) <= 1 for answer in self.answers)

    def step(self, *, calm: bool) -> None:
        events = [
            *(self.take, self.join, self.acknowledge, self.open, self.arrive),
            *(self.serve, self.hand_out, self.redeliver),
        ]
        self.dice.choice(events)()
        if not calm and self.dice.random() < 0.03:
            self.cut()
        self.check()


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(30))
def test_every_row_comes_and_every_acknowledgement_is_settled_once_whatever_breaks(seed: int) -> None:
    story = Story(seed)
    for _ in range(1_000):
        story.step(calm=False)
    story.cut()
    for number in itertools.count():
        assert number < 50_000, f"it stands still: {len(story.done)} of {ROWS} rows are done"
        story.step(calm=True)
        settled = all(answer.results for answer in story.answers)
        if len(story.done) == ROWS and settled and not story.batches and not story.state.has_news:
            break
        if number % 1_000 == 999 and settled and set(range(ROWS)) - story.done <= story.may_come_again:
            # What was released comes again on another stream only.
            story.cut()
    assert story.breaks > 5
    assert story.state.is_confirmed
    assert story.state.held == 0
    assert all(answer.results[0].error is None for answer in story.answers)
    again = {row for row, times in story.received.items() if times > 1}
    assert again <= story.may_come_again, "what is held or being acknowledged is not sent again"


def test_what_ends_it_settles_everything_once() -> None:
    story = Story(1)
    while len(story.answers) < 3:
        story.step(calm=True)
    unsettled = [answer for answer in story.answers if not answer.results]
    assert unsettled, "nothing was on its way: the test shows nothing"
    ending = tarry.NotFound("it was deleted")
    left = story.state.failed(ending)
    assert [settled.answer for settled in left] == unsettled
    assert {settled.error for settled in left} == {ending}
    for settled in left:
        story.state.remove(settled.request_id)
    with pytest.raises(tarry.NotFound):
        story.state.acknowledge((7, 1, 1001), Answer)
