"""A topic of several indexes with everything that may be looked at, and what looking must find, row by row.

Owns: filling and changing it, reading as the engine does, and the naive answers.
Does not own: what a topic does with its rows (`oracle`, `topic_machine`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket, SealedBucket
from daemon.core.index.index import Index
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of
from daemon.core.index.scan import (
    Bars,
    Counts,
    Found,
    Page,
    PageScan,
    Part,
    PartCount,
    Place,
    ScanFilter,
    SealedPart,
    part_of,
)
from daemon.topic import bucket_lifecycle, bucket_reads
from storage_backends.formats.bucket_format import SegmentInfo
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.formats.slot_format import AddRecord, GoneReason, GoneRecord
from tests.daemon.core._support.journaled_topic import TOPIC_ID, JournaledTopic

Row = tuple[int, int, int]
"""ledger, entry, deliver_at_ms"""


@dataclasses.dataclass(frozen=True, eq=False)
class Begun:
    index: Index
    memory: MutableBucket
    cut: bucket_lifecycle.SealCut


class ViewedTopic(JournaledTopic):
    """Rows come and go in any index; `reads`: how many segments were read by those who looked."""

    def __init__(self, *, rows_max: int = 4, time_step_ms: int = 1_000) -> None:
        super().__init__()
        self.limits = SegmentLimits(time_step_ms=time_step_ms, rows_max=rows_max, rows_min=0)
        self.begun: collections.deque[Begun] = collections.deque()
        self.leaving = BitMap64()
        self.reads = 0
        self._bucket_numbers = itertools.count(1)
        self._segments: dict[tuple[str, int], Rows] = {}

    # ---- changes

    def put(self, index_id: int, rows: Sequence[Row]) -> None:
        """Rows come into one index; positions that it has already are left out."""
        pages = self.core.indexes.of(index_id).pages
        fresh: dict[tuple[int, int], Row] = {}
        for row in rows:
            fresh.setdefault(row[:2], row)
        times, ledgers, entries = (np.array([row[place] for row in fresh.values()], np.uint64) for place in (2, 0, 1))
        columns = Rows(times, ledgers, entries)
        keys = pages.find(columns.ledger_id, columns.entry_id)
        present = self.core.indexes[index_id].present_among(bitmap_of(keys))
        columns = columns.take(np.array([key not in present for key in keys.tolist()], np.bool_))
        if len(columns):
            self.slot += 1
            self.core.apply(AddRecord(TOPIC_ID, 1, index_id, columns), self.slot, elapsed_ms=0)

    def cancel(self, index_id: int, keys: Iterable[int]) -> None:
        """Positions of one index, by their keys, are gone."""
        index = self.core.indexes[index_id]
        left = BitMap64(keys)
        if left:
            self.slot += 1
            positions = index.pages.to_stored(left)
            record = GoneRecord(TOPIC_ID, 1, index_id, GoneReason.CANCELLED, positions)
            self.core.apply(record, self.slot, elapsed_ms=0)

    def begin(self) -> None:
        """Every index is cut."""
        for number, index in self.core.indexes.items():
            if index.mutable.first_row_at_ms is None:
                continue
            key = f"viewed/{next(self._bucket_numbers):03}"
            cut = bucket_lifecycle.SealCut(
                topic="topic",
                key=key,
                base=0,
                slot=ShardSlot(self.slot),
                rows=index.mutable.snapshot(),
                index_id=number,
            )
            self.begun.append(Begun(index, index.begin_seal(key, now_ms=self.now_ms), cut))

    def finish(self) -> None:
        """The oldest seal is committed."""
        begun = self.begun.popleft()
        index, memory, cut = begun.index, begun.memory, begun.cut
        written = bucket_lifecycle.write_bucket(self.store, cut, limits=self.limits, compatible=False)
        sealed = None
        if written is not None:
            sealed = SealedBucket(
                written.live,
                written.table.segments,
                present=memory.present,
                gone=memory.gone_since_cut(),
                pages=index.pages,
            )
        rows = KeyedRows.empty() if written is None else written.rows
        self.core.finish_seal(index.index_id, memory, sealed, rows, near_ms=self.now_ms)

    def seal_all(self) -> None:
        self.begin()
        while self.begun:
            self.finish()

    # ---- reading

    def indexes(self, asked: ScanFilter) -> list[Index]:
        if asked.subscription_id is None:
            return list(self.core.indexes.values())
        return self.core.indexes.serving(asked.subscription_id)

    def page(
        self,
        asked: ScanFilter,
        after: Place | None = None,
        limit: int = 10,
        *,
        segments_a_round: int = 3,
        meanwhile: Callable[[], object] = lambda: None,
        rounds_max: int = 10_000,
    ) -> Page:
        scan = PageScan(asked, after, limit)
        for index in self.indexes(asked):
            for bucket in index.buckets:
                scan.add(bucket, index.pages)
        for count in itertools.count():
            reads = scan.next_reads(segments_a_round)
            if not reads:
                break
            found = []
            for read in reads:
                part = part_of(read.bucket, read.pages, asked, self.leaving)
                if part is not None:
                    found.append(scan.find(part, read, self._read(part, read.segments)))
            scan.take(found)
            meanwhile()
            if count >= rounds_max and scan.can_end:
                break
        return scan.page()

    def pages(self, asked: ScanFilter, limit: int, meanwhile: Callable[[], object] = lambda: None) -> list[Found]:
        """All pages, one after the other."""
        pages = []
        after = None
        while True:
            page = self.page(asked, after, limit)
            assert len(page.found) <= limit
            pages.append(page.found)
            if page.next_after is None:
                return pages
            assert after is None or page.next_after > after
            after = page.next_after
            meanwhile()

    def counts(self, asked: ScanFilter, bars: Bars) -> Counts:
        counts = Counts.nothing(bars)
        for index in self.indexes(asked):
            for bucket in index.buckets:
                part = part_of(bucket, index.pages, asked, self.leaving)
                if part is not None:
                    counting = PartCount(part, bars, asked.ledgers)
                    for number, rows in self._read(part, counting.needed):
                        counting.read(number, rows)
                        if counting.is_complete:
                            break
                    counts += counting.counts()
        return counts

    def _read(self, part: Part, numbers: Sequence[int]) -> Iterator[tuple[int, KeyedRows]]:
        if isinstance(part, SealedPart):
            for number in numbers:
                self.reads += 1
                yield number, self._segment(part.name, part.table.infos[number], part.pages)

    def _segment(self, name: str, info: SegmentInfo, pages: PageTable) -> KeyedRows:
        rows = self._segments.get((name, info.number))
        if rows is None:
            (rows,) = bucket_reads.read_segments(self.store, name, [info])
            self._segments[name, info.number] = rows
        return pages.keyed(rows)

    # ---- what it must find

    def wanted(self, asked: ScanFilter) -> list[Place]:
        """Every row that is asked for, in order: all rows of all buckets are looked at one by one."""
        places = []
        for index in self.indexes(asked):
            for bucket in index.buckets:
                for key, place in self._rows_of(index, bucket):
                    if self._is_wanted(bucket, key, place, asked):
                        places.append(place)
        return sorted(places)

    def _rows_of(self, index: Index, bucket: Bucket) -> list[tuple[int, Place]]:
        if isinstance(bucket, SealedBucket):
            rows = [self._segment(bucket.name, info, index.pages) for info in bucket.table.infos]
        else:
            assert isinstance(bucket, MutableBucket)
            rows = [bucket.snapshot().kept()]
        return [
            (key, Place(deliver_at_ms, ledger_id, entry_id, index.index_id))
            for each in rows
            for key, deliver_at_ms, ledger_id, entry_id in zip(
                each.keys.tolist(),
                each.rows.deliver_at_ms.tolist(),
                each.rows.ledger_id.tolist(),
                each.rows.entry_id.tolist(),
                strict=True,
            )
        ]

    def _is_wanted(self, bucket: Bucket, key: int, place: Place, asked: ScanFilter) -> bool:
        if not asked.first_ms <= place.deliver_at_ms <= asked.last_ms or key in self.leaving:
            return False
        if asked.ledgers is not None and not asked.ledgers[0] <= place.ledger_id <= asked.ledgers[1]:
            return False
        if asked.subscription_id is not None:
            if not place.index_id and place.deliver_at_ms <= asked.since_ms:
                return False
            if key in bucket.acknowledged.get(asked.subscription_id, ()):
                return False
        return key in bucket.present and (key in bucket.passed) == asked.backlog

    def counted(self, asked: ScanFilter, bars: Bars) -> list[int]:
        """What is before the first bar, in each, and behind the last."""
        counts = [0] * (bars.count + 2)
        for place in self.wanted(asked):
            time_ms = place.deliver_at_ms
            if time_ms < bars.from_ms:
                counts[0] += 1
            elif time_ms >= bars.until_ms:
                counts[-1] += 1
            else:
                counts[1 + (time_ms - bars.from_ms) // bars.width_ms] += 1
        return counts


def places_of(found: Found) -> list[Place]:
    return [found.place(number) for number in range(len(found))]
