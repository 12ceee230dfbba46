"""Positions that dispatchers planned: messages that are not delayed, of which no index has a row.

Owns: their keys, so that they stand beside rows wherever rows stand by key, and which stream planned each.
Does not own: where they are, in flight or waiting (`in_flight`, `waiting_rows`), and their order
(`last_sent_position`).

All of it is memory: what is in hand when the daemon ends is planned again.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap, BitMap64

from daemon.core.backlog.in_flight import Mask
from daemon.core.index.positions import PagePlaces, PageTable, bitmap_of, contained, keys_of, pages_of
from storage_backends.formats.index_ids import PLANNED_OWNER
from storage_backends.formats.row_columns import U64

# Pages without positions are looked for when there are so many more than after the last look.
_PAGES_SLACK = 64


class PlannedPositions:
    """The planned positions of one subscription. `keys`: of those that are in flight or wait. `were_any`: whether there
    ever was one.
    """

    def __init__(self, places: PagePlaces) -> None:
        self.keys = BitMap64()
        self.were_any = False
        self._pages = PageTable(places, owner=PLANNED_OWNER)
        self._held_pages = BitMap()
        self._pages_max = _PAGES_SLACK
        self._by_stream: dict[int, BitMap64] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, ledger_id: U64, entry_id: U64) -> U64:
        """The keys of positions; UNKNOWN_KEY where none of the neighbourhood is known."""
        return self._pages.find(ledger_id, entry_id)

    def intern(self, ledger_id: U64, entry_id: U64) -> U64:
        """The keys of positions that are about to be planned."""
        keys = self._pages.intern(ledger_id, entry_id)
        new = pages_of(bitmap_of(keys)) - self._held_pages
        self._pages.hold(new)
        self._held_pages |= new
        return keys

    def are_planned(self, keys: U64) -> Mask:
        """Which of the keys of any table are those of planned positions."""
        if not self.keys:
            return np.zeros(len(keys), np.bool_)
        return contained(keys, self.keys)

    def add(self, stream: int, keys: U64) -> None:
        """A stream planned positions, or holds them; another one may have, too."""
        added = bitmap_of(keys)
        self.were_any = self.were_any or bool(added)
        self.keys |= added
        self._by_stream.setdefault(stream, BitMap64()).update(added)

    def settle(self, keys: BitMap64) -> None:
        """Positions are acknowledged, or got a row, or are planned no longer."""
        self.keys -= keys
        for planned in self._by_stream.values():
            planned.difference_update(keys)
        if len(self._held_pages) > self._pages_max:
            self._forget_pages()

    def _forget_pages(self) -> None:
        unheld = self._held_pages - pages_of(self.keys)
        self._pages.release(unheld)
        self._held_pages -= unheld
        self._pages_max = 2 * len(self._held_pages) + _PAGES_SLACK

    def positions(self, keys: BitMap64) -> tuple[U64, U64]:
        """(ledger_id, entry_id) of planned ones."""
        return self._pages.positions(keys_of(keys))

    def close(self, stream: int) -> BitMap64:
        """The positions that a stream planned, which is no more, and no other one."""
        planned = self._by_stream.pop(stream, BitMap64())
        return BitMap64.difference(planned, *self._by_stream.values())
