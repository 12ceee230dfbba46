"""Reading topics while their owners go on, and what a decision says of which rows."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batch.engine.root import Root, TopicPlace
from batch.engine.topic_contents import TopicContents, owed_mask, rows_of
from batch.engine.topic_reading import read_states
from storage_backends.formats import checkpoint_format, names, slot_format
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import BucketProgress, LogForm, Progress, Subscription, SubscriptionProgress
from storage_backends.formats.position_bitmap import position_bitmaps
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLogs
from storage_backends.object_store import Damaged, NotFound, ObjectStore, StoreError
from storage_backends.topic_manifest import DeleteTopic, SetSubscriptions
from tests._support.merging_process import MergingProcess
from tests.batch.engine._support.roots import NOW_MS, StoredTopic, make_root
from tests.batch.engine._support.stored_logs import LogDaemon
from tests.daemon.group_commit._support.log_walk import AtOnce

S, OTHER = 1, 2


class WatchedStore(MemoryStore):
    """`before`: by a part of a key, what happens once before the next such object is read."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], None]] = {}
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        for part in [part for part in self.before if part in key]:
            self.before.pop(part)()
        return super().get(key)


class Shard:
    """A topic's shard, as its owner writes it."""

    def __init__(self, topic: StoredTopic, owner: LogDaemon | None = None) -> None:
        self.topic = topic
        self.owner = owner or LogDaemon(topic.store, ObjectLogs(topic.store, AtOnce()), "one")
        self.owner.claim(topic.shard)

    def write(self, *records: slot_format.Record) -> int:
        """The number of the log slot."""
        return self.owner.write({self.topic.shard: records})

    def add(self, ledger: int, *entries: int, index: int = 0, incarnation: int = 1) -> int:
        return self.write(slot_format.AddRecord(self.topic.topic_id, incarnation, index, rows(ledger, *entries)))

    def acknowledge(self, by: int, ledger: int, *entries: int) -> None:
        self.write(slot_format.AcknowledgeRecord(self.topic.topic_id, 1, by, rows(ledger, *entries)))

    def checkpoint(self, mutable: Rows) -> str:
        """Everything up to now; what nobody needs any more leaves the log. The key of the checkpoint."""
        cut = self.owner.checkpoint(self.topic.shard, self.part(mutable))
        lowest = self.owner.tip(self.topic.shard).lowest_after(self.owner.log_id)
        assert lowest is not None
        if 0 < lowest < self.owner.own.last_certain:
            self.owner.truncate(lowest)
        return cut.object.name

    def part(self, mutable: Rows) -> checkpoint_format.TopicPart:
        return checkpoint_format.TopicPart(self.topic.topic_id, self.topic.name, 1, mutable)


def rows(ledger: int, *entries: int, due_ms: int = NOW_MS) -> Rows:
    count = len(entries)
    return Rows(np.full(count, due_ms, np.uint64), np.full(count, ledger, np.uint64), np.array(entries, np.uint64))


@pytest.fixture
def store() -> WatchedStore:
    made = WatchedStore()
    make_root(made)
    return made


def subscribed(store: ObjectStore, *subscriptions: Subscription) -> StoredTopic:
    topic = StoredTopic(store, "t")
    topic.commit(
        SetSubscriptions(subscriptions=subscriptions, last_subscription_id=9, epoch=topic.epoch, delete_after_ms=NOW_MS)
    )
    return topic


def subscription(number: int, *, since_ms: int = 0, created_slot: int = 0) -> Subscription:
    return Subscription(
        subscription_id=number, name=f"s{number}", since_ms=since_ms, created_slot=ShardSlot(created_slot)
    )


def state_of(store: ObjectStore, name: str = "t") -> TopicContents:
    root = Root.open(store)
    (state,) = read_states(root, [root.place_of(name)])
    return state


def entries(store: ObjectStore, state: TopicContents) -> list[int]:
    sealed = [rows_of(store, bucket) for bucket in state.buckets]
    return sorted(Rows.concat([*sealed, *(each.rows for each in state.unsealed)]).entry_id.tolist())


def owed(store: ObjectStore, state: TopicContents, number: int) -> list[int]:
    stored = next(each.stored for each in state.subscriptions if each.stored.subscription_id == number)
    found: list[int] = []
    for bucket in state.buckets:
        here = rows_of(store, bucket)
        found += here.entry_id[owed_mask(stored, bucket.index_id, here, bucket.acknowledged)].tolist()
    for each in state.unsealed:
        found += each.rows.entry_id[owed_mask(stored, each.index_id, each.rows, each.acknowledged)].tolist()
    return sorted(found)


