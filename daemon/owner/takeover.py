"""Takes over one shard (R5): claim, probe, fence, look again.

    claim the shard manifest (epoch + 1)      from here on the former owner commits nothing
    read the journal from `replay_from`       only now: what it wrote before the claim is there to be seen
    put a FENCE in the next free slot         from here on the former owner writes nothing
    read the shard manifest again             a later claimant may have overtaken this one

Owns: that order, for one shard, in one thread.
Does not own: whether to claim (`candidacy`), the topics' claims and replay (recovery).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable

from daemon.errors import Corruption, NotOwner
from daemon.shard import checkpoint_store, journal_tail, recovery, shard_manifest, shard_tip, slot_put
from daemon.shard.shard_claim import ShardClaim
from daemon.surroundings import backoff
from storage_backends import commit, object_store
from storage_backends.crash_points import crash_point
from storage_backends.formats import slot_format
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import ShardSlot

log = logging.getLogger(__name__)

# How long the claim and the fence may be tried before the store counts as unreachable.
DEADLINE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Claimant:
    """Who takes over, and what it needs for that.

    `address`: host:port of its gRPC service. `executor` reads slots and must not be the one that runs `take_over`.
    `wall_clock_ms`: for the manifest's `created_ms` only. `new_id`: gives commit ids. `checkpoint_damaged` hears of
    the key of a checkpoint that cannot be read. `gone_owners`: see `shard_manifest.Claim`.
    """

    daemon_id: str
    address: str
    executor: concurrent.futures.Executor
    clock: backoff.Clock
    sleep: backoff.BlockingSleep
    jitter: backoff.Jitter
    wall_clock_ms: Callable[[], int]
    new_id: Callable[[], str]
    checkpoint_damaged: Callable[[str], None]
    gone_owners: frozenset[str] = frozenset()


def take_over(
    store: object_store.ObjectStore, shard_log: commit.ManifestLog[ShardManifest], *, shard: int, claimant: Claimant
) -> ShardClaim:
    """Takes over `shard` whoever owns it. Synchronous; may be repeated after any error, with a higher epoch.

    Raises Superseded when another claimant was later, Corruption when the shard cannot be served (damaged slot,
    manifest or both checkpoints), and the store's error when it cannot be reached. A shard that turns out to be damaged
    is given up again: nobody is to wait for this daemon.
    """
    try:
        tip = _claim(shard_log, shard, claimant)
        crash_point("takeover.after_claim")
        return _finish(_Takeover(store, shard_log, tip, claimant))
    except object_store.Damaged as error:
        raise Corruption(f"shard manifest {error}") from error


def check_readable(
    store: object_store.ObjectStore, shard_log: commit.ManifestLog[ShardManifest], *, shard: int, claimant: Claimant
) -> None:
    """Reads what `take_over` reads, and changes nothing. Raises Corruption, and the store's errors."""
    try:
        tip = shard_log.read_tip()
    except object_store.Damaged as error:
        raise Corruption(f"shard manifest {error}") from error
    if tip is not None:
        _Takeover(store, shard_log, tip, claimant).check_readable()


def _finish(takeover: _Takeover) -> ShardClaim:
    try:
        return takeover.finish()
    except Corruption:
        takeover.give_up()
        raise
    except (*commit.UNCERTAIN, commit.Refused, NotOwner):
        raise
    except Exception as error:
        # What is stored of it makes no sense together, or there is a bug: the others are served all the same.
        takeover.give_up()
        log.exception("a shard cannot be restored")
        raise Corruption(f"it cannot be restored: {error!r}") from error


def _claim(shard_log: commit.ManifestLog[ShardManifest], shard: int, claimant: Claimant) -> commit.Tip[ShardManifest]:
    before = shard_log.read_tip()
    epoch = 1 if before is None else before.manifest.epoch + 1
    operation = shard_manifest.Claim(
        shard=shard,
        epoch=epoch,
        owner=claimant.daemon_id,
        address=claimant.address,
        gone_owners=claimant.gone_owners,
    )
    try:
        tip = commit.commit(
            shard_log,
            operation,
            writer=claimant.daemon_id,
            created_ms=claimant.wall_clock_ms(),
            warm=before,
            deadline_s=DEADLINE_S,
        )
    except commit.Refused as refused:
        # Another claimant took this epoch, or a later one.
        tip = shard_tip.existing_tip(shard_log, shard, before)
        raise shard_tip.superseded_by(tip, epoch=epoch) from refused
    # It may be committed, and have another claim behind it: whose epoch must not be taken for this one's.
    shard_tip.check_owner(tip, epoch=epoch)
    return tip


