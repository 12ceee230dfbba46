"""Keeps sorted runs and merges them in due order, (deliver_at_ms, ledger_id, entry_id), across many sources.

Rows that arrive in due order make runs without a sort (FIFO runs). Rows of one delay level, or of any constant delay,
do. A batch that is in due order, and not before the end of a run, belongs to that run as the range of the bucket's
columns where it lies anyway. It is not sorted, copied, or searched for when it is nearly due.

Several simultaneous delays make as many runs, by the rule of patience sorting: of the runs that a row may follow, it
follows the one that ends last. Random delays would break into many short ranges: if a third of the pieces begin a run
or find none, no further rows of this bucket enter runs.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.core.index.position_keys import KeyedRows
from storage_backends.formats.row_columns import U64, Rows

Place = tuple[int, int, int]
# A point in due order after all rows
LAST_PLACE: Place = ((1 << 64) - 1,) * 3

# Rows that are checked one by one before the end of what is due is searched for
FEW_ROWS = 3


class SortedRun:
    """Rows in due order, read from the front.

    Rows from `stop` on must not be taken yet. With `continues`, later rows of the same source follow in another run, so
    nothing after this run's last row may overtake them.
    """

    __slots__ = ("_next", "continues", "offset", "rows", "stop")

    def __init__(self, rows: KeyedRows, *, offset: int = 0, stop: int | None = None, continues: bool = False) -> None:
        self.rows = rows
        self.offset = offset
        self.stop = len(rows.keys) if stop is None else stop
        self.continues = continues
        # (offset, due time of its row): every wake-up asks for it, mostly for the same row.
        self._next = (-1, 0)

    def __len__(self) -> int:
        return self.stop - self.offset

    def next_due_ms(self) -> int | None:
        offset = self.offset
        if offset >= self.stop:
            return None
        if self._next[0] != offset:
            self._next = (offset, int(self.rows.rows.deliver_at_ms[offset]))
        return self._next[1]

    def due_end(self, now_ms: int) -> int:
        """Return the index behind the last due row."""
        offset, stop = self.offset, self.stop
        known_offset, known_ms = self._next
        if offset >= stop or (known_offset == offset and known_ms > now_ms):
            return offset
        times, now = self.rows.rows.deliver_at_ms, np.uint64(now_ms)
        # A trickle has one due row. A search releases the interpreter's lock, and may wait to get it back.
        for end in range(offset, min(offset + FEW_ROWS, stop)):
            if times[end] > now:
                return end
        if stop - offset <= FEW_ROWS:
            return stop
        return offset + int(times[offset:stop].searchsorted(now, side="right"))

    def place(self, index: int) -> Place:
        rows = self.rows.rows
        return int(rows.deliver_at_ms[index]), int(rows.ledger_id[index]), int(rows.entry_id[index])

    def end_of(self, bound: Place, end: int) -> int:
        """Return the index, at most `end`, behind the last row at or before the bound."""
        return self._ends_at(bound, end)[1]

    def end_before(self, bound: Place) -> int:
        """Return the index behind the last row before the bound."""
        return self._ends_at(bound, self.due_end(bound[0]))[0]

    def _ends_at(self, bound: Place, end: int) -> tuple[int, int]:
        """Return the index behind the last row before the bound, and behind the last at or before it; at most `end`."""
        rows, start = self.rows.rows, self.offset
        for column, value in zip((rows.deliver_at_ms, rows.ledger_id, rows.entry_id), bound, strict=True):
            part, wanted = column[start:end], np.uint64(value)
            start += int(part.searchsorted(wanted, side="left"))
            if start == end or column[start] != wanted:
                return start, start
            end = start + int(column[start:end].searchsorted(wanted, side="right"))
        return start, end

    def take(self, end: int) -> KeyedRows:
        is_whole = not self.offset and end == len(self.rows.keys)
        taken = self.rows if is_whole else self.rows.take(slice(self.offset, end))
        self.offset = end
        return taken


def take_due(runs: Sequence[SortedRun], now_ms: int, limit: int) -> list[tuple[int, KeyedRows]]:
    """Take about `limit` due rows: (index of the run, its rows).

    Rows left in the runs, or following them, come after everything taken in due order. The result is empty only if no
    run has a due row.
    """
    if len(runs) == 1:
        run, end = runs[0], runs[0].due_end(now_ms)
        if run.offset < end <= run.offset + limit:
            return [(0, run.take(end))]
        return _take_up_to(runs, [end], limit)
    return _take_up_to(runs, [run.due_end(now_ms) for run in runs], limit)


def take_before(runs: Sequence[SortedRun], bound: Place, limit: int) -> list[tuple[int, KeyedRows]]:
    """Take about `limit` rows before a point in due order: (index of the run, its rows)."""
    return _take_up_to(runs, [run.end_before(bound) for run in runs], limit)


def _take_up_to(runs: Sequence[SortedRun], ends: Sequence[int], limit: int) -> list[tuple[int, KeyedRows]]:
    """Take about `limit` rows from each run before its end: (index of the run, its rows)."""
    due = [(number, run, end) for number, run in enumerate(runs) if (end := ends[number]) > run.offset]
    if not due:
        return []
    quota = max(1, limit // len(due))
    if len(due) == 1 and len(due[0][1]) <= quota:
        number, run, end = due[0]
        return [(number, run.take(end))]
    bounds = []
    for _, run, end in due:
        if end - run.offset > quota:
            bounds.append(run.place(run.offset + quota - 1))
        elif run.continues and end == run.stop:
            bounds.append(run.place(end - 1))
    bound = min(bounds) if bounds else None
    taken = []
    for number, run, end in due:
        stop = end if bound is None else run.end_of(bound, end)
        if stop > run.offset:
            taken.append((number, run.take(stop)))
    return taken


def behind(place: Place) -> Place:
    """Return the next point in due order after one."""
    deliver_at_ms, ledger_id, entry_id = place
    last = LAST_PLACE[2]
    if entry_id < last:
        return deliver_at_ms, ledger_id, entry_id + 1
    return (deliver_at_ms, ledger_id + 1, 0) if ledger_id < last else (deliver_at_ms + 1, 0, 0)


def first_time_ms(times_ms: U64, from_ms: int = 0) -> int | None:
    """Return the earliest of the times from `from_ms` on, or None."""
    chosen = times_ms[times_ms >= np.uint64(from_ms)] if from_ms else times_ms
    return int(chosen.min()) if len(chosen) else None


def earliest(*times_ms: int | None) -> int | None:
    """Return the earliest of the times that are not None, or None."""
    first_ms = None
    for each_ms in times_ms:
        if each_ms is not None and (first_ms is None or each_ms < first_ms):
            first_ms = each_ms
    return first_ms


def in_due_order(parts: Sequence[KeyedRows]) -> KeyedRows:
    """Return the rows of all parts in due order."""
    if len(parts) == 1:
        return parts[0]
    parts = [part for part in parts if len(part)]
    merged = KeyedRows.concat(parts)
    return merged if len(parts) == 1 else merged.take(merged.rows.due_order())


class TieredRuns:
    """Runs that grow by small batches; each is at least twice as long as the next, so there are few."""

    def __init__(self) -> None:
        self.runs: list[SortedRun] = []

    def add(self, rows: KeyedRows) -> None:
        """Add rows in any order."""
        run = SortedRun(rows.take(rows.rows.due_order()))
        while self.runs and 2 * len(run) >= len(self.runs[-1]):
            previous = self.runs.pop()
            run = SortedRun(in_due_order([previous.take(previous.stop), run.take(run.stop)]))
        if len(run):
            self.runs.append(run)

    def next_due_ms(self) -> int | None:
        first_ms = earliest(*[run.next_due_ms() for run in self.runs])
        if not all(self.runs):
            self.runs = [run for run in self.runs if len(run)]
        return first_ms


RUNS_MAX = 32
# Rows of a run that are prepared for taking at a time
CHUNK_ROWS = 16_384
# For shorter pieces, each in due order, sorting the batch is faster than separating them.
PIECE_ROWS_LEAST = 16
# Pieces that followed no run, beyond half of those that did, after which no further rows are taken
MISSES_MAX = 64

# Rows of columns from the first to the last, exclusive
Range = tuple[int, int]
Index = slice | npt.NDArray[np.integer[Any]]
Take = Callable[[Index], KeyedRows]


class Ranges:
    """Ranges of columns in an order, which may be taken from the front. `rows_left`, `len`: rows that are left."""

    def __init__(self) -> None:
        self._firsts = array.array("Q")
        self._ends = array.array("Q")
        self._at = 0
        self.rows_left = 0

    def __len__(self) -> int:
        return self.rows_left

    @property
    def first(self) -> int:
        """The first row that is left; there must be one."""
        return self._firsts[self._at]

    def add(self, first: int, end: int) -> None:
        if len(self._ends) > self._at and self._ends[-1] == first:
            self._ends[-1] = end
        else:
            self._firsts.append(first)
            self._ends.append(end)
        self.rows_left += end - first

    def rows(self) -> Index:
        """Return all rows that are left."""
        return self._index(len(self._ends) - self._at)

    def take(self, rows_max: int) -> Index:
        """Take the next rows, at most `rows_max`, and at least one if one is left."""
        at = self._at
        first, end = self._firsts[at], self._ends[at]
        if end - first >= rows_max or len(self._ends) - at == 1:
            stop = min(end, first + rows_max)
            self._firsts[at] = stop
            self._at += stop == end
            self.rows_left -= stop - first
            return slice(first, stop)
        count = min(rows_max, len(self._ends) - at)
        taken_rows = np.cumsum(_column(self._ends, at, count) - _column(self._firsts, at, count))
        count = max(1, int(taken_rows.searchsorted(rows_max, side="right")))
        index = self._index(count)
        self._at += count
        self.rows_left -= int(taken_rows[count - 1])
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
    """Return a copy, since an array whose memory is shared cannot grow."""
    return np.array(numbers[first : first + count], np.int64)


class _Run:
    """A FIFO run. `chunk` has rows that are ready to be taken, before those of `ranges`.

    `end` is the place of the last row ever.
    """

    __slots__ = ("chunk", "end", "ranges")

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.chunk = SortedRun(KeyedRows.empty())
        self.end: Place = (0, 0, 0)

    def __len__(self) -> int:
        return len(self.chunk) + len(self.ranges)

    def next_due_ms(self, times: U64) -> int | None:
        chunk = self.chunk
        if chunk.offset < chunk.stop:
            return chunk.next_due_ms()
        return int(times[self.ranges.first]) if self.ranges.rows_left else None


class FifoRuns:
    """At most `runs_max` runs over the columns of a bucket, which are passed in.

    `take` returns rows of the columns, and `times` are their due times.
    """

    def __init__(self, *, runs_max: int = RUNS_MAX) -> None:
        self._runs_max = runs_max
        self._takes = runs_max > 0
        # Ordered by where they end; `_ends` has these places.
        self._runs: list[_Run] = []
        self._ends: list[Place] = []
        self._hits = 0
        self._misses = 0
        # A lower bound of the due times while it is known: taking from a run changes it.
        self._next_due_ms: int | None = None
        self._is_next_due_known = True

    def add(self, rows: Rows, first: int) -> list[Range]:
        """Add rows that lie in the columns from `first` on; return the ranges of those that follow no run."""
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
        """Return (the run that the first rows of an ordered piece follow or -1, where rows for a later run begin)."""
        after = bisect.bisect_right(self._ends, _place(rows, start)) - 1
        if after + 1 == len(self._ends) or _place(rows, stop - 1) < self._ends[after + 1]:
            return after, stop
        return after, _first_from(rows, start, stop, self._ends[after + 1])

    def _follow(self, after: int, added: Range, end: Place) -> bool:
        """Append rows to the run that they follow, or to a new one; return False if there are too many runs."""
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
        """Return a lower bound of the due times (Unix ms), or None without rows."""
        if not self._is_next_due_known:
            self._next_due_ms = earliest(*[run.next_due_ms(times) for run in self._runs])
            self._is_next_due_known = True
        return self._next_due_ms

    def runs_at(self, now_ms: int, times: U64, take: Take) -> list[SortedRun]:
        """Return sorted runs with the next rows of every run that has rows due at `now_ms`, for taking at once."""
        next_due_ms = self._next_due_ms if self._is_next_due_known else self.next_due_ms(times)
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
                chunk = run.chunk
                if chunk.offset == chunk.stop:
                    chunk = run.chunk = SortedRun(take(run.ranges.take(CHUNK_ROWS)))
                chunk.continues = run.ranges.rows_left > 0
                found.append(chunk)
        if used_up:
            self._runs = [run for run in self._runs if len(run)]
            self._ends = [run.end for run in self._runs]
        return found


def _place(rows: Rows, row: int) -> Place:
    return int(rows.deliver_at_ms[row]), int(rows.ledger_id[row]), int(rows.entry_id[row])


def _first_from(rows: Rows, start: int, stop: int, bound: Place) -> int:
    """Return the first row of an ordered piece that does not lie before the bound."""
    for column, value in zip((rows.deliver_at_ms, rows.ledger_id, rows.entry_id), bound, strict=True):
        part, wanted = column[start:stop], np.uint64(value)
        stop = start + int(part.searchsorted(wanted, side="right"))
        start += int(part.searchsorted(wanted, side="left"))
    return start


def _cuts(rows: Rows) -> list[int] | None:
    """Return the rows that lie before their predecessor in due order, or None if the pieces would be short."""
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
