"""Decides on the dead letters of a topic: positions that a subscription gave up, until they are replayed or purged.

    a decision -> an id, staged -(its slot is applied)-> in the list -(replay, purge: staged)-> leaving -> a row, or not

This makes and applies the records and assigns ids. `nack_decisions` and trims choose the positions; `ack_decisions` and
`departures` take the rows out of the backlog; `dead_letter_rows` has the lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from daemon.core.backlog.dead_letter_rows import DeadLetterRows
from daemon.core.decisions.departures import Departure
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import bitmap_of, contained, keys_of, pages_of
from storage_backends.formats.index_ids import NO_BATCH_INDEX, batch_parts_of, is_of_batch_parts, of_part, part_entry_id
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.slot_format import DeadLetterReason, DeadLetterRecord, PurgeRecord, Record, ReplayRecord


class DeadLetterDecisions:
    """The dead letters of one topic."""

    def __init__(
        self, topic_id: str, incarnation: int, indexes: Indexes, subscriptions: Mapping[int, SubscriptionState]
    ) -> None:
        self._topic_id = topic_id
        self._incarnation = incarnation
        self._indexes = indexes
        self._subscriptions = subscriptions

    # ---- decisions

    def stage(
        self,
        state: SubscriptionState,
        index_id: int,
        rows: Rows,
        counts: U32,
        *,
        reason: DeadLetterReason,
        text: str,
        now_ms: int,
    ) -> DeadLetterRecord:
        """Make dead letters of positions of an index. `counts` are their redelivery counts."""
        first = state.last_dead_letter_id + 1
        state.last_dead_letter_id += len(rows)
        ids = np.arange(first, first + len(rows), dtype=np.uint64)
        state.dead_letters_coming |= bitmap_of(ids)
        return DeadLetterRecord(
            self._topic_id,
            self._incarnation,
            state.subscription_id,
            index_id,
            rows,
            counts,
            ids,
            np.full(len(rows), now_ms, np.uint64),
            reason,
            text,
        )

    def stage_trimmed(
        self, state: SubscriptionState, departure: Departure, *, now_ms: int
    ) -> Iterator[tuple[Record, ...]]:
        """Make dead letters of what a trim removes from a backlog: the records of one slot, or nothing.

        No row is read, so the dead letters have no time, no key hash and no schedule id.
        """
        keys = keys_of(departure.gone | departure.waived)
        if not len(keys):
            return
        ledger_id, entry_id = departure.pages.positions(keys)
        counts = state.counts.of(keys)
        listed = self.stage(
            state,
            departure.index_id,
            Rows(np.zeros(len(keys), np.uint64), ledger_id, entry_id),
            np.zeros(len(keys), np.uint32) if counts is None else counts,
            reason=DeadLetterReason.TRIMMED,
            text="",
            now_ms=now_ms,
        )
        yield (*departure.records(), listed)

    def stage_replay(
        self, state: SubscriptionState, rows: DeadLetterRows, deliver_at_ms: int
    ) -> tuple[tuple[ReplayRecord, ...], int]:
        """Turn dead letters into rows of the subscription indexes.

        Returns (records to journal in one slot, how many stay because there is a row of their position). Dead letters
        that another staged decision replays or purges are left out.
        """
        rows = rows.take(~contained(rows.dead_letter_id, state.dead_letters_leaving))
        parts = rows.batch_index != NO_BATCH_INDEX
        records: list[ReplayRecord] = []
        for chosen, index_id in ((~parts, state.subscription_id), (parts, batch_parts_of(state.subscription_id))):
            if chosen.any() and (record := self._replay(state, index_id, rows.take(chosen), deliver_at_ms)) is not None:
                records.append(record)
        return tuple(records), len(rows) - sum(record.row_count for record in records)

    def _replay(
        self, state: SubscriptionState, index_id: int, rows: DeadLetterRows, deliver_at_ms: int
    ) -> ReplayRecord | None:
        """Replay the positions that have no row in the index yet. Return None if all have one."""
        index = self._indexes.of(index_id)
        entry_id = part_entry_id(rows.entry_id, rows.batch_index) if index.of_batch_parts else rows.entry_id
        keys = index.pages.intern(rows.ledger_id, entry_id)
        asked = bitmap_of(keys)
        fresh = index.fresh_among(keys, asked)
        places = np.arange(len(rows)) if fresh is None else fresh
        index.staged.add(bitmap_of(keys[places]))
        index.pages.undo(pages_of(asked))
        if not len(places):
            return None
        rows = rows.take(places)
        state.dead_letters_leaving |= bitmap_of(rows.dead_letter_id)
        new = Rows(
            np.full(len(rows), deliver_at_ms, np.uint64),
            rows.ledger_id,
            entry_id[places],
            rows.key_hash if rows.key_hash.any() else None,
            rows.schedule_ids,
        )
        return ReplayRecord(
            self._topic_id, self._incarnation, state.subscription_id, index_id, new, rows.dead_letter_id
        )

    def stage_purge(self, state: SubscriptionState, dead_letter_id: U64) -> PurgeRecord | None:
        """Purge dead letters. Return None if all of them are leaving already."""
        ids = dead_letter_id[~contained(dead_letter_id, state.dead_letters_leaving)]
        if not len(ids):
            return None
        state.dead_letters_leaving |= bitmap_of(ids)
        return PurgeRecord(self._topic_id, self._incarnation, state.subscription_id, ids)

    # ---- applying decisions

    def dead_lettered(self, record: DeadLetterRecord) -> None:
        """Positions are dead letters."""
        state, index = self._subscriptions[record.subscription_id], self._indexes.of(record.index_id)
        rows = record.rows
        # Positions that have no row were staged to get one.
        index.staged.applied(bitmap_of(index.pages.find(rows.ledger_id, rows.entry_id)))
        entry_id, batch_index = rows.entry_id, np.full(len(rows), NO_BATCH_INDEX, np.uint32)
        if is_of_batch_parts(record.index_id):
            entry_id, batch_index = of_part(entry_id)
        state.dead_letters.add(
            DeadLetterRows(
                dead_letter_id=record.dead_letter_id,
                ledger_id=rows.ledger_id,
                entry_id=entry_id,
                batch_index=batch_index,
                deliver_at_ms=rows.deliver_at_ms,
                key_hash=np.zeros(len(rows), np.uint32) if rows.key_hash is None else rows.key_hash,
                redelivery_count=record.redelivery_count,
                dead_at_ms=record.dead_at_ms,
                reason=np.full(len(rows), record.reason, np.uint8),
                text_index=np.full(len(rows), int(bool(record.text)), np.uint32),
                texts=("", record.text) if record.text else ("",),
                schedule_ids=rows.schedule_ids,
            )
        )
        state.dead_letters_coming -= bitmap_of(record.dead_letter_id)
        state.last_dead_letter_id = max(state.last_dead_letter_id, int(record.dead_letter_id.max()))

    def replayed(self, record: ReplayRecord, slot: int, *, elapsed_ms: int) -> None:
        """Turn dead letters into rows."""
        self._indexes.of(record.index_id).add(record.rows, slot, elapsed_ms=elapsed_ms)
        self._left_dead_letters(record)

    def purged(self, record: PurgeRecord) -> None:
        """Forget dead letters."""
        self._left_dead_letters(record)

    def _left_dead_letters(self, record: ReplayRecord | PurgeRecord) -> None:
        state = self._subscriptions[record.subscription_id]
        state.dead_letters.remove(record.dead_letter_id)
        state.dead_letters_leaving -= bitmap_of(record.dead_letter_id)
