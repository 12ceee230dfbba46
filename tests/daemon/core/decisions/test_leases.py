"""Leases, one story at a time: rows that are in the hands of a number that does not listen."""

from __future__ import annotations

import dataclasses

from daemon.core.decisions.subscription_state import SubscriptionState
from storage_backends.formats.manifest import SubscriptionPolicy
from tests.daemon.core._support.journaled_topic import JournaledTopic, claims_of, listed
from tests.daemon.core.decisions.test_topic import NOW_MS, P, Q, R, opened, with_subscriptions

LISTENER, LEASE, OTHER = 1, 2, 3


def with_rows() -> tuple[JournaledTopic, SubscriptionState]:
    """P, Q and R are READY, and somebody listens."""
    topic = with_subscriptions(1)
    state = opened(topic, 1, LISTENER)
    topic.add([R, Q, P], [NOW_MS - 3, NOW_MS - 2, NOW_MS - 1])
    topic.pass_all()
    topic.catch_up(state)
    return topic, state


def test_a_lease_that_ends_returns_its_rows_to_the_front_in_position_order() -> None:
    _, state = with_rows()
    assert [row[1:] for row in listed(state.hand_out(LEASE, 2))] == [R, Q]
    assert (state.leased_rows, state.held_rows(LEASE), state.backlog) == (2, 2, 3)
    assert state.return_held(LEASE) == 2
    assert (state.leased_rows, state.held_rows(LEASE), state.backlog) == (0, 0, 3)
    assert [row[1:] for row in listed(state.hand_out(LISTENER, 9))] == [Q, R, P]
    assert state.leased_rows == 0


def test_what_a_lease_holds_is_acknowledged_as_what_a_stream_holds() -> None:
    topic, state = with_rows()
    state.hand_out(LEASE, 2)
    assert topic.acknowledge(state, [(R, NOW_MS - 3), (P, NOW_MS - 1), (Q, NOW_MS)]) == 1
    assert (state.backlog, state.leased_rows, state.held_rows(LEASE)) == (1, 1, 1)


def test_only_what_a_lease_holds_with_that_time_is_extended() -> None:
    topic, state = with_rows()
    state.hand_out(LEASE, 1)
    state.hand_out(LISTENER, 1)
    claims = claims_of([(R, NOW_MS - 2), (R, NOW_MS - 4), (Q, NOW_MS - 2), (P, NOW_MS - 1)])
    assert len(topic.core.move_held(state, claims, [LEASE], OTHER)) == 4
    assert len(topic.core.move_held(state, claims_of([(R, NOW_MS - 3)]), [LEASE], OTHER)) == 0
    assert [state.held_rows(number) for number in (LISTENER, LEASE, OTHER)] == [1, 0, 1]
    assert state.return_held(LEASE) == 0
    assert state.return_held(OTHER) == 1


def test_a_lease_outlives_whoever_listens_and_its_rows_are_read_again_by_the_next() -> None:
    topic, state = with_rows()
    state.hand_out(LEASE, 1)
    state.close(LISTENER)
    assert (state.ready_rows, state.leased_rows) == (0, 1)
    assert state.return_held(LEASE) == 1
    assert state.ready_rows == 0
    topic.core.open(state, OTHER)
    topic.catch_up(state)
    assert [row[1:] for row in listed(state.hand_out(OTHER, 9))] == [R, Q, P]


def test_all_together_hold_no_more_than_the_subscription_allows() -> None:
    topic, state = with_rows()
    policy = SubscriptionPolicy(in_flight_rows_max=2)
    state.stored = dataclasses.replace(state.stored, policy=policy)
    assert len(state.hand_out(LEASE, 1)) == 1
    assert state.available_rows == 1
    assert len(state.hand_out(LISTENER, 9)) == 1
    assert (state.available_rows, len(state.hand_out(OTHER, 9))) == (0, 0)
    topic.acknowledge(state, [(R, NOW_MS - 3)])
    assert state.available_rows == 1
    state.stored = dataclasses.replace(state.stored, policy=SubscriptionPolicy())
    assert state.available_rows == 1
    assert len(state.hand_out(OTHER, 9)) == 1
