"""Finds the positions of rows by their schedule ids: the id map of one topic, in memory only.

    rows that are added ---------> entries -(find: does it count?)-> positions and times of rows that are there
    rows of buckets, when loaded -^ older than those

An entry is a hash of an id, the key of a position and a time: 32 bytes in runs sorted by hash (`column_runs`). Nothing
is taken out when a row leaves. An entry counts while its position has a row with an id, applied and not gone, and no
newer entry has that position:

- The index answers the first part (`HasIds`).
- A newer entry of the same id stands behind it under one hash.
- A newer entry of another id is at a position that a row had left before. Such positions are noted when rows leave,
  and the hash of the row that came back is kept for them.

Dead entries are left out while runs merge. If many rows have left, one sweep over all runs leaves out every dead entry,
and what was noted before it is forgotten. Keys outlive seals, merges and dropped buckets, so these do not concern the
map. Staged decisions are the caller's: entries are of applied rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.column_runs import (
    SMALL_ROWS,
    ColumnRun,
    ColumnRuns,
    Columns,
    Hits,
    Mask,
    MayTake,
    Places,
    rows_of,
)
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.position_keys import contained
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U64

ENTRY_BYTES: Final = 32
"""The size of an entry."""
LOOKED_AT_ROWS: Final = 1 << 14
"""The most entries that a look-up looks at together: some 3 ms."""

HasIds: TypeAlias = Callable[[U64], Mask]
"""Returns the mask of keys whose positions have a row with a schedule id that is applied and not gone, whatever is
staged. The keys are of any index of the topic, and repeat."""

# Columns of entries, and of the ids of positions that came back
_HIGH, _LOW, _KEY, _TIME = range(4)
# Estimated size of a position in the set of those that rows left (bytes)
_DEPARTED_BYTES = 8


OfRows: TypeAlias = Callable[[U64, U64], Mask]
"""Returns a mask of rows, given by keys and times."""


class FoundRows(NamedTuple):
    """The rows under ids: columns of n rows, ascending by `asked`, the place of the id; of one id the newest first.

    `leave` is the mask of those that the caller wants to take out. `complete` is the number of ids, from the first on,
    of which all rows are here.
    """

    asked: Places
    keys: U64
    deliver_at_ms: U64
    leave: Mask
    complete: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.keys)

    def take(self, index: Places | Mask | slice) -> FoundRows:
        """Return some of the rows."""
        return FoundRows(
            self.asked[index], self.keys[index], self.deliver_at_ms[index], self.leave[index], self.complete
        )


class _Departed:
    """The positions that rows have left since some moment, and the ids of those that have come back since."""

    def __init__(self) -> None:
        self.keys = BitMap64()
        # The number of departures, some of which may be of one position
        self.rows = 0
        self.came_back = ColumnRuns(3, lambda _: None)

    @property
    def nbytes(self) -> int:
        return _DEPARTED_BYTES * self.rows + self.came_back.nbytes

    def ids_of(self, keys: U64) -> tuple[Places, U64, U64]:
        """Return (places of keys that came back, the halves of the hash of the id of each)."""
        known = np.zeros(len(keys), np.bool_)
        high, low = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint64)
        for hits in self.came_back.hits(keys):
            # The newest is the last of the newest run.
            is_newest = ~known[hits.asked]
            asked = hits.asked[is_newest]
            known[asked] = True
            _, high[asked], low[asked] = hits.run.take(hits.end[is_newest] - 1)
        places = np.flatnonzero(known)
        return places, high[places], low[places]


class IdMap:
    """The ids of one topic's rows. While it is loaded it takes rows, and finds none."""

    def __init__(self, has_ids: HasIds) -> None:
        self._has_ids = has_ids
        self._entries = ColumnRuns(4, self._needed)
        self._departed = _Departed()
        # Those before the sweep that is wanted or under way
        self._departed_before: _Departed | None = None
        self._is_loaded = False
        self._is_open = True

    def __len__(self) -> int:
        """Return the number of entries, dead ones included."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """The size in memory (bytes): entries, those that merges write, and what is noted of rows that left.

        O(1). The set of positions that rows have left is an estimate.
        """
        before = self._departed_before
        return self._entries.nbytes + self._departed.nbytes + (0 if before is None else before.nbytes)

    @property
    def runs(self) -> int:
        """The number of sorted runs in which a look-up searches."""
        return self._entries.runs

    @property
    def is_loaded(self) -> bool:
        """True once the rows of all sources are here."""
        return self._is_loaded

    @property
    def is_open(self) -> bool:
        """True until the map has made room for others. A new one must be loaded then."""
        return self._is_open

    def close(self) -> None:
        """Give the memory back. The map takes and finds nothing any more."""
        self._is_open = self._is_loaded = False
        self._entries = ColumnRuns(4, self._needed)
        self._departed, self._departed_before = _Departed(), None

    # ---- rows come and leave

    def add(self, hashes: IdHashes, keys: U64, deliver_at_ms: U64) -> None:
        """Take rows with ids that were applied: newer than all that are here.

        Their positions have the rows in the index by now, and what they replace was named in `left`.
        """
        if not self._is_open:
            return
        for departed in self._generations():
            if departed.rows:
                again = contained(keys, departed.keys)
                if again.any():
                    self._departed.came_back.add((keys[again], hashes.high[again], hashes.low[again]))
        self._entries.add((hashes.high, hashes.low, keys, deliver_at_ms))

    @staticmethod
    def run_of(hashes: IdHashes, keys: U64, deliver_at_ms: U64) -> ColumnRun:
        """Sort rows for `read`, those of several buckets if these are small. It may run in another thread.

        Each run costs a look-up 0.3 microseconds until it is merged: runs should have a million rows.
        """
        return ColumnRun.of((hashes.high, hashes.low, keys, deliver_at_ms))

    def read(self, run: ColumnRun) -> None:
        """Take rows of one bucket: older than all that was added, in whatever order buckets come.

        Each was in the bucket, and not gone from it, at a moment when rows were already added and named in `left`. For
        a bucket in memory that moment is the one when loading begins. Rows may be read twice.
        """
        if self._is_open:
            self._entries.add_oldest(run)

    def loaded(self) -> None:
        """Note that all sources have been read: from now on rows are found."""
        self._is_loaded = self._is_open

    def left(self, keys: BitMap64) -> None:
        """Note positions that rows have left, however: rows that are gone, rescheduled or lost with a bucket.

        Rows without ids may be among them. They must be named before their positions are added again.
        """
        if keys and self._is_open:
            self._departed.keys |= keys
            self._departed.rows += len(keys)

    # ---- rows are found

    def find(
        self,
        hashes: IdHashes,
        *,
        rows_max: int,
        leave: OfRows | None = None,
        hidden: HasIds | None = None,
        one_each: bool = False,
    ) -> FoundRows:
        """Return the rows that are there under distinct ids; with `one_each` some row of each, one at least.

        `leave` says which rows the caller wants to take out, None for all: more than `rows_max` of these are not
        returned, and none that come after them. `hidden` says of which positions a staged decision takes the row out,
        or brings another: their rows are not there. Raises InvariantViolated if the map is not loaded.
        """
        if not self._is_loaded:
            raise InvariantViolated("a schedule id is looked up in a map that is not loaded")
        found = _nothing(hashes.rows)
        for candidates in _portions(self._entries.hits(hashes.high)):
            if one_each and found.rows:
                candidates = [_without(each, found.asked) for each in candidates]
            more = self._counting(candidates, hashes, hidden)
            if leave is not None:
                more = more._replace(leave=leave(more.keys, more.deliver_at_ms))
            found = _joined(found, more)
            leaving = np.flatnonzero(found.leave)
            if len(leaving) > rows_max:
                end = leaving[rows_max]
                return found.take(slice(end))._replace(complete=int(found.asked[end]))
        return found

    def _counting(self, candidates: list[Hits], hashes: IdHashes, hidden: HasIds | None) -> FoundRows:
        """Return the rows of the entries that count. The newest run comes first."""
        asked, entries = rows_of(candidates)
        same = entries[_LOW] == hashes.low[asked]
        if not same.all():
            asked, entries = asked[same], tuple(column[same] for column in entries)
        if len(asked):
            counts = self._are_there(entries)
            if hidden is not None:
                counts = counts & ~hidden(entries[_KEY])
            asked, entries = asked[counts], tuple(column[counts] for column in entries)
        return FoundRows(asked, entries[_KEY], entries[_TIME], np.ones(len(asked), np.bool_), hashes.rows)

    def _generations(self) -> Iterator[_Departed]:
        """Yield what is noted of departed rows, the newest first."""
        yield self._departed
        if self._departed_before is not None:
            yield self._departed_before

    def _are_there(self, entries: Columns) -> Mask:
        """Return the mask of entries whose positions have a row with an id that is not known to be another."""
        others = np.zeros(len(entries[_KEY]), np.bool_)
        for departed in reversed([*self._generations()]):
            if len(departed.came_back):
                # The row that came back last decides.
                places, high, low = departed.ids_of(entries[_KEY])
                others[places] = (high != entries[_HIGH][places]) | (low != entries[_LOW][places])
        there: Mask = self._has_ids(entries[_KEY]) & ~others
        return there

    # ---- dead entries are swept

    def step(self, may_take: MayTake) -> bool:
        """Take one bounded step of merging and sweeping; return whether more may follow at once.

        `may_take` says whether a merge may take so many bytes until it ends. Nothing is merged before the map is
        loaded, since the rows are then merged in fewer passes.
        """
        if not self._is_loaded:
            return False
        if self._departed_before is None and self._departed.rows > max(SMALL_ROWS, len(self._entries) // 2):
            self._departed_before, self._departed = self._departed, _Departed()
            self._entries.sweep()
        step = self._entries.step(may_take)
        if step.swept:
            self._departed_before = None
        return step.goes_on or self._departed.came_back.step(may_take).goes_on

    def _needed(self, entries: Columns) -> Mask | None:
        """Return the mask of entries, ascending by hash and then by age, that may count; None if all may."""
        superseded = _superseded(entries)
        # The index is asked only if rows have left: that takes longer than merging.
        needed = self._are_there(entries) if any(each.rows for each in self._generations()) else None
        if superseded is None:
            return needed
        return ~superseded if needed is None else needed & ~superseded


def _superseded(entries: Columns) -> Mask | None:
    """Return the mask of entries behind which one of the same id and position follows; None if there is none."""
    high = entries[_HIGH]
    repeats = np.flatnonzero(high[1:] == high[:-1])
    if not len(repeats):
        return None
    places = np.union1d(repeats, repeats + 1)
    low, key = entries[_LOW][places], entries[_KEY][places]
    # lexsort is stable: equal ones keep the order of their age.
    order = np.lexsort((key, low, high[places]))
    places, low, key = places[order], low[order], key[order]
    same = (high[places[1:]] == high[places[:-1]]) & (low[1:] == low[:-1]) & (key[1:] == key[:-1])
    superseded = np.zeros(len(high), np.bool_)
    superseded[places[:-1][same]] = True
    return superseded


def _portions(hits: list[Hits]) -> Iterator[list[Hits]]:
    """Yield the hits, the newest run first, in portions of bounded size if there are many entries.

    The portions are of ascending ids then; of one id the newest entries come first.
    """
    if not hits:
        return
    if sum(int((each.end - each.first).sum()) for each in hits) <= LOOKED_AT_ROWS:
        yield hits
        return
    number = np.repeat(np.arange(len(hits)), [len(each.asked) for each in hits])
    asked, first, end = (np.concatenate([getattr(each, name) for each in hits]) for name in ("asked", "first", "end"))
    # Long ranges are cut, and the pieces ordered: by id, run, and from the newest entry on.
    pieces = -(-(end - first) // LOOKED_AT_ROWS)
    piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    number, asked, first, end = (np.repeat(column, pieces) for column in (number, asked, first, end))
    end = end - piece * LOOKED_AT_ROWS
    first = np.maximum(first, end - LOOKED_AT_ROWS)
    order = np.argsort(asked, kind="stable")
    number, asked, first, end = number[order], asked[order], first[order], end[order]
    portion = (np.cumsum(end - first) - 1) // LOOKED_AT_ROWS
    for begin, stop in _ranges_of(portion):
        portions = []
        for each in np.unique(number[begin:stop]).tolist():
            mine = np.flatnonzero(number[begin:stop] == each) + begin
            portions.append(Hits(hits[each].run, asked[mine], first[mine], end[mine]))
        yield portions


def _ranges_of(values: Places) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each range of one value."""
    cuts = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    yield from zip([0, *cuts], [*cuts, len(values)], strict=True)


def _without(hits: Hits, asked: Places) -> Hits:
    """Leave out the ranges of some ids."""
    kept = ~np.isin(hits.asked, asked)
    return Hits(hits.run, hits.asked[kept], hits.first[kept], hits.end[kept])


def _nothing(ids: int) -> FoundRows:
    """Return no rows of so many ids."""
    none = np.empty(0, np.uint64)
    return FoundRows(np.empty(0, np.intp), none, none, np.empty(0, np.bool_), ids)


def _joined(found: FoundRows, more: FoundRows) -> FoundRows:
    """Join rows to those found before, of which the first of a position is the newest."""
    both = FoundRows(
        np.concatenate([found.asked, more.asked]),
        np.concatenate([found.keys, more.keys]),
        np.concatenate([found.deliver_at_ms, more.deliver_at_ms]),
        np.concatenate([found.leave, more.leave]),
        more.complete,
    )
    newest = np.sort(np.unique(both.keys, return_index=True)[1])
    return both.take(newest[np.argsort(both.asked[newest], kind="stable")])
