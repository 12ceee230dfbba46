"""Rows with keys, as the modules of key order take them.

Owns: making them, and telling which they are.
Does not own: what is right (the tests).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from daemon.core.index.position_keys import KeyedRows, PagePlaces, PageTable
from daemon.core.key_shared.hash_slots import U16
from storage_backends.formats.row_columns import U32, Rows
from tests.daemon.core._support.journaled_topic import Position


class Keyed:
    """Rows of one index. `places`: of its topic."""

    def __init__(self, places: PagePlaces | None = None, *, owner: int = 0) -> None:
        self.places = PagePlaces() if places is None else places
        self._pages = PageTable(self.places, owner=owner)

    def rows(self, given: Sequence[tuple[Position, int]], *, deliver_at_ms: int = 1_000) -> KeyedRows:
        """Rows of (position, key hash)."""
        rows = Rows(
            np.full(len(given), deliver_at_ms, np.uint64),
            np.array([at[0] for at, _ in given], np.uint64),
            np.array([at[1] for at, _ in given], np.uint64),
            np.array([key for _, key in given], np.uint32),
        )
        return KeyedRows(rows, self._pages.intern(rows.ledger_id, rows.entry_id))

    def of_slots(self, first_entry: int, *slots: int) -> KeyedRows:
        """One row for each slot, in this order, of ledger 1."""
        return self.rows([((1, first_entry + number), slot) for number, slot in enumerate(slots)])


def entries(rows: KeyedRows) -> list[int]:
    found: list[int] = rows.rows.entry_id.tolist()
    return found


def u16(*values: int) -> U16:
    return np.array(values, np.uint16)


def u32(values: Iterable[int]) -> U32:
    return np.array(list(values), np.uint32)
