"""Object stores with offloaded ledgers, in a local directory and on S3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon import settings
from daemon.core.deletions.ledger_metadata import OffloadedName
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.ledger_stores.offloaded_ledgers import OffloadedLedgers, open_existing
from storage_backends.formats.deletion_format import LedgerComponent, LedgerType, OffloadContext, PendingDelete
from storage_backends.local_directory import LocalDirectory
from storage_backends.object_store import ObjectStore
from storage_backends.storage_settings import S3
from storage_backends.store_opening import open_store
from tests._support import moto_server
from tests._support.fault_store import FaultStore, Script

TOPIC = "persistent://t/n/orders"
DRIVER = "aws-s3"
NAME = OffloadedName(0x0123456789ABCDEF, 0xFEDCBA9876543210, 47)
LEDGER_METADATA = {
    "application": "pulsar",
    "component": "managed-ledger",
    "pulsar-managed-ledger": "t/n/persistent/orders",
}
_prefixes = itertools.count()


@dataclass(frozen=True)
class Place:
    """An object store that is configured. `store`: how the test reaches it; `seen`: what an attempt does to it."""

    entry: settings.DeletionObjectStore
    store: ObjectStore
    ledgers: OffloadedLedgers
    stores: LedgerStores
    script: Script
    opened: list[FaultStore]

    def put(
        self,
        name: OffloadedName = NAME,
        *,
        data: Mapping[str, str] | None = LEDGER_METADATA,
        index: Mapping[str, str] | None = LEDGER_METADATA,
    ) -> None:
        """The two objects, each with its metadata; None: without it."""
        for key, metadata in ((name.data, data), (name.index, index)):
            if metadata is not None:
                self.store.put(key, b"entries", metadata=metadata)

    def keys(self) -> set[str]:
        return {found.key for found in self.store.list("")}

    def calls(self) -> list[tuple[str, str]]:
        """What attempts did so far."""
        return [(call.operation, call.key) for store in self.opened for call in store.calls]

    def record(self, name: OffloadedName = NAME, **changes: object) -> PendingDelete:
        return record(name, bucket=self.ledgers.bucket, **changes)


def record(name: OffloadedName = NAME, *, bucket: str | None = None, **changes: object) -> PendingDelete:
    """A record of a topic's offloaded ledger."""
    metadata = () if bucket is None else (("bucket", bucket),)
    given: dict[str, object] = {
        "component": LedgerComponent.MANAGED_LEDGER,
        "ledger_type": LedgerType.OFFLOADED_LEDGER,
        "ledger_id": name.ledger_id,
        "offload_context": OffloadContext(name.uuid_msb, name.uuid_lsb, DRIVER, metadata),
    }
    return PendingDelete(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def moto() -> Iterator[moto_server.MotoServer]:
    with moto_server.moto_server() as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def entry(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> settings.DeletionObjectStore:
    """A configured place of each kind; a local one is a store already."""
    if request.param == "local":
        path = tmp_path / "offloaded"
        LocalDirectory(path).close()
        return settings.DeletionObjectStore(name="cold", drivers=(DRIVER,), kind="local", path=str(path))
    moto: moto_server.MotoServer = request.getfixturevalue("moto")
    moto.settings("offloaded")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto_server.ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto_server.SECRET_ACCESS_KEY)
    return settings.DeletionObjectStore(
        name="cold",
        drivers=(DRIVER,),
        s3=S3(
            bucket="offloaded",
            prefix=f"tests/{next(_prefixes)}",
            endpoint_url=moto.endpoint_url,
            attempts=1,
            read_timeout_s=300,
        ),
    )


@pytest.fixture
def place(entry: settings.DeletionObjectStore) -> Iterator[Place]:
    script, opened = Script(), list[FaultStore]()

    def opening(wanted: settings.DeletionObjectStore) -> ObjectStore:
        opened.append(FaultStore(open_existing(wanted), script))
        return opened[-1]

    ledgers = OffloadedLedgers(entry, opening)
    with open_store(entry) as store:
        yield Place(entry, store, ledgers, LedgerStores(object_stores=[ledgers]), script, opened)
        for each in opened:
            each.inner.close()
