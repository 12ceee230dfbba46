"""The way of each message through a relay: what has to be done to it next, and what may not be done before.

Owns: the steps, their table, and the order in which work is given out.
Does not own: the work (`tarry_relay.running`), brokers, times. Nothing here waits, and nothing here is durable: what
ends with the process begins anew, since a message is committed, or acknowledged, last.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Content = TypeVar("Content")
Lane = TypeVar("Lane", bound=Hashable)


class Work(enum.Enum):
    """What is done to a message at a step."""

    ADD = "add it to Tarry"
    NACK = "hand it back to Tarry"
    AWAIT = "wait until what it names is committed"
    WITHDRAW = "cancel or reschedule what it names in Tarry"
    PRODUCE = "publish it to its target"
    COMMIT = "commit it to the log that it was read from"
    FETCH = "fetch its payload from the source"
    ACKNOWLEDGE = "acknowledge it to Tarry"
    REJECT = "make it a dead letter of Tarry"


class Step(enum.Enum):
    """Where a message is. The first group was read from a log of the broker, the second was handed out by Tarry."""

    READ = "read"
    """It has a time."""
    DIRECT = "direct"
    """It has none, and goes straight on."""
    RETURNED = "returned"
    """It names a hand-out that a consumer has failed with."""
    WITHDRAWAL = "withdrawal"
    """It names another message of the source, to be cancelled or rescheduled. What is not committed might be added
    again after that."""
    AWAITED = "awaited"
    """What it names is committed."""
    RESULT = "result"
    """What came of it is known, and goes to whoever asked."""
    BARE_RESULT = "bare result"
    """The same without its payload, with which it was refused there."""
    BAD = "bad"
    """It cannot be delayed as it asks, and goes to the dead letters of the broker."""
    BARE = "bare"
    """The same without its payload, with which it was refused there."""
    ADDED = "added"
    """What was to come of it is durable elsewhere: in Tarry, or at a target."""
    COMMITTED = "committed"

    HANDED_OUT = "handed out"
    FETCHED = "fetched"
    PARKED = "parked"
    """Its target takes nothing now and has its share of what waits: it is fetched again when it does. Nothing but its
    name is kept, and it takes no place of others."""
    PRODUCED = "produced"
    """The output has confirmed it."""
    ACKNOWLEDGED = "acknowledged"
    LOST = "lost"
    """The source has it no more, or its target refuses it for good."""
    REJECTED = "rejected"


class Answer(enum.Enum):
    """What came of work."""

    DONE = "done"
    """Durably."""
    AGAIN = "again"
    """Nothing, or nobody knows: it is done again."""
    REFUSED = "refused"
    """It never will: a bad time, a payload that is gone or too large."""


class Row(NamedTuple):
    """A line of the table: the work of a step, and the steps that it leads to."""

    work: Work
    done: Step
    refused: Step | None
    """None: the work cannot be refused."""


TABLE: Mapping[Step, Row] = {
    Step.READ: Row(Work.ADD, Step.ADDED, Step.BAD),
    Step.DIRECT: Row(Work.PRODUCE, Step.ADDED, Step.BAD),
    Step.RETURNED: Row(Work.NACK, Step.ADDED, Step.BAD),
    Step.WITHDRAWAL: Row(Work.AWAIT, Step.AWAITED, Step.RESULT),
    Step.AWAITED: Row(Work.WITHDRAW, Step.RESULT, Step.BAD),
    Step.RESULT: Row(Work.PRODUCE, Step.ADDED, Step.BARE_RESULT),
    Step.BARE_RESULT: Row(Work.PRODUCE, Step.ADDED, None),
    Step.BAD: Row(Work.PRODUCE, Step.ADDED, Step.BARE),
    Step.BARE: Row(Work.PRODUCE, Step.ADDED, None),
    Step.ADDED: Row(Work.COMMIT, Step.COMMITTED, None),
    Step.HANDED_OUT: Row(Work.FETCH, Step.FETCHED, Step.LOST),
    Step.FETCHED: Row(Work.PRODUCE, Step.PRODUCED, Step.LOST),
    Step.PARKED: Row(Work.FETCH, Step.FETCHED, Step.LOST),
    Step.PRODUCED: Row(Work.ACKNOWLEDGE, Step.ACKNOWLEDGED, None),
    Step.LOST: Row(Work.REJECT, Step.REJECTED, None),
}
"""A step that is not a key has no work left: the message is forgotten."""
OUT = frozenset((Step.HANDED_OUT, Step.FETCHED, Step.PARKED, Step.PRODUCED, Step.LOST))
"""Steps of what was handed out."""


class CannotBeRefused(Exception):
    """Work was refused that has no other way: the relay cannot go on. The message says which, and why."""


@dataclasses.dataclass(eq=False, slots=True)
class Item(Generic[Content, Lane]):
    """One message on its way, changed by `Passage` alone."""

    step: Step
    content: Content
    """What the work needs."""
    target: str = ""
    """Where it is published; of use at steps whose work is PRODUCE."""
    reason: str = ""
    """Why it is BAD, BARE or LOST."""
    lane: Lane | None = None
    """Which part of a log it was read from, in an order of its own; None: it was handed out. A part that is read again
    after it was lost is another lane."""
    is_forgotten: bool = False


class Passage(Generic[Content, Lane]):
    """The messages that are on their way through one relay.

    Each is given out for one work at a time. What was read from one lane is committed as a prefix of what was read
    there: the broker takes a commit for one of everything before it.
    """

    def __init__(self, dead_letters: str, results: str = "", table: Mapping[Step, Row] = TABLE) -> None:
        """`dead_letters`: the target of what is BAD. `results`: that of results; empty: nobody is told of them.
        `table`: another one, of tests.
        """
        self._dead_letters = dead_letters
        self._results = results
        self._table = table
        self._waiting: dict[Work, deque[Item[Content, Lane]]] = {
            work: deque() for work in Work if work not in (Work.PRODUCE, Work.COMMIT)
        }
        # Of each target by itself: one that is slow or away does not keep the others.
        self._to_produce: dict[str, deque[Item[Content, Lane]]] = {}
        self._parked: dict[str, deque[Item[Content, Lane]]] = {}
        self._lanes: dict[Lane, deque[Item[Content, Lane]]] = {}
        self._committing: dict[Lane, list[Item[Content, Lane]]] = {}
        self._counts: Counter[Step] = Counter()

    def count(self, *steps: Step) -> int:
        """How many messages are at these steps."""
        return sum(self._counts[step] for step in steps)

    @property
    def read(self) -> int:
        """How many messages were read and are not committed."""
        return sum(self._counts.values()) - self.handed_out

    @property
    def handed_out(self) -> int:
        """How many messages were handed out and are neither acknowledged nor rejected."""
        return self.count(*OUT)

    @property
    def has_to_produce(self) -> bool:
        """Whether messages wait to be published, or for their target to take more."""
        return bool(self._to_produce)

    def enter(self, items: Iterable[Item[Content, Lane]]) -> None:
        """Takes in what was read or handed out, in that order."""
        for item in items:
            self._counts[item.step] += 1
            if item.lane is not None:
                self._lanes.setdefault(item.lane, deque()).append(item)
            self._wait(item)

    def take(self, work: Work, rows_max: int) -> list[Item[Content, Lane]]:
        """Up to `rows_max` messages for work that is neither PRODUCE nor COMMIT, each until it is answered."""
        waiting = self._waiting[work]
        taken: list[Item[Content, Lane]] = []
        while waiting and len(taken) < rows_max:
            item = waiting.popleft()
            if not item.is_forgotten:
                taken.append(item)
        return taken

    def take_to_produce(self, rows_max: int, allowed: Callable[[str, int], int]) -> list[Item[Content, Lane]]:
        """Up to `rows_max` messages to publish.

        `allowed`: is asked for each target that has messages how many of so many may go to it now. The target that was
        served first is asked last the next time.
        """
        taken: list[Item[Content, Lane]] = []
        for target in list(self._to_produce):
            waiting = self._to_produce[target]
            while waiting and waiting[0].is_forgotten:
                waiting.popleft()
            if not waiting:
                del self._to_produce[target]
                self._unpark(target, rows_max)
            elif (rows := allowed(target, min(len(waiting), rows_max - len(taken)))) > 0:
                del self._to_produce[target]
                taken += [item for item in (waiting.popleft() for _ in range(rows)) if not item.is_forgotten]
                if waiting:
                    self._to_produce[target] = waiting
                if len(waiting) < rows_max:
                    # Twice as many: one message tries whether the target is there, and then it is soon at full speed.
                    self._unpark(target, min(2 * rows, rows_max))
            if len(taken) >= rows_max:
                break
        return taken

    def park(self, rows: int, takes_nothing: Callable[[str], bool]) -> list[Item[Content, Lane]]:
        """Parks at most so many of what was handed out and waits for a target that takes nothing now, and returns them:
        those that came last for the target with the most. One is left of each, which finds out when its target does.
        """
        parked: list[Item[Content, Lane]] = []
        queues = [
            (target, each) for target, each in self._to_produce.items() if len(each) > 1 and takes_nothing(target)
        ]
        for target, waiting in sorted(queues, key=lambda each: -len(each[1])):
            if len(parked) >= rows:
                break
            some = self._last_fetched(waiting, rows - len(parked))
            for item in some:
                self._counts[item.step] -= 1
                item.step = Step.PARKED
                self._counts[item.step] += 1
            self._parked.setdefault(target, deque()).extend(some)
            parked += some
        return parked

    def take_to_commit(self, of: Callable[[Lane], bool] = lambda lane: True) -> list[Item[Content, Lane]]:
        """The longest prefix of what was read from one lane of which everything is durable elsewhere, in the order of
        reading. A lane has one commit under way. `of`: of which lanes.
        """
        for lane, order in self._lanes.items():
            if lane in self._committing or not order or order[0].step is not Step.ADDED or not of(lane):
                continue
            taken = []
            while order and order[0].step is Step.ADDED:
                taken.append(order.popleft())
            self._committing[lane] = taken
            return taken
        return []

    def committed(self, items: Sequence[Item[Content, Lane]], answer: Answer) -> None:
        """Says what came of what `take_to_commit` gave."""
        lane = items[0].lane
        if lane is None or self._committing.pop(lane, None) is None:
            return  # The lane was lost meanwhile.
        if answer is Answer.AGAIN:
            self._lanes[lane].extendleft(reversed(items))
            return
        for item in items:
            self._forget(item)

    def answer(
        self, item: Item[Content, Lane], answer: Answer, reason: str = "", *, instead: Step | None = None
    ) -> None:
        """Says what came of the work that a message was given out for.

        `reason`: why it was refused. `instead`: takes the place of the step that a refusal leads to.
        Raises CannotBeRefused.
        """
        if item.is_forgotten:
            return
        row = self._table[item.step]
        if answer is Answer.AGAIN:
            self._wait(item)
            return
        step = row.done
        if answer is Answer.REFUSED:
            if row.refused is None:
                raise CannotBeRefused(f"{row.work.value} was refused for good at step {item.step.value!r}: {reason}")
            step, item.reason = instead or row.refused, reason
        self._move(item, step)

    def lose(self, lane: Lane) -> None:
        """Forgets what was read from a lane that another relay reads now, and whatever is answered of it later."""
        for item in (*self._committing.pop(lane, ()), *self._lanes.pop(lane, ())):
            self._forget(item)

    @staticmethod
    def _last_fetched(waiting: deque[Item[Content, Lane]], rows: int) -> list[Item[Content, Lane]]:
        """Takes at most so many that were fetched out of a queue, from its end, and leaves its first."""
        fetched: deque[Item[Content, Lane]] = deque()
        others: deque[Item[Content, Lane]] = deque()
        while len(waiting) > 1 and len(fetched) < rows:
            item = waiting.pop()
            (fetched if item.step is Step.FETCHED else others).appendleft(item)
        waiting.extend(others)
        return list(fetched)

    def _unpark(self, target: str, rows: int) -> None:
        """Lets at most so many of what was parked be fetched again."""
        if (parked := self._parked.get(target)) is None:
            return
        for _ in range(min(rows, len(parked))):
            self._wait(parked.popleft())
        if not parked:
            del self._parked[target]

    def _move(self, item: Item[Content, Lane], step: Step) -> None:
        if step is Step.RESULT and not self._results:
            step = Step.ADDED
        if step not in self._table:
            self._forget(item)
            return
        self._counts[item.step] -= 1
        self._counts[step] += 1
        item.step = step
        if step is Step.BAD:
            item.target = self._dead_letters
        elif step is Step.RESULT:
            item.target = self._results
        self._wait(item)

    def _forget(self, item: Item[Content, Lane]) -> None:
        self._counts[item.step] -= 1
        item.is_forgotten = True

    def _wait(self, item: Item[Content, Lane]) -> None:
        """Lets it wait for the work of its step; what waits for its commit stands in its lane already."""
        work = self._table[item.step].work
        if work is Work.PRODUCE:
            self._to_produce.setdefault(item.target, deque()).append(item)
        elif work is not Work.COMMIT:
            self._waiting[work].append(item)
