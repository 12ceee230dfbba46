"""What tests of sweeps share: a store with offloaded ledgers, and what is asked of a sweep.

Owns: the store, its owner, and reading what a sweep says. Does not own: what is tested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from daemon import settings
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.core.garbage_rules import ObjectCount
from daemon.ledger_deletion.deletion_values import DeletionFilter, SweepProgress, SweepWish
from daemon.ledger_stores.ledger_owner import Owner
from daemon.ledger_stores.ledger_store import InUseAnswer
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.ledger_stores.offloaded_ledgers import OffloadedLedgers
from storage_backends.formats.deletion_format import Deletion, LedgerComponent, PendingDelete
from storage_backends.memory_store import MemoryStore
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import FaultStore, Pause, Script
from tests._support.owned_ledgers import DRIVER, OwnedLedger, in_use
from tests._support.virtual_loop import Gate

STORE = "offloaded"
DAY_MS = 86_400_000
BODY_BYTES = len(b"entries")
# Everything is old, and nothing is so much that it is suspicious.
OLD = SweepWish(STORE, grace_ms=0)
DELETE = dataclasses.replace(OLD, delete=True)


class Swept:
    """An object store with offloaded ledgers, swept by daemons of a fixture. `script`: faults of that store.

    `owner`: what an owner says whose topics begin with `asked/`; None: there is no such owner.
    """

    def __init__(
        self, machines: EngineFixture, *, owner: Callable[[str, PendingDelete], InUseAnswer] | None = None
    ) -> None:
        self.machines = machines
        self.store = MemoryStore(wall_clock=lambda: machines.now_ms() / 1000)
        self.script = Script()
        self.faults = FaultStore(self.store, self.script)
        entry = settings.DeletionObjectStore(name=STORE, drivers=(DRIVER,), kind="local", path="given")
        owners = [] if owner is None else [AskedOwner(owner)]
        stores = LedgerStores(object_stores=[OffloadedLedgers(entry, lambda _: self.faults)], owners=owners)
        machines.ledger_stores = lambda daemon: stores
        self._ids = iter(range(1, 1_000_000))

    async def daemon(self, *overrides: str) -> Daemon:
        return await self.machines.served_by("one", "daemon.shards=4", *overrides)

    def write(
        self, count: int, topic: str = "t", component: LedgerComponent = LedgerComponent.MANAGED_LEDGER
    ) -> list[OwnedLedger]:
        """Offloaded ledgers, two objects of `BODY_BYTES` each."""
        made = [OwnedLedger(topic, component, (number, 0xABCD, number)) for number in self._next(count)]
        for each in made:
            each.write(self.store)
        return made

    def keys(self) -> set[str]:
        return {listed.key for listed in self.store.list("")}

    def hold(self, daemon: Daemon, operation: str, key: str = "") -> Holding:
        """The next such call to the store waits until it is released."""
        gate = daemon.gate()
        pause = Pause(released=gate)
        self.script.plan(operation, pause, key_part=key)
        return Holding(daemon, pause, gate)

    def _next(self, count: int) -> list[int]:
        return [next(self._ids) for _ in range(count)]


@dataclasses.dataclass
class Holding:
    daemon: Daemon
    pause: Pause
    gate: Gate

    async def reached(self) -> None:
        await self.daemon.until(self.pause.reached.is_set)

    def release(self) -> None:
        self.gate.set()


class AskedOwner(Owner):
    """An owner of the topics `asked/...` that answers without a network."""

    def __init__(self, answer: Callable[[str, PendingDelete], InUseAnswer]) -> None:
        super().__init__(
            settings.DeletionOwner(name="owner", topic_prefixes=("asked/",), in_use_url="http://127.0.0.1:1/in-use")
        )
        self._answer = answer

    def ask_in_use(self, topic: str, delete: PendingDelete) -> InUseAnswer:
        return self._answer(topic, delete)


async def steps(daemon: Daemon, wish: SweepWish = OLD) -> list[SweepProgress]:
    async def all_of() -> list[SweepProgress]:
        return [each async for each in daemon.engine.deletion_requests.sweep(wish)]

    return await daemon.call(all_of())


async def sweep(daemon: Daemon, wish: SweepWish = OLD) -> SweepProgress:
    """How it ended, with everything that it found."""
    progress = await steps(daemon, wish)
    assert [each.done for each in progress] == [False] * (len(progress) - 1) + [True]
    found = [orphan for each in progress for orphan in each.orphans]
    return dataclasses.replace(progress[-1], orphans=tuple(found))


def found(progress: SweepProgress) -> set[int]:
    return {orphan.pending_delete.ledger_id for orphan in progress.orphans}


def ids(ledgers: Sequence[OwnedLedger]) -> set[int]:
    return {each.ledger[0] for each in ledgers}


def objects(count: int) -> ObjectCount:
    return ObjectCount(count, count * BODY_BYTES)


async def say_in_use(daemon: Daemon, topic: str, ledgers: Sequence[OwnedLedger], *, replace: bool = True) -> None:
    """These, and no others."""
    await daemon.call(daemon.engine.deletion_requests.record_in_use(topic, in_use(ledgers), replace=replace))


async def listed(daemon: Daemon, state: ListedState) -> list[Deletion]:
    page = await daemon.call(daemon.engine.deletion_requests.list_deletes(state, DeletionFilter(), 1_000, None))
    return [each.deletion for each in page.deletions]


async def all_over(daemon: Daemon) -> list[Deletion]:
    """What came of all deletions, when they are over."""
    await daemon.until(lambda: all(shard.deletions.state.counts.in_flight == 0 for shard in daemon.shards.values()))
    return await listed(daemon, ListedState.ENDED)


async def record_in_vain(swept: Swept, daemon: Daemon, ledgers: Sequence[OwnedLedger]) -> None:
    """Recorded; the store is away, and the next attempt is long after."""
    swept.faults.go_down()
    deletes = [ledger.pending_delete() for ledger in ledgers]
    await daemon.call(daemon.engine.deletion_requests.record_pending_deletes("t", deletes))
    await daemon.until(lambda: no_attempt_is_due(daemon))
    swept.faults.come_back()


def no_attempt_is_due(daemon: Daemon) -> bool:
    """All that is in flight waits for a later time."""
    states = [shard.deletions.state for shard in daemon.shards.values() if shard.deletions.state.counts.in_flight]
    return all(
        not state.counts.begun and state.next_due_ms is not None and state.next_due_ms > daemon.now_ms()
        for state in states
    )
