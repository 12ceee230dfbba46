"""What is found while a partition is read on: each offset that the log has, and of the others that they are gone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry_relay import pacing
from tarry_relay.pacing import GAP_MAX, Search
from tests.planted import registry

OFFSETS = st.lists(st.integers(0, 3_000), unique=True, max_size=30).map(sorted)


def read_on(offsets: list[int], log: list[int]) -> tuple[list[int], int]:
    """What is found of the offsets in a log, and how many messages were read for it."""
    search = Search(offsets)
    search.begins_at(log[0] if log else 0)
    search.ends_at(log[-1] + 1 if log else 0)
    found, read = [], 0
    at = search.next
    while at is not None:
        for offset in [each for each in log if each >= at]:
            read += 1
            if search.meets(offset):
                found.append(offset)
            if search.next is None or search.jumps(offset):
                break
        at = search.next
    return found, read


@given(OFFSETS, OFFSETS)
def test_what_the_log_has_is_found_and_the_rest_is_gone(offsets: list[int], log: list[int]) -> None:
    found, _ = read_on(offsets, log)
    assert found == sorted(set(offsets) & set(log))


@given(OFFSETS)
def test_no_more_is_read_than_the_gaps_that_are_worth_it(offsets: list[int]) -> None:
    _, read = read_on(offsets, list(range(3_001)))
    gaps = [after - before for before, after in itertools.pairwise(offsets)]
    assert read == (1 + sum(gap if gap <= GAP_MAX else 1 for gap in gaps) if offsets else 0)


def test_a_jump_that_is_worth_it_is_one_over_more_than_the_gap() -> None:
    search = Search([0, GAP_MAX, 2 * GAP_MAX + 1])
    assert search.meets(0)
    assert not search.jumps(0)
    assert search.meets(GAP_MAX)
    assert search.jumps(GAP_MAX)


def what_is_passed_is_still_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Search, "begins_at", lambda self, first: None)


def what_is_met_is_not_found(patch: pytest.MonkeyPatch) -> None:
    meets = Search.meets
    patch.setattr(Search, "meets", lambda self, offset: meets(self, offset) and offset % 7 != 3)


def nothing_is_jumped_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pacing, "GAP_MAX", 10_000)


def everything_is_jumped_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Search, "jumps", lambda self, offset: self.next is not None)


PLANTED = (
    what_is_passed_is_still_looked_for,
    what_is_met_is_not_found,
    nothing_is_jumped_over,
    everything_is_jumped_over,
)
registry.register("reading a partition on", PLANTED)


def walk() -> None:
    """One log with a beginning, a gap and an end: what is found, and how many messages are read for it."""
    offsets, log = [3, 10, 11, 40, 2_000, 5_000], [*range(5, 40), *range(41, 3_000)]
    search = Search(offsets)
    found: list[int] = []
    read = 0
    at = 0
    while search.next is not None and read < 10_000:
        offset = log[at] if at < len(log) else 3_000
        read += 1
        if offset == 3_000:
            search.ends_at(offset)
            search.begins_at(offset)
        elif search.meets(offset):
            found.append(offset)
        at += 1
        if search.next is not None and search.jumps(offset):
            at = next((place for place, each in enumerate(log) if each >= search.next), len(log))
    assert (found, read) == ([10, 11, 2_000], 38)


def test_a_walk_finds_what_is_there_and_reads_little() -> None:
    walk()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        walk()
