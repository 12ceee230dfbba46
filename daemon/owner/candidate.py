"""Becoming the owner of the root's shards.

Owns: standing by, then opening a log and claiming every shard for it, again and again until it succeeds; whom callers
are sent to meanwhile.
Does not own: looking and deciding (`daemon.owner.standby`), the claim of one shard (`daemon.owner.takeover`), the log
(`daemon.group_commit.daemon_log`) and what is done with owned shards (`engine`).

One daemon owns all shards of a root; another one on the same root stands by. A shard that is damaged belongs to
nobody: it is claimed again when it can be read. One that was lost while others are owned is waited for by itself: it is
claimed under the same rules as all of them.

    waits for another daemon     some shard's owner lives: its lock is held, its heartbeat changes, its log has no end
    takes over                   that owner's log is fenced, an own log is open, the lowest shard that can be read is
                                 claimed, then the others side by side, then their sections are read
    owns                         the log lives, shards are served; one that is lost is claimed anew
    has lost the log             another daemon has fenced it, or it failed: waits again, and comes back with another
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from daemon.errors import Corruption, NotOwner, Unavailable
from daemon.group_commit.daemon_log import DaemonLog
from daemon.owner import heartbeat, standby
from daemon.owner.standby import Wait
from daemon.owner.takeover import ClaimedShard, Fences, LogMustClose, Takeover, check_readable
from daemon.runtime.environment import Environment
from daemon.shard.recovery import ShardClaim
from daemon.topic import topic_manifests
from storage_backends import commit, log_fence, object_store
from storage_backends.formats.manifest import ShardManifest
from storage_backends.slot_log import LogHeld, SlotLogs

log = logging.getLogger(__name__)

# How often a candidate looks again.
LOOK_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimedShards:
    """All shards of the root, and what has taken them over. `damaged`: why these cannot be served. `unread`: how the
    store has failed for these, which may be claimed again at once.
    """

    takeover: Takeover
    claims: tuple[ShardClaim, ...]
    damaged: Mapping[int, Corruption]
    unread: Mapping[int, Exception]


class Candidate:
    """A daemon as a candidate for the shards. `waiting` hears what it waits for, `log_lost` what has ended a log that
    was opened for shards which are owned by now. `company_s`: see `SlotSender`.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        waiting: Callable[[str], None],
        log_lost: Callable[[BaseException], None],
        company_s: Callable[[], float],
    ) -> None:
        self._environment = environment
        self._company_s = company_s
        self._waiting = waiting
        self._log_lost = log_lost
        self.shard_logs: tuple[commit.ManifestLog[ShardManifest], ...] = ()
        # Whether it waits for no other daemon: its claims are under way.
        self.is_taking_over = False
        # The log that was opened last.
        self._living: DaemonLog | None = None
        # The log that the process before this one wrote, by its last heartbeat.
        self._former = heartbeat.LogState()
        # Shards that could not be read when they were claimed: they are claimed again only when they can be.
        self._damaged: dict[int, str] = {}

    def configure(self, shards: int, logs: SlotLogs, former: heartbeat.Heartbeat | None = None) -> None:
        """The root has so many shards, and these logs. `former`: the last heartbeat of the process before this one."""
        environment = self._environment
        self._logs = logs
        if former is not None and former.log_id:
            self._former = heartbeat.LogState(former.log_id, former.last_slot, True)
        self.shard_logs = tuple(topic_manifests.shard_log(environment, shard) for shard in range(shards))
        self._standby = standby.Standby(
            environment.store,
            self.shard_logs,
            daemon_id=environment.config.daemon_id,
            lock=lambda daemon_id: standby.lock_of(environment.locks, daemon_id),
            log_has_ended=lambda log_id: log_fence.ended_at(logs, log_id) is not None,
            run=environment.pools.journal.run,
            parts=environment.pools.journal.parts,
            clock=environment.clock.elapsed_s,
            sleep=environment.sleep,
            look_interval_s=LOOK_S,
            new_watch=lambda: heartbeat.Watch(
                interval_s=environment.config.ownership.heartbeat_interval_s,
                misses_max=environment.config.ownership.misses_max,
            ),
        )

    @property
    def log_state(self) -> heartbeat.LogState:
        """What this daemon tells of the log that it has opened last, or the process before it, whose beats end."""
        living = self._living
        if living is None:
            return self._former
        return heartbeat.LogState(living.log_id, living.last_certain, living.is_ended)

    def _fences(self) -> Fences:
        """For one attempt, by the heartbeats that the look before it has read."""
        return Fences(self._logs, self._environment, told=self._told_of)

    def _told_of(self, log_id: str) -> int:
        own = self._former.last_slot if self._former.log_id == log_id else 0
        return max(own, self._standby.told_of(log_id))

    @property
    def owner_address(self) -> str:
        """host:port of the daemon that owns the shards, as far as was seen; empty when there is none."""
        return self._standby.owner_address if self.shard_logs else ""

    def recorded(self, shard: int) -> ShardManifest | None:
        """What the shard's manifest said at the last look; None when it was not seen."""
        tip = self._standby.tip(shard) if shard < len(self.shard_logs) else None
        return None if tip is None else tip.manifest

    def succeeded_by(self, address: str) -> None:
        """Another daemon owns the shards; it is at this address as far as that is known, until the next look."""
        self._standby.owner_address = address

    async def become_owner(self) -> ClaimedShards:
        """Returns with every shard claimed and read that could be, however long it takes until that is one.

        Raises Corruption when all of them are damaged; then nothing is owned.
        """
        while True:
            try:
                claimable = await self._standby.until_claimable(self._waiting)
                await self._check_one_readable()
                fences = self._fences()
                await self._fence_first(fences)
                log.info("taking over: %s", claimable.reason)
                self._waiting("taking over the shards")
                self.is_taking_over = True
                return await self._take_over(fences, claimable.gone_owners)
            except LogHeld as error:
                self._waiting(f"waiting for {error.holder}, which lives and may write to {error.key}")
            except commit.UNCERTAIN as error:
                self._waiting(f"the store cannot be reached: {error}")
            except (NotOwner, Unavailable, commit.Refused) as error:
                self._waiting(f"another daemon claims the shards: {error}")
            finally:
                self.is_taking_over = False
            # Two candidates that are refused together must not come back together.
            await self._environment.sleep(LOOK_S * (1 + self._environment.jitter()))

    async def _take_over(self, fences: Fences, gone_owners: frozenset[str]) -> ClaimedShards:
        living = self._living = await DaemonLog.opened(
            self._logs, self._environment, lost=self._log_lost, company_s=self._company_s
        )
        try:
            claimed = await self._claim_all(living, fences, gone_owners)
            if living.is_ended:
                raise NotOwner(f"log {living.log_id}, for which the shards were claimed, has ended meanwhile")
            return claimed
        except BaseException:
            # What it has claimed is anybody's when the log has an end.
            await living.close()
            raise

    async def _check_one_readable(self) -> None:
        """Raises Corruption while every shard is known to be damaged: no log is opened for none."""
        damage: Corruption | None = None
        for shard in range(len(self.shard_logs)):
            if shard not in self._damaged:
                return
            try:
                await self._check_readable(shard)
            except Corruption as error:
                noted = self._noted(shard, error)
                damage = damage or noted
            else:
                return
        if damage is not None:
            raise damage

    async def _check_readable(self, shard: int) -> None:
        await check_readable(self._logs, self.shard_logs[shard], shard, self._environment)

    async def _fence_first(self, fences: Fences) -> None:
        """Before a log is opened: while no owner can be fenced, none is needed. Raises Corruption when that holds for
        every shard.
        """
        damage: list[Corruption] = []
        for shard in range(len(self.shard_logs)):
            recorded = self.recorded(shard)
            if recorded is None or recorded.open_range is None:
                continue
            try:
                await fences.of(recorded.open_range.log_id)
            except object_store.Damaged as error:
                damage.append(self._noted(shard, Corruption(f"{error}")))
                continue
            return
        if damage and len(damage) == len(self.shard_logs):
            raise damage[0]

    async def _claim_all(self, living: DaemonLog, fences: Fences, gone_owners: frozenset[str]) -> ClaimedShards:
        """Claims all shards that can be read; of several candidates the one that gets the first goes on with the
        others. Where the store fails for one of those it keeps the rest; where another daemon came first, nothing.
        """
        takeover = Takeover(self.shard_logs, living, self._environment)
        won: list[ClaimedShard] = []
        damaged: dict[int, Corruption] = {}
        unread: dict[int, Exception] = {}
        shards = list(range(len(self.shard_logs)))
        while shards and not won:
            shard = shards.pop(0)
            try:
                won.append(await self._claim(takeover, shard, fences, gone_owners))
            except Corruption as error:
                damaged[shard] = error
        others = (self._claim(takeover, shard, fences, gone_owners) for shard in shards)
        results = await asyncio.gather(*others, return_exceptions=True)
        for shard, result in zip(shards, results, strict=True):
            if isinstance(result, Corruption):
                damaged[shard] = result
            elif isinstance(result, commit.UNCERTAIN):
                unread[shard] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                won.append(result)
        claims = await self._read(takeover, won, damaged, unread)
        if not claims and damaged:
            raise damaged[min(damaged)]
        if not claims:
            raise unread[min(unread)]
        return ClaimedShards(takeover, claims, damaged, unread)

    async def _read(
        self,
        takeover: Takeover,
        won: Sequence[ClaimedShard],
        damaged: dict[int, Corruption],
        unread: dict[int, Exception],
    ) -> tuple[ShardClaim, ...]:
        """Raises NotOwner when another daemon has claimed one of them meanwhile."""
        claims: list[ShardClaim] = []
        back: list[ClaimedShard] = []
        found = await takeover.read(won)
        for each in won:
            result = found[each.shard]
            if isinstance(result, ShardClaim):
                self._damaged.pop(each.shard, None)
                claims.append(result)
                continue
            back.append(each)
            if isinstance(result, Corruption):
                damaged[each.shard] = self._noted(each.shard, result)
            elif isinstance(result, commit.UNCERTAIN):
                unread[each.shard] = result
            else:
                raise result
        await asyncio.gather(*map(takeover.give_back, back))
        return tuple(claims)

    async def claimable(self, shards: Sequence[int]) -> dict[int, standby.Claimable | Wait]:
        """Whether each of these shards may be claimed by itself, by a daemon that owns others."""
        return await self._standby.claimable(shards)

    async def claim(self, takeover: Takeover, shard: int, gone_owners: frozenset[str]) -> ShardClaim:
        """Claims a shard that was lost or damaged, if it can be read now; else raises Corruption, and owns it not, or
        LogMustClose, and the log is to be closed.

        Raises NotOwner and Unavailable when another daemon came first, CommitOutcomeUnknown, and the store's errors.
        """
        fences = self._fences()
        won = await self._claim(takeover, shard, fences, gone_owners)
        damaged: dict[int, Corruption] = {}
        unread: dict[int, Exception] = {}
        for claim in await self._read(takeover, [won], damaged, unread):
            return claim
        if shard in damaged and takeover.is_kept(won):
            raise LogMustClose(str(damaged[shard])) from damaged[shard]
        raise damaged[shard] if shard in damaged else unread[shard]

    async def _claim(self, takeover: Takeover, shard: int, fences: Fences, gone_owners: frozenset[str]) -> ClaimedShard:
        try:
            if shard in self._damaged:
                await self._check_readable(shard)
            return await takeover.claim(shard, self._standby.tip(shard), fences, gone_owners)
        except Corruption as error:
            raise self._noted(shard, error) from error

    def _noted(self, shard: int, error: Corruption) -> Corruption:
        """The shard cannot be served; said once for each reason."""
        if self._damaged.get(shard) != str(error):
            log.error("shard %d cannot be served: %s", shard, error)
            self._environment.metrics.damage_found("shard")
        self._damaged[shard] = str(error)
        return error
