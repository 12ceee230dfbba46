"""Decides which rows of an index subscriptions are owed, and which are gone since none is owed them.

Every entitled subscription is owed a row of the shared index until it acknowledges it. A subscription index is owed to
its subscription alone: what it acknowledges there is gone, and no acknowledgements are kept. The sets are in the
buckets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import KeyedRows, bitmap_of


@dataclasses.dataclass(frozen=True, eq=False)
class Entitled:
    """The subscriptions that may be owed rows: id -> `since_ms`. It is empty for an index with one owner."""

    since_ms: Mapping[int, int]

    @functools.cached_property
    def last_since_ms(self) -> int:
        """The latest `since_ms` (Unix ms): rows due later are owed to all of them."""
        return max(self.since_ms.values(), default=0)


NOBODY_ELSE = Entitled({})


def owed_among(index: Index, asked: BitMap64, subscription_id: int) -> BitMap64:
    """Return the positions with a row, pending or due, that a subscription has not acknowledged."""
    found = BitMap64()
    for bucket in index.that_may_have(asked):
        here = bucket.present & asked
        if here and subscription_id in bucket.acknowledged:
            here -= bucket.acknowledged[subscription_id]
        found |= here
    return found


def backlog_among(index: Index, keys: BitMap64, subscription_id: int) -> BitMap64:
    """Return the positions that are in the backlog of a subscription."""
    found = BitMap64()
    for bucket in index.that_may_have(keys):
        due = bucket.passed & keys
        found |= due - bucket.acknowledged[subscription_id] if subscription_id in bucket.acknowledged else due
    return found


def acknowledged_among(index: Index, keys: BitMap64) -> dict[int, BitMap64]:
    """Return the positions that each subscription is no longer owed, by id."""
    found: dict[int, BitMap64] = {}
    for bucket in index.that_may_have(keys):
        for subscription_id, acknowledged in bucket.acknowledged.items():
            if acknowledged.intersect(keys):
                found.setdefault(subscription_id, BitMap64()).update(acknowledged & keys)
    return found


def acknowledge(index: Index, rows: KeyedRows, keys: BitMap64, by: int, entitled: Entitled) -> int:
    """Acknowledge positions for a subscription and remove those that no subscription is owed any longer.

    Returns how many acknowledged rows the head had passed. `keys` is the set of the positions. `entitled` has every
    subscription, without this one if it was deleted since. A row that came due before a subscription was created counts
    as acknowledged by it.
    """
    since_ms = entitled.since_ms
    nobody_else = not since_ms or (len(since_ms) == 1 and by in since_ms)
    held = BitMap64()
    passed_rows = 0
    for bucket in index.that_may_have(keys):
        hit = bucket.present & keys if bucket.present_rows else None
        if not hit:
            continue
        if index.quarantined:
            held |= hit
        if not nobody_else and by in since_ms:
            hit -= bucket.acknowledged_by(by)
        passed_rows += hit.intersection_cardinality(bucket.passed)
        bucket.remove(hit if nobody_else else _no_longer_owed(bucket, hit, rows, by, entitled))
    for damaged in index.quarantined.values():
        missing = damaged.missing(keys - held)
        if missing:
            damaged.hold(missing)
            damaged.remove(missing if nobody_else else _no_longer_owed(damaged, missing, rows, by, entitled))
    return passed_rows


def _no_longer_owed(bucket: Bucket, hit: BitMap64, rows: KeyedRows, by: int, entitled: Entitled) -> BitMap64:
    since_ms = entitled.since_ms
    if by in since_ms:
        bucket.acknowledged_by(by).update(hit)
    if int(rows.rows.deliver_at_ms.min()) <= entitled.last_since_ms:
        _acknowledge_earlier(bucket, hit, rows, by, entitled)
    gone = hit
    for number in since_ms:
        if number != by:
            acknowledged = bucket.acknowledged.get(number)
            if not acknowledged:
                return BitMap64()
            gone = gone & acknowledged
            if not gone:
                break
    return gone


def _acknowledge_earlier(bucket: Bucket, hit: BitMap64, rows: KeyedRows, by: int, entitled: Entitled) -> None:
    """Acknowledge rows for others that were created after the rows came due."""
    for number, since_ms in entitled.since_ms.items():
        before = rows.rows.deliver_at_ms <= np.uint64(since_ms)
        if number != by and before.any():
            bucket.acknowledged_by(number).update(bitmap_of(rows.keys[before]) & hit)


def waive(index: Index, keys: BitMap64, subscription_id: int) -> BitMap64:
    """Release a subscription's claim to positions; return those that were in its backlog."""
    backlog = BitMap64()
    held = BitMap64()
    for bucket in index.that_may_have(keys):
        here = bucket.present & keys
        held |= here
        acknowledged = bucket.acknowledged.get(subscription_id, BitMap64())
        backlog |= (here & bucket.passed) - acknowledged
        if here:
            bucket.acknowledged_by(subscription_id).update(here)
    for damaged in index.quarantined.values():
        missing = damaged.missing(keys - held)
        if missing:
            damaged.hold(missing)
            damaged.acknowledged_by(subscription_id).update(missing)
    return backlog


def admit(index: Index, subscription_id: int) -> None:
    """Count passed rows as acknowledged by a new subscription, which is not owed them."""
    for bucket in index.buckets:
        if bucket.passed_rows:
            bucket.acknowledged_by(subscription_id).update(bucket.passed)


def dismiss(index: Index, subscription_id: int) -> None:
    """Forget a deleted subscription; what it alone was owed is gone already."""
    for bucket in index.tracked:
        bucket.acknowledged.pop(subscription_id, None)


def dismiss_all_but(index: Index, subscriptions: Collection[int]) -> None:
    """Forget subscriptions that were deleted since their acknowledgements were stored."""
    for bucket in index.tracked:
        bucket.acknowledged = {number: keys for number, keys in bucket.acknowledged.items() if number in subscriptions}


def owed_to_none_of(index: Index, subscriptions: Sequence[int]) -> BitMap64:
    """Return the positions that all of the subscriptions acknowledged, or the due ones if there are none."""
    found = BitMap64()
    for bucket in index.tracked:
        sets = [bucket.acknowledged.get(number) for number in subscriptions]
        if not sets:
            found |= bucket.passed
        elif all(sets):
            found |= BitMap64.intersection(*[keys for keys in sets if keys])
    return found
