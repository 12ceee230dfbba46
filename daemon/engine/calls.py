"""What callers of the engine pass in and get back, in columns.

Owns: the shapes of the calls.
Does not own: their meaning (`daemon.core.topic`) and the wire (`daemon.grpc_services`).
"""

from __future__ import annotations

import dataclasses

from daemon.core.topic import AddBatch, AddOutcome, HeldPositions
from storage_backends.formats.rows import Rows

__all__ = [
    "AddBatch",
    "AddOutcome",
    "HandedOut",
    "Health",
    "HeldPositions",
    "SubscriptionCreated",
    "SubscriptionStats",
    "TopicPage",
    "TopicStats",
    "TopicSummary",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Whether the daemon serves, and if not, what it waits for."""

    serving: bool
    reason: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HandedOut:
    """Rows that a dispatcher holds from now on, under the epoch that handed them out."""

    epoch: int
    rows: Rows


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionCreated:
    """`created` is False when the subscription existed."""

    subscription_id: int
    since_ms: int
    created: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TopicSummary:
    """`next_due_ms`: 0 when nothing is pending."""

    topic: str
    shard: int
    pending: int
    buckets: int
    subscriptions: int
    next_due_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class TopicPage:
    """Topics in the order of their names. `next_after`: the name to go on after, None on the last page."""

    topics: tuple[TopicSummary, ...]
    next_after: str | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionStats:
    """One subscription; fields as in `tarry.v1.SubscriptionStats`."""

    subscription: str
    subscription_id: int
    since_ms: int
    backlog: int
    in_flight: int
    dispatchers: int
    permits: int


@dataclasses.dataclass(frozen=True, slots=True)
class TopicStats:
    """One topic; fields as in `tarry.v1.GetTopicStatsResponse`."""

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
    next_due_ms: int
    oldest_due_ms: int
    applied_slot: int
    subscriptions: tuple[SubscriptionStats, ...]
    as_of_ms: int
