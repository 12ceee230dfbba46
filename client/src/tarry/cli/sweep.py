"""The command that looks for offloaded ledgers that nobody knows: sweep.

Owns: its arguments, how far it is while it goes on, and how what it found is shown.
Does not own: what becomes of what it records (`tarry.cli.deletion_listing`); tables and JSON (`tarry.cli.output`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from tarry import deletions, errors
from tarry.cli import connection, output, pending, rows
from tarry.cli.deletion_listing import what
from tarry.threads import client

_CLASSES = {
    "listed": "every object",
    "foreign": "kept: not named as offloaded ledgers are",
    "in_use": "kept: in use",
    "recorded": "to be deleted, or given up: recorded before",
    "young": "kept: not older than the grace",
    "orphaned": "",
    "of_unknown_topics": "",
    "unidentified": "kept: their metadata does not say whose they are",
    "unanswered": "kept: their owner or the store did not answer",
}
_COLUMNS = ("topic", "component", "name", "ledger", "type", "uuid", "bytes", "written", "its topic")
_OPTIONAL = {"name"}
# All are offloaded, and a terminal has no room for it.
_NOT_IN_TERMINAL = {"type"}


@connection.command()
@click.argument("store")
@click.option("--prefix", default="", help="Only objects whose names, and so UUIDs, begin with this.")
@click.option(
    "--delete/--dry-run", "delete", default=False, help="Have the orphans deleted, or only look.  [default: --dry-run]"
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
    """Look in the object store STORE for orphans: offloaded ledgers that no record names and nobody uses.

    STORE is a name in the daemon's configuration (deletion.object_stores). Without --delete nothing is changed. With
    --delete the orphans are recorded once the whole store was listed; then the daemon verifies and deletes each one, as
    any other deletion. A ledger whose metadata does not say which topic it belongs to is kept.

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
        output.note("the daemon ended without saying that it is done; begin again")
        raise click.exceptions.Exit(output.EXIT_UNREACHABLE)
    if not as_json:
        _show_counts(last.counts, store, delete=delete, unknown_topics=unknown_topics, refused=bool(last.refused))
    _notes(last, store, delete=delete, unknown_topics=unknown_topics)
    if delete and (last.refused or last.counts.ledgers_left or last.counts.unanswered.objects):
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


class _Following:
    """The steps, with a bar on stderr that shows how far they are; afterwards `last` is the last one."""

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
    """In a pipe as they come; in a terminal, where a bar shows how far it is, when all are known."""
    names: Sequence[str] = _COLUMNS
    found: Iterable[deletions.OrphanedLedger] = (orphan for step in following for orphan in step.orphans)
    more = 0
    if limit is not None:
        # To the end: what is not shown is counted.
        kept: list[deletions.OrphanedLedger] = []
        for orphan in found:
            if len(kept) < limit:
                kept.append(orphan)
            else:
                more += 1
        found = kept
    listed: Iterable[Sequence[object]] = map(_shown, found)
    if sys.stdout.isatty():
        names, listed = output.for_terminal(names, listed, optional=_OPTIONAL, left_out=_NOT_IN_TERMINAL)
    output.table(f"Orphans in {store}", names, listed, empty=f"no orphan in {store}")
    if more:
        output.note(f"{more:,} orphans more: a higher --limit shows them; --json or a pipe without --limit has all")
    click.echo("")


def _shown(orphan: deletions.OrphanedLedger) -> tuple[object, ...]:
    """In the order of `_COLUMNS`."""
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
        "of_unknown_topics": fate if unknown_topics else "kept: nobody has stated what their topics use",
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
    """What was done, what was not, and what to do about it."""
    counts = last.counts
    if last.refused:
        output.note(f"{last.refused}. Look at why, then `tarry sweep {store} --delete --force`")
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
            "nobody has stated what some topics use: their orphans stay. Their owner is to state it (RecordInUse with "
            "`replace`); where there is no owner any more, --unknown-topics takes them, too"
        )
    if counts.unanswered.objects:
        output.note("an owner or the store did not answer for some objects: sweep again when they do")
