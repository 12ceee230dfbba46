"""A column of integers in as few bytes a row as its range needs.

Owns: the form in memory: offsets from the smallest value, of 0, 1, 2, 4 or 8 bytes each; rows are read without
unpacking the others.
Does not own: stored forms (`storage_backends.formats.column_format`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from storage_backends.formats.row_columns import U64, Index

_WIDTHS = ((8, np.uint8), (16, np.uint16), (32, np.uint32), (64, np.uint64))

Unsigned = npt.NDArray[np.unsignedinteger[Any]]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PackedColumn:
    """n values. `offsets`: from `base`; None where all are the base. Never changed."""

    base: int
    rows: int
    offsets: Unsigned | None

    @staticmethod
    def of(values: Unsigned) -> PackedColumn:
        """The column of unsigned integers."""
        if not len(values):
            return PackedColumn(0, 0, None)
        base, last = int(values.min()), int(values.max())
        if base == last:
            return PackedColumn(base, len(values), None)
        return PackedColumn(base, len(values), narrowed(values - values.dtype.type(base), (last - base).bit_length()))

    def take(self, index: Index) -> U64:
        """The values that an index array, a mask of n or a slice selects."""
        if self.offsets is None:
            return np.full(len(np.empty(self.rows, np.uint8)[index]), self.base, np.uint64)
        values: U64 = self.offsets[index].astype(np.uint64)
        values += np.uint64(self.base)
        return values

    @property
    def size_bytes(self) -> int:
        return 0 if self.offsets is None else self.offsets.nbytes


def narrowed(values: Unsigned, bits: int) -> Unsigned:
    """Values of at most so many bits, in the narrowest type."""
    kind = next(kind for width, kind in _WIDTHS if bits <= width)
    return values.astype(kind)
