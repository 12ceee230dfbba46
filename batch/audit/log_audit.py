"""Audits logs: reads runs of slots in tasks, and compares them with the manifests of shards in the driver.

A task decodes log slots and their sections in full, and checks each slot against the one before it. A slot that lies
alone may be a stray: a late copy that landed in a number which was emptied. Therefore only neighbours are compared.
Slots behind a FENCE are not compared: one that was put into an emptied number of a living log stops no daemon.

These must exist, which pure functions check:

    of a log that manifests name: every number above the lowest `after` up to its end, and nothing behind a FENCE
    of a shard: every section above the checkpoint before the newest, once, in the range that has it

Sections that no range covers belong to no shard. Slots of a log below that may have been deleted, and a late copy may
have reappeared. `driver` reads contradictions again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from batch.audit import object_audit
from batch.audit.findings import Finding, Flaw, Kind, Severity, Tally
from batch.audit.reading import READ_AHEAD
from batch.engine.root import Root
from storage_backends import object_store
from storage_backends.formats import format_errors, log_slot_format, names, slot_format
from storage_backends.formats.log_slot_format import LogSlot, LogSlotHeader, LogSlotKind
from storage_backends.formats.manifest import LogRange, ShardManifest
from storage_backends.log_reading import LogEnd
from storage_backends.slot_log import ReadSlot, SlotLog

BATCH_SLOTS: Final = 64
"""Slots of a task that are in memory at once; one seldom has more than a megabyte."""

NO_SHARD: Final = -1

Sections = npt.NDArray[np.uint64]
"""Shape (n, 3): the number of the log slot, the epoch and the section number of each section of one shard in one log"""


@dataclasses.dataclass(slots=True)
class LogSeen:
    """The result of a run.

    `absent` are listed numbers that no longer existed. `damaged`, with the reason, and `unreadable` are numbers of
    slots with unknown content. `ends` are the numbers of FENCE and CLOSE. `last` is the last slot of the run, or None
    if it cannot be read. `sections` are by shard, including damaged ones whose header and table are whole.
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
    """A run of slots of one log, ascending. `before` is the listed slot below them, or None if there is none."""

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
    """A slot that was read.

    `slot` is None if header or table are not whole, or belong to another slot. `flaws` have the shard whose section
    each is about.
    """

    slot: LogSlot | None
    flaws: tuple[tuple[int, Flaw], ...]


class _Run:
    def __init__(self, run: LogRun, slots: SlotLog) -> None:
        self._run = run
        self._slots = slots
        self._seen = LogSeen()
        # None behind a slot that could not be read
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
        """Yield the slots that exist. With `tell`, a slot that the store cannot read is a finding."""
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
            # Damage counts only if two reads have found it.
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
            return _Looked(None, ((NO_SHARD, object_audit.damaged(error)),))
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
    """Yield ascending numbers as extents (after, through)."""
    begin = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[begin] - 1, numbers[place - 1]
            begin = place


def _flaws_of_section(slot: LogSlot, shard: int) -> Iterator[Flaw]:
    """Yield the flaws of a section that cannot be decoded to the last column, or contradicts the table."""
    head = slot.header.heads[shard]
    try:
        body = slot.section(shard)
    except format_errors.FormatError as error:
        yield object_audit.damaged(error)
        return
    try:
        stored = slot_format.read_slot(body)
        for record in stored.records:
            record.decoded()
    except format_errors.FormatError as error:
        flaw = object_audit.damaged(error, f"section {head.last_slot} of shard {shard}: ")
        yield dataclasses.replace(flaw, offset=None)
        return
    header = stored.header
    if (header.shard, header.epoch, header.slot) != (shard, *head):
        said = f"section {header.slot} of shard {header.shard}, epoch {header.epoch}"
        yield Flaw(Kind.LOG_RULE, f"its section {head.last_slot} of shard {shard}, epoch {head.epoch}, is {said}")


