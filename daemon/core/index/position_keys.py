"""Maps positions to 64-bit keys, and sets of positions to Roaring bitmaps of keys.

A table gives every page of an index (2^32 entry ids of one ledger) an ordinal. A position's key is that ordinal above
the low 32 bits of its entry id, so one bitmap and one array hold positions of any ledger. A position that is in two
indexes of a topic has two keys. Keys live in memory only and mean nothing in another topic. Their order is not the
order of positions. Stored forms are in `storage_backends.formats`.

Keys live in memory only and mean nothing in another topic. Their order is not the order of positions.

Finding rows of a growing column of keys.

Owns: the order of the keys, made when it is first asked for and kept up with the column.
Does not own: the columns (`mutable_bucket`).

The order of positions, messages of batches beside their entries.

Owns: comparing rows of all of a topic's indexes by position.
Does not own: what the order is good for (`key_share`).

A message log may have a ledger for each message, so no page is an object: a hash table that is one column finds
ordinals, a bucket has its pages as a bitmap, and a page lives while a bucket holds it. A row in a ledger of its own
costs one container of a bitmap, some 90 bytes. With pages as objects it took 706 bytes instead of 190 to 230, and three
times the CPU.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from daemon.errors import Corruption, InvariantViolated
from storage_backends.formats.index_ids import are_of_batch_parts, of_part
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.row_columns import U32, U64, Index, Rows

PAGE_BITS = 32
_LOW = (1 << PAGE_BITS) - 1
LOW_MASK = np.uint64(_LOW)
_SHIFT = np.uint64(PAGE_BITS)
# A key that no table assigns, for look-ups of unknown positions
_UNKNOWN = (1 << 64) - 1
UNKNOWN_KEY = np.uint64(_UNKNOWN)
_HEADER = struct.Struct("<Q")
_PAGE_HEADER = struct.Struct("<I")
# From this many unordered keys on, sorting them first makes the set faster.
_SORTED_FIRST = 20000
# Up to this many keys plain Python is faster than columns: for pages and sets, and for look-ups in a set
FEW = 16
_LOOKED_UP = 64
# The first and the last key, both included
KeyRange = tuple[int, int]
# Returns the ordinal of a page, given by ledger id and number, or None.
OrdinalOf = Callable[[int, int], int | None]
Ordinals = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# The portable Roaring form: the mark of a bitmap that has run containers; below this many containers such a bitmap
# carries no offsets; a container is never larger than a plain bit set.
_COOKIE_WITH_RUNS = 12347
_COOKIE_WITHOUT_RUNS = 12346
# Cookie, number of containers, key of the first one and its rows minus one; its offset follows.
_ONE_CONTAINER = struct.Struct("<II2xH")
_ONE_CONTAINER_BYTES = 16
_CONTAINERS_WITHOUT_OFFSETS = 4
_BITSET_BYTES = 8192
# Pages that are searched at once
_PAGES_A_STEP = 1 << 16
# With fewer rows a page, the pages of a set are found in the column of its keys.
_ROWS_A_PAGE = 64
# Odd factors with irregular bits, for a hash whose highest bits are used
_LEDGER_FACTOR, _PAGE_FACTOR = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
_HASH_BITS = 64
_HASH_MASK = (1 << _HASH_BITS) - 1
# Places of a `_PageIndex`: a free one, and one whose page was removed
_FREE, _LEFT = 0, (1 << PAGE_BITS) - 1
# A table may have this many places for each value; beyond that sorting is cheaper.
_TABLE_SPAN_PER_VALUE = 16


def bitmap_of(keys: U64) -> BitMap64:
    """Return the set of the keys. (Passing a numpy array to pyroaring is several times slower.)"""
    rows = len(keys)
    if rows <= FEW:
        return BitMap64(keys.tolist())
    if int(keys[-1]) - int(keys[0]) == rows - 1 and bool((keys[1:] > keys[:-1]).all()):
        # Entries without gaps, as a broker writes them
        unbroken = BitMap64()
        unbroken.add_range(int(keys[0]), int(keys[-1]) + 1)
        return unbroken
    if rows > _SORTED_FIRST and (keys[1:] < keys[:-1]).any():
        keys = np.sort(keys)
    return BitMap64(array.array("Q", np.ascontiguousarray(keys).tobytes()))


def keys_of(bitmap: BitMap64) -> U64:
    """Return the keys of the set, ascending."""
    return np.frombuffer(bitmap.to_array(), np.uint64) if bitmap else np.empty(0, np.uint64)


def within(bitmap: BitMap64, ranges: Iterable[KeyRange]) -> BitMap64:
    """Return the members of the set that lie in one of the ranges.

    The work grows with the number of ranges and the size of the set. Keys between the ranges are removed instead of
    adding those within: adding a whole page takes 65,536 containers, and with many pages ranks and counts visit each
    container.
    """
    found = bitmap.copy()
    if not found:
        return found
    kept_to = found.min()
    for first, last in sorted(ranges):
        if kept_to < first:
            found.remove_range(kept_to, first)
        kept_to = max(kept_to, last + 1)
    found.remove_range(kept_to, bitmap.max() + 1)
    return found


def halves(bitmap: BitMap64) -> tuple[BitMap64, BitMap64]:
    """Split a set of at least two members into two of about one size, the lower keys first."""
    first, middle, last = bitmap.min(), bitmap[len(bitmap) // 2], bitmap.max()
    return within(bitmap, [(first, middle - 1)]), within(bitmap, [(middle, last)])


def contained(keys: U64, bitmap: BitMap64) -> npt.NDArray[np.bool_]:
    """Return the mask of keys that are in the set."""
    if len(keys) <= _LOOKED_UP:
        return np.array([key in bitmap for key in keys.tolist()], np.bool_)
    hits = keys_of(bitmap_of(keys) & bitmap)
    if not len(hits):
        return np.zeros(len(keys), np.bool_)
    places = np.searchsorted(hits, keys)
    places[places == len(hits)] = 0
    return np.equal(hits[places], keys)


def firsts(keys: U64) -> npt.NDArray[np.intp]:
    """Return the places of the first occurrence of each key, ascending."""
    if len(keys) <= 1:
        return np.arange(len(keys))
    return np.sort(np.unique(keys, return_index=True)[1])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class KeyedRows:
    """Rows with the keys of their positions, u64[n].

    `redelivery_count` is u32[n], how often each was negatively acknowledged; None if none was, or if it does not
    matter.
    """

    rows: Rows
    keys: U64
    redelivery_count: U32 | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def key_hash(self) -> U32:
        """Return the key hashes, u32[n], 0 for a row without one."""
        return np.zeros(len(self), np.uint32) if self.rows.key_hash is None else self.rows.key_hash

    def take(self, index: Index) -> KeyedRows:
        counts = None if self.redelivery_count is None else self.redelivery_count[index]
        return KeyedRows(self.rows.take(index), self.keys[index], counts)

    def compact(self) -> KeyedRows:
        """Return the same rows, to keep: other ids that came with theirs can be freed."""
        ids = self.rows.schedule_ids
        kept = None if ids is None else ids.compact()
        return (
            self if kept is ids else dataclasses.replace(self, rows=dataclasses.replace(self.rows, schedule_ids=kept))
        )

    def counts(self) -> U32:
        """Return the redelivery counts, u32[n]."""
        return np.zeros(len(self), np.uint32) if self.redelivery_count is None else self.redelivery_count

    @staticmethod
    def concat(parts: Sequence[KeyedRows]) -> KeyedRows:
        if len(parts) != 1:
            parts = [part for part in parts if len(part)]
        if len(parts) == 1:
            return parts[0]
        keys = np.concatenate([part.keys for part in parts]) if parts else np.empty(0, np.uint64)
        counts = None
        if any(part.redelivery_count is not None for part in parts):
            counts = np.concatenate([part.counts() for part in parts])
        return KeyedRows(Rows.concat([part.rows for part in parts]), keys, counts)

    @staticmethod
    def empty() -> KeyedRows:
        return _NO_ROWS


_NO_ROWS = KeyedRows(Rows.empty(), np.empty(0, np.uint64))


class PagePlaces:
    """The page of every ordinal, over the page tables of one topic: their keys never collide.

    An ordinal of which anything was kept is never assigned twice. `len` is the number of assigned ones. Look-ups may
    run in another thread beside an `add`.
    """

    def __init__(self) -> None:
        self._ledgers = np.zeros(16, np.uint64)
        self._pages = np.zeros(16, np.uint64)
        # The owner of the table: a subscription for its index, 0 for the shared one
        self._owners = np.zeros(16, np.uint64)
        # Number of buckets and decisions that hold the page
        self._holders = np.zeros(16, np.uint32)
        self._next = 0

    def __len__(self) -> int:
        return self._next

    def add(self, ledger_id: int, page: int, owner: int) -> int:
        """Assign an ordinal to a page that is new in its table."""
        ordinal = self._next
        self._next += 1
        if ordinal == len(self._ledgers):
            self._grow()
        self._ledgers[ordinal], self._pages[ordinal], self._owners[ordinal] = ledger_id, page, owner
        return ordinal

    def add_all(self, ledger_id: U64, page: U64, owner: int) -> Ordinals:
        """Assign ordinals to pages that are new in their table."""
        first = self._next
        self._next += len(ledger_id)
        if self._next > len(self._ledgers):
            self._grow()
        added = slice(first, self._next)
        self._ledgers[added], self._pages[added], self._owners[added] = ledger_id, page, owner
        return np.arange(first, self._next)

    def _grow(self) -> None:
        more = (1 << (self._next - 1).bit_length()) - len(self._ledgers)
        self._ledgers = np.concatenate([self._ledgers, np.zeros(more, np.uint64)])
        self._pages = np.concatenate([self._pages, np.zeros(more, np.uint64)])
        self._owners = np.concatenate([self._owners, np.zeros(more, np.uint64)])
        self._holders = np.concatenate([self._holders, np.zeros(more, np.uint32)])

    def take_back(self, ordinals: BitMap) -> None:
        """Take back the last ordinals assigned in this turn, if nothing was kept of them."""
        while self._next and self._next - 1 in ordinals:
            self._next -= 1

    def positions(self, keys: U64) -> tuple[U64, U64]:
        """Return (ledger_id, entry_id) of keys."""
        ordinals = (keys >> _SHIFT).astype(np.int64)
        return self._ledgers[ordinals], (self._pages[ordinals] << _SHIFT) | (keys & LOW_MASK)

    def owners(self, keys: U64) -> U64:
        """Return the owners of the keys' tables."""
        return self.owners_of((keys >> _SHIFT).astype(np.int64))

    def owners_of(self, ordinals: Ordinals) -> U64:
        """Return the owners of the pages' tables."""
        return self._owners[ordinals]

    def page_of(self, ordinal: int) -> tuple[int, int]:
        """Return (ledger id, page) of an ordinal."""
        return int(self._ledgers[ordinal]), int(self._pages[ordinal])

    def pages_of(self, ordinals: Ordinals) -> tuple[U64, U64]:
        """Return (ledger ids, pages) of ordinals."""
        return self._ledgers[ordinals], self._pages[ordinals]

    def hold(self, ordinals: BitMap) -> None:
        self._holders[ordinals_of(ordinals)] += np.uint32(1)

    def let_go(self, ordinals: BitMap) -> Ordinals:
        """Release each page once; return those no longer held. Raise InvariantViolated if one was not held."""
        listed = ordinals_of(ordinals)
        holders = self._holders[listed]
        if not holders.all():
            raise InvariantViolated("a page is let go that is not held")
        self._holders[listed] = holders - np.uint32(1)
        free: Ordinals = listed[holders == 1]
        return free

    def unheld(self, ordinals: BitMap) -> Ordinals:
        """Return the pages that nothing holds."""
        listed = ordinals_of(ordinals)
        unheld: Ordinals = listed[self._holders[listed] == 0]
        return unheld

    def is_held(self, ordinal: int) -> bool:
        return bool(self._holders[ordinal])

    def ledgers(self, ordinals: npt.NDArray[np.int64]) -> U64:
        return self._ledgers[ordinals]

    def owner_of(self, ordinal: int) -> int:
        """Return the owner of a page's table."""
        return int(self._owners[ordinal])

    def of_owner(self, owner: int, first: int, end: int, below_ledger_id: int | None) -> list[int]:
        """Return an owner's ordinals in `first`..`end` (exclusive), of ledgers below one or of all if None."""
        chosen = self._owners[first:end] == np.uint64(owner)
        if below_ledger_id is not None:
            chosen &= self._ledgers[first:end] < np.uint64(below_ledger_id)
        ordinals: list[int] = (np.flatnonzero(chosen) + first).tolist()
        return ordinals

    def in_order(self, pages: int, after_ledger_id: int | None) -> npt.NDArray[np.int64]:
        """Return the first `pages` ordinals, of ledgers after one, sorted by ledger and page.

        O(pages). It may run in another thread if `pages` was read in this one.
        """
        ledgers = self._ledgers[:pages]
        first = np.uint64(0 if after_ledger_id is None else after_ledger_id + 1)
        chosen = np.flatnonzero(ledgers >= first)
        order = np.lexsort((self._pages[chosen], ledgers[chosen]))
        return chosen[order]


