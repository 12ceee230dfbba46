"""Measures what S3 would charge: requests an hour by kind, of an idle root, with a standby, and under small loads.

    python -m benchmarks cost                            among the other measurements
    python -m benchmarks.cost --seconds 180 --cases alone --daemon ../before

The store is a real S3 server on loopback; the daemons reach it by a proxy, which counts their requests. The probe of
the store at the start does not count. Under a load every row must be received and acknowledged. With a standby the
owner is killed at the end, and the time until the standby serves is measured.

`failing_store` notes the requests, `tests._support.request_prices` has the prices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import tarry.aio
from benchmarks import alone, failing_store, machine, report, service_clients, service_load, workbench
from examples import processes
from tests._support import lost_answer_proxy
from tests._support.request_prices import DOLLARS_A_MILLION, dollars_a_month

NAME = "cost"
START_S = 300.0
PATIENCE_S = 300.0
DELAYS_MS = (1_000, 20_000)
SETTINGS: Mapping[str, object] = {"journal.commit_latency_ms": 500}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a root has to do. `dollars` is the goal for a month."""

    dollars: float
    standby: bool = False
    topics: int = 0
    rows_per_s: int = 0


CASES: Mapping[str, Case] = {
    "alone": Case(5),
    "with a standby": Case(12, standby=True),
    "one topic, 10 rows/s": Case(40, topics=1, rows_per_s=10),
    "100 topics, 1 row/s each": Case(100, topics=100, rows_per_s=100),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes: each case is counted for `seconds`, after `settling_s`."""

    seconds: int
    settling_s: float
    cases: Sequence[str] = tuple(CASES)
    checkout: Path = processes.REPOSITORY


def run(bench: workbench.Workbench) -> report.Result:
    return measure(bench, Plan(bench.size(120, 6), bench.size(20, 1)))


def measure(bench: workbench.Workbench, plan: Plan) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({name: functools.partial(_turn, bench, rounds, plan, name) for name in plan.cases})
    goals = {_price_of(name): report.Goal(most=case.dollars) for name, case in CASES.items()}
    # Each sample's name ends with its unit.
    named = ((name, *name.rpartition("; ")[::2]) for name in rounds.names)
    figures = [
        dataclasses.replace(rounds.figure(name, unit, goals.get(name)), name=short) for name, short, unit in named
    ]
    parameters: dict[str, report.Value] = {each: str(value) for each, value in SETTINGS.items()}
    parameters["seconds"] = plan.seconds
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _price_of(case: str) -> str:
    return f"{case}: a month; $"


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan, name: str) -> Mapping[str, float]:
    case = CASES[name]
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(processes.S3ServerProcess("s3", folder))
        server.start(START_S)
        store = failing_store.FailingStore(server.BUCKET, bench.seed)
        proxy = stack.enter_context(lost_answer_proxy.lost_answer_proxy(f"http://127.0.0.1:{server.port}", store))
        given = {**SETTINGS, **server.settings(), "store.s3.endpoint_url": proxy.endpoint_url, **bench.settings}
        owner, standby = (
            stack.enter_context(processes.DaemonProcess(each, folder, given, checkout=plan.checkout))
            for each in ("owner", "standby")
        )
        bench.start(owner)
        if case.standby:
            with machine.on_core(bench.cores.server):
                standby.start(START_S)
            standby.wait_for_log("waiting for daemon")
        if case.topics:
            from_s, until_s = asyncio.run(_load(owner.address, plan, case, rounds, name))
        else:
            time.sleep(plan.settling_s)
            from_s = time.monotonic()
            time.sleep(plan.seconds)
            until_s = time.monotonic()
        figures = _counted(store.requests, from_s, until_s, name)
        if case.standby:
            owner.kill()
            killed_s = time.monotonic()
            standby.wait_for_health(serving=True, timeout_s=PATIENCE_S)
            figures[f"{name}: SIGKILL to serving; s"] = time.monotonic() - killed_s
        return figures


def _counted(requests: Sequence[failing_store.Request], from_s: float, until_s: float, name: str) -> dict[str, float]:
    counts = Counter(
        "PUT" if each.kind == "conditional put" else each.kind.upper()
        for each in requests
        if from_s <= each.arrived_s < until_s and "probe/" not in each.key
    )
    hours = (until_s - from_s) / 3_600
    an_hour = {kind: counts[kind] / hours for kind in DOLLARS_A_MILLION}
    return {
        **{f"{name}: {kind}; 1/h": round(count) for kind, count in an_hour.items()},
        _price_of(name): dollars_a_month(an_hour),
    }


async def _load(address: str, plan: Plan, case: Case, rounds: workbench.Rounds, name: str) -> tuple[float, float]:
    """Add rows one by one; return when counting began and ended, and check that each was received and acknowledged."""
    load = service_load.Load(
        seconds=plan.seconds + round(plan.settling_s),
        topics=case.topics,
        subscriptions=1,
        rows_per_s=case.rows_per_s,
        delays_ms=DELAYS_MS,
        seed=1,
        mode=service_load.Mode.DEFAULT,
        one_by_one=True,
        clients=1,
    )
    receiver = service_clients.Receiver(address, load, part=0, parts=1)
    receiving = asyncio.create_task(receiver.run(load.mode))
    await receiver.opened.wait()
    delays = load.delays()
    began_s = time.monotonic()
    async with tarry.aio.Client(address, timeout_s=PATIENCE_S) as client, asyncio.TaskGroup() as adds:
        for request in load.requests():
            await asyncio.sleep(began_s + request.after_s - time.monotonic())
            ledger_id, entry_id = service_load.positions(request.rows)
            adds.create_task(client.add(request.topic, ledger_id, entry_id, delay_ms=delays[request.rows]))
        await asyncio.sleep(began_s + load.seconds - time.monotonic())
        ended_s = time.monotonic()
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not receiving.done():
        if receiver.received.acknowledged.all():
            break
        await asyncio.sleep(0.1)
    received = receiver.received
    await service_clients.ended(receiving)
    rounds.check_count(f"{name}, received", int(received.came.sum()), load.rows)
    rounds.check_count(f"{name}, acknowledged", int(np.count_nonzero(received.acknowledged)), load.rows)
    return began_s + plan.settling_s, ended_s


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure other cases, for another time, or the daemon of another checkout."""
    parser = alone.parser(NAME, __doc__, store=alone.LOCAL)
    add = parser.add_argument
    add("--seconds", type=int, default=120, help="counted for each case; default: %(default)s")
    add("--settling", type=float, default=20.0, help="seconds before that; default: %(default)s")
    add("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    options = parser.parse_args(arguments)
    plan = Plan(options.seconds, options.settling, options.cases, options.daemon.resolve())
    return alone.run(options, functools.partial(measure, plan=plan), batch_rows=1, in_flight=1, seed=1)


if __name__ == "__main__":
    sys.exit(main())