def _flaws_of_following(before: LogSlotHeader, after: LogSlot) -> Iterator[tuple[int, str]]:
    """Yield each shard whose head may not follow the one before, with the reason."""
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReadLog:
    """The slots that were read of a log.

    `numbers` u64[n] are those of the existing slots, ascending. `end` is None if its highest slot cannot be read. All
    other fields are those of `LogSeen`, for the whole log.
    """

    log_id: str
    numbers: npt.NDArray[np.uint64]
    damaged: Mapping[int, str]
    unreadable: frozenset[int]
    ends: tuple[int, ...]
    end: LogEnd | None
    sections: Mapping[int, Sections]

    @property
    def highest(self) -> int:
        return int(self.numbers[-1]) if len(self.numbers) else 0

    @staticmethod
    def of(log_id: str, listed: Sequence[int], runs: Iterable[LogSeen]) -> ReadLog:
        """Combine the runs of the listed numbers, in any order."""
        seen = list(runs)
        numbers = np.array(sorted(set(listed) - {each for run in seen for each in run.absent}), np.uint64)
        highest = int(numbers[-1]) if len(numbers) else 0
        parts: dict[int, list[Sections]] = {}
        for run in seen:
            for shard, rows in run.sections.items():
                parts.setdefault(shard, []).append(rows)
        joined = {shard: np.concatenate(rows) for shard, rows in parts.items()}
        return ReadLog(
            log_id=log_id,
            numbers=numbers,
            damaged={number: why for run in seen for number, why in run.damaged.items()},
            unreadable=frozenset(number for run in seen for number in run.unreadable),
            ends=tuple(sorted(number for run in seen for number in run.ends)),
            end=next((run.last for run in seen if run.last is not None and run.last.number == highest), None),
            sections={shard: rows[np.argsort(rows[:, 0], kind="stable")] for shard, rows in joined.items()},
        )

    def covered(self, shard: int, of: LogRange) -> Sections:
        """Return the sections of a shard that the range covers."""
        rows = self.sections.get(shard)
        if rows is None:
            return np.zeros((0, 3), np.uint64)
        number, epoch, slot = rows[:, 0], rows[:, 1], rows[:, 2]
        inside = (epoch == of.epoch) & (number > of.after) & (slot >= of.first_slot)
        if of.through is not None:
            inside &= number <= of.through
        if of.last_slot is not None:
            inside &= slot <= of.last_slot
        covered: Sections = rows[inside]
        return covered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppliedTopic:
    """A topic whose newest manifest has applied a section number above the checkpoint.

    `key` is that of the manifest.
    """

    key: str
    topic: str
    applied: int


@dataclasses.dataclass(frozen=True, slots=True)
class Suspicion:
    """A finding that stands if the shards and logs that it follows from have not changed."""

    finding: Finding
    shards: frozenset[int]
    logs: frozenset[str]


def suspicions(
    tips: Mapping[int, ShardManifest | None],
    logs: Mapping[str, ReadLog],
    applied: Mapping[int, Sequence[AppliedTopic]],
) -> list[Suspicion]:
    """Return all contradictions.

    `tips` are by shard, with None for one that no daemon ever owned, and without shards whose manifest cannot be read.
    `applied` is by shard.
    """
    found: list[Suspicion] = []
    holes: dict[str, list[tuple[int, int]]] = {}
    for shard, tip in tips.items():
        highest_epoch = max(
            (int(log.sections[shard][:, 1].max()) for log in logs.values() if shard in log.sections), default=0
        )
        if highest_epoch > (0 if tip is None else tip.epoch):
            found.append(_beyond(shard, tip, highest_epoch, logs))
        if tip is None:
            continue
        for hole in _holes(tip, logs):
            holes.setdefault(hole.log_id, []).append((hole.after, hole.before))
            found.append(hole.suspicion(tip, logs.get(hole.log_id)))
        found += _twice(tip, logs)
        found += _ahead(tip, logs, applied.get(shard, ()))
    known = [tip for tip in tips.values() if tip is not None]
    for log in logs.values():
        found += _flaws_of_log(log, known, holes.get(log.log_id, []))
    for log_id in frozenset().union(*map(logs_of, known)) - logs.keys() - holes.keys():
        shards = frozenset(tip.shard for tip in known if log_id in logs_of(tip))
        detail = f"log {log_id} has no slot, but is named by the manifests of shards {sorted(shards)}"
        finding = _finding(Kind.SLOT_MISSING, names.log_prefix(log_id), detail)
        found.append(Suspicion(finding, shards, frozenset({log_id})))
    return found


