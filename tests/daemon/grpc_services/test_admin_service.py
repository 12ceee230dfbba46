"""Policies, and what is done to a topic as a whole."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tarry.v1 import admin_pb2 as pb
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2, policy_pb2
from tests.daemon.grpc_services.conftest import Edge

FAR_MS = 2_000_000_000_000


async def add(edge: Edge, *entry_ids: int) -> None:
    request = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=[1], entry_id=entry_ids, deliver_at_ms=[FAR_MS]
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", request)


async def set_policy(edge: Edge, **fields: Any) -> policy_pb2.TopicPolicy:
    request = pb.SetTopicPolicyRequest(topic="t", policy=policy_pb2.TopicPolicy(**fields))
    effective: policy_pb2.TopicPolicy = (await edge.caller.unary("Admin/SetTopicPolicy", request)).effective
    return effective


async def test_a_policy_is_kept_as_it_was_set_and_filled_with_defaults(edge: Edge) -> None:
    effective = await set_policy(edge, bucket_rows_max=60_000, max_indexes_per_bucket_snapshot_segment=-1)
    assert (effective.bucket_rows_max, effective.max_indexes_per_bucket_snapshot_segment) == (60_000, -1)
    assert len(effective.ListFields()) == len(effective.DESCRIPTOR.fields)
    found = await edge.caller.unary("Admin/GetTopicPolicy", pb.GetTopicPolicyRequest(topic="t"))
    assert found.effective == effective
    given = policy_pb2.TopicPolicy(bucket_rows_max=60_000, max_indexes_per_bucket_snapshot_segment=-1)
    assert found.policy == given


async def test_a_policy_is_replaced_as_a_whole(edge: Edge) -> None:
    default = await set_policy(edge)
    await set_policy(edge, delay_max_ms=5, min_indexes_per_bucket_snapshot_segment=0)
    await set_policy(edge, bucket_age_max_ms=7)
    found = await edge.caller.unary("Admin/GetTopicPolicy", pb.GetTopicPolicyRequest(topic="t"))
    assert found.policy == policy_pb2.TopicPolicy(bucket_age_max_ms=7)
    assert await set_policy(edge) == default


@pytest.mark.parametrize(
    ("form", "stored"),
    [
        (policy_pb2.BUCKET_FORM_UNSPECIFIED, None),
        (policy_pb2.BUCKET_FORM_COLUMNAR, False),
        (policy_pb2.BUCKET_FORM_COMPATIBLE, True),
    ],
)
async def test_the_form_of_buckets_is_one_of_two_or_the_default(
    edge: Edge, form: policy_pb2.BucketForm.ValueType, stored: bool | None
) -> None:
    effective = await set_policy(edge, bucket_form=form)
    assert edge.topics["t"].settings.policy.compatible_form is stored
    assert effective.bucket_form == (form or policy_pb2.BUCKET_FORM_COLUMNAR)


async def test_a_seal_says_which_bucket_has_how_many_rows(edge: Edge) -> None:
    await add(edge, 1, 2)
    sealed = await edge.caller.unary("Admin/SealBucket", pb.SealBucketRequest(topic="t"))
    listed = await edge.caller.unary("Inspect/ListBuckets", inspect_pb2.ListBucketsRequest(topic="t"))
    assert [(sealed.rows, sealed.bucket)] == [(each.rows, each.bucket) for each in listed.buckets]
    assert sealed.rows == 2
    again = await edge.caller.unary("Admin/SealBucket", pb.SealBucketRequest(topic="t"))
    assert (again.rows, again.bucket) == (0, "")


async def test_a_merge_says_how_many_buckets_it_replaced_and_how_many_there_are(edge: Edge) -> None:
    for entry in range(4):
        await add(edge, entry)
        await edge.caller.unary("Admin/SealBucket", pb.SealBucketRequest(topic="t"))
    merged = await edge.caller.unary("Admin/MergeBuckets", pb.MergeBucketsRequest(topic="t", buckets_max=2))
    assert (merged.merges, merged.merged_buckets, merged.buckets) == (1, 3, 2)
    again = await edge.caller.unary("Admin/MergeBuckets", pb.MergeBucketsRequest(topic="t", buckets_max=2))
    assert (again.merges, again.merged_buckets, again.buckets) == (0, 0, 2)


async def test_a_deleted_topic_ends_its_streams_and_comes_back_as_a_new_one(edge: Edge) -> None:
    await add(edge, 1, 2)
    create = dispatch_pb2.CreateSubscriptionRequest(topic="t", subscription="s")
    await edge.caller.unary("Dispatch/CreateSubscription", create)
    stream = edge.caller.stream("Dispatch/Subscribe")
    shared = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
    opening = dispatch_pb2.Open(topic="t", subscription="s", type=shared)
    await stream.send(dispatch_pb2.SubscribeRequest(open=opening))
    assert (await stream.receive()).HasField("opened")
    deleted = await edge.caller.unary("Admin/DeleteTopic", pb.DeleteTopicRequest(topic="t"))
    assert (deleted.rows, deleted.incarnation) == (2, 1)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is grpc.StatusCode.NOT_FOUND
    await add(edge, 1)
    again = await edge.caller.unary("Admin/DeleteTopic", pb.DeleteTopicRequest(topic="t"))
    assert (again.rows, again.incarnation) == (1, 2)
