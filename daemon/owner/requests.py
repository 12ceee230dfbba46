"""Brings every call of the services to its shard and topic.

It makes the checks that need only the request and the limits, and finds the topic. Before it answers that something
does not exist, it confirms that the shard is still owned (R8). `engine` decides whether the daemon serves; the topic's
parts make the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from daemon import call_values
from daemon.core import limits
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter
from daemon.core.decisions import add_decisions
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome, AddRow, Refused
from daemon.core.decisions.claims import HeldPositions, Ignored
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleBatch, RescheduleOutcome
from daemon.core.index.containment import Contained, EntryRanges
from daemon.core.index.delay_levels import DelayLevels
from daemon.core.index.scan import Place
from daemon.core.quotas import Caller
from daemon.errors import AlreadyExists, InvalidArgument, InvariantViolated, NotFound, TarryError
from daemon.metrics import TopicNumbers
from daemon.owner import topic_inspection
from daemon.owner.garbage_collection import Collection
from daemon.runtime.environment import Environment
from daemon.shard.shard import ServedShard
from daemon.topic import leases, topic_dead_letters, topic_settings
from daemon.topic.key_shared_streams import KeySharedStream
from daemon.topic.open_streams import DispatchStream
from daemon.topic.served_topic import ServedTopic
from daemon.topic.viewing import Viewing
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy, TopicDelayLevels, TopicPolicy
from storage_backends.formats.row_columns import U64

# Ledgers that one request may name, since each takes a few microseconds on the event loop
LEDGERS_MAX = 1_000
# Topics that are read before deliveries and requests have their turn
TOPICS_A_TURN = 20
# A scrape that takes longer fails (seconds).
SNAPSHOT_S = 10.0
NO_POLICY = SubscriptionPolicy()


class Shards(Protocol):
    """The port through which calls use the engine."""

    @property
    def shards(self) -> Mapping[int, ServedShard]:
        """The shards that are owned and served."""
        ...

    def shard_of(self, topic: str) -> ServedShard:
        """Return the shard of a topic. Raise the caller's error while the shard is not served here."""
        ...

    @property
    def collection(self) -> Collection: ...

    @property
    def topics_loading(self) -> int: ...

    @property
    def topics_damaged(self) -> int: ...

    def check_serving(self) -> None:
        """Raise the caller's error while nothing is served here."""
        ...

    def location_of(self, topic: str) -> call_values.TopicLocation:
        """Return the owner of a topic's shard. Raise Unavailable while it is unknown."""
        ...


