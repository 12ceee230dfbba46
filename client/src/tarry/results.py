"""The results of the client's calls, frozen and free of wire types.

Comments in `proto/tarry/v1` define each field. `tarry.inspection` has the answers of inspection calls.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tarry import columns, policies, reasons, wire
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2


class AlreadyDue(enum.IntEnum):
    """The treatment of a row that is due before it is added."""

    DELIVER = delayed_delivery_pb2.ALREADY_DUE_DELIVER
    """The row is stored and delivered at once."""
    RETURN = delayed_delivery_pb2.ALREADY_DUE_RETURN
    """The row is not stored and its index is returned: the caller sends the message itself."""


@dataclasses.dataclass(frozen=True, eq=False)
class AddResult:
    """The result of a batch; every accepted row is durable. Indexes are those of rows in the batch."""

    __repr__ = columns.short_repr

    accepted: int
    """Rows stored"""
    duplicates: int
    """Rows whose position was already in the index; their time is unchanged"""
    late_on_arrival: int
    """Rows that were already due on arrival"""
    returned_index: NDArray[np.int64]
    """Rows that were already due and not stored (AlreadyDue.RETURN)"""
    raised_index: NDArray[np.int64]
    """Rows stored with a later time than requested; the times are in `raised_deliver_at_ms`"""
    raised_deliver_at_ms: NDArray[np.uint64]
    refused: reasons.Refused = dataclasses.field(default_factory=reasons.Refused.nothing)
    """Rows not stored because their time or level is invalid, with indexes and reasons (OnInvalid.RETURN)"""

    @staticmethod
    def from_message(message: delayed_delivery_pb2.AddMessagesResponse) -> AddResult:
        return AddResult(
            accepted=message.accepted,
            duplicates=message.duplicates,
            late_on_arrival=message.late_on_arrival,
            returned_index=wire.decode_indexes(message.returned_index),
            raised_index=wire.decode_indexes(message.raised_index),
            raised_deliver_at_ms=wire.decode_u64(message.raised_deliver_at_ms),
            refused=reasons.Refused.from_message(message),
        )

    @staticmethod
    def merge(parts: Sequence[tuple[int, AddResult]]) -> AddResult:
        """Combine the results of a batch's requests, each with the index of its first row."""
        if len(parts) == 1 and parts[0][0] == 0:
            return parts[0][1]
        return AddResult(
            accepted=sum(part.accepted for _, part in parts),
            duplicates=sum(part.duplicates for _, part in parts),
            late_on_arrival=sum(part.late_on_arrival for _, part in parts),
            returned_index=np.concatenate([part.returned_index + first for first, part in parts]),
            raised_index=np.concatenate([part.raised_index + first for first, part in parts]),
            raised_deliver_at_ms=np.concatenate([part.raised_deliver_at_ms for _, part in parts]),
            refused=reasons.Refused.merge([(first, part.refused) for first, part in parts]),
        )


class IgnoredReason(enum.IntEnum):
    """A reason why a position that a request named was left alone."""

    NOT_THERE = dispatch_pb2.IGNORED_REASON_NOT_THERE
    """The subscription is owed no row of it."""
    NOT_DUE = dispatch_pb2.IGNORED_REASON_NOT_DUE
    """Its row is not due yet by the daemon's clock; it is delivered when it is."""
    OTHER_TIME = dispatch_pb2.IGNORED_REASON_OTHER_TIME
    """Its row has another time."""
    OTHER_DELIVERY = dispatch_pb2.IGNORED_REASON_OTHER_DELIVERY
    """It is that row, but another delivery of it."""
    TAKEN_BACK = dispatch_pb2.IGNORED_REASON_TAKEN_BACK
    """It was taken back, because it is behind a negatively acknowledged row of its key."""
    NOT_HELD = dispatch_pb2.IGNORED_REASON_NOT_HELD
    """For an extension: it is not in flight on this stream, or not leased."""


