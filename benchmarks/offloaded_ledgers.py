"""Offloaded ledgers of another system: two objects each, with its metadata, in a local directory or on S3.

Owns: their names and metadata, the records by which they are deleted, and the places that hold them: filled before a
measurement, listed after it. Does not own: who deletes them.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import tarry
from benchmarks import machine, side_process, workbench
from examples import processes
from storage_backends import envelope, local_directory, object_store, s3

TOPIC = "persistent://public/default/flights"
METADATA: Mapping[str, str] = {
    "application": "pulsar",
    "component": "managed-ledger",
    "pulsar-managed-ledger": "public/default/persistent/flights",
}
# The size does not matter to who deletes them.
BODY = b"entries of a ledger" * 10
DRIVER, BUCKET = "aws-s3", processes.S3ServerProcess.BUCKET
_CONFIGURATION = f'[[deletion.object_stores]]\nname = "offloaded"\ndrivers = ["{DRIVER}"]\n'
# As many attempts as the daemon has under way.
WORKERS = 4
# Of the S3 server, so that it does not keep the load's clients waiting that are on its core.
_NICENESS = 10


@dataclasses.dataclass(frozen=True)
class OffloadedLedger:
    ledger_id: int
    uuid: uuid.UUID

    @property
    def keys(self) -> tuple[str, str]:
        """Of the index and of the data, in the order in which they are deleted."""
        name = f"{self.uuid}-ledger-{self.ledger_id}"
        return f"{name}-index", name


def some(count: int, seed: int) -> list[OffloadedLedger]:
    """Of ascending ids, each with a UUID of its own."""
    rng = random.Random(seed)
    return [OffloadedLedger(number, uuid.UUID(int=rng.getrandbits(128), version=4)) for number in range(count)]


class Place(abc.ABC):
    """An object store that has offloaded ledgers. `driver_metadata`: what their records say of it."""

    driver_metadata: Mapping[str, str] = {}

    def pending_delete(self, ledger: OffloadedLedger) -> tarry.PendingDelete:
        """The record of a ledger that is here."""
        return tarry.PendingDelete(
            ledger.ledger_id,
            ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
            offload_context=tarry.OffloadContext(ledger.uuid, DRIVER, self.driver_metadata),
        )

    @property
    @abc.abstractmethod
    def configuration(self) -> str:
        """TOML by which a daemon deletes here."""

    @abc.abstractmethod
    def open(self) -> object_store.ObjectStore:
        """Of whoever closes it."""

    @abc.abstractmethod
    def fill(self, ledgers: Sequence[OffloadedLedger]) -> None:
        """Puts their objects."""

    def keys(self) -> set[str]:
        """Of all objects that are there."""
        with self.open() as store:
            return {each.key for each in store.list("")}


class Directory(Place):
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def configuration(self) -> str:
        return f'{_CONFIGURATION}kind = "local"\npath = "{self._path}"\n'

    def open(self) -> object_store.ObjectStore:
        return local_directory.LocalDirectory(self._path)

    def fill(self, ledgers: Sequence[OffloadedLedger]) -> None:
        """Synchronises once at the end, not for each object: what is deleted has been there for long."""
        stored = envelope.Envelope.encode(BODY, METADATA) + BODY
        with local_directory.LocalDirectory(self._path) as store:
            for key in (key for ledger in ledgers for key in ledger.keys):
                store.path_of(key).write_bytes(stored)
        os.sync()


class S3(Place):
    """`endpoint_url` of a server on this machine."""

    driver_metadata: Mapping[str, str] = {"bucket": BUCKET}

    def __init__(self, endpoint_url: str) -> None:
        self._endpoint_url = endpoint_url

    @property
    def configuration(self) -> str:
        place = f'bucket = "{BUCKET}"\nendpoint_url = "{self._endpoint_url}"\naddressing = "path"\n'
        return f'{_CONFIGURATION}kind = "s3"\n[deletion.object_stores.s3]\n{place}'

    def open(self) -> object_store.ObjectStore:
        settings = s3.S3Settings(
            bucket=BUCKET,
            endpoint_url=self._endpoint_url,
            access_key_id=processes.S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=processes.S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            addressing_style="path",
        )
        return s3.S3Store(settings)

    def fill(self, ledgers: Sequence[OffloadedLedger]) -> None:
        keys = [key for ledger in ledgers for key in ledger.keys]
        with self.open() as store, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(lambda key: store.put(key, BODY, metadata=METADATA), keys):
                pass


@contextlib.contextmanager
def directory(bench: workbench.Workbench) -> Iterator[Place]:
    """An empty one on the disk that is measured."""
    with bench.folder() as folder:
        yield Directory(folder / "offloaded")


@contextlib.contextmanager
def on_s3(bench: workbench.Workbench) -> Iterator[Place]:
    """An empty bucket of an S3 server, which is a process of its own on the core of the clients."""
    with bench.folder() as folder, processes.S3ServerProcess("s3", folder) as server:
        server.start()
        os.setpriority(os.PRIO_PROCESS, server.pid, _NICENESS)
        yield S3(f"http://127.0.0.1:{server.port}")


def most_per_s(bench: workbench.Workbench, place: Place, ledgers: Sequence[OffloadedLedger]) -> float:
    """How many ledgers a second are deleted by as many threads as a daemon has workers, in a process that does nothing
    else, on the daemon's core: what the store, and this program's way of speaking to it, let anybody delete."""
    place.fill(ledgers)
    with machine.on_core(bench.cores.server), side_process.SideProcess(_delete, place, list(ledgers)) as deleting:
        seconds: float = deleting.result()
    return len(ledgers) / seconds


def _delete(place: Place, ledgers: Sequence[OffloadedLedger], parent: Connection) -> None:
    """Sends how long it took, in seconds."""
    with place.open() as store, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        parent.send("ready")
        began_s = time.perf_counter()
        for _ in pool.map(lambda ledger: _delete_one(store, ledger), ledgers):
            pass
        parent.send(time.perf_counter() - began_s)


def _delete_one(store: object_store.ObjectStore, ledger: OffloadedLedger) -> None:
    """The requests that a verified deletion takes."""
    for request in (store.head, store.delete):
        for key in ledger.keys:
            request(key)