class Requests:
    """The calls of one engine. Made on the event loop that runs it.

    Those on a topic raise NotOwner and Unavailable like `Shards.shard_of`, Corruption if the topic is damaged, and
    OutcomeUnknown if the call may or may not be durable.
    """

    def __init__(self, engine: Shards, environment: Environment) -> None:
        self._engine = engine
        self._environment = environment
        self._limits = environment.request_limits
        self._loop = asyncio.get_running_loop()
        self._viewing = Viewing(environment)

    # ---- positions

    async def add(
        self,
        topic: str,
        batch: AddBatch,
        subscription: str | None = None,
        caller: Caller | None = None,
    ) -> AddOutcome:
        """Add positions to a topic, or to the subscription index of one subscription; return when they are durable.

        See `daemon.core.decisions.topic_state`. Raises NotFound if there is no such subscription, and QuotaExceeded.
        """
        self._check_names(topic, subscription)
        limits.check_rows("entry_id", len(batch.entry_id), self._limits.rows_max)
        if subscription is not None:
            async with self._served(topic) as (shard, served):
                if batch.schedule_ids is not None:
                    await shard.changes.require_ids(served)
                return await served.adds.add(batch, subscription, caller)
        shard = self._engine.shard_of(topic)
        if await shard.topic(topic) is None:
            # Refused rows create no topic.
            refused = self._refused_of_new_topic(batch)
            if len(refused) == len(batch.entry_id):
                return AddOutcome.nothing(refused)
            shard.pending.check(len(batch.entry_id) - len(refused))
        with shard.effects_on(topic) as effects:
            served = await shard.topic_to_write(topic, effects)
            if batch.schedule_ids is not None:
                await shard.changes.require_ids(served)
            with served.failing(InvariantViolated):
                return await served.adds.add(batch, None, caller)

    def add_at_once(self, topic: str, batch: AddBatch, caller: Caller) -> asyncio.Future[AddOutcome] | None:
        """Add positions to an existing topic. Returns None if the caller must use `add`.

        The future ends as `add` does. If it is cancelled, the positions are added all the same. Raises QuotaExceeded.
        """
        self._check_topic(topic)
        limits.check_rows("entry_id", len(batch.entry_id), self._limits.rows_max)
        owned = self._engine.shard_of(topic).topics.get(topic)
        if owned is None or (batch.schedule_ids is not None and not owned.requires_ids):
            return None
        return owned.adds.add_at_once(batch, caller)

    def add_row(self, topic: str, row: AddRow, caller: Caller) -> asyncio.Future[AddOutcome] | None:
        """Add a row like `add_at_once`, together with others that come at about the same time."""
        self._check_topic(topic)
        owned = self._engine.shard_of(topic).topics.get(topic)
        return None if owned is None else owned.adds.add_row(row, caller)

    async def cancel(self, topic: str, subscription: str | None, ledger_id: U64, entry_id: U64) -> CancelOutcome:
        """Remove positions before they are due, from all indexes or from one subscription index.

        Returns when that is durable. See `daemon.core.decisions.withdrawal_decisions`. Raises NotFound.
        """
        self._check_positions(topic, subscription, ledger_id, entry_id)
        async with self._served(topic) as (_, served):
            return await served.withdrawals.cancel(subscription, ledger_id, entry_id)

    async def reschedule(self, topic: str, subscription: str | None, batch: RescheduleBatch) -> RescheduleOutcome:
        """Give positions other times before they are due, like `cancel`. Raises NotFound, DelayTooLong."""
        self._check_positions(topic, subscription, batch.ledger_id, batch.entry_id)
        async with self._served(topic) as (shard, served):
            if batch.schedule_ids is not None:
                await shard.changes.require_ids(served)
            return await served.withdrawals.reschedule(subscription, batch)

    async def contains(self, topic: str, asked: EntryRanges, subscription: str | None) -> Contained:
        """Return the parts of the ranges that are in the index, or owed to one subscription.

        A topic that does not exist contains nothing. Raises NotFound if the topic has no such subscription.
        """
        self._check_names(topic, subscription)
        limits.check_rows("entry_id", len(asked.ledger_id), self._limits.rows_max)
        _check_ranges(asked)
        shard = self._engine.shard_of(topic)
        served = await shard.topic(topic)
        if served is None:
            await shard.slots.confirmed()
            nothing = np.empty(0, np.uint64)
            ranges = EntryRanges(nothing, nothing, nothing)
            return Contained(pending=ranges, due=ranges, continuation=None)
        async with self._truthful(shard):
            return await served.contains(asked, subscription)

    async def trim(
        self,
        topic: str,
        subscription: str | None,
        ranges: LedgerRanges,
        *,
        dead_letter: bool = False,
    ) -> call_values.Trimmed:
        """Drop rows of ledgers at or before an entry, of the topic or of one subscription.

        With `dead_letter` they become dead letters of the subscription. Raises NotFound.
        """
        self._check_names(topic, subscription)
        if dead_letter and subscription is None:
            raise InvalidArgument("dead_letter is set, and subscription is empty; dead letters are of a subscription")
        ledgers = len(ranges.ledger_id)
        limits.check_rows("ledger_id", ledgers, min(LEDGERS_MAX, self._limits.rows_max))
        if ranges.all_lower_ledgers and ledgers != 1:
            raise InvalidArgument(f"all_lower_ledgers is set, and ledger_id has {ledgers} ledgers; it must have 1")
        _check_ledger_once(ranges.ledger_id)
        async with self._served(topic) as (shard, served):
            return await shard.changes.trim(served, subscription, ranges, dead_letter=dead_letter)

    async def clear(self, topic: str, subscription: str | None) -> int:
        """Drop every row of the topic or of one subscription; return how many."""
        self._check_names(topic, subscription)
        async with self._served(topic) as (shard, served):
            return (await shard.changes.trim(served, subscription, None)).rows

    # ---- dispatch

    async def open_dispatch(self, topic: str, subscription: str, held: HeldPositions) -> DispatchStream:
        """Open a dispatcher's stream, which may hold as many positions as one message can name.

        Raises NotFound, and Conflict while the subscription is open as KEY_SHARED.
        """
        self._check_names(topic, subscription)
        async with self._served(topic) as (_, served):
            return await served.opening.shared(subscription, held)

    async def open_key_shared(
        self,
        topic: str,
        subscription: str,
        consumers: Sequence[call_values.Consumer],
        held: call_values.HeldByConsumers,
    ) -> KeySharedStream:
        """Open a KEY_SHARED stream for a dispatcher that names its consumers, and the positions that they hold.

        Raises NotFound, InvalidArgument, QuotaExceeded, and Conflict while the subscription is open as SHARED or leases
        rows.
        """
        self._check_names(topic, subscription)
        async with self._served(topic) as (_, served):
            return await served.opening.key_shared(subscription, consumers, held)

    async def get_scheduled(
        self, topic: str, subscription: str, *, max_rows: int, lease_ms: int, wait_ms: int
    ) -> call_values.Leased:
        """Lease due rows without a stream for `lease_ms`; 0 stands for the subscription's policy.

        Waits up to `wait_ms` for the first one. Cancel it when the caller has left. Raises NotFound, QuotaExceeded, and
        Conflict while the subscription is open as KEY_SHARED.
        """
        self._check_names(topic, subscription)
        leases.check_get(max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
        async with self._served(topic) as (_, served):
            state = served.subscription(subscription)
            lease_ms = lease_ms or state.stored.policy.lease_ms or topic_settings.LEASE_DEFAULT_MS
            rows = await served.get_scheduled(state, max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
            return call_values.Leased(
                served.served_subscription(state).handed_out(rows), lease_ms, served.core.rebuild_needed()
            )

    async def acknowledge(self, topic: str, subscription: str, claims: HeldPositions) -> Ignored:
        """Acknowledge positions of streams or leases durably; return those not in the backlog with that time."""
        self._check_names(topic, subscription)
        async with self._served(topic) as (_, served):
            state = served.subscription(subscription)
            return await served.acks.acknowledge(state, claims, awaited=True)

    async def negative_acknowledge(
        self, topic: str, subscription: str, nack: call_values.Nack
    ) -> call_values.NackOutcome:
        """Redeliver positions later, or make them dead letters, durably.

        They are positions of streams or leases, or such as were never delivered. See `nack_decisions`. Raises
        DelayTooLong, QuotaExceeded.
        """
        self._check_names(topic, subscription)
        async with self._served(topic) as (shard, served):
            if nack.schedule_ids is not None:
                await shard.changes.require_ids(served)
            return await served.nacks.negative_acknowledge(served.subscription(subscription), nack, awaited=True)

    async def extend_lease(self, topic: str, subscription: str, claims: HeldPositions, lease_ms: int) -> Ignored:
        """Lease positions for `lease_ms` from now on; 0 ends the lease. Return those not leased with that time."""
        self._check_names(topic, subscription)
        leases.check_lease(lease_ms)
        async with self._served(topic) as (_, served):
            state = served.subscription(subscription)
            return await served.served_subscription(state).leases.extend(claims, lease_ms=lease_ms)

    # ---- subscriptions

    async def create_subscription(
        self,
        topic: str,
        subscription: str,
        policy: SubscriptionPolicy = NO_POLICY,
        properties: NamedValues = (),
    ) -> call_values.SubscriptionCreated:
        """Create a subscription, and the topic if it is new. Raises AlreadyExists, QuotaExceeded."""
        self._check_names(topic, subscription)
        shard = self._engine.shard_of(topic)
        async with self._truthful(shard):
            self._check_policy(policy, properties, await shard.topic(topic))
            return await shard.changes.create_subscription(topic, subscription, policy, properties)

    async def update_subscription(
        self,
        topic: str,
        subscription: str,
        policy: SubscriptionPolicy,
        properties: NamedValues = (),
    ) -> None:
        """Replace a subscription's policy and properties; they are in force when this returns."""
        self._check_names(topic, subscription)
        async with self._served(topic) as (shard, served):
            self._check_policy(policy, properties, served)
            await shard.changes.update_subscription(served, subscription, policy, properties)

    async def delete_subscription(self, topic: str, subscription: str) -> int:
        """Delete a subscription and release its claims; return how many dead letters it had."""
        self._check_names(topic, subscription)
        async with self._served(topic) as (shard, served):
            return await shard.changes.delete_subscription(served, subscription)

    # ---- dead letters

    async def list_dead_letters(
        self, topic: str, subscription: str, asked: DeadLetterFilter, page_size: int, after_id: int
    ) -> call_values.DeadLetterPage:
        """Return dead letters with ids above `after_id`, `next_after` of the page before. See `topic_dead_letters`."""
        self._check_dead_letters(topic, subscription, asked)
        async with self._served(topic) as (_, served):
            return await served.dead_letters.page(served.subscription(subscription), asked, page_size, after_id)

    async def replay_dead_letters(
        self, topic: str, subscription: str, asked: DeadLetterFilter, delay_ms: int
    ) -> call_values.Replayed:
        """Deliver dead letters again, `delay_ms` from now; return when that is durable. See `topic_dead_letters`."""
        self._check_dead_letters(topic, subscription, asked)
        async with self._served(topic) as (_, served):
            return await served.dead_letters.replay(served.subscription(subscription), asked, delay_ms=delay_ms)

    async def purge_dead_letters(self, topic: str, subscription: str, asked: DeadLetterFilter) -> int:
        """Remove dead letters; return how many when that is durable. See `topic_dead_letters`."""
        self._check_dead_letters(topic, subscription, asked)
        async with self._served(topic) as (_, served):
            return await served.dead_letters.purge(served.subscription(subscription), asked)

    # ---- topics

    async def set_topic_policy(self, topic: str, policy: TopicPolicy) -> TopicPolicy:
        """Replace a topic's policy, and create the topic if it is new; return the policy in force."""
        self._check_topic(topic)
        topic_settings.check_topic_policy(policy)
        return await self._engine.shard_of(topic).changes.set_policy(topic, policy)

    async def topic_policy(self, topic: str) -> call_values.TopicPolicies:
        self._check_topic(topic)
        async with self._served(topic) as (shard, served):
            settings = served.settings
            await shard.slots.confirmed()
            return call_values.TopicPolicies(stored=settings.policy, effective=settings.effective)

    async def set_delay_levels(self, topic: str, table: TopicDelayLevels | None) -> DelayLevels:
        """Replace a topic's delay levels, with None by the daemon's; create the topic if it is new.

        Returns the levels in force. Pending rows keep their times. Raises InvalidArgument with the place of the fault;
        the old levels stay.
        """
        self._check_topic(topic)
        shard = self._engine.shard_of(topic)
        if await shard.topic(topic) is None:
            # Refused rows create no topic.
            topic_settings.levels_of(self._environment, table, delay_max_ms=self._limits.delay_max_ms)
        return await shard.changes.set_delay_levels(topic, table)

    async def delay_levels(self, topic: str) -> call_values.TopicLevels:
        """Return the delay levels in force of a topic, or the daemon's if the name is empty. Raises NotFound."""
        if not topic:
            return call_values.TopicLevels(self._environment.delay_levels, of_topic=False, pending=())
        self._check_topic(topic)
        async with self._served(topic) as (shard, served):
            found = topic_inspection.levels(served)
            await shard.slots.confirmed()
            return found

    async def seal(self, topic: str) -> call_values.Sealed:
        """Seal the mutable bucket now; return when that is committed."""
        self._check_topic(topic)
        async with self._served(topic) as (shard, served):
            return await shard.changes.seal(served)

    async def merge(self, topic: str, buckets_max: int) -> call_values.Merged:
        """Merge neighbouring buckets until no index has more than `buckets_max`; 0 stands for the topic's policy."""
        self._check_topic(topic)
        async with self._served(topic) as (shard, served):
            return await shard.changes.merge(served, buckets_max)

    async def delete_topic(self, topic: str) -> call_values.TopicDeleted:
        """Delete a topic with everything in it."""
        self._check_topic(topic)
        async with self._served(topic) as (shard, served):
            return await shard.changes.delete(served)

    def collect(self, *, dry_run: bool, force: bool, retry_dead: bool) -> AsyncGenerator[call_values.GarbageProgress]:
        """Collect the garbage of the shards that are served here, step by step."""
        self._engine.check_serving()
        return self._engine.collection.collect(dry_run=dry_run, force=force, retry_dead=retry_dead)

    async def lookup(self, topic: str) -> call_values.TopicLocation:
        """Return the shard of a topic and its owner, whether the topic exists or not."""
        self._check_topic(topic)
        return self._engine.location_of(topic)

    # ---- inspection

    async def list_topics(self, page_size: int, after: str, prefixes: tuple[str, ...] = ("",)) -> call_values.TopicPage:
        """Return at most `page_size` topics that have one of the prefixes, in name order after `after`."""
        size = topic_inspection.page_size_of(page_size)
        self._engine.check_serving()
        found: dict[str, ServedTopic] = {}
        for shard in list(self._engine.shards.values()):
            beyond = (name for name in shard.topics if name > after and name.startswith(prefixes))
            found |= {name: shard.topics[name] for name in heapq.nsmallest(size + 1, beyond)}
            await asyncio.sleep(0)
        page, next_after = topic_inspection.page_after(found, str, size, after)
        return call_values.TopicPage(
            topics=tuple(topic_inspection.summary(found[name]) for name in page),
            next_after=next_after,
            as_of_ms=self._environment.clock.now_ms(),
            topics_loading=self._engine.topics_loading,
            topics_damaged=self._engine.topics_damaged,
        )

    async def topic_stats(self, topic: str) -> call_values.TopicStats:
        """Return the counts of one topic. Raises NotFound."""
        shard, served = await self._shown(topic)
        applied_slot = shard.topics[topic].manifests.manifest.applied
        merges = int(shard.topics[topic].buckets.merging.under_way)
        now_ms = self._environment.clock.now_ms()
        survey = await served.retention.survey(served.last_changed_slot)
        return topic_inspection.stats(served, survey, applied_slot=applied_slot, merges=merges, now_ms=now_ms)

    async def retained(
        self, topic: str, ledger_ids: U64 | None, page_size: int, after: int | None
    ) -> call_values.RetentionPage:
        """Return the parts of its message log that a topic needs: the lowest entry that has a row, by ledger.

        `ledger_ids` are the ledgers to check, or None for all. `after` is `next_after` of the page before. Raises
        NotFound.
        """
        self._check_topic(topic)
        if ledger_ids is not None:
            limits.check_rows("ledger_id", len(ledger_ids), LEDGERS_MAX)
            _check_ledger_once(ledger_ids)
        size = limits.page_rows(page_size)
        async with self._served(topic) as (_, served):
            return await served.retained(ledger_ids, size, after)

    async def list_buckets(self, topic: str, page_size: int, after: str) -> call_values.BucketPage:
        """Return sealed buckets of a topic after the place `after`, `next_after` of the page before."""
        size = topic_inspection.page_size_of(page_size)
        _, served = await self._shown(topic)
        return topic_inspection.buckets_page(served, size, after, now_ms=self._environment.clock.now_ms())

    async def list_subscriptions(self, topic: str, page_size: int, after: str) -> call_values.SubscriptionPage:
        """Return subscriptions of a topic whose names come after `after`."""
        size = topic_inspection.page_size_of(page_size)
        _, served = await self._shown(topic)
        return topic_inspection.subscriptions_page(served, size, after, now_ms=self._environment.clock.now_ms())

    async def list_consumers(
        self, topic: str, subscription: str, page_size: int, after: int
    ) -> call_values.ConsumerPage:
        """Return consumers of a subscription that joined after the one numbered `after`.

        `after` is `next_after` of the page before. Raises NotFound.
        """
        size = topic_inspection.page_size_of(page_size)
        self._check_names(topic, subscription)
        _, served = await self._shown(topic)
        state = served.subscription(subscription)
        return await topic_inspection.consumers_page(
            served, state, size, after, now_ms=self._environment.clock.now_ms()
        )

    async def list_scheduled(
        self, topic: str, view: call_values.View, page_size: int, after: Place | None
    ) -> call_values.ScheduledPage:
        """Return rows that are not due yet, after the place `after`, `next_after` of the page before. See `viewing`."""
        self._check_names(topic, view.subscription)
        async with self._served(topic) as (_, served):
            return await self._viewing.scheduled(served, view, page_size, after)

    async def histogram(self, topic: str, view: call_values.View, width_ms: int) -> call_values.Histogram:
        """Count rows by due time, in bars of `width_ms`; 0 stands for a round width. See `viewing`."""
        self._check_names(topic, view.subscription)
        async with self._served(topic) as (_, served):
            return await self._viewing.histogram(served, view, width_ms)

    async def list_backlog(
        self,
        topic: str,
        subscription: str,
        ledgers: tuple[int, int] | None,
        page_size: int,
        after: Place | None,
    ) -> call_values.BacklogPage:
        """Return the rows that a subscription is owed, due and not acknowledged, after the place `after`.

        See `viewing`.
        """
        self._check_names(topic, subscription)
        async with self._served(topic) as (_, served):
            return await self._viewing.backlog(served, subscription, ledgers, page_size, after)

    def metrics_snapshot(self) -> Sequence[TopicNumbers]:
        """Return every topic's numbers for a scrape. Called in the scrape's thread; reads them on the loop."""
        if self._loop.is_closed():
            return ()
        return asyncio.run_coroutine_threadsafe(self._topic_numbers(), self._loop).result(timeout=SNAPSHOT_S)

    async def _topic_numbers(self) -> list[TopicNumbers]:
        now_ms = self._environment.clock.now_ms()
        topics = [topic for shard in self._engine.shards.values() for topic in shard.topics.values()]
        numbers = []
        for count, topic in enumerate(topics, 1):
            survey = await topic.retention.glance(topic.last_changed_slot)
            numbers.append(topic_inspection.numbers(topic, survey, now_ms))
            if count % TOPICS_A_TURN == 0:
                await asyncio.sleep(0)
        return numbers

    # ---- finding

    def alone_in_s(self, topic: str) -> float:
        """Return how long a former owner of the topic may still be active (seconds).

        Returns 0.0 if none is, or if the shard is not served here.
        """
        try:
            return self._engine.shard_of(topic).alone_in_s
        except TarryError:
            # The call itself raises this error.
            return 0.0

    @contextlib.asynccontextmanager
    async def _served(self, topic: str) -> AsyncIterator[tuple[ServedShard, ServedTopic]]:
        """Find the topic of a call. Raises NotFound, and TopicFailed if the call breaks an invariant of it."""
        shard = self._engine.shard_of(topic)
        async with self._truthful(shard):
            served = await shard.topic(topic)
            if served is None:
                raise _no_topic(topic)
            with served.failing(InvariantViolated):
                yield shard, served

    @contextlib.asynccontextmanager
    async def _truthful(self, shard: ServedShard) -> AsyncIterator[None]:
        """Confirm that the shard is still owned before an answer about what exists."""
        try:
            yield
        except (NotFound, AlreadyExists):
            await shard.slots.confirmed()
            raise

    async def _shown(self, topic: str) -> tuple[ServedShard, ServedTopic]:
        self._check_topic(topic)
        shard = self._engine.shard_of(topic)
        served = await shard.topic(topic)
        if served is None:
            raise _no_topic(topic)
        return shard, served

    def _refused_of_new_topic(self, batch: AddBatch) -> Refused:
        """Return the rows that a topic with the daemon's own settings would refuse. Raises as an add to it would."""
        environment = self._environment
        now_ms, levels = environment.clock.now_ms(), environment.delay_levels
        refused = add_decisions.refused_of(batch, now_ms=now_ms, request_limits=self._limits, levels=levels)
        if not batch.return_invalid:
            add_decisions.times_of(batch, now_ms=now_ms, request_limits=self._limits, levels=levels)
        return refused

    def _check_policy(
        self,
        policy: SubscriptionPolicy,
        properties: NamedValues,
        served: ServedTopic | None,
    ) -> None:
        request_limits = self._limits if served is None else served.settings.request_limits
        topic_settings.check_subscription_policy(policy, delay_max_ms=request_limits.delay_max_ms)
        topic_settings.check_properties(properties)

    def _check_positions(self, topic: str, subscription: str | None, ledger_id: U64, entry_id: U64) -> None:
        self._check_names(topic, subscription)
        limits.check_rows("entry_id", len(entry_id), self._limits.rows_max)
        limits.check_distinct(ledger_id, entry_id)

    def _check_dead_letters(self, topic: str, subscription: str, asked: DeadLetterFilter) -> None:
        self._check_names(topic, subscription)
        topic_dead_letters.check_filter(asked, ids_max=self._limits.rows_max)

    def _check_topic(self, topic: str) -> None:
        limits.check_name("topic", topic, self._limits.topic_max_bytes)

    def _check_names(self, topic: str, subscription: str | None) -> None:
        self._check_topic(topic)
        if subscription is not None:
            limits.check_name("subscription", subscription, self._limits.subscription_max_bytes)


def _no_topic(topic: str) -> NotFound:
    return NotFound(f"there is no topic {topic!r}")


def _check_ranges(asked: EntryRanges) -> None:
    backwards = np.flatnonzero(asked.last_entry_id < asked.first_entry_id)
    if len(backwards):
        row = int(backwards[0])
        raise InvalidArgument(
            f"last_entry_id[{row}] is {asked.last_entry_id[row]}, before entry_id[{row}], which is "
            f"{asked.first_entry_id[row]}"
        )


def _check_ledger_once(ledger_id: U64) -> None:
    known, count = np.unique(ledger_id, return_counts=True)
    if len(known) < len(ledger_id):
        raise InvalidArgument(f"ledger_id names ledger {known[count > 1][0]} twice; once is enough")
