"""What the client answers with: frozen values, free of wire types.

Owns: the result classes and how each is read from its message.
Does not own: the meaning of a field, which is the comment on it in `proto/tarry/v1`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import policies, wire
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2

T = TypeVar("T")


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
            returned_index=wire.decode_indexes(message.returned_index),
            raised_index=wire.decode_indexes(message.raised_index),
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


@dataclasses.dataclass(frozen=True, eq=False)
class EntryRanges:
    """Ranges of entries, columns of one length, both ends included. Iterating gives (ledger, first, last)."""

    ledger_id: NDArray[np.uint64]
    first_entry_id: NDArray[np.uint64]
    last_entry_id: NDArray[np.uint64]

    def __len__(self) -> int:
        """Ranges."""
        return len(self.ledger_id)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.ledger_id.tolist(), self.first_entry_id.tolist(), self.last_entry_id.tolist(), strict=True)

    @property
    def rows(self) -> int:
        """Positions in all ranges."""
        return sum(last - first + 1 for _, first, last in self)

    @staticmethod
    def from_message(message: delayed_delivery_pb2.EntryRanges) -> EntryRanges:
        return EntryRanges(
            wire.decode_u64(message.ledger_id),
            wire.decode_u64(message.first_entry_id),
            wire.decode_u64(message.last_entry_id),
        )


class RangesInParts:
    """Ranges that come in several answers; a range that an answer cut is whole again."""

    def __init__(self) -> None:
        self._parts: list[EntryRanges] = []

    def append(self, message: delayed_delivery_pb2.EntryRanges, *, continues_at: int | None) -> None:
        """`continues_at`: the entry within a range of the request at which the answer before ended."""
        part = EntryRanges.from_message(message)
        before = self._parts[-1] if self._parts else None
        if (
            len(part)
            and before is not None
            and before.ledger_id[-1] == part.ledger_id[0]
            and int(before.last_entry_id[-1]) + 1 == int(part.first_entry_id[0]) == continues_at
        ):
            before.last_entry_id[-1] = part.last_entry_id[0]
            part = EntryRanges(part.ledger_id[1:], part.first_entry_id[1:], part.last_entry_id[1:])
        if len(part):
            self._parts.append(part)

    def whole(self) -> EntryRanges:
        if not self._parts:
            return EntryRanges(*(np.empty(0, dtype=np.uint64) for _ in range(3)))
        if len(self._parts) == 1:
            return self._parts[0]
        return EntryRanges(
            np.concatenate([part.ledger_id for part in self._parts]),
            np.concatenate([part.first_entry_id for part in self._parts]),
            np.concatenate([part.last_entry_id for part in self._parts]),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Contained:
    """What of positions or ranges is in the index. A cursor that reads a log skips both.

    Ranges stand in the order of the request, and within one of its ranges by entry; neighbouring entries are one range.
    """

    pending: EntryRanges
    """Rows that are not due yet."""
    due: EntryRanges
    """Rows that are due and not acknowledged."""


@dataclasses.dataclass(frozen=True)
class RebuildNeeded:
    """A range of which rows were lost with a damaged bucket: adding it again heals it without doubling."""

    first_ledger_id: int
    last_ledger_id: int
    rows: int
    """Rows of the bucket that were not gone and have not been added again."""
    bucket: str
    damage: str
    """What was found."""
    positions_known: bool
    """Whether it is known which positions are missing. If not, every position of these ledgers that is added counts."""

    @staticmethod
    def from_message(message: inspect_pb2.RebuildNeeded) -> RebuildNeeded:
        return RebuildNeeded(
            first_ledger_id=message.first_ledger_id,
            last_ledger_id=message.last_ledger_id,
            rows=message.rows,
            bucket=message.bucket,
            damage=message.damage,
            positions_known=message.positions_known,
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
    """Counts of one subscription: `backlog` is due and not acknowledged, `dispatchers` are its open streams.

    Of `in_flight`, `leased` positions are leased.
    """

    subscription: str
    subscription_id: int
    since_ms: int
    backlog: int
    in_flight: int
    dispatchers: int
    permits: int
    leased: int = 0
    policy: policies.SubscriptionPolicy = dataclasses.field(default_factory=policies.SubscriptionPolicy)

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
            leased=message.leased,
            policy=policies.SubscriptionPolicy.from_message(message.policy),
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
    rebuild_needed: tuple[RebuildNeeded, ...] = ()

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
            rebuild_needed=tuple(RebuildNeeded.from_message(each) for each in message.rebuild_needed),
        )


@dataclasses.dataclass(frozen=True)
class BucketSummary:
    """One sealed bucket. `pending` rows are not due yet, `due` ones are due and not gone."""

    bucket: str
    """The object's name."""
    size_bytes: int
    rows: int
    """Rows that were stored."""
    pending: int
    due: int
    first_ledger_id: int
    last_ledger_id: int
    min_deliver_at_ms: int
    max_deliver_at_ms: int
    segments: int
    segments_loaded: int
    """Segments that are in memory."""
    level: int
    """0 = sealed from a mutable bucket."""
    compatible_form: bool
    quarantined: bool
    """Damaged: neither read nor deleted."""
    damage: str
    """What was found, when it is quarantined."""

    @staticmethod
    def from_message(message: inspect_pb2.BucketSummary) -> BucketSummary:
        return BucketSummary(
            **{field.name: getattr(message, field.name) for field in dataclasses.fields(BucketSummary)}
        )


