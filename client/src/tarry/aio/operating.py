"""What an operator does, on the event loop.

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
        """As `tarry.Client.policy`."""
        return await self._connections.run(self._calls.policy_of(topic, timeout_s=timeout_s))

    async def set_policy(
        self, topic: str, policy: policies.TopicPolicy, *, timeout_s: float | None = None
    ) -> policies.TopicPolicy:
        """As `tarry.Client.set_policy`."""
        return await self._connections.run(self._calls.set_policy(topic, policy, timeout_s=timeout_s))

    async def delay_levels(self, topic: str = "", *, timeout_s: float | None = None) -> results.DelayLevelsInForce:
        """As `tarry.Client.delay_levels`."""
        return await self._connections.run(self._calls.delay_levels(topic, timeout_s=timeout_s))

    async def set_delay_levels(
        self, topic: str, levels: policies.DelayLevels | None, *, timeout_s: float | None = None
    ) -> results.DelayLevelsSet:
        """As `tarry.Client.set_delay_levels`."""
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
        """As `tarry.Client.replay_dead_letters`."""
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
        """As `tarry.Client.purge_dead_letters`."""
        return await self._connections.run(
            self._calls.purge_dead_letters(topic, subscription, which, timeout_s=timeout_s)
        )

    async def seal(self, topic: str, *, timeout_s: float | None = None) -> results.Sealed:
        """As `tarry.Client.seal`."""
        return await self._connections.run(self._calls.seal(topic, timeout_s=timeout_s))

    async def merge(
        self, topic: str, buckets_max: int | None = None, *, timeout_s: float | None = None
    ) -> results.Merged:
        """As `tarry.Client.merge`."""
        return await self._connections.run(self._calls.merge(topic, buckets_max, timeout_s=timeout_s))

    def collect_garbage(
        self,
        *,
        dry_run: bool = False,
        force: bool = False,
        retry_dead_objects: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator[results.Garbage]:
        """As `tarry.Client.collect_garbage`."""
        step = self._calls.collect_garbage(
            dry_run=dry_run, force=force, retry_dead_objects=retry_dead_objects, timeout_s=timeout_s
        )
        return self._connections.receive(step, results.Garbage.from_message)

    async def delete_topic(self, topic: str, *, timeout_s: float | None = None) -> results.TopicDeleted:
        """As `tarry.Client.delete_topic`."""
        return await self._connections.run(self._calls.delete_topic(topic, timeout_s=timeout_s))
