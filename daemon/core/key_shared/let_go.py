"""Rows that must wait for their hash and for which there is no room: they stay in the backlog, and are read again.

Owns: of which hashes rows were let go, and the reader that finds them again, in order.
Does not own: reading (`feeding`), and what waits in memory (`waiting_rows`).

It begins when too many rows wait: what waits then stays, and the reader stands behind it. From then on a row that must
wait is let go, and with it all later rows of its hash, until the reader has found everything and is where the head is.
So a consumer without permits costs no memory, and nobody else waits for it.
"""

from __future__ import annotations

import numpy as np

from daemon.core.backlog_reader import BacklogReader
from daemon.core.in_flight import Mask
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, slots_of
from daemon.core.positions import KeyedRows
from daemon.core.runs import earliest, first_time_ms


class LetGo:
    """`reader`: behind everything that is in hand. `first_ms`: no row that was let go and not read again has a time
    before; None when there is none.
    """

    def __init__(self, reader: BacklogReader) -> None:
        self.reader = reader
        self.first_ms: int | None = None
        self._slots = np.zeros(HASH_SLOTS, np.bool_)

    def add(self, rows: KeyedRows) -> None:
        self._slots[slots_of(rows.key_hash())] = True
        self.first_ms = earliest(self.first_ms, first_time_ms(rows.rows.deliver_at_ms, 1))

    def are_let_go(self, slots: U16) -> Mask:
        """Which slots are of rows that were let go: whatever comes later waits for these."""
        let_go: Mask = self._slots[slots]
        return let_go

    def found(self, rows: KeyedRows) -> KeyedRows:
        """Those of rows that were read which had been let go. `rows`: in due order, at nobody."""
        if len(rows):
            self.first_ms = int(rows.rows.deliver_at_ms[-1]) or None
        return rows.take(self._slots[slots_of(rows.key_hash())])
