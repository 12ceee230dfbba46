"""Encodes and decodes a section of a log slot: the decisions of one group commit in one shard, in columns.

It also merges records, where their order allows it. `record_columns` defines the records and their messages,
`deletion_format` those on deletions; both are named here, too.

    magic "TyJS" | u16 version | u8 kind | u8 0 | u32 shard | u64 epoch | u64 slot | u32 records | u64 payload length
    | u32 CRC32C of all before it and of the payload | payload: protobuf Slot                      little-endian
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from storage_backends.formats import (
    column_format,
    deletion_format,
    format_errors,
    framing,
    position_bitmap,
    record_columns,
    requirements,
)
from storage_backends.formats.deletion_format import DeletionRecord
from storage_backends.formats.generated import journal_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.record_columns import (
    COLUMNS,
    AcknowledgeRecord,
    AddRecord,
    DeadLetterReason,
    DeadLetterRecord,
    GoneReason,
    GoneRecord,
    NackRecord,
    PurgeRecord,
    Record,
    ReplayRecord,
    RescheduleRecord,
    WaiveRecord,
)
from storage_backends.formats.row_columns import Rows

__all__ = [
    "AcknowledgeRecord",
    "AddRecord",
    "AnyRecord",
    "DeadLetterReason",
    "DeadLetterRecord",
    "DeletionRecord",
    "GoneReason",
    "GoneRecord",
    "NackRecord",
    "PurgeRecord",
    "Record",
    "ReplayRecord",
    "RescheduleRecord",
    "SlotBuilder",
    "SlotHeader",
    "StoredRecord",
    "StoredSlot",
    "WaiveRecord",
    "decode_header",
    "decode_slot",
    "encode_slot",
    "fill_record",
    "length_of",
    "merge_key",
    "merged",
    "read_slot",
    "size_max",
]

MAGIC = b"TyJS"
_HEADER = struct.Struct("<4sHBBIQQIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_WHAT = "journal slot"
# The kind of every slot
_DATA = 1
# Upper bound (bytes) of a record without columns and bitmaps: tags, lengths, incarnation, subscription, index, reason
_RECORD_BYTES_MAX = 160
# Upper bound (bytes) of the tags and lengths of schedule ids
_ID_FIELDS_BYTES_MAX = 32
# Upper bound (bytes) of a bitmap without its containers: tags, lengths, ledger, page, its head
_BITMAP_BYTES_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a section. `records` is how many it holds."""

    shard: int
    epoch: int
    slot: ShardSlot
    records: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredRecord:
    """A record that was read, whose columns are not decoded yet: they may never be needed.

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
        """The number of rows that the record names."""
        return self.message.rows

    @property
    def holds_ids(self) -> bool:
        """True if a row has a schedule id."""
        return record_columns.message_holds_ids(self.message)

    def decoded(self) -> Record:
        """Decode the record's columns. Raises FormatError."""
        return record_columns.record_of(self.message, self.what, self.offset)


AnyRecord: TypeAlias = Record | StoredRecord


class StoredSlot(NamedTuple):
    """The content of a section, in the order in which it is applied.

    It has decisions on topics, not decoded yet, and decisions on the shard's deletions; the two are independent of each
    other.
    """

    header: SlotHeader
    records: tuple[StoredRecord, ...]
    deletions: tuple[DeletionRecord, ...]


def encode_slot(
    header: SlotHeader, records: Sequence[Record], deletion_records: Sequence[DeletionRecord] = ()
) -> bytes:
    """Encode a section. The records are written as they are; `SlotBuilder` merges them before."""
    count = len(records) + len(deletion_records)
    if header.records != count:
        raise ValueError(f"the header says {header.records} records, there are {count}")
    message = journal_pb2.Slot()
    for record in records:
        fill_record(message.records.add(), record)
    for decided in deletion_records:
        deletion_format.fill_record(message.deletions.add(), decided)
    payload = message.SerializeToString(deterministic=True)
    head = _HEADER.pack(
        MAGIC,
        requirements.version_of(holds_ids=any(record.holds_ids for record in records)),
        _DATA,
        0,
        header.shard,
        header.epoch,
        header.slot,
        header.records,
        len(payload),
    )
    return b"".join((head, _CRC.pack(framing.crc32c(head, payload)), payload))


