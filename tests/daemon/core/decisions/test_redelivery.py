"""Negative acknowledgements: nothing comes back early, nothing is lost, and counts come with every hand-out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.position_keys import KeyedRows
from storage_backends.formats.index_ids import BATCH_BITS
from tests.daemon.core._support import nacking, withdrawing
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, claims_of, listed
from tests.daemon.core._support.oracle import Claim

P, Q, R = (7, 1), (7, 2), (7, 3)
NOW_MS = 1_000_000
LISTENER, OTHER = 1, 2
# (position, count), and of one message of a batch its entry in the index of these.
Handed = list[tuple[Position, int]]
Stored = Callable[[JournaledTopic], SubscriptionState]


def served(*, ready_rows_max: int = 1 << 30) -> tuple[JournaledTopic, SubscriptionState]:
    topic = JournaledTopic(now_ms=NOW_MS, ready_rows_max=ready_rows_max)
    state = topic.create_subscription()
    topic.core.open(state, LISTENER)
    return topic, state


def with_rows_in_flight(*positions: Position) -> tuple[JournaledTopic, SubscriptionState]:
    topic, state = served()
    topic.add(positions, NOW_MS)
    assert handed(topic, state) == [(at, 0) for at in sorted(positions)]
    return topic, state


def handed(topic: JournaledTopic, state: SubscriptionState) -> Handed:
    return counted(topic.drain(state, LISTENER))


def counted(batches: list[KeyedRows]) -> Handed:
    rows = KeyedRows.concat(batches)
    return [
        ((ledger, entry), count) for (_, ledger, entry), count in zip(listed(rows), rows.counts().tolist(), strict=True)
    ]


def at(topic: JournaledTopic, now_ms: int) -> JournaledTopic:
    topic.now_ms = now_ms
    return topic


# ---- what a crash may find


def nothing(topic: JournaledTopic) -> SubscriptionState:
    return topic.core.subscriptions[1]


def a_crash(topic: JournaledTopic) -> SubscriptionState:
    topic.crash_and_recover()
    state = topic.core.subscriptions[1]
    topic.core.open(state, LISTENER)
    return state


def a_checkpoint_and_a_crash(topic: JournaledTopic) -> SubscriptionState:
    topic.take_checkpoint()
    return a_crash(topic)


def a_seal_and_a_crash(topic: JournaledTopic) -> SubscriptionState:
    topic.seal()
    return a_crash(topic)


def a_seal_whose_progress_is_an_object_and_a_crash(topic: JournaledTopic) -> SubscriptionState:
    while not topic.slot % 2:
        topic.add([(1_000, topic.slot)], NOW_MS + 10**9)
    return a_seal_and_a_crash(topic)


def a_seal_a_checkpoint_and_a_crash(topic: JournaledTopic) -> SubscriptionState:
    topic.begin_seal()
    topic.take_checkpoint()
    return a_crash(topic)


in_any_case = pytest.mark.parametrize(
    "after",
    [
        nothing,
        a_crash,
        a_checkpoint_and_a_crash,
        a_seal_and_a_crash,
        a_seal_whose_progress_is_an_object_and_a_crash,
        a_seal_a_checkpoint_and_a_crash,
    ],
    ids=lambda after: after.__name__,
)


@in_any_case
def test_a_nacked_position_comes_back_at_its_time_with_its_count(after: Stored) -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [(P, NOW_MS), (Q, NOW_MS)], 50)
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 1), (Q, 1)]
    nacking.nack(topic, state, [(P, NOW_MS)], 500)
    nacking.nack(topic, state, [(Q, NOW_MS)], 700)
    state = after(topic)
    at(topic, NOW_MS + 549)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 550)
    assert handed(topic, state) == [(P, 2)]
    at(topic, NOW_MS + 749)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 750)
    assert handed(topic, state) == [(Q, 2)]


@pytest.mark.parametrize(("bits", "time_ms"), [(0, 0b1001), (1, 0b1010), (2, 0b1100), (3, 0b10000), (8, 256)])
def test_a_redelivery_time_is_rounded_up(bits: int, time_ms: int) -> None:
    base_ms = 1 << 20
    topic, state = with_rows_in_flight(P)
    at(topic, base_ms)
    nacking.nack(topic, state, [(P, NOW_MS)], 0b1001, bits=bits)
    at(topic, base_ms + time_ms - 1)
    assert handed(topic, state) == []
    at(topic, base_ms + time_ms)
    assert handed(topic, state) == [(P, 1)]


@pytest.mark.parametrize("delay_ms", [10, 900])
def test_one_that_waits_gets_the_new_time_and_does_not_count_again(delay_ms: int) -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 500)
    nacking.nack(topic, state, [(P, NOW_MS)], delay_ms)
    assert topic.core.next_redelivery_ms() == NOW_MS + delay_ms
    at(topic, NOW_MS + delay_ms - 1)
    assert handed(topic, state) == []
    at(topic, NOW_MS + delay_ms)
    assert handed(topic, state) == [(P, 1)]
    at(topic, NOW_MS + 2_000)
    assert handed(topic, state) == []


def test_one_that_is_ready_counts() -> None:
    topic, state = served()
    topic.catch_up(state)
    topic.add([P], NOW_MS)
    topic.pass_all()
    assert state.ready_rows == 1
    nacking.nack(topic, state, [(P, NOW_MS)], 5)
    assert state.ready_rows == 0
    assert handed(topic, state) == []
    at(topic, NOW_MS + 5)
    assert handed(topic, state) == [(P, 1)]


@in_any_case
def test_an_acknowledgement_ends_what_waits(after: Stored) -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [(P, NOW_MS), (Q, NOW_MS)], 50)
    assert topic.acknowledge(state, [(P, NOW_MS)]) == 0
    state = after(topic)
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(Q, 1)]


def test_a_claim_with_another_time_is_ignored() -> None:
    topic, state = with_rows_in_flight(P)
    assert nacking.nack(topic, state, [(P, NOW_MS + 1)], 50).ignored == 1
    assert nacking.nack(topic, state, [(Q, NOW_MS)], 50).ignored == 1
    assert len(state.in_flight) == 1
    assert not len(state.nacks)


def test_a_claim_without_a_time_is_for_the_row_that_is_due() -> None:
    topic, state = with_rows_in_flight(P)
    assert nacking.nack(topic, state, [(P, 0)], 50).ignored == 0
    assert (len(state.in_flight), len(state.nacks)) == (0, 1)


def test_a_position_that_came_back_and_is_gone_begins_anew() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 0)
    assert handed(topic, state) == [(P, 1)]
    topic.acknowledge(state, [(P, NOW_MS)])
    topic.add([P], NOW_MS)
    assert handed(topic, state) == [(P, 0)]


def test_what_a_closed_stream_or_a_lease_returns_has_the_count_it_had() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 0)
    topic.core.open(state, OTHER)
    assert handed(topic, state) == [(P, 1)]
    state.close(LISTENER)
    assert counted([topic.hand_out(state, OTHER, 9)]) == [(P, 1)]
    state.return_held(OTHER)
    assert counted([topic.hand_out(state, OTHER, 9)]) == [(P, 1)]


def test_what_comes_due_while_nobody_listens_is_there_for_who_comes() -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [(P, NOW_MS)], 50)
    nacking.nack(topic, state, [(Q, NOW_MS)], 900)
    state.close(LISTENER)
    at(topic, NOW_MS + 100)
    topic.pass_all()
    topic.core.open(state, LISTENER)
    assert handed(topic, state) == [(P, 1)]
    at(topic, NOW_MS + 900)
    assert handed(topic, state) == [(Q, 1)]


def test_what_comes_due_while_there_is_no_room_waits_for_it() -> None:
    topic, state = served(ready_rows_max=1)
    topic.add([P, Q, R], NOW_MS)
    assert handed(topic, state) == [(P, 0), (Q, 0), (R, 0)]
    nacking.nack(topic, state, [(P, NOW_MS), (Q, NOW_MS), (R, NOW_MS)], 50)
    topic.add([(8, 1)], NOW_MS)
    topic.pass_all()
    topic.catch_up(state)
    assert state.is_full
    at(topic, NOW_MS + 60)
    topic.pass_all()
    assert len(state.nacks) == 3
    assert handed(topic, state) == [((8, 1), 0), (P, 1), (Q, 1), (R, 1)]


def test_the_head_leaves_out_what_waits_when_it_passes_it_after_a_recovery() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 50)
    state = a_crash(topic)
    topic.catch_up(state)
    assert state.is_fed
    assert handed(topic, state) == []
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 1)]


def test_what_comes_back_is_handed_out_in_the_order_of_its_times_and_before_what_is_ready() -> None:
    topic, state = with_rows_in_flight(P, Q, R)
    for position, delay_ms in ((P, 30), (Q, 10), (R, 10)):
        nacking.nack(topic, state, [(position, NOW_MS)], delay_ms)
    topic.add([(3, 3)], NOW_MS)
    topic.core.pass_due(NOW_MS, 100)
    assert state.ready_rows == 1
    at(topic, NOW_MS + 40)
    assert handed(topic, state) == [(Q, 1), (R, 1), (P, 1), ((3, 3), 0)]


def test_what_waits_is_not_early_when_the_clock_steps_back() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 50)
    at(topic, NOW_MS - 10_000)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 49)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 1)]


def test_what_came_back_is_there_with_its_count_when_its_row_is_due_after_a_crash_and_a_clock_set_back() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 50)
    assert handed(at(topic, NOW_MS + 50), state) == [(P, 1)]
    state = a_seal_and_a_crash(at(topic, NOW_MS - 10_000))
    assert not len(state.nacks)
    assert handed(at(topic, NOW_MS - 1), state) == []
    assert handed(at(topic, NOW_MS), state) == [(P, 1)]


def test_a_redelivery_is_not_before_the_row_is_due() -> None:
    topic, state = with_rows_in_flight(P)
    at(topic, NOW_MS - 10_000)
    nacking.nack(topic, state, [(P, NOW_MS)], 5)
    at(topic, NOW_MS - 1)
    assert handed(topic, state) == []
    at(topic, NOW_MS)
    assert handed(topic, state) == [(P, 1)]


def test_what_waits_for_its_redelivery_cannot_be_withdrawn_by_setting_the_clock_back() -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [(P, NOW_MS)], 50)
    state = a_crash(at(topic, NOW_MS - 10_000))
    assert withdrawing.cancel(topic, [P, Q]) == withdrawing.Result(1, already_due=(0,))
    assert withdrawing.reschedule(topic, [P], NOW_MS + 9_000) == withdrawing.Result(0, already_due=(0,))
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 1)]


def test_what_is_staged_is_in_no_hand() -> None:
    topic, state = with_rows_in_flight(P)
    on = nacking.terms(topic.now_ms)
    nacking.stage_nack(topic, state, [Claim(P, NOW_MS)], on)
    assert topic.core.redelivery.is_staged(state, claims_of([(P, NOW_MS)]))
    assert state.backlog == 1
    assert handed(topic, state) == []
    topic.commit()
    assert handed(topic, state) == [(P, 1)]


def test_what_is_staged_when_the_daemon_dies_did_not_happen() -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [(Q, NOW_MS)], 500)
    on = nacking.terms(topic.now_ms, delay_ms=50)
    nacking.stage_nack(topic, state, [Claim(P, NOW_MS), Claim(Q, NOW_MS)], on)
    state = a_crash(topic)
    assert handed(topic, state) == [(P, 0)]
    at(topic, NOW_MS + 499)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 500)
    assert handed(topic, state) == [(Q, 1)]


def test_what_waits_does_not_come_back_at_its_old_time_while_a_new_one_is_staged() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 50)
    nacking.stage_nack(topic, state, [Claim(P, NOW_MS)], nacking.terms(topic.now_ms, delay_ms=500))
    at(topic, NOW_MS + 60)
    assert handed(topic, state) == []
    topic.commit()
    at(topic, NOW_MS + 499)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 500)
    assert handed(topic, state) == [(P, 1)]


# ---- time-outs


def test_what_is_in_flight_too_long_is_nacked_and_counts() -> None:
    topic, state = with_rows_in_flight(P)
    topic.add([Q], NOW_MS)
    topic.elapsed_ms = 100
    assert handed(topic, state) == [(Q, 0)]
    on = nacking.terms(topic.now_ms, delay_ms=50)
    assert not nacking.stage_overdue(topic, state, -1, on, 9).nacks
    assert nacking.stage_overdue(topic, state, 99, on, 9).nacks.keys() == {(0, *P)}
    topic.commit()
    assert handed(topic, state) == []
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 1)]


def test_a_message_that_times_out_when_its_entry_dies_leaves_with_it() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [Claim(P, NOW_MS, 1)])
    for count in (1, 2, 3):
        nacking.nack(topic, state, [(P, NOW_MS)])
        assert (P, count) in handed(topic, state)
    on = nacking.terms(topic.now_ms, delay_ms=50, max_count=3)
    decided = nacking.stage_overdue(topic, state, 0, on, 9)
    assert [*decided.nacks] == []
    assert [*decided.dead] == [(0, *P)]
    topic.commit()
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == []
    assert not len(state.nacks)
    assert not state.backlog


def test_what_is_extended_is_there_since_then() -> None:
    topic, state = with_rows_in_flight(P, Q)
    claims = claims_of([(P, NOW_MS), (R, NOW_MS)])
    assert len(topic.core.redelivery.extend(state, claims, (OTHER,), elapsed_ms=70)) == 2
    assert len(topic.core.redelivery.extend(state, claims, (LISTENER,), elapsed_ms=70)) == 1
    on = nacking.terms(topic.now_ms)
    assert nacking.stage_overdue(topic, state, 69, on, 9).nacks.keys() == {(0, *Q)}
    assert nacking.stage_overdue(topic, state, 70, on, 9).nacks.keys() == {(0, *P)}


def test_a_position_that_is_held_as_two_rows_is_extended_as_one() -> None:
    topic, state = served()
    topic.add([P], NOW_MS)
    topic.add([P], NOW_MS, state.subscription_id)
    assert handed(topic, state) == [(P, 0), (P, 0)]
    assert (
        len(topic.core.redelivery.extend(state, claims_of([(P, NOW_MS), (Q, NOW_MS)]), (LISTENER,), elapsed_ms=70)) == 1
    )


# ---- positions that were never added


@in_any_case
def test_a_position_that_never_was_added_comes_back_like_any(after: Stored) -> None:
    topic, state = served()
    nacking.nack(topic, state, [(P, 0)], 50)
    assert state.backlog == 1
    state = after(topic)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 1)]
    nacking.nack(topic, state, [(P, 0)], 50)
    at(topic, NOW_MS + 100)
    assert handed(topic, state) == [(P, 2)]
    assert topic.acknowledge(state, [(P, 0)]) == 0
    assert not state.backlog


def test_a_position_that_is_owed_as_a_row_is_not_one_that_never_was_added() -> None:
    topic, state = served()
    topic.add([P], NOW_MS + 500)
    topic.add([Q], NOW_MS + 500, state.subscription_id)
    assert nacking.nack(topic, state, [(P, 0), (Q, 0)], 50).ignored == 2


# ---- messages of batches


def packed(position: Position, batch_index: int) -> Position:
    return position[0], position[1] << BATCH_BITS | batch_index


@in_any_case
def test_messages_of_a_batch_come_back_each_at_its_own_time(after: Stored) -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [Claim(P, NOW_MS, 4)], 50)
    nacking.nack(topic, state, [Claim(P, NOW_MS, 5)], 90)
    assert len(state.in_flight) == 1
    assert state.backlog == 3
    state = after(topic)
    if after is not nothing:
        assert handed(topic, state) == [(P, 0)]
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(packed(P, 4), 1)]
    at(topic, NOW_MS + 90)
    assert handed(topic, state) == [(packed(P, 5), 1)]
    assert topic.acknowledge(state, [Claim(P, NOW_MS, 4)]) == 0
    assert state.backlog == 2
    assert topic.acknowledge(state, [Claim(P, NOW_MS)]) == 0
    assert not state.backlog
    assert not len(state.in_flight)


@in_any_case
def test_an_acknowledgement_of_the_entry_ends_its_messages(after: Stored) -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [Claim(P, NOW_MS, 0), Claim(P, NOW_MS, 65_535), Claim(Q, NOW_MS, 0)], 50)
    topic.acknowledge(state, [(P, NOW_MS)])
    assert state.backlog == 2
    state = after(topic)
    at(topic, NOW_MS + 50)
    assert handed(topic, state)[:1] == [(packed(Q, 0), 1)]
    assert state.backlog == 2


def test_messages_of_an_entry_that_never_was_added_die_with_it() -> None:
    topic, state = served()
    nacking.nack(topic, state, [Claim(P, 0, 0), Claim(P, 0, 1), Claim(Q, 0, 0)], 50)
    nacking.nack(topic, state, [(P, 0)], reject=True)
    assert state.backlog == 1
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(packed(Q, 0), 1)]


def test_a_message_counts_from_the_count_of_its_entry() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 0)
    assert handed(topic, state) == [(P, 1)]
    nacking.nack(topic, state, [Claim(P, NOW_MS, 1)], 0)
    assert handed(topic, state) == [(packed(P, 1), 2)]


@in_any_case
def test_a_trim_takes_the_messages_of_the_entries(after: Stored) -> None:
    topic, state = with_rows_in_flight(P, R)
    nacking.nack(topic, state, [Claim(P, NOW_MS, 3), Claim(R, NOW_MS, 3)], 50)
    nacking.nack(topic, state, [((7, 0), 0)], 50)
    ledgers, entries = (nacking.column([each]) for each in Q)
    assert topic.trim_at_once(LedgerRanges(ledgers, entries)) == 3
    state = after(topic)
    at(topic, NOW_MS + 50)
    assert handed(topic, state)[:1] == [(packed(R, 3), 1)]
    assert state.backlog == 2
