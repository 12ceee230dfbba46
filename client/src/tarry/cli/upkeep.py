"""Commands that do now what the daemon does automatically: seal, merge, gc."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import click

from tarry import results
from tarry.cli import connection, output
from tarry.threads import client

# Interval between looks at the progress (seconds)
_LOOK_EVERY_S = 0.5


@connection.command()
@click.argument("topic")
@connection.connected
def seal(*, connected: client.Client, topic: str, as_json: bool) -> None:
    """Seal the mutable bucket of TOPIC now and return when it is committed.

    \b
    Examples:
      tarry seal flights
    """
    with output.waiting(f"sealing {topic}"):
        sealed = connected.seal(topic)
    if as_json:
        output.as_json({"topic": topic, **vars(sealed)})
    elif sealed.rows:
        output.line(f"sealed {output.rows_text(sealed.rows)} of {topic} into {sealed.bucket}")
    else:
        output.line(f"{topic} has nothing to seal")


@connection.command()
@click.argument("topic")
@click.option(
    "--buckets",
    "buckets_max",
    type=click.IntRange(1, 2**32 - 1),
    help="Buckets of each index, at most. Default: the policy's.",
)
@connection.connected
def merge(*, connected: client.Client, topic: str, buckets_max: int | None, as_json: bool) -> None:
    """Merge neighbouring sealed buckets of TOPIC until each index has at most --buckets. Delivery continues meanwhile.

    --timeout does not limit the merge, only the wait for a daemon that does not answer. Ctrl-C ends the command; the
    daemon goes on merging. Neighbours that together have more rows than the policy's merge_rows_max stay as they are.

    \b
    Examples:
      tarry merge flights
      tarry merge flights --buckets 10
    """
    before = connected.stats(topic).buckets
    now, made = _merge(connected, topic, buckets_max)
    if as_json:
        output.as_json({"topic": topic, "buckets_before": before, **vars(now)})
    elif made:
        output.line(f"merged {topic}: {_buckets_text(now.buckets)} now, {before:,} before")
    else:
        output.line(f"{topic} has nothing to merge: {_buckets_text(now.buckets)}")


def _merge(connected: client.Client, topic: str, buckets_max: int | None) -> tuple[results.Merged, bool]:
    """Ask until the merge is done, showing its progress; return whether anything was seen to be merged."""
    asking = futures.ThreadPoolExecutor(max_workers=1)
    seen = False
    try:
        with output.waiting(f"merging {topic}") as say:
            merged = asking.submit(connected.merge, topic, buckets_max, timeout_s=connection.UNTIL_DONE_S)
            while not futures.wait([merged], timeout=_LOOK_EVERY_S).done:
                counts = connected.stats(topic)
                seen = seen or counts.merges > 0
                say(f"merging {topic}: {_buckets_text(counts.buckets)} now")
            return merged.result(), seen or merged.result().merges > 0
    finally:
        # If the call is still in flight, closing the client ends it.
        asking.shutdown(wait=False)


def _buckets_text(count: int) -> str:
    return "1 bucket" if count == 1 else f"{count:,} buckets"


_KINDS = {
    "tombstones": "left a manifest, past their time",
    "orphans": "no manifest ever named them",
    "manifests": "old ones",
    "journal_slots": "covered by a checkpoint",
    "waiting": "kept: left a manifest, not past their time",
    "failed": "kept: deleting failed, tried again later",
    "given_up": "kept: deleting failed, not tried again",
    "refused": "kept: orphans, too much of their shard",
}
_DELETED = ("tombstones", "orphans", "manifests", "journal_slots")


@connection.command()
@click.option("--dry-run", is_flag=True, help="Only count what would be deleted.")
@click.option("--force", is_flag=True, help="Also delete orphans that are more than a fifth of a shard.")
@click.option("--retry-dead", is_flag=True, help="Try again to delete the objects that were given up.")
@connection.connected
def gc(*, connected: client.Client, dry_run: bool, force: bool, retry_dead: bool, as_json: bool) -> None:
    """Delete now, in the daemon's shards, the objects that no manifest needs. The daemon also does so automatically.

    --timeout does not limit it. Ctrl-C ends it, and it is safe to begin again. With --json each step is a line; the
    last line has "done": true.
    Exit status: 0 everything is deleted, 4 something could not be deleted, or was refused.

    \b
    Examples:
      tarry gc --dry-run
      tarry gc
      tarry gc --force --retry-dead --json
    """
    steps = connected.collect_garbage(
        dry_run=dry_run, force=force, retry_dead_objects=retry_dead, timeout_s=connection.UNTIL_DONE_S
    )
    with connection.meant_for_this_daemon():
        last = _follow(steps, as_json=as_json)
    if last is None or not last.done:
        output.note("the daemon ended before it was done; run the command again")
        raise click.exceptions.Exit(output.EXIT_UNREACHABLE)
    if not as_json:
        _show_garbage(last, dry_run=dry_run)
    if last.refused.objects:
        output.note("orphans are kept because there are too many: find out why, then run `tarry gc --force`")
    if last.given_up.objects and not dry_run:
        output.note("given-up objects are under dead_objects/: fix the cause, then run `tarry gc --retry-dead`")
    if not dry_run and (last.refused.objects or last.failed.objects or last.given_up.objects):
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


def _follow(steps: Iterator[results.Garbage], *, as_json: bool) -> results.Garbage | None:
    """Show the steps; return the last one, or None if there was none."""
    last = None
    with output.progress("collecting", total=None, quiet=as_json) as shown:
        for last in steps:
            if as_json:
                output.as_json(last)
            label = f"collecting: shards ({last.topics_done:,} of {last.topics:,} topics)"
            shown.set(label, done=last.shards_done, total=last.shards)
    return last


def _show_garbage(garbage: results.Garbage, *, dry_run: bool) -> None:
    counts = {name: getattr(garbage, name) for name in _KINDS}
    output.table(
        "Garbage that would be deleted" if dry_run else "Garbage",
        ("what", "objects", "bytes", "why"),
        (
            (
                name.replace("_", " "),
                count.objects,
                count.size_bytes,
                ("would go: " if dry_run else "deleted: ") * (name in _DELETED) + _KINDS[name],
            )
            for name, count in counts.items()
        ),
        empty="",
    )
    objects = sum(counts[name].objects for name in _DELETED)
    size_bytes = sum(counts[name].size_bytes for name in _DELETED)
    deleted = "would be deleted" if dry_run else "are deleted"
    output.note(f"{objects:,} objects with {output.size_text(size_bytes)} {deleted}, in {garbage.shards:,} shards")
