"""Manifests and policies are read as they were written, and what makes no sense in one is refused."""

from __future__ import annotations

import dataclasses
import enum

import pytest
from google.protobuf.descriptor import EnumDescriptor
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import format_errors, framing, index_ids, manifest, mirror
from storage_backends.formats.generated import bucket_pb2, manifest_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import Progress, RootFormat, ShardManifest, TopicManifest
from storage_backends.formats.position_bitmap import PositionBitmap

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
text = st.text(st.characters(codec="utf-8"), max_size=8)
sha256 = st.binary(max_size=32)
bitmaps = st.lists(st.builds(PositionBitmap, u64, u64, st.binary(max_size=9)), max_size=2).map(tuple)
heads = st.builds(
    manifest.ManifestHead,
    number=u64,
    previous_sha256=sha256,
    commit_id=text,
    writer=text,
    created_ms=u64,
    lineage=st.lists(text, max_size=3).map(tuple),
    orphan_floor=u64,
)
objects = st.builds(manifest.ObjectReference, name=text, base=u64, size_bytes=u64, sha256=sha256)
tombstones = st.builds(manifest.Tombstone, object=objects, removed_in=u64, delete_after_ms=u64, attempts=u32)
checkpoints = st.builds(manifest.CheckpointCut, object=objects, slot=u64, log_id=text, at=u64)
closed_ranges = st.builds(
    manifest.LogRange, log_id=text, epoch=u64, after=u64, through=u64, first_slot=u64, last_slot=u64
)
open_ranges = st.builds(
    manifest.LogRange, log_id=text, epoch=u64, after=u64, through=st.none(), first_slot=u64, last_slot=st.none()
)
live_buckets = st.builds(
    manifest.LiveBucket,
    object=objects,
    rows=u64,
    first_ledger_id=u64,
    last_ledger_id=u64,
    min_deliver_at_ms=u64,
    max_deliver_at_ms=u64,
    hash_low=u64,
    hash_high=u64,
    level=u32,
    subscription_id=u64,
    quarantined=st.booleans(),
    compatible_form=st.booleans(),
    segments=u32,
    damage=text,
    quarantined_slot=u64,
)
redelivery_policies = st.builds(
    manifest.RedeliveryPolicy,
    kind=st.sampled_from(manifest.RedeliveryKind),
    initial_ms=u64,
    step_ms=u64,
    max_ms=u64,
    multiplier=st.floats(allow_nan=False),
    jitter=st.floats(0, 1),
    delays_ms=st.lists(u64, max_size=3).map(tuple),
)
key_shared_policies = st.builds(
    manifest.KeySharedPolicy,
    selector=st.sampled_from(manifest.HashSelector),
    points_per_consumer=st.integers(0, manifest.POINTS_PER_CONSUMER_MAX),
    order=st.sampled_from(manifest.KeyOrder),
    allow_out_of_order_delivery=st.booleans(),
    nack_order=st.sampled_from(manifest.NackOrder),
    nack_block_max_ms=u64,
)
subscription_policies = st.builds(
    manifest.SubscriptionPolicy,
    in_flight_rows_max=st.none() | u32,
    lease_ms=st.none() | u64,
    redelivery=st.none() | redelivery_policies,
    max_redeliver_count=st.none() | u32,
    ack_timeout_ms=st.none() | u64,
    nack_precision_bits=st.none() | st.integers(0, manifest.NACK_PRECISION_BITS_MAX),
    key_shared=st.none() | key_shared_policies,
)
subscriptions = st.builds(
    manifest.Subscription,
    subscription_id=u64,
    name=text,
    since_ms=u64,
    created_slot=u64,
    policy=subscription_policies,
)
topic_policies = st.builds(
    manifest.TopicPolicy,
    delay_max_ms=st.none() | u64,
    min_index_count_per_bucket=st.none() | u32,
    bucket_rows_max=st.none() | u32,
    bucket_bytes_max=st.none() | u64,
    bucket_age_max_ms=st.none() | u64,
    max_time_step_per_bucket_snapshot_segment_seconds=st.none() | u32,
    max_indexes_per_bucket_snapshot_segment=st.none() | st.integers(-1, 9),
    min_indexes_per_bucket_snapshot_segment=st.none() | u32,
    compatible_form=st.none() | st.booleans(),
    shared_index=st.none() | st.booleans(),
    max_num_buckets=st.none() | st.integers(-1, 9),
    merge_buckets_max=st.none() | u32,
    merge_rows_max=st.none() | u64,
    tick_ms=st.none() | u32,
    pending_rows_max=st.none() | u64,
    due_rows_per_second_max=st.none() | u64,
    client_rows_per_second_max=st.none() | u64,
    client_bytes_per_second_max=st.none() | u64,
    two_phase_deletion_enabled=st.none() | st.booleans(),
)
acknowledged = st.builds(manifest.SubscriptionProgress, subscription_id=u64, positions=bitmaps)
bucket_progress = st.builds(
    manifest.BucketProgress, bucket=text, gone=bitmaps, acknowledged=st.lists(acknowledged, max_size=2).map(tuple)
)
some_bytes = st.binary(max_size=9)
nacked = st.builds(
    manifest.NackedRows,
    index_id=u64,
    rows=u32,
    deliver_at_ms=some_bytes,
    ledger_id=some_bytes,
    entry_id=some_bytes,
    key_hash=st.none() | some_bytes,
    redeliver_at_ms=some_bytes,
)
dead_letters = st.builds(
    manifest.DeadLetters,
    rows=u32,
    dead_letter_id=some_bytes,
    ledger_id=some_bytes,
    entry_id=some_bytes,
    batch_index=some_bytes,
    deliver_at_ms=some_bytes,
    key_hash=some_bytes,
    redelivery_count=some_bytes,
    dead_at_ms=some_bytes,
    reason=some_bytes,
    text_index=some_bytes,
    texts=st.lists(text, max_size=2).map(tuple),
)
count_planes = st.builds(manifest.CountPlane, index_id=u64, bit=st.integers(0, 31), positions=bitmaps)
redeliveries = st.builds(
    manifest.Redeliveries,
    subscription_id=u64,
    nacked=st.lists(nacked, max_size=2).map(tuple),
    counts=st.lists(count_planes, max_size=2).map(tuple),
    dead_letters=st.none() | dead_letters,
    last_dead_letter_id=u64,
)
level_rows = st.builds(manifest.LevelRows, index_id=u64, delay_level=u32, positions=bitmaps)
progress = st.builds(
    Progress,
    buckets=st.lists(bucket_progress, max_size=2).map(tuple),
    redeliveries=st.lists(redeliveries, max_size=2).map(tuple),
    levels=st.lists(level_rows, max_size=2).map(tuple),
)
root_formats = st.builds(
    RootFormat,
    format_version=u32,
    shards=u32,
    created_ms=u64,
    root_id=text,
    log_form=st.sampled_from(manifest.LogForm),
)
shard_manifests = st.builds(
    ShardManifest,
    head=heads,
    shard=u32,
    epoch=u64,
    owner=text,
    address=text,
    checkpoint=st.none() | checkpoints,
    previous_checkpoint=st.none() | checkpoints,
    ranges=st.builds(
        lambda closed, opened: (*closed, *opened),
        st.lists(closed_ranges, max_size=2),
        st.lists(open_ranges, max_size=1),
    ),
    tombstones=st.lists(tombstones, max_size=2).map(tuple),
    settled_epoch=u64,
)
topic_manifests = st.builds(
    TopicManifest,
    head=heads,
    topic=text,
    topic_id=text,
    incarnation=u64,
    owner_epoch=u64,
    applied=u64,
    live=st.lists(live_buckets, max_size=2).map(tuple),
    tombstones=st.lists(tombstones, max_size=2).map(tuple),
    subscriptions=st.lists(subscriptions, max_size=2).map(tuple),
    last_subscription_id=u64,
    progress=st.none() | progress,
    progress_object=st.none() | objects,
    properties_object=st.none() | objects,
    deleted=st.booleans(),
    policy=topic_policies,
    delay_levels=st.none() | st.builds(manifest.TopicDelayLevels, table=text, clamp=st.booleans()),
)
dead_objects = st.builds(manifest.DeadObject, object=text, size_bytes=u64, attempts=u32, error=text, given_up_ms=u64)


