"""Audits objects in tasks: buckets, progress, properties, checkpoints, and records of objects given up.

Each object is read and decoded in full. A flaw is an error if the newest manifest still needs the object, and a warning
otherwise. A missing or damaged object is judged by a manifest that was read *after* the flaw was found (R9): a bucket
that was merged away meanwhile is not missing. `division` lists the objects.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from batch.audit import reading as audit_reading
from batch.audit.findings import Finding, Flaw, Kind, Severity, Tally
from batch.audit.reading import Named, Place, Read, WallClock
from batch.engine.root import Root
from storage_backends import bucket_reading, object_store
from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    format_errors,
    manifest,
    names,
    position_bitmap,
    redelivery_columns,
    slot_format,
)
from storage_backends.formats.bucket_format import BucketMetadata
from storage_backends.formats.manifest import CheckpointCut, LiveBucket, ObjectReference, Progress
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionBitmap, PositionSet
from storage_backends.formats.row_columns import Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BucketContent:
    """A decoded bucket. `rows` is None if it could not be decoded."""

    flaws: tuple[Flaw, ...]
    metadata: BucketMetadata | None = None
    rows: Rows | None = None


def damaged(error: format_errors.FormatError, of: str = "") -> Flaw:
    """Return the flaw of content that was not decoded; `of` comes before its detail."""
    kind = Kind.NEWER if isinstance(error, format_errors.NewerFormat) else Kind.DAMAGED
    return Flaw(kind, f"{of}{error}", error.offset)


def unreadable(error: object_store.Damaged, detail: str) -> Flaw:
    """Return the flaw of an object that was not read whole."""
    return Flaw(Kind.NEWER if isinstance(error, object_store.NewerObject) else Kind.DAMAGED, detail)


def _disagrees(detail: str) -> Flaw:
    return Flaw(Kind.DISAGREES, detail)


def bytes_flaw(reference: ObjectReference, body: bytes, what: str) -> Flaw | None:
    """Return the flaw of bytes that differ from those that the manifest names, or None."""
    try:
        manifest.check_bytes(reference, body, what)
    except format_errors.FormatError as error:
        return damaged(error)
    return None


# ---- buckets


def bucket_content(
    body: bytes, *, topic: str, reference: ObjectReference | None = None, live: LiveBucket | None = None
) -> BucketContent:
    """Check a bucket by its bytes and its manifest's entry. `topic` is "" if unknown."""
    named = bytes_flaw(reference, body, "bucket") if reference is not None else None
    try:
        metadata, rows = bucket_format.decode_bucket(body)
        positions = PositionSet.of(metadata.positions)
        kept = [PositionSet.of(each.positions) for each in metadata.kept]
    except format_errors.FormatError as error:
        return BucketContent((damaged(error),))
    if named is not None:
        # It is whole, but not the bucket that the manifest names.
        return BucketContent((named,), metadata, rows)
    flaws = [*_row_flaws(metadata, rows, positions), *_kept_flaws(metadata, positions, kept)]
    if topic and metadata.topic != topic:
        flaws.append(_disagrees(f"it names topic {metadata.topic!r}"))
    if live is not None:
        flaws += _live_flaws(live, metadata, rows, body)
    return BucketContent(tuple(flaws), metadata, rows)


def _row_flaws(metadata: BucketMetadata, rows: Rows, positions: PositionSet) -> Iterator[Flaw]:
    """Check rows against the metadata; `decode_bucket` has compared the hash and the number of rows."""
    if len(rows) != metadata.rows:
        yield _disagrees(f"it has {len(rows)} rows, but its metadata says {metadata.rows}")
    with_ids = PositionSet.of(bucket_format.id_positions(rows))
    if rows.schedule_ids is not None and with_ids != PositionSet.of(metadata.id_positions):
        yield _disagrees("its metadata names other positions with schedule ids than those of its rows")
    held = PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id))
    if len(held) != len(rows):
        yield _disagrees(f"{len(rows) - len(held)} of its positions occur twice")
    if held != positions:
        yield _disagrees(
            f"its rows have {len(held - positions)} positions that its metadata has not, its metadata has "
            f"{len(positions - held)} that no row has"
        )
    if not position_bitmap.in_order(metadata.positions):
        yield _disagrees("the bitmaps of its positions do not ascend")
    if not _in_due_order(rows):
        yield _disagrees("its rows of one time are not ordered by position")


