"""How late rows come under load: receipt by the client minus due time, every row checked by identity.

Rows are added at a steady rate by a process of their own, so that adding does not delay the reading of the clock at
receipt; rows, due times and moments of sending follow from the seed, and both processes derive the same. Rows that were
due already when their add was answered are left out, and permits never run out: what waits for its receiver is not the
daemon's doing.

Owns: the plan of the load, its pacing, the statistics. Does not own: receiving (`examples.relay`) and the verdict.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.queues import Queue
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import tarry
from benchmarks import load, report, tarry_load, workbench
from examples import processes, relay, verdict

NAME = "lateness"
RATES = (1_000, 5_000, 20_000)
# What is due within the lookahead stays in memory when its bucket is sealed. With the default, 30 s, every row of this
# load would, and no segment would be loaded again.
LOOKAHEAD_MS = 2_000
DELAYS_MS, DELAYS_QUICK_MS = (5_000, 15_000), (500, 2_500)
SUBSCRIPTION = "receiver"
ROWS_PER_LEDGER = 10_000
STEP_MS = 10
# Until both processes are ready.
LEAD_MS = 3_000
PATIENCE_S = 60.0
QUANTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load as numbers; the columns follow from them."""

    start_ms: int
    seconds: int
    rows_per_s: int
    delay_from_ms: int
    delay_until_ms: int
    seed: int

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
    """Adds, receives and acknowledges, each row."""
    with bench.daemon(settings={"delivery.lookahead_ms": LOOKAHEAD_MS}) as daemon:
        plan = Plan(
            start_ms=load.now_ms() + LEAD_MS,
            seconds=seconds,
            rows_per_s=rate,
            delay_from_ms=_delays_ms(bench)[0],
            delay_until_ms=_delays_ms(bench)[1],
            seed=bench.seed,
        )
        account = receive(tarry_load.Reach(daemon.address), plan)
        operation = "tarry_delayed_message_index_bucket_op_count_total"
        loaded = daemon.metric(operation, type="load", state="succeed")
    name = _name(rate)
    for rule in account.verdict().rules:
        rounds.check(name, f"{rule.name}: {rule.broken:,} rows are not so" if rule.broken else None)
    late, lateness_ms = lateness_of(account)
    if not len(lateness_ms):
        raise processes.ProcessFailed(f"{name}: no row that was added in time came")
    values = np.percentile(lateness_ms, list(QUANTILES.values()))
    return {
        **{f"{name}, {quantile}": float(value) for quantile, value in zip(QUANTILES, values, strict=True)},
        f"{name}, late on arrival": late,
        f"{name}, segments loaded": loaded,
    }


def lateness_of(account: verdict.Account) -> tuple[int, NDArray[np.int64]]:
    """How many rows were due when their add was answered, and how late each of the others came."""
    never = np.iinfo(np.int64).max
    late = (account.answered_at_ms != never) & (account.deliver_at_ms <= account.answered_at_ms)
    in_time = ~late & (account.first_received_at_ms != never)
    return int(np.count_nonzero(late)), (account.first_received_at_ms - account.deliver_at_ms)[in_time]


def receive(reach: tarry_load.Reach, plan: Plan) -> verdict.Account:
    """Adds, receives and acknowledges by the plan, until every acknowledgement is durable, or it takes too long."""
    account = verdict.Account(*plan.positions(), plan.deliver_at_ms(), None)
    with (
        reach.client() as client,
        client.subscribe(NAME, SUBSCRIPTION, create=True, permits=tarry_load.PERMITS) as subscription,
        relay.Relay(subscription, account) as receiving,
        _Adding(reach, plan, account) as adding,
    ):
        span_s = (LEAD_MS + plan.delay_until_ms) / 1000 + plan.seconds
        receiving.wait_until(lambda: account.durable == len(account) or adding.failed, span_s + PATIENCE_S)
    return account


# (first row, row after the last, answered at in ms); None at the end.
_Reports: TypeAlias = "Queue[tuple[int, int, int] | None]"


class _Adding:
    """The process that adds, and the thread that takes in what was answered. A context manager."""

    def __init__(self, reach: tarry_load.Reach, plan: Plan, account: verdict.Account) -> None:
        context = multiprocessing.get_context("spawn")
        self._account = account
        self._reports: _Reports = context.Queue()
        self._process = context.Process(target=_add_by_plan, args=(reach, plan, self._reports), daemon=True)
        self._thread = threading.Thread(target=self._take_in, name="answers")
        self._ended = threading.Event()

    @property
    def failed(self) -> bool:
        return self._process.exitcode not in (None, 0)

    def __enter__(self) -> _Adding:
        self._process.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._process.join(PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()

    def _take_in(self) -> None:
        while True:
            try:
                answered = self._reports.get(timeout=1.0)
            except queue.Empty:
                if self._ended.is_set():
                    return
                continue
            if answered is None:
                return
            first, last, at_ms = answered
            self._account.note_answered(slice(first, last), at_ms)


def _add_by_plan(reach: tarry_load.Reach, plan: Plan, reports: _Reports) -> None:
    """Runs in the process of its own: one batch a step, each at its moment."""
    ledger_id, entry_id = plan.positions()
    due = plan.deliver_at_ms()
    clock = threading.Event()

    def note(first: int, last: int, answer: Future[tarry.AddResult]) -> None:
        if answer.exception() is None:
            reports.put((first, last, load.now_ms()))

    with reach.client() as client, client.add_stream(NAME, in_flight=1_000) as stream:
        for step, first in enumerate(range(0, plan.rows, plan.rows_per_step)):
            send_at_ms = plan.start_ms + step * STEP_MS
            remaining_s = send_at_ms / 1000 - time.time()
            if remaining_s > 0:
                clock.wait(remaining_s)
            last = min(first + plan.rows_per_step, plan.rows)
            rows = slice(first, last)
            stream.add(ledger_id[rows], entry_id[rows], deliver_at_ms=due[rows]).add_done_callback(
                functools.partial(note, first, last)
            )
    reports.put(None)
