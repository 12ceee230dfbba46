"""Caches segments of sealed buckets within a budget, and reads buckets segment by segment.

`daemon.topic.bucket_reads` loads segments and puts the rows here.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.runs import Place, SortedRun, behind
from storage_backends.formats.bucket_format import SegmentInfos

# Three u64 columns and the keys, including key hashes
LOADED_ROW_BYTES = 36
# A reference of a row to its schedule id
_ID_REFERENCE_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentRange:
    """Consecutive segments of one bucket to load with one read; numbers start at 0, `last` is included."""

    bucket: str
    first: int
    last: int


class SegmentTable:
    """The metadata of a bucket's segments, known without reading them."""

    def __init__(self, segments: SegmentInfos) -> None:
        self.infos = segments
        self.min_ms = segments.min_deliver_at_ms
        self.max_ms = segments.max_deliver_at_ms
        # i64: the row behind the last of each segment, counted over the bucket
        self.row_ends = np.cumsum(segments.rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.infos)

    def row_ranges(self) -> list[tuple[int, int]]:
        """Return (first row, row behind the last) of each segment, counted over the bucket."""
        ends = self.row_ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def rows_from(self, number: int, offset: int) -> int:
        """Return how many rows there are from a place on."""
        before = int(self.row_ends[number - 1]) if number else 0
        return int(self.row_ends[-1]) - before - offset

    def that_fit(self, first: int, last: int, room_rows: int) -> int:
        """Return the last of the segments first..last that fit into the room together; the first one is always read."""
        room_rows -= self.infos[first].rows
        number = first
        while number < last and room_rows >= self.infos[number + 1].rows:
            number += 1
            room_rows -= self.infos[number].rows
        return number

    def holding(self, deliver_at_ms: int) -> range:
        """Return the segments that may have rows of that time."""
        first = int(np.searchsorted(self.max_ms, np.uint64(deliver_at_ms), side="left"))
        end = int(np.searchsorted(self.min_ms, np.uint64(deliver_at_ms), side="right"))
        return range(first, max(first, end))


class SegmentCache:
    """Loaded segments. Beyond the budget those that the head has passed are evicted, then the least recently used.

    Rows that a cursor reads stay with it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_rows = max(1, budget_bytes // LOADED_ROW_BYTES)
        self._segments: collections.OrderedDict[tuple[str, int], KeyedRows] = collections.OrderedDict()
        self._of_bucket: dict[str, set[int]] = {}
        self._spent: set[tuple[str, int]] = set()
        self._spent_rows = 0
        # Loaded rows; schedule ids count as the rows that would take as much memory
        self.rows = 0

    def get(self, bucket: str, number: int) -> KeyedRows | None:
        rows = self._segments.get((bucket, number))
        if rows is not None:
            self._segments.move_to_end((bucket, number))
        return rows

    def of_bucket(self, bucket: str) -> dict[int, KeyedRows]:
        """Return the bucket's segments without counting this as a use."""
        return {number: self._segments[bucket, number] for number in self._of_bucket.get(bucket, ())}

    def __contains__(self, segment: tuple[str, int]) -> bool:
        return segment in self._segments

    @property
    def room_rows(self) -> int:
        """The number of rows that may be loaded without evicting a segment that the head has not passed."""
        return self._budget_rows - self.rows + self._spent_rows

    def spend(self, bucket: str, number: int) -> None:
        """Mark a segment as passed by the head: it is evicted before any other."""
        rows = self._segments.get((bucket, number))
        if rows is not None and (bucket, number) not in self._spent:
            self._spent.add((bucket, number))
            self._spent_rows += taken_by(rows)
            self._segments.move_to_end((bucket, number), last=False)

    def rows_of(self, bucket: str) -> int:
        return sum(len(self._segments[bucket, number]) for number in self._of_bucket.get(bucket, ()))

    def segments_of(self, bucket: str) -> int:
        return len(self._of_bucket.get(bucket, ()))

    def put(self, bucket: str, number: int, rows: KeyedRows) -> None:
        self.discard(bucket, number)
        self._segments[bucket, number] = rows
        self._of_bucket.setdefault(bucket, set()).add(number)
        self.rows += taken_by(rows)
        while self.rows > self._budget_rows and len(self._segments) > 1:
            self.discard(*next(iter(self._segments)))

    def discard(self, bucket: str, number: int) -> None:
        rows = self._segments.pop((bucket, number), None)
        if rows is not None:
            self.rows -= taken_by(rows)
            self._of_bucket[bucket].discard(number)
            if (bucket, number) in self._spent:
                self._spent.remove((bucket, number))
                self._spent_rows -= taken_by(rows)

    def discard_bucket(self, bucket: str) -> None:
        for number in tuple(self._of_bucket.get(bucket, ())):
            self.discard(bucket, number)
        self._of_bucket.pop(bucket, None)


