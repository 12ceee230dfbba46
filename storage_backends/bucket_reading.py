"""Reading bucket objects: what a bucket holds, and its segments.

Owns: which ranges are read, and that what is read is whole.
Does not own: the format (`formats.bucket_format`), and what is kept in memory.

Everything here is synchronous. Damage raises object_store.Damaged with the object's key and the offset, a missing
object NotFound: when two reads, one after the other, have found it. What follows from it cannot be undone.

Reading the progress of a topic manifest, wherever that has it.

Owns: that what is read is whole, and keeping it for manifests that follow each other and have the same.
Does not own: its form (`formats.manifest`), and what it says of a bucket that was merged since (`formats.merge`).
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

# A bucket that is no larger is read as a whole: a request costs more than so many bytes.
READ_WHOLE_BYTES = 64 * 1024


def open_bucket(
    store: object_store.ObjectStore, live: LiveBucket
) -> tuple[bucket_format.BucketTable, bucket_format.BucketMetadata]:
    """The table of a live bucket and its entry 0: two ranged reads, one of a small bucket."""
    return _twice_damaged(lambda: _open(store, live))


def read_table(store: object_store.ObjectStore, live: LiveBucket) -> bucket_format.BucketTable:
    """The table of a live bucket alone: one ranged read. It has as many rows, due when the manifest says."""
    return _twice_damaged(lambda: _table(store, live))


def read_segments(
    store: object_store.ObjectStore, key: str, segments: Sequence[bucket_format.SegmentInfo]
) -> list[Rows]:
    """The rows of consecutive segments, with one ranged read."""
    return _twice_damaged(lambda: _read(store, key, segments))


def read_bucket(store: object_store.ObjectStore, live: LiveBucket) -> tuple[bucket_format.BucketMetadata, Rows]:
    """Entry 0 and all rows in due order, with one read of the whole object."""
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
    """Reads ranges of a bucket, by offset and length; of a small one all come with one request."""
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
        # A manifest names it: that it exists need not be concluded, which a local directory would synchronise for.
        body = store.get_range(live.object.name, 0, live.object.size_bytes)
        manifest.check_bytes(live.object, body, "bucket")
        return bucket_format.decode_bucket(body)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except format_errors.FormatError as error:
        raise object_store.Damaged(key, str(error)) from error


def progress_of(store: object_store.ObjectStore, tip: TopicManifest) -> Progress:
    """The progress as of the manifest's `applied`, inline or from its object.

    Raises Damaged, NotFound when a newer manifest has taken its place or the object is lost, and the store's errors.
    """
    if tip.progress_object is None:
        return tip.progress or Progress()
    key = tip.progress_object.name
    body = store.get(key)
    try:
        manifest.check_bytes(tip.progress_object, body, "progress")
        return manifest.decode_progress(body)
    except format_errors.FormatError as error:
        raise object_store.Damaged(key, str(error)) from error


class LastProgress:
    """Reads the progress of manifests one after the other: most of them have that of the one before, in the same
    object, which is kept. Thread-safe.
    """

    def __init__(self, store: object_store.ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._last: tuple[ObjectReference, Progress] | None = None

    def of(self, tip: TopicManifest) -> Progress:
        """Returns the progress as of the manifest's `applied`; an object that the manifest before named is not read
        again. Raises as `progress_of`.
        """
        reference = tip.progress_object
        if reference is None:
            return progress_of(self._store, tip)
        with self._lock:
            if self._last is None or self._last[0] != reference:
                self._last = reference, progress_of(self._store, tip)
            return self._last[1]
