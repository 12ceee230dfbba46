"""Keeps negatively acknowledged positions until their redelivery time (PIP-393).

`redelivery_policy` decides when positions are redelivered, `subscription_state` counts their redeliveries, and
`nack_decisions` makes them durable.

Rows that arrive in due order, as with a constant delay, go to the end of a line: its batches are packed without a sort
and need no merging. Other rows are collected, sorted once and packed, and runs of them are merged by the dozen, so a
row is sorted two or three times however many there are. A merge moves the first rows of its sources to the end of the
merged run, some thousands at a time. Each row is in one run at every moment.

PIP-393 keeps time, ledger and bitmap in maps of maps. That takes 0.16 to 4 B a position with a constant delay, 100 B
and more if each time has one position, and Python objects by the million. Here ten million positions take 0.1 to 4 B
each with a constant delay, and 4 to 6 B with any delay up to a day. One costs 0.1 to 0.5 us when it arrives, and as
much again when it is due (`python -m benchmarks nack-memory`).

`keys` is the only truth of membership. An entry that was dropped or replaced stays in its run until it is read, merged
or packed again. Runs are packed again, also some thousands of rows at a time, when more than half of the entries are
stale.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.packed_rows import NackColumns, PackedRows, Place, due_order, pack
from daemon.core.index.position_keys import KeyedRows, PagePlaces, bitmap_of, contained
from storage_backends.formats.row_columns import U64

Mask = npt.NDArray[np.bool_]
# Guesses at the time until which about as many rows are due as are wanted
_GUESSES = 6
# Not at any offset
_UNKNOWN: tuple[int, Place] = (-1, (0, 0, 0))


class StaleNacks:
    """Entries that were dropped or replaced and are still in a run: they must not fire.

    Rows are created, and positions leave, in generations. A position that leaves in a generation makes those of its
    rows stale that were created until then, and no later ones, even of the same position. Rows that are packed again
    are created again, without the stale ones.
    """

    def __init__(self) -> None:
        # (generation, keys that left in it), the latest last
        self._sets: list[tuple[int, BitMap64]] = []
        self._generation = 0
        self._is_shared = False

    def __bool__(self) -> bool:
        return bool(self._sets)

    def __len__(self) -> int:
        return len(self._sets)

    def birth(self) -> int:
        """Return the generation of rows that arrive now: nothing that has left so far was theirs."""
        if self._sets and self._sets[-1][0] == self._generation:
            self._generation += 1
        return self._generation

    def leave(self, keys: BitMap64) -> None:
        """Mark the current entries of these positions as stale."""
        if self._sets and self._sets[-1][0] == self._generation and not self._is_shared:
            self._sets[-1][1].update(keys)
            return
        self._sets.append((self._generation, keys.copy()))
        self._is_shared = False

    def still_there(self, keys: U64, born: int) -> Mask | None:
        """Return the mask of the keys that still count among rows created together, or None if all do."""
        return _still_there(self._sets, keys, born)

    def clear(self) -> None:
        """Let all entries count."""
        self._sets = []

    def freeze(self) -> tuple[tuple[int, BitMap64], ...]:
        self._is_shared = True
        return tuple(self._sets)

    def forget(self, births: Iterable[int]) -> None:
        """Join or forget sets that make no difference to rows of these births, the only ones that exist."""
        known = sorted(set(births))
        joined: dict[int, list[BitMap64]] = {}
        place = 0
        for generation, keys in self._sets:
            while place < len(known) and known[place] <= generation:
                place += 1
            if place:
                # All rows created until then have the same latest birth.
                joined.setdefault(place, []).append(keys)
        kept: list[tuple[int, BitMap64]] = []
        for place, sets in joined.items():
            # The latest birth of any of them: rows created from now on must not be affected.
            kept.append((known[place - 1], sets[0] if len(sets) == 1 else BitMap64.union(*sets)))
        is_latest = bool(kept) and kept[-1][0] == self._generation
        self._sets = kept
        # Positions that leave from now on must not go into a set that a frozen copy shares.
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
    """Return the rows that still count, by frozen sets."""
    mask = _still_there(sets, columns.keys, born)
    return columns if mask is None else columns.take(mask)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackRunBatch:
    """Rows as they arrived."""

    born: int
    rows: NackColumns

    def __len__(self) -> int:
        return len(self.rows)

    def may_have(self, keys: U64) -> bool:
        """Return whether one of the keys may be of these rows."""
        return len(keys) > 0

    def columns(self, start: int = 0) -> NackColumns:
        return self.rows.take(slice(start, None)) if start else self.rows

    @property
    def size_bytes(self) -> int:
        columns = (self.rows.redeliver_at_ms, self.rows.keys, self.rows.deliver_at_ms, self.rows.key_hash)
        held = sum(column.nbytes for column in columns if column is not None)
        ids = self.rows.schedule_ids
        return held if ids is None else held + ids.references.nbytes + ids.size_bytes


class NackRun:
    """Rows of several parts in order, each after the part before; or a batch, sorted when it is first read.

    `number` is unique among the runs of a tracker. A run with `is_alone` need not be merged. A run that was read is
    empty.
    """

    __slots__ = ("_batch", "_integers", "_next", "is_alone", "number", "offset", "parts", "rows")

    def __init__(self, batch: NackRunBatch | None = None) -> None:
        self.number = 0
        self.is_alone = False
        self.parts: list[PackedRows] = []
        self._batch = batch
        # Into the first part
        self.offset = 0
        self.rows = 0 if batch is None else len(batch)
        self._next = _UNKNOWN if batch is None else (0, (int(batch.rows.redeliver_at_ms.min()), 0, 0))
        self._integers: U64 | None = None

    def __len__(self) -> int:
        return self.rows

    def append(self, parts: Iterable[PackedRows]) -> None:
        """Append parts whose rows are all after those of the run."""
        for part in parts:
            self.parts.append(part)
            self.rows += len(part)

    @property
    def is_packed(self) -> bool:
        return self._batch is None

    def clear(self) -> None:
        """Forget the rows: another run has them now."""
        self.parts, self._batch, self.rows = [], None, 0
        self._at_first_row()

    def prepare(self, places: PagePlaces) -> None:
        """Sort and pack a batch, so that the run can be read."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            self.rows, self._next = 0, _UNKNOWN
            self.append(pack(batch.rows, places, batch.born))

    def held(self) -> list[tuple[PackedRows | NackRunBatch, int]]:
        """Return the parts that it holds now, each with the first row that is not read."""
        if self._batch is not None:
            return [(self._batch, 0)]
        return [(part, self.offset if part is self.parts[0] else 0) for part in self.parts]

    def next_place(self, places: PagePlaces) -> Place:
        """Return the place of its first row or, for a batch, a place before it. The run must not be empty."""
        if self._next[0] != self.offset:
            self._next = (self.offset, self.parts[0].place_at(self.offset, places))
        return self._next[1]

    def due_rows(self, now_ms: int) -> int:
        """Return how many rows of the first part are due."""
        return self.parts[0].due_end(now_ms, self.offset) - self.offset

    def last_due_ms(self, places: PagePlaces) -> int:
        """Return when the last row of the first part is due (Unix ms)."""
        return self.parts[0].place_at(len(self.parts[0]) - 1, places)[0]

    def place_of(self, row: int, places: PagePlaces) -> Place:
        """Return the place of a row of the first part; row 0 is the next one."""
        return self.parts[0].place_at(self.offset + row, places)

    def first(self, rows: int) -> NackColumns:
        """Return the next rows at the front of the first part, without passing them."""
        part = self.parts[0]
        if self._integers is None and part.is_bitmap and rows < len(part):
            self._integers = part.integers()
        return part.columns(self.offset, self.offset + rows, self._integers)

    def advance(self, rows: int) -> None:
        """Pass rows of the first part that were read."""
        self.offset += rows
        self.rows -= rows
        if self.offset == len(self.parts[0]):
            del self.parts[0]
            self._at_first_row()

    def _at_first_row(self) -> None:
        self.offset, self._integers, self._next = 0, None, _UNKNOWN

    def rewrite(self, index: int, places: PagePlaces, departed: StaleNacks) -> tuple[int, int]:
        """Pack a part again without its stale entries; return (number of parts in its place, rows left out)."""
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
    """The rows that still count, in order, and how many rows were read."""

    columns: NackColumns
    read_rows: int


