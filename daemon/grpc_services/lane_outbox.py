"""What is on its way out on a stream of many lanes.

Owns: that lanes take turns, what goes into one message, and the bound on what is not sent.
Does not own: lanes and writing (`subscribe_many`), and the bytes (`lane_messages`).
"""

from __future__ import annotations

import asyncio
import collections
import itertools

from daemon.topic.waiting_line import Waiter

# A message is full with so many bytes, but for one answer that is larger by itself.
MESSAGE_BYTES = 256 << 10
# What one lane may put into a message while others wait.
TURN_BYTES = 64 << 10
# With so many bytes not sent, of all lanes or of one, nothing more is handed out.
UNSENT_BYTES_MAX = 1 << 20
LANE_UNSENT_BYTES_MAX = 256 << 10
# Of those who wait for room so many are woken by a message that leaves: each may fill what has become free.
_WOKEN_BY_A_MESSAGE = 8


class Outbox:
    """Encoded answers by lane, those of one in their order. Used by all lanes of a stream, and by its one writer."""

    def __init__(self) -> None:
        self._answers: dict[int, collections.deque[bytes]] = {}
        """Of the lanes that have any, in the order of their turns."""
        self._lane_bytes: collections.Counter[int] = collections.Counter()
        self._unsent_bytes = 0
        self._filled = asyncio.Event()
        self._waiting: dict[Waiter, None] = {}

    def __bool__(self) -> bool:
        return bool(self._answers)

    def put(self, lane: int, answer: bytes) -> None:
        """Sends what must be sent, whether there is room or not."""
        self._answers.setdefault(lane, collections.deque()).append(answer)
        self._lane_bytes[lane] += len(answer)
        self._unsent_bytes += len(answer)
        self._filled.set()

    def takes(self, lane: int, waiter: Waiter) -> bool:
        """Whether the lane may send more now; else the waiter is notified when that may have become so."""
        if self._unsent_bytes < UNSENT_BYTES_MAX and self._lane_bytes[lane] < LANE_UNSENT_BYTES_MAX:
            return True
        self._waiting.setdefault(waiter)
        return False

    async def filled(self) -> None:
        """Returns when there is something to send."""
        while not self._answers:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> bytes:
        """The next message: of each lane in turn, until it is full or nothing is left."""
        taken: list[bytes] = []
        size_bytes = 0
        while self._answers and size_bytes < MESSAGE_BYTES:
            lane = next(iter(self._answers))
            room_bytes = MESSAGE_BYTES - size_bytes
            if taken and len(self._answers[lane][0]) > room_bytes:
                break
            size_bytes += self._take_turn(lane, taken, min(room_bytes, TURN_BYTES))
        self._unsent_bytes -= size_bytes
        self._wake()
        return b"".join(taken)

    def _take_turn(self, lane: int, taken: list[bytes], most_bytes: int) -> int:
        """Takes what the lane has, at least one answer, then as much as fits; its bytes. The next turn is another's."""
        answers = self._answers.pop(lane)
        size_bytes = 0
        while answers and (not size_bytes or size_bytes + len(answers[0]) <= most_bytes):
            taken.append(answers.popleft())
            size_bytes += len(taken[-1])
        if answers:
            self._answers[lane] = answers
            self._lane_bytes[lane] -= size_bytes
        else:
            del self._lane_bytes[lane]
        return size_bytes

    def _wake(self) -> None:
        """There is room again. When nothing is left to leave, nobody else would wake those who wait."""
        woken = list(itertools.islice(self._waiting, _WOKEN_BY_A_MESSAGE) if self._answers else self._waiting)
        for waiter in woken:
            del self._waiting[waiter]
            waiter.notify()
