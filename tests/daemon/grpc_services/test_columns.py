"""Packed fields to columns and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine import calls
from daemon.grpc_services import columns
from storage_backends.formats.rows import Rows
from tarry.v1 import dispatch_pb2

U64 = st.integers(0, (1 << 64) - 1)


@given(
    positions=st.lists(st.tuples(U64, U64, U64, st.integers(0, (1 << 32) - 1)), min_size=1, max_size=40),
    hashes=st.booleans(),
    epoch=U64,
)
def test_messages_are_what_protobuf_reads(positions: list[tuple[int, int, int, int]], hashes: bool, epoch: int) -> None:
    due, ledgers, entries, keys = (list(column) for column in zip(*positions, strict=True))
    rows = Rows(
        np.array(due, np.uint64),
        np.array(ledgers, np.uint64),
        np.array(entries, np.uint64),
        np.array(keys, np.uint32) if hashes else None,
    )
    (data,) = columns.subscribe_responses(calls.HandedOut(epoch=epoch, rows=rows))
    expected = dispatch_pb2.SubscribeResponse(
        messages=dispatch_pb2.Messages(
            epoch=epoch, ledger_id=ledgers, entry_id=entries, deliver_at_ms=due, key_hash=keys if hashes else []
        )
    )
    assert dispatch_pb2.SubscribeResponse.FromString(data) == expected


@pytest.mark.parametrize(("rows", "sizes"), [(0, []), (1, [1]), (10_000, [10_000]), (20_001, [10_000, 10_000, 1])])
def test_rows_are_cut_into_messages_in_order(rows: int, sizes: list[int]) -> None:
    # Columns that are views with a stride are written like any other.
    column = np.arange(2 * rows, dtype=np.uint64)[::2]
    handed = calls.HandedOut(epoch=1, rows=Rows(column, column, column))
    parts = [dispatch_pb2.SubscribeResponse.FromString(data).messages for data in columns.subscribe_responses(handed)]
    assert [len(part.entry_id) for part in parts] == sizes
    assert [entry for part in parts for entry in part.entry_id] == column.tolist()
