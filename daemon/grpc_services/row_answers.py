"""Packed fields of the wire to numpy columns and back.

Owns: the shape of a request's rows (lengths, a column of length 1 applies to all rows, exactly one time column), and
the bytes of the answers that carry columns.
Does not own: limits on rows, names and delays (`daemon.core.limits`), and what columns say together (engine).

The runtime turns a packed fixed64 field into an array in 2 us and 1 ns a row. The way back, `extend`, costs 30 to 50 ns
a row; a packed fixed field is its array's own bytes, so it is written as such (0.3 ns).

Dead letters on the wire: which are asked for, and a page of them.

Owns: the filter of a request and the columns of an answer.
Does not own: the bounds of a filter (`daemon.topic.topic_dead_letters`) and page tokens (`inspect_service`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from daemon import call_values, errors
from daemon.grpc_services import parsing
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import Rows
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2

# A count of redeliveries that no hand-out has.
COUNT_NONE = (1 << 32) - 1
# Of one `Messages`; at most 370 KB, which every limit on messages allows, also the 4 MiB of a gRPC client by default.
MESSAGES_ROWS_MAX = 10_000

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
T = TypeVar("T", bound=np.generic)

_PACKED = 2
_VARINT = 0


def _tag(field_number: int, wire_type: int) -> bytes:
    """The tag of a field with a number of at most 15."""
    return bytes((field_number << 3 | wire_type,))


def packed_tag(field_number: int) -> bytes:
    """The tag of a packed column; the field's number is at most 15."""
    return _tag(field_number, _PACKED)


_SMALL_VARINTS = [bytes((number,)) for number in range(0x80)]
_MESSAGES = dispatch_pb2.Messages
_EPOCH = _tag(_MESSAGES.EPOCH_FIELD_NUMBER, _VARINT)
_LEDGER_ID = _tag(_MESSAGES.LEDGER_ID_FIELD_NUMBER, _PACKED)
_ENTRY_ID = _tag(_MESSAGES.ENTRY_ID_FIELD_NUMBER, _PACKED)
_DELIVER_AT_MS = _tag(_MESSAGES.DELIVER_AT_MS_FIELD_NUMBER, _PACKED)
_KEY_HASH = _tag(_MESSAGES.KEY_HASH_FIELD_NUMBER, _PACKED)
_REDELIVERY_COUNT = _tag(_MESSAGES.REDELIVERY_COUNT_FIELD_NUMBER, _PACKED)
_BATCH_INDEX = _tag(_MESSAGES.BATCH_INDEX_FIELD_NUMBER, _PACKED)
_CONSUMER_ID = _tag(_MESSAGES.CONSUMER_ID_FIELD_NUMBER, _PACKED)
_STREAMED = _tag(dispatch_pb2.SubscribeResponse.MESSAGES_FIELD_NUMBER, _PACKED)
_PLANNED = _tag(dispatch_pb2.SubscribeResponse.PLANNED_FIELD_NUMBER, _PACKED)
_PLANNED_ID = _tag(dispatch_pb2.Planned.REQUEST_ID_FIELD_NUMBER, _VARINT)
_PLANNED_EPOCH = _tag(dispatch_pb2.Planned.EPOCH_FIELD_NUMBER, _VARINT)
_PLANNED_CONSUMER_ID = _tag(dispatch_pb2.Planned.CONSUMER_ID_FIELD_NUMBER, _PACKED)
_TAKEN_BACK = _tag(dispatch_pb2.SubscribeResponse.TAKEN_BACK_FIELD_NUMBER, _PACKED)
_TAKEN = dispatch_pb2.TakenBack
_TAKEN_EPOCH = _tag(_TAKEN.EPOCH_FIELD_NUMBER, _VARINT)
_TAKEN_COLUMNS = (
    _tag(_TAKEN.LEDGER_ID_FIELD_NUMBER, _PACKED),
    _tag(_TAKEN.ENTRY_ID_FIELD_NUMBER, _PACKED),
    _tag(_TAKEN.DELIVER_AT_MS_FIELD_NUMBER, _PACKED),
)
_TAKEN_BATCH_INDEX = _tag(_TAKEN.BATCH_INDEX_FIELD_NUMBER, _PACKED)
_TAKEN_CONSUMER_ID = _tag(_TAKEN.CONSUMER_ID_FIELD_NUMBER, _PACKED)
_LEASED = _tag(dispatch_pb2.GetScheduledMessagesResponse.MESSAGES_FIELD_NUMBER, _PACKED)
_add = delayed_delivery_pb2.AddMessagesResponse
_ACCEPTED = _tag(_add.ACCEPTED_FIELD_NUMBER, _VARINT)
_DUPLICATES = _tag(_add.DUPLICATES_FIELD_NUMBER, _VARINT)
_LATE_ON_ARRIVAL = _tag(_add.LATE_ON_ARRIVAL_FIELD_NUMBER, _VARINT)
_ADDED_ID = _tag(delayed_delivery_pb2.StreamAddMessagesResponse.REQUEST_ID_FIELD_NUMBER, _VARINT)
_ADDED = _tag(delayed_delivery_pb2.StreamAddMessagesResponse.ADDED_FIELD_NUMBER, _PACKED)
_RANGES = delayed_delivery_pb2.EntryRanges
_RANGE_COLUMNS = (
    _tag(_RANGES.LEDGER_ID_FIELD_NUMBER, _PACKED),
    _tag(_RANGES.FIRST_ENTRY_ID_FIELD_NUMBER, _PACKED),
    _tag(_RANGES.LAST_ENTRY_ID_FIELD_NUMBER, _PACKED),
)
_PENDING = _tag(delayed_delivery_pb2.ContainsMessagesResponse.PENDING_FIELD_NUMBER, _PACKED)
_DUE = _tag(delayed_delivery_pb2.ContainsMessagesResponse.DUE_FIELD_NUMBER, _PACKED)

