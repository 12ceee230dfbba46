"""Defines what a topic holds as of a slot, as values.

    rows of a topic  =  of each live bucket those that are not gone, and those that are in no sealed bucket yet
    a subscription   =  is owed rows of the shared index and of its own ones (`formats.index_ids`) that it has not
                        acknowledged, those of the shared one only when they are due after its `since_ms`

These values do not say what is due, because that follows from a clock. They do not say what a dispatcher holds, because
no store knows that. All values are frozen, can be pickled, and hold columns and bitmaps, never an object for a row.
`topic_reading` reads them from a store.
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
    """A live bucket of the manifest.

    `gone` are those of its positions whose rows are gone. `acknowledged` has, by subscription id, those of the others
    that a subscription acknowledged. The rows of a quarantined bucket are missing until they are added again: no
    subscription is owed them, and `gone` is the stored state.
    """

    live: LiveBucket
    gone: PositionSet
    acknowledged: Mapping[int, PositionSet]

    @property
    def index_id(self) -> int:
        return self.live.subscription_id

    @property
    def present_rows(self) -> int:
        """The number of rows that are not gone, and can be read."""
        return 0 if self.live.quarantined else self.live.rows - len(self.gone)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class UnsealedRows:
    """Rows of an index that are in no sealed bucket, in due order; none of them is gone."""

    index_id: int
    rows: Rows
    acknowledged: Mapping[int, PositionSet]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackedRows:
    """Rows of an index that a subscription is owed and negatively acknowledged.

    `redeliver_at_ms` u64[n] says when each is redelivered; a row past that time is due.
    """

    index_id: int
    rows: Rows
    redeliver_at_ms: U64


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SubscriptionContents:
    """A subscription as its manifest has it, its negatively acknowledged rows, and its dead letters."""

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
    """Read the rows of a bucket that are not gone, in due order, with one read of the whole object.

    Nothing is read of a quarantined bucket. Raises Damaged, and NotFound, also if the bucket was merged or dropped and
    collected since: then the state is old.
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
    """Return a mask of the rows of an index that a subscription is owed, due or not.

    None of the `rows` is gone; `acknowledged` is that of the bucket or of the unsealed rows.
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
