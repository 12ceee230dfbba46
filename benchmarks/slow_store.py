"""A daemon whose store takes a while for each request, as a store across a network does.

    python -P benchmarks/slow_store.py --delay-ms 50 --directory ROOT [what tarryd is given]

Owns: the delay, and opening a local directory where the daemon asks for S3: so the daemon has the habits that it has
with S3, without what an S3 server on the same machine costs. Does not own: the daemon, which is the one of the
PYTHONPATH: this module imports nothing else of its own checkout.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from daemon import main as tarryd
from storage_backends import local_directory, object_store, opening
from storage_backends.object_store import NO_METADATA, ListedObject, ObjectInfo, ObjectStore

DELAY_MS = 50
# As many keys come with one request of a listing.
KEYS_A_LISTING = 1_000


class SlowStore(ObjectStore):
    """Each request to `inner` is sent after `delay_s`."""

    def __init__(self, inner: ObjectStore, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        time.sleep(self._delay_s)
        self._inner.put(key, body, metadata=metadata)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        time.sleep(self._delay_s)
        self._inner.put_if_absent(key, body, metadata=metadata)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        time.sleep(self._delay_s)
        return self._inner.get_with_metadata(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        time.sleep(self._delay_s)
        return self._inner.get_range(key, offset, length)

    def head(self, key: str) -> ObjectInfo:
        time.sleep(self._delay_s)
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        time.sleep(self._delay_s)
        for number, listed in enumerate(self._inner.list(prefix, start_after=start_after), 1):
            yield listed
            if number % KEYS_A_LISTING == 0:
                time.sleep(self._delay_s)

    def delete(self, key: str) -> None:
        time.sleep(self._delay_s)
        self._inner.delete(key)

    def clock_skew_s(self) -> float | None:
        return self._inner.clock_skew_s()

    def close(self) -> None:
        self._inner.close()


def program(root: Path, delay_ms: float) -> tuple[str, ...]:
    """The command that takes the place of `tarryd`. `settings` are those of its store."""
    return (
        sys.executable,
        "-P",
        str(Path(__file__).resolve()),
        "--delay-ms",
        f"{delay_ms:g}",
        "--directory",
        str(root),
    )


def settings() -> dict[str, object]:
    """The settings of the store of a daemon that runs this program."""
    return {"store.kind": "s3", "store.s3.bucket": "slow"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS)
    parser.add_argument("--directory", type=Path, required=True)
    options, given = parser.parse_known_args(arguments)

    def open_store(place: opening.Place, *, deletions_survive: bool = False) -> object_store.ObjectStore:
        inner = local_directory.LocalDirectory(options.directory, deletions_survive=deletions_survive)
        return SlowStore(inner, options.delay_ms / 1000)

    opening.open_store = open_store
    return tarryd.main(given)


if __name__ == "__main__":
    sys.exit(main())
