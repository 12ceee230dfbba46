"""What tests of the audit use: a root that a real daemon has written, stores that may only be read, and an engine in
this process.

Owns: making the root, and running the audit on it. Does not own: damaging it (the tests).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from batch.audit import driver as audit
from batch.audit.driver import Limits, Request
from batch.audit.findings import Finding, Kind, Report, Severity
from batch.audit.reading import WallClock
from daemon.topic import bucket_lifecycle
from storage_backends.formats import log_slot_format, manifest, names, slot_format
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA, ListedObject, ObjectInfo, ObjectStore
from tests._support.engine_fixture import EPOCH_MS, Daemon, EngineFixture
from tests._support.virtual_loop import VirtualLoop
from tests.daemon._support.calling import NO_POLICY, cancel, reschedule

T = TypeVar("T")
R = TypeVar("R")

HOUR_MS = 3_600_000
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "bucket.max_num_buckets=-1")
LIMITS = Limits(manifests_kept=1000, orphan_age_ms=24 * HOUR_MS, overdue_ms=12 * HOUR_MS)
TOPIC_ID = names.topic_id("t")
BUCKETS = names.buckets_prefix(0, TOPIC_ID)
MANIFESTS = names.topic_manifest_prefix(0, TOPIC_ID)
SHARD_MANIFESTS = names.shard_manifest_prefix(0)
LOGS = names.LOGS_PREFIX
CHECKPOINTS = names.checkpoint_prefix(0)


class InProcess:
    """`engine.Engine` in this process, one task after the other. `between` is called before each task."""

    name = "local"
    parallelism = 2

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self._between = between

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        for place, task in enumerate(tasks):
            self._between()
            yield place, work(task)
            done(place + 1)


class Writes(AssertionError):
    """An audit wrote."""


class ReadOnly(ObjectStore):
    """A store that may only be read. `before_read` is called with the key before each read of an object."""

    def __init__(self, store: ObjectStore, before_read: Callable[[str], None] = lambda key: None) -> None:
        self._store = store
        self._before_read = before_read

    @property
    def folder(self) -> str | None:
        return self._store.folder

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> NoReturn:
        raise Writes(f"put {key}")

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> NoReturn:
        raise Writes(f"put_if_absent {key}")

    def delete(self, key: str) -> NoReturn:
        raise Writes(f"delete {key}")

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        self._before_read(key)
        return self._store.get_with_metadata(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._before_read(key)
        return self._store.get_range(key, offset, length)

    def head(self, key: str) -> ObjectInfo:
        return self._store.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        return self._store.list(prefix, start_after=start_after)

    def close(self) -> None:
        pass


def audited(
    store: ObjectStore,
    *,
    now_ms: int = EPOCH_MS + 10 * HOUR_MS,
    limits: Limits = LIMITS,
    topics: tuple[str, ...] = (),
    sample: float = 1.0,
    before_read: Callable[[str], None] = lambda key: None,
    between: Callable[[], None] = lambda: None,
) -> Report:
    """The report on a store, which is only read."""
    reading = ReadOnly(store, before_read)
    request = Request(
        store="memory",
        limits=limits,
        clock=WallClock(now_ms - time.time_ns() // 1_000_000),
        topics=topics,
        sample=sample,
    )
    with InProcess(between) as engine:
        return audit.audit(reading, engine, request, open_store=lambda: reading)


def findings(report: Report, *, without: frozenset[Severity] = frozenset({Severity.INFO})) -> list[Finding]:
    """The findings that matter."""
    return [found for found in report.in_order() if found.severity not in without]


def kinds(report: Report) -> list[tuple[Kind, str]]:
    """Kind and object of the findings that matter."""
    return [(found.kind, found.object) for found in findings(report)]


def sound_root() -> MemoryStore:
    """A root that two daemons have written, one after the other: topic `t` with buckets, merged and not, rows that
    left, tombstones, a progress object and properties; topic `other` with rows in sections and checkpoint; checkpoints,
    a CLOSE; topic `gone`, deleted. One bucket was written when its daemon was killed, and no manifest names it.
    """
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)
    with unittest.mock.patch.object(bucket_lifecycle, "INLINE_PROGRESS_BYTES", 0):
        in_virtual_time(store, _live_through)
    return store


def copy_of(store: MemoryStore) -> MemoryStore:
    """A store with the same objects."""
    copy = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)
    for entry in store.list(""):
        body, metadata = store.get_with_metadata(entry.key)
        copy.put(entry.key, body, metadata=metadata)
    return copy


def keys(store: ObjectStore, prefix: str) -> list[str]:
    """The keys beneath it, in order."""
    return sorted(entry.key for entry in store.list(prefix))


def topic_tip(store: ObjectStore, topic_id: str = TOPIC_ID) -> TopicManifest:
    """The newest manifest of a topic."""
    return manifest.decode_topic_manifest(store.get(keys(store, names.topic_manifest_prefix(0, topic_id))[-1]))


def shard_tip(store: ObjectStore) -> ShardManifest:
    """The newest manifest of the shard."""
    return manifest.decode_shard_manifest(store.get(keys(store, SHARD_MANIFESTS)[-1]))


def sections_of(store: ObjectStore) -> Iterator[slot_format.StoredSlot]:
    """Every section of the shard that is still kept, log by log."""
    for key in keys(store, LOGS):
        slot = log_slot_format.decode_log_slot(store.get(key))
        if 0 in slot.shards:
            yield slot_format.read_slot(slot.section(0))


def without_sections(store: ObjectStore) -> None:
    """The newest manifest of the shard says that its checkpoint is all there is."""
    key = keys(store, SHARD_MANIFESTS)[-1]
    tip = dataclasses.replace(shard_tip(store), owner="", address="", ranges=())
    store.put(key, manifest.encode_shard_manifest(tip), metadata=store.head(key).metadata)


def in_virtual_time(store: ObjectStore, story: Callable[[EngineFixture], object]) -> None:
    """Runs a story of daemons on the store."""

    async def told() -> None:
        fixture = EngineFixture(store, settings=SMALL)
        try:
            await story(fixture)  # type: ignore[misc]
        finally:
            await fixture.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(told())


async def _live_through(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "bucket.max_num_buckets=4", "bucket.merge_buckets_max=3")
    receiver = await one.receiver("t")
    for ledger in range(1, 12):
        await one.add("t", ledger, range(20), delay_ms=50_000 + 1_000 * ledger)
        await one.add("other", ledger, range(3), delay_ms=HOUR_MS)
        await asyncio.sleep(2)
    await one.add("gone", 1, range(25), delay_ms=HOUR_MS)
    await cancel(one, 9, range(0, 20, 2))
    await reschedule(one, 10, range(5), 2 * HOUR_MS)
    for team in ("money", "gates"):
        changing = one.engine.requests.update_subscription("t", "s", NO_POLICY, (("team", team),))
        await one.call(changing)
    rows = await receiver.received(40)
    await receiver.acknowledge(rows[:30])
    await one.call(one.engine.requests.delete_topic("gone"))
    await asyncio.sleep(5)
    await one.stop()
    two = await machines.served_by("two", "journal.checkpoint_slots=4")
    for ledger in range(20, 28):
        await two.add("t", ledger, range(20), delay_ms=HOUR_MS)
    await two.add("other", 40, range(6), delay_ms=HOUR_MS)
    await two.until(lambda: sealed(two) >= 10)
    for entry in range(12):
        await two.add("other", 41, [entry], delay_ms=HOUR_MS)
        await asyncio.sleep(1)
    held = two.pause("put_if_absent", MANIFESTS)
    await two.add("t", 30, range(20), delay_ms=HOUR_MS)
    await held.reached()
    await two.add("t", 31, range(7), delay_ms=HOUR_MS)
    two.kill()


def sealed(daemon: Daemon, topic: str = "t") -> int:
    return len(daemon.topic(topic).core.index.sealed)
