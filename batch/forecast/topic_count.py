"""What the counts of a topic make: who is owed what when.

Owns: whose rows an index has, when what was negatively acknowledged comes back, and what waits for nothing but a
dispatcher. Does not own: what a topic holds (`batch.engine.topic_state`), counting buckets (`counting_tasks`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from batch.engine.root import TopicPlace
from batch.engine.topic_state import SubscriptionState, TopicState
from batch.forecast.result import Owed, TopicForecast, Unread
from batch.forecast.steps import Counts, Steps
from storage_backends.formats import index_ids
from storage_backends.formats.manifest import LiveBucket
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionSet, position_bitmaps
from storage_backends.formats.row_columns import Rows

# Counts of one index that are kept apart until they are added up.
_PARTS_MAX = 32


@dataclasses.dataclass(eq=False)
class TopicCount:
    """What is known of a topic so far: what its state says without reading a bucket, then what its buckets hold.

    `subscriptions`: id -> name; `counts`: by index; `redeliveries`: by subscription.
    """

    place: TopicPlace
    name: str
    subscriptions: dict[int, str]
    counts: dict[int, list[Counts]]
    redeliveries: dict[int, Counts]
    waiting_rows: int
    unread: list[Unread] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(state: TopicState, steps: Steps) -> TopicCount:
        counts: dict[int, list[Counts]] = {}
        for part in state.unsealed:
            counts.setdefault(part.index_id, []).append(Counts.of(steps, steps.of(part.rows.deliver_at_ms)))
        return TopicCount(
            place=state.place,
            name=state.name,
            subscriptions={each.stored.subscription_id: each.stored.name for each in state.subscriptions},
            counts=counts,
            redeliveries={each.stored.subscription_id: redeliveries_of(steps, each) for each in state.subscriptions},
            waiting_rows=waiting_rows(state, steps),
        )

    def add(self, index_id: int, counts: Counts) -> None:
        parts = self.counts.setdefault(index_id, [])
        parts.append(counts)
        if len(parts) == _PARTS_MAX:
            parts[:] = [Counts.merged(parts)]

    def leave_out(self, live: LiveBucket, reason: str, *, damaged: bool) -> None:
        """A bucket that cannot be counted."""
        self.unread.append(Unread(self.name, live.object.name, live.rows, reason, damaged))

    def forecast(self) -> TopicForecast:
        shared = Counts.merged(self.counts.get(index_ids.SHARED, []))
        owed = [Owed(subscription=None, receivers=len(self.subscriptions), rows=shared, redeliveries=Counts())]
        overdue_rows = shared.overdue_rows
        for number, name in sorted(self.subscriptions.items(), key=lambda each: each[1]):
            own = (number, index_ids.batch_parts_of(number))
            rows = Counts.merged([part for index_id in own for part in self.counts.get(index_id, [])])
            overdue_rows += rows.overdue_rows
            owed.append(Owed(subscription=name, receivers=1, rows=rows, redeliveries=self.redeliveries[number]))
        return TopicForecast(
            topic=self.name,
            shard=self.place.shard,
            owed=tuple(owed),
            # A clock that is behind the daemon's shows what came back as not due yet.
            overdue_rows=max(0, overdue_rows - self.waiting_rows),
            unread_rows=sum(each.rows for each in self.unread),
        )


def redeliveries_of(steps: Steps, state: SubscriptionState) -> Counts:
    """What of a subscription's negatively acknowledged rows comes back when. What should have come back is overdue, and
    counted among the rows.
    """
    found = Counts.merged([Counts.of(steps, steps.of(nacked.redeliver_at_ms)) for nacked in state.nacked])
    return dataclasses.replace(found, overdue_rows=0)


def waiting_rows(state: TopicState, steps: Steps) -> int:
    """How many rows are due and wait for a redelivery, at every subscription that is owed them still."""
    waiting: dict[int, list[Rows]] = {}
    at: dict[tuple[int, int], PositionSet] = {}
    for subscription in state.subscriptions:
        for nacked in subscription.nacked:
            rows = nacked.rows.take(nacked.redeliver_at_ms > np.uint64(steps.now_ms))
            waiting.setdefault(nacked.index_id, []).append(rows)
            place = (nacked.index_id, subscription.stored.subscription_id)
            at[place] = at.get(place, NO_POSITIONS) | _positions(rows)
    total = 0
    for index_id, parts in waiting.items():
        rows = Rows.concat(parts)
        everywhere = _positions(rows)
        if index_id == index_ids.SHARED:
            for subscription in state.subscriptions:
                stored = subscription.stored
                waits = at.get((index_id, stored.subscription_id), NO_POSITIONS)
                too_early = _positions(rows.take(rows.deliver_at_ms <= np.uint64(stored.since_ms)))
                acknowledged = _acknowledged(state, stored.subscription_id)
                everywhere = everywhere & (waits | acknowledged | too_early)
        total += len(everywhere)
    return total


def _positions(rows: Rows) -> PositionSet:
    return PositionSet.of(position_bitmaps(rows.ledger_id, rows.entry_id))


def _acknowledged(state: TopicState, subscription_id: int) -> PositionSet:
    """What a subscription acknowledged of the rows of the shared index that are not gone."""
    found = NO_POSITIONS
    for bucket in state.buckets:
        if bucket.live.subscription_id == index_ids.SHARED and not bucket.live.quarantined:
            # A position that is gone may have a newer row.
            found |= bucket.acknowledged.get(subscription_id, NO_POSITIONS) - bucket.gone
    for part in state.unsealed:
        if part.index_id == index_ids.SHARED:
            found |= part.acknowledged.get(subscription_id, NO_POSITIONS)
    return found
