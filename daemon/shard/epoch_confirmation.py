"""How recently it was certain that this daemon owns a shard (R8).

A confirmation is a journal PUT or a probe of the shard manifest's tip that succeeded. Its time is the monotonic time at
which it was *sent*: ownership may be lost while the answer travels.

Owns: the time of the newest confirmation, the probes, and who waits for one.
Does not own: the journal's PUTs (`journal_writer` reports them), and what stops when confirmations grow old (the
engine).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from daemon.errors import Corruption, NotOwner, Unavailable
from daemon.shard import ownership_lost
from daemon.surroundings import backoff
from daemon.surroundings.failure_scope import ShardLost
from storage_backends import commit, object_store
from storage_backends.formats.manifest import ShardManifest

log = logging.getLogger(__name__)

# An owner that writes nothing asks this often whether it is still the owner.
IDLE_PROBE_S = 5.0


class ShardLog(Protocol):
    """What is read of the shard manifest's log."""

    def read_tip(self, warm: commit.Tip[ShardManifest] | None = None) -> commit.Tip[ShardManifest] | None: ...


def existing_tip(shard_log: ShardLog, shard: int, warm: commit.Tip[ShardManifest] | None) -> commit.Tip[ShardManifest]:
    """The tip of a shard that was claimed before. Raises Corruption when there is none, and the store's errors."""
    tip = shard_log.read_tip(warm)
    if tip is None:
        raise Corruption(f"shard {shard}: its manifests have vanished")
    return tip


def check_owner(tip: commit.Tip[ShardManifest], *, epoch: int) -> None:
    """Raises Superseded unless the tip of the shard manifest carries `epoch`."""
    if tip.manifest.epoch != epoch:
        raise superseded_by(tip, epoch=epoch)


def superseded_by(tip: commit.Tip[ShardManifest], *, epoch: int) -> ownership_lost.Superseded:
    """What the owner, or would-be owner, of `epoch` is told when the shard belongs to whom `tip` names."""
    manifest = tip.manifest
    return ownership_lost.Superseded(
        shard=manifest.shard,
        epoch=epoch,
        owner_epoch=manifest.epoch,
        owner=manifest.owner,
        owner_address=manifest.address,
    )


class EpochConfirmation:
    """The confirmations of one epoch of one shard. Used on one event loop; `watch` must be running.

    `tip`: the shard manifest that the claim ended with. `confirmed_at_s`: when its read was sent, monotonic seconds.
    """

    def __init__(
        self,
        shard_log: ShardLog,
        *,
        tip: commit.Tip[ShardManifest],
        confirmed_at_s: float,
        run: backoff.Run,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        jitter: backoff.Jitter,
    ) -> None:
        self._shard_log = shard_log
        self._tip = tip
        self._epoch = tip.manifest.epoch
        self._confirmed_at_s = confirmed_at_s
        self._run = run
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

    @property
    def tip(self) -> commit.Tip[ShardManifest]:
        """The newest shard manifest that a probe has seen: a warm start for the next commit."""
        return self._tip

    def fresh_within(self, seconds: float) -> bool:
        """Whether the newest confirmation was sent less than `seconds` ago."""
        return self._ended is None and self._clock() - self._confirmed_at_s < seconds

    def confirmed(self, sent_at_s: float) -> None:
        """A journal PUT, or a probe, that was sent at `sent_at_s` has succeeded."""
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
        """Returns when a confirmation that was sent at or after `after_s` (monotonic seconds) has succeeded.

        One probe serves everybody who waited when it was sent; a journal PUT serves as well. While the store cannot be
        reached this waits; the caller's deadline ends it. Raises Superseded when the epoch is over, Unavailable after
        `close`, ShardLost when the tip of the shard manifest is damaged.
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
        """Probes for those who wait, and every IDLE_PROBE_S without a confirmation, until it is cancelled or the
        epoch is over: then everybody who waits gets Superseded, and so does the caller. Raises Corruption when the tip
        of the shard manifest is damaged.
        """
        try:
            while True:
                await self._until_wanted()
                await self._probe()
        except asyncio.CancelledError:
            self.close()
            raise
        except NotOwner as error:
            self._end(error)
            raise
        except Exception as error:
            self._end(ShardLost(self._tip.manifest.shard, error))
            raise

    def close(self) -> None:
        """Nothing is confirmed any more; whoever waits gets Unavailable."""
        self._end(Unavailable(f"shard {self._tip.manifest.shard}: this daemon has stopped serving it"))

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

    async def _probe(self) -> None:
        """One successful look at the tip of the shard manifest."""
        for attempt, delay_s in enumerate(backoff.delays_s(self._jitter)):
            sent_at_s = self._clock()
            try:
                tip = await self._run(lambda: existing_tip(self._shard_log, self._tip.manifest.shard, self._tip))
            except object_store.Damaged as error:
                raise Corruption(f"shard manifest {error}") from error
            except object_store.StoreError as error:
                if attempt == 0:
                    log.warning("shard %d: its manifest cannot be read: %s", self._tip.manifest.shard, error)
                await self._sleep(delay_s)
                continue
            check_owner(tip, epoch=self._epoch)
            self._tip = tip
            self.confirmed(sent_at_s)
            return
