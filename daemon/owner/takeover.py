"""Takes shards over (L4, L5, L9): fence, claim, read.

    fence the log of the former owner     from here on it writes nothing, and its heads say where each shard ends
    claim the shard manifest, epoch + 1   from here on it commits nothing, and sections may go into this daemon's log
    read the sections above a checkpoint  each log once for all shards that were claimed

Owns: that order, which fence a claim stands on, claims whose outcome is not known yet, and what a shard begins with.
Does not own: whether to claim (`candidacy`), which shards (`candidate`), the operations (`range_operations`), replay.

The fences of one attempt to take shards over: each log is fenced once, for all shards that it has.

Owns: that, and how long it is tried. Does not own: the steps of fencing (`storage_backends.log_fence`), and which logs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from daemon.errors import Corruption, NotOwner, Unavailable
from daemon.group_commit.daemon_log import DaemonLog, OwnLogEnd
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from daemon.shard import checkpointing, range_operations, recovery
from daemon.shard.range_operations import ClaimShard, GiveBack, has_earlier_sections_in
from daemon.shard.recovery import ShardClaim
from daemon.topic import topic_manifests
from storage_backends import checkpoints, commit, log_fence, object_store
from storage_backends.checkpoints import LoadedCheckpoint
from storage_backends.crash_points import crash_point
from storage_backends.formats.log_slot_format import Head, ShardSlot, Writer
from storage_backends.formats.manifest import ShardManifest
from storage_backends.log_fence import Fence
from storage_backends.log_reading import LogEnd, ShardSections, read_logs
from storage_backends.slot_log import SlotLogs

# So long is a fence tried before the store counts as unreachable.
DEADLINE_S = 30.0


class Fences:
    """Used on one event loop, for one attempt: a fence that stops nobody is not kept for the next.

    `told`: which slot of a log was certain to its daemon, by the heartbeats that were read; 0: none told.
    """

    def __init__(
        self, logs: SlotLogs, environment: Environment, *, told: Callable[[str], int] = lambda log_id: 0
    ) -> None:
        self._logs = logs
        self._environment = environment
        self._told = told
        self._fences: dict[str, asyncio.Task[Fence]] = {}

    async def of(self, log_id: str) -> Fence:
        """Where the log ends; whoever asks first fences it. One that failed is tried again by whoever asks next.

        Raises LogHeld while a process lives that may write to it, Damaged when nobody can know where it ends, or when
        it is shorter than its daemon has told, and the store's errors.
        """
        fencing = self._fences.get(log_id)
        if fencing is None or (fencing.done() and (fencing.cancelled() or fencing.exception() is not None)):
            fencing = self._fences[log_id] = asyncio.ensure_future(self._fence(log_id))
            # No caller may be waiting when it fails.
            fencing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(fencing)

    async def _fence(self, log_id: str) -> Fence:
        environment, config = self._environment, self._environment.config
        writer = Writer(config.daemon_id, config.daemon.address or "", environment.version)
        told = self._told(log_id)

        def fence() -> Fence:
            slots = self._logs.log(log_id)
            deadline_s = environment.clock.elapsed_s() + DEADLINE_S
            delays_s = itertools.takewhile(
                lambda delay_s: environment.clock.elapsed_s() + delay_s < deadline_s,
                backoff.delays_s(environment.jitter),
            )
            try:
                fenced = log_fence.fence_log(
                    slots, writer, told=told, delays_s=delays_s, sleep=environment.blocking_sleep
                )
            finally:
                slots.close()
            crash_point("takeover.after_fence")
            return fenced

        fenced = await environment.run(fence)
        environment.metrics.log_fenced()
        return fenced


log = logging.getLogger(__name__)

T = TypeVar("T")

# The store may take so long to note that a shard is given back; nobody's data depends on it.
GIVE_BACK_S = 10.0

Tip: TypeAlias = commit.Tip[ShardManifest]
Manifests: TypeAlias = Sequence[commit.ManifestLog[ShardManifest]]


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimedShard:
    """A shard that was claimed, and not read yet."""

    shard: int
    tip: Tip


class LogMustClose(Corruption):
    """A shard was claimed anew in the own log and cannot be read: it can be given back when that log has an end."""


class Takeover:
    """Shards of a root that this daemon takes into its log `living`. Used on one event loop.

    `manifests`: of every shard of the root.
    """

    def __init__(self, manifests: Manifests, living: DaemonLog, environment: Environment) -> None:
        self.living = living
        self._manifests = manifests
        self._environment = environment
        # Claims that may have landed, or may yet.
        self._under_way: dict[int, ClaimShard] = {}

    # ---- claiming

    async def claim(
        self, shard: int, looked_at: Tip | None, fences: Fences, gone_owners: frozenset[str]
    ) -> ClaimedShard:
        """Claims a shard from whoever owned it at the look, by whose outcome it may be claimed. `looked_at`: its tip
        then. `fences`: of this attempt. `gone_owners`: recorded owners of whom no process is alive; "" stands for
        nobody. May be repeated after any error.

        Raises NotOwner when another claimant was quicker, Corruption when manifest or log are damaged,
        CommitOutcomeUnknown, and the store's errors.
        """
        try:
            tip = await self._run(lambda: self._manifests[shard].read_tip(looked_at))
            claim = self._under_way.get(shard)
            if (
                claim is not None
                and tip is not None
                and tip.manifest.epoch >= claim.epoch
                and not claim.landed(tip.manifest)
            ):
                # Another one has come first: it never lands.
                self._settled(shard)
                claim = None
            if claim is None:
                self._check_owner(looked_at, tip)
                claim = await self._begun(shard, tip, fences, gone_owners)
            return await self._commit(claim, tip)
        except object_store.Damaged as error:
            raise Corruption(f"{error}") from error

    def _check_owner(self, looked_at: Tip | None, tip: Tip | None) -> None:
        """Raises NotOwner when another claimant has come since the look: who has lost a race never fences its winner,
        and looks again.
        """
        if tip is not None and _open_log(tip) not in (None, self.living.log_id, _open_log(looked_at)):
            raise range_operations.superseded_by(tip, epoch=_epoch(looked_at) + 1)

    async def _begun(self, shard: int, tip: Tip | None, fences: Fences, gone_owners: frozenset[str]) -> ClaimShard:
        """The claim as it is sent, the same at each try."""
        manifest = None if tip is None else tip.manifest
        owned = None if manifest is None else manifest.open_range
        former: Fence | OwnLogEnd | None = None
        if owned is not None and owned.log_id == self.living.log_id:
            await self.living.stop(shard)
            former = await self.living.end_for_claim()
        elif owned is not None:
            former = await fences.of(owned.log_id)
        config = self._environment.config
        claim = ClaimShard(
            shard=shard,
            epoch=_epoch(tip) + 1,
            owner=config.daemon_id,
            address=config.daemon.address or "",
            log_id=self.living.log_id,
            after=self.living.last_certain,
            former=former,
            former_is_dead=manifest is not None and manifest.owner in gone_owners,
        )
        self._under_way[shard] = claim
        self.living.truncation.claims(shard, after=claim.after)
        return claim

    async def _commit(self, claim: ClaimShard, tip: Tip | None) -> ClaimedShard:
        shard = claim.shard

        def committed() -> Tip:
            landed = topic_manifests.commit_once(
                self._environment,
                self._manifests[shard],
                claim,
                warm=tip,
                just_read=tip is not None,
                deadline_s=DEADLINE_S,
            )
            crash_point("takeover.after_claim")
            return landed

        try:
            landed = await self._run(committed)
        except commit.Refused as refused:
            self._settled(shard)
            if refused.tip is None or refused.tip.manifest.epoch < claim.epoch:
                # The fence may stop nobody, or another log has come: the next attempt looks again.
                raise Unavailable(f"shard {shard} cannot be claimed: {refused.reason}") from refused
            raise range_operations.superseded_by(refused.tip, epoch=claim.epoch) from refused
        if landed.manifest.epoch != claim.epoch:
            # It has landed, and has another claim behind it: that one's claimant has fenced this daemon's log.
            self._settled(shard)
            raise range_operations.superseded_by(landed, epoch=claim.epoch)
        del self._under_way[shard]
        self.living.truncation.claimed(landed.manifest)
        self.living.begin(shard, Head(claim.epoch, _last_slot(landed.manifest)))
        return ClaimedShard(shard, landed)

    def _settled(self, shard: int) -> None:
        """The claim under way has certainly not landed, or has been overtaken."""
        del self._under_way[shard]
        self.living.truncation.claim_failed(shard)

    async def give_back(self, won: ClaimedShard) -> None:
        """The shard is nobody's, as it was: this daemon cannot serve it. What keeps it from that is logged."""
        shard, living = won.shard, self.living
        head = await living.stop(shard)
        own_head = living.head(shard)
        operation = GiveBack(epoch=won.tip.manifest.epoch, log_id=living.log_id, own_head=own_head)
        try:
            await self._run(
                lambda: topic_manifests.commit_once(
                    self._environment, self._manifests[shard], operation, warm=won.tip, deadline_s=GIVE_BACK_S
                )
            )
        except (*commit.UNCERTAIN, commit.Refused) as error:
            log.warning("shard %d could not be given back: %s", shard, error)
            return
        if head is not None:
            living.truncation.left(shard)

    def is_kept(self, won: ClaimedShard) -> bool:
        """Whether the shard cannot be given back while the own log lives: sections of an earlier epoch lie in it."""
        return has_earlier_sections_in(self.living.log_id, won.tip.manifest)

    # ---- reading

    async def read(self, won: Iterable[ClaimedShard]) -> dict[int, ShardClaim | Exception]:
        """What each of the shards begins with; each log is read once for all of them. An error costs its shard alone,
        or the shards that need a log which cannot be read: Corruption when it cannot be served, NotOwner when it was
        claimed by another meanwhile, else the store's.
        """
        living, won = self.living, [*won]
        heads = {
            each.shard: living.head(each.shard) or Head(each.tip.manifest.epoch, _last_slot(each.tip.manifest))
            for each in won
        }
        ends = {living.log_id: LogEnd(living.last_certain, heads)}
        return await self._run(lambda: self._read(won, ends))

    def _read(self, won: Sequence[ClaimedShard], ends: Mapping[str, LogEnd]) -> dict[int, ShardClaim | Exception]:
        found: dict[int, ShardClaim | Exception] = {}
        loaded: dict[int, LoadedCheckpoint] = {}
        wanted: dict[int, ShardSections] = {}
        for each, newest in zip(
            won, self._environment.pools.calls.parts.map(self._newest_checkpoint, won), strict=True
        ):
            if isinstance(newest, LoadedCheckpoint):
                loaded[each.shard] = newest
                wanted[each.shard] = ShardSections(each.tip.manifest, newest.slot)
            else:
                found[each.shard] = newest
        read_logs(self.living.logs, wanted.values(), ends)
        for each in won:
            if each.shard in wanted:
                found[each.shard] = self._restored(each, loaded[each.shard], wanted.pop(each.shard), ends)
        return found

    def _newest_checkpoint(self, won: ClaimedShard) -> LoadedCheckpoint | Exception:
        try:
            return checkpointing.newest_of(self._environment, won.tip.manifest)
        except (Corruption, object_store.StoreError) as error:
            return error

    def _restored(
        self, won: ClaimedShard, loaded: LoadedCheckpoint, found: ShardSections, ends: Mapping[str, LogEnd]
    ) -> ShardClaim | Exception:
        try:
            return _shard_claim(won, loaded, checkpoints.decoded_section(won.shard, found.complete(ends)))
        except object_store.Damaged as damage:
            return self._superseded(won) or Corruption(f"{damage}")
        except object_store.StoreError as error:
            return error
        except Exception as error:
            # What is stored of it makes no sense together, or there is a bug: the others are served all the same.
            log.exception("shard %d cannot be restored", won.shard)
            return Corruption(f"it cannot be restored: {error!r}")

    def _superseded(self, won: ClaimedShard) -> Exception | None:
        """A later owner deletes what it has covered, also under the eyes of this claimant: then nothing is damaged."""
        try:
            tip = range_operations.existing_tip(self._manifests[won.shard], won.shard, won.tip)
            range_operations.check_owner(tip, epoch=won.tip.manifest.epoch)
        except (NotOwner, object_store.StoreError) as error:
            return error
        return None

    def _run(self, work: Callable[[], T]) -> Awaitable[T]:
        return self._environment.run(work)


