"""Audits rows across objects in tasks: rows held twice, and rows in objects that no manifest names.

One task compares the positions of the live buckets of a topic. Another sorts unnamed objects into garbage and objects
in flight, and searches for the rows of unnamed buckets elsewhere. A row moves from a section and the checkpoint into a
bucket, and from there into merged ones. They are read in that order, so that a row that moves meanwhile is not missed.

The sections above the checkpoint before the newest are read, including those that the newest covers: they prove of a
row that has left since that it was not lost. `object_audit` checks that objects are whole.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, TypeAlias, assert_never

from batch.audit import object_audit
from batch.audit import reading as audit_reading
from batch.audit.findings import Finding, Kind, Severity, Tally
from batch.audit.reading import Place, WallClock
from batch.engine import shard_reading
from batch.engine.root import Root
from storage_backends import bucket_reading, log_reading, object_store, topic_manifest
from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    format_errors,
    index_ids,
    merge,
    position_bitmap,
    redelivery_columns,
    slot_format,
)
from storage_backends.formats.manifest import LiveBucket, Progress, ShardManifest, TopicManifest
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionBitmap, PositionSet
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import (
    AcknowledgeRecord,
    AddRecord,
    DeadLetterRecord,
    GoneRecord,
    NackRecord,
    PurgeRecord,
    Record,
    ReplayRecord,
    RescheduleRecord,
    WaiveRecord,
)
from storage_backends.slot_log import SlotLogs

Bitmaps: TypeAlias = dict[tuple[str, int], list[PositionBitmap]]


@dataclasses.dataclass(slots=True)
class HeldRows:
    """The positions that wait in sections or checkpoint, or left, by topic id and index.

    The positions that one subscription alone is done with are also by that subscription.
    """

    root: Root
    _positions: Bitmaps = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _done: dict[tuple[str, int, int], list[PositionBitmap]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def accounted(self, tip: TopicManifest, index_id: int) -> PositionSet:
        """Return the positions of an index that are known to wait or to have left, those of buckets apart.

        Raises the store's errors, and FormatError.
        """
        found = PositionSet.of(self._positions.get((tip.topic_id, index_id), ()))
        owed = [each.subscription_id for each in tip.subscriptions if index_ids.serves(index_id, each.subscription_id)]
        by_all: PositionSet | None = None
        for subscription_id in owed:
            done = PositionSet.of(self._done.get((tip.topic_id, index_id, subscription_id), ()))
            by_all = done if by_all is None else by_all & done
        found |= NO_POSITIONS if by_all is None else by_all
        return found | PositionSet.of(_dead_letters(bucket_reading.progress_of(self.root.store, tip), index_id))

    # ---- filling

    def take_checkpoint(self, found: checkpoint_format.Checkpoint, wanted: Set[str]) -> None:
        """Record the rows that a checkpoint holds of the wanted topics as waiting, by index. Raises FormatError."""
        for part in found.topics:
            if part.topic_id not in wanted:
                continue
            self._wait(part.topic_id, index_ids.SHARED, part.mutable_rows)
            for own in part.own_rows:
                self._wait(part.topic_id, own.subscription_id, own.rows)
            for sealing in part.sealing:
                self._wait(part.topic_id, sealing.subscription_id, sealing.rows)
            for carried in part.carried:
                for record in carried.records:
                    self.take(record.decoded() if isinstance(record, slot_format.StoredRecord) else record)

    def take(self, record: Record) -> None:
        """Record the rows of a decision."""
        topic_id = record.topic_id
        match record:
            case AddRecord():
                self._wait(topic_id, record.subscription_id, record.rows)
            case RescheduleRecord():
                # Its rows leave the one index and wait in the shared one.
                self._wait(topic_id, record.subscription_id, record.rows)
                self._wait(topic_id, index_ids.SHARED, record.rows)
            case NackRecord() | ReplayRecord():
                self._wait(topic_id, record.index_id, record.rows)
            case GoneRecord():
                self._positions[topic_id, record.subscription_id] += record.positions
            case AcknowledgeRecord() | DeadLetterRecord():
                key = topic_id, record.index_id, record.subscription_id
                self._done[key] += _bitmaps(record.rows)
            case WaiveRecord():
                self._done[topic_id, index_ids.SHARED, record.subscription_id] += record.positions
            case PurgeRecord():
                pass
            case _:
                assert_never(record)

    def _wait(self, topic_id: str, index_id: int, rows: Rows) -> None:
        self._positions[topic_id, index_id] += _bitmaps(rows)


def _bitmaps(rows: Rows) -> tuple[PositionBitmap, ...]:
    return position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)


def _dead_letters(progress: Progress, index_id: int) -> Iterable[PositionBitmap]:
    """Yield the positions of dead letters of subscriptions that the index serves: they left, and are known."""
    for each in progress.redeliveries:
        if each.dead_letters is None or not index_ids.serves(index_id, each.subscription_id):
            continue
        letters = redelivery_columns.decode_dead_letters(each.dead_letters)
        yield from position_bitmap.position_bitmaps(letters.ledger_id, letters.entry_id)


def read_held(root: Root, shard: int, wanted: Set[str], *, tries_max: int) -> HeldRows | None:
    """Read the rows of these topics in checkpoint and sections.

    Returns None if they changed at each try. Raises the store's errors, Damaged among them.
    """
    with concurrent.futures.ThreadPoolExecutor(audit_reading.READ_AHEAD, thread_name_prefix="audit") as threads:
        for _ in range(tries_max):
            before = _tip(root, shard)
            found = HeldRows(root)
            if before is None:
                return found
            try:
                _read_checkpoint(root, before, found, wanted)
                _read_sections(root.logs(threads), before, found, wanted)
            except (object_store.Damaged, object_store.NotFound):
                if _stands(before, _tip(root, shard)):
                    raise
            else:
                if _stands(before, _tip(root, shard)):
                    return found
    return None


def _tip(root: Root, shard: int) -> ShardManifest | None:
    tip = root.shard_tip(shard)
    return None if tip is None else tip.manifest


def _stands(before: ShardManifest, now: ShardManifest | None) -> bool:
    """Return whether the rows that were read by one manifest are complete by the other."""
    return (
        now is not None
        and now.checkpoint == before.checkpoint
        and log_reading.judged(before, now) is log_reading.Verdict.STANDS
    )


def _read_checkpoint(root: Root, tip: ShardManifest, found: HeldRows, wanted: Set[str]) -> None:
    """Read the checkpoint. Raises Damaged, NotFound, and the store's errors."""
    if tip.checkpoint is None:
        return
    key = tip.checkpoint.object.name
    try:
        found.take_checkpoint(checkpoint_format.decode_checkpoint(root.store.get(key)), wanted)
    except format_errors.FormatError as error:
        raise object_store.unreadable(key, error) from error


