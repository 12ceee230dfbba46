"""The real engine, or the one that stands in for it elsewhere: what is said of the wire holds for both."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from daemon import config
from daemon.owner.engine import Engine
from tests._support import real_engine
from tests._support.fake_engine import FakeEngine

ENGINES = ("engine in memory", "real engine")


@contextlib.asynccontextmanager
async def serving(name: str, settings: config.Config) -> AsyncIterator[FakeEngine | Engine]:
    """One of `ENGINES`."""
    if name == "engine in memory":
        yield FakeEngine(settings)
        return
    async with real_engine.serving(settings) as engine:
        yield engine
