"""The engine's records as messages that have fields of the same names.

Owns: that correspondence.
Does not own: what the fields mean (the contract's comments) and columns (`wire_columns`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf import message

from daemon import call_values
from daemon.grpc_services import policy_messages
from tarry.v1 import inspect_pb2

M = TypeVar("M", bound=message.Message)


def as_message(message_type: type[M], record: object, **others: Any) -> M:
    """The record's values of the message's fields; `others`: those that are no plain value of the record."""
    names = (field.name for field in message_type.DESCRIPTOR.fields)
    return message_type(**{name: getattr(record, name) for name in names if name not in others}, **others)


def rebuild_needed(ranges: Iterable[call_values.RebuildNeeded]) -> list[inspect_pb2.RebuildNeeded]:
    return [as_message(inspect_pb2.RebuildNeeded, each) for each in ranges]


def subscription_stats(subscriptions: Iterable[call_values.SubscriptionStats]) -> list[inspect_pb2.SubscriptionStats]:
    return [
        as_message(
            inspect_pb2.SubscriptionStats,
            each,
            policy=policy_messages.subscription_policy_message(each.policy, each.properties),
        )
        for each in subscriptions
    ]
