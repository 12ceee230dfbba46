"""Who holds what is unacknowledged of each hash: the rules of PIP-379's tracker, and any order of events against a
dictionary.
"""

from __future__ import annotations

import collections
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daemon.core.key_shared.draining_hashes import DrainingHashes
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16
from daemon.errors import InvariantViolated
from tests._support import state_machines

# More than draining hashes cost in Pulsar by PIP-379, which plans with 80 bytes.
BYTES_A_HASH_MAX = 80
SLOTS = (0, 1, 2, 700, HASH_SLOTS - 1)
CONSUMERS = (1, 2, 3, 65_535)


def u16(*values: int) -> U16:
    return np.array(values, np.uint16)


def owned_by(owners: dict[int, int]) -> U16:
    columns = np.zeros(HASH_SLOTS, np.uint16)
    for slot, owner in owners.items():
        columns[slot] = owner
    return columns


def are_empty(hashes: DrainingHashes) -> bool:
    return not (hashes.holders.any() or hashes.unacked.any() or hashes.attempts(u16(*SLOTS)).any())


def test_what_a_consumer_receives_is_counted_by_hash() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 9, 5, 5), u16(1, 2, 1, 1))
    assert hashes.holders[[5, 9, 6]].tolist() == [1, 2, 0]
    assert hashes.unacked[[5, 9, 6]].tolist() == [3, 1, 0]


def test_positions_are_given_to_a_consumer() -> None:
    """A consumer is an ordinal from 1 on; hash 0 is a hash as any other, that of positions without a key."""
    hashes = DrainingHashes()
    with pytest.raises(InvariantViolated, match="no consumer"):
        hashes.received(u16(5, 6), u16(1, 0))
    assert are_empty(hashes)
    hashes.received(u16(0), u16(1))
    assert hashes.may_receive(u16(0, 0), u16(1, 2)).tolist() == [True, False]


def test_a_hash_is_free_when_its_last_position_is_settled() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 5, 9), u16(1, 1, 1))
    hashes.settled(u16(5), 1)
    assert not hashes.may_receive(u16(5), u16(2)).any()
    hashes.settled(u16(5), 1)
    assert hashes.may_receive(u16(5, 9), u16(2, 2)).tolist() == [True, False]
    assert hashes.holders[5] == 0


def test_a_column_may_settle_for_several_consumers_and_a_hash_several_times() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 5, 9, 9, 9), u16(1, 1, 2, 2, 2))
    hashes.settled(u16(9, 5, 9, 5), u16(2, 1, 2, 1))
    assert hashes.unacked[[5, 9]].tolist() == [0, 1]
    assert hashes.holders[[5, 9]].tolist() == [0, 2]


@pytest.mark.parametrize("consumers", [2, u16(1, 2)], ids=["one", "a column"])
def test_another_consumer_cannot_settle_what_one_holds(consumers: U16 | int) -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 5, 9), u16(1, 1, 1))
    with pytest.raises(InvariantViolated, match="consumer 2 gives up hash 5, which consumer 1 holds"):
        hashes.settled(u16(5, 5), consumers)
    assert hashes.unacked[[5, 9]].tolist() == [2, 1]


@pytest.mark.parametrize("slots", [(5, 5, 9, 5), (7,), (9, 5, 7)], ids=["too often", "never", "one never"])
def test_no_more_is_settled_than_is_held(slots: tuple[int, ...]) -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 5, 9), u16(1, 1, 1))
    with pytest.raises(InvariantViolated):
        hashes.settled(u16(*slots), 1)
    assert hashes.unacked[[5, 7, 9]].tolist() == [2, 0, 1]
    assert hashes.holders[[5, 7, 9]].tolist() == [1, 0, 1]


def test_nobody_settles_a_hash_that_nobody_holds() -> None:
    with pytest.raises(InvariantViolated):
        DrainingHashes().settled(u16(5), 0)


def test_a_hash_is_not_given_to_another_consumer_than_its_holder() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5), u16(1))
    with pytest.raises(InvariantViolated, match="hash 5 is given to consumer 2"):
        hashes.received(u16(9, 5, 9), u16(2, 2, 2))
    assert hashes.holders[[5, 9]].tolist() == [1, 0]
    assert hashes.unacked[[5, 9]].tolist() == [1, 0]


def test_one_hash_is_not_given_to_two_consumers_at_once() -> None:
    hashes = DrainingHashes()
    with pytest.raises(InvariantViolated, match="hash 5"):
        hashes.received(u16(5, 9, 5), u16(1, 1, 2))
    assert are_empty(hashes)


def test_the_holder_itself_is_not_kept_back() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5), u16(1))
    assert hashes.may_receive(u16(5, 5), u16(1, 1)).all()


