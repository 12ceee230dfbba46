"""Does one run of a compaction in a worker: reads the sources, and writes their remaining rows as one object.

A worker knows only as much of the topic's manifest as concerns the sources. It may do a run twice, or die in the
middle: each attempt writes an object of its own, and one that no process commits is an orphan, which the daemon's
collection removes. `job` commits.
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
"""Sources that a worker reads at once from a store behind a network"""


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MergeTask:
    """A run for a worker.

    `tip` is the manifest that it is planned from, without the parts that do not concern the sources; its live buckets
    are the sources.
    """

    settings: Settings
    shard: int
    tip: TopicManifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The process that did a run."""

    host: str
    pid: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WrittenRun:
    """A run whose object is written.

    `read_s`, `merge_s` and `write_s` are the times that it took (seconds).
    """

    written: bucket_merging.WrittenMerge
    worker: Worker
    read_s: float
    merge_s: float
    write_s: float


class Failure(enum.Enum):
    """The reason for a run without an object.

    `DAMAGED` means that the named source, or the progress, is damaged; `MISSING`, that it does not exist, perhaps
    because the manifest no longer names it; `INCONSISTENT`, that each source is whole and together they contradict the
    manifest; `UNAVAILABLE`, that the store failed.
    """

    DAMAGED = "damaged"
    MISSING = "missing"
    INCONSISTENT = "inconsistent"
    UNAVAILABLE = "unavailable"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run without an object, or without one to rely on. `key` is the object concerned, empty for the run itself."""

    failure: Failure
    key: str
    reason: str
    worker: Worker


def task_of(settings: Settings, shard: int, tip: TopicManifest, run: Run) -> MergeTask:
    """Return the task of a run; `tip` names all its sources as live."""
    head = dataclasses.replace(tip.head, lineage=())
    excerpt = dataclasses.replace(
        tip, head=head, live=run.sources, tombstones=(), progress=_cut(tip, run), subscriptions=()
    )
    return MergeTask(settings=settings, shard=shard, tip=excerpt)


def _cut(tip: TopicManifest, run: Run) -> Progress | None:
    """Return the part of the manifest's inline progress that a worker needs, or None if it is not inline.

    It covers the sources, and dropped buckets, which may have been merged into one of them.
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
    """Do nothing: a worker that has done so is running, and has imported the modules for a run."""
    return number


def merge_run(task: MergeTask) -> WrittenRun | FailedRun:
    """Do one run. All expected failures are in the result."""
    worker = Worker(host=socket.gethostname(), pid=os.getpid())
    try:
        store = store_of(task.settings)
    except StoreError as error:
        # Also if this machine has no such directory
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
    """Do one run. Raises the store's errors, and what `bucket_merging.merged` raises."""
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
        # The committer sets both: it has the newest manifest.
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
    """Return the progress of a manifest, from the store of this process; the last one is kept for its next task."""
    return _last_progress(settings).of(tip)


@functools.lru_cache(maxsize=1)
def _last_progress(settings: Settings) -> LastProgress:
    return LastProgress(store_of(settings))


def _read(store: ObjectStore, sources: Sequence[LiveBucket], readers: int) -> list[merge.Source]:
    """Read the sources, in their order."""
    read = functools.partial(bucket_merging.read_source, store)
    if readers == 1 or len(sources) == 1:
        return [read(live) for live in sources]
    with concurrent.futures.ThreadPoolExecutor(min(readers, len(sources))) as readers_pool:
        return list(readers_pool.map(read, sources))
