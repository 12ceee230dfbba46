"""What only a newer release reads is refused by name: its shard or its topic alone, as it was, and for as long as it is
there. Nothing older takes its place, and no bucket is quarantined.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

import numpy as np
import pytest

from daemon.errors import Corruption
from daemon.owner import engine
from daemon.runtime.failure_scope import NewerData
from daemon.shard import topic_loading
from storage_backends import topic_manifest
from storage_backends.formats import bucket_format, checkpoint_format, manifest, names, requirements, segment
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.topic_names import topic_of, topic_of_each

SHARDS, SHARD = 4, 2
SETTINGS = (f"daemon.shards={SHARDS}", "collection.interval_s=60", "journal.checkpoint_slots=2")
FAR_MS = 50_000_000
TOPICS = topic_of_each(SHARDS)
TOPIC = TOPICS[SHARD]
NEIGHBOUR = topic_of(SHARD, SHARDS, "n")
LOOKED_S = 2 * max(engine.DAMAGED_LOOK_S, topic_loading.DAMAGED_LOOK_S)


@pytest.fixture(autouse=True)
def _without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that know no version 2."""
    monkeypatch.setattr(requirements, "KNOWN", frozenset())


def with_ids(ledger_id: int) -> Rows:
    entries = np.arange(3, dtype=np.uint64)
    ids = ScheduleIds.of_piece(np.array([1, 0, 2], np.uint64), b"abb")
    return Rows(entries + np.uint64(1 << 42), np.full(3, ledger_id, np.uint64), entries, None, ids)


async def with_rows(machines: EngineFixture) -> None:
    """A daemon has added rows to each topic, sealed those of one shard, has ended, and was followed by one that was
    killed.
    """
    one = await machines.served_by("one", *SETTINGS)
    for topic in (*TOPICS, NEIGHBOUR):
        await one.add(topic, 1, range(3), delay_ms=FAR_MS)
    await one.call(one.engine.requests.seal(TOPIC))
    await one.stop()
    two = await machines.served_by("one", *SETTINGS)
    for topic in (*TOPICS, NEIGHBOUR):
        await two.add(topic, 2, range(3), delay_ms=FAR_MS)
    two.kill()


def put_back(machines: EngineFixture, key: str, body: bytes) -> bytes:
    """Put other bytes in place of an object; those from before."""
    before, metadata = machines.store.get_with_metadata(key)
    machines.store.put(key, body, metadata=metadata)
    return before


async def others_are_served(daemon: Daemon, *more: str) -> None:
    for topic in (*(each for each in TOPICS if each != TOPIC), *more):
        assert daemon.topic(topic).core.indexes.pending_rows == 6
        await daemon.add(topic, 3, range(1), delay_ms=FAR_MS)


async def test_a_shard_that_requires_what_is_not_known_is_refused_by_name_and_nothing_of_it_is_rewritten(
    machines: EngineFixture,
) -> None:
    await with_rows(machines)
    key = machines.keys(names.shard_manifest_prefix(SHARD))[-1]
    tip = manifest.decode_shard_manifest(machines.store.get(key))
    before = put_back(machines, key, manifest.encode_shard_manifest(dataclasses.replace(tip, requires=("later",))))
    stored = {each: machines.store.get(each) for each in machines.keys(names.shard_prefix(SHARD))}
    daemon = await machines.served_by("one", *SETTINGS)
    await asyncio.sleep(LOOKED_S)
    assert sorted(daemon.shards) == [shard for shard in range(SHARDS) if shard != SHARD]
    await others_are_served(daemon)
    with pytest.raises(Corruption, match=f"shard {SHARD}.*{key}.*it requires later, which is not known; use a release"):
        await daemon.add(TOPIC, 3, range(1), delay_ms=FAR_MS)
    assert {each: machines.store.get(each) for each in machines.keys(names.shard_prefix(SHARD))} == stored
    put_back(machines, key, before)
    await asyncio.sleep(LOOKED_S)
    assert daemon.topic(TOPIC).core.indexes.pending_rows == 6


