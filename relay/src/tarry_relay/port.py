"""The port between a relay and a broker. Each broker has an adapter that fills it.

Positions are those that Tarry stores: ledger and entry. An adapter maps them to what its broker calls a message.

Failures have three scopes. `Unreachable` passes: the relay repeats the call. `SessionOver` and `NotThere` end the
session with the broker: the relay closes it and opens another one. Any other exception is a surprise. It ends the
message that was handled, if there is one, or else the session; it never ends the process.
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
"""How far two clocks may differ before a finding says so (ms)."""
OWN_HEADERS_BYTES_MAX = 2_048
"""An upper bound on the headers that the relay adds to a message (bytes)."""
_CANCEL_AGAIN_S = 1.0


class Unreachable(Exception):
    """The broker cannot do it now. The message says what was tried and what came of it."""


class NotThere(Exception):
    """The log does not exist, or is another one by now: the relay opens a new session."""


class SessionOver(Exception):
    """The connection is closed for good, or its credentials are refused: the relay opens a new session."""


class BadPosition(ValueError):
    """A text is no position of this broker. The message says what it is and how a position is written."""


class NobodyCancelled(Exception):
    """A library has raised `asyncio.CancelledError`, and nobody had cancelled the call."""


async def asked(call: Awaitable[T]) -> T:
    """Await a call. Raises NobodyCancelled where `asyncio.CancelledError`, which no handler catches, would end the
    process although nobody has cancelled this task.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise NobodyCancelled(f"CancelledError: {error}") from error


def one_for_each(answers: object, rows: int, kind: type[T]) -> list[T]:
    """Return answers of a call that answers for each message. Raises TypeError if they are not so many of this type."""
    if not isinstance(answers, Sequence):
        raise TypeError(f"{type(answers).__name__} was answered in place of {rows} rows")
    found = [each for each in answers if isinstance(each, kind)]
    if len(answers) != rows or len(found) != rows:
        raise TypeError(f"{len(answers)} rows were answered, {len(found)} of them {kind.__name__}, in place of {rows}")
    return found


def must_be_same(log: str, generation: str, now: str) -> None:
    """Compare a log's generation with the one it had. Raises NotThere if it is another one."""
    if now != generation:
        raise NotThere(f"{log} was made anew: its generation is {now} now, and was {generation}")


# Messages.


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message as its broker has it."""

    headers: Mapping[str, str]
    """Headers as text, for the relay to read; names as `Names.header_key` gives them."""
    body: Any
    """What the adapter needs to publish it again: every header and every byte."""
    repeated: Collection[str] = ()
    """Names of headers that stand twice or more, as in `headers`."""
    sent_at_ms: int = 0
    """When the broker took it, Unix time in ms: the same whenever it is read. Negative or in seconds if its producer
    said so."""
    size_bytes: int = 0
    """About what its headers and payload take in memory."""


NOT_YET = Message({}, None)
"""Stands for a message that could not be fetched now. Compare it by identity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A message that was read and has to be committed."""

    ledger_id: int
    entry_id: int
    message: Message | None
    """None if the log had lost it when it was read."""
    lane: Hashable
    """The part of the log it belongs to. A partition that comes back after it was lost is another lane."""
    receipt: Any = None
    """What the adapter needs to commit it."""
    alone_until_s: float = 0.0
    """Until when, by `time.monotonic`, no other relay can have read it, and this one only once; 0.0 if it may have been
    read before."""

    @property
    def position(self) -> tuple[int, int]:
        return self.ledger_id, self.entry_id

    @property
    def sent_at_ms(self) -> int:
        """When the broker took it, Unix time in ms; 0 if nothing is known of it."""
        return 0 if self.message is None else self.message.sent_at_ms


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """What one call has read."""

    read: Sequence[Read] = ()
    lost_lanes: Sequence[Hashable] = ()
    """Lanes that another relay reads from now on. The relay forgets what it has not committed of them before it takes
    in `read`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish."""

    target: str
    message: Message | None
    """The original. None for a bare one: it has neither headers nor payload but the relay's own."""
    own_headers: Mapping[str, str]
    """Headers of the relay. They replace the original's of the same name."""
    once_id: str
    """An output that can drop what it has drops a message by this name."""


