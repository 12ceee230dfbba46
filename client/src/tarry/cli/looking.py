"""Commands that show topics: topics, stats, retention, subscriptions, buckets, lookup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from tarry import inspection
from tarry.cli import connection, output, policy_text, rows
from tarry.threads import client

P = TypeVar("P", bound=inspection.Page[Any])

_BUCKET_COLUMNS = (
    *("bucket", "rows", "pending", "due", "bytes", "ledgers"),
    *("due from", "due until", "loaded", "level", "index", "state"),
)


@connection.command()
@connection.connected
def topics(*, connected: client.Client, as_json: bool) -> None:
    """List the topics of the daemon.

    Pending rows are not due yet. Due rows wait for an acknowledgement or, where there is no subscription, for the first
    one.

    \b
    Examples:
      tarry topics
      tarry topics --json --address 10.0.0.5:7461
    """
    pages = list(_pages(connected.topics_page))
    summaries = [summary for page in pages for summary in page.items]
    if as_json:
        for summary in summaries:
            output.as_json(summary)
    else:
        output.table(
            "Topics",
            ("topic", "shard", "pending", "due", "buckets", "subscriptions", "next due"),
            (
                (
                    each.topic,
                    each.shard,
                    each.pending,
                    each.due,
                    each.buckets,
                    each.subscriptions,
                    output.At(each.next_due_ms),
                )
                for each in summaries
            ),
            empty="there are no topics; `tarry add` creates one",
        )
    if pages[-1].topics_loading:
        output.note(f"{pages[-1].topics_loading:,} topics are not loaded yet and not listed: ask again soon")
    if pages[-1].topics_damaged:
        output.note(f"{pages[-1].topics_damaged:,} topics are damaged and not listed: the daemon's log names them")


def _pages(page_from: Callable[[str], P]) -> Iterator[P]:
    """Yield every page of a list; at least one."""
    token = ""
    while True:
        page = page_from(token)
        yield page
        token = page.next_page_token
        if not token:
            return


@connection.command()
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
            "due": counts.due,
            "in the mutable bucket": counts.mutable_rows,
            "sealed buckets": counts.buckets,
            "bytes of sealed buckets": counts.bucket_bytes,
            "merges in flight": counts.merges,
            "rows in memory": counts.loaded_rows,
            "next due": output.time_text(counts.next_due_ms),
            "last due, at most": output.time_text(counts.last_due_ms),
            "ledgers": counts.ledgers,
            "lowest position": output.position_text(counts.lowest_position),
            "oldest due, not delivered": output.time_text(counts.oldest_due_ms),
            "shard": counts.shard,
            "epoch": counts.epoch,
            "incarnation": counts.incarnation,
            "applied slot": counts.applied_slot,
            "topic id": counts.topic_id,
            "as of": output.time_text(counts.as_of_ms),
        },
    )
    click.echo("")
    _subscription_table(counts.topic, counts.subscriptions)
    output.rebuild_notes(counts.rebuild_needed)


@connection.command()
@click.argument("topic")
@click.option(
    "--ledger",
    "ledgers",
    type=click.IntRange(0, rows.U64_MAX),
    multiple=True,
    help="Only this ledger; repeatable. Default: all.",
)
@connection.connected
def retention(*, connected: client.Client, topic: str, ledgers: tuple[int, ...], as_json: bool) -> None:
    """Show what TOPIC needs of its message log: for each ledger the lowest entry with a row, due or not.

    A log may be cut below the lowest position, as far as its messages have been added, less those that consumers may
    still negatively acknowledge. For ledgers of a damaged bucket, all entries are needed.

    \b
    Examples:
      tarry retention flights
      tarry retention flights --ledger 7 --ledger 8 --json
    """
    needed = connected.retention(topic, list(ledgers) or None)
    if as_json:
        output.as_json(
            {
                "topic": topic,
                "lowest_position": needed.lowest_position,
                "ledgers": list(needed),
                "uncertain": needed.uncertain,
                "as_of_ms": needed.as_of_ms,
            }
        )
        return
    output.table(
        f"What {topic} needs of its log",
        ("ledger", "lowest entry"),
        # Ids are text, because they are names, not counts.
        ((str(ledger), str(entry)) for ledger, entry in needed),
        empty=f"{topic} has no rows" + (" of these ledgers" if ledgers else ""),
    )
    for first, last in needed.uncertain:
        output.note(f"ledgers {first} to {last}: rows were lost with a damaged bucket, all of their entries are needed")


def _subscription_table(
    topic: str, subscriptions: Sequence[inspection.SubscriptionStats], *, with_policies: bool = False
) -> None:
    names = ["subscription", "own pending", "backlog", "in flight", "leased", "nacked", "dead letters"]
    names += ["waiting", "dispatchers", "consumers", "permits"]
    listed = []
    for each in subscriptions:
        shown = [
            each.subscription,
            each.own_pending,
            each.backlog,
            each.in_flight,
            each.leased,
            each.nacked,
            each.dead_letters,
            each.waiting,
            each.dispatchers,
            each.consumers,
            each.permits,
        ]
        if with_policies:
            shown += policy_text.subscription(each.policy).values()
        else:
            shown += [output.At(each.next_redelivery_ms), output.At(each.since_ms or None), str(each.subscription_id)]
        listed.append(shown)
    names += policy_text.NAMES if with_policies else ["next redelivery", "since", "id"]
    output.table(
        f"Subscriptions of {topic}",
        names,
        listed,
        empty=f"{topic} has no subscription: due rows wait for the first one; `tarry subscription create` creates it",
    )


@connection.command()
@click.argument("topic")
@connection.connected
def subscriptions(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """List the subscriptions of TOPIC with their counts and policies; - stands for the daemon's default.

    Own pending rows were added for the subscription alone and are not due yet. Nacked rows are in the backlog and wait
    for their redelivery. Dead letters were given up: see `tarry dead-letters`. Waiting rows wait for their key: see
    `tarry consumers`.

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
    _subscription_table(topic, listed, with_policies=True)


