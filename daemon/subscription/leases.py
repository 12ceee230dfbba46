"""Leases: due rows that were handed out without a stream, until they are acknowledged or their time is over.

Owns: the ends of the leases of one topic and their one timer, pullers that wait, and how long READY is kept for them.
Does not own: which rows (`daemon.core.subscription_state`), whose turn it is (`waiting_line`), and the wire.

A lease is a dispatcher number under which its rows are IN_FLIGHT. It is memory only: after a crash its rows are due
again. Ends count on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
from contextlib import AbstractContextManager
from typing import Protocol

from daemon.core.claims import HeldPositions
from daemon.core.positions import KeyedRows
from daemon.core.subscription_state import SubscriptionState
from daemon.errors import InvalidArgument, QuotaExceeded
from daemon.subscription.acknowledging import Acknowledging
from daemon.subscription.waiting_line import WaitingLine
from daemon.surroundings.environment import Environment
from daemon.topic_terms.topic_port import TopicPort
from daemon.topic_terms.topic_settings import LEASE_MAX_MS

GET_ROWS_MAX = 10_000
WAIT_MAX_MS = 60_000
LEASES_RETRY_MS = 5_000
# A puller that does not wait still waits for its turn, and for what is due to come into memory.
TURN_S = 0.05
SETTLE_S = 2.0
# So long after the last pull a subscription is listened to: the next one finds READY as it was.
LISTEN_S = 30.0
# Leases that hold nothing any more are looked for this often.
SWEEP_S = 10.0
# The two clocks may disagree by a rounding.
TIMER_LEAST_S = 0.001


class OpenAs(Protocol):
    """Knows in which way a subscription is open."""

    def check_type(self, state: SubscriptionState, *, key_shared: bool) -> None:
        """Raises Conflict when the subscription is open in another way."""
        ...


class TopicOfLeases(TopicPort, Protocol):
    """What leases ask of their topic beside."""

    @property
    def acknowledging(self) -> Acknowledging: ...

    @property
    def key_sharing(self) -> OpenAs: ...

    def next_dispatcher(self, state: SubscriptionState) -> int:
        """A number for a lease of a subscription, that no other lease, stream or consumer of it has."""
        ...

    def listen(self, state: SubscriptionState, dispatcher: int) -> None:
        """READY is kept for a dispatcher that holds nothing itself."""
        ...

    def line(self, state: SubscriptionState) -> WaitingLine:
        """Those who wait for rows of a subscription."""
        ...

    def hand_out(self, state: SubscriptionState, dispatcher: int, limit: int) -> KeyedRows:
        """At most `limit` rows, IN_FLIGHT at the dispatcher from now on; empty when nothing may be handed out now."""
        ...

    async def settle_ready(self, state: SubscriptionState) -> None:
        """Returns when the subscription has READY rows, or nothing that is due now is left to be READY."""
        ...

    def contained(self) -> AbstractContextManager[None]:
        """What goes wrong inside is the topic's failure."""
        ...


