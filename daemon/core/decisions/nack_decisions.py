"""Decides on negative acknowledgements, rejections and ack time-outs (PIP-393, Negative Ack Redelivery).

Each position is redelivered later, or becomes a dead letter. `nack_tracker` and `subscription_state` redeliver,
`redelivery_policy` computes delays, and `claims` finds rows of the backlog.

    IN_FLIGHT, READY -(nack)-> staged, held by none -(its slot is applied)-> NACKED -(it is due)-> READY
    NACKED -(nack)-> NACKED at the new time, not counted again: so a request may be repeated
    counted more often than the policy allows, or rejected -> a dead letter: acknowledged, and kept in a list
    counted more often, and the dead letters are full -> NACKED, at the longest delay of the policy

A request names deliveries by their redelivery counts, or any delivery:

    count named    row's count    becomes
    at least it    -              NACKED, one more than was named
    one less       NACKED         NACKED at the new time, not counted: the request is repeated, or a time-out was first
    less           any            ignored: a newer delivery is in flight or will follow

In every case an acknowledgement of the named delivery no longer ends anything. A message of a batch also counts on from
its entry. An entry may have two rows, one in the shared index and one in the subscription index, and a dispatcher that
received either may still acknowledge the whole entry. That ends the messages whose count is no higher.

A position without a row that the subscription is owed may be negatively acknowledged, too. This is a message that the
dispatcher took from its log, or, `forwarded`, one that was acknowledged when it was passed on, and failed later. It
gets a due row in the subscription index; a message of a batch gets one in the index of batch parts.

A request is decided only when no staged negative acknowledgement names its positions, so the decisions of one slot may
be applied in any order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from pyroaring import BitMap64

from daemon.core.backlog.dead_letter_rows import DeadLetterRows
from daemon.core.backlog.in_flight import Places
from daemon.core.backlog.nack_tracker import rounded_up
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.claims import HeldPositions, Ignored, are_owed, matched, why_ignored
from daemon.core.decisions.dead_letter_decisions import DeadLetterDecisions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import entitlement
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes, keys_of_entries
from daemon.core.index.position_keys import UNKNOWN_KEY, KeyedRows, Mask, bitmap_of, contained, keys_of
from daemon.core.key_shared.key_share import KeyShared
from storage_backends.formats.index_ids import batch_parts_of, of_part, part_entry_id
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.formats.slot_format import DeadLetterReason, NackRecord, Record


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackBatch:
    """Distinct positions to acknowledge negatively, n of them.

    `deliver_at_ms` is 0 if Tarry has not delivered a position, or its time is unknown. `delay_ms` is u64[n], or None to
    follow the policy. `key_hash` is u32[n] for positions without a row, or None; likewise `schedule_ids`. With `reject`
    they become dead letters, with `text` as the reason. With `forwarded`, positions that the subscription is no longer
    owed are delivered again.
    """

    positions: HeldPositions
    delay_ms: U64 | None = None
    key_hash: U32 | None = None
    reject: bool = False
    text: str = ""
    forwarded: bool = False
    schedule_ids: ScheduleIds | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def may_get_rows(self) -> Mask:
        """The mask of positions that are redelivered even if no row is owed."""
        if self.forwarded:
            return np.ones(len(self), np.bool_)
        without_time: Mask = self.positions.deliver_at_ms == 0
        return without_time

    @property
    def first_counts(self) -> U32:
        """The count of the new row of each position, including this time."""
        named = self.positions.redelivery_count
        return np.ones(len(self), np.uint32) if named is None else named + np.uint32(1)

    def take(self, chosen: Mask | Places) -> NackBatch:
        return dataclasses.replace(
            self,
            positions=self.positions.take(chosen),
            delay_ms=None if self.delay_ms is None else self.delay_ms[chosen],
            key_hash=None if self.key_hash is None else self.key_hash[chosen],
            schedule_ids=None if self.schedule_ids is None else self.schedule_ids.take(chosen),
        )

    @property
    def how(self) -> _NackOptions:
        return _NackOptions(self.delay_ms, self.reject, self.text)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _NackOptions:
    """The options of a negative acknowledgement: delays, and whether and why the positions become dead letters."""

    delay_ms: U64 | None = None
    reject: bool = False
    text: str = ""

    def take(self, chosen: Mask) -> _NackOptions:
        return self if self.delay_ms is None else dataclasses.replace(self, delay_ms=self.delay_ms[chosen])

    def are_dead(self, counts: U32, terms: RedeliveryTerms, room: int) -> Mask:
        """Return the mask of positions that become dead letters, at most `room` unless they are rejected.

        `counts` include this time.
        """
        if self.reject:
            return np.ones(len(counts), np.bool_)
        dead = terms.are_too_often(counts)
        return dead & (np.cumsum(dead) <= room) if dead.any() else dead


@dataclasses.dataclass(frozen=True, slots=True)
class RedeliveryTerms:
    """The current terms of a subscription's redeliveries.

    `delays` maps counts, including this time, to delays (ms). A count above `max_count` makes a dead letter; None means
    never. `longest_ms` returns the delay of those that the dead letters have no room for. For `precision_bits` see
    `rounded_up`.
    """

    now_ms: int
    delays: Callable[[U32], U64]
    max_count: int | None
    precision_bits: int
    longest_ms: Callable[[], int] = lambda: 0

    def are_too_often(self, counts: U32) -> Mask:
        """Return the mask of counts above `max_count`."""
        if self.max_count is None:
            return np.zeros(len(counts), np.bool_)
        return counts > np.uint32(self.max_count)

    def spared_rows(self, records: Iterable[Record]) -> int:
        """Return how many positions the records make NACKED because the dead letters have no room for them."""
        if self.max_count is None:
            return 0
        nacked = (record.redelivery_count for record in records if isinstance(record, NackRecord))
        return sum(int(np.count_nonzero(self.are_too_often(counts))) for counts in nacked)


class NackDecisions:
    """The negative acknowledgements of one topic."""

    def __init__(
        self,
        topic_id: str,
        incarnation: int,
        indexes: Indexes,
        subscriptions: Mapping[int, SubscriptionState],
        acknowledging: AckDecisions,
        dead_lettering: DeadLetterDecisions,
    ) -> None:
        self._topic_id = topic_id
        self._incarnation = incarnation
        self._indexes = indexes
        self._subscriptions = subscriptions
        self._acknowledging = acknowledging
        self._dead_lettering = dead_lettering

    # ---- negative acknowledgements

    def is_staged(self, state: SubscriptionState, positions: HeldPositions, *, is_forwarded: bool = False) -> bool:
        """Return whether a staged decision conflicts with one of the positions.

        A staged negative acknowledgement conflicts if it names the position, a part of it, or its entry, since counts
        go on from there. So does a part that is staged to get a row, since it would not leave with its entry. With
        `is_forwarded`, a position or entry that is about to leave conflicts, since it gets a new row. One that is about
        to get a row conflicts, too, since it would be delivered again under the name that has failed.
        """
        parts = self._indexes.batch_parts.get(state.subscription_id)
        if parts is not None and parts.staged.keys and parts.staged.keys.intersect(_parts_of(parts, positions)):
            return True
        staged = state.nacking | state.acknowledging if is_forwarded else state.nacking
        if not staged and not is_forwarded:
            return False
        serving = self._indexes.serving(state.subscription_id)
        if not staged and not any(index.staged.keys for index in serving):
            return False
        named = positions.with_entries()
        for index in serving:
            keys = bitmap_of(named.keys_in(index))
            if staged.intersect(keys) or (is_forwarded and index.staged.keys.intersect(keys)):
                return True
            if index.of_batch_parts and state.nacking.intersect(_parts_of(index, positions)):
                return True
        return False

    def check_room(self, state: SubscriptionState, nack: NackBatch) -> None:
        """Check that the positions fit into the limits of the subscription. Raise QuotaExceeded if not.

        Call it before each stage. It counts positions that may yet be ignored, and only those that a decision may give
        a row or make a dead letter.
        """
        if len(nack) <= (state.dead_letter_room if nack.reject else state.own_nacked_room):
            return
        entries, parts = nack.positions.entries(), nack.positions.are_parts()
        owed = are_owed(self._indexes.of_entries(state.subscription_id), state, entries)
        new_parts = self._are_new_parts(state, nack)
        if nack.reject:
            state.check_dead_letters(int(np.count_nonzero(nack.may_get_rows | owed | (parts & ~new_parts))))
        else:
            comes = nack.may_get_rows | owed
            state.check_own_nacked(int(np.count_nonzero((new_parts & comes) | (~parts & nack.may_get_rows & ~owed))))

    def stage(
        self, state: SubscriptionState, nack: NackBatch, terms: RedeliveryTerms
    ) -> tuple[tuple[Record, ...], NackBatch]:
        """Decide what is IN_FLIGHT: (records to journal in one slot, positions that are not IN_FLIGHT)."""
        records: list[Record] = []
        left = nack
        if state.key_shared is not None:
            decided, left = self._decide_planned(state, state.key_shared, left, terms)
            records += decided
        for index in self._indexes.serving(state.subscription_id):
            if not len(left):
                break
            rows, found = _take_in_flight(state, index, left)
            if found.any():
                taken = left.take(found)
                counts = self._next_counts(state, index, rows, taken.positions.redelivery_count)
                records += self._decide(state, index, rows, counts, taken.how, terms)
                left = left.take(~found)
        if left.positions.batch_index is not None:
            entries = left.take(self._are_new_parts(state, left)).positions.entries()
            keys = np.concatenate([keys_in(entries) for keys_in in self._keys_of_entries(state)])
            in_flight = state.in_flight.find(bitmap_of(keys))
            decided, left = self._decide_new_parts(state, left, in_flight, terms)
            records += decided
        return tuple(records), left

    def positions_to_find(self, state: SubscriptionState, left: NackBatch) -> HeldPositions:
        """Return the positions to look for in the backlog: for a message of a batch also its entry."""
        return left.positions.with_entries()

    def stage_found(
        self, state: SubscriptionState, left: NackBatch, found: KeyedRows, terms: RedeliveryTerms
    ) -> tuple[tuple[Record, ...], Ignored]:
        """Decide the rest: (records to journal in one slot, ignored positions).

        `found`: the rows of the backlog that `positions_to_find` names. What the subscription is not owed, and may get
        a row, enters the backlog.
        """
        records: list[Record] = []
        found = state.counted(found)
        for index in self._indexes.serving(state.subscription_id):
            decided, left = self._decide_found(state, index, left, found, terms)
            records += decided
        if left.positions.batch_index is not None:
            decided, left = self._decide_new_parts(state, left, found, terms)
            records += decided
        if len(left):
            entries, indexes = left.positions.entries(), self._indexes.of_entries(state.subscription_id)
            strange = left.may_get_rows & ~are_owed(indexes, state, entries)
            # A message that is being acknowledged still has a row.
            strange &= ~left.positions.are_parts() | self._are_new_parts(state, left)
            if state.key_shared is not None:
                # Planned positions that are left wait for a NACKED one.
                strange &= ~state.key_shared.plans.are_planned(entries.ledger_id, entries.entry_id)
            records += self._decide_unowed(state, left.take(strange), terms)
            left = left.take(~strange)
        indexes = self._indexes.serving(state.subscription_id)
        ignored = why_ignored(indexes, state, left.positions, found, now_ms=terms.now_ms, any_time=True)
        return tuple(records), ignored

    def _decide_found(
        self, state: SubscriptionState, index: Index, left: NackBatch, found: KeyedRows, terms: RedeliveryTerms
    ) -> tuple[list[Record], NackBatch]:
        """Decide rows of an index that are in the backlog, held or not: (records, what is left)."""
        rows, here = matched(left.positions.keys_in(index), left.positions.deliver_at_ms, found, any_time=True)
        if not here.any():
            return [], left
        asked = left.take(here)
        counts, named = rows.counts(), asked.positions.redelivery_count
        repeated = contained(rows.keys, state.nacks.keys & bitmap_of(rows.keys))
        if named is not None:
            state.given_up(rows.keys, named)
            repeated &= named + np.uint32(1) == counts
        after = np.where(repeated, counts, self._next_counts(state, index, rows, named))
        if named is not None:
            meant = repeated | (named >= counts)
            rows, after, asked = rows.take(meant), after[meant], asked.take(meant)
            here[here] = meant
        if not len(rows):
            return [], left
        state.claim(bitmap_of(rows.keys))
        return list(self._decide(state, index, rows, after, asked.how, terms)), left.take(~here)

    def stage_overdue(
        self, state: SubscriptionState, before_ms: int, terms: RedeliveryTerms, *, limit: int
    ) -> tuple[Record, ...]:
        """Acknowledge negatively, by policy, about `limit` positions that are IN_FLIGHT since `before_ms` or earlier.

        Returns the records to journal in one slot. `before_ms` is by a clock that never steps. An entry with a message
        that is staged to get a row stays until that row exists: the message would not become a dead letter with the
        entry. Planned positions, which would get a row, stay unless there is room for all.
        """
        staying = self._entries_of_staged_parts(state)
        if state.key_shared is not None and len(state.key_shared.planned) > state.own_nacked_room:
            staying = staying | state.key_shared.planned.keys
        rows = state.in_flight.take_since(before_ms, limit, staying=staying)
        records: list[Record] = []
        for index, part in self._indexes.parts_of(rows, state.subscription_id):
            records += self._decide(
                state, index, part, part.counts() + np.uint32(1), _NackOptions(), terms, asked_for=False
            )
        if state.key_shared is not None:
            planned = state.key_shared.planned.are_planned(rows.keys)
            if planned.any():
                once = np.ones(int(np.count_nonzero(planned)), np.uint32)
                records += self._decide_plans(
                    state, state.key_shared, rows.rows.take(planned), once, _NackOptions(), terms
                )
        return tuple(records)

    def _entries_of_staged_parts(self, state: SubscriptionState) -> BitMap64:
        index = self._indexes.get(batch_parts_of(state.subscription_id))
        if index is None or not index.staged.keys:
            return BitMap64()
        ledger_id, part_id = index.pages.positions(keys_of(index.staged.keys))
        entry_id, _ = of_part(part_id)
        entries = self._indexes.of_entries(state.subscription_id)
        return bitmap_of(np.concatenate([each.pages.find(ledger_id, entry_id) for each in entries]))

    def extend(
        self, state: SubscriptionState, positions: HeldPositions, holders: Collection[int], *, elapsed_ms: int
    ) -> HeldPositions:
        """Restart the ack time-out of positions that one of the holders has with these times; return the others."""
        in_flight, left = state.in_flight, positions
        for index in self._indexes.serving(state.subscription_id):
            left = left.take(~in_flight.touch(left.keys_in(index), left.deliver_at_ms, holders, elapsed_ms=elapsed_ms))
        if state.key_shared is not None and len(left):
            keys = state.key_shared.planned.find(left.ledger_id, left.entry_id)
            keys[left.are_parts()] = UNKNOWN_KEY
            left = left.take(~in_flight.touch(keys, left.deliver_at_ms, holders, elapsed_ms=elapsed_ms))
        return left

    # ---- one decision

    def _decide(
        self,
        state: SubscriptionState,
        index: Index,
        rows: KeyedRows,
        counts: U32,
        how: _NackOptions,
        terms: RedeliveryTerms,
        *,
        asked_for: bool = True,
    ) -> Iterator[Record]:
        """Decide rows that no dispatcher holds any longer. `counts` include this time.

        `asked_for` is whether their dispatcher asked; otherwise their ack time-out passed.
        """
        if index.of_batch_parts:
            # An entry that becomes a dead letter by the same decision has taken its messages along.
            left = ~contained(rows.keys, state.acknowledging)
            rows, counts, how = rows.take(left), counts[left], how.take(left)
        dead = how.are_dead(counts, terms, state.dead_letter_room)
        if dead.any():
            dying = rows.take(dead)
            state.acknowledging |= bitmap_of(dying.keys)
            yield from self._die(state, index, dying.rows, counts[dead], how, terms)
        if not dead.all():
            stays = rows.take(~dead)
            keys = bitmap_of(stays.keys)
            state.nacking |= keys
            if asked_for:
                state.timeouts.drop(keys)
            else:
                state.timed_out(stays.keys)
            if state.key_shared is not None:
                state.key_shared.nacked(stays)
            yield self._nack(state, index, stays.rows, counts[~dead], how.take(~dead), terms)

    def _decide_new(
        self,
        state: SubscriptionState,
        index_id: int,
        rows: Rows,
        counts: U32,
        how: _NackOptions,
        terms: RedeliveryTerms,
    ) -> Iterator[Record]:
        """Decide positions without a row: those to be redelivered get one. `counts` include this time."""
        index = self._indexes.of(index_id)
        # Stage dead letters, too: a row added in the same slot might leave with them.
        keyed = KeyedRows(rows, index.pages.intern(rows.ledger_id, rows.entry_id))
        keys = bitmap_of(keyed.keys)
        if state.key_shared is not None and not index.of_batch_parts:
            state.key_shared.plans.got_rows(keyed)
        index.staged.add(keys)
        state.nacking |= keys
        dead = how.are_dead(counts, terms, state.dead_letter_room)
        if dead.any():
            yield from self._die(state, index, rows.take(dead), counts[dead], how, terms)
        if not dead.all():
            if state.key_shared is not None:
                state.key_shared.nacked(keyed.take(~dead))
            yield self._nack(state, index, rows.take(~dead), counts[~dead], how.take(~dead), terms, added=True)

    def _nack(
        self,
        state: SubscriptionState,
        index: Index,
        rows: Rows,
        counts: U32,
        how: _NackOptions,
        terms: RedeliveryTerms,
        *,
        added: bool = False,
    ) -> NackRecord:
        if index is not self._indexes.shared:
            state.note_own_nacked(bitmap_of(index.pages.find(rows.ledger_id, rows.entry_id)))
        delay_ms = terms.delays(counts) if how.delay_ms is None else how.delay_ms
        if terms.max_count is not None and (spared := terms.are_too_often(counts)).any():
            delay_ms = np.where(spared, np.maximum(delay_ms, np.uint64(terms.longest_ms())), delay_ms)
        # After the clock stepped back a row may not be due yet by it.
        wanted_ms = np.maximum(delay_ms + np.uint64(terms.now_ms), rows.deliver_at_ms)
        return NackRecord(
            self._topic_id,
            self._incarnation,
            state.subscription_id,
            index.index_id,
            rows,
            rounded_up(wanted_ms, terms.precision_bits),
            counts,
            added,
        )

    def _die(
        self, state: SubscriptionState, index: Index, rows: Rows, counts: U32, how: _NackOptions, terms: RedeliveryTerms
    ) -> Iterator[Record]:
        """Make dead letters of positions; whole entries take their messages along."""
        reason = DeadLetterReason.REJECTED if how.reject else DeadLetterReason.TOO_OFTEN
        yield self._dead_lettering.stage(
            state, index.index_id, rows, counts, reason=reason, text=how.text, now_ms=terms.now_ms
        )
        if not index.of_batch_parts:
            yield from self._acknowledging.end_parts(state, rows.ledger_id, rows.entry_id)

    # ---- messages of batches

    def _next_counts(self, state: SubscriptionState, index: Index, rows: KeyedRows, named: U32 | None) -> U32:
        """Return the counts of rows of an index after this time. `named` are the deliveries in the request."""
        counts = _counted_once_more(rows, named)
        return np.maximum(counts, self._above(state, rows.rows)) if index.of_batch_parts else counts

    def _above(self, state: SubscriptionState, parts: Rows) -> U32:
        """Return for each message the least count above all deliveries of its entry.

        So the acknowledgement of an earlier delivery of the entry does not end the message.
        """
        entry_id, _ = of_part(parts.entry_id)
        above = np.ones(len(parts), np.uint32)
        for index in self._indexes.of_entries(state.subscription_id):
            counts = state.counts.of(index.pages.find(parts.ledger_id, entry_id))
            if counts is not None:
                above = np.maximum(above, counts + np.uint32(1))
        return above

    def _keys_of_entries(self, state: SubscriptionState) -> list[Callable[[HeldPositions], U64]]:
        """Return functions that compute keys of entries: as rows of each index, and as planned positions."""
        indexes = self._indexes.of_entries(state.subscription_id)
        found: list[Callable[[HeldPositions], U64]] = [
            functools.partial(HeldPositions.keys_in, index=index) for index in indexes
        ]
        if state.key_shared is not None:
            planned = state.key_shared.planned
            found.append(lambda entries: planned.find(entries.ledger_id, entries.entry_id))
        return found

    def _are_new_parts(self, state: SubscriptionState, left: NackBatch) -> Mask:
        parts = left.positions.are_parts()
        index = self._indexes.get(batch_parts_of(state.subscription_id))
        if index is not None:
            keys = left.positions.keys_in(index)
            asked = bitmap_of(keys)
            parts &= ~contained(keys, index.present_among(asked) | (index.staged.keys & asked))
        return parts

    def _decide_new_parts(
        self, state: SubscriptionState, left: NackBatch, entries: KeyedRows, terms: RedeliveryTerms
    ) -> tuple[list[Record], NackBatch]:
        """Decide messages without a row, of entries in the backlog: (records, what is left).

        `entries` are rows of the backlog with their counts, including those of the messages' entries. A message counts
        on from its entry.
        """
        records: list[Record] = []
        for keys_in in self._keys_of_entries(state):
            fresh = np.flatnonzero(self._are_new_parts(state, left))
            asked = left.take(fresh)
            times_ms, named = asked.positions.deliver_at_ms, asked.positions.redelivery_count
            rows, here = matched(keys_in(asked.positions.entries()), times_ms, entries, any_time=True)
            if named is not None:
                meant = named[here] >= rows.counts()
                rows, here[here] = rows.take(meant), meant
            if not here.any():
                continue
            chosen = asked.take(here)
            index_id = batch_parts_of(state.subscription_id)
            new = _part_rows(chosen.positions, rows.rows.deliver_at_ms, rows.rows.key_hash, rows.rows.schedule_ids)
            counts = np.maximum(_counted_once_more(rows, chosen.positions.redelivery_count), self._above(state, new))
            records += self._decide_new(state, index_id, new, counts, chosen.how, terms)
            stays = np.ones(len(left), np.bool_)
            stays[fresh[here]] = False
            left = left.take(stays)
        return records, left

    # ---- positions that Tarry has not delivered

    def _decide_unowed(self, state: SubscriptionState, strange: NackBatch, terms: RedeliveryTerms) -> Iterator[Record]:
        parts = strange.positions.are_parts()
        # A delivered position keeps its time, but no new row may be due later than now.
        times_ms = np.minimum(strange.positions.deliver_at_ms, np.uint64(terms.now_ms))
        if not parts.all():
            nack = strange.take(~parts)
            positions = nack.positions
            rows = Rows(times_ms[~parts], positions.ledger_id, positions.entry_id, nack.key_hash, nack.schedule_ids)
            yield from self._decide_ordinary(state, rows, nack.first_counts, nack.how, terms)
        if parts.any():
            nack = strange.take(parts)
            rows = _part_rows(nack.positions, times_ms[parts], nack.key_hash, nack.schedule_ids)
            index_id = batch_parts_of(state.subscription_id)
            yield from self._decide_new(state, index_id, rows, nack.first_counts, nack.how, terms)

    def _decide_ordinary(
        self, state: SubscriptionState, rows: Rows, counts: U32, how: _NackOptions, terms: RedeliveryTerms
    ) -> Iterator[Record]:
        """Give entries a due row in the subscription index. `counts` include this time."""
        yield from self._decide_new(state, state.subscription_id, rows, counts, how, terms)

    def _decide_planned(
        self, state: SubscriptionState, key_shared: KeyShared, nack: NackBatch, terms: RedeliveryTerms
    ) -> tuple[list[Record], NackBatch]:
        """Decide planned positions without a row: (records, what is left)."""
        positions = nack.positions
        planned = (positions.deliver_at_ms == 0) & ~positions.are_parts()
        places = np.flatnonzero(planned)
        if not len(places):
            return [], nack
        taken, key_hash = key_shared.plans.take(positions.ledger_id[places], positions.entry_id[places])
        places, key_hash = places[taken], key_hash[taken]
        if not len(places):
            return [], nack
        named = nack.take(places)
        if named.key_hash is not None:
            key_hash = np.where(key_hash == 0, named.key_hash, key_hash)
        positions = named.positions
        rows = Rows(positions.deliver_at_ms, positions.ledger_id, positions.entry_id, key_hash, named.schedule_ids)
        left = np.ones(len(nack), np.bool_)
        left[places] = False
        decided = self._decide_plans(state, key_shared, rows, named.first_counts, named.how, terms)
        return list(decided), nack.take(left)

    def _decide_plans(
        self,
        state: SubscriptionState,
        key_shared: KeyShared,
        rows: Rows,
        counts: U32,
        how: _NackOptions,
        terms: RedeliveryTerms,
    ) -> Iterator[Record]:
        """Decide planned positions that no dispatcher holds any longer. `counts` include this time.

        Positions that got a row meanwhile are delivered by that row.
        """
        entries = HeldPositions(rows.ledger_id, rows.entry_id, rows.deliver_at_ms)
        owed = are_owed(self._indexes.of_entries(state.subscription_id), state, entries)
        if owed.any():
            key_shared.plans.come_by_rows(rows.ledger_id[owed], rows.entry_id[owed])
            rows, counts, how = rows.take(~owed), counts[~owed], how.take(~owed)
        if len(rows):
            yield from self._decide_ordinary(state, rows, counts, how, terms)

    # ---- applying decisions

    def nacked(self, record: NackRecord, slot: int, *, elapsed_ms: int) -> None:
        """Make positions NACKED, except for those that have left since, as may happen in a replay."""
        state = self._subscriptions[record.subscription_id]
        index = self._indexes.of(record.index_id)
        if record.added:
            index.add_due(record.rows, slot, elapsed_ms=elapsed_ms)
            state.backlog += len(record.rows)
        rows = index.pages.keyed(record.rows)
        named = bitmap_of(rows.keys)
        state.nacking -= named
        if state.key_shared is not None:
            state.key_shared.settle(named)
        times_ms, counts = record.redeliver_at_ms, record.redelivery_count
        there = entitlement.owed_among(index, named, state.subscription_id)
        if index is not self._indexes.shared:
            state.note_own_nacked(there)
        if len(there) < len(rows):
            state.drop_own_nacked(named - there)
            stays = contained(rows.keys, there)
            rows, times_ms, counts = rows.take(stays), times_ms[stays], counts[stays]
        if len(rows):
            state.nacks.add(rows, times_ms)
            state.counts.set(rows.keys, counts)

    # ---- the state as of a slot

    def restore(
        self,
        subscription_id: int,
        nacked: KeyedRows,
        redeliver_at_ms: U64,
        planes: Sequence[BitMap64],
        dead_letters: DeadLetterRows,
        last_dead_letter_id: int,
    ) -> None:
        """Restore a cut, after the rows of the indexes, without rows that the subscription is not owed."""
        state = self._subscriptions[subscription_id]
        named = BitMap64.union(bitmap_of(nacked.keys), *planes)
        owed = BitMap64()
        for index in self._indexes.serving(subscription_id):
            there = entitlement.owed_among(index, named, subscription_id)
            owed |= there
            if index is not self._indexes.shared:
                state.note_own_nacked(there)
        stays = contained(nacked.keys, owed)
        if stays.any():
            state.nacks.add(nacked.take(stays), redeliver_at_ms[stays])
        state.counts.restore([plane & owed for plane in planes])
        if len(dead_letters):
            state.dead_letters.add(dead_letters)
        state.last_dead_letter_id = last_dead_letter_id


def _parts_of(index: Index, entries: HeldPositions) -> BitMap64:
    """Return the possible keys of the messages of those positions that are whole entries."""
    whole = entries if entries.batch_index is None else entries.take(~entries.are_parts())
    return keys_of_entries(index, whole.ledger_id, whole.entry_id)


def _part_rows(
    parts: HeldPositions, deliver_at_ms: U64, key_hash: U32 | None, schedule_ids: ScheduleIds | None
) -> Rows:
    if parts.batch_index is None:
        raise ValueError("positions without batch indexes are no parts")
    entry_id = part_entry_id(parts.entry_id, parts.batch_index)
    return Rows(deliver_at_ms, parts.ledger_id, entry_id, key_hash, schedule_ids)


def _counted_once_more(rows: KeyedRows, named: U32 | None) -> U32:
    """Return one more than the counts of the rows or, if given, of the `named` deliveries."""
    return (rows.counts() if named is None else named) + np.uint32(1)


def _take_in_flight(state: SubscriptionState, index: Index, nack: NackBatch) -> tuple[KeyedRows, Mask]:
    """Remove from IN_FLIGHT the deliveries of an index that a request means: (rows in its order, their mask)."""
    positions = nack.positions
    keys, times_ms = positions.keys_in(index), positions.deliver_at_ms
    without_time = times_ms == 0
    if without_time.any() and len(state.in_flight):
        asked = bitmap_of(keys[without_time])
        if state.in_flight.among(asked):
            rows, here = matched(keys, times_ms, state.in_flight.find(bitmap_of(keys)), any_time=True)
            times_ms = times_ms.copy()
            times_ms[here] = rows.rows.deliver_at_ms
    meant = np.ones(len(keys), np.bool_)
    if positions.redelivery_count is not None:
        counts = state.counts.of(keys)
        if counts is not None:
            meant = positions.redelivery_count >= counts
    if meant.all():
        return state.in_flight.take_rows(keys, times_ms)
    rows, found = state.in_flight.take_rows(keys[meant], times_ms[meant])
    meant[meant] = found
    return rows, meant
