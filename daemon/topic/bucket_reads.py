"""Reads bucket objects and loads the segments of a topic, with the daemon's errors.

The functions are synchronous and run in an executor. Damage raises Corruption with the object's key and the offset, and
what only a newer release reads raises NewerData, after which no bucket may be quarantined.
`storage_backends.bucket_reading` determines the ranges and checks what was read.

`SegmentLoader` reads each segment at most once at a time, tries again when the store fails, and distinguishes a bucket
that was merged away from a damaged one. The indexes and backlog readers of `daemon.core` say which segments they want.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.segments import SegmentRange
from daemon.errors import Corruption
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import NewerData
from storage_backends import bucket_merging, bucket_reading, object_store
from storage_backends.formats import bucket_format, merge
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.row_columns import Rows
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)


class BucketMissing(Corruption):
    """The object of a bucket is missing. An older manifest than the tip may legitimately name it."""


def open_bucket(
    store: object_store.ObjectStore, live: LiveBucket
) -> tuple[bucket_format.BucketTable, bucket_format.BucketMetadata]:
    """Read the table of a live bucket and its entry 0, with two ranged reads, or one if the bucket is small."""
    with _as_corruption():
        return bucket_reading.open_bucket(store, live)


def read_segments(
    store: object_store.ObjectStore, key: str, segments: Sequence[bucket_format.SegmentInfo]
) -> list[Rows]:
    """Read the rows of consecutive segments, with one ranged read."""
    with _as_corruption():
        return bucket_reading.read_segments(store, key, segments)


def read_bucket(store: object_store.ObjectStore, live: LiveBucket) -> tuple[bucket_format.BucketMetadata, Rows]:
    """Read entry 0 and all rows in due order, with one read of the whole object."""
    with _as_corruption():
        return bucket_reading.read_bucket(store, live)


def read_source(store: object_store.ObjectStore, live: LiveBucket) -> merge.Source:
    """Return a whole source of a merge, after every check of it."""
    with _as_corruption():
        return bucket_merging.read_source(store, live)


@contextmanager
def _as_corruption() -> Iterator[None]:
    try:
        yield
    except object_store.NewerObject as error:
        raise NewerData(f"bucket {error}") from error
    except object_store.Damaged as error:
        raise Corruption(f"bucket {error}") from error
    except object_store.NotFound as error:
        raise BucketMissing(f"bucket {error.key}: the object is missing") from error


# Concurrent reads of one topic
READS_MAX = 8


class SegmentLoader:
    """The reads of one topic's segments.

    `loaded` is called on the loop whenever segments have been loaded, and `failed` with unforeseen errors. If an object
    is damaged or missing, `damaged` is called with the bucket and its damage. `is_live` returns whether the newest
    manifest names a missing bucket, and retries until the store answers. If the manifest does not, the bucket that
    replaced it is served when `is_live` returns.
    """

    def __init__(
        self,
        topic: TopicState,
        environment: Environment,
        loaded: Callable[[], None],
        damaged: Callable[[str, str], None],
        is_live: Callable[[str], Awaitable[bool]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._topic = topic
        self._environment = environment
        self._loaded = loaded
        self._damaged = damaged
        self._is_live = is_live
        self._failed = failed
        self._reads: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(READS_MAX)
        self._closed = False

    def start(self, wanted: Iterable[SegmentRange]) -> list[asyncio.Task[None]]:
        """Read segments that are not being read; return the tasks to wait for until all of them are in memory."""
        if self._closed:
            return []
        tasks = []
        for segments in wanted:
            numbers = range(segments.first, segments.last + 1)
            under_way = {self._reads.get((segments.bucket, number)) for number in numbers}
            tasks += [task for task in under_way if task is not None]
            missing = [number for number in numbers if (segments.bucket, number) not in self._reads]
            if missing:
                # One request reads the whole range, including segments in between that are being read.
                task = asyncio.ensure_future(self._read(SegmentRange(segments.bucket, missing[0], missing[-1])))
                for number in missing:
                    self._reads[segments.bucket, number] = task
                task.add_done_callback(self._ended)
                tasks.append(task)
        return tasks

    def reads(self, bucket: str, number: int) -> bool:
        """Return whether the segment is being read."""
        return (bucket, number) in self._reads

    def close(self) -> None:
        self._closed = True
        for task in set(self._reads.values()):
            task.cancel()

    def _ended(self, read: asyncio.Task[None]) -> None:
        if not read.cancelled() and (error := read.exception()) is not None:
            self._failed(error)

    async def _read(self, segments: SegmentRange) -> None:
        try:
            rows = await self._read_until_there(segments)
        except NewerData:
            raise
        except Corruption as error:
            self._damaged(segments.bucket, str(error))
        else:
            for offset, each in enumerate(rows):
                self._topic.indexes.load(segments.bucket, segments.first + offset, each)
        finally:
            for number in range(segments.first, segments.last + 1):
                self._reads.pop((segments.bucket, number), None)
        self._loaded()

    async def _read_until_there(self, segments: SegmentRange) -> list[KeyedRows]:
        """Return the rows of each segment, or none if the bucket is no longer served."""
        environment = self._environment
        try:
            return await backoff.until_answered(
                lambda: self._read_once(segments),
                failed=lambda error: environment.waits_for_store(
                    "segments cannot be read", f"bucket {segments.bucket}", error
                ),
                waiting=environment,
            )
        except BucketMissing as error:
            if await self._is_live(segments.bucket):
                raise
            environment.metrics.read_merged_away()
            log.info("reading the bucket that replaced a merged one: %s", error)
            return []

    async def _read_once(self, segments: SegmentRange) -> list[KeyedRows]:
        index = self._topic.indexes.holding(segments.bucket)
        if index is None:
            return []
        environment, pages = self._environment, index.pages
        infos = index.sealed[segments.bucket].table.infos[segments.first : segments.last + 1]

        def read() -> list[KeyedRows]:
            return [pages.keyed(each) for each in read_segments(environment.store, segments.bucket, infos)]

        async with self._slots:
            started_s = environment.clock.elapsed_s()
            try:
                rows = await environment.run(read)
            except StoreError:
                self._count("failed", started_s)
                raise
            self._count("succeed", started_s)
        return rows

    def _count(self, state: Literal["succeed", "failed"], started_s: float) -> None:
        seconds = self._environment.clock.elapsed_s() - started_s
        self._environment.metrics.bucket_operation("load", state, seconds=seconds)
