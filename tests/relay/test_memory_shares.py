"""How many messages are asked for at once, by the bytes of those that came."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry_relay.memory_shares import ROWS_FIRST, Filling, Portions, portion_bytes

SHARE = 128 * 2**20
KB = 1_000
SIZES = st.one_of(st.integers(0, 2 * KB), st.integers(0, 2**20), st.sampled_from([2**20, 2**24, 2**30]))


def settled(portions: Portions, size: int) -> int:
    """Let portions of messages of one size come until they change no more; return how many messages each has then."""
    for _ in range(20):
        portions.came(portions.rows(0), portions.rows(0) * size)
    return portions.rows(0)


def test_the_first_portion_is_small_and_small_messages_double_it_up_to_the_most() -> None:
    portions = Portions(SHARE, 500)
    seen = []
    for _ in range(8):
        seen.append(portions.rows(0))
        portions.came(portions.rows(0), portions.rows(0) * KB)
    assert seen == [ROWS_FIRST, 32, 64, 128, 256, 500, 500, 500]


def test_large_messages_halve_a_portion_down_to_one() -> None:
    portions = Portions(SHARE, 500)
    assert settled(portions, KB) == 500
    seen = []
    for _ in range(10):
        portions.came(portions.rows(0), portions.rows(0) * SHARE)
        seen.append(portions.rows(0))
    assert seen == [250, 125, 62, 31, 15, 7, 3, 1, 1, 1]


@pytest.mark.parametrize(("size", "rows"), [(900 * KB, 16), (100 * KB, 128), (10 * KB, 500), (SHARE // 8, 1)])
def test_a_portion_settles_at_messages_that_fit_its_part_of_the_share(size: int, rows: int) -> None:
    portions = Portions(SHARE, 500)
    assert settled(portions, size) == rows
    assert rows == 1 or rows * size <= portions.portion_bytes


def test_a_portion_that_was_not_full_does_not_grow() -> None:
    portions = Portions(SHARE, 500)
    portions.came(ROWS_FIRST - 1, 0)
    assert portions.rows(0) == ROWS_FIRST


def test_no_more_is_asked_for_than_may_come_at_once() -> None:
    assert Portions(SHARE, 3).rows(0) == 3


def test_less_is_asked_for_at_the_end_of_the_share_and_nothing_beyond_it() -> None:
    portions = Portions(SHARE, 500)
    assert [portions.rows(held) for held in (0, SHARE * 7 // 8, SHARE * 7 // 8 + 1, SHARE - 1, SHARE, 2 * SHARE)] == [
        ROWS_FIRST,
        ROWS_FIRST,
        ROWS_FIRST // 2,
        ROWS_FIRST // 2,
        0,
        0,
    ]


@pytest.mark.parametrize("share_bytes", [1, 7, 2**20])
def test_a_message_beyond_the_share_goes_alone(share_bytes: int) -> None:
    portions = Portions(share_bytes, 500)
    assert settled(portions, 2 * share_bytes) == 1
    assert portions.rows(2 * share_bytes) == 0
    assert portions.rows(0) == 1


@given(st.lists(SIZES, max_size=200), st.integers(1, 2**26), st.integers(1, 500), st.integers(1, 20))
def test_any_sizes_come_through_and_the_share_is_passed_by_one_portion_at_most(
    sizes: list[int], share_bytes: int, rows_max: int, let_go: int
) -> None:
    portions, left, held = Portions(share_bytes, rows_max), deque(sizes), deque[int]()
    while left:
        if not (rows := portions.rows(sum(held))):
            # What is held goes on its way, some at a time.
            assert held
            for _ in range(min(let_go, len(held))):
                held.popleft()
            continue
        assert 1 <= rows <= rows_max
        came = [left.popleft() for _ in range(min(rows, len(left)))]
        portions.came(len(came), sum(came))
        held += came
        assert sum(held) < share_bytes + sum(came)


@given(st.lists(SIZES, max_size=100), st.integers(1, 2**26), st.integers(1, 500))
def test_a_portion_that_was_too_large_is_never_followed_by_a_larger_one(
    sizes: list[int], share_bytes: int, rows_max: int
) -> None:
    portions, left = Portions(share_bytes, rows_max), deque(sizes)
    while left:
        rows = portions.rows(0)
        came = [left.popleft() for _ in range(min(rows, len(left)))]
        portions.came(len(came), sum(came))
        if sum(came) > portions.portion_bytes:
            assert portions.rows(0) == max(1, rows // 2)
        assert portions.rows(0) <= max(1, 2 * rows)


def calls(sizes: list[int], bytes_max: int, rows_max: int) -> list[list[int]]:
    """Return the sizes that each call of one portion brings."""
    filling, left, found = Filling(bytes_max, rows_max), deque(sizes), list[list[int]]()
    while left and (rows := filling.rows()):
        found.append([left.popleft() for _ in range(min(rows, len(left)))])
        filling.came(len(found[-1]), sum(found[-1]))
    return found


def test_small_messages_fill_a_portion_by_few_calls() -> None:
    assert [len(each) for each in calls([100] * 1_000, portion_bytes(256 * 2**20), 500)] == [16, 32, 64, 128, 256, 4]


def test_large_messages_fill_a_portion_however_many_are_asked_for() -> None:
    assert [len(each) for each in calls([900 * KB] * 1_000, portion_bytes(256 * 2**20), 500)] == [16, 2, 1]
    assert [len(each) for each in calls([100 * KB] * 1_000, portion_bytes(64 * 2**20), 500)] == [16, 25, 1]
    assert [len(each) for each in calls([2**30] * 1_000, portion_bytes(64 * 2**20), 1)] == [1]


@given(st.lists(SIZES, min_size=1, max_size=300), st.integers(1, 2**26), st.integers(1, 500))
def test_a_portion_that_is_filled_has_messages_and_ends_with_the_call_that_fills_it(
    sizes: list[int], bytes_max: int, rows_max: int
) -> None:
    found = calls(sizes, bytes_max, rows_max)
    assert 1 <= sum(map(len, found)) <= rows_max
    assert sum(map(sum, found[:-1])) < bytes_max
    all_came = sum(map(len, found)) == min(rows_max, len(sizes))
    assert all_came or sum(map(sum, found)) >= bytes_max
