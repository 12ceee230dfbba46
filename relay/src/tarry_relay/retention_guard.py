"""Looks whether the source still has what waits in Tarry.

Owns: comparing the first entries of the log with the lowest pending ones, and how long it keeps messages with how long
they may wait; what happens to what is gone.
Does not own: the log, and a payload that is found to be gone when it is due (`tarry_relay.running`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import tarry
import tarry.aio
from tarry_relay import port
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings, delay_max_ms, delay_text

log = logging.getLogger(__name__)


async def finding_of_retention(
    settings: Settings, source: port.Log, client: tarry.aio.Client, topic: str
) -> port.Finding:
    """Whether the source keeps messages for longer than they may be delayed."""
    kept_ms = await source.kept_ms()
    name = settings.source.name
    if kept_ms is None:
        return port.Finding("age", True, f"source {name}: no message goes by its age")
    kept = f"source {name}: keeps a message for {delay_text(kept_ms)}"
    allowed = []
    if (most_ms := delay_max_ms(settings.source)) is not None:
        allowed.append((most_ms, f"source.delay_max is {delay_text(most_ms)}"))
    with contextlib.suppress(tarry.NotFound):
        most_ms = (await client.policy(topic)).effective.delay_max_ms
        if most_ms is not None:
            allowed.append((most_ms, f"delay_max_ms of the topic {topic} is {most_ms}, {delay_text(most_ms)}"))
    longest_ms, says = min(allowed, default=(None, "source.delay_max is not set, and the topic is not there yet"))
    if longest_ms is not None and longest_ms < kept_ms:
        return port.Finding("age", True, f"{kept}, and {says}; the rest is for outages and retries")
    return port.Finding(
        "age",
        False,
        f"{kept}, and {says}: what waits for longer ends as a dead letter. Let the source keep messages for longer "
        "than the longest delay, the longest outage and the retries together, or set source.delay_max to less than "
        f"{delay_text(kept_ms)}",
    )


class RetentionGuard:
    """Looks now and then, and tells what the source has dropped."""

    def __init__(
        self, settings: Settings, source: port.Log, client: tarry.aio.Client, generation: str, metrics: RelayMetrics
    ) -> None:
        """`generation`: of the source that the relay works for."""
        self._settings = settings
        self._source = source
        self._client = client
        self._generation = generation
        self._topic = settings.relay.topic_of(generation)
        self._metrics = metrics

    async def run(self) -> None:
        """Looks again and again. A look that fails for now is left out. Raises NotThere: the source is another one."""
        while True:
            try:
                now = await self._source.generation()
                port.must_be_same(f"source {self._settings.source.name}", self._generation, now)
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
