"""Keeps the step of each message in a relay: its next work, and what must not happen before.

Nothing here waits and nothing here is durable. A message is committed, or acknowledged, last, so work that ends with
the process begins again. Times are arguments, in seconds of a monotonic clock.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Content = TypeVar("Content")
Lane = TypeVar("Lane", bound=Hashable)


class Work(enum.Enum):
    """The work that a step requires."""

    ADD = "add it to Tarry"
    ADD_LATE = "add it to Tarry for this subscription"
    COMPARE = "compare the name it gives with the message at its position"
    NACK = "negatively acknowledge it to Tarry"
    AWAIT = "wait until what it names is committed"
    WITHDRAW = "cancel or reschedule what it names in Tarry"
    PRODUCE = "publish it to its target"
    BURY = "make it a dead letter of Tarry by its position"
    COMMIT = "commit it to the log that it was read from"
    FETCH = "fetch its payload from the source"
    ACKNOWLEDGE = "acknowledge it to Tarry"
    REJECT = "make it a dead letter of Tarry"


class Step(enum.Enum):
    """The step of a message. The first group was read from a log of the broker, the second was delivered by Tarry."""

    READ = "read"
    """Has a time"""
    DIRECT = "direct"
    """Has no time and is published directly"""
    OVERDUE = "overdue"
    """Has no time but has waited too long for its target: it waits in Tarry, so that it holds no lane"""
    CLAIMED = "claimed"
    """Names a delivery that a consumer failed to process, but not its log: the name may belong to another one"""
    RETURNED = "returned"
    """Names a delivery of this relay's log that a consumer failed to process"""
    WITHDRAWAL = "withdrawal"
    """Names another message of the source to cancel or reschedule; an uncommitted one might be added again after that
    """
    AWAITED = "awaited"
    """The message that it names is committed"""
    RESULT = "result"
    """The result is known and goes to the requester"""
    BARE_RESULT = "bare result"
    """A result without the headers and payload of its message, which was refused with them"""
    SHORT_RESULT = "short result"
    """A bare result without the correlation id, which was refused with it"""
    BAD = "bad"
    """Cannot be delayed as requested, and goes to the dead letters of the broker"""
    BARE = "bare"
    """A dead letter without headers and payload, which was refused with them"""
    BURIED = "buried"
    """A dead letter that its target refuses even bare: it becomes one of Tarry"""
    ADDED = "added"
    """Its result is durable elsewhere: in Tarry, or at a target"""
    COMMITTED = "committed"

    HANDED_OUT = "handed out"
    FETCHED = "fetched"
    PARKED = "parked"
    """Waits for its target by name alone: it holds no permit, and its payload is fetched again"""
    PRODUCED = "produced"
    """Confirmed by the output"""
    ACKNOWLEDGED = "acknowledged"
    LOST = "lost"
    """Dropped by the source, or refused for good by its target"""
    REJECTED = "rejected"


class Answer(enum.Enum):
    """The result of a work."""

    DONE = "done"
    """Durable"""
    AGAIN = "again"
    """Failed, or the result is unknown: repeat it"""
    REFUSED = "refused"
    """Never possible: a bad time, a payload that is gone or too large"""


class Row(NamedTuple):
    """A line of the table: the work of a step, and the next steps."""

    work: Work
    done: Step
    refused: Step | None
    """None if the work cannot be refused"""


