"""Ledgers of another system: offloaded ones in a local directory or on S3, two objects each with its metadata; others
at the example's owner, who is told over HTTP.

Owns: their names and metadata, the records by which they are deleted, and the places that hold them: filled before a
measurement, listed after it. Does not own: who deletes them.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import tarry
from benchmarks import machine, side_process, workbench
from daemon import settings
from daemon.ledger_stores import ledger_owner, ledger_stores
from examples import processes
from storage_backends import envelope, local_directory, object_store, s3
from storage_backends.formats import deletion_format

TOPIC = "persistent://public/default/flights"
METADATA: Mapping[str, str] = {
    "application": "pulsar",
    "component": "managed-ledger",
    "pulsar/managed-ledger": "public/default/persistent/flights",
}
# As object stores keep the names of keys.
OBJECT_METADATA: Mapping[str, str] = {name.replace("/", "-"): value for name, value in METADATA.items()}
# The size does not matter to who deletes them.
BODY = b"entries of a ledger" * 10
DRIVER, BUCKET = "aws-s3", processes.S3ServerProcess.BUCKET
_OBJECT_STORE = f'[[deletion.object_stores]]\nname = "offloaded"\ndrivers = ["{DRIVER}"]\n'
# As many attempts as the daemon has under way.
WORKERS = 4
# Of the S3 server, so that it does not keep the load's clients waiting that are on its core.
_NICENESS = 10


@dataclasses.dataclass(frozen=True)
class Ledger:
    ledger_id: int
    uuid: uuid.UUID

    @property
    def keys(self) -> tuple[str, str]:
        """Of the objects of an offloaded one: index and data, in the order in which they are deleted."""
        name = f"{self.uuid}-ledger-{self.ledger_id}"
        return f"{name}-index", name


def some(count: int, seed: int) -> list[Ledger]:
    """Of ascending ids, each with a UUID of its own."""
    rng = random.Random(seed)
    return [Ledger(number, uuid.UUID(int=rng.getrandbits(128), version=4)) for number in range(count)]


# Deletes one ledger, with the requests that a verified deletion takes.
Delete = Callable[[Ledger], None]


class Place(abc.ABC):
    """Where ledgers are."""

    @property
    @abc.abstractmethod
    def configuration(self) -> str:
        """TOML by which a daemon deletes here."""

    @abc.abstractmethod
    def record(self, ledger: Ledger) -> tarry.PendingDelete:
        """Of a ledger that is here."""

    @abc.abstractmethod
    def fill(self, ledgers: Sequence[Ledger]) -> None: ...

    @abc.abstractmethod
    def names_of(self, ledger: Ledger) -> Sequence[str]:
        """What there is of it as long as it is not deleted."""

    @abc.abstractmethod
    def names(self) -> set[str]:
        """What there is of all."""

    @abc.abstractmethod
    def deleting(self) -> contextlib.AbstractContextManager[Delete]:
        """For any number of threads."""


class InObjectStore(Place):
    """Offloaded ledgers. `driver_metadata`: what their records say of the store."""

    driver_metadata: Mapping[str, str] = {}

    @abc.abstractmethod
    def open(self) -> object_store.ObjectStore:
        """Of whoever closes it."""

    def record(self, ledger: Ledger) -> tarry.PendingDelete:
        return tarry.PendingDelete(
            ledger.ledger_id,
            ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
            offload_context=tarry.OffloadContext(ledger.uuid, DRIVER, self.driver_metadata),
        )

    def names_of(self, ledger: Ledger) -> Sequence[str]:
        return ledger.keys

    def names(self) -> set[str]:
        with self.open() as store:
            return {each.key for each in store.list("")}

    @contextlib.contextmanager
    def deleting(self) -> Iterator[Delete]:
        with self.open() as store:

            def delete(ledger: Ledger) -> None:
                for request in (store.head, store.delete):
                    for key in ledger.keys:
                        request(key)

            yield delete


class Directory(InObjectStore):
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def configuration(self) -> str:
        return f'{_OBJECT_STORE}kind = "local"\npath = "{self._path}"\n'

    def open(self) -> object_store.ObjectStore:
        return local_directory.LocalDirectory(self._path, deletions_survive=True)

    def fill(self, ledgers: Sequence[Ledger]) -> None:
        """Synchronises once at the end, not for each object: what is deleted has been there for long."""
        stored = envelope.Envelope.encode(BODY, OBJECT_METADATA) + BODY
        with local_directory.LocalDirectory(self._path) as store:
            for key in (key for ledger in ledgers for key in ledger.keys):
                store.path_of(key).write_bytes(stored)
        os.sync()


class S3(InObjectStore):
    """`endpoint_url` of a server on this machine."""

    driver_metadata: Mapping[str, str] = {"bucket": BUCKET}

    def __init__(self, endpoint_url: str) -> None:
        self._endpoint_url = endpoint_url

    @property
    def configuration(self) -> str:
        place = f'bucket = "{BUCKET}"\nendpoint_url = "{self._endpoint_url}"\naddressing = "path"\n'
        return f'{_OBJECT_STORE}kind = "s3"\n[deletion.object_stores.s3]\n{place}'

    def open(self) -> object_store.ObjectStore:
        given = s3.S3Settings(
            bucket=BUCKET,
            endpoint_url=self._endpoint_url,
            access_key_id=processes.S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=processes.S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            addressing_style="path",
        )
        return s3.S3Store(given)

    def fill(self, ledgers: Sequence[Ledger]) -> None:
        keys = [key for ledger in ledgers for key in ledger.keys]
        with self.open() as store, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(lambda key: store.put(key, BODY, metadata=OBJECT_METADATA), keys):
                pass


class AtOwner(Place):
    """Ledgers of the example's owner, who serves `directory` at `delete_url`."""

    def __init__(self, folder: Path, delete_url: str) -> None:
        self._ledgers = folder / "ledgers"
        self._delete_url = delete_url

    @property
    def configuration(self) -> str:
        return f'[[deletion.owners]]\nname = "owner"\ntopic_prefixes = [""]\ndelete_url = "{self._delete_url}"\n'

    def record(self, ledger: Ledger) -> tarry.PendingDelete:
        return tarry.PendingDelete(ledger.ledger_id)

    def fill(self, ledgers: Sequence[Ledger]) -> None:
        """Synchronises once at the end."""
        metadata = json.dumps(METADATA)
        for ledger in ledgers:
            folder = self._ledgers / str(ledger.ledger_id)
            folder.mkdir()
            (folder / "metadata.json").write_text(metadata)
            (folder / "data").write_bytes(BODY)
        os.sync()

    def names_of(self, ledger: Ledger) -> Sequence[str]:
        return (str(ledger.ledger_id),)

    def names(self) -> set[str]:
        return {path.name for path in self._ledgers.iterdir()}

    @contextlib.contextmanager
    def deleting(self) -> Iterator[Delete]:
        entry = settings.DeletionOwner(name="owner", topic_prefixes=("",), delete_url=self._delete_url)
        with contextlib.closing(ledger_owner.Owner(entry)) as asking:

            def delete(ledger: Ledger) -> None:
                record = deletion_format.PendingDelete(
                    deletion_format.LedgerComponent.MANAGED_LEDGER, deletion_format.LedgerType.LEDGER, ledger.ledger_id
                )
                asking.delete(TOPIC, record, lambda: None, ledger_stores.no_step)

            yield delete


