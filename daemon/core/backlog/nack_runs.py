"""Runs of nacked rows in the order in which they come due, read from the front, and which of their rows still count.

Owns: a run, taking the first rows of several runs in one order, and the entries that their positions have left behind.
Does not own: which runs there are and when they are merged (`nack_tracker`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.packed_rows import NackColumns, PackedRows, Place, due_order, pack
from daemon.core.index.positions import PagePlaces, bitmap_of, contained
from storage_backends.formats.row_columns import U64

Mask = npt.NDArray[np.bool_]
# How often it is guessed until when about as many rows are due as are asked for.
_GUESSES = 6
# At no offset.
_UNKNOWN: tuple[int, Place] = (-1, (0, 0, 0))


class Departed:
    """Entries that were dropped or replaced and are still in a run: they must not fire.

    Rows are born, and positions leave, in generations: what left in a generation left the rows that were born until
    then, and none that came later, also where it is the same position again. Rows that are packed anew are born again,
    without those that left.
    """

    def __init__(self) -> None:
        # (generation, keys that left in it), the latest last.
        self._sets: list[tuple[int, BitMap64]] = []
        self._generation = 0
        self._is_shared = False

    def __bool__(self) -> bool:
        return bool(self._sets)

    def __len__(self) -> int:
        return len(self._sets)

    def birth(self) -> int:
        """The generation of rows that come now: nothing that has left until now was theirs."""
        if self._sets and self._sets[-1][0] == self._generation:
            self._generation += 1
        return self._generation

    def leave(self, keys: BitMap64) -> None:
        """The entries of the positions that there are do not count any more."""
        if self._sets and self._sets[-1][0] == self._generation and not self._is_shared:
            self._sets[-1][1].update(keys)
            return
        self._sets.append((self._generation, keys.copy()))
        self._is_shared = False

    def still_there(self, keys: U64, born: int) -> Mask | None:
        """Which of the keys of rows that were born together still count; None when all do."""
        return _still_there(self._sets, keys, born)

    def clear(self) -> None:
        """All entries count."""
        self._sets = []

    def freeze(self) -> tuple[tuple[int, BitMap64], ...]:
        self._is_shared = True
        return tuple(self._sets)

    def forget(self, births: Iterable[int]) -> None:
        """There are rows of these births alone: what makes no difference to any of them is joined, or forgotten."""
        known = sorted(set(births))
        joined: dict[int, list[BitMap64]] = {}
        place = 0
        for generation, keys in self._sets:
            while place < len(known) and known[place] <= generation:
                place += 1
            if place:
                # All that were born until then have the same latest birth.
                joined.setdefault(place, []).append(keys)
        kept: list[tuple[int, BitMap64]] = []
        for place, sets in joined.items():
            # As late as any of them: rows that are born from now on must not be touched.
            kept.append((known[place - 1], sets[0] if len(sets) == 1 else BitMap64.union(*sets)))
        is_latest = bool(kept) and kept[-1][0] == self._generation
        self._sets = kept
        # What leaves from now on must not go into a set that was taken from one that somebody has.
        self._is_shared = self._is_shared or is_latest


def _still_there(sets: Sequence[tuple[int, BitMap64]], keys: U64, born: int) -> Mask | None:
    if not sets or sets[-1][0] < born:
        return None
    named = bitmap_of(keys)
    left = BitMap64()
    for generation, departed in reversed(sets):
        if generation < born:
            break
        if departed.intersect(named):
            left |= departed & named
    return ~contained(keys, left) if left else None


def still_there(columns: NackColumns, sets: Sequence[tuple[int, BitMap64]], born: int) -> NackColumns:
    """The rows that still count, by frozen sets."""
    mask = _still_there(sets, columns.keys, born)
    return columns if mask is None else columns.take(mask)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Rows as they came."""

    born: int
    rows: NackColumns

    def __len__(self) -> int:
        return len(self.rows)

    def may_have(self, keys: U64) -> bool:
        """Whether one of the keys may be of these rows."""
        return len(keys) > 0

    def columns(self, start: int = 0) -> NackColumns:
        return self.rows.take(slice(start, None)) if start else self.rows

    @property
    def size_bytes(self) -> int:
        columns = (self.rows.redeliver_at_ms, self.rows.keys, self.rows.deliver_at_ms, self.rows.key_hash)
        return sum(column.nbytes for column in columns if column is not None)


