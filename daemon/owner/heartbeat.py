"""Writes this daemon's heartbeats, and suspects other daemons by theirs.

A heartbeat is watched for *change* against the observer's own monotonic clock; no two clocks are compared. A wrong
suspicion costs churn, never data: safety is the epoch and the fence. `standby` decides what follows from a suspicion.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Annotated, NamedTuple

import msgspec

from daemon.runtime.backoff import Run, Sleep
from storage_backends import object_store
from storage_backends.formats import names, requirements

log = logging.getLogger(__name__)

INTERVAL_S = 3.0
# Consecutive missed beats after which the daemon is suspected to be dead
MISSES_MAX = 3


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon's report on itself.

    `address` is the host:port of its gRPC service, `shards` are those that it owns. In the same order, `epochs` has
    their epochs and `manifests` the numbers of their newest manifests that it knows; older versions write neither.
    `instance` is unique for each start of the process; `sequence` grows by one at each beat. `log_id` is the log that
    it writes, or wrote last, empty before the first; `last_slot` is a slot that this log certainly has. With
    `log_ended` it no longer writes that log. `features` are the requirements of manifests that it meets
    (`requirements.KNOWN`): no owner may require what a living daemon does not report. Older versions report none.
    """

    daemon_id: str
    address: str
    shards: tuple[int, ...]
    instance: str
    sequence: int
    epochs: tuple[int, ...] = ()
    manifests: tuple[int, ...] = ()
    log_id: str = ""
    last_slot: Annotated[int, msgspec.Meta(ge=0, le=names.NUMBER_MAX)] = 0
    log_ended: bool = False
    features: tuple[str, ...] = ()

    @property
    def claims(self) -> Iterator[tuple[int, Claim]]:
        """The shards that it owns by this heartbeat, each with its claim. An older version's heartbeat has none."""
        if self.log_ended:
            return
        for shard, epoch, manifest in zip(self.shards, self.epochs, self.manifests, strict=False):
            yield shard, Claim(epoch, self.daemon_id, self.log_id, manifest)


class Claim(NamedTuple):
    """A daemon's claim of one shard; `manifest` is the number of its newest manifest that the daemon knows.

    Of two claims of a shard the greater is the newer one.
    """

    epoch: int
    daemon_id: str
    log_id: str
    manifest: int


class ReportedShard(NamedTuple):
    """A daemon's report on a shard that it owns; fields as in `Claim`."""

    epoch: int
    manifest: int


class LogState(NamedTuple):
    """A daemon's report on its log; fields as in `Heartbeat`."""

    log_id: str = ""
    last_slot: int = 0
    log_ended: bool = False


class LoggedDamage(NamedTuple):
    """The damage of a heartbeat that was logged last, and a hash of its content."""

    reason: str
    content: int


