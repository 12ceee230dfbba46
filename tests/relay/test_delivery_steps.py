"""The way of messages through a relay, in any order of answers, failures, lost lanes and restarts, against a world that
remembers what became durable.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tarry_relay import delivery_steps
from tarry_relay.delivery_steps import Answer, CannotBeRefused, Item, Passage, Row, Step, Work
from tests.planted import registry

READ_AS = (Step.READ, Step.DIRECT, Step.RETURNED, Step.WITHDRAWAL, Step.BAD)
ALONE = tuple(work for work in Work if work not in (Work.PRODUCE, Work.COMMIT))
ANSWERS = st.sampled_from(Answer)
DEAD = "dead"
RESULTS = "results"
WITHOUT_PAYLOAD = (Step.ADDED, Step.HANDED_OUT, Step.PARKED, Step.PRODUCED, Step.LOST)
SIZE_MAX = 401


def size_of(number: int) -> int:
    """How many bytes the payload of a message has."""
    return 1 + number % 5 * 100


def named_by(number: int) -> int:
    """Which message a withdrawal cancels: one before it, or, below 0, one that there never was."""
    return number - 1 - number % 3


@dataclasses.dataclass
class World:
    """What outlives a relay, by the number of a message in the log."""

    log: list[Step] = dataclasses.field(default_factory=list)
    committed: int = 0
    safe: set[int] = dataclasses.field(default_factory=set)
    """Durable elsewhere: in Tarry, at a target, among dead letters."""
    in_tarry: set[int] = dataclasses.field(default_factory=set)
    produced: set[int] = dataclasses.field(default_factory=set)
    refused: set[int] = dataclasses.field(default_factory=set)
    """Fetching or publishing was refused for good."""
    ended: set[int] = dataclasses.field(default_factory=set)
    cancelled: set[int] = dataclasses.field(default_factory=set)
    """What somebody may have been told that it never comes."""
    resolved: set[int] = dataclasses.field(default_factory=set)
    bad: set[int] = dataclasses.field(default_factory=set)
    """Withdrawals that cannot be used."""
    """Withdrawals whose result is known."""


class Relays(RuleBasedStateMachine):
    """One relay after the other; the source gives what is not committed to the next one."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.lane = 0
        self.now_s = 0.0
        self.restart()

    @rule(what=st.integers(0, 9))
    def fail(self, what: int) -> None:
        """Rarely, for what is under way is gone then."""
        if what == 9:
            self.restart()
        elif what == 8:
            self.lose_the_lane()

    def restart(self) -> None:
        self.passage: Passage[int, int] = Passage(DEAD, RESULTS)
        self.there: list[Item[int, int]] = []
        self.under_way: list[Item[int, int]] = []
        self.commits: list[list[Item[int, int]]] = []
        self.handed_out: set[int] = set()
        self.reread()

    def lose_the_lane(self) -> None:
        self.passage.lose(self.lane)
        self.reread()

    def reread(self) -> None:
        self.lane += 1
        self.next = self.world.committed

    @rule(step=st.sampled_from(READ_AS))
    def send(self, step: Step) -> None:
        self.world.log.append(step)

    @rule(rows=st.integers(1, 5))
    def read(self, rows: int) -> None:
        numbers = range(self.next, min(self.next + rows, len(self.world.log)))
        target = {Step.BAD: DEAD}
        self.enter(
            Item(
                step,
                number,
                target=target.get(step, f"t{number % 2}"),
                lane=self.lane,
                position=(0, number),
                size_bytes=size_of(number),
                entered_s=self.now_s,
            )
            for number, step in ((number, self.world.log[number]) for number in numbers)
        )
        self.next = max(self.next, numbers.stop)

    @rule()
    def hand_out(self) -> None:
        numbers = self.world.in_tarry - self.handed_out - self.world.ended
        self.handed_out |= numbers
        self.enter(Item(Step.HANDED_OUT, each, target=f"t{each % 2}") for each in sorted(numbers))

    def enter(self, items: Iterable[Item[int, int]]) -> None:
        new = list(items)
        self.there = [item for item in (*self.there, *new) if not item.is_forgotten]
        self.passage.enter(new)

    @rule(rows=st.integers(1, 5))
    def take(self, rows: int) -> None:
        for work in ALONE:
            taken = self.passage.take(work, rows)
            assert len(taken) <= rows
            self.under_way += self.fresh(taken)

    @rule(rows=st.integers(1, 5), allowed=st.integers(0, 3))
    def take_to_produce(self, rows: int, allowed: int) -> None:
        taken = self.passage.take_to_produce(rows, lambda target, wanted: min(allowed, wanted))
        assert len(taken) <= rows
        self.under_way += self.fresh(taken)

    @rule(rows=st.integers(0, 5), away=st.sampled_from(("t0", "t1")), bytes_over=st.integers(0, 3 * SIZE_MAX))
    def park(self, rows: int, away: str, bytes_over: int) -> None:
        before = self.passage.fetched_bytes
        parked = self.passage.park(rows, lambda target: target == away, bytes_over)
        freed = before - self.passage.fetched_bytes
        assert freed == sum(size_of(each.content) for each in parked)
        assert len(parked) <= rows or freed < bytes_over + SIZE_MAX
        assert {each.target for each in parked} <= {away, *self.passage._rests_until}
        self.fresh(parked)

    @rule(waited_s=st.integers(0, 3))
    def take_overdue(self, waited_s: int) -> None:
        self.now_s += 1
        self.passage.take_overdue(self.now_s - waited_s)

    @rule(who=st.sampled_from(("t0", "t1", DEAD, RESULTS)), rest_s=st.integers(0, 3))
    def rest_target(self, who: str, rest_s: int) -> None:
        self.passage.rest_target(who, self.now_s + rest_s)

    @rule(which=st.integers(0, 9), rest_s=st.integers(0, 3))
    def rest_message(self, which: int, rest_s: int) -> None:
        """What was given out to be published rests by itself instead."""
        if self.under_way:
            item = self.under_way[which % len(self.under_way)]
            if not item.is_forgotten and delivery_steps.TABLE[item.step].work is Work.PRODUCE:
                self.under_way.remove(item)
                parked = item.step is Step.FETCHED and which % 2 == 0
                self.passage.rest_message(item, self.now_s + rest_s, parked=parked)

    @rule(later_s=st.integers(1, 3))
    def wake(self, later_s: int) -> None:
        self.now_s += later_s
        self.passage.wake(self.now_s)

    def fresh(self, taken: list[Item[int, int]]) -> list[Item[int, int]]:
        assert not [each for each in taken if each in self.under_way], "it is given out twice"
        return taken

    @rule(which=st.integers(0, 9), answer=ANSWERS, has_happened=st.booleans())
    def answer(self, which: int, answer: Answer, has_happened: bool) -> None:
        """`has_happened`: the work was done although its answer was lost."""
        if self.under_way:
            self.say(self.under_way.pop(which % len(self.under_way)), answer, has_happened=has_happened)

    def say(self, item: Item[int, int], answer: Answer, *, has_happened: bool = False) -> None:
        if item.step is Step.WITHDRAWAL and answer is Answer.DONE and not self.is_committed(named_by(item.content)):
            answer = Answer.AGAIN  # It is not so yet.
        if answer is Answer.DONE or (answer is Answer.AGAIN and has_happened):
            self.happens(item)
        if answer is Answer.REFUSED and item.step in (Step.HANDED_OUT, Step.PARKED, Step.FETCHED):
            self.world.refused.add(item.content)
        if answer is Answer.REFUSED and item.step is Step.WITHDRAWAL:
            self.world.resolved.add(item.content)  # It has waited long enough.
        if answer is Answer.REFUSED and item.step is Step.AWAITED:
            self.world.bad.add(item.content)
        if answer is Answer.REFUSED and item.step in (Step.SHORT_RESULT, Step.BURIED):
            self.world.safe.add(item.content)  # A line in the log has it.
        if answer is Answer.DONE and delivery_steps.TABLE[item.step].work is Work.FETCH:
            self.passage.resize(item, size_of(item.content))
        try:
            self.passage.answer(item, answer, "wrong")
        except CannotBeRefused:
            assert delivery_steps.TABLE[item.step].refused is None
            self.restart()  # as one does whose relay has stopped

    def is_committed(self, number: int) -> bool:
        return number < self.world.committed

    def happens(self, item: Item[int, int]) -> None:
        """The work of its step becomes durable; what that step must never be at is found."""
        number, world = item.content, self.world
        match item.step:
            case Step.READ | Step.OVERDUE if item.lane != self.lane:
                pass  # A request that comes later than the one of who reads it by now: see relay/README.md.
            case Step.READ | Step.OVERDUE:
                assert number not in world.cancelled, "what was cancelled is added again"
                world.in_tarry.add(number)
                world.safe.add(number)
            case Step.DIRECT | Step.RETURNED:
                world.safe.add(number)
            case Step.BAD | Step.BARE:
                assert item.target == DEAD
                world.safe.add(number)
            case Step.BURIED:
                world.safe.add(number)
            case Step.AWAITED:
                self.withdraw(number, named_by(number))
            case Step.RESULT | Step.BARE_RESULT | Step.SHORT_RESULT:
                assert item.target == RESULTS
                assert number in world.resolved, "a result is told before it is known"
                world.safe.add(number)
            case Step.FETCHED:
                assert number not in world.cancelled, "what was cancelled is published"
                world.produced.add(number)
            case Step.PRODUCED:
                assert number in world.produced, "it is acknowledged before it was published"
                world.ended.add(number)
            case Step.LOST:
                assert number in world.refused, "it is rejected and nothing was refused"
                world.ended.add(number)

    def withdraw(self, number: int, named: int) -> None:
        """Tarry cancels what it has and has not handed out. What is not committed may be added to it again."""
        assert named < self.world.committed, "it is withdrawn before its commit"
        self.world.resolved.add(number)
        if named in self.world.in_tarry - self.handed_out - self.world.ended:
            self.world.in_tarry.remove(named)
            self.world.cancelled.add(named)

    @rule()
    def begin_commit(self) -> None:
        if taken := self.passage.take_to_commit():
            assert taken[0].lane == self.lane, "what another relay reads by now is committed"
            self.commits.append(taken)

    @rule(answer=st.sampled_from((Answer.DONE, Answer.AGAIN)), has_happened=st.booleans())
    def end_commit(self, answer: Answer, has_happened: bool) -> None:
        if self.commits:
            self.say_committed(self.commits.pop(0), answer, has_happened=has_happened)

    def say_committed(self, items: list[Item[int, int]], answer: Answer, *, has_happened: bool = False) -> None:
        numbers = [item.content for item in items]
        if (answer is Answer.DONE or has_happened) and items[0].lane == self.lane:
            last = max(numbers)
            missing = set(range(last + 1)) - self.world.safe
            assert not missing, "it is committed before it is durable elsewhere"
            self.world.committed = max(self.world.committed, last + 1)
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a commit is no run of what was read"
        self.passage.committed(items, answer)

    @invariant()
    def nothing_is_dropped(self) -> None:
        """More than that is there where the answer to a commit or an acknowledgement was lost."""
        assert self.passage.read >= self.next - self.world.committed
        assert self.passage.handed_out >= len(self.handed_out - self.world.ended)

    @invariant()
    def bytes_are_those_of_the_payloads_that_are_there(self) -> None:
        there = [item for item in self.there if not item.is_forgotten]
        wrong = [
            item for item in there if item.size_bytes != (item.step not in WITHOUT_PAYLOAD) * size_of(item.content)
        ]
        assert not wrong, "a payload is there that nobody needs, or is not there, or counts otherwise"
        out = sum(item.size_bytes for item in there if item.step in delivery_steps.OUT)
        assert self.passage.fetched_bytes == out
        assert self.passage.read_bytes == sum(item.size_bytes for item in there) - out

    def teardown(self) -> None:
        """When nothing fails any more, everything arrives."""
        if not hasattr(self, "world"):
            return
        self.read(len(self.world.log))
        for _ in range(8 * (1 + len(self.world.log))):  # a step at a time: each message may wait for the one before
            self.wake(1_000)
            for item in self.under_way:
                self.say(item, Answer.DONE)
            self.under_way = []
            self.hand_out()
            for work in ALONE:
                self.under_way += self.passage.take(work, 1_000)
            while taken := self.passage.take_to_produce(1_000, lambda target, wanted: wanted):
                self.under_way += taken
            while self.commits or (taken := self.passage.take_to_commit()):
                self.say_committed(self.commits.pop() if self.commits else taken, Answer.DONE)
            if not self.under_way and not self.world.in_tarry - self.handed_out - self.world.ended:
                break
        assert self.world.committed == len(self.world.log), "something is stuck on its way in"
        assert self.world.ended == self.world.in_tarry, "something is stuck on its way out"
        assert self.passage.read == self.passage.handed_out == 0
        assert self.passage.read_bytes == self.passage.fetched_bytes == 0
        withdrawals = {number for number, step in enumerate(self.world.log) if step is Step.WITHDRAWAL}
        assert self.world.resolved >= withdrawals - self.world.bad, "a withdrawal was committed and not done"


