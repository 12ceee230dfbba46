"""What a query wants at most of the rows, and which buckets and segments have none of it.

Owns: sets of u64 as ranges, and asking the manifest's and the table's numbers about them.
Does not own: filters as Spark says them (`datasource`). Whatever is passed over here is wanted by no row: the rest is
filtered row by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.row_columns import U64, Rows

U64_MAX: Final = (1 << 64) - 1
I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1

Ranges = tuple[tuple[int, int], ...]
"""(first, last), both included, in any order."""

ALL: Final[Ranges] = ((0, U64_MAX),)


def of_bit_view(first: int, last: int) -> Ranges:
    """The u64 whose bits, as a signed integer, are in a range, both ends included."""
    first, last = max(first, I64_MIN), min(last, I64_MAX)
    if first > last:
        return ()
    if first >= 0:
        return ((first, last),)
    if last < 0:
        return ((first & U64_MAX, last & U64_MAX),)
    return ((0, last), (first & U64_MAX, U64_MAX))


def both(one: Ranges, other: Ranges) -> Ranges:
    """What is in a range of both."""
    found = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return tuple((first, last) for first, last in found if first <= last)


def _meet(ranges: Ranges, first: int, last: int) -> bool:
    return any(start <= last and first <= end for start, end in ranges)


def _inside(ranges: Ranges, column: U64) -> npt.NDArray[np.bool_]:
    if ranges == ALL:
        return np.ones(len(column), np.bool_)
    inside = np.zeros(len(column), np.bool_)
    for first, last in ranges:
        inside |= (column >= np.uint64(first)) & (column <= np.uint64(last))
    return inside


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`topics`: None is any. `ledger_id`, `deliver_at_ms`: in one of the ranges."""

    topics: frozenset[str] | None = None
    ledger_id: Ranges = ALL
    deliver_at_ms: Ranges = ALL

    def only_topics(self, topics: Iterable[str]) -> Wanted:
        named = frozenset(topics)
        return dataclasses.replace(self, topics=named if self.topics is None else self.topics & named)

    def only_ledgers(self, ranges: Ranges) -> Wanted:
        return dataclasses.replace(self, ledger_id=both(self.ledger_id, ranges))

    def only_due(self, ranges: Ranges) -> Wanted:
        return dataclasses.replace(self, deliver_at_ms=both(self.deliver_at_ms, ranges))

    def may_have(self, live: LiveBucket) -> bool:
        """Whether a row of the bucket may be wanted; its topic is."""
        return _meet(self.ledger_id, live.first_ledger_id, live.last_ledger_id) and self.may_be_due(
            live.min_deliver_at_ms, live.max_deliver_at_ms
        )

    def may_be_due(self, first_ms: int, last_ms: int) -> bool:
        """Whether a row that is due between may be wanted."""
        return _meet(self.deliver_at_ms, first_ms, last_ms)

    def mask_of(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are wanted; their topic is."""
        return _inside(self.ledger_id, rows.ledger_id) & _inside(self.deliver_at_ms, rows.deliver_at_ms)


EVERYTHING: Final = Wanted()
