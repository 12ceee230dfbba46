"""Measures the cost of a Redis stream's ids as positions: stored and resident bytes, rows a second, CPU.

An id is a time (ms) and a sequence number within it. The ledger is the minute or the hour of an id, or 0 for all; the
entry is the rest, with the sequence number in its low bits. Or the ledger is the sequence number and the entry the
time, which is not the order of the stream. Entries without gaps are the cheapest positions. `sparse`: a row a second;
`dense`: a thousand. Rows come due at any time of a day. `tarry.positions` has the mappings that are shipped.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping

import numpy as np

import tarry
from benchmarks import load, report, tarry_load, workbench

NAME = "positions"
SPARSE, DENSE = "sparse", "dense"
ROWS_PER_S = {SPARSE: 1, DENSE: 1_000}
START_MS = 1_800_000_000_000
MINUTE_MS = 60_000
BITS = 20
FEWER_BITS = 12


@dataclasses.dataclass(frozen=True)
class Stream:
    """The ids of a stream, in order: columns of one length."""

    time_ms: load.U64
    sequence: load.U64

    def __len__(self) -> int:
        return len(self.time_ms)


# From the ids of a stream to ledgers and entries
Numbering = Callable[[Stream], tuple[load.U64, load.U64]]


def _ledger_is_time(ledger_ms: int, stream: Stream) -> tuple[load.U64, load.U64]:
    ledger_id, rest_ms = np.divmod(stream.time_ms, np.uint64(ledger_ms))
    return ledger_id, rest_ms << np.uint64(BITS) | stream.sequence


def _one_ledger(bits: int, stream: Stream) -> tuple[load.U64, load.U64]:
    return np.zeros(len(stream), np.uint64), stream.time_ms << np.uint64(bits) | stream.sequence


def _ledger_is_sequence(stream: Stream) -> tuple[load.U64, load.U64]:
    return stream.sequence, stream.time_ms


def _without_gaps(stream: Stream) -> tuple[load.U64, load.U64]:
    return np.zeros(len(stream), np.uint64), np.arange(len(stream), dtype=np.uint64)


NUMBERINGS: dict[str, Numbering] = {
    "ledger = minute": functools.partial(_ledger_is_time, MINUTE_MS),
    "ledger = hour": functools.partial(_ledger_is_time, load.HOUR_MS),
    "ledger = 0": functools.partial(_one_ledger, BITS),
    f"ledger = 0, {FEWER_BITS} bits": functools.partial(_one_ledger, FEWER_BITS),
    "ledger = sequence": _ledger_is_sequence,
    "without gaps": _without_gaps,
}


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(1_000_000, 5_000)
    rounds = workbench.Rounds(bench, NAME)
    due = load.over_a_day(count, seed=bench.seed)
    streams = {name: _stream(count, rows_per_s, seed=bench.seed) for name, rows_per_s in ROWS_PER_S.items()}
    contenders = {
        f"{name}, {how}": load.Rows(*numbering(stream), due)
        for name, stream in streams.items()
        for how, numbering in NUMBERINGS.items()
    }
    rounds.run({name: functools.partial(_turn, bench, rounds, rows, name) for name, rows in contenders.items()})
    figures = [
        rounds.figure(f"{name}: {what}", unit)
        for what, unit in (("stored", "B/row"), ("resident", "B/row"), ("added", "rows/s"), ("server's CPU", "us/row"))
        for name in contenders
    ]
    parameters: dict[str, report.Value] = {"rows": count, "bits": BITS}
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _stream(rows: int, rows_per_s: int, *, seed: int) -> Stream:
    """Return the ids that Redis gives to rows that arrive at random at that rate."""
    draw = np.random.default_rng(seed)
    time_ms = np.sort(draw.integers(START_MS, START_MS + rows * 1_000 // rows_per_s, rows, dtype=np.uint64))
    places = np.arange(rows)
    is_first = np.concatenate([[True], time_ms[1:] != time_ms[:-1]])
    sequence = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return Stream(time_ms, sequence.astype(np.uint64))


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, rows: load.Rows, name: str) -> Mapping[str, float]:
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        idle = daemon.usage()
        added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
        rounds.check_count(name, added.accepted, len(rows))
        time.sleep(bench.rest_s)
        used = daemon.usage()
        client.seal(NAME)
        stats = client.stats(NAME)
        rounds.check_count(f"{name}, in buckets", stats.pending - stats.mutable_rows, len(rows))
    return {
        f"{name}: stored": stats.bucket_bytes / len(rows),
        f"{name}: resident": (used.resident_bytes - idle.resident_bytes) / len(rows),
        f"{name}: added": len(rows) / added.seconds,
        # Including seals that end after the last answer
        f"{name}: server's CPU": (used.cpu_s - idle.cpu_s) / len(rows) * 1e6,
    }
