"""The task that reads objects: buckets, progress, properties, checkpoints, and records of what was given up.

Owns: reading each object in full, and how much it matters what is wrong with it: an error where the newest manifest
still lives on it, a warning elsewhere.
Does not own: what is checked of bytes (`content`), and which objects there are (`division`).

What is absent or damaged is judged by a manifest that was read *after* that was found (R9): a bucket that was merged
away meanwhile is not missing.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from batch.audit import content as audit_content
from batch.audit import reading as audit_reading
from batch.audit.findings import Finding, Flaw, Kind, Severity, Tally
from batch.audit.reading import Named, Place, Read, WallClock
from batch.engine.root import Root
from storage_backends import bucket_reading, object_store
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import CheckpointCut, LiveBucket, ObjectReference

GRACE_SLACK_MS: Final = 300_000
"""Clocks of machines differ: so much earlier than its time a tombstone's object may be gone."""


class Role(enum.Enum):
    """Why an object is read."""

    LIVE = enum.auto()
    TOMBSTONE = enum.auto()
    UNNAMED = enum.auto()
    DEAD = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An object to be read. `topic`: its name, or its id where that is not known. `in_full`: or the table and entry 0
    alone, of a live bucket.
    """

    place: Place
    key: str
    size_bytes: int
    role: Role
    topic: str = ""
    topic_name: str = ""
    live: LiveBucket | None = None
    reference: ObjectReference | None = None
    checkpoint: CheckpointCut | None = None
    delete_after_ms: int = 0
    in_full: bool = True


@dataclasses.dataclass(slots=True)
class ObjectsSeen:
    """What became of a run."""

    tally: Tally = dataclasses.field(default_factory=Tally)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRun:
    """Objects of any places. `overdue_ms`: so long after the end of its grace an object should be deleted."""

    items: tuple[Item, ...]
    clock: WallClock
    overdue_ms: int

    def run(self, root: Root) -> ObjectsSeen:
        run = _Run(self, root)
        run.read()
        run.judge()
        return ObjectsSeen(run.tally)


class _Run:
    def __init__(self, run: ObjectRun, root: Root) -> None:
        self.tally = Tally()
        self._run = run
        self._root = root
        # What was found and is not judged yet.
        self._open: dict[Place, list[tuple[Item, Flaw]]] = collections.defaultdict(list)

    def read(self) -> None:
        whole = [item for item in self._run.items if item.in_full]
        found = audit_reading.read_all(self._root.store, (item.key for item in whole))
        for item, each in zip(whole, found, strict=True):
            self._take(item, each)
        for item in self._run.items:
            if not item.in_full:
                self._look_into(item)

    # ---- what was found

    def _take(self, item: Item, found: Read) -> None:
        if item.role is Role.DEAD:
            self._take_dead(item, found)
        elif item.live is not None and item.live.quarantined:
            self._take_quarantined(item, item.live, found)
        elif found.failure:
            self._find(item, Flaw(Kind.UNREADABLE, found.failure), Severity.ERROR)
        elif found.absent:
            self._open[item.place].append((item, Flaw(Kind.MISSING, "it does not exist")))
        else:
            flaws = [Flaw(Kind.DAMAGED, found.damage)] if found.body is None else self._certain_flaws(item, found.body)
            self._open[item.place] += [(item, flaw) for flaw in flaws]
            self._check_overdue(item)

    def _certain_flaws(self, item: Item, body: bytes) -> Sequence[Flaw]:
        """What two reads have found."""
        self.tally.saw(what_of(item.key), len(body))
        flaws = self._flaws(item, body)
        again = audit_reading.read(self._root.store, item.key).body if flaws else None
        return flaws if again is None or again == body else self._flaws(item, again)

    def _flaws(self, item: Item, body: bytes) -> Sequence[Flaw]:
        what = what_of(item.key)
        if what == "bucket":
            content = audit_content.bucket_content(
                body, topic=item.topic_name, reference=item.reference, live=item.live
            )
            self.tally.rows += 0 if content.rows is None else len(content.rows)
            return content.flaws
        if what == "checkpoint":
            flaws = [*audit_content.checkpoint_flaws(body, shard=item.place.shard, reference=item.checkpoint)]
            named = self._named_flaw(item, body, what) if item.checkpoint is None else None
        else:
            flaws = _properties_flaws(body) if what == "properties" else _progress_flaws(body)
            named = self._named_flaw(item, body, what)
        return flaws or ([] if named is None else [named])

    def _named_flaw(self, item: Item, body: bytes, what: str) -> Flaw | None:
        return None if item.reference is None else audit_content.bytes_flaw(item.reference, body, what)

    def _look_into(self, item: Item) -> None:
        """Table and entry 0 of a live bucket."""
        if item.live is None:
            raise ValueError(f"{item.key} is no live bucket: it is read in full")
        try:
            table, metadata = bucket_reading.open_bucket(self._root.store, item.live)
        except object_store.NotFound:
            self._open[item.place].append((item, Flaw(Kind.MISSING, "it does not exist")))
        except object_store.Damaged as error:
            self._open[item.place].append((item, Flaw(Kind.DAMAGED, error.reason)))
        except object_store.StoreError as error:
            self._find(item, Flaw(Kind.UNREADABLE, str(error)), Severity.ERROR)
        else:
            self.tally.saw("bucket head", table.metadata.length)
            if item.topic_name and metadata.topic != item.topic_name:
                flaw = Flaw(Kind.DISAGREES, f"it names topic {metadata.topic!r}")
                self._open[item.place].append((item, flaw))

    def _take_quarantined(self, item: Item, live: LiveBucket, found: Read) -> None:
        if found.body is None:
            state = found.damage or found.failure or "it does not exist"
        else:
            flaws = self._flaws(item, found.body)
            state = "it is readable" if not flaws else flaws[0].detail
        detail = (
            f"its {live.rows} rows have not been served since section number {live.quarantined_slot}: "
            f"{live.damage}; the object now: {state}"
        )
        self._find(item, Flaw(Kind.QUARANTINED, detail), Severity.ERROR)

    def _take_dead(self, item: Item, found: Read) -> None:
        """A record of an object that could not be deleted."""
        if found.absent:
            self.tally.moved_on += 1
            return
        if found.body is None:
            flaw = Flaw(Kind.DAMAGED, found.damage) if found.damage else Flaw(Kind.UNREADABLE, found.failure)
            self._find(item, flaw, Severity.WARNING)
            return
        self.tally.saw("dead object", len(found.body))
        try:
            record = manifest.decode_dead_object(found.body)
        except format_errors.FormatError as error:
            self._find(item, audit_content.damaged(error), Severity.WARNING)
            return
        if names.dead_object_key(record.object) != item.key:
            self._find(item, Flaw(Kind.DISAGREES, f"it is the record of {record.object}"), Severity.WARNING)
            return
        there = not audit_reading.read(self._root.store, record.object).absent
        detail = (
            f"{record.object} ({record.size_bytes} bytes) could not be deleted in {record.attempts} attempts: "
            f"{record.error}; {'it still exists' if there else 'it is gone'}"
        )
        self._find(item, Flaw(Kind.GIVEN_UP, detail), Severity.WARNING if there else Severity.INFO)

    def _check_overdue(self, item: Item) -> None:
        late_ms = self._run.clock.now_ms() - item.delete_after_ms - self._run.overdue_ms
        if item.role is Role.TOMBSTONE and late_ms > 0:
            hours = (self._run.clock.now_ms() - item.delete_after_ms) / 3_600_000
            detail = f"its grace ended {hours:.1f} h ago, but it still exists: check that collection runs"
            self._find(item, Flaw(Kind.TOMBSTONE_OVERDUE, detail), Severity.WARNING)

    # ---- how much it matters

    def judge(self) -> None:
        """Reads the newest manifest of every place where something is wrong."""
        for place, found in self._open.items():
            try:
                named = audit_reading.named_now(self._root, place)
            except object_store.StoreError as error:
                # The tip has a finding of its own; whether these objects are still needed cannot be told.
                named = None
                failure = f"; the newest manifest could not be read: {error}"
            else:
                failure = ""
            for item, flaw in found:
                self._judge(item, dataclasses.replace(flaw, detail=flaw.detail + failure), named)

    def _judge(self, item: Item, flaw: Flaw, named: Named | None) -> None:
        needed = item.role is Role.LIVE if named is None else item.key in named.needed
        if flaw.kind is not Kind.MISSING:
            self._find(item, flaw, Severity.ERROR if needed else Severity.WARNING)
        elif needed:
            self._find(item, flaw, Severity.ERROR)
        elif self._went_early(item, named):
            detail = "it left its manifest and is gone before its grace was over: readers of an older one may miss it"
            self._find(item, Flaw(Kind.TOMBSTONE_GONE, detail), Severity.WARNING)
        else:
            self.tally.moved_on += 1

    def _went_early(self, item: Item, named: Named | None) -> bool:
        early = item.delete_after_ms - GRACE_SLACK_MS > self._run.clock.now_ms()
        return item.role is Role.TOMBSTONE and early and named is not None and item.key in named.buried

    def _find(self, item: Item, flaw: Flaw, severity: Severity) -> None:
        self.tally.find(
            Finding(
                kind=flaw.kind,
                severity=severity,
                object=item.key,
                detail=flaw.detail,
                shard=item.place.shard,
                topic=item.topic,
                offset=flaw.offset,
            )
        )


def _progress_flaws(body: bytes) -> list[Flaw]:
    try:
        progress = manifest.decode_progress(body)
    except format_errors.FormatError as error:
        return [audit_content.damaged(error)]
    return [*audit_content.progress_flaws(progress)]


def _properties_flaws(body: bytes) -> list[Flaw]:
    try:
        manifest.decode_properties(body)
    except format_errors.FormatError as error:
        return [audit_content.damaged(error)]
    return []


_OF_FOLDER: Final = MappingProxyType(
    {"buckets": "bucket", "progress": "progress", "properties": "properties", "checkpoint": "checkpoint"}
)


def what_of(key: str) -> str:
    """What an object is, by its key: `bucket`, `progress`, `properties` or `checkpoint`."""
    return _OF_FOLDER[key.rsplit("/", 2)[-2]]
