"""Leases due rows without a stream, until they are acknowledged or their time is over.

This keeps the ends of one subscription's leases with one timer, the pullers that wait, and the dispatcher for which
READY is kept. `daemon.core.decisions.subscription_state` decides which rows, the line in `open_streams` whose turn it
is.

A lease is a dispatcher number under which its rows are IN_FLIGHT. It is in memory only: after a crash its rows are due
again. Ends are times of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import heapq

from daemon.core.decisions.claims import HeldPositions, Ignored, IgnoredReason
from daemon.core.index.position_keys import KeyedRows
from daemon.errors import InvalidArgument, QuotaExceeded
from daemon.runtime.environment import Environment
from daemon.topic.open_streams import SubscriptionPort
from daemon.topic.topic_settings import LEASE_MAX_MS

GET_ROWS_MAX = 10_000
WAIT_MAX_MS = 60_000
LEASES_RETRY_MS = 5_000
# Times that a puller without a wait still waits for its turn, and for due rows to be loaded (seconds)
TURN_S = 0.05
SETTLE_S = 2.0
# Time that READY is kept after the last pull, so that the next one finds it filled (seconds)
LISTEN_S = 30.0
# Time between two removals of leases that no longer hold rows (seconds)
SWEEP_S = 10.0
# Least time of a timer, since the two clocks may differ by rounding (seconds)
TIMER_LEAST_S = 0.001


class _Puller:
    """A request for leased rows that waits in a subscription's line."""

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