def _in_due_order(rows: Rows) -> bool:
    due, ledger, entry = rows.deliver_at_ms, rows.ledger_id, rows.entry_id
    same_due = due[1:] == due[:-1]
    same_ledger = ledger[1:] == ledger[:-1]
    falls = (ledger[1:] < ledger[:-1]) | (same_ledger & (entry[1:] < entry[:-1]))
    return not bool((same_due & falls).any())


def _kept_flaws(metadata: BucketMetadata, positions: PositionSet, kept: Sequence[PositionSet]) -> Iterator[Flaw]:
    """Check that every row of a merged bucket was copied from a source, and that no copied row is missing."""
    copied = NO_POSITIONS
    for each, from_source in zip(metadata.kept, kept, strict=True):
        if not from_source <= positions:
            yield _disagrees(f"{len(from_source - positions)} positions kept from {each.source} are missing")
        copied |= from_source
    if kept and not positions <= copied:
        yield _disagrees(f"{len(positions - copied)} of its positions are kept from no source")


def _live_flaws(live: LiveBucket, metadata: BucketMetadata, rows: Rows, body: bytes) -> Iterator[Flaw]:
    """Check a bucket against the manifest's entry."""
    if not len(rows):
        yield _disagrees("it has no rows")
        return
    # `decode_bucket` has compared the hashes of the metadata with those of the rows.
    found = {
        "subscription_id": metadata.subscription_id,
        "rows": len(rows),
        "hash_low": metadata.hash_low,
        "hash_high": metadata.hash_high,
        "id_rows": sum(len(each.bitmap()) for each in metadata.id_positions),
        "id_hash_low": metadata.id_hash_low,
        "id_hash_high": metadata.id_hash_high,
        "first_ledger_id": int(rows.ledger_id.min()),
        "last_ledger_id": int(rows.ledger_id.max()),
        "min_deliver_at_ms": int(rows.deliver_at_ms[0]),
        "max_deliver_at_ms": int(rows.deliver_at_ms[-1]),
        "segments": _segments(body),
    }
    for name, value in found.items():
        said = getattr(live, name)
        if said != value:
            yield _disagrees(f"its {name} is {value}, but the manifest says {said}")
    if bool(live.level) != bool(metadata.kept):
        yield _disagrees(f"the manifest says level {live.level}, but it keeps rows of {len(metadata.kept)} sources")


def _segments(body: bytes) -> int:
    start, length = bucket_format.footer_range(len(body))
    found = bucket_format.decode_footer(body[start : start + length], len(body))
    return len(bucket_format.decode_table(body[found.offset : start], found).segments)


# ---- progress and checkpoints


def progress_flaws(progress: Progress) -> Iterator[Flaw]:
    """Decode every bitmap and every column, and yield the flaws."""
    try:
        for part in progress.buckets:
            _decode(part.gone)
            for acknowledged in part.acknowledged:
                _decode(acknowledged.positions)
        for level in progress.levels:
            _decode(level.positions)
        for each in progress.redeliveries:
            for nacked in each.nacked:
                redelivery_columns.decode_nacked(nacked)
            for plane in each.counts:
                _decode(plane.positions)
            if each.dead_letters is not None:
                redelivery_columns.decode_dead_letters(each.dead_letters)
    except format_errors.FormatError as error:
        yield damaged(error)


def _decode(bitmaps: Sequence[PositionBitmap]) -> None:
    if not position_bitmap.in_order(bitmaps):
        raise format_errors.FormatError("progress", 0, "the bitmaps of positions do not ascend by ledger and page")
    PositionSet.of(bitmaps)


def checkpoint_flaws(body: bytes, *, shard: int, reference: manifest.CheckpointCut | None) -> Iterator[Flaw]:
    """Decode everything in a checkpoint, including carried slots.

    `reference` is the manifest's, or None without one.
    """
    named = None if reference is None else bytes_flaw(reference.object, body, "checkpoint")
    try:
        found = checkpoint_format.decode_checkpoint(body)
        for part in found.topics:
            for carried in part.carried:
                for record in carried.records:
                    if isinstance(record, slot_format.StoredRecord):
                        record.decoded()
    except format_errors.FormatError as error:
        yield damaged(error)
        return
    if named is not None:
        yield named
        return
    if found.shard != shard:
        yield _disagrees(f"it names shard {found.shard}")
    if reference is not None and found.slot != reference.slot:
        yield _disagrees(f"it is of slot {found.slot}, the manifest says {reference.slot}")
    for part in found.topics:
        yield from progress_flaws(part.progress)
        for rows in (part.mutable_rows, *(own.rows for own in part.own_rows)):
            positions = PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id))
            if len(positions) != len(rows):
                yield _disagrees(f"topic {part.topic!r} has {len(rows) - len(positions)} positions twice")


