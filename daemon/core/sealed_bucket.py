"""A sealed, immutable bucket: its rows are on the object store, its sets in memory.

Owns: what is known of a live bucket, and how far the index has passed its rows.
Does not own: its object (`storage_backends.formats.bucket`) and the segments in memory (`segments`).
"""

from __future__ import annotations

from pyroaring import BitMap64

from daemon.core.bucket import Bucket, GoneSet
from daemon.core.positions import KeyedRows, PageTable, pages_of
from daemon.core.runs import SortedRun
from daemon.core.segments import SegmentCache, SegmentCursor, SegmentTable
from storage_backends.formats.bucket import SegmentInfos
from storage_backends.formats.manifest import LiveBucket


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
        self.table = SegmentTable(segments)
        self.head = SegmentCursor(self.name, self.table)
        self.late = SortedRun(KeyedRows.empty())
        self._pages = pages
        self.pages = frozenset(pages_of(present))
        pages.hold(self.pages)

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

    def release_pages(self) -> None:
        """The bucket was dropped; call once."""
        self._pages.release(self.pages)
