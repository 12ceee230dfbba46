"""Waits until this daemon may take over, and reports the daemon that it waits for.

One daemon owns all shards of a root: it takes over when it may claim every one of them. If several may at once, the one
that gets shard 0 continues with the others.

`decide_candidacy` decides once for each former owner; `Standby` repeatedly reads what it decides on: heartbeats, the
shards' manifests, ends of logs and local locks. `takeover` makes the claim. Safety does not depend on the decision: two
candidates that both claim cost churn, never data.

Each read is a request, so a look asks for little while an owner lives:

    heartbeats of owners and of living daemons   at each look
    other heartbeats, found by a listing         every `LISTING_S`
    a shard's manifest                           while no living daemon's heartbeat claims the shard as the known
                                                 manifest says, and before the shard is called claimable
    the end of a log                             while its daemon's heartbeat suggests an end
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from daemon.errors import Corruption
from daemon.owner import heartbeat
from daemon.runtime import backoff
from daemon.shard.range_operations import ShardLog
from storage_backends import commit, local_directory, object_store
from storage_backends.formats.manifest import ShardManifest

log = logging.getLogger(__name__)

# Time between two listings of heartbeats, which find daemons that have started (seconds)
LISTING_S = 10.0


class OwnerLock(enum.Enum):
    """The former owner's process by its local lock.

    `FREE` means that it has ended, `HELD` that it exists, perhaps paused. `UNKNOWN` means that there is no such lock
    here (another machine, S3).
    """

    FREE = enum.auto()
    HELD = enum.auto()
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedOwner:
    """The owner of a shard by the tip of its manifest, and its log. All fields are empty if the shard was given up."""

    owner: str
    address: str
    log_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimNow:
    """The decision to take over by R5. `reason` is for the log."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """The decision to wait until the next observation. `reason` is for health and the log.

    With `stands_by` another daemon owns the shards, or another candidate goes first; nothing is wrong with this one.
    """

    reason: str
    stands_by: bool = False


def decide_candidacy(
    recorded: RecordedOwner | None,
    *,
    daemon_id: str,
    lock: OwnerLock,
    log_ended: bool = False,
    watch: heartbeat.Watch,
    rank: int,
    now_s: float,
) -> ClaimNow | Wait:
    """Decide on the shards of one recorded owner, or with None on shards that were never claimed.

    With `log_ended` a FENCE or CLOSE was seen at the end of the recorded owner's log. `watch` is that of its heartbeat.
    `rank` is that of this daemon among the live candidates (`rendezvous_rank`). `now_s` is monotonic (seconds).
    """
    if recorded is None:
        return ClaimNow("nobody ever owned it")
    if not recorded.owner:
        return ClaimNow("its owner gave it up")
    if recorded.owner == daemon_id:
        return ClaimNow("it belonged to this daemon before it was started again")
    if lock is OwnerLock.FREE:
        return ClaimNow(f"the process of daemon {recorded.owner} has ended")
    if log_ended:
        return ClaimNow(f"the log of daemon {recorded.owner} has ended")
    whom = f"waiting for daemon {recorded.owner} at {recorded.address}"
    if not watch.suspected:
        return Wait(f"{whom} ({watch.describe(now_s)})", stands_by=True)
    turn_s = rank * watch.interval_s - watch.suspected_for_s(now_s)
    if turn_s > 0:
        return Wait(f"{whom} ({watch.describe(now_s)}); {rank} other candidates go first", stands_by=True)
    return ClaimNow(f"daemon {recorded.owner} at {recorded.address} is silent ({watch.describe(now_s)})")


def rendezvous_rank(daemon_id: str, *, others: Iterable[str], former_owner: str) -> int:
    """Return how many of the `others` (ids of live daemons) go before this one after `former_owner`.

    Every candidate computes the same order, a different one for each former owner, so that the first usually claims
    alone.
    """

    def weight(candidate: str) -> bytes:
        return hashlib.sha256(f"{len(former_owner)}:{former_owner}{candidate}".encode()).digest()

    own = (weight(daemon_id), daemon_id)
    return sum((weight(other), other) < own for other in set(others) - {daemon_id, former_owner})


def lock_of(locks: local_directory.LocalLocks | None, daemon_id: str) -> OwnerLock:
    """Return whether the process of `daemon_id` lives on this machine; UNKNOWN without local locks."""
    if locks is None or not locks.known(daemon_id):
        return OwnerLock.UNKNOWN
    try:
        held = locks.try_lock(daemon_id)
    except object_store.StoreError as error:
        log.warning("the lock of daemon %s cannot be tried: %s", daemon_id, error)
        return OwnerLock.UNKNOWN
    if held is None:
        return OwnerLock.HELD
    # Not kept: its daemon may be about to start again, and two claims at once cost only churn.
    held.release()
    return OwnerLock.FREE


@dataclasses.dataclass(frozen=True, slots=True)
class Claimable:
    """The result that every shard, or the one that was asked for, may be claimed.

    `gone_owners` are recorded owners that have no live process; "" stands for a shard without an owner.
    """

    reason: str
    gone_owners: frozenset[str]


def recorded_owner(manifest: ShardManifest) -> RecordedOwner:
    """Return the owner of the shard by its manifest."""
    owned = manifest.open_range
    return RecordedOwner(manifest.owner, manifest.address, "" if owned is None else owned.log_id)


class Standby:
    """The observations of one daemon. `shard_logs` has one for each shard of the root.

    `lock` returns the state of a daemon's lock (`lock_of`). `log_has_ended` returns whether the highest slot of a log
    is a FENCE or CLOSE. Both are called in the executor. `parts` reads manifests in parallel: otherwise, when reads are
    retried, a look would take so long that heartbeats are seldom read. `look_interval_s` is the time between two looks
    (seconds). A short one pays off where there are locks, since they show at once that a process has ended.
    """

    def __init__(
        self,
        store: object_store.ObjectStore,
        shard_logs: Sequence[ShardLog],
        *,
        daemon_id: str,
        lock: Callable[[str], OwnerLock],
        log_has_ended: Callable[[str], bool],
        run: backoff.Run,
        parts: concurrent.futures.Executor,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        look_interval_s: float = heartbeat.INTERVAL_S,
        new_watch: Callable[[], heartbeat.Watch] = heartbeat.Watch,
    ) -> None:
        self._store = store
        self._shard_logs = shard_logs
        self._daemon_id = daemon_id
        self._lock = lock
        self._log_has_ended = log_has_ended
        # Logs that were seen to have an end, which is final
        self._ended_logs: set[str] = set()
        self._run = run
        self._parts = parts
        self._clock = clock
        self._sleep = sleep
        self._look_interval_s = look_interval_s
        self._tips: list[commit.Tip[ShardManifest] | None] = [None] * len(shard_logs)
        # Shards whose known tip is no warm start for the next look
        self._unsure: set[int] = set()
        self._new_watch = new_watch
        self._damaged: dict[int, object_store.Damaged] = {}
        self._watches: dict[str, heartbeat.Watch] = {}
        self._logged_heartbeats: dict[str, heartbeat.LoggedDamage] = {}
        # Daemons whose heartbeats were read in this look
        self._observed: set[str] = set()
        self._listed_at_s: float | None = None
        # host:port of another daemon that owned a shard at the last look, empty if there was none
        self.owner_address = ""

    def tip(self, shard: int) -> commit.Tip[ShardManifest] | None:
        """Return the tip of a shard's manifest at the last look, or None if there was none."""
        return self._tips[shard]

    def forget(self, shard: int) -> None:
        """Read the shard's manifest anew at the next look: its object may be replaced by an undamaged one."""
        self._unsure.add(shard)

    def told_of(self, log_id: str) -> int:
        """Return the slot of a log that was certain to its daemon, by its newest known heartbeat; 0 if unknown."""
        seen = (watch.last_seen for watch in self._watches.values())
        return heartbeat.last_told((beat for beat in seen if beat is not None), log_id)

    async def until_claimable(self, waiting: Callable[[Wait], None]) -> Claimable:
        """Wait until every shard may be claimed. Calls `waiting` with each decision that they may not.

        A shard whose manifest is damaged is ignored. Raises Corruption if all of them are damaged.
        """
        while True:
            try:
                decision = await self._run(self._look)
            except object_store.Damaged as error:
                raise Corruption(f"shard manifest {error}") from error
            if isinstance(decision, Claimable):
                return decision
            waiting(decision)
            await self._sleep(self._look_interval_s)

    async def claimable(self, shards: Sequence[int]) -> dict[int, Claimable | Wait]:
        """Decide whether each of these shards may be claimed alone, by a daemon that owns others.

        Such a daemon waits for no other candidate to own them all. A shard whose manifest is damaged may be claimed:
        the claim reports the damage.
        """
        return await self._run(lambda: self._claimable(shards))

    def _claimable(self, shards: Sequence[int]) -> dict[int, Claimable | Wait]:
        try:
            self._observe_heartbeats()
            claimed = self._claimed(shards)
            found = self._decisions(shards, read=[number for number in shards if number not in claimed])
            stale = [number for number in claimed if isinstance(found[number], Claimable)]
            return found | self._decisions(stale, read=stale)
        except object_store.StoreError as error:
            self._store_failed()
            return dict.fromkeys(shards, Wait(f"the store cannot be reached: {error}"))

    def _decisions(self, shards: Sequence[int], *, read: Sequence[int]) -> dict[int, Claimable | Wait]:
        """Decide on each of the shards, after reading the tips of some. Raises the store's errors of heartbeats."""
        found: dict[int, Claimable | Wait] = {}
        for number, error in self._read_tips(read).items():
            if isinstance(error, object_store.Damaged):
                found[number] = Claimable(f"its manifest is damaged: {error}", frozenset())
            else:
                found[number] = Wait(f"its manifest cannot be read: {error}")
        recorded = {number: self._recorded(number) for number in shards if number not in found}
        self._observe_new_owners(recorded.values())
        locks = self._locks(recorded.values())
        gone = self._gone(locks)
        for number, each in recorded.items():
            decision = self._decide(each, locks)
            found[number] = decision if isinstance(decision, Wait) else Claimable(decision.reason, gone)
        return found

    def _look(self) -> Claimable | Wait:
        shards = range(len(self._shard_logs))
        try:
            self._observe_heartbeats()
            claimed = self._claimed(shards)
            decision = self._decision([number for number in shards if number not in claimed])
            return self._decision(claimed) if isinstance(decision, Claimable) and claimed else decision
        except object_store.Damaged:
            raise
        except object_store.StoreError as error:
            self._store_failed()
            return Wait(f"the store cannot be reached: {error}")

    def _decision(self, read: Sequence[int]) -> Claimable | Wait:
        """Decide on all shards together, after reading the tips of some.

        Raises Damaged if no shard's manifest can be decoded, and the store's errors.
        """
        for number in read:
            self._damaged.pop(number, None)
        for number, error in self._read_tips(read).items():
            if not isinstance(error, object_store.Damaged):
                raise error
            self._damaged[number] = error
        if len(self._damaged) == len(self._shard_logs):
            raise self._damaged[0]
        readable = (number for number in range(len(self._shard_logs)) if number not in self._damaged)
        recorded = list(dict.fromkeys(map(self._recorded, readable)))
        self._observe_new_owners(recorded)
        others = [each for each in recorded if each is not None and each.owner not in ("", self._daemon_id)]
        self.owner_address = others[0].address if others else ""
        locks = self._locks(recorded)
        reasons = []
        for each in recorded:
            decision = self._decide(each, locks)
            if isinstance(decision, Wait):
                return decision
            reasons.append(decision.reason)
        return Claimable(reasons[0], self._gone(locks))

    # ---- what is read

    def _recorded(self, number: int) -> RecordedOwner | None:
        """Return the owner of a shard by its newest known tip, or None if it was never claimed."""
        tip = self._tips[number]
        return None if tip is None else recorded_owner(tip.manifest)

    def _read_tips(self, shards: Sequence[int]) -> dict[int, object_store.StoreError]:
        """Read the tips of these shards; return the errors of those that cannot be read."""
        errors: dict[int, object_store.StoreError] = {}
        for number, found in zip(shards, self._parts.map(self._read_tip, shards), strict=True):
            if isinstance(found, object_store.StoreError):
                errors[number] = found
            else:
                self._tips[number] = found
        return errors

    def _read_tip(self, number: int) -> commit.Tip[ShardManifest] | object_store.StoreError | None:
        try:
            return self._read(number)
        except object_store.StoreError as error:
            return error

    def _read(self, number: int) -> commit.Tip[ShardManifest] | None:
        warm = None if number in self._unsure else self._tips[number]
        tip = self._shard_logs[number].read_tip(warm)
        self._unsure.discard(number)
        return tip

    def _claimed(self, shards: Iterable[int]) -> list[int]:
        """Return those shards that a living daemon claims as their known tips say: these need not be read again.

        Leaves out shards whose tips were read long ago: a takeover would have to list the manifests behind them.
        """
        newest: dict[int, heartbeat.Claim] = {}
        for watch in self._watches.values():
            if watch.last_seen is not None and not watch.suspected:
                for number, claim in watch.last_seen.claims:
                    newest[number] = max(claim, newest.get(number, claim))
        now_s = self._clock()

        def is_claimed(number: int) -> bool:
            tip, claim = self._tips[number], newest.get(number)
            if tip is None or claim is None or number in self._damaged or number in self._unsure:
                return False
            recorded = recorded_owner(tip.manifest)
            return (
                (claim.epoch, claim.daemon_id, claim.log_id) == (tip.manifest.epoch, recorded.owner, recorded.log_id)
                and claim.manifest <= tip.number
                and now_s - tip.read_at < commit.WARM_MAX_S / 2
            )

        return [number for number in shards if is_claimed(number)]

    def _observe_heartbeats(self) -> None:
        """Read the heartbeats of recorded owners and of daemons that may live, at times those of all daemons."""
        owners = {tip.manifest.owner for tip in self._tips if tip is not None}
        daemon_ids = owners | {daemon_id for daemon_id, watch in self._watches.items() if not watch.suspected}
        now_s = self._clock()
        if self._listed_at_s is None or now_s - self._listed_at_s >= LISTING_S:
            daemon_ids.update(heartbeat.daemon_ids(self._store))
            self._listed_at_s = now_s
        self._observed.clear()
        self._observe(daemon_ids)

    def _observe_new_owners(self, recorded: Iterable[RecordedOwner | None]) -> None:
        """Read the heartbeats of owners that this look has found: an older one says nothing about them."""
        self._observe({each.owner for each in recorded if each is not None} - self._observed)

    def _observe(self, daemon_ids: set[str]) -> None:
        for daemon_id in sorted(daemon_ids - {"", self._daemon_id}):
            asked_at_s = self._clock()
            seen = heartbeat.read_heartbeat(self._store, daemon_id, logged=self._logged_heartbeats)
            watch = self._watches.setdefault(daemon_id, self._new_watch())
            watch.observe(seen, now_s=asked_at_s)
            self._observed.add(daemon_id)

    def _store_failed(self) -> None:
        for watch in self._watches.values():
            watch.store_failed(now_s=self._clock())

    def _locks(self, recorded: Iterable[RecordedOwner | None]) -> dict[str, OwnerLock]:
        """Try the locks of these owners, other daemons than this one."""
        owners = {each.owner for each in recorded if each is not None} - {"", self._daemon_id}
        return {owner: self._lock(owner) for owner in sorted(owners)}

    def _gone(self, locks: Mapping[str, OwnerLock]) -> frozenset[str]:
        """Return the recorded owners that have no live process."""
        return frozenset(("", self._daemon_id, *(owner for owner, lock in locks.items() if lock is OwnerLock.FREE)))

    def _has_ended(self, recorded: RecordedOwner | None, lock: OwnerLock) -> bool:
        """Return whether the recorded owner's log has an end, which is proof; a heartbeat is only suspicion.

        A log is read only if its daemon's heartbeat suggests an end, since each read is a request.
        """
        if recorded is None or recorded.owner in ("", self._daemon_id) or lock is OwnerLock.FREE:
            return False
        log_id, watch = recorded.log_id, self._watches.get(recorded.owner)
        if log_id not in self._ended_logs and watch is not None and watch.may_have_ended(log_id):
            try:
                if self._log_has_ended(log_id):
                    self._ended_logs.add(log_id)
            except object_store.StoreError as error:
                log.warning("the end of log %s cannot be read: %s", log_id, error)
        return log_id in self._ended_logs

    def _decide(self, recorded: RecordedOwner | None, locks: Mapping[str, OwnerLock]) -> ClaimNow | Wait:
        owner = recorded.owner if recorded is not None else ""
        lock = locks.get(owner, OwnerLock.UNKNOWN)
        alive = [daemon_id for daemon_id, watch in self._watches.items() if watch.alive]
        return decide_candidacy(
            recorded,
            daemon_id=self._daemon_id,
            lock=lock,
            log_ended=self._has_ended(recorded, lock),
            watch=self._watches.get(owner, self._new_watch()),
            rank=rendezvous_rank(self._daemon_id, others=alive, former_owner=owner),
            now_s=self._clock(),
        )
