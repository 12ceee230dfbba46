"""The table of a bucket, read alone."""

from __future__ import annotations

import numpy as np
import pytest

from storage_backends import bucket_reading, object_store
from storage_backends.formats import bucket_format
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.memory_store import MemoryStore

KEY = "shards/00/topics/t/buckets/1"


def encoded(first_ms: int) -> bucket_format.EncodedBucket:
    number = np.arange(100, dtype=np.uint64)
    rows = Rows(number + np.uint64(first_ms), number, number)
    limits = SegmentLimits(time_step_ms=1_000, rows_max=10, rows_min=1)
    return bucket_format.encode_bucket(rows, topic="t", subscription_id=0, limits=limits, compatible=False)


class CountingStore(MemoryStore):
    """Counts ranged reads."""

    ranges = 0

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.ranges += 1
        return super().get_range(key, offset, length)


def stored(first_ms: int) -> tuple[CountingStore, LiveBucket]:
    store, body = CountingStore(), encoded(first_ms)
    store.put(KEY, body.body)
    return store, body.live_bucket(KEY, base=1)


def test_the_table_alone_takes_one_read() -> None:
    store, live = stored(1_000)
    table = bucket_reading.read_table(store, live)
    assert table == encoded(1_000).table
    assert store.ranges == 1


def test_the_table_of_a_bucket_that_is_due_at_other_times_is_damage() -> None:
    store, _ = stored(1_000)
    _, live = stored(1_001)
    with pytest.raises(object_store.Damaged, match="rows and the range of deliver_at_ms are"):
        bucket_reading.read_table(store, live)
    assert store.ranges == 2
