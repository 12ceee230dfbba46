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
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import zstandard

from storage_backends.formats import columns, errors, framing
from storage_backends.formats.generated import journal_pb2
from storage_backends.formats.rows import U64, Rows

FORMAT_VERSION = 1
MAGIC = b"TyJS"
_HEADER = struct.Struct("<4sHBBIQQIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size
_WHAT = "journal slot"
# Tags, lengths, topic id, incarnation, reason: an upper bound for a record without its columns.
_RECORD_BYTES_MAX = 160


class SlotKind(enum.IntEnum):
    DATA = 1
    # Written by a new owner: whoever finds it in the way of a slot of its own has lost the shard.
    FENCE = 2


class GoneReason(enum.IntEnum):
    UNSPECIFIED = 0
    # The last subscription was deleted: what was due leaves.
    NO_SUBSCRIPTION = 1


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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AcknowledgeRecord:
    """Rows that a subscription acknowledged; they carry no key hash."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GoneRecord:
    """Positions (u64[n] each) that left the index of `subscription_id`."""

    topic_id: str
    incarnation: int
    subscription_id: int
    reason: GoneReason
    ledger_id: U64
    entry_id: U64

    def __post_init__(self) -> None:
        if self.ledger_id.shape != self.entry_id.shape:
            raise ValueError(f"ledger_id {self.ledger_id.shape} and entry_id {self.entry_id.shape} differ in shape")


Record: TypeAlias = AddRecord | AcknowledgeRecord | GoneRecord


def encode_slot(header: SlotHeader, records: Sequence[Record]) -> bytes:
    """The bytes of a slot. The records are written as they are; `SlotBuilder` merges them before."""
    if header.records != len(records):
        raise ValueError(f"the header says {header.records} records, there are {len(records)}")
    message = journal_pb2.Slot()
    for record in records:
        _fill(message.records.add(), record)
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
    header, payload = _checked(data)
    message = framing.parse(journal_pb2.Slot, payload, _WHAT, HEADER_BYTES)
    if len(message.records) != header.records:
        detail = f"the header says {header.records} records, the payload has {len(message.records)}"
        raise errors.FormatError(_WHAT, HEADER_BYTES, detail)
    return header, tuple(_record(record, number) for number, record in enumerate(message.records))


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


def _fill(message: journal_pb2.Record, record: Record) -> None:
    message.topic_id = record.topic_id
    message.incarnation = record.incarnation
    match record:
        case AddRecord():
            message.rows = len(record.rows)
            fill_add(message.add, record.rows)
            if record.subscription_id:
                message.add.subscription_id = record.subscription_id
        case AcknowledgeRecord():
            message.rows = len(record.rows)
            message.acknowledge.subscription_id = record.subscription_id
            message.acknowledge.deliver_at_ms = columns.encode_u64(record.rows.deliver_at_ms)
            message.acknowledge.ledger_id = columns.encode_u64(record.rows.ledger_id)
            message.acknowledge.entry_id = columns.encode_u64(record.rows.entry_id)
        case GoneRecord():
            message.rows = len(record.ledger_id)
            if record.subscription_id:
                message.gone.subscription_id = record.subscription_id
            message.gone.reason = _REASONS[record.reason]
            message.gone.ledger_id = columns.encode_u64(record.ledger_id)
            message.gone.entry_id = columns.encode_u64(record.entry_id)


def _record(message: journal_pb2.Record, number: int) -> Record:
    what = f"{_WHAT} record {number}"
    match message.WhichOneof("decision"):
        case "add":
            rows = rows_of_add(message.add, message.rows, what, HEADER_BYTES)
            return AddRecord(message.topic_id, message.incarnation, message.add.subscription_id, rows)
        case "acknowledge":
            columns_of = message.acknowledge
            rows = Rows(
                columns.decode_u64(
                    columns_of.deliver_at_ms, message.rows, what=f"{what} deliver_at_ms", offset=HEADER_BYTES
                ),
                columns.decode_u64(columns_of.ledger_id, message.rows, what=f"{what} ledger_id", offset=HEADER_BYTES),
                columns.decode_u64(columns_of.entry_id, message.rows, what=f"{what} entry_id", offset=HEADER_BYTES),
            )
            return AcknowledgeRecord(message.topic_id, message.incarnation, columns_of.subscription_id, rows)
        case "gone":
            return GoneRecord(
                message.topic_id,
                message.incarnation,
                message.gone.subscription_id,
                GoneReason(message.gone.reason),
                columns.decode_u64(message.gone.ledger_id, message.rows, what=f"{what} ledger_id", offset=HEADER_BYTES),
                columns.decode_u64(message.gone.entry_id, message.rows, what=f"{what} entry_id", offset=HEADER_BYTES),
            )
        case _:
            raise errors.FormatError(what, HEADER_BYTES, "its decision is of no kind that is known here")


_REASONS = {
    GoneReason.UNSPECIFIED: journal_pb2.Gone.UNSPECIFIED,
    GoneReason.NO_SUBSCRIPTION: journal_pb2.Gone.NO_SUBSCRIPTION,
}


def fill_add(message: journal_pb2.Add, rows: Rows, zstd: zstandard.ZstdCompressor | None = None) -> None:
    """Sets the columns of an `Add` message, the form of rows in slots (plain) and checkpoints (dense, with `zstd`)."""
    message.deliver_at_ms = columns.encode_u64(rows.deliver_at_ms, zstd)
    message.ledger_id = columns.encode_u64(rows.ledger_id, zstd)
    message.entry_id = columns.encode_u64(rows.entry_id, zstd)
    if rows.key_hash is not None:
        message.key_hash = columns.encode_u32(rows.key_hash, zstd)


def rows_of_add(message: journal_pb2.Add, rows: int, what: str, offset: int) -> Rows:
    """The rows of an `Add` message. `what` and `offset` (of the payload that holds it) are for the FormatError."""
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
    """Records that become one: they agree in kind, topic, incarnation, subscription and reason."""

    records: list[Record]

    def merged(self) -> Record:
        first = self.records[0]
        if len(self.records) == 1:
            return first
        if isinstance(first, GoneRecord):
            gone = [record for record in self.records if isinstance(record, GoneRecord)]
            return dataclasses.replace(
                first,
                ledger_id=np.concatenate([record.ledger_id for record in gone]),
                entry_id=np.concatenate([record.entry_id for record in gone]),
            )
        parts = [record.rows for record in self.records if not isinstance(record, GoneRecord)]
        return dataclasses.replace(first, rows=Rows.concat(parts))


class SlotBuilder:
    """Collects the records of one slot and merges those whose order among each other does not matter.

    The caller guarantees that the adds and acknowledgements of one slot name different positions: they commute, and
    those of one kind, topic, incarnation and subscription become one record. A `GoneRecord` may name positions of
    either: no record of its topic is moved across it.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        # By topic, the groups since its last change between GoneRecord and the other kinds.
        self._open: dict[str, dict[tuple[object, ...], _Group]] = {}
        self._gone_last: dict[str, bool] = {}
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
        is_gone = isinstance(record, GoneRecord)
        if self._gone_last.get(record.topic_id) is not is_gone:
            self._gone_last[record.topic_id] = is_gone
            self._open[record.topic_id] = {}
        reason = record.reason if isinstance(record, GoneRecord) else None
        key = (type(record), record.incarnation, record.subscription_id, reason)
        group = self._open[record.topic_id].get(key)
        if group is None:
            group = self._open[record.topic_id][key] = _Group([])
            self._groups.append(group)
        group.records.append(record)
        self._rows += _rows_in(record)
        self._size_bytes += size_max(record)

    def freeze(self) -> tuple[Record, ...]:
        """The merged records, in the order in which they are to be applied."""
        return tuple(group.merged() for group in self._groups)


def size_max(record: Record) -> int:
    """The most bytes that a record takes in a slot."""
    u64_columns = 2 if isinstance(record, GoneRecord) else 3
    rows = _rows_in(record)
    size_bytes = _RECORD_BYTES_MAX + len(record.topic_id) + u64_columns * columns.size_max(rows)
    if isinstance(record, AddRecord) and record.rows.key_hash is not None:
        size_bytes += columns.size_max(rows)
    return size_bytes


def _rows_in(record: Record) -> int:
    return len(record.ledger_id) if isinstance(record, GoneRecord) else len(record.rows)
