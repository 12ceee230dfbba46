"""The port between a relay and a broker. Each broker has an adapter that implements it.

Positions are those that Tarry stores: ledger and entry. An adapter maps them to the broker's message ids.
Failures have three scopes. `Unreachable` is temporary: the relay repeats the call. `SessionOver` and `NotThere` end the
session with the broker: the relay closes it and opens another one. Any other exception is a surprise. It ends the
message being handled, if there is one, or else the session; it never ends the process.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import enum
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

CLOCK_APART_MS = 1_000
"""Difference of two clocks from which a finding reports it (ms)"""
OWN_HEADERS_BYTES_MAX = 2_048
"""Upper bound on the headers that the relay adds to a message (bytes)"""
_CANCEL_AGAIN_S = 1.0


class Unreachable(Exception):
    """A broker that is unable to do it now. The message says what was tried and what happened."""


class NotThere(Exception):
    """A log that does not exist, or is another one by now: the relay opens a new session."""


class SessionOver(Exception):
    """A connection closed for good, or refused credentials: the relay opens a new session."""


class BadPosition(ValueError):
    """A text that is no position of this broker. The message says what it is and how a position is written."""


class NobodyCancelled(Exception):
    """An `asyncio.CancelledError` of a library, although no one had cancelled the call."""


async def asked(call: Awaitable[T]) -> T:
    """Await a call; raise NobodyCancelled for an `asyncio.CancelledError` without a cancellation of this task.

    No handler catches CancelledError, so it would end the process.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise NobodyCancelled(f"CancelledError: {error}") from error


def one_for_each(answers: object, rows: int, kind: type[T]) -> list[T]:
    """Return the answers of a call that answers for each message.

    Raises TypeError if they are not that many of this type.
    """
    if not isinstance(answers, Sequence):
        raise TypeError(f"{type(answers).__name__} was answered in place of {rows} rows")
    found = [each for each in answers if isinstance(each, kind)]
    if len(answers) != rows or len(found) != rows:
        raise TypeError(f"{len(answers)} rows were answered, {len(found)} of them {kind.__name__}, in place of {rows}")
    return found


def must_be_same(log: str, generation: str, now: str) -> None:
    """Compare a log's generation with its former one. Raises NotThere if it is another one."""
    if now != generation:
        raise NotThere(f"{log} was created again: its generation is {now} now, and was {generation}")


# Messages


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message as its broker has it."""

    headers: Mapping[str, str]
    """Headers as text for the relay, with the names that `Names.header_key` gives"""
    body: Any
    """Everything that the adapter needs to publish it again: every header and every byte"""
    repeated: Collection[str] = ()
    """Names of headers that occur more than once, as in `headers`"""
    sent_at_ms: int = 0
    """Unix time when the broker took it (ms), the same at each read; negative or in seconds if its producer set it so
    """
    size_bytes: int = 0
    """Approximate memory of its headers and payload (bytes)"""


NOT_YET = Message({}, None)
"""Stands for a message that could not be fetched now; compare it by identity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A message that was read and must be committed."""

    ledger_id: int
    entry_id: int
    message: Message | None
    """None if the log had lost it when it was read"""
    lane: Hashable
    """Part of the log to which it belongs; a partition that returns after it was lost is another lane"""
    receipt: Any = None
    """Data that the adapter needs to commit it"""
    alone_until_s: float = 0.0
    """Time by `time.monotonic` until which no other relay can have read it, and this one only once; 0.0 if it may have
    been read before
    """

    @property
    def position(self) -> tuple[int, int]:
        return self.ledger_id, self.entry_id

    @property
    def sent_at_ms(self) -> int:
        """The Unix time when the broker took it (ms); 0 if nothing is known of it."""
        return 0 if self.message is None else self.message.sent_at_ms


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """The result of one read."""

    read: Sequence[Read] = ()
    lost_lanes: Sequence[Hashable] = ()
    """Lanes that another relay reads from now on; the relay forgets their uncommitted messages before it takes in
    `read`
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish."""

    target: str
    message: Message | None
    """The original; None for a bare message, whose headers and payload are only the relay's own"""
    own_headers: Mapping[str, str]
    """Headers of the relay, which replace the original's of the same name"""
    once_id: str
    """Name by which an output that can drop repeats drops a message"""


