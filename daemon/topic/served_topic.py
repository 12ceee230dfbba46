"""A topic that this daemon serves: requests, due rows and streams meet here.

Owns: adding and asking for rows, its streams and lines, its wake-ups, loading its segments, and reading backlogs again
for subscriptions that are behind.
Does not own: decisions (`daemon.core.topic`), requests on what was handed out (`acknowledging`,
`negative_acknowledging`), the moment of a cancellation (`topic_withdrawing`), slots (`group_commit`), seals and drops
(`bucket_life`), changes of the topic as a whole (`topic_changes`, `topic_changes`), how streams open
(`stream_opening`), sharing by key (`sharing_rounds`), leases (`leases`), and what is shown of it (`topic_inspection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from daemon.call_values import HandedOut
from daemon.core import batch_parts
from daemon.core.adding import AddBatch, AddOutcome
from daemon.core.containment import Contained, EntryRanges
from daemon.core.positions import KeyedRows
from daemon.core.quotas import Caller, PendingRows
from daemon.core.runs import earliest
from daemon.core.segments import SegmentRange
from daemon.core.subscription_state import SubscriptionState
from daemon.core.topic import Topic
from daemon.errors import NotFound, QuotaExceeded
from daemon.subscription.acknowledging import Acknowledging
from daemon.subscription.leases import Leases
from daemon.subscription.negative_acknowledging import TopicRedelivery
from daemon.subscription.open_stream import OpenStream
from daemon.subscription.served_dead_letters import TopicDeadLetters
from daemon.subscription.sharing_rounds import KeySharing
from daemon.subscription.stream_opening import Opening
from daemon.subscription.waiting_line import WaitingLine
from daemon.surroundings.due_loop import DueLoop
from daemon.surroundings.environment import Environment
from daemon.surroundings.failure_scope import TopicFailed
from daemon.surroundings.pace import Pace
from daemon.topic.segment_loading import SegmentLoader
from daemon.topic.topic_gate import TopicGate
from daemon.topic.topic_withdrawing import Withdrawing
from daemon.topic_terms import topic_settings
from daemon.topic_terms.topic_quotas import TopicQuotas
from daemon.topic_terms.topic_staging import TopicStaging
from storage_backends.formats.manifest import TopicDelayLevels, TopicPolicy

log = logging.getLogger(__name__)

# Portions that a topic passes in one turn, and that a backlog is read again by: they cost less than handing out.
PASS_PORTIONS = 2
CATCH_UP_PORTIONS = 1
# A subscription that is behind is read on for when READY has fewer rows.
READY_LOW_ROWS = 20_000
# Buckets that wait for their seal before adds are refused.
SEALING_MAX = 8
SEALING_RETRY_MS = 200
# Numbers of dispatchers are 32 bits wide where they stand with a row.
DISPATCHER_MAX = (1 << 32) - 1
# Ranges of one answer; what is more is asked for again.
CONTAINED_RANGES_MAX = 100_000


class Owned(Protocol):
    """What a topic sees of its shard."""

    number: int
    epoch: int
    commits: TopicStaging
    pending: PendingRows

    @property
    def may_hand_out(self) -> bool: ...

    @property
    def alone_in_s(self) -> float: ...

    async def alone(self) -> None: ...

    def bucket_damaged(self, topic: str, bucket: str, damage: str) -> None: ...

    async def bucket_is_live(self, topic: str, bucket: str) -> bool: ...

    def topic_failed(self, topic: ServedTopic, error: BaseException) -> None: ...


class ServedTopic:
    """One topic of an owned shard, with the policy that was set for it."""

    def __init__(
        self,
        topic: Topic,
        shard: Owned,
        due_loop: DueLoop,
        environment: Environment,
        *,
        policy: TopicPolicy,
        delay_levels: TopicDelayLevels | None = None,
    ) -> None:
        self.core = topic
        self.shard = shard
        self.settings = topic_settings.settings_of(environment, policy, delay_levels)
        self.quotas = TopicQuotas(
            topic, self.settings.quota_limits, shard.pending, environment, settled=shard.commits.settled
        )
        self.gate = TopicGate(topic.name, shard.commits)
        self.streams: dict[int, dict[int, OpenStream]] = {}
        self.opening = Opening(self, environment)
        self.key_sharing = KeySharing(self, environment)
        self.leases = Leases(self, environment)
        self.acknowledging = Acknowledging(self, environment)
        self.redelivery = TopicRedelivery(self, environment)
        self.withdrawing = Withdrawing(self, environment)
        self.dead_letters = TopicDeadLetters(self, environment)
        self.wake_at_ms: int | None = None
        # The last slot that changed the topic: a checkpoint must hold it when the manifest does not.
        self.last_changed_slot = 0
        self._due_loop = due_loop
        self._environment = environment
        self._loader = SegmentLoader(
            topic, environment, self._segments_loaded, self._bucket_damaged, self._bucket_is_live, self.failed
        )
        self._behind: dict[int, asyncio.Task[None]] = {}
        self._lines: dict[int, WaitingLine] = {}
        self._last_dispatcher = 0
        self._ended: Exception | None = None
        # No row that is due before is left to be passed.
        self._settled_until_ms = 0
        # Subscriptions that nothing is handed out to for now.
        self._withheld: frozenset[int] = frozenset()

    # ---- requests

    async def add(self, batch: AddBatch, subscription: str | None = None, caller: Caller | None = None) -> AddOutcome:
        """Adds rows for every subscription, or for one alone. Raises NotFound, QuotaExceeded."""
        await self.quotas.counted()
        await self.gate.passed()
        await self.withdrawing.none_leaving(batch.ledger_id, batch.entry_id)
        subscription_id = 0 if subscription is None else self.subscription(subscription).subscription_id
        commits = self.shard.commits
        commits.check_accepting()
        self.check_room()
        environment = self._environment
        now_ms = environment.clock.now_ms()
        admission = self.quotas.admission(caller, rows=len(batch.entry_id), now_ms=now_ms)
        records, outcome = self.core.stage_add(
            batch,
            now_ms=now_ms,
            request_limits=self.settings.request_limits,
            subscription_id=subscription_id,
            shared_index=self.settings.shared_index,
            levels=self.settings.levels,
            admit=admission.admit,
        )
        slot = commits.stage(*records) if records else None
        admission.staged(slot)
        if slot is not None:
            await asyncio.shield(slot)
        else:
            await commits.confirmed()
        environment.metrics.added(
            self.core.name,
            accepted=outcome.accepted,
            duplicates=outcome.duplicates,
            returned=len(outcome.returned_index),
            late_on_arrival=outcome.late_on_arrival,
        )
        return outcome

    def check_room(self) -> None:
        """Raises QuotaExceeded when too many buckets wait to be sealed for more rows to come."""
        if self.core.indexes.sealing >= SEALING_MAX:
            raise QuotaExceeded(
                f"topic {self.core.name}: {SEALING_MAX} buckets wait to be sealed, that is the limit; try again",
                retry_after_ms=SEALING_RETRY_MS,
            )

    async def contains(self, asked: EntryRanges, subscription: str | None) -> Contained:
        """What of the ranges is in the index: a read of what is applied. Raises NotFound."""
        if self._ended is not None:
            raise self._ended
        state = None if subscription is None else self.subscription(subscription)
        # What is due counts as due from its time on.
        self.pass_due(self._environment.clock.now_ms())
        found = self.core.contains(asked, state, ranges_max=CONTAINED_RANGES_MAX)
        await self.shard.commits.confirmed()
        return found

    async def get_scheduled(self, state: SubscriptionState, *, max_rows: int, lease_ms: int, wait_ms: int) -> KeyedRows:
        """Due rows, leased. Empty when none came in time."""
        await self.gate.passed()
        self.check_there(state)
        rows = await self.leases.get(state, max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
        if not len(rows):
            await self.shard.commits.confirmed()
        return rows

    async def load(self, wanted: Iterable[SegmentRange]) -> None:
        """Returns when the segments are in memory, or cannot be."""
        tasks = self._loader.start(wanted)
        if tasks:
            await asyncio.wait(tasks)

    # ---- subscriptions

    def subscription(self, name: str) -> SubscriptionState:
        """The state of a subscription. Raises NotFound when it does not exist."""
        state = self.core.subscription(name)
        if state is None:
            raise NotFound(f"topic {self.core.name} has no subscription {name!r}; create it first")
        return state

    def is_there(self, state: SubscriptionState) -> bool:
        """Whether the subscription was not deleted."""
        return self.core.subscriptions.get(state.subscription_id) is state

    def check_there(self, state: SubscriptionState) -> None:
        """Raises NotFound, and what ended the topic."""
        if self._ended is not None:
            raise self._ended
        if not self.is_there(state):
            raise NotFound(f"subscription {state.stored.name!r} of topic {self.core.name} was deleted")

    @contextlib.contextmanager
    def withholding(self, subscription_ids: Iterable[int]) -> Iterator[None]:
        """Nothing is handed out to these subscriptions: what they might get is about to leave."""
        self._withheld = frozenset(subscription_ids)
        try:
            yield
        finally:
            self._withheld = frozenset()
            self.notify_all()

    async def settle_due(self) -> None:
        """Returns when every row that is due now has been passed."""
        now_ms = self._environment.clock.now_ms()
        while self._ended is None and now_ms >= self._settled_until_ms:
            if self.pass_due(now_ms):
                # Others have their turn.
                await asyncio.sleep(0)
            elif wanted := self.core.indexes.wanted_segments(now_ms):
                await self.load(wanted)
            else:
                next_due_ms = self.core.indexes.next_due_ms()
                self._settled_until_ms = now_ms if next_due_ms is None else next_due_ms
                return

    async def settle_ready(self, state: SubscriptionState) -> None:
        """Returns when the subscription has READY rows, or nothing that is due now is left to be READY."""
        now_ms = self._environment.clock.now_ms()
        while self._ended is None and not state.ready_rows:
            behind = self._behind.get(state.subscription_id)
            if behind is not None:
                await asyncio.wait([behind])
            elif state.reader is not None:
                self._read_on(state)
            elif self.pass_due(now_ms):
                await asyncio.sleep(0)
            elif wanted := self.core.indexes.wanted_segments(now_ms):
                await self.load(wanted)
            else:
                return

    # ---- streams

    def next_dispatcher(self, state: SubscriptionState) -> int:
        """A number for a stream, a consumer or a lease of a subscription, that no other one of it has."""
        streams = self.streams.get(state.subscription_id, {})
        while True:
            number = self._last_dispatcher = self._last_dispatcher % DISPATCHER_MAX + 1
            taken = number in streams or self.key_sharing.has(state, number) or self.leases.has(state, number)
            if not taken and not state.held_rows(number):
                return number

    def listen(self, state: SubscriptionState, dispatcher: int) -> None:
        """READY is kept for a dispatcher that holds nothing itself."""
        self.core.open(state, dispatcher)
        self.refill(state)

    def close_stream(self, stream: OpenStream) -> None:
        of_subscription = self.streams.get(stream.state.subscription_id, {})
        if of_subscription.pop(stream.dispatcher, None) is None:
            return
        stream.state.close(stream.dispatcher)
        self.key_sharing.closed(stream)
        self.notify(stream.state)

    def end_streams(self, error: Exception, *, subscription_id: int | None = None) -> None:
        """The streams and leases of one subscription, or all of them, end with the error."""
        for number, of_subscription in self.streams.items():
            if subscription_id in (None, number):
                for stream in list(of_subscription.values()):
                    self.close_stream(stream)
                    stream.end(error)
        self.leases.end(error, subscription_id=subscription_id)
        if subscription_id is not None:
            self.streams.pop(subscription_id, None)
            self._lines.pop(subscription_id, None)

    def line(self, state: SubscriptionState) -> WaitingLine:
        """Those who wait for rows of a subscription."""
        return self._lines.setdefault(state.subscription_id, WaitingLine())

    def hand_out(self, state: SubscriptionState, dispatcher: int, limit: int) -> KeyedRows:
        """At most `limit` rows, IN_FLIGHT at the dispatcher from now on; empty when nothing may be handed out now.

        Raises TopicFailed when something goes wrong: rows that were taken out of READY would be nowhere.
        """
        if not state.available_rows or not self.may_hand_out(state):
            return KeyedRows.empty()
        with self.failing():
            rows = state.hand_out(dispatcher, limit, elapsed_ms=self._environment.elapsed_ms())
            if len(rows):
                self.count_handed_out(state, rows)
                self.redelivery.watch(state)
            self.refill(state)
        return rows

    def may_hand_out(self, state: SubscriptionState) -> bool:
        """Whether anything may be handed out to the subscription now."""
        if state.is_by_key and self.shard.alone_in_s:
            # A former owner may hand a key to another consumer.
            return False
        return state.subscription_id not in self._withheld and self.shard.may_hand_out

    def refill(self, state: SubscriptionState) -> None:
        """There may be room in READY: for what is redelivered, and for what was not read."""
        self._redeliver_on(state)
        self._read_on(state)

    def handed_out(self, state: SubscriptionState, taken: KeyedRows) -> HandedOut:
        """Rows that were handed out, as their dispatcher sees them."""
        rows, batch_index = batch_parts.unpacked(taken, self.core.indexes, state.subscription_id)
        return HandedOut(self.shard.epoch, rows, taken.redelivery_count, batch_index)

    def count_handed_out(self, state: SubscriptionState, rows: KeyedRows) -> None:
        now_ms, due_ms = self._environment.clock.now_ms(), rows.rows.deliver_at_ms.astype(np.int64)
        for index in self.core.indexes.serving(state.subscription_id):
            for level, first in index.levels.handed_out(rows.keys):
                self._environment.metrics.level_handed_out(self.core.name, level, now_ms - due_ms[first])
        # What was nacked or planned without having been pending has no time at which it was due.
        due_ms = due_ms[(due_ms > 0) & (rows.counts() == 0)]
        self._environment.metrics.handed_out(self.core.name, rows=len(rows), lateness_ms=now_ms - due_ms)

    def notify(self, state: SubscriptionState) -> None:
        """There may be something to hand out."""
        self.key_sharing.notify(state)
        line = self._lines.get(state.subscription_id)
        if line is not None and state.available_rows:
            line.notify()

    def notify_all(self) -> None:
        for state in self.core.subscriptions.values():
            self.notify(state)

    # ---- due rows

    @property
    def tick_ms(self) -> int:
        """Wake-ups are batched by as much."""
        return self.settings.tick_ms

    @property
    def pace(self) -> Pace:
        """How much is done before others have their turn."""
        return self._due_loop.pace

    def look_after(self) -> None:
        """Once a second: what depends on time alone."""
        if self._ended is None:
            self.leases.look_after()
            self.key_sharing.look_after()
            self.notify_all()

    def rows_added(self) -> None:
        """The next wake-up may be sooner, by rows of the buckets in memory or by what was negatively acknowledged; what
        waited for a decision of the slot may be handed out.
        """
        if self._ended is None:
            self.key_sharing.notify_all()
            self._count_order()
            next_due_ms = self.core.indexes.next_due_of_memory_buckets_ms()
            self._settled_until_ms = earliest(self._settled_until_ms, next_due_ms) or 0
            self._due_loop.schedule(self, earliest(next_due_ms, self.core.next_redelivery_ms()))

    def _count_order(self) -> None:
        """Counts rows that entered the index in the metrics, those of the journal when the topic
        was loaded included.
        """
        in_order, others = self.core.in_due_order_rows, self.core.out_of_order_rows
        if in_order or others:
            self.core.in_due_order_rows = self.core.out_of_order_rows = 0
            self._environment.metrics.added_in_order(self.core.name, in_due_order=in_order, others=others)

    def changed(self) -> None:
        """Segments were loaded, or buckets sealed or dropped: the next wake-up may be sooner."""
        if self._ended is not None:
            return
        self._settled_until_ms = 0
        self.key_sharing.notify_all()
        self._due_loop.schedule(self, self._next_wake_ms())

    def wake(self, now_ms: int) -> int | None:
        if self._ended is not None:
            return None
        self.pass_due(now_ms)
        ahead_ms = self._environment.config.delivery.lookahead_ms
        self._loader.start(self.core.indexes.wanted_segments(now_ms, ahead_ms))
        return self._next_wake_ms()

    def pass_due(self, now_ms: int) -> int:
        """Passes rows that are due and in memory, and takes back what is to be redelivered, some portions of them; how
        many.
        """
        passed = self.core.pass_due(now_ms, PASS_PORTIONS * self.pace.rows)
        if not passed:
            # What rows had to wait for by key may have been gone.
            self.key_sharing.notify_all()
        else:
            for state in self.core.subscriptions.values():
                self.notify(state)
                self._read_on(state)
            for record in self.core.take_not_owed():
                _ = self.shard.commits.stage(record, awaited=False)
            redeliver_at_ms = self.core.take_redelivered()
            if len(redeliver_at_ms):
                self._environment.metrics.redelivered(now_ms - redeliver_at_ms.astype(np.int64))
        return passed

    def _redeliver_on(self, state: SubscriptionState) -> None:
        """Nacked rows whose time has come may have had no room until now."""
        if len(state.nacks) and self.core.takes_redeliveries(state):
            self._due_loop.schedule(self, state.nacks.next_due_ms())

    def _next_wake_ms(self) -> int | None:
        """Rows whose segment is not in memory wake nobody: the end of its loading does."""
        indexes = self.core.indexes
        next_load_ms = indexes.next_load_ms(self._environment.config.delivery.lookahead_ms, self._loader.reads)
        return earliest(indexes.next_due_in_memory_ms(), next_load_ms, self.core.next_redelivery_ms())

    def _bucket_damaged(self, bucket: str, damage: str) -> None:
        self.shard.bucket_damaged(self.core.name, bucket, damage)

    async def _bucket_is_live(self, bucket: str) -> bool:
        return await self.shard.bucket_is_live(self.core.name, bucket)

    def _segments_loaded(self) -> None:
        self.changed()

    # ---- subscriptions that are behind

    def _read_on(self, state: SubscriptionState) -> None:
        """Derives READY rows for a subscription that is behind and runs low."""
        number = state.subscription_id
        if self._ended is not None or number in self._behind:
            return
        limit = CATCH_UP_PORTIONS * self.pace.rows_of(len(self.core.indexes.readable))
        needed: list[SegmentRange] = []
        goes_on = False
        runs_low = state.reader is not None and state.ready_rows < READY_LOW_ROWS and not state.is_full
        if runs_low:
            needed += self.core.catch_up(state, limit)
            goes_on = state.reader is None or not state.reader.is_held_up
        # However long that goes on.
        if state.key_shared is not None and state.key_shared.reads_on:
            needed += self.core.key_sharing.find_let_go(state, limit)
            goes_on = goes_on or not state.key_shared.is_held_up
        if not goes_on and not needed:
            # Nothing to look at, or not before more rows have been passed: who passes them comes here again.
            return
        if not needed:
            self.notify(state)
            if not state.looks_on:
                return
        # Of all that was looked at nothing may be handed out: others have their turn.
        waits = self.load(needed) if needed else self.pace.give_way()
        task = self._behind[number] = asyncio.ensure_future(waits)
        task.add_done_callback(lambda task: self._read_on_after(state, task))

    def _read_on_after(self, state: SubscriptionState, task: asyncio.Task[None]) -> None:
        self._behind.pop(state.subscription_id, None)
        if not task.cancelled():
            with self.contained():
                self._read_on(state)

    # ---- the end

    def failed(self, error: BaseException) -> None:
        """Something of it went wrong that was not foreseen, or its epoch is over."""
        if self._ended is None:
            self.shard.topic_failed(self, error)

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """What goes wrong inside is this topic's failure, and nobody else's."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is told with the topic
            self.failed(error)

    @contextlib.contextmanager
    def failing(self, kind: type[Exception] = Exception) -> Iterator[None]:
        """Makes errors of one kind inside this topic's failure, and raises TopicFailed in their place: whoever asked is
        told.
        """
        try:
            yield
        except kind as error:
            self.failed(error)
            raise TopicFailed(self.core.name) from error

    def abandon(self, error: Exception) -> None:
        """Closes a topic that cannot be relied on: of its streams none is asked to give anything back."""
        streams = [stream for of_subscription in self.streams.values() for stream in of_subscription.values()]
        self.streams.clear()
        for stream in streams:
            stream.end(error)
        self.close(error)

    def close(self, error: Exception) -> None:
        """The topic is served here no longer: it neither wakes nor loads, and takes no stream."""
        self._ended = error
        self.shard.commits.end(error)
        self.gate.end(error)
        self.quotas.close()
        self.redelivery.close()
        self.end_streams(error)
        self._loader.close()
        # Keys of its segments mean nothing to who serves the topic next, here as well.
        self.core.indexes.release_segments()
        for task in self._behind.values():
            task.cancel()