TestRelays = Relays.TestCase
TestRelays.settings = settings(stateful_step_count=60)


def walk(seed: int) -> None:
    """The same rules, in an order that a seed decides: it finds in a second what a search would need minutes for."""
    chance = random.Random(seed)
    relays = Relays()
    relays.begin()

    are_away = chance.random() < 0.5
    """Whether targets take next to nothing."""

    def one_of(values: Iterable[Answer]) -> Answer:
        return chance.choice(list(values))

    def one_in_ten() -> bool:
        return chance.random() < 0.1

    rules: list[Callable[[], None]] = [
        lambda: relays.fail(chance.randrange(30)),
        *[lambda: relays.send(chance.choice((*READ_AS, Step.READ, Step.READ)))] * 2,
        lambda: relays.read(chance.randint(1, 5)),
        relays.hand_out,
        lambda: relays.take(chance.randint(1, 5)),
        lambda: relays.take_to_produce(chance.randint(1, 5), chance.randint(0, 3) * (not are_away or one_in_ten())),
        lambda: relays.park(chance.randint(0, 5), chance.choice(("t0", "t1")), chance.choice((0, 0, 3 * SIZE_MAX))),
        lambda: relays.take_overdue(chance.randint(0, 3)),
        lambda: relays.rest_target(chance.choice(("t0", "t1", DEAD, RESULTS)), chance.randint(0, 3)),
        lambda: relays.rest_message(chance.randrange(10), chance.randint(0, 3)),
        lambda: relays.wake(chance.randint(1, 3)),
        *[
            lambda: relays.answer(
                chance.randrange(10), one_of((*Answer, Answer.DONE, Answer.DONE)), chance.random() < 0.5
            )
        ]
        * 5,
        relays.begin_commit,
        lambda: relays.end_commit(one_of((Answer.DONE, Answer.AGAIN)), chance.random() < 0.5),
    ]
    for _ in range(160):
        chance.choice(rules)()
        relays.nothing_is_dropped()
        relays.bytes_are_those_of_the_payloads_that_are_there()
    relays.teardown()


