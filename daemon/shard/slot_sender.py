"""The sender of a log: what shards have staged while a slot is being written is the next slot.

Owns: the loop that writes slot after slot, which of the shards have something for the next one, how long it waits for
company, and since when one is on its way.
Does not own: what a shard has staged and who waits for it (`shard_staging`), the slot's bytes and its PUT (the writer).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from daemon.shard.confirmation import Confirmation
from daemon.surroundings import backoff
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.formats.slot_format import DeletionRecord, Record

# Without a confirmation for so long nothing is answered before there is one (R8).
ANSWER_UNCONFIRMED_S = 30.0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Section:
    """What one shard has in a slot, in the order in which it is applied: decisions on topics, and on deletions."""

    shard: int
    records: Sequence[Record]
    deletions: Sequence[DeletionRecord]


class SlotWriter(Protocol):
    """What writes the slots of a log, one after the other."""

    async def write(self, sections: Sequence[Section]) -> Sequence[ShardSlot]:
        """Writes the sections, of different shards, as the next slot; returns the number of each in its shard once that
        is certain, however long it takes. What it raises ends the log.
        """
        ...


class Staged(Protocol):
    """The decisions of one shard that are on their way into slots."""

    @property
    def waiting_slots(self) -> int:
        """Sections that wait for a slot; the last may have room still."""
        ...

    def take(self) -> Section:
        """The first section that waits. It is on its way from now on, and no other is taken until it has `landed`. With
        more to be written the shard joins the sender again.
        """
        ...

    def landed(self, section: Section, slot: ShardSlot) -> None:
        """The section that was taken is certain. What comes of that is the shard's alone: this raises nothing."""
        ...


class SlotSender:
    """Writes what shards have staged; any number of them may stand behind it. `run` must be running; it ends when the
    writer raises: whoever runs it tells the shards.

    `linger_s`: so long a slot that has room waits for company, when another one has just been written.
    """

    def __init__(
        self,
        writer: SlotWriter,
        confirmation: Confirmation,
        *,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        linger_s: float,
    ) -> None:
        self._writer = writer
        self._confirmation = confirmation
        self._clock = clock
        self._sleep = sleep
        self._linger_s = linger_s
        # Those that have something for the next slot, in the order in which they came.
        self._line: dict[Staged, None] = {}
        self._wanted = asyncio.Event()
        self._writing_since_s: float | None = None

    def join(self, staged: Staged) -> None:
        """What it has rides with the next slot; a slot for it alone is asked for by `send`."""
        self._line[staged] = None

    def leave(self, staged: Staged) -> None:
        """Takes nothing more of what it has; what of it is on its way may still land."""
        self._line.pop(staged, None)

    def send(self) -> None:
        """A slot is wanted now, if anything is staged."""
        self._wanted.set()

    @property
    def stalled_s(self) -> float:
        """For how long the slot that is being written has been on its way; 0.0 when none is."""
        return 0.0 if self._writing_since_s is None else self._clock() - self._writing_since_s

    async def run(self) -> None:
        """Writes slots until the writer raises, or no confirmation comes any more."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._line:
                await self._send_one()
                if self._line and self._linger_s and self._has_room:
                    await self._sleep(self._linger_s)

    @property
    def _has_room(self) -> bool:
        """Whether more would ride with what waits: then company is worth waiting for."""
        return all(staged.waiting_slots == 1 for staged in self._line)

    async def _send_one(self) -> None:
        self._writing_since_s = self._clock()
        taken, self._line = list(self._line), {}
        sections: list[Section] = []
        for staged in taken:
            sections.append(staged.take())
        slots = await self._writer.write(sections)
        if not self._confirmation.fresh_within(ANSWER_UNCONFIRMED_S):
            # The slot was sent long ago: a successor may have replayed it and gone on since.
            await self._confirmation.confirm_after(self._clock())
        for staged, section, slot in zip(taken, sections, slots, strict=True):
            staged.landed(section, slot)
        self._writing_since_s = None
