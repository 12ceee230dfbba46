"""Converts policies and other values of the daemon to and from messages.

Values become messages that have fields of the same names. Policies are checked here for fields that have a meaning
together, and that a replacing policy is given. `daemon.topic.topic_settings` has the ranges and defaults of fields, and
`row_requests` and `row_answers` the columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from google.protobuf import message

from daemon import call_values, errors
from daemon.core.index.bucket import RebuildNeeded
from daemon.grpc_services import parsing
from storage_backends.formats import manifest
from tarry.v1 import inspect_pb2
from tarry.v1 import policy_pb2 as pb

_KeySharedOption = Literal["points_per_consumer", "nack_block_max_ms"]

_NOT_NUMBERS = ("properties", "redelivery", "key_shared")


def require_given(request: message.Message) -> None:
    """Check that a request has a policy, since it replaces the old one as a whole. Raises `InvalidArgument`."""
    if not request.HasField("policy"):
        raise errors.InvalidArgument("policy: none is given; give one, empty to set every field to its default")


def topic_policy(given: pb.TopicPolicy) -> manifest.TopicPolicy:
    """Read a topic's policy. Raises `InvalidArgument`."""
    parsing.require_known("bucket_form", given.bucket_form, pb.BucketForm.DESCRIPTOR)
    compatible_form = given.bucket_form == pb.BUCKET_FORM_COMPATIBLE if given.bucket_form else None
    numbers = {field.name: value for field, value in given.ListFields() if field.name != "bucket_form"}
    return manifest.TopicPolicy(**numbers, compatible_form=compatible_form)


def topic_policy_message(policy: manifest.TopicPolicy) -> pb.TopicPolicy:
    fields = dataclasses.asdict(policy)
    match fields.pop("compatible_form"):
        case None:
            return pb.TopicPolicy(**fields)
        case compatible:
            return pb.TopicPolicy(
                **fields, bucket_form=pb.BUCKET_FORM_COMPATIBLE if compatible else pb.BUCKET_FORM_COLUMNAR
            )


def subscription_policy(given: pb.SubscriptionPolicy) -> tuple[manifest.SubscriptionPolicy, manifest.NamedValues]:
    """Read a subscription's policy, and the properties in it. Raises `InvalidArgument`."""
    numbers = {field.name: value for field, value in given.ListFields() if field.name not in _NOT_NUMBERS}
    policy = manifest.SubscriptionPolicy(
        **numbers,
        redelivery=_redelivery_policy(given.redelivery) if given.HasField("redelivery") else None,
        key_shared=_key_shared_policy(given.key_shared) if given.HasField("key_shared") else None,
    )
    return policy, tuple(sorted(given.properties.items()))


def subscription_policy_message(
    policy: manifest.SubscriptionPolicy, properties: manifest.NamedValues
) -> pb.SubscriptionPolicy:
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    fields["properties"] = dict(properties)
    if policy.redelivery is not None:
        fields["redelivery"] = _redelivery_message(policy.redelivery)
    if policy.key_shared is not None:
        fields["key_shared"] = key_shared_message(policy.key_shared)
    return pb.SubscriptionPolicy(**fields)


def key_shared_message(policy: manifest.KeySharedPolicy) -> pb.KeySharedPolicy:
    """Return the policy as a message that has every field in force."""
    message = pb.KeySharedPolicy(
        selector=pb.HashSelector.ValueType(policy.selector),
        order=pb.KeyOrder.ValueType(policy.order),
        allow_out_of_order_delivery=policy.allow_out_of_order_delivery,
        nack_order=pb.NackOrder.ValueType(policy.nack_order),
    )
    if policy.selector is manifest.HashSelector.CONSISTENT_HASHING:
        message.points_per_consumer = policy.points_per_consumer
    if policy.nack_order is manifest.NackOrder.BLOCK_KEY:
        message.nack_block_max_ms = policy.nack_block_max_ms
    return message


