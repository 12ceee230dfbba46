"""Keeps the sets of a bucket: which of its positions are present, due, gone and acknowledged.

The rows themselves are elsewhere (`mutable_bucket`, `storage_backends.formats.bucket_format`). Invariants: `passed` and
every `acknowledged` set are subsets of `present`; pending rows are present - passed; a sealed bucket's rows are
`present` and `gone` together; `gone` only grows.

A sealed bucket is immutable: its rows are on the object store, its sets in memory.

A quarantined bucket is damaged: it is neither read nor deleted, and holds no row. Its positions may be added again, and
what is added is no longer missing. It still records what leaves, so that its stored progress, which is that of any
bucket, shows what is missing after a restart. `storage_backends.topic_manifest` has the mark.

The `gone` set of a sealed bucket holds the rows that left since its seal. That of a quarantined one holds the rows that
left or were added again; all its other rows are missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np
from pyroaring import BitMap, BitMap64

from daemon.core.index.delay_levels import LevelRows
from daemon.core.index.position_keys import FEW, PAGE_BITS, KeyedRows, PageTable, bitmap_of, contained, pages_of, within
from daemon.core.index.runs import Place, SortedRun, earliest
from daemon.core.index.segments import SegmentCache, SegmentCursor, SegmentTable
from storage_backends.formats.bucket_format import SegmentInfos
from storage_backends.formats.manifest import LiveBucket


class GoneSet:
    """A set that only grows and can be frozen in O(1): frozen parts, and additions since."""

    def __init__(self, keys: BitMap64 | None = None) -> None:
        self._frozen: list[BitMap64] = [keys] if keys else []
        self._since = BitMap64()

    def add(self, keys: BitMap64) -> None:
        self._since |= keys

    def freeze(self) -> tuple[BitMap64, ...]:
        """Return the set as parts that never change again."""
        if self._since:
            part, self._since = self._since, BitMap64()
            while self._frozen and 2 * len(part) >= len(self._frozen[-1]):
                part = self._frozen.pop() | part
            self._frozen.append(part)
        return tuple(self._frozen)

    def __len__(self) -> int:
        return sum(map(len, self._frozen)) + len(self._since)


class Bucket:
    """The sets of one bucket. `gone` is None in the mutable bucket, from which gone positions are removed.

    `name` is the object name, empty for the mutable bucket. `index_id` is the index of its rows. `pages` are the
    ordinals of the pages that it has or had positions of. `with_ids` are the positions of rows with a schedule id, gone
    ones included; None means that there are none. `levels` is called with what is passed or gone; None while the bucket
    is in no index. Counts are maintained, never taken from a bitmap.
    """

    pages: BitMap
    with_ids: BitMap64 | None

    def __init__(self, name: str, present: BitMap64, gone: GoneSet | None, index_id: int) -> None:
        self.name = name
        self.index_id = index_id
        self.present = present
        self.passed = BitMap64()
        self.gone = gone
        self.with_ids = None
        self.levels: LevelRows | None = None
        self.acknowledged: dict[int, BitMap64] = {}
        self.present_rows = len(present)
        self.passed_rows = 0

    @property
    def waiting_rows(self) -> int:
        return self.present_rows - self.passed_rows

    def pass_rows(self, due: KeyedRows) -> KeyedRows:
        """Make pending rows due; return those that were pending, in the given order."""
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
        """Remove positions as gone: (those that were present, how many of them were due)."""
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
        """Return the set of a subscription's acknowledgements, to read or to grow."""
        return self.acknowledged.setdefault(subscription_id, BitMap64())

    def unacknowledged(self, rows: KeyedRows, subscription_id: int, in_hand: BitMap64 | None = None) -> KeyedRows:
        """Return the rows that are here, due, and neither acknowledged by the subscription nor held."""
        owed = bitmap_of(rows.keys) & self.passed
        for left in (self.acknowledged.get(subscription_id), in_hand):
            if left:
                owed -= left
        return rows if len(owed) == len(rows) else rows.take(contained(rows.keys, owed))


class EmptiedCounted(Protocol):
    """The port that is called with sealed buckets that have no row left."""

    def emptied(self, bucket: SealedBucket) -> None: ...


