"""Loading segments: which reads are under way, and putting what was read where it is wanted.

Owns: reads of one topic's segments, each at most once at a time, and trying again when the store fails.
Does not own: which segments are wanted (`daemon.core.indexes`, `daemon.core.backlog_reader`) and the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from daemon.core.positions import KeyedRows, PageTable
from daemon.core.segments import SegmentRange
from daemon.core.topic import Topic
from daemon.durability import backoff, bucket_objects
from daemon.engine.environment import Environment
from daemon.errors import Corruption
from storage_backends.formats.bucket import SegmentInfo
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

# Reads of one topic at a time.
READS_MAX = 8


class SegmentLoader:
    """`loaded` is called on the loop each time segments have come into memory, `damaged` with a bucket and what was
    found when its object is damaged or missing.
    """

    def __init__(
        self,
        topic: Topic,
        environment: Environment,
        loaded: Callable[[], None],
        damaged: Callable[[str, str], None],
    ) -> None:
        self._topic = topic
        self._environment = environment
        self._loaded = loaded
        self._damaged = damaged
        self._reads: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(READS_MAX)
        self._closed = False

    def start(self, wanted: Iterable[SegmentRange]) -> list[asyncio.Task[None]]:
        """Reads segments that are not being read; the tasks to wait for until all of them are in memory."""
        if self._closed:
            return []
        tasks = []
        for segments in wanted:
            numbers = range(segments.first, segments.last + 1)
            under_way = {self._reads.get((segments.bucket, number)) for number in numbers}
            tasks += [task for task in under_way if task is not None]
            missing = [number for number in numbers if (segments.bucket, number) not in self._reads]
            if missing:
                # What lies between is read again rather than with a request of its own.
                task = asyncio.ensure_future(self._read(SegmentRange(segments.bucket, missing[0], missing[-1])))
                for number in missing:
                    self._reads[segments.bucket, number] = task
                tasks.append(task)
        return tasks

    def reads(self, bucket: str, number: int) -> bool:
        """Whether the segment is being read."""
        return (bucket, number) in self._reads

    def close(self) -> None:
        self._closed = True
        for task in set(self._reads.values()):
            task.cancel()

    async def _read(self, segments: SegmentRange) -> None:
        try:
            async with self._slots:
                rows = await self._read_until_there(segments)
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
        environment = self._environment
        for delay_s in backoff.delays_s(environment.jitter):
            bucket = self._topic.indexes.bucket(segments.bucket)
            if bucket is None:
                return []
            pages = self._topic.indexes.pages_of_bucket(segments.bucket)
            infos = bucket.table.infos[segments.first : segments.last + 1]
            started_s = environment.clock.elapsed_s()
            try:
                rows = await environment.run(lambda infos=infos, pages=pages: self._rows(segments.bucket, infos, pages))  # type: ignore[misc]
            except StoreError as error:
                environment.metrics.bucket_operation(
                    "load", "failed", seconds=environment.clock.elapsed_s() - started_s
                )
                log.warning("segments of bucket %s cannot be read, trying again: %s", segments.bucket, error)
                await environment.sleep(delay_s)
                continue
            environment.metrics.bucket_operation("load", "succeed", seconds=environment.clock.elapsed_s() - started_s)
            return rows
        return []

    def _rows(self, bucket: str, infos: Sequence[SegmentInfo], pages: PageTable) -> list[KeyedRows]:
        rows = bucket_objects.read_segments(self._environment.store, bucket, infos)
        return [pages.keyed(each) for each in rows]