def test_another_consumer_is_kept_back() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5), u16(1))
    assert not hashes.may_receive(u16(5, 5), u16(2, 65_535)).any()


def test_a_hash_that_nobody_holds_keeps_nobody_back() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5), u16(1))
    assert hashes.may_receive(u16(4, 6, 0), u16(2, 2, 2)).all()


def test_what_was_unblocked_is_told_in_one_piece_and_once() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(9, 5, 6), u16(1, 1, 2))
    hashes.blocked(u16(5, 9, 6, 5))
    hashes.settled(u16(9), 1)
    assert hashes.has_unblocked
    hashes.settled(u16(5), 1)
    assert hashes.take_unblocked().tolist() == [5, 9]
    assert not hashes.has_unblocked
    assert hashes.take_unblocked().tolist() == []
    hashes.settled(u16(6), 2)
    assert hashes.take_unblocked().tolist() == [6]


def test_a_hash_that_is_unblocked_twice_between_two_looks_is_told_once() -> None:
    hashes = DrainingHashes()
    for consumer in (1, 2):
        hashes.received(u16(5), u16(consumer))
        hashes.blocked(u16(5))
        hashes.settled(u16(5), consumer)
    assert hashes.take_unblocked().tolist() == [5]
    assert hashes.cleared_total == 2


def test_a_hash_that_kept_nothing_back_is_not_told() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 9), u16(1, 1))
    hashes.blocked(u16(9))
    hashes.settled(u16(5), 1)
    assert not hashes.has_unblocked
    assert hashes.take_unblocked().tolist() == []
    assert hashes.cleared_total == 0


def test_attempts_are_counted_while_one_holds_the_hash() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5), u16(1))
    hashes.blocked(u16(5, 5, 9))
    hashes.blocked(u16(5))
    assert hashes.attempts(u16(9, 5)).tolist() == [0, 3]
    hashes.settled(u16(5), 1)
    hashes.received(u16(5), u16(2))
    assert hashes.attempts(u16(5)).tolist() == [0]


def test_attempts_stay_at_the_highest_number_there_is() -> None:
    hashes = DrainingHashes()
    hashes.received(u16(5, 9), u16(1, 1))
    hashes._attempts[5] = (1 << 32) - 2
    hashes.blocked(u16(5, 9))
    assert hashes.attempts(u16(5, 9)).tolist() == [(1 << 32) - 1, 1]
    hashes.blocked(u16(5, 5, 9))
    assert hashes.attempts(u16(5, 9)).tolist() == [(1 << 32) - 1, 2]


def test_a_hash_drains_while_another_consumer_has_it() -> None:
    """Also back: when the holder has it again it drains no more, whatever was kept back."""
    hashes = DrainingHashes()
    hashes.received(u16(9, 5, 6), u16(1, 1, 2))
    hashes.blocked(u16(5))
    assert hashes.draining(owned_by({9: 1, 5: 1, 6: 2, 7: 3})).tolist() == []
    assert hashes.draining(owned_by({9: 2, 5: 3, 6: 2, 7: 3})).tolist() == [5, 9]
    assert hashes.draining(owned_by({9: 1, 5: 1, 6: 1})).tolist() == [6]
    assert hashes.draining(owned_by({5: 2})).tolist() == [5]


def test_when_all_is_settled_nothing_is_left() -> None:
    """A consumer that leaves gives up what it holds in one piece."""
    hashes = DrainingHashes()
    slots = u16(*SLOTS, *SLOTS, 5, 6)
    hashes.received(slots, np.full(len(slots), 7, np.uint16))
    hashes.blocked(u16(*SLOTS))
    hashes.settled(slots, 7)
    assert are_empty(hashes)
    assert hashes.take_unblocked().tolist() == sorted(SLOTS)
    assert hashes.cleared_total == len(SLOTS)


def test_nothing_may_be_named() -> None:
    hashes = DrainingHashes()
    none = u16()
    hashes.received(none, none)
    hashes.settled(none, none)
    hashes.settled(none, 1)
    hashes.blocked(none)
    assert len(hashes.may_receive(none, none)) == len(hashes.attempts(none)) == 0
    assert are_empty(hashes)


def test_a_draining_hash_costs_at_most_80_bytes(record_property: Callable[[str, object], None]) -> None:
    """72, with 10,000 of them: three positions each, as many kept back, and all of them just unblocked; by what Python
    and numpy ask of the system."""
    slots = np.arange(10_000, dtype=np.uint16) * np.uint16(6)
    consumers = slots % np.uint16(100) + np.uint16(1)
    owners = np.full(HASH_SLOTS, 101, np.uint16)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        hashes = DrainingHashes()
        for _ in range(3):
            hashes.received(slots, consumers)
        hashes.blocked(slots)
        held_bytes = tracemalloc.get_traced_memory()[0] - before
        draining = len(hashes.draining(owners))
        for _ in range(3):
            hashes.settled(slots, consumers)
        unblocked_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert draining == len(slots)
    record_property("bytes_a_draining_hash", round(held_bytes / draining, 1))
    assert 0 < held_bytes <= BYTES_A_HASH_MAX * draining
    assert unblocked_bytes <= BYTES_A_HASH_MAX * draining


