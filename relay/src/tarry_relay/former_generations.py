"""Ends what waits in Tarry for logs that no longer exist.

A source that was created again is another Tarry topic. Separate from `retention_guard`, which watches the present
source.
"""

from __future__ import annotations

import asyncio
import logging

import tarry
import tarry.aio
from tarry_relay import daemon_answers
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings

log = logging.getLogger(__name__)

_WAIT_S = 1.0
_ENTRY_MAX = 2**64 - 1


async def former_topics(settings: Settings, client: tarry.aio.Client, topic: str) -> list[str]:
    """Return the topics of former generations of the source whose topic is now `topic`."""
    names = [each.topic async for each in client.topics()]
    return [name for name in names if name != topic and name.startswith(settings.relay.topic_of(""))]


class FormerGenerations:
    """Turns what waits in former topics into dead letters: other messages have their positions now."""

    def __init__(self, settings: Settings, client: tarry.aio.Client, topic: str, metrics: RelayMetrics) -> None:
        self._settings = settings
        self._client = client
        self._topic = topic
        self._metrics = metrics

    async def run(self) -> None:
        """Look again and again; skip a look that fails temporarily."""
        while True:
            try:
                await self.look()
            except tarry.TarryError as error:
                if not (daemon_answers.passes(error) or isinstance(error, tarry.NotFound)):
                    raise
                log.warning("cannot look what waits for former sources", extra={"error": str(error)})
            await asyncio.sleep(self._settings.source.retention_every_s)

    async def look(self) -> None:
        """Turn due rows of former topics into dead letters, and pending ones if the settings say so."""
        for topic in await former_topics(self._settings, self._client, self._topic):
            stats = await self._client.stats(topic)
            named = [each for each in stats.subscriptions if each.subscription == self._settings.relay.subscription]
            # A remaining dispatcher has not noticed yet, or is the relay of another source.
            if not named or named[0].dispatchers:
                continue
            if self._settings.source.retention == "dead_letter" and (stats.pending or named[0].backlog):
                self._tell(topic, await self._trim(topic))
            elif named[0].backlog:
                self._tell(topic, await self._reject(topic))

    async def _trim(self, topic: str) -> int:
        """Turn all that waits there into dead letters; return how many."""
        ledgers = list(dict(await self._client.retention(topic)))
        if not ledgers:
            return 0
        entries = [_ENTRY_MAX] * len(ledgers)
        name = self._settings.relay.subscription
        trimmed = await self._client.trim(topic, ledgers, entries, subscription=name, dead_letter=True)
        return trimmed.dead_lettered

    async def _reject(self, topic: str) -> int:
        """Turn due rows into dead letters, with the reason; return how many."""
        relay = self._settings.relay
        generation = topic.removeprefix(relay.topic_of(""))
        reason = (
            f"payload gone: source {self._settings.source.name} was created again, and this was in generation "
            f"{generation}"
        )
        rejected = 0
        async with self._client.subscribe(topic, relay.subscription, permits=relay.permits) as subscription:
            while (batch := await subscription.receive(_WAIT_S, max_rows=relay.rows)) is not None:
                rejected += (await subscription.reject(batch, reason)).dead_lettered
        return rejected

    def _tell(self, topic: str, dead_letters: int) -> None:
        if not dead_letters:
            return
        self._metrics.lost.inc(dead_letters)
        log.error(
            "the source was created again, and its waiting messages are gone",
            extra={"topic": topic, "dead_letters": dead_letters},
        )
