"""One topic with a million rows due at one moment beside a hundred topics that go on as ever: how late the others are.

The others' rows are spread over the seconds before and after that moment, one at a time, so that one run shows them
with the burst and without it. Everybody has a process and a connection of their own; that of the burst is at a lower
priority than that of the others, so that two clients on one core do not count as the daemon's lateness. Everything is
acknowledged.

Owns: the load, the statistics. Does not own: the daemon (`workbench`), receiving the burst (`tarry_load`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np

import tarry
import tarry.aio
from benchmarks import load, report, side_process, tarry_load, workbench

NAME = "fair"
SUBSCRIPTION = "dispatcher"
BURST = "burst"
RATE = 50
# From the first request until the others' rows begin: for adding. Then how long they go on before the moment, for the
# figures without a burst, and after it.
ADDING_S, BEFORE_S, AFTER_S = 30, 10, 10
QUICK_ADDING_S, QUICK_BEFORE_S, QUICK_AFTER_S = 10, 3, 2
# Left out of the figures without a burst: streams that have just opened, and the moment itself.
OPENING_MS, MARGIN_MS = 2_000, 500
# Rows are acknowledged together, and what waits for that no longer than this.
ACKNOWLEDGE_S = 0.2
PATIENCE_S = 120.0
NICENESS = 10
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load of the others. `moment_ms`: when the burst is due; `before_s`, `after_s`: how long it goes on."""

    address: str
    topics: int
    moment_ms: int
    before_s: int
    after_s: int
    seed: int

    @property
    def from_ms(self) -> int:
        return self.moment_ms - 1000 * self.before_s

    @property
    def until_ms(self) -> int:
        return self.moment_ms + 1000 * self.after_s

    @property
    def rows_of_topic(self) -> int:
        return RATE * (self.before_s + self.after_s)

    def rows(self, topic: int) -> load.Rows:
        due = load.random_due(self.rows_of_topic, from_ms=self.from_ms, until_ms=self.until_ms, seed=self.seed + topic)
        return load.in_order(due)


