"""Heartbeats: how a daemon shows that it lives, and how another one comes to suspect that it does not.

A heartbeat is watched for *change* against the observer's own monotonic clock; no two clocks are compared. A wrong
suspicion costs churn, never data: safety is the epoch and the fence.

Owns: the heartbeat object, writing it, and counting the beats that were missed.
Does not own: what follows from a suspicion (`candidacy`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from daemon.runtime.backoff import Run, Sleep
from storage_backends import object_store
from storage_backends.formats import names

log = logging.getLogger(__name__)

INTERVAL_S = 3.0
# Beats in a row that may be missed before the daemon is suspected to be dead.
MISSES_MAX = 3


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon writes about itself.

    `address`: host:port of its gRPC service. `shards`: those that it owns. `instance`: unique for each start of the
    process. `sequence`: one more at each beat. `log_id`: of the log that it writes, or wrote last, empty before the
    first; `last_slot`: of that log, for certain; `log_ended`: it writes that log no more.
    """

    daemon_id: str
    address: str
    shards: tuple[int, ...]
    instance: str
    sequence: int
    log_id: str = ""
    last_slot: int = 0
    log_ended: bool = False


class LogState(NamedTuple):
    """What a daemon tells of its log; as in `Heartbeat`."""

    log_id: str = ""
    last_slot: int = 0
    log_ended: bool = False


def read_heartbeat(store: object_store.ObjectStore, daemon_id: str) -> Heartbeat | None:
    """The daemon's newest heartbeat; None when there is none that can be read. Errors of the store are raised."""
    try:
        body = store.get(names.daemon_key(daemon_id))
    except object_store.NotFound:
        return None
    except object_store.Damaged:
        log.warning("the heartbeat of daemon %s is damaged", daemon_id)
        return None
    try:
        return msgspec.json.decode(body, type=Heartbeat)
    except msgspec.DecodeError:
        log.warning("the heartbeat of daemon %s cannot be read", daemon_id)
        return None


def daemon_ids(store: object_store.ObjectStore) -> list[str]:
    """Those of the daemons that have told a heartbeat."""
    return [entry.key.removeprefix(names.DAEMONS_PREFIX) for entry in store.list(names.DAEMONS_PREFIX)]


def read_heartbeats(store: object_store.ObjectStore) -> Iterator[Heartbeat]:
    """The newest heartbeat of each daemon that has one which can be read. Errors of the store are raised."""
    for daemon_id in daemon_ids(store):
        if (found := read_heartbeat(store, daemon_id)) is not None:
            yield found


def last_told(heartbeats: Iterable[Heartbeat], log_id: str) -> int:
    """The slot of a log that was certain to its daemon, by these heartbeats; 0: none tells."""
    return max((each.last_slot for each in heartbeats if each.log_id == log_id), default=0)


class HeartbeatLoop:
    """Writes the heartbeats of one process. `shards`, `log_state`: what it tells at each beat."""

    def __init__(
        self,
        store: object_store.ObjectStore,
        *,
        daemon_id: str,
        address: str,
        shards: Callable[[], tuple[int, ...]],
        log_state: Callable[[], LogState],
        instance: str,
        run: Run,
        sleep: Sleep,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._store = store
        self._daemon_id = daemon_id
        self._address = address
        self._shards = shards
        self._log_state = log_state
        self._instance = instance
        self._run = run
        self._sleep = sleep
        self._interval_s = interval_s
        self._sequence = 0
        self._failing = False

    async def beats(self) -> None:
        """A beat at once and then every `interval_s`, until it is cancelled."""
        while True:
            await self.beat()
            await self._sleep(self._interval_s)

    async def beat(self) -> None:
        """One beat. One that the store does not take is logged when that begins, and not repeated: the next is due
        soon.
        """
        self._sequence += 1
        heartbeat = Heartbeat(
            daemon_id=self._daemon_id,
            address=self._address,
            shards=self._shards(),
            instance=self._instance,
            sequence=self._sequence,
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
    """What one observer has seen of one daemon's heartbeat.

    Only observations that succeeded count, and at most one missed beat for each: neither an outage of the store nor a
    pause of the observer makes anybody suspect.
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
        """Takes in what was read from the store (None: no heartbeat); `now_s` is the time at which it was asked for."""
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
        """The heartbeat could not be read: what the owner could not write either is no miss. The count starts again."""
        self._misses = 0
        self._counted_at_s = now_s
        self._suspected_at_s = None

    def may_have_ended(self, log_id: str) -> bool:
        """Whether it is worth looking if the log has an end: a beat was missed, or the daemon writes another one."""
        if self.last_seen is None:
            return False
        return self._misses > 0 or self.last_seen.log_ended or self.last_seen.log_id != log_id

    @property
    def suspected(self) -> bool:
        return self._suspected_at_s is not None

    @property
    def alive(self) -> bool:
        """Whether it was seen to beat, and did not fall silent since."""
        return self._seen_to_change and self.last_seen is not None and not self.suspected

    def suspected_for_s(self, now_s: float) -> float:
        """Seconds since the suspicion began, 0 without one."""
        return 0.0 if self._suspected_at_s is None else now_s - self._suspected_at_s

    def describe(self, now_s: float) -> str:
        """For people, such as "last heartbeat seen 4 s ago"."""
        if self._changed_at_s is None:
            return "its heartbeat was not read yet"
        age_s = now_s - self._changed_at_s
        if self.last_seen is None:
            return f"no heartbeat for {age_s:.0f} s"
        return f"last heartbeat seen {age_s:.0f} s ago"
