"""Answers with columns are what the generated code reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import call_values
from daemon.core.decisions.add_decisions import AddOutcome, Refused
from daemon.grpc_services import row_answers
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import Rows
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

U64 = st.integers(0, (1 << 64) - 1)


U32 = st.integers(0, (1 << 32) - 1)


@given(
    counts=st.tuples(*[st.integers(0, 1_000_000)] * 3),
    returned=st.lists(U32, max_size=3),
    raised=st.lists(st.tuples(U32, U64), max_size=3),
    refused=st.lists(st.tuples(U32, st.integers(1, 3)), max_size=3),
    request_id=U64,
)
def test_the_answer_to_an_add_is_what_protobuf_reads(
    counts: tuple[int, ...],
    returned: list[int],
    raised: list[tuple[int, int]],
    refused: list[tuple[int, int]],
    request_id: int,
) -> None:
    accepted, duplicates, late_on_arrival = counts
    index = [row for row, _ in refused]
    reason = [delayed_delivery_pb2.RefusedReason.ValueType(reason) for _, reason in refused]
    outcome = AddOutcome(
        accepted,
        duplicates,
        np.array(returned, np.uint32),
        late_on_arrival,
        np.array([row for row, _ in raised], np.uint32),
        np.array([time for _, time in raised], np.uint64),
        Refused(np.array(index, np.uint32), np.array(reason, np.uint8)),
    )
    expected = delayed_delivery_pb2.AddMessagesResponse(
        accepted=accepted,
        duplicates=duplicates,
        returned_index=returned,
        late_on_arrival=late_on_arrival,
        raised_index=[row for row, _ in raised],
        raised_deliver_at_ms=[time for _, time in raised],
        refused_index=index,
        refused_reason=reason[:1] if len(set(reason)) == 1 else reason,
    )
    answer = row_answers.add_response(outcome)
    assert delayed_delivery_pb2.AddMessagesResponse.FromString(answer) == expected
    streamed = row_answers.stream_add_response(request_id, outcome)
    assert delayed_delivery_pb2.StreamAddMessagesResponse.FromString(
        streamed
    ) == delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request_id, added=expected)


@given(
    positions=st.lists(st.tuples(U64, U64, U64, U32, U32, U32), min_size=1, max_size=40),
    hashes=st.booleans(),
    redelivered=st.booleans(),
    parts=st.booleans(),
    epoch=U64,
)
def test_messages_are_what_protobuf_reads(
    positions: list[tuple[int, ...]], hashes: bool, redelivered: bool, parts: bool, epoch: int
) -> None:
    due, ledgers, entries, keys, counts, indexes = (list(column) for column in zip(*positions, strict=True))
    rows = Rows(
        np.array(due, np.uint64),
        np.array(ledgers, np.uint64),
        np.array(entries, np.uint64),
        np.array(keys, np.uint32) if hashes else None,
    )
    handed = call_values.HandedOut(
        epoch=epoch,
        rows=rows,
        redelivery_count=np.array(counts, np.uint32) if redelivered else None,
        batch_index=np.array(indexes, np.uint32) if parts else None,
    )
    (data,) = row_answers.subscribe_responses(handed)
    expected = dispatch_pb2.SubscribeResponse(
        messages=dispatch_pb2.Messages(
            epoch=epoch,
            ledger_id=ledgers,
            entry_id=entries,
            deliver_at_ms=due,
            key_hash=keys if hashes else [],
            redelivery_count=counts if redelivered and any(counts) else [],
            batch_index=indexes if parts and any(each != NO_BATCH_INDEX for each in indexes) else [],
        )
    )
    assert dispatch_pb2.SubscribeResponse.FromString(data) == expected


def test_a_part_of_what_is_handed_out_has_no_column_that_none_of_its_rows_needs() -> None:
    column, numbers = np.arange(20_000, dtype=np.uint64), np.arange(20_000, dtype=np.uint32)
    handed = call_values.HandedOut(
        epoch=1,
        rows=Rows(column, column, column),
        redelivery_count=np.where(numbers < 10_000, 0, numbers).astype(np.uint32),
        batch_index=np.where(numbers < 10_000, 3, NO_BATCH_INDEX).astype(np.uint32),
    )
    first, second = (
        dispatch_pb2.SubscribeResponse.FromString(data).messages for data in row_answers.subscribe_responses(handed)
    )
    assert (len(first.redelivery_count), len(first.batch_index)) == (0, 10_000)
    assert (len(second.redelivery_count), len(second.batch_index)) == (10_000, 0)


@pytest.mark.parametrize(("rows", "sizes"), [(0, []), (1, [1]), (10_000, [10_000]), (20_001, [10_000, 10_000, 1])])
def test_rows_are_cut_into_messages_in_order(rows: int, sizes: list[int]) -> None:
    # Columns that are views with a stride are written like any other.
    column = np.arange(2 * rows, dtype=np.uint64)[::2]
    handed = call_values.HandedOut(epoch=1, rows=Rows(column, column, column))
    parts = [
        dispatch_pb2.SubscribeResponse.FromString(data).messages for data in row_answers.subscribe_responses(handed)
    ]
    assert [len(part.entry_id) for part in parts] == sizes
    assert [entry for part in parts for entry in part.entry_id] == column.tolist()
