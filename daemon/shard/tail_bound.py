"""Bounds how much of the log a successor has to read, by choosing whose checkpoint is next.

It stands apart because all shards of a daemon share its state.

A successor reads from the first slot that some shard's checkpoint does not cover. The log is measured by the cost of
reading it: a unit for each slot, and for each section in it. The shard that needs the earliest slot is next. Shards
take turns, so that checkpoints are spread over time as slots are. If all are written equally, each is checkpointed once
while the log grows by `BEGIN_AT` of the bound. Shards that are not written have no turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# At this fraction of the bound a checkpoint begins regardless of turns, since slots are added while it is written.
BEGIN_AT = 0.75
# A shard that needs less than this fraction is left alone.
LITTLE = 0.25
# More than one at a time only if one takes so long that the bound is reached again meanwhile
AT_ONCE = 2
# A shard whose checkpoint has failed is not asked again before this time (seconds).
RETRY_S = 1.0


class Tail:
    """The part of the log that one shard needs.

    `begin` begins a checkpoint unless one is in flight; it returns whether it has.
    """

    def __init__(self, bound: TailBound, begin: Callable[[], bool]) -> None:
        self._bound = bound
        self.begin = begin
        self.from_work: int | None = None
        """The place in the log of the first section that no checkpoint covers, or None"""
        self.not_before_s = 0.0
        # Beginning of the part that a checkpoint in flight covers
        self._covering: int | None = None
        self._is_covered = False
        self._forgotten = False

    def grown(self, at_work: int) -> None:
        """Note a section at this place of the log; those of former owners lie before its beginning."""
        if not self._forgotten and (self.from_work is None or at_work < self.from_work):
            self.from_work = at_work
            self._bound.look_at_work = min(self._bound.look_at_work, at_work)

    def begun(self) -> None:
        """Note that a checkpoint will cover what exists now."""
        if not self._is_covered and not self._forgotten:
            self._is_covered = True
            self._bound.under_way += 1
        if self._covering is None:
            self._covering = self.from_work
        self.from_work = None

    @contextlib.contextmanager
    def covering(self) -> Iterator[None]:
        """Write a checkpoint of now inside; if that fails, the part that it was to cover is still needed."""
        self.begun()
        try:
            yield
        except BaseException:
            if self._covering is not None:
                self.grown(self._covering)
            self.not_before_s = self._bound.elapsed_s() + RETRY_S
            raise
        finally:
            self._end()

    def forget(self) -> None:
        """Forget a shard that is no longer owned, even if its checkpoint never ends. May be repeated."""
        self.from_work = None
        self._forgotten = True
        self._end()
        self._bound.forget(self)

    def _end(self) -> None:
        self._covering = None
        if self._is_covered:
            self._is_covered = False
            self._bound.under_way -= 1


class TailBound:
    """The bound on what a successor may have to read, `work_max`, used on one event loop.

    `elapsed_s` is a clock that never steps (seconds).
    """

    def __init__(self, work_max: int, elapsed_s: Callable[[], float]) -> None:
        self.under_way = 0
        """The number of checkpoints that are being written"""
        self.elapsed_s = elapsed_s
        self._begin_at = max(1, int(BEGIN_AT * work_max))
        self._little = int(LITTLE * work_max)
        self._last_begun_work = 0
        # No checkpoint is due before the log is this long; checked for each section.
        self.look_at_work = 0
        self._tails: list[Tail] = []

    def tail(self, begin: Callable[[], bool]) -> Tail:
        """Begin to track an owned shard."""
        tail = Tail(self, begin)
        self._tails.append(tail)
        return tail

    def forget(self, tail: Tail) -> None:
        if tail in self._tails:
            self._tails.remove(tail)

    def new_log(self) -> None:
        """Measure from the beginning of another log."""
        self._last_begun_work = self.look_at_work = 0

    def consider(self, work: int) -> None:
        """Begin a checkpoint if it is time; the log is `work` long."""
        while work >= self.look_at_work and self.under_way < AT_ONCE:
            needed = sorted(
                (tail.from_work, place) for place, tail in enumerate(self._tails) if tail.from_work is not None
            )
            if not needed:
                return
            first, _ = needed[0]
            turn = max(self._last_begun_work + self._begin_at // len(needed), first + self._little)
            self.look_at_work = min(turn, first + self._begin_at)
            if work < self.look_at_work or not self._begin_one([self._tails[place] for _, place in needed]):
                return
            self._last_begun_work = work

    def _begin_one(self, tails: list[Tail]) -> bool:
        """Begin a checkpoint of the first shard that can; return whether one could."""
        now_s = self.elapsed_s()
        for tail in tails:
            if tail.not_before_s <= now_s and tail.begin():
                tail.begun()
                return True
        return False
