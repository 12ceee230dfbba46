"""A hash stays with its consumer until what is decided of its rows is durable."""

from __future__ import annotations

import numpy as np

from daemon.core.backlog.in_flight import InFlight
from daemon.core.index.position_keys import KeyedRows, bitmap_of
from daemon.core.key_shared.draining_hashes import HashHolds
from daemon.core.key_shared.key_consumers import Consumers, Joining
from tests.daemon.core.key_shared._support.keyed import Keyed, u16, u32

ONE, TWO = 10, 20


class Held:
    """Rows IN_FLIGHT at two consumers, of ordinals 1 and 2."""

    def __init__(self) -> None:
        self.keyed = Keyed()
        self.consumers = Consumers()
        self.consumers.join([Joining(ONE, 1, "one"), Joining(TWO, 1, "two")])
        self.holds = HashHolds(self.consumers)
        self.in_flight = InFlight()
        self.in_flight.watcher = self.holds

    def send(self, first_entry: int, number: int, *slots: int) -> KeyedRows:
        rows = self.keyed.of_slots(first_entry, *slots)
        self.in_flight.add(rows, number)
        return rows

    def claim(self, rows: KeyedRows) -> None:
        taken = self.in_flight.take(rows.keys, rows.rows.deliver_at_ms)
        assert taken is None or taken.all()

    def may_have(self, slot: int) -> list[bool]:
        """Whether consumer one, and two, may have rows of a slot."""
        draining = self.holds.draining
        return [bool(draining.may_receive(u16(slot), u16(ordinal))[0]) for ordinal in (1, 2)]


def test_a_row_that_is_acknowledged_holds_its_hash_until_that_is_durable() -> None:
    held = Held()
    rows = held.send(0, ONE, 5, 6)
    held.claim(rows)
    assert held.may_have(5) == [True, False]
    held.holds.settle(bitmap_of(rows.keys[:1]))
    assert held.may_have(5) == [True, True]
    assert held.may_have(6) == [True, False]


def test_a_row_that_comes_back_without_a_decision_frees_its_hash_at_once() -> None:
    held = Held()
    held.send(0, ONE, 5)
    rows = held.send(1, TWO, 6)
    held.in_flight.take_dispatchers([ONE])
    held.in_flight.take_keys(bitmap_of(rows.keys))
    assert held.may_have(5) == held.may_have(6) == [True, True]


def test_what_was_never_in_flight_settles_nothing() -> None:
    held = Held()
    rows = held.send(0, ONE, 5)
    held.holds.settle(bitmap_of(rows.keys))
    assert held.may_have(5) == [True, False]


def test_the_hash_of_a_row_that_gets_another_key_is_held_under_that() -> None:
    held = Held()
    rows = held.send(0, ONE, 5, 6)
    held.claim(rows)
    new_keys = rows.keys + np.uint64(1_000)
    held.holds.rename(rows.keys[::-1], new_keys[::-1])
    held.holds.settle(bitmap_of(rows.keys))
    assert held.may_have(5) == held.may_have(6) == [True, False]
    held.holds.settle(bitmap_of(new_keys[:1]))
    assert held.may_have(5) == [True, True]
    assert held.may_have(6) == [True, False]


def test_a_consumer_that_left_keeps_its_ordinal_while_a_decision_of_its_rows_is_not_durable() -> None:
    held = Held()
    rows = held.send(0, ONE, 5)
    held.claim(rows)
    held.in_flight.take_dispatchers([ONE])
    held.consumers.leave([ONE])
    held.holds.forget_departed()
    assert held.consumers.departed == [ONE]
    assert held.consumers.next_ordinals(1) == [3]
    assert held.may_have(5) == [True, False]
    held.holds.settle(bitmap_of(rows.keys))
    assert held.consumers.departed == []
    assert held.consumers.next_ordinals(1) == [1]
    assert held.may_have(5) == [True, True]


def test_a_consumer_that_left_and_held_nothing_is_forgotten_at_once() -> None:
    held = Held()
    held.consumers.leave([TWO])
    held.holds.forget_departed()
    assert held.consumers.departed == []


def test_rows_of_many_consumers_are_counted_each_for_its_own() -> None:
    held = Held()
    rows = held.keyed.of_slots(0, 5, 6, 5, 7)
    held.in_flight.add(rows, u32([ONE, TWO, ONE, TWO]))
    assert held.holds.draining.unacked[[5, 6, 7]].tolist() == [2, 1, 1]
    assert held.holds.draining.holders[[5, 6, 7]].tolist() == [1, 2, 2]
