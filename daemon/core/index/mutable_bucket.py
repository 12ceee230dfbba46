"""Keeps new rows in memory, in growing columns, until the seal of their bucket is committed.

Rows that arrive in due order follow FIFO runs, which are ranges of the columns (`runs`). The others are loose rows:
those far from due lie in the columns unsorted, those near are in sorted runs. Every loose row with a time at or below
`_horizon_ms` is or was in a run, so the horizon is moved by one scan over loose rows about once a second.

Rows that have left stay in the columns, the runs and the log. If a position left and was added again, only its last row
counts. Rows that were read from a column do not change. `indexes` decides when to seal; `daemon.topic.bucket_lifecycle`
seals.
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
from storage_backends.formats.schedule_ids import IdPieces, ScheduleIds

# Small, since a topic has several logs and many topics have few rows
_FIRST_CAPACITY = 64

Number = TypeVar("Number", bound=np.generic)


class RowLog:
    """Rows with positions in the page table: 16 bytes each, 20 with key hashes, 8 more and the id with schedule ids.

    Adding a single row creates no object that stays. Logs of the same rows share the pieces of their ids.
    """

    def __init__(self, pages: PageTable, id_pieces: IdPieces) -> None:
        self._pages = pages
        self._id_pieces = id_pieces
        self._rows = 0
        self._capacity = _FIRST_CAPACITY
        self._keys = np.empty(_FIRST_CAPACITY, np.uint64)
        self._deliver_at_ms = np.empty(_FIRST_CAPACITY, np.uint64)
        self._key_hash: U32 | None = None
        # References to pieces, 0 for a row without an id
        self._id_references: U64 | None = None

    def __len__(self) -> int:
        return self._rows

    @property
    def keys(self) -> U64:
        """The keys of the positions, u64[n]."""
        return self._keys[: self._rows]

    @property
    def deliver_at_ms(self) -> U64:
        """The due times, u64[n] (Unix ms)."""
        return self._deliver_at_ms[: self._rows]

    @property
    def key_hash(self) -> U32 | None:
        """The key hashes, u32[n], 0 for a row without one; None if no row has one."""
        return None if self._key_hash is None else self._key_hash[: self._rows]

    @property
    def schedule_ids(self) -> ScheduleIds | None:
        """The schedule ids of n rows; None if no row has one."""
        return None if self._id_references is None else self._id_pieces.column(self._id_references[: self._rows])

    def append(self, rows: KeyedRows) -> None:
        first, end = self._rows, self._rows + len(rows.keys)
        if end > self._capacity:
            self._capacity = max(end, 2 * self._capacity)
            self._keys = _grown(self._keys, self._capacity)
            self._deliver_at_ms = _grown(self._deliver_at_ms, self._capacity)
            if self._key_hash is not None:
                self._key_hash = _grown(self._key_hash, self._capacity)
            if self._id_references is not None:
                self._id_references = _grown(self._id_references, self._capacity)
        if rows.rows.key_hash is not None and self._key_hash is None:
            self._key_hash = np.zeros(self._capacity, np.uint32)
        self._keys[first:end] = rows.keys
        self._deliver_at_ms[first:end] = rows.rows.deliver_at_ms
        if self._key_hash is not None:
            self._key_hash[first:end] = 0 if rows.rows.key_hash is None else rows.rows.key_hash
        ids = rows.rows.schedule_ids
        if ids is not None and self._id_references is None:
            self._id_references = np.zeros(self._capacity, np.uint64)
        if self._id_references is not None:
            self._id_references[first:end] = 0 if ids is None else self._id_pieces.take_in(ids)
        self._rows = end

    def take(self, index: Index) -> KeyedRows:
        """Return the rows that an index array or a slice selects, without redelivery counts."""
        end = self._rows
        keys = self._keys[:end][index]
        ledger_id, entry_id = self._pages.places.positions(keys)
        key_hash = None if self._key_hash is None else self._key_hash[:end][index]
        references = self._id_references
        ids = None if references is None else self._id_pieces.column(references[:end][index])
        return KeyedRows(Rows(self._deliver_at_ms[:end][index], ledger_id, entry_id, key_hash, ids), keys)


def _grown(column: npt.NDArray[Number], capacity: int) -> npt.NDArray[Number]:
    grown: npt.NDArray[Any] = np.empty(capacity, column.dtype)
    grown[: len(column)] = column
    return grown


# Rows are sorted up to this time ahead of the clock, and the next stretch this much early.
HORIZON_STEP_MS = 2_000
HORIZON_MARGIN_MS = 500
# Size of a row in the columns of journal and bucket before compression (bytes)
ROW_BYTES = 24


@dataclasses.dataclass(frozen=True, slots=True)
class SealLimits:
    """Limits at which the mutable buckets of a topic, counted together, are sealed (PIP-195 and beyond).

    From `rows_min` on they are sealed when a higher ledger arrives; at `rows_max`, `size_max_bytes` or `age_max_ms` in
    any case.
    """

    rows_min: int
    rows_max: int
    size_max_bytes: int
    age_max_ms: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MutableRows:
    """The columns of a mutable bucket at one moment, which no longer change.

    They may hold rows that have left; `present` has those that have not. `acknowledged` is by subscription id.
    """

    pages: PageTable
    keys: U64
    deliver_at_ms: U64
    key_hash: U32 | None
    schedule_ids: ScheduleIds | None
    present: BitMap64
    acknowledged: dict[int, BitMap64]

    def kept(self) -> KeyedRows:
        """Return the present rows, each position once. O(n): not for the event loop."""
        index = np.arange(len(self.keys))
        if len(self.present) != len(self.keys):
            index = np.flatnonzero(contained(self.keys, self.present))
            if len(index) != len(self.present):
                # A position that left and was added again has several rows: the last one counts.
                _, last = np.unique(self.keys[index][::-1], return_index=True)
                index = index[np.sort(len(index) - 1 - last)]
        keys = self.keys[index]
        ledger_id, entry_id = self.pages.positions(keys)
        key_hash = None if self.key_hash is None else self.key_hash[index]
        ids = None if self.schedule_ids is None else self.schedule_ids.take(index)
        return KeyedRows(Rows(self.deliver_at_ms[index], ledger_id, entry_id, key_hash, ids), keys)


class RowsCounted(Protocol):
    """The port that is called with the number of rows that a mutable bucket takes in, and the size of their ids."""

    def rows_came(self, bucket: MutableBucket, rows: int) -> None: ...

    def ids_came(self, size_bytes: int) -> None: ...


class MutableBucket(Bucket):
    """A bucket of new rows. After `begin_seal` it takes none, has a name and a gone set, and serves until sealed."""

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
        id_pieces = IdPieces()
        self._came = RowLog(pages, id_pieces)
        self._fifo = FifoRuns(runs_max=fifo_runs_max)
        self._loose = Ranges()
        self._runs = TieredRuns()
        self._horizon_ms = horizon_ms
        self._far_min_ms: int | None = None
        # Size of the schedule ids of the rows added, including those that have left (bytes)
        self.added_id_bytes = 0
        self.highest_ledger_id = 0
        self.first_row_at_ms: int | None = None
        # Upper bound of the rows' due times (Unix ms)
        self.last_due_ms = 0
        # Passed rows in the order of passing: a subscription that reads behind finds them here.
        self.passed_log = RowLog(pages, id_pieces)
        # Upper bound of the passed rows' due times (Unix ms)
        self.passed_until_ms: int | None = None
        self._left = BitMap64()
        self._came_back = BitMap64()
        self._came_back_rows = _LastRows()
        self._key_order = KeyIndex()

    # ---- rows come

    def add(self, rows: KeyedRows, added: BitMap64, *, elapsed_ms: int) -> int:
        """Add rows of positions that are in no bucket; return how many arrived in due order.

        `added` is the set of the positions. `elapsed_ms` is of a clock that never steps.
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
        """Add due rows of positions that are in no bucket, and pass them at once.

        `added` is the set of the positions.
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
        if rows.rows.schedule_ids is not None or self.with_ids is not None:
            self._take_in_ids(rows, added)
        if self._left.intersect(added):
            again = self._left & added
            self._came_back |= again
            self._came_back_rows.add(rows.take(contained(rows.keys, again)))
        self.highest_ledger_id = max(self.highest_ledger_id, int(rows.rows.ledger_id.max()))
        self.last_due_ms = max(self.last_due_ms, int(rows.rows.deliver_at_ms.max()))
        if self._counts is not None:
            self._counts.rows_came(self, len(rows))

    def _take_in_ids(self, rows: KeyedRows, added: BitMap64) -> None:
        """Note which of the positions have a schedule id now."""
        with_ids = BitMap64() if self.with_ids is None else self.with_ids - added
        ids = rows.rows.schedule_ids
        if ids is not None and (size_bytes := ids.size_bytes):
            with_ids |= bitmap_of(rows.keys[ids.lengths != 0])
            self.added_id_bytes += size_bytes
            if self._counts is not None:
                self._counts.ids_came(size_bytes)
        self.with_ids = with_ids or None

    @property
    def added_rows(self) -> int:
        """The number of rows added, including those that have left, since they still take memory."""
        return len(self._came)

    # ---- rows come due

    def next_due_ms(self) -> int | None:
        """Return a lower bound of the due times (Unix ms); a row that has left may still affect it."""
        in_order_ms = self._fifo.next_due_ms(self._came.deliver_at_ms)
        return earliest(self._runs.next_due_ms(), self._far_min_ms, in_order_ms)

    def runs_at(self, now_ms: int) -> list[SortedRun]:
        """Return the sorted runs with rows due at `now_ms`: each such row is in one of them or follows in its run."""
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
        """Return the rows that are the last ones of their positions, each once."""
        if not self._came_back:
            return rows
        doubtful = np.flatnonzero(contained(rows.keys, self._came_back))
        if not len(doubtful):
            return rows
        asked = rows.take(doubtful)
        is_last = self._came_back_rows.are_last(asked)
        # A row that was added again unchanged is there twice.
        first = np.unique(asked.keys[is_last], return_index=True)[1]
        kept = np.ones(len(rows), np.bool_)
        kept[doubtful] = False
        kept[doubtful[is_last][first]] = True
        return rows.take(kept)

    def find_passed(self, keys: U64) -> KeyedRows:
        """Return the rows of these positions that are due here."""
        wanted = bitmap_of(keys) & self.passed
        if not wanted:
            return KeyedRows.empty()
        return self._came.take(self._key_order.last_of(self._came.keys, keys_of(wanted)))

    # ---- sealing

    def snapshot(self) -> MutableRows:
        """Return the bucket as it is now. The work grows with the size of its bitmaps."""
        acknowledged = {number: keys.copy() for number, keys in self.acknowledged.items() if keys}
        return self.columns_of(self.present.copy(), acknowledged)

    def columns_of(self, present: BitMap64, acknowledged: dict[int, BitMap64]) -> MutableRows:
        """Return the columns as they are now, with other sets than the bucket has."""
        came = self._came
        return MutableRows(
            self._pages, came.keys, came.deliver_at_ms, came.key_hash, came.schedule_ids, present, acknowledged
        )

    def begin_seal(self, name: str) -> None:
        """Give the bucket the name of its future object, and record what is gone from now on."""
        self.name = name
        self.gone = GoneSet()

    def gone_since_cut(self) -> GoneSet:
        """Return what has left since `begin_seal`."""
        if self.gone is None:
            raise InvariantViolated("a mutable bucket that is not being sealed has no gone set")
        return self.gone

    def release_pages(self) -> None:
        self._pages.release(self.pages)
        self.pages = BitMap()


class _LastRows:
    """The last row of each position that was added several times.

    It has a few parts sorted by key, of which later ones win, and each is at least twice as long as the next.
    """

    def __init__(self) -> None:
        self._parts: list[KeyedRows] = []

    def add(self, rows: KeyedRows) -> None:
        """Add later rows, one for each position."""
        part = rows.take(np.argsort(rows.keys))
        while self._parts and 2 * len(part) >= len(self._parts[-1]):
            merged = KeyedRows.concat([self._parts.pop(), part])
            # The first in reverse order is the last that was added.
            part = merged.take(len(merged) - 1 - np.unique(merged.keys[::-1], return_index=True)[1])
        self._parts.append(part)

    def are_last(self, rows: KeyedRows) -> npt.NDArray[np.bool_]:
        """Return the mask of rows with the time, key hash and schedule id of the last ones of their positions."""
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
            if last.rows.schedule_ids is not None or asked.rows.schedule_ids is not None:
                ids = zip(last.rows.listed_ids(), asked.rows.listed_ids(), strict=True)
                same &= np.array([one == other for one, other in ids], np.bool_)
            found[left[same]] = True
            left = left[~known]
        return found
