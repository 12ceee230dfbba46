"""An audit while daemons add, seal, merge, take over and collect: what moves on under its eyes is no finding.

Every write to the store is recorded while daemons live through a story. An audit is then run on the store as it was at
some point of the story, which goes on between the reads of the audit, at any pace.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from batch.audit.driver import Limits
from batch.audit.findings import Kind
from daemon import config
from daemon.core.decisions.add_decisions import AddBatch
from daemon.errors import QuotaExceeded
from daemon.owner.engine import Engine
from storage_backends.formats import names
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA
from tests._support import real_engine
from tests._support.engine_fixture import EPOCH_MS, Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests.batch.audit._support.audits import (
    BUCKETS,
    HOUR_MS,
    LIMITS,
    MANIFESTS,
    SMALL,
    audited,
    findings,
    in_virtual_time,
    keys,
    kinds,
    sealed,
)
from tests.daemon._support.calling import cancel, delete_topic, reschedule

Write = tuple[str, bytes | None, Mapping[str, str]]
"""Key, body (None: deleted), metadata."""

BUSY = (
    *SMALL,
    "bucket.max_num_buckets=3",
    "bucket.merge_buckets_max=3",
    "journal.checkpoint_slots=5",
    "collection.interval_s=0.5",
    "collection.orphan_interval_s=1.0",
    "collection.grace_s=0.0",
    "collection.orphan_age_s=0.0",
    "collection.manifests_kept=2",
)
# By the clock of the audit, every grace of the story is over.
LATER_MS = EPOCH_MS + 100 * HOUR_MS
PATIENT = dataclasses.replace(LIMITS, overdue_ms=1 << 50, orphan_age_ms=1 << 50)


class Recorded(MemoryStore):
    """A store that remembers every write."""

    def __init__(self) -> None:
        super().__init__(wall_clock=lambda: EPOCH_MS / 1000)
        self.writes: list[Write] = []

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        super().put(key, body, metadata=metadata)
        self.writes.append((key, body, dict(metadata)))

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        self.writes.append((key, body, dict(metadata)))

    def delete(self, key: str) -> None:
        super().delete(key)
        self.writes.append((key, None, NO_METADATA))


async def busy(machines: EngineFixture) -> None:
    """Adds, cancels, reschedules, hand-outs and acknowledgements; merges and collection; a crash; a deleted topic."""
    one = await machines.served_by("one", *BUSY)
    await work(one, first_ledger=1, ledgers=14)
    await delete_topic(one, "short")
    # The collector may delete old manifests, too.
    machines.step_ms += 48 * HOUR_MS
    await work(one, first_ledger=20, ledgers=8)
    one.kill()
    two = await machines.served_by("two", *BUSY)
    await work(two, first_ledger=40, ledgers=8)
    machines.step_ms += 48 * HOUR_MS
    await asyncio.sleep(10)
    await two.stop()


async def work(daemon: Daemon, *, first_ledger: int, ledgers: int) -> None:
    receiver = await daemon.receiver("t")
    for ledger in range(first_ledger, first_ledger + ledgers):
        await daemon.add("t", ledger, range(20), delay_ms=4_000 if ledger % 2 else HOUR_MS)
        await daemon.add("short", ledger, range(20), delay_ms=HOUR_MS)
        await asyncio.sleep(0.7)
        if ledger % 3 == 0:
            await cancel(daemon, ledger, range(0, 20, 3))
            await reschedule(daemon, ledger, range(1, 20, 3), 2 * HOUR_MS)
        rows, receiver.rows = receiver.rows, []
        if rows:
            await receiver.acknowledge(rows)
    await asyncio.sleep(3)


@pytest.fixture(scope="module")
def story() -> list[Write]:
    """Every write of it."""
    store = Recorded()
    in_virtual_time(store, busy)
    return store.writes


def apply(store: MemoryStore, write: Write) -> None:
    key, body, metadata = write
    if body is None:
        store.delete(key)
    else:
        store.put(key, body, metadata=metadata)


def store_at(story: list[Write], place: int) -> MemoryStore:
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)
    for write in story[:place]:
        apply(store, write)
    return store


def test_the_story_has_merges_collection_and_a_takeover(story: list[Write]) -> None:
    deleted = {key for key, body, _ in story if body is None}
    for part in ("/buckets/", JOURNAL, "/checkpoint/", "/topics/"):
        assert any(part in key for key in deleted), part
    assert any("/manifest/" in key for key in deleted)
    final = store_at(story, len(story))
    report = audited(final, limits=kept(2), now_ms=LATER_MS)
    assert findings(report) == []
    assert report.topics == 2


def kept(manifests: int) -> Limits:
    return dataclasses.replace(PATIENT, manifests_kept=manifests)


@pytest.mark.parametrize("seed", range(12))
def test_an_audit_of_a_root_at_rest_at_any_point_of_the_story_finds_nothing(story: list[Write], seed: int) -> None:
    place = random.Random(seed).randrange(20, len(story))
    report = audited(store_at(story, place), limits=kept(2), now_ms=LATER_MS)
    assert findings(report) == []


@pytest.mark.parametrize("seed", range(24))
def test_an_audit_under_which_the_story_goes_on_finds_nothing(story: list[Write], seed: int) -> None:
    draw = random.Random(seed)
    place, pace = draw.randrange(20, len(story)), draw.choice((0.05, 0.3, 1.0, 4.0))
    store, meanwhile = store_at(story, place), iter(story[place:])
    lock = threading.Lock()
    owed = 0.0

    def go_on(_: str) -> None:
        nonlocal owed
        with lock:
            owed += 2 * pace * draw.random()
            while owed >= 1:
                owed -= 1
                write = next(meanwhile, None)
                if write is not None:
                    apply(store, write)

    report = audited(store, limits=kept(2), now_ms=LATER_MS, before_read=go_on)
    assert findings(report) == []
    assert {kind for kind, _ in report.tally.kinds} <= {Kind.UNNAMED, Kind.ORPHAN, Kind.ROWS_UNACCOUNTED}


def between_phases(happens: Callable[[], None], *, at: int) -> Callable[[], None]:
    """Happens before the task with that number."""
    tasks = iter(range(1_000))

    def between() -> None:
        if next(tasks) == at:
            happens()

    return between


def test_buckets_that_were_merged_and_collected_meanwhile_have_moved_on(story: list[Write]) -> None:
    place = next(place for place, (key, body, _) in enumerate(story) if body is None and key.startswith(BUCKETS))
    # Everything up to the end happens when the manifests have been read, and the objects have not.
    before = next(place for place in range(place, 0, -1) if story[place][0].startswith(MANIFESTS)) - 6
    store = store_at(story, before)

    def happen() -> None:
        for write in story[before:]:
            apply(store, write)

    report = audited(store, limits=kept(2), now_ms=LATER_MS, between=between_phases(happen, at=1))
    assert findings(report) == []
    assert report.tally.moved_on > 3


def test_what_is_lost_meanwhile_is_missing_all_the_same(story: list[Write]) -> None:
    store = store_at(story, len(story))
    # Rows that are due much later are in live buckets at the end.
    lost = keys(store, BUCKETS)[-1]
    report = audited(
        store,
        limits=kept(2),
        now_ms=LATER_MS,
        between=between_phases(lambda: store.delete(lost), at=1),
    )
    assert kinds(report) == [(Kind.MISSING, lost)]


def test_a_topic_that_is_created_meanwhile_is_no_topic_without_manifest() -> None:
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)

    async def live(machines: EngineFixture) -> None:
        one = await machines.served_by("one", *SMALL)
        await one.add("t", 1, range(20), delay_ms=HOUR_MS)
        await one.until(lambda: sealed(one) == 1)
        one.kill()

    in_virtual_time(store, live)
    listed = [(key, *store.get_with_metadata(key)) for key in keys(store, MANIFESTS)]
    for key, _, _ in listed:
        store.delete(key)

    def create() -> None:
        for key, body, metadata in listed:
            store.put(key, body, metadata=metadata)

    assert findings(audited(store, between=between_phases(create, at=0))) == []
    assert names.topic_id("t") in MANIFESTS


async def test_an_audit_of_a_local_directory_that_a_daemon_serves_from_finds_nothing(tmp_path: Path) -> None:
    # Nothing is an orphan while somebody may be writing it still: on a busy machine that takes its time.
    changes = ("daemon.shards=1", "daemon.id=one", "daemon.address=one:1", "collection.orphan_age_s=3600")
    settings = config.load(environment={}, overrides=[*BUSY, *changes])
    audits = 0
    with LocalDirectory(tmp_path / "root") as served, LocalDirectory(tmp_path / "root") as read:
        async with real_engine.serving(settings, store=served) as engine:
            stop = asyncio.Event()
            traffic = asyncio.create_task(add_and_cancel(engine, stop))
            # Those that come before the traffic has written much count for nothing.
            while audits < 5 and not traffic.done():
                now_ms = time.time_ns() // 1_000_000
                report = await asyncio.to_thread(audited, read, now_ms=now_ms, limits=kept(2))
                audits += report.tally.objects.total() > 20
                assert findings(report) == []
            stop.set()
            await traffic
        report = audited(read, now_ms=time.time_ns() // 1_000_000, limits=kept(2))
        assert findings(report) == []
        assert report.tally.objects["bucket"] > 0


async def add_and_cancel(engine: Engine, stop: asyncio.Event) -> None:
    """As fast as it is answered: most rows leave at once, so that buckets are merged, dropped and collected."""
    for ledger in itertools.count(1):
        entries = np.arange(20, dtype=np.uint64)
        ledgers = np.full(20, ledger, np.uint64)
        due_ms = np.full(20, time.time_ns() // 1_000_000 + HOUR_MS, np.uint64)
        batch = AddBatch(
            ledger_id=ledgers,
            entry_id=entries,
            deliver_at_ms=due_ms,
            delay_ms=None,
            key_hash=None,
            return_already_due=False,
        )
        try:
            await engine.requests.add("t", batch, None)
        except QuotaExceeded as error:
            await asyncio.sleep((error.retry_after_ms or 0) / 1000)
            continue
        gone = slice(0, 20 if ledger % 2 else 7)
        await engine.requests.cancel("t", None, ledgers[gone], entries[gone])
        if stop.is_set() and ledger > 40:
            return
