"""How late rows come under load: receipt by the client minus due time, every row checked by identity.

Rows are added at a steady rate by a process of their own, so that adding does not delay the reading of the clock at
receipt; rows, due times and moments of sending follow from the seed, and both processes derive the same.

Owns: the plan of the load, its pacing, the statistics. Does not own: receiving (`examples.relay`) and the verdict.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import queue
import threading
import time
from concurrent.futures import Future
from multiprocessing.queues import Queue
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

import tarry
from benchmarks import report
from examples import processes, relay, verdict

# What is due within the lookahead stays in memory when its bucket is sealed. With the default, 30 s, every row of this
# load would, and no segment would be loaded again.
SETTINGS: dict[str, object] = {"delivery.lookahead_ms": 2_000}
TOPIC = "lateness"
SUBSCRIPTION = "receiver"
ROWS_PER_LEDGER = 10_000
STEP_MS = 10
# Until both processes are ready.
LEAD_MS = 3_000
PATIENCE_S = 60.0


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=int, default=60, help="of adding; default: %(default)s")
    parser.add_argument("--rows-per-s", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--delay-from-ms", type=int, default=5_000, help="default: %(default)s")
    parser.add_argument("--delay-until-ms", type=int, default=30_000, help="default: %(default)s")


def run(daemon: processes.DaemonProcess, arguments: argparse.Namespace) -> tuple[report.Measurement, bool]:
    """Adds, receives, acknowledges. True when every row came as it should."""
    plan = Plan(
        start_ms=_now_ms() + LEAD_MS,
        seconds=arguments.seconds,
        rows_per_s=arguments.rows_per_s,
        delay_from_ms=arguments.delay_from_ms,
        delay_until_ms=arguments.delay_until_ms,
        seed=arguments.seed,
    )
    account = verdict.Account(*plan.positions(), plan.deliver_at_ms(), None)
    usage = report.Usage(daemon)
    with (
        tarry.Client(daemon.address) as client,
        client.subscribe(TOPIC, SUBSCRIPTION, create=True) as subscription,
        relay.Relay(subscription, account) as receiving,
        _Adding(daemon.address, plan, account) as adding,
    ):
        span_s = (LEAD_MS + plan.delay_until_ms) / 1000 + plan.seconds
        receiving.wait_until(lambda: account.durable == len(account) or adding.failed, span_s + PATIENCE_S)
        stats = client.stats(TOPIC)
    found = account.verdict()
    operation = "tarry_delayed_message_index_bucket_op_count_total"
    values: dict[str, report.Value] = {
        "rows": plan.rows,
        "adds_per_s": plan.rows_per_s,
        **_lateness(account),
        "late_on_arrival_rows": int(np.count_nonzero(account.deliver_at_ms <= account.answered_at_ms)),
        "adds_behind_plan_ms_max": adding.behind_ms_max,
        "buckets_sealed": int(daemon.metric(operation, type="create", state="succeed")),
        "segments_loaded": int(daemon.metric(operation, type="load", state="succeed")),
        "left_in_daemon_rows": stats.pending + sum(each.backlog for each in stats.subscriptions),
        "handed_out_again_rows": found.handed_out_again,
        **{f"broken: {rule.name}": rule.broken for rule in found.rules},
    }
    return report.Measurement("lateness", values | usage.values()), found.kept


def _lateness(account: verdict.Account) -> dict[str, report.Value]:
    came = account.first_received_at_ms != np.iinfo(np.int64).max
    lateness = (account.first_received_at_ms - account.deliver_at_ms)[came]
    if not len(lateness):
        return {}
    p50, p99, p999 = np.percentile(lateness, [50, 99, 99.9])
    return {
        "lateness_p50_ms": float(p50),
        "lateness_p99_ms": float(p99),
        "lateness_p999_ms": float(p999),
        "lateness_max_ms": int(lateness.max()),
    }


# (first row, row after the last, answered at, behind the plan by), the times in ms; None at the end.
_Reports: TypeAlias = "Queue[tuple[int, int, int, int] | None]"


class _Adding:
    """The process that adds, and the thread that takes in what was answered. A context manager."""

    def __init__(self, address: str, plan: Plan, account: verdict.Account) -> None:
        context = multiprocessing.get_context("spawn")
        self._account = account
        self._reports: _Reports = context.Queue()
        self._process = context.Process(target=_add_by_plan, args=(address, plan, self._reports), daemon=True)
        self._thread = threading.Thread(target=self._take_in, name="answers")
        self._ended = threading.Event()
        self.behind_ms_max = 0

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
            first, last, at_ms, behind_ms = answered
            self._account.note_answered(slice(first, last), at_ms)
            self.behind_ms_max = max(self.behind_ms_max, behind_ms)


def _add_by_plan(address: str, plan: Plan, reports: _Reports) -> None:
    """Runs in the process of its own: one batch a step, each at its moment."""
    ledger_id, entry_id = plan.positions()
    due = plan.deliver_at_ms()
    clock = threading.Event()

    def note(first: int, last: int, behind_ms: int, answer: Future[tarry.AddResult]) -> None:
        if answer.exception() is None:
            reports.put((first, last, _now_ms(), behind_ms))

    with tarry.Client(address) as client, client.add_stream(TOPIC, in_flight=1_000) as stream:
        for step, first in enumerate(range(0, plan.rows, plan.rows_per_step)):
            send_at_ms = plan.start_ms + step * STEP_MS
            remaining_s = send_at_ms / 1000 - time.time()
            if remaining_s > 0:
                clock.wait(remaining_s)
            behind_ms = max(0, _now_ms() - send_at_ms)
            last = min(first + plan.rows_per_step, plan.rows)
            rows = slice(first, last)
            stream.add(ledger_id[rows], entry_id[rows], deliver_at_ms=due[rows]).add_done_callback(
                functools.partial(note, first, last, behind_ms)
            )
    reports.put(None)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
