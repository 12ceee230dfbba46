"""Runs the long probe many times on servers of which it is known what it must say, and counts what it says.

    python -m tests.storage_backends._support.probe_runs --runs 200 --of checks-first

Owns: the servers, their faults and the counts. Does not own: what the counts must be; that is the test's to say.

The servers speak S3 on loopback, in threads of this process. Each run opens the store anew.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator

from storage_backends.formats import names
from storage_backends.object_store import StoreError
from storage_backends.probe import RACES, BrokenPromise, NotJudged, probe
from storage_backends.s3 import S3Settings, S3Store
from tests._support.lost_answer_proxy import Asked, Fault, Loss, lost_answer_proxy
from tests._support.moto_server import moto_server

BUCKET = "probed"
PASSED, ACCUSED, NOT_JUDGED, FAILED = "passed", "accused", "not judged", "failed otherwise"
_FAULTS: tuple[Fault, ...] = (503, Loss.RESET, Loss.CLOSED)


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server. `failing` is the part of its requests, of every kind, that fails: a third of them in each way."""

    name: str
    atomic: bool = True
    failing: float = 0.0


SERVERS = (
    Server("checks-first", atomic=False),
    Server("checks-first-and-5-percent-fail", atomic=False, failing=0.05),
    Server("correct"),
    Server("5-percent-fail", failing=0.05),
    Server("30-percent-fail", failing=0.3),
)


@dataclasses.dataclass(slots=True)
class Counts:
    """What the probe said, how long each run took (seconds), and the last error of each kind."""

    said: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{count} {what}" for what, count in self.said.most_common())
        middle, most = statistics.median(self.seconds), max(self.seconds)
        return f"{said}; {middle:.2f} s in the middle, {most:.2f} s at most, {sum(self.seconds):.0f} s in all"


def run(server: Server, runs: int, *, races: int = RACES) -> Counts:
    """Probe the server so many times."""
    counts = Counts()
    with _serving(server) as settings:
        for _ in range(runs):
            begun_s = time.monotonic()
            said, error = _probed(settings, races)
            counts.seconds.append(time.monotonic() - begun_s)
            counts.said[said] += 1
            if error is not None:
                counts.errors[said] = str(error)
    return counts


def _probed(settings: S3Settings, races: int) -> tuple[str, StoreError | None]:
    with S3Store(settings) as store:
        try:
            probe(store, names.probe_prefix(uuid.uuid4().hex), races=races)
        except BrokenPromise as error:
            return ACCUSED, error
        except NotJudged as error:
            return NOT_JUDGED, error
        except StoreError as error:
            return FAILED, error
    return PASSED, None


@contextlib.contextmanager
def _serving(server: Server) -> Iterator[S3Settings]:
    source = random.Random(server.name)

    def drawn(asked: Asked) -> Fault:
        return source.choice(_FAULTS) if source.random() < server.failing else None

    with moto_server(atomic=server.atomic) as moto:
        if server.failing == 0.0:
            yield moto.settings(BUCKET)
            return
        with lost_answer_proxy(moto.endpoint_url, drawn) as proxy:
            yield moto.settings(BUCKET, endpoint_url=proxy.endpoint_url)


def main() -> None:
    """Print a line for each server."""
    by_name = {server.name: server for server in SERVERS}
    parser = argparse.ArgumentParser(description="The long probe, many times, on servers that are known")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--races", type=int, default=RACES, help="races of each probe")
    parser.add_argument("--of", choices=by_name, action="append", help="repeatable; default: every server")
    options = parser.parse_args()
    for name in options.of or by_name:
        counts = run(by_name[name], options.runs, races=options.races)
        sys.stdout.write(f"{name}: {options.runs} runs: {counts}\n")
        for said, error in counts.errors.items():
            sys.stdout.write(f"  {said}: {error}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
