"""What the engine is given by the composition root: nothing in it reads a clock or draws a number by itself.

Owns: the shape of that environment.
Does not own: how any of it is made (`daemon.process`, tests).

What the log says while the store does not take what is tried again and again.

Owns: that many who wait for one store say it together, at a bearable rate.
Does not own: trying again (`daemon.runtime.backoff`), health (`engine`), and metrics, which count each attempt.
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
from daemon.core.limits import RequestLimits
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.metrics import Metrics
from daemon.runtime import backoff
from daemon.runtime.pools import Pools
from storage_backends.formats.manifest import LogForm
from storage_backends.local_directory import LocalLocks
from storage_backends.object_store import ObjectStore
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)

# One line about one kind of work in so long.
SAY_AGAIN_S = 30.0


@dataclasses.dataclass(slots=True)
class _Said:
    at_s: float
    unsaid: int = 0


class Outages:
    """Says in the log what fails in one daemon and is tried again, at a bearable rate."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}

    def tell(self, what: str, whose: str, error: Exception, *, now_s: float) -> None:
        """`what`: the kind of work that failed and is tried again; `now_s`: by a clock that never steps."""
        said = self._said.get(what)
        if said is not None and now_s - said.at_s < SAY_AGAIN_S:
            said.unsaid += 1
            return
        unsaid = 0 if said is None else said.unsaid
        self._said[what] = _Said(now_s)
        more = f"; {unsaid} failures since this was said last" if unsaid else ""
        log.warning("%s, trying again: %s: %s%s", what, whose, error, more)


T = TypeVar("T")

# What of the log no checkpoint covers, and a successor reads: slots and sections, some 30 us of CPU each. It takes
# about half a second; where a read is a request to another machine slots count more.
TAIL_WORK_MAX = 20_000
TAIL_REQUESTS_MAX = 4_000


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
    """`pools`: the threads. `locks`: None where the root is not a local directory. `new_id`: unique ULIDs.
    `open_logs`: the logs of the root in the form that its FORMAT says. `version`: of this daemon.
    `give_back_memory`: what is free in the process goes back to the machine; for a thread. `ledger_stores`: where the
    ledgers of others are. `tail_work_max`: so many slots and sections may a successor have to read, by what
    reading them costs at this store. `busy_s`: seconds for which the thread that calls has run.
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
        """Runs work that may block in a thread of those that calls wait for."""
        return self.pools.calls.run(work)

    @functools.cached_property
    def sealing_turns(self) -> asyncio.Semaphore:
        """Held while a topic's seal is written and committed: so many at a time in the daemon."""
        return asyncio.Semaphore(self.config.store.seal_threads)

    @functools.cached_property
    def loading_turns(self) -> asyncio.Semaphore:
        """Held while a topic is read: so many at a time in the daemon."""
        return asyncio.Semaphore(self.config.store.load_threads)

    @functools.cached_property
    def merging_turn(self) -> asyncio.Lock:
        """Held while a merge is made: one at a time in the daemon."""
        return asyncio.Lock()

    @functools.cached_property
    def random(self) -> np.random.Generator:
        """Many random numbers at once."""
        return np.random.default_rng(int(self.jitter() * (1 << 53)))

    def waits_for_store(self, what: str, whose: str, error: Exception) -> None:
        """Logs that something is tried again; where many do so for one reason, now and then. See `outages`."""
        self._outages.tell(what, whose, error, now_s=self.clock.elapsed_s())

    @functools.cached_property
    def _outages(self) -> Outages:
        return Outages()

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
            linger_ms = 10 if self.config.store.kind == "local" else 50
        return linger_ms / 1000

    @functools.cached_property
    def grace_ms(self) -> int:
        """An object that left its manifest may be deleted after this time."""
        return int(self.config.collection.grace_s * 1000)

    @functools.cached_property
    def delay_levels(self) -> DelayLevels:
        """The table of delay levels that topics without one of their own have."""
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