# Answers


class Meaning(enum.Enum):
    """The meaning of a broker's answer to one message."""

    TAKEN = "taken"
    """Confirmed and durable"""
    REFUSED = "refused for good"
    """Never possible, and nothing was published"""
    NOT_NOW = "refused for now"
    """Nothing was published; another try may succeed"""
    UNKNOWN = "unknown"
    """Possibly published; another try is safe"""


class Cause(enum.Enum):
    """The reason why a target did not take a message."""

    OTHER = "other"
    LIMIT = "space, quota or rights"
    """Other messages may still pass, so repeated refusals never become a refusal for good."""
    MISSING = "no such target"
    """The broker reports that it does not have the target."""


@dataclasses.dataclass(frozen=True, slots=True)
class Meant:
    """A line of a table of answers."""

    meaning: Meaning
    cause: Cause = Cause.OTHER


@dataclasses.dataclass(frozen=True, slots=True)
class Produced:
    """The result of one message."""

    meant: Meant = Meant(Meaning.TAKEN)
    code: str = ""
    """The broker's name of the answer, for metrics; the class of an exception if there is none"""
    text: str = ""
    """Explanation for people, beginning with the target; empty if it was taken"""

    @property
    def is_taken(self) -> bool:
        return self.meant.meaning is Meaning.TAKEN


# Findings