class _PageIndex:
    """The ordinals by page: an open-addressing hash table in one column, with ordinal + 1 at each place.

    A topic may have a ledger for each row, so a page must not need any other object. The page of an ordinal is in
    `places`. Look-ups may run in another thread beside changes: a page that is known all the while is found.
    """

    def __init__(self, places: PagePlaces) -> None:
        self._places = places
        self._table = _HashTable.of_size(16)
        self._used = 0
        self._known = 0

    def __len__(self) -> int:
        return self._known

    def ordinals(self) -> Ordinals:
        """Return the ordinals of all pages, in no order."""
        slots = self._table.slots
        known: U32 = slots[(slots != _FREE) & (slots != _LEFT)]
        return known.astype(np.int64) - 1

    def find(self, ledger_id: int, page: int) -> int | None:
        slots, mask, shift = self._table
        places = self._places
        place = (ledger_id * _LEDGER_FACTOR + page * _PAGE_FACTOR & _HASH_MASK) >> shift
        while (held := slots.item(place)) != _FREE:
            if held != _LEFT and int(places._ledgers[held - 1]) == ledger_id and int(places._pages[held - 1]) == page:
                return held - 1
            place = place + 1 & mask
        return None

    def find_all(self, ledger_id: U64, page: U64) -> Ordinals:
        """Return the ordinal of each page, -1 if it is unknown."""
        return self._find(ledger_id, page)[0]

    def _find(self, ledger_id: U64, page: U64) -> tuple[Ordinals, Ordinals]:
        """Return (ordinal of each page, its place in the table), -1 if it is unknown."""
        table = self._table
        found = np.full((2, len(ledger_id)), -1)
        place = table.first_places(ledger_id, page)
        asked = np.arange(len(ledger_id))
        while len(asked):
            held = table.slots[place]
            taken = held != _FREE
            asked, place, held = asked[taken], place[taken], held[taken]
            ordinal = np.where(held == _LEFT, 0, held.astype(np.int64) - 1)
            of_ledger, of_page = self._places.pages_of(ordinal)
            same = (of_ledger == ledger_id[asked]) & (of_page == page[asked]) & (held != _LEFT)
            found[:, asked[same]] = ordinal[same], place[same]
            asked, place = asked[~same], place[~same] + 1 & table.mask
        return found[0], found[1]

    def add(self, ledger_id: int, page: int, ordinal: int) -> None:
        """Add a page that is unknown."""
        self._make_room(1)
        slots, mask, shift = self._table
        place = (ledger_id * _LEDGER_FACTOR + page * _PAGE_FACTOR & _HASH_MASK) >> shift
        while slots.item(place) != _FREE:
            place = place + 1 & mask
        slots[place] = ordinal + 1

    def add_all(self, ordinals: Ordinals) -> None:
        """Add distinct pages that are unknown."""
        self._make_room(len(ordinals))
        self._table.put(ordinals, *self._places.pages_of(ordinals))

    def remove(self, ordinals: Ordinals) -> None:
        """Forget pages. Raise InvariantViolated if one is unknown."""
        found, place = self._find(*self._places.pages_of(ordinals))
        if not np.array_equal(found, ordinals):
            raise InvariantViolated("a page is forgotten that is not known")
        self._table.slots[place] = _LEFT
        self._known -= len(ordinals)

    def _make_room(self, pages: int) -> None:
        """Keep half of the places free, so that few steps lead to a page."""
        if 2 * (self._used + pages) > self._table.mask:
            known = self.ordinals()
            table = _HashTable.of_size(1 << (4 * (self._known + pages) - 1).bit_length())
            table.put(known, *self._places.pages_of(known))
            self._table, self._used = table, self._known
        self._used += pages
        self._known += pages


