"""Knows which consumer holds unacknowledged rows of each hash, until the decision on them is durable (PIP-379).

`DrainingHashes` counts: for every hash slot the one consumer that holds positions of it, how many these are, and how
often others were kept back for it. A hash drains while another consumer than their holder has its slot. Nothing is
recorded when hash slots move: since held positions are always counted, comparing holders with owners shows which hashes
drain.

`HashHolds` keeps a hash with its consumer also while a decision on its rows is staged. Otherwise a crash would
redeliver them after rows that another consumer received meanwhile. It also keeps it until the consumer has been told
which of its rows were taken back, since until then it works on them.

Memory: 11 bytes a hash slot, 704 KiB if all are in use, which is 72 bytes for each of 10,000 draining hashes. Pages of
the arrays that were never written cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight
from daemon.core.index.position_keys import KeyedRows, Mask, bitmap_of, contained
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, slots_of
from daemon.core.key_shared.key_consumers import Consumers
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U32, U64

_ONE = np.uint32(1)
_ATTEMPTS_MAX = np.uint32((1 << 32) - 1)


class DrainingHashes:
    """The holder of each hash slot. Consumers are ordinals from 1 on; columns name a hash slot once for each position.

    `holders` is u16[65536], 0 if no consumer holds any; `unacked` is u32[65536]. `cleared_total` counts hashes that
    became free after others had been kept back for them; hashes that drained while no consumer wanted them do not
    count. `attempts_total` counts how often positions were kept back.
    """

    def __init__(self) -> None:
        self.holders: U16 = np.zeros(HASH_SLOTS, np.uint16)
        self.unacked: U32 = np.zeros(HASH_SLOTS, np.uint32)
        # Stays at its maximum instead of wrapping around.
        self._attempts: U32 = np.zeros(HASH_SLOTS, np.uint32)
        self._is_unblocked: npt.NDArray[np.bool_] = np.zeros(HASH_SLOTS, np.bool_)
        self.has_unblocked = False
        self.cleared_total = 0
        self.attempts_total = 0

    def may_receive(self, slots: U16, consumers: U16) -> Mask:
        """Return the mask of rows whose hash slot no other consumer holds.

        Rows of one hash slot are for one consumer.
        """
        holders = self.holders[slots]
        return np.equal(holders, 0) | np.equal(holders, consumers)

    def received(self, slots: U16, consumers: U16) -> None:
        """Count positions as IN_FLIGHT at consumers.

        Raises InvariantViolated, without a change, if another consumer holds positions of a hash slot.
        """
        if not np.all(consumers):
            raise InvariantViolated("positions are given to no consumer")
        before = self.holders[slots]
        is_free = (before == 0) | (before == consumers)
        self.holders[slots] = consumers
        # Two consumers may be named for one hash slot: the last one is its holder now.
        wrong = ~is_free | (self.holders[slots] != consumers)
        if wrong.any():
            self.holders[slots] = before
            row = int(wrong.argmax())
            raise InvariantViolated(
                f"hash {slots[row]} is given to consumer {consumers[row]} while another one holds positions of it"
            )
        np.add.at(self.unacked, slots, _ONE)

    def settled(self, slots: U16, consumers: U16 | int) -> None:
        """Count positions as no longer IN_FLIGHT: acknowledged or not, or their consumer left.

        Raises InvariantViolated, without a change, if another consumer holds a hash slot, or fewer positions of it are
        held.
        """
        wrong = self.holders[slots] != consumers
        before = self.unacked[slots]
        wrong |= before == 0
        if wrong.any():
            row = int(wrong.argmax())
            consumer = np.broadcast_to(consumers, len(slots))[row]
            raise InvariantViolated(
                f"consumer {consumer} gives up hash {slots[row]}, which consumer {self.holders[slots[row]]} holds"
            )
        np.subtract.at(self.unacked, slots, _ONE)
        left = self.unacked[slots]
        if (left > before).any():
            np.add.at(self.unacked, slots, _ONE)
            row = int((left > before).argmax())
            raise InvariantViolated(f"more positions of hash {slots[row]} are given up than the {before[row]} held")
        self._free(slots[left == 0])

    def _free(self, slots: U16) -> None:
        self.holders[slots] = 0
        waited_for = slots[self._attempts[slots] != 0]
        if len(waited_for):
            self.cleared_total += len(np.unique(waited_for))
            self._attempts[waited_for] = 0
            self._is_unblocked[waited_for] = True
            self.has_unblocked = True

    def blocked(self, slots: U16) -> None:
        """Count positions kept back for the holder of their hashes; hashes that no consumer holds do not count."""
        held = slots[self.holders[slots] != 0]
        self.attempts_total += len(held)
        before = self._attempts[held]
        np.add.at(self._attempts, held, _ONE)
        self._attempts[held[self._attempts[held] < before]] = _ATTEMPTS_MAX

    def attempts(self, slots: U16) -> U64:
        """Return how often positions of each hash slot were kept back under its current holder."""
        return self._attempts[slots].astype(np.uint64)

    def take_unblocked(self) -> U16:
        """Return the hash slots, ascending, that became free after positions were kept back for them.

        Each is returned once. One may be held again already, mostly by the consumer that waited for it.
        """
        if not self.has_unblocked:
            return np.empty(0, np.uint16)
        slots = np.flatnonzero(self._is_unblocked).astype(np.uint16)
        self._is_unblocked[slots] = False
        self.has_unblocked = False
        return slots

    def draining(self, owners: U16) -> U16:
        """Return the hash slots, ascending, that one consumer has and another one holds positions of.

        `owners` is u16[65536], 0 if no consumer has the hash slot.
        """
        return np.flatnonzero((self.holders != 0) & (owners != 0) & (self.holders != owners)).astype(np.uint16)


class HashHolds:
    """A watcher of IN_FLIGHT. `draining` has the holders of each hash."""

    def __init__(self, consumers: Consumers) -> None:
        self.draining = DrainingHashes()
        self._consumers = consumers
        # Rows that were in flight and for which a decision is staged
        self._leaving = InFlight()
        # Number -> the hash slots of rows that were taken back without its knowledge, in the order of telling
        self._untold: dict[int, U16] = {}

    # ---- the watcher of IN_FLIGHT

    def came(self, rows: KeyedRows, dispatchers: U32) -> None:
        self.draining.received(slots_of(rows.key_hash()), self._consumers.ordinals_of(dispatchers))

    def claimed(self, rows: KeyedRows, dispatchers: U32) -> None:
        self._leaving.add(rows, dispatchers)

    def returned(self, rows: KeyedRows, dispatchers: U32) -> None:
        self.draining.settled(slots_of(rows.key_hash()), self._consumers.ordinals_of(dispatchers))

    def taken_back(self, rows: KeyedRows, dispatchers: U32) -> None:
        slots = slots_of(rows.key_hash())
        for number in np.unique(dispatchers).tolist():
            untold = self._untold.get(number, np.empty(0, np.uint16))
            self._untold[number] = np.concatenate([untold, slots[dispatchers == number]])

    # ---- rows that were taken back

    def told(self, numbers: U32) -> None:
        """Release the rows that were taken back first, one for each time that a consumer is named.

        Consumers that have left have none.
        """
        for number, rows in zip(*(column.tolist() for column in np.unique(numbers, return_counts=True)), strict=True):
            self._release(number, rows)

    def leave(self, numbers: Collection[int]) -> None:
        """Release all rows that were taken back from consumers that are about to leave."""
        for number in numbers:
            self._release(number, None)

    def _release(self, number: int, rows: int | None) -> None:
        slots = self._untold.pop(number, None)
        if slots is None:
            return
        if len(slots[:rows]) < len(slots):
            self._untold[number] = slots[rows:]
        self.draining.settled(slots[:rows], self._consumers.ordinal_of(number))

    # ---- decisions

    def settle(self, keys: BitMap64) -> None:
        """Release rows whose decision is durable, or need not be."""
        if len(self._leaving):
            rows, dispatchers = self._take(keys)
            if len(rows):
                self.returned(rows, dispatchers)
                self.forget_departed()

    def forget_departed(self) -> None:
        """Forget consumers that have left, unless decisions on their rows are staged."""
        for number in self._consumers.departed:
            if not self._leaving.held_rows(number):
                self._consumers.forget(number)

    def rename(self, keys: U64, new_keys: U64) -> None:
        """Give new keys to rows for which a decision is being staged."""
        rows, holders = self._take(bitmap_of(keys))
        if len(rows):
            order = np.argsort(keys)
            places = order[np.searchsorted(keys, rows.keys, sorter=order)]
            self._leaving.add(KeyedRows(rows.rows, new_keys[places]), holders)

    def _take(self, keys: BitMap64) -> tuple[KeyedRows, U32]:
        """Take out the given rows for which a decision is staged: (rows, the dispatcher that held each)."""
        return self._leaving.take_where(lambda each, _: contained(each.keys, keys))
