"""What happens in a compaction, written down as it happens.

Owns: every run's result, the time of each phase, how far the job is, and the exit status that follows.
Does not own: what the results mean for the job (`job`), the form of the summary (`summary`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from batch.compaction import summary
from batch.compaction.merge_task import WrittenRun
from batch.compaction.summary import Outcome, RunResult, Seconds, Status, Summary, TopicResult
from batch.compaction.waves import NOTHING, Amount, Work
from storage_backends.formats.manifest import TopicManifest

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
    """How far a job is: runs that are done with, and all that are known by now."""

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
    """The results of one job. `elapsed_s`: monotonic."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._began_s = elapsed_s()
        self._seconds = dict.fromkeys(Seconds.__struct_fields__, 0.0)
        # By shard and id.
        self._topics: dict[tuple[int, str], _Topic] = {}
        self._results: list[RunResult] = []
        self._done = NOTHING
        self.waves = 0

    # ---- what happens

    @property
    def elapsed_s(self) -> float:
        """Since the job began."""
        return self._elapsed_s() - self._began_s

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """What is done within belongs to this field of `Seconds`."""
        began_s = self._elapsed_s()
        try:
            yield
        finally:
            self._seconds[phase] += self._elapsed_s() - began_s

    def saw(self, shard: int, manifest: TopicManifest, *, has_runs: bool) -> None:
        """A topic was planned for the first time."""
        buckets = len(manifest.live)
        self._topics[shard, manifest.topic_id] = _Topic(manifest.topic, shard, buckets, buckets, runs=has_runs)

    def now_has(self, shard: int, manifest: TopicManifest) -> None:
        """The newest manifest of a topic that was planned."""
        self._topics[shard, manifest.topic_id].after = len(manifest.live)

    def failed_topic(self, shard: int, topic_id: str, name: str, error: str) -> None:
        """A topic cannot be read."""
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
        """What became of a run. `written`: what its worker said."""
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

    # ---- what it comes to

    def advance(self, to_come: Amount) -> Advance:
        """How far it is, while these runs have no result yet."""
        return Advance(phase="merging", done=self._done, total=self._done + to_come)

    def status(self, signal_number: int | None, *, dry_run: bool) -> tuple[Status, int, str]:
        """Status, exit status, and in a sentence why."""
        counts = summary.counts(self._results)
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
            runs=summary.counts(results),
            sources=sum(len(each.sources) for each in committed),
            rows_read=rows_read,
            rows_kept=rows_kept,
            rows_dropped=rows_read - rows_kept,
            bytes_read=sum(each.bytes_read for each in committed),
            bytes_written=sum(each.bytes_written for each in committed),
            waves=self.waves,
            conflicts_retried=sum(1 for each in results if each.outcome is Outcome.REPLANNED),
            seconds=Seconds(**{**self._seconds, "total": self.elapsed_s}),
            refusals=summary.refusals(results),
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
            counts = summary.counts(by_topic.get(topic.name, ()))
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
