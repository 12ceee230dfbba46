"""Decides which rows of an add are accepted, with which time, and which are refused and why.

`topic_state` chooses the indexes and makes the records; `limits` and `delay_levels` say which times and levels are
valid.
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
from storage_backends.formats.schedule_ids import ScheduleIds

_Marked = tuple[npt.NDArray[np.bool_] | None, "RefusedReason"]


class RefusedReason(enum.IntEnum):
    """The reason why a row was not stored; numbers as in `tarry.v1.RefusedReason`."""

    # The time is further ahead than the largest delay.
    DELAY_TOO_LONG = 1
    # The time can only be meant in seconds.
    TIME_IN_SECONDS = 2
    # The delay level does not exist.
    DELAY_LEVEL = 3


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Refused:
    """Refused rows: `index` has their places in the request, ascending, and `reason` the reason of each."""

    index: U32
    reason: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.index)

    @staticmethod
    def nothing() -> Refused:
        return _NOTHING

    def others(self, rows: int) -> U32:
        """Return the places, ascending, that are not refused in a request of this many rows."""
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
    """Return the invalid rows of a request that has one of the three columns."""
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
    """Collect the marked rows, each of which has one mark."""
    found = [(mask, reason) for mask, reason in marked if mask is not None]
    if not found:
        return Refused.nothing()
    reasons = np.zeros(len(found[0][0]), np.uint8)
    for mask, reason in found:
        reasons[mask] = reason
    index = np.flatnonzero(reasons)
    return Refused(index.astype(np.uint32), reasons[index])


# Raises if the rows, given by index, may not be added now.
Admit = Callable[[Sequence[Rows]], None]

# (delay level, rows that were added by it); level 0 means none.
OfLevel = tuple[int, Rows]

_Places = npt.NDArray[np.intp]
_NO_ROWS = np.empty(0, np.uint32)
_COLUMNS = ("ledger_id", "entry_id", "deliver_at_ms", "delay_ms", "key_hash", "delay_level")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddBatch:
    """Positions to add: columns of n rows, with exactly one of `deliver_at_ms`, `delay_ms` and `delay_level`.

    `schedule_ids` are those of n rows, or None if none has one.
    With `return_already_due`, rows that are due already are returned instead of stored. `delay_level` refers to the
    table that is in force when it is decided. With `return_invalid`, rows with an invalid time or level are returned
    and the others stored; otherwise the whole batch is refused.
    """

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64 | None
    delay_ms: U64 | None
    key_hash: U32 | None
    return_already_due: bool
    delay_level: npt.NDArray[np.int32] | None = None
    return_invalid: bool = False
    schedule_ids: ScheduleIds | None = None

    def take(self, places: U32) -> AddBatch:
        """Return some of the rows."""
        given = ((name, getattr(self, name)) for name in _COLUMNS)
        ids = None if self.schedule_ids is None else self.schedule_ids.take(places)
        taken = {name: column[places] for name, column in given if column is not None}
        return dataclasses.replace(self, **taken, schedule_ids=ids)


class AddRow(NamedTuple):
    """One position to add to the shared index, stored even if it is due already.

    One of `deliver_at_ms` and `delay_ms` is given.
    """

    ledger_id: int
    entry_id: int
    deliver_at_ms: int | None
    delay_ms: int | None
    key_hash: int | None = None

    def batch(self) -> AddBatch:
        """Return the row as a batch of its own."""

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
    """The outcome of a batch. `returned_index` and `raised_index` are rows of the request.

    `accepted` counts rows stored in at least one index, and `duplicates` those that every index had. `refused` are the
    invalid ones, with `return_invalid`.
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
        """Return the outcome of a batch whose rows are all refused."""
        return AddOutcome(0, 0, _NO_ROWS, 0, _NO_ROWS, np.empty(0, np.uint64), refused)

    def placed(self, places: U32, refused: Refused) -> AddOutcome:
        """Return the outcome for the whole request, of which only the valid rows at `places` were decided."""
        return dataclasses.replace(
            self,
            returned_index=places[self.returned_index],
            raised_index=places[self.raised_index],
            refused=refused,
        )


ACCEPTED = AddOutcome(1, 0, _NO_ROWS, 0, _NO_ROWS, np.empty(0, np.uint64))
DUPLICATE = dataclasses.replace(ACCEPTED, accepted=0, duplicates=1)
"""The outcome of a row that is a request of its own and not due yet."""


def admit_all(accepted: Sequence[Rows]) -> None:
    """Admit everything, since there are no quotas."""


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
    """Stage the rows that each index accepts, by delay level; every row is stored later than `floor_ms`.

    `admit` is called before anything changes, and its errors are raised. Without `return_invalid`, raises DelayTooLong,
    and InvalidArgument for an unknown level or a time in seconds.
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
    """Stage the rows that the index accepts, each a request of its own, in order; return their mask."""
    asked = _fresh_in(index, rows)
    asked.stage(asked.fresh)
    accepted = np.zeros(len(rows), np.bool_)
    accepted[slice(None) if asked.fresh is None else asked.fresh] = True
    return accepted


def refused_of(batch: AddBatch, *, now_ms: int, request_limits: limits.RequestLimits, levels: DelayLevels) -> Refused:
    """Return the rows that are refused as invalid; none unless the batch has `return_invalid`."""
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
    """Return (effective level of each row or None, times in Unix ms).

    Raises DelayTooLong, and InvalidArgument for an unknown level or a time in seconds.
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
    """Stage a batch as a whole. Raise as `stage` does for an invalid row."""
    level, times = times_of(batch, now_ms=now_ms, request_limits=request_limits, levels=levels)
    late = times <= np.uint64(now_ms)
    any_late = bool(late.any())
    returns = batch.return_already_due and any_late
    rows = Rows(times, batch.ledger_id, batch.entry_id, batch.key_hash, batch.schedule_ids)
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
    """Group rows by level.

    `level` is that of all rows of the request, of which `places` were chosen, or all if None.
    """
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
    """Return (rows, all later than the floor; the mask of those that had to be raised, or None)."""
    if floor_ms is None or not (below := rows.deliver_at_ms <= np.uint64(floor_ms)).any():
        return rows, None
    times = np.where(below, np.uint64(floor_ms + 1), rows.deliver_at_ms)
    return dataclasses.replace(rows, deliver_at_ms=times), below


def _union(parts: Sequence[_Places | None]) -> _Places | None:
    """Return the rows that are in any of the parts, ascending; None means all."""
    named = [part for part in parts if part is not None]
    if len(named) < len(parts):
        return None
    return named[0] if len(named) == 1 else np.unique(np.concatenate(named))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Fresh:
    """The rows of a request that one index does not have yet; None means all. `asked` is the set of their keys."""

    index: Index
    keys: U64
    asked: BitMap64
    fresh: _Places | None

    def chosen(self, kept: npt.NDArray[np.bool_] | None) -> _Places | None:
        """Return the fresh rows among the kept ones, or among all if `kept` is None."""
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
        """Undo the pages that were created for rows that are not staged."""
        self.index.pages.undo(pages_of(self.asked))


def _fresh_in(index: Index, asked_for: AddBatch | Rows) -> _Fresh:
    keys = index.pages.intern(asked_for.ledger_id, asked_for.entry_id)
    asked = bitmap_of(keys)
    return _Fresh(index, keys, asked, index.fresh_among(keys, asked))
