"""Rows that must wait for their hash and for which there is no room: they stay in the backlog, and are sought again.

Owns: of which hashes rows were let go, and which of these a reader of the backlog seeks.
Does not own: reading (`feeding`), what waits in memory (`waiting_rows`), and which hashes may go (`key_share`).

When too many rows wait, those of hashes that cannot go now are let go, and so is what comes later of these. When some
of the hashes can go, a reader looks through the backlog from the beginning: what it finds of them waits in memory
again. At the end nothing of them is let go any more. Of those of which it passed a row over that was READY just then it
seeks no more: that may be let go later, behind it, and goes before the later ones. So a consumer without permits costs
no memory, and nobody waits for it.
"""

from __future__ import annotations

import numpy as np

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.in_flight import Mask
from daemon.core.index.positions import KeyedRows
from daemon.core.index.runs import earliest, first_time_ms
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, slots_of
from daemon.core.key_shared.key_planning import before_refused


class LetGo:
    """`slots`: bool[65536], of which rows were let go. `reader`: while some of them are sought. `first_ms`: no row that
    was let go has a time before; None when none was.
    """

    def __init__(self) -> None:
        self.slots: Mask = np.zeros(HASH_SLOTS, np.bool_)
        self.reader: BacklogReader | None = None
        self.first_ms: int | None = None
        self._sought: Mask = np.zeros(HASH_SLOTS, np.bool_)
        self._again: Mask = np.zeros(HASH_SLOTS, np.bool_)

    def add(self, rows: KeyedRows) -> None:
        """Rows that just came are let go."""
        self.slots[slots_of(rows.key_hash())] = True
        self.first_ms = earliest(self.first_ms, first_time_ms(rows.rows.deliver_at_ms, 1))

    def evict(self, rows: KeyedRows) -> None:
        """Rows that waited are let go: the reader may be behind them."""
        self.add(rows)
        self._sought[slots_of(rows.key_hash())] = False

    def are_let_go(self, slots: U16) -> Mask:
        """Which slots are of rows that were let go: whatever comes later waits for these."""
        let_go: Mask = self.slots[slots]
        return let_go

    def seek(self, able: Mask, reader: BacklogReader) -> None:
        """Looks for rows of the slots that may go. `reader`: at the beginning."""
        self.reader = reader
        self._sought = self.slots & able
        self._again[:] = False

    def seek_again(self) -> None:
        """A row may have come into the backlog behind the reader."""
        self._again[:] = True

    def found(self, rows: KeyedRows, passed_over: KeyedRows) -> KeyedRows:
        """The sought ones of the rows that the reader found at nobody. `passed_over`: those that are READY."""
        chosen = self._sought[slots_of(rows.key_hash())]
        if len(passed_over):
            # What is behind a READY row of its slot must not overtake it.
            chosen &= _before(rows, passed_over)
            self._sought[slots_of(passed_over.key_hash())] = False
        return rows.take(chosen)

    def end(self) -> None:
        """The reader is at the end."""
        self.reader = None
        self.slots &= ~self._sought | self._again
        self._sought[:] = False
        if not self.slots.any():
            self.first_ms = None


def _before(rows: KeyedRows, others: KeyedRows) -> Mask:
    """Which of the rows are due before all of the others of their slot."""
    together = KeyedRows.concat([rows, others])
    order = together.rows.due_order()
    before = np.empty(len(together), np.bool_)
    before[order] = before_refused(slots_of(together.key_hash())[order], order >= len(rows))
    return before[: len(rows)]
