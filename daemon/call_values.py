"""What callers of the engine pass in and get back, in columns.

Owns: the shapes of the calls.
Does not own: their meaning (`daemon.core`) and the wire (`daemon.grpc_services`).
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


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Whether the daemon serves, and if not, what it waits for."""

    serving: bool
    reason: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HandedOut:
    """Rows that a dispatcher holds from now on, under the epoch that handed them out.

    `redelivery_count`: u32[n], how often each was negatively acknowledged; None: none was. `batch_index`: as in
    `HeldPositions`. `consumer_id`: u32[n], who of a KEY_SHARED stream receives each; None on any other.
    """

    epoch: int
    rows: Rows
    redelivery_count: U32 | None = None
    batch_index: U32 | None = None
    consumer_id: U32 | None = None

    def held(self) -> HeldPositions:
        """What the dispatcher acknowledges them with."""
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
    """Positions that consumers of a stream held on an earlier one, `consumer_id`, u32[n], each.

    `key_hash`: u32[n], those of positions with `deliver_at_ms` 0 that were planned; None: there are none.
    """

    positions: HeldPositions
    consumer_id: U32
    key_hash: U32 | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """What a plan says: `consumer_id`, u32[n], who receives each position now; 0: it is HELD."""

    epoch: int
    request_id: int
    consumer_id: U32


@dataclasses.dataclass(frozen=True, slots=True)
class TakenBack:
    """Rows that consumers of a stream held and hold no more."""

    rows: HandedOut


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Nack:
    """Positions that are to come back later, or, by `reject`, never: then `text` may say why.

    `key_hash`, u32[n], is that of a position that the subscription is owed no row of: with `deliver_at_ms` 0, which
    Tarry has not handed out, or, by `forwarded`, acknowledged when it was passed on. When it comes back: `delay_ms`,
    u64[n], `delay_level`, i32[n], or None of both: by the subscription's policy.
    """

    positions: HeldPositions
    delay_ms: U64 | None = None
    delay_level: npt.NDArray[np.int32] | None = None
    reject: bool = False
    text: str = ""
    key_hash: U32 | None = None
    forwarded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NackOutcome:
    """`ignored`: positions to which nothing happened, and why. `dead_lettered`: how many are dead letters now."""

    ignored: Ignored
    dead_lettered: int


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
class TopicLevels:
    """Delay levels in force. `of_topic`: they were set for the topic; if not, they are the daemon's.

    `pending`: rows that were added by each level and are not due yet, level 1 first, to the highest of the table or of
    such a row; none where no topic is asked about.
    """

    levels: DelayLevels
    of_topic: bool
    pending: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """`merges` were made, which replaced `merged_buckets`; the topic has `buckets` sealed ones now."""

    merges: int
    merged_buckets: int
    buckets: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
    """Rows that a trim dropped. `dead_lettered`: of these, rows that became dead letters. `more`: there may be further
    ones, which were left for another request.
    """

    rows: int
    dead_lettered: int
    more: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    """Buckets that are committed, one of each index that had rows. `rows`: of all of them; `bucket`: the first, that of
    the shared index if there is one; empty when there was nothing to seal.
    """

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
    """`next_due_ms`: 0 when nothing is pending. `due`: rows that are due and not gone."""

    topic: str
    shard: int
    pending: int
    buckets: int
    subscriptions: int
    next_due_ms: int
    due: int


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
    own_pending: int
    nacked: int
    next_redelivery_ms: int
    dead_letters: int
    consumers: int = 0
    waiting: int = 0
    properties: NamedValues = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriptionPage:
    """Subscriptions in the order of their names. `next_after`: the name to go on after, None on the last page."""

    subscriptions: tuple[SubscriptionStats, ...]
    next_after: str | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerSummary:
    """One consumer, and how its dispatcher calls it."""

    consumer_id: int
    stats: ConsumerStats


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerPage:
    """Consumers in the order in which they joined. `next_after`: the number of the one to go on after, None on the last
    page. `key_shared`: None where nobody has the subscription open as KEY_SHARED.
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
    last_due_ms: int
    merges: int
    survey: RetentionScan
    due: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RetentionPage:
    """Ledgers that have rows, ascending, and of each the lowest entry that has one: u64[n] each. `uncertain`: the first
    and the last ledger of damaged buckets of which rows are missing. `next_after`: the ledger to go on after, None on
    the last page.
    """

    ledger_id: U64
    lowest_entry_id: U64
    uncertain: tuple[tuple[int, int], ...]
    next_after: int | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What of a topic's rows is looked at: from_ms <= deliver_at_ms < until_ms, 0 is no limit; of ledgers from the
    first to the last; what a subscription is owed. None: every ledger, every index.
    """

    from_ms: int = 0
    until_ms: int = 0
    ledgers: tuple[int, int] | None = None
    subscription: str | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScheduledPage:
    """Rows that are not due yet, in the order in which they come due. `next_after`: the place to go on after, None on
    the last page.

    `subscription_index`: u32[n], of each row the place in `subscriptions` of the one whose own index it is in; the
    first of these is empty, for the shared index.
    """

    rows: Rows
    subscription_index: U32
    subscriptions: tuple[str, ...]
    next_after: Place | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BacklogPage:
    """Rows that a subscription is owed and has not acknowledged, in the order in which they came due.

    `in_flight`: bool[n], whether a row is handed out. `redeliver_at_ms`: u64[n], when a row that was negatively
    acknowledged comes back, 0 of all others; None when none waits for that. `redelivery_count`, `batch_index`: u32[n],
    as in `HandedOut`. `next_after`: as in `ScheduledPage`.
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
    """Dead letters by ascending id. `next_after`: the id to go on after, None on the last page."""

    rows: DeadLetterRows
    next_after: int | None
    as_of_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """`replayed` dead letters are rows of their subscription again; `skipped` stay, since there are rows of their
    positions.
    """

    replayed: int
    skipped: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Histogram:
    """How many rows come due in each bar; fields as in `tarry.v1.GetHistogramResponse`, `rows` i64[bars]."""

    from_ms: int
    until_ms: int
    width_ms: int
    rows: npt.NDArray[np.int64]
    rows_before: int
    rows_after: int
    segments_counted: int
    segments_read: int
    as_of_ms: int
