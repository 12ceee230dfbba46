"""The task that reads a run of slots of a log.

Owns: the full decoding of log slots and of the sections in them, what may follow what in a log, and where in it
sections of which shards lie.
Does not own: which sections and slots should be there (`log_rules`), and which rows sections hold (`held`).

A slot that lies alone may be a stray: a late copy that came into a number which was emptied. So only neighbours are
compared. Behind a FENCE nothing is: one that was put into an emptied number of a living log stops nobody.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from batch.audit import content as audit_content
from batch.audit.findings import Finding, Flaw, Kind, Severity, Tally
from batch.audit.reading import READ_AHEAD
from batch.engine.root import Root
from storage_backends import object_store
from storage_backends.formats import format_errors, log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import LogSlot, LogSlotHeader, LogSlotKind
from storage_backends.log_reading import LogEnd
from storage_backends.slot_log import ReadSlot, SlotLog

BATCH_SLOTS: Final = 64
"""Slots of a task that are in memory at once; one seldom has more than a megabyte."""

NO_SHARD: Final = -1

Sections = npt.NDArray[np.uint64]
"""Shape (n, 3): the number of the log slot, the epoch and the shard slot of each section of one shard in one log."""


@dataclasses.dataclass(slots=True)
class LogSeen:
    """What became of a run. `absent`: listed numbers that were not there any more. `damaged`, `unreadable`: numbers of
    which nothing is known, the former with the reason. `ends`: the numbers of FENCE and CLOSE. `last`: the last slot of
    the run, None when it cannot be read. `sections`: by shard; damaged ones too, where header and table are whole.
    """

    tally: Tally = dataclasses.field(default_factory=Tally)
    absent: list[int] = dataclasses.field(default_factory=list)
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    unreadable: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    last: LogEnd | None = None
    sections: dict[int, Sections] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogRun:
    """Slots of one log, ascending. `before`: the listed slot below them, None if there is none."""

    log_id: str
    numbers: tuple[int, ...]
    before: int | None

    def run(self, root: Root) -> LogSeen:
        with concurrent.futures.ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="audit") as threads:
            slots = root.logs(threads).log(self.log_id)
            try:
                return _Run(self, slots).seen()
            finally:
                slots.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Looked:
    """A slot that was read. `slot`: None when header or table are not whole, or are of another slot. `flaws`: each with
    the shard whose section it is about.
    """

    slot: LogSlot | None
    flaws: tuple[tuple[int, Flaw], ...]


class _Run:
    def __init__(self, run: LogRun, slots: SlotLog) -> None:
        self._run = run
        self._slots = slots
        self._seen = LogSeen()
        # None behind what could not be read.
        self._last: LogSlotHeader | None = None
        self._sections: dict[int, list[tuple[int, int, int]]] = {}

    def seen(self) -> LogSeen:
        if self._run.before is not None:
            for read in self._slots_of([self._run.before], tell=False):
                looked = self._look(read)
                self._last = None if looked.slot is None else looked.slot.header
        for first in range(0, len(self._run.numbers), BATCH_SLOTS):
            numbers = self._run.numbers[first : first + BATCH_SLOTS]
            found = set()
            for read in self._slots_of(numbers, tell=True):
                found.add(read.number)
                self._take(read)
            self._seen.absent += [each for each in numbers if each not in found and each not in self._seen.unreadable]
        self._seen.sections = {shard: np.array(rows, np.uint64) for shard, rows in self._sections.items()}
        return self._seen

    def _slots_of(self, numbers: Sequence[int], *, tell: bool) -> Iterator[ReadSlot]:
        """The slots that are there. `tell`: what the store does not give is a finding."""
        for after, through in _runs(numbers):
            try:
                yield from self._slots.read(after, through)
            except object_store.StoreError as error:
                if through - after > 1:
                    for number in range(after + 1, through + 1):
                        yield from self._slots_of([number], tell=tell)
                elif tell:
                    self._seen.unreadable.append(through)
                    self._find(through, NO_SHARD, Flaw(Kind.UNREADABLE, str(error)))

    def _take(self, read: ReadSlot) -> None:
        looked = self._look(read)
        if looked.flaws:
            # Damage is believed when two reads have found it.
            for again in self._slots_of([read.number], tell=False):
                read, looked = again, self._look(again)
        number, slot = read.number, looked.slot
        for shard, flaw in looked.flaws:
            self._find(number, shard, flaw)
        before, self._last = self._last, None if slot is None else slot.header
        self._seen.last = None
        if read.body is not None:
            self._seen.tally.saw("log slot", len(read.body))
        if slot is None:
            self._seen.damaged[number] = looked.flaws[0][1].detail
            return
        self._seen.last = LogEnd(number, dict(slot.header.heads))
        if slot.header.kind.ends:
            self._seen.ends.append(number)
        for shard in slot.shards:
            head = slot.header.heads[shard]
            self._sections.setdefault(shard, []).append((number, head.epoch, head.last_slot))
        if before is not None and before.number == number - 1 and not before.kind.ends:
            for shard, detail in _flaws_of_following(before, slot):
                self._find(number, shard, Flaw(Kind.LOG_RULE, detail))

    def _look(self, read: ReadSlot) -> _Looked:
        if read.body is None:
            return _Looked(None, ((NO_SHARD, Flaw(Kind.DAMAGED, read.damage)),))
        try:
            slot = log_slot_format.decode_log_slot(read.body)
        except format_errors.FormatError as error:
            return _Looked(None, ((NO_SHARD, audit_content.damaged(error)),))
        header = slot.header
        if (header.log_id, header.number) != (self._run.log_id, read.number):
            flaw = Flaw(Kind.LOG_RULE, f"it is slot {header.number} of log {header.log_id}")
            return _Looked(None, ((NO_SHARD, flaw),))
        flaws = [(shard, flaw) for shard in slot.shards for flaw in _flaws_of_section(slot, shard)]
        if read.damage and not flaws:
            flaws.append((NO_SHARD, Flaw(Kind.DAMAGED, read.damage)))
        return _Looked(slot, tuple(flaws))

    def _find(self, number: int, shard: int, flaw: Flaw) -> None:
        self._seen.tally.find(
            Finding(
                kind=flaw.kind,
                severity=Severity.ERROR,
                object=names.log_slot_key(self._run.log_id, number),
                detail=flaw.detail,
                shard=shard,
                offset=flaw.offset,
            )
        )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as extents: after, through."""
    begin = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[begin] - 1, numbers[place - 1]
            begin = place


