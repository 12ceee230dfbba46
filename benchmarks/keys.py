"""Rows with keys handed out in order: how late the first hand-outs are, and what of the order is broken, while rows are
nacked and consumers join and leave.

Two dispatcher processes have half of the consumers each, one process adds. `skip`: the rows behind a nacked one go on;
`block key`: they wait for it. What planning and joining take is measured inside a process of its own (`key_planning`).

Owns: the contenders, the statistics. Does not own: the load (`key_load`), the consumers (`key_dispatcher`) and the
promises (`key_account`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

import tarry
from benchmarks import (
    key_account,
    key_dispatcher,
    key_load,
    key_planning,
    load,
    report,
    side_process,
    tarry_load,
    workbench,
)
from tarry import in_threads
from tarry.v1 import dispatch_pb2, dispatch_pb2_grpc, policy_pb2

NAME = "keys"
SUBSCRIPTION = "consumers"
RATE, QUICK_RATE = 20_000, 2_000
CONSUMERS, DISPATCHERS = 20, 2
NACKED_SHARE = 0.05
DELAYS_MS, QUICK_DELAYS_MS = (500, 5_000), (300, 1_000)
NACK_DELAY_MS = 300
# From when all processes are ready.
LEAD_MS = 2_000
# Consumers are numbered all over the load.
CONSUMERS_OF_DISPATCHER = 1_000_000
ORDERS = {"skip": policy_pb2.NACK_ORDER_SKIP, "block key": policy_pb2.NACK_ORDER_BLOCK_KEY}
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
FREE = "of keys without a nack"


def run(bench: workbench.Workbench) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    turns: dict[str, workbench.Turn] = {name: functools.partial(_turn, bench, rounds, name) for name in ORDERS}
    turns["in process"] = functools.partial(_in_process, bench, rounds)
    rounds.run(turns)
    parameters: dict[str, report.Value] = {
        "rows_per_s": bench.size(RATE, QUICK_RATE),
        "seconds": _seconds(bench),
        "keys": _keys(bench),
        "consumers": CONSUMERS,
        "dispatchers": DISPATCHERS,
        "nacked": NACKED_SHARE,
        "delays_ms": " to ".join(map(str, _delays_ms(bench))),
        "nack_delay_ms": NACK_DELAY_MS,
    }
    figures = [rounds.figure(name, _unit(name), _goal(name)) for name in rounds.names]
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _seconds(bench: workbench.Workbench) -> int:
    return bench.size(60, 2)


def _keys(bench: workbench.Workbench) -> int:
    return bench.size(10_000, 1_000)


def _delays_ms(bench: workbench.Workbench) -> tuple[int, int]:
    return QUICK_DELAYS_MS if bench.quick else DELAYS_MS


def _unit(figure: str) -> str:
    if figure in key_planning.UNITS:
        return key_planning.UNITS[figure]
    return "ms" if figure.rpartition(", ")[2] in QUANTILES else ""


def _goal(figure: str) -> report.Goal | None:
    if figure in key_planning.GOALS:
        return key_planning.GOALS[figure]
    order, _, what = figure.partition(", ")
    if order in ORDERS and what in (key_account.FIRST_DELIVERY, key_account.ACKNOWLEDGEMENT, key_account.AT_TWO):
        return report.Goal(most=0)
    return report.Goal(most=10) if what in ("p99", f"{FREE}, p99") and figure != "block key, p99" else None


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, name: str) -> Mapping[str, float]:
    blocks = name == "block key"
    with bench.daemon() as daemon:
        _create(daemon.address, ORDERS[name])
        plan = key_load.Plan(
            start_ms=0,
            seconds=_seconds(bench),
            rows_per_s=bench.size(RATE, QUICK_RATE),
            keys=_keys(bench),
            delay_from_ms=_delays_ms(bench)[0],
            delay_until_ms=_delays_ms(bench)[1],
            in_order=blocks,
            nacked_share=NACKED_SHARE,
            nack_delay_ms=NACK_DELAY_MS,
            seed=bench.seed,
        )
        with contextlib.ExitStack() as stack:
            dispatchers = [
                stack.enter_context(side_process.SideProcess(key_dispatcher.dispatch, part))
                for part in _parts(bench, daemon.address, plan, blocks=blocks)
            ]
            adding = stack.enter_context(side_process.SideProcess(key_load.add, daemon.address, NAME, plan))
            plan = dataclasses.replace(plan, start_ms=load.now_ms() + LEAD_MS)
            for process in (*dispatchers, adding):
                process.send(plan.start_ms)
            answered_at_ms = adding.result()
            with tarry.Client(daemon.address) as client:
                tarry_load.wait_for(client, NAME, "given out everything", _is_empty)
            for dispatcher in dispatchers:
                dispatcher.send("end")
            seen = key_dispatcher.Seen.joined([dispatcher.result() for dispatcher in dispatchers])
    account = key_account.Account(key_load.Load(plan), seen, answered_at_ms)
    figures: dict[str, float] = dict(_quantiles(account.lateness_ms()))
    if blocks:
        figures |= {f"{FREE}, {quantile}": value for quantile, value in _quantiles(account.free_lateness_ms()).items()}
    breaches = account.breaches()
    for what, count in breaches.items():
        rounds.check(name, f"{count:,} {what}" if count else None)
    order = (key_account.FIRST_DELIVERY, key_account.AT_TWO, key_account.ACKNOWLEDGEMENT)
    figures |= {what: breaches[what] for what in order if what in breaches}
    figures |= dict(account.figures())
    return {f"{name}, {what}": value for what, value in figures.items()}


def _parts(bench: workbench.Workbench, address: str, plan: key_load.Plan, *, blocks: bool) -> list[key_dispatcher.Part]:
    return [
        key_dispatcher.Part(
            address=address,
            topic=NAME,
            subscription=SUBSCRIPTION,
            first_consumer=number * CONSUMERS_OF_DISPATCHER + 1,
            consumers=CONSUMERS // DISPATCHERS,
            blocks=blocks,
            changes_every_s=bench.size(20, 4) / 10,
            plan=plan,
        )
        for number in range(DISPATCHERS)
    ]


def _create(address: str, order: policy_pb2.NackOrder.ValueType) -> None:
    request = dispatch_pb2.CreateSubscriptionRequest(topic=NAME, subscription=SUBSCRIPTION)
    request.policy.key_shared.nack_order = order
    with in_threads.open_channel(address) as channel:
        dispatch_pb2_grpc.DispatchStub(channel).CreateSubscription(request, timeout=tarry_load.PATIENCE_S)


def _is_empty(stats: tarry.TopicStats) -> bool:
    return not stats.pending and not any(each.backlog for each in stats.subscriptions)


def _quantiles(values_ms: np.typing.NDArray[np.float64]) -> dict[str, float]:
    if not len(values_ms):
        return dict.fromkeys(QUANTILES, float("nan"))
    values = np.percentile(values_ms, list(QUANTILES.values()))
    return {name: float(value) for name, value in zip(QUANTILES, values, strict=True)}


def _in_process(bench: workbench.Workbench, rounds: workbench.Rounds) -> Mapping[str, float]:
    with side_process.SideProcess(key_planning.measure, bench.quick, bench.seed) as measuring:
        figures: dict[str, float] = measuring.result()
    rounds.check_count("in process", int(figures.pop(key_planning.LOST)), 0)
    return figures
