"""What is stored of one shard and makes no sense costs that shard alone, is named, and is served again once it is
mended. What is foreign costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.errors import Corruption
from daemon.owner import engine, give_up, heartbeat
from storage_backends import object_store
from storage_backends.formats import manifest, names
from storage_backends.formats.manifest import CheckpointCut, LogRange, ShardManifest, Tombstone
from storage_backends.local_directory import LocalDirectory
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.topic_names import topic_of_each

SHARDS, SHARD = 4, 2
SEVERAL = (f"daemon.shards={SHARDS}", "collection.interval_s=60")
FAR_MS = 50_000_000
TOPICS = topic_of_each(SHARDS)
LAST = (1 << 64) - 1
LOOKED_S = 2 * engine.DAMAGED_LOOK_S


async def with_rows(machines: EngineFixture) -> None:
    """A daemon has added a row to each topic, has ended, and was followed by one that was killed."""
    one = await machines.served_by("one", *SEVERAL)
    for topic in TOPICS:
        await one.add(topic, 1, range(1), delay_ms=FAR_MS)
    await one.stop()
    two = await machines.served_by("one", *SEVERAL)
    for topic in TOPICS:
        await two.add(topic, 2, range(2), delay_ms=FAR_MS)
    two.kill()


def tip_key(machines: EngineFixture) -> str:
    return machines.keys(names.shard_manifest_prefix(SHARD))[-1]


def forge(machines: EngineFixture, change: Callable[[ShardManifest], ShardManifest]) -> bytes:
    """Change the newest manifest of the shard; its bytes from before."""
    key = tip_key(machines)
    before, metadata = machines.store.get_with_metadata(key)
    changed = change(manifest.decode_shard_manifest(before))
    machines.store.put(key, manifest.encode_shard_manifest(changed), metadata=metadata)
    return before


def of_range(tip: ShardManifest, **changed: Any) -> ShardManifest:
    return dataclasses.replace(tip, ranges=(*tip.ranges[:-1], dataclasses.replace(tip.ranges[-1], **changed)))


def of_checkpoint(tip: ShardManifest, **changed: Any) -> ShardManifest:
    assert tip.checkpoint is not None
    return dataclasses.replace(tip, checkpoint=dataclasses.replace(tip.checkpoint, **changed))


def named(tip: ShardManifest, **changed: Any) -> CheckpointCut:
    assert tip.checkpoint is not None
    return dataclasses.replace(tip.checkpoint, object=dataclasses.replace(tip.checkpoint.object, **changed))


def former_range(tip: ShardManifest) -> LogRange:
    """A range of the same log before the open one, which ends far behind the log."""
    owned = tip.ranges[-1]
    return dataclasses.replace(owned, epoch=1, through=1 << 62, last_slot=1 << 62, first_slot=owned.first_slot)


def buries_format(tip: ShardManifest) -> ShardManifest:
    assert tip.checkpoint is not None
    of_root = dataclasses.replace(tip.checkpoint.object, name=names.FORMAT_KEY)
    return dataclasses.replace(tip, tombstones=(Tombstone(object=of_root, removed_in=1, delete_after_ms=1),))


FORGED: dict[str, Callable[[ShardManifest], ShardManifest]] = {
    "the last epoch": lambda tip: of_range(dataclasses.replace(tip, epoch=LAST), epoch=LAST),
    "the last settled epoch": lambda tip: dataclasses.replace(tip, settled_epoch=LAST),
    "the last section": lambda tip: of_range(tip, first_slot=LAST),
    "the last slot": lambda tip: of_range(tip, after=LAST),
    "a slot behind the log": lambda tip: of_range(tip, after=1_000),
    "a slot far behind the log": lambda tip: of_range(tip, after=names.NUMBER_MAX),
    "a range without end": lambda tip: dataclasses.replace(tip, ranges=(former_range(tip), *tip.ranges)),
    "an open range of another epoch": lambda tip: of_range(tip, epoch=1),
    "a log outside of the root": lambda tip: of_range(tip, log_id="../../other"),
    "a log with a foreign letter": lambda tip: of_range(tip, log_id=tip.ranges[-1].log_id[:-1] + "\u00e9"),
    "an owner outside of the root": lambda tip: dataclasses.replace(tip, owner="../other"),
    "an owner with a foreign letter": lambda tip: dataclasses.replace(tip, owner="one\u00e9"),
    "a checkpoint outside of the shard": lambda tip: dataclasses.replace(
        tip, checkpoint=named(tip, name="../../FORMAT")
    ),
    "a checkpoint of another base": lambda tip: dataclasses.replace(tip, checkpoint=named(tip, base=9)),
    "an epoch is settled that nobody had": lambda tip: dataclasses.replace(tip, settled_epoch=tip.epoch + 1),
    "an older checkpoint that covers more": lambda tip: dataclasses.replace(
        tip, previous_checkpoint=dataclasses.replace(named(tip), slot=tip.checkpoint_slot + 1)
    ),
    "a checkpoint of the last section": lambda tip: of_checkpoint(tip, slot=LAST),
    "a checkpoint behind the log": lambda tip: of_checkpoint(tip, log_id=tip.ranges[-1].log_id, at=1_000),
    "a tombstone of the root": buries_format,
}


async def told(machines: EngineFixture) -> Daemon:
    """A daemon that has looked at the damage serves the other shards, and says what is wrong."""
    daemon = await machines.served_by("one", *SEVERAL)
    await asyncio.sleep(LOOKED_S)
    assert not daemon.engine.failed.done()
    assert sorted(daemon.shards) == [shard for shard in range(SHARDS) if shard != SHARD]
    for topic in TOPICS:
        if names.shard_of(topic, SHARDS) != SHARD:
            assert daemon.topic(topic).core.index.pending_rows == 3
            await daemon.add(topic, 3, range(1), delay_ms=FAR_MS)
    with pytest.raises(Corruption, match=f"shard {SHARD}") as refused:
        await daemon.add(TOPICS[SHARD], 3, range(1), delay_ms=FAR_MS)
    assert f"shard {SHARD} is damaged" in daemon.engine.health.reason
    assert daemon.damage_found("shard") >= 1
    assert daemon.metrics.registry.get_sample_value("tarry_shards_damaged") == 1
    daemon.said = str(refused.value)  # type: ignore[attr-defined]
    return daemon


@pytest.mark.parametrize("what", FORGED)
async def test_a_manifest_that_makes_no_sense_costs_its_shard_alone(machines: EngineFixture, what: str) -> None:
    await with_rows(machines)
    key = tip_key(machines)
    before = forge(machines, FORGED[what])
    daemon = await told(machines)
    said: str = daemon.said  # type: ignore[attr-defined]
    assert key in said or machines.shard_tip(SHARD).ranges[-1].log_id in said
    if machines.keys(names.shard_manifest_prefix(SHARD))[-1] != key:
        return  # It was claimed before the damage showed, and given back.
    machines.store.put(key, before, metadata=machines.store.head(key).metadata)
    await asyncio.sleep(LOOKED_S)
    assert daemon.topic(TOPICS[SHARD]).core.index.pending_rows == 3


FOREIGN = ("notes.txt", "1", "0" * 19 + "7-x", "0" * 20, "9" * 20, f"{(1 << 63):020d}", "0" * 19 + "9/below")


@pytest.mark.parametrize("name", FOREIGN)
async def test_what_is_foreign_among_manifests_slots_and_heartbeats_stops_nobody(
    machines: EngineFixture, name: str
) -> None:
    await with_rows(machines)
    log_id = machines.slots()[-1].split("/")[1]
    topics = (names.topic_manifest_prefix(shard, names.topic_id(TOPICS[shard])) for shard in range(SHARDS))
    shards = map(names.shard_manifest_prefix, range(SHARDS))
    for folder in (
        *topics,
        *shards,
        names.log_prefix(log_id),
        names.LOGS_PREFIX,
        names.DAEMONS_PREFIX,
        "shards/02/topics/",
    ):
        machines.store.put(f"{folder}{name}", b"mine")
    daemon = await machines.served_by("one", *SEVERAL)
    await asyncio.sleep(LOOKED_S)
    assert [daemon.topic(topic).core.index.pending_rows for topic in TOPICS] == [3] * SHARDS
    assert daemon.engine.health.reason == "serving"


@contextlib.asynccontextmanager
async def in_a_directory(root: Path) -> AsyncIterator[EngineFixture]:
    machines = EngineFixture(LocalDirectory(root), settings=(*SEVERAL, "store.log_form=objects"))
    try:
        yield machines
    finally:
        await machines.close()


async def test_files_and_folders_of_others_in_a_local_directory_stop_nobody(tmp_path: Path) -> None:
    async with in_a_directory(tmp_path / "root") as machines:
        one = await machines.served_by("one")
        for topic in TOPICS:
            await one.add(topic, 1, range(1), delay_ms=FAR_MS)
        await one.stop()
        topics = f"shards/{SHARD:02d}/topics"
        of_topic = f"{topics}/{names.topic_id(TOPICS[SHARD])}"
        logs = tmp_path / "root" / "logs"
        of_log = next(logs.iterdir())
        for folder in (
            "daemons",
            f"shards/{SHARD:02d}",
            f"shards/{SHARD:02d}/manifest",
            topics,
            f"{of_topic}/manifest",
        ):
            for parent in (tmp_path / "root" / folder, logs, of_log):
                (parent / "a b").write_bytes(b"mine")
                (parent / "\u00e9" / "x").mkdir(parents=True, exist_ok=True)
                (parent / "\u00e9" / "x" / "y").write_bytes(b"mine")
                (parent / f"{90_000_000:020d}" / "z").mkdir(parents=True, exist_ok=True)
                (parent / f"{90_000_000:020d}" / "z" / "y").write_bytes(b"mine")
        two = await machines.served_by("one")
        await asyncio.sleep(LOOKED_S)
        assert [two.topic(topic).core.index.pending_rows for topic in TOPICS] == [1] * SHARDS
        assert two.engine.health.reason == "serving"


@pytest.mark.parametrize("last_slot", [-1, 1 << 64, 10**30])
async def test_a_heartbeat_that_makes_no_sense_is_none(machines: EngineFixture, last_slot: int) -> None:
    await with_rows(machines)
    log_id = machines.slots()[-1].split("/")[1]
    beat = f'{{"daemon_id":"one","address":"","shards":[],"instance":"","sequence":1,"log_id":"{log_id}",'
    machines.store.put(names.daemon_key("one"), f'{beat}"last_slot":{last_slot}}}'.encode())
    daemon = await machines.served_by("one", *SEVERAL)
    assert sorted(daemon.shards) == list(range(SHARDS))


async def test_a_directory_in_the_place_of_a_shards_next_manifest_costs_that_shard_alone(tmp_path: Path) -> None:
    async with in_a_directory(tmp_path / "root") as machines:
        one = await machines.served_by("one")
        await one.stop()
        number = names.number_of(machines.keys(names.shard_manifest_prefix(0))[-1])
        (tmp_path / "root" / names.shard_manifest_key(0, number + 1) / "below").mkdir(parents=True)
        two = await machines.served_by("one")
        assert sorted(two.shards) == [1, 2, 3]
        assert names.shard_manifest_key(0, number + 1) in two.engine.health.reason


@pytest.mark.parametrize("log_id", ["../../other", "", "x", "0" * 25 + "\u00e9"])
async def test_no_log_id_leads_outside_of_the_root(machines: EngineFixture, log_id: str) -> None:
    await with_rows(machines)
    with pytest.raises(object_store.Damaged, match="it must be a ULID"):
        give_up.resolve_loss(machines.store, log_id, accepted=True, say=lambda text: None)
    assert heartbeat.last_told([], log_id) == 0
