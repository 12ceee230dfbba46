"""Packs rows with a redelivery time into as few bytes as they need.

Packed rows are sorted by (redelivery time, ledger, entry), never change and can be read from any row on. `nack_tracker`
knows which of them still count.

A row is one integer with bit fields: its time, the rank of its page among the pages of these rows, and the low half of
its key. If several indexes have the page, a field says which. Pages are ranked by position. Each field is as wide as
these rows need, the time on top. So the integers are in the order of the rows. Ledger and entry are not stored: they
follow from the key. If times have many rows whose positions lie together, the integers are a Roaring bitmap, else
arrays of as many bytes as they need. (PIP-393's bitmaps are small only if a time has many rows.) Constant columns take
nothing.

Schedule ids are copied to a piece of their own, in the order of the rows.

A packed column has offsets from its smallest value, of 0, 1, 2, 4 or 8 bytes each; rows are read without unpacking
others. Stored forms are elsewhere (`storage_backends.formats.column_format`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.index.position_keys import LOW_MASK, PAGE_BITS, KeyedRows, PagePlaces, bitmap_of, distinct, keys_of
from storage_backends.formats.row_columns import U32, U64, Index, Rows
from storage_backends.formats.schedule_ids import ScheduleIds

_WIDTHS = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))

Unsigned = npt.NDArray[np.unsignedinteger[Any]]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PackedColumn:
    """A column of n values, never changed: `offsets` are from `base`; None means that all values are the base."""

    base: int
    rows: int
    offsets: Unsigned | None

    @staticmethod
    def of(values: Unsigned) -> PackedColumn:
        """Pack unsigned integers."""
        if not len(values):
            return PackedColumn(0, 0, None)
        base, last = int(values.min()), int(values.max())
        if base == last:
            return PackedColumn(base, len(values), None)
        return PackedColumn(base, len(values), narrowed(values - values.dtype.type(base), (last - base).bit_length()))

    def take(self, index: Index) -> U64:
        """Return the values that an index array, a mask of n or a slice selects."""
        if self.offsets is None:
            return np.full(len(np.empty(self.rows, np.uint8)[index]), self.base, np.uint64)
        values: U64 = self.offsets[index].astype(np.uint64)
        values += np.uint64(self.base)
        return values

    @property
    def size_bytes(self) -> int:
        return 0 if self.offsets is None else self.offsets.nbytes


def narrowed(values: Unsigned, bits: int) -> Unsigned:
    """Return values of at most `bits` bits in the narrowest type."""
    kind = next(kind for width, kind in _WIDTHS if bits <= width)
    return values.astype(kind)


_SHIFT = np.uint64(PAGE_BITS)
_KEY_BITS = 64
# Overhead of a bitmap, and of each of its containers (bytes): measured, roughly
_BITMAP_BYTES = 400
_CONTAINER_BYTES = 72
_CONTAINER_BITS = 16
_BITSET_BYTES = 8192
# Number of bytes -> planes of the integers, the highest first (bits)
_PLANES = {0: (), 1: (8,), 2: (16,), 3: (16, 8), 4: (32,), 5: (32, 8), 6: (32, 16), 7: (32, 16, 8), 8: (64,)}

Order = npt.NDArray[np.int64]
# (redelivery time, ledger, entry)
Place = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackColumns:
    """n rows: `redeliver_at_ms` and `keys` are u64[n]. `deliver_at_ms` is u64[n], or None if all are 0.

    `key_hash` is u32[n], or None if no row has one; likewise `schedule_ids`.
    """

    redeliver_at_ms: U64
    keys: U64
    deliver_at_ms: U64 | None = None
    key_hash: U32 | None = None
    schedule_ids: ScheduleIds | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def of(rows: KeyedRows, redeliver_at_ms: U64) -> NackColumns:
        deliver_at_ms, key_hash, ids = rows.rows.deliver_at_ms, rows.rows.key_hash, rows.rows.schedule_ids
        return NackColumns(
            redeliver_at_ms,
            rows.keys,
            deliver_at_ms if deliver_at_ms.any() else None,
            key_hash if key_hash is not None and key_hash.any() else None,
            ids.compact() if ids is not None and ids else None,
        )

    def keyed(self, places: PagePlaces) -> KeyedRows:
        """Return the rows with their positions."""
        ledger_id, entry_id = places.positions(self.keys)
        deliver_at_ms = np.zeros(len(self), np.uint64) if self.deliver_at_ms is None else self.deliver_at_ms
        return KeyedRows(Rows(deliver_at_ms, ledger_id, entry_id, self.key_hash, self.schedule_ids), self.keys)

    def take(self, index: Index) -> NackColumns:
        return NackColumns(
            self.redeliver_at_ms[index],
            self.keys[index],
            None if self.deliver_at_ms is None else self.deliver_at_ms[index],
            None if self.key_hash is None else self.key_hash[index],
            None if self.schedule_ids is None else self.schedule_ids.take(index),
        )

    @staticmethod
    def concat(parts: Sequence[NackColumns]) -> NackColumns:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return NackColumns(np.empty(0, np.uint64), np.empty(0, np.uint64))
        deliver_at_ms = key_hash = None
        if any(part.deliver_at_ms is not None for part in parts):
            deliver_at_ms = np.concatenate(
                [np.zeros(len(part), np.uint64) if part.deliver_at_ms is None else part.deliver_at_ms for part in parts]
            )
        if any(part.key_hash is not None for part in parts):
            key_hash = np.concatenate(
                [np.zeros(len(part), np.uint32) if part.key_hash is None else part.key_hash for part in parts]
            )
        return NackColumns(
            np.concatenate([part.redeliver_at_ms for part in parts]),
            np.concatenate([part.keys for part in parts]),
            deliver_at_ms,
            key_hash,
            ScheduleIds.concat([part.schedule_ids for part in parts], list(map(len, parts))),
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """The layout of some rows in an integer each: time, page, low half of the key, index, the highest first.

    `pages` has the ordinals of their pages by ascending position, with a place for every index of each page. Times are
    multiples of 2^`time_unit_bits` ms, counted from `base_ms`.
    """

    base_ms: int
    time_unit_bits: int
    time_bits: int
    pages: U64
    low_base: int
    low_bits: int
    index_bits: int
    page_bits: int
    # Width of the fields below the time (bits)
    time_shift: int

    @property
    def bits(self) -> int:
        return self.time_bits + self.time_shift

    @property
    def low_end(self) -> np.uint64:
        """The bound above the distance of every low half from the least."""
        return np.uint64(1 << self.low_bits)

    def first_after(self, time_ms: int) -> int:
        """Return a bound above the integers of all rows at or before the time, and above no later row's; at least 0."""
        if time_ms < self.base_ms:
            return 0
        return (((time_ms - self.base_ms) >> self.time_unit_bits) + 1) << self.time_shift

    def time_of(self, packed: int) -> int:
        return self.base_ms + (packed >> self.time_shift << self.time_unit_bits)

    def key_of(self, packed: int) -> int:
        page = (packed >> self.low_bits + self.index_bits) & ((1 << self.page_bits) - 1)
        index = packed & ((1 << self.index_bits) - 1)
        low = (packed >> self.index_bits) & ((1 << self.low_bits) - 1)
        return int(self.pages[page << self.index_bits | index]) << PAGE_BITS | low + self.low_base

    def times_of(self, packed: U64) -> U64:
        times = packed >> np.uint64(self.time_shift)
        times <<= np.uint64(self.time_unit_bits)
        times += np.uint64(self.base_ms)
        return times

    def keys_of(self, packed: U64) -> U64:
        keys = packed >> np.uint64(self.index_bits)
        keys &= np.uint64((1 << self.low_bits) - 1)
        if len(self.pages) == 1:
            keys += np.uint64(self.low_base + (int(self.pages[0]) << PAGE_BITS))
            return keys
        keys += np.uint64(self.low_base)
        pages = packed >> np.uint64(self.low_bits + self.index_bits)
        pages &= np.uint64((1 << self.page_bits) - 1)
        if self.index_bits:
            pages <<= np.uint64(self.index_bits)
            pages |= packed & np.uint64((1 << self.index_bits) - 1)
        keys |= (self.pages << _SHIFT)[pages.astype(np.intp)]
        return keys


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Fields:
    """The layout for some rows, and their fields. `page` and `index` are None if they are all 0."""

    layout: _Layout
    time: U64
    page: U64 | None
    low: U64
    index: U64 | None

    @staticmethod
    def of(columns: NackColumns, places: PagePlaces) -> _Fields:
        """Derive the fields of at least one row."""
        base_ms = columns.redeliver_at_ms.min()
        time = columns.redeliver_at_ms - base_ms
        all_times = int(np.bitwise_or.reduce(time))
        unit_bits = (all_times & -all_times).bit_length() - 1 if all_times else 0
        time >>= np.uint64(unit_bits)
        low = columns.keys & LOW_MASK
        low_base = low.min()
        low -= low_base
        pages, page, index = _pages(columns.keys >> _SHIFT, places)
        time_bits, low_bits = (all_times >> unit_bits).bit_length(), int(low.max()).bit_length()
        index_bits = 0 if index is None else int(index.max()).bit_length()
        page_bits = (len(pages) - 1 >> index_bits).bit_length()
        shift = page_bits + low_bits + index_bits
        layout = _Layout(
            int(base_ms), unit_bits, time_bits, pages, int(low_base), low_bits, index_bits, page_bits, shift
        )
        return _Fields(layout, time, page, low, index)

    def packed(self) -> U64 | None:
        """Return an integer a row, or None if 64 bits are not enough."""
        layout = self.layout
        if layout.bits > _KEY_BITS:
            return None
        packed: U64 = self.low << np.uint64(layout.index_bits)
        if self.index is not None:
            packed |= self.index
        if self.page is not None:
            packed |= self.page << np.uint64(layout.low_bits + layout.index_bits)
        if layout.time_bits:
            packed |= self.time << np.uint64(layout.time_shift)
        return packed

    def order(self) -> Order:
        """Return the index that sorts the rows."""
        fields = (self.index, self.low, self.page, self.time)
        return np.lexsort([field for field in fields if field is not None])


