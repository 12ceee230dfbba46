"""Compacts a root: plans topics, has an engine do the runs in waves, and commits them one by one.

While the workers do a wave the driver checks and commits the one before. It commits on the newest manifest that it
knows. If another process commits first, it learns of that, and plans the topic again from the newer manifest. After the
commits of a wave it leaves hints for the owners; one that is lost costs only time. It deletes nothing: an object that
is not committed is an orphan, which the daemon's collection removes.

Before a manifest names an object, the worker's report is compared with the object; the operation compares rows and
hashes with the manifest's entries of the sources. Therefore a worker that was wrong is refused, whatever it wrote.

`batch.cli.compact` alone uses this module, which needs no command line. `plan` chooses runs, `waves` orders them,
`merge_task` is a worker's part, and `tally` counts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from batch.compaction import plan
from batch.compaction.merge_task import FailedRun, Failure, WrittenRun, task_of
from batch.compaction.plan import Parameters, Run
from batch.compaction.tally import Advance, Outcome, Summary, Tally
from batch.compaction.waves import Amount, Report, Wave, Waves, Work
from batch.engine.engine_port import TaskEngine
from batch.engine.job_settings import Settings
from batch.engine.root import Root, TopicPlace
from storage_backends import bucket_reading, commit, merge_hints
from storage_backends import storage_settings as sections
from storage_backends.bucket_merging import WrittenMerge
from storage_backends.bucket_reading import LastProgress
from storage_backends.crash_points import crash_point
from storage_backends.formats import format_errors
from storage_backends.formats.manifest import LiveBucket, Progress, TopicManifest
from storage_backends.merge_hints import MergeHint
from storage_backends.object_store import Damaged, NotFound, StoreError
from storage_backends.topic_manifest import adjacent_order

Tip = commit.Tip[TopicManifest]

COMMIT_DEADLINE_S = 30.0
"""Time for which a commit is retried while the store fails (seconds)"""


class MergeCommits:
    """The commits of one topic, one after the other.

    `writer` names the committer, for people who read the manifest. `progress_of` is that of `topic_manifest.Merge`.
    """

    def __init__(
        self,
        root: Root,
        place: TopicPlace,
        tip: Tip,
        *,
        writer: str,
        progress_of: Callable[[TopicManifest], Progress],
    ) -> None:
        self._store = root.store
        self._progress_of = progress_of
        self._log = root.log(place)
        self._writer = writer
        self.tip = tip

    @property
    def manifest(self) -> TopicManifest:
        """The newest manifest that is known."""
        return self.tip.manifest

    def look(self) -> None:
        """Read the newest manifest. Raises Damaged and the store's errors.

        A topic without manifests was deleted: they are collected last.
        """
        # The known tip shows nothing of manifests that were collected behind it.
        found = self._log.read_tip()
        if found is None:
            found = dataclasses.replace(self.tip, manifest=dataclasses.replace(self.manifest, deleted=True, live=()))
        self.tip = found

    def verify(self, bucket: LiveBucket) -> None:
        """Check an object against the worker's report.

        Raises Damaged or NotFound unless it exists with the reported size, and its table and first entry are whole and
        agree; and the store's errors.
        """
        size_bytes = self._store.head(bucket.object.name).size_bytes
        if size_bytes != bucket.object.size_bytes:
            raise Damaged(bucket.object.name, f"it has {size_bytes} bytes, but {bucket.object.size_bytes} were written")
        bucket_reading.open_bucket(self._store, bucket)

    def commit(self, written: WrittenMerge, *, now_ms: int, grace_ms: int) -> None:
        """Commit a merge; the sources may be deleted after the grace (ms).

        Raises what `storage_backends.commit.commit` raises, and FormatError if progress is damaged.
        """
        operation = dataclasses.replace(
            written.operation, progress_of=self._progress_of, delete_after_ms=now_ms + grace_ms
        )
        try:
            self.tip = commit.commit(
                self._log,
                operation,
                writer=self._writer,
                created_ms=now_ms,
                warm=self.tip,
                deadline_s=COMMIT_DEADLINE_S,
            )
        except commit.Refused as refused:
            if refused.tip is not None:
                self.tip = refused.tip
            raise


_log = logging.getLogger(__name__)

WAVE_FACTOR: Final = 8
"""Runs of a wave for each task that the engine does at once.

