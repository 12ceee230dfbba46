"""A topic of the engine that is all in memory: its rows, who is owed them and who holds them.

Rows are Python objects, buckets lists of positions. What waits and when is `fake_engine`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from daemon import call_values
from daemon.core.index.containment import Contained, EntryRanges
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy, TopicPolicy

if TYPE_CHECKING:
    from tests._support.fake_stream import FakeDispatchStream

EPOCH = 7
# Rows of an answer to `contains`.
CONTAINED_MAX = 1000

# Of one message of a batch also its batch index.
Position = tuple[int, ...]
# deliver_at_ms and the position: the order of hand-out.
Row = tuple[int, ...]


class Lease:
    """Holds positions until its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """`reason`: 1 too often, 2 rejected, 3 trimmed."""

    row: Row
    redelivery_count: int
    dead_at_ms: int
    reason: int
    text: str = ""
    key_hash: int = 0
    batch_index: int = NO_BATCH_INDEX


@dataclasses.dataclass
class Subscription:
    """`acknowledged`: rows that left the backlog for good. `own`: deliver_at_ms and key_hash of the rows of its own
    index by position. `parts`: messages of batches that are rows of their own. `nacked`: when rows come back.
    """

    subscription_id: int
    since_ms: int
    policy: SubscriptionPolicy
    properties: NamedValues
    acknowledged: set[Row] = dataclasses.field(default_factory=set)
    own: dict[Position, tuple[int, int]] = dataclasses.field(default_factory=dict)
    in_flight: dict[Position, FakeDispatchStream | Lease] = dataclasses.field(default_factory=dict)
    streams: list[FakeDispatchStream] = dataclasses.field(default_factory=list)
    pullers: set[asyncio.Event] = dataclasses.field(default_factory=set)
    parts: set[Row] = dataclasses.field(default_factory=set)
    nacked: dict[Row, int] = dataclasses.field(default_factory=dict)
    counts: dict[Row, int] = dataclasses.field(default_factory=dict)
    dead_letters: dict[int, DeadLetter] = dataclasses.field(default_factory=dict)
    last_dead_letter_id: int = 0

    def bury(self, letter: DeadLetter) -> None:
        """A position becomes a dead letter."""
        self.last_dead_letter_id += 1
        self.dead_letters[self.last_dead_letter_id] = letter
        part = () if letter.batch_index == NO_BATCH_INDEX else (letter.batch_index,)
        self.acknowledge([(*letter.row, *part)])

    def replay(self, number: int, deliver_at_ms: int) -> bool:
        """A dead letter becomes a row of its own index; whether it may."""
        letter = self.dead_letters[number]
        position = letter.row[1:]
        if letter.batch_index != NO_BATCH_INDEX:
            part = (deliver_at_ms, *position, letter.batch_index)
            if any(each[1:] == part[1:] for each in self.parts):
                return False
            self.parts.add(part)
            self.acknowledged.discard(part)
        else:
            if position in self.own and (self.own[position][0], *position) not in self.acknowledged:
                return False
            self.own[position] = (deliver_at_ms, letter.key_hash)
            self.acknowledged.discard((deliver_at_ms, *position))
        del self.dead_letters[number]
        return True

    def owes(self, row: Row) -> bool:
        return self.since_ms < row[0] and row not in self.acknowledged

    def acknowledge(self, rows: Iterable[Row]) -> None:
        """With an entry as a whole its messages leave."""
        for row in rows:
            for each in [row, *(part for part in self.parts if part[:-1] == row)]:
                self.acknowledged.add(each)
                self.parts.discard(each)
                self.in_flight.pop(each[1:], None)
                self.nacked.pop(each, None)
                self.counts.pop(each, None)

    def enter(self, row: Row, backlog: set[Row], key_hash: int) -> bool:
        """A row that is negatively acknowledged is in the backlog, if need be as one of its own; whether it may be."""
        if row in backlog:
            return True
        entry = row[:3]
        if entry not in backlog:
            if row[0] or any(each[1:3] == row[1:3] for each in backlog):
                return False
            if len(row) == 3:
                self.own[row[1:]] = (0, key_hash)
        if len(row) > 3:
            self.parts.add(row)
            if entry in self.counts:
                self.counts[row] = self.counts[entry]
        self.acknowledged.discard(row)
        return True

    def nack(self, row: Row, redeliver_at_ms: int, now_ms: int) -> bool:
        """Whether that was too often."""
        count = self.counts.get(row, 0)
        count += self.nacked.get(row, 0) <= now_ms
        self.counts[row] = count
        self.in_flight.pop(row[1:], None)
        most = self.policy.max_redeliver_count
        self.nacked[row] = redeliver_at_ms
        return most is not None and count > most

    def release(self, holder: object) -> None:
        for position in [position for position, each in self.in_flight.items() if each is holder]:
            del self.in_flight[position]

    def wake(self) -> None:
        for changed in (*self.pullers, *(stream.changed for stream in self.streams)):
            changed.set()


