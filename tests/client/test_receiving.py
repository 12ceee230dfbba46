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
from tarry import attempts, receiving, stream_requests, streams
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
    later: list[Callable[[], bytes | None]] = dataclasses.field(default_factory=list)
    permits: int = 0
    in_flight: set[int] = dataclasses.field(default_factory=set)

    def put(self, message: bytes) -> None:
        self.sent.append(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        self.later.append(message)

    def pass_time(self) -> None:
        """What was to be sent later is sent."""
        for message in (later := self.later[:]):
            if (ready := message()) is not None:
                self.put(ready)
        del self.later[: len(later)]


class Story:
    """A client's state, the daemon's rows, and dice. Row n is entry n of ledger 7, due at 1000 + n."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.state: receiving.SharedReceiving[Answer] = receiving.SharedReceiving(
            "topic",
            "sub",
            permits=PERMITS,
            rows_max=4,
            bytes_max=lambda: 1 << 20,
            policy=attempts.RetryPolicy(uniform=lambda low, high: 0.0),
            ack_linger=stream_requests.AckLinger(seed % 2 * 5),
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

    def pass_time(self) -> None:
        if self.connection is not None:
            self.connection.pass_time()

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
            *(self.serve, self.hand_out, self.redeliver, self.pass_time),
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


class Wire:
    """A stream: what was sent on it, and what is to be sent later."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.later: list[Callable[[], bytes | None]] = []

    def put(self, message: bytes) -> None:
        self.sent.append(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        self.later.append(message)

    def pass_time(self) -> None:
        """What was to be sent later is sent."""
        later, self.later = self.later, []
        for message in later:
            if (ready := message()) is not None:
                self.put(ready)

    def requests(self) -> list[dispatch_pb2.SubscribeRequest]:
        """What was sent since the last call, but for permits."""
        read = [dispatch_pb2.SubscribeRequest.FromString(message) for message in self.sent]
        self.sent = []
        return [request for request in read if not request.HasField("flow")]


def lingering(
    *, rows_max: int = 100, bytes_max: int = 1 << 20, features: frozenset[str] = FEATURES
) -> tuple[receiving.SharedReceiving[Answer], Wire]:
    """A subscription whose acknowledgements linger, on a stream that is open, with 20 positions that are taken."""
    state: receiving.SharedReceiving[Answer] = receiving.SharedReceiving(
        "topic",
        "sub",
        permits=20,
        rows_max=rows_max,
        bytes_max=lambda: bytes_max,
        policy=attempts.RetryPolicy(uniform=lambda low, high: 0.0),
        ack_linger=stream_requests.AckLinger(5),
    )
    wire = reopened(state, features=features)
    tell(state, fake_daemon.messages(range(20)))
    assert state.take() is not None
    wire.requests()
    return state, wire


def reopened(state: receiving.SharedReceiving[Answer], *, features: frozenset[str] = FEATURES, epoch: int = 1) -> Wire:
    wire = Wire()
    state.opened(wire, features)
    tell(state, fake_daemon.opened(epoch))
    return wire


def tell(state: receiving.SharedReceiving[Answer], response: dispatch_pb2.SubscribeResponse) -> None:
    """The daemon's answer comes, and what it settles is settled."""
    for settled in state.received(receiving.read(response.SerializeToString()))[1]:
        settled.answer.results.append(settled)
        state.remove(settled.request_id)


def acknowledge(state: receiving.SharedReceiving[Answer], *entries: int) -> Answer:
    (answer,) = state.acknowledge(([7] * len(entries), list(entries), [1000 + entry for entry in entries]), Answer)
    return answer


def entries_of(request: dispatch_pb2.SubscribeRequest) -> list[int]:
    kind = request.WhichOneof("request")
    assert kind is not None
    return list(getattr(request, kind).entry_id)


def test_acknowledgements_within_the_linger_are_one_request_and_each_is_told_its_own() -> None:
    state, wire = lingering()
    answers = [acknowledge(state, 0, 1), acknowledge(state, 2), acknowledge(state, 3, 4, 5)]
    assert wire.requests() == []
    assert state.held == 14, "what lingers is held no longer"
    assert not state.is_confirmed
    wire.pass_time()
    (request,) = wire.requests()
    assert entries_of(request) == [0, 1, 2, 3, 4, 5]
    response = fake_daemon.done(request, ignored=3)
    response.done.ignored_index.extend([1, 3, 5])
    not_there, other_delivery = dispatch_pb2.IGNORED_REASON_NOT_THERE, dispatch_pb2.IGNORED_REASON_OTHER_DELIVERY
    response.done.ignored_reason.extend([not_there, other_delivery, dispatch_pb2.IGNORED_REASON_TAKEN_BACK])
    tell(state, response)
    told = [answer.results[0].result for answer in answers]
    assert all(isinstance(each, tarry.Ignored) for each in told)
    assert [list(each.items()) for each in told if isinstance(each, tarry.Ignored)] == [
        [(1, tarry.IgnoredReason.NOT_THERE)],
        [],
        [(0, tarry.IgnoredReason.OTHER_DELIVERY), (2, tarry.IgnoredReason.TAKEN_BACK)],
    ]
    assert told == [1, 0, 2]
    assert state.is_confirmed
    assert all(len(answer.results) == 1 for answer in answers)


def test_permits_come_back_while_acknowledgements_linger() -> None:
    state, wire = lingering()
    acknowledge(state, *range(10))
    flows = [dispatch_pb2.SubscribeRequest.FromString(message).flow.permits for message in wire.sent]
    assert flows == [10]


def test_whatever_else_is_sent_sends_first_what_lingers() -> None:
    state, wire = lingering()
    acknowledge(state, 0)
    state.nack((7, 1, 1001), Answer, batch_index=None, key_hash=None)
    acknowledge(state, 2)
    state.extend((7, 3, 1003), Answer)
    acknowledge(state, 4)
    state.acknowledge_unconfirmed((7, 5, 1005))
    acknowledge(state, 6)
    state.send_lingering()
    requests = wire.requests()
    assert [entry for request in requests for entry in entries_of(request)] == list(range(7))
    kinds = [request.WhichOneof("request") for request in requests]
    assert kinds == [
        *("acknowledge", "negative_acknowledge", "acknowledge", "extend", "acknowledge", "acknowledge", "acknowledge")
    ]
    wire.pass_time()
    assert wire.requests() == []


def test_as_much_as_one_request_holds_does_not_linger() -> None:
    state, wire = lingering(rows_max=4)
    acknowledge(state, 0, 1, 2)
    acknowledge(state, 3, 4)
    assert [entries_of(request) for request in wire.requests()] == [[0, 1, 2], [3, 4]]
    acknowledge(state, 5)
    wire.pass_time()
    assert [entries_of(request) for request in wire.requests()] == [[5]]


def test_what_names_any_hand_out_does_not_make_others_do_so() -> None:
    state, wire = lingering()
    acknowledge(state, 0)
    state.acknowledge((7, 1, 1001, None, 3), Answer)
    state.acknowledge((7, 2, 1002, None, 0), Answer)
    wire.pass_time()
    counts = [list(request.acknowledge.redelivery_count) for request in wire.requests()]
    assert counts == [[], [3, 0]]


def test_what_lingers_when_the_stream_breaks_is_declared_and_sent_on_the_next() -> None:
    state, wire = lingering()
    sent = acknowledge(state, 0, 1)
    wire.pass_time()
    assert len(wire.requests()) == 1
    answers = [sent, acknowledge(state, 2), acknowledge(state, 3)]
    state.interrupted(tarry.Unavailable("cut"))
    answers.append(acknowledge(state, 4))
    again = reopened(state, epoch=2)
    opening, request = again.requests()
    assert sorted(opening.open.held_entry_id) == list(range(20))
    assert entries_of(request) == [0, 1, 2, 3, 4]
    wire.pass_time()
    assert wire.requests() == again.requests() == []
    tell(state, fake_daemon.done(request, epoch=2))
    assert all(len(answer.results) == 1 for answer in answers)


def test_a_refusal_for_now_repeats_what_was_joined() -> None:
    state, wire = lingering()
    answers = [acknowledge(state, 0), acknowledge(state, 1)]
    wire.pass_time()
    (request,) = wire.requests()
    refusal = fake_daemon.done(request)
    refusal.done.error.CopyFrom(fake_daemon.status(code_pb2.UNAVAILABLE))
    tell(state, refusal)
    wire.pass_time()
    (again,) = wire.requests()
    assert again == request
    tell(state, fake_daemon.done(again))
    assert [answer.results[0].result for answer in answers] == [0, 0]


def test_what_is_wrong_with_one_acknowledgement_does_not_fail_those_that_it_was_joined_with() -> None:
    state, wire = lingering()
    answers = [acknowledge(state, 0), acknowledge(state, 1)]
    wire.pass_time()
    (request,) = wire.requests()
    wrong = fake_daemon.done(request)
    wrong.done.error.CopyFrom(fake_daemon.status(code_pb2.INVALID_ARGUMENT))
    tell(state, wrong)
    first, second = wire.requests()
    wrong.done.request_id = first.acknowledge.request_id
    tell(state, wrong)
    tell(state, fake_daemon.done(second))
    assert isinstance(answers[0].results[0].error, tarry.InvalidArgument)
    assert answers[1].results[0].result == 0
    assert state.is_confirmed


def test_nothing_lingers_where_the_daemon_does_not_say_which_it_ignored() -> None:
    state, wire = lingering(features=frozenset())
    acknowledge(state, 0)
    assert [entries_of(request) for request in wire.requests()] == [[0]]


def test_what_ends_it_settles_what_lingers() -> None:
    state, _ = lingering()
    answer = acknowledge(state, 0)
    assert [settled.answer for settled in state.failed(tarry.NotFound("it was deleted"))] == [answer]


def test_held_positions_are_declared_in_several_messages_where_the_daemon_knows_that() -> None:
    state, wire = lingering(bytes_max=4096 + 5 * 40)
    assert len(wire.requests()) == 0
    old, new = Wire(), Wire()
    state.opened(old, FEATURES)
    (whole,) = old.requests()
    assert len(whole.open.held_entry_id) == 20
    state.opened(new, FEATURES | {attempts.HELD_MORE})
    parts = [each.open for each in new.requests()]
    assert [list(each.held_entry_id) for each in parts] == [list(range(first, first + 5)) for first in (0, 5, 10, 15)]
    assert [each.more_held for each in parts] == [True, True, True, False]


def test_acknowledgements_have_no_more_positions_than_a_request_holds() -> None:
    state, wire = lingering(bytes_max=4096 + 5 * 44)
    given = [7] * 20, list(range(20)), list(range(1000, 1020))
    assert len(state.acknowledge(given, Answer)) == 4
    wire.pass_time()
    assert [len(entries_of(each)) for each in wire.requests() if each.HasField("acknowledge")] == [5, 5, 5, 5]
