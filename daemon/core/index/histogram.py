"""How many rows come due when: exact counts in bars of one width, from metadata wherever that is enough.

Owns: the bars, which segments of a bucket must be read to count it, and the counts.
Does not own: reading (the engine), and what of a bucket is asked for (`scan`).

A segment that lies in one bar, and all rows of which are asked for, counts by its number of rows. Where rows are gone,
how many there are in all is known from the bucket's sets: what lies before the first bar, or what lies behind the last,
is what the others leave.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from daemon.core.index.positions import KeyedRows
from daemon.core.index.scan import MemoryPart, Part, SealedPart, of_ledgers
from storage_backends.formats.row_columns import U64

BARS_MAX = 10_000
# So many bars are made where no width is asked for, about.
BARS = 60

I64 = npt.NDArray[np.int64]

_SECOND_MS = 1_000
_MINUTE_MS = 60 * _SECOND_MS
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS


def round_width_ms(span_ms: int) -> int:
    """A width that people like, of which about `BARS` make up the span."""
    widths = itertools.pairwise(itertools.chain((1,), _round_widths_ms()))
    narrower, width_ms = next((below, width) for below, width in widths if width * BARS >= span_ms)
    # The nearer one, as factors go.
    return width_ms if width_ms * narrower * BARS**2 <= span_ms**2 else narrower


def _round_widths_ms() -> Iterator[int]:
    """Ascending, without end."""
    yield from (1, 2, 5, 10, 20, 50, 100, 200, 500)
    for unit_ms in (_SECOND_MS, _MINUTE_MS):
        yield from (unit_ms * number for number in (1, 2, 5, 10, 15, 30))
    yield from (_HOUR_MS * number for number in (1, 2, 3, 6, 12))
    for power in itertools.count():
        yield from (_DAY_MS * number * 10**power for number in (1, 2, 5))


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Bar i is from_ms + i * width_ms <= deliver_at_ms < from_ms + (i + 1) * width_ms, and < until_ms."""

    from_ms: int
    until_ms: int
    width_ms: int

    @property
    def count(self) -> int:
        return -(-(self.until_ms - self.from_ms) // self.width_ms)

    def slots(self, times: U64) -> I64:
        """The bar of each time, counted from 1: 0 is before the first, count + 1 behind the last."""
        slots = np.zeros(len(times), np.int64)
        inside = (times >= np.uint64(self.from_ms)) & (times < np.uint64(self.until_ms))
        slots[inside] = (times[inside] - np.uint64(self.from_ms)) // np.uint64(self.width_ms) + np.uint64(1)
        slots[times >= np.uint64(self.until_ms)] = self.count + 1
        return slots


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """`rows`: i64[bars + 2], what lies before the first bar, in each bar, and behind the last. `segments_counted`: by
    their metadata."""

    rows: I64
    segments_counted: int
    segments_read: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rows + other.rows,
            self.segments_counted + other.segments_counted,
            self.segments_read + other.segments_read,
        )

    @staticmethod
    def nothing(bars: Bars) -> Counts:
        return Counts(np.zeros(bars.count + 2, np.int64), 0, 0)


class PartCount:
    """Counting what of one bucket is asked for. Not for the event loop; for one thread at a time.

    for number in needed: read(number, its rows), unless is_complete; counts()
    """

    def __init__(self, part: Part, bars: Bars, ledgers: tuple[int, int] | None) -> None:
        self._part = part = of_ledgers(part, ledgers)
        self._bars = bars
        self._rows = np.zeros(bars.count + 2, np.int64)
        # How many rows there are, None where all of them are counted one by one; where those lie that are not.
        self._total: int | None = None
        self._rest: int | None = None
        self._earlier_rows = 0
        self._segments_counted = self._segments_read = 0
        self.needed: list[int] = []
        if isinstance(part, MemoryPart):
            self._add(part.rows())
            return
        self._add(part.wanted_among(part.late))
        if part.wanted is None:
            self._count_whole(part)
        elif part.wanted:
            self._choose(part, len(part.wanted))

    def _count_whole(self, part: SealedPart) -> None:
        """Every row from the start on is asked for."""
        table, (first, offset) = part.table, part.start
        rows = np.diff(table.row_ends, prepend=0)[first:]
        if not len(rows):
            return
        rows[0] -= offset
        low, high = self._slots_of(part, first)
        owed = table.min_ms[first:] >= np.uint64(part.first_ms)
        counted = (low == high) & owed
        self._rows += np.bincount(low[counted], rows[counted], len(self._rows)).astype(np.int64)
        none = table.max_ms[first:] < np.uint64(part.first_ms)
        self._segments_counted = int(np.count_nonzero(counted | none))
        self.needed = (np.flatnonzero(~(counted | none)) + first).tolist()

    def _choose(self, part: SealedPart, total: int) -> None:
        """Chooses what not to read: the segments before the first bar or those behind the last, whichever hold more
        rows.
        """
        first = part.start[0]
        rows = np.diff(part.table.row_ends, prepend=0)[first:]
        low, high = self._slots_of(part, first)
        behind = len(self._rows) - 1
        # Rows that are too early to be owed are counted one by one, and so told from what is left.
        owed = part.table.min_ms[first:] >= np.uint64(part.first_ms)
        is_before, is_behind = (high == 0) & owed, (low == behind) & owed
        left = is_before if rows[is_before].sum() > rows[is_behind].sum() else is_behind
        if left.any():
            self._rest = 0 if left is is_before else behind
            self._segments_counted = int(np.count_nonzero(left))
        self._total = total
        if not self.is_complete:
            self.needed = (np.flatnonzero(~left) + first).tolist()

    def _slots_of(self, part: SealedPart, first: int) -> tuple[I64, I64]:
        table = part.table
        return self._bars.slots(table.min_ms[first:]), self._bars.slots(table.max_ms[first:])

    @property
    def is_complete(self) -> bool:
        """Whether what was not read yet has nothing more."""
        return self._total is not None and self._total == int(self._rows.sum()) + self._earlier_rows

    def read(self, number: int, rows: KeyedRows) -> None:
        """A segment that is needed."""
        if isinstance(self._part, SealedPart):
            self._segments_read += 1
            self._add(self._part.wanted_among(self._part.from_start(number, rows)))

    def _add(self, rows: KeyedRows) -> None:
        times = rows.rows.deliver_at_ms
        owed = times >= np.uint64(self._part.first_ms)
        if not owed.all():
            self._earlier_rows += len(times) - int(np.count_nonzero(owed))
            times = times[owed]
        self._rows += np.bincount(self._bars.slots(times), minlength=len(self._rows))

    def counts(self) -> Counts:
        """Once everything that is needed was read."""
        if self._total is not None and self._rest is not None:
            self._rows[self._rest] += self._total - int(self._rows.sum()) - self._earlier_rows
        return Counts(self._rows, self._segments_counted, self._segments_read)
