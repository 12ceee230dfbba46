"""What recovery makes of stored objects: rows and bits of several indexes, and bits under the names of buckets that
were merged since.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.index import Index
from daemon.core.index.position_keys import bitmap_of, keys_of
from daemon.core.index.segments import SegmentCache
from daemon.shard import recovery
from daemon.topic import bucket_lifecycle
from storage_backends import checkpoints, commit
from storage_backends.formats import bucket_format, checkpoint_format, manifest, merge, position_bitmap, slot_format
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.memory_store import MemoryStore
from tests._support.virtual_loop import InlineExecutor

Entries = Iterable[int]

LEDGER = 7
LIMITS = SegmentLimits(time_step_ms=1_000, rows_max=1_000, rows_min=0)
FIRST, OTHER = (
    manifest.Subscription(subscription_id=number, name=f"s{number}", since_ms=0, created_slot=ShardSlot(0))
    for number in (1, 2)
)


def rows_of(entries: Entries) -> Rows:
    """Due in the order of their entries."""
    entry_id = np.array(sorted(entries), np.uint64)
    return Rows(entry_id + np.uint64(1_000), np.full(len(entry_id), LEDGER, np.uint64), entry_id)


def stored(entries: Entries) -> tuple[position_bitmap.PositionBitmap, ...]:
    rows = rows_of(entries)
    return position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)


def bits(name: str, gone: Entries = (), **acknowledged: Entries) -> manifest.BucketProgress:
    """`s1`, `s2`: what that subscription acknowledged."""
    return manifest.BucketProgress(
        bucket=name,
        gone=stored(gone),
        acknowledged=tuple(
            manifest.SubscriptionProgress(subscription_id=int(number[1:]), positions=stored(entries))
            for number, entries in sorted(acknowledged.items())
        ),
    )


def progress_of(*buckets: manifest.BucketProgress) -> manifest.Progress:
    return manifest.Progress(buckets=buckets)


class Store:
    """A store with the buckets of a topic."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._rows: dict[str, Rows] = {}

    def sealed(self, name: str, entries: Entries, subscription_id: int = 0) -> manifest.LiveBucket:
        rows = rows_of(entries)
        encoded = bucket_format.encode_bucket(
            rows, topic="t", subscription_id=subscription_id, limits=LIMITS, compatible=False
        )
        return self._put(name, encoded, subscription_id, 0)

    def _put(
        self, name: str, encoded: bucket_format.EncodedBucket, subscription_id: int, level: int
    ) -> manifest.LiveBucket:
        self.store.put(name, encoded.body)
        return encoded.live_bucket(name, base=1, subscription_id=subscription_id, level=level)

    def merged(
        self, name: str, sources: Sequence[manifest.LiveBucket], progress: manifest.Progress | None = None
    ) -> manifest.LiveBucket:
        """The sources as one bucket, without what is gone by `progress`; they are deleted."""
        read = []
        for live in sources:
            metadata, rows = bucket_format.decode_bucket(self.store.get(live.object.name))
            read.append(merge.Source(live=live, metadata=metadata, rows=rows))
        made = merge.merged(
            read,
            manifest.Progress() if progress is None else progress,
            topic="t",
            subscription_id=sources[0].subscription_id,
            limits=LIMITS,
            compatible=False,
        )
        assert made.encoded is not None
        for live in sources:
            self.store.delete(live.object.name)
        return self._put(name, made.encoded, sources[0].subscription_id, made.level)


def tip_of(
    *live: manifest.LiveBucket,
    applied: int = 10,
    progress: manifest.Progress | None = None,
    subscriptions: tuple[manifest.Subscription, ...] = (FIRST, OTHER),
) -> manifest.TopicManifest:
    return manifest.TopicManifest(
        head=commit.NO_HEAD,
        topic="t",
        topic_id="id",
        incarnation=1,
        owner_epoch=1,
        applied=ShardSlot(applied),
        live=live,
        progress=progress,
        subscriptions=subscriptions,
        last_subscription_id=2,
    )


def restored(
    store: Store, tip: manifest.TopicManifest, tail: checkpoints.TopicTail = checkpoints.NOTHING
) -> TopicState:
    part = checkpoints.counting_part(tip, tail)
    objects = recovery.TopicReads(store.store, InlineExecutor()).objects(tip, part)
    topic = TopicState(
        tip.topic,
        tip.topic_id,
        tip.incarnation,
        tip.subscriptions,
        now_ms=0,
        cache=SegmentCache(1 << 20),
        ready_rows_max=1_000,
    )
    recovery.restore(topic, tip, objects, part, elapsed_ms=0)
    recovery.replay(topic, tip, tail, elapsed_ms=0)
    return topic


def part_of(slot: int, progress: manifest.Progress, **changes: Any) -> checkpoints.TopicTail:
    part = checkpoint_format.TopicPart(
        topic_id="id", topic="t", incarnation=1, mutable_rows=Rows.empty(), progress=progress, slot=ShardSlot(slot)
    )
    return checkpoints.TopicTail(dataclasses.replace(part, **changes))