# ---- what a decision says of which rows


def test_an_acknowledgement_does_not_wait_for_a_subscription_that_was_created_later(store: WatchedStore) -> None:
    shard = Shard(subscribed(store, subscription(S), subscription(OTHER, created_slot=2)))
    shard.add(1, 0, 1)
    shard.acknowledge(S, 1, 0)
    shard.acknowledge(S, 1, 1)
    state = state_of(store)
    assert entries(store, state) == [1], "0 was acknowledged by everybody there was"
    assert (owed(store, state, S), owed(store, state, OTHER)) == ([], [1])
    assert state.applied_slot == 3


def test_what_is_kept_from_a_subscription_is_not_kept_from_a_later_one_with_its_id(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S), subscription(OTHER, created_slot=2))
    shard = Shard(topic)
    shard.add(1, 0, 1)
    for entry in (0, 1):
        bitmaps = position_bitmaps(*rows_columns(1, entry))
        shard.write(slot_format.WaiveRecord(topic.topic_id, 1, OTHER, bitmaps))
    state = state_of(store)
    assert (owed(store, state, S), owed(store, state, OTHER)) == ([0, 1], [0])


def test_a_row_that_was_added_again_is_owed_to_everybody(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S), subscription(OTHER))
    topic.seal([topic.write(rows(1, 0, 1, 2))])
    shard = Shard(topic)
    shard.add(7, 9)
    shard.acknowledge(S, 1, 0, 1)
    shard.write(
        slot_format.GoneRecord(
            topic.topic_id, 1, 0, slot_format.GoneReason.CANCELLED, position_bitmaps(*rows_columns(1, 0))
        )
    )
    shard.add(1, 0)
    state = state_of(store)
    assert entries(store, state) == [0, 1, 2], "the seal covers the first slot"
    assert (owed(store, state, S), owed(store, state, OTHER)) == ([0, 2], [0, 1, 2])


def test_a_row_that_is_trimmed_with_dead_letters_for_one_is_owed_to_the_others(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S), subscription(OTHER))
    topic.seal([topic.write(rows(1, 0, 1, 2))])
    shard = Shard(topic)
    shard.add(7, 9)
    trimmed = rows(1, 0, 1, due_ms=0)
    shard.write(
        slot_format.WaiveRecord(topic.topic_id, 1, S, position_bitmaps(*rows_columns(1, 0, 1))),
        slot_format.DeadLetterRecord(
            topic.topic_id,
            1,
            S,
            0,
            trimmed,
            np.zeros(2, np.uint32),
            np.array([1, 2], np.uint64),
            np.full(2, NOW_MS, np.uint64),
            slot_format.DeadLetterReason.TRIMMED,
            "",
        ),
    )
    state = state_of(store)
    assert entries(store, state) == [0, 1, 2], "the seal covers the first slot"
    assert (owed(store, state, S), owed(store, state, OTHER)) == ([2], [0, 1, 2])
    (letters,) = [each.dead_letters for each in state.subscriptions if each.stored.subscription_id == S]
    assert letters.dead_letter_id.tolist() == [1, 2]


def rows_columns(ledger: int, *entry_ids: int) -> tuple[U64, U64]:
    made = rows(ledger, *entry_ids)
    return made.ledger_id, made.entry_id


def test_decisions_of_an_earlier_life_of_the_topic_are_dropped(store: WatchedStore) -> None:
    topic = StoredTopic(store, "t")
    shard = Shard(topic)
    shard.add(1, 0)
    topic.commit(DeleteTopic(slot=ShardSlot(0), epoch=topic.epoch, delete_after_ms=NOW_MS))
    assert list(read_states(Root.open(store))) == []
    StoredTopic(store, "t")
    shard.add(1, 5, incarnation=2)
    assert entries(store, state_of(store)) == [5]


def test_rows_of_a_subscription_that_is_no_more_are_owed_to_nobody(store: WatchedStore) -> None:
    shard = Shard(subscribed(store, subscription(S)))
    shard.add(1, 0, index=S)
    shard.add(1, 1, index=OTHER)
    state = state_of(store)
    assert entries(store, state) == [0]
    assert owed(store, state, S) == [0]


