"""Keeps the positions that were delivered and are not acknowledged yet.

The table maps a key to its due time at delivery, its dispatcher, and the time since which that holds it. A dispatcher
is a stream or a lease, which has a number of its own. Others decide on permits, order, acknowledgements
(`subscription_state`, `index`) and time-outs; `key_share` follows the rows of each hash as a watcher.

A dispatcher mostly acknowledges whole batches as they came, one or several at a time. The latest batches are kept as
delivered and found by their first key. All other rows are in a few runs sorted by key, each at least twice as long as
the next. A row that leaves is marked, and a run without living rows is dropped. So taking positions costs a few binary
searches and no object a row.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.index.position_keys import KeyedRows, Mask, bitmap_of, contained, firsts, keys_of
from daemon.core.index.runs import earliest, first_time_ms
from storage_backends.formats.row_columns import U32, U64

Places = npt.NDArray[np.intp]

# Batches that are kept as delivered. Beyond that the oldest are sorted in, several together since each may be of one
# row.
BATCHES_MAX = 1024
BATCHES_SORTED_IN = 512


class Watcher(Protocol):
    """A watcher that is called with rows that enter and leave the table, and their dispatchers, u32[n]."""

    def came(self, rows: KeyedRows, dispatchers: U32) -> None: ...

    def claimed(self, rows: KeyedRows, dispatchers: U32) -> None:
        """Note rows that left by a request or a time-out: a decision on them is about to be staged."""
        ...

    def returned(self, rows: KeyedRows, dispatchers: U32) -> None:
        """Note rows that left otherwise: nothing has to become durable."""
        ...

    def taken_back(self, rows: KeyedRows, dispatchers: U32) -> None:
        """Note rows that left while their dispatchers do not know it yet."""
        ...


class _Leaving(enum.Enum):
    """Why rows leave the table, see `Watcher`."""

    CLAIMED = enum.auto()
    RETURNED = enum.auto()
    TAKEN_BACK = enum.auto()


@dataclasses.dataclass(frozen=True, eq=False)
class _Batch:
    """Rows delivered together. `alive` is the mask of those in flight; None means all.

    `dispatcher` is one for all rows, or one for each.
    """

    rows: KeyedRows
    dispatcher: int | U32
    since_ms: int
    alive: Mask | None = None

    @functools.cached_property
    def dispatchers(self) -> U32:
        return np.broadcast_to(np.asarray(self.dispatcher, np.uint32), len(self.rows))

    @functools.cached_property
    def keys(self) -> BitMap64:
        return bitmap_of(self.living.rows.keys)

    @property
    def living(self) -> _Batch:
        """The batch reduced to the rows that are in flight."""
        if self.alive is None:
            return self
        return _Batch(self.rows.take(self.alive), self.dispatchers[self.alive], self.since_ms)

    def without(self, left: Mask) -> tuple[int, _Batch] | None:
        """Return (first key, batch) without the rows that left, or None if none is in flight."""
        alive = ~left if self.alive is None else self.alive & ~left
        first = int(alive.argmax())
        return (int(self.rows.keys[first]), dataclasses.replace(self, alive=alive)) if alive[first] else None


@dataclasses.dataclass(slots=True)
class _Run:
    rows: KeyedRows
    dispatcher: U32
    since_ms: U64
    alive: Mask
    living: int
    # No living row is held since an earlier time (ms).
    oldest_ms: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Taken:
    """Rows removed for a request, and their places in it."""

    hits: Places
    rows: KeyedRows


class InFlight:
    """The IN_FLIGHT positions of one subscription. `watcher` is None at first."""

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        # First key -> batch, in the order of delivery
        self._batches: dict[int, _Batch] = {}
        self._runs: list[_Run] = []
        self._living = 0
        self._held: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return self._living

    def first_due_ms(self, from_ms: int = 0) -> int | None:
        """Return the earliest due time of its rows from a time on (Unix ms), or None if there is none."""
        times = [batch.living.rows.rows.deliver_at_ms for batch in self._batches.values()]
        times += [run.rows.rows.deliver_at_ms[run.alive] for run in self._runs if run.living]
        return earliest(*[first_time_ms(each, from_ms) for each in times])

    def held_rows(self, dispatcher: int) -> int:
        """Return how many positions a dispatcher holds."""
        return self._held[dispatcher]

    def add(self, rows: KeyedRows, dispatcher: int | U32, *, elapsed_ms: int = 0) -> None:
        """Add rows, in any order, none of which is in the table.

        `dispatcher` is one for all rows, or one for each. `elapsed_ms` is the time now by a clock that never steps
        (ms).
        """
        count = len(rows.keys)
        if not count:
            return
        batch = _Batch(rows, dispatcher, elapsed_ms)
        if isinstance(dispatcher, int):
            self._held[dispatcher] += count
        else:
            for number, held_rows in _counted(dispatcher):
                self._held[number] += held_rows
        self._living += count
        self._batches[int(rows.keys[0])] = batch
        if self.watcher is not None:
            self.watcher.came(rows, batch.dispatchers)
        if len(self._batches) > BATCHES_MAX:
            oldest = list(itertools.islice(self._batches, BATCHES_SORTED_IN))
            self._sort_in([self._batches.pop(first_key) for first_key in oldest])

    def _sort_in(self, whole: Sequence[_Batch]) -> None:
        batches = [batch.living for batch in whole]
        rows = KeyedRows.concat([batch.rows for batch in batches]).compact()
        order = np.argsort(rows.keys)
        lengths = [len(batch.rows) for batch in batches]
        dispatcher = np.concatenate([batch.dispatchers for batch in batches])[order]
        since_ms = np.repeat(np.array([batch.since_ms for batch in batches], np.uint64), lengths)[order]
        oldest_ms = min(batch.since_ms for batch in batches)
        run = _Run(rows.take(order), dispatcher, since_ms, np.ones(len(rows), np.bool_), len(rows), oldest_ms)
        while self._runs and 2 * run.living >= self._runs[-1].living:
            run = _merged(self._runs.pop(), run)
        self._runs.append(run)

    def _sort_all_in(self) -> None:
        if self._batches:
            self._sort_in(list(self._batches.values()))
            self._batches = {}

    def take(self, keys: U64, deliver_at_ms: U64) -> Mask | None:
        """Remove the positions that are in the table with these times, each once.

        Returns the mask of those removed, or None if all were.
        """
        taken = self._take_whole(keys, deliver_at_ms, None)
        return None if taken == len(keys) else self._take_others(keys, deliver_at_ms, taken, None)

    def take_rows(self, keys: U64, deliver_at_ms: U64) -> tuple[KeyedRows, Mask]:
        """Remove the positions that are in the table with these times, each once.

        Returns (the removed rows in the order of the request, the mask of those removed).
        """
        parts: list[_Taken] = []
        taken = self._take_whole(keys, deliver_at_ms, parts)
        found = self._take_others(keys, deliver_at_ms, taken, parts)
        rows = KeyedRows.concat([part.rows for part in parts])
        if len(parts) > 1:
            rows = rows.take(np.argsort(np.concatenate([part.hits for part in parts])))
        return rows, found

    def _take_others(self, keys: U64, deliver_at_ms: U64, taken: int, parts: list[_Taken] | None) -> Mask:
        """Remove the positions behind the first `taken`, which are removed already; return the mask of all removed."""
        found = np.zeros(len(keys), np.bool_)
        found[:taken] = True
        if taken == len(keys):
            return found
        self._sort_all_in()
        for run in self._runs:
            hits, places = _found(run, keys[taken:], deliver_at_ms[taken:])
            if not len(hits):
                continue
            if parts is not None:
                parts.append(_Taken(hits + taken, run.rows.take(places)))
            self._leave(run, places, _Leaving.CLAIMED)
            found[taken:][hits] = True
            if found.all():
                break
        self._runs = [run for run in self._runs if run.living]
        return found

    def _take_whole(self, keys: U64, deliver_at_ms: U64, parts: list[_Taken] | None) -> int:
        """Remove the batches that the columns begin with, each as it was delivered; return the number of rows."""
        taken = 0
        while taken < len(keys):
            first_key = int(keys[taken])
            batch = self._batches.get(first_key)
            if batch is None or batch.alive is not None:
                break
            mine = batch.rows
            end = taken + len(mine.keys)
            # Faster for few rows than a comparison by numpy
            if mine.keys.tobytes() != keys[taken:end].tobytes():
                break
            if mine.rows.deliver_at_ms.tobytes() != deliver_at_ms[taken:end].tobytes():
                break
            del self._batches[first_key]
            if isinstance(batch.dispatcher, int) and self.watcher is None:
                self._living -= end - taken
                self._leave_one(batch.dispatcher, end - taken)
            else:
                self._left(mine, batch.dispatchers, _Leaving.CLAIMED)
            if parts is not None:
                parts.append(_Taken(np.arange(taken, end), mine))
            taken = end
        return taken

    def move(
        self, keys: U64, deliver_at_ms: U64, holders: Collection[int], dispatcher: int, *, elapsed_ms: int = 0
    ) -> Mask:
        """Move to a dispatcher the positions with these times that one of the holders holds; return their mask.

        They are held since `elapsed_ms` from then on.
        """
        self._sort_all_in()
        among = np.fromiter(holders, np.uint32, len(holders))
        moved = np.zeros(len(keys), np.bool_)
        for run in self._runs:
            hits, places = _found(run, keys, deliver_at_ms)
            held = np.isin(run.dispatcher[places], among)
            hits, places = hits[held], places[held]
            self._count_left(run.dispatcher[places])
            run.dispatcher[places] = dispatcher
            run.since_ms[places] = elapsed_ms
            moved[hits] = True
        moved_rows = int(np.count_nonzero(moved))
        if moved_rows:
            self._held[dispatcher] += moved_rows
        return moved

    def touch(self, keys: U64, deliver_at_ms: U64, holders: Collection[int], *, elapsed_ms: int) -> Mask:
        """Hold the positions with these times since `elapsed_ms`, if one of the holders has them; return their mask."""
        self._sort_all_in()
        among = np.fromiter(holders, np.uint32, len(holders))
        touched = np.zeros(len(keys), np.bool_)
        for run in self._runs:
            hits, places = _found(run, keys, deliver_at_ms)
            held = np.isin(run.dispatcher[places], among)
            run.since_ms[places[held]] = elapsed_ms
            touched[hits[held]] = True
        return touched

    def take_dispatcher(self, dispatcher: int) -> KeyedRows:
        """Remove and return what a dispatcher holds."""
        return self.take_dispatchers((dispatcher,))

    def take_dispatchers(self, dispatchers: Collection[int]) -> KeyedRows:
        """Remove and return what any of the dispatchers holds."""
        holders = [number for number in dispatchers if self._held[number]]
        if not holders:
            return KeyedRows.empty()
        among = np.array(holders, np.uint32)
        rows, _ = self._take_from_runs(lambda _, dispatchers: np.isin(dispatchers, among), _Leaving.RETURNED)
        return KeyedRows.concat([*self._take_from_batches(among), rows])

    def _take_from_batches(self, dispatchers: U32) -> list[KeyedRows]:
        """Remove what the dispatchers hold of the batches. The rest stays, since sorting it all in would take long."""
        columns = [batch.dispatchers for batch in self._batches.values()]
        if not columns:
            return []
        theirs = np.isin(np.concatenate(columns), dispatchers)
        taken: list[KeyedRows] = []
        whose: list[U32] = []
        kept, first = {}, 0
        for first_key, batch in self._batches.items():
            chosen = theirs[first : first + len(batch.rows)]
            first += len(batch.rows)
            if batch.alive is not None:
                chosen &= batch.alive
            if not chosen.any():
                kept[first_key] = batch
                continue
            places = np.flatnonzero(chosen)
            taken.append(batch.rows.take(places))
            whose.append(batch.dispatchers[places])
            if (left := batch.without(chosen)) is not None:
                kept[left[0]] = left[1]
        self._batches = kept
        self._left(KeyedRows.concat(taken), np.concatenate([np.empty(0, np.uint32), *whose]), _Leaving.RETURNED)
        return taken

    def take_keys(self, keys: BitMap64) -> KeyedRows:
        """Remove and return the positions of a set, whichever dispatcher holds them."""
        return self.take_where(lambda rows, _: contained(rows.keys, keys))[0]

    def oldest_since_ms(self) -> int | None:
        """Return a lower bound of the times since which positions are held (ms), or None without any."""
        first = next(iter(self._batches.values()), None)
        return earliest(None if first is None else first.since_ms, *[run.oldest_ms for run in self._runs if run.living])

    def take_since(self, before_ms: int, limit: int, *, staying: BitMap64) -> KeyedRows:
        """Remove and return about `limit` positions that have been held since `before_ms` or longer.

        Positions in `staying` are left in the table.
        """
        taken: list[KeyedRows] = []
        rows = 0
        if staying:
            self._sort_all_in()
        while rows < limit and self._batches:
            first_key, batch = next(iter(self._batches.items()))
            if batch.since_ms > before_ms:
                break
            del self._batches[first_key]
            batch = batch.living
            self._left(batch.rows, batch.dispatchers, _Leaving.CLAIMED)
            taken.append(batch.rows)
            rows += len(batch.rows)
        for run in self._runs:
            if rows >= limit or run.oldest_ms > before_ms:
                continue
            overdue = run.alive & (run.since_ms <= np.uint64(before_ms))
            if staying:
                overdue &= ~contained(run.rows.keys, staying)
            chosen = np.flatnonzero(overdue)[: limit - rows]
            taken.append(run.rows.take(chosen))
            rows += len(chosen)
            self._leave(run, chosen, _Leaving.CLAIMED)
            run.oldest_ms = int(run.since_ms[run.alive].min()) if run.living else 0
        self._runs = [run for run in self._runs if run.living]
        return KeyedRows.concat(taken)

    def find(self, keys: BitMap64) -> KeyedRows:
        """Return the positions that are in the table, by ascending key, without removing them."""
        self._sort_all_in()
        found = []
        for run in self._runs:
            chosen = np.flatnonzero(contained(run.rows.keys, keys) & run.alive)
            found.append(run.rows.take(chosen))
        rows = KeyedRows.concat(found)
        return rows.take(np.argsort(rows.keys))

    def among(self, keys: BitMap64) -> BitMap64:
        """Return the subset of the positions that are in the table."""
        found = BitMap64.union(BitMap64(), *[batch.keys & keys for batch in self._batches.values()])
        asked = keys_of(keys)
        for run in self._runs:
            places = np.searchsorted(run.rows.keys, asked)
            places[places == len(run.rows)] = 0
            found |= bitmap_of(asked[(run.rows.keys[places] == asked) & run.alive[places]])
        return found

    def holders_of(self, keys: U64) -> U32:
        """Return the dispatcher that holds each position, 0 if it is not in the table."""
        self._sort_all_in()
        holders = np.zeros(len(keys), np.uint32)
        for run in self._runs:
            places = np.searchsorted(run.rows.keys, keys)
            places[places == len(run.rows)] = 0
            here = (run.rows.keys[places] == keys) & run.alive[places]
            holders[here] = run.dispatcher[places[here]]
        return holders

    def are_held(self, rows: KeyedRows, dispatchers: U32) -> Mask:
        """Return the mask of deliveries that are in the table: the position with this time, count and dispatcher."""
        whole = self._batches.get(int(rows.keys[0])) if len(rows) else None
        if whole is not None and whole.alive is None and np.array_equal(whole.rows.keys, rows.keys):
            return _are_same(whole.rows, whole.dispatchers, rows, dispatchers)
        self._sort_all_in()
        held = np.zeros(len(rows), np.bool_)
        for run in self._runs:
            places = np.searchsorted(run.rows.keys, rows.keys)
            places[places == len(run.rows)] = 0
            here = np.flatnonzero((run.rows.keys[places] == rows.keys) & run.alive[places])
            places = places[here]
            held[here] = _are_same(run.rows.take(places), run.dispatcher[places], rows.take(here), dispatchers[here])
        return held

    def keys(self) -> BitMap64:
        """Return all positions of the table."""
        sorted_in = [bitmap_of(run.rows.keys[run.alive]) for run in self._runs]
        return BitMap64.union(BitMap64(), *sorted_in, *[batch.keys for batch in self._batches.values()])

    def take_where(self, condition: Callable[[KeyedRows, U32], Mask]) -> tuple[KeyedRows, U32]:
        """Remove the positions for which the condition holds. O(n).

        Returns (the rows in any order, the dispatcher that held each). `condition` is called with rows and their
        dispatchers; some of the rows have left already.
        """
        self._sort_all_in()
        return self._take_from_runs(condition, _Leaving.RETURNED)

    def take_back_where(self, condition: Callable[[KeyedRows, U32], Mask]) -> tuple[KeyedRows, U32]:
        """Remove positions as `take_where`, of which their dispatchers have to be told."""
        self._sort_all_in()
        return self._take_from_runs(condition, _Leaving.TAKEN_BACK)

    def _take_from_runs(self, condition: Callable[[KeyedRows, U32], Mask], leaving: _Leaving) -> tuple[KeyedRows, U32]:
        taken, holders = [], [np.empty(0, np.uint32)]
        for run in self._runs:
            chosen = np.flatnonzero(condition(run.rows, run.dispatcher) & run.alive)
            if len(chosen):
                taken.append(run.rows.take(chosen))
                holders.append(run.dispatcher[chosen])
                self._leave(run, chosen, leaving)
        self._runs = [run for run in self._runs if run.living]
        return KeyedRows.concat(taken), np.concatenate(holders)

    def _leave(self, run: _Run, places: Places, leaving: _Leaving) -> None:
        run.alive[places] = False
        run.living -= len(places)
        left = run.rows.take(places) if self.watcher is not None else None
        self._left(left, run.dispatcher[places], leaving)

    def _left(self, rows: KeyedRows | None, dispatchers: U32, leaving: _Leaving) -> None:
        """Count rows out and call the watcher with `rows`, which is None if there is no watcher."""
        self._living -= len(dispatchers)
        self._count_left(dispatchers)
        if self.watcher is not None and rows is not None and len(rows):
            match leaving:
                case _Leaving.CLAIMED:
                    self.watcher.claimed(rows, dispatchers)
                case _Leaving.RETURNED:
                    self.watcher.returned(rows, dispatchers)
                case _Leaving.TAKEN_BACK:
                    self.watcher.taken_back(rows, dispatchers)

    def _count_left(self, dispatchers: U32) -> None:
        for number, held_rows in _counted(dispatchers):
            self._leave_one(number, held_rows)

    def _leave_one(self, dispatcher: int, rows: int) -> None:
        self._held[dispatcher] -= rows
        if not self._held[dispatcher]:
            del self._held[dispatcher]


def _counted(dispatchers: U32) -> list[tuple[int, int]]:
    """Return how many rows each of the dispatchers has."""
    if not len(dispatchers):
        return []
    if not dispatchers.strides[0] or (dispatchers == dispatchers[0]).all():
        return [(int(dispatchers[0]), len(dispatchers))]
    numbers, counts = np.unique(dispatchers, return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True))


def _found(run: _Run, keys: U64, deliver_at_ms: U64) -> tuple[Places, Places]:
    """Find the keys that are in a run with these times, each once: (places in the request, places in the run)."""
    places = np.searchsorted(run.rows.keys, keys)
    places[places == len(run.rows)] = 0
    hit = run.rows.keys[places] == keys
    hit &= run.rows.rows.deliver_at_ms[places] == deliver_at_ms
    hit &= run.alive[places]
    hits = np.flatnonzero(hit)
    named = places[hits]
    if not (named[1:] > named[:-1]).all():
        # If a key is named twice, the first one is used.
        hits = hits[firsts(keys[hits])]
    return hits, places[hits]


def _are_same(rows: KeyedRows, holders: U32, delivered: KeyedRows, dispatchers: U32) -> Mask:
    """Return the mask of rows that are these deliveries. Both have the same positions, in one order."""
    same: Mask = rows.rows.deliver_at_ms == delivered.rows.deliver_at_ms
    if rows.redelivery_count is not None or delivered.redelivery_count is not None:
        same &= rows.counts() == delivered.counts()
    same &= holders == dispatchers
    return same


def _merged(one: _Run, other: _Run) -> _Run:
    rows = KeyedRows.concat([one.rows.take(one.alive), other.rows.take(other.alive)]).compact()
    dispatcher = np.concatenate([one.dispatcher[one.alive], other.dispatcher[other.alive]])
    since_ms = np.concatenate([one.since_ms[one.alive], other.since_ms[other.alive]])
    order = np.argsort(rows.keys, kind="stable")
    alive = np.ones(len(rows), np.bool_)
    oldest_ms = min(one.oldest_ms, other.oldest_ms)
    return _Run(rows.take(order), dispatcher[order], since_ms[order], alive, len(rows), oldest_ms)
