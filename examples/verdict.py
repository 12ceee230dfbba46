"""Checks by identity what was added against what was delivered, position by position.

The account of a run is columns with one element a row. These are the rules. Each row is delivered at least once, with
the due time and the key hash that it was added with, and not before that time. It is delivered again only if that is
owed: under a higher epoch, which is after a kill, and while no answer had said that its acknowledgement is durable; or
if its add was sent again because the answer was lost and the first one was already acknowledged, which makes it a new
row.
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
from numpy.typing import NDArray

# The time of an event that has not happened
NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class Rule:
    """One promise, and how many rows break it."""

    name: str
    broken: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All promises, and counts that are no breach and worth knowing."""

    rules: tuple[Rule, ...]
    handed_out_again: int
    """Repeats that were owed"""
    added_again: int
    """The owed repeats of rows whose lost answer made their add a new row"""

    @property
    def kept(self) -> bool:
        return all(rule.broken == 0 for rule in self.rules)


class Account:
    """The account of a run.

    Rows are named by position when they are delivered and by their number when they are added. Thread-safe.
    """

    def __init__(
        self,
        ledger_id: NDArray[np.uint64],
        entry_id: NDArray[np.uint64],
        deliver_at_ms: NDArray[np.uint64],
        key_hash: NDArray[np.uint32] | None,
    ) -> None:
        """Take the rows, ledgers ascending and entries counted from 0 within each."""
        rows = len(entry_id)
        self.deliver_at_ms = deliver_at_ms.astype(np.int64)
        self._key_hash = key_hash
        self._ledgers, self._first, self._lengths = np.unique(ledger_id, return_index=True, return_counts=True)
        self.answered_at_ms = np.full(rows, NEVER, dtype=np.int64)
        self.first_received_at_ms = np.full(rows, NEVER, dtype=np.int64)
        self.durable_at_ms = np.full(rows, NEVER, dtype=np.int64)
        self._sent_again = np.zeros(rows, dtype=np.bool_)
        self._last_epoch = np.zeros(rows, dtype=np.uint64)
        self._lock = threading.Lock()
        self._received = self._durable = self._answered = 0
        self._unknown = self._early = self._wrong_time = self._wrong_key = 0
        self._not_owed = self._after_durable = self._handed_out_again = self._added_again = 0

    def __len__(self) -> int:
        return len(self.deliver_at_ms)

    @property
    def answered(self) -> int:
        """The number of rows whose add was answered."""
        return self._answered

    @property
    def received(self) -> int:
        """The number of rows received at least once."""
        return self._received

    @property
    def durable(self) -> int:
        """The number of rows whose acknowledgement is durable."""
        return self._durable

    def note_answered(self, rows: slice, at_ms: int) -> None:
        """Note that the add of these rows was answered OK."""
        with self._lock:
            self.answered_at_ms[rows] = np.minimum(self.answered_at_ms[rows], at_ms)
            self._answered += rows.stop - rows.start

    def note_sent_again(self, rows: slice) -> None:
        """Note that the add of these rows had no answer when the daemon was killed, and will be sent again."""
        with self._lock:
            self._sent_again[rows] = True

    def note_received(
        self,
        ledger_id: NDArray[np.uint64],
        entry_id: NDArray[np.uint64],
        deliver_at_ms: NDArray[np.uint64],
        key_hash: NDArray[np.uint32] | None,
        *,
        epoch: int,
        at_ms: int | NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Note rows that came, all at once or each at its time; return the numbers of those that exist."""
        rows, known = self._numbers(ledger_id, entry_id)
        at_ms = np.broadcast_to(np.asarray(at_ms), known.shape)[known]
        rows, due = rows[known], deliver_at_ms.astype(np.int64)[known]
        with self._lock:
            self._unknown += int(np.count_nonzero(~known))
            self._early += int(np.count_nonzero(due > at_ms) + np.count_nonzero(self.deliver_at_ms[rows] > at_ms))
            self._wrong_time += int(np.count_nonzero(due != self.deliver_at_ms[rows]))
            if self._key_hash is not None:
                hashes = np.zeros(len(rows), dtype=np.uint32) if key_hash is None else key_hash[known]
                self._wrong_key += int(np.count_nonzero(hashes != self._key_hash[rows]))
            self._judge_repeats(rows, epoch, at_ms)
            fresh, first = np.unique(rows[(is_fresh := self.first_received_at_ms[rows] == NEVER)], return_index=True)
            self.first_received_at_ms[fresh] = at_ms[is_fresh][first]
            self._received += len(fresh)
            self._last_epoch[rows] = epoch
        return rows

    def note_durable(self, rows: NDArray[np.int64], at_ms: int) -> None:
        """Note that the acknowledgement of these rows was answered."""
        with self._lock:
            fresh = np.unique(rows[self.durable_at_ms[rows] == NEVER])
            self.durable_at_ms[fresh] = at_ms
            self._durable += len(fresh)

    def verdict(self) -> Verdict:
        """Return the current verdict; a row is lost if it was answered and has not come."""
        with self._lock:
            answered = self.answered_at_ms != NEVER
            lost = answered & (self.first_received_at_ms == NEVER)
            return Verdict(
                rules=(
                    Rule("every row was added", int(np.count_nonzero(~answered))),
                    Rule("none is lost", int(np.count_nonzero(lost))),
                    Rule("none is early", self._early),
                    Rule("due times are right", self._wrong_time),
                    Rule("key hashes are right", self._wrong_key),
                    Rule("nothing comes that was not added", self._unknown),
                    Rule("no repeat but after a kill", self._not_owed),
                    Rule("no repeat of what was acknowledged", self._after_durable),
                    Rule("every acknowledgement is durable", len(self) - self._durable),
                ),
                handed_out_again=self._handed_out_again,
                added_again=self._added_again,
            )

    def _judge_repeats(self, rows: NDArray[np.int64], epoch: int, at_ms: NDArray[np.int64]) -> None:
        distinct, first, counts = np.unique(rows, return_index=True, return_counts=True)
        self._not_owed += int((counts - 1).sum())
        came_before = self.first_received_at_ms[distinct] != NEVER
        again = distinct[came_before]
        if not len(again):
            return
        # By the time of receipt: an answer that comes after a repeat may be handled before it.
        durable = self.durable_at_ms[again] < at_ms[first][came_before]
        added_again = durable & self._sent_again[again] & (self.durable_at_ms[again] < self.answered_at_ms[again])
        breach = durable & ~added_again
        not_owed = ~durable & (self._last_epoch[again] >= epoch)
        self._after_durable += int(np.count_nonzero(breach))
        self._not_owed += int(np.count_nonzero(not_owed))
        self._added_again += int(np.count_nonzero(added_again))
        self._handed_out_again += int(np.count_nonzero(~breach & ~not_owed))

    def _numbers(
        self, ledger_id: NDArray[np.uint64], entry_id: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the number of each position and whether it is one of ours."""
        place = np.minimum(np.searchsorted(self._ledgers, ledger_id), len(self._ledgers) - 1)
        known = (self._ledgers[place] == ledger_id) & (entry_id < self._lengths[place].astype(np.uint64))
        return self._first[place] + np.where(known, entry_id, 0).astype(np.int64), known
