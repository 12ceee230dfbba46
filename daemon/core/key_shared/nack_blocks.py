"""Blocks hashes that wait for a negatively acknowledged position (`nack_order` BLOCK_KEY).

A hash is blocked while one of its positions is NACKED, so that this one is redelivered before the later ones. Later
ones that were delivered already are taken back. `nack_decisions` knows when a position is redelivered; `key_share`
keeps the rows that were taken back.

A position that never succeeds would hold up its hash for good. Positions are outstanding from when they are NACKED
until they leave the backlog. A hash that had outstanding positions for as long as the bound, without a break, no longer
blocks until none is outstanding.

Memory: 17 bytes for each hash slot in use, and 10 to 35 bytes for each outstanding position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight
from daemon.core.index.position_keys import (
    KeyedRows,
    KeyIndex,
    Mask,
    PositionOrder,
    are_greater,
    bitmap_of,
    contained,
    keys_of,
)
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, slots_of
from storage_backends.formats.row_columns import U32, U64

_ONE = np.uint32(1)
# Columns are packed when at least this many rows are there and most of them have left.
PACKED_MIN = 1024


class NackBlocks:
    """The blocked hashes of one subscription, by the keys of positions.

    `block_max_ms` is the bound. `elapsed_ms` is the time now by a clock that never steps. `blocked_hashes` is their
    number.
    """

    def __init__(self, block_max_ms: int) -> None:
        self._block_max_ms = block_max_ms
        self._nacked = BitMap64()
        self._outstanding = BitMap64()
        # By hash slot: NACKED positions, outstanding ones, since when there are any, and whether that exceeds the bound
        self._nacked_rows: U32 = np.zeros(HASH_SLOTS, np.uint32)
        self._outstanding_rows: U32 = np.zeros(HASH_SLOTS, np.uint32)
        self._since_ms: U64 = np.zeros(HASH_SLOTS, np.uint64)
        self._is_bounded_out: npt.NDArray[np.bool_] = np.zeros(HASH_SLOTS, np.bool_)
        self.blocked_hashes = 0
        self._has_unblocked = False
        # The hash slots of positions in the order of arrival; the last row of a key is the valid one.
        self._order = KeyIndex()
        self._keys: U64 = np.empty(0, np.uint64)
        self._slots: U16 = np.empty(0, np.uint16)
        self._rows = 0

    def nacked(self, keys: U64, slots: U16, *, elapsed_ms: int) -> None:
        """Record that positions are NACKED, for the first time or again; a known one stays in its hash slot."""
        if not len(keys):
            return
        keys, first = np.unique(keys, return_index=True)
        named = bitmap_of(keys)
        is_new = ~contained(keys, self._outstanding)
        slots_again = self._slots_of((named & self._outstanding) - self._nacked)
        slots_new = slots[first[is_new]]
        came = np.concatenate([slots_new, slots_again])
        changed = np.unique(came)
        blocked_before = self.are_blocked(changed)
        self._outstand(keys[is_new], slots_new, elapsed_ms)
        np.add.at(self._nacked_rows, came, _ONE)
        self._nacked |= named
        self._count_blocked(changed, blocked_before)

    def _outstand(self, keys: U64, slots: U16, elapsed_ms: int) -> None:
        self._since_ms[slots[self._outstanding_rows[slots] == 0]] = elapsed_ms
        np.add.at(self._outstanding_rows, slots, _ONE)
        self._outstanding |= bitmap_of(keys)
        end = self._rows + len(keys)
        if end > len(self._keys):
            more = max(len(keys), len(self._keys))
            self._keys = np.concatenate([self._keys, np.zeros(more, np.uint64)])
            self._slots = np.concatenate([self._slots, np.zeros(more, np.uint16)])
        self._keys[self._rows : end] = keys
        self._slots[self._rows : end] = slots
        self._rows = end

    def redelivered(self, keys: BitMap64) -> None:
        """Record that positions are READY again: they stay outstanding. Ignores those that are not NACKED."""
        if self._nacked.intersect(keys):
            self._end(keys & self._nacked, BitMap64())

    def left(self, keys: BitMap64) -> None:
        """Forget positions that left the backlog, whatever they were. Ignores those that are not outstanding."""
        if self._outstanding.intersect(keys):
            self._end(keys & self._nacked, keys & self._outstanding)
            if self._rows >= max(PACKED_MIN, 2 * len(self._outstanding)):
                self._pack()

    def _end(self, nacked: BitMap64, outstanding: BitMap64) -> None:
        nacked_slots, outstanding_slots = self._slots_of(nacked), self._slots_of(outstanding)
        changed = np.unique(np.concatenate([nacked_slots, outstanding_slots]))
        blocked_before = self.are_blocked(changed)
        np.subtract.at(self._nacked_rows, nacked_slots, _ONE)
        np.subtract.at(self._outstanding_rows, outstanding_slots, _ONE)
        self._nacked -= nacked
        self._outstanding -= outstanding
        self._is_bounded_out[changed[self._outstanding_rows[changed] == 0]] = False
        self._count_blocked(changed, blocked_before)

    def _slots_of(self, keys: BitMap64) -> U16:
        """Return the hash slots of outstanding positions, in no order."""
        if not keys:
            return np.empty(0, np.uint16)
        return self._slots[self._order.last_of(self._keys[: self._rows], keys_of(keys))]

    def _pack(self) -> None:
        places = self._order.last_of(self._keys[: self._rows], keys_of(self._outstanding))
        self._keys, self._slots = self._keys[places], self._slots[places]
        self._rows = len(places)
        self._order = KeyIndex()

    def _count_blocked(self, slots: U16, before: Mask) -> None:
        after = self.are_blocked(slots)
        self.blocked_hashes += int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        self._has_unblocked |= bool((before & ~after).any())

    def are_blocked(self, slots: U16) -> Mask:
        """Return the mask of hash slots that wait for a NACKED position."""
        return np.not_equal(self._nacked_rows[slots], 0) & ~self._is_bounded_out[slots]

    @property
    def any_blocked(self) -> bool:
        """True if any hash is blocked."""
        return self.blocked_hashes != 0

    def is_bounded_out(self, slots: U16) -> Mask:
        """Return the mask of hash slots that exceeded the bound.

        They do not block or take back anything until none of their positions is outstanding.
        """
        return self._is_bounded_out[slots]

    def expire(self, *, elapsed_ms: int) -> None:
        """Unblock hash slots that had outstanding positions for as long as the bound. O(hash slots)."""
        if not self._outstanding:
            return
        slots = np.flatnonzero((self._outstanding_rows != 0) & ~self._is_bounded_out).astype(np.uint16)
        over = slots[self._since_ms[slots] + np.uint64(self._block_max_ms) <= np.uint64(elapsed_ms)]
        blocked_before = self.are_blocked(over)
        self._is_bounded_out[over] = True
        self._count_blocked(over, blocked_before)

    def take_unblocked(self) -> bool:
        """Return whether a blocked hash was unblocked since the last call."""
        has_unblocked, self._has_unblocked = self._has_unblocked, False
        return has_unblocked


class BlockingNacks:
    """Blocked hashes, and `taken_back`: rows that were taken back and not delivered again."""

    def __init__(self, block_max_ms: int, in_flight: InFlight, order: PositionOrder) -> None:
        self.blocks = NackBlocks(block_max_ms)
        self.taken_back = BitMap64()
        self._in_flight = in_flight
        self._order = order

    def take_behind(self, nacked: KeyedRows) -> tuple[KeyedRows, U32]:
        """Take what is in flight after NACKED rows of its hash: (the rows, the dispatcher that held each)."""
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

        taken, holders = self._in_flight.take_back_where(are_behind)
        self.taken_back |= bitmap_of(taken.keys)
        return taken, holders

    def are_kept_back(self, keys: U64, slots: U16) -> Mask:
        """Return the mask of rows that no consumer may acknowledge or hold.

        They wait for a NACKED row, or are redelivered after one. None of the rows given is in flight or NACKED.
        """
        kept_back = np.zeros(len(keys), np.bool_)
        if self.blocks.any_blocked:
            kept_back |= self.blocks.are_blocked(slots)
        if self.taken_back:
            kept_back |= contained(keys, self.taken_back) & ~self.blocks.is_bounded_out(slots)
        return kept_back
