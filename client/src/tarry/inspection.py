"""The answers of inspection calls, frozen and free of wire types.

Comments in `proto/tarry/v1` define each field. `tarry.results` has the other answers.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import columns, policies, wire
from tarry.results import RebuildNeeded
from tarry.v1 import inspect_pb2

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TopicSummary:
    """Counts of one topic of a daemon.

    `next_due_ms` is None if nothing is pending. `due` rows are due and not acknowledged by every subscription, or wait
    for the first one; 0 also if the daemon is too old to report it.
    """

    topic: str
    shard: int
    pending: int
    buckets: int
    subscriptions: int
    next_due_ms: int | None
    due: int = 0

    @staticmethod
    def from_message(message: inspect_pb2.TopicSummary) -> TopicSummary:
        return TopicSummary(
            topic=message.topic,
            shard=message.shard,
            pending=message.pending,
            buckets=message.buckets,
            subscriptions=message.subscriptions,
            next_due_ms=message.next_due_ms or None,
            due=message.due,
        )


@dataclasses.dataclass(frozen=True)
class SubscriptionStats:
    """Counts of one subscription: `backlog` rows are due and unacknowledged, `dispatchers` are its open streams.

    `leased` positions are a part of `in_flight`.
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
    own_pending: int = 0
    """Those of the topic's `pending` rows that are in this subscription's index"""
    nacked: int = 0
    """Positions of `backlog` that wait for their redelivery"""
    next_redelivery_ms: int | None = None
    """Unix time of the next redelivery (ms); None if there is none"""
    dead_letters: int = 0
    consumers: int = 0
    """Consumers of its KEY_SHARED streams"""
    waiting: int = 0
    """Positions, due or planned, that wait for their key or for permits of its consumer"""

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
            own_pending=message.own_pending,
            nacked=message.nacked,
            next_redelivery_ms=message.next_redelivery_ms or None,
            dead_letters=message.dead_letters,
            consumers=message.consumers,
            waiting=message.waiting,
        )


@dataclasses.dataclass(frozen=True)
class TopicStats:
    """Counts of one topic as of `as_of_ms`. Times of rows are None if there is no such row."""

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
    last_due_ms: int | None = None
    """No pending row is due later. Exact until a row is cancelled or rescheduled."""
    merges: int = 0
    """Merges in flight"""
    lowest_position: tuple[int, int] | None = None
    """(ledger, entry) with no row, and no row lost with a damaged bucket, at a lower position, as of at most a minute
    ago; None if there is none, or if the daemon is too old to report it
    """
    ledgers: int = 0
    """Ledgers with rows, as of the same moment"""
    due: int = 0
    """Rows that are due and not acknowledged by every subscription, or wait for the first one; 0 also if the daemon is
    too old to report it
    """

    @staticmethod
    def from_message(message: inspect_pb2.GetTopicStatsResponse) -> TopicStats:
        lowest = message.lowest_position
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
            last_due_ms=message.last_due_ms or None,
            merges=message.merges,
            lowest_position=(lowest.ledger_id, lowest.entry_id) if message.HasField("lowest_position") else None,
            ledgers=message.ledgers,
            due=message.due,
        )


@dataclasses.dataclass(frozen=True)
class BucketSummary:
    """One sealed bucket. `pending` rows are not due yet, `due` ones are due and not gone."""

    bucket: str
    """Name of the object"""
    size_bytes: int
    rows: int
    """Rows stored"""
    pending: int
    due: int
    first_ledger_id: int
    last_ledger_id: int
    min_deliver_at_ms: int
    max_deliver_at_ms: int
    segments: int
    segments_loaded: int
    """Segments in memory"""
    level: int
    """0 for a bucket sealed from the mutable one"""
    compatible_form: bool
    quarantined: bool
    """Damaged, and neither read nor deleted"""
    damage: str
    """Damage found, if it is quarantined"""
    subscription: str
    """Subscription to whose index it belongs; empty for the shared index"""

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

    def __len__(self) -> int:
        return len(self.items)


@dataclasses.dataclass(frozen=True)
class TopicPage(Page[TopicSummary]):
    """Topics, ordered by name."""

    topics_loading: int
    """Topics that the daemon owns but has not loaded yet, which are not listed"""
    topics_damaged: int
    """Topics that cannot be served because they are damaged; the daemon's log names them"""

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
    """Sealed buckets of a topic, ordered by (first ledger, last ledger)."""

    mutable_rows: int
    """Rows that are in no sealed bucket"""

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
    """Subscriptions of a topic, ordered by name."""

    @staticmethod
    def from_message(message: inspect_pb2.ListSubscriptionsResponse) -> SubscriptionPage:
        return SubscriptionPage(
            items=tuple(SubscriptionStats.from_message(each) for each in message.subscriptions),
            next_page_token=message.next_page_token,
            as_of_ms=message.as_of_ms,
        )


