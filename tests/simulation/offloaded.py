"""Offloaded ledgers of a run: who owns them, and where they are until they are deleted.

Owns: the ledgers, and the rules for what is deleted: by an attempt whose begin has landed, of a record that says what
the ledger is, and nothing that its owner was told counts as in use.
Does not own: what the owners do (`owning`), and what is recorded (`deletion_truth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from storage_backends.formats.deletion_format import LedgerComponent
from storage_backends.memory_store import MemoryStore
from tests._support.owned_ledgers import OwnedLedger
from tests.simulation.deletion_truth import Recorded, ShardDeletions


class OffloadedStore(MemoryStore):
    """The store in which the ledgers are. `breach`: is told of a rule that was broken."""

    def __init__(self, shards: Callable[[], Iterable[ShardDeletions]], breach: Callable[[str], None]) -> None:
        super().__init__()
        self.ledgers: list[OwnedLedger] = []
        self._shards = shards
        self._breach = breach

    def add(self, ledger: OwnedLedger) -> None:
        """Its owner writes it, and knows it."""
        self.ledgers.append(ledger)
        ledger.write(self)

    def holds(self, ledger: OwnedLedger) -> bool:
        """Whether any of its objects is there."""
        with self._lock:
            return any(key in self._objects for key in ledger.keys)

    def is_whole(self, ledger: OwnedLedger) -> bool:
        """Whether all of its objects are there."""
        with self._lock:
            return all(key in self._objects for key in ledger.keys)

    def delete(self, key: str) -> None:
        ledger = next((each for each in self.ledgers if key in each.keys), None)
        with self._lock:
            there = key in self._objects
        if ledger is not None and there:
            check_deletion(ledger, self._shards(), self._breach)
        super().delete(key)


def check_deletion(ledger: OwnedLedger, shards: Iterable[ShardDeletions], breach: Callable[[str], None]) -> None:
    """What is there of the ledger is about to be deleted."""
    name = f"ledger {ledger.ledger[0]} of {ledger.topic}"
    if ledger.relied_on:
        breach(f"{name} is deleted, and is in use")
    records = [one for shard in shards for one in shard.of_ledger(ledger.ledger)]
    true = [one for one in records if _says_what_it_is(one, ledger)]
    if not true:
        breach(f"{name} is deleted, and {len(records)} records say what it is not")
    elif not any(one.may_delete for one in true):
        breach(f"{name} is deleted, and no attempt has begun: {[(one.number, one.standing.value) for one in true]}")


def _says_what_it_is(one: Recorded, ledger: OwnedLedger) -> bool:
    """Of a schema nobody can tell whose topic's it is (PIP-186)."""
    of_topic = one.topic == ledger.topic or ledger.component is LedgerComponent.SCHEMA_STORAGE
    return of_topic and one.delete == ledger.pending_delete()
