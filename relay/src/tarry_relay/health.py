"""Keeps the health of a relay for /health, and logs its changes.

An end is the broker or the daemon. It is silent while nothing proves that it works: a poll that times out proves
nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""Silence of an end that makes the relay unhealthy (seconds)"""
AGAIN_S = 60.0
"""Interval at which a continuing failure is logged again, with its count (seconds)"""
TARGETS_MAX = 20
"""Failing targets that the body of /health names at most"""
ENDS = ("broker", "daemon")


@dataclasses.dataclass(slots=True)
class _Failing:
    """A failure that continues. Times by `time.monotonic`."""

    since_s: float
    error: str
    count: int = 0
    logged_s: float = 0.0
    logged_count: int = 0
    is_over: bool = False
    """True if a later call was answered. One that fails again soon is not logged again."""


class Health:
    """The health of one relay. Its event loop writes it; the thread of /health reads it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with ends that have just answered."""
        self._now_s = now_s
        self._lock = threading.Lock()
        self._answered_s = dict.fromkeys(ENDS, now_s())
        self._failing: dict[tuple[str, str], _Failing] = {}
        self._reasons: dict[str, str] = {}
        self._lanes: Sequence[str] = ()

    def answered(self, end: str, which: str = "") -> None:
        """Record that an end has answered, or that a target has taken a message."""
        with self._lock:
            if end in self._answered_s:
                self._answered_s[end] = self._now_s()
            found = self._failing.get((end, which))
            if found is None or (found.is_over and self._now_s() - found.logged_s < AGAIN_S):
                return
            if which or found.is_over:
                del self._failing[end, which]
                return
            found.is_over = True
            lasted_s = self._now_s() - found.since_s
        if lasted_s >= SILENT_S / 2:
            log.info("answers again", extra={"end": end, "failures": found.count})

    def failed(self, end: str, error: str, which: str = "") -> None:
        """Record that a call has failed and is repeated; `which` is the name of a target.

        A failure is logged once, and then each minute with its count; for targets, only those of the first twenty.
        """
        now_s = self._now_s()
        with self._lock:
            found = self._failing.setdefault((end, which), _Failing(now_s, error))
            if found.is_over:
                found.is_over, found.since_s = False, now_s
            found.error = error
            found.count += 1
            is_first = found.count == 1
            targets = sum(bool(of_target) for _, of_target in self._failing)
            if (not is_first and now_s - found.logged_s < AGAIN_S) or (which and targets > TARGETS_MAX):
                return
            more, found.logged_s, found.logged_count = found.count - found.logged_count, now_s, found.count
        fields: dict[str, object] = {"end": end, "error": error}
        if which:
            fields["target"] = which
        if is_first:
            log.warning("does not answer", extra=fields)
        else:
            log.warning("still does not answer", extra={**fields, "failures": more})

    def explain(self, what: str, reason: str) -> None:
        """Add a reason for a 503 until `settle` removes it; `what` is broken: `session`, `source`."""
        with self._lock:
            self._reasons[what] = reason

    def settle(self, what: str) -> None:
        """Remove a reason."""
        with self._lock:
            self._reasons.pop(what, None)

    def hold_lanes(self, lanes: Sequence[str]) -> None:
        """Set the lanes whose commit something has blocked for a minute."""
        self._lanes = lanes

    def silent_s(self, end: str) -> float:
        """Return how long an end has not answered (seconds)."""
        with self._lock:
            return self._now_s() - self._answered_s[end]

    def failing_s(self, end: str) -> float:
        """Return how long calls of an end, or of the target that failed first, have failed (seconds)."""
        now_s = self._now_s()
        with self._lock:
            failing = [each for (of, _), each in self._failing.items() if of == end and not each.is_over]
        return max((now_s - each.since_s for each in failing), default=0.0)

    def body(self) -> tuple[bool, Mapping[str, object]]:
        """Return whether the relay is healthy, and the body of /health."""
        now_s = self._now_s()
        with self._lock:
            failing = {
                f"{end} {which}".strip(): {"for_s": round(now_s - each.since_s, 1), "error": each.error}
                for (end, which), each in sorted(self._failing.items(), key=lambda item: item[1].since_s)
                if not each.is_over
            }
            reasons = dict(self._reasons)
            silent = {end: now_s - answered_s for end, answered_s in self._answered_s.items()}
        for end, for_s in silent.items():
            if for_s >= SILENT_S:
                error = failing.get(end, {}).get("error", "nothing was answered")
                reasons.setdefault(end, f"has not answered for {for_s:.0f} s: {error}")
        targets = [name for name in failing if name not in ENDS]
        for name in targets[TARGETS_MAX:]:
            del failing[name]
        body: dict[str, object] = {"status": "failing" if reasons else "ok", "failing": failing}
        if reasons:
            body["reasons"] = reasons
        if len(targets) > TARGETS_MAX:
            body["more_targets"] = len(targets) - TARGETS_MAX
        if self._lanes:
            body["lanes_held"] = list(self._lanes)
        return not reasons, body
