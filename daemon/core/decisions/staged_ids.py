"""Keeps the schedule ids that staged decisions name, until these are applied.

`KEEP` sees rows that are staged. A cancellation, a reschedule and a `REPLACE` by id wait while a staged decision names
the id. The id map has applied rows alone, so both are found here.
"""

from __future__ import annotations

import numpy as np

from daemon.core.index.column_runs import ColumnRuns, Columns, Mask, Places, rows_of
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.id_map import FoundRows, HasIds
from daemon.core.index.position_keys import UNKNOWN_KEY
from storage_backends.formats.row_columns import U64

# Columns: hash, key (UNKNOWN_KEY if a decision takes rows out), time, number of the decision
_HIGH, _LOW, _KEY, _TIME, _NUMBER = range(5)


class StagedIds:
    """The ids of a topic's staged decisions, which are numbered from 1 and applied in this order."""

    def __init__(self) -> None:
        self._last = 0
        self._applied = 0
        self._rows = ColumnRuns(5, self._are_staged)

    def stage(self, hashes: IdHashes, keys: U64, deliver_at_ms: U64) -> int:
        """Note a decision that stores rows under ids; return its number."""
        self._last += 1
        number = np.full(hashes.rows, self._last, np.uint64)
        self._rows.add((hashes.high, hashes.low, keys, deliver_at_ms, number))
        # One step for each decision keeps the runs few; it looks at a bounded number of rows.
        self._rows.step(lambda _: True)
        return self._last

    def stage_leaving(self, hashes: IdHashes) -> int:
        """Note a decision that takes out rows under ids; return its number."""
        return self.stage(hashes, np.full(hashes.rows, UNKNOWN_KEY), np.zeros(hashes.rows, np.uint64))

    def applied(self, number: int) -> None:
        """Note that a decision, and all before it, are applied: their rows are in the id map."""
        self._applied = max(self._applied, number)
        if self._applied == self._last:
            self._rows = ColumnRuns(5, self._are_staged)

    def are_named(self, hashes: IdHashes) -> Mask:
        """Return the mask of ids that a staged decision names."""
        named = np.zeros(hashes.rows, np.bool_)
        asked, _ = self._staged(hashes)
        named[asked] = True
        return named

    def find(self, hashes: IdHashes, hidden: HasIds | None = None) -> FoundRows:
        """Return the rows that staged decisions store under distinct ids, none of which leaves.

        `hidden` says which positions a later staged decision empties.
        """
        asked, entries = self._staged(hashes)
        brings = entries[_KEY] != UNKNOWN_KEY
        if hidden is not None:
            brings &= ~hidden(entries[_KEY])
        order = np.flatnonzero(brings)[np.argsort(asked[brings], kind="stable")]
        nothing = np.zeros(len(order), np.bool_)
        return FoundRows(asked[order], entries[_KEY][order], entries[_TIME][order], nothing, hashes.rows)

    def _staged(self, hashes: IdHashes) -> tuple[Places, Columns]:
        """Return (place of the id, entry) of each staged row, those that take rows out included."""
        hits = self._rows.hits(hashes.high)
        if not hits:
            return np.empty(0, np.intp), (np.empty(0, np.uint64),) * 5
        asked, entries = rows_of(hits)
        kept = self._are_staged(entries) & (entries[_LOW] == hashes.low[asked])
        return asked[kept], tuple(column[kept] for column in entries)

    def _are_staged(self, entries: Columns) -> Mask:
        staged: Mask = entries[_NUMBER] > np.uint64(self._applied)
        return staged
