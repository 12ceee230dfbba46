"""Deciding which rows of a request are accepted, and with which time.

Owns: a request to add and its outcome, over the indexes that it goes to.
Does not own: which indexes these are and the records (`topic`), and what is in an index (`index`).

Which rows of a request to add cannot be stored with the time that is asked for, and why.

Owns: the reasons, and the one of each row.
Does not own: what a time, a delay and a level may be (`limits`, `delay_levels`), and what becomes of the other rows
(`adding`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core import limits
from daemon.core.index.delay_levels import DelayLevels
from daemon.core.index.index import Index
from daemon.core.index.position_keys import bitmap_of, pages_of
from storage_backends.formats.row_columns import U32, U64, Rows

_Marked = tuple[npt.NDArray[np.bool_] | None, "RefusedReason"]


class RefusedReason(enum.IntEnum):
    """Why a row was not stored; numbers as in `tarry.v1.RefusedReason`."""

    # It is further ahead than the largest delay.
    DELAY_TOO_LONG = 1
    # The time can only be meant in seconds.
    TIME_IN_SECONDS = 2
    # There is no such delay level.
    DELAY_LEVEL = 3


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Refused:
    """Rows that were refused: `index`, their places in the request, ascending, and of each the reason."""

    index: U32
    reason: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.index)

    @staticmethod
    def nothing() -> Refused:
        return _NOTHING

    def others(self, rows: int) -> U32:
        """The places of a request of so many rows that are not refused, ascending."""
        kept = np.ones(rows, np.bool_)
        kept[self.index] = False
        return np.flatnonzero(kept).astype(np.uint32)


_NOTHING = Refused(np.empty(0, np.uint32), np.empty(0, np.uint8))


def refused_rows(
    deliver_at_ms: U64 | None,
    delay_ms: U64 | None,
    delay_level: npt.NDArray[np.integer[Any]] | None,
    *,
    now_ms: int,
    delay_max_ms: int,
    levels: DelayLevels,
) -> Refused:
    """The rows that a request of one of the three columns is refused for."""
    if delay_level is not None:
        unknown = levels.unknown(delay_level)
        known = delay_level if unknown is None else np.where(unknown, 0, delay_level)
        too_long = limits.above(levels.delays_of(known), delay_max_ms)
        return _refused([(unknown, RefusedReason.DELAY_LEVEL), (too_long, RefusedReason.DELAY_TOO_LONG)])
    if delay_ms is not None:
        return _refused([(limits.above(delay_ms, delay_max_ms), RefusedReason.DELAY_TOO_LONG)])
    if deliver_at_ms is None:
        return Refused.nothing()
    return _refused(
        [
            (limits.above(deliver_at_ms, now_ms + delay_max_ms), RefusedReason.DELAY_TOO_LONG),
            (limits.in_seconds(deliver_at_ms, now_ms), RefusedReason.TIME_IN_SECONDS),
        ]
    )


def _refused(marked: Sequence[_Marked]) -> Refused:
    """The rows that are marked, none of them twice."""
    found = [(mask, reason) for mask, reason in marked if mask is not None]
    if not found:
        return Refused.nothing()
    reasons = np.zeros(len(found[0][0]), np.uint8)
    for mask, reason in found:
        reasons[mask] = reason
    index = np.flatnonzero(reasons)
    return Refused(index.astype(np.uint32), reasons[index])


# Raises when the rows, those of each index, may not be added now.
Admit = Callable[[Sequence[Rows]], None]

# Rows with the delay level that they were added by, 0: none.
OfLevel = tuple[int, Rows]

_Places = npt.NDArray[np.intp]
_NO_ROWS = np.empty(0, np.uint32)
_COLUMNS = ("ledger_id", "entry_id", "deliver_at_ms", "delay_ms", "key_hash", "delay_level")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddBatch:
    """Positions to add, columns of n rows. Exactly one of `deliver_at_ms`, `delay_ms` and `delay_level` is given.

    `return_already_due`: rows whose time has come are not stored but returned. `delay_level`: as asked for, of the
    table that is in force when that is decided. `return_invalid`: rows whose time or level may not be are returned, and
    the others stored; if not, the whole batch is refused.
    """

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64 | None
    delay_ms: U64 | None
    key_hash: U32 | None
    return_already_due: bool
    delay_level: npt.NDArray[np.int32] | None = None
    return_invalid: bool = False

    def take(self, places: U32) -> AddBatch:
        """Some of the rows."""
        given = ((name, getattr(self, name)) for name in _COLUMNS)
        return dataclasses.replace(self, **{name: column[places] for name, column in given if column is not None})


class AddRow(NamedTuple):
    """One position to add, to the shared index, that is stored although its time has come. One of `deliver_at_ms` and
    `delay_ms` is given.
    """

    ledger_id: int
    entry_id: int
    deliver_at_ms: int | None
    delay_ms: int | None
    key_hash: int | None = None

    def batch(self) -> AddBatch:
        """The row as a request by itself."""

        def column(value: int | None) -> U64 | None:
            return None if value is None else np.array([value], np.uint64)

        return AddBatch(
            ledger_id=np.array([self.ledger_id], np.uint64),
            entry_id=np.array([self.entry_id], np.uint64),
            deliver_at_ms=column(self.deliver_at_ms),
            delay_ms=column(self.delay_ms),
            key_hash=None if self.key_hash is None else np.array([self.key_hash], np.uint32),
            return_already_due=False,
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddOutcome:
    """What became of a batch. `returned_index`, `raised_index`: rows of the request.

    `accepted`: rows that were stored in at least one index; `duplicates`: those that every index had a row of.
    `refused`: those that may not be stored, with `return_invalid`.
    """

    accepted: int
    duplicates: int
    returned_index: U32
    late_on_arrival: int
    raised_index: U32
    raised_deliver_at_ms: U64
    refused: Refused = dataclasses.field(default_factory=Refused.nothing)

    @staticmethod
    def nothing(refused: Refused) -> AddOutcome:
        """Returns the outcome of a batch of which every row is refused."""
        return AddOutcome(0, 0, _NO_ROWS, 0, _NO_ROWS, np.empty(0, np.uint64), refused)

    def placed(self, places: U32, refused: Refused) -> AddOutcome:
        """The outcome for the request of which only the rows at `places`, which are not refused, were decided on."""
        return dataclasses.replace(
            self,
            returned_index=places[self.returned_index],
            raised_index=places[self.raised_index],
            refused=refused,
        )


ACCEPTED = AddOutcome(1, 0, _NO_ROWS, 0, _NO_ROWS, np.empty(0, np.uint64))
DUPLICATE = dataclasses.replace(ACCEPTED, accepted=0, duplicates=1)
"""What becomes of a row that is a request by itself, and not due yet."""


def admit_all(accepted: Sequence[Rows]) -> None:
    """Where there are no quotas."""


def stage(
    batch: AddBatch,
    indexes: Sequence[Index],
    *,
    now_ms: int,
    floor_ms: int | None,
    request_limits: limits.RequestLimits,
    levels: DelayLevels,
    admit: Admit,
) -> tuple[list[list[OfLevel]], AddOutcome]:
    """Which rows each of the indexes accepts, by delay level; they are staged there. `floor_ms`: all of them are stored
    later.

    `admit` is asked before anything changes. Raises what `admit` raises, and, unless the batch has `return_invalid`,
    DelayTooLong, InvalidArgument for a level that there is not or a time in seconds.
    """
    refused = refused_of(batch, now_ms=now_ms, request_limits=request_limits, levels=levels)
    if len(refused) == len(batch.entry_id):
        return [[] for _ in indexes], AddOutcome.nothing(refused)
    places = refused.others(len(batch.entry_id)) if len(refused) else None
    accepted, outcome = _stage_valid(
        batch if places is None else batch.take(places),
        indexes,
        now_ms=now_ms,
        floor_ms=floor_ms,
        request_limits=request_limits,
        levels=levels,
        admit=admit,
    )
    return accepted, outcome if places is None else outcome.placed(places, refused)


def stage_each(rows: Rows, index: Index) -> npt.NDArray[np.bool_]:
    """Which of the rows, each a request by itself, in that order, the index accepts; these are staged there."""
    asked = _fresh_in(index, rows)
    asked.stage(asked.fresh)
    accepted = np.zeros(len(rows), np.bool_)
    accepted[slice(None) if asked.fresh is None else asked.fresh] = True
    return accepted


def refused_of(batch: AddBatch, *, now_ms: int, request_limits: limits.RequestLimits, levels: DelayLevels) -> Refused:
    """The rows that are returned since they may not be stored: none, unless the batch has `return_invalid`."""
    if not batch.return_invalid:
        return Refused.nothing()
    return refused_rows(
        batch.deliver_at_ms,
        batch.delay_ms,
        batch.delay_level,
        now_ms=now_ms,
        delay_max_ms=request_limits.delay_max_ms,
        levels=levels,
    )


def times_of(
    batch: AddBatch, *, now_ms: int, request_limits: limits.RequestLimits, levels: DelayLevels
) -> tuple[npt.NDArray[np.int64] | None, U64]:
    """The level that each row has in effect, if the batch has levels, and its time, Unix time in ms. Raises
    DelayTooLong, InvalidArgument for a level that there is not or a time in seconds.
    """
    delay_max_ms = request_limits.delay_max_ms
    level, delay_ms = None, batch.delay_ms
    if batch.delay_level is not None:
        level = levels.effective(batch.delay_level)
        delay_ms = levels.delays_of(level)
        limits.check_delay("the delay of delay_level", delay_ms, delay_max_ms)
    return level, limits.absolute_times(batch.deliver_at_ms, delay_ms, now_ms=now_ms, delay_max_ms=delay_max_ms)


def _stage_valid(
    batch: AddBatch,
    indexes: Sequence[Index],
    *,
    now_ms: int,
    floor_ms: int | None,
    request_limits: limits.RequestLimits,
    levels: DelayLevels,
    admit: Admit,
) -> tuple[list[list[OfLevel]], AddOutcome]:
    """Stages a batch as a whole. Raises as `stage` for a row that may not be stored."""
    level, times = times_of(batch, now_ms=now_ms, request_limits=request_limits, levels=levels)
    late = times <= np.uint64(now_ms)
    any_late = bool(late.any())
    returns = batch.return_already_due and any_late
    rows = Rows(times, batch.ledger_id, batch.entry_id, batch.key_hash)
    asked = [_fresh_in(index, batch) for index in indexes]
    fresh = _union([each.fresh for each in asked])
    fresh_rows = len(times) if fresh is None else len(fresh)
    returned = _NO_ROWS
    if returns:
        chosen = np.arange(len(times)) if fresh is None else fresh
        returned = chosen[late[chosen]].astype(np.uint32)
    rows, raises = raised(rows, floor_ms)
    chosen_in = [each.chosen(~late if returns else None) for each in asked]
    accepted = [rows if places is None else rows.take(places) for places in chosen_in]
    try:
        admit(accepted)
    except Exception:
        for each in reversed(asked):
            each.forget()
        raise
    for each, places in reversed([*zip(asked, chosen_in, strict=True)]):
        each.stage(places)
    raised_index = _NO_ROWS
    if raises is not None:
        is_stored = np.zeros(len(times), np.bool_)
        is_stored[slice(None) if fresh is None else fresh] = True
        is_stored[returned] = False
        raised_index = np.flatnonzero(raises & is_stored).astype(np.uint32)
    outcome = AddOutcome(
        accepted=fresh_rows - len(returned),
        duplicates=len(times) - fresh_rows,
        returned_index=returned,
        late_on_arrival=int(late.sum() if fresh is None else late[fresh].sum()) if any_late else 0,
        raised_index=raised_index,
        raised_deliver_at_ms=rows.deliver_at_ms[raised_index],
    )
    return [_by_level(part, level, places) for part, places in zip(accepted, chosen_in, strict=True)], outcome


def _by_level(rows: Rows, level: npt.NDArray[np.int64] | None, places: _Places | None) -> list[OfLevel]:
    """The rows of each level. `level`: of all rows of the request, of which `places` were chosen, None: all."""
    if not len(rows):
        return []
    if level is None:
        return [(0, rows)]
    chosen = level if places is None else level[places]
    first = chosen[0]
    if (chosen == first).all():
        return [(int(first), rows)]
    return [(int(each), rows.take(chosen == each)) for each in np.unique(chosen)]


def raised(rows: Rows, floor_ms: int | None) -> tuple[Rows, npt.NDArray[np.bool_] | None]:
    """The rows, none at or below a time; which of them were."""
    if floor_ms is None or not (below := rows.deliver_at_ms <= np.uint64(floor_ms)).any():
        return rows, None
    times = np.where(below, np.uint64(floor_ms + 1), rows.deliver_at_ms)
    return Rows(times, rows.ledger_id, rows.entry_id, rows.key_hash), below


def _union(parts: Sequence[_Places | None]) -> _Places | None:
    """The rows that are in any of the parts, ascending; None for all."""
    named = [part for part in parts if part is not None]
    if len(named) < len(parts):
        return None
    return named[0] if len(named) == 1 else np.unique(np.concatenate(named))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Fresh:
    """The rows of a request that have no row in one index yet, None for all of them. `asked`: the set of its keys."""

    index: Index
    keys: U64
    asked: BitMap64
    fresh: _Places | None

    def chosen(self, kept: npt.NDArray[np.bool_] | None) -> _Places | None:
        """The fresh rows of those that are kept, None: of all."""
        if kept is None:
            return self.fresh
        return np.flatnonzero(kept) if self.fresh is None else self.fresh[kept[self.fresh]]

    def stage(self, chosen: _Places | None) -> None:
        if chosen is None:
            self.index.staged.add(self.asked)
        else:
            self.index.staged.add(bitmap_of(self.keys[chosen]))
            self.forget()

    def forget(self) -> None:
        """What is not staged leaves no trace."""
        self.index.pages.undo(pages_of(self.asked))


def _fresh_in(index: Index, asked_for: AddBatch | Rows) -> _Fresh:
    keys = index.pages.intern(asked_for.ledger_id, asked_for.entry_id)
    asked = bitmap_of(keys)
    return _Fresh(index, keys, asked, index.fresh_among(keys, asked))
