"""Dead letters on the wire: which are asked for, and a page of them.

Owns: the filter of a request and the columns of an answer.
Does not own: the bounds of a filter (`daemon.topic.topic_dead_letters`) and page tokens (`inspect_service`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from daemon import call_values
from daemon.grpc_services import parsing, wire_columns
from tarry.v1 import inspect_pb2

_RESPONSE: Final = inspect_pb2.ListDeadLettersResponse
_REASON: Final = wire_columns.packed_tag(_RESPONSE.REASON_FIELD_NUMBER)


def filter_of(request: inspect_pb2.DeadLetterFilter) -> call_values.DeadLetterFilter:
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


def page_response(page: call_values.DeadLetterPage, rest: inspect_pb2.ListDeadLettersResponse) -> bytes:
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
        wire_columns.pack(fields, wire_columns.packed_tag(number), column, form)
    # Each is a varint of one byte.
    wire_columns.pack(fields, _REASON, rows.reason, "u1")
    rest.texts.extend(rows.texts)
    rest.text_index.extend(rows.text_index.tolist())
    return b"".join(fields) + rest.SerializeToString()