class _HashTable(NamedTuple):
    """The places of a `_PageIndex`, a power of two.

    The highest bits of a hash, after `shift`, are the first place tried.
    """

    slots: U32
    mask: int
    shift: int

    @staticmethod
    def of_size(places: int) -> _HashTable:
        return _HashTable(np.zeros(places, np.uint32), places - 1, _HASH_BITS - (places - 1).bit_length())

    def first_places(self, ledger_id: U64, page: U64) -> Ordinals:
        hashes = ledger_id * np.uint64(_LEDGER_FACTOR) + page * np.uint64(_PAGE_FACTOR)
        return (hashes >> np.uint64(self.shift)).astype(np.int64)

    def put(self, ordinals: Ordinals, ledger_id: U64, page: U64) -> None:
        """Put unknown pages at the first free places on their way."""
        place = self.first_places(ledger_id, page)
        while len(ordinals):
            free = np.flatnonzero(self.slots[place] == _FREE)
            # One of the pages that want the same place gets it.
            chosen = free[np.unique(place[free], return_index=True)[1]]
            self.slots[place[chosen]] = (ordinals[chosen] + 1).astype(np.uint32)
            others = np.ones(len(ordinals), np.bool_)
            others[chosen] = False
            ordinals, place = ordinals[others], place[others] + 1 & self.mask


