"""Reading topics while their owners go on, and what a decision says of which rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from daemon.shard import checkpoint_store, shard_manifest
from jobs.root import Root, TopicPlace
from jobs.topic_reading import read_states
from jobs.topic_state import TopicState, owed_mask, rows_of
from storage_backends import commit, shard_manifests
from storage_backends.formats import checkpoint_format, names, slot_format
from storage_backends.formats.manifest import CheckpointReference, ShardManifest, Subscription
from storage_backends.formats.position_bitmap import position_bitmaps
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged, NotFound, ObjectStore, StoreError
from storage_backends.topic_manifest import DeleteTopic, SetSubscriptions
from tests._support.fault_places import JOURNAL
from tests.jobs._support.roots import NOW_MS, StoredTopic, make_root

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
    """The journal and the checkpoints of a topic's shard, as its owner of epoch 1 writes them."""

    def __init__(self, topic: StoredTopic) -> None:
        self.topic = topic
        self.slot = 0
        self._log = shard_manifests.shard_log(
            topic.store,
            topic.shard,
            monotonic=lambda: 0.0,
            sleep=lambda _: None,
            jitter=lambda: 0.5,
            new_id=lambda: f"shard-{next(topic._numbers):08}",
        )
        self._commit(shard_manifest.Claim(shard=topic.shard, epoch=1, owner="one", address="one:1"))

    def _commit(self, operation: commit.Operation[ShardManifest]) -> None:
        commit.commit(self._log, operation, writer="owner", created_ms=NOW_MS, deadline_s=1.0)

    def write(self, *records: slot_format.Record) -> None:
        self.slot += 1
        header = slot_format.SlotHeader(
            self.topic.shard, 1, ShardSlot(self.slot), slot_format.SlotKind.DATA, len(records)
        )
        self.topic.store.put(
            names.journal_slot_key(self.topic.shard, self.slot), slot_format.encode_slot(header, records)
        )

    def add(self, ledger: int, *entries: int, index: int = 0, incarnation: int = 1) -> None:
        self.write(slot_format.AddRecord(self.topic.topic_id, incarnation, index, rows(ledger, *entries)))

    def acknowledge(self, by: int, ledger: int, *entries: int) -> None:
        self.write(slot_format.AcknowledgeRecord(self.topic.topic_id, 1, by, rows(ledger, *entries)))

    def checkpoint(self, mutable: Rows) -> None:
        """Everything up to now; what the checkpoint before covers leaves the journal."""
        part = checkpoint_format.TopicPart(self.topic.topic_id, self.topic.name, 1, mutable)
        written = checkpoint_format.Checkpoint(self.topic.shard, 1, ShardSlot(self.slot), (part,))
        tip = self._log.read_tip()
        assert tip is not None
        before = 0 if tip.manifest.checkpoint is None else tip.manifest.checkpoint.replay_from
        unique = f"c{self.slot}"
        reference = checkpoint_store.write_checkpoint(self.topic.store, written, base=tip.number, unique=unique)
        named = CheckpointReference(object=reference, slot=ShardSlot(self.slot), replay_from=ShardSlot(self.slot))
        self._commit(
            shard_manifest.WriteCheckpoint(
                reference=named, replay_from=ShardSlot(self.slot), epoch=1, delete_after_ms=NOW_MS
            )
        )
        for slot in range(1, before + 1):
            self.topic.store.delete(names.journal_slot_key(self.topic.shard, slot))


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


def state_of(store: ObjectStore, name: str = "t") -> TopicState:
    root = Root.open(store)
    (state,) = read_states(root, [root.place_of(name)])
    return state


def entries(store: ObjectStore, state: TopicState) -> list[int]:
    sealed = [rows_of(store, bucket) for bucket in state.buckets]
    return sorted(Rows.concat([*sealed, *(each.rows for each in state.unsealed)]).entry_id.tolist())


def owed(store: ObjectStore, state: TopicState, number: int) -> list[int]:
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

    store.before[JOURNAL] = go_on
    state = state_of(store)
    assert entries(store, state) == [0, 1, 2, 3, 4]
    assert state.applied_slot == 5


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


def test_a_damaged_slot_is_named_to_each_topic_of_its_shard_and_the_others_are_read(store: WatchedStore) -> None:
    topics = [StoredTopic(store, name) for name in ("t", "u", "v", "w")]
    damaged = topics[0].shard
    assert {topic.shard for topic in topics} == {0, 1}
    key = names.journal_slot_key(damaged, 1)
    store.put(key, b"no slot")
    failures: dict[TopicPlace, StoreError] = {}
    states = list(read_states(Root.open(store), failed=failures.__setitem__))
    assert {state.name for state in states} == {topic.name for topic in topics if topic.shard != damaged}
    assert {place.topic_id for place in failures} == {topic.topic_id for topic in topics if topic.shard == damaged}
    assert {error.key for error in failures.values()} == {key}
    with pytest.raises(Damaged, match=key):
        list(read_states(Root.open(store)))


def test_a_journal_with_a_gap_is_damaged(store: WatchedStore) -> None:
    shard = Shard(StoredTopic(store, "t"))
    for entry in range(3):
        shard.add(1, entry)
    store.delete(names.journal_slot_key(shard.topic.shard, 2))
    with pytest.raises(Damaged, match=r"0002: it is missing though a later slot exists"):
        state_of(store)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(store: WatchedStore) -> None:
    shard = Shard(StoredTopic(store, "t"))
    shard.add(1, 0)
    shard.checkpoint(rows(1, 0))
    shard.add(1, 1)
    shard.checkpoint(rows(1, 0, 1))
    shard.add(1, 2)
    (newest,) = [each.key for each in store.list(names.checkpoint_prefix(shard.topic.shard)) if each.key.endswith("c2")]
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
