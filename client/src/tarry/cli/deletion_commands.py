"""Commands for two-phase deletion: list, dead, ended, show, stats, retry, purge, record and sweep."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from tarry import deletions, errors
from tarry.cli import connection, output, pending, rows
from tarry.threads import client

COMPONENTS = {each.name.lower().replace("_", "-"): each for each in deletions.LedgerComponent}
"""Components by option value: managed-ledger, managed-cursor, schema-storage"""
TYPES = {each.name.lower().replace("_", "-"): each for each in deletions.LedgerType}
"""Types by option value: ledger, offloaded-ledger"""

# Most items of a page
_PAGE_MAX = 1_000
_WHAT = ("id", "topic", "component", "name", "ledger", "type")
# Empty for most ledgers: a cursor's name, a schema's id
_OPTIONAL = {"name", "said"}


@click.group("deletions", cls=connection.Group)
def deletions_group() -> None:
    """Inspect which ledgers will be deleted and what became of each; retry failed deletions; record deletions.

    Owners of ledgers and offloaded ledgers record what to delete; the daemon verifies and deletes it (PIP-186).

    \b
    Examples:
      tarry deletions list
      tarry deletions show 7
      tarry deletions dead flights
      tarry deletions retry flights --type offloaded-ledger
    """


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose deletions; `which_of` makes the filter."""
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
    """Return the chosen filter, or None for all."""
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
    """List the unfinished deletions of TOPIC, or of all topics, and why their last attempt failed.

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
        empty="no deletion is pending",
        topic=chosen["topic"],
        limit=limit,
        as_json=as_json,
    )


@deletions_group.command("dead")
@filter_options
@pending.limit_option
@connection.connected
def list_dead(*, connected: client.Client, limit: int | None, as_json: bool, **chosen: Any) -> None:
    """List the deletions of TOPIC, or of all topics, that were given up after the last allowed attempt failed.

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
        empty="no ended deletion is known",
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
    """Print pages as they arrive, as JSON lines or as a table."""
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
    """Return topic, component, name, ledger and type; ids are text, because they are names, not counts."""
    return (
        # The objects of a schema do not name their topic.
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
        f"{stats.in_flight:,} in flight, {stats.begun:,} of them begun{oldest}; "
        f"{stats.given_up:,} given up; {stats.held:,} held; {output.count_text(stats.in_use, 'ledger')} in use"
    )


@deletions_group.command("stats")
@click.argument("topic", required=False)
@connection.connected
def stats(*, connected: client.Client, topic: str | None, as_json: bool) -> None:
    """Count the deletions of TOPIC or of all topics: in flight, since when, given up, by component.

    0 in flight means that every recorded deletion is over (PIP-186, getEstimatedInflightDeletionLedgerCount). A held
    deletion has stopped because its owner recorded the ledger as in use; it is pending again when the owner withdraws
    that.

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
            "begun": counted.begun,
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
    """A deletion by id (`3.17`), or a ledger (`7`), which may have several deletions."""

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
    """Show everything known about a deletion, or about all those of a ledger: pending, given up or ended.

    \b
    Examples:
      tarry deletions show 3.17
      tarry deletions show 7
      tarry deletions show 7 --json
    """
    found: dict[str, deletions.Deletion] = {}
    # In the order of a deletion's life: for one that moves on meanwhile, the later state wins.
    for listed in (connected.pending_deletes, connected.dead_deletes, connected.ended_deletes):
        found |= {each.deletion_id: each for each in listed(which)}
    if not found:
        output.note(
            "no such deletion is known: it was never recorded, or ended so long ago that the daemon has forgotten it. "
            "`tarry deletions list`, `dead` and `ended` show the known ones"
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


# Limit of one command, because each ledger becomes a record
_RECORDED_MAX = 100_000


def _all_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--all", "all_of_them", is_flag=True, help="All that were given up.")(command)


def _which_dead(*, all_of_them: bool, **chosen: Any) -> deletions.DeletionFilter | None:
    """Return the chosen filter, or None for all. Raises click.UsageError."""
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
    """Retry now the deletions of TOPIC that were given up, or those named. Their failures count from 0 again.

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
    """Yield every ledger id of the ranges, in order. Raises click.UsageError if they exceed `_RECORDED_MAX`."""
    # `len` cannot return 2^64.
    ledgers = sum(each.stop - each.start for each in given)
    if ledgers > _RECORDED_MAX:
        raise click.UsageError(f"--ledger names {ledgers:,} ledgers; a command records {_RECORDED_MAX:,} at most")
    return (ledger_id for each in given for ledger_id in each)


