"""The compaction of a root: topics are planned, runs done by an engine in waves, and committed one by one.

Owns: what the driver does, in which order, and what follows from what becomes of a run.
Does not own: the choice of runs (`plan`), their order and attempts (`waves`), what a worker does (`merge_task`), the
engine, a commit (`committing`), what is written down (`tally`), and what is shown.

While the workers do a wave the driver checks and commits the one before. It commits upon the newest manifest that it
knows, and learns of others' commits when it comes second; then it plans the topic again from what it was shown. After
the commits of a wave it leaves hints for the owners; one that is lost costs only time. It
deletes nothing: what is not committed is an orphan, which the daemon's collection removes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from batch.compaction import plan
from batch.compaction.committing import Tip, TopicCommits
from batch.compaction.merge_task import FailedRun, Failure, WrittenRun, task_of
from batch.compaction.plan import Parameters, Run
from batch.compaction.summary import Outcome, Summary
from batch.compaction.tally import Advance, Tally
from batch.compaction.wave import Report, Wave
from batch.compaction.waves import Amount, Waves, Work
from batch.engine.engine_port import Engine
from batch.engine.job_settings import Settings
from batch.engine.root import Root, TopicPlace
from storage_backends import commit, merge_hints
from storage_backends import storage_settings as sections
from storage_backends.crash_points import crash_point
from storage_backends.formats import format_errors
from storage_backends.formats.manifest import TopicManifest
from storage_backends.merge_hints import MergeHint
from storage_backends.object_store import Damaged, NotFound, StoreError
from storage_backends.progress_objects import LastProgress
from storage_backends.topic_merge import adjacent_order

_log = logging.getLogger(__name__)

WAVE_FACTOR: Final = 8
"""Runs of a wave for each task that the engine does at once: few enough that commits follow soon after writing, and so
many that what Spark takes for a wave by itself, half a second, is little.
"""

ATTEMPTS_MAX: Final = 3

_Look = tuple[Tip, list[Run]] | StoreError | format_errors.FormatError | None
"""A topic's tip and what may be merged, None when it is no topic, or why it cannot be read."""


class Stopped(Exception):
    """The job was asked to end."""