def _flaws_of_section(slot: LogSlot, shard: int) -> Iterator[Flaw]:
    """Whether the section can be decoded to the last column, and is what the table says."""
    head = slot.header.heads[shard]
    try:
        body = slot.section(shard)
    except format_errors.FormatError as error:
        yield audit_content.damaged(error)
        return
    try:
        stored = slot_format.read_slot(body)
        for record in stored.records:
            record.decoded()
    except format_errors.FormatError as error:
        yield Flaw(Kind.DAMAGED, f"section {head.last_slot} of shard {shard}: {error}")
        return
    header = stored.header
    if (header.shard, header.epoch, header.slot) != (shard, *head):
        said = f"section {header.slot} of shard {header.shard}, epoch {header.epoch}"
        yield Flaw(Kind.LOG_RULE, f"its section {head.last_slot} of shard {shard}, epoch {head.epoch}, is {said}")


def _flaws_of_following(before: LogSlotHeader, after: LogSlot) -> Iterator[tuple[int, str]]:
    """What the heads say that may not follow; each with the shard."""
    kind, heads, here = after.header.kind, after.header.heads, set(after.shards)
    for shard in sorted(before.heads.keys() | heads.keys()):
        was, now = before.heads.get(shard), heads.get(shard)
        if now is None:
            yield shard, f"shard {shard} left its heads"
        elif shard not in here:
            if now != was:
                what = f"it is a {kind.name}" if kind is not LogSlotKind.DATA else "it has no section of the shard"
                yield shard, f"its head of shard {shard} is {_told(now)}, the one before it {_told(was)}, but {what}"
        elif was is not None and (
            now.epoch < was.epoch
            or now.last_slot <= was.last_slot
            or (now.epoch == was.epoch and now.last_slot != was.last_slot + 1)
        ):
            yield shard, f"its section of shard {shard} is {_told(now)}, after {_told(was)}"


def _told(head: log_slot_format.Head | None) -> str:
    return "none" if head is None else f"section {head.last_slot} of epoch {head.epoch}"
