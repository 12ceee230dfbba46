"""Which hashes wait for a position that was negatively acknowledged: the rules one by one, and any order of events
against dictionaries.
"""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pyroaring import BitMap64

from daemon.core.key_shared import nack_blocks
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16
from daemon.core.key_shared.nack_blocks import NackBlocks
from storage_backends.formats.row_columns import U64
from tests._support import state_machines

MAX_MS = 1_000
SLOTS = (0, 1, 700, HASH_SLOTS - 1)
# The hash slot of each position.
SLOT_OF = {
    key: SLOTS[number % len(SLOTS)]
    for number, key in enumerate((*range(9), 1 << 32, (1 << 32) + 1, (1 << 50) + 7, (1 << 63) + 3))
}

some_keys = st.lists(st.sampled_from(sorted(SLOT_OF)), max_size=6)


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


def u16(*values: int) -> U16:
    return np.array(values, np.uint16)


def blocked(blocks: NackBlocks, *slots: int) -> list[bool]:
    return [bool(each) for each in blocks.are_blocked(u16(*slots))]


def bounded_out(blocks: NackBlocks, *slots: int) -> list[bool]:
    return [bool(each) for each in blocks.is_bounded_out(u16(*slots))]


def test_a_hash_is_blocked_while_a_position_of_it_is_nacked() -> None:
    blocks = NackBlocks(MAX_MS)
    assert not blocks.any_blocked
    blocks.nacked(u64(10, 11, 20), u16(5, 5, 6), elapsed_ms=0)
    assert blocks.any_blocked
    assert blocks.blocked_hashes == 2
    assert blocked(blocks, 5, 6, 7, 5) == [True, True, False, True]
    blocks.redelivered(BitMap64([10, 20]))
    assert blocked(blocks, 5, 6) == [True, False]
    blocks.redelivered(BitMap64([11]))
    assert blocked(blocks, 5, 6) == [False, False]
    assert blocks.blocked_hashes == 0
    assert not blocks.any_blocked


def test_a_position_that_leaves_the_backlog_blocks_no_more() -> None:
    """As a dead letter, or trimmed."""
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10, 11), u16(5, 5), elapsed_ms=0)
    blocks.left(BitMap64([10]))
    assert blocked(blocks, 5) == [True]
    blocks.left(BitMap64([11]))
    assert blocked(blocks, 5) == [False]


def test_one_that_is_nacked_again_counts_once() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.nacked(u64(10, 10), u16(5, 5), elapsed_ms=1)
    blocks.redelivered(BitMap64([10]))
    assert blocked(blocks, 5) == [False]


def test_one_that_came_back_and_is_nacked_again_blocks_again() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.redelivered(BitMap64([10]))
    blocks.nacked(u64(10), u16(5), elapsed_ms=1)
    assert blocked(blocks, 5) == [True]
    blocks.left(BitMap64([10]))
    assert blocked(blocks, 5) == [False]


def test_one_that_left_and_came_anew_is_in_the_slot_that_it_has_now() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.left(BitMap64([10]))
    blocks.nacked(u64(10), u16(6), elapsed_ms=1)
    assert blocked(blocks, 5, 6) == [False, True]
    blocks.redelivered(BitMap64([10]))
    assert blocked(blocks, 5, 6) == [False, False]


def test_positions_that_were_never_nacked_do_nothing() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.left(BitMap64([10, 11]))
    blocks.redelivered(BitMap64([10]))
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.redelivered(BitMap64([11]))
    blocks.left(BitMap64([11, 1 << 40]))
    assert blocked(blocks, 5) == [True]
    blocks.nacked(u64(), u16(), elapsed_ms=1)
    assert blocks.blocked_hashes == 1


def test_that_something_was_unblocked_is_told_once() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10, 11, 20), u16(5, 5, 6), elapsed_ms=0)
    blocks.redelivered(BitMap64([10]))
    assert not blocks.take_unblocked()
    blocks.left(BitMap64([11]))
    assert blocks.take_unblocked()
    assert not blocks.take_unblocked()
    blocks.left(BitMap64([10]))
    assert not blocks.take_unblocked()
    blocks.expire(elapsed_ms=MAX_MS)
    assert blocks.take_unblocked()
    blocks.left(BitMap64([20]))
    assert not blocks.take_unblocked()


def test_a_hash_waits_no_longer_than_the_bound() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=7)
    blocks.nacked(u64(20), u16(6), elapsed_ms=8)
    blocks.expire(elapsed_ms=7 + MAX_MS - 1)
    assert blocked(blocks, 5, 6) == [True, True]
    assert bounded_out(blocks, 5, 6) == [False, False]
    blocks.expire(elapsed_ms=7 + MAX_MS)
    assert blocked(blocks, 5, 6) == [False, True]
    assert bounded_out(blocks, 5, 6) == [True, False]
    assert blocks.blocked_hashes == 1


def test_the_bound_counts_from_when_the_first_of_the_outstanding_positions_was_nacked() -> None:
    """Also while they are being tried again, and whichever of them are left."""
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.redelivered(BitMap64([10]))
    blocks.nacked(u64(11), u16(5), elapsed_ms=600)
    blocks.left(BitMap64([10]))
    blocks.expire(elapsed_ms=MAX_MS)
    assert bounded_out(blocks, 5) == [True]