def taken_by(rows: KeyedRows) -> int:
    """Return how many rows without ids take as much memory."""
    ids = rows.rows.schedule_ids
    if ids is None:
        return len(rows)
    return len(rows) + (_ID_REFERENCE_BYTES * len(rows) + ids.size_bytes) // LOADED_ROW_BYTES


class SegmentCursor:
    """A place in a sealed bucket: a segment and an offset in it. `run` is the rest of a loaded segment."""

    __slots__ = ("_following", "_left_behind", "_table", "bucket", "number", "offset", "run")

    def __init__(self, bucket: str, table: SegmentTable, number: int = 0, offset: int = 0) -> None:
        self.bucket = bucket
        self._table = table
        self._following = (-1, 0, 0)
        # Point at or before all rows from here on: the end of the last segment
        self._left_behind: Place = (0, 0, 0)
        self.number = number
        self.offset = offset
        self.run: SortedRun | None = None

    @property
    def at_end(self) -> bool:
        return self.number >= len(self._table)

    @property
    def place(self) -> tuple[int, int]:
        """The (segment, offset in it) of the next row."""
        if self.run is None:
            return self.number, self.offset
        if self.run.offset == len(self.run.rows):
            return self.number + 1, 0
        return self.number, self.run.offset

    def settle(self, cache: SegmentCache) -> SortedRun | None:
        """Move past what was read and return the next segment if it is loaded; None if it is not, or at the end."""
        if self.run is not None:
            self.offset = self.run.offset
            if self.offset < len(self.run.rows):
                return self.run
            self._left_behind = behind(self.run.place(self.offset - 1))
            self.number, self.offset, self.run = self.number + 1, 0, None
        if self.at_end:
            return None
        rows = cache.get(self.bucket, self.number)
        if rows is not None:
            self.run = SortedRun(rows, offset=self.offset, continues=self.number + 1 < len(self._table))
        return self.run

    def move_to_row(self, row: int) -> None:
        """Move to a row counted over the bucket."""
        self.run = None
        for number, (first, end) in enumerate(self._table.row_ranges()):
            if row < end:
                self.number, self.offset = number, row - first
                return
        self.number, self.offset = len(self._table), 0

    def next_due_ms(self) -> int | None:
        """Return a lower bound of the due times from here on (Unix ms), or None at the end."""
        run_ms = None if self.run is None else self.run.next_due_ms()
        if run_ms is not None:
            return run_ms
        following = self.following
        return None if following is None else following[1]

    def first_place(self, cache: SegmentCache) -> Place | None:
        """Return a point at or before all rows from here on, exact if in memory; None at the end."""
        run = self.settle(cache)
        if run is not None:
            return run.place(run.offset)
        following = self.following
        return None if following is None else max((following[1], 0, 0), self._left_behind)

    @property
    def following(self) -> tuple[int, int, int] | None:
        """The first segment behind `run`: (number, lower bound of due times, rows), or None if there is none."""
        number = self.number + (self.run is not None)
        if number != self._following[0]:
            # Every wake-up asks for it, and it changes only with the segment.
            if number >= len(self._table):
                return None
            info = self._table.infos[number]
            self._following = (number, info.min_deliver_at_ms, info.rows)
        return self._following

    def wanted(self, before_ms: int, ahead: int, cache: SegmentCache) -> SegmentRange | None:
        """Return the next segments to load: at most `ahead`, not in memory, that begin before a time."""
        first = self.number + (self.run is not None)
        while first < len(self._table) and first < self.number + ahead and (self.bucket, first) in cache:
            first += 1
        last = first
        while last < len(self._table) and last < self.number + ahead and int(self._table.min_ms[last]) <= before_ms:
            if (self.bucket, last) in cache:
                break
            last += 1
        if last == first:
            return None
        return SegmentRange(self.bucket, first, self._table.that_fit(first, last - 1, cache.room_rows))
