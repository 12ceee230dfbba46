"""Commands that show deletions in two phases: list, dead, ended, show, stats.

Owns: which deletions are asked for, and how they are shown.
Does not own: what changes something of them (`tarry.cli.deletion_changes`); looking for what nobody knows
(`tarry.cli.sweep`); tables and JSON (`tarry.cli.output`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from tarry import deletions
from tarry.cli import connection, output, pending, rows
from tarry.threads import client

COMPONENTS = {each.name.lower().replace("_", "-"): each for each in deletions.LedgerComponent}
"""Components by the words of options: managed-ledger, managed-cursor, schema-storage."""
TYPES = {each.name.lower().replace("_", "-"): each for each in deletions.LedgerType}
"""Types by the words of options: ledger, offloaded-ledger."""

# The most that a page has.
_PAGE_MAX = 1_000
_WHAT = ("id", "topic", "component", "name", "ledger", "type")
# Of most ledgers it says nothing: a cursor's name, a schema's id.
_OPTIONAL = {"name", "said"}


@click.group("deletions", cls=connection.Group)
def deletions_group() -> None:
    """See which ledgers are to be deleted and what became of it; try again what was given up; record deletions.

    Owners of ledgers and offloaded ledgers record what is to be deleted; the daemon verifies and deletes (PIP-186).

    \b
    Examples:
      tarry deletions list
      tarry deletions show 7
      tarry deletions dead flights
      tarry deletions retry flights --type offloaded-ledger
    """


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose deletions; `which_of` makes a filter of them."""
    for option in (
        click.option("--type", "ledger_type", type=click.Choice(list(TYPES)), help="Only of this type."),
        click.option("--component", type=click.Choice(list(COMPONENTS)), help="Only of ledgers of this component."),
        click.option("--ledger", "ledger_id", type=click.IntRange(0, rows.U64_MAX), help="Only of this ledger."),
        click.option("--id", "deletion_ids", multiple=True, help="Only this one, such as 3.17; repeatable."),
        click.argument("topic", required=False),
    ):
        command = option(command)
    return command


def which_of(
    *,
    topic: str | None,
    deletion_ids: tuple[str, ...],
    ledger_id: int | None,
    component: str | None,
    ledger_type: str | None,
    **_: object,
) -> deletions.DeletionFilter | None:
    """None when nothing is chosen: all of them."""
    if not deletion_ids and (topic, ledger_id, component, ledger_type) == (None, None, None, None):
        return None
    return deletions.DeletionFilter(
        topic=topic,
        component=None if component is None else COMPONENTS[component],
        ledger_type=None if ledger_type is None else TYPES[ledger_type],
        ledger_id=ledger_id,
        deletion_ids=deletion_ids or None,
    )


@deletions_group.command("list")
@filter_options
@pending.limit_option
@connection.connected
def list_pending(*, connected: client.Client, limit: int | None, as_json: bool, **chosen: Any) -> None:
    """List the deletions of TOPIC, or of all topics, that are not over, and why their last attempt failed.

    The list is in the order of recording. A ledger whose attempt has begun is being deleted.

    \b
    Examples:
      tarry deletions list
      tarry deletions list flights --component managed-cursor
      tarry deletions list --type offloaded-ledger --json
    """
    if not as_json:
        output.note(_stats_text(connected.deletion_stats(chosen["topic"] or "")))
    _list(
        connected.pending_deletes_page,
        which_of(**chosen),
        ("state", "failures", "next attempt", "said"),
        lambda each: (text_of(each.state), each.failures, output.At(each.next_attempt_at_ms), each.text or "-"),
        title="Deletions",
        empty="nothing is to be deleted",
        topic=chosen["topic"],
        limit=limit,
        as_json=as_json,
    )


