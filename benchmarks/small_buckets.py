"""Makes a root with a topic of many small buckets, part of whose rows is gone.

A daemon that seals thousands of buckets one by one takes minutes. Therefore a daemon makes the topic and stops, and its
buckets are sealed here, with the operation that it would have used. `compaction` alone uses this module, which runs no
jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tarry
from batch.engine.root import Root
from benchmarks import load, workbench
from storage_backends import commit, topic_manifest
from storage_backends.formats import bucket_format, manifest, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import BucketProgress, LiveBucket, ObjectReference, Progress, TopicManifest
from storage_backends.formats.position_bitmap import PositionBitmap, position_bitmaps
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.local_directory import LocalDirectory

Mask = NDArray[np.bool_]

SUBSCRIPTION = "dispatcher"
# With this policy the daemon merges no buckets.
FILLED = tarry.TopicPolicy(max_num_buckets=-1)

_WRITER = "benchmark"
_DEADLINE_S = 60.0
_SEALED_AT_ONCE = 500


def write(bench: workbench.Workbench, root: Path, topic: str, rows: load.Rows, gone: Mask, *, each: int) -> None:
    """Write the rows in buckets of `each`, in their order; those of the mask are gone."""
    with bench.daemon(root) as daemon, tarry.Client(daemon.address) as client:
        client.create_subscription(topic, SUBSCRIPTION)
        client.set_policy(topic, FILLED)
        daemon.terminate()
    store = LocalDirectory(root)
    try:
        opened = Root.open(store)
        place = opened.place_of(topic)
        log, tip, shard = opened.log(place), opened.tip(place), opened.shard_tip(place.shard)
        if tip is None or shard is None:
            raise ValueError(f"the daemon left no topic {topic!r}")
        # The checkpoint's part of the topic no longer counts.
        checkpoint = shard.manifest.checkpoint
        slot = max(tip.manifest.applied, 0 if checkpoint is None else checkpoint.slot)
        progress: list[BucketProgress] = []
        sealed: list[LiveBucket] = []
        for number, (live, its_gone) in enumerate(_buckets(store, place.shard, tip.manifest, rows, gone, each)):
            sealed.append(live)
            progress.append(BucketProgress(bucket=live.object.name, gone=its_gone))
            if len(sealed) == _SEALED_AT_ONCE or (number + 1) * each >= len(rows):
                tip = _seal(log, tip, store, place.shard, tuple(sealed), Progress(buckets=tuple(progress)), slot)
                sealed.clear()
    finally:
        store.close()


def _buckets(
    store: LocalDirectory, shard: int, tip: TopicManifest, rows: load.Rows, gone: Mask, each: int
) -> Iterator[tuple[LiveBucket, tuple[PositionBitmap, ...]]]:
    """Write the buckets; yield each with the positions that are gone from it."""
    for number, first in enumerate(range(0, len(rows), each)):
        part = slice(first, first + each)
        columns = Rows(rows.deliver_at_ms[part], rows.ledger_id[part], rows.entry_id[part])
        encoded = bucket_format.encode_bucket(
            columns.sorted_by_due(), topic=tip.topic, subscription_id=0, limits=SegmentLimits(), compatible=False
        )
        key = names.bucket_key(shard, tip.topic_id, tip.head.number, f"{_WRITER}-{number:06}")
        store.put(key, encoded.body)
        left = gone[part]
        live = encoded.live_bucket(key, base=tip.head.number)
        yield live, position_bitmaps(columns.ledger_id[left], columns.entry_id[left])


def _seal(
    log: commit.ManifestLog[TopicManifest],
    tip: commit.Tip[TopicManifest],
    store: LocalDirectory,
    shard: int,
    buckets: tuple[LiveBucket, ...],
    progress: Progress,
    slot: int,
) -> commit.Tip[TopicManifest]:
    number = tip.manifest.head.number
    body = manifest.encode_progress(progress)
    key = names.progress_key(shard, tip.manifest.topic_id, number, _WRITER)
    store.put(key, body)
    written: ObjectReference = topic_manifest.reference_to(key, number, body)
    operation = topic_manifest.Seal(
        buckets=buckets,
        progress=None,
        progress_object=written,
        slot_from=tip.manifest.applied,
        slot_to=ShardSlot(slot),
        epoch=tip.manifest.owner_epoch,
        replaced_delete_after_ms=load.now_ms(),
    )
    return commit.commit(log, operation, writer=_WRITER, created_ms=load.now_ms(), warm=tip, deadline_s=_DEADLINE_S)
