"""Encodes and decodes redeliveries and dead letters in progress, as columns.

They are the columns of `manifest.NackedRows` and `manifest.DeadLetters`, all dense. The work is in proportion to the
rows: it runs in an executor.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from storage_backends.formats import column_format, format_errors, manifest
from storage_backends.formats.record_columns import DeadLetterReason
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds

U8 = npt.NDArray[np.uint8]

# Each is kept in memory anyway: the limit is twice as many as a daemon was ever measured with.
_ROWS_MAX: Final = 1 << 26

_NACKED: Final = "nacked rows"
_DEAD_LETTERS: Final = "dead letters"


class DeadLetterColumns(NamedTuple):
    """n dead letters by ascending id. `text_index` is an index of `texts` for each.

    `schedule_ids` are those of n rows, or None if none has one.
    """

    dead_letter_id: U64
    ledger_id: U64
    entry_id: U64
    batch_index: U32
    deliver_at_ms: U64
    key_hash: U32
    redelivery_count: U32
    dead_at_ms: U64
    reason: U8
    text_index: U32
    texts: tuple[str, ...]
    schedule_ids: ScheduleIds | None = None


def _stored_ids(ids: ScheduleIds | None, zstd: zstandard.ZstdCompressor) -> manifest.StoredIds | None:
    if not ids:
        return None
    lengths, content = column_format.encode_ids(ids, zstd)
    return manifest.StoredIds(lengths=lengths, ids=content)


def _ids(columns: column_format.Columns, stored: manifest.StoredIds | None) -> ScheduleIds | None:
    return None if stored is None else columns.schedule_ids(stored.lengths, stored.ids)


def encode_nacked(
    index_id: int, rows: Rows, redeliver_at_ms: U64, zstd: zstandard.ZstdCompressor
) -> manifest.NackedRows:
    """Encode rows that wait for redelivery. `redeliver_at_ms` u64[n] says when each is redelivered."""
    return manifest.NackedRows(
        index_id=index_id,
        rows=len(rows),
        deliver_at_ms=column_format.encode_u64(rows.deliver_at_ms, zstd),
        ledger_id=column_format.encode_u64(rows.ledger_id, zstd),
        entry_id=column_format.encode_u64(rows.entry_id, zstd),
        key_hash=None if rows.key_hash is None else column_format.encode_u32(rows.key_hash, zstd),
        redeliver_at_ms=column_format.encode_u64(redeliver_at_ms, zstd),
        schedule_ids=_stored_ids(rows.schedule_ids, zstd),
    )


def decode_nacked(stored: manifest.NackedRows) -> tuple[Rows, U64]:
    """Decode (rows, redeliver_at_ms). Raises FormatError."""
    distinct = stored.ledger_id, stored.entry_id
    columns = column_format.Columns(stored.rows, distinct, what=_NACKED, offset=0, rows_max=_ROWS_MAX)
    rows = Rows(
        columns.u64("deliver_at_ms", stored.deliver_at_ms),
        columns.u64("ledger_id", stored.ledger_id),
        columns.u64("entry_id", stored.entry_id),
        None if stored.key_hash is None else columns.u32("key_hash", stored.key_hash),
        _ids(columns, stored.schedule_ids),
    )
    return rows, columns.u64("redeliver_at_ms", stored.redeliver_at_ms)


def encode_dead_letters(letters: DeadLetterColumns, zstd: zstandard.ZstdCompressor) -> manifest.DeadLetters:
    return manifest.DeadLetters(
        rows=len(letters.dead_letter_id),
        dead_letter_id=column_format.encode_u64(letters.dead_letter_id, zstd),
        ledger_id=column_format.encode_u64(letters.ledger_id, zstd),
        entry_id=column_format.encode_u64(letters.entry_id, zstd),
        batch_index=column_format.encode_u32(letters.batch_index, zstd),
        deliver_at_ms=column_format.encode_u64(letters.deliver_at_ms, zstd),
        key_hash=column_format.encode_u32(letters.key_hash, zstd),
        redelivery_count=column_format.encode_u32(letters.redelivery_count, zstd),
        dead_at_ms=column_format.encode_u64(letters.dead_at_ms, zstd),
        reason=column_format.encode_u32(letters.reason.astype(np.uint32), zstd),
        text_index=column_format.encode_u32(letters.text_index, zstd),
        texts=letters.texts,
        schedule_ids=_stored_ids(letters.schedule_ids, zstd),
    )


def decode_dead_letters(stored: manifest.DeadLetters) -> DeadLetterColumns:
    """Decode dead letters from a manifest. Raises FormatError."""
    distinct = (stored.dead_letter_id,)
    columns = column_format.Columns(stored.rows, distinct, what=_DEAD_LETTERS, offset=0, rows_max=_ROWS_MAX)
    letters = DeadLetterColumns(
        columns.u64("dead_letter_id", stored.dead_letter_id),
        columns.u64("ledger_id", stored.ledger_id),
        columns.u64("entry_id", stored.entry_id),
        columns.u32("batch_index", stored.batch_index),
        columns.u64("deliver_at_ms", stored.deliver_at_ms),
        columns.u32("key_hash", stored.key_hash),
        columns.u32("redelivery_count", stored.redelivery_count),
        columns.u64("dead_at_ms", stored.dead_at_ms),
        _reasons(columns.u32("reason", stored.reason)),
        columns.u32("text_index", stored.text_index),
        stored.texts,
        _ids(columns, stored.schedule_ids),
    )
    _check(letters)
    return letters


def _check(letters: DeadLetterColumns) -> None:
    ids, texts = letters.dead_letter_id, letters.text_index
    if (ids[1:] <= ids[:-1]).any():
        raise format_errors.FormatError(_DEAD_LETTERS, 0, "their ids do not ascend")
    if len(texts) and int(texts.max()) >= len(letters.texts):
        raise format_errors.FormatError(
            _DEAD_LETTERS, 0, f"a row names text {texts.max()}; there are {len(letters.texts)}"
        )


def _reasons(reasons: U32) -> U8:
    unknown = ~np.isin(reasons, list(DeadLetterReason))
    if unknown.any():
        raise format_errors.FormatError(_DEAD_LETTERS, 0, f"reason {reasons[unknown][0]} is not known")
    return reasons.astype(np.uint8)
