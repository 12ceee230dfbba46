"""A checkpoint is read back whole or not at all, and slots go only when two checkpoints cover them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from daemon.errors import InvariantViolated
from daemon.shard import checkpoint_store, slot_put
from daemon.shard.journal_truncation import JournalTruncation
from storage_backends import memory_store, object_store
from storage_backends.formats import checkpoint_format, manifest, names, slot_format
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.shard_slot import ShardSlot

SHARD = 3
DATA, FENCE = slot_format.SlotKind.DATA, slot_format.SlotKind.FENCE


def checkpoint_of(slot: int) -> checkpoint_format.Checkpoint:
    column = np.arange(slot, dtype=np.uint64)
    part = checkpoint_format.TopicPart(
        topic_id="a" * 32, topic="flights", incarnation=1, mutable_rows=Rows(column, column, column)
    )
    return checkpoint_format.Checkpoint(shard=SHARD, epoch=2, slot=ShardSlot(slot), topics=(part,))


def written(store: object_store.ObjectStore, slot: int) -> manifest.CheckpointReference:
    reference = checkpoint_store.write_checkpoint(store, checkpoint_of(slot), base=slot + 7, unique=f"U{slot}")
    return manifest.CheckpointReference(object=reference, slot=ShardSlot(slot), replay_from=ShardSlot(slot))


def tip_of(
    newest: manifest.CheckpointReference | None, previous: manifest.CheckpointReference | None = None, *, epoch: int = 2
) -> manifest.ShardManifest:
    head = manifest.ManifestHead(number=9, previous_sha256=b"", commit_id="c", writer="north", created_ms=0)
    return manifest.ShardManifest(
        head=head,
        shard=SHARD,
        epoch=epoch,
        checkpoint=newest,
        previous_checkpoint=previous,
        replay_from=ShardSlot(0 if newest is None else newest.replay_from),
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
    loaded = checkpoint_store.read_newest(store, tip_of(reference, written(store, 30)), damaged=alarm)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.slot, loaded.replay_from, alarm.keys) == (40, 40, [])
    assert loaded.checkpoint.topics[0].mutable_rows.entry_id.tolist() == list(range(40))


def test_without_a_checkpoint_the_whole_journal_is_replayed() -> None:
    loaded = checkpoint_store.read_newest(memory_store.MemoryStore(), tip_of(None), damaged=Alarm())
    assert loaded == checkpoint_store.LoadedCheckpoint(None, ShardSlot(0))


def flip_last_bit(store: object_store.ObjectStore, key: str) -> None:
    body = bytearray(store.get(key))
    body[-1] ^= 1
    store.put(key, bytes(body))


def cut_short(store: object_store.ObjectStore, key: str) -> None:
    store.put(key, store.get(key)[:-1])


def remove(store: object_store.ObjectStore, key: str) -> None:
    store.delete(key)


def exchange(store: object_store.ObjectStore, key: str) -> None:
    other = checkpoint_store.write_checkpoint(store, checkpoint_of(41), base=1, unique="OTHER")
    store.put(key, store.get(other.name))


def exchange_for_a_twin(store: object_store.ObjectStore, key: str) -> None:
    """Another one of the same slot and the same size, undamaged in itself."""
    twin = dataclasses.replace(checkpoint_of(40), epoch=3)
    other = checkpoint_store.write_checkpoint(store, twin, base=1, unique="TWIN")
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
    loaded = checkpoint_store.read_newest(store, tip_of(newest, previous), damaged=alarm)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.slot, loaded.replay_from) == (30, 30)
    assert alarm.keys == [newest.object.name]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert newest.object.name in caplog.text


def test_the_whole_journal_stands_in_for_a_damaged_first_checkpoint() -> None:
    store = memory_store.MemoryStore()
    newest = written(store, 40)
    flip_last_bit(store, newest.object.name)
    loaded = checkpoint_store.read_newest(store, tip_of(newest), damaged=Alarm())
    assert loaded == checkpoint_store.LoadedCheckpoint(None, ShardSlot(0))


def test_two_damaged_checkpoints_refuse_the_shard() -> None:
    store = memory_store.MemoryStore()
    newest, previous = written(store, 40), written(store, 30)
    flip_last_bit(store, newest.object.name)
    flip_last_bit(store, previous.object.name)
    with pytest.raises(checkpoint_store.CheckpointDamaged, match=previous.object.name):
        checkpoint_store.read_newest(store, tip_of(newest, previous), damaged=Alarm())


def test_a_checkpoint_under_the_right_sum_but_of_another_slot_is_damaged() -> None:
    store = memory_store.MemoryStore()
    newest, previous = written(store, 40), written(store, 30)
    wrong = dataclasses.replace(newest, slot=ShardSlot(41))
    loaded = checkpoint_store.read_newest(store, tip_of(wrong, previous), damaged=Alarm())
    assert loaded.replay_from == 30


def test_an_unreachable_store_is_no_damage() -> None:
    class Unreachable(memory_store.MemoryStore):
        def get_with_metadata(self, key: str) -> object:  # type: ignore[override]
            raise object_store.StoreUnavailable(key, "no route")

    newest = written(memory_store.MemoryStore(), 40)
    with pytest.raises(object_store.StoreUnavailable):
        checkpoint_store.read_newest(Unreachable(), tip_of(newest), damaged=Alarm())


# Truncation


@pytest.fixture(scope="module")
def deletes() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        yield executor


class CountingStore(memory_store.MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.lists = 0
        self.heads = 0

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[object_store.ListedObject]:
        self.lists += 1
        return super().list(prefix, start_after=start_after)

    def head(self, key: str) -> object_store.ObjectInfo:
        self.heads += 1
        return super().head(key)


def journal_with(*, data: range, fences: tuple[int, ...]) -> CountingStore:
    """Slots of `data`, those in `fences` as fences. The epoch is the number of fences up to the slot."""
    store = CountingStore()
    for slot in data:
        kind = FENCE if slot in fences else DATA
        epoch = sum(fence <= slot for fence in fences)
        header = slot_format.SlotHeader(SHARD, epoch, ShardSlot(slot), kind, 0)
        frozen = slot_put.FrozenSlot(header, slot_format.encode_slot(header, ()), f"id-{slot}")
        store.put_if_absent(frozen.key, frozen.body, metadata=frozen.metadata)
    return store


def slots_in(store: object_store.ObjectStore) -> list[int]:
    return sorted(names.number_of(listed.key) for listed in store.list(names.journal_prefix(SHARD)))


def covered(newest: int, previous: int, *, epoch: int = 2) -> manifest.ShardManifest:
    def reference(slot: int) -> manifest.CheckpointReference:
        stored = manifest.ObjectReference(name="x", base=1, size_bytes=1, sha256=b"")
        return manifest.CheckpointReference(object=stored, slot=ShardSlot(slot), replay_from=ShardSlot(slot))

    return tip_of(reference(newest), reference(previous) if previous else None, epoch=epoch)


def truncation_of(
    store: object_store.ObjectStore,
    executor: concurrent.futures.Executor,
    *,
    fence_slot: int,
    known_kinds: dict[int, slot_format.SlotKind] | None = None,
) -> JournalTruncation:
    return JournalTruncation(
        store, shard=SHARD, epoch=2, fence_slot=fence_slot, known_kinds=known_kinds or {}, executor=executor
    )


def truncate_all(truncation: JournalTruncation, newest: manifest.ShardManifest, *, slots_max: int = 4) -> None:
    while truncation.truncate(newest, slots_max=slots_max):
        pass


def test_data_that_the_checkpoint_before_the_newest_covers_is_deleted_and_fences_stay(
    deletes: concurrent.futures.Executor,
) -> None:
    store = journal_with(data=range(1, 31), fences=(1, 12))
    truncation = truncation_of(store, deletes, fence_slot=12)
    truncate_all(truncation, covered(newest=25, previous=20))
    assert slots_in(store) == [1, 12, *range(21, 31)]


def test_nothing_is_deleted_before_there_are_two_checkpoints(deletes: concurrent.futures.Executor) -> None:
    store = journal_with(data=range(1, 31), fences=(1, 12))
    truncation = truncation_of(store, deletes, fence_slot=12)
    truncate_all(truncation, covered(newest=25, previous=0))
    truncate_all(truncation, tip_of(None))
    assert slots_in(store) == list(range(1, 31))


def test_what_earlier_owners_left_is_deleted_up_to_the_limit_only(deletes: concurrent.futures.Executor) -> None:
    store = journal_with(data=range(5, 31), fences=(9, 28))
    truncation = truncation_of(store, deletes, fence_slot=28)
    truncate_all(truncation, covered(newest=25, previous=20))
    assert slots_in(store) == [9, *range(21, 31)]
    truncate_all(truncation, covered(newest=30, previous=29))
    assert slots_in(store) == [9, 28, 30]


def test_the_journal_is_listed_once_and_known_slots_are_not_asked_for_their_kind(
    deletes: concurrent.futures.Executor,
) -> None:
    store = journal_with(data=range(1, 61), fences=(1, 12))
    kinds = {slot: FENCE if slot == 1 else DATA for slot in range(1, 9)}
    truncation = truncation_of(store, deletes, fence_slot=12, known_kinds=kinds)
    for previous in range(0, 50, 5):
        truncate_all(truncation, covered(newest=previous + 5, previous=previous))
    # Slots 9, 10 and 11 are below the fence and were not read by the takeover.
    assert (store.lists, store.heads) == (1, 3)
    assert slots_in(store) == [1, 12, *range(46, 61)]


def test_one_call_deletes_one_batch(deletes: concurrent.futures.Executor) -> None:
    store = journal_with(data=range(1, 31), fences=(1, 12))
    truncation = truncation_of(store, deletes, fence_slot=12)
    newest = covered(newest=25, previous=20)
    # 11 slots below the fence and 8 above it, 4 at a time; a batch does not mix up the two.
    assert [truncation.truncate(newest, slots_max=4) for _ in range(6)] == [4, 4, 4, 4, 3, 0]


def test_an_outage_while_deleting_loses_no_slot_to_the_truncation(deletes: concurrent.futures.Executor) -> None:
    class Failing(CountingStore):
        failures = 3

        def delete(self, key: str) -> None:
            if self.failures:
                self.failures -= 1
                raise object_store.StoreUnavailable(key, "no route")
            super().delete(key)

    store = Failing()
    full = journal_with(data=range(1, 31), fences=(1, 12))
    for slot in slots_in(full):
        body, metadata = full.get_with_metadata(names.journal_slot_key(SHARD, slot))
        store.put_if_absent(names.journal_slot_key(SHARD, slot), body, metadata=metadata)
    truncation = truncation_of(store, deletes, fence_slot=12)
    newest = covered(newest=25, previous=20)
    for _ in range(3):
        try:
            truncate_all(truncation, newest)
        except object_store.StoreUnavailable:
            continue
    truncate_all(truncation, newest)
    assert slots_in(store) == [1, 12, *range(21, 31)]


def test_a_slot_that_does_not_say_what_it_is_stays(
    deletes: concurrent.futures.Executor, caplog: pytest.LogCaptureFixture
) -> None:
    store = journal_with(data=range(1, 31), fences=(1, 12))
    key = names.journal_slot_key(SHARD, 5)
    store.put(key, store.get(key))
    truncation = truncation_of(store, deletes, fence_slot=12)
    truncate_all(truncation, covered(newest=25, previous=20))
    assert slots_in(store) == [1, 5, 12, *range(21, 31)]
    assert key in caplog.text


@pytest.mark.parametrize("newest", [covered(25, 20, epoch=3), covered(20, 25)])
def test_a_manifest_that_is_not_the_owners_or_contradicts_itself_deletes_nothing(
    deletes: concurrent.futures.Executor, newest: manifest.ShardManifest
) -> None:
    store = journal_with(data=range(1, 31), fences=(1, 12))
    truncation = truncation_of(store, deletes, fence_slot=12)
    with pytest.raises(InvariantViolated):
        truncation.truncate(newest)
    assert slots_in(store) == list(range(1, 31))
