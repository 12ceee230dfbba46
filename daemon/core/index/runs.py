"""Sorted runs and their merge: the order of hand-out, (deliver_at_ms, ledger_id, entry_id), across many sources.

Owns: a run (rows in that order, read from the front) and taking what is due from several runs in one order.
Does not own: where runs come from (`mutable_bucket`, `segments`) and what taking a row means (`index`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from daemon.core.index.positions import KeyedRows
from storage_backends.formats.row_columns import U64

Place = tuple[int, int, int]
# No row comes at or after it.
LAST_PLACE: Place = ((1 << 64) - 1,) * 3

# Looked at one by one before the end of what is due is searched for.
FEW_ROWS = 3


class SortedRun:
    """Rows in hand-out order, read from the front.

    `stop`: rows from there on are not to be taken yet. `continues`: more rows of the same source, later ones, follow
    in another run, so nothing after this run's last row may overtake them.
    """

    __slots__ = ("_next", "continues", "offset", "rows", "stop")

    def __init__(self, rows: KeyedRows, *, offset: int = 0, stop: int | None = None, continues: bool = False) -> None:
        self.rows = rows
        self.offset = offset
        self.stop = len(rows) if stop is None else stop
        self.continues = continues
        # The row at an offset is due then: it is asked for at every wake-up, and most of the time the same.
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
        """The index behind the last row that is due."""
        next_due_ms = self.next_due_ms()
        if next_due_ms is None or next_due_ms > now_ms:
            return self.offset
        times, now = self.rows.rows.deliver_at_ms, np.uint64(now_ms)
        # Of a trickle one row is due. A search lets go of the interpreter's lock, and may wait to get it back.
        for end in range(self.offset + 1, min(self.offset + FEW_ROWS, self.stop)):
            if times[end] > now:
                return end
        return self.offset + int(times[self.offset : self.stop].searchsorted(now, side="right"))

    def place(self, index: int) -> Place:
        rows = self.rows.rows
        return int(rows.deliver_at_ms[index]), int(rows.ledger_id[index]), int(rows.entry_id[index])

    def end_of(self, bound: Place, end: int) -> int:
        """The index, at most `end`, behind the last row at or before the bound."""
        return self._ends_at(bound, end)[1]

    def end_before(self, bound: Place) -> int:
        """The index behind the last row before the bound."""
        return self._ends_at(bound, self.due_end(bound[0]))[0]

    def _ends_at(self, bound: Place, end: int) -> tuple[int, int]:
        """(the index behind the last row before the bound, the same of those at or before it), both at most `end`."""
        rows, start = self.rows.rows, self.offset
        for column, value in zip((rows.deliver_at_ms, rows.ledger_id, rows.entry_id), bound, strict=True):
            part, wanted = column[start:end], np.uint64(value)
            start += int(part.searchsorted(wanted, side="left"))
            if start == end or column[start] != wanted:
                return start, start
            end = start + int(column[start:end].searchsorted(wanted, side="right"))
        return start, end

    def take(self, end: int) -> KeyedRows:
        taken = self.rows.take(slice(self.offset, end))
        self.offset = end
        return taken


def take_due(runs: Sequence[SortedRun], now_ms: int, limit: int) -> list[tuple[int, KeyedRows]]:
    """About `limit` of the due rows: (index of the run, its rows).

    What is left in the runs, or follows them, comes after everything taken in hand-out order. Empty only when no run
    has a due row.
    """
    ends = [run.due_end(now_ms) for run in runs]
    if len(runs) == 1 and runs[0].offset < ends[0] <= runs[0].offset + limit:
        return [(0, runs[0].take(ends[0]))]
    return _take_up_to(runs, ends, limit)


def take_before(runs: Sequence[SortedRun], bound: Place, limit: int) -> list[tuple[int, KeyedRows]]:
    """About `limit` of the rows that come before a place: (index of the run, its rows)."""
    return _take_up_to(runs, [run.end_before(bound) for run in runs], limit)


def _take_up_to(runs: Sequence[SortedRun], ends: Sequence[int], limit: int) -> list[tuple[int, KeyedRows]]:
    """About `limit` of the rows of each run before its end: (index of the run, its rows)."""
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
    """The next place after one."""
    deliver_at_ms, ledger_id, entry_id = place
    last = LAST_PLACE[2]
    if entry_id < last:
        return deliver_at_ms, ledger_id, entry_id + 1
    return (deliver_at_ms, ledger_id + 1, 0) if ledger_id < last else (deliver_at_ms + 1, 0, 0)


def first_time_ms(times_ms: U64, from_ms: int = 0) -> int | None:
    """The earliest of times from one on; None when there is none."""
    chosen = times_ms[times_ms >= np.uint64(from_ms)] if from_ms else times_ms
    return int(chosen.min()) if len(chosen) else None


def earliest(*times_ms: int | None) -> int | None:
    """The first of the times that there are; None when there is none."""
    first_ms = None
    for each_ms in times_ms:
        if each_ms is not None and (first_ms is None or each_ms < first_ms):
            first_ms = each_ms
    return first_ms


def in_due_order(parts: Iterable[KeyedRows]) -> KeyedRows:
    """The rows of all parts in hand-out order."""
    parts = [part for part in parts if len(part)]
    merged = KeyedRows.concat(parts)
    return merged if len(parts) == 1 else merged.take(merged.rows.due_order())


class TieredRuns:
    """Runs that rows are added to in small batches; each is at least twice as long as the next, so there are few."""

    def __init__(self) -> None:
        self.runs: list[SortedRun] = []

    def add(self, rows: KeyedRows) -> None:
        """Rows in any order."""
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