def _read_sections(logs: SlotLogs, tip: ShardManifest, found: HeldRows, wanted: Set[str]) -> None:
    """Read the sections. Raises Damaged, and the store's errors."""
    tail = shard_reading.read_tail(logs, tip, tip.previous_slot)
    for key, section in zip(tail.keys, tail.sections, strict=True):
        try:
            for record in section.records:
                if record.topic_id in wanted:
                    found.take(record.decoded())
        except format_errors.FormatError as error:
            raise object_store.unreadable(key, error) from error


TRIES_MAX: Final = 5
"""Most times that a topic or shard that changes meanwhile is read; then it counts as moved on."""

EXAMPLES_MAX: Final = 3


@dataclasses.dataclass(slots=True)
class RowsSeen:
    """The result of a run."""

    tally: Tally = dataclasses.field(default_factory=Tally)


# ---- rows that two buckets hold


@dataclasses.dataclass(frozen=True, slots=True)
class TwiceRun:
    """A search for rows that two live buckets of one index of these topics hold."""

    places: tuple[Place, ...]

    def run(self, root: Root) -> RowsSeen:
        seen = RowsSeen()
        for place in self.places:
            _look_for_twice(root, place, seen.tally)
        return seen


def _look_for_twice(root: Root, place: Place, tally: Tally) -> None:
    """Find rows held twice. Does nothing for damaged or missing objects, which have findings of their own."""
    for _ in range(TRIES_MAX):
        try:
            tip = root.tip(place.of_topic)
        except object_store.StoreError:
            return
        if tip is None:
            return
        try:
            found = [*_twice(root, place, tip.manifest)]
        except object_store.NotFound:
            continue
        except (object_store.StoreError, format_errors.FormatError):
            return
        for each in found:
            tally.find(each)
        return
    tally.moved_on += 1


