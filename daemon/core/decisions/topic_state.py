"""One topic that is served: requests become decisions, decisions change the index and the backlogs.

Owns: checking a request against what is applied and what is staged, applying decisions in the order of their slots,
and feeding what comes due to the subscriptions.
Does not own: waiting for slots, timers and loading (`daemon.topic`), and what is stored (`daemon.shard`).

    request -> stage_*: a decision, in columns -> one journal slot -> apply_*: the state changes -> the answer

Nothing that is staged is visible: it neither comes due nor is it handed out. Adds, acknowledgements, negative ones,
cancellations and reschedules of one slot never name the same position, so their order does not matter: an add names
positions without a row, an acknowledgement and a negative one due rows, the last two rows that are not due.

What was negatively acknowledged of a topic, its dead letters and its levels, as of one moment.

Owns: the frozen values, and taking them.
Does not own: the stored form (`daemon.topic.stored_topic`), and putting them back (`nack_decisions`,
`level_rows`).
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
    """What was negatively acknowledged of one subscription, and its dead letters. `planes`: of counts, bit by bit."""

    subscription_id: int
    nacked: FrozenNacks
    planes: tuple[BitMap64, ...]
    dead_letters: FrozenDeadLetters
    last_dead_letter_id: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RedeliveryCut:
    """What was negatively acknowledged of a topic's subscriptions that have any.

    `levels`: (index, delay level, rows that were added by it).
    """

    subscriptions: tuple[SubscriptionCut, ...]
    levels: tuple[tuple[int, int, BitMap64], ...]


def cut_of(state: SubscriptionState) -> SubscriptionCut | None:
    """None where there is nothing. As much work as there are runs, and as bitmaps are large."""
    planes = state.counts.planes()
    if not (len(state.nacks) or planes or state.last_dead_letter_id):
        return None
    return SubscriptionCut(
        state.subscription_id, state.nacks.freeze(), planes, state.dead_letters.freeze(), state.last_dead_letter_id
    )


_NO_TIMES = np.empty(0, np.uint64)


class TopicState:
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
        self.indexes = Indexes(cache, now_ms=now_ms)
        self._ready_rows_max = ready_rows_max
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
        # Of rows that were added, how many came in due order, and how many had to be sorted in.
        self.in_due_order_rows = self.out_of_order_rows = 0

    def _new_state(self, stored: Subscription) -> SubscriptionState:
        return SubscriptionState(stored, self.indexes.places, ready_rows_max=self._ready_rows_max)

    @property
    def index(self) -> Index:
        """The shared index."""
        return self.indexes.shared

    @property
    def floor_ms(self) -> int:
        """Rows of the shared index are stored later, so that every subscription is owed them; the first one is owed
        what is later than 0.
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
        """Which rows are accepted, and with which time: (the records to journal in one slot, none when nothing is new).

        `subscription_id`: rows for that subscription alone, 0 for every one. `shared_index`: the topic's policy; if
        not, what is for every subscription is a row in the own index of each, and a duplicate where it is one in all.
        `levels`: the topic's table of delays; the rows of each level are a record. `admit`: see `adding.stage`. Raises
        InvalidArgument when these would be too many rows.
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
        """Rows for the shared index, each a request by itself, in that order, that are due later than `floor_ms`: (the
        record to journal, None when nothing is new, and which of the rows are accepted; the others are duplicates).
        """
        accepted = add_decisions.stage_each(rows, self.index)
        if accepted.all():
            chosen = rows
        elif accepted.any():
            chosen = rows.take(accepted)
        else:
            return None, accepted
        return AddRecord(self.topic_id, self.incarnation, self.index.index_id, chosen), accepted

    # ---- what dispatchers claim to hold

    def in_backlog(self, state: SubscriptionState, claims: HeldPositions) -> HeldPositions:
        """The claims that may be in the backlog; whether the times are right only the rows can tell."""
        return possibly_due(self.indexes.serving(state.subscription_id), state, claims)

    def find_in_backlog(
        self, state: SubscriptionState, claims: HeldPositions, seen: SeenRows, *, any_time: bool = False
    ) -> tuple[KeyedRows, list[SegmentRange]]:
        """The claimed rows that are in the backlog: (rows, segments that must be loaded first to tell).

        `seen`: empty at the first call, and handed in again with the same claims after loading. `any_time`: a claim
        with time 0 is for a row with any time.
        """
        return find_in_backlog(self.indexes.serving(state.subscription_id), state, claims, seen, any_time=any_time)

    def why_ignored(self, state: SubscriptionState, left: HeldPositions, found: KeyedRows, *, now_ms: int) -> Ignored:
        """Why the claims that are left of an acknowledgement are ignored. `found`: of `find_in_backlog`."""
        return why_ignored(self.indexes.serving(state.subscription_id), state, left, found, now_ms=now_ms)

    def hold(self, state: SubscriptionState, dispatcher: int, found: KeyedRows, *, elapsed_ms: int = 0) -> Mask:
        """Rows of the backlog are IN_FLIGHT at a dispatcher that declared to hold them; which of them. Those that are
        NACKED are not.
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
        """Claims that one of the leases holds with that time are held by another lease from now on; the others."""
        for index in self.indexes.serving(state.subscription_id):
            moved = state.in_flight.move(
                claims.keys_in(index), claims.deliver_at_ms, leases, lease, elapsed_ms=elapsed_ms
            )
            claims = claims.take(~moved)
        return claims

    # ---- decisions are applied

    def apply_all(self, records: Iterable[Record], slot: int, *, elapsed_ms: int) -> bool:
        """Applies the decisions of a slot that is durable, in their order, each as `apply` does; whether there were any
        but acknowledgements. What is the same for all of these that follow each other is found out once.
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
        """Applies one decision of a slot that is durable; also at replay.

        Records of another incarnation do nothing, nor do those of the own index of a subscription that is no more.
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
            case WaiveRecord() if record.subscription_id in self.subscriptions:
                with self.index.named(record.positions) as keys:
                    waived = entitlement.waive(self.index, keys, record.subscription_id)
                    self.subscriptions[record.subscription_id].drop(keys, backlog_rows=len(waived))
            case NackRecord() | ReplayRecord() | PurgeRecord() | WaiveRecord():
                # The subscription is no more.
                pass
            case _:
                assert_never(record)

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
        """The subscriptions that are owed rows of an index."""
        if index is self.index:
            return list(self.subscriptions.values())
        return [self.subscriptions[subscription_of(index.index_id)]]

    # ---- what is there

    def contains(self, request: EntryRanges, state: SubscriptionState | None, *, ranges_max: int) -> Contained:
        """What of ranges of entries is in any index, of a subscription: what it is owed and has not acknowledged.

        Rows whose time has come count as pending until the head has passed them.
        """
        subscription_id = None if state is None else state.subscription_id
        return contained_in(self.indexes.of_entries(subscription_id), request, subscription_id, ranges_max=ranges_max)

    # ---- trims

    def trim(
        self, ranges: LedgerRanges | None, subscription_id: int | None, *, dead_letter: bool = False
    ) -> Generator[Departure | None, None, None]:
        """The decisions to drop what is present of the ranges, None: of everything; for one subscription only what it
        is owed. In portions, each of one index; None: others may have their turn first. `dead_letter`: what leaves will
        be listed, which what nobody knows cannot be.

        Take a portion while no request passes and nothing is staged, until its records are applied. Between two of them
        requests may pass; what they add stays.
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
        """What is missing with damaged buckets and nobody knows, where nobody else is owed it."""
        if index is self.index and subscription_id is not None and self._others(subscription_id):
            return
        stand_ins = departures.stand_ins(index, ranges)
        if stand_ins:
            gone = BitMap64.union(*[keys for keys, _ in stand_ins])
            yield self._trimmed(index, gone, sum(missing_rows for _, missing_rows in stand_ins))

    def _trimmed(
        self, index: Index, gone: BitMap64, rows: int, waived: BitMap64 | None = None, subscription_id: int = 0
    ) -> Departure:
        """What leaves by a trim, which decides of so many rows."""
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
        """The `since_ms` of a subscription that is created now: everything that has been passed is before it."""
        return max(now_ms, self.indexes.passed_until_ms) if self.subscriptions else 0

    def begin_subscription(self, stored: Subscription) -> None:
        """The subscription is about to be in the topic's manifest: what is passed from here on is counted for it.

        What was passed before is owed to the first one only. No other decision is applied before `add_subscription`.
        """
        state = self._new_state(stored)
        if self.subscriptions:
            entitlement.admit(self.index, stored.subscription_id)
        else:
            state.backlog = sum(bucket.passed_rows for bucket in self.index.buckets)
        self._coming = state

    def add_subscription(self) -> SubscriptionState:
        """The subscription that was begun is in the topic's manifest."""
        state = self._coming
        if state is None:
            raise InvariantViolated("a subscription is added that was not begun")
        self._coming = None
        self._serve(state)
        return state

    def _serve(self, state: SubscriptionState) -> None:
        self.subscriptions[state.subscription_id] = self._by_name[state.stored.name] = state

    def subscription(self, name: str) -> SubscriptionState | None:
        """The subscription of that name; None when there is none."""
        return self._by_name.get(name)

    def gone_with_subscription(self, subscription_id: int) -> list[GoneRecord]:
        """The decisions that make gone what only this subscription is owed, to be applied before it is removed."""
        others = self._others(subscription_id)
        return self._gone(entitlement.owed_to_none_of(self.index, others), GoneReason.NO_SUBSCRIPTION)

    def remove_subscription(self, subscription_id: int) -> None:
        """The subscription is no longer in the topic's manifest; its own index is no more."""
        del self._by_name[self.subscriptions.pop(subscription_id).stored.name]
        entitlement.dismiss(self.index, subscription_id)
        self.indexes.remove(subscription_id)

    # ---- due

    def pass_due(self, now_ms: int, limit: int) -> int:
        """Passes about `limit` due rows into the backlogs, and as many of each subscription that are to be redelivered;
        how many. 0 when none is due, or none that is in memory.
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
                self._seek_again(states)
        return rows

    def takes_redeliveries(self, state: SubscriptionState) -> bool:
        """Whether NACKED positions of a subscription may come back now: there is room, and by key no earlier row is due
        that is not passed.
        """
        return state.takes_redeliveries and self.key_sharing.bound(state) is None

    def _redeliver(self, state: SubscriptionState, now_ms: int, limit: int) -> int:
        if self.key_sharing.bound(state) is not None:
            return 0
        times_ms = state.redeliver(now_ms, limit)
        if len(times_ms):
            self._redelivered_at_ms.append(times_ms)
        return len(times_ms)

    def _seek_again(self, states: Iterable[SubscriptionState]) -> None:
        """Late rows may lie behind the readers that seek what was let go."""
        for state in states:
            if state.key_shared is not None and state.key_shared.let_go is not None:
                state.key_shared.let_go.seek_again()

    def take_redelivered(self) -> U64:
        """The redelivery times of what came back since the last call."""
        if not self._redelivered_at_ms:
            return _NO_TIMES
        taken, self._redelivered_at_ms = self._redelivered_at_ms, []
        return np.concatenate(taken)

    def next_redelivery_ms(self) -> int | None:
        """No nacked position comes back before; None when none does, or there is no room for any."""
        first_ms = None
        for state in self.subscriptions.values():
            if state.nacks.rows and self.takes_redeliveries(state):
                first_ms = earliest(first_ms, state.nacks.next_due_ms())
        return first_ms

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

    def _reader(self, state: SubscriptionState, *, at_head: bool) -> BacklogReader:
        indexes = self.indexes.serving(state.subscription_id)
        sealed = [bucket for index in indexes for bucket in index.sealed.values()]
        memory = [bucket for index in indexes for bucket in index.memory_buckets]
        return BacklogReader(sealed, memory, at_head=at_head)

    def open(self, state: SubscriptionState, dispatcher: int) -> None:
        """A dispatcher listens to a subscription."""
        state.open(dispatcher, self._reader(state, at_head=False))

    def catch_up(self, state: SubscriptionState, limit: int) -> list[SegmentRange]:
        """Derives about `limit` READY rows for a subscription that is behind; the segments to load first, if any.

        When there is nothing left to derive the subscription is fed again.
        """
        indexes, bound = self.indexes.serving(state.subscription_id), self.key_sharing.bound(state)
        return feeding.catch_up(indexes, self.indexes.cache, state, limit, bound)

    # ---- seals

    def finish_seal(
        self, index_id: int, memory: MutableBucket, sealed: SealedBucket | None, rows: KeyedRows, *, near_ms: int
    ) -> None:
        """Finishes a seal, as `Index.finish_seal`, and moves readers on to the sealed bucket. Does nothing for an index
        that is no more.
        """
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
        """A bucket every row of which is gone left the manifest. Of an index that is no more: nothing."""
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
        """Puts a merged bucket in the place of its sources, as `Index.adopt`, and moves readers on to it. Returns the
        sources, none for an index that is no more.
        """
        index = self.indexes.get(merged.live.subscription_id)
        if index is None:
            return ()
        sources = index.sources_of(merged)
        bucket = index.adopt(merged, loaded, boundary_ms=boundary_ms)
        for state in self._served_by(index):
            for reader in state.readers:
                reader.merged(sources, bucket)
        return sources

    # ---- the state as of a slot

    def redelivery_cut(self) -> RedeliveryCut:
        """What is beside the rows, as it is now: for a checkpoint or the progress of a seal."""
        levels = tuple(
            (number, level, keys) for number, index in self.indexes.items() for level, keys in index.levels.freeze()
        )
        cuts = (cut_of(state) for state in self.subscriptions.values())
        return RedeliveryCut(tuple(cut for cut in cuts if cut is not None), levels)

    # ---- damage

    def lose_merged(self, live: LiveBucket, sources: Sequence[SealedBucket]) -> None:
        """Quarantines a bucket that was merged from these and never served: its rows leave index and backlogs until
        they are added again. Does nothing for an index that is no more.
        """
        index = self.indexes.get(live.subscription_id)
        if index is not None:
            index.lose_merged(live, sources)
            for bucket in sources:
                self._lost(index, bucket)

    def quarantine(self, live: LiveBucket) -> None:
        """The manifest says that a bucket is damaged: its rows leave index and backlogs until they are added again.

        `live`: the bucket, marked as quarantined. Until it is marked, `Index.leave_out` keeps its rows where they are.
        Of an index that is no more: nothing.
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
            # An add would stand in one slot with the acknowledgement, in any order: until then there is the row.
            index.acknowledging_lost |= state.acknowledging & bucket.present
            owed = bucket.present - bucket.acknowledged.get(state.subscription_id, BitMap64())
            state.drop(owed, backlog_rows=owed.intersection_cardinality(bucket.passed))
            for reader in state.readers:
                reader.dropped(bucket)

    def rebuild_needed(self) -> tuple[RebuildNeeded, ...]:
        """What was lost with damaged buckets and has not been added again, by ledgers."""
        return self.indexes.rebuild_needed()
