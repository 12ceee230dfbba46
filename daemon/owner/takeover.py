"""Takes shards over (L4, L5, L9): fence, claim, read.

    fence the log of the former owner     from then on it writes nothing, and its heads say where each shard ends
    claim the shard manifest, epoch + 1   from then on it commits nothing, and sections may go into this daemon's log
    read the sections above a checkpoint  each log once for all claimed shards

Each log is fenced once for all its shards in an attempt (`Fences`). Claims with an unknown outcome are repeated
unchanged until it is known. `standby` decides whether to claim, `candidate` which shards.
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
from daemon.owner.traces import Traces
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
from storage_backends.log_reading import EndDamaged, LogEnd, ShardSections, read_logs
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)

# Time after which a fence is given up and the store counts as unreachable (seconds)
DEADLINE_S = 30.0


class Fences:
    """The fences of one attempt, on one event loop. A fence that stops no daemon is not kept for the next attempt.

    `told` returns the slot of a log that was certain to its daemon, by the heartbeats that were read; 0 if none reports
    it.
    """

    def __init__(
        self, logs: SlotLogs, environment: Environment, *, told: Callable[[str], int] = lambda log_id: 0
    ) -> None:
        self._logs = logs
        self._environment = environment
        self._told = told
        self._fences: dict[str, asyncio.Task[Fence]] = {}

    async def of(self, log_id: str) -> Fence:
        """Return where the log ends; the first caller fences it. A failed fence is repeated by the next caller.

        Raises LogHeld while a live process may write to the log. Raises Damaged if its end cannot be known, or if it is
        shorter than its daemon reported. Raises the store's errors.
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
            except object_store.Damaged as error:
                advice = f"restore it, or give it up with `tarryd give-up {log_id}`"
                raise object_store.Damaged(error.key, f"{error.reason}; {advice}") from error
            finally:
                slots.close()
            crash_point("takeover.after_fence")
            return fenced

        fenced = await environment.run(fence)
        environment.metrics.log_fenced()
        return fenced


T = TypeVar("T")

# Time for the store to record that a shard is given back (seconds); no data depends on it
GIVE_BACK_S = 10.0

Tip: TypeAlias = commit.Tip[ShardManifest]
Manifests: TypeAlias = Sequence[commit.ManifestLog[ShardManifest]]


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimedShard:
    """A shard that was claimed, and not read yet."""

    shard: int
    tip: Tip


class LogMustClose(Corruption):
    """A shard claimed again in this daemon's log that cannot be read: it can be given back once that log has an end."""


