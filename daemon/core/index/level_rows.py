"""Which rows of an index were added by a delay level, until they are gone.

Owns: their positions by level, how many of each level are pending, and which were never handed out.
Does not own: what a level means (`delay_levels`), the rows (`bucket`), and what is exported (`daemon.metrics`).

    add -> pending -(passed)-> due -(handed out)-> handed out        from each: gone

The buckets of the index say what is passed and what is gone. Of rows without a level nothing is known here: where no
row has one, nothing is done.

Sections store the level of an added row, and progress stores the sets, so that the counts are exact after a restart. A
new table of levels moves no row: times are absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.index.positions import bitmap_of, contained
from storage_backends.formats.row_columns import U64


class LevelRows:
    """`present_among`: which positions have rows in the index that are not gone."""

    def __init__(self, present_among: Callable[[BitMap64], BitMap64]) -> None:
        self._present_among = present_among
        self._pending: dict[int, _Keys] = {}
        self._due: dict[int, _Keys] = {}
        self._handed_out: dict[int, _Keys] = {}
        self._pending_rows: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether any row has a level."""
        return bool(self._pending or self._due or self._handed_out)

    @property
    def pending_rows(self) -> Mapping[int, int]:
        """By level, of those that have any."""
        return self._pending_rows

    def add(self, level: int, keys: BitMap64) -> None:
        """New rows of a level."""
        self._pending.setdefault(level, _Keys()).add(keys)
        self._pending_rows[level] = self._pending_rows.get(level, 0) + len(keys)

    def restore(self, level: int, keys: BitMap64) -> None:
        """Rows of a level as they were stored, before any is passed; positions without a row are left out."""
        present = self._present_among(keys)
        if present:
            self.add(level, present)

    def passed(self, keys: BitMap64) -> None:
        """Rows are due."""
        for level in list(self._pending):
            moved = self._take(self._pending, level, keys)
            if moved:
                self._no_longer_pending(level, len(moved))
                self._due.setdefault(level, _Keys()).add(moved)

    def handed_out(self, keys: U64) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        """Rows are handed out: of each level that has some the level, and which of the rows are of it and were never
        handed out before.
        """
        if not self._due:
            return
        named = bitmap_of(keys)
        for level in list(self._due):
            moved = self._take(self._due, level, named)
            if moved:
                self._handed_out.setdefault(level, _Keys()).add(moved)
                yield level, contained(keys, moved)

    def remove(self, keys: BitMap64) -> None:
        """Rows are gone."""
        for level in list(self._pending):
            left = self._take(self._pending, level, keys)
            if left:
                self._no_longer_pending(level, len(left))
        for sets in (self._due, self._handed_out):
            for level in list(sets):
                self._take(sets, level, keys)

    def freeze(self) -> tuple[tuple[int, BitMap64], ...]:
        """(level, positions of rows that are not gone), sets that never change again; a level may come several times,
        with other positions. O(levels).
        """
        return tuple(
            (level, kept.freeze())
            for sets in (self._pending, self._due, self._handed_out)
            for level, kept in sets.items()
        )

    def _take(self, sets: dict[int, _Keys], level: int, keys: BitMap64) -> BitMap64:
        """Takes positions out of the set of a level; those that were in it."""
        kept = sets[level]
        hit = kept.keys & keys
        if hit:
            kept.remove(hit)
            if not kept.keys:
                del sets[level]
        return hit

    def _no_longer_pending(self, level: int, rows: int) -> None:
        self._pending_rows[level] -= rows
        if not self._pending_rows[level]:
            del self._pending_rows[level]


def pending_rows(parts: Iterable[LevelRows]) -> dict[int, int]:
    """The pending rows of several indexes by level, of levels that have any."""
    found: dict[int, int] = {}
    for part in parts:
        for level, rows in part.pending_rows.items():
            found[level] = found.get(level, 0) + rows
    return found


class _Keys:
    """A set that can be frozen in O(1): it is copied before it is changed the next time."""

    __slots__ = ("_frozen", "keys")

    def __init__(self) -> None:
        self.keys = BitMap64()
        self._frozen = False

    def add(self, keys: BitMap64) -> None:
        if self._frozen:
            self.keys, self._frozen = self.keys | keys, False
        else:
            self.keys |= keys

    def remove(self, keys: BitMap64) -> None:
        if self._frozen:
            self.keys, self._frozen = self.keys - keys, False
        else:
            self.keys -= keys

    def freeze(self) -> BitMap64:
        self._frozen = True
        return self.keys
