"""What came on a stream and nobody has taken yet, in the order in which it came.

Owns: which batches are joined when they are taken, and when enough is there to stop waiting for more.
Does not own: permits and what is held (`tarry.receiving`); what a joined batch is (`tarry.batch`).

Batches are joined when they are taken, not when they come: what is taken back meanwhile has left them by then. Those of
one receiver and one epoch are joined, past batches of other receivers, but not past anything else: what a receiver is
told of what it has stays in its place among its batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tarry import batch, columns, errors

Received = TypeVar("Received")

ROWS_MAX = 10_000
"""How many rows of several batches are joined when nothing else is said."""


class Inbox(Generic[Received]):
    """Batches, and whatever else comes between them."""

    def __init__(self) -> None:
        self._waiting: deque[Received] = deque()
        self._rows = 0
        # What comes that is no batch.
        self._others = 0

    def __len__(self) -> int:
        """How many batches and other things wait, joined or not."""
        return len(self._waiting)

    def append(self, event: Received) -> None:
        """Appends an event behind all that wait."""
        self._waiting.append(event)
        self._count(event, 1)

    def keep(self, left_of: Callable[[Received], Received | None]) -> None:
        """Puts what `left_of` gives in the place of each; None: it leaves."""
        given = [left_of(event) for event in self._waiting]
        self._waiting, self._rows, self._others = deque(), 0, 0
        for event in given:
            if event is not None:
                self.append(event)

    def waited_ms(self, now_ms: int) -> int:
        """How long the first batch waits already, by the clock that is given; 0 where none comes first."""
        first: Any = self._waiting[0] if self._waiting else None
        return max(0, now_ms - first.received_at_ms) if isinstance(first, batch.Batch) else 0

    def is_enough(self, max_rows: int) -> bool:
        """Whether nothing that may come would be taken together with what is here, or so many rows are here."""
        if not self._waiting or self._others or self._rows >= max_rows:
            return True
        first: Any = self._waiting[0]
        last: Any = self._waiting[-1]
        return bool(first.epoch != last.epoch)

    def take(self, max_rows: int, receiver_of: Callable[[Any], int | None]) -> Received:
        """What came first: joined with the batches that may go with it, at most so many rows. There is something."""
        first: Any = self._waiting.popleft()
        self._count(first, -1)
        taken: Any = first
        if isinstance(first, batch.Batch):
            parts = [self._cut(first, max_rows)]
            taken = batch.Batch.concat(parts + self._behind(first, max_rows - len(first), receiver_of))
        joined: Received = taken
        return joined

    def _behind(self, first: batch.Batch, room: int, receiver_of: Callable[[Any], int | None]) -> list[batch.Batch]:
        """Takes out what may go with the first, at most so many rows."""
        parts: list[batch.Batch] = []
        passed: list[Received] = []
        receiver = receiver_of(first)
        while room > 0 and self._waiting:
            each: Any = self._waiting[0]
            if not isinstance(each, batch.Batch) or each.epoch != first.epoch:
                break
            other = self._waiting.popleft()
            if receiver_of(each) != receiver:
                passed.append(other)
                continue
            self._count(each, -1)
            parts.append(self._cut(each, room))
            room -= len(each)
        self._waiting.extendleft(reversed(passed))
        return parts

    def _cut(self, whole: batch.Batch, rows: int) -> batch.Batch:
        """The first rows of a batch that was taken out; the others go back to the front."""
        if len(whole) <= rows:
            return whole
        rest: Any = whole.take(slice(rows, None))
        self._waiting.appendleft(rest)
        self._count(rest, 1)
        return whole.take(slice(rows))

    def _count(self, event: Any, sign: int) -> None:
        if isinstance(event, batch.Batch):
            self._rows += sign * len(event)
        else:
            self._others += sign


def check(max_rows: int, linger_ms: int) -> None:
    """Refuses what a caller cannot mean: raises InvalidArgument."""
    columns.check_unsigned("max_rows", max_rows, bits=64)
    columns.check_unsigned("linger_ms", linger_ms, bits=32)
    if max_rows < 1:
        raise errors.InvalidArgument(f"max_rows is {max_rows}; it must be at least 1")
