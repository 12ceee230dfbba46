"""Counts over the buckets of all indexes of a topic, kept where they change: adds and wakes ask for them often, and of
many subscriptions each may have an index of its own.

Owns: the counts. Does not own: the buckets (`bucket`, `mutable_bucket`), which of them an index has (`index`), and what
follows from a count (`indexes`).

Each is told of a change by who makes it: rows that come by the bucket that takes them, buckets that come and go by
their index. What is the first or the highest of several is looked for again only after the one that was it has left.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.runs import earliest
from daemon.core.index.sealed_bucket import SealedBucket


class BucketCounts:
    """Counts the buckets of one topic and lists those that something is done with.

    `added_rows`: rows of the buckets that take new ones, as `MutableBucket.added_rows`. `sealing`: how many seals of
    the index that has the most are not committed. `empty`: the sealed buckets every row of which is gone, `readable`:
    those whose objects can be read, by name. `in_memory`: those in memory that have or had rows.
    """

    def __init__(self) -> None:
        self.added_rows = 0
        self.sealing = 0
        self.empty: dict[str, SealedBucket] = {}
        self.readable: dict[str, SealedBucket] = {}
        self.in_memory: dict[int, MutableBucket] = {}
        # Those that take new rows and have any, by their indexes.
        self._filling: dict[int, MutableBucket] = {}
        self._extremes: tuple[int, int | None] | None = (0, None)
        # How many indexes have so many seals.
        self._indexes_sealing: collections.Counter[int] = collections.Counter()
        self._index_of: dict[str, int] = {}

    # ---- buckets that take new rows

    @property
    def has_rows_to_seal(self) -> bool:
        return bool(self._filling)

    @property
    def highest_ledger_id(self) -> int:
        """The highest ledger id of the rows that came since the buckets were cut; 0 where none did."""
        return self._known_extremes()[0]

    @property
    def first_row_at_ms(self) -> int | None:
        """When the first of them came, by a clock that never steps; None where none did."""
        return self._known_extremes()[1]

    def _known_extremes(self) -> tuple[int, int | None]:
        if self._extremes is None:
            filling = self._filling.values()
            highest = max((bucket.highest_ledger_id for bucket in filling), default=0)
            self._extremes = highest, earliest(*[bucket.first_row_at_ms for bucket in filling])
        return self._extremes

    def rows_came(self, bucket: MutableBucket, rows: int) -> None:
        """The bucket has taken so many rows in."""
        self.added_rows += rows
        self.in_memory[id(bucket)] = self._filling[bucket.index_id] = bucket
        if self._extremes is not None:
            highest, first_ms = self._extremes
            self._extremes = max(highest, bucket.highest_ledger_id), earliest(first_ms, bucket.first_row_at_ms)

    def _filling_left(self, bucket: MutableBucket) -> None:
        if self._filling.pop(bucket.index_id, None) is not None:
            self.added_rows -= bucket.added_rows
            self._extremes = None if self._filling else (0, None)

    # ---- seals

    def seal_begins(self, bucket: MutableBucket, *, sealing: int) -> None:
        """The bucket takes no more rows; its index has so many seals now, with this one."""
        self._filling_left(bucket)
        self._count_sealing(sealing - 1, sealing)

    def seal_ended(self, bucket: MutableBucket, *, sealing: int) -> None:
        """The seal of a bucket is committed; how many its index has now."""
        self.in_memory.pop(id(bucket), None)
        self._count_sealing(sealing + 1, sealing)

    def _count_sealing(self, before: int, now: int) -> None:
        self._indexes_sealing[before] -= before > 0
        self._indexes_sealing[now] += now > 0
        self.sealing = max(self.sealing, now)
        while self.sealing and not self._indexes_sealing[self.sealing]:
            self.sealing -= 1

    # ---- sealed buckets

    def sealed_came(self, bucket: SealedBucket) -> None:
        """A sealed bucket has come into its index."""
        self._index_of[bucket.name] = bucket.index_id
        self.readable[bucket.name] = bucket
        if not bucket.present_rows:
            self.emptied(bucket)

    def sealed_left(self, name: str) -> None:
        """A sealed bucket has left its index."""
        del self._index_of[name]
        self.readable.pop(name, None)
        self.empty.pop(name, None)

    def left_out(self, name: str) -> None:
        """The object of a sealed bucket is damaged, or missing."""
        self.readable.pop(name, None)

    def emptied(self, bucket: SealedBucket) -> None:
        """The last row of a sealed bucket is gone."""
        if bucket.name in self._index_of:
            self.empty[bucket.name] = bucket

    def index_of(self, bucket: str) -> int | None:
        """The index that a sealed bucket is in; None when it is in none any more."""
        return self._index_of.get(bucket)

    # ---- indexes

    def index_left(self, filling: MutableBucket, *, sealing: Sequence[MutableBucket], sealed: Sequence[str]) -> None:
        """An index is no more: its bucket that takes new rows, those that are being sealed, and its sealed ones."""
        self._filling_left(filling)
        self._count_sealing(len(sealing), 0)
        for bucket in (filling, *sealing):
            self.in_memory.pop(id(bucket), None)
        for name in sealed:
            self.sealed_left(name)
