"""Objects of each version that a former build wrote: this build must read the same values from them.

A new version adds files; those that are here never change. Running this file as a module (`python -m`) writes the
missing ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    index_ids,
    log_slot_format,
    manifest,
    names,
    position_bitmap,
    redelivery_columns,
    slot_format,
)
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, ShardSlot, Writer
from storage_backends.formats.manifest import LogForm
from storage_backends.formats.row_columns import Rows, id_hash
from storage_backends.formats.segment import SegmentLimits
from tests.storage_backends._support.log_slots import LOG_ID, OTHER_LOG_ID
from tests.storage_backends.formats._support import deletion_examples, examples

GOLDEN = Path(__file__).parent / "golden"
COUNT = 120


def golden_rows() -> Rows:
    """120 rows of two ledgers, worked out without a generator."""
    number = np.arange(COUNT, dtype=np.uint64)
    return Rows(
        np.uint64(examples.NOON_MS) + number * np.uint64(7919) % np.uint64(100_003),
        np.uint64(5) + number // np.uint64(80),
        number * np.uint64(3) % np.uint64(80) + number // np.uint64(80) * np.uint64(1000),
        (number * np.uint64(2_654_435_761) % np.uint64(1 << 32)).astype(np.uint32),
    )


def golden_rows_with_ids() -> Rows:
    """The same rows; three of four have a schedule id."""
    listed = [f"order-{number}/\u20ac".encode() if number % 4 else b"" for number in range(COUNT)]
    return dataclasses.replace(golden_rows(), schedule_ids=examples.ids_of(listed))


def golden_positions(count: int) -> tuple[position_bitmap.PositionBitmap, ...]:
    rows = golden_rows()
    return position_bitmap.position_bitmaps(rows.ledger_id[:count], rows.entry_id[:count])


def golden_bucket(compatible: bool) -> bytes:
    limits = SegmentLimits(time_step_ms=10_000, rows_max=50, rows_min=10)
    return bucket_format.encode_bucket(
        golden_rows().sorted_by_due(), topic="orders", subscription_id=0, limits=limits, compatible=compatible
    ).body


def golden_records() -> tuple[slot_format.Record, ...]:
    rows = golden_rows()
    acknowledged = Rows(rows.deliver_at_ms[:9], rows.ledger_id[:9], rows.entry_id[:9])
    return (
        slot_format.AddRecord("id", 1, 0, rows),
        slot_format.AcknowledgeRecord("id", 1, 2, acknowledged),
        slot_format.GoneRecord("id", 1, 0, slot_format.GoneReason.NO_SUBSCRIPTION, golden_positions(4)),
        slot_format.WaiveRecord("id", 1, 2, golden_positions(COUNT)),
    )


def golden_withdrawals() -> tuple[slot_format.Record, ...]:
    rows = golden_rows()
    acknowledged = Rows(rows.deliver_at_ms[:9], rows.ledger_id[:9], rows.entry_id[:9])
    return (
        slot_format.RescheduleRecord("id", 1, 2, rows),
        slot_format.GoneRecord("id", 1, 2, slot_format.GoneReason.CANCELLED, golden_positions(4)),
        slot_format.AcknowledgeRecord("id", 1, 2, acknowledged, index_id=2),
    )


def golden_slot_of_withdrawals() -> bytes:
    return slot_format.encode_slot(slot_format.SlotHeader(3, 4, ShardSlot(5), 3), golden_withdrawals())


def golden_slot_of_redeliveries() -> bytes:
    records = examples.redelivery_records(golden_rows())
    return slot_format.encode_slot(slot_format.SlotHeader(3, 4, ShardSlot(5), len(records)), records)


def golden_slot_of_deletions() -> bytes:
    decided = deletion_examples.one_of_each_record()
    records = golden_records()[:1]
    header = slot_format.SlotHeader(3, 4, ShardSlot(5), len(records) + len(decided))
    return slot_format.encode_slot(header, records, decided)


def golden_checkpoint_of_deletions() -> bytes:
    return checkpoint_format.encode_checkpoint(
        checkpoint_format.Checkpoint(3, 4, ShardSlot(7), (), deletion_examples.a_state())
    )


def golden_topic_manifest_of_redeliveries() -> manifest.TopicManifest:
    policies = (
        manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.CONSTANT, initial_ms=7),
        manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.LINEAR, initial_ms=7, step_ms=8, max_ms=9),
        manifest.RedeliveryPolicy(
            kind=manifest.RedeliveryKind.EXPONENTIAL, initial_ms=7, max_ms=9, multiplier=1.5, jitter=0.25
        ),
        manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.LIST, delays_ms=(1, 2, 3)),
        manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.LADDER),
    )
    return dataclasses.replace(
        golden_limits(),
        policy=manifest.TopicPolicy(),
        subscriptions=tuple(
            manifest.Subscription(
                subscription_id=number,
                name=f"s{number}",
                since_ms=4,
                created_slot=ShardSlot(5),
                policy=manifest.SubscriptionPolicy(
                    redelivery=policy, max_redeliver_count=0, ack_timeout_ms=100, nack_precision_bits=number
                ),
            )
            for number, policy in enumerate(policies, start=1)
        ),
        delay_levels=manifest.TopicDelayLevels(table="1s 5s", clamp=False),
        progress=examples.redelivery_progress(golden_rows()),
    )


def golden_topic_manifest_of_key_order() -> manifest.TopicManifest:
    policies = (
        manifest.KeySharedPolicy(),
        manifest.KeySharedPolicy(selector=manifest.HashSelector.AUTO_SPLIT, allow_out_of_order_delivery=True),
        manifest.KeySharedPolicy(
            selector=manifest.HashSelector.STICKY,
            points_per_consumer=7,
            order=manifest.KeyOrder.LAST_SENT_POSITION,
            nack_order=manifest.NackOrder.BLOCK_KEY,
            nack_block_max_ms=8,
        ),
    )
    return dataclasses.replace(
        golden_limits(),
        policy=manifest.TopicPolicy(),
        subscriptions=tuple(
            manifest.Subscription(
                subscription_id=number,
                name=f"s{number}",
                since_ms=4,
                created_slot=ShardSlot(5),
                policy=manifest.SubscriptionPolicy(key_shared=policy),
            )
            for number, policy in enumerate(policies, start=1)
        ),
        last_subscription_id=len(policies),
    )


def golden_kept() -> tuple[bucket_format.KeptRows, ...]:
    return (
        bucket_format.KeptRows(source="a", positions=golden_positions(9)),
        bucket_format.KeptRows(source="b", positions=golden_positions(COUNT)),
    )


def golden_merged_bucket() -> bytes:
    rows = golden_rows().sorted_by_due()
    return bucket_format.encode_bucket(
        rows, topic="orders", subscription_id=2, limits=SegmentLimits(), compatible=False, kept=golden_kept()
    ).body


def golden_slot() -> bytes:
    return slot_format.encode_slot(slot_format.SlotHeader(3, 4, ShardSlot(5), 4), golden_records())


def golden_progress() -> manifest.Progress:
    positions = golden_positions(COUNT)
    acknowledged = manifest.SubscriptionProgress(subscription_id=1, positions=positions[:1])
    return manifest.Progress(
        buckets=(manifest.BucketProgress(bucket="b", gone=positions, acknowledged=(acknowledged,)),)
    )


def golden_object() -> manifest.ObjectReference:
    return manifest.ObjectReference(name="key", base=3, size_bytes=4, sha256=bytes(32))


def golden_head() -> manifest.ManifestHead:
    return manifest.ManifestHead(
        number=9,
        previous_sha256=bytes(32),
        commit_id="c2",
        writer="w",
        created_ms=7,
        lineage=("c1", "c2"),
        orphan_floor=2,
    )


def golden_topic_manifest() -> manifest.TopicManifest:
    live = manifest.LiveBucket(
        object=golden_object(),
        rows=COUNT,
        first_ledger_id=5,
        last_ledger_id=6,
        min_deliver_at_ms=1,
        max_deliver_at_ms=2,
        hash_low=11,
        hash_high=12,
        level=1,
        subscription_id=3,
        quarantined=True,
        compatible_form=True,
        segments=4,
        damage="a segment is missing",
        quarantined_slot=ShardSlot(2),
    )
    policy = manifest.SubscriptionPolicy(in_flight_rows_max=0, lease_ms=30_000)
    return manifest.TopicManifest(
        head=golden_head(),
        topic="orders",
        topic_id="id",
        incarnation=1,
        owner_epoch=2,
        applied=ShardSlot(3),
        live=(live,),
        tombstones=(manifest.Tombstone(object=golden_object(), removed_in=8, delete_after_ms=9, attempts=1),),
        subscriptions=(
            manifest.Subscription(subscription_id=1, name="s", since_ms=4, created_slot=ShardSlot(5), policy=policy),
        ),
        last_subscription_id=1,
        progress=golden_progress(),
        progress_object=golden_object(),
        deleted=True,
        policy=manifest.TopicPolicy(
            delay_max_ms=0, bucket_rows_max=9, max_indexes_per_bucket_snapshot_segment=-1, compatible_form=False
        ),
        properties_object=golden_object(),
    )


def golden_properties() -> manifest.Properties:
    of_first = manifest.SubscriptionProperties(subscription_id=1, properties=(("a", "1"), ("b", "")))
    of_other = manifest.SubscriptionProperties(subscription_id=3, properties=(("team", "\u20ac"),))
    return manifest.Properties(subscriptions=(of_first, of_other))


def golden_shard_manifest() -> manifest.ShardManifest:
    newest = manifest.CheckpointCut(object=golden_object(), slot=6, log_id=LOG_ID, at=9)
    previous = manifest.CheckpointCut(object=golden_object(), slot=3, log_id=OTHER_LOG_ID, at=12)
    closed = manifest.LogRange(log_id=OTHER_LOG_ID, epoch=3, after=7, through=14, first_slot=2, last_slot=4)
    owned = manifest.LogRange(log_id=LOG_ID, epoch=4, after=1, through=None, first_slot=5, last_slot=None)
    return manifest.ShardManifest(
        head=golden_head(),
        shard=3,
        epoch=4,
        owner="d1",
        address="127.0.0.1:7461",
        settled_epoch=2,
        ranges=(closed, owned),
        checkpoint=newest,
        previous_checkpoint=previous,
    )


def golden_root_format() -> manifest.RootFormat:
    return manifest.RootFormat(format_version=2, shards=16, created_ms=7, root_id="r", log_form=LogForm.FILES)


def golden_log_slot() -> bytes:
    header = LogSlotHeader(
        log_id=LOG_ID, number=9, kind=LogSlotKind.DATA, heads={0: Head(4, 6), 2: Head(3, 8), 3: Head(4, 2)}
    )
    return log_slot_format.encode_log_slot(header, {0: b"section of shard 0", 3: b"section of shard 3"})


def golden_fence() -> bytes:
    writer = Writer("d2", "127.0.0.1:7462", "0.1.0")
    header = LogSlotHeader(log_id=LOG_ID, number=10, kind=LogSlotKind.FENCE, heads={0: Head(4, 6)}, writer=writer)
    return log_slot_format.encode_log_slot(header)


def golden_checkpoint() -> bytes:
    rows = golden_rows()
    part = checkpoint_format.TopicPart(
        "id",
        "orders",
        1,
        rows,
        (checkpoint_format.SealingPart("b", ShardSlot(6), rows.take(slice(0, 50))),),
        golden_progress(),
    )
    carried = (
        checkpoint_format.CarriedSlot(ShardSlot(6), golden_records()[:2]),
        checkpoint_format.CarriedSlot(ShardSlot(7), golden_records()[2:]),
    )
    carrying = checkpoint_format.TopicPart(
        "id", "orders", 1, rows.take(slice(0, 0)), slot=ShardSlot(5), carried=carried
    )
    return checkpoint_format.encode_checkpoint(checkpoint_format.Checkpoint(3, 4, ShardSlot(7), (part, carrying)))


KNOWN = {names.topic_id("orders"): 12, names.topic_id("flights"): 0}


def golden_checkpoint_of_known_topics() -> bytes:
    return checkpoint_format.encode_checkpoint(checkpoint_format.Checkpoint(3, 4, ShardSlot(7), known=KNOWN))


def golden_checkpoint_of_own_rows() -> bytes:
    rows = golden_rows()
    sealing = checkpoint_format.SealingPart("b", ShardSlot(6), rows.take(slice(0, 50)), 2)
    own = checkpoint_format.OwnRows(2, rows.take(slice(50, COUNT)))
    part = checkpoint_format.TopicPart("id", "orders", 1, rows.take(slice(0, 0)), (sealing,), own_rows=(own,))
    return checkpoint_format.encode_checkpoint(checkpoint_format.Checkpoint(3, 4, ShardSlot(7), (part,)))


def golden_dead_object() -> manifest.DeadObject:
    return manifest.DeadObject(object="key", size_bytes=4, attempts=10, error="denied", given_up_ms=9)


def golden_probe_pass() -> manifest.ProbePass:
    return manifest.ProbePass(endpoint="http://127.0.0.1:9000", bucket="orders", probe_version=1, passed_ms=9)


def golden_two_phase_deletion() -> manifest.TopicManifest:
    policy = manifest.TopicPolicy(two_phase_deletion_enabled=False)
    return dataclasses.replace(golden_limits(), policy=policy)


def golden_limits() -> manifest.TopicManifest:
    policy = manifest.TopicPolicy(
        shared_index=False,
        max_num_buckets=-1,
        merge_buckets_max=10,
        merge_rows_max=2_000_000,
        tick_ms=100,
        pending_rows_max=0,
        due_rows_per_second_max=5,
        client_rows_per_second_max=6,
        client_bytes_per_second_max=7,
    )
    return manifest.TopicManifest(
        head=golden_head(),
        topic="orders",
        topic_id="id",
        incarnation=1,
        owner_epoch=2,
        applied=ShardSlot(3),
        policy=policy,
    )


def golden_bucket_with_ids() -> bytes:
    limits = SegmentLimits(time_step_ms=10_000, rows_max=50, rows_min=10)
    rows = golden_rows_with_ids().sorted_by_due()
    return bucket_format.encode_bucket(rows, topic="orders", subscription_id=0, limits=limits, compatible=False).body


def golden_records_with_ids() -> tuple[slot_format.Record, ...]:
    rows = golden_rows_with_ids()
    return (*examples.redelivery_records(rows)[:-1], slot_format.RescheduleRecord("id", 1, 0, rows))


def golden_slot_with_ids() -> bytes:
    records = golden_records_with_ids()
    return slot_format.encode_slot(slot_format.SlotHeader(3, 4, ShardSlot(5), len(records)), records)


def golden_checkpoint_with_ids() -> bytes:
    rows = golden_rows_with_ids()
    part = checkpoint_format.TopicPart(
        "id",
        "orders",
        1,
        rows,
        (checkpoint_format.SealingPart("b", ShardSlot(4), rows.take(slice(0, 50))),),
        examples.redelivery_progress(rows),
        ShardSlot(5),
        (checkpoint_format.CarriedSlot(ShardSlot(6), golden_records_with_ids()),),
        (checkpoint_format.OwnRows(2, rows.take(slice(50, COUNT))),),
    )
    return checkpoint_format.encode_checkpoint(checkpoint_format.Checkpoint(3, 4, ShardSlot(7), (part,)))


def golden_topic_manifest_with_ids() -> manifest.TopicManifest:
    before = golden_topic_manifest()
    live = dataclasses.replace(before.live[0], id_rows=90, id_hash_low=13, id_hash_high=14)
    progress = examples.redelivery_progress(golden_rows_with_ids())
    return dataclasses.replace(before, live=(live,), progress=progress, requires=("schedule_ids",))


def golden_shard_manifest_with_ids() -> manifest.ShardManifest:
    return dataclasses.replace(golden_shard_manifest(), requires=("schedule_ids",))


OBJECTS: dict[str, Callable[[], bytes]] = {
    "bucket-ids-2.bin": golden_bucket_with_ids,
    "slot-ids-2.bin": golden_slot_with_ids,
    "checkpoint-ids-2.bin": golden_checkpoint_with_ids,
    "progress-ids-2.bin": lambda: manifest.encode_progress(examples.redelivery_progress(golden_rows_with_ids())),
    "topic-manifest-ids-2.bin": lambda: manifest.encode_topic_manifest(golden_topic_manifest_with_ids()),
    "shard-manifest-ids-2.bin": lambda: manifest.encode_shard_manifest(golden_shard_manifest_with_ids()),
    "bucket-columnar-1.bin": lambda: golden_bucket(compatible=False),
    "bucket-compatible-1.bin": lambda: golden_bucket(compatible=True),
    "bucket-merged-1.bin": golden_merged_bucket,
    "slot-1.bin": golden_slot,
    "slot-withdrawals-1.bin": golden_slot_of_withdrawals,
    "slot-redeliveries-1.bin": golden_slot_of_redeliveries,
    "topic-manifest-redeliveries-1.bin": lambda: manifest.encode_topic_manifest(
        golden_topic_manifest_of_redeliveries()
    ),
    "topic-manifest-key-order-1.bin": lambda: manifest.encode_topic_manifest(golden_topic_manifest_of_key_order()),
    "root-format-2.bin": lambda: manifest.encode_root_format(golden_root_format()),
    "shard-manifest-1.bin": lambda: manifest.encode_shard_manifest(golden_shard_manifest()),
    "topic-manifest-1.bin": lambda: manifest.encode_topic_manifest(golden_topic_manifest()),
    "log-slot-1.bin": golden_log_slot,
    "log-slot-fence-1.bin": golden_fence,
    "progress-1.bin": lambda: manifest.encode_progress(golden_progress()),
    "properties-1.bin": lambda: manifest.encode_properties(golden_properties()),
    "topic-manifest-limits-1.bin": lambda: manifest.encode_topic_manifest(golden_limits()),
    "topic-manifest-two-phase-deletion-1.bin": lambda: manifest.encode_topic_manifest(golden_two_phase_deletion()),
    "dead-object-1.bin": lambda: manifest.encode_dead_object(golden_dead_object()),
    "probe-pass-1.bin": lambda: manifest.encode_probe_pass(golden_probe_pass()),
    "checkpoint-1.bin": golden_checkpoint,
    "checkpoint-own-rows-1.bin": golden_checkpoint_of_own_rows,
    "checkpoint-known-topics-1.bin": golden_checkpoint_of_known_topics,
    "slot-deletions-1.bin": golden_slot_of_deletions,
    "checkpoint-deletions-1.bin": golden_checkpoint_of_deletions,
}


def stored(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", ["bucket-columnar-1.bin", "bucket-compatible-1.bin"])
def test_a_bucket_of_version_1_is_read(name: str) -> None:
    metadata, rows = bucket_format.decode_bucket(stored(name))
    assert examples.tuples(rows) == examples.tuples(golden_rows().sorted_by_due())
    assert metadata.topic == "orders"
    assert metadata.positions == position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)


def test_a_merged_bucket_of_version_1_is_read() -> None:
    metadata, rows = bucket_format.decode_bucket(stored("bucket-merged-1.bin"))
    assert examples.tuples(rows) == examples.tuples(golden_rows().sorted_by_due())
    assert (metadata.subscription_id, metadata.kept) == (2, golden_kept())


def test_a_slot_of_withdrawals_of_version_1_is_read() -> None:
    _, (rescheduled, cancelled, acknowledged) = slot_format.decode_slot(stored("slot-withdrawals-1.bin"))
    assert isinstance(rescheduled, slot_format.RescheduleRecord)
    assert examples.tuples(rescheduled.rows) == examples.tuples(golden_rows())
    assert isinstance(cancelled, slot_format.GoneRecord)
    assert (cancelled.reason, cancelled.positions) == (slot_format.GoneReason.CANCELLED, golden_positions(4))
    assert isinstance(acknowledged, slot_format.AcknowledgeRecord)
    assert acknowledged.index_id == 2
    assert {record.subscription_id for record in (rescheduled, cancelled, acknowledged)} == {2}


def test_a_slot_of_redeliveries_of_version_1_is_read() -> None:
    _, records = slot_format.decode_slot(stored("slot-redeliveries-1.bin"))
    expected = examples.redelivery_records(golden_rows())
    assert [examples.plain(record) for record in records] == [examples.plain(record) for record in expected]


def test_a_topic_manifest_of_redeliveries_of_version_1_is_read() -> None:
    found = manifest.decode_topic_manifest(stored("topic-manifest-redeliveries-1.bin"))
    assert found.progress is not None
    assert dataclasses.replace(found, progress=None) == dataclasses.replace(
        golden_topic_manifest_of_redeliveries(), progress=None
    )
    (of_subscription,), (level,) = found.progress.redeliveries, found.progress.levels
    assert (of_subscription.subscription_id, of_subscription.last_dead_letter_id) == (2, 1_000)
    (nacked,) = of_subscription.nacked
    rows, times = redelivery_columns.decode_nacked(nacked)
    assert examples.tuples(rows) == examples.tuples(golden_rows())
    assert times.tolist() == (golden_rows().deliver_at_ms + np.uint64(256)).tolist()
    assert [(plane.index_id, plane.bit, plane.positions) for plane in of_subscription.counts] == [
        (0, 0, golden_positions(COUNT)),
        (2, 3, golden_positions(COUNT)),
    ]
    assert of_subscription.dead_letters is not None
    letters = redelivery_columns.decode_dead_letters(of_subscription.dead_letters)
    assert letters.dead_letter_id.tolist() == list(range(3, 3 + COUNT))
    assert letters.batch_index[:3].tolist() == [0, index_ids.NO_BATCH_INDEX, 2]
    assert (letters.text_index[:3].tolist(), letters.texts) == ([0, 1, 0], ("", "no such order"))
    assert (level.index_id, level.delay_level, level.positions) == (0, 18, golden_positions(COUNT))


def test_what_was_written_before_there_were_redeliveries_says_nothing_of_them() -> None:
    subscription = manifest.decode_topic_manifest(stored("topic-manifest-1.bin")).subscriptions[0]
    policy = subscription.policy
    named = (policy.redelivery, policy.max_redeliver_count, policy.ack_timeout_ms, policy.nack_precision_bits)
    assert named == (None, None, None, None)
    assert policy.key_shared is None
    assert manifest.decode_topic_manifest(stored("topic-manifest-1.bin")).delay_levels is None
    progress = manifest.decode_progress(stored("progress-1.bin"))
    assert (progress.redeliveries, progress.levels) == ((), ())
    _, records = slot_format.decode_slot(stored("slot-1.bin"))
    assert isinstance(records[0], slot_format.AddRecord)
    assert records[0].delay_level == 0
    assert isinstance(records[1], slot_format.AcknowledgeRecord)
    assert records[1].index_id == index_ids.SHARED


def test_a_slot_of_version_1_is_read() -> None:
    header, records = slot_format.decode_slot(stored("slot-1.bin"))
    assert header == slot_format.SlotHeader(3, 4, ShardSlot(5), 4)
    assert_golden(records)


def assert_golden(records: tuple[slot_format.Record, ...]) -> None:
    add, acknowledge, gone, waive = records
    expected = golden_rows()
    assert isinstance(add, slot_format.AddRecord)
    assert examples.tuples(add.rows) == examples.tuples(expected)
    assert isinstance(acknowledge, slot_format.AcknowledgeRecord)
    assert acknowledge.subscription_id == 2
    assert acknowledge.rows.entry_id.tolist() == expected.entry_id[:9].tolist()
    assert isinstance(gone, slot_format.GoneRecord)
    assert gone.reason is slot_format.GoneReason.NO_SUBSCRIPTION
    assert gone.positions == golden_positions(4)
    assert isinstance(waive, slot_format.WaiveRecord)
    assert (waive.subscription_id, waive.row_count) == (2, COUNT)
    assert waive.positions == golden_positions(COUNT)


def test_manifests_are_read() -> None:
    assert manifest.decode_root_format(stored("root-format-2.bin")) == golden_root_format()
    assert manifest.decode_shard_manifest(stored("shard-manifest-1.bin")) == golden_shard_manifest()
    assert manifest.decode_topic_manifest(stored("topic-manifest-1.bin")) == golden_topic_manifest()
    assert manifest.decode_topic_manifest(stored("topic-manifest-limits-1.bin")) == golden_limits()
    of_deletion = manifest.decode_topic_manifest(stored("topic-manifest-two-phase-deletion-1.bin"))
    assert of_deletion == golden_two_phase_deletion()
    of_key_order = manifest.decode_topic_manifest(stored("topic-manifest-key-order-1.bin"))
    assert of_key_order == golden_topic_manifest_of_key_order()
    assert manifest.decode_progress(stored("progress-1.bin")) == golden_progress()
    assert manifest.decode_properties(stored("properties-1.bin")) == golden_properties()
    assert manifest.decode_dead_object(stored("dead-object-1.bin")) == golden_dead_object()
    assert manifest.decode_probe_pass(stored("probe-pass-1.bin")) == golden_probe_pass()


def test_a_checkpoint_of_version_1_is_read() -> None:
    value = checkpoint_format.decode_checkpoint(stored("checkpoint-1.bin"))
    assert (value.shard, value.epoch, value.slot) == (3, 4, 7)
    part, carrying = value.topics
    assert (part.topic_id, part.topic, part.incarnation) == ("id", "orders", 1)
    assert examples.tuples(part.mutable_rows) == examples.tuples(golden_rows())
    assert part.progress == golden_progress()
    assert (part.slot, part.carried) == (None, ())
    assert carrying.slot == 5
    assert [carried.slot for carried in carrying.carried] == [6, 7]
    records = [record for carried in carrying.carried for record in carried.records]
    assert_golden(tuple(record.decoded() for record in records if isinstance(record, slot_format.StoredRecord)))
    (sealing,) = part.sealing
    assert (sealing.bucket, sealing.slot) == ("b", 6)
    assert examples.tuples(sealing.rows) == examples.tuples(golden_rows().take(slice(0, 50)))


def test_own_rows_in_a_checkpoint_of_version_1_are_read() -> None:
    (part,) = checkpoint_format.decode_checkpoint(stored("checkpoint-own-rows-1.bin")).topics
    (sealing,) = part.sealing
    (own,) = part.own_rows
    assert (len(part.mutable_rows), sealing.subscription_id, own.subscription_id) == (0, 2, 2)
    assert examples.tuples(sealing.rows) == examples.tuples(golden_rows().take(slice(0, 50)))
    assert examples.tuples(own.rows) == examples.tuples(golden_rows().take(slice(50, COUNT)))


def test_the_known_topics_of_a_checkpoint_of_version_1_are_read() -> None:
    assert checkpoint_format.decode_checkpoint(stored("checkpoint-known-topics-1.bin")).known == KNOWN
    assert checkpoint_format.decode_checkpoint(stored("checkpoint-1.bin")).known == {}, "it is of before"


def test_a_slot_of_deletions_of_version_1_is_read() -> None:
    slot = slot_format.read_slot(stored("slot-deletions-1.bin"))
    (added,) = (record.decoded() for record in slot.records)
    assert isinstance(added, slot_format.AddRecord)
    expected = deletion_examples.one_of_each_record()
    assert [deletion_examples.plain(each) for each in slot.deletions] == list(map(deletion_examples.plain, expected))


def test_deletions_in_a_checkpoint_of_version_1_are_read() -> None:
    state = checkpoint_format.decode_checkpoint(stored("checkpoint-deletions-1.bin")).deletions
    assert state is not None
    assert deletion_examples.plain(state) == deletion_examples.plain(deletion_examples.a_state())


def test_what_was_written_before_there_were_deletions_says_nothing_of_them() -> None:
    assert slot_format.read_slot(stored("slot-1.bin")).deletions == ()
    assert checkpoint_format.decode_checkpoint(stored("checkpoint-1.bin")).deletions is None


def test_a_bucket_with_ids_of_version_2_is_read() -> None:
    metadata, rows = bucket_format.decode_bucket(stored("bucket-ids-2.bin"))
    expected = golden_rows_with_ids().sorted_by_due()
    assert examples.tuples(rows) == examples.tuples(expected)
    assert (metadata.id_hash_low, metadata.id_hash_high) == id_hash(expected)
    has_id = [row[-1] != b"" for row in examples.tuples(expected)]
    assert metadata.id_positions == position_bitmap.position_bitmaps(rows.ledger_id[has_id], rows.entry_id[has_id])


def test_a_slot_with_ids_of_version_2_is_read() -> None:
    _, records = slot_format.decode_slot(stored("slot-ids-2.bin"))
    assert [examples.plain(each) for each in records] == [examples.plain(each) for each in golden_records_with_ids()]


def test_a_checkpoint_with_ids_of_version_2_is_read() -> None:
    rows = golden_rows_with_ids()
    (part,) = checkpoint_format.decode_checkpoint(stored("checkpoint-ids-2.bin")).topics
    assert examples.tuples(part.mutable_rows) == examples.tuples(rows)
    assert examples.tuples(part.sealing[0].rows) == examples.tuples(rows.take(slice(0, 50)))
    assert examples.tuples(part.own_rows[0].rows) == examples.tuples(rows.take(slice(50, COUNT)))
    (carried,) = part.carried
    records = [each.decoded() for each in carried.records if isinstance(each, slot_format.StoredRecord)]
    assert [examples.plain(each) for each in records] == [examples.plain(each) for each in golden_records_with_ids()]
    assert_ids_of(part.progress)


def test_manifests_and_progress_with_ids_of_version_2_are_read() -> None:
    assert manifest.decode_shard_manifest(stored("shard-manifest-ids-2.bin")) == golden_shard_manifest_with_ids()
    found = manifest.decode_topic_manifest(stored("topic-manifest-ids-2.bin"))
    expected = golden_topic_manifest_with_ids()
    assert dataclasses.replace(found, progress=None) == dataclasses.replace(expected, progress=None)
    assert found.progress is not None
    assert_ids_of(found.progress)
    assert_ids_of(manifest.decode_progress(stored("progress-ids-2.bin")))


def assert_ids_of(progress: manifest.Progress) -> None:
    (of_subscription,) = progress.redeliveries
    rows, _ = redelivery_columns.decode_nacked(of_subscription.nacked[0])
    assert examples.tuples(rows) == examples.tuples(golden_rows_with_ids())
    assert of_subscription.dead_letters is not None
    letters = redelivery_columns.decode_dead_letters(of_subscription.dead_letters)
    expected = golden_rows_with_ids().schedule_ids
    assert letters.schedule_ids is not None
    assert expected is not None
    assert letters.schedule_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("name", OBJECTS)
def test_the_version_that_its_name_says_is_that_of_the_object(name: str) -> None:
    assert stored(name)[4] == int(name.removesuffix(".bin").rpartition("-")[2])


def test_nothing_else_is_stored_there() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(OBJECTS)


def test_log_slots_of_version_1_are_read() -> None:
    slot = log_slot_format.decode_log_slot(stored("log-slot-1.bin"))
    assert (slot.header.log_id, slot.header.number, slot.header.kind) == (LOG_ID, 9, LogSlotKind.DATA)
    assert dict(slot.header.heads) == {0: Head(4, 6), 2: Head(3, 8), 3: Head(4, 2)}
    assert {shard: slot.section(shard) for shard in slot.shards} == {0: b"section of shard 0", 3: b"section of shard 3"}
    fence = log_slot_format.decode_log_slot(stored("log-slot-fence-1.bin"))
    assert (fence.header.kind, fence.header.writer) == (LogSlotKind.FENCE, Writer("d2", "127.0.0.1:7462", "0.1.0"))
    assert fence.shards == ()


if __name__ == "__main__":
    for name, encode in OBJECTS.items():
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(encode())