def walk_long() -> None:
    for seed in range(300):
        walk(seed)


def test_nothing_is_lost_in_any_order() -> None:
    walk_long()


def test_every_step_leads_to_an_end() -> None:
    for step in (*READ_AS, Step.HANDED_OUT):
        reached, ahead = set[Step](), {step}
        while ahead:
            reached |= ahead
            rows = [delivery_steps.TABLE[each] for each in ahead if each in delivery_steps.TABLE]
            ahead = {to for row in rows for to in (row.done, row.refused) if to is not None} - reached
        ends = reached - set(delivery_steps.TABLE)
        assert ends <= {Step.COMMITTED, Step.ACKNOWLEDGED, Step.REJECTED}
        assert ends


def test_a_target_that_takes_nothing_keeps_no_other() -> None:
    relay: Passage[int, int] = Passage(DEAD)
    relay.enter(Item(Step.DIRECT, number, target=target) for number, target in enumerate("aabab"))
    assert [each.content for each in relay.take_to_produce(10, lambda target, n: n if target == "b" else 0)] == [2, 4]
    assert [each.content for each in relay.take_to_produce(10, lambda target, n: n)] == [0, 1, 3]


def test_what_is_parked_is_fetched_again_when_its_target_takes_messages() -> None:
    relay: Passage[int, int] = Passage(DEAD)
    relay.enter(Item(Step.FETCHED, number, target=target) for number, target in enumerate("abaaaaaa"))
    parked = relay.park(4, lambda target: target == "a")
    assert [each.content for each in parked] == [4, 5, 6, 7]
    assert relay.count(Step.PARKED) == 4
    assert relay.park(100, lambda target: True) != []
    assert relay.count(Step.FETCHED) == 2
    assert relay.take(Work.FETCH, 10) == []
    fetched: list[int] = []
    for rows in (1, 2, 4):
        assert len(relay.take_to_produce(10, lambda target, n: n if target == "a" else 0)) == rows
        for each in relay.take(Work.FETCH, 10):
            fetched.append(each.content)
            relay.answer(each, Answer.DONE)
    assert sorted(fetched) == [2, 3, 4, 5, 6, 7]
    assert relay.handed_out == 8


