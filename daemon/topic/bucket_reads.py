"""Reading bucket objects, with the daemon's errors.

Owns: what damage of a bucket is to the daemon.
Does not own: which ranges are read, and that what is read is whole (`storage_backends.bucket_reading`).

Everything here is synchronous and runs in an executor. Damage raises Corruption with the object's key and the offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from daemon.errors import Corruption
from storage_backends import bucket_merging, bucket_reading, object_store
from storage_backends.formats import bucket_format, merge
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.row_columns import Rows


class BucketMissing(Corruption):
    """The object of a bucket is not there. A manifest that is older than the tip may name it rightly."""


def open_bucket(
    store: object_store.ObjectStore, live: LiveBucket
) -> tuple[bucket_format.BucketTable, bucket_format.BucketMetadata]:
    """The table of a live bucket and its entry 0: two ranged reads, one of a small bucket."""
    with _as_corruption():
        return bucket_reading.open_bucket(store, live)


def read_segments(
    store: object_store.ObjectStore, key: str, segments: Sequence[bucket_format.SegmentInfo]
) -> list[Rows]:
    """The rows of consecutive segments, with one ranged read."""
    with _as_corruption():
        return bucket_reading.read_segments(store, key, segments)


def read_bucket(store: object_store.ObjectStore, live: LiveBucket) -> tuple[bucket_format.BucketMetadata, Rows]:
    """Entry 0 and all rows in due order, with one read of the whole object."""
    with _as_corruption():
        return bucket_reading.read_bucket(store, live)


def read_source(store: object_store.ObjectStore, live: LiveBucket) -> merge.Source:
    """A source of a merge as a whole, every check of it made."""
    with _as_corruption():
        return bucket_merging.read_source(store, live)


@contextmanager
def _as_corruption() -> Iterator[None]:
    try:
        yield
    except object_store.Damaged as error:
        raise Corruption(f"bucket {error}") from error
    except object_store.NotFound as error:
        raise BucketMissing(f"bucket {error.key}: the object is missing") from error
