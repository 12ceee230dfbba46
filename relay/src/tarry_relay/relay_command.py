"""The command `tarry-relay`.

Owns: its commands, their output and exit status, signals, and how the log is written.
Does not own: the work.

Exit status: 0 done, or all is well; 1 it cannot go on; 2 wrong usage or settings; 3 an end cannot be reached; 4 `check`
found something; 5 a message is bad, and `source.on_bad` is "stop".
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

import tarry
from tarry_relay import ends, port, relay_settings, told_by_http
from tarry_relay.former_generations import former_topics
from tarry_relay.passage import CannotBeRefused
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.retention_guard import RetentionGuard, finding_of_retention
from tarry_relay.running import BadMessage, Relay
from tarry_relay.sorting import Sorting, refuse_rounds

log = logging.getLogger("tarry_relay")

EXIT_ENDED = 1
EXIT_SETTINGS = 2
EXIT_UNREACHABLE = 3
EXIT_FOUND = 4
EXIT_STOPPED = 5
_RETRY_S = 1.0
_NO_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        entry: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _NO_FIELDS},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, or all is well; 1 it cannot go on; 2 wrong usage or settings; 3 an end cannot be "
    "reached; 4 check found something; 5 a message is bad, and source.on_bad is 'stop'.",
)
@click.version_option(package_name="tarry-relay")
def main() -> None:
    """Delayed messages for Kafka, NATS and Redis Streams: what a log has is published when its time has come.

    Each command takes a FILE in TOML, which says what the relay stands between.
    """


_settings_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_as_json = click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")


@main.command(short_help="Relay until SIGTERM or SIGINT.")
@_settings_file
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def run(file: Path, log_level: str) -> None:
    """Relays until SIGTERM or SIGINT, and then until what is under way has ended.

    An end that does not answer is asked again and again. The log is JSON on standard error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    with _failures():
        settings = relay_settings.load(file)
        metrics = RelayMetrics()
        with told_by_http.serving(settings.relay.listen, metrics) as address:
            if address is not None:
                log.info("serves metrics and health", extra={"address": address})
            asyncio.run(_run(settings, metrics))


async def _run(settings: relay_settings.Settings, metrics: RelayMetrics) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    while not ending.is_set():
        try:
            async with ends.opened(settings) as opened:
                refuse_rounds(settings, opened.broker)
                generation = await opened.broker.log.generation()
                sorting = Sorting(settings.source, settings.targets, opened.broker)
                relay = Relay(
                    settings,
                    sorting,
                    broker=opened.broker,
                    client=opened.client,
                    generation=generation,
                    metrics=metrics,
                )
                await relay.run(ending)
        except* (port.NotThere, port.Unreachable) as failures:
            await _begin_again("broker", failures, metrics, ending)
        except* (tarry.Unavailable, tarry.DeadlineExceeded) as failures:
            await _begin_again("daemon", failures, metrics, ending)


async def _begin_again(
    end: str, failures: BaseExceptionGroup[Exception], metrics: RelayMetrics, ending: asyncio.Event
) -> None:
    """Tells why, and waits a little. What was under way comes again."""
    error = str(_first(failures))
    metrics.failed(end, error)
    log.warning("begins again", extra={"end": end, "error": error})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RETRY_S):
            await ending.wait()


@main.command(short_help="Look whether both ends are as a relay needs them.")
@_settings_file
@_as_json
def check(file: Path, as_json: bool) -> None:
    """Looks at the file, at both ends and at their clocks, and changes nothing. But a source of Redis gets a group,
    which a relay would make, too: its name is kept with the stream, and tells it from one that is made anew.

    Exit status 4: something is not as a relay needs it.
    """
    with _failures():
        found = asyncio.run(_check(relay_settings.load(file), tell=not as_json))
    if as_json:
        click.echo(json.dumps([{"name": each.name, "good": each.is_good, "text": each.text} for each in found]))
    if not all(each.is_good for each in found):
        sys.exit(EXIT_FOUND)


async def _check(settings: relay_settings.Settings, *, tell: bool) -> list[port.Finding]:
    """What was found. `tell`: each is told as soon as it is."""
    found = []
    async for each in _findings(settings):
        found.append(each)
        if tell:
            click.echo(f"{'ok' if each.is_good else 'WRONG':5} {each.name}: {each.text}")
    return found


async def _findings(settings: relay_settings.Settings) -> AsyncIterator[port.Finding]:
    async with ends.opened(settings) as opened:
        refuse_rounds(settings, opened.broker)
        async for each in opened.broker.findings():
            yield each
        asked_at_ms = port.now_ms()
        page = await opened.client.topics_page(page_size=1)
        yield port.finding_of_clock("Tarry", page.as_of_ms, asked_at_ms)
        topics = [each.topic async for each in opened.client.topics()]
        yield port.Finding("daemon", True, f"{settings.daemon.address} answers and has {len(topics)} topics")
        with contextlib.suppress(port.NotThere):
            # What the broker says of a source that is not there is found above.
            topic = settings.relay.topic_of(await opened.broker.log.generation())
            yield await finding_of_retention(settings, opened.broker.log, opened.client, topic)


@main.command(short_help="Show what waits, what is due, and dead letters.")
@_settings_file
@_as_json
def status(file: Path, as_json: bool) -> None:
    """Shows what waits, what is due, and what has become a dead letter of Tarry."""
    with _failures():
        told = asyncio.run(_status(relay_settings.load(file)))
    if as_json:
        click.echo(json.dumps(told))
        return
    width = max(map(len, told))
    for name, value in told.items():
        click.echo(f"{name:{width}}  {value if isinstance(value, str) else f'{value:,}'}")


async def _status(settings: relay_settings.Settings) -> dict[str, str | int]:
    async with ends.opened(settings) as opened:
        generation = await opened.broker.log.generation()
        topic = settings.relay.topic_of(generation)
        stats = await opened.client.stats(topic)
        told: dict[str, str | int] = {"topic": topic, "pending": stats.pending}
        for each in stats.subscriptions:
            if each.subscription == settings.relay.subscription:
                told |= {
                    "subscription": each.subscription,
                    "due": each.backlog,
                    "in flight": each.in_flight,
                    "handed back": each.nacked,
                    "dead letters": each.dead_letters,
                    "relays": each.dispatchers,
                }
        guard = RetentionGuard(settings, opened.broker.log, opened.client, generation, RelayMetrics())
        told["cut ledgers"] = len(await guard.cut())
        told["former generations"] = ", ".join(await former_topics(settings, opened.client, topic)) or 0
    return told


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Tells a failure in a line and ends with its status; of a bug the whole story."""
    try:
        yield
    except* relay_settings.SettingsError as failures:
        _end(str(_first(failures)), EXIT_SETTINGS)
    except* port.Unreachable as failures:
        _end(str(_first(failures)), EXIT_UNREACHABLE)
    except* (tarry.Unavailable, tarry.DeadlineExceeded) as failures:
        _end(f"the daemon cannot be reached, by daemon.address: {_first(failures)}", EXIT_UNREACHABLE)
    except* BadMessage as failures:
        _end(str(_first(failures)), EXIT_STOPPED)
    except* (port.NotThere, CannotBeRefused, tarry.TarryError) as failures:
        _end(str(_first(failures)), EXIT_ENDED)


def _end(text: str, status: int) -> None:
    click.echo(f"tarry-relay: {text}", err=True)
    sys.exit(status)


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


if __name__ == "__main__":
    main()
