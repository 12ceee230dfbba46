"""Reads bucket objects, their segments, and the progress of topic manifests.

Everything here is synchronous. Damage raises object_store.Damaged with the object's key and the offset, and a missing
object raises NotFound, each only after a second read has found the same, because the caller cannot undo what follows.
What only a newer release reads raises NewerObject, a Damaged after which nothing may be recorded as lost.
`LastProgress` caches the progress that consecutive manifests share. The formats are those of `formats.bucket_format`
and `formats.manifest`; `formats.merge` says what progress means for buckets merged since.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from storage_backends import object_store
from storage_backends.formats import bucket_format, format_errors, manifest, segment
from storage_backends.formats.manifest import LiveBucket, ObjectReference, Progress, TopicManifest
from storage_backends.formats.row_columns import Rows

log = logging.getLogger(__name__)

T = TypeVar("T")

# A bucket up to this size is read whole: another request costs more than so many bytes.
READ_WHOLE_BYTES = 64 * 1024


def open_bucket(
    store: object_store.ObjectStore, live: LiveBucket
) -> tuple[bucket_format.BucketTable, bucket_format.BucketMetadata]:
    """Read the table of a live bucket and its entry 0, with two ranged reads, or one if the bucket is small."""
    return _twice_damaged(lambda: _open(store, live))


def read_table(store: object_store.ObjectStore, live: LiveBucket) -> bucket_format.BucketTable:
    """Read only the table of a live bucket, with one ranged read.

    Its row count and due times agree with the manifest.
    """
    return _twice_damaged(lambda: _table(store, live))


def read_segments(
    store: object_store.ObjectStore, key: str, segments: Sequence[bucket_format.SegmentInfo]
) -> list[Rows]:
    """Read the rows of consecutive segments, with one ranged read."""
    return _twice_damaged(lambda: _read(store, key, segments))


def read_bucket(store: object_store.ObjectStore, live: LiveBucket) -> tuple[bucket_format.BucketMetadata, Rows]:
    """Read entry 0 and all rows in due order, with one read of the whole object."""
    return _twice_damaged(lambda: _whole(store, live))


def _twice_damaged(read: Callable[[], T]) -> T:
    try:
        return read()
    except (object_store.Damaged, object_store.NotFound) as error:
        log.warning("reading again: bucket %s", error)
        return read()


def _open(
    store: object_store.ObjectStore, live: LiveBucket
) -> tuple[bucket_format.BucketTable, bucket_format.BucketMetadata]:
    size_bytes = live.object.size_bytes
    with _naming(live.object.name):
        read = _reader(store, live)
        table = bucket_format.decode_tail(read(*bucket_format.tail_range(size_bytes, live.segments)), size_bytes)
        entry = read(table.metadata.offset, table.metadata.length)
        metadata = bucket_format.decode_metadata(entry, table.metadata)
        bucket_format.check_head(metadata, table, live)
        return table, metadata


def _reader(store: object_store.ObjectStore, live: LiveBucket) -> Callable[[int, int], bytes]:
    """Return a reader of ranges of a bucket, by offset and length. A small bucket is read with one request."""
    key, size_bytes = live.object.name, live.object.size_bytes
    if size_bytes > READ_WHOLE_BYTES:
        return functools.partial(store.get_range, key)
    whole = store.get_range(key, 0, size_bytes)
    return lambda offset, length: whole[offset : offset + length]


def _table(store: object_store.ObjectStore, live: LiveBucket) -> bucket_format.BucketTable:
    key = live.object.name
    with _naming(key):
        offset, length = bucket_format.tail_range(live.object.size_bytes, live.segments)
        table = bucket_format.decode_tail(store.get_range(key, offset, length), live.object.size_bytes)
        bucket_format.check_table(table, live)
        return table


def _read(store: object_store.ObjectStore, key: str, segments: Sequence[bucket_format.SegmentInfo]) -> list[Rows]:
    with _naming(key):
        start = segments[0].offset
        data = memoryview(store.get_range(key, start, segments[-1].offset + segments[-1].length - start))
        zstd = segment.decompressor()
        return [
            bucket_format.decode_segment(
                bytes(data[info.offset - start : info.offset - start + info.length]), info, zstd
            )
            for info in segments
        ]


def _whole(store: object_store.ObjectStore, live: LiveBucket) -> tuple[bucket_format.BucketMetadata, Rows]:
    with _naming(live.object.name):
        # A manifest names the object, so its existence needs no proof, for which a local directory would synchronise.
        body = store.get_range(live.object.name, 0, live.object.size_bytes)
        manifest.check_bytes(live.object, body, "bucket")
        return bucket_format.decode_bucket(body)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except format_errors.FormatError as error:
        raise object_store.unreadable(key, error) from error


def progress_of(store: object_store.ObjectStore, tip: TopicManifest) -> Progress:
    """Read the progress as of the manifest's `applied`, inline or from its object.

    Raises Damaged, the store's errors, and NotFound if a newer manifest has replaced the object or the object is lost.
    """
    if tip.progress_object is None:
        return tip.progress or Progress()
    key = tip.progress_object.name
    body = store.get(key)
    try:
        manifest.check_bytes(tip.progress_object, body, "progress")
        return manifest.decode_progress(body)
    except format_errors.FormatError as error:
        raise object_store.unreadable(key, error) from error


class LastProgress:
    """A reader of the progress of one manifest after another, which keeps the last object read.

    Most manifests name the same progress object as their predecessor. Thread-safe.
    """

    def __init__(self, store: object_store.ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._last: tuple[ObjectReference, Progress] | None = None

    def of(self, tip: TopicManifest) -> Progress:
        """Return the progress as of the manifest's `applied`, without reading the previous manifest's object again.

        Raises what `progress_of` raises.
        """
        reference = tip.progress_object
        if reference is None:
            return progress_of(self._store, tip)
        with self._lock:
            if self._last is None or self._last[0] != reference:
                self._last = reference, progress_of(self._store, tip)
            return self._last[1]