def take_first(runs: Sequence[NackRun], now_ms: int, limit: int, places: PagePlaces, departed: StaleNacks) -> Taken:
    """Take at most `limit` due rows of the runs in the order (redelivery time, ledger, entry).

    Each run is prepared and has a due row. Every row that is left comes after those taken.
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


def _due(runs: Sequence[NackRun], now_ms: int, limit: int, places: PagePlaces) -> list[int]:
    """Return how many rows of each run's first part are due at one time, which is at most now.

    The time is chosen so that not many more than `limit` rows are due: the same number of rows may cover a second of
    one run and a minute of another.
    """
    late_due = [run.due_rows(now_ms) for run in runs]
    if len(runs) == 1 or sum(late_due) <= limit:
        return late_due
    early_ms = min(run.next_place(places)[0] for run in runs) - 1
    late_ms = min(now_ms, max(run.last_due_ms(places) for run in runs))
    for _ in range(_GUESSES):
        if late_ms - early_ms <= 1:
            break
        # Assume that rows are spread evenly; somewhat less than the limit is enough.
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
    """Return how many rows of each run to read, at least one; runs with few rows leave their share to the others."""
    if sum(due) <= limit:
        return list(due)
    even = max(1, limit // len(due))
    few = [rows for rows in due if rows <= even]
    many = len(due) - len(few)
    quota = even if not many else max(even, (limit - sum(few)) // many)
    return [min(rows, quota) for rows in due]


def _sure_rows(
    runs: Sequence[NackRun], due: Sequence[int], quotas: Sequence[int], order: npt.NDArray[np.int64], limit: int
) -> int:
    """Return how many rows, in order, come before every due row that was not read."""
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


_U64_MAX = (1 << 64) - 1
# Rows in any order that are sorted and packed at once
PART_ROWS = 1 << 14
# A line packs this many of its rows together, and then this many of those: twice as fast, since it needs no sort.
LINE_ROWS = 1 << 12
LINE_PART_ROWS = 1 << 15
# Delays in use at the same time whose rows arrive in order
LINES_MAX = 16
# Runs that are merged at once
FAN_OUT = 16
# Runs of fewer than `PART_ROWS` rows; beyond this number, those of about one size are merged.
SMALL_RUNS_MAX = 64
SIZE_BITS = 5
# Rows that are moved or packed again in one step, and how many such rows are allowed for each row that arrives
STEP_ROWS = 1 << 13
STEP_ROWS_PER_ROW = 3
# Fewer stale entries than this are ignored.
DEPARTED_ROWS_MIN = 1 << 12
# Sets of stale entries that are kept before sets between which no rows arrived are joined
SETS_MAX = 64
# Passes of one call in which nothing that it read counts
PASSES_MAX = 4


def rounded_up(times_ms: U64, bits: int) -> U64:
    """Round times up to multiples of 2^bits ms, so that none is early; PIP-393 rounds down.

    A time beyond the last multiple becomes 2^64 - 1.
    """
    if not bits:
        return times_ms
    rest = np.uint64((1 << bits) - 1)
    rounded = (times_ms + rest) & ~rest
    return np.where(times_ms > np.uint64(_U64_MAX) - rest, np.uint64(_U64_MAX), rounded)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class FrozenNacks:
    """The contents of a tracker at one moment. All methods are for a thread."""

    held: tuple[tuple[PackedRows | NackRunBatch, int], ...]
    departed: tuple[tuple[int, BitMap64], ...]
    places: PagePlaces

    def parts(self) -> Iterator[tuple[KeyedRows, U64]]:
        """Yield rows and their redelivery times (Unix ms), in any order, some thousands at a time. O(n)."""
        for part, start in self.held:
            columns = still_there(part.columns(start), self.departed, part.born)
            if len(columns):
                yield columns.keyed(self.places), columns.redeliver_at_ms

    def rows(self) -> tuple[KeyedRows, U64]:
        """Return all rows and their redelivery times (Unix ms). O(n)."""
        parts = list(self.parts())
        times = [times_ms for _, times_ms in parts]
        return KeyedRows.concat([rows for rows, _ in parts]), np.concatenate([np.empty(0, np.uint64), *times])

    def times_of(self, keys: U64) -> U64:
        """Return the redelivery times of distinct keys (Unix ms), 0 for a key that is not NACKED. O(n)."""
        times = np.zeros(len(keys), np.uint64)
        order = np.argsort(keys)
        asked = keys[order]
        for part, start in self.held:
            if not part.may_have(asked):
                continue
            columns = part.columns(start)
            columns = columns.take(np.isin(columns.keys, asked, kind="sort"))
            if len(columns):
                found = still_there(columns, self.departed, part.born)
                times[order[np.searchsorted(asked, found.keys)]] = found.redeliver_at_ms
        return times


class _Line:
    """Rows that arrived in due order. A row may join if it is due at `last_ms` or later."""

    def __init__(self) -> None:
        self.last_ms = 0
        # Unpacked batches, and packed runs of them
        self.batches: list[NackRun] = []
        self.packed: list[NackRun] = []


class NackTracker:
    """The NACKED positions of one subscription; `keys` is their set.

    `rows`: those that are NACKED, as `len`. `in_order_rows`: rows that came in due order, which costs no sort;
    `sorted_rows`: the others.
    """

    def __init__(self, places: PagePlaces) -> None:
        self.keys = BitMap64()
        self.in_order_rows = 0
        self.sorted_rows = 0
        self._places = places
        self.rows = 0
        self._departed = StaleNacks()
        # Entries in all runs, including stale ones
        self._entries = 0
        self._runs: dict[int, NackRun] = {}
        self._next_number = 0
        # (place of its first row, number) of each run; a place may be too early.
        self._due: list[tuple[Place, int]] = []
        self._lines: list[_Line] = []
        self._small: list[NackRun] = []
        # By how often the runs were merged
        self._tiers: list[list[NackRun]] = []
        self._merges: list[_Merge] = []
        # Runs that are still to be packed again, and the next part of the last of them
        self._repack: list[NackRun] = []
        self._repack_part = 0
        self._step_rows = 0
        self._sets_max = SETS_MAX
        # (run number, offset) of a first row that is known to count
        self._known_first: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.rows

    @property
    def size_bytes(self) -> int:
        """Size of rows and membership (bytes), without the objects that hold them. O(n)."""
        held = sum(part.size_bytes for run in self._runs.values() for part, _ in run.held())
        return held + len(self.keys.serialize())

    # ---- rows come and go

    def add(self, rows: KeyedRows, redeliver_at_ms: U64) -> None:
        """Add rows with distinct keys, in any order, with their redelivery times; replace earlier rows of the keys."""
        if not len(rows):
            return
        added = bitmap_of(rows.keys)
        replaced = self._leave(added)
        self.keys |= added
        self.rows += len(rows)
        self._entries += len(rows)
        batch = NackRunBatch(self._departed.birth(), NackColumns.of(rows, redeliver_at_ms))
        line = self._line_for(redeliver_at_ms)
        if line is None:
            self.sorted_rows += len(rows)
            self._small.append(self._new_run(batch))
            self._small = self._settled(self._small, PART_ROWS, self._to_tier)
        else:
            self.in_order_rows += len(rows)
            line.last_ms = int(redeliver_at_ms[-1])
            line.batches.append(self._new_run(batch))
            line.batches = self._settled(line.batches, LINE_ROWS, line.packed.append)
            line.packed = self._settled(line.packed, LINE_PART_ROWS, self._stays)
        self._work(len(rows) + replaced)

    def drop(self, keys: BitMap64) -> None:
        """Drop the positions of a set; ignore those that are not NACKED."""
        # If a million leave at once, the work is left to later calls.
        self._work(min(self._leave(keys), STEP_ROWS))

    def _leave(self, keys: BitMap64) -> int:
        if not self.keys.intersect(keys):
            return 0
        hit = self.keys & keys
        self.keys -= hit
        self.rows -= len(hit)
        self._known_first = None
        self._departed.leave(hit)
        if not self.keys:
            self._clear()
        return len(hit)

    def _clear(self) -> None:
        """Drop all runs, since no entry counts."""
        self._runs, self._due = {}, []
        self._lines, self._small, self._tiers, self._merges, self._repack = [], [], [], [], []
        self._entries = self._step_rows = 0
        self._departed.clear()

    def _line_for(self, times: U64) -> _Line | None:
        """Return the line whose last row is the latest one not after the first time, or None to sort the rows."""
        if bool((times[1:] < times[:-1]).any()):
            return None
        first_ms = int(times[0])
        fitting = [line for line in self._lines if line.last_ms <= first_ms]
        if fitting:
            return max(fitting, key=lambda line: line.last_ms)
        if len(self._lines) == LINES_MAX:
            self._lines = [line for line in self._lines if any(map(len, (*line.batches, *line.packed)))]
        if len(self._lines) == LINES_MAX:
            return None
        self._lines.append(_Line())
        return self._lines[-1]

    # ---- rows come due

    def next_due_ms(self) -> int | None:
        """Return when the next row is due (Unix ms), or None if none is NACKED.

        The time may be too early if many entries at the front are stale.
        """
        passes = 0
        while self._due:
            run = self._first_run()
            if run is None:
                continue
            if not self._departed or self._known_first == (run.number, run.offset) or passes == PASSES_MAX:
                return run.next_place(self._places)[0]
            passes += 1
            run.prepare(self._places)
            first = run.first(min(len(run.parts[0]) - run.offset, STEP_ROWS))
            mask = self._departed.still_there(first.keys, run.parts[0].born)
            departed_rows = 0 if mask is None else int(np.argmax(mask)) if mask.any() else len(mask)
            if not departed_rows:
                self._known_first = (run.number, run.offset)
            else:
                self._entries -= departed_rows
                run.advance(departed_rows)
        return None

    def _first_run(self) -> NackRun | None:
        """Return the run that is due first, or None if the first entry was outdated and has been corrected."""
        place, number = self._due[0]
        run = self._runs.get(number)
        if run is None or not len(run):
            heapq.heappop(self._due)
            self._runs.pop(number, None)
            return None
        if run.next_place(self._places) != place:
            heapq.heapreplace(self._due, (run.next_place(self._places), number))
            return None
        return run

    def take_due(self, now_ms: int, limit: int) -> tuple[KeyedRows, U64]:
        """Take at most `limit` due rows in the order (redelivery time, ledger, entry), with their times.

        Reads only what is due. The result is empty if nothing is due, or if everything read within the limit of passes
        was stale; in the latter case `next_due_ms` still reports that there may be more.
        """
        self._known_first = None
        columns = NackColumns.concat([])
        for _ in range(PASSES_MAX if limit > 0 else 0):
            runs = self._due_runs(now_ms, limit)
            if not runs:
                break
            taken = take_first(runs, now_ms, limit, self._places, self._departed)
            self._entries -= taken.read_rows
            columns = taken.columns
            for run in runs:
                if len(run):
                    heapq.heappush(self._due, (run.next_place(self._places), run.number))
                else:
                    del self._runs[run.number]
            if len(columns):
                break
        if len(columns):
            self.rows -= len(columns)
            self.keys -= bitmap_of(columns.keys)
        if not self.rows and self._runs:
            self._clear()
        self._work(0)
        return columns.keyed(self._places), columns.redeliver_at_ms

    def _due_runs(self, now_ms: int, limit: int) -> list[NackRun]:
        """Take out the runs that may have one of the next due rows. The caller must put them back."""
        runs: list[NackRun] = []
        bound: Place = (now_ms, _U64_MAX, _U64_MAX)
        while self._due and self._due[0][0] <= bound:
            run = self._first_run()
            if run is None:
                continue
            if not run.is_packed:
                run.prepare(self._places)
                continue
            heapq.heappop(self._due)
            runs.append(run)
            if run.due_rows(now_ms) > limit:
                # Rows after the most that may be taken need not be read.
                bound = min(bound, run.place_of(limit - 1, self._places))
        return runs

    # ---- runs

    def _register(self, run: NackRun) -> None:
        """Give the run a number and add it to those that are read."""
        self._next_number += 1
        run.number = self._next_number
        self._runs[run.number] = run
        if len(self._due) > 2 * len(self._runs) + SMALL_RUNS_MAX:
            # Many runs were merged since, and the times of their entries may be far away.
            self._due = [(each.next_place(self._places), each.number) for each in self._runs.values() if len(each)]
            heapq.heapify(self._due)
        else:
            heapq.heappush(self._due, (run.next_place(self._places), run.number))

    def _new_run(self, batch: NackRunBatch) -> NackRun:
        run = NackRun(batch)
        self._register(run)
        return run

    def _settled(
        self, runs: Sequence[NackRun], enough_rows: int, take_over: Callable[[NackRun], None]
    ) -> list[NackRun]:
        """Return fewer runs; once they have enough rows, merge them all and pass the result to `take_over`."""
        runs = [run for run in runs if len(run)]
        if sum(map(len, runs)) >= enough_rows:
            merged = self._merged(runs, enough_rows)
            if merged is not None:
                take_over(merged)
            return []
        if len(runs) <= SMALL_RUNS_MAX:
            return runs
        # Runs of about one size, so that a row is merged few times
        by_size: dict[int, list[NackRun]] = {}
        for run in runs:
            by_size.setdefault(len(run).bit_length() // SIZE_BITS, []).append(run)
        group = max(by_size.values(), key=len)
        merged = self._merged(group, enough_rows)
        return [run for run in runs if len(run)] + ([] if merged is None else [merged])

    def _merged(self, runs: Sequence[NackRun], part_rows: int) -> NackRun | None:
        """Merge what still counts of the runs, some thousands of rows, and empty them. Return None if none does."""
        if len(runs) == 1 and runs[0].is_packed:
            return runs[0]
        parts = []
        for run in sorted(runs, key=lambda each: each.next_place(self._places)):
            for part, start in run.held():
                columns = part.columns(start)
                mask = self._departed.still_there(columns.keys, part.born)
                parts.append(columns if mask is None else columns.take(mask))
            self._entries -= len(run)
            del self._runs[run.number]
            run.clear()
        columns = NackColumns.concat(parts)
        if not len(columns):
            return None
        self._entries += len(columns)
        merged = NackRun()
        merged.append(self._packed(columns, part_rows))
        self._register(merged)
        return merged

    def _packed(self, columns: NackColumns, part_rows: int) -> list[PackedRows]:
        born = self._departed.birth()
        parts = max(1, round(len(columns) / part_rows))
        if parts == 1:
            return pack(columns, self._places, born)
        order = np.array_split(due_order(columns, self._places), parts)
        return [packed for index in order for packed in pack(columns.take(index), self._places, born)]

    def _to_tier(self, run: NackRun, tier: int = 0) -> None:
        if tier == len(self._tiers):
            self._tiers.append([])
        runs = [each for each in self._tiers[tier] if len(each)] + [run]
        if len(runs) >= FAN_OUT:
            self._merges.append(_Merge(tier + 1, runs, NackRun()))
            runs = []
        self._tiers[tier] = runs

    def _stays(self, run: NackRun) -> None:
        """Mark a run as alone: rows that arrived in order need not be merged as long as they are many."""
        run.is_alone = True

    # ---- deferred work

    def _work(self, rows: int) -> None:
        """Take some steps of the deferred work, in proportion to the rows that arrived or left."""
        if self._departed:
            self._look_at_departed()
        self._step_rows += STEP_ROWS_PER_ROW * rows
        if not self._repack and not self._merges:
            self._step_rows = 0
        for _ in range(min(self._step_rows // STEP_ROWS, 1 + rows // STEP_ROWS)):
            self._known_first = None
            self._step_rows -= STEP_ROWS
            if self._repack:
                self._repack_step()
            elif self._merges:
                self._merge_step()

    def _look_at_departed(self) -> None:
        if self._entries == self.rows:
            self._departed.clear()
        elif self._entries > 2 * self.rows + DEPARTED_ROWS_MIN and not self._repack:
            self._repack = list(self._runs.values())
            self._repack_part = 0
            self._step_rows += self._entries
        if len(self._departed) > self._sets_max:
            self._departed.forget(part.born for run in self._runs.values() for part, _ in run.held())
            self._sets_max = max(SETS_MAX, 2 * len(self._departed))

    def _repack_step(self) -> None:
        """Leave the stale entries out of one part."""
        while self._repack:
            run = self._repack[-1]
            if self._repack_part < len(run.parts):
                parts, left_rows = run.rewrite(self._repack_part, self._places, self._departed)
                self._entries -= left_rows
                self._repack_part += parts
                return
            self._repack.pop()
            self._repack_part = 0
            if not len(run):
                self._runs.pop(run.number, None)
            elif run.is_alone and len(run) < PART_ROWS // FAN_OUT:
                run.is_alone = False
                self._small.append(run)

    def _merge_step(self) -> None:
        """Move the first rows of a merge over. Merges of the smallest runs go first, since they are most frequent."""
        merge = min(self._merges, key=lambda each: each.tier)
        sources = [run for run in merge.sources if len(run)]
        if not sources:
            self._merges.remove(merge)
            if len(merge.run):
                self._to_tier(merge.run, merge.tier)
            return
        taken = take_first(sources, _U64_MAX, STEP_ROWS, self._places, self._departed)
        for run in sources:
            if not len(run):
                self._runs.pop(run.number, None)
        self._entries -= taken.read_rows - len(taken.columns)
        if len(taken.columns):
            merge.run.append(pack(taken.columns, self._places, self._departed.birth()))
            if merge.run.number not in self._runs:
                self._register(merge.run)

    # ---- frozen copies

    def freeze(self) -> FrozenNacks:
        """Return the negative acknowledgements as they are now, for a thread. O(runs)."""
        held = tuple(each for run in self._runs.values() for each in run.held())
        return FrozenNacks(held, self._departed.freeze(), self._places)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Merge:
    """Runs of one tier, and the run of the next tier that they become, which has their first rows already."""

    tier: int
    sources: list[NackRun]
    run: NackRun