@dataclasses.dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list, as of `as_of_ms`. `next_page_token` is empty on the last page."""

    items: tuple[T, ...]
    next_page_token: str
    as_of_ms: int


@dataclasses.dataclass(frozen=True)
class TopicPage(Page[TopicSummary]):
    """Topics in the order of their names."""

    topics_loading: int
    """Topics that the daemon owns and has not loaded yet: they are not listed."""
    topics_damaged: int
    """Topics that cannot be served because they are damaged: the daemon's log names them."""

    @staticmethod
    def from_message(message: inspect_pb2.ListTopicsResponse) -> TopicPage:
        return TopicPage(
            items=tuple(TopicSummary.from_message(each) for each in message.topics),
            next_page_token=message.next_page_token,
            as_of_ms=message.as_of_ms,
            topics_loading=message.topics_loading,
            topics_damaged=message.topics_damaged,
        )


@dataclasses.dataclass(frozen=True)
class BucketPage(Page[BucketSummary]):
    """Sealed buckets of a topic in the order of (first ledger, last ledger)."""

    mutable_rows: int
    """Rows that are in no sealed bucket."""

    @staticmethod
    def from_message(message: inspect_pb2.ListBucketsResponse) -> BucketPage:
        return BucketPage(
            items=tuple(BucketSummary.from_message(each) for each in message.buckets),
            next_page_token=message.next_page_token,
            as_of_ms=message.as_of_ms,
            mutable_rows=message.mutable_rows,
        )


@dataclasses.dataclass(frozen=True)
class SubscriptionPage(Page[SubscriptionStats]):
    """Subscriptions of a topic in the order of their names."""

    @staticmethod
    def from_message(message: inspect_pb2.ListSubscriptionsResponse) -> SubscriptionPage:
        return SubscriptionPage(
            items=tuple(SubscriptionStats.from_message(each) for each in message.subscriptions),
            next_page_token=message.next_page_token,
            as_of_ms=message.as_of_ms,
        )


@dataclasses.dataclass(frozen=True)
class TopicPolicies:
    """The policy of a topic."""

    policy: policies.TopicPolicy
    """As it was set."""
    effective: policies.TopicPolicy
    """What is in force with the daemon's defaults: every field is set."""

    @staticmethod
    def from_message(message: admin_pb2.GetTopicPolicyResponse) -> TopicPolicies:
        return TopicPolicies(
            policy=policies.TopicPolicy.from_message(message.policy),
            effective=policies.TopicPolicy.from_message(message.effective),
        )


@dataclasses.dataclass(frozen=True)
class Sealed:
    """A bucket that was sealed on request."""

    rows: int
    """Rows in the new bucket; 0 when there was nothing to seal."""
    bucket: str
    """The object's name, empty when there was nothing to seal."""

    @staticmethod
    def from_message(message: admin_pb2.SealBucketResponse) -> Sealed:
        return Sealed(rows=message.rows, bucket=message.bucket)


@dataclasses.dataclass(frozen=True)
class TopicDeleted:
    """A topic that is gone. Both are None when the answer that told them was lost."""

    rows: int | None
    """Rows that left with it, due or not."""
    incarnation: int | None
    """The incarnation that was deleted."""

    @staticmethod
    def from_message(message: admin_pb2.DeleteTopicResponse) -> TopicDeleted:
        return TopicDeleted(rows=message.rows, incarnation=message.incarnation)


@dataclasses.dataclass(frozen=True)
class TopicLocation:
    """The shard of a topic and its owner, whether the topic exists or not."""

    shard: int
    owner_address: str
    """host:port of the owner; empty when the shard has none."""
    owner: str
    """The daemon id of the owner; empty when the shard has none."""
    epoch: int
    """The shard's epoch as far as the daemon that answered knows."""
    served_here: bool
    """Whether the daemon that answered is the owner."""

    @staticmethod
    def from_message(message: cluster_pb2.LookupTopicResponse) -> TopicLocation:
        return TopicLocation(
            shard=message.shard,
            owner_address=message.owner_address,
            owner=message.owner,
            epoch=message.epoch,
            served_here=message.served_here,
        )
