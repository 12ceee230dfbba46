"""Runs the long probe many times on stores of which it is known what it must say, and counts what it says.

    python -m tests.storage_backends._support.probe_runs --runs 200

Owns: the stores, their faults and the counts. Does not own: what the counts must be; that is the test's to say.

Stores "in process" have no client of S3. Their faults are those that such a client leaves: it repeats everything but
conditional writes. The others are reached by the client, over HTTP on loopback, and requests of every kind fail. A
store that checks first and writes later shows it in one race of nine, as was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from storage_backends.formats import names
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import AlreadyExists, NotFound, ObjectStore, StoreError
from storage_backends.probe import MISSED_BY_A_RACE, RACES, BrokenPromise, NotJudged, probe
from storage_backends.s3 import S3Store
from tests._support import lost_answer_proxy
from tests._support.fault_store import Call, Fault, FaultStore
from tests._support.lost_answer_proxy import Loss
from tests._support.moto_server import WINDOW_S, moto_server

BUCKET = "probed"
PASSED, ACCUSED, NOT_JUDGED, FAILED = "passed", "accused", "not judged", "failed otherwise"
# 503, a connection that is reset, and an answer that is lost, by request and as a client of S3 tells them
_OF_REQUESTS: tuple[lost_answer_proxy.Fault, ...] = (503, Loss.RESET, Loss.CLOSED)
_OF_WRITES = (Fault.DELIVER_LATE, Fault.DELIVER_LATE, Fault.FAIL_AFTER)


@dataclasses.dataclass(frozen=True, slots=True)
class Probed:
    """A store. `failing` is the part of its requests that fails: a third of them in each way."""

    name: str
    is_atomic: bool
    failing: float
    over_http: bool


STORES = tuple(
    Probed(f"{'correct' if is_atomic else 'checks first'}, {failing:.0%} fail, {where}", is_atomic, failing, over_http)
    for over_http, where in ((False, "in process"), (True, "over HTTP"))
    for is_atomic, failing in ((False, 0.0), (False, 0.05), (True, 0.0), (True, 0.05), (True, 0.3))
)


def shows(key: str) -> bool:
    """Whether the race for this key has two winners: 0.11 of them have."""
    return "race-" in key and random.Random(key).random() >= MISSED_BY_A_RACE


class ChecksFirst(MemoryStore):
    """Checks first and writes later, where `shows` says so."""

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        if not shows(key):
            super().put_if_absent(key, body, metadata=metadata)
            return
        try:
            self.head(key)
        except NotFound:
            time.sleep(WINDOW_S)
            self.put(key, body, metadata=metadata)
        else:
            raise AlreadyExists(key, "exists")


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


def run(probed: Probed, runs: int, *, races: int = RACES) -> Counts:
    """Probe the store so many times, each time as a new client."""
    counts = Counts()
    with (_over_http if probed.over_http else _in_process)(probed) as opened:
        for _ in range(runs):
            begun_s = time.monotonic()
            said, error = _said(opened, races)
            counts.seconds.append(time.monotonic() - begun_s)
            counts.said[said] += 1
            if error is not None:
                counts.errors[said] = str(error)
    return counts


def _said(opened: Callable[[], ObjectStore], races: int) -> tuple[str, StoreError | None]:
    with opened() as store:
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
def _in_process(probed: Probed) -> Iterator[Callable[[], ObjectStore]]:
    source, drawing = random.Random(probed.name), threading.Lock()

    def drawn(call: Call) -> Fault:
        with drawing:
            fails = call.operation == "put_if_absent" and source.random() < probed.failing
            return source.choice(_OF_WRITES) if fails else Fault.NONE

    yield lambda: FaultStore(MemoryStore() if probed.is_atomic else ChecksFirst(), drawn)


@contextlib.contextmanager
def _over_http(probed: Probed) -> Iterator[Callable[[], ObjectStore]]:
    source = random.Random(probed.name)

    def drawn(asked: lost_answer_proxy.Asked) -> lost_answer_proxy.Fault:
        return source.choice(_OF_REQUESTS) if source.random() < probed.failing else None

    with (
        moto_server(checks_first=None if probed.is_atomic else shows) as moto,
        lost_answer_proxy.lost_answer_proxy(moto.endpoint_url, drawn) as proxy,
    ):
        settings = moto.settings(BUCKET, endpoint_url=proxy.endpoint_url if probed.failing else None)
        yield lambda: S3Store(settings)


def main() -> None:
    """Print a line for each store."""
    parser = argparse.ArgumentParser(description="The long probe, many times, on stores that are known")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--races", type=int, default=RACES, help="races of each probe")
    parser.add_argument("--of", default="", metavar="PART", help="only stores whose name contains it")
    options = parser.parse_args()
    for probed in STORES:
        if options.of not in probed.name:
            continue
        counts = run(probed, options.runs, races=options.races)
        sys.stdout.write(f"{probed.name}: {options.runs} runs: {counts}\n")
        for said, error in counts.errors.items():
            sys.stdout.write(f"  {said}: {error}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
