"""A topic and the oracle side by side, under everything that may happen to them, in any order.

Owns: the rules for trims, damage, leases and what is contained, on top of those for rows.
Does not own: rows that come and go, crashes (`row_machine`), and rows that leave before they are due
(`withdrawing_machine`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from daemon.core.decisions import departures
from daemon.core.decisions.departures import LedgerRanges
from storage_backends.formats.index_ids import is_of_batch_parts
from storage_backends.formats.manifest import SubscriptionPolicy
from storage_backends.formats.slot_format import GoneRecord, Record, WaiveRecord
from tests.daemon.core._support.journaled_topic import Position, claims_of
from tests.daemon.core._support.oracle import Claim, Place, Ranges, claim_of, places_named
from tests.daemon.core._support.row_machine import ENTRIES, LEDGERS, batches, owners, picks, places_in, positions
from tests.daemon.core._support.withdrawing_machine import WithdrawingMachine
from tests.daemon.core.index import test_containment

trims = st.one_of(
    st.none(),
    positions,
    st.dictionaries(st.sampled_from(LEDGERS), st.sampled_from(ENTRIES), min_size=1, max_size=3),
)


def ledger_ranges(ranges: Ranges) -> LedgerRanges | None:
    if ranges is None:
        return None
    named = [ranges] if isinstance(ranges, tuple) else list(ranges.items())
    ledgers, entries = (np.array(column, np.uint64) for column in zip(*named, strict=True))
    return LedgerRanges(ledgers, entries, all_lower_ledgers=isinstance(ranges, tuple))


class TopicMachine(WithdrawingMachine):
    """Everything that may happen to a topic."""

    # ---- trims and damage

    @rule(ranges=trims, pick=picks, whole=st.booleans(), slots=st.sampled_from((0, 1, 1_000, 1_000, 1_000)))
    def trim(self, ranges: Ranges, pick: int, whole: bool, slots: int) -> None:
        """`slots`: how many of them are written before a crash."""
        number = None if whole or not self.oracle.subscribers else self.number(pick)
        self.oracle.commit()
        decided = list(self.topic.trim(ledger_ranges(ranges), number))
        gone, waived = self.oracle.trimmed(ranges, number)
        assert sum(departure.rows for departure in decided) == len(gone | waived)
        left = gone | waived
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(departures, "SLOT_ROWS_MAX", 3)
            for count, records in enumerate(itertools.chain.from_iterable(each.slots() for each in decided)):
                if count == slots:
                    self.crash()
                    return
                assert sum(record.row_count for record in records) <= 3
                self.topic.commit_together(records)
                left -= self.departed(records, gone, waived, number)
                self.all_holds()
        assert not left, f"{left} are not trimmed"

    def departed(
        self, records: Sequence[Record], gone: set[Place], waived: set[Place], number: int | None
    ) -> set[Place]:
        """What the records name leaves the oracle, too; it is what was expected."""
        all_named: set[Place] = set()
        for record in records:
            assert isinstance(record, GoneRecord | WaiveRecord)
            named = places_in(record)
            assert named <= (gone if isinstance(record, GoneRecord) else waived)
            all_named |= named
        self.oracle.leave(all_named & gone, all_named & waived, number)
        return all_named

    @precondition(lambda self: self.topic.core.indexes.sealed)
    @rule(pick=picks, really=st.sampled_from((False, True)))
    def a_bucket_is_damaged(self, pick: int, really: bool) -> None:
        sealed = self.topic.core.indexes.sealed
        if really:
            name = sorted(sealed)[pick % len(sealed)]
            index, held = sealed[name].index_id, self.places_in(sealed[name].present)
            self.topic.quarantine(name)
            self.oracle.quarantine(name, index, held)

    # ---- contents

    @rule(
        asked=st.lists(test_containment.ranges, min_size=1, max_size=4),
        pick=picks,
        ranges_max=st.sampled_from((1, 100)),
    )
    def contains(self, asked: list[test_containment.Range], pick: int, ranges_max: int) -> None:
        number = None if pick % 2 or not self.oracle.subscribers else self.number(pick)
        state = None if number is None else self.state(number)
        pending, due, calls = test_containment.asked_until_done(self.topic, asked, state, ranges_max=ranges_max)
        rows = {
            at: row
            for at, row in self.oracle.rows.items()
            if not is_of_batch_parts(at[0]) and (number is None or self.oracle.may_be_owed(number, at, row))
        }
        passed = {at[1:] for at, row in rows.items() if row.passed}
        waiting = {at[1:] for at, row in rows.items() if not row.passed} - passed
        test_containment.check(pending, waiting, asked, calls=calls)
        test_containment.check(due, passed, asked, calls=calls)

    # ---- leases

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, limit=st.sampled_from((1, 2, 1_000)))
    def get(self, pick: int, limit: int) -> None:
        """Rows are leased to a puller; somebody must listen."""
        number = self.number(pick)
        state, subscriber = self.state(number), self.oracle.subscribers[number]
        if not subscriber.dispatchers:
            self.open(pick)
        self.passing(self.topic.pass_all)
        self.topic.catch_up(state)
        self.dispatchers += 1
        rows = self.topic.hand_out(state, self.dispatchers, limit)
        self.topic.catch_up(state)
        self.handed_out(number, self.dispatchers, rows)
        if len(rows):
            subscriber.leases.add(self.dispatchers)

    @precondition(lambda self: any(each.leases for each in self.oracle.subscribers.values()))
    @rule(which=picks)
    def a_lease_ends(self, which: int) -> None:
        leases = [(number, each) for number, sub in self.oracle.subscribers.items() for each in sorted(sub.leases)]
        number, lease = leases[which % len(leases)]
        self.end_lease(number, lease)

    def end_lease(self, number: int, lease: int) -> None:
        held = {at for at, each in self.oracle.subscribers[number].in_flight.items() if each[0] == lease}
        assert self.state(number).return_held(lease) == len(held)
        for at in held:
            del self.oracle.subscribers[number].in_flight[at]
        self.oracle.subscribers[number].leases.discard(lease)

    @precondition(lambda self: any(each.leases for each in self.oracle.subscribers.values()))
    @rule(
        pick=picks,
        claimed=st.lists(st.tuples(picks, st.sampled_from((0, 0, 1))), min_size=1, max_size=6),
        over=st.booleans(),
    )
    def extend_leases(self, pick: int, claimed: list[tuple[int, int]], over: bool) -> None:
        numbers = sorted(number for number, each in self.oracle.subscribers.items() if each.leases)
        number = numbers[pick % len(numbers)]
        subscriber = self.oracle.subscribers[number]
        held = sorted(subscriber.in_flight) or [(0, 1, 1)]
        claims = {held[which % len(held)]: off_ms for which, off_ms in claimed}
        times = [claim_of(at, subscriber.in_flight.get(at, (0, 5))[1] + off_ms) for at, off_ms in claims.items()]
        named = list({(claim.at, claim.batch_index): claim for claim in times}.values())
        self.dispatchers += 1
        expected = self.leased_of(number, named)
        assert self.move_held(number, named) == len(expected)
        for at in expected:
            subscriber.in_flight[at] = (self.dispatchers, subscriber.in_flight[at][1])
        if expected:
            subscriber.leases.add(self.dispatchers)
        if over:
            self.end_lease(number, self.dispatchers)

    def move_held(self, number: int, claims: list[Claim]) -> int:
        leases = self.oracle.subscribers[number].leases
        left = self.topic.core.move_held(
            self.state(number), claims_of(claims), leases, self.dispatchers, elapsed_ms=self.topic.elapsed_ms
        )
        return len(claims) - len(left)

    def leased_of(self, number: int, claims: list[Claim]) -> set[Place]:
        """What of the claims is leased with that time, of each the one that is looked for first."""
        subscriber = self.oracle.subscribers[number]
        leased = subscriber.leased()
        named = [
            [
                at
                for at in places_named(number, claim)
                if at in leased and subscriber.in_flight[at][1] == claim.deliver_at_ms
            ]
            for claim in claims
        ]
        return {places[0] for places in named if places}

    @precondition(lambda self: any(each.dispatchers for each in self.oracle.subscribers.values()))
    @rule(which=picks, in_flight_rows_max=st.sampled_from((1, 3, 8)))
    def hand_out_under_a_limit(self, which: int, in_flight_rows_max: int) -> None:
        opened = [(number, each) for number, sub in self.oracle.subscribers.items() for each in sorted(sub.dispatchers)]
        number, dispatcher = opened[which % len(opened)]
        state = self.state(number)
        before, stored = len(state.in_flight), state.stored
        policy = SubscriptionPolicy(in_flight_rows_max=in_flight_rows_max)
        state.stored = dataclasses.replace(stored, policy=policy)
        available, ready = state.available_rows, state.ready_rows
        rows = self.topic.hand_out(state, dispatcher, 1_000)
        state.stored = stored
        assert len(rows) == available == min(ready, max(0, in_flight_rows_max - before))
        self.handed_out(number, dispatcher, rows)

    @precondition(lambda self: self.oracle.subscribers)
    @rule(batch=batches, to=owners, pick=picks, which=picks)
    def rows_are_leased_and_come_back(
        self, batch: list[tuple[Position, int, int]], to: int, pick: int, which: int
    ) -> None:
        self.add(batch, to, relative=False, keyed=True, returned=False, now=True)
        self.topic.now_ms += 3_000
        self.get(pick, 1_000)
        if self.oracle.subscribers[self.number(pick)].leases:
            self.a_lease_ends(which)
