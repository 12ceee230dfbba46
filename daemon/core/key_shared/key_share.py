"""Shares the READY rows of a subscription by key: who receives which row, and when (PIP-282, draining hashes).

    READY -> waits for its hash or for permits -> IN_FLIGHT at the consumer that has the hash

A row goes when its hash has a consumer with permits and no row of the hash waits before it. With `nack_order` BLOCK_KEY
no row of the hash may be NACKED. The order that the policy names must allow it, too. With draining hashes, no other
consumer may hold rows of the hash. With the last sent position, its consumer must not have joined before the row could
go. All of that is columns and tables of 65,536 hash slots.

`subscription_state` has READY and IN_FLIGHT; `ack_decisions` and `nack_decisions` decide on rows.

Dispatchers may also plan positions: messages that are not delayed and have no row in any index. They get keys, so that
they stand beside rows wherever rows are ordered by key. Planned positions are in memory only: those that wait or are in
flight when the daemon ends are planned again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from pyroaring import BitMap, BitMap64

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.in_flight import InFlight, Places
from daemon.core.index.position_keys import (
    KeyedRows,
    Mask,
    PagePlaces,
    PageTable,
    PositionOrder,
    bitmap_of,
    contained,
    keys_of,
    pages_of,
)
from daemon.core.key_shared import hash_selectors
from daemon.core.key_shared.draining_hashes import DrainingHashes, HashHolds
from daemon.core.key_shared.hash_slots import ALL_SLOTS, HASH_SLOTS, U16, slots_of
from daemon.core.key_shared.key_consumers import I64, Consumers, Joining
from daemon.core.key_shared.key_planning import Planning
from daemon.core.key_shared.last_sent_position import LastSentPosition
from daemon.core.key_shared.nack_blocks import BlockingNacks
from daemon.core.key_shared.waiting_rows import EvictedSlots, WaitingRows
from daemon.errors import QuotaExceeded
from storage_backends.formats.index_ids import PLANNED_OWNER, are_of_batch_parts
from storage_backends.formats.manifest import KeyOrder, KeySharedPolicy, NackOrder
from storage_backends.formats.row_columns import U32, U64, Rows

# Pages without positions are looked for again when there are this many more pages than after the last time.
_PAGES_SLACK = 64


class PlannedPositions:
    """The planned positions of one subscription, and the streams that planned them.

    `keys` are those in flight or waiting. `were_any` is whether there ever was one.
    """

    def __init__(self, places: PagePlaces) -> None:
        self.keys = BitMap64()
        self.were_any = False
        self._pages = PageTable(places, owner=PLANNED_OWNER)
        self._held_pages = BitMap()
        self._pages_max = _PAGES_SLACK
        self._by_stream: dict[int, BitMap64] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, ledger_id: U64, entry_id: U64) -> U64:
        """Return the keys of positions; UNKNOWN_KEY if the page of a position is unknown."""
        return self._pages.find(ledger_id, entry_id)

    def intern(self, ledger_id: U64, entry_id: U64) -> U64:
        """Return the keys of positions that are about to be planned."""
        keys = self._pages.intern(ledger_id, entry_id)
        new = pages_of(bitmap_of(keys)) - self._held_pages
        self._pages.hold(new)
        self._held_pages |= new
        return keys

    def are_planned(self, keys: U64) -> Mask:
        """Return the mask of keys, of any table, that belong to planned positions."""
        if not self.keys:
            return np.zeros(len(keys), np.bool_)
        return contained(keys, self.keys)

    def add(self, stream: int, keys: U64) -> None:
        """Add positions that a stream planned or holds; another stream may have done so, too."""
        added = bitmap_of(keys)
        self.were_any = self.were_any or bool(added)
        self.keys |= added
        self._by_stream.setdefault(stream, BitMap64()).update(added)

    def settle(self, keys: BitMap64) -> None:
        """Remove positions that are acknowledged, got a row, or are no longer planned."""
        self.keys -= keys
        for planned in self._by_stream.values():
            planned.difference_update(keys)
        if len(self._held_pages) > self._pages_max:
            unheld = self._held_pages - pages_of(self.keys)
            self._pages.release(unheld)
            self._held_pages -= unheld
            self._pages_max = 2 * len(self._held_pages) + _PAGES_SLACK

    def positions(self, keys: BitMap64) -> tuple[U64, U64]:
        """Return (ledger_id, entry_id) of planned positions."""
        return self._pages.positions(keys_of(keys))

    def close(self, stream: int) -> BitMap64:
        """Forget a closed stream; return the positions that only it planned."""
        planned = self._by_stream.pop(stream, BitMap64())
        return BitMap64.difference(planned, *self._by_stream.values())


class ReadyRows(Protocol):
    """The port to the READY rows of a subscription, and where they go."""

    in_flight: InFlight

    @property
    def ready_rows(self) -> int: ...

    @property
    def in_flight_room(self) -> int:
        """The number of further rows that may be IN_FLIGHT by the subscription's policy."""
        ...

    def take_ready(self, limit: int) -> KeyedRows:
        """Take at most `limit` rows in order, at least one."""
        ...

    def take_redelivered(self) -> KeyedRows:
        """Take the READY rows that were delivered before."""
        ...

    def append_ready(self, rows: KeyedRows) -> None: ...

    def put_first(self, rows: KeyedRows) -> None:
        """Put rows back to the front that were taken last."""
        ...

    def withdraw(self, keys: BitMap64) -> None:
        """Take rows out of READY, of those that wait, and of IN_FLIGHT."""
        ...


