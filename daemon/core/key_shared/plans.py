"""Plans: who is to receive messages that are not delayed, and have no row.

Owns: answering a plan, what was planned before, and what becomes of planned positions by requests that name them.
Does not own: keys of planned positions (`planned_positions`), who may receive what (`planning`), what waits
(`key_shared`), and the order of sent positions (`last_sent_position`).

Nothing of a plan is durable. A planned position that is negatively acknowledged gets a row, and is like any other then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from daemon.core.in_flight import InFlight, Mask
from daemon.core.key_shared.ready import Ready
from daemon.core.positions import KeyedRows, bitmap_of, contained
from daemon.errors import QuotaExceeded
from storage_backends.formats.rows import U32, U64, Rows

if TYPE_CHECKING:
    from daemon.core.key_shared.key_shared import KeyShared

# Planned positions that may wait: they are in memory.
PLANNED_WAITING_MAX = 200_000
PLANNED_WAITING_RETRY_MS = 1_000


class Plans:
    """The plans of one subscription, of all its streams."""

    def __init__(self, shared: KeyShared, ready: Ready) -> None:
        self._shared = shared
        self._ready = ready
        self._in_flight: InFlight = ready.in_flight

    def hold(self, stream: int, positions: Rows, numbers: U32, *, elapsed_ms: int) -> Mask:
        """Which of the positions, none of which has a row, are IN_FLIGHT from now on at consumers that declare to hold
        them: planned by a former owner, or for a stream that is no more. See `KeyShared.hold`.
        """
        keys = self._shared.planned.intern(positions.ledger_id, positions.entry_id)
        places = np.flatnonzero(~contained(keys, self._in_flight.among(bitmap_of(keys))))
        rows = KeyedRows(positions, keys).take(places)
        held = np.zeros(len(keys), np.bool_)
        held[places] = self._shared.hold(rows, numbers[places], elapsed_ms=elapsed_ms) if len(places) else False
        self._shared.planned.add(stream, keys[held])
        return held

    def plan(self, stream: int, positions: Rows, *, elapsed_ms: int) -> U32:
        """Who of a stream's consumers receives each position now, 0: HELD. Positions in the order of the log, no one
        twice, none that has a row. Raises QuotaExceeded.
        """
        self._shared.now(elapsed_ms)
        self._check_planned(len(positions))
        keys = self._shared.planned.intern(positions.ledger_id, positions.entry_id)
        self._shared.last_sent.offer(positions.ledger_id, positions.entry_id)
        answers = np.zeros(len(positions), np.uint32)
        known = self._shared.planned.are_planned(keys)
        if known.any():
            answers[known] = self._held_on(stream, positions.take(known), keys[known])
        new = ~known
        self._shared.planned.add(stream, keys)
        if self._shared.holds_joined_back:
            # Who joined since waits for what was sent before: it must not wait behind what never was.
            again = new & self._shared.last_sent.were_sent(positions.ledger_id, positions.entry_id)
            self._shared.back(KeyedRows(positions, keys).take(again))
            new &= ~again
        if new.any():
            answers[new] = self._plan_new(stream, KeyedRows(positions, keys).take(new))
        return answers

    def _check_planned(self, rows: int) -> None:
        planned = self._shared.planned.keys
        waiting = self._shared.waiting.keys.intersection_cardinality(planned)
        # Others of them may be READY.
        waiting += min(self._ready.ready_rows, len(planned) - waiting)
        if waiting + rows > PLANNED_WAITING_MAX:
            waiting = len(planned) - len(self._in_flight.among(planned))
        if waiting + rows > PLANNED_WAITING_MAX:
            raise QuotaExceeded(
                f"{waiting} planned positions wait, and {rows} more were named; the limit is {PLANNED_WAITING_MAX}",
                retry_after_ms=PLANNED_WAITING_RETRY_MS,
            )

    def _held_on(self, stream: int, positions: Rows, keys: U64) -> U32:
        """Of positions that are planned already who of a stream holds each; 0 where nobody does."""
        holders = self._in_flight.holders_of(keys)
        held = np.flatnonzero(holders)
        if len(held):
            self._shared.last_sent.sent(positions.ledger_id[held], positions.entry_id[held])
            streams = self._shared.consumers.streams_of(self._shared.consumers.ordinals_of(holders[held]))
            holders[held[streams != np.uint32(stream)]] = 0
        return holders

    def _plan_new(self, stream: int, rows: KeyedRows) -> U32:
        answers = np.zeros(len(rows), np.uint32)
        room = self._ready.in_flight_room
        if self._ready.ready_rows or not self._shared.is_whole or room <= 0:
            # What came before goes first.
            self._ready.append_ready(rows)
            return answers
        changed, permits = self._shared.something_changed(), self._shared.consumers.permits()
        on_stream = self._shared.consumers.are_on(stream)
        sent = self._shared.send_or_keep(rows, np.where(on_stream, permits, 0), room)
        # What is for consumers of other streams goes out on these.
        if changed or permits[~on_stream].any():
            self._shared.look_again()
        answers[contained(rows.keys, bitmap_of(sent.rows.keys))] = self._shared.consumers.numbers_of(sent.consumers)
        return answers

    def take(self, ledger_id: U64, entry_id: U64) -> tuple[Mask, U32]:
        """Planned positions are acknowledged, or about to have a row, and at nobody then: (which of them are planned,
        and do not wait for a NACKED row; u32[n], the hashes of these, as far as they were in flight or waited).
        """
        hashes = np.zeros(len(ledger_id), np.uint32)
        keys = self._shared.planned.find(ledger_id, entry_id)
        taken = self._shared.planned.are_planned(keys)
        if not taken.any():
            return taken, hashes
        places = np.flatnonzero(taken)
        rows, found = self._in_flight.take_rows(keys[places], np.zeros(len(places), np.uint64))
        hashes[places[found]] = rows.key_hash()
        elsewhere = bitmap_of(keys[places[~found]])
        if elsewhere:
            if self._shared.nacks is not None:
                kept_back = self._shared.waiting.where(elsewhere, self._shared.nacks.are_kept_back)
                taken &= ~contained(keys, kept_back)
                elsewhere -= kept_back
            waited = self._shared.waiting.remove(elsewhere)
            here = contained(keys, bitmap_of(waited.keys))
            order = np.argsort(waited.keys)
            hashes[here] = waited.key_hash()[order[np.searchsorted(waited.keys, keys[here], sorter=order)]]
            self._ready.withdraw(elsewhere)
        return taken, hashes

    def got_rows(self, rows: KeyedRows) -> None:
        """Entries that had none are about to have a row; those that were planned are planned no longer."""
        keys = self._shared.planned.find(rows.rows.ledger_id, rows.rows.entry_id)
        planned = self._shared.planned.are_planned(keys)
        if not planned.any():
            return
        named, rows = keys[planned], rows.take(planned)
        if self._shared.holds is not None:
            self._shared.holds.rename(named, rows.keys)
        self._shared.last_sent.sent(rows.rows.ledger_id, rows.rows.entry_id)
        self._end(bitmap_of(named))

    def come_by_rows(self, ledger_id: U64, entry_id: U64) -> None:
        """Positions that are at nobody have a row: they are planned no longer."""
        keys = bitmap_of(self._shared.planned.find(ledger_id, entry_id)) & self._shared.planned.keys
        self._shared.settle(keys)
        self._shared.last_sent.sent(ledger_id, entry_id)
        self._end(keys)

    def are_planned(self, ledger_id: U64, entry_id: U64) -> Mask:
        """Which of the positions are planned, in flight or waiting."""
        return self._shared.planned.are_planned(self._shared.planned.find(ledger_id, entry_id))

    def acknowledge(self, ledger_id: U64, entry_id: U64) -> Mask:
        """Acknowledges planned positions; which of them were."""
        taken, _ = self.take(ledger_id, entry_id)
        if taken.any():
            keys = bitmap_of(self._shared.planned.find(ledger_id[taken], entry_id[taken]))
            # Nothing of them is durable.
            self._shared.settle(keys)
            self._end(keys)
            self._shared.last_sent.acknowledged(ledger_id[taken], entry_id[taken])
        return taken

    def mark_delete(self, ledger_id: int, entry_id: int) -> None:
        """Everything that was planned up to a position is acknowledged."""
        keys = self._shared.planned.find(*self._shared.last_sent.mark_delete(ledger_id, entry_id))
        gone = bitmap_of(keys) & self._shared.planned.keys
        if gone:
            self._ready.withdraw(gone)
            self._end(gone)

    def close(self, stream: int) -> BitMap64:
        """A stream is no more: what it alone planned, and nobody holds, is planned no longer; these positions."""
        planned = self._shared.planned.close(stream)
        ended = planned - self._in_flight.among(planned)
        if ended:
            self._ready.withdraw(ended)
            self._shared.last_sent.forget(*self._shared.planned.positions(ended))
            self._end(ended)
        return ended

    def _end(self, keys: BitMap64) -> None:
        """Positions are planned no longer."""
        self._shared.planned.settle(keys)
        if self._shared.nacks is not None:
            self._shared.nacks.taken_back -= keys