AnswerOnIgnored: TypeAlias = (
    dispatch_pb2.Done
    | dispatch_pb2.AcknowledgeResponse
    | dispatch_pb2.NegativeAcknowledgeResponse
    | dispatch_pb2.ExtendLeaseResponse
)


class Ignored(reasons.RowsWithReasons[IgnoredReason]):
    """A number of ignored positions of a request, with their indexes and reasons.

    Example: `for row, why in (await subscription.ack(batch)).items(): print(batch.delivery_id(row), why.name)`
    """

    known = IgnoredReason
    index: NDArray[np.int64]
    """Indexes of the rows in the request, ascending; empty if the daemon is too old to report them"""
    rows: int
    """Number of positions in the request"""

    def __new__(cls, ignored: int, index: NDArray[np.int64], reason: NDArray[np.int64], rows: int) -> Ignored:
        made = super().__new__(cls, ignored)
        made.index, made.reason, made.rows = index, reason, rows
        return made

    @staticmethod
    def from_message(message: AnswerOnIgnored, rows: int) -> Ignored:
        """Read the answer to a request with this many positions."""
        index, reason = reasons.rows_and_reasons(message.ignored_index, message.ignored_reason)
        return Ignored(message.ignored, index, reason, rows)

    @staticmethod
    def merge(parts: Sequence[Ignored]) -> Ignored:
        """Combine the results of a batch's requests, in order."""
        firsts = np.cumsum([0, *(part.rows for part in parts)])
        nothing = np.empty(0, np.int64)
        return Ignored(
            sum(parts),
            np.concatenate([nothing, *(part.index + first for part, first in zip(parts, firsts, strict=False))]),
            np.concatenate([nothing, *(part.reason for part in parts)]),
            int(firsts[-1]),
        )

    def placed(self, places: NDArray[np.int64], rows: int) -> Ignored:
        """Return the result for a request of `rows` positions of which only those at `places` were sent.

        The others had been taken back.
        """
        taken_back = np.setdiff1d(np.arange(rows), places)
        index = np.concatenate([places[self.index], taken_back])
        reason = np.concatenate([self.reason, np.full(len(taken_back), IgnoredReason.TAKEN_BACK, np.int64)])
        order = np.argsort(index)
        return Ignored(self + len(taken_back), index[order], reason[order], rows)


