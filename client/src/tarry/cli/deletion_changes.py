"""Commands that change something of deletions in two phases: retry, purge, record.

Owns: their arguments, and what is asked before.
Does not own: showing deletions, and the options that choose some (`tarry.cli.deletion_listing`); tables and JSON
(`tarry.cli.output`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import click

from tarry import deletions
from tarry.cli import connection, output, rows
from tarry.cli.deletion_listing import filter_options, text_of, which_of
from tarry.threads import client

# Of one command: each is a record of its own.
_RECORDED_MAX = 100_000


def _all_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--all", "all_of_them", is_flag=True, help="All that were given up.")(command)


def _which_dead(*, all_of_them: bool, **chosen: Any) -> deletions.DeletionFilter | None:
    """None: all. Raises click.UsageError."""
    which = which_of(**chosen)
    if which is None and not all_of_them:
        raise click.UsageError("name a topic, --id, --ledger, --component or --type; --all is all that were given up")
    if which is not None and all_of_them:
        raise click.UsageError("--all is all that were given up: leave it out, or the rest")
    return which


@click.command("retry")
@filter_options
@_all_option
@connection.connected
def retry(*, connected: client.Client, as_json: bool, **chosen: Any) -> None:
    """Try again, now, the deletions of TOPIC that were given up, or those named. Their failures count from 0 again.

    \b
    Examples:
      tarry deletions retry --id 3.17
      tarry deletions retry flights --type offloaded-ledger
      tarry deletions retry --all
    """
    which = _which_dead(**chosen)
    with output.waiting("retrying"):
        retried = connected.retry_dead_deletes(which)
    if as_json:
        output.as_json({"retried": retried})
    else:
        click.echo(f"{_given_up_text(retried)} {'is' if retried == 1 else 'are'} pending again")


def _given_up_text(count: int) -> str:
    return f"{output.count_text(count, 'deletion')} that {'was' if count == 1 else 'were'} given up"


def _purge_question(*, connected: client.Client, topic: str | None, **chosen: Any) -> str | None:
    which = _which_dead(topic=topic, **chosen)
    given_up = connected.deletion_stats(topic or "").given_up
    if not given_up:
        return None
    dead = _given_up_text(given_up) + (f" of {topic}" if topic else "")
    whole = which is None or which == deletions.DeletionFilter(topic=topic)
    return f"Forget {dead}? What they name stays where it is." if whole else f"Forget those named, of {dead}?"


@click.command("purge")
@filter_options
@_all_option
@connection.connected
@connection.asked_first(_purge_question)
def purge(*, connected: client.Client, as_json: bool, **chosen: Any) -> None:
    """Forget the deletions of TOPIC that were given up, or those named. The ledgers themselves stay where they are.

    \b
    Examples:
      tarry deletions purge --id 3.17
      tarry deletions purge flights --ledger 7 --yes
      tarry deletions purge --all --yes --json
    """
    which = _which_dead(**chosen)
    with output.waiting("purging"):
        purged = connected.purge_dead_deletes(which)
    if as_json:
        output.as_json({"purged": purged})
    else:
        click.echo(f"forgot {output.count_text(purged, 'deletion')}")


def _ledgers(given: tuple[range, ...]) -> Iterator[int]:
    """Every ledger id of the given ranges, in order. Raises click.UsageError when they name more than one command
    records.
    """
    # Not len, which has no place for 2^64.
    ledgers = sum(each.stop - each.start for each in given)
    if ledgers > _RECORDED_MAX:
        raise click.UsageError(f"--ledger names {ledgers:,} ledgers; a command records {_RECORDED_MAX:,} at most")
    return (ledger_id for each in given for ledger_id in each)


def _record_question(*, topic: str, ledgers: tuple[range, ...], **_: object) -> str:
    named = output.count_text(len(list(_ledgers(ledgers))), "ledger")
    return f"Delete {named} of {topic}, once it is verified that nobody uses them?"


@click.command("record")
@click.argument("topic")
@click.option(
    "--ledger",
    "--ledgers",
    "ledgers",
    type=rows.EntryRange("ledgers"),
    multiple=True,
    required=True,
    metavar="N or FIRST-LAST",
    help="Ledgers, both ends included; repeatable.",
)
@click.option("--cursor", "cursor_name", help="The ledgers belong to this cursor. Default: they hold messages.")
@click.option("--schema", "schema_id", help="The ledgers belong to this schema.")
@click.option(
    "--driver", "driver_name", help="The ledgers are offloaded to the store with this driver, such as aws-s3."
)
@click.option("--uuid", "offload_uuid", type=click.UUID, help="The UUID in the names of the offloaded objects.")
@click.option(
    "--set",
    "metadata",
    multiple=True,
    metavar="NAME=VALUE",
    help="Metadata of the driver, such as bucket=b; repeatable.",
)
@connection.connected
@connection.asked_first(_record_question)
def record(
    *,
    connected: client.Client,
    topic: str,
    ledgers: tuple[range, ...],
    cursor_name: str | None,
    schema_id: str | None,
    driver_name: str | None,
    offload_uuid: uuid.UUID | None,
    metadata: tuple[str, ...],
    as_json: bool,
) -> None:
    """Record ledgers of TOPIC that are to be deleted; the daemon verifies each, and deletes it.

    The daemon does not delete a ledger that is in use, nor one whose metadata differs from the record. A ledger that
    was offloaded and still exists as a ledger takes two records: one with --driver and --uuid, and one without.

    Exit status: 0 all are recorded, 4 some were refused.

    \b
    Examples:
      tarry deletions record flights --ledger 7
      tarry deletions record flights --ledger 3-5 --cursor departures
      tarry deletions record flights --ledger 7 --driver s3 --uuid 5f2c8a4e-0d5a-4c80-9a59-0a6f5f1c7e11 --set bucket=b
    """
    if cursor_name is not None and schema_id is not None:
        raise click.UsageError("a ledger is of a cursor or of a schema: leave out --cursor or --schema")
    context = _context(driver_name, offload_uuid, metadata)
    component = deletions.LedgerComponent.MANAGED_LEDGER
    if cursor_name is not None:
        component = deletions.LedgerComponent.MANAGED_CURSOR
    elif schema_id is not None:
        component = deletions.LedgerComponent.SCHEMA_STORAGE
    became = connected.record_pending_deletes(
        topic,
        (
            deletions.PendingDelete(
                ledger_id,
                component,
                deletions.LedgerType.LEDGER if context is None else deletions.LedgerType.OFFLOADED_LEDGER,
                cursor_name=cursor_name,
                schema_id=schema_id,
                offload_context=context,
            )
            for ledger_id in _ledgers(ledgers)
        ),
    )
    _show_recorded(topic, became, as_json=as_json)


def _context(
    driver_name: str | None, offload_uuid: uuid.UUID | None, metadata: tuple[str, ...]
) -> deletions.OffloadContext | None:
    """None of a ledger that was not offloaded. Raises click.UsageError."""
    named = rows.names_and_values(metadata, option="--set")
    if driver_name is not None and offload_uuid is not None:
        return deletions.OffloadContext(offload_uuid, driver_name, named)
    if driver_name is not None or offload_uuid is not None or named:
        raise click.UsageError("an offloaded ledger takes --driver and --uuid, and perhaps --set")
    return None


def _show_recorded(topic: str, became: deletions.RecordedDeletes, *, as_json: bool) -> None:
    refused = [
        {"ledger_id": each.delete.ledger_id, "reason": each.reason, "text": each.text} for each in became.refused
    ]
    if as_json:
        counts = {"recorded": len(became.recorded), "already_recorded": len(became.already_recorded)}
        output.as_json({"topic": topic, **counts, "refused": refused})
    else:
        before = f", {len(became.already_recorded):,} of them before" if became.already_recorded else ""
        click.echo(f"recorded {output.count_text(len(became.recorded), 'deletion')} of {topic}{before}")
        if refused:
            output.table(
                f"Refused of {topic}",
                ("ledger", "why", "said"),
                ((str(each.delete.ledger_id), text_of(each.reason), each.text) for each in became.refused),
                empty="",
            )
    if refused:
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)
