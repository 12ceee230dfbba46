"""The sender of a log: what shards have staged while a slot is being written is the next slot.

Owns: the loop that writes slot after slot, which of the shards have something for the next one, how long it waits for
company, up to which slot the shards have what is theirs, and since when one is on its way.
Does not own: what a shard has staged and who waits for it (`shard_staging`), the slot's bytes and its PUT (the log).

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

# Without a confirmation for so long nothing is answered before there is one (R8).
ANSWER_UNCONFIRMED_S = 30.0
# While more than one shard waits a slot has so much: then a shard with much to write does not delay the others.
SHARED_SLOT_BYTES = 1 << 20
# Who may wait for company does where so many of them were in the last slot that had any.
COMPANIONS_LEAST = 3


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Section:
    """What one shard has in a slot, in the order in which it is applied: decisions on topics, and on deletions."""

    shard: int
    records: Sequence[Record]
    deletions: Sequence[DeletionRecord]


@dataclasses.dataclass(frozen=True, slots=True)
class LandedSection:
    """A section that is certain: its number in its shard, and its size."""

    slot: ShardSlot
    size_bytes: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LandedSlot:
    """A slot of the log that is certain. `number`: None when nothing of it could be encoded, and none was written.
    `sections`: by shard. `unencodable`: by shard, why its section can never be stored.
    """

    number: int | None
    sections: Mapping[int, LandedSection]
    unencodable: Mapping[int, Exception]


class SlotWriter(Protocol):
    """What writes the slots of a log, one after the other."""

    async def write(self, sections: Sequence[Section]) -> LandedSlot:
        """Writes the sections, of different shards, as the next slot; returns when it is certain, however long that
        takes. What it raises ends the log.
        """
        ...


class Staged(Protocol):
    """The decisions of one shard that are on their way into slots."""

    @property
    def waiting_slots(self) -> int:
        """Sections that wait for a slot; the last may have room still."""
        ...

    @property
    def next_bytes(self) -> int:
        """An upper bound of the size of the first section that waits."""
        ...

    def take(self) -> Section:
        """The first section that waits. It is on its way from now on, and no other is taken until it has `landed`. With
        more to be written the shard joins the sender again.
        """
        ...

    def landed(self, section: Section, landed: LandedSection) -> None:
        """The section that was taken is certain. What comes of that is the shard's alone: this raises nothing."""
        ...

    def never_lands(self, error: Exception) -> None:
        """The section that was taken cannot be encoded: what the shard's memory holds can never be stored."""
        ...


class SlotSender:
    """Writes what shards have staged; any number of them may stand behind it. `run` must be running; it ends when the
    writer raises: whoever runs it tells the shards.

    A slot leaves at once when nothing came while the one before it was written. Else the log is busy, and a slot that
    has room waits for company: as long as the one before it took, and not longer than `linger_s`. `every_s`: slots
    leave at most that often. `company_s`: so long wait those that may, but not longer than `linger_s`.
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
        # Those that have something for the next slot, in the order in which they came.
        self._line: dict[Staged, None] = {}
        self._wanted = asyncio.Event()
        # How many who may wait ask for the next slot, and did for the last one that had any; and the end of their time.
        self._companions = self._companions_before = 0
        self._soon: asyncio.TimerHandle | None = None
        self._writing_since_s: float | None = None
        self._left_at_s = clock() - every_s
        self.applied = 0
        """The last slot of the log of which every shard has what is its own."""

    def join(self, staged: Staged) -> None:
        """What it has rides with the next slot; a slot for it alone is asked for by `send`."""
        self._line[staged] = None

    def leave(self, staged: Staged) -> None:
        """Takes nothing more of what it has; what of it is on its way may still land."""
        self._line.pop(staged, None)

    def send(self) -> None:
        """A slot is wanted now, if anything is staged."""
        self._wanted.set()

    def send_soon(self) -> None:
        """A slot is wanted by who may wait for company: for as long as `company_s` says, or until others want a slot,
        where the last slot that had any of them had several.
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
        """For how long the slot that is being written has been on its way; 0.0 when none is."""
        return 0.0 if self._writing_since_s is None else self._clock() - self._writing_since_s

    async def run(self) -> None:
        """Writes slots until the writer raises, or no confirmation comes any more."""
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
                # There is room: more would ride with what waits.
                await self._sleep(linger_s)

    async def _send_one(self) -> float:
        """Writes the next slot; how long that took, in seconds."""
        self._left_at_s = self._writing_since_s = begun_s = self._clock()
        taken = self._next_of_line()
        sections = [staged.take() for staged in taken]
        self._begin_next()
        landed = await self._writer.write(sections)
        took_s = self._clock() - begun_s
        if not self._confirmation.fresh_within(ANSWER_UNCONFIRMED_S):
            # The slot was sent long ago: a successor may have replayed it and gone on since.
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
        """A slot has left: whoever asks from now on asks for the next one, and what had no room wants it."""
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
        """Who is in the next slot: the first of the line, and whoever fits in with it. They leave the line."""
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
