"""What a topic needs of its log, and that a row which moves while others have their turn is not missed."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.index import retention
from daemon.core.index.retention import RetentionScan
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position
from tests.daemon.core._support.withdrawing import reschedule
from tests.daemon.core.decisions.test_topic import NOW_MS, P, Q, R, all_of, handed, opened, with_subscriptions
from tests.daemon.core.decisions.test_trimming import left_in, upto

T = TypeVar("T")


def ended(look: Generator[None, None, T]) -> T:
    while True:
        try:
            next(look)
        except StopIteration as done:
            result: T = done.value
            return result


def needed(topic: JournaledTopic, ledgers: Iterable[int] | None = None, *, most: int = 1_000) -> dict[int, int]:
    """The lowest entry of each ledger."""
    indexes = topic.core.indexes
    if ledgers is None:
        pages = indexes.places.in_order(len(indexes.places), None).tolist()
    else:
        pages = retention.pages_of_ledgers(indexes, ledgers)
    found = ended(retention.retained(indexes, pages, most))
    assert found.is_complete
    return dict(zip(found.ledger_id.tolist(), found.lowest_entry_id.tolist(), strict=True))


def survey(topic: JournaledTopic) -> RetentionScan:
    return ended(retention.surveyed(topic.core.indexes))


positions = st.tuples(st.sampled_from([3, 7, 8]), st.sampled_from([0, 1, 5, (1 << 32) + 2, 3 << 32]))


@given(steps=st.lists(st.tuples(st.sets(positions, min_size=1, max_size=6), st.booleans(), positions), max_size=4))
def test_of_each_ledger_the_lowest_entry_is_found_whatever_bucket_has_it(
    steps: list[tuple[set[Position], bool, Position]],
) -> None:
    topic = with_subscriptions(1)
    for added, sealed, trimmed in steps:
        topic.add(sorted(added), NOW_MS + 5)
        if sealed:
            topic.seal()
        topic.trim_at_once(upto(trimmed))
    expected: dict[int, int] = {}
    for ledger_id, entry_id in left_in(topic):
        expected[ledger_id] = min(entry_id, expected.get(ledger_id, entry_id))
    assert needed(topic) == expected
    assert list(needed(topic)) == sorted(expected)
    assert needed(topic, [8, 4, 3]) == {each: expected[each] for each in (3, 8) if each in expected}
    assert survey(topic) == RetentionScan(min(expected.items(), default=None), len(expected))


def test_due_rows_own_ones_and_messages_of_batches_are_needed_and_dead_letters_are_not() -> None:
    topic = with_subscriptions(1)
    one = opened(topic, 1)
    topic.add([(7, 4)], NOW_MS)
    topic.add([(7, 3)], NOW_MS + 9, subscription_id=1)
    assert needed(topic) == {7: 3}
    topic.pass_all()
    topic.acknowledge(one, all_of(handed(topic, one)))
    topic.trim_at_once(upto((7, 3)))
    assert needed(topic) == {}
    assert survey(topic) == RetentionScan(None, 0)


def test_an_answer_has_at_most_as_many_ledgers_and_goes_on_behind_the_last() -> None:
    topic = with_subscriptions(1)
    topic.add([(ledger, 1) for ledger in (9, 2, 5)], NOW_MS + 5)
    indexes = topic.core.indexes
    first = ended(retention.retained(indexes, indexes.places.in_order(len(indexes.places), None).tolist(), 2))
    assert (first.ledger_id.tolist(), first.is_complete) == ([2, 5], False)
    rest = ended(retention.retained(indexes, indexes.places.in_order(len(indexes.places), 5).tolist(), 2))
    assert (rest.ledger_id.tolist(), rest.is_complete) == ([9], True)


@pytest.mark.parametrize("move", ["seal", "reschedule"])
def test_a_row_that_moves_while_others_have_their_turn_is_found(move: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "LOOKS_A_TURN", 1)
        rows_that_move_are_found(move)


def rows_that_move_are_found(move: str) -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 5)
    topic.seal()
    topic.add([R], NOW_MS + 5)
    indexes = topic.core.indexes
    look = retention.retained(indexes, indexes.places.in_order(len(indexes.places), None).tolist(), 10)
    next(look)
    if move == "seal":
        topic.seal()
    else:
        assert reschedule(topic, [R], NOW_MS + 50).left == 1
        topic.seal()
    assert ended(look).ledger_id.tolist() == [P[0], R[0]]


def test_ledgers_of_damaged_buckets_are_uncertain_until_they_are_added_again() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS + 5)
    topic.seal()
    (name,) = topic.core.index.sealed
    topic.add([R], NOW_MS + 5)
    topic.quarantine(name)
    assert retention.uncertain(topic.core.indexes) == [(P[0], Q[0])]
    assert needed(topic) == {R[0]: R[1]}
    assert survey(topic) == RetentionScan((P[0], 0), 1)
    topic.add([P, Q], NOW_MS + 5)
    assert retention.uncertain(topic.core.indexes) == []
    assert survey(topic).lowest == P


def test_a_page_that_no_bucket_holds_any_more_is_not_looked_at() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 5)
    topic.seal()
    topic.trim_at_once()
    for name in list(topic.core.index.sealed):
        topic.core.drop(name)
    assert needed(topic) == {}
    assert needed(topic, [P[0]]) == {}
    assert np.all(topic.core.indexes.places.in_order(1, None) == [0])
