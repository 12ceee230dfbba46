"""How long the journals of a daemon may become, all shards together: a successor reads what no checkpoint covers.

Owns: the count of those slots, and which shard's checkpoint is written next: that of the longest tail.
Does not own: what one shard's checkpoint is and its own limits (`checkpointing`), and deleting slots.

A shard whose checkpoint is begun leaves the count, so that the next one begins when as many slots have come again:
checkpoints are spread over time as slots are. Where all shards are written alike, each tail is twice the average when
its turn comes: a checkpoint pays for `2 * BEGIN_AT * slots_max / shards` slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# Checkpoints begin at this part of the bound: slots come while one is being written.
BEGIN_AT = 0.75
# More than one at a time only where one takes so long that the bound is reached again meanwhile.
AT_ONCE = 2
# A shard whose checkpoint has failed is not asked again before.
RETRY_S = 1.0


class Tail:
    """What of one shard's journal no checkpoint covers. `begin` begins a checkpoint, if none is under way; whether it
    did.
    """

    def __init__(self, bound: TailBound, begin: Callable[[], bool]) -> None:
        self._bound = bound
        self.begin = begin
        self.slots = 0
        self.not_before_s = 0.0
        # Slots that a checkpoint under way covers.
        self._covering = 0
        self._is_covered = False
        self._forgotten = False

    def grown(self, slots: int) -> None:
        if not self._forgotten:
            self.slots += slots
            self._bound.open_slots += slots

    def begun(self) -> None:
        """A checkpoint will cover what there is now."""
        if not self._is_covered and not self._forgotten:
            self._is_covered = True
            self._bound.under_way += 1
        self._covering += self.slots
        self.grown(-self.slots)

    @contextlib.contextmanager
    def covering(self) -> Iterator[None]:
        """Inside, a checkpoint of now is written; where that fails the slots count again."""
        self.begun()
        try:
            yield
        except BaseException:
            self.grown(self._covering)
            self.not_before_s = self._bound.elapsed_s() + RETRY_S
            raise
        finally:
            self._end()

    def forget(self) -> None:
        """The shard is owned no longer, also where its checkpoint never ends. May be repeated."""
        self.grown(-self.slots)
        self._forgotten = True
        self._end()
        self._bound.forget(self)

    def _end(self) -> None:
        self._covering = 0
        if self._is_covered:
            self._is_covered = False
            self._bound.under_way -= 1


class TailBound:
    """`slots_max`: of all tails; made and used on one event loop. `elapsed_s`: seconds of a clock that never steps."""

    def __init__(self, slots_max: int, elapsed_s: Callable[[], float]) -> None:
        self.open_slots = 0
        """Slots that no checkpoint covers, written or under way."""
        self.under_way = 0
        self.elapsed_s = elapsed_s
        self._begin_at = max(1, int(BEGIN_AT * slots_max))
        self._tails: list[Tail] = []

    def tail(self, begin: Callable[[], bool]) -> Tail:
        """A shard is owned from now on."""
        tail = Tail(self, begin)
        self._tails.append(tail)
        return tail

    def forget(self, tail: Tail) -> None:
        if tail in self._tails:
            self._tails.remove(tail)

    def consider(self) -> None:
        """Begins a checkpoint when the tails have become long."""
        while self.open_slots >= self._begin_at and self.under_way < AT_ONCE:
            if not self._begin_longest():
                return

    def _begin_longest(self) -> bool:
        now_s = self.elapsed_s()
        for tail in sorted(self._tails, key=lambda each: -each.slots):
            if tail.slots and tail.not_before_s <= now_s and tail.begin():
                tail.begun()
                return True
        return False
