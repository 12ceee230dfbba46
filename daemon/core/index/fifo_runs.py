"""Rows that come in due order: runs that cost no sort.

Owns: which rows of a batch follow the end of a run, and the rows of each run as ranges of the bucket's columns.
Does not own: the columns and the rows that fit no run (`mutable_bucket`), and taking from runs in one order (`runs`).

Rows of one delay level, or of any constant delay, come in due order. A batch that is in due order, and does not lie
before the end of a run, belongs to that run as the range of the columns where it lies anyway: it is not sorted, nor
copied, nor looked for when its time is near. Several delays at a time make as many runs, by the rule of patience
sorting: of the runs that a row may follow it follows the one that ends last. Random delays would come to nothing in
many short ranges: where a third of the pieces begins a run, or finds none, no more rows are taken in this bucket.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.core.index.positions import KeyedRows
from daemon.core.index.runs import Place, SortedRun, earliest
from storage_backends.formats.row_columns import U64, Rows

RUNS_MAX = 32
# Rows of a run that are made ready to be taken at a time.
CHUNK_ROWS = 16_384
# A batch of shorter pieces, each in due order, is sorted sooner than they are told apart.
PIECE_ROWS_LEAST = 16
# Pieces that followed no run, beyond half of those that did, before no more rows are taken.
MISSES_MAX = 64

# Rows of columns: from the first up to the last, not included.
Range = tuple[int, int]
Index = slice | npt.NDArray[np.integer[Any]]
Take = Callable[[Index], KeyedRows]


class Ranges:
    """Ranges of columns in an order, which may be taken from the front. `len`: rows that are left."""

    def __init__(self) -> None:
        self._firsts = array.array("Q")
        self._ends = array.array("Q")
        self._at = 0
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def first(self) -> int:
        """The first row that is left; there is one."""
        return self._firsts[self._at]

    def add(self, first: int, end: int) -> None:
        if len(self._ends) > self._at and self._ends[-1] == first:
            self._ends[-1] = end
        else:
            self._firsts.append(first)
            self._ends.append(end)
        self._rows += end - first

    def rows(self) -> Index:
        """All rows that are left."""
        return self._index(len(self._ends) - self._at)

    def take(self, rows_max: int) -> Index:
        """The next rows, at most so many, and at least one if one is left."""
        count = 1
        if self._ends[self._at] - self._firsts[self._at] < rows_max:
            count = min(rows_max, len(self._ends) - self._at)
            lengths = _column(self._ends, self._at, count) - _column(self._firsts, self._at, count)
            count = max(1, int(np.cumsum(lengths).searchsorted(rows_max, side="right")))
        index = self._index(count)
        if isinstance(index, slice):
            index = slice(index.start, min(index.stop, index.start + rows_max))
            taken = index.stop - index.start
            self._firsts[self._at] = index.stop
            count = int(index.stop == self._ends[self._at])
        else:
            taken = len(index)
        self._at += count
        self._rows -= taken
        return index

    def _index(self, count: int) -> Index:
        if not count:
            return slice(0, 0)
        if count == 1:
            return slice(self._firsts[self._at], self._ends[self._at])
        firsts = _column(self._firsts, self._at, count)
        lengths = _column(self._ends, self._at, count) - firsts
        ends = np.cumsum(lengths)
        index: npt.NDArray[np.int64] = np.repeat(firsts - (ends - lengths), lengths) + np.arange(int(ends[-1]))
        return index


def _column(numbers: array.array[int], first: int, count: int) -> npt.NDArray[np.int64]:
    """A copy: an array whose memory is shared cannot grow."""
    return np.array(numbers[first : first + count], np.int64)


class _Run:
    """`chunk`: rows that are ready to be taken, before those of `ranges`. `end`: the place of the last row ever."""

    __slots__ = ("chunk", "end", "ranges")

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.chunk = SortedRun(KeyedRows.empty())
        self.end: Place = (0, 0, 0)

    def __len__(self) -> int:
        return len(self.chunk) + len(self.ranges)

    def next_due_ms(self, times: U64) -> int | None:
        next_due_ms = self.chunk.next_due_ms()
        return int(times[self.ranges.first]) if next_due_ms is None and len(self.ranges) else next_due_ms


class FifoRuns:
    """At most `runs_max` runs over the columns of a bucket, which are passed in: `take` gives rows of them, `times` are
    theirs.
    """

    def __init__(self, *, runs_max: int = RUNS_MAX) -> None:
        self._runs_max = runs_max
        self._takes = runs_max > 0
        # By where they end; `_ends` are these places.
        self._runs: list[_Run] = []
        self._ends: list[Place] = []
        self._hits = 0
        self._misses = 0
        # No row is due before, as long as that is known: what is taken from a run changes it.
        self._next_due_ms: int | None = None
        self._is_next_due_known = True

    def add(self, rows: Rows, first: int) -> list[Range]:
        """Rows that lie in the columns from `first` on; the ranges of those that follow no run."""
        cuts = _cuts(rows) if self._takes else None
        if cuts is None:
            return [(first, first + len(rows))]
        left: list[Range] = []
        for piece in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            start, stop = piece
            while start < stop:
                after, end = self._run_to_follow(rows, start, stop)
                if not self._follow(after, (first + start, first + end), _place(rows, end - 1)):
                    left.append((first + start, first + end))
                else:
                    self._next_due_ms = earliest(self._next_due_ms, int(rows.deliver_at_ms[start]))
                start = end
        self._takes = self._misses < MISSES_MAX + self._hits // 2
        return left

    def _run_to_follow(self, rows: Rows, start: int, stop: int) -> tuple[int, int]:
        """(the run that the first rows of a piece in due order follow, -1: none; where those for a later run begin)."""
        after = bisect.bisect_right(self._ends, _place(rows, start)) - 1
        if after + 1 == len(self._ends) or _place(rows, stop - 1) < self._ends[after + 1]:
            return after, stop
        return after, _first_from(rows, start, stop, self._ends[after + 1])

    def _follow(self, after: int, added: Range, end: Place) -> bool:
        """Puts rows to the run that they follow, or to one that begins; False when there are too many."""
        if after >= 0:
            self._hits += 1
            run = self._runs.pop(after)
            del self._ends[after]
        else:
            self._misses += 1
            if len(self._runs) >= self._runs_max:
                return False
            run = _Run()
        run.ranges.add(*added)
        run.end = end
        place = bisect.bisect_right(self._ends, end)
        self._runs.insert(place, run)
        self._ends.insert(place, end)
        return True

    def next_due_ms(self, times: U64) -> int | None:
        """No row is due before."""
        if not self._is_next_due_known:
            self._next_due_ms = earliest(*[run.next_due_ms(times) for run in self._runs])
            self._is_next_due_known = True
        return self._next_due_ms

    def runs_at(self, now_ms: int, times: U64, take: Take) -> list[SortedRun]:
        """The sorted runs with the next rows of every run that has rows due at `now_ms`. They are about to be taken."""
        next_due_ms = self.next_due_ms(times)
        if next_due_ms is None or next_due_ms > now_ms:
            return []
        self._is_next_due_known = False
        found = []
        used_up = False
        for run in self._runs:
            next_due_ms = run.next_due_ms(times)
            if next_due_ms is None:
                used_up = True
            elif next_due_ms <= now_ms:
                if not len(run.chunk):
                    run.chunk = SortedRun(take(run.ranges.take(CHUNK_ROWS)))
                run.chunk.continues = len(run.ranges) > 0
                found.append(run.chunk)
        if used_up:
            self._runs = [run for run in self._runs if len(run)]
            self._ends = [run.end for run in self._runs]
        return found


def _place(rows: Rows, row: int) -> Place:
    return int(rows.deliver_at_ms[row]), int(rows.ledger_id[row]), int(rows.entry_id[row])


def _first_from(rows: Rows, start: int, stop: int, bound: Place) -> int:
    """The first row of a piece in due order that does not lie before the bound."""
    for column, value in zip((rows.deliver_at_ms, rows.ledger_id, rows.entry_id), bound, strict=True):
        part, wanted = column[start:stop], np.uint64(value)
        stop = start + int(part.searchsorted(wanted, side="right"))
        start += int(part.searchsorted(wanted, side="left"))
    return start


def _cuts(rows: Rows) -> list[int] | None:
    """The rows that lie before the one that came before them, in due order; None when the pieces would be short."""
    times = rows.deliver_at_ms
    if len(times) == 1:
        return []
    falls = times[1:] < times[:-1]
    if not falls.any() and rows.in_position_order():
        return []
    pieces_max = len(times) // PIECE_ROWS_LEAST
    if np.count_nonzero(falls) >= pieces_max:
        return None
    ledger, entry = rows.ledger_id, rows.entry_id
    position_falls = ledger[1:] < ledger[:-1]
    position_falls |= (ledger[1:] == ledger[:-1]) & (entry[1:] < entry[:-1])
    falls |= position_falls & (times[1:] == times[:-1])
    if np.count_nonzero(falls) >= pieces_max:
        return None
    cuts: list[int] = (np.flatnonzero(falls) + 1).tolist()
    return cuts
