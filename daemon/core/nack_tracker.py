"""Positions that were negatively acknowledged, until their redelivery time (PIP-393).

Owns: which positions wait for their redelivery, and in which order they come due.
Does not own: when they are redelivered (`redelivery_policy`), their counts (`redelivery_counts`), durability.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from pyroaring import BitMap64

from daemon.core.positions import KeyedRows, PagePlaces, bitmap_of, contained
from storage_backends.formats.rows import U64, Rows

_U64_MAX = (1 << 64) - 1


def rounded_up(times_ms: U64, bits: int) -> U64:
    """The times rounded up to multiples of 2^bits ms, so that none is early; PIP-393 rounds down.

    A time beyond the last multiple becomes 2^64 - 1.
    """
    if not bits:
        return times_ms
    rest = np.uint64((1 << bits) - 1)
    rounded = (times_ms + rest) & ~rest
    return np.where(times_ms > np.uint64(_U64_MAX) - rest, np.uint64(_U64_MAX), rounded)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class FrozenNacks:
    """What a tracker held at one moment."""

    kept: KeyedRows
    redeliver_at_ms: U64

    def rows(self) -> tuple[KeyedRows, U64]:
        """Rows and their redelivery times, in any order. O(n): for a thread."""
        return self.kept, self.redeliver_at_ms

    def times_of(self, keys: U64) -> U64:
        """The redelivery times of keys, 0 where one is not negatively acknowledged. O(n): for a thread."""
        order = np.argsort(self.kept.keys)
        known = self.kept.keys[order]
        places = np.searchsorted(known, keys)
        places[places == len(known)] = 0
        if not len(known):
            return np.zeros(len(keys), np.uint64)
        return np.where(known[places] == keys, self.redeliver_at_ms[order][places], np.uint64(0))


class NackTracker:
    """`keys`: the positions that wait, the one truth of membership.

    `in_order_rows`: rows that came in due order, which cost no sort; `sorted_rows`: the others.
    """

    def __init__(self, places: PagePlaces) -> None:
        self.keys = BitMap64()
        self.in_order_rows = 0
        self.sorted_rows = 0
        self._rows = KeyedRows.empty()
        self._times = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._times)

    def add(self, rows: KeyedRows, redeliver_at_ms: U64) -> None:
        """Rows of distinct keys in any order, with their redelivery times; they replace those of their keys."""
        added = bitmap_of(rows.keys)
        self.drop(added)
        self.keys |= added
        merged = KeyedRows.concat([self._rows, KeyedRows(rows.rows, rows.keys)])
        times = np.concatenate([self._times, redeliver_at_ms])
        order = Rows(times, merged.rows.ledger_id, merged.rows.entry_id).due_order()
        self._rows, self._times = merged.take(order), times[order]
        self.sorted_rows += len(rows)

    def drop(self, keys: BitMap64) -> None:
        """The positions of the set wait no more; those that do not are let be."""
        hit = self.keys & keys
        if hit:
            self.keys -= hit
            kept = ~contained(self._rows.keys, hit)
            self._rows, self._times = self._rows.take(kept), self._times[kept]

    def next_due_ms(self) -> int | None:
        """When the next one comes due; None when none waits."""
        return int(self._times[0]) if len(self._times) else None

    def take_due(self, now_ms: int, limit: int) -> tuple[KeyedRows, U64]:
        """At most `limit` of those that are due, in the order (redelivery time, ledger, entry), and their times."""
        end = min(int(np.searchsorted(self._times, np.uint64(now_ms), side="right")), limit)
        rows, times = self._rows.take(slice(end)), self._times[:end]
        self._rows, self._times = self._rows.take(slice(end, None)), self._times[end:]
        self.keys -= bitmap_of(rows.keys)
        return rows, times

    def freeze(self) -> FrozenNacks:
        """As it is now."""
        return FrozenNacks(self._rows, self._times)
