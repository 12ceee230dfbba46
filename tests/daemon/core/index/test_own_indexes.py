"""Rows for one subscription beside the shared index, one story at a time; subscriptions come and go meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.bucket import RebuildNeeded
from daemon.core.index.containment import EntryRanges
from daemon.core.index.segments import LOADED_ROW_BYTES
from daemon.errors import InvalidArgument, QuotaExceeded
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.formats.slot_format import AcknowledgeRecord, GoneRecord
from tests.daemon.core._support.journaled_topic import LIMITS, JournaledTopic, Position, batch_of, claims_of, listed
from tests.daemon.core.decisions.test_topic import NOW_MS, P, Q, R, all_of, handed, opened, with_subscriptions
from tests.daemon.core.decisions.test_trimming import upto
from tests.daemon.core.index import test_containment


def waiting_in(topic: JournaledTopic) -> dict[int, set[Position]]:
    """The positions that are not gone, by index; indexes without any are left out."""
    found: dict[int, set[Position]] = {}
    for number, index in topic.core.indexes.items():
        for bucket in index.buckets:
            columns = index.pages.positions(np.array(list(bucket.present), np.uint64))
            found.setdefault(number, set()).update(zip(*(column.tolist() for column in columns), strict=True))
    return {number: places for number, places in found.items() if places}


def without_sharing(count: int) -> JournaledTopic:
    topic = with_subscriptions(count)
    topic.shared_index = False
    return topic


def crashed(topic: JournaledTopic, *, checkpoint: bool) -> None:
    if checkpoint:
        topic.take_checkpoint()
    topic.crash_and_recover()


# ---- whose a row is


def test_a_row_for_one_subscription_is_owed_to_it_alone_whatever_its_time_and_gone_when_it_acknowledged_it() -> None:
    topic = with_subscriptions(2)
    one, two = opened(topic, 1), opened(topic, 2)
    assert one.stored.since_ms < two.stored.since_ms
    early_ms = two.stored.since_ms - 5
    outcome = topic.add([P], early_ms, 2)
    assert (outcome.accepted, outcome.raised_index.tolist()) == (1, [])
    assert handed(topic, one) == []
    assert handed(topic, two) == [(early_ms, *P)]
    assert (one.backlog, two.backlog) == (0, 1)
    assert topic.acknowledge(two, [(P, early_ms)]) == 0
    assert (two.backlog, waiting_in(topic)) == (0, {})


def test_a_position_may_have_a_row_in_each_index_and_is_a_duplicate_only_where_it_has_one() -> None:
    topic = with_subscriptions(2)
    assert topic.add([P], NOW_MS + 5).accepted == 1
    assert topic.add([P, Q], NOW_MS + 6, 1).accepted == 2
    again = topic.add([P, Q, R], NOW_MS + 7, 1)
    assert (again.accepted, again.duplicates) == (1, 2)
    assert topic.add([Q], NOW_MS + 8).accepted == 1
    assert waiting_in(topic) == {0: {P, Q}, 1: {P, Q, R}}


def test_what_is_staged_for_one_subscription_is_a_duplicate_for_it_and_not_for_the_others() -> None:
    topic = with_subscriptions(2)
    batch = batch_of([P], deliver_at_ms=[NOW_MS + 5])
    assert [topic.stage_add(batch, number).accepted for number in (1, 0, 2, 1, 0, 2)] == [1, 1, 1, 0, 0, 0]
    topic.commit()
    assert waiting_in(topic) == {0: {P}, 1: {P}, 2: {P}}


def test_of_two_rows_of_one_position_and_time_each_acknowledgement_is_for_one_the_shared_one_first() -> None:
    topic = with_subscriptions(2)
    topic.add([P], NOW_MS)
    topic.add([P], NOW_MS, 1)
    one = opened(topic, 1)
    assert handed(topic, one) == [(NOW_MS, *P)] * 2
    assert topic.acknowledge(one, [(P, NOW_MS)]) == 0
    assert (one.backlog, waiting_in(topic)) == (1, {0: {P}, 1: {P}})
    assert topic.acknowledge(one, [(P, NOW_MS), (P, NOW_MS)]) == 1
    assert (one.backlog, waiting_in(topic)) == (0, {0: {P}})
    two = opened(topic, 2)
    topic.acknowledge(two, all_of(handed(topic, two)))
    assert waiting_in(topic) == {}


def test_an_acknowledgement_says_in_which_index_its_rows_are() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS)
    topic.add([P, Q], NOW_MS, 1)
    one = opened(topic, 1)
    handed(topic, one)
    records, rest = topic.core.acknowledging.stage(one, claims_of([(Q, NOW_MS), (P, NOW_MS), (P, NOW_MS), (R, 5)]))
    named = [(bool(record.index_id), record.rows.entry_id.tolist()) for record in records]
    assert (named, len(rest)) == ([(False, [P[1]]), (True, [Q[1], P[1]])], 1)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_ready_and_not_in_flight_is_acknowledged_in_both_indexes(sealed: bool) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    topic.add([P, R], [NOW_MS, NOW_MS], 1)
    if sealed:
        topic.seal(near_ms=0)
    topic.pass_all()
    one = topic.core.subscriptions[1]
    assert topic.acknowledge(one, [(R, NOW_MS), (P, NOW_MS), (P, NOW_MS + 1), (Q, NOW_MS + 9)]) == 2
    assert waiting_in(topic) == {0: {P, Q}, 1: {P}}
    assert topic.acknowledge(one, [(P, NOW_MS), (P, NOW_MS)]) == 1
    assert (one.backlog, waiting_in(topic)) == (0, {0: {P, Q}})


# ---- without a shared index


def test_without_a_shared_index_a_row_is_copied_to_each_subscription_and_gone_from_each_by_itself() -> None:
    topic = without_sharing(2)
    assert topic.add([P, Q], NOW_MS + 5).accepted == 2
    assert waiting_in(topic) == {1: {P, Q}, 2: {P, Q}}
    assert topic.core.indexes.pending_rows == 4
    topic.now_ms += 5
    one, two = opened(topic, 1), opened(topic, 2)
    topic.acknowledge(one, all_of(handed(topic, one)))
    assert waiting_in(topic) == {2: {P, Q}}
    assert handed(topic, two) == [(NOW_MS + 5, *P), (NOW_MS + 5, *Q)]


def test_without_a_shared_index_a_row_is_stored_where_it_is_missing_and_a_duplicate_if_nobody_lacks_it() -> None:
    topic = without_sharing(2)
    topic.add([P], NOW_MS + 5, 1)
    first = topic.add([P, Q, Q], [NOW_MS + 6, NOW_MS + 7, NOW_MS + 8])
    assert (first.accepted, first.duplicates) == (2, 1)
    assert topic.add([P, Q], NOW_MS + 9).duplicates == 2
    topic.now_ms += 9
    assert handed(topic, opened(topic, 1)) == [(NOW_MS + 5, *P), (NOW_MS + 7, *Q)]
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 6, *P), (NOW_MS + 7, *Q)]


def test_without_a_shared_index_a_request_stores_no_more_rows_than_any_other_may() -> None:
    topic = without_sharing(3)
    most = LIMITS.rows_max // 3
    with pytest.raises(InvalidArgument, match=f"{most + 1} rows, each for 3 subscriptions"):
        topic.add([(1, entry) for entry in range(most + 1)], NOW_MS + 10)
    assert waiting_in(topic) == {}
    topic.add([(1, 1)], NOW_MS + 10, 1)
    assert waiting_in(topic) == {1: {(1, 1)}}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
def test_what_is_refused_or_returned_again_and_again_takes_no_memory(shared: bool) -> None:
    topic = without_sharing(3)
    topic.shared_index = shared
    topic.add([(0, 0)], NOW_MS + 10)
    before = len(topic.core.indexes.places)

    def refuse(accepted: Sequence[Rows]) -> None:
        raise QuotaExceeded("full", retry_after_ms=1)

    for ledger in range(1, 100):
        batch = batch_of([(ledger, 0), (ledger + 1, 0), (0, 0)], deliver_at_ms=[NOW_MS + 10] * 3)
        with pytest.raises(QuotaExceeded):
            topic.core.stage_add(batch, now_ms=NOW_MS, request_limits=LIMITS, shared_index=shared, admit=refuse)
        late = batch_of([(ledger, 0), (ledger + 1, 0)], deliver_at_ms=[NOW_MS] * 2, return_already_due=True)
        assert topic.stage_add(late).accepted == 0
    assert len(topic.core.indexes.places) == before
    held = {number: len(index.pages) for number, index in topic.core.indexes.items() if len(index.pages)}
    assert held == ({0: 1} if shared else {1: 1, 2: 1, 3: 1})


def test_without_a_shared_index_all_rows_of_a_request_are_in_one_slot() -> None:
    topic = without_sharing(3)
    slot = topic.slot
    topic.add([P], NOW_MS + 5)
    assert (topic.slot, len(waiting_in(topic))) == (slot + 1, 3)


def test_without_a_shared_index_and_without_a_subscription_rows_wait_in_the_shared_index_for_the_first_one() -> None:
    topic = without_sharing(0)
    topic.add([P], NOW_MS)
    assert waiting_in(topic) == {0: {P}}
    assert topic.core.indexes.due_rows == 0
    topic.pass_all()
    assert (topic.core.indexes.due_rows, topic.core.indexes.pending_rows) == (1, 0), "counted, whoever listens"
    topic.create_subscription()
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *P)]


def test_a_row_that_is_due_is_returned_once_and_stored_in_no_index_and_one_that_is_not_in_each() -> None:
    topic = without_sharing(2)
    topic.add([P], NOW_MS + 5, 1)
    batch = batch_of([Q, P, R], deliver_at_ms=[NOW_MS + 1, NOW_MS - 1, NOW_MS], return_already_due=True)
    outcome = topic.stage_add(batch)
    assert (outcome.accepted, outcome.duplicates, outcome.late_on_arrival) == (1, 0, 2)
    assert outcome.returned_index.tolist() == [1, 2]
    topic.commit()
    assert waiting_in(topic) == {1: {P, Q}, 2: {Q}}
    assert all(
        len(index.pages) == len({at[0] for at in waiting_in(topic).get(number, ())})
        for number, index in topic.core.indexes.items()
    )


# ---- delivering


def test_what_is_due_in_both_indexes_is_handed_out_in_one_order() -> None:
    topic = with_subscriptions(1)
    topic.add([(7, entry) for entry in range(0, 20, 2)], [NOW_MS + entry for entry in range(0, 20, 2)])
    topic.add([(7, entry) for entry in range(1, 20, 2)], [NOW_MS + entry for entry in range(1, 20, 2)], 1)
    topic.seal(near_ms=0)
    topic.add([(8, 1)], NOW_MS + 5, 1)
    topic.now_ms += 30
    one = opened(topic, 1)
    rows = handed(topic, one)
    assert rows == sorted(rows)
    assert len(rows) == 21


def test_a_subscription_whose_queue_is_full_reads_both_indexes_again() -> None:
    topic = JournaledTopic(
        now_ms=NOW_MS,
        ready_rows_max=3,
        budget_bytes=5 * LOADED_ROW_BYTES,
        segment_limits=SegmentLimits(time_step_ms=1_000, rows_max=2, rows_min=0),
    )
    topic.create_subscription()
    one = opened(topic, 1)
    topic.now_ms += 1
    for round_ms in range(3):
        own, shared = ([(ledger, 10 * round_ms + entry) for entry in range(4)] for ledger in (7, 8))
        topic.add(own, NOW_MS + 1 + round_ms, 1)
        topic.add(shared, NOW_MS + 1 + round_ms)
        if round_ms != 1:
            topic.seal(near_ms=0)
        topic.now_ms += 1
        topic.pass_all()
    rows = handed(topic, one)
    assert (len(rows), len(set(rows)), one.backlog) == (24, 24, 24)
    topic.acknowledge(one, all_of(rows))
    assert (one.backlog, waiting_in(topic)) == (0, {})


def test_what_a_dispatcher_held_of_both_indexes_stays_with_it() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS)
    topic.add([P, Q], [NOW_MS, NOW_MS], 1)
    one = opened(topic, 1)
    held = handed(topic, one)
    one.close(1)
    found = topic.claimed(one, claims_of(all_of(held))).rows
    assert sorted(listed(found)) == sorted(held)
    topic.core.open(one, 2)
    topic.core.hold(one, 2, found)
    assert handed(topic, one, 2) == []
    assert topic.acknowledge(one, all_of(held)) == 0
    assert waiting_in(topic) == {}


def test_leases_of_rows_of_both_indexes_are_extended_each_claim_for_one() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS)
    topic.add([P, Q], [NOW_MS, NOW_MS], 1)
    one = opened(topic, 1)
    topic.pass_all()
    topic.catch_up(one)
    one.hand_out(5, 10)
    assert len(topic.core.move_held(one, claims_of([(P, NOW_MS), (Q, NOW_MS), (R, NOW_MS)]), [5], 6)) == 1
    assert (one.held_rows(5), one.held_rows(6)) == (1, 2)
    assert len(topic.core.move_held(one, claims_of([(P, NOW_MS), (P, NOW_MS)]), [5, 6], 7)) == 0
    assert (one.held_rows(5), one.held_rows(6), one.held_rows(7)) == (0, 1, 2)


# ---- sealed, stored, read again


def stored_in_every_way(topic: JournaledTopic) -> None:
    """Rows of two subscriptions and of both: sealed, being sealed, in the checkpoint, and only in the journal."""
    for ledger in range(4):
        topic.add([(ledger, entry) for entry in range(3)], NOW_MS + 10 + ledger)
        topic.add([(ledger, entry) for entry in range(2, 6)], NOW_MS + 20 + ledger, 1)
        topic.add([(ledger, 0)], NOW_MS + 30 + ledger, 2)
        if ledger == 0:
            topic.seal(near_ms=0)
        elif ledger == 1:
            topic.begin_seal()
        elif ledger == 2:
            topic.take_checkpoint()


@pytest.mark.parametrize("committed", [False, True])
def test_the_rows_of_every_index_are_there_after_a_crash_wherever_they_are_stored(committed: bool) -> None:
    topic = with_subscriptions(2)
    stored_in_every_way(topic)
    before = waiting_in(topic)
    if committed:
        topic.write_seal()
    topic.crash_and_recover()
    assert waiting_in(topic) == before
    assert [len(places) for _, places in sorted(before.items())] == [12, 16, 4]
    topic.now_ms += 100
    assert len(handed(topic, opened(topic, 1))) == 28
    assert len(handed(topic, opened(topic, 2))) == 16


def test_a_seal_cuts_all_indexes_at_one_slot_with_one_manifest_and_names_whose_buckets_they_are() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS + 5)
    topic.add([P], NOW_MS + 5, 2)
    applied = topic.tip.applied
    topic.seal()
    assert sorted((live.subscription_id, live.rows) for live in topic.tip.live) == [(0, 2), (2, 1)]
    assert applied < topic.tip.applied == topic.slot


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_is_acknowledged_in_an_own_index_stays_gone_after_a_crash(checkpoint: bool) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS, 1)
    topic.add([P, Q], NOW_MS)
    topic.seal()
    one = opened(topic, 1)
    handed(topic, one)
    assert topic.acknowledge(one, [(P, NOW_MS), (P, NOW_MS)]) == 0
    for _ in range(2):
        assert waiting_in(topic) == {0: {P, Q}, 1: {Q}}
        crashed(topic, checkpoint=checkpoint)
        assert handed(topic, opened(topic, 1)) == [(NOW_MS, *Q)] * 2


def test_buckets_of_own_indexes_are_dropped_when_every_row_is_gone() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS, 1)
    topic.add([R], NOW_MS)
    topic.seal()
    one = opened(topic, 1)
    rows = handed(topic, one)
    topic.acknowledge(one, [claim for claim in all_of(rows) if claim[0] != R])
    assert len(topic.drop_empty()) == 1
    assert [live.subscription_id for live in topic.tip.live] == [0]
    assert len(topic.core.indexes[1].pages) == 0


# ---- trimmed, contained, damaged


def test_a_trim_takes_rows_of_every_index_and_one_for_a_subscription_those_that_it_is_owed() -> None:
    topic = with_subscriptions(2)
    for number in (0, 1, 2):
        topic.add([P, Q, R], NOW_MS + 5, number)
    assert topic.trim_at_once(upto(P), 1) == 2
    assert waiting_in(topic) == {0: {P, Q, R}, 1: {Q, R}, 2: {P, Q, R}}
    assert topic.trim_at_once(upto(Q)) == 5
    assert waiting_in(topic) == {0: {R}, 1: {R}, 2: {R}}
    topic.crash_and_recover()
    assert waiting_in(topic) == {0: {R}, 1: {R}, 2: {R}}
    assert topic.trim_at_once(None, 2) == 2
    topic.now_ms += 5
    assert handed(topic, opened(topic, 1)) == [(NOW_MS + 5, *R)] * 2
    assert handed(topic, opened(topic, 2)) == []
    assert topic.trim_at_once() == 2
    assert waiting_in(topic) == {}


def test_a_trim_for_a_subscription_takes_what_is_due_in_its_own_index_out_of_its_hands() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS, 1)
    one, two = opened(topic, 1), opened(topic, 2)
    topic.pass_all()
    topic.catch_up(one)
    one.hand_out(1, 1)
    assert topic.trim_at_once(None, 2) == 0
    assert (one.backlog, one.ready_rows, len(one.in_flight)) == (2, 1, 1)
    assert topic.trim_at_once(None, 1) == 2
    assert (one.backlog, one.ready_rows, len(one.in_flight), two.backlog) == (0, 0, 0, 0)


def test_what_is_contained_is_the_union_of_the_indexes_and_what_is_due_in_one_is_due() -> None:
    topic = with_subscriptions(2)
    topic.add([(7, entry) for entry in (0, 1, 5)], NOW_MS + 5)
    topic.add([(7, entry) for entry in (1, 2, 9)], NOW_MS, 1)
    topic.add([(7, entry) for entry in (3, 4, 10)], NOW_MS + 5, 2)
    topic.pass_all()
    asked = test_containment.request_of([(7, 0, 20), (7, 2, 4)])

    def entries(part: EntryRanges) -> list[tuple[int, int]]:
        return [(first, last) for _, first, last in test_containment.listed(part)]

    def found(state: SubscriptionState | None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        answer = topic.core.contains(asked, state, ranges_max=100)
        assert answer.continuation is None
        return entries(answer.pending), entries(answer.due)

    one, two = topic.core.subscriptions.values()
    assert found(None) == ([(0, 0), (3, 5), (10, 10), (3, 4)], [(1, 2), (9, 9), (2, 2)])
    assert found(one) == ([(0, 0), (5, 5)], [(1, 2), (9, 9), (2, 2)])
    assert found(two) == ([(0, 1), (3, 5), (10, 10), (3, 4)], [])


def test_a_damaged_bucket_of_an_own_index_leaves_its_rows_to_that_subscription_to_be_added_again() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], [NOW_MS, NOW_MS + 5], 1)
    topic.add([P, Q], [NOW_MS, NOW_MS + 5])
    topic.seal()
    one, two = opened(topic, 1), opened(topic, 2)
    topic.pass_all()
    name = next(live.object.name for live in topic.tip.live if live.subscription_id == 1)
    topic.quarantine(name)
    assert topic.core.rebuild_needed() == (RebuildNeeded(7, 7, 2, name, "damaged", positions_known=True),)
    assert (one.backlog, two.backlog) == (1, 1)
    topic.add([P], NOW_MS + 1)
    assert len(topic.core.rebuild_needed()) == 1
    topic.crash_and_recover()
    assert topic.add([P, Q], NOW_MS + 2, 1).accepted == 2
    assert topic.core.rebuild_needed() == ()
    topic.now_ms += 5
    assert handed(topic, opened(topic, 2)) == [(NOW_MS, *P), (NOW_MS + 5, *Q)]
    assert sorted(handed(topic, opened(topic, 1))) == [
        (NOW_MS, *P),
        (NOW_MS + 2, *P),
        (NOW_MS + 2, *Q),
        (NOW_MS + 5, *Q),
    ]


# ---- subscriptions that go and come


def with_own_rows() -> JournaledTopic:
    """Two subscriptions with rows of their own: sealed, being sealed and in memory; P is due."""
    topic = with_subscriptions(2)
    for times, deliver_at_ms in enumerate((NOW_MS, NOW_MS + 5, NOW_MS + 6)):
        for number in (1, 2):
            topic.add([(P, Q, R)[times]], deliver_at_ms, number)
        if times == 0:
            topic.seal()
        elif times == 1:
            topic.begin_seal()
    topic.pass_all()
    return topic


@pytest.mark.parametrize("crashes", [False, True])
def test_with_a_subscription_goes_its_own_index_and_nothing_else(crashes: bool) -> None:
    topic = with_own_rows()
    topic.add([P], NOW_MS + 7)
    topic.delete_subscription(1, topic.gone_with(1))
    if crashes:
        topic.crash_and_recover()
    else:
        topic.finish_seal(topic.write_seal())
    assert waiting_in(topic) == {0: {P}, 2: {P, Q, R}}
    assert all(live.subscription_id == 2 for live in topic.tip.live)
    assert topic.core.indexes.cache.rows == topic.core.indexes.loaded_rows
    topic.now_ms += 7
    assert len(handed(topic, opened(topic, 2))) == 4


def test_what_is_decided_for_the_own_index_of_a_subscription_that_is_no_more_does_nothing() -> None:
    topic = with_own_rows()
    one = opened(topic, 1)
    topic.stage_add(batch_of([(9, 9)], deliver_at_ms=[NOW_MS + 5]), 1)
    topic.stage_acknowledge(one, [(P, NOW_MS)])
    trimmed = [record for each in topic.core.trim(None, 1) if each is not None for record in each.records()]
    assert [type(record) for record in trimmed] == [GoneRecord]
    records = [*topic.staged.freeze(), *trimmed]
    assert any(isinstance(record, AcknowledgeRecord) and record.index_id for record in records)
    topic.core.remove_subscription(1)
    before = waiting_in(topic)
    for record in records:
        topic.core.apply(record, topic.slot + 1, elapsed_ms=0)
    assert waiting_in(topic) == before == {2: {P, Q, R}}
    assert list(topic.core.indexes) == [0, 2]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_the_journal_says_of_a_deleted_subscription_is_not_replayed_into_its_successor(checkpoint: bool) -> None:
    topic = with_own_rows()
    if checkpoint:
        topic.take_checkpoint()
    topic.delete_subscription(1, topic.gone_with(1))
    again = topic.create_subscription()
    assert again.subscription_id == 3
    topic.crash_and_recover()
    assert waiting_in(topic) == {2: {P, Q, R}}
    topic.now_ms += 7
    assert handed(topic, opened(topic, 3)) == []
    assert topic.add([P], NOW_MS, 3).accepted == 1
    assert handed(topic, opened(topic, 3, 2), 2) == [(NOW_MS, *P)]


def test_without_a_shared_index_a_new_subscription_starts_with_what_is_added_from_then_on() -> None:
    topic = without_sharing(1)
    topic.add([P], NOW_MS + 5)
    topic.create_subscription()
    topic.add([P, Q], NOW_MS + 6)
    topic.now_ms += 6
    assert handed(topic, opened(topic, 1)) == [(NOW_MS + 5, *P), (NOW_MS + 6, *Q)]
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 6, *P), (NOW_MS + 6, *Q)]
