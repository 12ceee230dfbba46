"""Merges beside a `JournaledTopic`: as another process would make them, and as the owner takes them over.

Owns: planning from the manifest, committing later, and adopting later still, in one thread.
Does not own: which buckets are merged (the test says so) and what is right.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from daemon.core.index import merging as core_merging
from daemon.core.index.index import Index
from daemon.core.index.merging import MergedBucket
from daemon.core.index.position_keys import KeyedRows
from daemon.topic import bucket_reads
from storage_backends import bucket_merging, bucket_reading, topic_manifest
from storage_backends.formats.manifest import LiveBucket
from tests.daemon.core._support.journaled_topic import JournaledTopic

_names = itertools.count(1)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """A merge whose object is written. `sources`: the names of what it merges."""

    sources: tuple[str, ...]
    written: bucket_merging.WrittenMerge


def runs(topic: JournaledTopic, length: int) -> list[list[LiveBucket]]:
    """All runs of neighbours that the manifest allows."""
    order = topic_manifest.adjacent_order(topic.tip.live)
    starts = [order[start : start + length] for start in range(len(order) - length + 1)]
    return [run for run in starts if len({live.subscription_id for live in run}) == 1]


def plan(topic: JournaledTopic, run: list[LiveBucket]) -> Planned:
    """Everything but the commit, from the manifest as it is now."""
    planned = bucket_merging.MergePlan(topic.tip, tuple(run), f"buckets/merged-{next(_names):05}")
    sources = [bucket_merging.read_source(topic.store, live) for live in run]
    progress_of = functools.partial(bucket_reading.progress_of, topic.store)
    made = bucket_merging.merged(
        planned, sources, progress_of(topic.tip), limits=topic._segment_limits, compatible=topic._compatible
    )
    written = bucket_merging.write(topic.store, planned, sources, made, progress_of=progress_of, delete_after_ms=0)
    return Planned(tuple(live.object.name for live in run), written)


def commit(topic: JournaledTopic, planned: Planned) -> str | None:
    """None when it is committed, else why it is refused."""
    reason = planned.written.operation.precondition(topic.tip)
    if reason is None:
        topic.tip = planned.written.operation.apply(topic.tip)
    return reason


def adopt(topic: JournaledTopic, *, ahead_ms: int = 0) -> int:
    """The owner serves what the manifest has in place of merged buckets; how many."""
    adopted = 0
    for live in topic.tip.live:
        index = topic.core.indexes.get(live.subscription_id)
        if index is not None and not index.knows(live.object.name):
            _take_over(topic, index, live, ahead_ms)
            adopted += 1
    names = {live.object.name for live in topic.tip.live}
    for name, bucket in topic.core.indexes.sealed.items():
        if name not in names:
            assert not bucket.present_rows, f"{bucket.present_rows} rows of {name} are lost"
            topic.core.drop(name)
    return adopted


def _take_over(topic: JournaledTopic, index: Index, live: LiveBucket, ahead_ms: int) -> None:
    table, metadata = bucket_reads.open_bucket(topic.store, live)
    held = index.pages.intern_stored(metadata.positions)
    index.pages.hold(held)
    merged = MergedBucket.of(index.pages, live, table, metadata)
    boundary_ms = max(topic.now_ms, topic.core.indexes.passed_until_ms)
    needed = core_merging.segments_needed(
        merged.segments, index.sources_of(merged), boundary_ms=boundary_ms, ahead_ms=ahead_ms, ahead_max=2
    )
    loaded: dict[int, KeyedRows] = {}
    for number in needed:
        (rows,) = bucket_reads.read_segments(topic.store, merged.name, merged.segments[number : number + 1])
        loaded[number] = index.pages.keyed(rows)
    topic.core.adopt(merged, loaded, boundary_ms=boundary_ms)
    index.pages.release(held)