# Of both lists of rows.
_ROW_COLUMNS = (
    _tag(inspect_pb2.ListScheduledResponse.LEDGER_ID_FIELD_NUMBER, _PACKED),
    _tag(inspect_pb2.ListScheduledResponse.ENTRY_ID_FIELD_NUMBER, _PACKED),
    _tag(inspect_pb2.ListScheduledResponse.DELIVER_AT_MS_FIELD_NUMBER, _PACKED),
)
_ROW_KEY_HASH = _tag(inspect_pb2.ListScheduledResponse.KEY_HASH_FIELD_NUMBER, _PACKED)
_BACKLOG = inspect_pb2.ListBacklogResponse
_STATE = _tag(_BACKLOG.STATE_FIELD_NUMBER, _PACKED)
_BACKLOG_REDELIVERY_COUNT = _tag(_BACKLOG.REDELIVERY_COUNT_FIELD_NUMBER, _PACKED)
_BACKLOG_BATCH_INDEX = _tag(_BACKLOG.BATCH_INDEX_FIELD_NUMBER, _PACKED)
_REDELIVER_AT_MS = _tag(_BACKLOG.REDELIVER_AT_MS_FIELD_NUMBER, _PACKED)

_already_due = delayed_delivery_pb2.AlreadyDue
_ALREADY_DUE = _already_due.DESCRIPTOR
_ALREADY_DUE_RETURN = _already_due.ALREADY_DUE_RETURN
_on_invalid = delayed_delivery_pb2.OnInvalid
_ON_INVALID = _on_invalid.DESCRIPTOR
_ON_INVALID_RETURN = _on_invalid.ON_INVALID_RETURN


class Positions(Protocol):
    """Positions in a request."""

    @property
    def ledger_id(self) -> Sequence[int]: ...
    @property
    def entry_id(self) -> Sequence[int]: ...


class Handed(Positions, Protocol):
    """Positions with the times that they were handed out with, in a request."""

    @property
    def deliver_at_ms(self) -> Sequence[int]: ...
    @property
    def batch_index(self) -> Sequence[int]: ...


class Named(Handed, Protocol):
    """Hand-outs by name, in a request."""

    @property
    def redelivery_count(self) -> Sequence[int]: ...


class Timed(Protocol):
    """The times of a request's rows, in one of two columns."""

    @property
    def deliver_at_ms(self) -> Sequence[int]: ...
    @property
    def delay_ms(self) -> Sequence[int]: ...


# Requests.