# Rows that one delivery reads, for each row that it may deliver: most may have to wait.
LOOKED_AT_A_ROW = 2
# The least number of rows read at once, since each read has a fixed cost
LOOKED_AT_LEAST_ROWS = 256
# Larger grants are cut to this, since no consumer holds more rows.
PERMITS_MAX = (1 << 32) - 1
# Planned positions that may wait, since they are in memory
PLANNED_WAITING_MAX = 200_000
PLANNED_WAITING_RETRY_MS = 1_000


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Assigned:
    """Rows that are at consumers of a stream. `consumers` is u32[n], their numbers."""

    stream: int
    rows: KeyedRows
    consumers: U32


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    """Rows and the ordinals of the consumers that received them."""

    rows: KeyedRows
    consumers: U16


_NOTHING_SENT = _Sent(KeyedRows.empty(), np.empty(0, np.uint16))


class KeyShared:
    """The sharing of one subscription by key, while a stream has it open so.

    `policy` stays in force as long as this object. `is_whole` is whether earlier NACKED rows are known; until then
    nothing is delivered. `let_go` exists while there are rows for which `waiting`, at `waiting_rows_max`, has no room.
    """

    def __init__(
        self, policy: KeySharedPolicy, ready: ReadyRows, places: PagePlaces, *, waiting_rows_max: int, elapsed_ms: int
    ) -> None:
        self.policy = policy
        self.is_whole = True
        self.consumers = Consumers()
        self.selector = hash_selectors.selector_of(policy.selector, policy.points_per_consumer)
        self.last_sent = LastSentPosition()
        self.planned = PlannedPositions(places)
        self._places = places
        order = PositionOrder(places)
        self.waiting = WaitingRows(order)
        self.let_go: EvictedSlots | None = None
        self._waiting_rows_max = waiting_rows_max
        self._ready = ready
        self._in_flight = ready.in_flight
        in_order = not policy.allow_out_of_order_delivery
        drains = in_order and policy.order is KeyOrder.DRAINING_HASHES
        self.holds = HashHolds(self.consumers) if drains else None
        self.holds_joined_back = in_order and policy.order is KeyOrder.LAST_SENT_POSITION
        self.nacks: BlockingNacks | None = None
        if policy.nack_order is NackOrder.BLOCK_KEY:
            self.nacks = BlockingNacks(policy.nack_block_max_ms, self._in_flight, order)
        self.plans = Plans(self, ready)
        self._planning = Planning(
            self.selector,
            self.draining,
            None if self.nacks is None else self.nacks.blocks,
            self.last_sent if self.holds_joined_back else None,
            order,
        )
        self._elapsed_ms = elapsed_ms
        # True if something changed that rows wait for
        self._look_again = False
        self._take_back_behind: list[KeyedRows] = []
        self._in_flight.watcher = self.holds

    @property
    def draining(self) -> DrainingHashes | None:
        """The holders of each hash, or None if they do not matter."""
        return None if self.holds is None else self.holds.draining

    # ---- consumers

    def join(self, joining: Sequence[Joining]) -> None:
        """Add all consumers or none. Raise InvalidArgument if the selector refuses them."""
        ordinals = self.consumers.next_ordinals(len(joining))
        self.selector.join(
            [
                hash_selectors.Joiner(ordinal, consumer.name, consumer.hash_ranges)
                for ordinal, consumer in zip(ordinals, joining, strict=True)
            ]
        )
        self.consumers.join(joining)
        if self.holds_joined_back:
            for ordinal in ordinals:
                self.last_sent.joined(ordinal)
        self._look_again = True

    def leave(self, numbers: Collection[int]) -> None:
        """Remove consumers: rows that they held wait for others, in the order of positions."""
        self.back(self._dismiss(numbers))

    def _dismiss(self, numbers: Collection[int]) -> KeyedRows:
        held = self._in_flight.take_dispatchers(numbers)
        if self.holds is not None:
            self.holds.leave(numbers)
        ordinals = [self.consumers.ordinal_of(number) for number in numbers]
        self.selector.leave(ordinals)
        self.consumers.leave(numbers)
        for ordinal in ordinals:
            self.last_sent.left(ordinal)
        if self.holds is not None:
            self.holds.forget_departed()
        else:
            for number in self.consumers.departed:
                self.consumers.forget(number)
        self._look_again = True
        return held

    def close(self, stream: int) -> None:
        """Close a stream: its consumers leave, and its plans end, except for what others hold."""
        held = self._dismiss(self.consumers.on_stream(stream))
        self.consumers.set_full(stream, False)
        ended = self.plans.close(stream)
        self.back(held.take(~contained(held.keys, ended)) if ended else held)

    def end(self) -> None:
        """End the sharing: no stream has the subscription open by key any longer."""
        self._in_flight.watcher = None

    def grant(self, number: int, permits: int) -> None:
        """Grant a consumer permits: this many more rows may be sent to it."""
        if self.consumers.grant(number, permits, PERMITS_MAX):
            self._look_again = True

    def held_rows(self, number: int) -> int:
        """Return how many rows a consumer holds."""
        return self._in_flight.held_rows(number)

    def set_full(self, stream: int, is_full: bool) -> None:
        """Set whether a stream takes no rows now."""
        self.consumers.set_full(stream, is_full)
        if not is_full:
            self._look_again = True

    def settle(self, keys: BitMap64) -> None:
        """Release rows that were in flight and whose decision is durable, or need not be."""
        if self.holds is not None:
            self.holds.settle(keys)

    # ---- delivering

    @property
    def may_hand_out(self) -> bool:
        """True if `hand_out` might deliver something, or has rows to check."""
        if not self.is_whole or self._ready.in_flight_room <= 0:
            return False
        if len(self.waiting) and self.something_changed():
            return True
        return bool(self._ready.ready_rows) and bool(self.consumers.permits().any())

    @property
    def blocked_attempts(self) -> int:
        """The number of times that a row was kept back for another consumer's rows of its hash."""
        return 0 if self.draining is None else self.draining.attempts_total

    def now(self, elapsed_ms: int) -> None:
        """Set the time by a clock that never steps (ms)."""
        self._elapsed_ms = elapsed_ms

    def look_again(self) -> None:
        """Check waiting rows again at the next delivery."""
        self._look_again = True

    def something_changed(self) -> bool:
        """Return whether something changed that rows wait for."""
        if self.draining is not None and self.draining.has_unblocked:
            self.draining.take_unblocked()
            self._look_again = True
        if self.nacks is not None and self.nacks.blocks.take_unblocked():
            self._look_again = True
        if self.holds_joined_back and self.last_sent.take_released():
            self._look_again = True
        return self._look_again

    def hand_out(self, limit: int, *, elapsed_ms: int) -> list[Assigned]:
        """Deliver at most `limit` rows to the consumers of all streams; those of each stream are in due order.

        The rows are IN_FLIGHT from now on. A call reads a bounded number of READY rows, so the result may be empty
        while `may_hand_out`. `elapsed_ms` is the time now by a clock that never steps.
        """
        self._elapsed_ms = elapsed_ms
        if not self.is_whole:
            return []
        # Redelivered rows go before all that wait.
        self.back(self._ready.take_redelivered())
        room = min(limit, self._ready.in_flight_room)
        sent = [self._hand_out_waiting(room)]
        room -= len(sent[-1].rows)
        look_at = LOOKED_AT_A_ROW * limit
        while room > 0 and look_at > 0 and self._ready.ready_rows:
            permits = self.consumers.permits()
            if not permits.any():
                break
            rows = self._ready.take_ready(max(room, LOOKED_AT_LEAST_ROWS))
            look_at -= len(rows)
            sent.append(self.send_or_keep(self._fresh_of(rows), permits, room))
            room -= len(sent[-1].rows)
        if self._evictable_rows > self._waiting_rows_max:
            self._evict(self._able_slots())
        rows = KeyedRows.concat([each.rows for each in sent])
        numbers = self.consumers.numbers_of(np.concatenate([each.consumers for each in sent]))
        return self._by_stream(rows, numbers)

    def _fresh_of(self, rows: KeyedRows) -> KeyedRows:
        """Return the READY rows that were never delivered; the others wait first.

        Others are READY if no stream was open when they were redelivered.
        """
        if rows.redelivery_count is None:
            return rows
        fresh = rows.redelivery_count == 0
        self.back(rows.take(~fresh))
        return rows.take(fresh)

    def _hand_out_waiting(self, room: int) -> _Sent:
        if room <= 0 or not len(self.waiting) or not self.something_changed():
            return _NOTHING_SENT
        self._look_again = False
        permits, left = self.consumers.permits(), room
        refused = np.zeros(HASH_SLOTS, np.bool_)

        def choose(rows: KeyedRows, places: Places, slots: U16) -> U16:
            nonlocal left
            chosen = self._planning.choose(rows, places, slots, permits, left, refused)
            used = np.bincount(chosen, minlength=len(permits))
            left -= len(chosen) - int(used[0])
            used[0] = 0
            np.subtract(permits, used, out=permits)
            return chosen

        rows, consumers = self.waiting.take(choose)
        # Rows that were not checked for lack of room may go next.
        self._look_again = not left
        return self._sent(rows, consumers)

    def send_or_keep(self, rows: KeyedRows, permits: I64, room: int) -> _Sent:
        """Send the rows that may go and keep the others. The rows are in order and were never delivered."""
        slots = slots_of(rows.key_hash())
        must_wait = self.waiting.by_slot[slots] > 0
        if self.let_go is not None:
            must_wait |= self.let_go.are_let_go(slots)
        places = np.flatnonzero(~must_wait)
        consumers = np.zeros(len(rows), np.uint16)
        consumers[places] = self._planning.choose(rows, places, slots[places], permits, room)
        sent = np.flatnonzero(consumers)
        if len(sent) == room and sent[-1] + 1 < len(rows):
            # There is no room for later rows, whether they may go or not.
            end = sent[-1] + 1
            self._ready.put_first(rows.take(slice(end, None)))
            rows, consumers = rows.take(slice(0, end)), consumers[:end]
        kept = consumers == 0
        if kept.any():
            self._keep(rows.take(kept))
            rows, consumers = rows.take(~kept), consumers[~kept]
        return self._sent(rows, consumers)

    def _keep(self, rows: KeyedRows) -> None:
        """Keep rows that must wait and were never delivered."""
        if self.let_go is None:
            self.waiting.add_fresh(rows)
            return
        let_go = self.let_go.are_let_go(slots_of(rows.key_hash()))
        planned = self.planned.are_planned(rows.keys)
        self.let_go.add(rows.take(let_go & ~planned))
        self.waiting.add_last(rows.take(let_go & planned))
        self.waiting.add_fresh(rows.take(~let_go))

    # ---- what there is no room for

    @property
    def _evictable_rows(self) -> int:
        """About how many waiting rows can be evicted: planned positions cannot, since they could not be found again."""
        planned_rows = self.waiting.keys.intersection_cardinality(self.planned.keys)
        return self.waiting.never_delivered_rows - planned_rows

    def _able_slots(self) -> Mask:
        """Return the mask, bool[65536], of hash slots whose rows could go now, if there were any."""
        return self._planning.are_able(ALL_SLOTS, self.consumers.permits())

    def _evict(self, able: Mask) -> None:
        """Evict waiting rows that cannot go."""
        rows = self.waiting.evict(~able, self.planned.keys)
        if len(rows):
            if self.let_go is None:
                self.let_go = EvictedSlots()
            self.let_go.evict(rows)

    @property
    def reads_on(self) -> bool:
        """True if evicted rows should be looked for now."""
        if self.let_go is None or self._ready.in_flight_room <= 0:
            return False
        if self.let_go.reader is None:
            return bool((self.let_go.slots & self._able_slots()).any())
        # One more read makes room by evicting rows that cannot go.
        return self._evictable_rows <= self._waiting_rows_max

    @property
    def is_held_up(self) -> bool:
        """True if the reader found all evicted rows except those after a row that is not passed."""
        return self.let_go is not None and self.let_go.reader is not None and self.let_go.reader.is_held_up

    def seek_let_go(self, reader: BacklogReader) -> None:
        """Look for evicted rows that can go. `reader` is at the beginning of the backlog."""
        if self.let_go is not None:
            able = self._able_slots()
            if 2 * self._evictable_rows > self._waiting_rows_max:
                self._evict(able)
            self.let_go.seek(able, reader)

    def found_let_go(self, rows: KeyedRows, passed_over: KeyedRows, *, are_all: bool) -> None:
        """Accept rows that the reader found in due order at no consumer; `are_all` is whether it has reached the end.

        `passed_over` are the rows that it passed over because they are READY.
        """
        if self.let_go is None:
            return
        found = self.let_go.found(self._fresh_of(rows), passed_over)
        self.waiting.add_fresh(found)
        # If nothing was found because an earlier row is not passed yet, passing that row causes the next look.
        self._look_again |= bool(len(found)) or are_all
        if are_all:
            self.let_go.end()
            self.waiting.end_last(self.let_go.slots)
            if not self.let_go.slots.any():
                self.let_go = None

    def _sent(self, rows: KeyedRows, consumers: U16) -> _Sent:
        if len(rows):
            self.consumers.sent(consumers)
            self._in_flight.add(rows, self.consumers.numbers_of(consumers), elapsed_ms=self._elapsed_ms)
            if self.nacks is not None and self.nacks.taken_back:
                self.nacks.taken_back -= bitmap_of(rows.keys)
            planned = self.planned.are_planned(rows.keys)
            if planned.any():
                self.last_sent.sent(rows.rows.ledger_id[planned], rows.rows.entry_id[planned])
        return _Sent(rows, consumers)

    def _by_stream(self, rows: KeyedRows, numbers: U32) -> list[Assigned]:
        if not len(rows):
            return []
        streams = self.consumers.streams_of(self.consumers.ordinals_of(numbers))
        if (streams == streams[0]).all():
            return [Assigned(int(streams[0]), rows, numbers)]
        of_streams = [(stream, streams == stream) for stream in np.unique(streams).tolist()]
        return [Assigned(stream, rows.take(mine), numbers[mine]) for stream, mine in of_streams]

    def withdraw(self, keys: BitMap64) -> KeyedRows:
        """Remove and return those of the positions that wait: they left the backlog, or somebody has them."""
        rows = self.waiting.remove(keys)
        if len(rows) and self.holds_joined_back and self.last_sent.has_recent:
            # A later row of the hash slot may be one that a recent consumer may receive.
            self._look_again = True
        return rows

    def back(self, rows: KeyedRows) -> None:
        """Let redelivered rows wait before all others."""
        if len(rows):
            self.waiting.add_back(rows)
            self._look_again = True

    # ---- negative acknowledgements

    def learn_nacked(self, rows: KeyedRows) -> None:
        """Block the hashes of rows that were NACKED before the subscription was opened by key."""
        if self.nacks is not None:
            self.nacks.blocks.nacked(rows.keys, slots_of(rows.key_hash()), elapsed_ms=self._elapsed_ms)

    def knows_nacked(self) -> None:
        """Allow deliveries: all NACKED rows are known."""
        self.is_whole = True

    def nacked(self, rows: KeyedRows) -> None:
        """Block the hashes of rows that are about to be NACKED and are at no consumer."""
        if self.nacks is not None and len(rows):
            slots = slots_of(rows.key_hash())
            self.nacks.blocks.nacked(rows.keys, slots, elapsed_ms=self._elapsed_ms)
            if self.draining is None or self.draining.unacked[slots].any():
                self._take_back_behind.append(rows)

    def take_back(self) -> list[Assigned]:
        """Take back rows that consumers hold after rows that were NACKED since the last call.

        Call this when a request with such rows is decided as a whole, before anything else happens. With draining
        hashes, other consumers receive nothing of their hashes until `told`.
        """
        if self.nacks is None or not self._take_back_behind:
            return []
        nacked, self._take_back_behind = KeyedRows.concat(self._take_back_behind), []
        rows, numbers = self.nacks.take_behind(nacked)
        assigned = self._by_stream(rows, numbers)
        self.back(rows)
        return assigned

    def told(self, numbers: U32) -> None:
        """Record that consumers, each named once for each row, know of the rows that were taken back from them first.

        Those that have left may be among them.
        """
        if self.holds is not None:
            self.holds.told(numbers)

    def are_kept_back(self, rows: KeyedRows) -> Mask:
        """Return the mask of rows that no request may name for now, see `nack_blocks`.

        None of the rows may be in flight or NACKED.
        """
        if self.nacks is None:
            return np.zeros(len(rows), np.bool_)
        return self.nacks.are_kept_back(rows.keys, slots_of(rows.key_hash()))

    def takes_back(self, rows_max: int) -> bool:
        """Return whether NACKED rows may become READY: fewer than `rows_max` redelivered rows wait.

        Rows that wait for something else than permits do not count: if that is a NACKED row, neither would ever go.
        """
        if self.waiting.back_rows < rows_max:
            return True
        with_permits = np.ones_like(self.consumers.permits())
        return self.waiting.back_rows_of(self._planning.are_able(ALL_SLOTS, with_permits)) < rows_max

    def redelivered(self, keys: BitMap64) -> None:
        """Unblock NACKED rows that are READY again."""
        if self.nacks is not None:
            self.nacks.blocks.redelivered(keys)

    def departed(self, keys: BitMap64) -> None:
        """Forget rows that left the backlog."""
        self.settle(keys)
        if self.nacks is not None:
            self.nacks.blocks.left(keys)
            self.nacks.taken_back -= keys
        if self.planned.were_any:
            departed = keys_of(keys)
            entries = departed[~are_of_batch_parts(self._places.owners(departed))]
            self.last_sent.acknowledged(*self._places.positions(entries))

    def every_second(self, *, elapsed_ms: int) -> None:
        """Expire blocks: no hash waits for a NACKED row for longer than the policy allows."""
        self._elapsed_ms = elapsed_ms
        if self.nacks is not None:
            self.nacks.blocks.expire(elapsed_ms=elapsed_ms)

    # ---- rows that consumers already hold

    def hold(self, rows: KeyedRows, numbers: U32, *, elapsed_ms: int) -> Mask:
        """Put rows IN_FLIGHT at consumers that declare to hold them; return the mask of these rows.

        None of the rows may be in flight or NACKED. Left out are rows of a hash that another consumer holds rows of, or
        that waits for a NACKED row.
        """
        slots, ordinals = slots_of(rows.key_hash()), self.consumers.ordinals_of(numbers)
        may_hold = ~self.are_kept_back(rows)
        if self.draining is not None:
            may_hold &= self.draining.may_receive(slots, ordinals)
            places = np.flatnonzero(may_hold)
            # If several consumers name one hash, the first one gets it.
            _, first, inverse = np.unique(slots[places], return_index=True, return_inverse=True)
            may_hold[places] = ordinals[places] == ordinals[places][first][inverse]
        if may_hold.any():
            held = rows.take(may_hold)
            self._ready.withdraw(bitmap_of(held.keys))
            self._in_flight.add(held, numbers[may_hold], elapsed_ms=elapsed_ms)
        return may_hold


