"""Who holds rows of each hash, until what is decided of them is durable.

Owns: that a hash stays with its consumer while that holds rows of it, and while a decision on these is staged: after a
crash they would come again, behind rows that went to somebody else meanwhile.
Does not own: the counts (`draining_hashes`), and IN_FLIGHT (`in_flight`), which it watches.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight
from daemon.core.index.positions import KeyedRows, bitmap_of, contained
from daemon.core.key_shared.draining_hashes import DrainingHashes
from daemon.core.key_shared.hash_slots import slots_of
from daemon.core.key_shared.key_consumers import Consumers
from storage_backends.formats.row_columns import U32, U64


class HashHolds:
    """Watches what is IN_FLIGHT. `draining`: who holds what of each hash."""

    def __init__(self, consumers: Consumers) -> None:
        self.draining = DrainingHashes()
        self._consumers = consumers
        # Rows that were in flight, of which a decision is staged.
        self._leaving = InFlight()

    # ---- the watcher of IN_FLIGHT

    def came(self, rows: KeyedRows, dispatchers: U32) -> None:
        self.draining.received(slots_of(rows.key_hash()), self._consumers.ordinals_of(dispatchers))

    def claimed(self, rows: KeyedRows, dispatchers: U32) -> None:
        self._leaving.add(rows, dispatchers)

    def returned(self, rows: KeyedRows, dispatchers: U32) -> None:
        self.draining.settled(slots_of(rows.key_hash()), self._consumers.ordinals_of(dispatchers))

    # ---- decisions

    def settle(self, keys: BitMap64) -> None:
        """What was decided of rows is durable, or needs not be."""
        if len(self._leaving):
            rows, dispatchers = self._take(keys)
            if len(rows):
                self.returned(rows, dispatchers)
                self.forget_departed()

    def forget_departed(self) -> None:
        """Consumers that have left, and that nothing is waited for of, are not known any more."""
        for number in self._consumers.departed:
            if not self._leaving.held_rows(number):
                self._consumers.forget(number)

    def rename(self, keys: U64, new_keys: U64) -> None:
        """Rows of which a decision is being staged have other keys from now on."""
        rows, holders = self._take(bitmap_of(keys))
        if len(rows):
            order = np.argsort(keys)
            places = order[np.searchsorted(keys, rows.keys, sorter=order)]
            self._leaving.add(KeyedRows(rows.rows, new_keys[places]), holders)

    def _take(self, keys: BitMap64) -> tuple[KeyedRows, U32]:
        """Takes those of the rows out of which a decision is staged: (these, who held each)."""
        return self._leaving.take_where(lambda each, _: contained(each.keys, keys))
