"""Measures how late rows arrive under load: receipt by the client minus due time, each row checked by identity.

A process of its own adds rows at a steady rate, so that adding does not delay the reading of the clock at receipt.
Rows, due times and moments of sending follow from the seed, and both processes derive the same. Rows that were already
due when their add was answered are left out, and permits never run out, because a wait for the receiver is not the
daemon's. `examples.relay` receives, `examples.verdict` judges.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

import tarry
from benchmarks import load, report, side_process, tarry_load, workbench
from examples import relay, verdict

NAME = "lateness"
RATES = (1_000, 5_000, 20_000)
# Rows due within the lookahead stay in memory when their bucket is sealed. With the default, 30 s, that would be every
# row of this load, and no segment would be loaded again.
LOOKAHEAD_MS = 2_000
DELAYS_MS, DELAYS_QUICK_MS = (5_000, 15_000), (500, 2_500)
SUBSCRIPTION = "receiver"
ROWS_PER_LEDGER = 10_000
STEP_MS = 10
# The time to the first add, once both processes are ready (ms)
LEAD_MS = 500
PATIENCE_S = 300.0
QUANTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load as numbers, from which the columns follow.

    `start_ms` is when the first add is sent, or 0 until both processes are ready.
    """

    seconds: int
    rows_per_s: int
    delay_from_ms: int
    delay_until_ms: int
    seed: int
    start_ms: int = 0

    @property
    def rows(self) -> int:
        return self.rows_per_s * self.seconds

    @property
    def rows_per_step(self) -> int:
        return self.rows_per_s * STEP_MS // 1000

    def positions(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        numbers = np.arange(self.rows, dtype=np.uint64)
        return numbers // ROWS_PER_LEDGER, numbers % ROWS_PER_LEDGER

    def deliver_at_ms(self) -> NDArray[np.uint64]:
        random = np.random.default_rng(self.seed)
        sent_ms = self.start_ms + np.arange(self.rows) // self.rows_per_step * STEP_MS
        delays = random.integers(self.delay_from_ms, self.delay_until_ms, self.rows, endpoint=True)
        due: NDArray[np.int64] = sent_ms + delays
        return due.astype(np.uint64)


def run(bench: workbench.Workbench) -> report.Result:
    seconds = bench.size(30, 2)
    rates = RATES if not bench.quick else RATES[:1]
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({_name(rate): functools.partial(_turn, bench, rounds, rate, seconds) for rate in rates})
    figures = []
    for rate in rates:
        for quantile in QUANTILES:
            goal = report.Goal(most=10) if quantile == "p99" else None
            figures.append(rounds.figure(f"{_name(rate)}, {quantile}", "ms", goal))
        figures.append(rounds.figure(f"{_name(rate)}, late on arrival", "rows"))
        figures.append(rounds.figure(f"{_name(rate)}, segments loaded", ""))
    parameters: dict[str, report.Value] = {
        "seconds": seconds,
        "delays_ms": " to ".join(map(str, _delays_ms(bench))),
        "lookahead_ms": LOOKAHEAD_MS,
    }
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _delays_ms(bench: workbench.Workbench) -> tuple[int, int]:
    return DELAYS_QUICK_MS if bench.quick else DELAYS_MS


def _name(rate: int) -> str:
    return f"{rate:,} rows/s"


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, rate: int, seconds: int) -> Mapping[str, float]:
    """Add, receive and acknowledge each row."""
    least_ms, most_ms = _delays_ms(bench)

    def once(factor: int) -> Mapping[str, float]:
        return _turn_once(bench, rounds, Plan(seconds, rate, factor * least_ms, factor * most_ms, bench.seed))

    return bench.with_time(_name(rate), once)


