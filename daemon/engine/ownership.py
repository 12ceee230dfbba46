"""Becoming the owner of the root's shards.

Owns: standing by, then claiming every shard, again and again until it succeeds; whom callers are sent to meanwhile.
Does not own: looking and deciding (`daemon.durability.standby`), the claim of one shard (`daemon.durability.takeover`)
and what is done with owned shards (`engine`).

One daemon owns all shards of a root; another one on the same root stands by.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from daemon.durability import heartbeat, shard_manifest, standby, takeover
from daemon.engine.environment import Environment
from daemon.engine.shard import HAND_OUT_UNCONFIRMED_S
from daemon.errors import NotOwner
from storage_backends import commit
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

# How often a candidate looks again.
LOOK_S = 1.0
# The store may take so long to note that a shard is given up; nobody's data depends on it.
GIVE_UP_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """All shards of the root. `acknowledgements_from_s`: see `ServedShard`."""

    claims: tuple[takeover.ShardClaim, ...]
    acknowledgements_from_s: float


class Candidate:
    """This daemon as a candidate for the shards. `waiting` hears what it waits for."""

    def __init__(self, environment: Environment, *, waiting: Callable[[str], None]) -> None:
        self._environment = environment
        self._waiting = waiting
        self.shard_logs: tuple[commit.ManifestLog[ShardManifest], ...] = ()

    def look_at(self, shards: int) -> None:
        """The root has so many shards."""
        environment = self._environment
        self.shard_logs = tuple(
            shard_manifest.shard_log(
                environment.store,
                shard,
                monotonic=environment.clock.elapsed_s,
                sleep=environment.blocking_sleep,
                jitter=environment.jitter,
                new_id=environment.new_id,
                observer=environment.commit_observer,
            )
            for shard in range(shards)
        )
        self._standby = standby.Standby(
            environment.store,
            self.shard_logs,
            daemon_id=environment.config.daemon_id,
            lock=lambda daemon_id: standby.lock_of(environment.locks, daemon_id),
            run=environment.run,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            look_interval_s=LOOK_S,
            new_watch=lambda: heartbeat.Watch(
                interval_s=environment.config.ownership.heartbeat_interval_s,
                misses_max=environment.config.ownership.misses_max,
            ),
        )

    @property
    def owner_address(self) -> str:
        """host:port of the daemon that owns the shards, as far as was seen; empty when there is none."""
        return self._standby.owner_address if self.shard_logs else ""

    def succeeded_by(self, address: str) -> None:
        """Another daemon owns the shards; it is at this address as far as that is known, until the next look."""
        self._standby.owner_address = address

    async def become_owner(self) -> Claimed:
        """Returns with every shard claimed and fenced, however long that takes.

        Raises Corruption when a shard cannot be served; then nothing is claimed.
        """
        while True:
            try:
                claimable = await self._standby.until_claimable(self._waiting)
                log.info("taking over: %s", claimable.reason)
                self._waiting("taking over the shards")
                claims = await self._claim_all()
            except (StoreError, commit.CommitOutcomeUnknown) as error:
                self._waiting(f"the store cannot be reached: {error}")
            except (NotOwner, commit.Refused) as error:
                self._waiting(f"another daemon claims the shards: {error}")
            else:
                wait_s = 0.0 if claimable.former_owner_gone else HAND_OUT_UNCONFIRMED_S
                return Claimed(claims, self._environment.clock.elapsed_s() + wait_s)
            # Two candidates that are refused together must not come back together.
            await self._environment.sleep(LOOK_S * (1 + self._environment.jitter()))

    async def _claim_all(self) -> tuple[takeover.ShardClaim, ...]:
        """Of several candidates the one that gets the first shard goes on with the others."""
        first = await self._claim(0)
        others = map(self._claim, range(1, len(self.shard_logs)))
        results = [first, *await asyncio.gather(*others, return_exceptions=True)]
        claims = tuple(result for result in results if isinstance(result, takeover.ShardClaim))
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.give_up({claim.shard: claim.epoch for claim in claims})
            raise errors[0]
        return claims

    async def give_up(self, epochs: Mapping[int, int]) -> None:
        """Gives up shards that are still owned under these epochs, so that nobody waits for this daemon."""

        def release(shard: int, epoch: int) -> None:
            commit.commit(
                self.shard_logs[shard],
                shard_manifest.Release(epoch=epoch),
                writer=self._environment.config.daemon_id,
                created_ms=self._environment.clock.now_ms(),
                deadline_s=GIVE_UP_S,
            )

        for shard, epoch in epochs.items():
            try:
                await self._environment.run(functools.partial(release, shard, epoch))
            except commit.Refused:
                log.info("shard %d belongs to another daemon", shard)
            except (StoreError, commit.CommitOutcomeUnknown) as error:
                log.warning("shard %d could not be given up: %s", shard, error)

    async def _claim(self, shard: int) -> takeover.ShardClaim:
        environment = self._environment
        claimant = takeover.Claimant(
            daemon_id=environment.config.daemon_id,
            address=environment.config.daemon.address or "",
            executor=environment.parts,
            clock=environment.clock.elapsed_s,
            sleep=environment.blocking_sleep,
            jitter=environment.jitter,
            wall_clock_ms=environment.clock.now_ms,
            new_id=environment.new_id,
            checkpoint_damaged=lambda key: environment.metrics.store_error("get", "CheckpointDamaged"),
        )
        return await environment.run(
            lambda: takeover.take_over(environment.store, self.shard_logs[shard], shard=shard, claimant=claimant)
        )
