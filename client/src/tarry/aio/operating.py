"""What an operator does.

Owns: the calls of a client on a topic as a whole, on dead letters, and on the garbage of a root.
Does not own: requests and answers (`tarry.calls`), and performing them (`tarry.aio.connections`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tarry import calls, policies, redelivery, results
from tarry.aio import connections


class Operating:
    """A part of `tarry.aio.Client`."""

    _connections: connections.Connections
    _calls: calls.Calls

    async def policy(self, topic: str, *, timeout_s: float | None = None) -> results.TopicPolicies:
        """The policy of a topic: as it was set, and what is in force. Raises NotFound.

        Example: `(await client.policy("flights")).effective.bucket_rows_max`
        """
        return await self._connections.run(self._calls.policy_of(topic, timeout_s=timeout_s))

    async def set_policy(
        self, topic: str, policy: policies.TopicPolicy, *, timeout_s: float | None = None
    ) -> policies.TopicPolicy:
        """Replaces a topic's policy as a whole, and creates the topic if it is new; it counts from the answer on.

        Returns what is in force now. Raises InvalidArgument: a value outside its limits, by its name.

        Example: `await client.set_policy("flights", tarry.TopicPolicy(bucket_form=tarry.BucketForm.COMPATIBLE))`
        """
        return await self._connections.run(self._calls.set_policy(topic, policy, timeout_s=timeout_s))

    async def delay_levels(self, topic: str = "", *, timeout_s: float | None = None) -> results.DelayLevelsInForce:
        """The delay levels in force of a topic, with what is pending by each; without a topic the daemon's own.

        Raises NotFound.

        Example: `(await client.delay_levels("flights")).delay_ms`
        """
        return await self._connections.run(self._calls.delay_levels(topic, timeout_s=timeout_s))

    async def set_delay_levels(
        self, topic: str, levels: policies.DelayLevels | None, *, timeout_s: float | None = None
    ) -> results.DelayLevelsSet:
        """Replaces the delay levels of a topic, and creates the topic if it is new; they count from the answer on.

        None: the daemon's from now on. What is pending keeps its time. Raises InvalidArgument: a table that cannot be
        read, with the place.

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
        """Has dead letters delivered again, now or after `delay_ms`, with no redelivery counted; durable on return.

        `which`: None = all. What takes longer than `timeout_s` goes on: ask again. After a lost answer it is sent
        again, and counts only what was left. Raises NotFound, OutOfRange: a delay over the limit.

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
        """Forgets dead letters, durably; returns how many, as `replay_dead_letters` counts. Raises NotFound.

        Example: `await client.purge_dead_letters("flights", "departures", tarry.DeadLetterFilter(until_ms=monday_ms))`
        """
        return await self._connections.run(
            self._calls.purge_dead_letters(topic, subscription, which, timeout_s=timeout_s)
        )

    async def seal(self, topic: str, *, timeout_s: float | None = None) -> results.Sealed:
        """Seals the mutable bucket now; the bucket is committed on return.

        After a lost answer it is sent again and tells what was left to seal: nothing, most often. Raises NotFound.

        Example: `(await client.seal("flights")).bucket`
        """
        return await self._connections.run(self._calls.seal(topic, timeout_s=timeout_s))

    async def merge(
        self, topic: str, buckets_max: int | None = None, *, timeout_s: float | None = None
    ) -> results.Merged:
        """Merges sealed buckets until each index of the topic has at most `buckets_max`, or no two may be merged.

        None: the policy's `max_num_buckets`. Hand-out goes on. What takes longer than `timeout_s` goes on as well: ask
        again. Raises NotFound.

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
        """Deletes what no manifest needs any more, in the shards of one daemon; each step tells how far.

        `dry_run`: nothing is deleted, and the counts say what would be. `force`: also orphans that are more than a
        fifth of a shard. `retry_dead_objects`: what was given up is tried again. The last value has `done`. A daemon
        that stands by is not asked, but the owner that it names. Nothing is tried again: a failure is raised, and
        starting again is safe.

        Example: `async for step in client.collect_garbage(dry_run=True): print(step.orphans.size_bytes)`
        """
        step = self._calls.collect_garbage(
            dry_run=dry_run, force=force, retry_dead_objects=retry_dead_objects, timeout_s=timeout_s
        )
        return self._connections.receive(step, results.Garbage.from_message)

    async def delete_topic(self, topic: str, *, timeout_s: float | None = None) -> results.TopicDeleted:
        """Deletes a topic with its rows, subscriptions and policy; its streams end with NotFound. Raises NotFound.

        A topic of that name that is added to later is a new one.

        Example: `(await client.delete_topic("flights")).rows`
        """
        return await self._connections.run(self._calls.delete_topic(topic, timeout_s=timeout_s))
