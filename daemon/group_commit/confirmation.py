"""Knows how recently this daemon certainly owned what it serves (R8, L10).

A confirmation is a slot that is certain, or a probe that found no fence in the log. Its time is the monotonic time at
which it was *sent*: the log may be fenced while the answer travels. One confirmation is good for every shard whose
sections are in the log, since no other daemon takes a shard before the log is fenced.

The log (`daemon_log`) writes slots and probes. The shards and the slot sender decide what stops when confirmations grow
old.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from daemon.errors import NotOwner, Unavailable
from daemon.runtime import backoff
from storage_backends import object_store

log = logging.getLogger(__name__)

# Time after which an owner that writes nothing checks that it is still the owner (seconds)
IDLE_PROBE_S = 5.0


class Confirmation(Protocol):
    """The evidence of how recently this daemon certainly owned what it serves, by any means."""

    def fresh_within(self, seconds: float) -> bool:
        """Return whether the newest confirmation was sent less than `seconds` ago. May be called in any thread."""
        ...

    async def confirm_after(self, after_s: float) -> None:
        """Wait until a confirmation that was sent at or after `after_s` (monotonic seconds) has succeeded.

        It waits while the store is unreachable; the caller's deadline ends that. Raises NotOwner if the ownership is
        over, and Unavailable if it is given up or cannot be determined.
        """
        ...


class Probe(Protocol):
    """The check that this daemon is still the owner."""

    async def look(self) -> float | None:
        """Return a time after this call at which this daemon was the owner (monotonic seconds).

        Returns None if a slot is in flight, whose outcome will show it. Raises NotOwner if this daemon is no longer the
        owner, Corruption if what is stored about that is damaged, and the store's errors, after which nothing is known.
        """
        ...


class ProbedConfirmation(Confirmation):
    """The confirmations of one log. Used on one event loop; `watch` must be running.

    `whose` names the log in messages. `confirmed_at_s` is the time at which its first slot was sent (monotonic
    seconds).
    """

    def __init__(
        self,
        whose: str,
        probe: Probe,
        *,
        confirmed_at_s: float,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        jitter: backoff.Jitter,
    ) -> None:
        self._whose = whose
        self._probe = probe
        self._confirmed_at_s = confirmed_at_s
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []
        self._wanted = asyncio.Event()
        self._ended: Exception | None = None

    @property
    def confirmed_at_s(self) -> float:
        """The sending time of the newest confirmation (monotonic seconds)."""
        return self._confirmed_at_s

    def fresh_within(self, seconds: float) -> bool:
        """Return whether the newest confirmation was sent less than `seconds` ago."""
        return self._ended is None and self._clock() - self._confirmed_at_s < seconds

    def confirmed(self, sent_at_s: float) -> None:
        """Record that a slot or probe sent at `sent_at_s` (monotonic seconds) has succeeded."""
        if self._ended is not None or sent_at_s <= self._confirmed_at_s:
            return
        self._confirmed_at_s = sent_at_s
        waiting = self._waiters
        self._waiters = []
        for after_s, waiter in waiting:
            if after_s > sent_at_s:
                self._waiters.append((after_s, waiter))
            elif not waiter.done():
                waiter.set_result(None)

    async def confirm_after(self, after_s: float) -> None:
        """Wait until a confirmation that was sent at or after `after_s` has succeeded; see `Confirmation`.

        One probe serves all callers that waited when it was sent; a slot does, too.
        """
        if self._ended is not None:
            raise self._ended
        if after_s <= self._confirmed_at_s:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((after_s, waiter))
        self._wanted.set()
        await waiter

    async def watch(self) -> None:
        """Probe for waiting callers, and after every IDLE_PROBE_S without a confirmation, until cancelled.

        It ends when a probe raises NotOwner, which all waiting callers get, and so does the caller. Raises Corruption
        too.
        """
        try:
            while True:
                await self._until_wanted()
                await self._ask()
        except asyncio.CancelledError:
            self.close()
            raise
        except NotOwner as error:
            self._end(error)
            raise
        except Exception as error:
            self._end(Unavailable(f"{self._whose}: cannot confirm that this daemon still owns it: {error}"))
            raise

    def close(self) -> None:
        """Stop confirming; waiting callers get Unavailable."""
        self._end(Unavailable(f"{self._whose}: this daemon has stopped writing it"))

    def _end(self, error: Exception) -> None:
        if self._ended is not None:
            return
        self._ended = error
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiters = []

    async def _until_wanted(self) -> None:
        """Wait until a caller waits or the newest confirmation has grown old."""
        while True:
            self._waiters = [waiting for waiting in self._waiters if not waiting[1].done()]
            remaining_s = self._confirmed_at_s + IDLE_PROBE_S - self._clock()
            if self._waiters or remaining_s <= 0:
                return
            self._wanted.clear()
            wanted = asyncio.ensure_future(self._wanted.wait())
            grown_old = asyncio.ensure_future(self._sleep(remaining_s))
            try:
                await asyncio.wait((wanted, grown_old), return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanted.cancel()
                grown_old.cancel()

    async def _ask(self) -> None:
        """Probe until the store answers."""
        for attempt, delay_s in enumerate(backoff.delays_s(self._jitter)):
            try:
                confirmed_at_s = await self._probe.look()
            except object_store.StoreError as error:
                if attempt == 0:
                    log.warning("%s: cannot confirm yet that this daemon still owns it: %s", self._whose, error)
                await self._sleep(delay_s)
                continue
            if confirmed_at_s is not None:
                self.confirmed(confirmed_at_s)
            return
