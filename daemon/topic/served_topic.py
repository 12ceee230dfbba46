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
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import TopicDelayLevels, TopicPolicy
from storage_backends.formats.row_columns import U64

T = TypeVar("T")

# A look at the topic as a whole is shown so long, and longer while nothing changes.
SURVEY_MS = 60_000
# A look takes some microseconds a ledger: of more it is not made for who cannot wait.
GLANCE_PAGES_MAX = 20_000
_NOTHING = RetentionScan(None, 0)


class TopicRetention:
    """What one topic needs of its log."""

    def __init__(self, core: TopicState, environment: Environment) -> None:
        self._core = core
        self._environment = environment
        self._turn = asyncio.Lock()
        self._survey: RetentionScan | None = None
        self._surveyed_ms = 0
        self._surveyed_state: tuple[int, int] | None = None

    async def page(self, ledger_ids: U64 | None, page_size: int, after: int | None) -> RetentionPage:
        """The ledgers that have rows, of the given ones or, None, of all, behind the ledger `after`."""
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
        """Returns what `survey` does, without waiting long: of a topic of very many ledgers what was shown last."""
        if len(self._core.indexes.places) > GLANCE_PAGES_MAX:
            return self._survey or _NOTHING
        return await self.survey(changed_slot)

    async def survey(self, changed_slot: int) -> RetentionScan:
        """The topic as a whole, as it was at most a minute ago. `changed_slot`: the last slot that changed it."""
        async with self._turn:
            now_ms = self._environment.elapsed_ms()
            state = (changed_slot, len(self._core.indexes.quarantined))
            is_fresh = now_ms - self._surveyed_ms < SURVEY_MS or state == self._surveyed_state
            if self._survey is None or not is_fresh:
                self._survey = await self._in_turns(retention.surveyed(self._core.indexes))
                self._surveyed_ms, self._surveyed_state = now_ms, state
            return self._survey

    async def _in_turns(self, look: Generator[None, None, T]) -> T:
        """What the look returns; others have their turn at each of its steps."""
        taking_turns = FairShare(self._environment.clock)
        while True:
            try:
                next(look)
            except StopIteration as done:
                result: T = done.value
                return result
            await taking_turns.give_way()


log = logging.getLogger(__name__)

# Portions that a topic passes in one turn: they cost less than handing out.
PASS_PORTIONS = 2
# Buckets that wait for their seal before adds are refused.
SEALING_MAX = 8
SEALING_RETRY_MS = 200
# Ranges of one answer; what is more is asked for again.
CONTAINED_RANGES_MAX = 100_000


