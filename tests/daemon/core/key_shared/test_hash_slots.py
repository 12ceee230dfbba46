"""Hash slots are the low 16 bits of a hash, and ranges of them are read and checked as people write them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.key_shared import hash_slots
from daemon.core.key_shared.hash_slots import HASH_SLOTS, HashRange
from daemon.errors import InvalidArgument


def test_the_slot_of_a_hash_is_its_low_16_bits() -> None:
    hashes = np.array([0, 1, 0xFFFF, 0x1_0000, 0x1234_ABCD, 0xFFFF_FFFF], np.uint32)
    slots = hash_slots.slots_of(hashes)
    assert slots.dtype == np.uint16
    assert slots.tolist() == [0, 1, 0xFFFF, 0, 0xABCD, 0xFFFF]


@pytest.mark.parametrize(
    "ranges", [[], [(0, 0)], [(0, 65535)], [(5, 9), (0, 4), (10, 10)], [(65535, 65535), (0, 65534)]]
)
def test_ranges_within_the_slots_that_share_none_are_right(ranges: list[tuple[int, int]]) -> None:
    hash_slots.check_ranges("hash_ranges", [HashRange(*each) for each in ranges])


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([(0, 65536)], "0 to 65536 is no range"),
        ([(-1, 4)], "-1 to 4 is no range"),
        ([(9, 8)], "9 to 8 is no range"),
        ([(0, 4), (4, 8)], "4 to 8 and 0 to 4 overlap"),
        ([(100, 200), (300, 400), (0, 500)], "100 to 200 and 0 to 500 overlap"),
        ([(7, 7), (7, 7)], "7 to 7 and 7 to 7 overlap"),
    ],
)
def test_ranges_beyond_the_slots_turned_round_or_overlapping_are_refused(
    ranges: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"hash_ranges: {said}"):
        hash_slots.check_ranges("hash_ranges", [HashRange(*each) for each in ranges])


@given(owned=st.sets(st.one_of(st.integers(0, 30), st.integers(HASH_SLOTS - 30, HASH_SLOTS - 1))))
def test_the_ranges_of_an_owner_are_its_slots_and_no_two_touch(owned: set[int]) -> None:
    owners = np.full(HASH_SLOTS, 8, np.uint16)
    owners[list(owned)] = 7
    ranges = hash_slots.ranges_where(owners, 7)
    assert [slot for each in ranges for slot in range(each.first, each.last + 1)] == sorted(owned)
    assert all(upper.first > lower.last + 1 for lower, upper in itertools.pairwise(ranges))


def test_slots_of_ranges_follow_one_another_round_the_ring() -> None:
    slots = hash_slots.slots_in(np.array([3, 65535, -2, 9]), np.array([2, 3, 3, 0]))
    assert slots.tolist() == [3, 4, 65535, 0, 1, 65534, 65535, 0]
