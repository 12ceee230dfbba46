"""The calls on deletions of a daemon, and ledgers that do what a test says.

Owns: stores of ledgers without any store behind them.
Does not own: verification (`tests.daemon.ledger_stores`), and daemons.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable

import numpy as np

from daemon.core.deletions.ledger_deletions import DeletionQuery as ShardFilter
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.ledger_deletion import deletion_values
from daemon.ledger_deletion.deletion_requests import DeletionRequests
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, Guard, Step
from daemon.ledger_stores.ledger_stores import LedgerStores
from storage_backends.formats.deletion_format import (
    Deletion,
    DeletionOutcome,
    InUseLedgers,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
)
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.virtual_loop import Gate, Process

TOPIC = "persistent://t/n/x"
ALL = deletion_values.DeletionFilter()
PENDING, DEAD, ENDED = ListedState.PENDING, ListedState.DEAD, ListedState.ENDED
UUID = (7, 9)
Outcome = Answer | DeletionFailed


class ScriptedLedgers(LedgerStores):
    """Every ledger is there, is what a record says, and is deleted, unless a test plans otherwise.

    `asked`: when (virtual seconds), and of which ledger, an attempt was made. `deleted`: ledgers, in the order in which
    they were.
    """

    def __init__(self, machines: EngineFixture) -> None:
        super().__init__()
        self.asked: list[tuple[float, int]] = []
        self.deleted: list[int] = []
        self._planned: dict[int, collections.deque[Outcome]] = {}
        self._always: dict[int, Outcome] = {}
        self._held: dict[tuple[str, int], Held] = {}
        self._loop = machines.loop
        machines.ledger_stores = lambda daemon: self

    def plan(self, ledger_id: int, *outcomes: Outcome) -> None:
        """The next attempts come to this; then to what is planned for always."""
        self._planned.setdefault(ledger_id, collections.deque()).extend(outcomes)

    def plan_always(self, ledger_id: int, outcome: Outcome | None) -> None:
        if outcome is None:
            del self._always[ledger_id]
        else:
            self._always[ledger_id] = outcome

    def hold_before_guard(self, daemon: Daemon, ledger_id: int) -> Held:
        """The next attempt waits before it asks whether it may delete."""
        return self._hold(daemon, "guard", ledger_id)

    def hold_after_guard(self, daemon: Daemon, ledger_id: int) -> Held:
        """The next attempt waits when it has been let, and before it deletes."""
        return self._hold(daemon, "delete", ledger_id)

    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step = lambda name: None) -> Answer:
        ledger_id = delete.ledger_id
        self.asked.append((self._loop.time(), ledger_id))
        planned = self._planned.get(ledger_id)
        outcome = planned.popleft() if planned else self._always.get(ledger_id)
        self._wait("guard", ledger_id)
        if isinstance(outcome, DeletionFailed) and not outcome.maybe_deleted:
            raise outcome
        guard()
        self._wait("delete", ledger_id)
        if isinstance(outcome, DeletionFailed):
            raise outcome
        if outcome is not None:
            return outcome
        self.deleted.append(ledger_id)
        return Answer(DeletionOutcome.DELETED)

    def times_of(self, ledger_id: int) -> list[float]:
        """When it was attempted, virtual seconds."""
        return [at_s for at_s, asked in self.asked if asked == ledger_id]

    def _hold(self, daemon: Daemon, place: str, ledger_id: int) -> Held:
        self._held[place, ledger_id] = held = Held(daemon)
        return held

    def _wait(self, place: str, ledger_id: int) -> None:
        held = self._held.pop((place, ledger_id), None)
        if held is not None:
            held.wait()


class Held:
    """An attempt that waits. `reached` tells that it does."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._gate: Gate = daemon.gate()
        self._reached = False

    def wait(self) -> None:
        self._reached = True
        process = Process.of(None)
        assert isinstance(process, Daemon)
        process.stop_here(self._gate)

    async def reached(self) -> None:
        await self._daemon.until(lambda: self._reached)

    def release(self) -> None:
        self._gate.set()