class SealedBucket(Bucket):
    """One live bucket of the topic's manifest; `live` is its entry there.

    Rows before `head` have been passed or are in `late`. Late rows were already due when the bucket was sealed, but
    were not passed yet although later ones were.

    `merged_away` is whether its object was deleted before the bucket that replaces it is served. Its rows stay here
    until then, and are passed after that.
    """

    def __init__(
        self,
        live: LiveBucket,
        segments: SegmentInfos,
        *,
        present: BitMap64,
        gone: GoneSet,
        pages: PageTable,
        with_ids: BitMap64 | None = None,
    ) -> None:
        super().__init__(live.object.name, present, gone, live.subscription_id)
        self.live = live
        self.with_ids = with_ids
        # The counts of the topic, while the bucket is in an index
        self.counts: EmptiedCounted | None = None
        self.table = SegmentTable(segments)
        self.head = SegmentCursor(self.name, self.table)
        self.late = SortedRun(KeyedRows.empty())
        self.merged_away = False
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
        """An upper bound of the rows' due times (Unix ms)."""
        return self.live.max_deliver_at_ms

    def next_due_ms(self) -> int | None:
        """Return a lower bound of the due times of pending rows (Unix ms), or None without any."""
        return earliest(self.head.next_due_ms(), self.late.next_due_ms()) if self.waiting_rows else None

    def settle(self, cache: SegmentCache) -> SortedRun | None:
        """Return the head's segment if it is in memory, and release segments that the head has left."""
        number = self.head.number
        run = self.head.settle(cache)
        if self.head.number != number:
            cache.spend(self.name, number)
        return run

    def is_unread(self, cache: SegmentCache, now_ms: int) -> bool:
        """Return whether the head stands before a segment that is due and not in memory.

        If the bucket was merged away, returns whether any row may be due that is not passed.
        """
        if self.merged_away:
            return self.first_waiting(cache, now_ms) is not None
        if not self.waiting_rows or self.settle(cache) is not None:
            return False
        following = self.head.following
        return following is not None and following[1] <= now_ms

    def first_waiting(self, cache: SegmentCache, now_ms: int) -> Place | None:
        """Return a point at or before all due rows that are not passed, in memory or not, or None."""
        if not self.waiting_rows:
            return None
        places = [self.head.first_place(cache)]
        if len(self.late):
            places.append(self.late.place(self.late.offset))
        return min((place for place in places if place is not None and place[0] <= now_ms), default=None)

    def release_pages(self) -> None:
        """Release the pages of a dropped bucket; call once."""
        self._pages.release(self.pages)


_PAGE_LAST = (1 << PAGE_BITS) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class RebuildNeeded:
    """Rows of a range of ledgers that were lost with a damaged bucket and must be added again.

    `rows` are neither gone nor added since. `damage` describes what was found. `positions_known` is whether the missing
    positions are known; if not, every position of these ledgers that is added reduces `rows`.
    """

    first_ledger_id: int
    last_ledger_id: int
    rows: int
    bucket: str
    damage: str
    positions_known: bool


class QuarantinedBucket(Bucket):
    """One damaged bucket of the topic's manifest; nothing of it is due.

    `present` has the missing positions, and is empty if they are unknown. `gone` and `acknowledged` are as stored, or
    as the bucket had them when the damage was found.
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
        """Create the bucket. `present` is None if the bucket's head cannot be read."""
        super().__init__(live.object.name, BitMap64() if present is None else present, gone, live.subscription_id)
        self.live = live
        self.acknowledged = acknowledged
        self.positions_known = present is not None
        self._pages = pages
        # A page from which nothing is missing is not needed again, unless the missing positions are unknown.
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
        """Return the positions that are missing here, or count as missing.

        If positions are unknown, any position of its ledgers that is not gone counts. Do not ask for positions of other
        buckets.
        """
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
        """Remove positions that are no longer missing: added again, or gone."""
        if self.positions_known:
            return super().remove(keys)
        hit = self.missing(keys)
        if hit and self.gone is not None:
            self.hold(hit)
            self.gone.add(hit)
        # Even if none is missing any longer: acknowledgements here say nothing of a row that was added since.
        for acknowledged in self.acknowledged.values():
            acknowledged -= keys
        return hit, 0

    def hold(self, keys: BitMap64) -> None:
        """Hold the pages of missing positions of which something is recorded here."""
        fresh_pages = pages_of(keys) - self.pages
        self._pages.hold(fresh_pages)
        self.pages |= fresh_pages

    def stand_in(self) -> BitMap64:
        """Return positions of its first ledger that become gone in place of unknown missing ones.

        This is correct only if every position of its ledgers leaves.
        """
        if self.positions_known or not self.missing_rows or self.gone is None:
            return BitMap64()
        nothing = np.zeros(1, np.uint64)
        first_key = int(self._pages.intern(nothing + np.uint64(self.live.first_ledger_id), nothing)[0])
        keys = BitMap64()
        keys.add_range(first_key, first_key + self.missing_rows + len(self.gone))
        return keys

    def release_pages(self) -> None:
        """Release the pages of a dropped bucket; call once."""
        self._pages.release(self.pages)


def added_again(damaged: Collection[QuarantinedBucket], added: BitMap64, slot: int) -> None:
    """Remove positions added in a slot from damaged buckets; they are new rows, owed to every subscription."""
    for bucket in damaged:
        if bucket.positions_known or slot > bucket.live.quarantined_slot:
            bucket.remove(added)


def learns_positions(damaged: Collection[QuarantinedBucket]) -> bool:
    """Return whether positions of pages without a bucket may matter to one of these."""
    return any(not bucket.positions_known and bucket.missing_rows for bucket in damaged)


def rebuild_needed(damaged: Iterable[QuarantinedBucket]) -> tuple[RebuildNeeded, ...]:
    """Return the buckets with missing rows, ordered by ledger."""
    needed = (bucket.rebuild_needed() for bucket in damaged if bucket.missing_rows)
    return tuple(sorted(needed, key=lambda each: (each.first_ledger_id, each.last_ledger_id, each.bucket)))
