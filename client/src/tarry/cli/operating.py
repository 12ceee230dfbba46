"""Commands of operators: policy, seal, delete.

Owns: their arguments, and a policy as it is written on a command line.
Does not own: limits and defaults, which are the daemon's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from tarry import client, errors, policies, results
from tarry.cli import connection, output, rows

FIELDS = tuple(field.name for field in dataclasses.fields(policies.TopicPolicy))


@click.command()
@click.argument("topic")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="Set a field, the others stay; repeatable.")
@click.option("--unset", multiple=True, type=click.Choice(FIELDS), help="Give a field the daemon's default again.")
@connection.connected
def policy(
    *, connected: client.Client, topic: str, given: tuple[str, ...], unset: tuple[str, ...], as_json: bool
) -> None:
    """Show the policy of TOPIC, or change it. Rows keep their times, buckets their form.

    Fields that end in _ms also take durations such as 7d; bucket_form is columnar or compatible. Setting a field
    creates the topic if it is new.

    \b
    Examples:
      tarry policy flights
      tarry policy flights --set bucket_rows_max=50000 --set delay_max_ms=7d
      tarry policy flights --unset delay_max_ms --json
    """
    changes: dict[str, Any] = dict(_field(each) for each in given) | dict.fromkeys(unset)
    if changes:
        stored = dataclasses.replace(_stored(connected, topic), **changes)
        shown = results.TopicPolicies(policy=stored, effective=connected.set_policy(topic, stored))
    else:
        shown = connected.policy(topic)
    if as_json:
        output.as_json({"topic": topic, "policy": _named(shown.policy), "effective": _named(shown.effective)})
        return
    stored_fields, effective = _named(shown.policy), _named(shown.effective)
    output.table(
        f"Policy of {topic}",
        ("field", "set", "in force"),
        ((name, "-" if stored_fields[name] is None else stored_fields[name], effective[name]) for name in FIELDS),
    )


def _stored(connected: client.Client, topic: str) -> policies.TopicPolicy:
    try:
        return connected.policy(topic).policy
    except errors.NotFound:
        return policies.TopicPolicy()


def _field(text: str) -> tuple[str, Any]:
    name, value = rows.name_and_value(text, option="--set")
    if name not in FIELDS:
        raise click.UsageError(f"--set {text}: there is no field {name!r}; there are {', '.join(FIELDS)}")
    if name == "bucket_form":
        try:
            return name, policies.BucketForm[value.upper()]
        except KeyError:
            raise click.UsageError(f"--set {text}: bucket_form is columnar or compatible") from None
    if value.removeprefix("-").isdecimal():
        return name, int(value)
    if name.endswith("_ms"):
        return name, rows.Duration()(value)
    raise click.UsageError(f"--set {text}: {name} is an integer")


def _named(policy: policies.TopicPolicy) -> dict[str, object]:
    fields = dataclasses.asdict(policy)
    if policy.bucket_form is not None:
        fields["bucket_form"] = policy.bucket_form.name.lower()
    return fields


@click.command()
@click.argument("topic")
@connection.connected
def seal(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Seal the mutable bucket of TOPIC now; done when the bucket is committed.

    \b
    Examples:
      tarry seal flights
    """
    sealed = connected.seal(topic)
    if as_json:
        output.as_json({"topic": topic, **vars(sealed)})
    elif sealed.rows:
        click.echo(f"{sealed.rows} rows of {topic} are in {sealed.bucket}")
    else:
        click.echo(f"{topic} has nothing to seal")


@click.command()
@click.argument("topic")
@connection.asked_first("Delete topic {topic} with its rows, subscriptions and policy?")
@connection.connected
def delete(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Delete TOPIC with its rows, subscriptions and policy. Added to later, it is a new topic.

    \b
    Examples:
      tarry delete flights --yes
    """
    deleted = connected.delete_topic(topic)
    if as_json:
        output.as_json({"topic": topic, **vars(deleted)})
    else:
        rows_text = "an unknown number of" if deleted.rows is None else f"{deleted.rows}"
        click.echo(f"{topic} is deleted with {rows_text} rows")