def _turn_once(bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan) -> Mapping[str, float]:
    """Do one turn. Raises TimeTooShort if no row arrived that was added in time."""
    with bench.daemon(settings={"delivery.lookahead_ms": LOOKAHEAD_MS}) as daemon:
        account = receive(tarry_load.Reach(daemon.address), plan)
        operation = "tarry_delayed_message_index_bucket_op_count_total"
        loaded = daemon.metric(operation, type="load", state="succeed")
    name = _name(plan.rows_per_s)
    for rule in account.verdict().rules:
        rounds.check(name, f"{rule.name}: {rule.broken:,} rows are not so" if rule.broken else None)
    late, lateness_ms = lateness_of(account)
    if not len(lateness_ms):
        raise workbench.TimeTooShort("no row that was added in time came")
    values = np.percentile(lateness_ms, list(QUANTILES.values()))
    return {
        **{f"{name}, {quantile}": float(value) for quantile, value in zip(QUANTILES, values, strict=True)},
        f"{name}, late on arrival": late,
        f"{name}, segments loaded": loaded,
    }


def lateness_of(account: verdict.Account) -> tuple[int, NDArray[np.int64]]:
    """Return how many rows were due when their add was answered, and how late each of the others arrived (ms)."""
    late = (account.answered_at_ms != verdict.NEVER) & (account.deliver_at_ms <= account.answered_at_ms)
    in_time = ~late & (account.first_received_at_ms != verdict.NEVER)
    return int(np.count_nonzero(late)), (account.first_received_at_ms - account.deliver_at_ms)[in_time]


def receive(reach: tarry_load.Reach, plan: Plan) -> verdict.Account:
    """Add, receive and acknowledge by the plan, which begins once both processes are ready.

    Returns when every acknowledgement is durable, or it takes too long.
    """
    with (
        reach.client() as client,
        client.subscribe(NAME, SUBSCRIPTION, create=True, permits=tarry_load.PERMITS) as subscription,
        side_process.SideProcess(add_steadily, reach, NAME, plan) as adding,
    ):
        plan = dataclasses.replace(plan, start_ms=load.now_ms() + LEAD_MS)
        account = verdict.Account(*plan.positions(), plan.deliver_at_ms(), None)
        adding.send(plan.start_ms)
        with relay.Relay(subscription, account) as receiving:
            span_s = (LEAD_MS + plan.delay_until_ms) / 1000 + plan.seconds
            receiving.wait_until(lambda: account.durable == len(account) or adding.failed, span_s + PATIENCE_S)
        answered_at_ms = adding.result()
        for first in range(0, len(answered_at_ms), plan.rows_per_step):
            if answered_at_ms[first] != verdict.NEVER:
                account.note_answered(slice(first, first + plan.rows_per_step), int(answered_at_ms[first]))
    return account


def add_steadily(reach: tarry_load.Reach, topic: str, plan: Plan, parent: Connection) -> None:
    """Add a batch a step, each at its moment, in a process of its own.

    Receives when to begin (ms), and any message to end it before the plan does. Sends when each row was answered (ms),
    or `NEVER` if it was not.
    """
    answered_at_ms = np.full(plan.rows // plan.rows_per_step, verdict.NEVER)
    clock = threading.Event()

    def note(step: int, answer: Future[tarry.AddResult]) -> None:
        if answered_at_ms[step] == verdict.NEVER and answer.exception() is None:
            answered_at_ms[step] = load.now_ms()

    answers: list[Future[tarry.AddResult]] = []
    with reach.client() as client, client.add_stream(topic, in_flight=1_000) as stream:
        parent.send("ready")
        plan = dataclasses.replace(plan, start_ms=parent.recv())
        ledger_id, entry_id = plan.positions()
        due = plan.deliver_at_ms()
        while not parent.poll() and len(answers) < len(answered_at_ms):
            step = len(answers)
            remaining_s = (plan.start_ms + step * STEP_MS) / 1000 - time.time()
            if remaining_s > 0:
                clock.wait(remaining_s)
            rows = slice(step * plan.rows_per_step, (step + 1) * plan.rows_per_step)
            answers.append(stream.add(ledger_id[rows], entry_id[rows], deliver_at_ms=due[rows]))
            answers[-1].add_done_callback(functools.partial(note, step))
    # A waiter for an answer may go on before its callback has run.
    for step, answer in enumerate(answers):
        note(step, answer)
    parent.send(np.repeat(answered_at_ms[: len(answers)], plan.rows_per_step))
