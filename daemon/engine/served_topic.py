"""A topic that this daemon serves: requests, due rows and streams meet here.

Owns: the order of one topic's requests against subscriptions that come and go, its streams, its wake-ups, loading its
segments, and reading backlogs again for subscriptions that are behind.
Does not own: decisions (`daemon.core.topic`), slots (`group_commit`), seals and drops (`bucket_life`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from daemon.core import limits
from daemon.core.index import SeenRows
from daemon.core.positions import KeyedRows
from daemon.core.segments import SegmentRange
from daemon.core.subscription import SubscriptionState
from daemon.core.topic import AddBatch, AddOutcome, HeldPositions, Topic
from daemon.engine.calls import SubscriptionStats, TopicStats, TopicSummary
from daemon.engine.dispatch import DispatchStream
from daemon.engine.due_loop import DueLoop
from daemon.engine.environment import Environment
from daemon.engine.group_commit import GroupCommit
from daemon.engine.segment_loading import SegmentLoader
from daemon.errors import NotFound, QuotaExceeded
from daemon.metrics import TopicNumbers
from storage_backends.formats.journal import Record

log = logging.getLogger(__name__)

# Rows that a topic passes in one turn, and that a backlog is read again by.
PASS_ROWS = 20_000
CATCH_UP_ROWS = 20_000
# A subscription that is behind is read on for when READY has fewer rows.
READY_LOW_ROWS = 20_000
# Buckets that wait for their seal before adds are refused.
SEALING_MAX = 8
SEALING_RETRY_MS = 200
STREAMS_RETRY_MS = 5_000


class Owned(Protocol):
    """What a topic sees of its shard."""

    number: int
    epoch: int
    commits: GroupCommit

    @property
    def may_hand_out(self) -> bool: ...

    async def acknowledgements_open(self) -> None: ...


class ServedTopic:
    """One topic of an owned shard."""

    def __init__(self, topic: Topic, shard: Owned, due_loop: DueLoop, environment: Environment) -> None:
        self.core = topic
        self.shard = shard
        self.streams: dict[int, dict[int, DispatchStream]] = {}
        self.wake_at_ms: int | None = None
        # The last slot that changed the topic: a checkpoint must hold it when the manifest does not.
        self.last_changed_slot = 0
        self._due_loop = due_loop
        self._environment = environment
        self._loader = SegmentLoader(topic, environment, self._segments_loaded)
        self._behind: dict[int, asyncio.Task[None]] = {}
        self._dispatchers = itertools.count(1)
        self._ended: Exception | None = None
        # Set while requests may pass; cleared while a subscription comes or goes.
        self._open = asyncio.Event()
        self._open.set()

    # ---- requests

    async def add(self, batch: AddBatch) -> AddOutcome:
        while not self._open.is_set():
            await self._open.wait()
        commits = self.shard.commits
        commits.check_accepting()
        if len(self.core.index.sealing) >= SEALING_MAX:
            raise QuotaExceeded(
                f"topic {self.core.name}: {SEALING_MAX} buckets wait to be sealed, that is the limit; try again",
                retry_after_ms=SEALING_RETRY_MS,
            )
        environment = self._environment
        record, outcome = self.core.stage_add(
            batch, now_ms=environment.clock.now_ms(), request_limits=environment.request_limits
        )
        if record is None:
            await commits.confirmed()
        else:
            await asyncio.shield(commits.stage(record))
        environment.metrics.added(
            self.core.name,
            accepted=outcome.accepted,
            duplicates=outcome.duplicates,
            returned=len(outcome.returned_index),
            late_on_arrival=outcome.late_on_arrival,
        )
        return outcome

    async def acknowledge(self, state: SubscriptionState, claims: HeldPositions, *, awaited: bool) -> int:
        limits.check_rows("entry_id", len(claims), self._environment.request_limits.rows_max)
        while not self._open.is_set():
            await self._open.wait()
        commits = self.shard.commits
        commits.check_accepting()
        record, rest = self.core.stage_acknowledge(state, claims)
        slot = None if record is None else commits.stage(record, awaited=awaited)
        ignored = len(rest)
        if len(rest):
            found = await self._find_in_backlog(state, rest)
            record = self.core.stage_acknowledge_found(state, found)
            if record is not None:
                slot = commits.stage(record, awaited=awaited)
                ignored -= len(found)
        if slot is not None:
            await asyncio.shield(slot)
        if ignored:
            # What was not in the backlog may have left it by a decision of a later slot.
            await commits.confirmed()
        await self.shard.acknowledgements_open()
        self._environment.metrics.acknowledged(self.core.name, acknowledged=len(claims) - ignored, ignored=ignored)
        return ignored

    async def _find_in_backlog(self, state: SubscriptionState, claims: HeldPositions) -> KeyedRows:
        """Claimed rows that are due and not in any hand: READY, or held over from an earlier stream."""
        if not len(self.core.in_backlog(state, claims)):
            return KeyedRows.empty()
        seen: SeenRows = {}
        while True:
            found, missing = self.core.find_in_backlog(state, claims, seen)
            if not missing:
                return found
            await self._load(missing)

    async def _load(self, wanted: Iterable[SegmentRange]) -> None:
        tasks = self._loader.start(wanted)
        if tasks:
            await asyncio.wait(tasks)

    # ---- subscriptions

    async def pause(self) -> None:
        """No request passes until `resume`; what is staged is durable and applied when this returns."""
        while not self._open.is_set():
            await self._open.wait()
        self._open.clear()
        try:
            await self.shard.commits.flush()
        except BaseException:
            self._open.set()
            raise

    def resume(self) -> None:
        self._open.set()

    async def commit_records(self, records: Iterable[Record]) -> None:
        """Makes decisions durable while the topic is paused."""
        for record in records:
            await asyncio.shield(self.shard.commits.stage(record))

    async def settle_due(self) -> None:
        """Returns when every row that is due now has been passed."""
        now_ms = self._environment.clock.now_ms()
        while self._ended is None:
            if self._pass_due(now_ms):
                # Others have their turn.
                await asyncio.sleep(0)
                continue
            wanted = self.core.index.wanted_segments(now_ms)
            if not wanted:
                return
            await self._load(wanted)

    # ---- streams

    async def open_subscription(self, subscription: str, held: HeldPositions, *, streams_max: int) -> DispatchStream:
        """Opens a stream on a subscription by its name. Raises NotFound."""
        while not self._open.is_set():
            await self._open.wait()
        states = self.core.subscriptions.values()
        state = next((state for state in states if state.stored.name == subscription), None)
        if state is None:
            raise NotFound(f"topic {self.core.name} has no subscription {subscription!r}; create it first")
        streams = len(self.streams.get(state.subscription_id, {}))
        if streams >= streams_max:
            raise QuotaExceeded(
                f"subscription {subscription!r} has {streams} open streams, the limit is {streams_max}",
                retry_after_ms=STREAMS_RETRY_MS,
            )
        return await self.open_stream(state, held)

    async def open_stream(self, state: SubscriptionState, held: HeldPositions) -> DispatchStream:
        """A dispatcher listens; the held positions that are in the backlog stay IN_FLIGHT at it."""
        stream = DispatchStream(self, state, next(self._dispatchers), epoch=self.shard.epoch)
        found = KeyedRows.empty()
        if len(held):
            # The rows that it holds have been passed before it asks for them.
            await self.settle_due()
            found = await self._find_in_backlog(state, held)
        if self._ended is not None:
            raise self._ended
        if state.subscription_id not in self.core.subscriptions:
            raise NotFound(f"subscription {state.stored.name!r} of topic {self.core.name} was deleted")
        self.core.open(state, stream.dispatcher)
        self.core.hold(state, stream.dispatcher, found)
        stream.held = len(found)
        self.streams.setdefault(state.subscription_id, {})[stream.dispatcher] = stream
        self._read_on(state)
        return stream

    def close_stream(self, stream: DispatchStream) -> None:
        of_subscription = self.streams.get(stream.state.subscription_id, {})
        if of_subscription.pop(stream.dispatcher, None) is None:
            return
        stream.state.close(stream.dispatcher)
        for other in of_subscription.values():
            other.notify()

    def end_streams(self, error: Exception, *, subscription_id: int | None = None) -> None:
        """The streams of one subscription, or all of them, end with the error."""
        for number, of_subscription in self.streams.items():
            if subscription_id in (None, number):
                for stream in list(of_subscription.values()):
                    self.close_stream(stream)
                    stream.end(error)
        if subscription_id is not None:
            self.streams.pop(subscription_id, None)

    @property
    def may_hand_out(self) -> bool:
        return self.shard.may_hand_out

    def hand_out(self, stream: DispatchStream, limit: int) -> KeyedRows:
        rows = stream.state.hand_out(stream.dispatcher, limit)
        if len(rows):
            now_ms = self._environment.clock.now_ms()
            lateness_ms = now_ms - rows.rows.deliver_at_ms.astype(np.int64)
            self._environment.metrics.handed_out(self.core.name, rows=len(rows), lateness_ms=lateness_ms)
        self._read_on(stream.state)
        return rows

    def notify(self, state: SubscriptionState) -> None:
        for stream in self.streams.get(state.subscription_id, {}).values():
            stream.notify()

    def notify_all(self) -> None:
        for of_subscription in self.streams.values():
            for stream in of_subscription.values():
                stream.notify()

    # ---- due rows

    def rows_added(self) -> None:
        """The next wake-up may be sooner, by rows of the buckets in memory."""
        if self._ended is None:
            self._due_loop.schedule(self, self.core.index.next_due_of_memory_buckets_ms())

    def changed(self) -> None:
        """Segments were loaded, or buckets sealed or dropped: the next wake-up may be sooner."""
        if self._ended is not None:
            return
        self._due_loop.schedule(self, self._next_wake_ms())

    def wake(self, now_ms: int) -> int | None:
        if self._ended is not None:
            return None
        self._pass_due(now_ms)
        ahead_ms = self._environment.config.delivery.lookahead_ms
        self._loader.start(self.core.index.wanted_segments(now_ms, ahead_ms))
        return self._next_wake_ms()

    def _pass_due(self, now_ms: int) -> int:
        passed = self.core.pass_due(now_ms, PASS_ROWS)
        if passed:
            for state in self.core.subscriptions.values():
                if state.ready_rows:
                    self.notify(state)
                self._read_on(state)
        return passed

    def _next_wake_ms(self) -> int | None:
        """Rows whose segment is not in memory wake nobody: the end of its loading does."""
        index = self.core.index
        times = [index.next_due_in_memory_ms()]
        times.append(index.next_load_ms(self._environment.config.delivery.lookahead_ms, self._loader.reads))
        return min((time for time in times if time is not None), default=None)

    def _segments_loaded(self) -> None:
        self.changed()

    # ---- subscriptions that are behind

    def _read_on(self, state: SubscriptionState) -> None:
        """Derives READY rows for a subscription that is behind and runs low."""
        number = state.subscription_id
        if (
            self._ended is not None
            or state.reader is None
            or state.ready_rows >= READY_LOW_ROWS
            or number in self._behind
        ):
            return
        needed = self.core.catch_up(state, CATCH_UP_ROWS)
        if needed:
            task = self._behind[number] = asyncio.ensure_future(self._load(needed))
            task.add_done_callback(lambda _: self._read_on_after(state))
        elif state.ready_rows:
            self.notify(state)

    def _read_on_after(self, state: SubscriptionState) -> None:
        self._behind.pop(state.subscription_id, None)
        self._read_on(state)

    # ---- stats

    def summary(self) -> TopicSummary:
        index = self.core.index
        return TopicSummary(
            topic=self.core.name,
            shard=self.shard.number,
            pending=index.pending_rows,
            buckets=len(index.sealed),
            subscriptions=len(self.core.subscriptions),
            next_due_ms=index.next_due_ms() or 0,
        )

    def oldest_due_ms(self) -> int:
        """The time of the oldest row that is READY and in memory; 0 when there is none."""
        times = [state.oldest_ready_ms() for state in self.core.subscriptions.values()]
        return min((time for time in times if time is not None), default=0)

    def stats(self, *, applied_slot: int) -> TopicStats:
        index = self.core.index
        return TopicStats(
            topic=self.core.name,
            topic_id=self.core.topic_id,
            shard=self.shard.number,
            epoch=self.shard.epoch,
            incarnation=self.core.incarnation,
            pending=index.pending_rows,
            mutable_rows=sum(bucket.waiting_rows for bucket in index.memory_buckets),
            buckets=len(index.sealed),
            bucket_bytes=sum(bucket.live.object.size_bytes for bucket in index.sealed.values()),
            loaded_rows=index.loaded_rows,
            next_due_ms=index.next_due_ms() or 0,
            oldest_due_ms=self.oldest_due_ms(),
            applied_slot=applied_slot,
            subscriptions=tuple(self._subscription_stats(state) for state in self.core.subscriptions.values()),
            as_of_ms=self._environment.clock.now_ms(),
        )

    def numbers(self, now_ms: int) -> TopicNumbers:
        """The topic at a scrape."""
        index = self.core.index
        oldest_due_ms = self.oldest_due_ms()
        return TopicNumbers(
            topic=self.core.name,
            pending=index.pending_rows,
            mutable_rows=sum(bucket.waiting_rows for bucket in index.memory_buckets),
            loaded_rows=index.loaded_rows,
            buckets=len(index.sealed) + len(index.memory_buckets),
            bucket_bytes=sum(bucket.live.object.size_bytes for bucket in index.sealed.values()),
            backlog=sum(state.backlog for state in self.core.subscriptions.values()),
            in_flight=sum(len(state.in_flight) for state in self.core.subscriptions.values()),
            oldest_due_age_s=max(0, now_ms - oldest_due_ms) / 1000 if oldest_due_ms else 0.0,
        )

    def _subscription_stats(self, state: SubscriptionState) -> SubscriptionStats:
        streams = self.streams.get(state.subscription_id, {})
        return SubscriptionStats(
            subscription=state.stored.name,
            subscription_id=state.subscription_id,
            since_ms=state.stored.since_ms,
            backlog=state.backlog,
            in_flight=len(state.in_flight),
            dispatchers=len(streams),
            permits=sum(stream.permits for stream in streams.values()),
        )

    def close(self, error: Exception) -> None:
        """The topic is served here no longer: it neither wakes nor loads, and takes no stream."""
        self._ended = error
        self.end_streams(error)
        self._loader.close()
        for task in self._behind.values():
            task.cancel()
