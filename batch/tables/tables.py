"""Reads a root as three tables, `rows`, `buckets` and `backlog`, in parts and as Arrow batches.

A position is two u64, which Spark does not have: ledger and entry are their bits as a signed 64-bit integer, and so is
every other u64 (`u64` orders and shows them). A timestamp is empty if its milliseconds are beyond the year 9999.

`Wanted` limits the rows that a query wants, as ranges of u64, and by the numbers of manifest and offset table finds
buckets and segments without any. These are passed over; all other rows are filtered one by one.

`datasource` alone uses this module, which knows nothing of Spark.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batch.engine.root import Root
from batch.engine.topic_contents import BucketState, TopicContents, UnsealedRows, owed_mask, rows_of
from batch.engine.topic_reading import read_states
from storage_backends import bucket_reading
from storage_backends.formats import index_ids
from storage_backends.formats.bucket_format import SegmentInfo
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.object_store import ObjectStore

U64_MAX: Final = (1 << 64) - 1
I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1

Ranges = tuple[tuple[int, int], ...]
"""(first, last), both included, in any order"""

ALL: Final[Ranges] = ((0, U64_MAX),)


def of_bit_view(first: int, last: int) -> Ranges:
    """Return the u64 whose bits, as a signed integer, are in a range, both ends included."""
    first, last = max(first, I64_MIN), min(last, I64_MAX)
    if first > last:
        return ()
    if first >= 0:
        return ((first, last),)
    if last < 0:
        return ((first & U64_MAX, last & U64_MAX),)
    return ((0, last), (first & U64_MAX, U64_MAX))


def both(one: Ranges, other: Ranges) -> Ranges:
    """Intersect two sets of ranges."""
    found = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return tuple((first, last) for first, last in found if first <= last)


def _meet(ranges: Ranges, first: int, last: int) -> bool:
    return any(start <= last and first <= end for start, end in ranges)


def _inside(ranges: Ranges, column: U64) -> npt.NDArray[np.bool_]:
    if ranges == ALL:
        return np.ones(len(column), np.bool_)
    inside = np.zeros(len(column), np.bool_)
    for first, last in ranges:
        inside |= (column >= np.uint64(first)) & (column <= np.uint64(last))
    return inside


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The limit on the rows that a query wants.

    `topics` None means any. `ledger_id` and `deliver_at_ms` are in one of their ranges.
    """

    topics: frozenset[str] | None = None
    ledger_id: Ranges = ALL
    deliver_at_ms: Ranges = ALL

    def only_topics(self, topics: Iterable[str]) -> Wanted:
        named = frozenset(topics)
        return dataclasses.replace(self, topics=named if self.topics is None else self.topics & named)

    def only_ledgers(self, ranges: Ranges) -> Wanted:
        return dataclasses.replace(self, ledger_id=both(self.ledger_id, ranges))

    def only_due(self, ranges: Ranges) -> Wanted:
        return dataclasses.replace(self, deliver_at_ms=both(self.deliver_at_ms, ranges))

    def may_have(self, live: LiveBucket) -> bool:
        """Return whether a row of the bucket, whose topic is wanted, may be wanted."""
        return _meet(self.ledger_id, live.first_ledger_id, live.last_ledger_id) and self.may_be_due(
            live.min_deliver_at_ms, live.max_deliver_at_ms
        )

    def may_be_due(self, first_ms: int, last_ms: int) -> bool:
        """Return whether a row that is due in between may be wanted."""
        return _meet(self.deliver_at_ms, first_ms, last_ms)

    def mask_of(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask of the wanted rows; their topic is wanted."""
        return _inside(self.ledger_id, rows.ledger_id) & _inside(self.deliver_at_ms, rows.deliver_at_ms)


EVERYTHING: Final = Wanted()


PART_ROWS: Final = 200_000
"""Rows from which on a part takes no further bucket"""

BATCH_ROWS: Final = 50_000
"""Rows that are read together; a larger segment is read alone."""

TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999"""

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `meaning` is the text in the documentation."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False


_TOPIC: Final = Column("topic", pa.string(), "The topic.")
_SUBSCRIPTION: Final = Column(
    "subscription", pa.string(), "The subscription whose index has the rows; null: the shared index.", nullable=True
)

ROWS: Final = (
    _TOPIC,
    _SUBSCRIPTION,
    Column("ledger_id", pa.int64(), "The ledger (u64, bit view)."),
    Column("entry_id", pa.int64(), "The entry (u64, bit view)."),
    Column("batch_index", pa.int32(), "The message of the entry; null: the whole entry.", nullable=True),
    Column("deliver_at", _TIMESTAMP, "When it is due; null beyond the year 9999.", nullable=True),
    Column("deliver_at_ms", pa.int64(), "The same in ms since 1970 (u64, bit view)."),
    Column("key_hash", pa.int64(), "The hash of its key, 0 to 2^32 - 1; null: its bucket has none.", nullable=True),
    Column("schedule_id", pa.string(), "Its schedule id; null: it has none.", nullable=True),
    Column("bucket", pa.string(), "The object that has it; null: no sealed bucket yet.", nullable=True),
)

BUCKETS: Final = (
    _TOPIC,
    _SUBSCRIPTION,
    Column("batch_parts", pa.bool_(), "True if its rows are messages of entries."),
    Column("bucket", pa.string(), "The key of the object."),
    Column("base", pa.int64(), "The manifest from which it was started."),
    Column("size_bytes", pa.int64(), "The size of the object."),
    Column("sha256", pa.string(), "The SHA-256 of its bytes, in hexadecimal."),
    Column("level", pa.int32(), "How often its rows were merged; 0: as sealed."),
    Column("rows", pa.int64(), "Rows in the object."),
    Column("gone_rows", pa.int64(), "Those that are gone; in a quarantined bucket, as far as stored."),
    Column("segments", pa.int32(), "Segments in the object."),
    Column("first_ledger_id", pa.int64(), "The lowest ledger (u64, bit view)."),
    Column("last_ledger_id", pa.int64(), "The highest ledger (u64, bit view)."),
    Column("min_deliver_at", _TIMESTAMP, "When its first row is due; null beyond the year 9999.", nullable=True),
    Column("min_deliver_at_ms", pa.int64(), "The same in ms since 1970 (u64, bit view)."),
    Column("max_deliver_at", _TIMESTAMP, "When its last row is due; null beyond the year 9999.", nullable=True),
    Column("max_deliver_at_ms", pa.int64(), "The same in ms since 1970 (u64, bit view)."),
    Column("hash_low", pa.int64(), "The lower half of the hash of its rows (u64, bit view)."),
    Column("hash_high", pa.int64(), "The upper half of the hash of its rows (u64, bit view)."),
    Column("compatible_form", pa.bool_(), "True if it has PIP-195's form."),
    Column("quarantined", pa.bool_(), "True if it is damaged: its rows are missing until they are added again."),
    Column("damage", pa.string(), "The damage found at its quarantine.", nullable=True),
    Column("quarantined_slot", pa.int64(), "The last section number applied at its quarantine.", nullable=True),
)

BACKLOG: Final = (
    _TOPIC,
    Column("subscription", pa.string(), "The subscription."),
    Column("rows", pa.int64(), "Rows that it is owed, due or not."),
    Column("due_rows", pa.int64(), "Those that were due when the query was planned."),
    Column("first_deliver_at", _TIMESTAMP, "When the first of them is due; null: there is none.", nullable=True),
    Column("last_deliver_at", _TIMESTAMP, "When the last of them is due; null: there is none.", nullable=True),
    Column("nacked", pa.int64(), "Those that it negatively acknowledged and that are redelivered later than that."),
    Column("dead_letters", pa.int64(), "Its dead letters."),
)

TABLES: Final[Mapping[str, tuple[Column, ...]]] = {"rows": ROWS, "buckets": BUCKETS, "backlog": BACKLOG}


def schema_of(table: str) -> pa.Schema:
    return pa.schema([pa.field(each.name, each.type, each.nullable) for each in TABLES[table]])


# ---- parts


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Source:
    """Rows of one index of a topic. `subscription` is its owner, or None for the shared index."""

    topic: str
    subscription: str | None
    held: BucketState | UnsealedRows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowsPart:
    """Some buckets, or rows that are in none, of any topics."""

    sources: tuple[_Source, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BucketsPart:
    """Some buckets, each as topic, subscription, bucket, and number of gone rows."""

    buckets: tuple[tuple[str, str | None, LiveBucket, int], ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BacklogPart:
    """Some topics, as they were at `now_ms`."""

    states: tuple[TopicContents, ...]
    now_ms: int


Part = RowsPart | BucketsPart | BacklogPart


def parts_of(table: str, root: Root, topics: Sequence[str] | None, wanted: Wanted = EVERYTHING) -> list[Part]:
    """Return the parts of a table, of these topics or of all, without parts that have nothing wanted.

    Raises Damaged and the store's other errors.
    """
    if wanted.topics is not None:
        topics = sorted(wanted.topics if topics is None else wanted.topics.intersection(topics))
    states = read_states(root, None if topics is None else root.topics(topics))
    if table == "buckets":
        return [*_buckets_parts(states)]
    if table == "backlog":
        now_ms = time.time_ns() // 1_000_000
        return [BacklogPart(group, now_ms) for group in _grouped((each, _rows_in(each)) for each in states)]
    return [RowsPart(group) for group in _grouped(_sources(states, wanted))]


def _grouped(sized: Iterator[tuple[Any, int]]) -> Iterator[tuple[Any, ...]]:
    """Yield neighbours together until they have `PART_ROWS` rows."""
    group: list[Any] = []
    rows = 0
    for each, each_rows in sized:
        group.append(each)
        rows += each_rows
        if rows >= PART_ROWS:
            yield tuple(group)
            group, rows = [], 0
    if group:
        yield tuple(group)


def _rows_in(state: TopicContents) -> int:
    return sum(each.present_rows for each in state.buckets) + sum(len(each.rows) for each in state.unsealed)


def _sources(states: Iterator[TopicContents], wanted: Wanted) -> Iterator[tuple[_Source, int]]:
    for state in states:
        for bucket in state.buckets:
            if bucket.present_rows and wanted.may_have(bucket.live):
                yield _Source(state.name, _owner(state, bucket.index_id), bucket), bucket.present_rows
        for loose in state.unsealed:
            rows = loose.rows.take(wanted.mask_of(loose.rows))
            if len(rows):
                left = UnsealedRows(loose.index_id, rows, {})
                yield _Source(state.name, _owner(state, loose.index_id), left), len(rows)


def _buckets_parts(states: Iterator[TopicContents]) -> Iterator[BucketsPart]:
    rows = (
        ((state.name, _owner(state, bucket.index_id), bucket.live, len(bucket.gone)), PART_ROWS // 1000)
        for state in states
        for bucket in state.buckets
    )
    yield from (BucketsPart(group) for group in _grouped(rows))


def _owner(state: TopicContents, index_id: int) -> str | None:
    owner = index_ids.subscription_of(index_id)
    return next((each.stored.name for each in state.subscriptions if each.stored.subscription_id == owner), None)


# ---- reading a part


def read(part: Part, store: ObjectStore, wanted: Wanted = EVERYTHING) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a part; of rows only segments that may have something wanted.

    Raises Damaged, NotFound if a bucket was merged and collected since the parts were made, and the store's errors.
    """
    match part:
        case RowsPart():
            for source in part.sources:
                for rows in _rows_of(source.held, store, wanted):
                    if len(rows):
                        yield _rows_batch(source, rows)
        case BucketsPart():
            yield _buckets_batch(part)
        case BacklogPart():
            yield _backlog_batch(part, store)


def _rows_of(held: BucketState | UnsealedRows, store: ObjectStore, wanted: Wanted) -> Iterator[Rows]:
    if isinstance(held, UnsealedRows):
        for first in range(0, len(held.rows), BATCH_ROWS):
            yield held.rows.take(slice(first, first + BATCH_ROWS))
        return
    table, _ = bucket_reading.open_bucket(store, held.live)
    for run in _runs(table.segments, wanted):
        rows = Rows.concat(bucket_reading.read_segments(store, held.live.object.name, run))
        yield rows.take(~held.gone.mask_of(rows.ledger_id, rows.entry_id)) if held.gone else rows


def _runs(segments: Iterable[SegmentInfo], wanted: Wanted) -> Iterator[list[SegmentInfo]]:
    """Yield wanted neighbours, as many as are read together."""
    run: list[SegmentInfo] = []
    rows = 0
    for segment in segments:
        is_wanted = wanted.may_be_due(segment.min_deliver_at_ms, segment.max_deliver_at_ms)
        if run and (not is_wanted or rows + segment.rows > BATCH_ROWS):
            yield run
            run, rows = [], 0
        if is_wanted:
            run.append(segment)
            rows += segment.rows
    if run:
        yield run


def _rows_batch(source: _Source, rows: Rows) -> pa.RecordBatch:
    held = source.held
    count = len(rows)
    entry_id, batch_index = rows.entry_id, pa.nulls(count, pa.int32())
    if index_ids.is_of_batch_parts(held.index_id):
        entry_id, parts = index_ids.of_part(rows.entry_id)
        batch_index = pa.array(parts.astype(np.int32))
    key = held.live.object.name if isinstance(held, BucketState) else None
    hashes = pa.nulls(count, pa.int64()) if rows.key_hash is None else pa.array(rows.key_hash.astype(np.int64))
    return _batch(
        "rows",
        [
            _repeated(source.topic, count),
            _repeated(source.subscription, count),
            bit_view(rows.ledger_id),
            bit_view(entry_id),
            batch_index,
            timestamps(rows.deliver_at_ms),
            bit_view(rows.deliver_at_ms),
            hashes,
            pa.nulls(count, pa.string()) if rows.schedule_ids is None else _texts(rows.schedule_ids),
            _repeated(key, count),
        ],
    )


def _buckets_batch(part: BucketsPart) -> pa.RecordBatch:
    live = [each for _, _, each, _ in part.buckets]
    first_ms, last_ms = _u64(each.min_deliver_at_ms for each in live), _u64(each.max_deliver_at_ms for each in live)
    return _batch(
        "buckets",
        [
            pa.array([topic for topic, _, _, _ in part.buckets], pa.string()),
            pa.array([subscription for _, subscription, _, _ in part.buckets], pa.string()),
            pa.array([index_ids.is_of_batch_parts(each.subscription_id) for each in live]),
            pa.array([each.object.name for each in live]),
            pa.array([each.object.base for each in live], pa.int64()),
            pa.array([each.object.size_bytes for each in live], pa.int64()),
            pa.array([each.object.sha256.hex() for each in live]),
            pa.array([each.level for each in live], pa.int32()),
            pa.array([each.rows for each in live], pa.int64()),
            pa.array([gone for _, _, _, gone in part.buckets], pa.int64()),
            pa.array([each.segments for each in live], pa.int32()),
            bit_view(_u64(each.first_ledger_id for each in live)),
            bit_view(_u64(each.last_ledger_id for each in live)),
            timestamps(first_ms),
            bit_view(first_ms),
            timestamps(last_ms),
            bit_view(last_ms),
            bit_view(_u64(each.hash_low for each in live)),
            bit_view(_u64(each.hash_high for each in live)),
            pa.array([each.compatible_form for each in live]),
            pa.array([each.quarantined for each in live]),
            pa.array([each.damage if each.quarantined else None for each in live], pa.string()),
            pa.array([each.quarantined_slot if each.quarantined else None for each in live], pa.int64()),
        ],
    )


class _Owed:
    """The rows that one subscription is owed, counted."""

    def __init__(self) -> None:
        self.rows = self.due_rows = 0
        self.first_ms: int | None = None
        self.last_ms: int | None = None

    def count(self, times_ms: U64, now_ms: int) -> None:
        if not len(times_ms):
            return
        first_ms, last_ms = int(times_ms.min()), int(times_ms.max())
        self.rows += len(times_ms)
        self.due_rows += int(np.count_nonzero(times_ms <= np.uint64(now_ms)))
        self.first_ms = first_ms if self.first_ms is None else min(self.first_ms, first_ms)
        self.last_ms = last_ms if self.last_ms is None else max(self.last_ms, last_ms)


def _backlog_batch(part: BacklogPart, store: ObjectStore) -> pa.RecordBatch:
    counted = [
        (state, each, owed)
        for state in part.states
        for each, owed in zip(state.subscriptions, _owed(state, store, part.now_ms), strict=True)
    ]
    nacked = [
        sum(int(np.count_nonzero(nacked.redeliver_at_ms > np.uint64(part.now_ms))) for nacked in each.nacked)
        for _, each, _ in counted
    ]
    return _batch(
        "backlog",
        [
            pa.array([state.name for state, _, _ in counted], pa.string()),
            pa.array([each.stored.name for _, each, _ in counted], pa.string()),
            pa.array([owed.rows for _, _, owed in counted], pa.int64()),
            pa.array([owed.due_rows for _, _, owed in counted], pa.int64()),
            _optional_timestamps([owed.first_ms for _, _, owed in counted]),
            _optional_timestamps([owed.last_ms for _, _, owed in counted]),
            pa.array(nacked, pa.int64()),
            pa.array([len(each.dead_letters.dead_letter_id) for _, each, _ in counted], pa.int64()),
        ],
    )


def _owed(state: TopicContents, store: ObjectStore, now_ms: int) -> list[_Owed]:
    """Count the rows that each subscription is owed.

    Every bucket is read once, if any subscription may be owed rows of it.
    """
    found = [_Owed() for _ in state.subscriptions]
    held: Sequence[BucketState | UnsealedRows] = (*state.buckets, *state.unsealed)
    for part in held:
        asking = [
            (each.stored, owed)
            for each, owed in zip(state.subscriptions, found, strict=True)
            if index_ids.serves(part.index_id, each.stored.subscription_id)
        ]
        if not asking:
            continue
        rows = rows_of(store, part) if isinstance(part, BucketState) else part.rows
        for stored, owed in asking:
            mask = owed_mask(stored, part.index_id, rows, part.acknowledged)
            owed.count(rows.deliver_at_ms[mask], now_ms)
    return found


# ---- columns


def bit_view(column: U64) -> pa.Array:
    """Return the bits of each u64 as a signed integer."""
    return pa.array(np.ascontiguousarray(column).view(np.int64))


def timestamps(times_ms: U64) -> pa.Array:
    """Return microseconds since 1970, null beyond the year 9999."""
    beyond = times_ms > np.uint64(TIMESTAMP_MS_MAX)
    micros = np.where(beyond, np.uint64(0), times_ms).astype(np.int64) * 1000
    return pa.array(micros, mask=beyond).cast(pa.timestamp("us")).cast(_TIMESTAMP)


def _optional_timestamps(times_ms: Sequence[int | None]) -> pa.Array:
    micros = [None if each is None or each > TIMESTAMP_MS_MAX else each * 1000 for each in times_ms]
    return pa.array(micros, pa.int64()).cast(_TIMESTAMP)


def _texts(ids: ScheduleIds) -> pa.Array:
    """Return schedule ids, null for a row without one."""
    ends = np.zeros(len(ids) + 1, np.int32)
    ends[1:] = np.cumsum(ids.lengths)
    has_id = np.packbits(ids.lengths != 0, bitorder="little")
    buffers = [pa.py_buffer(has_id), pa.py_buffer(ends), pa.py_buffer(ids.gathered())]
    return pa.Array.from_buffers(pa.string(), len(ids), buffers)


def _repeated(value: str | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.string()) if value is None else pa.repeat(pa.scalar(value, pa.string()), count)


def _u64(values: Iterator[int]) -> U64:
    return np.fromiter(values, np.uint64)


def _batch(table: str, columns: list[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(columns, schema=schema_of(table))
