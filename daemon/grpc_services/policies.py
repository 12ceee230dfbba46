"""Policies of the wire to those that are stored, and back.

Owns: which fields are set, and that a policy which replaces another is given.
Does not own: which values a field may have, what they mean and their defaults (`daemon.engine.topic_settings`).
"""

from __future__ import annotations

import dataclasses

from google.protobuf import message

from daemon import errors
from daemon.grpc_services import parsing
from storage_backends.formats import manifest
from tarry.v1 import policy_pb2 as pb


def require_given(request: message.Message) -> None:
    """A policy is replaced as a whole: one that was forgotten would set nothing. Raises `InvalidArgument`."""
    if not request.HasField("policy"):
        raise errors.InvalidArgument("policy: none is given; give one, empty to set every field to its default")


def topic_policy(given: pb.TopicPolicy) -> manifest.TopicPolicy:
    """Raises `InvalidArgument`."""
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


def subscription_policy(given: pb.SubscriptionPolicy) -> manifest.SubscriptionPolicy:
    numbers = {field.name: value for field, value in given.ListFields() if field.name != "properties"}
    return manifest.SubscriptionPolicy(**numbers, properties=tuple(sorted(given.properties.items())))


def subscription_policy_message(policy: manifest.SubscriptionPolicy) -> pb.SubscriptionPolicy:
    return pb.SubscriptionPolicy(**dataclasses.asdict(policy) | {"properties": dict(policy.properties)})
