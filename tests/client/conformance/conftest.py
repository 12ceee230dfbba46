"""Both clients for every test, connected to a scripted daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import pytest
import pytest_asyncio

import tarry
import tarry.aio
from tests.client import conftest, fake_daemon
from tests.client.conformance import threaded

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
