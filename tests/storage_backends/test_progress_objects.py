"""Reading the progress of manifests that follow each other."""

from __future__ import annotations

import dataclasses

import pytest

from storage_backends import bucket_reading, object_store, topic_manifest
from storage_backends.formats import manifest
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import BucketProgress, Progress, TopicManifest
from storage_backends.memory_store import MemoryStore
from tests.storage_backends._support import topic_manifests


class CountingStore(MemoryStore):
    """Counts what is read whole."""

    reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return super().get(key)


def with_object(store: MemoryStore, name: str, bucket: str) -> tuple[TopicManifest, Progress]:
    """A manifest whose progress is an object of that name, and what it says."""
    said = Progress(buckets=(BucketProgress(bucket=bucket),))
    body = manifest.encode_progress(said)
    store.put(name, body)
    tip = topic_manifests.tip_with(progress=None, progress_object=topic_manifest.reference_to(name, 1, body))
    return tip, said


def test_an_object_is_read_once_for_manifests_that_follow_each_other() -> None:
    store = CountingStore()
    first, said = with_object(store, "progress/1", "a")
    progress = bucket_reading.LastProgress(store)
    assert progress.of(first) == said
    assert progress.of(dataclasses.replace(first, applied=ShardSlot(first.applied + 1))) == said
    assert store.reads == 1
    second, said_then = with_object(store, "progress/2", "b")
    assert progress.of(second) == said_then
    assert progress.of(first) == said
    assert store.reads == 3


def test_inline_progress_is_that_of_the_manifest_asked_for() -> None:
    store = CountingStore()
    with_one, said = with_object(store, "progress/1", "a")
    progress = bucket_reading.LastProgress(store)
    assert progress.of(with_one) == said
    inline = Progress(buckets=(BucketProgress(bucket="b"),))
    assert progress.of(dataclasses.replace(with_one, progress=inline, progress_object=None)) == inline
    assert progress.of(dataclasses.replace(with_one, progress=None, progress_object=None)) == Progress()
    assert store.reads == 1


def test_what_cannot_be_read_is_not_kept() -> None:
    store = CountingStore()
    tip, said = with_object(store, "progress/1", "a")
    body = store.get("progress/1")
    store.put("progress/1", body[:-1])
    progress = bucket_reading.LastProgress(store)
    with pytest.raises(object_store.Damaged):
        progress.of(tip)
    store.put("progress/1", body)
    assert progress.of(tip) == said