class PageTable:
    """The pages of one index and their ordinals.

    A page stays while a bucket holds it (`hold`, `release`); look-ups may run in another thread beside an `intern`.
    `places` is shared by the tables of one topic. `owner` is the subscription of a subscription index, 0 for the shared
    one.
    """

    def __init__(self, places: PagePlaces | None = None, *, owner: int = 0) -> None:
        self.places = PagePlaces() if places is None else places
        self._owner = owner
        self._index = _PageIndex(self.places)
        # Ledger -> its pages beyond the first, ascending; few ledgers have any.
        self._further_pages: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._index)

    def find(self, ledger_id: U64, entry_id: U64) -> U64:
        """Return the keys of positions, UNKNOWN_KEY for those whose page no bucket holds."""
        if len(ledger_id) > FEW:
            return self._keys(ledger_id, entry_id, self._index.find, self._index.find_all)
        few = []
        for ledger, entry in zip(ledger_id.tolist(), entry_id.tolist(), strict=True):
            ordinal = self._index.find(ledger, entry >> PAGE_BITS)
            few.append(_UNKNOWN if ordinal is None else ordinal << PAGE_BITS | entry & _LOW)
        return np.array(few, np.uint64)

    def intern(self, ledger_id: U64, entry_id: U64) -> U64:
        """Return the keys of positions; give new pages an ordinal."""
        if len(ledger_id) > FEW:
            return self._keys(ledger_id, entry_id, self._ordinal, self._ordinals)
        few = []
        for ledger, entry in zip(ledger_id.tolist(), entry_id.tolist(), strict=True):
            few.append(self._ordinal(ledger, entry >> PAGE_BITS) << PAGE_BITS | entry & _LOW)
        return np.array(few, np.uint64)

    def keyed(self, rows: Rows) -> KeyedRows:
        """Rows of pages that are known, with their keys."""
        return KeyedRows(rows, self.find(rows.ledger_id, rows.entry_id))

    def positions(self, keys: U64) -> tuple[U64, U64]:
        """Return (ledger_id, entry_id) of keys of any of the topic's tables."""
        return self.places.positions(keys)

    def hold(self, ordinals: BitMap) -> None:
        self.places.hold(ordinals)

    def release(self, ordinals: BitMap) -> None:
        """Release pages of a dropped bucket and forget those no longer held.

        Raise InvariantViolated if one was not held.
        """
        self._forget(self.places.let_go(ordinals))

    def forget_unheld(self, ordinals: BitMap) -> None:
        """Forget pages that a look-up interned and no bucket holds."""
        self._forget(self.places.unheld(ordinals))

    def undo(self, ordinals: BitMap) -> None:
        """Forget unheld pages that were interned in this turn, and return their ordinals.

        So nothing grows if nothing is kept.
        """
        unheld = self.places.unheld(ordinals)
        if len(unheld):
            self._forget(unheld)
            self.places.take_back(BitMap(unheld.tolist()))

    def _forget(self, ordinals: Ordinals) -> None:
        if not len(ordinals):
            return
        self._index.remove(ordinals)
        ledgers, pages = self.places.pages_of(ordinals)
        if not pages.any():
            return
        for ledger_id, page in zip(ledgers.tolist(), pages.tolist(), strict=True):
            if page:
                further = self._further_pages[ledger_id]
                del further[bisect.bisect_left(further, page)]
                if not further:
                    del self._further_pages[ledger_id]

    def key_ranges(self, ledger_id: int, first_entry_id: int, last_entry_id: int) -> list[KeyRange]:
        """Return the keys of a range of entries, both ends included, ascending: one range for each known page."""
        first_page, last_page = first_entry_id >> PAGE_BITS, last_entry_id >> PAGE_BITS
        pages = [] if first_page else [0]
        if last_page:
            further = self._further_pages.get(ledger_id, [])
            pages += further[bisect.bisect_left(further, first_page) : bisect.bisect_right(further, last_page)]
        ranges = []
        for page in pages:
            ordinal = self._index.find(ledger_id, page)
            if ordinal is not None:
                base = ordinal << PAGE_BITS
                first = first_entry_id & _LOW if page == first_page else 0
                last = last_entry_id & _LOW if page == last_page else _LOW
                ranges.append((base | first, base | last))
        return ranges

    def held_below(self, ledger_id: int | None) -> Iterator[int]:
        """Yield ordinals of pages of lower ledgers (all if None) that are known now.

        Pages that no bucket holds any longer when their turn comes are left out.
        """
        pages = len(self.places)
        for first in range(0, pages, _PAGES_A_STEP):
            for ordinal in self.places.of_owner(self._owner, first, min(first + _PAGES_A_STEP, pages), ledger_id):
                if self.places.is_held(ordinal):
                    yield ordinal

    def ledger_of(self, ordinal: int) -> int:
        return self.places.page_of(ordinal)[0]

    def is_held(self, ordinal: int) -> bool:
        """Return whether a bucket holds the page."""
        return self.places.is_held(ordinal)

    def _keys(
        self,
        ledger_id: U64,
        entry_id: U64,
        ordinal_of: OrdinalOf,
        ordinals_of: Callable[[U64, U64], Ordinals],
    ) -> U64:
        """`ordinals_of`: as `ordinal_of`, of columns of different pages; -1 where a page has none."""
        page = entry_id >> _SHIFT
        low = entry_id & LOW_MASK
        if (ledger_id == ledger_id[0]).all() and (page == page[0]).all():
            ordinal = ordinal_of(int(ledger_id[0]), int(page[0]))
            if ordinal is None:
                return np.full(len(ledger_id), UNKNOWN_KEY)
            return low | np.uint64(ordinal << PAGE_BITS)
        *distinct, inverse = _distinct_pages(ledger_id, page)
        ordinals = ordinals_of(*distinct)
        keys = (ordinals.astype(np.uint64) << _SHIFT)[inverse] | low
        if (ordinals < 0).any():
            keys[(ordinals < 0)[inverse]] = UNKNOWN_KEY
        return keys

    def _ordinal(self, ledger_id: int, page: int) -> int:
        ordinal = self._index.find(ledger_id, page)
        if ordinal is None:
            ordinal = self.places.add(ledger_id, page, self._owner)
            self._index.add(ledger_id, page, ordinal)
            if page:
                self._note_further(ledger_id, page)
        return ordinal

    def _ordinals(self, ledger_id: U64, page: U64) -> Ordinals:
        """Return the ordinals of distinct pages; new pages get one."""
        ordinals = self._index.find_all(ledger_id, page)
        new = np.flatnonzero(ordinals < 0)
        if len(new):
            ordinals[new] = self.places.add_all(ledger_id[new], page[new], self._owner)
            self._index.add_all(ordinals[new])
            for each in new[page[new] != 0].tolist():
                self._note_further(int(ledger_id[each]), int(page[each]))
        return ordinals

    def _note_further(self, ledger_id: int, page: int) -> None:
        bisect.insort(self._further_pages.setdefault(ledger_id, []), page)

    def to_stored(self, bitmap: BitMap64) -> tuple[PositionBitmap, ...]:
        """Return a set of this table's keys in stored form, a 32-bit bitmap for each page.

        It may run in another thread.
        """
        compact = bitmap.copy()
        compact.run_optimize()
        data = memoryview(compact.serialize())
        (pages,) = _HEADER.unpack_from(data)
        offset = _HEADER.size
        stored = []
        for _ in range(pages):
            (ordinal,) = _PAGE_HEADER.unpack_from(data, offset)
            offset += _PAGE_HEADER.size
            length = _portable_length(data[offset:])
            entries = bytes(data[offset : offset + length])
            offset += length
            stored.append(PositionBitmap(*self.places.page_of(ordinal), entries))
        return tuple(sorted(stored, key=lambda part: (part.ledger_id, part.page)))

    def from_stored(self, stored: Iterable[PositionBitmap]) -> BitMap64:
        """Return a stored set as keys of this table, interning its pages. The bitmaps are not expanded."""
        return _joined({self._ordinal(part.ledger_id, part.page): part.entries for part in stored})

    def intern_stored(self, stored: Iterable[PositionBitmap]) -> BitMap:
        """Return the ordinals of the pages of a stored set; new pages get one."""
        return BitMap([self._ordinal(part.ledger_id, part.page) for part in stored])

    def find_stored(self, stored: Iterable[PositionBitmap]) -> BitMap64:
        """Return the stored sets as keys of this table, without the pages that no bucket holds."""
        pages: dict[int, bytes] = {}
        for part in stored:
            ordinal = self._index.find(part.ledger_id, part.page)
            if ordinal is not None:
                pages[ordinal] = part.entries
        return _joined(pages)


