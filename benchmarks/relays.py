"""Measures lateness, rate and cost of delayed messages that reach a consumer through a broker.

The contenders are Tarry with `tarry-relay` and with a relay of `examples`, a sorted set of Redis that a worker polls,
and the schedules of NATS. Each runs in peace, with every process killed once, and with all messages due at once.

Some messages fail at the consumer and are redelivered. The consumer's own record is the oracle: every message, each
delivery once, none early. Redis synchronises its data before it answers, as the daemon does; NATS and Kafka do so
later. `carrying` has the load and its account, `carrier_settings` the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
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
from tests.brokers import kafka_server, nats_server

NAME = "relays"
FAILS_EVERY = 50
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
DAEMON = "daemon"
# The share of the deliveries that have arrived when each is killed
KILLS = {RELAY: 0.25, WORKER: 0.25, DAEMON: 0.5, BROKER: 0.75}
PATIENCE_S = 300.0

TarryRelayed = Callable[[Path, str], AbstractAsyncContextManager[Setting]]
Relayed = Callable[[Path, str, HandingBack], AbstractAsyncContextManager[Setting]]
Alone = Callable[[Path], AbstractAsyncContextManager[Setting]]
# The last word of a name is the broker.
WITH_TARRY_RELAY: Mapping[str, TarryRelayed] = {
    "tarry-relay, redis": carrier_settings.tarry_relay_of_redis,
    "tarry-relay, nats": carrier_settings.tarry_relay_of_nats,
    "tarry-relay, kafka": carrier_settings.tarry_relay_of_kafka,
}
WITH_EXAMPLE: Mapping[str, Relayed] = {
    "example's relay, redis": carrier_settings.relayed_by_redis,
    "example's relay, nats": carrier_settings.relayed_by_nats,
}
ALONE: Mapping[str, Alone] = {
    "sorted set, redis": carrier_settings.sorted_by_redis,
    "schedules, nats": carrier_settings.scheduled_by_nats,
}


# Carriers whose deliveries may arrive twice when a process is killed or partitions move: nothing drops them by name.
MAY_DOUBLE = ("tarry-relay, kafka", *ALONE)


class Course(enum.StrEnum):
    """The course of a run."""

    IN_PEACE = "in peace"
    KILLED = "killed"
    AT_ONCE = "at once"
    """Every message is due when it is published: the highest throughput."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load as numbers."""

    messages: int
    most_ms: int
    seed: int

    def delays_ms(self, course: Course) -> list[int]:
        most_ms = 0 if course is Course.AT_ONCE else self.most_ms
        return carrying.delays(self.messages, most_ms=most_ms, seed=self.seed)


