"""Defines the decisions in a section, as columns, and translates them to and from messages.

`slot_format` puts the messages into a section and adds the checksum. Columns are plain in a record; the rows of a
checkpoint have the same message, dense.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias, assert_never

import numpy as np
import zstandard

from storage_backends.formats import column_format, format_errors, index_ids, mirror, position_bitmap
from storage_backends.formats.generated import bucket_pb2, journal_pb2
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.row_columns import U32, U64, Rows


class GoneReason(enum.IntEnum):
    UNSPECIFIED = 0
    # The last subscription was deleted: due rows leave.
    NO_SUBSCRIPTION = 1
    # Trimmed, or cleared
    TRIMMED = 2
    # It came due when every subscription had been created at or after its time.
    NOT_OWED = 3
    # Cancelled before it was due
    CANCELLED = 4


class DeadLetterReason(enum.IntEnum):
    # Negatively acknowledged, or timed out, too often
    TOO_OFTEN = 1
    # A dispatcher rejected it.
    REJECTED = 2
    # Its message log was trimmed.
    TRIMMED = 3


class _OfRows:
    __slots__ = ()
    rows: Rows

    @property
    def row_count(self) -> int:
        """The number of rows that the record names."""
        return len(self.rows)

    @property
    def holds_ids(self) -> bool:
        """True if a row has a schedule id."""
        return self.rows.has_ids


class _OfPositions:
    __slots__ = ()
    holds_ids = False
    positions: tuple[PositionBitmap, ...]

    def __post_init__(self) -> None:
        if not position_bitmap.in_order(self.positions):
            raise ValueError("the bitmaps of positions do not ascend by ledger and page")

    @property
    def row_count(self) -> int:
        """The number of positions that the record names; it takes time in proportion to the size of the bitmaps."""
        return position_bitmap.count_of(self.positions)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddRecord(_OfRows):
    """Rows that were accepted into the index `subscription_id` (`index_ids`).

    `delay_level` 0 means that they came without a delay level.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows
    delay_level: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RescheduleRecord(_OfRows):
    """Rows that replace those of their positions in the index `subscription_id`. None of them was due."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AcknowledgeRecord(_OfRows):
    """Rows of an index that a subscription acknowledged; neither key hashes nor schedule ids of theirs are stored."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows
    index_id: int = index_ids.SHARED

    def __post_init__(self) -> None:
        _check_index(self)

    @property
    def holds_ids(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GoneRecord(_OfPositions):
    """Positions that left the index `subscription_id`, due or not."""

    topic_id: str
    incarnation: int
    subscription_id: int
    reason: GoneReason
    positions: tuple[PositionBitmap, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WaiveRecord(_OfPositions):
    """Positions that a subscription is no longer owed, due or not, because they were trimmed for it.

    A `GoneRecord` in the same slot names those that no other subscription is owed.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    positions: tuple[PositionBitmap, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackRecord(_OfRows):
    """Rows of an index that a subscription negatively acknowledged.

    `redeliver_at_ms` u64[n] says when they are redelivered, `redelivery_count` u32[n] how often that happened to each,
    this time included. With `added` the rows are new in the index, and due.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    index_id: int
    rows: Rows
    redeliver_at_ms: U64
    redelivery_count: U32
    added: bool = False

    def __post_init__(self) -> None:
        _check_index(self)
        _check_columns(self)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeadLetterRecord(_OfRows):
    """Positions that became dead letters of a subscription and leave its backlog as if it had acknowledged them.

    Trimmed ones leave it by other records. The positions need not have rows in the index. `redelivery_count` u32[n]
    says how often each was negatively acknowledged; `dead_letter_id` u64[n] ascends; `dead_at_ms` is u64[n]. `text` is
    the dispatcher's message.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    index_id: int
    rows: Rows
    redelivery_count: U32
    dead_letter_id: U64
    dead_at_ms: U64
    reason: DeadLetterReason
    text: str = ""

    def __post_init__(self) -> None:
        _check_index(self)
        _check_columns(self)

    @property
    def leaves_backlog(self) -> bool:
        """True if the rows leave by this record.

        Trimmed ones leave by the `GoneRecord` and `WaiveRecord` of its slot.
        """
        return self.reason is not DeadLetterReason.TRIMMED


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReplayRecord(_OfRows):
    """Dead letters to deliver again, as `rows` of an index of the subscription, not the shared one.

    `dead_letter_id` u64[n] says which dead letter each was.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    index_id: int
    rows: Rows
    dead_letter_id: U64

    def __post_init__(self) -> None:
        _check_index(self)
        _check_columns(self)
        if self.index_id == index_ids.SHARED:
            raise ValueError("dead letters are not replayed into the shared index")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PurgeRecord:
    """Dead letters, u64[n], that a subscription no longer has."""

    topic_id: str
    incarnation: int
    subscription_id: int
    dead_letter_id: U64

    @property
    def row_count(self) -> int:
        """The number of dead letters that the record names."""
        return len(self.dead_letter_id)

    @property
    def holds_ids(self) -> bool:
        return False


Record: TypeAlias = (
    AddRecord
    | RescheduleRecord
    | AcknowledgeRecord
    | GoneRecord
    | WaiveRecord
    | NackRecord
    | DeadLetterRecord
    | ReplayRecord
    | PurgeRecord
)

# Kind of record -> its columns in addition to its rows
COLUMNS: Final[Mapping[type[Any], tuple[str, ...]]] = MappingProxyType(
    {
        NackRecord: ("redeliver_at_ms", "redelivery_count"),
        DeadLetterRecord: ("redelivery_count", "dead_letter_id", "dead_at_ms"),
        ReplayRecord: ("dead_letter_id",),
        PurgeRecord: ("dead_letter_id",),
    }
)


def _check_index(record: AcknowledgeRecord | NackRecord | DeadLetterRecord | ReplayRecord) -> None:
    if not index_ids.serves(record.index_id, record.subscription_id):
        raise ValueError(f"index {record.index_id} does not serve subscription {record.subscription_id}")


def _check_columns(record: NackRecord | DeadLetterRecord | ReplayRecord) -> None:
    for name in COLUMNS[type(record)]:
        column = getattr(record, name)
        dtype = np.uint32 if name == "redelivery_count" else np.uint64
        if column.shape != (len(record.rows),) or column.dtype != dtype:
            raise ValueError(
                f"{name} is {column.dtype}{column.shape}, it must be {np.dtype(dtype)}({len(record.rows)},)"
            )


# Messages that hold rows, with their key hashes
_RowsMessage: TypeAlias = (
    journal_pb2.Add
    | journal_pb2.Reschedule
    | journal_pb2.NegativeAcknowledge
    | journal_pb2.DeadLetter
    | journal_pb2.Replay
)

_KINDS_WITH_IDS = ("add", "reschedule", "negative_acknowledge", "dead_letter", "replay")

_GONE_REASONS = {
    GoneReason.UNSPECIFIED: journal_pb2.Gone.UNSPECIFIED,
    GoneReason.NO_SUBSCRIPTION: journal_pb2.Gone.NO_SUBSCRIPTION,
    GoneReason.TRIMMED: journal_pb2.Gone.TRIMMED,
    GoneReason.NOT_OWED: journal_pb2.Gone.NOT_OWED,
    GoneReason.CANCELLED: journal_pb2.Gone.CANCELLED,
}
_DEAD_LETTER_REASONS = {
    DeadLetterReason.TOO_OFTEN: journal_pb2.DeadLetter.TOO_OFTEN,
    DeadLetterReason.REJECTED: journal_pb2.DeadLetter.REJECTED,
    DeadLetterReason.TRIMMED: journal_pb2.DeadLetter.TRIMMED,
}


# ---- writing


def fill(message: journal_pb2.Record, record: Record) -> None:
    """Set the message of a record."""
    message.topic_id = record.topic_id
    message.incarnation = record.incarnation
    message.rows = record.row_count
    match record:
        case AddRecord():
            fill_rows(message.add, record.rows)
            if record.subscription_id:
                message.add.subscription_id = record.subscription_id
            if record.delay_level:
                message.add.delay_level = record.delay_level
        case RescheduleRecord():
            fill_rows(message.reschedule, record.rows)
            if record.subscription_id:
                message.reschedule.subscription_id = record.subscription_id
        case AcknowledgeRecord():
            _fill_acknowledge(message.acknowledge, record)
        case GoneRecord():
            if record.subscription_id:
                message.gone.subscription_id = record.subscription_id
            message.gone.reason = _GONE_REASONS[record.reason]
            mirror.extend(message.gone.positions, record.positions)
        case WaiveRecord():
            message.waive.subscription_id = record.subscription_id
            mirror.extend(message.waive.positions, record.positions)
        case NackRecord():
            _fill_nack(message.negative_acknowledge, record)
        case DeadLetterRecord():
            _fill_dead_letter(message.dead_letter, record)
        case ReplayRecord():
            message.replay.subscription_id = record.subscription_id
            message.replay.index_id = record.index_id
            fill_rows(message.replay, record.rows)
            message.replay.dead_letter_id = column_format.encode_u64(record.dead_letter_id)
        case PurgeRecord():
            message.purge.subscription_id = record.subscription_id
            message.purge.dead_letter_id = column_format.encode_u64(record.dead_letter_id)
        case _:
            assert_never(record)


def _fill_acknowledge(message: journal_pb2.Acknowledge, record: AcknowledgeRecord) -> None:
    message.subscription_id = record.subscription_id
    message.deliver_at_ms = column_format.encode_u64(record.rows.deliver_at_ms)
    message.ledger_id = column_format.encode_u64(record.rows.ledger_id)
    message.entry_id = column_format.encode_u64(record.rows.entry_id)
    if index_ids.is_of_batch_parts(record.index_id):
        message.of_batch_indexes = True
    elif record.index_id != index_ids.SHARED:
        message.own_index = True


def _fill_nack(message: journal_pb2.NegativeAcknowledge, record: NackRecord) -> None:
    message.subscription_id = record.subscription_id
    if record.index_id != index_ids.SHARED:
        message.index_id = record.index_id
    if record.added:
        message.added = True
    fill_rows(message, record.rows)
    message.redeliver_at_ms = column_format.encode_u64(record.redeliver_at_ms)
    message.redelivery_count = column_format.encode_u32(record.redelivery_count)


def _fill_dead_letter(message: journal_pb2.DeadLetter, record: DeadLetterRecord) -> None:
    message.subscription_id = record.subscription_id
    if record.index_id != index_ids.SHARED:
        message.index_id = record.index_id
    fill_rows(message, record.rows)
    message.redelivery_count = column_format.encode_u32(record.redelivery_count)
    message.dead_letter_id = column_format.encode_u64(record.dead_letter_id)
    message.dead_at_ms = column_format.encode_u64(record.dead_at_ms)
    message.reason = _DEAD_LETTER_REASONS[record.reason]
    if record.text:
        message.text = record.text


def fill_rows(message: _RowsMessage, rows: Rows, zstd: zstandard.ZstdCompressor | None = None) -> None:
    """Set the columns of rows: plain, or dense with `zstd`."""
    message.deliver_at_ms = column_format.encode_u64(rows.deliver_at_ms, zstd)
    message.ledger_id = column_format.encode_u64(rows.ledger_id, zstd)
    message.entry_id = column_format.encode_u64(rows.entry_id, zstd)
    if rows.key_hash is not None:
        message.key_hash = column_format.encode_u32(rows.key_hash, zstd)
    if rows.schedule_ids is not None and rows.has_ids:
        message.schedule_ids.lengths, message.schedule_ids.ids = column_format.encode_ids(rows.schedule_ids, zstd)


# ---- reading


def message_holds_ids(message: journal_pb2.Record) -> bool:
    """Return whether a row of a record that was not decoded has a schedule id."""
    kind = message.WhichOneof("decision")
    return kind in _KINDS_WITH_IDS and getattr(message, kind).HasField("schedule_ids")


def record_of(message: journal_pb2.Record, what: str, offset: int) -> Record:
    """Make the record of a message.

    `what` and `offset` (of the payload that holds it) are for the FormatError.
    """
    with format_errors.reading(what, offset):
        return _record_of(message, what, offset)


def _record_of(message: journal_pb2.Record, what: str, offset: int) -> Record:
    head = message.topic_id, message.incarnation
    rows = message.rows
    match message.WhichOneof("decision"):
        case "add":
            add = message.add
            return AddRecord(*head, add.subscription_id, rows_of(add, rows, what, offset), add.delay_level)
        case "reschedule":
            reschedule = message.reschedule
            return RescheduleRecord(*head, reschedule.subscription_id, rows_of(reschedule, rows, what, offset))
        case "acknowledge":
            return _acknowledge_of(message, what, offset)
        case "gone":
            reason = GoneReason(message.gone.reason)
            positions = _positions(message.gone.positions, rows, what, offset)
            return GoneRecord(*head, message.gone.subscription_id, reason, positions)
        case "waive":
            positions = _positions(message.waive.positions, rows, what, offset)
            return WaiveRecord(*head, message.waive.subscription_id, positions)
        case "negative_acknowledge":
            return _nack_of(message, what, offset)
        case "dead_letter":
            return _dead_letter_of(message, what, offset)
        case "replay":
            replay = message.replay
            columns = _columns(replay, rows, what, offset, replay.dead_letter_id)
            ids = columns.u64("dead_letter_id", replay.dead_letter_id)
            return ReplayRecord(*head, replay.subscription_id, replay.index_id, _rows_in(columns, replay), ids)
        case "purge":
            stored = message.purge.dead_letter_id
            ids = column_format.Columns(rows, (stored,), what=what, offset=offset).u64("dead_letter_id", stored)
            return PurgeRecord(*head, message.purge.subscription_id, ids)
        case _:
            raise format_errors.FormatError(what, offset, "this release does not know the kind of its decision")


def _acknowledge_of(message: journal_pb2.Record, what: str, offset: int) -> AcknowledgeRecord:
    stored = message.acknowledge
    subscription_id = stored.subscription_id
    if stored.own_index and stored.of_batch_indexes:
        raise format_errors.FormatError(what, offset, "its rows are of two indexes")
    index_id = index_ids.SHARED
    if stored.of_batch_indexes:
        index_id = index_ids.batch_parts_of(subscription_id)
    elif stored.own_index:
        index_id = subscription_id
    columns = _columns(stored, message.rows, what, offset)
    rows = Rows(
        columns.u64("deliver_at_ms", stored.deliver_at_ms),
        columns.u64("ledger_id", stored.ledger_id),
        columns.u64("entry_id", stored.entry_id),
    )
    return AcknowledgeRecord(message.topic_id, message.incarnation, subscription_id, rows, index_id)


def _nack_of(message: journal_pb2.Record, what: str, offset: int) -> NackRecord:
    stored = message.negative_acknowledge
    columns = _columns(stored, message.rows, what, offset)
    return NackRecord(
        message.topic_id,
        message.incarnation,
        stored.subscription_id,
        stored.index_id,
        _rows_in(columns, stored),
        columns.u64("redeliver_at_ms", stored.redeliver_at_ms),
        columns.u32("redelivery_count", stored.redelivery_count),
        stored.added,
    )


def _dead_letter_of(message: journal_pb2.Record, what: str, offset: int) -> DeadLetterRecord:
    stored = message.dead_letter
    columns = _columns(stored, message.rows, what, offset, stored.dead_letter_id)
    return DeadLetterRecord(
        message.topic_id,
        message.incarnation,
        stored.subscription_id,
        stored.index_id,
        _rows_in(columns, stored),
        columns.u32("redelivery_count", stored.redelivery_count),
        columns.u64("dead_letter_id", stored.dead_letter_id),
        columns.u64("dead_at_ms", stored.dead_at_ms),
        DeadLetterReason(stored.reason),
        stored.text,
    )


def rows_of(message: _RowsMessage, rows: int, what: str, offset: int) -> Rows:
    """Decode the rows of a message.

    `what` and `offset` (of the payload that holds it) are for the FormatError.
    """
    return _rows_in(_columns(message, rows, what, offset), message)


def _columns(
    message: _RowsMessage | journal_pb2.Acknowledge, rows: int, what: str, offset: int, *ids: bytes
) -> column_format.Columns:
    """Return a reader of the columns of rows, no two of which agree in position and `ids`."""
    return column_format.Columns(rows, (message.ledger_id, message.entry_id, *ids), what=what, offset=offset)


def _rows_in(columns: column_format.Columns, message: _RowsMessage) -> Rows:
    return Rows(
        columns.u64("deliver_at_ms", message.deliver_at_ms),
        columns.u64("ledger_id", message.ledger_id),
        columns.u64("entry_id", message.entry_id),
        columns.u32("key_hash", message.key_hash) if message.HasField("key_hash") else None,
        columns.schedule_ids(message.schedule_ids.lengths, message.schedule_ids.ids)
        if message.HasField("schedule_ids")
        else None,
    )


def _positions(
    stored: Iterable[bucket_pb2.PositionBitmap], rows: int, what: str, offset: int
) -> tuple[PositionBitmap, ...]:
    positions = tuple(mirror.made_from(PositionBitmap, bitmap) for bitmap in stored)
    if not position_bitmap.in_order(positions):
        raise format_errors.FormatError(what, offset, "its bitmaps do not ascend by ledger and page")
    try:
        counts = [len(bitmap.bitmap()) for bitmap in positions]
    except format_errors.FormatError as error:
        raise format_errors.FormatError(f"{what} {error.what}", offset, error.detail) from error
    if sum(counts) != rows or 0 in counts:
        raise format_errors.FormatError(what, offset, f"it says {rows} rows, its bitmaps have {counts}")
    return positions
