"""Writes the answers that carry columns, as bytes.

A column's memory is a packed field as it is (0.3 ns a row); `extend` of the generated code takes 30 to 50 ns a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daemon import call_values
from daemon.core.decisions.add_decisions import AddOutcome
from daemon.core.decisions.claims import Ignored
from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleOutcome
from daemon.core.index.containment import Contained, EntryRanges
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import Rows
from tarry.packed_fields import Piece, nested, pack, tag_bytes, varint
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2

# Rows of one `Messages`. They take at most 370 KB, below every limit on messages, such as the 4 MiB of a gRPC client.
MESSAGES_ROWS_MAX = 10_000

_MESSAGES = tag_bytes(dispatch_pb2.Messages)
_SUBSCRIBE = tag_bytes(dispatch_pb2.SubscribeResponse)
_PLANNED = tag_bytes(dispatch_pb2.Planned)
_TAKEN_BACK = tag_bytes(dispatch_pb2.TakenBack)
_LEASED = tag_bytes(dispatch_pb2.GetScheduledMessagesResponse)
_ADDED = tag_bytes(delayed_delivery_pb2.AddMessagesResponse)
_STREAM_ADDED = tag_bytes(delayed_delivery_pb2.StreamAddMessagesResponse)
_RANGES = tag_bytes(delayed_delivery_pb2.EntryRanges)
_CONTAINED = tag_bytes(delayed_delivery_pb2.ContainsMessagesResponse)
_SCHEDULED = tag_bytes(inspect_pb2.ListScheduledResponse)
_BACKLOG = tag_bytes(inspect_pb2.ListBacklogResponse)
_DEAD_LETTERS = tag_bytes(inspect_pb2.ListDeadLettersResponse)

# Answers that report ignored positions
TellsIgnored: TypeAlias = (
    dispatch_pb2.Done
    | dispatch_pb2.AcknowledgeResponse
    | dispatch_pb2.NegativeAcknowledgeResponse
    | dispatch_pb2.ExtendLeaseResponse
)


def fill_ignored(response: TellsIgnored, ignored: Ignored) -> None:
    """Set how many positions were ignored, which, and why."""
    if len(ignored):
        response.ignored = len(ignored)
        order = np.argsort(ignored.index)
        response.ignored_index.extend(ignored.index[order].tolist())
        response.ignored_reason.extend(_one_where_alike(ignored.reason[order]))


def _one_where_alike(reasons: npt.NDArray[np.uint8]) -> Any:
    """Return numbers of an enum of the wire: one for each row, or one for all."""
    return (reasons[:1] if (reasons == reasons[0]).all() else reasons).tolist()


def add_response(outcome: AddOutcome) -> bytes:
    """Encode an `AddMessagesResponse`."""
    encoded = _ADDED["accepted"] + varint(outcome.accepted) if outcome.accepted else b""
    if outcome.duplicates:
        encoded += _ADDED["duplicates"] + varint(outcome.duplicates)
    if outcome.late_on_arrival:
        encoded += _ADDED["late_on_arrival"] + varint(outcome.late_on_arrival)
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


def stream_add_response(request_id: int, outcome: AddOutcome) -> bytes:
    """Encode a `StreamAddMessagesResponse`."""
    return b"".join(
        (_STREAM_ADDED["request_id"], varint(request_id), nested(_STREAM_ADDED["added"], add_response(outcome)))
    )


def cancel_response(outcome: CancelOutcome) -> delayed_delivery_pb2.CancelMessagesResponse:
    response = delayed_delivery_pb2.CancelMessagesResponse(cancelled=outcome.cancelled)
    _fill_refused(response, outcome)
    return response


def reschedule_response(outcome: RescheduleOutcome) -> delayed_delivery_pb2.RescheduleMessagesResponse:
    response = delayed_delivery_pb2.RescheduleMessagesResponse(rescheduled=outcome.rescheduled)
    _fill_refused(response, outcome)
    if len(outcome.raised_index):
        response.raised_index.extend(outcome.raised_index.tolist())
        response.raised_deliver_at_ms.extend(outcome.raised_deliver_at_ms.tolist())
    return response


def _fill_refused(
    response: delayed_delivery_pb2.CancelMessagesResponse | delayed_delivery_pb2.RescheduleMessagesResponse,
    outcome: CancelOutcome | RescheduleOutcome,
) -> None:
    for field, index in (
        (response.not_found_index, outcome.not_found),
        (response.already_due_index, outcome.already_due),
        (response.in_flight_index, outcome.in_flight),
    ):
        if len(index):
            field.extend(index.tolist())


def subscribe_responses(handed: call_values.HandedOut) -> Iterator[bytes]:
    """Encode rows as `SubscribeResponse`s with `Messages` of at most `MESSAGES_ROWS_MAX` rows."""
    for start in range(0, len(handed.rows), MESSAGES_ROWS_MAX):
        yield nested(_SUBSCRIBE["messages"], _messages(handed, slice(start, start + MESSAGES_ROWS_MAX)))


def planned_response(planned: call_values.Planned) -> bytes:
    """Encode a `SubscribeResponse` with the answer to a plan."""
    fields: list[Piece] = [_PLANNED["request_id"], varint(planned.request_id), _PLANNED["epoch"], varint(planned.epoch)]
    pack(fields, _PLANNED["consumer_id"], planned.consumer_id, "<u4")
    return nested(_SUBSCRIBE["planned"], b"".join(fields))


def taken_back_responses(taken_back: call_values.TakenBack) -> Iterator[bytes]:
    """Encode rows as `SubscribeResponse`s with `TakenBack` of at most `MESSAGES_ROWS_MAX` rows."""
    for start in range(0, len(taken_back.rows.rows), MESSAGES_ROWS_MAX):
        yield nested(_SUBSCRIBE["taken_back"], _taken_back(taken_back.rows, slice(start, start + MESSAGES_ROWS_MAX)))


def leased_response(leased: call_values.Leased, rest: dispatch_pb2.GetScheduledMessagesResponse) -> bytes:
    """Encode a `GetScheduledMessagesResponse`; `rest` has all but the columns."""
    return nested(_LEASED["messages"], _messages(leased.handed_out, slice(None))) + rest.SerializeToString()


def contains_response(contained: Contained) -> bytes:
    """Encode a `ContainsMessagesResponse`."""
    encoded = nested(_CONTAINED["pending"], _entry_ranges(contained.pending)) + nested(
        _CONTAINED["due"], _entry_ranges(contained.due)
    )
    if contained.continuation is None:
        return encoded
    index, entry_id = contained.continuation
    place = delayed_delivery_pb2.ContainsContinuation(index=index, entry_id=entry_id)
    return encoded + delayed_delivery_pb2.ContainsMessagesResponse(continuation=place).SerializeToString()


def scheduled_response(page: call_values.ScheduledPage, rest: inspect_pb2.ListScheduledResponse) -> bytes:
    """Encode a `ListScheduledResponse`; `rest` has all but the columns."""
    if page.subscription_index.any():
        rest.subscription_index.extend(page.subscription_index.tolist())
        rest.subscriptions.extend(page.subscriptions)
    return _rows(page.rows) + rest.SerializeToString()


def backlog_response(page: call_values.BacklogPage, rest: inspect_pb2.ListBacklogResponse) -> bytes:
    """Encode a `ListBacklogResponse`; `rest` has all but the columns."""
    state = np.where(page.in_flight, inspect_pb2.BACKLOG_STATE_IN_FLIGHT, inspect_pb2.BACKLOG_STATE_READY)
    fields: list[Piece] = []
    if page.redeliver_at_ms is not None:
        state[page.redeliver_at_ms > 0] = inspect_pb2.BACKLOG_STATE_NACKED
        pack(fields, _BACKLOG["redeliver_at_ms"], page.redeliver_at_ms, "<u8")
    # Each is a varint of one byte.
    pack(fields, _BACKLOG["state"], state, "u1")
    if page.redelivery_count is not None:
        pack(fields, _BACKLOG["redelivery_count"], page.redelivery_count, "<u4")
    if page.batch_index is not None:
        pack(fields, _BACKLOG["batch_index"], page.batch_index, "<u4")
    return _rows(page.rows) + b"".join(fields) + rest.SerializeToString()


def _messages(handed: call_values.HandedOut, part: slice) -> bytes:
    rows = handed.rows
    fields: list[Piece] = [_MESSAGES["epoch"], varint(handed.epoch)]
    pack(fields, _MESSAGES["ledger_id"], rows.ledger_id[part], "<u8")
    pack(fields, _MESSAGES["entry_id"], rows.entry_id[part], "<u8")
    pack(fields, _MESSAGES["deliver_at_ms"], rows.deliver_at_ms[part], "<u8")
    if rows.key_hash is not None:
        pack(fields, _MESSAGES["key_hash"], rows.key_hash[part], "<u4")
    if handed.redelivery_count is not None and (counts := handed.redelivery_count[part]).any():
        pack(fields, _MESSAGES["redelivery_count"], counts, "<u4")
    if handed.batch_index is not None and ((batch_index := handed.batch_index[part]) != NO_BATCH_INDEX).any():
        pack(fields, _MESSAGES["batch_index"], batch_index, "<u4")
    if handed.consumer_id is not None:
        pack(fields, _MESSAGES["consumer_id"], handed.consumer_id[part], "<u4")
    return b"".join(fields)


def _taken_back(taken: call_values.HandedOut, part: slice) -> bytes:
    rows = taken.rows
    fields: list[Piece] = [_TAKEN_BACK["epoch"], varint(taken.epoch)]
    pack(fields, _TAKEN_BACK["ledger_id"], rows.ledger_id[part], "<u8")
    pack(fields, _TAKEN_BACK["entry_id"], rows.entry_id[part], "<u8")
    pack(fields, _TAKEN_BACK["deliver_at_ms"], rows.deliver_at_ms[part], "<u8")
    if taken.batch_index is not None:
        pack(fields, _TAKEN_BACK["batch_index"], taken.batch_index[part], "<u4")
    if taken.consumer_id is not None:
        pack(fields, _TAKEN_BACK["consumer_id"], taken.consumer_id[part], "<u4")
    return b"".join(fields)


def _rows(rows: Rows) -> bytes:
    fields: list[Piece] = []
    pack(fields, _SCHEDULED["ledger_id"], rows.ledger_id, "<u8")
    pack(fields, _SCHEDULED["entry_id"], rows.entry_id, "<u8")
    pack(fields, _SCHEDULED["deliver_at_ms"], rows.deliver_at_ms, "<u8")
    key_hash = np.zeros(len(rows), np.uint32) if rows.key_hash is None else rows.key_hash
    pack(fields, _SCHEDULED["key_hash"], key_hash, "<u4")
    return b"".join(fields)


def _entry_ranges(ranges: EntryRanges) -> bytes:
    fields: list[Piece] = []
    pack(fields, _RANGES["ledger_id"], ranges.ledger_id, "<u8")
    pack(fields, _RANGES["first_entry_id"], ranges.first_entry_id, "<u8")
    pack(fields, _RANGES["last_entry_id"], ranges.last_entry_id, "<u8")
    return b"".join(fields)


def dead_letter_page_response(page: call_values.DeadLetterPage, rest: inspect_pb2.ListDeadLettersResponse) -> bytes:
    """Encode a `ListDeadLettersResponse`; `rest` has all but the columns."""
    rows = page.rows
    fields: list[Piece] = []
    for name in ("dead_letter_id", "ledger_id", "entry_id", "deliver_at_ms", "dead_at_ms"):
        pack(fields, _DEAD_LETTERS[name], getattr(rows, name), "<u8")
    for name in ("batch_index", "key_hash", "redelivery_count"):
        pack(fields, _DEAD_LETTERS[name], getattr(rows, name), "<u4")
    # Each is a varint of one byte.
    pack(fields, _DEAD_LETTERS["reason"], rows.reason, "u1")
    rest.texts.extend(rows.texts)
    rest.text_index.extend(rows.text_index.tolist())
    return b"".join(fields) + rest.SerializeToString()
