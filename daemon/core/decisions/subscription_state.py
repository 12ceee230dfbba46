"""Keeps the backlog of one subscription: READY, IN_FLIGHT, NACKED, and positions with a staged decision.

READY is a bounded queue that the index feeds as rows come due. If it cannot be fed (no dispatcher, or full) the
subscription falls behind, and a `BacklogReader` derives READY from the buckets: rows that are due, owed, neither gone
nor acknowledged, and not held already.

Only the tracker redelivers a NACKED position, when it is due and there is room; index and reader leave it out. Once
READY it is a row like any other: without a dispatcher it is simply derived again later, with its count.

Counts of negative acknowledgements are bit planes: each plane is the set of keys that have that bit in their count. A
position that was never negatively acknowledged is in none and costs nothing; one with a count of 1 is in one.

`index` knows which rows are due and gone; `nack_decisions` decides negative acknowledgements; `key_share` distributes
the rows of a subscription by key.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap64

from daemon.core import quotas
from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.dead_letter_rows import DeadLetters
from daemon.core.backlog.in_flight import InFlight
from daemon.core.backlog.nack_tracker import NackTracker
from daemon.core.index.position_keys import FEW, KeyedRows, Mask, PagePlaces, bitmap_of, contained, keys_of
from daemon.core.index.runs import earliest, first_time_ms
from daemon.core.key_shared.key_share import KeyShared
from daemon.core.limits import NO_BACKLOG_LIMITS, BacklogLimits
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
        """Return the counts, u32[n], in the order of the keys, or None if all are 0."""
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
        """Return the keys whose count is not 0."""
        return BitMap64.union(BitMap64(), *[plane & keys for plane in self._planes])

    def set(self, keys: U64, counts: U32) -> None:
        """Set the counts of distinct keys."""
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
        """Forget the counts of the keys."""
        for plane in self._planes:
            if plane.intersect(keys):
                plane -= keys
        self._drop_empty()

    def _drop_empty(self) -> None:
        while self._planes and not self._planes[-1]:
            self._planes.pop()
        self.has_any = bool(self._planes)

    def planes(self) -> tuple[BitMap64, ...]:
        """Return copies of the planes, the lowest bit first."""
        return tuple(plane.copy() for plane in self._planes)

    def restore(self, planes: Iterable[BitMap64]) -> None:
        """Set the counts from planes, the lowest bit first, and take the planes over."""
        self._planes = list(planes)
        self._drop_empty()


# More rows than can ever be IN_FLIGHT
NO_LIMIT_ROWS = 1 << 62


class SubscriptionState:
    """One subscription of a served topic.

    Dispatchers are numbers: one that is open is a stream or other listener; one that is not, but holds rows IN_FLIGHT,
    is a lease.

    `stored` is the subscription as in the manifest, replaced when its policy changes. `properties` are written by an
    application. `backlog` counts rows that are due, owed and not acknowledged; the number is maintained, not computed.

    `acknowledging` and `nacking` are positions that a staged decision takes out of the backlog, or makes NACKED.
    `counts` has the number of negative acknowledgements of positions of the backlog. `timeouts` has how many of these
    were ack time-outs since the last one that a client asked for. A time-out is a guess, so an acknowledgement of an
    earlier delivery still applies. It is in memory only.

    `dead_letters_leaving` are ids that a staged decision replays or purges, `dead_letters_coming` those that one makes.
    `last_dead_letter_id` is the highest id given, even by a staged decision.

    `own_nacked_rows` counts the rows outside the shared index that were negatively acknowledged, even by a staged
    decision, and are still in the backlog: a position that nobody added costs a row there. `limits` bounds requests,
    never what is stored.

    `key_shared` exists while dispatchers have the subscription open as KEY_SHARED. READY rows then go to consumers
    through it, and rows that wait for their key are READY, but not in the queue.
    """

    def __init__(
        self,
        stored: Subscription,
        places: PagePlaces,
        *,
        ready_rows_max: int,
        limits: BacklogLimits = NO_BACKLOG_LIMITS,
    ) -> None:
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
        self.dead_letters_coming = BitMap64()
        self.last_dead_letter_id = 0
        self.own_nacked_rows = 0
        self._own_nacked = BitMap64()
        self._limits = limits
        self.key_shared: KeyShared | None = None
        self.reader: BacklogReader | None = None
        self.ready_rows = 0
        self._ready_rows_max = ready_rows_max
        self._returned: KeyedRows = KeyedRows.empty()
        self._redelivered: collections.deque[KeyedRows] = collections.deque()
        # The redelivery time of the first row of each of these (Unix ms)
        self._redelivered_ms: collections.deque[int] = collections.deque()
        self._ready: collections.deque[KeyedRows] = collections.deque()
        self._dispatchers: set[int] = set()
        # Lower bound on the due times of backlog rows that are neither READY nor held (Unix ms); None if there were
        # none
        self._unread_ms: int | None = None

    @property
    def dispatchers(self) -> int:
        return len(self._dispatchers)

    @property
    def is_by_key(self) -> bool:
        """True if its rows go to consumers by key: it is open so, or its policy requires it."""
        return self.key_shared is not None or self.stored.policy.key_shared is not None

    def owes(self, rows: KeyedRows) -> Mask | None:
        """Return the mask of rows that the subscription is owed, or None if all are."""
        since_ms, times_ms = self.stored.since_ms, rows.rows.deliver_at_ms
        if len(times_ms) <= FEW and min(times_ms.tolist(), default=since_ms + 1) > since_ms:
            return None
        owed = times_ms > np.uint64(since_ms)
        return None if np.count_nonzero(owed) == len(owed) else owed

    # ---- dispatchers

    def open(self, dispatcher: int, reader: BacklogReader) -> None:
        """Add a dispatcher. The first one starts `reader`, which stands at the beginning."""
        if not self._dispatchers:
            self.reader = reader
        self._dispatchers.add(dispatcher)

    def share_by_key(self, places: PagePlaces, *, elapsed_ms: int) -> KeyShared:
        """Share READY rows by key, as the policy says now, until the last dispatcher closes.

        Call this before the first one opens, when nothing is IN_FLIGHT.
        """
        if len(self.in_flight):
            raise InvariantViolated(f"{len(self.in_flight)} rows are in flight when a subscription is shared by key")
        policy = self.stored.policy.key_shared or KeySharedPolicy()
        self.key_shared = KeyShared(policy, self, places, waiting_rows_max=self._ready_rows_max, elapsed_ms=elapsed_ms)
        return self.key_shared

    @property
    def needs_more_backlog(self) -> bool:
        """True if the reader of the backlog has found nothing yet and has more to look at."""
        if self.reader is not None and not self.reader.is_held_up:
            return not self.ready_rows
        return self.key_shared is not None and self.key_shared.reads_on and not self.key_shared.is_held_up

    @property
    def readers(self) -> list[BacklogReader]:
        """The readers of the backlog, which must be notified of changes of its buckets."""
        let_go = None if self.key_shared is None else self.key_shared.let_go
        return [reader for reader in (self.reader, None if let_go is None else let_go.reader) if reader is not None]

    def close(self, dispatcher: int) -> None:
        """Remove a dispatcher: rows that it holds become READY. After the last one READY is not kept."""
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
        """Make rows that a stream or lease holds READY, if there is a dispatcher; return their number."""
        held = self.in_flight.take_dispatcher(dispatcher)
        if len(held) and self._dispatchers:
            returned = KeyedRows.concat([self._returned, held])
            self._returned = returned.take(np.lexsort((returned.rows.entry_id, returned.rows.ledger_id)))
            self.ready_rows += len(held)
        elif len(held):
            self._unread_ms = earliest(self._unread_ms, _first_ms(held))
        return len(held)

    def held_rows(self, dispatcher: int) -> int:
        """Return how many rows a stream or a lease holds."""
        return self.in_flight.held_rows(dispatcher)

    @property
    def leased_rows(self) -> int:
        """The number of rows that are IN_FLIGHT under leases."""
        if self.key_shared is not None:
            return 0
        return len(self.in_flight) - sum(map(self.in_flight.held_rows, self._dispatchers))

    # ---- READY

    @property
    def is_fed(self) -> bool:
        """True if rows that come due are appended to READY."""
        return bool(self._dispatchers) and self.reader is None

    @property
    def is_full(self) -> bool:
        return self.ready_rows >= self._ready_rows_max

    def feed(self, rows: KeyedRows) -> None:
        """Append rows that the head has passed, in due order, all owed and not acknowledged."""
        counts = self.counts.of(rows.keys) if self.counts.has_any else None
        if counts is not None:
            rows = dataclasses.replace(rows, redelivery_count=counts)
            # After a recovery the tracker is ahead of the head.
            known = bitmap_of(rows.keys[counts > 0])
            elsewhere = self.set_aside_among(known) | self.in_hand_among(known)
            if elsewhere:
                rows = rows.take(~contained(rows.keys, elsewhere))
        self.append_ready(rows)

    def append_ready(self, rows: KeyedRows) -> None:
        """Append rows behind all that are READY."""
        if count := len(rows.keys):
            self._ready.append(rows)
            self.ready_rows += count

    def counted(self, rows: KeyedRows) -> KeyedRows:
        """Return the rows with their redelivery counts."""
        counts = self.counts.of(rows.keys)
        return rows if counts is None else dataclasses.replace(rows, redelivery_count=counts)

    def are_ended_by(self, keys: U64, counts: U32 | None) -> Mask | None:
        """Return the mask of positions whose delivery an acknowledgement with these counts ends; None means all.

        `counts` of None match any delivery.
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
        """Count an ack time-out of distinct positions."""
        before = self.timeouts.of(keys)
        one = np.ones(len(keys), np.uint32)
        self.timeouts.set(keys, one if before is None else before + one)

    def given_up(self, keys: U64, counts: U32) -> None:
        """Stop deliveries with these counts, and earlier ones, from being acknowledged.

        Their dispatcher reported that they failed. The positions are distinct.
        """
        timeouts = self.timeouts.of(keys)
        if timeouts is None:
            return
        actual = self.counts.of(keys)
        if actual is not None:
            later = actual - np.minimum(actual, counts + np.uint32(1))
            self.timeouts.set(keys, np.minimum(timeouts, later))

    def derived(self, rows: KeyedRows) -> None:
        """Append rows that the reader has derived: later ones are not due before them."""
        self.append_ready(self.counted(rows))
        if len(rows):
            self._unread_ms = int(rows.rows.deliver_at_ms[-1]) or None

    @property
    def available_rows(self) -> int:
        """The number of READY rows that may become IN_FLIGHT by the subscription's policy."""
        rows_max = self.stored.policy.in_flight_rows_max
        return self.ready_rows if rows_max is None else min(self.ready_rows, self.in_flight_room)

    @property
    def in_flight_room(self) -> int:
        """The number of further rows that may be IN_FLIGHT by the subscription's policy."""
        rows_max = self.stored.policy.in_flight_rows_max
        return NO_LIMIT_ROWS if rows_max is None else max(0, rows_max - len(self.in_flight))

    def hand_out(self, dispatcher: int, limit: int, *, elapsed_ms: int = 0) -> KeyedRows:
        """Deliver at most `limit` READY rows: first returned ones, then redelivered ones, then in due order.

        They become IN_FLIGHT at `dispatcher`, a stream or a lease, since `elapsed_ms` by a clock that never steps.
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
        """Take the first rows of a queue, at most `limit`."""
        rows = queue.popleft()
        if len(rows.keys) > limit:
            queue.appendleft(rows.take(slice(limit, None)))
            return rows.take(slice(0, limit))
        if queue is self._redelivered:
            self._redelivered_ms.popleft()
        return rows

    def take_ready(self, limit: int) -> KeyedRows:
        """Take at most `limit` READY rows for sharing by key. Some must be READY, and none of them redelivered."""
        rows = self._pop(self._ready, limit)
        self.ready_rows -= len(rows)
        return rows

    def take_redelivered(self) -> KeyedRows:
        """Take the READY rows that were delivered before, for sharing by key."""
        rows = KeyedRows.concat(list(self._redelivered))
        self._redelivered.clear()
        self._redelivered_ms.clear()
        self.ready_rows -= len(rows)
        return rows

    def put_first(self, rows: KeyedRows) -> None:
        """Put rows that were taken last back before all that are READY."""
        self._ready.appendleft(rows)
        self.ready_rows += len(rows)

    # ---- limits

    @property
    def dead_letter_room(self) -> int:
        """The number of further dead letters that the subscription may have."""
        return max(0, self._limits.dead_letters_max - self._dead_letter_rows)

    @property
    def _dead_letter_rows(self) -> int:
        return len(self.dead_letters) + len(self.dead_letters_coming)

    def check_dead_letters(self, rows: int) -> None:
        """Raise QuotaExceeded if `rows` more dead letters would be too many."""
        quotas.check_dead_letters(
            self.stored.name,
            dead_letters=self._dead_letter_rows,
            rows=rows,
            rows_max=self._limits.dead_letters_max,
        )

    @property
    def own_nacked_room(self) -> int:
        """The number of further rows outside the shared index that negative acknowledgements may make."""
        return max(0, self._limits.nacked_rows_max - self.own_nacked_rows)

    def check_own_nacked(self, rows: int) -> None:
        """Raise QuotaExceeded if negative acknowledgements may not make `rows` more rows."""
        quotas.check_nacked(
            self.stored.name, nacked_rows=self.own_nacked_rows, rows=rows, rows_max=self._limits.nacked_rows_max
        )

    def note_own_nacked(self, keys: BitMap64) -> None:
        """Count rows outside the shared index that are negatively acknowledged, once each."""
        new = keys - self._own_nacked
        self._own_nacked |= new
        self.own_nacked_rows += len(new)

    def drop_own_nacked(self, keys: BitMap64) -> None:
        """Count rows no longer that left the backlog."""
        if self._own_nacked.intersect(keys):
            left = self._own_nacked & keys
            self._own_nacked -= left
            self.own_nacked_rows -= len(left)

    # ---- NACKED

    @property
    def takes_redeliveries(self) -> bool:
        """True if due NACKED positions may leave the tracker.

        They become READY, or part of the unread backlog if there is no dispatcher.
        """
        if not self._dispatchers:
            return True
        if self.is_full:
            return False
        return self.key_shared is None or self.key_shared.takes_back(self._ready_rows_max)

    def redeliver(self, now_ms: int, limit: int) -> U64:
        """Make about `limit` due NACKED positions ready for delivery; return their redelivery times (Unix ms)."""
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
        """Return the positions that are NACKED, or named by a staged negative acknowledgement."""
        return (self.nacks.keys & keys) | (self.nacking & keys)

    # ---- rows that no dispatcher holds

    @property
    def _unread_rows(self) -> int:
        """The number of backlog rows that are neither READY nor held; a reader derives them for the next dispatcher."""
        held_rows = len(self.in_flight) + len(self.acknowledging) + len(self.nacks) + len(self.nacking)
        if self.key_shared is not None:
            # Planned positions are in no index.
            held_rows += len(self.key_shared.waiting) - len(self.key_shared.planned)
        return self.backlog - held_rows - self.ready_rows

    def pass_by(self, owed: Iterable[KeyedRows]) -> None:
        """Note rows, each part in due order, that are about to enter the backlog without entering READY."""
        if self._unread_rows <= 0:
            self._unread_ms = None
        for rows in owed:
            if len(rows):
                self._unread_ms = earliest(self._unread_ms, _first_ms(rows))

    def oldest_due_ms(self) -> int | None:
        """Return the due time of the oldest backlog row that is neither held nor NACKED (Unix ms), or None.

        For a redelivered row it is the time of the redelivery: of a row that was never pending (due at time 0) nothing
        else is known. For a subscription that is behind it may be the time of a row that was acknowledged since.
        """
        redelivered_ms = self._redelivered_ms[0] if self._redelivered_ms else None
        ready_ms = next((ms for ms in map(_first_ms, self._ready) if ms is not None), None)
        unread_ms = None
        if self._unread_rows > 0:
            let_go = None if self.key_shared is None else self.key_shared.let_go
            unread_ms = earliest(self._unread_ms, None if let_go is None else let_go.first_ms)
        return earliest(_first_ms(self._returned), redelivered_ms, ready_ms, unread_ms, self._first_waiting_ms(1))

    def _first_waiting_ms(self, from_ms: int) -> int | None:
        """Return the earliest due time from `from_ms` on of rows that wait for their key (Unix ms), or None."""
        return None if self.key_shared is None else self.key_shared.waiting.first_ms(from_ms)

    def in_hand(self) -> BitMap64:
        """Return every position that is READY, IN_FLIGHT or being acknowledged."""
        sets = [bitmap_of(rows.keys) for rows in self._ready_parts()]
        return BitMap64.union(self.in_flight.keys(), self.acknowledging, self._waiting_keys, *sets)

    @property
    def _waiting_keys(self) -> BitMap64:
        return BitMap64() if self.key_shared is None else self.key_shared.waiting.keys

    def _ready_parts(self) -> list[KeyedRows]:
        return [rows for rows in (self._returned, *self._redelivered, *self._ready) if len(rows)]

    def first_in_hand_ms(self, from_ms: int = 0) -> int | None:
        """Return the earliest due time from `from_ms` on of rows that are READY or IN_FLIGHT (Unix ms), or None."""
        ready = (first_time_ms(rows.rows.deliver_at_ms, from_ms) for rows in self._ready_parts())
        return earliest(self.in_flight.first_due_ms(from_ms), self._first_waiting_ms(from_ms), *ready)

    def held_among(self, keys: BitMap64) -> BitMap64:
        """Return the positions that are IN_FLIGHT or being acknowledged."""
        return self.in_flight.among(keys) | (self.acknowledging & keys)

    def ready_among(self, keys: BitMap64) -> BitMap64:
        """Return the positions that are in the queue of READY rows."""
        return BitMap64.union(BitMap64(), *[bitmap_of(rows.keys) & keys for rows in self._ready_parts()])

    def in_hand_among(self, keys: BitMap64) -> BitMap64:
        """Return the positions that are READY, IN_FLIGHT or being acknowledged; cheaper than `in_hand`."""
        return BitMap64.union(self.held_among(keys), self._waiting_keys & keys, self.ready_among(keys))

    def drop(self, keys: BitMap64, *, backlog_rows: int) -> None:
        """Remove positions from the backlog by a decision; `backlog_rows` of them were counted in it. O(READY)."""
        if keys:
            self.backlog -= backlog_rows
            self.forget(keys)
            self.withdraw(keys)

    def forget(self, keys: BitMap64) -> None:
        """Forget positions that left the backlog by a decision and that no dispatcher holds."""
        self.acknowledging -= keys
        if self.nacking:
            self.nacking -= keys
        if self.nacks.rows:
            self.nacks.drop(keys)
        if self.own_nacked_rows:
            self.drop_own_nacked(keys)
        if self.counts.has_any:
            self.counts.drop(keys)
        if self.timeouts.has_any:
            self.timeouts.drop(keys)
        if self.key_shared is not None:
            self.key_shared.departed(keys)

    def claim(self, keys: BitMap64) -> None:
        """Take positions out of READY and IN_FLIGHT, since a decision on them is about to be staged."""
        if self.in_flight.watcher is not None:
            rows = self.in_flight.find(keys)
            self.in_flight.take(rows.keys, rows.rows.deliver_at_ms)
        self.withdraw(keys)

    def withdraw(self, keys: BitMap64) -> None:
        """Take positions out of READY and IN_FLIGHT that left the backlog or may not be delivered. O(READY)."""
        if self.key_shared is not None:
            self.key_shared.withdraw(keys)
        self._returned = _without([self._returned], keys)[0]
        left = [*zip(_without(self._redelivered, keys), self._redelivered_ms, strict=True)]
        self._redelivered = collections.deque(rows for rows, _ in left if len(rows))
        self._redelivered_ms = collections.deque(time_ms for rows, time_ms in left if len(rows))
        self._ready = collections.deque(rows for rows in _without(self._ready, keys) if len(rows))
        self.ready_rows = sum(map(len, self._ready_parts()))
        if len(self.in_flight):
            self.in_flight.take_keys(keys)


def _first_ms(rows: KeyedRows) -> int | None:
    """Return the earliest due time of rows that were pending (Unix ms), or None."""
    return first_time_ms(rows.rows.deliver_at_ms, 1)


def _without(parts: Iterable[KeyedRows], keys: BitMap64) -> list[KeyedRows]:
    return [rows.take(~contained(rows.keys, keys)) if len(rows) else rows for rows in parts]