def _joined(pages: Mapping[int, bytes]) -> BitMap64:
    """Join serialized 32-bit bitmaps, given by the ordinals of their pages, into one set of keys.

    Raises Corruption if one of them is no bitmap.
    """
    if not pages:
        return BitMap64()
    body = b"".join(_PAGE_HEADER.pack(ordinal) + pages[ordinal] for ordinal in sorted(pages))
    try:
        joined = BitMap64.deserialize(_HEADER.pack(len(pages)) + body)
    except (ValueError, IndexError) as error:
        raise Corruption(f"the bitmaps of {len(pages)} pages: {error}") from error
    return joined


def ordinals_of(pages: BitMap) -> Ordinals:
    """Return the ordinals of the set, ascending."""
    return np.array(pages.to_array(), np.int64)


def pages_of(bitmap: BitMap64) -> BitMap:
    """Return the ordinals of the pages that the set touches; one step a page if pages have many rows."""
    if not bitmap:
        return BitMap()
    first = bitmap.min() >> PAGE_BITS
    if bitmap.max() >> PAGE_BITS == first:
        return BitMap([first])
    rows = len(bitmap)
    pages = list(itertools.islice(_each_page(bitmap), rows // _ROWS_A_PAGE + 1))
    if len(pages) <= rows // _ROWS_A_PAGE:
        return BitMap(pages)
    ordinals = (keys_of(bitmap) >> _SHIFT).astype(np.uint32)
    is_new = np.ones(rows, np.bool_)
    np.not_equal(ordinals[1:], ordinals[:-1], out=is_new[1:])
    return BitMap(array.array("I", ordinals[is_new].tobytes()))


def has_more_pages(bitmap: BitMap64, pages_max: int) -> bool:
    """Return whether the set touches more than `pages_max` pages, in at most as many steps."""
    return next(itertools.islice(_each_page(bitmap), pages_max, None), None) is not None


def _each_page(bitmap: BitMap64) -> Iterator[int]:
    if not bitmap:
        return
    key = bitmap.min()
    while True:
        ordinal = key >> PAGE_BITS
        yield ordinal
        try:
            key = bitmap.next_set_bit((ordinal + 1) << PAGE_BITS)
        except ValueError:
            return


def _portable_length(data: memoryview) -> int:
    """Return the length of the portable 32-bit Roaring bitmap at the start of `data` (bytes).

    See the Roaring format specification.
    """
    cookie: int
    containers: int
    last_row: int
    last_offset: int
    if len(data) >= _ONE_CONTAINER.size:
        # Few entries make one container without runs: this covers most bitmaps if there are many.
        cookie, containers, last_row = _ONE_CONTAINER.unpack_from(data)
        if cookie == _COOKIE_WITHOUT_RUNS and containers == 1:
            return _ONE_CONTAINER_BYTES + min(2 * (last_row + 1), _BITSET_BYTES)
    (cookie,) = struct.unpack_from("<I", data)
    if cookie & 0xFFFF == _COOKIE_WITH_RUNS:
        containers = (cookie >> 16) + 1
        offset = 4 + (containers + 7) // 8
        is_run = [bool(data[4 + number // 8] >> (number % 8) & 1) for number in range(containers)]
        has_offsets = containers >= _CONTAINERS_WITHOUT_OFFSETS
    else:
        (containers,) = struct.unpack_from("<I", data, 4)
        offset = 8
        is_run = [False] * containers
        has_offsets = True
    if not containers:
        return offset
    rows = struct.unpack_from(f"<{2 * containers}H", data, offset)[1::2]
    offset += 4 * containers
    first = 0
    if has_offsets:
        (last_offset,) = struct.unpack_from("<I", data, offset + 4 * (containers - 1))
        offset, first = last_offset, containers - 1
    for number in range(first, containers):
        if is_run[number]:
            offset += 2 + 4 * int(struct.unpack_from("<H", data, offset)[0])
        else:
            offset += min(2 * (rows[number] + 1), _BITSET_BYTES)
    return offset


def distinct(values: U64) -> tuple[U64, npt.NDArray[np.intp]]:
    """Return (distinct values, index of each value among them).

    If the values lie close together, a table is used instead of a sort.
    """
    lowest = values.min()
    span = int(values.max() - lowest) + 1
    if span > _TABLE_SPAN_PER_VALUE * len(values):
        return np.unique(values, return_inverse=True)
    places = (values - lowest).astype(np.intp)
    is_there = np.zeros(span, np.bool_)
    is_there[places] = True
    found = np.flatnonzero(is_there)
    ranks = np.empty(span, np.intp)
    ranks[found] = np.arange(len(found))
    return found.astype(np.uint64) + lowest, ranks[places]


def _distinct_pages(ledger_id: U64, page: U64) -> tuple[U64, U64, npt.NDArray[np.intp]]:
    """Return (ledger ids, pages) of the distinct pages, and the index of each page among them."""
    if not page.any():
        ledgers, inverse = distinct(ledger_id)
        return ledgers, np.zeros(len(ledgers), np.uint64), inverse
    pairs, inverse = np.unique(np.stack([ledger_id, page], axis=1), axis=0, return_inverse=True)
    return pairs[:, 0], pairs[:, 1], inverse.reshape(-1)


Places = npt.NDArray[np.intp]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """Rows first..end of the column by ascending key, equal keys in order. `places` is None if all were in order."""

    first: int
    end: int
    keys: U64
    places: Places | None


class KeyIndex:
    """An index of a growing column: a few sorted runs, each at least twice as long as the next.

    A repeated look-up sorts only what was added since.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def last_of(self, column: U64, asked: U64) -> Places:
        """Return the place of the last row of each requested key that is in the column; the keys are distinct."""
        self._follow(column)
        found = []
        left = asked
        for run in reversed(self._runs):
            ends = np.searchsorted(run.keys, left, side="right")
            hit = (ends > 0) & (run.keys[ends - 1] == left)
            places = ends[hit] - 1
            found.append(run.first + (places if run.places is None else run.places[places]))
            left = left[~hit]
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _follow(self, column: U64) -> None:
        end = len(column)
        first = self._runs[-1].end if self._runs else 0
        if first == end:
            return
        while self._runs and 2 * (end - first) >= len(self._runs[-1].keys):
            first = self._runs.pop().first
        keys = column[first:end]
        places = None
        if (keys[1:] < keys[:-1]).any():
            places = np.argsort(keys, kind="stable")
            keys = keys[places]
        self._runs.append(_Run(first, end, keys, places))


# (ledger_id, entry_id, batch index and 1, 0 of entries as a whole) of n rows.
Columns = tuple[U64, U64, U64]


class PositionOrder:
    """The order of rows by position, those of batch parts behind their entry. `places` are the topic's."""

    def __init__(self, places: PagePlaces) -> None:
        self._places = places

    def columns(self, rows: KeyedRows) -> Columns:
        ledger_id, entry_id = rows.rows.ledger_id, rows.rows.entry_id
        parts = are_of_batch_parts(self._places.owners(rows.keys))
        if not parts.any():
            return ledger_id, entry_id, np.zeros(len(rows), np.uint64)
        entry_of_part, batch_index = of_part(entry_id)
        places = np.where(parts, batch_index.astype(np.uint64) + np.uint64(1), np.uint64(0))
        return ledger_id, np.where(parts, entry_of_part, entry_id), places

    def ordered(self, rows: KeyedRows) -> KeyedRows:
        """Return the rows ordered by position."""
        return rows.take(np.lexsort(self.columns(rows)[::-1]))


def are_greater(columns: Columns, others: Sequence[U64]) -> Mask:
    """Return the mask of the positions that come after the others, compared one by one."""
    greater: Mask = columns[-1] > others[-1]
    for column, other in zip(columns[-2::-1], others[-2::-1], strict=True):
        greater = (column > other) | ((column == other) & greater)
    return greater
