"""An object store whose failed requests are counted.

Owns: which errors count as failures of the store.
Does not own: the metric (`daemon.metrics`) and what follows from a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    ListedObject,
    NotFound,
    ObjectInfo,
    ObjectStore,
    StoreError,
)


class CountedStore(ObjectStore):
    """`failed` hears of the operation and the error's class. A missing object, or one that is there, is none."""

    def __init__(self, inner: ObjectStore, failed: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._failed = failed

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        with self._counting("put"):
            self._inner.put(key, body, metadata=metadata)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        with self._counting("put_if_absent"):
            self._inner.put_if_absent(key, body, metadata=metadata)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        with self._counting("get"):
            return self._inner.get_with_metadata(key)

    def get_run(self, keys: Sequence[str]) -> list[bytes]:
        with self._counting("get"):
            return self._inner.get_run(keys)

    @property
    def reads_are_requests(self) -> bool:
        return self._inner.reads_are_requests

    @property
    def folder(self) -> str | None:
        return self._inner.folder

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._counting("get_range"):
            return self._inner.get_range(key, offset, length)

    def head(self, key: str) -> ObjectInfo:
        with self._counting("head"):
            return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        with self._counting("list"):
            yield from self._inner.list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        with self._counting("delete"):
            self._inner.delete(key)

    def clock_skew_s(self) -> float | None:
        return self._inner.clock_skew_s()

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _counting(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (NotFound, AlreadyExists):
            raise
        except StoreError as error:
            self._failed(operation, type(error).__name__)
            raise
