"""Positions that leave: the index, or the backlog of one subscription; as records for the journal.

Owns: which records say so, and cutting them into slots of bounded size.
Does not own: which positions leave and why (`trimming`, `topic`), and what a record does (`topic`).

Trimming: which positions of an index leave it, or the backlog of one subscription.

Owns: what ledgers and entries a trim names, choosing what is present in portions of bounded work, and whom it leaves.
Does not own: the records that say so (`departures`), when a portion is decided (`daemon.shard.topic_changes`), and
applying them (`topic`).
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

# What one slot may say of positions that leave: applying it, and reading it, is one turn of the event loop.
SLOT_ROWS_MAX = 1_000_000
SLOT_BYTES_MAX = 4 << 20
SLOT_PAGES_MAX = 2_000


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Departure:
    """Positions of one index to leave. `gone`: from the index; `waived`: from the backlog of `subscription_id` alone.
    `rows`: of how many rows that decides. `index_id`: the subscription whose own index it is, 0 for the shared one.

    It stays what it is while its slots are applied one after the other.
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
        """The records, those together that must stand in one slot. Each step is bounded work."""
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
        """The records of all slots, where a slot boundary may stand between any two."""
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


# What is decided, written and applied at a time: in between everybody else has a turn.
PORTION_ROWS = 25_000
PORTION_PAGES = 2_000
# What leaves is looked for in every bucket, page by page: so many looks take some 10 ms.
_BUCKET_PAGES_MAX = 10_000
# Pages of buckets that are looked at before others have their turn: some ms; and before requests of the topic pass,
# whatever was found.
LOOKS_A_TURN = 200
LOOKS_A_PORTION = 20_000
# A portion of dead letters stands in one slot with a column for each of their fields.
DEAD_LETTER_PORTION_ROWS = 10_000

_U64_MAX = (1 << 64) - 1
_PAGE_KEYS = 1 << PAGE_BITS


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LedgerRanges:
    """The entries of ledgers up to the last one of each, itself included; u64[n] each, no ledger twice.

    `all_lower_ledgers`: also every entry of ledgers below the only one.
    """

    ledger_id: U64
    last_entry_id: U64
    all_lower_ledgers: bool = False

    def of_batch_parts(self) -> LedgerRanges:
        """The ranges of the messages of these entries, in an index of batch parts."""
        last = np.minimum(self.last_entry_id, np.uint64(BATCHED_ENTRY_ID_MAX))
        last_part = part_entry_id(last, np.full(len(last), BATCH_INDEX_MAX, np.uint32))
        return dataclasses.replace(self, last_entry_id=last_part)

    def key_ranges(self, pages: PageTable) -> list[KeyRange]:
        """The keys of the ledgers that are named, of the pages that are known."""
        named = zip(self.ledger_id.tolist(), self.last_entry_id.tolist(), strict=True)
        return [keys for ledger_id, last in named for keys in pages.key_ranges(ledger_id, 0, last)]

    def cover(self, first_ledger_id: int, last_ledger_id: int) -> bool:
        """Whether every position of these ledgers is in the ranges."""
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
    """What is present of the ranges, None: of everything, by bucket, damaged ones included; at most `rows_max`
    positions at a time, of few pages, and nothing where much was looked at for it. None: others may have their turn.

    A portion is what is there when it is taken: requests may not pass from the portion before on.
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
    """A portion as it grows: of each bucket the keys that were taken, and how much there is room for."""

    def __init__(self, rows_max: int, pages_max: int) -> None:
        self._rows_max = rows_max
        self._pages_max = pages_max
        self._taken: dict[Bucket, list[U64]] = {}
        self._rows = self._pages = self._looks = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= self._rows_max or self._pages >= self._pages_max or self._looks >= LOOKS_A_PORTION

    def take(self, buckets: Collection[Bucket], first: int, last: int) -> int:
        """Takes the first of the keys of a range within one page, as many as there is room for. Returns the first key
        that was not looked at, which is behind the range where everything was taken.
        """
        room = self._rows_max - self._rows
        found = [(bucket, _members(bucket.present, first, last, room)) for bucket in buckets]
        rows = sum(len(keys) for _, keys in found)
        if rows >= room:
            # A bucket may have more, so that only what comes before the last of every one's is known.
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
        """What was taken; the portion is empty then."""
        parts = [(bucket, bitmap_of(np.concatenate(keys))) for bucket, keys in self._taken.items()]
        self._taken = {}
        self._rows = self._pages = self._looks = 0
        return parts


def _members(present: BitMap64, first: int, last: int, most: int) -> U64:
    """The first of the members of a set in a range. As much work as there are, however large the set is: cutting it
    would copy all of it.
    """
    members = itertools.takewhile(last.__ge__, present.iter_equal_or_larger(first))
    return np.fromiter(itertools.islice(members, most), np.uint64)


def _key_ranges(index: Index, ranges: LedgerRanges | None) -> Iterator[KeyRange]:
    """The keys that ranges name, None: all of them, one range for each page that a bucket holds now."""
    if ranges is not None:
        yield from ranges.key_ranges(index.pages)
        if not ranges.all_lower_ledgers:
            return
    below = None if ranges is None else int(ranges.ledger_id[0])
    for page in index.pages.held_below(below):
        yield page << PAGE_BITS, (page << PAGE_BITS) + _PAGE_KEYS - 1


def stand_ins(index: Index, ranges: LedgerRanges | None) -> list[tuple[BitMap64, int]]:
    """For damaged buckets whose positions nobody knows and that lie in the ranges as a whole: (the positions that stand
    for them, the rows that are missing)."""
    return [
        (bucket.stand_in(), bucket.missing_rows)
        for bucket in index.quarantined.values()
        if not bucket.positions_known
        and (ranges is None or ranges.cover(bucket.live.first_ledger_id, bucket.live.last_ledger_id))
    ]


def split(
    parts: Collection[tuple[Bucket, BitMap64]], subscription_id: int, others: Collection[int]
) -> tuple[BitMap64, BitMap64]:
    """What the subscription is owed of the parts: (what nobody else is owed, what somebody else is owed)."""
    gone, waived = BitMap64(), BitMap64()
    for bucket, keys in parts:
        owed = keys - bucket.acknowledged.get(subscription_id, BitMap64())
        for_nobody = owed
        for other in others:
            for_nobody = for_nobody & bucket.acknowledged.get(other, BitMap64())
        gone |= for_nobody
        waived |= owed - for_nobody
    return gone, waived