class ShardPort(Protocol):
    """The shard of a topic as the topic sees it."""

    number: int
    epoch: int
    applied_slot: ShardSlot
    pending: PendingRows
    # Whether it is known that no former owner acts any longer.
    is_alone: bool

    @property
    def may_hand_out(self) -> bool:
        """Whether the epoch is confirmed, and the shard is not being released."""
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
        # The last slot that changed the topic: a checkpoint must hold it when the manifest does not.
        self.last_changed_slot = 0
        # How much is done before others have their turn.
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
        # By subscription id, those that were ever listened to.
        self._served: dict[int, ServedSubscription] = {}
        self._ended: Exception | None = None
        # No row that is due before is left to be passed.
        self._settled_until_ms = 0
        # Subscriptions that nothing is handed out to for now.
        self._withheld: frozenset[int] = frozenset()

    # ---- requests

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
        await self.slots.confirmed()
        return found

    async def retained(self, ledger_ids: U64 | None, page_size: int, after: int | None) -> RetentionPage:
        """What the topic needs of its log: a read of what is applied. See `TopicRetention`."""
        if self._ended is not None:
            raise self._ended
        page = await self.retention.page(ledger_ids, page_size, after)
        await self.slots.confirmed()
        return page

    async def get_scheduled(self, state: SubscriptionState, *, max_rows: int, lease_ms: int, wait_ms: int) -> KeyedRows:
        """Due rows, leased. Empty when none came in time."""
        await self.gate.passed()
        self.check_there(state)
        rows = await self.served_subscription(state).leases.get(max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
        if not len(rows):
            await self.slots.confirmed()
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
        if self.core.subscriptions.get(state.subscription_id) is not state:
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

    # ---- who listens

    def served_subscription(self, state: SubscriptionState) -> ServedSubscription:
        """Who listens to a subscription, and in which mode it is."""
        served = self._served.get(state.subscription_id)
        if served is None:
            served = self._served[state.subscription_id] = ServedSubscription(
                self, state, self.acks, self.nacks, self._environment
            )
        return served

    @property
    def _listened_to(self) -> Iterator[ServedSubscription]:
        """Those that were ever listened to, in the order in which they were created."""
        for number in self.core.subscriptions:
            if (served := self._served.get(number)) is not None:
                yield served

    def streams_of(self, state: SubscriptionState) -> list[OpenStream]:
        """The streams that are open on a subscription."""
        served = self._served.get(state.subscription_id)
        return [] if served is None else list(served.streams.values())

    def end_streams(self, error: Exception, *, subscription_id: int | None = None) -> None:
        """The streams and leases of one subscription, or all of them, end with the error."""
        for number, served in self._served.items():
            if subscription_id in (None, number):
                served.end(error)
        if subscription_id is not None:
            self._served.pop(subscription_id, None)

    def may_hand_out(self, state: SubscriptionState) -> bool:
        """Whether anything may be handed out to the subscription now."""
        if self._ended is not None or state.subscription_id in self._withheld:
            return False
        if not self.shard.is_alone and state.is_by_key and self.shard.alone_in_s:
            # A former owner may hand a key to another consumer.
            return False
        return self.shard.may_hand_out

    @property
    def may_send(self) -> bool:
        """Whether delivered rows may leave now: the epoch is confirmed, and the topic has not ended."""
        return self._ended is None and self.shard.may_hand_out

    @property
    def alone_in_s(self) -> float:
        """Seconds until no former owner acts any longer; 0.0 if none does."""
        return 0.0 if self.shard.is_alone else self.shard.alone_in_s

    async def alone(self) -> None:
        """Wait until no former owner acts any longer. Raises the error that ended the shard before."""
        await self.shard.alone()

    def take_back(self, state: SubscriptionState) -> None:
        """Rows may have come to be NACKED: what is behind them of their keys is at nobody from now on."""
        if (served := self._served.get(state.subscription_id)) is not None:
            served.key_sharing.take_back()

    def notify(self, state: SubscriptionState) -> None:
        """There may be something to hand out."""
        if (served := self._served.get(state.subscription_id)) is not None:
            served.notify()

    def notify_all(self) -> None:
        for served in self._listened_to:
            served.notify()

    def _notify_sharing(self) -> None:
        """What rows had to wait for by key may be gone."""
        for served in self._served.values():
            if served.state.key_shared is not None:
                served.key_sharing.notify()

    # ---- due rows

    @property
    def tick_ms(self) -> int | None:
        """Wake-ups are batched by as much; None: as the daemon is busy."""
        return self.settings.tick_ms

    def look_after(self) -> None:
        """Once a second: what depends on time alone."""
        if self._ended is None:
            self.core.indexes.look_after(self._environment.clock.now_ms())
            for served in self._listened_to:
                served.look_after()

    def rows_added(self) -> None:
        """The next wake-up may be sooner, by rows of the buckets in memory or by what was negatively acknowledged; what
        waited for a decision of the slot may be handed out.
        """
        if self._ended is None:
            self._notify_sharing()
            # Those of the journal when the topic was loaded included.
            in_order, others = self.core.in_due_order_rows, self.core.out_of_order_rows
            if in_order or others:
                self.core.in_due_order_rows = self.core.out_of_order_rows = 0
                self._environment.metrics.added_in_order(self.core.name, in_due_order=in_order, others=others)
            next_due_ms = self.core.indexes.next_due_of_memory_buckets_ms()
            self._settled_until_ms = earliest(self._settled_until_ms, next_due_ms) or 0
            self._due_loop.schedule(self, earliest(next_due_ms, self.core.next_redelivery_ms()))

    def rows_left(self) -> None:
        """Acknowledgements of a slot were applied: what waited for them may be handed out, and nothing comes sooner."""
        if self._ended is None:
            self._notify_sharing()
            if (redeliver_at_ms := self.core.next_redelivery_ms()) is not None:
                self._due_loop.schedule(self, redeliver_at_ms)

    def changed(self) -> None:
        """Segments were loaded, or buckets sealed or dropped: the next wake-up may be sooner."""
        if self._ended is not None:
            return
        self._settled_until_ms = 0
        self._notify_sharing()
        self._due_loop.schedule(self, self._next_wake_ms())

    def wake(self, now_ms: int) -> int | None:
        if self._ended is not None:
            return None
        self.pass_due(now_ms)
        return self._next_wake_ms(load_from_ms=now_ms)

    def pass_due(self, now_ms: int) -> int:
        """Passes rows that are due and in memory, and takes back what is to be redelivered, some portions of them; how
        many.
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
        """The topic wakes then, if it would not sooner. Unix time in ms; None: it need not."""
        self._due_loop.schedule(self, at_ms)

    def _next_wake_ms(self, *, load_from_ms: int | None = None) -> int | None:
        """Rows whose segment is not in memory wake nobody: the end of its loading does. `load_from_ms`: begin to load
        the segments that are wanted from then on, if given.
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
        """Whether the newest manifest holds all of the topic."""
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
        """Whether the topic is served here no longer."""
        return self._ended is not None

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
        """End a topic that can no longer be relied on, without asking its streams to give rows back. Its buckets and
        manifests go on until `close`.
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
        """Neither wake, load nor open streams any longer."""
        self._ended = error
        self.slots.end(error)
        self.gate.end(error)
        self.quotas.close()
        self.nacks.close()
        for served in self._served.values():
            served.close(error)
        self._loader.close()
        # Keys of its segments mean nothing to who serves the topic next, here as well.
        self.core.indexes.release_segments()
