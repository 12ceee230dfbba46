"""The memory of all id maps together, and which of them make room."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core.index.id_map import ENTRY_BYTES, IdMap
from daemon.core.index.id_map_budget import UNUSED_MS, IdMapBudget
from daemon.errors import QuotaExceeded
from tests.daemon.core._support.id_map_topic import hashes_of, u64

ROWS = 100
BYTES_MAX = 3 * ROWS * ENTRY_BYTES


def opened(budget: IdMapBudget, elapsed_ms: int, rows: int = ROWS) -> IdMap:
    """Open and load a map of so many rows."""
    one = IdMap(lambda keys: np.ones(len(keys), np.bool_))
    budget.open(one, rows, elapsed_ms)
    add(one, rows)
    one.loaded()
    budget.count(one, elapsed_ms)
    return one


def add(one: IdMap, rows: int) -> None:
    keys = range(len(one), len(one) + rows)
    one.add(hashes_of(keys), u64(keys), u64(keys))


def test_a_map_is_counted_by_what_it_will_need_until_it_is_loaded() -> None:
    budget = IdMapBudget(BYTES_MAX)
    one = IdMap(lambda keys: np.ones(len(keys), np.bool_))
    budget.open(one, ROWS, 0)
    assert budget.size_bytes == ROWS * ENTRY_BYTES
    add(one, 10)
    budget.count(one, 0)
    assert budget.size_bytes == ROWS * ENTRY_BYTES
    one.loaded()
    budget.count(one, 0)
    assert budget.size_bytes == one.nbytes == 10 * ENTRY_BYTES
    budget.close(one)
    assert (budget.size_bytes, len(budget), one.is_open) == (0, 0, False)


def test_the_map_that_was_unused_for_longest_makes_room_once_that_is_a_minute() -> None:
    budget = IdMapBudget(BYTES_MAX)
    first, second, third = (opened(budget, now_ms) for now_ms in (0, 1, 2))
    budget.use(first, 5)
    with pytest.raises(QuotaExceeded, match=r"delivery\.id_map_bytes = 9600"):
        opened(budget, UNUSED_MS)
    assert len(budget) == 3
    opened(budget, 1 + UNUSED_MS)
    assert [each.is_open for each in (first, second, third)] == [True, False, True]
    assert budget.size_bytes == BYTES_MAX


def test_no_map_makes_room_for_one_that_does_not_fit_anyway() -> None:
    budget = IdMapBudget(BYTES_MAX)
    idle, used = opened(budget, 0), opened(budget, UNUSED_MS)
    with pytest.raises(QuotaExceeded, match=f"need {3 * ROWS * ENTRY_BYTES} bytes of memory, and 3200 of"):
        opened(budget, UNUSED_MS, 3 * ROWS)
    assert idle.is_open
    assert used.is_open


def test_a_map_that_outgrows_the_budget_makes_unused_ones_leave_and_then_leaves_itself() -> None:
    budget = IdMapBudget(BYTES_MAX)
    idle, grows = opened(budget, 0), opened(budget, UNUSED_MS)
    add(grows, 2 * ROWS)
    budget.count(grows, UNUSED_MS)
    assert not idle.is_open
    assert grows.is_open
    add(grows, 1)
    budget.count(grows, 9 * UNUSED_MS)
    assert not grows.is_open
    assert (budget.size_bytes, len(budget)) == (0, 0)


def test_a_merge_takes_memory_if_there_is_some_or_unused_maps_can_leave() -> None:
    budget = IdMapBudget(BYTES_MAX)
    idle, merges = opened(budget, 0), opened(budget, 1)
    size_bytes = merges.nbytes
    assert budget.may_take(merges, size_bytes, 2)
    assert not budget.may_take(merges, 2 * size_bytes, 2)
    assert idle.is_open
    assert budget.may_take(merges, 2 * size_bytes, UNUSED_MS)
    assert not idle.is_open
    # The map that merges does not make room for itself.
    assert not budget.may_take(merges, 3 * size_bytes, 9 * UNUSED_MS)
    assert merges.is_open


def test_what_a_merge_writes_is_counted_until_it_ends() -> None:
    budget = IdMapBudget(100 * BYTES_MAX)
    one = opened(budget, 0, 0)
    for _ in range(5):
        add(one, 2_000)
    most = 0
    goes_on = True
    while goes_on:
        goes_on = one.step(lambda size_bytes: budget.may_take(one, size_bytes, 0))
        budget.count(one, 0)
        most = max(most, budget.size_bytes)
    assert budget.size_bytes == ENTRY_BYTES * 10_000
    assert ENTRY_BYTES * 10_000 < most <= 2 * ENTRY_BYTES * 10_000
