"""Commands of dispatchers: receive, get, ack, nack."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import click

from tarry import batch, columns, hashing, key_shared, results
from tarry.cli import connection, output, rows
from tarry.printable import printable
from tarry.threads import client, subscription

_WHY = {
    "NOT_THERE": "the subscription is owed no row of it",
    "NOT_DUE": "it is not due yet",
    "OTHER_TIME": "its row has another time",
    "OTHER_DELIVERY": "it was redelivered since, or is about to be",
    "TAKEN_BACK": "it was taken back, behind a position of its key that was negatively acknowledged",
    "NOT_HELD": "it is not in flight here",
}
# For `tarry ack` and `tarry nack`
POSITIONS_IN_REQUEST = 50_000
# The low 16 bits of a key's hash are the unit of order.
HASH_SLOTS = 1 << 16


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@click.option(
    "--ack/--no-ack",
    default=True,
    show_default=True,
    help="Acknowledge printed positions, or give them back for redelivery.",
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many positions.")
@click.option("--create", is_flag=True, help="Create the subscription, and the topic, if they do not exist.")
@click.option(
    "--permits",
    type=click.IntRange(1, 1_000_000),
    default=10_000,
    show_default=True,
    help="Unacknowledged positions of each consumer, at most.",
)
@click.option(
    "--consumer",
    "consumers",
    type=rows.ConsumerName(),
    multiple=True,
    metavar="NAME",
    help="Receive as KEY_SHARED for the consumer NAME; repeatable. With the sticky selector: NAME=0-32767, several "
    "ranges with commas.",
)
@connection.connected
def receive(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    ack: bool,
    count: int | None,
    create: bool,
    permits: int,
    consumers: tuple[key_shared.Consumer, ...],
    as_json: bool,
) -> None:
    """Receive the positions of SUBSCRIPTION as they come due: print them with their lateness and acknowledge them.

    A printed position is taken: no other dispatcher receives it. With --no-ack the position is given back, and Tarry
    redelivers it. `tarry watch` shows positions without taking them. Ctrl-C ends the command.
    With --consumer the positions of a key arrive in order, at one consumer at a time. Each line names the consumer and
    the hash slot of the key.

    \b
    Examples:
      tarry receive flights departures --create
      tarry receive flights departures --count 100 --json
      tarry receive flights departures --no-ack
      tarry receive flights gates --consumer gate-1 --consumer gate-2
    """
    left = count
    permits = permits if count is None else min(permits, count)
    with _opened(connected, topic, subscription, consumers, permits=permits, create=create) as opened:
        output.rebuild_notes(opened.rebuild_needed)
        try:
            for received in opened:
                if isinstance(received, key_shared.TakenBack):
                    output.note(f"taken back from {received.consumer.name}: {output.rows_text(len(received))}")
                if not isinstance(received, batch.Batch):
                    continue
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


def _opened(
    connected: client.Client,
    topic: str,
    name: str,
    consumers: tuple[key_shared.Consumer, ...],
    *,
    permits: int,
    create: bool,
) -> subscription.Receiver[Any]:
    """Open the subscription, as KEY_SHARED if there are consumers."""
    if not consumers:
        return connected.subscribe(topic, name, permits=permits, create=create)
    given = [dataclasses.replace(each, permits=permits) for each in consumers]
    return connected.subscribe_key_shared(topic, name, consumers=given, create=create)


def _print_batch(received: batch.Batch, *, as_json: bool) -> None:
    besides: dict[str, Any] = {}
    if isinstance(received, batch.Leased):
        besides["lease_ms"] = received.lease_ms
    if isinstance(received, key_shared.ConsumerBatch):
        besides |= {"consumer": received.consumer.name, "consumer_id": received.consumer_id}
    lines = [
        json.dumps(row | besides)
        if as_json
        else printable(f"{output.time_text(row['received_at_ms'])}  {_text(row | besides)}")
        for row in _rows(received)
    ]
    if lines:
        click.echo("\n".join(lines))


def _rows(received: batch.Batch) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for each position, with None for a missing batch index, key hash or scheduled time."""
    hashes = [None] * len(received) if received.key_hash is None else received.key_hash.tolist()
    times = (received.deliver_at_ms, received.received_at_ms_by_row, received.lateness_ms)
    named = (received.ledger_id, received.entry_id, *times)
    for ledger_id, entry_id, deliver_at_ms, received_at_ms, late_ms, key_hash, count, index in zip(
        *(column.tolist() for column in named),
        hashes,
        received.redelivery_count.tolist(),
        output.batch_indexes(received.batch_index, len(received)),
        strict=True,
    ):
        yield {
            "ledger_id": ledger_id,
            "entry_id": entry_id,
            "deliver_at_ms": deliver_at_ms,
            "received_at_ms": received_at_ms,
            "lateness_ms": late_ms if deliver_at_ms else None,
            "key_hash": key_hash,
            "epoch": received.epoch,
            "redelivery_count": count,
            "batch_index": index,
        }


