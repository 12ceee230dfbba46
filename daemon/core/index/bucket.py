"""What every bucket has: which of its positions are there, due, gone and acknowledged.

Owns: the sets of one bucket and the changes that keep them consistent.
Does not own: the rows themselves (`mutable_bucket`, `sealed_bucket`) and who is owed them (`subscription_state`).

Invariants: `passed` and every `acknowledged` set are subsets of `present`; `waiting` = present - passed; a sealed
bucket's rows are `present` and `gone` together; `gone` only grows.

A sealed, immutable bucket: its rows are on the object store, its sets in memory.

Owns: what is known of a live bucket, and how far the index has passed its rows.
Does not own: its object (`storage_backends.formats.bucket_format`) and the segments in memory (`segments`).

Damaged buckets: neither read nor deleted; what is missing with them, until it is added again.

Owns: what is missing of one damaged bucket, and what was added or left since.
Does not own: finding damage (the engine), the manifest's mark (`storage_backends.topic_manifest`), and the rows that
were added again (`mutable_bucket`).

A quarantined bucket holds no row: its positions may be added again, and what is added is missing no longer. It goes on
learning what leaves, so that its stored progress, which is that of any bucket, says what is missing after a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np
from pyroaring import BitMap, BitMap64

from daemon.core.index.delay_levels import LevelRows
from daemon.core.index.position_keys import FEW, PAGE_BITS, KeyedRows, PageTable, bitmap_of, contained, pages_of, within
from daemon.core.index.runs import Place, SortedRun
from daemon.core.index.segments import SegmentCache, SegmentCursor, SegmentTable
from storage_backends.formats.bucket_format import SegmentInfos
from storage_backends.formats.manifest import LiveBucket


class GoneSet:
    """A set that only grows and can be frozen in O(1): frozen parts, and what came since."""

    def __init__(self, keys: BitMap64 | None = None) -> None:
        self._frozen: list[BitMap64] = [keys] if keys else []
        self._since = BitMap64()

    def add(self, keys: BitMap64) -> None:
        self._since |= keys

    def freeze(self) -> tuple[BitMap64, ...]:
        """The set as parts that never change again."""
        if self._since:
            part, self._since = self._since, BitMap64()
            while self._frozen and 2 * len(part) >= len(self._frozen[-1]):
                part = self._frozen.pop() | part
            self._frozen.append(part)
        return tuple(self._frozen)

    def __len__(self) -> int:
        return sum(map(len, self._frozen)) + len(self._since)


class Bucket:
    """The sets of one bucket. `gone` is None in the mutable bucket: there gone means removed.

    `name`: the object name, empty for the mutable bucket. `index_id`: the index that its rows are in. `pages`: the
    ordinals of the pages that it has or had positions of. `levels`: hears of what is passed and what is gone; None
    while the bucket is in no index. Counts are kept, never taken from a bitmap.
    """

    pages: BitMap

    def __init__(self, name: str, present: BitMap64, gone: GoneSet | None, index_id: int) -> None:
        self.name = name
        self.index_id = index_id
        self.present = present
        self.passed = BitMap64()
        self.gone = gone
        self.levels: LevelRows | None = None
        self.acknowledged: dict[int, BitMap64] = {}
        self.present_rows = len(present)
        self.passed_rows = 0

    @property
    def waiting_rows(self) -> int:
        return self.present_rows - self.passed_rows

    def pass_rows(self, due: KeyedRows) -> KeyedRows:
        """Makes waiting rows due; those that were waiting, in the order given.

        What is gone or due already is left out.
        """
        has_levels = self.levels is not None and self.levels.has_rows
        if len(due.keys) <= FEW and not has_levels:
            came = []
            for key in due.keys.tolist():
                waits = key in self.present and key not in self.passed
                came.append(waits)
                if waits:
                    self.passed.add(key)
                    self.passed_rows += 1
            return due if all(came) else due.take(np.array(came))
        waiting = bitmap_of(due.keys) & self.present
        waiting -= self.passed
        count = len(waiting)
        if count != len(due):
            due = due.take(contained(due.keys, waiting))
        self.passed |= waiting
        self.passed_rows += count
        if self.levels is not None and has_levels:
            self.levels.passed(waiting)
        return due

    def remove(self, keys: BitMap64) -> tuple[BitMap64, int]:
        """Makes positions gone: (those that were there, how many of them were due)."""
        hit = self.present & keys
        if not hit:
            return hit, 0
        due_rows = 0
        if self.passed_rows and (due := hit & self.passed):
            due_rows = len(due)
            self.passed -= due
            self.passed_rows -= due_rows
        self.present -= hit
        self.present_rows -= len(hit)
        if self.gone is not None:
            self.gone.add(hit)
        for acknowledged in self.acknowledged.values():
            acknowledged -= hit
        if self.levels is not None and self.levels.has_rows:
            self.levels.remove(hit)
        return hit, due_rows

    def acknowledged_by(self, subscription_id: int) -> BitMap64:
        """The set to read or to grow."""
        return self.acknowledged.setdefault(subscription_id, BitMap64())

    def unacknowledged(self, rows: KeyedRows, subscription_id: int, in_hand: BitMap64 | None = None) -> KeyedRows:
        """Those of the rows that are here, due, and neither acknowledged by the subscription nor in hand."""
        owed = bitmap_of(rows.keys) & self.passed
        for left in (self.acknowledged.get(subscription_id), in_hand):
            if left:
                owed -= left
        return rows if len(owed) == len(rows) else rows.take(contained(rows.keys, owed))


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


_PAGE_LAST = (1 << PAGE_BITS) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class RebuildNeeded:
    """Rows of a range of ledgers that were lost with a damaged bucket and are to be added again.

    `rows`: not gone and not added since. `damage`: what was found. `positions_known`: whether it is known which
    positions are missing; if not, `rows` counts any position of these ledgers that is added.
    """

    first_ledger_id: int
    last_ledger_id: int
    rows: int
    bucket: str
    damage: str
    positions_known: bool


class QuarantinedBucket(Bucket):
    """One damaged bucket of the topic's manifest. `present`: the positions that are missing, empty where nobody knows
    them; nothing of it is due.

    `gone`, `acknowledged`: as stored, or as the bucket had them when it was found to be damaged.
    """

    def __init__(
        self,
        live: LiveBucket,
        *,
        present: BitMap64 | None,
        gone: GoneSet,
        acknowledged: dict[int, BitMap64],
        pages: PageTable,
    ) -> None:
        """`present`: None where the bucket's head cannot be read."""
        super().__init__(live.object.name, BitMap64() if present is None else present, gone, live.subscription_id)
        self.live = live
        self.acknowledged = acknowledged
        self.positions_known = present is not None
        self._pages = pages
        # Of a page of which nothing is missing nothing is asked again, unless nobody knows what is missing.
        kept = (self.present,) if self.positions_known else (*gone.freeze(), *acknowledged.values())
        self.pages = BitMap.union(*map(pages_of, kept)) if kept else BitMap()
        pages.hold(self.pages)

    @property
    def missing_rows(self) -> int:
        if self.positions_known:
            return self.present_rows
        return max(0, self.live.rows - (0 if self.gone is None else len(self.gone)))

    def rebuild_needed(self) -> RebuildNeeded:
        return RebuildNeeded(
            first_ledger_id=self.live.first_ledger_id,
            last_ledger_id=self.live.last_ledger_id,
            rows=self.missing_rows,
            bucket=self.name,
            damage=self.live.damage,
            positions_known=self.positions_known,
        )

    def missing(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are missing here, or that count as such: any position of its ledgers that is not
        gone, where nobody knows. Positions that another bucket holds are not to be asked for."""
        if self.positions_known:
            return self.present & keys
        if not self.missing_rows:
            return BitMap64()
        first, last = self.live.first_ledger_id, self.live.last_ledger_id
        own = [page for page in pages_of(keys) if first <= self._pages.ledger_of(page) <= last]
        named = within(keys, [(page << PAGE_BITS, page << PAGE_BITS | _PAGE_LAST) for page in own])
        for part in self.gone.freeze() if self.gone is not None else ():
            named -= part
        return named

    def remove(self, keys: BitMap64) -> tuple[BitMap64, int]:
        """Positions are missing no longer: added again, or gone."""
        if self.positions_known:
            return super().remove(keys)
        hit = self.missing(keys)
        if hit and self.gone is not None:
            fresh_pages = pages_of(hit) - self.pages
            self._pages.hold(fresh_pages)
            self.pages |= fresh_pages
            self.gone.add(hit)
        # Also when none is missing any more: what was acknowledged here says nothing of a row that was added since.
        for acknowledged in self.acknowledged.values():
            acknowledged -= keys
        return hit, 0

    def stand_in(self) -> BitMap64:
        """Positions of its first ledger, to be made gone in place of those that are missing and nobody knows.

        That is right only when every position of its ledgers leaves.
        """
        if self.positions_known or not self.missing_rows or self.gone is None:
            return BitMap64()
        nothing = np.zeros(1, np.uint64)
        first_key = int(self._pages.intern(nothing + np.uint64(self.live.first_ledger_id), nothing)[0])
        keys = BitMap64()
        keys.add_range(first_key, first_key + self.missing_rows + len(self.gone))
        return keys

    def release_pages(self) -> None:
        """The bucket is no more; call once."""
        self._pages.release(self.pages)


def added_again(damaged: Collection[QuarantinedBucket], added: BitMap64, slot: int) -> None:
    """Positions were added in a slot: they are missing no longer. They are new rows, owed to every subscription."""
    for bucket in damaged:
        if bucket.positions_known or slot > bucket.live.quarantined_slot:
            bucket.remove(added)


def learns_positions(damaged: Collection[QuarantinedBucket]) -> bool:
    """Whether positions of pages that no bucket holds may say something of one of these."""
    return any(not bucket.positions_known and bucket.missing_rows for bucket in damaged)


def rebuild_needed(damaged: Iterable[QuarantinedBucket]) -> tuple[RebuildNeeded, ...]:
    """The buckets of which rows are missing, by their ledgers."""
    needed = (bucket.rebuild_needed() for bucket in damaged if bucket.missing_rows)
    return tuple(sorted(needed, key=lambda each: (each.first_ledger_id, each.last_ledger_id, each.bucket)))
