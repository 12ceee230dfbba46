"""Keeps rows of u64 columns sorted by their first one, in a few runs, and merges these step by step.

    add -> a run, the newest -> merged with others of like size -> ... -> one large run

Runs are kept by age. Rows with one value in the first column keep the order in which they came, within a run and over
runs. A merge takes adjacent runs into new columns, a bounded number of rows at each step; they are found in the old
runs until it ends. While rows are merged, the owner's `Keeps` leaves out those that it no longer needs.

Sorting is by the first column alone: a row takes nothing but its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from storage_backends.formats.row_columns import U64

Columns: TypeAlias = tuple[U64, ...]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.intp]
Keeps: TypeAlias = Callable[[Columns], Mask | None]
"""Returns the mask of rows that are needed, or None for all. The rows ascend by the first column, then by age."""
MayTake: TypeAlias = Callable[[int], bool]
"""Returns whether a merge may take so many bytes for a time."""

SMALL_ROWS: Final = 1 << 10
"""The most rows of a run to which rows are added at once, without a merge."""
STEP_ROWS: Final = 1 << 12
"""The most rows of one step of a merge, but for a few of each run: 1 to 2 ms."""
# The part of these rows that is looked at of a short run
_SHARES = 128
# Runs of like size from which on they are merged: a look-up in one more run costs more than merging. The most that are
# merged together
_LIKE_RUNS = 2
_RUNS_MERGED_MAX = 64
_ROW_BYTES = 8


class ColumnRun:
    """Rows that ascend by the first column. `is_merging` is whether a merge takes them."""

    __slots__ = ("columns", "is_merging")

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.is_merging = False

    @staticmethod
    def of(columns: Columns) -> ColumnRun:
        """Make a run of rows in the order of their age, with columns of its own. It may run in another thread."""
        order = np.argsort(columns[0], kind="stable")
        return ColumnRun(tuple(column[order] for column in columns))

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def tier(self) -> int:
        """The size, in powers of four."""
        return (len(self) // SMALL_ROWS).bit_length() >> 1

    def take(self, index: Places | Mask | slice) -> Columns:
        return tuple(column[index] for column in self.columns)


class Hits(NamedTuple):
    """Ranges `first`..`end` (exclusive) of a run, one for each place `asked` whose value the run has."""

    run: ColumnRun
    asked: Places
    first: Places
    end: Places


class _Merge:
    """A merge of adjacent runs. `is_whole` is whether it is a sweep, of all runs that there were when it began."""

    def __init__(self, runs: Sequence[ColumnRun], *, is_whole: bool) -> None:
        self.runs = runs
        self.is_whole = is_whole
        self.rows = sum(map(len, runs))
        self._taken = [0] * len(runs)
        self._columns = tuple(np.empty(self.rows, np.uint64) for _ in runs[0].columns)
        self._kept = 0
        for run in runs:
            run.is_merging = True

    def step(self, keeps: Keeps) -> bool:
        """Merge the next rows, about `STEP_ROWS`; return whether there are more."""
        rows = self._next_rows()
        kept = keeps(rows)
        end = self._kept + (len(rows[0]) if kept is None else int(np.count_nonzero(kept)))
        for column, values in zip(self._columns, rows, strict=True):
            column[self._kept : end] = values if kept is None else values[kept]
        self._kept = end
        return any(taken < len(run) for taken, run in zip(self._taken, self.runs, strict=True))

    def _next_rows(self) -> Columns:
        """Take the next rows of all runs, in order.

        Of each run a share is looked at, by what is left of it. Rows up to the lowest last value of a share can be
        taken. Equal values of newer runs must wait if the run that has this value may go on with it.
        """
        left = [len(run) - taken for taken, run in zip(self._taken, self.runs, strict=True)]
        total = sum(left)
        # A few rows more of each, or short runs would end each step at their next row.
        least = 1 + STEP_ROWS // _SHARES
        ends = [
            taken + min(rows, least + STEP_ROWS * rows // total) for taken, rows in zip(self._taken, left, strict=True)
        ]
        limit: np.uint64 | None = None
        until = -1
        for number, (run, end) in enumerate(zip(self.runs, ends, strict=True)):
            if end < len(run) and (limit is None or run.columns[0][end - 1] < limit):
                limit, until = run.columns[0][end - 1], number
        parts = []
        for number, (run, end) in enumerate(zip(self.runs, ends, strict=True)):
            taken = self._taken[number]
            if limit is not None and number != until:
                side: Literal["left", "right"] = "right" if number < until else "left"
                end = taken + int(np.searchsorted(run.columns[0][taken:end], limit, side=side))
            if end > taken:
                parts.append(run.take(slice(taken, end)))
                self._taken[number] = end
        return _in_order(parts)

    def merged(self) -> ColumnRun:
        """Return the run of what was kept; the rest of its memory is given back. Call once."""
        for column in self._columns:
            column.resize(self._kept, refcheck=False)
        return ColumnRun(self._columns)


def _in_order(parts: Sequence[Columns]) -> Columns:
    """Join rows of several runs, each in order, to rows in order."""
    if len(parts) == 1:
        return parts[0]
    joined = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(joined[0], kind="stable")
    return tuple(column[order] for column in joined)


class MergeStep(NamedTuple):
    """The result of a step: whether more may follow at once, and whether it ended a sweep."""

    goes_on: bool
    swept: bool = False


class ColumnRuns:
    """Rows of some u64 columns in runs. `keeps` is asked of rows that are merged or swept."""

    def __init__(self, columns: int, keeps: Keeps) -> None:
        self._row_bytes = _ROW_BYTES * columns
        self._keeps = keeps
        # The oldest run first
        self._runs: list[ColumnRun] = []
        # The last one begun is the last
        self._merges: list[_Merge] = []
        self._rows = 0
        self._merging_rows = 0
        self._sweep_wanted = False

    def __len__(self) -> int:
        """Return the number of rows, those that are no longer needed included."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """The size of all columns, those that merges fill included (bytes)."""
        return self._row_bytes * (self._rows + self._merging_rows)

    @property
    def runs(self) -> int:
        """The number of runs in which rows are looked up."""
        return len(self._runs)

    # ---- rows come

    def add(self, columns: Columns) -> None:
        """Add rows, newer than all others, later ones of them newer."""
        if not len(columns[0]):
            return
        new = ColumnRun.of(columns)
        self._rows += len(new)
        if self._runs and not (last := self._runs[-1]).is_merging and len(last) <= SMALL_ROWS:
            if len(last) + len(new) > SMALL_ROWS:
                last = self._swept(last)
            if len(last) + len(new) <= SMALL_ROWS or not len(last):
                new = ColumnRun(_in_order((last.columns, new.columns)))
                self._runs.pop()
        self._runs.append(new)

    def add_oldest(self, run: ColumnRun) -> None:
        """Add rows that are older than all others."""
        if len(run):
            self._rows += len(run)
            self._runs.insert(0, run)

    def _swept(self, last: ColumnRun) -> ColumnRun:
        """Leave out rows of the newest run that are no longer needed."""
        kept = self._keeps(last.columns)
        if kept is not None and not kept.all():
            swept = self._runs[-1] = ColumnRun(last.take(kept))
            self._rows -= len(last) - len(swept)
            return swept
        return last

    # ---- rows are found

    def hits(self, asked: U64) -> list[Hits]:
        """Return where the runs have values in the first column, the newest run first. `asked` are any values."""
        order = np.argsort(asked, kind="stable")
        # Ascending values find their places faster.
        values = asked[order]
        found = []
        for run in reversed(self._runs):
            column = run.columns[0]
            first = np.searchsorted(column, values)
            here = np.flatnonzero(column[np.minimum(first, len(column) - 1)] == values)
            if len(here):
                first = first[here]
                found.append(Hits(run, order[here], first, _ends(column, first, values[here])))
        return found

    # ---- runs are merged

    def sweep(self) -> None:
        """Have `keeps` look at all rows that are here now: the steps merge all runs into one."""
        self._sweep_wanted = True

    def step(self, may_take: MayTake) -> MergeStep:
        """Take one bounded step of the merges, of which the newest goes first."""
        if self._sweep_wanted and not self._runs:
            self._sweep_wanted = False
            return MergeStep(goes_on=False, swept=True)
        # A sweep begins when no other merge is under way.
        if not (self._sweep_wanted and self._merges):
            self._begin(may_take)
        if not self._merges:
            return MergeStep(goes_on=False)
        merge = self._merges[-1]
        if merge.step(self._keeps):
            return MergeStep(goes_on=True)
        self._end(merge)
        return MergeStep(goes_on=True, swept=merge.is_whole)

    def _begin(self, may_take: MayTake) -> None:
        """Begin the sweep that is wanted, or else the next merge, if there is memory for it."""
        everything = slice(0, len(self._runs))
        for chosen in (everything, self._like_runs()) if self._sweep_wanted else (self._like_runs(),):
            runs = self._runs[chosen]
            rows = sum(map(len, runs))
            if rows and may_take(self._row_bytes * rows):
                is_whole = self._sweep_wanted and chosen == everything
                self._merges.append(_Merge(runs, is_whole=is_whole))
                self._merging_rows += rows
                if is_whole:
                    self._sweep_wanted = False
                return

    def _like_runs(self) -> slice:
        """Return adjacent runs, in no merge, of which enough are of one size and none is larger; else none."""
        # Tier -> (runs of it, behind the newest of these)
        seen: dict[int, tuple[int, int]] = {}
        for number in range(len(self._runs) - 1, -1, -1):
            run = self._runs[number]
            if run.is_merging:
                seen.clear()
                continue
            tier = run.tier
            for smaller in [each for each in seen if each < tier]:
                del seen[smaller]
            count, end = seen.get(tier, (0, number + 1))
            seen[tier] = count + 1, end
            if count + 1 >= _LIKE_RUNS:
                first = number
                while first and end - first < _RUNS_MERGED_MAX and self._may_join(self._runs[first - 1], tier):
                    first -= 1
                return slice(first, end)
        return slice(0, 0)

    @staticmethod
    def _may_join(run: ColumnRun, tier: int) -> bool:
        return not run.is_merging and run.tier <= tier

    def _end(self, merge: _Merge) -> None:
        """Put the merged run in the place of its sources."""
        self._merges.remove(merge)
        self._merging_rows -= merge.rows
        first = self._runs.index(merge.runs[0])
        merged = merge.merged()
        self._runs[first : first + len(merge.runs)] = [merged] if len(merged) else []
        self._rows -= merge.rows - len(merged)


def _ends(column: U64, first: Places, values: U64) -> Places:
    """Return the places behind the last of each value, which first stands at `first`. Most stand there once."""
    end = first + 1
    again = np.flatnonzero(column[np.minimum(end, len(column) - 1)] == values)
    # The last row of the column seems to repeat.
    again = again[end[again] < len(column)]
    if len(again):
        end[again] = np.searchsorted(column, values[again], side="right")
    return end


def rows_of(found: Sequence[Hits]) -> tuple[Places, Columns]:
    """Return (place asked for, row) of each row of at least one range; of each range the newest row first."""
    asked, columns = [], []
    for hits in found:
        rows = hits.end - hits.first
        back = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        asked.append(np.repeat(hits.asked, rows))
        columns.append(hits.run.take(np.repeat(hits.end, rows) - 1 - back))
    return np.concatenate(asked), tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))
