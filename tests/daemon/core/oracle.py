"""What a topic must do, as plain dicts: slow, and simple enough to be believed.

Owns: rows, subscriptions, what is staged, and the outcome of every request by the rules of the semantics.
Does not own: when rows are passed (told by `passed`), buckets, segments and storage: they must not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

Position = tuple[int, int]
# Of each ledger its last entry, or (ledger, entry) and every lower ledger; None for everything.
Ranges = dict[int, int] | Position | None


def in_ranges(at: Position, ranges: Ranges) -> bool:
    if ranges is None:
        return True
    if isinstance(ranges, tuple):
        return at <= ranges
    return at[0] in ranges and at[1] <= ranges[at[0]]


@dataclasses.dataclass(slots=True)
class Row:
    deliver_at_ms: int
    key_hash: int
    passed: bool = False
    acknowledged: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class Subscriber:
    since_ms: int
    dispatchers: set[int] = dataclasses.field(default_factory=set)
    # Position -> (dispatcher, time it was handed out with).
    in_flight: dict[Position, tuple[int, int]] = dataclasses.field(default_factory=dict)
    acknowledging: set[Position] = dataclasses.field(default_factory=set)
    leases: set[int] = dataclasses.field(default_factory=set)

    def let_go(self, positions: Iterable[Position]) -> None:
        """They left the backlog."""
        for at in positions:
            self.in_flight.pop(at, None)
            self.acknowledging.discard(at)

    def leased(self) -> set[Position]:
        return {at for at, (dispatcher, _) in self.in_flight.items() if dispatcher in self.leases}


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    accepted: int
    duplicates: int
    returned: list[int]
    late: int
    raised: list[int]
    raised_deliver_at_ms: list[int]


class Oracle:
    def __init__(self) -> None:
        self.rows: dict[Position, Row] = {}
        self.subscribers: dict[int, Subscriber] = {}
        self.staged_adds: dict[Position, Row] = {}
        self.staged_acknowledgements: list[tuple[int, Position]] = []
        # Passed when nobody was owed it.
        self.staged_gone: set[Position] = set()
        # Since when a subscription that is being created is owed what comes due.
        self.coming_since_ms: int | None = None
        # By damaged bucket, what is missing.
        self.missing: dict[str, dict[Position, Row]] = {}

    # ---- who is owed what

    def is_owed(self, number: int, row: Row) -> bool:
        return row.deliver_at_ms > self.subscribers[number].since_ms and number not in row.acknowledged

    def owed_by_nobody(self, row: Row, *, without: int | None = None) -> bool:
        return not any(self.is_owed(number, row) for number in self.subscribers if number != without)

    def may_be_owed(self, number: int, row: Row) -> bool:
        """The same before the row's time has been seen."""
        return number not in row.acknowledged and (not row.passed or self.is_owed(number, row))

    def backlog(self, number: int) -> dict[Position, Row]:
        return {at: row for at, row in self.rows.items() if row.passed and self.is_owed(number, row)}

    def ready(self, number: int) -> dict[Position, Row]:
        """What may be handed out now."""
        subscriber = self.subscribers[number]
        return {
            at: row
            for at, row in self.backlog(number).items()
            if at not in subscriber.in_flight and at not in subscriber.acknowledging
        }

    # ---- requests

    def add(self, rows: Iterable[tuple[Position, int, int]], *, now_ms: int, return_already_due: bool) -> Added:
        """Rows of (position, deliver_at_ms, key_hash)."""
        floor_ms = max((each.since_ms for each in self.subscribers.values()), default=0)
        seen: set[Position] = set()
        acknowledged = {at for _, at in self.staged_acknowledgements}
        accepted = duplicates = late = 0
        returned, raised, raised_ms = [], [], []
        for number, (at, deliver_at_ms, key_hash) in enumerate(rows):
            if at in self.rows or at in self.staged_adds or at in seen or at in acknowledged:
                duplicates += 1
                continue
            seen.add(at)
            late += deliver_at_ms <= now_ms
            if return_already_due and deliver_at_ms <= now_ms:
                returned.append(number)
                continue
            if deliver_at_ms <= floor_ms:
                deliver_at_ms = floor_ms + 1
                raised.append(number)
                raised_ms.append(deliver_at_ms)
            accepted += 1
            self.staged_adds[at] = Row(deliver_at_ms, key_hash)
        return Added(accepted, duplicates, returned, late, raised, raised_ms)

    def acknowledge(self, number: int, claims: Iterable[tuple[Position, int]]) -> int:
        """How many of the claims are ignored."""
        subscriber = self.subscribers[number]
        ignored = 0
        for at, deliver_at_ms in claims:
            row = self.rows.get(at)
            in_backlog = row is not None and row.passed and self.is_owed(number, row)
            if row is None or not in_backlog or row.deliver_at_ms != deliver_at_ms or at in subscriber.acknowledging:
                ignored += 1
                continue
            subscriber.in_flight.pop(at, None)
            subscriber.acknowledging.add(at)
            self.staged_acknowledgements.append((number, at))
        return ignored

    def commit(self) -> None:
        everything = [self.rows, *self.missing.values()]
        for number, at in self.staged_acknowledgements:
            self.subscribers[number].acknowledging.discard(at)
            for rows in everything:
                if at in rows:
                    rows[at].acknowledged.add(number)
                    if self.owed_by_nobody(rows[at]):
                        del rows[at]
        for at in self.staged_gone:
            self.rows.pop(at, None)
        for at in self.staged_adds:
            for missing in self.missing.values():
                missing.pop(at, None)
        self.rows |= self.staged_adds
        self.staged_acknowledgements.clear()
        self.staged_gone.clear()
        self.staged_adds.clear()

    # ---- trims

    def trimmed(self, ranges: Ranges, number: int | None) -> tuple[set[Position], set[Position]]:
        """What a trim makes (gone, waived for the subscription)."""
        gone: set[Position] = set()
        waived: set[Position] = set()
        for rows in (self.rows, *self.missing.values()):
            for at, row in rows.items():
                if not in_ranges(at, ranges) or (number is not None and not self.may_be_owed(number, row)):
                    continue
                others = [other for other in self.subscribers if other != number and self.may_be_owed(other, row)]
                (waived if number is not None and others else gone).add(at)
        return gone, waived

    def leave(self, gone: set[Position], waived: set[Position], number: int | None) -> None:
        for rows in (self.rows, *self.missing.values()):
            for at in gone & rows.keys():
                del rows[at]
            for at in waived & rows.keys():
                assert number is not None
                rows[at].acknowledged.add(number)
        for each, subscriber in self.subscribers.items():
            subscriber.let_go(gone | waived if each == number else gone)

    # ---- damage

    def quarantine(self, bucket: str, positions: set[Position]) -> None:
        missing = self.missing[bucket] = {at: self.rows.pop(at) for at in positions}
        for row in missing.values():
            row.acknowledged |= {number for number in self.subscribers if not self.may_be_owed(number, row)}
            row.passed = False
        for subscriber in self.subscribers.values():
            subscriber.let_go(positions)

    # ---- what time and crashes do

    def passed(self, positions: Iterable[Position]) -> None:
        for at in positions:
            row = self.rows[at]
            row.passed = True
            coming = self.coming_since_ms is not None and row.deliver_at_ms > self.coming_since_ms
            if self.subscribers and not coming and self.owed_by_nobody(row):
                self.staged_gone.add(at)

    def close(self, number: int, dispatcher: int) -> None:
        subscriber = self.subscribers[number]
        subscriber.dispatchers.discard(dispatcher)
        subscriber.in_flight = {at: held for at, held in subscriber.in_flight.items() if held[0] != dispatcher}

    def crash(self) -> None:
        self.staged_adds.clear()
        self.staged_acknowledgements.clear()
        self.staged_gone.clear()
        for row in self.rows.values():
            row.passed = False
        for number, subscriber in self.subscribers.items():
            self.subscribers[number] = Subscriber(subscriber.since_ms)

    def learn_again(self, known: dict[int, set[Position]]) -> None:
        """That a subscription is not owed a row because of its time is known when that has come, and may be before."""
        for rows in (self.rows, *self.missing.values()):
            for at, row in rows.items():
                for number, subscriber in self.subscribers.items():
                    if row.deliver_at_ms <= subscriber.since_ms:
                        row.acknowledged.discard(number)
                        row.acknowledged |= {number} if at in known[number] else set()
