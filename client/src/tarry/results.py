"""What the client answers with: frozen values, free of wire types.

Owns: the result classes and how each is read from its message.
Does not own: the meaning of a field, which is the comment on it in `proto/tarry/v1`; what is seen of topics
(`tarry.inspection`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tarry import policies, reasons, wire
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2


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
    refused: reasons.Refused = dataclasses.field(default_factory=reasons.Refused.nothing)
    """Rows that were not stored since their time or level is invalid: how many, which, and why (OnInvalid.RETURN)."""

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
            refused=reasons.Refused.merge([(first, part.refused) for first, part in parts]),
        )


class IgnoredReason(enum.IntEnum):
    """Why nothing happened to a position that a request named."""

    NOT_THERE = dispatch_pb2.IGNORED_REASON_NOT_THERE
    """The subscription is owed no row of it."""
    NOT_DUE = dispatch_pb2.IGNORED_REASON_NOT_DUE
    """Its row is not due yet, by the daemon's clock: it comes by itself."""
    OTHER_TIME = dispatch_pb2.IGNORED_REASON_OTHER_TIME
    """Its row has another time."""
    OTHER_DELIVERY = dispatch_pb2.IGNORED_REASON_OTHER_DELIVERY
    """It is that row, and another hand-out of it."""
    TAKEN_BACK = dispatch_pb2.IGNORED_REASON_TAKEN_BACK
    """It was taken back, since it is behind a row of its key that was negatively acknowledged."""
    NOT_HELD = dispatch_pb2.IGNORED_REASON_NOT_HELD
    """Of an extension: it is not in flight at this stream, or not leased."""


AnswerOnIgnored: TypeAlias = (
    dispatch_pb2.Done
    | dispatch_pb2.AcknowledgeResponse
    | dispatch_pb2.NegativeAcknowledgeResponse
    | dispatch_pb2.ExtendLeaseResponse
)


class Ignored(reasons.RowsWithReasons[IgnoredReason]):
    """How many positions of a request were ignored: a number, with which and why.

    Example: `for row, why in (await subscription.ack(batch)).items(): print(batch.delivery_id(row), why.name)`
    """

    known = IgnoredReason
    index: NDArray[np.int64]
    """Their rows in what was given, ascending. Empty where the daemon is of before it told."""
    rows: int
    """How many positions were given."""

    def __new__(cls, ignored: int, index: NDArray[np.int64], reason: NDArray[np.int64], rows: int) -> Ignored:
        made = super().__new__(cls, ignored)
        made.index, made.reason, made.rows = index, reason, rows
        return made

    @staticmethod
    def from_message(message: AnswerOnIgnored, rows: int) -> Ignored:
        """What a request of so many positions was answered with."""
        index, reason = reasons.rows_and_reasons(message.ignored_index, message.ignored_reason)
        return Ignored(message.ignored, index, reason, rows)

    @staticmethod
    def merge(parts: Sequence[Ignored]) -> Ignored:
        """The result of a batch from those of its requests, in their order."""
        firsts = np.cumsum([0, *(part.rows for part in parts)])
        nothing = np.empty(0, np.int64)
        return Ignored(
            sum(parts),
            np.concatenate([nothing, *(part.index + first for part, first in zip(parts, firsts, strict=False))]),
            np.concatenate([nothing, *(part.reason for part in parts)]),
            int(firsts[-1]),
        )

    def placed(self, places: NDArray[np.int64], rows: int) -> Ignored:
        """The result for a request of `rows` positions that was sent without those that are not among `places`: these
        were taken back before.
        """
        taken_back = np.setdiff1d(np.arange(rows), places)
        index = np.concatenate([places[self.index], taken_back])
        reason = np.concatenate([self.reason, np.full(len(taken_back), IgnoredReason.TAKEN_BACK, np.int64)])
        order = np.argsort(index)
        return Ignored(self + len(taken_back), index[order], reason[order], rows)


