"""Where the commands write: results on standard output, everything else on standard error.

Owns: the two consoles, the form of messages, JSON, and progress. Does not own: what is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOMS: Final = ("batch",)
"""The packages whose messages people want to see; of all others only warnings and errors."""


def results() -> Console:
    """For what was asked for."""
    return Console()


def configure(*, quiet: bool) -> None:
    """Messages of the jobs to standard error: from INFO on, with `quiet` from WARNING on."""
    destination = _ToConsole(Console(stderr=True))
    destination.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [destination]
    root.setLevel(logging.WARNING)
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.WARNING if quiet else logging.INFO)


class _ToConsole(logging.Handler):
    """Lines as they are: not wrapped, and not torn by a progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), soft_wrap=True, markup=False, highlight=False)


def console() -> Console:
    """For messages and progress; the one that messages of the log go to."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _ToConsole):
            return handler.console
    return Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document. `value`: of what msgspec can encode."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


@contextmanager
def progress(what: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """A bar for work that is under way: the function is called with (done, total) and, if that has changed, what it is
    that is done; from any thread.

    Nothing is drawn where standard error is no terminal, or if not `shown`.
    """
    to = console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=to, transient=True, disable=not (shown and to.is_terminal)) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, description: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield advance
