"""Requests on positions that were handed out: acknowledging them, and keeping them longer.

Owns: the moment at which such a request is decided, finding in the backlog what is in nobody's hand, and that the
answer waits for what it says.
Does not own: the decisions (`daemon.core.decisions.ack_decisions`), negative acknowledgements
(`negative_acknowledging`), the ends of leases (`leases`), and slots (`shard_staging`).

A position that a staged negative acknowledgement names is in no hand until that is applied: whoever names it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import TypeVar

from daemon.core import limits
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.ignored import Ignored, IgnoredReason
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.index import SeenRows
from daemon.core.index.positions import KeyedRows
from daemon.errors import Unavailable
from daemon.group_commit.topic_staging import STALL_ANSWER_S
from daemon.runtime.environment import Environment
from daemon.topic.topic_port import TopicPort

T = TypeVar("T")

NONE_IGNORED = Ignored.nothing()


class Acknowledging:
    """The acknowledgements of one topic, and the moment of every request that names what was handed out."""

    def __init__(self, topic: TopicPort, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        # Requests that wait for their moment: none that comes behind them is decided before.
        self._undecided: set[object] = set()
        # Who waits for a slot, and with how many rows.
        self._waiting: dict[asyncio.Future[int], list[tuple[asyncio.Future[Ignored], int]]] = {}

    def acknowledge(self, state: SubscriptionState, claims: HeldPositions, *, awaited: bool) -> Awaitable[Ignored]:
        """Acknowledges hand-outs of positions; what was ignored, when that is durable. Raises NotFound, and what
        refuses the request, at once or when it is awaited.
        """
        self.check(claims)
        return self.decided(state, claims, lambda: self._decide(state, claims, awaited=awaited))

    def decided(
        self,
        state: SubscriptionState,
        named: HeldPositions,
        decide: Callable[[], Awaitable[T]],
        *,
        is_forwarded: bool = False,
    ) -> Awaitable[T]:
        """Has a request that names positions decided: now, where it need not wait for its moment and none that came
        before it does; what comes of it. `decide`: decides before it awaits anything. `is_forwarded`: see `decidable`.
        """
        topic = self._topic
        is_now = topic.gate.is_open and not self._undecided
        if is_now and not topic.core.redelivery.is_staged(state, named, is_forwarded=is_forwarded):
            topic.check_there(state)
            return decide()
        turn = object()
        self._undecided.add(turn)

        async def later() -> T:
            await self.decidable(state, named, is_forwarded=is_forwarded)
            deciding = decide()
            self._undecided.discard(turn)
            return await deciding

        task = asyncio.ensure_future(later())
        task.add_done_callback(lambda _: self._undecided.discard(turn))
        return task

    def _decide(self, state: SubscriptionState, claims: HeldPositions, *, awaited: bool) -> Awaitable[Ignored]:
        topic, commits = self._topic, self._topic.shard.commits
        commits.check_accepting()
        records, rest = topic.core.acknowledging.stage(state, claims)
        # What comes behind by its key waits until this is durable.
        slot = commits.stage(*records, awaited=awaited, may_wait=not state.is_by_key) if records else None
        # There may be room IN_FLIGHT again.
        topic.notify(state)
        if slot is None or len(rest) or topic.shard.alone_in_s:
            return self._decide_rest(state, claims, rest, slot, awaited=awaited)
        return self._answer_with(slot, len(claims))

    async def _decide_rest(
        self,
        state: SubscriptionState,
        claims: HeldPositions,
        rest: HeldPositions,
        slot: asyncio.Future[int] | None,
        *,
        awaited: bool,
    ) -> Ignored:
        """Looks in the backlog for what is in nobody's hand. `slot`: of what was; None where nothing was."""
        core, commits = self._topic.core, self._topic.shard.commits
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

    def _answer_with(self, slot: asyncio.Future[int], rows: int) -> asyncio.Future[Ignored]:
        """Ends with the slot: no task waits for that, and all acknowledgements of the topic in it end together."""
        waiting = self._waiting.get(slot)
        if waiting is None:
            waiting = self._waiting[slot] = []
            slot.add_done_callback(self._slot_ended)
        answer: asyncio.Future[Ignored] = asyncio.get_running_loop().create_future()
        waiting.append((answer, rows))
        return answer

    def _slot_ended(self, slot: asyncio.Future[int]) -> None:
        error, acknowledged = slot.exception(), 0
        for answer, rows in self._waiting.pop(slot):
            # Whoever waited may have gone.
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(NONE_IGNORED)
                acknowledged += rows
        self._environment.metrics.acknowledged(self._topic.core.name, acknowledged=acknowledged, ignored=0)

    def extend(self, state: SubscriptionState, claims: HeldPositions, holders: Collection[int]) -> Awaitable[Ignored]:
        """The ack time-out of what `holders` have begins anew; what they do not have."""
        self.check(claims)
        return self.decided(state, claims, lambda: self._extend(state, claims, holders))

    def _extend(self, state: SubscriptionState, claims: HeldPositions, holders: Collection[int]) -> Awaitable[Ignored]:
        elapsed_ms = self._environment.elapsed_ms()
        left = self._topic.core.redelivery.extend(state, claims, holders, elapsed_ms=elapsed_ms)
        return self._extended(Ignored.all_of(left, IgnoredReason.NOT_HELD))

    async def _extended(self, ignored: Ignored) -> Ignored:
        # Under another owner the positions are due again.
        await self._topic.shard.commits.confirmed()
        return ignored

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
