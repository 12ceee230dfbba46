"""Finds what a topic needs of its log: for each ledger the lowest entry that has a row.

All buckets of a page are checked in one turn. So a row that moves between buckets while others have their turn, by a
seal, a merge or a reschedule, is found in one or the other. `daemon.topic.served_topic` decides how fresh an answer
must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence

import numpy as np

from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import PAGE_BITS
from storage_backends.formats.index_ids import BATCH_BITS
from storage_backends.formats.row_columns import U64

_BEYOND = 1 << 64
# Pages of buckets that are checked before others have a turn
LOOKS_A_TURN = 1_000


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Retained:
    """Ledgers that have rows, ascending, and the lowest entry of each that has one; u64[n] each.

    `is_complete` is whether there are no further ones.
    """

    ledger_id: U64
    lowest_entry_id: U64
    is_complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RetentionScan:
    """A topic's needs: `lowest` (ledger, entry) and the number of `ledgers` with rows.

    No row is at a lower position, not even one that was lost with a damaged bucket. `lowest` is None if there is no
    row.
    """

    lowest: tuple[int, int] | None
    ledgers: int


def uncertain(indexes: Indexes) -> list[tuple[int, int]]:
    """Return the first and last ledger of each damaged bucket with missing rows, ascending, without repeats."""
    return sorted({(needed.first_ledger_id, needed.last_ledger_id) for needed in indexes.rebuild_needed()})


def pages_of_ledgers(indexes: Indexes, ledger_ids: Iterable[int]) -> list[int]:
    """Return the pages of ledgers in all indexes, by ledger and page, as `retained` takes them."""
    return [
        first >> PAGE_BITS
        for ledger_id in sorted(ledger_ids)
        for index in indexes.values()
        for first, _ in index.pages.key_ranges(ledger_id, 0, (1 << 64) - 1)
    ]


def retained(indexes: Indexes, pages: Sequence[int], ledgers_max: int) -> Generator[None, None, Retained]:
    """Find the lowest rows of ledgers in pages, for at most `ledgers_max` ledgers.

    `pages` are ordinals in the order of ledgers; those of one index and ledger are in the order of pages. Others may
    have a turn at each step.
    """
    found: dict[int, int] = {}
    # Indexes whose lowest row of the ledger is known
    known: set[int] = set()
    ledger_id, looks = -1, 0
    for page in pages:
        page_ledger_id, _ = indexes.places.page_of(page)
        if page_ledger_id != ledger_id:
            if len(found) == ledgers_max:
                return _retained(found, is_complete=False)
            ledger_id = page_ledger_id
            known.clear()
        index = _holding(indexes, page)
        if index is None or index.index_id in known:
            continue
        entry_id, page_looks = _lowest(index, page)
        looks += page_looks
        if entry_id is not None:
            known.add(index.index_id)
            found[ledger_id] = min(entry_id, found.get(ledger_id, entry_id))
        if looks >= LOOKS_A_TURN:
            looks = 0
            yield
    return _retained(found, is_complete=True)


def surveyed(indexes: Indexes) -> Generator[None, None, RetentionScan]:
    """Scan the whole topic; others may have a turn at each step."""
    ledgers: set[int] = set()
    looks = 0
    for page in range(len(indexes.places)):
        ledger_id, _ = indexes.places.page_of(page)
        index = _holding(indexes, page)
        if index is not None and ledger_id not in ledgers:
            buckets = index.that_may_have_page(page)
            looks += len(buckets)
            if any(_first_from(bucket, page << PAGE_BITS) < (page + 1) << PAGE_BITS for bucket in buckets):
                ledgers.add(ledger_id)
        looks += 1
        if looks >= LOOKS_A_TURN:
            looks = 0
            yield
    lowest = [(first, 0) for first, _ in uncertain(indexes)]
    if ledgers:
        # Rows of it may have left in between.
        found = yield from retained(indexes, pages_of_ledgers(indexes, [min(ledgers)]), 1)
        entry_id = int(found.lowest_entry_id[0]) if len(found.lowest_entry_id) else 0
        lowest.append((min(ledgers), entry_id))
    return RetentionScan(min(lowest, default=None), len(ledgers))


def _holding(indexes: Indexes, page: int) -> Index | None:
    """Return the index of a page, or None if no bucket holds the page any longer."""
    index = indexes.get(indexes.places.owner_of(page))
    return index if index is not None and index.pages.is_held(page) else None


def _lowest(index: Index, page: int) -> tuple[int | None, int]:
    """Return (the lowest entry of a page with a row, or None; the number of buckets checked)."""
    buckets = index.that_may_have_page(page)
    lowest = min(_first_from(bucket, page << PAGE_BITS) for bucket in buckets)
    if lowest >= (page + 1) << PAGE_BITS:
        return None, len(buckets)
    _, entry_id = index.pages.positions(np.array([lowest], np.uint64))
    return int(entry_id[0]) >> (BATCH_BITS if index.of_batch_parts else 0), len(buckets)


def _first_from(bucket: Bucket, key: int) -> int:
    """Return the first present position of a bucket from a key on, or `_BEYOND`."""
    try:
        first: int = bucket.present.next_set_bit(key)
    except ValueError:
        return _BEYOND
    return first


def _retained(found: dict[int, int], *, is_complete: bool) -> Retained:
    ledger_id = np.fromiter(found.keys(), np.uint64, len(found))
    return Retained(ledger_id, np.fromiter(found.values(), np.uint64, len(found)), is_complete)
