"""Commands that create, change and delete subscriptions.

The daemon checks limits and knows defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from tarry import policies
from tarry.cli import connection, output, policy_text, rows
from tarry.threads import client

_SELECTORS = policy_text.choices(policies.HashSelector)
_KEY_ORDERS = policy_text.choices(policies.KeyOrder)
_NACK_ORDERS = policy_text.choices(policies.NackOrder)
_KEY_SHARED_FIELDS = dataclasses.fields(policies.KeySharedPolicy)


@click.group(cls=connection.Group)
def subscription() -> None:
    """Create, change and delete subscriptions; `tarry subscriptions TOPIC` lists them.

    \b
    Examples:
      tarry subscription create flights departures --lease 1m
      tarry subscription update flights departures --redelivery 'constant 10s' --max-redeliver-count 5
      tarry subscription delete flights departures
    """


def _policy_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of a subscription's policy."""
    for option in (
        click.option(
            "--nack-block-max",
            "nack_block_max_ms",
            type=rows.Duration(),
            help="With block-key: the longest time that later positions of a key wait. Default: 10m.",
        ),
        click.option(
            "--nack-order",
            type=click.Choice(list(_NACK_ORDERS)),
            help="block-key: later positions of a key wait for a nacked one. skip, the default: they are delivered.",
        ),
        click.option(
            "--allow-out-of-order",
            "allow_out_of_order_delivery",
            is_flag=True,
            help="Keep no order when keys move to another consumer.",
        ),
        click.option(
            "--key-order",
            "order",
            type=click.Choice(list(_KEY_ORDERS)),
            help="What keeps order when keys move to another consumer. Default: draining-hashes.",
        ),
        click.option(
            "--points",
            "points_per_consumer",
            type=click.IntRange(1, 1000),
            help="With consistent-hashing: points of each consumer on the ring. Default: 100.",
        ),
        click.option(
            "--selector",
            type=click.Choice(list(_SELECTORS)),
            help="How consumers share keys. Default: consistent-hashing.",
        ),
        click.option(
            "--nack-precision-bits",
            type=click.IntRange(0, 20),
            help="Redelivery times are rounded up to 2^N ms; 0 = exact.",
        ),
        click.option(
            "--ack-timeout",
            "ack_timeout_ms",
            type=rows.Duration(),
            help="A position that is in flight for this long is nacked.",
        ),
        click.option(
            "--max-redeliver-count",
            type=click.IntRange(0, 2**32 - 1),
            help="A position that would be redelivered more often becomes a dead letter.",
        ),
        click.option(
            "--redelivery",
            type=policy_text.Redelivery(),
            help=f"Delay of a nacked position: {policy_text.FORMS} (the delay levels from the third on).",
        ),
        click.option(
            "--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property, free text; repeatable."
        ),
        click.option("--lease", "lease_ms", type=rows.Duration(), help="Lease of a `get` that names none: 30s, 5m."),
        click.option("--in-flight", "in_flight_rows_max", type=click.IntRange(min=1), help="Most positions in flight."),
    ):
        command = option(command)
    return command


def _policy(*, properties: tuple[str, ...], **fields: Any) -> policies.SubscriptionPolicy:
    shared = _key_shared(**{field.name: fields.pop(field.name) for field in _KEY_SHARED_FIELDS})
    return policies.SubscriptionPolicy(
        properties=rows.names_and_values(properties, option="--property"), key_shared=shared, **fields
    )


def _key_shared(
    *, selector: str | None, order: str | None, nack_order: str | None, **fields: Any
) -> policies.KeySharedPolicy | None:
    """Return the policy, or None if none of its options is given."""
    policy = policies.KeySharedPolicy(
        selector=None if selector is None else _SELECTORS[selector],
        order=None if order is None else _KEY_ORDERS[order],
        nack_order=None if nack_order is None else _NACK_ORDERS[nack_order],
        **fields,
    )
    return None if policy == policies.KeySharedPolicy() else policy


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
    as_json: bool,
    **fields: Any,
) -> None:
    """Create SUBSCRIPTION, and TOPIC if it is new. Creating it again with the same policy is no error.

    The first subscription of a topic receives every row of the index. A later one receives the rows that come due after
    its creation.

    \b
    Examples:
      tarry subscription create flights departures
      tarry subscription create flights departures --in-flight 1000 --lease 1m --property team=gates
      tarry subscription create flights gates --redelivery 'exponential 1s x2 max 10m' --max-redeliver-count 8
      tarry subscription create flights bags --selector sticky --nack-order block-key --nack-block-max 1m
    """
    created = connected.create_subscription(topic, subscription, _policy(**fields))
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **vars(created)})
    else:
        became = "is created" if created.created else "exists already"
        output.line(f"{subscription} {became}, id {created.subscription_id}")


@subscription.command("update")
@click.argument("topic")
@click.argument("subscription")
@_policy_options
@click.option("--defaults", is_flag=True, help="Reset every field to the daemon's default; excludes the options above.")
@connection.connected
def update_subscription(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    defaults: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Replace the whole policy of SUBSCRIPTION. Fields that are not given take the daemon's defaults.

    \b
    Examples:
      tarry subscription update flights departures --in-flight 500 --lease 1m
      tarry subscription update flights departures --defaults
    """
    wanted = _policy(**fields)
    if defaults != (wanted == policies.SubscriptionPolicy()):
        raise click.UsageError("give the fields of the policy, or --defaults")
    policy = connected.update_subscription(topic, subscription, wanted)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **dataclasses.asdict(policy)})
    else:
        output.facts(f"Policy of {subscription} of {topic}", policy_text.subscription(policy))


def _delete_question(*, connected: client.Client, topic: str, subscription: str, **_: object) -> str:
    counts = connection.subscription_stats(connected, topic, subscription)
    taken = []
    if counts.backlog:
        taken.append(f"a backlog of {output.rows_text(counts.backlog)}")
    if counts.dead_letters:
        taken.append(output.count_text(counts.dead_letters, "dead letter"))
    return f"Delete subscription {subscription} of {topic}" + (f" with {' and '.join(taken)}?" if taken else "?")


@subscription.command("delete")
@click.argument("topic")
@click.argument("subscription")
@connection.connected
@connection.asked_first(_delete_question)
def delete_subscription(*, connected: client.Client, topic: str, subscription: str, as_json: bool) -> None:
    """Delete SUBSCRIPTION with its dead letters. Deleting the last one of a topic drops what is due.

    \b
    Examples:
      tarry subscription delete flights departures --yes
    """
    with output.waiting(f"deleting {subscription} of {topic}"):
        deleted = connected.delete_subscription(topic, subscription)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "deleted": True, **vars(deleted)})
    elif deleted.dead_letters:
        output.line(f"{subscription} is deleted with {output.count_text(deleted.dead_letters, 'dead letter')}")
    else:
        output.line(f"{subscription} is deleted")
