"""How much may go to each target now.

Owns: rate limits, and the rest of a target that has failed. Does not own: the clock: times are arguments, in seconds
of a clock that never goes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

BURST_S = 0.1
"""A target that was idle may get so many seconds' worth at once, or one message."""
REST_S = 1.0
"""After a failure; after each message that tries it again twice as long, until one is taken."""
REST_MAX_S = 8.0
_FORGET_AT = 10_000
_UNLIMITED = 2**31


@dataclasses.dataclass(slots=True)
class _Target:
    per_s: float | None
    tokens: float
    filled_at_s: float
    rests_until_s: float = 0.0
    rest_s: float = 0.0
    """How long it rests after a failure; 0: its last message was taken."""


class Pacing:
    """The pace of each target, which is its own: of a pattern, too, each name has the whole limit."""

    def __init__(self, limit: Callable[[str], float | None]) -> None:
        """`limit`: messages a second that a target may get; None: no limit."""
        self._limit = limit
        self._targets: dict[str, _Target] = {}

    def take(self, target: str, wanted: int, now_s: float) -> int:
        """How many of `wanted` messages may go there now; they count as gone. One tries a target that has failed."""
        state = self._state(target, now_s)
        given = min(wanted, self._room(state, now_s))
        if state.per_s is not None:
            state.tokens -= given
        if given and state.rest_s:
            state.rest_s = min(2 * state.rest_s, REST_MAX_S)
            state.rests_until_s = now_s + state.rest_s
        return given

    def takes_nothing(self, target: str, now_s: float) -> bool:
        """Whether nothing may go there now."""
        return self._room(self._state(target, now_s), now_s) == 0

    def is_failing(self, target: str) -> bool:
        """Whether it has not taken a message since it failed."""
        found = self._targets.get(target)
        return found is not None and found.rest_s > 0

    def rest(self, target: str, now_s: float) -> None:
        """Lets a target that has failed rest."""
        state = self._state(target, now_s)
        state.rest_s = state.rest_s or REST_S
        state.rests_until_s = now_s + state.rest_s

    def has_taken(self, target: str, now_s: float) -> None:
        """Says that a target has taken a message."""
        state = self._state(target, now_s)
        state.rest_s = state.rests_until_s = 0.0

    @staticmethod
    def _room(state: _Target, now_s: float) -> int:
        """How many messages may go there now."""
        if now_s < state.rests_until_s:
            return 0
        if state.per_s is not None:
            most = max(1.0, state.per_s * BURST_S)
            state.tokens = min(most, state.tokens + (now_s - state.filled_at_s) * state.per_s)
            state.filled_at_s = now_s
        room = _UNLIMITED if state.per_s is None else int(state.tokens)
        return min(room, 1) if state.rest_s else room

    def _state(self, target: str, now_s: float) -> _Target:
        found = self._targets.get(target)
        if found is None:
            if len(self._targets) >= _FORGET_AT:
                self._targets.clear()
            per_s = self._limit(target)
            burst = 1.0 if per_s is None else max(1.0, per_s * BURST_S)
            found = self._targets[target] = _Target(per_s, burst, now_s)
        return found
