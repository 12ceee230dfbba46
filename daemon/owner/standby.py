"""Waits until this daemon may take over, and says whom it waits for.

One daemon owns all shards of a root: it takes over when it may claim every one of them. Of several that may at once,
the one that gets shard 0 goes on with the others.

Owns: looking at the shards' manifests, heartbeats and local locks, again and again.
Does not own: the decision (`candidacy`), the takeover, and the lock of this daemon's own id.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from daemon.errors import Corruption
from daemon.owner import candidacy, heartbeat
from daemon.owner.candidacy import ClaimNow, OwnerLock, RecordedOwner, Wait
from daemon.shard.shard_tip import ShardLog
from daemon.surroundings import backoff
from storage_backends import commit, local_directory, object_store
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest

log = logging.getLogger(__name__)


def lock_of(locks: local_directory.LocalLocks | None, daemon_id: str) -> OwnerLock:
    """Whether the process of `daemon_id` lives on this machine; UNKNOWN without local locks."""
    if locks is None or not locks.known(daemon_id):
        return OwnerLock.UNKNOWN
    try:
        held = locks.try_lock(daemon_id)
    except object_store.StoreError as error:
        log.warning("the lock of daemon %s cannot be tried: %s", daemon_id, error)
        return OwnerLock.UNKNOWN
    if held is None:
        return OwnerLock.HELD
    # Not kept: its daemon may be about to start again, and two claims at once cost churn only.
    held.release()
    return OwnerLock.FREE


@dataclasses.dataclass(frozen=True, slots=True)
class Claimable:
    """Every shard, or the one that was asked for, may be claimed. `gone_owners`: recorded owners of whom no process is
    alive; "" stands for nobody.
    """

    reason: str
    gone_owners: frozenset[str]


class Standby:
    """The observations of one daemon. `shard_logs`: one for each shard of the root.

    `lock`: what the lock of a daemon id says, see `lock_of`; called in the executor. `look_interval_s`: between two
    looks; worth being short where there are locks, as they show at once that a process has ended.
    """

    def __init__(
        self,
        store: object_store.ObjectStore,
        shard_logs: Sequence[ShardLog],
        *,
        daemon_id: str,
        lock: Callable[[str], OwnerLock],
        run: backoff.Run,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        look_interval_s: float = heartbeat.INTERVAL_S,
        new_watch: Callable[[], heartbeat.Watch] = heartbeat.Watch,
    ) -> None:
        self._store = store
        self._shard_logs = shard_logs
        self._daemon_id = daemon_id
        self._lock = lock
        self._run = run
        self._clock = clock
        self._sleep = sleep
        self._look_interval_s = look_interval_s
        self._tips: list[commit.Tip[ShardManifest] | None] = [None] * len(shard_logs)
        self._new_watch = new_watch
        self._damaged: dict[int, object_store.Damaged] = {}
        # Shards that were recorded as this daemon's at the last look.
        self._own_epochs: dict[int, int] = {}
        self._watches: dict[str, heartbeat.Watch] = {}
        # host:port of another daemon that owned a shard at the last look, empty when there was none.
        self.owner_address = ""

    def recorded(self, shard: int) -> ShardManifest | None:
        """The tip of a shard's manifest at the last look; None when there was none."""
        tip = self._tips[shard]
        return None if tip is None else tip.manifest

    async def until_claimable(
        self, waiting: Callable[[str], None], give_up: Callable[[Mapping[int, int]], Awaitable[None]]
    ) -> Claimable:
        """Returns, with the reason for the log, when every shard may be claimed; `waiting` hears of each reason not to.

        `give_up` is called with the shards that are recorded as this daemon's while it waits for another, and their
        epochs: a claim may have landed without its answer, and two daemons must not wait for each other.

        A shard whose manifest is damaged has no say. Raises Corruption when that holds for all of them.
        """
        while True:
            try:
                decision = await self._run(self._look)
            except object_store.Damaged as error:
                raise Corruption(f"shard manifest {error}") from error
            if isinstance(decision, Claimable):
                return decision
            waiting(decision.reason)
            if self._own_epochs:
                await give_up(self._own_epochs)
            await self._sleep(self._look_interval_s)

    async def claimable(self, shards: Sequence[int]) -> dict[int, Claimable | Wait]:
        """Whether each of these shards may be claimed by itself: for a daemon that owns others, and therefore waits for
        no other candidate to own them all. A shard whose manifest is damaged may be: the claim says so.
        """
        return await self._run(lambda: self._claimable(shards))

    def _claimable(self, shards: Sequence[int]) -> dict[int, Claimable | Wait]:
        recorded: dict[int, RecordedOwner | None] = {}
        found: dict[int, Claimable | Wait] = {}
        try:
            for number in shards:
                try:
                    tip = self._tips[number] = self._shard_logs[number].read_tip(self._tips[number])
                except object_store.Damaged as error:
                    found[number] = Claimable(f"its manifest is damaged: {error}", frozenset())
                    continue
                except object_store.StoreError as error:
                    found[number] = Wait(f"its manifest cannot be read: {error}")
                    continue
                manifest = None if tip is None else tip.manifest
                recorded[number] = None if manifest is None else RecordedOwner(manifest.owner, manifest.address)
            self._observe_heartbeats({each.owner for each in recorded.values() if each is not None})
        except object_store.StoreError as error:
            for watch in self._watches.values():
                watch.store_failed(now_s=self._clock())
            return dict.fromkeys(shards, Wait(f"the store cannot be reached: {error}"))
        others = {each.owner for each in recorded.values() if each is not None} - {"", self._daemon_id}
        locks = {owner: self._lock(owner) for owner in others}
        gone = frozenset(("", self._daemon_id, *(owner for owner, lock in locks.items() if lock is OwnerLock.FREE)))
        for number, each in recorded.items():
            lock = OwnerLock.UNKNOWN if each is None else locks.get(each.owner, OwnerLock.UNKNOWN)
            decision = self._decide(each, lock)
            found[number] = decision if isinstance(decision, Wait) else Claimable(decision.reason, gone)
        return found

    def _look(self) -> Claimable | Wait:
        try:
            recorded = self._recorded_owners()
            self._observe_heartbeats({each.owner for each in recorded if each is not None})
        except object_store.Damaged:
            raise
        except object_store.StoreError as error:
            for watch in self._watches.values():
                watch.store_failed(now_s=self._clock())
            # It waits for nobody: what it has is not in anybody's way.
            self._own_epochs = {}
            return Wait(f"the store cannot be reached: {error}")
        others = [each for each in recorded if each is not None and each.owner not in ("", self._daemon_id)]
        self.owner_address = others[0].address if others else ""
        locks = {each.owner: self._lock(each.owner) for each in others}
        reasons = []
        for each in recorded:
            lock = OwnerLock.UNKNOWN if each is None else locks.get(each.owner, OwnerLock.UNKNOWN)
            decision = self._decide(each, lock)
            if isinstance(decision, Wait):
                return decision
            reasons.append(decision.reason)
        ended = (owner for owner, lock in locks.items() if lock is OwnerLock.FREE)
        return Claimable(reasons[0], frozenset(("", self._daemon_id, *ended)))

    def _recorded_owners(self) -> list[RecordedOwner | None]:
        """The distinct owners by the tips of all shards. Raises Damaged when not one of them can be read."""
        self._damaged = {}
        self._own_epochs = {}
        for number, shard_log in enumerate(self._shard_logs):
            try:
                tip = self._tips[number] = shard_log.read_tip(self._tips[number])
            except object_store.Damaged as error:
                self._damaged[number] = error
                continue
            if tip is not None and tip.manifest.owner == self._daemon_id:
                self._own_epochs[number] = tip.manifest.epoch
        if len(self._damaged) == len(self._shard_logs):
            raise self._damaged[0]
        recorded = (
            None if tip is None else RecordedOwner(owner=tip.manifest.owner, address=tip.manifest.address)
            for number, tip in enumerate(self._tips)
            if number not in self._damaged
        )
        return list(dict.fromkeys(recorded))

    def _observe_heartbeats(self, owners: set[str]) -> None:
        listed = {entry.key.removeprefix(names.DAEMONS_PREFIX) for entry in self._store.list(names.DAEMONS_PREFIX)}
        for daemon_id in sorted((listed | owners) - {"", self._daemon_id}):
            asked_at_s = self._clock()
            seen = heartbeat.read_heartbeat(self._store, daemon_id)
            watch = self._watches.setdefault(daemon_id, self._new_watch())
            watch.observe(seen, now_s=asked_at_s)

    def _decide(self, recorded: RecordedOwner | None, lock: OwnerLock) -> ClaimNow | Wait:
        owner = recorded.owner if recorded is not None else ""
        alive = [daemon_id for daemon_id, watch in self._watches.items() if watch.alive]
        return candidacy.decide(
            recorded,
            daemon_id=self._daemon_id,
            lock=lock,
            watch=self._watches.get(owner, self._new_watch()),
            rank=candidacy.rendezvous_rank(self._daemon_id, others=alive, former_owner=owner),
            now_s=self._clock(),
        )