class Grade(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A relay runs all the same."""
    MISSING = "missing"
    """A name does not exist. `check` calls it wrong; `run` waits for the source and the retry log."""
    WRONG = "wrong"
    """A payload can be dropped before its delivery, or a name is of another kind. A relay does not start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was judged."""

    name: str
    """Subject of the judgement, such as `retention`; `source.accept` names it"""
    grade: Grade
    text: str
    """One line that names the object, its value and, unless the grade is OK, what to do"""


def finding_of_clock(whose: str, told_ms: int, asked_at_ms: int) -> Finding:
    """Judge a clock by the time that it reported between `asked_at_ms` and now, both Unix time (ms)."""
    apart_ms = told_ms - min(max(told_ms, asked_at_ms), now_ms())
    text = f"{whose} is {apart_ms:+d} ms from this machine"
    if abs(apart_ms) < CLOCK_APART_MS:
        return Finding("clock", Grade.OK, text)
    late = f"{text}, so messages come that much too early or late; synchronize both clocks"
    return Finding("clock", Grade.WARNING, late)


def now_ms() -> int:
    """Return this machine's Unix time (ms)."""
    return time.time_ns() // 1_000_000


# Methods of an adapter


class Reader(Protocol):
    """A member of a group that reads a log: no member gets what another has read until that member is gone."""

    @property
    def commits_in_order(self) -> bool:
        """True if a commit covers everything that was read from its lane before it."""
        ...

    @property
    def hold_every_s(self) -> float | None:
        """The interval of `hold` for uncommitted messages (seconds); None if it need not be called."""
        ...

    async def read(self, rows_max: int, wait_s: float) -> Portion:
        """Return the next messages, at most `rows_max`; an empty portion if none comes within `wait_s`."""
        ...

    async def commit(self, read: Sequence[Read]) -> None:
        """Commit messages of one lane, in the order in which they were read if `commits_in_order`."""
        ...

    async def hold(self, read: Sequence[Read]) -> None:
        """Report to the broker that this relay still works on these messages, so that no other relay gets them."""
        ...

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Return for each (ledger, entry) whether no member of the group will read it again.

        True if a relay has committed it, or if the log never had it and is read beyond it. False if the broker does not
        report it.
        """
        ...


class Log(Protocol):
    """The source, by position."""

    @property
    def tells_limits(self) -> bool:
        """True if the broker reports the limits by which it drops messages. Otherwise only a loss reveals them."""
        ...

    async def generation(self) -> str:
        """Return a name that no other log of this name has, even one created after this one was deleted."""
        ...

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[Message | None]:
        """Return the messages at these ascending (ledger, entry), with None for one that is gone for good.

        Returns NOT_YET for those that could not be fetched now; raises Unreachable if that is all of them. Raises
        NotThere if a check after the read finds another generation, whose messages at these positions are others.
        """
        ...

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """Return the first entry of each ledger that the log may still have; everything before it is gone."""
        ...

    async def kept_ms(self) -> int | None:
        """Return how long the log keeps a message (ms), or None for no limit of age."""
        ...


class FirstGeneration(abc.ABC):
    """A log that remembers the generation found first."""

    _first: str | None = None

    async def generation(self) -> str:
        """Return a name that no other log of this name has, even one created after this one was deleted."""
        now = await self._generation_now()
        self._first = self._first or now
        return now

    async def first_generation(self) -> str:
        """Return the generation found first; the log may be another one by now."""
        return self._first or await self.generation()

    @abc.abstractmethod
    async def _generation_now(self) -> str:
        """Ask the broker. Raises NotThere, Unreachable."""


class Output(Protocol):
    """The publishing side of a broker."""

    async def produce(self, messages: Sequence[Outgoing]) -> Sequence[Produced]:
        """Publish messages and return the result of each. Two calls may be in flight at once.

        Raises Unreachable if all of them may be repeated. Any other exception makes the relay publish them one by one.
        """
        ...


class Names(Protocol):
    """The rules of names at this broker, which are checked without asking it."""

    def header_key(self, name: str) -> str:
        """Return a header's name as in `Message.headers`: in lower case if the broker reads any case."""
        ...

    def position_of(self, text: str) -> tuple[int, int]:
        """Return the (ledger, entry) of a message of the source, from the broker's answer to its producer.

        For NATS that is the stream sequence, `17`; for Redis the id of the entry, `1795773600000-0`; for Kafka
        partition and offset, `3-17`. Raises BadPosition.
        """
        ...

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        """Return the reason why (ledger, entry) cannot be a position of the source; empty if it can."""
        ...

    def target_fault(self, target: str) -> str:
        """Return the reason why a name cannot be a target by the broker's rules; empty if it can.

        Names that the broker or the relay use themselves cannot, because they would match some pattern. `comes_back`
        checks whether messages would return to the relay.
        """
        ...

    def message_fault(self, message: Message) -> str:
        """Return the reason why a message cannot be published with the relay's headers added; empty if it can."""
        ...

    def comes_back(self, target: str) -> bool:
        """Return whether this relay reads what is published to this target, as source or retry log."""
        ...

    def own_targets(self) -> Sequence[str]:
        """Return the targets that this relay reads, by name; for a name that stands for many, an example of them."""
        ...


class Broker(Names, Protocol):
    """One session with a broker."""

    @property
    def source(self) -> Reader: ...

    @property
    def retries(self) -> Reader | None:
        """The reader of the retry log; None if none is configured."""
        ...

    @property
    def log(self) -> Log: ...

    @property
    def output(self) -> Output: ...

    async def must_answer(self) -> None:
        """Ask something that a broker can only answer if it works. Raises Unreachable, SessionOver, NotThere."""
        ...

    def findings(self) -> AsyncIterator[Finding]:
        """Judge everything a relay needs of the broker, source and retry log first; change nothing.

        The name of a finding about the existence of a log is `source`, `retry` or `target`.
        """
        ...

    async def source_findings(self) -> Sequence[Finding]:
        """Judge again whether the source can drop a payload before its delivery. Raises NotThere, Unreachable."""
        ...


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended.

    In Python 3.11 the client of a broker may lose a cancellation that arrives at the same moment as its answer.
    """
    while left := [each for each in tasks if not each.done()]:
        for each in left:
            each.cancel()
        await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
