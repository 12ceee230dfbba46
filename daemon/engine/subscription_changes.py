"""Subscriptions that come, change and go.

Owns: the order of such a change against the topic's requests: nothing passes between its decision and its commit.
Does not own: who is owed what (`daemon.core.topic`), the manifest's operation (`storage_backends.topic_manifest`) and
the limits of a policy (`topic_settings`).

A change closes the topic's gate, so that every slot is either before it or after it; the manifest says at which slot.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from daemon.engine.calls import SubscriptionCreated
from daemon.engine.environment import Environment
from daemon.engine.served_topic import ServedTopic
from daemon.errors import AlreadyExists, NotFound, QuotaExceeded
from storage_backends import commit
from storage_backends.formats.manifest import Subscription, SubscriptionPolicy, TopicManifest
from storage_backends.topic_manifest import SetSubscriptions

if TYPE_CHECKING:
    from daemon.engine.shard import ServedShard

log = logging.getLogger(__name__)

SUBSCRIPTIONS_RETRY_MS = 60_000


class SubscriptionChanges:
    """The changes of one shard's topics."""

    def __init__(self, shard: ServedShard, environment: Environment) -> None:
        self._shard = shard
        self._environment = environment

    async def create(self, name: str, subscription: str, policy: SubscriptionPolicy) -> SubscriptionCreated:
        """Creates the subscription, and the topic if it is new; repeated it answers with what is there.

        Raises AlreadyExists when it is there with another policy.
        """
        topic = await self._shard.topic_to_write(name)
        created = await topic.gate.change(lambda: self._create(topic, subscription, policy))
        if not created.created:
            await self._shard.commits.confirmed()
        return created

    async def _create(self, topic: ServedTopic, subscription: str, policy: SubscriptionPolicy) -> SubscriptionCreated:
        name = topic.core.name
        state = topic.core.subscription(subscription)
        if state is not None:
            if state.stored.policy != policy:
                raise AlreadyExists(f"topic {name} has a subscription {subscription!r} with another policy")
            return SubscriptionCreated(state.subscription_id, state.stored.since_ms, created=False)
        count, count_max = len(topic.core.subscriptions), self._environment.request_limits.subscriptions_max
        if count >= count_max:
            raise QuotaExceeded(
                f"topic {name} has {count} subscriptions, the limit is {count_max}",
                retry_after_ms=SUBSCRIPTIONS_RETRY_MS,
            )
        stored = Subscription(
            subscription_id=self._shard.topic_commits[name].manifest.last_subscription_id + 1,
            name=subscription,
            since_ms=topic.core.since_for_new_subscription(self._environment.clock.now_ms()),
            created_slot=self._shard.applied_slot,
            policy=policy,
        )
        topic.core.begin_subscription(stored)
        await self._commit(
            name,
            lambda tip: SetSubscriptions(
                subscriptions=(*tip.subscriptions, stored),
                last_subscription_id=stored.subscription_id,
                epoch=self._shard.epoch,
                delete_after_ms=self._environment.clock.now_ms() + self._environment.grace_ms,
            ),
        )
        topic.core.add_subscription()
        return SubscriptionCreated(stored.subscription_id, stored.since_ms, created=True)

    async def update(self, topic: ServedTopic, subscription: str, policy: SubscriptionPolicy) -> SubscriptionPolicy:
        """Replaces the policy; it counts when this returns. Raises NotFound."""
        await topic.gate.change(lambda: self._update(topic, subscription, policy), closed=False)
        return policy

    async def _update(self, topic: ServedTopic, subscription: str, policy: SubscriptionPolicy) -> None:
        state = topic.subscription(subscription)
        stored = dataclasses.replace(state.stored, policy=policy)
        await self._commit(
            topic.core.name,
            lambda tip: SetSubscriptions(
                subscriptions=tuple(
                    stored if each.subscription_id == stored.subscription_id else each for each in tip.subscriptions
                ),
                last_subscription_id=tip.last_subscription_id,
                epoch=self._shard.epoch,
                delete_after_ms=self._environment.clock.now_ms() + self._environment.grace_ms,
            ),
        )
        state.stored = stored
        topic.redelivery.watch(state)
        topic.notify(state)

    async def delete(self, topic: ServedTopic, subscription: str) -> int:
        """Deletes the subscription; what only it was owed is gone. How many dead letters left with it.

        Raises NotFound.
        """
        dead_letters = await topic.gate.change(lambda: self._delete(topic, subscription))
        # A former owner may hand out to it.
        await self._shard.alone()
        return dead_letters

    async def _delete(self, topic: ServedTopic, subscription: str) -> int:
        name = topic.core.name
        state = topic.subscription(subscription)
        deleted = state.subscription_id
        with topic.withholding((deleted,)):
            await topic.settle_due()
            for record in topic.core.gone_with_subscription(deleted):
                # Others of the slot wait for it too: it must not be cancelled with this.
                await asyncio.shield(self._shard.commits.stage_together((record,)))
            await self._commit(
                name,
                lambda tip: SetSubscriptions(
                    subscriptions=tuple(each for each in tip.subscriptions if each.subscription_id != deleted),
                    last_subscription_id=tip.last_subscription_id,
                    epoch=self._shard.epoch,
                    delete_after_ms=self._environment.clock.now_ms() + self._environment.grace_ms,
                ),
            )
            topic.core.remove_subscription(deleted)
            gone = NotFound(f"subscription {subscription!r} of topic {name} was deleted")
            topic.end_streams(gone, subscription_id=deleted)
        self._shard.lives[name].after_slot(self._shard.applied_slot)
        dead_letters = len(state.dead_letters)
        if dead_letters:
            log.warning("topic %s: %d dead letters left with subscription %r", name, dead_letters, subscription)
        return dead_letters

    async def _commit(self, name: str, operation: Callable[[TopicManifest], SetSubscriptions]) -> None:
        try:
            await self._shard.topic_commits[name].commit(operation)
        except commit.Refused as refused:
            raise await self._shard.superseded(refused) from refused
