"""Cancelling and rescheduling, one story at a time: what each position is answered, and that it is true ever after."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.errors import InvalidArgument
from storage_backends.formats.slot_format import AddRecord, GoneReason, GoneRecord, RescheduleRecord
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, batch_of, key_hashes_of
from tests.daemon.core._support.withdrawing import Result, cancel, decidable, reschedule, stage_cancel, stage_reschedule
from tests.daemon.core.decisions.test_topic import NOW_MS, P, Q, R, all_of, handed, opened, with_subscriptions
from tests.daemon.core.decisions.test_trimming import left_in, upto

LATER_MS = NOW_MS + 500
# Where a row may be when it is withdrawn.
Put = Callable[[JournaledTopic], None]


def in_the_mutable_bucket(topic: JournaledTopic) -> None:
    """It is there."""


def in_a_bucket_that_is_being_sealed(topic: JournaledTopic) -> None:
    topic.begin_seal()


def in_a_sealed_bucket_that_is_in_memory(topic: JournaledTopic) -> None:
    topic.seal(near_ms=NOW_MS + 1_000_000)


def in_a_sealed_bucket_that_is_not_in_memory(topic: JournaledTopic) -> None:
    topic.seal(near_ms=0)


def in_memory_after_a_crash(topic: JournaledTopic) -> None:
    topic.crash_and_recover()


def in_a_sealed_bucket_after_a_crash(topic: JournaledTopic) -> None:
    topic.seal(near_ms=0)
    topic.crash_and_recover()


PLACES = [
    in_the_mutable_bucket,
    in_a_bucket_that_is_being_sealed,
    in_a_sealed_bucket_that_is_in_memory,
    in_a_sealed_bucket_that_is_not_in_memory,
    in_memory_after_a_crash,
    in_a_sealed_bucket_after_a_crash,
]
places = pytest.mark.parametrize("put", PLACES, ids=lambda put: put.__name__)


def finish_seals(topic: JournaledTopic) -> None:
    while topic.seals:
        topic.finish_seal(topic.write_seal())


def nothing(topic: JournaledTopic) -> None:
    """Goes on as it is."""


def crash(topic: JournaledTopic) -> None:
    topic.crash_and_recover()


def checkpoint_and_crash(topic: JournaledTopic) -> None:
    topic.take_checkpoint()
    topic.crash_and_recover()


def seal_and_crash(topic: JournaledTopic) -> None:
    topic.seal()
    topic.crash_and_recover()


AFTERWARDS = [nothing, finish_seals, crash, checkpoint_and_crash, seal_and_crash]
afterwards = pytest.mark.parametrize("then", AFTERWARDS, ids=lambda then: then.__name__)


def come(topic: JournaledTopic, until_ms: int, *numbers: int) -> dict[int, list[tuple[int, Position]]]:
    """What each subscription is handed out until then, with the times at which it was."""
    found: dict[int, list[tuple[int, Position]]] = {number: [] for number in numbers}
    states = {number: opened(topic, number, 77) for number in numbers}
    for now_ms in range(topic.now_ms, until_ms + 1, 10):
        topic.now_ms = now_ms
        for number, state in states.items():
            found[number] += [(now_ms, (ledger, entry)) for _, ledger, entry in handed(topic, state, 77)]
    return found


# ---- cancelling


@places
@afterwards
def test_what_is_cancelled_is_never_handed_out_and_the_rest_is(put: Put, then: Put) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q, R], [NOW_MS + 20, NOW_MS + 20, NOW_MS + 40])
    put(topic)
    assert cancel(topic, [Q, R]) == Result(2)
    then(topic)
    assert cancel(topic, [Q, (99, 9), R]) == Result(0, not_found=(0, 1, 2))
    assert come(topic, NOW_MS + 100, 1, 2) == {1: [(NOW_MS + 20, P)], 2: [(NOW_MS + 20, P)]}
    assert topic.core.indexes.pending_rows == 0


@places
@afterwards
def test_what_was_cancelled_may_be_added_again_as_a_new_row(put: Put, then: Put) -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], [NOW_MS + 20, NOW_MS + 20])
    put(topic)
    assert cancel(topic, [P]) == Result(1)
    assert topic.add([P, Q], NOW_MS + 50).accepted == 1
    then(topic)
    assert topic.add([P, Q], NOW_MS + 90).duplicates == 2
    assert come(topic, NOW_MS + 100, 1) == {1: [(NOW_MS + 20, Q), (NOW_MS + 50, P)]}


def test_the_furthest_state_over_all_subscriptions_is_answered_and_nothing_else_changes() -> None:
    topic = with_subscriptions(2)
    one = opened(topic, 1)
    topic.add([(7, entry) for entry in range(5)], [NOW_MS] * 4 + [NOW_MS + 50])
    assert len(handed(topic, one)) == 4
    # 0 is in flight, 1 is being acknowledged, 2 is acknowledged by one of two, 3 is due again, 4 waits.
    topic.acknowledge(one, [((7, 2), NOW_MS)])
    one.close(1)
    topic.core.open(one, 2)
    assert len(one.in_flight) == 0
    topic.catch_up(one)
    assert len(one.hand_out(2, 2)) == 2
    topic.stage_acknowledge(one, [((7, 1), NOW_MS)])
    every = [(7, entry) for entry in range(5)]
    expected = Result(0, not_found=(), already_due=(2, 3), in_flight=(0, 1))
    assert cancel(topic, every[:4]) == expected
    topic.stage_acknowledge(one, [((7, 0), NOW_MS)])
    assert reschedule(topic, every[:4], LATER_MS) == Result(0, already_due=(1, 2, 3), in_flight=(0,))
    assert left_in(topic) == {*every}
    two = opened(topic, 2)
    assert [row[2] for row in handed(topic, two)] == [0, 1, 2, 3]
    assert cancel(topic, every) == Result(1, in_flight=(0, 1, 2, 3))


def test_what_everybody_acknowledged_is_not_found() -> None:
    topic = with_subscriptions(1)
    one = opened(topic, 1)
    topic.add([P], NOW_MS)
    topic.acknowledge(one, all_of(handed(topic, one)))
    assert cancel(topic, [P]) == Result(0, not_found=(0,))


def test_what_is_due_while_nobody_is_subscribed_is_already_due() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    topic.add([P, Q], [NOW_MS, NOW_MS + 10])
    assert cancel(topic, [P, Q]) == Result(1, already_due=(0,))
    assert reschedule(topic, [P, Q], LATER_MS) == Result(0, not_found=(1,), already_due=(0,))


def test_what_comes_due_with_a_segment_that_is_not_in_memory_is_already_due() -> None:
    topic = with_subscriptions(1)
    topic.add([(7, entry) for entry in range(30)], [NOW_MS + 10 * entry for entry in range(30)])
    topic.seal(near_ms=0)
    topic.now_ms = NOW_MS + 100
    assert topic.core.indexes.loaded_rows == 0
    assert cancel(topic, [(7, 10), (7, 11)]) == Result(1, already_due=(0,))


def test_a_cancellation_is_a_record_of_positions_that_are_gone() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q, R], LATER_MS)
    _, (record,) = stage_cancel(topic, [R, P])
    assert isinstance(record, GoneRecord)
    assert (record.reason, record.subscription_id, record.row_count) == (GoneReason.CANCELLED, 0, 2)


# ---- what is staged


@places
def test_what_is_leaving_is_not_passed_though_its_time_comes_before_its_slot(put: Put) -> None:
    topic = with_subscriptions(1)
    one = opened(topic, 1)
    topic.add([P, Q, R], NOW_MS + 5)
    put(topic)
    stage_cancel(topic, [P])
    stage_reschedule(topic, [Q], LATER_MS)
    one = opened(topic, 1)
    topic.now_ms = NOW_MS + 5
    assert handed(topic, one) == [(NOW_MS + 5, *R)]
    topic.commit()
    assert handed(topic, one) == []
    assert not topic.core.indexes.leaving
    topic.now_ms = LATER_MS
    assert handed(topic, one) == [(LATER_MS, *Q)]


@pytest.mark.parametrize("withdrawn", [stage_cancel, lambda topic, at: stage_reschedule(topic, at, LATER_MS)])
def test_what_is_leaving_may_be_cut_and_sealed_meanwhile(withdrawn: Callable[..., object]) -> None:
    for cut_first in (False, True):
        topic = with_subscriptions(1)
        one = opened(topic, 1)
        topic.add([P, Q], NOW_MS + 5)
        if cut_first:
            topic.begin_seal()
        withdrawn(topic, [P])
        topic.now_ms = NOW_MS + 5
        assert handed(topic, one) == [(NOW_MS + 5, *Q)]
        topic.begin_seal()
        finish_seals(topic)
        assert handed(topic, one) == []
        topic.commit()
        expected = [] if withdrawn is stage_cancel else [(LATER_MS, *P)]
        topic.now_ms = LATER_MS
        assert handed(topic, one) == expected
        topic.crash_and_recover()
        assert handed(topic, opened(topic, 1)) == [(NOW_MS + 5, *Q), *expected]


def test_what_is_staged_and_not_durable_is_as_if_it_had_never_been_asked() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS + 10)
    stage_cancel(topic, [P])
    stage_reschedule(topic, [Q], LATER_MS)
    topic.crash_and_recover()
    assert come(topic, NOW_MS + 20, 1) == {1: [(NOW_MS + 10, P), (NOW_MS + 10, Q)]}


def test_a_position_is_staged_by_an_add_a_cancellation_or_a_reschedule_until_that_is_applied() -> None:
    topic = with_subscriptions(1)
    topic.add([Q, R], LATER_MS)
    topic.stage_add(batch_of([P], deliver_at_ms=[LATER_MS]))
    stage_cancel(topic, [Q])
    stage_reschedule(topic, [R], LATER_MS)
    withdrawals = topic.core.withdrawals
    for at, leaving in ((P, False), (Q, True), (R, True)):
        batch = batch_of([at], deliver_at_ms=[0])
        asked = withdrawals.asked(batch.ledger_id, batch.entry_id, None)
        assert withdrawals.is_staged(asked)
        assert withdrawals.is_leaving(asked) == leaving
    topic.commit()
    for at in (P, Q, R):
        batch = batch_of([at], deliver_at_ms=[0])
        asked = withdrawals.asked(batch.ledger_id, batch.entry_id, None)
        assert not withdrawals.is_staged(asked)
        assert not withdrawals.is_leaving(asked)


def test_adds_cancellations_reschedules_and_acknowledgements_of_one_slot_are_merged_by_kind() -> None:
    topic = with_subscriptions(1)
    one = opened(topic, 1)
    every = [(7, entry) for entry in range(8)]
    topic.add(every[:6], [NOW_MS, NOW_MS, *[LATER_MS] * 4])
    assert len(handed(topic, one)) == 2
    for number in (0, 1):
        stage_cancel(topic, [every[2 + number]])
        topic.stage_acknowledge(one, [(every[number], NOW_MS)])
        stage_reschedule(topic, [every[4 + number]], LATER_MS + 1)
        topic.stage_add(batch_of([every[6 + number]], deliver_at_ms=[LATER_MS]))
    assert len(topic.staged) == 4
    slot = topic.slot
    topic.commit()
    assert topic.slot == slot + 1
    for _ in range(2):
        assert left_in(topic) == {*every[4:]}
        topic.crash_and_recover()


# ---- rescheduling


@places
@afterwards
@pytest.mark.parametrize("new_ms", [NOW_MS - 50, NOW_MS, NOW_MS + 20, NOW_MS + 60, NOW_MS + 200])
def test_a_rescheduled_row_comes_once_at_its_new_time(put: Put, then: Put, new_ms: int) -> None:
    """Earlier, later, the same, and past."""
    topic = with_subscriptions(1)
    topic.add([P, Q], [NOW_MS + 60, NOW_MS + 60])
    put(topic)
    assert reschedule(topic, [P], new_ms) == Result(1)
    then(topic)
    expected = sorted([(max(new_ms, NOW_MS), P), (NOW_MS + 60, Q)])
    assert come(topic, NOW_MS + 300, 1) == {1: expected}
    assert topic.core.indexes.pending_rows == 0


@places
@afterwards
def test_a_row_may_be_rescheduled_again_and_again_and_then_cancelled(put: Put, then: Put) -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q, R], NOW_MS + 30)
    for new_ms in (NOW_MS + 90, NOW_MS + 10, NOW_MS + 10, NOW_MS + 50):
        put(topic)
        assert reschedule(topic, [P, Q], new_ms) == Result(2)
        finish_seals(topic)
    then(topic)
    assert cancel(topic, [Q]) == Result(1)
    then(topic)
    assert come(topic, NOW_MS + 200, 1) == {1: [(NOW_MS + 30, R), (NOW_MS + 50, P)]}


def test_the_next_wake_up_follows_a_time_that_is_earlier() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 9_000)
    topic.seal(near_ms=0)
    assert topic.core.indexes.next_due_of_memory_buckets_ms() is None
    reschedule(topic, [P], NOW_MS + 40)
    assert topic.core.indexes.next_due_ms() == NOW_MS + 40
    assert topic.core.indexes.next_due_of_memory_buckets_ms() == NOW_MS + 40


@afterwards
def test_a_rescheduled_row_has_the_key_hash_that_is_given_with_the_new_time(then: Put) -> None:
    topic = with_subscriptions(1)
    topic.stage_add(batch_of([P, Q, R], deliver_at_ms=[LATER_MS] * 3, key_hash=[1, 2, 3]))
    topic.commit()
    reschedule(topic, [P], LATER_MS, key_hash=[9])
    reschedule(topic, [Q], LATER_MS)
    then(topic)
    topic.now_ms = LATER_MS
    (rows,) = topic.drain(opened(topic, 1), 1)
    assert key_hashes_of(rows) == [9, 0, 3]


def test_a_time_at_or_below_the_creation_of_a_subscription_is_raised_above_it() -> None:
    topic = with_subscriptions(2)
    since_ms = topic.core.subscriptions[2].stored.since_ms
    topic.add([P, Q], LATER_MS)
    assert reschedule(topic, [P, (9, 9), Q], [since_ms - 7, 1, LATER_MS]) == Result(
        2, not_found=(1,), raised=(0,), raised_deliver_at_ms=(since_ms + 1,)
    )
    assert come(topic, NOW_MS + 10, 1, 2) == {1: [(NOW_MS, P)], 2: [(NOW_MS, P)]}


def test_a_reschedule_is_one_record_with_the_new_rows() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q, R], LATER_MS)
    _, (record,) = stage_reschedule(topic, [R, P], [LATER_MS + 2, LATER_MS + 1])
    assert isinstance(record, RescheduleRecord)
    assert record.rows.deliver_at_ms.tolist() == [LATER_MS + 2, LATER_MS + 1]
    assert record.subscription_id == 0


@places
@afterwards
def test_a_claim_that_was_trimmed_is_not_owed_again_by_a_reschedule(put: Put, then: Put) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS + 20)
    put(topic)
    assert topic.trim_at_once(upto((7, 1)), 1) == 1
    reschedule(topic, [P, Q], NOW_MS + 40)
    then(topic)
    assert come(topic, NOW_MS + 100, 1, 2) == {1: [(NOW_MS + 40, Q)], 2: [(NOW_MS + 40, P), (NOW_MS + 40, Q)]}


def test_a_claim_that_was_trimmed_is_not_owed_again_when_the_bucket_of_the_old_row_was_dropped_before_a_crash() -> None:
    topic = with_subscriptions(2)
    topic.add([P], NOW_MS + 20)
    topic.seal()
    assert topic.trim_at_once(upto((7, 1)), 1) == 1
    reschedule(topic, [P], NOW_MS + 40)
    assert topic.drop_empty()
    topic.crash_and_recover()
    assert come(topic, NOW_MS + 100, 1, 2) == {1: [], 2: [(NOW_MS + 40, P)]}


# ---- own indexes


@afterwards
def test_a_position_leaves_every_index_or_none(then: Put) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q, R], [NOW_MS + 50, NOW_MS + 50, NOW_MS])
    topic.add([P, Q, R], [NOW_MS + 20, NOW_MS, NOW_MS + 20], 1)
    assert cancel(topic, [P, Q, R]) == Result(1, already_due=(1, 2))
    then(topic)
    assert reschedule(topic, [P, Q], NOW_MS + 70) == Result(0, not_found=(0,), already_due=(1,))
    assert come(topic, NOW_MS + 100, 1, 2) == {
        1: [(NOW_MS, Q), (NOW_MS, R), (NOW_MS + 20, R), (NOW_MS + 50, Q)],
        2: [(NOW_MS, R), (NOW_MS + 50, Q)],
    }


def test_a_request_takes_no_more_rows_out_than_one_may_over_all_indexes() -> None:
    topic = with_subscriptions(2)
    for subscription_id in (0, 1, 2):
        topic.add([P, Q], NOW_MS + 20, subscription_id)
    withdrawals = topic.core.withdrawals
    asked = decidable(topic, [P, Q], None)
    with pytest.raises(InvalidArgument, match=r"2 positions that are in up to 3 indexes; .* out 5 rows"):
        withdrawals.stage_cancel(asked, rows_max=5)
    assert not topic.core.indexes.leaving
    one = decidable(topic, [P], None)
    _, outcome = withdrawals.stage_cancel(one, rows_max=1)
    assert outcome.cancelled == 1, "one position is always few enough"
    _, outcome = withdrawals.stage_cancel(decidable(topic, [Q], None), rows_max=3)
    assert outcome.cancelled == 1


@afterwards
def test_a_position_is_rescheduled_in_every_index_that_it_is_in(then: Put) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS + 50)
    topic.add([P, R], NOW_MS + 20, 1)
    _, records = stage_reschedule(topic, [P, Q, R], NOW_MS + 70)
    assert [(type(record), record.subscription_id) for record in records] == [
        (RescheduleRecord, 0),
        (RescheduleRecord, 1),
    ]
    topic.commit()
    then(topic)
    found = come(topic, NOW_MS + 100, 1, 2)
    assert sorted(found[1]) == [(NOW_MS + 70, P), (NOW_MS + 70, P), (NOW_MS + 70, Q), (NOW_MS + 70, R)]
    assert found[2] == [(NOW_MS + 70, P), (NOW_MS + 70, Q)]


@afterwards
def test_of_one_subscription_only_its_own_index_is_touched(then: Put) -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS)
    topic.add([P, Q, R], NOW_MS + 20, 1)
    topic.pass_all()
    assert cancel(topic, [P, (5, 5)], 1) == Result(1, not_found=(1,))
    assert cancel(topic, [R], 2) == Result(0, not_found=(0,))
    assert reschedule(topic, [P, Q, R], NOW_MS + 40, 1) == Result(2, not_found=(0,))
    then(topic)
    assert come(topic, NOW_MS + 100, 1, 2) == {
        1: [(NOW_MS, P), (NOW_MS, Q), (NOW_MS + 40, Q), (NOW_MS + 40, R)],
        2: [(NOW_MS, P), (NOW_MS, Q)],
    }


def test_a_time_in_an_own_index_is_not_raised() -> None:
    topic = with_subscriptions(2)
    topic.add([P], LATER_MS, 2)
    assert reschedule(topic, [P], 5) == Result(1)
    topic.pass_all()
    assert topic.core.subscriptions[2].backlog == 1


def test_withdrawals_of_a_subscription_that_was_deleted_since_are_replayed_as_nothing() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], LATER_MS, 2)
    cancel(topic, [P], 2)
    reschedule(topic, [Q], LATER_MS + 5, 2)
    topic.delete_subscription(2, topic.gone_with(2))
    topic.crash_and_recover()
    assert left_in(topic) == set()
    assert list(topic.core.indexes) == [0]


# ---- damage


def test_what_was_lost_with_a_damaged_bucket_is_not_found_and_stays_missing() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], LATER_MS)
    topic.seal()
    topic.quarantine(next(iter(topic.core.index.sealed)))
    for _ in range(2):
        assert cancel(topic, [P]) == Result(0, not_found=(0,))
        assert reschedule(topic, [Q], LATER_MS) == Result(0, not_found=(0,))
        assert sum(needed.rows for needed in topic.core.rebuild_needed()) == 2
        topic.crash_and_recover()


def test_a_bucket_may_be_found_damaged_while_its_rows_are_leaving() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q, R], LATER_MS)
    topic.seal(near_ms=0)
    topic.trim_at_once(upto((7, 2)), 1)
    stage_cancel(topic, [P])
    stage_reschedule(topic, [Q], LATER_MS + 5)
    topic.quarantine(next(iter(topic.core.index.sealed)))
    topic.commit()
    for _ in range(3):
        assert sum(needed.rows for needed in topic.core.rebuild_needed()) == 1
        assert left_in(topic) == {Q}
        topic.crash_and_recover()
    assert topic.add([P, Q, R], LATER_MS + 5).duplicates == 1
    topic.now_ms = LATER_MS + 5
    assert [row[1:] for row in handed(topic, opened(topic, 1))] == [P, R]
    assert [row[1:] for row in handed(topic, opened(topic, 2))] == [P, Q, R]


def test_no_page_is_held_for_what_was_withdrawn() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q, R], LATER_MS)
    topic.seal()
    assert cancel(topic, [P, Q, (8, 5 << 40), (99, 9)]) == Result(2, not_found=(2, 3))
    reschedule(topic, [R], LATER_MS + 1)
    assert len(topic.drop_empty()) == 1
    assert cancel(topic, [R]) == Result(1)
    topic.seal()
    assert not topic.core.index.sealed
    assert len(topic.core.index.pages) == 0


def test_an_add_before_and_after_a_cancellation_in_the_journal_is_replayed_in_order() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 10)
    cancel(topic, [P])
    topic.add([P], NOW_MS + 30)
    reschedule(topic, [P], NOW_MS + 60)
    cancel(topic, [P])
    record_kinds = [AddRecord, GoneRecord, AddRecord, RescheduleRecord, GoneRecord]
    assert len(topic.slots) == len(record_kinds)
    topic.add([P], NOW_MS + 20)
    topic.crash_and_recover()
    assert come(topic, NOW_MS + 100, 1) == {1: [(NOW_MS + 20, P)]}
