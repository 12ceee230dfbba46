"""An account of every answer by identity: what each position may be, by all that callers asked, were told and received.

Owns: the orders in which the requests of a position may have been carried out, and the verdict when none of them fits.
Does not own: the traffic (`answer_traffic`).

A position is in one of several states, each by another order of its requests. A request that has no answer yet may be
carried out once, at any moment. An answer OK leaves the states in which it was, with that outcome; a refusal leaves
those in which it was not. Without a known outcome it may be carried out for ever after, and so may a request that the
library repeats. A delivery, and a look at the end, leave the states that have such a row. No state left is a breach. It
is named by the kind of answer, or the count, without which there is a state.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tarry
from tarry import errors
from tests.wire._support.traffic import now_ms

# A topic, or a register of names, ledger and entry
Identity: TypeAlias = tuple[str, int, int]
# What the answer to a request says of one position
OK, IGNORED, DUPLICATE, NOT_FOUND, ALREADY_DUE = "ok", "ignored", "duplicate", "not found", "already due"
REFUSED, UNKNOWN = "refused", "unknown"
NO_STREAM = 0


class What(enum.Enum):
    """A change that callers ask for. A subscription or a topic is added and deleted as a row is."""

    ADD = "add"
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"
    PURGE = "purge"
    TRIM = "trim"
    DELETE = "delete"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request for one position. `due_ms` is a new row's time, or with `count` the delivery that is meant.

    `is_repeated`: the library may send it more than once before it answers.
    """

    what: What
    due_ms: int = 0
    count: int = 0
    delay_ms: int = 0
    is_repeated: bool = False


class World(NamedTuple):
    """What a position may be. `streams`: those that have its current delivery; `dead`: its dead letters."""

    is_there: bool = False
    due_ms: int = 0
    redeliveries: int = 0
    not_before_ms: int = 0
    streams: frozenset[int] = frozenset()
    dead: int = 0

    def gone(self, dead: int = 0) -> World:
        return World(dead=self.dead + dead)

    def added(self, due_ms: int, redeliveries: int = 0, not_before_ms: int = 0) -> World:
        return World(True, due_ms, redeliveries, not_before_ms, dead=self.dead)