@deletions_group.command("dead")
@filter_options
@pending.limit_option
@connection.connected
def list_dead(*, connected: client.Client, limit: int | None, as_json: bool, **chosen: Any) -> None:
    """List the deletions of TOPIC, or of all topics, that were given up: every attempt that is allowed has failed.

    A deletion that was given up stays until it is retried or purged.

    \b
    Examples:
      tarry deletions dead
      tarry deletions dead flights --type offloaded-ledger
      tarry deletions dead --json
    """
    _list(
        connected.dead_deletes_page,
        which_of(**chosen),
        ("failures", "given up", "said"),
        lambda each: (each.failures, output.At(each.ended_at_ms), each.text or "-"),
        title="Deletions that were given up",
        empty="no deletion was given up",
        topic=chosen["topic"],
        limit=limit,
        as_json=as_json,
    )


@deletions_group.command("ended")
@filter_options
@pending.limit_option
@connection.connected
def list_ended(*, connected: client.Client, limit: int | None, as_json: bool, **chosen: Any) -> None:
    """List the last deletions that ended, of TOPIC or of all topics, with their outcomes.

    Only a deletion with the outcome "deleted" has deleted something. The daemon keeps the last 1,000 of each shard.

    \b
    Examples:
      tarry deletions ended
      tarry deletions ended flights --ledger 7
      tarry deletions ended --limit 1000 --json
    """
    _list(
        connected.ended_deletes_page,
        which_of(**chosen),
        ("outcome", "ended", "said"),
        lambda each: (text_of(each.outcome), output.At(each.ended_at_ms), each.text or "-"),
        title="Deletions that ended",
        empty="of no deletion that ended anything is known",
        topic=chosen["topic"],
        limit=limit,
        as_json=as_json,
    )


