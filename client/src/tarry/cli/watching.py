"""The command that shows what comes due: watch.

It takes no rows; `tarry.cli.dispatching` does.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from tarry import inspection
from tarry.cli import connection, output, pending
from tarry.threads import client

LOOK_EVERY_S = 1.0
# Rows due this long after the next look are read too, because clocks and ticks differ (seconds).
_AHEAD_S = 2.0
# The pause between two looks is this many times as long as a look, so that a long backlog is read less often.
_PAUSE_IN_LOOKS = 10

_Name = tuple[int, int, int | None, int]
"""Ledger, entry, batch index and redelivery count: a redelivered position is shown again."""


def _of_receive(context: click.Context, option: click.Parameter, given: object) -> None:
    if given:
        raise click.UsageError(
            f"{option.opts[0]}: `tarry watch` only shows positions and has no such option; `tarry receive` takes them, "
            "and has it",
            context,
        )


def _options_of_receive(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the hidden former options, which now report that `tarry receive` has them."""
    for name in ("--ack", "--no-ack", "--create"):
        command = click.option(name, is_flag=True, hidden=True, expose_value=False, callback=_of_receive)(command)
    for name in ("--permits", "--consumer"):
        command = click.option(name, multiple=True, hidden=True, expose_value=False, callback=_of_receive)(command)
    return command


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many positions.")
@_options_of_receive
@connection.connected
def watch(*, connected: client.Client, topic: str, subscription: str, count: int | None, as_json: bool) -> None:
    """Show the positions of SUBSCRIPTION as they come due, and take none of them. Ctrl-C ends the command.

    The command looks every second, and less often when the backlog is long. Positions stay where they are, and
    dispatchers receive them as usual. `tarry receive` takes positions and acknowledges them.
    The state of a position is ready, in flight, or gone: acknowledged, cancelled or rescheduled before the command
    looked again. A position that was negatively acknowledged is printed again when it is redelivered.

    \b
    Examples:
      tarry watch flights departures
      tarry watch flights departures --count 100 --json
    """
    looks = _Looks(connected, topic, subscription)
    came = itertools.islice(looks.forever(), count)
    try:
        for row in came:
            text = "  ".join([*output.row_texts(row), row["state"].replace("_", " ")])
            click.echo(json.dumps(row) if as_json else f"{output.time_text(row['seen_at_ms'])}  {text}")
    except KeyboardInterrupt:
        click.echo("", err=True)


class _Looks:
    """Repeated looks at one subscription."""

    def __init__(self, connected: client.Client, topic: str, subscription: str) -> None:
        self._connected = connected
        self._topic = topic
        self._subscription = subscription
        self._shown: set[_Name] = set()
        self._coming: dict[_Name, dict[str, Any]] = {}
        self._as_of_ms = time.time_ns() // 1_000_000

    def forever(self) -> Iterator[dict[str, Any]]:
        """Yield what has come due since the look before; the first look yields everything due."""
        pause_s = LOOK_EVERY_S
        while True:
            begun_s = time.monotonic()
            yield from self._look(ahead_s=2 * pause_s + _AHEAD_S)
            pause_s = max(LOOK_EVERY_S, _PAUSE_IN_LOOKS * (time.monotonic() - begun_s))
            time.sleep(pause_s)

    def _look(self, *, ahead_s: float) -> Iterator[dict[str, Any]]:
        # Waiting rows are read first: one that has come due since and is in no backlog is gone.
        waiting = self._waiting(self._as_of_ms + int(ahead_s * 1000))
        there: set[_Name] = set()
        for page in self._backlog():
            self._as_of_ms = page.as_of_ms
            for row in _due(page):
                there.add(_name(row))
                if _name(row) not in self._shown:
                    yield row
        for name, row in self._coming.items():
            if name not in waiting and name not in there:
                yield row | {"seen_at_ms": self._as_of_ms, "state": "gone"}
        self._shown, self._coming = there, waiting

    def _waiting(self, until_ms: int) -> dict[_Name, dict[str, Any]]:
        """Return the rows that come due before a moment."""
        pages = pending.Pages(
            lambda token, page_size: self._connected.scheduled_page(
                self._topic, token, until_ms=until_ms, subscription=self._subscription, page_size=page_size
            ),
            None,
        )
        return {_name(row): row for page in pages for row in _not_due(page)}

    def _backlog(self) -> Iterator[inspection.BacklogPage]:
        return iter(
            pending.Pages(
                lambda token, page_size: self._connected.backlog_page(
                    self._topic, self._subscription, token, page_size=page_size
                ),
                None,
            )
        )


def _name(row: dict[str, Any]) -> _Name:
    return row["ledger_id"], row["entry_id"], row["batch_index"], row["redelivery_count"]


def _not_due(page: inspection.ScheduledPage) -> Iterator[dict[str, Any]]:
    columns = (page.ledger_id, page.entry_id, page.deliver_at_ms, page.key_hash)
    for ledger_id, entry_id, deliver_at_ms, key_hash in zip(*(each.tolist() for each in columns), strict=True):
        yield _row(ledger_id, entry_id, deliver_at_ms, key_hash, page.as_of_ms, "pending", 0, None)


def _due(page: inspection.BacklogPage) -> Iterator[dict[str, Any]]:
    """Yield the rows of a page that are ready or in flight, without those that wait for redelivery."""
    columns = zip(
        page.ledger_id.tolist(),
        page.entry_id.tolist(),
        page.deliver_at_ms.tolist(),
        page.key_hash.tolist(),
        page.state.tolist(),
        page.redelivery_count.tolist(),
        output.batch_indexes(page.batch_index, len(page)),
        strict=True,
    )
    for ledger_id, entry_id, deliver_at_ms, key_hash, state, redelivery_count, batch_index in columns:
        if state != inspection.BacklogState.NACKED:
            named = inspection.BacklogState(state).name.lower()
            yield _row(
                ledger_id, entry_id, deliver_at_ms, key_hash, page.as_of_ms, named, redelivery_count, batch_index
            )


def _row(
    ledger_id: int,
    entry_id: int,
    deliver_at_ms: int,
    key_hash: int,
    seen_at_ms: int,
    state: str,
    redelivery_count: int,
    batch_index: int | None,
) -> dict[str, Any]:
    """Return a row as it is printed."""
    return {
        "ledger_id": ledger_id,
        "entry_id": entry_id,
        "deliver_at_ms": deliver_at_ms,
        "seen_at_ms": seen_at_ms,
        "key_hash": key_hash or None,
        "state": state,
        "redelivery_count": redelivery_count,
        "batch_index": batch_index,
    }
