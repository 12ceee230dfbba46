"""Says which sealed buckets an id map still needs while it is loaded beside service.

    to read -(next)-> being read -(has_read)-> read
                          └─(is_missing: its object is deleted)-> the bucket that took its place is to be read

Rows in memory are taken as they are when loading begins, so buckets sealed later need not be read. Merges go on, and
what a merge takes is deleted: a bucket that was not read yet is read as part of the merged one. Rows are then read
twice if other sources of the merge were read before, which `IdMap.read` allows.
"""

from __future__ import annotations

from collections.abc import Iterable

from daemon.errors import InvariantViolated


class IdMapLoading:
    """The sealed buckets of which the rows are not read yet, by name; at first those that have rows with ids."""

    def __init__(self, buckets: Iterable[str]) -> None:
        # The values mean nothing; the order is that in which they are read.
        self._to_read = dict.fromkeys(buckets)
        self._being_read: set[str] = set()
        self._read: set[str] = set()
        self._left: set[str] = set()
        # Bucket -> the merged one that took its place
        self._replaced_by: dict[str, str] = {}

    @property
    def is_done(self) -> bool:
        """True if all buckets are read."""
        return not self._to_read and not self._being_read

    def next(self) -> str | None:
        """Begin to read the next bucket; return None if there is none for now."""
        if not self._to_read:
            return None
        bucket = next(iter(self._to_read))
        del self._to_read[bucket]
        self._being_read.add(bucket)
        return bucket

    def has_read(self, bucket: str) -> None:
        """Note that all rows of a bucket are in the map. Raise InvariantViolated if it was not being read."""
        self._end_reading(bucket)
        self._read.add(bucket)

    def is_missing(self, bucket: str) -> None:
        """Note that a bucket's object is deleted: what took its place is read, if anything did.

        Raises InvariantViolated if it was not being read.
        """
        self._end_reading(bucket)
        while bucket in self._replaced_by:
            bucket = self._replaced_by[bucket]
        self._need(bucket)

    def replaced(self, sources: Iterable[str], by: str) -> None:
        """Note that a merged bucket has taken the place of others."""
        for source in sources:
            self._replaced_by[source] = by
            if source in self._to_read:
                del self._to_read[source]
                self._need(by)

    def left(self, bucket: str) -> None:
        """Note that a bucket was dropped or quarantined: none of its rows is there."""
        self._left.add(bucket)
        self._to_read.pop(bucket, None)

    def _need(self, bucket: str) -> None:
        if bucket not in self._being_read and bucket not in self._read and bucket not in self._left:
            self._to_read[bucket] = None

    def _end_reading(self, bucket: str) -> None:
        if bucket not in self._being_read:
            raise InvariantViolated(f"bucket {bucket} is not being read for an id map")
        self._being_read.remove(bucket)