Few enough that commits follow soon after writing, and so many that Spark's overhead for a wave, half a second, is
little.
"""

ATTEMPTS_MAX: Final = 3

_DELETED: Final = "the topic was deleted"

_Look = tuple[Tip, list[Run]] | StoreError | format_errors.FormatError | None
"""A topic's tip and its runs, None if there is no topic, or the error of reading it"""


class Stopped(Exception):
    """The end of the job by request."""


class Stop:
    """The request to end the job: set by a signal's handler, seen by every thread."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def request(self, signal_number: int) -> None:
        self.signal_number = signal_number

    def check(self) -> None:
        """Raise Stopped if the job must end."""
        if self.signal_number is not None:
            raise Stopped(f"signal {self.signal_number}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a job.

    `topics` are names; None means all. `bytes_max` limits the sources that are read. No wave begins later than
    `deadline_s` after the beginning (seconds). `attempts_max` limits how often a topic is planned.
    """

    topics: Sequence[str] | None = None
    target_bytes: int = plan.TARGET_BYTES
    sources_max: int = plan.SOURCES_MAX
    sources_min: int = plan.SOURCES_MIN
    soon_ms: int = plan.SOON_MS
    bytes_max: int | None = None
    deadline_s: float | None = None
    attempts_max: int = ATTEMPTS_MAX


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """The environment of a job.

    `now_ms` returns Unix time (ms), `elapsed_s` monotonic time (seconds), `new_id` a new id at each call.
    """

    now_ms: Callable[[], int]
    elapsed_s: Callable[[], float]
    new_id: Callable[[], str]


def compact(
    root: Root,
    engine: TaskEngine | None,
    settings: Settings,
    options: Options,
    *,
    environment: JobEnvironment,
    stop: Stop,
    watch: Callable[[Advance], None],
) -> Summary:
    """Merge all buckets that may be merged.

    `engine` has been entered; None means a dry run, which only plans. `watch` is called from two threads. Failures of
    topics and runs are in the summary. Raises the store's errors if not even the topics can be listed.
    """
    return _Job(root, engine, settings, options, environment, stop, watch).run()


@dataclasses.dataclass(eq=False, slots=True)
class _Topic:
    """A topic with buckets to merge. `left_out` are buckets that this job made, or that it cannot merge."""

    commits: MergeCommits
    left_out: set[str] = dataclasses.field(default_factory=set)

    @property
    def name(self) -> str:
        return self.commits.manifest.topic


def _places(manifest: TopicManifest) -> dict[str, int]:
    """Return the position of each mergeable bucket in the order of neighbours."""
    return {live.object.name: place for place, live in enumerate(adjacent_order(manifest.live))}