@dataclasses.dataclass(frozen=True)
class Nacked:
    """The result of a negative acknowledgement. All other positions are redelivered later, durably."""

    ignored: Ignored
    """Positions left alone, with indexes and reasons"""
    dead_lettered: int
    """Durable dead letters by now: rejected, or redelivered as often as the policy allows"""

    @staticmethod
    def from_message(message: dispatch_pb2.NegativeAcknowledgeResponse, rows: int) -> Nacked:
        return Nacked(ignored=Ignored.from_message(message, rows), dead_lettered=message.dead_lettered)

    @staticmethod
    def merge(parts: Sequence[Nacked]) -> Nacked:
        """Combine the results of a batch's requests."""
        return Nacked(
            ignored=Ignored.merge([part.ignored for part in parts]),
            dead_lettered=sum(part.dead_lettered for part in parts),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Withdrawn:
    """The positions of a batch that were left alone, by reason; indexes are those of rows in the batch."""

    __repr__ = columns.short_repr

    not_found_index: NDArray[np.int64]
    """No row exists: never added, acknowledged, cancelled before, or lost with a damaged bucket."""
    already_due_index: NDArray[np.int64]
    """Due, and at no dispatcher"""
    in_flight_index: NDArray[np.int64]
    """Delivered to a dispatcher"""
    may_have_landed: bool
    """True if the answer of an earlier try was lost, which may have withdrawn positions that are not found now"""


@dataclasses.dataclass(frozen=True, eq=False)
class Cancelled(Withdrawn):
    """The result of a cancellation. Every position that is not listed was cancelled, durably."""

    __repr__ = columns.short_repr

    cancelled: int

    @staticmethod
    def from_message(message: delayed_delivery_pb2.CancelMessagesResponse, *, may_have_landed: bool) -> Cancelled:
        return Cancelled(**_withdrawn(message), may_have_landed=may_have_landed, cancelled=message.cancelled)

    @staticmethod
    def merge(parts: Sequence[tuple[int, Cancelled]]) -> Cancelled:
        """Combine the results of a batch's requests, each with the index of its first row."""
        return Cancelled(**_merged(parts), cancelled=sum(part.cancelled for _, part in parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Rescheduled(Withdrawn):
    """The result of a rescheduling. Every position that is not listed has its new time, durably."""

    __repr__ = columns.short_repr

    rescheduled: int
    raised_index: NDArray[np.int64]
    """Rows stored with a later time than requested; the times are in `raised_deliver_at_ms`"""
    raised_deliver_at_ms: NDArray[np.uint64]

    @staticmethod
    def from_message(message: delayed_delivery_pb2.RescheduleMessagesResponse, *, may_have_landed: bool) -> Rescheduled:
        return Rescheduled(
            **_withdrawn(message),
            may_have_landed=may_have_landed,
            rescheduled=message.rescheduled,
            raised_index=wire.decode_indexes(message.raised_index),
            raised_deliver_at_ms=wire.decode_u64(message.raised_deliver_at_ms),
        )

    @staticmethod
    def merge(parts: Sequence[tuple[int, Rescheduled]]) -> Rescheduled:
        """Combine the results of a batch's requests, each with the index of its first row."""
        return Rescheduled(
            **_merged(parts),
            rescheduled=sum(part.rescheduled for _, part in parts),
            raised_index=np.concatenate([part.raised_index + first for first, part in parts]),
            raised_deliver_at_ms=np.concatenate([part.raised_deliver_at_ms for _, part in parts]),
        )


_LEFT_AS_THEY_WERE = ("not_found_index", "already_due_index", "in_flight_index")


def _withdrawn(
    message: delayed_delivery_pb2.CancelMessagesResponse | delayed_delivery_pb2.RescheduleMessagesResponse,
) -> dict[str, Any]:
    return {name: wire.decode_indexes(getattr(message, name)) for name in _LEFT_AS_THEY_WERE}


def _merged(parts: Sequence[tuple[int, Withdrawn]]) -> dict[str, Any]:
    indexes = {
        name: np.concatenate([getattr(part, name) + first for first, part in parts]) for name in _LEFT_AS_THEY_WERE
    }
    return indexes | {"may_have_landed": any(part.may_have_landed for _, part in parts)}


class Trimmed(int):
    """The number of rows that a trim dropped, or that the subscription is no longer owed, with details."""

    dead_lettered: int
    """Those of them that are dead letters now"""
    may_have_landed: bool
    """True if the answer of an earlier try was lost, which may have dropped rows that are not counted"""

    def __new__(cls, trimmed: int, *, dead_lettered: int, may_have_landed: bool) -> Trimmed:
        made = super().__new__(cls, trimmed)
        made.dead_lettered, made.may_have_landed = dead_lettered, may_have_landed
        return made

    @staticmethod
    def from_message(message: delayed_delivery_pb2.TrimMessagesResponse, *, may_have_landed: bool) -> Trimmed:
        return Trimmed(message.trimmed, dead_lettered=message.dead_lettered, may_have_landed=may_have_landed)

    @staticmethod
    def merge(parts: Sequence[Trimmed]) -> Trimmed:
        """Combine the results of a trim's requests."""
        return Trimmed(
            sum(parts),
            dead_lettered=sum(part.dead_lettered for part in parts),
            may_have_landed=any(part.may_have_landed for part in parts),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class EntryRanges:
    """Ranges of entries, both ends included, as columns of one length. Iterating yields (ledger, first, last)."""

    __repr__ = columns.short_repr

    ledger_id: NDArray[np.uint64]
    first_entry_id: NDArray[np.uint64]
    last_entry_id: NDArray[np.uint64]

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self.ledger_id)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.ledger_id.tolist(), self.first_entry_id.tolist(), self.last_entry_id.tolist(), strict=True)

    @property
    def rows(self) -> int:
        """The number of positions in all ranges."""
        return sum(last - first + 1 for _, first, last in self)

    @staticmethod
    def from_message(message: delayed_delivery_pb2.EntryRanges) -> EntryRanges:
        return EntryRanges(
            wire.decode_u64(message.ledger_id),
            wire.decode_u64(message.first_entry_id),
            wire.decode_u64(message.last_entry_id),
        )


class RangesInParts:
    """Ranges from several answers; joins a range that the end of an answer split."""

    def __init__(self) -> None:
        self._parts: list[EntryRanges] = []

    def append(self, message: delayed_delivery_pb2.EntryRanges, *, continues_at: int | None) -> None:
        """Append an answer's ranges.

        `continues_at` is the entry within a range of the request at which the previous answer ended.
        """
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
    """The positions or ranges that are in the index. A cursor that reads a log skips both kinds.

    Ranges are in the order of the request, and within one of its ranges by entry; neighbouring entries form one range.
    """

    pending: EntryRanges
    """Rows that are not due yet"""
    due: EntryRanges
    """Rows that are due and not acknowledged"""


@dataclasses.dataclass(frozen=True)
class RebuildNeeded:
    """A range that lost rows with a damaged bucket; adding it again restores them without duplicates."""

    first_ledger_id: int
    last_ledger_id: int
    rows: int
    """Rows of the bucket that were not gone and have not been added again"""
    bucket: str
    damage: str
    """Damage that was found"""
    positions_known: bool
    """True if the missing positions are known; otherwise every added position of these ledgers counts"""

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
    """Never used again, even if the name is"""
    since_ms: int
    """The subscription is owed rows with deliver_at_ms greater than this."""
    created: bool
    """False if it already existed"""

    @staticmethod
    def from_message(message: dispatch_pb2.CreateSubscriptionResponse) -> SubscriptionCreated:
        return SubscriptionCreated(message.subscription_id, message.since_ms, message.created)


@dataclasses.dataclass(frozen=True)
class SubscriptionDeleted:
    """A deleted subscription."""

    dead_letters: int | None
    """Dead letters deleted with it; None if the answer with the number was lost"""

    @staticmethod
    def from_message(message: dispatch_pb2.DeleteSubscriptionResponse) -> SubscriptionDeleted:
        return SubscriptionDeleted(message.dead_letters)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of replaying dead letters."""

    replayed: int
    """Rows of the subscription again, durably, with no redelivery counted"""
    skipped: int
    """Still dead letters, because the subscription's index has a row of their position"""

    @staticmethod
    def from_message(message: admin_pb2.ReplayDeadLettersResponse) -> Replayed:
        return Replayed(replayed=message.replayed, skipped=message.skipped)

    @staticmethod
    def merge(parts: Sequence[Replayed]) -> Replayed:
        """Combine the results of a call's requests."""
        return Replayed(replayed=sum(part.replayed for part in parts), skipped=sum(part.skipped for part in parts))


@dataclasses.dataclass(frozen=True)
class DelayLevelsInForce:
    """The delay levels of a topic, or the daemon's own."""

    levels: policies.DelayLevels
    delay_ms: tuple[int, ...]
    """Level 1 first"""
    of_topic: bool
    """True if they were set for the topic, False if they are the daemon's"""
    pending: tuple[int, ...]
    """Pending rows of the topic by the level with which they were added, level 1 first; may be longer than the table if
    that had more levels then
    """

    @staticmethod
    def from_message(message: admin_pb2.GetDelayLevelsResponse) -> DelayLevelsInForce:
        return DelayLevelsInForce(
            levels=policies.DelayLevels.from_message(message.levels),
            delay_ms=tuple(message.delay_ms),
            of_topic=message.of_topic,
            pending=tuple(message.pending),
        )


@dataclasses.dataclass(frozen=True)
class DelayLevelsSet:
    """The delay levels that are in force now."""

    levels: policies.DelayLevels
    warnings: tuple[str, ...]
    """Settings that are allowed but may be mistakes"""

    @staticmethod
    def from_message(message: admin_pb2.SetDelayLevelsResponse) -> DelayLevelsSet:
        return DelayLevelsSet(policies.DelayLevels.from_message(message.levels), tuple(message.warnings))


@dataclasses.dataclass(frozen=True)
class TopicPolicies:
    """The policy of a topic."""

    policy: policies.TopicPolicy
    """Stored policy"""
    effective: policies.TopicPolicy
    """Policy in force, with the daemon's defaults: every field is set"""

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
    """Rows in the new bucket; 0 if there was nothing to seal"""
    bucket: str
    """Name of the object; empty if there was nothing to seal"""

    @staticmethod
    def from_message(message: admin_pb2.SealBucketResponse) -> Sealed:
        return Sealed(rows=message.rows, bucket=message.bucket)


@dataclasses.dataclass(frozen=True)
class Merged:
    """The merges made on request."""

    merges: int
    merged_buckets: int
    """Buckets that the merges replaced"""
    buckets: int
    """Sealed buckets of the topic now"""

    @staticmethod
    def from_message(message: admin_pb2.MergeBucketsResponse) -> Merged:
        return Merged(merges=message.merges, merged_buckets=message.merged_buckets, buckets=message.buckets)


@dataclasses.dataclass(frozen=True)
class GarbageCount:
    """A number of objects and their size (bytes)."""

    objects: int
    size_bytes: int

    @staticmethod
    def from_message(message: admin_pb2.GarbageCount) -> GarbageCount:
        return GarbageCount(objects=message.objects, size_bytes=message.size_bytes)


@dataclasses.dataclass(frozen=True)
class Garbage:
    """The counts of a garbage collection, or a dry run, so far. Fields are those of `tarry.v1.GarbageSummary`."""

    shards_done: int
    shards: int
    topics_done: int
    topics: int
    """Topics of the shards that were listed so far"""
    done: bool
    """True for the last step"""
    tombstones: GarbageCount
    orphans: GarbageCount
    manifests: GarbageCount
    journal_slots: GarbageCount
    waiting: GarbageCount
    failed: GarbageCount
    given_up: GarbageCount
    refused: GarbageCount

    @staticmethod
    def from_message(message: admin_pb2.CollectGarbageResponse) -> Garbage:
        counts = {
            field.name: GarbageCount.from_message(getattr(message.summary, field.name))
            for field in message.summary.DESCRIPTOR.fields
        }
        return Garbage(
            shards_done=message.shards_done,
            shards=message.shards,
            topics_done=message.topics_done,
            topics=message.topics,
            done=message.done,
            **counts,
        )


@dataclasses.dataclass(frozen=True)
class TopicDeleted:
    """A deleted topic. Both fields are None if the answer with them was lost."""

    rows: int | None
    """Rows deleted with it, due or not"""
    incarnation: int | None
    """Incarnation that was deleted"""

    @staticmethod
    def from_message(message: admin_pb2.DeleteTopicResponse) -> TopicDeleted:
        return TopicDeleted(rows=message.rows, incarnation=message.incarnation)


@dataclasses.dataclass(frozen=True)
class TopicLocation:
    """The shard of a topic and its owner, even if the topic does not exist."""

    shard: int
    owner_address: str
    """host:port of the owner; empty if the shard has none"""
    owner: str
    """Daemon id of the owner; empty if the shard has none"""
    epoch: int
    """Epoch of the shard as known to the daemon that answered"""
    served_here: bool
    """True if the daemon that answered is the owner"""

    @staticmethod
    def from_message(message: cluster_pb2.LookupTopicResponse) -> TopicLocation:
        return TopicLocation(
            shard=message.shard,
            owner_address=message.owner_address,
            owner=message.owner,
            epoch=message.epoch,
            served_here=message.served_here,
        )