def _twice(root: Root, place: Place, tip: TopicManifest) -> Iterator[Finding]:
    by_index: dict[int, list[LiveBucket]] = collections.defaultdict(list)
    for live in tip.live:
        if not live.quarantined:
            by_index[live.subscription_id].append(live)
    progress: Progress | None = None
    for index_id, buckets in by_index.items():
        held: list[tuple[LiveBucket, PositionSet]] = []
        union = position_bitmap.NO_POSITIONS
        for live in _overlapping(buckets):
            progress = bucket_reading.progress_of(root.store, tip) if progress is None else progress
            waiting = _waiting(root, live, progress)
            if both := union & waiting:
                others = [other.object.name for other, rows in held if rows & both]
                yield Finding(
                    kind=Kind.POSITION_TWICE,
                    severity=Severity.ERROR,
                    object=live.object.name,
                    shard=place.shard,
                    topic=tip.topic,
                    detail=f"{len(both)} rows of index {index_id} that are not gone are also in {', '.join(others)}, "
                    f"such as {_examples(both)}",
                )
            held.append((live, waiting))
            union |= waiting


def _overlapping(buckets: Sequence[LiveBucket]) -> Iterator[LiveBucket]:
    """Yield the buckets whose ledgers overlap with those of another one."""
    ordered = sorted(buckets, key=lambda live: (live.first_ledger_id, live.last_ledger_id))
    reached = -1
    for place, live in enumerate(ordered):
        following = ordered[place + 1].first_ledger_id if place + 1 < len(ordered) else None
        if live.first_ledger_id <= reached or (
            following is not None and following <= max(reached, live.last_ledger_id)
        ):
            yield live
        reached = max(reached, live.last_ledger_id)


def _waiting(root: Root, live: LiveBucket, progress: Progress) -> PositionSet:
    """Return the positions of a bucket that are not gone."""
    _, metadata = bucket_reading.open_bucket(root.store, live)
    return PositionSet.of(metadata.positions) - merge.bits_of(live.object.name, metadata.kept, progress).gone


def _examples(positions: PositionSet) -> str:
    named = []
    for (ledger_id, page), entries in sorted(positions.items(), key=lambda each: each[0]):
        for low in entries:
            named.append(f"ledger {ledger_id} entry {page << position_bitmap.PAGE_BITS | low}")
            if len(named) == EXAMPLES_MAX:
                return ", ".join(named)
    return ", ".join(named)


# ---- objects that no manifest names


@dataclasses.dataclass(frozen=True, slots=True)
class Unnamed:
    """A listed object that the manifest read after the listing does not name."""

    key: str
    base: int
    size_bytes: int
    modified_ms: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftoversRun:
    """A check of objects of one shard that no manifest names. An object may be in flight for `orphan_age_ms`."""

    shard: int
    objects: tuple[tuple[Place, tuple[Unnamed, ...]], ...]
    clock: WallClock
    orphan_age_ms: int

    def run(self, root: Root) -> RowsSeen:
        return RowsSeen(_Leftovers(self, root).look())


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Left:
    """A bucket that no manifest names, with those of its rows that were not found elsewhere yet."""

    found: Unnamed
    index_id: int
    rows: Rows
    positions: PositionSet

    def without(self, positions: PositionSet) -> _Left:
        return dataclasses.replace(self, positions=self.positions - positions)


