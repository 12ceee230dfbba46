"""Measures rows a second delivered from sealed buckets on disk, each acknowledged durably, against a Lua script.

All rows are due. Tarry's daemon was killed and started again, so that every segment comes from the disk. `restarted`:
the dispatcher connects as soon as the daemon serves, which meanwhile finds out which rows are due; `behind`: it
connects when all rows are in its backlog. `away`: the daemon was not killed; the rows came due without a dispatcher.
`tarry_load` and `redis_load` drain.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import numpy as np

import tarry
from benchmarks import load, redis_load, report, tarry_load, workbench
from examples import processes
from tests.brokers import redis_server

NAME = "drain"
SUBSCRIPTION = "dispatcher"
RESTARTED, BEHIND, AWAY = "tarry, restarted", "tarry, behind", "tarry, away"
REDIS_BATCHES = (1_000, 4_000, redis_load.DRAIN_BATCH_MAX)
REDIS_IN_FLIGHT = 4
# The span in which all rows are due (ms)
SPAN_MS = 1_000
# Time until the first row is due, for adding and sealing (ms); four times as much at the next try.
LEAD_MS, LEAD_MS_PER_1000_ROWS, TRIES = 3_000, 4, 4
# A higher ledger seals all rows before it, however few they are.
SETTINGS = {"bucket.min_index_count_per_bucket": 1}


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(1_000_000, 30_000)
    rounds = workbench.Rounds(bench, NAME)
    contenders: dict[str, workbench.Turn] = {
        name: functools.partial(_tarry, bench, rounds, count, name) for name in (RESTARTED, BEHIND, AWAY)
    }
    if bench.redis is not None:
        now_ms = load.now_ms()
        due = load.random_due(count, from_ms=now_ms, until_ms=now_ms + SPAN_MS, seed=bench.seed)
        requests = redis_load.variadic(load.in_order(due), bench.batch_rows)
        for aof in redis_server.AOFS:
            for batch_rows in REDIS_BATCHES:
                turn = functools.partial(_redis, bench, rounds, count, requests, aof, batch_rows)
                contenders[_name(aof, batch_rows)] = turn
    rounds.run(contenders)
    return report.Result(
        NAME,
        {"rows": count, "permits": tarry_load.PERMITS, "redis_scripts_in_flight": REDIS_IN_FLIGHT} | bench.parameters,
        _figures(bench, rounds),
        rounds.problems,
        (*bench.notes, "Redis' script removes what it returns: a client that dies then has lost it."),
    )


def _name(aof: redis_server.Aof, batch_rows: int) -> str:
    return f"redis {aof}, {batch_rows:,} at a time"


def _cpu_name(name: str) -> str:
    return f"{name}, daemon's CPU"


def _figures(bench: workbench.Workbench, rounds: workbench.Rounds) -> list[report.Figure]:
    restarted = rounds.figure(RESTARTED, "rows/s", report.Goal(least=1e6))
    figures = [restarted, rounds.figure(_cpu_name(RESTARTED), "us/row")]
    figures += [rounds.figure(BEHIND, "rows/s"), rounds.figure(_cpu_name(BEHIND), "us/row")]
    figures += [rounds.figure(AWAY, "rows/s", report.Goal(least=1e6)), rounds.figure(_cpu_name(AWAY), "us/row")]
    if bench.redis is None:
        return figures
    for aof in redis_server.AOFS:
        rates = [rounds.figure(_name(aof, batch_rows), "rows/s") for batch_rows in REDIS_BATCHES]
        figures += rates
        best = max(rates, key=lambda rate: rate.median)
        goal = report.Goal(least=1.5) if aof == "always" else None
        figures.append(report.ratio(restarted, best, goal))
        if best is not rates[0]:
            figures.append(report.ratio(restarted, rates[0]))
    return figures


def _tarry(bench: workbench.Workbench, rounds: workbench.Rounds, count: int, name: str) -> Mapping[str, float]:
    lead_ms = LEAD_MS + count * LEAD_MS_PER_1000_ROWS // 1_000
    for _ in range(TRIES):
        with bench.daemon(settings=SETTINGS) as daemon:
            rows = _fill(bench, daemon, count, lead_ms)
            if rows is not None:
                return _drain(bench, rounds, daemon, rows, name)
        lead_ms *= 4
        bench.say(f"{NAME}: rows were due before all were sealed: again, with a lead of {lead_ms / 1000:g} s")
    raise TimeoutError(f"{count:,} rows are not added and sealed within {lead_ms / 4000:g} s")


def _drain(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    daemon: processes.DaemonProcess,
    rows: load.Rows,
    name: str,
) -> Mapping[str, float]:
    count = len(rows)
    drain = tarry_load.Drain(count)
    if name != AWAY:
        daemon.kill()
    time.sleep(max(0.0, (int(rows.deliver_at_ms.max()) + 1 - load.now_ms()) / 1000))
    if name != AWAY:
        bench.start(daemon)
    with tarry.Client(daemon.address) as client:
        if name != RESTARTED:
            tarry_load.wait_for(client, NAME, "passed all rows", lambda stats: stats.subscriptions[0].backlog == count)
        before = daemon.usage()
        began_s = time.perf_counter()
        with client.subscribe(NAME, SUBSCRIPTION, permits=tarry_load.PERMITS) as subscription:
            drain.run(subscription)
        cpu_s = daemon.usage().cpu_s - before.cpu_s
        stats = client.stats(NAME)
    rounds.check(name, drain.problem(rows))
    rounds.check_count(f"{name}, backlog left", stats.subscriptions[0].backlog, 0)
    return {name: count / (drain.durable_s - began_s), _cpu_name(name): cpu_s / count * 1e6}


def _fill(bench: workbench.Workbench, daemon: processes.DaemonProcess, count: int, lead_ms: int) -> load.Rows | None:
    """Add the rows and one of the next ledger, due much later, which seals the last of the others.

    Returns None if rows were due before all were sealed.
    """
    first_due_ms = load.now_ms() + lead_ms
    rows = load.in_order(load.random_due(count, from_ms=first_due_ms, until_ms=first_due_ms + SPAN_MS, seed=bench.seed))
    with tarry.Client(daemon.address) as client:
        client.create_subscription(NAME, SUBSCRIPTION)
        tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
        client.add(NAME, -(-len(rows) // load.ROWS_PER_LEDGER), 0, delay_ms=load.DAY_MS)
        tarry_load.wait_for(client, NAME, "sealed all buckets", lambda stats: stats.mutable_rows <= 1)
    return rows if load.now_ms() < first_due_ms else None


def _redis(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    count: int,
    requests: Sequence[redis_load.Request],
    aof: redis_server.Aof,
    batch_rows: int,
) -> Mapping[str, float]:
    name = _name(aof, batch_rows)
    with bench.rival(aof) as server:
        redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        members, seconds = redis_load.drain(
            server.port, load.now_ms() + SPAN_MS, batch_rows=batch_rows, in_flight=REDIS_IN_FLIGHT
        )
    rounds.check_count(name, len(members), count)
    rounds.check_count(f"{name}, distinct", len(np.unique(np.array(members))), count)
    return {name: count / seconds}