def add_batch(request: delayed_delivery_pb2.AddMessagesRequest) -> call_values.AddBatch:
    """The request's rows. Raises `InvalidArgument`."""
    if request.already_due:
        parsing.require_known("already_due", request.already_due, _ALREADY_DUE)
    if request.on_invalid:
        parsing.require_known("on_invalid", request.on_invalid, _ON_INVALID)
    ledger_id, entry_id = positions(request)
    rows = len(entry_id)
    _require_one_of({name: len(getattr(request, name)) for name in ("deliver_at_ms", "delay_ms", "delay_level")})
    deliver_at_ms, delay_ms = _times(request, rows)
    return call_values.AddBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=deliver_at_ms,
        delay_ms=delay_ms,
        key_hash=row_column("key_hash", request.key_hash, rows, np.uint32) if request.key_hash else None,
        return_already_due=request.already_due == _ALREADY_DUE_RETURN,
        delay_level=row_column("delay_level", request.delay_level, rows, np.int32) if request.delay_level else None,
        return_invalid=request.on_invalid == _ON_INVALID_RETURN,
    )


def positions(request: Positions) -> tuple[U64, U64]:
    """ledger_id and entry_id of the request's rows. Raises `InvalidArgument`."""
    rows = _row_count("entry_id", request.entry_id)
    return row_column("ledger_id", request.ledger_id, rows, np.uint64), np.array(request.entry_id, np.uint64)


def reschedule_batch(request: delayed_delivery_pb2.RescheduleMessagesRequest) -> call_values.RescheduleBatch:
    """The request's positions and their new times. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    _require_one_of({name: len(getattr(request, name)) for name in ("deliver_at_ms", "delay_ms")})
    deliver_at_ms, delay_ms = _times(request, len(entry_id))
    return call_values.RescheduleBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=deliver_at_ms,
        delay_ms=delay_ms,
        key_hash=row_column("key_hash", request.key_hash, len(entry_id), np.uint32) if request.key_hash else None,
    )


def _require_one_of(lengths: Mapping[str, int]) -> None:
    """`lengths`: of columns of which exactly one is given, by their names."""
    given = {name: length for name, length in lengths.items() if length}
    if not given:
        raise errors.InvalidArgument(f"{', '.join(lengths)}: none is given; give exactly one")
    if len(given) > 1:
        values = " and ".join(map(str, given.values()))
        which = "both" if len(given) == 2 else "all"
        raise errors.InvalidArgument(f"{', '.join(given)}: {which} are given, {values} values; give exactly one")


def _times(request: Timed, rows: int) -> tuple[U64 | None, U64 | None]:
    """deliver_at_ms and delay_ms, of which at most one is given."""
    deliver_at_ms, delay_ms = request.deliver_at_ms, request.delay_ms
    return (
        row_column("deliver_at_ms", deliver_at_ms, rows, np.uint64) if deliver_at_ms else None,
        row_column("delay_ms", delay_ms, rows, np.uint64) if delay_ms else None,
    )


def handed_out(request: Handed) -> call_values.HeldPositions:
    """Positions to acknowledge, or whose lease or time-out is moved. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    rows = len(entry_id)
    deliver_at_ms = row_column("deliver_at_ms", request.deliver_at_ms, rows, np.uint64)
    return call_values.HeldPositions(ledger_id, entry_id, deliver_at_ms, _batch_index(request.batch_index, rows))


def acknowledged(request: Named) -> call_values.HeldPositions:
    """Hand-outs to acknowledge. Raises `InvalidArgument`."""
    positions = handed_out(request)
    counts = redelivery_count("redelivery_count", request.redelivery_count, len(positions))
    return dataclasses.replace(positions, redelivery_count=counts)


def redelivery_count(field: str, values: Sequence[int], rows: int) -> U32 | None:
    """Which hand-outs are named; None: any. Raises `InvalidArgument`."""
    if not values:
        return None
    counts = row_column(field, values, rows, np.uint32)
    strange = np.flatnonzero(counts == COUNT_NONE)
    if len(strange):
        raise errors.InvalidArgument(
            f"{field}[{strange[0]}]: {COUNT_NONE}; it must be at most {COUNT_NONE - 1}, as handed out"
        )
    return counts


