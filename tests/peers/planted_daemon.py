"""A daemon with a bug: `python -m tests.peers.planted_daemon BUG ...`, the rest as `tarryd` takes it."""

from __future__ import annotations

import sys
import time

from pyroaring import BitMap64

from daemon import main
from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from storage_backends.local_directory import LocalDirectory


def forgets_what_is_staged() -> None:
    """Two requests that are decided before either is durable both get the position."""
    fresh_among = Index.fresh_among

    def forgetful(index: Index, keys: object, asked: object) -> object:
        index.staged.keys = BitMap64()
        return fresh_among(index, keys, asked)  # type: ignore[arg-type]

    Index.fresh_among = forgetful  # type: ignore[method-assign, assignment]


def does_not_look_into_buckets_that_are_being_sealed() -> None:
    """The mutable bucket was swapped out, and the sealed one is not there yet. Writing it takes a moment."""
    put = LocalDirectory.put

    def slow(store: LocalDirectory, key: str, *rest: object, **named: object) -> None:
        if "/buckets/" in key:
            time.sleep(0.05)
        put(store, key, *rest, **named)  # type: ignore[arg-type]

    def without_sealing(index: Index) -> list[Bucket]:
        return [*index.sealed.values(), index.mutable]

    LocalDirectory.put = slow  # type: ignore[method-assign, assignment]
    Index.buckets = property(without_sealing)  # type: ignore[method-assign, assignment]


BUGS = {bug.__name__: bug for bug in (forgets_what_is_staged, does_not_look_into_buckets_that_are_being_sealed)}

if __name__ == "__main__":
    BUGS[sys.argv.pop(1)]()
    sys.exit(main.main())