def _text(row: dict[str, Any]) -> str:
    parts = output.row_texts(row)
    if "consumer" in row:
        parts = [row["consumer"], f"hash {(row['key_hash'] or 0) % HASH_SLOTS}", *parts]
    if not row["redelivery_count"] and row["lateness_ms"] is not None:
        parts.append(f"late {row['lateness_ms']} ms")
    return "  ".join(parts)


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@click.option(
    "--max",
    "max_rows",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Positions to lease, at most.",
)
@click.option(
    "--lease", "lease_ms", type=rows.Duration(), help="Length of the lease: 30s, 5m. Default: the subscription's."
)
@click.option(
    "--wait", "wait_ms", type=rows.Duration(), default=0, help="How long to wait when nothing is due: 500ms, 10s."
)
@click.option("--ack", is_flag=True, help="Acknowledge them as soon as they are printed.")
@connection.connected
def get(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    max_rows: int,
    lease_ms: int | None,
    wait_ms: int,
    ack: bool,
    as_json: bool,
) -> None:
    """Lease due positions of SUBSCRIPTION and print them. They are due again when the lease ends.

    \b
    Examples:
      tarry get flights departures --max 10 --lease 1m
      tarry get flights departures --wait 10s --ack
      tarry get flights departures --json | tarry ack flights departures --file -
    """
    if lease_ms == 0:
        raise click.BadParameter("a lease lasts at least 1ms", param_hint="--lease")
    leased = connected.get(topic, subscription, max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
    output.rebuild_notes(leased.rebuild_needed)
    _print_batch(leased, as_json=as_json)
    if ack and len(leased):
        connected.ack(topic, subscription, leased)
    if as_json:
        return
    if not len(leased):
        output.note("nothing is due")
    elif ack:
        output.note(f"acknowledged {output.rows_text(len(leased))}")
    else:
        output.note(f"leased {output.rows_text(len(leased))} for {output.duration_text(leased.lease_ms)}")


def _position_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name delivered positions."""
    for option in (
        click.option(
            "--file",
            "source",
            type=click.Path(exists=True, dir_okay=False, allow_dash=True),
            help="JSON lines as `tarry get --json` prints them; - is standard input.",
        ),
        click.option(
            "--batch-index",
            type=click.IntRange(0, 65_535),
            help="Only this message of the batch that each entry holds.",
        ),
        click.option(
            "--count",
            "redelivery_count",
            type=click.IntRange(0, rows.REDELIVERY_COUNT_MAX),
            help="Redelivery count of the delivery; without it any. A file names its deliveries.",
        ),
        click.option(
            "--at",
            "--deliver-at",
            "deliver_at_ms",
            type=rows.Moment(any_number=True),
            help='The time of the delivery: `tarry receive` prints it after "due".',
        ),
        click.option("--entries", type=rows.EntryRange(), metavar="N or FIRST-LAST", help="Entries, both included."),
        click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), help="Ledger of the entries."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def _given(
    ledger: int | None,
    entries: range | None,
    deliver_at_ms: int | None,
    batch_index: int | None,
    redelivery_count: int | None,
    source: str | None,
    *,
    timed: bool,
) -> Iterator[tuple[Iterator[tuple[columns.Positions, rows.Written]], int | None]]:
    """Yield the positions that the options name, in requests, and their number if it is known.

    With `timed`, each position must have a time.
    """
    if source is None:
        if ledger is None or entries is None or (timed and deliver_at_ms is None):
            needed = "--ledger, --entries and --at" if timed else "--ledger and --entries"
            raise click.UsageError(f"give {needed}, or --file")
        given = rows.positions_from_options(
            ledger,
            entries,
            deliver_at_ms or 0,
            batch_index=batch_index,
            redelivery_count=redelivery_count,
            batch_rows=POSITIONS_IN_REQUEST,
        )
        yield given, entries.stop - entries.start
        return
    if any(option is not None for option in (ledger, entries, deliver_at_ms, batch_index, redelivery_count)):
        raise click.UsageError(
            "--file has the positions: leave out --ledger, --entries, --at, --batch-index and --count"
        )
    with click.open_file(source, encoding="utf-8-sig") as lines:
        # Count before reading: counting goes back to the beginning of the file.
        total = rows.lines_of(lines, header=False)
        read = rows.positions_from_json(lines, name=source, batch_rows=POSITIONS_IN_REQUEST, timed=timed)
        yield rows.readable(read), total


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@_position_options
@connection.connected
def ack(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    ledger: int | None,
    entries: range | None,
    deliver_at_ms: int | None,
    batch_index: int | None,
    redelivery_count: int | None,
    source: str | None,
    as_json: bool,
) -> None:
    """Acknowledge positions, each with the time of its delivery.

    With --count, and from a file, only that delivery is acknowledged, not a later one. Each ignored position is printed
    with the reason.

    \b
    Examples:
      tarry ack flights departures --ledger 1 --entries 7 --at 1896091200000
      tarry get flights departures --json | tarry ack flights departures --file -
    """
    given, ignored = 0, _Ignored()
    with (
        _given(ledger, entries, deliver_at_ms, batch_index, redelivery_count, source, timed=True) as (parts, total),
        output.progress(f"acknowledging {topic}", total=total, quiet=as_json) as shown,
    ):
        for positions, written in parts:
            with written.named_in_refusals():
                ignored.add(positions, connected.ack(topic, subscription, positions))
            given += positions.rows
            shown.advance(positions.rows)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "given": given, **ignored.as_json()})
    else:
        click.echo(f"acknowledged {output.rows_text(given - ignored.count)}, ignored {ignored.count:,}")
        ignored.note()


class _Ignored:
    """The positions that the requests of a command ignored."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: list[dict[str, Any]] = []

    def add(self, positions: columns.Positions, ignored: results.Ignored) -> None:
        self.count += ignored
        for row, reason in ignored.items():
            name = reason.name if isinstance(reason, results.IgnoredReason) else f"reason {reason}"
            delivery = batch.DeliveryId.of(positions, row)
            shown = {"ledger_id": delivery.ledger_id, "entry_id": delivery.entry_id}
            if delivery.batch_index is not None:
                shown["batch_index"] = delivery.batch_index
            self._rows.append({**shown, "reason": name})

    def as_json(self) -> dict[str, Any]:
        return {"ignored": self.count, "ignored_rows": self._rows}

    def note(self) -> None:
        """Print each ignored position with the reason, as many lines as fit a screen."""

        def line(row: dict[str, Any]) -> str:
            part = f".{row['batch_index']}" if "batch_index" in row else ""
            why = _WHY.get(row["reason"], row["reason"])
            return f"ignored: ledger {row['ledger_id']} entry {row['entry_id']}{part}: {why}"

        output.first_notes(map(line, self._rows), count=len(self._rows))


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@_position_options
@click.option("--delay", "--in", "delay_ms", type=rows.Duration(), help="Redeliver after this time: 500ms, 10s, 1h.")
@click.option("--level", "delay_level", type=int, help="Redeliver after the delay of this level; 0 means at once.")
@click.option("--reject", is_flag=True, help="Make them dead letters instead, which are not redelivered.")
@click.option("--reason", help="Reason, shown with the dead letters.")
@click.option("--key", help="Ordering key of positions that Tarry did not deliver.")
@click.option("--forwarded", is_flag=True, help="They were acknowledged when passed on, and have failed since.")
@connection.connected
def nack(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    ledger: int | None,
    entries: range | None,
    deliver_at_ms: int | None,
    batch_index: int | None,
    redelivery_count: int | None,
    source: str | None,
    delay_ms: int | None,
    delay_level: int | None,
    reject: bool,
    reason: str | None,
    key: str | None,
    forwarded: bool,
    as_json: bool,
) -> None:
    """Negatively acknowledge positions, so that Tarry redelivers them to SUBSCRIPTION later.

    Without --delay and --level the policy of SUBSCRIPTION sets the time of redelivery. The policy also limits how often
    a position is redelivered before it becomes a dead letter. Without --at the positions are messages that Tarry did
    not deliver: they came straight from the message log. With --batch-index only that message of each entry is
    redelivered. With --count, and from a file, only that delivery is meant. With --forwarded, positions that are
    already acknowledged are redelivered too. Each ignored position is printed with the reason.

    \b
    Examples:
      tarry nack flights departures --ledger 1 --entries 7 --at 1896091200000 --level 3
      tarry get flights departures --json | tarry nack flights departures --file - --delay 10s
      tarry nack flights departures --ledger 9 --entries 0-4 --delay 1m
      tarry nack flights departures --ledger 9 --entries 5 --batch-index 2
      tarry nack flights departures --ledger 9 --entries 6 --reject --reason unreadable
      tarry nack flights departures --ledger 1 --entries 7 --at 1896091200000 --count 0 --forwarded
    """
    if delay_ms is not None and delay_level is not None:
        raise click.UsageError("give at most one of --delay and --level")
    if reject and (delay_ms is not None or delay_level is not None):
        raise click.UsageError("--reject: a dead letter is not redelivered, so leave out --delay and --level")
    if reason is not None and not reject:
        raise click.UsageError("--reason is for --reject")
    if key is not None and (source is not None or deliver_at_ms is not None):
        raise click.UsageError("--key is for positions that Tarry did not hand out: it knows the key of all others")
    how: dict[str, Any] = {"key_hash": None if key is None else hashing.key_hash(key), "forwarded": forwarded}
    send: Callable[[str, str, columns.Positions], results.Nacked] = (
        functools.partial(connected.reject, reason=reason or "", **how)
        if reject
        else functools.partial(connected.nack, delay_ms=delay_ms, delay_level=delay_level, **how)
    )
    given, ignored = 0, _Ignored()
    answers: list[results.Nacked] = []
    with (
        _given(ledger, entries, deliver_at_ms, batch_index, redelivery_count, source, timed=False) as (parts, total),
        output.progress(f"negatively acknowledging {topic}", total=total, quiet=as_json) as shown,
    ):
        for positions, written in parts:
            with written.named_in_refusals():
                answer = send(topic, subscription, positions)
            ignored.add(positions, answer.ignored)
            answers.append(answer)
            given += positions.rows
            shown.advance(positions.rows)
    became = results.Nacked.merge(answers)
    if as_json:
        counts = {"dead_lettered": became.dead_lettered, **ignored.as_json()}
        output.as_json({"topic": topic, "subscription": subscription, "given": given, **counts})
    else:
        click.echo(_what_became_of_nacked(given, became))
        ignored.note()


def _what_became_of_nacked(given: int, became: results.Nacked) -> str:
    later = given - became.ignored - became.dead_lettered
    counts = [f"redelivered later: {output.rows_text(later)}"] if later or not became.dead_lettered else []
    if became.dead_lettered:
        counts.append(f"dead letters: {output.rows_text(became.dead_lettered)}")
    return ", ".join([*counts, f"ignored: {became.ignored:,}"])
