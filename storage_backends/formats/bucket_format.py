"""Encodes and decodes the bucket object: metadata, segments, offset table, footer.

Parts of it can be read by range, and every read is checked. `segment` defines the payload of a segment.

    "TyBK" | u32 version | entry 0: SnapshotMetadata | entry 1..N: SnapshotSegment | offset table | footer
    entry   u32 payload length | u32 CRC32C of the payload | payload
    table   for each entry  u64 offset | u32 length | u32 CRC32C | u32 rows | u64 min, u64 max deliver_at_ms
    footer  u64 table offset | u64 table length | u32 CRC32C of the table | u32 version
            | u32 CRC32C of the footer before it | "TyBF"                                       little-endian

The length in the table covers the whole entry; the CRC32C is that of the entry's payload. Entries lie without gaps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
import zstandard

from storage_backends.formats import format_errors, framing, index_ids, mirror, position_bitmap, requirements, segment
from storage_backends.formats.generated import bucket_pb2
from storage_backends.formats.manifest import LiveBucket, ObjectReference
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.row_columns import U64, Rows, id_hash, row_hash
from storage_backends.formats.segment import SegmentLimits

MAGIC = b"TyBK"
FOOTER_MAGIC = b"TyBF"
_HEAD = struct.Struct("<4sI")
_ENTRY = struct.Struct("<II")
# The fields of SegmentInfo without the number
_TABLE_ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("crc32c", "<u4"),
        ("rows", "<u4"),
        ("min_deliver_at_ms", "<u8"),
        ("max_deliver_at_ms", "<u8"),
    ]
)
_table_row = operator.attrgetter(*(_TABLE_ROW.names or ()))
_FOOTER = struct.Struct("<QQII")
_FOOTER_END = struct.Struct("<I4s")
FOOTER_BYTES = _FOOTER.size + _FOOTER_END.size
# Entry ids from here on have no place in a bitmap of PIP-195.
_COMPATIBLE_ENTRY_ID_END = 1 << 32


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One row of the offset table.

    Entry 0 is the metadata of the bucket and counts the rows of all segments. `offset` and `length` describe the whole
    entry in the object, `crc32c` its payload.
    """

    number: int
    offset: int
    length: int
    crc32c: int
    rows: int
    min_deliver_at_ms: int
    max_deliver_at_ms: int

    @property
    def what(self) -> str:
        return f"bucket segment {self.number}" if self.number else "bucket metadata"


class SegmentInfos(Sequence[SegmentInfo]):
    """The segments of a bucket, numbered from 1, in columns: a large topic keeps thousands of them in memory."""

    __slots__ = ("_rows",)

    def __init__(self, rows: npt.NDArray[np.void]) -> None:
        self._rows = rows

    @staticmethod
    def of(infos: Iterable[SegmentInfo]) -> SegmentInfos:
        """Make a table of consecutive segments from number 1 on."""
        return SegmentInfos(np.array([_table_row(info) for info in infos], _TABLE_ROW))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> SegmentInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[SegmentInfo]: ...
    def __getitem__(self, index: int | slice) -> SegmentInfo | list[SegmentInfo]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return SegmentInfo(number + 1, *self._rows[number].item())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentInfos) and bool(np.array_equal(self._rows, other._rows))

    def __hash__(self) -> int:
        return hash(self._rows.tobytes())

    @property
    def rows(self) -> npt.NDArray[np.uint32]:
        return np.ascontiguousarray(self._rows["rows"])

    @property
    def min_deliver_at_ms(self) -> U64:
        return np.ascontiguousarray(self._rows["min_deliver_at_ms"])

    @property
    def max_deliver_at_ms(self) -> U64:
        return np.ascontiguousarray(self._rows["max_deliver_at_ms"])


@dataclasses.dataclass(frozen=True, slots=True)
class TableRange:
    """The range of the offset table, from the footer."""

    offset: int
    length: int
    crc32c: int


