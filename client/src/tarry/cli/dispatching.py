"""Commands of dispatchers: watch, get, ack, and the subscriptions that come and go.

Owns: their arguments, and what each of them does with the client library.
Does not own: reading positions (`tarry.cli.rows`), showing results and failures (`tarry.cli.output`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator

import click

from tarry import batch, client, policies
from tarry.cli import connection, output, rows

# Positions in one request of `tarry ack`.
ACKNOWLEDGE_ROWS = 50_000


@click.command()
@click.argument("topic")
@click.argument("subscription")
@click.option(
    "--ack/--no-ack", default=True, show_default=True, help="Acknowledge, or only look: it is handed out again."
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many positions.")
@click.option("--create", is_flag=True, help="Create the subscription, and the topic, if they do not exist.")
@click.option(
    "--permits",
    type=click.IntRange(1, 1_000_000),
    default=10_000,
    show_default=True,
    help="Positions that may be received and not acknowledged yet.",
)
@connection.connected
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
        output.rebuild_notes(opened.rebuild_needed)
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
    hashes = [None] * len(received) if received.key_hash is None else received.key_hash.tolist()
    columns = (received.ledger_id, received.entry_id, received.deliver_at_ms, received.lateness_ms)
    received_text = output.time_text(received.received_at_ms)
    leased = {"lease_ms": received.lease_ms} if isinstance(received, batch.Leased) else {}
    lines = []
    for ledger_id, entry_id, deliver_at_ms, late_ms, key_hash in zip(
        *(column.tolist() for column in columns), hashes, strict=True
    ):
        if as_json:
            row = {
                "ledger_id": ledger_id,
                "entry_id": entry_id,
                "deliver_at_ms": deliver_at_ms,
                "received_at_ms": received.received_at_ms,
                "lateness_ms": late_ms,
                "key_hash": key_hash,
                "epoch": received.epoch,
            }
            lines.append(json.dumps(row | leased))
        else:
            due_text = output.time_text(deliver_at_ms)
            lines.append(f"{received_text}  ledger {ledger_id}  entry {entry_id}  due {due_text}  late {late_ms} ms")
    if lines:
        click.echo("\n".join(lines))


@click.command()
@click.argument("topic")
@click.argument("subscription")
@click.option(
    "--max", "max_rows", type=click.IntRange(1, 10_000), default=100, show_default=True, help="At most so many."
)
@click.option("--lease", "lease_ms", type=rows.Duration(), help="How long: 30s, 5m. Default: the subscription's.")
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
    """Lease positions of SUBSCRIPTION that are due, and print them. They are due again when the lease is over.

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
    if not as_json:
        output.note(_what_became(leased, acknowledged=ack))


def _what_became(leased: batch.Leased, *, acknowledged: bool) -> str:
    if not len(leased):
        return "nothing is due"
    if acknowledged:
        return f"acknowledged {output.rows_text(len(leased))}"
    return f"leased {output.rows_text(len(leased))} for {output.duration_text(leased.lease_ms)}"


@click.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--ledger", type=click.IntRange(0, rows.U64_MAX), help="Ledger of the entries.")
@click.option("--entries", type=rows.EntryRange(), metavar="N or FIRST-LAST", help="Entries, both ends included.")
@click.option("--at", "deliver_at_ms", type=rows.Moment(), help="The time they were handed out with.")
@click.option(
    "--file",
    "source",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="JSON lines as `tarry get --json` prints them; - is standard input.",
)
@connection.connected
def ack(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    ledger: int | None,
    entries: range | None,
    deliver_at_ms: int | None,
    source: str | None,
    as_json: bool,
) -> None:
    """Acknowledge positions with the times they were handed out with. What is not in the backlog is ignored.

    \b
    Examples:
      tarry ack flights departures --ledger 1 --entries 7 --at 1896091200000
      tarry get flights departures --json | tarry ack flights departures --file -
    """
    with contextlib.ExitStack() as opened:
        if source is not None:
            if any(given is not None for given in (ledger, entries, deliver_at_ms)):
                raise click.UsageError("--file has the positions: leave out --ledger, --entries and --at")
            lines = opened.enter_context(click.open_file(source, encoding="utf-8-sig"))
            total = rows.lines_of(lines, header=False)
            batches = rows.positions_from_json(lines, name=source, batch_rows=ACKNOWLEDGE_ROWS)
        elif ledger is None or entries is None or deliver_at_ms is None:
            raise click.UsageError("give --ledger, --entries and --at, or --file")
        else:
            total = entries.stop - entries.start
            batches = rows.positions_from_options(ledger, entries, deliver_at_ms, batch_rows=ACKNOWLEDGE_ROWS)
        given, ignored = _acknowledge(connected, topic, subscription, batches, total=total, quiet=as_json)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "given": given, "ignored": ignored})
    else:
        click.echo(f"acknowledged {output.rows_text(given - ignored)}, ignored {ignored:,}")


