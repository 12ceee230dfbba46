"""The backlog of one subscription: READY, IN_FLIGHT, and what waits for an acknowledgement to become durable.

Owns: who is owed what, the queue of READY rows with its bound, reading the backlog again when the queue was full or
nobody listened, and what each dispatcher holds.
Does not own: which rows are due and which are gone (`index`), and streams and permits on the wire (the engine).

READY is a bounded queue that the index feeds as rows come due. Where it cannot be fed (no dispatcher, or full) the
subscription falls behind, and a `BacklogReader` derives READY from the buckets: due, not gone, not acknowledged,
owed, and not in hand already.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap64

from daemon.core.backlog_reader import BacklogReader
from daemon.core.in_flight import InFlight, Mask
from daemon.core.positions import KeyedRows, bitmap_of, contained
from daemon.core.runs import earliest
from storage_backends.formats.manifest import Subscription


class SubscriptionState:
    """One subscription of a topic that is served.

    Dispatchers are known by numbers: a stream, or whoever else listens, is one that is open; a lease is one under which
    rows are IN_FLIGHT and that is not.

    `stored`: as in the manifest; replaced when its policy changes.
    `backlog`: rows that are due, owed and not acknowledged; kept, not counted.
    """

    def __init__(self, stored: Subscription, *, ready_rows_max: int) -> None:
        self.stored = stored
        self.backlog = 0
        self.in_flight = InFlight()
        self.acknowledging = BitMap64()
        self.reader: BacklogReader | None = None
        self.ready_rows = 0
        self._ready_rows_max = ready_rows_max
        self._returned: KeyedRows = KeyedRows.empty()
        self._ready: collections.deque[KeyedRows] = collections.deque()
        self._dispatchers: set[int] = set()
        # No row of the backlog that is neither READY nor in hand has a time before; None when there was none.
        self._unread_ms: int | None = None

    @property
    def subscription_id(self) -> int:
        return self.stored.subscription_id

    @property
    def dispatchers(self) -> int:
        return len(self._dispatchers)

    def owes(self, rows: KeyedRows) -> Mask | None:
        """Which of the rows the subscription is owed; None for all of them."""
        since_ms = np.uint64(self.stored.since_ms)
        owed = rows.rows.deliver_at_ms > since_ms
        return None if owed.all() else owed

    # ---- dispatchers

    def open(self, dispatcher: int, reader: BacklogReader) -> None:
        """A dispatcher listens. `reader` stands at the beginning; the first one starts it."""
        if not self._dispatchers:
            self.reader = reader
        self._dispatchers.add(dispatcher)

    def close(self, dispatcher: int) -> None:
        """What the dispatcher holds is READY again; when it was the last one that listens READY is not kept."""
        oldest_ms = self.oldest_due_ms()
        self._dispatchers.discard(dispatcher)
        if not self._dispatchers:
            self.reader = None
            self._ready.clear()
            self._returned = KeyedRows.empty()
            self.ready_rows = 0
            self._unread_ms = oldest_ms
        self.return_held(dispatcher)

    def return_held(self, dispatcher: int) -> int:
        """What a stream or a lease holds is READY again, if anybody listens; how many rows."""
        held = self.in_flight.take_dispatcher(dispatcher)
        if len(held) and self._dispatchers:
            returned = KeyedRows.concat([self._returned, held])
            self._returned = returned.take(np.lexsort((returned.rows.entry_id, returned.rows.ledger_id)))
            self.ready_rows += len(held)
        elif len(held):
            self._unread_ms = earliest(self._unread_ms, int(held.rows.deliver_at_ms.min()))
        return len(held)

    def held_rows(self, dispatcher: int) -> int:
        """How many rows a stream or a lease holds."""
        return self.in_flight.held_rows(dispatcher)

    @property
    def leased_rows(self) -> int:
        """Rows that are IN_FLIGHT under a number that does not listen: a lease."""
        return len(self.in_flight) - sum(map(self.in_flight.held_rows, self._dispatchers))

    # ---- READY

    @property
    def is_fed(self) -> bool:
        """Whether rows that come due are appended to READY."""
        return bool(self._dispatchers) and self.reader is None

    @property
    def is_full(self) -> bool:
        return self.ready_rows >= self._ready_rows_max

    def feed(self, rows: KeyedRows) -> None:
        """Rows in hand-out order, all owed and not acknowledged."""
        if len(rows):
            self._ready.append(rows)
            self.ready_rows += len(rows)

    def derived(self, rows: KeyedRows) -> None:
        """Rows that the reader has derived: what it will derive later is not before them."""
        self.feed(rows)
        if len(rows):
            self._unread_ms = int(rows.rows.deliver_at_ms[-1])

    @property
    def available_rows(self) -> int:
        """How many READY rows may become IN_FLIGHT by the subscription's policy."""
        rows_max = self.stored.policy.in_flight_rows_max
        if rows_max is None:
            return self.ready_rows
        return max(0, min(self.ready_rows, rows_max - len(self.in_flight)))

    def hand_out(self, dispatcher: int, limit: int) -> KeyedRows:
        """At most `limit` READY rows, which become IN_FLIGHT: what came back first, then in hand-out order.

        `dispatcher`: the stream or the lease that holds them from now on.
        """
        parts: list[KeyedRows] = []
        room = min(limit, self.available_rows)
        if len(self._returned) and room:
            parts.append(self._returned.take(slice(0, room)))
            self._returned = self._returned.take(slice(room, None))
            room -= len(parts[0])
        while room:
            rows = self._ready.popleft()
            if len(rows) > room:
                self._ready.appendleft(rows.take(slice(room, None)))
                rows = rows.take(slice(0, room))
            parts.append(rows)
            room -= len(rows)
        taken = KeyedRows.concat(parts)
        if len(taken):
            self.ready_rows -= len(taken)
            self.in_flight.add(taken, dispatcher)
        return taken

    # ---- what nobody holds

    @property
    def _unread_rows(self) -> int:
        """Rows of the backlog that are neither READY nor in hand: a reader will derive them, when somebody listens."""
        return self.backlog - len(self.in_flight) - len(self.acknowledging) - self.ready_rows

    def pass_by(self, owed: Iterable[KeyedRows]) -> None:
        """Rows, each part in due order, are about to come into the backlog, and not into READY."""
        if self._unread_rows <= 0:
            self._unread_ms = None
        for rows in owed:
            if len(rows):
                self._unread_ms = earliest(self._unread_ms, int(rows.rows.deliver_at_ms[0]))

    def oldest_due_ms(self) -> int | None:
        """The time of the oldest row of the backlog that nobody holds; None when there is none. O(1).

        Of a subscription that is behind it may be the time of one that was acknowledged since.
        """
        returned_ms = int(self._returned.rows.deliver_at_ms.min()) if len(self._returned) else None
        ready_ms = int(self._ready[0].rows.deliver_at_ms[0]) if self._ready else None
        return earliest(returned_ms, ready_ms, self._unread_ms if self._unread_rows > 0 else None)

    def in_hand(self) -> BitMap64:
        """Every position that is READY, IN_FLIGHT or being acknowledged."""
        sets = [bitmap_of(rows.keys) for rows in (self._returned, *self._ready) if len(rows)]
        return BitMap64.union(self.in_flight.keys(), self.acknowledging, *sets)

    def first_in_hand_ms(self) -> int | None:
        """The earliest time of what is READY or IN_FLIGHT; None when nothing is."""
        ready = (int(rows.rows.deliver_at_ms.min()) for rows in (self._returned, *self._ready) if len(rows))
        return earliest(self.in_flight.first_due_ms(), *ready)

    def held_among(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are IN_FLIGHT or being acknowledged."""
        return self.in_flight.among(keys) | (self.acknowledging & keys)

    def drop(self, keys: BitMap64) -> None:
        """Positions of the backlog left it by a decision. O(READY)."""
        if keys:
            self.backlog -= len(keys)
            self.acknowledging -= keys
            self.withdraw(keys)

    def withdraw(self, keys: BitMap64) -> None:
        """Takes positions out of READY and IN_FLIGHT: they left the backlog, or are not for the taking. O(READY)."""
        self._returned = _without([self._returned], keys)[0]
        self._ready = collections.deque(rows for rows in _without(self._ready, keys) if len(rows))
        self.ready_rows = len(self._returned) + sum(map(len, self._ready))
        if len(self.in_flight):
            self.in_flight.take_keys(keys)


def _without(parts: Iterable[KeyedRows], keys: BitMap64) -> list[KeyedRows]:
    return [rows.take(~contained(rows.keys, keys)) if len(rows) else rows for rows in parts]