def failed(reason: str = "the store is away", *, maybe_deleted: bool = False) -> DeletionFailed:
    return DeletionFailed(reason, maybe_deleted=maybe_deleted)


def ledger(ledger_id: int, component: LedgerComponent = LedgerComponent.MANAGED_LEDGER) -> PendingDelete:
    """One that its owner deletes."""
    cursor = "c" if component is LedgerComponent.MANAGED_CURSOR else None
    schema = "s" if component is LedgerComponent.SCHEMA_STORAGE else None
    return PendingDelete(component, LedgerType.LEDGER, ledger_id, cursor, schema)


def offloaded(ledger_id: int) -> PendingDelete:
    """One in an object store."""
    context = OffloadContext(*UUID, "aws-s3")
    return PendingDelete(
        LedgerComponent.MANAGED_LEDGER, LedgerType.OFFLOADED_LEDGER, ledger_id, offload_context=context
    )


def ledgers(*ledger_ids: int, uuid: tuple[int, int] | None = None) -> InUseLedgers:
    """Of the type LEDGER; with a UUID offloaded ones."""
    count = len(ledger_ids)
    msb, lsb = uuid or (0, 0)
    ledger_type = LedgerType.LEDGER if uuid is None else LedgerType.OFFLOADED_LEDGER
    columns = (np.full(count, half, np.uint64) for half in (msb, lsb))
    return InUseLedgers(ledger_type, np.array(ledger_ids, np.uint64), *columns)


def calls_of(daemon: Daemon) -> DeletionRequests:
    return daemon.engine.deletion_requests


def record(
    daemon: Daemon, *deletes: PendingDelete | int, topic: str = TOPIC
) -> asyncio.Task[deletion_values.RecordedDeletes]:
    """A number stands for that ledger, which its owner deletes."""
    made = [ledger(each) if isinstance(each, int) else each for each in deletes]
    return daemon.call(calls_of(daemon).record_pending_deletes(topic, made))


def use(
    daemon: Daemon, in_use: InUseLedgers, *, topic: str = TOPIC, replace: bool = False
) -> asyncio.Task[deletion_values.InUseRecorded]:
    return daemon.call(calls_of(daemon).record_in_use(topic, in_use, replace=replace))


def forget(daemon: Daemon, in_use: InUseLedgers, *, topic: str = TOPIC) -> asyncio.Task[int]:
    return daemon.call(calls_of(daemon).forget_in_use(topic, in_use))


async def listed(
    daemon: Daemon, state: ListedState, wanted: deletion_values.DeletionFilter = ALL, page_size: int = 0
) -> list[Deletion]:
    """Of all pages."""
    found: list[Deletion] = []
    after: deletion_values.DeletionPlace | None = None
    while True:
        page = await daemon.call(calls_of(daemon).list_deletes(state, wanted, page_size, after))
        found += (each.deletion for each in page.deletions)
        if page.next_after is None:
            return found
        after = page.next_after


async def stats(daemon: Daemon, topic: str = "") -> deletion_values.DeletionStats:
    return await daemon.call(calls_of(daemon).stats(topic))


async def outcomes(daemon: Daemon) -> dict[int, DeletionOutcome]:
    """Of those that are over, by ledger."""
    return {each.pending_delete.ledger_id: each.outcome for each in await listed(daemon, ENDED)}


async def over(daemon: Daemon, *, timeout_s: float = 600.0) -> None:
    """Returns when nothing is in flight."""
    await daemon.until(lambda: in_flight(daemon) == 0, timeout_s=timeout_s)


def in_flight(daemon: Daemon) -> int:
    return sum(shard.deletions.state.counts.in_flight for shard in daemon.shards.values())


def ids(of: Iterable[Deletion]) -> list[int]:
    """Their ledgers."""
    return [each.pending_delete.ledger_id for each in of]


def pending(daemon: Daemon) -> list[Deletion]:
    """What is pending, as it is at once."""
    return [
        each
        for shard in daemon.shards.values()
        for each in shard.deletions.state.page(PENDING, ShardFilter(), 0, 1_000)[0]
    ]
