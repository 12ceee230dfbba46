"""The table of rows has the schedule id of each row, null for a row without one."""

from __future__ import annotations

import numpy as np

from batch.engine.topic_contents import UnsealedRows
from batch.tables import tables
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.memory_store import MemoryStore


def ids_read(ids: ScheduleIds | None) -> list[str | None]:
    entries = np.arange(9, dtype=np.uint64)
    rows = Rows(entries, entries, entries, None, ids)
    part = tables.RowsPart((tables._Source("t", None, UnsealedRows(0, rows, {})),))
    (batch,) = tables.read(part, MemoryStore())
    batch.validate(full=True)
    read: list[str | None] = batch.column("schedule_id").to_pylist()
    return read


def test_each_row_has_its_id_or_null() -> None:
    listed = ["", "order-1", "", "\u20ac", "order-4", "", "", "", "x"]
    encoded = [each.encode() for each in listed]
    ids = ScheduleIds.of_piece(np.array(list(map(len, encoded)), np.uint64), b"".join(encoded))
    assert ids_read(ids) == [each or None for each in listed]
    assert ids_read(ids.take(np.arange(8, -1, -1))) == [each or None for each in listed[::-1]]
    assert ids_read(ScheduleIds.none(9)) == [None] * 9


def test_rows_without_ids_have_null() -> None:
    assert ids_read(None) == [None] * 9
