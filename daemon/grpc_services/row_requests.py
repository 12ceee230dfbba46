"""Reads the requests that carry rows: from the bytes if they are plain, else from the parsed message.

A plain request has each field at most once, packed columns of lengths that fit, and only fields that most clients send.
Between other work, with cold caches, the runtime and its way to numpy take 30 us for an add of 1,000 rows; the bytes
take 15. Both ways read the same, and all refusals come from the parsed message.

A column of length 1 applies to all rows. Exactly one column says when rows are due. `daemon.core.limits` limits rows,
names and delays; the engine judges what columns say together.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from daemon import call_values, errors
from daemon.core import limits
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.core.decisions.add_decisions import AddBatch, AddRow
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.withdrawal_decisions import RescheduleBatch
from daemon.core.index.containment import EntryRanges
from daemon.grpc_services import parsing
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from tarry.packed_fields import Fields, NotPlainError, scan, tags
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2

# A redelivery count that no delivery has
COUNT_NONE = (1 << 32) - 1

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
T = TypeVar("T", bound=np.generic)

# Requests that name positions with the times with which they were delivered
Handed: TypeAlias = (
    dispatch_pb2.Acknowledge | dispatch_pb2.AcknowledgeRequest | dispatch_pb2.Extend | dispatch_pb2.ExtendLeaseRequest
)
Acknowledge: TypeAlias = dispatch_pb2.Acknowledge | dispatch_pb2.AcknowledgeRequest
NegativeAcknowledge: TypeAlias = dispatch_pb2.NegativeAcknowledge | dispatch_pb2.NegativeAcknowledgeRequest
Timed: TypeAlias = delayed_delivery_pb2.AddMessagesRequest | delayed_delivery_pb2.RescheduleMessagesRequest
Entries: TypeAlias = (
    Handed | NegativeAcknowledge | Timed | delayed_delivery_pb2.CancelMessagesRequest | dispatch_pb2.PlanDispatch
)

# The largest varint of a sint32, and the longest (bytes)
_LEVEL_FOLDED_MAX = (1 << 32) - 1
_LEVEL_BYTES_MAX = 5

_ONE_U64 = struct.Struct("<Q").unpack_from
_ONE_U32 = struct.Struct("<I").unpack_from

_REQUEST_ID, _ADD = tags(delayed_delivery_pb2.StreamAddMessagesRequest, "request_id", "add")
_STREAM_ADD_FIELDS = frozenset((_REQUEST_ID, _ADD))
_TOPIC, _LEDGER_ID, _ENTRY_ID, _DELIVER_AT_MS, _DELAY_MS, _KEY_HASH = _ADD_ROW = tags(
    delayed_delivery_pb2.AddMessagesRequest, "topic", "ledger_id", "entry_id", "deliver_at_ms", "delay_ms", "key_hash"
)
_SUBSCRIPTION, _DELAY_LEVEL, _ALREADY_DUE, _ON_INVALID = _ADD_MORE = tags(
    delayed_delivery_pb2.AddMessagesRequest, "subscription", "delay_level", "already_due", "on_invalid"
)
_TIMES = frozenset((_DELIVER_AT_MS, _DELAY_MS, _DELAY_LEVEL))
_ADD_ROW_FIELDS = frozenset(_ADD_ROW)
_ADD_FIELDS = frozenset(_ADD_ROW + _ADD_MORE)
_ALREADY_DUE_KNOWN = frozenset(delayed_delivery_pb2.AlreadyDue.values())
_ALREADY_DUE_RETURN = delayed_delivery_pb2.ALREADY_DUE_RETURN
_ON_INVALID_KNOWN = frozenset(delayed_delivery_pb2.OnInvalid.values())
_ON_INVALID_RETURN = delayed_delivery_pb2.ON_INVALID_RETURN

_ACKNOWLEDGE, _NACK = tags(dispatch_pb2.SubscribeRequest, "acknowledge", "negative_acknowledge")
_POSITIONS = ("request_id", "ledger_id", "entry_id", "deliver_at_ms", "redelivery_count")
_ACKED = tags(dispatch_pb2.Acknowledge, *_POSITIONS)
_ACKED_ID, _ACKED_LEDGER_ID, _ACKED_ENTRY_ID, _ACKED_DELIVER_AT_MS, _ACKED_COUNT = _ACKED
_NACKED_ID, _NACKED_LEDGER_ID, _NACKED_ENTRY_ID, _NACKED_DELIVER_AT_MS, _NACKED_COUNT, _NACKED_DELAY_MS = _NACKED = (
    tags(dispatch_pb2.NegativeAcknowledge, *_POSITIONS, "delay_ms")
)
_ACKNOWLEDGE_ALONE, _NACK_ALONE = frozenset((_ACKNOWLEDGE,)), frozenset((_NACK,))
_ACK_FIELDS, _NACK_FIELDS = frozenset(_ACKED), frozenset(_NACKED)


@dataclasses.dataclass(slots=True)
class Acknowledged:
    """An acknowledgement on a stream. `positions` raises `InvalidArgument`."""

    request_id: int
    positions: Callable[[], HeldPositions]


@dataclasses.dataclass(slots=True)
class NegativelyAcknowledged:
    """A negative acknowledgement on a stream. `nack` raises `InvalidArgument`."""

    request_id: int
    nack: Callable[[], call_values.Nack]


# ---- adds


def stream_add(data: bytes, bounds: parsing.Bounds) -> tuple[int, str, str | None, Callable[[], AddBatch]]:
    """Read request_id, topic, subscription and rows of a `StreamAddMessagesRequest`.

    The subscription is None if the request names none. Raises `InvalidArgument` if the request cannot be parsed, and
    when the rows are called for.
    """
    if len(data) <= bounds.size_bytes_max:
        try:
            outer = scan(data, 0, len(data), _STREAM_ADD_FIELDS)
            start, size = outer[_ADD]
            fields = scan(data, start, start + size, _ADD_FIELDS)
            if (rows := fields[_ENTRY_ID][1] >> 3) > bounds.rows_max:
                refuse = functools.partial(_refuse_rows, rows, bounds.rows_max)
                return outer[_REQUEST_ID][1], *_names_of_add(data, fields), refuse
            batch = _plain_batch(data, fields)
            return outer[_REQUEST_ID][1], *_names_of_add(data, fields), lambda: batch
        except (NotPlainError, KeyError, IndexError, UnicodeDecodeError):
            pass
    request = parsing.parse(delayed_delivery_pb2.StreamAddMessagesRequest, data, bounds)
    add = request.add
    return request.request_id, add.topic, add.subscription or None, functools.partial(add_batch, add)


def add(
    data: bytes, bounds: parsing.Bounds, *, check: Callable[[str, str], None]
) -> tuple[str, str | None, AddRow | AddBatch]:
    """Read topic, subscription and rows of an `AddMessagesRequest`, the rows as an `AddRow` if they can be one.

    The subscription is None if the request names none. Calls `check` with both names, "" for none, before it refuses
    the rows. Raises what `check` raises, and `InvalidArgument`.
    """
    if len(data) <= bounds.size_bytes_max:
        try:
            fields = scan(data, 0, len(data), _ADD_FIELDS)
            if (rows_given := fields[_ENTRY_ID][1] >> 3) > bounds.rows_max:
                check(*((name or "") for name in _names_of_add(data, fields)))
                raise limits.rows_refused("entry_id", rows_given, bounds.rows_max)
            row = _add_row(data, fields) if fields[_ENTRY_ID][1] == 8 and fields.keys() <= _ADD_ROW_FIELDS else None
            rows = _plain_batch(data, fields) if row is None else row
            topic, subscription = _names_of_add(data, fields)
        except (NotPlainError, KeyError, IndexError, UnicodeDecodeError):
            pass
        else:
            check(topic, subscription or "")
            return topic, subscription, rows
    request = parsing.parse(delayed_delivery_pb2.AddMessagesRequest, data, bounds)
    check(request.topic, request.subscription)
    return request.topic, request.subscription or None, add_batch(request)


def _refuse_rows(rows: int, rows_max: int) -> NoReturn:
    raise limits.rows_refused("entry_id", rows, rows_max)


def _names_of_add(data: bytes, fields: Fields) -> tuple[str, str | None]:
    subscription = _text(data, fields[_SUBSCRIPTION]) or None if _SUBSCRIPTION in fields else None
    return _text(data, fields[_TOPIC]), subscription


def _add_row(data: bytes, fields: Fields) -> AddRow | None:
    """Read the one row of an add. Returns None if the columns do not fit together."""
    by_delay = _DELAY_MS in fields
    key_hash = fields.get(_KEY_HASH)
    ledger_id, time = fields[_LEDGER_ID], fields[_DELAY_MS if by_delay else _DELIVER_AT_MS]
    if (by_delay and _DELIVER_AT_MS in fields) or ledger_id[1] != 8 or time[1] != 8 or (key_hash and key_hash[1] != 4):
        return None
    time_ms = _ONE_U64(data, time[0])[0]
    return AddRow(
        _ONE_U64(data, ledger_id[0])[0],
        _ONE_U64(data, fields[_ENTRY_ID][0])[0],
        None if by_delay else time_ms,
        time_ms if by_delay else None,
        _ONE_U32(data, key_hash[0])[0] if key_hash else None,
    )


def _plain_batch(data: bytes, fields: Fields) -> AddBatch:
    rows = fields[_ENTRY_ID][1] >> 3
    if len(_TIMES & fields.keys()) != 1:
        raise NotPlainError
    return AddBatch(
        ledger_id=_u64(data, fields[_LEDGER_ID], rows),
        entry_id=_u64(data, fields[_ENTRY_ID], rows),
        deliver_at_ms=_u64(data, fields[_DELIVER_AT_MS], rows) if _DELIVER_AT_MS in fields else None,
        delay_ms=_u64(data, fields[_DELAY_MS], rows) if _DELAY_MS in fields else None,
        key_hash=_u32(data, fields[_KEY_HASH], rows) if _KEY_HASH in fields else None,
        return_already_due=_enum(fields, _ALREADY_DUE, _ALREADY_DUE_KNOWN) == _ALREADY_DUE_RETURN,
        delay_level=_levels(data, fields[_DELAY_LEVEL], rows) if _DELAY_LEVEL in fields else None,
        return_invalid=_enum(fields, _ON_INVALID, _ON_INVALID_KNOWN) == _ON_INVALID_RETURN,
    )


def add_batch(request: delayed_delivery_pb2.AddMessagesRequest) -> AddBatch:
    """Read the request's rows. Raises `InvalidArgument`."""
    if request.already_due:
        parsing.require_known("already_due", request.already_due, delayed_delivery_pb2.AlreadyDue.DESCRIPTOR)
    if request.on_invalid:
        parsing.require_known("on_invalid", request.on_invalid, delayed_delivery_pb2.OnInvalid.DESCRIPTOR)
    ledger_id, entry_id = positions(request)
    rows = len(entry_id)
    _require_one_of({name: len(getattr(request, name)) for name in ("deliver_at_ms", "delay_ms", "delay_level")})
    deliver_at_ms, delay_ms = _times(request, rows)
    return AddBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=deliver_at_ms,
        delay_ms=delay_ms,
        key_hash=row_column("key_hash", request.key_hash, rows, np.uint32) if request.key_hash else None,
        return_already_due=request.already_due == _ALREADY_DUE_RETURN,
        delay_level=row_column("delay_level", request.delay_level, rows, np.int32) if request.delay_level else None,
        return_invalid=request.on_invalid == _ON_INVALID_RETURN,
    )


