"""How often positions were negatively acknowledged, as bit planes, against a dictionary."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core.decisions.subscription_state import RedeliveryCounts
from storage_backends.formats.row_columns import U32, U64

U32_MAX = (1 << 32) - 1

keys = st.sampled_from([*range(12), 1 << 33, (1 << 33) + 1, 1 << 50])
counted = st.dictionaries(keys, st.sampled_from((0, 1, 1, 2, 3, 4, 255, U32_MAX)), max_size=8)


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


def u32(*values: int) -> U32:
    return np.array(values, np.uint32)


def of(counts: RedeliveryCounts, *named: int) -> list[int]:
    found = counts.of(u64(*named))
    return [0] * len(named) if found is None else found.tolist()


def test_a_position_that_was_never_nacked_counts_nothing_and_costs_nothing() -> None:
    counts = RedeliveryCounts()
    assert counts.of(u64(1, 2)) is None
    counts.set(u64(3), u32(1))
    assert counts.of(u64(1, 2)) is None
    assert [set(plane) for plane in counts.planes()] == [{3}]


def test_a_bit_of_the_count_is_a_plane() -> None:
    """5 = 0b101, 1 = 0b001, 4 = 0b100."""
    counts = RedeliveryCounts()
    counts.set(u64(10, 11, 12), u32(5, 1, 4))
    assert [set(plane) for plane in counts.planes()] == [{10, 11}, set(), {10, 12}]
    assert of(counts, 12, 10, 99, 11) == [4, 5, 0, 1]


def test_a_carry_leaves_the_planes_below() -> None:
    """0b011 and one more is 0b100."""
    counts = RedeliveryCounts()
    counts.set(u64(1), u32(3))
    counts.set(u64(1), u32(4))
    assert of(counts, 1) == [4]
    assert [set(plane) for plane in counts.planes()] == [set(), set(), {1}]


def test_the_highest_count_there_may_be_is_kept() -> None:
    counts = RedeliveryCounts()
    counts.set(u64(1, 2), u32(U32_MAX, 0))
    assert of(counts, 1, 2) == [U32_MAX, 0]
    assert len(counts.planes()) == 32


def test_planes_that_are_handed_out_do_not_change_any_more() -> None:
    counts = RedeliveryCounts()
    counts.set(u64(1), u32(1))
    planes = counts.planes()
    counts.set(u64(2), u32(1))
    assert [set(plane) for plane in planes] == [{1}]


@hypothesis.given(
    st.lists(st.one_of(counted, st.sets(keys, min_size=1, max_size=5)), max_size=12), st.lists(keys, max_size=20)
)
def test_counts_are_those_of_a_dictionary(changes: list[dict[int, int] | set[int]], asked: list[int]) -> None:
    counts, known = RedeliveryCounts(), dict[int, int]()
    for change in changes:
        if isinstance(change, dict):
            counts.set(u64(*change), u32(*change.values()))
            known |= change
        else:
            counts.drop(BitMap64(change))
            known = {key: count for key, count in known.items() if key not in change}
    assert of(counts, *asked) == [known.get(key, 0) for key in asked]
    restored = RedeliveryCounts()
    restored.restore([*counts.planes(), BitMap64()])
    assert of(restored, *asked) == of(counts, *asked)
    highest = max(known.values(), default=0)
    assert len(counts.planes()) == highest.bit_length() == len(restored.planes())
