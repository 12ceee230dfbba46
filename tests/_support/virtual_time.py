"""For a folder whose tests run in virtual time: its `conftest.py` imports both names.

Owns: the loop that such tests run on, and the daemons on one store in memory.
Does not own: either of them (`virtual_loop`, `engine_fixture`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest_asyncio

from storage_backends import crash_points
from tests._support.engine_fixture import EngineFixture
from tests._support.virtual_loop import VirtualLoop

__all__ = ["machines", "pytest_asyncio_loop_factories"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"virtual": VirtualLoop}


@pytest_asyncio.fixture
async def machines() -> AsyncIterator[EngineFixture]:
    fixture = EngineFixture()
    with crash_points.intercepted(fixture.crash_point):
        yield fixture
        await fixture.close()
    if not fixture.faults_may_miss:
        assert not fixture.places_unmet(), "faults that were planned never came: the test shows nothing of them"
