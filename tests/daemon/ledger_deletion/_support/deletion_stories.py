"""Ledgers with every fate, their owner, the place where they are, and what daemons make of them, under watch.

Owns: what is done in a story of two-phase deletion, what holds at each moment of it, and what is left at its end.
Does not own: what happens to the daemons meanwhile (the tests), and the truth (`tests.simulation.deletion_truth`).

    doomed        recorded, dropped from the metadata, and then not in use: deleted
    used          recorded, and in use still: its owner has not dropped it
    another's     recorded by somebody who says of it what is not true
    gone          recorded, and nothing of it is there
    kept          never recorded
"""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from daemon import config
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.errors import TarryError
from daemon.ledger_deletion.deletion_requests import DeletionRequests
from daemon.ledger_deletion.deletion_values import DeletionFilter, InUseRecorded, ListedDeletion
from daemon.ledger_stores.ledger_owner import Owner
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.settings import DeletionOwner, DeletionSettings
from storage_backends.formats import log_slot_format, slot_format
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from tests._support import owned_ledgers
from tests._support.engine_fixture import Daemon, EngineFixture, Killed
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Call, Fault, FaultStore, Pause, Script
from tests._support.ledger_owner_server import LedgerOwnerServer
from tests._support.owned_ledgers import OwnedLedger
from tests.simulation.deletion_truth import OVER, ShardDeletions, Standing
from tests.simulation.offloaded import check_deletion

T = TypeVar("T")

TOPIC = "persistent://tenant/space/topic"
# A call that is not answered in this time is given up by its caller, virtual seconds.
CALL_S = 30.0
PAGE = 100
# So many times somebody looks whether something has come.
LOOKS = 12_000


class WatchedJournal(MemoryStore):
    """A root, and what its slots say of deletions. `on_breach`: is told of a rule that was broken."""

    def __init__(self, settings: DeletionSettings, on_breach: Callable[[str], None]) -> None:
        super().__init__()
        self.truth = ShardDeletions(settings, on_breach)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        if JOURNAL in key:
            slot = log_slot_format.decode_log_slot(body)
            for shard in slot.shards:
                for record in slot_format.read_slot(slot.section(shard)).deletions:
                    self.truth.landed(record)


# ---- where ledgers are


class Place(ABC):
    """`deleting`: told of a ledger's number before anything of it is deleted."""

    ledger_type: LedgerType
    deleting: Callable[[int], None] = staticmethod(lambda ledger_id: None)

    @abstractmethod
    def stores(self) -> LedgerStores:
        """What a daemon is given."""

    @abstractmethod
    def write(self, ledger: OwnedLedger, metadata_of: OwnedLedger) -> None:
        """Stores the ledger, with the metadata that the other one has."""

    @abstractmethod
    def held(self, ledgers: Sequence[OwnedLedger]) -> list[OwnedLedger]:
        """Those of the ledgers that are there."""

    @abstractmethod
    def lose_an_answer(self) -> None:
        """The next deletion takes effect, and nobody is told."""


class InObjects(Place):
    """Offloaded ledgers in an object store."""

    ledger_type = LedgerType.OFFLOADED_LEDGER

    def __init__(self, store: ObjectStore) -> None:
        self.script = Script()
        self._inner = store
        self._failing = FaultStore(store, self._decide)

    def stores(self) -> LedgerStores:
        return owned_ledgers.offloaded_in(self._failing)

    def write(self, ledger: OwnedLedger, metadata_of: OwnedLedger) -> None:
        for key in ledger.keys:
            self._inner.put(key, b"entries", metadata=metadata_of.object_metadata)

    def held(self, ledgers: Sequence[OwnedLedger]) -> list[OwnedLedger]:
        there = {listed.key for listed in self._inner.list("")}
        return [ledger for ledger in ledgers if not there.isdisjoint(ledger.keys)]

    def lose_an_answer(self) -> None:
        self.script.plan("delete", Fault.FAIL_AFTER)

    def _decide(self, call: Call) -> Fault | Pause:
        if call.operation == "delete":
            self.deleting(int(call.key.split("-ledger-")[1].removesuffix("-index")))
        return self.script(call)