def test_a_bucket_that_was_sealed_and_merged_after_the_checkpoint_takes_its_bits_from_it(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S), subscription(OTHER))
    shard = Shard(topic)
    shard.add(1, 0, 1, 2)
    cut = (rows(1, 0, 1), rows(1, 2))
    sealing = [topic.write(each) for each in cut]
    shard.acknowledge(S, 1, 1)
    # The checkpoint is of slot 2; the seal, cut at slot 1, was not known to be committed then.
    part = dataclasses.replace(
        shard.part(Rows.empty()),
        sealing=tuple(
            checkpoint_format.SealingPart(live.object.name, ShardSlot(1), each)
            for live, each in zip(sealing, cut, strict=True)
        ),
        progress=Progress(
            buckets=(
                BucketProgress(
                    bucket=sealing[0].object.name,
                    gone=position_bitmaps(*rows_columns(1, 0)),
                    acknowledged=(
                        SubscriptionProgress(subscription_id=S, positions=position_bitmaps(*rows_columns(1, 1))),
                    ),
                ),
            )
        ),
    )
    shard.owner.checkpoint(topic.shard, part)
    topic.seal(sealing)
    MergingProcess(store, topic.name, shard=topic.shard, now_ms=lambda: NOW_MS).merge_run(2)
    state = state_of(store)
    assert [bucket.live.level for bucket in state.buckets] == [1]
    assert entries(store, state) == [1, 2]
    assert (owed(store, state, S), owed(store, state, OTHER)) == ([2], [1, 2])


def test_a_state_can_be_sent_to_another_process(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S), subscription(OTHER))
    live = topic.write(rows(1, 0, 1, 2))
    topic.seal([live], gone={live.object.name: {1: [2]}})
    shard = Shard(topic)
    shard.add(7, 9)
    shard.acknowledge(S, 1, 0)
    sent = pickle.loads(pickle.dumps(state_of(store)))
    assert entries(store, sent) == [0, 1], "the added one is in a slot that the seal covers"
    assert owed(store, sent, S) == [1]


# ---- owners go on


def test_slots_that_are_deleted_before_they_are_read_are_in_the_newer_checkpoint(store: WatchedStore) -> None:
    shard = Shard(StoredTopic(store, "t"))
    shard.add(1, 0)
    shard.checkpoint(rows(1, 0))
    shard.add(1, 1)
    shard.add(1, 2)

    def go_on() -> None:
        shard.checkpoint(rows(1, 0, 1, 2))
        shard.add(1, 3)
        shard.checkpoint(rows(1, 0, 1, 2, 3))
        shard.add(1, 4)

    store.before[names.LOGS_PREFIX] = go_on
    state = state_of(store)
    assert entries(store, state) == [0, 1, 2, 3, 4]
    assert state.applied_slot == 5


@pytest.mark.parametrize("when", [names.LOGS_PREFIX, "/topics/"])
def test_what_another_owner_writes_meanwhile_counts(store: WatchedStore, when: str) -> None:
    """Before its log is known, and after that of the former owner was read."""
    topic = StoredTopic(store, "t")
    shard = Shard(topic)
    shard.add(1, 0)

    def take_over() -> None:
        other = LogDaemon(store, ObjectLogs(store, AtOnce()), "two")
        other.claim(topic.shard, other.fence(shard.owner))
        other.write({topic.shard: [slot_format.AddRecord(topic.topic_id, 1, 0, rows(1, 1))]})
        topic.take_over()

    store.before[when] = take_over
    state = state_of(store)
    assert entries(store, state) == [0, 1]
    assert state.manifest.owner_epoch == 2


def test_a_shard_that_is_handed_over_meanwhile_is_read_from_its_checkpoints(store: WatchedStore) -> None:
    topic = StoredTopic(store, "t")
    shard = Shard(topic)
    shard.add(1, 0)

    def hand_over() -> None:
        shard.owner.release(topic.shard, shard.part(rows(1, 0)))

    store.before["/topics/"] = hand_over
    assert entries(store, state_of(store)) == [0]
    successor = LogDaemon(store, ObjectLogs(store, AtOnce()), "two")
    assert entries(store, state_of(store)) == [0]
    Shard(topic, successor).add(1, 1)
    assert entries(store, state_of(store)) == [0, 1]


