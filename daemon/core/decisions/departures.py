"""Positions that leave: the index, or the backlog of one subscription; as records for the journal.

Owns: which records say so, and cutting them into slots of bounded size.
Does not own: which positions leave and why (`trimming`, `topic`), and what a record does (`topic`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pyroaring import BitMap64

from daemon.core.index.positions import PageTable, halves, has_more_pages
from storage_backends.formats.slot_format import GoneReason, GoneRecord, Record, WaiveRecord, size_max

# What one slot may say of positions that leave: applying it, and reading it, is one turn of the event loop.
SLOT_ROWS_MAX = 1_000_000
SLOT_BYTES_MAX = 4 << 20
SLOT_PAGES_MAX = 2_000


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Departure:
    """Positions of one index to leave. `gone`: from the index; `waived`: from the backlog of `subscription_id` alone.
    `rows`: of how many rows that decides. `index_id`: the subscription whose own index it is, 0 for the shared one.

    It stays what it is while its slots are applied one after the other.
    """

    topic_id: str
    incarnation: int
    pages: PageTable
    gone: BitMap64
    reason: GoneReason
    waived: BitMap64 = dataclasses.field(default_factory=BitMap64)
    subscription_id: int = 0
    rows: int = 0
    index_id: int = 0

    def slots(self) -> Iterator[tuple[Record, ...]]:
        """The records, those together that must stand in one slot. Each step is bounded work."""
        everything = self.gone | self.waived
        left = [everything] if everything else []
        while left:
            part = left.pop()
            too_large = len(part) > SLOT_ROWS_MAX or has_more_pages(part, SLOT_PAGES_MAX)
            records = () if too_large else self._records(part)
            if records and (len(part) == 1 or sum(map(size_max, records)) <= SLOT_BYTES_MAX):
                yield records
            else:
                left += reversed(halves(part))

    def records(self) -> list[Record]:
        """The records of all slots, where a slot boundary may stand between any two."""
        return [record for records in self.slots() for record in records]

    def _records(self, part: BitMap64) -> tuple[Record, ...]:
        records: list[Record] = []
        waived, gone = self.waived & part, self.gone & part
        if waived:
            positions = self.pages.to_stored(waived)
            records.append(WaiveRecord(self.topic_id, self.incarnation, self.subscription_id, positions))
        if gone:
            positions = self.pages.to_stored(gone)
            records.append(GoneRecord(self.topic_id, self.incarnation, self.index_id, self.reason, positions))
        return tuple(records)
