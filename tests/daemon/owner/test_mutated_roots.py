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
from storage_backends import crash_points, merge_hints, object_store
from storage_backends.formats import log_slot_format, manifest, names
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import ObjectStore
from tests._support.engine_fixture import EPOCH_MS, Daemon, EngineFixture
from tests.golden_root import make, mutations
from tests.golden_root.mutations import DELETE, FLIP, FORGE, LOG_SLOT, SWAP, TRUNCATE, Mutation

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
    """Two daemons of today add to each topic, one after the other; the last one seals some, and is killed. Then another
    process merges.
    """
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
    hints = [merge_hints.MergeHint(shard, topic_id) for shard, topic_id in topics_of(store)]
    merge_hints.leave(store, hints, value="of-the-merger")


def topics_of(store: ObjectStore) -> set[tuple[int, str]]:
    parts = [each.key.split("/") for each in store.list("shards/")]
    return {(int(each[1]), each[3]) for each in parts if each[2] == "topics"}


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


def shards_of(mutation: Mutation, objects: Stored) -> frozenset[int]:
    """The shards that the mutation may disturb.

    A log slot that was there and is damaged has lost the sections in it, and nothing else. A forged one may say
    anything, and a missing one may be the end of its log.
    """
    if mutation.shard is not None:
        return frozenset({mutation.shard})
    if mutation.kind == LOG_SLOT and mutation.how in (FLIP, TRUNCATE, SWAP):
        return frozenset(log_slot_format.decode_log_slot(objects[mutation.key][0]).shards)
    return frozenset(range(make.SHARDS))


async def story(how: str, kind: str, seed: int, caplog: Any) -> tuple[Mutation | None, list[str]]:
    """Mutate, serve, compare; what is wrong with what came of it."""
    store, draw = store_of((await base()).objects), random.Random(f"{how} {kind} {seed}")
    mutation = mutations.mutate(store, draw, kind, how)
    return mutation, [] if mutation is None else await came_of(mutation, store, caplog)


async def came_of(mutation: Mutation, store: MemoryStore, caplog: Any) -> list[str]:
    """What is wrong with how a daemon serves the mutated root."""
    served, disturbed = (await base()).served, shards_of(mutation, (await base()).objects)
    caplog.clear()
    machines = EngineFixture(store, settings=SETTINGS)
    wrong: list[str] = []
    with crash_points.intercepted(machines.crash_point):
        daemon = await machines.daemon(make.LAST_DAEMON).start()
        await settled(daemon)
        if daemon.engine.failed.done():
            return [f"the process ended: {daemon.engine.failed.exception()!r}"]
        found = await all_content(daemon, list(served))
        text = f"{caplog.text}\n{daemon.engine.health.reason}"
        for topic, content in found.items():
            if content == served[topic]:
                continue
            shard, topic_id = names.shard_of(topic, make.SHARDS), names.topic_id(topic)
            what = repr(content)[:300] if isinstance(content, TarryError) else "content differs"
            if mutation.topic_id not in (None, topic_id) or shard not in disturbed:
                wrong.append(f"{topic} of shard {shard} is disturbed: {what}")
            elif isinstance(content, TarryError):
                # If the end of a log is unknown, all of its shards are refused, and perhaps no other is left.
                is_one_of_all = mutation.kind == LOG_SLOT and len(disturbed) == make.SHARDS
                if not isinstance(content, Corruption) and not is_one_of_all:
                    wrong.append(f"{topic}: no damage is told: {what}")
                if mutation.key not in text and mutation.key.rpartition("/")[0] not in text:
                    wrong.append(f"{topic}: the object is not named: {what}")
            elif content["rebuild"] == served[topic]["rebuild"] and mutation.how != FORGE:
                wrong.append(f"{topic}: lost in silence")
        tracebacks = [each for each in caplog.records if each.exc_info]
        wrong += [f"traceback: {each.getMessage()[:200]} {each.exc_info[1]!r:.300}" for each in tracebacks]
        await machines.close()
    return wrong


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


@pytest.mark.parametrize("length", [0, 20, log_slot_format.HEADER_BYTES + 1])
async def test_the_newest_slot_cut_before_its_sections_disturbs_the_shards_that_had_one_in_it(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    objects = (await base()).objects
    tips = [manifest.decode_shard_manifest(store_of(objects).get(key)) for key in newest_manifests(objects)]
    (log_id,) = {tip.open_range.log_id for tip in tips if tip.open_range is not None}
    key = max(each for each in objects if each.startswith(names.log_prefix(log_id)))
    store, (body, metadata) = store_of(objects), objects[key]
    store.put(key, body[:length], metadata=metadata)
    mutation = Mutation(LOG_SLOT, TRUNCATE, key, f"to {length} of {len(body)} bytes")
    assert 0 < len(shards_of(mutation, objects)) < make.SHARDS
    wrong = await came_of(mutation, store, caplog)
    assert not wrong, "\n".join((str(mutation), *wrong))


def newest_manifests(objects: Stored) -> list[str]:
    keys = sorted(key for key in objects if mutations.kind_of(key) == "shard manifest")
    return [*{key.rpartition("/")[0]: key for key in keys}.values()]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "how", "seed"), some(8))
async def test_many_mutated_objects_are_named_and_contained(
    kind: str, how: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    await holds(kind, how, seed, caplog)