def test_an_owner_that_needs_less_meanwhile_deletes_what_was_to_be_read(store: WatchedStore) -> None:
    topic = StoredTopic(store, "t")
    shard = Shard(topic)
    other = 1 - topic.shard
    shard.owner.claim(other)
    shard.add(1, 0)
    for _ in range(2):
        shard.checkpoint(rows(1, 0))

    def go_on() -> None:
        for _ in range(3):
            shard.owner.write({other: []})
        shard.owner.need_less(topic.shard)
        shard.add(1, 1)

    store.before[names.LOGS_PREFIX] = go_on
    assert entries(store, state_of(store)) == [0, 1]


def test_each_log_is_read_once_for_all_shards(store: WatchedStore) -> None:
    topics = [StoredTopic(store, name) for name in ("t", "u", "v", "w")]
    owner = LogDaemon(store, ObjectLogs(store, AtOnce()), "one")
    for shard in (0, 1):
        owner.claim(shard)
    for entry in range(5):
        owner.write(
            {
                shard: [
                    slot_format.AddRecord(each.topic_id, 1, 0, rows(1, entry)) for each in topics if each.shard == shard
                ]
                for shard in (0, 1)
            }
        )
    states = list(read_states(Root.open(store)))
    assert [entries(store, state) for state in states] == [list(range(5))] * 4
    slots = [key for key in store.read if key.startswith(names.LOGS_PREFIX)]
    highest = names.log_slot_key(owner.log_id, 6)
    assert len(set(slots)) == 5
    assert sorted({key for key in slots if slots.count(key) > 1}) == [highest], "it is looked at again for the end"


@pytest.mark.parametrize("log_form", list(LogForm))
def test_both_forms_of_logs_are_read(tmp_path: Path, log_form: LogForm) -> None:
    with LocalDirectory(tmp_path / "root") as store:
        make_root(store, log_form)
        topic = StoredTopic(store, "t")
        logs = Root.open(store).logs(AtOnce())
        shard = Shard(topic, LogDaemon(store, logs, "one"))
        for entry in range(3):
            shard.add(1, entry)
        assert entries(store, state_of(store)) == [0, 1, 2], "while its owner lives"
        shard.checkpoint(rows(1, 0, 1, 2))
        other = LogDaemon(store, logs, "two")
        other.claim(topic.shard, other.fence(shard.owner))
        other.write({topic.shard: [slot_format.AddRecord(topic.topic_id, 1, 0, rows(1, 3))]})
        assert entries(store, state_of(store)) == [0, 1, 2, 3]
        other.close()


def test_what_is_written_before_a_manifest_is_read_counts(store: WatchedStore) -> None:
    """A row that left a bucket, which was dropped then, is in a slot behind those that were read first."""
    topic = StoredTopic(store, "t")
    shard = Shard(topic)
    shard.add(1, 0)

    def reschedule() -> None:
        shard.write(slot_format.RescheduleRecord(topic.topic_id, 1, 0, rows(1, 0, due_ms=NOW_MS + 5)))

    store.before[names.topic_manifest_prefix(topic.shard, topic.topic_id)] = reschedule
    state = state_of(store)
    assert state.unsealed[0].rows.deliver_at_ms.tolist() == [NOW_MS + 5]


def test_a_manifest_that_was_replaced_with_its_progress_is_read_again(store: WatchedStore) -> None:
    topic = StoredTopic(store, "t")
    live = topic.write(rows(1, 0, 1, 2))
    topic.seal([live], gone={live.object.name: {1: [0]}}, inline=False)
    first = topic.tip().progress_object
    assert first is not None

    def go_on() -> None:
        topic.seal(gone={live.object.name: {1: [1]}}, inline=False)
        store.delete(first.name)

    store.before["/progress/"] = go_on
    assert entries(store, state_of(store)) == [2]


def test_what_is_lost_is_not_asked_for_for_ever(store: WatchedStore) -> None:
    topic = StoredTopic(store, "t")
    live = topic.write(rows(1, 0))
    topic.seal([live], gone={live.object.name: {1: [0]}}, inline=False)
    lost = topic.tip().progress_object
    assert lost is not None
    store.delete(lost.name)
    with pytest.raises(NotFound) as raised:
        state_of(store)
    assert raised.value.key == lost.name


# ---- damage


def damage_section(store: ObjectStore, log_id: str, number: int) -> str:
    """Flips the last bit of a log slot; its key."""
    key = names.log_slot_key(log_id, number)
    body = store.get(key)
    store.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    return key


