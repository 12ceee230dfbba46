"""How much of the log a successor has to read: from the first slot that some shard's checkpoint does not cover.

Owns: where in the log each shard begins to need it, and which shard's checkpoint is written next: that of the one that
begins first.
Does not own: what one shard's checkpoint is and its own limits (`checkpointing`), and deleting slots.

The log is measured by what reading it costs: a unit for each slot, and for each section in it. Shards take turns, so
that checkpoints are spread over time as slots are: of the shards that are written, where they are written alike, each
is checkpointed once while the log grows by `BEGIN_AT` of the bound. Those that are not written have no turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# At this part of the bound a checkpoint begins whosever turn it is: slots come while one is being written.
BEGIN_AT = 0.75
# A shard that needs less than this part is left alone.
LITTLE = 0.25
# More than one at a time only where one takes so long that the bound is reached again meanwhile.
AT_ONCE = 2
# A shard whose checkpoint has failed is not asked again before.
RETRY_S = 1.0


class Tail:
    """What of the log one shard needs. `begin` begins a checkpoint, if none is under way; whether it did."""

    def __init__(self, bound: TailBound, begin: Callable[[], bool]) -> None:
        self._bound = bound
        self.begin = begin
        self.from_work: int | None = None
        """Where in the log the first section lies that no checkpoint covers; None: there is none."""
        self.not_before_s = 0.0
        # What a checkpoint under way covers begins here.
        self._covering: int | None = None
        self._is_covered = False
        self._forgotten = False

    def grown(self, at_work: int) -> None:
        """A section came at this place of the log; what former owners left lies before its beginning."""
        if not self._forgotten and (self.from_work is None or at_work < self.from_work):
            self.from_work = at_work
            self._bound.look_at_work = min(self._bound.look_at_work, at_work)

    def begun(self) -> None:
        """A checkpoint will cover what there is now."""
        if not self._is_covered and not self._forgotten:
            self._is_covered = True
            self._bound.under_way += 1
        if self._covering is None:
            self._covering = self.from_work
        self.from_work = None

    @contextlib.contextmanager
    def covering(self) -> Iterator[None]:
        """Inside, a checkpoint of now is written; where that fails what it was to cover is needed still."""
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
        """The shard is owned no longer, also where its checkpoint never ends. May be repeated."""
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
    """`work_max`: what a successor may have to read; made and used on one event loop. `elapsed_s`: seconds of a clock
    that never steps.
    """

    def __init__(self, work_max: int, elapsed_s: Callable[[], float]) -> None:
        self.under_way = 0
        """Checkpoints that are being written."""
        self.elapsed_s = elapsed_s
        self._begin_at = max(1, int(BEGIN_AT * work_max))
        self._little = int(LITTLE * work_max)
        self._last_begun_work = 0
        # Before the log is so long it is no time for a checkpoint. It is asked for each section.
        self.look_at_work = 0
        self._tails: list[Tail] = []

    def tail(self, begin: Callable[[], bool]) -> Tail:
        """A shard is owned from now on."""
        tail = Tail(self, begin)
        self._tails.append(tail)
        return tail

    def forget(self, tail: Tail) -> None:
        if tail in self._tails:
            self._tails.remove(tail)

    def new_log(self) -> None:
        """What is written from now on is measured from the beginning of another log."""
        self._last_begun_work = self.look_at_work = 0

    def consider(self, work: int) -> None:
        """Begins a checkpoint when it is time; the log is `work` long."""
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
        """Begins a checkpoint of the first that can begin now; whether one could."""
        now_s = self.elapsed_s()
        for tail in tails:
            if tail.not_before_s <= now_s and tail.begin():
                tail.begun()
                return True
        return False
