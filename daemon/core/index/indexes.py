"""Keeps all indexes of a topic, and passes what comes due over all of them.

The head is one point in due order over all buckets. Everything before it is due or gone; it moves only over what has
come due. A sealed bucket whose next segment is not in memory is left out; the others go on. This decides which segments
to load and when to cut for a seal; `daemon.topic.bucket_reads` reads segments.

The keys of two indexes never collide: sets of keys may hold positions of all of them. Batch parts are messages of
entries that were negatively acknowledged individually, as positions of an index of their own
(`storage_backends.formats.index_ids`).

A subscription index is made with its first row and goes with its subscription, which is owed those rows whatever its
`since_ms` is. A position may have a row in each index, and is a duplicate only within one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket, QuarantinedBucket, RebuildNeeded, SealedBucket, rebuild_needed
from daemon.core.index.index import BucketCounts, Index, IndexCut
from daemon.core.index.mutable_bucket import ROW_BYTES, MutableBucket, SealLimits
from daemon.core.index.position_keys import UNKNOWN_KEY, KeyedRows, PagePlaces, PageTable, contained, keys_of
from daemon.core.index.runs import Place, SortedRun, earliest, take_due
from daemon.core.index.segments import SegmentCache, SegmentRange
from storage_backends.formats.index_ids import (
    BATCH_BITS,
    BATCH_INDEX_MAX,
    BATCHED_ENTRY_ID_MAX,
    NO_BATCH_INDEX,
    SHARED,
    batch_parts_of,
    of_part,
    subscription_of,
)
from storage_backends.formats.row_columns import U32, U64, Rows

# Segments of one bucket that are loaded with one read, ahead of the head
LOAD_AHEAD_SEGMENTS = 8


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Passed:
    """Rows of one bucket that were just passed, in due order. `late` is whether they lie before its head."""

    bucket: Bucket
    rows: KeyedRows
    late: bool


# (bucket, whether its rows are late ones, the run of a bucket in memory): rows of one source arrive in due order.
_Source = tuple[Bucket, bool, SortedRun | None]


class Indexes(Mapping[int, Index]):
    """The indexes of a topic by id (`formats.index_ids`): 0 is the shared one, which always exists.

    `batch_parts`: those of batch parts, by their subscriptions. `readable`: the sealed buckets whose objects can be
    read. `merged_away`: those whose rows wait for their merged bucket. `filled`: the buckets in memory that have or had
    rows.
    `passed_until_ms`: no row that was passed has a later time. `leaving`: positions that a decision takes out before
    they are due, until it is applied: they are passed no more.
    """

    def __init__(self, cache: SegmentCache, *, now_ms: int) -> None:
        self.cache = cache
        self._counts = BucketCounts()
        self.places = PagePlaces()
        self.passed_until_ms = 0
        self.leaving = BitMap64()
        self._horizon_ms = now_ms
        # The clock when rows were last passed (Unix ms)
        self._passing_ms = now_ms
        self.batch_parts: dict[int, Index] = {}
        self._by_id: dict[int, Index] = {}
        self.shared = self.of(SHARED)
        # Views, which follow the counts.
        self.readable: Collection[SealedBucket] = self._counts.readable.values()
        self.merged_away: Collection[SealedBucket] = self._counts.merged_away.values()
        self.filled: Collection[MutableBucket] = self._counts.in_memory.values()

    def __getitem__(self, index_id: int) -> Index:
        return self._by_id[index_id]

    def __contains__(self, index_id: object) -> bool:
        return index_id in self._by_id

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, index_id: int) -> Index:
        """Return the index with this id, creating it if necessary."""
        index = self._by_id.get(index_id)
        if index is None:
            pages = PageTable(self.places, owner=index_id)
            index = Index(pages, self.cache, now_ms=self._horizon_ms, index_id=index_id, counts=self._counts)
            self._by_id[index_id] = index
            if index.of_batch_parts:
                self.batch_parts[subscription_of(index_id)] = index
        return index

    def of_entries(self, subscription_id: int | None = None) -> list[Index]:
        """Return the indexes of whole entries whose rows a subscription is owed: the shared one and its own.

        Without a subscription, returns all indexes of whole entries.
        """
        if subscription_id is None:
            return [index for index in self._by_id.values() if not index.of_batch_parts]
        own = self._by_id.get(subscription_id)
        return [self.shared] if own is None else [self.shared, own]

    def serving(self, subscription_id: int) -> list[Index]:
        """Return all indexes whose rows a subscription is owed, including that of its batch parts."""
        own, parts = self._by_id.get(subscription_id), self.batch_parts.get(subscription_id)
        if own is None and parts is None:
            return [self.shared]
        return [index for index in (self.shared, own, parts) if index is not None]

    def parts_of(self, rows: KeyedRows, subscription_id: int) -> Iterator[tuple[Index, KeyedRows]]:
        """Yield rows that a subscription is owed, separated by index."""
        owners = self.places.owners(rows.keys)
        for index in self.serving(subscription_id):
            here = owners == np.uint64(index.index_id)
            if here.any():
                yield index, rows if here.all() else rows.take(here)

    def remove(self, subscription_id: int) -> None:
        """Remove the indexes of a removed subscription."""
        for index_id in (subscription_id, batch_parts_of(subscription_id)):
            index = self._by_id.pop(index_id, None)
            if index is not None:
                index.close()
        self.batch_parts.pop(subscription_id, None)

    # ---- buckets

    @property
    def sealed(self) -> dict[str, SealedBucket]:
        """The sealed buckets of all indexes, by name."""
        return {name: bucket for index in self._by_id.values() for name, bucket in index.sealed.items()}

    @property
    def quarantined(self) -> dict[str, QuarantinedBucket]:
        """The damaged buckets of all indexes, by name."""
        return {name: bucket for index in self._by_id.values() for name, bucket in index.quarantined.items()}

    @property
    def memory_buckets(self) -> list[MutableBucket]:
        return [bucket for index in self._by_id.values() for bucket in index.memory_buckets]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that hold the rows of the topic."""
        return [bucket for index in self._by_id.values() for bucket in index.buckets]

    def holding(self, bucket: str) -> Index | None:
        """Return the index of a sealed bucket, or None if it is no longer in one."""
        index_id = self._counts.index_of(bucket)
        return None if index_id is None else self._by_id[index_id]

    def bucket(self, name: str) -> SealedBucket | None:
        index = self.holding(name)
        return None if index is None else index.sealed[name]

    def rebuild_needed(self) -> tuple[RebuildNeeded, ...]:
        """Return what was lost with damaged buckets and has not been added again, by ledger."""
        return rebuild_needed(self.quarantined.values())

    @property
    def has_droppable(self) -> bool:
        """True if there is a bucket whose rows are all gone."""
        return bool(self._counts.empty)

    def droppable(self) -> list[SealedBucket]:
        """Return the buckets whose rows are all gone."""
        return list(self._counts.empty.values())

    # ---- counts

    @property
    def pending_rows(self) -> int:
        return sum(index.pending_rows for index in self._by_id.values())

    @property
    def due_rows(self) -> int:
        """The number of rows that are due and not gone, whether or not a subscription is owed them."""
        return sum(bucket.passed_rows for index in self._by_id.values() for bucket in index.buckets)

    @property
    def present_rows(self) -> int:
        """The number of rows that are not gone, pending or due."""
        return sum(bucket.present_rows for index in self._by_id.values() for bucket in index.buckets)

    @property
    def loaded_rows(self) -> int:
        """The number of rows of this topic's segments that are in memory."""
        return sum(index.loaded_rows for index in self._by_id.values())

    @property
    def sealing(self) -> int:
        """The largest number of uncommitted seals of an index."""
        return self._counts.sealing

    # ---- due

    def next_due_ms(self) -> int | None:
        """Return a lower bound of the due times of pending rows (Unix ms), or None without any."""
        return earliest(self.next_due_to_read_ms(), *[bucket.next_due_ms() for bucket in self.merged_away])

    def next_due_to_read_ms(self) -> int | None:
        """Return `next_due_ms` without rows that wait for their merged bucket."""
        times = [bucket.next_due_ms() for bucket in self.readable]
        return earliest(self.next_due_of_memory_buckets_ms(), *times)

    def last_due_ms(self) -> int:
        """Return an upper bound of the due times of pending rows (Unix ms), 0 without any. See `Index.last_due_ms`."""
        return max(index.last_due_ms() for index in self._by_id.values())

    def next_due_of_memory_buckets_ms(self) -> int | None:
        """Return a lower bound of the due times of pending rows outside sealed buckets (Unix ms), or None.

        An add can bring it forward.
        """
        first_ms = None
        for bucket in self.filled:
            if bucket.present_rows > bucket.passed_rows:
                first_ms = earliest(first_ms, bucket.next_due_ms())
        return first_ms

    def next_due_in_memory_ms(self) -> int | None:
        """Return a lower bound of the due times of rows that can be passed without loading (Unix ms), or None."""
        times = [self.next_due_of_memory_buckets_ms()]
        for bucket in self.readable:
            if bucket.waiting_rows:
                times.append(bucket.late.next_due_ms())
                if bucket.settle(self.cache) is not None:
                    times.append(bucket.head.next_due_ms())
        return earliest(*times)

    def pass_due(self, now_ms: int, limit: int, look: Callable[[], None] | None = None) -> list[Passed]:
        """Pass about `limit` due rows, by bucket. Return nothing if none is due, or none that is in memory.

        If given, `look` is called before rows are taken. Then no row is taken that comes after a due one which is not
        in memory and was not at the call either. Without `look` such rows need not be told apart.
        """
        # A request passes what was due when it arrived by that earlier time, while others have passed more since.
        if now_ms > self._passing_ms:
            self._passing_ms = now_ms
        while True:
            if look is not None:
                look()
            due = self._take_due(now_ms, limit, ends_at_unread=look is not None)
            if not due:
                return []
            passed = []
            for (bucket, late, _), parts in due.items():
                rows = parts[0] if len(parts) == 1 else KeyedRows.concat(parts)
                rows = bucket.pass_rows(self._staying(rows) if self.leaving else rows)
                if len(rows.keys):
                    last_ms = int(rows.rows.deliver_at_ms[-1])
                    if last_ms > self.passed_until_ms:
                        self.passed_until_ms = last_ms
                    passed.append(Passed(bucket, rows, late))
            if passed:
                return passed

    def every_second(self, now_ms: int) -> None:
        """Adapt to a wall clock of `now_ms`, which may have been set back since rows came due. Call now and then."""
        self._passing_ms = min(self._passing_ms, now_ms)

    def _staying(self, due: KeyedRows) -> KeyedRows:
        """Leave out leaving rows: they are gone when the decision is applied, or the topic's memory is lost."""
        leaves = contained(due.keys, self.leaving)
        return due.take(~leaves) if leaves.any() else due

    def _take_due(self, now_ms: int, limit: int, *, ends_at_unread: bool) -> dict[_Source, list[KeyedRows]]:
        """Take about `limit` due rows by source.

        A take ends where a segment of any bucket ends. Several are made, so that the work for a bucket covers many
        rows. With `ends_at_unread`, no more are made once a bucket that was taken from reaches a segment that is not in
        memory.
        """
        due: dict[_Source, list[KeyedRows]] = {}
        rows_taken = 0
        while 2 * rows_taken < limit:
            sources, runs = self._runs_at(now_ms)
            taken = take_due(runs, now_ms, limit)
            if not taken:
                break
            goes_on = False
            for number, rows in taken:
                due.setdefault(sources[number], []).append(rows)
                rows_taken += len(rows.keys)
                # More may be due of the run, or of what follows it.
                run = runs[number]
                next_due_ms = None if goes_on or run.offset == run.stop else run.next_due_ms()
                goes_on = goes_on or (run.continues if next_due_ms is None else next_due_ms <= now_ms)
            if not goes_on:
                # No run was cut short: everything due was taken.
                break
            taken_from = [sources[number][0] for number, _ in taken] if ends_at_unread else []
            if any(isinstance(bucket, SealedBucket) and bucket.is_unread(self.cache, now_ms) for bucket in taken_from):
                break
        return due

    def _runs_at(self, now_ms: int) -> tuple[list[_Source], list[SortedRun]]:
        """Return the runs that have or may have due rows, and the source of each."""
        sources: list[_Source] = []
        runs: list[SortedRun] = []
        for memory in self.filled:
            for run in memory.runs_at(now_ms):
                sources.append((memory, False, run))
                runs.append(run)
        for bucket in self.readable:
            if len(bucket.late):
                sources.append((bucket, True, None))
                runs.append(bucket.late)
            loaded = bucket.settle(self.cache)
            if loaded is not None:
                sources.append((bucket, False, None))
                runs.append(loaded)
        return sources, runs

    def has_unread(self, subscription_id: int, now_ms: int) -> bool:
        """Return whether a subscription is owed rows of a due segment that is not in memory: others may pass them."""
        return any(
            bucket.is_unread(self.cache, now_ms) for index in self.serving(subscription_id) for bucket in index.expected
        )

    def first_unpassed(self, subscription_id: int) -> Place | None:
        """Return the first point in due order that overdue sealed rows of the subscription may have, or None.

        These rows were due when rows were last passed, but were not passed themselves. Passed rows at later points
        overtook them. A bucket in memory has none: every passed row comes after all of its rows except late ones.
        """
        places = (
            bucket.first_waiting(self.cache, self._passing_ms)
            for index in self.serving(subscription_id)
            for bucket in index.expected
        )
        return min((place for place in places if place is not None), default=None)

    # ---- segments for the head

    def wanted_segments(self, now_ms: int, ahead_ms: int = 0) -> list[SegmentRange]:
        """Return the segments to load for the head, the earliest first.

        These are the due ones, and those that come due within `ahead_ms` as far as there is room: segments loaded ahead
        must not evict ones loaded before.
        """
        wanted = []
        for bucket in self.readable:
            if not bucket.waiting_rows:
                continue
            bucket.settle(self.cache)
            following = bucket.head.following
            if following is None or following[1] > now_ms + ahead_ms:
                continue
            segments = bucket.head.wanted(now_ms + ahead_ms, LOAD_AHEAD_SEGMENTS, self.cache)
            if segments is not None:
                wanted.append((int(bucket.table.min_ms[segments.first]), bucket.table, segments))
        wanted.sort(key=lambda item: item[0])
        room_rows = self.cache.room_rows
        chosen = []
        for min_ms, table, segments in wanted:
            if min_ms <= now_ms or table.infos[segments.first].rows <= room_rows:
                chosen.append(segments)
                room_rows -= sum(info.rows for info in table.infos[segments.first : segments.last + 1])
        return chosen

    def unread_segments(self, now_ms: int) -> list[SegmentRange]:
        """Return the segments to load before every row that is due now can be passed.

        Those of a bucket that was merged away stand for its merged bucket: their load ends when that is served.
        """
        wanted = self.wanted_segments(now_ms)
        for bucket in self.merged_away:
            if bucket.is_unread(self.cache, now_ms):
                number = min(bucket.head.number, len(bucket.table) - 1)
                wanted.append(SegmentRange(bucket.name, number, number))
        return wanted

    def next_load_ms(self, ahead_ms: int, being_read: Callable[[str, int], bool]) -> int | None:
        """Return when to load the head's next segment (Unix ms): `ahead_ms` before it is due if there is room."""
        room_rows = self.cache.room_rows
        earliest_ms: int | None = None
        for bucket in self.readable:
            following = bucket.head.following if bucket.waiting_rows else None
            if following is None:
                continue
            number, min_ms, rows = following
            # Most buckets come later than one that was checked, even if there is room.
            if earliest_ms is not None and min_ms - ahead_ms >= earliest_ms:
                continue
            if (bucket.name, number) not in self.cache and not being_read(bucket.name, number):
                load_ms = min_ms - (ahead_ms if rows <= room_rows else 0)
                earliest_ms = load_ms if earliest_ms is None else min(earliest_ms, load_ms)
        return earliest_ms

    def load(self, bucket: str, number: int, rows: KeyedRows) -> None:
        """Put a segment into memory. A waiting head takes it at once, since a later segment may evict it."""
        loaded = self.bucket(bucket)
        if loaded is not None:
            self.cache.put(bucket, number, rows)
            loaded.settle(self.cache)

    def release_segments(self) -> None:
        """Drop all segments of a topic that is no longer served."""
        for index in self._by_id.values():
            for name in index.sealed:
                self.cache.discard_bucket(name)

    # ---- seals: all indexes are cut at one slot

    @property
    def has_mutable_rows(self) -> bool:
        return self._counts.has_rows_to_seal

    def wants_seal(self, limits: SealLimits, *, elapsed_ms: int) -> bool:
        """Return whether the mutable buckets together are large or old enough.

        `elapsed_ms` is of a clock that never steps.
        """
        counts = self._counts
        rows, began_ms = counts.added_rows, counts.first_row_at_ms
        return began_ms is not None and (
            rows >= limits.rows_max
            or rows * ROW_BYTES + counts.added_id_bytes >= limits.size_max_bytes
            or elapsed_ms - began_ms >= limits.age_max_ms
        )

    def wants_seal_before(self, highest_ledger_id: int, limits: SealLimits) -> bool:
        """Return whether PIP-195's rule asks for a seal: enough rows, and rows of a higher ledger arrive."""
        counts = self._counts
        return counts.added_rows >= limits.rows_min and highest_ledger_id > counts.highest_ledger_id

    def cut(self) -> tuple[tuple[int, IndexCut], ...]:
        """Freeze all indexes, by id, for a checkpoint or the progress of a seal."""
        return tuple((number, index.cut()) for number, index in self._by_id.items())

    def begin_seal(self, names: Callable[[int], str], *, now_ms: int) -> list[tuple[int, MutableBucket]]:
        """Cut the mutable buckets that have rows, as `Index.begin_seal`: (index, bucket).

        `names` returns the name of the object that the bucket of an index becomes.
        """
        return [
            (number, index.begin_seal(names(number), now_ms=now_ms))
            for number, index in self._by_id.items()
            if index.mutable.first_row_at_ms is not None
        ]


