"""A journal slot: the decisions of one group commit, in columns.

Owns: the records, the bytes of a slot, and which records may be merged into one.
Does not own: when a slot is written and what a record does when it is applied.

    magic "TyJS" | u16 version | u8 kind | u8 0 | u32 shard | u64 epoch | u64 slot | u32 records | u64 payload length
    | u32 CRC32C of all before it and of the payload | payload: protobuf Slot                      little-endian
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import zstandard

from storage_backends.formats import columns, errors, framing, mirror, position_bitmap
from storage_backends.formats.generated import bucket_pb2, journal_pb2
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.rows import Rows

FORMAT_VERSION = 1
MAGIC = b"TyJS"
_HEADER = struct.Struct("<4sHBBIQQIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_WHAT = "journal slot"
# Tags, lengths, topic id, incarnation, reason: an upper bound for a record without its columns or bitmaps.
_RECORD_BYTES_MAX = 160
# Tags, lengths, ledger, page, the head of the bitmap: an upper bound for a bitmap without its containers.
_BITMAP_BYTES_MAX = 64


class SlotKind(enum.IntEnum):
    DATA = 1
    # Written by a new owner: whoever finds it in the way of a slot of its own has lost the shard.
    FENCE = 2


class GoneReason(enum.IntEnum):
    UNSPECIFIED = 0
    # The last subscription was deleted: what was due leaves.
    NO_SUBSCRIPTION = 1
    # Trimmed, or cleared.
    TRIMMED = 2
    # It came due when every subscription had been created at or after its time.
    NOT_OWED = 3
    # Cancelled before it was due.
    CANCELLED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class SlotHeader:
    """`records`: how many the slot holds."""

    shard: int
    epoch: int
    slot: int
    kind: SlotKind
    records: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddRecord:
    """Rows that were accepted into the index of `subscription_id`, 0 = the topic's shared index."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows

    @property
    def row_count(self) -> int:
        """How many rows the record names."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RescheduleRecord:
    """Rows that take the place of those of their positions in the index of `subscription_id`, 0 = the topic's shared
    index. None of them was due.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows

    @property
    def row_count(self) -> int:
        """How many rows the record names."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AcknowledgeRecord:
    """Rows that a subscription acknowledged; they carry no key hash. `own_index`: they are in the subscription's own
    index, not in the shared one.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows
    own_index: bool = False

    @property
    def row_count(self) -> int:
        """How many rows the record names."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GoneRecord:
    """Positions that left the index of `subscription_id`, due or not, 0 = the topic's shared index."""

    topic_id: str
    incarnation: int
    subscription_id: int
    reason: GoneReason
    positions: tuple[PositionBitmap, ...]

    def __post_init__(self) -> None:
        _check_order(self.positions)

    @property
    def row_count(self) -> int:
        """How many positions the record names. As much work as its bitmaps are large."""
        return position_bitmap.count_of(self.positions)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WaiveRecord:
    """Positions that a subscription is owed no longer, due or not: they were trimmed for it.

    What nobody else is owed is named by a `GoneRecord` in the same slot.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    positions: tuple[PositionBitmap, ...]

    def __post_init__(self) -> None:
        _check_order(self.positions)

    @property
    def row_count(self) -> int:
        """How many positions the record names. As much work as its bitmaps are large."""
        return position_bitmap.count_of(self.positions)


Record: TypeAlias = AddRecord | RescheduleRecord | AcknowledgeRecord | GoneRecord | WaiveRecord


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredRecord:
    """A record that was read, whose columns are not decoded yet: they may never be asked for.

    `what` and `offset` (of the payload that holds it) are for the FormatError.
    """

    message: journal_pb2.Record
    what: str
    offset: int

    @property
    def topic_id(self) -> str:
        return self.message.topic_id

    @property
    def row_count(self) -> int:
        """How many rows the record names."""
        return self.message.rows

    def decoded(self) -> Record:
        """Raises FormatError."""
        return _record_of(self.message, self.what, self.offset)


AnyRecord: TypeAlias = Record | StoredRecord


def _check_order(positions: Sequence[PositionBitmap]) -> None:
    if not position_bitmap.in_order(positions):
        raise ValueError("the bitmaps of positions do not ascend by ledger and page")


def encode_slot(header: SlotHeader, records: Sequence[Record]) -> bytes:
    """The bytes of a slot. The records are written as they are; `SlotBuilder` merges them before."""
    if header.records != len(records):
        raise ValueError(f"the header says {header.records} records, there are {len(records)}")
    message = journal_pb2.Slot()
    for record in records:
        fill_record(message.records.add(), record)
    payload = message.SerializeToString(deterministic=True)
    head = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        header.kind,
        0,
        header.shard,
        header.epoch,
        header.slot,
        header.records,
        len(payload),
    )
    return b"".join((head, _CRC.pack(framing.crc32c(head, payload)), payload))


def decode_slot(data: bytes) -> tuple[SlotHeader, tuple[Record, ...]]:
    """Header and records, in the order in which they are applied.

    Raises FormatError on damage, UnsupportedVersion on a version that is not known here.
    """
    header, records = read_slot(data)
    return header, tuple(record.decoded() for record in records)


def read_slot(data: bytes) -> tuple[SlotHeader, tuple[StoredRecord, ...]]:
    """As `decode_slot`, which finds the same damage but what is inside columns that have the right checksum."""
    header, payload = _checked(data)
    message = framing.parse(journal_pb2.Slot, payload, _WHAT, HEADER_BYTES)
    if len(message.records) != header.records:
        detail = f"the header says {header.records} records, the payload has {len(message.records)}"
        raise errors.FormatError(_WHAT, HEADER_BYTES, detail)
    return header, tuple(
        StoredRecord(record, f"{_WHAT} record {number}", HEADER_BYTES) for number, record in enumerate(message.records)
    )


def decode_header(data: bytes) -> SlotHeader:
    """The header alone of a whole slot, which is checked in full."""
    return _checked(data)[0]


def _checked(data: bytes) -> tuple[SlotHeader, bytes]:
    if len(data) < HEADER_BYTES:
        raise errors.FormatError(_WHAT, len(data), f"it ends after {len(data)} bytes, inside the header")
    magic, version, kind, _, shard, epoch, slot, records, payload_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise errors.FormatError(_WHAT, 0, f"magic is {magic!r}, not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise errors.UnsupportedVersion(_WHAT, 4, found=version, supported=FORMAT_VERSION)
    if HEADER_BYTES + payload_bytes != len(data):
        detail = f"the payload length {payload_bytes} makes {HEADER_BYTES + payload_bytes} bytes, there are {len(data)}"
        raise errors.FormatError(_WHAT, 32, detail)
    payload = data[HEADER_BYTES:]
    (stored,) = _CRC.unpack_from(data, _HEADER.size)
    computed = framing.crc32c(data[: _HEADER.size], payload)
    if computed != stored:
        raise errors.FormatError(_WHAT, _HEADER.size, f"CRC32C is {computed:#010x}, stored is {stored:#010x}")
    if kind not in (SlotKind.DATA, SlotKind.FENCE):
        raise errors.FormatError(_WHAT, 6, f"slot kind {kind} is not known")
    return SlotHeader(shard, epoch, slot, SlotKind(kind), records), payload


def fill_record(message: journal_pb2.Record, record: AnyRecord) -> None:
    """Sets the message of a record, the form that it has in a slot and where a checkpoint carries it."""
    if isinstance(record, StoredRecord):
        message.CopyFrom(record.message)
        return
    message.topic_id = record.topic_id
    message.incarnation = record.incarnation
    message.rows = record.row_count
    match record:
        case AddRecord():
            fill_add(message.add, record.rows)
            if record.subscription_id:
                message.add.subscription_id = record.subscription_id
        case RescheduleRecord():
            fill_add(message.reschedule, record.rows)
            if record.subscription_id:
                message.reschedule.subscription_id = record.subscription_id
        case AcknowledgeRecord():
            message.acknowledge.subscription_id = record.subscription_id
            message.acknowledge.deliver_at_ms = columns.encode_u64(record.rows.deliver_at_ms)
            message.acknowledge.ledger_id = columns.encode_u64(record.rows.ledger_id)
            message.acknowledge.entry_id = columns.encode_u64(record.rows.entry_id)
            if record.own_index:
                message.acknowledge.own_index = True
        case GoneRecord():
            if record.subscription_id:
                message.gone.subscription_id = record.subscription_id
            message.gone.reason = _REASONS[record.reason]
            mirror.extend(message.gone.positions, record.positions)
        case WaiveRecord():
            message.waive.subscription_id = record.subscription_id
            mirror.extend(message.waive.positions, record.positions)


def _record_of(message: journal_pb2.Record, what: str, offset: int) -> Record:
    match message.WhichOneof("decision"):
        case "add":
            rows = rows_of_add(message.add, message.rows, what, offset)
            return AddRecord(message.topic_id, message.incarnation, message.add.subscription_id, rows)
        case "reschedule":
            rows = rows_of_add(message.reschedule, message.rows, what, offset)
            return RescheduleRecord(message.topic_id, message.incarnation, message.reschedule.subscription_id, rows)
        case "acknowledge":
            columns_of = message.acknowledge
            rows = Rows(
                columns.decode_u64(columns_of.deliver_at_ms, message.rows, what=f"{what} deliver_at_ms", offset=offset),
                columns.decode_u64(columns_of.ledger_id, message.rows, what=f"{what} ledger_id", offset=offset),
                columns.decode_u64(columns_of.entry_id, message.rows, what=f"{what} entry_id", offset=offset),
            )
            return AcknowledgeRecord(
                message.topic_id, message.incarnation, columns_of.subscription_id, rows, columns_of.own_index
            )
        case "gone":
            reason = GoneReason(message.gone.reason)
            positions = _positions(message.gone.positions, message.rows, what, offset)
            return GoneRecord(message.topic_id, message.incarnation, message.gone.subscription_id, reason, positions)
        case "waive":
            positions = _positions(message.waive.positions, message.rows, what, offset)
            return WaiveRecord(message.topic_id, message.incarnation, message.waive.subscription_id, positions)
        case _:
            raise errors.FormatError(what, offset, "its decision is of no kind that is known here")


def _positions(
    stored: Iterable[bucket_pb2.PositionBitmap], rows: int, what: str, offset: int
) -> tuple[PositionBitmap, ...]:
    positions = tuple(mirror.made_from(PositionBitmap, bitmap) for bitmap in stored)
    if not position_bitmap.in_order(positions):
        raise errors.FormatError(what, offset, "its bitmaps do not ascend by ledger and page")
    try:
        counts = [len(bitmap.bitmap()) for bitmap in positions]
    except errors.FormatError as error:
        raise errors.FormatError(f"{what} {error.what}", offset, error.detail) from error
    if sum(counts) != rows or 0 in counts:
        raise errors.FormatError(what, offset, f"it says {rows} rows, its bitmaps have {counts}")
    return positions


_REASONS = {
    GoneReason.UNSPECIFIED: journal_pb2.Gone.UNSPECIFIED,
    GoneReason.NO_SUBSCRIPTION: journal_pb2.Gone.NO_SUBSCRIPTION,
    GoneReason.TRIMMED: journal_pb2.Gone.TRIMMED,
    GoneReason.NOT_OWED: journal_pb2.Gone.NOT_OWED,
    GoneReason.CANCELLED: journal_pb2.Gone.CANCELLED,
}


def fill_add(
    message: journal_pb2.Add | journal_pb2.Reschedule, rows: Rows, zstd: zstandard.ZstdCompressor | None = None
) -> None:
    """Sets the columns of an `Add` or `Reschedule` message, the form of rows in slots (plain) and checkpoints (dense,
    with `zstd`).
    """
    message.deliver_at_ms = columns.encode_u64(rows.deliver_at_ms, zstd)
    message.ledger_id = columns.encode_u64(rows.ledger_id, zstd)
    message.entry_id = columns.encode_u64(rows.entry_id, zstd)
    if rows.key_hash is not None:
        message.key_hash = columns.encode_u32(rows.key_hash, zstd)


def rows_of_add(message: journal_pb2.Add | journal_pb2.Reschedule, rows: int, what: str, offset: int) -> Rows:
    """The rows of an `Add` or `Reschedule` message. `what` and `offset` (of the payload that holds it) are for the
    FormatError.
    """
    return Rows(
        columns.decode_u64(message.deliver_at_ms, rows, what=f"{what} deliver_at_ms", offset=offset),
        columns.decode_u64(message.ledger_id, rows, what=f"{what} ledger_id", offset=offset),
        columns.decode_u64(message.entry_id, rows, what=f"{what} entry_id", offset=offset),
        columns.decode_u32(message.key_hash, rows, what=f"{what} key_hash", offset=offset)
        if message.HasField("key_hash")
        else None,
    )


@dataclasses.dataclass(slots=True)
class _Group:
    """Records that become one: they agree in kind, topic, incarnation, subscription, index and reason."""

    records: list[Record]

    def merged(self) -> Record:
        first = self.records[0]
        if len(self.records) == 1:
            return first
        if isinstance(first, GoneRecord | WaiveRecord):
            sets = [record.positions for record in self.records if isinstance(record, GoneRecord | WaiveRecord)]
            return dataclasses.replace(first, positions=position_bitmap.union_of(sets))
        parts = [record.rows for record in self.records if not isinstance(record, GoneRecord | WaiveRecord)]
        return dataclasses.replace(first, rows=Rows.concat(parts))


class SlotBuilder:
    """Collects the records of one slot and merges those whose order among each other does not matter.

    The caller guarantees that the adds, cancellations, reschedules and acknowledgements of one slot name different
    positions: they commute, and those of one kind, topic, incarnation and subscription become one record. A
    `WaiveRecord` and a `GoneRecord` of another reason may name positions of any other: no record of another kind and of
    their topic is moved across them.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        # By topic, the groups since the last one that nothing is moved across, and what was appended last.
        self._open: dict[str, dict[tuple[object, ...], _Group]] = {}
        self._last: dict[str, type[Record] | None] = {}
        self._rows = 0
        self._size_bytes = HEADER_BYTES

    def __len__(self) -> int:
        """How many records the slot will hold."""
        return len(self._groups)

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def size_bytes(self) -> int:
        """An upper bound of the size of the encoded slot."""
        return self._size_bytes

    def append(self, record: Record) -> None:
        barrier = _barrier(record)
        if record.topic_id not in self._open or self._last[record.topic_id] is not barrier:
            self._last[record.topic_id] = barrier
            self._open[record.topic_id] = {}
        reason = record.reason if isinstance(record, GoneRecord) else None
        own_index = isinstance(record, AcknowledgeRecord) and record.own_index
        key = (type(record), record.incarnation, record.subscription_id, reason, own_index)
        group = self._open[record.topic_id].get(key)
        if group is None:
            group = self._open[record.topic_id][key] = _Group([])
            self._groups.append(group)
        group.records.append(record)
        self._rows += record.row_count
        self._size_bytes += size_max(record)

    def freeze(self) -> tuple[Record, ...]:
        """The merged records, in the order in which they are to be applied."""
        return tuple(group.merged() for group in self._groups)


def _barrier(record: Record) -> type[Record] | None:
    """The kind of a record that nothing is moved across, None when it commutes with the others of its slot."""
    if isinstance(record, GoneRecord) and record.reason is GoneReason.CANCELLED:
        return None
    return type(record) if isinstance(record, GoneRecord | WaiveRecord) else None


def size_max(record: Record) -> int:
    """The most bytes that a record takes in a slot, by itself or as its share of a merged one."""
    size_bytes = _RECORD_BYTES_MAX + len(record.topic_id)
    if isinstance(record, GoneRecord | WaiveRecord):
        # An array of n entries may count for n runs in a union: twice its bytes.
        return size_bytes + sum(_BITMAP_BYTES_MAX + 2 * len(bitmap.entries) for bitmap in record.positions)
    size_bytes += 3 * columns.size_max(record.row_count)
    if record.rows.key_hash is not None:
        size_bytes += columns.size_max(record.row_count)
    return size_bytes
