"""Measures batch jobs on ten million rows in two thousand small buckets: compaction, forecast, audit.

A part of the rows is gone. Every job runs on a root without a daemon, for its speed; the compaction runs once more
while a daemon serves the topic and delivers the rows of another one. The lateness without a job, and that from its
start until all merged buckets are served, come from one run. The daemon learns of the merges by a commit of its own.

Every row is followed by identity: after each compaction the root holds exactly the rows that were not gone, each with
its time. The forecast must count all of them, and the audit find nothing. `job_process` runs the jobs, `steady_load`
the load, `small_buckets` makes the root.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tarry
from batch.engine import topic_contents, topic_reading
from batch.engine.root import Root
from benchmarks import job_process, load, report, small_buckets, steady_load, tarry_load, workbench
from benchmarks.job_process import DRIVER, JVM, WORKER
from storage_backends.formats.row_columns import Rows
from storage_backends.local_directory import LocalDirectory

NAME = "compaction"
LOAD_TOPIC = "positions"
RATE = 1_000
LOCAL, SPARK = "local", "spark"
COMPACT, FORECAST, AUDIT = "compact", "forecast", "audit"
SECONDS_GOALS = {LOCAL: report.Goal(most=4), SPARK: report.Goal(most=8)}
BUCKETS_GOAL = report.Goal(most=40)
LATENESS_GOAL = report.Goal(most=50)
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
WITHOUT, MEANWHILE = "lateness without", "lateness meanwhile"
# The niceness of a job next to a daemon on the same cores
NICENESS = 10
# The pause between two spans (ms); rows that come due meanwhile belong to none.
PAUSE_MS = 1_000
# The time until the topic, and later its merged buckets, are served (seconds)
PATIENCE_S = 120.0
_POLL_S = 0.1
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the topic.

    `gone` is the number of its rows that are gone. `alone_s` is the time before the job without other work (seconds).
    """

    buckets: int
    bucket_rows: int
    gone: int
    alone_s: int

    @property
    def rows(self) -> int:
        return self.buckets * self.bucket_rows


FULL, QUICK = Size(2_000, 5_000, 1_000_000, 10), Size(20, 250, 500, 1)


def run(bench: workbench.Workbench) -> report.Result:
    size = QUICK if bench.quick else FULL
    rounds = workbench.Rounds(bench, NAME)
    with bench.folder() as folder:
        topic = _Topic(bench, rounds, size, folder / "root")
        turns: dict[str, workbench.Turn] = {}
        # Starting Spark takes longer than everything else in a quick run, and compacting next to a daemon shows more.
        for engine in (LOCAL,) if bench.quick else (LOCAL, SPARK):
            if not bench.quick:
                turns[f"{engine}, {COMPACT}"] = functools.partial(topic.compacted, engine)
            turns[f"{engine}, served"] = functools.partial(topic.compacted_while_served, engine)
            for job in (FORECAST, AUDIT):
                turns[f"{engine}, {job}"] = functools.partial(topic.read, engine, job)
        rounds.run(turns)
    parameters: dict[str, report.Value] = dataclasses.asdict(size)
    parameters |= {"rows": size.rows, "rows_per_s": RATE, "niceness": NICENESS}
    notes = ("a quick run does without Spark, and compacts only beside a daemon",) if bench.quick else ()
    figures = [rounds.figure(name, _unit(name), _goal(name)) for name in rounds.names]
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems, notes)


def _unit(figure: str) -> str:
    by_word = {"lateness": "ms", "memory": "MiB", "buckets": "", "rows": "rows/s", "read": "B", "written": "B"}
    return next((unit for word, unit in by_word.items() if f", {word}" in figure), "s")


def _goal(figure: str) -> report.Goal | None:
    engine, _, what = figure.partition(", ")
    goals = {"seconds": SECONDS_GOALS[engine], "buckets after": BUCKETS_GOAL, f"{MEANWHILE}, p99": LATENESS_GOAL}
    return goals.get(what)


