"""The longest pause of the daemon's event loop while buckets are sealed, by its own heartbeat.

Rows are added at a steady rate. The same load without sealing tells what of it is not the seals' doing.

Owns: the pacing, and reading the daemon's histogram. Does not own: the heartbeat (`daemon.runtime.loop_pause`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future

import tarry
from benchmarks import load, report, workbench
from examples import processes

NAME = "seal-pause"
SEALING, NOT_SEALING = "sealing", "not sealing"
SERIES = "tarry_event_loop_pause_seconds"
LONGEST, LONG, SEALS = "longest pause, at most", "pauses above 5 ms", "buckets sealed"
LONG_S = 0.005
UNITS = {LONGEST: "ms", LONG: "% of beats", SEALS: ""}
_NEVER = 1_000_000_000


def run(bench: workbench.Workbench) -> report.Result:
    rows_per_s = bench.size(200_000, 100_000)
    seconds = bench.size(20, 2)
    rounds = workbench.Rounds(bench, NAME)
    settings: dict[str, dict[str, object]] = {
        SEALING: {},
        NOT_SEALING: {
            "bucket.min_index_count_per_bucket": _NEVER,
            "bucket.rows_max": _NEVER,
            "bucket.bytes_max": _NEVER * 100,
        },
    }
    rounds.run(
        {
            name: functools.partial(_turn, bench, rounds, name, rows_per_s, seconds, of_daemon)
            for name, of_daemon in settings.items()
        }
    )
    figures = []
    for name in settings:
        for figure, unit in UNITS.items():
            goal = report.Goal(most=1000 * LONG_S) if (name, figure) == (SEALING, LONGEST) else None
            figures.append(rounds.figure(f"{name}: {figure}", unit, goal))
    parameters: dict[str, report.Value] = {"rows_per_s": rows_per_s, "seconds": seconds}
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _turn(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    name: str,
    rows_per_s: int,
    seconds: int,
    settings: Mapping[str, object],
) -> Mapping[str, float]:
    with bench.daemon(settings=settings) as daemon:
        count = rows_per_s * seconds
        rows = load.in_order(load.over_a_day(count, seed=bench.seed))
        with tarry.Client(daemon.address) as client:
            # Code that runs for the first time is not what is measured.
            client.add(f"{NAME}-first", 0, 0, delay_ms=load.DAY_MS)
            before = beats(daemon)
            accepted = _add_steadily(client, rows, bench.batch_rows, rows_per_s)
            after = beats(daemon)
            stats = client.stats(NAME)
    rounds.check_count(name, accepted, count)
    rounds.check_count(f"{name}, pending", stats.pending, count)
    meanwhile = _meanwhile(before, after)
    return {
        f"{name}: {LONGEST}": 1000 * longest_s(before, after),
        f"{name}: {LONG}": 100 * (1 - meanwhile[LONG_S] / max(meanwhile.values())),
        f"{name}: {SEALS}": stats.buckets,
    }


def _add_steadily(client: tarry.Client, rows: load.Rows, batch_rows: int, rows_per_s: int) -> int:
    """One batch at its moment; the rows that were accepted."""
    answers: list[Future[tarry.AddResult]] = []
    clock = threading.Event()
    began_s = time.monotonic()
    with client.add_stream(NAME, in_flight=1_000) as stream:
        for number, batch in enumerate(rows.batches(batch_rows)):
            remaining_s = began_s + number * batch_rows / rows_per_s - time.monotonic()
            if remaining_s > 0:
                clock.wait(remaining_s)
            answers.append(stream.add(batch.ledger_id, batch.entry_id, deliver_at_ms=batch.deliver_at_ms))
    return sum(answer.result().accepted for answer in answers)


def beats(daemon: processes.DaemonProcess) -> dict[float, float]:
    """Beats that were at most so late, by the bound in seconds."""
    return {float(labels["le"]): value for labels, value in daemon.samples(f"{SERIES}_bucket") if "le" in labels}


def longest_s(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """The bound that no beat between two readings was later than."""
    meanwhile = _meanwhile(before, after)
    total = max(meanwhile.values())
    return min(bound_s for bound_s, at_most in meanwhile.items() if at_most == total)


def _meanwhile(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    return {bound_s: after[bound_s] - before.get(bound_s, 0.0) for bound_s in after}