@dataclasses.dataclass(frozen=True)
class Nacked:
    """What became of positions that were negatively acknowledged. All others come back later, durably."""

    ignored: Ignored
    """Nothing happened to them: how many, which, and why."""
    dead_lettered: int
    """Dead letters now, durably: rejected, or redelivered as often as the policy allows."""

    @staticmethod
    def from_message(message: dispatch_pb2.NegativeAcknowledgeResponse, rows: int) -> Nacked:
        return Nacked(ignored=Ignored.from_message(message, rows), dead_lettered=message.dead_lettered)

    @staticmethod
    def merge(parts: Sequence[Nacked]) -> Nacked:
        """The result of a batch from those of its requests."""
        return Nacked(
            ignored=Ignored.merge([part.ignored for part in parts]),
            dead_lettered=sum(part.dead_lettered for part in parts),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Withdrawn:
    """Positions of a batch that are as they were, by why; indexes are those of the rows in the batch."""

    not_found_index: NDArray[np.int64]
    """There is no row: never added, acknowledged, cancelled before, or lost with a damaged bucket."""
    already_due_index: NDArray[np.int64]
    """Due, and at no dispatcher."""
    in_flight_index: NDArray[np.int64]
    """Handed out to a dispatcher."""
    may_have_landed: bool
    """Whether the answer of an earlier try was lost. If so, that try may have done it to positions that are not found
    now."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cancelled(Withdrawn):
    """What became of positions to cancel. Every other position than those listed was cancelled, durably."""

    cancelled: int

    @staticmethod
    def from_message(message: delayed_delivery_pb2.CancelMessagesResponse, *, may_have_landed: bool) -> Cancelled:
        return Cancelled(**_withdrawn(message), may_have_landed=may_have_landed, cancelled=message.cancelled)

    @staticmethod
    def merge(parts: Sequence[tuple[int, Cancelled]]) -> Cancelled:
        """The result of a batch from those of its requests, each with the index of its first row."""
        return Cancelled(**_merged(parts), cancelled=sum(part.cancelled for _, part in parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Rescheduled(Withdrawn):
    """What became of positions to reschedule. Every other position than those listed has its new time, durably."""

    rescheduled: int
    raised_index: NDArray[np.int64]
    """Rows that were stored with a later time than the one asked for, and below, that time."""
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
        """The result of a batch from those of its requests, each with the index of its first row."""
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
    """How many rows a trim dropped, or the subscription is owed no longer: a number, with what became of them."""

    dead_lettered: int
    """Of these, dead letters now."""
    may_have_landed: bool
    """Whether the answer of an earlier try was lost. If so, that try may have dropped rows that are not counted."""

    def __new__(cls, trimmed: int, *, dead_lettered: int, may_have_landed: bool) -> Trimmed:
        made = super().__new__(cls, trimmed)
        made.dead_lettered, made.may_have_landed = dead_lettered, may_have_landed
        return made

    @staticmethod
    def from_message(message: delayed_delivery_pb2.TrimMessagesResponse, *, may_have_landed: bool) -> Trimmed:
        return Trimmed(message.trimmed, dead_lettered=message.dead_lettered, may_have_landed=may_have_landed)

    @staticmethod
    def merge(parts: Sequence[Trimmed]) -> Trimmed:
        """The result of a trim from those of its requests."""
        return Trimmed(
            sum(parts),
            dead_lettered=sum(part.dead_lettered for part in parts),
            may_have_landed=any(part.may_have_landed for part in parts),
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
class SubscriptionDeleted:
    """A subscription that is gone."""

    dead_letters: int | None
    """Dead letters that left with it; None when the answer that told it was lost."""

    @staticmethod
    def from_message(message: dispatch_pb2.DeleteSubscriptionResponse) -> SubscriptionDeleted:
        return SubscriptionDeleted(message.dead_letters)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What became of dead letters that were to be delivered again."""

    replayed: int
    """Rows of the subscription again, durably, with no redelivery counted."""
    skipped: int
    """Dead letters still: the subscription's own index has a row of their position."""

    @staticmethod
    def from_message(message: admin_pb2.ReplayDeadLettersResponse) -> Replayed:
        return Replayed(replayed=message.replayed, skipped=message.skipped)

    @staticmethod
    def merge(parts: Sequence[Replayed]) -> Replayed:
        """The result of a call from those of its requests."""
        return Replayed(replayed=sum(part.replayed for part in parts), skipped=sum(part.skipped for part in parts))


@dataclasses.dataclass(frozen=True)
class DelayLevelsInForce:
    """The delay levels of a topic, or the daemon's own."""

    levels: policies.DelayLevels
    delay_ms: tuple[int, ...]
    """Level 1 first."""
    of_topic: bool
    """They were set for the topic; if not, they are the daemon's."""
    pending: tuple[int, ...]
    """How many rows of the topic are not due yet, by the level they were added by, level 1 first; it may be longer than
    the table, which had more levels then."""

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
    """Delay levels that are in force now."""

    levels: policies.DelayLevels
    warnings: tuple[str, ...]
    """What is allowed and may be a mistake."""

    @staticmethod
    def from_message(message: admin_pb2.SetDelayLevelsResponse) -> DelayLevelsSet:
        return DelayLevelsSet(policies.DelayLevels.from_message(message.levels), tuple(message.warnings))


@dataclasses.dataclass(frozen=True)
class TopicPolicies:
    """The policy of a topic."""

    policy: policies.TopicPolicy
    """What was set."""
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
class Merged:
    """Merges that were made on request."""

    merges: int
    merged_buckets: int
    """Buckets that they replaced."""
    buckets: int
    """Sealed buckets of the topic now."""

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
    """What a collection has done so far, or in a dry run would have done. Fields as in `tarry.v1.GarbageSummary`."""

    shards_done: int
    shards: int
    topics_done: int
    topics: int
    """How many the shards have that were listed so far."""
    done: bool
    """Whether it is over: nothing follows."""
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