def nack(request: dispatch_pb2.NegativeAcknowledge | dispatch_pb2.NegativeAcknowledgeRequest) -> call_values.Nack:
    """Positions to redeliver or to reject. Raises `InvalidArgument`."""
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
        call_values.HeldPositions(
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
    """ledger_id, entry_id and hashes of the positions to plan. Raises `InvalidArgument`."""
    ledger_id, entry_id = positions(request)
    key_hash = row_column("key_hash", request.key_hash, len(entry_id), np.uint32) if request.key_hash else None
    return ledger_id, entry_id, key_hash


def _batch_index(values: Sequence[int], rows: int) -> U32 | None:
    """None when all rows are entries as a whole."""
    if not values:
        return None
    column = row_column("batch_index", values, rows, np.uint32)
    return None if (column == NO_BATCH_INDEX).all() else column


def held_by_consumers(request: dispatch_pb2.Open) -> call_values.HeldByConsumers:
    """The positions that the dispatcher's consumers still hold, maybe none. Raises `InvalidArgument`."""
    positions = held(request, "held_consumer_id")
    key_hash = np.array(request.held_key_hash, np.uint32) if request.held_key_hash else None
    return call_values.HeldByConsumers(positions, np.array(request.held_consumer_id, np.uint32), key_hash)


def held(request: dispatch_pb2.Open, *further: str) -> call_values.HeldPositions:
    """The positions that the dispatcher still holds, maybe none. `further`: columns that each of them stands in.

    Raises `InvalidArgument`.
    """
    always = ("held_ledger_id", "held_entry_id", "held_deliver_at_ms", *further)
    lengths = {name: len(getattr(request, name)) for name in always}
    columns = ("held_batch_index", "held_key_hash", "held_redelivery_count")
    optional = {name: len(getattr(request, name)) for name in columns}
    lengths |= {name: length for name, length in optional.items() if length}
    if len(set(lengths.values())) != 1:
        given = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise errors.InvalidArgument(f"held columns: {given} values; they must be of one length")
    return call_values.HeldPositions(
        ledger_id=np.array(request.held_ledger_id, np.uint64),
        entry_id=np.array(request.held_entry_id, np.uint64),
        deliver_at_ms=np.array(request.held_deliver_at_ms, np.uint64),
        batch_index=_batch_index(request.held_batch_index, len(request.held_entry_id)),
        redelivery_count=redelivery_count(
            "held_redelivery_count", request.held_redelivery_count, len(request.held_entry_id)
        ),
    )


def entry_ranges(request: delayed_delivery_pb2.ContainsMessagesRequest) -> call_values.EntryRanges:
    """What is asked for; a position is a range of one entry. Raises `InvalidArgument`."""
    rows = _row_count("entry_id", request.entry_id)
    ledger_id = row_column("ledger_id", request.ledger_id, rows, np.uint64)
    first = np.array(request.entry_id, np.uint64)
    if not request.last_entry_id:
        return call_values.EntryRanges(ledger_id, first, first)
    last = np.array(request.last_entry_id, np.uint64)
    if len(last) != rows:
        raise errors.InvalidArgument(
            f"last_entry_id: {len(last)} values for {rows} ranges (entry_id); give {rows}, or none for positions"
        )
    return call_values.EntryRanges(ledger_id, first, last)


def ledger_ranges(request: delayed_delivery_pb2.TrimMessagesRequest) -> call_values.LedgerRanges:
    """What is trimmed. Raises `InvalidArgument`."""
    rows = _row_count("ledger_id", request.ledger_id)
    if len(request.entry_id) != rows:
        raise errors.InvalidArgument(
            f"entry_id: {len(request.entry_id)} values for {rows} ledgers (ledger_id); give {rows}"
        )
    return call_values.LedgerRanges(
        np.array(request.ledger_id, np.uint64), np.array(request.entry_id, np.uint64), request.all_lower_ledgers
    )


# Answers.


# Answers that tell what was ignored.
TellsIgnored: TypeAlias = (
    dispatch_pb2.Done
    | dispatch_pb2.AcknowledgeResponse
    | dispatch_pb2.NegativeAcknowledgeResponse
    | dispatch_pb2.ExtendLeaseResponse
)


def fill_ignored(response: TellsIgnored, ignored: call_values.Ignored) -> None:
    """How many positions were ignored, which, and why."""
    if len(ignored):
        response.ignored = len(ignored)
        order = np.argsort(ignored.index)
        response.ignored_index.extend(ignored.index[order].tolist())
        response.ignored_reason.extend(_one_where_alike(ignored.reason[order]))


def _one_where_alike(reasons: npt.NDArray[np.uint8]) -> Any:
    """A list of the numbers of an enum of the wire: one for each row, or one for all."""
    return (reasons[:1] if (reasons == reasons[0]).all() else reasons).tolist()


def add_response(outcome: call_values.AddOutcome) -> bytes:
    """An encoded `AddMessagesResponse`."""
    encoded = _ACCEPTED + varint(outcome.accepted) if outcome.accepted else b""
    if outcome.duplicates:
        encoded += _DUPLICATES + varint(outcome.duplicates)
    if outcome.late_on_arrival:
        encoded += _LATE_ON_ARRIVAL + varint(outcome.late_on_arrival)
    if not (len(outcome.returned_index) or len(outcome.raised_index) or len(outcome.refused)):
        return encoded
    columns = delayed_delivery_pb2.AddMessagesResponse()
    columns.returned_index.extend(outcome.returned_index.tolist())
    columns.raised_index.extend(outcome.raised_index.tolist())
    columns.raised_deliver_at_ms.extend(outcome.raised_deliver_at_ms.tolist())
    if len(outcome.refused):
        columns.refused_index.extend(outcome.refused.index.tolist())
        columns.refused_reason.extend(_one_where_alike(outcome.refused.reason))
    return encoded + columns.SerializeToString()


def stream_add_response(request_id: int, outcome: call_values.AddOutcome) -> bytes:
    """An encoded `StreamAddMessagesResponse`."""
    return b"".join((_ADDED_ID, varint(request_id), nested(_ADDED, add_response(outcome))))


def cancel_response(outcome: call_values.CancelOutcome) -> delayed_delivery_pb2.CancelMessagesResponse:
    response = delayed_delivery_pb2.CancelMessagesResponse(cancelled=outcome.cancelled)
    _fill_refused(response, outcome)
    return response


def reschedule_response(outcome: call_values.RescheduleOutcome) -> delayed_delivery_pb2.RescheduleMessagesResponse:
    response = delayed_delivery_pb2.RescheduleMessagesResponse(rescheduled=outcome.rescheduled)
    _fill_refused(response, outcome)
    if len(outcome.raised_index):
        response.raised_index.extend(outcome.raised_index.tolist())
        response.raised_deliver_at_ms.extend(outcome.raised_deliver_at_ms.tolist())
    return response


def _fill_refused(
    response: delayed_delivery_pb2.CancelMessagesResponse | delayed_delivery_pb2.RescheduleMessagesResponse,
    outcome: call_values.CancelOutcome | call_values.RescheduleOutcome,
) -> None:
    for field, index in (
        (response.not_found_index, outcome.not_found),
        (response.already_due_index, outcome.already_due),
        (response.in_flight_index, outcome.in_flight),
    ):
        if len(index):
            field.extend(index.tolist())


def subscribe_responses(handed: call_values.HandedOut) -> Iterator[bytes]:
    """Encoded `SubscribeResponse`s with the rows as `Messages` of at most `MESSAGES_ROWS_MAX` rows."""
    for start in range(0, len(handed.rows), MESSAGES_ROWS_MAX):
        yield nested(_STREAMED, _messages(handed, slice(start, start + MESSAGES_ROWS_MAX)))


def planned_response(planned: call_values.Planned) -> bytes:
    """An encoded `SubscribeResponse` with the answer to a plan."""
    fields = [_PLANNED_ID, varint(planned.request_id), _PLANNED_EPOCH, varint(planned.epoch)]
    pack(fields, _PLANNED_CONSUMER_ID, planned.consumer_id, "<u4")
    return nested(_PLANNED, b"".join(fields))


def taken_back_responses(taken_back: call_values.TakenBack) -> Iterator[bytes]:
    """Encoded `SubscribeResponse`s with the rows as `TakenBack` of at most `MESSAGES_ROWS_MAX` rows."""
    for start in range(0, len(taken_back.rows.rows), MESSAGES_ROWS_MAX):
        yield nested(_TAKEN_BACK, _taken_back(taken_back.rows, slice(start, start + MESSAGES_ROWS_MAX)))


def leased_response(leased: call_values.Leased, rest: dispatch_pb2.GetScheduledMessagesResponse) -> bytes:
    """An encoded `GetScheduledMessagesResponse`; `rest` has what is not in the columns."""
    return nested(_LEASED, _messages(leased.handed_out, slice(None))) + rest.SerializeToString()


def contains_response(contained: call_values.Contained) -> bytes:
    """An encoded `ContainsMessagesResponse`."""
    encoded = nested(_PENDING, _entry_ranges(contained.pending)) + nested(_DUE, _entry_ranges(contained.due))
    if contained.continuation is None:
        return encoded
    index, entry_id = contained.continuation
    place = delayed_delivery_pb2.ContainsContinuation(index=index, entry_id=entry_id)
    return encoded + delayed_delivery_pb2.ContainsMessagesResponse(continuation=place).SerializeToString()


def scheduled_response(page: call_values.ScheduledPage, rest: inspect_pb2.ListScheduledResponse) -> bytes:
    """An encoded `ListScheduledResponse`; `rest` has what is not in the columns."""
    if page.subscription_index.any():
        rest.subscription_index.extend(page.subscription_index.tolist())
        rest.subscriptions.extend(page.subscriptions)
    return _rows(page.rows) + rest.SerializeToString()


def backlog_response(page: call_values.BacklogPage, rest: inspect_pb2.ListBacklogResponse) -> bytes:
    """An encoded `ListBacklogResponse`; `rest` has what is not in the columns."""
    state = np.where(page.in_flight, inspect_pb2.BACKLOG_STATE_IN_FLIGHT, inspect_pb2.BACKLOG_STATE_READY)
    fields: list[bytes] = []
    if page.redeliver_at_ms is not None:
        state[page.redeliver_at_ms > 0] = inspect_pb2.BACKLOG_STATE_NACKED
        pack(fields, _REDELIVER_AT_MS, page.redeliver_at_ms, "<u8")
    # Each is a varint of one byte.
    pack(fields, _STATE, state, "u1")
    if page.redelivery_count is not None:
        pack(fields, _BACKLOG_REDELIVERY_COUNT, page.redelivery_count, "<u4")
    if page.batch_index is not None:
        pack(fields, _BACKLOG_BATCH_INDEX, page.batch_index, "<u4")
    return _rows(page.rows) + b"".join(fields) + rest.SerializeToString()


# Encoded fields one after the other are an encoded message.


def _messages(handed: call_values.HandedOut, part: slice) -> bytes:
    rows = handed.rows
    fields = [_EPOCH, varint(handed.epoch)]
    pack(fields, _LEDGER_ID, rows.ledger_id[part], "<u8")
    pack(fields, _ENTRY_ID, rows.entry_id[part], "<u8")
    pack(fields, _DELIVER_AT_MS, rows.deliver_at_ms[part], "<u8")
    if rows.key_hash is not None:
        pack(fields, _KEY_HASH, rows.key_hash[part], "<u4")
    if handed.redelivery_count is not None and (counts := handed.redelivery_count[part]).any():
        pack(fields, _REDELIVERY_COUNT, counts, "<u4")
    if handed.batch_index is not None and ((batch_index := handed.batch_index[part]) != NO_BATCH_INDEX).any():
        pack(fields, _BATCH_INDEX, batch_index, "<u4")
    if handed.consumer_id is not None:
        pack(fields, _CONSUMER_ID, handed.consumer_id[part], "<u4")
    return b"".join(fields)


def _taken_back(taken: call_values.HandedOut, part: slice) -> bytes:
    rows = taken.rows
    fields = [_TAKEN_EPOCH, varint(taken.epoch)]
    for tag, column in zip(_TAKEN_COLUMNS, (rows.ledger_id, rows.entry_id, rows.deliver_at_ms), strict=True):
        pack(fields, tag, column[part], "<u8")
    if taken.batch_index is not None:
        pack(fields, _TAKEN_BATCH_INDEX, taken.batch_index[part], "<u4")
    if taken.consumer_id is not None:
        pack(fields, _TAKEN_CONSUMER_ID, taken.consumer_id[part], "<u4")
    return b"".join(fields)


def _rows(rows: Rows) -> bytes:
    fields: list[bytes] = []
    for tag, column in zip(_ROW_COLUMNS, (rows.ledger_id, rows.entry_id, rows.deliver_at_ms), strict=True):
        pack(fields, tag, column, "<u8")
    key_hash = np.zeros(len(rows), np.uint32) if rows.key_hash is None else rows.key_hash
    pack(fields, _ROW_KEY_HASH, key_hash, "<u4")
    return b"".join(fields)


def _entry_ranges(ranges: call_values.EntryRanges) -> bytes:
    fields: list[bytes] = []
    for tag, column in zip(
        _RANGE_COLUMNS, (ranges.ledger_id, ranges.first_entry_id, ranges.last_entry_id), strict=True
    ):
        pack(fields, tag, column, "<u8")
    return b"".join(fields)


def pack(fields: list[bytes], tag: bytes, column: npt.NDArray[T], form: str) -> None:
    """Appends a packed field; `form`: of one value, as numpy names it."""
    data = column.astype(form, copy=False).tobytes()
    fields += (tag, varint(len(data)), data)


def nested(tag: bytes, body: bytes) -> bytes:
    """A field that holds a message, or bytes."""
    return b"".join((tag, varint(len(body)), body))


def varint(number: int) -> bytes:
    """A number as the wire has it, in seven bits a byte."""
    if number <= 0x7F:
        return _SMALL_VARINTS[number]
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


def row_column(
    field: str, values: Sequence[int], rows: int, dtype: type[T], *, rows_of: str = "entry_id"
) -> npt.NDArray[T]:
    """A value for each row; a column of length 1 applies to all. `rows_of`: the column whose length is that of the
    rows. Raises `InvalidArgument`.
    """
    given = len(values)
    if given == rows:
        return np.array(values, dtype)
    if given == 1:
        column = np.empty(rows, dtype)
        column.fill(values[0])
        return column
    raise errors.InvalidArgument(f"{field}: {given} values for {rows} rows ({rows_of}); give {rows}, or 1 for all")


_RESPONSE: Final = inspect_pb2.ListDeadLettersResponse
_REASON: Final = packed_tag(_RESPONSE.REASON_FIELD_NUMBER)


def dead_letter_filter(request: inspect_pb2.DeadLetterFilter) -> call_values.DeadLetterFilter:
    """Reads the filter of a request. Raises `InvalidArgument` for a reason that is not known."""
    parsing.require_known("reason", request.reason, inspect_pb2.DeadLetterReason.DESCRIPTOR)
    ledgers = request.ledgers
    return call_values.DeadLetterFilter(
        ids=np.array(request.dead_letter_id, np.uint64) if request.dead_letter_id else None,
        ledgers=(ledgers.first_ledger_id, ledgers.last_ledger_id) if request.HasField("ledgers") else None,
        reason=request.reason or None,
        from_ms=request.from_ms or None,
        until_ms=request.until_ms or None,
    )


def dead_letter_page_response(page: call_values.DeadLetterPage, rest: inspect_pb2.ListDeadLettersResponse) -> bytes:
    """An encoded `ListDeadLettersResponse`; `rest` has what is not in the columns."""
    rows = page.rows
    fields: list[bytes] = []
    for number, column, form in (
        (_RESPONSE.DEAD_LETTER_ID_FIELD_NUMBER, rows.dead_letter_id, "<u8"),
        (_RESPONSE.LEDGER_ID_FIELD_NUMBER, rows.ledger_id, "<u8"),
        (_RESPONSE.ENTRY_ID_FIELD_NUMBER, rows.entry_id, "<u8"),
        (_RESPONSE.BATCH_INDEX_FIELD_NUMBER, rows.batch_index, "<u4"),
        (_RESPONSE.DELIVER_AT_MS_FIELD_NUMBER, rows.deliver_at_ms, "<u8"),
        (_RESPONSE.KEY_HASH_FIELD_NUMBER, rows.key_hash, "<u4"),
        (_RESPONSE.REDELIVERY_COUNT_FIELD_NUMBER, rows.redelivery_count, "<u4"),
        (_RESPONSE.DEAD_AT_MS_FIELD_NUMBER, rows.dead_at_ms, "<u8"),
    ):
        pack(fields, packed_tag(number), column, form)
    # Each is a varint of one byte.
    pack(fields, _REASON, rows.reason, "u1")
    rest.texts.extend(rows.texts)
    rest.text_index.extend(rows.text_index.tolist())
    return b"".join(fields) + rest.SerializeToString()