def decode_slot(data: bytes) -> tuple[SlotHeader, tuple[Record, ...]]:
    """Decode header and records on topics, in the order in which they are applied.

    Raises FormatError on damage, UnsupportedVersion on an unknown version.
    """
    slot = read_slot(data)
    return slot.header, tuple(record.decoded() for record in slot.records)


def read_slot(data: bytes) -> StoredSlot:
    """Read header and records of a section, without decoding the records.

    Raises what `decode_slot` raises, which also finds damage inside columns that have the right checksum.
    """
    header, payload = _checked(data)
    message = framing.parse(journal_pb2.Slot, payload, _WHAT, HEADER_BYTES)
    count = len(message.records) + len(message.deletions)
    if count != header.records:
        detail = f"the header says {header.records} records, the payload has {count}"
        raise format_errors.FormatError(_WHAT, HEADER_BYTES, detail)
    on_topics = (
        StoredRecord(record, f"{_WHAT} record {number}", HEADER_BYTES) for number, record in enumerate(message.records)
    )
    on_deletions = (
        deletion_format.record_of(record, f"{_WHAT} deletion record {number}", HEADER_BYTES)
        for number, record in enumerate(message.deletions)
    )
    return StoredSlot(header, tuple(on_topics), tuple(on_deletions))


def decode_header(data: bytes) -> SlotHeader:
    """Decode the header alone of a whole section, which is checked in full."""
    return _checked(data)[0]


def length_of(data: bytes) -> int:
    """Return the length (bytes) that a section at the beginning of the bytes says that it has; 0 without a header."""
    if len(data) < HEADER_BYTES:
        return 0
    return HEADER_BYTES + int(_HEADER.unpack_from(data)[-1])


def _checked(data: bytes) -> tuple[SlotHeader, bytes]:
    if len(data) < HEADER_BYTES:
        raise format_errors.FormatError(_WHAT, len(data), f"it ends after {len(data)} bytes, inside the header")
    magic, version, kind, _, shard, epoch, slot, records, payload_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise format_errors.FormatError(_WHAT, 0, f"magic is {magic!r}, not {MAGIC!r}")
    if HEADER_BYTES + payload_bytes != len(data):
        detail = f"the payload length {payload_bytes} makes {HEADER_BYTES + payload_bytes} bytes, there are {len(data)}"
        raise format_errors.FormatError(_WHAT, 32, detail)
    payload = data[HEADER_BYTES:]
    (stored,) = _CRC.unpack_from(data, _HEADER.size)
    computed = framing.crc32c(data[: _HEADER.size], payload)
    if computed != stored:
        raise format_errors.FormatError(_WHAT, _HEADER.size, f"CRC32C is {computed:#010x}, stored is {stored:#010x}")
    requirements.check_version(version, _WHAT, 4)
    if kind != _DATA:
        raise format_errors.FormatError(_WHAT, 6, f"slot kind {kind} is not known")
    return SlotHeader(shard, epoch, slot, records), payload


def fill_record(message: journal_pb2.Record, record: AnyRecord) -> None:
    """Set the message of a record, also of one that was read and never decoded."""
    if isinstance(record, StoredRecord):
        message.CopyFrom(record.message)
    else:
        record_columns.fill(message, record)


@dataclasses.dataclass(slots=True)
class _Group:
    """Records that become one: they are of one kind and differ in rows, columns and positions only."""

    detail: tuple[object, ...]
    records: list[Record]

    def merged(self) -> Record:
        return merged(self.records)


def merge_key(record: Record) -> tuple[object, ...]:
    """Return the values that records of one topic share if they can be merged into one."""
    return type(record), record.incarnation, record.subscription_id, *_detail(record)


def merged(records: Sequence[Record]) -> Record:
    """Merge at least one record of one topic and one `merge_key` into one."""
    first = records[0]
    if len(records) == 1:
        return first
    # Records of one kind have the same columns.
    alike: Sequence[Any] = records
    if isinstance(first, GoneRecord | WaiveRecord):
        return dataclasses.replace(first, positions=position_bitmap.union_of(record.positions for record in alike))
    names = COLUMNS.get(type(first), ())
    joined: dict[str, Any] = {name: np.concatenate([getattr(record, name) for record in alike]) for name in names}
    if not isinstance(first, PurgeRecord):
        joined["rows"] = Rows.concat([record.rows for record in alike])
    made: Record = dataclasses.replace(first, **joined)
    return made


