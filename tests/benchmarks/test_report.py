"""Medians, ratios, goals, and the account of rows."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

import tarry
from benchmarks import load, report, tarry_load


def test_a_ratio_is_taken_round_by_round() -> None:
    over = report.Figure("a", "rows/s", (10.0, 30.0, 20.0))
    under = report.Figure("b", "rows/s", (5.0, 10.0, 20.0))
    ratio = report.ratio(over, under)
    assert ratio.values == (2.0, 3.0, 1.0)
    assert ratio.median == 2.0
    assert ratio.name == "a / b"


@pytest.mark.parametrize(
    ("goal", "median", "met"),
    [
        (report.Goal(least=4), 4.0, True),
        (report.Goal(least=4), 3.9, False),
        (report.Goal(most=10), 10.0, True),
        (report.Goal(most=10), 11.0, False),
    ],
)
def test_a_goal_is_met_at_its_bound(goal: report.Goal, median: float, met: bool) -> None:
    assert goal.is_met(median) is met


def test_the_table_shows_problems_notes_and_missed_goals() -> None:
    console = Console(width=140)
    with console.capture() as shown:
        report.Result(
            "add",
            {"rows": 10},
            [report.Figure("tarry", "rows/s", (1.0, 2.0, 3.0), report.Goal(least=5))],
            problems=["tarry: 9 rows of 10"],
            notes=["alone"],
        ).show(console)
    text = shown.get()
    assert ">= 5.00 MISSED" in text
    assert "NOT ACCOUNTED FOR: tarry: 9 rows of 10" in text
    assert "alone" in text


def test_both_orders_have_the_same_positions_and_times() -> None:
    due = load.random_due(120_000, from_ms=1_000, until_ms=2_000, seed=1)
    in_order, shuffled = load.in_order(due), load.shuffled(due, seed=1)
    assert np.array_equal(np.sort(shuffled.joined()), in_order.joined())
    assert np.array_equal(shuffled.deliver_at_ms, in_order.deliver_at_ms)
    assert not np.array_equal(shuffled.joined(), in_order.joined())


def test_rows_that_are_missing_or_come_with_another_time_are_told() -> None:
    rows = load.in_order(np.arange(4, dtype=np.uint64))
    assert tarry_load.problem_of([batch(rows)], rows) is None
    twice = load.Rows(rows.ledger_id, np.array([0, 1, 1, 3], dtype=np.uint64), rows.deliver_at_ms)
    assert tarry_load.problem_of([batch(twice)], rows) == "4 rows came, 3 of the 4 that are owed"
    assert tarry_load.problem_of([batch(rows), batch(twice)], rows) == "8 rows came, 4 of the 4 that are owed"
    other = load.Rows(rows.ledger_id, rows.entry_id, rows.deliver_at_ms + np.uint64(1))
    assert tarry_load.problem_of([batch(other)], rows) == "4 rows came with another due time"


def batch(rows: load.Rows) -> tarry.Batch:
    return tarry.Batch(
        epoch=1,
        ledger_id=rows.ledger_id,
        entry_id=rows.entry_id,
        deliver_at_ms=rows.deliver_at_ms,
        key_hash=None,
        redelivery_count=np.zeros(len(rows), np.uint32),
        received_at_ms=10,
        number=1,
    )
