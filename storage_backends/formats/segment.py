"""Cuts a bucket's rows into segments, slices of time, and encodes and decodes a segment's payload.

The payload has two forms: columnar, and compatible (PIP-195's rows). `bucket_format` adds entries, offset table and
metadata.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import zstandard

from storage_backends.formats import column_format, format_errors, framing
from storage_backends.formats.generated import bucket_pb2
from storage_backends.formats.row_columns import U64, Rows

# Higher levels cost time and save nothing: the planes that remain are random.
ZSTD_LEVEL = 1
_U64_MAX = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentLimits:
    """The limits at which a segment ends.

    It ends before the row that is due more than `time_step_ms` after its first one, once it has `rows_min` rows (0 is
    PIP-195's rule), and in any case with `rows_max` rows, at most `column_format.ROWS_MAX` (-1 means these).
    """

    time_step_ms: int = 300_000
    rows_max: int = 5_000
    rows_min: int = 1_000

    def __post_init__(self) -> None:
        if self.time_step_ms < 1:
            raise ValueError(f"time_step_ms is {self.time_step_ms}, it must be at least 1")
        if self.rows_max < 1 and self.rows_max != -1:
            raise ValueError(f"rows_max is {self.rows_max}, it must be at least 1, or -1 for no limit")
        if self.rows_min < 0:
            raise ValueError(f"rows_min is {self.rows_min}, it must not be negative")

    @property
    def most(self) -> int:
        """The largest number of rows of a segment: a reader refuses more."""
        return column_format.ROWS_MAX if self.rows_max == -1 else min(self.rows_max, column_format.ROWS_MAX)


# The most bytes of the ids of a segment that has several rows: a message of protobuf has less than 2 GiB.
_ID_BYTES_MAX = 256 << 20


def cut(deliver_at_ms: U64, limits: SegmentLimits, id_lengths: U64 | None = None) -> list[tuple[int, int]]:
    """Return (start, end) of each segment of an ascending column.

    `id_lengths` are the bytes of each row's schedule id, or None if no row has one.
    """
    rows = len(deliver_at_ms)
    id_bytes = None if id_lengths is None else np.cumsum(id_lengths)
    segments = []
    start = 0
    while start < rows:
        last_ms = min(int(deliver_at_ms[start]) + limits.time_step_ms, _U64_MAX)
        in_step = int(np.searchsorted(deliver_at_ms[start:], np.uint64(last_ms), side="right"))
        taken = max(in_step, limits.rows_min, 1)
        taken = min(taken, limits.most)
        end = min(start + taken, rows)
        if id_bytes is not None:
            before = id_bytes[start - 1] if start else np.uint64(0)
            fitting = int(np.searchsorted(id_bytes, before + np.uint64(_ID_BYTES_MAX), side="right"))
            end = min(end, max(fitting, start + 1))
        segments.append((start, end))
        start = end
    return segments


def compressor() -> zstandard.ZstdCompressor:
    """Make a compressor for the payloads of one bucket; threads must not share it."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False, write_content_size=True)


def encode_columnar(rows: Rows, zstd: zstandard.ZstdCompressor) -> bytes:
    """Encode the payload in columns: small and fast; a reader of PIP-195 sees a segment without rows."""
    message = bucket_pb2.SnapshotSegment(
        rows=len(rows),
        deliver_at_ms=column_format.encode_u64(rows.deliver_at_ms, zstd),
        ledger_id=column_format.encode_u64(rows.ledger_id, zstd),
        entry_id=column_format.encode_u64(rows.entry_id, zstd),
    )
    if rows.key_hash is not None:
        message.key_hash = column_format.encode_u32(rows.key_hash, zstd)
    if rows.schedule_ids is not None and rows.has_ids:
        message.schedule_ids.lengths, message.schedule_ids.ids = column_format.encode_ids(rows.schedule_ids, zstd)
    return message.SerializeToString(deterministic=True)


def encode_compatible(rows: Rows) -> bytes:
    """Encode the payload as PIP-195's `repeated DelayedIndex`, column by column, without a message object a row."""
    pieces: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = []
    for field, values in ((1, rows.deliver_at_ms), (2, rows.ledger_id), (3, rows.entry_id)):
        pieces.append(_varints(values, tag=field << 3))
    count = len(rows)
    if rows.key_hash is not None:
        fixed = np.empty((count, 6), np.uint8)
        fixed[:, :2] = (0x85, 0x01)  # field 16, fixed32
        fixed[:, 2:] = rows.key_hash.astype("<u4").view(np.uint8).reshape(count, 4)
        pieces.append((fixed, np.full(count, 6, np.uint8)))
    row_bytes = np.add.reduce([lengths for _, lengths in pieces])
    head = np.empty((count, 2), np.uint8)
    head[:, 0] = 0x0A  # field 1, a message; its length is below 128: one byte
    head[:, 1] = row_bytes
    pieces.insert(0, (head, np.full(count, 2, np.uint8)))
    table = np.concatenate([piece for piece, _ in pieces], axis=1)
    used = np.concatenate([np.arange(piece.shape[1]) < lengths[:, None] for piece, lengths in pieces], axis=1)
    indexes: bytes = table[used].tobytes()
    return indexes + bucket_pb2.SnapshotSegment(rows=count).SerializeToString()


def _varints(values: U64, tag: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return tag and varint of each value, u8[n, 1 + w], and its length, u8[n].

    Bytes past the length have no meaning.
    """
    width = max(1, (int(values.max()).bit_length() + 6) // 7)
    encoded = np.empty((len(values), 1 + width), np.uint8)
    encoded[:, 0] = tag
    lengths = np.full(len(values), 2, np.uint8)
    for place in range(width):
        rest = values >> np.uint64(7 * place)
        more = rest >= 0x80
        lengths += more
        encoded[:, 1 + place] = (rest & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
    return encoded, lengths


def decompressor() -> zstandard.ZstdDecompressor:
    """Make a decompressor for the payloads of one bucket; threads must not share it."""
    return zstandard.ZstdDecompressor()


def decode(
    payload: bytes, rows: int, *, what: str, offset: int, zstd: zstandard.ZstdDecompressor | None = None
) -> Rows:
    """Decode the rows of a payload of either form.

    `what` and `offset` (of the payload in the bucket) are for the error. `zstd` saves making a decompressor for each
    segment. Raises FormatError, which names the wrong field, also for another number of rows.
    """
    message = framing.parse(bucket_pb2.SnapshotSegment, payload, what, offset)
    if wrong := _wrong_with(message, rows):
        raise format_errors.FormatError(what, offset, wrong)
    if message.indexes:
        with format_errors.reading(what, offset):
            return _from_indexes(message)
    columns = column_format.Columns(
        rows, (message.ledger_id, message.entry_id), what=f"{what} column", offset=offset, zstd=zstd or decompressor()
    )
    return Rows(
        columns.u64("deliver_at_ms", message.deliver_at_ms),
        columns.u64("ledger_id", message.ledger_id),
        columns.u64("entry_id", message.entry_id),
        columns.u32("key_hash", message.key_hash) if message.HasField("key_hash") else None,
        columns.schedule_ids(message.schedule_ids.lengths, message.schedule_ids.ids)
        if message.HasField("schedule_ids")
        else None,
    )


_COLUMNS = ("deliver_at_ms", "ledger_id", "entry_id")


def _wrong_with(message: bucket_pb2.SnapshotSegment, rows: int) -> str:
    """Return why it is no segment of so many rows, or an empty text if it is one."""
    indexes = len(message.indexes)
    if not message.HasField("rows"):
        if indexes:
            return f"it has {indexes} indexes and no field rows: PIP-195's own segment, as Pulsar seals it"
        return "it has neither indexes nor the field rows; this release knows no such segment"
    if indexes and message.rows != indexes:
        return f"it has {indexes} indexes, and its field rows says {message.rows}"
    if message.rows != rows:
        return f"it holds {message.rows} rows, the offset table says {rows}"
    if indexes:
        return ""
    present = {field.name for field, _ in message.ListFields()}
    lacking = [name for name in _COLUMNS if name not in present]
    return f"it has no indexes, and as a columnar one it lacks {', '.join(lacking)}" if lacking else ""


def _from_indexes(message: bucket_pb2.SnapshotSegment) -> Rows:
    indexes = message.indexes
    count = len(indexes)
    key_hash = None
    if any(index.HasField("key_hash") for index in indexes):
        key_hash = np.fromiter((index.key_hash for index in indexes), np.uint32, count)
    return Rows(
        np.fromiter((index.timestamp for index in indexes), np.uint64, count),
        np.fromiter((index.ledger_id for index in indexes), np.uint64, count),
        np.fromiter((index.entry_id for index in indexes), np.uint64, count),
        key_hash,
    )
