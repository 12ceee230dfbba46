"""Rows of positions in the order in which they came, in memory.

Owns: growing columns, to which rows are appended one by one or many at once; what was read of them does not change.
Does not own: what the rows are, and which of them still count.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from daemon.core.index.positions import KeyedRows, PageTable
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
        keys = self.keys[index]
        ledger_id, entry_id = self._pages.positions(keys)
        key_hash = None if self._key_hash is None else self._key_hash[: self._rows][index]
        return KeyedRows(Rows(self.deliver_at_ms[index], ledger_id, entry_id, key_hash), keys)

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
