"""Commands of the publish path: add, contains, trim, clear.

Owns: their arguments, and what each of them does with the client library.
Does not own: reading rows (`tarry.cli.rows`), showing results and failures (`tarry.cli.output`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import click

from tarry import results
from tarry.cli import connection, output, rows
from tarry.threads import add_stream, client


@click.command()
@click.argument("topic")
@click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), help="Ledger of the entries.")
@click.option("--entries", type=rows.EntryRange(), metavar="N or FIRST-LAST", help="Entries, both ends included.")
@click.option("--in", "delay_ms", type=rows.Duration(), help="Due after this time: 500ms, 5s, 1h30m.")
@click.option(
    "--at", "deliver_at_ms", type=rows.Moment(), help="Due at this time: now, +1h, ISO 8601 or Unix time in ms."
)
@click.option(
    "--level",
    "delay_level",
    type=int,
    help="Due after the delay of this level (`tarry levels`); 0 = now.",
)
@click.option("--key", help="Ordering key of all rows.")
@click.option("--subscription", help="The rows are for this subscription alone.")
@click.option(
    "--file",
    "source",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="CSV with the columns ledger,entry,deliver_at_ms[,key]; - is standard input.",
)
@click.option(
    "--already-due",
    type=click.Choice(["deliver", "return"]),
    default="deliver",
    show_default=True,
    help="What happens to rows that are due already: stored and handed out at once, or left out and counted.",
)
@click.option(
    "--batch-rows", type=click.IntRange(1, 100_000), default=10_000, show_default=True, help="Rows a request."
)
@click.option("--in-flight", type=click.IntRange(1, 1_000), default=16, show_default=True, help="Requests at a time.")
@connection.connected
def add(
    *,
    connected: client.Client,
    topic: str,
    ledger: int | None,
    entries: range | None,
    delay_ms: int | None,
    deliver_at_ms: int | None,
    delay_level: int | None,
    key: str | None,
    subscription: str | None,
    source: str | None,
    already_due: str,
    batch_rows: int,
    in_flight: int,
    as_json: bool,
) -> None:
    """Add positions to TOPIC; done when they are durable.

    \b
    Examples:
      tarry add flights --ledger 1 --entries 0-999 --in 5s
      tarry add flights --ledger 1 --entries 7 --at 2030-01-31T12:00:00Z --key N14228
      tarry add flights --file rows.csv
      tarry add flights --ledger 1 --entries 9 --level 3
      tarry add flights --ledger 1 --entries 8 --in 1h --subscription departures
      zcat rows.csv.gz | tarry add flights --file - --json
    """
    with contextlib.ExitStack() as opened:
        if source is not None:
            if any(given is not None for given in (ledger, entries, delay_ms, deliver_at_ms, delay_level, key)):
                raise click.UsageError(
                    "--file has the rows: leave out --ledger, --entries, --in, --at, --level and --key"
                )
            lines = opened.enter_context(click.open_file(source, encoding="utf-8-sig"))
            total = rows.lines_of(lines, header=True)
            batches = rows.from_csv(lines, name=source, batch_rows=batch_rows)
        else:
            if ledger is None or entries is None:
                raise click.UsageError("give --ledger and --entries, or --file")
            if sum(given is not None for given in (delay_ms, deliver_at_ms, delay_level)) != 1:
                raise click.UsageError("give exactly one of --in, --at and --level")
            total = entries.stop - entries.start
            batches = rows.from_options(
                ledger,
                entries,
                deliver_at_ms=deliver_at_ms,
                delay_ms=delay_ms,
                key=key,
                batch_rows=batch_rows,
                delay_level=delay_level,
            )
        due = results.AlreadyDue.RETURN if already_due == "return" else results.AlreadyDue.DELIVER
        stream = connected.add_stream(topic, in_flight=in_flight, subscription=subscription)
        summary = _add_all(stream, f"adding to {topic}", batches, due, total=total, quiet=as_json)
    if as_json:
        output.as_json({"topic": topic, **summary})
    else:
        output.facts(f"Added to {connection.of_topic(topic, subscription)}", summary)


def _add_all(
    stream: add_stream.AddStream,
    label: str,
    batches: Iterator[rows.RowBatch],
    already_due: results.AlreadyDue,
    *,
    total: int | None,
    quiet: bool,
) -> dict[str, object]:
    """Adds until the first failure, which is raised; what became of the rows, and the seconds it took."""
    begun_s = time.monotonic()
    counts = _Counts()
    with output.progress(label, total=total, quiet=quiet) as shown, stream:
        for each in rows.readable(batches):
            if counts.failed.is_set():
                break
            _add_batch(stream, each, already_due, counts, shown)
    return {**counts.values(), "seconds": round(time.monotonic() - begun_s, 3)}


class _Counts:
    """What became of the rows, told by the answers on whatever thread they come."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self.rows = 0
        self.accepted = 0
        self.duplicates = 0
        self.late_on_arrival = 0
        self.returned = 0
        self.raised = 0

    def count(self, rows_answered: int, answer: results.AddResult) -> None:
        with self._lock:
            self.rows += rows_answered
            self.accepted += answer.accepted
            self.duplicates += answer.duplicates
            self.late_on_arrival += answer.late_on_arrival
            self.returned += len(answer.returned_index)
            self.raised += len(answer.raised_index)

    def values(self) -> dict[str, int]:
        names = ("rows", "accepted", "duplicates", "late_on_arrival", "returned", "raised")
        return {name: getattr(self, name) for name in names}


