"""What redelivery must do, as plain dicts: slow, and simple enough to be believed.

Owns: of each subscription what waits for its redelivery and until when, how often each position was negatively
acknowledged, its dead letters, and what is staged of that.
Does not own: rows and who is owed them (`oracle`), and when what has come due is taken to READY (told by `fired`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from storage_backends.formats import index_ids
from tests.daemon.core._support.oracle import (
    Claim,
    Oracle,
    Place,
    Position,
    Ranges,
    Row,
    Subscriber,
    owner_of,
    part_of,
    places_named,
    position_of,
)

TOO_OFTEN, REJECTED = 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    place: Place
    deliver_at_ms: int
    key_hash: int
    count: int
    dead_at_ms: int
    reason: int
    text: str


@dataclasses.dataclass(slots=True)
class Receiver(Subscriber):
    """`nacked`: what waits, until when. `given_ms`: of everything that ever waited and is in the backlog the time that
    it was last given. `last_dead_letter_id`: the highest that is durable. `held_since_ms`: of what is in flight, by the
    clock that never steps. `timeouts`: of the counts, how many are of time-outs since somebody asked.
    """

    nacked: dict[Place, int] = dataclasses.field(default_factory=dict)
    given_ms: dict[Place, int] = dataclasses.field(default_factory=dict)
    counts: dict[Place, int] = dataclasses.field(default_factory=dict)
    dead: dict[int, DeadLetter] = dataclasses.field(default_factory=dict)
    last_dead_letter_id: int = 0
    staged_dead_letter_id: int = 0
    nacking: set[Place] = dataclasses.field(default_factory=set)
    held_since_ms: dict[Place, int] = dataclasses.field(default_factory=dict)
    timeouts: dict[Place, int] = dataclasses.field(default_factory=dict)

    def let_go(self, places: Iterable[Place]) -> None:
        places = list(places)
        super(Receiver, self).let_go(places)
        for at in places:
            self.nacking.discard(at)
            self.forget(at)

    def forget(self, at: Place) -> None:
        """It left the backlog: if it comes back, it was never negatively acknowledged."""
        for each in (self.nacked, self.given_ms, self.counts, self.timeouts):
            each.pop(at, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What holds for redeliveries now. `delay_ms`: by the count."""

    now_ms: int
    delay_ms: Callable[[int], int]
    max_count: int | None
    bits: int

    def redeliver_at_ms(self, row: Row, count: int, delay_ms: int | None) -> int:
        at_ms = max(self.now_ms + (self.delay_ms(count) if delay_ms is None else delay_ms), row.deliver_at_ms)
        return -(-at_ms >> self.bits) << self.bits


@dataclasses.dataclass(frozen=True, slots=True)
class Nack:
    """`added`: a row of the position comes with it."""

    redeliver_at_ms: int
    count: int
    added: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Nacked:
    """What becomes of the positions of a request."""

    nacks: dict[Place, Nack] = dataclasses.field(default_factory=dict)
    dead: dict[Place, DeadLetter] = dataclasses.field(default_factory=dict)
    ignored: list[Claim] = dataclasses.field(default_factory=list)