class _Leftovers:
    def __init__(self, run: LeftoversRun, root: Root) -> None:
        self._run = run
        self._root = root
        self._tally = Tally()

    def look(self) -> Tally:
        topics = {place.topic_id for place, found in self._run.objects if any(map(_is_bucket, found))}
        held: HeldRows | None = None
        # Sections and checkpoint first, then the manifests: rows move that way.
        if topics:
            try:
                held = read_held(self._root, self._run.shard, topics, tries_max=TRIES_MAX)
            except object_store.StoreError:
                # Damaged or unreadable: that is a finding of its own, and the rows cannot be located.
                held = None
            else:
                self._tally.moved_on += held is None
        for place, found in self._run.objects:
            self._look_at(place, found, held)
        return self._tally

    def _look_at(self, place: Place, found: Sequence[Unnamed], held: HeldRows | None) -> None:
        tip = self._tip(place)
        if tip is None:
            return
        named = audit_reading.named_in(tip)
        topic = tip.topic if isinstance(tip, TopicManifest) else ""
        left = []
        for each in found:
            if each.key in named.needed or each.key in named.buried or not self._is_there(each.key):
                self._tally.moved_on += 1
                continue
            self._find_unnamed(place, each, tip.head.orphan_floor, topic)
            left.append(each)
        buckets = [each for each in left if _is_bucket(each)]
        if held is not None and buckets and isinstance(tip, TopicManifest):
            self._account(place, tip, buckets, held)

    def _tip(self, place: Place) -> TopicManifest | ShardManifest | None:
        """Return the newest manifest, or None if there is none that can be read, which is a finding of its own."""
        try:
            if place.topic_id:
                topic = self._root.tip(place.of_topic)
                return None if topic is None else topic.manifest
            shard = self._root.shard_tip(place.shard)
            return None if shard is None else shard.manifest
        except object_store.StoreError:
            return None

    def _is_there(self, key: str) -> bool:
        try:
            self._root.store.head(key)
        except object_store.NotFound:
            return False
        except object_store.StoreError:
            return True
        return True

    def _find_unnamed(self, place: Place, each: Unnamed, floor: int, topic: str) -> None:
        age_ms = max(self._run.clock.now_ms() - each.modified_ms, 0)
        is_old = age_ms > 2 * self._run.orphan_age_ms
        age = f"{each.size_bytes} bytes, written {age_ms / 3_600_000:.1f} h ago"
        if each.base < floor:
            kind, detail = Kind.ORPHAN, f"{age}; its base {each.base} is below the orphan floor {floor}"
        else:
            kind = Kind.UNNAMED
            detail = f"{age}; its base {each.base} is not below the orphan floor {floor}: it is in flight, or abandoned"
        if is_old:
            detail += "; garbage collection should have deleted it"
        severity = Severity.WARNING if is_old else Severity.INFO
        self._find(place, each, topic, kind, severity, detail)

    # ---- their rows

    def _account(self, place: Place, tip: TopicManifest, found: Sequence[Unnamed], held: HeldRows) -> None:
        """Find rows of unnamed buckets that exist nowhere else."""
        left = [each for each in map(self._left, found) if each is not None and self._counts(place, tip, each)]
        for _ in range(TRIES_MAX):
            try:
                unaccounted = self._unaccounted(tip, left, held)
            except object_store.NotFound:
                # A newer manifest has probably replaced it.
                newer = self._tip(place)
                tip = newer if isinstance(newer, TopicManifest) else tip
            except (object_store.StoreError, format_errors.FormatError):
                # That is a finding of its own; the rows may exist.
                return
            else:
                for each in unaccounted:
                    self._find_unaccounted(place, tip, each)
                return
        self._tally.moved_on += 1

    def _unaccounted(self, tip: TopicManifest, left: Sequence[_Left], held: HeldRows) -> list[_Left]:
        """Return the buckets with rows that were found nowhere else, reduced to these. Raises the store's errors."""
        accounted = {index_id: held.accounted(tip, index_id) for index_id in {each.index_id for each in left}}
        found = [each.without(accounted[each.index_id]) for each in left]
        found = [each for each in found if each.positions]
        for index_id, positions in self._named_positions(tip, {each.index_id for each in found}):
            found = [each.without(positions) if each.index_id == index_id else each for each in found]
        return [each for each in found if each.positions]

    def _left(self, found: Unnamed) -> _Left | None:
        """Read an unnamed bucket. Returns None if it is gone or damaged."""
        body = audit_reading.read(self._root.store, found.key).body
        if body is None:
            return None
        try:
            metadata, rows = bucket_format.decode_bucket(body)
        except format_errors.FormatError:
            return None
        positions = PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id))
        return _Left(found, metadata.subscription_id, rows, positions)

    def _counts(self, place: Place, tip: TopicManifest, left: _Left) -> bool:
        """Return whether any subscription is owed the rows: it exists, and the topic was not deleted since."""
        if tip.deleted:
            return False
        owed = {index_ids.SHARED, *(each.subscription_id for each in tip.subscriptions)}
        if index_ids.subscription_of(left.index_id) not in owed:
            return False
        if tip.incarnation == topic_manifest.FIRST_INCARNATION:
            return True
        base = audit_reading.read(self._root.store, f"{place.manifest_prefix}{left.found.base:020d}").body
        if base is None:
            return True
        try:
            then = topic_manifest.CODEC.decode(base)
        except format_errors.FormatError:
            return True
        return then.incarnation == tip.incarnation and not then.deleted

    def _named_positions(self, tip: TopicManifest, wanted: set[int]) -> Iterator[tuple[int, PositionSet]]:
        """Yield index and positions of buckets that are live, or have left and still exist.

        Raises the store's errors if a live one cannot be read.
        """
        if not wanted:
            return
        for live in tip.live:
            if live.subscription_id in wanted:
                _, metadata = bucket_reading.open_bucket(self._root.store, live)
                yield live.subscription_id, PositionSet.of(metadata.positions)
        for tombstone in tip.tombstones:
            if object_audit.what_of(tombstone.object.name) != "bucket":
                continue
            body = audit_reading.read(self._root.store, tombstone.object.name).body
            if body is None:
                continue
            try:
                metadata, _ = bucket_format.decode_bucket(body)
                yield metadata.subscription_id, PositionSet.of(metadata.positions)
            except format_errors.FormatError:
                continue

    def _find_unaccounted(self, place: Place, tip: TopicManifest, left: _Left) -> None:
        rows = left.rows.take(left.positions.mask_of(left.rows.ledger_id, left.rows.entry_id))
        later = object_audit.not_due(rows, self._run.clock.now_ms())
        detail = (
            f"{len(rows)} of its {len(left.rows)} rows of index {left.index_id} are in no bucket that is live or has "
            f"just left, nor in checkpoint or log: gone since (delivered, cancelled, trimmed), or lost; {later} "
            f"of them are not due yet; such as {_examples(left.positions)}"
        )
        severity = Severity.WARNING if later else Severity.INFO
        self._find(place, left.found, tip.topic, Kind.ROWS_UNACCOUNTED, severity, detail)

    def _find(self, place: Place, found: Unnamed, topic: str, kind: Kind, severity: Severity, detail: str) -> None:
        self._tally.find(
            Finding(
                kind=kind,
                severity=severity,
                object=found.key,
                detail=detail,
                shard=place.shard,
                topic=topic or place.topic_id,
            )
        )


def _is_bucket(found: Unnamed) -> bool:
    return object_audit.what_of(found.key) == "bucket"