def _finding(kind: Kind, key: str, detail: str, shard: int = NO_SHARD, topic: str = "") -> Finding:
    return Finding(kind=kind, severity=Severity.ERROR, object=key, detail=detail, shard=shard, topic=topic)


# ---- shards


def logs_of(tip: ShardManifest) -> frozenset[str]:
    """Return the logs that the manifest names."""
    return frozenset(each.log_id for each in tip.ranges)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Hole:
    """Sections `first` to `last` of a shard, which no slot of the log holds.

    The slots that could hold them have `after` < number < `before`.
    """

    log_id: str
    after: int
    before: int
    first: int
    last: int

    def suspicion(self, tip: ShardManifest, log: ReadLog | None) -> Suspicion:
        what = f"section {self.first}" if self.first == self.last else f"sections {self.first} to {self.last}"
        if log is None:
            where, key = f"log {self.log_id}, which has no slot", names.log_prefix(self.log_id)
        else:
            where = f"log {self.log_id}, after slot {self.after} and before slot {self.before}"
            key = names.log_slot_key(self.log_id, self.after + 1)
            damaged = [number for number in log.damaged if self.after < number < self.before]
            if damaged:
                where += f"; slot {damaged[0]} is damaged"
        detail = f"{what} of shard {tip.shard} in {where}: replay needs all above section {tip.previous_slot}"
        finding = _finding(Kind.SLOT_MISSING, key, detail, tip.shard)
        return Suspicion(finding, frozenset({tip.shard}), frozenset({self.log_id}))


def _holes(tip: ShardManifest, logs: Mapping[str, ReadLog]) -> Iterator[_Hole]:
    before = tip.previous_slot
    for each in tip.ranges:
        log = logs.get(each.log_id)
        last = _last_slot(tip, each, log)
        if last is not None:
            yield from _holes_in(tip.shard, each, log, max(each.first_slot, before + 1), last)
            before = max(before, last)


def _last_slot(tip: ShardManifest, of: LogRange, log: ReadLog | None) -> int | None:
    """Return the last section number of a range, or None if it is unknown."""
    if of.last_slot is not None:
        return of.last_slot
    known = max(of.first_slot - 1, tip.checkpoint_slot)
    if log is None:
        return known
    if log.end is None:
        return None
    head = log.end.heads.get(tip.shard)
    return max(known, head.last_slot) if head is not None and head.epoch == of.epoch else known


def _holes_in(shard: int, of: LogRange, log: ReadLog | None, first: int, last: int) -> Iterator[_Hole]:
    if first > last:
        return
    if log is None:
        yield _Hole(log_id=of.log_id, after=of.after, before=of.after + 1, first=first, last=last)
        return
    rows = log.covered(shard, of)
    number, slot = rows[:, 0], rows[:, 2]
    end = log.highest if of.through is None else of.through
    for begin, through in _gaps(slot, first, last):
        lower, upper = number[slot < begin], number[slot > through]
        hole = _Hole(
            log_id=of.log_id,
            after=int(lower.max()) if len(lower) else of.after,
            before=int(upper.min()) if len(upper) else end + 1,
            first=begin,
            last=through,
        )
        # A slot that the store could not read has a finding of its own.
        if not any(hole.after < each < hole.before for each in log.unreadable):
            yield hole


