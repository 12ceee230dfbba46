"""Very many offloaded ledgers: most are in use, one in a hundred is an orphan, and one object in ten is alone.

Owns: which ledgers there are, and the places that hold their objects: a local directory, and an S3 server in a process
of its own, which makes them itself, since to send them takes minutes.
Does not own: names and metadata (`owned_ledgers`), the server (`moto_server`).

`python -m tests._support.many_ledgers --objects N --port P --ready-file FILE` serves them in the bucket `BUCKET` until
SIGTERM.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from moto.s3.models import s3_backends

from examples.processes import S3_CREDENTIALS, ChildProcess, free_port
from storage_backends.formats.deletion_format import LedgerComponent
from storage_backends.local_directory import Envelope, LocalDirectory
from tests._support import moto_server
from tests._support.owned_ledgers import DRIVER, OwnedLedger

STORE: Final = "offloaded"
BUCKET: Final = "offloaded"
BODY: Final = b"entries"
TOPICS: Final = 50
# Of whoever makes requests in tests.
MOTO_ACCOUNT: Final = "123456789012"


@dataclasses.dataclass(frozen=True)
class ManyLedgers:
    """`objects`: of all of them together; a multiple of 200."""

    objects: int

    @cached_property
    def ledgers(self) -> list[OwnedLedger]:
        chance = random.Random(self.objects)
        return [
            OwnedLedger(
                topic=f"persistent://tenant/space/topic-{number % TOPICS}",
                component=LedgerComponent.MANAGED_LEDGER,
                ledger=(number, chance.getrandbits(64) | 1, chance.getrandbits(64)),
            )
            for number in range(self.objects * 55 // 100)
        ]

    @cached_property
    def orphans(self) -> set[int]:
        """One ledger in a hundred."""
        numbers = range(len(self.ledgers))
        return set(random.Random(186).sample(numbers, len(numbers) // 100))

    def entries(self) -> Iterator[tuple[str, OwnedLedger]]:
        """Every object's key, and whose it is: of the last ledgers there is one object, data or index."""
        halves = self.objects // 10
        for place, ledger in enumerate(self.ledgers):
            alone = place >= len(self.ledgers) - halves
            for key in ledger.keys if not alone else ledger.keys[place % 2 : place % 2 + 1]:
                yield key, ledger


class LedgersInDirectory:
    def __init__(self, many: ManyLedgers, path: Path) -> None:
        self._path = path
        LocalDirectory(path).close()
        for key, ledger in many.entries():
            (path / key).write_bytes(Envelope.encode(BODY, ledger.object_metadata) + BODY)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """So many files are not for whoever clears away what tests left."""
        shutil.rmtree(self._path)

    @property
    def configuration(self) -> str:
        """TOML by which a daemon sweeps here."""
        return f'{_TABLE}kind = "local"\npath = "{self._path}"\n'

    def keys(self) -> set[str]:
        with LocalDirectory(self._path) as store:
            return {listed.key for listed in store.list("")}


class LedgersOnS3(ChildProcess):
    def __init__(self, many: ManyLedgers, directory: Path) -> None:
        super().__init__("ledgers-on-s3", directory, S3_CREDENTIALS)
        self._many = many
        self._port = free_port()
        self._ready_file = directory / "ledgers-on-s3.ready"

    def start(self, timeout_s: float) -> None:
        """Returns when all objects are there. Raises `ProcessFailed`."""
        where = ("--port", str(self._port), "--ready-file", str(self._ready_file))
        self._spawn(sys.executable, "-m", __name__, "--objects", str(self._many.objects), *where)
        self._wait_for_file(self._ready_file, timeout_s)

    @property
    def configuration(self) -> str:
        """TOML by which a daemon sweeps here; to list a page of very many takes moto a second of its core."""
        place = f'bucket = "{BUCKET}"\nendpoint_url = "http://127.0.0.1:{self._port}"\naddressing = "path"\n'
        return f'{_TABLE}kind = "s3"\n[deletion.object_stores.s3]\n{place}read_timeout_s = 60\n'


_TABLE: Final = f'[[deletion.object_stores]]\nname = "{STORE}"\ndrivers = ["{DRIVER}"]\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="An S3 server on loopback with very many offloaded ledgers")
    parser.add_argument("--objects", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with moto_server.moto_server(arguments.port) as server:
        moto_server.make_bucket(server.endpoint_url, BUCKET)
        backend = s3_backends[MOTO_ACCOUNT]["aws"]
        for key, ledger in ManyLedgers(arguments.objects).entries():
            metadata = {f"x-amz-meta-{name}": value for name, value in ledger.object_metadata.items()}
            backend.put_object(BUCKET, key, BODY).set_metadata(metadata)
        arguments.ready_file.touch()
        ended.wait()


if __name__ == "__main__":
    main()
