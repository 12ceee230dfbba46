"""Measures rows a second that become durable, sealing included, against ZADD.

Each contender has one client process and the same rows, positions in order and due times over a day. Redis' requests
are packed before the clock starts; as many requests of both sides are in flight. Both are measured with requests of
`--batch-rows` rows and with larger ones.

Two more contenders add one row a call, from one connection and from many with a call in flight each, and show the cost
of the call itself: a server of grpc.aio that answers empty calls with nothing. `tarry_load`, `redis_load` and
`unary_calls` send.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tarry
from benchmarks import load, machine, redis_load, report, side_process, tarry_load, unary_calls, workbench
from tarry.v1 import delayed_delivery_pb2 as pb
from tests.brokers import redis_server

NAME = "add"
LARGE_ROWS = 5_000
# Redis' forms that are measured with large requests, too: those that are as durable as Tarry
LARGE_AOFS: tuple[redis_server.Aof, ...] = ("always",)
FORMS = {"pipelined": redis_load.pipelined, "variadic": redis_load.variadic}
# Against Redis as durable as Tarry, with requests of one size
GOALS = {"pipelined": report.Goal(least=4), "variadic": report.Goal(least=2)}
GOAL = report.Goal(least=1.5e6)
CONNECTIONS = (1, 64)
# The server's CPU for a row that is added by a call of its own, over that for an empty call
CALL_GOAL = report.Goal(most=1.3)
ONE_BY_ONE, EMPTY = "tarry, 1 a call", "empty calls"
ADD_METHOD = "/tarry.v1.DelayedDelivery/AddMessages"


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way to fill Redis. `rows` is the number in one request."""

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
    contenders[ONE_BY_ONE] = functools.partial(_one_by_one, bench, rounds)
    contenders[EMPTY] = functools.partial(_empty, bench)
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


def _at_once(name: str, connections: int) -> str:
    return f"{name}, {connections} at once"


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
    for connections in CONNECTIONS:
        names = [_at_once(name, connections) for name in (ONE_BY_ONE, EMPTY)]
        figures += [rounds.figure(name, "calls/s") for name in names]
        added, empty = (rounds.figure(_cpu(name), "us/call") for name in names)
        figures += [added, empty]
        if min(empty.values) > 0:
            figures.append(report.ratio(added, empty, CALL_GOAL if connections > 1 else None))
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


def _one_by_one(bench: workbench.Workbench, rounds: workbench.Rounds) -> Mapping[str, float]:
    answer = pb.AddMessagesResponse(accepted=1).SerializeToString()
    figures: dict[str, float] = {}
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        client.create_subscription(NAME, NAME)
        for ledger, connections in enumerate(CONNECTIONS):
            times = load.over_a_day(_calls(bench, connections), seed=bench.seed).tolist()
            requests = [
                pb.AddMessagesRequest(topic=NAME, ledger_id=[ledger], entry_id=[entry], deliver_at_ms=[time])
                for entry, time in enumerate(times)
            ]
            encoded = [request.SerializeToString() for request in requests]
            before_s = daemon.usage().cpu_s
            called = unary_calls.call(daemon.address, ADD_METHOD, encoded, answer, connections=connections)
            used_s = daemon.usage().cpu_s - before_s
            figures |= _as_calls(_at_once(ONE_BY_ONE, connections), len(times), called, used_s)
        pending = client.stats(NAME).pending
    rounds.check_count(f"{ONE_BY_ONE}, pending", pending, sum(_calls(bench, each) for each in CONNECTIONS))
    return figures


def _empty(bench: workbench.Workbench) -> Mapping[str, float]:
    figures: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        with machine.on_core(bench.cores.server):
            server = stack.enter_context(side_process.SideProcess(unary_calls.serve_empty))
        address = server.result()
        for connections in CONNECTIONS:
            requests = [b""] * _calls(bench, connections)
            before_s = server.cpu_s
            called = unary_calls.call(address, unary_calls.EMPTY_METHOD, requests, b"", connections=connections)
            used_s = server.cpu_s - before_s
            figures |= _as_calls(_at_once(EMPTY, connections), len(requests), called, used_s)
        server.send("end")
    return figures


def _calls(bench: workbench.Workbench, connections: int) -> int:
    return bench.size(400, 20) * (1 + connections)


def _as_calls(name: str, calls: int, called: unary_calls.Called, cpu_s: float) -> dict[str, float]:
    return {name: calls / called.seconds, _cpu(name): cpu_s / calls * 1e6}


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