def _gaps(numbers: npt.NDArray[np.uint64], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of numbers that are missing between two numbers, however far these are apart."""
    inside = np.unique(numbers[(numbers >= first) & (numbers <= last)])
    bounds = np.concatenate((np.array([first - 1], np.uint64), inside, np.array([last + 1], np.uint64)))
    for place in np.flatnonzero(np.diff(bounds) > 1).tolist():
        yield int(bounds[place]) + 1, int(bounds[place + 1]) - 1


def _twice(tip: ShardManifest, logs: Mapping[str, ReadLog]) -> Iterator[Suspicion]:
    """Yield the sections of the same number that ranges cover in two slots of a log."""
    for each in tip.ranges:
        log = logs.get(each.log_id)
        rows = () if log is None else log.covered(tip.shard, each)
        seen: dict[int, int] = {}
        for number, _, slot in np.asarray(rows).tolist():
            first = seen.setdefault(slot, number)
            if first != number and slot > tip.previous_slot:
                detail = f"section {slot} of shard {tip.shard} is also in slot {first} of the log"
                finding = _finding(Kind.LOG_RULE, names.log_slot_key(each.log_id, number), detail, tip.shard)
                yield Suspicion(finding, frozenset({tip.shard}), frozenset({each.log_id}))


def _beyond(shard: int, tip: ShardManifest | None, epoch: int, logs: Mapping[str, ReadLog]) -> Suspicion:
    log_id, number = next(
        (log.log_id, int(rows[rows[:, 1] == epoch][0, 0]))
        for log in logs.values()
        if (rows := log.sections.get(shard)) is not None and (rows[:, 1] == epoch).any()
    )
    section = f"there is a section of epoch {epoch} in slot {number} of log {log_id}"
    if tip is None:
        detail = f"there is no manifest, but {section}: the manifest was lost"
        finding = _finding(Kind.NO_MANIFEST, names.shard_manifest_prefix(shard), detail, shard)
    else:
        key = names.shard_manifest_key(shard, tip.head.number)
        finding = _finding(Kind.BEYOND_LOG, key, f"its epoch is {tip.epoch}, but {section}", shard)
    return Suspicion(finding, frozenset({shard}), frozenset({log_id}))


def _ahead(tip: ShardManifest, logs: Mapping[str, ReadLog], topics: Sequence[AppliedTopic]) -> Iterator[Suspicion]:
    """Yield the topics that have applied a section which the shard never had."""
    last = max(tip.checkpoint_slot, tip.last_closed_slot)
    if tip.open_range is not None:
        found = _last_slot(tip, tip.open_range, logs.get(tip.open_range.log_id))
        if found is None:
            return
        last = max(last, found)
    for each in topics:
        if each.applied > last:
            detail = f"it has applied section {each.applied}, but the sections of its shard end at {last}"
            finding = _finding(Kind.BEYOND_LOG, each.key, detail, tip.shard, each.topic)
            yield Suspicion(finding, frozenset({tip.shard}), logs_of(tip))


# ---- logs


def _flaws_of_log(log: ReadLog, tips: Sequence[ShardManifest], holes: Sequence[tuple[int, int]]) -> Iterator[Suspicion]:
    """Yield the flaws of a log, except in `holes`: extents that are already reported as missing for a shard."""
    naming = {tip.shard: tip for tip in tips if log.log_id in logs_of(tip)}
    lowest = min(
        (each.after for tip in naming.values() for each in tip.ranges if each.log_id == log.log_id), default=None
    )
    if lowest is None:
        return
    shards, logs = frozenset(naming), frozenset({log.log_id})
    needed = [end for tip in naming.values() for end in tip.certain_in(log.log_id)]
    for first, last in _gaps(log.numbers, lowest + 1, max(log.highest, *needed)):
        if any(after < first and last < before for after, before in holes):
            continue
        what = f"slot {first}" if first == last else f"slots {first} to {last}"
        detail = f"{what} of log {log.log_id}: slots above {lowest} must be kept for the shards that name it"
        yield Suspicion(_finding(Kind.SLOT_MISSING, names.log_slot_key(log.log_id, first), detail), shards, logs)
    for end in log.ends:
        if lowest < end < log.highest:
            behind = int(log.numbers[log.numbers > end][0])
            detail = f"it stands after slot {end}, the end of the log"
            yield Suspicion(_finding(Kind.LOG_RULE, names.log_slot_key(log.log_id, behind), detail), shards, logs)