class Plans:
    """The plans of all streams of one subscription: who receives messages that are not delayed and have no row.

    Nothing of a plan is durable. A planned position that is negatively acknowledged gets a row, and is like any other
    then.
    """

    def __init__(self, shared: KeyShared, ready: ReadyRows) -> None:
        self._shared = shared
        self._ready = ready
        self._in_flight: InFlight = ready.in_flight

    def hold(self, stream: int, positions: Rows, numbers: U32, *, elapsed_ms: int) -> Mask:
        """Put positions IN_FLIGHT at consumers that declare to hold them; return the mask of these.

        See `KeyShared.hold`. None of the positions may have a row. They were planned by a former owner, or for a stream
        that has closed.
        """
        keys = self._shared.planned.intern(positions.ledger_id, positions.entry_id)
        places = np.flatnonzero(~contained(keys, self._in_flight.among(bitmap_of(keys))))
        rows = KeyedRows(positions, keys).take(places)
        held = np.zeros(len(keys), np.bool_)
        held[places] = self._shared.hold(rows, numbers[places], elapsed_ms=elapsed_ms) if len(places) else False
        self._shared.planned.add(stream, keys[held])
        # Another stream may have planned it since, so that it waited.
        self._shared.last_sent.sent(positions.ledger_id[held], positions.entry_id[held])
        return held

    def plan(self, stream: int, positions: Rows, *, may_hand_out: bool, elapsed_ms: int) -> U32:
        """Return the number of the stream's consumer that receives each position now, 0 if it is HELD.

        The positions are in the order of the log, distinct, and without rows. Without `may_hand_out` those that nobody
        holds wait. Raises QuotaExceeded if too many would wait.
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
            # Consumers that joined since wait for what was sent before, which therefore must not wait after unsent
            # positions.
            again = new & self._shared.last_sent.were_sent(positions.ledger_id, positions.entry_id)
            self._shared.back(KeyedRows(positions, keys).take(again))
            new &= ~again
        if new.any():
            answers[new] = self._plan_new(stream, KeyedRows(positions, keys).take(new), may_hand_out=may_hand_out)
        return answers

    def _check_planned(self, rows: int) -> None:
        planned = self._shared.planned.keys
        waiting = self._shared.waiting.keys.intersection_cardinality(planned)
        # Further ones may be READY.
        waiting += min(self._ready.ready_rows, len(planned) - waiting)
        if waiting + rows > PLANNED_WAITING_MAX:
            waiting = len(planned) - len(self._in_flight.among(planned))
        if waiting + rows > PLANNED_WAITING_MAX:
            raise QuotaExceeded(
                f"{waiting} planned positions wait, and {rows} more were named; the limit is {PLANNED_WAITING_MAX}",
                retry_after_ms=PLANNED_WAITING_RETRY_MS,
            )

    def _held_on(self, stream: int, positions: Rows, keys: U64) -> U32:
        """Return the consumer on the stream that holds each position that is planned already, 0 if none does."""
        holders = self._in_flight.holders_of(keys)
        held = np.flatnonzero(holders)
        if len(held):
            self._shared.last_sent.sent(positions.ledger_id[held], positions.entry_id[held])
            streams = self._shared.consumers.streams_of(self._shared.consumers.ordinals_of(holders[held]))
            holders[held[streams != np.uint32(stream)]] = 0
        return holders

    def _plan_new(self, stream: int, rows: KeyedRows, *, may_hand_out: bool) -> U32:
        answers = np.zeros(len(rows), np.uint32)
        room = self._ready.in_flight_room
        if not may_hand_out or self._ready.ready_rows or not self._shared.is_whole or room <= 0:
            # Earlier rows go first.
            self._ready.append_ready(rows)
            return answers
        changed, permits = self._shared.something_changed(), self._shared.consumers.permits()
        on_stream = self._shared.consumers.are_on(stream)
        sent = self._shared.send_or_keep(rows, np.where(on_stream, permits, 0), room)
        # Rows for consumers of other streams are sent on those streams.
        if changed or permits[~on_stream].any():
            self._shared.look_again()
        answers[contained(rows.keys, bitmap_of(sent.rows.keys))] = self._shared.consumers.numbers_of(sent.consumers)
        return answers

    def take(self, ledger_id: U64, entry_id: U64) -> tuple[Mask, U32]:
        """Take planned positions that are acknowledged or about to have a row out of where they are.

        Returns (mask of those that are planned and do not wait for a NACKED row; their hashes, u32[n], if they were in
        flight or waited).
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
            waited = self._shared.withdraw(elsewhere)
            here = contained(keys, bitmap_of(waited.keys))
            order = np.argsort(waited.keys)
            hashes[here] = waited.key_hash()[order[np.searchsorted(waited.keys, keys[here], sorter=order)]]
            self._ready.withdraw(elsewhere)
        return taken, hashes

    def got_rows(self, rows: KeyedRows) -> None:
        """End the plans of entries that are about to have a row."""
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
        """End the plans of positions that have a row and are at no consumer."""
        keys = bitmap_of(self._shared.planned.find(ledger_id, entry_id)) & self._shared.planned.keys
        self._shared.settle(keys)
        self._shared.last_sent.sent(ledger_id, entry_id)
        self._end(keys)

    def are_planned(self, ledger_id: U64, entry_id: U64) -> Mask:
        """Return the mask of positions that are planned, in flight or waiting."""
        return self._shared.planned.are_planned(self._shared.planned.find(ledger_id, entry_id))

    def acknowledge(self, ledger_id: U64, entry_id: U64) -> Mask:
        """Acknowledge planned positions; return the mask of those that were planned."""
        taken, _ = self.take(ledger_id, entry_id)
        if taken.any():
            keys = bitmap_of(self._shared.planned.find(ledger_id[taken], entry_id[taken]))
            # Nothing about them has to become durable.
            self._shared.settle(keys)
            self._end(keys)
            self._shared.last_sent.acknowledged(ledger_id[taken], entry_id[taken])
        return taken

    def mark_delete(self, ledger_id: int, entry_id: int) -> None:
        """Acknowledge everything that was planned up to a position."""
        keys = self._shared.planned.find(*self._shared.last_sent.mark_delete(ledger_id, entry_id))
        gone = bitmap_of(keys) & self._shared.planned.keys
        if gone:
            self._ready.withdraw(gone)
            self._end(gone)

    def close(self, stream: int) -> BitMap64:
        """End the positions that only a closed stream planned and no consumer holds; return them."""
        planned = self._shared.planned.close(stream)
        ended = planned - self._in_flight.among(planned)
        if ended:
            self._ready.withdraw(ended)
            self._shared.last_sent.forget(*self._shared.planned.positions(ended))
            self._end(ended)
        return ended

    def _end(self, keys: BitMap64) -> None:
        """Forget positions that are no longer planned."""
        self._shared.planned.settle(keys)
        if self._shared.nacks is not None:
            self._shared.nacks.taken_back -= keys
