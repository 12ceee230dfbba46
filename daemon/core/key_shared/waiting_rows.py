"""Keeps rows that wait for their hash or for permits, in the order in which they will be delivered.

`key_share` alone uses it; it stands apart because it is a table with an order of its own. `key_share` knows why rows
wait and which of them may go.

Redelivered rows go first, by position; then new rows as they arrived; last what comes after evicted rows. Each class is
kept as a few parts, each at least twice as long as the next. No two parts of redelivered rows share a hash slot, so a
new row causes a sort of its hash slot's part only. A row that leaves is marked, and a part is packed when less than
half of it is left. Checking all waiting rows is one pass over the columns of each part.

When too many rows wait, those of hashes that cannot go now are evicted, and so are later rows of these hashes: they
stay in the backlog. When some of the hashes can go, a reader (`feeding`) scans the backlog from the beginning; rows of
them that it finds wait in memory again. At its end these hashes are no longer evicted. If the reader passed over a
READY row of a hash, it stops looking for that hash: the READY row may be evicted later, behind the reader, and goes
before the later ones. So a consumer without permits costs no memory and delays no other consumer.
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

# Chooses the receiver of each row, given rows, the places of those that are left, and the hash slots of these.
Choose = Callable[[KeyedRows, Places, U16], U16]


@dataclasses.dataclass(slots=True)
class _Part:
    rows: KeyedRows
    slots: U16
    places: Places

    def take(self, chosen: Mask) -> KeyedRows:
        """Remove and return rows. `chosen` is a mask of those that are left."""
        taken = self.rows.take(self.places[chosen])
        self.places = self.places[~chosen]
        if 2 * len(self.places) < len(self.rows):
            self.rows, self.slots = self.rows.take(self.places).compact(), self.slots[self.places]
            self.places = np.arange(len(self.rows))
        return taken


def _part_of(rows: KeyedRows) -> _Part:
    return _Part(rows.compact(), slots_of(rows.key_hash()), np.arange(len(rows)))


class WaitingRows:
    """The waiting rows of one subscription. `keys` are those of all; `by_slot` is u32[65536], rows by hash slot."""

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
        """Add redelivered rows: they go before all others of their hash slots, by position."""
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
        """Add rows that were never delivered, behind the others."""
        if not len(rows):
            return
        self._came(rows)
        while self._fresh and 2 * len(rows) >= len(self._fresh[-1].places):
            last = self._fresh.pop()
            rows = KeyedRows.concat([last.rows.take(last.places), rows])
        self._fresh.append(_part_of(rows))

    def add_last(self, rows: KeyedRows) -> None:
        """Add never delivered rows that come after some that are not here: they stay until `end_last`."""
        if len(rows):
            self._came(rows)
            self._last.append(_part_of(rows))

    def end_last(self, let_go: Mask) -> None:
        """Move the last rows behind the others, except in hash slots that are still evicted.

        All rows before them are here now. `let_go` is bool[65536].
        """
        for part in self._last:
            rows = part.take(~let_go[part.slots[part.places]])
            if len(rows):
                self._fresh.append(_part_of(rows))
        self._tidy()

    def evict(self, slots: Mask, staying: BitMap64) -> KeyedRows:
        """Remove and return never delivered rows of hash slots, except for `staying`.

        Staying rows that come after an evicted one become last rows. `slots` is bool[65536]. O(waiting rows).
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
        """Remove the rows that get a receiver: (the rows in order, the receiver of each). O(waiting rows)."""
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
        """Remove and return the rows of a set. O(waiting rows)."""
        if not self.keys.intersect(keys):
            return KeyedRows.empty()
        taken = [part.take(contained(part.rows.keys[part.places], keys)) for part in self._parts()]
        self._tidy()
        rows = KeyedRows.concat(taken)
        self._left(rows)
        return rows

    def where(self, keys: BitMap64, condition: Callable[[U64, U16], Mask]) -> BitMap64:
        """Return the waiting positions of a set for which the condition holds.

        `condition` is called with keys and hash slots. O(waiting rows).
        """
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
        """The number of rows that were never delivered."""
        return sum(len(part.places) for part in (*self._fresh, *self._last))

    @property
    def back_rows(self) -> int:
        """The number of rows that were delivered before."""
        return sum(len(part.places) for part in self._back)

    def back_rows_of(self, slots: Mask) -> int:
        """Return how many redelivered rows some hash slots have. `slots` is bool[65536]. O(waiting rows)."""
        return sum(int(np.count_nonzero(slots[part.slots[part.places]])) for part in self._back)

    def first_ms(self, from_ms: int) -> int | None:
        """Return the earliest due time of a row from a time on (Unix ms), or None. O(waiting rows)."""
        times = [first_time_ms(part.rows.rows.deliver_at_ms[part.places], from_ms) for part in self._parts()]
        return min((time_ms for time_ms in times if time_ms is not None), default=None)


class EvictedSlots:
    """The hash slots of evicted rows: `slots` is bool[65536].

    `reader` is set while some of them are looked for. `first_ms` is a lower bound of the evicted rows' due times (Unix
    ms), or None if there are none.
    """

    def __init__(self) -> None:
        self.slots: Mask = np.zeros(HASH_SLOTS, np.bool_)
        self.reader: BacklogReader | None = None
        self.first_ms: int | None = None
        self._sought: Mask = np.zeros(HASH_SLOTS, np.bool_)
        self._again: Mask = np.zeros(HASH_SLOTS, np.bool_)

    def add(self, rows: KeyedRows) -> None:
        """Evict rows that just arrived."""
        self.slots[slots_of(rows.key_hash())] = True
        self.first_ms = earliest(self.first_ms, first_time_ms(rows.rows.deliver_at_ms, 1))

    def evict(self, rows: KeyedRows) -> None:
        """Evict rows that waited: the reader may be behind them."""
        self.add(rows)
        self._sought[slots_of(rows.key_hash())] = False

    def are_let_go(self, slots: U16) -> Mask:
        """Return the mask of hash slots with evicted rows: later rows of these have to wait."""
        let_go: Mask = self.slots[slots]
        return let_go

    def seek(self, able: Mask, reader: BacklogReader) -> None:
        """Look for rows of the hash slots that may go. `reader` is at the beginning."""
        self.reader = reader
        self._sought = self.slots & able
        self._again[:] = False

    def seek_again(self) -> None:
        """Note that a row may have been added to the backlog behind the reader."""
        self._again[:] = True

    def found(self, rows: KeyedRows, passed_over: KeyedRows) -> KeyedRows:
        """Return the wanted rows among those that the reader found at no consumer. `passed_over` rows are READY."""
        chosen = self._sought[slots_of(rows.key_hash())]
        if len(passed_over):
            # A row after a READY row of its hash slot must not overtake it.
            chosen &= _before(rows, passed_over)
            self._sought[slots_of(passed_over.key_hash())] = False
        return rows.take(chosen)

    def end(self) -> None:
        """End the search: the reader is at the end."""
        self.reader = None
        self.slots &= ~self._sought | self._again
        self._sought[:] = False
        if not self.slots.any():
            self.first_ms = None


def _before(rows: KeyedRows, others: KeyedRows) -> Mask:
    """Return the mask of rows that are due before all of the others in their hash slot."""
    together = KeyedRows.concat([rows, others])
    order = together.rows.due_order()
    before = np.empty(len(together), np.bool_)
    before[order] = before_refused(slots_of(together.key_hash())[order], order >= len(rows))
    return before[: len(rows)]
