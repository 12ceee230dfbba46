"""What the engine is given by the composition root: nothing in it reads a clock or draws a number by itself.

Owns: the shape of that environment.
Does not own: how any of it is made (`daemon.process`, tests).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import numpy as np

from daemon.config import Config
from daemon.core.delay_levels import DelayLevels
from daemon.core.limits import RequestLimits
from daemon.durability import backoff
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.metrics import Metrics
from storage_backends.local_directory import LocalLocks
from storage_backends.object_store import ObjectStore

T = TypeVar("T")


class Clock(Protocol):
    """Time, as the daemon sees it."""

    def now_ms(self) -> int:
        """The wall clock, Unix time in ms; it may step."""
        ...

    def elapsed_s(self) -> float:
        """Seconds of a clock that never steps and counts while the machine is suspended."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CommitObserver:
    """Counts manifest commits."""

    metrics: Metrics

    def committed(self, operation: str, *, conflicts: int) -> None:
        self.metrics.commit(operation, "committed", conflicts=conflicts)

    def refused(self, operation: str, *, conflicts: int) -> None:
        self.metrics.commit(operation, "refused", conflicts=conflicts)

    def unknown(self, operation: str, *, conflicts: int) -> None:
        self.metrics.commit(operation, "unknown", conflicts=conflicts)


@dataclasses.dataclass(frozen=True)
class Environment:
    """`threads` runs requests to the store; `parts` runs the parts of one of them in parallel, so that no thread waits
    for a thread of its own pool. `locks`: None where the root is not a local directory. `new_id`: unique, url-safe.
    `give_back_memory`: what is free in the process goes back to the machine; for a thread. `merging`: one thread of low
    priority; None: one of `threads`. `deleting`: as many threads as there may be attempts to delete a ledger at once;
    None: some of `threads`. `ledger_stores`: where the ledgers of others are.
    """

    config: Config
    store: ObjectStore
    locks: LocalLocks | None
    metrics: Metrics
    clock: Clock
    threads: concurrent.futures.Executor
    parts: concurrent.futures.Executor
    sleep: backoff.Sleep
    blocking_sleep: backoff.BlockingSleep
    jitter: backoff.Jitter
    new_id: Callable[[], str]
    give_back_memory: Callable[[], None] = lambda: None
    merging: concurrent.futures.Executor | None = None
    deleting: concurrent.futures.Executor | None = None
    ledger_stores: LedgerStores = dataclasses.field(default_factory=LedgerStores)

    def run(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Runs work that may block in a thread."""
        return asyncio.get_running_loop().run_in_executor(self.threads, work)

    def run_merging(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Runs work of a merge: long, and in nobody's way."""
        return asyncio.get_running_loop().run_in_executor(self.merging or self.threads, work)

    def run_deleting(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Runs an attempt to delete a ledger, for as long as its store lets it wait."""
        return asyncio.get_running_loop().run_in_executor(self.deleting or self.threads, work)

    @functools.cached_property
    def merging_turn(self) -> asyncio.Lock:
        """Held while a merge is made: one at a time in the daemon."""
        return asyncio.Lock()

    @functools.cached_property
    def random(self) -> np.random.Generator:
        """Many random numbers at once."""
        return np.random.default_rng(int(self.jitter() * (1 << 53)))

    def elapsed_ms(self) -> int:
        """Whole ms of the clock that never steps."""
        return int(self.clock.elapsed_s() * 1000)

    @functools.cached_property
    def commit_observer(self) -> CommitObserver:
        return CommitObserver(self.metrics)

    @functools.cached_property
    def linger_s(self) -> float:
        linger_ms = self.config.journal.commit_linger_ms
        if linger_ms is None:
            linger_ms = 2 if self.config.store.kind == "local" else 50
        return linger_ms / 1000

    @functools.cached_property
    def grace_ms(self) -> int:
        """An object that left its manifest may be deleted after this time."""
        return int(self.config.collection.grace_s * 1000)

    @functools.cached_property
    def delay_levels(self) -> DelayLevels:
        """Of topics that have no table of their own."""
        return self.config.read_delay_levels()

    @functools.cached_property
    def request_limits(self) -> RequestLimits:
        limits = self.config.limits
        return RequestLimits(
            rows_max=limits.rows_per_request_max,
            topic_max_bytes=limits.topic_bytes_max,
            subscription_max_bytes=limits.subscription_bytes_max,
            subscriptions_max=limits.subscriptions_per_topic_max,
            delay_max_ms=limits.delay_max_ms,
        )