@dataclasses.dataclass(frozen=True, slots=True)
class BucketTable:
    """The offset table: entry 0 and the segments in due order, numbered from 1."""

    metadata: SegmentInfo
    segments: SegmentInfos


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The rows of the bucket `source` that a merge copied, directly or by way of other merges."""

    source: str
    positions: tuple[PositionBitmap, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BucketMetadata:
    """Entry 0.

    `positions` are those of all rows. `hash_low` and `hash_high` are those of `row_hash`. `subscription_id` 0 is the
    shared index. `kept` has one item for each source of a merged bucket, and for each source of a source, that has any
    rows. `id_positions` are those of the rows that have a schedule id, `id_hash_low` and `id_hash_high` are those of
    `id_hash`.
    """

    topic: str
    subscription_id: int
    rows: int
    hash_low: int
    hash_high: int
    positions: tuple[PositionBitmap, ...]
    kept: tuple[KeptRows, ...]
    id_positions: tuple[PositionBitmap, ...] = ()
    id_hash_low: int = 0
    id_hash_high: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedBucket:
    """A bucket ready to be written, with its values for the manifest.

    `compatible` says which form it has, `id_rows` how many rows have a schedule id.
    """

    body: bytes
    sha256: bytes
    table: BucketTable
    positions: tuple[PositionBitmap, ...]
    rows: int
    first_ledger_id: int
    last_ledger_id: int
    min_deliver_at_ms: int
    max_deliver_at_ms: int
    hash_low: int
    hash_high: int
    id_rows: int
    id_hash_low: int
    id_hash_high: int
    compatible: bool

    @property
    def segments(self) -> SegmentInfos:
        return self.table.segments

    def live_bucket(self, name: str, *, base: int, subscription_id: int = 0, level: int = 0) -> LiveBucket:
        """Return the manifest's entry for the object of this name.

        `base` is the number of the manifest that the bucket was started from.
        """
        return LiveBucket(
            object=ObjectReference(name=name, base=base, size_bytes=len(self.body), sha256=self.sha256),
            rows=self.rows,
            first_ledger_id=self.first_ledger_id,
            last_ledger_id=self.last_ledger_id,
            min_deliver_at_ms=self.min_deliver_at_ms,
            max_deliver_at_ms=self.max_deliver_at_ms,
            hash_low=self.hash_low,
            hash_high=self.hash_high,
            id_rows=self.id_rows,
            id_hash_low=self.id_hash_low,
            id_hash_high=self.id_hash_high,
            level=level,
            subscription_id=subscription_id,
            compatible_form=self.compatible,
            segments=len(self.segments),
        )


def encode_bucket(
    rows: Rows,
    *,
    topic: str,
    subscription_id: int,
    limits: SegmentLimits,
    compatible: bool,
    kept: Sequence[KeptRows] = (),
    positions: tuple[PositionBitmap, ...] | None = None,
) -> EncodedBucket:
    """Encode the bucket of at least one row, in the order of `Rows.sorted_by_due`.

    `positions` are those of the rows, if known. `compatible` asks for PIP-195's rows and bitmaps. Its bitmaps cannot
    hold entry ids from 2^32 on: a reader would take such a position for absent. Nor does it know messages of batches:
    it would take their entry ids for entries. Its rows have no schedule ids. A bucket with any of these is written in
    columns instead, in which that reader sees no rows at all; `EncodedBucket.compatible` says which form it has. Raises
    ValueError for no rows, or rows in another order.
    """
    if not len(rows):
        raise ValueError("a bucket has at least one row")
    if bool((rows.deliver_at_ms[1:] < rows.deliver_at_ms[:-1]).any()):
        raise ValueError("the rows of a bucket must be sorted by deliver_at_ms")
    holds_ids = rows.has_ids
    compatible = (
        compatible
        and not holds_ids
        and not index_ids.is_of_batch_parts(subscription_id)
        and int(rows.entry_id.max()) < _COMPATIBLE_ENTRY_ID_END
    )
    id_lengths = None if rows.schedule_ids is None else rows.schedule_ids.lengths
    parts = [rows.take(slice(start, end)) for start, end in segment.cut(rows.deliver_at_ms, limits, id_lengths)]
    if positions is None:
        positions = position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)
    hash_low, hash_high = row_hash(rows)
    metadata = bucket_pb2.SnapshotMetadata(
        rows=len(rows), hash_low=hash_low, hash_high=hash_high, subscription_id=subscription_id, topic=topic
    )
    mirror.extend(metadata.positions, positions)
    mirror.extend(metadata.kept, kept)
    if holds_ids:
        mirror.extend(metadata.id_positions, id_positions(rows))
        metadata.id_hash_low, metadata.id_hash_high = id_hash(rows)
    _list_segments(metadata, parts, compatible)
    if compatible:
        payloads = [segment.encode_compatible(part) for part in parts]
    else:
        zstd = segment.compressor()
        payloads = [segment.encode_columnar(part, zstd) for part in parts]
    version = requirements.version_of(holds_ids=holds_ids)
    body, table = _assemble([metadata.SerializeToString(deterministic=True), *payloads], [rows, *parts], version)
    return EncodedBucket(
        body=body,
        sha256=hashlib.sha256(body).digest(),
        table=table,
        positions=positions,
        rows=len(rows),
        first_ledger_id=int(rows.ledger_id.min()),
        last_ledger_id=int(rows.ledger_id.max()),
        min_deliver_at_ms=table.metadata.min_deliver_at_ms,
        max_deliver_at_ms=table.metadata.max_deliver_at_ms,
        hash_low=hash_low,
        hash_high=hash_high,
        id_rows=0 if id_lengths is None else int(np.count_nonzero(id_lengths)),
        id_hash_low=metadata.id_hash_low,
        id_hash_high=metadata.id_hash_high,
        compatible=compatible,
    )


def id_positions(rows: Rows) -> tuple[PositionBitmap, ...]:
    """Return the positions of the rows that have a schedule id."""
    if rows.schedule_ids is None:
        return ()
    has_id = rows.schedule_ids.lengths != 0
    return position_bitmap.position_bitmaps(rows.ledger_id[has_id], rows.entry_id[has_id])


def _list_segments(metadata: bucket_pb2.SnapshotMetadata, parts: Sequence[Rows], compatible: bool) -> None:
    for part in parts:
        listed = metadata.metadata_list.add(
            max_schedule_timestamp=int(part.deliver_at_ms[-1]),
            min_schedule_timestamp=int(part.deliver_at_ms[0]),
            rows=len(part),
        )
        if compatible:
            for bitmap in position_bitmap.position_bitmaps(part.ledger_id, part.entry_id):
                listed.delayed_index_bit_map[bitmap.ledger_id] = bitmap.entries


def _assemble(payloads: Sequence[bytes], rows: Sequence[Rows], version: int) -> tuple[bytes, BucketTable]:
    chunks = [_HEAD.pack(MAGIC, version)]
    offset = _HEAD.size
    infos = []
    for number, (payload, part) in enumerate(zip(payloads, rows, strict=True)):
        crc32c = framing.crc32c(payload)
        length = _ENTRY.size + len(payload)
        due = part.deliver_at_ms
        infos.append(SegmentInfo(number, offset, length, crc32c, len(part), int(due[0]), int(due[-1])))
        chunks += (_ENTRY.pack(len(payload), crc32c), payload)
        offset += length
    table = np.array([_table_row(info) for info in infos], _TABLE_ROW).tobytes()
    footer = _FOOTER.pack(offset, len(table), framing.crc32c(table), version)
    chunks += (table, footer, _FOOTER_END.pack(framing.crc32c(footer), FOOTER_MAGIC))
    return b"".join(chunks), BucketTable(infos[0], SegmentInfos.of(infos[1:]))


def footer_range(size_bytes: int) -> tuple[int, int]:
    """Return offset and length (bytes) of the footer of a bucket of that size.

    Raises FormatError if the size is too small for one.
    """
    if size_bytes < _HEAD.size + FOOTER_BYTES:
        raise format_errors.FormatError("bucket", size_bytes, f"{size_bytes} bytes are too few for head and footer")
    return size_bytes - FOOTER_BYTES, FOOTER_BYTES


def tail_range(size_bytes: int, segments: int) -> tuple[int, int]:
    """Return offset and length (bytes) of offset table and footer, by the sizes of bucket and table.

    Raises FormatError if the size is too small for so many segments.
    """
    length = _TABLE_ROW.itemsize * (segments + 1) + FOOTER_BYTES
    if size_bytes < _HEAD.size + length:
        raise format_errors.FormatError("bucket", size_bytes, f"{size_bytes} bytes are too few for {segments} segments")
    return size_bytes - length, length


def decode_footer(data: bytes, size_bytes: int) -> TableRange:
    """Decode the bytes of `footer_range(size_bytes)` into the range of the table. Raises FormatError."""
    start, length = footer_range(size_bytes)
    if len(data) != length:
        raise format_errors.FormatError("bucket footer", start, f"it has {length} bytes, these are {len(data)}")
    table_offset, table_length, table_crc32c, version = _FOOTER.unpack_from(data)
    crc32c, magic = _FOOTER_END.unpack_from(data, _FOOTER.size)
    if magic != FOOTER_MAGIC:
        raise format_errors.FormatError(
            "bucket footer", start + length - len(FOOTER_MAGIC), f"magic is {magic!r}, not {FOOTER_MAGIC!r}"
        )
    framing.check_crc32c(data[: _FOOTER.size], crc32c, "bucket footer", start)
    requirements.check_version(version, "bucket footer", start + 20)
    if table_offset + table_length != start or table_length % _TABLE_ROW.itemsize or not table_length:
        detail = f"the offset table cannot be {table_length} bytes from {table_offset}, the footer begins at {start}"
        raise format_errors.FormatError("bucket footer", start, detail)
    return TableRange(table_offset, table_length, table_crc32c)


def decode_table(data: bytes, table: TableRange) -> BucketTable:
    """Decode the bytes of the table's range. Raises FormatError."""
    what = "bucket offset table"
    if len(data) != table.length:
        raise format_errors.FormatError(what, table.offset, f"it has {table.length} bytes, these are {len(data)}")
    framing.check_crc32c(data, table.crc32c, what, table.offset)
    rows = np.frombuffer(data, _TABLE_ROW)
    begins = _HEAD.size + np.cumsum(rows["length"], dtype=np.uint64) - rows["length"]
    wrong = np.flatnonzero((rows["offset"] != begins) | (rows["length"] < _ENTRY.size))
    if len(wrong):
        number = int(wrong[0])
        detail = (
            f"entry {number} has {rows['length'][number]} bytes from {rows['offset'][number]}, it should begin at "
            f"{begins[number]}"
        )
        raise format_errors.FormatError(what, table.offset + number * _TABLE_ROW.itemsize, detail)
    end = int(begins[-1]) + int(rows["length"][-1])
    if end != table.offset:
        raise format_errors.FormatError(what, table.offset, f"the entries end at {end}, the table is at {table.offset}")
    if int(rows["rows"][0]) != int(rows["rows"][1:].sum(dtype=np.uint64)):
        raise format_errors.FormatError(what, table.offset, "the rows of the segments are not the rows of the bucket")
    # Copy the rows, so that `data` need not stay in memory.
    return BucketTable(SegmentInfo(0, *rows[0].item()), SegmentInfos(rows[1:].copy()))


