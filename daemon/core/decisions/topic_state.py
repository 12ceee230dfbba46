"""Keeps the state of one served topic: requests become decisions, and decisions change its index and backlogs.

    request -> stage_*: a decision, in columns -> one journal slot -> apply_*: the state changes -> the answer

Staged decisions are invisible: their rows neither come due nor are delivered. Adds, acknowledgements, negative ones,
cancellations and reschedules of one slot never name the same position, so their order does not matter. An add names
positions without a row, an acknowledgement and a negative one due rows, the last two rows that are not due.

`daemon.topic` waits for slots, runs timers and loads segments; `daemon.topic.stored_topic` stores the frozen copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core import limits
from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.dead_letter_rows import FrozenDeadLetters
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions import add_decisions, departures, feeding
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.core.decisions.claims import HeldPositions, Ignored, find_in_backlog, possibly_due, why_ignored
from daemon.core.decisions.dead_letter_decisions import DeadLetterDecisions
from daemon.core.decisions.departures import Departure, LedgerRanges
from daemon.core.decisions.key_shared_backlogs import KeySharedBacklogs
from daemon.core.decisions.nack_decisions import NackDecisions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.withdrawal_decisions import WithdrawalDecisions
from daemon.core.index import delay_levels, entitlement
from daemon.core.index.bucket import RebuildNeeded, SealedBucket
from daemon.core.index.containment import Contained, EntryRanges, contained_in
from daemon.core.index.index import Index, SeenRows
from daemon.core.index.indexes import Indexes
from daemon.core.index.merging import MergedBucket
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, Mask, bitmap_of, contained
from daemon.core.index.runs import earliest
from daemon.core.index.segments import SegmentCache, SegmentRange
from daemon.errors import InvariantViolated
from storage_backends.formats.index_ids import SHARED, subscription_of
from storage_backends.formats.manifest import LiveBucket, Subscription
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.formats.slot_format import (
    AcknowledgeRecord,
    AddRecord,
    DeadLetterRecord,
    GoneReason,
    GoneRecord,
    NackRecord,
    PurgeRecord,
    Record,
    ReplayRecord,
    RescheduleRecord,
    WaiveRecord,
)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SubscriptionCut:
    """The negative acknowledgements and dead letters of one subscription, frozen.

    `planes` are the bits of the counts.
    """

    subscription_id: int
    nacked: FrozenNacks
    planes: tuple[BitMap64, ...]
    dead_letters: FrozenDeadLetters
    last_dead_letter_id: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RedeliveryCut:
    """The negative acknowledgements of a topic's subscriptions that have any, frozen.

    `levels` has (index, delay level, rows that were added by it).
    """

    subscriptions: tuple[SubscriptionCut, ...]
    levels: tuple[tuple[int, int, BitMap64], ...]


def cut_of(state: SubscriptionState) -> SubscriptionCut | None:
    """Freeze a subscription. Return None if there is nothing. The work grows with the runs and the sizes of bitmaps."""
    planes = state.counts.planes()
    if not (len(state.nacks) or planes or state.last_dead_letter_id):
        return None
    return SubscriptionCut(
        state.subscription_id, state.nacks.freeze(), planes, state.dead_letters.freeze(), state.last_dead_letter_id
    )


_NO_TIMES = np.empty(0, np.uint64)


class TopicState:
    """The state of one topic, changed only by its methods.

    `applied_slot` is the last slot of the shard whose decisions are in it.
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
        backlog_limits: limits.BacklogLimits = limits.NO_BACKLOG_LIMITS,
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.incarnation = incarnation
        self.indexes = Indexes(cache, now_ms=now_ms)
        self._ready_rows_max = ready_rows_max
        self._backlog_limits = backlog_limits
        self.subscriptions: dict[int, SubscriptionState] = {}
        self._by_name: dict[str, SubscriptionState] = {}
        for stored in subscriptions:
            self._serve(self._new_state(stored))
        self.withdrawals = WithdrawalDecisions(topic_id, incarnation, self.indexes, self.subscriptions)
        self.acknowledging = AckDecisions(topic_id, incarnation, self.indexes, self.subscriptions)
        self.dead_lettering = DeadLetterDecisions(topic_id, incarnation, self.indexes, self.subscriptions)
        self.redelivery = NackDecisions(
            topic_id, incarnation, self.indexes, self.subscriptions, self.acknowledging, self.dead_lettering
        )
        self.key_sharing = KeySharedBacklogs(self.indexes, self._reader)
        self._coming: SubscriptionState | None = None
        self._not_owed = BitMap64()
        self._redelivered_at_ms: list[U64] = []
        # Added rows that arrived in due order, and those that had to be sorted in
        self.in_due_order_rows = self.out_of_order_rows = 0

    def _new_state(self, stored: Subscription) -> SubscriptionState:
        return SubscriptionState(
            stored, self.indexes.places, ready_rows_max=self._ready_rows_max, limits=self._backlog_limits
        )

    @property
    def index(self) -> Index:
        """The shared index."""
        return self.indexes.shared

    @property
    def floor_ms(self) -> int:
        """The time after which rows of the shared index are stored, so that every subscription is owed them (Unix ms).

        The first subscription is owed everything later than 0.
        """
        return max((state.stored.since_ms for state in self.subscriptions.values()), default=0)

    # ---- adds

    def stage_add(
        self,
        batch: AddBatch,
        *,
        now_ms: int,
        request_limits: limits.RequestLimits,
        subscription_id: int = 0,
        shared_index: bool = True,
        levels: delay_levels.DelayLevels = delay_levels.DEFAULT,
        admit: add_decisions.Admit = add_decisions.admit_all,
    ) -> tuple[tuple[AddRecord, ...], AddOutcome]:
        """Stage the rows of an add: (records to journal in one slot, empty if nothing is new; the outcome).

        `subscription_id` limits the rows to that subscription; 0 means all. `shared_index` is the topic's policy:
        without it, rows for all subscriptions are added to each subscription index, and are duplicates if all have
        them. `levels` is the topic's table of delays; the rows of each level are one record. For `admit` see
        `add_decisions.stage`. Raises InvalidArgument if these would be too many rows.
        """
        if subscription_id:
            indexes = [self.indexes.of(subscription_id)]
        elif shared_index or not self.subscriptions:
            indexes = [self.index]
        else:
            limits.check_copies("entry_id", len(batch.entry_id), len(self.subscriptions), request_limits.rows_max)
            indexes = [self.indexes.of(number) for number in self.subscriptions]
        accepted, outcome = add_decisions.stage(
            batch,
            indexes,
            now_ms=now_ms,
            floor_ms=self.floor_ms if indexes[0] is self.index else None,
            request_limits=request_limits,
            levels=levels,
            admit=admit,
        )
        records = tuple(
            AddRecord(self.topic_id, self.incarnation, index.index_id, rows, level)
            for index, of_levels in zip(indexes, accepted, strict=True)
            for level, rows in of_levels
        )
        return records, outcome

    def stage_rows(self, rows: Rows) -> tuple[AddRecord | None, npt.NDArray[np.bool_]]:
        """Stage rows for the shared index, each a request of its own, in order, due later than `floor_ms`.

        Returns (the record to journal, None if nothing is new; the mask of accepted rows). The others are duplicates.
        """
        accepted = add_decisions.stage_each(rows, self.index)
        if accepted.all():
            chosen = rows
        elif accepted.any():
            chosen = rows.take(accepted)
        else:
            return None, accepted
        return AddRecord(self.topic_id, self.incarnation, self.index.index_id, chosen), accepted

    # ---- claims of dispatchers

    def in_backlog(self, state: SubscriptionState, claims: HeldPositions) -> HeldPositions:
        """Return the claims that may be in the backlog. Only the rows show whether the times are right."""
        return possibly_due(self.indexes.serving(state.subscription_id), state, claims)

    def find_in_backlog(
        self, state: SubscriptionState, claims: HeldPositions, seen: SeenRows, *, any_time: bool = False
    ) -> tuple[KeyedRows, list[SegmentRange]]:
        """Find the claimed rows that are in the backlog: (rows, segments that must be loaded first).

        `seen` is empty at the first call, and passed again with the same claims after loading. With `any_time`, a claim
        with time 0 matches any time.
        """
        return find_in_backlog(self.indexes.serving(state.subscription_id), state, claims, seen, any_time=any_time)

    def why_ignored(self, state: SubscriptionState, left: HeldPositions, found: KeyedRows, *, now_ms: int) -> Ignored:
        """Return why the claims that are left of an acknowledgement are ignored. `found` is from `find_in_backlog`."""
        return why_ignored(self.indexes.serving(state.subscription_id), state, left, found, now_ms=now_ms)

    def hold(self, state: SubscriptionState, dispatcher: int, found: KeyedRows, *, elapsed_ms: int = 0) -> Mask:
        """Put rows of the backlog IN_FLIGHT at a dispatcher that declared to hold them; return their mask.

        NACKED rows are left out.
        """
        held = ~contained(found.keys, state.set_aside_among(bitmap_of(found.keys)))
        if held.any():
            rows = found if held.all() else found.take(held)
            state.withdraw(bitmap_of(rows.keys))
            state.in_flight.add(state.counted(rows), dispatcher, elapsed_ms=elapsed_ms)
        return held

    def move_held(
        self,
        state: SubscriptionState,
        claims: HeldPositions,
        leases: Collection[int],
        lease: int,
        *,
        elapsed_ms: int = 0,
    ) -> HeldPositions:
        """Move claims that one of the leases holds with these times to another lease; return the other claims."""
        for index in self.indexes.serving(state.subscription_id):
            moved = state.in_flight.move(
                claims.keys_in(index), claims.deliver_at_ms, leases, lease, elapsed_ms=elapsed_ms
            )
            claims = claims.take(~moved)
        return claims

    # ---- applying decisions

    def apply_all(self, records: Iterable[Record], slot: int, *, elapsed_ms: int) -> bool:
        """Apply the decisions of a durable slot in order; return whether any was not an acknowledgement.

        Consecutive acknowledgements are applied together, since they share some work. For the effect of each see
        `apply`.
        """
        has_more = False
        acknowledged: list[AcknowledgeRecord] = []
        for record in records:
            if isinstance(record, AcknowledgeRecord):
                if record.incarnation == self.incarnation:
                    acknowledged.append(record)
                continue
            if acknowledged:
                self.acknowledging.acknowledged(acknowledged, slot)
                acknowledged = []
            self.apply(record, slot, elapsed_ms=elapsed_ms)
            has_more = True
        if acknowledged:
            self.acknowledging.acknowledged(acknowledged, slot)
        return has_more

    def apply(self, record: Record, slot: int, *, elapsed_ms: int) -> None:
        """Apply one decision of a durable slot, also in a replay.

        Records of another incarnation, or for the index of a removed subscription, do nothing.
        """
        if record.incarnation != self.incarnation:
            return
        match record:
            case AddRecord():
                if self._has_index(record.subscription_id):
                    index = self.indexes.of(record.subscription_id)
                    in_order = index.add(record.rows, slot, elapsed_ms=elapsed_ms, level=record.delay_level)
                    self.in_due_order_rows += in_order
                    self.out_of_order_rows += len(record.rows) - in_order
            case AcknowledgeRecord():
                self.acknowledging.acknowledged((record,), slot)
            case NackRecord() if record.subscription_id in self.subscriptions:
                self.redelivery.nacked(record, slot, elapsed_ms=elapsed_ms)
            case DeadLetterRecord():
                if record.leaves_backlog:
                    self.acknowledging.acknowledged((record,), slot)
                if record.subscription_id in self.subscriptions:
                    self.dead_lettering.dead_lettered(record)
            case ReplayRecord() if record.subscription_id in self.subscriptions:
                self.dead_lettering.replayed(record, slot, elapsed_ms=elapsed_ms)
            case PurgeRecord() if record.subscription_id in self.subscriptions:
                self.dead_lettering.purged(record)
            case GoneRecord():
                if self._has_index(record.subscription_id):
                    self._apply_gone(self.indexes.of(record.subscription_id), record)
            case RescheduleRecord():
                if self._has_index(record.subscription_id):
                    index = self.indexes.of(record.subscription_id)
                    self.withdrawals.rescheduled(index, record.rows, elapsed_ms=elapsed_ms)
            case WaiveRecord() if self._was_created_before(slot, record.subscription_id):
                with self.index.named(record.positions) as keys:
                    waived = entitlement.waive(self.index, keys, record.subscription_id)
                    self.subscriptions[record.subscription_id].drop(keys, backlog_rows=len(waived))
            case NackRecord() | ReplayRecord() | PurgeRecord() | WaiveRecord():
                # The subscription was removed, or its creation is not committed yet or never was.
                pass
            case _:
                assert_never(record)

    def _was_created_before(self, slot: int, subscription_id: int) -> bool:
        """Return whether a subscription exists and is not a later one with the id of one that was never committed."""
        state = self.subscriptions.get(subscription_id)
        return state is not None and state.stored.created_slot < slot

    def _has_index(self, index_id: int) -> bool:
        return index_id == SHARED or subscription_of(index_id) in self.subscriptions

    def _apply_gone(self, index: Index, record: GoneRecord) -> None:
        with index.named(record.positions) as keys:
            if record.reason is GoneReason.CANCELLED:
                self.withdrawals.cancelled(index, keys)
                return
            for state in self._served_by(index):
                state.drop(keys, backlog_rows=len(entitlement.backlog_among(index, keys, state.subscription_id)))
            index.remove(keys)

    def _served_by(self, index: Index) -> list[SubscriptionState]:
        """Return the subscriptions that are owed rows of an index."""
        if index is self.index:
            return list(self.subscriptions.values())
        return [self.subscriptions[subscription_of(index.index_id)]]

    # ---- contents

    def contains(self, request: EntryRanges, state: SubscriptionState | None, *, ranges_max: int) -> Contained:
        """Return what any index has of ranges of entries; for a subscription, what it is owed and has not acknowledged.

        Due rows count as pending until the head has passed them.
        """
        subscription_id = None if state is None else state.subscription_id
        return contained_in(self.indexes.of_entries(subscription_id), request, subscription_id, ranges_max=ranges_max)

    # ---- trims

    def trim(
        self, ranges: LedgerRanges | None, subscription_id: int | None, *, dead_letter: bool = False
    ) -> Generator[Departure | None, None, None]:
        """Yield portions of what a trim removes from the ranges (everything if None), or None for a turn of others.

        A portion is of one index. For one subscription only what it is owed is removed. With `dead_letter`, departing
        rows will be listed, so positions that are unknown cannot be removed.

        Take a portion while no request passes and nothing is staged, until its records are applied. Between two
        portions requests may pass; what they add stays.
        """
        rows_max = departures.DEAD_LETTER_PORTION_ROWS if dead_letter else departures.PORTION_ROWS
        indexes = list(self.indexes.values() if subscription_id is None else self.indexes.serving(subscription_id))
        with contextlib.ExitStack() as noting:
            noted = [noting.enter_context(index.noting_added()) for index in indexes]
            for index, added in zip(indexes, noted, strict=True):
                asked = ranges.of_batch_parts() if ranges is not None and index.of_batch_parts else ranges
                for parts in departures.portions(index, asked, rows_max):
                    if self.indexes.get(index.index_id) is not index:
                        break
                    yield None if parts is None else self._departure(index, parts, added, subscription_id)
                if not dead_letter:
                    yield from self._departure_of_stand_ins(index, asked, subscription_id)

    def _departure(
        self, index: Index, parts: departures.Parts, added: BitMap64, subscription_id: int | None
    ) -> Departure:
        parts = [(bucket, keys - added) for bucket, keys in parts] if added else parts
        if index is self.index and subscription_id is not None:
            gone, waived = departures.split(parts, subscription_id, self._others(subscription_id))
            return self._trimmed(index, gone, len(gone) + len(waived), waived, subscription_id)
        gone = BitMap64.union(BitMap64(), *[keys for _, keys in parts])
        return self._trimmed(index, gone, len(gone))

    def _departure_of_stand_ins(
        self, index: Index, ranges: LedgerRanges | None, subscription_id: int | None
    ) -> Iterator[Departure]:
        """Drop missing rows of damaged buckets with unknown positions, unless other subscriptions are owed them."""
        if index is self.index and subscription_id is not None and self._others(subscription_id):
            return
        stand_ins = departures.stand_ins(index, ranges)
        if stand_ins:
            gone = BitMap64.union(*[keys for keys, _ in stand_ins])
            yield self._trimmed(index, gone, sum(missing_rows for _, missing_rows in stand_ins))

    def _trimmed(
        self, index: Index, gone: BitMap64, rows: int, waived: BitMap64 | None = None, subscription_id: int = 0
    ) -> Departure:
        """Build the departure of a trim that decides this many rows."""
        return Departure(
            self.topic_id,
            self.incarnation,
            index.pages,
            gone,
            GoneReason.TRIMMED,
            BitMap64() if waived is None else waived,
            subscription_id,
            rows,
            index_id=index.index_id,
        )

    def _others(self, subscription_id: int | None) -> list[int]:
        return [number for number in self.subscriptions if number != subscription_id]

    # ---- subscriptions

    def since_for_new_subscription(self, now_ms: int) -> int:
        """Return the `since_ms` of a subscription that is created now: the clock, or 0 if there is no other one.

        Later, all adds are stored after it. So it is not the time of rows that were passed while the clock was ahead:
        `passed_before` names these.
        """
        return now_ms if self.subscriptions else 0

    def begin_subscription(self, stored: Subscription) -> SubscriptionState:
        """Start counting passed rows for a subscription that is about to be in the topic's manifest; return it.

        Rows passed before are owed to the first subscription only. No decision is applied before `add_subscription`
        but that of `passed_before`.
        """
        state = self._new_state(stored)
        if self.subscriptions:
            entitlement.admit(self.index, stored.subscription_id)
        else:
            state.backlog = sum(bucket.passed_rows for bucket in self.index.buckets)
        self._coming = state
        return state

    def add_subscription(self) -> SubscriptionState:
        """Serve the subscription that was begun and is now in the topic's manifest."""
        state = self._coming
        if state is None:
            raise InvariantViolated("a subscription is added that was not begun")
        self._coming = None
        self._serve(state)
        return state

    def passed_before(self, state: SubscriptionState) -> Departure:
        """Return the claims of a subscription that was begun to rows passed before, with later times.

        They were passed while the clock was ahead. Until the departure is durable only memory knows them.
        """
        waived = BitMap64()
        if self.indexes.passed_until_ms > state.stored.since_ms:
            kept_from = (bucket.acknowledged.get(state.subscription_id) for bucket in self.index.buckets)
            waived = BitMap64.union(BitMap64(), *[keys for keys in kept_from if keys])
        return Departure(
            self.topic_id,
            self.incarnation,
            self.index.pages,
            BitMap64(),
            GoneReason.NOT_OWED,
            waived,
            state.subscription_id,
        )

    def _serve(self, state: SubscriptionState) -> None:
        self.subscriptions[state.subscription_id] = self._by_name[state.stored.name] = state

    def subscription(self, name: str) -> SubscriptionState | None:
        """Return the subscription with this name, or None."""
        return self._by_name.get(name)

    def gone_with_subscription(self, subscription_id: int) -> list[GoneRecord]:
        """Return the decisions that remove what only this subscription is owed, to be applied before its removal."""
        others = self._others(subscription_id)
        return self._gone(entitlement.owed_to_none_of(self.index, others), GoneReason.NO_SUBSCRIPTION)

    def remove_subscription(self, subscription_id: int) -> None:
        """Remove a subscription that is no longer in the topic's manifest, with its subscription index."""
        del self._by_name[self.subscriptions.pop(subscription_id).stored.name]
        entitlement.dismiss(self.index, subscription_id)
        self.indexes.remove(subscription_id)

    # ---- due

    def pass_due(self, now_ms: int, limit: int) -> int:
        """Pass about `limit` due rows into the backlogs, and redeliver as many in each subscription; return the number.

        Returns 0 if none is due, or none that is in memory.
        """
        states, rows, by_key = tuple(self.subscriptions.values()), 0, False
        for state in states:
            if state.nacks.rows:
                rows += self._redeliver(state, now_ms, limit)
            by_key = by_key or state.key_shared is not None
        look = (lambda: self.key_sharing.hold_up(states, now_ms)) if by_key else None
        passed = self.indexes.pass_due(now_ms, limit, look)
        if passed:
            self._not_owed |= feeding.feed(
                passed, states, self._coming, lambda state: self._reader(state, at_head=True)
            )
            came_late = False
            for each in passed:
                rows += len(each.rows.keys)
                came_late = came_late or each.late
            if came_late:
                # Late rows may lie behind the readers that look for evicted rows.
                for state in states:
                    if state.key_shared is not None and state.key_shared.let_go is not None:
                        state.key_shared.let_go.seek_again()
        return rows

    def takes_redeliveries(self, state: SubscriptionState) -> bool:
        """Return whether NACKED positions of a subscription may be redelivered now.

        There must be room and, by key, no earlier row that is due but not passed.
        """
        return state.takes_redeliveries and self.key_sharing.bound(state) is None

    def _redeliver(self, state: SubscriptionState, now_ms: int, limit: int) -> int:
        if self.key_sharing.bound(state) is not None:
            return 0
        times_ms = state.redeliver(now_ms, limit)
        if len(times_ms):
            self._redelivered_at_ms.append(times_ms)
        return len(times_ms)

    def take_redelivered(self) -> U64:
        """Return the redelivery times of positions redelivered since the last call (Unix ms)."""
        if not self._redelivered_at_ms:
            return _NO_TIMES
        taken, self._redelivered_at_ms = self._redelivered_at_ms, []
        return np.concatenate(taken)

    def next_redelivery_ms(self) -> int | None:
        """Return a lower bound of the next redelivery (Unix ms), or None if there is none or no room for any."""
        first_ms = None
        for state in self.subscriptions.values():
            if state.nacks.rows and self.takes_redeliveries(state):
                first_ms = earliest(first_ms, state.nacks.next_due_ms())
        return first_ms

    def take_not_owed(self) -> list[GoneRecord]:
        """Return the decisions that remove rows passed since the last call that no subscription is owed.

        Such a row's subscription was removed, and the others were created at or after its time, which was still to come
        after a step back of the clock.
        """
        if not self._not_owed:
            return []
        keys, self._not_owed = self._not_owed, BitMap64()
        return self._gone(keys, GoneReason.NOT_OWED)

    def _gone(self, keys: BitMap64, reason: GoneReason) -> list[GoneRecord]:
        departure = Departure(self.topic_id, self.incarnation, self.index.pages, keys, reason)
        return [record for record in departure.records() if isinstance(record, GoneRecord)]

    # ---- reading a backlog again

    def _reader(self, state: SubscriptionState, *, at_head: bool) -> BacklogReader:
        indexes = self.indexes.serving(state.subscription_id)
        sealed = [bucket for index in indexes for bucket in index.sealed.values()]
        memory = [bucket for index in indexes for bucket in index.memory_buckets]
        return BacklogReader(sealed, memory, at_head=at_head)

    def open(self, state: SubscriptionState, dispatcher: int) -> None:
        """Open a subscription for a dispatcher."""
        state.open(dispatcher, self._reader(state, at_head=False))

    def catch_up(self, state: SubscriptionState, limit: int) -> list[SegmentRange]:
        """Derive about `limit` READY rows for a subscription that is behind; return the segments to load first.

        When nothing is left to derive, the subscription is fed again.
        """
        indexes, bound = self.indexes.serving(state.subscription_id), self.key_sharing.bound(state)
        return feeding.catch_up(indexes, self.indexes.cache, state, limit, bound)

    # ---- seals

    def finish_seal(
        self, index_id: int, memory: MutableBucket, sealed: SealedBucket | None, rows: KeyedRows, *, near_ms: int
    ) -> None:
        """Finish a seal, as `Index.finish_seal`, and move readers to the sealed bucket. Ignores a removed index."""
        index = self.indexes.get(index_id)
        if index is None:
            return
        index.finish_seal(memory, sealed, rows, near_ms=near_ms)
        for state in self._served_by(index):
            for reader in state.readers:
                if sealed is not None:
                    reader.sealed(memory, sealed)
                else:
                    reader.dropped(memory)

    def drop(self, name: str) -> None:
        """Drop a bucket that has left the manifest since all its rows are gone. Ignores a removed index."""
        index = self.indexes.holding(name)
        if index is None:
            return
        bucket = index.drop(name)
        for state in self._served_by(index):
            for reader in state.readers:
                reader.dropped(bucket)

    def adopt(
        self, merged: MergedBucket, loaded: Mapping[int, KeyedRows], *, boundary_ms: int
    ) -> Sequence[SealedBucket]:
        """Replace buckets by their merged one, as `Index.adopt`, and move readers to it; return the sources.

        Returns no sources for a removed index.
        """
        index = self.indexes.get(merged.live.subscription_id)
        if index is None:
            return ()
        sources, expected = index.sources_of(merged), index.expected
        passed_over = any(source not in expected for source in sources)
        bucket = index.adopt(merged, loaded, boundary_ms=boundary_ms)
        for state in self._served_by(index):
            for reader in state.readers:
                reader.merged(sources, bucket)
            if passed_over and state.is_fed:
                # It may have read its backlog without a source, which was taken for damaged.
                state.reader = self._reader(state, at_head=False)
        return sources

    # ---- the state as of a slot

    def redelivery_cut(self) -> RedeliveryCut:
        """Freeze what exists besides the rows, for a checkpoint or the progress of a seal."""
        levels = tuple(
            (number, level, keys) for number, index in self.indexes.items() for level, keys in index.levels.freeze()
        )
        cuts = (cut_of(state) for state in self.subscriptions.values())
        return RedeliveryCut(tuple(cut for cut in cuts if cut is not None), levels)

    # ---- damage

    def lose_merged(self, live: LiveBucket, sources: Sequence[SealedBucket]) -> None:
        """Quarantine a bucket that was merged from these and never served.

        Its rows leave index and backlogs until they are added again. Ignores a removed index.
        """
        index = self.indexes.get(live.subscription_id)
        if index is not None:
            index.lose_merged(live, sources)
            for bucket in sources:
                self._lost(index, bucket)

    def quarantine(self, live: LiveBucket) -> None:
        """Quarantine a bucket that the manifest marks as damaged.

        Its rows leave index and backlogs until they are added again. `live` is the bucket, marked as quarantined; until
        it is marked, `Index.leave_out` keeps its rows. Ignores a removed index.
        """
        index = self.indexes.holding(live.object.name)
        if index is None:
            return
        self._lost(index, index.quarantine(live))

    def _lost(self, index: Index, bucket: SealedBucket) -> None:
        states = self._served_by(index)
        if index is self.index and self._coming is not None:
            states.append(self._coming)
        for state in states:
            # Keep the row until then: an add and the acknowledgement would stand in one slot, in any order.
            index.acknowledging_lost |= state.acknowledging & bucket.present
            owed = bucket.present - bucket.acknowledged.get(state.subscription_id, BitMap64())
            state.drop(owed, backlog_rows=owed.intersection_cardinality(bucket.passed))
            for reader in state.readers:
                reader.dropped(bucket)

    def rebuild_needed(self) -> tuple[RebuildNeeded, ...]:
        """Return what was lost with damaged buckets and has not been added again, by ledger."""
        return self.indexes.rebuild_needed()
