"""The rows of `life`, and what has to have become of each.

Owns: which rows there are, which are withdrawn and what their new times are, from a seed; the account of them, row by
row. Does not own: sending, receiving and the times that are measured (`life`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks import load, tarry_load

Numbers = NDArray[np.int64]

# Of the rows that are withdrawn, those that come due in the measured time: some of them meanwhile.
RACING = 0.01
# Of the rows that are rescheduled, those whose new time is in the second half of the measured time.
SOONER = 0.1
# Rows that only wait come due at any time of a day, from so long after the measured time on.
LATER_MS = 15 * 60_000


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows as numbers; the columns follow from them.

    `waiting`: rows that do not come due while it is measured. `due`: rows that do, from `begin_ms` on, below `end_ms`.
    """

    waiting: int
    due: int
    begin_ms: int
    end_ms: int
    seed: int


class Load:
    """The columns of a plan. A row's number is its place in them."""

    def __init__(self, plan: Plan) -> None:
        random = np.random.default_rng(plan.seed)
        total = plan.waiting + plan.due
        later_ms = (plan.end_ms + LATER_MS, plan.end_ms + LATER_MS + load.DAY_MS)
        due = random.integers(*later_ms, total, dtype=np.uint64)
        order = random.permutation(total)
        self._soon, self._later = order[: plan.due], order[plan.due :]
        due[self._soon] = random.integers(plan.begin_ms, plan.end_ms, plan.due, dtype=np.uint64)
        self.rows = load.in_order(due)
        self.new_deliver_at_ms = random.integers(*later_ms, total, dtype=np.uint64)
        if plan.due:
            sooner = random.random(total) < SOONER
            half_ms = (plan.begin_ms + plan.end_ms) // 2
            self.new_deliver_at_ms[sooner] = random.integers(
                half_ms, plan.end_ms, np.count_nonzero(sooner), dtype=np.uint64
            )

    def chosen(self, part: int, rows: int) -> Numbers:
        """So many random rows, other ones in each part."""
        racing = int(rows * RACING) if len(self._soon) else 0
        waiting = rows - racing
        numbers = np.concatenate(
            (self._soon[part * racing : (part + 1) * racing], self._later[part * waiting : (part + 1) * waiting])
        )
        if len(numbers) != rows:
            raise ValueError(f"part {part} of {rows:,} rows: there are {len(self.rows):,} rows in all")
        return np.random.default_rng(part).permutation(numbers)


class Account:
    """What the clients were told of each row."""

    def __init__(self, of: Load) -> None:
        self._new_deliver_at_ms = of.new_deliver_at_ms
        self._rows = of.rows
        self.deliver_at_ms = of.rows.deliver_at_ms.copy()
        self._cancelled = np.zeros(len(of.rows), np.bool_)
        self._late_on_arrival = np.zeros(len(of.rows), np.bool_)

    def note_cancelled(self, numbers: Numbers) -> None:
        self._cancelled[numbers] = True

    def note_rescheduled(self, numbers: Numbers, answered_at_ms: Numbers) -> None:
        """They have their new times since these answers, at the latest."""
        times = self._new_deliver_at_ms[numbers]
        self.deliver_at_ms[numbers] = times
        self._late_on_arrival[numbers] = times.astype(np.int64) <= answered_at_ms

    def owed(self, *, until_ms: int) -> load.Rows:
        """Rows that are due before."""
        return self._taken(~self._cancelled & (self.deliver_at_ms < until_ms))

    def pending(self, *, from_ms: int) -> load.Rows:
        """Rows that are due then or later."""
        return self._taken(~self._cancelled & (self.deliver_at_ms >= from_ms))

    def in_time(self, came: load.Rows) -> NDArray[np.bool_]:
        """Which of the rows had their time before it came."""
        known, numbers = self._numbers(came)
        return known & ~self._late_on_arrival[numbers]

    def problems(self, came: load.Rows, received_at_ms: Numbers, *, until_ms: int) -> Iterator[str]:
        """What is wrong with rows that came until everything before `until_ms` should have."""
        known, numbers = self._numbers(came)
        if cancelled := np.count_nonzero(self._cancelled[numbers] & known):
            yield f"{cancelled:,} rows came that were cancelled"
        if early := np.count_nonzero(received_at_ms < self.deliver_at_ms[numbers].astype(np.int64)):
            yield f"{early:,} rows came early"
        if differs := tarry_load.difference(came, self.owed(until_ms=until_ms)):
            yield differs

    def _taken(self, mask: NDArray[np.bool_]) -> load.Rows:
        return load.Rows(self._rows.ledger_id[mask], self._rows.entry_id[mask], self.deliver_at_ms[mask])

    def _numbers(self, came: load.Rows) -> tuple[NDArray[np.bool_], Numbers]:
        """Which of the rows there are, and their numbers."""
        positions = self._rows.joined()
        numbers = np.minimum(np.searchsorted(positions, came.joined()), len(positions) - 1)
        known: NDArray[np.bool_] = positions[numbers] == came.joined()
        return known, numbers
