"""The life of rows, one story at a time: each is a rule of the semantics, or of where state lives."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.segments import LOADED_ROW_BYTES
from storage_backends.formats.segment import SegmentLimits
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, batch_of, key_hashes_of, listed

NOW_MS = 1_000_000
P, Q, R = (7, 1), (7, 2), (8, 1 << 40)


def opened(topic: JournaledTopic, number: int, dispatcher: int = 1) -> SubscriptionState:
    state = topic.core.subscriptions[number]
    topic.core.open(state, dispatcher)
    return state


def handed(topic: JournaledTopic, state: SubscriptionState, dispatcher: int = 1) -> list[tuple[int, int, int]]:
    return [row for rows in topic.drain(state, dispatcher) for row in listed(rows)]


def all_of(rows: Iterable[tuple[int, int, int]]) -> list[tuple[Position, int]]:
    return [((ledger, entry), deliver_at_ms) for deliver_at_ms, ledger, entry in rows]


def with_subscriptions(count: int) -> JournaledTopic:
    topic = JournaledTopic(now_ms=NOW_MS - 10)
    for _ in range(count):
        topic.create_subscription()
    topic.now_ms = NOW_MS
    return topic


def test_a_row_is_added_due_handed_out_acknowledged_and_gone() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    assert topic.add([P, Q], NOW_MS + 5).accepted == 2
    assert handed(topic, state) == []
    topic.now_ms += 5
    assert handed(topic, state) == [(NOW_MS + 5, *P), (NOW_MS + 5, *Q)]
    assert topic.acknowledge(state, [(P, NOW_MS + 5), (Q, NOW_MS + 5)]) == 0
    assert (state.backlog, topic.core.index.pending_rows, topic.core.index.mutable.present_rows) == (0, 0, 0)


def test_a_sealed_row_is_loaded_handed_out_and_gone_and_its_bucket_dropped() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([(7, entry) for entry in range(20)], [NOW_MS + 10 * entry for entry in range(20)])
    topic.seal(near_ms=0)
    assert topic.core.index.loaded_rows == 0
    topic.now_ms += 100
    first = handed(topic, state)
    assert first == [(NOW_MS + 10 * entry, 7, entry) for entry in range(11)]
    topic.acknowledge(state, all_of(first))
    assert topic.drop_empty() == []
    topic.now_ms += 100
    topic.acknowledge(state, all_of(handed(topic, state)))
    assert len(topic.drop_empty()) == 1
    assert len(topic.core.index.pages) == 0


def test_nothing_that_is_staged_is_visible() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.stage_add(batch_of([P], deliver_at_ms=[NOW_MS]))
    assert handed(topic, state) == []
    assert topic.stage_add(batch_of([P], deliver_at_ms=[NOW_MS + 1])).duplicates == 1
    topic.commit()
    assert handed(topic, state) == [(NOW_MS, *P)]


def test_rows_that_are_already_due_are_counted_as_late_whether_stored_or_returned() -> None:
    topic = with_subscriptions(1)
    stored = topic.stage_add(batch_of([P, Q], deliver_at_ms=[NOW_MS, NOW_MS + 1]))
    assert (stored.accepted, stored.late_on_arrival) == (2, 1)
    batch = batch_of([(9, 1), (9, 2), (9, 1)], deliver_at_ms=[NOW_MS, NOW_MS + 1, NOW_MS], return_already_due=True)
    returned = topic.stage_add(batch)
    assert (returned.accepted, returned.late_on_arrival, returned.duplicates) == (1, 1, 1)
    assert returned.returned_index.tolist() == [0]


def test_an_acknowledgement_with_another_time_is_ignored() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([P], NOW_MS)
    handed(topic, state)
    assert topic.acknowledge(state, [(P, NOW_MS + 1), (Q, NOW_MS)]) == 2
    assert state.backlog == 1
    assert topic.acknowledge(state, [(P, NOW_MS), (P, NOW_MS)]) == 1
    assert state.backlog == 0


def test_a_late_acknowledgement_does_not_kill_a_row_that_was_added_again() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([P], NOW_MS - 9)
    topic.acknowledge(state, all_of(handed(topic, state)))
    topic.add([P], NOW_MS)
    assert handed(topic, state) == [(NOW_MS, *P)]
    assert topic.acknowledge(state, [(P, NOW_MS - 9)]) == 1
    assert state.backlog == 1


def test_a_row_that_came_back_is_not_handed_out_at_the_time_of_the_one_that_left() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([P], NOW_MS)
    topic.acknowledge(state, all_of(handed(topic, state)))
    topic.stage_add(batch_of([P], deliver_at_ms=[NOW_MS + 5_000], key_hash=[11]))
    topic.commit()
    topic.crash_and_recover()
    state = opened(topic, 1)
    assert handed(topic, state) == []
    topic.now_ms += 5_000
    (rows,) = topic.drain(state, 1)
    assert (listed(rows), key_hashes_of(rows)) == ([(NOW_MS + 5_000, *P)], [11])


@pytest.mark.parametrize("again_ms", [NOW_MS, NOW_MS + 5_000])
def test_a_backlog_that_is_read_again_has_the_row_that_came_back_once(again_ms: int) -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([P], NOW_MS)
    topic.acknowledge(state, all_of(handed(topic, state)))
    topic.add([P], again_ms)
    topic.now_ms += 5_000
    topic.pass_all()
    state.close(1)
    assert handed(topic, opened(topic, 1)) == [(again_ms, *P)]


def test_acknowledged_bits_do_not_pass_to_a_row_that_came_back() -> None:
    topic = with_subscriptions(2)
    one, two = opened(topic, 1), opened(topic, 2)
    topic.add([P], NOW_MS)
    for state in (one, two):
        topic.acknowledge(state, all_of(handed(topic, state)))
    topic.add([P], NOW_MS + 1)
    topic.now_ms += 1
    assert handed(topic, one) == handed(topic, two) == [(NOW_MS + 1, *P)]


def test_acknowledgements_are_in_the_progress_of_a_seal() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS)
    state = opened(topic, 1)
    handed(topic, state)
    topic.acknowledge(state, [(P, NOW_MS)])
    topic.seal()
    topic.crash_and_recover()
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *Q)]
    assert handed(topic, opened(topic, 2)) == [(NOW_MS, *P), (NOW_MS, *Q)]


def test_what_goes_while_a_bucket_is_being_sealed_is_gone_from_the_sealed_one() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS)
    state = opened(topic, 1)
    handed(topic, state)
    topic.begin_seal()
    topic.acknowledge(state, [(P, NOW_MS)])
    topic.finish_seal(topic.write_seal())
    topic.take_checkpoint()
    topic.crash_and_recover()
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *Q)]


def test_gone_is_of_a_bucket_and_not_of_a_position() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS)
    topic.seal()
    state = opened(topic, 1)
    handed(topic, state)
    topic.acknowledge(state, [(P, NOW_MS)])
    assert topic.add([P, Q], NOW_MS + 1).accepted == 1
    topic.now_ms += 1
    for _ in range(2):
        topic.crash_and_recover()
        assert sorted(handed(topic, opened(topic, 1))) == [(NOW_MS, *Q), (NOW_MS + 1, *P)]
        topic.take_checkpoint()


def test_a_checkpoint_of_the_slot_that_a_manifest_has_reached_does_not_count() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS)
    topic.take_checkpoint()
    topic.seal()
    topic.crash_and_recover()
    assert sum(bucket.present_rows for bucket in topic.core.index.buckets) == 2


def test_rows_are_in_the_checkpoint_while_their_seal_is_not_committed_and_in_the_bucket_afterwards() -> None:
    topic = with_subscriptions(2)
    state = opened(topic, 1)
    topic.add([P, Q], NOW_MS)
    topic.begin_seal()
    handed(topic, state)
    topic.acknowledge(state, [(P, NOW_MS)])
    topic.take_checkpoint()
    topic.crash_and_recover()
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *Q)]
    topic.begin_seal()
    topic.add([R], NOW_MS)
    topic.take_checkpoint()
    topic.write_seal()
    topic.crash_and_recover()
    assert [bucket.present_rows for bucket in topic.core.index.buckets] == [2, 1]
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *Q), (NOW_MS, *R)]


LATE = [(7, entry) for entry in range(8)]


def test_a_late_row_that_is_sealed_before_it_is_passed_is_handed_out() -> None:
    topic = with_subscriptions(1)
    topic.add(LATE, [NOW_MS - 100 + entry for _, entry in LATE])
    topic.pass_all()
    topic.add([R], NOW_MS - 98)
    topic.seal()
    assert topic.core.index.pending_rows == 1
    assert len(handed(topic, opened(topic, 1))) == len(LATE) + 1
    assert topic.core.index.pending_rows == 0


def test_rows_that_were_passed_before_a_late_one_are_read_again_after_a_seal() -> None:
    topic = with_subscriptions(1)
    topic.add(LATE, [NOW_MS - 100 + entry for _, entry in LATE])
    topic.pass_all()
    topic.add([R], NOW_MS - 98)
    topic.seal()
    state = opened(topic, 1)
    while state.reader is not None:
        topic.catch_up(state)
    assert len(handed(topic, state)) == len(LATE) + 1


def test_a_backlog_that_is_read_in_part_when_its_bucket_is_sealed_is_read_to_its_end() -> None:
    topic = with_subscriptions(1)
    topic.add(LATE, [NOW_MS - 100 + entry for _, entry in LATE])
    topic.pass_all()
    state = opened(topic, 1)
    topic.catch_up(state, limit=2)
    first = listed(state.hand_out(1, 100))
    assert 0 < len(first) < len(LATE)
    topic.seal()
    assert [row[1:] for row in (*first, *handed(topic, state))] == LATE


def test_pages_of_staged_rows_outlive_the_bucket_that_held_them() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([P], NOW_MS)
    topic.seal()
    topic.acknowledge(state, all_of(handed(topic, state)))
    topic.stage_add(batch_of([Q], deliver_at_ms=[NOW_MS + 9]))
    topic.drop_empty()
    assert topic.stage_add(batch_of([Q], deliver_at_ms=[NOW_MS + 8])).duplicates == 1
    topic.commit()
    assert topic.core.index.mutable.present_rows == 1


def test_claims_of_a_deleted_subscription_are_waived_though_others_remain() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    topic.pass_all()
    topic.create_subscription()
    topic.delete_subscription(1, topic.gone_with(1))
    assert topic.add([P, Q], NOW_MS + 20).duplicates == 1
    topic.now_ms += 20
    expected = [(NOW_MS + 9, *Q), (NOW_MS + 20, *P)]
    assert handed(topic, opened(topic, 2)) == expected
    topic.crash_and_recover()
    assert handed(topic, opened(topic, 2)) == expected


def test_an_acknowledgement_of_a_subscription_that_was_deleted_since_counts_at_replay() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS)
    state = opened(topic, 1)
    rows = handed(topic, state)
    topic.create_subscription()
    topic.acknowledge(state, all_of(rows))
    topic.delete_subscription(1, topic.gone_with(1))
    topic.add([P], NOW_MS + 50)
    topic.crash_and_recover()
    assert topic.core.index.pending_rows == 1
    assert handed(topic, opened(topic, 2)) == []
    topic.now_ms += 50
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 50, *P)]


def test_who_is_entitled_at_replay_is_who_was_at_the_slot() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS)
    state = opened(topic, 1)
    topic.acknowledge(state, all_of(handed(topic, state)))
    topic.delete_subscription(1, topic.gone_with(1))
    topic.create_subscription()
    topic.crash_and_recover()
    assert handed(topic, opened(topic, 2)) == []


def test_a_row_that_a_later_subscription_is_not_owed_is_gone_at_replay_when_the_first_one_has_acknowledged_it() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    state = opened(topic, 1)
    received = all_of(handed(topic, state))
    topic.create_subscription()
    topic.acknowledge(state, received)
    assert topic.core.indexes.present_rows == 1
    topic.crash_and_recover()
    assert topic.core.indexes.present_rows == 1


def test_a_row_is_gone_when_every_subscription_has_acknowledged_it_in_one_slot() -> None:
    topic = with_subscriptions(3)
    topic.add([P, Q], NOW_MS)
    states = [opened(topic, number) for number in (1, 2, 3)]
    received = [all_of(handed(topic, state)) for state in states]
    for state, claims in zip(states, received, strict=True):
        topic.stage_acknowledge(state, claims if state is not states[1] else claims[:1])
    topic.commit()
    assert (topic.core.indexes.present_rows, [state.backlog for state in states]) == (1, [0, 1, 0])
    topic.acknowledge(states[1], received[1][1:])
    assert topic.core.indexes.present_rows == 0


def test_the_first_subscription_gets_what_came_due_while_there_was_none() -> None:
    topic = with_subscriptions(0)
    topic.add([P], NOW_MS)
    topic.pass_all()
    state = topic.create_subscription()
    assert (state.stored.since_ms, state.backlog) == (0, 1)
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *P)]


def test_a_later_subscription_starts_with_what_is_pending_also_after_the_clock_stepped_back() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    topic.pass_all()
    topic.now_ms -= 500
    state = topic.create_subscription()
    assert (state.stored.since_ms, state.backlog) == (NOW_MS - 500, 0)
    topic.now_ms += 600
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 9, *Q)]
    assert state.backlog == 1
    topic.crash_and_recover()
    topic.pass_all()
    assert [each.backlog for each in topic.core.subscriptions.values()] == [2, 1], "also after a crash"
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 9, *Q)]


def test_a_row_that_is_added_after_the_clock_was_set_back_keeps_its_time_whoever_is_created() -> None:
    topic = with_subscriptions(1)
    topic.now_ms += 3_600_000
    topic.add([P], topic.now_ms)
    topic.pass_all()
    topic.now_ms -= 3_600_000
    state = topic.create_subscription()
    outcome = topic.add([Q, R], [NOW_MS - 7, NOW_MS + 5])
    assert outcome.raised_deliver_at_ms.tolist() == [NOW_MS + 1]
    topic.now_ms += 5
    topic.pass_all()
    for number in (1, 2):
        rows = handed(topic, opened(topic, number))
        assert [row for row in rows if row[1:] != P] == [(NOW_MS + 1, *Q), (NOW_MS + 5, *R)]
    assert state.backlog == 2


def test_what_comes_due_while_a_subscription_is_being_created_is_owed_to_it() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q, R], [NOW_MS, NOW_MS + 5, NOW_MS + 9])

    def time_passes() -> None:
        topic.now_ms += 5
        topic.pass_all()

    topic.pass_all()
    state = topic.create_subscription(time_passes)
    assert (state.stored.since_ms, state.backlog) == (NOW_MS, 1)
    topic.now_ms += 5
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 5, *Q), (NOW_MS + 9, *R)]


def test_a_row_at_or_below_the_latest_creation_is_stored_just_above_it() -> None:
    topic = with_subscriptions(2)
    outcome = topic.add([P, Q], [NOW_MS - 10, NOW_MS - 9])
    assert (outcome.raised_index.tolist(), outcome.raised_deliver_at_ms.tolist()) == ([0], [NOW_MS - 9])


def test_what_came_back_is_handed_out_first_in_position_order() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.core.open(state, 2)
    topic.add([R, Q, P], [NOW_MS - 3, NOW_MS - 2, NOW_MS - 1])
    topic.pass_all()
    topic.catch_up(state)
    state.hand_out(1, 2)
    state.close(1)
    assert [row[1:] for row in listed(state.hand_out(2, 3))] == [Q, R, P]


@pytest.mark.parametrize("budget_rows", [1, 9])
def test_reading_comes_to_an_end_however_little_memory_there_is(budget_rows: int) -> None:
    topic = JournaledTopic(
        now_ms=NOW_MS,
        budget_bytes=budget_rows * LOADED_ROW_BYTES,
        segment_limits=SegmentLimits(time_step_ms=10**9, rows_max=4, rows_min=0),
    )
    state = topic.create_subscription()
    everything = []
    for ledger in (1, 2, 3):
        positions = [(ledger, entry) for entry in range(50)]
        topic.add(positions, [NOW_MS + entry for entry in range(50)])
        everything += [(position, NOW_MS + position[1]) for position in positions]
        topic.seal(near_ms=0)
    topic.now_ms += 100
    topic.pass_all()
    assert len(handed(topic, opened(topic, 1))) == 150
    state.close(1)
    assert topic.acknowledge(state, everything) == 0
    assert len(topic.drop_empty()) == 3


def test_a_segment_that_the_head_has_passed_makes_room_before_any_other() -> None:
    topic = JournaledTopic(now_ms=NOW_MS, budget_bytes=8 * LOADED_ROW_BYTES)
    state = topic.create_subscription()
    topic.add([(1, entry) for entry in range(8)], [NOW_MS + 10 * entry for entry in range(8)])
    topic.seal(near_ms=NOW_MS + 1_000)
    cache = topic.core.index.cache
    assert (cache.rows, cache.room_rows) == (8, 0)
    topic.now_ms += 60
    assert len(handed(topic, opened(topic, state.subscription_id))) == 7
    assert cache.room_rows == 4
