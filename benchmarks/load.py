"""Makes rows to add, the same for every contender.

Positions are in a broker's order or shuffled, and due times follow from a seed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# The ledgers roll as a broker's do.
ROWS_PER_LEDGER = 50_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows as columns of one length, in the order of adding."""

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
        """Return each position as one number, for counting deliveries."""
        return self.ledger_id << np.uint64(32) | self.entry_id


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def in_order(deliver_at_ms: U64, *, first_ledger: int = 0) -> Rows:
    """Count entries from 0 in each ledger, ledger after ledger."""
    numbers = np.arange(len(deliver_at_ms), dtype=np.uint64)
    per_ledger = np.uint64(ROWS_PER_LEDGER)
    return Rows(numbers // per_ledger + np.uint64(first_ledger), numbers % per_ledger, deliver_at_ms)


def shuffled(deliver_at_ms: U64, *, seed: int) -> Rows:
    """Return the same positions, in any order over all ledgers."""
    rows = in_order(deliver_at_ms)
    order = np.random.default_rng(seed).permutation(len(rows))
    return Rows(rows.ledger_id[order], rows.entry_id[order], rows.deliver_at_ms)


def random_due(rows: int, *, from_ms: int, until_ms: int, seed: int) -> U64:
    """Return random times from `from_ms` on, below `until_ms`."""
    return np.random.default_rng(seed).integers(from_ms, until_ms, rows, dtype=np.uint64)


def over_a_day(rows: int, *, seed: int) -> U64:
    """Return random times of the day that begins in an hour."""
    from_ms = now_ms() + HOUR_MS
    return random_due(rows, from_ms=from_ms, until_ms=from_ms + DAY_MS, seed=seed)


def fixed_delay(rows: int, *, delay_ms: int, rows_per_ms: int) -> U64:
    """Return the same delay for all, of rows that arrive at a steady rate."""
    arrivals = np.arange(rows, dtype=np.uint64) // np.uint64(rows_per_ms)
    return arrivals + np.uint64(now_ms() + delay_ms)