TABLE: Mapping[Step, Row] = {
    Step.READ: Row(Work.ADD, Step.ADDED, Step.BAD),
    Step.DIRECT: Row(Work.PRODUCE, Step.ADDED, Step.BAD),
    Step.OVERDUE: Row(Work.ADD_LATE, Step.ADDED, Step.BAD),
    Step.CLAIMED: Row(Work.COMPARE, Step.RETURNED, Step.BAD),
    Step.RETURNED: Row(Work.NACK, Step.ADDED, Step.BAD),
    Step.WITHDRAWAL: Row(Work.AWAIT, Step.AWAITED, Step.RESULT),
    Step.AWAITED: Row(Work.WITHDRAW, Step.RESULT, Step.BAD),
    Step.RESULT: Row(Work.PRODUCE, Step.ADDED, Step.BARE_RESULT),
    Step.BARE_RESULT: Row(Work.PRODUCE, Step.ADDED, Step.SHORT_RESULT),
    Step.SHORT_RESULT: Row(Work.PRODUCE, Step.ADDED, Step.ADDED),
    Step.BAD: Row(Work.PRODUCE, Step.ADDED, Step.BARE),
    Step.BARE: Row(Work.PRODUCE, Step.ADDED, Step.BURIED),
    Step.BURIED: Row(Work.BURY, Step.ADDED, Step.ADDED),
    Step.ADDED: Row(Work.COMMIT, Step.COMMITTED, None),
    Step.HANDED_OUT: Row(Work.FETCH, Step.FETCHED, Step.LOST),
    Step.FETCHED: Row(Work.PRODUCE, Step.PRODUCED, Step.LOST),
    Step.PARKED: Row(Work.FETCH, Step.FETCHED, Step.LOST),
    Step.PRODUCED: Row(Work.ACKNOWLEDGE, Step.ACKNOWLEDGED, None),
    Step.LOST: Row(Work.REJECT, Step.REJECTED, None),
}
"""A step that is not a key has no work left: the message is forgotten."""
OUT = frozenset((Step.HANDED_OUT, Step.FETCHED, Step.PARKED, Step.PRODUCED, Step.LOST))
"""Steps of messages that Tarry delivered"""
_DROPPED = frozenset((Step.ADDED, Step.PARKED, Step.PRODUCED, Step.LOST))
"""Steps from which on a payload is no longer needed, or is fetched again"""
_NEW_MESSAGES = frozenset((Step.BAD, Step.BARE, Step.RESULT, Step.BARE_RESULT, Step.SHORT_RESULT))
"""Steps at which another message is published than before"""
ENDING = (Step.ADDED, Step.PRODUCED, Step.LOST)
"""Steps at which only a commit, an acknowledgement or a rejection is missing"""


class CannotBeRefused(Exception):
    """A refusal of work that has no alternative. The message says which work, and why."""


@dataclasses.dataclass(slots=True)
class Trials:
    """The failed tries of a message whose target took others."""

    first_s: float
    """Time of the first failure (seconds)"""
    taken_before: int
    """Number of messages that its target had taken at the last failure"""
    count: int = 0
    """Failures while its target took others; limits of space, quotas and rights do not count"""
    rests: int = 0
    """Number of times that it has rested alone"""
    may_have_landed: bool = False
    """True if an answer left open whether it was published"""


@dataclasses.dataclass(eq=False, slots=True)
class Item(Generic[Content, Lane]):
    """One message in a relay. Only `Passage` changes its step, target and reason."""

    step: Step
    content: Content
    """Input of the work"""
    target: str = ""
    """Target to which it is published; used at steps whose work is PRODUCE"""
    reason: str = ""
    """Reason why it is BAD, BARE, BURIED or LOST"""
    lane: Lane | None = None
    """Part of a log from which it was read; None if Tarry delivered it"""
    position: tuple[int, int] | None = None
    """Its position in the lane; None if Tarry delivered it"""
    size_bytes: int = 0
    """Memory of its payload (bytes); 0 once it is dropped"""
    in_order: bool = True
    """True if a commit of its lane covers everything read there before"""
    entered_s: float = 0.0
    trials: Trials | None = None
    raised: int = 0
    """Number of times that its present work has raised for this message alone"""
    may_be_done: bool = False
    """True if a failure of its present work left open whether it was done; for publishing, `trials` has that"""
    is_forgotten: bool = False