@dataclasses.dataclass
class Topic:
    """`rows`: deliver_at_ms and key_hash by position."""

    rows: dict[Position, tuple[int, int]] = dataclasses.field(default_factory=dict)
    subscriptions: dict[str, Subscription] = dataclasses.field(default_factory=dict)
    policy: TopicPolicy = dataclasses.field(default_factory=TopicPolicy)
    buckets: dict[str, frozenset[Position]] = dataclasses.field(default_factory=dict)
    incarnation: int = 1

    def in_order(self) -> list[Row]:
        return sorted((due, *position) for position, (due, _) in self.rows.items())

    def backlog(self, subscription: Subscription, now_ms: int) -> list[Row]:
        """What is due and not acknowledged."""
        owed = [row for row in self.in_order() if row[0] <= now_ms and subscription.owes(row)]
        own = [(due, *position) for position, (due, _) in subscription.own.items() if due <= now_ms]
        return sorted({*owed, *own, *subscription.parts} - subscription.acknowledged)

    def key_hash(self, position: Position) -> int:
        tables = (self.rows, *(each.own for each in self.subscriptions.values()))
        return next((table[position[:2]][1] for table in tables if position[:2] in table), 0)

    def tables(self, subscription: Subscription | None) -> list[dict[Position, tuple[int, int]]]:
        """The indexes that a request to cancel or to reschedule is about."""
        if subscription is not None:
            return [subscription.own]
        return [self.rows, *(each.own for each in self.subscriptions.values())]

    def withdraw(
        self, subscription: Subscription | None, positions: list[Position], now_ms: int
    ) -> tuple[list[list[dict[Position, tuple[int, int]]]], dict[str, list[int]]]:
        """By position the indexes in which it waits, none where it may not leave; the rows that stay, by why."""
        found: list[list[dict[Position, tuple[int, int]]]] = []
        refused: dict[str, list[int]] = {"not_found": [], "already_due": [], "in_flight": []}
        for number, position in enumerate(positions):
            there = [table for table in self.tables(subscription) if position in table]
            due = any(table[position][0] <= now_ms for table in there)
            held = any(position in each.in_flight for each in self.subscriptions.values())
            if there and not due:
                found.append(there)
                continue
            found.append([])
            refused["not_found" if not there else "in_flight" if held else "already_due"].append(number)
        return found, refused

    def scheduled(self, subscription: str | None, now_ms: int) -> list[tuple[int, ...]]:
        """What is not due yet, of all indexes or owed to one subscription; the last is the own index it is in."""
        own = self.subscriptions.values() if subscription is None else (self.subscriptions[subscription],)
        shared: list[tuple[int, ...]] = [
            (*row, 0)
            for row in self.in_order()
            if row[0] > now_ms and (subscription is None or self.subscriptions[subscription].owes(row))
        ]
        return shared + [
            (due, *position, each.subscription_id)
            for each in own
            for position, (due, _) in each.own.items()
            if due > now_ms
        ]

    def name_of(self, subscription_id: int) -> str:
        """Empty for the shared index."""
        names = (name for name, each in self.subscriptions.items() if each.subscription_id == subscription_id)
        return next(names, "")

    def take(
        self, subscription: Subscription, holder: FakeDispatchStream | Lease, limit: int, now_ms: int
    ) -> list[Row]:
        """What is handed out now."""
        backlog = self.backlog(subscription, now_ms)
        ready = [row for row in backlog if row[1:] not in subscription.in_flight]
        ready = [row for row in ready if subscription.nacked.get(row, 0) <= now_ms][:limit]
        for row in ready:
            subscription.nacked.pop(row, None)
        subscription.in_flight.update({row[1:]: holder for row in ready})
        return ready

    def owed(self, row: Row) -> bool:
        return not self.subscriptions or any(each.owes(row) for each in self.subscriptions.values())

    def pending(self, now_ms: int) -> int:
        return sum(due > now_ms for due, _ in self.rows.values())

    def due(self, now_ms: int) -> int:
        return len(self.rows) - self.pending(now_ms)

    def next_due_ms(self, now_ms: int) -> int:
        nacked = (due for each in self.subscriptions.values() for due in each.nacked.values())
        return min((due for due in (*nacked, *(due for due, _ in self.rows.values())) if due > now_ms), default=0)

    @property
    def mutable(self) -> frozenset[Position]:
        return frozenset(self.rows).difference(*self.buckets.values())

    def contains(self, asked: EntryRanges, owed: Callable[[Row], bool], now_ms: int) -> Contained:
        pending: list[Row] = []
        due: list[Row] = []
        rows = 0
        columns = (asked.ledger_id.tolist(), asked.first_entry_id.tolist(), asked.last_entry_id.tolist())
        for index, (ledger_id, first, last) in enumerate(zip(*columns, strict=True)):
            for position in sorted(each for each in self.rows if each[0] == ledger_id and first <= each[1] <= last):
                deliver_at_ms, _ = self.rows[position]
                if not owed((deliver_at_ms, *position)):
                    continue
                rows += 1
                if rows > CONTAINED_MAX:
                    return Contained(_ranges(pending), _ranges(due), (index, position[1]))
                _extend(pending if deliver_at_ms > now_ms else due, position, first)
        return Contained(_ranges(pending), _ranges(due), None)

    def drop(self, subscription: Subscription | None, chosen: Callable[[Position], bool]) -> int:
        """For the whole topic, or what one subscription is owed."""
        rows = [row for row in self.in_order() if chosen(row[1:]) and (subscription is None or subscription.owes(row))]
        if subscription is not None:
            subscription.acknowledge(rows)
        else:
            for row in rows:
                del self.rows[row[1:]]
        return len(rows)

    def dead_letter(self, subscription: Subscription, chosen: Callable[[Position], bool], now_ms: int) -> int:
        """What one subscription is owed becomes dead letters."""
        rows = [row for row in self.in_order() if chosen(row[1:]) and subscription.owes(row)]
        for row in rows:
            count = subscription.counts.get(row, 0)
            subscription.bury(DeadLetter(row=row, redelivery_count=count, dead_at_ms=now_ms, reason=3))
        return len(rows)

    def lowest_entries(self) -> dict[int, int]:
        """By ledger the lowest entry that has a row."""
        lowest: dict[int, int] = {}
        for table in self.tables(None):
            for ledger_id, entry_id, *_ in table:
                lowest[ledger_id] = min(entry_id, lowest.get(ledger_id, entry_id))
        return lowest

    def bucket(self, name: str, now_ms: int) -> call_values.BucketSummary:
        positions = self.buckets[name]
        times = [self.rows[position][0] for position in positions if position in self.rows]
        pending = sum(due > now_ms for due in times)
        ledgers = [ledger_id for ledger_id, _ in positions]
        return call_values.BucketSummary(
            bucket=name,
            size_bytes=100,
            rows=len(positions),
            pending=pending,
            due=len(times) - pending,
            first_ledger_id=min(ledgers),
            last_ledger_id=max(ledgers),
            min_deliver_at_ms=min(times, default=0),
            max_deliver_at_ms=max(times, default=0),
            segments=1,
            segments_loaded=0,
            level=0,
            compatible_form=bool(self.policy.compatible_form),
            quarantined=False,
            damage="",
            subscription="",
        )

    def stats(self, name: str, now_ms: int) -> call_values.SubscriptionStats:
        known = self.subscriptions[name]
        return call_values.SubscriptionStats(
            subscription=name,
            subscription_id=known.subscription_id,
            since_ms=known.since_ms,
            backlog=len(self.backlog(known, now_ms)),
            in_flight=len(known.in_flight),
            dispatchers=len(known.streams),
            permits=sum(stream.permits for stream in known.streams),
            leased=sum(isinstance(holder, Lease) for holder in known.in_flight.values()),
            policy=known.policy,
            own_pending=sum(due > now_ms for due, _ in known.own.values()),
            nacked=len(known.nacked),
            next_redelivery_ms=min(known.nacked.values(), default=0),
            dead_letters=len(known.dead_letters),
            properties=known.properties,
        )


def _extend(ranges: list[Row], position: Position, first_entry_id: int) -> None:
    """Neighbours within one range of the request are one range."""
    ledger_id, entry_id = position
    if ranges and ranges[-1][0] == ledger_id and first_entry_id <= ranges[-1][2] == entry_id - 1:
        ranges[-1] = (*ranges[-1][:2], entry_id)
    else:
        ranges.append((ledger_id, entry_id, entry_id))


def _ranges(ranges: list[Row]) -> EntryRanges:
    ledger_id, first, last = np.array(ranges, np.uint64).reshape(-1, 3).T
    return EntryRanges(ledger_id, first, last)
