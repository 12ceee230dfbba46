"""The real engine over a store in memory, with the machine's clocks: to test the edge with what is behind it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import time
from collections.abc import AsyncIterator

import ulid

from daemon import config, metrics
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.owner.engine import Engine
from daemon.runtime import pools
from daemon.runtime.clocks import SystemClock
from daemon.runtime.environment import Environment
from storage_backends import store_opening
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore


def _threads(name: str, count: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix=name)


@contextlib.asynccontextmanager
async def serving(
    settings: config.Config,
    *,
    store: ObjectStore | None = None,
    daemon_metrics: metrics.Metrics | None = None,
    ledger_stores: LedgerStores | None = None,
) -> AsyncIterator[Engine]:
    """An engine that serves; stopped in order at the end. `ledger_stores`: none by default."""
    kept = store if store is not None else MemoryStore()
    with (
        pools.opened(
            settings.store, deletions=settings.deletion.parallelism, threads=_threads, patient=_threads
        ) as threads,
    ):
        engine = Engine(
            Environment(
                config=settings,
                store=kept,
                locks=None,
                metrics=daemon_metrics if daemon_metrics is not None else metrics.Metrics(),
                clock=SystemClock(),
                pools=threads,
                sleep=asyncio.sleep,
                blocking_sleep=time.sleep,
                jitter=random.Random(1).random,
                new_id=lambda: str(ulid.ULID()),
                open_logs=lambda form: store_opening.open_logs(form, kept, threads.journal.parts),
                ledger_stores=ledger_stores if ledger_stores is not None else LedgerStores(),
            )
        )
        changed = asyncio.Event()
        engine.on_health_change(lambda _: changed.set())
        await engine.start()
        try:
            async with asyncio.timeout(300):
                while not engine.health.serving:
                    changed.clear()
                    await changed.wait()
            yield engine
        finally:
            await engine.stop()
