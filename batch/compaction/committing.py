"""Committing the merges of one topic.

Owns: that an object is what its writer said before a manifest names it, and the newest manifest that is known.
Does not own: the commit primitive (`storage_backends.commit`), whether a merge may follow the tip
(`storage_backends.topic_merge`), and what becomes of one that is refused (`job`).

What a worker says of its object is compared with the object; rows and hashes are compared by the operation with what
the manifest says of the sources. So a worker that was wrong is refused, whatever it wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from batch.engine.root import Root, TopicPlace
from storage_backends import bucket_reading, commit
from storage_backends.bucket_merging import WrittenMerge
from storage_backends.formats.manifest import LiveBucket, Progress, TopicManifest
from storage_backends.object_store import Damaged

Tip = commit.Tip[TopicManifest]

COMMIT_DEADLINE_S = 30.0
"""So long a commit is tried while the store fails."""


class TopicCommits:
    """The commits of one topic, one after the other. `writer`: who commits, for people who read the manifest.
    `progress_of`: as of `topic_merge.Merge`.
    """

    def __init__(
        self,
        root: Root,
        place: TopicPlace,
        tip: Tip,
        *,
        writer: str,
        progress_of: Callable[[TopicManifest], Progress],
    ) -> None:
        self._store = root.store
        self._progress_of = progress_of
        self._log = root.log(place)
        self._writer = writer
        self.tip = tip

    @property
    def manifest(self) -> TopicManifest:
        """The newest that is known."""
        return self.tip.manifest

    def look(self) -> None:
        """Reads the newest manifest. Raises Damaged and the store's errors."""
        found = self._log.read_tip(self.tip)
        if found is None:
            raise Damaged(self._log.prefix, "its manifests have disappeared")
        self.tip = found

    def verify(self, bucket: LiveBucket) -> None:
        """Raises Damaged or NotFound unless the object is there, as large as was said, its table and first entry whole
        and saying the same; and the store's errors.
        """
        size_bytes = self._store.head(bucket.object.name).size_bytes
        if size_bytes != bucket.object.size_bytes:
            raise Damaged(bucket.object.name, f"it has {size_bytes} bytes, but {bucket.object.size_bytes} were written")
        bucket_reading.open_bucket(self._store, bucket)

    def commit(self, written: WrittenMerge, *, now_ms: int, grace_ms: int) -> None:
        """The sources may be deleted when the grace is over. Raises what `storage_backends.commit.commit` raises, and
        FormatError when progress is damaged.
        """
        operation = dataclasses.replace(
            written.operation, progress_of=self._progress_of, delete_after_ms=now_ms + grace_ms
        )
        try:
            self.tip = commit.commit(
                self._log,
                operation,
                writer=self._writer,
                created_ms=now_ms,
                warm=self.tip,
                deadline_s=COMMIT_DEADLINE_S,
            )
        except commit.Refused as refused:
            if refused.tip is not None:
                self.tip = refused.tip
            raise
