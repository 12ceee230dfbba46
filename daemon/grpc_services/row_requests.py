"""Requests that carry rows, read from their bytes: adds, and of streams acknowledgements and negative ones, as clients
send them.

Owns: the way past the protobuf runtime. Between other work, with cold caches, the runtime and its way to numpy take
30 us for an add of 1,000 rows; this takes 15.
Does not own: refusals, and whatever is not the plain form: each field known, packed and at most once, columns that fit.
For anything else this module answers None (`parsing` and `wire_columns` read it), and what it reads they would read.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from daemon import call_values
from daemon.grpc_services import row_answers
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
# By its tag: where a field's bytes begin, and how many there are; of a varint, its value.
Fields: TypeAlias = dict[int, tuple[int, int]]

_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
# Of 63 bits; longer ones are left to the runtime.
_SHIFT_MAX = 56
# The largest and the longest varint of a sint32.
_LEVEL_FOLDED_MAX = (1 << 32) - 1
_LEVEL_BYTES_MAX = 5

_ONE_U64 = struct.Struct("<Q").unpack_from
_ONE_U32 = struct.Struct("<I").unpack_from

_StreamAdd = delayed_delivery_pb2.StreamAddMessagesRequest
_Add = delayed_delivery_pb2.AddMessagesRequest
_Acknowledge = dispatch_pb2.Acknowledge
_Nack = dispatch_pb2.NegativeAcknowledge

_REQUEST_ID = _StreamAdd.REQUEST_ID_FIELD_NUMBER << 3 | _VARINT
_ADD = _StreamAdd.ADD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_TOPIC = _Add.TOPIC_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_LEDGER_ID = _Add.LEDGER_ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_ENTRY_ID = _Add.ENTRY_ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_DELIVER_AT_MS = _Add.DELIVER_AT_MS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_DELAY_MS = _Add.DELAY_MS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_KEY_HASH = _Add.KEY_HASH_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_SUBSCRIPTION = _Add.SUBSCRIPTION_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_DELAY_LEVEL = _Add.DELAY_LEVEL_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_ALREADY_DUE = _Add.ALREADY_DUE_FIELD_NUMBER << 3 | _VARINT
_ALREADY_DUE_KNOWN = frozenset(delayed_delivery_pb2.AlreadyDue.values())
_ALREADY_DUE_RETURN = delayed_delivery_pb2.ALREADY_DUE_RETURN
_ON_INVALID = _Add.ON_INVALID_FIELD_NUMBER << 3 | _VARINT
_ON_INVALID_KNOWN = frozenset(delayed_delivery_pb2.OnInvalid.values())
_ON_INVALID_RETURN = delayed_delivery_pb2.ON_INVALID_RETURN
_STREAM_ADD_FIELDS = frozenset((_REQUEST_ID, _ADD))
_TIMES = frozenset((_DELIVER_AT_MS, _DELAY_MS, _DELAY_LEVEL))
_ADD_ROW_FIELDS = frozenset((_TOPIC, _LEDGER_ID, _ENTRY_ID, _DELIVER_AT_MS, _DELAY_MS, _KEY_HASH))
_ADD_FIELDS = _TIMES | {_TOPIC, _LEDGER_ID, _ENTRY_ID, _KEY_HASH, _SUBSCRIPTION, _ALREADY_DUE, _ON_INVALID}

_OF_SUBSCRIBE = dispatch_pb2.SubscribeRequest.ACKNOWLEDGE_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_ACKNOWLEDGED_ID = _Acknowledge.REQUEST_ID_FIELD_NUMBER << 3 | _VARINT
_ACKNOWLEDGED = (
    _Acknowledge.LEDGER_ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
    _Acknowledge.ENTRY_ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
    _Acknowledge.DELIVER_AT_MS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
)
_ACKNOWLEDGED_COUNT = _Acknowledge.REDELIVERY_COUNT_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_ACKNOWLEDGE_FIELDS = frozenset((_ACKNOWLEDGED_ID, *_ACKNOWLEDGED, _ACKNOWLEDGED_COUNT))

_NACK_OF_SUBSCRIBE = dispatch_pb2.SubscribeRequest.NEGATIVE_ACKNOWLEDGE_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_NACKED_ID = _Nack.REQUEST_ID_FIELD_NUMBER << 3 | _VARINT
_NACKED = (
    _Nack.LEDGER_ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
    _Nack.ENTRY_ID_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
)
_NACKED_DELIVER_AT_MS = _Nack.DELIVER_AT_MS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_NACKED_DELAY_MS = _Nack.DELAY_MS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_NACKED_COUNT = _Nack.REDELIVERY_COUNT_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_NACK_FIELDS = frozenset((_NACKED_ID, *_NACKED, _NACKED_DELIVER_AT_MS, _NACKED_DELAY_MS, _NACKED_COUNT))


class NotPlainError(Exception):
    """The bytes are for the runtime to read."""


def stream_add(data: bytes) -> tuple[int, str, str | None, call_values.AddBatch] | None:
    """request_id, topic, subscription and rows of a `StreamAddMessagesRequest`; None: it is for the runtime to read.

    The subscription is None where the request names none.
    """
    try:
        outer = scan(data, 0, len(data), _STREAM_ADD_FIELDS)
        start, size = outer[_ADD]
        fields = scan(data, start, start + size, _ADD_FIELDS)
        return outer[_REQUEST_ID][1], *_names_of_add(data, fields), _add_batch(data, fields)
    except (NotPlainError, KeyError, IndexError, UnicodeDecodeError):
        return None


def add(data: bytes) -> tuple[str, str | None, call_values.AddRow | call_values.AddBatch] | None:
    """Topic, subscription and rows of an `AddMessagesRequest`; None: it is for the runtime to read.

    The subscription is None where the request names none. The rows are an `AddRow` where they can be one.
    """
    try:
        fields = scan(data, 0, len(data), _ADD_FIELDS)
        row = _add_row(data, fields) if fields[_ENTRY_ID][1] == 8 and fields.keys() <= _ADD_ROW_FIELDS else None
        return *_names_of_add(data, fields), _add_batch(data, fields) if row is None else row
    except (NotPlainError, KeyError, IndexError, UnicodeDecodeError):
        return None


def _names_of_add(data: bytes, fields: Fields) -> tuple[str, str | None]:
    subscription = _text(data, fields[_SUBSCRIPTION]) or None if _SUBSCRIPTION in fields else None
    return _text(data, fields[_TOPIC]), subscription


def _add_row(data: bytes, fields: Fields) -> call_values.AddRow | None:
    """The one row of an add; None where the columns do not fit together."""
    by_delay = _DELAY_MS in fields
    key_hash = fields.get(_KEY_HASH)
    ledger_id, time = fields[_LEDGER_ID], fields[_DELAY_MS if by_delay else _DELIVER_AT_MS]
    if (by_delay and _DELIVER_AT_MS in fields) or ledger_id[1] != 8 or time[1] != 8 or (key_hash and key_hash[1] != 4):
        return None
    time_ms = _ONE_U64(data, time[0])[0]
    return call_values.AddRow(
        _ONE_U64(data, ledger_id[0])[0],
        _ONE_U64(data, fields[_ENTRY_ID][0])[0],
        None if by_delay else time_ms,
        time_ms if by_delay else None,
        _ONE_U32(data, key_hash[0])[0] if key_hash else None,
    )


def _add_batch(data: bytes, fields: Fields) -> call_values.AddBatch:
    rows = fields[_ENTRY_ID][1] >> 3
    if len(_TIMES & fields.keys()) != 1:
        raise NotPlainError
    return call_values.AddBatch(
        ledger_id=_u64(data, fields[_LEDGER_ID], rows),
        entry_id=_u64(data, fields[_ENTRY_ID], rows),
        deliver_at_ms=_u64(data, fields[_DELIVER_AT_MS], rows) if _DELIVER_AT_MS in fields else None,
        delay_ms=_u64(data, fields[_DELAY_MS], rows) if _DELAY_MS in fields else None,
        key_hash=_u32(data, fields[_KEY_HASH], rows) if _KEY_HASH in fields else None,
        return_already_due=_enum(fields, _ALREADY_DUE, _ALREADY_DUE_KNOWN) == _ALREADY_DUE_RETURN,
        delay_level=_levels(data, fields[_DELAY_LEVEL], rows) if _DELAY_LEVEL in fields else None,
        return_invalid=_enum(fields, _ON_INVALID, _ON_INVALID_KNOWN) == _ON_INVALID_RETURN,
    )


def acknowledge(data: bytes) -> tuple[int, call_values.HeldPositions] | None:
    """request_id and positions of a `SubscribeRequest` that acknowledges; None when it is for the runtime to read."""
    try:
        fields = _fields_of(data, _OF_SUBSCRIBE, _ACKNOWLEDGE_FIELDS)
        if fields is None:
            return None
        ledger_id, entry_id, deliver_at_ms = (fields[tag] for tag in _ACKNOWLEDGED)
        rows = entry_id[1] >> 3
        positions = call_values.HeldPositions(
            _u64(data, ledger_id, rows),
            _u64(data, entry_id, rows),
            _u64(data, deliver_at_ms, rows),
            redelivery_count=_counts(data, fields.get(_ACKNOWLEDGED_COUNT), rows),
        )
    except (NotPlainError, KeyError, IndexError):
        return None
    return fields.get(_ACKNOWLEDGED_ID, (0, 0))[1], positions


def negative_acknowledge(data: bytes) -> tuple[int, call_values.Nack] | None:
    """request_id and rows of a `SubscribeRequest` that acknowledges negatively, with one delay or one for each row or
    none; None when it is for the runtime to read.
    """
    try:
        fields = _fields_of(data, _NACK_OF_SUBSCRIBE, _NACK_FIELDS)
        if fields is None:
            return None
        ledger_id, entry_id = (fields[tag] for tag in _NACKED)
        rows = entry_id[1] >> 3
        times = fields.get(_NACKED_DELIVER_AT_MS)
        positions = call_values.HeldPositions(
            _u64(data, ledger_id, rows),
            _u64(data, entry_id, rows),
            _u64(data, times, rows) if times is not None else np.zeros(rows, np.uint64),
            redelivery_count=_counts(data, fields.get(_NACKED_COUNT), rows),
        )
        delay_ms = _u64(data, fields[_NACKED_DELAY_MS], rows) if _NACKED_DELAY_MS in fields else None
    except (NotPlainError, KeyError, IndexError):
        return None
    return fields.get(_NACKED_ID, (0, 0))[1], call_values.Nack(positions, delay_ms=delay_ms)


def _fields_of(data: bytes, request: int, known: frozenset[int]) -> Fields | None:
    """The fields of a `SubscribeRequest`'s request of that tag; None when it is another one."""
    if not data or data[0] != request:
        return None
    start, size = scan(data, 0, len(data), frozenset((request,)))[request]
    return scan(data, start, start + size, known)