def _key_shared_policy(given: pb.KeySharedPolicy) -> manifest.KeySharedPolicy:
    for name, number, declared in (
        ("selector", given.selector, pb.HashSelector.DESCRIPTOR),
        ("order", given.order, pb.KeyOrder.DESCRIPTOR),
        ("nack_order", given.nack_order, pb.NackOrder.DESCRIPTOR),
    ):
        parsing.require_known(f"key_shared.{name}", number, declared)
    default = manifest.KeySharedPolicy()
    policy = manifest.KeySharedPolicy(
        selector=manifest.HashSelector(given.selector or default.selector),
        points_per_consumer=_or_default(given, "points_per_consumer", default),
        order=manifest.KeyOrder(given.order or default.order),
        allow_out_of_order_delivery=given.allow_out_of_order_delivery,
        nack_order=manifest.NackOrder(given.nack_order or default.nack_order),
        nack_block_max_ms=_or_default(given, "nack_block_max_ms", default),
    )
    if policy.selector is not manifest.HashSelector.CONSISTENT_HASHING:
        _require_absent(given, "points_per_consumer", f"selector is {policy.selector.name}", "CONSISTENT_HASHING")
    if policy.nack_order is not manifest.NackOrder.BLOCK_KEY:
        _require_absent(given, "nack_block_max_ms", f"nack_order is {policy.nack_order.name}", "BLOCK_KEY")
    return policy


def _or_default(given: pb.KeySharedPolicy, name: _KeySharedOption, default: manifest.KeySharedPolicy) -> int:
    value: int = getattr(given if given.HasField(name) else default, name)
    return value


def _require_absent(given: pb.KeySharedPolicy, name: _KeySharedOption, why: str, which: str) -> None:
    """Refuse a field that would have no effect. Raises `InvalidArgument`."""
    if given.HasField(name):
        raise errors.InvalidArgument(
            f"key_shared.{name} is {getattr(given, name)}, but key_shared.{why}: only {which} has it"
        )


def _redelivery_policy(given: pb.RedeliveryPolicy) -> manifest.RedeliveryPolicy:
    match given.WhichOneof("delay"):
        case "constant":
            return manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.CONSTANT, initial_ms=given.constant.delay_ms)
        case "linear":
            linear = given.linear
            return manifest.RedeliveryPolicy(
                kind=manifest.RedeliveryKind.LINEAR,
                initial_ms=linear.initial_ms,
                step_ms=linear.step_ms,
                max_ms=linear.max_ms,
            )
        case "exponential":
            exponential = given.exponential
            return manifest.RedeliveryPolicy(
                kind=manifest.RedeliveryKind.EXPONENTIAL,
                initial_ms=exponential.initial_ms,
                multiplier=exponential.multiplier,
                max_ms=exponential.max_ms,
                jitter=exponential.jitter,
            )
        case "list":
            return manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.LIST, delays_ms=tuple(given.list.delay_ms))
        case "ladder":
            return manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.LADDER)
        case _:
            raise errors.InvalidArgument(
                "redelivery.delay: none is given; give exactly one of constant, linear, exponential, list and ladder"
            )


def _redelivery_message(policy: manifest.RedeliveryPolicy) -> pb.RedeliveryPolicy:
    match policy.kind:
        case manifest.RedeliveryKind.CONSTANT:
            return pb.RedeliveryPolicy(constant=pb.ConstantDelay(delay_ms=policy.initial_ms))
        case manifest.RedeliveryKind.LINEAR:
            linear = pb.LinearDelay(initial_ms=policy.initial_ms, step_ms=policy.step_ms, max_ms=policy.max_ms)
            return pb.RedeliveryPolicy(linear=linear)
        case manifest.RedeliveryKind.EXPONENTIAL:
            exponential = pb.ExponentialDelay(
                initial_ms=policy.initial_ms,
                multiplier=policy.multiplier,
                max_ms=policy.max_ms,
                jitter=policy.jitter,
            )
            return pb.RedeliveryPolicy(exponential=exponential)
        case manifest.RedeliveryKind.LIST:
            return pb.RedeliveryPolicy(list=pb.DelayList(delay_ms=policy.delays_ms))
        case manifest.RedeliveryKind.LADDER:
            return pb.RedeliveryPolicy(ladder=pb.DelayLadder())


M = TypeVar("M", bound=message.Message)


def as_message(message_type: type[M], record: object, **others: Any) -> M:
    """Convert a record to a message by the names of its fields.

    `others` are fields that the record has not as plain values.
    """
    names = (field.name for field in message_type.DESCRIPTOR.fields)
    return message_type(**{name: getattr(record, name) for name in names if name not in others}, **others)


def rebuild_needed(ranges: Iterable[RebuildNeeded]) -> list[inspect_pb2.RebuildNeeded]:
    return [as_message(inspect_pb2.RebuildNeeded, each) for each in ranges]


def subscription_stats(subscriptions: Iterable[call_values.SubscriptionStats]) -> list[inspect_pb2.SubscriptionStats]:
    return [
        as_message(
            inspect_pb2.SubscriptionStats,
            each,
            policy=subscription_policy_message(each.policy, each.properties),
        )
        for each in subscriptions
    ]
