"""The commands of `tarry`.

Owns: their arguments, and what each of them does with the client library.
Does not own: reading rows (`tarry.cli.rows`), showing results and failures (`tarry.cli.output`).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.metadata
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import click

from tarry import add_stream, batch, client, results
from tarry.cli import output, rows

DEFAULT_TIMEOUT_S = 10.0


def _connected(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of every command, and a client."""

    @click.option(
        "--address",
        envvar="TARRY_ADDRESS",
        default=client.DEFAULT_TARGET,
        show_default=True,
        show_envvar=True,
        help="host:port of a daemon.",
    )
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Seconds to wait for an answer, retries included.",
    )
    @click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")
    @functools.wraps(command)
    def run(*, address: str, timeout_s: float, **arguments: Any) -> None:
        with output.failures(address), client.Client(address, timeout_s=timeout_s) as connected:
            command(connected=connected, **arguments)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(importlib.metadata.version("tarry"), prog_name="tarry")
def tarry() -> None:
    """Delayed positions: add them, watch them come due, look at topics.

    Exit status: 0 done, 1 refused by the daemon, 2 wrong usage or input, 3 the daemon cannot be reached in time.
    """


@tarry.command()
@click.argument("topic")
@click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), help="Ledger of the entries.")
@click.option("--entries", type=rows.EntryRange(), metavar="N or FIRST-LAST", help="Entries, both ends included.")
@click.option("--in", "delay_ms", type=rows.Duration(), help="Due after this time: 500ms, 5s, 1h30m.")
@click.option("--at", "deliver_at_ms", type=rows.Moment(), help="Due at this time: ISO 8601 or Unix time in ms.")
@click.option("--key", help="Ordering key of all rows.")
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
@_connected
def add(
    *,
    connected: client.Client,
    topic: str,
    ledger: int | None,
    entries: range | None,
    delay_ms: int | None,
    deliver_at_ms: int | None,
    key: str | None,
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
      zcat rows.csv.gz | tarry add flights --file - --json
    """
    with contextlib.ExitStack() as opened:
        if source is not None:
            if any(given is not None for given in (ledger, entries, delay_ms, deliver_at_ms, key)):
                raise click.UsageError("--file has the rows: leave out --ledger, --entries, --in, --at and --key")
            lines = opened.enter_context(click.open_file(source, encoding="utf-8-sig"))
            total = _rows_of(lines)
            batches = rows.from_csv(lines, name=source, batch_rows=batch_rows)
        else:
            if ledger is None or entries is None:
                raise click.UsageError("give --ledger and --entries, or --file")
            if (delay_ms is None) == (deliver_at_ms is None):
                raise click.UsageError("give exactly one of --in and --at")
            total = entries.stop - entries.start
            batches = rows.from_options(
                ledger, entries, deliver_at_ms=deliver_at_ms, delay_ms=delay_ms, key=key, batch_rows=batch_rows
            )
        due = results.AlreadyDue.RETURN if already_due == "return" else results.AlreadyDue.DELIVER
        summary = _add_all(connected, topic, batches, due, total=total, in_flight=in_flight, quiet=as_json)
    if as_json:
        output.as_json({"topic": topic, **summary})
    else:
        output.facts(f"Added to {topic}", summary)


def _add_all(
    connected: client.Client,
    topic: str,
    batches: Iterator[rows.RowBatch],
    already_due: results.AlreadyDue,
    *,
    total: int | None,
    in_flight: int,
    quiet: bool,
) -> dict[str, object]:
    """Adds until the first failure, which is raised; what became of the rows, and the seconds it took."""
    begun_s = time.monotonic()
    counts = _Counts()
    with (
        output.progress(f"adding to {topic}", total=total, quiet=quiet) as shown,
        connected.add_stream(topic, in_flight=in_flight) as stream,
    ):
        for each in _readable(batches):
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


def _readable(batches: Iterator[rows.RowBatch]) -> Iterator[rows.RowBatch]:
    try:
        yield from batches
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the file is not UTF-8: {error}") from error
    except csv.Error as error:
        raise click.UsageError(f"the file is not CSV: {error}") from error


def _rows_of(source: IO[str]) -> int | None:
    """Rows of a regular file, None when it must be read to know."""
    try:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return None
    except OSError:
        return None
    with open(source.fileno(), "rb", closefd=False) as raw:
        lines = sum(block.count(b"\n") for block in iter(lambda: raw.read(1 << 20), b""))
        raw.seek(0)
    return max(0, lines - 1)


@tarry.command()
@click.argument("topic")
@click.argument("subscription")
@click.option(
    "--ack/--no-ack", default=True, show_default=True, help="Acknowledge, or only look: it is handed out again."
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many positions.")
@click.option("--create", is_flag=True, help="Create the subscription, and the topic, if they do not exist.")
@click.option(
    "--permits", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Unread positions."
)
@_connected
def watch(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    ack: bool,
    count: int | None,
    create: bool,
    permits: int,
    as_json: bool,
) -> None:
    """Print the positions of SUBSCRIPTION as they come due, with their lateness. Ctrl-C ends it.

    \b
    Examples:
      tarry watch flights departures --create
      tarry watch flights departures --count 100 --json
      tarry watch flights departures --no-ack
    """
    left = count
    with connected.subscribe(
        topic, subscription, permits=permits if count is None else min(permits, count), create=create
    ) as opened:
        try:
            for received in opened:
                shown = received if left is None else received.take(slice(0, left))
                _print_batch(shown, as_json=as_json)
                if ack:
                    opened.ack(shown)
                else:
                    opened.release(shown)
                if left is not None:
                    left -= len(shown)
                    if left <= 0:
                        break
        except KeyboardInterrupt:
            click.echo("", err=True)


def _print_batch(received: batch.Batch, *, as_json: bool) -> None:
    lateness_ms = received.lateness_ms.tolist()
    hashes = [None] * len(received) if received.key_hash is None else received.key_hash.tolist()
    columns = (received.ledger_id, received.entry_id, received.deliver_at_ms)
    for ledger_id, entry_id, deliver_at_ms, late_ms, key_hash in zip(
        *(column.tolist() for column in columns), lateness_ms, hashes, strict=True
    ):
        if as_json:
            output.as_json(
                {
                    "ledger_id": ledger_id,
                    "entry_id": entry_id,
                    "deliver_at_ms": deliver_at_ms,
                    "received_at_ms": received.received_at_ms,
                    "lateness_ms": late_ms,
                    "key_hash": key_hash,
                    "epoch": received.epoch,
                }
            )
            continue
        click.echo(
            f"{output.time_text(received.received_at_ms)}  ledger {ledger_id}  entry {entry_id}"
            f"  due {output.time_text(deliver_at_ms)}  late {late_ms} ms"
        )


@tarry.command()
@_connected
def topics(*, connected: client.Client, as_json: bool) -> None:
    """List the topics of the daemon.

    \b
    Examples:
      tarry topics
      tarry topics --json --address 10.0.0.5:7461
    """
    summaries = list(connected.topics())
    if as_json:
        for summary in summaries:
            output.as_json(summary)
        return
    output.table(
        "Topics",
        ("topic", "shard", "pending", "buckets", "subscriptions", "next due"),
        (
            (each.topic, each.shard, each.pending, each.buckets, each.subscriptions, output.time_text(each.next_due_ms))
            for each in summaries
        ),
    )


@tarry.command()
@click.argument("topic")
@_connected
def stats(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Show the counts of TOPIC and of its subscriptions.

    \b
    Examples:
      tarry stats flights
      tarry stats flights --json
    """
    counts = connected.stats(topic)
    if as_json:
        output.as_json(counts)
        return
    output.facts(
        counts.topic,
        {
            "pending": counts.pending,
            "in the mutable bucket": counts.mutable_rows,
            "sealed buckets": counts.buckets,
            "bytes of sealed buckets": counts.bucket_bytes,
            "rows in memory": counts.loaded_rows,
            "next due": output.time_text(counts.next_due_ms),
            "oldest due, not handed out": output.time_text(counts.oldest_due_ms),
            "shard": counts.shard,
            "epoch": counts.epoch,
            "incarnation": counts.incarnation,
            "applied slot": counts.applied_slot,
            "topic id": counts.topic_id,
            "as of": output.time_text(counts.as_of_ms),
        },
    )
    click.echo("")
    output.table(
        "Subscriptions",
        ("subscription", "backlog", "in flight", "dispatchers", "permits", "since", "id"),
        (
            (
                each.subscription,
                each.backlog,
                each.in_flight,
                each.dispatchers,
                each.permits,
                output.time_text(each.since_ms) if each.since_ms else "-",
                each.subscription_id,
            )
            for each in counts.subscriptions
        ),
    )


@tarry.group()
def subscription() -> None:
    """Create and delete subscriptions."""


@subscription.command("create")
@click.argument("topic")
@click.argument("subscription")
@_connected
def create_subscription(*, connected: client.Client, topic: str, subscription: str, as_json: bool) -> None:
    """Create SUBSCRIPTION, and TOPIC if it is new. It is OK when it exists.

    The first subscription of a topic is owed everything in its index, a later one what comes due after its creation.

    \b
    Examples:
      tarry subscription create flights departures
    """
    created = connected.create_subscription(topic, subscription)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **vars(created)})
    else:
        click.echo(f"{subscription} {'is created' if created.created else 'exists'}, id {created.subscription_id}")


@subscription.command("delete")
@click.argument("topic")
@click.argument("subscription")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_connected
def delete_subscription(*, connected: client.Client, topic: str, subscription: str, yes: bool, as_json: bool) -> None:
    """Delete SUBSCRIPTION. Deleting the last one of a topic drops what is due.

    \b
    Examples:
      tarry subscription delete flights departures --yes
    """
    if not yes:
        click.confirm(f"Delete subscription {subscription} of {topic} and its backlog?", abort=True, err=True)
    connected.delete_subscription(topic, subscription)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "deleted": True})
    else:
        click.echo(f"{subscription} is deleted")
