"""Measures bytes a nack of positions that wait for redelivery, next to PIP-393's figures and Redis' sorted set.

Each load is put into a tracker in a process of its own that does nothing else. Resident means RSS minus that of the
same process when it had tracked some thousands and dropped them, both times after free memory was returned. A million
nacks take so little that single pages show, so the goals for them are for the columns and bitmaps alone.

The daemon's other data on a position, its row in the backlog, is the same whether it is nacked or not.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks import load, redis_load, report, side_process, workbench
from benchmarks.load import U64
from daemon import process_memory
from daemon.core.backlog.nack_tracker import NackTracker, rounded_up
from daemon.core.decisions.subscription_state import RedeliveryCounts
from daemon.core.index.position_keys import KeyedRows, PageTable
from storage_backends.formats.row_columns import U32, Rows

NAME = "nack-memory"
RATES_PER_MS = (1, 10, 100)
BITS = (0, 8, 10)
SPARSE_B, WITH_COUNTS_B = 16.0, 24.0
# The multiple of PIP-393's formula
OVER_THE_FORMULA = 1.5
HASH_MAP_B, PAIR_HASH_MAP_B = 118, 53
BITSET_BYTES, FEW, LEDGER_ROWS = 8192, 4096, 50_000
WARM_UP_ROWS = 100_000
TAKE_ROWS = 10_000
# The most rows that are taken to measure the time
TAKEN_ROWS_MAX = 1_000_000


@dataclasses.dataclass(frozen=True)
class Case:
    """A load.

    `rate_per_ms` is that of nacks with a constant delay; None means any delay up to `span_ms`. `share` is the part of
    all positions that is nacked, at random. With `own_time` rows had a time of their own, and a key hash.
    """

    count: int
    bits: int
    rate_per_ms: int | None = None
    span_ms: int = load.HOUR_MS
    share: float = 1.0
    own_time: bool = False
    counts: bool = False

    @property
    def name(self) -> str:
        when = f"any within {self.span_ms // load.HOUR_MS} h" if self.rate_per_ms is None else f"{self.rate_per_ms}/ms"
        of = "" if self.share == 1 else f", {self.share:.0%} of the positions"
        what = ", own time and key hash" if self.own_time else ""
        return f"{self.count / 1e6:g} M, {when}{of}, {self.bits} bits{what}"

    @property
    def formula_b(self) -> float | None:
        """PIP-393's bytes a nack, or None if its formula does not apply: it assumes slots of neighbours."""
        if self.rate_per_ms is None or self.share < 1 or self.own_time:
            return None
        in_slot = self.rate_per_ms << self.bits
        if in_slot > LEDGER_ROWS:
            return BITSET_BYTES / LEDGER_ROWS
        return BITSET_BYTES / in_slot if in_slot > FEW else 4.0

    def batches(self, batch_rows: int, now_ms: int, seed: int) -> Iterator[tuple[Rows, U64, U32]]:
        """Yield (rows, their redelivery times, how often each was nacked), one batch at a time."""
        random = np.random.default_rng(seed)
        for first in range(0, self.count, batch_rows):
            numbers = np.arange(first, min(first + batch_rows, self.count), dtype=np.uint64)
            positions = numbers
            if self.share < 1:
                apart = round(1 / self.share)
                positions = numbers * np.uint64(apart) + random.integers(0, apart, len(numbers), np.uint64)
            if self.rate_per_ms is None:
                times = np.uint64(now_ms) + random.integers(0, self.span_ms, len(numbers), np.uint64)
            else:
                times = np.uint64(now_ms) + numbers // np.uint64(self.rate_per_ms)
            per_ledger = np.uint64(load.ROWS_PER_LEDGER)
            own_time, key_hash = np.zeros_like(numbers), None
            if self.own_time:
                own_time = np.uint64(now_ms) - random.integers(1, load.HOUR_MS, len(numbers), np.uint64)
                key_hash = random.integers(0, 1 << 32, len(numbers), np.uint32)
            # Half of them once, a quarter twice, ...
            counts = np.minimum(random.geometric(0.5, len(numbers)), 16).astype(np.uint32)
            rows = Rows(own_time, positions // per_ledger, positions % per_ledger, key_hash)
            yield rows, rounded_up(times, self.bits), counts


def run(bench: workbench.Workbench) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    cases = _cases(bench)
    for case in cases:
        rounds.turn(case.name, functools.partial(_measured, bench, rounds, case))
    with_redis = [case for case in cases if not case.bits and case.span_ms == load.DAY_MS and case.share == 1]
    if bench.redis is not None:
        for case in with_redis:
            rounds.turn(f"redis, {case.name}", functools.partial(_redis, bench, rounds, case))
    goals = {} if bench.quick else _goals(cases)
    figures = [rounds.figure(name, _unit(name), goals.get(name)) for name in rounds.names]
    parameters = {"batch_rows": bench.batch_rows} | {
        "pip_393_hash_map_b": HASH_MAP_B,
        "pip_393_pair_hash_map_b": PAIR_HASH_MAP_B,
    }
    notes = [
        "Each load once: what is kept does not change from turn to turn.",
        f"PIP-393 says {HASH_MAP_B} B for its HashMap and {PAIR_HASH_MAP_B} B for its map of pairs.",
        "Its formula is for slots whose positions are neighbours.",
        *bench.notes,
    ]
    return report.Result(NAME, parameters, figures, rounds.problems, notes)


def _cases(bench: workbench.Workbench) -> list[Case]:
    if bench.quick:
        return [Case(20_000, 8, 10), Case(20_000, 0, span_ms=load.DAY_MS), Case(20_000, 8, own_time=True, counts=True)]
    cases = []
    for count in (1_000_000, 10_000_000):
        for bits in BITS:
            cases += [Case(count, bits, rate) for rate in RATES_PER_MS]
            cases += [Case(count, bits, span_ms=span_ms) for span_ms in (load.HOUR_MS, load.DAY_MS)]
        cases += [Case(count, 10, 100, share=0.5), Case(count, 0, span_ms=load.DAY_MS, share=0.01)]
        cases.append(Case(count, 8, own_time=True))
    # PIP-393's own case: 10,000 nacks a second, each for an hour
    cases += [Case(36_000_000, bits, 10) for bits in BITS]
    return cases


def _unit(figure: str) -> str:
    return "ns/nack" if figure.endswith((ADDING, TAKING)) else "B/nack"


RESIDENT, COLUMNS, WITH_COUNTS, FORMULA = "resident", "columns", "with counts", "PIP-393"
ADDING, TAKING = "time to add", "time to take"


def _goals(cases: list[Case]) -> dict[str, report.Goal]:
    goals = {}
    for case in cases:
        most = SPARSE_B if case.formula_b is None else OVER_THE_FORMULA * case.formula_b
        what = RESIDENT if case.count > 1_000_000 else COLUMNS
        if not case.own_time:
            goals[f"{case.name}: {what}"] = report.Goal(most=most)
        goals[f"{case.name}: {WITH_COUNTS}"] = report.Goal(most=WITH_COUNTS_B)
    return goals


def _measured(bench: workbench.Workbench, rounds: workbench.Rounds, case: Case) -> Mapping[str, float]:
    figures: dict[str, float] = {}
    with side_process.SideProcess(track, case, bench.batch_rows, bench.seed) as tracking:
        taken: dict[str, float] = tracking.result()
    rounds.check_count(case.name, int(taken.pop("rows")), case.count)
    figures |= taken
    with side_process.SideProcess(
        track, dataclasses.replace(case, counts=True), bench.batch_rows, bench.seed
    ) as tracking:
        figures[WITH_COUNTS] = tracking.result()[RESIDENT]
    if case.formula_b is not None:
        figures[FORMULA] = case.formula_b
    return {f"{case.name}: {name}": value for name, value in figures.items()}


def track(case: Case, batch_rows: int, seed: int, parent: Connection) -> None:
    """Track a load in a process of its own.

    Sends that it is ready, then the figures, and how many rows it counted.
    """
    process_memory.keep_little()
    parent.send("ready")
    now_ms = load.now_ms()
    warm_up = dataclasses.replace(case, count=WARM_UP_ROWS)
    held = _tracked(warm_up, batch_rows, now_ms, seed)
    del held
    idle = _resident_bytes()
    tracker, _counts, adding_s = _tracked(case, batch_rows, now_ms, seed)
    figures = {
        RESIDENT: (_resident_bytes() - idle) / case.count,
        COLUMNS: tracker.size_bytes / case.count,
        ADDING: 1e9 * adding_s / case.count,
        "rows": float(len(tracker)),
    }
    taken_rows, taking_s = 0, 0.0
    while len(tracker) and taken_rows < TAKEN_ROWS_MAX:
        began_s = time.thread_time()
        rows, _ = tracker.take_due(now_ms + 10 * load.DAY_MS, TAKE_ROWS)
        taking_s += time.thread_time() - began_s
        taken_rows += len(rows)
    figures[TAKING] = 1e9 * taking_s / taken_rows
    if len(tracker) + taken_rows != case.count:
        figures["rows"] = float(len(tracker) + taken_rows)
    parent.send(figures)


def _tracked(case: Case, batch_rows: int, now_ms: int, seed: int) -> tuple[NackTracker, RedeliveryCounts | None, float]:
    """Return a tracker of the load, its counts, and the CPU time of adding to it (seconds)."""
    pages = PageTable()
    tracker = NackTracker(pages.places)
    counts = RedeliveryCounts() if case.counts else None
    adding_s = 0.0
    for rows, times, count in case.batches(batch_rows, now_ms, seed):
        keyed = KeyedRows(rows, pages.intern(rows.ledger_id, rows.entry_id))
        began_s = time.thread_time()
        tracker.add(keyed, times)
        adding_s += time.thread_time() - began_s
        if counts is not None:
            counts.set(keyed.keys, count)
    return tracker, counts, adding_s


def _resident_bytes() -> int:
    gc.collect()
    process_memory.give_back()
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _redis(bench: workbench.Workbench, rounds: workbench.Rounds, case: Case) -> Mapping[str, float]:
    parts = list(case.batches(case.count, load.now_ms(), bench.seed))
    (rows, times, _) = parts[0]
    with bench.rival("off") as server:
        idle, idle_used = server.usage().resident_bytes, server.used_memory_bytes()
        requests = redis_load.variadic(load.Rows(rows.ledger_id, rows.entry_id, times), bench.batch_rows)
        added, _ = redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        rounds.check_count("redis", added, case.count)
        time.sleep(bench.rest_s)
        return {
            f"redis, {case.name}: used_memory": (server.used_memory_bytes() - idle_used) / case.count,
            f"redis, {case.name}: RSS": (server.usage().resident_bytes - idle) / case.count,
        }