class _State(NamedTuple):
    """One order of requests. `said`: by number, what those say that were carried out and are not answered yet."""

    world: World
    said: frozenset[tuple[int, str]] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One of: a request was sent (`asked`), it was answered (`told`), a delivery came, or a look was taken (`seen`).

    `number` is the request's or the stream's; `count` is None where a look does not tell it.
    """

    at_ms: int
    kind: str
    number: int = 0
    asked: Asked | None = None
    via: str = ""
    told: frozenset[str] = frozenset()
    is_there: bool = True
    due_ms: int = 0
    count: int | None = 0
    dead: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "asked":
                assert self.asked is not None
                named = f"due {self.asked.due_ms}, count {self.asked.count}, delay {self.asked.delay_ms}"
                text = f"{self.number}: {self.asked.what.value} ({named}) by {self.via}"
            case "told":
                text = f"{self.number}: {' or '.join(sorted(self.told))}"
            case "came":
                text = f"came on stream {self.number}: due {self.due_ms}, count {self.count}"
            case _:
                row = f"due {self.due_ms}, count {self.count}" if self.is_there else "no row"
                text = f"seen: {row}, {self.dead} dead letters"
        return f"{self.at_ms} {text}"


def landings(asked: Asked, sent_ms: int, world: World, until_ms: int) -> Iterator[tuple[str, World]]:
    """Yield what a request that is carried out between the two times may say, and what it leaves."""
    is_meant = world.is_there and world.due_ms == asked.due_ms
    # A position of the log that Tarry does not have, or no longer, is taken as if it had been delivered.
    is_of_log = not world.is_there and not asked.due_ms
    match asked.what:
        case What.ADD:
            yield (DUPLICATE, world) if world.is_there else (OK, world.added(asked.due_ms))
        case What.CANCEL | What.RESCHEDULE:
            if not world.is_there:
                yield NOT_FOUND, world
                return
            if world.due_ms > sent_ms and not world.streams:
                is_cancel = asked.what is What.CANCEL
                yield OK, world.gone() if is_cancel else world.added(asked.due_ms)
            if world.due_ms <= until_ms:
                yield ALREADY_DUE, world
        case What.ACK:
            yield (OK, world.gone()) if is_meant and world.redeliveries == asked.count else (IGNORED, world)
        case What.NACK:
            again = world.added(asked.due_ms, asked.count + 1, sent_ms + asked.delay_ms)
            if is_of_log or (is_meant and asked.count >= world.redeliveries):
                yield OK, again
                return
            if is_meant and asked.count + 1 == world.redeliveries and not world.streams:
                yield OK, again
            yield IGNORED, world
        case What.REJECT:
            is_taken = is_of_log or (is_meant and asked.count >= world.redeliveries)
            yield (OK, world.gone(dead=1)) if is_taken else (IGNORED, world)
        case What.PURGE:
            yield OK, world._replace(dead=0)
        case What.TRIM:
            yield OK, world.gone()
        case What.DELETE:
            yield (OK, world.gone()) if world.is_there else (NOT_FOUND, world)


@dataclasses.dataclass(slots=True)
class _Orders:
    """The states of a position after some of its events. `forgiven`: what the answers and counts are not held to."""

    forgiven: Collection[str] = ()
    states: set[_State] = dataclasses.field(default_factory=lambda: {_State(World())})
    under_way: dict[int, Event] = dataclasses.field(default_factory=dict)
    # Requests of unknown outcome, with when each was sent first
    late: dict[Asked, int] = dataclasses.field(default_factory=dict)
    # Each makes one dead letter at most, however often a late add brings the row back.
    rejects: int = 0

    def takes(self, event: Event) -> bool:
        """Go on with an event; return whether a state is left."""
        if event.kind == "asked":
            self.under_way[event.number] = event
            self.rejects += event.asked is not None and event.asked.what is What.REJECT
            return True
        self._carry_out(event.at_ms)
        match event.kind:
            case "told":
                self._answer(event)
            case "came":
                self.states = {
                    state._replace(world=state.world._replace(streams=state.world.streams | {event.number}))
                    for state in self.states
                    if self._has(state.world, event)
                    and event.at_ms >= max(state.world.due_ms, state.world.not_before_ms)
                    and (event.number == NO_STREAM or event.number not in state.world.streams)
                }
            case "seen":
                self.states = {
                    state._replace(world=state.world._replace(streams=frozenset()))
                    for state in self.states
                    if state.world.dead == event.dead
                    and (self._has(state.world, event) if event.is_there else not state.world.is_there)
                }
        return bool(self.states)

    def _has(self, world: World, event: Event) -> bool:
        is_count = event.count in (None, world.redeliveries) or "count" in self.forgiven
        return world.is_there and world.due_ms == event.due_ms and is_count

    def _answer(self, event: Event) -> None:
        number, told = event.number, event.told
        request = self.under_way.pop(number)
        assert request.asked is not None
        if "refusals" in self.forgiven and REFUSED in told:
            told = frozenset({UNKNOWN})
        if "answers" in self.forgiven and REFUSED not in told:
            told = frozenset({UNKNOWN})
        if UNKNOWN in told or request.asked.is_repeated:
            self.late.setdefault(request.asked, request.at_ms)
        left = set()
        for state in self.states:
            # A request that is not carried out has been refused, in this state.
            said = next((said for other, said in state.said if other == number), REFUSED)
            if UNKNOWN in told or said in told:
                left.add(_State(state.world, frozenset(each for each in state.said if each[0] != number)))
        self.states = left

    def _carry_out(self, until_ms: int) -> None:
        """Add the states that follow from those that there are, whichever requests are carried out by then."""
        left = list(self.states)
        while left:
            state = left.pop()
            for found in self._next(state, until_ms):
                if found not in self.states and found.world.dead <= self.rejects:
                    self.states.add(found)
                    left.append(found)

    def _next(self, state: _State, until_ms: int) -> Iterator[_State]:
        done = {number for number, _ in state.said}
        for number, event in self.under_way.items():
            assert event.asked is not None
            if number not in done or event.asked.is_repeated:
                others = frozenset(each for each in state.said if each[0] != number)
                for said, world in landings(event.asked, event.at_ms, state.world, until_ms):
                    yield _State(world, others | {(number, said)})
        for asked, sent_ms in self.late.items():
            for _, world in landings(asked, sent_ms, state.world, until_ms):
                yield state._replace(world=world)


# Why no state was left, by what there would have been one without
_REASONS = {
    "refusals": "a request that was refused took effect",
    "answers": "it is not as it was answered",
    "count": "its redelivery count is wrong",
}


@dataclasses.dataclass(slots=True)
class _Row:
    events: list[Event] = dataclasses.field(default_factory=list)
    orders: _Orders = dataclasses.field(default_factory=_Orders)
    judged: int = 0


class Answers:
    """The account of all positions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[Identity, _Row] = {}
        self._epochs: dict[str, int] = {}
        self._requests = 0
        self._breaches: list[str] = []
        self.counts: Counter[str] = Counter()
        """Answers by the change and what they said, and deliveries"""

    def asked(self, positions: Sequence[Identity], asked: Sequence[Asked], via: str) -> list[int]:
        """Note that a request is about to be sent, and by whom; return its number for each position."""
        with self._lock:
            numbers = list(range(self._requests, self._requests + len(positions)))
            self._requests += len(positions)
            for position, number, each in zip(positions, numbers, asked, strict=True):
                row = self._rows.setdefault(position, _Row())
                row.events.append(Event(now_ms(), "asked", number, asked=each, via=via))
            return numbers

    def told(
        self,
        positions: Sequence[Identity],
        numbers: Sequence[int],
        answer: Sequence[Collection[str]] | tarry.TarryError,
    ) -> None:
        """Note the answer to a request: for each position, what it says, or may say; or its failure."""
        if isinstance(answer, tarry.TarryError):
            if not may_be_told(answer):
                self.breach(f"{positions} were told {answer!r}: {self._rows[positions[0]].events[-1]}")
            answer = [[REFUSED if is_refusal(answer) else UNKNOWN]] * len(positions)
        with self._lock:
            for position, number, each in zip(positions, numbers, answer, strict=True):
                row = self._rows[position]
                asked = next(event.asked for event in row.events if event.number == number and event.asked)
                self.counts[f"{asked.what.value}: {' or '.join(sorted(each))}"] += 1
                row.events.append(Event(now_ms(), "told", number, told=frozenset(each)))

    def reached(self, topic: str, epoch: int) -> bool:
        """Note that a daemon spoke under this epoch; return False if it is over: what it says is dropped."""
        with self._lock:
            self._epochs[topic] = max(epoch, self._epochs.get(topic, 0))
            return epoch == self._epochs[topic]

    def came(self, stream: int, rows: Iterable[tuple[Identity, int, int]], *, at_ms: int) -> None:
        """Note rows (position, due time, count) that came on a stream, or by a lease."""
        with self._lock:
            for position, due_ms, count in rows:
                self.counts["came"] += 1
                if position in self._rows:
                    self._rows[position].events.append(Event(at_ms, "came", stream, due_ms=due_ms, count=count))
                else:
                    self._breaches.append(f"{position} came with due {due_ms}, count {count}, and was never sent")

    def seen(self, rows: Mapping[Identity, tuple[int, int | None]], dead: Counter[Identity]) -> None:
        """Note a look at all positions: the rows (due time, count) that are there, and dead letters."""
        with self._lock:
            for position in {*rows, *dead} - self._rows.keys():
                self._breaches.append(f"{position} is there, and was never sent")
            for position, row in self._rows.items():
                is_settled = row.judged == len(row.events) and not any(
                    each.world.is_there for each in row.orders.states
                )
                if is_settled and position not in rows and not dead[position]:
                    continue
                due_ms, count = rows.get(position, (0, 0))
                event = Event(
                    now_ms(), "seen", is_there=position in rows, due_ms=due_ms, count=count, dead=dead[position]
                )
                row.events.append(event)

    def breach(self, text: str) -> None:
        """Note something that must not happen, found by the traffic."""
        with self._lock:
            self._breaches.append(text)

    def judge(self) -> list[str]:
        """Go on with each position to its last event; return all breaches so far."""
        with self._lock:
            for position, row in self._rows.items():
                # The library hands over later what it has received.
                row.events[row.judged :] = sorted(row.events[row.judged :], key=lambda event: event.at_ms)
                while row.judged < len(row.events) and row.orders.states:
                    event = row.events[row.judged]
                    row.judged += 1
                    if not row.orders.takes(event):
                        story = "".join(f"\n    {each}" for each in row.events[: row.judged])
                        self._breaches.append(f"{position}: {_reason(row.events[: row.judged])}:{story}")
                if not row.orders.states:
                    # It was told once; what follows is as new.
                    row.judged = len(row.events)
            return list(self._breaches)


def _reason(events: Sequence[Event]) -> str:
    for forgiven, reason in _REASONS.items():
        orders = _Orders(forgiven=(forgiven,))
        if all(orders.takes(event) for event in events):
            return reason
    return "no order of what was asked leads to this"


def may_be_told(error: tarry.TarryError) -> bool:
    """Return whether a caller may see it while daemons die, wait or are superseded."""
    return errors.is_retryable(error) or isinstance(error, (errors.DeadlineExceeded, errors.Closed))


def is_refusal(error: tarry.TarryError) -> bool:
    """Return whether the request has changed nothing, by what the daemon says, in words too."""
    if isinstance(error, errors.Unavailable):
        return error.former_owner_ms is not None or "nothing was" in error.message
    return isinstance(error, (errors.NotOwner, errors.Aborted, errors.ResourceExhausted))
