"""The indexes of a topic, the shared one and subscriptions' own ones, and what comes due next over all of them.

Owns: which indexes there are, counts over them, passing rows as they come due, what is loaded for that, and when and
how all are cut for a seal.
Does not own: the rows of one index (`index`), who receives them (`feeding`), and reading segments (the engine).

The head is one place in every bucket. Everything before it is due or gone; it moves only over what has come due, in
hand-out order over all buckets. A sealed bucket whose next segment is not in memory is left out, the others go on.

The keys of two indexes never collide: sets of keys may hold positions of all of them.

Batch parts: messages of entries that were negatively acknowledged by themselves, as positions of an index.

Owns: which keys the parts of an entry have, and showing parts as messages of their entries.
Does not own: what numbers they have (`storage_backends.formats.index_ids`), and what becomes of them (`nack_decisions`,
`ack_decisions`).
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

# Segments of one bucket that are loaded with one read, ahead of the head.
LOAD_AHEAD_SEGMENTS = 8


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Passed:
    """Rows of one bucket that have just been passed, in due order. `late`: they lie before the bucket's head."""

    bucket: Bucket
    rows: KeyedRows
    late: bool


# A bucket, whether its rows are late ones, and of a bucket in memory the run: rows of one source come in due order.
_Source = tuple[Bucket, bool, SortedRun | None]


