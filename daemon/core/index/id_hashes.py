"""Hashes schedule ids to 128 bits, by columns.

The hash is multilinear: four sums of the 32-bit words of an id and its length, each word times a secret number, modulo
2^64; the upper half of each sum is kept. Two ids that were chosen without knowledge of the secret collide with a
probability of 2^-128, which is proved (Lemire and Kaser, "Strongly universal string hashing is fast"), not assumed. It
costs 0.1 microseconds a row in numpy, without the interpreter's lock. A call of BLAKE2b costs ten times that for each
row, and SipHash in numpy three times.

The secret must stay secret: whoever knows it can make ids that collide. Hashes therefore never leave the process.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U64
from storage_backends.formats.schedule_ids import BYTES_MAX, Index, ScheduleIds

SECRET_BYTES_MIN: Final = 16
"""The fewest bytes of a secret."""

_SUMS = 4
_HALF = np.uint64(32)
_UPPER_HALF = np.uint64(0xFFFFFFFF << 32)
# A row of numbers for the constant, one for the length, and one for each word
_WORDS_MAX = BYTES_MAX // 4
_BEFORE_WORDS = 2


class IdHashes(NamedTuple):
    """The hashes of n ids: the `high` and `low` halves, u64[n]."""

    high: U64
    low: U64

    def take(self, index: Index) -> IdHashes:
        """Return the hashes that an index array, a mask of n or a slice selects."""
        return IdHashes(self.high[index], self.low[index])

    @property
    def rows(self) -> int:
        """The number of hashes."""
        return len(self.high)


class IdHasher:
    """A hash function that `secret` chooses: bytes that nobody outside the process knows or can guess."""

    def __init__(self, secret: bytes) -> None:
        """Raise InvariantViolated if the secret is short enough to be guessed."""
        if len(secret) < SECRET_BYTES_MIN:
            raise InvariantViolated(f"the secret of schedule ids has {len(secret)} bytes; it needs {SECRET_BYTES_MIN}")
        numbers = (_BEFORE_WORDS + _WORDS_MAX) * _SUMS
        drawn = np.frombuffer(hashlib.shake_256(secret).digest(8 * numbers), np.uint64)
        self._numbers: npt.NDArray[Any] = drawn.reshape(-1, _SUMS)

    def hashes_of(self, ids: ScheduleIds) -> IdHashes:
        """Return the hashes of n ids; rows without an id get a hash, too."""
        words = ids.words().view(np.uint32)
        width = words.shape[1]
        sums = words @ self._numbers[_BEFORE_WORDS : _BEFORE_WORDS + width]
        sums += ids.lengths[:, None] * self._numbers[1]
        sums += self._numbers[0]
        return IdHashes(
            (sums[:, 0] & _UPPER_HALF) | (sums[:, 1] >> _HALF), (sums[:, 2] & _UPPER_HALF) | (sums[:, 3] >> _HALF)
        )
