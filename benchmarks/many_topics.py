"""Makes, fills, seals and counts many small topics, many at once.

Their rows are due long after the measurement. `single_adds` adds single rows at a steady rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import tarry.aio
from benchmarks import load, shard_tips
from storage_backends import local_directory
from storage_backends.formats import names

SUBSCRIPTION = "dispatcher"
DUE_IN_MS = 30 * load.DAY_MS
# Calls in flight
AT_ONCE = 64
# Time for which a call is retried (seconds), while it waits for the store, or its topic is being loaded
PATIENCE_S = 600.0


def named(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def make(address: str, topics: Sequence[str], *, rows: int) -> None:
    """Make topics with one subscription and so many rows each."""

    async def make_one(client: tarry.aio.Client, topic: str) -> None:
        await client.create_subscription(topic, SUBSCRIPTION)
        await _add(client, topic, ledger_id=0, rows=rows)

    _each(address, topics, make_one)


def add(address: str, topics: Sequence[str], *, ledger_id: int, rows: int) -> None:
    """Add so many rows to each topic."""
    _each(address, topics, functools.partial(_add, ledger_id=ledger_id, rows=rows))


def seal(address: str, topics: Sequence[str]) -> None:
    """Seal the topics; return when each is sealed."""

    async def seal_one(client: tarry.aio.Client, topic: str) -> None:
        await client.seal(topic)

    _each(address, topics, seal_one)


def pending(address: str, topics: Sequence[str]) -> dict[str, int]:
    """Return the number of pending rows, by topic."""
    rows: dict[str, int] = {}

    async def count(client: tarry.aio.Client, topic: str) -> None:
        rows[topic] = (await client.stats(topic)).pending

    _each(address, topics, count)
    return rows


async def _add(client: tarry.aio.Client, topic: str, *, ledger_id: int, rows: int) -> None:
    await client.add(topic, ledger_id, list(range(rows)), deliver_at_ms=load.now_ms() + DUE_IN_MS)


def _each(address: str, topics: Sequence[str], call: Callable[[tarry.aio.Client, str], Awaitable[None]]) -> None:
    asyncio.run(_call_each(address, topics, call))


async def _call_each(
    address: str, topics: Sequence[str], call: Callable[[tarry.aio.Client, str], Awaitable[None]]
) -> None:
    left = iter(topics)
    async with tarry.aio.Client(address, timeout_s=PATIENCE_S) as client, asyncio.TaskGroup() as callers:

        async def call_one_by_one() -> None:
            for topic in left:
                await call(client, topic)

        for _ in range(AT_ONCE):
            callers.create_task(call_one_by_one())


# ---- stored topics


def sealed_at_ms(root: Path, topics: Sequence[str], *, from_ms: int) -> dict[str, int]:
    """Return when the newest bucket of a topic was written (ms), for topics with one written since `from_ms`."""
    with contextlib.closing(local_directory.LocalDirectory(root)) as store:
        shards = len(_shards(root))
        found = {}
        for topic in topics:
            prefix = names.buckets_prefix(names.shard_of(topic, shards), names.topic_id(topic))
            written_ms = [each.modified_ms for each in store.list(prefix) if each.modified_ms >= from_ms]
            if written_ms:
                found[topic] = max(written_ms)
        return found


def owned_shards(root: Path) -> list[int]:
    """Return the shards whose newest manifest names a log without an end; the others were given up."""
    with contextlib.closing(local_directory.LocalDirectory(root)) as store:
        living = shard_tips.living_logs(store)
        return [shard for shard in _shards(root) if _log_of(store, shard) in living]


def _shards(root: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (root / "shards").iterdir())


def _log_of(store: local_directory.LocalDirectory, shard: int) -> str:
    """Return the log of the shard's owner, or an empty text without one."""
    newest = shard_tips.newest(store, shard)
    return "" if newest is None or newest.open_range is None else newest.open_range.log_id