class Indexes(Mapping[int, Index]):
    """By index id (`formats.index_ids`): a subscription's own ones, made with their first rows; 0 is the shared one,
    which is always there.

    `batch_parts`: those of batch parts, by their subscriptions. `readable`: the sealed buckets whose objects can be
    read. `filled`: the buckets in memory that have or had rows.
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
        # The clock when rows were passed last.
        self._passing_ms = now_ms
        self.batch_parts: dict[int, Index] = {}
        self._by_id: dict[int, Index] = {}
        self.shared = self.of(SHARED)
        # Views, which follow the counts.
        self.readable: Collection[SealedBucket] = self._counts.readable.values()
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
        """The index of that number, which is made if there is none."""
        index = self._by_id.get(index_id)
        if index is None:
            pages = PageTable(self.places, owner=index_id)
            index = Index(pages, self.cache, now_ms=self._horizon_ms, index_id=index_id, counts=self._counts)
            self._by_id[index_id] = index
            if index.of_batch_parts:
                self.batch_parts[subscription_of(index_id)] = index
        return index

    def of_entries(self, subscription_id: int | None = None) -> list[Index]:
        """The indexes of entries as a whole that a subscription is owed rows of: the shared one, and its own if there
        is one; None: all of them.
        """
        if subscription_id is None:
            return [index for index in self._by_id.values() if not index.of_batch_parts]
        own = self._by_id.get(subscription_id)
        return [self.shared] if own is None else [self.shared, own]

    def serving(self, subscription_id: int) -> list[Index]:
        """The indexes that a subscription is owed rows of: these, and that of its batch parts if there is one."""
        own, parts = self._by_id.get(subscription_id), self.batch_parts.get(subscription_id)
        if own is None and parts is None:
            return [self.shared]
        return [index for index in (self.shared, own, parts) if index is not None]

    def parts_of(self, rows: KeyedRows, subscription_id: int) -> Iterator[tuple[Index, KeyedRows]]:
        """Rows that a subscription is owed, apart by the index that they are of."""
        owners = self.places.owners(rows.keys)
        for index in self.serving(subscription_id):
            here = owners == np.uint64(index.index_id)
            if here.any():
                yield index, rows if here.all() else rows.take(here)

    def remove(self, subscription_id: int) -> None:
        """The subscription is no more, and nobody else is owed anything of its own indexes."""
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
        """The index that a sealed bucket is in; None when it is in none any more."""
        index_id = self._counts.index_of(bucket)
        return None if index_id is None else self._by_id[index_id]

    def bucket(self, name: str) -> SealedBucket | None:
        index = self.holding(name)
        return None if index is None else index.sealed[name]

    def rebuild_needed(self) -> tuple[RebuildNeeded, ...]:
        """What was lost with damaged buckets and has not been added again, by ledgers."""
        return rebuild_needed(self.quarantined.values())

    @property
    def has_droppable(self) -> bool:
        """Whether there is a bucket every row of which is gone."""
        return bool(self._counts.empty)

    def droppable(self) -> list[SealedBucket]:
        """Buckets every row of which is gone."""
        return list(self._counts.empty.values())

    # ---- counts

    @property
    def pending_rows(self) -> int:
        return sum(index.pending_rows for index in self._by_id.values())

    @property
    def due_rows(self) -> int:
        """Rows that are due and not gone, whether there is a subscription that is owed them or not."""
        return sum(bucket.passed_rows for index in self._by_id.values() for bucket in index.buckets)

    @property
    def present_rows(self) -> int:
        """Rows that are not gone, waiting or due."""
        return sum(bucket.present_rows for index in self._by_id.values() for bucket in index.buckets)

    @property
    def loaded_rows(self) -> int:
        """Rows of this topic's segments that are in memory."""
        return sum(index.loaded_rows for index in self._by_id.values())

    @property
    def sealing(self) -> int:
        """How many seals of the index that has the most are not committed."""
        return self._counts.sealing

    # ---- due

    def next_due_ms(self) -> int | None:
        """No waiting row is due before; None when nothing waits."""
        times = [self.next_due_of_memory_buckets_ms()]
        for bucket in self.readable:
            if bucket.waiting_rows:
                times += [bucket.head.next_due_ms(), bucket.late.next_due_ms()]
        return earliest(*times)

    def last_due_ms(self) -> int:
        """No waiting row is due later; 0 when nothing waits. See `Index.last_due_ms`."""
        return max(index.last_due_ms() for index in self._by_id.values())

    def next_due_of_memory_buckets_ms(self) -> int | None:
        """No waiting row that is in no sealed bucket is due before, in ms; None when none waits. An add can bring it
        forward.
        """
        first_ms = None
        for bucket in self.filled:
            if bucket.present_rows > bucket.passed_rows:
                first_ms = earliest(first_ms, bucket.next_due_ms())
        return first_ms

    def next_due_in_memory_ms(self) -> int | None:
        """No waiting row that can be passed without loading anything is due before, in ms; None when none waits."""
        times = [self.next_due_of_memory_buckets_ms()]
        for bucket in self.readable:
            if bucket.waiting_rows:
                times.append(bucket.late.next_due_ms())
                if bucket.settle(self.cache) is not None:
                    times.append(bucket.head.next_due_ms())
        return earliest(*times)

    def pass_due(self, now_ms: int, limit: int, look: Callable[[], None] | None = None) -> list[Passed]:
        """Passes about `limit` rows that are due, by bucket. Empty when none is due, or none that is in memory.

        `look`: called before rows are taken, and then no row is that comes behind a due one which is not in memory and
        was then. None where such rows need not be told from others.
        """
        # Who settles what was due when a request came passes it by that time, and others have passed more since.
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

    def look_after(self, now_ms: int) -> None:
        """To be called now and then: the wall clock shows `now_ms`. It may have been set back since rows came due."""
        self._passing_ms = min(self._passing_ms, now_ms)

    def _staying(self, due: KeyedRows) -> KeyedRows:
        """Without what is leaving: it is gone when the decision is applied, or all of this is lost."""
        leaves = contained(due.keys, self.leaving)
        return due.take(~leaves) if leaves.any() else due

    def _take_due(self, now_ms: int, limit: int, *, ends_at_unread: bool) -> dict[_Source, list[KeyedRows]]:
        """About `limit` due rows by their source. A take ends where a segment of any bucket does: several are made, so
        that what is done once for a bucket is done for many rows.

        `ends_at_unread`: no more are made once a bucket that was taken from comes to a segment that is not in memory.
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
                # No run was cut short: all that is due was taken.
                break
            taken_from = [sources[number][0] for number, _ in taken] if ends_at_unread else []
            if any(isinstance(bucket, SealedBucket) and bucket.is_unread(self.cache, now_ms) for bucket in taken_from):
                break
        return due

    def _runs_at(self, now_ms: int) -> tuple[list[_Source], list[SortedRun]]:
        """The runs that rows are due of, or may be, and of each its source."""
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
        """Whether a subscription is owed rows of a segment that is due and not in memory: others may pass them."""
        return any(
            bucket.is_unread(self.cache, now_ms) for index in self.serving(subscription_id) for bucket in index.expected
        )

    def first_unpassed(self, subscription_id: int) -> Place | None:
        """No sealed row that the subscription is owed, was due when rows were passed, and was not passed itself, comes
        before this place; None when there is none. Rows that were passed before and come behind overtook it.

        A bucket in memory has none: whatever is passed comes behind all of its rows but those that came late.
        """
        places = (
            bucket.first_waiting(self.cache, self._passing_ms)
            for index in self.serving(subscription_id)
            for bucket in index.expected
        )
        return min((place for place in places if place is not None), default=None)

    # ---- segments for the head

    def wanted_segments(self, now_ms: int, ahead_ms: int = 0) -> list[SegmentRange]:
        """The segments to load for the head, the earliest first: those that are due, and those that come due within
        `ahead_ms` as far as there is room for them: what is loaded ahead must not drive out what was.
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

    def next_load_ms(self, ahead_ms: int, being_read: Callable[[str, int], bool]) -> int | None:
        """When the next segment of the head is to be loaded: `ahead_ms` before it is due if there is room."""
        room_rows = self.cache.room_rows
        earliest_ms: int | None = None
        for bucket in self.readable:
            following = bucket.head.following if bucket.waiting_rows else None
            if following is None:
                continue
            number, min_ms, rows = following
            # Most buckets come later than one that was looked at, whatever there is room for.
            if earliest_ms is not None and min_ms - ahead_ms >= earliest_ms:
                continue
            if (bucket.name, number) not in self.cache and not being_read(bucket.name, number):
                load_ms = min_ms - (ahead_ms if rows <= room_rows else 0)
                earliest_ms = load_ms if earliest_ms is None else min(earliest_ms, load_ms)
        return earliest_ms

    def load(self, bucket: str, number: int, rows: KeyedRows) -> None:
        """A segment is in memory. The head takes it up at once if it waits for it: a later one may push it out."""
        loaded = self.bucket(bucket)
        if loaded is not None:
            self.cache.put(bucket, number, rows)
            loaded.settle(self.cache)

    def release_segments(self) -> None:
        """The topic is served no longer: none of its segments is in memory."""
        for index in self._by_id.values():
            for name in index.sealed:
                self.cache.discard_bucket(name)

    # ---- seals: all indexes are cut at one slot

    @property
    def has_mutable_rows(self) -> bool:
        return self._counts.has_rows_to_seal

    def wants_seal(self, limits: SealLimits, *, elapsed_ms: int) -> bool:
        """Whether the mutable buckets together are large or old enough. `elapsed_ms`: a clock that never steps."""
        rows, began_ms = self._counts.added_rows, self._counts.first_row_at_ms
        return began_ms is not None and (
            rows >= limits.rows_max
            or rows * ROW_BYTES >= limits.size_max_bytes
            or elapsed_ms - began_ms >= limits.age_max_ms
        )

    def wants_seal_before(self, highest_ledger_id: int, limits: SealLimits) -> bool:
        """PIP-195's rule: enough rows, and rows of a higher ledger come."""
        counts = self._counts
        return counts.added_rows >= limits.rows_min and highest_ledger_id > counts.highest_ledger_id

    def cut(self) -> tuple[tuple[int, IndexCut], ...]:
        """All indexes as they are now, by their ids: for a checkpoint or the progress of a seal."""
        return tuple((number, index.cut()) for number, index in self._by_id.items())

    def begin_seal(self, names: Callable[[int], str], *, now_ms: int) -> list[tuple[int, MutableBucket]]:
        """The mutable buckets that have rows are cut, each as `Index.begin_seal`: (index, bucket).

        `names`: of the object that the bucket of an index becomes.
        """
        return [
            (number, index.begin_seal(names(number), now_ms=now_ms))
            for number, index in self._by_id.items()
            if index.mutable.first_row_at_ms is not None
        ]


