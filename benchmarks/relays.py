"""How late delayed messages reach a consumer through a broker, and what that costs: Tarry with a relay of `examples`, a
sorted set of Redis that a worker polls, and the schedules of NATS. Each in peace, and with every process killed once.

Some messages fail at the consumer and come again. The consumer's own record is the oracle: every message, each delivery
once, none early. Redis synchronises what it stores before it answers, as the daemon does; NATS does so later.

Owns: the contenders, the kills, the figures. Does not own: the load and its account (`carrying`), the processes
(`carrier_settings`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np

import tarry
from benchmarks import carrier_settings, carrying, machine, report, workbench
from benchmarks.carrier_settings import BROKER, RELAY, WORKER, Setting
from benchmarks.handing_back import HandingBack
from examples import processes, redis_relay

NAME = "relays"
FAILS_EVERY = 50
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
DAEMON = "daemon"
# Which share of the deliveries has come when each is killed.
KILLS = {RELAY: 0.25, WORKER: 0.25, DAEMON: 0.5, BROKER: 0.75}
PATIENCE_S = 300.0

Relayed = Callable[[Path, str, HandingBack], AbstractAsyncContextManager[Setting]]
Alone = Callable[[Path], AbstractAsyncContextManager[Setting]]
WITH_TARRY: Mapping[str, Relayed] = {
    "tarry beside redis": carrier_settings.relayed_by_redis,
    "tarry beside nats": carrier_settings.relayed_by_nats,
}
ALONE: Mapping[str, Alone] = {
    "redis sorted set": carrier_settings.sorted_by_redis,
    "nats schedules": carrier_settings.scheduled_by_nats,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load as numbers."""

    messages: int
    most_ms: int
    seed: int


def run(bench: workbench.Workbench) -> report.Result:
    plan = Plan(bench.size(10_000, 100), bench.size(30_000, 500), bench.seed)
    rounds = workbench.Rounds(bench, NAME)
    rounds.run(
        {
            f"{name}, {'killed' if is_killed else 'in peace'}": functools.partial(
                _turn, bench, rounds, plan, name, is_killed=is_killed
            )
            for name in [*WITH_TARRY, *ALONE]
            if "redis" not in name or bench.redis is not None
            # A quick run has the kills alone: each process takes its time to start.
            for is_killed in ([True] if bench.quick else [False, True])
        }
    )
    parameters: dict[str, report.Value] = {
        "messages": plan.messages,
        "delays_ms": f"0 to {plan.most_ms}",
        "failing": f"1 of {FAILS_EVERY}",
    }
    # Each sample's name ends with its unit.
    named = ((name, *name.rpartition(", ")[::2]) for name in rounds.names)
    figures = [dataclasses.replace(rounds.figure(name, unit), name=short) for name, short, unit in named]
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems, bench.notes)


def _turn(
    bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan, name: str, *, is_killed: bool
) -> Mapping[str, float]:
    account = carrying.Account(plan.messages, fails_every=FAILS_EVERY)
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        daemon = stack.enter_context(bench.daemon()) if name in WITH_TARRY else None
        cpu_s = asyncio.run(_carry(bench, plan, name, account, folder, daemon, is_killed=is_killed))
    what = f"{name}, killed" if is_killed else name
    for problem in account.problems():
        rounds.check(what, problem)
    # A schedule of NATS may come twice when the server is killed.
    if name in WITH_TARRY:
        rounds.check_count(f"{what}, deliveries that came twice", len(account.doubles), 0)
    lateness = np.percentile(account.lateness_ms(), list(QUANTILES.values()))
    figures = {f"{what}, {quantile}, ms": float(value) for quantile, value in zip(QUANTILES, lateness, strict=True)}
    if is_killed:
        return figures | {f"{what}, came twice, deliveries": len(account.doubles)}
    return figures | {f"{what}, {each}'s CPU, s": used for each, used in cpu_s.items()}


async def _carry(
    bench: workbench.Workbench,
    plan: Plan,
    name: str,
    account: carrying.Account,
    folder: Path,
    daemon: processes.DaemonProcess | None,
    *,
    is_killed: bool,
) -> Mapping[str, float]:
    """CPU seconds of each process."""
    async with _processes(bench, name, folder, daemon) as setting:
        victims = {what: _on_server_core(bench, victim) for what, victim in setting.victims.items()}
        kills = [carrying.Kill(KILLS[what], victim.kill) for what, victim in victims.items()] if is_killed else []
        before = {what: victim.process.usage().cpu_s for what, victim in victims.items()}
        delays_ms = carrying.delays(plan.messages, most_ms=plan.most_ms, seed=plan.seed)
        await carrying.carry(setting.carrier, account, delays_ms, kills, timeout_s=PATIENCE_S)
        return {what: victim.process.usage().cpu_s - before[what] for what, victim in victims.items()}


@contextlib.asynccontextmanager
async def _processes(
    bench: workbench.Workbench, name: str, folder: Path, daemon: processes.DaemonProcess | None
) -> AsyncIterator[Setting]:
    """Those of a contender, the daemon among them."""
    async with contextlib.AsyncExitStack() as stack:
        if daemon is None:
            with machine.on_core(bench.cores.server):
                setting = await stack.enter_async_context(ALONE[name](folder))
            yield setting
            return
        client = await stack.enter_async_context(tarry.aio.Client(daemon.address))
        handing_back = HandingBack(client, redis_relay.SOURCE, redis_relay.RELAY)
        await handing_back.create_subscription()
        with machine.on_core(bench.cores.server):
            setting = await stack.enter_async_context(WITH_TARRY[name](folder, daemon.address, handing_back))
        served = carrying.Victim(daemon, daemon.start_serving)
        yield dataclasses.replace(setting, victims={DAEMON: served, **setting.victims})


def _on_server_core(bench: workbench.Workbench, victim: carrying.Victim) -> carrying.Victim:
    def start() -> None:
        with machine.on_core(bench.cores.server):
            victim.start()

    return dataclasses.replace(victim, start=start)
