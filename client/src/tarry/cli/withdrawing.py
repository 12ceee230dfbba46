"""Commands for rows that are not due yet: cancel, reschedule."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from tarry import columns, errors, results
from tarry.cli import connection, output, rows
from tarry.threads import client

REASONS = {"not_found": "not found", "already_due": "already due", "in_flight": "in flight"}
"""Reasons why a position was left: the name in JSON, and the text for people"""

# Ranges that a terminal lists
_SHOWN_RANGES = 20

Range = tuple[int, int, int]
"""Ledger, first and last entry"""


def _position_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name positions."""
    for option in (
        click.option("--subscription", help="Only rows that were added for this subscription alone."),
        click.option(
            "--file",
            "source",
            type=click.Path(exists=True, dir_okay=False, allow_dash=True),
            help="JSON lines as `tarry scheduled --json` prints them, or CSV: ledger,entry[,deliver_at_ms][,key]; "
            "- is standard input.",
        ),
        click.option("--entries", type=rows.EntryRange(), metavar="N or FIRST-LAST", help="Entries, both included."),
        click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), help="Ledger of the entries."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def _given(
    ledger: int | None, entries: range | None, source: str | None, *, key: str | None = None
) -> Iterator[tuple[Iterator[rows.RowBatch], int | None]]:
    """Yield the positions that the options name, in requests of the daemon's size, and their number if it is known."""
    batch_rows = columns.ROWS_PER_REQUEST_MAX
    if source is None:
        if ledger is None or entries is None:
            raise click.UsageError("give --ledger and --entries, or --file")
        # `len` cannot return 2^64.
        given = rows.from_options(ledger, entries, deliver_at_ms=None, delay_ms=None, key=key, batch_rows=batch_rows)
        yield given, entries.stop - entries.start
        return
    if any(option is not None for option in (ledger, entries, key)):
        raise click.UsageError("--file has the positions: leave out --ledger, --entries and --key")
    with click.open_file(source, encoding="utf-8-sig") as lines:
        # Count before reading: counting goes back to the beginning of the file.
        total = rows.lines_of(lines, header=False)
        yield rows.readable(rows.from_file(lines, name=source, batch_rows=batch_rows)), total


@dataclasses.dataclass
class _Account:
    """The results of the positions so far."""

    done: int = 0
    left: dict[str, list[Range]] = dataclasses.field(default_factory=lambda: {reason: [] for reason in REASONS})
    raised: int = 0
    answers_lost: bool = False

    def count(self, each: rows.RowBatch, done: int, answer: results.Withdrawn) -> None:
        self.done += done
        for reason, ranges in self.left.items():
            ranges += _ranges(each, getattr(answer, f"{reason}_index"))
        self.answers_lost = self.answers_lost or (answer.may_have_landed and bool(len(answer.not_found_index)))

    def rows(self, reason: str) -> int:
        return sum(last - first + 1 for _, first, last in self.left[reason])

    @property
    def all_done(self) -> bool:
        return not any(self.left.values())


def _ranges(each: rows.RowBatch, index: NDArray[np.int64]) -> list[Range]:
    """Return rows of a batch as ranges of neighbouring entries, by ledger and entry."""
    if not len(index):
        return []
    ledger_id, entry_id = np.broadcast_to(each.ledger_id, len(each))[index], each.entry_id[index]
    order = np.lexsort((entry_id, ledger_id))
    ledger_id, entry_id = ledger_id[order], entry_id[order]
    begins = np.flatnonzero((np.diff(ledger_id) != 0) | (np.diff(entry_id) != 1)) + 1
    firsts, lasts = np.append(0, begins), np.append(begins, len(index)) - 1
    return list(zip(ledger_id[firsts].tolist(), entry_id[firsts].tolist(), entry_id[lasts].tolist(), strict=True))


def _work(
    label: str,
    given: Iterator[rows.RowBatch],
    request: Callable[[rows.RowBatch, _Account], None],
    *,
    total: int | None,
    quiet: bool,
) -> _Account:
    """Send a request for each batch. A failure is raised after a note of what was done before."""
    account = _Account()
    answered = 0
    try:
        with output.progress(label, total=total, quiet=quiet) as shown:
            for each in given:
                request(each, account)
                answered += len(each)
                shown.advance(len(each))
    except errors.TarryError:
        if answered:
            output.note(f"before the failure {output.rows_text(answered)} were answered, {account.done:,} of them done")
        raise
    return account


def _show(account: _Account, done: str, about: dict[str, object], *, as_json: bool) -> None:
    """Print what became of the positions; exit with EXIT_NOT_ALL if some were left."""
    topic = str(about["topic"])
    if as_json:
        output.as_json({**about, done: account.done, **account.left, "answers_lost": account.answers_lost})
    else:
        left = ", ".join(f"{account.rows(reason):,} {text}" for reason, text in REASONS.items() if account.left[reason])
        output.line(f"{done} {output.rows_text(account.done)} of {topic}" + (f"; unchanged: {left}" if left else ""))
        if not account.all_done:
            _list_ranges(topic, account)
    if account.raised:
        output.note(f"{output.rows_text(account.raised)} got a later time than asked: a subscription was created later")
    if account.answers_lost:
        output.note(f"an answer was lost and the request repeated: some that are not found may have been {done} by it")
    if not account.all_done:
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


