"""Positions that were handed out and are not acknowledged yet.

Owns: the table from key to the time a position was handed out with, and to the dispatcher that holds it.
Does not own: permits, order and what an acknowledgement does (`subscription`, `index`).

A table is a few runs sorted by key, each at least twice as long as the next; a row that leaves is marked, and a run
without living rows is dropped, so that adding and taking a batch costs a few binary searches and no object a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.positions import KeyedRows, bitmap_of, contained

Mask = npt.NDArray[np.bool_]


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

    def __len__(self) -> int:
        return self._living

    def add(self, rows: KeyedRows, dispatcher: int) -> None:
        """Rows none of which is in the table, in any order."""
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
            places = np.searchsorted(run.rows.keys, keys)
            places[places == len(run.rows)] = 0
            hit = run.rows.keys[places] == keys
            hit &= run.rows.rows.deliver_at_ms[places] == deliver_at_ms
            hit &= run.alive[places]
            if not hit.any():
                continue
            hits = np.flatnonzero(hit)
            _, first = np.unique(places[hits], return_index=True)
            hits = hits[first]
            run.alive[places[hits]] = False
            run.living -= len(hits)
            self._living -= len(hits)
            found[hits] = True
            if found.all():
                break
        self._runs = [run for run in self._runs if run.living]
        return found

    def take_dispatcher(self, dispatcher: int) -> KeyedRows:
        """Removes and returns what a dispatcher holds."""
        return self._take_where(lambda run: run.dispatcher == dispatcher)

    def take_keys(self, keys: BitMap64) -> KeyedRows:
        """Removes and returns the positions of a set, whoever holds them."""
        return self._take_where(lambda run: contained(run.rows.keys, keys))

    def keys(self) -> BitMap64:
        """All positions of the table."""
        return BitMap64.union(BitMap64(), *[bitmap_of(run.rows.keys[run.alive]) for run in self._runs])

    def _take_where(self, condition: object) -> KeyedRows:
        taken = []
        for run in self._runs:
            chosen = condition(run) & run.alive  # type: ignore[operator]
            count = int(chosen.sum())
            if count:
                taken.append(run.rows.take(chosen))
                run.alive &= ~chosen
                run.living -= count
                self._living -= count
        self._runs = [run for run in self._runs if run.living]
        return KeyedRows.concat(taken)


def _merged(one: _Run, other: _Run) -> _Run:
    rows = KeyedRows.concat([one.rows.take(one.alive), other.rows.take(other.alive)])
    dispatcher = np.concatenate([one.dispatcher[one.alive], other.dispatcher[other.alive]])
    order = np.argsort(rows.keys, kind="stable")
    return _Run(rows.take(order), dispatcher[order], np.ones(len(rows), np.bool_), len(rows))