async def check_readable(
    logs: SlotLogs, manifests: commit.ManifestLog[ShardManifest], shard: int, environment: Environment
) -> None:
    """Reads what a claim of a shard that nobody owns would read, and changes nothing. Raises Corruption, and the
    store's errors.
    """

    def check() -> None:
        try:
            tip = manifests.read_tip()
            if tip is None or tip.manifest.open_range is not None:
                return
            checkpoints.sections_of_shard(
                logs, tip.manifest, checkpointing.newest_of(environment, tip.manifest).slot, {}
            )
        except object_store.Damaged as error:
            raise Corruption(f"{error}") from error

    await environment.run(check)


def _shard_claim(won: ClaimedShard, loaded: LoadedCheckpoint, read: Sequence[checkpoints.DecodedSection]) -> ShardClaim:
    manifest = won.tip.manifest
    deletions = recovery.deletions_of(loaded.checkpoint, ((each.slot, each.deletions) for each in read))
    log.info("shard %d: taken over with epoch %d behind slot %d", won.shard, manifest.epoch, _last_slot(manifest))
    return ShardClaim(
        shard=won.shard,
        epoch=manifest.epoch,
        tip=won.tip,
        last_slot=ShardSlot(_last_slot(manifest)),
        checkpoint=loaded.checkpoint,
        sections=tuple(read),
        deletions=deletions,
    )


def _last_slot(manifest: ShardManifest) -> int:
    """The last shard slot before the range of its owner. Raises Corruption when nobody owns the shard."""
    owned = manifest.open_range
    if owned is None:
        raise Corruption(f"shard {manifest.shard}: its manifest {manifest.head.number} names no log of its owner")
    return owned.first_slot - 1


def _open_log(tip: Tip | None) -> str | None:
    """The log of the shard's owner; None when nobody owns it."""
    owned = None if tip is None else tip.manifest.open_range
    return None if owned is None else owned.log_id


def _epoch(tip: Tip | None) -> int:
    return 0 if tip is None else tip.manifest.epoch
