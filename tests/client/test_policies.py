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


@given(
    delay_max_ms=st.none() | st.integers(0, 2**64 - 1),
    rows=st.none() | st.integers(-(2**31), 2**31 - 1),
    form=st.none() | st.sampled_from(tarry.BucketForm),
)
def test_a_topic_s_policy_comes_back_as_it_was(
    delay_max_ms: int | None, rows: int | None, form: tarry.BucketForm | None
) -> None:
    policy = tarry.TopicPolicy(
        delay_max_ms=delay_max_ms, max_indexes_per_bucket_snapshot_segment=rows, bucket_form=form
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


@given(
    lease_ms=st.none() | u64,
    properties=st.dictionaries(st.text(), st.text(), max_size=5),
    redelivery=redeliveries,
    count=st.none() | st.integers(0, 2**32 - 1),
    bits=st.none() | st.integers(0, 20),
)
def test_a_subscription_s_policy_comes_back_as_it_was(
    lease_ms: int | None,
    properties: dict[str, str],
    redelivery: tarry.RedeliveryPolicy | None,
    count: int | None,
    bits: int | None,
) -> None:
    policy = tarry.SubscriptionPolicy(
        lease_ms=lease_ms,
        properties=properties,
        redelivery=redelivery,
        max_redeliver_count=count,
        ack_timeout_ms=lease_ms,
        nack_precision_bits=bits,
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


def test_delay_levels_clamp_unless_they_say_no() -> None:
    assert policies.DelayLevels.from_message(admin_pb2.DelayLevels(table="1s")) == tarry.DelayLevels("1s", clamp=True)
    assert policies.DelayLevels.from_message(tarry.DelayLevels("1s", clamp=False).to_message()).clamp is False
    with pytest.raises(tarry.InvalidArgument, match="table is 5"):
        tarry.DelayLevels(5).to_message()  # type: ignore[arg-type]