_PARTS = 1 << BATCH_BITS


def first_keys(index: Index, ledger_id: U64, entry_id: U64) -> U64:
    """The key that the first part of each entry has; UNKNOWN_KEY where neither it nor its neighbours have a row."""
    keys = index.pages.find(ledger_id, entry_id << np.uint64(BATCH_BITS))
    keys[entry_id > np.uint64(BATCHED_ENTRY_ID_MAX)] = UNKNOWN_KEY
    return keys


def keys_from(first: U64) -> BitMap64:
    """Every key that parts of entries may have, by those of their first ones."""
    keys = BitMap64()
    for key in first[first != UNKNOWN_KEY].tolist():
        keys.add_range(key, key + _PARTS)
    return keys


def keys_of_entries(index: Index, ledger_id: U64, entry_id: U64) -> BitMap64:
    """Every key that a part of the entries may have. `index`: of batch parts."""
    return keys_from(first_keys(index, ledger_id, entry_id))


def first_keys_of(parts: BitMap64) -> U64:
    """The keys of the first parts of the entries that parts are of, each once."""
    return np.unique(first_key_of(keys_of(parts)))


def first_key_of(parts: U64) -> U64:
    """The key of the first part of its entry, for each part by its key."""
    first: U64 = parts & ~np.uint64(BATCH_INDEX_MAX)
    return first


def unpacked(keyed: KeyedRows, indexes: Indexes, subscription_id: int) -> tuple[Rows, U32 | None]:
    """Rows of a subscription's indexes, each with the entry id of its entry: (these, u32[n] of batch indexes; None when
    all rows are entries as a whole).
    """
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
