"""Commands of operators for a whole topic: policy, delete, levels.

The daemon reads tables of delays, checks limits and knows defaults.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import click

from tarry import errors, policies, results
from tarry.cli import connection, output, rows
from tarry.threads import client

FIELDS = tuple(field.name for field in dataclasses.fields(policies.TopicPolicy))
_YES_OR_NO = ("shared_index", "two_phase_deletion_enabled")


@connection.command()
@click.argument("topic")
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE", help="Set a field, the others stay; repeatable.")
@click.option(
    "--unset",
    multiple=True,
    type=click.Choice(FIELDS),
    metavar="NAME",
    help="Reset a field to the daemon's default; repeatable.",
)
@connection.connected
def policy(
    *, connected: client.Client, topic: str, given: tuple[str, ...], unset: tuple[str, ...], as_json: bool
) -> None:
    """Show or change the policy of TOPIC: what is set, and what is in force.

    A change applies to the future: rows keep their times, buckets keep their form. Fields that end in _ms are shown as
    durations such as 7d, with --json in ms, and take both; bucket_form is columnar or compatible; shared_index and
    two_phase_deletion_enabled are true or false. Setting a field creates the topic if it is new. A change reads the
    policy and writes it as a whole, so of two changes at the same time only one is kept.

    \b
    Examples:
      tarry policy flights
      tarry policy flights --set bucket_rows_max=50000 --set delay_max_ms=7d
      tarry policy flights --unset delay_max_ms --json
    """
    changes = {name: _value(name, text) for name, text in rows.names_and_values(given, option="--set").items()}
    for name in unset:
        if name in changes:
            raise click.UsageError(f"--unset {name}: it is set by the same command")
        changes[name] = None
    if changes:
        stored = dataclasses.replace(_stored(connected, topic, new=bool(given)), **changes)
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
        ((name, _text(name, stored_fields[name]), _text(name, effective[name])) for name in FIELDS),
        empty="",
    )


def _stored(connected: client.Client, topic: str, *, new: bool) -> policies.TopicPolicy:
    """Return the stored policy; an empty one for a topic that is `new` with this command."""
    try:
        return connected.policy(topic).policy
    except errors.NotFound:
        if not new:
            raise
        return policies.TopicPolicy()


def _value(name: str, text: str) -> Any:
    if name not in FIELDS:
        raise click.UsageError(f"--set {name}={text}: there is no field {name!r}; there are {', '.join(FIELDS)}")
    if name == "bucket_form":
        try:
            return policies.BucketForm[text.upper()]
        except KeyError:
            raise click.UsageError(f"--set {name}={text}: {name} is columnar or compatible") from None
    if name in _YES_OR_NO:
        if text not in ("true", "false"):
            raise click.UsageError(f"--set {name}={text}: {name} is true or false")
        return text == "true"
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    if not name.endswith("_ms"):
        raise click.UsageError(f"--set {name}={text}: {name} is an integer")
    try:
        return rows.Duration()(text)
    except click.BadParameter as error:
        raise click.UsageError(f"--set {name}={text}: {error.message}; or an integer of ms") from None


def _text(name: str, value: object) -> str:
    """Return the text that --set takes."""
    if value is None:
        return "-"
    if isinstance(value, int) and name.endswith("_ms"):
        return output.duration_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _named(policy: policies.TopicPolicy) -> dict[str, object]:
    fields = dataclasses.asdict(policy)
    if policy.bucket_form is not None:
        fields["bucket_form"] = policy.bucket_form.name.lower()
    return fields


@connection.command()
@click.argument("topic")
@connection.asked_first(lambda *, topic, **_: f"Delete topic {topic} with its rows, subscriptions and policy?")
@connection.connected
def delete(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Delete TOPIC with its rows, subscriptions and policy. A later add under the same name makes a new topic.

    \b
    Examples:
      tarry delete flights --yes
    """
    with output.waiting(f"deleting {topic}"):
        deleted = connected.delete_topic(topic)
    if as_json:
        output.as_json({"topic": topic, **vars(deleted)})
    else:
        # The answer with the count was lost.
        counted = "its rows" if deleted.rows is None else output.rows_text(deleted.rows)
        output.line(f"{topic} is deleted with {counted}")


@connection.command()
@click.argument("topic", required=False, default="")
@click.option("--set", "table", metavar="TABLE", help="Delays, level 1 first: '1s 5s 10s 30s 1m'.")
@click.option(
    "--clamp/--no-clamp",
    default=None,
    help="A level above the last one counts as the last one, or is refused.  [default with --set: clamp]",
)
@click.option("--reset", is_flag=True, help="Reset the topic to the daemon's levels.")
@connection.connected
def levels(
    *, connected: client.Client, topic: str, table: str | None, clamp: bool | None, reset: bool, as_json: bool
) -> None:
    """Show the delay levels of TOPIC and the pending rows of each, or set them. Without TOPIC: the daemon's levels.

    A table has 1 to 256 delays, each a whole number of s, m, h or d. Setting a table creates TOPIC if it is new.
    Pending rows keep their time.

    \b
    Examples:
      tarry levels
      tarry levels flights --set '1s 5s 10s 30s 1m 5m 1h'
      tarry levels flights --no-clamp
      tarry levels flights --reset --json
    """
    changes = table is not None or clamp is not None or reset
    if changes and not topic:
        raise click.UsageError("name the TOPIC; the daemon's own levels are in its configuration")
    if reset and (table is not None or clamp is not None):
        raise click.UsageError("--reset takes the daemon's levels, so leave out --set and --clamp")
    warnings: tuple[str, ...] = ()
    if changes:
        wanted = None
        if not reset:
            kept = connected.delay_levels(topic).levels.table if table is None else table
            wanted = policies.DelayLevels(kept, clamp=clamp is not False)
        warnings = connected.set_delay_levels(topic, wanted).warnings
    in_force = connected.delay_levels(topic)
    if as_json:
        output.as_json(_as_json(topic, in_force, warnings))
    else:
        _show(topic, in_force)
    for warning in warnings:
        output.note(warning)


def _as_json(topic: str, in_force: results.DelayLevelsInForce, warnings: tuple[str, ...]) -> dict[str, object]:
    return {
        "topic": topic or None,
        "table": in_force.levels.table,
        "clamp": in_force.levels.clamp,
        "of_topic": in_force.of_topic,
        "delay_ms": in_force.delay_ms,
        "pending": in_force.pending,
        "warnings": warnings,
    }


def _show(topic: str, in_force: results.DelayLevelsInForce) -> None:
    names = ("level", "delay", "pending") if topic else ("level", "delay")
    by_level = itertools.zip_longest(map(output.duration_text, in_force.delay_ms), in_force.pending)
    output.table(
        f"Delay levels of {topic}" if topic else "Delay levels of the daemon",
        names,
        # A level that only a former table had no longer has a delay.
        ((level, delay or "-", pending or 0)[: len(names)] for level, (delay, pending) in enumerate(by_level, 1)),
        empty="",
    )
    last = len(in_force.delay_ms)
    above = f"is level {last}" if in_force.levels.clamp else "is refused"
    whose = "set for the topic" if in_force.of_topic else "the daemon's"
    output.note(f"{whose}; a level above {last} {above}")
