"""`grpc.health.v1`: the engine's health, for the daemon ("") and for each service.

Owns: telling it to those who ask and watch. Does not own: what healthy means, its log and its metric (engine).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2

from daemon import call_values

if TYPE_CHECKING:
    from daemon.owner.engine import Engine


class HealthReport:
    """Follows the engine's health until it is closed."""

    def __init__(self, engine: Engine, service_names: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._engine = engine
        self._service_names = ("", *service_names)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Tells the health as it is now, then its changes."""
        self._engine.on_health_change(self._note_change)
        await self._tell()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Tells NOT_SERVING, for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.servicer.enter_graceful_shutdown()

    def _note_change(self, _: call_values.Health) -> None:
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._tell()

    async def _tell(self) -> None:
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if self._engine.health.serving else states.NOT_SERVING
        for name in self._service_names:
            await self.servicer.set(name, status)
