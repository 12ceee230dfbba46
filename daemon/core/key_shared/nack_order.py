"""Order that survives a negative acknowledgement (`nack_order` BLOCK_KEY): the later rows of a hash wait for the NACKED
one, also those that were delivered.

Owns: taking back what consumers hold behind a row that is NACKED.
Does not own: which hashes wait and for how long (`nack_blocks`), and what becomes of rows that were taken back
(`key_share`).
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight, Mask
from daemon.core.index.positions import KeyedRows, bitmap_of, contained
from daemon.core.key_shared.hash_slots import U16, slots_of
from daemon.core.key_shared.nack_blocks import NackBlocks
from daemon.core.key_shared.position_order import PositionOrder, are_greater
from storage_backends.formats.row_columns import U32, U64


class BlockingNacks:
    """`blocks`: the hashes that wait. `taken_back`: rows that were taken back and not handed out again."""

    def __init__(self, block_max_ms: int, in_flight: InFlight, order: PositionOrder) -> None:
        self.blocks = NackBlocks(block_max_ms)
        self.taken_back = BitMap64()
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

        taken, holders = self._in_flight.take_where(are_behind)
        self.taken_back |= bitmap_of(taken.keys)
        return taken, holders

    def are_kept_back(self, keys: U64, slots: U16) -> Mask:
        """Which rows, of these that are neither in flight nor NACKED, nobody may acknowledge or hold: they wait for a
        NACKED one, or come again behind one.
        """
        kept_back = np.zeros(len(keys), np.bool_)
        if self.blocks.any_blocked:
            kept_back |= self.blocks.are_blocked(slots)
        if self.taken_back:
            kept_back |= contained(keys, self.taken_back) & ~self.blocks.is_bounded_out(slots)
        return kept_back
