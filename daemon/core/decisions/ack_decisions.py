"""Decides acknowledgements: positions leave the backlog of a subscription, and the index if no other is owed them.

A request names deliveries; this finds the positions that they end, makes the records and applies them. Messages of a
batch leave with their entry. `claims` finds rows that no dispatcher holds; `entitlement` decides which rows are gone
then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from pyroaring import BitMap64

from daemon.core.decisions.claims import NO_CLAIMS, HeldPositions, are_kept_back, are_owed, claimed_in
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import entitlement
from daemon.core.index import indexes as batch_parts
from daemon.core.index.entitlement import NOBODY_ELSE, Entitled
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import KeyedRows, Mask, bitmap_of, contained, keys_of
from daemon.core.key_shared.key_share import KeyShared
from storage_backends.formats.index_ids import SHARED, subscription_of
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, DeadLetterRecord


class AckDecisions:
    """The acknowledgements of one topic."""

    def __init__(
        self, topic_id: str, incarnation: int, indexes: Indexes, subscriptions: Mapping[int, SubscriptionState]
    ) -> None:
        self._topic_id = topic_id
        self._incarnation = incarnation
        self._indexes = indexes
        self._subscriptions = subscriptions

    # ---- requests

    def stage(
        self, state: SubscriptionState, claims: HeldPositions
    ) -> tuple[tuple[AcknowledgeRecord, ...], HeldPositions]:
        """Acknowledge what is IN_FLIGHT with the claimed time and a matching count.

        Returns (records to journal, claims that are not IN_FLIGHT like that). If both indexes have a row of a position,
        the first matching claim is for that of the shared one.
        """
        records: list[AcknowledgeRecord] = []
        for index in self._indexes.serving(state.subscription_id):
            if not len(claims.ledger_id):
                break
            keys = claims.keys_in(index)
            ended = state.are_ended_by(keys, claims.redelivery_count)
            if ended is None:
                found = state.in_flight.take(keys, claims.deliver_at_ms)
            else:
                taken = state.in_flight.take(keys[ended], claims.deliver_at_ms[ended])
                found = ended
                if taken is not None:
                    found[ended] = taken
            if found is None or found.all():
                self._leave(state, index, claims, keys, records)
                return tuple(records), NO_CLAIMS
            if found.any():
                self._leave(state, index, claims.take(found), keys[found], records)
                claims = claims.take(~found)
        if len(claims) and state.key_shared is not None:
            # Planned positions have no row, and nothing to journal except for their messages.
            planned = _planned(state.key_shared, claims)
            if planned.any():
                self._end_parts_of(state, claims.take(planned), records)
                claims = claims.take(~planned)
        if len(claims):
            strange = self._are_strange_with_parts(state, claims)
            if strange.any():
                self._end_parts_of(state, claims.take(strange), records)
                claims = claims.take(~strange)
        return tuple(records), claims

    def stage_found(
        self, state: SubscriptionState, claims: HeldPositions, found: KeyedRows
    ) -> tuple[tuple[AcknowledgeRecord, ...], HeldPositions]:
        """Acknowledge rows of the backlog that `find_in_backlog` found and whose count matches.

        Returns (records to journal, claims that are left).
        """
        kept_back = are_kept_back(state, found)

        def fits(rows: KeyedRows, named: HeldPositions) -> Mask:
            # Messages may be leaving together with an entry that is also named.
            free = ~contained(rows.keys, kept_back | state.acknowledging)
            ended = state.are_ended_by(rows.keys, named.redelivery_count)
            return free if ended is None else free & ended

        records: list[AcknowledgeRecord] = []
        for index in self._indexes.serving(state.subscription_id) if len(found) else ():
            rows, taken, claims = claimed_in(index, claims, found, fits)
            if len(rows):
                state.claim(bitmap_of(rows.keys))
                self._leave(state, index, taken, rows.keys, records)
        return tuple(records), claims

    def _leave(
        self,
        state: SubscriptionState,
        index: Index,
        claims: HeldPositions,
        keys: U64,
        records: list[AcknowledgeRecord],
    ) -> None:
        """Stages claims that are for rows of an index; appends the records to journal."""
        state.acknowledging |= bitmap_of(keys)
        rows = claims.rows_in(index)
        records.append(
            AcknowledgeRecord(self._topic_id, self._incarnation, state.subscription_id, rows, index.index_id)
        )
        if not index.of_batch_parts and state.subscription_id in self._indexes.batch_parts:
            self._end_parts_of(state, claims, records)

    # ---- messages of batches

    def _end_parts_of(self, state: SubscriptionState, entries: HeldPositions, records: list[AcknowledgeRecord]) -> None:
        records += self.end_parts(state, entries.ledger_id, entries.entry_id, entries.redelivery_count)

    def end_parts(
        self, state: SubscriptionState, ledger_id: U64, entry_id: U64, counts: U32 | None = None
    ) -> Iterator[AcknowledgeRecord]:
        """Make the messages of whole entries leave with them.

        `counts` are the deliveries of the entries that end: a message that was negatively acknowledged since stays.
        Without counts all messages leave.
        """
        index = self._indexes.batch_parts.get(state.subscription_id)
        if index is None:
            return
        first_keys = batch_parts.first_keys(index, ledger_id, entry_id)
        parts = index.present_among(batch_parts.keys_from(first_keys)) - state.acknowledging
        if parts and counts is not None:
            parts -= _later(state, parts, first_keys, counts)
        if parts:
            state.claim(parts)
            keys = keys_of(parts)
            state.acknowledging |= parts
            ledger_id, part_id = index.pages.positions(keys)
            rows = Rows(np.zeros(len(keys), np.uint64), ledger_id, part_id)
            yield AcknowledgeRecord(self._topic_id, self._incarnation, state.subscription_id, rows, index.index_id)

    def _are_strange_with_parts(self, state: SubscriptionState, claims: HeldPositions) -> Mask:
        """Return the mask of claims for an entry that Tarry has not delivered and whose messages it knows."""
        index = self._indexes.batch_parts.get(state.subscription_id)
        if index is None:
            return np.zeros(len(claims), np.bool_)
        first_keys = batch_parts.first_keys(index, claims.ledger_id, claims.entry_id)
        parts = index.present_among(batch_parts.keys_from(first_keys)) - state.acknowledging
        strange = np.isin(first_keys, batch_parts.first_keys_of(parts))
        strange &= (claims.deliver_at_ms == 0) & ~claims.are_parts()
        if strange.any():
            strange &= ~are_owed(self._indexes.of_entries(state.subscription_id), state, claims.entries())
        return strange

    # ---- applying decisions

    def acknowledged(self, records: Iterable[AcknowledgeRecord | DeadLetterRecord], slot: int) -> None:
        """Remove positions from the backlog by decisions of one slot. Positions of a removed index are ignored."""
        since_ms = {}
        for number, other in self._subscriptions.items():
            if other.stored.created_slot < slot:
                since_ms[number] = other.stored.since_ms
        entitled = Entitled(since_ms)
        for record in records:
            if record.index_id == SHARED:
                index, owed_to = self._indexes.shared, entitled
            elif subscription_of(record.index_id) in self._subscriptions:
                index, owed_to = self._indexes.of(record.index_id), NOBODY_ELSE
            else:
                continue
            by = record.subscription_id
            if index.quarantined or index.acknowledging_lost:
                with index.named_rows(record.rows) as (rows, keys):
                    passed_rows = entitlement.acknowledge(index, rows, keys, by, owed_to)
            else:
                rows = KeyedRows(record.rows, index.pages.find(record.rows.ledger_id, record.rows.entry_id))
                keys = bitmap_of(rows.keys)
                passed_rows = entitlement.acknowledge(index, rows, keys, by, owed_to)
            state = self._subscriptions.get(by)
            if state is not None:
                state.backlog -= passed_rows
                state.forget(keys)


def _later(state: SubscriptionState, parts: BitMap64, first_keys: U64, counts: U32) -> BitMap64:
    """Return the messages that were negatively acknowledged since their entry was delivered.

    `first_keys` and `counts` are those of the entries.
    """
    keys = keys_of(parts)
    actual = state.counts.of(keys)
    if actual is None:
        return BitMap64()
    order = np.argsort(first_keys, kind="stable")
    places = np.searchsorted(first_keys, batch_parts.first_key_of(keys), sorter=order)
    return bitmap_of(keys[actual > counts[order[places]]])


def _planned(key_shared: KeyShared, claims: HeldPositions) -> Mask:
    """Acknowledge the claims for planned positions; return their mask."""
    planned: Mask = (claims.deliver_at_ms == 0) & ~claims.are_parts()
    if claims.redelivery_count is not None:
        # A planned position was never negatively acknowledged.
        planned &= claims.redelivery_count == 0
    if planned.any():
        planned[planned] = key_shared.plans.acknowledge(claims.ledger_id[planned], claims.entry_id[planned])
    return planned
