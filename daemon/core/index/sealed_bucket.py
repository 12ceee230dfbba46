"""A sealed, immutable bucket: its rows are on the object store, its sets in memory.

Owns: what is known of a live bucket, and how far the index has passed its rows.
Does not own: its object (`storage_backends.formats.bucket_format`) and the segments in memory (`segments`).
"""

from __future__ import annotations

from typing import Protocol

from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket, GoneSet
from daemon.core.index.positions import KeyedRows, PageTable, pages_of
from daemon.core.index.runs import Place, SortedRun
from daemon.core.index.segments import SegmentCache, SegmentCursor, SegmentTable
from storage_backends.formats.bucket_format import SegmentInfos
from storage_backends.formats.manifest import LiveBucket


class EmptiedCounted(Protocol):
    """Who counts the sealed buckets of a topic that have no row left."""

    def emptied(self, bucket: SealedBucket) -> None: ...


class SealedBucket(Bucket):
    """One live bucket of the topic's manifest.

    `head`: rows before it have been passed, or are in `late`: rows that were already due when the bucket was sealed,
    but not passed yet though later ones were. `live`: what the manifest says of it.
    """

    def __init__(
        self,
        live: LiveBucket,
        segments: SegmentInfos,
        *,
        present: BitMap64,
        gone: GoneSet,
        pages: PageTable,
    ) -> None:
        super().__init__(live.object.name, present, gone, live.subscription_id)
        self.live = live
        # Of the topic, while it is in an index.
        self.counts: EmptiedCounted | None = None
        self.table = SegmentTable(segments)
        self.head = SegmentCursor(self.name, self.table)
        self.late = SortedRun(KeyedRows.empty())
        self._pages = pages
        self.pages = pages_of(present)
        pages.hold(self.pages)

    def remove(self, keys: BitMap64) -> tuple[BitMap64, int]:
        hit, due_rows = super().remove(keys)
        if hit and not self.present_rows and self.counts is not None:
            self.counts.emptied(self)
        return hit, due_rows

    @property
    def last_due_ms(self) -> int:
        """No row is due later."""
        return self.live.max_deliver_at_ms

    def settle(self, cache: SegmentCache) -> SortedRun | None:
        """The head's segment, if it is in memory; segments that it has left may be dropped."""
        number = self.head.number
        run = self.head.settle(cache)
        if self.head.number != number:
            cache.spend(self.name, number)
        return run

    def is_unread(self, cache: SegmentCache, now_ms: int) -> bool:
        """Whether the head stands before a segment that is due and not in memory."""
        if not self.waiting_rows or self.settle(cache) is not None:
            return False
        following = self.head.following
        return following is not None and following[1] <= now_ms

    def first_waiting(self, cache: SegmentCache, now_ms: int) -> Place | None:
        """No due row that waits comes before, be it in memory or not; None when none does."""
        if not self.waiting_rows:
            return None
        places = [self.head.first_place(cache)]
        if len(self.late):
            places.append(self.late.place(self.late.offset))
        return min((place for place in places if place is not None and place[0] <= now_ms), default=None)

    def release_pages(self) -> None:
        """The bucket was dropped; call once."""
        self._pages.release(self.pages)