def test_targets_take_turns() -> None:
    relay: Passage[int, int] = Passage(DEAD)
    relay.enter(Item(Step.DIRECT, number, target=target) for number, target in enumerate("aabb"))
    turns = [relay.take_to_produce(1, lambda target, n: n)[0].target for _ in range(4)]
    assert turns == ["a", "b", "a", "b"]


def test_what_cannot_be_refused_says_why() -> None:
    relay: Passage[int, int] = Passage(DEAD)
    relay.enter([Item(Step.LOST, 1)])
    (item,) = relay.take(Work.REJECT, 1)
    with pytest.raises(CannotBeRefused, match="at step 'lost': no such topic"):
        relay.answer(item, Answer.REFUSED, "no such topic")


def test_a_log_that_commits_in_any_order_commits_what_is_done() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    relay.enter(
        Item(Step.DIRECT, number, target=target, lane="log", position=(1, number), in_order=False)
        for number, target in enumerate("abb")
    )
    for item in relay.take_to_produce(10, lambda target, n: n if target == "b" else 0):
        relay.answer(item, Answer.DONE)
    done = relay.take_to_commit()
    assert [each.content for each in done] == [1, 2]
    assert relay.take_to_commit() == []
    relay.committed(done, Answer.AGAIN)
    relay.committed(relay.take_to_commit(), Answer.DONE)
    assert [each.content for each in relay.held(lambda lane: True)] == [0]
    assert relay.read == 1


