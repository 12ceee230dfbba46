"""Reads a backlog again: the rows that the index has passed, bucket by bucket, in due order.

A reader has a place in every bucket. It names the segments that it needs but does not load them; the caller drops rows
that are no longer owed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from daemon.core.index.bucket import Bucket, SealedBucket
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, firsts
from daemon.core.index.runs import LAST_PLACE, Place, SortedRun, TieredRuns, take_before
from daemon.core.index.segments import SegmentCache, SegmentCursor, SegmentRange

# Segments of a bucket that one request reads.
READ_AHEAD_SEGMENTS = 4


@dataclasses.dataclass(slots=True)
class _LogPlace:
    """The number of rows picked up from a mutable bucket's log, and those of them that are not read yet."""

    picked_up: int
    runs: TieredRuns = dataclasses.field(default_factory=TieredRuns)


class BacklogReader:
    """A reader that begins at the start of every bucket or, with `at_head`, where the index stands now.

    `is_held_up` is whether the last take found nothing because an earlier row has not been passed yet.
    """

    def __init__(self, sealed: Iterable[SealedBucket], mutable: Iterable[MutableBucket], *, at_head: bool) -> None:
        self._cursors: dict[str, SegmentCursor] = {}
        self._places: dict[int, _LogPlace] = {}
        # Bucket name -> rows that were passed behind its cursor
        self._late: dict[str, TieredRuns] = {}
        self.is_held_up = False
        if at_head:
            for bucket in sealed:
                self._start(bucket, at_head=True)
            for memory in mutable:
                self._places[id(memory)] = _LogPlace(len(memory.passed_log))

    def _start(self, bucket: SealedBucket, *, at_head: bool) -> SegmentCursor:
        number, offset = bucket.head.place if at_head else (0, 0)
        cursor = self._cursors[bucket.name] = SegmentCursor(bucket.name, bucket.table, number, offset)
        return cursor

    def sealed(self, memory: MutableBucket, bucket: SealedBucket) -> None:
        """Replace a mutable bucket by the sealed one that it became.

        Rows are not read again if all of the bucket was read. If only part was, reading starts at the beginning, and
        the caller leaves out what it holds already.
        """
        place = self._places.pop(id(memory), _LogPlace(0))
        all_read = place.picked_up == len(memory.passed_log) and not any(map(len, place.runs.runs))
        self._start(bucket, at_head=all_read)

    def merged(self, sources: Sequence[SealedBucket], bucket: SealedBucket) -> None:
        """Replace source buckets by the merged one.

        If everything passed in them was read, nothing before the head of the merged bucket is read again. Otherwise
        reading starts at the beginning, and the caller leaves out what it holds already.
        """
        cursors = [(self._cursors.pop(source.name, None), source.head.place) for source in sources]
        late = [self._late.pop(source.name, None) for source in sources]
        all_read = all(cursor is not None and cursor.place >= head for cursor, head in cursors)
        all_read = all_read and not any(runs is not None and runs.next_due_ms() is not None for runs in late)
        self._start(bucket, at_head=all_read)

    def dropped(self, bucket: SealedBucket | MutableBucket) -> None:
        """Forget a dropped bucket; the subscription is owed none of its rows."""
        self._cursors.pop(bucket.name, None)
        self._late.pop(bucket.name, None)
        self._places.pop(id(bucket), None)

    def passed_late(self, bucket: Bucket, rows: KeyedRows) -> None:
        """Add passed rows that lie before the head of a bucket, where the cursor may be beyond them."""
        self._late.setdefault(bucket.name, TieredRuns()).add(rows)

    def needs(self, sealed: Iterable[SealedBucket], cache: SegmentCache) -> list[SegmentRange]:
        """Return the segments that must be in memory for the next `take`; empty if it can go on."""
        wanted = []
        for bucket in sealed:
            cursor = self._cursors.get(bucket.name) or self._start(bucket, at_head=False)
            run = cursor.settle(cache)
            head = bucket.head.place
            if run is None and (cursor.number, cursor.offset) < head and not cursor.at_end:
                last = min(head[0] if head[1] else head[0] - 1, cursor.number + READ_AHEAD_SEGMENTS - 1)
                while last > cursor.number and (bucket.name, last) in cache:
                    last -= 1
                last = bucket.table.that_fit(cursor.number, last, cache.room_rows)
                wanted.append(SegmentRange(bucket.name, cursor.number, last))
        return wanted

    def take(
        self,
        sealed: Sequence[SealedBucket],
        mutable: Sequence[MutableBucket],
        cache: SegmentCache,
        limit: int,
        bound: Place | None = None,
    ) -> list[tuple[SealedBucket | MutableBucket, KeyedRows]]:
        """Take about `limit` rows, by bucket, unordered.

        If there is a bound, only rows before that point in due order are taken. The result is empty if every such
        passed row has been read. Call this when nothing is needed.
        """
        parts: dict[SealedBucket | MutableBucket, list[KeyedRows]] = {}
        rows_taken = 0
        # A take ends where a segment of any bucket ends.
        while 2 * rows_taken < limit:
            taken = self._take_once(sealed, mutable, limit, bound or LAST_PLACE)
            for bucket, rows in taken:
                parts.setdefault(bucket, []).append(rows)
                rows_taken += len(rows)
            if not taken or self.needs(sealed, cache):
                break
        self.is_held_up = not rows_taken and bound is not None
        result = []
        for bucket, each in parts.items():
            rows = KeyedRows.concat(each)
            # The cursor may also find what came late.
            result.append((bucket, rows.take(firsts(rows.keys)) if bucket.name in self._late else rows))
        return result

    def _take_once(
        self,
        sealed: Sequence[SealedBucket],
        mutable: Sequence[MutableBucket],
        limit: int,
        bound: Place,
    ) -> list[tuple[SealedBucket | MutableBucket, KeyedRows]]:
        sources: list[SealedBucket | MutableBucket] = []
        runs: list[SortedRun] = []
        for bucket in sealed:
            for late in self._late[bucket.name].runs if bucket.name in self._late else ():
                sources.append(bucket)
                runs.append(late)
            run = self._cursors[bucket.name].run
            if run is None:
                continue
            number, offset = bucket.head.place
            if self._cursors[bucket.name].number == number:
                run.stop, run.continues = offset, False
            else:
                run.stop, run.continues = len(run.rows), True
            if len(run):
                sources.append(bucket)
                runs.append(run)
        for memory in mutable:
            for run in self._log_runs(memory):
                sources.append(memory)
                runs.append(run)
        # One part for each bucket: a row that left and was added again unchanged is in its log twice.
        taken: dict[int, tuple[SealedBucket | MutableBucket, list[KeyedRows]]] = {}
        for number, rows in take_before(runs, bound, limit):
            taken.setdefault(id(sources[number]), (sources[number], []))[1].append(rows)
        return [(source, KeyedRows.concat(parts)) for source, parts in taken.values()]

    def _log_runs(self, memory: MutableBucket) -> list[SortedRun]:
        place = self._places.setdefault(id(memory), _LogPlace(0))
        passed = len(memory.passed_log)
        if place.picked_up < passed:
            place.runs.add(memory.passed_log.take(slice(place.picked_up, passed)))
            place.picked_up = passed
        return [run for run in place.runs.runs if len(run)]