class _Job:
    def __init__(
        self,
        root: Root,
        engine: TaskEngine | None,
        settings: Settings,
        options: Options,
        environment: JobEnvironment,
        stop: Stop,
        watch: Callable[[Advance], None],
    ) -> None:
        self._root = root
        self._engine = engine
        self._settings = settings
        self._options = options
        self._environment = environment
        self._stop = stop
        self._watch = watch
        self._began_ms = environment.now_ms()
        self._writer = f"tarry-spark/{environment.new_id()}"
        self._waves = Waves(attempts_max=options.attempts_max, bytes_max=options.bytes_max)
        self._tally = Tally(environment.elapsed_s)
        self._topics: dict[TopicPlace, _Topic] = {}
        # Progress of the topic that was committed last: all of them together may be large
        self._progress = LastProgress(root.store)
        # Begun, without a result
        self._under_way: list[Work] = []
        # Committed, or perhaps so, without a hint yet
        self._unhinted: set[TopicPlace] = set()

    def run(self) -> Summary:
        with contextlib.suppress(Stopped):
            with self._tally.timed("plan"):
                self._watch(Advance(phase="planning"))
                self._plan_all()
            crash_point("compaction.after_plan")
            if self._engine is not None:
                self._do_waves(self._engine)
        self._leave_rest()
        for place, topic in self._topics.items():
            self._tally.now_has(place.shard, topic.commits.manifest)
        crash_point("compaction.before_summary")
        return self._tally.summary(
            engine="" if self._engine is None else self._engine.name,
            parallelism=0 if self._engine is None else self._engine.parallelism,
            began_ms=self._began_ms,
            signal_number=self._stop.signal_number,
            dry_run=self._engine is None,
        )

    # ---- planning

    def _plan_all(self) -> None:
        named = self._options.topics
        with concurrent.futures.ThreadPoolExecutor(self._settings.store.io_threads) as readers:
            if named is None:
                places = [place for listed in readers.map(self._list, range(self._root.shards)) for place in listed]
            else:
                places = self._root.topics(named)
            # Manifests are dropped one after the other: all together may be large.
            for place, found in zip(places, readers.map(self._look, places), strict=True):
                self._looked(place, found)
        _log.info("planned topics=%d runs=%d", len(places), self._waves.waiting.runs)

    def _list(self, shard: int) -> list[TopicPlace]:
        """List a shard, in any thread. Raises Stopped and the store's errors."""
        self._stop.check()
        return self._root.listed(shard)

    def _look(self, place: TopicPlace) -> _Look:
        """Read and plan a topic, in any thread. Raises Stopped."""
        self._stop.check()
        try:
            tip = self._root.tip(place)
            return None if tip is None or tip.manifest.deleted else (tip, self._runs(tip.manifest, frozenset()))
        except (StoreError, format_errors.FormatError) as error:
            return error

    def _runs(self, tip: TopicManifest, left_out: frozenset[str]) -> list[Run]:
        """Plan a topic. Raises FormatError if progress is damaged."""
        options = self._options
        if tip.deleted or len(tip.live) < options.sources_min:
            return []
        parameters = Parameters(
            now_ms=self._environment.now_ms(),
            rows_max=sections.merge_rows_max(self._settings.bucket, tip.policy),
            target_bytes=options.target_bytes,
            sources_max=options.sources_max,
            sources_min=options.sources_min,
            soon_ms=options.soon_ms,
        )
        gone = {} if tip.progress is None else plan.gone_rows(tip.progress)
        return plan.plan(tip, parameters, gone=gone, left_out=left_out)

    def _looked(self, place: TopicPlace, found: _Look) -> None:
        if isinstance(found, Exception):
            self._cannot_read(place, found)
            return
        if found is None:
            if self._options.topics is not None:
                self._cannot_read(place, "no such topic")
            return
        tip, runs = found
        self._tally.saw(place.shard, tip.manifest, has_runs=bool(runs))
        if runs:
            commits = MergeCommits(self._root, place, tip, writer=self._writer, progress_of=self._progress.of)
            self._topics[place] = _Topic(commits)
            self._waves.offer(place, runs)

    def _cannot_read(self, place: TopicPlace, error: object) -> None:
        names = {self._root.place_of(name): name for name in self._options.topics or ()}
        known = self._topics.get(place)
        name = names.get(place, place.topic_id) if known is None else known.name
        _log.error("cannot plan topic %s, skipping it: %s", name, error)
        self._tally.failed_topic(place.shard, place.topic_id, name, str(error))

    def _plan_again(self, place: TopicPlace) -> None:
        topic = self._topics[place]
        runs: list[Run] = []
        try:
            topic.commits.look()
            runs = self._runs(topic.commits.manifest, frozenset(topic.left_out))
        except (StoreError, format_errors.FormatError) as error:
            if not self._is_deleted(place):
                self._cannot_read(place, error)
        self._waves.offer(place, runs)

    def _is_deleted(self, place: TopicPlace) -> bool:
        """Return whether a topic of which something cannot be read was deleted since it was planned."""
        try:
            self._topics[place].commits.look()
        except (StoreError, format_errors.FormatError):
            return False
        return self._topics[place].commits.manifest.deleted

    # ---- waves

    def _do_waves(self, engine: TaskEngine) -> None:
        """Plan, do and commit wave after wave until none waits or the deadline has passed. Raises Stopped."""
        written: Sequence[tuple[Work, Report]] = ()
        while True:
            for place in self._waves.to_plan_again():
                with self._tally.timed("plan"):
                    self._plan_again(place)
            wave = self._begin_wave(engine)
            try:
                self._commit_all(written)
            finally:
                if wave is not None:
                    with self._tally.timed("wait"):
                        wave.end()
            if wave is not None:
                written = wave.reports()
                self._fail_unreported(wave, written)
                crash_point("compaction.after_wave")
            elif self._waves.to_plan_again():
                written = ()
            else:
                return

    def _begin_wave(self, engine: TaskEngine) -> Wave | None:
        """Begin the next wave. Returns None if no run waits, or the deadline has passed."""
        deadline_s = self._options.deadline_s
        if deadline_s is not None and self._tally.elapsed_s >= deadline_s:
            return None
        self._stop.check()
        works: list[Work] = []
        while not works and (candidates := self._waves.next_wave(WAVE_FACTOR * engine.parallelism)):
            self._under_way += candidates
            works = self._still_neighbours(candidates)
        if not works:
            return None
        tasks = [
            task_of(self._settings, work.topic.shard, self._topics[work.topic].commits.manifest, work.run)
            for work in works
        ]
        self._tally.waves += 1
        return Wave(engine, works, tasks, lambda ended: self._tasks_ended())

    def _still_neighbours(self, works: Sequence[Work]) -> list[Work]:
        """Return the runs whose sources are neighbours by the newest manifest known.

        The others are refused before they are done, because their commit would be.
        """
        orders = {work.topic: _places(self._topics[work.topic].commits.manifest) for work in works}
        found = []
        for work in works:
            order = orders[work.topic]
            places = [order.get(live.object.name) for live in work.run.sources]
            first = places[0]
            if first is not None and places == list(range(first, first + len(places))):
                found.append(work)
            else:
                reason = "other buckets have taken the place of its sources, or lie between"
                self._again(work, reason, Outcome.REFUSED, read=False)
        return found

    def _tasks_ended(self) -> None:
        """Show progress, in the thread of a wave. Raises Stopped."""
        self._stop.check()
        self._show_advance()

    def _show_advance(self) -> None:
        under_way = [work.run for work in tuple(self._under_way)]
        self._watch(self._tally.advance(Amount.of(under_way) + self._waves.waiting))

    def _fail_unreported(self, wave: Wave, reports: Iterable[tuple[Work, Report]]) -> None:
        """Fail the runs that the engine could not do."""
        if wave.failure is None:
            return
        _log.error("%s", wave.failure)
        reported = {work for work, _ in reports}
        for work in wave.works:
            if work not in reported:
                self._give_up(work, str(wave.failure), left_out=work.run.names)

    def _leave_rest(self) -> None:
        """Record the runs that were begun and not committed, and those that were not begun."""
        for work in list(self._under_way):
            self._end(work, Outcome.LEFT, "the job ended before its commit")
        over_limit, waiting = self._waves.rest()
        for work in over_limit:
            self._tally.ended(work, self._topics[work.topic].name, Outcome.LEFT, "--max-bytes was reached")
        reason = "a signal ended the job" if self._stop.signal_number else "--deadline was reached"
        if self._engine is None:
            reason = "dry run"
        for work in waiting:
            self._tally.ended(work, self._topics[work.topic].name, Outcome.LEFT, reason)

    # ---- outcomes of runs

    def _commit_all(self, reports: Iterable[tuple[Work, Report]]) -> None:
        """Commit runs, those of one topic after each other. Raises Stopped between two commits."""
        try:
            for work, report in sorted(reports, key=lambda each: each[0].topic):
                self._stop.check()
                if isinstance(report, FailedRun):
                    self._not_written(work, report)
                else:
                    self._commit(work, report)
                self._show_advance()
        finally:
            self._leave_hints()

    def _leave_hints(self) -> None:
        """Leave hints, so that the owners of the topics adopt the merges at once, and not at their next turn."""
        if not self._unhinted:
            return
        hints = [MergeHint(place.shard, place.topic_id) for place in sorted(self._unhinted)]
        try:
            with self._tally.timed("commit"):
                merge_hints.leave(self._root.store, hints, value=self._environment.new_id())
        except StoreError as error:
            _log.warning(
                "cannot write merge hints for %d topics, their owners adopt the merges later: %s", len(hints), error
            )
        else:
            self._unhinted.clear()

    def _commit(self, work: Work, report: WrittenRun) -> None:
        topic, written = self._topics[work.topic], report.written
        bucket = written.operation.bucket
        made = set() if bucket is None else {bucket.object.name}
        try:
            if bucket is not None:
                with self._tally.timed("verify"):
                    topic.commits.verify(bucket)
            crash_point("compaction.before_commit")
            with self._tally.timed("commit"):
                topic.commits.commit(written, now_ms=self._environment.now_ms(), grace_ms=self._grace_ms())
            crash_point("compaction.after_commit")
        except commit.Refused as refused:
            self._again(work, refused.reason, Outcome.REFUSED, written=report)
        except NotFound as error:
            # Its object was collected before its commit, which is refused then; or the progress has a newer one.
            self._again(work, str(error), Outcome.REFUSED, written=report)
        except commit.CommitOutcomeUnknown as error:
            _log.error("topic %s: %s", topic.name, error)
            topic.left_out |= work.run.names | made
            self._unhinted.add(work.topic)
            self._end(work, Outcome.UNKNOWN, str(error), written=report)
        except (StoreError, format_errors.FormatError) as error:
            if self._is_deleted(work.topic):
                self._again(work, _DELETED, Outcome.REFUSED, written=report)
            elif isinstance(error, Damaged | format_errors.FormatError):
                self._give_up(work, str(error), left_out=work.run.names, written=report)
            else:
                self._again(work, str(error), Outcome.FAILED, written=report)
        else:
            topic.left_out |= made
            self._unhinted.add(work.topic)
            self._end(work, Outcome.COMMITTED, written=report)

    def _grace_ms(self) -> int:
        """Return how long the sources stay (ms).

        Another process with another clock collects them: a clock that is ahead of this one must not shorten the grace.
        """
        ahead_s = max(0.0, self._root.store.clock_skew_s() or 0.0)
        return int((self._settings.collection.grace_s + ahead_s) * 1000)

    def _not_written(self, work: Work, report: FailedRun) -> None:
        reason = f"{report.key}: {report.reason}" if report.key else report.reason
        if self._is_deleted(work.topic):
            self._again(work, _DELETED, Outcome.REFUSED)
            return
        match report.failure:
            case Failure.DAMAGED:
                self._give_up(work, reason, left_out={report.key})
            case Failure.INCONSISTENT:
                self._give_up(work, reason, left_out=work.run.names)
            case Failure.UNAVAILABLE:
                self._again(work, reason, Outcome.FAILED)
            case Failure.MISSING:
                self._missing(work, report.key, reason)

    def _missing(self, work: Work, key: str, reason: str) -> None:
        """Settle a run whose source, or progress, is missing: it may have left the manifest by now."""
        commits = self._topics[work.topic].commits
        try:
            commits.look()
        except StoreError as error:
            self._again(work, str(error), Outcome.FAILED)
            return
        named = {live.object.name for live in commits.manifest.live}
        if commits.manifest.progress_object is not None:
            named.add(commits.manifest.progress_object.name)
        if key in named:
            self._give_up(work, f"{reason}; the newest manifest names it", left_out={key})
        else:
            self._again(work, reason, Outcome.REFUSED)

    def _again(
        self, work: Work, reason: str, finally_: Outcome, *, read: bool = True, written: WrittenRun | None = None
    ) -> None:
        """Plan the run's topic again, or record the outcome `finally_` after the last attempt.

        `read` says whether its sources may have been read.
        """
        again = self._waves.refused(work, read=read)
        name = self._topics[work.topic].name
        what = "planned again" if again else "given up, no attempts are left"
        _log.info("topic %s: a run was refused and is %s: %s", name, what, reason)
        self._under_way.remove(work)
        self._tally.ended(work, name, Outcome.REPLANNED if again else finally_, reason, written=written)

    def _give_up(self, work: Work, reason: str, *, left_out: Iterable[str], written: WrittenRun | None = None) -> None:
        """Fail a run that no further attempt of this job could do."""
        topic = self._topics[work.topic]
        _log.error("topic %s: cannot merge buckets: %s", topic.name, reason)
        topic.left_out.update(left_out)
        self._end(work, Outcome.FAILED, reason, written=written)

    def _end(self, work: Work, outcome: Outcome, reason: str = "", *, written: WrittenRun | None = None) -> None:
        self._waves.settled(work)
        self._under_way.remove(work)
        self._tally.ended(work, self._topics[work.topic].name, outcome, reason, written=written)
