"""What is done to a topic as a whole: trimmed, cleared, sealed, merged, given a policy or delay levels, deleted.

Owns: the order of such a change against the topic's requests, hand-outs, seals and leases.
Does not own: what leaves (`daemon.core.topic`), the manifest's operations (`storage_backends.topic_manifest`) and the
limits of a policy (`topic_settings`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from daemon.core.delay_levels import DelayLevels
from daemon.core.trimming import LedgerRanges
from daemon.engine import topic_settings
from daemon.engine.calls import Merged, Sealed, TopicDeleted
from daemon.engine.environment import Environment
from daemon.engine.manifests import Operation
from daemon.engine.served_topic import ServedTopic
from daemon.errors import NotFound, OutcomeUnknown, Unavailable
from storage_backends import commit
from storage_backends.formats.manifest import TopicDelayLevels, TopicManifest, TopicPolicy
from storage_backends.topic_manifest import DeleteTopic, SetDelayLevels, SetPolicy

if TYPE_CHECKING:
    from daemon.engine.shard import ServedShard

log = logging.getLogger(__name__)

# A seal may wait for those before it, and each writes an object.
SEAL_ANSWER_S = 60.0


class TopicChanges:
    """The changes of one shard's topics."""

    def __init__(self, shard: ServedShard, environment: Environment) -> None:
        self._shard = shard
        self._environment = environment

    async def trim(self, topic: ServedTopic, subscription: str | None, ranges: LedgerRanges | None) -> int:
        """Drops rows of the topic or of one subscription, None: all of them; how many. Raises NotFound."""
        rows = await topic.gate.change(lambda: self._trim(topic, subscription, ranges))
        # A former owner may hand out what has left.
        await self._shard.alone()
        if rows:
            self._environment.metrics.trimmed(topic.core.name, rows=rows, of_subscription=subscription is not None)
        else:
            await self._shard.commits.confirmed()
        return rows

    async def _trim(self, topic: ServedTopic, subscription: str | None, ranges: LedgerRanges | None) -> int:
        commits = self._shard.commits
        state = None if subscription is None else topic.subscription(subscription)
        subscription_id = None if state is None else state.subscription_id
        withheld = topic.core.subscriptions if subscription_id is None else (subscription_id,)
        with topic.withholding(withheld):
            commits.check_accepting()
            departures = topic.core.trim(ranges, subscription_id)
            for departure in departures:
                for records in departure.slots():
                    # Others of the slot wait for it too: it must not be cancelled with this.
                    await asyncio.shield(commits.stage_together(records))
        return sum(departure.rows for departure in departures)

    async def seal(self, topic: ServedTopic) -> Sealed:
        """Seals the mutable bucket; returns when that is committed."""
        await topic.gate.passed()
        topic.check_room()
        sealing = self._shard.lives[topic.core.name].seal(self._shard.applied_slot)
        if sealing is None:
            await self._shard.commits.confirmed()
            return Sealed(rows=0, bucket="")
        try:
            return await asyncio.wait_for(asyncio.shield(sealing), SEAL_ANSWER_S)
        except TimeoutError:
            raise OutcomeUnknown(
                f"topic {topic.core.name}: the bucket is not sealed after {SEAL_ANSWER_S:.0f} s; a retry is safe"
            ) from None

    async def merge(self, topic: ServedTopic, buckets_max: int) -> Merged:
        """Merges until no index has more than `buckets_max` buckets, 0: than the policy says, or none may be merged."""
        await topic.gate.passed()
        merging = self._shard.lives[topic.core.name].merging
        merged = await merging.merge(buckets_max or topic.settings.max_num_buckets)
        if not merged.merges:
            await self._shard.commits.confirmed()
        return merged

    async def set_policy(self, topic: ServedTopic, policy: TopicPolicy) -> TopicPolicy:
        """Replaces the policy; what is in force when this returns."""
        await topic.gate.change(lambda: self._set_policy(topic, policy), closed=False)
        return topic.settings.effective

    async def _set_policy(self, topic: ServedTopic, policy: TopicPolicy) -> None:
        await self._commit(topic.core.name, lambda tip: SetPolicy(policy=policy, epoch=self._shard.epoch))
        topic.settings = topic_settings.settings_of(self._environment, policy, topic.settings.delay_levels)
        topic.quotas.set_limits(topic.settings.quota_limits)
        await topic.quotas.counted()
        topic.changed()
        self._shard.lives[topic.core.name].after_slot(self._shard.applied_slot)

    async def set_delay_levels(self, topic: ServedTopic, table: TopicDelayLevels | None) -> DelayLevels:
        """Replaces the delay levels, None: by the daemon's; what is in force when this returns. Rows keep their times.

        Raises InvalidArgument for a table that is wrong, or goes beyond the topic's limit on delays.
        """
        topic_settings.levels_of(self._environment, table, delay_max_ms=topic.settings.request_limits.delay_max_ms)
        await topic.gate.change(lambda: self._set_delay_levels(topic, table), closed=False)
        return topic.settings.levels

    async def _set_delay_levels(self, topic: ServedTopic, table: TopicDelayLevels | None) -> None:
        await self._commit(topic.core.name, lambda tip: SetDelayLevels(levels=table, epoch=self._shard.epoch))
        topic.settings = topic_settings.settings_of(self._environment, topic.settings.policy, table)

    async def delete(self, topic: ServedTopic) -> TopicDeleted:
        """Deletes the topic with everything in it; its streams end with NotFound, and who waits may bear it again."""
        deleted = await topic.gate.change(lambda: self._delete(topic))
        await self._shard.alone()
        return deleted

    async def _delete(self, topic: ServedTopic) -> TopicDeleted:
        core, shard = topic.core, self._shard
        life = shard.lives[core.name]
        with topic.withholding(core.subscriptions):
            # No seal may follow. What is decided without a request from here on names an incarnation that is no more.
            await life.halt()
            try:
                lost_rows = sum(needed.rows for needed in core.rebuild_needed())
                rows = core.indexes.present_rows + lost_rows
                delete_after_ms = self._environment.clock.now_ms() + self._environment.grace_ms
                await self._commit(
                    core.name,
                    lambda tip: DeleteTopic(
                        slot=shard.applied_slot, epoch=shard.epoch, delete_after_ms=delete_after_ms
                    ),
                )
            except BaseException:
                life.go_on()
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
        topic.close(again)
        self._shard.forget_topic(name)
        for bucket in topic.core.indexes.sealed:
            topic.core.indexes.cache.discard_bucket(bucket)

    async def _commit(self, name: str, operation: Callable[[TopicManifest], Operation]) -> None:
        try:
            await self._shard.topic_commits[name].commit(operation)
        except commit.Refused as refused:
            raise await self._shard.superseded(refused) from refused
