"""Converts a caller's numbers, lists and arrays into integer columns, and cuts them into requests.

Checks shapes only: the daemon checks names, delays and limits.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tarry import errors

Column: TypeAlias = SupportsIndex | Sequence[int] | NDArray[Any]
"""One value for the whole batch, or one per row"""

ROWS_PER_REQUEST_MAX = 100_000
REQUEST_BYTES_MAX = 4 * 1024 * 1024
"""For daemons that do not say their limit"""
# Names, tags and lengths around the columns, and the gRPC frame
REQUEST_OVERHEAD_BYTES = 4096
_U64_MAX = 2**64 - 1
# The longest encoding of a delay level on the wire; more than it takes in memory
_LEVEL_BYTES = 5
# All columns of a negative acknowledgement; other requests that name positions have fewer
_POSITION_BYTES = 4 * 8 + 3 * 4

NO_BATCH_INDEX = 2**32 - 1
"""Marks the whole entry in a column of batch indexes"""


# Rows of a column that `short_repr` shows
_ROWS_SHOWN = 3


def short_repr(value: Any) -> str:
    """Return the text of a value with columns: without empty ones, and with the first rows of long ones."""
    names = [each.name for each in dataclasses.fields(value) if each.repr]
    shown = ((name, getattr(value, name)) for name in names)
    texts = [
        f"{name}={_column_text(each) if isinstance(each, np.ndarray) else repr(each)}"
        for name, each in shown
        if each is not None and not (isinstance(each, np.ndarray) and not len(each))
    ]
    return f"{type(value).__name__}({', '.join(texts)})"


def _column_text(column: NDArray[Any]) -> str:
    more = len(column) - _ROWS_SHOWN
    texts = [*map(str, column[:_ROWS_SHOWN].tolist()), *([f"... {more:,} more"] if more > 0 else [])]
    return f"[{', '.join(texts)}]"


class Positions(NamedTuple):
    """Delivered positions, as columns of one length."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.uint64]
    batch_index: NDArray[np.uint32] | None = None
    """Index of the message within its batch entry, or `NO_BATCH_INDEX`; None if all rows are whole entries"""
    redelivery_count: NDArray[np.uint32] | None = None
    """Redelivery count that names the row's delivery; None means any"""

    @property
    def rows(self) -> int:
        """The number of rows; `len` is that of the tuple."""
        return len(self.entry_id)

    def batch_indexes(self) -> NDArray[np.uint32]:
        """Return the column of batch indexes, filled if it is None."""
        return np.full(self.rows, NO_BATCH_INDEX, np.uint32) if self.batch_index is None else self.batch_index

    def take(self, rows: slice | NDArray[Any]) -> Positions:
        """Return some of the rows."""
        return Positions(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class AddColumns:
    """Rows to add, as columns of the length of `entry_id` or of length 1. Exactly one time column is set."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.uint64] | None
    delay_ms: NDArray[np.uint64] | None
    key_hash: NDArray[np.uint32] | None
    delay_level: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.entry_id)

    def requests(self, rows_max: int, bytes_max: int) -> Iterator[tuple[int, AddColumns]]:
        """Yield requests of at most this many rows and bytes, as (index of the first row, rows)."""
        given = (self.ledger_id, self.entry_id, self.deliver_at_ms, self.delay_ms, self.key_hash)
        row_bytes = sum(column.itemsize for column in given if column is not None)
        row_bytes += 0 if self.delay_level is None else _LEVEL_BYTES
        step = rows_per_request(row_bytes, rows_max, bytes_max)
        if len(self) <= step:
            yield 0, self
            return
        for first in range(0, len(self), step):
            rows = slice(first, first + step)
            yield (
                first,
                AddColumns(
                    ledger_id=_cut(self.ledger_id, rows),
                    entry_id=self.entry_id[rows],
                    deliver_at_ms=None if self.deliver_at_ms is None else _cut(self.deliver_at_ms, rows),
                    delay_ms=None if self.delay_ms is None else _cut(self.delay_ms, rows),
                    key_hash=None if self.key_hash is None else _cut(self.key_hash, rows),
                    delay_level=None if self.delay_level is None else _cut(self.delay_level, rows),
                ),
            )


@dataclasses.dataclass(frozen=True, eq=False)
class EntryColumns:
    """Positions as columns of one length; with `last_entry_id`, ranges of entries."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    last_entry_id: NDArray[np.uint64] | None

    def __len__(self) -> int:
        return len(self.entry_id)

    def requests(self, rows_max: int, bytes_max: int) -> Iterator[EntryColumns]:
        """Yield requests of at most this many rows and bytes."""
        step = rows_per_request(3 * np.dtype(np.uint64).itemsize, rows_max, bytes_max)
        for first in range(0, len(self), step):
            yield self._rows(slice(first, first + step))

    def from_place(self, index: int, entry_id: int) -> EntryColumns:
        """Return the rows from `index` on, with the first of them starting at `entry_id`."""
        rest = self._rows(slice(index, None))
        first = rest.entry_id.copy()
        first[:1] = entry_id
        return dataclasses.replace(rest, entry_id=first)

    def _rows(self, rows: slice) -> EntryColumns:
        last = None if self.last_entry_id is None else self.last_entry_id[rows]
        return EntryColumns(self.ledger_id[rows], self.entry_id[rows], last)


def add_columns(
    ledger_id: Column,
    entry_id: Column,
    *,
    deliver_at_ms: Column | None = None,
    delay_ms: Column | None = None,
    key_hash: Column | None = None,
    delay_level: Column | None = None,
) -> AddColumns:
    """Check and convert the columns of a batch.

    Raises InvalidArgument if there are no rows, if lengths differ, if there is not exactly one time column, or if
    values are not integers of their column.
    """
    if sum(given is not None for given in (deliver_at_ms, delay_ms, delay_level)) != 1:
        raise errors.InvalidArgument("exactly one of deliver_at_ms, delay_ms and delay_level must be given")
    ledger, entry = u64("ledger_id", ledger_id), u64("entry_id", entry_id)
    due = None if deliver_at_ms is None else u64("deliver_at_ms", deliver_at_ms)
    delay = None if delay_ms is None else u64("delay_ms", delay_ms)
    level = None if delay_level is None else i32("delay_level", delay_level)
    hashes = None if key_hash is None else u32("key_hash", key_hash)
    rows = _rows_of(
        ledger_id=ledger, entry_id=entry, deliver_at_ms=due, delay_ms=delay, key_hash=hashes, delay_level=level
    )
    if len(entry) != rows:
        entry = np.repeat(entry, rows)
    return AddColumns(ledger, entry, due, delay, hashes, level)


def entry_columns(ledger_id: Column, entry_id: Column, last_entry_id: Column | None = None) -> EntryColumns:
    """Check and convert positions or ranges. Raises InvalidArgument as `add_columns` does."""
    ledger, entry = u64("ledger_id", ledger_id), u64("entry_id", entry_id)
    last = None if last_entry_id is None else u64("last_entry_id", last_entry_id)
    rows = _rows_of(ledger_id=ledger, entry_id=entry, last_entry_id=last)
    return EntryColumns(
        np.broadcast_to(ledger, rows),
        np.broadcast_to(entry, rows),
        None if last is None else np.broadcast_to(last, rows),
    )


def positions(
    ledger_id: Column,
    entry_id: Column,
    deliver_at_ms: Column,
    batch_index: Column | None = None,
    redelivery_count: Column | None = None,
) -> Positions:
    """Check and convert delivered positions. Raises InvalidArgument as `add_columns` does."""
    ledger, entry = u64("ledger_id", ledger_id), u64("entry_id", entry_id)
    due = u64("deliver_at_ms", deliver_at_ms)
    index = None if batch_index is None else u32("batch_index", batch_index)
    count = None if redelivery_count is None else u32("redelivery_count", redelivery_count)
    rows = _rows_of(ledger_id=ledger, entry_id=entry, deliver_at_ms=due, batch_index=index, redelivery_count=count)
    return Positions(
        np.broadcast_to(ledger, rows),
        np.broadcast_to(entry, rows),
        np.broadcast_to(due, rows),
        None if index is None else np.broadcast_to(index, rows),
        None if count is None else np.broadcast_to(count, rows),
    )


def parts(given: Positions, rows_max: int) -> Iterator[Positions]:
    """Yield the positions in requests of at most this many rows."""
    for first in range(0, given.rows, rows_max):
        yield given.take(slice(first, first + rows_max))


@dataclasses.dataclass(frozen=True, eq=False)
class NackColumns:
    """Negatively acknowledged positions, with columns of their length or of length 1.

    Without `delay_ms`, `delay_level` and `reject`, the subscription's policy sets the time of redelivery. With
    `forwarded`, positions that are already acknowledged are redelivered too.
    """

    positions: Positions
    delay_ms: NDArray[np.uint64] | None
    delay_level: NDArray[np.int32] | None
    key_hash: NDArray[np.uint32] | None
    reject: bool
    reason: str
    forwarded: bool = False

    def requests(self, rows_max: int) -> Iterator[NackColumns]:
        """Yield requests of at most this many rows."""
        for first in range(0, self.positions.rows, rows_max):
            yield self.take(slice(first, first + rows_max))

    def take(self, rows: slice | NDArray[Any]) -> NackColumns:
        """Return some of the rows."""
        return dataclasses.replace(
            self,
            positions=self.positions.take(rows),
            **{
                # For a single position, a column for all is also one for each.
                name: column[rows] if len(column) == self.positions.rows else column
                for name in ("delay_ms", "delay_level", "key_hash")
                if (column := getattr(self, name)) is not None
            },
        )


def nack_columns(
    given: Positions,
    *,
    delay_ms: Column | None = None,
    delay_level: Column | None = None,
    key_hash: Column | None = None,
    reject: bool = False,
    reason: str = "",
    forwarded: bool = False,
) -> NackColumns:
    """Check and convert the columns that go with positions.

    Raises InvalidArgument if both delays are given, or if a column has another length.
    """
    if delay_ms is not None and delay_level is not None:
        raise errors.InvalidArgument("at most one of delay_ms and delay_level may be given")
    delay = None if delay_ms is None else u64("delay_ms", delay_ms)
    level = None if delay_level is None else i32("delay_level", delay_level)
    hashes = None if key_hash is None else u32("key_hash", key_hash)
    for name, column in (("delay_ms", delay), ("delay_level", level), ("key_hash", hashes)):
        if column is not None and len(column) not in (1, given.rows):
            raise errors.InvalidArgument(
                f"{name} has {len(column)} rows; it must have 1 or {given.rows}, as the positions"
            )
    return NackColumns(given, delay, level, hashes, reject, reason, forwarded)


@dataclasses.dataclass(frozen=True, eq=False)
class PlanColumns:
    """Messages of the message log to plan, as columns of the length of `entry_id` or of length 1."""

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    key_hash: NDArray[np.uint32] | None

    def __len__(self) -> int:
        return len(self.entry_id)

    def requests(self, rows_max: int) -> Iterator[PlanColumns]:
        """Yield requests of at most this many rows."""
        for first in range(0, len(self), rows_max):
            rows = slice(first, first + rows_max)
            hashes = None if self.key_hash is None else _cut(self.key_hash, rows)
            yield PlanColumns(_cut(self.ledger_id, rows), self.entry_id[rows], hashes)

    def whole(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return ledgers, entries and hashes, each of full length."""
        rows = len(self)
        hashes = np.zeros(1, np.uint32) if self.key_hash is None else self.key_hash
        return np.broadcast_to(self.ledger_id, rows), self.entry_id, np.broadcast_to(hashes, rows)


def plan_columns(ledger_id: Column, entry_id: Column, key_hash: Column | None) -> PlanColumns:
    """Check and convert messages to plan. Raises InvalidArgument as `add_columns` does."""
    ledger, entry = u64("ledger_id", ledger_id), u64("entry_id", entry_id)
    hashes = None if key_hash is None else u32("key_hash", key_hash)
    rows = _rows_of(ledger_id=ledger, entry_id=entry, key_hash=hashes)
    return PlanColumns(ledger, np.broadcast_to(entry, rows), hashes)


def check_unsigned(name: str, value: int, *, bits: int) -> None:
    """Raise InvalidArgument if the value is not a whole number from 0 to the maximum of that many bits."""
    limit = 2**bits - 1
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= limit:
        raise errors.InvalidArgument(f"{name} is {value!r}; it must be a whole number from 0 to {limit}")


def u64(name: str, values: Column) -> NDArray[np.uint64]:
    """Return the column as unsigned 64-bit numbers. Raises InvalidArgument."""
    return _integers(name, values, np.dtype(np.uint64))


def u32(name: str, values: Column) -> NDArray[np.uint32]:
    """Return the column as unsigned 32-bit numbers. Raises InvalidArgument."""
    return _integers(name, values, np.dtype(np.uint32))


def i32(name: str, values: Column) -> NDArray[np.int32]:
    """Return the column as signed 32-bit numbers. Raises InvalidArgument."""
    return _integers(name, values, np.dtype(np.int32))


def _integers(name: str, values: Column, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not isinstance(values, np.ndarray):
        values = _from_numbers(name, values)
    if values.ndim == 0:
        values = values.reshape(1)
    if values.ndim != 1:
        raise errors.InvalidArgument(f"{name} has {values.ndim} dimensions; a column has 1")
    if values.dtype == dtype or not len(values):
        return values.astype(dtype, copy=False)
    if values.dtype.kind not in "ui":
        raise errors.InvalidArgument(f"{name} holds {values.dtype}; it must hold integers")
    limits = np.iinfo(dtype)
    for extreme in (int(values.min()), int(values.max())):
        if not limits.min <= extreme <= limits.max:
            raise errors.InvalidArgument(f"{name} holds {extreme}; it must be from {limits.min} to {limits.max}")
    return values.astype(dtype)


def _from_numbers(name: str, values: SupportsIndex | Sequence[int]) -> NDArray[Any]:
    if isinstance(values, (str, bytes)):
        raise errors.InvalidArgument(f"{name} is text; it must hold integers")
    if not isinstance(values, Sequence):
        try:
            values = [operator.index(values)]
        except TypeError:
            raise errors.InvalidArgument(f"{name} is a {type(values).__name__}; it must hold integers") from None
    array = np.asarray(values)
    if array.dtype.kind not in "fO" or not len(values):
        return array
    # numpy makes floats or objects of a list that mixes numbers below and above 2^63, or has numbers beyond 64 bits.
    for value in values:
        if not isinstance(value, (int, np.integer)):
            raise errors.InvalidArgument(f"{name} holds {value!r}; it must hold integers")
    for extreme in (min(values), max(values)):
        if not 0 <= extreme <= _U64_MAX:
            raise errors.InvalidArgument(f"{name} holds {extreme}; it must be from 0 to {_U64_MAX}")
    return np.array(values, dtype=np.uint64)


def _rows_of(**given: NDArray[Any] | None) -> int:
    """Return the length of the longest column; the others must have it too, or 1. Raises InvalidArgument."""
    lengths = {name: len(column) for name, column in given.items() if column is not None}
    rows = max(lengths.values())
    for name, length in lengths.items():
        if length == 0:
            raise errors.InvalidArgument(f"{name} has no rows; a batch has at least 1")
        if length not in (1, rows):
            raise errors.InvalidArgument(f"{name} has {length} rows; it must have 1 or {rows}, as the longest column")
    return rows


def rows_per_request(row_bytes: int, rows_max: int, bytes_max: int) -> int:
    """Return how many rows of this size (bytes) fit one request."""
    return max(1, min(rows_max, (bytes_max - REQUEST_OVERHEAD_BYTES) // row_bytes))


def positions_per_request(rows_max: int, bytes_max: int) -> int:
    """Return how many delivered positions fit one request, whatever it says of them."""
    return rows_per_request(_POSITION_BYTES, rows_max, bytes_max)


def _cut(column: NDArray[Any], rows: slice) -> NDArray[Any]:
    return column if len(column) == 1 else column[rows]
