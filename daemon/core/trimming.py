"""Trimming: which positions of an index leave it, or the backlog of one subscription.

Owns: what ledgers and entries a trim names, choosing what is present now, and whom it leaves.
Does not own: the records that say so (`departures`), and applying them (`topic`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np
from pyroaring import BitMap64

from daemon.core.bucket import Bucket
from daemon.core.departures import Departure
from daemon.core.index import Index
from daemon.core.positions import PAGE_BITS, KeyRange, PageTable, within
from storage_backends.formats.index_ids import BATCH_INDEX_MAX, BATCHED_ENTRY_ID_MAX, part_entry_id
from storage_backends.formats.row_columns import U64
from storage_backends.formats.slot_format import GoneReason

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
        """The keys of the pages that are known."""
        ranges = []
        for ledger_id, last_entry_id in zip(self.ledger_id.tolist(), self.last_entry_id.tolist(), strict=True):
            ranges += pages.key_ranges(ledger_id, 0, last_entry_id)
            if self.all_lower_ledgers and ledger_id:
                bases = (ordinal << PAGE_BITS for ordinal in pages.ordinals_of(0, ledger_id - 1))
                ranges += [(base, base + _PAGE_KEYS - 1) for base in bases]
        return ranges

    def cover(self, first_ledger_id: int, last_ledger_id: int) -> bool:
        """Whether every position of these ledgers is in the ranges."""
        entire = {
            ledger_id
            for ledger_id, last in zip(self.ledger_id.tolist(), self.last_entry_id.tolist(), strict=True)
            if last == _U64_MAX
        }
        lowest = int(self.ledger_id[0]) if self.all_lower_ledgers else 0
        first_ledger_id = max(first_ledger_id, lowest)
        return all(ledger_id in entire for ledger_id in _counted(first_ledger_id, last_ledger_id, len(entire)))


def chosen(index: Index, ranges: LedgerRanges | None) -> list[tuple[Bucket, BitMap64]]:
    """What is present of the ranges, or of everything, by bucket; damaged buckets included."""
    every: list[Bucket] = [*index.buckets, *index.quarantined.values()]
    if ranges is None:
        return [(bucket, bucket.present) for bucket in every if bucket.present_rows]
    by_page: dict[int, KeyRange] = {first >> PAGE_BITS: (first, last) for first, last in ranges.key_ranges(index.pages)}
    found = []
    for bucket in every:
        pages = bucket.pages if len(bucket.pages) < len(by_page) else by_page.keys()
        hit = within(bucket.present, [by_page[page] for page in pages if page in by_page])
        if hit:
            found.append((bucket, hit))
    return found


def departure(
    index: Index,
    ranges: LedgerRanges | None,
    subscription_id: int | None,
    others: Collection[int],
    *,
    topic_id: str,
    incarnation: int,
) -> Departure:
    """What is to leave an index: what is present of the ranges, None: everything; of the shared one, for a subscription
    what it is owed. `others`: the other subscriptions.
    """
    if ranges is not None and index.of_batch_parts:
        ranges = ranges.of_batch_parts()
    parts = chosen(index, ranges)
    if subscription_id is None:
        gone, waived = BitMap64.union(BitMap64(), *[keys for _, keys in parts]), BitMap64()
    else:
        gone, waived = split(parts, subscription_id, others)
    rows = len(gone) + len(waived)
    if subscription_id is None or not others:
        for keys, missing_rows in stand_ins(index, ranges):
            gone |= keys
            rows += missing_rows
    return Departure(
        topic_id,
        incarnation,
        index.pages,
        gone,
        GoneReason.TRIMMED,
        waived,
        subscription_id or 0,
        rows,
        index_id=index.index_id,
    )


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


def _counted(first: int, last: int, count_max: int) -> range:
    """first..last, but not longer than one more than a count."""
    return range(first, min(last, first + count_max) + 1)
