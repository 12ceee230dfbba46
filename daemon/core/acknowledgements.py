"""Acknowledgements: positions leave the backlog of a subscription, and the index when nobody else is owed them.

Owns: which positions of a request are acknowledged, the records that say so, and applying them; that the messages of a
batch leave with their entry.
Does not own: what dispatchers hold (`in_flight`), finding rows that are in no hand (`claims`), and which rows are gone
then (`entitlement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from daemon.core import batch_parts, entitlement
from daemon.core.claims import HeldPositions, are_owed
from daemon.core.in_flight import Mask
from daemon.core.index import Index
from daemon.core.indexes import Indexes
from daemon.core.key_shared.key_share import KeyShared
from daemon.core.positions import KeyedRows, bitmap_of, keys_of
from daemon.core.subscription_state import SubscriptionState
from storage_backends.formats.index_ids import SHARED, batch_parts_of, subscription_of
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, DeadLetterRecord


class Acknowledging:
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
        """Acknowledges what is IN_FLIGHT with that time: (the records to journal, the claims that are not IN_FLIGHT).

        Where both indexes have a row of a position the first claim is for that of the shared one.
        """
        records: list[AcknowledgeRecord] = []
        for index in self._indexes.serving(state.subscription_id):
            if not len(claims):
                break
            keys = claims.keys_in(index)
            found = state.in_flight.take(keys, claims.deliver_at_ms)
            if found.any():
                taken, keys = (claims, keys) if found.all() else (claims.take(found), keys[found])
                records += self._leave(state, index, taken.rows_in(index), keys)
                claims = claims.take(~found)
        if len(claims) and state.key_shared is not None:
            # They have no row, and nothing to journal, but for messages of theirs.
            planned = _planned(state.key_shared, claims)
            if planned.any():
                entries = claims.take(planned)
                records += self.end_parts(state, entries.ledger_id, entries.entry_id)
                claims = claims.take(~planned)
        if len(claims):
            strange = self._are_strange_with_parts(state, claims)
            if strange.any():
                entries = claims.take(strange)
                records += self.end_parts(state, entries.ledger_id, entries.entry_id)
                claims = claims.take(~strange)
        return tuple(records), claims

    def stage_found(self, state: SubscriptionState, found: KeyedRows) -> tuple[AcknowledgeRecord, ...]:
        """Acknowledges rows of the backlog that `find_in_backlog` found."""
        if not len(found):
            return ()
        state.claim(bitmap_of(found.keys))
        records: list[AcknowledgeRecord] = []
        for index, part in self._indexes.parts_of(found, state.subscription_id):
            rows = Rows(part.rows.deliver_at_ms, part.rows.ledger_id, part.rows.entry_id)
            records += self._leave(state, index, rows, part.keys)
        return tuple(records)

    def _leave(self, state: SubscriptionState, index: Index, rows: Rows, keys: U64) -> Iterator[AcknowledgeRecord]:
        state.acknowledging |= bitmap_of(keys)
        yield AcknowledgeRecord(self._topic_id, self._incarnation, state.subscription_id, rows, index.index_id)
        if not index.of_batch_parts:
            yield from self.end_parts(state, rows.ledger_id, rows.entry_id)

    # ---- messages of batches

    def end_parts(self, state: SubscriptionState, ledger_id: U64, entry_id: U64) -> Iterator[AcknowledgeRecord]:
        """Entries leave as a whole: their parts leave with them."""
        index = self._indexes.get(batch_parts_of(state.subscription_id))
        if index is None:
            return
        parts = index.present_among(batch_parts.keys_of_entries(index, ledger_id, entry_id)) - state.acknowledging
        if parts:
            state.claim(parts)
            keys = keys_of(parts)
            ledger_id, entry_id = index.pages.positions(keys)
            yield from self._leave(state, index, Rows(np.zeros(len(keys), np.uint64), ledger_id, entry_id), keys)

    def _are_strange_with_parts(self, state: SubscriptionState, claims: HeldPositions) -> Mask:
        """Which of the claims are for an entry that Tarry has not handed out, and of which it knows parts."""
        index = self._indexes.get(batch_parts_of(state.subscription_id))
        if index is None:
            return np.zeros(len(claims), np.bool_)
        first_keys = batch_parts.first_keys(index, claims.ledger_id, claims.entry_id)
        parts = index.present_among(batch_parts.keys_from(first_keys)) - state.acknowledging
        strange = np.isin(first_keys, batch_parts.first_keys_of(parts))
        strange &= (claims.deliver_at_ms == 0) & ~claims.are_parts()
        if strange.any():
            strange &= ~are_owed(self._indexes.of_entries(state.subscription_id), state, claims.entries())
        return strange

    # ---- decisions are applied

    def acknowledged(self, record: AcknowledgeRecord | DeadLetterRecord, slot: int) -> None:
        """Positions leave the backlog; those of an index that is no more are not there."""
        if record.index_id != SHARED and subscription_of(record.index_id) not in self._subscriptions:
            return
        index = self._indexes.of(record.index_id)
        entitled = {
            number: other.stored.since_ms
            for number, other in self._subscriptions.items()
            if index is self._indexes.shared and other.stored.created_slot < slot
        }
        with index.named_rows(record.rows) as (rows, keys):
            passed_rows = entitlement.acknowledge(index, rows, keys, record.subscription_id, entitled)
            state = self._subscriptions.get(record.subscription_id)
            if state is not None:
                state.backlog -= passed_rows
                state.forget(keys)


def _planned(key_shared: KeyShared, claims: HeldPositions) -> Mask:
    """Acknowledges those of the claims that are for planned positions; which they are."""
    planned: Mask = (claims.deliver_at_ms == 0) & ~claims.are_parts()
    if planned.any():
        planned[planned] = key_shared.plans.acknowledge(claims.ledger_id[planned], claims.entry_id[planned])
    return planned
