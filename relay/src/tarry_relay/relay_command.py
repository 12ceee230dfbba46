"""The command `tarry-relay`: its subcommands, their output and exit status, signals, and the form of the log.

Exit status: 0 done, or all is well; 1 it cannot go on; 2 wrong usage or settings; 3 an end cannot be reached; 4
something is not as a relay needs it; 5 a message is bad, and `source.on_bad` is "stop".
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import msgspec.structs

import tarry
from tarry.printable import printable
from tarry_relay import port, relay_settings, sessions, status_endpoint
from tarry_relay.former_generations import former_topics
from tarry_relay.health import Health
from tarry_relay.port import Grade
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.retention_guard import RetentionGuard
from tarry_relay.running import BadMessage

log = logging.getLogger("tarry_relay")

EXIT_ENDED = 1
EXIT_SETTINGS = 2
EXIT_UNREACHABLE = 3
EXIT_FOUND = 4
EXIT_STOPPED = 5
_LAST_S = 4.5
"""Time beyond `relay.drain_s` that the process may take to end after a signal (seconds)"""
_ASK_S = 5.0
"""Longest wait of `check` and `status` for an answer of the daemon (seconds)"""
_WORDS = {Grade.OK: "ok", Grade.WARNING: "warn", Grade.MISSING: "WRONG", Grade.WRONG: "WRONG"}
_NO_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A formatter of one JSON object a line: time, level, logger, message, fields, and `exception` if there is one."""

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
        # Names come from anyone, and lines are shown on terminals.
        return json.dumps(entry, default=str, separators=(",", ":"))


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, or all is well; 1 it cannot go on; 2 wrong usage or settings; 3 an end cannot be "
    "reached; 4 something is not as a relay needs it; 5 a message is bad, and source.on_bad is 'stop'.",
)
@click.version_option(package_name="tarry-relay")
def main() -> None:
    """Publish messages of Kafka, NATS and Redis Streams when they are due.

    Each command takes a FILE in TOML with the settings of both ends.
    """


_settings_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@main.command(short_help="Relay until SIGTERM or SIGINT.")
@_settings_file
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def run(file: Path, log_level: str) -> None:
    """Relay until SIGTERM or SIGINT, then finish what is in flight, for at most relay.drain_s.

    Both ends are first judged as by check; the command exits with status 4 if something is wrong. It waits for an end
    that does not answer, and for a source that does not exist. The log is JSON on standard error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    with _failures():
        settings = relay_settings.load(file)
        metrics = RelayMetrics(Health())
        with status_endpoint.serving(settings.relay.listen, metrics) as address:
            if address is not None:
                log.info("serves metrics and health", extra={"address": address})
            asyncio.run(_run(settings, metrics))


async def _run(settings: relay_settings.Settings, metrics: RelayMetrics) -> None:
    ending = asyncio.Event()

    def end() -> None:
        if not ending.is_set():
            _end_at_last(settings.relay.drain_s + _LAST_S)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    await sessions.Sessions(settings, metrics).run(ending)


def _end_at_last(after_s: float) -> None:
    """End the process after that time, even if a broker's library or thread still waits.

    Messages that are not committed, or not acknowledged, are delivered again.
    """

    def end_now() -> None:
        log.error("ends although not everything has ended: an end does not answer", extra={"after_s": after_s})
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(EXIT_UNREACHABLE)

    timer = threading.Timer(after_s, end_now)
    timer.daemon = True
    timer.start()


@main.command(short_help="Judge whether both ends are as a relay needs them.")
@_settings_file
@_as_json
def check(file: Path, as_json: bool) -> None:
    """Judge the file, both ends and their clocks, and change nothing.

    The exception is a source of Redis, which gets a group that a relay would create too: its name is stored with the
    stream, and distinguishes it from one that is created again.
    Exit status 4: something is wrong or missing. Warnings do not count.
    """
    with _failures():
        found = asyncio.run(_check(_asking(relay_settings.load(file)), tell=not as_json))
    is_good = [each.grade in (Grade.OK, Grade.WARNING) for each in found]
    if as_json:
        told = [
            {"name": each.name, "good": good, "grade": each.grade.value, "text": each.text}
            for each, good in zip(found, is_good, strict=True)
        ]
        click.echo(json.dumps(told))
    if not all(is_good):
        sys.exit(EXIT_FOUND)


async def _check(settings: relay_settings.Settings, *, tell: bool) -> list[port.Finding]:
    """Return the findings; with `tell`, print each as soon as it is there."""
    found = []
    async with sessions.opened(settings) as ends:
        async for each in sessions.judged(settings, ends):
            found.append(each)
            if tell:
                click.echo(printable(f"{_WORDS[each.grade]:5} {each.name}: {each.text}"))
    return found


def _asking(settings: relay_settings.Settings) -> relay_settings.Settings:
    """Return settings for a command whose caller waits."""
    timeout_s = min(settings.daemon.timeout_s, _ASK_S)
    daemon = msgspec.structs.replace(settings.daemon, timeout_s=timeout_s)
    return msgspec.structs.replace(settings, daemon=daemon)


@main.command(short_help="Show what waits, what is due, and dead letters.")
@_settings_file
@_as_json
def status(file: Path, as_json: bool) -> None:
    """Show pending and due messages, and dead letters of Tarry."""
    with _failures():
        told = asyncio.run(_status(_asking(relay_settings.load(file))))
    if as_json:
        click.echo(json.dumps(told))
        return
    width = max(map(len, told))
    for name, value in told.items():
        click.echo(printable(f"{name:{width}}  {value if isinstance(value, str) else f'{value:,}'}"))


async def _status(settings: relay_settings.Settings) -> dict[str, str | int]:
    async with sessions.opened(settings) as opened:
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
        guard = RetentionGuard(settings, opened.broker, opened.client, generation, RelayMetrics(Health()))
        told["cut ledgers"] = len(await guard.cut())
        told["former generations"] = ", ".join(await former_topics(settings, opened.client, topic)) or 0
    return told


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Print a failure in a line and exit with its status; print the traceback of a bug."""
    try:
        yield
    except relay_settings.SettingsError as error:
        _end(str(error), EXIT_SETTINGS)
    except sessions.WrongEnds as error:
        for each in error.findings:
            click.echo(printable(f"tarry-relay: {each.name}: {each.text}"), err=True)
        _end("does not start; `tarry-relay check` shows the same, and source.accept may accept it", EXIT_FOUND)
    except (port.Unreachable, port.SessionOver) as error:
        _end(str(error), EXIT_UNREACHABLE)
    except (tarry.Unavailable, tarry.DeadlineExceeded) as error:
        _end(f"the daemon cannot be reached, by daemon.address: {error}", EXIT_UNREACHABLE)
    except BadMessage as error:
        _end(str(error), EXIT_STOPPED)
    except (port.NotThere, tarry.TarryError) as error:
        _end(str(error), EXIT_ENDED)


def _end(text: str, status: int) -> None:
    click.echo(printable(f"tarry-relay: {text}"), err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
