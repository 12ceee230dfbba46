"""How many rows a second become durable: one stream, batches in flight, every answer awaited.

Owns: the load and the count of answers by second. Does not own: the daemon process, the drawing.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Future

import numpy as np

import tarry
from benchmarks import report
from examples import processes

SETTINGS: dict[str, object] = {}
TOPIC = "add-rate"
# As a broker rolls its ledgers.
ROWS_PER_LEDGER = 50_000
DUE_FROM_MS, DUE_UNTIL_MS = 3_600_000, 25 * 3_600_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--batch-rows", type=int, default=1_000, help="rows of one request; default: %(default)s")
    parser.add_argument("--in-flight", type=int, default=16, help="requests unanswered; default: %(default)s")


def run(daemon: processes.DaemonProcess, arguments: argparse.Namespace) -> tuple[report.Measurement, bool]:
    """Adds for so many seconds. True when every row was accepted and is pending."""
    answers = _Answers()
    random = np.random.default_rng(arguments.seed)
    rows: int = arguments.batch_rows
    entries = np.arange(ROWS_PER_LEDGER, dtype=np.uint64)
    now_ms = time.time_ns() // 1_000_000
    usage = report.Usage(daemon)
    with tarry.Client(daemon.address) as client:
        with client.add_stream(TOPIC, in_flight=arguments.in_flight) as stream:
            sent = 0
            began_s = time.monotonic()
            while time.monotonic() - began_s < arguments.seconds:
                ledger, first = divmod(sent, ROWS_PER_LEDGER)
                # A batch does not cross into the next ledger.
                batch = entries[first : first + rows]
                due = random.integers(now_ms + DUE_FROM_MS, now_ms + DUE_UNTIL_MS, len(batch), dtype=np.uint64)
                stream.add(ledger, batch, deliver_at_ms=due).add_done_callback(answers.note)
                sent += len(batch)
            stream.flush()
            ended_s = time.monotonic()
        used = usage.values()
        stats = client.stats(TOPIC)
    values: dict[str, report.Value] = {
        "rows": sent,
        "seconds": round(ended_s - began_s, 2),
        "rows_per_s": round(sent / (ended_s - began_s)),
        "rows_per_s_median_second": answers.median_per_s(began_s, ended_s),
        "accepted": answers.accepted,
        "pending": stats.pending,
        "buckets": stats.buckets,
        "bucket_bytes_per_row": round(stats.bucket_bytes / max(1, stats.pending - stats.mutable_rows), 2),
        "batch_rows": rows,
        "requests_in_flight": arguments.in_flight,
    }
    return report.Measurement("add rate", values | used), answers.accepted == sent == stats.pending


class _Answers:
    """When how many rows were answered. Written by the stream's thread alone."""

    def __init__(self) -> None:
        self.accepted = 0
        self._at_s: list[float] = []
        self._rows: list[int] = []

    def note(self, answer: Future[tarry.AddResult]) -> None:
        accepted = answer.result().accepted
        self.accepted += accepted
        self._at_s.append(time.monotonic())
        self._rows.append(accepted)

    def median_per_s(self, began_s: float, ended_s: float) -> int:
        """Over the whole seconds."""
        seconds = (np.array(self._at_s) - began_s).astype(np.int64)
        by_second = np.bincount(seconds, weights=self._rows)[: max(1, int(ended_s - began_s))]
        return int(np.median(by_second))
