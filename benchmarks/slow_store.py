"""Runs a daemon whose store takes a while for each request, as a store across a network does.

    python -P benchmarks/slow_store.py --delay-ms 50 --directory ROOT --requests FILE [what tarryd is given]

It opens a local directory where the daemon asks for S3: the daemon behaves as with S3, without the cost of an S3 server
on the same machine. Requests are logged. The daemon is the one of the PYTHONPATH: this module imports nothing else of
its own checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from daemon import main as tarryd
from storage_backends import local_directory, object_store, store_opening
from storage_backends.object_store import NO_METADATA, ListedObject, ObjectInfo, ObjectStore

DELAY_MS = 50
# Keys in one answer to a listing
KEYS_A_LISTING = 1_000
OPERATIONS = ("get", "put", "list", "head", "delete")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request to the store. `operation` is one of `OPERATIONS`. Times are of `clock_s` (seconds)."""

    began_s: float
    ended_s: float
    operation: str
    key: str


def clock_s() -> float:
    """Return the clock of the log of requests, which all processes of the machine share (seconds)."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def read_requests(log: Path, *, from_s: float = 0.0, until_s: float = float("inf")) -> list[Request]:
    """Return the requests of the log that began within that time. Requests in flight are not in it."""
    lines = log.read_text().rpartition("\n")[0].splitlines()
    fields = (line.split(" ") for line in lines)
    requests = (Request(float(began_s), float(ended_s), name, key) for began_s, ended_s, name, key in fields)
    return [request for request in requests if from_s <= request.began_s < until_s]


class SlowStore(ObjectStore):
    """A store that sends each request to `inner` after `delay_s`. `noted` is called with each that has ended."""

    def __init__(self, inner: ObjectStore, delay_s: float, noted: Callable[[Request], None]) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._noted = noted

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        with self._request("put", key):
            self._inner.put(key, body, metadata=metadata)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        with self._request("put", key):
            self._inner.put_if_absent(key, body, metadata=metadata)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        with self._request("get", key):
            return self._inner.get_with_metadata(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._request("get", key):
            return self._inner.get_range(key, offset, length)

    def head(self, key: str) -> ObjectInfo:
        with self._request("head", key):
            return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        with self._request("list", prefix):
            listing = self._inner.list(prefix, start_after=start_after)
        for number, listed in enumerate(listing, 1):
            yield listed
            if number % KEYS_A_LISTING == 0:
                with self._request("list", prefix):
                    pass

    def delete(self, key: str) -> None:
        with self._request("delete", key):
            self._inner.delete(key)

    def clock_skew_s(self) -> float | None:
        return self._inner.clock_skew_s()

    def close(self) -> None:
        self._inner.close()

    @contextlib.contextmanager
    def _request(self, operation: str, key: str) -> Iterator[None]:
        began_s = clock_s()
        time.sleep(self._delay_s)
        try:
            yield
        finally:
            self._noted(Request(began_s, clock_s(), operation, key))


@contextlib.contextmanager
def noting(log: Path | None) -> Iterator[Callable[[Request], None]]:
    """Append a line for each request to the log; a line is written whole, whatever thread writes it."""
    if log is None:
        yield lambda request: None
        return
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(request: Request) -> None:
        line = f"{request.began_s:.6f} {request.ended_s:.6f} {request.operation} {request.key}\n"
        os.write(file, line.encode())

    try:
        yield note
    finally:
        os.close(file)


def program(root: Path, delay_ms: float, requests: Path | None = None) -> tuple[str, ...]:
    """Return the command that replaces `tarryd`. `settings` are those of its store."""
    return (sys.executable, "-P", str(Path(__file__).resolve()), *own_options(root, delay_ms, requests))


def own_options(root: Path, delay_ms: float, requests: Path | None = None) -> tuple[str, ...]:
    """Return the options of the command before those of `tarryd`. `requests` is the log of the requests."""
    logged = () if requests is None else ("--requests", str(requests))
    return ("--delay-ms", f"{delay_ms:g}", "--directory", str(root), *logged)


def settings() -> dict[str, object]:
    """Return the settings of the store of a daemon that runs this program."""
    return {"store.kind": "s3", "store.s3.bucket": "slow"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--requests", type=Path)
    options, given = parser.parse_known_args(arguments)
    with noting(options.requests) as noted:

        def open_store(place: store_opening.Place, *, deletions_survive: bool = False) -> object_store.ObjectStore:
            inner = local_directory.LocalDirectory(options.directory, deletions_survive=deletions_survive)
            return SlowStore(inner, options.delay_ms / 1000, noted)

        store_opening.open_store = open_store
        return tarryd.main(given)


if __name__ == "__main__":
    sys.exit(main())
