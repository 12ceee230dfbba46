"""Records a compaction as it happens, and presents its summary: values, tables, and metrics.

It has every run's result, the time of each phase, the job's progress, and the exit status that follows. The JSON of
`tarry-spark compact --json` is the values of `Summary`, key by key.

Metrics are a text file, which the node exporter's textfile collector shows to Prometheus, because a job is no server
that could be asked. The file says how the last run ended, and is replaced as a whole; the time of the last success
outlives a failure. All metrics are gauges: a counter would have to be carried on from file to file. Their alerts are in
deploy/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import prometheus_client
from prometheus_client import parser
from rich.table import Table

from batch.compaction.merge_task import Worker, WrittenRun
from batch.compaction.waves import NOTHING, Amount, Work
from storage_backends.formats.manifest import TopicManifest


class Status(enum.Enum):
    """The end of a job.

    `CONFLICTS` means that runs were refused at the last attempt, or may be committed; the next job will know. `ERROR`
    means that a topic cannot be read, a source is damaged, or a run failed. `STOPPED` means by a signal. `PLANNED` is
    the end of a dry run.
    """

    DONE = "done"
    CONFLICTS = "conflicts"
    ERROR = "error"
    STOPPED = "stopped"
    PLANNED = "planned"


class Outcome(enum.Enum):
    """The outcome of a run.

    `COMMITTED` means that the manifest names its bucket; `REFUSED`, at the last attempt; `UNKNOWN`, that it may be
    committed; `FAILED`, for the given reason. `LEFT` means that it was not begun, or its object not committed, because
    the job had to end. `REPLANNED` means that it was refused, and its topic planned again: other runs replaced it.
    """

    COMMITTED = "committed"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FAILED = "failed"
    LEFT = "left"
    REPLANNED = "replanned"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    `topic` is its name. `index` 0 is the shared one. `sources` and `bucket` are keys of objects; `bucket` is None if no
    row was left or nothing was written. `rows_read` and `bytes_read` are those of the sources, `rows_kept` and
    `bytes_written` those of the bucket. `level` is 1 for a bucket merged from sealed ones. `worker` is the process that
    wrote it.
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
    """One topic with buckets to merge, or one that could not be read; then `error` says why and `topic` is its id."""

    topic: str
    shard: int
    buckets_before: int = 0
    buckets_after: int = 0
    planned: int = 0
    committed: int = 0
    error: str = ""


class RunCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Runs by their outcome. `planned` counts all but those that others replaced (`replanned`)."""

    planned: int = 0
    committed: int = 0
    refused: int = 0
    failed: int = 0
    left: int = 0
    unknown: int = 0
    replanned: int = 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was refused. `final` means at the last attempt."""

    topic: str
    sources: tuple[str, ...]
    reason: str
    final: bool


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of each phase of the job (seconds).

    `plan` is reading manifests and planning; `wait`, waiting for workers; `verify` and `commit`, checking and
    committing their objects, in part while workers work. `total` counts from the beginning of the job. The workers'
    phases, summed over them, are reading sources, merging and writing.
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
    """The result of a job.

    Buckets are those of all topics that were read. `sources`, rows and bytes are those of committed runs. `began_ms` is
    Unix time (ms).
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


def run_counts(results: Iterable[RunResult]) -> RunCounts:
    """Count the runs by their outcome."""
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
    """Return the runs that were refused, at the last attempt or before."""
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
    """Make a table with one line for each topic with buckets to merge, and the totals beneath."""
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
    """Make a table with one line for each run that a dry run planned."""
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


def summary_lines(summary: Summary) -> list[str]:
    """Return lines with the figures for which the table has no column."""
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


EXIT_DONE: Final = 0
EXIT_ERROR: Final = 1
EXIT_CONFLICTS: Final = 75
"""EX_TEMPFAIL of sysexits.h: run it again."""

EXIT_SIGNAL_BASE: Final = 128

