"""Prints results, progress and failures of the command line.

Results are JSON for programs, tables in a terminal, and tab-separated lines in a pipe. Progress goes to stderr. A
failure is printed with what to do about it.
Exit status: 0 done, 1 refused by the daemon, 2 wrong usage or input, 3 the daemon could not be reached in time, 4
partly done: the output lists what was left.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import itertools
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
import rich.box
import rich.console
import rich.filesize
import rich.markup
import rich.progress
import rich.table
from numpy.typing import NDArray

from tarry import columns, errors, results
from tarry.printable import printable

EXIT_REFUSED = 1
EXIT_INPUT = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_ALL = 4

START_OR_NAME_ANOTHER = (
    "if the daemon is not running, start it with `tarryd`, or name another with --address or TARRY_ADDRESS"
)
"""Advice if nothing answers"""

# gRPC reports the cause of a failed connection only in its text.
_WHEN_REFUSED = {
    (errors.OTHER_PROTOCOL,): "Correct --address or TARRY_ADDRESS.",
    ("CERTIFICATE_VERIFY_FAILED",): "Pass the certificate of the daemon's authority with --tls-ca.",
    ("Hostname Verification",): "Its certificate is for another name: use that as --address, or --tls-server-name.",
    ("WRONG_VERSION_NUMBER",): "The port has no TLS: leave out the --tls options, or use the daemon's TLS port.",
    ("Socket closed", "Connection reset"): (
        "If it runs, it may require TLS (--tls, --tls-ca) or a client certificate (--tls-cert, --tls-key)."
    ),
}
"""Advice if a connection is refused, by words of the failure"""

# Wider than any table
_WIDTH_MAX = 100_000
# Items of a list that a terminal shows
_SHORT_LIST = 3
# Notes about single rows, at most
NOTES_MAX = 20


def as_json(value: object) -> None:
    """Print `json_text`."""
    click.echo(json_text(value))


def json_text(value: object) -> str:
    """Return one line of JSON; dataclasses become objects, and members of an enum their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(_with_names(value))


def _with_names(value: object) -> object:
    match value:
        case enum.Enum():
            return value.name.lower()
        case uuid.UUID():
            return str(value)
        case dict():
            return {name: _with_names(each) for name, each in value.items()}
        case list() | tuple():
            return [_with_names(each) for each in value]
    return value


@dataclasses.dataclass(frozen=True)
class At:
    """A time in a table: to the second in a terminal, in full in a pipe, with the zone's offset in both."""

    at_ms: int | None

    def __str__(self) -> str:
        return time_text(self.at_ms)

    @property
    def short(self) -> str:
        text = str(self)
        if text[-3:-2] != ":":
            # No time, or one beyond the calendar
            return text
        offset = text[-6:].removesuffix(":00")
        return text[: len("2030-01-31 12:00:00")] + ("Z" if offset == "+00" else offset)


@dataclasses.dataclass(frozen=True)
class Several:
    """A list in a table: its first items in a terminal, all known ones in a pipe. `is_all` is False if others exist."""

    texts: tuple[str, ...]
    is_all: bool = True

    def __str__(self) -> str:
        return ", ".join(self.texts if self.is_all else (*self.texts, "...")) or "-"

    @property
    def short(self) -> str:
        if len(self.texts) <= _SHORT_LIST:
            return str(self)
        more = f"{len(self.texts) - _SHORT_LIST:,} more" if self.is_all else "many more"
        return f"{', '.join(self.texts[:_SHORT_LIST])} and {more}"


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table in a terminal, or tab-separated lines with a header in a pipe.

    A terminal that is too narrow shows each row as a block. Without rows it prints the note `empty`. Numbers are
    aligned right; a name made of digits must be text.
    """
    if not sys.stdout.isatty():
        _lines(names, rows, empty=empty)
        return
    listed = list(rows)
    if listed:
        shown = rich.table.Table(
            title=_text(title), title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name, value in zip(names, listed[0], strict=True):
            shown.add_column(name, overflow="fold", justify="right" if _is_number(value) else "left")
        for row in listed:
            shown.add_row(*(_cell(value) for value in row))
        console = rich.console.Console()
        wide = console.options.update_width(_WIDTH_MAX)
        if console.measure(shown, options=wide).maximum <= console.width:
            console.print(shown)
        else:
            for row in listed:
                facts(f"{title}:", dict(zip(names, row, strict=True)))
    else:
        note(empty)


def _lines(names: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print rows as they arrive, because they may not fit into memory."""
    click.echo("\t".join(names))
    is_empty = True
    for row in rows:
        # `click.echo` would flush each line.
        sys.stdout.write("\t".join(printable(str(value)) for value in row) + "\n")
        is_empty = False
    if is_empty:
        note(empty)


