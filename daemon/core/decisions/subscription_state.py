"""The backlog of one subscription: READY, IN_FLIGHT, NACKED, and what waits for a decision to become durable.

Owns: who is owed what, the queue of READY rows with its bound, reading the backlog again when the queue was full or
nobody listened, what each dispatcher holds, and taking nacked rows back to READY when their time has come.
Does not own: which rows are due and which are gone (`index`), what a negative acknowledgement decides
(`nack_decisions`), which consumer receives what of a subscription that is shared by key (`key_share`), and streams and
permits on the wire (the engine).

READY is a bounded queue that the index feeds as rows come due. Where it cannot be fed (no dispatcher, or full) the
subscription falls behind, and a `BacklogReader` derives READY from the buckets: due, not gone, not acknowledged,
owed, and not in hand already.

A nacked position is handed out by the tracker alone, when its time has come and there is room; the index and the reader
leave it out. Once it is READY it is a row as any other: where nobody listens it is simply derived again later, with the
count that is kept of it.

How often the positions of a backlog were negatively acknowledged.

Owns: the counts of one subscription, as bit planes: of each bit of the count the set of keys that have it. A position
that was never negatively acknowledged is in none and costs nothing, one with a count of 1 is in one.
Does not own: when a position counts (`nack_decisions`) and how planes are stored.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap64

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.dead_letter_rows import DeadLetters
from daemon.core.backlog.in_flight import InFlight
from daemon.core.backlog.nack_tracker import NackTracker
from daemon.core.index.position_keys import FEW, KeyedRows, Mask, PagePlaces, bitmap_of, contained, keys_of
from daemon.core.index.runs import earliest, first_time_ms
from daemon.core.key_shared.key_share import KeyShared
from daemon.errors import InvariantViolated
from storage_backends.formats.manifest import KeySharedPolicy, NamedValues, Subscription
from storage_backends.formats.row_columns import U32, U64


class RedeliveryCounts:
    """The counts of a subscription by key; 0 where a key is in no plane. `has_any`: whether a count is not 0."""

    def __init__(self) -> None:
        # Plane 0 is the lowest bit; the last one is never empty.
        self._planes: list[BitMap64] = []
        self.has_any = False

    def of(self, keys: U64) -> U32 | None:
        """u32[n], in the order of the keys; None when all are 0."""
        if not self._planes:
            return None
        named = bitmap_of(keys)
        hits = [(bit, plane & named) for bit, plane in enumerate(self._planes) if plane.intersect(named)]
        if not hits:
            return None
        counts = np.zeros(len(keys), np.uint32)
        for bit, hit in hits:
            if len(hit) == len(named):
                counts |= np.uint32(1 << bit)
                continue
            members = keys_of(hit)
            places = np.searchsorted(members, keys)
            places[places == len(members)] = 0
            counts |= np.equal(members[places], keys).astype(np.uint32) << np.uint32(bit)
        return counts

    def among(self, keys: BitMap64) -> BitMap64:
        """Those of the keys whose count is not 0."""
        return BitMap64.union(BitMap64(), *[plane & keys for plane in self._planes])

    def set(self, keys: U64, counts: U32) -> None:
        """Gives the keys, none of which is named twice, these counts."""
        if not len(keys):
            return
        highest = int(counts.max())
        self._planes += [BitMap64() for _ in range(highest.bit_length() - len(self._planes))]
        if int(counts.min()) == highest:
            self._set_all(bitmap_of(keys), highest)
            return
        for bit, plane in enumerate(self._planes):
            has_bit = (counts >> np.uint32(bit)) & np.uint32(1) != 0
            plane |= bitmap_of(keys[has_bit])
            plane -= bitmap_of(keys[~has_bit])
        self._drop_empty()

    def _set_all(self, keys: BitMap64, count: int) -> None:
        for bit, plane in enumerate(self._planes):
            if count >> bit & 1:
                plane |= keys
            elif plane.intersect(keys):
                plane -= keys
        self._drop_empty()

    def drop(self, keys: BitMap64) -> None:
        """The keys have no count any more."""
        for plane in self._planes:
            if plane.intersect(keys):
                plane -= keys
        self._drop_empty()

    def _drop_empty(self) -> None:
        while self._planes and not self._planes[-1]:
            self._planes.pop()
        self.has_any = bool(self._planes)

    def planes(self) -> tuple[BitMap64, ...]:
        """The planes as they are now, the lowest bit first: copies."""
        return tuple(plane.copy() for plane in self._planes)

    def restore(self, planes: Iterable[BitMap64]) -> None:
        """The counts are those of the planes, the lowest bit first. The planes are taken over."""
        self._planes = list(planes)
        self._drop_empty()


# As many rows IN_FLIGHT as there may ever be.
NO_LIMIT_ROWS = 1 << 62


class SubscriptionState:
    """One subscription of a topic that is served.

    Dispatchers are known by numbers: a stream, or whoever else listens, is one that is open; a lease is one under which
    rows are IN_FLIGHT and that is not.

    `stored`: as in the manifest; replaced when its policy changes. `properties`: what an application wrote into it.
    `backlog`: rows that are due, owed and not acknowledged; kept, not counted.
    `acknowledging`, `nacking`: positions that a staged decision takes out of the backlog, or makes wait.
    `counts`: of positions of the backlog, how often each was negatively acknowledged.
    `timeouts`: of these times, how many were ack time-outs since the last one that was asked for. A time-out is a
    guess: an acknowledgement of what was handed out before it still counts. Memory only.
    `dead_letters_leaving`: ids of dead letters that a staged decision replays or purges.
    `last_dead_letter_id`: the highest one given, also by a decision that is staged.
    `key_shared`: while dispatchers have it open as KEY_SHARED. READY goes to consumers through it then, and rows that
    wait for their key are READY, but not in the queue.
    """

    def __init__(self, stored: Subscription, places: PagePlaces, *, ready_rows_max: int) -> None:
        self.stored = stored
        self.subscription_id = stored.subscription_id
        self.properties: NamedValues = ()
        self.backlog = 0
        self.in_flight = InFlight()
        self.acknowledging = BitMap64()
        self.nacking = BitMap64()
        self.nacks = NackTracker(places)
        self.counts = RedeliveryCounts()
        self.timeouts = RedeliveryCounts()
        self.dead_letters = DeadLetters()
        self.dead_letters_leaving = BitMap64()
        self.last_dead_letter_id = 0
        self.key_shared: KeyShared | None = None
        self.reader: BacklogReader | None = None
        self.ready_rows = 0
        self._ready_rows_max = ready_rows_max
        self._returned: KeyedRows = KeyedRows.empty()
        self._redelivered: collections.deque[KeyedRows] = collections.deque()
        # Of each of these the redelivery time of its first row.
        self._redelivered_ms: collections.deque[int] = collections.deque()
        self._ready: collections.deque[KeyedRows] = collections.deque()
        self._dispatchers: set[int] = set()
        # No row of the backlog that is neither READY nor in hand has a time before; None when there was none.
        self._unread_ms: int | None = None

    @property
    def dispatchers(self) -> int:
        return len(self._dispatchers)

    @property
    def is_by_key(self) -> bool:
        """Whether its rows go to consumers by their keys: it is open so, or its policy says how it is to be."""
        return self.key_shared is not None or self.stored.policy.key_shared is not None

    def owes(self, rows: KeyedRows) -> Mask | None:
        """Which of the rows the subscription is owed; None for all of them."""
        since_ms, times_ms = self.stored.since_ms, rows.rows.deliver_at_ms
        if len(times_ms) <= FEW and min(times_ms.tolist(), default=since_ms + 1) > since_ms:
            return None
        owed = times_ms > np.uint64(since_ms)
        return None if np.count_nonzero(owed) == len(owed) else owed

    # ---- dispatchers

    def open(self, dispatcher: int, reader: BacklogReader) -> None:
        """A dispatcher listens. `reader` stands at the beginning; the first one starts it."""
        if not self._dispatchers:
            self.reader = reader
        self._dispatchers.add(dispatcher)

    def share_by_key(self, places: PagePlaces, *, elapsed_ms: int) -> KeyShared:
        """READY goes to consumers by key, as the policy says now, until the last dispatcher closes. Call before the
        first one opens, when nothing is IN_FLIGHT.
        """
        if len(self.in_flight):
            raise InvariantViolated(f"{len(self.in_flight)} rows are in flight when a subscription is shared by key")
        policy = self.stored.policy.key_shared or KeySharedPolicy()
        self.key_shared = KeyShared(policy, self, places, waiting_rows_max=self._ready_rows_max, elapsed_ms=elapsed_ms)
        return self.key_shared

    @property
    def needs_more_backlog(self) -> bool:
        """Whether nothing was found yet by who reads the backlog again, and there is more to look at."""
        if self.reader is not None and not self.reader.is_held_up:
            return not self.ready_rows
        return self.key_shared is not None and self.key_shared.reads_on and not self.key_shared.is_held_up

    @property
    def readers(self) -> list[BacklogReader]:
        """What reads the backlog again, and must know what becomes of its buckets."""
        let_go = None if self.key_shared is None else self.key_shared.let_go
        return [reader for reader in (self.reader, None if let_go is None else let_go.reader) if reader is not None]

    def close(self, dispatcher: int) -> None:
        """What the dispatcher holds is READY again; when it was the last one that listens READY is not kept."""
        oldest_ms = self.oldest_due_ms()
        self._dispatchers.discard(dispatcher)
        if self.key_shared is not None:
            if not self._dispatchers:
                oldest_ms = earliest(oldest_ms, self.in_flight.first_due_ms(1))
            self.key_shared.close(dispatcher)
            if not self._dispatchers:
                self.key_shared.end()
                self.key_shared = None
        if not self._dispatchers:
            self.reader = None
            self._ready.clear()
            self._redelivered.clear()
            self._redelivered_ms.clear()
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
            self._unread_ms = earliest(self._unread_ms, _first_ms(held))
        return len(held)

    def held_rows(self, dispatcher: int) -> int:
        """How many rows a stream or a lease holds."""
        return self.in_flight.held_rows(dispatcher)

    @property
    def leased_rows(self) -> int:
        """Rows that are IN_FLIGHT under a number that does not listen: a lease."""
        if self.key_shared is not None:
            return 0
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
        """Rows that the head has passed, in hand-out order, all owed and not acknowledged."""
        counts = self.counts.of(rows.keys) if self.counts.has_any else None
        if counts is not None:
            rows = dataclasses.replace(rows, redelivery_count=counts)
            # After a recovery: the tracker is faster than the head.
            known = bitmap_of(rows.keys[counts > 0])
            elsewhere = self.set_aside_among(known) | self.in_hand_among(known)
            if elsewhere:
                rows = rows.take(~contained(rows.keys, elsewhere))
        self.append_ready(rows)

    def append_ready(self, rows: KeyedRows) -> None:
        """Rows that come behind all that is READY."""
        if count := len(rows.keys):
            self._ready.append(rows)
            self.ready_rows += count

    def counted(self, rows: KeyedRows) -> KeyedRows:
        """The rows with their redelivery counts."""
        counts = self.counts.of(rows.keys)
        return rows if counts is None else dataclasses.replace(rows, redelivery_count=counts)

    def are_ended_by(self, keys: U64, counts: U32 | None) -> Mask | None:
        """Whether an acknowledgement with those redelivery counts ends the hand-out of each position; None: of
        all. `counts`: None: of any.
        """
        if counts is None:
            return None
        actual = self.counts.of(keys) if self.counts.has_any else None
        if actual is None:
            if not np.count_nonzero(counts):
                return None
            ended = counts == 0
        else:
            timeouts = self.timeouts.of(keys)
            least = actual if timeouts is None else actual - np.minimum(timeouts, actual)
            ended = (least <= counts) & (counts <= actual)
        return None if ended.all() else ended

    def timed_out(self, keys: U64) -> None:
        """An ack time-out is about to count for the positions, none of which is named twice."""
        before = self.timeouts.of(keys)
        one = np.ones(len(keys), np.uint32)
        self.timeouts.set(keys, one if before is None else before + one)

    def given_up(self, keys: U64, counts: U32) -> None:
        """Hand-outs with those redelivery counts, and those before, can be acknowledged no longer: their dispatcher
        said that it failed. No position is named twice.
        """
        timeouts = self.timeouts.of(keys)
        if timeouts is None:
            return
        actual = self.counts.of(keys)
        if actual is not None:
            later = actual - np.minimum(actual, counts + np.uint32(1))
            self.timeouts.set(keys, np.minimum(timeouts, later))

    def derived(self, rows: KeyedRows) -> None:
        """Rows that the reader has derived: what it will derive later is not before them."""
        self.append_ready(self.counted(rows))
        if len(rows):
            self._unread_ms = int(rows.rows.deliver_at_ms[-1]) or None

    @property
    def available_rows(self) -> int:
        """How many READY rows may become IN_FLIGHT by the subscription's policy."""
        rows_max = self.stored.policy.in_flight_rows_max
        return self.ready_rows if rows_max is None else min(self.ready_rows, self.in_flight_room)

    @property
    def in_flight_room(self) -> int:
        """How many more rows may be IN_FLIGHT by the subscription's policy."""
        rows_max = self.stored.policy.in_flight_rows_max
        return NO_LIMIT_ROWS if rows_max is None else max(0, rows_max - len(self.in_flight))

    def hand_out(self, dispatcher: int, limit: int, *, elapsed_ms: int = 0) -> KeyedRows:
        """At most `limit` READY rows, which become IN_FLIGHT: what streams and leases returned, then what is
        redelivered, then in hand-out order.

        `dispatcher`: the stream or the lease that holds them from now on, `elapsed_ms` by a clock that never steps.
        """
        parts: list[KeyedRows] = []
        count = room = min(limit, self.available_rows)
        if room and len(self._returned.keys):
            parts.append(self._returned.take(slice(0, room)))
            self._returned = self._returned.take(slice(room, None))
            room -= len(parts[0])
        while room:
            rows = self._pop(self._redelivered or self._ready, room)
            parts.append(rows)
            room -= len(rows.keys)
        taken = parts[0] if len(parts) == 1 else KeyedRows.concat(parts)
        if count:
            self.ready_rows -= count
            self.in_flight.add(taken, dispatcher, elapsed_ms=elapsed_ms)
        return taken

    def _pop(self, queue: collections.deque[KeyedRows], limit: int) -> KeyedRows:
        """The first rows of a queue, at most `limit`."""
        rows = queue.popleft()
        if len(rows.keys) > limit:
            queue.appendleft(rows.take(slice(limit, None)))
            return rows.take(slice(0, limit))
        if queue is self._redelivered:
            self._redelivered_ms.popleft()
        return rows

    def take_ready(self, limit: int) -> KeyedRows:
        """At most `limit` READY rows, for who shares them by key and has them then. Call when there are some, and none
        that is redelivered.
        """
        rows = self._pop(self._ready, limit)
        self.ready_rows -= len(rows)
        return rows

    def take_redelivered(self) -> KeyedRows:
        """The READY rows that were delivered before, for the same."""
        rows = KeyedRows.concat(list(self._redelivered))
        self._redelivered.clear()
        self._redelivered_ms.clear()
        self.ready_rows -= len(rows)
        return rows

    def put_first(self, rows: KeyedRows) -> None:
        """Rows that come before all that is READY: they were taken last."""
        self._ready.appendleft(rows)
        self.ready_rows += len(rows)

    # ---- NACKED

    @property
    def takes_redeliveries(self) -> bool:
        """Whether nacked positions whose time has come may leave the tracker: to READY, or, where nobody listens, to
        what is read again later.
        """
        if not self._dispatchers:
            return True
        if self.is_full:
            return False
        return self.key_shared is None or self.key_shared.takes_back(self._ready_rows_max)

    def redeliver(self, now_ms: int, limit: int) -> U64:
        """Takes about `limit` nacked positions whose time has come back into what may be handed out; their times."""
        if not self.takes_redeliveries:
            return np.empty(0, np.uint64)
        rows, times_ms = self.nacks.take_due(now_ms, limit)
        if not len(rows):
            return times_ms
        taken = bitmap_of(rows.keys)
        leaving = (self.acknowledging & taken) | (self.nacking & taken)
        if leaving:
            stay = ~contained(rows.keys, leaving)
            rows, times_ms = rows.take(stay), times_ms[stay]
        if not len(rows):
            return times_ms
        if self.key_shared is not None:
            self.key_shared.redelivered(bitmap_of(rows.keys))
        if self._dispatchers:
            self._redelivered.append(self.counted(rows))
            self._redelivered_ms.append(int(times_ms[0]))
            self.ready_rows += len(rows)
        else:
            others_ms = self._unread_ms if self._unread_rows > len(rows) else None
            self._unread_ms = earliest(others_ms, int(times_ms[0]))
        return times_ms

    def set_aside_among(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are NACKED, or named by a negative acknowledgement that is staged."""
        return (self.nacks.keys & keys) | (self.nacking & keys)

    # ---- what nobody holds

    @property
    def _unread_rows(self) -> int:
        """Rows of the backlog that are neither READY nor in hand: a reader will derive them, when somebody listens."""
        held_rows = len(self.in_flight) + len(self.acknowledging) + len(self.nacks) + len(self.nacking)
        if self.key_shared is not None:
            # Planned positions are in no index.
            held_rows += len(self.key_shared.waiting) - len(self.key_shared.planned)
        return self.backlog - held_rows - self.ready_rows

    def pass_by(self, owed: Iterable[KeyedRows]) -> None:
        """Rows, each part in due order, are about to come into the backlog, and not into READY."""
        if self._unread_rows <= 0:
            self._unread_ms = None
        for rows in owed:
            if len(rows):
                self._unread_ms = earliest(self._unread_ms, _first_ms(rows))

    def oldest_due_ms(self) -> int | None:
        """The time of the oldest row of the backlog that nobody holds, NACKED ones aside; None when there is none.

        Of a row that was redelivered it is the time of that, of one that was never pending (due at time 0) nothing else
        is known. Of a subscription that is behind it may be the time of one that was acknowledged since.
        """
        redelivered_ms = self._redelivered_ms[0] if self._redelivered_ms else None
        ready_ms = next((ms for ms in map(_first_ms, self._ready) if ms is not None), None)
        unread_ms = None
        if self._unread_rows > 0:
            let_go = None if self.key_shared is None else self.key_shared.let_go
            unread_ms = earliest(self._unread_ms, None if let_go is None else let_go.first_ms)
        return earliest(_first_ms(self._returned), redelivered_ms, ready_ms, unread_ms, self._first_waiting_ms(1))

    def _first_waiting_ms(self, from_ms: int) -> int | None:
        """The earliest time, from one on, of what waits for its key; None when nothing does."""
        return None if self.key_shared is None else self.key_shared.waiting.first_ms(from_ms)

    def in_hand(self) -> BitMap64:
        """Every position that is READY, IN_FLIGHT or being acknowledged."""
        sets = [bitmap_of(rows.keys) for rows in self._ready_parts()]
        return BitMap64.union(self.in_flight.keys(), self.acknowledging, self._waiting_keys, *sets)

    @property
    def _waiting_keys(self) -> BitMap64:
        return BitMap64() if self.key_shared is None else self.key_shared.waiting.keys

    def _ready_parts(self) -> list[KeyedRows]:
        return [rows for rows in (self._returned, *self._redelivered, *self._ready) if len(rows)]

    def first_in_hand_ms(self, from_ms: int = 0) -> int | None:
        """The earliest time, from one on, of what is READY or IN_FLIGHT; None when nothing is."""
        ready = (first_time_ms(rows.rows.deliver_at_ms, from_ms) for rows in self._ready_parts())
        return earliest(self.in_flight.first_due_ms(from_ms), self._first_waiting_ms(from_ms), *ready)

    def held_among(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are IN_FLIGHT or being acknowledged."""
        return self.in_flight.among(keys) | (self.acknowledging & keys)

    def ready_among(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are in the queue of READY rows."""
        return BitMap64.union(BitMap64(), *[bitmap_of(rows.keys) & keys for rows in self._ready_parts()])

    def in_hand_among(self, keys: BitMap64) -> BitMap64:
        """Those of the positions that are READY, IN_FLIGHT or being acknowledged: not as much work as `in_hand`."""
        return BitMap64.union(self.held_among(keys), self._waiting_keys & keys, self.ready_among(keys))

    def drop(self, keys: BitMap64, *, backlog_rows: int) -> None:
        """Positions left the backlog by a decision, of which so many were counted in it. O(READY)."""
        if keys:
            self.backlog -= backlog_rows
            self.forget(keys)
            self.withdraw(keys)

    def forget(self, keys: BitMap64) -> None:
        """Positions that nobody holds left the backlog by a decision."""
        self.acknowledging -= keys
        if self.nacking:
            self.nacking -= keys
        if self.nacks.rows:
            self.nacks.drop(keys)
        if self.counts.has_any:
            self.counts.drop(keys)
        if self.timeouts.has_any:
            self.timeouts.drop(keys)
        if self.key_shared is not None:
            self.key_shared.departed(keys)

    def claim(self, keys: BitMap64) -> None:
        """Takes positions out of READY and IN_FLIGHT: a decision on them is about to be staged."""
        if self.in_flight.watcher is not None:
            rows = self.in_flight.find(keys)
            self.in_flight.take(rows.keys, rows.rows.deliver_at_ms)
        self.withdraw(keys)

    def withdraw(self, keys: BitMap64) -> None:
        """Takes positions out of READY and IN_FLIGHT: they left the backlog, or are not for the taking. O(READY)."""
        if self.key_shared is not None:
            self.key_shared.waiting.remove(keys)
        self._returned = _without([self._returned], keys)[0]
        left = [*zip(_without(self._redelivered, keys), self._redelivered_ms, strict=True)]
        self._redelivered = collections.deque(rows for rows, _ in left if len(rows))
        self._redelivered_ms = collections.deque(time_ms for rows, time_ms in left if len(rows))
        self._ready = collections.deque(rows for rows in _without(self._ready, keys) if len(rows))
        self.ready_rows = sum(map(len, self._ready_parts()))
        if len(self.in_flight):
            self.in_flight.take_keys(keys)


def _first_ms(rows: KeyedRows) -> int | None:
    """The earliest time of rows that were pending; None when there is none."""
    return first_time_ms(rows.rows.deliver_at_ms, 1)


def _without(parts: Iterable[KeyedRows], keys: BitMap64) -> list[KeyedRows]:
    return [rows.take(~contained(rows.keys, keys)) if len(rows) else rows for rows in parts]
