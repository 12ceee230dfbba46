"""Commands of the publish path: add, contains, trim, clear."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from tarry import errors, reasons, results, times
from tarry.cli import connection, output, rows
from tarry.threads import add_stream, client

_WHY = {
    "DELAY_TOO_LONG": "it is further ahead than the largest delay",
    "TIME_IN_SECONDS": "its time is in seconds; give Unix time in ms",
    "NO_TIME_IN_MS": "its time is no Unix time in ms",
    "DELAY_LEVEL": "there is no such delay level",
}
# Timeout of a call that serves only a note (seconds)
_ASKING_S = 2.0


@connection.command()
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
    help="How to treat rows that are already due: deliver them at once, or leave them out and count them.",
)
@click.option(
    "--on-invalid",
    type=click.Choice(["refuse", "return"]),
    default="refuse",
    show_default=True,
    help="How to treat rows with too long a delay, a time in seconds or an unknown level: fail their whole request and "
    "add nothing more, or leave them out and print them, with exit status 4.",
)
@click.option(
    "--batch-rows", type=click.IntRange(1, 100_000), default=10_000, show_default=True, help="Rows per request."
)
@click.option("--in-flight", type=click.IntRange(1, 1_000), default=16, show_default=True, help="Requests in flight.")
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
    on_invalid: str,
    batch_rows: int,
    in_flight: int,
    as_json: bool,
) -> None:
    """Add positions to TOPIC and return when they are durable.

    With --on-invalid return, each refused row is printed with the reason, and all others are added.

    \b
    Examples:
      tarry add flights --ledger 1 --entries 0-999 --in 5s
      tarry add flights --ledger 1 --entries 7 --at 2030-01-31T12:00:00Z --key N14228
      tarry add flights --file rows.csv
      tarry add flights --file rows.csv --on-invalid return
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
        invalid = reasons.OnInvalid.RETURN if on_invalid == "return" else reasons.OnInvalid.REFUSE
        stream = connected.add_stream(topic, in_flight=in_flight, subscription=subscription)
        counts, seconds = _add_all(stream, f"adding to {topic}", batches, due, invalid, total=total, quiet=as_json)
    _show(counts, seconds, topic, subscription, as_json=as_json)
    # A caller that may add may lack the permission to look, and the daemon's audit log records each refusal.
    if subscription is None and counts.accepted and not connection.shows_who_calls():
        _note_when_nobody_listens(connected, topic)
    if counts.refused:
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


def _note_when_nobody_listens(connected: client.Client, topic: str) -> None:
    """Print a note if the topic has no subscription. A failed look is ignored, because the rows are added."""
    with contextlib.suppress(errors.TarryError):
        if not connected.subscriptions_page(topic, page_size=1, timeout_s=_ASKING_S).items:
            output.note(
                f"{topic} has no subscription: due rows wait for the first one; "
                f"`tarry subscription create {topic} NAME` creates it"
            )


def _show(counts: _Counts, seconds: float, topic: str, subscription: str | None, *, as_json: bool) -> None:
    """Print what became of the rows."""
    if as_json:
        refused_rows = counts.refused_rows()
        output.as_json({"topic": topic, **counts.values(), "refused_rows": refused_rows, "seconds": seconds})
    else:
        summary = {**counts.values(), "seconds": seconds}
        output.facts(f"Added to {connection.of_topic(topic, subscription)}", summary)
        _note_refused(counts.refused_rows())


def _note_refused(refused_rows: list[dict[str, Any]]) -> None:
    """Print each refused row with the reason, as many lines as fit a screen."""

    def line(row: dict[str, Any]) -> str:
        place = f"line {row['line']}, " if "line" in row else ""
        why = _WHY.get(row["reason"], row["reason"])
        return f"refused: {place}ledger {row['ledger_id']} entry {row['entry_id']}: {why}"

    output.first_notes(map(line, refused_rows), count=len(refused_rows))


def _add_all(
    stream: add_stream.AddStream,
    label: str,
    batches: Iterator[rows.RowBatch],
    already_due: results.AlreadyDue,
    on_invalid: reasons.OnInvalid,
    *,
    total: int | None,
    quiet: bool,
) -> tuple[_Counts, float]:
    """Add until the first failure, which is raised; return the counts and the time that it took (seconds)."""
    begun_s = time.monotonic()
    counts = _Counts()
    with output.progress(label, total=total, quiet=quiet) as shown, stream:
        for each in rows.readable(batches):
            if counts.failed.is_set():
                break
            if on_invalid is reasons.OnInvalid.REFUSE:
                each.check_times()
            _add_batch(stream, each, already_due, on_invalid, counts, shown)
    return counts, round(time.monotonic() - begun_s, 3)


