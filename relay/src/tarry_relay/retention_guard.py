"""Looks whether the source still has what waits in Tarry.

Owns: comparing the first entries of the log with the lowest pending ones, and what happens to what is gone.
Does not own: the log, and a payload that is found to be gone when it is due (`tarry_relay.running`).
"""

from __future__ import annotations

import asyncio
import logging

import tarry
import tarry.aio
from tarry_relay import port
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings

log = logging.getLogger(__name__)


class RetentionGuard:
    """Looks now and then, and tells what the source has dropped."""

    def __init__(
        self, settings: Settings, source: port.Log, client: tarry.aio.Client, topic: str, metrics: RelayMetrics
    ) -> None:
        self._settings = settings
        self._source = source
        self._client = client
        self._topic = topic
        self._metrics = metrics

    async def run(self) -> None:
        """Looks again and again. A look that fails for now is left out. Raises NotThere: the source is another one."""
        made = await self._generation()
        while True:
            try:
                now = await self._generation()
                if made is not None and now is not None and now != made:
                    raise port.NotThere(f"source {self._settings.source.name}: was made anew at {now}")
                made = made or now
                await self.look()
            except (port.Unreachable, tarry.Unavailable, tarry.DeadlineExceeded, tarry.ResourceExhausted) as error:
                log.warning("cannot look what the source has dropped", extra={"error": str(error)})
            await asyncio.sleep(self._settings.source.retention_every_s)

    async def cut(self) -> dict[int, int]:
        """For each ledger with rows that the source has dropped, the first entry that the source has."""
        lowest = dict(await self._client.retention(self._topic))
        first = await self._source.first_entries(list(lowest))
        return {ledger: first[ledger] for ledger, entry in lowest.items() if entry < first.get(ledger, 0)}

    async def look(self) -> None:
        """Looks once, and does what the settings say to what the source has dropped."""
        cut = await self.cut()
        self._metrics.cut_ledgers = len(cut)
        if cut and self._settings.source.retention == "dead_letter":
            trimmed = await self._client.trim(
                self._topic,
                list(cut),
                [entry - 1 for entry in cut.values()],
                subscription=self._settings.relay.subscription,
                dead_letter=True,
            )
            log.error("the source has dropped what waits", extra={"dead_letters": trimmed.dead_lettered})
        elif cut:
            log.error(
                "the source has dropped what waits, which becomes dead letters when it is due",
                extra={"ledgers": len(cut), "source": self._settings.source.name},
            )

    async def _generation(self) -> str | None:
        try:
            return await self._source.generation()
        except port.Unreachable:
            return None
