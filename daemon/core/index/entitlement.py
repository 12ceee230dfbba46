"""What subscriptions are owed of an index: rows until they acknowledge them, or are owed them no longer.

Owns: the sets of what each subscription acknowledged, and which rows are gone since nobody is owed them any longer.
Does not own: the buckets that keep these sets (`index`, `bucket`), the backlogs (`subscription_state`), and which
records say so (`ack_decisions`, `withdrawal_decisions`, `topic`).

The shared index is owed to every subscription that is entitled to a row. A subscription's own indexes are owed to it
alone: what it acknowledges there is gone, and nothing else is kept of who acknowledged what.
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
    """Who is owed rows beside others: subscription id -> its `since_ms`. Nobody is, where an index has one owner."""

    since_ms: Mapping[int, int]

    @functools.cached_property
    def last_since_ms(self) -> int:
        """Rows due later are owed to every one of them."""
        return max(self.since_ms.values(), default=0)


NOBODY_ELSE = Entitled({})


def owed_among(index: Index, asked: BitMap64, subscription_id: int) -> BitMap64:
    """Those of the positions that have a row, waiting or due, that a subscription has not acknowledged."""
    found = BitMap64()
    for bucket in index.that_may_have(asked):
        here = bucket.present & asked
        if here and subscription_id in bucket.acknowledged:
            here -= bucket.acknowledged[subscription_id]
        found |= here
    return found


def backlog_among(index: Index, keys: BitMap64, subscription_id: int) -> BitMap64:
    """Those of the positions that are in the backlog of a subscription."""
    found = BitMap64()
    for bucket in index.that_may_have(keys):
        due = bucket.passed & keys
        found |= due - bucket.acknowledged[subscription_id] if subscription_id in bucket.acknowledged else due
    return found


def acknowledged_among(index: Index, keys: BitMap64) -> dict[int, BitMap64]:
    """Those of the positions that a subscription is owed no longer, by its id."""
    found: dict[int, BitMap64] = {}
    for bucket in index.that_may_have(keys):
        for subscription_id, acknowledged in bucket.acknowledged.items():
            if acknowledged.intersect(keys):
                found.setdefault(subscription_id, BitMap64()).update(acknowledged & keys)
    return found


def acknowledge(index: Index, rows: KeyedRows, keys: BitMap64, by: int, entitled: Entitled) -> int:
    """A subscription acknowledged positions; those that nobody is owed any longer are gone.

    `keys`: the set of the positions. `entitled`: every subscription; this one is missing if it was deleted since. A row
    that came due before a subscription was created counts as acknowledged by it. The number of acknowledged rows that
    the head had passed.
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
    """What came due before one of the others was created counts as acknowledged by it."""
    for number, since_ms in entitled.since_ms.items():
        before = rows.rows.deliver_at_ms <= np.uint64(since_ms)
        if number != by and before.any():
            bucket.acknowledged_by(number).update(bitmap_of(rows.keys[before]) & hit)


def waive(index: Index, keys: BitMap64, subscription_id: int) -> BitMap64:
    """A subscription is owed positions no longer; those of them that were in its backlog."""
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
            damaged.acknowledged_by(subscription_id).update(missing)
    return backlog


def admit(index: Index, subscription_id: int) -> None:
    """A subscription was created that is not owed what has been passed: that counts as acknowledged by it."""
    for bucket in index.buckets:
        if bucket.passed_rows:
            bucket.acknowledged_by(subscription_id).update(bucket.passed)


def dismiss(index: Index, subscription_id: int) -> None:
    """A subscription was deleted; what nobody else was owed is gone already."""
    for bucket in index.tracked:
        bucket.acknowledged.pop(subscription_id, None)


def dismiss_all_but(index: Index, subscriptions: Collection[int]) -> None:
    """Subscriptions that were deleted since their acknowledgements were stored."""
    for bucket in index.tracked:
        bucket.acknowledged = {number: keys for number, keys in bucket.acknowledged.items() if number in subscriptions}


def owed_to_none_of(index: Index, subscriptions: Sequence[int]) -> BitMap64:
    """The positions that all of the subscriptions acknowledged; those that are due when there are none."""
    found = BitMap64()
    for bucket in index.tracked:
        sets = [bucket.acknowledged.get(number) for number in subscriptions]
        if not sets:
            found |= bucket.passed
        elif all(sets):
            found |= BitMap64.intersection(*[keys for keys in sets if keys])
    return found
