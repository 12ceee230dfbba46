"""The engine's tests run in virtual time, on one store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest_asyncio

from daemon.durability import crash_points
from tests.support.engine_fixture import EngineFixture
from tests.support.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"virtual": VirtualLoop}


@pytest_asyncio.fixture
async def machines() -> AsyncIterator[EngineFixture]:
    fixture = EngineFixture()
    with crash_points.intercepted(fixture.crash_point):
        yield fixture
        await fixture.close()
