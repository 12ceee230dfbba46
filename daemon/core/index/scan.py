"""Scans rows in due order: pages over many buckets, and histograms of due times.

A page continues from a point in due order, (deliver_at_ms, ledger_id, entry_id, index), not from a place in a bucket.
So it stays correct when buckets are sealed and merged, or rows come due, between two pages.

A `Part` is taken of a bucket that changes while a thread reads it: it shows one moment. If nothing of a sealed bucket
is gone except what the head has passed, which counts show, that costs nothing.

A histogram has exact counts in bars of one width, from metadata where possible. A segment that lies in one bar, with
all rows wanted, counts by its number of rows. If rows are gone, the total is known from the bucket's sets: what lies
before the first bar, or behind the last, is what the other bars leave. `daemon.topic.viewing` reads segments.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket, SealedBucket
from daemon.core.index.mutable_bucket import MutableBucket, MutableRows
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of, contained, keys_of
from daemon.core.index.segments import SegmentTable
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U64, Rows

LAST_MS = (1 << 64) - 1
_LAST_ID = (1 << 64) - 1
# The first of this many times a page's rows are selected before they are sorted.
_SORT_AT_ONCE = 4
# Stands for a segment number: rows that need not be read
_IN_MEMORY = -1


class Place(NamedTuple):
    """A row's point in the due order of all indexes of a topic, with its entry id in its index.

    For entry ids see `storage_backends.formats.index_ids`.
    """

    deliver_at_ms: int
    ledger_id: int
    entry_id: int
    index_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class ScanFilter:
    """The rows to scan: `first_ms` <= deliver_at_ms <= `last_ms` (Unix ms), of the ledgers from the first to the last.

    `subscription_id` selects rows that it is owed; None means every row. `since_ms` is when it was created. With
    `backlog`, rows that are due and not acknowledged by it are scanned, otherwise rows that are not due yet.
    """

    first_ms: int = 0
    last_ms: int = LAST_MS
    ledgers: tuple[int, int] | None = None
    subscription_id: int | None = None
    since_ms: int = 0
    backlog: bool = False

    def first_ms_of(self, bucket: Bucket) -> int:
        """Return a lower bound of the wanted rows' due times in the bucket (Unix ms).

        A subscription is owed only rows of the shared index that come due after its creation.
        """
        if self.subscription_id is None or bucket.index_id:
            return self.first_ms
        return max(self.first_ms, self.since_ms + 1)

    def may_be_in(self, bucket: SealedBucket) -> bool:
        """Return whether the bucket may have rows of the ledgers, by its overall range."""
        live = bucket.live
        return self.ledgers is None or (
            live.first_ledger_id <= self.ledgers[1] and live.last_ledger_id >= self.ledgers[0]
        )

    def has_all_of(self, bucket: SealedBucket) -> bool:
        """Return whether all rows of the bucket are of the ledgers."""
        live = bucket.live
        return self.ledgers is None or (
            self.ledgers[0] <= live.first_ledger_id and live.last_ledger_id <= self.ledgers[1]
        )


# ---- the wanted part of one bucket


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SealedPart:
    """The wanted part of a sealed bucket, whatever the due times, at one moment.

    Rows before `first_ms` are not wanted. `start` is (segment, offset in it) of the first row in segments; `late` are
    rows from before the start, in due order. `wanted` are the wanted positions of both; None means all.
    """

    index_id: int
    name: str
    table: SegmentTable
    pages: PageTable
    first_ms: int
    wanted: BitMap64 | None
    start: tuple[int, int]
    late: KeyedRows

    def from_start(self, number: int, rows: KeyedRows) -> KeyedRows:
        """Return the rows of a segment without those before the start."""
        first, offset = self.start
        if number > first:
            return rows
        return rows.take(slice(offset if number == first else len(rows), None))

    def wanted_among(self, rows: KeyedRows) -> KeyedRows:
        """Return the wanted rows among late rows, or rows of segments from the start on."""
        return rows if self.wanted is None else rows.take(contained(rows.keys, self.wanted))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MemoryPart:
    """The wanted part of a bucket in memory, whatever the due times, at one moment.

    The present positions of `columns` are the wanted ones. For `first_ms` see `SealedPart`.
    """

    index_id: int
    first_ms: int
    columns: MutableRows

    def rows(self) -> KeyedRows:
        """Return the wanted rows, in no order. O(rows of the bucket)."""
        return self.columns.kept()


Part = SealedPart | MemoryPart


def part_of(bucket: Bucket, pages: PageTable, asked: ScanFilter, leaving: BitMap64) -> Part | None:
    """Return the wanted part of a bucket, or None if there is none. Call while the bucket does not change.

    `leaving` are positions that a staged decision removes: they are not wanted. Ledgers are filtered by `of_ledgers`,
    which is more work.
    """
    if not (bucket.passed_rows if asked.backlog else bucket.waiting_rows):
        return None
    first_ms = asked.first_ms_of(bucket)
    if isinstance(bucket, MutableBucket):
        columns = bucket.columns_of(_wanted(bucket, asked, leaving), {})
        return MemoryPart(bucket.index_id, first_ms, columns)
    if not isinstance(bucket, SealedBucket):
        raise InvariantViolated(f"bucket {bucket.name} is neither sealed nor in memory")
    if not asked.may_be_in(bucket):
        return None
    start = (0, 0)
    late = KeyedRows.empty()
    if asked.backlog:
        wanted: BitMap64 | None = _wanted(bucket, asked, leaving)
    else:
        whole = asked.has_all_of(bucket) and _is_whole(bucket, asked.subscription_id, leaving)
        wanted = None if whole else _wanted(bucket, asked, leaving)
        start = bucket.head.place
        if len(bucket.late):
            late = bucket.late.rows.take(slice(bucket.late.offset, bucket.late.stop))
    return SealedPart(bucket.index_id, bucket.name, bucket.table, pages, first_ms, wanted, start, late)


def _is_whole(bucket: SealedBucket, subscription_id: int | None, leaving: BitMap64) -> bool:
    """Return whether every row from the head on, and every late one, is pending and owed."""
    if bucket.waiting_rows != bucket.table.rows_from(*bucket.head.place) + len(bucket.late):
        return False
    if leaving and leaving.intersect(bucket.present):
        # The head has left leaving rows behind, and they are still pending.
        return False
    acknowledged = bucket.acknowledged.get(subscription_id) if subscription_id else None
    return not acknowledged or acknowledged.issubset(bucket.passed)


def _wanted(bucket: Bucket, asked: ScanFilter, leaving: BitMap64) -> BitMap64:
    wanted = bucket.passed.copy() if asked.backlog else bucket.present - bucket.passed
    if asked.subscription_id in bucket.acknowledged:
        wanted -= bucket.acknowledged[asked.subscription_id]
    if leaving:
        wanted -= leaving
    return wanted


def of_ledgers(part: Part, ledgers: tuple[int, int] | None) -> Part:
    """Restrict the part to rows of these ledgers. O(positions): not for the event loop."""
    if ledgers is None:
        return part
    if isinstance(part, MemoryPart):
        columns = part.columns
        narrowed = dataclasses.replace(columns, present=_among_ledgers(columns.present, columns.pages, ledgers))
        return dataclasses.replace(part, columns=narrowed)
    if part.wanted is None:
        return part
    return dataclasses.replace(part, wanted=_among_ledgers(part.wanted, part.pages, ledgers))


def _among_ledgers(wanted: BitMap64, pages: PageTable, ledgers: tuple[int, int]) -> BitMap64:
    keys = keys_of(wanted)
    ledger_id, _ = pages.positions(keys)
    return bitmap_of(keys[(ledger_id >= np.uint64(ledgers[0])) & (ledger_id <= np.uint64(ledgers[1]))])


# ---- a page


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Found:
    """Rows in due order. `index_id` is u64[n], the index of each."""

    rows: KeyedRows
    index_id: U64

    def __len__(self) -> int:
        return len(self.index_id)

    def take(self, index: slice) -> Found:
        return Found(self.rows.take(index), self.index_id[index])

    def place(self, index: int) -> Place:
        rows = self.rows.rows
        columns = (rows.deliver_at_ms, rows.ledger_id, rows.entry_id, self.index_id)
        return Place(*(int(column[index]) for column in columns))

    @staticmethod
    def empty() -> Found:
        return Found(KeyedRows.empty(), np.empty(0, np.uint64))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Read:
    """Rows of a bucket to read next: consecutive segments or, without any, what is in memory."""

    bucket: Bucket
    pages: PageTable
    segments: range


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Page:
    """Rows in due order, and the point after which the next page begins, or None."""

    found: Found
    next_after: Place | None


class PageScan:
    """A scan for one page: at most `limit` wanted rows after a point in due order.

    Call `add` for every bucket; while there are `next_reads`, `take` what `find` returns for them; then call `page`. At
    most two pages of found rows are kept.
    """

    def __init__(self, asked: ScanFilter, after: Place | None, limit: int) -> None:
        self.asked = asked
        self.after = after
        self._limit = limit
        self._found = Found.empty()
        # (lower bound of the due times, index in `_buckets`, segment or _IN_MEMORY)
        self._next: list[tuple[int, int, int]] = []
        self._buckets: list[tuple[Bucket, PageTable]] = []

    # ---- which rows to read

    def add(self, bucket: Bucket, pages: PageTable, first_ms: int = 0) -> None:
        """Add a bucket with the pages of its index. Rows before `first_ms` are known not to be wanted."""
        number = len(self._buckets)
        if not isinstance(bucket, SealedBucket):
            self._buckets.append((bucket, pages))
            heapq.heappush(self._next, (0, number, _IN_MEMORY))
        elif self.asked.may_be_in(bucket):
            self._buckets.append((bucket, pages))
            if not self.asked.backlog and len(bucket.late):
                heapq.heappush(self._next, (0, number, _IN_MEMORY))
            after_ms = 0 if self.after is None else self.after.deliver_at_ms
            first_ms = max(first_ms, self.asked.first_ms_of(bucket), after_ms)
            first = int(bucket.table.max_ms.searchsorted(np.uint64(first_ms)))
            first = first if self.asked.backlog else max(first, bucket.head.place[0])
            self._go_on(number, first)

    def _go_on(self, number: int, segment: int) -> None:
        bucket = self._buckets[number][0]
        if not isinstance(bucket, SealedBucket):
            return
        end = len(bucket.table)
        if self.asked.backlog:
            head, offset = bucket.head.place
            end = head + (offset > 0)
        if segment < end and int(bucket.table.min_ms[segment]) <= self.asked.last_ms:
            heapq.heappush(self._next, (int(bucket.table.min_ms[segment]), number, segment))

    def next_reads(self, segments_max: int) -> list[Read]:
        """Return about `segments_max` segments to read next, the earliest first; empty if the page is complete."""
        segments: dict[int, list[int]] = {}
        in_memory = []
        for _ in range(segments_max):
            if not self._next or self._next[0][0] > self._bound_ms:
                break
            _, number, segment = heapq.heappop(self._next)
            if segment == _IN_MEMORY:
                in_memory.append(number)
            else:
                segments.setdefault(number, []).append(segment)
                self._go_on(number, segment + 1)
        reads = [Read(*self._buckets[number], range(0)) for number in in_memory]
        return reads + [Read(*self._buckets[number], range(each[0], each[-1] + 1)) for number, each in segments.items()]

    @property
    def _bound_ms(self) -> int:
        """The latest due time of rows of the page (Unix ms)."""
        if len(self._found) <= self._limit:
            return self.asked.last_ms
        return int(self._found.rows.rows.deliver_at_ms[-1])

    # ---- found rows

    def find(self, part: Part, read: Read, rows: Iterable[tuple[int, KeyedRows]]) -> Found:
        """Return the rows, given by segment, that may be on the page. Several calls may run in threads at a time."""
        part = of_ledgers(part, self.asked.ledgers)
        if isinstance(part, MemoryPart):
            chosen = self._of_page(part, part.rows())
            if len(chosen) > _SORT_AT_ONCE * self._limit:
                times = chosen.rows.deliver_at_ms
                chosen = chosen.take(times <= np.partition(times, self._limit)[self._limit])
            found = chosen.take(chosen.rows.due_order())
        elif read.segments:
            found = KeyedRows.concat(list(self._of_segments(part, rows)))
        else:
            found = part.wanted_among(self._of_page(part, part.late))
        found = found.take(slice(0, self._limit + 1))
        return Found(found, np.full(len(found), part.index_id, np.uint64))

    def _of_segments(self, part: SealedPart, rows: Iterable[tuple[int, KeyedRows]]) -> Iterator[KeyedRows]:
        count = 0
        for number, each in rows:
            if count > self._limit:
                return
            # Select rows of the page first, which are few: finding the wanted ones is more work.
            chosen = part.wanted_among(self._of_page(part, part.from_start(number, each)))
            count += len(chosen)
            yield chosen

    def _of_page(self, part: Part, rows: KeyedRows) -> KeyedRows:
        columns = rows.rows
        times = columns.deliver_at_ms
        chosen = (times >= np.uint64(part.first_ms)) & (times <= np.uint64(self._bound_ms))
        if self.after is not None:
            chosen &= _behind(columns, part.index_id, self.after)
        return rows if chosen.all() else rows.take(chosen)

    def take(self, found: Sequence[Found]) -> None:
        """Take the results of all requested reads. Not for the event loop."""
        parts = [each for each in (self._found, *found) if len(each)]
        if not parts:
            return
        rows = KeyedRows.concat([each.rows for each in parts])
        index_id = np.concatenate([each.index_id for each in parts])
        if len(parts) > 1:
            order = _in_order(rows.rows, index_id)[: self._limit + 1]
            rows, index_id = rows.take(order), index_id[order]
        self._found = Found(rows, index_id)

    # ---- the page

    @property
    def can_end(self) -> bool:
        """True if a page that ends here makes progress for the caller."""
        return not self._next or self._next[0][0] > self._bound_ms or self._end > (self.after or Place(0, 0, 0, 0))

    @property
    def _end(self) -> Place:
        """The point in due order up to which everything has been read."""
        until_ms = self._next[0][0]
        return Place(until_ms - 1, _LAST_ID, _LAST_ID, _LAST_ID) if until_ms else Place(0, 0, 0, 0)

    def page(self) -> Page:
        """Return the page as far as it is known; it is shorter, and another follows, if not everything was read."""
        found = self._found
        if self._next and self._next[0][0] <= self._bound_ms:
            known = int(found.rows.rows.deliver_at_ms.searchsorted(np.uint64(self._next[0][0])))
            if known <= self._limit:
                return Page(found.take(slice(0, known)), self._end)
            found = found.take(slice(0, known))
        if len(found) <= self._limit:
            return Page(found, None)
        found = found.take(slice(0, self._limit))
        return Page(found, found.place(-1))


def _in_order(rows: Rows, index_id: U64) -> npt.NDArray[np.int64]:
    """Return the index that sorts rows into due order."""
    if (index_id == index_id[0]).all():
        return rows.due_order()
    return np.lexsort((index_id, rows.entry_id, rows.ledger_id, rows.deliver_at_ms))


def _behind(rows: Rows, index_id: int, after: Place) -> npt.NDArray[np.bool_]:
    """Return the mask of rows of an index that come after a point in due order."""
    behind = rows.deliver_at_ms > np.uint64(after.deliver_at_ms)
    same = np.flatnonzero(rows.deliver_at_ms == np.uint64(after.deliver_at_ms))
    if len(same):
        ledger_id, entry_id = rows.ledger_id[same], rows.entry_id[same]
        in_ledger = ledger_id == np.uint64(after.ledger_id)
        later = ledger_id > np.uint64(after.ledger_id)
        later |= in_ledger & (entry_id > np.uint64(after.entry_id))
        if index_id > after.index_id:
            later |= in_ledger & (entry_id == np.uint64(after.entry_id))
        behind[same] = later
    return behind


BARS_MAX = 10_000
# About this many bars are made if no width is requested.
BARS = 60

I64 = npt.NDArray[np.int64]

_SECOND_MS = 1_000
_MINUTE_MS = 60 * _SECOND_MS
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS


def round_width_ms(span_ms: int) -> int:
    """Return a round width (ms) such that about `BARS` bars make up the span."""
    widths = itertools.pairwise(itertools.chain((1,), _round_widths_ms()))
    narrower, width_ms = next((below, width) for below, width in widths if width * BARS >= span_ms)
    # The nearer one, by factor
    return width_ms if width_ms * narrower * BARS**2 <= span_ms**2 else narrower


def _round_widths_ms() -> Iterator[int]:
    """Yield round widths, ascending, without end (ms)."""
    yield from (1, 2, 5, 10, 20, 50, 100, 200, 500)
    for unit_ms in (_SECOND_MS, _MINUTE_MS):
        yield from (unit_ms * number for number in (1, 2, 5, 10, 15, 30))
    yield from (_HOUR_MS * number for number in (1, 2, 3, 6, 12))
    for power in itertools.count():
        yield from (_DAY_MS * number * 10**power for number in (1, 2, 5))


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one width.

    Bar i is from_ms + i * width_ms <= deliver_at_ms < from_ms + (i + 1) * width_ms, and < until_ms (Unix ms).
    """

    from_ms: int
    until_ms: int
    width_ms: int

    @property
    def count(self) -> int:
        return -(-(self.until_ms - self.from_ms) // self.width_ms)

    def slots(self, times: U64) -> I64:
        """Return the bar of each time, counted from 1: 0 is before the first, count + 1 behind the last."""
        slots = np.zeros(len(times), np.int64)
        inside = (times >= np.uint64(self.from_ms)) & (times < np.uint64(self.until_ms))
        slots[inside] = (times[inside] - np.uint64(self.from_ms)) // np.uint64(self.width_ms) + np.uint64(1)
        slots[times >= np.uint64(self.until_ms)] = self.count + 1
        return slots


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Counts:
    """Counts by bar: `rows` is i64[bars + 2], before the first bar, in each bar, and behind the last.

    `segments_counted` were counted by their metadata.
    """

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
    """The count of one bucket's wanted part. Not for the event loop; for one thread at a time.

    Call `read` for each number in `needed`, unless `is_complete`; then call `counts`.
    """

    def __init__(self, part: Part, bars: Bars, ledgers: tuple[int, int] | None) -> None:
        self._part = part = of_ledgers(part, ledgers)
        self._bars = bars
        self._rows = np.zeros(bars.count + 2, np.int64)
        # The total number of rows, None if all are counted one by one; and the bar of those that are not counted
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
        """Count a part in which every row from the start on is wanted."""
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
        """Choose what not to read: segments before the first bar or behind the last, whichever have more rows."""
        first = part.start[0]
        rows = np.diff(part.table.row_ends, prepend=0)[first:]
        low, high = self._slots_of(part, first)
        behind = len(self._rows) - 1
        # Rows that are too early to be owed are counted one by one, which separates them from the remainder.
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
        """True if segments that were not read yet have no further rows."""
        return self._total is not None and self._total == int(self._rows.sum()) + self._earlier_rows

    def read(self, number: int, rows: KeyedRows) -> None:
        """Count a needed segment."""
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
        """Return the counts, after everything needed was read."""
        if self._total is not None and self._rest is not None:
            self._rows[self._rest] += self._total - int(self._rows.sum()) - self._earlier_rows
        return Counts(self._rows, self._segments_counted, self._segments_read)
