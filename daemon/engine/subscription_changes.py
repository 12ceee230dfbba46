"""Subscriptions that come and go.

Owns: the order of such a change against the topic's requests: nothing passes between its decision and its commit.
Does not own: who is owed what (`daemon.core.topic`) and the manifest's operation (`storage_backends.topic_manifest`).

A change pauses the topic, so that every slot is either before it or after it; the manifest says at which slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from daemon.engine.calls import SubscriptionCreated
from daemon.engine.environment import Environment
from daemon.errors import NotFound, QuotaExceeded
from storage_backends import commit
from storage_backends.formats.manifest import Subscription, TopicManifest
from storage_backends.topic_manifest import SetSubscriptions

if TYPE_CHECKING:
    from daemon.engine.shard import ServedShard

SUBSCRIPTIONS_RETRY_MS = 60_000


class SubscriptionChanges:
    """The changes of one shard's topics."""

    def __init__(self, shard: ServedShard, environment: Environment) -> None:
        self._shard = shard
        self._environment = environment

    async def create(self, name: str, subscription: str) -> SubscriptionCreated:
        """Creates the subscription, and the topic if it is new; repeated it answers with what is there."""
        topic = await self._shard.topic_to_write(name)
        await topic.pause()
        try:
            for state in topic.core.subscriptions.values():
                if state.stored.name == subscription:
                    await self._shard.commits.confirmed()
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
            )
            topic.core.begin_subscription(stored)
            await self._commit(
                name,
                lambda tip: SetSubscriptions(
                    subscriptions=(*tip.subscriptions, stored),
                    last_subscription_id=stored.subscription_id,
                    epoch=self._shard.epoch,
                ),
            )
            topic.core.add_subscription()
            return SubscriptionCreated(stored.subscription_id, stored.since_ms, created=True)
        finally:
            topic.resume()

    async def delete(self, name: str, subscription: str) -> None:
        """Deletes the subscription; what only it was owed is gone. Raises NotFound."""
        topic = self._shard.topics[name]
        await topic.pause()
        try:
            states = topic.core.subscriptions.values()
            state = next((state for state in states if state.stored.name == subscription), None)
            if state is None:
                raise NotFound(f"topic {name} has no subscription {subscription!r}")
            deleted = state.subscription_id
            gone = NotFound(f"subscription {subscription!r} of topic {name} was deleted")
            topic.end_streams(gone, subscription_id=deleted)
            await topic.settle_due()
            await topic.commit_records(topic.core.gone_with_subscription(deleted))
            await self._commit(
                name,
                lambda tip: SetSubscriptions(
                    subscriptions=tuple(each for each in tip.subscriptions if each.subscription_id != deleted),
                    last_subscription_id=tip.last_subscription_id,
                    epoch=self._shard.epoch,
                ),
            )
            topic.core.remove_subscription(deleted)
            self._shard.lives[name].after_slot(self._shard.applied_slot)
        finally:
            topic.resume()

    async def _commit(self, name: str, operation: Callable[[TopicManifest], SetSubscriptions]) -> None:
        try:
            await self._shard.topic_commits[name].commit(operation)
        except commit.Refused as refused:
            raise self._shard.superseded(refused) from refused
