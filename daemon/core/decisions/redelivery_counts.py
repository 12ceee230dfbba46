"""How often the positions of a backlog were negatively acknowledged.

Owns: the counts of one subscription, as bit planes: of each bit of the count the set of keys that have it. A position
that was never negatively acknowledged is in none and costs nothing, one with a count of 1 is in one.
Does not own: when a position counts (`nack_decisions`) and how planes are stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.positions import bitmap_of, keys_of
from storage_backends.formats.row_columns import U32, U64


class RedeliveryCounts:
    """The counts of a subscription by key; 0 where a key is in no plane."""

    def __init__(self) -> None:
        # Plane 0 is the lowest bit; the last one is never empty.
        self._planes: list[BitMap64] = []

    def of(self, keys: U64) -> U32 | None:
        """u32[n], in the order of the keys; None when all are 0."""
        if not self._planes:
            return None
        named = bitmap_of(keys)
        hits = [(bit, plane & named) for bit, plane in enumerate(self._planes) if plane.intersect(named)]
        if not hits:
            return None
        counts = np.zeros(len(keys), np.uint32)
        for bit, hit in hits:
            if len(hit) == len(named):
                counts |= np.uint32(1 << bit)
                continue
            members = keys_of(hit)
            places = np.searchsorted(members, keys)
            places[places == len(members)] = 0
            counts |= np.equal(members[places], keys).astype(np.uint32) << np.uint32(bit)
        return counts

    def among(self, keys: BitMap64) -> BitMap64:
        """Those of the keys whose count is not 0."""
        return BitMap64.union(BitMap64(), *[plane & keys for plane in self._planes])

    def set(self, keys: U64, counts: U32) -> None:
        """Gives the keys, none of which is named twice, these counts."""
        if not len(keys):
            return
        highest = int(counts.max())
        self._planes += [BitMap64() for _ in range(highest.bit_length() - len(self._planes))]
        if int(counts.min()) == highest:
            self._set_all(bitmap_of(keys), highest)
            return
        for bit, plane in enumerate(self._planes):
            has_bit = (counts >> np.uint32(bit)) & np.uint32(1) != 0
            plane |= bitmap_of(keys[has_bit])
            plane -= bitmap_of(keys[~has_bit])
        self._drop_empty()

    def _set_all(self, keys: BitMap64, count: int) -> None:
        for bit, plane in enumerate(self._planes):
            if count >> bit & 1:
                plane |= keys
            elif plane.intersect(keys):
                plane -= keys
        self._drop_empty()

    def drop(self, keys: BitMap64) -> None:
        """The keys have no count any more."""
        for plane in self._planes:
            if plane.intersect(keys):
                plane -= keys
        self._drop_empty()

    def _drop_empty(self) -> None:
        while self._planes and not self._planes[-1]:
            self._planes.pop()

    def planes(self) -> tuple[BitMap64, ...]:
        """The planes as they are now, the lowest bit first: copies."""
        return tuple(plane.copy() for plane in self._planes)

    def restore(self, planes: Iterable[BitMap64]) -> None:
        """The counts are those of the planes, the lowest bit first. The planes are taken over."""
        self._planes = list(planes)
        self._drop_empty()
