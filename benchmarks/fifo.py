"""What FIFO runs save: CPU a row from entering the index until it is passed, the same rows with runs and without.

In this process, on a clock of its own: the index alone is measured, neither the log nor the wire. Rows come at
100,000 a second; every tick of 5 ms what is due is passed.

Owns: the loads and the virtual clock. Does not own: the index and its runs (`daemon.core`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import report, workbench
from daemon.core.index.fifo_runs import RUNS_MAX
from daemon.core.index.indexes import Indexes
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.segments import SegmentCache
from storage_backends.formats.row_columns import Rows

NAME = "fifo"
WITH, WITHOUT = "with runs", "without"
ONE_LEVEL, ALL_LEVELS, RANDOM = "1 level", "18 levels by turns", "random delays"
ONE_BY_ONE = "one by one"
START_MS = 1_000_000_000_000
ROWS_PER_MS = 100
TICK_MS = 5
RANDOM_MS = 20_000
# Of 1 s, 2 s and so on.
LEVELS = 18
# As a topic passes in one turn.
PORTION_ROWS = 20_000
GOALS = {ONE_LEVEL: report.Goal(most=1), ALL_LEVELS: report.Goal(most=1), RANDOM: report.Goal(most=1.1)}

# When it comes, and what.
Batch = tuple[int, Rows]


def run(bench: workbench.Workbench) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    rows, single_rows = bench.size(200_000, 20_000), bench.size(20_000, 1_000)
    loads = {
        f"{delays}{how}": _batches(delays, batch_rows, count, bench.seed)
        for how, batch_rows, count in (("", bench.batch_rows, rows), (f", {ONE_BY_ONE}", 1, single_rows))
        for delays in GOALS
    }
    rounds.run(
        {
            f"{name}, {kind}": functools.partial(_turn, rounds, f"{name}, {kind}", batches, runs_max)
            for name, batches in loads.items()
            for kind, runs_max in ((WITH, RUNS_MAX), (WITHOUT, 0))
        }
    )
    figures = []
    for name in loads:
        runs, none = (rounds.figure(f"{name}, {kind}", "us/row") for kind in (WITH, WITHOUT))
        share = rounds.figure(f"{name}: in due order", "% of rows")
        figures += [runs, none, report.ratio(runs, none, GOALS[name.partition(",")[0]]), share]
    parameters: dict[str, report.Value] = {"rows": rows, f"rows {ONE_BY_ONE}": single_rows}
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _batches(delays: str, batch_rows: int, rows: int, seed: int) -> list[Batch]:
    draw = np.random.default_rng(seed)
    batches = []
    for number, first in enumerate(range(0, rows, batch_rows)):
        now_ms = START_MS + first // ROWS_PER_MS
        entry_id = np.arange(first, min(first + batch_rows, rows), dtype=np.uint64)
        if delays == RANDOM:
            due = now_ms + draw.integers(1, RANDOM_MS, len(entry_id)).astype(np.uint64)
        else:
            level = 1 if delays == ONE_LEVEL else 1 + number % LEVELS
            due = np.full(len(entry_id), now_ms + 1_000 * level, np.uint64)
        batches.append((now_ms, Rows(due, np.full(len(entry_id), 7, np.uint64), entry_id)))
    return batches


def _turn(rounds: workbench.Rounds, name: str, batches: Sequence[Batch], runs_max: int) -> Mapping[str, float]:
    rows = sum(len(batch) for _, batch in batches)
    indexes = Indexes(SegmentCache(rows), now_ms=START_MS)
    index = indexes.shared
    index.mutable = MutableBucket(index.pages, horizon_ms=START_MS, fifo_runs_max=runs_max, counts=index._counts)
    in_order_rows = passed_rows = 0
    began_s = time.process_time()
    next_tick_ms = START_MS
    for now_ms, batch in batches:
        while next_tick_ms <= now_ms:
            passed_rows += _pass(indexes, next_tick_ms)
            next_tick_ms += TICK_MS
        in_order_rows += index.add(batch, 1, elapsed_ms=0)
    while (next_due_ms := indexes.next_due_ms()) is not None:
        next_tick_ms = max(next_tick_ms + TICK_MS, next_due_ms)
        passed_rows += _pass(indexes, next_tick_ms)
        if passed_rows == rows:
            break
    used_s = time.process_time() - began_s
    rounds.check_count(name, passed_rows, rows)
    figures = {name: 1e6 * used_s / rows}
    if runs_max:
        figures[f"{name.removesuffix(f', {WITH}')}: in due order"] = 100 * in_order_rows / rows
    return figures


def _pass(indexes: Indexes, now_ms: int) -> int:
    rows = 0
    next_due_ms = indexes.next_due_ms()
    while next_due_ms is not None and next_due_ms <= now_ms:
        passed = sum(len(each.rows) for each in indexes.pass_due(now_ms, PORTION_ROWS))
        if not passed:
            break
        rows += passed
        next_due_ms = indexes.next_due_ms()
    return rows