def _list_ranges(topic: str, account: _Account) -> None:
    ranges = sorted((*each, text) for reason, text in REASONS.items() for each in account.left[reason])
    shown = ranges[:_SHOWN_RANGES] if sys.stdout.isatty() else ranges
    output.table(
        f"Unchanged in {topic}",
        ("ledger", "first entry", "last entry", "rows", "why"),
        # Ids are text, because they are names, not counts.
        ((str(ledger), str(first), str(last), last - first + 1, why) for ledger, first, last, why in shown),
        empty="",
    )
    if len(shown) < len(ranges):
        output.note(f"and {len(ranges) - len(shown):,} more ranges; --json, or a pipe, has all")


@connection.command()
@click.argument("topic")
@_position_options
@connection.connected
def cancel(
    *,
    connected: client.Client,
    topic: str,
    ledger: int | None,
    entries: range | None,
    source: str | None,
    subscription: str | None,
    as_json: bool,
) -> None:
    """Remove positions of TOPIC before they are due. A cancelled position is never delivered.

    Positions that cannot be cancelled stay, and are listed with the reason: not found (never added, acknowledged, or
    cancelled before), already due, or in flight (at a dispatcher). A position leaves every index of the topic or none.
    Exit status: 0 all are cancelled, 4 some are not.

    \b
    Examples:
      tarry cancel flights --ledger 1 --entries 17
      tarry cancel flights --ledger 1 --entries 0-999 --json
      tarry scheduled flights --until +1h --json | tarry cancel flights --file -
      tarry cancel flights --file rows.csv
    """

    def request(each: rows.RowBatch, account: _Account) -> None:
        with each.written.named_in_refusals():
            answer = connected.cancel(topic, each.ledger_id, each.entry_id, subscription=subscription)
        account.count(each, answer.cancelled, answer)

    with _given(ledger, entries, source) as (given, total):
        account = _work(f"cancelling in {topic}", given, request, total=total, quiet=as_json)
    _show(account, "cancelled", {"topic": topic, "subscription": subscription}, as_json=as_json)


@connection.command()
@click.argument("topic")
@_position_options
@click.option("--in", "delay_ms", type=rows.Duration(), help="Due after this time from now: 500ms, 5s, 1h30m.")
@click.option("--at", "deliver_at_ms", type=rows.Moment(), help="Due at this time: +1h, ISO 8601 or Unix time in ms.")
@click.option("--key", help="Ordering key of all rows, in place of their present keys.")
@connection.connected
def reschedule(
    *,
    connected: client.Client,
    topic: str,
    ledger: int | None,
    entries: range | None,
    source: str | None,
    subscription: str | None,
    delay_ms: int | None,
    deliver_at_ms: int | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Give positions of TOPIC another time before they are due, earlier or later. A past time makes them due at once.

    The time is --in or --at for all positions, or else the time in each line of the file. Each position gets a new row:
    its key is --key, or else the key in its line, or none. Positions that keep their old time are listed with the
    reason, as by `tarry cancel`.
    Exit status: 0 all have their new time, 4 some do not.

    \b
    Examples:
      tarry reschedule flights --ledger 1 --entries 17 --in 30m
      tarry reschedule flights --ledger 1 --entries 0-999 --at 2030-01-31T12:00:00Z --json
      tarry scheduled flights --until +1h --json | tarry reschedule flights --file - --in 2h
      tarry reschedule flights --file rows.csv
    """
    if delay_ms is not None and deliver_at_ms is not None:
        raise click.UsageError("give one of --in and --at")
    if source is None and delay_ms is None and deliver_at_ms is None:
        raise click.UsageError("give --in or --at")

    def times(each: rows.RowBatch) -> dict[str, Any]:
        if delay_ms is not None:
            return {"delay_ms": delay_ms}
        at_ms = each.deliver_at_ms if deliver_at_ms is None else deliver_at_ms
        if deliver_at_ms is None:
            each.check_times()
        if at_ms is None:
            raise click.UsageError(f"{source} has no deliver_at_ms: add it, or give --in or --at")
        return {"deliver_at_ms": at_ms}

    def request(each: rows.RowBatch, account: _Account) -> None:
        written = each.written
        if deliver_at_ms is not None:
            written = dataclasses.replace(written, options={**written.options, "deliver_at_ms": "--at"})
        with written.named_in_refusals():
            answer = connected.reschedule(
                topic, each.ledger_id, each.entry_id, **times(each), key_hash=each.key_hash, subscription=subscription
            )
        account.count(each, answer.rescheduled, answer)
        account.raised += len(answer.raised_index)

    with _given(ledger, entries, source, key=key) as (given, total):
        account = _work(f"rescheduling in {topic}", given, request, total=total, quiet=as_json)
    _show(account, "rescheduled", {"topic": topic, "subscription": subscription}, as_json=as_json)
