"""Measures resident bytes a row at ten million pending, while serving and after a restart, and Redis' for the same.

Resident means RSS minus that of the same daemon when it served nothing yet. `tarry_load` and `redis_load` send the
rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

import tarry
from benchmarks import load, redis_load, report, tarry_load, workbench

NAME = "memory"
IN_ORDER, SHUFFLED = "in order", "shuffled"
GOALS = {IN_ORDER: report.Goal(most=1), SHUFFLED: report.Goal(most=5)}
SERVING, RESTARTED = "serving", "restarted"


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(10_000_000, 60_000)
    rounds = workbench.Rounds(bench, NAME)
    due = load.over_a_day(count, seed=bench.seed)
    orders = {IN_ORDER: load.in_order(due), SHUFFLED: load.shuffled(due, seed=bench.seed)}
    rounds.run(
        {f"tarry, {name}": functools.partial(_tarry, bench, rounds, rows, name) for name, rows in orders.items()}
    )
    if bench.redis is not None:
        # Redis keeps each row as it is, in any order: once is enough.
        rounds.turn("redis", functools.partial(_redis, bench, rounds, orders[IN_ORDER]))
    goals = {f"tarry, {name}, {when}": GOALS[name] for name in GOALS for when in (SERVING, RESTARTED)}
    parameters = {"rows": count} | bench.parameters
    return report.Result(NAME, parameters, rounds.figures("B/row", goals), rounds.problems, bench.notes)


def _tarry(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows, name: str) -> Mapping[str, float]:
    with bench.daemon() as daemon:
        idle = daemon.usage().resident_bytes
        with tarry.Client(daemon.address) as client:
            added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
            rounds.check_count(f"tarry, {name}", added.accepted, len(rows))
            time.sleep(bench.rest_s)
            client.stats(NAME)
        serving = daemon.usage().resident_bytes
        daemon.kill()
        bench.start(daemon)
        with tarry.Client(daemon.address) as client:
            rounds.check_count(f"tarry, {name}, after a restart", client.stats(NAME).pending, len(rows))
        time.sleep(bench.rest_s)
        restarted = daemon.usage().resident_bytes
    return {
        f"tarry, {name}, {SERVING}": (serving - idle) / len(rows),
        f"tarry, {name}, {RESTARTED}": (restarted - idle) / len(rows),
    }


def _redis(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows) -> Mapping[str, float]:
    with bench.rival("off") as server:
        idle, idle_used = server.usage().resident_bytes, server.used_memory_bytes()
        requests = redis_load.variadic(rows, bench.batch_rows)
        added, _ = redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        rounds.check_count("redis", added, len(rows))
        time.sleep(bench.rest_s)
        return {
            "redis, used_memory": (server.used_memory_bytes() - idle_used) / len(rows),
            "redis, RSS": (server.usage().resident_bytes - idle) / len(rows),
        }
