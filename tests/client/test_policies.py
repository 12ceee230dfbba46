"""Policies to and from their messages: what is not set stays unset, and nothing is lost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import policies
from tarry.v1 import policy_pb2


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


@given(lease_ms=st.none() | st.integers(0, 2**64 - 1), properties=st.dictionaries(st.text(), st.text(), max_size=5))
def test_a_subscription_s_policy_comes_back_as_it_was(lease_ms: int | None, properties: dict[str, str]) -> None:
    policy = tarry.SubscriptionPolicy(lease_ms=lease_ms, properties=properties)
    assert policies.SubscriptionPolicy.from_message(policy.to_message()) == policy


def test_a_bucket_form_of_a_later_version_is_told() -> None:
    message = policy_pb2.TopicPolicy(bucket_form=9)  # type: ignore[arg-type]
    with pytest.raises(tarry.Internal, match="bucket_form is 9"):
        policies.TopicPolicy.from_message(message)
