"""Daemons in one process on one store, in virtual time: started, killed, frozen, superseded.

Owns: how an engine is put together for a test, and how a test ends one the way a machine would.
Does not own: what is tested, and the store (`MemoryStore` unless another is given).

A daemon that is killed writes and reads nothing from that moment on: its tasks are cancelled, and its threads die at
their next step. One that is frozen stops at its next call to the store, and goes on from there when it is thawed;
one that is suspended does nothing at all.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from daemon import config, metrics
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.core.decisions.claims import HeldPositions
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.owner.engine import Engine
from daemon.runtime.environment import TAIL_WORK_MAX, Environment
from daemon.runtime.pools import Pool, Pools
from daemon.shard.shard import ServedShard
from daemon.topic.open_streams import DispatchStream
from daemon.topic.served_topic import ServedTopic
from storage_backends import store_opening
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.formats.manifest import (
    ShardManifest,
    TopicManifest,
    decode_shard_manifest,
    decode_topic_manifest,
)
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from tests._support.fault_store import Call, Decide, Fault, FaultStore, Pause, Script
from tests._support.outcomes import ignored_by
from tests._support.virtual_loop import Gate, InlineExecutor, Process, VirtualLoop

T = TypeVar("T")

# The wall clock when the loop's time is 0.
EPOCH_MS = 1_700_000_000_000
# A killed daemon's tasks are cancelled, and end in a few turns of the loop.
BURIED_AFTER_TURNS = 30
TIMEOUT_S = 600.0
"""Virtual seconds in which anything that a test waits for must have come."""


class Killed(asyncio.CancelledError):
    """What a thread of a dead process meets. Whoever waits for it on the loop is no more, either."""


class Daemon(Process):
    """One engine as it would be in a process of its own, with clocks of its own.

    `script` plans faults of its calls to the store.
    """

    def __init__(self, fixture: EngineFixture, daemon_id: str, number: int, settings: Sequence[str]) -> None:
        super().__init__(fixture.loop)
        self.daemon_id = daemon_id
        # Unlike the id, no other process of the test has it.
        self.name = f"{daemon_id}.{number}"
        self.confirmed_s = fixture.loop.time()
        """When it last asked the store, and was answered, what an owner that was superseded is told."""
        self.applied_when_suspended: dict[int, int] = {}
        """The last slot of each shard that was applied when it was suspended last."""
        self._step_ms = 0
        self._asleep_s = 0.0
        self._latest_ms = 0
        self.clock_steps = 0
        self.script = Script()
        self.decide: Decide = self.script
        self.store = FaultStore(fixture.store, self._decide)
        self.at_crash_point: Callable[[str], None] = lambda name: None
        self.dead = False
        self.metrics = metrics.Metrics()
        self._fixture = fixture
        self._thawed: Gate | None = None
        self._gates: list[Gate] = []
        # In the order in which they were made.
        self._tasks: weakref.WeakValueDictionary[int, asyncio.Task[Any]] = weakref.WeakValueDictionary()
        self._task_numbers = itertools.count()
        self._left: list[asyncio.Task[Any]] = []
        self._changed = asyncio.Event()
        self.environment = environment = Environment(
            config=_config(daemon_id, tuple(settings)),
            store=fixture.store_of(self),
            locks=None,
            metrics=self.metrics,
            clock=self,
            pools=Pools.of_one(Pool(InlineExecutor(), InlineExecutor())),
            sleep=asyncio.sleep,
            blocking_sleep=self._block,
            jitter=fixture.random.random,
            new_id=lambda: f"{next(fixture.numbers):026d}",
            open_logs=lambda form: store_opening.open_logs(form, fixture.store_of(self), InlineExecutor()),
            ledger_stores=fixture.ledger_stores(self),
            tail_work_max=fixture.tail_work_max,
        )
        self.engine = Engine(environment)
        self.engine.on_health_change(lambda _: self._changed.set())

    # ---- life

    async def start(self) -> Daemon:
        await self.call(self.engine.start())
        return self

    async def serving(self) -> Daemon:
        """Returns when it serves and has loaded what it serves."""
        return await self.until(lambda: self.engine.health.serving and self.engine.loaded)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = TIMEOUT_S) -> Daemon:
        """Returns when the condition holds; looked at whenever health changes, and 20 times a second."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                # A time-out would cost a cancellation each time.
                look = self.loop.call_later(0.05, self._changed.set)
                try:
                    await self._changed.wait()
                finally:
                    look.cancel()
        return self

    async def stop(self) -> None:
        """The orderly end."""
        await self.call(self.engine.stop())

    def kill(self) -> None:
        """SIGKILL: what was written is there, everything else is gone."""
        self.dead = True
        self.store.go_down()
        self.resume()
        for task in list(self._tasks.values()):
            task.cancel()
        for gate in self._gates:
            gate.set()
        self._bury()

    def _bury(self, turns: int = BURIED_AFTER_TURNS) -> None:
        """Its tasks have had the time to end; what is left of them never runs again."""
        if turns:
            self.loop.call_soon(self._bury, turns - 1, context=contextvars.Context())
            return
        self.end()
        # They are kept: a task that is dropped unwinds, and its generators are closed by tasks of the living.
        self._left = [task for task in self._tasks.values() if not task.done()]
        for task in self._left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            asyncio.tasks._unregister_task(task)

    def suspend(self) -> None:
        super().suspend()
        self.applied_when_suspended = {shard.number: shard.applied_slot for shard in self.shards.values()}

    def freeze(self) -> None:
        """Its calls to the store, from now on, wait until it is thawed."""
        if self._thawed is None:
            self._thawed = self.gate()

    def thaw(self) -> None:
        gate, self._thawed = self._thawed, None
        if gate is not None:
            gate.set()

    def call(self, work: Coroutine[Any, Any, T], *, context: contextvars.Context | None = None) -> asyncio.Task[T]:
        """A call to the engine, made in its process: it ends with it. `context`: its own, a copy of the process's."""
        if self.dead:
            work.close()
            nobody: asyncio.Task[T] = asyncio.get_running_loop().create_task(_nobody(), context=contextvars.Context())
            return nobody
        return asyncio.get_running_loop().create_task(work, context=self.context if context is None else context)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[next(self._task_numbers)] = task

    # ---- clocks

    def now_ms(self) -> int:
        return self._fixture.now_ms() + self._step_ms + round(1000 * self._asleep_s)

    def latest_ms(self) -> int:
        """The latest time that its wall clock has shown."""
        return max(self._latest_ms, self.now_ms())

    def step_clock(self, step_ms: int) -> None:
        """Its wall clock steps."""
        self.clock_steps += 1
        self._latest_ms = self.latest_ms()
        self._step_ms += step_ms

    def sleep_machine(self, seconds: float) -> None:
        """Its machine was suspended for so long: its clocks went on, the timers of its loop did not."""
        self._asleep_s += seconds

    def elapsed_s(self) -> float:
        return self.loop.time() + self._asleep_s

    # ---- holding

    def gate(self) -> Gate:
        """A gate that opens, at the latest, when the daemon is killed."""
        gate = Gate(self.loop)
        self._gates.append(gate)
        return gate

    def pause(self, operation: str, key_part: str, *, then: Fault = Fault.NONE) -> Held:
        """The next such call to the store waits until it is released."""
        held = Held(self, then)
        self.script.plan(operation, held.pause, key_part=key_part)
        return held

    def stop_here(self, gate: Gate) -> None:
        """Called in a thread of the daemon: it waits for the gate."""
        gate.wait()
        if self.dead:
            raise Killed

    def _decide(self, call: Call) -> Fault | Pause:
        if self._thawed is not None:
            return Pause(released=self._thawed)
        return self.decide(call)

    def _block(self, seconds: float) -> None:
        self.loop.block(seconds)
        if self.dead:
            raise Killed

    # ---- shorthands

    @property
    def shards(self) -> dict[int, ServedShard]:
        return self.engine._shards

    def damage_found(self, kind: str) -> float:
        """How much of that kind it has found damaged."""
        return self.metrics.registry.get_sample_value("tarry_damage_found_total", {"kind": kind}) or 0.0

    def topic(self, name: str) -> ServedTopic:
        return next(shard.topics[name] for shard in self.shards.values() if name in shard.topics)

    def add(
        self,
        topic: str,
        ledger_id: int,
        entries: Sequence[int],
        delay_ms: int = 1_000,
        *,
        subscription: str | None = None,
        schedule_ids: Sequence[bytes] | None = None,
    ) -> asyncio.Task[AddOutcome]:
        """Adds entries of a ledger that are due `delay_ms` from now, by absolute times; for all, or for one alone."""
        count = len(entries)
        batch = AddBatch(
            ledger_id=np.full(count, ledger_id, np.uint64),
            entry_id=np.array(entries, np.uint64),
            deliver_at_ms=np.full(count, self._fixture.now_ms() + delay_ms, np.uint64),
            delay_ms=None,
            key_hash=None,
            return_already_due=False,
            schedule_ids=None
            if schedule_ids is None
            else ScheduleIds.of_piece(np.array(list(map(len, schedule_ids)), np.uint64), b"".join(schedule_ids)),
        )
        return self.call(self.engine.requests.add(topic, batch, subscription))

    async def receiver(self, topic: str, subscription: str = "s", *, permits: int = 1_000_000) -> Receiver:
        """Creates the subscription if there is none, and opens a stream on it."""
        await self.call(self.engine.requests.create_subscription(topic, subscription))
        stream = await self.call(self.engine.requests.open_dispatch(topic, subscription, no_positions()))
        stream.grant(permits)
        return Receiver(self, topic, stream)