class _Topic:
    """A root with the topic; each turn has a copy."""

    def __init__(self, bench: workbench.Workbench, rounds: workbench.Rounds, size: Size, root: Path) -> None:
        self._bench = bench
        self._rounds = rounds
        self._size = size
        self._root = root
        self._left = self._filled()

    def _filled(self) -> load.Rows:
        """Fill the root; return the rows that are not gone."""
        size, began_s = self._size, time.perf_counter()
        rows = load.in_order(load.over_a_day(size.rows, seed=self._bench.seed))
        gone = np.zeros(size.rows, bool)
        gone[np.random.default_rng(self._bench.seed).permutation(size.rows)[: size.gone]] = True
        small_buckets.write(self._bench, self._root, NAME, rows, gone, each=size.bucket_rows)
        self._bench.say(f"{NAME}: filled in {time.perf_counter() - began_s:.0f} s")
        return load.Rows(rows.ledger_id[~gone], rows.entry_id[~gone], rows.deliver_at_ms[~gone])

    # ---- turns

    def compacted(self, engine: str) -> Mapping[str, float]:
        with self._bench.folder() as folder:
            root = self._copy(folder)
            ended = self._run(folder, COMPACT, engine, root)
            self._check_job(engine, ended.document)
            self._check_left(f"{engine}, {COMPACT}", root, self._left)
        done = ended.document
        seconds = done["seconds"]["total"]
        return {
            f"{engine}, seconds": seconds,
            f"{engine}, start-up": ended.seconds - seconds,
            f"{engine}, rows": done["rows_read"] / seconds,
            f"{engine}, read": done["bytes_read"],
            f"{engine}, written": done["bytes_written"],
            f"{engine}, buckets before": done["buckets_before"],
            f"{engine}, buckets after": done["buckets_after"],
            **{
                f"{engine}, memory of {'a ' if kind == WORKER else 'the '}{kind}": ended.resident_bytes_max[kind] / _MIB
                for kind in (DRIVER, WORKER, JVM)
                if kind in ended.resident_bytes_max
            },
        }

    def compacted_while_served(self, engine: str) -> Mapping[str, float]:
        who = f"{engine}, while served"
        # One more row: its seal shows the merges to the daemon.
        last = load.in_order(load.over_a_day(1, seed=self._bench.seed), first_ledger=self._size.rows)
        with self._bench.folder() as folder:
            root = self._copy(folder)
            with (
                self._bench.daemon(root) as daemon,
                steady_load.SteadyLoad(
                    daemon.address, LOAD_TOPIC, RATE, self._bench.seed, quick=self._bench.quick
                ) as steady,
                tarry.Client(daemon.address) as client,
            ):
                tarry_load.wait_for(client, NAME, "its rows", lambda stats: stats.pending == len(self._left))
                _sleep_until(max(load.now_ms(), steady.first_due_ms) + PAUSE_MS)
                alone_from_ms = load.now_ms()
                _sleep_until(alone_from_ms + 1_000 * self._size.alone_s)
                began_ms = load.now_ms()
                alone = (alone_from_ms, began_ms)
                done = self._run(folder, COMPACT, engine, root, "--topic", NAME, niceness=NICENESS).document
                merged_s = time.perf_counter()
                client.add(NAME, last.ledger_id, last.entry_id, deliver_at_ms=last.deliver_at_ms)
                client.seal(NAME)
                buckets_max = done["buckets_after"] + 1
                tarry_load.wait_for(client, NAME, "its merged buckets", lambda stats: stats.buckets <= buckets_max)
                ended_ms, served_s = load.now_ms(), time.perf_counter()
                _sleep_until(ended_ms + PAUSE_MS)
                came = steady.end()
                stats = client.stats(NAME)
                daemon.terminate()
            self._rounds.check(who, came.problem)
            self._check_job(who, done)
            self._rounds.check_count(f"{who}, pending", stats.pending, len(self._left) + len(last))
            self._check_left(who, root, _together(self._left, last))
        return {
            f"{who}, seconds": done["seconds"]["total"],
            f"{who}, until all is served": served_s - merged_s,
            f"{who}, buckets of the daemon": stats.buckets,
            **self._lateness(f"{engine}, {WITHOUT}", came, alone),
            **self._lateness(f"{engine}, {MEANWHILE}", came, (began_ms, ended_ms)),
        }

    def read(self, engine: str, job: str) -> Mapping[str, float]:
        """Run a job that reads a root with its small buckets."""
        options = {FORECAST: ("--days", "2", "--step", "hour")}.get(job, ())
        with self._bench.folder() as folder:
            ended = self._run(folder, job, engine, self._root, *options)
        self._check_read(engine, job, ended.document)
        return {f"{engine}, {job}, seconds": ended.document["seconds"], f"{engine}, {job}, all": ended.seconds}

    # ---- the account

    def _copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self._root, folder / "root"))

    def _run(
        self, folder: Path, job: str, engine: str, root: Path, *options: str, niceness: int = 0
    ) -> job_process.Ended:
        asked = ("--engine", engine, *(("--master", "local[2]") if engine == SPARK else ()), *options)
        return job_process.run(self._bench.cores, folder, job, root, asked, niceness=niceness)

    def _lateness(self, name: str, came: steady_load.Came, span_ms: tuple[int, int]) -> dict[str, float]:
        """Return the quantiles (ms), or nothing if the machine is too busy to add a row before it is due."""
        try:
            values = np.percentile(came.lateness_of(span_ms), list(QUANTILES.values()))
        except workbench.TimeTooShort as error:
            self._bench.say(f"{name} is not known: {error}")
            return {}
        return {f"{name}, {quantile}": float(value) for quantile, value in zip(QUANTILES, values, strict=True)}

    def _check_job(self, who: str, done: Mapping[str, Any]) -> None:
        runs = done["runs"]
        committed = done["status"] == "done" and runs["committed"] == runs["planned"]
        self._rounds.check(who, None if committed else f"{done['status']}, of {runs['planned']} runs {runs}")
        self._rounds.check_count(
            f"{who}, kept and dropped", done["rows_kept"] + done["rows_dropped"], done["rows_read"]
        )

    def _check_left(self, who: str, root: Path, left: load.Rows) -> None:
        """Check that the root has these rows of the topic, each once."""
        store = LocalDirectory(root)
        try:
            opened = Root.open(store)
            (state,) = topic_reading.read_states(opened, [opened.place_of(NAME)])
            sealed = [topic_contents.rows_of(store, bucket) for bucket in state.buckets]
            rows = Rows.concat([*sealed, *(each.rows for each in state.unsealed)])
        finally:
            store.close()
        self._rounds.check(
            who, tarry_load.difference(load.Rows(rows.ledger_id, rows.entry_id, rows.deliver_at_ms), left)
        )

    def _check_read(self, engine: str, job: str, document: Mapping[str, Any]) -> None:
        who = f"{engine}, {job}"
        if job == FORECAST:
            counted = document["rows"] + document["beyond_rows"] + document["overdue_rows"]
            self._rounds.check_count(who, counted, len(self._left))
        else:
            found = document["findings"]
            self._rounds.check(who, f"{len(found)} findings, the first {found[0]}" if found else None)


def _together(*parts: load.Rows) -> load.Rows:
    return load.Rows(
        np.concatenate([part.ledger_id for part in parts]),
        np.concatenate([part.entry_id for part in parts]),
        np.concatenate([part.deliver_at_ms for part in parts]),
    )


def _sleep_until(at_ms: int) -> None:
    time.sleep(max(0, at_ms - load.now_ms()) / 1_000)