def test_what_is_under_way_is_found_by_its_lane_and_position_until_it_is_committed() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    relay.enter([Item(Step.READ, 7, lane="log", position=(1, 7))])
    (item,) = relay.take(Work.ADD, 1)
    assert relay.find("log", (1, 7)) is item
    assert relay.find("another", (1, 7)) is None
    relay.answer(item, Answer.DONE)
    relay.committed(relay.take_to_commit(), Answer.DONE)
    assert relay.find("log", (1, 7)) is None


def test_a_message_without_a_time_waits_in_tarry_when_its_target_has_kept_it_too_long() -> None:
    relay: Passage[int, int] = Passage(DEAD)
    relay.enter([Item(Step.DIRECT, number, target="a", entered_s=float(number)) for number in range(3)])
    (tried,) = relay.take_to_produce(1, lambda target, n: 1)
    relay.answer(tried, Answer.AGAIN)
    relay.rest_target("a", 100.0)
    assert relay.take_overdue(2.0) == 2
    assert sorted(each.content for each in relay.take(Work.ADD_LATE, 10)) == [0, 1]
    relay.wake(100.0)
    assert [each.content for each in relay.take_to_produce(10, lambda target, n: n)] == [2]


def test_a_target_that_rests_is_not_asked_for_and_its_messages_hold_no_permit() -> None:
    relay: Passage[int, int] = Passage(DEAD)
    relay.enter([Item(Step.FETCHED, 1, target="a")])
    relay.rest_target("a", 5.0)
    assert [each.content for each in relay.park(10, lambda target: False)] == [1]
    relay.wake(4.9)
    assert relay.take(Work.FETCH, 10) == []
    relay.wake(5.0)
    assert [each.content for each in relay.take(Work.FETCH, 10)] == [1]