def _pages(ordinals: U64, places: PagePlaces) -> tuple[U64, U64 | None, U64 | None]:
    """Return (pages of a layout, page of each row, index of each row); the last two are None if they are all 0."""
    if ordinals[0] == ordinals[-1] and (ordinals == ordinals[0]).all():
        return ordinals[:1].copy(), None, None
    found, which = distinct(ordinals)
    ledger_id, entry_id = places.positions(found << _SHIFT)
    order = np.lexsort((entry_id, ledger_id))
    ledger_id, entry_id = ledger_id[order], entry_id[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (ledger_id[1:] != ledger_id[:-1]) | (entry_id[1:] != entry_id[:-1])
    rank = np.empty(len(order), np.uint64)
    rank[order] = np.cumsum(is_new) - 1
    if is_new.all():
        return found[order], rank[which], None
    first = np.flatnonzero(is_new)
    index = np.empty(len(order), np.uint64)
    index[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    index_bits = np.uint64(int(index.max()).bit_length())
    pages = np.zeros(len(first) << int(index_bits), np.uint64)
    pages[rank << index_bits | index] = found
    return pages, rank[which], index[which]


def due_order(columns: NackColumns, places: PagePlaces) -> Order:
    """Return the index that sorts rows by (redelivery time, ledger, entry)."""
    fields = _Fields.of(columns, places)
    packed = fields.packed()
    return fields.order() if packed is None else np.argsort(packed, kind="stable")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PackedRows:
    """Rows in order, packed. `born` is their generation, see `nack_tracker.StaleNacks`."""

    born: int
    rows: int
    layout: _Layout
    # A set, or planes of the integers, the highest bits first
    packed: BitMap64 | tuple[Unsigned, ...]
    deliver_at_ms: PackedColumn | None
    key_hash: PackedColumn | None
    schedule_ids: ScheduleIds | None = None

    def __len__(self) -> int:
        return self.rows

    @property
    def is_bitmap(self) -> bool:
        return isinstance(self.packed, BitMap64)

    @property
    def size_bytes(self) -> int:
        """Size of columns and bitmap (bytes), without the objects that hold them."""
        held = sum(column.size_bytes for column in (self.deliver_at_ms, self.key_hash) if column is not None)
        if isinstance(self.packed, BitMap64):
            held += len(self.packed.serialize())
        else:
            held += sum(plane.nbytes for plane in self.packed)
        if self.schedule_ids is not None:
            held += self.schedule_ids.references.nbytes + self.schedule_ids.size_bytes
        return held + self.layout.pages.nbytes

    def may_have(self, keys: U64) -> bool:
        """Return whether one of the keys may be of these rows."""
        low = keys & LOW_MASK
        near = (low >= np.uint64(self.layout.low_base)) & (low - np.uint64(self.layout.low_base) < self.layout.low_end)
        return bool(np.isin(keys[near] >> _SHIFT, self.layout.pages).any())

    def place_at(self, index: int, places: PagePlaces) -> Place:
        """Return (redelivery time, ledger, entry) of a row."""
        packed = self._integer_at(index)
        key = self.layout.key_of(packed)
        ledger_id, page = places.page_of(key >> PAGE_BITS)
        return self.layout.time_of(packed), ledger_id, page << PAGE_BITS | key & int(LOW_MASK)

    def _integer_at(self, index: int) -> int:
        if isinstance(self.packed, BitMap64):
            return int(self.packed[index])
        packed = 0
        for plane in self.packed:
            packed = packed << 8 * plane.itemsize | int(plane[index])
        return packed

    def due_end(self, now_ms: int, start: int) -> int:
        """Return the index behind the last due row, at least `start`."""
        later = self.layout.first_after(now_ms)
        if later.bit_length() > self.layout.bits:
            return self.rows
        if not later:
            return start
        if isinstance(self.packed, BitMap64):
            return max(start, self.packed.rank(later - 1))
        end, below = self.rows, sum(8 * plane.itemsize for plane in self.packed)
        for plane in self.packed:
            below -= 8 * plane.itemsize
            wanted = plane.dtype.type((later >> below) & ((1 << 8 * plane.itemsize) - 1))
            part = plane[start:end]
            first = start + int(part.searchsorted(wanted, side="left"))
            end = start + int(part.searchsorted(wanted, side="right"))
            start = first
            if start == end:
                break
        return start

    def integers(self) -> U64 | None:
        """Return all integers of a bitmap, to keep while reading rows; None for arrays, which are read directly."""
        return keys_of(self.packed) if isinstance(self.packed, BitMap64) else None

    def columns(self, start: int = 0, end: int | None = None, integers: U64 | None = None) -> NackColumns:
        """Return the rows from start to end. `integers` is an earlier result of `integers()`."""
        chosen = slice(start, self.rows if end is None else end)
        if isinstance(self.packed, BitMap64):
            packed = (keys_of(self.packed) if integers is None else integers)[chosen]
        elif not self.packed:
            packed = np.zeros(1, np.uint64)[chosen]
        else:
            packed = self.packed[0][chosen].astype(np.uint64)
            for plane in self.packed[1:]:
                packed <<= np.uint64(8 * plane.itemsize)
                packed |= plane[chosen]
        return NackColumns(
            self.layout.times_of(packed),
            self.layout.keys_of(packed),
            None if self.deliver_at_ms is None else self.deliver_at_ms.take(chosen),
            None if self.key_hash is None else self.key_hash.take(chosen).astype(np.uint32),
            None if self.schedule_ids is None else self.schedule_ids.take(chosen),
        )


def pack(columns: NackColumns, places: PagePlaces, born: int) -> list[PackedRows]:
    """Sort and pack at least one row, in one piece if an integer has room for all fields."""
    fields = _Fields.of(columns, places)
    layout, packed = fields.layout, fields.packed()
    if packed is None:
        # Half of the rows have fewer pages and span less time.
        order = fields.order()
        middle = len(order) // 2
        return [piece for half in (order[:middle], order[middle:]) for piece in pack(columns.take(half), places, born)]
    deliver_at_ms, key_hash, ids = columns.deliver_at_ms, columns.key_hash, columns.schedule_ids
    if not bool((packed[1:] >= packed[:-1]).all()):
        if deliver_at_ms is None and key_hash is None and ids is None:
            packed.sort()
        else:
            order = np.argsort(packed, kind="stable")
            packed = packed[order]
            deliver_at_ms = None if deliver_at_ms is None else deliver_at_ms[order]
            key_hash = None if key_hash is None else key_hash[order]
            ids = None if ids is None else ids.take(order)
    return [
        PackedRows(
            born,
            len(packed),
            layout,
            _smallest(packed, layout.bits),
            None if deliver_at_ms is None else PackedColumn.of(deliver_at_ms),
            None if key_hash is None else PackedColumn.of(key_hash),
            ids.copied() if ids is not None and ids else None,
        )
    ]


def _smallest(packed: U64, bits: int) -> BitMap64 | tuple[Unsigned, ...]:
    """Store ascending integers of this many bits as a set or as planes, whichever is smaller."""
    width = (bits + 7) // 8
    shared = packed >> np.uint64(_CONTAINER_BITS)
    containers = 1 + int(np.count_nonzero(shared[1:] != shared[:-1]))
    runs = 1 + int(np.count_nonzero(packed[1:] - packed[:-1] != 1))
    in_containers = min(4 * runs, 2 * len(packed), _BITSET_BYTES * containers)
    if _BITMAP_BYTES + _CONTAINER_BYTES * containers + in_containers < width * len(packed):
        bitmap = bitmap_of(packed)
        bitmap.run_optimize()
        bitmap.shrink_to_fit()
        return bitmap
    planes = []
    below = 8 * width
    for plane_bits in _PLANES[width]:
        below -= plane_bits
        planes.append(narrowed((packed >> np.uint64(below)) & np.uint64((1 << plane_bits) - 1), plane_bits))
    return tuple(planes)
