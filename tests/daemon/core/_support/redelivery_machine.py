"""A topic and the oracle side by side, while positions are negatively acknowledged, time out, die and come back.

Owns: the rules for that, beside everything else that may happen.
Does not own: everything else (`merging_machine`), and what must hold (`redelivery_invariants`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from daemon.core.decisions.nack_decisions import RedeliveryTerms
from storage_backends.formats import index_ids
from tests.daemon.core._support import nacking
from tests.daemon.core._support.journaled_topic import Position, claims_of
from tests.daemon.core._support.oracle import Claim, Place, claim_of, places_named
from tests.daemon.core._support.redelivery_invariants import RedeliveryInvariants, dead_letters
from tests.daemon.core._support.redelivery_oracle import Nacked, Rules
from tests.daemon.core._support.row_machine import POSITIONS, batches, owners, picks, positions

# Delays of redeliveries, in ms.
delays = st.sampled_from((0, 0, 1, 3, 10, 400, 700, 2_600))
in_batches = st.sampled_from([at for at in POSITIONS if at[1] <= index_ids.BATCHED_ENTRY_ID_MAX])
batch_indexes = st.sampled_from((0, 1, index_ids.BATCH_INDEX_MAX))
off = st.sampled_from((0, 0, 0, 1))
entries = st.lists(st.tuples(positions, off), min_size=1, max_size=6, unique_by=lambda each: each[0])
messages = st.lists(
    st.tuples(in_batches, batch_indexes, off), min_size=1, max_size=6, unique_by=lambda each: (each[0], each[1])
)
many = st.lists(picks, min_size=1, max_size=8)


class Policy(NamedTuple):
    """`step_ms`: the delay is so much for each time that it happened."""

    step_ms: int = 700
    max_count: int | None = None
    bits: int = 0


policies = st.builds(
    Policy,
    st.sampled_from((0, 1, 5, 700, 2_600)),
    st.sampled_from((None, None, None, 0, 1, 2)),
    st.sampled_from((0, 0, 1, 2, 3, 4, 8)),
)
# Of a request: a delay for each position, or by policy.
explicit = st.one_of(st.none(), st.lists(delays, min_size=8, max_size=8))


class RedeliveryMachine(RedeliveryInvariants):
    """Redelivery beside everything else that may happen to a topic."""

    # ---- a great deal at once

    @precondition(lambda self: self.oracle.subscribers)
    @rule(
        batch=batches,
        to=owners,
        pick=picks,
        policy=policies,
        explicit=explicit,
        between=st.sampled_from(("", "seal", "checkpoint", "crash", "close", "merge")),
        step_ms=st.sampled_from((1, 700, 3_000)),
    )
    def rows_are_nacked_and_come_back(
        self,
        batch: list[tuple[Position, int, int]],
        to: int,
        pick: int,
        policy: Policy,
        explicit: list[int] | None,
        between: str,
        step_ms: int,
    ) -> None:
        self.rows_come_and_go(batch, to, pick, [])
        if self.something_is_in_flight():
            self.nack_what_is_in_flight([0, 1, 2, pick], policy, explicit, 0, now=True)
        self.happens(between)
        self.topic.now_ms += step_ms
        self.drain_one(self.number(pick))

    @precondition(lambda self: self.oracle.subscribers)
    @rule(
        batch=batches,
        to=owners,
        pick=picks,
        chosen=messages,
        policy=policies,
        between=st.sampled_from(("", "seal", "checkpoint", "crash", "acknowledged")),
    )
    def messages_of_batches_are_nacked_and_come_back(
        self,
        batch: list[tuple[Position, int, int]],
        to: int,
        pick: int,
        chosen: list[tuple[Position, int, int]],
        policy: Policy,
        between: str,
    ) -> None:
        self.rows_come_and_go(batch, to, pick, [])
        held = sorted({at for at, _, _ in batch if at[1] <= index_ids.BATCHED_ENTRY_ID_MAX}) or [chosen[0][0]]
        named = [(held[number % len(held)], each[1], 0) for number, each in enumerate(chosen)]
        self.nack_messages_of_batches(pick, list(dict.fromkeys(named)), policy, None, reject=False, now=True)
        if between == "acknowledged" and self.something_is_in_flight():
            self.acknowledge_what_is_in_flight([pick, pick + 1], 0, now=True)
        self.happens(between)
        self.topic.now_ms += 3_000
        self.drain_one(self.number(pick))

    @precondition(lambda self: self.oracle.subscribers)
    @rule(
        batch=batches,
        to=owners,
        pick=picks,
        reject=st.booleans(),
        between=st.sampled_from(("", "seal", "checkpoint", "crash")),
        delay_ms=delays,
    )
    def rows_die_and_are_replayed(
        self, batch: list[tuple[Position, int, int]], to: int, pick: int, reject: bool, between: str, delay_ms: int
    ) -> None:
        self.rows_come_and_go(batch, to, pick, [])
        if self.something_is_in_flight():
            self.nack_what_is_in_flight([pick, pick + 1], Policy(max_count=0), None, 0, now=True, reject=reject)
        self.happens(between)
        if any(each.dead for each in self.oracle.subscribers.values()):
            self.replay([pick, pick + 1], delay_ms, now=True)

    def happens(self, between: str) -> None:
        match between:
            case "seal":
                self.topic.begin_seal()
                while self.topic.seals:
                    self.finish_a_seal(0)
            case "checkpoint":
                self.checkpoint()
            case "crash":
                self.crash()
            case "close":
                self.close(0, 0)
            case "merge" if len(self.topic.tip.live) > 1:
                self.everything_is_merged(0, True)

    def something_is_in_flight(self) -> bool:
        return any(each.in_flight for each in self.oracle.subscribers.values())

    # ---- requests that name hand-outs

    count_off: int | None = None
    forwarded = False

    @rule(count_off=st.sampled_from((None, 0, 0, -1, -2, 1)), forwarded=st.booleans())
    def hand_outs_are_named(self, count_off: int | None, forwarded: bool) -> None:
        """From now on, by the counts of their rows or others; and whether what failed had been passed on."""
        self.count_off, self.forwarded = count_off, forwarded

    def named(self, number: int, claims: Sequence[Claim]) -> list[Claim]:
        """The claims by the counts of the rows that they may be for."""
        if self.count_off is None:
            return list(claims)
        counts = self.oracle.subscribers[number].counts
        highest = [max(counts.get(at, 0) for at in places_named(number, claim)) for claim in claims]
        return [
            claim._replace(delivery=max(0, count + self.count_off))
            for claim, count in zip(claims, highest, strict=True)
        ]

    # ---- negative acknowledgements

    @precondition(lambda self: self.something_is_in_flight())
    @rule(which=many, policy=policies, explicit=explicit, off_ms=off, now=st.booleans(), reject=st.just(False))
    def nack_what_is_in_flight(
        self, which: list[int], policy: Policy, explicit: list[int] | None, off_ms: int, now: bool, reject: bool = False
    ) -> None:
        held = [(number, at) for number, sub in self.oracle.subscribers.items() for at in sorted(sub.in_flight)]
        chosen = [held[pick % len(held)] for pick in which]
        for number in sorted({number for number, _ in chosen}):
            in_flight = self.oracle.subscribers[number].in_flight
            claims = [claim_of(at, in_flight[at][1] + off_ms) for each, at in chosen if each == number]
            self.nack(number, claims, policy, explicit, reject=reject)
        if now:
            self.commit()

    @precondition(lambda self: self.oracle.subscribers)
    @rule(
        pick=picks,
        chosen=entries,
        policy=policies,
        explicit=explicit,
        keyed=st.booleans(),
        reject=st.sampled_from((False, False, True)),
        now=st.booleans(),
    )
    def nack_anything(
        self,
        pick: int,
        chosen: list[tuple[Position, int]],
        policy: Policy,
        explicit: list[int] | None,
        keyed: bool,
        reject: bool,
        now: bool,
    ) -> None:
        """What is READY, waits, is not due or unknown, too: then it is a message that never was added."""
        number = self.number(pick)
        self.nack(number, self.claims_of_entries(number, chosen), policy, explicit, keyed=keyed, reject=reject)
        if now:
            self.commit()

    @precondition(lambda self: self.oracle.subscribers)
    @rule(
        pick=picks,
        chosen=messages,
        policy=policies,
        explicit=explicit,
        reject=st.sampled_from((False, False, True)),
        now=st.booleans(),
    )
    def nack_messages_of_batches(
        self,
        pick: int,
        chosen: list[tuple[Position, int, int]],
        policy: Policy,
        explicit: list[int] | None,
        reject: bool,
        now: bool,
    ) -> None:
        number = self.number(pick)
        self.nack(number, self.claims_of_messages(number, chosen), policy, explicit, reject=reject)
        if now:
            self.commit()

    def nack(
        self,
        number: int,
        claims: Sequence[Claim],
        policy: Policy,
        explicit: list[int] | None,
        *,
        keyed: bool = False,
        reject: bool = False,
    ) -> None:
        # No position twice, nor a message beside its entry.
        claims = list({(claim.at, claim.batch_index): claim for claim in claims}.values())
        entries = {claim.at for claim in claims if claim.batch_index is None}
        claims = [claim for claim in claims if claim.batch_index is None or claim.at not in entries]
        self.nothing_staged_names(number, claims, is_forwarded=True)
        claims = self.named(number, claims)
        rules, terms = self.agreed(policy)
        delay_ms = None if explicit is None or reject else explicit[: len(claims)]
        key_hash = [3 + number for number in range(len(claims))] if keyed else None
        text = "rejected" if reject else ""
        expected = self.oracle.nack(
            number,
            claims,
            rules,
            delay_ms=delay_ms,
            key_hash=key_hash,
            reject=reject,
            text=text,
            forwarded=self.forwarded,
        )
        decided = nacking.stage_nack(
            self.topic,
            self.state(number),
            claims,
            terms,
            delay_ms=delay_ms,
            key_hash=key_hash,
            reject=reject,
            text=text,
            forwarded=self.forwarded,
            schedule_ids=None if key_hash is None else self.ids_of(key_hash),
        )
        self.check_decided(number, decided, expected)
        reasons = [self.oracle.why_ignored(number, claim, rules.now_ms) for claim in expected.ignored]
        assert [reason.name for reason in decided.reasons] == reasons

    def agreed(self, policy: Policy) -> tuple[Rules, RedeliveryTerms]:
        """The same for the oracle and for the topic."""
        now_ms = self.topic.now_ms

        def delay_ms(count: int) -> int:
            return policy.step_ms * count

        terms = nacking.terms(now_ms, delay_ms=delay_ms, max_count=policy.max_count, bits=policy.bits)
        return Rules(now_ms, delay_ms, policy.max_count, policy.bits), terms

    def check_decided(self, number: int, decided: nacking.Decided, expected: Nacked) -> None:
        assert decided.nacks == expected.nacks
        assert decided.dead == expected.dead
        self.oracle.dead_letters(number, decided.ids, expected.dead)

    def nothing_staged_names(self, number: int, claims: Sequence[Claim], *, is_forwarded: bool = False) -> None:
        """A request waits until what is staged of its positions is applied."""
        positions = claims_of(claims)
        staged = self.topic.core.redelivery.is_staged(self.state(number), positions, is_forwarded=is_forwarded)
        assert staged or not self.oracle.is_nacking(number, claims)
        if staged:
            self.commit()

    def acknowledge(self, number: int, claims: Sequence[Claim]) -> None:
        self.nothing_staged_names(number, claims)
        super().acknowledge(number, self.named(number, claims))

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, chosen=messages, now=st.booleans())
    def acknowledge_messages_of_batches(self, pick: int, chosen: list[tuple[Position, int, int]], now: bool) -> None:
        number = self.number(pick)
        self.acknowledge(number, self.claims_of_messages(number, chosen))
        if now:
            self.commit()

    # ---- time-outs

    @rule(step_ms=st.sampled_from((1, 50, 3_000)))
    def time_passes_for_who_holds(self, step_ms: int) -> None:
        self.topic.elapsed_ms += step_ms

    @precondition(lambda self: self.something_is_in_flight())
    @rule(
        pick=picks, timeout_ms=st.sampled_from((0, 0, 1, 50, 3_000)), limit=st.sampled_from((1, 1_000)), policy=policies
    )
    def time_out(self, pick: int, timeout_ms: int, limit: int, policy: Policy) -> None:
        number = self.number(pick)
        before_ms = self.topic.elapsed_ms - timeout_ms
        if before_ms < 0:
            return
        rules, terms = self.agreed(policy)
        overdue = self.oracle.overdue(number, before_ms)
        decided = nacking.stage_overdue(self.topic, self.state(number), before_ms, terms, limit)
        places = decided.nacks.keys() | decided.dead.keys()
        assert places <= overdue, "what is not overdue times out"
        expected = self.oracle.time_out(number, places, rules)
        # The messages of an entry that dies leave with it, by no decision of their own.
        with_entries = overdue - places - self.oracle.subscribers[number].in_flight.keys()
        assert len(places) + len(with_entries) >= min(len(overdue), limit)
        self.check_decided(number, decided, expected)

    @precondition(lambda self: any(each.dispatchers for each in self.oracle.subscribers.values()))
    @rule(which=picks, claimed=st.lists(st.tuples(picks, off), min_size=1, max_size=6))
    def extend(self, which: int, claimed: list[tuple[int, int]]) -> None:
        opened = [(number, each) for number, sub in self.oracle.subscribers.items() for each in sorted(sub.dispatchers)]
        number, dispatcher = opened[which % len(opened)]
        receiver = self.oracle.subscribers[number]
        held = sorted(receiver.in_flight) or [(0, 1, 1)]
        named = {held[pick % len(held)]: off_ms for pick, off_ms in claimed}
        claims = [claim_of(at, receiver.in_flight.get(at, (0, 5))[1] + off_ms) for at, off_ms in named.items()]
        claims = list({(claim.at, claim.batch_index): claim for claim in claims}.values())
        found = [self.held_by(number, dispatcher, claim) for claim in claims]
        left = self.topic.core.redelivery.extend(
            self.state(number), claims_of(claims), (dispatcher,), elapsed_ms=self.topic.elapsed_ms
        )
        assert left.places().tolist() == [place for place, at in enumerate(found) if at is None]
        for at in filter(None, found):
            receiver.held_since_ms[at] = self.topic.elapsed_ms

    def held_by(self, number: int, dispatcher: int, claim: Claim) -> Place | None:
        in_flight = self.oracle.subscribers[number].in_flight
        places = [at for at in in_flight if claim_of(at, claim.deliver_at_ms)[:1] == claim[:1]]
        places = [at for at in sorted(places) if claim_of(at, in_flight[at][1]) == claim]
        return next((at for at in places if in_flight[at][0] == dispatcher), None)

    # ---- dead letters

    @precondition(lambda self: any(each.dead for each in self.oracle.subscribers.values()))
    @rule(which=many, delay_ms=delays, now=st.booleans())
    def replay(self, which: list[int], delay_ms: int, now: bool) -> None:
        self.commit()
        if not any(each.dead for each in self.oracle.subscribers.values()):
            return
        number, ids = self.some_dead(which)
        deliver_at_ms = self.topic.now_ms + delay_ms
        rows = dead_letters(self.state(number))
        rows = rows.take(np.isin(rows.dead_letter_id, np.array(ids, np.uint64)))
        expected = self.oracle.replay(number, ids, deliver_at_ms)
        assert nacking.stage_replay(self.topic, self.state(number), rows, deliver_at_ms) == expected
        if now:
            self.commit()

    @precondition(lambda self: any(each.dead for each in self.oracle.subscribers.values()))
    @rule(which=many, now=st.booleans())
    def purge(self, which: list[int], now: bool) -> None:
        self.commit()
        if not any(each.dead for each in self.oracle.subscribers.values()):
            return
        number, ids = self.some_dead(which)
        self.oracle.purge(number, ids)
        nacking.stage_purge(self.topic, self.state(number), ids)
        if now:
            self.commit()

    def some_dead(self, which: list[int]) -> tuple[int, list[int]]:
        """(a subscription, ids of its dead letters, ascending)."""
        numbers = sorted(number for number, each in self.oracle.subscribers.items() if each.dead)
        number = numbers[which[0] % len(numbers)]
        ids = sorted(self.oracle.subscribers[number].dead)
        return number, sorted({ids[pick % len(ids)] for pick in which})

    # ---- with everything else

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, also=st.sets(positions, max_size=3), off_ms=st.sampled_from((0, 0, 1)))
    def open_again_with_what_is_held(self, pick: int, also: set[Position], off_ms: int) -> None:
        self.commit()
        super().open_again_with_what_is_held(pick, also, off_ms)
        self.held_since_now()

    @precondition(lambda self: any(each.leases for each in self.oracle.subscribers.values()))
    @rule(pick=picks, claimed=st.lists(st.tuples(picks, off), min_size=1, max_size=6), over=st.booleans())
    def extend_leases(self, pick: int, claimed: list[tuple[int, int]], over: bool) -> None:
        super().extend_leases(pick, claimed, over)
        self.held_since_now()

    def held_since_now(self) -> None:
        """What the newest dispatcher holds."""
        for receiver in self.oracle.subscribers.values():
            for at, (dispatcher, _) in receiver.in_flight.items():
                if dispatcher == self.dispatchers:
                    receiver.held_since_ms[at] = self.topic.elapsed_ms

    @rule()
    def crash(self) -> None:
        super().crash()
        # Rows that come with a negative acknowledgement are due as they come, also at a replay.
        self.oracle.due_as_they_came(self.passed_places())
        for number in self.oracle.subscribers:
            state = self.state(number)
            rows, times_ms = state.nacks.freeze().rows()
            known = dict(zip(self.places_of(rows.keys), times_ms.tolist(), strict=True))
            self.oracle.waits_again(number, known)

    def teardown(self) -> None:
        if hasattr(self, "topic"):
            self.count_off = None
            self.commit()
            times_ms = [time_ms for each in self.oracle.subscribers.values() for time_ms in each.nacked.values()]
            self.topic.now_ms = max([self.topic.now_ms, *times_ms])
        super().teardown()