def read_heartbeat(
    store: object_store.ObjectStore, daemon_id: str, *, logged: MutableMapping[str, LoggedDamage] | None = None
) -> Heartbeat | None:
    """Return the daemon's newest heartbeat, or None if none can be read. Raises the store's errors.

    Logs why it cannot be read. A caller that reads repeatedly passes the same `logged`, and each content is logged
    once.
    """
    logged = {} if logged is None else logged
    body = b""
    try:
        body = store.get(names.daemon_key(daemon_id))
        beat = msgspec.json.decode(body, type=Heartbeat)
    except object_store.NotFound:
        return None
    except object_store.Damaged as error:
        damage = LoggedDamage(str(error), 0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        damage = LoggedDamage(f"{names.daemon_key(daemon_id)}: {error}", hash(body))
    else:
        logged.pop(daemon_id, None)
        return beat
    if logged.get(daemon_id) != damage:
        log.warning("the heartbeat of daemon %s is damaged: %s", daemon_id, damage.reason)
    logged[daemon_id] = damage
    return None


def daemon_ids(store: object_store.ObjectStore) -> list[str]:
    """Return the ids of the daemons that have a heartbeat. Raises the store's errors."""
    listed = (entry.key.removeprefix(names.DAEMONS_PREFIX) for entry in store.list(names.DAEMONS_PREFIX))
    return [daemon_id for daemon_id in listed if names.is_daemon_id(daemon_id)]


def read_heartbeats(
    store: object_store.ObjectStore, *, logged: MutableMapping[str, LoggedDamage] | None = None
) -> Iterator[Heartbeat]:
    """Yield the newest readable heartbeat of each daemon. Raises the store's errors. `logged`: as in read_heartbeat."""
    for daemon_id in daemon_ids(store):
        if (found := read_heartbeat(store, daemon_id, logged=logged)) is not None:
            yield found


def last_told(heartbeats: Iterable[Heartbeat], log_id: str) -> int:
    """Return the slot of a log that was certain to its daemon, by these heartbeats; 0 if none reports it."""
    return max((each.last_slot for each in heartbeats if each.log_id == log_id), default=0)


class HeartbeatLoop:
    """The loop that writes the heartbeats of one process.

    It reports the shards that it owns, `owned`, and `log_state` at each beat.
    """

    def __init__(
        self,
        store: object_store.ObjectStore,
        *,
        daemon_id: str,
        address: str,
        owned: Callable[[], Mapping[int, ReportedShard]],
        log_state: Callable[[], LogState],
        instance: str,
        run: Run,
        sleep: Sleep,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._store = store
        self._daemon_id = daemon_id
        self._address = address
        self._owned = owned
        self._log_state = log_state
        self._instance = instance
        self._run = run
        self._sleep = sleep
        self._interval_s = interval_s
        self._sequence = 0
        self._changed = asyncio.Event()
        self._failing = False

    async def beats(self) -> None:
        """Beat at once, then every `interval_s` seconds and after each change, until it is cancelled."""
        while True:
            self._changed.clear()
            await self.beat()
            interval = asyncio.ensure_future(self._sleep(self._interval_s))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait((interval, changed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                interval.cancel()
                changed.cancel()

    def changed(self) -> None:
        """Report the owned shards soon, since they have changed."""
        self._changed.set()

    async def beat(self) -> None:
        """Write one heartbeat.

        A failed one is not repeated, since the next is due soon; only the first failure is logged.
        """
        self._sequence += 1
        owned = sorted(self._owned().items())
        heartbeat = Heartbeat(
            daemon_id=self._daemon_id,
            address=self._address,
            shards=tuple(shard for shard, _ in owned),
            epochs=tuple(each.epoch for _, each in owned),
            manifests=tuple(each.manifest for _, each in owned),
            instance=self._instance,
            sequence=self._sequence,
            features=tuple(sorted(requirements.KNOWN)),
            **self._log_state()._asdict(),
        )
        body = msgspec.json.encode(heartbeat)
        try:
            await self._run(lambda: self._store.put(names.daemon_key(self._daemon_id), body))
        except object_store.StoreError as error:
            if not self._failing:
                log.warning("heartbeats cannot be written: %s", error)
            self._failing = True
        else:
            self._failing = False


@dataclasses.dataclass(slots=True)
class Watch:
    """One observer's view of one daemon's heartbeat.

    Only successful observations count, and each counts at most one missed beat. Neither an outage of the store nor a
    pause of the observer causes a suspicion.
    """

    interval_s: float = INTERVAL_S
    misses_max: int = MISSES_MAX
    last_seen: Heartbeat | None = None
    _changed_at_s: float | None = None
    _counted_at_s: float = 0.0
    _misses: int = 0
    _suspected_at_s: float | None = None
    _seen_to_change: bool = False

    def observe(self, seen: Heartbeat | None, *, now_s: float) -> None:
        """Take a heartbeat that was read, or None. `now_s` is the time of the read request."""
        if self._changed_at_s is None or seen != self.last_seen:
            self._seen_to_change = self._changed_at_s is not None
            self.last_seen = seen
            self._changed_at_s = self._counted_at_s = now_s
            self._misses = 0
            self._suspected_at_s = None
        elif now_s - self._counted_at_s >= self.interval_s:
            self._counted_at_s = now_s
            self._misses += 1
            if self._suspected_at_s is None and self._misses >= self.misses_max:
                self._suspected_at_s = now_s

    def store_failed(self, *, now_s: float) -> None:
        """Restart the count, since the heartbeat could not be read.

        A beat that the owner could not write is no miss.
        """
        self._misses = 0
        self._counted_at_s = now_s
        self._suspected_at_s = None

    def may_have_ended(self, log_id: str) -> bool:
        """Return whether the log may have an end: a beat was missed, or the daemon writes another log."""
        if self.last_seen is None:
            return False
        return self._misses > 0 or self.last_seen.log_ended or self.last_seen.log_id != log_id

    @property
    def suspected(self) -> bool:
        return self._suspected_at_s is not None

    @property
    def alive(self) -> bool:
        """True if it was seen to beat and has not fallen silent since."""
        return self._seen_to_change and self.last_seen is not None and not self.suspected

    def suspected_for_s(self, now_s: float) -> float:
        """Seconds since the suspicion began, 0.0 without one."""
        return 0.0 if self._suspected_at_s is None else now_s - self._suspected_at_s

    def describe(self, now_s: float) -> str:
        """Describe the heartbeat, such as "last heartbeat seen 4 s ago"."""
        if self._changed_at_s is None:
            return "its heartbeat was not read yet"
        age_s = now_s - self._changed_at_s
        if self.last_seen is None:
            return f"no heartbeat for {age_s:.0f} s"
        return f"last heartbeat seen {age_s:.0f} s ago"
