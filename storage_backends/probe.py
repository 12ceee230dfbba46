"""Tries out whether a store keeps the promises that safety rests on, before a daemon trusts it.

The trials take a second or two and leave nothing behind. Several servers that speak S3 ignore `If-None-Match`, or check
and then write without a lock: two owners would both win the same slot of a log. Passing is no proof; failing is one.
The daemon's `command` alone probes, and refuses to serve after a failure; the trials need nothing but a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from storage_backends.object_store import (
    AlreadyExists,
    NotFound,
    ObjectStore,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
)

RACERS: Final = 8
ROUNDS: Final = 5

_METADATA_KEY: Final = "racer"
_BARRIER_TIMEOUT_S: Final = 60.0
_BODY: Final = bytes(range(256)) * 16


def probe(store: ObjectStore, prefix: str) -> None:
    """Try the store beneath `prefix`, which must be free.

    Raises `StoreRefused` with the broken promise, and whatever the store itself raises.
    """
    trials: tuple[Callable[[ObjectStore, str], None], ...] = (
        _an_object_is_created_once,
        _one_racer_wins,
        _a_put_replaces,
        _a_range_is_exact,
        _a_listing_is_complete,
        _a_deleted_object_is_gone,
    )
    try:
        for trial in trials:
            trial(store, prefix)
    except BaseException:
        with suppress(StoreError):  # the trial's own error matters more
            _clean(store, prefix)
        raise
    _clean(store, prefix)


def _an_object_is_created_once(store: ObjectStore, prefix: str) -> None:
    key = f"{prefix}/once"
    if not _is_absent(store, key):
        raise StoreRefused(key, "exists before it was written; the prefix is not free, or the store invents objects")
    created = _create(store, key, "first")
    if created is False:
        raise StoreRefused(key, "put_if_absent says that an absent object exists")
    if _create(store, key, "second") is True:
        raise StoreRefused(key, "put_if_absent replaced an object: the store ignores the condition (If-None-Match)")
    _check_holder(store, key, "first" if created else None)


def _one_racer_wins(store: ObjectStore, prefix: str) -> None:
    barrier = threading.Barrier(RACERS, timeout=_BARRIER_TIMEOUT_S)

    def race(key: str, racer: str) -> bool | None:
        barrier.wait()
        return _create(store, key, racer)

    with ThreadPoolExecutor(RACERS, thread_name_prefix="probe") as threads:
        for round_number in range(ROUNDS):
            key = f"{prefix}/race-{round_number}"
            running = {racer: threads.submit(race, key, racer) for racer in map(str, range(RACERS))}
            outcomes = {racer: future.result() for racer, future in running.items()}
            winners = [racer for racer, outcome in outcomes.items() if outcome is True]
            if len(winners) > 1:
                raise StoreRefused(
                    key, f"{len(winners)} of {RACERS} concurrent put_if_absent won: the store checks, and writes later"
                )
            if not winners and None not in outcomes.values():
                raise StoreRefused(key, f"none of {RACERS} concurrent put_if_absent won")
            if winners:
                _check_holder(store, key, winners[0])


def _a_put_replaces(store: ObjectStore, prefix: str) -> None:
    key = f"{prefix}/replaced"
    store.put(key, b"old")
    store.put(key, _BODY)
    if store.get(key) != _BODY:
        raise StoreRefused(key, "a get after a second put does not give what that put stored")


def _a_range_is_exact(store: ObjectStore, prefix: str) -> None:
    key = f"{prefix}/replaced"
    for offset, length in ((0, 1), (257, 300), (len(_BODY) - 1, 1)):
        if store.get_range(key, offset, length) != _BODY[offset : offset + length]:
            raise StoreRefused(key, f"get_range gives other bytes than the {length} from {offset}")


def _a_listing_is_complete(store: ObjectStore, prefix: str) -> None:
    written = {f"{prefix}/once", f"{prefix}/replaced"} | {f"{prefix}/race-{number}" for number in range(ROUNDS)}
    missing = written - {listed.key for listed in store.list(f"{prefix}/")}
    if missing:
        raise StoreRefused(prefix, f"list does not show what was written before: {', '.join(sorted(missing))}")


def _a_deleted_object_is_gone(store: ObjectStore, prefix: str) -> None:
    key = f"{prefix}/once"
    store.delete(key)
    if not _is_absent(store, key):
        raise StoreRefused(key, "a deleted object is still there")
    try:
        store.delete(key)
    except (NotFound, StoreRefused) as error:
        raise StoreRefused(key, f"deleting an object that is gone must succeed: {error.reason}") from error


def _create(store: ObjectStore, key: str, racer: str) -> bool | None:
    """Return whether `put_if_absent` won, or None if the store could not tell."""
    try:
        store.put_if_absent(key, racer.encode("ascii"), metadata={_METADATA_KEY: racer})
    except AlreadyExists:
        return False
    except OutcomeUnknown:
        return None
    return True


def _check_holder(store: ObjectStore, key: str, racer: str | None) -> None:
    """Check that `head` shows who wrote the object: by that, writers learn the outcome of a write without an answer."""
    info = store.head(key)
    stored = info.metadata.get(_METADATA_KEY)
    if stored is None:
        raise StoreRefused(key, f"head does not give back the metadata that was written; it has {dict(info.metadata)}")
    if racer is not None and stored != racer:
        raise StoreRefused(key, f"put_if_absent succeeded for {racer!r}, and head shows the metadata of {stored!r}")
    if store.get(key) != stored.encode("ascii"):
        raise StoreRefused(key, f"the body is not the one that {stored!r} wrote, whose metadata it has")


def _is_absent(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFound:
        return True
    return False


def _clean(store: ObjectStore, prefix: str) -> None:
    for listed in tuple(store.list(f"{prefix}/")):
        store.delete(listed.key)
