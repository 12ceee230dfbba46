"""Dead letters of a topic: nothing is lost with what was negatively acknowledged too often, or rejected."""

from __future__ import annotations

from daemon.core.decisions.subscription_state import SubscriptionState
from tests.daemon.core._support import nacking
from tests.daemon.core._support.journaled_topic import Position, Until, batch_of, claims_of
from tests.daemon.core._support.oracle import Claim
from tests.daemon.core._support.redelivery_invariants import dead_letters, listed_dead_letters
from tests.daemon.core._support.redelivery_oracle import REJECTED, TOO_OFTEN
from tests.daemon.core.decisions.test_redelivery import (
    NOW_MS,
    P,
    Q,
    R,
    Stored,
    a_crash,
    at,
    handed,
    in_any_case,
    nothing,
    served,
    with_rows_in_flight,
)


def dead(state: SubscriptionState) -> dict[int, tuple[Position, int, int, str]]:
    """(position, count, reason, text) by id."""
    rows = listed_dead_letters(dead_letters(state))
    return {number: ((each[0], each[1]), each[5], each[7], each[8]) for number, each in rows.items()}  # type: ignore[misc]


@in_any_case
def test_a_position_that_is_nacked_too_often_is_a_dead_letter(after: Stored) -> None:
    topic, state = with_rows_in_flight(P)
    for count in (1, 2):
        nacking.nack(topic, state, [(P, NOW_MS)], 0, max_count=2)
        assert handed(topic, state) == [(P, count)]
    assert nacking.nack(topic, state, [(P, NOW_MS)], 0, max_count=2).dead
    state = after(topic)
    assert not state.backlog
    assert dead(state) == {1: (P, 3, TOO_OFTEN, "")}
    assert handed(topic, state) == []


def test_with_a_count_of_none_the_first_nack_makes_a_dead_letter() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], 0, max_count=0)
    assert dead(state) == {1: (P, 1, TOO_OFTEN, "")}


@in_any_case
def test_ids_of_dead_letters_are_never_given_again(after: Stored) -> None:
    topic, state = with_rows_in_flight(P, Q, R)
    nacking.nack(topic, state, [(P, NOW_MS)], reject=True, text="bad")
    nacking.nack(topic, state, [(Q, NOW_MS)], reject=True, text="worse")
    nacking.stage_purge(topic, state, [2])
    topic.commit()
    state = after(topic)
    if after is not nothing:
        assert handed(topic, state) == [(R, 0)]
    nacking.nack(topic, state, [(R, NOW_MS)], reject=True, text="worst")
    assert [*dead(state)] == [1, 3]


def test_a_row_that_was_accepted_does_not_leave_with_a_dead_letter_of_its_slot() -> None:
    topic, state = served()
    owner, on = state.subscription_id, nacking.terms(NOW_MS)
    topic.stage_add(batch_of([Q], deliver_at_ms=[NOW_MS + 50]), owner)
    nacking.stage_nack(topic, state, [Claim(P, 0)], on, reject=True)
    added = topic.stage_add(batch_of([P], deliver_at_ms=[NOW_MS + 50]), owner)
    topic.commit()
    assert topic.core.indexes.present_rows == 1 + added.accepted
    assert len(state.dead_letters) == 1
    assert topic.add([P], NOW_MS + 60, owner).accepted == 1 - added.accepted
    assert not topic.core.redelivery.is_staged(state, claims_of([Claim(P, 0)]))


def test_a_dead_letter_of_a_subscription_that_was_deleted_since_left_the_index() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], reject=True)
    topic.delete_subscription(state.subscription_id, topic.gone_with(state.subscription_id), until=Until.COMMITTED)
    topic.crash_and_recover()
    assert not topic.core.indexes.present_rows


def test_dead_letters_of_one_slot_have_ascending_ids_whatever_they_died_of() -> None:
    topic, state = with_rows_in_flight(P, Q, R)
    on = nacking.terms(topic.now_ms, max_count=0)
    nacking.stage_nack(topic, state, [Claim(P, NOW_MS)], on)
    nacking.stage_nack(topic, state, [Claim(Q, NOW_MS)], on, reject=True, text="bad")
    nacking.stage_nack(topic, state, [Claim(R, NOW_MS)], on)
    topic.commit()
    assert [(number, reason) for number, (_, _, reason, _) in dead(state).items()] == [
        (1, TOO_OFTEN),
        (2, REJECTED),
        (3, TOO_OFTEN),
    ]
    state = a_crash(topic)
    assert [*dead(state)] == [1, 2, 3]


@in_any_case
def test_a_replayed_dead_letter_is_delivered_again_and_begins_anew(after: Stored) -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], reject=True)
    assert nacking.stage_replay(topic, state, dead_letters(state), NOW_MS + 50) == ({1: (1, *P)}, 0)
    topic.commit()
    state = after(topic)
    assert not len(state.dead_letters)
    at(topic, NOW_MS + 49)
    assert handed(topic, state) == []
    at(topic, NOW_MS + 50)
    assert handed(topic, state) == [(P, 0)]


def test_a_dead_letter_whose_position_has_a_row_stays() -> None:
    topic, state = with_rows_in_flight(P)
    nacking.nack(topic, state, [(P, NOW_MS)], reject=True)
    topic.add([P], NOW_MS + 500, state.subscription_id)
    assert nacking.stage_replay(topic, state, dead_letters(state), NOW_MS) == ({}, 1)
    assert [*dead(state)] == [1]


def test_dead_letters_stay_when_everything_is_cleared() -> None:
    topic, state = with_rows_in_flight(P, Q)
    nacking.nack(topic, state, [(P, NOW_MS)], reject=True)
    nacking.nack(topic, state, [(Q, NOW_MS)], 500)
    topic.trim_at_once(None, state.subscription_id)
    assert [*dead(state)] == [1]
    assert not len(state.nacks)
    assert not state.backlog