# Answers.


class Meaning(enum.Enum):
    """What a broker's answer to one message means."""

    TAKEN = "taken"
    """Confirmed and durable."""
    REFUSED = "refused for good"
    """It will never be taken, and nothing of it is there."""
    NOT_NOW = "refused for now"
    """Nothing of it is there. Another try may succeed."""
    UNKNOWN = "unknown"
    """It may be there or not. Another try is safe."""


class Cause(enum.Enum):
    """Why a target did not take a message."""

    OTHER = "other"
    LIMIT = "space, quota or rights"
    """Other messages may still pass, so repeated refusals never become a refusal for good."""
    MISSING = "no such target"
    """The broker says that it does not have the target."""


@dataclasses.dataclass(frozen=True, slots=True)
class Meant:
    """A line of a table of answers."""

    meaning: Meaning
    cause: Cause = Cause.OTHER


@dataclasses.dataclass(frozen=True, slots=True)
class Produced:
    """What came of one message."""

    meant: Meant = Meant(Meaning.TAKEN)
    code: str = ""
    """The broker's own name of the answer, for metrics; the class of an exception if there is none."""
    text: str = ""
    """What happened, for people; begins with the target. Empty if it was taken."""

    @property
    def is_taken(self) -> bool:
        return self.meant.meaning is Meaning.TAKEN


# Findings.