class Run:
    """Rows of several parts, each after those of the part before; or a batch, which is sorted when it is first read.

    `number`: of all runs of a tracker. `is_alone`: it need not be merged. Empty when everything was read.
    """

    __slots__ = ("_batch", "_integers", "_next", "is_alone", "number", "offset", "parts", "rows")

    def __init__(self, batch: Batch | None = None) -> None:
        self.number = 0
        self.is_alone = False
        self.parts: list[PackedRows] = []
        self._batch = batch
        # Into the first part.
        self.offset = 0
        self.rows = 0 if batch is None else len(batch)
        self._next = _UNKNOWN if batch is None else (0, (int(batch.rows.redeliver_at_ms.min()), 0, 0))
        self._integers: U64 | None = None

    def __len__(self) -> int:
        return self.rows

    def append(self, parts: Iterable[PackedRows]) -> None:
        """Rows that are after all that are there."""
        for part in parts:
            self.parts.append(part)
            self.rows += len(part)

    @property
    def is_packed(self) -> bool:
        return self._batch is None

    def clear(self) -> None:
        """Forgets the rows: they are elsewhere now."""
        self.parts, self._batch, self.rows = [], None, 0
        self._at_first_row()

    def prepare(self, places: PagePlaces) -> None:
        """From now on it can be read: a batch is sorted."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            self.rows, self._next = 0, _UNKNOWN
            self.append(pack(batch.rows, places, batch.born))

    def held(self) -> list[tuple[PackedRows | Batch, int]]:
        """What it holds now, each from which row on."""
        if self._batch is not None:
            return [(self._batch, 0)]
        return [(part, self.offset if part is self.parts[0] else 0) for part in self.parts]

    def next_place(self, places: PagePlaces) -> Place:
        """The place of its first row, of a batch one before; it has a row."""
        if self._next[0] != self.offset:
            self._next = (self.offset, self.parts[0].place_at(self.offset, places))
        return self._next[1]

    def due_rows(self, now_ms: int) -> int:
        """How many rows of the first part are due."""
        return self.parts[0].due_end(now_ms, self.offset) - self.offset

    def last_due_ms(self, places: PagePlaces) -> int:
        """When the last row of the first part is due."""
        return self.parts[0].place_at(len(self.parts[0]) - 1, places)[0]

    def place_of(self, row: int, places: PagePlaces) -> Place:
        """The place of a row of the first part, the next one being 0."""
        return self.parts[0].place_at(self.offset + row, places)

    def first(self, rows: int) -> NackColumns:
        """Takes so many rows from the front of the first part."""
        part = self.parts[0]
        if self._integers is None and part.is_bitmap and rows < len(part):
            self._integers = part.integers()
        return part.columns(self.offset, self.offset + rows, self._integers)

    def advance(self, rows: int) -> None:
        """Passes rows of the first part that were read."""
        self.offset += rows
        self.rows -= rows
        if self.offset == len(self.parts[0]):
            del self.parts[0]
            self._at_first_row()

    def _at_first_row(self) -> None:
        self.offset, self._integers, self._next = 0, None, _UNKNOWN

    def rewrite(self, index: int, places: PagePlaces, departed: Departed) -> tuple[int, int]:
        """Packs what still counts of a part anew; (how many parts there are now in its place, how many rows left)."""
        part, start = self.held()[index]
        columns = part.columns(start)
        mask = departed.still_there(columns.keys, part.born)
        if mask is None:
            return 1, 0
        kept = columns.take(mask)
        packed = pack(kept, places, departed.birth()) if len(kept) else []
        self.parts[index : index + 1] = packed
        left_rows = len(columns) - len(kept)
        self.rows -= left_rows
        if index == 0:
            self._at_first_row()
        return len(packed), left_rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Taken:
    """The rows that still count, in order; how many were read."""

    columns: NackColumns
    read_rows: int


def take_first(runs: Sequence[Run], now_ms: int, limit: int, places: PagePlaces, departed: Departed) -> Taken:
    """At most `limit` of the due rows of runs that can be read, each of which has one, in the order (redelivery time,
    ledger, entry). What is left comes after them.
    """
    due = _due(runs, now_ms, limit, places)
    quotas = _quotas(due, limit)
    first = [run.first(quota) for run, quota in zip(runs, quotas, strict=True)]
    masks = [departed.still_there(columns.keys, run.parts[0].born) for run, columns in zip(runs, first, strict=True)]
    if len(runs) == 1:
        columns, mask = first[0], masks[0]
        read_rows = len(columns)
        runs[0].advance(read_rows)
        return Taken(columns if mask is None else columns.take(mask), read_rows)
    merged = NackColumns.concat(first)
    order = due_order(merged, places)
    read_rows = _sure_rows(runs, due, quotas, order, limit)
    order = order[:read_rows]
    ends = np.cumsum(quotas)
    of_each = np.bincount(np.searchsorted(ends, order, side="right"), minlength=len(runs))
    if any(mask is not None for mask in masks):
        alive = np.concatenate(
            [np.ones(len(part), np.bool_) if mask is None else mask for part, mask in zip(first, masks, strict=True)]
        )
        order = order[alive[order]]
    for run, rows in zip(runs, of_each.tolist(), strict=True):
        if rows:
            run.advance(rows)
    return Taken(merged.take(order), read_rows)


def _due(runs: Sequence[Run], now_ms: int, limit: int, places: PagePlaces) -> list[int]:
    """How many rows of the first part of each run are due at a time, at most now, until which not many more than the
    limit are: the same number of rows may be a second of one run, and a minute of another.
    """
    late_due = [run.due_rows(now_ms) for run in runs]
    if len(runs) == 1 or sum(late_due) <= limit:
        return late_due
    early_ms = min(run.next_place(places)[0] for run in runs) - 1
    late_ms = min(now_ms, max(run.last_due_ms(places) for run in runs))
    for _ in range(_GUESSES):
        if late_ms - early_ms <= 1:
            break
        # As if they came evenly; somewhat less than the limit will do.
        guess_ms = early_ms + max(1, (late_ms - early_ms) * limit * 3 // (4 * sum(late_due)))
        due = [run.due_rows(guess_ms) for run in runs]
        if sum(due) > limit:
            late_ms, late_due = guess_ms, due
        elif 2 * sum(due) < limit:
            early_ms = guess_ms
        else:
            return due
    return late_due


def _quotas(due: Sequence[int], limit: int) -> list[int]:
    """How many rows to look at of each run, at least one: what those with few leave goes to the others."""
    if sum(due) <= limit:
        return list(due)
    even = max(1, limit // len(due))
    few = [rows for rows in due if rows <= even]
    many = len(due) - len(few)
    quota = even if not many else max(even, (limit - sum(few)) // many)
    return [min(rows, quota) for rows in due]


def _sure_rows(
    runs: Sequence[Run], due: Sequence[int], quotas: Sequence[int], order: npt.NDArray[np.int64], limit: int
) -> int:
    """How many of the rows, in their order, are before all due ones that were not looked at."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    sure = min(len(order), limit)
    end = 0
    for run, due_rows, quota in zip(runs, due, quotas, strict=True):
        end += quota
        is_all_of_part = run.offset + quota == len(run.parts[0])
        if quota and (quota < due_rows or (is_all_of_part and len(run.parts) > 1)):
            sure = min(sure, int(place[end - 1]) + 1)
    return sure