def _list(
    page_of: Callable[..., deletions.DeletionPage],
    which: deletions.DeletionFilter | None,
    last_names: Sequence[str],
    last_columns: Callable[[deletions.Deletion], Sequence[object]],
    *,
    title: str,
    empty: str,
    topic: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Pages as they come: JSON lines, or a table."""
    pages = pending.Pages(
        lambda token, page_size: page_of(which, token, page_size=min(page_size, _PAGE_MAX)),
        pending.limit_of(limit, as_json=as_json),
    )
    if as_json:
        for page in pages:
            if len(page):
                click.echo("\n".join(output.json_text(each) for each in page.items))
    else:
        names: Sequence[str] = (*_WHAT, *last_names)
        listed: Iterable[Sequence[object]] = (
            (each.deletion_id, *what(each.topic, each.pending_delete), *last_columns(each))
            for page in pages
            for each in page.items
        )
        if sys.stdout.isatty():
            left_out = {"topic"} if topic else set()
            names, listed = output.for_terminal(names, listed, optional=_OPTIONAL, left_out=left_out)
        output.table(
            f"{title}, of {topic}" if topic else title,
            names,
            listed,
            empty=f"{empty}, of these" if which else empty,
        )
    pages.note_more()


def what(topic: str, delete: deletions.PendingDelete) -> tuple[str, str, str, str, str]:
    """Topic, component, name, ledger and type; ids as text: they are names, not counts."""
    return (
        # A schema's objects do not say of which topic they are.
        topic or "-",
        text_of(delete.component),
        delete.cursor_name or delete.schema_id or "-",
        str(delete.ledger_id),
        text_of(delete.ledger_type),
    )


def text_of(value: Any) -> str:
    return "-" if value is None else str(value.name).lower().replace("_", " ")


def _stats_text(stats: deletions.DeletionStats) -> str:
    oldest = f", the oldest since {output.time_text(stats.oldest_ms)}" if stats.oldest_ms else ""
    return (
        f"{stats.in_flight:,} in flight, {stats.begun:,} of them under way{oldest}; "
        f"{stats.given_up:,} given up; {stats.held:,} held; {output.count_text(stats.in_use, 'ledger')} in use"
    )


@deletions_group.command("stats")
@click.argument("topic", required=False)
@connection.connected
def stats(*, connected: client.Client, topic: str | None, as_json: bool) -> None:
    """Count the deletions of TOPIC or of all topics: in flight, since when, given up, by component.

    0 in flight means that every recorded deletion is over (PIP-186, getEstimatedInflightDeletionLedgerCount). A held
    deletion is over for now: its owner says that the ledger is in use. It is pending again when the owner takes that
    back.

    \b
    Examples:
      tarry deletions stats
      tarry deletions stats flights --json
    """
    counted = connected.deletion_stats(topic or "")
    if as_json:
        output.as_json(counted)
        return
    about = f"Deletions of {topic}" if topic else "Deletions"
    output.facts(
        about,
        {
            "in flight": counted.in_flight,
            "under way": counted.begun,
            "oldest": output.At(counted.oldest_ms),
            "given up": counted.given_up,
            "held": counted.held,
            "ledgers in use": counted.in_use,
            "as of": output.At(counted.as_of_ms),
        },
    )
    if counted.counts:
        click.echo("")
        output.table(
            f"{about} by component and type",
            ("component", "type", "in flight", "oldest", "given up", "held"),
            (
                (
                    text_of(each.component),
                    text_of(each.ledger_type),
                    each.in_flight,
                    output.At(each.oldest_ms),
                    each.given_up,
                    each.held,
                )
                for each in counted.counts
            ),
            empty="",
        )


class _IdOrLedger(click.ParamType[deletions.DeletionFilter]):
    """`3.17`: a deletion; `7`: a ledger, of which there may be several."""

    name = "ID|LEDGER"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> deletions.DeletionFilter:
        if isinstance(value, deletions.DeletionFilter):
            return value
        text = str(value)
        if re.fullmatch(r"\d+\.\d+", text, flags=re.ASCII):
            return deletions.DeletionFilter(deletion_ids=(text,))
        if re.fullmatch(r"\d+", text, flags=re.ASCII) and int(text) <= rows.U64_MAX:
            return deletions.DeletionFilter(ledger_id=int(text))
        self.fail(f"{text!r} is neither the id of a deletion, such as 3.17, nor a ledger, such as 7", param, ctx)


@deletions_group.command("show")
@click.argument("which", type=_IdOrLedger(), metavar="ID|LEDGER")
@connection.connected
def show(*, connected: client.Client, which: deletions.DeletionFilter, as_json: bool) -> None:
    """Show everything that is known of a deletion, or of all those of a ledger: pending, given up or ended.

    \b
    Examples:
      tarry deletions show 3.17
      tarry deletions show 7
      tarry deletions show 7 --json
    """
    found: dict[str, deletions.Deletion] = {}
    # In the order of its life: of one that moves on meanwhile the later state counts.
    for listed in (connected.pending_deletes, connected.dead_deletes, connected.ended_deletes):
        found |= {each.deletion_id: each for each in listed(which)}
    if not found:
        output.note(
            "nothing is known of it: it was never recorded, or ended so long ago that the daemon has forgotten it. "
            "`tarry deletions list`, `dead` and `ended` have what is known"
        )
        raise click.exceptions.Exit(output.EXIT_REFUSED)
    for each in found.values():
        if as_json:
            output.as_json(each)
        else:
            output.facts(f"Deletion {each.deletion_id}", _facts(each))


def _facts(each: deletions.Deletion) -> dict[str, object]:
    _, component, name, ledger, ledger_type = what(each.topic, each.pending_delete)
    facts: dict[str, object] = {
        "id": each.deletion_id,
        "topic": each.topic,
        "component": component,
        "name": name,
        "ledger": ledger,
        "type": ledger_type,
    }
    if (context := each.pending_delete.offload_context) is not None:
        metadata = ", ".join(f"{name}={value}" for name, value in context.driver_metadata.items())
        facts |= {
            "objects": f"{context.uuid}-ledger-{ledger}, {context.uuid}-ledger-{ledger}-index",
            "driver": context.driver_name,
            "driver metadata": metadata or "-",
        }
    return facts | {
        "recorded": output.time_text(each.recorded_at_ms),
        "by a sweep": "yes" if each.by_sweeper else "no",
        "state": text_of(each.state),
        "outcome": text_of(each.outcome),
        "failures": each.failures,
        "next attempt": output.time_text(each.next_attempt_at_ms),
        "maybe deleted": "yes: an attempt has no answer" if each.maybe_deleted else "no",
        "ended": output.time_text(each.ended_at_ms),
        "said": each.text or "-",
    }
