"""Orders the rows of all indexes of a topic by position, with messages of batches next to their entries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daemon.core.backlog.in_flight import Mask
from daemon.core.index.position_keys import KeyedRows, PagePlaces
from storage_backends.formats.index_ids import are_of_batch_parts, of_part
from storage_backends.formats.row_columns import U64

# (ledger_id, entry_id, batch index + 1 or 0 for an entry as a whole) of n rows
Columns = tuple[U64, U64, U64]


class PositionOrder:
    """The order of a topic's positions; `places` are those of the topic."""

    def __init__(self, places: PagePlaces) -> None:
        self._places = places

    def columns(self, rows: KeyedRows) -> Columns:
        ledger_id, entry_id = rows.rows.ledger_id, rows.rows.entry_id
        parts = are_of_batch_parts(self._places.owners(rows.keys))
        if not parts.any():
            return ledger_id, entry_id, np.zeros(len(rows), np.uint64)
        entry_of_part, batch_index = of_part(entry_id)
        places = np.where(parts, batch_index.astype(np.uint64) + np.uint64(1), np.uint64(0))
        return ledger_id, np.where(parts, entry_of_part, entry_id), places

    def ordered(self, rows: KeyedRows) -> KeyedRows:
        """Return the rows by position."""
        return rows.take(np.lexsort(self.columns(rows)[::-1]))


def are_greater(columns: Columns, others: Sequence[U64]) -> Mask:
    """Return the mask of positions that come after others, pairwise."""
    greater: Mask = columns[-1] > others[-1]
    for column, other in zip(columns[-2::-1], others[-2::-1], strict=True):
        greater = (column > other) | ((column == other) & greater)
    return greater