def entries_in(index: Index, *buckets: str) -> list[int]:
    """The entries that are not gone, in the sealed buckets of those names, or in every bucket."""
    chosen = [index.sealed[name] for name in buckets] if buckets else index.buckets
    found = [index.pages.positions(keys_of(each.present))[1].tolist() for each in chosen]
    return sorted(itertools.chain.from_iterable(found))


def acknowledged_in(topic: TopicState, name: str) -> Mapping[int, list[int]]:
    sets = topic.index.sealed[name].acknowledged
    return {number: topic.index.pages.positions(keys_of(keys))[1].tolist() for number, keys in sets.items() if keys}


# ---- merged buckets


def test_bits_under_the_names_of_sources_count_for_the_rows_that_were_kept_of_them() -> None:
    store = Store()
    first, second = store.sealed("a", range(10)), store.sealed("b", range(10, 20))
    gone_before = progress_of(bits("a", gone=[0]))
    merged = store.merged("d", [first, second], gone_before)
    now = progress_of(bits("a", gone=[0, 1, 2], s1=[5]), bits("b", gone=[10], s1=[11], s2=[12]))
    topic = restored(store, tip_of(merged, progress=now))
    assert entries_in(topic.index, "d") == [*range(3, 10), *range(11, 20)]
    assert acknowledged_in(topic, "d") == {1: [5, 11], 2: [12]}


def test_bits_under_the_own_name_and_under_that_of_a_source_are_joined() -> None:
    store = Store()
    merged = store.merged("d", [store.sealed("a", range(5)), store.sealed("b", range(5, 10))])
    topic = restored(store, tip_of(merged, progress=progress_of(bits("d", gone=[7]), bits("b", gone=[8]))))
    assert entries_in(topic.index) == [0, 1, 2, 3, 4, 5, 6, 9]


def test_a_name_that_is_two_merges_old_still_counts() -> None:
    store = Store()
    inner = store.merged("d", [store.sealed("a", range(5)), store.sealed("b", range(5, 10))])
    outer = store.merged("e", [inner, store.sealed("c", range(10, 15))], progress_of(bits("d", gone=[0])))
    now = progress_of(bits("a", gone=[0, 1], s1=[2]), bits("c", gone=[14]), bits("nobody", gone=[3]))
    topic = restored(store, tip_of(outer, progress=now))
    assert entries_in(topic.index) == list(range(2, 14))
    assert acknowledged_in(topic, "e") == {1: [2]}


def test_a_position_that_left_one_source_and_came_back_in_another_is_there_once() -> None:
    store = Store()
    first, second = store.sealed("a", range(5)), store.sealed("b", [2, 7])
    gone = progress_of(bits("a", gone=[2]))
    merged = store.merged("d", [first, second], gone)
    topic = restored(store, tip_of(merged, progress=gone))
    assert entries_in(topic.index) == [0, 1, 2, 3, 4, 7]


def test_a_bucket_that_was_sealed_and_merged_after_the_checkpoint_takes_its_bits_from_it() -> None:
    store = Store()
    merged = store.merged("d", [store.sealed("a", range(5)), store.sealed("b", range(5, 10))])
    # The checkpoint is of slot 12; the seal of `b`, cut at slot 10, was not known to be committed then.
    part = part_of(
        12,
        progress_of(bits("a", gone=[1]), bits("b", gone=[6], s1=[7])),
        sealing=(checkpoint_format.SealingPart(bucket="b", slot=ShardSlot(10), rows=rows_of(range(5, 10))),),
    )
    topic = restored(store, tip_of(merged, applied=10), part)
    assert entries_in(topic.index) == [0, 2, 3, 4, 5, 7, 8, 9]
    assert acknowledged_in(topic, "d") == {1: [7]}
    assert not topic.index.mutable.present_rows


def test_a_quarantined_merged_bucket_misses_what_was_not_gone_from_its_sources() -> None:
    store = Store()
    merged = store.merged("d", [store.sealed("a", range(5)), store.sealed("b", range(5, 10))])
    damaged = dataclasses.replace(merged, quarantined=True, damage="bad", quarantined_slot=ShardSlot(9))
    topic = restored(store, tip_of(damaged, progress=progress_of(bits("a", gone=range(4)), bits("b", gone=[9]))))
    assert [needed.rows for needed in topic.rebuild_needed()] == [5]


def test_without_a_merged_bucket_no_bitmap_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    live = [store.sealed("a", range(5)), store.sealed("b", range(5, 10))]
    monkeypatch.setattr(merge, "bits_of", lambda *_: pytest.fail("it was mapped"))
    topic = restored(store, tip_of(*live, progress=progress_of(bits("a", gone=[1]), bits("gone", gone=[6]))))
    assert entries_in(topic.index) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_merged_bucket_of_which_only_its_own_name_is_stored_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    merged = store.merged("d", [store.sealed("a", range(5)), store.sealed("b", range(5, 10))])
    monkeypatch.setattr(merge, "bits_of", lambda *_: pytest.fail("it was mapped"))
    topic = restored(store, tip_of(merged, progress=progress_of(bits("d", gone=[1]))))
    assert entries_in(topic.index) == [0, *range(2, 10)]


