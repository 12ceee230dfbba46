"""Positions that were handed out and are not acknowledged yet.

Owns: the table from key to the time a position was handed out with, and to the dispatcher that holds it: a stream, or a
lease, which is a number of its own.
Does not own: permits, order and what an acknowledgement does (`subscription`, `index`).

A table is a few runs sorted by key, each at least twice as long as the next; a row that leaves is marked, and a run
without living rows is dropped, so that adding and taking a batch costs a few binary searches and no object a row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.positions import KeyedRows, bitmap_of, contained

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]


@dataclasses.dataclass(slots=True)
class _Run:
    rows: KeyedRows
    dispatcher: npt.NDArray[np.uint32]
    alive: Mask
    living: int


class InFlight:
    """The IN_FLIGHT positions of one subscription."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._living = 0
        self._held: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return self._living

    def held_rows(self, dispatcher: int) -> int:
        """How many positions a dispatcher holds."""
        return self._held[dispatcher]

    def add(self, rows: KeyedRows, dispatcher: int) -> None:
        """Rows none of which is in the table, in any order."""
        self._held[dispatcher] += len(rows)
        order = np.argsort(rows.keys)
        run = _Run(rows.take(order), np.full(len(rows), dispatcher, np.uint32), np.ones(len(rows), np.bool_), len(rows))
        self._living += run.living
        while self._runs and 2 * run.living >= self._runs[-1].living:
            run = _merged(self._runs.pop(), run)
        self._runs.append(run)

    def take(self, keys: npt.NDArray[np.uint64], deliver_at_ms: npt.NDArray[np.uint64]) -> Mask:
        """Removes the positions that are in the table with that time; a mask of those removed.

        A key that is named twice is removed once.
        """
        found = np.zeros(len(keys), np.bool_)
        for run in self._runs:
            hits, places = _found(run, keys, deliver_at_ms)
            if not len(hits):
                continue
            self._leave(run, places)
            found[hits] = True
            if found.all():
                break
        self._runs = [run for run in self._runs if run.living]
        return found

    def move(
        self,
        keys: npt.NDArray[np.uint64],
        deliver_at_ms: npt.NDArray[np.uint64],
        holders: Collection[int],
        dispatcher: int,
    ) -> int:
        """Gives a dispatcher the positions with that time that one of the holders holds; how many."""
        among = np.fromiter(holders, np.uint32, len(holders))
        moved_rows = 0
        for run in self._runs:
            _, places = _found(run, keys, deliver_at_ms)
            places = places[np.isin(run.dispatcher[places], among)]
            self._count(run.dispatcher[places], -1)
            run.dispatcher[places] = dispatcher
            moved_rows += len(places)
        if moved_rows:
            self._held[dispatcher] += moved_rows
        return moved_rows

    def take_dispatcher(self, dispatcher: int) -> KeyedRows:
        """Removes and returns what a dispatcher holds."""
        if not self._held[dispatcher]:
            return KeyedRows.empty()
        return self._take_where(lambda run: run.dispatcher == dispatcher)

    def take_keys(self, keys: BitMap64) -> KeyedRows:
        """Removes and returns the positions of a set, whoever holds them."""
        return self._take_where(lambda run: contained(run.rows.keys, keys))

    def keys(self) -> BitMap64:
        """All positions of the table."""
        return BitMap64.union(BitMap64(), *[bitmap_of(run.rows.keys[run.alive]) for run in self._runs])

    def _take_where(self, condition: Callable[[_Run], Mask]) -> KeyedRows:
        taken = []
        for run in self._runs:
            chosen = np.flatnonzero(condition(run) & run.alive)
            if len(chosen):
                taken.append(run.rows.take(chosen))
                self._leave(run, chosen)
        self._runs = [run for run in self._runs if run.living]
        return KeyedRows.concat(taken)

    def _leave(self, run: _Run, places: Places) -> None:
        run.alive[places] = False
        run.living -= len(places)
        self._living -= len(places)
        self._count(run.dispatcher[places], -1)

    def _count(self, dispatchers: npt.NDArray[np.uint32], sign: int) -> None:
        numbers, counts = np.unique(dispatchers, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._held[number] += sign * count
            if not self._held[number]:
                del self._held[number]


def _found(run: _Run, keys: npt.NDArray[np.uint64], deliver_at_ms: npt.NDArray[np.uint64]) -> tuple[Places, Places]:
    """The keys that are in a run with that time, each once: (their places in the request, in the run)."""
    places = np.searchsorted(run.rows.keys, keys)
    places[places == len(run.rows)] = 0
    hit = run.rows.keys[places] == keys
    hit &= run.rows.rows.deliver_at_ms[places] == deliver_at_ms
    hit &= run.alive[places]
    hits = np.flatnonzero(hit)
    found, first = np.unique(places[hits], return_index=True)
    return hits[first], found


def _merged(one: _Run, other: _Run) -> _Run:
    rows = KeyedRows.concat([one.rows.take(one.alive), other.rows.take(other.alive)])
    dispatcher = np.concatenate([one.dispatcher[one.alive], other.dispatcher[other.alive]])
    order = np.argsort(rows.keys, kind="stable")
    return _Run(rows.take(order), dispatcher[order], np.ones(len(rows), np.bool_), len(rows))
