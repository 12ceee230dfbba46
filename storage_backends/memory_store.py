"""Stores objects in memory, linearizable by one lock: for tests and for daemons that may forget.

Nothing outlives the process. It lists in descending order of keys, so that code which relies on ascending order fails
its tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    Damaged,
    ListedObject,
    NotFound,
    ObjectInfo,
    ObjectStore,
    check_key,
    check_metadata,
    check_prefix,
    check_range,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    body: bytes
    metadata: Mapping[str, str]
    modified_ms: int


class MemoryStore(ObjectStore):
    """The objects of one process.

    `close` keeps them: the next owner in the same process opens the same store. `wall_clock` returns the store's Unix
    time (seconds).
    """

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Stored] = {}

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        check_key(key)
        check_metadata(metadata)
        stored = self._stored(body, metadata)
        with self._lock:
            self._objects[key] = stored

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        check_key(key)
        check_metadata(metadata)
        stored = self._stored(body, metadata)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(key, "exists")
            self._objects[key] = stored

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        check_key(key)
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            raise NotFound(key, "no such object")
        return stored.body, stored.metadata

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(offset, length)
        body = self.get(key)
        if offset + length > len(body):
            raise Damaged(key, f"the body has {len(body)} bytes, too few for {length} from {offset}")
        return body[offset : offset + length]

    def head(self, key: str) -> ObjectInfo:
        body, metadata = self.get_with_metadata(key)
        return ObjectInfo(key, len(body), metadata)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        check_prefix(prefix)
        with self._lock:
            found = [
                ListedObject(key, len(stored.body), stored.modified_ms)
                for key, stored in self._objects.items()
                if key.startswith(prefix) and (start_after is None or key > start_after)
            ]
        found.sort(key=lambda listed: listed.key, reverse=True)
        return iter(found)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""

    def _stored(self, body: bytes, metadata: Mapping[str, str]) -> _Stored:
        return _Stored(bytes(body), MappingProxyType(dict(metadata)), int(self._wall_clock() * 1000))
