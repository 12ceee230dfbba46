"""The command that looks at what comes due: watch.

Owns: its arguments, how often it looks, and which rows it has shown already.
Does not own: taking rows (`tarry.cli.dispatching`), showing results and failures (`tarry.cli.output`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from tarry import inspection
from tarry.cli import connection, output, pending
from tarry.threads import client

LOOK_EVERY_S = 1.0
# Between two looks at a long backlog so many times as long nothing is asked.
_PAUSE_IN_LOOKS = 10

_Name = tuple[int, int, int | None, int]
"""Ledger, entry, batch index and redelivery count: what comes back after a negative acknowledgement is shown again."""


def _of_receive(context: click.Context, option: click.Parameter, given: object) -> None:
    if given:
        raise click.UsageError(
            f"{option.opts[0]}: `tarry watch` only looks and has no such option; `tarry receive` takes what is due, "
            "and has it",
            context,
        )


def _options_of_receive(command: Callable[..., None]) -> Callable[..., None]:
    """What the command took when it acknowledged what it printed: whoever still gives it is told where that is now."""
    for name in ("--ack", "--no-ack", "--create"):
        command = click.option(name, is_flag=True, hidden=True, expose_value=False, callback=_of_receive)(command)
    for name in ("--permits", "--consumer"):
        command = click.option(name, multiple=True, hidden=True, expose_value=False, callback=_of_receive)(command)
    return command


@click.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--count", type=click.IntRange(min=1), help="End after so many positions.")
@_options_of_receive
@connection.connected
def watch(*, connected: client.Client, topic: str, subscription: str, count: int | None, as_json: bool) -> None:
    """Watch the positions of SUBSCRIPTION come due, and take none of them. Ctrl-C ends it.

    The command looks at the backlog every second, later when the backlog is long. Positions stay where they are, and
    are handed out to dispatchers as if nobody looked. The command does not see what is acknowledged between two looks.
    A position that was negatively acknowledged is printed again when it comes back.

    `tarry receive` takes the positions and acknowledges them.

    \b
    Examples:
      tarry watch flights departures
      tarry watch flights departures --count 100 --json
    """
    shown: set[_Name] = set()
    left = count
    try:
        while True:
            begun_s = time.monotonic()
            there: set[_Name] = set()
            for page in _pages(connected, topic, subscription):
                rows = [row for row in _due(page) if not _is_shown(row, shown, there)]
                _print(rows[:left], as_of_ms=page.as_of_ms, as_json=as_json)
                if left is not None:
                    left -= len(rows)
                    if left <= 0:
                        return
            shown = there
            time.sleep(max(LOOK_EVERY_S, _PAUSE_IN_LOOKS * (time.monotonic() - begun_s)))
    except KeyboardInterrupt:
        click.echo("", err=True)


def _pages(connected: client.Client, topic: str, subscription: str) -> Iterator[inspection.BacklogPage]:
    return iter(
        pending.Pages(
            lambda token, page_size: connected.backlog_page(topic, subscription, token, page_size=page_size), None
        )
    )


def _due(page: inspection.BacklogPage) -> Iterator[dict[str, Any]]:
    """The rows of a page that may be handed out or are, without those that wait for their redelivery."""
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
            yield {
                "ledger_id": ledger_id,
                "entry_id": entry_id,
                "deliver_at_ms": deliver_at_ms,
                "seen_at_ms": page.as_of_ms,
                "key_hash": key_hash or None,
                "state": inspection.BacklogState(state).name.lower(),
                "redelivery_count": redelivery_count,
                "batch_index": batch_index,
            }


def _is_shown(row: dict[str, Any], shown: set[_Name], there: set[_Name]) -> bool:
    """Whether an earlier look has shown it. It is noted as there."""
    name = (row["ledger_id"], row["entry_id"], row["batch_index"], row["redelivery_count"])
    there.add(name)
    return name in shown


def _print(rows: list[dict[str, Any]], *, as_of_ms: int, as_json: bool) -> None:
    if rows:
        seen = output.time_text(as_of_ms)
        click.echo("\n".join(json.dumps(row) if as_json else f"{seen}  {_text(row)}" for row in rows))


def _text(row: dict[str, Any]) -> str:
    parts = [f"ledger {row['ledger_id']}", f"entry {row['entry_id']}"]
    if row["batch_index"] is not None:
        parts.append(f"batch index {row['batch_index']}")
    # What Tarry was given by a negative acknowledgement alone was never due.
    if row["deliver_at_ms"]:
        parts.append(f"due {output.time_text(row['deliver_at_ms'])}")
    if row["redelivery_count"]:
        parts.append(f"redelivered {row['redelivery_count']}")
    return "  ".join([*parts, row["state"].replace("_", " ")])
