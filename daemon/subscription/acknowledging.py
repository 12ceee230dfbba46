"""Requests on positions that were handed out: acknowledging them, and keeping them longer.

Owns: the moment at which such a request is decided, finding in the backlog what is in nobody's hand, and that the
answer waits for what it says.
Does not own: the decisions (`daemon.core.acknowledgements`), negative acknowledgements (`negative_acknowledging`), the
ends of leases (`leases`), and slots (`shard_staging`).

A position that a staged negative acknowledgement names is in no hand until that is applied: whoever names it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from daemon.core import limits
from daemon.core.claims import HeldPositions
from daemon.core.ignored import Ignored, IgnoredReason
from daemon.core.index import SeenRows
from daemon.core.positions import KeyedRows
from daemon.core.subscription_state import SubscriptionState
from daemon.errors import Unavailable
from daemon.surroundings.environment import Environment
from daemon.topic_terms.topic_port import TopicPort
from daemon.topic_terms.topic_staging import STALL_ANSWER_S


class Acknowledging:
    """The acknowledgements of one topic, and the moment of every request that names what was handed out."""

    def __init__(self, topic: TopicPort, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment

    async def acknowledge(self, state: SubscriptionState, claims: HeldPositions, *, awaited: bool) -> Ignored:
        """Acknowledges hand-outs of positions; what was ignored. Raises NotFound."""
        self.check(claims)
        topic, core, commits = self._topic, self._topic.core, self._topic.shard.commits
        await self.decidable(state, claims)
        commits.check_accepting()
        records, rest = core.acknowledging.stage(state, claims)
        slot = commits.stage(*records, awaited=awaited) if records else None
        # There may be room IN_FLIGHT again.
        topic.notify(state)
        ignored = Ignored.nothing()
        if len(rest):
            found = await self.find(state, rest, rest)
            records, rest = core.acknowledging.stage_found(state, rest, found)
            if records:
                slot = commits.stage(*records, awaited=awaited)
            ignored = core.why_ignored(state, rest, found, now_ms=self._environment.clock.now_ms())
        if slot is not None:
            await asyncio.shield(slot)
        await self.answerable(ignored)
        self._environment.metrics.acknowledged(core.name, acknowledged=len(claims) - len(ignored), ignored=len(ignored))
        return ignored

    async def extend(self, state: SubscriptionState, claims: HeldPositions, holders: Collection[int]) -> Ignored:
        """The ack time-out of what `holders` have begins anew; what they do not have."""
        self.check(claims)
        await self.decidable(state, claims)
        elapsed_ms = self._environment.elapsed_ms()
        left = self._topic.core.redelivery.extend(state, claims, holders, elapsed_ms=elapsed_ms)
        # Under another owner the positions are due again.
        await self._topic.shard.commits.confirmed()
        return Ignored.all_of(left, IgnoredReason.NOT_HELD)

    def check(self, claims: HeldPositions) -> None:
        """Checks how many positions are named and that batch indexes fit their entries. Raises InvalidArgument."""
        limits.check_rows("entry_id", len(claims), self._environment.request_limits.rows_max)
        limits.check_batch_index(claims.entry_id, claims.batch_index)

    async def decidable(self, state: SubscriptionState, named: HeldPositions, *, is_forwarded: bool = False) -> bool:
        """Returns when requests pass and nothing that is staged names the positions: decide before awaiting anything.
        Whether a slot was waited for.

        `is_forwarded`: they come again also when they have left; so their leaving is waited for, and a row that is
        being added again. Raises NotFound, and Unavailable when the moment does not come.
        """
        topic = self._topic
        await topic.gate.passed()
        topic.check_there(state)
        if not topic.core.redelivery.is_staged(state, named, is_forwarded=is_forwarded):
            return False
        async with self._in_time("a slot that names the positions was not durable"):
            while topic.core.redelivery.is_staged(state, named, is_forwarded=is_forwarded):
                await topic.shard.commits.settled()
                await topic.gate.passed()
                topic.check_there(state)
        return True

    @contextlib.asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        """Raises Unavailable when it takes too long."""
        try:
            async with asyncio.timeout(STALL_ANSWER_S):
                yield
        except TimeoutError:
            raise Unavailable(f"topic {self._topic.core.name}: {what} for {STALL_ANSWER_S:.0f} s; try again") from None

    async def find(
        self, state: SubscriptionState, claims: HeldPositions, named: HeldPositions, *, is_forwarded: bool = False
    ) -> KeyedRows:
        """Claimed rows that are due: READY, NACKED, held over from an earlier stream, or IN_FLIGHT.

        When this returns, a request that names the positions may be decided, as after `decidable`. `is_forwarded`: as
        there; with time 0 a row of any time is meant then. Raises Unavailable when what is due cannot be read.
        """
        seen: SeenRows = {}
        while True:
            # What a former owner handed out may not have been passed here, nor what was added again.
            async with self._in_time("what is due could not be read"):
                await self._topic.settle_due()
            # Also where nothing will be found: of that some requests decide something.
            if await self.decidable(state, named, is_forwarded=is_forwarded):
                continue
            if not len(self._topic.core.in_backlog(state, claims)):
                return KeyedRows.empty()
            found, missing = self._topic.core.find_in_backlog(state, claims, seen, any_time=is_forwarded)
            if not missing:
                return found
            await self._topic.load(missing)

    async def answerable(self, ignored: Ignored) -> None:
        """Returns when a request that ignored these positions, and whose slots are durable, may be answered."""
        if len(ignored):
            # What was not in the backlog may have left it by a decision of a later slot.
            await self._topic.shard.commits.confirmed()
        await self._topic.shard.alone()
