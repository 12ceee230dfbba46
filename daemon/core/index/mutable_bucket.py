"""The bucket that takes new rows, in memory until its seal is committed.

Owns: the rows in the order they came, as growing columns, and which of them come due next.
Does not own: when it is sealed (`indexes`), sealing itself (`daemon.topic.bucket_lifecycle`) and who receives rows.

Rows that come in due order follow FIFO runs, ranges of the columns (`fifo_runs`). Of the others, loose rows, those far
from due lie in the columns unsorted, those near are in sorted runs. Every loose row with a time at or below
`_horizon_ms` is or was in a run, so the horizon is moved by one scan over loose rows about once a second.

Rows that have left stay in the columns, the runs and the log: of a position that left and came back only the last
row counts.

Rows of positions in the order in which they came, in memory.

Owns: growing columns, to which rows are appended one by one or many at once; what was read of them does not change.
Does not own: what the rows are, and which of them still count.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from daemon.core.index.bucket import Bucket, GoneSet
from daemon.core.index.position_keys import KeyedRows, KeyIndex, PageTable, bitmap_of, contained, keys_of, pages_of
from daemon.core.index.runs import RUNS_MAX, FifoRuns, Ranges, SortedRun, TieredRuns, earliest
from daemon.errors import InvariantViolated
from storage_backends.formats.index_ids import SHARED
from storage_backends.formats.row_columns import U32, U64, Index, Rows

# A topic has several logs, and many topics have few rows.
_FIRST_CAPACITY = 64

Number = TypeVar("Number", bound=np.generic)


class RowLog:
    """Rows whose positions are in the page table: 16 bytes each, 20 where one has a key hash.

    A row that comes by itself costs no object that stays.
    """

    def __init__(self, pages: PageTable) -> None:
        self._pages = pages
        self._rows = 0
        self._capacity = _FIRST_CAPACITY
        self._keys = np.empty(_FIRST_CAPACITY, np.uint64)
        self._deliver_at_ms = np.empty(_FIRST_CAPACITY, np.uint64)
        self._key_hash: U32 | None = None

    def __len__(self) -> int:
        return self._rows

    @property
    def keys(self) -> U64:
        """The keys of the positions, u64[n]."""
        return self._keys[: self._rows]

    @property
    def deliver_at_ms(self) -> U64:
        """When each is due, Unix time in ms, u64[n]."""
        return self._deliver_at_ms[: self._rows]

    @property
    def key_hash(self) -> U32 | None:
        """The key hashes, u32[n], 0 where a row has none; None where no row has one."""
        return None if self._key_hash is None else self._key_hash[: self._rows]

    def append(self, rows: KeyedRows) -> None:
        first, end = self._rows, self._rows + len(rows.keys)
        if end > self._capacity:
            self._grow(max(end, 2 * self._capacity))
        if rows.rows.key_hash is not None and self._key_hash is None:
            self._key_hash = np.zeros(self._capacity, np.uint32)
        self._keys[first:end] = rows.keys
        self._deliver_at_ms[first:end] = rows.rows.deliver_at_ms
        if self._key_hash is not None:
            self._key_hash[first:end] = 0 if rows.rows.key_hash is None else rows.rows.key_hash
        self._rows = end

    def take(self, index: Index) -> KeyedRows:
        """The rows that an index array or a slice selects, with no redelivery counts."""
        end = self._rows
        keys = self._keys[:end][index]
        ledger_id, entry_id = self._pages.places.positions(keys)
        key_hash = None if self._key_hash is None else self._key_hash[:end][index]
        return KeyedRows(Rows(self._deliver_at_ms[:end][index], ledger_id, entry_id, key_hash), keys)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys = _grown(self._keys, capacity)
        self._deliver_at_ms = _grown(self._deliver_at_ms, capacity)
        if self._key_hash is not None:
            self._key_hash = _grown(self._key_hash, capacity)


def _grown(column: npt.NDArray[Number], capacity: int) -> npt.NDArray[Number]:
    grown: npt.NDArray[Any] = np.empty(capacity, column.dtype)
    grown[: len(column)] = column
    return grown


# How far ahead of the clock rows are sorted, and how early the next stretch is.
HORIZON_STEP_MS = 2_000
HORIZON_MARGIN_MS = 500
# What a row takes in the journal's and the bucket's columns before compression.
ROW_BYTES = 24


@dataclasses.dataclass(frozen=True, slots=True)
class SealLimits:
    """When the mutable buckets of a topic are sealed, counted together (PIP-195 and beyond).

    `rows_min`: with that many rows they are sealed when a higher ledger arrives. `rows_max`, `size_max_bytes`,
    `age_max_ms`: they are sealed whatever the ledger.
    """

    rows_min: int
    rows_max: int
    size_max_bytes: int
    age_max_ms: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MutableRows:
    """The columns of a mutable bucket as of one moment: they do not change any more.

    They may hold rows that have left; `present` says which have not. `acknowledged`: by subscription id.
    """

    pages: PageTable
    keys: U64
    deliver_at_ms: U64
    key_hash: U32 | None
    present: BitMap64
    acknowledged: dict[int, BitMap64]

    def kept(self) -> KeyedRows:
        """The rows that are there, each position once. O(n): not for the event loop."""
        index = np.arange(len(self.keys))
        if len(self.present) != len(self.keys):
            index = np.flatnonzero(contained(self.keys, self.present))
            if len(index) != len(self.present):
                # A position that left and came back has several rows: the last one is it.
                _, last = np.unique(self.keys[index][::-1], return_index=True)
                index = index[np.sort(len(index) - 1 - last)]
        keys = self.keys[index]
        ledger_id, entry_id = self.pages.positions(keys)
        key_hash = None if self.key_hash is None else self.key_hash[index]
        return KeyedRows(Rows(self.deliver_at_ms[index], ledger_id, entry_id, key_hash), keys)


class RowsCounted(Protocol):
    """Who counts the rows that the mutable buckets of a topic take in."""

    def rows_came(self, bucket: MutableBucket, rows: int) -> None: ...


class MutableBucket(Bucket):
    """New rows. After `begin_seal` it takes no more, has a name and a gone set, and serves until it is sealed."""

    def __init__(
        self,
        pages: PageTable,
        *,
        horizon_ms: int,
        index_id: int = SHARED,
        fifo_runs_max: int = RUNS_MAX,
        counts: RowsCounted | None = None,
    ) -> None:
        super().__init__("", BitMap64(), None, index_id)
        self._pages = pages
        self._counts = counts
        self.pages = BitMap()
        self._came = RowLog(pages)
        self._fifo = FifoRuns(runs_max=fifo_runs_max)
        self._loose = Ranges()
        self._runs = TieredRuns()
        self._horizon_ms = horizon_ms
        self._far_min_ms: int | None = None
        self.highest_ledger_id = 0
        self.first_row_at_ms: int | None = None
        # No row is due later.
        self.last_due_ms = 0
        # What was passed, in the order it was: a subscription that reads behind finds it here.
        self.passed_log = RowLog(pages)
        # No row that is due has a later time.
        self.passed_until_ms: int | None = None
        self._left = BitMap64()
        self._came_back = BitMap64()
        self._came_back_rows = _LastRows()
        self._key_order = KeyIndex()

    # ---- rows come

    def add(self, rows: KeyedRows, added: BitMap64, *, elapsed_ms: int) -> int:
        """Rows of positions that are in no bucket; `added` is their set. `elapsed_ms`: a clock that never steps.

        How many of them came in due order.
        """
        first = len(self._came)
        self._take_in(rows, added, elapsed_ms)
        left = self._fifo.add(rows.rows, first)
        if not left:
            return len(rows)
        for start, end in left:
            self._loose.add(start, end)
        loose = rows
        if left != [(first, len(self._came))]:
            loose = KeyedRows.concat([rows.take(slice(start - first, end - first)) for start, end in left])
        self._add_loose(loose)
        return len(rows) - len(loose)

    def _add_loose(self, rows: KeyedRows) -> None:
        near = rows.rows.deliver_at_ms <= np.uint64(self._horizon_ms)
        if near.all():
            self._runs.add(rows)
            return
        far_min_ms = int(rows.rows.deliver_at_ms[~near].min())
        self._far_min_ms = far_min_ms if self._far_min_ms is None else min(self._far_min_ms, far_min_ms)
        if near.any():
            self._runs.add(rows.take(near))

    def add_due(self, rows: KeyedRows, added: BitMap64, *, elapsed_ms: int) -> None:
        """Adds rows, of positions that are in no bucket, that are due: they are passed as they come. `added` is their
        set.
        """
        self._take_in(rows, added, elapsed_ms)
        self.passed |= added
        self.passed_rows += len(rows)
        self._log_passed(rows.take(rows.rows.due_order()))

    def _take_in(self, rows: KeyedRows, added: BitMap64, elapsed_ms: int) -> None:
        if self.first_row_at_ms is None:
            self.first_row_at_ms = elapsed_ms
        fresh_pages = pages_of(added) - self.pages
        if fresh_pages:
            self._pages.hold(fresh_pages)
            self.pages |= fresh_pages
        self.present |= added
        self.present_rows += len(rows)
        self._came.append(rows)
        if self._left.intersect(added):
            again = self._left & added
            self._came_back |= again
            self._came_back_rows.add(rows.take(contained(rows.keys, again)))
        self.highest_ledger_id = max(self.highest_ledger_id, int(rows.rows.ledger_id.max()))
        self.last_due_ms = max(self.last_due_ms, int(rows.rows.deliver_at_ms.max()))
        if self._counts is not None:
            self._counts.rows_came(self, len(rows))

    @property
    def added_rows(self) -> int:
        """Rows that came, those that have left included: what the bucket takes in memory."""
        return len(self._came)

    # ---- rows come due

    def next_due_ms(self) -> int | None:
        """No row is due before; a row that has left may still count."""
        in_order_ms = self._fifo.next_due_ms(self._came.deliver_at_ms)
        return earliest(self._runs.next_due_ms(), self._far_min_ms, in_order_ms)

    def runs_at(self, now_ms: int) -> list[SortedRun]:
        """The sorted runs that rows are due of at `now_ms`: they hold every such row, or such rows follow them."""
        if self._far_min_ms is not None and self._far_min_ms <= now_ms + HORIZON_MARGIN_MS:
            self._move_horizon(now_ms + HORIZON_STEP_MS)
        found = self._fifo.runs_at(now_ms, self._came.deliver_at_ms, self._came.take)
        if not self._runs.runs:
            return found
        loose = [run for run in self._runs.runs if (due_ms := run.next_due_ms()) is not None and due_ms <= now_ms]
        return [*loose, *found]

    def _move_horizon(self, horizon_ms: int) -> None:
        if horizon_ms <= self._horizon_ms:
            return
        loose = self._loose.rows()
        times = self._came.deliver_at_ms[loose]
        far = times > np.uint64(self._horizon_ms)
        near = np.flatnonzero(far & (times <= np.uint64(horizon_ms)))
        far = times > np.uint64(horizon_ms)
        self._far_min_ms = int(times[far].min()) if far.any() else None
        self._horizon_ms = horizon_ms
        if len(near):
            self._runs.add(self._came.take(near + loose.start if isinstance(loose, slice) else loose[near]))

    def pass_rows(self, due: KeyedRows) -> KeyedRows:
        passed = super().pass_rows(self._current(due) if self._came_back else due)
        if len(passed.keys):
            self._log_passed(passed)
        return passed

    def _log_passed(self, passed: KeyedRows) -> None:
        self.passed_log.append(passed)
        last_ms = int(passed.rows.deliver_at_ms[-1])
        if self.passed_until_ms is None or last_ms > self.passed_until_ms:
            self.passed_until_ms = last_ms

    def remove(self, keys: BitMap64) -> tuple[BitMap64, int]:
        hit, due_rows = super().remove(keys)
        if self.gone is None:
            self._left |= hit
        return hit, due_rows

    def unacknowledged(self, rows: KeyedRows, subscription_id: int, in_hand: BitMap64 | None = None) -> KeyedRows:
        return super().unacknowledged(self._current(rows), subscription_id, in_hand)

    def _current(self, rows: KeyedRows) -> KeyedRows:
        """Without rows that are not the last ones of their positions, and each row once."""
        if not self._came_back:
            return rows
        doubtful = np.flatnonzero(contained(rows.keys, self._came_back))
        if not len(doubtful):
            return rows
        asked = rows.take(doubtful)
        is_last = self._came_back_rows.are_last(asked)
        # A row that came back as it was is there twice.
        first = np.unique(asked.keys[is_last], return_index=True)[1]
        kept = np.ones(len(rows), np.bool_)
        kept[doubtful] = False
        kept[doubtful[is_last][first]] = True
        return rows.take(kept)

    def find_passed(self, keys: U64) -> KeyedRows:
        """The rows of those positions that are due here."""
        wanted = bitmap_of(keys) & self.passed
        if not wanted:
            return KeyedRows.empty()
        return self._came.take(self._key_order.last_of(self._came.keys, keys_of(wanted)))

    # ---- sealing

    def snapshot(self) -> MutableRows:
        """The bucket as it is now; as much work as its bitmaps are large."""
        acknowledged = {number: keys.copy() for number, keys in self.acknowledged.items() if keys}
        return self.columns_of(self.present.copy(), acknowledged)

    def columns_of(self, present: BitMap64, acknowledged: dict[int, BitMap64]) -> MutableRows:
        """The columns as they are now, with other sets than the bucket has."""
        came = self._came
        return MutableRows(self._pages, came.keys, came.deliver_at_ms, came.key_hash, present, acknowledged)

    def begin_seal(self, name: str) -> None:
        """From now on the bucket has the name of the object it is being written as, and what goes is kept as gone."""
        self.name = name
        self.gone = GoneSet()

    def gone_since_cut(self) -> GoneSet:
        """What has left since `begin_seal`."""
        if self.gone is None:
            raise InvariantViolated("a mutable bucket that is not being sealed has no gone set")
        return self.gone

    def release_pages(self) -> None:
        self._pages.release(self.pages)
        self.pages = BitMap()


class _LastRows:
    """The last row of each position that came several times. A few parts sorted by key, of which later ones count, and
    each is at least twice as long as the next.
    """

    def __init__(self) -> None:
        self._parts: list[KeyedRows] = []

    def add(self, rows: KeyedRows) -> None:
        """Later rows, of each position one."""
        part = rows.take(np.argsort(rows.keys))
        while self._parts and 2 * len(part) >= len(self._parts[-1]):
            merged = KeyedRows.concat([self._parts.pop(), part])
            # The first of the reversed is the last that came.
            part = merged.take(len(merged) - 1 - np.unique(merged.keys[::-1], return_index=True)[1])
        self._parts.append(part)

    def are_last(self, rows: KeyedRows) -> npt.NDArray[np.bool_]:
        """Which of the rows have the time and the key hash of the last ones of their positions."""
        found = np.zeros(len(rows), np.bool_)
        left = np.arange(len(rows))
        for part in reversed(self._parts):
            asked = rows.take(left)
            places = np.searchsorted(part.keys, asked.keys)
            places[places == len(part)] = 0
            known = part.keys[places] == asked.keys
            last = part.take(places)
            same = known & (last.rows.deliver_at_ms == asked.rows.deliver_at_ms)
            same &= last.key_hash() == asked.key_hash()
            found[left[same]] = True
            left = left[~known]
        return found