def reschedule_batch(request: delayed_delivery_pb2.RescheduleMessagesRequest) -> RescheduleBatch:
    """Read the request's positions and their new times. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    _require_one_of({name: len(getattr(request, name)) for name in ("deliver_at_ms", "delay_ms")})
    deliver_at_ms, delay_ms = _times(request, len(entry_id))
    return RescheduleBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=deliver_at_ms,
        delay_ms=delay_ms,
        key_hash=row_column("key_hash", request.key_hash, len(entry_id), np.uint32) if request.key_hash else None,
    )


def _require_one_of(lengths: Mapping[str, int]) -> None:
    """Check that exactly one of some columns is given: name -> length. Raises `InvalidArgument`."""
    given = {name: length for name, length in lengths.items() if length}
    if not given:
        raise errors.InvalidArgument(f"{', '.join(lengths)}: none is given; give exactly one")
    if len(given) > 1:
        values = " and ".join(map(str, given.values()))
        which = "both" if len(given) == 2 else "all"
        raise errors.InvalidArgument(f"{', '.join(given)}: {which} are given, {values} values; give exactly one")


def _times(request: Timed, rows: int) -> tuple[U64 | None, U64 | None]:
    """Read deliver_at_ms and delay_ms, of which at most one is given."""
    deliver_at_ms, delay_ms = request.deliver_at_ms, request.delay_ms
    return (
        row_column("deliver_at_ms", deliver_at_ms, rows, np.uint64) if deliver_at_ms else None,
        row_column("delay_ms", delay_ms, rows, np.uint64) if delay_ms else None,
    )


# ---- requests of dispatchers


def subscribe(
    data: bytes, bounds: parsing.Bounds
) -> Acknowledged | NegativelyAcknowledged | dispatch_pb2.SubscribeRequest:
    """Read a `SubscribeRequest`. Raises `InvalidArgument` if it cannot be parsed."""
    try:
        if data and len(data) <= bounds.size_bytes_max:
            if data[0] == _ACKNOWLEDGE:
                return _plain_acknowledge(data)
            if data[0] == _NACK:
                return _plain_nack(data)
    except (NotPlainError, KeyError, IndexError):
        pass
    request = parsing.parse(dispatch_pb2.SubscribeRequest, data, bounds)
    match request.WhichOneof("request"):
        case "acknowledge":
            given = request.acknowledge
            return Acknowledged(given.request_id, functools.partial(acknowledged, given))
        case "negative_acknowledge":
            nacked = request.negative_acknowledge
            return NegativelyAcknowledged(nacked.request_id, functools.partial(nack, nacked))
    return request


def _plain_acknowledge(data: bytes) -> Acknowledged:
    start, size = scan(data, 0, len(data), _ACKNOWLEDGE_ALONE)[_ACKNOWLEDGE]
    fields = scan(data, start, start + size, _ACK_FIELDS)
    rows = fields[_ACKED_ENTRY_ID][1] >> 3
    positions = HeldPositions(
        _u64(data, fields[_ACKED_LEDGER_ID], rows),
        _u64(data, fields[_ACKED_ENTRY_ID], rows),
        _u64(data, fields[_ACKED_DELIVER_AT_MS], rows),
        redelivery_count=_counts(data, fields.get(_ACKED_COUNT), rows),
    )
    return Acknowledged(fields[_ACKED_ID][1] if _ACKED_ID in fields else 0, lambda: positions)


def _plain_nack(data: bytes) -> NegativelyAcknowledged:
    start, size = scan(data, 0, len(data), _NACK_ALONE)[_NACK]
    fields = scan(data, start, start + size, _NACK_FIELDS)
    rows = fields[_NACKED_ENTRY_ID][1] >> 3
    times = fields.get(_NACKED_DELIVER_AT_MS)
    positions = HeldPositions(
        _u64(data, fields[_NACKED_LEDGER_ID], rows),
        _u64(data, fields[_NACKED_ENTRY_ID], rows),
        np.zeros(rows, np.uint64) if times is None else _u64(data, times, rows),
        redelivery_count=_counts(data, fields.get(_NACKED_COUNT), rows),
    )
    delay_ms = _u64(data, fields[_NACKED_DELAY_MS], rows) if _NACKED_DELAY_MS in fields else None
    nack = call_values.Nack(positions, delay_ms=delay_ms)
    return NegativelyAcknowledged(fields[_NACKED_ID][1] if _NACKED_ID in fields else 0, lambda: nack)


def handed_out(request: Handed) -> HeldPositions:
    """Read positions to acknowledge, or whose lease or ack timeout to extend. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    rows = len(entry_id)
    deliver_at_ms = row_column("deliver_at_ms", request.deliver_at_ms, rows, np.uint64)
    return HeldPositions(ledger_id, entry_id, deliver_at_ms, _batch_index(request.batch_index, rows))


