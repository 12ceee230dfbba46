"""Counts how many rows come due in each minute or hour of the days to come.

A bucket or segment that lies within one step counts by its number of rows and is not read. A bucket with rows that are
gone is read from the front, because the rows that come due first are gone first, and only until all gone rows were
found: the rest of it is whole. `forecast_job` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage_backends.formats import format_errors
from storage_backends.formats.bucket_format import SegmentInfo, SegmentInfos
from storage_backends.formats.position_bitmap import PositionSet
from storage_backends.formats.row_columns import U64, Rows

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

#: The most steps of a forecast: two years of minutes
STEPS_MAX = 731 * DAY_MS // MINUTE_MS
#: Bytes of a bucket that are read at once, if the segment is not larger
READ_BYTES = 4 << 20

#: The step of rows that are already due. Rows that come due behind the last step have the number after it.
OVERDUE = -1

# Steps that are searched for each number: that takes less time than to sort them.
_SPAN_PER_SLOT = 32

I64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a forecast: step i, from 0 to count - 1, has begin_ms(i) <= deliver_at_ms < begin_ms(i + 1).

    Rows that are due by now are overdue. The steps begin at whole minutes or hours of UTC, the first one with that in
    which `now_ms` lies.
    """

    now_ms: int
    step_ms: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= STEPS_MAX:
            raise ValueError(f"a forecast of {self.count} steps: there must be 1 to {STEPS_MAX}")

    @staticmethod
    def of_days(now_ms: int, step_ms: int, days: int) -> Steps:
        return Steps(now_ms, step_ms, days * DAY_MS // step_ms)

    def begin_ms(self, step: int) -> int:
        return self.now_ms // self.step_ms * self.step_ms + step * self.step_ms

    def begins_ms(self, steps: I64) -> I64:
        return np.asarray(steps * self.step_ms + self.begin_ms(0), np.int64)

    @property
    def until_ms(self) -> int:
        """The end of the last step, exclusive."""
        return self.begin_ms(self.count)

    def of(self, times: U64) -> I64:
        """Return the step of each time: `OVERDUE` if it is due by now, `count` if it lies behind the last."""
        first = np.uint64(self.begin_ms(0))
        steps = np.minimum((np.maximum(times, first) - first) // np.uint64(self.step_ms), np.uint64(self.count))
        found: I64 = steps.astype(np.int64)
        found[times <= np.uint64(self.now_ms)] = OVERDUE
        return found


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """The rows by step: `rows[i]` in the step `step[i]`, ascending, no step twice and none without rows.

    Two more counts are the overdue rows, and those that come due behind the last step.
    """

    step: I64 = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    rows: I64 = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    overdue_rows: int = 0
    beyond_rows: int = 0

    @staticmethod
    def of(steps: Steps, slots: I64, rows: npt.NDArray[np.integer[Any]] | None = None) -> Counts:
        """Count slots as `Steps.of` returns them, in any order.

        `rows` are those of each slot; without it each has one.
        """
        if not len(slots):
            return Counts()
        step, found = _summed(slots, rows)
        inside = (step >= 0) & (step < steps.count)
        return Counts(
            step[inside],
            found[inside],
            int(found[step == OVERDUE].sum()),
            int(found[step == steps.count].sum()),
        )

    @staticmethod
    def merged(parts: Iterable[Counts]) -> Counts:
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        overdue_rows = sum(part.overdue_rows for part in parts)
        beyond_rows = sum(part.beyond_rows for part in parts)
        parts = [part for part in parts if len(part.step)]
        if not parts:
            return Counts(overdue_rows=overdue_rows, beyond_rows=beyond_rows)
        step, rows = _summed(
            np.concatenate([part.step for part in parts]), np.concatenate([part.rows for part in parts])
        )
        return Counts(step, rows, overdue_rows, beyond_rows)

    @property
    def rows_within(self) -> int:
        """The rows of all steps."""
        return int(self.rows.sum())

    def dense(self, count: int) -> I64:
        """Return the rows of each step, i64[count]."""
        rows = np.zeros(count, np.int64)
        rows[self.step] = self.rows
        return rows


def _summed(slots: I64, rows: npt.NDArray[np.integer[Any]] | None) -> tuple[I64, I64]:
    """Return the slots that have rows, ascending, and their rows. Without `rows` each slot given has one."""
    first = int(slots.min())
    span = int(slots.max()) - first + 1
    # Weights are floats, exact below 2^53: more rows than a store holds.
    if span <= _SPAN_PER_SLOT * len(slots):
        found = np.bincount(slots - first, rows)
        step = np.flatnonzero(found)
        return step + first, found[step].astype(np.int64)
    step, place = np.unique(slots, return_inverse=True)
    found = np.bincount(place, rows).astype(np.int64)
    return step[found > 0], found[found > 0]


def counted_at_once(steps: Steps, min_ms: int, max_ms: int, rows: int) -> Counts | None:
    """Count rows that are due from `min_ms` to `max_ms`. Returns None unless these lie within one step."""
    first, last = steps.of(np.array([min_ms, max_ms], np.uint64)).tolist()
    return Counts.of(steps, np.array([first]), np.array([rows])) if first == last else None


class BucketCount:
    """The count of those rows of one bucket that are not gone.

    while run := counting.needed(): counting.read(run, the rows of these segments); counting.counts()
    """

    def __init__(self, steps: Steps, segments: SegmentInfos, gone: PositionSet) -> None:
        """Begin the count; `gone` are the positions of this bucket's rows that are gone."""
        self._steps, self._segments, self._gone = steps, segments, gone
        self._first_step = steps.of(segments.min_deliver_at_ms)
        self._last_step = steps.of(segments.max_deliver_at_ms)
        self._unread = np.ones(len(segments), np.bool_)
        self._gone_left = len(gone)
        self._next = 0
        self._parts: list[Counts] = []

    @property
    def segments_read(self) -> int:
        return int(np.count_nonzero(~self._unread))

    def needed(self) -> list[SegmentInfo]:
        """Return consecutive segments that must be read next, or none if all is known.

        Raises FormatError if the bucket does not hold all gone rows.
        """
        if self._gone_left and self._next == len(self._segments):
            raise format_errors.FormatError("bucket", 0, f"{self._gone_left} of its rows that are gone are not in it")
        if self._gone_left and self._first_step[self._next] != self._last_step[-1]:
            return self._run(self._next, len(self._segments))
        split = np.flatnonzero(self._first_step[self._next :] != self._last_step[self._next :]) + self._next
        if self._gone_left or not len(split):
            return []
        start = int(split[0])
        skips = np.flatnonzero(np.diff(split) != 1)
        return self._run(start, int(split[skips[0]] if len(skips) else split[-1]) + 1)

    def _run(self, start: int, end: int) -> list[SegmentInfo]:
        run = [self._segments[start]]
        size_bytes = run[0].length
        for number in range(start + 1, end):
            info = self._segments[number]
            size_bytes += info.length
            if size_bytes > READ_BYTES:
                break
            run.append(info)
        return run

    def read(self, run: Sequence[SegmentInfo], parts: Sequence[Rows]) -> None:
        """Count the rows of the segments that `needed` returned."""
        self._next = run[-1].number
        self._unread[run[0].number - 1 : self._next] = False
        if not self._gone_left:
            times = np.concatenate([part.deliver_at_ms for part in parts])
            self._parts.append(Counts.of(self._steps, self._steps.of(times)))
            return
        rows = Rows.concat(parts)
        gone = self._gone.mask_of(rows.ledger_id, rows.entry_id)
        self._gone_left -= int(np.count_nonzero(gone))
        self._parts.append(Counts.of(self._steps, self._steps.of(rows.deliver_at_ms[~gone])))

    def counts(self) -> Counts:
        """Return the counts, once `needed` returns no segments."""
        slots, rows = self._first_step[self._unread], self._segments.rows[self._unread].astype(np.int64)
        if self._gone_left:
            # The rest lies within one step.
            slots, rows = slots[-1:], np.array([rows.sum() - self._gone_left])
        return Counts.merged([*self._parts, Counts.of(self._steps, slots, rows)])