class Takeover:
    """Shards of a root that this daemon takes into its log `living`. Used on one event loop.

    `manifests` has those of every shard of the root. `traces` tell a new shard from one that the store has lost.
    """

    def __init__(self, manifests: Manifests, living: DaemonLog, environment: Environment, traces: Traces) -> None:
        self.living = living
        self._traces = traces
        self._manifests = manifests
        self._environment = environment
        # Claims that may have landed, or still may
        self._under_way: dict[int, ClaimShard] = {}

    # ---- claiming

    async def claim(
        self, shard: int, looked_at: Tip | None, fences: Fences, gone_owners: frozenset[str]
    ) -> ClaimedShard:
        """Claim a shard from its owner at the look, which allowed the claim. May be repeated after any error.

        `looked_at` is its tip at the look. `fences` are those of this attempt. `gone_owners` are recorded owners that
        have no live process; "" stands for a shard without an owner. Raises NotOwner if another claimant was quicker,
        Unavailable if the next look may change that, Corruption if manifest or log are damaged, CommitOutcomeUnknown,
        and the store's errors.
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
                # Another claim was first, so this one never lands.
                self._settled(shard)
                claim = None
            if claim is None:
                self._check_owner(looked_at, tip)
                claim = await self._begun(shard, tip, fences, gone_owners)
            return await self._commit(claim, tip)
        except object_store.Damaged as error:
            raise Corruption(f"{error}") from error
        except (*commit.UNCERTAIN, Corruption, NotOwner, Unavailable, MemoryError):
            raise
        except Exception as error:
            # Its stored data makes no sense, or there is a bug. The others are served all the same.
            log.exception("shard %d cannot be claimed", shard)
            raise Corruption(f"{self._manifests[shard].prefix}: it cannot be claimed: {error!r}") from error

    def _check_owner(self, looked_at: Tip | None, tip: Tip | None) -> None:
        """Raise NotOwner if another claimant has come since the look.

        The loser of a race never fences its winner; it looks again.
        """
        if tip is not None and _open_log(tip) not in (None, self.living.log_id, _open_log(looked_at)):
            raise range_operations.superseded_by(tip, epoch=_epoch(looked_at) + 1)

    async def _begun(self, shard: int, tip: Tip | None, fences: Fences, gone_owners: frozenset[str]) -> ClaimShard:
        """Make the claim, which is the same at each attempt to commit it."""
        if tip is None:
            await self._run(lambda: self._traces.check_new(shard, self._manifests[shard]))
        manifest = None if tip is None else tip.manifest
        owned = None if manifest is None else manifest.open_range
        former: Fence | OwnLogEnd | None = None
        if owned is not None and owned.log_id == self.living.log_id:
            await self.living.stop(shard)
            former = await self.living.end_for_claim()
        elif owned is not None:
            try:
                former = await fences.of(owned.log_id)
            except object_store.Damaged as error:
                raise object_store.Damaged(
                    error.key,
                    f"{error.reason}; shard {shard} may have lost what it had there above section {_covered(tip)}",
                ) from error
            await self._check_end(former, tip)
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

    async def _check_end(self, fence: Fence, tip: Tip | None) -> None:
        """Raise Damaged if the shard's manifest names a slot of the fenced log that this log cannot have had.

        A fence in an emptied number of a living log is lower than such a slot, too. Then the log, which is longer than
        at the listing before the fence, has a higher slot than the fence.
        """
        certain = 0 if tip is None else max(tip.manifest.certain_in(fence.log_id))
        if tip is None or certain < fence.number:
            return

        def highest() -> int:
            slots = self.living.logs.log(fence.log_id)
            try:
                return slots.highest() or 0
            finally:
                slots.close()

        if await self._run(highest) <= fence.number:
            raise object_store.Damaged(
                self._manifests[tip.manifest.shard].key(tip.number),
                f"it names slot {certain} of log {fence.log_id}, which ends at slot {fence.number}: the manifest is "
                f"wrong, or the store has lost slots; restore them as of one time, or give the end of the log up with "
                f"`tarryd give-up {fence.log_id}`",
            )

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
                # The fence may stop no daemon, or another log has come: the next attempt looks again.
                raise Unavailable(f"shard {shard} cannot be claimed: {refused.reason}") from refused
            raise range_operations.superseded_by(refused.tip, epoch=claim.epoch) from refused
        if landed.manifest.epoch != claim.epoch:
            # It has landed, and a later claim follows it, whose claimant has fenced this daemon's log.
            self._settled(shard)
            raise range_operations.superseded_by(landed, epoch=claim.epoch)
        del self._under_way[shard]
        self.living.truncation.claimed(landed.manifest)
        self.living.begin(shard, Head(claim.epoch, _last_slot(landed.manifest)))
        return ClaimedShard(shard, landed)

    def _settled(self, shard: int) -> None:
        """Forget a claim in flight that has certainly not landed, or has been overtaken."""
        del self._under_way[shard]
        self.living.truncation.claim_failed(shard)

    async def give_back(self, won: ClaimedShard) -> None:
        """Release a shard that this daemon cannot serve, so that it has no owner. Logs a failure."""
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
        """Return whether the shard cannot be given back, since its earlier sections lie in this daemon's log."""
        return has_earlier_sections_in(self.living.log_id, won.tip.manifest)

    # ---- reading

    async def read(self, won: Iterable[ClaimedShard]) -> dict[int, ShardClaim | Exception]:
        """Read the initial state of each shard; read each log once for all of them.

        An error affects its shard alone, or the shards that need a log that cannot be read. It is Corruption if the
        shard cannot be served, NotOwner if another daemon has claimed it meanwhile, else the store's.
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
            return checkpointing.newest_of(self._environment, self._manifests[won.shard], won.tip)
        except (Corruption, NotOwner, object_store.StoreError) as error:
            return error

    def _restored(
        self, won: ClaimedShard, loaded: LoadedCheckpoint, found: ShardSections, ends: Mapping[str, LogEnd]
    ) -> ShardClaim | Exception:
        try:
            return _shard_claim(won, loaded, checkpoints.decoded_section(won.shard, found.complete(ends)))
        except object_store.Damaged as damage:
            return self._superseded(won) or _corruption(damage)
        except object_store.StoreError as error:
            return error
        except MemoryError:
            raise
        except Exception as error:
            # Its stored data is inconsistent, or there is a bug. The others are served all the same.
            log.exception("shard %d cannot be restored", won.shard)
            return Corruption(f"{loaded.key or 'its log'}: it cannot be restored: {error!r}")

    def _superseded(self, won: ClaimedShard) -> Exception | None:
        """Return NotOwner if another daemon has claimed the shard, the store's error if that is unknown, else None."""
        try:
            range_operations.check_not_superseded(self._manifests[won.shard], won.tip)
        except (NotOwner, object_store.StoreError) as error:
            return error
        return None

    def _run(self, work: Callable[[], T]) -> Awaitable[T]:
        return self._environment.run(work)


