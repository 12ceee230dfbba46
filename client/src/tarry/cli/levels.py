"""The command about delay levels.

Owns: its arguments, and how a table of delays is shown.
Does not own: reading a table, and limits, which are the daemon's.
"""

from __future__ import annotations

import itertools

import click

from tarry import policies, results
from tarry.cli import connection, output
from tarry.threads import client


@connection.command()
@click.argument("topic", required=False, default="")
@click.option("--set", "table", metavar="TABLE", help="Delays, level 1 first: '1s 5s 10s 30s 1m'.")
@click.option(
    "--clamp/--no-clamp",
    default=None,
    help="A level above the last one counts as the last one, or is refused.  [default with --set: clamp]",
)
@click.option("--reset", is_flag=True, help="Give the topic the daemon's levels again.")
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
        raise click.UsageError("--reset: the daemon's levels count again, so leave out --set and --clamp")
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
        # A level that only a former table had has no delay any more.
        ((level, delay or "-", pending or 0)[: len(names)] for level, (delay, pending) in enumerate(by_level, 1)),
        empty="",
    )
    last = len(in_force.delay_ms)
    above = f"is level {last}" if in_force.levels.clamp else "is refused"
    whose = "set for the topic" if in_force.of_topic else "the daemon's"
    output.note(f"{whose}; a level above {last} {above}")
