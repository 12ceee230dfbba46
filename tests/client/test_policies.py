"""Policies to and from their messages: what is not set stays unset, and nothing is lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import policies
from tarry.v1 import admin_pb2, policy_pb2


def test_what_is_not_set_is_not_set_in_the_message() -> None:
    assert tarry.TopicPolicy().to_message() == policy_pb2.TopicPolicy()
    assert tarry.SubscriptionPolicy().to_message() == policy_pb2.SubscriptionPolicy()
    assert policies.TopicPolicy.from_message(policy_pb2.TopicPolicy()) == tarry.TopicPolicy()


def test_zero_is_a_value() -> None:
    message = tarry.TopicPolicy(min_indexes_per_bucket_snapshot_segment=0).to_message()
    assert message.HasField("min_indexes_per_bucket_snapshot_segment")
    assert policies.TopicPolicy.from_message(message).min_indexes_per_bucket_snapshot_segment == 0


def test_every_field_of_a_message_is_one_of_the_policy() -> None:
    assert [field.name for field in dataclasses.fields(tarry.TopicPolicy)] == [
        field.name for field in policy_pb2.TopicPolicy.DESCRIPTOR.fields
    ]
    assert [field.name for field in dataclasses.fields(tarry.SubscriptionPolicy)] == [
        field.name for field in policy_pb2.SubscriptionPolicy.DESCRIPTOR.fields
    ]
    assert [field.name for field in dataclasses.fields(tarry.KeySharedPolicy)] == [
        field.name for field in policy_pb2.KeySharedPolicy.DESCRIPTOR.fields
    ]


@given(
    delay_max_ms=st.none() | st.integers(0, 2**64 - 1),
    rows=st.none() | st.integers(-(2**31), 2**31 - 1),
    form=st.none() | st.sampled_from(tarry.BucketForm),
    two_phase=st.none() | st.booleans(),
)
def test_a_topic_s_policy_comes_back_as_it_was(
    delay_max_ms: int | None, rows: int | None, form: tarry.BucketForm | None, two_phase: bool | None
) -> None:
    policy = tarry.TopicPolicy(
        delay_max_ms=delay_max_ms,
        max_indexes_per_bucket_snapshot_segment=rows,
        bucket_form=form,
        two_phase_deletion_enabled=two_phase,
    )
    assert policies.TopicPolicy.from_message(policy.to_message()) == policy


u64 = st.integers(0, 2**64 - 1)
most = st.none() | st.integers(1, 2**64 - 1)
redeliveries = st.one_of(
    st.none(),
    st.builds(tarry.ConstantDelay, u64),
    st.builds(tarry.LinearDelay, u64, u64, most),
    st.builds(tarry.ExponentialDelay, u64, st.floats(1, 100), most, st.floats(0, 1)),
    st.builds(tarry.DelayList, st.lists(u64, max_size=5).map(tuple)),
    st.just(tarry.DelayLadder()),
)


keys_shared = st.none() | st.builds(
    tarry.KeySharedPolicy,
    selector=st.none() | st.sampled_from(tarry.HashSelector),
    points_per_consumer=st.none() | st.integers(0, 2**32 - 1),
    order=st.none() | st.sampled_from(tarry.KeyOrder),
    allow_out_of_order_delivery=st.booleans(),
    nack_order=st.none() | st.sampled_from(tarry.NackOrder),
    nack_block_max_ms=st.none() | u64,
)


@given(
    lease_ms=st.none() | u64,
    properties=st.dictionaries(st.text(), st.text(), max_size=5),
    redelivery=redeliveries,
    count=st.none() | st.integers(0, 2**32 - 1),
    bits=st.none() | st.integers(0, 20),
    key_shared=keys_shared,
)
def test_a_subscription_s_policy_comes_back_as_it_was(
    lease_ms: int | None,
    properties: dict[str, str],
    redelivery: tarry.RedeliveryPolicy | None,
    count: int | None,
    bits: int | None,
    key_shared: tarry.KeySharedPolicy | None,
) -> None:
    policy = tarry.SubscriptionPolicy(
        lease_ms=lease_ms,
        properties=properties,
        redelivery=redelivery,
        max_redeliver_count=count,
        ack_timeout_ms=lease_ms,
        nack_precision_bits=bits,
        key_shared=key_shared,
    )
    assert policies.SubscriptionPolicy.from_message(policy.to_message()) == policy


def test_a_bucket_form_of_a_later_version_is_told() -> None:
    message = policy_pb2.TopicPolicy(bucket_form=9)  # type: ignore[arg-type]
    with pytest.raises(tarry.Internal, match="bucket_form is 9"):
        policies.TopicPolicy.from_message(message)


@pytest.mark.parametrize("wrong", [tarry.ConstantDelay(-1), tarry.DelayList((2**64,)), "10s", 5])
def test_a_redelivery_policy_that_no_message_can_hold_is_refused(wrong: Any) -> None:
    with pytest.raises(tarry.InvalidArgument, match="redelivery is "):
        tarry.SubscriptionPolicy(redelivery=wrong).to_message()


def test_a_redelivery_policy_of_a_later_version_is_told() -> None:
    message = policy_pb2.SubscriptionPolicy(redelivery=policy_pb2.RedeliveryPolicy())
    with pytest.raises(tarry.Internal, match="redelivery is of a kind"):
        policies.SubscriptionPolicy.from_message(message)


@pytest.mark.parametrize(
    "wrong",
    [
        tarry.KeySharedPolicy(points_per_consumer=-1),
        tarry.KeySharedPolicy(nack_block_max_ms=2**64),
        tarry.KeySharedPolicy(selector="sticky"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_of_key_order_that_no_message_can_hold_is_refused(wrong: tarry.KeySharedPolicy) -> None:
    with pytest.raises(tarry.InvalidArgument, match="key_shared is "):
        tarry.SubscriptionPolicy(key_shared=wrong).to_message()


@pytest.mark.parametrize("field", ["selector", "order", "nack_order"])
def test_a_policy_of_key_order_of_a_later_version_is_told(field: str) -> None:
    message = policy_pb2.SubscriptionPolicy()
    setattr(message.key_shared, field, 9)
    with pytest.raises(tarry.Internal, match=f"key_shared.{field} is 9"):
        policies.SubscriptionPolicy.from_message(message)


def test_hash_ranges_come_back_and_what_is_no_number_of_a_slot_is_refused() -> None:
    chosen = tarry.HashRange(0, 65_535)
    assert tarry.HashRange.from_message(chosen.to_message()) == chosen
    with pytest.raises(tarry.InvalidArgument, match="hash range is "):
        tarry.HashRange(-1, 5).to_message()


def test_delay_levels_clamp_unless_they_say_no() -> None:
    assert policies.DelayLevels.from_message(admin_pb2.DelayLevels(table="1s")) == tarry.DelayLevels("1s", clamp=True)
    assert policies.DelayLevels.from_message(tarry.DelayLevels("1s", clamp=False).to_message()).clamp is False
    with pytest.raises(tarry.InvalidArgument, match="table is 5"):
        tarry.DelayLevels(5).to_message()  # type: ignore[arg-type]
