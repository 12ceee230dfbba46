"""Keeps one index of a topic: every row that is not gone, in a mutable bucket or a sealed one.

    add -> mutable bucket -(cut)-> sealing bucket -(seal committed)-> sealed bucket -(every row gone)-> dropped
    a row is pending in its bucket until the head passes it: then it is due, until it is gone
    a damaged bucket is quarantined: its rows are no longer in the index

`entitlement` knows who is owed rows, and `indexes` what comes due next.

Counts over the buckets of all indexes of a topic are kept where they change, since adds and wake-ups read them often,
and each of many subscriptions may have a subscription index. A bucket that takes rows reports them, an index its
buckets. The first or highest of several values is computed again only after the one that held it has left.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from daemon.core.index import merging
from daemon.core.index.bucket import Bucket, GoneSet, QuarantinedBucket, SealedBucket, added_again, learns_positions
from daemon.core.index.delay_levels import LevelRows
from daemon.core.index.merging import MergedBucket
from daemon.core.index.mutable_bucket import MutableBucket, MutableRows
from daemon.core.index.position_keys import (
    PAGE_BITS,
    KeyedRows,
    PageTable,
    bitmap_of,
    contained,
    firsts,
    ordinals_of,
    pages_of,
)
from daemon.core.index.runs import SortedRun, earliest
from daemon.core.index.segments import SegmentCache, SegmentRange
from daemon.errors import InvariantViolated
from storage_backends.formats.index_ids import SHARED, is_of_batch_parts
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.row_columns import U64, Rows


class StagedKeys:
    """Positions of one index that a staged decision names; `keys` is their set. Their pages are held."""

    def __init__(self, pages: PageTable) -> None:
        self._pages = pages
        self._held = BitMap()
        self.keys = BitMap64()

    def add(self, keys: BitMap64) -> None:
        # A bucket that is dropped before the decision is applied must not take their pages with it.
        fresh = pages_of(keys) - self._held
        if fresh:
            self._pages.hold(fresh)
            self._held |= fresh
        self.keys |= keys

    def applied(self, keys: BitMap64) -> None:
        if not self._held:
            return
        self.keys -= keys
        held, self._held = self._held, pages_of(self.keys)
        if left := held - self._held:
            self._pages.release(left)


class BucketCounts:
    """Counts of the buckets of one topic, and lists of those that need work.

    `added_rows` counts rows of the mutable buckets, as `MutableBucket.added_rows`, and `added_id_bytes` their schedule
    ids. `sealing` is the largest number of uncommitted seals of an index. `empty` has the sealed buckets whose rows are
    all gone, and `readable` those whose objects can be read, by name; `merged_away` those that wait for their merged
    bucket. `in_memory` has the buckets in memory that have or had rows.
    """

    def __init__(self) -> None:
        self.added_rows = 0
        self.added_id_bytes = 0
        self.sealing = 0
        self.empty: dict[str, SealedBucket] = {}
        self.readable: dict[str, SealedBucket] = {}
        self.merged_away: dict[str, SealedBucket] = {}
        self.in_memory: dict[int, MutableBucket] = {}
        # Index id -> mutable bucket that has rows
        self._filling: dict[int, MutableBucket] = {}
        self._extremes: tuple[int, int | None] | None = (0, None)
        # Number of seals -> number of indexes that have as many
        self._indexes_sealing: collections.Counter[int] = collections.Counter()
        self._index_of: dict[str, int] = {}

    # ---- buckets that take new rows

    @property
    def has_rows_to_seal(self) -> bool:
        return bool(self._filling)

    @property
    def highest_ledger_id(self) -> int:
        """The highest ledger id of rows added since the buckets were cut; 0 without rows."""
        return self._known_extremes()[0]

    @property
    def first_row_at_ms(self) -> int | None:
        """The time of the first of these adds, by a clock that never steps (ms); None without rows."""
        return self._known_extremes()[1]

    def _known_extremes(self) -> tuple[int, int | None]:
        if self._extremes is None:
            filling = self._filling.values()
            highest = max((bucket.highest_ledger_id for bucket in filling), default=0)
            self._extremes = highest, earliest(*[bucket.first_row_at_ms for bucket in filling])
        return self._extremes

    def rows_came(self, bucket: MutableBucket, rows: int) -> None:
        """Count rows that a bucket has taken in."""
        self.added_rows += rows
        self.in_memory[id(bucket)] = self._filling[bucket.index_id] = bucket
        if self._extremes is not None:
            highest, first_ms = self._extremes
            self._extremes = max(highest, bucket.highest_ledger_id), earliest(first_ms, bucket.first_row_at_ms)

    def ids_came(self, size_bytes: int) -> None:
        """Count schedule ids of rows that a bucket has taken in."""
        self.added_id_bytes += size_bytes

    def _filling_left(self, bucket: MutableBucket) -> None:
        if self._filling.pop(bucket.index_id, None) is not None:
            self.added_rows -= bucket.added_rows
            self.added_id_bytes -= bucket.added_id_bytes
            self._extremes = None if self._filling else (0, None)

    # ---- seals

    def seal_begins(self, bucket: MutableBucket, *, sealing: int) -> None:
        """Count a bucket as sealing. `sealing` is the number of seals of its index, including this one."""
        self._filling_left(bucket)
        self._count_sealing(sealing - 1, sealing)

    def seal_ended(self, bucket: MutableBucket, *, sealing: int) -> None:
        """Count a seal as committed. `sealing` is the number of seals that its index has left."""
        self.in_memory.pop(id(bucket), None)
        self._count_sealing(sealing + 1, sealing)

    def _count_sealing(self, before: int, now: int) -> None:
        self._indexes_sealing[before] -= before > 0
        self._indexes_sealing[now] += now > 0
        self.sealing = max(self.sealing, now)
        while self.sealing and not self._indexes_sealing[self.sealing]:
            self.sealing -= 1

    # ---- sealed buckets

    def sealed_came(self, bucket: SealedBucket) -> None:
        """Add a sealed bucket that has entered its index."""
        self._index_of[bucket.name] = bucket.index_id
        self.readable[bucket.name] = bucket
        if not bucket.present_rows:
            self.emptied(bucket)

    def sealed_left(self, name: str) -> None:
        """Remove a sealed bucket that has left its index."""
        del self._index_of[name]
        self.readable.pop(name, None)
        self.merged_away.pop(name, None)
        self.empty.pop(name, None)

    def left_out(self, bucket: SealedBucket) -> None:
        """Note that the object of a sealed bucket is damaged or missing."""
        self.readable.pop(bucket.name, None)
        if bucket.merged_away:
            self.merged_away[bucket.name] = bucket

    def emptied(self, bucket: SealedBucket) -> None:
        """Note that the last row of a sealed bucket is gone."""
        if bucket.name in self._index_of:
            self.empty[bucket.name] = bucket

    def index_of(self, bucket: str) -> int | None:
        """Return the index of a sealed bucket, or None if it is no longer in one."""
        return self._index_of.get(bucket)

    # ---- indexes

    def index_left(self, filling: MutableBucket, *, sealing: Sequence[MutableBucket], sealed: Sequence[str]) -> None:
        """Remove the mutable, sealing and sealed buckets of a removed index."""
        self._filling_left(filling)
        self._count_sealing(len(sealing), 0)
        for bucket in (filling, *sealing):
            self.in_memory.pop(id(bucket), None)
        for name in sealed:
            self.sealed_left(name)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BucketBits:
    """The gone and acknowledged positions of one named bucket at one moment. `gone` has parts of a union."""

    bucket: str
    gone: tuple[BitMap64, ...]
    acknowledged: Mapping[int, BitMap64]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class IndexCut:
    """The index as of one slot: what a checkpoint stores, and what a seal commits."""

    mutable: MutableRows
    bits: tuple[BucketBits, ...]


def are_of_time(deliver_at_ms: U64, asked_ms: U64, any_time: bool) -> npt.NDArray[np.bool_]:
    """Return the mask of rows with the requested times. With `any_time`, 0 matches any time."""
    same: npt.NDArray[np.bool_] = deliver_at_ms == asked_ms
    return same | (asked_ms == 0) if any_time else same


# Adjacent pages, by ordinal, that share an entry when buckets are looked up
_BLOCK_BITS = 8

# Rows of a search in sealed buckets, by (bucket, segment)
SeenRows = dict[tuple[str, int], KeyedRows]


class Index:
    """One index; `index_id` says which of the topic (`formats.index_ids`).

    `of_batch_parts`: whether its positions are messages of entries.
    `staged`: positions of rows that are on their way into it. `acknowledging_lost`: positions of damaged buckets that
    were being acknowledged when these were quarantined. `counts`: of the topic's buckets.
    """

    def __init__(
        self,
        pages: PageTable,
        cache: SegmentCache,
        *,
        now_ms: int,
        index_id: int = SHARED,
        counts: BucketCounts | None = None,
    ) -> None:
        self.index_id = index_id
        self.of_batch_parts = is_of_batch_parts(index_id)
        self._counts = BucketCounts() if counts is None else counts
        self.pages = pages
        self.cache = cache
        self.staged = StagedKeys(pages)
        self.acknowledging_lost = BitMap64()
        self.sealed: dict[str, SealedBucket] = {}
        # Block of adjacent pages -> sealed buckets with rows there; blocks, since a single page may have one row
        self._of_block: dict[int, list[SealedBucket]] = {}
        self.quarantined: dict[str, QuarantinedBucket] = {}
        self.sealing: list[MutableBucket] = []
        self.levels = LevelRows(self.present_among)
        self.mutable = self._new_mutable(now_ms)
        self._left_out: set[str] = set()
        self._noted_added: list[BitMap64] = []

    def _new_mutable(self, now_ms: int) -> MutableBucket:
        bucket = MutableBucket(self.pages, horizon_ms=now_ms, index_id=self.index_id, counts=self._counts)
        bucket.levels = self.levels
        return bucket

    # ---- counts

    @property
    def memory_buckets(self) -> list[MutableBucket]:
        return [*self.sealing, self.mutable]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that hold the rows of the index."""
        return [*self.sealed.values(), *self.sealing, self.mutable]

    @property
    def tracked(self) -> list[Bucket]:
        """The buckets whose gone or acknowledged positions are known."""
        return [*self.buckets, *self.quarantined.values()]

    @property
    def pending_rows(self) -> int:
        return sum(bucket.waiting_rows for bucket in self.buckets)

    def last_due_ms(self) -> int:
        """Return an upper bound of the due times of pending rows (Unix ms), 0 without any.

        It is exact until a row that would be the last leaves.
        """
        sealed = [bucket.last_due_ms for bucket in self.sealed.values() if bucket.waiting_rows]
        return max([0, *sealed, *[bucket.last_due_ms for bucket in self.memory_buckets if bucket.waiting_rows]])

    @property
    def loaded_rows(self) -> int:
        """The number of rows of this index's segments that are in memory."""
        return sum(self.cache.rows_of(name) for name in self.sealed)

    @property
    def readable(self) -> list[SealedBucket]:
        """The sealed buckets whose objects can be read."""
        if not self._left_out:
            return list(self.sealed.values())
        return [bucket for name, bucket in self.sealed.items() if name not in self._left_out]

    @property
    def expected(self) -> list[SealedBucket]:
        """The sealed buckets whose rows will be passed, by themselves or with a bucket that replaces them."""
        if not self._left_out:
            return list(self.sealed.values())
        return [bucket for name, bucket in self.sealed.items() if bucket.merged_away or name not in self._left_out]

    def leave_out(self, name: str) -> None:
        """Leave out a bucket whose object is damaged: its rows stay, and the other buckets go on."""
        self._left_out.add(name)
        self._counts.left_out(self.sealed[name])

    def leave_to_merged(self, name: str) -> None:
        """Leave out a bucket whose object was deleted before its merged bucket is served.

        Its rows stay until then. Keys, readers and decisions about what is due wait for them; all else goes on.
        """
        self.sealed[name].merged_away = True
        self.leave_out(name)

    # ---- membership

    def present_among(self, asked: BitMap64) -> BitMap64:
        """Return the positions that have a row that is not gone, pending or due."""
        found = BitMap64()
        for bucket in self.that_may_have(asked):
            if bucket.present_rows and bucket.present.intersect(asked):
                found |= bucket.present & asked
        return found

    def with_ids_among(self, asked: BitMap64) -> BitMap64:
        """Return the positions that have a row with a schedule id that is not gone."""
        found = BitMap64()
        for bucket in self.that_may_have(asked):
            if bucket.with_ids is not None and bucket.with_ids.intersect(asked):
                found |= bucket.with_ids & asked & bucket.present
        return found

    def that_may_have(self, keys: BitMap64) -> list[Bucket]:
        """Return the buckets that may have the positions: few of many if all are of one page, as adds usually are."""
        if keys:
            page = keys.min() >> PAGE_BITS
            if keys.max() >> PAGE_BITS == page:
                return self.that_may_have_page(page)
        return self.buckets

    def that_may_have_page(self, page: int) -> list[Bucket]:
        """Return the buckets that may have positions of a page, given by ordinal."""
        found: list[Bucket] = [*self.sealing, self.mutable]
        if neighbours := self._of_block.get(page >> _BLOCK_BITS):
            found[:0] = [each for each in neighbours if page in each.pages]
        return found

    def tracked_of_page(self, page: int) -> list[Bucket]:
        """Return the buckets that may have positions of a page, or have lost some."""
        return [*self.that_may_have_page(page), *[each for each in self.quarantined.values() if page in each.pages]]

    def find_loaded(
        self, keys: U64, deliver_at_ms: U64, seen: SeenRows, *, any_time: bool = False
    ) -> tuple[KeyedRows, list[SegmentRange]]:
        """Find the due rows of positions with these times: (rows found in memory, segments to load first).

        `seen` has what earlier calls for the same positions found, by segment, and is empty at the first. So the
        segments need not be in memory together. With `any_time`, time 0 matches any row, in every segment that has been
        passed. Segments to load may be those of a bucket that was merged away: its merged bucket is served once that
        load has ended.
        """
        found = [memory.find_passed(keys) for memory in self.memory_buckets]
        missing: list[SegmentRange] = []
        for bucket in self.expected:
            wanted = bitmap_of(keys) & bucket.passed
            if not wanted:
                continue
            times = np.unique(deliver_at_ms[contained(keys, wanted)]).tolist()
            numbers = {number for time in times for number in bucket.table.holding(time)}
            if any_time and not times[0]:
                numbers.update(range(min(bucket.head.number + 1, len(bucket.table))))
            for number in sorted(numbers):
                rows = seen.get((bucket.name, number))
                if rows is None:
                    rows = self.cache.get(bucket.name, number)
                if rows is None:
                    missing.append(SegmentRange(bucket.name, number, number))
                else:
                    rows = seen[bucket.name, number] = rows.take(contained(rows.keys, wanted))
                    found.append(rows)
        rows = KeyedRows.concat(found)
        rows = rows.take(np.argsort(rows.keys))
        places = np.searchsorted(rows.keys, keys)
        inside = places < len(rows)
        places, keys, deliver_at_ms = places[inside], keys[inside], deliver_at_ms[inside]
        same = (rows.keys[places] == keys) & are_of_time(rows.rows.deliver_at_ms[places], deliver_at_ms, any_time)
        return rows.take(np.unique(places[same])), missing

    def fresh_among(self, keys: U64, asked: BitMap64) -> npt.NDArray[np.intp] | None:
        """Return the places of positions without an applied or staged row, each position once; None for all.

        `asked` is the set of the keys.
        """
        present = self.present_among(asked)
        for staged in (self.staged.keys, self.acknowledging_lost):
            if staged.intersect(asked):
                present |= staged & asked
        if not present and len(asked) == len(keys):
            return None
        chosen = np.flatnonzero(~contained(keys, present)) if present else np.arange(len(keys))
        return chosen[firsts(keys[chosen])]

    # ---- changes

    def add(self, rows: Rows, slot: int, *, elapsed_ms: int, level: int = 0) -> int:
        """Add rows of a durable slot, of positions without a row; return how many arrived in due order.

        `level` is the delay level that they were added by, 0 if none.
        """
        keyed = KeyedRows(rows, self.pages.intern(rows.ledger_id, rows.entry_id))
        added = bitmap_of(keyed.keys)
        in_order_rows = self.mutable.add(keyed, added, elapsed_ms=elapsed_ms)
        if level:
            self.levels.add(level, added)
        self._came(added, slot)
        return in_order_rows

    def add_due(self, rows: Rows, slot: int, *, elapsed_ms: int) -> None:
        """Add due rows of a durable slot, of positions without a row, and pass them at once."""
        keyed = KeyedRows(rows, self.pages.intern(rows.ledger_id, rows.entry_id))
        added = bitmap_of(keyed.keys)
        self.mutable.add_due(keyed, added, elapsed_ms=elapsed_ms)
        self._came(added, slot)

    def _came(self, added: BitMap64, slot: int) -> None:
        added_again(self.quarantined.values(), added, slot)
        self.staged.applied(added)
        for noted in self._noted_added:
            noted.update(added)

    @contextlib.contextmanager
    def noting_added(self) -> Iterator[BitMap64]:
        """Provide a growing set of the positions that are added from now on."""
        noted = BitMap64()
        self._noted_added.append(noted)
        try:
            yield noted
        finally:
            self._noted_added = [each for each in self._noted_added if each is not noted]

    @contextlib.contextmanager
    def named(self, positions: Iterable[PositionBitmap]) -> Iterator[BitMap64]:
        """Provide the keys of departing positions; unknown pages get keys only if a damaged bucket may have them."""
        if not learns_positions(self.quarantined.values()):
            yield self.pages.find_stored(positions)
            return
        keys = self.pages.from_stored(positions)
        yield keys
        self.pages.forget_unheld(pages_of(keys))

    @contextlib.contextmanager
    def named_rows(self, rows: Rows) -> Iterator[tuple[KeyedRows, BitMap64]]:
        """Provide acknowledged rows with their keys; for unknown pages see `named`."""
        learns = learns_positions(self.quarantined.values())
        if learns:
            self.pages.intern(rows.ledger_id, rows.entry_id)
        keyed = self.pages.keyed(rows)
        keys = bitmap_of(keyed.keys)
        yield keyed, keys
        self.acknowledging_lost -= keys
        if learns:
            self.pages.forget_unheld(pages_of(keys))

    def remove(self, keys: BitMap64) -> int:
        """Remove positions that are gone; return how many were due."""
        hit = BitMap64()
        due_rows = 0
        for bucket in self.that_may_have(keys):
            left, due = bucket.remove(keys)
            hit |= left
            due_rows += due
        for damaged in self.quarantined.values():
            damaged.remove(keys - hit)
        return due_rows

    # ---- lifecycle of buckets

    def begin_seal(self, name: str, *, now_ms: int) -> MutableBucket:
        """Cut the mutable bucket and begin a new one. The cut one gets the object's name and serves on from memory."""
        bucket = self.mutable
        bucket.begin_seal(name)
        self.sealing.append(bucket)
        self._counts.seal_begins(bucket, sealing=len(self.sealing))
        self.mutable = self._new_mutable(now_ms)
        return bucket

    def finish_seal(self, memory: MutableBucket, sealed: SealedBucket | None, rows: KeyedRows, *, near_ms: int) -> None:
        """Replace a bucket by its committed sealed one, which is None if no row was left to store.

        `rows` are those stored, in due order. Segments that come due before `near_ms` are cached from them, so that
        they need not be read.
        """
        self.sealing.remove(memory)
        self._counts.seal_ended(memory, sealing=len(self.sealing))
        if sealed is not None:
            sealed.passed, sealed.passed_rows = memory.passed, memory.passed_rows
            sealed.acknowledged = memory.acknowledged
            start, sealed.late = self._place_of_head(memory, rows)
            sealed.head.move_to_row(start)
            self.add_sealed(sealed)
            for number, (first, end) in enumerate(sealed.table.row_ranges()):
                if end > start and int(sealed.table.min_ms[number]) <= near_ms:
                    # A copy: a view would keep all rows of the bucket in memory.
                    self.cache.put(sealed.name, number, rows.take(np.arange(first, end)).compact())
        elif memory.present_rows:
            raise InvariantViolated(f"bucket {memory.name} was sealed empty with {memory.present_rows} rows present")
        memory.release_pages()

    @staticmethod
    def _place_of_head(memory: MutableBucket, rows: KeyedRows) -> tuple[int, SortedRun]:
        """Return (row before which everything is passed or late, late rows)."""
        next_due_ms = memory.next_due_ms() if memory.waiting_rows else None
        if next_due_ms is None:
            return len(rows), SortedRun(KeyedRows.empty())
        times = rows.rows.deliver_at_ms
        first = end = int(np.searchsorted(times, np.uint64(next_due_ms)))
        if memory.passed_until_ms is not None:
            end = int(np.searchsorted(times, np.uint64(memory.passed_until_ms), side="right"))
        if end <= first:
            return first, SortedRun(KeyedRows.empty())
        mixed = rows.take(slice(first, end))
        return end, SortedRun(mixed.take(contained(mixed.keys, memory.present - memory.passed)).compact())

    def add_sealed(self, bucket: SealedBucket) -> None:
        self.sealed[bucket.name] = bucket
        bucket.levels = self.levels
        bucket.counts = self._counts
        self._counts.sealed_came(bucket)
        for block in _blocks_of(bucket.pages):
            self._of_block.setdefault(block, []).append(bucket)

    def close(self) -> None:
        """Remove a deleted index from counts and memory."""
        self._counts.index_left(self.mutable, sealing=self.sealing, sealed=list(self.sealed))
        for name in self.sealed:
            self.cache.discard_bucket(name)

    def drop(self, name: str) -> SealedBucket:
        """Drop a bucket that the manifest no longer names."""
        bucket = self._take_out(name)
        bucket.release_pages()
        return bucket

    def _take_out(self, name: str) -> SealedBucket:
        bucket = self.sealed.pop(name)
        bucket.counts = None
        self._counts.sealed_left(name)
        for block in _blocks_of(bucket.pages):
            self._of_block[block].remove(bucket)
            if not self._of_block[block]:
                del self._of_block[block]
        self._left_out.discard(name)
        self.cache.discard_bucket(name)
        return bucket

    # ---- merged buckets

    def knows(self, name: str) -> bool:
        """Return whether a bucket of the manifest is here, in any form."""
        return name in self.quarantined or self.serves(name)

    def serves(self, name: str) -> bool:
        """Return whether a cut bucket, sealed or sealing, holds rows of the index."""
        return name in self.sealed or any(each.name == name for each in self.sealing)

    def sources_of(self, merged: MergedBucket) -> list[SealedBucket]:
        """Return the buckets whose rows are in the merged one."""
        return [self.sealed[name] for name in merged.kept if name in self.sealed]

    def adopt(self, merged: MergedBucket, loaded: Mapping[int, KeyedRows], *, boundary_ms: int) -> SealedBucket:
        """Replace the sources of a merged bucket by it, as `merging.inherited` says. O(bitmaps)."""
        sources = self.sources_of(merged)
        bucket = merging.inherited(merged, sources, self.pages, loaded, boundary_ms=boundary_ms)
        for source in sources:
            self.drop(source.name)
        self.add_sealed(bucket)
        for number, rows in loaded.items():
            # Segments loaded ahead must not evict ones loaded before.
            if number == bucket.head.number or (number > bucket.head.number and len(rows) <= self.cache.room_rows):
                self.cache.put(bucket.name, number, rows)
                bucket.settle(self.cache)
        return bucket

    # ---- damage

    def lose_merged(self, live: LiveBucket, sources: Sequence[SealedBucket]) -> None:
        """Quarantine a damaged merged bucket in place of its sources: their rows leave."""
        gone = [part for source in sources if source.gone is not None for part in source.gone.freeze()]
        acknowledged: dict[int, BitMap64] = {}
        for source in sources:
            for number, keys in source.acknowledged.items():
                acknowledged.setdefault(number, BitMap64()).update(keys)
        self.add_quarantined(
            QuarantinedBucket(
                live,
                present=BitMap64.union(BitMap64(), *[source.present for source in sources]),
                gone=GoneSet(BitMap64.union(BitMap64(), *gone)),
                acknowledged=acknowledged,
                pages=self.pages,
            )
        )
        for source in sources:
            self.levels.remove(source.present)
            self.drop(source.name)

    def quarantine(self, live: LiveBucket) -> SealedBucket:
        """Quarantine a bucket that the manifest marks as damaged: its rows leave until they are added again."""
        bucket = self._take_out(live.object.name)
        gone = GoneSet() if bucket.gone is None else bucket.gone
        acknowledged = {number: keys.copy() for number, keys in bucket.acknowledged.items()}
        present = bucket.present.copy()
        self.add_quarantined(
            QuarantinedBucket(live, present=present, gone=gone, acknowledged=acknowledged, pages=self.pages)
        )
        self.levels.remove(present)
        bucket.release_pages()
        return bucket

    def add_quarantined(self, bucket: QuarantinedBucket) -> None:
        self.quarantined[bucket.name] = bucket

    def cut(self) -> IndexCut:
        """Freeze the index, for a checkpoint or the progress of a seal."""
        bits = tuple(
            BucketBits(
                bucket.name,
                bucket.gone.freeze() if bucket.gone is not None else (),
                {number: keys.copy() for number, keys in bucket.acknowledged.items() if keys},
            )
            for bucket in [*self.sealed.values(), *self.sealing, *self.quarantined.values()]
        )
        return IndexCut(self.mutable.snapshot(), bits)


def _blocks_of(pages: BitMap) -> list[int]:
    """Return the blocks of the pages, given by ordinal."""
    blocks: list[int] = np.unique(ordinals_of(pages) >> _BLOCK_BITS).tolist()
    return blocks
