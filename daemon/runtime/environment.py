"""Defines what the composition root gives to the engine, so that nothing in the engine reads a clock or draws numbers.

It also logs outages of the store: many waiters for one store report together, at a bearable rate. `daemon.process` and
tests make environments; `daemon.runtime.backoff` retries.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import numpy as np

from daemon.config import Config
from daemon.core.index.delay_levels import DelayLevels
from daemon.core.limits import BacklogLimits, RequestLimits
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.metrics import Metrics
from daemon.runtime import backoff
from daemon.runtime.pools import Pools
from storage_backends.formats.manifest import LogForm
from storage_backends.local_directory import LocalLocks
from storage_backends.object_store import ObjectStore
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)

# Least time between two lines about one kind of work (seconds)
SAY_AGAIN_S = 30.0


@dataclasses.dataclass(slots=True)
class _Said:
    at_s: float
    unsaid: int = 0


class Outages:
    """The outages of one daemon: logs what fails and is tried again, at a bearable rate."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}

    def tell(self, what: str, whose: str, error: Exception, *, now_s: float) -> None:
        """Log a failure of a kind of work, `what`, that is tried again. `now_s` is by a clock that never steps."""
        said = self._said.get(what)
        if said is not None and now_s - said.at_s < SAY_AGAIN_S:
            said.unsaid += 1
            return
        unsaid = 0 if said is None else said.unsaid
        self._said[what] = _Said(now_s)
        more = f"; {unsaid} failures since this was said last" if unsaid else ""
        log.warning("%s, trying again: %s: %s%s", what, whose, error, more)


T = TypeVar("T")

# Limit on what a successor reads of the log because no checkpoint covers it: slots and sections, some 30 us of CPU
# each, about half a second in all. If a read is a request to another machine, slots count more.
TAIL_WORK_MAX = 20_000
TAIL_REQUESTS_MAX = 4_000


class Clock(Protocol):
    """The port of the daemon's time."""

    def now_ms(self) -> int:
        """Return the wall clock (Unix ms); it may step."""
        ...

    def elapsed_s(self) -> float:
        """Return a clock that never steps and counts while the machine is suspended (seconds)."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CommitObserver:
    """A counter of manifest commits."""

    metrics: Metrics

    def committed(self, operation: str, *, conflicts: int) -> None:
        self.metrics.commit(operation, "committed", conflicts=conflicts)

    def refused(self, operation: str, *, conflicts: int) -> None:
        self.metrics.commit(operation, "refused", conflicts=conflicts)

    def unknown(self, operation: str, *, conflicts: int) -> None:
        self.metrics.commit(operation, "unknown", conflicts=conflicts)


@dataclasses.dataclass(frozen=True)
class Environment:
    """The things that the composition root gives to the engine.

    `pools` are the threads. `locks` is None if the root is not a local directory. `new_id` makes unique ULIDs.
    `open_logs` opens the logs of the root in the form that its FORMAT names. `version` is that of this daemon.
    `give_back_memory` returns free memory of the process to the machine; call it in a thread. `ledger_stores` are the
    stores of others' ledgers. `tail_work_max` limits the slots and sections that a successor may have to read, weighted
    by their cost at this store. `busy_s` returns how long the calling thread has run (seconds).
    """

    config: Config
    store: ObjectStore
    locks: LocalLocks | None
    metrics: Metrics
    clock: Clock
    pools: Pools
    sleep: backoff.Sleep
    blocking_sleep: backoff.BlockingSleep
    jitter: backoff.Jitter
    new_id: Callable[[], str]
    open_logs: Callable[[LogForm], SlotLogs]
    version: str = ""
    give_back_memory: Callable[[], None] = lambda: None
    ledger_stores: LedgerStores = dataclasses.field(default_factory=LedgerStores)
    tail_work_max: int = TAIL_WORK_MAX
    busy_s: Callable[[], float] = lambda: 0.0

    def run(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Run work that may block in one of the threads that calls wait for."""
        return self.pools.calls.run(work)

    @functools.cached_property
    def sealing_turns(self) -> asyncio.Semaphore:
        """A semaphore held while a topic's seal is written and committed; it limits seals in the daemon."""
        return asyncio.Semaphore(self.config.store.seal_threads)

    @functools.cached_property
    def loading_turns(self) -> asyncio.Semaphore:
        """A semaphore held while a topic is read; it limits loads in the daemon."""
        return asyncio.Semaphore(self.config.store.load_threads)

    @functools.cached_property
    def merging_turn(self) -> asyncio.Lock:
        """A lock held while a merge is made: one at a time in the daemon."""
        return asyncio.Lock()

    @functools.cached_property
    def random(self) -> np.random.Generator:
        """A generator of many random numbers at once."""
        return np.random.default_rng(int(self.jitter() * (1 << 53)))

    def waits_for_store(self, what: str, whose: str, error: Exception) -> None:
        """Log that something is tried again, but only now and then if many callers have one reason. See `Outages`."""
        self._outages.tell(what, whose, error, now_s=self.clock.elapsed_s())

    @functools.cached_property
    def _outages(self) -> Outages:
        return Outages()

    def elapsed_ms(self) -> int:
        """Return the clock that never steps (whole ms)."""
        return int(self.clock.elapsed_s() * 1000)

    @functools.cached_property
    def commit_observer(self) -> CommitObserver:
        return CommitObserver(self.metrics)

    @functools.cached_property
    def linger_s(self) -> float:
        linger_ms = self.config.journal.commit_linger_ms
        if linger_ms is None:
            linger_ms = 10 if self.config.store.kind == "local" else 50
        return linger_ms / 1000

    @functools.cached_property
    def grace_ms(self) -> int:
        """The time after which an object that left its manifest may be deleted (ms)."""
        return int(self.config.collection.grace_s * 1000)

    @functools.cached_property
    def delay_levels(self) -> DelayLevels:
        """The table of delay levels for topics without one of their own."""
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

    @functools.cached_property
    def backlog_limits(self) -> BacklogLimits:
        limits = self.config.limits
        return BacklogLimits(
            nacked_rows_max=limits.nacked_rows_per_subscription_max,
            dead_letters_max=limits.dead_letters_per_subscription_max,
        )
