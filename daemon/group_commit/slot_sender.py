"""Writes the staged sections of any number of shards, slot after slot.

The sections that shards stage while a slot is being written make up the next slot. `shard_slots` holds what a shard has
staged and its waiting callers; `daemon_log` encodes and sends the slot.

Acknowledgements may wait for company, because they hold up only their own answers: while the tick is stretched, and if
several came together before, for as long as a tick. They never wait where keys have an order.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from daemon.group_commit.confirmation import Confirmation
from daemon.runtime import backoff
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.slot_format import DeletionRecord, Record

# Age of the newest confirmation from which nothing is answered before there is another one (seconds, R8)
ANSWER_UNCONFIRMED_S = 30.0
# Size of a slot while several shards wait (bytes), so that a shard with much to write does not delay the others
SHARED_SLOT_BYTES = 1 << 20
# Decisions that may wait for company do if at least this many were in the last slot that had any.
COMPANIONS_LEAST = 3


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Section:
    """The part of a slot that belongs to one shard: decisions on topics and on deletions, in the order of applying."""

    shard: int
    records: Sequence[Record]
    deletions: Sequence[DeletionRecord]


@dataclasses.dataclass(frozen=True, slots=True)
class LandedSection:
    """A section that is certain: its section number in the shard, and its size."""

    slot: ShardSlot
    size_bytes: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LandedSlot:
    """A slot of the log that is certain.

    `number` is None if nothing of it could be encoded and none was written. `sections` maps shards to what landed,
    `unencodable` maps shards to the reason why their section can never be stored.
    """

    number: int | None
    sections: Mapping[int, LandedSection]
    unencodable: Mapping[int, Exception]


class SlotWriter(Protocol):
    """The writer of a log's slots, one after the other."""

    async def write(self, sections: Sequence[Section]) -> LandedSlot:
        """Write the sections, each of another shard, as the next slot.

        Returns when the slot is certain, however long that takes. An error that it raises ends the log.
        """
        ...


class Staged(Protocol):
    """The staged decisions of one shard."""

    @property
    def waiting_slots(self) -> int:
        """The number of sections that wait for a slot; the last one may still have room."""
        ...

    @property
    def next_bytes(self) -> int:
        """An upper bound of the size of the first waiting section (bytes)."""
        ...

    def take(self) -> Section:
        """Take the first waiting section, which is in flight from now on.

        None is taken again before it has `landed`. A shard with more to write joins the sender again.
        """
        ...

    def landed(self, section: Section, landed: LandedSection) -> None:
        """Apply the section that was taken, which is certain. Errors are the shard's alone: this raises nothing."""
        ...

    def never_lands(self, error: Exception) -> None:
        """End the shard, since the section that was taken cannot be encoded and its memory can never be stored."""
        ...


class SlotSender:
    """The loop that writes the staged sections of any number of shards.

    `run` must be running. It ends when the writer raises; its caller informs the shards.

    A slot leaves at once if nothing came while the one before it was written. Otherwise the log is busy, and a slot
    with room waits for company: as long as the one before it took, but at most `linger_s`. `every_s` is the shortest
    time between two slots. Requests that may wait do so for `company_s`, but at most `linger_s` (all in seconds).
    """

    def __init__(
        self,
        writer: SlotWriter,
        confirmation: Confirmation,
        *,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        linger_s: float,
        every_s: float = 0.0,
        company_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._writer = writer
        self._confirmation = confirmation
        self._clock = clock
        self._sleep = sleep
        self._linger_s = linger_s
        self._every_s = every_s
        self._company_s = company_s
        # Shards that have something for the next slot, in the order in which they came
        self._line: dict[Staged, None] = {}
        self._wanted = asyncio.Event()
        # Decisions that may wait, for the next slot and in the last one that had any, and the timer that ends the wait
        self._companions = self._companions_before = 0
        self._soon: asyncio.TimerHandle | None = None
        self._writing_since_s: float | None = None
        self._left_at_s = clock() - every_s
        self.applied = 0
        """The last slot of the log of which every shard has applied its section."""

    def join(self, staged: Staged) -> None:
        """Let the shard's sections ride with the next slot; `send` requests one for them."""
        self._line[staged] = None

    def leave(self, staged: Staged) -> None:
        """Take no more sections of the shard; one in flight may still land."""
        self._line.pop(staged, None)

    def send(self) -> None:
        """Request a slot now, if anything is staged."""
        self._wanted.set()

    def send_soon(self) -> None:
        """Request a slot for a decision that may wait for company.

        It waits `company_s`, or until others request a slot, if several such decisions were in the last slot that had
        any.
        """
        self._companions += 1
        if self._soon is not None or self._wanted.is_set():
            return
        has_company = self._companions_before >= COMPANIONS_LEAST
        wait_s = min(self._company_s(), self._linger_s) if has_company else 0.0
        if wait_s > 0:
            self._soon = asyncio.get_running_loop().call_later(wait_s, self._wanted.set)
        else:
            self._wanted.set()

    @property
    def stalled_s(self) -> float:
        """Seconds the slot in flight has been pending; 0.0 if none is."""
        return 0.0 if self._writing_since_s is None else self._clock() - self._writing_since_s

    async def run(self) -> None:
        """Write slots until the writer raises or confirmations end."""
        while True:
            await self._wanted.wait()
            if (early_s := self._left_at_s + self._every_s - self._clock()) > 0:
                await self._sleep(early_s)
            if not self._line:
                self._wanted.clear()
                continue
            took_s = await self._send_one()
            linger_s = min(took_s, self._linger_s)
            if not self._line or not self._wanted.is_set() or linger_s <= 0:
                continue
            if all(staged.waiting_slots == 1 for staged in self._line):
                # There is room for more.
                await self._sleep(linger_s)

    async def _send_one(self) -> float:
        """Write the next slot; return how long that took (seconds)."""
        self._left_at_s = self._writing_since_s = begun_s = self._clock()
        taken = self._next_of_line()
        sections = [staged.take() for staged in taken]
        self._begin_next()
        landed = await self._writer.write(sections)
        took_s = self._clock() - begun_s
        if not self._confirmation.fresh_within(ANSWER_UNCONFIRMED_S):
            # The slot was sent long ago: a successor may have replayed it and continued.
            await self._confirmation.confirm_after(self._clock())
        for staged, section in zip(taken, sections, strict=True):
            if section.shard in landed.sections:
                staged.landed(section, landed.sections[section.shard])
            else:
                staged.never_lands(landed.unencodable[section.shard])
        if landed.number is not None:
            self.applied = landed.number
        self._writing_since_s = None
        return took_s

    def _begin_next(self) -> None:
        """Begin the next slot, since one has left. Sections that had no room want it at once."""
        if self._companions:
            self._companions, self._companions_before = 0, self._companions
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._line:
            self._wanted.set()
        else:
            self._wanted.clear()

    def _next_of_line(self) -> list[Staged]:
        """Remove from the line the shards of the next slot: the first one, and all that fit in with it."""
        if len(self._line) == 1:
            taken = list(self._line)
            self._line.clear()
            return taken
        taken, size_bytes = [], 0
        for staged in self._line:
            more_bytes = staged.next_bytes
            if not taken or size_bytes + more_bytes <= SHARED_SLOT_BYTES:
                taken.append(staged)
                size_bytes += more_bytes
        for staged in taken:
            del self._line[staged]
        return taken