class Held:
    """A call to the store that waits. `reached` tells that it does."""

    def __init__(self, daemon: Daemon, then: Fault) -> None:
        self._daemon = daemon
        self._released = daemon.gate()
        self.pause = Pause(then, released=self._released)

    async def reached(self) -> None:
        await self._daemon.until(self.pause.reached.is_set)

    def release(self) -> None:
        self._released.set()


class Receiver:
    """A stream whose messages are taken as they come: (ledger, entry, deliver_at_ms). `early`: before their time.

    `ids`: the schedule id of each row.
    """

    def __init__(self, daemon: Daemon, topic: str, stream: DispatchStream) -> None:
        self.stream = stream
        self.rows: list[tuple[int, int, int]] = []
        self.early: list[tuple[int, int, int]] = []
        self.ids: list[bytes] = []
        self.ended: Exception | None = None
        self._daemon = daemon
        self._fixture = daemon._fixture
        self._fixture.receivers.append(self)
        self.task = daemon.call(self._receive())

    async def _receive(self) -> None:
        try:
            while True:
                handed_out = await self.stream.next_messages()
                rows = handed_out.rows
                self.ids += rows.listed_ids()
                columns = (rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist())
                for row in zip(*columns, strict=True):
                    self.rows.append(row)
                    if row[2] > self._fixture.now_ms():
                        self.early.append(row)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.ended = error

    @property
    def positions(self) -> set[tuple[int, int]]:
        return {(ledger, entry) for ledger, entry, _ in self.rows}

    async def received(self, count: int, *, timeout_s: float = TIMEOUT_S) -> list[tuple[int, int, int]]:
        """Returns when that many rows have come."""
        await self._daemon.until(lambda: len(self.rows) >= count, timeout_s=timeout_s)
        return self.rows

    def acknowledge(self, rows: Sequence[tuple[int, int, int]]) -> asyncio.Task[int]:
        ledger_id, entry_id, deliver_at_ms = (np.array([row[index] for row in rows], np.uint64) for index in range(3))
        return self._daemon.call(ignored_by(self.stream.acknowledge, HeldPositions(ledger_id, entry_id, deliver_at_ms)))


