"""Which rows of a producer go together and when, in virtual time, and what becomes of each."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import numpy as np
import pytest

import tarry
from tarry import producer_batches, reasons
from tarry.v1 import delayed_delivery_pb2

LINGER_MS = 5
LINGER_S = LINGER_MS / 1000
Batch = producer_batches.Batch[int]


def make(*, rows_max: int = 10, outstanding_max: int = 100) -> producer_batches.Batches[int]:
    return producer_batches.Batches(linger_ms=LINGER_MS, rows_max=rows_max, outstanding_max=outstanding_max)


def put(batches: producer_batches.Batches[int], entry: int, now_s: float = 0.0, **time: Any) -> bool:
    """Row `entry`, whose answer is that number."""
    given = dict.fromkeys(("deliver_at_ms", "delay_ms", "delay_level", "key_hash")) | (time or {"delay_ms": 9})
    return batches.put(entry, 7, entry, **given, now_s=now_s)


def added(rows: int, **sparse: Any) -> tarry.AddResult:
    return tarry.AddResult.from_message(delayed_delivery_pb2.AddMessagesResponse(accepted=rows, **sparse))


def take(batches: producer_batches.Batches[int], now_s: float = 0.0) -> Batch:
    batch = batches.take(now_s)
    assert batch is not None
    return batch


def answer(batches: producer_batches.Batches[int], batch: Batch) -> None:
    assert batches.outcomes(batch, added(len(batch)), None) == [tarry.Added()] * len(batch)
    batches.remove(batch)


def test_rows_go_together_when_the_first_of_them_has_lingered() -> None:
    batches = make()
    assert batches.due_in_s(0.0) is None
    assert put(batches, 1, 10.0), "who sends has to know of it"
    assert not put(batches, 2, 10.0 + LINGER_S / 2)
    assert batches.due_in_s(10.0) == pytest.approx(LINGER_S)
    assert batches.take(10.0 + LINGER_S * 0.9) is None
    assert batches.due_in_s(10.0 + LINGER_S) == pytest.approx(0.0)
    batch = take(batches, 10.0 + LINGER_S * 1.001)
    assert batch.answers == [1, 2]
    assert not batches.is_waiting
    assert batches.take(99.0) is None


def test_a_full_batch_is_due_at_once_and_the_next_row_begins_another() -> None:
    batches = make(rows_max=3)
    assert [put(batches, entry) for entry in range(4)] == [True, False, True, True]
    assert batches.due_in_s(0.0) == 0.0
    assert take(batches).answers == [0, 1, 2]
    assert batches.take(0.0) is None
    assert take(batches, 1.0).answers == [3]


def test_rows_of_different_kinds_of_time_are_batches_of_their_own_in_their_order() -> None:
    batches = make()
    put(batches, 1, delay_ms=5)
    put(batches, 2, deliver_at_ms=6)
    put(batches, 3, delay_level=-7)
    put(batches, 4, delay_ms=8, key_hash=tarry.key_hash("key"))
    batches.flush()
    given = [take(batches).columns() for _ in range(3)]
    plain = [{name: column.tolist() for name, column in each.items()} for each in given]
    key = tarry.key_hash("key").item()
    assert plain == [
        {"ledger_id": [7], "entry_id": [1, 4], "delay_ms": [5, 8], "key_hash": [0, key]},
        {"ledger_id": [7], "entry_id": [2], "deliver_at_ms": [6]},
        {"ledger_id": [7], "entry_id": [3], "delay_level": [-7]},
    ]


def test_full_batches_of_one_kind_of_time_let_an_older_one_of_another_pass() -> None:
    batches = make(rows_max=2)
    put(batches, 0, deliver_at_ms=5)
    for entry in range(1, 6):
        put(batches, entry, delay_ms=5)
    assert take(batches).answers == [1, 2], "the other still lingers"
    assert take(batches, LINGER_S).answers == [0]
    assert take(batches, LINGER_S).answers == [3, 4]
    assert take(batches, LINGER_S).answers == [5]


def test_where_no_other_row_can_come_nothing_lingers() -> None:
    batches = make(outstanding_max=2)
    put(batches, 1)
    assert batches.may_put
    assert put(batches, 2)
    assert not batches.may_put
    assert batches.due_in_s(0.0) == 0.0
    answer(batches, take(batches))
    assert batches.may_put


def test_while_a_batch_is_on_its_way_the_next_one_fills_or_lingers() -> None:
    batches = make(rows_max=3, outstanding_max=4)
    for entry in range(4):
        put(batches, entry)
    first = take(batches)
    assert batches.take(0.0) is None, "the answer makes room for more"
    assert batches.due_in_s(0.0) == pytest.approx(LINGER_S)
    answer(batches, first)
    put(batches, 4)
    put(batches, 5)
    assert take(batches).answers == [3, 4, 5]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"entry_id": -1}, "entry_id is -1"),
        ({"ledger_id": 2**64}, "ledger_id is"),
        ({"ledger_id": "7"}, "ledger_id is '7'"),
        ({"entry_id": 1.0}, "entry_id is 1.0"),
        ({"entry_id": [1]}, r"entry_id is \[1\]"),
        ({"delay_ms": -5}, "delay_ms is -5"),
        ({"delay_ms": None, "delay_level": 2**31}, "delay_level is"),
        ({"key_hash": 2**32}, "key_hash is"),
        ({"key_hash": tarry.key_hash(["a", "b"])}, "key_hash is"),
        ({"delay_ms": None}, "exactly one of"),
        ({"delay_level": 1}, "exactly one of"),
    ],
)
def test_a_row_that_is_no_row_is_refused_at_once_and_its_neighbours_are_as_they_were(
    row: dict[str, Any], complaint: str
) -> None:
    batches = make()
    good: dict[str, Any] = {"ledger_id": 7, "deliver_at_ms": None, "delay_ms": 5, "delay_level": None, "key_hash": 3}
    for entry in (1, 2):
        with pytest.raises(tarry.InvalidArgument, match=complaint):
            batches.put(0, **{**good, "entry_id": 9, **row}, now_s=0.0)
        batches.put(entry, **good, entry_id=np.uint64(entry), now_s=0.0)
    assert batches.outstanding == 2
    columns = take(batches, 1.0).columns()
    assert {name: column.tolist() for name, column in columns.items()} == {
        "ledger_id": [7],
        "entry_id": [1, 2],
        "delay_ms": [5],
        "key_hash": [3],
    }, "what is the same for all is sent once"


def test_each_row_has_its_own_outcome() -> None:
    batches = make()
    for entry in range(6):
        put(batches, entry)
    batch = take(batches, 1.0)
    unknown: Any = 99
    long, seconds = tarry.RefusedReason.DELAY_TOO_LONG, tarry.RefusedReason.TIME_IN_SECONDS
    result = added(
        1,
        returned_index=[1],
        raised_index=[2],
        raised_deliver_at_ms=[77],
        refused_index=[3, 4, 5],
        refused_reason=[long.value, seconds.value, unknown],
    )
    outcomes = batches.outcomes(batch, result, None)
    assert outcomes is not None
    assert list(outcomes[:3]) == [tarry.Added(), tarry.Added(returned=True), tarry.Added(raised_deliver_at_ms=77)]
    assert [type(each) for each in outcomes[3:]] == [tarry.OutOfRange, tarry.InvalidArgument, tarry.InvalidArgument]
    assert "reason 99" in str(outcomes[5])
    with pytest.raises(tarry.OutOfRange):
        batches.raise_first_failure()
    batches.raise_first_failure()


def test_a_failed_batch_fails_each_of_its_rows_with_a_failure_of_its_own() -> None:
    batches = make()
    put(batches, 1)
    put(batches, 2)
    error = tarry.ResourceExhausted("too many rows", retry_after_ms=7)
    outcomes = batches.outcomes(take(batches, 1.0), None, error)
    assert outcomes is not None
    first, second = outcomes
    assert isinstance(first, tarry.ResourceExhausted)
    assert (str(first), first.retry_after_ms) == (str(error), 7)
    assert first is not second


def test_batches_that_a_daemon_does_not_know_how_to_return_rows_of_are_sent_again_without_that() -> None:
    batches = make(rows_max=1)
    put(batches, 1)
    put(batches, 2)
    on_their_way = [take(batches), take(batches)]
    assert {batch.on_invalid for batch in on_their_way} == {reasons.OnInvalid.RETURN}
    for batch in on_their_way:
        assert batches.outcomes(batch, None, tarry.Unsupported("on_invalid")) is None
        assert take(batches) is batch
        assert batch.on_invalid is reasons.OnInvalid.REFUSE
        answer(batches, batch)
    assert batches.outstanding == 0


def test_what_is_sent_again_goes_before_what_came_after_it() -> None:
    batches = make(rows_max=2)
    for entry in range(6):
        put(batches, entry)
    for batch in [take(batches), take(batches)]:
        assert batches.outcomes(batch, None, tarry.ResourceExhausted("2 rows, the limit is 1")) is None
    assert [take(batches).answers for _ in range(5)] == [[0], [1], [2], [3], [4, 5]]


def refused_for(batch: Batch, bad: set[int]) -> tarry.TarryError | None:
    return tarry.OutOfRange("delay_ms") if bad & set(batch.columns()["entry_id"].tolist()) else None


@pytest.mark.parametrize("bad", [set(), {0}, {63}, {17, 18}, set(range(64))])
def test_of_a_batch_that_is_refused_for_some_rows_only_these_fail(bad: set[int]) -> None:
    batches = make(rows_max=64)
    for entry in range(64):
        put(batches, entry)
    assert batches.outcomes(take(batches), None, tarry.Unsupported("on_invalid")) is None
    outcome_of: dict[int, producer_batches.Outcome] = {}
    sent = 0
    while (batch := batches.take(0.0)) is not None:
        sent += 1
        error = refused_for(batch, bad)
        outcomes = batches.outcomes(batch, None if error else added(len(batch)), error)
        if outcomes is not None:
            outcome_of.update(zip(batch.answers, outcomes, strict=True))
            batches.remove(batch)
    assert {entry for entry, each in outcome_of.items() if isinstance(each, tarry.OutOfRange)} == bad
    assert len(outcome_of) == 64
    assert sent <= 1 + 2 * 6 * len(bad)
    assert batches.outstanding == 0


def test_a_quota_that_lets_fewer_rows_through_is_tried_with_fewer() -> None:
    batches = make()
    put(batches, 1)
    put(batches, 2)
    lasting = tarry.ResourceExhausted("2 rows, the limit is 1")
    assert batches.outcomes(take(batches, 1.0), None, lasting) is None
    assert [take(batches).answers, take(batches).answers] == [[1], [2]]


def test_what_a_daemon_that_returns_rows_refuses_is_refused_as_a_whole() -> None:
    batches = make()
    put(batches, 1)
    put(batches, 2)
    outcomes = batches.outcomes(take(batches, 1.0), None, tarry.InvalidArgument("topic"))
    assert outcomes is not None
    assert [type(each) for each in outcomes] == [tarry.InvalidArgument] * 2


def test_a_flush_is_of_the_rows_before_it() -> None:
    batches = make()
    put(batches, 1, delay_ms=1)
    put(batches, 2, deliver_at_ms=1)
    number = batches.flush()
    put(batches, 3)
    before = [take(batches), take(batches)]
    assert batches.take(0.0) is None
    for batch in before:
        assert not batches.is_answered(number)
        answer(batches, batch)
    assert batches.is_answered(number)
    assert batches.outstanding == 1


def test_when_it_has_ended_nothing_comes_and_everything_that_is_left_is_told() -> None:
    batches = make(rows_max=2, outstanding_max=3)
    for entry in range(3):
        put(batches, entry)
    batch = take(batches)
    batches.end(tarry.Closed("closed"))
    assert batches.may_put
    with pytest.raises(tarry.Closed):
        put(batches, 4)
    assert sorted(entry for each in batches.left() for entry in each.answers) == [0, 1, 2]
    for each in batches.left():
        outcomes = batches.outcomes(each, None, tarry.Unsupported("on_invalid"))
        assert outcomes is not None, "nothing is sent again"
        batches.remove(each)
    batches.remove(batch)
    assert batches.outstanding == 0


@pytest.mark.parametrize("named", [{"linger_ms": -1}, {"rows_max": 0}, {"outstanding_max": 0}])
def test_what_makes_no_sense_is_refused(named: dict[str, Any]) -> None:
    with pytest.raises(tarry.InvalidArgument):
        producer_batches.Batches[int](**{"linger_ms": 1, "rows_max": 1, "outstanding_max": 1} | named)


@dataclasses.dataclass
class Story:
    """Rows come, batches are sent and answered, in an order that a seed decides; every tenth row is invalid."""

    dice: random.Random
    batches: producer_batches.Batches[int]
    now_s: float = 0.0
    rows: int = 0
    on_their_way: list[Batch] = dataclasses.field(default_factory=list)
    settled: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    failed: set[int] = dataclasses.field(default_factory=set)

    def step(self) -> None:
        self.dice.choice([self.add, self.add, self.add, self.wait, self.send, self.answer])()
        assert self.batches.outstanding == self.rows - len(self.settled)
        assert self.batches.outstanding <= 50

    def add(self) -> None:
        if self.batches.may_put and self.rows < 2_000:
            put(self.batches, self.rows, self.now_s, **{self.dice.choice(["delay_ms", "deliver_at_ms"]): 5})
            self.rows += 1

    def wait(self) -> None:
        self.now_s += self.dice.random() * LINGER_S

    def send(self) -> None:
        if (batch := self.batches.take(self.now_s)) is not None:
            assert 1 <= len(batch) <= 8
            self.on_their_way.append(batch)

    def answer(self) -> None:
        if not self.on_their_way:
            return
        batch = self.on_their_way.pop(self.dice.randrange(len(self.on_their_way)))
        error = refused_for(batch, set(range(0, 2_000, 10)))
        if batch.on_invalid is reasons.OnInvalid.RETURN:
            error = tarry.Unsupported("on_invalid")
        outcomes = self.batches.outcomes(batch, None if error else added(len(batch)), error)
        if outcomes is not None:
            self.settled.update(batch.answers)
            self.failed |= {row for row, each in zip(batch.answers, outcomes, strict=True) if each != tarry.Added()}
            self.batches.remove(batch)


@pytest.mark.parametrize("seed", range(10))
def test_every_row_is_settled_once_and_only_invalid_ones_fail(seed: int) -> None:
    story = Story(random.Random(seed), make(rows_max=8, outstanding_max=50))
    for _ in range(1_000_000):
        story.step()
        if story.rows == 2_000 and not story.batches.outstanding:
            break
    assert story.settled == collections.Counter(range(2_000))
    assert story.failed == set(range(0, 2_000, 10))
