"""One run of a job: its sources are read, what is not gone is one new object. Done in a worker, wherever that is.

Owns: what a worker must know for it, and what it reports.
Does not own: the merge of the rows (`storage_backends.formats.merge`), reading and writing
(`storage_backends.bucket_merging`), which run it is (`plan`), and its commit (`job`).

A worker knows of the topic's manifest only what names the sources. It may do a run twice, or die in the middle: each
attempt writes an object of its own, and one that nobody commits is an orphan, which the daemon's collection removes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
import os
import socket
import time
from collections.abc import Sequence

import ulid

from batch.compaction.plan import Run
from batch.engine.job_settings import Settings, store_of
from storage_backends import bucket_merging
from storage_backends import storage_settings as sections
from storage_backends.bucket_reading import LastProgress
from storage_backends.crash_points import crash_point
from storage_backends.formats import format_errors, merge, names
from storage_backends.formats.manifest import LiveBucket, Progress, TopicManifest
from storage_backends.object_store import Damaged, NotFound, ObjectStore, StoreError

READERS = 8
"""Sources that a worker reads at once from a store behind a network."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MergeTask:
    """A run as a worker gets it. `tip`: the manifest that it is planned from, without what says nothing of the sources;
    its live buckets are the sources.
    """

    settings: Settings
    shard: int
    tip: TopicManifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The process that did it."""

    host: str
    pid: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WrittenRun:
    """The object of a run is written. `read_s`, `merge_s`, `write_s`: what that took."""

    written: bucket_merging.WrittenMerge
    worker: Worker
    read_s: float
    merge_s: float
    write_s: float


class Failure(enum.Enum):
    """Why there is no object. `DAMAGED`: of the source that is named, or of the progress. `MISSING`: it is not there:
    by now the manifest may name it no longer. `INCONSISTENT`: each source is whole, together they are not what the
    manifest says. `UNAVAILABLE`: the store did not do it.
    """

    DAMAGED = "damaged"
    MISSING = "missing"
    INCONSISTENT = "inconsistent"
    UNAVAILABLE = "unavailable"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """No object was written, or none that anybody may rely on. `key`: what it was about, empty = the run."""

    failure: Failure
    key: str
    reason: str
    worker: Worker


def task_of(settings: Settings, shard: int, tip: TopicManifest, run: Run) -> MergeTask:
    """What a worker needs of the manifest `tip`, which names all sources of the run as live."""
    head = dataclasses.replace(tip.head, lineage=())
    excerpt = dataclasses.replace(
        tip, head=head, live=run.sources, tombstones=(), progress=_cut(tip, run), subscriptions=()
    )
    return MergeTask(settings=settings, shard=shard, tip=excerpt)


def _cut(tip: TopicManifest, run: Run) -> Progress | None:
    """The part of the manifest's inline progress that a worker needs: of the sources, and of buckets that are no more
    and may have been merged into one of them. None when the progress is not inline.
    """
    if tip.progress is None:
        return None
    others = {live.object.name for live in tip.live} - run.names
    return Progress(
        buckets=tuple(
            dataclasses.replace(part, acknowledged=())
            for part in tip.progress.buckets
            if part.gone and part.bucket not in others
        )
    )


def ready(number: int) -> int:
    """Does nothing: a worker that has done it is there, and has imported what a run needs."""
    return number


def merge_run(task: MergeTask) -> WrittenRun | FailedRun:
    """Does one run. Everything that it expects to go wrong it reports."""
    worker = Worker(host=socket.gethostname(), pid=os.getpid())
    try:
        store = store_of(task.settings)
    except StoreError as error:
        # Also where this machine has no such directory.
        return FailedRun(failure=Failure.UNAVAILABLE, key=error.key, reason=error.reason, worker=worker)
    try:
        return _merge_run(store, task, worker)
    except Damaged as error:
        return FailedRun(failure=Failure.DAMAGED, key=error.key, reason=error.reason, worker=worker)
    except NotFound as error:
        return FailedRun(failure=Failure.MISSING, key=error.key, reason=error.reason, worker=worker)
    except StoreError as error:
        return FailedRun(failure=Failure.UNAVAILABLE, key=error.key, reason=error.reason, worker=worker)
    except (format_errors.FormatError, merge.NotConserved) as error:
        return FailedRun(failure=Failure.INCONSISTENT, key="", reason=str(error), worker=worker)


def _merge_run(store: ObjectStore, task: MergeTask, worker: Worker) -> WrittenRun:
    """Raises the store's errors, and what `merging.merged` raises."""
    tip = task.tip
    key = names.bucket_key(task.shard, tip.topic_id, tip.head.number, str(ulid.ULID()))
    plan = bucket_merging.MergePlan(tip, tip.live, key)
    begun_s = time.monotonic()
    sources = _read(store, plan.sources, READERS if task.settings.store.kind == "s3" else 1)
    progress = progress_by(task.settings, tip)
    read_s = time.monotonic()
    bucket = task.settings.bucket
    made = bucket_merging.merged(
        plan,
        sources,
        progress,
        limits=sections.segment_limits(bucket, tip.policy),
        compatible=sections.compatible_form(bucket, tip.policy),
    )
    merged_s = time.monotonic()
    crash_point("compaction.before_put")
    written = bucket_merging.write(
        store,
        plan,
        sources,
        made,
        # Both are the committer's: it has the newest manifest.
        progress_of=functools.partial(progress_by, task.settings),
        delete_after_ms=0,
    )
    crash_point("compaction.after_put")
    return WrittenRun(
        written=written,
        worker=worker,
        read_s=read_s - begun_s,
        merge_s=merged_s - read_s,
        write_s=time.monotonic() - merged_s,
    )


def progress_by(settings: Settings, tip: TopicManifest) -> Progress:
    """The progress of a manifest, by the store of this process; the last one is kept, for its next task."""
    return _last_progress(settings).of(tip)


@functools.lru_cache(maxsize=1)
def _last_progress(settings: Settings) -> LastProgress:
    return LastProgress(store_of(settings))


def _read(store: ObjectStore, sources: Sequence[LiveBucket], readers: int) -> list[merge.Source]:
    """The sources, in their order."""
    read = functools.partial(bucket_merging.read_source, store)
    if readers == 1 or len(sources) == 1:
        return [read(live) for live in sources]
    with concurrent.futures.ThreadPoolExecutor(min(readers, len(sources))) as readers_pool:
        return list(readers_pool.map(read, sources))