def run(bench: workbench.Workbench) -> report.Result:
    plan = Plan(bench.size(10_000, 100), bench.size(30_000, 500), bench.seed)
    rounds = workbench.Rounds(bench, NAME)
    missing = _missing(bench)
    rounds.run(
        {
            f"{name}, {course}": functools.partial(_turn, bench, rounds, plan, name, course)
            for name in [*WITH_TARRY_RELAY, *WITH_EXAMPLE, *ALONE]
            if name.rpartition(" ")[2] not in missing
            for course in _courses(bench, name)
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
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems, list(missing.values()))


def _missing(bench: workbench.Workbench) -> dict[str, str]:
    """Return the brokers that are not measured, with the reasons."""
    found = {
        "redis": (bench.redis, bench.why_without_redis),
        "nats": (nats_server.find(), nats_server.MISSING),
        "kafka": (kafka_server.find(), kafka_server.MISSING),
    }
    return {broker: why for broker, (program, why) in found.items() if program is None}


def _courses(bench: workbench.Workbench, name: str) -> list[Course]:
    """Return the courses of a contender.

    In a quick run each contender has one, because each process takes its time to start, and the examples' relays none:
    a test of their own kills them. The examples' relays get uncommitted messages again after 2 s: on a slow machine
    they do not finish with all messages at once.
    """
    if bench.quick:
        return [] if name in WITH_EXAMPLE else [Course.AT_ONCE if name in WITH_TARRY_RELAY else Course.KILLED]
    return [course for course in Course if course is not Course.AT_ONCE or name not in WITH_EXAMPLE]


def _turn(
    bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan, name: str, course: Course
) -> Mapping[str, float]:
    account, what = carrying.Account(plan.messages, fails_every=FAILS_EVERY), f"{name}, {course}"
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        daemon = None if name in ALONE else stack.enter_context(bench.daemon())
        try:
            cpu_s = asyncio.run(_carry(bench, plan, name, course, account, folder, daemon))
        except TimeoutError as error:
            # The other contenders have their turns all the same.
            rounds.check(what, str(error))
            return {}
    for problem in account.problems():
        rounds.check(what, problem)
    if name not in MAY_DOUBLE:
        rounds.check_count(f"{what}, deliveries that came twice", len(account.doubles), 0)
    used = {f"{what}, {each}'s CPU, s": seconds for each, seconds in cpu_s.items()}
    if course is Course.AT_ONCE:
        return {f"{what}, messages a second, 1/s": (plan.messages - 1) / account.first_deliveries_s} | used
    lateness = np.percentile(account.lateness_ms(), list(QUANTILES.values()))
    figures = {f"{what}, {quantile}, ms": float(value) for quantile, value in zip(QUANTILES, lateness, strict=True)}
    if course is Course.KILLED:
        return figures | {f"{what}, came twice, deliveries": len(account.doubles)}
    return figures | used


async def _carry(
    bench: workbench.Workbench,
    plan: Plan,
    name: str,
    course: Course,
    account: carrying.Account,
    folder: Path,
    daemon: processes.DaemonProcess | None,
) -> Mapping[str, float]:
    """Carry the messages; return the CPU time of each process (seconds)."""
    async with _processes(bench, name, folder, daemon) as setting:
        victims = {what: _on_server_core(bench, victim) for what, victim in setting.victims.items()}
        killed = victims if course is Course.KILLED else {}
        kills = [carrying.Kill(KILLS[what], victim.kill) for what, victim in killed.items()]
        before = {what: victim.process.usage().cpu_s for what, victim in victims.items()}
        await carrying.carry(setting.carrier, account, plan.delays_ms(course), kills, timeout_s=PATIENCE_S)
        return {what: victim.process.usage().cpu_s - before[what] for what, victim in victims.items()}


@contextlib.asynccontextmanager
async def _processes(
    bench: workbench.Workbench, name: str, folder: Path, daemon: processes.DaemonProcess | None
) -> AsyncIterator[Setting]:
    """Start the processes of a contender, the daemon among them."""
    async with contextlib.AsyncExitStack() as stack:
        if daemon is None:
            with machine.on_core(bench.cores.server):
                setting = await stack.enter_async_context(ALONE[name](folder))
            yield setting
            return
        if name in WITH_TARRY_RELAY:
            setting_of = functools.partial(WITH_TARRY_RELAY[name], folder, daemon.address)
        else:
            client = await stack.enter_async_context(tarry.aio.Client(daemon.address))
            handing_back = HandingBack(client, redis_relay.SOURCE, redis_relay.RELAY)
            await handing_back.create_subscription()
            setting_of = functools.partial(WITH_EXAMPLE[name], folder, daemon.address, handing_back)
        with machine.on_core(bench.cores.server):
            setting = await stack.enter_async_context(setting_of())
        served = carrying.Victim(daemon, daemon.start_serving)
        yield dataclasses.replace(setting, victims={DAEMON: served, **setting.victims})


def _on_server_core(bench: workbench.Workbench, victim: carrying.Victim) -> carrying.Victim:
    def start() -> None:
        with machine.on_core(bench.cores.server):
            victim.start()

    return dataclasses.replace(victim, start=start)