def _acknowledge(
    connected: client.Client,
    topic: str,
    subscription: str,
    batches: Iterator[rows.Positions],
    *,
    total: int | None,
    quiet: bool,
) -> tuple[int, int]:
    """How many positions there were, and how many of them were ignored."""
    given = ignored = 0
    with output.progress(f"acknowledging {topic}", total=total, quiet=quiet) as shown:
        for positions in rows.readable(batches):
            ignored += connected.ack(topic, subscription, positions)
            given += len(positions[1])
            shown.advance(len(positions[1]))
    return given, ignored


@click.group()
def subscription() -> None:
    """Create, change and delete subscriptions; `tarry subscriptions TOPIC` lists them.

    \b
    Examples:
      tarry subscription create flights departures --lease 1m
      tarry subscription delete flights departures
    """


def _policy_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the fields of a subscription's policy."""
    for option in (
        click.option(
            "--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property, free text; repeatable."
        ),
        click.option("--lease", "lease_ms", type=rows.Duration(), help="Lease of a `get` that names none: 30s, 5m."),
        click.option("--in-flight", "in_flight_rows_max", type=click.IntRange(min=1), help="Most positions in flight."),
    ):
        command = option(command)
    return command


def _policy(
    in_flight_rows_max: int | None, lease_ms: int | None, properties: tuple[str, ...]
) -> policies.SubscriptionPolicy:
    named = rows.names_and_values(properties, option="--property")
    return policies.SubscriptionPolicy(in_flight_rows_max=in_flight_rows_max, lease_ms=lease_ms, properties=named)


@subscription.command("create")
@click.argument("topic")
@click.argument("subscription")
@_policy_options
@connection.connected
def create_subscription(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    in_flight_rows_max: int | None,
    lease_ms: int | None,
    properties: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create SUBSCRIPTION, and TOPIC if it is new. It is OK when it exists with this policy.

    The first subscription of a topic is owed everything in its index, a later one what comes due after its creation.

    \b
    Examples:
      tarry subscription create flights departures
      tarry subscription create flights departures --in-flight 1000 --lease 1m --property team=gates
    """
    created = connected.create_subscription(topic, subscription, _policy(in_flight_rows_max, lease_ms, properties))
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **vars(created)})
    else:
        became = "is created" if created.created else "exists already"
        click.echo(f"{subscription} {became}, id {created.subscription_id}")


@subscription.command("update")
@click.argument("topic")
@click.argument("subscription")
@_policy_options
@click.option("--defaults", is_flag=True, help="Without the options above: the daemon's default for everything.")
@connection.connected
def update_subscription(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    in_flight_rows_max: int | None,
    lease_ms: int | None,
    properties: tuple[str, ...],
    defaults: bool,
    as_json: bool,
) -> None:
    """Replace the policy of SUBSCRIPTION as a whole: what is not given has the daemon's default from now on.

    \b
    Examples:
      tarry subscription update flights departures --in-flight 500 --lease 1m
      tarry subscription update flights departures --defaults
    """
    wanted = _policy(in_flight_rows_max, lease_ms, properties)
    if defaults != (wanted == policies.SubscriptionPolicy()):
        raise click.UsageError("give what the policy is to hold, or --defaults")
    policy = connected.update_subscription(topic, subscription, wanted)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **dataclasses.asdict(policy)})
    else:
        output.facts(f"Policy of {subscription} of {topic}", output.subscription_policy(policy))


@subscription.command("delete")
@click.argument("topic")
@click.argument("subscription")
@connection.asked_first(
    lambda *, topic, subscription, **_: f"Delete subscription {subscription} of {topic} and its backlog?"
)
@connection.connected
def delete_subscription(*, connected: client.Client, topic: str, subscription: str, as_json: bool) -> None:
    """Delete SUBSCRIPTION. Deleting the last one of a topic drops what is due.

    \b
    Examples:
      tarry subscription delete flights departures --yes
    """
    with output.waiting(f"deleting {subscription} of {topic}"):
        connected.delete_subscription(topic, subscription)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "deleted": True})
    else:
        click.echo(f"{subscription} is deleted")