# ---- own indexes


def test_rows_of_own_indexes_are_restored_from_buckets_checkpoint_and_journal() -> None:
    store = Store()
    shared, own = store.sealed("a", range(5)), store.sealed("b", range(3, 8), subscription_id=1)
    part = part_of(
        12,
        progress_of(bits("b", gone=[4]), bits("c", gone=[20])),
        mutable_rows=rows_of([30]),
        own_rows=(checkpoint_format.OwnRows(1, rows_of([31])), checkpoint_format.OwnRows(2, rows_of([30]))),
        sealing=(
            checkpoint_format.SealingPart(bucket="c", slot=ShardSlot(11), rows=rows_of([20, 21]), subscription_id=2),
            checkpoint_format.SealingPart(bucket="b", slot=ShardSlot(9), rows=rows_of(range(3, 8)), subscription_id=1),
        ),
    )
    add = slot_format.AddRecord("id", 1, 2, rows_of([40]))
    tail = dataclasses.replace(part, slots=(checkpoint_format.CarriedSlot(ShardSlot(13), (add,)),))
    topic = restored(store, tip_of(shared, own, applied=10), tail)
    assert entries_in(topic.indexes[0]) == [0, 1, 2, 3, 4, 30]
    assert entries_in(topic.indexes[1]) == [3, 5, 6, 7, 31]
    assert entries_in(topic.indexes[1], "b") == [3, 5, 6, 7]
    assert entries_in(topic.indexes[2]) == [21, 30, 40]


def test_rows_of_the_own_index_of_a_subscription_that_is_no_more_are_left_out() -> None:
    store = Store()
    part = part_of(
        12,
        progress_of(bits("b", gone=[4])),
        own_rows=(checkpoint_format.OwnRows(1, rows_of([31])), checkpoint_format.OwnRows(2, rows_of([32]))),
        sealing=(checkpoint_format.SealingPart(bucket="c", slot=ShardSlot(11), rows=rows_of([20]), subscription_id=1),),
    )
    records = tuple(slot_format.AddRecord("id", 1, number, rows_of([40])) for number in (1, 2))
    tail = dataclasses.replace(part, slots=(checkpoint_format.CarriedSlot(ShardSlot(13), records),))
    tip = tip_of(store.sealed("b", range(5), subscription_id=1), subscriptions=(OTHER,))
    topic = restored(store, tip, tail)
    assert set(topic.indexes) == {0, 2}
    assert not entries_in(topic.indexes[0])
    assert entries_in(topic.indexes[2]) == [32, 40]


def test_what_a_checkpoint_says_of_several_indexes_is_what_recovery_reads() -> None:
    store = Store()
    topic = restored(store, tip_of(store.sealed("a", range(5)), store.sealed("b", range(5), subscription_id=2)))
    for number, entries in ((0, [10, 11]), (1, [11, 12]), (2, [10])):
        topic.apply(slot_format.AddRecord("id", 1, number, rows_of(entries)), 11, elapsed_ms=0)
    own, leaving = topic.indexes[2], rows_of([1, 2])
    own.remove(bitmap_of(own.pages.find(leaving.ledger_id, leaving.entry_id)))
    begun = topic.indexes.begin_seal(lambda index: f"k{index}", now_ms=0)
    assert [number for number, _ in begun] == [0, 2, 1]
    cuts = tuple(
        bucket_lifecycle.SealCut(
            topic="t", key=memory.name, base=1, slot=ShardSlot(11), rows=memory.snapshot(), index_id=index
        )
        for index, memory in begun
    )
    topic.apply(slot_format.AddRecord("id", 1, 1, rows_of([13])), 12, elapsed_ms=0)
    cut = bucket_lifecycle.TopicCut(
        topic_id="id",
        topic="t",
        incarnation=1,
        indexes=topic.indexes.cut(),
        sealing=cuts,
        redelivery=topic.redelivery_cut(),
    )
    written = checkpoint_format.decode_checkpoint(
        checkpoint_format.encode_checkpoint(
            checkpoint_format.Checkpoint(
                shard=1, epoch=1, slot=ShardSlot(12), topics=(bucket_lifecycle.checkpoint_part(cut),)
            )
        )
    )
    tail = checkpoints.tails_of(written, ())["id"]
    live = [bucket.live for bucket in topic.indexes.sealed.values()]
    again = restored(store, tip_of(*live), tail)
    assert {number: entries_in(index) for number, index in again.indexes.items()} == {
        0: [0, 1, 2, 3, 4, 10, 11],
        1: [11, 12, 13],
        2: [0, 3, 4, 10],
    }
    # Committed since: the rows come from the buckets, of which there is one.
    sealed = bucket_lifecycle.write_bucket(store.store, cuts[2], limits=LIMITS, compatible=False)
    assert sealed is not None
    assert (sealed.live.subscription_id, sealed.live.rows) == (1, 2)
    after = restored(store, tip_of(*live, sealed.live, applied=11), tail)
    assert entries_in(after.indexes[1], "k1") == [11, 12]
    assert entries_in(after.indexes[1]) == [11, 12, 13]
