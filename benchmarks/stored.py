"""Measures bytes a row on disk: Tarry's buckets, its whole root, Redis' RDB file and its AOF.

`random`: positions in order, due at any time of a day; `fixed delay`: rows that arrive at a steady rate and all wait
equally long. `tarry_load` and `redis_load` send the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tarry
from benchmarks import load, redis_load, report, tarry_load, workbench

NAME = "stored"
RANDOM, FIXED = "random", "fixed delay"
FIXED_ROWS_PER_MS = 10
GOALS = {RANDOM: report.Goal(most=4.5), FIXED: report.Goal(most=2)}


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(2_000_000, 300_000)
    rounds = workbench.Rounds(bench, NAME)
    for number in range(1, bench.rounds + 1):
        dues = {
            RANDOM: load.over_a_day(count, seed=bench.seed + number),
            FIXED: load.fixed_delay(count, delay_ms=load.HOUR_MS, rows_per_ms=FIXED_ROWS_PER_MS),
        }
        for name, due in dues.items():
            rows = load.in_order(due)
            rounds.turn(
                f"round {number} of {bench.rounds}, {name}", functools.partial(_tarry, bench, rounds, rows, name)
            )
            # Redis' size follows from the rows: once is enough.
            if bench.redis is not None and number == 1:
                rounds.turn(f"redis, {name}", functools.partial(_redis, bench, rounds, rows, name))
    goals = {f"tarry, {name}, buckets": goal for name, goal in GOALS.items()}
    parameters = {"rows": count, "fixed_delay_rows_per_ms": FIXED_ROWS_PER_MS} | bench.parameters
    return report.Result(NAME, parameters, rounds.figures("B/row", goals), rounds.problems, bench.notes)


def _tarry(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows, name: str) -> Mapping[str, float]:
    with bench.folder() as root, bench.daemon(root) as daemon:
        with tarry.Client(daemon.address) as client:
            added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
            tarry_load.wait_for(client, NAME, "sealed most of it", lambda stats: stats.mutable_rows < len(rows) // 2)
            stats = client.stats(NAME)
        rounds.check_count(f"tarry, {name}", added.accepted, len(rows))
        status = daemon.terminate()
        rounds.check(f"tarry, {name}", f"the daemon ended with status {status}" if status else None)
        root_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        return {
            f"tarry, {name}, buckets": stats.bucket_bytes / (stats.pending - stats.mutable_rows),
            f"tarry, {name}, whole root after a stop": root_bytes / len(rows),
        }


def _redis(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows, name: str) -> Mapping[str, float]:
    with bench.rival("everysec") as server:
        requests = redis_load.pipelined(rows, bench.batch_rows)
        added, _ = redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        rounds.check_count(f"redis, {name}", added, len(rows))
        server.client.save()
        written = server.stored_bytes("appendonlydir/*.aof")
        rdb = server.stored_bytes("dump.rdb")
        server.rewrite()
        return {
            f"redis, {name}, RDB": rdb / len(rows),
            f"redis, {name}, AOF": written / len(rows),
            f"redis, {name}, AOF rewritten": server.stored_bytes("appendonlydir/*") / len(rows),
        }
