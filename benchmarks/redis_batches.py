"""Which batch sizes suit Redis: the figures that the others compare with should be those of a good client.

Owns: the sizes that are tried. Does not own: how rows are sent (`redis_load`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from benchmarks import load, redis_load, report, workbench

NAME = "redis"
ADD_BATCHES = (100, 1_000, 10_000)
DRAIN_BATCHES = (100, 1_000, 4_000, redis_load.DRAIN_BATCH_MAX)
IN_FLIGHT = (1, 4, 16)


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(1_000_000, 20_000)
    rounds = workbench.Rounds(bench, NAME)
    if bench.redis is None:
        return report.Result(NAME, bench.parameters, (), (), bench.notes)
    rows = load.in_order(load.over_a_day(count, seed=bench.seed))
    turns: dict[str, workbench.Turn] = {}
    windows = IN_FLIGHT[-1:] if bench.quick else IN_FLIGHT
    for batch_rows in ADD_BATCHES:
        packed = {
            "pipelined": redis_load.pipelined(rows, batch_rows),
            "variadic": redis_load.variadic(rows, batch_rows),
        }
        for form, requests in packed.items():
            for in_flight in windows:
                name = f"add, {form}, {batch_rows:,} at a time, {in_flight} in flight"
                turns[name] = functools.partial(_add, bench, rounds, name, requests, count, in_flight)
    requests = redis_load.variadic(rows, 1_000)
    for batch_rows in DRAIN_BATCHES:
        for in_flight in windows:
            name = f"drain, {batch_rows:,} at a time, {in_flight} in flight"
            turns[name] = functools.partial(_drain, bench, rounds, name, requests, rows, batch_rows, in_flight)
    rounds.run(turns)
    parameters: dict[str, report.Value] = {"rows": count, "aof": "always"}
    return report.Result(NAME, parameters | bench.parameters, rounds.figures("rows/s"), rounds.problems)


def _add(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    name: str,
    requests: list[redis_load.Request],
    count: int,
    in_flight: int,
) -> Mapping[str, float]:
    with bench.rival("always") as server:
        added, seconds = redis_load.fill(server.port, requests, in_flight=in_flight)
    rounds.check_count(name, added, count)
    return {name: count / seconds}


def _drain(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    name: str,
    requests: list[redis_load.Request],
    rows: load.Rows,
    batch_rows: int,
    in_flight: int,
) -> Mapping[str, float]:
    with bench.rival("always") as server:
        redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        until_ms = int(rows.deliver_at_ms.max())
        members, seconds = redis_load.drain(server.port, until_ms, batch_rows=batch_rows, in_flight=in_flight)
    rounds.check_count(name, len(members), len(rows))
    return {name: len(rows) / seconds}
