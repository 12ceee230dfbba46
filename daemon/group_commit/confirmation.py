"""How recently it was certain that this daemon owns what it serves (R8, L10).

A confirmation is a slot that is certain, or a probe that found the log to be this daemon's still. Its time is the
monotonic time at which it was *sent*: the log may be fenced while the answer travels. One is good for every shard
whose sections the log has: nobody takes one of them before the log is fenced.

Owns: the time of the newest confirmation, when a probe is due, and who waits for one.
Does not own: the slots and what a probe looks at (the log), and what stops when confirmations grow old (the shards,
the sender of their slots).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from daemon.errors import NotOwner, Unavailable
from daemon.runtime import backoff
from storage_backends import object_store

log = logging.getLogger(__name__)

# An owner that writes nothing asks this often whether it is still the owner.
IDLE_PROBE_S = 5.0


class Confirmation(Protocol):
    """How recently the ownership of what is served was certain, whatever stands behind that."""

    def fresh_within(self, seconds: float) -> bool:
        """Whether the newest confirmation was sent less than `seconds` ago. May be asked in any thread."""
        ...

    async def confirm_after(self, after_s: float) -> None:
        """Returns when a confirmation that was sent at or after `after_s` (monotonic seconds) has succeeded.

        While the store cannot be reached this waits; the caller's deadline ends it. Raises NotOwner when the ownership
        is over, Unavailable when it is given up, or when whether it is over cannot be told.
        """
        ...


class Probe(Protocol):
    """What tells whether this daemon is the owner still."""

    async def look(self) -> float | None:
        """A monotonic time after this call at which it was the owner; None when a slot is on its way, which will tell.

        Raises NotOwner when it is the owner no longer, Corruption when what is stored of that is damaged, and the
        store's errors: then nothing is known.
        """
        ...


class ProbedConfirmation(Confirmation):
    """The confirmations of one log. Used on one event loop; `watch` must be running.

    `whose`: names the log in messages. `confirmed_at_s`: when its first slot was sent, monotonic seconds.
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
        """Sending time of the newest confirmation, monotonic seconds."""
        return self._confirmed_at_s

    def fresh_within(self, seconds: float) -> bool:
        """Whether the newest confirmation was sent less than `seconds` ago."""
        return self._ended is None and self._clock() - self._confirmed_at_s < seconds

    def confirmed(self, sent_at_s: float) -> None:
        """A slot, or a probe, that was sent at `sent_at_s` has succeeded."""
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
        """Returns when a confirmation that was sent at or after `after_s` has succeeded, as `Confirmation` says.

        One probe serves everybody who waited when it was sent; a slot serves as well.
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
        """Probes for those who wait, and every IDLE_PROBE_S without a confirmation, until it is cancelled or a probe
        raises NotOwner: then everybody who waits gets that, and so does the caller. Raises Corruption too.
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
            self._end(Unavailable(f"{self._whose}: whether it is this daemon's still cannot be told: {error}"))
            raise

    def close(self) -> None:
        """Nothing is confirmed any more; whoever waits gets Unavailable."""
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
        """Returns when somebody waits, or the newest confirmation has grown old."""
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
        """One probe that is answered."""
        for attempt, delay_s in enumerate(backoff.delays_s(self._jitter)):
            try:
                confirmed_at_s = await self._probe.look()
            except object_store.StoreError as error:
                if attempt == 0:
                    log.warning("%s: whether it is this daemon's still cannot be read: %s", self._whose, error)
                await self._sleep(delay_s)
                continue
            if confirmed_at_s is not None:
                self.confirmed(confirmed_at_s)
            return