class AtTheirOwner(Place):
    """Ledgers that their owner deletes when it is asked."""

    ledger_type = LedgerType.LEDGER

    def __init__(self, server: LedgerOwnerServer) -> None:
        self._server = server
        server.ledgers.clear()
        server.before_deletion = lambda ledger_id: self.deleting(ledger_id)

    def stores(self) -> LedgerStores:
        entry = DeletionOwner(name="owner", topic_prefixes=("persistent://",), delete_url=self._server.url)
        return LedgerStores(owners=[Owner(entry)])

    def write(self, ledger: OwnedLedger, metadata_of: OwnedLedger) -> None:
        self._server.ledgers[ledger.ledger[0]] = metadata_of.metadata

    def held(self, ledgers: Sequence[OwnedLedger]) -> list[OwnedLedger]:
        return [ledger for ledger in ledgers if ledger.ledger[0] in self._server.ledgers]

    def lose_an_answer(self) -> None:
        self._server.answers_lost += 1


# ---- the story


class Story:
    """One owner, with ledgers of one component at one place. Every daemon of `machines` is given that place."""

    def __init__(self, machines: EngineFixture, place: Place, component: LedgerComponent, *settings: str) -> None:
        self.machines = machines
        self.place = place
        self.breaches: list[str] = []
        self._settings = settings
        offloaded = place.ledger_type is LedgerType.OFFLOADED_LEDGER
        made = [OwnedLedger(TOPIC, component, (n, 7, 9) if offloaded else (n, 0, 0)) for n in range(1, 8)]
        self.ledgers = made
        self.doomed, (self.used, self.anothers, self.gone, self.kept) = made[:3], made[3:]
        deletion = config.load(environment={}, overrides=settings).deletion
        self.root = WatchedJournal(deletion, self.breaches.append)
        machines.store = self.root
        machines.ledger_stores = lambda daemon: place.stores()
        place.deleting = self._deleting
        for ledger in made:
            if ledger is not self.gone:
                place.write(
                    ledger,
                    dataclasses.replace(ledger, topic="persistent://tenant/space/another")
                    if ledger is self.anothers
                    else ledger,
                )
        # What is not its owner's own is not in its metadata.
        self.anothers.in_metadata = self.gone.in_metadata = False
        self._unforgotten: list[OwnedLedger] = []

    @property
    def truth(self) -> ShardDeletions:
        return self.root.truth

    async def serving(self, daemon_id: str) -> Daemon:
        return await self.machines.served_by(daemon_id, *self._settings)

    # ---- what the owner does

    async def begin(self, daemon: Daemon) -> None:
        """What the metadata has is in use, and nothing else; what is being deleted is given up."""
        own = [ledger for ledger in self.ledgers if ledger.in_metadata]
        columns = owned_ledgers.in_use(own, self.place.ledger_type)
        answer = await asked(daemon, lambda requests: requests.record_in_use(TOPIC, columns, replace=True))
        if answer is None:
            return
        late = self._late(own, answer)
        if late and await self.record(daemon, late):
            for ledger in late:
                ledger.in_metadata = False

    def _late(self, own: Sequence[OwnedLedger], answer: InUseRecorded) -> list[OwnedLedger]:
        late = [own[row] for row in answer.being_deleted]
        there = self.place.held(own)
        for ledger in own:
            if ledger in late and ledger.relied_on:
                self.breaches.append(f"ledger {ledger.ledger} is being deleted, and is in use")
            # What it asked to be deleted, and was not told of, may be gone.
            ledger.in_metadata = ledger in there or ledger in late
            ledger.relied_on = ledger not in late and ledger.in_metadata
        return late

    async def record(self, daemon: Daemon, ledgers: Sequence[OwnedLedger]) -> bool:
        deletes = [ledger.pending_delete() for ledger in ledgers]
        self.truth.asked.update((TOPIC, delete) for delete in deletes)
        answer = await asked(daemon, lambda requests: requests.record_pending_deletes(TOPIC, deletes))
        if answer is None:
            return False
        if answer.recorded != len(deletes) or any(self.truth.of(TOPIC, delete) is None for delete in deletes):
            self.breaches.append(f"{answer} answers {deletes}, and the slots say otherwise")
        return True

    async def work(self, daemon: Daemon) -> None:
        """All of it, from the first statement to the last; ends early when the daemon does."""
        if not self.truth.in_use:
            await self.begin(daemon)
        await self.record(daemon, [self.used, self.anothers, self.gone])
        for some in (self.doomed[:1], self.doomed[1:]):
            left = [ledger for ledger in some if ledger.in_metadata]
            if left and await self.record(daemon, left):
                for ledger in left:
                    ledger.in_metadata = False
                self._unforgotten += left
        await self.forget(daemon)

    async def forget(self, daemon: Daemon) -> None:
        if not self._unforgotten:
            return
        dropped = list(self._unforgotten)
        for ledger in dropped:
            ledger.relied_on = False
        columns = owned_ledgers.in_use(dropped, self.place.ledger_type)
        if await asked(daemon, lambda requests: requests.forget_in_use(TOPIC, columns)) is not None:
            self._unforgotten = [ledger for ledger in self._unforgotten if ledger not in dropped]

    async def work_again(self, daemon: Daemon) -> None:
        """As an owner that was started again: it knows its metadata, and does the rest once more."""
        self._unforgotten.clear()
        for ledger in self.ledgers:
            ledger.relied_on &= ledger.in_metadata
        await self.begin(daemon)
        await self.work(daemon)

    # ---- what holds

    def _deleting(self, ledger_id: int) -> None:
        ledger = self.ledgers[ledger_id - 1]
        if self.place.held([ledger]):
            as_it_is = dataclasses.replace(ledger, topic="another") if ledger is self.anothers else ledger
            check_deletion(as_it_is, [self.truth], self.breaches.append)

    def check_nothing_is_lost(self) -> None:
        """What its owner does not know has a record, or is gone: now, whatever happens next."""
        for ledger in self.place.held([ledger for ledger in self.doomed if not ledger.in_metadata]):
            one = self.truth.of(TOPIC, ledger.pending_delete())
            recorded = one is not None and one.standing not in OVER
            assert recorded, f"ledger {ledger.ledger} has no record"

    async def until(self, condition: Callable[[], bool], *, look_s: float = 0.05) -> None:
        """Returns when the condition holds, whoever lives. `look_s`: somebody looks as often, virtual seconds."""
        for _ in range(LOOKS):
            if condition():
                return
            await asyncio.sleep(look_s)
        raise TimeoutError("it does not come")

    async def over(self) -> None:
        """Returns when no deletion is pending."""
        recorded = self.truth.recorded
        await self.until(lambda: all(one.standing in (*OVER, Standing.HELD) for one in recorded.values()))

    async def check_the_end(self, daemon: Daemon) -> None:
        """Everything that was recorded and is what the record says is gone, the rest is there, and every outcome is
        told.
        """
        await self.over()
        assert not self.breaches, self.breaches
        left = self.place.held(self.ledgers)
        assert left == [self.used, self.anothers, self.kept]
        assert self.used.in_metadata
        ended = {each.deletion.pending_delete.ledger_id: each.deletion for each in await listed(daemon)}
        outcomes = [ended[ledger.ledger[0]].outcome for ledger in (self.used, self.anothers, self.gone)]
        expected = DeletionOutcome.IN_USE, DeletionOutcome.METADATA_MISMATCH, DeletionOutcome.ALREADY_GONE
        assert tuple(outcomes) == expected
        for ledger in self.doomed:
            outcome = ended[ledger.ledger[0]].outcome
            assert outcome in (DeletionOutcome.DELETED, DeletionOutcome.ALREADY_GONE)
        for state in (ListedState.PENDING, ListedState.DEAD):
            assert not await listed(daemon, state)
        stats = await daemon.call(daemon.engine.deletion_requests.stats(""))
        assert (stats.in_flight, stats.begun, stats.given_up, stats.oldest_ms) == (0, 0, 0, 0)


async def asked(daemon: Daemon, work: Callable[[DeletionRequests], Coroutine[Any, Any, T]]) -> T | None:
    """The answer of a daemon; None when there was none, or an error."""
    call = daemon.call(work(daemon.engine.deletion_requests))
    await asyncio.wait([call], timeout=CALL_S)
    if not call.done():
        call.cancel()
        return None
    if call.cancelled():
        return None
    error = call.exception()
    if error is not None and not isinstance(error, TarryError | Killed):
        raise error
    return None if error is not None else call.result()


async def listed(daemon: Daemon, state: ListedState = ListedState.ENDED) -> Sequence[ListedDeletion]:
    page = await daemon.call(daemon.engine.deletion_requests.list_deletes(state, DeletionFilter(), PAGE, None))
    return page.deletions
