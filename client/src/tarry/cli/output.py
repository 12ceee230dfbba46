"""How the command line shows results, progress and failures.

Owns: JSON for programs; tables in a terminal, tab-separated lines in a pipe; progress on stderr; what to do about a
failure, and the exit status.
Does not own: what is shown (the modules of the commands).

Exit status: 0 done, 1 refused by the daemon, 2 wrong usage or input, 3 the daemon cannot be reached in time.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table

from tarry import errors, results

EXIT_REFUSED = 1
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3


def as_json(value: object) -> None:
    """One line of JSON; dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    click.echo(json.dumps(value))


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table in a terminal, otherwise a line of names and a line a row, separated by tabs."""
    if not sys.stdout.isatty():
        click.echo("\t".join(names))
        for row in rows:
            click.echo("\t".join(str(value) for value in row))
        return
    shown = rich.table.Table(title=rich.markup.escape(title), title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in names:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row))
    rich.console.Console().print(shown)


def facts(title: str, values: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    if not sys.stdout.isatty():
        for name, value in values.items():
            click.echo(f"{name}\t{value}")
        return
    shown = rich.table.Table(title=rich.markup.escape(title), title_justify="left", box=None, show_header=False)
    for name, value in values.items():
        shown.add_row(name, _cell(value))
    rich.console.Console().print(shown)


def time_text(at_ms: int | None) -> str:
    """Local time with milliseconds and offset; `-` when there is none."""
    if at_ms is None:
        return "-"
    try:
        at = datetime.datetime.fromtimestamp(at_ms // 1000, tz=datetime.UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return at.replace(microsecond=at_ms % 1000 * 1000).isoformat(sep=" ", timespec="milliseconds")


def rebuild_text(needed: results.RebuildNeeded) -> str:
    """What was lost with a damaged bucket, and what to do."""
    return (
        f"{needed.rows} rows of ledgers {needed.first_ledger_id} to {needed.last_ledger_id} were lost with a damaged "
        f"bucket ({needed.damage}): add them again"
    )


class Progress:
    """Rows done; shown on stderr when that is a terminal."""

    def __init__(self, bar: rich.progress.Progress, task: rich.progress.TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, rows: int) -> None:
        self._bar.advance(self._task, rows)


@contextmanager
def progress(label: str, *, total: int | None, quiet: bool) -> Iterator[Progress]:
    """A bar with count, rate and time left; `total` None when it is not known."""
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bar:
        yield Progress(bar, bar.add_task(rich.markup.escape(label), total=total))


@contextmanager
def failures(address: str) -> Iterator[None]:
    """Turns a failure into one clear line and an exit status."""
    try:
        yield
    except errors.TarryError as error:
        text, status = _explain(error, address)
        click.echo(f"tarry: {text}", err=True)
        raise click.exceptions.Exit(status) from error


def _explain(error: errors.TarryError, address: str) -> tuple[str, int]:
    last = error.last if isinstance(error, errors.DeadlineExceeded) else error
    if last is None:
        return f"{address} does not answer: {error.message}. Is it a daemon? Try a longer --timeout.", EXIT_UNREACHABLE
    match last:
        case errors.Unavailable():
            what_next = "Start it with `tarryd`, or name another with --address or TARRY_ADDRESS."
            return f"the daemon at {address} is unavailable: {last.message}. {what_next}", EXIT_UNREACHABLE
        case errors.NotOwner():
            owner = last.owner_address or "another daemon"
            return f"{last.message}. The owner is {owner}; is it reachable from here?", EXIT_UNREACHABLE
        case errors.Aborted() | errors.OutcomeUnknown():
            return f"{last.message}. It may be done or not; repeating the command is safe.", EXIT_UNREACHABLE
        case errors.InvalidArgument() | errors.OutOfRange():
            return f"{last.message}.", EXIT_INPUT
        case errors.NotFound():
            return f"{last.message}. `tarry topics` and `tarry stats TOPIC` list what exists.", EXIT_REFUSED
        case errors.ResourceExhausted():
            hint = "" if last.retry_after_ms is None else f" Try again in {last.retry_after_ms / 1000:g} s."
            return f"{last.message}.{hint}", EXIT_REFUSED
        case errors.Internal():
            return f"a bug: {last.message}. The daemon's log has more.", EXIT_REFUSED
    return f"{last}", EXIT_REFUSED


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else rich.markup.escape(str(value))
