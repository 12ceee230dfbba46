"""Positions of one index that a staged decision names.

Owns: their set, and that their pages stay until the decision is applied.
Does not own: the decisions (`topic`).
"""

from __future__ import annotations

from pyroaring import BitMap, BitMap64

from daemon.core.index.positions import PageTable, pages_of


class StagedKeys:
    """`keys`: of the positions that are on their way."""

    def __init__(self, pages: PageTable) -> None:
        self._pages = pages
        self._held = BitMap()
        self.keys = BitMap64()

    def add(self, keys: BitMap64) -> None:
        # A bucket that is dropped before the decision is applied must not take their pages with it.
        fresh = pages_of(keys) - self._held
        if fresh:
            self._pages.hold(fresh)
            self._held |= fresh
        self.keys |= keys

    def applied(self, keys: BitMap64) -> None:
        if not self._held:
            return
        self.keys -= keys
        held, self._held = self._held, pages_of(self.keys)
        if left := held - self._held:
            self._pages.release(left)