class _OwnerProcess(processes.ChildProcess):
    """The example's owner."""

    def start(self, folder: Path) -> str:
        """Where it is told what to delete."""
        self._spawn(sys.executable, "-m", "examples.ledger_owner", "--directory", str(folder))
        self.wait_for_log("}")
        urls: dict[str, str] = json.loads(self.log_text())
        return urls["delete_url"]


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


@contextlib.contextmanager
def at_owner(bench: workbench.Workbench) -> Iterator[Place]:
    """The example's owner, which is a process of its own on the core of the clients, without a ledger."""
    with bench.folder() as folder, _OwnerProcess("owner", folder, {}) as process:
        (folder / "topics.json").write_text(json.dumps({TOPIC: {}}))
        yield AtOwner(folder, process.start(folder))


def most_per_s(bench: workbench.Workbench, place: Place, ledgers: Sequence[Ledger]) -> float:
    """How many ledgers a second are deleted by as many threads as a daemon has workers, in a process that does nothing
    else, on the daemon's core: what the place, and this program's way of speaking to it, let anybody delete."""
    place.fill(ledgers)
    with machine.on_core(bench.cores.server), side_process.SideProcess(_delete, place, list(ledgers)) as deleting:
        seconds: float = deleting.result()
    return len(ledgers) / seconds


def _delete(place: Place, ledgers: Sequence[Ledger], parent: Connection) -> None:
    """Sends how long it took, in seconds."""
    with place.deleting() as delete, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        parent.send("ready")
        began_s = time.perf_counter()
        for _ in pool.map(delete, ledgers):
            pass
        parent.send(time.perf_counter() - began_s)
