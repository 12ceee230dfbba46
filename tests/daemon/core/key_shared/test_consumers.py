"""Consumers of a KEY_SHARED subscription: ordinals, streams and permits."""

from __future__ import annotations

import pytest

from daemon.core.key_shared.key_consumers import Consumers, Joining
from daemon.errors import InvariantViolated
from tests.daemon.core.key_shared._support.keyed import u16, u32


def joined(*numbers: int, stream: int = 1) -> Consumers:
    consumers = Consumers()
    consumers.join([Joining(number, stream, f"c{number}") for number in numbers])
    return consumers


def test_ordinals_begin_at_one_and_are_given_again_when_they_are_free() -> None:
    consumers = joined(10, 20, 30)
    assert [ordinal for ordinal, _ in consumers] == [1, 2, 3]
    consumers.leave([20])
    assert consumers.next_ordinals(2) == [4, 5]
    consumers.forget(20)
    assert consumers.next_ordinals(2) == [2, 4]
    consumers.join([Joining(40, 1, "c"), Joining(50, 1, "c")])
    assert (consumers.ordinal_of(40), consumers.ordinal_of(50)) == (2, 4)


def test_the_ordinals_that_are_foretold_are_those_that_are_given() -> None:
    consumers = joined(*range(1, 40))
    consumers.leave([3, 30, 17])
    for number in (3, 30, 17):
        consumers.forget(number)
    foretold = consumers.next_ordinals(5)
    numbers = range(100, 105)
    consumers.join([Joining(number, 1, "c") for number in numbers])
    assert [consumers.ordinal_of(number) for number in numbers] == foretold


def test_who_has_left_is_known_by_number_until_it_is_forgotten_and_gets_nothing() -> None:
    consumers = joined(10, 20)
    consumers.grant(10, 5, 100)
    consumers.leave([10])
    assert len(consumers) == 1
    assert 10 not in consumers
    assert consumers.departed == [10]
    assert consumers.ordinals_of(u32([10, 20])).tolist() == [1, 2]
    assert not consumers.permits()[1]
    assert consumers.permits_together == 0
    consumers.forget(10)
    assert consumers.departed == []


def test_a_number_joins_once() -> None:
    consumers = joined(10)
    with pytest.raises(InvariantViolated, match="number 10"):
        consumers.join([Joining(10, 2, "again")])


def test_columns_of_numbers_and_ordinals_are_each_others_inverse() -> None:
    consumers = joined(10, 20, 30)
    numbers = u32([30, 10, 10, 20])
    ordinals = consumers.ordinals_of(numbers)
    assert ordinals.tolist() == [3, 1, 1, 2]
    assert consumers.numbers_of(ordinals).tolist() == numbers.tolist()
    assert consumers.numbers_of(u16(0)).tolist() == [0]


def test_a_grant_tells_whether_there_were_no_permits_and_is_cut() -> None:
    consumers = joined(10)
    assert consumers.grant(10, 3, 5)
    assert not consumers.grant(10, 4, 5)
    assert consumers.permits_of(1) == consumers.permits_together == 5
    consumers.sent(u16(1, 1, 1, 1, 1))
    assert consumers.grant(10, 1, 5)


def test_consumers_of_a_full_stream_count_as_without_permits_also_those_that_join_then() -> None:
    consumers = joined(10)
    consumers.join([Joining(20, 2, "other", permits=7)])
    consumers.grant(10, 3, 100)
    consumers.set_full(1, True)
    consumers.join([Joining(30, 1, "late", permits=4)])
    assert consumers.permits().tolist()[:4] == [0, 0, 7, 0]
    assert consumers.permits_of(3) == 4
    consumers.set_full(1, False)
    assert consumers.permits().tolist()[:4] == [0, 3, 7, 4]


def test_consumers_are_found_by_stream_and_listed_by_number() -> None:
    consumers = joined(30, 10)
    consumers.join([Joining(20, 2, "other")])
    assert consumers.on_stream(1) == [30, 10]
    assert consumers.are_on(2).tolist()[:4] == [False, False, False, True]
    assert [consumer.number for _, consumer in consumers.behind(0, 2)] == [10, 20]
    assert [consumer.number for _, consumer in consumers.behind(20, 2)] == [30]
    assert consumers.streams_of(consumers.ordinals_of(u32([20, 30]))).tolist() == [2, 1]


def test_columns_grow_with_the_consumers() -> None:
    consumers = joined(*range(1, 101))
    consumers.grant(100, 9, 10)
    assert consumers.permits()[100] == 9
    assert consumers.numbers_of(u16(100, 17)).tolist() == [100, 17]