class Leases:
    """The leases of one subscription."""

    def __init__(self, subscription: SubscriptionPort, environment: Environment) -> None:
        self._subscription = subscription
        self._topic = subscription.topic
        self._state = subscription.state
        self._environment = environment
        self._leases_max = environment.config.limits.leases_per_subscription_max
        # The dispatcher for which READY is kept while there are pullers, and for a while after that.
        self._listener: int | None = None
        self._pulled_at_s = self._swept_at_s = 0.0
        self._ends_s: dict[int, float] = {}
        self._pullers: set[_Puller] = set()
        # (end, lease); entries of leases that no longer exist are skipped.
        self._ends: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None

    # ---- calls

    async def get(self, *, max_rows: int, lease_ms: int, wait_ms: int) -> KeyedRows:
        """Lease at most `max_rows` due rows, waiting for the first one; return none if none came in time.

        Raises QuotaExceeded, Conflict, and the error that ended the subscription or the topic meanwhile.
        """
        subscription = self._subscription
        subscription.check_mode(key_shared=False)
        if self._listener is None:
            self._pulled_at_s = self._swept_at_s = self._environment.clock.elapsed_s()
            self._listener = subscription.next_dispatcher()
            subscription.listen(self._listener)
        self._check_room()
        puller, line = _Puller(), subscription.line
        self._pullers.add(puller)
        try:
            if wait_ms < SETTLE_S * 1000:
                await self._settle()
            async with asyncio.timeout(max(wait_ms / 1000, TURN_S)):
                while puller.ended is None:
                    if line.is_turn_of(puller):
                        lease = subscription.next_dispatcher()
                        rows = subscription.hand_out(lease, max_rows)
                        if len(rows):
                            self._begin(lease, lease_ms)
                        if len(rows) or not wait_ms:
                            return rows
                    await puller.changed()
            raise puller.ended
        except TimeoutError:
            return KeyedRows.empty()
        finally:
            self._pullers.discard(puller)
            line.leave(puller)
            self._pulled_at_s = self._environment.clock.elapsed_s()

    async def _settle(self) -> None:
        """Wait, but not for long, for due rows that are being loaded, before the answer that nothing is due."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._subscription.settle_ready()
        except TimeoutError:
            return

    async def extend(self, claims: HeldPositions, *, lease_ms: int) -> Ignored:
        """Move the end of leases; return the positions that were not leased with that time."""
        acks = self._subscription.acks
        acks.check(claims)
        await acks.decidable(self._state, claims)
        return await acks.confirmed(self._moved(claims, lease_ms=lease_ms), of=claims)

    def _moved(self, claims: HeldPositions, *, lease_ms: int) -> Ignored:
        """Lease positions for `lease_ms` from now on; 0 makes them READY.

        Returns the positions that were not leased.
        """
        if not self._ends_s:
            return Ignored.all_of(claims, IgnoredReason.NOT_HELD)
        if lease_ms:
            self._check_room()
        lease = self._subscription.next_dispatcher()
        elapsed_ms = self._environment.elapsed_ms()
        left = self._topic.core.move_held(self._state, claims, self._ends_s.keys(), lease, elapsed_ms=elapsed_ms)
        if len(left) < len(claims) and lease_ms:
            self._begin(lease, lease_ms)
        elif len(left) < len(claims):
            self._return(lease)
        return Ignored.all_of(left, IgnoredReason.NOT_HELD)

    def has(self, number: int) -> bool:
        """Return whether a lease, or the listener for pullers, has the number."""
        return number == self._listener or number in self._ends_s

    @property
    def are_under_way(self) -> bool:
        """True if positions are leased or a puller waits. O(leases)."""
        return bool(self._pullers) or any(map(self._state.held_rows, self._ends_s))

    def stop_listening(self) -> None:
        """Stop keeping READY for pullers. Call it while nothing is leased or waited for."""
        if self._listener is not None:
            self._state.close(self._listener)
            self._forget()

    def _forget(self) -> None:
        self._listener = None
        self._ends_s = {}
        self._ends = []

    # ---- the life of a lease

    def _check_room(self) -> None:
        if len(self._ends_s) >= self._leases_max:
            self._sweep()
        if len(self._ends_s) >= self._leases_max:
            raise QuotaExceeded(
                f"subscription {self._state.stored.name!r} has {len(self._ends_s)} leases; the limit is "
                f"{self._leases_max}",
                retry_after_ms=LEASES_RETRY_MS,
            )

    def _begin(self, lease: int, lease_ms: int) -> None:
        end_s = self._ends_s[lease] = self._environment.clock.elapsed_s() + lease_ms / 1000
        heapq.heappush(self._ends, (end_s, lease))
        self._arm()

    def _return(self, lease: int) -> int:
        """Make the rows of a lease READY again; return how many."""
        rows = self._state.return_held(lease)
        if rows:
            self._subscription.notify()
        return rows

    def _sweep(self) -> None:
        """Forget leases whose rows were all acknowledged or moved to another one."""
        self._swept_at_s = self._environment.clock.elapsed_s()
        self._ends_s = {lease: end_s for lease, end_s in self._ends_s.items() if self._state.held_rows(lease)}
        if len(self._ends) > 2 * len(self._ends_s) + 100:
            self._ends = [(end_s, lease) for lease, end_s in self._ends_s.items()]
            heapq.heapify(self._ends)

    # ---- time

    def every_second(self) -> None:
        """End what is over. The timer does this; after a suspend it is late, so it is called once a second, too."""
        if self._listener is None:
            return
        now_s = self._environment.clock.elapsed_s()
        while self._ends and self._ends[0][0] <= now_s:
            _, lease = heapq.heappop(self._ends)
            if self._ends_s.pop(lease, None) is not None:
                self._environment.metrics.lease_over(self._topic.core.name, rows=self._return(lease))
        if self._ends_s and now_s - self._swept_at_s >= SWEEP_S:
            self._sweep()
        if not self._ends_s and not self._pullers and now_s - self._pulled_at_s >= LISTEN_S:
            self.stop_listening()
        self._arm()

    def _arm(self) -> None:
        """Set the one timer to the first end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            in_s = max(TIMER_LEAST_S, self._ends[0][0] - self._environment.clock.elapsed_s())
            self._timer = asyncio.get_running_loop().call_later(in_s, self._look)

    def _look(self) -> None:
        with self._topic.contained():
            self.every_second()

    def end(self, error: Exception) -> None:
        """End all leases; pullers get the error."""
        pullers, self._pullers = self._pullers, set()
        for puller in pullers:
            puller.end(error)
        self._forget()
        self._arm()


def check_get(*, max_rows: int, lease_ms: int, wait_ms: int) -> None:
    """Check the limits of a request for leased rows. Raises InvalidArgument."""
    _check_range("max_rows", max_rows, 1, GET_ROWS_MAX)
    check_lease(lease_ms)
    _check_range("wait_ms", wait_ms, 0, WAIT_MAX_MS)


def check_lease(lease_ms: int) -> None:
    """Check how long a lease may be (ms). Raises InvalidArgument."""
    _check_range("lease_ms", lease_ms, 0, LEASE_MAX_MS)


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidArgument(f"{field} is {value}; it must be {least} to {most}")
