"""Opens, judges and reopens the two ends of a relay, and decides what a failure ends.

The process ends if its file or the first judgement of its ends is wrong, if a bad message meets `source.on_bad =
"stop"`, or by a signal. Anything else ends a session: it is logged once, makes the relay unhealthy, and another session
is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

import tarry
import tarry.aio
from tarry_relay import port, relay_settings
from tarry_relay.health import AGAIN_S
from tarry_relay.port import Finding, Grade
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import Settings, SettingsError
from tarry_relay.retention_guard import accepted, findings_of_waiting
from tarry_relay.running import BadMessage, Relay
from tarry_relay.sorting import refuse_rounds

log = logging.getLogger(__name__)

_ADAPTERS = {
    relay_settings.Kafka: ("kafka", "confluent_kafka"),
    relay_settings.Nats: ("nats", "nats"),
    relay_settings.Redis: ("redis", "redis"),
}
"""Name and library of each broker"""
_BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)

_ASK_S = 5.0
"""Longest answer of the daemon to the first question of a session (seconds)"""
_LONG_S = 60.0
"""Length of a session that restarts the back-off (seconds)"""


class WrongEnds(Exception):
    """Ends that are not as a relay needs them. `findings` are the wrong ones."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("; ".join(each.text for each in findings))
        self.findings = findings


class NotYet(Exception):
    """A log that the relay reads and that does not exist yet. The relay waits for it."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """The two ends of a relay."""

    broker: port.Broker
    client: tarry.aio.Client


@contextlib.asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Ends]:
    """Connect to the broker, with credentials read again; Tarry is reached with the first call.

    Raises SettingsError, Unreachable.
    """
    kind, library = _ADAPTERS[type(settings.broker)]
    try:
        adapter = importlib.import_module(f"tarry_relay.{kind}_broker")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise SettingsError(
            f"broker.kind is {kind!r}, whose library is missing: install tarry-relay[{kind}]"
        ) from error
    async with adapter.opened(settings, settings.broker) as broker, relay_settings.client_of(settings.daemon) as client:
        yield Ends(broker, client)


async def judged(settings: Settings, ends: Ends) -> AsyncIterator[Finding]:
    """Judge everything that a relay needs of both ends; change nothing.

    The exception is a source of Redis, which gets a group whose name distinguishes it from one that is created again.
    Raises SettingsError if a target is impossible, NotThere, Unreachable, and what the client raises.
    """
    refuse_rounds(settings, ends.broker)
    has_source = True
    async for each in ends.broker.findings():
        has_source &= each.name != "source" or each.grade is Grade.OK
        for finding in accepted(settings, [each]):
            yield finding
    asked_at_ms = port.now_ms()
    page = await ends.client.topics_page(page_size=1, timeout_s=min(_ASK_S, settings.daemon.timeout_s))
    yield port.finding_of_clock("Tarry", page.as_of_ms, asked_at_ms)
    yield Finding("daemon", Grade.OK, f"{settings.daemon.address} answers")
    if not has_source:
        return
    topic = settings.relay.topic_of(await ends.broker.log.generation())
    try:
        for finding in accepted(settings, await findings_of_waiting(settings, ends.broker.log, ends.client, topic)):
            yield finding
    except tarry.Unsupported as error:
        yield Finding("daemon", Grade.WRONG, f"{settings.daemon.address}: {error.message}")


class Sessions:
    """The sessions of one process, one after the other."""

    def __init__(self, settings: Settings, metrics: RelayMetrics) -> None:
        """Begin without a session."""
        self._settings = settings
        self._metrics = metrics
        self._health = metrics.health
        self._has_begun = False
        self._told = ""
        self._told_s = 0.0
        self._untold = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Relay until `ending` is set.

        Raises SettingsError and WrongEnds before the first session, BadMessage at any time.
        """
        failures = 0
        self._health.explain("session", "is being opened")
        while not ending.is_set():
            began_s = time.monotonic()
            try:
                await port.asked(self._session(ending))
            except BadMessage:
                raise
            except (SettingsError, WrongEnds) as error:
                if not self._has_begun:
                    raise
                self._fail("the session cannot be opened", error)
            except NotYet as error:
                self._fail("waits", error)
                failures = min(failures, 1)
            except (port.Unreachable, tarry.Unavailable, tarry.DeadlineExceeded) as error:
                end = "broker" if isinstance(error, port.Unreachable) else "daemon"
                self._metrics.failed(end, str(error))
                self._health.explain("session", f"{end}: {error}")
                failures = min(failures, 1)
            except (port.SessionOver, port.NotThere, tarry.TarryError) as error:
                self._fail("the session has ended", error)
            except Exception as error:  # noqa: BLE001 - whatever it is ends the session alone
                self._metrics.surprises.labels("session").inc()
                self._fail("the session has ended by an unexpected exception", error, with_traceback=True)
            else:
                return
            failures = 0 if time.monotonic() - began_s > _LONG_S else failures
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]):
                    await ending.wait()
            failures += 1

    async def _session(self, ending: asyncio.Event) -> None:
        """Open both ends, judge them, and relay. Raises what ends the session."""
        settings = self._settings
        async with opened(settings) as ends:
            self._health.answered("broker")
            found = []
            async for each in judged(settings, ends):
                if each.grade is Grade.MISSING and each.name in ("source", "retry"):
                    raise NotYet(each.text)
                found.append(each)
            self._health.answered("daemon")
            wrong = [each for each in found if each.grade is Grade.WRONG]
            if wrong and not self._has_begun:
                raise WrongEnds(wrong)
            warnings = [each for each in found if each.grade is Grade.WARNING]
            self._metrics.warnings = len(warnings)
            if not self._has_begun:
                for each in warnings:
                    log.warning("a finding", extra={"finding": each.name, "text": each.text})
            self._has_begun = True
            self._metrics.sessions.inc()
            relay = Relay(
                settings,
                broker=ends.broker,
                client=ends.client,
                generation=await ends.broker.log.generation(),
                metrics=self._metrics,
                findings=found,
            )
            self._health.settle("session")
            await relay.run(ending)

    def _fail(self, message: str, error: Exception, *, with_traceback: bool = False) -> None:
        """Log the end of a session once, and again each minute with the count while the reason stays the same."""
        text = f"{type(error).__name__}: {error}" if with_traceback else str(error)
        self._health.explain("session", f"{message}: {text}")
        now_s = time.monotonic()
        if text == self._told and now_s - self._told_s < AGAIN_S:
            self._untold += 1
            return
        fields: dict[str, object] = {"error": text}
        if text == self._told:
            fields["more_times"] = self._untold
        self._told, self._told_s, self._untold = text, now_s, 0
        log.warning(message, extra=fields, exc_info=error if with_traceback else None)