class BacklogState(enum.IntEnum):
    """The state of a row that is due and not acknowledged."""

    READY = inspect_pb2.BACKLOG_STATE_READY
    """At no dispatcher"""
    IN_FLIGHT = inspect_pb2.BACKLOG_STATE_IN_FLIGHT
    """Delivered, on a stream or under a lease"""
    NACKED = inspect_pb2.BACKLOG_STATE_NACKED
    """Negatively acknowledged, until its redelivery time"""


@dataclasses.dataclass(frozen=True, eq=False)
class RowsPage:
    """A part of the requested rows in due order, as columns of one length, as of `as_of_ms`.

    `next_page_token` is empty on the last page. An earlier page may have fewer rows than requested, even none.
    """

    __repr__ = columns.short_repr

    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.uint64]
    key_hash: NDArray[np.uint32]
    """0 for a row without a key"""
    next_page_token: str
    as_of_ms: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.entry_id)


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledPage(RowsPage):
    """Rows that are not due yet."""

    __repr__ = columns.short_repr

    subscription_index: NDArray[np.int64]
    """Index into `subscriptions` for each row"""
    subscriptions: tuple[str, ...]
    """Subscriptions whose own index holds a row; the empty name is the shared index"""

    @staticmethod
    def from_message(message: inspect_pb2.ListScheduledResponse) -> ScheduledPage:
        rows = len(message.entry_id)
        own = wire.decode_indexes(message.subscription_index)
        return ScheduledPage(
            **_rows_of(message),
            subscription_index=own if len(own) else np.zeros(rows, np.int64),
            subscriptions=tuple(message.subscriptions) or ("",),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class BacklogPage(RowsPage):
    """Rows that are due and not acknowledged."""

    __repr__ = columns.short_repr

    state: NDArray[np.int64]
    """`BacklogState` of each row"""
    redelivery_count: NDArray[np.uint32]
    """Number of times that each row was negatively acknowledged or timed out"""
    batch_index: NDArray[np.uint32] | None
    """Index of the message within its batch entry, or `NO_BATCH_INDEX`; None if all rows are whole entries"""
    redeliver_at_ms: NDArray[np.uint64]
    """Unix time of a NACKED row's redelivery (ms); 0 for other rows"""

    @staticmethod
    def from_message(message: inspect_pb2.ListBacklogResponse) -> BacklogPage:
        rows = len(message.entry_id)
        times = wire.decode_u64(message.redeliver_at_ms)
        return BacklogPage(
            **_rows_of(message),
            state=wire.decode_indexes(message.state),
            redelivery_count=_counts_of(message),
            batch_index=_batch_indexes_of(message),
            redeliver_at_ms=times if len(times) else np.zeros(rows, np.uint64),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class DeadLetterPage(RowsPage):
    """Dead letters, oldest first; `deliver_at_ms` is that of their last delivery."""

    __repr__ = columns.short_repr

    dead_letter_id: NDArray[np.uint64]
    """Ascending; a subscription never uses an id again."""
    batch_index: NDArray[np.uint32] | None
    """Index of the message within its batch entry, or `NO_BATCH_INDEX`; None if all rows are whole entries"""
    redelivery_count: NDArray[np.uint32]
    """Number of times that each row was negatively acknowledged or timed out, including the last time"""
    dead_at_ms: NDArray[np.uint64]
    reason: NDArray[np.int64]
    """`DeadLetterReason` of each row"""
    text_index: NDArray[np.int64]
    """Index into `texts` of the reason that the dispatcher gave for each row"""
    texts: tuple[str, ...]
    """The first one is empty."""

    @staticmethod
    def from_message(message: inspect_pb2.ListDeadLettersResponse) -> DeadLetterPage:
        rows = len(message.entry_id)
        text_index = wire.decode_indexes(message.text_index)
        return DeadLetterPage(
            **_rows_of(message),
            dead_letter_id=wire.decode_u64(message.dead_letter_id),
            batch_index=_batch_indexes_of(message),
            redelivery_count=_counts_of(message),
            dead_at_ms=wire.decode_u64(message.dead_at_ms),
            reason=wire.decode_indexes(message.reason),
            text_index=text_index if len(text_index) else np.zeros(rows, np.int64),
            texts=tuple(message.texts) or ("",),
        )


def _counts_of(message: inspect_pb2.ListBacklogResponse | inspect_pb2.ListDeadLettersResponse) -> NDArray[np.uint32]:
    counts = wire.decode_u32(message.redelivery_count)
    return counts if len(counts) else np.zeros(len(message.entry_id), np.uint32)


def _batch_indexes_of(
    message: inspect_pb2.ListBacklogResponse | inspect_pb2.ListDeadLettersResponse,
) -> NDArray[np.uint32] | None:
    return wire.decode_u32(message.batch_index) if message.batch_index else None


def _rows_of(
    message: inspect_pb2.ListScheduledResponse | inspect_pb2.ListBacklogResponse | inspect_pb2.ListDeadLettersResponse,
) -> dict[str, Any]:
    return {
        "ledger_id": wire.decode_u64(message.ledger_id),
        "entry_id": wire.decode_u64(message.entry_id),
        "deliver_at_ms": wire.decode_u64(message.deliver_at_ms),
        "key_hash": wire.decode_u32(message.key_hash),
        "next_page_token": message.next_page_token,
        "as_of_ms": message.as_of_ms,
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Retention:
    """The part of a message log that a topic needs: for each ledger, ascending, the lowest entry with a row.

    Example: `{ledger: entry for ledger, entry in await client.retention("flights")}`
    """

    __repr__ = columns.short_repr

    ledger_id: NDArray[np.uint64]
    lowest_entry_id: NDArray[np.uint64]
    uncertain: tuple[tuple[int, int], ...]
    """First and last ledger of damaged buckets: their lost rows must be added again, so all of their entries are
    needed.
    """
    as_of_ms: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the ledgers, each with its lowest entry."""
        return zip(self.ledger_id.tolist(), self.lowest_entry_id.tolist(), strict=True)

    @property
    def lowest_position(self) -> tuple[int, int] | None:
        """The (ledger, entry) below which nothing is needed; None if nothing is needed."""
        known = [next(iter(self))] if len(self.ledger_id) else []
        return min([*known, *((first, 0) for first, _ in self.uncertain)], default=None)

    @staticmethod
    def from_messages(messages: Sequence[inspect_pb2.GetRetentionResponse]) -> Retention:
        """Read the pages of an answer, in order."""
        return Retention(
            ledger_id=np.concatenate([wire.decode_u64(each.ledger_id) for each in messages]),
            lowest_entry_id=np.concatenate([wire.decode_u64(each.lowest_entry_id) for each in messages]),
            uncertain=tuple(
                sorted({(each.first_ledger_id, each.last_ledger_id) for page in messages for each in page.uncertain})
            ),
            as_of_ms=messages[0].as_of_ms,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram of due times: bar i counts rows from `from_ms` + i * `width_ms` on, none beyond `until_ms`."""

    __repr__ = columns.short_repr

    from_ms: int
    until_ms: int
    width_ms: int
    rows: NDArray[np.uint64]
    rows_before: int
    """Pending rows before the first bar"""
    rows_after: int
    """Pending rows after the last bar"""
    segments_counted: int
    """Segments counted by their metadata alone"""
    segments_read: int
    as_of_ms: int

    @staticmethod
    def from_message(message: inspect_pb2.GetHistogramResponse) -> Histogram:
        return Histogram(
            from_ms=message.from_ms,
            until_ms=message.until_ms,
            width_ms=message.width_ms,
            rows=wire.decode_u64(message.rows),
            rows_before=message.rows_before,
            rows_after=message.rows_after,
            segments_counted=message.segments_counted,
            segments_read=message.segments_read,
            as_of_ms=message.as_of_ms,
        )


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """A position of a message log."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @staticmethod
    def from_message(message: inspect_pb2.Position) -> Position:
        return Position(message.ledger_id, message.entry_id)


@dataclasses.dataclass(frozen=True)
class PositionRange:
    """The positions after `after` up to and including `up_to`: (3:4, 3:5] is 3:5 alone."""

    after: Position
    up_to: Position

    def __str__(self) -> str:
        return f"({self.after}, {self.up_to}]"

    @staticmethod
    def from_message(message: inspect_pb2.PositionRange) -> PositionRange:
        return PositionRange(Position.from_message(message.after), Position.from_message(message.up_to))


@dataclasses.dataclass(frozen=True)
class DrainingHash:
    """A hash slot that a consumer must give up, and that waits for it."""

    hash: int
    unacked: int
    """Positions of the hash that the consumer holds"""
    blocked_attempts: int
    """Times that a position was kept back for it"""

    @staticmethod
    def from_message(message: inspect_pb2.DrainingHash) -> DrainingHash:
        return DrainingHash(message.hash, message.unacked, message.blocked_attempts)


@dataclasses.dataclass(frozen=True)
class ConsumerStats:
    """One consumer. The daemon assigns `instance_id`, its dispatcher `consumer_id`.

    Consumers of one stream have the same `stream`.
    """

    name: str
    instance_id: int
    address: str
    consumer_id: int
    stream: int
    permits: int
    unacked: int
    """Positions in flight at the consumer"""
    slots: int
    """Hash slots; without any it receives nothing"""
    hash_ranges: tuple[policies.HashRange, ...] = ()
    """The first 1,000 of them"""
    last_sent_position_when_joining: Position | None = None
    """With LAST_SENT_POSITION, the position that it waits behind; None if there is none"""
    draining_hashes_count: int = 0
    """Hashes that it has and must give up, and the positions of them that it holds"""
    draining_hashes_unacked: int = 0
    draining_hashes: tuple[DrainingHash, ...] = ()
    """The first 1,000 of them"""

    @staticmethod
    def from_message(message: inspect_pb2.ConsumerStats) -> ConsumerStats:
        return ConsumerStats(
            name=message.name,
            instance_id=message.instance_id,
            address=message.address,
            consumer_id=message.consumer_id,
            stream=message.stream,
            permits=message.permits,
            unacked=message.unacked,
            slots=message.slots,
            hash_ranges=tuple(policies.HashRange.from_message(each) for each in message.hash_ranges),
            last_sent_position_when_joining=(
                Position.from_message(message.last_sent_position_when_joining)
                if message.HasField("last_sent_position_when_joining")
                else None
            ),
            draining_hashes_count=message.draining_hashes_count,
            draining_hashes_unacked=message.draining_hashes_unacked,
            draining_hashes=tuple(DrainingHash.from_message(each) for each in message.draining_hashes),
        )


@dataclasses.dataclass(frozen=True)
class ConsumerAfterMarkDelete:
    """A consumer that receives nothing after a position until everything up to it is acknowledged."""

    name: str
    instance_id: int
    address: str
    last_sent_position_when_joining: Position

    @staticmethod
    def from_message(message: inspect_pb2.ConsumerAfterMarkDelete) -> ConsumerAfterMarkDelete:
        return ConsumerAfterMarkDelete(
            name=message.name,
            instance_id=message.instance_id,
            address=message.address,
            last_sent_position_when_joining=Position.from_message(message.last_sent_position_when_joining),
        )


@dataclasses.dataclass(frozen=True)
class KeySharedStats:
    """The state of a subscription's keys. `policy` is the one in force, with every relevant field set."""

    policy: policies.KeySharedPolicy
    consumers: int
    waiting: int
    """Positions, due or planned, that wait for their consumer's permits or for their hash"""
    draining_hashes: int
    """Hashes whose slot belongs to one consumer while another still holds positions of them"""
    draining_hashes_cleared: int
    """Hashes freed since the first consumer joined, after a position had been kept back for them"""
    draining_hashes_unacked: int
    """Positions of draining hashes that consumers hold"""
    nack_blocked_hashes: int
    """Hashes that wait for a negatively acknowledged position"""
    last_sent_position: Position | None
    """With LAST_SENT_POSITION (PIP-282); None if nothing was planned"""
    individually_sent_positions: tuple[PositionRange, ...]
    """Sent beyond it; at most the last 1,000"""
    consumers_after_mark_delete_position: tuple[ConsumerAfterMarkDelete, ...]
    """Consumers that wait for everything up to their last sent position, in the order of those positions"""
    slots_without_consumer: int

    @staticmethod
    def from_message(message: inspect_pb2.KeySharedStats) -> KeySharedStats:
        return KeySharedStats(
            policy=policies.KeySharedPolicy.from_message(message.policy),
            consumers=message.consumers,
            waiting=message.waiting,
            draining_hashes=message.draining_hashes,
            draining_hashes_cleared=message.draining_hashes_cleared,
            draining_hashes_unacked=message.draining_hashes_unacked,
            nack_blocked_hashes=message.nack_blocked_hashes,
            last_sent_position=(
                Position.from_message(message.last_sent_position) if message.HasField("last_sent_position") else None
            ),
            individually_sent_positions=tuple(
                PositionRange.from_message(each) for each in message.individually_sent_positions
            ),
            consumers_after_mark_delete_position=tuple(
                ConsumerAfterMarkDelete.from_message(each) for each in message.consumers_after_mark_delete_position
            ),
            slots_without_consumer=message.slots_without_consumer,
        )


@dataclasses.dataclass(frozen=True)
class ConsumerPage(Page[ConsumerStats]):
    """Consumers in the order in which they joined."""

    key_shared: KeySharedStats | None
    """None if no client opened the subscription as KEY_SHARED"""

    @staticmethod
    def from_message(message: inspect_pb2.ListConsumersResponse) -> ConsumerPage:
        return ConsumerPage(
            items=tuple(ConsumerStats.from_message(each) for each in message.consumers),
            next_page_token=message.next_page_token,
            as_of_ms=message.as_of_ms,
            key_shared=KeySharedStats.from_message(message.key_shared) if message.HasField("key_shared") else None,
        )
