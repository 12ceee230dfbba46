"""Judges, at start and repeatedly, whether the source keeps what waits, and finds what it has dropped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

import tarry
import tarry.aio
from tarry_relay import daemon_answers, port
from tarry_relay.port import Finding, Grade
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings, delay_max_ms, delay_text

log = logging.getLogger(__name__)


def accepted(settings: Settings, findings: Sequence[Finding]) -> list[Finding]:
    """Turn the wrong findings that `source.accept` names into warnings."""
    return [
        Finding(each.name, Grade.WARNING, f"{each.text} (accepted by source.accept)")
        if each.grade is Grade.WRONG and each.name in settings.source.accept
        else each
        for each in findings
    ]


async def findings_of_waiting(
    settings: Settings, source: port.Log, client: tarry.aio.Client, topic: str
) -> list[Finding]:
    """Judge whether the source keeps messages for as long as they wait, and has those that wait in Tarry now.

    Raises NotThere, Unreachable, and what the client raises.
    """
    found = [await _finding_of_age(settings, source, client, topic)]
    if gone := await _cut(source, client, topic):
        text = (
            f"source {settings.source.name}: {len(gone)} ledgers have lost messages that wait in Tarry; each is a dead "
            "letter when it is due, or at once with source.retention = 'dead_letter'"
        )
        found.append(Finding("gone", Grade.WARNING, text))
    return found


async def _finding_of_age(settings: Settings, source: port.Log, client: tarry.aio.Client, topic: str) -> Finding:
    kept_ms = await source.kept_ms()
    name = settings.source.name
    if kept_ms is None:
        return Finding("age", Grade.OK, f"source {name}: no message goes by its age")
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
        return Finding("age", Grade.OK, f"{kept}, and {says}; the rest is for outages and retries")
    return Finding(
        "age",
        # Without a longest delay in the file, it is unknown if a message will wait for longer.
        Grade.WRONG if settings.source.delay_max is not None else Grade.WARNING,
        f"{kept}, and {says}: what waits for longer ends as a dead letter. Let the source keep messages for longer "
        "than the longest delay, the longest outage and the retries together, or set source.delay_max to less than "
        f"{delay_text(kept_ms)}",
    )


async def _cut(source: port.Log, client: tarry.aio.Client, topic: str) -> dict[int, int]:
    """Return the source's first entry for each ledger of which waiting entries are gone."""
    try:
        lowest = dict(await client.retention(topic))
    except tarry.NotFound:
        return {}
    return _gone(lowest, await source.first_entries(list(lowest)))


def _gone(lowest: Mapping[int, int], first: Mapping[int, int]) -> dict[int, int]:
    """Return the first entry of each ledger whose lowest waiting entry lies below it."""
    return {ledger: first[ledger] for ledger, entry in lowest.items() if entry < first.get(ledger, 0)}


class RetentionGuard:
    """The judge of a running relay's source. A wrong finding stops reading, but not the relay."""

    def __init__(
        self, settings: Settings, broker: port.Broker, client: tarry.aio.Client, generation: str, metrics: RelayMetrics
    ) -> None:
        """Guard the source of this generation."""
        self._settings = settings
        self._broker = broker
        self._client = client
        self._generation = generation
        self._topic = settings.relay.topic_of(generation)
        self._metrics = metrics
        self._wrong = ""
        self._lowest_kept: dict[int, int] = {}
        """Ledger -> first entry of the source at the last look"""
        self._is_trimmed = False
        self.may_read = asyncio.Event()
        """Set while the source may be read and committed"""
        self.may_read.set()

    def judge(self, findings: Sequence[Finding]) -> None:
        """Stop reading the source if one of these findings is wrong; resume if none is."""
        wrong = "; ".join(each.text for each in findings if each.grade is Grade.WRONG)
        if wrong:
            self._metrics.health.explain("source", f"is not read: {wrong}")
            self.may_read.clear()
            if wrong != self._wrong:
                log.error("stops reading the source", extra={"wrong": wrong})
        elif self._wrong:
            log.info("reads the source again")
        if not wrong:
            self._metrics.health.settle("source")
            self.may_read.set()
        self._wrong = wrong

    async def run(self) -> None:
        """Look again and again; skip a look that fails temporarily. Raises NotThere if the source is another one."""
        while True:
            try:
                await self.look()
            except Exception as error:
                if not daemon_answers.passes(error):
                    raise
                log.warning("cannot judge the source now", extra={"error": str(error)})
            await asyncio.sleep(self._settings.source.retention_every_s)

    async def cut(self) -> dict[int, int]:
        """Return the source's first entry for each ledger of which waiting entries are gone."""
        return await _cut(self._broker.log, self._client, self._topic)

    async def look(self) -> None:
        """Judge once, and treat what the source has dropped as the settings say. Raises NotThere."""
        source = self._settings.source
        now = await self._broker.log.generation()
        port.must_be_same(f"source {source.name}", self._generation, now)
        lowest = dict(await self._client.retention(self._topic))
        first = await self._broker.log.first_entries(list(lowest))
        cut = _gone(lowest, first)
        found = [
            *await self._broker.source_findings(),
            await _finding_of_age(self._settings, self._broker.log, self._client, self._topic),
            *self._findings_of_trims(lowest, first),
        ]
        self.judge(accepted(self._settings, found))
        self._metrics.cut_ledgers = len(cut)
        if cut and source.retention == "dead_letter":
            trimmed = await self._client.trim(
                self._topic,
                list(cut),
                [entry - 1 for entry in cut.values()],
                subscription=self._settings.relay.subscription,
                dead_letter=True,
            )
            log.error("the source has dropped waiting messages", extra={"dead_letters": trimmed.dead_lettered})
        elif cut:
            log.error(
                "the source has dropped waiting messages, which become dead letters when they are due",
                extra={"ledgers": len(cut), "source": source.name},
            )

    def _findings_of_trims(self, lowest: Mapping[int, int], first: Mapping[int, int]) -> list[Finding]:
        """Judge a source whose broker does not report its limits by what it has dropped since the last look.

        A waiting message that had gone before may be one that a consumer returned late, and proves nothing.
        """
        before, self._lowest_kept = self._lowest_kept, dict(first)
        if self._broker.log.tells_limits:
            return []
        moved = {ledger for ledger, entry in first.items() if before.get(ledger, entry) < entry}
        if any(before[ledger] <= lowest[ledger] < first[ledger] for ledger in moved):
            self._is_trimmed = True
        elif not moved:
            self._is_trimmed = False
        name = self._settings.source.name
        if not self._is_trimmed:
            return [Finding("size", Grade.OK, f"source {name}: nothing that waits is trimmed")]
        text = (
            f"source {name}: messages that wait in Tarry are trimmed, for example by XADD with MAXLEN. Trim nothing "
            "that waits (`tarry retention` shows its lowest position), or name 'size' in source.accept"
        )
        return [Finding("size", Grade.WRONG, text)]