_EXITS: Final = {
    Status.DONE: EXIT_DONE,
    Status.PLANNED: EXIT_DONE,
    Status.CONFLICTS: EXIT_CONFLICTS,
    Status.ERROR: EXIT_ERROR,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """The progress of a job: runs that have ended, and all that are known by now."""

    phase: str
    done: Amount = NOTHING
    total: Amount = NOTHING


@dataclasses.dataclass(eq=False, slots=True)
class _Topic:
    name: str
    shard: int
    before: int = 0
    after: int = 0
    runs: bool = False
    error: str = ""


class Tally:
    """The results of one job. `elapsed_s` returns monotonic time (seconds)."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._began_s = elapsed_s()
        self._seconds = dict.fromkeys(Seconds.__struct_fields__, 0.0)
        # By shard and id
        self._topics: dict[tuple[int, str], _Topic] = {}
        self._results: list[RunResult] = []
        self._done = NOTHING
        self.waves = 0

    # ---- recording

    @property
    def elapsed_s(self) -> float:
        """The time since the job began (seconds)."""
        return self._elapsed_s() - self._began_s

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to this field of `Seconds`."""
        began_s = self._elapsed_s()
        try:
            yield
        finally:
            self._seconds[phase] += self._elapsed_s() - began_s

    def saw(self, shard: int, manifest: TopicManifest, *, has_runs: bool) -> None:
        """Record a topic that was planned for the first time."""
        buckets = len(manifest.live)
        self._topics[shard, manifest.topic_id] = _Topic(manifest.topic, shard, buckets, buckets, runs=has_runs)

    def now_has(self, shard: int, manifest: TopicManifest) -> None:
        """Record the newest manifest of a topic that was planned."""
        self._topics[shard, manifest.topic_id].after = len(manifest.live)

    def failed_topic(self, shard: int, topic_id: str, name: str, error: str) -> None:
        """Record a topic that cannot be read."""
        self._topics.setdefault((shard, topic_id), _Topic(name, shard)).error = error

    def ended(
        self,
        work: Work,
        topic: str,
        outcome: Outcome,
        reason: str = "",
        *,
        written: WrittenRun | None = None,
    ) -> None:
        """Record the outcome of a run. `written` is its worker's report."""
        merged = None if written is None else written.written
        bucket = None if merged is None else merged.operation.bucket
        if written is not None:
            self._seconds["worker_read"] += written.read_s
            self._seconds["worker_merge"] += written.merge_s
            self._seconds["worker_write"] += written.write_s
        if outcome is not Outcome.REPLANNED:
            self._done += Amount.of([work.run])
        self._results.append(
            RunResult(
                topic=topic,
                shard=work.topic.shard,
                index=work.run.sources[0].subscription_id,
                attempt=work.attempt,
                sources=tuple(live.object.name for live in work.run.sources),
                first_ledger_id=min(live.first_ledger_id for live in work.run.sources),
                last_ledger_id=max(live.last_ledger_id for live in work.run.sources),
                outcome=outcome,
                reason=reason,
                bucket=None if bucket is None else bucket.object.name,
                rows_read=work.run.rows,
                rows_kept=0 if merged is None else merged.rows,
                bytes_read=work.run.size_bytes,
                bytes_written=0 if merged is None else merged.size_bytes,
                level=0 if merged is None else merged.level,
                worker=None if written is None else written.worker,
            )
        )

    # ---- results

    def advance(self, to_come: Amount) -> Advance:
        """Return the progress, while the runs `to_come` have no result yet."""
        return Advance(phase="merging", done=self._done, total=self._done + to_come)

    def status(self, signal_number: int | None, *, dry_run: bool) -> tuple[Status, int, str]:
        """Return status, exit status, and the reason in a sentence."""
        counts = run_counts(self._results)
        unread = sum(1 for topic in self._topics.values() if topic.error)
        if signal_number is not None:
            return Status.STOPPED, EXIT_SIGNAL_BASE + signal_number, f"signal {signal_number}"
        status, reason = Status.DONE, f"{counts.left} runs are left" if counts.left else ""
        if dry_run:
            status, reason = Status.PLANNED, f"{counts.left} runs would be merged"
        if counts.refused or counts.unknown:
            status = Status.CONFLICTS
            reason = (
                f"{counts.refused} runs were refused at the last attempt, and {counts.unknown} may "
                "be committed; run it again"
            )
        if counts.failed or unread:
            status, reason = Status.ERROR, f"{counts.failed} runs failed, {unread} topics cannot be read"
        return status, _EXITS[status], reason

    def summary(
        self, *, engine: str, parallelism: int, began_ms: int, signal_number: int | None, dry_run: bool
    ) -> Summary:
        status, exit_status, reason = self.status(signal_number, dry_run=dry_run)
        results = tuple(self._results)
        committed = [result for result in results if result.outcome is Outcome.COMMITTED]
        rows_read, rows_kept = sum(each.rows_read for each in committed), sum(each.rows_kept for each in committed)
        return Summary(
            status=status,
            exit_status=exit_status,
            reason=reason,
            dry_run=dry_run,
            engine=engine,
            parallelism=parallelism,
            began_ms=began_ms,
            topics=len(self._topics),
            buckets_before=sum(topic.before for topic in self._topics.values()),
            buckets_after=sum(topic.after for topic in self._topics.values()),
            runs=run_counts(results),
            sources=sum(len(each.sources) for each in committed),
            rows_read=rows_read,
            rows_kept=rows_kept,
            rows_dropped=rows_read - rows_kept,
            bytes_read=sum(each.bytes_read for each in committed),
            bytes_written=sum(each.bytes_written for each in committed),
            waves=self.waves,
            conflicts_retried=sum(1 for each in results if each.outcome is Outcome.REPLANNED),
            seconds=Seconds(**{**self._seconds, "total": self.elapsed_s}),
            refusals=refusals(results),
            topic_results=self._topic_results(results),
            run_results=results,
        )

    def _topic_results(self, results: Sequence[RunResult]) -> tuple[TopicResult, ...]:
        by_topic: dict[str, list[RunResult]] = {}
        for result in results:
            by_topic.setdefault(result.topic, []).append(result)
        found = []
        for topic in sorted(self._topics.values(), key=lambda topic: topic.name):
            if not topic.runs and not topic.error:
                continue
            counts = run_counts(by_topic.get(topic.name, ()))
            found.append(
                TopicResult(
                    topic=topic.name,
                    shard=topic.shard,
                    buckets_before=topic.before,
                    buckets_after=topic.after,
                    planned=counts.planned,
                    committed=counts.committed,
                    error=topic.error,
                )
            )
        return tuple(found)


LAST_RUN: Final = "tarry_compaction_last_run_timestamp_seconds"
LAST_SUCCESS: Final = "tarry_compaction_last_success_timestamp_seconds"


def write_metrics(path: Path, summary: Summary) -> None:
    """Replace the file at once, so that the collector sees the former one or this. Raises OSError."""
    last_success_s = _read(path, LAST_SUCCESS)
    ended_s = summary.began_ms / 1000 + summary.seconds.total
    _write(path, ended_s, ended_s if summary.exit_status == 0 else last_success_s, summary.exit_status, summary)


def write_failure_metrics(path: Path, *, ended_ms: int, exit_status: int) -> None:
    """Write the metrics of a job that failed without a summary. Raises OSError."""
    _write(path, ended_ms / 1000, _read(path, LAST_SUCCESS), exit_status, None)


def _read(path: Path, name: str) -> float | None:
    """Return a value of the file of the last run, or None if there is none, or it is no such file."""
    with contextlib.suppress(OSError, ValueError):
        for family in parser.text_string_to_metric_families(path.read_text(encoding="utf-8")):
            for sample in family.samples:
                if sample.name == name:
                    return sample.value
    return None


def _write(path: Path, ended_s: float, last_success_s: float | None, exit_status: int, summary: Summary | None) -> None:
    registry = prometheus_client.CollectorRegistry()

    def gauge(name: str, help_text: str, value: float) -> None:
        prometheus_client.Gauge(name, help_text, registry=registry).set(value)

    gauge(LAST_RUN, "End of the last compaction, in Unix time (seconds).", ended_s)
    if last_success_s is not None:
        gauge(LAST_SUCCESS, "End of the last compaction with exit status 0, in Unix time (seconds).", last_success_s)
    gauge(
        "tarry_compaction_exit_status",
        "Exit status of the last compaction: 0 done, 75 conflicts are left, 1 error.",
        exit_status,
    )
    if summary is not None:
        _add(registry, summary)
    prometheus_client.write_to_textfile(str(path), registry)


def _add(registry: prometheus_client.CollectorRegistry, summary: Summary) -> None:
    runs, seconds = summary.runs, summary.seconds
    labelled: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
        (
            "tarry_compaction_buckets",
            "Live buckets of all topics before and after the last compaction.",
            "when",
            {"before": summary.buckets_before, "after": summary.buckets_after},
        ),
        (
            "tarry_compaction_runs",
            "Merges of the last compaction, by outcome.",
            "outcome",
            {
                "committed": runs.committed,
                "refused": runs.refused,
                "failed": runs.failed,
                "left": runs.left,
                "unknown": runs.unknown,
                "replanned": runs.replanned,
            },
        ),
        (
            "tarry_compaction_rows",
            "Rows of the merges that the last compaction committed: kept, or dropped because they were gone.",
            "what",
            {"kept": summary.rows_kept, "dropped": summary.rows_dropped},
        ),
        (
            "tarry_compaction_bytes",
            "Bytes of the merges that the last compaction committed: read and written.",
            "what",
            {"read": summary.bytes_read, "written": summary.bytes_written},
        ),
        (
            "tarry_compaction_phase_seconds",
            "Time of the last compaction by phase (seconds); worker_ phases are sums over the workers.",
            "phase",
            {name: getattr(seconds, name) for name in seconds.__struct_fields__ if name != "total"},
        ),
    )
    for name, help_text, label, values in labelled:
        family = prometheus_client.Gauge(name, help_text, [label], registry=registry)
        for value_name, value in values.items():
            family.labels(value_name).set(value)
    unreadable = sum(bool(topic.error) for topic in summary.topic_results)
    for name, help_text, value in (
        ("tarry_compaction_duration_seconds", "Duration of the last compaction (seconds).", seconds.total),
        ("tarry_compaction_topics", "Topics that the last compaction read.", summary.topics),
        ("tarry_compaction_topics_unreadable", "Topics that the last compaction could not read.", unreadable),
    ):
        prometheus_client.Gauge(name, help_text, registry=registry).set(value)
