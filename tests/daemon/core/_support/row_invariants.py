"""A topic and the oracle side by side: what must hold between them, whatever has happened.

Owns: the two, and the invariants.
Does not own: what may happen (`row_machine`, `topic_machine`).
"""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant
from pyroaring import BitMap64

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import segments
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import keys_of
from storage_backends.formats.index_ids import subscription_of
from storage_backends.formats.row_columns import U64
from tests.daemon.core._support.journaled_topic import JournaledTopic
from tests.daemon.core._support.oracle import Oracle, Place


class RowInvariants(RuleBasedStateMachine):
    topic: JournaledTopic

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.dispatchers = 0

    # ---- the same in both

    def number(self, pick: int) -> int:
        return sorted(self.oracle.subscribers)[pick % len(self.oracle.subscribers)]

    def state(self, number: int) -> SubscriptionState:
        return self.topic.core.subscriptions[number]

    def places_of(self, keys: U64) -> list[Place]:
        places = self.topic.core.indexes.places
        return list(zip(places.owners(keys).tolist(), *(each.tolist() for each in places.positions(keys)), strict=True))

    def places_in(self, keys: BitMap64) -> set[Place]:
        return set(self.places_of(keys_of(keys)))

    def passed_places(self) -> set[Place]:
        return set().union(*(self.places_in(bucket.passed) for bucket in self.topic.core.indexes.buckets))

    # ---- what always holds

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "topic"):
            self.buckets_are_consistent()
            self.backlogs_are_what_is_due_owed_and_not_acknowledged()
            self.memory_for_segments_is_bounded()

    def counts_are_those_of_all_buckets(self, indexes: Indexes) -> None:
        filling = [index.mutable for index in indexes.values()]
        counts = indexes._counts
        began_ms = [bucket.first_row_at_ms for bucket in filling if bucket.first_row_at_ms is not None]
        assert counts.added_rows == sum(bucket.added_rows for bucket in filling)
        assert counts.highest_ledger_id == max(bucket.highest_ledger_id for bucket in filling)
        assert counts.first_row_at_ms == min(began_ms, default=None)
        assert indexes.has_mutable_rows == bool(began_ms)
        assert indexes.sealing == max(len(index.sealing) for index in indexes.values())
        empty = {name for index in indexes.values() for name, each in index.sealed.items() if not each.present_rows}
        assert {bucket.name for bucket in indexes.droppable()} == empty
        for index in indexes.values():
            assert all(indexes.holding(name) is index for name in index.sealed)
        assert len(counts._index_of) == len(indexes.sealed)
        readable = {bucket.name for index in indexes.values() for bucket in index.readable}
        assert {bucket.name for bucket in indexes.readable} == readable
        assert {*indexes.filled} == {bucket for bucket in indexes.memory_buckets if bucket.added_rows}

    def buckets_are_consistent(self) -> None:
        indexes = self.topic.core.indexes
        self.counts_are_those_of_all_buckets(indexes)
        for state in self.topic.core.subscriptions.values():
            assert self.topic.core.subscription(state.stored.name) is state
        assert {subscription_of(number) for number in indexes} - {0} <= self.oracle.subscribers.keys()
        assert indexes.quarantined.keys() == {*self.oracle.missing}
        for name, damaged in indexes.quarantined.items():
            assert self.places_in(damaged.present) == self.oracle.missing[name].keys()
            assert damaged.missing_rows == len(self.oracle.missing[name])
        needed = {each.bucket: each.rows for each in self.topic.core.rebuild_needed()}
        assert needed == {name: len(rows) for name, rows in self.oracle.missing.items() if rows}
        present = [place for index in indexes.values() for place in self.present_in(index)]
        assert len(present) == len(set(present)), "two buckets hold one position"
        assert set(present) == self.oracle.rows.keys()
        assert indexes.present_rows == len(present)
        waiting = {at: row for at, row in self.oracle.rows.items() if not row.passed}
        assert indexes.pending_rows == len(waiting)
        assert self.places_in(indexes.leaving) == self.oracle.leaving <= waiting.keys() | self.missing_places()
        next_due_ms = indexes.next_due_ms()
        times = [row.deliver_at_ms for at, row in waiting.items() if at not in self.oracle.leaving]
        assert next_due_ms is None or waiting
        assert not times or (next_due_ms is not None and next_due_ms <= min(times))

    def missing_places(self) -> set[Place]:
        return set().union(*self.oracle.missing.values())

    def present_in(self, index: Index) -> list[Place]:
        present: list[Place] = []
        for bucket in index.buckets:
            assert bucket.passed <= bucket.present
            assert len(bucket.present) == bucket.present_rows
            assert len(bucket.passed) == bucket.passed_rows
            assert bucket.index_id == index.index_id
            assert all(keys <= bucket.present for keys in bucket.acknowledged.values())
            present += self.places_in(bucket.present)
            for number, keys in bucket.acknowledged.items():
                assert not keys or not index.index_id, "what is acknowledged in an own index is gone"
                since_ms = self.oracle.subscribers[number].since_ms
                for at in self.places_in(keys):
                    row = self.oracle.rows[at]
                    assert number in row.acknowledged or row.deliver_at_ms <= since_ms
        assert {at[0] for at in present} <= {index.index_id}
        return present

    def backlogs_are_what_is_due_owed_and_not_acknowledged(self) -> None:
        for number, subscriber in self.oracle.subscribers.items():
            state = self.state(number)
            backlog = self.oracle.backlog(number)
            assert state.backlog == len(backlog)
            in_hand = self.places_in(state.in_hand())
            assert in_hand <= backlog.keys() | self.due_unseen(number)
            assert len(in_hand) == state.ready_rows + len(state.in_flight) + len(state.acknowledging)
            assert self.places_in(state.in_flight.keys()) == subscriber.in_flight.keys()
            assert self.places_in(state.acknowledging) == subscriber.acknowledging
            assert state.leased_rows == len(subscriber.leased())
            holders = [dispatcher for dispatcher, _ in subscriber.in_flight.values()]
            for dispatcher in subscriber.dispatchers | subscriber.leases:
                assert state.held_rows(dispatcher) == holders.count(dispatcher)
            if state.is_fed:
                in_no_hand = self.in_no_hand(number)
                assert backlog.keys() <= in_hand | in_no_hand, "nothing due is forgotten while a subscription is fed"

    def due_unseen(self, number: int) -> set[Place]:
        """What may be in a hand before the head has passed it."""
        return set()

    def in_no_hand(self, number: int) -> set[Place]:
        """What of a backlog is neither READY nor held."""
        return set()

    def memory_for_segments_is_bounded(self) -> None:
        cache = self.topic.core.indexes.cache
        held = [segments.taken_by(rows) for rows in cache._segments.values()]
        assert cache.rows == sum(held)
        assert len(held) <= 1 or cache.rows <= cache._budget_rows
        assert cache.room_rows <= cache._budget_rows
