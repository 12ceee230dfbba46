"""What a compaction did, as values; the JSON of `tarry-spark compact --json` is these values, key by key.

Owns: what is counted and what it is called; the table for people.
Does not own: counting (`job`), writing it anywhere (`commands.compact`, `job_metrics`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
from rich.table import Table

from batch.compaction.merge_task import Worker


class Status(enum.Enum):
    """How the job ended. `CONFLICTS`: runs were refused at the last attempt, or it is not known whether they are
    committed: the next job sees. `ERROR`: a topic cannot be read, a source is damaged, or a run failed. `STOPPED`: by a
    signal. `PLANNED`: of a dry run.
    """

    DONE = "done"
    CONFLICTS = "conflicts"
    ERROR = "error"
    STOPPED = "stopped"
    PLANNED = "planned"


class Outcome(enum.Enum):
    """What became of a run. `COMMITTED`: the manifest names its bucket. `REFUSED`: at the last attempt. `UNKNOWN`: it
    may be committed. `FAILED`: its reason says why. `LEFT`: it was not begun, or its object not committed, because the
    job was to end. `REPLANNED`: it was refused, and its topic was planned again: others took its place.
    """

    COMMITTED = "committed"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FAILED = "failed"
    LEFT = "left"
    REPLANNED = "replanned"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `topic`: its name. `index`: 0 = the shared one. `sources`, `bucket`: keys of objects; no bucket where no
    row was left, or nothing was written. `rows_read`, `bytes_read`: of the sources. `rows_kept`, `bytes_written`: of
    the bucket. `level`: 1 for a bucket merged from sealed ones. `worker`: the process that wrote it.
    """

    topic: str
    shard: int
    index: int
    attempt: int
    sources: tuple[str, ...]
    first_ledger_id: int
    last_ledger_id: int
    outcome: Outcome
    reason: str = ""
    bucket: str | None = None
    rows_read: int = 0
    rows_kept: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    level: int = 0
    worker: Worker | None = None


class TopicResult(msgspec.Struct, frozen=True, kw_only=True):
    """One topic that had something to merge, or that could not be read; then `error` says why and `topic` is its id."""

    topic: str
    shard: int
    buckets_before: int = 0
    buckets_after: int = 0
    planned: int = 0
    committed: int = 0
    error: str = ""


class RunCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Runs by what became of them. `planned`: all of them but those whose place others took (`replanned`)."""

    planned: int = 0
    committed: int = 0
    refused: int = 0
    failed: int = 0
    left: int = 0
    unknown: int = 0
    replanned: int = 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was refused. `final`: at the last attempt."""

    topic: str
    sources: tuple[str, ...]
    reason: str
    final: bool


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """What took how long in the job: reading manifests and planning; waiting for workers; checking what they wrote and
    committing it, in part while workers work. `total`: from the beginning of the job. And in the workers, summed over
    them: reading sources, merging, writing.
    """

    plan: float = 0.0
    wait: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    total: float = 0.0
    worker_read: float = 0.0
    worker_merge: float = 0.0
    worker_write: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did. Buckets are those of all topics that were looked at. `sources`, rows and bytes: of committed
    runs. `began_ms`: Unix time.
    """

    status: Status
    exit_status: int
    reason: str
    dry_run: bool
    engine: str
    parallelism: int
    began_ms: int
    topics: int
    buckets_before: int
    buckets_after: int
    runs: RunCounts
    sources: int
    rows_read: int
    rows_kept: int
    rows_dropped: int
    bytes_read: int
    bytes_written: int
    waves: int
    conflicts_retried: int
    seconds: Seconds
    refusals: tuple[Refusal, ...]
    topic_results: tuple[TopicResult, ...]
    run_results: tuple[RunResult, ...]


def counts(results: Iterable[RunResult]) -> RunCounts:
    """By what became of them."""
    by_outcome = dict.fromkeys(Outcome, 0)
    for result in results:
        by_outcome[result.outcome] += 1
    replanned = by_outcome[Outcome.REPLANNED]
    return RunCounts(
        planned=sum(by_outcome.values()) - replanned,
        committed=by_outcome[Outcome.COMMITTED],
        refused=by_outcome[Outcome.REFUSED],
        failed=by_outcome[Outcome.FAILED],
        left=by_outcome[Outcome.LEFT],
        unknown=by_outcome[Outcome.UNKNOWN],
        replanned=replanned,
    )


def refusals(results: Iterable[RunResult]) -> tuple[Refusal, ...]:
    """The runs that were refused, at the last attempt or before."""
    return tuple(
        Refusal(
            topic=result.topic,
            sources=result.sources,
            reason=result.reason,
            final=result.outcome is Outcome.REFUSED,
        )
        for result in results
        if result.outcome in (Outcome.REFUSED, Outcome.REPLANNED)
    )


def table(summary: Summary) -> Table:
    """One line for each topic with something to merge, the totals beneath."""
    shown = Table(title=_title(summary), title_justify="left", show_footer=len(summary.topic_results) > 1)
    runs = summary.runs
    shown.add_column("topic", "total", overflow="fold")
    for name, total in (
        ("before", summary.buckets_before),
        ("after", summary.buckets_after),
        ("runs", runs.planned),
        ("committed", runs.committed),
    ):
        shown.add_column(name, f"{total:,}", justify="right")
    errors = any(topic.error for topic in summary.topic_results)
    if errors:
        shown.add_column("error", overflow="fold")
    for topic in summary.topic_results:
        numbers = (topic.buckets_before, topic.buckets_after, topic.planned, topic.committed)
        shown.add_row(topic.topic, *(f"{number:,}" for number in numbers), *([topic.error] if errors else []))
    return shown


def plan_table(summary: Summary) -> Table:
    """One line for each run that a dry run planned."""
    shown = Table(title=_title(summary), title_justify="left")
    shown.add_column("topic", overflow="fold")
    for name in ("index", "ledgers", "buckets", "rows", "bytes"):
        shown.add_column(name, justify="right")
    for run in summary.run_results:
        numbers = (len(run.sources), run.rows_read, run.bytes_read)
        ledgers = f"{run.first_ledger_id} to {run.last_ledger_id}"
        shown.add_row(run.topic, str(run.index), ledgers, *(f"{number:,}" for number in numbers))
    return shown


def _title(summary: Summary) -> str:
    engine = "" if summary.dry_run else f", {summary.engine} x {summary.parallelism}"
    reason = f" ({summary.reason})" if summary.reason else ""
    return f"{summary.status.value}{reason}: {summary.topics:,} topics{engine}"


def lines(summary: Summary) -> list[str]:
    """What the table has no column for."""
    runs, seconds = summary.runs, summary.seconds
    said = [
        f"buckets {summary.buckets_before:,} -> {summary.buckets_after:,}",
        f"rows    {summary.rows_read:,} read, {summary.rows_kept:,} kept, {summary.rows_dropped:,} gone",
        f"bytes   {summary.bytes_read:,} read, {summary.bytes_written:,} written",
    ]
    waits = f"plan {seconds.plan:.1f}, wait for workers {seconds.wait:.1f}"
    said.append(f"seconds {seconds.total:.1f}: {waits}, verify {seconds.verify:.1f}, commit {seconds.commit:.1f}")
    others = ("refused", runs.refused), ("failed", runs.failed), ("unknown", runs.unknown), ("left", runs.left)
    if any(count for _, count in others):
        said.append("runs    " + ", ".join(f"{count:,} {name}" for name, count in others if count))
    if summary.conflicts_retried:
        said.append(f"refused and planned again: {summary.conflicts_retried:,}")
    said += [
        f"{result.outcome.value}: {result.topic}: {result.reason}"
        for result in summary.run_results
        if result.outcome in (Outcome.REFUSED, Outcome.FAILED, Outcome.UNKNOWN)
    ]
    return said
