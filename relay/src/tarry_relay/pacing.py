"""Decides how much may go to each target now, and when to jump ahead in a log instead of reading on.

Pure: times are arguments, in seconds of a monotonic clock.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

BURST_S = 0.1
"""An idle target may get this many seconds' worth at once, or one message."""
REST_S = 1.0
"""Rest of a target after a failure (seconds); each message that tries it again doubles it, until one is taken"""
REST_MAX_S = 8.0
MISSING_REST_MAX_S = 300.0
"""Longest rest of a target that the broker reports as missing (seconds)"""
GAP_MAX = 500
"""Offsets that are read through, because a jump costs a round trip or more"""
_KNOWN_MAX = 10_000
_UNLIMITED = 2**31


@dataclasses.dataclass(slots=True)
class _Target:
    per_s: float | None
    tokens: float
    filled_at_s: float
    rests_until_s: float = 0.0
    rest_s: float = 0.0
    """Rest after a failure (seconds); 0.0 if its last message was taken"""
    rest_max_s: float = REST_MAX_S
    taken: int = 0


class Pacing:
    """The separate pace of each target; each name that matches a pattern also has the whole limit."""

    def __init__(self, limit: Callable[[str], float | None]) -> None:
        """Begin without targets.

        `limit` returns the messages a second that a target may get, or None for no limit.
        """
        self._limit = limit
        self._targets: dict[str, _Target] = {}
        self._taken_before = 0
        """Upper bound on the messages taken by any target that was forgotten"""

    def take(self, target: str, wanted: int, now_s: float) -> int:
        """Return how many of `wanted` messages may go there now, and count them as sent. A failed target gets one."""
        state = self._state(target, now_s)
        given = min(wanted, self._room(state, now_s))
        if state.per_s is not None:
            state.tokens -= given
        if given and state.rest_s:
            state.rest_s = min(2 * state.rest_s, state.rest_max_s)
            state.rests_until_s = now_s + state.rest_s
        return given

    def takes_nothing(self, target: str, now_s: float) -> bool:
        """Return whether nothing may go there now."""
        return self._room(self._state(target, now_s), now_s) == 0

    def is_failing(self, target: str) -> bool:
        """Return whether it has taken no message since it failed."""
        found = self._targets.get(target)
        return found is not None and found.rest_s > 0

    def rest(self, target: str, now_s: float, *, is_missing: bool = False) -> float:
        """Let a failed target rest; return until when. A missing one may rest longer."""
        state = self._state(target, now_s)
        state.rest_max_s = MISSING_REST_MAX_S if is_missing else REST_MAX_S
        state.rest_s = min(state.rest_s or REST_S, state.rest_max_s)
        state.rests_until_s = now_s + state.rest_s
        return state.rests_until_s

    def has_taken(self, target: str, now_s: float) -> None:
        """Record that a target has taken a message."""
        state = self._state(target, now_s)
        state.rest_s = state.rests_until_s = 0.0
        state.taken += 1

    def end_rest(self, target: str) -> None:
        """Record that a target has answered, although it took nothing."""
        if (found := self._targets.get(target)) is not None:
            found.rest_s = found.rests_until_s = 0.0

    def taken(self, target: str) -> int:
        """Return how many messages a target has taken; it never falls."""
        found = self._targets.get(target)
        return self._taken_before if found is None else found.taken

    @staticmethod
    def _room(state: _Target, now_s: float) -> int:
        """Return how many messages may go there now."""
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
            if len(self._targets) >= _KNOWN_MAX:
                # Forget targets that take messages; failing ones stay.
                self._taken_before = max((each.taken for each in self._targets.values()), default=self._taken_before)
                self._targets = {name: each for name, each in self._targets.items() if each.rest_s}
            per_s = self._limit(target)
            burst = 1.0 if per_s is None else max(1.0, per_s * BURST_S)
            found = self._targets[target] = _Target(per_s, burst, now_s, taken=self._taken_before)
        return found


class Search:
    """A search for offsets of one partition, which is read on from the first of them."""

    def __init__(self, offsets: Iterable[int]) -> None:
        """Search for offsets in ascending order."""
        self._left = deque(offsets)

    @property
    def next(self) -> int | None:
        """The lowest offset that is neither found nor gone; None if the search is over."""
        return self._left[0] if self._left else None

    def meets(self, offset: int) -> bool:
        """Return whether the message that was read is wanted. Wanted ones below it are gone."""
        self.begins_at(offset)
        if self.next != offset:
            return False
        self._left.popleft()
        return True

    def begins_at(self, first: int) -> None:
        """Record that the log has nothing below an offset: wanted messages there are gone."""
        while self._left and self._left[0] < first:
            self._left.popleft()

    def ends_at(self, end: int) -> None:
        """Record that the log has nothing from an offset on."""
        while self._left and self._left[-1] >= end:
            self._left.pop()

    def jumps(self, offset: int) -> bool:
        """Return whether the next offset is so far beyond the message that was read that a jump costs less."""
        return self.next is not None and self.next - offset > GAP_MAX