def acknowledged(request: Acknowledge) -> HeldPositions:
    """Read deliveries to acknowledge. Raises `InvalidArgument`."""
    positions = handed_out(request)
    counts = redelivery_count("redelivery_count", request.redelivery_count, len(positions))
    return dataclasses.replace(positions, redelivery_count=counts)


def redelivery_count(field: str, values: Sequence[int], rows: int) -> U32 | None:
    """Read the counts that name deliveries, or None, which names any. Raises `InvalidArgument`."""
    if not values:
        return None
    counts = row_column(field, values, rows, np.uint32)
    strange = np.flatnonzero(counts == COUNT_NONE)
    if len(strange):
        raise errors.InvalidArgument(
            f"{field}[{strange[0]}]: {COUNT_NONE}; it must be at most {COUNT_NONE - 1}, as handed out"
        )
    return counts


def nack(request: NegativeAcknowledge) -> call_values.Nack:
    """Read positions to redeliver or to reject. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    rows = len(entry_id)
    given = [name for name in ("delay_ms", "delay_level", "reject") if getattr(request, name)]
    if len(given) > 1:
        raise errors.InvalidArgument(
            f"delay_ms, delay_level, reject: {' and '.join(given)} are given; give at most one of them"
        )
    times = request.deliver_at_ms
    deliver_at_ms = row_column("deliver_at_ms", times, rows, np.uint64) if times else np.zeros(rows, np.uint64)
    return call_values.Nack(
        HeldPositions(
            ledger_id,
            entry_id,
            deliver_at_ms,
            _batch_index(request.batch_index, rows),
            redelivery_count("redelivery_count", request.redelivery_count, rows),
        ),
        delay_ms=row_column("delay_ms", request.delay_ms, rows, np.uint64) if request.delay_ms else None,
        delay_level=row_column("delay_level", request.delay_level, rows, np.int32) if request.delay_level else None,
        reject=request.reject,
        text=request.reason,
        key_hash=row_column("key_hash", request.key_hash, rows, np.uint32) if request.key_hash else None,
        forwarded=request.forwarded,
    )


def planned(request: dispatch_pb2.PlanDispatch) -> tuple[U64, U64, U32 | None]:
    """Read ledger_id, entry_id and hashes of the positions to plan. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    key_hash = row_column("key_hash", request.key_hash, len(entry_id), np.uint32) if request.key_hash else None
    return ledger_id, entry_id, key_hash