class RedeliveryOracle(Oracle):
    subscribers: dict[int, Receiver]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.staged_nacks: list[tuple[int, Place, Nack]] = []
        self.staged_dead: list[tuple[int, int, DeadLetter]] = []
        # Dead letters that leave: (subscription, id).
        self.staged_leaving: list[tuple[int, int]] = []

    def subscribe(self, number: int, since_ms: int) -> None:
        self.subscribers[number] = Receiver(since_ms)

    # ---- what may be handed out

    def ready(self, number: int) -> dict[Place, Row]:
        """Also what comes back before the head, after a recovery, has passed it. Until then it need not be handed out:
        of what came back before the recovery a tracker may know no more, and the clock may have stepped back since.
        """
        receiver = self.subscribers[number]
        unready = receiver.nacked.keys() | receiver.nacking | receiver.in_flight.keys() | receiver.acknowledging
        rows = super().ready(number) | {at: self.rows[at] for at in receiver.given_ms}
        return {at: row for at, row in rows.items() if at not in unready}

    def fired(self, number: int, places: Iterable[Place], now_ms: int) -> None:
        """Their time has come, and they wait no longer."""
        nacked = self.subscribers[number].nacked
        for at in places:
            assert nacked[at] <= now_ms, f"{at} comes back {nacked[at] - now_ms} ms early"
            del nacked[at]

    def in_hand_when_claimed(self, number: int, places: set[Place]) -> set[Place]:
        """What waits for its redelivery goes on waiting."""
        return places - self.subscribers[number].nacked.keys() - self.subscribers[number].nacking

    def was_handed_out(self, at: Place) -> bool:
        return any(at in receiver.counts for receiver in self.subscribers.values())

    def is_staged(self, positions: Iterable[Position], *, to_leave: bool = False) -> bool:
        """Also what dies without a row, as if one were to come."""
        dying = {position_of(dead.place) for _, _, dead in self.staged_dead if not to_leave}
        return super().is_staged(positions, to_leave=to_leave) or bool(dying & {*positions})

    # ---- messages of batches leave with their entry

    def stage_acknowledgement(self, number: int, place: Place, count: int | None = None) -> None:
        super().stage_acknowledgement(number, place)
        if not index_ids.is_of_batch_parts(place[0]):
            self.end_messages(number, position_of(place), count)

    def ends(self, number: int, place: Place, claim: Claim) -> bool:
        receiver = self.subscribers[number]
        count = receiver.counts.get(place, 0)
        return claim.delivery is None or count - receiver.timeouts.get(place, 0) <= claim.delivery <= count

    def ends_messages(self, number: int, claim: Claim) -> bool:
        if claim.deliver_at_ms or claim.batch_index is not None or self.is_owed_entry(number, claim):
            return False
        return self.end_messages(number, claim.at, claim.delivery)

    def end_messages(self, number: int, at: Position, count: int | None = None) -> bool:
        """Whether there are any. `count`: those that came back more often than that stay."""
        index = index_ids.batch_parts_of(number)
        acknowledging = self.subscribers[number].acknowledging
        ended = [part for part in self.rows if part[0] == index and position_of(part) == at]
        ended = [part for part in ended if part not in acknowledging]
        counts = self.subscribers[number].counts
        for part in ended:
            if count is None or counts.get(part, 0) <= count:
                super().stage_acknowledgement(number, part)
        return bool(ended)

    def is_owed_entry(self, number: int, claim: Claim) -> bool:
        """Whether the subscription is owed the entry as a whole, or about to be, with whatever time."""
        rows = self.rows | self.staged_adds
        named = places_named(number, claim._replace(batch_index=None))
        return any(self.may_be_owed(number, at, rows[at]) for at in named if at in rows)

    # ---- negative acknowledgements

    def is_nacking(self, number: int, claims: Iterable[Claim]) -> bool:
        """Whether one of the claims is for what is being negatively acknowledged."""
        named = {at for claim in claims for at in places_named(number, claim)}
        return bool(named & self.subscribers[number].nacking)

    def nack(
        self,
        number: int,
        claims: Sequence[Claim],
        rules: Rules,
        *,
        delay_ms: Sequence[int] | None = None,
        key_hash: Sequence[int] | None = None,
        reject: bool = False,
        text: str = "",
        forwarded: bool = False,
    ) -> Nacked:
        outcome = Nacked()
        for place_in_request, claim in enumerate(claims):
            hashed = 0 if key_hash is None else key_hash[place_in_request]
            named = self.named_by_nack(number, claim, hashed, rules.now_ms, forwarded=forwarded)
            if named is None:
                outcome.ignored.append(claim)
            else:
                delay = None if delay_ms is None else delay_ms[place_in_request]
                self.decide(number, *named, rules, outcome, delay_ms=delay, reject=reject, text=text)
        return outcome

    def why_ignored(self, number: int, claim: Claim, now_ms: int) -> str:
        """Why a negative acknowledgement does nothing, after all else of its request was decided."""
        reasons = ["NOT_THERE"]
        for place in places_named(number, claim):
            row = self.rows.get(place)
            leaves = place in self.subscribers[number].acknowledging
            owed = row is not None and not leaves and self.may_be_owed(number, place, row)
            if row is not None and owed and row.passed:
                same = claim.deliver_at_ms in (0, row.deliver_at_ms)
                reasons.append("OTHER_DELIVERY" if same else "OTHER_TIME")
            elif owed or place in self.staged_adds:
                early = not claim.deliver_at_ms or claim.deliver_at_ms > now_ms
                reasons.append("NOT_DUE" if early else "OTHER_TIME")
        return max(reasons, key=("NOT_THERE", "NOT_DUE", "OTHER_TIME", "OTHER_DELIVERY").index)

    def named_by_nack(
        self, number: int, claim: Claim, key_hash: int, now_ms: int, *, forwarded: bool
    ) -> tuple[Place, Row, int] | None:
        """What is named, its row, and the count that it would have: as if it came back just now."""
        for in_flight in (True, False):
            for place in self.found_of(number, claim, in_flight=in_flight):
                count = self.count_after(number, place, claim.delivery, in_flight=in_flight)
                if count is not None:
                    repeats = place in self.subscribers[number].nacked and count == self.count_of(number, place)
                    if index_ids.is_of_batch_parts(place[0]) and not repeats:
                        count = max(count, self.count_above(number, claim.at))
                    return place, self.rows[place], count
        first_count = 1 if claim.delivery is None else claim.delivery + 1
        place = (number, *claim.at)
        if claim.batch_index is not None:
            place = part_of(number, claim.at, claim.batch_index)
            if place in self.rows or place in self.staged_adds:
                return None
            for in_flight in (True, False):
                for whole in self.found_of(number, claim._replace(batch_index=None), in_flight=in_flight):
                    count = self.subscribers[number].counts.get(whole, 0)
                    if claim.delivery is None or claim.delivery >= count:
                        row = Row(self.rows[whole].deliver_at_ms, self.rows[whole].key_hash, passed=True)
                        return place, row, max(count + 1, first_count, self.count_above(number, claim.at))
        if (claim.deliver_at_ms and not forwarded) or self.is_owed_entry(number, claim):
            return None
        return place, Row(min(claim.deliver_at_ms, now_ms), key_hash, passed=True), first_count

    def count_of(self, number: int, place: Place) -> int:
        return self.subscribers[number].counts.get(place, 0)

    def count_above(self, number: int, entry: Position) -> int:
        """More than any hand-out of the entry as a whole has had, by either of its rows."""
        wholes = places_named(number, Claim(entry, 0))
        return 1 + max(self.count_of(number, whole) for whole in wholes)

    def count_after(self, number: int, place: Place, named: int | None, *, in_flight: bool) -> int | None:
        """The count of a row when it is negatively acknowledged; None where another hand-out of it is named."""
        receiver = self.subscribers[number]
        count, waits = receiver.counts.get(place, 0), place in receiver.nacked
        if named is None:
            return count + (not waits)
        if named >= count:
            return named + 1
        if not in_flight and place in receiver.timeouts:
            # What is named, and what was before it, ends nothing any more.
            receiver.timeouts[place] = min(receiver.timeouts[place], count - named - 1)
        return count if waits and named + 1 == count else None

    def found_of(self, number: int, claim: Claim, *, in_flight: bool) -> list[Place]:
        """What a claim may be for, with time 0 of any time, in the order in which it is looked for."""
        found = [
            self.found(number, claim, index, in_flight=in_flight, any_time=True) for index in self.indexes_of(number)
        ]
        return [place for place in found if place is not None]

    def decide(
        self,
        number: int,
        at: Place,
        row: Row,
        count: int,
        rules: Rules,
        outcome: Nacked,
        *,
        delay_ms: int | None = None,
        reject: bool = False,
        text: str = "",
        asked_for: bool = True,
    ) -> None:
        receiver = self.subscribers[number]
        receiver.in_flight.pop(at, None)
        if reject or (rules.max_count is not None and count > rules.max_count):
            reason = REJECTED if reject else TOO_OFTEN
            dead = DeadLetter(at, row.deliver_at_ms, row.key_hash, count, rules.now_ms, reason, text if reject else "")
            outcome.dead[at] = dead
            self.dies(number, at)
        else:
            nack = Nack(rules.redeliver_at_ms(row, count, delay_ms), count, added=at not in self.rows)
            outcome.nacks[at] = nack
            self.staged_nacks.append((number, at, nack))
            if nack.added:
                self.staged_adds[at] = row
            receiver.nacking.add(at)
            if asked_for:
                receiver.timeouts.pop(at, None)
            else:
                receiver.timeouts[at] = receiver.timeouts.get(at, 0) + 1

    def dies(self, number: int, at: Place) -> None:
        if at in self.rows:
            self.stage_acknowledgement(number, at)
            return
        # It has no row, or one that is missing.
        self.subscribers[number].nacking.add(at)
        self.staged_acknowledgements.append((number, at))
        if not index_ids.is_of_batch_parts(at[0]):
            self.end_messages(number, position_of(at))

    def dead_letters(self, number: int, ids: Mapping[Place, int], dead: Mapping[Place, DeadLetter]) -> None:
        """What is about to die has these ids."""
        receiver = self.subscribers[number]
        assert ids.keys() == dead.keys()
        assert len(set(ids.values())) == len(ids), "an id is given twice"
        for at, dead_letter_id in ids.items():
            assert dead_letter_id > receiver.staged_dead_letter_id, f"id {dead_letter_id} was given before"
            self.staged_dead.append((number, dead_letter_id, dead[at]))
        receiver.staged_dead_letter_id = max([receiver.staged_dead_letter_id, *ids.values()])

    def overdue(self, number: int, before_ms: int) -> set[Place]:
        receiver = self.subscribers[number]
        return {at for at in receiver.in_flight if receiver.held_since_ms[at] <= before_ms}

    def time_out(self, number: int, places: Iterable[Place], rules: Rules) -> Nacked:
        outcome = Nacked()
        for at in places:
            count = self.subscribers[number].counts.get(at, 0) + 1
            self.decide(number, at, self.rows[at], count, rules, outcome, asked_for=False)
        return outcome

    # ---- dead letters leave

    def replay(self, number: int, ids: Iterable[int], deliver_at_ms: int) -> tuple[dict[int, Place], int]:
        """(what is delivered again, by id; how many have a row already)."""
        replayed: dict[int, Place] = {}
        skipped = 0
        for dead_letter_id in ids:
            dead = self.subscribers[number].dead[dead_letter_id]
            index = number if not index_ids.is_of_batch_parts(dead.place[0]) else dead.place[0]
            place = (index, *dead.place[1:])
            dying = {at for _, at in self.staged_acknowledgements}
            if place in self.rows or place in self.staged_adds or place in dying:
                skipped += 1
                continue
            replayed[dead_letter_id] = place
            self.staged_adds[place] = Row(deliver_at_ms, dead.key_hash)
            self.staged_leaving.append((number, dead_letter_id))
        return replayed, skipped

    def purge(self, number: int, ids: Iterable[int]) -> None:
        self.staged_leaving += [(number, dead_letter_id) for dead_letter_id in ids]

    # ---- applying decisions

    def commit(self) -> None:
        ended = list(self.staged_acknowledgements)
        withdrawn = [*self.staged_reschedules, *self.staged_cancellations]
        super().commit()
        for receiver in self.subscribers.values():
            receiver.let_go(withdrawn)
            receiver.nacking.clear()
        for number, at in ended:
            self.subscribers[number].let_go([at])
        for number, dead_letter_id, dead in self.staged_dead:
            receiver = self.subscribers[number]
            receiver.dead[dead_letter_id] = dead
            receiver.last_dead_letter_id = max(receiver.last_dead_letter_id, dead_letter_id)
        for number, dead_letter_id in self.staged_leaving:
            del self.subscribers[number].dead[dead_letter_id]
        for number, at, nack in self.staged_nacks:
            if at in self.rows and self.is_owed(number, at, self.rows[at]):
                receiver = self.subscribers[number]
                receiver.nacked[at] = receiver.given_ms[at] = nack.redeliver_at_ms
                receiver.counts[at] = nack.count
        self.nothing_is_staged()
        self.forget_what_left()

    def nothing_is_staged(self) -> None:
        self.staged_nacks, self.staged_dead, self.staged_leaving = [], [], []

    def forget_what_left(self) -> None:
        for number, receiver in self.subscribers.items():
            for at in [*receiver.given_ms]:
                if at not in self.rows or not self.may_be_owed(number, at, self.rows[at]):
                    receiver.forget(at)

    def leave(self, gone: set[Place], waived: set[Place], number: int | None) -> None:
        super().leave(gone, waived, number)
        self.forget_what_left()

    def trimmed(self, ranges: Ranges, number: int | None) -> tuple[set[Place], set[Place]]:
        gone, waived = super().trimmed(ranges, number)
        assert number is None or all(owner_of(at) in (0, number) for at in gone | waived)
        return gone, waived

    # ---- what crashes do

    def crash(self) -> None:
        before = dict(self.subscribers)
        super().crash()
        self.nothing_is_staged()
        for number, receiver in before.items():
            after = self.subscribers[number]
            after.nacked, after.given_ms, after.counts = receiver.nacked, receiver.given_ms, receiver.counts
            after.dead = receiver.dead
            after.last_dead_letter_id = after.staged_dead_letter_id = receiver.last_dead_letter_id

    def due_as_they_came(self, places: Iterable[Place]) -> None:
        for at in places:
            assert at in self.subscribers[owner_of(at)].given_ms
            self.rows[at].passed = True

    def waits_again(self, number: int, known: Mapping[Place, int]) -> None:
        """What had been taken to READY before a crash may wait again, until the same time."""
        receiver = self.subscribers[number]
        for at in known.keys() & receiver.given_ms.keys() - receiver.nacked.keys():
            receiver.nacked[at] = receiver.given_ms[at]