def test_a_damaged_section_is_named_to_each_topic_of_its_shard_and_the_others_are_read(store: WatchedStore) -> None:
    topics = [StoredTopic(store, name) for name in ("t", "u", "v", "w")]
    assert {topic.shard for topic in topics} == {0, 1}
    owner = LogDaemon(store, ObjectLogs(store, AtOnce()), "one")
    for shard in (0, 1):
        owner.claim(shard)
    owner.write({shard: [] for shard in (0, 1)})
    owner.write({shard: [] for shard in (0, 1)})
    # The last section of a slot is that of shard 1.
    damage_section(store, owner.log_id, 2)
    failures: dict[TopicPlace, StoreError] = {}
    states = list(read_states(Root.open(store), failed=failures.__setitem__))
    assert {state.name for state in states} == {topic.name for topic in topics if topic.shard == 0}
    assert {place.topic_id for place in failures} == {topic.topic_id for topic in topics if topic.shard == 1}
    (reason,) = {str(error) for error in failures.values()}
    assert "shard 1, shard slot 1" in reason
    assert f"section of shard 1 in slot 2 of log {owner.log_id} is damaged" in reason
    with pytest.raises(Damaged, match="shard 1, shard slot 1"):
        list(read_states(Root.open(store)))


def test_a_log_with_a_hole_is_damaged(store: WatchedStore) -> None:
    shard = Shard(StoredTopic(store, "t"))
    for entry in range(3):
        shard.add(1, entry)
    store.delete(names.log_slot_key(shard.owner.log_id, 3))
    with pytest.raises(Damaged, match=r"shard slot 2, after slot 2 and before slot 4: it is missing"):
        state_of(store)


def test_a_log_without_its_end_is_damaged(store: WatchedStore) -> None:
    """Its last slots may have held anything."""
    shard = Shard(StoredTopic(store, "t"))
    number = shard.add(1, 0)
    key = names.log_slot_key(shard.owner.log_id, number)
    store.put(key, b"no slot")
    with pytest.raises(Damaged, match=key):
        state_of(store)
    for each in range(1, number + 1):
        store.delete(names.log_slot_key(shard.owner.log_id, each))
    with pytest.raises(Damaged, match="a manifest names the log, but the log has no slot"):
        state_of(store)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(store: WatchedStore) -> None:
    shard = Shard(StoredTopic(store, "t"))
    shard.add(1, 0)
    shard.checkpoint(rows(1, 0))
    shard.add(1, 1)
    newest = shard.checkpoint(rows(1, 0, 1))
    shard.add(1, 2)
    store.put(newest, b"no checkpoint")
    assert entries(store, state_of(store)) == [0, 1, 2]


def test_a_quarantined_bucket_is_not_read_and_owes_nothing(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S))
    live = topic.write(rows(1, 0, 1))
    topic.seal([live])
    topic.quarantine(live.object.name)
    store.delete(live.object.name)
    shard = Shard(topic)
    shard.add(7, 9)
    shard.add(1, 1)
    state = state_of(store)
    assert [bucket.live.quarantined for bucket in state.buckets] == [True]
    assert entries(store, state) == [1]
    assert live.object.name not in store.read


def test_only_buckets_of_ledgers_that_decisions_name_are_opened(store: WatchedStore) -> None:
    topic = subscribed(store, subscription(S))
    buckets = [topic.write(rows(ledger, 0, 1)) for ledger in (1, 2, 3)]
    topic.seal(buckets)
    shard = Shard(topic)
    shard.add(7, 9)
    for bucket in (buckets[0], buckets[2]):
        store.delete(bucket.object.name)
    shard.acknowledge(S, 2, 0)
    state = state_of(store)
    assert [bucket.present_rows for bucket in state.buckets] == [2, 1, 2]


def test_a_million_decisions_are_followed_by_columns(store: WatchedStore) -> None:
    """Ten slots of 100,000 rows each, half of which leave again."""
    topic = subscribed(store, subscription(S))
    shard = Shard(topic)
    for ledger in range(5):
        entry_id = np.random.default_rng(ledger).permutation(100_000).astype(np.uint64)
        times = np.full(len(entry_id), NOW_MS, np.uint64)
        added = Rows(times, np.full(len(entry_id), ledger, np.uint64), entry_id)
        shard.write(slot_format.AddRecord(topic.topic_id, 1, 0, added))
        shard.write(slot_format.AcknowledgeRecord(topic.topic_id, 1, S, added.take(entry_id % 2 == 0)))
    (loose,) = state_of(store).unsealed
    assert len(loose.rows) == 250_000
    assert (loose.rows.entry_id % 2 == 1).all()