def test_a_payload_is_dropped_and_counts_no_more_when_it_is_durable_elsewhere_or_can_be_fetched_again() -> None:
    dropped: list[int] = []
    relay: Passage[int, str] = Passage(DEAD, drop=dropped.append)
    relay.enter([Item(Step.READ, 1, lane="log", position=(1, 1), size_bytes=100)])
    relay.enter([Item(Step.DIRECT, 2, target="a", lane="log", position=(1, 2), size_bytes=20)])
    assert (relay.read_bytes, relay.fetched_bytes, dropped) == (120, 0, [])
    for item in (*relay.take(Work.ADD, 1), *relay.take_to_produce(1, lambda target, n: n)):
        relay.answer(item, Answer.AGAIN)
    assert relay.read_bytes == 120
    for item in (*relay.take(Work.ADD, 1), *relay.take_to_produce(1, lambda target, n: n)):
        relay.answer(item, Answer.DONE)
    assert (relay.read_bytes, dropped) == (0, [1, 2])

    relay.enter(Item(Step.HANDED_OUT, number, target="b") for number in (3, 4, 5))
    for item, answer in zip(relay.take(Work.FETCH, 3), (Answer.DONE, Answer.DONE, Answer.REFUSED), strict=True):
        relay.resize(item, 1_000 * (answer is Answer.DONE))
        relay.answer(item, answer)
    assert (relay.read_bytes, relay.fetched_bytes, dropped) == (0, 2_000, [1, 2, 5])
    (item,) = relay.take_to_produce(1, lambda target, n: n)
    relay.answer(item, Answer.DONE)
    relay.rest_target("b", 5.0)
    assert [each.content for each in relay.park(1, lambda target: False)] == [4]
    assert (relay.fetched_bytes, dropped) == (0, [1, 2, 5, 3, 4])


def test_a_payload_that_may_still_be_published_counts_through_every_refusal() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    relay.enter([Item(Step.READ, 1, lane="log", position=(1, 1), size_bytes=100)])
    (item,) = relay.take(Work.ADD, 1)
    for step in (Step.BAD, Step.BARE, Step.BURIED):
        relay.answer(item, Answer.REFUSED)
        assert (item.step, relay.read_bytes) == (step, 100)
        relay.take_to_produce(1, lambda target, n: n)
    relay.answer(item, Answer.DONE)
    assert relay.read_bytes == 0


def test_a_lane_that_is_lost_frees_its_bytes_and_answers_that_come_later_change_nothing() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    relay.enter(Item(Step.READ, number, lane="log", position=(1, number), size_bytes=100) for number in range(3))
    taken = relay.take(Work.ADD, 2)
    relay.lose("log")
    assert relay.read_bytes == 0
    for item in taken:
        relay.answer(item, Answer.DONE)
    assert relay.read_bytes == 0


def fetched(relay: Passage[int, str], target: str, sizes: Iterable[int]) -> None:
    """Enter messages that were fetched for a target."""
    relay.enter(
        Item(Step.FETCHED, number, target=target, size_bytes=size_bytes) for number, size_bytes in enumerate(sizes)
    )


def test_as_much_is_parked_as_frees_the_bytes_that_are_too_many_though_no_permit_is_needed() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    fetched(relay, "away", [100] * 10)
    relay.rest_target("away", 5.0)
    assert relay.park(-3, lambda target: False, bytes_over=0) == []
    assert [each.content for each in relay.park(-3, lambda target: False, bytes_over=250)] == [7, 8, 9]
    assert relay.fetched_bytes == 700
    assert len(relay.park(1, lambda target: False, bytes_over=10_000, rows_max=4)) == 4
    assert relay.fetched_bytes == 300


