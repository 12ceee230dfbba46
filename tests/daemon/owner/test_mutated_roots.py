"""A root of which one object was mutated: it is named, it costs its own topic or shard alone, and nothing is lost in
silence or comes early.

Each story begins with a copy of the golden root, which has one of each thing that is stored, and which daemons of
today have served since.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from daemon import call_values
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.errors import Corruption, TarryError
from daemon.owner import engine, heartbeat
from storage_backends import crash_points, object_store
from storage_backends.formats import names
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from tests._support.engine_fixture import EPOCH_MS, Daemon, EngineFixture
from tests.golden_root import make, mutations
from tests.golden_root.mutations import DELETE, FORGE, LOG_SLOT, TRUNCATE, Mutation

PAGE = 10_000
Content = dict[str, Any]
SETTINGS = ("limits.delay_max_ms=9007199254740992", "collection.interval_s=60", "bucket.max_num_buckets=-1")
SETTLED_S = 3 * engine.DAMAGED_LOOK_S
# In each run; all others in the long tests
OFTEN = {
    ("shard manifest", FORGE),
    ("shard manifest", DELETE),
    ("topic manifest", FORGE),
    ("topic manifest", DELETE),
    ("checkpoint", FORGE),
    ("checkpoint", TRUNCATE),
    ("bucket", DELETE),
    ("progress", FORGE),
    (LOG_SLOT, FORGE),
    (LOG_SLOT, TRUNCATE),
    ("heartbeat", FORGE),
}


Stored = dict[str, tuple[bytes, dict[str, str]]]


def golden() -> Stored:
    """The golden root whose logs are objects, without the bucket that is damaged in it."""
    with tempfile.TemporaryDirectory() as folder:
        return stored(LocalDirectory(make.unpack("objects", Path(folder) / "root")))


def stored(store: ObjectStore) -> Stored:
    found = {}
    for each in store.list(""):
        with contextlib.suppress(object_store.Damaged):
            body, metadata = store.get_with_metadata(each.key)
            found[each.key] = body, dict(metadata)
    return found


def store_of(objects: Stored) -> MemoryStore:
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)
    for key, (body, metadata) in objects.items():
        store.put(key, body, metadata=metadata)
    return store


async def lived_on(store: MemoryStore) -> None:
    """Two daemons of today add to each topic, one after the other; the last one seals some, and is killed."""
    machines = EngineFixture(store, settings=SETTINGS)
    # No id is given twice in a root.
    machines.numbers = itertools.count(100_000)
    for ledger in (900, 901):
        daemon = await machines.daemon(make.LAST_DAEMON).start()
        await settled(daemon)
        page = await daemon.call(daemon.engine.requests.list_topics(1000, ""))
        for number, each in enumerate(page.topics):
            with contextlib.suppress(TarryError):
                await daemon.add(each.topic, ledger, range(3), delay_ms=10**12)
                if number % 2:
                    await daemon.call(daemon.engine.requests.seal(each.topic))
        await asyncio.sleep(2 * heartbeat.INTERVAL_S)
        if ledger == 900:
            await daemon.stop()
    await machines.close()


async def content_of(daemon: Daemon, topic: str) -> Content:
    """What is served of a topic: the rows that are not due, and those that each subscription is owed."""
    ask = daemon.engine.requests
    scheduled = await daemon.call(ask.list_scheduled(topic, call_values.View(), PAGE, None))
    stats = await daemon.call(ask.topic_stats(topic))
    found: Content = {"scheduled": rows_of(scheduled.rows), "rebuild": len(stats.rebuild_needed)}
    for each in stats.subscriptions:
        name = each.subscription
        backlog = await daemon.call(ask.list_backlog(topic, name, None, PAGE, None))
        dead = await daemon.call(ask.list_dead_letters(topic, name, DeadLetterFilter(), PAGE, 0))
        found[name] = rows_of(backlog.rows), rows_of(dead.rows)
    return found


def rows_of(rows: Any) -> list[tuple[int, ...]]:
    columns = (rows.ledger_id, rows.entry_id, rows.deliver_at_ms)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


async def settled(daemon: Daemon) -> None:
    """It has had the time to claim, to load, to look at damage again, and to collect garbage."""
    await asyncio.wait([daemon.engine.failed], timeout=SETTLED_S)


async def all_content(daemon: Daemon, topics: list[str]) -> dict[str, Content | TarryError]:
    found: dict[str, Content | TarryError] = {}
    for topic in topics:
        try:
            found[topic] = await content_of(daemon, topic)
        except TarryError as error:
            found[topic] = error
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """The root that each story begins with, and what is served of its topics."""

    objects: Stored
    served: dict[str, Content]


_BASES: list[Base] = []


async def base() -> Base:
    if not _BASES:
        store = store_of(golden())
        await lived_on(store)
        objects = stored(store)
        machines = EngineFixture(store, settings=SETTINGS)
        daemon = await machines.daemon(make.LAST_DAEMON).start()
        await settled(daemon)
        page = await daemon.call(daemon.engine.requests.list_topics(1000, ""))
        _BASES.append(Base(objects, {each.topic: await content_of(daemon, each.topic) for each in page.topics}))
        await machines.close()
    return _BASES[0]


async def story(how: str, kind: str, seed: int, caplog: Any) -> tuple[Mutation | None, list[str]]:
    """Mutate, serve, compare; what is wrong with what came of it."""
    served = (await base()).served
    store, draw = store_of((await base()).objects), random.Random(f"{how} {kind} {seed}")
    mutation = mutations.mutate(store, draw, kind, how)
    if mutation is None:
        return None, []
    caplog.clear()
    machines = EngineFixture(store, settings=SETTINGS)
    wrong: list[str] = []
    with crash_points.intercepted(machines.crash_point):
        daemon = await machines.daemon(make.LAST_DAEMON).start()
        await settled(daemon)
        if daemon.engine.failed.done():
            return mutation, [f"the process ended: {daemon.engine.failed.exception()!r}"]
        found = await all_content(daemon, list(served))
        text = f"{caplog.text}\n{daemon.engine.health.reason}"
        for topic, content in found.items():
            if content == served[topic]:
                continue
            shard, topic_id = names.shard_of(topic, make.SHARDS), names.topic_id(topic)
            what = repr(content)[:300] if isinstance(content, TarryError) else "content differs"
            if mutation.topic_id not in (None, topic_id) or mutation.shard not in (None, shard):
                wrong.append(f"{topic} of shard {shard} is disturbed: {what}")
            elif isinstance(content, TarryError):
                # If the end of a log is unknown, all of its shards are refused, and perhaps no other is left.
                if not isinstance(content, Corruption) and mutation.kind != LOG_SLOT:
                    wrong.append(f"{topic}: no damage is told: {what}")
                if mutation.key not in text and mutation.key.rpartition("/")[0] not in text:
                    wrong.append(f"{topic}: the object is not named: {what}")
            elif content["rebuild"] == served[topic]["rebuild"] and how != FORGE:
                wrong.append(f"{topic}: lost in silence")
        tracebacks = [each for each in caplog.records if each.exc_info]
        wrong += [f"traceback: {each.getMessage()[:200]} {each.exc_info[1]!r:.300}" for each in tracebacks]
        await machines.close()
    return mutation, wrong


def some(times: int) -> list[tuple[str, str, int]]:
    return [(kind, how, seed) for kind in mutations.KINDS for how in mutations.HOW for seed in range(times)]


async def holds(kind: str, how: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    mutation, wrong = await story(how, kind, seed, caplog)
    if mutation is None:
        pytest.skip(f"there is nothing to {how} of a {kind}")
    assert not wrong, "\n".join((str(mutation), *wrong))


@pytest.mark.parametrize(("kind", "how", "seed"), [each for each in some(1) if each[:2] in OFTEN])
async def test_a_mutated_object_is_named_and_contained(
    kind: str, how: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    await holds(kind, how, seed, caplog)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "how", "seed"), some(8))
async def test_many_mutated_objects_are_named_and_contained(
    kind: str, how: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    await holds(kind, how, seed, caplog)
