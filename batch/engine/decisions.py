"""The decisions that the sections of a shard hold on one topic, sorted by what they are about.

Owns: which decisions still say something (of this incarnation, of indexes and subscriptions that are there), and their
order.
Does not own: what is left when all of them are applied (`replay`), and where the slots come from (`shard_reading`).

An event of an index is one of four kinds: rows were added, positions were removed, a subscription did something to
positions that it is owed, rows were negatively acknowledged. `at` orders them; 0 and 1 are of the stored state.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, assert_never

import numpy as np

from storage_backends.formats import index_ids
from storage_backends.formats.manifest import Subscription, TopicManifest
from storage_backends.formats.position_bitmap import PositionBitmap, positions_of
from storage_backends.formats.record_columns import (
    AcknowledgeRecord,
    AddRecord,
    DeadLetterRecord,
    GoneRecord,
    NackRecord,
    PurgeRecord,
    Record,
    ReplayRecord,
    RescheduleRecord,
    WaiveRecord,
)
from storage_backends.formats.redelivery_columns import DeadLetterColumns
from storage_backends.formats.row_columns import U64, Rows

# Rows of the stored state, and what is stored of them.
STORED_ROWS_AT: Final = 0
STORED_BITS_AT: Final = 1


class Added(NamedTuple):
    at: int
    rows: Rows


class Removed(NamedTuple):
    at: int
    ledger_id: U64
    entry_id: U64


class Settled(NamedTuple):
    """Positions that the subscription `by` is owed no longer. `entitled`: how many of the topic's subscriptions, by
    their creation, were there in that slot. `deliver_at_ms`: of the rows it acknowledged; None: it waived them, which
    makes nothing gone.
    """

    at: int
    entitled: int
    by: int
    ledger_id: U64
    entry_id: U64
    deliver_at_ms: U64 | None


class Nacked(NamedTuple):
    at: int
    by: int
    rows: Rows
    redeliver_at_ms: U64


@dataclasses.dataclass(eq=False, slots=True)
class IndexEvents:
    """What happened to one index, ascending by `at` in each list. `decided`: whether any slot said something of it."""

    index_id: int
    added: list[Added] = dataclasses.field(default_factory=list)
    removed: list[Removed] = dataclasses.field(default_factory=list)
    settled: list[Settled] = dataclasses.field(default_factory=list)
    nacked: list[Nacked] = dataclasses.field(default_factory=list)
    decided: bool = False


class DeadLetterEvents:
    """Dead letters of one subscription: those that came, in the order of their ids, and those that left."""

    def __init__(self) -> None:
        self._came: list[DeadLetterColumns] = []
        self._left: list[U64] = []

    def came(self, letters: DeadLetterColumns) -> None:
        self._came.append(letters)

    def left(self, dead_letter_id: U64) -> None:
        self._left.append(dead_letter_id)

    def remaining(self) -> DeadLetterColumns:
        if not self._came:
            return NO_DEAD_LETTERS
        texts: list[str] = []
        text_index = []
        for each in self._came:
            text_index.append(each.text_index + np.uint32(len(texts)))
            texts += each.texts
        stays: Any = slice(None)
        if self._left:
            ids = np.concatenate([each.dead_letter_id for each in self._came])
            stays = ~np.isin(ids, np.concatenate(self._left))

        def column(name: str) -> Any:
            return np.concatenate([getattr(each, name) for each in self._came])[stays]

        columns = {name: column(name) for name in DeadLetterColumns._fields if name not in ("text_index", "texts")}
        return DeadLetterColumns(**columns, text_index=np.concatenate(text_index)[stays], texts=tuple(texts))


def _no_dead_letters() -> DeadLetterColumns:
    u64, u32 = np.empty(0, np.uint64), np.empty(0, np.uint32)
    return DeadLetterColumns(u64, u64, u64, u32, u64, u32, u32, u64, np.empty(0, np.uint8), u32, ())


NO_DEAD_LETTERS: Final = _no_dead_letters()


class Decisions:
    """What is stored of a topic and what was decided since, by index and by subscription.

    `subscriptions`: those of the manifest, in the order of their creation.
    """

    def __init__(self, tip: TopicManifest) -> None:
        self._incarnation = tip.incarnation
        self.subscriptions: tuple[Subscription, ...] = tuple(
            sorted(tip.subscriptions, key=lambda each: (each.created_slot, each.subscription_id))
        )
        self._created = [each.created_slot for each in self.subscriptions]
        self._ids = {each.subscription_id for each in self.subscriptions}
        self._indexes: dict[int, IndexEvents] = {}
        self.dead_letters = {number: DeadLetterEvents() for number in self._ids}
        self._at = STORED_BITS_AT

    @property
    def indexes(self) -> list[IndexEvents]:
        """The indexes that anything is known of, by their ids."""
        return [self._indexes[index_id] for index_id in sorted(self._indexes)]

    def has_index(self, index_id: int) -> bool:
        """Whether rows of it are owed to anybody: not those of a subscription that is no more."""
        return index_id == index_ids.SHARED or index_ids.subscription_of(index_id) in self._ids

    def is_subscription(self, subscription_id: int) -> bool:
        return subscription_id in self._ids

    def of(self, index_id: int) -> IndexEvents:
        return self._indexes.setdefault(index_id, IndexEvents(index_id))

    def apply(self, slot: int, records: Iterable[Record]) -> None:
        """The records of a slot, in the order in which they are applied."""
        for record in records:
            if record.incarnation == self._incarnation:
                # One record may remove, then add, then be a negative acknowledgement of what it added.
                self._at += 3
                self._apply(record, slot)

    def _apply(self, record: Record, slot: int) -> None:
        match record:
            case AddRecord():
                self._added(record.subscription_id, record.rows)
            case GoneRecord():
                self._removed(record.subscription_id, *positions_of(record.positions))
            case RescheduleRecord():
                self._removed(record.subscription_id, record.rows.ledger_id, record.rows.entry_id)
                self._added(record.subscription_id, record.rows)
            case AcknowledgeRecord():
                self._acknowledged(record, slot)
            case DeadLetterRecord():
                if record.leaves_backlog:
                    self._acknowledged(record, slot)
                if record.subscription_id in self._ids:
                    self.dead_letters[record.subscription_id].came(_dead_letters_of(record))
            case WaiveRecord() if record.subscription_id in self._ids:
                self._waived(record.subscription_id, record.positions, slot)
            case NackRecord() if record.subscription_id in self._ids:
                if record.added:
                    self._added(record.index_id, record.rows)
                events = self._decided(record.index_id)
                events.nacked.append(Nacked(self._at + 2, record.subscription_id, record.rows, record.redeliver_at_ms))
            case ReplayRecord() if record.subscription_id in self._ids:
                self._added(record.index_id, record.rows)
                self.dead_letters[record.subscription_id].left(record.dead_letter_id)
            case PurgeRecord() if record.subscription_id in self._ids:
                self.dead_letters[record.subscription_id].left(record.dead_letter_id)
            case WaiveRecord() | NackRecord() | ReplayRecord() | PurgeRecord():
                # The subscription is no more.
                pass
            case _:
                assert_never(record)

    def _decided(self, index_id: int) -> IndexEvents:
        events = self.of(index_id)
        events.decided = True
        return events

    def _added(self, index_id: int, rows: Rows) -> None:
        if self.has_index(index_id):
            self._decided(index_id).added.append(Added(self._at + 1, rows))

    def _removed(self, index_id: int, ledger_id: U64, entry_id: U64) -> None:
        if self.has_index(index_id):
            self._decided(index_id).removed.append(Removed(self._at, ledger_id, entry_id))

    def _acknowledged(self, record: AcknowledgeRecord | DeadLetterRecord, slot: int) -> None:
        """Notes an acknowledgement: in an own index, which nobody else is owed, the row is gone; in the shared one it
        is settled.
        """
        rows = record.rows
        if record.index_id != index_ids.SHARED:
            self._removed(record.index_id, rows.ledger_id, rows.entry_id)
            return
        self._decided(index_ids.SHARED).settled.append(
            Settled(
                self._at,
                self._entitled(slot),
                record.subscription_id,
                rows.ledger_id,
                rows.entry_id,
                rows.deliver_at_ms,
            )
        )

    def _waived(self, by: int, positions: Iterable[PositionBitmap], slot: int) -> None:
        waived = Settled(self._at, self._entitled(slot), by, *positions_of(positions), None)
        self._decided(index_ids.SHARED).settled.append(waived)

    def _entitled(self, slot: int) -> int:
        """How many subscriptions were created before the slot."""
        return bisect.bisect_left(self._created, slot)


def _dead_letters_of(record: DeadLetterRecord) -> DeadLetterColumns:
    rows = record.rows
    count = len(rows)
    entry_id, batch_index = rows.entry_id, np.full(count, index_ids.NO_BATCH_INDEX, np.uint32)
    if index_ids.is_of_batch_parts(record.index_id):
        entry_id, batch_index = index_ids.of_part(entry_id)
    return DeadLetterColumns(
        dead_letter_id=record.dead_letter_id,
        ledger_id=rows.ledger_id,
        entry_id=entry_id,
        batch_index=batch_index,
        deliver_at_ms=rows.deliver_at_ms,
        key_hash=np.zeros(count, np.uint32) if rows.key_hash is None else rows.key_hash,
        redelivery_count=record.redelivery_count,
        dead_at_ms=record.dead_at_ms,
        reason=np.full(count, record.reason, np.uint8),
        text_index=np.zeros(count, np.uint32),
        texts=(record.text,),
    )