class Stop:
    """Whether the job is to end: set by a signal's handler, seen by every thread."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def request(self, signal_number: int) -> None:
        self.signal_number = signal_number

    def check(self) -> None:
        """Raises Stopped when the job is to end."""
        if self.signal_number is not None:
            raise Stopped(f"signal {self.signal_number}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. `topics`: names; None = all. `bytes_max`: of sources that are read. `deadline_s`: so long
    after the beginning no wave begins. `attempts_max`: how often a topic is planned.
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
class Environment:
    """What is not decided here. `now_ms`: Unix time; `elapsed_s`: monotonic; `new_id`: never the same."""

    now_ms: Callable[[], int]
    elapsed_s: Callable[[], float]
    new_id: Callable[[], str]


def compact(
    root: Root,
    engine: Engine | None,
    settings: Settings,
    options: Options,
    *,
    environment: Environment,
    stop: Stop,
    watch: Callable[[Advance], None],
) -> Summary:
    """Merges what there is to merge. `engine`: entered; None: a dry run, which only plans. `watch` is called from two
    threads.

    What goes wrong with a topic or a run is in the summary. Raises the store's errors when not even the topics can be
    listed.
    """
    return _Job(root, engine, settings, options, environment, stop, watch).run()


@dataclasses.dataclass(eq=False, slots=True)
class _Topic:
    """A topic with something to merge. `left_out`: buckets that this job made, or that it cannot merge."""

    commits: TopicCommits
    left_out: set[str] = dataclasses.field(default_factory=set)

    @property
    def name(self) -> str:
        return self.commits.manifest.topic


def _places(manifest: TopicManifest) -> dict[str, int]:
    """Where the buckets that may be merged are in the order of neighbours."""
    return {live.object.name: place for place, live in enumerate(adjacent_order(manifest.live))}


class _Job:
    def __init__(
        self,
        root: Root,
        engine: Engine | None,
        settings: Settings,
        options: Options,
        environment: Environment,
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
        # Of the topic that was committed last: all of them together may be large.
        self._progress = LastProgress(root.store)
        # Begun, and without a result.
        self._under_way: list[Work] = []
        # Committed, or perhaps so, and no hint says it yet.
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
            # What was looked at is let go, one after the other: all manifests together may be large.
            for place, found in zip(places, readers.map(self._look, places), strict=True):
                self._looked(place, found)
        _log.info("planned topics=%d runs=%d", len(places), self._waves.waiting.runs)

    def _list(self, shard: int) -> list[TopicPlace]:
        """In any thread. Raises Stopped and the store's errors."""
        self._stop.check()
        return self._root.listed(shard)

    def _look(self, place: TopicPlace) -> _Look:
        """In any thread. Raises Stopped."""
        self._stop.check()
        try:
            tip = self._root.tip(place)
            return None if tip is None or tip.manifest.deleted else (tip, self._runs(tip.manifest, frozenset()))
        except (StoreError, format_errors.FormatError) as error:
            return error

    def _runs(self, tip: TopicManifest, left_out: frozenset[str]) -> list[Run]:
        """Raises FormatError when progress is damaged."""
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
            commits = TopicCommits(self._root, place, tip, writer=self._writer, progress_of=self._progress.of)
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
            self._cannot_read(place, error)
        self._waves.offer(place, runs)

    # ---- waves

    def _do_waves(self, engine: Engine) -> None:
        """Plans, does and commits wave after wave until nothing waits or it is too late. Raises Stopped."""
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

    def _begin_wave(self, engine: Engine) -> Wave | None:
        """None when nothing waits, or it is too late."""
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
        """Those whose sources are neighbours by the newest manifest known; the others are refused before they are
        done: their commit would be.
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
        """In the thread of a wave."""
        self._stop.check()
        self._show_advance()

    def _show_advance(self) -> None:
        under_way = [work.run for work in tuple(self._under_way)]
        self._watch(self._tally.advance(Amount.of(under_way) + self._waves.waiting))

    def _fail_unreported(self, wave: Wave, reports: Iterable[tuple[Work, Report]]) -> None:
        """The engine could not do these."""
        if wave.failure is None:
            return
        _log.error("%s", wave.failure)
        reported = {work for work, _ in reports}
        for work in wave.works:
            if work not in reported:
                self._give_up(work, str(wave.failure), left_out=work.run.names)

    def _leave_rest(self) -> None:
        """What was begun and not committed, and what was not begun."""
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

    # ---- what becomes of a run

    def _commit_all(self, reports: Iterable[tuple[Work, Report]]) -> None:
        """Those of one topic after each other. Raises Stopped between two commits."""
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
        """The owners of the topics look at once, and not at their next turn."""
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
        except (Damaged, format_errors.FormatError) as error:
            self._give_up(work, str(error), left_out=work.run.names, written=report)
        except StoreError as error:
            self._again(work, str(error), Outcome.FAILED, written=report)
        else:
            topic.left_out |= made
            self._unhinted.add(work.topic)
            self._end(work, Outcome.COMMITTED, written=report)

    def _grace_ms(self) -> int:
        """How long the sources stay. Who collects them has another clock: one that is ahead of this one must not make
        it shorter.
        """
        ahead_s = max(0.0, self._root.store.clock_skew_s() or 0.0)
        return int((self._settings.collection.grace_s + ahead_s) * 1000)

    def _not_written(self, work: Work, report: FailedRun) -> None:
        reason = f"{report.key}: {report.reason}" if report.key else report.reason
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
        """A source, or the progress, is not there: by now it may have left the manifest."""
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
        """Its topic is planned again; at the last attempt this is what became of it. `read`: whether its sources may
        have been read.
        """
        again = self._waves.refused(work, read=read)
        name = self._topics[work.topic].name
        what = "planned again" if again else "given up, no attempts are left"
        _log.info("topic %s: a run was refused and is %s: %s", name, what, reason)
        self._under_way.remove(work)
        self._tally.ended(work, name, Outcome.REPLANNED if again else finally_, reason, written=written)

    def _give_up(self, work: Work, reason: str, *, left_out: Iterable[str], written: WrittenRun | None = None) -> None:
        """It failed, and no attempt of this job would do better."""
        topic = self._topics[work.topic]
        _log.error("topic %s: cannot merge buckets: %s", topic.name, reason)
        topic.left_out.update(left_out)
        self._end(work, Outcome.FAILED, reason, written=written)

    def _end(self, work: Work, outcome: Outcome, reason: str = "", *, written: WrittenRun | None = None) -> None:
        self._waves.settled(work)
        self._under_way.remove(work)
        self._tally.ended(work, self._topics[work.topic].name, outcome, reason, written=written)
