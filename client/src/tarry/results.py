"""What the client answers with: frozen values, free of wire types.

Owns: the result classes and how each is read from its message.
Does not own: the meaning of a field, which is the comment on it in `proto/tarry/v1`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tarry import wire
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2


class AlreadyDue(enum.IntEnum):
    """What happens to a row whose time has come before it is added."""

    DELIVER = delayed_delivery_pb2.ALREADY_DUE_DELIVER
    """It is stored and handed out at once."""
    RETURN = delayed_delivery_pb2.ALREADY_DUE_RETURN
    """It is not stored; its index is returned: the caller is about to send the message itself."""


@dataclasses.dataclass(frozen=True, eq=False)
class AddResult:
    """What became of a batch; every accepted row is durable. Indexes are those of the rows in the batch."""

    accepted: int
    """Rows that are now stored."""
    duplicates: int
    """Rows whose position was in the index already; their time is unchanged."""
    late_on_arrival: int
    """Rows that were due already when they came."""
    returned_index: NDArray[np.int64]
    """Rows that were due already and not stored (AlreadyDue.RETURN)."""
    raised_index: NDArray[np.int64]
    """Rows that were stored with a later time than the one asked for, and below, that time."""
    raised_deliver_at_ms: NDArray[np.uint64]

    @staticmethod
    def from_message(message: delayed_delivery_pb2.AddMessagesResponse) -> AddResult:
        return AddResult(
            accepted=message.accepted,
            duplicates=message.duplicates,
            late_on_arrival=message.late_on_arrival,
            returned_index=np.array(message.returned_index, dtype=np.int64),
            raised_index=np.array(message.raised_index, dtype=np.int64),
            raised_deliver_at_ms=wire.decode_u64(message.raised_deliver_at_ms),
        )

    @staticmethod
    def merge(parts: Sequence[tuple[int, AddResult]]) -> AddResult:
        """The result of a batch from those of its requests, each with the index of its first row."""
        if len(parts) == 1 and parts[0][0] == 0:
            return parts[0][1]
        return AddResult(
            accepted=sum(part.accepted for _, part in parts),
            duplicates=sum(part.duplicates for _, part in parts),
            late_on_arrival=sum(part.late_on_arrival for _, part in parts),
            returned_index=np.concatenate([part.returned_index + first for first, part in parts]),
            raised_index=np.concatenate([part.raised_index + first for first, part in parts]),
            raised_deliver_at_ms=np.concatenate([part.raised_deliver_at_ms for _, part in parts]),
        )


@dataclasses.dataclass(frozen=True)
class SubscriptionCreated:
    """A subscription that exists now."""

    subscription_id: int
    """Never used again, also when the name is."""
    since_ms: int
    """It is owed rows with deliver_at_ms greater than this."""
    created: bool
    """False when it existed already."""

    @staticmethod
    def from_message(message: dispatch_pb2.CreateSubscriptionResponse) -> SubscriptionCreated:
        return SubscriptionCreated(message.subscription_id, message.since_ms, message.created)


@dataclasses.dataclass(frozen=True)
class TopicSummary:
    """One topic of a daemon. `next_due_ms` is None when nothing is pending."""

    topic: str
    shard: int
    pending: int
    buckets: int
    subscriptions: int
    next_due_ms: int | None

    @staticmethod
    def from_message(message: inspect_pb2.TopicSummary) -> TopicSummary:
        return TopicSummary(
            topic=message.topic,
            shard=message.shard,
            pending=message.pending,
            buckets=message.buckets,
            subscriptions=message.subscriptions,
            next_due_ms=message.next_due_ms or None,
        )


@dataclasses.dataclass(frozen=True)
class SubscriptionStats:
    """Counts of one subscription: `backlog` is due and not acknowledged, `dispatchers` are its open streams."""

    subscription: str
    subscription_id: int
    since_ms: int
    backlog: int
    in_flight: int
    dispatchers: int
    permits: int

    @staticmethod
    def from_message(message: inspect_pb2.SubscriptionStats) -> SubscriptionStats:
        return SubscriptionStats(
            subscription=message.subscription,
            subscription_id=message.subscription_id,
            since_ms=message.since_ms,
            backlog=message.backlog,
            in_flight=message.in_flight,
            dispatchers=message.dispatchers,
            permits=message.permits,
        )


@dataclasses.dataclass(frozen=True)
class TopicStats:
    """Counts of one topic as of `as_of_ms`. `next_due_ms` and `oldest_due_ms` are None when there is no such row."""

    topic: str
    topic_id: str
    shard: int
    epoch: int
    incarnation: int
    pending: int
    mutable_rows: int
    buckets: int
    bucket_bytes: int
    loaded_rows: int
    next_due_ms: int | None
    oldest_due_ms: int | None
    applied_slot: int
    subscriptions: tuple[SubscriptionStats, ...]
    as_of_ms: int

    @staticmethod
    def from_message(message: inspect_pb2.GetTopicStatsResponse) -> TopicStats:
        return TopicStats(
            topic=message.topic,
            topic_id=message.topic_id,
            shard=message.shard,
            epoch=message.epoch,
            incarnation=message.incarnation,
            pending=message.pending,
            mutable_rows=message.mutable_rows,
            buckets=message.buckets,
            bucket_bytes=message.bucket_bytes,
            loaded_rows=message.loaded_rows,
            next_due_ms=message.next_due_ms or None,
            oldest_due_ms=message.oldest_due_ms or None,
            applied_slot=message.applied_slot,
            subscriptions=tuple(SubscriptionStats.from_message(each) for each in message.subscriptions),
            as_of_ms=message.as_of_ms,
        )
