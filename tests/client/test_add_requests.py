"""The requests of an add stream through any sequence of events: each is settled once, with what became of its rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from google.rpc import code_pb2

import tarry
from tarry import add_requests, attempts, streams
from tarry.v1 import delayed_delivery_pb2
from tests.client._support import fake_daemon

REQUESTS = 200
IN_FLIGHT = 5


@dataclasses.dataclass(eq=False)
class Answer:
    """What request number `entry` was settled with."""

    entry: int
    results: list[streams.Settled[Answer, tarry.AddResult]] = dataclasses.field(default_factory=list)


class Connection:
    """What was sent on one stream and is not answered."""

    def __init__(self) -> None:
        self.requests: list[delayed_delivery_pb2.StreamAddMessagesRequest] = []

    def put(self, message: bytes) -> None:
        self.requests.append(delayed_delivery_pb2.StreamAddMessagesRequest.FromString(message))

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        ready = message()
        assert ready is not None
        self.put(ready)


class Story:
    """Request number n adds entry n; entries that end in 7 are refused for good."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.requests: add_requests.AddRequests[Answer] = add_requests.AddRequests(
            "topic",
            None,
            in_flight=IN_FLIGHT,
            rows_max=10,
            bytes_max=lambda: 2**20,
            policy=attempts.RetryPolicy(uniform=lambda low, high: 0.0),
        )
        self.connection: Connection | None = None
        self.answers: list[Answer] = []
        self.stored: set[int] = set()

    def begin(self) -> None:
        if len(self.answers) == REQUESTS or not self.requests.may_begin:
            return
        entry = len(self.answers)
        ((first, add),) = self.requests.encode(
            7,
            entry,
            deliver_at_ms=None,
            delay_ms=5,
            key_hash=None,
            delay_level=None,
            already_due=tarry.AlreadyDue.DELIVER,
            on_invalid=tarry.OnInvalid.REFUSE,
        )
        assert first == 0
        self.answers.append(Answer(entry))
        self.requests.begin(add, self.answers[-1], attempts.Deadline.after(fake_daemon.WAIT_S))

    def open(self) -> None:
        if self.connection is None and self.requests.wants_stream:
            self.connection = Connection()
            assert self.requests.opened(self.connection, frozenset()) == []
            entries = [request.add.entry_id[0] for request in self.connection.requests]
            assert entries == [answer.entry for answer in self.answers if not answer.results], "in their order"

    def cut(self) -> None:
        if self.connection is not None:
            self.connection = None
            self.settle(self.requests.interrupted(tarry.Unavailable("cut")))

    def answer(self) -> None:
        if self.connection is None or not self.connection.requests:
            return
        request = self.connection.requests.pop(self.dice.randrange(len(self.connection.requests)))
        entry = request.add.entry_id[0]
        if entry % 10 == 7:
            response = fake_daemon.refused(request, fake_daemon.status(code_pb2.OUT_OF_RANGE))
        elif self.dice.random() < 0.1:
            response = fake_daemon.refused(request, fake_daemon.status(code_pb2.UNAVAILABLE))
        else:
            self.stored.add(entry)
            # The answer is lost with the stream: the same request comes again.
            if self.dice.random() < 0.1:
                self.cut()
                return
            response = fake_daemon.added(request)
        settled = self.requests.received(response)
        self.settle([] if settled is None else [settled])

    def settle(self, settled: list[add_requests.Settled[Answer]]) -> None:
        for each in settled:
            each.answer.results.append(each)
            self.requests.remove(each.request_id)

    def step(self, *, calm: bool) -> None:
        self.dice.choice([self.begin, self.open, self.answer])()
        if not calm and self.dice.random() < 0.03:
            self.cut()
        assert len(self.requests) <= IN_FLIGHT
        assert len(self.requests) == sum(not answer.results for answer in self.answers)


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_settled_once_with_what_became_of_it(seed: int) -> None:
    story = Story(seed)
    for number in range(100_000):
        # Once it is calm, nothing is sent again for the sake of another break.
        story.step(calm=number > 400)
        if len(story.answers) == REQUESTS and not story.requests:
            break
    else:
        pytest.fail(f"it stands still after {number} steps: {len(story.requests)} requests are in flight")
    for answer in story.answers:
        (settled,) = answer.results
        if answer.entry % 10 == 7:
            assert isinstance(settled.error, tarry.OutOfRange)
        else:
            assert settled.error is None
            assert answer.entry in story.stored
    with pytest.raises(tarry.OutOfRange):
        story.requests.raise_first_failure()
    story.requests.raise_first_failure()


def test_what_ends_it_settles_everything_once() -> None:
    story = Story(1)
    while len(story.requests) < 3:
        story.begin()
    ending = tarry.Unauthenticated("no token")
    left = story.requests.failed(ending)
    story.settle(left)
    assert [settled.answer for settled in left] == story.answers
    assert not story.requests
    assert story.requests.may_begin
    with pytest.raises(tarry.Unauthenticated):
        story.requests.begin(b"", Answer(0), attempts.Deadline.after(1))


def test_a_request_whose_time_is_over_is_given_up_when_the_stream_breaks() -> None:
    story = Story(1)
    story.requests.begin(b"late", late := Answer(0), attempts.Deadline.after(0))
    story.requests.begin(b"in time", Answer(1), attempts.Deadline.after(fake_daemon.WAIT_S))
    (settled,) = story.requests.interrupted(tarry.Unavailable("the store is gone"))
    assert settled.answer is late
    assert isinstance(settled.error, tarry.DeadlineExceeded)
    assert "the store is gone" in str(settled.error)