class EngineFixture:
    """Several daemons, one store, one clock. It is the wall clock and the monotonic one of all of them."""

    def __init__(self, store: ObjectStore | None = None, *, settings: Sequence[str] = (), seed: int = 1) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise TypeError("daemons of a test run on a VirtualLoop")
        self.loop = loop
        self.store = store if store is not None else MemoryStore()
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.receivers: list[Receiver] = []
        self.step_ms = 0
        self.tail_work_max = TAIL_WORK_MAX
        """Of a daemon that is started."""
        self.ledger_stores: Callable[[Daemon], LedgerStores] = lambda daemon: LedgerStores()
        """Where the ledgers of others are, as a daemon that is started is told."""
        self._settings = settings
        self.faults_may_miss = False
        """Whether the test plans faults for calls that may never come."""
        self._daemons: list[Daemon] = []
        loop.set_task_factory(_task_of_daemon)

    def now_ms(self) -> int:
        return EPOCH_MS + self.step_ms + int(self.loop.time() * 1000 + 1e-3)

    def elapsed_s(self) -> float:
        return self.loop.time()

    def daemon(self, daemon_id: str = "one", *settings: str) -> Daemon:
        made = Daemon(self, daemon_id, len(self._daemons), (*self._settings, *settings))
        self._daemons.append(made)
        return made

    async def served_by(self, daemon_id: str = "one", *settings: str) -> Daemon:
        """A daemon that serves."""
        daemon = await self.daemon(daemon_id, *settings).start()
        return await daemon.serving()

    def store_of(self, daemon: Daemon) -> ObjectStore:
        """What the daemon's engine is given as its store."""
        return daemon.store

    def crash_point(self, name: str) -> None:
        """The hook for `crash_points.intercepted`."""
        daemon = Process.of(None)
        if isinstance(daemon, Daemon):
            if daemon.dead:
                raise Killed
            daemon.at_crash_point(name)

    async def close(self) -> None:
        for daemon in self._daemons:
            daemon.thaw()
            daemon.kill()
        await self.loop.jobs_ended()
        for _ in range(BURIED_AFTER_TURNS + 1):
            await asyncio.sleep(0)

    def places_unmet(self) -> list[tuple[str, str]]:
        """Where faults of the daemons' calls were planned that no call has met at all."""
        return [place for daemon in self._daemons for place in daemon.script.places_unmet()]

    def keys(self, part: str) -> list[str]:
        """The keys of the store that contain `part`, in order."""
        return sorted(each.key for each in self.store.list("") if part in each.key)

    def slots(self, kind: LogSlotKind | None = None) -> list[str]:
        """The keys of all slots of logs, or of those of one kind, in order."""
        keys = self.keys(names.LOGS_PREFIX)
        if kind is None:
            return keys
        return [key for key in keys if self.store.head(key).metadata["kind"] == kind.name.lower()]

    def slots_of(self, shard: int) -> list[str]:
        """The keys of the slots that have a section of a shard, in order."""
        bodies = ((key, self.store.get(key)) for key in self.slots(LogSlotKind.DATA))
        return [key for key, body in bodies if shard in log_slot_format.decode_log_slot(body).shards]

    def sections_to_read(self, shard: int = 0) -> int:
        """How many sections of a shard a successor would have to read."""
        slots = (log_slot_format.decode_log_slot(self.store.get(key)) for key in self.slots_of(shard))
        return sum(slot.header.heads[shard].last_slot > self.shard_tip(shard).checkpoint_slot for slot in slots)

    def topic_tip(self, topic: str = "t", shard: int = 0) -> TopicManifest:
        """The newest manifest of a topic."""
        prefix = names.topic_manifest_prefix(shard, names.topic_id(topic))
        return decode_topic_manifest(self.store.get(self.keys(prefix)[-1]))

    def shard_tip(self, shard: int = 0) -> ShardManifest:
        """The newest manifest of a shard."""
        return decode_shard_manifest(self.store.get(self.keys(names.shard_manifest_prefix(shard))[-1]))


def no_positions() -> HeldPositions:
    """What a dispatcher declares that holds nothing."""
    nothing = np.empty(0, np.uint64)
    return HeldPositions(nothing, nothing, nothing)


@functools.cache
def _config(daemon_id: str, settings: tuple[str, ...]) -> config.Config:
    overrides = ["daemon.shards=1", *settings, f"daemon.id={daemon_id}", f"daemon.address={daemon_id}:1"]
    return config.load(environment={}, overrides=overrides)


async def _nobody() -> Any:
    """There is no process that could answer."""
    raise asyncio.CancelledError


def _task_of_daemon(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    context: contextvars.Context | None = None,
) -> asyncio.Task[Any]:
    daemon = Process.of(context)
    task = asyncio.Task(work, loop=loop, context=context)
    if isinstance(daemon, Daemon):
        daemon.adopt(task)
    return task
