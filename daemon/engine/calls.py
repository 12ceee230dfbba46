"""What callers of the engine pass in and get back, in columns.

Owns: the shapes of the calls.
Does not own: their meaning (`daemon.core`) and the wire (`daemon.grpc_services`).
"""

from __future__ import annotations

import dataclasses

from daemon.core.adding import AddBatch, AddOutcome
from daemon.core.claims import HeldPositions
from daemon.core.containment import Contained, EntryRanges
from daemon.core.quarantine import RebuildNeeded
from daemon.core.quotas import Caller
from daemon.core.trimming import LedgerRanges
from daemon.core.withdrawals import CancelOutcome, RescheduleBatch, RescheduleOutcome
from daemon.durability import garbage_rules
from storage_backends.formats.manifest import SubscriptionPolicy, TopicPolicy
from storage_backends.formats.rows import Rows

__all__ = [
    "AddBatch",
    "AddOutcome",
    "BucketPage",
    "BucketSummary",
    "Caller",
    "CancelOutcome",
    "Contained",
    "EntryRanges",
    "GarbageProgress",
    "HandedOut",
    "Health",
    "HeldPositions",
    "Leased",
    "LedgerRanges",
    "Merged",
    "RebuildNeeded",
    "RescheduleBatch",
    "RescheduleOutcome",
    "Sealed",
    "SubscriptionCreated",
    "SubscriptionPage",
    "SubscriptionPolicy",
    "SubscriptionStats",
    "TopicDeleted",
    "TopicLocation",
    "TopicPage",
    "TopicPolicies",
    "TopicPolicy",
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Leased:
    """Rows of a lease that ends `lease_ms` from now; none when nothing came due in time."""

    handed_out: HandedOut
    lease_ms: int
    rebuild_needed: tuple[RebuildNeeded, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TopicPolicies:
    """`stored`: as it was set. `effective`: what is in force, every field filled."""

    stored: TopicPolicy
    effective: TopicPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """`merges` were made, which replaced `merged_buckets`; the topic has `buckets` sealed ones now."""

    merges: int
    merged_buckets: int
    buckets: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    """A bucket that is committed; `bucket` is empty when there was nothing to seal."""

    rows: int
    bucket: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GarbageProgress:
    """How far a collection is; fields as in `tarry.v1.CollectGarbageResponse`."""

    shards: int
    shards_done: int = 0
    topics_done: int = 0
    topics: int = 0
    summary: garbage_rules.Summary = garbage_rules.NOTHING_DONE
    done: bool = False

    def plus(
        self, topics_done: int, topics: int, summary: garbage_rules.Summary, *, shards_done: int = 0
    ) -> GarbageProgress:
        """With what a pass over one more shard did so far, and whether it is done."""
        return dataclasses.replace(
            self,
            shards_done=self.shards_done + shards_done,
            topics_done=self.topics_done + topics_done,
            topics=self.topics + topics,
            summary=self.summary + summary,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TopicDeleted:
    """`rows`: what left with it, due or not. `incarnation`: the one that was deleted."""

    rows: int
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class TopicLocation:
    """`owner_address` and `owner` are empty when nobody owns the shard."""

    shard: int
    owner_address: str
    owner: str
    epoch: int
    served_here: bool


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
    """Topics in the order of their names. `next_after`: the name to go on after, None on the last page.

    `topics_loading`, `topics_damaged`: how many are not listed since they are not loaded yet, or cannot be.
    """

    topics: tuple[TopicSummary, ...]
    next_after: str | None
    as_of_ms: int
    topics_loading: int
    topics_damaged: int


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
    leased: int
    policy: SubscriptionPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionPage:
    """Subscriptions in the order of their names. `next_after`: the name to go on after, None on the last page."""

    subscriptions: tuple[SubscriptionStats, ...]
    next_after: str | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class BucketSummary:
    """One sealed bucket; fields as in `tarry.v1.BucketSummary`."""

    bucket: str
    size_bytes: int
    rows: int
    pending: int
    due: int
    first_ledger_id: int
    last_ledger_id: int
    min_deliver_at_ms: int
    max_deliver_at_ms: int
    segments: int
    segments_loaded: int
    level: int
    compatible_form: bool
    quarantined: bool
    damage: str


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPage:
    """Buckets in the order of (first ledger, last ledger). `next_after`: the place to go on after, None on the last
    page. `mutable_rows`: rows that are in no sealed bucket.
    """

    buckets: tuple[BucketSummary, ...]
    next_after: str | None
    as_of_ms: int
    mutable_rows: int


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
    rebuild_needed: tuple[RebuildNeeded, ...]