def decode_tail(data: bytes, size_bytes: int) -> BucketTable:
    """Decode the bytes of `tail_range`. Raises FormatError, also for another number of segments than assumed."""
    start, length = footer_range(size_bytes)
    if len(data) < length:
        raise format_errors.FormatError("bucket footer", start, f"it has {length} bytes, these are {len(data)}")
    table = decode_footer(data[-length:], size_bytes)
    return decode_table(data[:-length], table)


def decode_metadata(entry: bytes, info: SegmentInfo) -> BucketMetadata:
    """Decode entry 0 from the bytes of its range. Raises FormatError."""
    message = framing.parse(bucket_pb2.SnapshotMetadata, _payload(entry, info), info.what, info.offset + _ENTRY.size)
    if message.rows != info.rows:
        detail = f"it says {message.rows} rows, the offset table {info.rows}"
        raise format_errors.FormatError(info.what, info.offset + _ENTRY.size, detail)
    with format_errors.reading(info.what, info.offset + _ENTRY.size):
        metadata = mirror.made_from(BucketMetadata, message)
    _check_positions(metadata, info)
    return metadata


def _check_positions(metadata: BucketMetadata, info: SegmentInfo) -> None:
    """Raise FormatError if there are more positions than rows, or if a row origin or the rows with ids have more."""
    what, offset = info.what, info.offset + _ENTRY.size
    try:
        positions = _count(metadata.positions)
        kept = max((_count(each.positions) for each in metadata.kept), default=0)
        with_ids = _count(metadata.id_positions)
    except format_errors.FormatError as error:
        raise format_errors.FormatError(f"{what} {error.what}", offset, error.detail) from error
    if max(positions, kept, with_ids) > metadata.rows:
        detail = f"it says {metadata.rows} rows, and has {positions} positions, {kept} of one row origin"
        detail += f", {with_ids} with ids" if with_ids else ""
        raise format_errors.FormatError(what, offset, detail)