class _Puller:
    """Somebody who waits in a subscription's line."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.ended: Exception | None = None

    def notify(self) -> None:
        self._changed.set()

    def end(self, error: Exception) -> None:
        self.ended = error
        self.notify()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()


@dataclasses.dataclass(eq=False, slots=True)
class _Pulled:
    """A subscription that is or was pulled from. `listener`: the dispatcher for which READY is kept."""

    state: SubscriptionState
    listener: int
    pulled_at_s: float
    swept_at_s: float
    ends_s: dict[int, float] = dataclasses.field(default_factory=dict)
    pullers: set[_Puller] = dataclasses.field(default_factory=set)


class Leases:
    """The leases of one topic."""

    def __init__(self, topic: TopicOfLeases, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        self._leases_max = environment.config.limits.leases_per_subscription_max
        self._pulled: dict[int, _Pulled] = {}
        # (end, lease, subscription id); those of leases that are no more are left out when they come up.
        self._ends: list[tuple[float, int, int]] = []
        self._timer: asyncio.TimerHandle | None = None

    # ---- calls

    async def get(self, state: SubscriptionState, *, max_rows: int, lease_ms: int, wait_ms: int) -> KeyedRows:
        """At most `max_rows` due rows, leased from now on; waits for the first one. Empty when none came in time.

        Raises QuotaExceeded, Conflict, and what ended the subscription or the topic meanwhile.
        """
        self._topic.key_sharing.check_type(state, key_shared=False)
        pulled = self._pulled_from(state)
        self._check_room(pulled)
        puller, line = _Puller(), self._topic.line(state)
        pulled.pullers.add(puller)
        try:
            if wait_ms < SETTLE_S * 1000:
                await self._settle(state)
            async with asyncio.timeout(max(wait_ms / 1000, TURN_S)):
                while puller.ended is None:
                    if line.is_turn_of(puller):
                        lease = self._topic.next_dispatcher(state)
                        rows = self._topic.hand_out(state, lease, max_rows)
                        if len(rows):
                            self._begin(pulled, lease, lease_ms)
                        if len(rows) or not wait_ms:
                            return rows
                    await puller.changed()
            raise puller.ended
        except TimeoutError:
            return KeyedRows.empty()
        finally:
            pulled.pullers.discard(puller)
            line.leave(puller)
            pulled.pulled_at_s = self._environment.clock.elapsed_s()

    async def _settle(self, state: SubscriptionState) -> None:
        """What is due is on its way into memory: an answer that nothing is due waits for it, but not for long."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._topic.settle_ready(state)
        except TimeoutError:
            return

    async def extend(self, state: SubscriptionState, claims: HeldPositions, *, lease_ms: int) -> int:
        """Moves the end of leases; how many of the positions were not leased with that time."""
        acknowledging = self._topic.acknowledging
        acknowledging.check(claims)
        await acknowledging.decidable(state, claims)
        ignored = self._moved(state, claims, lease_ms=lease_ms)
        await self._topic.shard.commits.confirmed()
        return ignored

    def _moved(self, state: SubscriptionState, claims: HeldPositions, *, lease_ms: int) -> int:
        """Leased positions are leased for `lease_ms` from now on, 0 makes them READY; how many were not leased."""
        pulled = self._pulled.get(state.subscription_id)
        if pulled is None or not pulled.ends_s:
            return len(claims)
        if lease_ms:
            self._check_room(pulled)
        lease = self._topic.next_dispatcher(state)
        elapsed_ms = self._environment.elapsed_ms()
        moved_rows = self._topic.core.move_held(state, claims, pulled.ends_s.keys(), lease, elapsed_ms=elapsed_ms)
        if moved_rows and lease_ms:
            self._begin(pulled, lease, lease_ms)
        elif moved_rows:
            self._return(state, lease)
        return len(claims) - moved_rows

    def has(self, state: SubscriptionState, number: int) -> bool:
        """Whether a lease of the subscription, or what listens for pullers, has the number."""
        pulled = self._pulled.get(state.subscription_id)
        return pulled is not None and (number == pulled.listener or number in pulled.ends_s)

    def are_under_way(self, state: SubscriptionState) -> bool:
        """Whether positions of the subscription are leased, or somebody waits to lease some. O(leases)."""
        pulled = self._pulled.get(state.subscription_id)
        return pulled is not None and (bool(pulled.pullers) or any(map(state.held_rows, pulled.ends_s)))

    def stop_listening(self, state: SubscriptionState) -> None:
        """READY is not kept for pullers any longer. Call while nothing is leased or waited for."""
        pulled = self._pulled.pop(state.subscription_id, None)
        if pulled is not None:
            state.close(pulled.listener)

    # ---- the life of a lease

    def _pulled_from(self, state: SubscriptionState) -> _Pulled:
        pulled = self._pulled.get(state.subscription_id)
        if pulled is None:
            now_s = self._environment.clock.elapsed_s()
            pulled = _Pulled(state, self._topic.next_dispatcher(state), pulled_at_s=now_s, swept_at_s=now_s)
            self._pulled[state.subscription_id] = pulled
            self._topic.listen(state, pulled.listener)
        return pulled

    def _check_room(self, pulled: _Pulled) -> None:
        if len(pulled.ends_s) >= self._leases_max:
            self._sweep(pulled)
        if len(pulled.ends_s) >= self._leases_max:
            raise QuotaExceeded(
                f"subscription {pulled.state.stored.name!r} has {len(pulled.ends_s)} leases, the limit is "
                f"{self._leases_max}",
                retry_after_ms=LEASES_RETRY_MS,
            )

    def _begin(self, pulled: _Pulled, lease: int, lease_ms: int) -> None:
        end_s = pulled.ends_s[lease] = self._environment.clock.elapsed_s() + lease_ms / 1000
        heapq.heappush(self._ends, (end_s, lease, pulled.state.subscription_id))
        self._arm()

    def _return(self, state: SubscriptionState, lease: int) -> int:
        """What the lease holds is READY again; how many rows."""
        rows = state.return_held(lease)
        if rows:
            self._topic.notify(state)
        return rows

    def _sweep(self, pulled: _Pulled) -> None:
        """Forgets leases whose rows were all acknowledged, or moved to another one."""
        pulled.swept_at_s = self._environment.clock.elapsed_s()
        held_rows = pulled.state.held_rows
        pulled.ends_s = {lease: end_s for lease, end_s in pulled.ends_s.items() if held_rows(lease)}
        if len(self._ends) > 2 * sum(len(each.ends_s) for each in self._pulled.values()) + 100:
            self._ends = [
                (end_s, lease, number) for number, each in self._pulled.items() for lease, end_s in each.ends_s.items()
            ]
            heapq.heapify(self._ends)

    # ---- time

    def look_after(self) -> None:
        """Ends what is over. The timer does; after a suspend it is late, and somebody else must."""
        now_s = self._environment.clock.elapsed_s()
        while self._ends and self._ends[0][0] <= now_s:
            _, lease, number = heapq.heappop(self._ends)
            pulled = self._pulled.get(number)
            if pulled is not None and lease in pulled.ends_s:
                del pulled.ends_s[lease]
                rows = self._return(pulled.state, lease)
                self._environment.metrics.lease_over(self._topic.core.name, rows=rows)
        for pulled in list(self._pulled.values()):
            if pulled.ends_s and now_s - pulled.swept_at_s >= SWEEP_S:
                self._sweep(pulled)
            if not pulled.ends_s and not pulled.pullers and now_s - pulled.pulled_at_s >= LISTEN_S:
                self.stop_listening(pulled.state)
        self._arm()

    def _arm(self) -> None:
        """One timer, for the end that comes first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            in_s = max(TIMER_LEAST_S, self._ends[0][0] - self._environment.clock.elapsed_s())
            self._timer = asyncio.get_running_loop().call_later(in_s, self._look)

    def _look(self) -> None:
        with self._topic.contained():
            self.look_after()

    def end(self, error: Exception, *, subscription_id: int | None = None) -> None:
        """The leases of one subscription, or all of them, are no more; pullers get the error."""
        for number, pulled in list(self._pulled.items()):
            if subscription_id in (None, number):
                del self._pulled[number]
                for puller in pulled.pullers:
                    puller.end(error)
        if not self._pulled:
            self._ends = []
        self._arm()


def check_get(*, max_rows: int, lease_ms: int, wait_ms: int) -> None:
    """Checks the limits of a request for leased rows. Raises InvalidArgument."""
    _check_range("max_rows", max_rows, 1, GET_ROWS_MAX)
    check_lease(lease_ms)
    _check_range("wait_ms", wait_ms, 0, WAIT_MAX_MS)


def check_lease(lease_ms: int) -> None:
    """Checks how long a lease may be, in ms. Raises InvalidArgument."""
    _check_range("lease_ms", lease_ms, 0, LEASE_MAX_MS)


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidArgument(f"{field} is {value}; it must be {least} to {most}")
