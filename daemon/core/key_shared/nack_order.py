"""Order that survives a negative acknowledgement (`nack_order` BLOCK_KEY): the later rows of a hash wait for the NACKED
one, also those that were delivered.

Owns: taking back what consumers hold behind a row that is NACKED.
Does not own: which hashes wait and for how long (`nack_blocks`), and what becomes of rows that were taken back
(`key_shared`).
"""

from __future__ import annotations

import numpy as np

from daemon.core.in_flight import InFlight, Mask
from daemon.core.key_shared.hash_slots import slots_of
from daemon.core.key_shared.nack_blocks import NackBlocks
from daemon.core.key_shared.position_order import PositionOrder, are_greater
from daemon.core.positions import KeyedRows
from storage_backends.formats.rows import U32


class BlockingNacks:
    """`blocks`: the hashes that wait."""

    def __init__(self, block_max_ms: int, in_flight: InFlight, order: PositionOrder) -> None:
        self.blocks = NackBlocks(block_max_ms)
        self._in_flight = in_flight
        self._order = order

    def take_behind(self, nacked: KeyedRows) -> tuple[KeyedRows, U32]:
        """Takes what is in flight behind NACKED rows of its hash: (these rows, who held each)."""
        slots = slots_of(nacked.key_hash())
        blocking = ~self.blocks.is_bounded_out(slots)
        rows, slots = nacked.take(blocking), slots[blocking]
        if not len(rows) or not len(self._in_flight):
            return KeyedRows.empty(), np.empty(0, np.uint32)
        columns = self._order.columns(rows)
        order = np.lexsort((*columns[::-1], slots))
        nacked_slots, first = np.unique(slots[order], return_index=True)
        firsts = [column[order[first]] for column in columns]

        def are_behind(held: KeyedRows, _: U32) -> Mask:
            held_slots = slots_of(held.key_hash())
            places = np.searchsorted(nacked_slots, held_slots)
            places[places == len(nacked_slots)] = 0
            behind: Mask = nacked_slots[places] == held_slots
            chosen = np.flatnonzero(behind)
            there = places[chosen]
            behind[chosen] = are_greater(self._order.columns(held.take(chosen)), [column[there] for column in firsts])
            return behind

        return self._in_flight.take_where(are_behind)
