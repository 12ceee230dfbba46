"""Becoming the owner of the root's shards.

Owns: standing by, then claiming every shard, again and again until it succeeds; whom callers are sent to meanwhile.
Does not own: looking and deciding (`daemon.owner.standby`), the claim of one shard (`daemon.owner.takeover`)
and what is done with owned shards (`engine`).

One daemon owns all shards of a root; another one on the same root stands by. A shard that is damaged belongs to
nobody: it is claimed again when it can be read. One that was lost while others are owned is waited for by itself: it is
claimed under the same rules as all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from daemon.errors import Corruption, NotOwner
from daemon.owner import heartbeat, standby, takeover
from daemon.owner.candidacy import Wait
from daemon.shard import giving_up
from daemon.shard.shard_claim import ShardClaim
from daemon.surroundings.environment import Environment
from daemon.topic import topic_commits
from storage_backends import commit
from storage_backends.formats.manifest import ShardManifest

log = logging.getLogger(__name__)

# How often a candidate looks again.
LOOK_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """All shards of the root. `damaged`: why these cannot be served. `unread`: how the store has failed for these,
    which may be claimed again at once.
    """

    claims: tuple[ShardClaim, ...]
    damaged: Mapping[int, Corruption]
    unread: Mapping[int, Exception]


class Candidate:
    """A daemon as a candidate for the shards. `waiting` hears what it waits for."""

    def __init__(self, environment: Environment, *, waiting: Callable[[str], None]) -> None:
        self._environment = environment
        self._waiting = waiting
        self.shard_logs: tuple[commit.ManifestLog[ShardManifest], ...] = ()
        # Whether it waits for no other daemon: its claims are under way.
        self.is_taking_over = False
        # Shards that could not be read when they were claimed: they are claimed again only when they can be.
        self._damaged: dict[int, str] = {}

    def look_at(self, shards: int) -> None:
        """The root has so many shards."""
        environment = self._environment
        self.shard_logs = tuple(topic_commits.shard_log(environment, shard) for shard in range(shards))
        self._standby = standby.Standby(
            environment.store,
            self.shard_logs,
            daemon_id=environment.config.daemon_id,
            lock=lambda daemon_id: standby.lock_of(environment.locks, daemon_id),
            run=environment.pools.journal.run,
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

    def recorded(self, shard: int) -> ShardManifest | None:
        """What the shard's manifest said at the last look; None when it was not seen."""
        return self._standby.recorded(shard) if shard < len(self.shard_logs) else None

    def succeeded_by(self, address: str) -> None:
        """Another daemon owns the shards; it is at this address as far as that is known, until the next look."""
        self._standby.owner_address = address

    async def become_owner(self) -> Claimed:
        """Returns with every shard claimed and fenced that could be read, however long it takes until that is one.

        Raises Corruption when all of them are damaged; then nothing is claimed.
        """
        while True:
            try:
                claimable = await self._standby.until_claimable(self._waiting, self.give_up)
                log.info("taking over: %s", claimable.reason)
                self._waiting("taking over the shards")
                self.is_taking_over = True
                return await self._claim_all(claimable.gone_owners)
            except commit.UNCERTAIN as error:
                self._waiting(f"the store cannot be reached: {error}")
            except (NotOwner, commit.Refused) as error:
                self._waiting(f"another daemon claims the shards: {error}")
            finally:
                self.is_taking_over = False
            # Two candidates that are refused together must not come back together.
            await self._environment.sleep(LOOK_S * (1 + self._environment.jitter()))

    async def _claim_all(self, gone_owners: frozenset[str]) -> Claimed:
        """Claims all shards that can be read; of several candidates the one that gets the first goes on with the
        others. Where the store fails for one of those it keeps the rest; where another daemon came first, nothing.
        """
        claims: list[ShardClaim] = []
        damaged: dict[int, Corruption] = {}
        unread: dict[int, Exception] = {}
        shards = list(range(len(self.shard_logs)))
        while shards and not claims:
            shard = shards.pop(0)
            try:
                claims.append(await self._claim(shard, gone_owners))
            except Corruption as error:
                damaged[shard] = error
        others = (self._claim(shard, gone_owners) for shard in shards)
        results = await asyncio.gather(*others, return_exceptions=True)
        errors: list[BaseException] = []
        for shard, result in zip(shards, results, strict=True):
            if isinstance(result, Corruption):
                damaged[shard] = result
            elif isinstance(result, commit.UNCERTAIN):
                unread[shard] = result
            elif isinstance(result, BaseException):
                errors.append(result)
            else:
                claims.append(result)
        if errors:
            await self.give_up({claim.shard: claim.epoch for claim in claims})
            raise errors[0]
        if not claims:
            raise damaged[min(damaged)]
        return Claimed(tuple(claims), damaged, unread)

    async def give_up(self, epochs: Mapping[int, int]) -> None:
        """Gives up shards that are still owned under these epochs, so that nobody waits for this daemon."""
        await asyncio.gather(*(self._give_up(shard, epoch) for shard, epoch in epochs.items()))

    async def _give_up(self, shard: int, epoch: int) -> None:
        try:
            await giving_up.give_up(self._environment, self.shard_logs[shard], epoch)
        except commit.Refused:
            log.info("shard %d belongs to another daemon", shard)
        except commit.UNCERTAIN as error:
            log.warning("shard %d could not be given up: %s", shard, error)

    async def claimable(self, shards: Sequence[int]) -> dict[int, standby.Claimable | Wait]:
        """Whether each of these shards may be claimed by itself, by a daemon that owns others."""
        return await self._standby.claimable(shards)

    async def claim(self, shard: int, gone_owners: frozenset[str]) -> ShardClaim:
        """Claims a shard that was lost or damaged, if it can be read now; else raises Corruption, and claims nothing.

        Raises NotOwner and Refused when another daemon came first, CommitOutcomeUnknown, and the store's errors.
        """
        return await self._claim(shard, gone_owners)

    async def _claim(self, shard: int, gone_owners: frozenset[str]) -> ShardClaim:
        environment = self._environment
        claimant = takeover.Claimant(
            daemon_id=environment.config.daemon_id,
            address=environment.config.daemon.address or "",
            # No slot is written by this daemon yet: all the threads that will do so may read the tails.
            executor=environment.pools.journal.parts,
            clock=environment.clock.elapsed_s,
            sleep=environment.blocking_sleep,
            jitter=environment.jitter,
            wall_clock_ms=environment.clock.now_ms,
            new_id=environment.new_id,
            checkpoint_damaged=lambda key: environment.metrics.damage_found("checkpoint"),
            gone_owners=gone_owners,
        )

        def claim() -> ShardClaim:
            if shard in self._damaged:
                takeover.check_readable(environment.store, self.shard_logs[shard], shard=shard, claimant=claimant)
            return takeover.take_over(environment.store, self.shard_logs[shard], shard=shard, claimant=claimant)

        try:
            claimed = await environment.run(claim)
        except Corruption as error:
            if self._damaged.get(shard) != str(error):
                log.error("shard %d cannot be served: %s", shard, error)
                environment.metrics.damage_found("shard")
            self._damaged[shard] = str(error)
            raise
        self._damaged.pop(shard, None)
        return claimed