class DrainingHashesMachine(RuleBasedStateMachine):
    """Draining hashes and dictionaries side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes = DrainingHashes()
        self.held: dict[int, list[int]] = collections.defaultdict(list)
        self.attempts: collections.Counter[int] = collections.Counter()
        self.unblocked: set[int] = set()
        self.cleared = 0

    @rule(slots=st.lists(st.sampled_from(SLOTS), max_size=12), consumer=st.sampled_from(CONSUMERS))
    def hand_out(self, slots: list[int], consumer: int) -> None:
        """What the consumer may have goes, what it may not is counted."""
        may = self.hashes.may_receive(u16(*slots), np.full(len(slots), consumer, np.uint16)).tolist()
        assert may == [set(self.held[slot]) <= {consumer} for slot in slots]
        given = [slot for slot, free in zip(slots, may, strict=True) if free]
        kept = [slot for slot, free in zip(slots, may, strict=True) if not free]
        self.hashes.received(u16(*given), np.full(len(given), consumer, np.uint16))
        self.hashes.blocked(u16(*kept))
        for slot in given:
            self.held[slot].append(consumer)
        self.attempts.update(kept)

    @rule(pick=st.lists(st.integers(0, 30), max_size=12))
    def settle_some(self, pick: list[int]) -> None:
        everything = [(slot, consumer) for slot in SLOTS for consumer in self.held[slot]]
        chosen = [everything[place] for place in {each % len(everything) for each in pick}] if everything else []
        self._settle([slot for slot, _ in chosen], u16(*[consumer for _, consumer in chosen]))

    @rule(consumer=st.sampled_from(CONSUMERS))
    def leave(self, consumer: int) -> None:
        self._settle([slot for slot in SLOTS for holder in self.held[slot] if holder == consumer], consumer)

    def _settle(self, slots: list[int], consumers: U16 | int) -> None:
        self.hashes.settled(u16(*slots), consumers)
        for slot in slots:
            self.held[slot].pop()
        for slot in set(slots):
            if not self.held[slot] and self.attempts.pop(slot, 0):
                self.unblocked.add(slot)
                self.cleared += 1

    @rule(slot=st.sampled_from(SLOTS), consumer=st.sampled_from(CONSUMERS), more=st.integers(1, 3))
    def a_wrong_settlement_changes_nothing(self, slot: int, consumer: int, more: int) -> None:
        held = self.held[slot].count(consumer)
        with pytest.raises(InvariantViolated):
            self.hashes.settled(np.full(held + more, slot, np.uint16), consumer)

    @rule(slot=st.sampled_from(SLOTS), consumer=st.sampled_from(CONSUMERS))
    def a_wrong_hand_out_changes_nothing(self, slot: int, consumer: int) -> None:
        if set(self.held[slot]) - {consumer}:
            with pytest.raises(InvariantViolated):
                self.hashes.received(u16(SLOTS[0], slot, SLOTS[-1]), u16(consumer, consumer, consumer))

    @rule()
    def look(self) -> None:
        assert self.hashes.take_unblocked().tolist() == sorted(self.unblocked)
        self.unblocked.clear()

    @rule(owners=st.fixed_dictionaries({slot: st.sampled_from((0, *CONSUMERS)) for slot in SLOTS}))
    def look_at_what_drains(self, owners: dict[int, int]) -> None:
        drains = [slot for slot in SLOTS if owners[slot] and set(self.held[slot]) - {owners[slot]}]
        assert self.hashes.draining(owned_by(owners)).tolist() == drains

    @invariant()
    def it_is_as_the_dictionaries_say(self) -> None:
        assert self.hashes.unacked[list(SLOTS)].tolist() == [len(self.held[slot]) for slot in SLOTS]
        assert self.hashes.holders[list(SLOTS)].tolist() == [max(self.held[slot], default=0) for slot in SLOTS]
        assert self.hashes.attempts(u16(*SLOTS)).tolist() == [self.attempts[slot] for slot in SLOTS]
        assert self.hashes.has_unblocked == bool(self.unblocked)
        assert self.hashes.cleared_total == self.cleared
        assert np.count_nonzero(self.hashes.unacked) == sum(map(bool, self.held.values()))


def test_it_is_as_dictionaries_say_whatever_happens() -> None:
    state_machines.run(DrainingHashesMachine, runs=100, steps=40)
