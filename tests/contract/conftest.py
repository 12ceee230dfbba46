"""The stores that the contract is tried on, each empty."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from storage_backends.s3 import S3Store
from tests._support.fault_store import FaultStore
from tests._support.lost_answer_proxy import LostAnswerProxy, lost_answer_proxy
from tests._support.moto_server import MotoServer, moto_server

OpenStore = Callable[[], ObjectStore]
_prefixes = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def proxy(moto: MotoServer) -> Iterator[LostAnswerProxy]:
    with lost_answer_proxy(moto.endpoint_url) as running:
        yield running


@pytest.fixture(params=["memory", "memory behind faults", "local directory", "s3", "s3 behind a proxy"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the store under test; what is opened twice in a test are two clients of the same objects."""
    opened: list[ObjectStore] = []
    make = _maker(request, tmp_path)

    def open_it() -> ObjectStore:
        opened.append(make())
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> ObjectStore:
    return open_store()


def _maker(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    kind: str = request.param
    if kind.startswith("memory"):
        memory = MemoryStore()
        return (lambda: FaultStore(memory)) if "faults" in kind else (lambda: memory)
    if kind == "local directory":
        return lambda: LocalDirectory(tmp_path / "root")
    moto: MotoServer = request.getfixturevalue("moto")
    endpoint_url: str | None = None
    if "proxy" in kind:
        endpoint_url = request.getfixturevalue("proxy").endpoint_url
    prefix = f"tests/{next(_prefixes)}"
    settings = moto.settings("contract", endpoint_url=endpoint_url, prefix=prefix, list_page_keys=10)
    return lambda: S3Store(settings)