@given(root_formats)
def test_the_root_format_comes_back_as_it_was(value: RootFormat) -> None:
    assert manifest.decode_root_format(manifest.encode_root_format(value)) == value


@given(shard_manifests)
def test_a_shard_manifest_comes_back_as_it_was(value: ShardManifest) -> None:
    assert manifest.decode_shard_manifest(manifest.encode_shard_manifest(value)) == value


@given(topic_manifests)
def test_a_topic_manifest_comes_back_as_it_was(value: TopicManifest) -> None:
    assert manifest.decode_topic_manifest(manifest.encode_topic_manifest(value)) == value


@given(st.lists(topic_manifests, min_size=1, max_size=4))
def test_manifests_that_are_decoded_together_are_what_they_are_alone(values: list[TopicManifest]) -> None:
    together = manifest.TopicManifestDecoder()
    # The second time every part is known.
    for value in values * 2:
        data = manifest.encode_topic_manifest(value)
        assert together.decode(data) == manifest.decode_topic_manifest(data) == value


@given(st.dictionaries(u64, st.dictionaries(text, text, max_size=3), max_size=3))
def test_properties_come_back_as_they_were(by_id: dict[int, dict[str, str]]) -> None:
    value = manifest.Properties(
        subscriptions=tuple(
            manifest.SubscriptionProperties(subscription_id=number, properties=tuple(sorted(named.items())))
            for number, named in sorted(by_id.items())
        )
    )
    assert manifest.decode_properties(manifest.encode_properties(value)) == value


@given(progress)
def test_a_progress_object_comes_back_as_it_was(value: Progress) -> None:
    assert manifest.decode_progress(manifest.encode_progress(value)) == value


