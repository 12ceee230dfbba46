"""Sorts the decisions on a topic into events of its indexes, and applies all events of an index at once.

An event of an index is one of four kinds: rows were added, positions were removed, a subscription did something to
positions that it is owed, rows were negatively acknowledged. `at` orders them; 0 and 1 belong to the stored state.
Decisions on other incarnations, and on indexes and subscriptions that no longer exist, are ignored.

Events are applied by columns. At most one row of a position is in an index. Therefore a row of a sealed bucket is gone
as soon as any event removes its position, and for a row in no bucket the last event counts that added or removed it. An
event of a subscription counts for the row that existed at that moment. A sealed row existed before all events, so all
of them count for it. For another row only events after its add count. A row leaves when an acknowledgement finds that
every subscription which was created before it has acknowledged the row, or never was owed it.

`topic_reading` alone uses this module, which has no I/O.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from batch.engine.topic_contents import BucketState, NackedRows, UnsealedRows
from storage_backends.formats import index_ids
from storage_backends.formats.manifest import Subscription, TopicManifest
from storage_backends.formats.position_bitmap import (
    NO_POSITIONS,
    PositionSet,
    position_bitmaps,
    positions_of,
)
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
from storage_backends.formats.schedule_ids import ScheduleIds

# Rows of the stored state, and their stored bits
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
    """Positions that the subscription `by` is no longer owed.

    `entitled` is how many of the topic's subscriptions, by their creation, existed in that slot. `deliver_at_ms` holds
    the times of the rows it acknowledged, or is None if it waived them, after which no row is gone.
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
    """The events of one index, ascending by `at` in each list. `decided` says whether any slot decided on it."""

    index_id: int
    added: list[Added] = dataclasses.field(default_factory=list)
    removed: list[Removed] = dataclasses.field(default_factory=list)
    settled: list[Settled] = dataclasses.field(default_factory=list)
    nacked: list[Nacked] = dataclasses.field(default_factory=list)
    decided: bool = False


class DeadLetterEvents:
    """The dead letters of one subscription: those added, in the order of their ids, and those that left."""

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

        apart = ("text_index", "texts", "schedule_ids")
        columns = {name: column(name) for name in DeadLetterColumns._fields if name not in apart}
        schedule_ids = ScheduleIds.concat(
            [each.schedule_ids for each in self._came], [len(each.dead_letter_id) for each in self._came]
        )
        return DeadLetterColumns(
            **columns,
            text_index=np.concatenate(text_index)[stays],
            texts=tuple(texts),
            schedule_ids=None if schedule_ids is None else schedule_ids.take(stays),
        )


def _no_dead_letters() -> DeadLetterColumns:
    u64, u32 = np.empty(0, np.uint64), np.empty(0, np.uint32)
    return DeadLetterColumns(u64, u64, u64, u32, u64, u32, u32, u64, np.empty(0, np.uint8), u32, ())


NO_DEAD_LETTERS: Final = _no_dead_letters()


