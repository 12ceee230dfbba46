"""Sets of positions: one Roaring bitmap for each page of 2^32 entry ids of a ledger.

Owns: `PositionBitmap`, its making from columns and back, and what makes a list of them a set: they ascend by (ledger,
page), no page twice.
Does not own: set arithmetic but the union; whoever needs it works on `pyroaring.BitMap`.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyroaring

from storage_backends.formats import errors
from storage_backends.formats.rows import U64

PAGE_BITS = 32
_U16_MAX = np.uint64((1 << 16) - 1)
_LOW_MASK = np.uint64((1 << PAGE_BITS) - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class PositionBitmap:
    """Entries of one page of a ledger: `page` is entry_id >> 32, `entries` the portable serialization of a 32-bit
    Roaring bitmap of the low 32 bits.
    """

    ledger_id: int
    page: int
    entries: bytes

    @staticmethod
    def of(ledger_id: int, page: int, bitmap: pyroaring.BitMap) -> PositionBitmap:
        """Compacts the bitmap (`run_optimize`) in place."""
        bitmap.run_optimize()
        return PositionBitmap(ledger_id, page, bitmap.serialize())

    def bitmap(self) -> pyroaring.BitMap:
        """Raises FormatError when `entries` is not exactly one bitmap."""
        what = f"bitmap of ledger {self.ledger_id} page {self.page}"
        try:
            bitmap = pyroaring.BitMap.deserialize(self.entries)
        except (ValueError, IndexError) as error:
            raise errors.FormatError(what, 0, str(error)) from error
        if len(bitmap.serialize()) != len(self.entries):
            raise errors.FormatError(what, 0, f"{len(self.entries)} bytes are not one whole Roaring bitmap")
        return bitmap

    def entry_ids(self) -> U64:
        """The entry ids, ascending."""
        low = np.frombuffer(self.bitmap().to_array(), np.uint32)
        return low.astype(np.uint64) | np.uint64(self.page << PAGE_BITS)


def bitmap_of(low_entry_ids: U64) -> pyroaring.BitMap:
    """The bitmap of entry ids below 2^32, in any order."""
    # An array('I') is taken 6 to 8 times faster than a numpy array.
    return pyroaring.BitMap(array.array("I", low_entry_ids.astype(np.uint32).tobytes()))


def position_bitmaps(ledger_id: U64, entry_id: U64) -> tuple[PositionBitmap, ...]:
    """The bitmaps of the positions of two columns, in any order, by ascending (ledger, page)."""
    if not len(ledger_id):
        return ()
    paged = bool(entry_id.max() > _LOW_MASK)
    if not paged and bool((ledger_id == ledger_id[0]).all()):
        return (PositionBitmap.of(int(ledger_id[0]), 0, bitmap_of(entry_id)),)
    page = entry_id >> np.uint64(PAGE_BITS)
    order = np.lexsort((page, ledger_id)) if paged else _ledger_order(ledger_id)
    ledger_id, page, low = ledger_id[order], page[order], entry_id[order] & _LOW_MASK
    cuts = np.flatnonzero((ledger_id[1:] != ledger_id[:-1]) | (page[1:] != page[:-1])) + 1
    starts = [0, *cuts.tolist()]
    return tuple(
        PositionBitmap.of(int(ledger_id[start]), int(page[start]), bitmap_of(low[start:end]))
        for start, end in zip(starts, [*starts[1:], len(low)], strict=True)
    )


def _ledger_order(ledger_id: U64) -> npt.NDArray[np.intp]:
    offset = ledger_id - ledger_id.min()
    if offset.max() <= _U16_MAX:
        # 16 bits are sorted by radix, ten times faster.
        return np.argsort(offset.astype(np.uint16), kind="stable")
    return np.argsort(offset, kind="stable")


def positions_of(bitmaps: Iterable[PositionBitmap]) -> tuple[U64, U64]:
    """(ledger_id, entry_id) of every position of the bitmaps, in their order."""
    entries = [(bitmap.ledger_id, bitmap.entry_ids()) for bitmap in bitmaps]
    if not entries:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    ledger_id = np.repeat(
        np.array([ledger for ledger, _ in entries], np.uint64), [len(entry_ids) for _, entry_ids in entries]
    )
    return ledger_id, np.concatenate([entry_ids for _, entry_ids in entries])


def in_order(bitmaps: Sequence[PositionBitmap]) -> bool:
    """Whether they ascend by (ledger, page), no page twice."""
    places = [(bitmap.ledger_id, bitmap.page) for bitmap in bitmaps]
    return all(first < second for first, second in itertools.pairwise(places))


def count_of(bitmaps: Iterable[PositionBitmap]) -> int:
    """How many positions they have. Raises FormatError when one is no bitmap."""
    return sum(len(bitmap.bitmap()) for bitmap in bitmaps)


def union_of(sets: Iterable[Iterable[PositionBitmap]]) -> tuple[PositionBitmap, ...]:
    """The positions that are in any of the sets."""
    pages: dict[tuple[int, int], pyroaring.BitMap] = {}
    for bitmap in itertools.chain.from_iterable(sets):
        place = bitmap.ledger_id, bitmap.page
        known = pages.get(place)
        if known is None:
            pages[place] = bitmap.bitmap()
        else:
            known |= bitmap.bitmap()
    return tuple(PositionBitmap.of(*place, pages[place]) for place in sorted(pages))