class Grade(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """A relay runs all the same."""
    MISSING = "missing"
    """A name does not exist. `check` calls it wrong; `run` waits for the source and the retry log."""
    WRONG = "wrong"
    """A payload can go before its delivery, or a name is of another kind. A relay does not start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was judged."""

    name: str
    """What was judged, such as `retention`; `source.accept` names it."""
    grade: Grade
    text: str
    """One line that names the object, its value and, unless the grade is OK, what to do."""


def finding_of_clock(whose: str, told_ms: int, asked_at_ms: int) -> Finding:
    """Judge a clock that has told its time between then and now, both in Unix ms."""
    apart_ms = told_ms - min(max(told_ms, asked_at_ms), now_ms())
    text = f"{whose} is {apart_ms:+d} ms from this machine"
    if abs(apart_ms) < CLOCK_APART_MS:
        return Finding("clock", Grade.OK, text)
    late = f"{text}, so messages come that much too early or late; synchronize both clocks"
    return Finding("clock", Grade.WARNING, late)


def now_ms() -> int:
    """Return the time of this machine, Unix time in ms."""
    return time.time_ns() // 1_000_000


# What an adapter does.


class Reader(Protocol):
    """Reads a log on, as one of a group: what one member has read, no other one has until that member is gone."""

    @property
    def commits_in_order(self) -> bool:
        """Whether a commit stands for everything that was read of its lane before it."""
        ...

    @property
    def hold_every_s(self) -> float | None:
        """How often `hold` must be called for what is read and not committed (seconds); None if never."""
        ...

    async def read(self, rows_max: int, wait_s: float) -> Portion:
        """Return what comes next, at most `rows_max`; an empty portion if nothing comes within `wait_s`."""
        ...

    async def commit(self, read: Sequence[Read]) -> None:
        """Commit messages of one lane, in the order in which they were read if `commits_in_order`."""
        ...

    async def hold(self, read: Sequence[Read]) -> None:
        """Tell the broker that this relay still works on these messages, so that it gives them to no other one."""
        ...

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Say for each (ledger, entry) whether no member of the group will read it again.

        True if a relay has committed it, or the log never had it and is read beyond it. False wherever the broker does
        not say so.
        """
        ...


class Log(Protocol):
    """The source, by positions."""

    @property
    def tells_limits(self) -> bool:
        """Whether the broker tells by which limits it drops messages. If not, only a message that is gone shows it."""
        ...

    async def generation(self) -> str:
        """Return a name that another log of this name, made after this one was deleted, does not have."""
        ...

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[Message | None]:
        """Return the messages at these (ledger, entry), which ascend; None for one that is gone for good.

        Return NOT_YET for those that could not be fetched now; raise Unreachable if that is all of them. Raises
        NotThere, by a look at the generation after they were read: another log has other messages at these positions.
        """
        ...

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """Return the first entry of each ledger that the log may still have; everything before it is gone."""
        ...

    async def kept_ms(self) -> int | None:
        """Return for how long the log keeps a message (ms); None if no age ends it."""
        ...


class FirstGeneration(abc.ABC):
    """Remembers the generation that a log was found with first."""

    _first: str | None = None

    async def generation(self) -> str:
        """Return a name that another log of this name, made after this one was deleted, does not have."""
        now = await self._generation_now()
        self._first = self._first or now
        return now

    async def first_generation(self) -> str:
        """Return the generation that was found first; the log may be another one by now."""
        return self._first or await self.generation()

    @abc.abstractmethod
    async def _generation_now(self) -> str:
        """Ask the broker. Raises NotThere, Unreachable."""


class Output(Protocol):
    """Where messages are published."""

    async def produce(self, messages: Sequence[Outgoing]) -> Sequence[Produced]:
        """Publish messages and return what came of each. Two calls may be under way at once.

        Raises Unreachable if all of them may be repeated. Any other exception makes the relay publish them one by one.
        """
        ...


class Names(Protocol):
    """What can be a name at this broker. Nothing is asked of the broker for that."""

    def header_key(self, name: str) -> str:
        """Return a header's name as `Message.headers` has it: in small letters where the broker reads any case."""
        ...

    def position_of(self, text: str) -> tuple[int, int]:
        """Return the (ledger, entry) of a message of the source, by what the broker answered its producer with.

        NATS: the stream sequence, `17`. Redis: the id of the entry, `1795773600000-0`. Kafka: partition and offset,
        `3-17`. Raises BadPosition.
        """
        ...

    def position_fault(self, ledger_id: int, entry_id: int) -> str:
        """Say why (ledger, entry) can be no position of the source; return an empty text if it can."""
        ...

    def target_fault(self, target: str) -> str:
        """Say why a name can be no target, by the rules of the broker; return an empty text if it can.

        Names that the broker or the relay use themselves are none: they would pass some pattern. Whether messages would
        come back is asked of `comes_back`.
        """
        ...

    def message_fault(self, message: Message) -> str:
        """Say why a message cannot be published with the relay's headers beside its own; empty if it can."""
        ...

    def comes_back(self, target: str) -> bool:
        """Say whether this relay reads what is published to this target, as source or retry log."""
        ...

    def own_targets(self) -> Sequence[str]:
        """Return the targets that come back, by name; where a name may stand for many, an example of them."""
        ...


class Broker(Names, Protocol):
    """One session with a broker."""

    @property
    def source(self) -> Reader: ...

    @property
    def retries(self) -> Reader | None:
        """None if no retry log is configured."""
        ...

    @property
    def log(self) -> Log: ...

    @property
    def output(self) -> Output: ...

    async def must_answer(self) -> None:
        """Ask something that the broker can only answer if it works. Raises Unreachable, SessionOver, NotThere."""
        ...

    def findings(self) -> AsyncIterator[Finding]:
        """Judge everything a relay needs of the broker; change nothing. The source and the retry log come first.

        The name of a finding that says whether a log exists is `source`, `retry` or `target`.
        """
        ...

    async def source_findings(self) -> Sequence[Finding]:
        """Judge again whether a payload of the source can go before its delivery. Raises NotThere, Unreachable."""
        ...


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended.

    In Python 3.11 the client of a broker may lose a cancellation that arrives at the same moment as its answer.
    """
    while left := [each for each in tasks if not each.done()]:
        for each in left:
            each.cancel()
        await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
