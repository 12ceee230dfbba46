"""Changes topics as a whole and their subscriptions. It stands alone since it orders changes against requests.

A topic is trimmed, cleared, sealed, merged, given a policy or delay levels, or deleted; its subscriptions are created,
updated and deleted. A change closes the topic's gate, so that every slot is either before it or after it; the manifest
records at which slot. A trim closes the gate for each of its portions.

Each change has its `RequestEffects` around all that it awaits, since it goes on in a task of the gate, in portions, and
waits for former owners behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from daemon.call_values import Merged, Sealed, SubscriptionCreated, TopicDeleted, Trimmed
from daemon.core.decisions import departures
from daemon.core.decisions.departures import Departure, LedgerRanges
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.delay_levels import DelayLevels
from daemon.errors import AlreadyExists, NotFound, NotOwner, OutcomeUnknown, QuotaExceeded, Unavailable
from daemon.group_commit.request_effects import RequestEffects
from daemon.group_commit.shard_slots import STALL_ANSWER_S, ShardSlots
from daemon.runtime import backoff
from daemon.runtime.due_loop import FairShare
from daemon.runtime.environment import Environment
from daemon.topic import stored_topic, topic_settings
from daemon.topic.served_topic import ServedTopic
from daemon.topic.topic_manifests import Operation
from storage_backends import commit
from storage_backends.formats import names, requirements
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import (
    NamedValues,
    ObjectReference,
    Subscription,
    SubscriptionPolicy,
    TopicDelayLevels,
    TopicManifest,
    TopicPolicy,
)
from storage_backends.formats.slot_format import DeadLetterReason
from storage_backends.topic_manifest import DeleteTopic, RequireOfTopic, SetDelayLevels, SetPolicy, SetSubscriptions

log = logging.getLogger(__name__)

# A seal may wait for earlier ones, and each writes an object (seconds).
SEAL_ANSWER_S = 60.0
SUBSCRIPTIONS_RETRY_MS = 60_000
# A request makes at most 100,000 rows dead letters: no portion begins that could exceed that.
_ENOUGH_DEAD_LETTERS = 100_000 - departures.DEAD_LETTER_PORTION_ROWS


class ShardOfChanges(Protocol):
    """The port through which changes of topics use their shard."""

    @property
    def epoch(self) -> int: ...

    @property
    def applied_slot(self) -> ShardSlot: ...

    @property
    def slots(self) -> ShardSlots: ...

    @property
    def topics(self) -> Mapping[str, ServedTopic]: ...

    async def topic_to_write(self, name: str, effects: RequestEffects) -> ServedTopic:
        """Return the topic, created if it does not exist."""
        ...

    def effects_on(self, name: str) -> RequestEffects:
        """Return the effects of a request on a topic, which fails with an invariant that is violated."""
        ...

    async def alone(self) -> None:
        """Wait until no former owner is active any longer. Raises the error that ended the shard before."""
        ...

    async def superseded(self, refused: commit.Refused) -> NotOwner:
        """Lose the shard, since a commit was refused; return the error for the caller."""
        ...

    async def require(self, requirement: str) -> None:
        """Commit what readers of the shard must know, if that is not done. Raises commit.Refused."""
        ...

    def forget_topic(self, name: str, error: Exception) -> None:
        """Remove a deleted topic; callers that wait for it get the error."""
        ...


class TopicChanges:
    """The changes of one shard's topics."""

    def __init__(self, shard: ShardOfChanges, environment: Environment) -> None:
        self._shard = shard
        self._environment = environment

    async def trim(
        self, topic: ServedTopic, subscription: str | None, ranges: LedgerRanges | None, *, dead_letter: bool = False
    ) -> Trimmed:
        """Drop rows of the topic or of one subscription; if `ranges` is None, all of them. Raises NotFound.

        Works in portions; requests pass between them, and the rows that these add stay. With `dead_letter` rows that
        the subscription is owed become dead letters, but only some of them if they are many, or if there is no room for
        more. Raises QuotaExceeded if there is no room for the first portion.
        """
        state = None if subscription is None else topic.subscription(subscription)
        portions = topic.core.trim(ranges, None if state is None else state.subscription_id, dead_letter=dead_letter)
        rows, more = 0, True
        with self._shard.effects_on(topic.core.name) as effects:
            with contextlib.closing(portions):
                while more and not (dead_letter and rows > _ENOUGH_DEAD_LETTERS):
                    try:
                        dropped = await topic.gate.change(
                            lambda: self._drop(topic, state, portions, dead_letter, effects)
                        )
                    except QuotaExceeded:
                        if not rows:
                            raise
                        break
                    rows, more = rows + (dropped or 0), dropped is not None
            # A former owner may deliver dropped rows.
            await self._shard.alone()
            if not rows:
                await self._shard.slots.confirmed()
        return Trimmed(rows, dead_lettered=rows if dead_letter else 0, more=more)

    async def _drop(
        self,
        topic: ServedTopic,
        state: SubscriptionState | None,
        portions: Iterator[Departure | None],
        dead_letter: bool,
        effects: RequestEffects,
    ) -> int | None:
        """Drop the next portion; return how many rows, or None if there is none left."""
        if state is not None:
            topic.check_there(state)
        with topic.withholding(topic.core.subscriptions if state is None else (state.subscription_id,)):
            self._shard.slots.check_accepting()
            departure = await self._next_of(portions)
            if departure is None:
                return None
            slots = departure.slots()
            if state is not None and dead_letter:
                state.check_dead_letters(departure.rows)
                now_ms = self._environment.clock.now_ms()
                slots = topic.core.dead_lettering.stage_trimmed(state, departure, now_ms=now_ms)
            for records in slots:
                # Shielded, since other callers of the slot wait for it, too.
                await asyncio.shield(self._shard.slots.stage_together(records, effects=effects))
        metrics = self._environment.metrics
        if departure.rows:
            metrics.trimmed(topic.core.name, rows=departure.rows, of_subscription=state is not None)
        if dead_letter:
            metrics.dead_lettered(topic.core.name, DeadLetterReason.TRIMMED, rows=departure.rows)
        return departure.rows

    async def _next_of(self, portions: Iterator[Departure | None]) -> Departure | None:
        """Return the next portion, or None if there is none left; let other tasks have their turn."""
        taking_turns = FairShare(self._environment.clock)
        for departure in portions:
            if departure is not None:
                return departure
            await taking_turns.give_way()
        return None

    async def seal(self, topic: ServedTopic) -> Sealed:
        """Seal the mutable bucket; return when that is committed."""
        await topic.gate.passed()
        topic.check_room()
        sealing = topic.buckets.seal(self._shard.applied_slot)
        if sealing is None:
            await self._shard.slots.confirmed()
            return Sealed(rows=0, bucket="")
        try:
            return await asyncio.wait_for(asyncio.shield(sealing), SEAL_ANSWER_S)
        except TimeoutError:
            raise OutcomeUnknown(
                f"topic {topic.core.name}: the bucket is not sealed after {SEAL_ANSWER_S:.0f} s; a retry is safe"
            ) from None

    async def merge(self, topic: ServedTopic, buckets_max: int) -> Merged:
        """Merge until no index has more than `buckets_max` buckets, or none can be merged; 0 stands for the policy."""
        await topic.gate.passed()
        merging = topic.buckets.merging
        merged = await merging.merge(buckets_max or topic.settings.max_num_buckets)
        if not merged.merges:
            await self._shard.slots.confirmed()
        return merged

    async def set_policy(self, name: str, policy: TopicPolicy) -> TopicPolicy:
        """Replace the policy, and create the topic if it is new; return the policy in force."""
        with self._shard.effects_on(name) as effects:
            topic = await self._shard.topic_to_write(name, effects)
            await topic.gate.change(lambda: self._set_policy(topic, policy, effects), closed=False)
        return topic.settings.effective

    async def _set_policy(self, topic: ServedTopic, policy: TopicPolicy, effects: RequestEffects) -> None:
        await self._commit(topic, lambda tip: SetPolicy(policy=policy, epoch=self._shard.epoch), effects)
        topic.settings = topic_settings.settings_of(self._environment, policy, topic.settings.delay_levels)
        topic.quotas.set_limits(topic.settings.quota_limits)
        await topic.quotas.counted()
        topic.changed()
        topic.buckets.after_slot(self._shard.applied_slot)

    async def set_delay_levels(self, name: str, table: TopicDelayLevels | None) -> DelayLevels:
        """Replace the delay levels, with None by the daemon's; return those in force. Rows keep their times.

        Creates the topic if it is new. Raises InvalidArgument if the table is wrong, or exceeds the topic's limit on
        delays.
        """
        with self._shard.effects_on(name) as effects:
            topic = await self._shard.topic_to_write(name, effects)
            topic_settings.levels_of(self._environment, table, delay_max_ms=topic.settings.request_limits.delay_max_ms)
            await topic.gate.change(lambda: self._set_delay_levels(topic, table, effects), closed=False)
        return topic.settings.levels

    async def _set_delay_levels(
        self, topic: ServedTopic, table: TopicDelayLevels | None, effects: RequestEffects
    ) -> None:
        await self._commit(topic, lambda tip: SetDelayLevels(levels=table, epoch=self._shard.epoch), effects)
        topic.settings = topic_settings.settings_of(self._environment, topic.settings.policy, table)

    async def require_ids(self, topic: ServedTopic) -> None:
        """Commit that readers of the shard and of the topic must know schedule ids, before the first row with one.

        Raises Unavailable if that takes too long; then no row has changed.
        """
        if topic.requires_ids:
            return
        try:
            async with asyncio.timeout(STALL_ANSWER_S):
                await self._shard.require(requirements.SCHEDULE_IDS)
                await topic.manifests.commit(
                    lambda tip: RequireOfTopic(requirement=requirements.SCHEDULE_IDS, epoch=self._shard.epoch)
                )
        except commit.Refused as refused:
            raise await self._shard.superseded(refused) from refused
        except TimeoutError:
            raise Unavailable(
                f"topic {topic.core.name} has no schedule id yet, and the store has not answered for "
                f"{STALL_ANSWER_S:.0f} s; no row was changed, try again"
            ) from None

    async def delete(self, topic: ServedTopic) -> TopicDeleted:
        """Delete the topic with everything in it; end its streams with NotFound.

        Waiting callers may create it again.
        """
        with self._shard.effects_on(topic.core.name) as effects:
            deleted = await topic.gate.change(lambda: self._delete(topic, effects))
            await self._shard.alone()
        return deleted

    async def _delete(self, topic: ServedTopic, effects: RequestEffects) -> TopicDeleted:
        core, shard = topic.core, self._shard
        buckets = topic.buckets
        with topic.withholding(core.subscriptions):
            # No seal may follow. Decisions without a request name an incarnation that no longer exists from here on.
            await buckets.halt()
            try:
                lost_rows = sum(needed.rows for needed in core.rebuild_needed())
                rows = core.indexes.present_rows + lost_rows
                delete_after_ms = self._environment.clock.now_ms() + self._environment.grace_ms
                await self._commit(
                    topic,
                    lambda tip: DeleteTopic(
                        slot=shard.applied_slot, epoch=shard.epoch, delete_after_ms=delete_after_ms
                    ),
                    effects,
                )
            except BaseException:
                buckets.go_on()
                raise
            self._forget(topic)
        self._environment.metrics.topic_deleted()
        dead_letters = sum(len(state.dead_letters) for state in core.subscriptions.values())
        if dead_letters:
            log.warning("topic %s: %d dead letters left with it", core.name, dead_letters)
        return TopicDeleted(rows=rows, incarnation=core.incarnation)

    def _forget(self, topic: ServedTopic) -> None:
        name = topic.core.name
        again = Unavailable(f"topic {name} was deleted; try again")
        topic.end_streams(NotFound(f"topic {name} was deleted"))
        self._shard.forget_topic(name, again)
        for bucket in topic.core.indexes.sealed:
            topic.core.indexes.cache.discard_bucket(bucket)

    # ---- subscriptions

    async def create_subscription(
        self, name: str, subscription: str, policy: SubscriptionPolicy, properties: NamedValues
    ) -> SubscriptionCreated:
        """Create the subscription, and the topic if it is new; if repeated, return the existing one.

        Raises AlreadyExists if it exists with another policy, or other properties; QuotaExceeded.
        """
        if properties and name not in self._shard.topics:
            # A refused subscription creates no topic.
            body = stored_topic.encode_properties({1: properties})
            topic_settings.check_topic_properties(name, len(body), stored_bytes=0)
        with self._shard.effects_on(name) as effects:
            topic = await self._shard.topic_to_write(name, effects)
            created = await topic.gate.change(
                lambda: self._create_subscription(topic, subscription, policy, properties, effects)
            )
            if not created.created:
                await self._shard.slots.confirmed()
        return created

    async def _create_subscription(
        self,
        topic: ServedTopic,
        subscription: str,
        policy: SubscriptionPolicy,
        properties: NamedValues,
        effects: RequestEffects,
    ) -> SubscriptionCreated:
        name = topic.core.name
        state = topic.core.subscription(subscription)
        if state is not None:
            if (state.stored.policy, state.properties) != (policy, properties):
                raise AlreadyExists(f"topic {name} has a subscription {subscription!r} with another policy")
            return SubscriptionCreated(state.subscription_id, state.stored.since_ms, created=False)
        count, count_max = len(topic.core.subscriptions), self._environment.request_limits.subscriptions_max
        if count >= count_max:
            raise QuotaExceeded(
                f"topic {name} has {count} subscriptions, the limit is {count_max}",
                retry_after_ms=SUBSCRIPTIONS_RETRY_MS,
            )
        subscription_id = topic.manifests.manifest.last_subscription_id + 1
        properties_object = await self._properties_object(topic, subscription_id, properties)
        stored = Subscription(
            subscription_id=subscription_id,
            name=subscription,
            since_ms=topic.core.since_for_new_subscription(self._environment.clock.now_ms()),
            created_slot=self._shard.applied_slot,
            policy=policy,
        )
        coming = topic.core.begin_subscription(stored)
        # Before the manifest names it, so that no crash leaves it without them; if that is never committed, they are
        # decisions on nobody.
        waived = [
            self._shard.slots.stage_together(records, effects=effects)
            for records in topic.core.passed_before(coming).slots()
        ]
        for slot in waived:
            # Shielded, since other callers of the slot wait for it, too.
            await asyncio.shield(slot)
        await self._set_subscriptions(topic, lambda before: (*before, stored), properties_object, effects)
        state = topic.core.add_subscription()
        state.properties = properties
        return SubscriptionCreated(stored.subscription_id, stored.since_ms, created=True)

    async def update_subscription(
        self, topic: ServedTopic, subscription: str, policy: SubscriptionPolicy, properties: NamedValues
    ) -> None:
        """Replace the policy and the properties; they are in force when this returns. Raises NotFound."""
        with self._shard.effects_on(topic.core.name) as effects:
            await topic.gate.change(
                lambda: self._update_subscription(topic, subscription, policy, properties, effects), closed=False
            )

    async def _update_subscription(
        self,
        topic: ServedTopic,
        subscription: str,
        policy: SubscriptionPolicy,
        properties: NamedValues,
        effects: RequestEffects,
    ) -> None:
        state = topic.subscription(subscription)
        stored = dataclasses.replace(state.stored, policy=policy)
        properties_object = await self._properties_object(topic, state.subscription_id, properties)
        await self._set_subscriptions(
            topic,
            lambda before: (stored if each.subscription_id == stored.subscription_id else each for each in before),
            properties_object,
            effects,
        )
        state.stored, state.properties = stored, properties
        topic.nacks.watch(state)
        topic.notify(state)

    async def delete_subscription(self, topic: ServedTopic, subscription: str) -> int:
        """Delete the subscription, with rows that only it was owed; return how many dead letters it had.

        Raises NotFound.
        """
        with self._shard.effects_on(topic.core.name) as effects:
            dead_letters = await topic.gate.change(lambda: self._delete_subscription(topic, subscription, effects))
            # A former owner may deliver to it.
            await self._shard.alone()
        return dead_letters

    async def _delete_subscription(self, topic: ServedTopic, subscription: str, effects: RequestEffects) -> int:
        name = topic.core.name
        state = topic.subscription(subscription)
        deleted = state.subscription_id
        properties_object = await self._properties_object(topic, deleted, ())
        with topic.withholding((deleted,)):
            await topic.settle_due()
            for record in topic.core.gone_with_subscription(deleted):
                # Shielded, since other callers of the slot wait for it, too.
                await asyncio.shield(self._shard.slots.stage_together((record,), effects=effects))
            await self._set_subscriptions(
                topic,
                lambda before: (each for each in before if each.subscription_id != deleted),
                properties_object,
                effects,
            )
            topic.core.remove_subscription(deleted)
            gone = NotFound(f"subscription {subscription!r} of topic {name} was deleted")
            topic.end_streams(gone, subscription_id=deleted)
        topic.buckets.after_slot(self._shard.applied_slot)
        dead_letters = len(state.dead_letters)
        if dead_letters:
            log.warning("topic %s: %d dead letters left with subscription %r", name, dead_letters, subscription)
        return dead_letters

    async def _properties_object(
        self, topic: ServedTopic, subscription_id: int, properties: NamedValues
    ) -> ObjectReference | None:
        """Return the object with the properties of all subscriptions, or None if there are none.

        `properties` are those of one subscription. The object exists: the manifest names it, or it is written now.
        Raises QuotaExceeded if it would be too large, or properties are changed too often. They may always leave.
        """
        before = {state.subscription_id: state.properties for state in topic.core.subscriptions.values()}
        manifests, environment = topic.manifests, self._environment
        if before.get(subscription_id, ()) == properties:
            return manifests.manifest.properties_object
        after = {number: named for number, named in {**before, subscription_id: properties}.items() if named}
        if not after:
            return None
        if properties:
            prefix = names.properties_prefix(manifests.shard, topic.core.topic_id)
            replaced = [each for each in manifests.manifest.tombstones if each.object.name.startswith(prefix)]
            topic_settings.check_replaced_properties(
                topic.core.name, [each.delete_after_ms for each in replaced], now_ms=environment.clock.now_ms()
            )
        body = await environment.run(lambda: stored_topic.encode_properties(after))
        stored = manifests.manifest.properties_object
        topic_settings.check_topic_properties(
            topic.core.name, len(body), stored_bytes=0 if stored is None else stored.size_bytes
        )
        base = manifests.number
        key = names.properties_key(manifests.shard, topic.core.topic_id, base, environment.new_id())
        return await backoff.until_answered(
            lambda: environment.run(lambda: stored_topic.write_properties(environment.store, body, key=key, base=base)),
            failed=lambda error: environment.waits_for_store("properties cannot be written", key, error),
            waiting=environment,
        )

    async def _set_subscriptions(
        self,
        topic: ServedTopic,
        changed: Callable[[tuple[Subscription, ...]], Iterable[Subscription]],
        properties_object: ObjectReference | None,
        effects: RequestEffects,
    ) -> None:
        """Commit the result of `changed` as the subscriptions. Their ids are never used again."""

        def operation(tip: TopicManifest) -> SetSubscriptions:
            subscriptions = tuple(changed(tip.subscriptions))
            return SetSubscriptions(
                subscriptions=subscriptions,
                properties_object=properties_object,
                last_subscription_id=max(
                    tip.last_subscription_id, *(each.subscription_id for each in subscriptions), 0
                ),
                epoch=self._shard.epoch,
                delete_after_ms=self._environment.clock.now_ms() + self._environment.grace_ms,
            )

        await self._commit(topic, operation, effects)

    async def _commit(
        self, topic: ServedTopic, operation: Callable[[TopicManifest], Operation], effects: RequestEffects
    ) -> None:
        try:
            with effects.committing():
                await topic.manifests.commit(operation)
        except commit.Refused as refused:
            raise await self._shard.superseded(refused) from refused
