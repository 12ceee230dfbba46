"""Rows that are due or planned and wait for their hash or for permits, in the order in which they will be handed out.

Owns: the rows, how many there are of each hash, and their order: what was delivered before, by position, and then what
never was, as it came; and what comes behind rows that were let go.
Does not own: why they wait and which of them may go (`key_share`).

Both classes are kept as a few parts, each at least twice as long as the next; of what was delivered before no two parts
have a slot in common, so that only those of its slots are sorted again when a row comes. A row that leaves is marked,
and a part of which less than half is left is packed. Looking at all that waits is one pass over the columns of each
part.

Rows that must wait for their hash and for which there is no room: they stay in the backlog, and are sought again.

Owns: of which hashes rows were let go, and which of these a reader of the backlog seeks.
Does not own: reading (`feeding`), what waits in memory (`waiting_rows`), and which hashes may go (`key_share`).

When too many rows wait, those of hashes that cannot go now are let go, and so is what comes later of these. When some
of the hashes can go, a reader looks through the backlog from the beginning: what it finds of them waits in memory
again. At the end nothing of them is let go any more. Of those of which it passed a row over that was READY just then it
seeks no more: that may be let go later, behind it, and goes before the later ones. So a consumer without permits costs
no memory, and nobody waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.in_flight import Places
from daemon.core.index.position_keys import KeyedRows, Mask, PositionOrder, bitmap_of, contained
from daemon.core.index.runs import earliest, first_time_ms
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, slots_of
from daemon.core.key_shared.key_planning import before_refused
from storage_backends.formats.row_columns import U64

# Of rows, of which only some are there, who receives each: rows, which of them are there, the slots of these.
Choose = Callable[[KeyedRows, Places, U16], U16]


@dataclasses.dataclass(slots=True)
class _Part:
    rows: KeyedRows
    slots: U16
    places: Places

    def take(self, chosen: Mask) -> KeyedRows:
        """Removes and returns rows. `chosen`: of those that are there."""
        taken = self.rows.take(self.places[chosen])
        self.places = self.places[~chosen]
        if 2 * len(self.places) < len(self.rows):
            self.rows, self.slots = self.rows.take(self.places), self.slots[self.places]
            self.places = np.arange(len(self.rows))
        return taken


def _part_of(rows: KeyedRows) -> _Part:
    return _Part(rows, slots_of(rows.key_hash()), np.arange(len(rows)))


class WaitingRows:
    """What waits, of one subscription. `keys`: of all of them. `by_slot`: u32[65536], how many."""

    def __init__(self, order: PositionOrder) -> None:
        self.keys = BitMap64()
        self.by_slot: npt.NDArray[np.uint32] = np.zeros(HASH_SLOTS, np.uint32)
        self._order = order
        self._back: list[_Part] = []
        self._fresh: list[_Part] = []
        self._last: list[_Part] = []

    def __len__(self) -> int:
        return len(self.keys)

    def add_back(self, rows: KeyedRows) -> None:
        """Rows that were delivered before: they go before all others of their slots, by position."""
        if not len(rows):
            return
        self._came(rows)
        named = np.zeros(HASH_SLOTS, np.bool_)
        named[slots_of(rows.key_hash())] = True
        apart = []
        for part in sorted(self._back, key=lambda each: len(each.places)):
            if 2 * len(rows) >= len(part.places) or named[part.slots[part.places]].any():
                rows = KeyedRows.concat([part.rows.take(part.places), rows])
            else:
                apart.append(part)
        self._back = [*apart, _part_of(self._order.ordered(rows))]

    def add_fresh(self, rows: KeyedRows) -> None:
        """Rows that never were, behind the others."""
        if not len(rows):
            return
        self._came(rows)
        while self._fresh and 2 * len(rows) >= len(self._fresh[-1].places):
            last = self._fresh.pop()
            rows = KeyedRows.concat([last.rows.take(last.places), rows])
        self._fresh.append(_part_of(rows))

    def add_last(self, rows: KeyedRows) -> None:
        """Rows that never were, and that come behind some that are not here: they stay until `end_last`."""
        if len(rows):
            self._came(rows)
            self._last.append(_part_of(rows))

    def end_last(self, let_go: Mask) -> None:
        """Moves the last rows behind the others, but those of slots that were let go: everything that they come behind
        is here. `let_go`: bool[65536].
        """
        for part in self._last:
            rows = part.take(~let_go[part.slots[part.places]])
            if len(rows):
                self._fresh.append(_part_of(rows))
        self._tidy()

    def evict(self, slots: Mask, staying: BitMap64) -> KeyedRows:
        """Removes and returns rows of slots that never were delivered, but for `staying`, which are the last ones where
        they come behind one that leaves. `slots`: bool[65536]. O(what waits).
        """
        evicted, left = [], np.zeros(HASH_SLOTS, np.bool_)
        last = []
        for part in self._fresh:
            here = part.slots[part.places]
            stay = contained(part.rows.keys[part.places], staying) if staying else np.zeros(len(here), np.bool_)
            leave = slots[here] & ~stay
            behind = stay & (left[here] | ~before_refused(here, leave)) if stay.any() else stay
            left[here[leave]] = True
            if behind.any():
                last.append(part.rows.take(part.places[behind]))
            evicted.append(part.rows.take(part.places[leave]))
            part.take(leave | behind)
        self._last = [*[_part_of(rows) for rows in last], *self._last]
        self._tidy()
        rows = KeyedRows.concat(evicted)
        self._left(rows)
        return rows

    def _came(self, rows: KeyedRows) -> None:
        fresh = ~contained(rows.keys, self.keys)
        self.keys |= bitmap_of(rows.keys)
        np.add.at(self.by_slot, slots_of(rows.key_hash())[fresh], np.uint32(1))

    def take(self, choose: Choose) -> tuple[KeyedRows, U16]:
        """Removes the rows that somebody receives: (these in order, who receives each). O(what waits)."""
        taken, receivers = [], [np.empty(0, np.uint16)]
        for part in (*self._back, *self._fresh):
            consumers = choose(part.rows, part.places, part.slots[part.places])
            chosen = consumers != 0
            if chosen.any():
                taken.append(part.take(chosen))
                receivers.append(consumers[chosen])
        self._tidy()
        rows = KeyedRows.concat(taken)
        self._left(rows)
        return rows, np.concatenate(receivers)

    def remove(self, keys: BitMap64) -> KeyedRows:
        """Removes and returns the rows of a set. O(what waits)."""
        if not self.keys.intersect(keys):
            return KeyedRows.empty()
        taken = [part.take(contained(part.rows.keys[part.places], keys)) for part in self._parts()]
        self._tidy()
        rows = KeyedRows.concat(taken)
        self._left(rows)
        return rows

    def where(self, keys: BitMap64, condition: Callable[[U64, U16], Mask]) -> BitMap64:
        """Those of the positions that wait and for which, by key and slot, the condition holds. O(what waits)."""
        found = BitMap64()
        if self.keys.intersect(keys):
            for part in self._parts():
                places = part.places[contained(part.rows.keys[part.places], keys)]
                named = part.rows.keys[places]
                found |= bitmap_of(named[condition(named, part.slots[places])])
        return found

    def _left(self, rows: KeyedRows) -> None:
        if len(rows):
            self.keys -= bitmap_of(rows.keys)
            np.subtract.at(self.by_slot, slots_of(rows.key_hash()), np.uint32(1))

    def _tidy(self) -> None:
        self._back = [part for part in self._back if len(part.places)]
        self._fresh = [part for part in self._fresh if len(part.places)]
        self._last = [part for part in self._last if len(part.places)]

    def _parts(self) -> tuple[_Part, ...]:
        return (*self._back, *self._fresh, *self._last)

    @property
    def never_delivered_rows(self) -> int:
        """How many of them never were delivered."""
        return sum(len(part.places) for part in (*self._fresh, *self._last))

    @property
    def back_rows(self) -> int:
        """How many of them were delivered before."""
        return sum(len(part.places) for part in self._back)

    def back_rows_of(self, slots: Mask) -> int:
        """How many rows of some slots were delivered before. `slots`: bool[65536]. O(what waits)."""
        return sum(int(np.count_nonzero(slots[part.slots[part.places]])) for part in self._back)

    def first_ms(self, from_ms: int) -> int | None:
        """The earliest time of a row from a time on; None when there is none. O(what waits)."""
        times = [first_time_ms(part.rows.rows.deliver_at_ms[part.places], from_ms) for part in self._parts()]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)


class EvictedSlots:
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
