"""What a topic holds as of a slot, as values.

Owns: these values, the rows of a bucket by them, and what a subscription is owed.
Does not own: how they are read from a store (`topic_reading`), and what jobs do with them.

    rows of a topic  =  of each live bucket those that are not gone, and those that are in no sealed bucket yet
    a subscription   =  is owed rows of the shared index and of its own ones (`formats.index_ids`) that it has not
                        acknowledged, those of the shared one only when they are due after its `since_ms`

What comes due is not looked at: whether a row waits or is due follows from a clock. What is in a dispatcher's hand is
in no store. All values are frozen, can be pickled, and hold columns and bitmaps, never an object for a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from batch.engine.root import TopicPlace
from storage_backends import bucket_reading, commit
from storage_backends.formats import index_ids
from storage_backends.formats.manifest import LiveBucket, Subscription, TopicManifest
from storage_backends.formats.position_bitmap import PositionSet
from storage_backends.formats.redelivery_columns import DeadLetterColumns
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.object_store import ObjectStore


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BucketState:
    """A live bucket of the manifest. `gone`: those of its positions whose rows are no more; `acknowledged`: of the
    others those that a subscription acknowledged, by its id.

    What a quarantined bucket held is missing until it is added again: nobody is owed it, and `gone` is what was gone
    when that was stored.
    """

    live: LiveBucket
    gone: PositionSet
    acknowledged: Mapping[int, PositionSet]

    @property
    def index_id(self) -> int:
        return self.live.subscription_id

    @property
    def present_rows(self) -> int:
        """Rows that are not gone, and can be read."""
        return 0 if self.live.quarantined else self.live.rows - len(self.gone)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class UnsealedRows:
    """Rows of an index that are in no sealed bucket, in due order; none of them is gone."""

    index_id: int
    rows: Rows
    acknowledged: Mapping[int, PositionSet]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackedRows:
    """Rows of an index that a subscription is owed and negatively acknowledged. `redeliver_at_ms`: u64[n], when each
    comes back; what is past that is due.
    """

    index_id: int
    rows: Rows
    redeliver_at_ms: U64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SubscriptionContents:
    """A subscription as its manifest has it, what it negatively acknowledged, and its dead letters."""

    stored: Subscription
    nacked: tuple[NackedRows, ...]
    dead_letters: DeadLetterColumns


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicContents:
    """A topic as of slot `applied_slot` of its shard."""

    place: TopicPlace
    tip: commit.Tip[TopicManifest]
    applied_slot: int
    buckets: tuple[BucketState, ...]
    unsealed: tuple[UnsealedRows, ...]
    subscriptions: tuple[SubscriptionContents, ...]

    @property
    def manifest(self) -> TopicManifest:
        return self.tip.manifest

    @property
    def name(self) -> str:
        return self.tip.manifest.topic


def rows_of(store: ObjectStore, bucket: BucketState) -> Rows:
    """The rows of a bucket that are not gone, in due order. One read of the whole object; of a quarantined bucket
    nothing is read.

    Raises Damaged; NotFound also when the bucket was merged or dropped and collected since: then the state is old.
    """
    if not bucket.present_rows:
        return Rows.empty()
    _, rows = bucket_reading.read_bucket(store, bucket.live)
    if not bucket.gone:
        return rows
    return rows.take(~bucket.gone.mask_of(rows.ledger_id, rows.entry_id))


def owed_mask(
    subscription: Subscription, index_id: int, rows: Rows, acknowledged: Mapping[int, PositionSet]
) -> npt.NDArray[np.bool_]:
    """Which rows of an index a subscription is owed, due or not. `rows`: none of them gone; `acknowledged`: as the
    bucket or the unsealed rows have it.
    """
    if not index_ids.serves(index_id, subscription.subscription_id):
        return np.zeros(len(rows), np.bool_)
    if index_id != index_ids.SHARED:
        return np.ones(len(rows), np.bool_)
    owed = rows.deliver_at_ms > np.uint64(subscription.since_ms)
    acknowledged_here = acknowledged.get(subscription.subscription_id)
    if acknowledged_here is not None:
        owed &= ~acknowledged_here.mask_of(rows.ledger_id, rows.entry_id)
    return owed
