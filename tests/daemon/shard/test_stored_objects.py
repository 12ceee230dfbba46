"""What is read under a name is what the manifest named, or damage: whole objects of others are not taken for it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import numpy as np
import pytest

from daemon.errors import Corruption
from daemon.shard import recovery
from daemon.topic import bucket_reads
from storage_backends import commit, topic_manifest
from storage_backends.formats import bucket_format, manifest, position_bitmap
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.memory_store import MemoryStore

BUCKET, PROGRESS = "buckets/b", "progress/p"


@pytest.fixture
def reads() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield executor


def encoded(ledger_id: int) -> bucket_format.EncodedBucket:
    """Ten rows; buckets of different ledgers have the same layout."""
    rows = Rows(np.arange(10, dtype=np.uint64), np.full(10, ledger_id, np.uint64), np.arange(10, dtype=np.uint64), None)
    limits = SegmentLimits(time_step_ms=3, rows_max=5, rows_min=0)
    return bucket_format.encode_bucket(rows, topic="orders", subscription_id=0, limits=limits, compatible=False)


def progress_of(entry_id: int) -> bytes:
    positions = position_bitmap.position_bitmaps(np.array([1], np.uint64), np.array([entry_id], np.uint64))
    return manifest.encode_progress(
        manifest.Progress(buckets=(manifest.BucketProgress(bucket=BUCKET, gone=positions),))
    )


def tip_of(named: bucket_format.EncodedBucket) -> manifest.TopicManifest:
    live = named.live_bucket(BUCKET, base=1)
    return manifest.TopicManifest(
        head=commit.NO_HEAD,
        topic="orders",
        topic_id="id",
        incarnation=1,
        owner_epoch=1,
        applied=ShardSlot(1),
        live=(live,),
        progress_object=topic_manifest.reference_to(PROGRESS, 1, progress_of(1)),
    )


def with_objects(stored: bucket_format.EncodedBucket, progress: bytes) -> MemoryStore:
    store = MemoryStore()
    store.put(BUCKET, stored.body)
    store.put(PROGRESS, progress)
    return store


def test_the_objects_that_the_manifest_names_are_read(reads: concurrent.futures.Executor) -> None:
    store = with_objects(encoded(7), progress_of(1))
    objects = recovery.TopicReads(store, reads).objects(tip_of(encoded(7)), None)
    assert objects.buckets[BUCKET].head is not None
    assert objects.progress == manifest.decode_progress(progress_of(1))


def test_another_bucket_under_the_name_is_damage_though_its_layout_is_the_same() -> None:
    other = encoded(8)
    store = with_objects(other, progress_of(1))
    tip = tip_of(encoded(7))
    assert len(other.body) == tip.live[0].object.size_bytes
    with pytest.raises(
        Corruption, match=rf"bucket {BUCKET}: bucket metadata is damaged at byte 16: subscription, rows"
    ):
        bucket_reads.open_bucket(store, tip.live[0])


def test_a_segment_of_another_bucket_is_damage() -> None:
    table = encoded(7).table
    store = with_objects(encoded(8), progress_of(1))
    with pytest.raises(Corruption, match=rf"bucket {BUCKET}: bucket segment 1 is damaged at byte \d+"):
        bucket_reads.read_segments(store, BUCKET, table.segments[:1])


def test_another_progress_under_the_name_is_damage(reads: concurrent.futures.Executor) -> None:
    store = with_objects(encoded(7), progress_of(2))
    with pytest.raises(Corruption, match=rf"progress {PROGRESS}: progress is damaged at byte 0: SHA-256"):
        recovery.TopicReads(store, reads).objects(tip_of(encoded(7)), None)