def _add_batch(
    stream: add_stream.AddStream,
    each: rows.RowBatch,
    already_due: results.AlreadyDue,
    counts: _Counts,
    shown: output.Progress,
) -> None:
    answer = stream.add(
        each.ledger_id,
        each.entry_id,
        deliver_at_ms=each.deliver_at_ms,
        delay_ms=each.delay_ms,
        key_hash=each.key_hash,
        delay_level=each.delay_level,
        already_due=already_due,
    )

    def answered(done: Any) -> None:
        if done.exception() is not None:
            # It is raised when the stream is left.
            counts.failed.set()
            return
        counts.count(len(each), done.result())
        shown.advance(len(each))

    answer.add_done_callback(answered)


@click.command()
@click.argument("topic")
@click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), required=True, help="Ledger of the entries.")
@click.option(
    "--entries", type=rows.EntryRange(), metavar="N or FIRST-LAST", required=True, help="Entries, both ends included."
)
@click.option("--subscription", help="Only what this subscription is owed and has not acknowledged.")
@connection.connected
def contains(
    *, connected: client.Client, topic: str, ledger: int, entries: range, subscription: str | None, as_json: bool
) -> None:
    """Show which entries of a ledger TOPIC holds, as ranges: a cursor that reads the log skips them.

    Pending entries are not due yet. Due entries have come due and are not acknowledged. Tarry delivers both.

    \b
    Examples:
      tarry contains flights --ledger 1 --entries 0-9
      tarry contains flights --ledger 1 --entries 0-999999 --subscription departures --json
    """
    found = connected.contains(topic, ledger, entries.start, last_entry_id=entries.stop - 1, subscription=subscription)
    if as_json:
        output.as_json({"topic": topic, "pending": list(found.pending), "due": list(found.due)})
        return
    shown = [(*each, "pending") for each in found.pending] + [(*each, "due") for each in found.due]
    output.table(
        f"Contained in {connection.of_topic(topic, subscription)}",
        ("ledger", "first entry", "last entry", "rows", "state"),
        # The ids as text: they are names, not counts.
        ((str(ledger), str(first), str(last), last - first + 1, state) for ledger, first, last, state in sorted(shown)),
        empty=f"{connection.of_topic(topic, subscription)} holds none of these entries: a cursor reads them all",
    )


def _trim_question(
    *,
    topic: str,
    ledger: int,
    entry: int,
    all_lower_ledgers: bool,
    dead_letter: bool,
    subscription: str | None,
    **_: object,
) -> str:
    lower = " and of every lower ledger" if all_lower_ledgers else ""
    about = connection.of_topic(topic, subscription)
    what = "Make dead letters of" if dead_letter else "Drop"
    return f"{what} the rows of {about} up to entry {entry} of ledger {ledger}{lower}?"


@click.command()
@click.argument("topic")
@click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), required=True, help="Ledger to trim.")
@click.option("--entry", type=click.IntRange(0, rows.U64_MAX), required=True, help="The last entry that is dropped.")
@click.option("--all-lower-ledgers", is_flag=True, help="Also every row of ledgers with a lower id.")
@click.option(
    "--dead-letter", is_flag=True, help="What the subscription is owed becomes dead letters; needs --subscription."
)
@click.option("--subscription", help="For this subscription only; otherwise for the whole topic.")
@connection.asked_first(_trim_question)
@connection.connected
def trim(
    *,
    connected: client.Client,
    topic: str,
    ledger: int,
    entry: int,
    all_lower_ledgers: bool,
    dead_letter: bool,
    subscription: str | None,
    as_json: bool,
) -> None:
    """Drop the rows of a ledger of TOPIC at or before an entry, due or not. What is added later is not affected.

    With --dead-letter the rows are kept as dead letters of the subscription: `tarry dead-letters` lists them.

    \b
    Examples:
      tarry trim flights --ledger 7 --entry 1999 --yes
      tarry trim flights --ledger 7 --entry 1999 --all-lower-ledgers --subscription departures
      tarry trim flights --ledger 7 --entry 1999 --dead-letter --subscription departures
    """
    if dead_letter and subscription is None:
        raise click.UsageError("--dead-letter needs --subscription: dead letters are of a subscription")
    about = connection.of_topic(topic, subscription)
    with output.waiting(f"trimming {about}"):
        trimmed = connected.trim(
            topic,
            ledger,
            entry,
            all_lower_ledgers=all_lower_ledgers,
            dead_letter=dead_letter,
            subscription=subscription,
        )
    if trimmed.may_have_landed:
        output.note("an answer was lost: rows that an earlier try dropped are not counted")
    if as_json:
        counts = {"trimmed": int(trimmed), "dead_lettered": trimmed.dead_lettered}
        output.as_json({"topic": topic, "subscription": subscription, **counts})
    elif dead_letter:
        click.echo(f"{output.rows_text(trimmed)} of {about} became dead letters")
    else:
        click.echo(f"dropped {output.rows_text(trimmed)} of {about}")


@click.command()
@click.argument("topic")
@click.option("--subscription", help="For this subscription only; otherwise for the whole topic.")
@connection.asked_first(
    lambda *, topic, subscription, **_: f"Drop every row of {connection.of_topic(topic, subscription)}?"
)
@connection.connected
def clear(*, connected: client.Client, topic: str, subscription: str | None, as_json: bool) -> None:
    """Drop every row of TOPIC, or of one of its subscriptions, due or not. The topic stays.

    \b
    Examples:
      tarry clear flights --yes
      tarry clear flights --subscription departures --json --yes
    """
    about = connection.of_topic(topic, subscription)
    with output.waiting(f"clearing {about}"):
        cleared = connected.clear(topic, subscription=subscription)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "cleared": cleared})
    else:
        click.echo(f"dropped {output.rows_text(cleared)} of {about}")
