"""No slot and no look at the epoch waits behind loads, seals or collection: with real threads, and a store that lets
everything wait but what belongs to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from daemon import config
from daemon.core.decisions.add_decisions import AddBatch
from daemon.errors import Unavailable
from daemon.owner.engine import Engine
from daemon.runtime import pools
from storage_backends.formats import names
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA, ListedObject
from tests._support import real_engine

SHARDS = 2
TOPICS = 24
# Nobody waits so long in a test that passes.
LIMIT_S = 600.0
# What waits for the store that is held does not end; what does not wait ends in a fraction of it, or this is not seen.
FOUND_S = 0.5
FAR_MS = 2_000_000_000_000
ADDED_TO = "added-to"
NOT_HELD = re.compile(
    rf"FORMAT|daemons/|logs/|shards/\d+/((manifest|checkpoint)/|topics/($|{names.topic_id(ADDED_TO)}/))"
)

SETTINGS = [
    f"daemon.shards={SHARDS}",
    "daemon.id=one",
    "store.io_threads=4",
    "store.load_threads=2",
    "store.seal_threads=2",
    "store.collection_threads=1",
    "journal.commit_linger_ms=0",
]


class HeldStore(MemoryStore):
    """While it is held, every call waits that is none of the log, of manifests of shards or of the topic that is added
    to. `waits`: is released by each that begins to. While `listed` is not set, the topics are not listed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)
        self.listed = threading.Event()
        self.listed.set()
        self._free = threading.Event()
        self._free.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def _wait(self, key: str) -> None:
        if self._free.is_set() or NOT_HELD.match(key):
            return
        self.waits.release()
        if not self._free.wait(LIMIT_S):
            raise TimeoutError(key)

    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        self._wait(key)
        super().put(key, body, metadata=metadata)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        self._wait(key)
        return super().get_with_metadata(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        self._wait(prefix)
        if prefix.endswith("/topics/") and not self.listed.wait(LIMIT_S):
            raise TimeoutError(prefix)
        return super().list(prefix, start_after=start_after)


def settings() -> config.Config:
    return config.load(None, environment={}, overrides=SETTINGS)


def topics() -> list[str]:
    return [f"t{number}" for number in range(TOPICS)]


async def add(engine: Engine, topic: str, entry: int) -> None:
    batch = AddBatch(
        ledger_id=np.array([1], np.uint64),
        entry_id=np.array([entry], np.uint64),
        deliver_at_ms=np.array([FAR_MS], np.uint64),
        delay_ms=None,
        key_hash=None,
        return_already_due=False,
    )
    await engine.requests.add(topic, batch)


async def loads(engine: Engine) -> None:
    """The topics are being loaded from the start."""
    while not engine.loaded:
        await asyncio.gather(*(shard.loading.ended.wait() for shard in engine.shards.values()))


async def seals(engine: Engine) -> None:
    await asyncio.gather(*map(engine.requests.seal, topics()))


async def collection(engine: Engine) -> None:
    async for _ in engine.requests.collect(dry_run=False, force=False, retry_dead=False):
        pass


Work = Callable[[Engine], Awaitable[None]]
THREADS: dict[Work, int] = {loads: 2, seals: 2, collection: 1}


@contextlib.asynccontextmanager
async def busy(work: Work, store: HeldStore | None = None, *, listed: bool = True) -> AsyncIterator[Engine]:
    """An engine whose threads for the work all wait for the store until the end. Unless `listed`, the topics are not
    listed before the caller sets that of the store.
    """
    store = store or HeldStore()
    async with real_engine.serving(settings(), store=store) as engine:
        for topic in topics():
            await add(engine, topic, 1)
    with contextlib.ExitStack() as held:
        if work is loads:
            held.enter_context(store.held())
        if not listed:
            store.listed.clear()
        async with real_engine.serving(settings(), store=store) as engine:
            if work is not loads:
                await loads(engine)
                for topic in topics():
                    await add(engine, topic, 2)
                held.enter_context(store.held())
            working = asyncio.ensure_future(work(engine))
            try:
                for _ in range(THREADS[work]):
                    assert await asyncio.to_thread(store.waits.acquire, timeout=LIMIT_S)
                yield engine
            finally:
                store.listed.set()
                held.close()
                await working


async def add_patiently(engine: Engine, entry: int) -> None:
    """The topic may have to be born, when it is known which topics there are."""
    while True:
        try:
            return await add(engine, ADDED_TO, entry)
        except Unavailable:
            continue


@pytest.mark.parametrize("work", THREADS)
async def test_no_slot_and_no_look_at_the_epoch_waits_behind(work: Work) -> None:
    async with busy(work) as engine, asyncio.timeout(LIMIT_S):
        for entry in range(5):
            await add_patiently(engine, entry)
        for shard in engine.shards.values():
            await shard.slots.confirmed()


async def test_an_add_that_comes_before_the_topics_are_listed_does_not_wait_behind_loads() -> None:
    """Once they are: what is not among them does not exist, and has nothing to be loaded."""
    store = HeldStore()
    async with busy(loads, store, listed=False) as engine, asyncio.timeout(LIMIT_S):
        adding = asyncio.ensure_future(add_patiently(engine, 1))
        _, waiting = await asyncio.wait([adding], timeout=FOUND_S)
        assert waiting == {adding}
        store.listed.set()
        await adding


@pytest.mark.parametrize("work", THREADS)
async def test_a_journal_in_the_threads_of_other_work_is_found(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = pools.opened

    @contextlib.contextmanager
    def shared(*args: Any, **kwargs: Any) -> Iterator[pools.Pools]:
        with opened(*args, **kwargs) as made:
            yield dataclasses.replace(made, journal=getattr(made, work.__name__))

    monkeypatch.setattr(pools, "opened", shared)
    async with busy(work) as engine:
        adding = asyncio.ensure_future(add_patiently(engine, 1))
        _, waiting = await asyncio.wait([adding], timeout=FOUND_S)
        assert waiting == {adding}
        adding.cancel()
