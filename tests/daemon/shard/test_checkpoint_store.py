"""A checkpoint is read back whole or not at all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from daemon.shard import checkpointing
from storage_backends import checkpoints, memory_store, object_store
from storage_backends.formats import checkpoint_format, manifest, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows

SHARD = 3


def checkpoint_of(slot: int) -> checkpoint_format.Checkpoint:
    column = np.arange(slot, dtype=np.uint64)
    part = checkpoint_format.TopicPart(
        topic_id="a" * 32, topic="flights", incarnation=1, mutable_rows=Rows(column, column, column)
    )
    return checkpoint_format.Checkpoint(shard=SHARD, epoch=2, slot=ShardSlot(slot), topics=(part,))


def written(store: object_store.ObjectStore, slot: int) -> manifest.CheckpointCut:
    reference = checkpointing.write_checkpoint(store, checkpoint_of(slot), base=slot + 7, unique=f"U{slot}")
    return manifest.CheckpointCut(object=reference, slot=slot, log_id="log", at=slot)


def tip_of(
    newest: manifest.CheckpointCut | None, previous: manifest.CheckpointCut | None = None
) -> manifest.ShardManifest:
    head = manifest.ManifestHead(number=9, previous_sha256=b"", commit_id="c", writer="north", created_ms=0)
    return manifest.ShardManifest(
        head=head,
        shard=SHARD,
        epoch=2,
        checkpoint=newest,
        previous_checkpoint=previous,
    )


class Alarm:
    def __init__(self) -> None:
        self.keys: list[str] = []

    def __call__(self, key: str) -> None:
        self.keys.append(key)


def test_a_checkpoint_is_named_after_the_manifest_it_was_started_from_and_read_back() -> None:
    store, alarm = memory_store.MemoryStore(), Alarm()
    reference = written(store, 40)
    assert reference.object.name == names.checkpoint_key(SHARD, 47, "U40")
    assert (reference.object.base, reference.object.size_bytes) == (47, len(store.get(reference.object.name)))
    loaded = checkpointing.read_newest(store, tip_of(reference, written(store, 30)), damaged=alarm)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.slot, loaded.slot, alarm.keys) == (40, 40, [])
    assert loaded.checkpoint.topics[0].mutable_rows.entry_id.tolist() == list(range(40))


def test_without_a_checkpoint_all_sections_are_replayed() -> None:
    loaded = checkpointing.read_newest(memory_store.MemoryStore(), tip_of(None), damaged=Alarm())
    assert loaded == checkpoints.LoadedCheckpoint(None, ShardSlot(0))


def flip_last_bit(store: object_store.ObjectStore, key: str) -> None:
    body = bytearray(store.get(key))
    body[-1] ^= 1
    store.put(key, bytes(body))


def cut_short(store: object_store.ObjectStore, key: str) -> None:
    store.put(key, store.get(key)[:-1])


def remove(store: object_store.ObjectStore, key: str) -> None:
    store.delete(key)


def exchange(store: object_store.ObjectStore, key: str) -> None:
    other = checkpointing.write_checkpoint(store, checkpoint_of(41), base=1, unique="OTHER")
    store.put(key, store.get(other.name))


def exchange_for_a_twin(store: object_store.ObjectStore, key: str) -> None:
    """Another one of the same slot and the same size, undamaged in itself."""
    twin = dataclasses.replace(checkpoint_of(40), epoch=3)
    other = checkpointing.write_checkpoint(store, twin, base=1, unique="TWIN")
    assert len(store.get(key)) == other.size_bytes
    store.put(key, store.get(other.name))


@pytest.mark.parametrize("damage", [flip_last_bit, cut_short, remove, exchange, exchange_for_a_twin])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_an_alarm(
    damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    store, alarm = memory_store.MemoryStore(), Alarm()
    newest, previous = written(store, 40), written(store, 30)
    assert callable(damage)
    damage(store, newest.object.name)
    loaded = checkpointing.read_newest(store, tip_of(newest, previous), damaged=alarm)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.slot, loaded.slot) == (30, 30)
    assert alarm.keys == [newest.object.name]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert newest.object.name in caplog.text


def test_all_sections_stand_in_for_a_damaged_first_checkpoint() -> None:
    store = memory_store.MemoryStore()
    newest = written(store, 40)
    flip_last_bit(store, newest.object.name)
    loaded = checkpointing.read_newest(store, tip_of(newest), damaged=Alarm())
    assert loaded == checkpoints.LoadedCheckpoint(None, ShardSlot(0))


def test_two_damaged_checkpoints_refuse_the_shard() -> None:
    store = memory_store.MemoryStore()
    newest, previous = written(store, 40), written(store, 30)
    flip_last_bit(store, newest.object.name)
    flip_last_bit(store, previous.object.name)
    with pytest.raises(checkpointing.CheckpointDamaged, match=previous.object.name):
        checkpointing.read_newest(store, tip_of(newest, previous), damaged=Alarm())


def test_a_checkpoint_under_the_right_sum_but_of_another_slot_is_damaged() -> None:
    store = memory_store.MemoryStore()
    newest, previous = written(store, 40), written(store, 30)
    wrong = dataclasses.replace(newest, slot=ShardSlot(41))
    loaded = checkpointing.read_newest(store, tip_of(wrong, previous), damaged=Alarm())
    assert loaded.slot == 30


def test_an_unreachable_store_is_no_damage() -> None:
    class Unreachable(memory_store.MemoryStore):
        def get_with_metadata(self, key: str) -> object:  # type: ignore[override]
            raise object_store.StoreUnavailable(key, "no route")

    newest = written(memory_store.MemoryStore(), 40)
    with pytest.raises(object_store.StoreUnavailable):
        checkpointing.read_newest(Unreachable(), tip_of(newest), damaged=Alarm())