class Decisions:
    """The stored state of a topic and the decisions since, by index and by subscription.

    `subscriptions` are those of the manifest, in the order of their creation.
    """

    def __init__(self, tip: TopicManifest) -> None:
        self._incarnation = tip.incarnation
        self.subscriptions: tuple[Subscription, ...] = tuple(
            sorted(tip.subscriptions, key=lambda each: (each.created_slot, each.subscription_id))
        )
        # By id, in the order of `subscriptions`
        self._created_slots = {each.subscription_id: each.created_slot for each in self.subscriptions}
        self._created = list(self._created_slots.values())
        self._indexes: dict[int, IndexEvents] = {}
        self.dead_letters = {number: DeadLetterEvents() for number in self._created_slots}
        self._at = STORED_BITS_AT

    @property
    def indexes(self) -> list[IndexEvents]:
        """The indexes with any events, by their ids."""
        return [self._indexes[index_id] for index_id in sorted(self._indexes)]

    def has_index(self, index_id: int) -> bool:
        """Return whether any subscription is owed its rows, which is not so if its own subscription was deleted."""
        return index_id == index_ids.SHARED or index_ids.subscription_of(index_id) in self._created_slots

    def is_subscription(self, subscription_id: int) -> bool:
        return subscription_id in self._created_slots

    def of(self, index_id: int) -> IndexEvents:
        return self._indexes.setdefault(index_id, IndexEvents(index_id))

    def apply(self, slot: int, records: Iterable[Record]) -> None:
        """Apply the records of a slot, in their order."""
        for record in records:
            if record.incarnation == self._incarnation:
                # One record may remove, then add, then be a negative acknowledgement of the rows that it added.
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
                if record.subscription_id in self._created_slots:
                    self.dead_letters[record.subscription_id].came(_dead_letters_of(record))
            case WaiveRecord() if self._created_slots.get(record.subscription_id, slot) < slot:
                positions = positions_of(record.positions)
                waived = Settled(self._at, self._entitled(slot), record.subscription_id, *positions, None)
                self._decided(index_ids.SHARED).settled.append(waived)
            case NackRecord() if record.subscription_id in self._created_slots:
                if record.added:
                    self._added(record.index_id, record.rows)
                events = self._decided(record.index_id)
                events.nacked.append(Nacked(self._at + 2, record.subscription_id, record.rows, record.redeliver_at_ms))
            case ReplayRecord() if record.subscription_id in self._created_slots:
                self._added(record.index_id, record.rows)
                self.dead_letters[record.subscription_id].left(record.dead_letter_id)
            case PurgeRecord() if record.subscription_id in self._created_slots:
                self.dead_letters[record.subscription_id].left(record.dead_letter_id)
            case WaiveRecord() | NackRecord() | ReplayRecord() | PurgeRecord():
                # The subscription was removed, or its creation was never committed.
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
        """Note an acknowledgement.

        In an own index, which no other subscription is owed, the row is gone; in the shared one it is settled.
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

    def _entitled(self, slot: int) -> int:
        """Return how many subscriptions were created before the slot."""
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
        schedule_ids=rows.schedule_ids,
    )


I64 = npt.NDArray[np.int64]
Ids = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_NEVER: Final = np.int64(np.iinfo(np.int64).max)
_BEFORE_ALL: Final = np.int64(-1)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class IndexState:
    """The remaining state of one index.

    `nacked` holds by subscription the rows that its negative acknowledgements still name.
    """

    buckets: tuple[BucketState, ...]
    unsealed: UnsealedRows
    nacked: Mapping[int, NackedRows]


def replayed(
    events: IndexEvents,
    buckets: Sequence[BucketState],
    subscriptions: Sequence[Subscription],
    positions: Callable[[BucketState], PositionSet],
) -> IndexState:
    """Apply all events of an index.

    `buckets` are its live ones as of the first event; `subscriptions` are in the order of their creation. `positions`
    returns those of a bucket, and is called only for buckets whose positions an event may name.
    """
    return _Replay(events, buckets, subscriptions, positions).state()


class _Positions:
    """All positions that events name, each once, by (ledger, entry); the index of a position here is its id."""

    def __init__(self, ledger_id: Sequence[U64], entry_id: Sequence[U64]) -> None:
        every_ledger = np.concatenate([np.empty(0, np.uint64), *ledger_id])
        every_entry = np.concatenate([np.empty(0, np.uint64), *entry_id])
        order = np.lexsort((every_entry, every_ledger))
        ledgers, entries = every_ledger[order], every_entry[order]
        first = np.ones(len(order), np.bool_)
        first[1:] = (ledgers[1:] != ledgers[:-1]) | (entries[1:] != entries[:-1])
        self._ids = np.empty(len(order), np.intp)
        self._ids[order] = np.cumsum(first) - 1
        self._ends = np.cumsum([0, *map(len, ledger_id)])
        self.ledger_id, self.entry_id = ledgers[first], entries[first]

    def __len__(self) -> int:
        return len(self.ledger_id)

    def ids(self, column: int) -> Ids:
        """Return the ids of the positions of one of the columns that it was made of."""
        return self._ids[self._ends[column] : self._ends[column + 1]]

    def between(self, first_ledger_id: int, last_ledger_id: int) -> slice:
        """Return the ids of the positions of a range of ledgers."""
        first = np.searchsorted(self.ledger_id, np.uint64(first_ledger_id))
        end = np.searchsorted(self.ledger_id, np.uint64(last_ledger_id), side="right")
        return slice(int(first), int(end))

    def as_set(self, chosen: Mask) -> PositionSet:
        if not chosen.any():
            return NO_POSITIONS
        return PositionSet.of(position_bitmaps(self.ledger_id[chosen], self.entry_id[chosen]))


class _Replay:
    def __init__(
        self,
        events: IndexEvents,
        buckets: Sequence[BucketState],
        subscriptions: Sequence[Subscription],
        positions: Callable[[BucketState], PositionSet],
    ) -> None:
        self._events = events
        self._buckets = buckets
        # A row that is acknowledged in a subscription's own index is gone.
        self._subscriptions = subscriptions if events.index_id == index_ids.SHARED else ()
        self._positions_of = positions
        self._known = _Positions(*zip(*self._columns(), strict=True)) if any(self._columns()) else _Positions((), ())
        self._ids = map(self._known.ids, range(sum(1 for _ in self._columns())))
        self._added = [(each, next(self._ids)) for each in events.added]
        self._removed = [(each, next(self._ids)) for each in events.removed]
        self._settled = [(each, next(self._ids)) for each in events.settled]
        self._nacked = [(each, next(self._ids)) for each in events.nacked]

    def _columns(self) -> Iterator[tuple[U64, U64]]:
        events = self._events
        yield from ((each.rows.ledger_id, each.rows.entry_id) for each in events.added)
        yield from ((each.ledger_id, each.entry_id) for each in events.removed)
        yield from ((each.ledger_id, each.entry_id) for each in events.settled)
        yield from ((each.rows.ledger_id, each.rows.entry_id) for each in events.nacked)

    def state(self) -> IndexState:
        count = len(self._known)
        removed_at = np.full(count, _BEFORE_ALL)
        for removed, ids in self._removed:
            removed_at[ids] = removed.at
        added_at, row = np.full(count, _BEFORE_ALL), np.zeros(count, np.intp)
        rows_before = 0
        for added, ids in self._added:
            added_at[ids] = added.at
            row[ids] = np.arange(rows_before, rows_before + len(ids))
            rows_before += len(ids)

        holder = self._holders()
        sealed = np.where(holder >= 0, _BEFORE_ALL, _NEVER)
        acknowledged_sealed = self._stored_acknowledgements(holder)
        gone = self._everybody_done(sealed, acknowledged_sealed) | (removed_at >= 0)
        sealed_born = np.where(gone, _NEVER, sealed)

        loose_born = np.where(added_at > removed_at, added_at, _NEVER)
        acknowledged_loose = {number: np.zeros(count, np.bool_) for number in acknowledged_sealed}
        loose_born[self._everybody_done(loose_born, acknowledged_loose)] = _NEVER
        loose = loose_born < _NEVER

        acknowledged = {
            number: np.where(loose, acknowledged_loose[number], acknowledged_sealed[number])
            for number in acknowledged_sealed
        }
        all_rows = Rows.concat([added.rows for added, _ in self._added])
        unsealed = UnsealedRows(
            self._events.index_id,
            all_rows.take(row[loose]).sorted_by_due(),
            _sets({number: self._known.as_set(loose & mask) for number, mask in acknowledged_loose.items()}),
        )
        born = np.where(loose, loose_born, sealed_born)
        return IndexState(
            tuple(self._bucket(number, holder, gone, acknowledged_sealed) for number in range(len(self._buckets))),
            unsealed,
            self._still_nacked(born, acknowledged),
        )

    # ---- sealed buckets

    def _holders(self) -> npt.NDArray[np.intp]:
        """Return by position the number of the sealed bucket that holds a row which events may remove, or -1."""
        holder = np.full(len(self._known), -1, np.intp)
        named = np.zeros(len(self._known), np.bool_)
        for _, ids in (*self._removed, *self._settled, *self._nacked):
            named[ids] = True
        for number, bucket in enumerate(self._buckets):
            live = bucket.live
            here = self._known.between(live.first_ledger_id, live.last_ledger_id)
            if live.quarantined or not bucket.present_rows or not named[here].any():
                continue
            ledger_id, entry_id = self._known.ledger_id[here], self._known.entry_id[here]
            held = named[here] & self._positions_of(bucket).mask_of(ledger_id, entry_id)
            held &= ~bucket.gone.mask_of(ledger_id, entry_id)
            holder[here][held] = number
        return holder

    def _stored_acknowledgements(self, holder: npt.NDArray[np.intp]) -> dict[int, Mask]:
        """Return by subscription a mask of the positions that it had acknowledged before the first event.

        Only positions of rows in sealed buckets count.
        """
        acknowledged = {each.subscription_id: np.zeros(len(self._known), np.bool_) for each in self._subscriptions}
        for number, bucket in enumerate(self._buckets):
            live = bucket.live
            here = self._known.between(live.first_ledger_id, live.last_ledger_id)
            held = holder[here] == number
            if not held.any():
                continue
            for subscription_id, positions in bucket.acknowledged.items():
                if subscription_id in acknowledged:
                    mask = positions.mask_of(self._known.ledger_id[here], self._known.entry_id[here])
                    acknowledged[subscription_id][here] |= mask & held
        return acknowledged

    def _bucket(
        self, number: int, holder: npt.NDArray[np.intp], gone: Mask, acknowledged: Mapping[int, Mask]
    ) -> BucketState:
        bucket = self._buckets[number]
        held = holder == number
        if not held.any():
            return bucket
        left = bucket.gone | self._known.as_set(held & gone)
        done = {
            subscription_id: bucket.acknowledged.get(subscription_id, NO_POSITIONS) | self._known.as_set(held & mask)
            for subscription_id, mask in acknowledged.items()
        }
        return BucketState(bucket.live, left, _sets({each: done[each] - left for each in done}))

    # ---- events of subscriptions

    def _everybody_done(self, born: I64, acknowledged: Mapping[int, Mask]) -> Mask:
        """Return a mask of the rows that leave because no subscription is owed them any longer.

        `born` is when each was added, or _NEVER without a row. The acknowledgements of the subscriptions are added to
        `acknowledged`.
        """
        gone = np.zeros(len(born), np.bool_)
        asked = np.zeros(len(born), np.bool_)
        entitled = 0

        def leave() -> None:
            everyone = asked.copy()
            for each in self._subscriptions[:entitled]:
                everyone &= acknowledged[each.subscription_id]
            np.logical_or(gone, everyone, out=gone)

        for settled, ids in self._settled:
            if settled.entitled != entitled:
                # Earlier acknowledgements did not wait for subscriptions that were created then.
                leave()
                asked[:] = False
                entitled = settled.entitled
            meant = born[ids] < settled.at
            if settled.deliver_at_ms is not None:
                asked[ids[meant]] = True
            for each in self._subscriptions if settled.deliver_at_ms is None else self._subscriptions[:entitled]:
                done = ids[meant & _no_longer_owed(settled, each)]
                acknowledged[each.subscription_id][done] = True
        leave()
        return gone

    def _still_nacked(self, born: I64, acknowledged: Mapping[int, Mask]) -> dict[int, NackedRows]:
        """Return by subscription the last negative acknowledgement of each row that it is still owed."""
        found = {}
        for by in sorted({nacked.by for nacked, _ in self._nacked}):
            own = [(nacked, ids) for nacked, ids in self._nacked if nacked.by == by]
            at, place = np.full(len(born), _BEFORE_ALL), np.zeros(len(born), np.intp)
            rows_before = 0
            for nacked, ids in own:
                at[ids] = nacked.at
                place[ids] = np.arange(rows_before, rows_before + len(ids))
                rows_before += len(ids)
            counts = at > born
            if by in acknowledged:
                counts &= ~acknowledged[by]
            chosen = place[counts]
            if len(chosen):
                rows = Rows.concat([nacked.rows for nacked, _ in own]).take(chosen)
                times = np.concatenate([nacked.redeliver_at_ms for nacked, _ in own])[chosen]
                found[by] = NackedRows(self._events.index_id, rows, times)
        return found


def _no_longer_owed(settled: Settled, subscription: Subscription) -> Mask:
    """Return a mask of the positions that the subscription is no longer owed because of that event."""
    if subscription.subscription_id == settled.by:
        return np.ones(len(settled.ledger_id), np.bool_)
    if settled.deliver_at_ms is None:
        return np.zeros(len(settled.ledger_id), np.bool_)
    return settled.deliver_at_ms <= np.uint64(subscription.since_ms)


def _sets(sets: Mapping[int, PositionSet]) -> dict[int, PositionSet]:
    return {number: positions for number, positions in sets.items() if positions}