@given(st.builds(manifest.ProbePass, endpoint=text, bucket=text, probe_version=u32, passed_ms=u64))
def test_a_pass_of_the_probe_comes_back_as_it_was(value: manifest.ProbePass) -> None:
    assert manifest.decode_probe_pass(manifest.encode_probe_pass(value)) == value


@given(dead_objects)
def test_a_dead_object_comes_back_as_it_was(value: manifest.DeadObject) -> None:
    assert manifest.decode_dead_object(manifest.encode_dead_object(value)) == value


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (getattr(manifest, "TopicDelayLevels" if name == "DelayLevels" else name), message)
        for name, message in manifest_pb2.DESCRIPTOR.message_types_by_name.items()
        if name != "Property"
    ]
    + [(PositionBitmap, bucket_pb2.PositionBitmap.DESCRIPTOR)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_dataclass_has_exactly_the_fields_of_its_message(cls: type, message: object) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    assert fields == set(message.fields_by_name)  # type: ignore[attr-defined]


def test_an_absent_progress_and_an_empty_one_are_told_apart() -> None:
    message = manifest_pb2.TopicManifest()
    assert mirror.made_from(TopicManifest, message).progress is None
    message.progress.SetInParent()
    assert mirror.made_from(TopicManifest, message).progress == Progress()


def test_a_policy_that_sets_nothing_is_not_written_and_what_is_set_to_zero_is() -> None:
    message = manifest_pb2.Subscription()
    mirror.fill(message, manifest.Subscription(subscription_id=1, name="s", since_ms=0, created_slot=ShardSlot(0)))
    assert not message.HasField("policy")
    policy = manifest.SubscriptionPolicy(in_flight_rows_max=0)
    mirror.fill(
        message,
        manifest.Subscription(subscription_id=1, name="s", since_ms=0, created_slot=ShardSlot(0), policy=policy),
    )
    assert message.policy.HasField("in_flight_rows_max")
    assert not message.policy.HasField("lease_ms")


def test_a_policy_of_key_order_that_sets_nothing_is_told_from_none() -> None:
    message = manifest_pb2.SubscriptionPolicy()
    assert mirror.made_from(manifest.SubscriptionPolicy, message).key_shared is None
    mirror.fill(message, manifest.SubscriptionPolicy(key_shared=manifest.KeySharedPolicy()))
    assert message.HasField("key_shared")
    assert mirror.made_from(manifest.SubscriptionPolicy, message).key_shared == manifest.KeySharedPolicy()


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        (manifest.HashSelector, manifest_pb2.KeySharedPolicy.Selector.DESCRIPTOR),
        (manifest.KeyOrder, manifest_pb2.KeySharedPolicy.Order.DESCRIPTOR),
        (manifest.NackOrder, manifest_pb2.KeySharedPolicy.NackOrder.DESCRIPTOR),
    ],
)
def test_each_choice_of_key_order_has_the_number_of_the_message(
    kind: type[enum.IntEnum], declared: EnumDescriptor
) -> None:
    stored = {value.name: value.number for value in declared.values if value.number}
    assert {choice.name: choice.value for choice in kind} == stored


def test_the_owner_of_what_is_planned_is_no_index() -> None:
    for subscription_id in (1, 2, (1 << 63) - 2):
        assert not index_ids.serves(index_ids.PLANNED_OWNER, subscription_id)
    assert not index_ids.is_of_batch_parts(index_ids.PLANNED_OWNER)


def test_properties_out_of_order_are_refused_at_encode_and_at_decode() -> None:
    """By their names, and by the ids of their subscriptions; no name and no id twice."""
    with pytest.raises(ValueError, match="property 'a' comes after 'b'"):
        manifest.SubscriptionProperties(subscription_id=1, properties=(("b", ""), ("a", "")))
    with pytest.raises(ValueError, match="subscription 1 comes after 2"):
        manifest.Properties(
            subscriptions=tuple(
                manifest.SubscriptionProperties(subscription_id=number, properties=()) for number in (2, 1)
            )
        )
    message = manifest_pb2.Properties()
    for _ in range(2):
        message.subscriptions.add(subscription_id=1)
    assert _refusal_of(message) == "properties is damaged at byte 16: subscription 1 comes after 1"
    del message.subscriptions[1]
    for _ in range(2):
        message.subscriptions[0].properties.add(name="a", value="")
    assert _refusal_of(message) == "properties is damaged at byte 16: property 'a' comes after 'a'"


def _refusal_of(properties: manifest_pb2.Properties) -> str:
    """The first part of what the decoder says."""
    data = framing.frame(manifest.PROPERTIES_MAGIC, 1, properties.SerializeToString())
    with pytest.raises(format_errors.FormatError) as refused:
        manifest.decode_properties(data)
    return str(refused.value).rpartition(": ")[0]


@given(topic_manifests)
def test_the_same_manifest_gives_the_same_bytes(value: TopicManifest) -> None:
    assert manifest.encode_topic_manifest(value) == manifest.encode_topic_manifest(dataclasses.replace(value))