_PARTS = 1 << BATCH_BITS


def first_keys(index: Index, ledger_id: U64, entry_id: U64) -> U64:
    """Return the key of the first part of each entry, UNKNOWN_KEY if neither it nor its neighbours have a row."""
    keys = index.pages.find(ledger_id, entry_id << np.uint64(BATCH_BITS))
    keys[entry_id > np.uint64(BATCHED_ENTRY_ID_MAX)] = UNKNOWN_KEY
    return keys


def keys_from(first: U64) -> BitMap64:
    """Return every possible key of parts of entries, given the first key of each entry."""
    keys = BitMap64()
    for key in first[first != UNKNOWN_KEY].tolist():
        keys.add_range(key, key + _PARTS)
    return keys


def keys_of_entries(index: Index, ledger_id: U64, entry_id: U64) -> BitMap64:
    """Return every possible key of parts of the entries, in an index of batch parts."""
    return keys_from(first_keys(index, ledger_id, entry_id))


def first_keys_of(parts: BitMap64) -> U64:
    """Return the distinct keys of the first parts of the parts' entries."""
    return np.unique(first_key_of(keys_of(parts)))


def first_key_of(parts: U64) -> U64:
    """Return for each part the key of the first part of its entry."""
    first: U64 = parts & ~np.uint64(BATCH_INDEX_MAX)
    return first


def unpacked(keyed: KeyedRows, indexes: Indexes, subscription_id: int) -> tuple[Rows, U32 | None]:
    """Return (rows with the entry ids of their entries, batch indexes u32[n] or None if all are whole entries)."""
    rows = keyed.rows
    if subscription_id not in indexes.batch_parts:
        return rows, None
    parts = indexes.places.owners(keyed.keys) == np.uint64(batch_parts_of(subscription_id))
    if not parts.any():
        return rows, None
    entry_id, batch_index = of_part(rows.entry_id)
    return (
        dataclasses.replace(rows, entry_id=np.where(parts, entry_id, rows.entry_id)),
        np.where(parts, batch_index, np.uint32(NO_BATCH_INDEX)),
    )
