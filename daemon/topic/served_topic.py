"""Serves one topic: rows come due, and requests and streams meet here.

`ServedTopic` is the topic of an owned shard. It has the pure state (`TopicState`), its slots, manifests and buckets,
and its subscriptions; it loads segments, wakes up for due rows, and ends all of these together. The shard keeps it by
name and by id.

Requests: `topic_adds`, `topic_withdrawals`, `topic_acks`, `topic_dead_letters`. Deliveries: `served_subscription`.
Changes of the topic as a whole: `daemon.shard.topic_changes`. What the topic needs of its message log:
`TopicRetention`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from daemon.call_values import RetentionPage
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import retention
from daemon.core.index.containment import Contained, EntryRanges
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.retention import RetentionScan
from daemon.core.index.runs import earliest
from daemon.core.index.segments import SegmentRange
from daemon.core.quotas import PendingRows
from daemon.errors import NotFound, NotOwner, QuotaExceeded
from daemon.group_commit.shard_slots import TopicSlots
from daemon.runtime.due_loop import DueLoop, FairShare, Pace
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic import topic_settings
from daemon.topic.bucket_lifecycle import BucketLifecycle, TopicCut
from daemon.topic.bucket_reads import SegmentLoader
from daemon.topic.merged_buckets import Adoption
from daemon.topic.open_streams import OpenStream
from daemon.topic.served_subscription import ServedSubscription, StreamOpening
from daemon.topic.topic_acks import AckRequests, NackRequests
from daemon.topic.topic_adds import TopicAdds
from daemon.topic.topic_dead_letters import TopicDeadLetters
from daemon.topic.topic_gate import TopicGate
from daemon.topic.topic_manifests import TopicManifests
from daemon.topic.topic_quotas import TopicQuotas
from daemon.topic.topic_withdrawals import TopicWithdrawals
from storage_backends import commit
from storage_backends.formats import requirements
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import TopicDelayLevels, TopicPolicy
from storage_backends.formats.row_columns import U64

log = logging.getLogger(__name__)

T = TypeVar("T")

# Time that a survey is shown; longer while nothing changes (ms)
SURVEY_MS = 60_000
# A survey takes some microseconds a ledger; above this many it is not made for callers that cannot wait.
GLANCE_PAGES_MAX = 20_000
_NOTHING = RetentionScan(None, 0)


class TopicRetention:
    """The part of its message log that one topic still needs."""

    def __init__(self, core: TopicState, environment: Environment) -> None:
        self._core = core
        self._environment = environment
        self._turn = asyncio.Lock()
        self._survey: RetentionScan | None = None
        self._surveyed_ms = 0
        self._surveyed_state: tuple[int, int] | None = None

    async def page(self, ledger_ids: U64 | None, page_size: int, after: int | None) -> RetentionPage:
        """Return the ledgers that have rows, among the given ones (None means all), behind the ledger `after`."""
        indexes = self._core.indexes
        as_of_ms = self._environment.clock.now_ms()
        if ledger_ids is None:
            places, pages = indexes.places, len(indexes.places)
            ordered = (await self._environment.run(lambda: places.in_order(pages, after))).tolist()
        else:
            ordered = retention.pages_of_ledgers(
                indexes, (each for each in ledger_ids.tolist() if after is None or each > after)
            )
        found = await self._in_turns(retention.retained(indexes, ordered, page_size))
        return RetentionPage(
            ledger_id=found.ledger_id,
            lowest_entry_id=found.lowest_entry_id,
            uncertain=tuple(retention.uncertain(indexes)),
            next_after=None if found.is_complete else int(found.ledger_id[-1]),
            as_of_ms=as_of_ms,
        )

    async def glance(self, changed_slot: int) -> RetentionScan:
        """Return a survey without waiting long: for a topic with very many ledgers the last one."""
        if len(self._core.indexes.places) > GLANCE_PAGES_MAX:
            return self._survey or _NOTHING
        return await self.survey(changed_slot)

    async def survey(self, changed_slot: int) -> RetentionScan:
        """Return a survey of the topic, at most a minute old or unchanged since. `changed_slot` is its last change."""
        async with self._turn:
            now_ms = self._environment.elapsed_ms()
            state = (changed_slot, len(self._core.indexes.quarantined))
            is_fresh = now_ms - self._surveyed_ms < SURVEY_MS or state == self._surveyed_state
            if self._survey is None or not is_fresh:
                self._survey = await self._in_turns(retention.surveyed(self._core.indexes))
                self._surveyed_ms, self._surveyed_state = now_ms, state
            return self._survey

    async def _in_turns(self, look: Generator[None, None, T]) -> T:
        """Return the result of `look`, giving others their turn at each of its steps."""
        taking_turns = FairShare(self._environment.clock)
        while True:
            try:
                next(look)
            except StopIteration as done:
                result: T = done.value
                return result
            await taking_turns.give_way()


# Portions that a topic passes in one turn: they cost less than delivering
PASS_PORTIONS = 2
# Buckets that may wait for their seal before adds are refused
SEALING_MAX = 8
SEALING_RETRY_MS = 200
# Ranges of one answer; the caller asks again for the rest.
CONTAINED_RANGES_MAX = 100_000


class ShardPort(Protocol):
    """The shard of a topic as the topic sees it."""

    number: int
    epoch: int
    applied_slot: ShardSlot
    pending: PendingRows
    # True if it is known that no former owner acts any longer.
    is_alone: bool

    @property
    def may_hand_out(self) -> bool:
        """True if the epoch is confirmed and the shard is not being released."""
        ...

    @property
    def alone_in_s(self) -> float:
        """Seconds until no former owner acts any longer; 0.0 if none does."""
        ...

    async def alone(self) -> None:
        """Wait until no former owner acts any longer. Raises the error that ended the shard before."""
        ...

    def topic_failed(self, topic: ServedTopic, error: BaseException) -> None:
        """Stop serving a topic that can no longer be relied on, and load it again."""
        ...

    async def superseded(self, refused: commit.Refused) -> NotOwner:
        """Lose the shard, since a commit was refused; return the answer for the caller."""
        ...


class ServedTopic:
    """One topic of an owned shard, with the policy that was set for it."""

    def __init__(
        self,
        topic: TopicState,
        shard: ShardPort,
        slots: TopicSlots,
        manifests: TopicManifests,
        due_loop: DueLoop,
        environment: Environment,
        *,
        policy: TopicPolicy,
        delay_levels: TopicDelayLevels | None = None,
    ) -> None:
        self.core = topic
        self.shard = shard
        self.epoch = shard.epoch
        self.slots = slots
        self.manifests = manifests
        self.settings = topic_settings.settings_of(environment, policy, delay_levels)
        self.quotas = TopicQuotas(topic, self.settings.quota_limits, shard.pending, environment, settled=slots.settled)
        self.gate = TopicGate(topic.name, slots)
        self.acks = AckRequests(self, environment)
        self.nacks = NackRequests(self, self.acks, environment)
        self.opening = StreamOpening(self, self.acks, self.served_subscription, environment)
        self.withdrawals = TopicWithdrawals(self, environment)
        self.dead_letters = TopicDeadLetters(self, environment)
        self.retention = TopicRetention(topic, environment)
        self.adds = TopicAdds(self, self.withdrawals, environment)
        self.wake_at_ms: int | None = None
        # The last slot that changed the topic: a checkpoint must hold it if the manifest does not.
        self.last_changed_slot = 0
        # The work done before others have their turn
        self.pace: Pace = due_loop.pace
        self._due_loop = due_loop
        self._environment = environment
        self.buckets = BucketLifecycle(
            topic,
            manifests,
            environment,
            slot=shard.applied_slot,
            settings=lambda: self.settings,
            adopt=Adoption(self, manifests, environment, slot=lambda: shard.applied_slot).adopt,
            failed=self.failed,
            changed=self.changed,
        )
        self._loader = SegmentLoader(
            topic, environment, self.changed, self.buckets.quarantine, self.bucket_is_live, self.failed
        )
        # Subscription id -> the subscription, if it ever had listeners
        self._served: dict[int, ServedSubscription] = {}
        self._ended: Exception | None = None
        # No row that is due before is left to be passed (Unix ms).
        self._settled_until_ms = 0
        # Subscriptions to which nothing is delivered for now
        self._withheld: frozenset[int] = frozenset()

    # ---- requests

    @property
    def requires_ids(self) -> bool:
        """True if rows with schedule ids may be added: readers of the topic must know them."""
        return requirements.SCHEDULE_IDS in self.manifests.manifest.requires

    def check_room(self) -> None:
        """Raise QuotaExceeded if too many buckets wait for their seal to accept more rows."""
        if self.core.indexes.sealing >= SEALING_MAX:
            raise QuotaExceeded(
                f"topic {self.core.name}: {SEALING_MAX} buckets wait to be sealed, which is the limit; try again",
                retry_after_ms=SEALING_RETRY_MS,
            )

    async def contains(self, asked: EntryRanges, subscription: str | None) -> Contained:
        """Return what the index has of the ranges, read from applied state. Raises NotFound."""
        if self._ended is not None:
            raise self._ended
        state = None if subscription is None else self.subscription(subscription)
        # Rows count as due from their time on.
        self.pass_due(self._environment.clock.now_ms())
        found = self.core.contains(asked, state, ranges_max=CONTAINED_RANGES_MAX)
        await self.slots.confirmed()
        return found

    async def retained(self, ledger_ids: U64 | None, page_size: int, after: int | None) -> RetentionPage:
        """Return what the topic needs of its message log, read from applied state. See `TopicRetention`."""
        if self._ended is not None:
            raise self._ended
        page = await self.retention.page(ledger_ids, page_size, after)
        await self.slots.confirmed()
        return page

    async def get_scheduled(self, state: SubscriptionState, *, max_rows: int, lease_ms: int, wait_ms: int) -> KeyedRows:
        """Lease due rows; return none if none came in time."""
        await self.gate.passed()
        self.check_there(state)
        rows = await self.served_subscription(state).leases.get(max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
        if not len(rows):
            await self.slots.confirmed()
        return rows

    async def load(self, wanted: Iterable[SegmentRange]) -> None:
        """Wait until the segments are in memory, or cannot be loaded."""
        tasks = self._loader.start(wanted)
        if tasks:
            await asyncio.wait(tasks)

    # ---- subscriptions

    def subscription(self, name: str) -> SubscriptionState:
        """Return the state of a subscription. Raises NotFound if it does not exist."""
        state = self.core.subscription(name)
        if state is None:
            raise NotFound(f"topic {self.core.name} has no subscription {name!r}; create it first")
        return state

    def is_there(self, state: SubscriptionState) -> bool:
        """Return whether the subscription still exists."""
        return self.core.subscriptions.get(state.subscription_id) is state

    def check_there(self, state: SubscriptionState) -> None:
        """Raise NotFound if the subscription was deleted, or the error that ended the topic."""
        if self._ended is not None:
            raise self._ended
        if self.core.subscriptions.get(state.subscription_id) is not state:
            raise NotFound(f"subscription {state.stored.name!r} of topic {self.core.name} was deleted")

    @contextlib.contextmanager
    def withholding(self, subscription_ids: Iterable[int]) -> Iterator[None]:
        """Deliver nothing to these subscriptions meanwhile, since their rows are about to leave."""
        self._withheld = frozenset(subscription_ids)
        try:
            yield
        finally:
            self._withheld = frozenset()
            self.notify_all()

    async def settle_due(self) -> None:
        """Wait until every row that is due now has been passed."""
        now_ms = self._environment.clock.now_ms()
        while self._ended is None and now_ms >= self._settled_until_ms:
            if self.pass_due(now_ms):
                # Others have their turn.
                await asyncio.sleep(0)
            elif unread := self.core.indexes.unread_segments(now_ms):
                await self.load(unread)
            else:
                next_due_ms = self.core.indexes.next_due_ms()
                self._settled_until_ms = now_ms if next_due_ms is None else next_due_ms
                return

    # ---- listeners

    def served_subscription(self, state: SubscriptionState) -> ServedSubscription:
        """Return the served subscription of a state, creating it if necessary."""
        served = self._served.get(state.subscription_id)
        if served is None:
            served = self._served[state.subscription_id] = ServedSubscription(
                self, state, self.acks, self.nacks, self._environment
            )
        return served

    @property
    def _listened_to(self) -> Iterator[ServedSubscription]:
        """The subscriptions that ever had listeners, in the order in which they were created."""
        for number in self.core.subscriptions:
            if (served := self._served.get(number)) is not None:
                yield served

    def streams_of(self, state: SubscriptionState) -> list[OpenStream]:
        """Return the open streams of a subscription."""
        served = self._served.get(state.subscription_id)
        return [] if served is None else list(served.streams.values())

    def end_streams(self, error: Exception, *, subscription_id: int | None = None) -> None:
        """End the streams and leases of one subscription, or of all, with the error."""
        for number, served in self._served.items():
            if subscription_id in (None, number):
                served.end(error)
        if subscription_id is not None:
            self._served.pop(subscription_id, None)

    def may_hand_out(self, state: SubscriptionState) -> bool:
        """Return whether rows may be delivered to the subscription now."""
        if self._ended is not None or state.subscription_id in self._withheld:
            return False
        if not self.shard.is_alone and state.is_by_key and self.shard.alone_in_s:
            # A former owner may deliver a key to another consumer.
            return False
        return self.shard.may_hand_out

    @property
    def may_send(self) -> bool:
        """True if delivered rows may leave now: the epoch is confirmed, and the topic has not ended."""
        return self._ended is None and self.shard.may_hand_out

    @property
    def alone_in_s(self) -> float:
        """Seconds until no former owner acts any longer; 0.0 if none does."""
        return 0.0 if self.shard.is_alone else self.shard.alone_in_s

    async def alone(self) -> None:
        """Wait until no former owner acts any longer. Raises the error that ended the shard before."""
        await self.shard.alone()

    def take_back(self, state: SubscriptionState) -> None:
        """Take back what consumers have behind a nacked row of its key, since rows may be NACKED."""
        if (served := self._served.get(state.subscription_id)) is not None:
            served.key_sharing.take_back()

    def notify(self, state: SubscriptionState) -> None:
        """Wake the subscription's streams and pullers, since rows may be ready."""
        if (served := self._served.get(state.subscription_id)) is not None:
            served.notify()

    def notify_all(self) -> None:
        for served in self._listened_to:
            served.notify()

    def _notify_sharing(self) -> None:
        """Request a round of sharing by key, since what rows waited for may be gone."""
        for served in self._served.values():
            if served.state.key_shared is not None:
                served.key_sharing.notify()

    # ---- due rows

    @property
    def tick_ms(self) -> int | None:
        """The tick of its wake-ups (ms); None if it depends on the daemon's load."""
        return self.settings.tick_ms

    def every_second(self) -> None:
        """Do what depends on time alone. Called once a second."""
        if self._ended is None:
            self.core.indexes.every_second(self._environment.clock.now_ms())
            for served in self._listened_to:
                served.every_second()

    def rows_added(self) -> None:
        """Schedule the next wake-up again, since rows were added or negatively acknowledged.

        Rows that waited for a decision of the slot may be delivered.
        """
        if self._ended is None:
            self._notify_sharing()
            # These include the rows replayed when the topic was loaded.
            in_order, others = self.core.in_due_order_rows, self.core.out_of_order_rows
            if in_order or others:
                self.core.in_due_order_rows = self.core.out_of_order_rows = 0
                self._environment.metrics.added_in_order(self.core.name, in_due_order=in_order, others=others)
            next_due_ms = self.core.indexes.next_due_of_memory_buckets_ms()
            self._settled_until_ms = earliest(self._settled_until_ms, next_due_ms) or 0
            self._due_loop.schedule(self, earliest(next_due_ms, self.core.next_redelivery_ms()))

    def rows_left(self) -> None:
        """Deliver rows that waited for acknowledgements of a slot, which were applied. No row comes due sooner."""
        if self._ended is None:
            self._notify_sharing()
            if (redeliver_at_ms := self.core.next_redelivery_ms()) is not None:
                self._due_loop.schedule(self, redeliver_at_ms)

    def changed(self) -> None:
        """Schedule the next wake-up again, since segments were loaded or buckets changed."""
        if self._ended is not None:
            return
        self._settled_until_ms = 0
        self._notify_sharing()
        self._due_loop.schedule(self, self._next_wake_ms())

    def read_on(self) -> None:
        """Let subscriptions read their backlogs on, since a bucket replaced others."""
        for served in self._listened_to:
            served.read_on()

    def wake(self, now_ms: int) -> int | None:
        if self._ended is not None:
            return None
        self.pass_due(now_ms)
        return self._next_wake_ms(load_from_ms=now_ms)

    def pass_due(self, now_ms: int) -> int:
        """Pass some portions of the rows that are due and in memory, or due for redelivery.

        Returns how many.
        """
        passed = self.core.pass_due(now_ms, PASS_PORTIONS * self.pace.rows)
        if not passed:
            self._notify_sharing()
        else:
            for served in tuple(self._served.values()):
                served.passed()
            for record in self.core.take_not_owed():
                _ = self.slots.stage(record, awaited=False)
            redeliver_at_ms = self.core.take_redelivered()
            if len(redeliver_at_ms):
                self._environment.metrics.redelivered(now_ms - redeliver_at_ms.astype(np.int64))
        return passed

    def wake_at(self, at_ms: int | None) -> None:
        """Wake the topic at this time (Unix ms) unless it wakes earlier. None changes nothing."""
        self._due_loop.schedule(self, at_ms)

    def _next_wake_ms(self, *, load_from_ms: int | None = None) -> int | None:
        """Return the time of the next wake-up (Unix ms). The end of loading wakes for rows not in memory.

        From `load_from_ms` on, if given, it begins to load the wanted segments.
        """
        indexes = self.core.indexes
        if not indexes.readable:
            return earliest(indexes.next_due_of_memory_buckets_ms(), self.core.next_redelivery_ms())
        ahead_ms = self._environment.config.delivery.lookahead_ms
        if load_from_ms is not None:
            self._loader.start(indexes.wanted_segments(load_from_ms, ahead_ms))
        next_load_ms = indexes.next_load_ms(ahead_ms, self._loader.reads)
        return earliest(indexes.next_due_in_memory_ms(), next_load_ms, self.core.next_redelivery_ms())

    # ---- buckets

    @property
    def is_in_manifest(self) -> bool:
        """True if the newest manifest holds all of the topic."""
        return self.last_changed_slot <= self.manifests.manifest.applied

    def cut(self) -> TopicCut:
        """Return the topic as it is now, for a checkpoint."""
        return self.buckets.cut()

    async def bucket_is_live(self, bucket: str) -> bool:
        """Return whether the newest manifest names a bucket whose object is missing; see `BucketLifecycle.is_live`.

        Returns False if nothing is served any longer: the topic has ended, or the shard was lost.
        """
        try:
            return await self.buckets.is_live(bucket)
        except commit.Refused as refused:
            await self.shard.superseded(refused)
            return False

    # ---- the end

    @property
    def has_ended(self) -> bool:
        """True if the topic is no longer served here."""
        return self._ended is not None

    def failed(self, error: BaseException) -> None:
        """End the topic, since an unforeseen error occurred or its epoch is over."""
        if self._ended is None:
            self.shard.topic_failed(self, error)

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Turn errors inside into this topic's failure."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - reported with the topic
            self.failed(error)

    @contextlib.contextmanager
    def failing(self, kind: type[Exception] = Exception) -> Iterator[None]:
        """Turn errors of one kind inside into this topic's failure.

        Raises TopicFailed in their place for the caller.
        """
        try:
            yield
        except kind as error:
            self.failed(error)
            raise TopicFailed(self.core.name) from error

    def abandon(self, error: Exception) -> None:
        """End a topic that can no longer be relied on, without asking its streams to give rows back.

        Its buckets and manifests go on until `close`.
        """
        for served in self._served.values():
            served.abandon(error)
        self._end(error)

    def close(self, error: Exception) -> None:
        """End the topic, its buckets and its manifests."""
        self.buckets.close()
        self._end(error)
        self.manifests.close()

    def _end(self, error: Exception) -> None:
        """Stop waking, loading and opening streams."""
        self._ended = error
        self.slots.end(error)
        self.gate.end(error)
        self.quotas.close()
        self.nacks.close()
        for served in self._served.values():
            served.close(error)
        self._loader.close()
        # The keys of its segments are invalid for the next owner, even in this process.
        self.core.indexes.release_segments()