@connection.command()
@click.argument("topic")
@connection.connected
def buckets(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """List the sealed buckets of TOPIC, quarantined ones included.

    A bucket of level 0 was sealed from memory; a bucket of a higher level was merged. The index is "shared", or names
    the subscription that the rows of the bucket were added for alone.

    \b
    Examples:
      tarry buckets flights
      tarry buckets flights --json
    """
    pages = list(_pages(lambda token: connected.buckets_page(topic, token)))
    listed = [each for page in pages for each in page.items]
    if as_json:
        for each in listed:
            output.as_json(each)
        return
    mutable_rows = pages[-1].mutable_rows
    output.table(
        f"Buckets of {topic}",
        _BUCKET_COLUMNS,
        (
            (
                # The part of the name that differs from all others; --json has the whole name.
                each.bucket.rsplit("-", 1)[-1],
                each.rows,
                each.pending,
                each.due,
                each.size_bytes,
                f"{each.first_ledger_id}-{each.last_ledger_id}",
                output.At(each.min_deliver_at_ms),
                output.At(each.max_deliver_at_ms),
                f"{each.segments_loaded}/{each.segments}",
                each.level,
                each.subscription or "shared",
                "quarantined" if each.quarantined else "live",
            )
            for each in listed
        ),
        empty=f"{topic} has no sealed bucket; `tarry seal` creates one from its rows",
    )
    for each in listed:
        if each.quarantined:
            output.note(f"quarantined: {each.damage}; `tarry stats {topic}` shows what to add again")
    if mutable_rows:
        output.note(f"{output.rows_text(mutable_rows)} of {topic} in no sealed bucket yet")


@connection.command()
@click.argument("topic")
@connection.connected
def lookup(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Show the shard of TOPIC and the daemon that owns it. Any daemon answers.

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
