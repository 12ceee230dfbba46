"""Sorted runs and their merge, against `sorted`."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.runs import SortedRun, TieredRuns, in_due_order, take_due
from storage_backends.formats.row_columns import Rows
from tests.daemon.core._support.journaled_topic import listed

U64_MAX = (1 << 64) - 1
places = st.tuples(
    st.sampled_from((0, 1, 2, 3, 5, 8, U64_MAX)), st.sampled_from((0, 1, U64_MAX)), st.sampled_from((0, 1, 2, U64_MAX))
)
parts_of_places = st.lists(st.sets(places, max_size=12), min_size=1, max_size=5)


def rows_of(rows: list[tuple[int, int, int]]) -> KeyedRows:
    columns = np.array(rows, np.uint64).reshape(-1, 3)
    return KeyedRows(
        Rows(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()), np.arange(len(rows), dtype=np.uint64)
    )


def test_no_rows_are_taken_when_none_is_due() -> None:
    assert take_due([SortedRun(rows_of([(5, 0, 0)]))], 4, 10) == []


def test_a_row_is_due_at_its_time_and_not_before() -> None:
    run = SortedRun(rows_of([(5, 0, 0), (6, 0, 1)]))
    assert [listed(rows) for _, rows in take_due([run], 5, 10)] == [[(5, 0, 0)]]
    assert run.next_due_ms() == 6


@given(parts=parts_of_places, now_ms=st.sampled_from((0, 2, 4, 9, U64_MAX)), limit=st.integers(1, 9))
def test_what_is_taken_bit_by_bit_is_everything_due_in_hand_out_order(
    parts: list[set[tuple[int, int, int]]], now_ms: int, limit: int
) -> None:
    runs = [SortedRun(rows_of(sorted(part))) for part in parts]
    expected = sorted(row for part in parts for row in part if row[0] <= now_ms)
    taken = []
    while batch := take_due(runs, now_ms, limit):
        rows = [row for _, part in batch for row in listed(part)]
        assert rows
        taken += sorted(rows)
    assert taken == expected
    assert all(len(run) == 0 or int(run.next_due_ms() or 0) > now_ms for run in runs)


@given(part=st.sets(places, min_size=1), others=parts_of_places, cut=st.integers(0, 50), limit=st.integers(1, 20))
def test_nothing_overtakes_what_follows_a_run_that_continues(
    part: set[tuple[int, int, int]], others: list[set[tuple[int, int, int]]], cut: int, limit: int
) -> None:
    rows = sorted(part)
    cut = 1 + cut % len(rows)
    continued = SortedRun(rows_of(rows[:cut]), continues=True)
    taken = take_due([continued, *(SortedRun(rows_of(sorted(other))) for other in others)], U64_MAX, limit)
    last = max(listed(each)[-1] for _, each in taken)
    assert all(last <= row for row in rows[cut:])


@given(parts=parts_of_places, limit=st.integers(1, 30))
def test_a_limit_is_kept_but_for_one_row_of_each_run_with_the_same_place(
    parts: list[set[tuple[int, int, int]]], limit: int
) -> None:
    runs = [SortedRun(rows_of(sorted(part))) for part in parts]
    taken = take_due(runs, U64_MAX, limit)
    assert sum(len(rows) for _, rows in taken) <= max(limit, len(parts)) + len(parts)


@given(batches=st.lists(st.lists(places, max_size=15), max_size=12))
def test_tiered_runs_hold_every_row_in_few_runs_each_in_order(batches: list[list[tuple[int, int, int]]]) -> None:
    tiered = TieredRuns()
    for batch in batches:
        tiered.add(rows_of(batch))
        lengths = [len(run) for run in tiered.runs]
        assert all(one > 2 * other for one, other in itertools.pairwise(lengths))
    everything = sorted(row for batch in batches for row in batch)
    assert sorted(row for run in tiered.runs for row in listed(run.rows)) == everything
    assert all(listed(run.rows) == sorted(listed(run.rows)) for run in tiered.runs)
    assert tiered.next_due_ms() == (everything[0][0] if everything else None)


def test_rows_that_were_taken_do_not_come_back_when_runs_are_merged() -> None:
    tiered = TieredRuns()
    tiered.add(rows_of([(1, 0, 0), (2, 0, 0), (3, 0, 0)]))
    take_due(tiered.runs, 2, 100)
    tiered.add(rows_of([(1, 9, 9)]))
    assert sorted(row for run in tiered.runs for row in listed(run.rows)[run.offset : run.stop]) == [
        (1, 9, 9),
        (3, 0, 0),
    ]


@given(parts=parts_of_places)
def test_parts_in_order_are_merged_into_one_order(parts: list[set[tuple[int, int, int]]]) -> None:
    merged = in_due_order([rows_of(sorted(part)) for part in parts])
    assert listed(merged) == sorted(row for part in parts for row in part)