def _batch_index(values: Sequence[int], rows: int) -> U32 | None:
    """Read batch indexes. Returns None if every row is a whole entry."""
    if not values:
        return None
    column = row_column("batch_index", values, rows, np.uint32)
    return None if (column == NO_BATCH_INDEX).all() else column


def held_by_consumers(request: dispatch_pb2.Open) -> call_values.HeldByConsumers:
    """Read the positions that the dispatcher's consumers still hold, possibly none. Raises `InvalidArgument`."""
    positions = held(request, "held_consumer_id")
    key_hash = np.array(request.held_key_hash, np.uint32) if request.held_key_hash else None
    return call_values.HeldByConsumers(positions, np.array(request.held_consumer_id, np.uint32), key_hash)


def held(request: dispatch_pb2.Open, *further: str) -> HeldPositions:
    """Read the positions that the dispatcher still holds, possibly none. Raises `InvalidArgument`.

    `further` names more columns that have a value for each of them.
    """
    always = ("held_ledger_id", "held_entry_id", "held_deliver_at_ms", *further)
    lengths = {name: len(getattr(request, name)) for name in always}
    columns = ("held_batch_index", "held_key_hash", "held_redelivery_count")
    optional = {name: len(getattr(request, name)) for name in columns}
    lengths |= {name: length for name, length in optional.items() if length}
    if len(set(lengths.values())) != 1:
        given = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise errors.InvalidArgument(f"held columns: {given} values; they must be of one length")
    return HeldPositions(
        ledger_id=np.array(request.held_ledger_id, np.uint64),
        entry_id=np.array(request.held_entry_id, np.uint64),
        deliver_at_ms=np.array(request.held_deliver_at_ms, np.uint64),
        batch_index=_batch_index(request.held_batch_index, len(request.held_entry_id)),
        redelivery_count=redelivery_count(
            "held_redelivery_count", request.held_redelivery_count, len(request.held_entry_id)
        ),
    )


