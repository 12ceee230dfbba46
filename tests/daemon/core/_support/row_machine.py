"""A topic and the oracle side by side: rows that come, come due, are handed out and acknowledged, and crashes between.

Owns: the rules for that (what may happen), and what must hold at the end.
Does not own: trims, damage, leases and questions (`topic_machine`), what must hold after each rule (`row_invariants`),
the topic's surroundings (`journaled_topic`), and what is right (`oracle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.segments import LOADED_ROW_BYTES, SegmentRange
from storage_backends.formats import position_bitmap, requirements
from storage_backends.formats.segment import SegmentLimits
from storage_backends.formats.slot_format import GoneRecord, WaiveRecord
from tests.daemon.core._support.journaled_topic import (
    JournaledTopic,
    Position,
    Until,
    batch_of,
    claims_of,
    key_hashes_of,
    listed,
)
from tests.daemon.core._support.oracle import Claim, Place, claim_of
from tests.daemon.core._support.row_invariants import RowInvariants

U64_MAX = (1 << 64) - 1
LEDGERS = (7, 0, U64_MAX)
ENTRIES = (0, 1, 2, 65_535, 65_536, (1 << 32) - 1, 1 << 32, U64_MAX)
POSITIONS = tuple((ledger, entry) for ledger in LEDGERS for entry in ENTRIES)
START_MS = 1_000_000
# Times of rows, from now: late, now, soon, beyond the sorted horizon of a mutable bucket, and far.
DELAYS_MS = (-900_000, -5_000, -40, 0, 1, 2, 3, 10, 10, 400, 2_600, 2_600, 9_000, 500_000)
FAR_MS = 1_000_000

positions = st.sampled_from(POSITIONS)
batches = st.lists(
    st.tuples(positions, st.sampled_from(DELAYS_MS), st.sampled_from((0, 0, 3, 2**32 - 1))), min_size=1, max_size=10
)
picks = st.integers(0, 1 << 16)
# Whose rows are added: 0 for every subscription.
owners = st.sampled_from((0, 0, 0, 1, 2))


def places_in(record: GoneRecord | WaiveRecord) -> set[Place]:
    index = record.subscription_id if isinstance(record, GoneRecord) else 0
    ledger_id, entry_id = position_bitmap.positions_of(record.positions)
    return {(index, ledger, entry) for ledger, entry in zip(ledger_id.tolist(), entry_id.tolist(), strict=True)}


def id_of(key_hash: int) -> bytes:
    """The schedule id of a row that was added with this hash and with an id."""
    return b"id %d" % key_hash


class RowMachine(RowInvariants):
    """`budgets_rows`: what a run may choose as memory for segments."""

    budgets_rows: tuple[int, ...] = (1, 6, 1_000_000)

    @initialize(
        data=st.data(),
        ready_rows_max=st.sampled_from((1, 4, 1 << 30)),
        rows_max=st.sampled_from((1, 3, 1_000)),
        compatible=st.booleans(),
        subscriptions=st.sampled_from((0, 1, 2, 2)),
        shared_index=st.sampled_from((True, True, False)),
    )
    def start(
        self,
        data: st.DataObject,
        ready_rows_max: int,
        rows_max: int,
        compatible: bool,
        subscriptions: int,
        shared_index: bool,
    ) -> None:
        # Buckets of one segment have no ids, those of several have some.
        self.with_ids = rows_max < 1_000
        self.all_fit = (budget := data.draw(st.sampled_from(self.budgets_rows))) > 1_000
        self.topic = JournaledTopic(
            now_ms=START_MS,
            budget_bytes=budget * LOADED_ROW_BYTES,
            ready_rows_max=ready_rows_max,
            segment_limits=SegmentLimits(time_step_ms=1_000, rows_max=rows_max, rows_min=0),
            compatible=compatible,
            requires=requirements.SCHEDULE_IDS if self.with_ids else "",
        )
        for _ in range(subscriptions):
            self.create_subscription()
        self.topic.shared_index = self.oracle.shared_index = shared_index

    # ---- a great deal at once

    @precondition(lambda self: self.oracle.subscribers)
    @rule(batch=batches, to=owners, pick=picks, acknowledged=st.lists(picks, max_size=4))
    def rows_come_and_go(
        self, batch: list[tuple[Position, int, int]], to: int, pick: int, acknowledged: list[int]
    ) -> None:
        self.add(batch, to, relative=False, keyed=True, returned=False, now=True)
        self.topic.now_ms += 3_000
        self.drain_one(self.number(pick))
        if acknowledged and any(each.in_flight for each in self.oracle.subscribers.values()):
            self.acknowledge_what_is_in_flight(acknowledged, off_ms=0, now=True)

    @rule(batch=batches, to=owners, ahead_ms=st.sampled_from((0, FAR_MS)))
    def a_bucket_is_filled_and_sealed(self, batch: list[tuple[Position, int, int]], to: int, ahead_ms: int) -> None:
        self.add(batch, to, relative=False, keyed=False, returned=False, now=True)
        self.topic.begin_seal()
        while self.topic.seals:
            self.finish_a_seal(ahead_ms)

    # ---- adds

    @rule(
        batch=batches,
        to=owners,
        relative=st.booleans(),
        keyed=st.booleans(),
        returned=st.booleans(),
        now=st.booleans(),
    )
    def add(
        self, batch: list[tuple[Position, int, int]], to: int, relative: bool, keyed: bool, returned: bool, now: bool
    ) -> None:
        """`to`: one of the subscriptions, counted from 1, or 0 for every one."""
        if self.oracle.is_staged([at for at, _, _ in batch], to_leave=True):
            self.commit()
        to = self.number(to) if to and self.oracle.subscribers else 0
        now_ms = self.topic.now_ms
        if relative:
            batch = [(at, max(0, delay_ms), key_hash) for at, delay_ms, key_hash in batch]
        rows = [(at, max(0, now_ms + delay_ms), key_hash if keyed else 0) for at, delay_ms, key_hash in batch]
        expected = self.oracle.add(rows, to, now_ms=now_ms, return_already_due=returned)
        outcome = self.topic.stage_add(
            batch_of(
                [at for at, _, _ in rows],
                deliver_at_ms=None if relative else [deliver_at_ms for _, deliver_at_ms, _ in rows],
                delay_ms=[delay_ms for _, delay_ms, _ in batch] if relative else None,
                key_hash=[key_hash for _, _, key_hash in rows] if keyed else None,
                return_already_due=returned,
                schedule_ids=self.ids_of([key_hash for _, _, key_hash in rows]) if keyed else None,
            ),
            to,
        )
        assert outcome.accepted == expected.accepted
        assert outcome.duplicates == expected.duplicates
        assert outcome.late_on_arrival == expected.late
        assert outcome.returned_index.tolist() == expected.returned
        assert outcome.raised_index.tolist() == expected.raised
        assert outcome.raised_deliver_at_ms.tolist() == expected.raised_deliver_at_ms
        if now:
            self.commit()

    @rule()
    def commit(self) -> None:
        self.topic.commit()
        self.oracle.commit()

    # ---- time

    @rule(step_ms=st.sampled_from((1, 5, 50, 700, 3_000, 20_000)))
    def time_passes(self, step_ms: int) -> None:
        self.topic.now_ms += step_ms

    @rule(step_ms=st.sampled_from((3, 500, 8_000)))
    def the_clock_steps_back(self, step_ms: int) -> None:
        self.topic.now_ms -= step_ms

    @rule(limit=st.sampled_from((1, 3, 1_000)))
    def pass_due(self, limit: int) -> None:
        self.passing(lambda: self.topic.pass_due(limit))

    def passing(self, action: Callable[[], object]) -> None:
        """Rows may be passed: those that are, are due."""
        before = self.passed_places()
        action()
        # A message of a batch is due as it comes.
        fresh = {at for at in self.passed_places() - before if not self.oracle.rows[at].passed}
        for at in fresh:
            assert self.oracle.rows[at].deliver_at_ms <= self.topic.now_ms, f"{at} is passed early"
        self.oracle.passed(fresh)

    # ---- buckets

    @rule()
    def cut_for_a_seal(self) -> None:
        if len(self.topic.seals) < 3:
            self.topic.begin_seal()

    @precondition(lambda self: self.topic.seals)
    @rule(ahead_ms=st.sampled_from((-FAR_MS, 0, 500, FAR_MS)))
    def finish_a_seal(self, ahead_ms: int) -> None:
        self.topic.finish_seal(self.topic.write_seal(), near_ms=max(0, self.topic.now_ms + ahead_ms))

    @rule(ahead_ms=st.sampled_from((0, 500, FAR_MS)), pick=picks)
    def load_what_is_wanted(self, ahead_ms: int, pick: int) -> None:
        wanted = self.topic.core.indexes.wanted_segments(self.topic.now_ms + ahead_ms)
        if wanted:
            pick %= len(wanted)
            self.topic.load(wanted[pick:] + wanted[:pick])

    @rule(pick=picks)
    def a_segment_is_forgotten(self, pick: int) -> None:
        sealed = self.topic.core.indexes.sealed
        every = [(name, number) for name, bucket in sealed.items() for number in range(len(bucket.table))]
        if every:
            self.topic.core.indexes.cache.discard(*every[pick % len(every)])

    @rule()
    def drop_empty_buckets(self) -> None:
        self.topic.drop_empty()

    # ---- subscriptions

    @rule(meanwhile_ms=st.sampled_from((0, 3, 700)))
    def create_subscription(self, meanwhile_ms: int = 0) -> None:
        if len(self.oracle.subscribers) == 3:
            return
        self.oracle.commit()
        passed_before: set[Place] = set()

        def time_passes() -> None:
            passed_before.update(self.passed_places())
            self.topic.now_ms += meanwhile_ms
            coming = self.topic.core._coming
            assert coming is not None
            self.oracle.coming_since_ms = coming.stored.since_ms
            if meanwhile_ms:
                self.passing(lambda: self.topic.pass_due(1_000))
            self.oracle.coming_since_ms = None

        now_ms = self.topic.now_ms
        state = self.topic.create_subscription(time_passes)
        since_ms = state.stored.since_ms
        self.oracle.commit()
        assert since_ms == (now_ms if self.oracle.subscribers else 0)
        for at in passed_before & self.oracle.rows.keys() if since_ms else ():
            if not at[0]:
                self.oracle.rows[at].acknowledged.add(state.subscription_id)
        self.oracle.subscribe(state.subscription_id, since_ms)

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, until=st.sampled_from((None, None, None, *Until, *[Until.SERVED] * 3)))
    def delete_subscription(self, pick: int, until: Until | None) -> None:
        if until is None:
            return
        number = self.number(pick)
        self.oracle.commit()
        self.passing(lambda: self.topic.commit())
        gone: list[Any] = []
        self.passing(lambda: gone.extend(self.topic.gone_with(number)))
        named = set().union(*map(places_in, gone))
        others = self.oracle.subscribers.keys() - {number}
        everything = [self.oracle.rows, *self.oracle.missing.values()]
        for at, row in [each for rows in everything for each in rows.items()]:
            still_owed = any(self.oracle.may_be_owed(other, at, row) for other in others)
            still_owed = still_owed or (not others and not row.passed)
            assert (at in named) != still_owed or at[0], f"{at} is owed to somebody: {still_owed}"
        self.topic.delete_subscription(number, gone, until=until)
        self.oracle.leave(named, set(), None)
        self.oracle.commit()
        if until is not Until.GONE:
            self.oracle.delete_subscription(number)
        if until is not Until.SERVED:
            self.crash()

    @rule(shared_index=st.booleans())
    def the_policy_changes(self, shared_index: bool) -> None:
        self.topic.shared_index = self.oracle.shared_index = shared_index

    # ---- dispatchers

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks)
    def open(self, pick: int) -> None:
        self.dispatchers += 1
        number = self.number(pick)
        self.topic.core.open(self.state(number), self.dispatchers)
        self.oracle.subscribers[number].dispatchers.add(self.dispatchers)

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, also=st.sets(positions, max_size=3), off_ms=st.sampled_from((0, 0, 1)))
    def open_again_with_what_is_held(self, pick: int, also: set[Position], off_ms: int) -> None:
        number = self.number(pick)
        state, subscriber = self.state(number), self.oracle.subscribers[number]
        held = [claim_of(at, deliver_at_ms) for at, (_, deliver_at_ms) in subscriber.in_flight.items()]
        rows = {at[1:]: row for at, row in sorted(self.oracle.rows.items()) if at[0] in (0, number)}
        others = [Claim(at, rows[at].deliver_at_ms + off_ms if at in rows else 5) for at in also]
        declared = {(claim.at, claim.batch_index): claim for claim in [*held, *others]}
        for dispatcher in list(subscriber.dispatchers):
            self.close_one(number, dispatcher)
        self.passing(self.topic.pass_all)
        found = self.topic.claimed(state, claims_of(declared.values())).rows
        self.dispatchers += 1
        self.topic.core.open(state, self.dispatchers)
        are_held = self.topic.core.hold(state, self.dispatchers, found, elapsed_ms=self.topic.elapsed_ms)
        subscriber.dispatchers.add(self.dispatchers)
        # What a lease holds is taken from it.
        expected = self.oracle.claimed(number, declared.values())
        assert set(self.places_of(found.keys)) == expected
        expected = self.oracle.in_hand_when_claimed(number, expected)
        assert np.count_nonzero(are_held) == len(expected)
        for at in expected:
            subscriber.in_flight[at] = (self.dispatchers, self.oracle.rows[at].deliver_at_ms)

    @rule(pick=picks, which=picks)
    def close(self, pick: int, which: int) -> None:
        opened = [(number, each) for number, sub in self.oracle.subscribers.items() for each in sorted(sub.dispatchers)]
        if opened:
            self.close_one(*opened[which % len(opened)])

    def close_one(self, number: int, dispatcher: int) -> None:
        self.state(number).close(dispatcher)
        self.oracle.close(number, dispatcher)

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, limit=st.sampled_from((1, 2, 1_000)), load=st.booleans())
    def catch_up(self, pick: int, limit: int, load: bool) -> None:
        state = self.state(self.number(pick))
        needed = self.topic.core.catch_up(state, limit)
        if load:
            self.topic.load(needed)

    @precondition(lambda self: any(each.dispatchers for each in self.oracle.subscribers.values()))
    @rule(which=picks, limit=st.sampled_from((1, 2, 5, 1_000)))
    def hand_out(self, which: int, limit: int) -> None:
        opened = [(number, each) for number, sub in self.oracle.subscribers.items() for each in sorted(sub.dispatchers)]
        number, dispatcher = opened[which % len(opened)]
        rows = self.topic.hand_out(self.state(number), dispatcher, limit)
        assert len(rows) <= limit
        self.handed_out(number, dispatcher, rows)

    def ids_of(self, key_hashes: list[int]) -> list[bytes] | None:
        """The ids of rows with key hashes, if rows have ids: each is known by its hash, which the oracle knows."""
        return list(map(id_of, key_hashes)) if self.with_ids else None

    def handed_out(self, number: int, dispatcher: int, rows: KeyedRows) -> None:
        ready = self.oracle.ready(number)
        subscriber = self.oracle.subscribers[number]
        times, places = rows.rows.deliver_at_ms.tolist(), self.places_of(rows.keys)
        hashes, ids = key_hashes_of(rows), rows.rows.listed_ids()
        for at, deliver_at_ms, key_hash, schedule_id in zip(places, times, hashes, ids, strict=True):
            assert at not in subscriber.in_flight, f"{at} is handed out to two"
            assert at in ready, f"{at} is handed out, but not in the backlog"
            row = ready[at]
            assert deliver_at_ms == row.deliver_at_ms, f"{at} of {row.deliver_at_ms} comes as of {deliver_at_ms}"
            assert key_hash == row.key_hash, f"{at} comes with key hash {key_hash}, not {row.key_hash}"
            may_have = {id_of(key_hash)} if self.with_ids else set()
            # A row with hash 0 may have been added without hashes and ids.
            may_have |= set() if self.with_ids and key_hash else {b""}
            assert schedule_id in may_have, f"{at} with key hash {key_hash} comes with id {schedule_id!r}"
            subscriber.in_flight[at] = (dispatcher, deliver_at_ms)

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        self.drain_one(self.number(pick))

    def drain_one(self, number: int) -> None:
        """With unlimited permits, everything that is due is handed out, in order."""
        state, subscriber = self.state(number), self.oracle.subscribers[number]
        if not subscriber.dispatchers:
            self.dispatchers += 1
            self.topic.core.open(state, self.dispatchers)
            subscriber.dispatchers.add(self.dispatchers)
        in_order = (state.is_fed or not len(state.in_flight)) and not state.ready_rows and self.all_fit
        in_order = in_order and not any(len(bucket.late) for bucket in self.topic.core.indexes.sealed.values())
        if in_order:
            self.load_all_that_is_due()
        dispatcher = min(subscriber.dispatchers)
        batches: list[KeyedRows] = []
        self.passing(lambda: batches.extend(self.topic.drain(state, dispatcher)))
        due = {at: row for at, row in self.oracle.rows.items() if row.deliver_at_ms <= self.topic.now_ms}
        waiting = {at for at, row in due.items() if not row.passed}
        assert waiting <= self.oracle.leaving, "due, and never passed"
        for rows in batches:
            self.handed_out(number, dispatcher, rows)
        # What came back once need not be there until its row is due again: the clock stepped back before a crash.
        left = {at for at, row in self.oracle.ready(number).items() if row.passed}
        assert not left, f"{left} are due, owed, and not handed out"
        if in_order:
            self.come_in_order(number, batches)

    def come_in_order(self, number: int, batches: Sequence[KeyedRows]) -> None:
        handed = [row for rows in batches for row in listed(rows)]
        assert handed == sorted(handed)

    def load_all_that_is_due(self) -> None:
        """A bucket that waits for a segment is overtaken by the others."""
        for name, bucket in self.topic.core.indexes.sealed.items():
            for number in range(bucket.head.number, len(bucket.table)):
                if bucket.table.min_ms[number] <= self.topic.now_ms:
                    self.topic.load([SegmentRange(name, number, number)])

    # ---- acknowledgements

    @precondition(lambda self: any(each.in_flight for each in self.oracle.subscribers.values()))
    @rule(which=st.lists(picks, min_size=1, max_size=8), off_ms=st.sampled_from((0, 0, 1)), now=st.booleans())
    def acknowledge_what_is_in_flight(self, which: list[int], off_ms: int, now: bool) -> None:
        held = [(number, at) for number, sub in self.oracle.subscribers.items() for at in sorted(sub.in_flight)]
        chosen = [held[pick % len(held)] for pick in which]
        for number in sorted({number for number, _ in chosen}):
            in_flight = self.oracle.subscribers[number].in_flight
            self.acknowledge(number, [claim_of(at, in_flight[at][1] + off_ms) for each, at in chosen if each == number])
        if now:
            self.commit()

    @precondition(lambda self: self.oracle.subscribers)
    @rule(pick=picks, claimed=st.lists(st.tuples(positions, st.sampled_from((0, 0, 1))), min_size=1, max_size=6))
    def acknowledge_anything(self, pick: int, claimed: list[tuple[Position, int]]) -> None:
        number = self.number(pick)
        rows = {at[1:]: row for at, row in sorted(self.oracle.rows.items()) if at[0] in (0, number)}
        claims = [Claim(at, rows[at].deliver_at_ms + off_ms if at in rows else 9) for at, off_ms in claimed]
        self.acknowledge(number, claims)

    def acknowledge(self, number: int, claims: Sequence[Claim]) -> None:
        expected = self.oracle.acknowledge(number, claims)
        assert self.topic.stage_acknowledge(self.state(number), claims) == expected

    # ---- crashes

    @rule()
    def checkpoint(self) -> None:
        self.topic.take_checkpoint()

    @precondition(lambda self: self.topic.seals)
    @rule()
    def crash_after_a_seal_is_committed(self) -> None:
        self.topic.write_seal()
        self.crash()

    @rule()
    def crash(self) -> None:
        self.topic.crash_and_recover()
        self.oracle.crash()
        index = self.topic.core.index
        known: dict[int, set[Place]] = {number: set() for number in self.oracle.subscribers}
        for bucket in (*index.buckets, *index.quarantined.values()):
            for number, keys in bucket.acknowledged.items():
                known[number] |= self.places_in(keys)
        self.oracle.learn_again(known)

    def teardown(self) -> None:
        """Everything comes to its end: handed out, acknowledged, gone, and no memory is held for it."""
        if not hasattr(self, "topic"):
            return
        if not self.oracle.subscribers:
            self.create_subscription()
        self.commit()
        self.topic.now_ms = max([self.topic.now_ms, *(row.deliver_at_ms for row in self.oracle.rows.values())]) + 1
        for number in list(self.oracle.subscribers):
            self.drain_one(number)
            in_flight = self.oracle.subscribers[number].in_flight
            self.acknowledge(number, [claim_of(at, held[1]) for at, held in in_flight.items()] or [Claim((1, 1), 1)])
            self.commit()
            self.all_holds()
        while self.topic.seals:
            self.finish_a_seal(0)
        while self.oracle.subscribers:
            self.delete_subscription(0, Until.SERVED)
        assert not self.oracle.rows
        self.topic.drop_empty()
        self.topic.seal()
        assert list(self.topic.core.indexes) == [0]
        index = self.topic.core.index
        assert not index.sealed
        damaged = {page for bucket in index.quarantined.values() for page in bucket.pages}
        assert set(index.pages._index.ordinals().tolist()) == damaged, "pages are held of which nothing is left"
        assert index.cache.rows == 0
        assert index.pending_rows == 0
