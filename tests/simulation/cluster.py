"""The daemons of one run: which live, which come back, and how each ends.

Owns: starting daemons, what a trouble does to one, and bringing it back.
Does not own: when troubles come (`faults`), the steps (`scheduler`).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import random
from collections.abc import Callable, Sequence

from daemon import config
from daemon.ledger_stores.ledger_stores import LedgerStores
from storage_backends.object_store import ObjectStore
from tests._support import owned_ledgers
from tests._support.engine_fixture import Daemon, EngineFixture, Killed
from tests._support.fault_store import FaultStore
from tests.simulation.faults import Faults, Trouble
from tests.simulation.history import History
from tests.simulation.offloaded import OffloadedStore
from tests.simulation.oracle import Oracle, WatchedStore
from tests.simulation.scheduler import Pace, SteppedStore

# Wall clocks differ by as much at most, and step by as much.
SKEW_MAX_MS = 3_000
STEPS_MS = (-20_000, -900, -3, 4, 700, 15_000)


class Machines(EngineFixture):
    """Daemons whose every call to the store is a step."""

    def __init__(
        self,
        store: ObjectStore,
        seed: int,
        settings: Sequence[str],
        pace: Pace,
        history: History,
        offloaded: OffloadedStore,
    ) -> None:
        super().__init__(store, settings=settings, seed=seed)
        self.ledger_stores = self._ledger_stores_of
        self._offloaded = offloaded
        self.faults: Faults | None = None
        self.config = config.load(environment={}, overrides=settings)
        self.shards_total = self.config.daemon.shards
        self._pace = pace
        self._history = history

    def store_of(self, daemon: Daemon) -> ObjectStore:
        faults = self.faults
        if faults is None:
            return daemon.store
        daemon.decide = faults.decide(daemon)
        return SteppedStore(daemon, daemon.store, self._pace, self._history, faults.before, faults.after)

    def _ledger_stores_of(self, daemon: Daemon) -> LedgerStores:
        faults = self.faults
        if faults is None:
            return LedgerStores()
        decide = faults.decide_of_ledgers(daemon, lambda: failing.deliver_late())
        failing = FaultStore(self._offloaded, decide)
        stepped = SteppedStore(daemon, failing, self._pace, self._history, faults.before, faults.after)
        return owned_ledgers.offloaded_in(stepped)

    def calm(self) -> None:
        """Nothing fails and nothing is slow from now on."""
        if self.faults is not None:
            self.faults.end()
        self._pace.calm()

    def crash_point(self, name: str) -> None:
        super().crash_point(name)
        daemon = Daemon.of(None)
        if isinstance(daemon, Daemon) and self.faults is not None:
            self._history.note(f"{daemon.name} crash point {name}")
            if self.loop.in_job:
                self.faults.before(daemon, "crash_point", name)


class Cluster:
    """`ids`: of the daemons; each lives at most once at any time."""

    def __init__(
        self,
        machines: Machines,
        store: WatchedStore,
        oracle: Oracle,
        seed: int,
        ids: Sequence[str],
        history: History,
    ) -> None:
        self.machines = machines
        self.store = store
        self.oracle = oracle
        self.live: dict[str, Daemon] = {}
        self._ids = tuple(ids)
        self._history = history
        self._random = random.Random(f"cluster {seed}")
        # Its timers belong to no daemon.
        self._outside = contextvars.copy_context()
        self._tasks: list[asyncio.Task[None]] = []
        self._calm = False
        self._latest_of_dead_ms = 0
        oracle.latest_ms = self.latest_ms

    def latest_ms(self) -> int:
        """The latest time that a wall clock has shown."""
        return max(self._latest_of_dead_ms, *(daemon.latest_ms() for daemon in self.live.values()), 0)

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self.machines.loop.call_later(seconds, do, context=self._outside)

    def start_all(self) -> None:
        for number, daemon_id in enumerate(self._ids):
            self.later(number * self._random.random() * 4, functools.partial(self.start, daemon_id))

    def start(self, daemon_id: str) -> None:
        if daemon_id in self.live:
            return
        daemon = self.machines.daemon(daemon_id)
        daemon.step_clock(self._random.randrange(-SKEW_MAX_MS, SKEW_MAX_MS))
        self.live[daemon_id] = daemon
        self._history.note(f"{daemon.name} starts, its clock says {daemon.now_ms()}")
        daemon.engine.failed.add_done_callback(self._failed)
        starting = daemon.call(daemon.engine.start())
        starting.add_done_callback(self._failed)
        self._tasks.append(starting)

    def _failed(self, failed: asyncio.Future[None]) -> None:
        error = None if failed.cancelled() else failed.exception()
        if error is not None and not isinstance(error, Killed):
            self._history.breach(f"a task of an engine has ended with {error!r}")

    # ---- troubles

    def befall(self, daemon: Daemon, trouble: Trouble) -> None:
        if daemon.dead:
            return
        back = functools.partial(self.later, trouble.back_after_s)
        if trouble.kind == "kill":
            self.kill(daemon)
            back(functools.partial(self.start, daemon.daemon_id))
        elif trouble.kind == "suspend":
            daemon.suspend()
            back(functools.partial(self._resume, daemon))
        elif trouble.kind == "cut off":
            daemon.freeze()
            back(daemon.thaw)
        elif trouble.kind == "down":
            daemon.store.go_down()
            back(functools.partial(self._come_back, daemon))
        elif trouble.kind == "damage":
            self._damage()
        elif trouble.kind == "step":
            daemon.step_clock(self._random.choice(STEPS_MS))
        elif trouble.kind == "stop":
            self.later(0.0, functools.partial(self._stop, daemon, trouble.back_after_s))
        else:
            raise ValueError(trouble.kind)

    def _damage(self) -> None:
        """One live bucket that can be read is so no longer."""
        there = {each.key for each in self.machines.store.list("shards/")}
        names = sorted(there & {name for topic in self.oracle.topics.values() for name in topic.buckets})
        if names:
            name = self._random.choice(names)
            size_bytes = self.machines.store.head(name).size_bytes
            place = None if self._random.random() < 0.3 else self._random.randrange(size_bytes)
            self._history.note(f"{name} is damaged at {place}")
            self.store.damage(name, place)

    def kill(self, daemon: Daemon) -> None:
        self._history.note(f"{daemon.name} is killed")
        self.live.pop(daemon.daemon_id, None)
        self._latest_of_dead_ms = max(self._latest_of_dead_ms, daemon.latest_ms())
        daemon.kill()

    def _resume(self, daemon: Daemon) -> None:
        self._history.note(f"{daemon.name} is resumed")
        daemon.resume()

    @staticmethod
    def _come_back(daemon: Daemon) -> None:
        if not daemon.dead:
            daemon.store.come_back()

    def _stop(self, daemon: Daemon, back_after_s: float) -> None:
        if not daemon.dead and not daemon.suspended:
            self._tasks.append(asyncio.get_running_loop().create_task(self._stop_in_order(daemon, back_after_s)))

    async def _stop_in_order(self, daemon: Daemon, back_after_s: float) -> None:
        """As the process does: it ends when the engine has stopped, or is killed by who waited long enough."""
        stopping = daemon.call(daemon.engine.stop())
        await asyncio.wait([stopping], timeout=40.0)
        if not daemon.dead:
            self.kill(daemon)
            self.later(back_after_s, functools.partial(self.start, daemon.daemon_id))

    # ---- the end

    def calm(self) -> None:
        """Everybody who lives goes on; who does not is started."""
        for daemon in list(self.live.values()):
            daemon.store.come_back()
            daemon.thaw()
            if daemon.suspended:
                self._resume(daemon)
            daemon.store.deliver_late()
        for daemon_id in self._ids:
            self.start(daemon_id)

    def serving(self) -> Daemon | None:
        """The daemon that serves; of several the one with the highest epoch."""
        serving = [daemon for daemon in self.live.values() if daemon.engine.health.serving and not daemon.suspended]
        return max(serving, key=_latest_epoch, default=None)


def _latest_epoch(daemon: Daemon) -> int:
    """Of the shards that it serves, which may be some of them."""
    return max(shard.epoch for shard in daemon.shards.values())