def scan(data: bytes, place: int, end: int, known: frozenset[int]) -> Fields:
    """The fields of the message in data[place:end]. Raises NotPlainError, IndexError: it is for the runtime to read."""
    fields: Fields = {}
    while place < end:
        tag, number = data[place], data[place + 1]
        place += 2
        if number > 0x7F:
            number, place = varint_at(data, place - 1)
        if tag not in known or tag in fields:
            raise NotPlainError
        fields[tag] = (place, number)
        if tag & 7 == _LENGTH_DELIMITED:
            place += number
    if place != end:
        raise NotPlainError
    return fields


def varint_at(data: bytes, place: int) -> tuple[int, int]:
    """The number that begins there, and the place behind it. Raises NotPlainError: it is too long; IndexError."""
    number = data[place]
    place += 1
    if number > 0x7F:
        number &= 0x7F
        shift = 7
        while (byte := data[place]) > 0x7F:
            number |= (byte & 0x7F) << shift
            place += 1
            shift += 7
            if shift > _SHIFT_MAX:
                raise NotPlainError
        number |= byte << shift
        place += 1
    return number, place


def _enum(fields: Fields, tag: int, known: frozenset[int]) -> int:
    """The number of an enum, 0 where it is not given."""
    if tag not in fields:
        return 0
    number = fields[tag][1]
    if number not in known:
        raise NotPlainError
    return number


