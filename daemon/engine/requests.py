"""Every call of the services, brought to its shard and topic.

Owns: the checks that need nothing but the request and the limits, and finding the topic.
Does not own: what a call does (`served_topic` and what it is made of), the wire, and whether the daemon serves
(`engine`).
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from daemon.core import limits
from daemon.engine.calls import (
    AddBatch,
    AddOutcome,
    HeldPositions,
    SubscriptionCreated,
    TopicPage,
    TopicStats,
)
from daemon.engine.dispatch import DispatchStream
from daemon.engine.environment import Environment
from daemon.engine.served_topic import ServedTopic
from daemon.errors import InvalidArgument, NotFound
from daemon.metrics import TopicNumbers

if TYPE_CHECKING:
    from daemon.engine.shard import ServedShard

TOPICS_PAGE_MAX = 1000
# A scrape that takes longer than this, in seconds, fails.
SNAPSHOT_S = 10.0


class Shards(Protocol):
    """What the calls see of the engine."""

    @property
    def shards(self) -> Mapping[int, ServedShard]:
        """The shards that are owned and served."""
        ...

    def shard_of(self, topic: str) -> ServedShard:
        """The shard of a topic. Raises what a caller is told while the shards are not served here."""
        ...

    def check_serving(self) -> None:
        """Raises the same."""
        ...


class Requests:
    """The calls of one engine. Made on the event loop that runs it."""

    def __init__(self, engine: Shards, environment: Environment) -> None:
        self._engine = engine
        self._environment = environment
        self._loop = asyncio.get_running_loop()

    async def add(self, topic: str, batch: AddBatch) -> AddOutcome:
        """Adds positions to a topic; returns when they are durable. See `daemon.core.topic`."""
        request_limits = self._environment.request_limits
        limits.check_name("topic", topic, request_limits.topic_max_bytes)
        limits.check_rows("entry_id", len(batch.entry_id), request_limits.rows_max)
        served = await self._engine.shard_of(topic).topic_to_write(topic)
        return await served.add(batch)

    async def create_subscription(self, topic: str, subscription: str) -> SubscriptionCreated:
        self._check_names(topic, subscription)
        return await self._engine.shard_of(topic).subscriptions.create(topic, subscription)

    async def delete_subscription(self, topic: str, subscription: str) -> None:
        self._check_names(topic, subscription)
        self._topic(topic)
        await self._engine.shard_of(topic).subscriptions.delete(topic, subscription)

    async def open_dispatch(self, topic: str, subscription: str, held: HeldPositions) -> DispatchStream:
        """Opens a dispatcher's stream; it may hold as many positions as one message can name. Raises NotFound."""
        self._check_names(topic, subscription)
        served = self._topic(topic)
        return await served.open_subscription(
            subscription, held, streams_max=self._environment.config.limits.streams_per_subscription_max
        )

    async def list_topics(self, page_size: int, after: str) -> TopicPage:
        """At most `page_size` topics whose names come after `after`."""
        if not 0 <= page_size <= TOPICS_PAGE_MAX:
            raise InvalidArgument(f"page_size is {page_size}; it must be 0 to {TOPICS_PAGE_MAX}")
        self._engine.check_serving()
        served = {name: topic for shard in self._engine.shards.values() for name, topic in shard.topics.items()}
        ordered = sorted(served)
        first = bisect.bisect_right(ordered, after) if after else 0
        page = ordered[first : first + (page_size or TOPICS_PAGE_MAX)]
        more = first + len(page) < len(ordered)
        return TopicPage(
            topics=tuple(served[name].summary() for name in page),
            next_after=page[-1] if more else None,
            as_of_ms=self._environment.clock.now_ms(),
        )

    async def topic_stats(self, topic: str) -> TopicStats:
        limits.check_name("topic", topic, self._environment.request_limits.topic_max_bytes)
        served = self._topic(topic)
        return served.stats(applied_slot=self._engine.shard_of(topic).topic_commits[topic].manifest.applied)

    def metrics_snapshot(self) -> Sequence[TopicNumbers]:
        """Every topic's numbers, for a scrape. Called in the scrape's thread; taken on the loop."""
        if self._loop.is_closed():
            return ()
        return asyncio.run_coroutine_threadsafe(self._topic_numbers(), self._loop).result(timeout=SNAPSHOT_S)

    async def _topic_numbers(self) -> list[TopicNumbers]:
        now_ms = self._environment.clock.now_ms()
        numbers = []
        for shard in list(self._engine.shards.values()):
            for topic in list(shard.topics.values()):
                numbers.append(topic.numbers(now_ms))
                # Hand-outs and requests have their turn between any two topics.
                await asyncio.sleep(0)
        return numbers

    def _check_names(self, topic: str, subscription: str) -> None:
        request_limits = self._environment.request_limits
        limits.check_name("topic", topic, request_limits.topic_max_bytes)
        limits.check_name("subscription", subscription, request_limits.subscription_max_bytes)

    def _topic(self, topic: str) -> ServedTopic:
        served = self._engine.shard_of(topic).topic(topic)
        if served is None:
            raise NotFound(f"there is no topic {topic!r}")
        return served