class _Takeover:
    """What follows the claim `tip`."""

    def __init__(
        self,
        store: object_store.ObjectStore,
        shard_log: commit.ManifestLog[ShardManifest],
        tip: commit.Tip[ShardManifest],
        claimant: Claimant,
    ) -> None:
        self._store = store
        self._shard_log = shard_log
        self._tip = tip
        self._claimant = claimant
        self._shard = tip.manifest.shard
        self._epoch = tip.manifest.epoch

    def finish(self) -> ShardClaim:
        try:
            slots, fence_slot = self._probe_and_fence()
        except Corruption:
            # A later owner deletes what it has covered, also under the eyes of this claimant: then nothing is damaged.
            self._still_owner()
            raise
        crash_point("takeover.after_fence")
        confirmed_at_s = self._claimant.clock()
        self._still_owner()
        loaded = checkpoint_store.read_newest(
            self._store, self._tip.manifest, damaged=self._claimant.checkpoint_damaged
        )
        slots = [*self._kept_slots(loaded.replay_from + 1), *slots]
        log.info("shard %d: taken over with epoch %d, fence at slot %d", self._shard, self._epoch, fence_slot)
        return ShardClaim(
            shard=self._shard,
            epoch=self._epoch,
            tip=self._tip,
            confirmed_at_s=confirmed_at_s,
            # In a journal a fence takes a number, as a slot does.
            last_slot=fence_slot,
            checkpoint=loaded.checkpoint,
            replay_from=loaded.replay_from,
            slots=tuple(slots),
            deletions=recovery.deletions_of(loaded.checkpoint, ((slot.header, slot.deletions) for slot in slots)),
        )

    def give_up(self) -> None:
        """What keeps it from being given up is logged: the reason to give it up is the caller's."""
        claimant = self._claimant
        try:
            shard_manifest.give_up(
                self._shard_log,
                self._epoch,
                writer=claimant.daemon_id,
                created_ms=claimant.wall_clock_ms(),
                warm=self._tip,
            )
        except (*commit.UNCERTAIN, commit.Refused) as error:
            log.warning("shard %d could not be given up: %s", self._shard, error)

    def check_readable(self) -> None:
        """Raises Corruption where `finish` would."""
        manifest = self._tip.manifest
        journal_tail.read_tail(self._store, self._shard, manifest.replay_from + 1, executor=self._claimant.executor)
        loaded = checkpoint_store.read_newest(self._store, manifest, damaged=self._claimant.checkpoint_damaged)
        self._kept_slots(loaded.replay_from + 1)

    def _still_owner(self) -> None:
        """Reads the shard manifest. Raises Superseded when a later claim is there."""
        tip = shard_tip.existing_tip(self._shard_log, self._shard, self._tip)
        shard_tip.check_owner(tip, epoch=self._epoch)
        self._tip = tip

    def _probe_and_fence(self) -> tuple[list[journal_tail.Slot], ShardSlot]:
        """The slots above `replay_from`, and the slot behind them, which now holds this claim's fence."""
        slots = self._read_from(self._tip.manifest.replay_from + 1)
        crash_point("takeover.after_probe")
        while True:
            fence_slot = ShardSlot(self._tip.manifest.replay_from + 1 + len(slots))
            try:
                self._put_fence(fence_slot)
            except slot_put.Occupied:
                # The former owner was quicker, or another claimant.
                self._still_owner()
            else:
                return slots, fence_slot
            more = self._read_from(fence_slot)
            if slots and more:
                journal_tail.check_epochs(slots[-1].header, more[0].header)
            slots += more

    def _read_from(self, slot: int) -> list[journal_tail.Slot]:
        slots = journal_tail.read_tail(self._store, self._shard, slot, executor=self._claimant.executor)
        if slots and slots[-1].header.epoch >= self._epoch:
            last = slots[-1].header
            raise Corruption(
                f"shard {self._shard}: slot {last.slot} carries epoch {last.epoch}, which was not given before "
                f"epoch {self._epoch}"
            )
        return slots

    def _put_fence(self, fence_slot: ShardSlot) -> None:
        """Raises Occupied, or OutcomeUnknown when the store stays silent."""
        header = slot_format.SlotHeader(self._shard, self._epoch, fence_slot, slot_format.SlotKind.FENCE, 0)
        slot = slot_put.FrozenSlot(header, slot_format.encode_slot(header, ()), self._claimant.new_id())
        deadline_s = self._claimant.clock() + DEADLINE_S
        reason = "it is absent"
        for delay_s in backoff.delays_s(self._claimant.jitter):
            try:
                if slot_put.try_once(self._store, slot) is not slot_put.Outcome.ABSENT:
                    return
            except object_store.StoreError as error:
                reason = str(error)
            if self._claimant.clock() + delay_s > deadline_s:
                break
            self._claimant.sleep(delay_s)
        raise object_store.OutcomeUnknown(slot.key, f"whether the fence stands is unknown: {reason}")

    def _kept_slots(self, from_slot: int) -> list[journal_tail.Slot]:
        """The slots from `from_slot` up to `replay_from`, kept for a checkpoint that could not be read."""
        end = self._tip.manifest.replay_from + 1
        read = [journal_tail.read_slot(self._store, self._shard, slot) for slot in range(from_slot, end)]
        kept = [slot for slot in read if slot is not None]
        if len(kept) < len(read):
            missing = from_slot + read.index(None)
            raise Corruption(
                f"shard {self._shard}: slot {missing} is missing, and the checkpoint that covered it is damaged"
            )
        return kept
