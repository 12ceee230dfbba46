"""Packed fields of the wire to numpy columns and back.

Owns: the shape of a batch (lengths, a column of length 1 applies to all rows, exactly one time column) and the bytes of
`Messages`.
Does not own: limits on rows, names and delays (`daemon.core.limits`).

The runtime turns a packed fixed64 field into an array at about 1 ns a row. The way back, `extend`, costs 30 to 50 ns a
row; a packed fixed field is its array's own bytes, so it is written as such (0.3 ns).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from daemon import errors
from daemon.engine import calls
from daemon.grpc_services import parsing
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

# Of one `Messages`; at most 370 KB, which every limit on messages allows, also the 4 MiB of a gRPC client by default.
MESSAGES_ROWS_MAX = 10_000

U64 = npt.NDArray[np.uint64]
T = TypeVar("T", bound=np.generic)

_PACKED = 2
_MESSAGES_TAG = dispatch_pb2.SubscribeResponse.MESSAGES_FIELD_NUMBER << 3 | _PACKED


def add_batch(request: delayed_delivery_pb2.AddMessagesRequest) -> calls.AddBatch:
    """The request's rows. Raises `InvalidArgument`."""
    already_due = delayed_delivery_pb2.AlreadyDue
    parsing.require_known("already_due", request.already_due, already_due.DESCRIPTOR)
    rows = _row_count("entry_id", request.entry_id)
    if not request.deliver_at_ms and not request.delay_ms:
        raise errors.InvalidArgument("deliver_at_ms, delay_ms: none is given; give exactly one")
    if request.deliver_at_ms and request.delay_ms:
        given = f"{len(request.deliver_at_ms)} and {len(request.delay_ms)} values"
        raise errors.InvalidArgument(f"deliver_at_ms, delay_ms: both are given, {given}; give exactly one")
    return calls.AddBatch(
        ledger_id=_column("ledger_id", request.ledger_id, rows, np.uint64),
        entry_id=np.array(request.entry_id, dtype=np.uint64),
        deliver_at_ms=_column("deliver_at_ms", request.deliver_at_ms, rows, np.uint64)
        if request.deliver_at_ms
        else None,
        delay_ms=_column("delay_ms", request.delay_ms, rows, np.uint64) if request.delay_ms else None,
        key_hash=_column("key_hash", request.key_hash, rows, np.uint32) if request.key_hash else None,
        return_already_due=request.already_due == already_due.ALREADY_DUE_RETURN,
    )


def acknowledged(request: dispatch_pb2.Acknowledge) -> tuple[U64, U64, U64]:
    """ledger_id, entry_id, deliver_at_ms. Raises `InvalidArgument`."""
    rows = _row_count("entry_id", request.entry_id)
    return (
        _column("ledger_id", request.ledger_id, rows, np.uint64),
        np.array(request.entry_id, dtype=np.uint64),
        _column("deliver_at_ms", request.deliver_at_ms, rows, np.uint64),
    )


def held(request: dispatch_pb2.Open) -> calls.HeldPositions:
    """The positions that the dispatcher still holds, maybe none. Raises `InvalidArgument`."""
    lengths = {
        "held_ledger_id": len(request.held_ledger_id),
        "held_entry_id": len(request.held_entry_id),
        "held_deliver_at_ms": len(request.held_deliver_at_ms),
    }
    if len(set(lengths.values())) != 1:
        given = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise errors.InvalidArgument(f"held columns: {given} values; they must be of one length")
    return calls.HeldPositions(
        ledger_id=np.array(request.held_ledger_id, dtype=np.uint64),
        entry_id=np.array(request.held_entry_id, dtype=np.uint64),
        deliver_at_ms=np.array(request.held_deliver_at_ms, dtype=np.uint64),
    )


def add_response(outcome: calls.AddOutcome) -> delayed_delivery_pb2.AddMessagesResponse:
    response = delayed_delivery_pb2.AddMessagesResponse(
        accepted=outcome.accepted, duplicates=outcome.duplicates, late_on_arrival=outcome.late_on_arrival
    )
    if len(outcome.returned_index):
        response.returned_index.extend(outcome.returned_index.tolist())
    if len(outcome.raised_index):
        response.raised_index.extend(outcome.raised_index.tolist())
        response.raised_deliver_at_ms.extend(outcome.raised_deliver_at_ms.tolist())
    return response


def subscribe_responses(handed: calls.HandedOut) -> Iterator[bytes]:
    """Encoded `SubscribeResponse`s with the rows as `Messages` of at most `MESSAGES_ROWS_MAX` rows."""
    for start in range(0, len(handed.rows), MESSAGES_ROWS_MAX):
        body = b"".join(_messages(handed, slice(start, start + MESSAGES_ROWS_MAX)))
        yield bytes((_MESSAGES_TAG,)) + _varint(len(body)) + body


def _messages(handed: calls.HandedOut, part: slice) -> Iterator[bytes]:
    """The encoded fields of one `Messages`; encoded fields one after the other are an encoded message."""
    rows, fields = handed.rows, dispatch_pb2.Messages
    yield fields(epoch=handed.epoch).SerializeToString()
    yield from _packed(fields.LEDGER_ID_FIELD_NUMBER, rows.ledger_id[part], "<u8")
    yield from _packed(fields.ENTRY_ID_FIELD_NUMBER, rows.entry_id[part], "<u8")
    yield from _packed(fields.DELIVER_AT_MS_FIELD_NUMBER, rows.deliver_at_ms[part], "<u8")
    if rows.key_hash is not None:
        yield from _packed(fields.KEY_HASH_FIELD_NUMBER, rows.key_hash[part], "<u4")


def _packed(field_number: int, column: npt.NDArray[T], form: str) -> tuple[bytes, bytes, bytes]:
    data = np.ascontiguousarray(column, dtype=form).tobytes()
    return bytes((field_number << 3 | _PACKED,)), _varint(len(data)), data


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _row_count(field: str, values: Sequence[int]) -> int:
    if not values:
        raise errors.InvalidArgument(f"{field}: 0 rows; a request has at least 1")
    return len(values)


def _column(field: str, values: Sequence[int], rows: int, dtype: type[T]) -> npt.NDArray[T]:
    column = np.array(values, dtype=dtype)
    if len(column) == rows:
        return column
    if len(column) == 1:
        return np.full(rows, column[0], dtype=dtype)
    raise errors.InvalidArgument(f"{field}: {len(column)} values for {rows} rows (entry_id); give {rows}, or 1 for all")
