"""An engine that is all in memory: the facade of `daemon.engine`, to test the edge without storage.

It is real as far as a caller sees: adds are idempotent, what is due is handed out in order against permits,
acknowledgements count what they ignored. It has no journal, no buckets and no recovery; its rows are Python objects.
Faults: `fail_with` is raised by every call; while `hold` is set, adds and acknowledgements stay unanswered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from daemon import config, errors
from daemon.core import limits
from daemon.engine import calls
from storage_backends.formats.rows import U64, Rows

EPOCH = 7
Position = tuple[int, int]


@dataclasses.dataclass
class _Subscription:
    subscription_id: int
    since_ms: int
    # Position and time of what left the backlog for good.
    acknowledged: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)
    in_flight: dict[Position, FakeDispatchStream] = dataclasses.field(default_factory=dict)
    streams: list[FakeDispatchStream] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Topic:
    # deliver_at_ms and key_hash
    rows: dict[Position, tuple[int, int]] = dataclasses.field(default_factory=dict)
    subscriptions: dict[str, _Subscription] = dataclasses.field(default_factory=dict)

    def backlog(self, subscription: _Subscription, now_ms: int) -> list[tuple[int, int, int]]:
        """(deliver_at_ms, ledger_id, entry_id) of what is due and not acknowledged, in the order of hand-out."""
        return sorted(
            (due, *position)
            for position, (due, _) in self.rows.items()
            if subscription.since_ms < due <= now_ms and (*position, due) not in subscription.acknowledged
        )


class FakeEngine:
    """See the module. Use it from one event loop."""

    def __init__(self, settings: config.Config, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000):
        self.settings = settings
        self.now_ms = now_ms
        self.topics: dict[str, _Topic] = {}
        self.fail_with: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.calls_begun = 0
        self.streams_opened = 0
        self._happened = asyncio.Event()
        self._last_subscription_id = 0
        self._health = calls.Health(serving=True, reason="")
        self._on_health_change: list[Callable[[calls.Health], None]] = []

    @property
    def requests(self) -> FakeEngine:
        """The calls, as `daemon.engine.requests` has them."""
        return self

    async def add(self, topic: str, batch: calls.AddBatch) -> calls.AddOutcome:
        now_ms = await self._begin()
        request_limits = self.settings.limits
        limits.check_name("topic", topic, request_limits.topic_bytes_max)
        limits.check_rows("entry_id", len(batch.entry_id), request_limits.rows_per_request_max)
        times = limits.absolute_times(
            batch.deliver_at_ms, batch.delay_ms, now_ms=now_ms, delay_max_ms=request_limits.delay_max_ms
        )
        rows = self.topics.setdefault(topic, _Topic()).rows
        hashes = np.zeros(len(times), np.uint32) if batch.key_hash is None else batch.key_hash
        accepted, late, returned = 0, 0, []
        columns = (batch.ledger_id.tolist(), batch.entry_id.tolist(), times.tolist(), hashes.tolist())
        for index, (ledger_id, entry_id, due, key_hash) in enumerate(zip(*columns, strict=True)):
            if (ledger_id, entry_id) in rows:
                continue
            late += due <= now_ms
            if due <= now_ms and batch.return_already_due:
                returned.append(index)
                continue
            rows[ledger_id, entry_id] = (due, key_hash)
            accepted += 1
        self._wake(topic)
        return calls.AddOutcome(
            accepted=accepted,
            duplicates=len(times) - accepted - len(returned),
            returned_index=np.array(returned, np.uint32),
            late_on_arrival=late,
            raised_index=np.empty(0, np.uint32),
            raised_deliver_at_ms=np.empty(0, np.uint64),
        )

    async def create_subscription(self, topic: str, subscription: str) -> calls.SubscriptionCreated:
        now_ms = await self._begin()
        limits.check_name("topic", topic, self.settings.limits.topic_bytes_max)
        limits.check_name("subscription", subscription, self.settings.limits.subscription_bytes_max)
        mine = self.topics.setdefault(topic, _Topic()).subscriptions
        created = subscription not in mine
        if created:
            most = self.settings.limits.subscriptions_per_topic_max
            if len(mine) >= most:
                raise errors.QuotaExceeded(
                    f"subscription: the topic has {len(mine)}, the limit is {most}", retry_after_ms=1000
                )
            self._last_subscription_id += 1
            mine[subscription] = _Subscription(self._last_subscription_id, now_ms if mine else 0)
        known = mine[subscription]
        return calls.SubscriptionCreated(
            subscription_id=known.subscription_id, since_ms=known.since_ms, created=created
        )

    async def delete_subscription(self, topic: str, subscription: str) -> None:
        await self._begin()
        self.find(topic, subscription)
        del self.topics[topic].subscriptions[subscription]

    async def open_dispatch(self, topic: str, subscription: str, held: calls.HeldPositions) -> FakeDispatchStream:
        await self._begin()
        known = self.find(topic, subscription)
        backlog = set(self.topics[topic].backlog(known, self.now_ms()))
        stream = FakeDispatchStream(self, topic, known)
        for ledger_id, entry_id, due in zip(
            held.ledger_id.tolist(), held.entry_id.tolist(), held.deliver_at_ms.tolist(), strict=True
        ):
            if (due, ledger_id, entry_id) in backlog and (ledger_id, entry_id) not in known.in_flight:
                known.in_flight[ledger_id, entry_id] = stream
                stream.held += 1
        known.streams.append(stream)
        self.streams_opened += 1
        self._happened.set()
        return stream

    async def list_topics(self, page_size: int, after: str) -> calls.TopicPage:
        names = sorted(name for name in self.topics if name > after)
        page = names[:page_size]
        return calls.TopicPage(
            topics=tuple(
                calls.TopicSummary(
                    topic=name,
                    shard=0,
                    pending=self._pending(name),
                    buckets=0,
                    subscriptions=len(self.topics[name].subscriptions),
                    next_due_ms=self._next_due_ms(name),
                )
                for name in page
            ),
            next_after=page[-1] if len(names) > page_size else None,
            as_of_ms=self.now_ms(),
        )

    async def topic_stats(self, topic: str) -> calls.TopicStats:
        limits.check_name("topic", topic, self.settings.limits.topic_bytes_max)
        if topic not in self.topics:
            raise errors.NotFound(f"topic: there is no {topic!r}")
        known, now_ms = self.topics[topic], self.now_ms()
        return calls.TopicStats(
            topic=topic,
            topic_id="id",
            shard=0,
            epoch=EPOCH,
            incarnation=1,
            pending=self._pending(topic),
            mutable_rows=len(known.rows),
            buckets=0,
            bucket_bytes=0,
            loaded_rows=0,
            next_due_ms=self._next_due_ms(topic),
            oldest_due_ms=0,
            applied_slot=0,
            subscriptions=tuple(
                calls.SubscriptionStats(
                    subscription=name,
                    subscription_id=each.subscription_id,
                    since_ms=each.since_ms,
                    backlog=len(known.backlog(each, now_ms)),
                    in_flight=len(each.in_flight),
                    dispatchers=len(each.streams),
                    permits=sum(stream.permits for stream in each.streams),
                )
                for name, each in sorted(known.subscriptions.items())
            ),
            as_of_ms=now_ms,
        )

    @property
    def health(self) -> calls.Health:
        return self._health

    def on_health_change(self, callback: Callable[[calls.Health], None]) -> None:
        self._on_health_change.append(callback)

    def set_health(self, health: calls.Health) -> None:
        self._health = health
        for callback in self._on_health_change:
            callback(health)

    def find(self, topic: str, subscription: str) -> _Subscription:
        limits.check_name("topic", topic, self.settings.limits.topic_bytes_max)
        limits.check_name("subscription", subscription, self.settings.limits.subscription_bytes_max)
        if topic not in self.topics or subscription not in self.topics[topic].subscriptions:
            raise errors.NotFound(f"subscription: there is no {subscription!r} of topic {topic!r}")
        return self.topics[topic].subscriptions[subscription]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until calls and streams have made the condition true; fails after 10 s."""
        async with asyncio.timeout(10):
            while not condition():
                self._happened.clear()
                await self._happened.wait()

    async def _begin(self) -> int:
        """The time of the call, when nothing holds it up."""
        self.calls_begun += 1
        self._happened.set()
        if self.fail_with is not None:
            raise self.fail_with
        if self.hold is not None:
            await self.hold.wait()
        return self.now_ms()

    def _wake(self, topic: str) -> None:
        for subscription in self.topics[topic].subscriptions.values():
            for stream in subscription.streams:
                stream.changed.set()

    def _pending(self, topic: str) -> int:
        return sum(due > self.now_ms() for due, _ in self.topics[topic].rows.values())

    def _next_due_ms(self, topic: str) -> int:
        return min((due for due, _ in self.topics[topic].rows.values() if due > self.now_ms()), default=0)


