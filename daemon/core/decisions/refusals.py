"""Which rows of a request to add cannot be stored with the time that is asked for, and why.

Owns: the reasons, and the one of each row.
Does not own: what a time, a delay and a level may be (`limits`, `delay_levels`), and what becomes of the other rows
(`adding`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.core import limits
from daemon.core.index.delay_levels import DelayLevels
from storage_backends.formats.row_columns import U32, U64

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
