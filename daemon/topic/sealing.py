"""Sealing: the rows of mutable buckets become immutable objects, and the topic's manifest names them.

Owns: what is stored for a seal: a bucket object for each index that has rows, and the progress as of its slot.
Does not own: when to seal and what serves the rows meanwhile (the engine, `daemon.core.index.index`), the manifest's
operations (`storage_backends.topic_manifest`).

A seal cuts all indexes of a topic at one slot boundary; everything here is O(n) and runs in an executor, while the rows
are served from memory. A crash before the manifest leaves objects that no manifest names; the rows are in journal or
checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from daemon.core.decisions.redelivery_cut import RedeliveryCut
from daemon.core.index.index import BucketBits
from daemon.core.index.mutable_bucket import MutableRows
from daemon.core.index.positions import KeyedRows
from daemon.topic import stored_progress
from storage_backends import object_store
from storage_backends.crash_points import crash_point
from storage_backends.formats import bucket_format, index_ids, manifest
from storage_backends.formats.segment import SegmentLimits
from storage_backends.formats.shard_slot import ShardSlot


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SealCut:
    """The mutable bucket of the index `index_id` (`index_ids`) as of `slot`.

    `key`: the object that the bucket will be; `base`: the manifest number that it was started from.
    """

    topic: str
    key: str
    base: int
    slot: ShardSlot
    rows: MutableRows
    index_id: int = index_ids.SHARED


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WrittenBucket:
    """The object of a cut. `rows`: what it holds, in due order."""

    live: manifest.LiveBucket
    table: bucket_format.BucketTable
    rows: KeyedRows


def write_bucket(
    store: object_store.ObjectStore, cut: SealCut, *, limits: SegmentLimits, compatible: bool
) -> WrittenBucket | None:
    """Puts the bucket object; None when no row is left. May be repeated: the object is the same."""
    kept = cut.rows.kept()
    if not len(kept):
        return None
    rows = kept.take(kept.rows.due_order())
    encoded = bucket_format.encode_bucket(
        rows.rows, topic=cut.topic, subscription_id=cut.index_id, limits=limits, compatible=compatible
    )
    crash_point("seal.before_bucket_put")
    store.put(cut.key, encoded.body)
    crash_point("seal.after_bucket_put")
    live = encoded.live_bucket(cut.key, base=cut.base, subscription_id=cut.index_id)
    return WrittenBucket(live, encoded.table, rows)


def progress_of(cuts: Sequence[SealCut], bits: Iterable[BucketBits], redelivery: RedeliveryCut) -> manifest.Progress:
    """Everything of a topic that is not rows, as of the cuts of one seal. `bits`: of the buckets of all indexes that
    were sealed or being sealed before; what was acknowledged of the rows that are being sealed is in the cuts.
    """
    own = (BucketBits(cut.key, (), cut.rows.acknowledged) for cut in cuts)
    return stored_progress.of_topic(cuts[0].rows.pages, (*bits, *own), redelivery)
