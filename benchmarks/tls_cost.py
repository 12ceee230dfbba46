"""Measures the cost of TLS, tokens and certificates: adds, single calls, first calls and lateness, in turn.

A single add waits until it is durable; a lookup of a topic stores nothing, so its time is that of the call. The first
call of a client includes its connection and its handshake. `tarry_load` and `lateness` have the load.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import trustme

import tarry
from benchmarks import lateness, load, report, tarry_load, workbench

NAME = "tls"
ROWS_PER_S = 5_000
TOKEN = "of-the-benchmark"
CLIENT = "benchmark"
QUANTILES = {"p50": 50.0, "p99": 99.0}
ADDED, CPU = "added", "daemon's CPU"
SINGLE, LOOK_UP, FIRST = "single add", "look-up", "first call"
UNITS = {
    ADDED: "rows/s",
    CPU: "us/row",
    **{f"{call}, {quantile}": "us" for call in (SINGLE, LOOK_UP, FIRST) for quantile in QUANTILES},
    **{f"lateness, {quantile}": "ms" for quantile in QUANTILES},
}
"""The figures of each way, with their units"""


@dataclasses.dataclass(frozen=True)
class Way:
    """The credentials that a daemon wants of its clients, and that they show."""

    name: str
    tls: bool = False
    token: bool = False
    certificate: bool = False


WAYS = (
    Way("plain"),
    Way("plain, token", token=True),
    Way("TLS", tls=True),
    Way("TLS, token", tls=True, token=True),
    Way("TLS, certificate", tls=True, certificate=True),
)
WAYS_QUICK = (Way("plain"), Way("TLS, token", tls=True, token=True))


@dataclasses.dataclass(frozen=True)
class Door:
    """A way in, with its files. `settings` are those of the daemon."""

    settings: Mapping[str, object]
    tls: tarry.Tls | None
    token_file: Path | None

    def reach(self, address: str) -> tarry_load.Reach:
        return tarry_load.Reach(address, self.tls, self.token_file)


def run(bench: workbench.Workbench) -> report.Result:
    rows = load.in_order(load.over_a_day(bench.size(500_000, 20_000), seed=bench.seed))
    rounds = workbench.Rounds(bench, NAME)
    ways = WAYS if not bench.quick else WAYS_QUICK
    rounds.run({way.name: functools.partial(_turn, bench, rounds, way, rows) for way in ways})
    figures = []
    for name, unit in UNITS.items():
        of_ways = [rounds.figure(f"{way.name}: {name}", unit) for way in ways]
        figures += of_ways
        if name == ADDED:
            figures += [report.ratio(figure, of_ways[0]) for figure in of_ways[1:]]
    parameters: dict[str, report.Value] = {"rows": len(rows), "rows_per_s": ROWS_PER_S, "seconds": _seconds(bench)}
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _seconds(bench: workbench.Workbench) -> int:
    return bench.size(15, 1)


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, way: Way, rows: load.Rows) -> Mapping[str, float]:
    with bench.folder() as folder:
        door = _make(folder, way)
        with bench.daemon(settings=door.settings, tls=door.tls) as daemon:
            reach = door.reach(daemon.address)
            figures = _late(bench, rounds, way, reach)
            with reach.client() as client:
                before = daemon.usage()
                added = tarry_load.add(client, NAME, rows, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
                cpu_s = daemon.usage().cpu_s - before.cpu_s
                figures |= _of_calls(bench, reach, client)
    rounds.check_count(f"{way.name}, accepted", added.accepted, len(rows))
    figures |= {ADDED: len(rows) / added.seconds, CPU: cpu_s / len(rows) * 1e6}
    return {f"{way.name}: {name}": value for name, value in figures.items()}


def _late(bench: workbench.Workbench, rounds: workbench.Rounds, way: Way, reach: tarry_load.Reach) -> dict[str, float]:
    least_ms, most_ms = lateness.DELAYS_QUICK_MS if bench.quick else lateness.DELAYS_MS
    plan = lateness.Plan(
        seconds=_seconds(bench),
        rows_per_s=ROWS_PER_S,
        delay_from_ms=least_ms,
        delay_until_ms=most_ms,
        seed=bench.seed,
    )
    account = lateness.receive(reach, plan)
    for rule in account.verdict().rules:
        rounds.check(way.name, f"{rule.name}: {rule.broken:,} rows are not so" if rule.broken else None)
    _, late_ms = lateness.lateness_of(account)
    return {f"lateness, {name}": float(np.percentile(late_ms, each)) for name, each in QUANTILES.items()}


def _of_calls(bench: workbench.Workbench, reach: tarry_load.Reach, client: tarry.Client) -> dict[str, float]:
    entries = iter(range(10**9))

    def first() -> None:
        with reach.client() as new:
            new.lookup(NAME)

    calls: dict[str, tuple[int, Callable[[], object]]] = {
        SINGLE: (bench.size(1_000, 20), lambda: client.add(NAME, 10**9, next(entries), delay_ms=86_400_000)),
        LOOK_UP: (bench.size(3_000, 20), lambda: client.lookup(NAME)),
        FIRST: (bench.size(100, 5), first),
    }
    figures: dict[str, float] = {}
    for name, (times, call) in calls.items():
        took_us = np.fromiter(_timed_us(call, times), np.float64)
        figures |= {f"{name}, {quantile}": float(np.percentile(took_us, each)) for quantile, each in QUANTILES.items()}
    return figures


def _timed_us(call: Callable[[], object], times: int) -> Iterator[float]:
    for _ in range(times):
        began_s = time.perf_counter()
        call()
        yield (time.perf_counter() - began_s) * 1e6


def _make(folder: Path, way: Way) -> Door:
    """Write the files of a way in, and the identities that may use it."""
    settings: dict[str, object] = {}
    tls = token_file = None
    if way.tls:
        authority = trustme.CA()
        ca_file = _written(folder / "ca.pem", authority.cert_pem.bytes())
        settings |= dict(zip(("tls.cert_file", "tls.key_file"), _issued(folder, authority, "127.0.0.1"), strict=True))
        tls = tarry.Tls(ca_file)
        if way.certificate:
            settings["tls.client_ca_file"] = ca_file
            tls = tarry.Tls(ca_file, *_issued(folder, authority, CLIENT))
    if way.token:
        token_file = _written(folder / "token", TOKEN.encode())
    if way.token or way.certificate:
        settings["access.identities_file"] = _written(folder / "identities.toml", _identities(way).encode())
    return Door(settings, tls, token_file)


def _issued(folder: Path, authority: trustme.CA, name: str) -> tuple[Path, Path]:
    """Write the files of a certificate and its key."""
    issued = authority.issue_cert(name)
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    key = issued.private_key_pem.bytes()
    return _written(folder / f"{name}.crt", chain), _written(folder / f"{name}.key", key)


def _identities(way: Way) -> str:
    shown = (
        f'tokens = ["{hashlib.sha256(TOKEN.encode()).hexdigest()}"]' if way.token else f'certificates = ["{CLIENT}"]'
    )
    scopes = '["add", "dispatch", "inspect", "admin", "delete"]'
    return f'[[identity]]\nname = "benchmark"\nscopes = {scopes}\ntopic_prefixes = [""]\n{shown}\n'


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
