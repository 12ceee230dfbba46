"""What a relay asks of a broker. An adapter fills it (`tarry_relay.kafka_broker`, `nats_broker`, `redis_broker`).

Owns: the calls, and what they promise.
Does not own: when they are made (`tarry_relay.running`).

Positions are those that Tarry gets, ledger and entry: an adapter maps what its broker calls a message. Every call
raises `Unreachable` for what passes, and is repeated then; whatever else it raises ends the relay.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any, Protocol

CLOCK_APART_MS = 1_000
"""So far from each other clocks may be."""


class Unreachable(Exception):
    """The broker cannot do it now. The message says what was tried and what came of it."""


class NotThere(Exception):
    """The log is not there, or is another one by now: the relay begins anew."""


def must_be_same(log: str, generation: str, now: str) -> None:
    """Raises NotThere: a log is of another generation now than it was."""
    if now != generation:
        raise NotThere(f"{log} was made anew: its generation is {now} now, and was {generation}")


class BadPosition(ValueError):
    """A text names no position of this broker. The message says what it is and how one is written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message as its broker has it.

    `headers`: as text, for the relay to read. `body`: whatever the adapter needs to publish it again.
    """

    headers: Mapping[str, str]
    body: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A message that was read, to be committed."""

    ledger_id: int
    entry_id: int
    message: Message | None
    """None: the log had lost it when it was read."""
    lane: Hashable
    """Which part of the log it is of: a commit stands for all that was read of a lane before. A partition that comes
    back after it was lost is another lane."""
    sent_at_ms: int
    """When the broker took it, Unix time in ms: the same whenever it is read."""
    receipt: Any = None
    """What the adapter needs to commit it."""
    alone_until_s: float = 0.0
    """Until when, by `time.monotonic`, certainly no relay but this one has read it, and this one only once; 0: it may
    have been read before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """What one call has read."""

    read: Sequence[Read] = ()
    lost_lanes: Sequence[Hashable] = ()
    """Lanes that another relay reads from now on; what was not committed of them is forgotten before `read` is taken
    in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish.

    `message`: None: nothing is known of it but what the relay says. `own_headers`: of the relay, in place of those of
    the message that have their names. `once_id`: an output that can drop what it has drops it by this name.
    `has_body`: False for a dead letter that was too large.
    """

    target: str
    message: Message | None
    own_headers: Mapping[str, str]
    once_id: str
    has_body: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Produced:
    """What came of one message: confirmed and durable, unless one of these says otherwise."""

    refused: str = ""
    """It will never be taken, and why: too large, say. Nothing of it is there."""
    failed: str = ""
    """It may be there or not, and why. Its target rests, and it is published again."""


class Reader(Protocol):
    """Reads a log on, as one of a group: what one of them has read, no other has, until that one is gone."""

    async def read(self, rows_max: int, wait_s: float) -> Portion:
        """What comes next, at most `rows_max`; nothing when nothing came within `wait_s`."""
        ...

    async def commit(self, read: Sequence[Read]) -> None:
        """Commits messages of one lane, in the order in which they were read, and so all of that lane before them."""
        ...

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        """Says of each (ledger, entry) whether nobody of the group will read it again: it was committed, by whichever
        relay, or the log never had it and is read beyond it. False wherever the broker does not say so.
        """
        ...


class Log(Protocol):
    """The source, by positions."""

    async def generation(self) -> str:
        """A name that another log of this name, made when this one was deleted, does not have."""
        ...

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[Message | None]:
        """The messages at these (ledger, entry), which ascend, of the log of this generation; None for one that is gone
        for good. Raises NotThere, by a look at the generation after they were read: what another log has at these
        positions are other messages.
        """
        ...

    async def first_entries(self, ledgers: Sequence[int]) -> Mapping[int, int]:
        """The first entry of each ledger that the log may still have; everything before it is gone."""
        ...

    async def kept_ms(self) -> int | None:
        """For how long the log keeps a message, by its age; None: no age ends it."""
        ...


class FirstGeneration(abc.ABC):
    """Keeps the generation that a log was found with first."""

    _first: str | None = None

    async def generation(self) -> str:
        """A name that another log of this name, made when this one was deleted, does not have."""
        now = await self._generation_now()
        self._first = self._first or now
        return now

    async def first_generation(self) -> str:
        """The generation that was found first; the log may be another one by now."""
        return self._first or await self.generation()

    @abc.abstractmethod
    async def _generation_now(self) -> str:
        """Asks the broker. Raises NotThere, Unreachable."""


class Output(Protocol):
    """Where messages are published."""

    async def produce(self, messages: Sequence[Outgoing]) -> Sequence[Produced]:
        """Publishes them; what is confirmed is durable. Two calls may be under way at once."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at before a relay runs."""

    name: str
    is_good: bool
    text: str


def finding_of_clock(whose: str, told_ms: int, asked_at_ms: int) -> Finding:
    """Whether a clock agrees with that of this machine: it has told its time between then and now, both in Unix ms."""
    apart_ms = told_ms - min(max(told_ms, asked_at_ms), now_ms())
    text = f"{whose} is {apart_ms:+d} ms from this machine"
    if abs(apart_ms) < CLOCK_APART_MS:
        return Finding("clock", True, text)
    return Finding("clock", False, f"{text}, and messages come so much too early or late: synchronise both clocks")


def now_ms() -> int:
    """The time of this machine, Unix time in ms."""
    return time.time_ns() // 1_000_000


class Names(Protocol):
    """What a broker calls its messages and its targets. Nothing is asked of it for that."""

    def position_of(self, text: str) -> tuple[int, int]:
        """(ledger, entry) of a message of the source, by what the broker answered its producer with.

        NATS: the stream sequence, `17`. Redis: the id of the entry, `1795773600000-0`. A broker that answers with a
        partition and an offset: both with a hyphen, `3-17`. Raises BadPosition.
        """
        ...

    def comes_back(self, target: str) -> bool:
        """Whether what is published to this target is read by this relay again, from the source or the retry log."""
        ...

    def own_targets(self) -> Sequence[str]:
        """Targets that come back, by name; where a name may stand for many, an example of them."""
        ...


class Broker(Names, Protocol):
    """One broker, connected."""

    @property
    def source(self) -> Reader: ...

    @property
    def retries(self) -> Reader | None:
        """None: no retry log is configured."""
        ...

    @property
    def log(self) -> Log: ...

    @property
    def output(self) -> Output: ...

    def findings(self) -> AsyncIterator[Finding]:
        """Looks at whether the broker is set up for this relay; changes nothing."""
        ...