def facts(title: str, values: Mapping[str, object]) -> None:
    """Print names and values, one a line."""
    if not sys.stdout.isatty():
        for name, value in values.items():
            click.echo(f"{name}\t{printable(str(value))}")
        return
    shown = rich.table.Table(title=_text(title), title_justify="left", box=None, show_header=False)
    for name, value in values.items():
        shown.add_row(name, _cell(value))
    rich.console.Console().print(shown)


def for_terminal(
    names: Sequence[str], rows: Iterable[Sequence[object]], *, optional: Set[str], left_out: Set[str] = frozenset()
) -> tuple[list[str], list[list[object]]]:
    """Return the names and the rows without the columns `left_out` and the optional ones that have no value."""
    listed = list(rows)
    kept = [
        number
        for number, name in enumerate(names)
        if name not in left_out and (name not in optional or any(_says_something(row[number]) for row in listed))
    ]
    return [names[number] for number in kept], [[row[number] for number in kept] for row in listed]


def _says_something(value: object) -> bool:
    """Return False for a count of 0, but not for a name that is 0."""
    return value != 0 and str(value) != "-"


def note(text: str) -> None:
    """Print a line for people on stderr, out of the way of what a pipe reads."""
    click.echo(f"tarry: {printable(text)}", err=True)


def line(text: str) -> None:
    """Print a line that may have names in it."""
    click.echo(printable(text))


def first_notes(texts: Iterable[str], *, count: int) -> None:
    """Print the first of `count` texts as notes, as many as fit a screen."""
    for text in itertools.islice(texts, NOTES_MAX):
        note(text)
    if count > NOTES_MAX:
        note(f"... and {count - NOTES_MAX:,} more; --json prints them all")


def rows_text(count: int) -> str:
    """Return a count of rows: `1 row`, `2,000 rows`."""
    return count_text(count, "row")


def count_text(count: int, what: str) -> str:
    """Return a count of anything: `1 dead letter`, `2,000 dead letters`."""
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def name_text(name: int | None) -> str:
    """Return the text of a number that is a name, not a count; `-` for None."""
    return "-" if name is None else str(name)


def batch_indexes(given: NDArray[np.uint32] | None, rows: int) -> list[int | None]:
    """Return the batch index of each row, or None for a whole entry."""
    if given is None:
        return [None] * rows
    return [None if index == columns.NO_BATCH_INDEX else index for index in given.tolist()]


def row_texts(row: Mapping[str, Any]) -> list[str]:
    """Return the parts of a line about a due row: its position, its time and how often it was redelivered."""
    texts = [f"ledger {row['ledger_id']}", f"entry {row['entry_id']}"]
    if row["batch_index"] is not None:
        texts.append(f"batch index {row['batch_index']}")
    # A position known only from a negative acknowledgement was never due.
    if row["deliver_at_ms"]:
        texts.append(f"due {time_text(row['deliver_at_ms'])}")
    if row["redelivery_count"]:
        texts.append(f"redelivered {row['redelivery_count']}")
    return texts


def position_text(position: tuple[int, int] | None) -> str:
    """Return `ledger:entry`, or `-` for None."""
    return "-" if position is None else f"{position[0]}:{position[1]}"


