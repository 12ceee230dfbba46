"""What is on its way out on one KEY_SHARED stream: messages, plans, and what was taken back, in one order; and marks,
which tell that what stands before them is out.

Owns: that order, joining messages that follow each other, and when there is too much.
Does not own: what is handed out to whom (`sharing_rounds`), waiting for it and what consumers are called
(`key_shared_stream`), and the wire.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses

import numpy as np

from daemon.core.index.positions import KeyedRows
from daemon.errors import InvariantViolated
from storage_backends.formats.row_columns import U32

# With as many rows the stream is full until they were taken; nor are more of them one message.
ROWS_MAX = 10_000


@dataclasses.dataclass(eq=False, slots=True)
class Sent:
    """Rows that were sent to consumers, or taken back from them: `numbers`, u32[n] of each part, the dispatcher numbers
    of these.
    """

    taken_back: bool
    rows: list[KeyedRows]
    numbers: list[U32]
    count: int

    def columns(self) -> tuple[KeyedRows, U32]:
        return KeyedRows.concat(self.rows), np.concatenate(self.numbers)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The answer to a plan. `sent` ends when it is out."""

    request_id: int
    numbers: U32
    sent: asyncio.Future[None]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Mark:
    """A place in the order. `passed` ends when all that stands before it is out."""

    passed: asyncio.Future[None]


class Outbox:
    """What is on its way out on one KEY_SHARED stream, in order. `rows`: of messages that were not taken out."""

    def __init__(self) -> None:
        self.rows = 0
        self._items: collections.deque[Sent | Plan | Mark] = collections.deque()
        self._ended: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_full(self) -> bool:
        return self.rows >= ROWS_MAX

    def send(self, rows: KeyedRows, numbers: U32) -> None:
        """Rows are at consumers from now on."""
        self.rows += len(rows)
        self._add(rows, numbers, taken_back=False)

    def take_back(self, rows: KeyedRows, numbers: U32) -> None:
        """Rows are at consumers no longer."""
        self._add(rows, numbers, taken_back=True)

    def _add(self, rows: KeyedRows, numbers: U32, *, taken_back: bool) -> None:
        last = self._items[-1] if self._items else None
        if isinstance(last, Sent) and last.taken_back == taken_back and last.count + len(rows) <= ROWS_MAX:
            last.rows.append(rows)
            last.numbers.append(numbers)
            last.count += len(rows)
        else:
            self._items.append(Sent(taken_back, [rows], [numbers], len(rows)))

    def plan(self, request_id: int, numbers: U32) -> asyncio.Future[None]:
        """The answer to a plan; the future ends when it is out."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            sent.set_exception(self._ended)
        else:
            self._items.append(Plan(request_id, numbers, sent))
        return sent

    def mark(self) -> asyncio.Future[None]:
        """Ends when everything that is in it now is out."""
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            passed.set_result(None)
        else:
            self._items.append(Mark(passed))
        return passed

    def pass_marks(self) -> None:
        """What was taken out is out: marks that come first now are passed."""
        while self._items and isinstance(mark := self._items[0], Mark):
            self._items.popleft()
            _end(mark.passed)

    def take(self) -> Sent | Plan:
        """Takes out what comes first; no mark does."""
        item = self._items.popleft()
        if isinstance(item, Plan):
            self._items.appendleft(Mark(item.sent))
        elif isinstance(item, Sent):
            self.rows -= 0 if item.taken_back else item.count
        else:
            raise InvariantViolated("a mark is taken for something that goes out")
        return item

    def end(self, error: Exception) -> None:
        """Nothing more is taken out: who waits for a plan gets the error."""
        self._ended = error
        for item in self._items:
            if isinstance(item, Plan):
                _end(item.sent, error)
            elif isinstance(item, Mark):
                _end(item.passed)
        self._items.clear()
        self.rows = 0


def _end(waited_for: asyncio.Future[None], error: Exception | None = None) -> None:
    """Who waited may have gone away."""
    if waited_for.done():
        return
    if error is None:
        waited_for.set_result(None)
    else:
        waited_for.set_exception(error)
