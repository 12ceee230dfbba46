"""The tasks of a forecast: counting buckets that must be read.

Owns: reading what a count needs, and which failures are a task's result. Does not own: what it needs (`steps`), and
which buckets a task has (`forecast_job`).
"""

from __future__ import annotations

import dataclasses
import enum

from batch.engine.job_settings import Settings
from batch.engine.store_of import store_of
from batch.forecast.result import Effort
from batch.forecast.steps import BucketCount, Counts, Steps
from storage_backends import bucket_reading
from storage_backends.formats.format_errors import FormatError
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.position_bitmap import PositionSet
from storage_backends.object_store import Damaged, NotFound, ObjectStore


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A bucket to be counted. `topic`: the place of its topic in a list that the job keeps; `gone`: of its rows."""

    topic: int
    live: LiveBucket
    gone: PositionSet


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Task:
    settings: Settings
    steps: Steps
    parts: tuple[Part, ...]


class Failure(enum.Enum):
    """Why a bucket was not counted: it is not there (it may have been merged meanwhile), or cannot be read."""

    MISSING = 1
    DAMAGED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Uncounted:
    topic: int
    live: LiveBucket
    failure: Failure
    reason: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Result:
    """`counts`: (topic, index id, its rows in the buckets of this task)."""

    counts: tuple[tuple[int, int, Counts], ...]
    uncounted: tuple[Uncounted, ...]
    effort: Effort


def count(task: Task) -> Result:
    """Counts the buckets of a task. Raises the store's errors other than `NotFound` and `Damaged`."""
    store = store_of(task.settings)
    counts: dict[tuple[int, int], list[Counts]] = {}
    uncounted: list[Uncounted] = []
    effort = Effort()
    for part in task.parts:
        try:
            found, spent = count_bucket(store, task.steps, part.live, part.gone)
        except (NotFound, Damaged) as error:
            failure = Failure.MISSING if isinstance(error, NotFound) else Failure.DAMAGED
            uncounted.append(Uncounted(part.topic, part.live, failure, str(error)))
            continue
        counts.setdefault((part.topic, part.live.subscription_id), []).append(found)
        effort += spent
    merged = tuple((topic, index_id, Counts.merged(parts)) for (topic, index_id), parts in counts.items())
    return Result(merged, tuple(uncounted), effort)


def count_bucket(store: ObjectStore, steps: Steps, live: LiveBucket, gone: PositionSet) -> tuple[Counts, Effort]:
    """The rows of one bucket that are not gone. Raises Damaged, NotFound and the store's other errors."""
    table = bucket_reading.read_table(store, live)
    counting = BucketCount(steps, table.segments, gone)
    try:
        while run := counting.needed():
            counting.read(run, bucket_reading.read_segments(store, live.object.name, run))
    except FormatError as error:
        raise Damaged(live.object.name, str(error)) from error
    effort = Effort(buckets_opened=1, segments=len(table.segments), segments_read=counting.segments_read)
    return counting.counts(), effort