def test_the_bound_counts_anew_when_none_was_outstanding() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.left(BitMap64([10]))
    blocks.nacked(u64(11), u16(5), elapsed_ms=600)
    blocks.expire(elapsed_ms=MAX_MS)
    assert blocked(blocks, 5) == [True]
    blocks.expire(elapsed_ms=600 + MAX_MS)
    assert blocked(blocks, 5) == [False]


def test_a_hash_over_the_bound_does_not_block_until_none_of_its_positions_is_outstanding() -> None:
    blocks = NackBlocks(MAX_MS)
    blocks.nacked(u64(10), u16(5), elapsed_ms=0)
    blocks.expire(elapsed_ms=MAX_MS)
    blocks.redelivered(BitMap64([10]))
    blocks.nacked(u64(10, 11), u16(5, 5), elapsed_ms=MAX_MS + 1)
    assert blocked(blocks, 5) == [False]
    blocks.left(BitMap64([10]))
    assert bounded_out(blocks, 5) == [True]
    blocks.left(BitMap64([11]))
    assert bounded_out(blocks, 5) == [False]
    blocks.nacked(u64(11), u16(5), elapsed_ms=MAX_MS + 2)
    assert blocked(blocks, 5) == [True]


def test_memory_is_that_of_the_positions_outstanding() -> None:
    """A million positions are nacked and acknowledged, 1,000 at a time."""
    blocks = NackBlocks(MAX_MS)

    def pass_positions(first: int, last: int) -> None:
        for start in range(first, last, 1_000):
            keys = np.arange(start, start + 1_000, dtype=np.uint64)
            blocks.nacked(keys, keys.astype(np.uint16), elapsed_ms=start)
            named = BitMap64()
            named.add_range(start, start + 1_000)
            blocks.redelivered(named)
            blocks.left(named)

    pass_positions(0, 10_000)
    tracemalloc.start()
    try:
        pass_positions(10_000, 1_010_000)
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown_bytes < 200_000


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Inside, a few rows are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nack_blocks, "PACKED_MIN", 4)
        yield


class NackBlocksMachine(RuleBasedStateMachine):
    """Blocked hashes and dictionaries side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = NackBlocks(MAX_MS)
        self.elapsed_ms = 0
        # Positions outstanding: whether each is NACKED.
        self.outstanding: dict[int, bool] = {}
        self.since_ms: dict[int, int] = {}
        self.bounded_out: set[int] = set()
        self.has_unblocked = False

    def blocked(self) -> set[int]:
        nacked = {SLOT_OF[key] for key, is_nacked in self.outstanding.items() if is_nacked}
        return nacked - self.bounded_out

    def _settle(self, before: set[int]) -> None:
        slots = {SLOT_OF[key] for key in self.outstanding}
        self.since_ms = {slot: self.since_ms.get(slot, self.elapsed_ms) for slot in slots}
        self.bounded_out &= slots
        self.has_unblocked |= bool(before - self.blocked())

    @rule(keys=some_keys)
    def nack(self, keys: list[int]) -> None:
        before = self.blocked()
        self.blocks.nacked(u64(*keys), u16(*[SLOT_OF[key] for key in keys]), elapsed_ms=self.elapsed_ms)
        self.outstanding |= dict.fromkeys(keys, True)
        self._settle(before)

    @rule(keys=some_keys)
    def redeliver(self, keys: list[int]) -> None:
        before = self.blocked()
        self.blocks.redelivered(BitMap64(keys))
        self.outstanding |= dict.fromkeys(self.outstanding.keys() & keys, False)
        self._settle(before)

    @rule(keys=some_keys)
    def leave(self, keys: list[int]) -> None:
        before = self.blocked()
        self.blocks.left(BitMap64(keys))
        self.outstanding = {key: is_nacked for key, is_nacked in self.outstanding.items() if key not in keys}
        self._settle(before)

    @rule(passed_ms=st.sampled_from((1, 400, MAX_MS - 1, MAX_MS)))
    def time_passes(self, passed_ms: int) -> None:
        self.elapsed_ms += passed_ms

    @rule()
    def expire(self) -> None:
        before = self.blocked()
        self.blocks.expire(elapsed_ms=self.elapsed_ms)
        self.bounded_out |= {slot for slot, since_ms in self.since_ms.items() if since_ms + MAX_MS <= self.elapsed_ms}
        self._settle(before)

    @rule()
    def take_unblocked(self) -> None:
        assert self.blocks.take_unblocked() == self.has_unblocked
        self.has_unblocked = False

    @invariant()
    def it_is_as_the_dictionaries_say(self) -> None:
        assert blocked(self.blocks, *SLOTS) == [slot in self.blocked() for slot in SLOTS]
        assert bounded_out(self.blocks, *SLOTS) == [slot in self.bounded_out for slot in SLOTS]
        assert self.blocks.blocked_hashes == len(self.blocked())
        assert self.blocks.any_blocked == bool(self.blocked())


def test_it_is_as_dictionaries_say_whatever_happens() -> None:
    with small():
        state_machines.run(NackBlocksMachine, runs=100, steps=40)
