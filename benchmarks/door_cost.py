"""What TLS and tokens cost: rows added a second, single calls, and how late rows come, with neither, with TLS, and with
TLS and a token, in one run.

Owns: the contenders, their files, and what each does in its turn. Does not own: the load (`tarry_load`, `load`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

import tarry
from benchmarks import load, report, tarry_load, workbench
from daemon.door import identities, tokens

NAME = "door"
OPEN, TLS, TOKEN = "open", "TLS", "TLS and token"
CONTENDERS = (OPEN, TLS, TOKEN)
SUBSCRIPTION = "receiver"
# Rows come due at this rate, from so long after they were added.
DUE_PER_S, DUE_AFTER_MS = 5_000, 3_000
QUANTILES = {"p50": 50.0, "p99": 99.0}

_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1 "
    "-addext subjectAltName=IP:127.0.0.1 -keyout tls.key -out tls.crt"
)
_IDENTITY = """
[[identity]]
name = "benchmark"
scopes = ["add", "dispatch", "inspect"]
topic_prefixes = [""]
tokens = ["{}"]
"""


@dataclasses.dataclass(frozen=True)
class Files:
    """What the contenders need, in a folder whose path is short enough for a socket."""

    folder: Path
    token: str

    def settings(self, contender: str) -> Mapping[str, object]:
        """The daemon's. The socket is there so that its health can be asked without a certificate."""
        if contender == OPEN:
            return {}
        tls = {"tls.cert_file": self.folder / "tls.crt", "tls.key_file": self.folder / "tls.key"}
        known = {"access.identities_file": self.folder / "identities.toml"} if contender == TOKEN else {}
        return {"grpc.unix_socket": self.folder / "socket"} | tls | known

    def client(self, address: str, contender: str) -> tarry.Client:
        return tarry.Client(
            address,
            tls=None if contender == OPEN else tarry.Tls(self.folder / "tls.crt"),
            token=self.token if contender == TOKEN else None,
        )


def run(bench: workbench.Workbench) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    sizes = {
        "rows": bench.size(2_000_000, 40_000),
        "calls": bench.size(5_000, 100),
        "due_rows": bench.size(50_000, 5_000),
    }
    with _files() as files:
        turns = {each: functools.partial(_turn, bench, rounds, files, each, **sizes) for each in CONTENDERS}
        rounds.run(turns)
    figures = []
    for unit, name in (("rows/s", "adds"), ("us", "single call, p50"), ("us", "single call, p99")):
        figures += [rounds.figure(f"{contender}: {name}", unit) for contender in CONTENDERS]
    for quantile in QUANTILES:
        figures += [rounds.figure(f"{contender}: lateness, {quantile}", "ms") for contender in CONTENDERS]
    return report.Result(NAME, {**sizes} | bench.parameters, figures, rounds.problems)


@contextlib.contextmanager
def _files() -> Iterator[Files]:
    with tempfile.TemporaryDirectory(prefix="tarry-door-") as folder:
        subprocess.run(_CERTIFICATE.split(), cwd=folder, check=True, capture_output=True)
        token = tokens.make()
        Path(folder, "identities.toml").write_text(_IDENTITY.format(identities.hash_of(token)))
        yield Files(Path(folder), token)


def _turn(
    bench: workbench.Workbench,
    rounds: workbench.Rounds,
    files: Files,
    contender: str,
    *,
    rows: int,
    calls: int,
    due_rows: int,
) -> Mapping[str, float]:
    with (
        bench.daemon(settings=files.settings(contender)) as daemon,
        files.client(daemon.address, contender) as client,
    ):
        given = load.in_order(load.over_a_day(rows, seed=bench.seed))
        added = tarry_load.add(client, NAME, given, batch_rows=bench.batch_rows, in_flight=bench.in_flight)
        rounds.check_count(f"{contender}, added", added.accepted, rows)
        calls_us = _single_calls(client, calls)
        lateness_ms = _lateness(client, rounds, contender, due_rows)
    return {
        f"{contender}: adds": rows / added.seconds,
        **{f"{contender}: single call, {name}": float(np.percentile(calls_us, at)) for name, at in QUANTILES.items()},
        **{f"{contender}: lateness, {name}": float(np.percentile(lateness_ms, at)) for name, at in QUANTILES.items()},
    }


def _single_calls(client: tarry.Client, calls: int) -> list[float]:
    """How long each took of calls one after the other that need no store."""
    taken_us = []
    for _ in range(calls):
        began_s = time.perf_counter()
        client.stats(NAME)
        taken_us.append((time.perf_counter() - began_s) * 1e6)
    return taken_us


def _lateness(client: tarry.Client, rounds: workbench.Rounds, contender: str, rows: int) -> np.typing.NDArray[np.int64]:
    """Receipt minus due time of rows that come due one after the other, each received and acknowledged."""
    topic = f"{NAME}-due"
    due_ms = load.now_ms() + DUE_AFTER_MS + np.arange(rows) * 1_000 // DUE_PER_S
    numbers = np.arange(rows, dtype=np.uint64)
    given = load.Rows(np.zeros(rows, np.uint64), numbers, due_ms.astype(np.uint64))
    with client.subscribe(topic, SUBSCRIPTION, create=True, permits=tarry_load.PERMITS) as subscription:
        tarry_load.add(client, topic, given, batch_rows=1_000, in_flight=16)
        drain = tarry_load.Drain(rows)
        drain.run(subscription)
    rounds.check(contender, drain.problem(given))
    return np.concatenate([batch.lateness_ms for batch in drain.batches])
