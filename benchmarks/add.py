"""Rows a second that become durable, sealing included, against ZADD.

One client process each, the same rows, positions in order and due times over a day. Redis' requests are packed before
the clock starts; as many requests of both sides are in flight. Both are measured with requests of `--batch-rows` rows
and with larger ones.

Owns: the contenders and what is compared. Does not own: how rows are sent (`tarry_load`, `redis_load`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tarry
from benchmarks import load, redis_load, report, tarry_load, workbench
from tests.brokers import redis_server

NAME = "add"
LARGE_ROWS = 5_000
# Redis' forms that are measured with large requests, too: those that are as durable as Tarry.
LARGE_AOFS: tuple[redis_server.Aof, ...] = ("always",)
FORMS = {"pipelined": redis_load.pipelined, "variadic": redis_load.variadic}
# Against Redis as durable as Tarry, with requests of one size.
GOALS = {"pipelined": report.Goal(least=4), "variadic": report.Goal(least=2)}
GOAL = report.Goal(least=1.5e6)


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way to fill Redis. `rows`: of one request."""

    aof: redis_server.Aof
    form: str
    rows: int

    @property
    def name(self) -> str:
        return f"redis {self.aof}, {self.form}, {self.rows:,} a request"


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(2_000_000, 40_000)
    rows = load.in_order(load.over_a_day(count, seed=bench.seed))
    sizes = sorted({bench.batch_rows, LARGE_ROWS})
    rounds = workbench.Rounds(bench, NAME)
    contenders: dict[str, workbench.Turn] = {
        _tarry_name(size): functools.partial(_tarry, bench, rounds, rows, size) for size in sizes
    }
    rivals = []
    if bench.redis is not None:
        bench.say(f"{NAME}: packing requests")
        for size in sizes:
            for form, pack in FORMS.items():
                requests = pack(rows, size)
                for aof in redis_server.AOFS if size == bench.batch_rows else LARGE_AOFS:
                    rivals.append(rival := Rival(aof, form, size))
                    contenders[rival.name] = functools.partial(_redis, bench, rounds, count, requests, rival)
    rounds.run(contenders)
    parameters = {"rows": count} | bench.parameters
    return report.Result(NAME, parameters, _figures(rounds, sizes, rivals), rounds.problems, bench.notes)


def _tarry_name(size: int) -> str:
    return f"tarry, {size:,} a request"


def _cpu(name: str) -> str:
    return f"{name}: server's CPU"


def _sealed(name: str) -> str:
    return f"{name}: sealed within the time"


def _figures(rounds: workbench.Rounds, sizes: Sequence[int], rivals: Sequence[Rival]) -> list[report.Figure]:
    figures = []
    rates = {size: rounds.figure(_tarry_name(size), "rows/s", GOAL) for size in sizes}
    for rate in rates.values():
        figures += [
            rate,
            rounds.figure(_cpu(rate.name), "us/row"),
            rounds.figure(_sealed(rate.name), "% of rows"),
        ]
    for rival in rivals:
        rate = rounds.figure(rival.name, "rows/s")
        goal = GOALS[rival.form] if rival.aof == "always" else None
        figures += [rate, rounds.figure(_cpu(rate.name), "us/row"), report.ratio(rates[rival.rows], rate, goal)]
    return figures


def _tarry(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows, size: int) -> Mapping[str, float]:
    name = _tarry_name(size)
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        before = daemon.usage()
        added = tarry_load.add(client, NAME, rows, batch_rows=size, in_flight=bench.in_flight)
        cpu_s = daemon.usage().cpu_s - before.cpu_s
        stats = client.stats(NAME)
    rounds.check_count(f"{name}, accepted", added.accepted, len(rows))
    rounds.check_count(f"{name}, pending", stats.pending, len(rows))
    return {
        name: len(rows) / added.seconds,
        _cpu(name): cpu_s / len(rows) * 1e6,
        _sealed(name): 100 * (1 - stats.mutable_rows / len(rows)),
    }


def _redis(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    count: int,
    requests: Sequence[redis_load.Request],
    rival: Rival,
) -> Mapping[str, float]:
    with bench.rival(rival.aof) as server:
        before = server.usage()
        added, seconds = redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        cpu_s = server.usage().cpu_s - before.cpu_s
        rounds.check_count(f"{rival.name}, held", int(server.client.zcard(redis_load.KEY)), count)
    rounds.check_count(f"{rival.name}, added", added, count)
    return {rival.name: count / seconds, _cpu(rival.name): cpu_s / count * 1e6}
