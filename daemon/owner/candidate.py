"""Makes this daemon the owner of the root's shards: stands by, opens a log, and claims every shard for it.

It repeats that until it succeeds, and knows the owner to which callers are redirected meanwhile. It stands alone since
the wait for shards and their claims are one state machine; `engine`, which alone uses it, serves them.

One daemon owns all shards of a root; another one on the same root stands by. A damaged shard has no owner and is
claimed again when it can be read. A shard that was lost while others are owned is claimed again alone, under the same
rules.

    waits for another daemon     some shard's owner lives: its lock is held, its heartbeat changes, its log has no end
    takes over                   that owner's log is fenced, this daemon's log is open, the lowest readable shard is
                                 claimed, then the others in parallel, then their sections are read
    owns                         the log is open, shards are served; a lost one is claimed again
    has lost the log             another daemon has fenced it, or it failed: waits again, and opens another
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
from daemon.owner.traces import Traces
from daemon.runtime.environment import Environment
from daemon.shard.recovery import ShardClaim
from daemon.topic import topic_manifests
from storage_backends import commit, log_fence, object_store
from storage_backends.formats.manifest import ShardManifest
from storage_backends.slot_log import LogHeld, SlotLogs

log = logging.getLogger(__name__)

# Time between two looks of a candidate (seconds)
LOOK_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimedShards:
    """All shards of the root, and the takeover that has claimed them.

    `damaged` has the reasons why shards cannot be served. `unread` has the store's errors of shards that may be claimed
    again at once.
    """

    takeover: Takeover
    claims: tuple[ShardClaim, ...]
    damaged: Mapping[int, Corruption]
    unread: Mapping[int, Exception]


class Candidate:
    """A daemon as a candidate for the shards. Calls `waiting` with each decision to wait.

    Calls `log_lost` with the error that has ended a log whose shards are owned by then. `company_s` is that of
    `SlotSender`.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        waiting: Callable[[Wait], None],
        log_lost: Callable[[BaseException], None],
        company_s: Callable[[], float],
    ) -> None:
        self._environment = environment
        self._company_s = company_s
        self._waiting = waiting
        self._log_lost = log_lost
        self.shard_logs: tuple[commit.ManifestLog[ShardManifest], ...] = ()
        # True while its claims are in flight: it waits for no other daemon.
        self.is_taking_over = False
        # The log that was opened last
        self._living: DaemonLog | None = None
        # The log that the process before this one wrote, by its last heartbeat.
        self._former = heartbeat.LogState()
        # Shards that could not be read when they were claimed: they are claimed again only once they can be.
        self._damaged: dict[int, str] = {}

    def configure(self, shards: int, logs: SlotLogs, former: heartbeat.Heartbeat | None = None) -> None:
        """Set the root's shards and logs. `former` is the last heartbeat of the process before this one."""
        environment = self._environment
        self._logs = logs
        if former is not None and former.log_id:
            self._former = heartbeat.LogState(former.log_id, former.last_slot, True)
        self.shard_logs = tuple(topic_manifests.shard_log(environment, shard) for shard in range(shards))
        own = () if former is None else (former,)
        self._traces = Traces(environment.store, logs, lambda: (*own, *heartbeat.read_heartbeats(environment.store)))
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
        """The log that this daemon opened last, for its heartbeat; before that the log of the process before it."""
        living = self._living
        if living is None:
            return self._former
        return heartbeat.LogState(living.log_id, living.last_certain, living.is_ended)

    def _fences(self) -> Fences:
        """Make the fences of one attempt, which use the heartbeats that the look before has read."""
        return Fences(self._logs, self._environment, told=self._told_of)

    def _told_of(self, log_id: str) -> int:
        own = self._former.last_slot if self._former.log_id == log_id else 0
        return max(own, self._standby.told_of(log_id))

    @property
    def owner_address(self) -> str:
        """The host:port of the daemon that owned the shards at the last look; "" if there was none."""
        return self._standby.owner_address if self.shard_logs else ""

    def recorded(self, shard: int) -> ShardManifest | None:
        """Return the shard's manifest at the last look, or None if it was not seen."""
        tip = self._standby.tip(shard) if shard < len(self.shard_logs) else None
        return None if tip is None else tip.manifest

    def succeeded_by(self, address: str) -> None:
        """Note that another daemon owns the shards. `address` is its known address, which holds until the next look."""
        self._standby.owner_address = address

    async def become_owner(self) -> ClaimedShards:
        """Claim and read all shards, except damaged and unread ones; wait as long as it takes until one is owned.

        Raises Corruption if all of them are damaged; then nothing is owned.
        """
        while True:
            try:
                claimable = await self._standby.until_claimable(self._waiting)
                await self._check_one_readable()
                fences = self._fences()
                await self._fence_first(fences)
                log.info("taking over: %s", claimable.reason)
                self._waiting(Wait("taking over the shards"))
                self.is_taking_over = True
                return await self._take_over(fences, claimable.gone_owners)
            except LogHeld as error:
                self._waiting(Wait(f"waiting for {error.holder}, which lives and may write to {error.key}"))
            except commit.UNCERTAIN as error:
                self._waiting(Wait(f"the store cannot be reached: {error}"))
            except (NotOwner, Unavailable, commit.Refused) as error:
                self._waiting(Wait(f"another daemon claims the shards: {error}"))
            finally:
                self.is_taking_over = False
            # Jitter, so that two candidates that are refused together do not retry together
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
            # Its claimed shards are free for any daemon once the log has an end.
            await living.close()
            raise

    async def _check_one_readable(self) -> None:
        """Raise Corruption if every shard is known to be damaged, so that no log is opened for none."""
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
        await check_readable(self._logs, self.shard_logs[shard], shard, self._environment, self._traces)

    async def _fence_first(self, fences: Fences) -> None:
        """Fence one owner before a log is opened: if no owner can be fenced, no log is needed.

        Raises Corruption if that holds for every shard.
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
        """Claim all readable shards.

        If there are several candidates, the one that gets the first continues with the others.

        If the store fails for one of the others, this daemon keeps the rest. If another daemon was first, it keeps
        none.
        """
        takeover = Takeover(self.shard_logs, living, self._environment, self._traces)
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
            except object_store.StoreRefused as error:
                # No repetition helps, and any candidate would be refused.
                unread[shard] = error
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
        """Read the claimed shards; note damaged and unread ones and give them back.

        Raises NotOwner if another daemon has claimed one of them meanwhile.
        """
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
        """Decide whether each of these shards may be claimed alone, by a daemon that owns others."""
        return await self._standby.claimable(shards)

    async def claim(self, takeover: Takeover, shard: int, gone_owners: frozenset[str]) -> ShardClaim:
        """Claim a shard that was lost or damaged.

        Raises Corruption if it cannot be read; the shard stays unowned. Raises LogMustClose if it can be given back
        only once the log has an end. Raises NotOwner and Unavailable if another daemon was first, CommitOutcomeUnknown,
        and the store's errors.
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
        """Note that the shard cannot be served; log each reason once."""
        if self._damaged.get(shard) != str(error):
            log.error("shard %d cannot be served: %s", shard, error)
            self._environment.metrics.damage_found("shard")
        self._damaged[shard] = str(error)
        self._standby.forget(shard)
        return error