def test_bytes_that_wait_for_a_target_which_takes_messages_are_not_parked() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    fetched(relay, "there", [100] * 10)
    fetched(relay, "slow", [1] * 10)
    assert len(relay.park(0, lambda target: target == "slow", bytes_over=10_000)) == 9
    assert (relay.count(Step.PARKED), relay.fetched_bytes) == (9, 1_001)


def test_a_portion_to_publish_ends_with_the_message_that_fills_its_bytes() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    fetched(relay, "a", [100, 100, 5_000, 1, 1])
    portions = []
    while taken := relay.take_to_produce(10, lambda target, n: n, bytes_max=200):
        portions.append([each.size_bytes for each in taken])
    assert portions == [[100, 100], [5_000], [1, 1]]


def test_a_target_is_asked_for_no_more_messages_than_fit_into_the_bytes() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    fetched(relay, "a", [100] * 10)
    fetched(relay, "b", [100] * 10)
    asked: list[tuple[str, int]] = []

    def allowed(target: str, wanted: int) -> int:
        # They count as gone: see `Pacing.take`.
        asked.append((target, wanted))
        return wanted

    assert len(relay.take_to_produce(10, allowed, bytes_max=250)) == 3
    assert asked == [("a", 3)]
    assert len(relay.take_to_produce(10, allowed, bytes_max=1_200)) == 10
    assert asked == [("a", 3), ("b", 10)]


def test_what_keeps_the_commit_of_a_lane_is_named() -> None:
    relay: Passage[int, str] = Passage(DEAD)
    relay.enter([Item(Step.DIRECT, 1, target="a", lane="p0", position=(0, 1), entered_s=1.0)])
    relay.enter([Item(Step.DIRECT, 2, target="b", lane="p1", position=(1, 1), entered_s=50.0)])
    assert relay.lanes_held(before_s=10.0) == ["p0"]


def leads(patch: pytest.MonkeyPatch, step: Step, row: Row) -> None:
    changed = {**delivery_steps.TABLE, step: row}
    begins = Passage.__init__
    patch.setattr(Passage, "__init__", lambda self, dead, results="": begins(self, dead, results, changed))


def what_is_fetched_counts_as_published(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.HANDED_OUT, Row(Work.FETCH, Step.PRODUCED, Step.LOST))


def what_is_refused_at_its_target_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.FETCHED, Row(Work.PRODUCE, Step.PRODUCED, Step.PRODUCED))


def a_refused_add_is_committed(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.READ, Row(Work.ADD, Step.ADDED, Step.ADDED))


def a_payload_that_is_gone_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.HANDED_OUT, Row(Work.FETCH, Step.FETCHED, Step.REJECTED))


def what_is_not_committed_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.WITHDRAWAL, Row(Work.WITHDRAW, Step.RESULT, Step.BAD))
    happens = Relays.happens

    def at_once(self: Relays, item: Item[int, int]) -> None:
        if item.step is Step.WITHDRAWAL:
            self.withdraw(item.content, named_by(item.content))
        happens(self, item)

    patch.setattr(Relays, "happens", at_once)
    patch.setattr(Relays, "is_committed", lambda self, number: True)


def what_has_waited_long_enough_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.WITHDRAWAL, Row(Work.AWAIT, Step.AWAITED, Step.AWAITED))


def a_result_is_told_and_nothing_done(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.WITHDRAWAL, Row(Work.AWAIT, Step.RESULT, Step.RESULT))


def a_withdrawal_is_committed_before_it_is_told(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.AWAITED, Row(Work.WITHDRAW, Step.ADDED, Step.BAD))


def a_bad_withdrawal_is_committed(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.AWAITED, Row(Work.WITHDRAW, Step.RESULT, Step.ADDED))


def a_result_goes_where_its_message_asked(patch: pytest.MonkeyPatch) -> None:
    move = Passage._move

    def keeping(self: Passage[int, int], item: Item[int, int], step: Step) -> None:
        target = item.target
        move(self, item, step)
        if step is Step.RESULT:
            item.target = target

    patch.setattr(Passage, "_move", keeping)


