"""Ledgers as their owner has them, and what is stored of those that are offloaded.

Owns: the names and the metadata of the objects, written out as PIP-186 and the documents have them, and the record of
a deletion. Does not own: where the objects are, and who deletes them.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable

import numpy as np

from daemon import settings
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.ledger_stores.offloaded_ledgers import OffloadedLedgers
from storage_backends.formats.deletion_format import (
    InUseLedgers,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
)
from storage_backends.object_store import ObjectStore
from tests._support.fault_store import FaultStore

DRIVER = "aws-s3"
# A ledger: its number, and the halves of its UUID, both 0 when there is none.
Ledger = tuple[int, int, int]


@dataclasses.dataclass(slots=True, eq=False)
class OwnedLedger:
    """`in_metadata`: its owner knows it. `relied_on`: it was answered that it counts as in use, and that was not taken
    back.
    """

    topic: str
    component: LedgerComponent
    ledger: Ledger
    in_metadata: bool = True
    relied_on: bool = False

    @property
    def cursor_name(self) -> str | None:
        return f"cursor-of-{self.topic}" if self.component is LedgerComponent.MANAGED_CURSOR else None

    @property
    def schema_id(self) -> str | None:
        return f"schema-of-{self.topic}" if self.component is LedgerComponent.SCHEMA_STORAGE else None

    @property
    def ledger_name(self) -> str:
        """As Pulsar has it."""
        _, scheme, name = self.topic.rpartition("persistent://")
        return "/persistent/".join(name.rsplit("/", 1)) if scheme else name

    @property
    def keys(self) -> tuple[str, str]:
        """Of the index, and of the data."""
        name = f"{uuid.UUID(int=(self.ledger[1] << 64) + self.ledger[2])}-ledger-{self.ledger[0]}"
        return f"{name}-index", name

    @property
    def metadata(self) -> dict[str, str]:
        """With the keys of PIP-186."""
        if self.schema_id is not None:
            return {"application": "pulsar", "component": "schema", "pulsar/schemaId": self.schema_id}
        known = {"application": "pulsar", "component": "managed-ledger", "pulsar/managed-ledger": self.ledger_name}
        return known if self.cursor_name is None else {**known, "pulsar/cursor": self.cursor_name}

    @property
    def object_metadata(self) -> dict[str, str]:
        """With keys that an object store takes."""
        return {key.lower().replace("/", "-"): value for key, value in self.metadata.items()}

    @property
    def ledger_type(self) -> LedgerType:
        return LedgerType.OFFLOADED_LEDGER if any(self.ledger[1:]) else LedgerType.LEDGER

    def pending_delete(self) -> PendingDelete:
        """What its owner records."""
        ledger_id, uuid_msb, uuid_lsb = self.ledger
        offloaded = self.ledger_type is LedgerType.OFFLOADED_LEDGER
        context = OffloadContext(uuid_msb, uuid_lsb, DRIVER) if offloaded else None
        return PendingDelete(
            self.component, self.ledger_type, ledger_id, self.cursor_name, self.schema_id, offload_context=context
        )

    def write(self, store: ObjectStore) -> None:
        for key in reversed(self.keys):
            store.put(key, b"entries", metadata=self.object_metadata)


def offloaded_in(store: ObjectStore) -> LedgerStores:
    """What a daemon has whose offloaded ledgers are in this store; it leaves it open."""
    entry = settings.DeletionObjectStore(name="offloaded", drivers=(DRIVER,), kind="local", path="given")
    return LedgerStores(object_stores=[OffloadedLedgers(entry, lambda _: FaultStore(store))])


def in_use(ledgers: Iterable[OwnedLedger], ledger_type: LedgerType = LedgerType.OFFLOADED_LEDGER) -> InUseLedgers:
    """What an owner says of ledgers."""
    named = [each.ledger for each in ledgers]
    columns = np.array(named, np.uint64).reshape(len(named), 3)
    return InUseLedgers(ledger_type, *(np.ascontiguousarray(columns[:, number]) for number in range(3)))