def time_text(at_ms: int | None) -> str:
    """Return local time with milliseconds and offset, or `-` for None."""
    if at_ms is None:
        return "-"
    try:
        return local_time(at_ms).isoformat(sep=" ", timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"


def local_time(at_ms: int) -> datetime.datetime:
    """Return a local time. Raises OverflowError, ValueError or OSError beyond the calendar."""
    at = datetime.datetime.fromtimestamp(at_ms // 1000, tz=datetime.UTC).astimezone()
    return at.replace(microsecond=at_ms % 1000 * 1000)


def size_text(size_bytes: int) -> str:
    """Return a readable size: `950 B`, `1.4 MB`."""
    return rich.filesize.decimal(size_bytes).replace("bytes", "B").replace("byte", "B")


def duration_text(duration_ms: int) -> str:
    """Return a duration as options take it: `30s`, `1m30s`, `1500ms`."""
    if duration_ms == 0 or duration_ms % 1000:
        return f"{duration_ms}ms"
    text, left = "", duration_ms
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        count, left = divmod(left, unit_ms)
        text += f"{count}{unit}" if count else ""
    return text


def rebuild_notes(needed: Iterable[results.RebuildNeeded]) -> None:
    """Print what was lost with damaged buckets, and what to do."""
    for each in needed:
        note(
            f"{rows_text(each.rows)} of ledgers {each.first_ledger_id} to {each.last_ledger_id} were lost with a "
            f"damaged bucket ({each.damage}): add these ledgers again; nothing is duplicated"
        )


class Progress:
    """A progress bar of rows done, on stderr if that is a terminal."""

    def __init__(self, bar: rich.progress.Progress, task: rich.progress.TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, rows: int) -> None:
        self._bar.advance(self._task, rows)

    def set(self, label: str, *, done: int, total: int | None) -> None:
        self._bar.update(self._task, description=_text(label), completed=done, total=total)


@contextmanager
def progress(label: str, *, total: int | None, quiet: bool) -> Iterator[Progress]:
    """Show a bar with count, rate and time left; `total` is None if it is unknown."""
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
        yield Progress(bar, bar.add_task(_text(label), total=total))


@contextmanager
def waiting(label: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr, if it is a terminal, what is awaited; yield a function that changes the text."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(_text(label)) as status:
        yield lambda text: status.update(_text(text))


@contextmanager
def failures(address: str) -> Iterator[None]:
    """Turn a failure into one clear line and an exit status."""
    try:
        yield
    except errors.TarryError as error:
        text, status = _explain(error, address)
        note(text)
        raise click.exceptions.Exit(status) from error


def _explain(error: errors.TarryError, address: str) -> tuple[str, int]:
    last = error.last if isinstance(error, errors.DeadlineExceeded) else error
    match last:
        case None:
            what_next = "It may or may not be done: repeat it with a longer --timeout, if a daemon listens there."
            return f"{address} does not answer: {error.message}. {what_next}", EXIT_UNREACHABLE
        case errors.Unavailable():
            return f"the daemon at {address} is unavailable: {last.message}. {_when_away(last)}", EXIT_UNREACHABLE
        case errors.NotOwner():
            owner = last.owner_address or "another daemon"
            return f"{last.message}. The owner is {owner}; is it reachable from here?", EXIT_UNREACHABLE
        case errors.Aborted() if not last.may_have_landed:
            return f"{last.message}. Nothing was done; try again when that is over.", EXIT_REFUSED
        case errors.Aborted() | errors.OutcomeUnknown():
            return f"{last.message}. It may or may not be done; repeating the command is safe.", EXIT_UNREACHABLE
        case errors.InvalidArgument() | errors.OutOfRange():
            return f"{last.message}.", EXIT_INPUT
    return f"{last.message}.{_what_next(last)}", EXIT_REFUSED


def _when_away(error: errors.Unavailable) -> str:
    if error.retry_after_ms is not None:
        return f"Try again in {error.retry_after_ms / 1000:g} s, or give a longer --timeout."
    for words, what_next in _WHEN_REFUSED.items():
        if any(each in error.message for each in words):
            return what_next
    return f"{START_OR_NAME_ANOTHER[0].upper()}{START_OR_NAME_ANOTHER[1:]}."


def _what_next(error: errors.TarryError) -> str:
    match error:
        case errors.NotFound():
            return " `tarry topics` and `tarry subscriptions TOPIC` list what exists."
        case errors.AlreadyExists():
            return " `tarry subscriptions TOPIC` shows it, `tarry subscription update` changes it."
        case errors.ResourceExhausted(retry_after_ms=int(retry_after_ms)):
            return f" Try again in {retry_after_ms / 1000:g} s."
        case errors.DataLoss():
            return " Other topics are served; the object must be restored from a copy."
        case errors.Internal():
            return " This is a bug; the daemon's log has more."
        case errors.Unauthenticated():
            return " Identify yourself with --token-file, or with --tls-cert and --tls-key."
        case errors.PermissionDenied():
            return " Use another --token-file or --tls-cert, or ask the daemon's operator."
        case errors.ResourceExhausted():
            return ""
    return f" ({error.code.name})"


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, (At, Several)):
        return _text(value.short)
    return f"{value:,}" if _is_number(value) else _text(str(value))


def _text(text: str) -> str:
    """Return a text for rich: nothing in it is markup."""
    return rich.markup.escape(printable(text))
