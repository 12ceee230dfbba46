"""One topic that is served: requests become decisions, decisions change the index and the backlogs.

Owns: checking a request against what is applied and what is staged, applying decisions in the order of their slots,
and feeding what comes due to the subscriptions.
Does not own: waiting for slots, timers and loading (`daemon.engine`), and what is stored (`daemon.durability`).

    request -> stage_*: a decision, in columns -> one journal slot -> apply_*: the state changes -> the answer

Nothing that is staged is visible: it neither comes due nor is it handed out. Adds and acknowledgements that are staged
together commute: an add names positions that have no row, an acknowledgement positions that have one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core import feeding, limits, quarantine, trimming
from daemon.core.backlog_reader import BacklogReader
from daemon.core.containment import Contained, EntryRanges, contained_in
from daemon.core.departures import Departure
from daemon.core.index import Index, SeenRows
from daemon.core.mutable_bucket import MutableBucket
from daemon.core.positions import KeyedRows, PageTable, bitmap_of, contained, pages_of
from daemon.core.quarantine import RebuildNeeded
from daemon.core.sealed_bucket import SealedBucket
from daemon.core.segments import SegmentCache, SegmentRange
from daemon.core.subscription import SubscriptionState
from daemon.core.trimming import LedgerRanges
from daemon.errors import InvariantViolated
from storage_backends.formats.journal import AcknowledgeRecord, AddRecord, GoneReason, GoneRecord, Record
from storage_backends.formats.manifest import LiveBucket, Subscription
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.rows import U32, U64, Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddBatch:
    """Positions to add, columns of n rows. Exactly one of `deliver_at_ms` and `delay_ms` is given.

    `return_already_due`: rows whose time has come are not stored but returned.
    """

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64 | None
    delay_ms: U64 | None
    key_hash: U32 | None
    return_already_due: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddOutcome:
    """What became of a batch. `returned_index`, `raised_index`: rows of the request."""

    accepted: int
    duplicates: int
    returned_index: U32
    late_on_arrival: int
    raised_index: U32
    raised_deliver_at_ms: U64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeldPositions:
    """Positions with the time they were handed out with, columns of one length."""

    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64

    def __len__(self) -> int:
        return len(self.ledger_id)


class Topic:
    """The state of one topic, changed only by its methods.

    `applied_slot`: the last slot of the shard whose decisions are in it.
    """

    def __init__(
        self,
        name: str,
        topic_id: str,
        incarnation: int,
        subscriptions: Iterable[Subscription],
        *,
        now_ms: int,
        cache: SegmentCache,
        ready_rows_max: int,
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.incarnation = incarnation
        self.index = Index(PageTable(), cache, now_ms=now_ms)
        self._ready_rows_max = ready_rows_max
        self.subscriptions: dict[int, SubscriptionState] = {}
        for stored in subscriptions:
            self.subscriptions[stored.subscription_id] = SubscriptionState(stored, ready_rows_max=ready_rows_max)
        self._coming: SubscriptionState | None = None
        self._staged = BitMap64()
        self._staged_pages: set[int] = set()
        self._not_owed = BitMap64()
        # Positions of damaged buckets that were being acknowledged when these were quarantined.
        self._acknowledging_lost = BitMap64()

    # ---- adds

    def stage_add(
        self, batch: AddBatch, *, now_ms: int, request_limits: limits.RequestLimits
    ) -> tuple[AddRecord | None, AddOutcome]:
        """Which rows are accepted, and with which time. The record is to be journaled; None when nothing is new."""
        times = limits.absolute_times(
            batch.deliver_at_ms, batch.delay_ms, now_ms=now_ms, delay_max_ms=request_limits.delay_max_ms
        )
        keys = self.index.pages.intern(batch.ledger_id, batch.entry_id)
        asked = bitmap_of(keys)
        fresh = self._without_row(keys, asked)
        duplicates = len(times) - (len(times) if fresh is None else len(fresh))
        late = times <= np.uint64(now_ms)
        nothing = np.empty(0, np.uint32)
        returned = nothing
        late_on_arrival = int(late.sum() if fresh is None else late[fresh].sum())
        if batch.return_already_due and late.any():
            chosen = np.arange(len(times)) if fresh is None else fresh
            returned = chosen[late[chosen]].astype(np.uint32)
            fresh = chosen[~late[chosen]]
        rows = Rows(times, batch.ledger_id, batch.entry_id, batch.key_hash)
        if fresh is not None:
            rows = rows.take(fresh)
        rows, raised = self._raised(rows)
        raised_index = nothing if raised is None else raised if fresh is None else fresh[raised]
        outcome = AddOutcome(
            accepted=len(rows),
            duplicates=duplicates,
            returned_index=returned,
            late_on_arrival=late_on_arrival,
            raised_index=raised_index.astype(np.uint32),
            raised_deliver_at_ms=np.empty(0, np.uint64) if raised is None else rows.deliver_at_ms[raised],
        )
        staged = asked if fresh is None else bitmap_of(keys[fresh])
        # A bucket that is dropped before the rows are applied must not take their pages with it.
        fresh_pages = pages_of(staged) - self._staged_pages
        self.index.pages.hold(fresh_pages)
        self._staged_pages |= fresh_pages
        self._staged |= staged
        if fresh is not None:
            self.index.pages.forget_unheld(pages_of(asked))
        if not len(rows):
            return None, outcome
        return AddRecord(self.topic_id, self.incarnation, 0, rows), outcome

    def _without_row(self, keys: U64, asked: BitMap64) -> npt.NDArray[np.intp] | None:
        """The rows of a request whose position has no row, applied or staged, each position once; None for all rows.

        `asked`: the set of the keys.
        """
        present = self.index.present_among(asked)
        for staged in (self._staged, self._acknowledging_lost):
            if staged.intersect(asked):
                present |= staged & asked
        if not present and len(asked) == len(keys):
            return None
        chosen = np.flatnonzero(~contained(keys, present)) if present else np.arange(len(keys))
        _, first = np.unique(keys[chosen], return_index=True)
        return chosen[np.sort(first)]

    def _raised(self, rows: Rows) -> tuple[Rows, npt.NDArray[np.intp] | None]:
        """A row is stored later than every subscription was created, so that all of them are owed it.

        The first one is owed what is later than 0.
        """
        floor_ms = max((state.stored.since_ms for state in self.subscriptions.values()), default=0)
        below = rows.deliver_at_ms <= np.uint64(floor_ms)
        if not below.any():
            return rows, None
        times = np.where(below, np.uint64(floor_ms + 1), rows.deliver_at_ms)
        return Rows(times, rows.ledger_id, rows.entry_id, rows.key_hash), np.flatnonzero(below)

    # ---- acknowledgements

    def stage_acknowledge(
        self, state: SubscriptionState, claims: HeldPositions
    ) -> tuple[AcknowledgeRecord | None, HeldPositions]:
        """Acknowledges what is IN_FLIGHT with that time: (the record to journal, the claims that are not IN_FLIGHT)."""
        keys = self.index.pages.find(claims.ledger_id, claims.entry_id)
        found = state.in_flight.take(keys, claims.deliver_at_ms)
        record = self._acknowledge_record(state, claims, keys, found)
        if found.all():
            return record, HeldPositions(keys[:0], keys[:0], keys[:0])
        rest = ~found
        return record, HeldPositions(claims.ledger_id[rest], claims.entry_id[rest], claims.deliver_at_ms[rest])

    def stage_acknowledge_found(self, state: SubscriptionState, found: KeyedRows) -> AcknowledgeRecord | None:
        """Acknowledges rows of the backlog that `find_in_backlog` found."""
        if not len(found):
            return None
        state.withdraw(bitmap_of(found.keys))
        rows = found.rows
        claims = HeldPositions(rows.ledger_id, rows.entry_id, rows.deliver_at_ms)
        return self._acknowledge_record(state, claims, found.keys, np.ones(len(found), np.bool_))

    def _acknowledge_record(
        self, state: SubscriptionState, claims: HeldPositions, keys: U64, chosen: npt.NDArray[np.bool_]
    ) -> AcknowledgeRecord | None:
        if not chosen.any():
            return None
        state.acknowledging |= bitmap_of(keys[chosen])
        rows = Rows(claims.deliver_at_ms, claims.ledger_id, claims.entry_id)
        if not chosen.all():
            rows = rows.take(chosen)
        return AcknowledgeRecord(self.topic_id, self.incarnation, state.subscription_id, rows)

    def in_backlog(self, state: SubscriptionState, claims: HeldPositions) -> HeldPositions:
        """The claims that may be in the backlog; whether the times are right only the rows can tell."""
        keys = self.index.pages.find(claims.ledger_id, claims.entry_id)
        due = BitMap64()
        asked = bitmap_of(keys)
        for bucket in self.index.buckets:
            here = asked & bucket.passed
            if here:
                here -= bucket.acknowledged.get(state.subscription_id, BitMap64())
                due |= here
        due -= state.acknowledging
        mask = contained(keys, due)
        return HeldPositions(claims.ledger_id[mask], claims.entry_id[mask], claims.deliver_at_ms[mask])

    def find_in_backlog(
        self, state: SubscriptionState, claims: HeldPositions, seen: SeenRows
    ) -> tuple[KeyedRows, list[SegmentRange]]:
        """The claimed rows that are in the backlog: (rows, segments that must be loaded first to tell).

        `seen`: empty at the first call, and handed in again with the same claims after loading.
        """
        claims = self.in_backlog(state, claims)
        if not len(claims):
            return KeyedRows.empty(), []
        keys = self.index.pages.find(claims.ledger_id, claims.entry_id)
        found, missing = self.index.find_loaded(keys, claims.deliver_at_ms, seen)
        owed = state.owes(found) if len(found) else None
        return (found if owed is None else found.take(owed)), missing

    def hold(self, state: SubscriptionState, dispatcher: int, found: KeyedRows) -> None:
        """Rows of the backlog are IN_FLIGHT at a dispatcher that declared to hold them."""
        if len(found):
            state.withdraw(bitmap_of(found.keys))
            state.in_flight.add(found, dispatcher)

    def move_held(self, state: SubscriptionState, claims: HeldPositions, leases: Collection[int], lease: int) -> int:
        """Claims that one of the leases holds with that time are held by another lease from now on; how many."""
        keys = self.index.pages.find(claims.ledger_id, claims.entry_id)
        return state.in_flight.move(keys, claims.deliver_at_ms, leases, lease)

    # ---- decisions are applied

    def apply(self, record: Record, slot: int, *, elapsed_ms: int) -> None:
        """Applies one decision of a slot that is durable; also at replay. Records of another incarnation do nothing."""
        if record.incarnation != self.incarnation:
            return
        if isinstance(record, AddRecord):
            rows = KeyedRows(record.rows, self.index.pages.intern(record.rows.ledger_id, record.rows.entry_id))
            added = bitmap_of(rows.keys)
            self.index.mutable.add(rows, added, elapsed_ms=elapsed_ms)
            quarantine.added_again(self.index.quarantined.values(), added, slot)
            self._release_staged(added)
        elif isinstance(record, AcknowledgeRecord):
            self._apply_acknowledge(record, slot)
        elif isinstance(record, GoneRecord):
            with self._named(record.positions) as keys:
                for state in self.subscriptions.values():
                    state.drop(self.index.owed_among(keys, state.subscription_id))
                self.index.remove(keys)
        elif record.subscription_id in self.subscriptions:
            with self._named(record.positions) as keys:
                waived = self.index.waive(keys, record.subscription_id)
                self.subscriptions[record.subscription_id].drop(waived)

    @contextlib.contextmanager
    def _named(self, positions: Iterable[PositionBitmap]) -> Iterator[BitMap64]:
        """The keys of positions that leave: of pages that no bucket holds only where a damaged bucket may have them."""
        if not quarantine.learns_positions(self.index.quarantined.values()):
            yield self.index.pages.find_stored(positions)
            return
        keys = self.index.pages.from_stored(positions)
        yield keys
        self.index.pages.forget_unheld(pages_of(keys))

    def _release_staged(self, added: BitMap64) -> None:
        if not self._staged_pages:
            return
        self._staged -= added
        left = pages_of(self._staged)
        self.index.pages.release(self._staged_pages - left)
        self._staged_pages = left

    def _apply_acknowledge(self, record: AcknowledgeRecord, slot: int) -> None:
        learns = quarantine.learns_positions(self.index.quarantined.values())
        if learns:
            self.index.pages.intern(record.rows.ledger_id, record.rows.entry_id)
        rows = self.index.pages.keyed(record.rows)
        keys = bitmap_of(rows.keys)
        entitled = {
            number: other.stored.since_ms
            for number, other in self.subscriptions.items()
            if other.stored.created_slot < slot
        }
        passed_rows = self.index.acknowledge(rows, keys, record.subscription_id, entitled)
        state = self.subscriptions.get(record.subscription_id)
        if state is not None:
            state.backlog -= passed_rows
            state.acknowledging -= keys
        self._acknowledging_lost -= keys
        if learns:
            self.index.pages.forget_unheld(pages_of(keys))

    # ---- what is there

    def contains(self, request: EntryRanges, state: SubscriptionState | None, *, ranges_max: int) -> Contained:
        """What of ranges of entries is in the index, of a subscription: what it has not acknowledged.

        Rows whose time has come count as pending until the head has passed them.
        """
        subscription_id = None if state is None else state.subscription_id
        return contained_in(self.index, request, subscription_id, ranges_max=ranges_max)

    # ---- trims

    def trim(self, ranges: LedgerRanges | None, subscription_id: int | None) -> Departure:
        """The decision to drop what is present of the ranges, None: of everything; for one subscription only what it is
        owed.

        Call while no request passes and nothing is staged, until the records are applied.
        """
        parts = trimming.chosen(self.index, ranges)
        others = [number for number in self.subscriptions if number != subscription_id]
        if subscription_id is None:
            gone, waived = BitMap64.union(BitMap64(), *[keys for _, keys in parts]), BitMap64()
        else:
            gone, waived = trimming.split(parts, subscription_id, others)
        rows = len(gone) + len(waived)
        if subscription_id is None or not others:
            for keys, missing_rows in trimming.stand_ins(self.index, ranges):
                gone |= keys
                rows += missing_rows
        return Departure(
            self.topic_id,
            self.incarnation,
            self.index.pages,
            gone,
            GoneReason.TRIMMED,
            waived,
            subscription_id or 0,
            rows,
        )

    # ---- subscriptions

    def since_for_new_subscription(self, now_ms: int) -> int:
        """The `since_ms` of a subscription that is created now: everything that has been passed is before it."""
        return max(now_ms, self.index.passed_until_ms) if self.subscriptions else 0

    def begin_subscription(self, stored: Subscription) -> None:
        """The subscription is about to be in the topic's manifest: what is passed from here on is counted for it.

        What was passed before is owed to the first one only. No other decision is applied before `add_subscription`.
        """
        state = SubscriptionState(stored, ready_rows_max=self._ready_rows_max)
        if self.subscriptions:
            self.index.admit(stored.subscription_id)
        else:
            state.backlog = sum(bucket.passed_rows for bucket in self.index.buckets)
        self._coming = state

    def add_subscription(self) -> SubscriptionState:
        """The subscription that was begun is in the topic's manifest."""
        state = self._coming
        if state is None:
            raise InvariantViolated("a subscription is added that was not begun")
        self._coming = None
        self.subscriptions[state.subscription_id] = state
        return state

    def gone_with_subscription(self, subscription_id: int) -> list[GoneRecord]:
        """The decisions that make gone what only this subscription is owed, to be applied before it is removed."""
        others = [number for number in self.subscriptions if number != subscription_id]
        return self._gone(self.index.owed_to_none_of(others), GoneReason.NO_SUBSCRIPTION)

    def remove_subscription(self, subscription_id: int) -> None:
        """The subscription is no longer in the topic's manifest."""
        del self.subscriptions[subscription_id]
        self.index.dismiss(subscription_id)

    # ---- due

    def pass_due(self, now_ms: int, limit: int) -> int:
        """Passes about `limit` due rows into the backlogs; how many. 0 when none is due, or none that is in memory."""
        passed = self.index.pass_due(now_ms, limit)
        if not passed:
            return 0
        states = tuple(self.subscriptions.values())
        self._not_owed |= feeding.feed(passed, states, self._coming, lambda: self._reader(at_head=True))
        return sum(len(each.rows) for each in passed)

    def take_not_owed(self) -> list[GoneRecord]:
        """The decisions that make gone what was passed since the last call and no subscription is owed.

        A row is owed to nobody when the subscription that was owed it is no more, and the others were created at or
        after its time, which after a step back of the clock was still to come.
        """
        if not self._not_owed:
            return []
        keys, self._not_owed = self._not_owed, BitMap64()
        return self._gone(keys, GoneReason.NOT_OWED)

    def _gone(self, keys: BitMap64, reason: GoneReason) -> list[GoneRecord]:
        departure = Departure(self.topic_id, self.incarnation, self.index.pages, keys, reason)
        return [record for record in departure.records() if isinstance(record, GoneRecord)]

    # ---- reading a backlog again

    def _reader(self, *, at_head: bool) -> BacklogReader:
        return BacklogReader(self.index.sealed.values(), self.index.memory_buckets, at_head=at_head)

    def open(self, state: SubscriptionState, dispatcher: int) -> None:
        """A dispatcher listens to a subscription."""
        state.open(dispatcher, self._reader(at_head=False))

    def catch_up(self, state: SubscriptionState, limit: int) -> list[SegmentRange]:
        """Derives about `limit` READY rows for a subscription that is behind; the segments to load first, if any.

        When there is nothing left to derive the subscription is fed again.
        """
        return feeding.catch_up(self.index, state, limit)

    # ---- seals

    def finish_seal(self, memory: MutableBucket, sealed: SealedBucket | None, rows: KeyedRows, *, near_ms: int) -> None:
        """See `Index.finish_seal`; readers go on in the sealed bucket."""
        self.index.finish_seal(memory, sealed, rows, near_ms=near_ms)
        for state in self.subscriptions.values():
            if state.reader is not None:
                if sealed is not None:
                    state.reader.sealed(memory, sealed)
                else:
                    state.reader.dropped(memory)

    def drop(self, name: str) -> None:
        """A bucket every row of which is gone left the manifest."""
        bucket = self.index.drop(name)
        for state in self.subscriptions.values():
            if state.reader is not None:
                state.reader.dropped(bucket)

    # ---- damage

    def quarantine(self, live: LiveBucket) -> None:
        """The manifest says that a bucket is damaged: its rows leave index and backlogs until they are added again.

        `live`: the bucket, marked as quarantined. Until it is marked, `Index.leave_out` keeps its rows where they are.
        """
        bucket = self.index.quarantine(live)
        for state in self._states:
            # An add would stand in one slot with the acknowledgement, in any order: until then there is the row.
            self._acknowledging_lost |= state.acknowledging & bucket.present
            lost = bucket.passed - bucket.acknowledged.get(state.subscription_id, BitMap64())
            state.drop(lost)
            if state.reader is not None:
                state.reader.dropped(bucket)

    @property
    def _states(self) -> list[SubscriptionState]:
        return [*self.subscriptions.values(), *([] if self._coming is None else [self._coming])]

    def rebuild_needed(self) -> tuple[RebuildNeeded, ...]:
        """What was lost with damaged buckets and has not been added again, by ledgers."""
        return quarantine.rebuild_needed(self.index.quarantined.values())
