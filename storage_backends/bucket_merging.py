"""Merges buckets on the store: reads the sources, writes their remaining rows as one object, plans its commit.

Everything is synchronous. A merge needs nothing from the owner's memory: the owner runs it, and so does any process
that reads manifests. A crash before the commit leaves an object that no manifest names. `formats.merge` merges the
rows, `topic_manifest.Merge` holds the operation's precondition, and the caller chooses the buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from storage_backends import bucket_reading, object_store, topic_manifest
from storage_backends.crash_points import crash_point
from storage_backends.formats import manifest, merge
from storage_backends.formats.manifest import Progress
from storage_backends.formats.segment import SegmentLimits


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MergePlan:
    """A planned merge of neighbouring live buckets of one index.

    `tip` is the manifest that it is planned from, which says which rows are gone. `key` names the object to write.
    """

    tip: manifest.TopicManifest
    sources: tuple[manifest.LiveBucket, ...]
    key: str

    @property
    def stored_bytes(self) -> int:
        """The size of the sources to read (bytes)."""
        return sum(live.object.size_bytes for live in self.sources)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WrittenMerge:
    """A merge whose object is written.

    `operation` commits it. `rows` and `size_bytes` describe the object; both are 0 if no row was left to write.
    """

    operation: topic_manifest.Merge
    rows: int
    size_bytes: int
    level: int


def read_source(store: object_store.ObjectStore, live: manifest.LiveBucket) -> merge.Source:
    """Read a whole source and check it. Raises Damaged, NotFound."""
    metadata, rows = bucket_reading.read_bucket(store, live)
    return merge.Source(live=live, metadata=metadata, rows=rows)


def merged(
    plan: MergePlan,
    sources: Sequence[merge.Source],
    progress: Progress,
    *,
    limits: SegmentLimits,
    compatible: bool,
) -> merge.Merged:
    """Merge the rows of the sources that the plan's manifest does not show as gone into one bucket.

    `progress` is the progress of that manifest. Raises what `formats.merge.merged` raises.
    """
    return merge.merged(
        sources,
        progress,
        topic=plan.tip.topic,
        subscription_id=plan.sources[0].subscription_id,
        limits=limits,
        compatible=compatible,
    )


def write(
    store: object_store.ObjectStore,
    plan: MergePlan,
    sources: Sequence[merge.Source],
    made: merge.Merged,
    *,
    progress_of: Callable[[manifest.TopicManifest], Progress],
    delete_after_ms: int,
) -> WrittenMerge:
    """Write the object if a row is left.

    May be repeated, since the object is the same. `progress_of` and `delete_after_ms` are those of
    `topic_manifest.Merge`.
    """
    encoded = made.encoded
    live = None
    if encoded is not None:
        crash_point("merge.before_bucket_put")
        store.put(plan.key, encoded.body)
        crash_point("merge.after_bucket_put")
        live = encoded.live_bucket(
            plan.key,
            base=plan.tip.head.number,
            subscription_id=plan.sources[0].subscription_id,
            level=made.level,
        )
    operation = topic_manifest.Merge(
        sources=tuple(
            topic_manifest.MergeSource(
                name=source.live.object.name,
                kept=source.metadata.kept,
                dropped=made.dropped[source.live.object.name],
            )
            for source in sources
        ),
        bucket=live,
        dropped_hash=made.dropped_hash,
        dropped_id_hash=made.dropped_id_hash,
        incarnation=plan.tip.incarnation,
        progress_of=progress_of,
        delete_after_ms=delete_after_ms,
    )
    rows, size_bytes = (0, 0) if live is None else (live.rows, live.object.size_bytes)
    return WrittenMerge(operation, rows=rows, size_bytes=size_bytes, level=made.level)
