"""The calls of operators.

They act on a topic as a whole, on dead letters, and on the garbage of a root. `tarry.calls` builds the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tarry import calls, policies, redelivery, results
from tarry.aio import connections


class Operating:
    """The operator calls of `tarry.aio.Client`."""

    _connections: connections.Connections
    _calls: calls.Calls

    async def policy(self, topic: str, *, timeout_s: float | None = None) -> results.TopicPolicies:
        """Return the policy of a topic, both the stored one and the one in force. Raises NotFound.

        Example: `(await client.policy("flights")).effective.bucket_rows_max`
        """
        return await self._connections.run(self._calls.policy_of(topic, timeout_s=timeout_s))

    async def set_policy(
        self, topic: str, policy: policies.TopicPolicy, *, timeout_s: float | None = None
    ) -> policies.TopicPolicy:
        """Replace a topic's whole policy, and create the topic if it is new; it applies from the answer on.

        Returns what is in force now. Raises InvalidArgument, which names the field, if a value is outside its limits.
        Example: `await client.set_policy("flights", tarry.TopicPolicy(bucket_form=tarry.BucketForm.COMPATIBLE))`
        """
        return await self._connections.run(self._calls.set_policy(topic, policy, timeout_s=timeout_s))

    async def delay_levels(self, topic: str = "", *, timeout_s: float | None = None) -> results.DelayLevelsInForce:
        """Return the delay levels in force of a topic, with the rows pending by each.

        Without a topic, the daemon's own. Raises NotFound.
        Example: `(await client.delay_levels("flights")).delay_ms`
        """
        return await self._connections.run(self._calls.delay_levels(topic, timeout_s=timeout_s))

    async def set_delay_levels(
        self, topic: str, levels: policies.DelayLevels | None, *, timeout_s: float | None = None
    ) -> results.DelayLevelsSet:
        """Replace the delay levels of a topic, and create the topic if it is new; they apply from the answer on.

        None returns the topic to the daemon's levels. Pending rows keep their time. Raises InvalidArgument, which names
        the place, if a table cannot be read.
        Example: `(await client.set_delay_levels("flights", tarry.DelayLevels("1s 5s 10s 30s 1m"))).warnings`
        """
        return await self._connections.run(self._calls.set_delay_levels(topic, levels, timeout_s=timeout_s))

    async def replay_dead_letters(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None = None,
        *,
        delay_ms: int = 0,
        timeout_s: float | None = None,
    ) -> results.Replayed:
        """Redeliver dead letters, now or after `delay_ms`, with no redelivery counted; durable on return.

        `which` None means all. Work that takes longer than `timeout_s` (seconds) continues: call again. After a lost
        answer the request is sent again and counts only what was left. Raises NotFound, or OutOfRange if a delay is
        over the limit.
        Example: `(await client.replay_dead_letters("flights", "departures", tarry.DeadLetterFilter(ids=[7]))).replayed`
        """
        return await self._connections.run(
            self._calls.replay_dead_letters(topic, subscription, which, delay_ms=delay_ms, timeout_s=timeout_s)
        )

    async def purge_dead_letters(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None = None,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Forget dead letters, durably; return how many, counted as in `replay_dead_letters`. Raises NotFound.

        Example: `await client.purge_dead_letters("flights", "departures", tarry.DeadLetterFilter(until_ms=monday_ms))`
        """
        return await self._connections.run(
            self._calls.purge_dead_letters(topic, subscription, which, timeout_s=timeout_s)
        )

    async def seal(self, topic: str, *, timeout_s: float | None = None) -> results.Sealed:
        """Seal the mutable bucket now; the bucket is committed on return.

        After a lost answer the request is sent again and reports what was left to seal, usually nothing. Raises
        NotFound.
        Example: `(await client.seal("flights")).bucket`
        """
        return await self._connections.run(self._calls.seal(topic, timeout_s=timeout_s))

    async def merge(
        self, topic: str, buckets_max: int | None = None, *, timeout_s: float | None = None
    ) -> results.Merged:
        """Merge sealed buckets until each index of the topic has at most `buckets_max`, or no two may be merged.

        None takes the policy's `max_num_buckets`. Delivery continues. Work that takes longer than `timeout_s` (seconds)
        continues too: call again. Raises NotFound.
        Example: `(await client.merge("flights", 10, timeout_s=300)).buckets`
        """
        return await self._connections.run(self._calls.merge(topic, buckets_max, timeout_s=timeout_s))

    def collect_garbage(
        self,
        *,
        dry_run: bool = False,
        force: bool = False,
        retry_dead_objects: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator[results.Garbage]:
        """Delete the objects that no manifest needs, in the shards of one daemon; yield the progress.

        - `dry_run` deletes nothing and counts what would be deleted.
        - `force` deletes orphans even if they are more than a fifth of a shard.
        - `retry_dead_objects` tries again to delete what was given up.
        The last value has `done`. If the daemon is a standby, the owner that it names is asked instead. Nothing is
        retried: a failure is raised, and starting again is safe.
        Example: `async for step in client.collect_garbage(dry_run=True): print(step.orphans.size_bytes)`
        """
        plan = self._calls.collect_garbage(
            dry_run=dry_run, force=force, retry_dead_objects=retry_dead_objects, timeout_s=timeout_s
        )
        return self._connections.receive(plan, results.Garbage.from_message)

    async def delete_topic(self, topic: str, *, timeout_s: float | None = None) -> results.TopicDeleted:
        """Delete a topic with its rows, subscriptions and policy; its streams end with NotFound. Raises NotFound.

        Adding to that name later creates a new topic.
        Example: `(await client.delete_topic("flights")).rows`
        """
        return await self._connections.run(self._calls.delete_topic(topic, timeout_s=timeout_s))