def _count(positions: Iterable[PositionBitmap]) -> int:
    return sum(len(each.bitmap()) for each in positions)


def decode_segment(entry: bytes, info: SegmentInfo, zstd: zstandard.ZstdDecompressor | None = None) -> Rows:
    """Decode the rows of a segment of either form from the bytes of its range.

    `zstd` is that of `segment.decode`. Raises FormatError.
    """
    offset = info.offset + _ENTRY.size
    rows = segment.decode(_payload(entry, info), info.rows, what=info.what, offset=offset, zstd=zstd)
    if info.rows and (
        int(rows.deliver_at_ms[0]) != info.min_deliver_at_ms or int(rows.deliver_at_ms[-1]) != info.max_deliver_at_ms
    ):
        detail = (
            f"it is due from {rows.deliver_at_ms[0]} to {rows.deliver_at_ms[-1]}, the offset table says "
            f"{info.min_deliver_at_ms} to {info.max_deliver_at_ms}"
        )
        raise format_errors.FormatError(info.what, offset, detail)
    return rows


def _payload(entry: bytes, info: SegmentInfo) -> bytes:
    if len(entry) != info.length:
        raise format_errors.FormatError(info.what, info.offset, f"it has {info.length} bytes, these are {len(entry)}")
    payload_bytes, crc32c = _ENTRY.unpack_from(entry)
    if payload_bytes != info.length - _ENTRY.size or crc32c != info.crc32c:
        detail = f"its head ({payload_bytes} bytes, CRC32C {crc32c:#010x}) is not the offset table's"
        raise format_errors.FormatError(info.what, info.offset, detail)
    payload = entry[_ENTRY.size :]
    framing.check_crc32c(payload, crc32c, info.what, info.offset)
    return payload


