"""Commands that look: topics, stats, subscriptions, buckets, lookup.

Owns: what of an answer is shown, and in which columns.
Does not own: how it is shown (`tarry.cli.output`).
"""

from __future__ import annotations

from collections.abc import Iterable

import click

from tarry import client, results
from tarry.cli import connection, output


@click.command()
@connection.connected
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


@click.command()
@click.argument("topic")
@connection.connected
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
    for each in counts.rebuild_needed:
        click.echo(f"tarry: {output.rebuild_text(each)}", err=True)
    click.echo("")
    _subscription_table(counts.subscriptions)


def _subscription_table(subscriptions: Iterable[results.SubscriptionStats]) -> None:
    output.table(
        "Subscriptions",
        ("subscription", "backlog", "in flight", "leased", "dispatchers", "permits", "since", "id"),
        (
            (
                each.subscription,
                each.backlog,
                each.in_flight,
                each.leased,
                each.dispatchers,
                each.permits,
                output.time_text(each.since_ms) if each.since_ms else "-",
                each.subscription_id,
            )
            for each in subscriptions
        ),
    )


@click.command()
@click.argument("topic")
@connection.connected
def subscriptions(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """List the subscriptions of TOPIC with their counts and policies.

    \b
    Examples:
      tarry subscriptions flights
      tarry subscriptions flights --json
    """
    listed = list(connected.subscriptions(topic))
    if as_json:
        for each in listed:
            output.as_json(each)
        return
    _subscription_table(listed)


@click.command()
@click.argument("topic")
@connection.connected
def buckets(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """List the sealed buckets of TOPIC, quarantined ones included.

    \b
    Examples:
      tarry buckets flights
      tarry buckets flights --json
    """
    listed = list(connected.buckets(topic))
    if as_json:
        for each in listed:
            output.as_json(each)
        return
    output.table(
        f"Buckets of {topic}",
        (
            "bucket",
            "rows",
            "pending",
            "due",
            "bytes",
            "ledgers",
            "due from",
            "due until",
            "segments",
            "loaded",
            "state",
        ),
        (
            (
                each.bucket.rsplit("/", 1)[-1],
                each.rows,
                each.pending,
                each.due,
                each.size_bytes,
                f"{each.first_ledger_id}-{each.last_ledger_id}",
                output.time_text(each.min_deliver_at_ms),
                output.time_text(each.max_deliver_at_ms),
                each.segments,
                each.segments_loaded,
                f"quarantined: {each.damage}" if each.quarantined else "live",
            )
            for each in listed
        ),
    )


@click.command()
@click.argument("topic")
@connection.connected
def lookup(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Tell the shard of TOPIC and the daemon that owns it. Any daemon answers.

    \b
    Examples:
      tarry lookup flights
    """
    found = connected.lookup(topic)
    if as_json:
        output.as_json({"topic": topic, **vars(found)})
        return
    output.facts(
        topic,
        {
            "shard": found.shard,
            "owner": found.owner or "-",
            "address": found.owner_address or "-",
            "epoch": found.epoch,
            "served by the daemon that answered": "yes" if found.served_here else "no",
        },
    )
