"""Provides the threads of a daemon: a pool for each kind of work that waits for the store.

Kinds do not block each other. Code that is given a pool's `run` uses that pool. A late slot or epoch check would stop
the whole shard, deliveries and health with it. So these have threads of their own, and never queue behind loads, seals,
merges or collection.

`CountedStore` reports failures of an object store.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    Bucket,
    ListedObject,
    NotFound,
    ObjectInfo,
    ObjectStore,
    StoreError,
)
from storage_backends.storage_settings import Store

T = TypeVar("T")

NewThreads = Callable[[str, int], contextlib.AbstractContextManager[concurrent.futures.Executor]]
"""Creates threads, given their name and number."""


@dataclasses.dataclass(frozen=True)
class Pool:
    """The threads of one kind of work: `threads` run work, and `parts` run parts of one piece of it side by side.

    So no thread waits for a thread of its own executor.
    """

    threads: concurrent.futures.Executor
    parts: concurrent.futures.Executor

    def run(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Run work that may block in a thread."""
        return asyncio.get_running_loop().run_in_executor(self.threads, work)

    def run_part(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Run work that is a part of something larger."""
        return asyncio.get_running_loop().run_in_executor(self.parts, work)


@dataclasses.dataclass(frozen=True)
class Pools:
    """The pools of a daemon.

    `calls` is for what calls and streams wait for, creation of topics, checkpoints and takeovers of shards. `journal`
    is for slots, checks of the end of the log and heartbeats. `loads` reads topics of a shard that was taken over.
    `seals` writes and commits buckets. `merges` is one thread of low priority. `collection` deletes objects and slots.
    `deletions` attempts to delete ledgers, each for as long as its store takes.
    """

    calls: Pool
    journal: Pool
    loads: Pool
    seals: Pool
    merges: Pool
    collection: Pool
    deletions: Pool

    @classmethod
    def of_one(cls, pool: Pool) -> Pools:
        """Use one pool for all kinds, if nothing runs side by side."""
        return cls(*(pool for _ in dataclasses.fields(cls)))


@contextlib.contextmanager
def opened(store: Store, *, deletions: int, threads: NewThreads, patient: NewThreads) -> Iterator[Pools]:
    """Open the pools that the settings ask for. `patient` threads give way to others on a busy machine."""
    with contextlib.ExitStack() as stack:

        def pool(name: str, count: int, *, new: NewThreads = threads) -> Pool:
            return Pool(stack.enter_context(new(name, count)), stack.enter_context(new(f"{name}-parts", count)))

        yield Pools(
            calls=pool("store", store.io_threads),
            journal=pool("journal", store.journal_threads),
            loads=pool("loads", store.load_threads),
            seals=pool("seals", store.seal_threads),
            merges=pool("merging", 1, new=patient),
            collection=pool("collection", store.collection_threads),
            deletions=pool("deleting", deletions, new=patient),
        )


class CountedStore(ObjectStore):
    """A store that calls `failed(operation, error_class)` on errors other than NotFound and AlreadyExists."""

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

    @property
    def bucket(self) -> Bucket | None:
        return self._inner.bucket

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

    @property
    def requests_sent(self) -> Mapping[str, int]:
        return self._inner.requests_sent

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
