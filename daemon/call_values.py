"""Defines the values, in columns, that callers of the engine pass and get.

`daemon.core` gives them meaning; `daemon.grpc_services` maps them to messages.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from daemon.core import garbage_rules
from daemon.core.backlog.dead_letter_rows import DeadLetterRows
from daemon.core.decisions.claims import HeldPositions, Ignored
from daemon.core.index.bucket import RebuildNeeded
from daemon.core.index.delay_levels import DelayLevels
from daemon.core.index.retention import RetentionScan
from daemon.core.index.scan import Place
from daemon.core.key_shared.hash_slots import HashRange
from daemon.core.key_shared.key_shared_stats import ConsumerStats, KeySharedStats
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy, TopicPolicy
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds

# Trailing metadata of `Check` of the health service: a mark of a standby, and `Health.reason` in UTF-8
HEALTH_STANDS_BY_KEY = "stands-by"
HEALTH_REASON_KEY = "reason-bin"


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """The state of the daemon: whether it serves, and if not, what it waits for.

    With `stands_by` it waits for another daemon, and nothing is wrong with it.
    """

    serving: bool
    reason: str
    stands_by: bool = False


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HandedOut:
    """Rows delivered to a dispatcher, with the epoch of the delivery.

    `redelivery_count` is u32[n], how often each was negatively acknowledged; None means never. For `batch_index` see
    `HeldPositions`. `consumer_id` is u32[n], the receivers on a KEY_SHARED stream; None on any other.
    """

    epoch: int
    rows: Rows
    redelivery_count: U32 | None = None
    batch_index: U32 | None = None
    consumer_id: U32 | None = None

    def held(self) -> HeldPositions:
        """Return the positions with which the dispatcher acknowledges the rows."""
        return HeldPositions(
            self.rows.ledger_id, self.rows.entry_id, self.rows.deliver_at_ms, self.batch_index, self.redelivery_count
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Consumer:
    """A receiver behind a dispatcher; fields as in `tarry.v1.Consumer`."""

    consumer_id: int
    name: str
    address: str = ""
    permits: int = 0
    hash_ranges: tuple[HashRange, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeldByConsumers:
    """Positions that consumers of a stream held on an earlier stream.

    `consumer_id` is u32[n]. `key_hash` is u32[n] for planned positions, which have `deliver_at_ms` 0; None without any.
    """

    positions: HeldPositions
    consumer_id: U32
    key_hash: U32 | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """The answer to a plan: `consumer_id` is u32[n], the receiver of each position now, 0 if it is HELD."""

    epoch: int
    request_id: int
    consumer_id: U32


@dataclasses.dataclass(frozen=True, slots=True)
class TakenBack:
    """Rows that consumers of a stream held and no longer hold."""

    rows: HandedOut


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Nack:
    """Positions to redeliver later or, with `reject`, never; `text` may then say why.

    `key_hash` is u32[n] for positions without a row that the subscription is owed. They have `deliver_at_ms` 0 if Tarry
    has not delivered them, or are `forwarded` if they were acknowledged when they were passed on. `schedule_ids` are
    those of the same positions, or None if none has one. `delay_ms` is u64[n] and `delay_level` i32[n]; if both are
    None, the subscription's policy applies.
    """

    positions: HeldPositions
    delay_ms: U64 | None = None
    delay_level: npt.NDArray[np.int32] | None = None
    reject: bool = False
    text: str = ""
    key_hash: U32 | None = None
    forwarded: bool = False
    schedule_ids: ScheduleIds | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NackOutcome:
    """The outcome of a negative acknowledgement: `ignored` positions with reasons; the number of new dead letters."""

    ignored: Ignored
    dead_lettered: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Leased:
    """Rows of a lease that ends `lease_ms` from now; no rows if nothing came due in time."""

    handed_out: HandedOut
    lease_ms: int
    rebuild_needed: tuple[RebuildNeeded, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TopicPolicies:
    """The policy of a topic: `stored` as it was set, and `effective` with every field filled."""

    stored: TopicPolicy
    effective: TopicPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class TopicLevels:
    """The delay levels in force. `of_topic` is whether they were set for the topic; otherwise they are the daemon's.

    `pending` counts rows by level that are not due yet, level 1 first, up to the highest level of the table or of such
    a row. It is empty if no topic was named.
    """

    levels: DelayLevels
    of_topic: bool
    pending: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """The outcome of merging: `merges` replaced `merged_buckets`, and the topic has `buckets` sealed ones now."""

    merges: int
    merged_buckets: int
    buckets: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
    """The outcome of a trim: `rows` were dropped, and `dead_lettered` of them became dead letters.

    With `more` there may be further ones, left to another request.
    """

    rows: int
    dead_lettered: int
    more: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    """The outcome of a seal: one committed bucket for each index that had rows, `rows` in all.

    `bucket` is the first one, that of the shared index if there is one; it is empty if there was nothing to seal.
    """

    rows: int
    bucket: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GarbageProgress:
    """The progress of a collection; fields as in `tarry.v1.CollectGarbageResponse`."""

    shards: int
    shards_done: int = 0
    topics_done: int = 0
    topics: int = 0
    summary: garbage_rules.Summary = garbage_rules.NOTHING_DONE
    done: bool = False

    def plus(
        self, topics_done: int, topics: int, summary: garbage_rules.Summary, *, shards_done: int = 0
    ) -> GarbageProgress:
        """Add the progress of a pass over one more shard, and whether it is done."""
        return dataclasses.replace(
            self,
            shards_done=self.shards_done + shards_done,
            topics_done=self.topics_done + topics_done,
            topics=self.topics + topics,
            summary=self.summary + summary,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The outcome of a deletion: `rows` left with the topic, due or not; `incarnation` is the deleted one."""

    rows: int
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class TopicLocation:
    """The owner of a topic's shard. `owner_address` and `owner` are empty if the shard has no owner."""

    shard: int
    owner_address: str
    owner: str
    epoch: int
    served_here: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionCreated:
    """The outcome of creating a subscription. `created` is False if it existed."""

    subscription_id: int
    since_ms: int
    created: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TopicSummary:
    """One topic in a list.

    `next_due_ms` is 0 if nothing is pending (Unix ms); `due` counts rows that are due and not gone.
    """

    topic: str
    shard: int
    pending: int
    buckets: int
    subscriptions: int
    next_due_ms: int
    due: int