def check_head(metadata: BucketMetadata, table: BucketTable, live: LiveBucket) -> None:
    """Check after a read by range that metadata and table belong to the bucket that the manifest names.

    Raises FormatError if not.
    """
    found = (metadata.subscription_id, metadata.rows, metadata.hash_low, metadata.hash_high)
    named = (live.subscription_id, live.rows, live.hash_low, live.hash_high)
    if found != named:
        what, offset = table.metadata.what, table.metadata.offset + _ENTRY.size
        detail = f"subscription, rows and hash are {found}, the manifest says {named}"
        raise format_errors.FormatError(what, offset, detail)
    of_ids = (_count(metadata.id_positions), metadata.id_hash_low, metadata.id_hash_high)
    named_ids = (live.id_rows, live.id_hash_low, live.id_hash_high)
    if of_ids != named_ids:
        what, offset = table.metadata.what, table.metadata.offset + _ENTRY.size
        detail = f"rows with ids and their hash are {of_ids}, the manifest says {named_ids}"
        raise format_errors.FormatError(what, offset, detail)


def check_table(table: BucketTable, live: LiveBucket) -> None:
    """Check a table that was read alone against the rows and times in the manifest. Raises FormatError."""
    info = table.metadata
    found = (info.rows, info.min_deliver_at_ms, info.max_deliver_at_ms)
    named = (live.rows, live.min_deliver_at_ms, live.max_deliver_at_ms)
    if found != named:
        detail = f"rows and the range of deliver_at_ms are {found}, the manifest says {named}"
        raise format_errors.FormatError("bucket offset table", info.offset, detail)


def decode_bucket(body: bytes) -> tuple[BucketMetadata, Rows]:
    """Decode metadata and all rows in due order from the whole object.

    Raises FormatError at the first part that is wrong.
    """
    start, _ = footer_range(len(body))
    table_range = decode_footer(body[start:], len(body))
    magic, version = _HEAD.unpack_from(body)
    if magic != MAGIC:
        raise format_errors.FormatError("bucket", 0, f"magic is {magic!r}, not {MAGIC!r}")
    *_, checked = _FOOTER.unpack_from(body, start)
    if version != checked:
        raise format_errors.FormatError("bucket", 4, f"version is {version}, its footer says {checked}")
    table = decode_table(body[table_range.offset : start], table_range)
    metadata = decode_metadata(_slice(body, table.metadata), table.metadata)
    zstd = segment.decompressor()
    rows = Rows.concat([decode_segment(_slice(body, info), info, zstd) for info in table.segments])
    if row_hash(rows) != (metadata.hash_low, metadata.hash_high):
        raise format_errors.FormatError("bucket", 0, "the hash of its rows is not the one in its metadata")
    if id_hash(rows) != (metadata.id_hash_low, metadata.id_hash_high):
        raise format_errors.FormatError("bucket", 0, "the hash of its rows with ids is not the one in its metadata")
    if bool(np.any(rows.deliver_at_ms[1:] < rows.deliver_at_ms[:-1])):
        raise format_errors.FormatError("bucket", 0, "its rows are not in due order")
    return metadata, rows


def _slice(body: bytes, info: SegmentInfo) -> bytes:
    return body[info.offset : info.offset + info.length]