def not_due(rows: Rows, now_ms: int) -> int:
    """Count the rows that are due later."""
    return int(np.count_nonzero(rows.deliver_at_ms > np.uint64(now_ms)))


GRACE_SLACK_MS: Final = 300_000
"""Time before its end of grace at which a tombstone's object may be gone (ms): clocks of machines differ"""


class Role(enum.Enum):
    """The reason for reading an object."""

    LIVE = enum.auto()
    TOMBSTONE = enum.auto()
    UNNAMED = enum.auto()
    DEAD = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An object to read.

    `topic` is its name, or its id if the name is unknown. Without `in_full` only the table and entry 0 of a live bucket
    are read.
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
    """The result of a run."""

    tally: Tally = dataclasses.field(default_factory=Tally)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRun:
    """A run of objects of any places. An object should be deleted `overdue_ms` after the end of its grace."""

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
        # Flaws that are not judged yet
        self._open: dict[Place, list[tuple[Item, Flaw]]] = collections.defaultdict(list)

    def read(self) -> None:
        whole = [item for item in self._run.items if item.in_full]
        found = audit_reading.read_all(self._root.store, (item.key for item in whole))
        for item, each in zip(whole, found, strict=True):
            self._take(item, each)
        for item in self._run.items:
            if not item.in_full:
                self._look_into(item)

    # ---- finding flaws

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
        """Return the flaws that two reads have found."""
        self.tally.saw(what_of(item.key), len(body))
        flaws = self._flaws(item, body)
        again = audit_reading.read(self._root.store, item.key).body if flaws else None
        return flaws if again is None or again == body else self._flaws(item, again)

    def _flaws(self, item: Item, body: bytes) -> Sequence[Flaw]:
        what = what_of(item.key)
        if what == "bucket":
            content = bucket_content(body, topic=item.topic_name, reference=item.reference, live=item.live)
            self.tally.rows += 0 if content.rows is None else len(content.rows)
            return content.flaws
        if what == "checkpoint":
            flaws = [*checkpoint_flaws(body, shard=item.place.shard, reference=item.checkpoint)]
            named = self._named_flaw(item, body, what) if item.checkpoint is None else None
        else:
            flaws = _properties_flaws(body) if what == "properties" else _progress_flaws(body)
            named = self._named_flaw(item, body, what)
        return flaws or ([] if named is None else [named])

    def _named_flaw(self, item: Item, body: bytes, what: str) -> Flaw | None:
        return None if item.reference is None else bytes_flaw(item.reference, body, what)

    def _look_into(self, item: Item) -> None:
        """Read table and entry 0 of a live bucket."""
        if item.live is None:
            raise ValueError(f"{item.key} is no live bucket: it is read in full")
        try:
            table, metadata = bucket_reading.open_bucket(self._root.store, item.live)
        except object_store.NotFound:
            self._open[item.place].append((item, Flaw(Kind.MISSING, "it does not exist")))
        except object_store.Damaged as error:
            self._open[item.place].append((item, unreadable(error, error.reason)))
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
        """Check a record of an object that could not be deleted."""
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
            self._find(item, damaged(error), Severity.WARNING)
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

    # ---- weighing flaws

    def judge(self) -> None:
        """Read the newest manifest of every place with a flaw, and judge its flaws by it."""
        for place, found in self._open.items():
            try:
                named = audit_reading.named_now(self._root, place)
            except object_store.StoreError as error:
                # The tip has a finding of its own; without it, it is unknown if these objects are still needed.
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
        return [damaged(error)]
    return [*progress_flaws(progress)]


def _properties_flaws(body: bytes) -> list[Flaw]:
    try:
        manifest.decode_properties(body)
    except format_errors.FormatError as error:
        return [damaged(error)]
    return []


_OF_FOLDER: Final = MappingProxyType(
    {"buckets": "bucket", "progress": "progress", "properties": "properties", "checkpoint": "checkpoint"}
)


def what_of(key: str) -> str:
    """Return the kind of an object, by its key: `bucket`, `progress`, `properties` or `checkpoint`."""
    return _OF_FOLDER[key.rsplit("/", 2)[-2]]
