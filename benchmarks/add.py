"""Rows a second that become durable, sealing included, against ZADD.

One client process each, the same rows, positions in order and due times over a day. Redis' requests are packed before
the clock starts; as many requests of both sides are in flight.

Owns: the contenders and what is compared. Does not own: how rows are sent (`tarry_load`, `redis_load`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import tarry
from benchmarks import load, redis_load, redis_server, report, tarry_load, workbench

NAME = "add"
TARRY = "tarry"
CPU = "tarry, daemon's CPU"
SEALED = "tarry, sealed within the time"
FORMS = ("pipelined", "variadic")


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(2_000_000, 100_000)
    rows = load.in_order(load.over_a_day(count, seed=bench.seed))
    rounds = workbench.Rounds(bench, NAME)
    contenders: dict[str, workbench.Turn] = {TARRY: functools.partial(_tarry, bench, rounds, rows)}
    if bench.redis is not None:
        bench.say(f"{NAME}: packing requests")
        packed = {
            "pipelined": redis_load.pipelined(rows, bench.batch_rows),
            "variadic": redis_load.variadic(rows, bench.batch_rows),
        }
        for form in FORMS:
            for aof in redis_server.AOFS:
                turn = functools.partial(_redis, bench, rounds, count, packed[form], form, aof)
                contenders[_name(aof, form)] = turn
    rounds.run(contenders)
    return report.Result(
        NAME, {"rows": count} | bench.parameters, _figures(bench, rounds), rounds.problems, bench.notes
    )


def _name(aof: redis_server.Aof, form: str) -> str:
    return f"redis {aof}, {form}"


def _cpu_name(aof: redis_server.Aof, form: str) -> str:
    return f"{_name(aof, form)}, server's CPU"


def _figures(bench: workbench.Workbench, rounds: workbench.Rounds) -> list[report.Figure]:
    tarry_rate = rounds.figure(TARRY, "rows/s", report.Goal(least=1.5e6))
    figures = [tarry_rate, rounds.figure(CPU, "us/row"), rounds.figure(SEALED, "% of rows")]
    if bench.redis is None:
        return figures
    goals = {("pipelined", "always"): report.Goal(least=4), ("variadic", "always"): report.Goal(least=2)}
    for form in FORMS:
        for aof in redis_server.AOFS:
            rate = rounds.figure(_name(aof, form), "rows/s")
            ratio = report.ratio(tarry_rate, rate, goals.get((form, aof)))
            figures += [rate, rounds.figure(_cpu_name(aof, form), "us/row"), ratio]
    return figures


def _tarry(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows) -> Mapping[str, float]:
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        before = daemon.usage()
        added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
        cpu_s = daemon.usage().cpu_s - before.cpu_s
        stats = client.stats(NAME)
    rounds.check_count(f"{TARRY}, accepted", added.accepted, len(rows))
    rounds.check_count(f"{TARRY}, pending", stats.pending, len(rows))
    return {
        TARRY: len(rows) / added.seconds,
        CPU: cpu_s / len(rows) * 1e6,
        SEALED: 100 * (1 - stats.mutable_rows / len(rows)),
    }


def _redis(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    count: int,
    requests: Sequence[redis_load.Request],
    form: str,
    aof: redis_server.Aof,
) -> Mapping[str, float]:
    with bench.rival(aof) as server:
        before = server.usage()
        added, seconds = redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        cpu_s = server.usage().cpu_s - before.cpu_s
        rounds.check_count(f"{_name(aof, form)}, held", int(server.client.zcard(redis_load.KEY)), count)
    rounds.check_count(f"{_name(aof, form)}, added", added, count)
    return {_name(aof, form): count / seconds, _cpu_name(aof, form): cpu_s / count * 1e6}
