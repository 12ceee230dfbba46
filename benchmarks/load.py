"""Rows to add, the same for every contender.

Owns: positions in the order in which a broker writes them or shuffled, and due times, from a seed.
Does not own: how a contender is given them (`tarry_load`, `redis_load`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# As a broker rolls its ledgers.
ROWS_PER_LEDGER = 50_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Columns of one length, in the order of adding."""

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64

    def __len__(self) -> int:
        return len(self.entry_id)

    def batches(self, rows: int) -> Iterator[Rows]:
        for first in range(0, len(self), rows):
            part = slice(first, first + rows)
            yield Rows(self.ledger_id[part], self.entry_id[part], self.deliver_at_ms[part])

    def joined(self) -> U64:
        """Each position as one number; for counting what came back."""
        return self.ledger_id << np.uint64(32) | self.entry_id


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def in_order(deliver_at_ms: U64, *, first_ledger: int = 0) -> Rows:
    """Entries counted from 0 in each ledger, ledger after ledger."""
    numbers = np.arange(len(deliver_at_ms), dtype=np.uint64)
    per_ledger = np.uint64(ROWS_PER_LEDGER)
    return Rows(numbers // per_ledger + np.uint64(first_ledger), numbers % per_ledger, deliver_at_ms)


def shuffled(deliver_at_ms: U64, *, seed: int) -> Rows:
    """The same positions, in any order over all ledgers."""
    rows = in_order(deliver_at_ms)
    order = np.random.default_rng(seed).permutation(len(rows))
    return Rows(rows.ledger_id[order], rows.entry_id[order], rows.deliver_at_ms)


def random_due(rows: int, *, from_ms: int, until_ms: int, seed: int) -> U64:
    """Any time from `from_ms` on, below `until_ms`."""
    return np.random.default_rng(seed).integers(from_ms, until_ms, rows, dtype=np.uint64)


def over_a_day(rows: int, *, seed: int) -> U64:
    """Any time of the day that begins in an hour."""
    from_ms = now_ms() + HOUR_MS
    return random_due(rows, from_ms=from_ms, until_ms=from_ms + DAY_MS, seed=seed)


def fixed_delay(rows: int, *, delay_ms: int, rows_per_ms: int) -> U64:
    """The same delay for all, of rows that arrive at a steady rate."""
    arrivals = np.arange(rows, dtype=np.uint64) // np.uint64(rows_per_ms)
    return arrivals + np.uint64(now_ms() + delay_ms)