class SlotBuilder:
    """A collector of the records of one section, which merges those whose relative order does not matter.

    The caller guarantees that the decisions of one slot on rows name different positions, and those on dead letters
    different ones: they commute, and those that differ in nothing else become one record. A `WaiveRecord`, and a
    `GoneRecord` of any reason but CANCELLED, may name positions of any other: no record of another kind and of their
    topic is moved across them. Nor is a `DeadLetterRecord` moved across another one of its subscription: their ids
    ascend.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._deletions: list[DeletionRecord] = []
        # Topic id -> the groups since the last barrier, and -> what was appended last
        self._open: dict[str, dict[tuple[object, ...], _Group]] = {}
        self._last: dict[str, type[Record] | None] = {}
        self._rows = 0
        self._size_bytes = HEADER_BYTES

    def __len__(self) -> int:
        """Return the number of records that the section will hold."""
        return len(self._groups) + len(self._deletions)

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def size_bytes(self) -> int:
        """An upper bound of the size of the encoded section (bytes)."""
        return self._size_bytes

    def append(self, record: Record, size_bytes: int | None = None) -> None:
        """Take a record. `size_bytes` is its `size_max`, if the caller knows it."""
        barrier = _barrier(record)
        if record.topic_id not in self._open or self._last[record.topic_id] is not barrier:
            self._last[record.topic_id] = barrier
            self._open[record.topic_id] = {}
        groups, detail = self._open[record.topic_id], _detail(record)
        key: tuple[object, ...] = (type(record), record.incarnation, record.subscription_id)
        if not isinstance(record, DeadLetterRecord):
            key = (*key, *detail)
        group = groups.get(key)
        if group is None or group.detail != detail:
            group = groups[key] = _Group(detail, [])
            self._groups.append(group)
        group.records.append(record)
        self._rows += record.row_count
        self._size_bytes += size_max(record) if size_bytes is None else size_bytes

    def append_deletions(self, record: DeletionRecord) -> None:
        self._deletions.append(record)
        self._size_bytes += deletion_format.size_max(record)

    def freeze(self) -> tuple[Record, ...]:
        """Return the merged records on topics, in the order in which to apply them."""
        return tuple(group.merged() for group in self._groups)

    @property
    def deletions(self) -> tuple[DeletionRecord, ...]:
        """The records on deletions, in the order in which they were appended."""
        return tuple(self._deletions)


def _detail(record: Record) -> tuple[object, ...]:
    """Return the values that keep records of one kind, topic, incarnation and subscription apart."""
    match record:
        case AddRecord():
            return (record.delay_level,)
        case GoneRecord():
            return (record.reason,)
        case AcknowledgeRecord() | ReplayRecord():
            return (record.index_id,)
        case NackRecord():
            return record.index_id, record.added
        case DeadLetterRecord():
            return record.index_id, record.reason, record.text
        case RescheduleRecord() | WaiveRecord() | PurgeRecord():
            return ()


def _barrier(record: Record) -> type[Record] | None:
    """Return the kind of a record that no other is moved across, or None if it commutes with the others of its slot."""
    if isinstance(record, GoneRecord) and record.reason is GoneReason.CANCELLED:
        return None
    return type(record) if isinstance(record, GoneRecord | WaiveRecord) else None


def size_max(record: Record) -> int:
    """Return an upper bound of a record's size (bytes) in a section, alone or as its share of a merged one."""
    size_bytes = _RECORD_BYTES_MAX + len(record.topic_id)
    if isinstance(record, GoneRecord | WaiveRecord):
        # An array of n entries may count for n runs in a union: twice its bytes.
        return size_bytes + sum(_BITMAP_BYTES_MAX + 2 * len(bitmap.entries) for bitmap in record.positions)
    columns_of = len(COLUMNS.get(type(record), ()))
    if not isinstance(record, PurgeRecord):
        columns_of += 3 if record.rows.key_hash is None else 4
        if record.rows.schedule_ids is not None:
            size_bytes += _ID_FIELDS_BYTES_MAX + column_format.ids_size_max(record.rows.schedule_ids)
    if isinstance(record, DeadLetterRecord):
        size_bytes += len(record.text.encode())
    return size_bytes + columns_of * column_format.size_max(record.row_count)