# ---- other requests


def entry_ranges(request: delayed_delivery_pb2.ContainsMessagesRequest) -> EntryRanges:
    """Read ranges to look up; a position is a range of one entry. Raises `InvalidArgument`."""
    rows = _row_count("entry_id", request.entry_id)
    ledger_id = row_column("ledger_id", request.ledger_id, rows, np.uint64)
    first = np.array(request.entry_id, np.uint64)
    if not request.last_entry_id:
        return EntryRanges(ledger_id, first, first)
    last = np.array(request.last_entry_id, np.uint64)
    if len(last) != rows:
        raise errors.InvalidArgument(
            f"last_entry_id: {len(last)} values for {rows} ranges (entry_id); give {rows}, or none for positions"
        )
    return EntryRanges(ledger_id, first, last)


def ledger_ranges(request: delayed_delivery_pb2.TrimMessagesRequest) -> LedgerRanges:
    """Read ranges to trim. Raises `InvalidArgument`."""
    rows = _row_count("ledger_id", request.ledger_id)
    if len(request.entry_id) != rows:
        raise errors.InvalidArgument(
            f"entry_id: {len(request.entry_id)} values for {rows} ledgers (ledger_id); give {rows}"
        )
    return LedgerRanges(
        np.array(request.ledger_id, np.uint64), np.array(request.entry_id, np.uint64), request.all_lower_ledgers
    )