def run(bench: workbench.Workbench) -> report.Result:
    topics, count = bench.size(100, 5), bench.size(1_000_000, 20_000)
    rounds = workbench.Rounds(bench, NAME)
    for number in range(1, bench.rounds + 1):
        rounds.turn(f"round {number} of {bench.rounds}", functools.partial(_turn, bench, rounds, topics, count))
    without = [rounds.figure(f"without the burst, {quantile}", "ms") for quantile in QUANTILES]
    goal = report.Goal(most=50)
    beside = [
        rounds.figure(f"with the burst, {quantile}", "ms", goal if quantile == "p99" else None)
        for quantile in QUANTILES
    ]
    return report.Result(
        NAME,
        {"topics": topics, "rows_per_second_of_each": RATE, "rows_of_the_burst": count} | bench.parameters,
        [*without, *beside, report.ratio(beside[1], without[1]), rounds.figure("burst received after", "s")],
        rounds.problems,
    )


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, topics: int, count: int) -> Mapping[str, float]:
    before_s, after_s = bench.size(BEFORE_S, QUICK_BEFORE_S), bench.size(AFTER_S, QUICK_AFTER_S)
    moment_ms = load.now_ms() + 1000 * (bench.size(ADDING_S, QUICK_ADDING_S) + before_s)
    burst_rows = _burst_rows(count, moment_ms)
    with bench.daemon() as daemon:
        plan = Plan(daemon.address, topics, moment_ms, before_s, after_s, bench.seed)
        with (
            side_process.SideProcess(_receive_burst, daemon.address, count, moment_ms) as burst,
            side_process.SideProcess(_receive_others, plan) as others,
        ):
            with tarry.Client(daemon.address) as client:
                tarry_load.add(client, BURST, burst_rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
            rounds.check_in_time("burst", "adding ended after the others' rows began", load.now_ms() - plan.from_ms)
            deliver_at_ms, received_at_ms, problem = others.result()
            last_received_at_ms, burst_problem = burst.result()
    rounds.check("others", problem)
    rounds.check("burst", burst_problem)
    lateness_ms = received_at_ms - deliver_at_ms
    without = (deliver_at_ms > plan.from_ms + OPENING_MS) & (deliver_at_ms < moment_ms - MARGIN_MS)
    beside = (deliver_at_ms >= moment_ms) & (deliver_at_ms <= last_received_at_ms)
    figures: dict[str, float] = {}
    for name, chosen in (("without the burst", without), ("with the burst", beside)):
        values = np.percentile(lateness_ms[chosen], list(QUANTILES.values()))
        figures |= {f"{name}, {quantile}": float(value) for quantile, value in zip(QUANTILES, values, strict=True)}
    return figures | {"burst received after": (last_received_at_ms - moment_ms) / 1000}


def _burst_rows(count: int, moment_ms: int) -> load.Rows:
    return load.in_order(np.full(count, moment_ms, np.uint64))


def _receive_burst(address: str, count: int, moment_ms: int, results: Connection) -> None:
    os.nice(NICENESS)
    with tarry.Client(address, client_id=BURST) as client:
        subscribed = client.subscribe(BURST, SUBSCRIPTION, create=True, permits=tarry_load.PERMITS)
        with subscribed as subscription:
            results.send("ready")
            drain = tarry_load.Drain(count)
            drain.run(subscription)
            results.send((drain.last_received_at_ms, drain.problem(_burst_rows(count, moment_ms))))


def _receive_others(plan: Plan, results: Connection) -> None:
    asyncio.run(_Others(plan, results).run())


class _Others:
    """All other topics: their rows are added, received and acknowledged."""

    def __init__(self, plan: Plan, results: Connection) -> None:
        self._plan = plan
        self._results = results
        self._came: list[tarry.Batch] = []
        self._problems: list[str] = []

    async def run(self) -> None:
        async with tarry.aio.Client(self._plan.address) as client:
            tasks = [asyncio.create_task(self._serve(client, topic)) for topic in range(self._plan.topics)]
            self._results.send("ready")
            await asyncio.gather(*tasks)
        deliver_at_ms = np.concatenate([batch.deliver_at_ms for batch in self._came]).astype(np.int64)
        received_at_ms = np.concatenate([batch.received_at_ms_by_row for batch in self._came])
        self._results.send((deliver_at_ms, received_at_ms, "; ".join(self._problems) or None))

    async def _serve(self, client: tarry.aio.Client, topic: int) -> None:
        name, rows = f"other-{topic}", self._plan.rows(topic)
        opening = client.subscribe(name, SUBSCRIPTION, create=True, permits=tarry_load.PERMITS)
        async with opening as subscription:
            added = await client.add(name, rows.ledger_id, rows.entry_id, deliver_at_ms=rows.deliver_at_ms)
            mine: list[tarry.Batch] = []
            came, held = 0, list[tarry.Batch]()
            while came < len(rows):
                batch = await subscription.receive(ACKNOWLEDGE_S)
                if batch is not None:
                    came += len(batch)
                    mine.append(batch)
                    held.append(batch)
                elif load.now_ms() > self._plan.until_ms + 1000 * PATIENCE_S:
                    break
                if held and load.now_ms() - held[0].received_at_ms >= 1000 * ACKNOWLEDGE_S:
                    _acknowledge(subscription, held)
                    held = []
            if held:
                _acknowledge(subscription, held)
            await subscription.flush(PATIENCE_S)
        self._came += mine
        problem = tarry_load.problem_of(mine, rows)
        if problem is not None or added.accepted != len(rows):
            self._problems.append(f"{name}: {problem or 'not every row was accepted'}")


def _acknowledge(subscription: tarry.aio.Subscription, held: Sequence[tarry.Batch]) -> None:
    _ = subscription.ack(tarry.Batch.concat(held))
