"""`grpc.health.v1`: the engine's health, for the daemon ("") and for each service.

Owns: telling it to those who ask and watch, to the metrics and to the log. Does not own: what healthy means (engine).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2

from daemon import metrics

if TYPE_CHECKING:
    from daemon.engine.engine import Engine

log = logging.getLogger(__name__)


class HealthReport:
    """Follows the engine's health until it is closed."""

    def __init__(self, engine: Engine, service_names: Sequence[str], daemon_metrics: metrics.Metrics) -> None:
        self.servicer = health.aio.HealthServicer()
        self._engine = engine
        self._service_names = ("", *service_names)
        self._metrics = daemon_metrics
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Tells the health as it is now, then its changes."""
        await self._tell()
        self._engine.on_health_change(self._changed.set)
        self._changed.set()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Tells NOT_SERVING, for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._metrics.set_serving(False)
        await self.servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        told = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            now = self._engine.health
            if now != told:
                told = now
                await self._tell()
                if now.serving:
                    log.info("serving")
                else:
                    log.warning("not serving", extra={"reason": now.reason})

    async def _tell(self) -> None:
        serving = self._engine.health.serving
        self._metrics.set_serving(serving)
        states = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self.servicer.set(name, states.SERVING if serving else states.NOT_SERVING)