def an_unknown_answer_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    answer = Passage.answer

    def hopeful(self: Passage[int, int], item: Item[int, int], given: Answer, reason: str = "") -> None:
        answer(self, item, Answer.DONE if given is Answer.AGAIN else given, reason)

    patch.setattr(Passage, "answer", hopeful)


def a_commit_leaves_out_what_is_not_ready(patch: pytest.MonkeyPatch) -> None:
    def ready(self: Passage[int, int], of: object = None) -> list[Item[int, int]]:
        for lane, order in self._lanes.items():
            taken = [item for item in order if item.step is Step.ADDED]
            if taken and lane not in self._committing:
                for item in taken:
                    order.remove(item)
                self._committing[lane] = taken
                return taken
        return []

    patch.setattr(Passage, "take_to_commit", ready)


def a_failed_commit_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Passage[int, int], items: list[Item[int, int]], given: Answer) -> None:
        self._committing.clear()

    patch.setattr(Passage, "committed", forgetful)


def a_failed_commit_turns_the_order_around(patch: pytest.MonkeyPatch) -> None:
    committed = Passage.committed

    def turned(self: Passage[int, int], items: list[Item[int, int]], given: Answer) -> None:
        committed(self, items[::-1], given)

    patch.setattr(Passage, "committed", turned)


def a_lost_lane_is_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Passage, "lose", lambda self, lane: None)


def what_fails_is_not_done_again(patch: pytest.MonkeyPatch) -> None:
    answer = Passage.answer

    def once(self: Passage[int, int], item: Item[int, int], given: Answer, reason: str = "") -> None:
        if given is not Answer.AGAIN:
            answer(self, item, given, reason)

    patch.setattr(Passage, "answer", once)


def what_is_taken_still_waits(patch: pytest.MonkeyPatch) -> None:
    def peek(self: Passage[int, int], work: Work, rows_max: int) -> list[Item[int, int]]:
        return [item for item in self._waiting[work] if not item.is_forgotten][:rows_max]

    patch.setattr(Passage, "take", peek)


def what_is_parked_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Passage, "_unpark", lambda self, target, rows: None)


def what_is_parked_is_published_without_its_payload(patch: pytest.MonkeyPatch) -> None:
    leads(patch, Step.PARKED, Row(Work.FETCH, Step.PRODUCED, Step.LOST))


def what_is_bad_goes_to_its_target(patch: pytest.MonkeyPatch) -> None:
    move = Passage._move

    def keeping(self: Passage[int, int], item: Item[int, int], step: Step) -> None:
        target = item.target
        self._dead_letters = target
        move(self, item, step)

    patch.setattr(Passage, "_move", keeping)


def what_is_parked_keeps_its_payload(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery_steps, "_DROPPED", delivery_steps._DROPPED - {Step.PARKED})


def what_is_forgotten_counts_on(patch: pytest.MonkeyPatch) -> None:
    forget = Passage._forget

    def counting(self: Passage[int, int], item: Item[int, int]) -> None:
        size_bytes = item.size_bytes
        forget(self, item)
        self.read_bytes += size_bytes

    patch.setattr(Passage, "_forget", counting)


PLANTED = (
    what_is_fetched_counts_as_published,
    what_is_refused_at_its_target_is_acknowledged,
    a_refused_add_is_committed,
    a_payload_that_is_gone_is_forgotten,
    what_is_not_committed_is_withdrawn,
    what_has_waited_long_enough_is_withdrawn,
    a_result_is_told_and_nothing_done,
    a_withdrawal_is_committed_before_it_is_told,
    a_bad_withdrawal_is_committed,
    a_result_goes_where_its_message_asked,
    an_unknown_answer_counts_as_done,
    a_commit_leaves_out_what_is_not_ready,
    a_failed_commit_is_forgotten,
    a_failed_commit_turns_the_order_around,
    a_lost_lane_is_remembered,
    what_fails_is_not_done_again,
    what_is_taken_still_waits,
    what_is_parked_is_forgotten,
    what_is_parked_is_published_without_its_payload,
    what_is_bad_goes_to_its_target,
    what_is_parked_keeps_its_payload,
    what_is_forgotten_counts_on,
)
registry.register("the passage of messages through a relay", PLANTED)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        walk_long()
