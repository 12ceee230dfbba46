"""Small buckets with real rows, the merge of some of them, and what rows a manifest says are waiting.

Owns: a store's worth of bucket objects by name, and the making of merges from a manifest.
Does not own: orders and faults.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from storage_backends.formats import bucket_format, merge, position_bitmap
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import BucketProgress, LiveBucket, Progress, TopicManifest
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.topic_manifest import Merge, MergeSource, adjacent_order
from tests.storage_backends._support.topic_manifests import DELETE_AFTER_MS, TOPIC
from tests.storage_backends.formats._support import examples

LIMITS = SegmentLimits()

Waiting = tuple[int, int, int]
"""(index, entry id, due)."""


def rows_at(*entries: int, due_ms: int, ledger_id: int = 1) -> Rows:
    count = len(entries)
    return Rows(examples.column([due_ms] * count), examples.column([ledger_id] * count), examples.column([*entries]))


def gone(**entries: Sequence[int]) -> Progress:
    """By bucket the entries of ledger 1 that are gone."""
    return Progress(
        buckets=tuple(
            BucketProgress(
                bucket=name,
                gone=position_bitmap.position_bitmaps(examples.column([1] * len(some)), examples.column([*some])),
            )
            for name, some in entries.items()
        )
    )


def inline_progress(tip: TopicManifest) -> Progress:
    return tip.progress or Progress()


# The same few objects are read in thousands of orders.
_decoded = functools.lru_cache(maxsize=256)(bucket_format.decode_bucket)


@dataclasses.dataclass(slots=True)
class Buckets:
    """Bucket objects by name."""

    bodies: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def write(
        self, name: str, rows: Rows, *, base: int = 1, subscription_id: int = 0, kept: Sequence[KeptRows] = ()
    ) -> LiveBucket:
        encoded = bucket_format.encode_bucket(
            rows.sorted_by_due(),
            topic=TOPIC,
            subscription_id=subscription_id,
            limits=LIMITS,
            compatible=False,
            kept=kept,
        )
        return self.put(name, encoded, base=base, subscription_id=subscription_id)

    def put(self, name: str, encoded: bucket_format.EncodedBucket, *, base: int, subscription_id: int) -> LiveBucket:
        self.bodies[name] = encoded.body
        return encoded.live_bucket(name, base=base, subscription_id=subscription_id)

    def source(self, live: LiveBucket) -> merge.Source:
        return merge.Source(live, *_decoded(self.bodies[live.object.name]))

    def merge(self, tip: TopicManifest, names: Sequence[str], name: str) -> Merge:
        """The merge of these live buckets, planned from `tip`; the object is written under `name`."""
        sources = [self.source(live) for live in adjacent_order(tip.live) if live.object.name in names]
        index = sources[0].live.subscription_id
        made = merge.merged(
            sources, inline_progress(tip), topic=TOPIC, subscription_id=index, limits=LIMITS, compatible=False
        )
        written = None
        if made.encoded is not None:
            written = self.put(name, made.encoded, base=tip.head.number, subscription_id=index)
        return Merge(
            sources=tuple(
                MergeSource(name=source.name, kept=source.metadata.kept, dropped=made.dropped[source.name])
                for source in sources
            ),
            bucket=written,
            dropped_hash=made.dropped_hash,
            dropped_id_hash=made.dropped_id_hash,
            incarnation=tip.incarnation,
            progress_of=inline_progress,
            delete_after_ms=DELETE_AFTER_MS,
        )

    def waiting(self, tip: TopicManifest) -> list[Waiting]:
        """Every row of a live bucket that is not gone, ascending; a row that two buckets hold is there twice."""
        found = []
        for live in tip.live:
            source = self.source(live)
            left = merge.bits_of(source.name, source.metadata.kept, inline_progress(tip)).gone
            rows = source.rows.take(~left.mask_of(source.rows.ledger_id, source.rows.entry_id))
            found += [(live.subscription_id, entry, due) for due, _, entry, _ in examples.tuples(rows)]
        return sorted(found)
