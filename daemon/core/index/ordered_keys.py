"""Finding rows of a growing column of keys.

Owns: the order of the keys, made when it is first asked for and kept up with the column.
Does not own: the columns (`mutable_bucket`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from storage_backends.formats.row_columns import U64

Places = npt.NDArray[np.intp]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """Rows first..end of the column by ascending key, of one key as they came; `places` is None if all came so."""

    first: int
    end: int
    keys: U64
    places: Places | None


class KeyOrder:
    """A few sorted runs, each at least twice as long as the next: asking again costs what has come since."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def last_of(self, column: U64, asked: U64) -> Places:
        """The place of the last row of each key that is asked for and is in the column; no key is asked for twice."""
        self._follow(column)
        found = []
        left = asked
        for run in reversed(self._runs):
            ends = np.searchsorted(run.keys, left, side="right")
            hit = (ends > 0) & (run.keys[ends - 1] == left)
            places = ends[hit] - 1
            found.append(run.first + (places if run.places is None else run.places[places]))
            left = left[~hit]
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _follow(self, column: U64) -> None:
        end = len(column)
        first = self._runs[-1].end if self._runs else 0
        if first == end:
            return
        while self._runs and 2 * (end - first) >= len(self._runs[-1].keys):
            first = self._runs.pop().first
        keys = column[first:end]
        places = None
        if (keys[1:] < keys[:-1]).any():
            places = np.argsort(keys, kind="stable")
            keys = keys[places]
        self._runs.append(_Run(first, end, keys, places))
