"""Rows with times of their own in a real daemon on virtual time, and what it shows of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from daemon import call_values
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.core.index.containment import EntryRanges
from storage_backends.formats import names
from storage_backends.formats.manifest import TopicManifest, decode_topic_manifest
from tests._support.engine_fixture import Daemon, EngineFixture

Row = tuple[int, int, int]
"""ledger, entry, deliver_at_ms"""

BUCKETS = "/buckets/"
MANIFESTS = "/topics/"

NEVER_BY_SIZE = "bucket.rows_max=1000000"
"""A bucket is sealed when a higher ledger comes, as PIP-195 has it, and not by its size."""


def sealed_at(rows: int, *, rows_of_segment: int | None = None) -> tuple[str, ...]:
    """Settings: a bucket of so many rows is sealed when a higher ledger comes, and cut into segments of so many."""
    settings = (f"bucket.min_index_count_per_bucket={rows}", NEVER_BY_SIZE, "delivery.lookahead_ms=1000")
    if rows_of_segment is None:
        return settings
    return (
        *settings,
        f"bucket.max_indexes_per_bucket_snapshot_segment={rows_of_segment}",
        "bucket.min_indexes_per_bucket_snapshot_segment=0",
        "bucket.max_time_step_per_bucket_snapshot_segment_seconds=1000000",
    )


def add(
    daemon: Daemon, rows: Sequence[Row], *, topic: str = "t", return_already_due: bool = False
) -> asyncio.Task[AddOutcome]:
    """Adds rows in one request, in their order."""
    columns = [np.array([row[index] for row in rows], np.uint64) for index in range(3)]
    batch = AddBatch(
        ledger_id=columns[0],
        entry_id=columns[1],
        deliver_at_ms=columns[2],
        delay_ms=None,
        key_hash=None,
        return_already_due=return_already_due,
    )
    return daemon.call(daemon.engine.requests.add(topic, batch))


async def add_one_by_one(daemon: Daemon, rows: Sequence[Row], *, topic: str = "t") -> None:
    """Adds each row with a request of its own, as a dispatcher does that reads a topic."""
    for row in rows:
        outcome = await add(daemon, [row], topic=topic)
        assert outcome.accepted == 1


async def contained(daemon: Daemon, rows: Sequence[Row], *, topic: str = "t") -> set[tuple[int, int]]:
    """Which of the rows' positions the index has, pending or due."""
    ledger_id, entry_id = (np.array([row[index] for row in rows], np.uint64) for index in range(2))
    asked = EntryRanges(ledger_id, entry_id, entry_id)
    found = await daemon.call(daemon.engine.requests.contains(topic, asked, None))
    assert found.continuation is None
    return {
        (ledger, entry)
        for part in (found.pending, found.due)
        for ledger, first, last in zip(
            part.ledger_id.tolist(), part.first_entry_id.tolist(), part.last_entry_id.tolist(), strict=True
        )
        for entry in range(first, last + 1)
    }


async def sealed_buckets(daemon: Daemon, *, topic: str = "t") -> tuple[call_values.BucketSummary, ...]:
    """All of them, by their ledgers."""
    page = await daemon.call(daemon.engine.requests.list_buckets(topic, 1000, ""))
    assert page.next_after is None
    return page.buckets


async def until_sealed(daemon: Daemon, buckets: int, *, topic: str = "t") -> None:
    index = daemon.topic(topic).core.index
    await daemon.until(lambda: len(index.sealed) == buckets and not index.sealing)


def manifest_of(machines: EngineFixture, topic: str = "t") -> TopicManifest:
    """What the store says of the topic."""
    prefix = names.topic_manifest_prefix(0, names.topic_id(topic))
    return decode_topic_manifest(machines.store.get(machines.keys(prefix)[-1]))


def live_objects(machines: EngineFixture, topic: str = "t") -> list[str]:
    return sorted(live.object.name for live in manifest_of(machines, topic).live)


def counts(stats: call_values.TopicStats) -> tuple[int, int, int, int, int, int]:
    """Everything that is counted of a topic's index; all zero when nothing is left."""
    return (
        stats.pending,
        stats.mutable_rows,
        stats.buckets,
        stats.bucket_bytes,
        stats.loaded_rows,
        stats.next_due_ms,
    )


NOTHING = (0, 0, 0, 0, 0, 0)