def _record_question(*, topic: str, ledgers: tuple[range, ...], **_: object) -> str:
    named = output.count_text(len(list(_ledgers(ledgers))), "ledger")
    return f"Delete {named} of {topic}, once the daemon has verified that they are not in use?"


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
    """Record ledgers of TOPIC to delete; the daemon verifies each and deletes it.

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
        raise click.UsageError("a ledger belongs to a cursor or to a schema: leave out --cursor or --schema")
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
    """Return the context, or None for a ledger that was not offloaded. Raises click.UsageError."""
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
        output.line(f"recorded {output.count_text(len(became.recorded), 'deletion')} of {topic}{before}")
        if refused:
            output.table(
                f"Refused of {topic}",
                ("ledger", "why", "said"),
                ((str(each.delete.ledger_id), text_of(each.reason), each.text) for each in became.refused),
                empty="",
            )
    if refused:
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


_CLASSES = {
    "listed": "every object",
    "foreign": "kept: not named as offloaded ledgers are",
    "in_use": "kept: in use",
    "recorded": "to be deleted, or given up: recorded before",
    "young": "kept: not older than the grace",
    "orphaned": "",
    "of_unknown_topics": "",
    "unidentified": "kept: their metadata does not name their topic",
    "unanswered": "kept: their owner or the store did not answer",
}
_COLUMNS = ("topic", "component", "name", "ledger", "type", "uuid", "bytes", "written", "its topic")
_OPTIONAL_OF_SWEEP = {"name"}
# All are offloaded, and a terminal has no room for the column.
_NOT_IN_TERMINAL = {"type"}


@connection.command()
@click.argument("store")
@click.option("--prefix", default="", help="Only objects whose names, and so UUIDs, begin with this.")
@click.option(
    "--delete/--dry-run", "delete", default=False, help="Delete the orphans, or only list them.  [default: --dry-run]"
)
@click.option(
    "--grace", "grace_ms", type=rows.Duration(), help="Keep ledgers that are younger than this. Default: the daemon's."
)
@click.option("--unknown-topics", is_flag=True, help="Include topics whose owner never stated which ledgers they use.")
@click.option("--force", is_flag=True, help="Delete even when the orphans are more than a fifth of the bytes.")
@pending.limit_option
@connection.connected
def sweep(
    *,
    connected: client.Client,
    store: str,
    prefix: str,
    delete: bool,
    grace_ms: int | None,
    unknown_topics: bool,
    force: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    """Search the object store STORE for orphans: offloaded ledgers that no record names and no topic uses.

    STORE is a name in the daemon's configuration (deletion.object_stores). Without --delete nothing changes. With
    --delete the orphans are recorded once the whole store was listed; then the daemon verifies and deletes each one,
    like any other deletion. A ledger whose metadata does not name its topic is kept.
    --timeout does not limit a sweep. Ctrl-C ends it, and it is safe to begin again. With --json each step is a line;
    the last line has "done": true.
    Exit status: 0 done, 4 with --delete: orphans were refused or left, or an owner or the store did not answer.

    \b
    Examples:
      tarry sweep archive
      tarry sweep archive --prefix 4f --grace 7d
      tarry sweep archive --delete
      tarry sweep archive --delete --unknown-topics --force --json
    """
    steps = connected.sweep_orphans(
        store,
        prefix=prefix,
        grace_ms=grace_ms,
        delete=delete,
        unknown_topics=unknown_topics,
        force=force,
        timeout_s=connection.UNTIL_DONE_S,
    )
    following = _Following(steps, store, quiet=as_json)
    try:
        with connection.meant_for_this_daemon():
            if as_json:
                for step in following:
                    output.as_json(step)
            else:
                _list_orphans(following, store, pending.limit_of(limit, as_json=False))
    except errors.NotFound as error:
        output.note(f"{error.message}; STORE is a name that the daemon's configuration has there")
        raise click.exceptions.Exit(output.EXIT_REFUSED) from error
    last = following.last
    if last is None or not last.done:
        output.note("the daemon ended before it was done; run the command again")
        raise click.exceptions.Exit(output.EXIT_UNREACHABLE)
    if not as_json:
        _show_counts(last.counts, store, delete=delete, unknown_topics=unknown_topics, refused=bool(last.refused))
    _notes(last, store, delete=delete, unknown_topics=unknown_topics)
    if delete and (last.refused or last.counts.ledgers_left or last.counts.unanswered.objects):
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


class _Following:
    """The steps, with a progress bar on stderr; afterwards `last` is the last one."""

    def __init__(self, steps: Iterator[deletions.SweepStep], store: str, *, quiet: bool) -> None:
        self._steps = steps
        self._store = store
        self._quiet = quiet
        self.last: deletions.SweepStep | None = None

    def __iter__(self) -> Iterator[deletions.SweepStep]:
        orphans = 0
        with output.progress(f"sweeping {self._store}", total=None, quiet=self._quiet) as shown:
            for step in self._steps:
                self.last = step
                orphans += len(step.orphans)
                label = f"sweeping {self._store}: {output.count_text(orphans, 'orphan')}; objects listed, total unknown"
                shown.set(label, done=step.counts.listed.objects, total=None)
                yield step


def _list_orphans(following: _Following, store: str, limit: int | None) -> None:
    """List orphans: into a pipe as they arrive; in a terminal, which shows a progress bar, once all are known."""
    names: Sequence[str] = _COLUMNS
    found: Iterable[deletions.OrphanedLedger] = (orphan for step in following for orphan in step.orphans)
    more = 0
    if limit is not None:
        # Read to the end, to count the ones not shown.
        kept: list[deletions.OrphanedLedger] = []
        for orphan in found:
            if len(kept) < limit:
                kept.append(orphan)
            else:
                more += 1
        found = kept
    listed: Iterable[Sequence[object]] = map(_shown, found)
    if sys.stdout.isatty():
        names, listed = output.for_terminal(names, listed, optional=_OPTIONAL_OF_SWEEP, left_out=_NOT_IN_TERMINAL)
    output.table(f"Orphans in {store}", names, listed, empty=f"no orphan in {store}")
    if more:
        output.note(f"{more:,} more orphans: a higher --limit shows them; --json or a pipe without --limit has all")
    click.echo("")


def _shown(orphan: deletions.OrphanedLedger) -> tuple[object, ...]:
    """Return the cells of `_COLUMNS`."""
    context = orphan.pending_delete.offload_context
    return (
        *what(orphan.topic, orphan.pending_delete),
        "-" if context is None else str(context.uuid),
        orphan.size_bytes,
        output.At(orphan.modified_ms),
        "unknown" if orphan.unknown_topic else "known",
    )


def _show_counts(
    counts: deletions.SweepCounts, store: str, *, delete: bool, unknown_topics: bool, refused: bool
) -> None:
    fate = "recorded: deleted once verified" if delete and not refused else "would be deleted with --delete"
    if delete and refused:
        fate = "kept: they are too many"
    why = _CLASSES | {
        "orphaned": fate,
        "of_unknown_topics": fate if unknown_topics else "kept: their topics' ledgers in use were never recorded",
    }
    output.table(
        f"What is in {store}",
        ("what", "objects", "bytes", "why"),
        (
            (name.replace("_", " "), getattr(counts, name).objects, getattr(counts, name).size_bytes, text)
            for name, text in why.items()
        ),
        empty="",
    )


def _notes(last: deletions.SweepStep, store: str, *, delete: bool, unknown_topics: bool) -> None:
    """Print what was done, what was not, and what to do about it."""
    counts = last.counts
    if last.refused:
        output.note(f"{last.refused}. Find out why, then run `tarry sweep {store} --delete --force`")
    if counts.ledgers_recorded:
        recorded = output.count_text(counts.ledgers_recorded, "ledger")
        output.note(f"recorded {recorded}: `tarry deletions list`, then `ended`, show what becomes of them")
    if counts.ledgers_left:
        left = output.count_text(counts.ledgers_left, "orphaned ledger")
        output.note(
            f"{left} not recorded: more than a sweep records, or two_phase_deletion_enabled is off for their topics. "
            "Sweep again, or set the policy"
        )
    orphans = counts.orphaned.objects + (counts.of_unknown_topics.objects if unknown_topics else 0)
    if orphans and not delete:
        output.note(f"nothing is changed: `tarry sweep {store} --delete` has the orphans deleted")
    if counts.of_unknown_topics.objects and not unknown_topics:
        output.note(
            "the ledgers in use of some topics were never recorded, so their orphans stay. Their owners must record "
            "them (RecordInUse with `replace`); for topics that no longer have an owner, pass --unknown-topics"
        )
    if counts.unanswered.objects:
        output.note("an owner or the store did not answer for some objects: sweep again when they do")
