"""What consumers of keys saw, against what they are promised.

Owns: the rules, over columns of everything that was received and asked for: nothing lost, early, or after it was
acknowledged; one key unacknowledged at one consumer; the order of each key. Does not own: receiving.

The unit of order is the hash slot. A row was delivered first when any consumer first read it. Rows that had come due
when a consumer left, and had not come anywhere yet, are left out of the order of first delivery unless a key's rows are
due in the order of positions: they may have been on their way to that consumer, and come back in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.key_dispatcher import I64, NEVER_NS, Mask, Seen
from benchmarks.key_load import Load

NS_PER_MS = 1_000_000
# Figures of promises; each must be 0.
MISSING = "rows that never came"
UNACKNOWLEDGED = "rows that nobody acknowledged"
OTHER = "rows that were never added so"
EARLY = "rows that came early"
AFTER_ACKNOWLEDGEMENT = "rows that came after they were acknowledged"
FIRST_DELIVERY = "inversions of first delivery"
AT_TWO = "keys unacknowledged at two consumers"
ACKNOWLEDGEMENT = "inversions of acknowledgement"


class Account:
    """`answered_at_ms`: when each row was answered to be added."""

    def __init__(self, of: Load, seen: Seen, answered_at_ms: I64) -> None:
        self._load = of
        self._seen = seen
        self.due_ns: I64 = of.rows.deliver_at_ms.astype(np.int64) * NS_PER_MS
        self.in_time: Mask = answered_at_ms < of.rows.deliver_at_ms.astype(np.int64)
        self.first_ns = _least(len(of), seen.received_number, seen.received_at_ns)
        acknowledged = ~seen.settled_is_nack
        # The last one is the one that counted: what is acknowledged does not come again.
        self.acknowledged_ns: I64 = np.full(len(of), -1)
        np.maximum.at(self.acknowledged_ns, seen.settled_number[acknowledged], seen.settled_at_ns[acknowledged])
        self.nacked_ns = _least(len(of), seen.settled_number[~acknowledged], seen.settled_at_ns[~acknowledged])

    def breaches(self) -> dict[str, int]:
        """How many there are of each promise."""
        seen = self._seen
        breaches = {
            MISSING: int(np.count_nonzero(self.first_ns == NEVER_NS)),
            UNACKNOWLEDGED: int(np.count_nonzero(self.acknowledged_ns < 0)),
            OTHER: seen.other_rows,
            EARLY: self._early(),
            AFTER_ACKNOWLEDGEMENT: self._after_acknowledgement(),
            FIRST_DELIVERY: self.inversions(self.first_ns, self.in_time & self._came_by_due_time()),
            AT_TWO: at_two_consumers(
                self._load.slot[seen.held_number], seen.held_consumer, seen.held_from_ns, seen.held_until_ns
            ),
        }
        if self._load.plan.in_order:
            breaches[ACKNOWLEDGEMENT] = self.inversions(self.acknowledged_ns, self.in_time)
        return breaches

    def figures(self) -> Iterator[tuple[str, float]]:
        seen = self._seen
        nacks = int(np.count_nonzero(seen.settled_is_nack))
        yield "rows nacked", int(np.count_nonzero(self.nacked_ns != NEVER_NS))
        yield "rows that came again, not for a nack", len(seen.received_number) - len(self._load) - nacks
        yield "rows taken back", seen.taken_back
        yield "acknowledgements and nacks ignored", seen.ignored
        yield "consumers joined", seen.joins
        yield "consumers left", len(seen.left_ns)
        yield "rows late on arrival", int(np.count_nonzero(~self.in_time))
        yield "rows left out of the order", int(np.count_nonzero(~self._came_by_due_time()))

    def lateness_ms(self) -> NDArray[np.float64]:
        """Of the first delivery of each row that was added in time."""
        chosen = self.in_time & (self.first_ns != NEVER_NS)
        lateness: NDArray[np.float64] = (self.first_ns - self.due_ns)[chosen] / NS_PER_MS
        return lateness

    def free_lateness_ms(self) -> NDArray[np.float64]:
        """The same, of rows of whose key none was nacked and still unacknowledged when they were due."""
        order = self._in_order(np.ones(len(self._load), bool))
        until_ns = np.where(self.nacked_ns == NEVER_NS, -1, self.acknowledged_ns)[order]
        behind = np.empty(len(order), bool)
        behind[order] = _before(self._load.slot[order], until_ns) >= self.due_ns[order]
        chosen = self.in_time & (self.first_ns != NEVER_NS) & ~behind
        lateness: NDArray[np.float64] = (self.first_ns - self.due_ns)[chosen] / NS_PER_MS
        return lateness

    def inversions(self, at_ns: I64, chosen: Mask) -> int:
        """Chosen rows for which it was before it was for an earlier chosen row of their key; never is last."""
        order = self._in_order(chosen)
        of_slot = self._load.slot[order]
        at = np.where(at_ns < 0, NEVER_NS, at_ns)[order]
        return int(np.count_nonzero(at < _before(of_slot, at)))

    def _in_order(self, chosen: Mask) -> NDArray[np.intp]:
        """The chosen rows by slot, due time and position."""
        rows = np.flatnonzero(chosen)
        due = self._load.rows.deliver_at_ms[rows]
        order: NDArray[np.intp] = rows[np.lexsort((rows, due, self._load.slot[rows]))]
        return order

    def _came_by_due_time(self) -> Mask:
        if self._load.plan.in_order:
            return np.ones(len(self._load), bool)
        came = np.ones(len(self._load), bool)
        for asked_ns, answered_ns in self._seen.left_ns.tolist():
            came &= ~((self.due_ns <= answered_ns) & (self.first_ns >= asked_ns))
        return came

    def _early(self) -> int:
        seen = self._seen
        number, at_ns = seen.received_number, seen.received_at_ns
        not_before_ns = self.due_ns[number]
        again = seen.received_count > 0
        nacked_ns = self.nacked_ns[number[again]]
        delay_ns = self._load.plan.nack_delay_ms * NS_PER_MS
        not_before_ns[again] = np.where(nacked_ns == NEVER_NS, NEVER_NS, nacked_ns + delay_ns)
        return int(np.count_nonzero(at_ns < not_before_ns))

    def _after_acknowledgement(self) -> int:
        seen = self._seen
        known = ~seen.settled_is_nack & (seen.settled_answered_ns != NEVER_NS)
        answered_ns = _least(len(self._load), seen.settled_number[known], seen.settled_answered_ns[known])
        return int(np.count_nonzero(seen.received_at_ns > answered_ns[seen.received_number]))


def at_two_consumers(slot: NDArray[Any], consumer: I64, from_ns: I64, until_ns: I64) -> int:
    """Slots that a consumer came to have while another one had them. Columns: from when until when a consumer had a row
    of a slot.
    """
    order = np.lexsort((until_ns, from_ns, slot))
    slot, consumer = slot[order], consumer[order]
    another = np.zeros(len(order), bool)
    another[1:] = (slot[1:] == slot[:-1]) & (consumer[1:] != consumer[:-1])
    while_held = from_ns[order] < _before(slot, until_ns[order])
    return len(np.unique(slot[another & while_held]))


def _least(rows: int, number: I64, value: I64) -> I64:
    least = np.full(rows, NEVER_NS)
    np.minimum.at(least, number, value)
    return least


def _before(group: NDArray[Any], value: I64) -> I64:
    """The greatest value before each row in its group, -1 where it is the first; groups stand together."""
    if not len(value):
        return np.empty(0, np.int64)
    distinct, rank = np.unique(value, return_inverse=True)
    begins = np.ones(len(group), bool)
    begins[1:] = group[1:] != group[:-1]
    # Of a later group everything is greater.
    span = np.cumsum(begins) * len(distinct)
    greatest = np.maximum.accumulate(span + rank)
    before = np.full(len(value), -1)
    later = np.flatnonzero(~begins)
    before[later] = distinct[greatest[later - 1] - span[later]]
    return before
