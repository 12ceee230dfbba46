"""Chooses what a trim removes from an index or a backlog, and makes the records of departures.

The work is cut into portions, and records into slots, of bounded size. `topic_state` decides whom positions leave and
applies records; `daemon.shard.topic_changes` decides when a portion is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import PAGE_BITS, KeyRange, PageTable, bitmap_of, halves, has_more_pages
from storage_backends.formats.index_ids import BATCH_INDEX_MAX, BATCHED_ENTRY_ID_MAX, part_entry_id
from storage_backends.formats.row_columns import U64
from storage_backends.formats.slot_format import GoneReason, GoneRecord, Record, WaiveRecord, size_max

# Limits on departures in one slot, which is read and applied in one turn of the event loop
SLOT_ROWS_MAX = 1_000_000
SLOT_BYTES_MAX = 4 << 20
SLOT_PAGES_MAX = 2_000


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Departure:
    """Positions of one index to leave: `gone` from the index, `waived` from the backlog of `subscription_id` alone.

    `rows` is the number of rows that this decides. `index_id` is the subscription of a subscription index, 0 for the
    shared one. It stays unchanged while its slots are applied one after the other.
    """

    topic_id: str
    incarnation: int
    pages: PageTable
    gone: BitMap64
    reason: GoneReason
    waived: BitMap64 = dataclasses.field(default_factory=BitMap64)
    subscription_id: int = 0
    rows: int = 0
    index_id: int = 0

    def slots(self) -> Iterator[tuple[Record, ...]]:
        """Yield the records, together those that must stand in one slot. Each step is bounded work."""
        everything = self.gone | self.waived
        left = [everything] if everything else []
        while left:
            part = left.pop()
            too_large = len(part) > SLOT_ROWS_MAX or has_more_pages(part, SLOT_PAGES_MAX)
            records = () if too_large else self._records(part)
            if records and (len(part) == 1 or sum(map(size_max, records)) <= SLOT_BYTES_MAX):
                yield records
            else:
                left += reversed(halves(part))

    def records(self) -> list[Record]:
        """Return the records of all slots; a slot boundary may stand between any two."""
        return [record for records in self.slots() for record in records]

    def _records(self, part: BitMap64) -> tuple[Record, ...]:
        records: list[Record] = []
        waived, gone = self.waived & part, self.gone & part
        if waived:
            positions = self.pages.to_stored(waived)
            records.append(WaiveRecord(self.topic_id, self.incarnation, self.subscription_id, positions))
        if gone:
            positions = self.pages.to_stored(gone)
            records.append(GoneRecord(self.topic_id, self.incarnation, self.index_id, self.reason, positions))
        return tuple(records)


# Limits on what is decided, written and applied at a time, before others have a turn
PORTION_ROWS = 25_000
PORTION_PAGES = 2_000
# Trimmed positions are looked up in every bucket, page by page: this many look-ups take some 10 ms.
_BUCKET_PAGES_MAX = 10_000
# Pages of buckets that are checked before others have a turn (some ms), and before requests of the topic pass, however
# few positions were found
LOOKS_A_TURN = 200
LOOKS_A_PORTION = 20_000
# A portion of dead letters stands in one slot, with a column for each of their fields.
DEAD_LETTER_PORTION_ROWS = 10_000

_U64_MAX = (1 << 64) - 1
_PAGE_KEYS = 1 << PAGE_BITS


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LedgerRanges:
    """The entries of distinct ledgers up to and including the last one of each; u64[n] each.

    `all_lower_ledgers` adds every entry of ledgers below the only one.
    """

    ledger_id: U64
    last_entry_id: U64
    all_lower_ledgers: bool = False

    def of_batch_parts(self) -> LedgerRanges:
        """Return the ranges of the messages of these entries, in an index of batch parts."""
        last = np.minimum(self.last_entry_id, np.uint64(BATCHED_ENTRY_ID_MAX))
        last_part = part_entry_id(last, np.full(len(last), BATCH_INDEX_MAX, np.uint32))
        return dataclasses.replace(self, last_entry_id=last_part)

    def key_ranges(self, pages: PageTable) -> list[KeyRange]:
        """Return the keys of the named ledgers, in known pages."""
        named = zip(self.ledger_id.tolist(), self.last_entry_id.tolist(), strict=True)
        return [keys for ledger_id, last in named for keys in pages.key_ranges(ledger_id, 0, last)]

    def cover(self, first_ledger_id: int, last_ledger_id: int) -> bool:
        """Return whether every position of these ledgers is in the ranges."""
        entire = {
            ledger_id
            for ledger_id, last in zip(self.ledger_id.tolist(), self.last_entry_id.tolist(), strict=True)
            if last == _U64_MAX
        }
        lowest = int(self.ledger_id[0]) if self.all_lower_ledgers else 0
        first_ledger_id = max(first_ledger_id, lowest)
        return all(ledger_id in entire for ledger_id in range(first_ledger_id, last_ledger_id + 1))


Parts = list[tuple[Bucket, BitMap64]]


def portions(index: Index, ranges: LedgerRanges | None, rows_max: int) -> Iterator[Parts | None]:
    """Yield what is present of the ranges (all if None) by bucket, damaged ones included, or None for a turn of others.

    A portion has at most `rows_max` positions of few pages, and may end early if much was checked. It is what exists
    when it is taken: no request may pass between a portion and the next one.
    """
    portion = _Portion(rows_max, pages_max=max(1, min(PORTION_PAGES, _BUCKET_PAGES_MAX // len(index.tracked))))
    looks = 0
    for first, last in _key_ranges(index, ranges):
        while first <= last:
            buckets = [each for each in index.tracked_of_page(first >> PAGE_BITS) if each.present_rows]
            first = portion.take(buckets, first, last)
            looks += len(buckets)
            if portion.is_full:
                yield portion.parts()
            elif looks >= LOOKS_A_TURN:
                looks = 0
                yield None
    if parts := portion.parts():
        yield parts


class _Portion:
    """A portion as it grows: the keys taken from each bucket, and the room that is left."""

    def __init__(self, rows_max: int, pages_max: int) -> None:
        self._rows_max = rows_max
        self._pages_max = pages_max
        self._taken: dict[Bucket, list[U64]] = {}
        self._rows = self._pages = self._looks = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= self._rows_max or self._pages >= self._pages_max or self._looks >= LOOKS_A_PORTION

    def take(self, buckets: Collection[Bucket], first: int, last: int) -> int:
        """Take the first keys of a range within one page, as many as there is room for.

        Returns the first key that was not checked, which is behind the range if everything was taken.
        """
        room = self._rows_max - self._rows
        found = [(bucket, _members(bucket.present, first, last, room)) for bucket in buckets]
        rows = sum(len(keys) for _, keys in found)
        if rows >= room:
            # A bucket may have more, so only what comes before the last key of each is certain.
            last = int(np.partition(np.concatenate([keys for _, keys in found]), room - 1)[room - 1])
            found = [(bucket, keys[: np.searchsorted(keys, np.uint64(last), side="right")]) for bucket, keys in found]
            rows = room
        for bucket, keys in found:
            if len(keys):
                self._taken.setdefault(bucket, []).append(keys)
        self._rows += rows
        self._pages += bool(rows)
        self._looks += len(buckets)
        return last + 1

    def parts(self) -> Parts:
        """Return what was taken and empty the portion."""
        parts = [(bucket, bitmap_of(np.concatenate(keys))) for bucket, keys in self._taken.items()]
        self._taken = {}
        self._rows = self._pages = self._looks = 0
        return parts


def _members(present: BitMap64, first: int, last: int, most: int) -> U64:
    """Return the first members of a set in a range.

    The work is proportional to the members returned, however large the set is: slicing it would copy all of it.
    """
    members = itertools.takewhile(last.__ge__, present.iter_equal_or_larger(first))
    return np.fromiter(itertools.islice(members, most), np.uint64)


def _key_ranges(index: Index, ranges: LedgerRanges | None) -> Iterator[KeyRange]:
    """Yield the keys that ranges name (all if None), one range for each page that a bucket holds now."""
    if ranges is not None:
        yield from ranges.key_ranges(index.pages)
        if not ranges.all_lower_ledgers:
            return
    below = None if ranges is None else int(ranges.ledger_id[0])
    for page in index.pages.held_below(below):
        yield page << PAGE_BITS, (page << PAGE_BITS) + _PAGE_KEYS - 1


def stand_ins(index: Index, ranges: LedgerRanges | None) -> list[tuple[BitMap64, int]]:
    """Return (positions that stand for the missing ones, number of missing rows) of damaged buckets.

    Only for buckets whose positions are unknown and that lie within the ranges as a whole.
    """
    return [
        (bucket.stand_in(), bucket.missing_rows)
        for bucket in index.quarantined.values()
        if not bucket.positions_known
        and (ranges is None or ranges.cover(bucket.live.first_ledger_id, bucket.live.last_ledger_id))
    ]


def split(
    parts: Collection[tuple[Bucket, BitMap64]], subscription_id: int, others: Collection[int]
) -> tuple[BitMap64, BitMap64]:
    """Return (positions owed to the subscription alone, positions owed to others, too)."""
    gone, waived = BitMap64(), BitMap64()
    for bucket, keys in parts:
        owed = keys - bucket.acknowledged.get(subscription_id, BitMap64())
        for_nobody = owed
        for other in others:
            for_nobody = for_nobody & bucket.acknowledged.get(other, BitMap64())
        gone |= for_nobody
        waived |= owed - for_nobody
    return gone, waived
