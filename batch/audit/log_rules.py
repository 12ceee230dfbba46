"""Which slots of logs, and which sections of shards, should be there: what the manifests of shards say, against what
was read of the logs.

Owns: the checks across slots, logs and manifests. Pure: manifests and what was read in, findings out.
Does not own: reading (`log_task`), and reading again what may have moved on (`log_phase`).

    of a log that manifests name: every number above the lowest `after` up to its end, and nothing behind a FENCE
    of a shard: every shard slot above the checkpoint before the newest, once, in the range that has it

Sections that no range covers are nobody's, and so is what a log has below that: it may have been deleted, and a late
copy may have come back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from batch.audit.findings import Finding, Kind, Severity
from batch.audit.log_task import NO_SHARD, LogSeen, Sections
from storage_backends.formats import names
from storage_backends.formats.manifest import LogRange, ShardManifest
from storage_backends.log_reading import LogEnd


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReadLog:
    """What was read of a log. `numbers`: u64[n], of the slots that are there, ascending. `end`: None when its highest
    slot cannot be read. The others: as `LogSeen` has them, of the whole log.
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
        """The runs of the numbers that were listed, in any order."""
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
        """The sections of a shard that the range has."""
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
    """A topic whose newest manifest has applied a shard slot above the checkpoint. `key`: of that manifest."""

    key: str
    topic: str
    applied: int


@dataclasses.dataclass(frozen=True, slots=True)
class Suspicion:
    """A finding that stands if nothing has moved on: the shards and logs that it follows from."""

    finding: Finding
    shards: frozenset[int]
    logs: frozenset[str]


def suspicions(
    tips: Mapping[int, ShardManifest | None],
    logs: Mapping[str, ReadLog],
    applied: Mapping[int, Sequence[AppliedTopic]],
) -> list[Suspicion]:
    """Everything that does not agree. `tips`: by shard, None for one that nobody ever owned; a shard whose manifest
    cannot be read is not there. `applied`: by shard.
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
    """The logs that the manifest names."""
    return frozenset(each.log_id for each in tip.ranges)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Hole:
    """Shard slots `first` to `last` are in no slot of the log with `after` < number < `before`, and nowhere else."""

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
            where = f"log {self.log_id}, behind slot {self.after} and before slot {self.before}"
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
    """The last shard slot of a range; None when that cannot be told."""
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
    missing = np.setdiff1d(np.arange(first, last + 1, dtype=np.uint64), slot)
    end = log.highest if of.through is None else of.through
    for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else ():
        lower, upper = number[slot < run[0]], number[slot > run[-1]]
        hole = _Hole(
            log_id=of.log_id,
            after=int(lower.max()) if len(lower) else of.after,
            before=int(upper.min()) if len(upper) else end + 1,
            first=int(run[0]),
            last=int(run[-1]),
        )
        # What the store did not give has a finding of its own.
        if not any(hole.after < each < hole.before for each in log.unreadable):
            yield hole


def _twice(tip: ShardManifest, logs: Mapping[str, ReadLog]) -> Iterator[Suspicion]:
    """Shard slots that two sections have, both of which a range covers."""
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
    """Topics that have applied what the shard never had."""
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
    """`holes`: extents of the log that were told already, as something that a shard lacks."""
    naming = {tip.shard: tip for tip in tips if log.log_id in logs_of(tip)}
    lowest = min(
        (each.after for tip in naming.values() for each in tip.ranges if each.log_id == log.log_id), default=None
    )
    if lowest is None:
        return
    shards, logs = frozenset(naming), frozenset({log.log_id})
    needed = [end for tip in naming.values() for end in _ends_named(tip, log.log_id)]
    wanted = np.arange(lowest + 1, max(log.highest, *needed) + 1, dtype=np.uint64)
    missing = np.setdiff1d(wanted, log.numbers)
    for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else ():
        first, last = int(run[0]), int(run[-1])
        if any(after < first and last < before for after, before in holes):
            continue
        what = f"slot {first}" if first == last else f"slots {first} to {last}"
        detail = f"{what} of log {log.log_id}: slots above {lowest} must be kept for the shards that name it"
        yield Suspicion(_finding(Kind.SLOT_MISSING, names.log_slot_key(log.log_id, first), detail), shards, logs)
    for end in log.ends:
        if lowest < end < log.highest:
            behind = int(log.numbers[log.numbers > end][0])
            detail = f"it stands behind slot {end}, the end of the log"
            yield Suspicion(_finding(Kind.LOG_RULE, names.log_slot_key(log.log_id, behind), detail), shards, logs)


def _ends_named(tip: ShardManifest, log_id: str) -> Iterator[int]:
    """Numbers of the log that were certain when the manifest was committed, and are never deleted while it names it."""
    for each in tip.ranges:
        if each.log_id == log_id:
            # A closed range ends before a FENCE or CLOSE, or, of a log that its own daemon goes on with, at a slot.
            yield each.after if each.through is None else each.through
    for cut in (tip.checkpoint, tip.previous_checkpoint):
        if cut is not None and cut.log_id == log_id:
            yield cut.at