async def check_readable(
    logs: SlotLogs,
    manifests: commit.ManifestLog[ShardManifest],
    shard: int,
    environment: Environment,
    traces: Traces,
) -> None:
    """Read what a claim of an unowned shard would read; change nothing.

    Raises Corruption, NotOwner if another daemon has claimed the shard meanwhile, and the store's errors.
    """

    def check() -> None:
        try:
            tip = manifests.read_tip()
            if tip is None:
                traces.check_new(shard, manifests)
            if tip is None or tip.manifest.open_range is not None:
                return
            loaded = checkpointing.newest_of(environment, manifests, tip)
            try:
                checkpoints.sections_of_shard(logs, tip.manifest, loaded.slot, {})
            except object_store.Damaged:
                range_operations.check_not_superseded(manifests, tip)
                raise
        except object_store.Damaged as error:
            raise _corruption(error) from error

    await environment.run(check)


def _corruption(damage: object_store.Damaged) -> Corruption:
    """Return the error of a shard that cannot be read, with the command that gives up the damaged end of a log."""
    if isinstance(damage, EndDamaged):
        return Corruption(f"{damage}; restore it, or give it up with `tarryd give-up {damage.log_id}`")
    return Corruption(f"{damage}")


def _shard_claim(won: ClaimedShard, loaded: LoadedCheckpoint, read: Sequence[checkpoints.DecodedSection]) -> ShardClaim:
    manifest = won.tip.manifest
    deletions = recovery.deletions_of(loaded.checkpoint, ((each.slot, each.deletions) for each in read))
    log.info("shard %d: taken over with epoch %d after slot %d", won.shard, manifest.epoch, _last_slot(manifest))
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
    """Return the last shard slot before the range of its owner. Raises Corruption if the shard has no owner."""
    owned = manifest.open_range
    if owned is None:
        raise Corruption(f"shard {manifest.shard}: its manifest {manifest.head.number} names no log of its owner")
    return owned.first_slot - 1


def _covered(tip: Tip | None) -> int:
    """Return the last section that a checkpoint of the shard covers; 0 without one."""
    return 0 if tip is None else tip.manifest.checkpoint_slot


def _open_log(tip: Tip | None) -> str | None:
    """Return the log of the shard's owner, or None if it has none."""
    owned = None if tip is None else tip.manifest.open_range
    return None if owned is None else owned.log_id


def _epoch(tip: Tip | None) -> int:
    return 0 if tip is None else tip.manifest.epoch