def _text(data: bytes, field: tuple[int, int]) -> str:
    start, size = field
    return data[start : start + size].decode()


def _u64(data: bytes, field: tuple[int, int], rows: int) -> U64:
    """The packed column, or its one value for all rows."""
    start, size = field
    if size == rows << 3 and rows:
        return np.frombuffer(data, "<u8", rows, start).astype(np.uint64)
    if size != 8 or not rows:
        raise NotPlainError
    column = np.empty(rows, np.uint64)
    column.fill(int.from_bytes(data[start : start + 8], "little"))
    return column


def _levels(data: bytes, field: tuple[int, int], rows: int) -> I32:
    """The column of packed sint32, or its one value for all rows. Of many values each is one byte: -64 to 63."""
    start, size = field
    if size == rows and rows:
        folded = np.frombuffer(data, np.uint8, rows, start)
        if folded.max() <= 0x7F:
            return _unfolded(folded.astype(np.int32))
    value = shift = 0
    place, end = start, start + min(size, _LEVEL_BYTES_MAX)
    while place < end and (byte := data[place]) > 0x7F:
        value |= (byte & 0x7F) << shift
        place += 1
        shift += 7
    if not rows or place + 1 != start + size:
        raise NotPlainError
    value |= data[place] << shift
    if value > _LEVEL_FOLDED_MAX:
        raise NotPlainError
    return np.full(rows, value >> 1 ^ -(value & 1), np.int32)


def _unfolded(folded: I32) -> I32:
    """Zigzag: 0, -1, 1, -2 ... are written as 0, 1, 2, 3 ..."""
    return folded >> 1 ^ -(folded & 1)


def _counts(data: bytes, field: tuple[int, int] | None, rows: int) -> U32 | None:
    """The column of counts, or its one value for all rows; None where there is none."""
    if field is None:
        return None
    start, size = field
    if size == 4:
        count = int.from_bytes(data[start : start + 4], "little")
        if count == row_answers.COUNT_NONE:
            raise NotPlainError
        counts = np.zeros(rows, np.uint32)
        if count:
            counts.fill(count)
        return counts
    counts = _u32(data, field, rows)
    if (counts == row_answers.COUNT_NONE).any():
        raise NotPlainError
    return counts


def _u32(data: bytes, field: tuple[int, int], rows: int) -> U32:
    start, size = field
    if size != rows << 2:
        raise NotPlainError
    return np.frombuffer(data, "<u4", rows, start).astype(np.uint32)
