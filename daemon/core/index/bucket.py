"""What every bucket has: which of its positions are there, due, gone and acknowledged.

Owns: the sets of one bucket and the changes that keep them consistent.
Does not own: the rows themselves (`mutable_bucket`, `sealed_bucket`) and who is owed them (`subscription_state`).

Invariants: `passed` and every `acknowledged` set are subsets of `present`; `waiting` = present - passed; a sealed
bucket's rows are `present` and `gone` together; `gone` only grows.

The `gone` set of a sealed bucket holds the rows that left since its seal. That of a quarantined one holds the rows that
left or were added again; all its other rows are missing.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap, BitMap64

from daemon.core.index.level_rows import LevelRows
from daemon.core.index.positions import FEW, KeyedRows, bitmap_of, contained


class GoneSet:
    """A set that only grows and can be frozen in O(1): frozen parts, and what came since."""

    def __init__(self, keys: BitMap64 | None = None) -> None:
        self._frozen: list[BitMap64] = [keys] if keys else []
        self._since = BitMap64()

    def add(self, keys: BitMap64) -> None:
        self._since |= keys

    def freeze(self) -> tuple[BitMap64, ...]:
        """The set as parts that never change again."""
        if self._since:
            part, self._since = self._since, BitMap64()
            while self._frozen and 2 * len(part) >= len(self._frozen[-1]):
                part = self._frozen.pop() | part
            self._frozen.append(part)
        return tuple(self._frozen)

    def __len__(self) -> int:
        return sum(map(len, self._frozen)) + len(self._since)


class Bucket:
    """The sets of one bucket. `gone` is None in the mutable bucket: there gone means removed.

    `name`: the object name, empty for the mutable bucket. `index_id`: the index that its rows are in. `pages`: the
    ordinals of the pages that it has or had positions of. `levels`: hears of what is passed and what is gone; None
    while the bucket is in no index. Counts are kept, never taken from a bitmap.
    """

    pages: BitMap

    def __init__(self, name: str, present: BitMap64, gone: GoneSet | None, index_id: int) -> None:
        self.name = name
        self.index_id = index_id
        self.present = present
        self.passed = BitMap64()
        self.gone = gone
        self.levels: LevelRows | None = None
        self.acknowledged: dict[int, BitMap64] = {}
        self.present_rows = len(present)
        self.passed_rows = 0

    @property
    def waiting_rows(self) -> int:
        return self.present_rows - self.passed_rows

    def pass_rows(self, due: KeyedRows) -> KeyedRows:
        """Makes waiting rows due; those that were waiting, in the order given.

        What is gone or due already is left out.
        """
        if len(due) <= FEW and not self.levels:
            return self._pass_few(due)
        waiting = bitmap_of(due.keys) & self.present
        waiting -= self.passed
        count = len(waiting)
        if count != len(due):
            due = due.take(contained(due.keys, waiting))
        self.passed |= waiting
        self.passed_rows += count
        if self.levels:
            self.levels.passed(waiting)
        return due

    def _pass_few(self, due: KeyedRows) -> KeyedRows:
        came = []
        for key in due.keys.tolist():
            waits = key in self.present and key not in self.passed
            came.append(waits)
            if waits:
                self.passed.add(key)
                self.passed_rows += 1
        return due if all(came) else due.take(np.array(came))

    def remove(self, keys: BitMap64) -> tuple[BitMap64, int]:
        """Makes positions gone: (those that were there, how many of them were due)."""
        hit = self.present & keys
        if not hit:
            return hit, 0
        due_rows = 0
        if self.passed_rows and (due := hit & self.passed):
            due_rows = len(due)
            self.passed -= due
            self.passed_rows -= due_rows
        self.present -= hit
        self.present_rows -= len(hit)
        if self.gone is not None:
            self.gone.add(hit)
        for acknowledged in self.acknowledged.values():
            acknowledged -= hit
        if self.levels:
            self.levels.remove(hit)
        return hit, due_rows

    def acknowledged_by(self, subscription_id: int) -> BitMap64:
        """The set to read or to grow."""
        return self.acknowledged.setdefault(subscription_id, BitMap64())

    def unacknowledged(self, rows: KeyedRows, subscription_id: int, in_hand: BitMap64 | None = None) -> KeyedRows:
        """Those of the rows that are here, due, and neither acknowledged by the subscription nor in hand."""
        owed = bitmap_of(rows.keys) & self.passed
        for left in (self.acknowledged.get(subscription_id), in_hand):
            if left:
                owed -= left
        return rows if len(owed) == len(rows) else rows.take(contained(rows.keys, owed))
