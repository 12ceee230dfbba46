"""Who holds what is unacknowledged of each hash (PIP-379).

Owns: of every hash slot the one consumer that holds positions of it, how many they are, and how often others were kept
back for it meanwhile.
Does not own: who has a slot (`selectors`), and what is sent (`key_planning`).

A hash drains while another consumer has its slot than holds its positions. Nothing is entered when slots move: what is
held is counted from the beginning, so that a hash drains, and does no more, by the mere comparison of holders and
owners.

Memory: 11 bytes a slot, 704 KiB if all are in use, which is 72 bytes for each of 10,000 draining hashes; pages of the
arrays that were never written cost nothing.

Who holds rows of each hash, until what is decided of them is durable.

Owns: that a hash stays with its consumer while that holds rows of it, and while a decision on these is staged: after a
crash they would come again, behind rows that went to somebody else meanwhile.
Does not own: the counts (`draining_hashes`), and IN_FLIGHT (`in_flight`), which it watches.
"""

from __future__ import annotations

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
    """A consumer is an ordinal from 1 on; columns name a slot as often as it has positions.

    `holders`: u16[65536], 0 where nobody holds any. `unacked`: u32[65536]. `cleared_total`: how many hashes became free
    that others had been kept back for; one that drained while nobody asked for it is not among them. `attempts_total`:
    how often positions were kept back.
    """

    def __init__(self) -> None:
        self.holders: U16 = np.zeros(HASH_SLOTS, np.uint16)
        self.unacked: U32 = np.zeros(HASH_SLOTS, np.uint32)
        # Stays at its highest number rather than begin anew.
        self._attempts: U32 = np.zeros(HASH_SLOTS, np.uint32)
        self._is_unblocked: npt.NDArray[np.bool_] = np.zeros(HASH_SLOTS, np.bool_)
        self.has_unblocked = False
        self.cleared_total = 0
        self.attempts_total = 0

    def may_receive(self, slots: U16, consumers: U16) -> Mask:
        """Where nobody but that consumer holds any of the slot. Rows of one slot are for one consumer."""
        holders = self.holders[slots]
        return np.equal(holders, 0) | np.equal(holders, consumers)

    def received(self, slots: U16, consumers: U16) -> None:
        """Positions are IN_FLIGHT at consumers; InvariantViolated, and nothing changed, where another one holds any."""
        if not np.all(consumers):
            raise InvariantViolated("positions are given to no consumer")
        before = self.holders[slots]
        is_free = (before == 0) | (before == consumers)
        self.holders[slots] = consumers
        # Of one slot two consumers may be named: the last one is its holder now.
        wrong = ~is_free | (self.holders[slots] != consumers)
        if wrong.any():
            self.holders[slots] = before
            row = int(wrong.argmax())
            raise InvariantViolated(
                f"hash {slots[row]} is given to consumer {consumers[row]} while another one holds positions of it"
            )
        np.add.at(self.unacked, slots, _ONE)

    def settled(self, slots: U16, consumers: U16 | int) -> None:
        """Positions are IN_FLIGHT no more: acknowledged or not, or their consumer left.

        InvariantViolated, and nothing changed, where another consumer holds the slot, or fewer of it.
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
        """Positions were kept back for what a consumer holds of their hashes; of a hash that nobody holds nothing is
        counted."""
        held = slots[self.holders[slots] != 0]
        self.attempts_total += len(held)
        before = self._attempts[held]
        np.add.at(self._attempts, held, _ONE)
        self._attempts[held[self._attempts[held] < before]] = _ATTEMPTS_MAX

    def attempts(self, slots: U16) -> U64:
        """How often positions of each were kept back since its holder has it."""
        return self._attempts[slots].astype(np.uint64)

    def take_unblocked(self) -> U16:
        """The slots that became free since the last call and that positions were kept back for; each once, ascending.

        One may be held again already, mostly by who waited for it.
        """
        if not self.has_unblocked:
            return np.empty(0, np.uint16)
        slots = np.flatnonzero(self._is_unblocked).astype(np.uint16)
        self._is_unblocked[slots] = False
        self.has_unblocked = False
        return slots

    def draining(self, owners: U16) -> U16:
        """The slots, ascending, that one consumer holds positions of and another one has. `owners`: u16[65536], 0 where
        nobody has the slot."""
        return np.flatnonzero((self.holders != 0) & (owners != 0) & (self.holders != owners)).astype(np.uint16)


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