def dead_letter_filter(request: inspect_pb2.DeadLetterFilter) -> DeadLetterFilter:
    """Read the filter of a request. Raises `InvalidArgument` if the reason is not known."""
    parsing.require_known("reason", request.reason, inspect_pb2.DeadLetterReason.DESCRIPTOR)
    ledgers = request.ledgers
    return DeadLetterFilter(
        ids=np.array(request.dead_letter_id, np.uint64) if request.dead_letter_id else None,
        ledgers=(ledgers.first_ledger_id, ledgers.last_ledger_id) if request.HasField("ledgers") else None,
        reason=request.reason or None,
        from_ms=request.from_ms or None,
        until_ms=request.until_ms or None,
    )


# ---- columns of a parsed message


def positions(request: Entries) -> tuple[U64, U64]:
    """Read ledger_id and entry_id of the request's rows. Raises `InvalidArgument`."""
    rows = _row_count("entry_id", request.entry_id)
    return row_column("ledger_id", request.ledger_id, rows, np.uint64), np.array(request.entry_id, np.uint64)


def _row_count(field: str, values: Sequence[int]) -> int:
    if not values:
        raise errors.InvalidArgument(f"{field}: 0 rows; a request has at least 1")
    return len(values)


def row_column(
    field: str, values: Sequence[int], rows: int, dtype: type[T], *, rows_of: str = "entry_id"
) -> npt.NDArray[T]:
    """Return a value for each row; a column of length 1 applies to all. Raises `InvalidArgument`.

    `rows_of` names the column whose length is the number of rows.
    """
    given = len(values)
    if given == rows:
        return np.array(values, dtype)
    if given == 1:
        column = np.empty(rows, dtype)
        column.fill(values[0])
        return column
    raise errors.InvalidArgument(f"{field}: {given} values for {rows} rows ({rows_of}); give {rows}, or 1 for all")


# ---- columns of bytes


def _enum(fields: Fields, tag: int, known: frozenset[int]) -> int:
    """Read the number of an enum. Returns 0 if it is not given."""
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
    """Read the packed column, or its one value for all rows."""
    start, size = field
    if size == rows << 3 and rows:
        return np.frombuffer(data, "<u8", rows, start).astype(np.uint64)
    if size != 8 or not rows:
        raise NotPlainError
    column = np.empty(rows, np.uint64)
    column.fill(int.from_bytes(data[start : start + 8], "little"))
    return column


def _levels(data: bytes, field: tuple[int, int], rows: int) -> I32:
    """Read the column of packed sint32, or its one value for all rows.

    Several values must have one byte each: -64 to 63.
    """
    start, size = field
    if size == rows and rows:
        folded = np.frombuffer(data, np.uint8, rows, start)
        if folded.max() <= 0x7F:
            # Zigzag: 0, -1, 1, -2 ... are written as 0, 1, 2, 3 ...
            zigzag = folded.astype(np.int32)
            return zigzag >> 1 ^ -(zigzag & 1)
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


def _counts(data: bytes, field: tuple[int, int] | None, rows: int) -> U32 | None:
    """Read the column of counts, or its one value for all rows. Returns None if there is none."""
    if field is None:
        return None
    start, size = field
    if size == 4:
        count = int.from_bytes(data[start : start + 4], "little")
        if count == COUNT_NONE:
            raise NotPlainError
        counts = np.zeros(rows, np.uint32)
        if count:
            counts.fill(count)
        return counts
    counts = _u32(data, field, rows)
    if (counts == COUNT_NONE).any():
        raise NotPlainError
    return counts


def _u32(data: bytes, field: tuple[int, int], rows: int) -> U32:
    start, size = field
    if size != rows << 2:
        raise NotPlainError
    return np.frombuffer(data, "<u4", rows, start).astype(np.uint32)
