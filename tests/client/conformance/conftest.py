"""Both clients for every test, connected to a scripted daemon; real daemons for those that want one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import pytest_asyncio

import tarry
import tarry.aio
from examples import processes
from tests._support.processes import Daemons
from tests.client import conftest
from tests.client._support import fake_daemon
from tests.client.conformance._support import threaded

Connect: TypeAlias = Callable[..., tarry.aio.Client]
"""Makes a client with the arguments of `tarry.Client`; it is closed with the test."""


@pytest.fixture(params=["threads", "event loop"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def connect(kind: str) -> AsyncIterator[Connect]:
    made: list[tarry.aio.Client] = []

    def make(target: str, **named: Any) -> tarry.aio.Client:
        client = (
            threaded.threaded(tarry.Client(target, **named)) if kind == "threads" else tarry.aio.Client(target, **named)
        )
        made.append(client)
        return client

    async with AsyncExitStack() as closing:
        yield make
        for client in made:
            closing.push_async_callback(client.close)


@pytest.fixture
def client(daemon: fake_daemon.FakeDaemon, connect: Connect) -> tarry.aio.Client:
    return connect(daemon.address, timeout_s=fake_daemon.WAIT_S, retry_policy=conftest.AT_ONCE)


@contextmanager
def serving(directory: Path, settings: dict[str, object]) -> Iterator[processes.DaemonProcess]:
    """A real daemon with a store of its own in the directory."""
    daemons = Daemons(directory)
    try:
        daemon = daemons.make("tarryd", settings | processes.local_store(directory / "root"))
        daemon.start_serving()
        yield daemon
    finally:
        daemons.end()


@pytest.fixture(scope="module")
def daemon_settings() -> dict[str, object]:
    """Of the real daemons of a module."""
    return {"daemon.shards": 4}


@pytest.fixture(scope="module")
def shared_daemon(
    tmp_path_factory: pytest.TempPathFactory, daemon_settings: dict[str, object]
) -> Iterator[processes.DaemonProcess]:
    with serving(tmp_path_factory.mktemp("daemon"), daemon_settings) as daemon:
        yield daemon


@pytest.fixture
def mortal_daemon(tmp_path: Path, daemon_settings: dict[str, object]) -> Iterator[processes.DaemonProcess]:
    """One that the test may kill."""
    with serving(tmp_path, daemon_settings) as daemon:
        yield daemon


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """One of its own for each test and client."""
    return str(request.node.name)
