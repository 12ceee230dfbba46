"""Finds what of ranges of entries is in the indexes, as ranges that a cursor reading a log skips (PIP-195).

Everything is done on bitmaps and columns. A range of a million rows is a few containers. A range of the answer is a
place where a set begins and one where it ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import PAGE_BITS, UNKNOWN_KEY, bitmap_of, keys_of
from storage_backends.formats.row_columns import U64

# The rows that one call may read in ranges of the request. Each range costs some rows, a wide one more, since its rows
# are counted first; so does each container (65,536 entries) that it spans.
SCAN_ROWS_MAX = 4_000_000
_RANGE_ROWS = 100
_NARROW_ENTRIES = 1_000
_WIDE_RANGE_ROWS = 4_000
_CONTAINER_ROWS = 4
_CONTAINER_BITS = 16

I64 = npt.NDArray[np.int64]
Order = npt.NDArray[np.intp]
_LOW = np.uint64((1 << PAGE_BITS) - 1)
_SHIFT = np.uint64(PAGE_BITS)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class EntryRanges:
    """Ranges of entries of ledgers, both ends included; u64[n] each."""

    ledger_id: U64
    first_entry_id: U64
    last_entry_id: U64

    def __len__(self) -> int:
        return len(self.ledger_id)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Contained:
    """The parts of a request's ranges that are in the indexes: not passed yet, and passed and not acknowledged.

    They are ordered as the request, within a range by entry; adjacent ones are joined. `continuation` is (range of the
    request, entry) at which the answer ends, or None if it is complete.
    """

    pending: EntryRanges
    due: EntryRanges
    continuation: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Pieces:
    """Ranges of keys, each within one page, in the order of the request. `number` is the range of the request."""

    number: I64
    first: U64
    last: U64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Found:
    """Ranges of keys that are in the index, in the order of the pieces in which they lie."""

    piece: I64
    first: U64
    last: U64

    def __len__(self) -> int:
        return len(self.piece)

    def take(self, index: npt.NDArray[np.bool_]) -> _Found:
        return _Found(self.piece[index], self.first[index], self.last[index])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Ranges:
    """Ranges of entries in the order of the request. `number` is the range of the request for each."""

    number: I64
    ledger_id: U64
    first: U64
    last: U64

    def __len__(self) -> int:
        return len(self.number)

    def entries(self) -> EntryRanges:
        return EntryRanges(self.ledger_id, self.first, self.last)


# (pending, due, where the answer ends: (range of the request, entry))
_Answer = tuple[_Ranges, _Ranges, tuple[int, int] | None]


def contained_in(
    indexes: Sequence[Index], request: EntryRanges, subscription_id: int | None, *, ranges_max: int
) -> Contained:
    """Return what of the request is in any of the indexes; for a subscription, without what it acknowledged.

    A position that is due in one index is due. The answer has at most `ranges_max` ranges and takes bounded work; the
    rest is for another call.
    """
    scan_rows_max = max(1, SCAN_ROWS_MAX // len(indexes))
    answers = [
        _answer(index, request, subscription_id, ranges_max=ranges_max, scan_rows_max=scan_rows_max)
        for index in indexes
    ]
    pending, due, continuation = answers[0] if len(answers) == 1 else _together(answers, request, ranges_max)
    return Contained(pending.entries(), due.entries(), continuation)


def _answer(
    index: Index, request: EntryRanges, subscription_id: int | None, *, ranges_max: int, scan_rows_max: int
) -> _Answer:
    pieces, asked, end = _bounded(index, _pieces_of(index, request), scan_rows_max)
    waiting, passed = _sets(index, asked, subscription_id)
    order = np.argsort(pieces.first)
    pending = _overlaps(waiting, pieces, order, ranges_max + 1)
    due = _overlaps(passed, pieces, order, ranges_max + 1)
    pending, due, cut = _first_ones(pending, due, ranges_max)
    if cut is not None:
        end = int(pieces.number[cut[0]]), cut[1]
    continuation = None
    if end is not None:
        _, entry_id = index.pages.positions(np.array([end[1]], np.uint64))
        continuation = end[0], int(entry_id[0])
    return _ranges(index, pieces, pending), _ranges(index, pieces, due), continuation


def _together(answers: Sequence[_Answer], request: EntryRanges, ranges_max: int) -> _Answer:
    """Combine the answers of several indexes, as far as all of them go."""
    number, first, last, is_due = _union([pending for pending, _, _ in answers], [due for _, due, _ in answers])
    continuation = min((end for _, _, end in answers if end is not None), default=None)
    if continuation is not None:
        before = (number < continuation[0]) | (number == continuation[0]) & (first < np.uint64(continuation[1]))
        number, first, last, is_due = number[before], first[before], last[before], is_due[before]
        if len(number) and number[-1] == continuation[0] and int(last[-1]) >= continuation[1]:
            last[-1] = continuation[1] - 1
    if len(number) > ranges_max:
        continuation = int(number[ranges_max]), int(first[ranges_max])
    number, first, last, is_due = number[:ranges_max], first[:ranges_max], last[:ranges_max], is_due[:ranges_max]
    ledger_id = request.ledger_id[number]
    pending, due = (_Ranges(number[kind], ledger_id[kind], first[kind], last[kind]) for kind in (~is_due, is_due))
    return pending, due, continuation


def _union(pending: Sequence[_Ranges], due: Sequence[_Ranges]) -> tuple[I64, U64, U64, npt.NDArray[np.bool_]]:
    """Return the disjoint ranges of all parts, ordered by (number, first): (number, first, last, is due).

    An entry in a due range is due. The number of open ranges is counted at every place where one begins or ends.
    """
    parts = [*pending, *due]
    number = np.concatenate([part.number for part in parts])
    first, last = (np.concatenate(column) for column in ([each.first for each in parts], [each.last for each in parts]))
    is_due = np.repeat([False, True], [sum(map(len, pending)), sum(map(len, due))])
    # After the last possible entry comes entry 0 of the next range of the request.
    ends = last + np.uint64(1)
    place = np.concatenate([number, number + (ends == 0)]), np.concatenate([first, ends])
    opened = np.repeat([1, -1], len(number))
    order = np.lexsort((place[1], place[0]))
    number, entry = place[0][order], place[1][order]
    open_due = np.cumsum(np.where(np.tile(is_due, 2), opened, 0)[order])
    open_any = np.cumsum(opened[order])
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (number[1:] != number[:-1]) | (entry[1:] != entry[:-1])
    number, entry = number[is_last], entry[is_last]
    state = np.where(open_due[is_last] > 0, 2, open_any[is_last] > 0)
    begins = np.ones(len(number), np.bool_)
    begins[1:] = (state[1:] != state[:-1]) | (number[1:] != number[:-1])
    number, entry, state = number[begins], entry[begins], state[begins]
    # Nothing is open at the last place of all.
    taken = np.flatnonzero(state)
    return number[taken], entry[taken], entry[taken + 1] - np.uint64(1), state[taken] == 2


def _pieces_of(index: Index, request: EntryRanges) -> _Pieces:
    """Return the parts of the request that lie in pages held by some bucket."""
    number = np.arange(len(request))
    one_page = request.first_entry_id >> _SHIFT == request.last_entry_id >> _SHIFT
    first = index.pages.find(request.ledger_id[one_page], request.first_entry_id[one_page])
    last = first & ~_LOW | request.last_entry_id[one_page] & _LOW
    known = first != UNKNOWN_KEY
    pieces = _Pieces(number[one_page][known], first[known], last[known])
    if one_page.all():
        return pieces
    further = []
    for each in np.flatnonzero(~one_page).tolist():
        columns = (request.ledger_id, request.first_entry_id, request.last_entry_id)
        further += [(each, *keys) for keys in index.pages.key_ranges(*(int(column[each]) for column in columns))]
    added = np.array(further, np.uint64).reshape(-1, 3)
    number = np.concatenate([pieces.number, added[:, 0].astype(np.int64)])
    order = np.argsort(number, kind="stable")
    return _Pieces(
        number[order],
        np.concatenate([pieces.first, added[:, 1]])[order],
        np.concatenate([pieces.last, added[:, 2]])[order],
    )


def _bounded(index: Index, pieces: _Pieces, scan_rows_max: int) -> tuple[_Pieces, BitMap64, tuple[int, int] | None]:
    """Take as many pieces as one call reads: (pieces, their keys, where the rest begins: (range, key) or None)."""
    asked = BitMap64()
    rows_left = scan_rows_max
    end = None
    count = len(pieces.number)
    ranges = np.flatnonzero(pieces.first != pieces.last)
    firsts, lasts = pieces.first[ranges].tolist(), pieces.last[ranges].tolist()
    for place, first, last in zip(ranges.tolist(), firsts, lasts, strict=True):
        if rows_left <= 0:
            count, end = place, (int(pieces.number[place]), first)
            break
        if last - first < _NARROW_ENTRIES:
            rows_left -= max(last - first, _RANGE_ROWS)
            asked.add_range(first, last + 1)
            continue
        low, high, rows, whole = _fitting(index.that_may_have_page(first >> PAGE_BITS), first, last, rows_left)
        rows_left -= max(rows, _WIDE_RANGE_ROWS)
        if high >= low:
            asked.add_range(low, high + 1)
        if not whole:
            count, end = place + 1, (int(pieces.number[place]), high + 1)
            pieces.last[place] = high
            break
    pieces = _Pieces(pieces.number[:count], pieces.first[:count], pieces.last[:count])
    asked |= bitmap_of(pieces.first[pieces.first == pieces.last])
    return pieces, asked, end


def _fitting(buckets: Sequence[Bucket], first: int, last: int, rows_max: int) -> tuple[int, int, int, bool]:
    """Return the part of a range that is read: (first key with a row, last key, cost, whether it is all)."""
    sets = [bucket.present for bucket in buckets if bucket.present.range_cardinality(first, last + 1)]
    if not sets:
        return first, first - 1, 0, True
    low = min(keys.next_set_bit(first) for keys in sets)
    end = high = max(keys[keys.rank(last) - 1] for keys in sets)
    while True:
        rows = ((high - low) >> _CONTAINER_BITS) * _CONTAINER_ROWS
        rows += sum(keys.range_cardinality(low, high + 1) for keys in sets)
        if rows <= rows_max:
            return low, high, rows, high == end
        high = low + (high - low) // 2


def _sets(index: Index, asked: BitMap64, subscription_id: int | None) -> tuple[BitMap64, BitMap64]:
    """Return (keys that are pending, keys that are due and not acknowledged)."""
    waiting, passed = BitMap64(), BitMap64()
    for bucket in index.buckets:
        here = bucket.present & asked
        if not here:
            continue
        if subscription_id in bucket.acknowledged:
            here -= bucket.acknowledged[subscription_id]
        due = here & bucket.passed
        passed |= due
        waiting |= here - due
    return waiting, passed


def _overlaps(keys: BitMap64, pieces: _Pieces, order: Order, count_max: int) -> _Found:
    """Return the first ranges of the set in each of the pieces, at most `count_max` together.

    `order` sorts the pieces by first key, since looking keys up in ascending order is several times faster.
    """
    if not keys:
        return _Found(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint64))
    # Runs of adjacent keys. One may continue in another page of the table: that does no harm, since a piece does not.
    begins, ends = keys_of(keys - keys.shift(1)), keys_of(keys - keys.shift(-1))
    start, stop = np.empty_like(order), np.empty_like(order)
    start[order] = np.searchsorted(ends, pieces.first[order], side="left")
    stop[order] = np.searchsorted(begins, pieces.last[order], side="right")
    counts = stop - start
    before = np.cumsum(counts) - counts
    counts = np.clip(count_max - before, 0, counts)
    piece = np.repeat(np.arange(len(counts)), counts)
    places = (start - before)[piece] + np.arange(len(piece))
    return _Found(piece, np.maximum(begins[places], pieces.first[piece]), np.minimum(ends[places], pieces.last[piece]))


def _first_ones(pending: _Found, due: _Found, ranges_max: int) -> tuple[_Found, _Found, tuple[int, int] | None]:
    """Return the first ranges of both: (pending ones, due ones, (piece, first key) of the next one)."""
    if len(pending) + len(due) <= ranges_max:
        return pending, due, None
    piece = np.concatenate([pending.piece, due.piece])
    first = np.concatenate([pending.first, due.first])
    order = np.lexsort((first, piece))
    chosen = np.zeros(len(order), np.bool_)
    chosen[order[:ranges_max]] = True
    following = order[ranges_max]
    cut = int(piece[following]), int(first[following])
    return pending.take(chosen[: len(pending)]), due.take(chosen[len(pending) :]), cut


def _ranges(index: Index, pieces: _Pieces, found: _Found) -> _Ranges:
    """Return the entries, joining ranges that continue in the next page of the ledger."""
    ledger_id, first = index.pages.positions(found.first)
    _, last = index.pages.positions(found.last)
    number = pieces.number[found.piece]
    goes_on = (number[1:] == number[:-1]) & (ledger_id[1:] == ledger_id[:-1]) & (first[1:] == last[:-1] + np.uint64(1))
    is_first = np.concatenate([[True], ~goes_on])[: len(first)]
    is_last = np.concatenate([~goes_on, [True]])[: len(first)]
    return _Ranges(number[is_first], ledger_id[is_first], first[is_first], last[is_last])
