"""Keeps the dead letters of one subscription in memory, by ascending id: positions that are no longer delivered.

`nack_decisions` makes dead letters, `dead_letter_decisions` replays and purges them, and `storage_backends.formats` has
their stored forms.

They are kept in chunks of packed columns, in which those that left are marked. A chunk is packed again when more than
half of it has left. So a page or a removal reads few rows at once, however many there are.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.backlog.packed_rows import PackedColumn
from daemon.core.index.position_keys import bitmap_of, contained
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U32, U64, Index
from storage_backends.formats.schedule_ids import ScheduleIds

CHUNK_ROWS = 4096
# Rows read for one page, however few of them the filter leaves
LOOKED_AT_MAX = 1 << 16
NO_TEXTS = ("",)

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeadLetterRows:
    """n dead letters, by ascending `dead_letter_id`: columns of one length.

    `deliver_at_ms` is the time of the last delivery. `batch_index` is `NO_BATCH_INDEX` for an entry as a whole.
    `key_hash` is 0 if there is none. `redelivery_count` includes the last delivery. `reason` is the number of a
    `DeadLetterReason`. `text_index` points into `texts`, which hold what dispatchers said; the first text is empty.
    `schedule_ids` are those of n rows, or None if none has one.
    """

    dead_letter_id: U64
    ledger_id: U64
    entry_id: U64
    batch_index: U32
    deliver_at_ms: U64
    key_hash: U32
    redelivery_count: U32
    dead_at_ms: U64
    reason: npt.NDArray[np.uint8]
    text_index: U32
    texts: tuple[str, ...] = NO_TEXTS
    schedule_ids: ScheduleIds | None = None

    def __len__(self) -> int:
        return len(self.dead_letter_id)

    def take(self, index: Index) -> DeadLetterRows:
        """Return the dead letters that an index array, a mask of n or a slice selects, with only their texts."""
        used, text_index = np.unique(self.text_index[index], return_inverse=True)
        if len(used) and used[0]:
            used, text_index = np.concatenate([[0], used]), text_index + 1
        texts = tuple(self.texts[number] for number in used.tolist()) or NO_TEXTS
        columns: dict[str, Any] = {name: getattr(self, name)[index] for name in _COLUMNS}
        ids = None if self.schedule_ids is None else self.schedule_ids.take(index)
        columns["text_index"] = text_index.reshape(-1).astype(np.uint32)
        return DeadLetterRows(**columns, texts=texts, schedule_ids=ids)

    @staticmethod
    def concat(parts: Sequence[DeadLetterRows]) -> DeadLetterRows:
        """Join the parts in their order."""
        parts = [part for part in parts if len(part)]
        if not parts:
            return DeadLetterRows.empty()
        if len(parts) == 1:
            return parts[0]
        numbers: dict[str, int] = {"": 0}
        text_index = []
        for part in parts:
            mapped = np.array([numbers.setdefault(text, len(numbers)) for text in part.texts], np.uint32)
            text_index.append(mapped[part.text_index])
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        ids = ScheduleIds.concat([part.schedule_ids for part in parts], list(map(len, parts)))
        return DeadLetterRows(**columns, text_index=np.concatenate(text_index), texts=tuple(numbers), schedule_ids=ids)

    @staticmethod
    def empty() -> DeadLetterRows:
        columns: dict[str, Any] = {name: np.empty(0, kind) for name, kind in _COLUMNS.items()}
        return DeadLetterRows(**columns, text_index=np.empty(0, np.uint32))


# All columns but those of the texts and the ids
_COLUMNS: dict[str, type[np.unsignedinteger[Any]]] = {
    "dead_letter_id": np.uint64,
    "ledger_id": np.uint64,
    "entry_id": np.uint64,
    "batch_index": np.uint32,
    "deliver_at_ms": np.uint64,
    "key_hash": np.uint32,
    "redelivery_count": np.uint32,
    "dead_at_ms": np.uint64,
    "reason": np.uint8,
}


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeadLetterFilter:
    """A filter of dead letters that all given conditions must match.

    `ids` ascend. `ledgers` are the first and the last, both included. `from_ms` <= dead_at_ms < `until_ms` (Unix ms).
    """

    ids: U64 | None = None
    ledgers: tuple[int, int] | None = None
    reason: int | None = None
    from_ms: int | None = None
    until_ms: int | None = None

    def holds_for(self, rows: DeadLetterRows) -> Mask:
        """Return the mask of rows that match."""
        chosen = np.ones(len(rows), np.bool_)
        if self.ids is not None and len(rows):
            # Few of many ids lie between the first and the last of the rows.
            first = self.ids.searchsorted(rows.dead_letter_id[0])
            end = self.ids.searchsorted(rows.dead_letter_id[-1], side="right")
            chosen &= np.isin(rows.dead_letter_id, self.ids[first:end], assume_unique=True)
        if self.ledgers is not None:
            chosen &= rows.ledger_id >= np.uint64(self.ledgers[0])
            chosen &= rows.ledger_id <= np.uint64(self.ledgers[1])
        if self.reason is not None:
            chosen &= rows.reason == self.reason
        if self.from_ms is not None:
            chosen &= rows.dead_at_ms >= np.uint64(self.from_ms)
        if self.until_ms is not None:
            chosen &= rows.dead_at_ms < np.uint64(self.until_ms)
        return chosen


ALL = DeadLetterFilter()


class DeadLetterSlice(NamedTuple):
    """One page of dead letters. `next_after` is the `after_id` of the next page, or None if there is none.

    A page may have fewer rows than the limit, even none, and yet a next one.
    """

    rows: DeadLetterRows
    next_after: int | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Chunk:
    """The dead letters first..last, including those that have left. Never changed."""

    first_id: int
    last_id: int
    rows: int
    columns: tuple[PackedColumn, ...]
    text_index: PackedColumn
    texts: tuple[str, ...]
    schedule_ids: ScheduleIds | None

    @staticmethod
    def of(rows: DeadLetterRows) -> _Chunk:
        columns = tuple(PackedColumn.of(getattr(rows, name)) for name in _COLUMNS)
        first_id, last_id = int(rows.dead_letter_id[0]), int(rows.dead_letter_id[-1])
        ids = rows.schedule_ids.copied() if rows.schedule_ids is not None and rows.schedule_ids else None
        return _Chunk(first_id, last_id, len(rows), columns, PackedColumn.of(rows.text_index), rows.texts, ids)

    def unpacked(self, index: Index = slice(None)) -> DeadLetterRows:
        columns: dict[str, Any] = {
            name: column.take(index).astype(kind, copy=False)
            for column, (name, kind) in zip(self.columns, _COLUMNS.items(), strict=True)
        }
        text_index = self.text_index.take(index).astype(np.uint32)
        ids = None if self.schedule_ids is None else self.schedule_ids.take(index)
        return DeadLetterRows(**columns, text_index=text_index, texts=self.texts, schedule_ids=ids)

    def ids(self) -> U64:
        return self.columns[0].take(slice(None))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class FrozenDeadLetters:
    """The dead letters as they were at one moment."""

    chunks: tuple[_Chunk, ...]
    left: BitMap64
    rows_there: int

    def __len__(self) -> int:
        return self.rows_there

    def parts(self) -> Iterator[DeadLetterRows]:
        """Yield all of them by ascending id, some thousands at a time. O(n): for a thread."""
        for chunk in self.chunks:
            rows = _there(chunk, self.left)
            if len(rows):
                yield rows

    def rows(self) -> DeadLetterRows:
        """Return all of them. O(n): for a thread."""
        return DeadLetterRows.concat(list(self.parts()))


class DeadLetters:
    """The dead letters of one subscription. `last_id` is the highest id ever given; ids are never reused."""

    def __init__(self) -> None:
        self.last_id = 0
        self._chunks: list[_Chunk] = []
        # Number of rows of each chunk that have left
        self._left_rows: list[int] = []
        # Ids that have left and are still in a chunk
        self._left = BitMap64()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: DeadLetterRows) -> None:
        """Add rows with higher ids than any before. Raise InvariantViolated if they are not."""
        if not len(rows):
            return
        ids = rows.dead_letter_id
        if int(ids[0]) <= self.last_id or not bool((ids[1:] > ids[:-1]).all()):
            raise InvariantViolated(f"dead letters {ids[0]} to {ids[-1]} do not ascend from {self.last_id}")
        self.last_id = int(ids[-1])
        self._rows += len(rows)
        # Longer chunks stay as they are, so that a row that arrives alone is packed a few times, not thousands of
        # times.
        while self._chunks and self._chunks[-1].rows < CHUNK_ROWS and self._chunks[-1].rows <= len(rows):
            self._left_rows.pop()
            chunk = self._chunks.pop()
            rows = DeadLetterRows.concat([_there(chunk, self._left), rows])
            self._left.remove_range(chunk.first_id, chunk.last_id + 1)
        for start in range(0, len(rows), CHUNK_ROWS):
            self._chunks.append(_Chunk.of(rows.take(slice(start, start + CHUNK_ROWS))))
            self._left_rows.append(0)

    def remove(self, ids: U64) -> int:
        """Remove the dead letters with these ids; return how many existed."""
        removed = 0
        asked = ids if bool((ids[1:] > ids[:-1]).all()) else np.unique(ids)
        start = 0
        while start < len(asked):
            number = self._chunk_from(int(asked[start]))
            if number == len(self._chunks):
                break
            chunk = self._chunks[number]
            end = int(np.searchsorted(asked, np.uint64(chunk.last_id), side="right"))
            named = bitmap_of(np.intersect1d(asked[start:end], chunk.ids(), assume_unique=True)) - self._left
            start = end
            if named:
                removed += len(named)
                self._left |= named
                self._left_rows[number] += len(named)
                self._tidy(number)
        self._rows -= removed
        return removed

    def _tidy(self, number: int) -> None:
        chunk = self._chunks[number]
        if 2 * self._left_rows[number] <= chunk.rows:
            return
        rows = _there(chunk, self._left)
        self._left.remove_range(chunk.first_id, chunk.last_id + 1)
        if len(rows):
            self._chunks[number], self._left_rows[number] = _Chunk.of(rows), 0
        else:
            del self._chunks[number], self._left_rows[number]

    def page(self, wanted: DeadLetterFilter, after_id: int, limit: int) -> DeadLetterSlice:
        """Return at most `limit` dead letters that match, with ids above `after_id`, ascending.

        Reads a bounded number of rows.
        """
        found: list[DeadLetterRows] = []
        rows_found = looked_at = 0
        after = after_id
        while rows_found <= limit and looked_at < LOOKED_AT_MAX:
            chunk = self._chunk_after(after, wanted.ids)
            if chunk is None:
                break
            looked_at += chunk.rows
            rows = _there(chunk, self._left)
            rows = rows.take((rows.dead_letter_id > np.uint64(after_id)) & wanted.holds_for(rows))
            rows_found += len(rows)
            found.append(rows)
            after = chunk.last_id
        page = DeadLetterRows.concat(found)
        if rows_found > limit:
            page = page.take(slice(limit))
            after = int(page.dead_letter_id[-1])
        return DeadLetterSlice(page, None if self._chunk_after(after, wanted.ids) is None else after)

    def _chunk_after(self, after_id: int, ids: U64 | None) -> _Chunk | None:
        """Return the first chunk that may have an id above `after_id` or, with `ids`, one of those."""
        first_id = after_id + 1
        if ids is not None:
            place = int(np.searchsorted(ids, np.uint64(after_id), side="right"))
            if place == len(ids):
                return None
            first_id = int(ids[place])
        number = self._chunk_from(first_id)
        return self._chunks[number] if number < len(self._chunks) else None

    def freeze(self) -> FrozenDeadLetters:
        """Return the dead letters as they are now; later changes do not affect them. O(chunks)."""
        return FrozenDeadLetters(tuple(self._chunks), self._left.copy(), self._rows)

    def _chunk_from(self, dead_letter_id: int) -> int:
        """Return the number of the first chunk whose last id is not below the given one."""
        return bisect.bisect_left(self._chunks, dead_letter_id, key=lambda chunk: chunk.last_id)


def _there(chunk: _Chunk, left: BitMap64) -> DeadLetterRows:
    ids = chunk.ids()
    gone = contained(ids, left) if left else np.zeros(len(ids), np.bool_)
    return chunk.unpacked(~gone) if gone.any() else chunk.unpacked()