class _Counts:
    """Counts of what became of the rows, updated by answers on any thread."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self.rows = 0
        self.accepted = 0
        self.duplicates = 0
        self.late_on_arrival = 0
        self.returned = 0
        self.raised = 0
        self.refused = 0
        # By number of the batch, because answers arrive in any order
        self._refused_rows: dict[int, list[dict[str, Any]]] = {}
        self._batches = itertools.count()

    def sent(self) -> int:
        """Return the number of the batch that is sent now."""
        return next(self._batches)

    def refuse(self, number: int, batch: rows.RowBatch, no_times: dict[int, int]) -> None:
        """Count rows that are not sent, because the daemon would deliver some of them at once."""
        with self._lock:
            self.rows += len(no_times)
            self.refused += len(no_times)
            self._refused_rows[number] = [
                _refused_row(batch, row, "TIME_IN_SECONDS" if at_ms >= times.SECONDS_MIN else "NO_TIME_IN_MS")
                for row, at_ms in no_times.items()
            ]

    def count(self, number: int, batch: rows.RowBatch, answer: results.AddResult) -> None:
        with self._lock:
            self.rows += len(batch)
            self.accepted += answer.accepted
            self.duplicates += answer.duplicates
            self.late_on_arrival += answer.late_on_arrival
            self.returned += len(answer.returned_index)
            self.raised += len(answer.raised_index)
            self.refused += answer.refused
            if answer.refused:
                self._refused_rows.setdefault(number, []).extend(
                    _refused_row(batch, row, _name_of(reason)) for row, reason in answer.refused.items()
                )

    def values(self) -> dict[str, int]:
        names = ("rows", "accepted", "duplicates", "late_on_arrival", "returned", "raised", "refused")
        return {name: getattr(self, name) for name in names}

    def refused_rows(self) -> list[dict[str, Any]]:
        """Return the refused rows in the order in which they were given."""
        return [
            row
            for number in sorted(self._refused_rows)
            for row in sorted(self._refused_rows[number], key=lambda row: row.get("line", 0))
        ]


def _name_of(reason: reasons.RefusedReason | int) -> str:
    return reason.name if isinstance(reason, reasons.RefusedReason) else f"reason {reason}"


def _refused_row(batch: rows.RowBatch, row: int, reason: str) -> dict[str, Any]:
    # A single ledger applies to all entries.
    ledger_id = int(batch.ledger_id[row if len(batch.ledger_id) > 1 else 0])
    shown: dict[str, Any] = {} if batch.written.lines is None else {"line": int(batch.written.lines[row])}
    return {**shown, "ledger_id": ledger_id, "entry_id": int(batch.entry_id[row]), "reason": reason}


def _add_batch(
    stream: add_stream.AddStream,
    each: rows.RowBatch,
    already_due: results.AlreadyDue,
    on_invalid: reasons.OnInvalid,
    counts: _Counts,
    shown: output.Progress,
) -> None:
    number = counts.sent()
    if no_times := each.no_times():
        counts.refuse(number, each, no_times)
        each = each.take(np.setdiff1d(np.arange(len(each)), list(no_times)))
        shown.advance(len(no_times))
        if not len(each):
            return
    answer = stream.add(
        each.ledger_id,
        each.entry_id,
        deliver_at_ms=each.deliver_at_ms,
        delay_ms=each.delay_ms,
        key_hash=each.key_hash,
        delay_level=each.delay_level,
        already_due=already_due,
        on_invalid=on_invalid,
    )

    def answered(done: Any) -> None:
        if (failure := done.exception()) is not None:
            # Leaving the stream raises the failure.
            if isinstance(failure, errors.TarryError):
                each.written.name_in(failure)
            counts.failed.set()
            return
        counts.count(number, each, done.result())
        shown.advance(len(each))

    answer.add_done_callback(answered)


@connection.command()
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
        # Ids are text, because they are names, not counts.
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


@connection.command()
@click.argument("topic")
@click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), required=True, help="Ledger to trim.")
@click.option("--entry", type=click.IntRange(0, rows.U64_MAX), required=True, help="Last entry to drop.")
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
    """Drop the rows of a ledger of TOPIC at or before an entry, due or not. Rows added later are not affected.

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
        output.line(f"{output.rows_text(trimmed)} of {about} became dead letters")
    else:
        output.line(f"dropped {output.rows_text(trimmed)} of {about}")


@connection.command()
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
        output.line(f"dropped {output.rows_text(cleared)} of {about}")
