"""May this daemon claim a shard now, or whom does it wait for?

Owns: the decision, once for each former owner.
Does not own: what it is decided on (the shard manifest's tip, the end of a log, local locks, `heartbeat`), the claim
(`takeover`), and safety: two candidates that both claim cost churn, never data.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable

from daemon.owner import heartbeat


class OwnerLock(enum.Enum):
    """What the former owner's local lock says of its process.

    `FREE`: it has ended. `HELD`: it exists, perhaps paused. `UNKNOWN`: there is no such lock here (another
    machine, S3).
    """

    FREE = enum.auto()
    HELD = enum.auto()
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedOwner:
    """Who owns a shard by the tip of its manifest, and in which log; all are empty when the shard was given up."""

    owner: str
    address: str
    log_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimNow:
    """Take over by R5; `reason` is for the log."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Stand by; `reason` is for health and the log. Decide again at the next observation."""

    reason: str


def decide(
    recorded: RecordedOwner | None,
    *,
    daemon_id: str,
    lock: OwnerLock,
    log_ended: bool = False,
    watch: heartbeat.Watch,
    rank: int,
    now_s: float,
) -> ClaimNow | Wait:
    """Decides on the shards of one recorded owner; None stands for shards that nobody ever claimed.

    `log_ended`: a FENCE or CLOSE was seen at the end of the recorded owner's log. `watch`: of its
    heartbeat. `rank`: this daemon's among the live candidates, see `rendezvous_rank`. `now_s`: monotonic seconds.
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
        return Wait(f"{whom} ({watch.describe(now_s)})")
    turn_s = rank * watch.interval_s - watch.suspected_for_s(now_s)
    if turn_s > 0:
        return Wait(f"{whom} ({watch.describe(now_s)}); {rank} other candidates go first")
    return ClaimNow(f"daemon {recorded.owner} at {recorded.address} is silent ({watch.describe(now_s)})")


def rendezvous_rank(daemon_id: str, *, others: Iterable[str], former_owner: str) -> int:
    """How many of the `others` (ids of live daemons) go before this one for what `former_owner` leaves behind.

    Every candidate computes the same order, another one for each former owner, so that the first usually claims alone.
    """

    def weight(candidate: str) -> bytes:
        return hashlib.sha256(f"{len(former_owner)}:{former_owner}{candidate}".encode()).digest()

    own = (weight(daemon_id), daemon_id)
    return sum((weight(other), other) < own for other in set(others) - {daemon_id, former_owner})