class Passage(Generic[Content, Lane]):
    """The messages of one relay. Each is given out for one work at a time."""

    def __init__(
        self,
        dead_letters: str,
        results: str = "",
        table: Mapping[Step, Row] = TABLE,
        *,
        drop: Callable[[Content], None] = lambda content: None,
    ) -> None:
        """Begin empty.

        `dead_letters` is the target of BAD messages. `results` is the target of results; if empty, no one gets them.
        Tests pass another `table`. `drop` is called when the payload of a message is no longer needed.
        """
        self._drop = drop
        self.read_bytes = 0
        """Memory of the payloads of messages that were read (bytes)"""
        self.fetched_bytes = 0
        """Memory of the payloads of messages that Tarry delivered (bytes)"""
        self._dead_letters = dead_letters
        self._results = results
        self._table = table
        self._waiting: dict[Work, deque[Item[Content, Lane]]] = {
            work: deque() for work in Work if work not in (Work.PRODUCE, Work.COMMIT)
        }
        # By target, so that a slow or unreachable one does not block the others. A target is in one of the two.
        self._to_produce: dict[str, deque[Item[Content, Lane]]] = {}
        self._resting: dict[str, deque[Item[Content, Lane]]] = {}
        self._rests_until: dict[str, float] = {}
        self._wakes: list[tuple[float, str]] = []
        self._parked: dict[str, deque[Item[Content, Lane]]] = {}
        self._messages_rest: list[tuple[float, int, Item[Content, Lane]]] = []
        self._numbers = itertools.count()
        self._known: dict[tuple[Lane, tuple[int, int]], Item[Content, Lane]] = {}
        # Messages read from lanes that are committed in order, and ADDED ones of other lanes
        self._lanes: dict[Lane, deque[Item[Content, Lane]]] = {}
        self._done: dict[Lane, deque[Item[Content, Lane]]] = {}
        self._committing: dict[Lane, list[Item[Content, Lane]]] = {}
        self._counts: Counter[Step] = Counter()

    # Contents

    def count(self, *steps: Step) -> int:
        """Return the number of messages at these steps."""
        return sum(self._counts[step] for step in steps)

    @property
    def read(self) -> int:
        """The number of messages that were read and are not committed."""
        return sum(self._counts.values()) - self.handed_out

    @property
    def handed_out(self) -> int:
        """The number of messages that Tarry delivered and that are neither acknowledged nor rejected."""
        return self.count(*OUT)

    @property
    def has_to_produce(self) -> bool:
        """True if messages wait to be published, or for their target to take more."""
        return bool(self._to_produce or self._resting or self._parked or self._messages_rest)

    def find(self, lane: Lane, position: tuple[int, int]) -> Item[Content, Lane] | None:
        """Return the uncommitted message that was read at a position of a lane."""
        return self._known.get((lane, position))

    def held(self, of: Callable[[Lane], bool]) -> list[Item[Content, Lane]]:
        """Return the uncommitted messages that were read from these lanes."""
        return [item for (lane, _), item in self._known.items() if of(lane)]

    def lanes_held(self, before_s: float) -> list[Lane]:
        """Return the lanes whose commit something has blocked since before that time."""
        return [
            lane
            for lane, order in self._lanes.items()
            if order and order[0].step is not Step.ADDED and order[0].entered_s < before_s
        ]

    def waiting_for(self, target: str) -> int:
        """Return the number of messages that wait for a target."""
        return sum(len(each.get(target, ())) for each in (self._to_produce, self._resting, self._parked))

    # Entering, taking, answering

    def enter(self, items: Iterable[Item[Content, Lane]]) -> None:
        """Add messages that were read or delivered, in that order."""
        for item in items:
            self._counts[item.step] += 1
            size_bytes, item.size_bytes = item.size_bytes, 0
            self.resize(item, size_bytes)
            if item.lane is not None and item.position is not None:
                self._known[item.lane, item.position] = item
            if item.lane is not None and item.in_order:
                self._lanes.setdefault(item.lane, deque()).append(item)
            self._wait(item)

    def resize(self, item: Item[Content, Lane], size_bytes: int) -> None:
        """Set the memory of a message's payload."""
        if item.step in OUT:
            self.fetched_bytes += size_bytes - item.size_bytes
        else:
            self.read_bytes += size_bytes - item.size_bytes
        item.size_bytes = size_bytes

    def take(self, work: Work, rows_max: int) -> list[Item[Content, Lane]]:
        """Take up to `rows_max` messages for work that is neither PRODUCE nor COMMIT, each until it is answered."""
        waiting = self._waiting[work]
        taken: list[Item[Content, Lane]] = []
        while waiting and len(taken) < rows_max:
            item = waiting.popleft()
            if not item.is_forgotten:
                taken.append(item)
        return taken

    def take_to_produce(
        self, rows_max: int, allowed: Callable[[str, int], int], bytes_max: int = 2**63
    ) -> list[Item[Content, Lane]]:
        """Take up to `rows_max` messages to publish, of about `bytes_max` in memory.

        `allowed` is called for each target that has messages and does not rest, with a number of messages, and returns
        how many may go to it now. The target that was served first is asked last the next time.
        """
        taken: list[Item[Content, Lane]] = []
        bytes_left = bytes_max
        for target in list(self._to_produce):
            waiting = self._to_produce[target]
            while waiting and waiting[0].is_forgotten:
                waiting.popleft()
            if not waiting:
                del self._to_produce[target]
                self._unpark(target, rows_max)
            elif (rows := allowed(target, _fitting(waiting, rows_max - len(taken), bytes_left))) > 0:
                del self._to_produce[target]
                for _ in range(rows):
                    item = waiting.popleft()
                    if not item.is_forgotten:
                        taken.append(item)
                        bytes_left -= item.size_bytes
                if waiting:
                    self._to_produce[target] = waiting
                if len(waiting) < rows_max:
                    # Twice as many: one message tries whether the target works, and then it soon runs at full speed.
                    self._unpark(target, min(2 * rows, rows_max))
            if len(taken) >= rows_max or bytes_left <= 0:
                break
        return taken

    def take_to_commit(self, of: Callable[[Lane], bool] = lambda lane: True) -> list[Item[Content, Lane]]:
        """Take the messages of one lane that may be committed, in the order of reading where that matters.

        In a lane that is committed in order, that is the longest prefix in which everything is durable elsewhere;
        otherwise, everything durable elsewhere. A lane has one commit in flight. `of` selects lanes.
        """
        for lane, done in self._done.items():
            if done and lane not in self._committing and of(lane):
                self._committing[lane] = taken = list(done)
                done.clear()
                return taken
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
        """Record the result of committing what `take_to_commit` returned."""
        lane = items[0].lane
        if lane is None or self._committing.pop(lane, None) is None:
            return  # The lane was lost meanwhile.
        if answer is Answer.AGAIN:
            (self._lanes if items[0].in_order else self._done)[lane].extendleft(reversed(items))
            return
        for item in items:
            self._forget(item)

    def answer(
        self, item: Item[Content, Lane], answer: Answer, reason: str = "", *, instead: Step | None = None
    ) -> None:
        """Record the result of the work for which a message was taken.

        `reason` is the reason of a refusal. `instead` replaces the step to which a refusal leads. Raises
        CannotBeRefused.
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
        """Forget messages of a lane that another relay reads now, and ignore later answers about them."""
        for item in (*self._committing.pop(lane, ()), *self._lanes.pop(lane, ())):
            self._forget(item)

    # Targets and messages at rest

    def rest_target(self, target: str, until_s: float) -> None:
        """Give out nothing for a target until then."""
        waiting = self._to_produce.pop(target, None)
        if waiting or target not in self._resting:
            self._resting.setdefault(target, deque()).extend(waiting or ())
        self._rests_until[target] = until_s
        heapq.heappush(self._wakes, (until_s, target))

    def wake_target(self, target: str) -> None:
        """End the rest of a target."""
        if self._rests_until.pop(target, None) is None:
            return
        waiting = self._resting.pop(target)
        if waiting:
            self._to_produce[target] = waiting
        else:
            self._unpark(target, 1)

    def rest_message(self, item: Item[Content, Lane], until_s: float, *, parked: bool) -> None:
        """Let a message that was taken for publishing rest alone.

        With `parked`, which is for a delivered message, its payload is dropped and fetched again.
        """
        if item.is_forgotten:
            return
        if parked:
            self._set_step(item, Step.PARKED)
        heapq.heappush(self._messages_rest, (until_s, next(self._numbers), item))

    def wake(self, now_s: float) -> None:
        """End the rests that are over."""
        while self._wakes and self._wakes[0][0] <= now_s:
            until_s, target = heapq.heappop(self._wakes)
            if self._rests_until.get(target) == until_s:
                self.wake_target(target)
        while self._messages_rest and self._messages_rest[0][0] <= now_s:
            item = heapq.heappop(self._messages_rest)[2]
            if not item.is_forgotten:
                self._wait(item)

    def park(
        self, rows: int, takes_nothing: Callable[[str], bool], bytes_over: int = 0, rows_max: int = 2**31
    ) -> list[Item[Content, Lane]]:
        """Park delivered messages that wait for a target which takes nothing now; return them.

        Parks `rows` messages, and more until memory is down by `bytes_over`, but at most `rows_max`. The last messages
        of the target with the most go first. A target that does not rest keeps one, which finds out when it takes
        messages again; one that rests needs none.
        """
        queues = [(target, each, 0) for target, each in self._resting.items() if each]
        queues += [(name, each, 1) for name, each in self._to_produce.items() if len(each) > 1 and takes_nothing(name)]
        parked: list[Item[Content, Lane]] = []
        for target, waiting, left in sorted(queues, key=lambda each: -len(each[1])):
            if len(parked) >= rows_max or (len(parked) >= rows and bytes_over <= 0):
                break
            some: deque[Item[Content, Lane]] = deque()
            others: deque[Item[Content, Lane]] = deque()
            while len(waiting) > left and len(parked) + len(some) < rows_max:
                if len(parked) + len(some) >= rows and bytes_over <= 0:
                    break
                item = waiting.pop()
                (some if item.step is Step.FETCHED else others).appendleft(item)
                bytes_over -= item.size_bytes if item.step is Step.FETCHED else 0
            waiting.extend(others)
            for item in some:
                self._set_step(item, Step.PARKED)
            if some:
                self._parked.setdefault(target, deque()).extend(some)
                parked += some
        return parked

    def take_overdue(self, before_s: float) -> int:
        """Move DIRECT messages that have waited for their target since before then to OVERDUE; return how many."""
        if not self._counts[Step.DIRECT]:
            return 0
        overdue: list[Item[Content, Lane]] = []

        def is_overdue(item: Item[Content, Lane]) -> bool:
            return item.step is Step.DIRECT and item.entered_s < before_s and not item.is_forgotten

        for queues in (self._to_produce, self._resting):
            for target, waiting in queues.items():
                if some := [item for item in waiting if is_overdue(item)]:
                    overdue += some
                    queues[target] = deque(item for item in waiting if not is_overdue(item))
        overdue += [item for _, _, item in self._messages_rest if is_overdue(item)]
        self._messages_rest = [each for each in self._messages_rest if not is_overdue(each[2])]
        heapq.heapify(self._messages_rest)
        for item in overdue:
            self._move(item, Step.OVERDUE)
        return len(overdue)

    def take_waiting(self, target: str, rows_max: int) -> list[Item[Content, Lane]]:
        """Take at most this many messages that wait for a target, even while it rests, each until it is answered."""
        taken: list[Item[Content, Lane]] = []
        for queues in (self._to_produce, self._resting, self._parked):
            waiting = queues.get(target, deque())
            while waiting and len(taken) < rows_max:
                taken.append(waiting.popleft())
            if not waiting and queues is not self._resting:
                queues.pop(target, None)
        return [item for item in taken if not item.is_forgotten]

    def _unpark(self, target: str, rows: int) -> None:
        """Let at most this many parked messages be fetched again."""
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
        self._set_step(item, step)
        item.raised, item.may_be_done = 0, False
        if step in _NEW_MESSAGES:
            item.trials = None
        if step is Step.BAD:
            item.target = self._dead_letters
        elif step is Step.RESULT:
            item.target = self._results
        self._wait(item)

    def _set_step(self, item: Item[Content, Lane], step: Step) -> None:
        size_bytes = item.size_bytes
        self.resize(item, 0)
        self._counts[item.step] -= 1
        self._counts[step] += 1
        item.step = step
        if step in _DROPPED:
            self._drop(item.content)
        else:
            self.resize(item, size_bytes)

    def _forget(self, item: Item[Content, Lane]) -> None:
        self._counts[item.step] -= 1
        self.resize(item, 0)
        item.is_forgotten = True
        if item.lane is not None and item.position is not None:
            key = item.lane, item.position
            if self._known.get(key) is item:
                del self._known[key]

    def _wait(self, item: Item[Content, Lane]) -> None:
        """Let a message wait for the work of its step; in a lane with an order it is queued already."""
        work = self._table[item.step].work
        if work is Work.PRODUCE:
            queues = self._resting if item.target in self._rests_until else self._to_produce
            queues.setdefault(item.target, deque()).append(item)
        elif work is not Work.COMMIT:
            self._waiting[work].append(item)
        elif not item.in_order and item.lane is not None:
            self._done.setdefault(item.lane, deque()).append(item)


def _fitting(waiting: Iterable[Item[Content, Lane]], rows_max: int, bytes_left: int) -> int:
    """Return how many of the first messages fit; the one that fills the bytes is the last."""
    rows = 0
    for item in itertools.islice(waiting, rows_max):
        if bytes_left <= 0:
            break
        rows += 1
        bytes_left -= item.size_bytes
    return rows
