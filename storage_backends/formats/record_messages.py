"""Records as messages: the form that they have in a slot, and where a checkpoint carries them.

Owns: that translation, both ways.
Does not own: the records (`record_columns`), slots and their checksum (`slot_format`).

Columns are plain in a record; the rows of a checkpoint have the same message, dense.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, assert_never

import zstandard

from storage_backends.formats import column_format, format_errors, index_ids, mirror, position_bitmap
from storage_backends.formats.generated import bucket_pb2, journal_pb2
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.record_columns import (
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
from storage_backends.formats.row_columns import U32, U64, Rows

# Messages that hold rows, with their key hashes.
_RowsMessage: TypeAlias = (
    journal_pb2.Add
    | journal_pb2.Reschedule
    | journal_pb2.NegativeAcknowledge
    | journal_pb2.DeadLetter
    | journal_pb2.Replay
)

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
    """Sets the message of a record."""
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
    """Sets the columns of rows: plain, or dense, with `zstd`."""
    message.deliver_at_ms = column_format.encode_u64(rows.deliver_at_ms, zstd)
    message.ledger_id = column_format.encode_u64(rows.ledger_id, zstd)
    message.entry_id = column_format.encode_u64(rows.entry_id, zstd)
    if rows.key_hash is not None:
        message.key_hash = column_format.encode_u32(rows.key_hash, zstd)


# ---- reading


def record_of(message: journal_pb2.Record, what: str, offset: int) -> Record:
    """The record of a message. `what` and `offset` (of the payload that holds it) are for the FormatError."""
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
            ids = _u64(replay.dead_letter_id, rows, f"{what} dead_letter_id", offset)
            return ReplayRecord(
                *head, replay.subscription_id, replay.index_id, rows_of(replay, rows, what, offset), ids
            )
        case "purge":
            ids = _u64(message.purge.dead_letter_id, rows, f"{what} dead_letter_id", offset)
            return PurgeRecord(*head, message.purge.subscription_id, ids)
        case _:
            raise format_errors.FormatError(what, offset, "its decision is of no kind that is known here")


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
    rows = Rows(
        _u64(stored.deliver_at_ms, message.rows, f"{what} deliver_at_ms", offset),
        _u64(stored.ledger_id, message.rows, f"{what} ledger_id", offset),
        _u64(stored.entry_id, message.rows, f"{what} entry_id", offset),
    )
    return AcknowledgeRecord(message.topic_id, message.incarnation, subscription_id, rows, index_id)


def _nack_of(message: journal_pb2.Record, what: str, offset: int) -> NackRecord:
    stored = message.negative_acknowledge
    return NackRecord(
        message.topic_id,
        message.incarnation,
        stored.subscription_id,
        stored.index_id,
        rows_of(stored, message.rows, what, offset),
        _u64(stored.redeliver_at_ms, message.rows, f"{what} redeliver_at_ms", offset),
        _u32(stored.redelivery_count, message.rows, f"{what} redelivery_count", offset),
        stored.added,
    )


def _dead_letter_of(message: journal_pb2.Record, what: str, offset: int) -> DeadLetterRecord:
    stored = message.dead_letter
    return DeadLetterRecord(
        message.topic_id,
        message.incarnation,
        stored.subscription_id,
        stored.index_id,
        rows_of(stored, message.rows, what, offset),
        _u32(stored.redelivery_count, message.rows, f"{what} redelivery_count", offset),
        _u64(stored.dead_letter_id, message.rows, f"{what} dead_letter_id", offset),
        _u64(stored.dead_at_ms, message.rows, f"{what} dead_at_ms", offset),
        DeadLetterReason(stored.reason),
        stored.text,
    )


def rows_of(message: _RowsMessage, rows: int, what: str, offset: int) -> Rows:
    """The rows of a message. `what` and `offset` (of the payload that holds it) are for the FormatError."""
    return Rows(
        _u64(message.deliver_at_ms, rows, f"{what} deliver_at_ms", offset),
        _u64(message.ledger_id, rows, f"{what} ledger_id", offset),
        _u64(message.entry_id, rows, f"{what} entry_id", offset),
        _u32(message.key_hash, rows, f"{what} key_hash", offset) if message.HasField("key_hash") else None,
    )


def _u64(data: bytes, rows: int, what: str, offset: int) -> U64:
    return column_format.decode_u64(data, rows, what=what, offset=offset)


def _u32(data: bytes, rows: int, what: str, offset: int) -> U32:
    return column_format.decode_u32(data, rows, what=what, offset=offset)


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
