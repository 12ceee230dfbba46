"""What a topic must do, as plain dicts: slow, and simple enough to be believed.

Owns: rows, subscriptions, what is staged, and the outcome of every request by the rules of the semantics.
Does not own: when rows are passed (told by `passed`), buckets, segments and storage: they must not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from storage_backends.formats import index_ids

Position = tuple[int, int]
# (index, ledger, entry): index 0 is the shared one, others are the own ones of subscriptions, by their numbers, and
# those of their batch parts, where an entry stands for one message of one.
Place = tuple[int, int, int]
# Of each ledger its last entry, or (ledger, entry) and every lower ledger; None for everything.
Ranges = dict[int, int] | Position | None


class Claim(NamedTuple):
    """Of an entry, or of one message of it, with the time it was handed out with. `delivery`: which hand-out of it, by
    its redelivery count; None: any.
    """

    at: Position
    deliver_at_ms: int
    batch_index: int | None = None
    delivery: int | None = None


def owner_of(place: Place) -> int:
    """The subscription that alone is owed it; 0: each may be."""
    return index_ids.subscription_of(place[0])


def position_of(place: Place) -> Position:
    """Of a batch part: of its entry."""
    index, ledger, entry = place
    return (ledger, entry >> index_ids.BATCH_BITS) if index_ids.is_of_batch_parts(index) else (ledger, entry)


def claim_of(place: Place, deliver_at_ms: int) -> Claim:
    of_batch_parts = index_ids.is_of_batch_parts(place[0])
    return Claim(position_of(place), deliver_at_ms, place[2] & index_ids.BATCH_INDEX_MAX if of_batch_parts else None)


def part_of(number: int, at: Position, batch_index: int) -> Place:
    """The place of one message of an entry."""
    return index_ids.batch_parts_of(number), at[0], at[1] << index_ids.BATCH_BITS | batch_index


def places_named(number: int, claim: Claim) -> list[Place]:
    """Where a subscription may have what is claimed, in the order in which it is looked for."""
    if claim.batch_index is not None:
        return [part_of(number, claim.at, claim.batch_index)]
    return [(0, *claim.at), (number, *claim.at)]


def in_ranges(place: Place, ranges: Ranges) -> bool:
    at = position_of(place)
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
    # Place -> (dispatcher, time it was handed out with).
    in_flight: dict[Place, tuple[int, int]] = dataclasses.field(default_factory=dict)
    acknowledging: set[Place] = dataclasses.field(default_factory=set)
    leases: set[int] = dataclasses.field(default_factory=set)

    def let_go(self, places: Iterable[Place]) -> None:
        """They left the backlog."""
        for at in places:
            self.in_flight.pop(at, None)
            self.acknowledging.discard(at)

    def leased(self) -> set[Place]:
        return {at for at, (dispatcher, _) in self.in_flight.items() if dispatcher in self.leases}


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    accepted: int
    duplicates: int
    returned: list[int]
    late: int
    raised: list[int]
    raised_deliver_at_ms: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Withdrawn:
    """Rows of a request by what they are: by what leaves the places, and those that do not leave by why."""

    leaving: dict[int, list[Place]]
    not_found: list[int]
    already_due: list[int]
    in_flight: list[int]


class Oracle:
    def __init__(self) -> None:
        self.rows: dict[Place, Row] = {}
        self.subscribers: dict[int, Subscriber] = {}
        self.staged_adds: dict[Place, Row] = {}
        self.staged_acknowledgements: list[tuple[int, Place]] = []
        self.staged_cancellations: set[Place] = set()
        # The new rows.
        self.staged_reschedules: dict[Place, Row] = {}
        # Passed when nobody was owed it.
        self.staged_gone: set[Place] = set()
        # Since when a subscription that is being created is owed what comes due.
        self.coming_since_ms: int | None = None
        # By damaged bucket, what is missing.
        self.missing: dict[str, dict[Place, Row]] = {}
        self.index_of_missing: dict[str, int] = {}
        # The topic's policy: whether rows for every subscription are in one index.
        self.shared_index = True

    # ---- who is owed what

    def is_owed(self, number: int, at: Place, row: Row) -> bool:
        if number in row.acknowledged:
            return False
        return owner_of(at) == number or (at[0] == 0 and row.deliver_at_ms > self.subscribers[number].since_ms)

    def owed_by_nobody(self, at: Place, row: Row) -> bool:
        return not any(self.is_owed(number, at, row) for number in self.subscribers)

    def may_be_owed(self, number: int, at: Place, row: Row) -> bool:
        """The same before the row's time has been seen."""
        if owner_of(at) not in (0, number):
            return False
        return number not in row.acknowledged and (not row.passed or self.is_owed(number, at, row))

    def backlog(self, number: int) -> dict[Place, Row]:
        return {at: row for at, row in self.rows.items() if row.passed and self.is_owed(number, at, row)}

    def ready(self, number: int) -> dict[Place, Row]:
        """What may be handed out now."""
        subscriber = self.subscribers[number]
        return {
            at: row
            for at, row in self.backlog(number).items()
            if at not in subscriber.in_flight and at not in subscriber.acknowledging
        }

    # ---- requests

    def add(
        self, rows: Iterable[tuple[Position, int, int]], to: int, *, now_ms: int, return_already_due: bool
    ) -> Added:
        """Rows of (position, deliver_at_ms, key_hash). `to`: one subscription's own, or 0: for every one."""
        indexes = [to] if to or self.shared_index or not self.subscribers else [*self.subscribers]
        floor_ms = max((each.since_ms for each in self.subscribers.values()), default=0)
        seen: set[Position] = set()
        taken = self.rows.keys() | self.staged_adds.keys() | {at for _, at in self.staged_acknowledgements}
        accepted = duplicates = late = 0
        returned, raised, raised_ms = [], [], []
        for number, (at, deliver_at_ms, key_hash) in enumerate(rows):
            fresh = {(index, *at) for index in indexes} - taken
            if at in seen or not fresh:
                duplicates += 1
                continue
            seen.add(at)
            late += deliver_at_ms <= now_ms
            if return_already_due and deliver_at_ms <= now_ms:
                returned.append(number)
                continue
            if indexes == [0] and deliver_at_ms <= floor_ms:
                deliver_at_ms = floor_ms + 1
                raised.append(number)
                raised_ms.append(deliver_at_ms)
            accepted += 1
            self.staged_adds |= {place: Row(deliver_at_ms, key_hash) for place in fresh}
        return Added(accepted, duplicates, returned, late, raised, raised_ms)

    @property
    def leaving(self) -> set[Place]:
        return self.staged_cancellations | self.staged_reschedules.keys()

    def is_staged(self, positions: Iterable[Position], *, to_leave: bool = False) -> bool:
        """Whether something staged names one of them, in any index; `to_leave`: other than an add."""
        places = self.leaving if to_leave else self.leaving | self.staged_adds.keys()
        return bool({place[1:] for place in places} & {*positions})

    def cancel(self, positions: Iterable[Position], to: int | None) -> Withdrawn:
        """`to`: only in the own index of that subscription. Everything due is passed."""
        withdrawn = self._withdrawn(positions, to)
        for places in withdrawn.leaving.values():
            self.staged_cancellations.update(places)
        return withdrawn

    def reschedule(self, rows: list[tuple[Position, int, int]], to: int | None) -> tuple[Withdrawn, dict[int, int]]:
        """Rows of (position, deliver_at_ms, key_hash). With it the times of those that are stored later."""
        floor_ms = max((each.since_ms for each in self.subscribers.values()), default=0)
        withdrawn = self._withdrawn([at for at, _, _ in rows], to)
        raised: dict[int, int] = {}
        for number, places in withdrawn.leaving.items():
            _, deliver_at_ms, key_hash = rows[number]
            for place in places:
                stored_ms = deliver_at_ms
                if not place[0] and deliver_at_ms <= floor_ms:
                    stored_ms = raised[number] = floor_ms + 1
                self.staged_reschedules[place] = Row(stored_ms, key_hash)
        return withdrawn, raised

    def _withdrawn(self, positions: Iterable[Position], to: int | None) -> Withdrawn:
        withdrawn = Withdrawn({}, [], [], [])
        for number, at in enumerate(positions):
            indexes = [0, *self.subscribers] if to is None else [to]
            places = [(index, *at) for index in indexes if (index, *at) in self.rows]
            due = [place for place in places if self.rows[place].passed or self.was_handed_out(place)]
            held = [each.in_flight.keys() | each.acknowledging for each in self.subscribers.values()]
            if any(place in each for place in due for each in held):
                withdrawn.in_flight.append(number)
            elif due:
                withdrawn.already_due.append(number)
            elif places:
                withdrawn.leaving[number] = places
            else:
                withdrawn.not_found.append(number)
        return withdrawn

    def was_handed_out(self, at: Place) -> bool:
        """Though the clock, after it was set back, says that it is not due."""
        return False

    def acknowledge(self, number: int, claims: Iterable[Claim]) -> int:
        """How many of the claims are ignored. What is in flight is taken first, and of the shared index first."""
        left = list(claims)
        for index in self.indexes_of(number):
            for claim in list(left):
                place = self.found(number, claim, index, in_flight=True)
                if place is not None and self.ends(number, place, claim):
                    left.remove(claim)
                    self.stage_acknowledgement(number, place, claim.delivery)
        left = [claim for claim in left if not self.ends_messages(number, claim)]
        # Of those that are not in flight all are looked for before any of them leaves.
        taken: dict[Place, int | None] = {}
        for index in self.indexes_of(number):
            for claim in list(left):
                place = self.found(number, claim, index, in_flight=False)
                if place is not None and place not in taken and self.ends(number, place, claim):
                    left.remove(claim)
                    taken[place] = claim.delivery
        for place, count in taken.items():
            self.stage_acknowledgement(number, place, count)
        return len(left)

    def ends(self, number: int, place: Place, claim: Claim) -> bool:
        """Whether an acknowledgement of the hand-out that a claim names is one of what is there."""
        return True

    @staticmethod
    def indexes_of(number: int) -> tuple[int, int, int]:
        """Where a subscription may have rows, in the order in which it is looked."""
        return 0, number, index_ids.batch_parts_of(number)

    def stage_acknowledgement(self, number: int, place: Place, count: int | None = None) -> None:
        subscriber = self.subscribers[number]
        subscriber.in_flight.pop(place, None)
        if place not in subscriber.acknowledging:
            subscriber.acknowledging.add(place)
            self.staged_acknowledgements.append((number, place))

    def ends_messages(self, number: int, claim: Claim) -> bool:
        """Whether the claim is for an entry that nobody owes the subscription, and of which it has messages."""
        return False

    def found(self, number: int, claim: Claim, index: int, *, in_flight: bool, any_time: bool = False) -> Place | None:
        """What a claim is for in an index; `in_flight`: only if it is. `any_time`: time 0 is any."""
        subscriber = self.subscribers[number]
        for place in places_named(number, claim):
            if place[0] != index:
                continue
            row = self.rows[place] if place in subscriber.in_flight else self.backlog(number).get(place)
            asked_ms = (
                {claim.deliver_at_ms} if claim.deliver_at_ms or not any_time or row is None else {row.deliver_at_ms}
            )
            there = row is not None and row.deliver_at_ms in asked_ms and place not in subscriber.acknowledging
            if there and (not in_flight or place in subscriber.in_flight):
                return place
        return None

    def claimed(self, number: int, claims: Iterable[Claim]) -> set[Place]:
        """What a dispatcher that claims to hold positions, with their times, is taken to hold."""
        backlog = self.backlog(number)
        for at in self.subscribers[number].acknowledging:
            backlog.pop(at, None)
        named = [
            [
                place
                for place in places_named(number, claim)
                if place in backlog and backlog[place].deliver_at_ms == claim.deliver_at_ms
            ]
            for claim in claims
        ]
        return {places[0] for places in named if places}

    def in_hand_when_claimed(self, number: int, places: set[Place]) -> set[Place]:
        """What of places that are claimed so is in flight."""
        return places

    def commit(self) -> None:
        everything = [self.rows, *self.missing.values()]
        for number, at in self.staged_acknowledgements:
            self.subscribers[number].acknowledging.discard(at)
            for rows in everything:
                if at in rows:
                    rows[at].acknowledged.add(number)
                    if self.owed_by_nobody(at, rows[at]):
                        del rows[at]
        for at in self.staged_gone:
            self.rows.pop(at, None)
        for rows in everything:
            for at in self.staged_cancellations & rows.keys():
                del rows[at]
            for at in self.staged_reschedules.keys() & rows.keys():
                # What was trimmed for a subscription stays so.
                self.staged_reschedules[at].acknowledged |= rows.pop(at).acknowledged
        for at in self.staged_adds:
            for missing in self.missing.values():
                missing.pop(at, None)
        self.rows |= self.staged_adds | self.staged_reschedules
        self.staged_acknowledgements.clear()
        self.staged_gone.clear()
        self.staged_adds.clear()
        self.staged_cancellations.clear()
        self.staged_reschedules.clear()

    def delete_subscription(self, number: int) -> None:
        """Its own index is no more, and no damaged bucket of it."""
        del self.subscribers[number]
        self.rows = {at: row for at, row in self.rows.items() if owner_of(at) != number}
        self.missing = {
            name: rows
            for name, rows in self.missing.items()
            if index_ids.subscription_of(self.index_of_missing[name]) != number
        }

    def subscribe(self, number: int, since_ms: int) -> None:
        self.subscribers[number] = Subscriber(since_ms)

    # ---- trims

    def trimmed(self, ranges: Ranges, number: int | None) -> tuple[set[Place], set[Place]]:
        """What a trim makes (gone, waived for the subscription)."""
        gone: set[Place] = set()
        waived: set[Place] = set()
        for rows in (self.rows, *self.missing.values()):
            for at, row in rows.items():
                if not in_ranges(at, ranges) or (number is not None and not self.may_be_owed(number, at, row)):
                    continue
                others = [other for other in self.subscribers if other != number and self.may_be_owed(other, at, row)]
                (waived if number is not None and others else gone).add(at)
        return gone, waived

    def leave(self, gone: set[Place], waived: set[Place], number: int | None) -> None:
        for rows in (self.rows, *self.missing.values()):
            for at in gone & rows.keys():
                del rows[at]
            for at in waived & rows.keys():
                assert number is not None
                rows[at].acknowledged.add(number)
        for each, subscriber in self.subscribers.items():
            subscriber.let_go(gone | waived if each == number else gone)

    # ---- damage

    def quarantine(self, bucket: str, index: int, places: set[Place]) -> None:
        self.index_of_missing[bucket] = index
        missing = self.missing[bucket] = {at: self.rows.pop(at) for at in places}
        for at, row in missing.items():
            row.acknowledged |= {number for number in self.subscribers if not self.may_be_owed(number, at, row)}
            row.passed = False
        for subscriber in self.subscribers.values():
            subscriber.let_go(places)

    # ---- what time and crashes do

    def passed(self, places: Iterable[Place]) -> None:
        for at in places:
            assert at not in self.leaving, f"{at} is passed, and leaves"
            row = self.rows[at]
            row.passed = True
            coming = self.coming_since_ms is not None and row.deliver_at_ms > self.coming_since_ms
            if self.subscribers and not coming and self.owed_by_nobody(at, row):
                self.staged_gone.add(at)

    def close(self, number: int, dispatcher: int) -> None:
        subscriber = self.subscribers[number]
        subscriber.dispatchers.discard(dispatcher)
        subscriber.in_flight = {at: held for at, held in subscriber.in_flight.items() if held[0] != dispatcher}

    def crash(self) -> None:
        self.staged_cancellations.clear()
        self.staged_reschedules.clear()
        self.staged_adds.clear()
        self.staged_acknowledgements.clear()
        self.staged_gone.clear()
        for row in self.rows.values():
            row.passed = False
        for number, subscriber in list(self.subscribers.items()):
            self.subscribe(number, subscriber.since_ms)

    def learn_again(self, known: dict[int, set[Place]]) -> None:
        """That a subscription is not owed a row because of its time is known when that has come, and may be before."""
        for rows in (self.rows, *self.missing.values()):
            for at, row in rows.items():
                for number, subscriber in self.subscribers.items():
                    if row.deliver_at_ms <= subscriber.since_ms:
                        row.acknowledged.discard(number)
                        row.acknowledged |= {number} if at in known[number] else set()