@dataclasses.dataclass(frozen=True, slots=True)
class TopicPage:
    """Topics in the order of their names. `next_after` is the name to continue after, None on the last page.

    `topics_loading` and `topics_damaged` are not listed since they are not loaded yet, or cannot be.
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
    own_pending: int
    nacked: int
    next_redelivery_ms: int
    dead_letters: int
    consumers: int = 0
    waiting: int = 0
    properties: NamedValues = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionPage:
    """Subscriptions in the order of their names. `next_after` is the name to continue after, None on the last page."""

    subscriptions: tuple[SubscriptionStats, ...]
    next_after: str | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerSummary:
    """One consumer, with the id that its dispatcher uses."""

    consumer_id: int
    stats: ConsumerStats


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerPage:
    """Consumers in the order of joining. `next_after` is the number to continue after, None on the last page.

    `key_shared` is None unless a stream has the subscription open as KEY_SHARED.
    """

    consumers: tuple[ConsumerSummary, ...]
    next_after: int | None
    as_of_ms: int
    key_shared: KeySharedStats | None


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
    subscription: str


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPage:
    """Buckets in the order of (first ledger, last ledger).

    `next_after` is the place to continue after, None on the last page. `mutable_rows` counts rows that are in no sealed
    bucket.
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
    last_due_ms: int
    merges: int
    survey: RetentionScan
    due: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RetentionPage:
    """Ledgers that have rows, ascending, and the lowest entry of each that has one; u64[n] each.

    `uncertain` has the first and last ledger of damaged buckets with missing rows. `next_after` is the ledger to
    continue after, None on the last page.
    """

    ledger_id: U64
    lowest_entry_id: U64
    uncertain: tuple[tuple[int, int], ...]
    next_after: int | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """The part of a topic's rows to show: from_ms <= deliver_at_ms < until_ms (Unix ms, 0 for no limit).

    `ledgers` are the first and the last. `subscription` restricts to rows that it is owed. None means every ledger,
    every index.
    """

    from_ms: int = 0
    until_ms: int = 0
    ledgers: tuple[int, int] | None = None
    subscription: str | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScheduledPage:
    """Rows that are not due yet, in due order. `next_after` is the place to continue after, None on the last page.

    `subscription_index` is u32[n], places in `subscriptions`, which name the owner of each row's index; the first one
    is empty, for the shared index.
    """

    rows: Rows
    subscription_index: U32
    subscriptions: tuple[str, ...]
    next_after: Place | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BacklogPage:
    """Rows that a subscription is owed and has not acknowledged, in due order.

    `in_flight` is bool[n]. `redeliver_at_ms` is u64[n] (Unix ms), 0 for rows that are not NACKED; None if none is. For
    `redelivery_count` and `batch_index`, u32[n], see `HandedOut`; for `next_after` see `ScheduledPage`.
    """

    rows: Rows
    in_flight: npt.NDArray[np.bool_]
    redeliver_at_ms: U64 | None
    redelivery_count: U32 | None
    batch_index: U32 | None
    next_after: Place | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeadLetterPage:
    """Dead letters by ascending id. `next_after` is the id to continue after, None on the last page."""

    rows: DeadLetterRows
    next_after: int | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay: `replayed` dead letters are rows again; `skipped` ones stay.

    The positions of skipped ones have rows already.
    """

    replayed: int
    skipped: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Histogram:
    """The number of rows that come due in each bar; fields as in `tarry.v1.GetHistogramResponse`, `rows` i64[bars]."""

    from_ms: int
    until_ms: int
    width_ms: int
    rows: npt.NDArray[np.int64]
    rows_before: int
    rows_after: int
    segments_counted: int
    segments_read: int
    as_of_ms: int
