"""Decides adds, cancellations and reschedules by schedule id.

The rows of a request count as if they came one by one: `KEEP` stores the first row of an id unless a row with that id
is there, `REPLACE` the last one. The position decides first: a row whose position is there is a duplicate, and changes
nothing under its id. Ids and positions have numbers here; `id_map` finds the rows, and `topic_state` makes the records.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import numpy as np

from daemon.core.index.column_runs import Mask, Places
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.id_map import FoundRows
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U32, U64

ROWS_TAKEN_OUT_MAX: Final = 100_000
"""The most rows that one request by id takes out."""


def distinct_ids(hashes: IdHashes) -> tuple[IdHashes, Places]:
    """Return (the distinct ids, the place among these of each of n ids)."""
    order = np.lexsort((hashes.low, hashes.high))
    high, low = hashes.high[order], hashes.low[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    places = np.empty(len(order), np.intp)
    places[order] = np.cumsum(is_new) - 1
    return IdHashes(high[is_new], low[is_new]), places


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowsWithIds:
    """The rows of an add, all with ids: columns of n rows.

    `ids` are places among its distinct ids, of which there are `ids_count`. `keys` are equal if positions are; assigned
    positions differ from all others. `live` is the mask of rows that are neither returned nor refused, and `taken` that
    of positions that have a row, applied or staged.
    """

    ids: Places
    ids_count: int
    keys: U64
    live: Mask
    taken: Mask

    def __len__(self) -> int:
        return len(self.ids)


class DecidedRows(NamedTuple):
    """The decision on an add. Rows are places in the request, ascending.

    `stored` are stored, `duplicates` have positions that are there, and `replaced` were replaced by later rows of the
    request. `kept` are not stored because of the row at `kept_by`: a place among the rows found, or that of an earlier
    row of the request plus the number of rows found. `leaving` is the mask of found rows that are replaced.
    """

    stored: Places
    duplicates: Places
    kept: Places
    kept_by: Places
    replaced: Places
    leaving: Mask


_NO_ROWS = np.empty(0, np.intp)


def decide_keep(rows: RowsWithIds, found: FoundRows) -> DecidedRows:
    """Decide an add with `KEEP`. `found` has a row of each id that is there, applied or staged."""
    found_of = np.full(rows.ids_count, -1, np.intp)
    # In reverse order the first row of an id comes last and stays.
    found_of[found.asked[::-1]] = np.arange(found.rows)[::-1]
    nothing = np.zeros(found.rows, np.bool_)
    if _are_distinct(rows):
        fresh = rows.live & ~rows.taken
        kept_by = found_of[rows.ids]
        kept = np.flatnonzero(fresh & (kept_by >= 0))
        stored = np.flatnonzero(fresh & (kept_by < 0))
        return DecidedRows(stored, np.flatnonzero(rows.live & rows.taken), kept, kept_by[kept], _NO_ROWS, nothing)
    holders = {each: place for each, place in enumerate(found_of.tolist()) if place >= 0}
    stored_keys: set[int] = set()
    told: dict[str, list[int]] = {"stored": [], "duplicates": [], "kept": [], "kept_by": []}
    for row, key, each, taken in _live_rows(rows):
        if taken or key in stored_keys:
            told["duplicates"].append(row)
        elif each in holders:
            told["kept"].append(row)
            told["kept_by"].append(holders[each])
        else:
            told["stored"].append(row)
            stored_keys.add(key)
            holders[each] = found.rows + row
    return DecidedRows(
        **{name: np.array(listed, np.intp) for name, listed in told.items()}, replaced=_NO_ROWS, leaving=nothing
    )


def decide_replace(rows: RowsWithIds, found: FoundRows) -> DecidedRows:
    """Decide an add with `REPLACE`. `found` has all rows that are there under the ids; those that wait may leave.

    Nothing that is staged names the ids. The caller has refused the request if more than `ROWS_TAKEN_OUT_MAX` rows
    wait under them; raises InvariantViolated if some rows were not found for that reason.
    """
    if found.complete < rows.ids_count:
        raise InvariantViolated(f"a REPLACE of {rows.ids_count} ids is decided by the rows of {found.complete}")
    frees = found.keys[found.leave]
    if _are_distinct(rows) and not np.isin(rows.keys[rows.live & rows.taken], frees).any():
        fresh = rows.live & ~rows.taken
        is_replaced = np.zeros(rows.ids_count, np.bool_)
        is_replaced[rows.ids[fresh]] = True
        duplicates = np.flatnonzero(rows.live & rows.taken)
        leaving = found.leave & is_replaced[found.asked]
        return DecidedRows(np.flatnonzero(fresh), duplicates, _NO_ROWS, _NO_ROWS, _NO_ROWS, leaving)
    return _replaced_one_by_one(rows, found)


def _replaced_one_by_one(rows: RowsWithIds, found: FoundRows) -> DecidedRows:
    """Decide rows of which one may be under the id, or at the position, of an earlier one."""
    leave_under: dict[int, list[int]] = {}
    for place in np.flatnonzero(found.leave).tolist():
        leave_under.setdefault(int(found.asked[place]), []).append(place)
    leaving = np.zeros(found.rows, np.bool_)
    freed: set[int] = set()
    # Key -> row, and id -> row, of what is stored as things stand
    at: dict[int, int] = {}
    under: dict[int, int] = {}
    duplicates, replaced = [], []
    for row, key, each, taken in _live_rows(rows):
        if key in at or (taken and key not in freed):
            duplicates.append(row)
            continue
        places = leave_under.pop(each, [])
        leaving[places] = True
        freed.update(found.keys[places].tolist())
        if each in under:
            earlier = under[each]
            replaced.append(earlier)
            del at[int(rows.keys[earlier])]
        at[key] = under[each] = row
    stored = np.array(sorted(at.values()), np.intp)
    return DecidedRows(
        stored, np.array(duplicates, np.intp), _NO_ROWS, _NO_ROWS, np.array(sorted(replaced), np.intp), leaving
    )


def _live_rows(rows: RowsWithIds) -> list[tuple[int, int, int, bool]]:
    """Return (row, key, id, whether its position has a row) of the rows that count, in order."""
    live = np.flatnonzero(rows.live)
    columns = (live, rows.keys[live], rows.ids[live], rows.taken[live])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _are_distinct(rows: RowsWithIds) -> bool:
    """Return whether no two rows that count have one id or one position."""
    ids, keys = rows.ids[rows.live], rows.keys[rows.live]
    return len(np.unique(ids)) == len(ids) and len(np.unique(keys)) == len(keys)


class DecidedIds(NamedTuple):
    """The decision on a cancellation or reschedule by ids: `leaving` are the places of found rows that leave.

    `not_found`, `already_due` and `in_flight` are places of ids, ascending, by the furthest state of a row. `complete`
    is the number of ids, from the first on, that are decided; a repeat takes the others.
    """

    leaving: Places
    not_found: U32
    already_due: U32
    in_flight: U32
    complete: int


def decide_withdrawal(found: FoundRows, ids: int, *, due: Mask, held: Mask) -> DecidedIds:
    """Decide what leaves under distinct ids.

    `found.leave` are the rows that wait and, in a reschedule, have another time than the new one. `due` and `held` are
    the masks of found rows that are due, and at a dispatcher.
    """
    complete = found.complete
    has_rows, is_due, is_held = (np.zeros(ids, np.bool_) for _ in range(3))
    has_rows[found.asked] = True
    is_due[found.asked[due]] = True
    is_held[found.asked[held]] = True
    return DecidedIds(
        np.flatnonzero(found.leave),
        _places(~has_rows[:complete]),
        _places((is_due & ~is_held)[:complete]),
        _places(is_held[:complete]),
        complete,
    )


def _places(mask: Mask) -> U32:
    return np.flatnonzero(mask).astype(np.uint32)
