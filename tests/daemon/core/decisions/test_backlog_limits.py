"""The limits of a subscription's backlog count what is stored and what is staged, and refuse only what is new."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from daemon.core.decisions.nack_decisions import NackBatch
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.limits import BacklogLimits
from daemon.errors import QuotaExceeded
from tests.daemon.core._support import nacking
from tests.daemon.core._support.journaled_topic import JournaledTopic, claims_of
from tests.daemon.core._support.oracle import Claim
from tests.daemon.core.decisions.test_redelivery import LISTENER, NOW_MS, P, Q, R, Stored, at, handed, in_any_case

STRANGE = (9, 1), (9, 2), (9, 3)


def served(*, nacked: int = 1 << 20, dead: int = 1 << 20) -> tuple[JournaledTopic, SubscriptionState]:
    topic = JournaledTopic(now_ms=NOW_MS, backlog_limits=BacklogLimits(nacked, dead))
    state = topic.create_subscription()
    topic.core.open(state, LISTENER)
    topic.add((P, Q, R), NOW_MS)
    assert len(handed(topic, state)) == 3
    return topic, state


def check(topic: JournaledTopic, state: SubscriptionState, claims: Sequence[Claim], *, reject: bool = False) -> None:
    topic.core.redelivery.check_room(state, NackBatch(claims_of(claims), reject=reject))


@in_any_case
def test_rows_that_no_add_has_brought_are_counted_until_they_leave(after: Stored) -> None:
    topic, state = served(nacked=4)
    nacking.nack(topic, state, [(P, NOW_MS), *((strange, 0) for strange in STRANGE)], 50)
    assert state.own_nacked_rows == 3
    state = after(topic)
    assert (state.own_nacked_rows, state.own_nacked_room) == (3, 1)
    check(topic, state, [Claim((9, 4), 0), *(Claim(strange, 0) for strange in STRANGE), Claim(P, NOW_MS)])
    with pytest.raises(QuotaExceeded, match="has 2 positions"):
        check(topic, state, [Claim((9, 4), 0), Claim((9, 5), 0)])
    at(topic, NOW_MS + 50)
    assert {position for position, _ in handed(topic, state)} >= {P, *STRANGE}
    topic.acknowledge(state, [Claim(strange, 0) for strange in STRANGE[:2]])
    assert state.own_nacked_rows == 1
    check(topic, state, [Claim((9, number), 0) for number in (4, 5, 6)])


def test_what_is_staged_takes_room() -> None:
    topic, state = served(nacked=3, dead=2)
    nacking.stage_nack(topic, state, [Claim(strange, 0) for strange in STRANGE], nacking.terms(NOW_MS))
    nacking.stage_nack(topic, state, [Claim(P, NOW_MS)], nacking.terms(NOW_MS), reject=True)
    assert (state.own_nacked_room, state.dead_letter_room) == (0, 1)
    with pytest.raises(QuotaExceeded):
        check(topic, state, [Claim((9, 4), 0)])
    with pytest.raises(QuotaExceeded, match=r"there are 1 dead letters.* make 2 more"):
        check(topic, state, [Claim(Q, NOW_MS), Claim(R, NOW_MS)], reject=True)
    topic.commit()
    assert (state.own_nacked_room, state.dead_letter_room) == (0, 1)


def test_a_message_of_a_batch_needs_room_once() -> None:
    topic, state = served(nacked=1)
    part = Claim(P, NOW_MS, 4)
    check(topic, state, [part])
    nacking.nack(topic, state, [part])
    check(topic, state, [part])
    with pytest.raises(QuotaExceeded):
        check(topic, state, [Claim(P, NOW_MS, 5)])
    check(topic, state, [Claim((9, 9), 77, 5)])


@in_any_case
def test_as_many_die_as_there_is_room_for_and_the_others_come_again(after: Stored) -> None:
    topic, state = served(dead=2)
    decided = nacking.nack(topic, state, [(position, NOW_MS) for position in (P, Q, R)], 30, max_count=0)
    assert (len(decided.dead), len(decided.nacks)) == (2, 1)
    state = after(topic)
    assert (len(state.dead_letters), state.dead_letter_room) == (2, 0)
    at(topic, NOW_MS + 30)
    assert handed(topic, state) == [(R, 1)]
    nacking.stage_purge(topic, state, [1])
    topic.commit()
    assert nacking.nack(topic, state, [(R, NOW_MS)], max_count=0).dead
    assert len(state.dead_letters) == 2


def test_a_repeated_rejection_needs_no_room() -> None:
    topic, state = served(dead=1)
    claim = Claim(P, NOW_MS)
    check(topic, state, [claim], reject=True)
    nacking.nack(topic, state, [claim], reject=True)
    check(topic, state, [claim], reject=True)
    with pytest.raises(QuotaExceeded):
        check(topic, state, [claim, Claim(Q, NOW_MS)], reject=True)
