"""Makes the pages and counts of topics that people, dashboards and Prometheus see. It stands alone since it only reads.

All values come from memory and may be slightly stale; `as_of_ms` says as of when. Nothing waits for the store.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from daemon.call_values import (
    BucketPage,
    BucketSummary,
    ConsumerPage,
    ConsumerSummary,
    SubscriptionPage,
    SubscriptionStats,
    TopicLevels,
    TopicStats,
    TopicSummary,
)
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import delay_levels
from daemon.core.index.bucket import QuarantinedBucket, SealedBucket
from daemon.core.index.retention import RetentionScan
from daemon.core.index.runs import earliest
from daemon.core.key_shared import key_shared_stats
from daemon.errors import InvalidArgument
from daemon.metrics import TopicNumbers
from daemon.topic.open_streams import DispatchStream
from daemon.topic.served_topic import ServedTopic
from storage_backends.formats import index_ids

PAGE_MAX = 1000
# Consumers that are read before deliveries and requests have their turn
CONSUMERS_A_TURN = 50

T = TypeVar("T")


def page_size_of(page_size: int) -> int:
    """Return the size of a page; 0 asks for the largest. Raises InvalidArgument."""
    if not 0 <= page_size <= PAGE_MAX:
        raise InvalidArgument(f"page_size is {page_size}; it must be 0 to {PAGE_MAX}")
    return page_size or PAGE_MAX


def page_after(
    items: Iterable[T], place: Callable[[T], str], page_size: int, after: str
) -> tuple[Sequence[T], str | None]:
    """Return at most `page_size` items in the order of their places, after the place `after`.

    The second value is the last place of the page, or None on the last page.
    """
    ordered = sorted(items, key=place)
    first = bisect.bisect_right(ordered, after, key=place) if after else 0
    page = ordered[first : first + page_size]
    return page, place(page[-1]) if first + len(page) < len(ordered) else None


def summary(topic: ServedTopic) -> TopicSummary:
    indexes = topic.core.indexes
    return TopicSummary(
        topic=topic.core.name,
        shard=topic.shard.number,
        pending=indexes.pending_rows,
        buckets=len(indexes.sealed),
        subscriptions=len(topic.core.subscriptions),
        next_due_ms=indexes.next_due_ms() or 0,
        due=indexes.due_rows,
    )


def levels(topic: ServedTopic) -> TopicLevels:
    settings = topic.settings
    pending = pending_by_level(topic.core)
    highest = max(settings.levels.top, *pending) if pending else settings.levels.top
    return TopicLevels(
        settings.levels,
        of_topic=settings.delay_levels is not None,
        pending=tuple(pending.get(level, 0) for level in range(1, highest + 1)),
    )


def pending_by_level(topic: TopicState) -> dict[int, int]:
    """Return the pending rows of each delay level that has any."""
    return delay_levels.pending_rows(index.levels for index in topic.indexes.values())


def stats(topic: ServedTopic, survey: RetentionScan, *, applied_slot: int, merges: int, now_ms: int) -> TopicStats:
    core, indexes = topic.core, topic.core.indexes
    return TopicStats(
        topic=core.name,
        topic_id=core.topic_id,
        shard=topic.shard.number,
        epoch=topic.shard.epoch,
        incarnation=core.incarnation,
        pending=indexes.pending_rows,
        mutable_rows=_mutable_rows(core),
        buckets=len(indexes.sealed),
        bucket_bytes=_bucket_bytes(core),
        loaded_rows=indexes.loaded_rows,
        next_due_ms=indexes.next_due_ms() or 0,
        oldest_due_ms=oldest_due_ms(core),
        applied_slot=applied_slot,
        subscriptions=tuple(subscription_stats(topic, state) for state in core.subscriptions.values()),
        as_of_ms=now_ms,
        rebuild_needed=core.rebuild_needed(),
        last_due_ms=indexes.last_due_ms(),
        merges=merges,
        survey=survey,
        due=indexes.due_rows,
    )


def oldest_due_ms(core: TopicState) -> int:
    """Return the time of the oldest row that is due and not in flight; 0 if there is none."""
    return earliest(*[state.oldest_due_ms() for state in core.subscriptions.values()]) or 0


def subscription_stats(topic: ServedTopic, state: SubscriptionState) -> SubscriptionStats:
    streams = topic.streams_of(state)
    key_shared = state.key_shared
    permits = sum(stream.permits for stream in streams if isinstance(stream, DispatchStream))
    own = topic.core.indexes.serving(state.subscription_id)[1:]
    return SubscriptionStats(
        subscription=state.stored.name,
        subscription_id=state.subscription_id,
        since_ms=state.stored.since_ms,
        backlog=state.backlog,
        in_flight=len(state.in_flight),
        dispatchers=len(streams),
        permits=permits if key_shared is None else key_shared_stats.permits(key_shared),
        leased=state.leased_rows,
        policy=state.stored.policy,
        own_pending=sum(index.pending_rows for index in own),
        nacked=len(state.nacks),
        next_redelivery_ms=state.nacks.next_due_ms() or 0,
        dead_letters=len(state.dead_letters),
        consumers=0 if key_shared is None else len(key_shared.consumers),
        waiting=0 if key_shared is None else len(key_shared.waiting),
        properties=state.properties,
    )


async def consumers_page(
    topic: ServedTopic, state: SubscriptionState, page_size: int, after: int, *, now_ms: int
) -> ConsumerPage:
    """Return consumers in the order in which they joined, after the one numbered `after`; 0 begins with the first."""
    page: list[ConsumerSummary] = []
    next_after: int | None = after
    while next_after is not None and len(page) < page_size:
        if state.key_shared is None:
            return ConsumerPage(tuple(page), None, now_ms, None)
        asked = min(CONSUMERS_A_TURN, page_size - len(page))
        found = key_shared_stats.consumer_stats(state.key_shared, next_after, asked + 1)
        next_after = found[asked - 1].number if len(found) > asked else None
        sharing = topic.served_subscription(state).key_sharing
        page += [ConsumerSummary(sharing.consumer_id_of(each.number), each) for each in found[:asked]]
        await asyncio.sleep(0)
    shown = None if state.key_shared is None else key_shared_stats.subscription_stats(state.key_shared)
    return ConsumerPage(tuple(page), next_after, now_ms, shown)


def subscriptions_page(topic: ServedTopic, page_size: int, after: str, *, now_ms: int) -> SubscriptionPage:
    """Return subscriptions in the order of their names, after the name `after`."""
    states, next_after = page_after(
        topic.core.subscriptions.values(), lambda state: state.stored.name, page_size, after
    )
    return SubscriptionPage(
        subscriptions=tuple(subscription_stats(topic, state) for state in states),
        next_after=next_after,
        as_of_ms=now_ms,
    )


def buckets_page(topic: ServedTopic, page_size: int, after: str, *, now_ms: int) -> BucketPage:
    """Return sealed buckets in the order of (first ledger, last ledger), after the place `after`."""
    core = topic.core
    buckets: list[SealedBucket | QuarantinedBucket] = [
        *core.indexes.sealed.values(),
        *core.indexes.quarantined.values(),
    ]
    page, next_after = page_after(buckets, _place_of, page_size, after)
    return BucketPage(
        buckets=tuple(_bucket_summary(core, bucket) for bucket in page),
        next_after=next_after,
        as_of_ms=now_ms,
        mutable_rows=_mutable_rows(core),
    )


def _place_of(bucket: SealedBucket | QuarantinedBucket) -> str:
    live = bucket.live
    return f"{live.first_ledger_id:020d}-{live.last_ledger_id:020d}-{live.object.name}"


def _bucket_summary(core: TopicState, bucket: SealedBucket | QuarantinedBucket) -> BucketSummary:
    live = bucket.live
    quarantined = isinstance(bucket, QuarantinedBucket)
    return BucketSummary(
        bucket=live.object.name,
        size_bytes=live.object.size_bytes,
        rows=live.rows,
        pending=0 if quarantined else bucket.waiting_rows,
        due=0 if quarantined else bucket.passed_rows,
        first_ledger_id=live.first_ledger_id,
        last_ledger_id=live.last_ledger_id,
        min_deliver_at_ms=live.min_deliver_at_ms,
        max_deliver_at_ms=live.max_deliver_at_ms,
        segments=live.segments,
        segments_loaded=core.indexes.cache.segments_of(live.object.name),
        level=live.level,
        compatible_form=live.compatible_form,
        quarantined=quarantined,
        damage=live.damage,
        subscription=name_of(core, live.subscription_id),
    )


def name_of(core: TopicState, index_id: int) -> str:
    """Return the subscription of an index; "" for the shared index, and for a deleted subscription."""
    state = core.subscriptions.get(index_ids.subscription_of(index_id))
    return "" if state is None else state.stored.name


def numbers(topic: ServedTopic, survey: RetentionScan, now_ms: int) -> TopicNumbers:
    """Return the topic's numbers for a scrape."""
    core, indexes = topic.core, topic.core.indexes
    states = core.subscriptions.values()
    shared = [state.key_shared for state in states if state.key_shared is not None]
    oldest_ms = oldest_due_ms(core)
    return TopicNumbers(
        topic=core.name,
        pending=indexes.pending_rows,
        mutable_rows=_mutable_rows(core),
        loaded_rows=indexes.loaded_rows,
        buckets=len(indexes.sealed) + len(indexes.memory_buckets),
        bucket_bytes=_bucket_bytes(core),
        backlog=sum(state.backlog for state in states),
        in_flight=sum(len(state.in_flight) for state in states),
        leased=sum(state.leased_rows for state in states),
        nacked=sum(len(state.nacks) for state in states),
        dead_letters=sum(len(state.dead_letters) for state in states),
        dead_letters_full=sum(not state.dead_letter_room for state in states),
        rebuild_needed=sum(needed.rows for needed in core.rebuild_needed()),
        oldest_due_age_s=max(0, now_ms - oldest_ms) / 1000 if oldest_ms else 0.0,
        key_shared_consumers=sum(len(each.consumers) for each in shared),
        key_shared_waiting=sum(len(each.waiting) for each in shared),
        draining_hashes=sum(len(key_shared_stats.draining_hashes(each)) for each in shared),
        nack_blocked_hashes=sum(key_shared_stats.nack_blocked_hashes(each) for each in shared),
        pending_by_level=pending_by_level(core),
        ledgers=survey.ledgers,
        lowest=survey.lowest,
    )


def _mutable_rows(core: TopicState) -> int:
    return sum(bucket.waiting_rows for bucket in core.indexes.memory_buckets)


def _bucket_bytes(core: TopicState) -> int:
    return sum(bucket.live.object.size_bytes for bucket in core.indexes.sealed.values())