class FakeDispatchStream:
    """The facade of a dispatch stream."""

    def __init__(self, engine: FakeEngine, topic: str, subscription: _Subscription) -> None:
        self.epoch = EPOCH
        self.held = 0
        self.permits = 0
        self.closed = False
        self.changed = asyncio.Event()
        self.lost: Exception | None = None
        self._engine = engine
        self._topic = topic
        self._subscription = subscription

    def grant(self, permits: int) -> None:
        self.permits += permits
        self.changed.set()

    def lose(self, error: Exception) -> None:
        """The shard is lost: hand-outs end with the error."""
        self.lost = error
        self.changed.set()

    async def acknowledge(self, ledger_id: U64, entry_id: U64, deliver_at_ms: U64, *, awaited: bool = True) -> int:
        limits.check_rows("entry_id", len(entry_id), self._engine.settings.limits.rows_per_request_max)
        now_ms = await self._engine._begin()
        backlog = set(self._engine.topics[self._topic].backlog(self._subscription, now_ms))
        ignored = 0
        for position in zip(ledger_id.tolist(), entry_id.tolist(), deliver_at_ms.tolist(), strict=True):
            if (position[2], position[0], position[1]) not in backlog:
                ignored += 1
                continue
            self._subscription.acknowledged.add(position)
            self._subscription.in_flight.pop(position[:2], None)
        return ignored

    async def next_messages(self) -> calls.HandedOut:
        while True:
            self.changed.clear()
            if self.lost is not None:
                raise self.lost
            rows = self._take()
            if rows:
                due, ledger_id, entry_id = zip(*rows, strict=True)
                table = self._engine.topics[self._topic].rows
                hashes = [table[row[1], row[2]][1] for row in rows]
                return calls.HandedOut(
                    epoch=EPOCH,
                    rows=Rows(
                        np.array(due, np.uint64),
                        np.array(ledger_id, np.uint64),
                        np.array(entry_id, np.uint64),
                        np.array(hashes, np.uint32) if any(hashes) else None,
                    ),
                )
            next_due_ms = self._engine._next_due_ms(self._topic)
            wait_s = (next_due_ms - self._engine.now_ms()) / 1000 if next_due_ms else None
            try:
                await asyncio.wait_for(self.changed.wait(), wait_s)
            except TimeoutError:
                continue

    def close(self) -> None:
        self.closed = True
        if self in self._subscription.streams:
            self._subscription.streams.remove(self)
        in_flight = self._subscription.in_flight
        for position in [position for position, holder in in_flight.items() if holder is self]:
            del in_flight[position]
        self._engine._wake(self._topic)
        self._engine._happened.set()

    def _take(self) -> list[tuple[int, int, int]]:
        backlog = self._engine.topics[self._topic].backlog(self._subscription, self._engine.now_ms())
        ready = [row for row in backlog if row[1:] not in self._subscription.in_flight][: self.permits]
        self._subscription.in_flight.update({row[1:]: self for row in ready})
        self.permits -= len(ready)
        return ready