async def test_no_older_checkpoint_takes_the_place_of_a_newer_one(machines: EngineFixture) -> None:
    await with_rows(machines)
    key = machines.keys(names.shard_manifest_prefix(SHARD))[-1]
    tip = manifest.decode_shard_manifest(machines.store.get(key))
    assert tip.checkpoint is not None
    part = checkpoint_format.TopicPart(names.topic_id(TOPIC), TOPIC, 1, with_ids(9))
    read = checkpoint_format.decode_checkpoint(machines.store.get(tip.checkpoint.object.name))
    body = checkpoint_format.encode_checkpoint(dataclasses.replace(read, topics=(part,)))
    machines.store.put(tip.checkpoint.object.name, body)
    cut = dataclasses.replace(
        tip.checkpoint,
        object=dataclasses.replace(tip.checkpoint.object, size_bytes=len(body), sha256=hashlib.sha256(body).digest()),
    )
    put_back(machines, key, manifest.encode_shard_manifest(dataclasses.replace(tip, checkpoint=cut)))
    daemon = await machines.served_by("one", *SETTINGS)
    await asyncio.sleep(LOOKED_S)
    await others_are_served(daemon)
    with pytest.raises(Corruption, match=f"{cut.object.name}.*version 2 is not known") as refused:
        await daemon.add(TOPIC, 3, range(1), delay_ms=FAR_MS)
    assert "is damaged: checkpoint" not in str(refused.value)
    assert daemon.damage_found("checkpoint") == 0
    assert machines.store.get(cut.object.name) == body


async def test_a_topic_that_requires_what_is_not_known_is_refused_and_what_its_checkpoint_has_is_carried_over(
    machines: EngineFixture,
) -> None:
    await with_rows(machines)
    prefix = names.topic_manifest_prefix(SHARD, names.topic_id(TOPIC))
    key = machines.keys(prefix)[-1]
    tip = manifest.decode_topic_manifest(machines.store.get(key))
    before = put_back(machines, key, manifest.encode_topic_manifest(dataclasses.replace(tip, requires=("later",))))
    stored = {each: machines.store.get(each) for each in machines.keys(names.topic_prefix(SHARD, tip.topic_id))}
    daemon = await machines.served_by("one", *SETTINGS)
    await asyncio.sleep(LOOKED_S)
    await others_are_served(daemon, NEIGHBOUR)
    with pytest.raises(Corruption, match=f"topic {TOPIC}: .*{key}.*it requires later, which is not known"):
        await daemon.add(TOPIC, 3, range(1), delay_ms=FAR_MS)
    assert {each: machines.store.get(each) for each in machines.keys(names.topic_prefix(SHARD, tip.topic_id))} == stored
    # Also after checkpoints that carry it over
    for number in range(4, 12):
        await daemon.add(NEIGHBOUR, number, range(1), delay_ms=FAR_MS)
    await daemon.stop()
    put_back(machines, key, before)
    after = await machines.served_by("one", *SETTINGS)
    await asyncio.sleep(LOOKED_S)
    assert after.topic(TOPIC).core.indexes.pending_rows == 6


async def test_a_newer_bucket_refuses_its_topic_and_is_not_quarantined(machines: EngineFixture) -> None:
    await with_rows(machines)
    key = machines.keys(names.topic_manifest_prefix(SHARD, names.topic_id(TOPIC)))[-1]
    tip = manifest.decode_topic_manifest(machines.store.get(key))
    (live,) = tip.live
    encoded = bucket_format.encode_bucket(
        with_ids(1), topic=TOPIC, subscription_id=0, limits=segment.SegmentLimits(), compatible=False
    )
    machines.store.put(live.object.name, encoded.body)
    reference = topic_manifest.reference_to(live.object.name, live.object.base, encoded.body)
    newer = dataclasses.replace(tip, live=(dataclasses.replace(live, object=reference),))
    put_back(machines, key, manifest.encode_topic_manifest(newer))
    daemon = await machines.served_by("one", *SETTINGS)
    await asyncio.sleep(LOOKED_S)
    await others_are_served(daemon, NEIGHBOUR)
    with pytest.raises(Corruption, match=f"topic {TOPIC}: .*{live.object.name}.*version 2 is not known") as refused:
        await daemon.add(TOPIC, 3, range(1), delay_ms=FAR_MS)
    assert isinstance(refused.value.__cause__, NewerData) or "cannot be read by this release" in str(refused.value)
    newest = manifest.decode_topic_manifest(
        machines.store.get(machines.keys(names.topic_manifest_prefix(SHARD, tip.topic_id))[-1])
    )
    assert not any(each.quarantined for each in newest.live)
    assert machines.store.get(live.object.name) == encoded.body
