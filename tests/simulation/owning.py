"""The owners of ledgers in one run: they write offloaded ledgers, say that they are in use, record their deletion, drop
what was recorded from their metadata, and crash; forgers record what is not true; and somebody retries dead letters.

Owns: what owners do in which order, and what they are promised by an answer.
Does not own: the ledgers and what is deleted of them (`offloaded`), what is recorded (`deletion_truth`).

An owner that crashes has its metadata alone. It says that these ledgers, and no others, are in use; of what is being
deleted it records the deletion and drops it: somebody has begun, be it a forger.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

from daemon.ledger_deletion import shard_deletions
from daemon.ledger_deletion.deletion_requests import DeletionRequests
from daemon.ledger_deletion.deletion_values import DeletionFilter, InUseRecorded
from storage_backends.formats import names
from storage_backends.formats.deletion_format import LedgerComponent, LedgerType, PendingDelete
from tests._support import owned_ledgers
from tests._support.engine_fixture import Daemon
from tests._support.owned_ledgers import OwnedLedger
from tests.simulation.deletion_truth import OVER, Standing
from tests.simulation.history import History
from tests.simulation.offloaded import OffloadedStore
from tests.simulation.oracle import Oracle

if TYPE_CHECKING:
    from tests.simulation.workload import Clients

# So many runs have owners of ledgers.
SHARE = 0.5
# Whose ledgers are whose: one of these is a topic that has rows, too.
TOPICS = ("t", "persistent://p/q/ledgers")
LEDGERS_MAX = 14
# Nothing fails any more when an owner says for the last time what is in use.
LAST_TRIES = 60


def has_owners(seed: int) -> bool:
    """Whether the run of a seed has owners of ledgers."""
    return random.Random(f"owners {seed}").random() < SHARE


def settings_of(seed: int) -> tuple[str, ...]:
    """How the daemons of a run are configured."""
    draw = random.Random(f"deletion {seed}")
    return (
        f"deletion.parallelism={draw.choice((1, 2, 4))}",
        f"deletion.reconsume_later_seconds={draw.choice((1, 4))}",
        f"deletion.max_retry_delete_count={draw.choice((0, 1, 10))}",
        f"deletion.jitter={draw.choice((0.0, 0.1, 0.5))}",
    )


@contextlib.contextmanager
def small_decisions(seed: int) -> Iterator[None]:
    """In some runs a request is many decisions, as one with many more ledgers is."""
    rows = random.Random(f"decisions {seed}").choice((2, 5, 4_000))
    with (
        mock.patch.object(shard_deletions, "LEDGERS_A_DECISION", rows),
        mock.patch.object(shard_deletions, "DELETES_A_DECISION", rows),
    ):
        yield


class Owning:
    """The owners and forgers of a run."""

    def __init__(
        self, clients: Clients, oracle: Oracle, store: OffloadedStore, history: History, shards_total: int
    ) -> None:
        self._clients = clients
        self._oracle = oracle
        self._store = store
        self._history = history
        self._shards_total = shards_total
        self._next_id = 0

    def clients(self) -> Mapping[str, Callable[[random.Random], Coroutine[Any, Any, None]]]:
        """By name, work that takes a random generator."""
        owners = {f"owner {topic}": _Owner(self, topic).run for topic in TOPICS}
        return {**owners, "forger": self._forge, "undertaker of ledgers": self._retry_dead}

    # ---- what all of them use

    @property
    def ended(self) -> bool:
        return self._clients.ended

    @property
    def ledgers(self) -> list[OwnedLedger]:
        return self._store.ledgers

    def write(self, topic: str, component: LedgerComponent) -> OwnedLedger:
        self._next_id += 1
        ledger = OwnedLedger(topic, component, (self._next_id, 7, self._next_id % 3 + 1))
        self._store.add(ledger)
        return ledger

    async def call(self, draw: random.Random, work: Callable[[DeletionRequests], Coroutine[Any, Any, Any]]) -> Any:
        """The answer of a daemon; None when there was none."""
        daemon = await self._clients.daemon(draw)
        return None if daemon is None else await self._clients.call(daemon, work(daemon.engine.deletion_requests))

    async def record(self, draw: random.Random, topic: str, deletes: Sequence[PendingDelete]) -> bool:
        """Whether it was answered that they are recorded."""
        truth = self._oracle.deletions(names.shard_of(topic, self._shards_total))
        truth.asked.update((topic, delete) for delete in deletes)
        answer = await self.call(draw, lambda requests: requests.record_pending_deletes(topic, deletes))
        if answer is None:
            return False
        self._history.note(f"recorded {topic} {[each.ledger_id for each in deletes]} -> {answer}")
        if answer.refused or answer.recorded != len(deletes):
            self._history.breach(f"{answer} answers {len(deletes)} deletes of {topic} that are as they must be")
        for delete in deletes:
            if truth.of(topic, delete) is None:
                self._history.breach(f"{delete} of {topic} is answered to be recorded, and no slot says so")
        return True

    def stated(self, topic: str, ledgers: Sequence[OwnedLedger], answer: InUseRecorded) -> None:
        """It was answered what counts as in use."""
        self._history.note(f"in use of {topic} {[each.ledger[0] for each in ledgers]} -> {answer}")
        truth = self._oracle.deletions(names.shard_of(topic, self._shards_total))
        late = [ledgers[row] for row in answer.being_deleted]
        if answer.recorded + len(late) != len(ledgers):
            self._history.breach(f"{answer} answers {len(ledgers)} ledgers of {topic} that are in use")
        for ledger in ledgers:
            stated = ledger.ledger in truth.in_use[topic, LedgerType.OFFLOADED_LEDGER]
            if ledger in late and ledger.relied_on:
                self._history.breach(f"ledger {ledger.ledger} of {topic} is being deleted, and is in use")
            if ledger not in late and not stated:
                self._history.breach(f"ledger {ledger.ledger} of {topic} is answered to be in use, and no slot says so")

    def is_lost(self, ledger: OwnedLedger) -> bool:
        """Whether nothing of a ledger in use is there, which its owner asked for and was not answered."""
        truth = self._oracle.deletions(names.shard_of(ledger.topic, self._shards_total))
        lost = not self._store.holds(ledger)
        if lost and truth.of(ledger.topic, ledger.pending_delete()) is None:
            self._history.breach(f"ledger {ledger.ledger} of {ledger.topic} is gone, and its owner has it")
        if not lost and not self._store.is_whole(ledger):
            self._history.breach(f"ledger {ledger.ledger} of {ledger.topic} is answered to be in use, and half is gone")
        return lost

    # ---- others than owners

    async def _forge(self, draw: random.Random) -> None:
        while not self.ended:
            await asyncio.sleep(draw.random() * 6)
            if self.ledgers:
                topic, delete = _forged(draw, draw.choice(self.ledgers))
                await self.record(draw, topic, [delete])

    async def _retry_dead(self, draw: random.Random) -> None:
        while not self.ended:
            await asyncio.sleep(draw.random() * 12)
            await self.call(draw, lambda requests: requests.retry_dead(DeletionFilter(), all=True))

    # ---- the end

    async def drain(self, daemon: Daemon, timeout_s: float) -> None:
        """Nothing fails any more: every deletion ends, and what is left is what its owner has, or was forged."""
        requests = daemon.engine.deletion_requests
        deadline_s = daemon.elapsed_s() + timeout_s
        while left := self._not_over():
            if daemon.elapsed_s() > deadline_s:
                self._history.breach(f"deletions {left} are not over in {timeout_s:.0f} s")
                return
            await daemon.call(requests.retry_dead(DeletionFilter(), all=True))
            await asyncio.sleep(1.0)
        stats = await daemon.call(requests.stats(""))
        held = sum(
            one.standing is Standing.HELD
            for shard in self._oracle.shard_deletions.values()
            for one in shard.recorded.values()
        )
        if (stats.in_flight, stats.begun, stats.given_up, stats.held) != (0, 0, 0, held):
            self._history.breach(f"{held} deletions are held, the others are over, and {stats} is said")
        for ledger in self.ledgers:
            if ledger.in_metadata is not self._store.holds(ledger):
                known = "knows" if ledger.in_metadata else "does not know"
                self._history.breach(f"ledger {ledger.ledger} of {ledger.topic}, which its owner {known}, is another")

    def _not_over(self) -> list[str]:
        """Those that are held by a statement are over, as long as it stands."""
        return [
            f"{one.number} {one.standing.value}"
            for shard in self._oracle.shard_deletions.values()
            for one in shard.recorded.values()
            if one.standing not in (*OVER, Standing.HELD)
        ]


class _Owner:
    """Who keeps the ledgers of one topic."""

    def __init__(self, owning: Owning, topic: str) -> None:
        self._owning = owning
        self._topic = topic
        # It hardly says what is in use before it starts again, and its metadata often cannot be changed.
        self._is_careless = False
        # Dropped, and still to be taken back.
        self._dropped: list[OwnedLedger] = []

    @property
    def _own(self) -> list[OwnedLedger]:
        return [each for each in self._owning.ledgers if each.topic == self._topic and each.in_metadata]

    async def run(self, draw: random.Random) -> None:
        self._is_careless = draw.random() < 0.5
        await self._begin(draw)
        while not self._owning.ended:
            await asyncio.sleep(draw.random() * 3)
            action = draw.choice(("write", "write", "write", "delete", "delete", "delete", "forget", "crash", "crash"))
            if action == "write" and len(self._own) < LEDGERS_MAX:
                await self._write(draw)
            elif action == "delete" and self._own:
                await self._delete(draw, draw.sample(self._own, draw.randrange(1, min(4, len(self._own)) + 1)))
            elif action == "forget":
                await self._forget(draw)
            elif action == "crash":
                self._dropped.clear()
                await self._begin(draw)
        for _ in range(LAST_TRIES):
            if await self._begin(draw):
                break
            await asyncio.sleep(1.0)

    async def _write(self, draw: random.Random) -> None:
        ledger = self._owning.write(self._topic, draw.choice(tuple(LedgerComponent)))
        if draw.random() > 0.8 * self._is_careless:
            await self._state(draw, [ledger], replace=False)

    async def _delete(self, draw: random.Random, ledgers: Sequence[OwnedLedger]) -> None:
        """What was recorded is dropped; then it is not in use any more."""
        if not await self._owning.record(draw, self._topic, [each.pending_delete() for each in ledgers]):
            return
        if draw.random() < (0.7 if self._is_careless else 0.1):
            # The change of the metadata fails: they are in use as before.
            return
        for ledger in ledgers:
            ledger.in_metadata = False
        self._dropped += ledgers
        if draw.random() < 0.8:
            await self._forget(draw)

    async def _forget(self, draw: random.Random) -> None:
        if not self._dropped:
            return
        dropped = list(self._dropped)
        for ledger in dropped:
            ledger.relied_on = False
        columns = owned_ledgers.in_use(dropped)
        answer = await self._owning.call(draw, lambda requests: requests.forget_in_use(self._topic, columns))
        if answer is not None:
            self._dropped = [each for each in self._dropped if each not in dropped]

    async def _begin(self, draw: random.Random) -> bool:
        """What the metadata has is in use, and nothing else."""
        for ledger in self._owning.ledgers:
            if ledger.topic == self._topic and not ledger.in_metadata:
                ledger.relied_on = False
        return await self._state(draw, self._own, replace=True)

    async def _state(self, draw: random.Random, ledgers: Sequence[OwnedLedger], *, replace: bool) -> bool:
        """Says that ledgers are in use; whether it was answered."""
        columns = owned_ledgers.in_use(ledgers)
        answer = await self._owning.call(
            draw, lambda requests: requests.record_in_use(self._topic, columns, replace=replace)
        )
        if answer is None:
            return False
        self._owning.stated(self._topic, ledgers, answer)
        late = [ledgers[row] for row in answer.being_deleted]
        lost = [ledger for ledger in ledgers if ledger not in late and self._owning.is_lost(ledger)]
        for ledger in ledgers:
            ledger.relied_on = ledger not in late and ledger not in lost
        for ledger in lost:
            ledger.in_metadata = False
        self._dropped += lost
        return not late or await self._give_up(draw, late)

    async def _give_up(self, draw: random.Random, late: Sequence[OwnedLedger]) -> bool:
        """Their deletion has begun."""
        if not await self._owning.record(draw, self._topic, [each.pending_delete() for each in late]):
            return False
        for ledger in late:
            ledger.in_metadata = False
        return True


def _forged(draw: random.Random, ledger: OwnedLedger) -> tuple[str, PendingDelete]:
    """A record that is not true of the ledger."""
    true = ledger.pending_delete()
    if ledger.component is LedgerComponent.SCHEMA_STORAGE:
        return ledger.topic, dataclasses.replace(true, schema_id="another")
    if draw.random() < 0.4:
        return "another", true
    if ledger.component is LedgerComponent.MANAGED_LEDGER:
        return ledger.topic, dataclasses.replace(true, component=LedgerComponent.MANAGED_CURSOR, cursor_name="c")
    if draw.random() < 0.5:
        return ledger.topic, dataclasses.replace(true, cursor_name="another")
    return ledger.topic, dataclasses.replace(true, component=LedgerComponent.MANAGED_LEDGER, cursor_name=None)
